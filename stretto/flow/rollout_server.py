"""HTTP server of one rollout engine, `stretto serve --rollout`: token ids in; token ids, log-probabilities, routes and weight versions out.

It serves an `EngineRole` to one RL run at a time, whose engine roles (`stretto.flow.rollout_remote`) are its clients. A client may have it
read files, so it belongs on a private address.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stretto.base.errors import InfraError
from stretto.base.trajectory import WeightVersion
from stretto.engine.request import Sampling
from stretto.flow.clients import GenerateRequest
from stretto.flow.rollout import EngineRole
from stretto.flow.servers.client import to_text
from stretto.model.spec import ModelConfig
from stretto.server.limits import KNOWN_ERRORS, ApiError, Gate, from_validation, parse_body, while_connected
from stretto.server.messages import Body, TokenId
from stretto.server.server import ServeSettings, entrance, failed, key_holders

UNLOADED = "start"
"""Label of the weights with which the server starts."""


class GenerateBody(Body):
    """POST /rollout/generate: a `GenerateRequest` with all tokens of the sample."""

    tokens: list[Annotated[TokenId, Field(lt=1 << 31)]]  # int32 in samples
    max_tokens: int
    temperature: float
    seed: int
    stop_ids: list[TokenId] = Field(default_factory=list)
    want_routes: bool = True
    routes_from: int = Field(default=0, ge=0)
    deadline_s: float = 600.0


class ScoreBody(Body):
    """POST /rollout/score."""

    tokens: list[TokenId]


class LoadBody(Body):
    """POST /rollout/load."""

    label: str
    version: dict[str, Any]
    """Fields of a `WeightVersion`."""


class Rollout:
    """Handlers of the endpoints."""

    def __init__(self, role: EngineRole, config: ModelConfig, gate: Gate, precision: str):
        self._role, self._config, self._gate, self._precision = role, config, gate, precision
        self._numbers = itertools.count()
        self._labels = {-1: UNLOADED}
        """Labels by the engine's own version numbers, which grow whatever versions the clients load."""
        self._requests = itertools.count()

    def routes(self) -> list[Route]:
        posts = {"generate": self.generate, "score": self.score, "load": self.load}
        return [
            *(Route(f"/rollout/{name}", self._gated(work), methods=["POST"]) for name, work in posts.items()),
            Route("/rollout/info", self.info),
            Route("/rollout/stats", self.stats),
            Route("/health", self.health),
        ]

    async def generate(self, http: HttpRequest, tree: Any) -> Response:
        body = parse_body(GenerateBody, tree)
        fields = body.model_dump() | {"tokens": np.array(body.tokens, np.int32), "stop_ids": tuple(body.stop_ids)}
        request = GenerateRequest(id=str(next(self._requests)), **fields)
        try:
            done = await while_connected(http.receive, self._role.generate(request))
        except ValidationError as error:
            raise from_validation(error, Sampling) from None
        spans, start = [], 0
        for number, same in itertools.groupby(done.segment.versions.tolist()):
            end = start + len(list(same))
            spans.append({"version": self._labels[number], "start": start, "end": end})
            start = end
        return JSONResponse(
            {
                "tokens": done.segment.tokens.tolist(),
                "logprobs": done.segment.logprobs.tolist(),
                "weight_versions": spans,
                "routes": None if done.routes is None else to_text(done.routes),
                "finish_reason": done.finish_reason,
                "cached_tokens": done.cached_tokens,
                "num_preemptions": done.num_preemptions,
                "queued_s": done.queued_s,
            }
        )

    async def score(self, http: HttpRequest, tree: Any) -> Response:
        return JSONResponse(await self._role.score(parse_body(ScoreBody, tree).tokens))

    async def load(self, http: HttpRequest, tree: Any) -> Response:
        body = parse_body(LoadBody, tree)
        try:
            version = WeightVersion(**body.version)
        except TypeError as error:
            raise ApiError(400, f"version: {error}; client and server must have the same version of stretto") from None
        number = next(self._numbers)
        self._labels[number] = body.label
        await self._role.activate(replace(version, number=number))
        return JSONResponse({"weight_version": body.label})

    async def info(self, http: HttpRequest) -> Response:
        stats, config = await self._role.stats(), self._config
        shape = {name: getattr(config, name) for name in ("vocab_size", "num_layers", "hidden_size", "num_experts")}
        about = {"precision": self._precision, "is_batch_invariant": stats.is_batch_invariant, "max_len": stats.max_len}
        return JSONResponse(shape | about | {"weight_version": self._labels[self._role.version]})

    async def stats(self, http: HttpRequest) -> Response:
        return JSONResponse(asdict(await self._role.stats()))

    async def health(self, http: HttpRequest) -> Response:
        problem = await self._role.failure()
        return JSONResponse({"status": problem or "ok"}, 503 if problem else 200)

    def _gated(self, work: Callable[[HttpRequest, Any], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        async def endpoint(http: HttpRequest) -> Response:
            async with self._gate.admit(http) as (tree, _):
                try:
                    return await work(http, tree)
                except InfraError as error:  # `KNOWN_ERRORS` have answers of their own
                    raise ApiError(503, str(error)) from error

        return endpoint


def create_rollout_app(role: EngineRole, config: ModelConfig, precision: str, settings: ServeSettings) -> Starlette:
    """The application that serves ``role``, with the host and key checks of `stretto serve`."""
    gate = Gate(settings.max_open)
    rollout = Rollout(role, config, gate, precision)
    app = Starlette(
        routes=rollout.routes(),
        middleware=[
            Middleware(entrance, hosts=settings.hosts(), pages=(), paths=(), metrics=None),
            Middleware(key_holders, settings=settings, pages=()),
        ],
        exception_handlers=dict.fromkeys((*KNOWN_ERRORS, HTTPException), failed),
    )
    app.state.gate, app.state.service, app.state.settings = gate, role.service, settings
    return app
