"""The engine: completes requests, one step of the whole batch at a time. One thread owns it.

Work for one request (its grammar, its parameters, its text) runs within `SequenceState.guarded`: an exception ends
that choice with reason ``error``. An exception in work for the whole batch (the plan, the pages, a forward pass) leaves
`Engine.step`, and the engine must not be used afterwards.

Shape letters: M rows of logits, V vocabulary, T positions, L MoE layers, K chosen.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.cache import PageAllocator
from stretto.engine.forward_cpu import Integers
from stretto.engine.forward_torch import KvPool
from stretto.engine.grammar import GrammarState
from stretto.engine.ranks import Ranks
from stretto.engine.request import (
    VERSIONS,
    Completion,
    EngineConfig,
    EngineStats,
    Event,
    Phases,
    QueueFull,
    Request,
    Sampling,
    TokenEvent,
)
from stretto.engine.runner import MAX_NATIVE_TOKENS, Runner, WeightSource, pages_within, read_weights
from stretto.engine.sampling import Row, SamplerCache, process, sample, top_log_probs
from stretto.engine.scheduler import Scheduler
from stretto.engine.sequence import NOT_FINITE, Admission, Chunk, SequenceState, StepPlan, SubnetTable
from stretto.model.counts import count
from stretto.model.spec import ModelConfig, Subnet, executed
from stretto.model.transformer import Transformer
from stretto.ops import exact
from stretto.ops.matmul import Arithmetic
from stretto.ops.native import Library, choose_tokens
from stretto.text.tokenizer import Tokenizer


class Engine:
    """Continuous batching of requests, each at its own Subnet, over one set of weights."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        weight_version: int = 0,
        *,
        end_ids: Iterable[int] = (),
        routes: bool = True,
        library: Library | None = None,
        seeds: Callable[[], int] = lambda: secrets.randbits(63),
        clock: Callable[[], float] = time.perf_counter,
        ranks: Ranks | None = None,
        integers: Integers = MappingProxyType({}),
    ):
        """
        Args:
            model: the network, on its final device and in its final data type. `load_weights` overwrites its weights; in FP8, a GPU's
                engine rounds them (`stretto.ops.fp8_rows.Fp8Weights`).
            tokenizer: None: no text, no stop strings, no grammars.
            weight_version: version of the weights in ``model``.
            end_ids: tokens that end a completion, in addition to the tokenizer's end token.
            routes: store routes in the cache, so requests can ask for them.
            library: compiled kernels for a CPU; None: torch computes.
            seeds: called for each request without a seed.
            clock: time in seconds, for the times in `Usage`.
            ranks: ranks of tensor parallelism, ``config.tp`` of them; ``model`` is the part of this one, rank 0.
            integers: integer weights, as in `Runner`.

        Raises:
            UserError: the cache would be smaller than one page, or the configured ``max_len`` is too large for it, for
                the network's positions, or for batch-invariant attention.
        """
        self.model, self.tokenizer, self.config, self.weight_version = model, tokenizer, config, weight_version
        assert config.tp == (1 if ranks is None else ranks.shard.num_ranks), f"tp {config.tp}, and other ranks"
        self._team = None if ranks is None else ranks.team
        net = self.network = model.config if ranks is None else ranks.network
        """The whole network; with tensor parallelism, ``model`` is a part of it."""
        most_positions = _most_positions(config, net)
        num_pages = config.num_pages or pages_within(model, config, most_positions, routes)
        self.max_len = min(most_positions, num_pages * config.page_size)
        """Largest length of prompt and completion together that the cache holds."""
        self._subnets = SubnetTable()
        self._runner = Runner(
            model,
            self._subnets,
            num_pages=num_pages,
            page_size=config.page_size,
            routes=routes,
            library=library,
            integers=integers,
            arithmetic=Arithmetic(config.precision, config.batch_invariant),
            max_native_tokens=MAX_NATIVE_TOKENS if config.fast_prefill else None,
            cuda_graphs=config.cuda_graphs and model.embedding.weight.is_cuda,
            ranks=ranks,
        )
        self.allocator = PageAllocator(num_pages, config.page_size)
        self._scheduler = Scheduler(
            self.allocator,
            max_batch=config.max_batch,
            max_step_tokens=config.max_step_tokens,
            most_positions=most_positions,
            prefix_cache=config.prefix_cache,
            weight_version=weight_version,
        )
        self._end_ids = tuple(sorted({*end_ids, *([tokenizer.eos_id] if tokenizer else [])}))
        self._admission = Admission(
            net, self._subnets, tokenizer, self._end_ids, most_positions=most_positions, has_routes=routes, seeds=seeds
        )
        self._clock = clock
        self._open: dict[str, list[SequenceState]] = {}
        self._num_routed = 0  # open sequences of requests with routes
        self._rates: dict[int, tuple[int, int, int]] = {}  # FLOPs by Subnet, see `_charge`
        page_bytes = KvPool.bytes_per_page(model.config, model.embedding.weight.dtype, config.page_size, routes)
        self._stats = EngineStats(
            num_running=0,
            num_waiting=0,
            num_pages=num_pages,
            num_free_pages=num_pages,
            num_cached_pages=0,
            max_len=self.max_len,
            cache_bytes=num_pages * page_bytes,
            is_batch_invariant=self._runner.is_batch_invariant,
            weight_version=weight_version,
        )
        self._chooser = _Chooser(self._runner, self._end_ids)

    @property
    def integers(self) -> Integers:
        """The integer weights by which the kernels multiply, for another engine of the same model."""
        return self._runner.panels

    @property
    def has_work(self) -> bool:
        """Whether `step` has sequences to compute."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def grammar(self, request: Request) -> GrammarState | None:
        """The compiled grammar of ``request``, for `add`. Thread-safe: compilation is the slow part of admission.

        Raises:
            UserError: the grammar is invalid or too expensive. QueueFull: too many grammars wait for compilation.
        """
        return self._admission.grammar(request)

    def add(self, request: Request, *, stream: bool = True, grammar: GrammarState | None = None) -> None:
        """Queue ``request``. An exception leaves the engine unchanged.

        Args:
            stream: report every token as soon as it is sampled; otherwise only completions, which takes less time.
            grammar: the result of `grammar`; None: compiled here.

        Raises:
            UserError: the request needs something that this engine or network does not have.
            QueueFull: too many requests wait.
        """
        if request.id in self._open:
            raise UserError(f"request {request.id}: id: already in flight; choose another")
        num_waiting = len(self._scheduler.waiting)
        if num_waiting + request.sampling.n > max(self.config.max_waiting, request.sampling.n):
            raise QueueFull(f"{num_waiting} requests wait already; try again later")
        grammar = grammar or self.grammar(request)
        sequences = self._admission.sequences(request, grammar, self._clock(), is_streamed=stream)
        for seq in sequences:  # all are alike, so an exception can only come from the first
            self._scheduler.add(seq)
        self._open[request.id] = sequences
        self._num_routed += len(sequences) if request.want_routes else 0

    def abort(self, request_id: str) -> list[Completion]:
        """End the open choices of a request with reason ``abort``, and return their completions; [] for an unknown id.

        Routes have no rows for tokens that were not yet computed.
        """
        now_s, sequences = self._clock(), list(self._open.get(request_id, ()))
        for seq in sequences:
            seq.end_early()
        return [self._close(seq, now_s) for seq in sequences]

    def step(self) -> list[Event]:
        """Compute one step of the batch.

        Returns completions of requests that have waited too long, then the new tokens in the order of the batch, each last token
        followed by the completion of its choice.
        """
        scheduler, stats = self._scheduler, self._stats
        events: list[Event] = self._time_out(self._clock())
        plan = scheduler.plan()
        if plan is None:
            return events
        stats.num_steps += 1
        started_s = self._clock()
        self._preempted(plan.preempted)
        for seq in plan.sequences:
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = started_s
                stats.cached_tokens += seq.num_cached
        want_routes = self._num_routed > 0 and any([seq.request.want_routes for seq in plan.sequences])
        choices = self._compute(plan, want_routes)
        now_s = self._clock()
        for chunk, seq in zip(plan.chunks, plan.sequences, strict=True):
            if seq in choices:
                with seq.guarded():
                    self._push(seq, choices[seq], now_s, events)
            scheduler.computed(seq, len(chunk.tokens))  # without the new token
            if seq.finish_reason is not None:
                events.append(self._close(seq, now_s))
        return events

    def load_weights(
        self, version: int, source: WeightSource, *, keep_cache: bool = False, checksum: str | None = None
    ) -> None:
        """Replace the weights by others of the same network; tokens sampled from now on carry ``version``.

        Earlier tokens, log-probabilities and routes do not change. Before the first token of a choice, those of a prompt that is computed
        again are the new weights'. After an exception the old weights stay in use.

        Args:
            keep_cache: True: sequences in the batch continue with their keys and values of the old weights; False: they
                are computed again from the first token. New requests never use old keys and values.
            checksum: see `read_weights`.

        Raises:
            UserError: a wrong checksum; a missing or unexpected tensor, or one of another shape; a version that is already in use
                or not a 64-bit integer.
        """
        if not isinstance(version, int):  # `in` would compare it with each number
            raise UserError(
                f"version: {type(version).__name__} is not an integer; give the version first, then the weights"
            )
        if version not in VERSIONS:
            raise UserError(f"version: {version} is not a 64-bit integer; choose a smaller number")
        if version == self.weight_version:
            raise UserError(f"version: {version} is in service already; give each set of weights its own number")
        self._runner.load_weights(read_weights(source, self.network, checksum))
        self.weight_version = version
        self._preempted(self._scheduler.weights_changed(version, keep_cache=keep_cache))
        for seq in itertools.chain.from_iterable(self._open.values()):
            if not seq.pages and not seq.log_probs:
                seq.forget_prompt()

    @property
    def has_lost_rank(self) -> bool:
        """Whether a rank of tensor parallelism has ended."""
        return self._team is not None and self._team.has_failed

    def check_ranks(self) -> None:
        """Raises `stretto.engine.ranks.RankFailed`: a rank of tensor parallelism has ended."""
        if self._team is not None:
            self._team.check()

    def close(self) -> None:
        """End the other ranks of tensor parallelism; the engine must not be used afterwards."""
        if self._team is not None:
            self._team.close()

    def stats(self) -> EngineStats:
        """The current state."""
        return replace(
            self._stats,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_free_pages=self.allocator.num_free,
            num_cached_pages=self.allocator.num_cached,
            weight_version=self.weight_version,
            kernels=dict(self._runner.kernels),
        )

    def _time_out(self, now_s: float) -> list[Event]:
        """End requests whose choices all waited longer than ``max_wait_s`` for a place in the batch."""
        most_s = self.config.max_wait_s
        if most_s is None:
            return []
        fresh = (seq for seq in self._scheduler.waiting if seq.first_scheduled_s is None)
        names = dict.fromkeys(seq.request.id for seq in fresh if now_s - seq.arrived_s > most_s)
        events: list[Event] = []
        for name in names:
            choices = list(self._open[name])
            if len(choices) < choices[0].request.sampling.n or any(
                seq.first_scheduled_s is not None for seq in choices
            ):
                continue  # the request has begun, so its other choices will follow
            self._stats.num_timeouts += 1
            for seq in choices:
                seq.time_out(most_s)
                events.append(self._close(seq, now_s))
        return events

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Complete any number of ``requests`` and return their choices in order. The engine must be idle.

        If a request is refused, the others are aborted, and the error is that of `add`.
        """
        assert not self._open, f"{len(self._open)} requests are in flight; their events would be lost"
        waiting = deque(requests)
        order = {request.id: place for place, request in enumerate(waiting)}
        done: list[Completion] = []
        while waiting or self.has_work:
            while waiting and self._takes(waiting[0]):
                try:
                    self.add(waiting.popleft(), stream=False)
                except Exception:
                    for name in list(self._open):
                        self.abort(name)
                    raise
            done += [event for event in self.step() if isinstance(event, Completion)]
        return sorted(done, key=lambda choice: (order[choice.request_id], choice.index))

    def _takes(self, request: Request) -> bool:
        """Whether `generate` queues ``request`` now: less than a batch waits, and `add` has room for it."""
        num_waiting = len(self._scheduler.waiting)
        has_room = num_waiting == 0 or num_waiting + request.sampling.n <= self.config.max_waiting
        return has_room and num_waiting < self.config.max_batch

    def _compute(self, plan: StepPlan, want_routes: bool) -> dict[SequenceState, _Choice]:
        """Compute ``plan``, and choose a token for each sequence whose last token is computed."""
        logits_MV = self._runner.forward(plan.chunks, want_routes)
        rows: list[int] = []
        sampled: list[SequenceState] = []
        end_row = 0
        for chunk, seq in zip(plan.chunks, plan.sequences, strict=True):
            self._charge(seq, chunk)
            end_row += chunk.num_logits
            if chunk.start < seq.num_prompt:
                self._stats.prompt_tokens += min(chunk.end, seq.num_prompt) - chunk.start
                if seq.sampling.prompt_logprobs and chunk.num_logits:
                    with seq.guarded():
                        _score_prompt(seq, chunk.end, logits_MV[end_row - chunk.num_logits : end_row])
            is_last = chunk.num_logits > 0 and chunk.end == len(seq.tokens)
            if is_last and seq.finish_reason is None and seq.may_choose():
                rows.append(end_row - 1)
                sampled.append(seq)
        if len(rows) < len(logits_MV):
            logits_MV = logits_MV[torch.tensor(rows, dtype=torch.int64, device=logits_MV.device)]
        return self._chooser.choose(sampled, logits_MV)

    def _charge(self, seq: SequenceState, chunk: Chunk) -> None:
        """Add the FLOPs of ``chunk``: layers for all tokens, the head for ``num_logits`` of them."""
        if chunk.subnet not in self._rates:
            net = self.network
            head, counts = 2 * net.hidden_size * net.vocab_size, count(net, executed(net, self._subnets[chunk.subnet]))
            self._rates[chunk.subnet] = counts.linear_flops - head, counts.score_flops, head
        linear, score, head = self._rates[chunk.subnet]
        num = len(chunk.tokens)
        num_keys = num * chunk.start + num * (num + 1) // 2
        seq.flops += num * linear + num_keys * score + chunk.num_logits * head

    def _push(self, seq: SequenceState, choice: _Choice, now_s: float, events: list[Event]) -> None:
        """Append the chosen token to ``seq``, and its event, if the sequence is streamed, to ``events``."""
        top = () if choice.logp_1V is None else top_log_probs(choice.logp_1V, seq.sampling.top_logprobs)[0]
        event = seq.push(choice.token, choice.logprob, self.weight_version, top, now_s)
        if event is not None:
            events.append(event)

    def _close(self, seq: SequenceState, now_s: float) -> Completion:
        """Remove a sequence with a finish reason from the engine, and return its completion."""
        request = seq.request
        self._scheduler.finish(seq)
        self._save_routes(seq)
        siblings = self._open[request.id]
        siblings.remove(seq)
        if not siblings:
            del self._open[request.id]
        self._stats.output_tokens += len(seq.log_probs)
        routes = None
        if request.want_routes:
            self._num_routed -= 1
            routes = self._runner.read_routes((), 0, 0) if seq.routes is None else seq.routes[: len(seq.tokens) - 1]
        return seq.complete(routes, now_s)

    def _preempted(self, sequences: Sequence[SequenceState]) -> None:
        self._stats.num_preemptions += len(sequences)
        for seq in sequences:
            self._save_routes(seq)

    def _save_routes(self, seq: SequenceState) -> None:
        """Save routes from the pages that a sequence has just lost. Routes that were saved before are not replaced."""
        num_saved = 0 if seq.routes is None else len(seq.routes)
        if not seq.request.want_routes or seq.lost_tokens <= num_saved:
            return
        fresh = self._runner.read_routes(seq.lost_pages, num_saved, seq.lost_tokens)
        seq.routes = fresh if seq.routes is None else np.concatenate((seq.routes, fresh))


