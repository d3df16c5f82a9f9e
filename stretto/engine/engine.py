"""The engine: requests go in, tokens come out, one step of the whole batch at a time. One thread owns it.

What depends on one request alone - its grammar, its settings, its text - fails within `SequenceState.guarded`, which ends
that choice with reason ``error``. What the batch shares - the plan, the pages, a forward pass - has no one to blame: an
exception there leaves `Engine.step`, and the engine is not to be used again.

Shape letters: M rows of logits, V vocabulary, T positions, L MoE layers, K chosen.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.cache import PageAllocator
from stretto.engine.forward_torch import KvPool
from stretto.engine.grammar import GrammarState
from stretto.engine.request import VERSIONS, Completion, EngineConfig, EngineStats, Event, QueueFull, Request
from stretto.engine.runner import MAX_NATIVE_TOKENS, Runner, pages_within, read_weights
from stretto.engine.sampling import top_log_probs
from stretto.engine.scheduler import Scheduler
from stretto.engine.sequence import NOT_FINITE, Admission, SequenceState, StepPlan, SubnetTable
from stretto.engine.speculation import Draft, Speculator, Verdict, Watch, draft_candidates
from stretto.model.spec import Subnet, check_subnet, count, executed
from stretto.model.transformer import Transformer
from stretto.ops.matmul import Arithmetic
from stretto.ops.native import Library
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
        drafts: Sequence[Subnet] = (),
        seeds: Callable[[], int] = lambda: secrets.randbits(63),
        clock: Callable[[], float] = time.perf_counter,
    ):
        """
        Args:
            model: on the device and in the dtype to compute in; the engine changes its weights in `load_weights`.
            tokenizer: None: no text, no stop strings, no grammars.
            weight_version: number of the weights that ``model`` holds now.
            end_ids: tokens that end a completion, beside the tokenizer's own.
            routes: keep room for routes, so that requests may ask for them.
            library: compiled kernels for a CPU; None: torch's.
            drafts: Subnets to consider as drafts where the configuration names none.
            seeds: called for a request without a seed.
            clock: seconds; what is written into usage and what utility is measured by.

        Raises:
            UserError: the cache would hold no page, or the configured draft is outside the network.
        """
        self.model, self.tokenizer, self.config, self.weight_version = model, tokenizer, config, weight_version
        net = model.config
        most_len = min(config.max_len or net.max_positions, net.max_positions)
        num_pages = config.num_pages or pages_within(model, config, most_len, routes)
        self.max_len = min(most_len, num_pages * config.page_size)
        """Prompt and completion together that one sequence may have: the cache holds no more."""
        speculate = config.speculate
        self._subnets = SubnetTable()
        self._runner = Runner(
            model,
            self._subnets,
            num_pages=num_pages,
            page_size=config.page_size,
            routes=routes,
            library=library,
            arithmetic=Arithmetic(config.precision, config.batch_invariant),
            max_native_tokens=MAX_NATIVE_TOKENS if config.fast_prefill else None,
            cuda_graphs=config.cuda_graphs and model.embedding.weight.is_cuda,
        )
        self.allocator = PageAllocator(num_pages, config.page_size)
        self._scheduler = Scheduler(
            self.allocator,
            max_batch=config.max_batch,
            max_step_tokens=config.max_step_tokens,
            max_len=most_len,
            draft_tokens=speculate.max_draft if speculate else 0,
            prefix_cache=config.prefix_cache,
            weight_version=weight_version,
        )
        self._end_ids = tuple(sorted({*end_ids, *([tokenizer.eos_id] if tokenizer else [])}))
        self._admission = Admission(
            net, self._subnets, tokenizer, self._end_ids, max_len=most_len, has_routes=routes, seeds=seeds
        )
        self._clock = clock
        self._open: dict[str, list[SequenceState]] = {}
        self._num_routed = 0  # sequences whose routes are wanted
        self._rates: dict[int, tuple[int, int, int]] = {}
        page_bytes = KvPool.bytes_per_page(net, model.embedding.weight.dtype, config.page_size, routes)
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
        watch = None
        if speculate is not None:
            named = [check_subnet(net, speculate.draft)] if speculate.draft else draft_candidates(net, drafts)
            numbers = [self._subnets.number(subnet) for subnet in named]
            watch = Watch(numbers, speculate.max_draft, lookup=speculate.lookup)
        self._speculator = Speculator(self._runner, self._subnets, self._end_ids, watch)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def grammar(self, request: Request) -> GrammarState | None:
        """The grammar of ``request``, for `add`: what takes long in admitting it, and any thread may do.

        Raises:
            UserError: it cannot be followed. QueueFull: too many wait to be read.
        """
        return self._admission.grammar(request)

    def add(self, request: Request, *, stream: bool = True, grammar: GrammarState | None = None) -> None:
        """Queue ``request``. Whatever it raises, nothing has changed.

        Args:
            stream: report every token as it comes; else only the completions, which costs less.
            grammar: what `grammar` returned for it; None: it is compiled here.

        Raises:
            UserError: it asks for something that this engine or network does not have.
            QueueFull: too many wait.
        """
        if request.id in self._open:
            raise UserError(f"request {request.id}: id: already in flight; choose another")
        num_waiting = len(self._scheduler.waiting)
        if num_waiting + request.sampling.n > max(self.config.max_waiting, request.sampling.n):
            raise QueueFull(f"{num_waiting} requests wait already; try again later")
        grammar = grammar or self.grammar(request)
        sequences = self._admission.sequences(request, grammar, self._clock(), is_streamed=stream)
        for seq in sequences:  # all are alike, so it is the first that is refused
            self._scheduler.add(seq)
        self._open[request.id] = sequences
        self._num_routed += len(sequences) if request.want_routes else 0

    def abort(self, request_id: str) -> list[Completion]:
        """End the open choices of a request with reason ``abort``, and return what they had; [] for an unknown id.

        Their routes lack the rows of tokens that were not computed when they ended.
        """
        now_s, sequences = self._clock(), list(self._open.get(request_id, ()))
        for seq in sequences:
            seq.end_early()
        return [self._close(seq, now_s) for seq in sequences]

    def step(self) -> list[Event]:
        """Compute one step of the batch: its tokens in the order of the batch, each choice's completion after its last.

        Before them come the completions of requests that have waited too long."""
        scheduler, stats = self._scheduler, self._stats
        late: list[Event] = self._give_up(self._clock())
        # drafts are for batches that only decode and that no waiting request could join
        is_settled = not scheduler.waiting or len(scheduler.running) >= self.config.max_batch
        draft = self._speculator.choose(scheduler.running) if is_settled else None
        scheduler.draft_tokens = 0 if draft is None else draft.num_tokens
        plan = scheduler.plan()
        if plan is None:
            return late
        stats.num_steps += 1
        started_s = self._clock()
        self._preempted(plan.preempted)
        for seq in plan.sequences:
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = started_s
                stats.cached_tokens += seq.num_cached
        want_routes = self._num_routed > 0 and any([seq.request.want_routes for seq in plan.sequences])
        if draft is not None and self._speculator.prepare(plan, draft):
            found = self._drafted(plan.sequences, draft, want_routes)
        else:
            found = self._plain(plan, want_routes)
        now_s = self._clock()
        events = late
        for chunk, seq in zip(plan.chunks, plan.sequences, strict=True):
            num_computed = len(chunk.tokens) + len(seq.drafts)
            seq.drafts = []
            if seq in found:
                with seq.guarded():
                    self._push(seq, found[seq], now_s, events)
            # the token chosen last is not computed yet, and a choice may end among its accepted drafts
            scheduler.computed(seq, min(num_computed, max(0, len(seq.tokens) - 1 - seq.num_computed)))
            if seq.finish_reason is not None:
                events.append(self._close(seq, now_s))
        return events

    def load_weights(
        self,
        version: int,
        source: Mapping[str, Tensor] | Path | str,
        *,
        keep_cache: bool = False,
        checksum: str | None = None,
    ) -> None:
        """Go on with other weights of the same network; tokens sampled from now on carry ``version``.

        Tokens, log-probabilities and routes of before stay as they are. If anything is wrong the old weights serve on.

        Args:
            source: a state dict of `Transformer`, or a checkpoint folder.
            keep_cache: sequences in the batch go on upon the keys and values they have, from old weights; else they
                are computed again from their first token. Later requests never see old keys and values.
            checksum: see `read_weights`.

        Raises:
            UserError: a wrong checksum, a tensor missing, unexpected or of another shape, or a version that is serving now
                or no 64-bit integer.
        """
        if version not in VERSIONS:
            raise UserError(f"version: {version} is no 64-bit integer; choose a smaller number")
        if version == self.weight_version:
            raise UserError(f"version: {version} is the one that serves already; number each set of weights once")
        self._runner.load_weights(self.read_weights(source, checksum))
        self.weight_version = version
        self._preempted(self._scheduler.weights_changed(version, keep_cache=keep_cache))

    def read_weights(
        self, source: Mapping[str, Tensor] | Path | str, checksum: str | None = None
    ) -> Mapping[str, Tensor]:
        """`stretto.engine.runner.read_weights` for this network; may run in another thread than the engine's."""
        return read_weights(source, self.model.config, checksum)

    def stats(self) -> EngineStats:
        """The state at this moment."""
        return replace(
            self._stats,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_free_pages=self.allocator.num_free,
            num_cached_pages=self.allocator.num_cached,
            weight_version=self.weight_version,
            kernels=dict(self._runner.kernels),
        )

    def _give_up(self, now_s: float) -> list[Event]:
        """End the requests none of whose choices found a place in time."""
        most_s = self.config.max_wait_s
        if most_s is None:
            return []
        # in order of arrival, and whoever was preempted came before all those that are new
        fresh = (seq for seq in self._scheduler.waiting if seq.first_scheduled_s is None)
        names = dict.fromkeys(seq.request.id for seq in takewhile(lambda seq: now_s - seq.arrived_s > most_s, fresh))
        events: list[Event] = []
        for name in names:
            choices = list(self._open[name])
            if len(choices) < choices[0].request.sampling.n or any(
                seq.first_scheduled_s is not None for seq in choices
            ):
                continue  # it has begun; the rest of its choices will come
            self._stats.num_timeouts += 1
            for seq in choices:
                seq.give_up(most_s)
                events.append(self._close(seq, now_s))
        return events

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Complete ``requests``, any number, and return their choices in order. The engine must be idle before."""
        assert not self._open, f"{len(self._open)} requests are in flight; their events would be lost"
        waiting = deque(requests)
        order = {request.id: place for place, request in enumerate(waiting)}
        done: list[Completion] = []
        while waiting or self.has_work:
            while waiting and len(self._scheduler.waiting) < self.config.max_batch:
                self.add(waiting.popleft(), stream=False)
            done += [event for event in self.step() if isinstance(event, Completion)]
        return sorted(done, key=lambda one: (order[one.request_id], one.index))

    def _plain(self, plan: StepPlan, want_routes: bool) -> dict[SequenceState, Verdict]:
        """Compute ``plan`` as it is; a token for each sequence whose last one is computed."""
        started_s = self._clock()
        logits_MV = self._runner.forward(plan.chunks, want_routes)
        rows: list[int] = []
        sampled: list[SequenceState] = []
        end_row = 0
        for chunk, seq in zip(plan.chunks, plan.sequences, strict=True):
            self._charge(seq, chunk.subnet, chunk.start, len(chunk.tokens), chunk.num_logits)
            end_row += chunk.num_logits
            if chunk.start < seq.num_prompt:
                self._stats.prompt_tokens += min(chunk.end, seq.num_prompt) - chunk.start
                if seq.sampling.prompt_logprobs and chunk.num_logits:
                    with seq.guarded():
                        _score_prompt(seq, chunk.end, logits_MV[end_row - chunk.num_logits : end_row])
            is_last = chunk.num_logits > 0 and chunk.end == len(seq.tokens)
            if is_last and seq.finish_reason is None and seq.begin_drafts():
                rows.append(end_row - 1)
                sampled.append(seq)
        if len(rows) < len(logits_MV):
            logits_MV = logits_MV[torch.tensor(rows, dtype=torch.int64, device=logits_MV.device)]
        found = self._speculator.decide(sampled, (), logits_MV)
        if self._speculator.watch is not None and all([len(chunk.tokens) == 1 for chunk in plan.chunks]):
            self._speculator.watch.plain(len(plan.chunks), self._clock() - started_s)
        return found

    def _drafted(
        self, sequences: Sequence[SequenceState], draft: Draft, want_routes: bool
    ) -> dict[SequenceState, Verdict]:
        """Draft for a batch that decodes, and verify."""
        started_s = self._clock()
        distributions = self._speculator.draft(sequences, draft)
        drafted_s = self._clock()
        logits_MV = self._speculator.verify(sequences, want_routes)
        found = self._speculator.decide(sequences, distributions, logits_MV)
        verified_s = self._clock()
        num_accepted = num_rejected = 0
        for seq in sequences:
            num, num_kept = len(seq.drafts), len(found[seq].ids) - 1 if seq in found else 0
            num_accepted += num_kept
            num_rejected += num_kept < num
            seq.num_drafted += num
            seq.num_accepted += num_kept
            self._stats.drafted_tokens += num
            if draft.subnet is not None:
                self._charge(seq, draft.subnet, seq.num_computed, num, num)
            self._charge(seq, seq.subnet, seq.num_computed, num + 1, num + 1)
        self._stats.accepted_tokens += num_accepted
        if distributions:
            assert self._speculator.watch is not None
            measured = replace(draft, num_tokens=len(distributions))
            draft_s, verify_s = drafted_s - started_s, verified_s - drafted_s
            self._speculator.watch.cycle(len(sequences), measured, draft_s, verify_s, num_accepted, num_rejected)
        return found

    def _charge(self, seq: SequenceState, subnet: int, start: int, num: int, num_logits: int) -> None:
        """Count the FLOPs of ``num`` tokens from ``start`` on: all through the layers, ``num_logits`` through the head."""
        if subnet not in self._rates:
            net = self.model.config
            head, counts = 2 * net.hidden_size * net.vocab_size, count(net, executed(net, self._subnets[subnet]))
            self._rates[subnet] = counts.linear_flops - head, counts.score_flops, head
        linear, score, head = self._rates[subnet]
        num_keys = num * start + num * (num + 1) // 2
        seq.flops += num * linear + num_keys * score + num_logits * head

    def _push(self, seq: SequenceState, verdict: Verdict, now_s: float, events: list[Event]) -> None:
        """Append what was chosen, and the events of its tokens that are wanted."""
        logp_MV = verdict.logp_MV
        tops = [] if logp_MV is None else top_log_probs(logp_MV, seq.sampling.top_logprobs)
        for at, (token, logprob) in enumerate(zip(verdict.ids, verdict.logprobs, strict=True)):
            if seq.finish_reason is not None:
                break
            event = seq.push(token, logprob, self.weight_version, tops[at] if tops else (), now_s)
            if event is not None:
                events.append(event)

    def _close(self, seq: SequenceState, now_s: float) -> Completion:
        """Take a sequence that has a finish reason out of the engine."""
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
        """Keep the rows of a sequence that has just lost its pages. Rows known from before stand."""
        known = 0 if seq.routes is None else len(seq.routes)
        if not seq.request.want_routes or seq.lost_tokens <= known:
            return
        fresh = self._runner.read_routes(seq.lost_pages, known, seq.lost_tokens)
        seq.routes = fresh if seq.routes is None else np.concatenate((seq.routes, fresh))


def _score_prompt(seq: SequenceState, end: int, logits_MV: Tensor) -> None:
    """Add what the logits of the positions before ``end`` say about the prompt tokens that follow them."""
    first = end - len(logits_MV)
    known = len(seq.prompt_log_probs)
    positions = range(max(first, known), min(end, seq.num_prompt - 1))
    if not positions:
        return
    assert positions.start == known, f"prompt log-probabilities {known} to {positions.start} were left out"
    rows_MV = logits_MV[positions.start - first : positions.stop - first]
    ids_M = torch.tensor([seq.tokens[position + 1] for position in positions], device=logits_MV.device)
    logp_MV = rows_MV.log_softmax(-1)
    found = logp_MV.gather(-1, ids_M[:, None]).squeeze(-1).tolist()
    seq.prompt_log_probs += found
    if seq.sampling.top_logprobs:
        seq.prompt_top += top_log_probs(logp_MV, seq.sampling.top_logprobs)
    if not all(map(math.isfinite, found)):
        seq.fail(NOT_FINITE)
