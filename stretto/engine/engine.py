"""The engine: requests go in, tokens come out, one step of the whole batch at a time. One thread owns it.

Shape letters: M rows of logits, V vocabulary, T positions, L MoE layers, K chosen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.admit import Admission, draw_seed, may_draft
from stretto.engine.cache import PageAllocator
from stretto.engine.finish import OpenChoice
from stretto.engine.ledger import FlopCounter, Totals
from stretto.engine.memory import pages_within
from stretto.engine.request import Completion, EngineConfig, EngineStats, Event, QueueFull, Request, SpeculateConfig
from stretto.engine.runner import MAX_NATIVE_TOKENS, Runner
from stretto.engine.scheduler import Scheduler
from stretto.engine.sequence import SequenceState
from stretto.engine.speculate import draft_candidates
from stretto.engine.step import Stepper, Yield
from stretto.engine.utility import Draft, Watch
from stretto.engine.weights import read_weights, weights_salt
from stretto.model.spec import Subnet, check_subnet
from stretto.model.transformer import Transformer
from stretto.ops.matmul import Arithmetic
from stretto.ops.native.build import Library
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
        seeds: Callable[[], int] = draw_seed,
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
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.weight_version = weight_version
        net, parameter = model.config, model.embedding.weight
        self.max_len = min(config.max_len or net.max_positions, net.max_positions)
        num_pages = config.num_pages or pages_within(model, config, self.max_len, routes)
        self._runner = Runner(
            model,
            num_pages=num_pages,
            page_size=config.page_size,
            device=parameter.device,
            dtype=parameter.dtype,
            routes=routes,
            library=library,
            arithmetic=Arithmetic(config.precision, config.batch_invariant),
            max_native_tokens=None if config.compiled_prefill else MAX_NATIVE_TOKENS,
        )
        self.allocator = PageAllocator(num_pages, config.page_size)
        speculate = config.speculate
        self._scheduler = Scheduler(
            self.allocator,
            max_batch=config.max_batch,
            max_step_tokens=config.max_step_tokens,
            max_len=self.max_len,
            draft_tokens=speculate.max_draft if speculate else 0,
            prefix_cache=config.prefix_cache,
            salt=weights_salt(weight_version),
        )
        self._end_ids = tuple(sorted({*end_ids, *([tokenizer.eos_id] if tokenizer else [])}))
        self._admission = Admission(net, tokenizer, self._end_ids, has_routes=routes, seeds=seeds)
        self._totals = Totals()
        self._clock = clock
        self._open: dict[str, list[OpenChoice]] = {}
        self._choices: dict[SequenceState, OpenChoice] = {}
        self._num_routed = 0
        watch = None if speculate is None else self._watch(speculate, drafts)
        self._stepper = Stepper(
            self._runner, FlopCounter(net), self._totals, watch, config.page_size, self._end_ids, clock
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute."""
        return self._scheduler.has_work

    def add(self, request: Request, *, stream: bool = True) -> None:
        """Queue ``request``.

        Args:
            stream: report every token as it comes; else only the completions, which costs less.

        Raises:
            UserError: it asks for something that this engine or network does not have.
            QueueFull: too many wait.
        """
        if request.id in self._open:
            raise UserError(f"request {request.id}: id: already in flight; choose another")
        if self._scheduler.num_waiting + request.sampling.n > max(self.config.max_waiting, request.sampling.n):
            raise QueueFull(f"{self._scheduler.num_waiting} requests wait already; try again later")
        choices = [
            OpenChoice(
                seq,
                end_ids=frozenset(self._end_ids),
                max_len=self.max_len,
                is_streamed=stream,
                may_draft=may_draft(request),
            )
            for seq in self._admission.sequences(request, self._clock())
        ]
        for choice in choices:  # all are alike, so it is the first that is refused
            self._scheduler.add(choice.seq)
        self._open[request.id] = choices
        self._choices.update((choice.seq, choice) for choice in choices)
        self._num_routed += len(choices) if request.want_routes else 0

    def abort(self, request_id: str) -> list[Completion]:
        """End the open choices of a request with reason ``abort``, and return what they had; [] for an unknown id.

        Their routes lack the rows of tokens that were not computed when they ended.
        """
        choices = list(self._open.get(request_id, ()))
        now_s = self._clock()
        for choice in choices:
            choice.end_early()
        return [self._close(choice, now_s) for choice in choices]

    def step(self) -> list[Event]:
        """Compute one step of the batch: its tokens in the order of the batch, each choice's completion after its last."""
        draft = self._choose_draft()
        self._scheduler.draft_tokens = draft.num_tokens if draft is not None else 0
        plan = self._scheduler.plan()
        if plan is None:
            return []
        self._totals.num_steps += 1
        self._totals.num_preemptions += len(plan.preempted)
        for seq in plan.preempted:
            self._save_routes(seq)
        started_s = self._clock()
        for seq in plan.sequences:
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = started_s
                self._totals.cached_tokens += seq.num_cached
        want_routes = self._num_routed > 0 and any([seq.request.want_routes for seq in plan.sequences])
        proposals = None if draft is None else self._stepper.proposals(plan, draft, self._most_drafts)
        if draft is None or proposals is None:
            yields = self._stepper.plain(plan, want_routes)
        else:
            yields = self._stepper.drafted(proposals, draft, want_routes)
        return self._record(yields)

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
            UserError: a wrong checksum, a tensor missing, unexpected or of another shape, or the version serving now.
        """
        if version == self.weight_version:
            raise UserError(f"version: {version} is the one that serves already; number each set of weights once")
        self._runner.load_weights(self.read_weights(source, checksum))
        self.weight_version = version
        for seq in self._scheduler.weights_changed(weights_salt(version), keep_cache=keep_cache):
            self._totals.num_preemptions += 1
            self._save_routes(seq)

    def read_weights(
        self, source: Mapping[str, Tensor] | Path | str, checksum: str | None = None
    ) -> Mapping[str, Tensor]:
        """`stretto.engine.weights.read_weights` for this network; may run in another thread than the engine's."""
        return read_weights(source, self.model.config, checksum)

    def stats(self) -> EngineStats:
        """The state at this moment."""
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_pages=self.allocator.num_pages,
            num_free_pages=self.allocator.num_free,
            num_cached_pages=self.allocator.num_cached,
            weight_version=self.weight_version,
            **asdict(self._totals),
            kernels=dict(self._runner.kernels),
        )

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Complete ``requests``, any number, and return their choices in order. The engine must be idle before."""
        assert not self._open, f"{len(self._open)} requests are in flight; their events would be lost"
        waiting = deque(requests)
        order = [request.id for request in waiting]
        found: dict[str, list[Completion]] = {request_id: [] for request_id in order}
        while waiting or self.has_work:
            while waiting and self._scheduler.num_waiting < self.config.max_batch:
                self.add(waiting.popleft(), stream=False)
            for event in self.step():
                if isinstance(event, Completion):
                    found[event.request_id].append(event)
        return [done for name in order for done in sorted(found[name], key=lambda completion: completion.index)]

    def _watch(self, speculate: SpeculateConfig, drafts: Sequence[Subnet]) -> Watch:
        net = self.model.config
        named = [check_subnet(net, speculate.draft)] if speculate.draft else draft_candidates(net, drafts)
        return Watch([self._admission.subnet(subnet) for subnet in named], speculate.max_draft, lookup=speculate.lookup)

    def _choose_draft(self) -> Draft | None:
        """Drafts are for batches that only decode and that no waiting request could join."""
        if self._scheduler.num_waiting and self._scheduler.num_running < self.config.max_batch:
            return None
        running = self._scheduler.running
        return self._stepper.choose_draft(running, lambda seq: self._choices[seq].may_draft)

    def _most_drafts(self, seq: SequenceState) -> int:
        choice = self._choices[seq]
        return choice.limit - len(seq.tokens) - 1 if choice.may_draft else 0

    def _record(self, yields: Sequence[Yield]) -> list[Event]:
        """Append what was chosen, tell the scheduler, and close what has ended."""
        now_s, version = self._clock(), self.weight_version
        events: list[Event] = []
        for seq, num_computed, ids, logprobs, tops, error in yields:
            choice = self._choices[seq]
            if error is not None:
                choice.fail(error)
            for at, token in enumerate(ids):
                event = choice.push(token, logprobs[at], version, tops[at] if tops else (), now_s)
                if event is not None:
                    events.append(event)
                if choice.is_finished:
                    break
            # the token chosen last is not computed yet, and a choice may end among its accepted drafts
            self._scheduler.computed(seq, min(num_computed, max(0, len(seq.tokens) - 1 - seq.num_computed)))
            if choice.is_finished:
                events.append(self._close(choice, now_s))
        return events

    def _close(self, choice: OpenChoice, now_s: float) -> Completion:
        """Take a choice that has a finish reason out of the engine."""
        seq, request = choice.seq, choice.seq.request
        self._scheduler.finish(seq)
        self._save_routes(seq)
        del self._choices[seq]
        siblings = self._open[request.id]
        siblings.remove(choice)
        if not siblings:
            del self._open[request.id]
        self._totals.output_tokens += seq.num_output
        routes = None
        if request.want_routes:
            self._num_routed -= 1
            routes = self._runner.read_routes((), 0, 0) if seq.routes is None else seq.routes[: len(seq.tokens) - 1]
        return choice.complete(request.phases.answer.label(), routes, now_s)

    def _save_routes(self, seq: SequenceState) -> None:
        """Keep the rows of a sequence that has just lost its pages. Rows known from before stand."""
        known = 0 if seq.routes is None else len(seq.routes)
        if not seq.request.want_routes or seq.lost_tokens <= known:
            return
        fresh = self._runner.read_routes(seq.lost_pages, known, seq.lost_tokens)
        seq.routes = fresh if seq.routes is None else np.concatenate((seq.routes, fresh))
