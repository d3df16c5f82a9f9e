"""An engine as a role: agents sample from it, the trainer's weights are activated in it while requests go on."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stretto.base.trajectory import WeightVersion
from stretto.engine.async_engine import AsyncEngine as Service
from stretto.engine.async_engine import Closed, EngineFailed
from stretto.engine.engine import Engine
from stretto.engine.request import Completion, EngineStats, Phases, QueueFull, Request, Sampling
from stretto.rl.asking import Generated, GenerateRequest, Trouble, Unavailable


@dataclass(frozen=True, slots=True)
class Activated:
    """A change of weights. Written by `EngineRole.activate`."""

    version: int
    """Now serving."""
    fetch_s: float
    """Reading and checking, while requests went on."""
    wait_s: float
    """From then until the new weights served: the step that was being computed, and the pause itself."""
    pause_s: float
    """For which the engine computed nothing."""


class EngineRole:
    """One engine in a thread of its own, behind async methods. What it samples under carries the version's number."""

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        fetch: Callable[[WeightVersion], Mapping[str, Tensor]] | None = None,
        *,
        name: str = "engine",
        waits: bool = False,
        keep_cache: bool = False,
    ):
        """
        Args:
            open_engine: called once, here, where the role lives. The engine must keep routes if they will be asked for.
            fetch: the verified tensors of a version (`stretto.rl.weights`); called in a thread.
            waits: sample nothing before the first `activate`: one that is restarted opens with weights that are too old.
            keep_cache: sequences in flight go on upon the keys and values of the old weights; else they are computed
                again. What is recorded of their old tokens stays in both cases.
        """
        self.name = name
        engine = open_engine()
        self._phases = Phases(engine.model.config.full())
        self._page_size = engine.config.page_size
        self._version = engine.weight_version
        self._read = engine.read_weights  # may run in another thread than the engine's
        self._fetch = fetch
        self._keep_cache = keep_cache
        self._service = Service(engine).start()
        self._numbers = itertools.count()
        self._is_ready = asyncio.Event()
        if not waits:
            self._is_ready.set()
        self._activating = asyncio.Lock()
        self._prefills: dict[bytes, asyncio.Event] = {}

    @property
    def version(self) -> int:
        """Of the weights that serve."""
        return self._version

    async def generate(self, request: GenerateRequest) -> Generated:
        """Sample at most ``max_tokens`` after ``tokens``. Cancelled or out of time, it leaves nothing in the engine.

        Raises:
            Unavailable: the engine is dead.
            Trouble: it is full, out of time, or its output is no number.
            UserError: the request is impossible for this network.
        """
        try:
            async with asyncio.timeout(request.deadline_s) as deadline:
                await self._is_ready.wait()
                return await self._generate(request)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise Trouble(f"{self.name}: request {request.id}: not done within {request.deadline_s:g} s") from error
        except (EngineFailed, Closed) as error:
            raise Unavailable(f"{self.name}: {error}") from error
        except QueueFull as error:
            raise Trouble(f"{self.name}: {error}") from error

    async def activate(self, version: WeightVersion, source: Mapping[str, Tensor] | None = None) -> Activated:
        """Serve ``version`` from the next step on; requests in flight go on under it. Older ones are ignored.

        Args:
            source: its tensors, to be checked against its checksum; None: `fetch` brings them.

        Raises:
            UserError: another checksum, or tensors of another network; the old weights serve on.
            Trouble: the engine is dead.
        """
        async with self._activating:
            started_s = fetched_s = time.perf_counter()
            pause_s = 0.0
            if version.number > self._version:
                checksum = version.checksum
                if source is None:
                    assert self._fetch is not None, f"{self.name} has nowhere to fetch version {version.number} from"
                    source, checksum = await asyncio.to_thread(self._fetch, version), ""  # verified there
                state = source
                if checksum:
                    state = await asyncio.to_thread(self._read, source, checksum)
                fetched_s = time.perf_counter()
                try:
                    pause_s = await self._service.call(lambda engine: self._load(engine, version.number, state))
                except EngineFailed as error:
                    raise Trouble(f"{self.name}: {error}") from error
                self._version = version.number
            self._is_ready.set()
            return Activated(self._version, fetched_s - started_s, time.perf_counter() - fetched_s, pause_s)

    async def stats(self) -> EngineStats:
        """
        Raises:
            Trouble: the engine is dead.
        """
        try:
            return await self._service.stats()
        except EngineFailed as error:
            raise Trouble(f"{self.name}: {error}") from error

    async def failure(self) -> str:
        """Why the engine is dead, so that this role must be started again; empty while it lives."""
        return "" if self._service.error is None else str(self._service.error)

    def close(self) -> None:
        """Stop; what is in flight fails with `Trouble`."""
        self._service.close()

    def _load(self, engine: Engine, version: int, state: Mapping[str, Tensor]) -> float:
        started_s = time.perf_counter()
        engine.load_weights(version, state, keep_cache=self._keep_cache)
        return time.perf_counter() - started_s

    async def _generate(self, request: GenerateRequest) -> Generated:
        prompt = np.ascontiguousarray(request.tokens, np.int32)
        key = prompt.tobytes()
        # A group's samples ask for their prompt at the same moment: one computes it, the others wait for its pages.
        leader = self._prefills.get(key)
        if leader is not None:
            await leader.wait()
        is_leader = len(prompt) > self._page_size and key not in self._prefills
        is_computed = asyncio.Event()
        if is_leader:
            self._prefills[key] = is_computed
        try:
            return await self._run(request, prompt, is_computed)
        finally:
            is_computed.set()
            if is_leader and self._prefills.get(key) is is_computed:
                del self._prefills[key]

    async def _run(self, request: GenerateRequest, prompt: np.ndarray, is_computed: asyncio.Event) -> Generated:
        sampling = Sampling(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            ignore_eos=True,
        )
        name = f"{request.id}#{next(self._numbers)}"  # one that is being given up may still have the other name
        started_s = time.time()
        tokens = tuple(prompt.tolist())
        async with self._service.submit(Request(name, tokens, sampling, self._phases, request.want_routes)) as stream:
            async for event in stream:
                is_computed.set()
                if isinstance(event, Completion):
                    return _generated(event, request, started_s)
        raise AssertionError(f"{name}: the stream ended without a completion")


def _generated(done: Completion, request: GenerateRequest, started_s: float) -> Generated:
    if done.finish_reason not in ("stop", "length"):
        raise Trouble(f"request {request.id}: {done.error or 'given up by the engine'}")
    routes = done.routes
    if routes is not None:
        routes = routes[request.routes_from :].copy()  # the rest need not travel, nor be kept alive
    usage = done.usage
    return Generated(
        tokens=np.array(done.tokens, np.int32),
        logprobs=done.logprobs,
        versions=done.versions,
        routes=routes,
        finish_reason="stop" if done.finish_reason == "stop" else "length",
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.prompt_tokens - usage.cached_tokens,
        num_preemptions=usage.num_preemptions,
        queued_s=usage.queued_s,
        started_s=started_s,
        finished_s=time.time(),
    )
