from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice
from stretto.server.elastic import (
    GROW_AFTER_S,
    GROW_WAITING,
    SHRINK_WAITING,
    Load,
    LoadControl,
    Resolver,
    ServedModel,
    contains,
    decide,
    environment_subnet,
    ladder,
    refuses,
)
from stretto.server.limits import ApiError
from tests.server.presets import PRESETS

AIM_S = 2.0


@pytest.mark.parametrize(
    ("level", "waiting", "first_token_s", "since_change_s", "calm_s", "expected"),
    [
        (0, 0, 0.0, 99.0, 99.0, 0),  # at rest on the target
        (0, 7, 0.1, 99.0, 0.0, 0),  # a queue, but a short one
        (0, 8, 0.1, 0.0, 0.0, 1),  # long: at once
        (0, 16, 0.1, 0.0, 0.0, 2),  # a step for each doubling
        (0, 4000, 0.0, 0.0, 0.0, 3),  # never below the floor
        (2, 8, 0.1, 99.0, 0.0, 2),  # between the marks: stay
        (0, 0, 3.0, 1.0, 0.0, 1),  # slow first tokens
        (1, 0, 3.0, 0.2, 0.0, 1),  # the last step must show first
        (3, 0, 3.0, 9.0, 0.0, 3),
        (2, 1, 0.5, 9.0, 4.9, 2),  # not calm for long enough
        (2, 1, 0.5, 4.9, 9.0, 2),
        (2, 1, 0.5, 9.0, 5.0, 1),  # grow back by one
        (2, 1, 1.5, 9.0, 9.0, 2),  # first tokens neither slow nor quick
        (3, 0, 0.0, 60.0, 60.0, 0),  # after a pause, all the way
        (2, 2, 0.1, 99.0, 99.0, 2),
    ],
)
def test_decisions(
    level: int, waiting: int, first_token_s: float, since_change_s: float, calm_s: float, expected: int
) -> None:
    assert decide(level, Load(waiting, first_token_s), AIM_S, 4, since_change_s, calm_s) == expected


loads = st.builds(Load, st.integers(0, 10_000), st.floats(0, 100))
seconds = st.floats(0, 1000)


@given(st.integers(1, 8), st.data(), loads, seconds, seconds)
def test_a_decision_stays_on_the_ladder_and_moves_one_way(
    num_rungs: int, data: st.DataObject, load: Load, since_s: float, calm_s: float
) -> None:
    level = data.draw(st.integers(0, num_rungs - 1))
    new = decide(level, load, AIM_S, num_rungs, since_s, calm_s)
    assert 0 <= new < num_rungs
    if new > level:
        assert load.num_waiting >= SHRINK_WAITING or load.first_token_s > AIM_S
    if new < level:
        assert load.num_waiting <= GROW_WAITING and min(since_s, calm_s) >= GROW_AFTER_S
    assert not refuses(new, load, AIM_S, num_rungs) or new == num_rungs - 1


@given(st.integers(0, 3), loads, seconds, seconds, st.integers(0, 1000))
def test_more_waiting_never_gives_a_larger_subnet(
    level: int, load: Load, since_s: float, calm_s: float, more: int
) -> None:
    heavier = Load(load.num_waiting + more, load.first_token_s)
    assert decide(level, heavier, AIM_S, 4, since_s, calm_s) >= decide(level, load, AIM_S, 4, since_s, calm_s)


def named(config: ModelConfig) -> dict[str, Subnet]:
    return {"full": config.full(), **{name: choice.of(config) for name, choice in PRESETS.items()}}


def test_the_ladder_falls_from_the_target_to_the_floor(config: ModelConfig) -> None:
    rungs = ladder(config, named(config), config.full(), named(config)["corner"])
    assert rungs[0].name == "full" and rungs[-1].name == "corner"
    assert {rung.name for rung in rungs} == {"full", "half", "wide", "corner"}
    flops = [rung.flops for rung in rungs]
    assert flops == sorted(set(flops), reverse=True)
    for rung in rungs:
        assert contains(config.full(), rung.subnet, config) and contains(rung.subnet, rungs[-1].subnet, config)


def test_a_ladder_of_one(config: ModelConfig) -> None:
    [rung] = ladder(config, named(config), named(config)["half"], named(config)["half"])
    assert rung.name == "half"


