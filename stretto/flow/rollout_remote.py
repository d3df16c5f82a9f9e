"""Engine role for a server at an address: `stretto serve --rollout`, vLLM or SGLang, each in its own process and environment.

`RemoteEngineRole` has the methods of `stretto.flow.rollout.EngineRole`. A `Dialect` translates its calls into one server's requests.
Every version of the weights has a label on the server, which the server returns with the tokens that it sampled. After each update the
role scores fixed tokens on the server (the canary, `stretto.learning.canary`); the log-probabilities must agree with the trainer's.

Shape letters: R rows of routes, N layers of the server's routes, L MoE layers, K route slots.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import torch
from torch import Tensor

from stretto.base.endpoint import excerpt
from stretto.base.errors import InfraError, UserError, one_line
from stretto.base.paths import remove
from stretto.base.trajectory import Segment, WeightVersion, canary_tokens
from stretto.data.loader import key_of
from stretto.engine.request import EngineStats
from stretto.flow.clients import CallsInFlight, Generated, GenerateRequest, KeptTokens, Unavailable, within
from stretto.learning.canary import disagreement
from stretto.learning.recipe import START, WEIGHTS, RlRecipe
from stretto.learning.weights import fetch, publish
from stretto.model.checkpoint import describe, write_checkpoint
from stretto.model.families import kept_family
from stretto.model.spec import ModelConfig

_PROBE_S = 2.0
"""Seconds between two checks that the server is alive. A server needs longer to restart, so no restart is missed."""
_CONNECT_S = 5.0
_BUSY = (429, 503)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def to_text(array: np.ndarray) -> str:
    """``array`` as base64 of the npy format, for JSON."""
    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()


def from_text(text: str) -> np.ndarray:
    """The array of `to_text`. Raises ValueError: the text is damaged."""
    array: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array


class Server:
    """HTTP client of one server. Errors name the server and the remedy."""

    def __init__(self, address: str, engine: str):
        self.address, self.where = address.rstrip("/"), f"rollout.address: {engine} at {address.rstrip('/')}"
        key = next(filter(None, os.environ.get("STRETTO_API_KEYS", "").split(",")), None)
        self._options: dict[str, Any] = {
            "base_url": self.address,
            "headers": {} if key is None else {"Authorization": f"Bearer {key}"},
            "timeout": httpx.Timeout(None, connect=_CONNECT_S),  # callers have deadlines
            "limits": httpx.Limits(max_connections=None),
            "trust_env": False,  # servers have private addresses, which no proxy knows
        }
        self._client = httpx.AsyncClient(**self._options)

    def ask(self, path: str, wait_s: float = 0.0, body: Any = None, **query: str) -> Any:
        """JSON of a reply to GET, or to POST of ``body``, from a thread. Waits at most ``wait_s`` for the server to answer.
        Raises UserError: as `_checked`, or nothing answers."""
        stop_s = time.monotonic() + wait_s
        with httpx.Client(**self._options | {"timeout": max(_CONNECT_S, wait_s)}) as client:
            while True:
                try:
                    method = "GET" if body is None else "POST"
                    return self._checked(client.request(method, path, json=body, params=query), path)
                except (httpx.TransportError, InfraError) as error:
                    if time.monotonic() >= stop_s:
                        remedy = "start the server, raise rollout.start_s if it needs longer, or correct the address"
                        problem = f"does not answer within {wait_s:g} s: {one_line(error)}"
                        raise UserError(f"{self.where}: {problem}; {remedy}") from None
                    time.sleep(0.2)

    async def post(self, path: str, body: Any = None, **query: str) -> Any:
        """JSON of a reply to POST. Raises UserError: as `_checked`. InfraError: the server is busy. Unavailable: it is gone."""
        try:
            reply = await self._client.post(path, json={} if body is None else body, params=query)
        except httpx.TransportError as error:
            raise self._gone(path, error) from error
        return self._checked(reply, path)

    async def get(self, path: str, timeout_s: float) -> Any:
        """JSON of a reply to GET. Raises as `post`; httpx.TimeoutException: no reply in time."""
        try:
            return self._checked(await self._client.get(path, timeout=timeout_s), path)
        except httpx.TimeoutException:
            raise
        except httpx.TransportError as error:
            raise self._gone(path, error) from error

    def _gone(self, path: str, error: Exception) -> Unavailable:
        reason = one_line(error) or type(error).__name__  # a broken connection may have no text
        return Unavailable(f"{self.where}: {path}: no reply: {reason}")

    async def close(self) -> None:
        await self._client.aclose()

    def _checked(self, reply: httpx.Response, path: str) -> Any:
        """JSON of ``reply``. Raises UserError: the server refuses the request or has no such endpoint. InfraError: it is busy."""
        status, problem = reply.status_code, f"{self.where}: {path}: status {reply.status_code}: {excerpt(reply)}"
        if status in _BUSY:
            raise InfraError(problem)
        if status == 404:
            raise UserError(f"{self.where}: has no {path}: another kind of server, or too old, or started without it; "
                            "see docs/CLUSTER.md")  # fmt: skip
        if status == 401:
            raise UserError(f"{self.where}: refuses the key; put its key first in STRETTO_API_KEYS")
        if not reply.is_success:
            raise UserError(problem)
        try:
            return reply.json() if reply.content else None
        except ValueError:
            raise UserError(f"{self.where}: {path}: not JSON: {excerpt(reply)}; name another server") from None


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a server to one request. Written by a dialect."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    labels: Sequence[str | None]
    """Label of the weights that sampled each token; None: unknown, but not older than the request."""
    routes: np.ndarray | None
    """[R, N, K], experts by layer."""
    cached_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to a server. Written by `RemoteEngineRole`."""

    tokens: list[int]
    """All tokens of the sample so far."""
    seed: int
    request: GenerateRequest


