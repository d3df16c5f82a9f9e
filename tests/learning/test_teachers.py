"""Teachers in the trainer: who says what of which sample, and that nothing else changes the gradient."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.trajectory import Group, Trajectory
from stretto.engine.async_engine import AsyncEngine
from stretto.engine.engine import Engine
from stretto.engine.request import EngineConfig
from stretto.learning.algorithms import unroll
from stretto.learning.batch import pack
from stretto.learning.passes import place
from stretto.learning.recipe import LossConfig, RlRecipe
from stretto.learning.samples import load_group, store_group
from stretto.learning.teachers import RemoteTeacher, as_read, give_lessons, open_teachers, target_logprobs
from stretto.learning.trainer import TrainerRole
from stretto.learning.weights import fetch
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.parallel import join
from stretto.model.transformer import Context
from stretto.ops.matmul import PLAIN
from stretto.runtime.store import FolderStore
from stretto.server.elastic import ServedModel
from stretto.server.server import ServeSettings
from stretto.text.tokenizer import load_tokenizer, train_tokenizer
from tests.flow.agents import tokenizer
from tests.flow.lessons import taught, two_sources
from tests.flow.policies import checkpoint, network
from tests.learning.lessons import FORMS, WORDS, difference, samples, stepped, told, twin
from tests.learning.lessons import network as spoken
from tests.server.live import live
from tests.web import serving

SAME = 2e-6
"""Of a gradient's largest entry, what another order of summation may make: a few dozen fp32 roundings of 6e-8."""
ALL = (*(pytest.param(form, marks=pytest.mark.slow) if form in FORMS[1:] else form for form in FORMS), "sampled")
"""Forms that differ from the first by the loss alone, which test_distillation holds: those are slow."""


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "start")


@pytest.fixture
def teachers(tmp_path: Path) -> dict[str, Path]:
    return {name: checkpoint(tmp_path / name, seed) for seed, name in ((1, "digits"), (2, "letters"))}


def lessons_by_target(plan: RlRecipe, start: Path, made: Any) -> tuple[list[Any], Tensor]:
    """The samples, and log q of all their targets by whoever teaches them."""
    samples = unroll(made)
    passes = [place(batch, join("cpu"), PLAIN, replays=False) for batch in pack(samples, 48, 2, with_routes=False)]
    assert plan.distill is not None
    scorers = open_teachers(plan, start, join("cpu"), PLAIN)
    give_lessons(samples, passes, scorers, plan.distill, join("cpu"))
    flat = [each for group in samples for each in group]
    found = {}
    for each in passes:
        for lesson in each.lessons:
            for at, value in zip(lesson.places_M.tolist(), target_logprobs(lesson, each).tolist(), strict=True):
                number = int(each.mine["samples_BT"].flatten()[at])
                found[number, int(each.mine["positions_BT"].flatten()[at])] = value
    values = [found[each.number, at] for each in flat for at in np.flatnonzero(each.mask_S).tolist()]
    return flat, torch.tensor(values)


def scored_alone(folder: Path, tokens: np.ndarray, mask_S: np.ndarray) -> Tensor:
    """log q of the targets of one sequence, the plain way."""
    model = read_checkpoint(folder).model
    ids = torch.from_numpy(tokens).long()[None]
    logp_SV = model.logits(ids[:, :-1], model.config.full(), Context.plain(ids[:, :-1]))[0].log_softmax(-1)
    return logp_SV.gather(-1, ids[0, 1:, None])[:, 0][torch.from_numpy(mask_S)]


@pytest.mark.parametrize(("form", "residence"), [("full", "swapped"), ("sampled", "resident")])
def test_each_source_is_scored_by_its_own_teacher(
    tmp_path: Path, start: Path, teachers: dict[str, Path], form: str, residence: str
) -> None:
    tables = {name: {"checkpoint": str(folder), "residence": residence} for name, folder in teachers.items()}
    samples, values = lessons_by_target(taught(tables, {"form": form}), start, two_sources())
    expected = [scored_alone(teachers[each.source], each.tokens, each.mask_S) for each in samples]
    assert torch.allclose(values, torch.cat(expected), atol=1e-5)


