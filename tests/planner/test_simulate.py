"""Simulated runs against arithmetic: each part in turn is the slowest, and the controller's bound holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stretto.flow.controller import Limits
from stretto.planner.simulate import Roles, simulate

TOKENS, DECODE_S = 50.0, 0.01


def roles(staleness: int = 4, steps: int = 20, **changes: Any) -> Roles:
    """Four groups of four samples a step; a sample takes half a second on an engine of four places."""
    limits = Limits(prompts=4, staleness=staleness, window=1, lease_s=math.inf, num_steps=steps)
    given: dict[str, Any] = {
        "limits": limits,
        "group": 4,
        "engines": 1,
        "batch": 4,
        "decode_s": lambda batch: DECODE_S,
        "tokens": lambda rng, number: TOKENS,
        "step_s": lambda rng, number: 0.01,
        "verifiers": 64,
    }
    return Roles(**given | changes)


@pytest.mark.parametrize("engines", [1, 2, 4])
def test_engines_limit_by_their_tokens_per_second(engines: int) -> None:
    found = simulate(roles(engines=engines))
    assert found.limit == "engines"
    assert found.samples_per_s == pytest.approx(engines * 4 / (TOKENS * DECODE_S), rel=0.06)


@pytest.mark.parametrize("verifiers", [1, 2, 4])
def test_verifiers_limit_by_their_verdicts_per_second(verifiers: int) -> None:
    found = simulate(roles(engines=8, verifiers=verifiers, verdict_s=lambda rng, number: 1.0))
    assert found.limit == "verifiers"
    assert found.samples_per_s == pytest.approx(verifiers, rel=0.06)


def test_the_trainer_limits_by_its_steps_per_second() -> None:
    found = simulate(roles(engines=8, step_s=lambda rng, number: 4.0, publish_s=1.0))
    assert found.limit == "trainer"
    assert found.samples_per_s == pytest.approx(16 / 5.0, rel=0.02)


def test_at_staleness_0_the_roles_take_turns() -> None:
    found = simulate(
        roles(staleness=0, engines=4, step_s=lambda rng, number: 0.5, deliver_s=0.1, activate_s=0.2, prefill_s=0.05)
    )
    # prompt, tokens, step, and the way of the weights, one after the other
    assert found.samples_per_s == pytest.approx(16 / (0.05 + 0.5 + 0.5 + 0.1 + 0.2), rel=0.02)
    assert found.max_staleness == 0
    assert found.limit == "staleness bound"


@pytest.mark.parametrize("staleness", [1, 2, 8])
def test_the_bound_on_staleness_holds(staleness: int) -> None:
    spread = {"tokens": lambda rng, number: rng.lognormvariate(3.0, 1.0), "uniform": 0.2}
    found = simulate(roles(staleness=staleness, engines=2, step_s=lambda rng, number: 0.3, **spread))
    assert 0 < found.max_staleness <= staleness


def test_equal_seeds_give_equal_runs() -> None:
    spread = roles(tokens=lambda rng, number: rng.lognormvariate(3.0, 1.0))
    assert simulate(spread, 1) == simulate(spread, 1) != simulate(spread, 2)