class Dialect(ABC):
    """Requests of one kind of server."""

    health: ClassVar[str] = "/health"
    """Path that answers while the server is alive."""

    def __init__(
        self,
        server: Server,
        recipe: RlRecipe,
        config: ModelConfig,
        start: Path,
        folder: Path,
        fetch: Callable[[WeightVersion], Mapping[str, Tensor]],
    ):
        """
        Args:
            config: shape of the run's network.
            start: the run's start, for the network's family and tokenizer; `check` does not need it.
            folder: folder for files that the server reads.
            fetch: returns the tensors of a version.
        """
        self._server, self._recipe = server, recipe
        self._start, self._folder, self._fetch = start, folder.resolve(), fetch
        self._config = config
        self._replays = recipe.replay == "r3" and self._config.num_moe_layers > 0

    @abstractmethod
    def check(self) -> None:
        """Check at the start that the server can do what the run needs. Called in a thread.
        Raises UserError: the server is too old, lacks an option, or serves another network."""

    @abstractmethod
    async def generate(self, ask: Ask) -> Reply:
        """Sample. Raises UserError: the server refuses the request. InfraError: it is busy or failed inside. Unavailable: gone."""

    @abstractmethod
    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of ``tokens`` after the first at temperature 1. Raises as `generate`."""

    @abstractmethod
    async def load(self, version: WeightVersion, label: str) -> Path | None:
        """Replace the weights, name them ``label``, and drop all keys and values of the old ones. Returns what was written for the
        server. Raises as `generate`, and as ``fetch``."""

    async def stats(self) -> EngineStats | None:
        """The server's own counters; None: `RemoteEngineRole` counts."""
        return None

    def settle(self, active: Path | None) -> None:
        """Delete all files that were written for the server, but ``active``."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path != active:
                remove(path)

    def _fits(self, max_len: int, option: str) -> None:
        if max_len < self._recipe.train.seq_len:
            problem = f"takes {max_len} tokens, and train.seq_len is {self._recipe.train.seq_len}"
            raise UserError(f"{self._server.where}: {problem}; start it with a larger {option}")

    def _records_routes(self, does: bool, option: str) -> None:
        if self._replays and not does:
            raise UserError(
                f"{self._server.where}: returns no routes, and replay is 'r3'; start it with {option}, or set replay = \"off\""
            )


class Stretto(Dialect):
    """`stretto serve --rollout` (`stretto.flow.rollout_server`). It reads published weights as they are."""

    def check(self) -> None:
        info, where = self._server.ask("/rollout/info", self._recipe.rollout.start_s), self._server.where
        shape = {
            name: getattr(self._config, name) for name in ("vocab_size", "num_layers", "hidden_size", "num_experts")
        }
        for name, value in shape.items():
            if info[name] != value:
                raise UserError(
                    f"{where}: serves a network with {name} {info[name]}, the run's has {value}; serve the run's start"
                )
        precision = self._recipe.precision
        if info["precision"] != precision.engines:
            problem = f"computes in {info['precision']}, and precision.rollout is {precision.engines}"
            raise UserError(f"{where}: {problem}; change one of them (--dtype)")
        if precision.batch_invariant and not info["is_batch_invariant"]:
            raise UserError(f"{where}: is not batch-invariant; leave precision.batch_invariant out")
        self._fits(info["max_len"], "--max-len")

    async def generate(self, ask: Ask) -> Reply:
        request = ask.request
        fields = ("max_tokens", "temperature", "seed", "stop_ids", "want_routes", "routes_from", "deadline_s")
        body = {"tokens": ask.tokens, **{name: getattr(request, name) for name in fields}}
        done = await self._server.post("/rollout/generate", body)
        return Reply(
            done["tokens"],
            done["logprobs"],
            _labels(done["weight_versions"], len(done["tokens"])),
            None if done["routes"] is None else from_text(done["routes"]),
            *(done[name] for name in ("cached_tokens", "num_preemptions", "queued_s")),
        )

    async def score(self, tokens: Sequence[int]) -> list[float]:
        scores: list[float] = await self._server.post("/rollout/score", {"tokens": list(tokens)})
        return scores

    async def load(self, version: WeightVersion, label: str) -> Path | None:
        location, written = Path(version.location).resolve(), None
        if not location.is_file():  # it is in a store, which the server does not know
            sent = await asyncio.to_thread(lambda: publish(self._folder, version.number, self._fetch(version)))
            version, location = sent, Path(sent.location)
            written = location
        await self._server.post(
            "/rollout/load", {"label": label, "version": asdict(replace(version, location=str(location)))}
        )
        return written

    async def stats(self) -> EngineStats | None:
        return EngineStats(**await self._server.get("/rollout/stats", _CONNECT_S))


class ByFolder(Dialect):
    """A server that reads versions of the weights as Hugging Face checkpoints."""

    async def load(self, version: WeightVersion, label: str) -> Path:
        path = self._folder / label
        if not path.is_dir():
            await asyncio.to_thread(self._write, version, path)
        await self._update(path, label)
        return path

    @abstractmethod
    async def _update(self, path: Path, label: str) -> None:
        """Have the server read ``path``."""

    def _write(self, version: WeightVersion, path: Path) -> None:
        tokenizer = self._start if (self._start / "tokenizer.json").is_file() else None
        dtype = _DTYPES[self._recipe.precision.engines]
        family = kept_family(self._config, describe(self._start).family)
        write_checkpoint(path, self._fetch(version), self._config, family=family, tokenizer_dir=tokenizer, dtype=dtype)

    def _check_paths(self, needed: Sequence[str], remedy: str) -> None:
        """Raises UserError: the server's own list of endpoints lacks one of ``needed``, or nothing answers."""
        paths = self._server.ask("/openapi.json", self._recipe.rollout.start_s).get("paths", {})
        if missing := [path for path in needed if path not in paths]:
            raise UserError(f"{self._server.where}: has no {missing[0]}: it is too old, or {remedy}")

    def _check_vocabulary(self, path: str, body: Callable[[list[int]], Any]) -> None:
        """The server takes the network's last token id and refuses the next one."""
        size, where = self._config.vocab_size, self._server.where
        self._server.ask(path, 2 * self._recipe.rollout.start_s, body([size - 1]))
        try:
            self._server.ask(path, 0.0, body([size]))
        except UserError as error:
            if "status 400" in str(error):
                return
            raise
        raise UserError(f"{where}: serves a vocabulary of more than {size} tokens, the run's; serve the run's start")


