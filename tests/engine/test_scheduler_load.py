"""Any load of the scheduler: everything finishes, in order, to the token it would be alone, and no page leaks."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.engine.sequence import SequenceState
from tests.engine.scheduler_loop import PHASES, Loop, abort, alone, make, sequence


@dataclass(frozen=True)
class Arrival:
    """A request of the random load, ``wait`` steps after the one before; its first choice may be aborted later."""

    wait: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    phases: str
    abort_after: int | None


arrivals = st.builds(
    Arrival,
    wait=st.sampled_from([0, 0, 0, 1, 5]),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
    max_tokens=st.integers(1, 10),
    n=st.sampled_from([1, 1, 1, 3]),
    phases=st.sampled_from(sorted(PHASES)),
    abort_after=st.sampled_from([None, None, None, 0, 2, 6]),
)


def run_load(loop: Loop, load: list[Arrival], swap_at: int | None) -> tuple[list[SequenceState], set[int]]:
    """Add, abort and step until all is done; returns the accepted sequences and which of them were aborted."""
    pending = [(sum(each.wait for each in load[: place + 1]), place, each) for place, each in enumerate(load)]
    accepted: list[SequenceState] = []
    aborts: list[tuple[int, SequenceState]] = []
    aborted: set[int] = set()
    for clock in range(10_000):
        while pending and pending[0][0] <= clock:
            _, place, each = pending.pop(0)
            for index in range(each.n):
                seq = sequence(each.prompt, each.max_tokens, str(place), each.phases, index)
                try:
                    loop.scheduler.add(seq)
                except UserError:
                    continue
                accepted.append(seq)
                if index == 0 and each.abort_after is not None:
                    aborts.append((clock + each.abort_after, seq))
        for at, seq in aborts:
            if at == clock and seq.finish_reason is None and seq not in loop.finished:
                abort(loop, seq)
                aborted.add(seq.order)
        if clock == swap_at:
            loop.scheduler.weights_changed(1, keep_cache=len(load) % 2 == 0)
        if loop.step() is None and not pending:
            return accepted, aborted
    raise AssertionError("starvation")


@settings(max_examples=100)
@given(
    load=st.lists(arrivals, max_size=12),
    num_pages=st.integers(2, 16),
    page_size=st.integers(1, 4),
    max_batch=st.integers(1, 6),
    spare_tokens=st.integers(0, 10),
    draft_tokens=st.sampled_from([0, 0, 1, 3]),
    drafts=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    prefix_cache=st.booleans(),
    swap_at=st.sampled_from([None, None, 3, 10]),
)
@example([Arrival(0, (1,) * 9, 8, 3, "thinking", None)] * 3, 7, 3, 6, 2, 3, [3, 0, 1], True, None)
def test_any_load_is_finished_in_order_without_a_leak(
    load: list[Arrival],
    num_pages: int,
    page_size: int,
    max_batch: int,
    spare_tokens: int,
    draft_tokens: int,
    drafts: list[int],
    prefix_cache: bool,
    swap_at: int | None,
) -> None:
    loop = make(
        num_pages,
        page_size,
        max_batch=max_batch,
        max_step_tokens=max(max_batch, draft_tokens + 1) + spare_tokens,
        max_len=20,
        draft_tokens=draft_tokens,
        prefix_cache=prefix_cache,
    )
    loop.drafts = drafts
    accepted, aborted = run_load(loop, load, swap_at)
    assert {seq.order for seq in loop.finished} == {seq.order for seq in accepted} - aborted
    for seq in loop.finished:
        num_new = min(seq.request.sampling.max_tokens, 20 - seq.num_prompt)
        assert seq.output == alone(list(seq.request.prompt), num_new), "a token depends on who else was there"
    loop.scheduler.allocator.check([])
    assert loop.scheduler.allocator.num_free == num_pages
    assert not loop.scheduler._leaders
