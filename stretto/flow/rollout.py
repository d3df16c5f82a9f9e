"""Engine role: agents sample from it, and it activates new weights while requests continue."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import InfraError, UserError
from stretto.base.trajectory import Segment, WeightVersion
from stretto.engine.async_engine import AsyncEngine, Closed, EngineFailed
from stretto.engine.engine import Engine
from stretto.engine.loading import open_engine
from stretto.engine.request import Completion, EngineConfig, EngineStats, Phases, QueueFull, Request, Sampling
from stretto.flow.clients import CallsInFlight, Generated, GenerateRequest, KeptTokens, Unavailable, within
from stretto.learning.recipe import RlRecipe
from stretto.learning.weights import fetch
from stretto.model.spec import Subnet
from stretto.ops.matmul import default_precision

_PROMPT_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Prompt tokens of one engine step, by device. A GPU takes as long for a few tokens as for many."""


def open_rollout_engine(recipe: RlRecipe, start: Path, device: str) -> Engine:
    """An engine with the checkpoint at ``start``, whose weights it has until a version is activated.

    With compiled kernels on a CPU, or batch-invariant operators elsewhere, the result of a request is a function of weights,
    prompt and seed, to the bit. A run without staleness is then reproducible.
    """
    rollout, precision = recipe.rollout, recipe.on(default_precision(device)).precision
    torch.set_num_threads(rollout.threads)
    prompt_tokens = _PROMPT_TOKENS["cpu" if torch.device(device).type == "cpu" else "cuda"]
    config = EngineConfig(
        cache_bytes=rollout.cache_bytes,
        max_batch=rollout.max_batch,
        max_step_tokens=max(prompt_tokens, rollout.max_batch),
        precision=precision.engines,
        batch_invariant=precision.batch_invariant,
        page_size=rollout.page_size,
    )
    return open_recording_engine(start, config, device, routes=recipe.replay == "r3")


def open_run_engine(recipe: RlRecipe, start: Path, device: str) -> Engine:
    """`open_rollout_engine` for a run, in which the longest sample must fit into the cache: a request that does not fit ends the run.
    Raises UserError: the cache is too small."""
    engine = open_rollout_engine(recipe, start, device)
    stats, length = engine.stats(), min(recipe.sample_length, engine.network.max_positions)
    num_needed = engine.allocator.pages_for(length)
    if stats.num_pages < num_needed:
        raise UserError(
            f"rollout.cache_bytes: {recipe.rollout.cache_bytes} bytes hold {engine.max_len} tokens, and a sample may have "
            f"{length}; give the cache {num_needed * stats.cache_bytes // stats.num_pages} bytes or more"
        )
    return engine


def open_recording_engine(start: Path, config: EngineConfig, device: str, *, routes: bool) -> Engine:
    """An engine that records routes if ``routes``. Its weights, those of ``start``, have the version -1."""
    # the default on a GPU is bf16
    dtype = torch.float32 if config.precision == "fp32" else None
    engine = open_engine(start, config, device=device, dtype=dtype, with_tokenizer=False, routes=routes).engine
    engine.weight_version = -1  # the run's weights have not been activated yet
    return engine