class Vllm(ByFolder):
    """vLLM from 0.32 on, with ``VLLM_SERVER_DEV_MODE=1``, ``--enable-scale-out`` and ``--logprobs-mode processed_logprobs``."""

    GENERATE = "/inference/v1/generate"
    PATHS = (GENERATE, "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version")

    def check(self) -> None:
        where, rollout = self._server.where, self._recipe.rollout
        self._check_paths(self.PATHS, "was started without VLLM_SERVER_DEV_MODE=1")
        self._fits(self._server.ask("/v1/models")["data"][0]["max_model_len"], "--max-model-len")
        config = self._server.ask("/server_info", rollout.start_s, config_format="json")["vllm_config"]
        model = config["model_config"]
        if rollout.temperature != 1.0 and model.get("logprobs_mode") != "processed_logprobs":
            raise UserError(
                f"{where}: gives log-probabilities at temperature 1; start it with --logprobs-mode processed_logprobs"
            )
        dtype, wanted = str(model.get("dtype")).removeprefix("torch."), str(_DTYPES[self._recipe.precision.engines])
        if dtype != wanted.removeprefix("torch."):
            problem = f"computes in {dtype}, and precision.rollout is {self._recipe.precision.engines}"
            raise UserError(f"{where}: {problem}; change one of them (--dtype)")
        does = (config.get("aux_output_config") or {}).get("enable_return_routed_experts", False)
        self._records_routes(does, "--enable-return-routed-experts")
        self._check_vocabulary(self.GENERATE, lambda ids: {"token_ids": ids, "sampling_params": {"max_tokens": 1}})

    async def generate(self, ask: Ask) -> Reply:
        request = ask.request
        params = {
            "temperature": request.temperature,
            "seed": ask.seed,
            "max_tokens": request.max_tokens,
            "stop_token_ids": list(request.stop_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            **({"routed_experts_prompt_start": request.routes_from} if self._replays and request.want_routes else {}),
        }
        done = await self._server.post(self.GENERATE, {"token_ids": ask.tokens, "sampling_params": params})
        choice = done["choices"][0]
        routes = choice.get("routed_experts")
        return Reply(
            choice["token_ids"],
            [each["logprob"] for each in choice["logprobs"]["content"]],
            _labels(choice.get("weight_versions") or (), len(choice["token_ids"])),
            None if routes is None else from_text(routes),
            ((done.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )

    async def score(self, tokens: Sequence[int]) -> list[float]:
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        done = await self._server.post(self.GENERATE, {"token_ids": list(tokens), "sampling_params": params})
        rows = zip(tokens[1:], done["prompt_logprobs"][1:], strict=True)
        return [row[str(token)]["logprob"] for token, row in rows]

    async def _update(self, path: Path, label: str) -> None:
        post = self._server.post
        await post("/pause", mode="keep")
        try:
            await post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
            # requests in flight are computed again from their first token: no key or value of the old weights stays
            done = await post("/reset_prefix_cache", reset_running_requests="true")
            if not done["success"]:
                raise UserError(f"{self._server.where}: keeps its prefix cache, of old weights; restart it")
            await post("/update_weight_version", {"new_version": label})
        finally:
            await post("/resume")


class Sglang(ByFolder):
    """SGLang, with ``--enable-return-routed-experts`` for routing replay. Never run: tested against recorded answers."""

    health = "/get_model_info"  # /health samples a token, which a paused server does not
    PATHS = ("/generate", "/update_weights_from_disk", "/pause_generation", "/continue_generation", "/get_model_info")

    def check(self) -> None:
        self._check_paths(self.PATHS, "is another server")
        info = self._server.ask("/get_server_info")
        self._fits(
            info.get("max_req_input_len") or info.get("context_length") or self._recipe.train.seq_len,
            "--context-length",
        )
        self._records_routes(info.get("enable_return_routed_experts", False), "--enable-return-routed-experts")
        self._check_vocabulary("/generate", lambda ids: {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})

    async def generate(self, ask: Ask) -> Reply:
        request, wants_routes = ask.request, self._replays and ask.request.want_routes
        params = {
            "temperature": request.temperature,
            "top_p": 1.0,  # these four: a server may have other defaults (--preferred-sampling-params)
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": ask.seed,
            "max_new_tokens": request.max_tokens,
            "stop_token_ids": list(request.stop_ids),  # with ignore_eos, SGLang would ignore these too
        }
        body: dict[str, Any] = {"input_ids": ask.tokens, "sampling_params": params, "return_logprob": True}
        if wants_routes:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}
        meta = (await self._server.post("/generate", body))["meta_info"]
        pairs = meta["output_token_logprobs"]
        routes = meta.get("routed_experts")
        if isinstance(routes, str):  # int32 in C order, without a shape
            flat = np.frombuffer(base64.b64decode(routes), "<i4")
            routes = flat.reshape(-1, self._config.num_layers, max(self._config.top_k_by_layer))
        return Reply(
            [int(pair[1]) for pair in pairs],
            [float(pair[0]) for pair in pairs],
            [None] * len(pairs),  # its label is that of the last token
            routes,
            meta.get("cached_tokens") or 0,
        )

    async def score(self, tokens: Sequence[int]) -> list[float]:
        params = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        pairs = (await self._server.post("/generate", body))["meta_info"]["input_token_logprobs"]
        return [float(pair[0]) for pair in pairs[1:]]

    async def _update(self, path: Path, label: str) -> None:
        post = self._server.post
        await post("/pause_generation", {"mode": "retract"})
        try:
            body = {"model_path": str(path), "weight_version": label, "flush_cache": True}
            done = await post("/update_weights_from_disk", body)
            if not done["success"]:
                raise UserError(f"{self._server.where}: refuses the weights: {one_line(done.get('message'), 200)}")
        finally:
            await post("/continue_generation")


def _labels(spans: Sequence[Mapping[str, Any]], num: int) -> list[str | None]:
    """Label of each of ``num`` tokens, from spans of them."""
    labels: list[str | None] = [None] * num
    for span in spans:
        labels[span["start"] : span["end"]] = [span["version"]] * (span["end"] - span["start"])
    return labels


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
                await self._server.get(self._dialect.health, _CONNECT_S)
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