def _most_positions(config: EngineConfig, net: ModelConfig) -> int:
    """Largest length of prompt and completion together, whatever the cache holds. Raises UserError: ``config.max_len`` is larger than
    the network's positions, or than batch-invariant attention takes."""
    most = config.max_len or net.max_positions
    if most > net.max_positions:
        raise UserError(f"max_len: {most} tokens; the network has {net.max_positions} positions: lower it")
    if not config.batch_invariant:
        return most
    longest = exact.longest(config.page_size)
    if config.max_len is not None and most > longest:
        raise UserError(
            f"max_len: {config.max_len} tokens; batch-invariant attention takes {longest} at most: lower it, or leave "
            "batch_invariant out"
        )
    return min(most, longest)


def stream(
    engine: Engine, ids: list[int], subnet: Subnet, sampling: Sampling, visible_ids: frozenset[int] = frozenset()
) -> Generator[str]:
    """Yield the continuation of ``ids`` piece by piece. Closing the iterator ends the request. Raises `UserError`: the engine could not
    finish the request."""
    request = Request("console", tuple(ids), sampling, Phases(subnet), visible_ids=visible_ids)
    engine.add(request)
    try:
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    yield event.text
                elif event.error is not None:
                    raise UserError(f"the completion failed: {event.error}")
    finally:
        engine.abort(request.id)