def test_a_floor_beside_the_target_is_refused(config: ModelConfig) -> None:
    with pytest.raises(UserError, match="floor: 4 layers"):
        ladder(config, named(config), named(config)["half"], named(config)["wide"])


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_shrinks_refuses_and_grows_back(config: ModelConfig) -> None:
    clock = Clock()
    control = LoadControl(ladder(config, named(config), config.full(), named(config)["corner"]), AIM_S, clock)

    def ask(waiting: int, after_s: float) -> str | None:
        clock.now_s += after_s
        rung = control.choose(waiting)
        return rung and rung.name

    assert ask(0, 0) == "full"
    assert ask(8, 0.1) != "full"
    assert ask(40, 0.1) == "corner"
    assert ask(256, 0.1) is None
    assert 1 <= control.retry_after_s(256) <= 60
    assert ask(5, 1) == "corner"
    assert ask(0, 1) == "corner"  # calm, not yet for long
    seen = [ask(0, 1) for _ in range(20)]
    assert seen[-1] == "full" and None not in seen
    flops = {rung.name: rung.flops for rung in control.rungs}
    grown = [flops[name] for name in seen if name]
    assert grown == sorted(grown) and len(set(grown)) == len(control.rungs)


def test_slow_first_tokens_shrink_step_by_step(config: ModelConfig) -> None:
    clock = Clock()
    control = LoadControl(ladder(config, named(config), config.full(), named(config)["corner"]), AIM_S, clock)
    levels = []
    for _ in range(40):
        clock.now_s += 0.1
        control.observe(3.0)
        control.choose(0)
        levels.append(control.level)
    assert levels[-1] == 3 and max(b - a for a, b in pairwise(levels)) == 1
    clock.now_s += 10
    assert control.choose(0) == control.rungs[1]  # what was slow is out of the window


def test_on_the_floor_a_request_that_would_wait_too_long_is_refused(config: ModelConfig) -> None:
    now_s = 100.0
    rungs = ladder(config, {}, config.full(), config.full())
    control = LoadControl(rungs, AIM_S, lambda: now_s)
    assert control.choose(40) is not None  # nothing is known of the pace yet
    for _ in range(20):
        control.observe(0.1)
    now_s = 102.0  # ten first tokens a second
    assert control.choose(20) is not None
    assert control.choose(21) is None
    now_s = 110.0  # too long ago to tell
    assert control.choose(21) is not None


def test_the_environment_sets_axes(config: ModelConfig) -> None:
    assert environment_subnet({}, config) is None
    assert environment_subnet({"ERNIE_ELASTIC_LAYERS": "  "}, config) is None
    environ = {"ERNIE_ELASTIC_LAYERS": "3", "ERNIE_ELASTIC_EXPERTS": " 4 ", "ERNIE_ELASTIC_TOPK": "1"}
    assert environment_subnet(environ, config) == SubnetChoice(layers=3, experts=4, top_k=1)
    assert environment_subnet({"ERNIE_ELASTIC_TOPK": "1"}, config) == SubnetChoice(top_k=1)


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"ERNIE_ELASTIC_LAYERS": "5"}, r"^ERNIE_ELASTIC_LAYERS=5: .*outside 1\.\.4"),
        ({"ERNIE_ELASTIC_EXPERTS": "1"}, r"^ERNIE_ELASTIC_EXPERTS=1: .*top_k=2"),
        ({"ERNIE_ELASTIC_TOPK": "two"}, "^ERNIE_ELASTIC_TOPK: 'two' is not a whole number"),
        ({"ERNIE_ELASTIC_TOPK": "0"}, "^ERNIE_ELASTIC_TOPK"),
        ({"ERNIE_ELASTIC_TOPK": "²"}, "^ERNIE_ELASTIC_TOPK"),
    ],
)
def test_a_bad_environment_is_one_line(config: ModelConfig, environ: dict[str, str], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        environment_subnet(environ, config)
    assert "\n" not in str(caught.value)


def test_a_preset_is_suggested_for_its_own_name_alone(served: ServedModel) -> None:
    """With the model's name before them, all presets resemble each other."""
    resolver = Resolver(served, None, 2.0)
    with pytest.raises(ApiError, match=r"'x:nosuch' is not served here;"):
        resolver.preset_of("x:nosuch")
    with pytest.raises(ApiError, match=r"did you mean 'x:half'"):
        resolver.preset_of("x:haf")