def test_a_teacher_reads_its_own_prompt(tmp_path: Path, start: Path, teachers: dict[str, Path]) -> None:
    """Longer than the student's, and than its rows; through the file; and for the teacher that it is for alone."""
    rng = np.random.default_rng(0)
    own = rng.integers(0, 31, 50).astype(np.int32)
    made = [replace(each, prompts={"letters": own}) if n % 2 else each for n, each in enumerate(two_sources())]
    made = [load_group(store_group(FolderStore(tmp_path / "groups"), each).location) for each in made]
    samples, values = lessons_by_target(taught(teachers), start, made)
    expected = []
    for each in samples:
        tokens, mask_S = each.tokens, each.mask_S
        if each.source == "letters":
            rest = len(each.trajectory.segments[0].tokens)
            tokens = np.concatenate([own, tokens[rest:]])
            mask_S = np.concatenate([np.zeros(len(own) - 1, bool), mask_S[rest - 1 :]])
            read = as_read(each, "letters", 0)
            assert np.array_equal(read.tokens, tokens) and np.array_equal(read.mask_S, mask_S)
            assert as_read(each, "digits", 0).tokens is each.tokens
        expected.append(scored_alone(teachers[each.source], tokens, mask_S))
    assert torch.allclose(values, torch.cat(expected), atol=1e-5)


def test_part_of_a_checkpoint_teaches_the_rest(tmp_path: Path, start: Path) -> None:
    """The full network and a Subnet of it, by the same folder: what that Subnet would say by itself."""
    part = {"checkpoint": str(start), "subnet": "experts=4,top_k=1", "domains": ["digits", "letters"]}
    samples, values = lessons_by_target(taught({"part": part}), start, two_sources())
    model = read_checkpoint(start).model
    subnet = model.config.subnet(experts=4, top_k=1)
    for each, some in zip(samples, values.split([int(each.mask_S.sum()) for each in samples]), strict=True):
        ids = torch.from_numpy(each.tokens).long()[None]
        logp_SV = model.logits(ids[:, :-1], subnet)[0].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        assert torch.allclose(some, logp_SV[torch.from_numpy(each.mask_S)], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ALL)
def test_nothing_but_what_is_said_changes_the_gradient(
    tmp_path: Path, start: Path, teachers: dict[str, Path], form: str
) -> None:
    """One teacher under two names is one; the order of names is nothing; nor is how samples are laid out in passes."""
    table = {"form": form, "kl_floor": 0.0}
    one = {"both": {"checkpoint": str(teachers["digits"]), "domains": ["digits", "letters"]}}
    two = {name: str(teachers["digits"]) for name in ("digits", "letters")}
    report, gradient = stepped(taught(one, table), start, tmp_path / "one", two_sources())
    assert report.scalars["optim/grad_norm"] > 1e-3
    _, other = stepped(taught(two, table), start, tmp_path / "two", two_sources())
    assert difference(gradient, other) < SAME
    _, gradient = stepped(taught(teachers, table), start, tmp_path / "forth", two_sources())
    _, other = stepped(taught(dict(reversed(teachers.items())), table), start, tmp_path / "back", two_sources())
    assert difference(gradient, other) == 0.0
    for number, (rows, seq_len) in enumerate(((1, 48), (2, 96), (8, 64))):
        plan = taught(teachers, table, train__micro_rows=rows, train__seq_len=seq_len)
        _, other = stepped(plan, start, tmp_path / f"{number}", two_sources())
        assert difference(gradient, other) < SAME


