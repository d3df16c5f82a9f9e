from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from stretto.learning.recipe import PRESETS, DistillConfig, LossConfig, RlRecipe, TeacherConfig
from tests.flow.policies import recipe


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_written_down_in_full(preset: str) -> None:
    """A run's recipe on the disk says every value, and reads as the same one."""
    loss = LossConfig(preset=preset)
    assert LossConfig.model_validate_json(loss.model_dump_json()) == loss
    assert LossConfig(**loss.model_dump()) == loss


def test_what_the_recipe_says_comes_before_the_preset() -> None:
    assert LossConfig(preset="gspo", clip_high=1e-3).clip_low == 3e-4
    assert LossConfig(preset="gspo", policy="ppo").clip_high == 0.2, "bounds of a policy belong to it"
    assert LossConfig(preset="decoupled", correction="tis").tis_cap == 2.0
    assert LossConfig(preset="decoupled").icepop_range == (0.0, 5.0)


@pytest.mark.parametrize(
    ("loss", "train", "message"),
    [
        ({"proximal": "recompute"}, {}, "loss.proximal 'recompute' .* set train.minibatches to 2 or more"),
        ({"correction": "tis"}, {"minibatches": 2}, "correction 'tis' .* set proximal = \"recompute\""),
        ({"tis_cap": 3.0}, {}, "tis_cap belongs to correction 'tis'"),
        ({"icepop_range": (0.5, 2.0)}, {}, "icepop_range belongs to correction 'icepop'"),
        ({"preset": "decoupled", "icepop_range": (2.0, 0.5)}, {"minibatches": 2}, "a lower and a higher ratio"),
        ({"preset": "gpso"}, {}, "preset: no 'gpso' .did you mean 'gspo'"),
        ({"advantage": "grop"}, {}, "advantage: no 'grop' .did you mean 'grpo'"),
        ({"policy": ["ppo"]}, {}, "policy"),
        ({"correction": {}}, {}, "correction"),
    ],
)
def test_a_setting_that_would_change_nothing_is_refused(
    loss: dict[str, Any], train: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(loss=loss, **{f"train__{name}": value for name, value in train.items()})


def test_what_local_runs_and_own_engines_do_not_use_is_refused() -> None:
    for changes, message in (
        ({"runtime": {"address": "10.0.0.1:6379"}}, "runtime.address: that of a Ray cluster; start with --runtime ray"),
        ({"rollout__canary": 0.1}, "canary is for servers at an address; leave it out"),
        ({"rollout__address": 5}, "address"),
    ):
        with pytest.raises(ValidationError, match=message):
            recipe(**changes)


def test_a_lease_longer_than_the_watchdog_waits_is_refused() -> None:
    recipe(failures={"lease_s": 600.0})
    with pytest.raises(ValidationError, match=r"lease_s: 900 s exceeds stuck_s, 600 s, .*; lower lease_s or raise"):
        recipe(failures={"lease_s": 900.0})
    recipe(failures={"lease_s": 900.0, "stuck_s": 900.0})


def test_a_window_without_room_for_a_step_is_refused() -> None:
    recipe(staleness=2, train__prompts=8, window=17)
    with pytest.raises(ValidationError, match=r"window 18 .* at most 17"):
        recipe(staleness=2, train__prompts=8, window=18)
    with pytest.raises(ValidationError, match="at most 1"):
        recipe(staleness=0, train__prompts=8, window=2)


def test_replay_of_the_policys_own_routes_needs_several_updates() -> None:
    """With one, they are those that it chooses anyway."""
    with pytest.raises(ValidationError, match=r"replay 'r2' .* set train.minibatches"):
        recipe(replay="r2")
    recipe(replay="r2", train__minibatches=2)


def test_a_channel_that_cannot_carry_the_weights_is_refused() -> None:
    assert recipe(channel="gloo").channel == "gloo" and recipe().channel == "store"
    with pytest.raises(ValidationError, match="'store' or 'gloo'"):
        recipe(channel="nccl")
    with pytest.raises(ValidationError, match=r"servers read the weights from the run folder; set channel to 'store'"):
        recipe(channel="gloo", rollout__engine="stretto", rollout__address="http://127.0.0.1:1")


def test_teachers_need_somebody_who_asks_them() -> None:
    with pytest.raises(ValidationError, match="teachers: 'grpo' asks none"):
        recipe(teachers={"maths": "runs/maths"})
    with pytest.raises(ValidationError, match=r"teachers\.policy: the name is taken"):
        recipe(teachers={"policy": "runs/maths"}, loss__advantage="mine.py:distilled")


TEACHERS = {"digits": {"checkpoint": "a"}, "letters": {"checkpoint": "b"}}


@pytest.mark.parametrize(
    ("distill", "changes", "said"),
    [
        ({"teachers": {}}, {}, r"distill: no teachers; name them in"),
        (
            {"merge_scale": 0.5, "teachers": {"all": {"checkpoint": "a", "domains": ["*"]}}},
            {},
            "distill.merge_scale: one teacher only, and a merge needs two; set it to 0",
        ),
        (
            {"merge_scale": 0.5, "teachers": {**TEACHERS, "letters": {"checkpoint": "a", "subnet": "corner"}}},
            {},
            "distill.merge_scale: teacher 'letters' is the Subnet corner, whose weights cannot be added",
        ),
        ({"teachers": {"digits": {}}}, {}, "name a checkpoint, or the url of a server"),
        ({"teachers": {**TEACHERS, "maths": {"checkpoint": "c"}}}, {}, "distill.teachers.maths: no source 'maths'; name some of"),
        (
            {"teachers": {"a": {"checkpoint": "a", "domains": ["digits", "leters"]}}},
            {},
            r"distill.teachers.a: no source 'leters' \(did you mean 'letters'\?\)",
        ),
        ({"teachers": {"digits": {"checkpoint": "a"}}}, {}, "distill: source 'letters' has no teacher; name it in"),
        (
            {"teachers": {**TEACHERS, "both": {"checkpoint": "c", "domains": ["digits"]}}},
            {},
            "distill: source 'digits' is named by teachers.digits and teachers.both; keep one of them",
        ),
        ({"untaught": ["digits"]}, {}, "'digits' is named by teachers.digits and untaught"),
        ({"teachers": {"digits": {"checkpoint": "a"}}, "untaught": ["letters"]}, {}, "without distill.outcome_weight"),
        ({"untaught": ["x"], "outcome_weight": 1.0}, {}, "distill.untaught: no source 'x'"),
        ({"teachers": {**TEACHERS, "digits": {"url": "http://x"}}}, {}, 'set distill.form = "sampled"'),
        (
            {"form": "sampled", "teachers": {**TEACHERS, "digits": {"url": "http://teacher:80a0"}}},
            {},
            "'http://teacher:80a0' is not of the form http://HOST:PORT",
        ),
        (
            {"form": "sampled", "teachers": {**TEACHERS, "digits": {"url": "http://x/v1/completions/"}}},
            {},
            "'http://x/v1/completions' is an endpoint; give the address of its server",
        ),
        (
            {"form": "sampled", "teachers": {**TEACHERS, "digits": {"url": "http://x/proxy/chat/completions"}}},
            {},
            "'http://x/proxy/chat/completions' is an endpoint; give the address of its server",
        ),
        ({"teachers": {"digits": {"url": "http://x", "subnet": "half"}}}, {}, "url: subnet and residence are of"),
        ({"form": "sampled", "entropy_aware": 1.0}, {}, "distill.entropy_aware: form 'sampled' does not know"),
        ({}, {"rollout__temperature": 0.7}, "rollout.temperature 0.7: distillation compares distributions at 1"),
        ({}, {"loss__normaliser": "sequence"}, "loss.normaliser would change nothing: distill.balance"),
        ({}, {"loss__clip_high": 0.3}, "loss.clip_high would change nothing: form 'full'"),
        ({"form": "sampled"}, {"loss__advantage": "rloo"}, "loss.advantage would change nothing: distill.outcome_weight"),
        ({"outcome_weight": 1.0}, {"rollout__group": 1}, "rollout.group 1: a reward is compared"),
        ({}, {"rollout__group": 1, "loss__drop_uniform": True}, "rollout.group 1: a reward is compared"),
    ],
)  # fmt: skip
def test_what_distillation_cannot_do_is_one_line(distill: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    sources = {"digits": {"kind": "strings"}, "letters": {"kind": "strings"}}
    with pytest.raises(ValidationError, match=said) as error:
        recipe(sources=sources, distill={"teachers": TEACHERS, **distill}, **changes)
    assert error.value.error_count() == 1


def test_a_teachers_url_may_have_a_path() -> None:
    urls = {"http://x:1": "http://x:1", "http://x:1//v1": "http://x:1", "https://x/proxy/v1/": "https://x/proxy"}
    assert {url: TeacherConfig(url=url).url for url in urls} == urls


def test_a_teacher_has_something_to_say_of_every_group() -> None:
    sources = {"digits": {"kind": "strings"}, "letters": {"kind": "strings"}}
    made = recipe(sources=sources, distill={"teachers": TEACHERS}, rollout__group=1)
    assert not made.loss.drop_uniform and made.distill is not None
    assert made.distill.teacher_of() == {"digits": "digits", "letters": "letters"}
    assert RlRecipe.model_validate(made.model_dump(mode="json")) == made, "as it is read again from a run's folder"
    assert recipe(sources=sources, distill={"teachers": TEACHERS}, loss__drop_uniform=True).loss.drop_uniform
    for preset in PRESETS:
        recipe(
            sources=sources,
            distill={"teachers": TEACHERS, "form": "sampled"},
            loss__preset=preset,
            train__minibatches=2,
        )
    with pytest.raises(ValidationError, match=r"rollout\.group 1"):
        recipe(rollout__group=1)


def test_objects_and_mappings_make_the_same_recipe() -> None:
    sources = {"digits": {"kind": "strings"}, "letters": {"kind": "strings"}}
    tree = {"teachers": {"all": {"checkpoint": "a", "domains": ["*"]}}}
    made = recipe(sources=sources, distill=tree)
    objects = DistillConfig(teachers={"all": TeacherConfig(checkpoint="a", domains=("*",))})
    assert made == recipe(sources=sources, distill=objects) == recipe(sources=sources, distill=dict(objects))
    assert made == recipe(sources=sources, distill=objects, loss=LossConfig())
    assert made == recipe(sources=sources).replace(distill=objects)
    kept = LossConfig(drop_uniform=True)
    assert recipe(sources=sources, distill=objects, loss=kept).loss.drop_uniform, "as it was asked for"


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        (
            {"digit": {"diversity": "words"}},
            r"rewards\.digit: no such source; did you mean 'digits'\?|rewards\.digit: no such",
        ),
        ({"digits": {}}, "the table changes nothing"),
        ({"digits": {"same_at": 0.3}}, "the table changes nothing"),
        ({"digits": {"format": "("}}, r"format '\(' is not a regular expression"),
        ({"digits": {"diversity": "sound"}}, "'words', 'characters' or 'meaning'"),
    ],
)
def test_rewards_that_cannot_be_are_refused(rewards: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        recipe(rewards=rewards)


def test_ranks_divide_rows_and_ep_divides_ranks() -> None:
    assert recipe(trainer__ranks=2, trainer__ep=2).trainer.ranks == 2
    with pytest.raises(
        ValidationError, match=r"train.micro_rows 2 cannot be divided among trainer.ranks 4; use a multiple"
    ):
        recipe(trainer__ranks=4)
    with pytest.raises(ValidationError, match=r"ep 3 does not divide the number of ranks, 2; choose a divisor"):
        recipe(trainer__ranks=2, trainer__ep=3)


def test_a_setting_of_the_pool_of_agents_leaves_their_largest_number() -> None:
    assert recipe(runtime={"agents": {"utilisation": 0.5}}).runtime.agents.max == 1
