"""Engine role for a server at an address: `stretto serve --rollout`, vLLM or SGLang, each in its own process and environment.

`RemoteEngineRole` has the methods of `stretto.flow.rollout.EngineRole`. A `Dialect` (`stretto.flow.servers`) translates its calls into
one server's requests. Every version of the weights has a label on the server, which the server returns with the tokens that it
sampled. After each update the role scores fixed tokens on the server (the canary, `stretto.learning.canary`); the log-probabilities
must agree with the trainer's.

Shape letters: R rows of routes, N layers of the server's routes, L MoE layers, K route slots.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import numpy as np
from torch import Tensor

from stretto.base.errors import InfraError, UserError, one_line
from stretto.base.paths import remove
from stretto.base.trajectory import Segment, WeightVersion, canary_tokens
from stretto.data.loader import key_of
from stretto.engine.request import EngineStats
from stretto.flow.clients import CallsInFlight, Generated, GenerateRequest, KeptTokens, Unavailable, within
from stretto.flow.servers.client import CONNECT_S, Server
from stretto.flow.servers.dialect import Ask, Dialect, Reply
from stretto.flow.servers.own import Stretto
from stretto.flow.servers.sglang import Sglang
from stretto.flow.servers.vllm import Vllm
from stretto.learning.canary import disagreement
from stretto.learning.recipe import START, WEIGHTS, RlRecipe
from stretto.learning.weights import fetch
from stretto.model.checkpoint import describe
from stretto.model.spec import ModelConfig

_PROBE_S = 2.0
"""Seconds between two checks that the server is alive. A server needs longer to restart, so no restart is missed."""


def moe_routes(routes_RNK: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Routes of the MoE layers, [R, L, K] as uint8 or uint16, from rows of all layers or of the MoE layers alone.
    Raises UserError: the rows are of another network."""
    num_slots = max(config.top_k_by_layer, default=0)
    if routes_RNK.ndim != 3 or routes_RNK.shape[1] not in (config.num_layers, config.num_moe_layers):
        problem = f"routes of shape {list(routes_RNK.shape)}, and the network has {config.num_layers} layers"
        raise UserError(f"rollout.address: {problem}; serve the run's start")
    if routes_RNK.shape[1] != config.num_moe_layers:
        routes_RNK = routes_RNK[:, list(config.moe_layers)]
    if routes_RNK.shape[2] != num_slots or (routes_RNK.size and routes_RNK.max() >= config.num_experts):
        problem = f"routes to {routes_RNK.shape[2]} experts below {routes_RNK.max(initial=0) + 1}"
        raise UserError(f"rollout.address: {problem}, not {num_slots} of {config.num_experts}; serve the run's start")
    return routes_RNK.astype(np.uint8 if config.num_experts <= 255 else np.uint16)


DIALECTS: Mapping[str, type[Dialect]] = {"stretto": Stretto, "vllm": Vllm, "sglang": Sglang}
"""By the recipe's ``rollout.engine``."""


def check_server(recipe: RlRecipe, address: str, config: ModelConfig, run: Path) -> None:
    """Check the server at ``address`` before the run in the folder ``run`` has a start, which will have the shape ``config``.
    Raises UserError: nothing answers there, or the server cannot do what the run needs."""
    server = Server(address, recipe.rollout.engine)
    DIALECTS[recipe.rollout.engine](server, recipe, config, run / START, run / WEIGHTS, fetch).check()