class _Choice(NamedTuple):
    """The next token of one sequence."""

    token: int
    logprob: float
    logp_1V: Tensor | None
    """Processed log-probabilities; None if the request has no ``top_logprobs``."""


class _Chooser:
    """Chooses the next token of each sequence from its row of logits."""

    def __init__(self, runner: Runner, end_ids: tuple[int, ...]):
        self._runner, self._end_ids, self._cache = runner, end_ids, SamplerCache()

    def choose(self, sequences: Sequence[SequenceState], logits_MV: Tensor) -> dict[SequenceState, _Choice]:
        """Choose a token for each sequence. A sequence whose sampling parameters cause an exception ends and has no token."""
        try:
            return self._choose(sequences, logits_MV)
        except Exception:  # rows are independent, so the sequence that caused the exception also fails alone
            choices: dict[SequenceState, _Choice] = {}
            for seq, row_1V in zip(sequences, logits_MV.split(1), strict=True):
                # a sequence with only a temperature cannot be the cause: the engine itself is broken
                with seq.guarded() if seq.temperature is None else nullcontext():
                    choices |= self._choose([seq], row_1V)
            return choices

    def _choose(self, sequences: Sequence[SequenceState], logits_MV: Tensor) -> dict[SequenceState, _Choice]:
        # The method for a sequence depends only on its own parameters, never on the rest of the batch.
        is_compiled = self._runner.native is not None
        plain = [is_compiled and seq.temperature is not None for seq in sequences]
        choices: dict[SequenceState, _Choice] = {}
        for flag, choose in ((True, self._by_kernels), (False, self._by_torch)):
            places = [place for place, is_plain in enumerate(plain) if is_plain == flag]
            if places:
                rows_MV = logits_MV if len(places) == len(plain) else logits_MV[torch.tensor(places)]
                choices |= choose([sequences[place] for place in places], rows_MV)
        return choices

    def _by_kernels(self, sequences: Sequence[SequenceState], logits_MV: Tensor) -> dict[SequenceState, _Choice]:
        """Choice by the compiled kernels, for sequences with no parameter but a temperature."""
        assert self._runner.native is not None
        chosen = choose_tokens(
            self._runner.native.library,
            logits_MV,
            [len(seq.tokens) for seq in sequences],
            [seq.temperature or 0.0 for seq in sequences],
            [seq.seed_bits for seq in sequences],
        )
        rows = zip(sequences, chosen.ids, chosen.logprobs, strict=True)
        return {seq: _Choice(token, logprob, None) for seq, token, logprob in rows}

    def _by_torch(self, sequences: Sequence[SequenceState], logits_MV: Tensor) -> dict[SequenceState, _Choice]:
        """Choice by `stretto.engine.sampling`, for all parameters."""
        rows = [Row(seq.sampling, seq.tokens, seq.num_prompt, seq.mask, seq.counts) for seq in sequences]
        logp_MV = process(logits_MV, rows, end_ids=self._end_ids, cache=self._cache)
        samplings, positions = [row.sampling for row in rows], [len(row.tokens) for row in rows]
        ids_M = sample(logp_MV, samplings, positions, end_ids=self._end_ids, cache=self._cache)
        logprobs = logp_MV.gather(1, ids_M[:, None])[:, 0].tolist()
        return {
            seq: _Choice(token, logprob, logp_MV[at : at + 1] if seq.sampling.top_logprobs else None)
            for at, (seq, token, logprob) in enumerate(zip(sequences, ids_M.tolist(), logprobs, strict=True))
        }


def _score_prompt(seq: SequenceState, end: int, logits_MV: Tensor) -> None:
    """Append log-probabilities of prompt tokens; ``logits_MV`` are those of the last positions before ``end``."""
    first = end - len(logits_MV)
    num_known = len(seq.prompt_log_probs)
    positions = range(max(first, num_known), min(end, seq.num_prompt - 1))
    if not positions:
        return
    assert positions.start == num_known, f"prompt log-probabilities {num_known} to {positions.start} are missing"
    rows_MV = logits_MV[positions.start - first : positions.stop - first]
    ids_M = torch.tensor([seq.tokens[position + 1] for position in positions], device=logits_MV.device)
    logp_MV = rows_MV.log_softmax(-1)
    logprobs = logp_MV.gather(-1, ids_M[:, None]).squeeze(-1).tolist()
    seq.prompt_log_probs += logprobs
    if seq.sampling.top_logprobs:
        seq.prompt_top += top_log_probs(logp_MV, seq.sampling.top_logprobs)
    if not all(map(math.isfinite, logprobs)):
        seq.fail(NOT_FINITE)