@pytest.mark.parametrize("form", ALL)
def test_a_teacher_that_is_the_student_moves_nothing(tmp_path: Path, start: Path, form: str) -> None:
    """Its source's share of the gradient is rounding error, and so is its KL; the other teacher's are not.

    The trainer and the teacher run matrix products of different shapes. Some processors (AVX2) then add up in different orders, so
    the two log-probabilities differ by rounding errors, and so does the KL of a token, Σ_v π_v·(log π_v − log q_v), from 0:

    - Two subtractions (the maximum, the logarithm of the sum of V exponentials) round each logarithm by at most ε/2·|log π_v|
      each. Over both networks: 2ε·Σ_v π_v·|log π_v|, at most 2ε·log V.
    - The sum of V exponentials, added up pairwise, has a relative error of ε/2·log2 V. Over both networks: ε·log2 V.
    """
    other = checkpoint(tmp_path / "other", 1)
    plan = taught({"digits": start, "letters": other}, {"form": form, "kl_floor": 0.0}, replay="off")
    report, _ = stepped(plan, start, tmp_path, two_sources())
    assert report.scalars["distill/share/digits"] < 1e-5 < 0.99 < report.scalars["distill/share/letters"]
    vocab_size = network().config.vocab_size
    rounding = torch.finfo(torch.float32).eps * (2 * math.log(vocab_size) + math.log2(vocab_size))
    assert abs(report.scalars["distill/kl/digits"]) < rounding < 1e-2 < report.scalars["distill/kl/letters"]


def test_the_students_own_weights_are_refused(tmp_path: Path, start: Path) -> None:
    """By name if they are the same file, by what they say if they only nearly are."""
    other = checkpoint(tmp_path / "other", 1)
    with pytest.raises(
        UserError, match=r"^distill\.teachers\.digits: .*/start holds the student's own weights"
    ) as error:
        TrainerRole(taught({"digits": start, "letters": other}), tmp_path, start, ranks=join("cpu"))
    assert "\n" not in str(error.value)
    nearly = network()
    with torch.no_grad():
        nearly.embedding.weight[0, 0] += 1e-4
    write_checkpoint(tmp_path / "nearly", nearly, nearly.config)
    plan = taught({"digits": tmp_path / "nearly", "letters": other})
    with pytest.raises(
        UserError, match=r"^distill\.teachers\.digits: differs from the student by .* of source 'digits'"
    ):
        stepped(plan, start, tmp_path, two_sources())
    stepped(
        taught({"digits": tmp_path / "nearly", "letters": other}, {"kl_floor": 0.0}), start, tmp_path, two_sources()
    )


def test_missing_and_foreign_teachers_are_refused(tmp_path: Path, start: Path, teachers: dict[str, Path]) -> None:
    def refused(said: str, **changes: Any) -> None:
        tables = {name: {"checkpoint": str(folder)} for name, folder in teachers.items()}
        tables["digits"] |= changes
        with pytest.raises(UserError, match=said) as error:
            TrainerRole(taught(tables), tmp_path, start, ranks=join("cpu"))
        assert "\n" not in str(error.value)

    refused(
        r"^distill\.teachers\.digits\.checkpoint: .*nowhere: config\.json: no such file",
        checkpoint=str(tmp_path / "nowhere"),
    )
    refused(r"^distill\.teachers\.digits\.subnet half: unknown preset", subnet="half")
    wide = network()
    config = wide.config.replace(vocab_size=40)
    state = wide.state_dict()
    state = {name: torch.cat([value, value[:9]]) if len(value) == 31 else value for name, value in state.items()}
    write_checkpoint(tmp_path / "wide", state, config)
    refused(r"^distill\.teachers\.digits: a vocabulary of 40, the student's is 31", checkpoint=str(tmp_path / "wide"))


