"""Every sequence finishes, in order, within its budget, and each token finds the keys and values it should; under any load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.engine.sequence import SequenceState
from tests.engine.scheduler_loop import (
    FULL,
    HALF,
    PHASES,
    SMALL,
    TABLE,
    THINKING_END,
    Loop,
    abort,
    alone,
    check_pages,
    chunk_sizes,
    make,
    run_until_preemption,
    sequence,
)


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    loop = make(max_step_tokens=8)
    for name, num in (("a", 3), ("b", 9), ("c", 4)):
        loop.scheduler.add(sequence([ord(name)] * num, name=name))
    assert chunk_sizes(loop.step()) == [("a", 3), ("b", 5)]
    assert chunk_sizes(loop.step()) == [("a", 1), ("b", 4), ("c", 3)]
    assert chunk_sizes(loop.step()) == [("a", 1), ("b", 1), ("c", 1)]
    assert len(loop.scheduler.running) == 3 and not loop.scheduler.waiting


def test_nobody_takes_pages_before_there_are_tokens_for_it() -> None:
    loop = make(max_step_tokens=8)
    loop.scheduler.add(sequence([0] * 20, name="a"))
    loop.scheduler.add(sequence([1] * 3, name="b"))
    assert chunk_sizes(loop.step()) == chunk_sizes(loop.step()) == [("a", 8)]
    assert len(loop.scheduler.running) == 1
    assert chunk_sizes(loop.step()) == [("a", 4), ("b", 3)]


def test_a_chunk_ends_where_the_subnet_changes() -> None:
    loop = make(max_step_tokens=32)
    seq = sequence([0] * 5, max_tokens=20, phases="thinking")
    seq.tokens += [0, 1, THINKING_END, 1, THINKING_END, 0]  # as after a preemption
    loop.scheduler.add(seq)
    seen = []
    for _ in range(4):
        plan = loop.step()
        assert plan is not None
        seen.append(
            (plan.chunks[0].start, len(plan.chunks[0].tokens), TABLE[plan.chunks[0].subnet], plan.chunks[0].num_logits)
        )
    assert seen[:3] == [(0, 5, FULL, 0), (5, 3, HALF, 0), (8, 3, SMALL, 1)]
    assert seen[3][:2] == (11, 1)


def test_equal_subnets_are_one_phase() -> None:
    seq = sequence([0] * 5, phases="full")
    assert seq.phase_end(0) == 5
    seq.tokens += [1, 1]
    assert seq.phase_end(0) == 7
    assert seq.key(0, 4) == sequence([1] * 4, phases="full").key(0, 4) != sequence([1] * 4, phases="small").key(0, 4)
    assert seq.page_salt(0, 4, 0) != seq.page_salt(0, 4, 1)


def test_choices_wait_for_their_common_prompt_and_let_others_pass() -> None:
    loop = make(max_step_tokens=16)
    choices = [sequence([1, 2, 3, 0, 1, 2, 3, 0, 1], name="a", index=index) for index in range(3)]
    for seq in (*choices, sequence([7], name="b")):
        loop.scheduler.add(seq)
    assert chunk_sizes(loop.step()) == [("a", 9), ("b", 1)]
    assert chunk_sizes(loop.step()) == [("a", 1), ("b", 1), ("a", 1), ("a", 1)]
    assert [seq.num_cached for seq in choices] == [0, 8, 8]
    assert choices[0].pages[:2] == choices[1].pages[:2] == choices[2].pages[:2]


def test_requests_with_one_prompt_compute_it_once() -> None:
    """The samples of a group come as requests of their own; what differs in the last page is no obstacle."""
    prompt = [1, 2, 3, 0, 1, 2, 3, 0]
    loop = make(max_step_tokens=16)
    others = [sequence([*prompt, 5], name="b"), sequence([*prompt, 6, 7], name="c")]
    small, first = sequence([*prompt, 4], name="d", phases="small"), sequence([*prompt, 4], name="a")
    for seq in (first, *others, small):
        loop.scheduler.add(seq)
    assert chunk_sizes(loop.step()) == [("a", 9), ("d", 7)], "another Subnet's pages are others"
    abort(loop, first)
    assert chunk_sizes(loop.step()) == [("b", 1), ("c", 2), ("d", 2)]
    again = sequence([*prompt, 4], name="e")
    loop.scheduler.add(again)
    assert ("e", 1) in chunk_sizes(loop.step()) and again.num_cached == 8


def test_the_next_one_computes_the_prompt_where_the_first_has_gone() -> None:
    loop = make(max_step_tokens=8)
    queue = [sequence([1] * 17, name=name) for name in "abc"]
    for seq in queue:
        loop.scheduler.add(seq)
    assert chunk_sizes(loop.step()) == [("a", 8)]
    abort(loop, queue[0])
    assert chunk_sizes(loop.step()) == [("b", 8)] and queue[1].num_cached == 8
    assert chunk_sizes(loop.step()) == [("b", 1), ("c", 1)]


def test_choices_do_not_wait_for_one_that_is_gone_nor_without_a_cache() -> None:
    loop = make()
    choices = [sequence([1] * 9, name="a", index=index) for index in range(2)]
    for seq in choices:
        loop.scheduler.add(seq)
    abort(loop, choices[0])
    assert chunk_sizes(loop.step()) == [("a", 8)] and loop.started == choices[1:]
    loop = make(max_step_tokens=32, prefix_cache=False)
    for index in range(2):
        loop.scheduler.add(sequence([1] * 9, name="a", index=index))
    assert chunk_sizes(loop.step()) == [("a", 9), ("a", 9)]
    assert loop.scheduler.allocator.num_cached == 0


def test_the_latest_gives_way_and_comes_back_with_what_is_still_cached() -> None:
    loop = make(num_pages=5, page_size=2, max_step_tokens=32)
    first, second = sequence([0, 0, 0], max_tokens=7, name="a"), sequence([1, 1, 1], max_tokens=6, name="b")
    loop.scheduler.add(first)
    loop.scheduler.add(second)
    run_until_preemption(loop)
    assert loop.preempted == [second] and second.num_preemptions == 1
    assert second.lost_tokens == 4 and len(second.lost_pages) == 2
    while loop.step():
        pass
    assert loop.finished == [first, second]
    assert second.tokens[3:] == alone([1, 1, 1], 6)


def test_nobody_is_admitted_upon_the_page_that_another_needs_next() -> None:
    loop = make(num_pages=3, page_size=4, max_step_tokens=32)
    loop.scheduler.add(sequence([0] * 8, max_tokens=3, name="a"))
    loop.scheduler.add(sequence([1] * 4, max_tokens=3, name="b"))
    assert chunk_sizes(loop.step()) == [("a", 8)]
    while loop.step():
        pass
    assert loop.preempted == [] and len(loop.finished) == 2


def test_aborting_frees_pages_wherever_the_sequence_is() -> None:
    loop = make(num_pages=5, page_size=2, max_step_tokens=32, max_batch=2)
    running, preempted, waiting = (sequence([token] * 3, max_tokens=5, name=str(token)) for token in range(3))
    for seq in (running, preempted, waiting):
        loop.scheduler.add(seq)
    run_until_preemption(loop)
    for seq in (waiting, preempted, running, running):
        abort(loop, seq)
        check_pages(loop.scheduler.allocator, [other.pages for other in loop.scheduler.running])
        assert seq.finish_reason == "abort"
    assert loop.step() is None and loop.scheduler.allocator.num_free == 5


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (64, 1, "request r: prompt: 64 tokens leave no room for a completion in 64 positions; shorten it"),
        (30, 4, "request r: max_tokens: 30 prompt and 4 new tokens do not fit in 8 cache pages of 4 tokens; lower it"),
    ],
)
def test_what_can_never_fit_is_refused(num_prompt: int, max_tokens: int, message: str) -> None:
    loop = make(num_pages=8)
    with pytest.raises(UserError, match=message):
        loop.scheduler.add(sequence([0] * num_prompt, max_tokens))
    assert not loop.scheduler.waiting
    loop.scheduler.add(sequence([0] * 30, max_tokens=3))  # the last of 33 tokens is never computed
    while loop.step():
        pass
    assert len(loop.finished) == 1


def test_prompt_log_probs_are_computed_for_every_prompt_token_once() -> None:
    loop = make(max_step_tokens=6)
    loop.scheduler.add(sequence([1] * 9, name="a", max_tokens=1))
    while loop.step():
        pass
    seq = sequence([1] * 9, name="b", prompt_logprobs=True)
    loop.scheduler.add(seq)
    plan = loop.scheduler.plan()
    assert plan is not None and (plan.chunks[0].start, plan.chunks[0].num_logits) == (0, 6)
    seq.prompt_log_probs += [0.0] * 6
    loop.scheduler.computed(seq, 6)
    loop.scheduler.weights_changed(1, keep_cache=False)
    plan = loop.scheduler.plan()
    assert plan is not None and (len(plan.chunks[0].tokens), plan.chunks[0].num_logits) == (6, 0)
    loop.scheduler.computed(seq, 6)
    plan = loop.scheduler.plan()
    assert plan is not None and (len(plan.chunks[0].tokens), plan.chunks[0].num_logits) == (3, 3)


def test_a_step_returns_the_logits_of_a_part_of_a_long_prompt() -> None:
    loop = make(num_pages=100, most_positions=400, max_step_tokens=1024)
    seq = sequence([1] * 300, name="a", prompt_logprobs=True)
    loop.scheduler.add(seq)
    sizes = []
    while seq.num_pending:
        plan = loop.scheduler.plan()
        assert plan is not None
        sizes.append((len(plan.chunks[0].tokens), plan.chunks[0].num_logits))
        seq.prompt_log_probs += [0.0] * min(sizes[-1][0], 299 - len(seq.prompt_log_probs))
        loop.scheduler.computed(seq, sizes[-1][0])
    assert sizes == [(128, 128), (128, 128), (44, 44)]


def test_pages_of_a_failure_are_not_found_again() -> None:
    loop = make(max_step_tokens=32)
    failed, later = sequence([0] * 9, name="a"), sequence([0] * 9, name="b")
    loop.scheduler.add(failed)
    loop.step()
    assert loop.scheduler.allocator.num_cached == 2
    failed.finish_reason = "error"
    abort(loop, failed)
    assert loop.scheduler.allocator.num_cached == 0
    loop.scheduler.add(later)
    while loop.step():
        pass
    assert later.num_cached == 0 and loop.finished == [later]


@pytest.mark.parametrize("keep_cache", [True, False])
def test_new_weights_find_nothing_of_the_old(keep_cache: bool) -> None:
    loop = make(max_step_tokens=32)
    seq = sequence([0] * 6, max_tokens=12, name="a")
    loop.scheduler.add(seq)
    loop.step()
    computed = seq.num_computed
    assert loop.scheduler.weights_changed(1, keep_cache=keep_cache) == (() if keep_cache else (seq,))
    assert seq.num_computed == (computed if keep_cache else 0) and seq.lost_tokens == (0 if keep_cache else computed)
    assert loop.scheduler.allocator.num_cached == 0
    assert all([loop.step() for _ in range(6)])
    assert (loop.scheduler.allocator.num_cached == 0) == keep_cache
    other = sequence(seq.tokens[:9], name="b")
    loop.scheduler.add(other)
    while loop.step():
        pass
    assert other.num_cached == (0 if keep_cache else 8)


@dataclass(frozen=True)
class Arrival:
    """A request of the random load, ``wait`` steps after the one before; its first choice may be aborted later."""

    wait: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    phases: str
    abort_after: int | None
    client: str = ""


arrivals = st.builds(
    Arrival,
    wait=st.sampled_from([0, 0, 0, 1, 5]),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
    max_tokens=st.integers(1, 10),
    n=st.sampled_from([1, 1, 1, 3]),
    phases=st.sampled_from(sorted(PHASES)),
    abort_after=st.sampled_from([None, None, None, 0, 2, 6]),
    client=st.sampled_from("aaab"),
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
                seq = sequence(each.prompt, each.max_tokens, str(place), each.phases, index, each.client)
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
    prefix_cache=st.booleans(),
    swap_at=st.sampled_from([None, None, 3, 10]),
)
@example([Arrival(0, (1,) * 9, 8, 3, "thinking", None)] * 3, 7, 3, 6, 2, True, None)
def test_any_load_is_finished_in_order_without_a_leak(
    load: list[Arrival],
    num_pages: int,
    page_size: int,
    max_batch: int,
    spare_tokens: int,
    prefix_cache: bool,
    swap_at: int | None,
) -> None:
    loop = make(
        num_pages,
        page_size,
        max_batch=max_batch,
        max_step_tokens=max_batch + spare_tokens,
        most_positions=20,
        prefix_cache=prefix_cache,
    )
    accepted, aborted = run_load(loop, load, swap_at)
    assert {seq.order for seq in loop.finished} == {seq.order for seq in accepted} - aborted
    for seq in loop.finished:
        num_new = min(seq.request.sampling.max_tokens, 20 - seq.num_prompt)
        assert seq.output == alone(list(seq.request.prompt), num_new), "a token depends on who else was there"
    check_pages(loop.scheduler.allocator, [])
    assert loop.scheduler.allocator.num_free == num_pages
    assert not loop.scheduler._leaders


def test_a_client_with_many_sequences_does_not_delay_another() -> None:
    loop = make(num_pages=64, max_batch=2, max_step_tokens=16)
    greedy = [sequence([number, 1, 2], 20, name=f"g{number}", client="greedy") for number in range(6)]
    for seq in greedy:
        loop.scheduler.add(seq)
    loop.step()
    assert loop.scheduler.running == greedy[:2]
    other = sequence([9, 9, 9], 3, name="o", client="other")
    loop.scheduler.add(other)
    plan = loop.step()
    assert plan is not None and other in plan.sequences and plan.preempted == (greedy[1],)
    while other not in loop.finished:
        loop.step()
    assert greedy[0] in loop.scheduler.running  # the first of all keeps its place
    while loop.step():
        pass
    assert len(loop.finished) == 7


def test_prompts_of_one_client_do_not_fill_the_steps_of_another() -> None:
    loop = make(num_pages=64, max_batch=8, max_step_tokens=8)
    for number in range(3):
        loop.scheduler.add(sequence([number] * 30, 4, name=f"g{number}", client="greedy"))
    loop.step()
    other = sequence([9, 9], 2, name="o", client="other")
    loop.scheduler.add(other)
    num_steps = 0
    while not other.output and num_steps < 5:
        loop.step()
        num_steps += 1
    assert num_steps <= 4, "the rest of one prompt, and its own"


def test_a_client_loses_nothing_by_having_used_places_that_nobody_wanted() -> None:
    loop, numbers = make(num_pages=64, max_batch=3, max_step_tokens=16), iter(range(10_000))
    scheduler = loop.scheduler

    def add(client: str) -> None:
        number = next(numbers)
        scheduler.add(sequence([number % 3, 1], 4, name=f"{client}-{number}", client=client))

    def served(clients: str, steps: int, visits: bool = False) -> Counter[str]:
        """Sequences served to ``clients``, each of which always has one in the engine, beside clients that come once."""
        before = len(loop.finished)
        for step in range(steps):
            present = {seq.request.client for seq in (*scheduler.waiting, *scheduler.running)}
            for client in set(clients) - present:
                add(client)
            if visits and step % 3 == 0:
                add(f"visitor {step}")
            loop.step()
        return Counter(seq.request.client for seq in loop.finished[before:])

    assert served("r", 160, visits=True)["r"] == 40, "never waits"
    counts = served("rabcde", 160)
    assert min(counts[client] for client in "rabcde") >= 0.8 * max(counts.values()), counts


@pytest.mark.parametrize("kept", [[], [3], [0], [2, 5]])
def test_a_cancelled_waiting_sequence_costs_its_client_nothing(kept: list[int]) -> None:
    """The turns of a client that cancels are those of a client that never sent what it cancelled."""

    def order(cancelled: Sequence[int]) -> list[str]:
        loop = make(num_pages=64, max_batch=1, max_step_tokens=16)
        loop.scheduler.add(sequence([5, 5], 4, name="first", client="steady"))
        loop.step()
        asked = {number: sequence([number, 1], 2, name=f"c{number}", client="fickle") for number in (*kept, *cancelled)}
        for number in sorted(asked):
            loop.scheduler.add(asked[number])
        for number in cancelled:
            abort(loop, asked[number])
        for number in range(4):
            loop.scheduler.add(sequence([number, 2], 2, name=f"s{number}", client="steady"))
        loop.scheduler.add(sequence([9, 9], 2, name="last", client="fickle"))
        while loop.step():
            pass
        return [seq.request.id for seq in loop.finished]

    cancelled = [number for number in range(7) if number not in kept]
    assert order(cancelled) == order(cancelled[::-1]) == order([])


def test_a_cancelled_sequence_that_was_computed_is_paid_for() -> None:
    loop = make(num_pages=64, max_batch=1, max_step_tokens=16)
    greedy = [sequence([number, 1, 2], 20, name=f"g{number}", client="greedy") for number in range(2)]
    for seq in greedy:
        loop.scheduler.add(seq)
    loop.step()
    abort(loop, greedy[0])
    loop.step()
    loop.scheduler.add(sequence([9, 9], 2, name="o", client="other"))
    plan = loop.step()
    assert plan is not None and not plan.preempted and greedy[1] in plan.sequences
    first, second = (sequence([4, number], 2, name=f"n{number}", client="greedy") for number in range(2))
    loop.scheduler.add(first)
    assert first.order[0] == greedy[1].order[0] + 1
    loop.scheduler._preempt(greedy[1])
    abort(loop, greedy[1])
    loop.scheduler.add(second)
    assert second.order[0] == first.order[0] + 1, "the turn of a preempted sequence was used"


def test_the_work_of_cancelling_grows_with_the_cancelled_sequences_not_with_their_square() -> None:
    """The engine computes nothing while it removes what a client has cancelled, so thousands must not take seconds."""

    class Counted(SequenceState):
        num_reads = 0

        def __getattribute__(self, name: str) -> object:
            Counted.num_reads += 1
            return super().__getattribute__(name)

    def work(num: int, newest_first: bool) -> int:
        loop = make(max_batch=1)
        loop.scheduler.add(sequence([5], 4, client="steady"))
        loop.step()
        plain = [sequence([number], client="fickle") for number in range(num)]
        waiting = [Counted(seq.request, seq.subnets) for seq in plain]
        for seq in waiting:
            loop.scheduler.add(seq)
        Counted.num_reads = 0
        for seq in waiting[:0:-1] if newest_first else waiting[:-1]:
            loop.scheduler.finish(seq)
        loop.scheduler.plan()
        assert loop.scheduler.waiting == [waiting[0] if newest_first else waiting[-1]]
        return Counted.num_reads

    for newest_first in (False, True):
        assert work(512, newest_first) < 16 * work(64, newest_first), "8 times as many were cancelled"


def test_clients_that_came_once_are_forgotten_under_steady_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.engine.scheduler._MOST_CLIENTS", 5)
    loop = make(num_pages=64, max_batch=2, max_step_tokens=16)
    for number in range(40):
        loop.scheduler.add(sequence([number % 3, 1], 4, name=f"v{number}", client=f"v{number}"))
        loop.step()
        loop.step()
        assert loop.scheduler.running, "the engine is never idle"
    assert len(loop.scheduler._next_turn) <= 7