class RemoteEngineRole:
    """One server at an address, behind the methods of `EngineRole`. Each sampled token carries the version of its weights."""

    def __init__(
        self,
        recipe: RlRecipe,
        address: str,
        start: Path,
        folder: Path,
        fetch: Callable[[WeightVersion], Mapping[str, Tensor]] = fetch,
        *,
        name: str = "engine",
    ):
        """
        Args:
            start: the run's start, for the shape of the network.
            folder: folder of this role for checkpoints that the server reads.

        Raises:
            UserError: nothing answers at the address, or the server cannot do what the run needs.
        """
        self.name, self._recipe, self._folder = name, recipe, folder
        self._config = describe(start).config
        self._server = Server(address, recipe.rollout.engine)
        self._dialect = DIALECTS[recipe.rollout.engine](self._server, recipe, self._config, start, folder, fetch)
        self._dialect.check()
        self.version = -1
        """Version of the active weights."""
        self._active: WeightVersion | None = None
        self._scores: list[float] = []
        """The server's scores of the canary with the active weights."""
        self._written: Path | None = None
        """What was written for the server when it loaded weights last."""
        self._numbers: dict[str, int] = {}
        """Numbers of the versions by their labels on the server."""
        self._kept, self._calls = KeptTokens(name), CallsInFlight(name)
        self._is_ready = asyncio.Event()
        self._activating = asyncio.Lock()
        self._num_refused = 0
        """Updates that the canary refused."""
        self._failure, self._probed_s = "", time.monotonic()
        self._stats = EngineStats(0, 0, 0, 0, 0, recipe.train.seq_len, 0, False, -1)

    async def generate(self, request: GenerateRequest) -> Generated:
        """Sample at most ``max_tokens`` after ``tokens``. Raises as `EngineRole.generate`."""
        late = f"{self.name}: request {request.id}: not done within {request.deadline_s:g} s"
        async with self._calls.one(), within(request.deadline_s, late):
            await self._is_ready.wait()
            tokens, refused, version = self._kept.prefix(request), self._num_refused, self.version
            started_s = time.time()
            # unlike ours, other engines start a seed's random numbers anew in each request
            ask = Ask(tokens.tolist(), key_of(request.seed, len(tokens)) & 0x7FFF_FFFF, request)
            reply = await self._asked(ask)
            await self._is_ready.wait()  # tokens of an update in progress are of use if the canary agrees
        if self._num_refused != refused:
            raise InfraError(f"{self.name}: request {request.id}: sampled while refused weights were active")
        numbers = [version if label is None else self._number(label) for label in reply.labels]
        sampled = np.array(reply.tokens, np.int32)
        logprobs, versions = np.array(reply.logprobs, np.float32), np.array(numbers, np.int32)
        self._kept.keep(request.id, np.concatenate([tokens, sampled]))
        self._stats.output_tokens += len(sampled)
        self._stats.prompt_tokens += len(tokens) - reply.cached_tokens
        self._stats.cached_tokens += reply.cached_tokens
        return Generated(
            segment=Segment(sampled, True, logprobs, versions, started_s, finished_s=time.time()),
            routes=self._routes(reply, request, len(tokens) + len(sampled) - 1),
            finish_reason="stop" if reply.tokens[-1] in request.stop_ids else "length",
            cached_tokens=reply.cached_tokens,
            computed_tokens=len(tokens) - reply.cached_tokens,
            num_preemptions=reply.num_preemptions,
            queued_s=reply.queued_s,
        )

    async def activate(self, version: WeightVersion) -> None:
        """Have the server load ``version``, and compare the canary. Requests in flight continue; new ones wait. Older versions are
        ignored.

        Raises:
            UserError: the server refuses the weights, or the canary does not agree; the server has the old version again, or the
                message says that it has not.
            InfraError: the server is gone or fails; this role must be restarted.
        """
        async with self._activating:
            if version.number > self.version:
                self._is_ready.clear()
                if problem := await self._loaded(version):
                    await self._go_back(problem)
                self.version, self._active = version.number, version
                self._dialect.settle(self._written)
            self._is_ready.set()

    async def rewind(self) -> None:
        """See `EngineRole.rewind`."""
        async with self._activating:
            self._is_ready.clear()
            await self._calls.drop()
            self.version, self._active = -1, None

    async def stats(self) -> EngineStats:
        """Counters of the server, or of this role where the server has none. Raises InfraError: the server is gone."""
        return await self._dialect.stats() or self._stats

    async def failure(self) -> str:
        """The error after which this role must be restarted; empty while the server answers."""
        now_s = time.monotonic()
        if not self._failure and self._is_ready.is_set() and now_s - self._probed_s > _PROBE_S:
            self._probed_s = now_s
            try:
                await self._server.get(self._dialect.health, CONNECT_S)
            except httpx.TimeoutException:
                pass  # busy
            except (InfraError, UserError) as error:
                self._failure = str(error)
        return self._failure

    async def close(self) -> None:
        """Leave the server alone, and delete the checkpoints that were written for it."""
        await self._server.close()
        remove(self._folder)

    async def _asked(self, ask: Ask) -> Reply:
        self._stats.num_running += 1
        try:
            reply = await self._dialect.generate(ask)
        except Unavailable as error:
            self._failure = self._failure or str(error)
            raise
        except (KeyError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            problem = f"an answer of another form: {type(error).__name__}: {one_line(error, 100)}"
            raise UserError(f"{self._server.where}: {problem}; use a version that docs/CLUSTER.md names") from error
        finally:
            self._stats.num_running -= 1
        if not reply.tokens or len(reply.logprobs) != len(reply.tokens) or not np.isfinite(reply.logprobs).all():
            raise InfraError(f"{self._server.where}: {len(reply.tokens)} tokens with invalid log-probabilities")
        return reply

    def _number(self, label: str) -> int:
        """Version of the weights with ``label``. Raises Unavailable: this role did not load them."""
        if label not in self._numbers:
            self._failure = (
                f"{self._server.where}: has weights {label!r}, which this run did not load: was it restarted?"
            )
            raise Unavailable(self._failure)
        return self._numbers[label]

    def _routes(self, reply: Reply, request: GenerateRequest, num_rows: int) -> np.ndarray | None:
        if not request.want_routes:
            return None
        num = num_rows - request.routes_from
        if not self._config.num_moe_layers:
            return np.zeros((num, 0, max(self._config.top_k_by_layer, default=self._config.top_k)), np.uint8)
        if reply.routes is None or len(reply.routes) != num:
            rows = "none" if reply.routes is None else f"{len(reply.routes)} rows"
            raise InfraError(f"{self._server.where}: routes of {num} tokens expected, {rows} came")
        return moe_routes(reply.routes, self._config)

    async def _loaded(self, version: WeightVersion) -> str:
        """Load ``version`` and score the canary. Returns what is wrong; empty if the server agrees with the trainer."""
        label = f"{version.number}-{version.checksum[:12]}"
        self._numbers[label] = version.number
        self._written = await self._dialect.load(version, label)
        assert version.canary, f"version {version.number} has no canary"
        scores = await self._dialect.score(canary_tokens(self._config.vocab_size, len(version.canary)))
        tolerance, active = self._recipe.rollout.canary or version.tolerance, self._active
        is_again = active is not None and active.number == version.number
        if wrong := disagreement(scores, version, tolerance, None if is_again else active, self._scores):
            return f"{self._server.where}: canary: after loading version {version.number}, {wrong}"
        self._scores = scores
        return ""

    async def _go_back(self, problem: str) -> None:
        """Load the version before the one that has ``problem``. Always raises UserError; requests go on if that succeeded."""
        self._num_refused += 1
        if self._active is None:
            raise UserError(f"{problem}; serve the run's start, or set rollout.canary if that is rounding")
        if again := await self._loaded(self._active):
            raise UserError(
                f"{problem}; and version {self._active.number} cannot be restored: {again}; restart the server"
            )
        self._is_ready.set()
        raise UserError(f"{problem}; version {self._active.number} is active again")
