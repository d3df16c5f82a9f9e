"""Which draft is worth its time: chosen by measurement, off where it does not pay, tried again."""

from __future__ import annotations

import pytest

from stretto.engine.utility import FIRST_WAIT, TRIALS, WARM_STEPS, Draft, Watch
from tests.engine.engines import CORNER, NARROW


def expected_tokens(acceptance: float, num_drafted: int) -> float:
    """Tokens a cycle yields when each draft is accepted with the same probability (Leviathan, 2211.17192, eq. 1)."""
    return sum(acceptance**power for power in range(num_drafted + 1))


def feed(watch: Watch, draft_s: float, verify_s: float, acceptance: float, num_steps: int) -> list[Draft | None]:
    """Let the watch choose ``num_steps`` times at made-up costs; a plain step takes 1 s."""
    chosen: list[Draft | None] = []
    for _ in range(num_steps):
        draft = watch.choose(1)
        chosen.append(draft)
        if draft is None:
            watch.plain(1, 1.0)
            continue
        accepted = round(100 * (expected_tokens(acceptance, draft.num_tokens) - 1))
        rejected = round(100 * (1 - acceptance**draft.num_tokens))
        verify = 1.0 + (verify_s - 1.0) * draft.num_tokens
        watch.cycle(1, draft, draft_s * draft.num_tokens, verify, accepted, rejected)
    return chosen


def test_drafting_pays() -> None:
    watch = Watch([CORNER], 4)
    chosen = feed(watch, draft_s=0.1, verify_s=1.05, acceptance=0.9, num_steps=60)
    assert chosen[:WARM_STEPS] == [None] * WARM_STEPS
    assert chosen[-1] == Draft(CORNER, 4)
    found = watch.utility(1)
    assert found is not None and found[0] == pytest.approx(expected_tokens(0.9, 4) / (0.4 + 1.2), rel=0.02)


def test_the_length_follows_acceptance() -> None:
    watch = Watch([CORNER], 8)
    chosen = feed(watch, draft_s=0.15, verify_s=1.05, acceptance=0.4, num_steps=80)[-1]
    assert chosen is not None and chosen.num_tokens in (1, 2)


def test_drafting_that_does_not_pay_is_switched_off_and_tried_again() -> None:
    watch = Watch([CORNER], 4)
    feed(watch, draft_s=0.6, verify_s=1.4, acceptance=0.5, num_steps=WARM_STEPS + TRIALS)
    rest = feed(watch, draft_s=0.6, verify_s=1.4, acceptance=0.5, num_steps=400)
    found = watch.utility(1)
    assert found is not None and found[0] < 1
    assert rest[:FIRST_WAIT] == [None] * FIRST_WAIT
    num_drafted = sum(draft is not None for draft in rest)
    assert 0 < num_drafted < 0.1 * len(rest)
    better = feed(watch, draft_s=0.05, verify_s=1.01, acceptance=0.95, num_steps=1500)  # the traffic has changed
    assert better[-1] is not None


def test_the_better_candidate_wins() -> None:
    watch = Watch([NARROW, CORNER], 4)
    for _ in range(80):
        draft = watch.choose(2)
        if draft is None:
            watch.plain(2, 1.0)
        elif draft.subnet is CORNER:
            watch.cycle(2, draft, 0.05 * draft.num_tokens, 1.1, 80 * draft.num_tokens, 20)
        else:
            watch.cycle(2, draft, 0.9 * draft.num_tokens, 1.1, 95 * draft.num_tokens, 5)
    assert draft is not None and draft.subnet is CORNER


def test_rows_that_cannot_be_drafted_for_count() -> None:
    watch = Watch([CORNER], 4)
    feed(watch, draft_s=0.3, verify_s=1.1, acceptance=0.7, num_steps=40)
    assert watch.choose(1, [1.0]) is not None
    assert watch.choose(1, [0.1]) is None
    assert watch.choose(1, [0.0]) is None