class EngineRole:
    """One engine in a thread of its own, behind async methods. Each sampled token carries the version of its weights."""

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        fetch: Callable[[WeightVersion], Mapping[str, Tensor]] = fetch,
        *,
        name: str = "engine",
        waits: bool = False,
        subnet: Subnet | None = None,
        keep_cache: bool = False,
    ):
        """
        Args:
            open_engine: called once, here. Its engine must record routes if requests ask for them.
            waits: sample nothing before the first `activate`, because a restarted engine opens with outdated weights.
            subnet: the Subnet that samples; None: the full network.
            keep_cache: samples in flight keep their keys and values when new weights are loaded; False: these are computed again.
        """
        self.name, self._fetch, self._keep_cache = name, fetch, keep_cache
        engine = open_engine()
        self._phases, self._page_size = Phases(subnet or engine.network.full()), engine.config.page_size
        self.version = engine.weight_version
        """Version of the active weights."""
        self.service = AsyncEngine(engine).start()
        self._numbers = itertools.count()
        self._is_ready = asyncio.Event()
        if not waits:
            self._is_ready.set()
        self._activating = asyncio.Lock()
        self._prefills: dict[bytes, asyncio.Event] = {}
        self._kept, self._calls = KeptTokens(name), CallsInFlight(name)

    async def generate(self, request: GenerateRequest) -> Generated:
        """Sample at most ``max_tokens`` after ``tokens``. A cancelled or late request is removed from the engine.

        Raises:
            Forgotten: the engine does not have the first ``num_kept`` tokens.
            Unavailable: the engine is dead.
            InfraError: the queue is full, the deadline has passed, the output is not finite, or `rewind` was called.
            UserError: the network cannot process the request.
        """
        late = f"{self.name}: request {request.id}: not done within {request.deadline_s:g} s"
        try:
            async with self._calls.one(), within(request.deadline_s, late):
                await self._is_ready.wait()
                return await self._generate(request)
        except (EngineFailed, Closed) as error:
            raise Unavailable(f"{self.name}: {error}") from error
        except QueueFull as error:
            raise InfraError(f"{self.name}: {error}") from error

    async def activate(self, version: WeightVersion) -> None:
        """Load ``version`` before the next engine step; requests in flight continue with it. Older versions are ignored.

        Raises:
            UserError: its file cannot be read, or has tensors of another network; the old weights stay active.
            InfraError: the engine is dead, or the weights cannot be fetched now; then the old ones stay active.
        """
        async with self._activating:
            if version.number > self.version:
                state = await asyncio.to_thread(self._fetch, version)
                try:
                    await self.service.call(
                        lambda engine: engine.load_weights(version.number, state, keep_cache=self._keep_cache)
                    )
                except EngineFailed as error:
                    raise InfraError(f"{self.name}: {error}") from error
                self.version = version.number
            self._is_ready.set()

    async def rewind(self) -> None:
        """Drop all requests, and sample nothing before the next `activate`, which may load an older version than the last one.
        Raises EngineFailed: the engine is dead."""

        def unload(engine: Engine) -> None:
            engine.weight_version = -1

        async with self._activating:
            self._is_ready.clear()
            await self._calls.drop()
            await self.service.call(unload)
            self.version = -1

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of ``tokens`` after the first, in nats, at temperature 1.
        Raises InfraError: the engine is dead. UserError: the network cannot process them."""
        sampling = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=True)
        request = Request(f"score#{next(self._numbers)}", tuple(tokens), sampling, self._phases)
        try:
            async with self.service.submit(request) as stream:
                async for event in stream:
                    if isinstance(event, Completion) and event.prompt_logprobs is not None:
                        return [float(value) for value in event.prompt_logprobs]
        except (EngineFailed, Closed) as error:
            raise InfraError(f"{self.name}: {error}") from error
        raise InfraError(f"{self.name}: {request.id}: ended without log-probabilities")

    async def stats(self) -> EngineStats:
        """Raises InfraError: the engine is dead."""
        try:
            return await self.service.stats()
        except EngineFailed as error:
            raise InfraError(f"{self.name}: {error}") from error

    async def failure(self) -> str:
        """The error that ended the engine, after which this role must be restarted; empty while it is alive."""
        return "" if self.service.error is None else str(self.service.error)

    def close(self) -> None:
        """Stop the engine. Requests in flight fail with `InfraError`."""
        self.service.close()

    async def _generate(self, request: GenerateRequest) -> Generated:
        tokens = self._kept.prefix(request)
        key = tokens.tobytes()
        # A group's samples send their prompt at the same moment: one request computes it, the others wait for its pages.
        if leader := self._prefills.get(key):
            await leader.wait()
        is_computed = asyncio.Event()
        is_long = len(tokens) > self._page_size
        is_leader = is_long and self._prefills.setdefault(key, is_computed) is is_computed
        sampling = Sampling(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            ignore_eos=True,
        )
        name = f"{request.id}#{next(self._numbers)}"  # unique, because a cancelled request may still be in the engine
        submitted = Request(name, tuple(tokens.tolist()), sampling, self._phases, request.want_routes)
        started_s = time.time()
        try:
            async with self.service.submit(submitted) as stream:
                async for event in stream:
                    is_computed.set()
                    if isinstance(event, Completion):
                        result = _generated(event, request, started_s)
                        self._kept.keep(request.id, np.concatenate([tokens, result.segment.tokens]))
                        return result
            raise AssertionError(f"{name}: the stream ended without a completion")
        finally:
            is_computed.set()
            if is_leader:
                del self._prefills[key]


def _generated(done: Completion, request: GenerateRequest, started_s: float) -> Generated:
    if done.finish_reason not in ("stop", "length"):
        raise InfraError(f"request {request.id}: {done.error or 'cancelled by the engine'}")
    usage = done.usage
    return Generated(
        segment=Segment(
            np.array(done.tokens, np.int32),
            True,
            done.logprobs,
            done.versions.astype(np.int32),
            started_s,
            finished_s=time.time(),
        ),
        # a copy, so that earlier rows are neither sent nor kept alive
        routes=None if done.routes is None else done.routes[request.routes_from :].copy(),
        finish_reason="stop" if done.finish_reason == "stop" else "length",
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.prompt_tokens - usage.cached_tokens,
        num_preemptions=usage.num_preemptions,
        queued_s=usage.queued_s,
    )
