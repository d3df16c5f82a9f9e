"""Scheduling policy: decoding first, then prompts in order of rank, within limits of tokens and pages.

Clients take turns (start-time fair queueing, Goyal, Vin and Cheng 1996): the n-th sequence of a client has the same turn as the n-th
of every other client, and equal turns are served in order of arrival. With one client, that is the order of arrival. A client that
was away continues at the present turn, so a client loses nothing by using places that no other client wanted. A sequence that is
cancelled while it waits, before any of it was computed, takes no turn. A waiting sequence without a place or pages preempts the last
running sequence of another client if that one has a later rank.

Invariants that make every sequence finish:

- a sequence that would not fit alone is refused, so the earliest running one always gets its pages: later sequences are
  preempted, the latest first;
- pages for all known tokens are allocated on admission, so a prompt is never preempted because its own pages are missing;
- decoding the whole batch is within the token budget, so a running prompt always gets a part of the step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from stretto.base.errors import UserError
from stretto.engine.cache import ROOT, PageAllocator, chain_hash
from stretto.engine.sequence import Chunk, SequenceState, StepPlan

_by_rank = attrgetter("order")
MOST_LOGITS = 128
"""Most rows of logits of a chunk. A row has the whole vocabulary in fp32, and log-probabilities take as much again: for 1,024 rows of
a vocabulary of 128k, 1 GiB."""
_MOST_CLIENTS = 4096
"""Number of clients above which those are removed that have no sequence in the engine and no more than one turn to wait."""


class Scheduler:
    """Continuous batching over the pages of one `PageAllocator`. Owns the queues and each sequence's pages.

    Usage: `add`, then in a loop `plan`, compute the chunks, append sampled tokens, `computed`, and `finish` sequences that
    ended. Sequences are computed in order of rank. While one sequence computes a prompt, others with the same prompt (as the samples
    of a group) wait for its pages, and later sequences pass them.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        max_batch: int,
        max_step_tokens: int,
        most_positions: int,
        prefix_cache: bool = True,
        weight_version: int = 0,
    ) -> None:
        """
        Args:
            max_batch: largest number of running sequences.
            max_step_tokens: largest number of tokens in one plan.
            most_positions: largest length of prompt and completion together, whatever the cache holds.
            weight_version: version of the weights that compute the pages.
        """
        self.allocator, self.max_batch, self.max_step_tokens = allocator, max_batch, max_step_tokens
        self.most_positions, self.prefix_cache, self.weight_version = most_positions, prefix_cache, weight_version
        # Both in order of rank; only the scheduler changes them. Preempted sequences are in `waiting`.
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self._num_arrived = 0
        self._next_turn: dict[str, int] = {}  # by client
        # Ranks of sequences that were cancelled before they used their turn, by client, until `_return_turns`.
        self._unused: dict[str, list[tuple[int, int]]] = {}
        self._turn_served = 0  # the latest turn of a sequence that has left its place in the batch
        self._leaders: dict[
            bytes, SequenceState
        ] = {}  # by prefix key: the sequence that computes the shared prompt pages
        self._stuck: SequenceState | None = None  # could not be admitted, and no page became free since

    def add(self, seq: SequenceState) -> None:
        """Queue a sequence.

        Raises:
            UserError: the sequence does not fit into the cache, even if it is the only one.
        """
        self._check_fits(seq)
        assert seq.order[1] < 0, f"{seq.request.id}[{seq.index}] is added twice"
        self._return_turns()
        seq.order = self._turn(seq.request.client), self._num_arrived
        self._num_arrived += 1
        if self.prefix_cache and self._num_shared(seq) and not seq.sampling.prompt_logprobs:
            num = self._num_shared(seq)
            seq.prefix_key = chain_hash(ROOT, seq.tokens[:num], seq.page_salt(0, num, 0))
        insort(self.waiting, seq, key=_by_rank)

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute.

        Changes queues and page tables, and ``num_computed`` of admitted sequences (to the tokens found in the prefix cache) and of
        preempted ones (to 0). The caller must compute the chunks and call `computed` before the next plan.
        """
        self._return_turns()
        displaced = self._displace()
        chunks: list[Chunk] = []
        sequences: list[SequenceState] = []
        preempted: list[SequenceState] = []
        unfinished: list[SequenceState] = []  # sequences with a prompt, or lost tokens, to compute
        size = self.allocator.page_size
        place = 0
        # Served from the front and preempted from the end, so no sequence with a chunk in this plan loses pages.
        while place < len(self.running):
            seq = self.running[place]
            place += 1
            num_tokens, start = len(seq.tokens), seq.num_computed
            if num_tokens - start > 1:
                unfinished.append(seq)
            elif num_tokens <= len(seq.pages) * size or self._extend(seq, preempted):
                table = seq.table[: -(-num_tokens // size)]
                chunks.append(Chunk((seq.tokens[start],), start, table, seq.subnet, 1))
                sequences.append(seq)
        budget = self.max_step_tokens - len(chunks)
        if self.waiting and not preempted:  # a sequence is not admitted in the step that preempted it
            unfinished = sorted([*unfinished, *self._admit(budget, unfinished)], key=_by_rank)
        for seq in unfinished:
            if budget <= 0:
                break
            chunks.append(self._prompt_chunk(seq, budget))
            sequences.append(seq)
            budget -= len(chunks[-1].tokens)
        if not chunks:
            assert not self.running, f"{len(self.running)} sequences are running and none can be computed"
            return None
        return StepPlan(tuple(chunks), tuple(sequences), (*displaced, *preempted))

    def computed(self, seq: SequenceState, num_tokens: int) -> None:
        """Record that the next ``num_tokens`` final tokens of a running sequence are in its pages."""
        num_computed = seq.num_computed = seq.num_computed + num_tokens
        size = self.allocator.page_size
        assert num_computed <= len(seq.tokens), f"{num_computed} tokens computed, {len(seq.tokens)} are final"
        assert num_computed <= len(seq.pages) * size, f"{num_computed} tokens in {len(seq.pages)} pages of {size}"
        if self.prefix_cache and seq.is_sealing and num_computed // size > len(seq.page_hashes):
            self._seal(seq)
        if self._leaders and num_computed >= self._num_shared(seq):
            self._release_followers(seq)

    def finish(self, seq: SequenceState) -> None:
        """Remove a running or waiting sequence. Its routes are still in ``lost_pages``."""
        if seq in self.running:
            self.running.remove(seq)
            self._turn_served = max(self._turn_served, seq.order[0])
        else:
            removed = self.waiting.pop(bisect_left(self.waiting, seq.order, key=_by_rank))
            assert removed is seq, f"{seq.request.id}[{seq.index}] is not in the engine"
            if seq.num_preemptions == 0:
                self._unused.setdefault(seq.request.client, []).append(seq.order)
        self._release_followers(seq)
        if seq.finish_reason == "error":
            # torch also multiplies masked values, so one NaN token makes earlier tokens of its chunk NaN
            self.allocator.unseal(seq.pages)
        self._drop_pages(seq)

    def weights_changed(self, version: int, *, keep_cache: bool) -> tuple[SequenceState, ...]:
        """Use a new weight version for pages from now on; older pages are no longer found.

        Returns:
            The preempted sequences, whose routes are still in ``lost_pages``: all running ones, or none with ``keep_cache``,
            where they continue with their keys and values of the old weights.
        """
        self._return_turns()
        preempted = () if keep_cache else tuple(self.running)
        self._leaders.clear()
        for seq in self.running:
            seq.is_sealing = False
        for seq in reversed(preempted):
            self._preempt(seq)
        self.allocator.forget()
        self.weight_version = version
        self._stuck = None
        return preempted

    def _check_fits(self, seq: SequenceState) -> None:
        name, num_new = f"request {seq.request.id}", seq.sampling.max_tokens
        num_pages, page_size = self.allocator.num_pages, self.allocator.page_size
        if seq.num_prompt >= self.most_positions:
            raise UserError(
                f"{name}: prompt: {seq.num_prompt} tokens leave no room for a completion in {self.most_positions} positions; "
                "shorten it"
            )
        # the last sampled token is never computed
        if min(seq.num_prompt + num_new, self.most_positions) - 1 > num_pages * page_size:
            raise UserError(
                f"{name}: max_tokens: {seq.num_prompt} prompt and {num_new} new tokens do not fit in "
                f"{num_pages} cache pages of {page_size} tokens; lower it, shorten the prompt or give "
                "the cache more memory"
            )

    def _extend(self, seq: SequenceState, preempted: list[SequenceState]) -> bool:
        """Allocate missing pages for all tokens of ``seq``, preempting the last sequences if needed; False: ``seq`` was preempted."""
        num_missing = self.allocator.pages_for(len(seq.tokens)) - len(seq.pages)
        while (pages := self.allocator.allocate(num_missing)) is None:
            victim = self.running[-1]
            assert len(self.running) > 1, f"{len(seq.tokens)} tokens of {seq.request.id} do not fit into an empty cache"
            self._preempt(victim)
            preempted.append(victim)
            if victim is seq:
                return False
        seq.pages += pages
        seq.table = tuple(seq.pages)
        return True

    def _turn(self, client: str) -> int:
        """Turn of the client's next sequence: after its other sequences, and not before the present turn. That is the latest one
        served, or the first in the engine if it is later."""
        firsts = [queue[0].order[0] for queue in (self.waiting, self.running) if queue]
        present = max(self._turn_served, min(firsts, default=0))
        if not firsts:
            self._next_turn.clear()
        elif len(self._next_turn) > _MOST_CLIENTS:
            own = {seq.request.client for seq in (*self.waiting, *self.running)}
            self._next_turn = {
                name: turn for name, turn in self._next_turn.items() if turn > present + 1 or name in own
            }
        turn = max(present, self._next_turn.get(client, 0))
        self._next_turn[client] = turn + 1
        return turn

    def _return_turns(self) -> None:
        """Move the waiting sequences of each client forward by one turn for every earlier sequence of that client that was cancelled
        before any of it was computed. Done once for all that were cancelled since the last call, because a client may cancel thousands
        between two steps."""
        if not self._unused:
            return
        for client, ranks in self._unused.items():
            self._next_turn[client] -= len(ranks)
            ranks.sort()
        for seq in self.waiting:
            ranks = self._unused.get(seq.request.client, [])
            seq.order = seq.order[0] - bisect_left(ranks, seq.order), seq.order[1]
        self._unused.clear()
        self.waiting.sort(key=_by_rank)

    @property
    def _most_running(self) -> int:
        return min(self.max_batch, self.max_step_tokens)

    def _displace(self) -> list[SequenceState]:
        """Preempt later sequences of other clients while the first waiting sequence has no place or no pages."""
        displaced: list[SequenceState] = []
        first = next((seq for seq in self.waiting if seq.prefix_key not in self._leaders), None)
        while (
            first is not None
            and self.running
            and (len(self.running) >= self._most_running or first is self._stuck)
            and (last := self.running[-1]).order > first.order
            and last.request.client != first.request.client
        ):
            self._preempt(last)
            displaced.append(last)
        return displaced

    def _admit(self, budget: int, unfinished: Sequence[SequenceState]) -> list[SequenceState]:
        """Admit waiting sequences until the batch or the pages are full, or until earlier ``unfinished`` and admitted sequences
        need the whole ``budget`` of tokens."""
        admitted: list[SequenceState] = []
        place = 0
        while place < len(self.waiting) and len(self.running) < self._most_running:
            seq = self.waiting[place]
            if sum(other.num_pending for other in (*unfinished, *admitted) if other.order < seq.order) >= budget:
                break
            if seq.prefix_key in self._leaders:
                place += 1
            elif seq is self._stuck or not self._take_pages(seq):
                self._stuck = seq
                break
            else:
                del self.waiting[place]
                insort(self.running, seq, key=_by_rank)
                admitted.append(seq)
                if seq.prefix_key and seq.num_computed < self._num_shared(seq):
                    self._leaders[seq.prefix_key] = seq
        return admitted

    def _take_pages(self, seq: SequenceState) -> bool:
        """Allocate pages for all tokens of ``seq``, reusing cached ones; False, without allocating any, if there are too few."""
        size = self.allocator.page_size
        pages: list[int] = []
        if self.prefix_cache:
            # A prompt token without its log-probability cannot come from the cache, which holds no logits.
            num_known = len(seq.prompt_log_probs) + 1
            is_wanted = seq.sampling.prompt_logprobs and num_known < seq.num_prompt
            tokens = seq.tokens[:num_known] if is_wanted else seq.tokens
            salts = (seq.page_salt(number, size, self.weight_version) for number in range(len(seq.tokens) // size))
            pages = self.allocator.match(tokens, salts)
        num_missing = self.allocator.pages_for(len(seq.tokens)) - len(pages)
        # One page to grow for each running sequence; otherwise the new sequence would be preempted again and again.
        fresh = None
        if num_missing + len(self.running) <= self.allocator.num_free:
            fresh = self.allocator.allocate(num_missing)
        if fresh is None:
            self.allocator.release(pages)
            return False
        seq.pages = pages + fresh
        seq.table = tuple(seq.pages)
        seq.page_hashes = self.allocator.hashes(pages)
        seq.num_computed = len(pages) * size
        seq.is_sealing = True
        if seq.num_preemptions == 0:
            seq.num_cached = min(seq.num_computed, seq.num_prompt)
        return True

    def _seal(self, seq: SequenceState) -> None:
        """Seal the pages of ``seq`` that are full and not yet sealed."""
        size = self.allocator.page_size
        for number in range(len(seq.page_hashes), seq.num_computed // size):
            previous = seq.page_hashes[-1] if number else ROOT
            tokens, salt = (
                seq.tokens[number * size : (number + 1) * size],
                seq.page_salt(number, size, self.weight_version),
            )
            seq.page_hashes.append(self.allocator.seal(seq.pages[number], previous, tokens, salt))

    def _preempt(self, seq: SequenceState) -> None:
        self.running.remove(seq)
        self._release_followers(seq)
        insort(self.waiting, seq, key=_by_rank)
        seq.num_preemptions += 1
        self._drop_pages(seq)

    def _drop_pages(self, seq: SequenceState) -> None:
        self.allocator.release(seq.pages)
        seq.lost_pages, seq.lost_tokens = seq.table, seq.num_computed
        seq.pages, seq.table, seq.page_hashes, seq.num_computed = [], (), [], 0
        self._stuck = None

    def _release_followers(self, seq: SequenceState) -> None:
        """Let sequences that wait for the prompt of ``seq`` be admitted."""
        if self._leaders.get(seq.prefix_key) is seq:
            del self._leaders[seq.prefix_key]

    def _num_shared(self, seq: SequenceState) -> int:
        """Prompt tokens that other sequences could reuse from the cache: full pages, without the last token."""
        return (seq.num_prompt - 1) // self.allocator.page_size * self.allocator.page_size

    def _prompt_chunk(self, seq: SequenceState, budget: int) -> Chunk:
        """Chunk of at most ``budget`` next tokens, all of one Subnet, with at most `MOST_LOGITS` log-probabilities of the prompt."""
        start = seq.num_computed
        end = min(start + budget, seq.phase_end(start))
        num_logits = int(end == len(seq.tokens))
        if seq.sampling.prompt_logprobs:
            first = max(start, len(seq.prompt_log_probs))
            if first < min(end, seq.num_prompt - 1):
                end = min(end, first + MOST_LOGITS)
                num_logits = end - first
        table = seq.table[: self.allocator.pages_for(end)]
        return Chunk(tuple(seq.tokens[start:end]), start, table, seq.subnet, num_logits)