@pytest.mark.parametrize(
    "change",
    [
        {"form": "full", "balance": "gap"},
        pytest.param({"form": "sampled", "balance": "sigma"}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, start: Path, teachers: dict[str, Path], change: dict[str, Any]
) -> None:
    """Weights of sources depend on what they were before."""
    plan = taught(teachers, change, optim__lr=1e-3)
    refs = [[store_group(FolderStore(tmp_path / f"{step}"), each) for each in two_sources(step)] for step in range(3)]
    roles = [TrainerRole(plan, tmp_path / name, start, ranks=join("cpu"), stage="distill") for name in ("one", "two")]
    for each in roles:
        reports = [each.step(refs[step], step) for step in range(2)]
    first, second = (report.scalars for report in reports)
    assert second["distill/kl/digits"] != first["distill/kl/digits"] > 0.01
    assert 0 < second["distill/share/digits"] < 1 and "policy/ratio_mean" in second
    roles[1].save({"next": 7})
    again = TrainerRole(plan, tmp_path / "two", start, ranks=join("cpu"), stage="distill")
    assert again.resume() == {"next": 7}
    ended = [each.step(refs[2], 2) for each in (roles[0], again)]
    scalars = [{name: value for name, value in each.scalars.items() if "time/" not in name} for each in ended]
    assert scalars[0] == scalars[1]
    states = []
    for each in (roles[0], again):
        each.copy_weights()
        version = asyncio.run(each.publish())
        assert version is not None
        states.append(fetch(version))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    again.write(tmp_path / "result")
    lineage = read_checkpoint(tmp_path / "result").lineage
    assert lineage is not None and lineage.stage == "distill"


@pytest.mark.parametrize("form", ALL)
def test_the_student_comes_nearer(tmp_path: Path, start: Path, teachers: dict[str, Path], form: str) -> None:
    """The sign of everything, with stale samples: what is sampled stays as the first student sampled it."""
    plan = taught(teachers, {"form": form}, optim__lr=3e-3, train__steps=20, replay="off")
    trainer = TrainerRole(plan, tmp_path / "run", start, ranks=join("cpu"))
    kls = []
    for step in range(6):
        scalars = trainer.step(
            [store_group(FolderStore(tmp_path / "groups"), each) for each in two_sources()], step
        ).scalars
        kls.append(scalars["distill/kl/digits"] + scalars["distill/kl/letters"])
    assert kls[-1] < 0.8 * kls[0] and (np.diff(kls) < 0).all(), kls


@pytest.mark.slow
def test_rewards_are_added_where_they_are_asked_for(tmp_path: Path, start: Path, teachers: dict[str, Path]) -> None:
    """The gradient of both is the sum of theirs, in every form; a source without a teacher learns by them alone."""
    only = {"letters": teachers["letters"]}
    for form in ("full", "sampled"):
        plans = {
            "alone": taught(teachers, {"form": form}),
            "both": taught(teachers, {"form": form, "outcome_weight": 0.5}),
            "twice": taught(teachers, {"form": form, "outcome_weight": 1.0}),
            "untaught": taught(only, {"form": form, "outcome_weight": 1.0, "untaught": ["digits"]}),
        }
        found = {name: stepped(plan, start, tmp_path / form / name, two_sources()) for name, plan in plans.items()}
        grads = {name: gradient for name, (_, gradient) in found.items()}
        halves = {name: (grads["alone"][name] + grads["twice"][name]) / 2 for name in grads["alone"]}
        assert difference(grads["both"], halves) < SAME < 1e-2 < difference(grads["both"], grads["alone"])
        assert "distill/kl/digits" not in found["untaught"][0].scalars
        assert difference(grads["untaught"], grads["twice"]) > 1e-2


def test_tokens_that_an_algorithm_leaves_out_are_not_taught_either(
    tmp_path: Path, start: Path, teachers: dict[str, Path]
) -> None:
    """Nor are truncated answers with the overlong filter; weights of the algorithm's own are refused."""
    head = "import numpy as np\nfrom stretto.learning.algorithms import Credit\n\n\n"
    for name, options in (
        ("last", "mask_S=np.arange(one.num_inputs) == one.num_inputs - 1"),
        ("own", "weights_S=0.25"),
    ):
        body = f"def {name}(groups):\n    return [[Credit(one.reward, {options}) for one in each] for each in groups]\n"
        (tmp_path / f"{name}.py").write_text(head + body)

    def weights(made: list[Group], **loss: Any) -> list[np.ndarray]:
        plan = taught(teachers, {"outcome_weight": 1.0}).replace(loss=LossConfig(drop_uniform=False, **loss))
        trainer = TrainerRole(plan, tmp_path / "run", start, ranks=join("cpu"))
        return [each.weights_S for each in trainer._credits(unroll(made))]

    made = two_sources()
    masked = weights(made, advantage=f"{tmp_path / 'last.py'}:last")
    assert all(each[-1] > 0 and not each[:-1].any() for each in masked)
    assert sum(each.sum() for each in masked) == pytest.approx(1.0)
    first = replace(made[0].trajectories[0], finish_reason="length")
    filtered = weights(
        [replace(made[0], trajectories=(first, *made[0].trajectories[1:])), *made[1:]], overlong_filter=True
    )
    assert not filtered[0].any() and all(each.any() for each in filtered[1:])
    assert sum(each.sum() for each in filtered) == pytest.approx(1.0)
    with pytest.raises(UserError, match=r"own: gives weights, and distill\.balance is in their place; leave weights_S"):
        weights(made, advantage=f"{tmp_path / 'own.py'}:own")


def test_short_answers_are_heard_beside_long_ones(tmp_path: Path, start: Path, teachers: dict[str, Path]) -> None:
    """One source answers in a single token: without balance it is next to nothing of the gradient."""

    def first_token(sample: Trajectory) -> Trajectory:
        prompt, answer = sample.segments
        cut = {name: getattr(answer, name)[:1] for name in ("tokens", "logprobs", "versions")}
        return replace(sample, segments=(prompt, replace(answer, **cut)))

    made = [
        each if number % 2 else replace(each, trajectories=tuple(map(first_token, each.trajectories)))
        for number, each in enumerate(samples(longest=40))
    ]
    shares = {}
    for balance in ("none", "sequence", "tokens"):
        plan = taught(teachers, {"balance": balance}, replay="off", rollout__max_tokens=40, train__seq_len=64)
        report, _ = stepped(plan, start, tmp_path / balance, made)
        shares[balance] = report.scalars["distill/share/digits"]
    assert shares["none"] < 0.15 and all(0.3 < shares[name] < 0.7 for name in ("sequence", "tokens")), shares


def test_the_policy_scores_beforehand_only_where_a_taught_source_is_new(
    tmp_path: Path, start: Path, teachers: dict[str, Path]
) -> None:
    """An untaught one is never anything else."""
    plan = taught({"letters": teachers["letters"]}, {"outcome_weight": 1.0, "untaught": ["digits"]})
    trainer = TrainerRole(plan, tmp_path / "run", start, ranks=join("cpu"))
    digits, letters = two_sources()[::2], two_sources()[1::2]
    for step, (made, scores) in enumerate(
        ((digits * 2, True), (digits * 2, False), (letters * 2, True), (letters * 2, False))
    ):
        refs = [store_group(FolderStore(tmp_path / f"{step}-{number}"), each) for number, each in enumerate(made)]
        assert ("routes/flips" in trainer.step(refs, step).scalars) is scores, step


def test_a_teacher_with_other_ids_says_the_same_of_the_same_text(tmp_path: Path) -> None:
    """The network and tokenizer of a teacher with all ids in another order: the same gradient, in spans; and the student's own
    teaches nothing, which is refused where that is a mistake."""
    words = train_tokenizer(iter([" ".join(WORDS)] * 20), 262)
    start, teacher = (spoken(tmp_path / name, seed, words) for seed, name in enumerate(("start", "teacher")))
    others = {each: twin(each, tmp_path / f"{each.name}-twin", 5) for each in (start, teacher)}

    def gradient(who: Path, made: list[Group], **distill: Any) -> dict[str, Tensor]:
        plan = taught({"one": {"checkpoint": str(who), "domains": ["*"]}}, {"form": "sampled", **distill}, replay="off")
        return stepped(plan, start, tmp_path / who.name, made)[1]

    alike = gradient(teacher, told(words, {}))
    made = told(words, {"one": load_tokenizer(others[teacher])})
    assert difference(alike, gradient(others[teacher], made)) < 5 * SAME
    same = gradient(others[start], made, kl_floor=0.0)
    assert max(float(grad.abs().max()) for grad in same.values()) < 1e-6 * max(
        float(g.abs().max()) for g in alike.values()
    )
    with pytest.raises(
        UserError, match=r"^distill\.teachers\.one: differs from the student by .* is it the student itself"
    ):
        gradient(others[start], made)
    with pytest.raises(
        UserError, match=r"its tokenizer gives other ids than the student's: form 'full' compares tokens"
    ):
        gradient(others[start], made, form="full")


@contextmanager
def odd(*replies: tuple[int, Any]) -> Iterator[str]:
    """A server that gives ``replies`` in turn, and the last of them again and again; yields its address."""
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "some-model"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(*(left.pop(0) if len(left) > 1 else left[0]))

        def _answer(self, status: int, tree: Any) -> None:
            body = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    with serving(Handler) as url:
        yield url


@pytest.mark.slow
def test_a_server_teaches_as_its_network_here_would(tmp_path: Path, start: Path, teachers: dict[str, Path]) -> None:
    """Ours, over a socket: the same log-probabilities, the same gradient."""
    model = read_checkpoint(teachers["digits"]).model
    service = AsyncEngine(Engine(model, None, EngineConfig(num_pages=64, page_size=8, max_batch=8))).start()
    served = ServedModel("far", model.config, {}, None, max_len=128)
    try:
        with live(service, served, ServeSettings()) as (url, _):
            tables = {"digits": {"url": url}, "letters": {"checkpoint": str(teachers["letters"])}}
            far = taught(tables, {"form": "sampled"})
            samples, values = lessons_by_target(far, start, two_sources())
            expected = [scored_alone(teachers[each.source], each.tokens, each.mask_S) for each in samples]
            assert torch.allclose(values, torch.cat(expected), atol=1e-4)
            _, gradient = stepped(far, start, tmp_path / "far", two_sources())
    finally:
        service.close()
    _, other = stepped(taught(teachers, {"form": "sampled"}), start, tmp_path / "here", two_sources())
    assert difference(gradient, other) < 1e-4


@pytest.mark.slow
def test_servers_that_cannot_teach_are_refused(tmp_path: Path, start: Path, teachers: dict[str, Path]) -> None:
    def reply(num: int, **changes: Any) -> Any:
        """As if ``num`` tokens were asked for."""
        table = {"tokens": ["x"] * num, "token_logprobs": [None, *[-1.0] * num]} | changes
        return {"choices": [{"logprobs": table}], "usage": {"prompt_tokens": num}}

    (group, *_) = two_sources()
    (sample, *_) = unroll([group])[0]
    num = len(sample.tokens)

    def said(*replies: tuple[int, Any]) -> str:
        with odd(*replies) as url:
            far = {"digits": {"url": url}, "letters": {"checkpoint": str(teachers["letters"])}}
            plan = taught(far, {"form": "sampled"}, failures__max_attempts=2)
            teacher = open_teachers(plan, start, join("cpu"), PLAIN)["digits"]
            assert isinstance(teacher, RemoteTeacher)
            teacher._tokenizer = tokenizer()
            with pytest.raises(UserError) as error:
                teacher.score([[sample]])
        assert "\n" not in str(error.value)
        return str(error.value).partition(url)[2]

    assert said((404, {"error": "no such model"})).startswith(': 404: {"error": "no such model"}; correct url, model')
    assert said((200, {"choices": [{"text": "hello"}]})).startswith(": gives no log-probabilities of a prompt")
    assert said((200, reply(num, token_logprobs=[None]))).startswith(": gives no log-probabilities of a prompt")
    assert f"makes {num + 1} tokens of the {num} that it was given" in said((200, reply(num + 1)))
    assert (
        said((200, reply(num))) == f": spells {num} of {num} tokens otherwise; a teacher needs the student's tokenizer"
    )
    assert said((503, {}), (503, {})).endswith("503: {}; start it again, then continue with --resume")
