"""A loop around the scheduler without a network, for its tests; it checks every plan.

It keeps for every slot of the cache what was written there last: token, Subnet and weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stretto.engine.cache import PageAllocator
from stretto.engine.request import Phases, Request, Sampling
from stretto.engine.scheduler import Scheduler
from stretto.engine.sequence import Chunk, SequenceState, StepPlan, SubnetTable
from stretto.model.spec import Subnet

FULL = Subnet(layers=(0, 1), experts=(4, 4), top_k=(2, 2))
HALF = Subnet(layers=(0, 1), experts=(2, 2), top_k=(1, 1))
SMALL = Subnet(layers=(0,), experts=(2,), top_k=(1,))
THINKING_END = 2
TABLE = SubnetTable()
PHASES = {
    "full": Phases(answer=FULL),
    "small": Phases(answer=SMALL),
    "prefill": Phases(answer=SMALL, prefill=FULL),
    "thinking": Phases(answer=SMALL, prefill=FULL, thinking=HALF, thinking_end=THINKING_END),
}


def sequence(
    prompt: Sequence[int],
    max_tokens: int = 4,
    name: str = "r",
    phases: str = "full",
    index: int = 0,
    client: str = "",
    **sampling: object,
) -> SequenceState:
    settings = Sampling(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    own = PHASES[phases]
    thinking = own.thinking or own.answer
    subnets = (own.prefill or thinking, thinking, own.answer)
    request = Request(name, tuple(prompt), settings, own, client=client)
    return SequenceState(request, tuple(map(TABLE.number, subnets)), index)


def check_pages(allocator: PageAllocator, tables: Iterable[Sequence[int]] | None = None) -> None:
    """Every page is in exactly one state and, if all ``tables`` are given, only they reference pages."""
    references, hashes = allocator._num_references, allocator._hash_by_page
    referenced = {page: num for page, num in enumerate(references) if num > 0}
    assert min(references) >= 0, f"negative references: {references}"
    everything = Counter([*allocator._free, *allocator._idle, *referenced])
    assert everything == Counter(range(allocator.num_pages)), f"lost or doubled: {everything}"
    assert {page: digest for digest, page in allocator._page_by_hash.items()} == hashes, "hashes disagree"
    assert all(page in hashes for page in allocator._idle), "an unreferenced page without a hash is not free"
    assert not any(page in hashes for page in allocator._free), "a free page has a hash"
    if tables is not None:
        expected = Counter(page for table in tables for page in table)
        assert referenced == dict(expected), f"references {referenced}, in tables {dict(expected)}"


def next_token(tokens: Sequence[int]) -> int:
    """What the network says: a function of all tokens so far."""
    return hash(tuple(tokens)) % 3


def alone(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Loop:
    """An engine without a network: checks every plan, then writes the slots and samples."""

    scheduler: Scheduler
    slots: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    num_steps: int = 0
    started: list[SequenceState] = field(default_factory=list)
    finished: list[SequenceState] = field(default_factory=list)
    preempted: list[SequenceState] = field(default_factory=list)

    def step(self) -> StepPlan | None:
        held = [seq for seq in self.scheduler.waiting if self.is_held(seq)]
        plan = self.scheduler.plan()
        check_pages(self.scheduler.allocator, [seq.pages for seq in self.scheduler.running])
        if plan is None:
            assert not self.scheduler.waiting and not self.scheduler.running
            return None
        self.num_steps += 1
        self.preempted += plan.preempted
        self.check_plan(plan, held)
        for chunk, seq in zip(plan.chunks, plan.sequences, strict=True):
            self.compute(chunk, seq)
        return plan

    def is_held(self, seq: SequenceState) -> bool:
        """Somebody runs who is still at full pages that it could take."""
        size = self.scheduler.allocator.page_size
        num = (seq.num_prompt - 1) // size * size
        return self.scheduler.prefix_cache and any(
            other.num_computed < num == (other.num_prompt - 1) // size * size
            and other.tokens[:num] == seq.tokens[:num]
            and other.key(0, num) == seq.key(0, num)
            for other in self.scheduler.running
        )

    def check_plan(self, plan: StepPlan, held: list[SequenceState]) -> None:
        scheduler = self.scheduler
        running, waiting = scheduler.running, scheduler.waiting
        assert sum(len(chunk.tokens) for chunk in plan.chunks) <= scheduler.max_step_tokens
        assert len(set(map(id, plan.sequences))) == len(plan.sequences) and len(running) <= scheduler.max_batch
        assert set(map(id, plan.sequences)) <= set(map(id, running))
        assert running[0] in plan.sequences, "the earliest always advances"
        idle = [seq for seq in running if seq not in plan.sequences and seq not in self.started]
        assert not idle, "holds pages for nothing"
        assert [seq.order for seq in running] == sorted(seq.order for seq in running)
        assert [seq.order for seq in waiting] == sorted(seq.order for seq in waiting)
        for seq in plan.preempted:
            assert seq in waiting and not seq.pages and seq.num_computed == 0
            assert seq.lost_tokens <= len(seq.lost_pages) * scheduler.allocator.page_size
            assert seq.order > max(other.order for other in plan.sequences)
        for seq in plan.sequences:
            if seq not in self.started:
                self.started.append(seq)
                passed = [other for other in waiting if other.order < seq.order]
                assert all(other in held or self.is_held(other) for other in passed), "order of arrival"

    def compute(self, chunk: Chunk, seq: SequenceState) -> None:
        scheduler = self.scheduler
        assert chunk.start == seq.num_computed and chunk.end <= len(seq.tokens)
        assert chunk.tokens == tuple(seq.tokens[chunk.start : chunk.end])
        assert chunk.pages == tuple(seq.pages[: scheduler.allocator.pages_for(chunk.end)])
        assert all(seq.subnet_at(position) == chunk.subnet for position in range(chunk.start, chunk.end))
        is_last = chunk.end == len(seq.tokens)
        assert chunk.num_logits == is_last
        self.write(seq, chunk.start, chunk.end)
        limit = min(seq.num_prompt + seq.request.sampling.max_tokens, scheduler.most_positions)
        if is_last:
            seq.tokens.append(next_token(seq.tokens))
        scheduler.computed(seq, len(chunk.tokens))
        if len(seq.tokens) == limit:
            scheduler.finish(seq)
            self.finished.append(seq)

    def write(self, seq: SequenceState, start: int, end: int) -> None:
        """Write the slots, after a look at all that the tokens attend to."""
        size, weights = self.scheduler.allocator.page_size, self.scheduler.weight_version
        for position in range(end):
            slot = seq.pages[position // size], position % size
            content = (seq.tokens[position], seq.subnet_at(position), weights)
            if position >= start:
                self.slots[slot] = content
            else:
                assert self.slots[slot][:2] == content[:2], f"position {position} of {seq.request.id}"
                assert self.slots[slot][2] == content[2] or not seq.is_sealing


def abort(loop: Loop, seq: SequenceState) -> None:
    """End a sequence before its time; nothing happens to one that has left."""
    if seq in loop.scheduler.running or seq in loop.scheduler.waiting:
        seq.finish_reason = seq.finish_reason or "abort"
        loop.scheduler.finish(seq)


def make(num_pages: int = 16, page_size: int = 4, **options: int | bool) -> Loop:
    limits = {"max_batch": 4, "max_step_tokens": 8, "most_positions": 64, **options}
    return Loop(Scheduler(PageAllocator(num_pages, page_size), **limits))  # type: ignore[arg-type]


def run_until_preemption(loop: Loop) -> None:
    for _ in range(30):
        loop.step()
        if loop.preempted:
            return
    raise AssertionError("nobody was preempted")


def chunk_sizes(plan: StepPlan | None) -> list[tuple[str, int]]:
    assert plan is not None
    return [(seq.request.id, len(chunk.tokens)) for chunk, seq in zip(plan.chunks, plan.sequences, strict=True)]
