"""Endpoints that generate nothing: models, sizes, tokens, health, metrics, and replacement of weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stretto.engine.async_engine import EngineFailed
from stretto.engine.request import VERSIONS, EngineStats
from stretto.model.counts import count
from stretto.model.spec import Subnet, SubnetChoice
from stretto.server.elastic import Size
from stretto.server.generate import Backend
from stretto.server.limits import parse_body
from stretto.server.messages import Body, FieldError, Message, TokenId, Tool
from stretto.text.chat import named_tokens, tool_form

_STATS_S = 1.0
"""Time limit for the engine's counters, seconds. The engine answers between two steps."""


class TokenizeBody(Body):
    """POST /tokenize: a text, or messages under the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] = Field(default_factory=list)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, as of /v1/chat/completions."""
    parse_special: bool = True
    """Whether spellings of special tokens in ``prompt`` are those tokens."""
    add_special_tokens: bool | None = None
    """Whether ``prompt`` gets the tokens that the tokenizer adds before a text, as in /v1/completions; true if left out. Of messages, the
    chat template writes them, and true is refused."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
                {
                    "required": ["messages"],
                    "properties": {"messages": {"type": "array"}, "add_special_tokens": {"enum": [False, None]}},
                },
            ]
        }
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError(
                "add_special_tokens must be false for messages, whose chat template writes them; leave it out"
            )
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId] = Field(min_length=1)


class LoadWeightsBody(Body):
    """POST /admin/load_weights."""

    version: int = Field(ge=0, le=VERSIONS[-1])
    path: str
    """A checkpoint folder on the server's disk."""
    keep_cache: bool = False
    checksum: str | None = None


class Info:
    """Handlers of the endpoints of one served model."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._model = backend.model
        self._started = int(time.time())

    def routes(self, with_admin: bool) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/api/info", self.info),
            Route("/api/cost", self.cost),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/tokenize", self._gated(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._gated(self.detokenize), methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info),
            *([Route("/admin/load_weights", self._gated(self.load_weights), methods=["POST"])] if with_admin else []),
        ]

    def _gated(self, work: Callable[[Any], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
        """An endpoint that passes a body to ``work``, under the limits that generating endpoints have, too."""

        async def endpoint(http: HttpRequest) -> Response:
            async with self._backend.gate.admit(http) as (tree, _):
                return await work(tree)

        return endpoint

    async def models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry(name) for name in self._model.names()]})

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        self._backend.resolver.preset_of(name)
        return JSONResponse(self._entry(name))

    async def info(self, http: HttpRequest) -> Response:
        model, config, resolver = self._model, self._model.config, self._backend.resolver
        stats = await self._stats()
        # A Subnet keeps the first entries of the last three.
        copied = ("vocab_size", "num_experts", "num_moe_layers", "moe_layers", "expert_orders", "layer_ranking")
        has_template = model.tokenizer is not None and model.tokenizer.chat_template is not None
        limits = {"layers": config.num_layers, "min_layers": model.least.layers}
        return JSONResponse(
            {
                "model": model.name,
                "presets": {name: self._sizes(subnet) for name, subnet in resolver.named.items()},
                "default": resolver.control.rungs[0].name,
                "limits": limits | {"experts": config.num_experts, "top_k": config.top_k},
                "max_len": model.max_len,
                **{name: getattr(config, name) for name in copied},
                "has_chat_template": has_template,
                "is_chat_tuned": has_template and model.is_chat_tuned,
                "is_enhancer": model.is_enhancer,
                "tools": self._tools() if has_template else None,
                "kernels": {} if stats is None else stats.kernels,
                "is_batch_invariant": None if stats is None else stats.is_batch_invariant,
            }
        )

    def _tools(self) -> dict[str, Any]:
        """How the prompt shows tools, and how answers call them."""
        prompts = self._backend.prompts
        form, dialect = tool_form(prompts.tokenizer.chat_template or ""), prompts.dialect
        shown = {"tools": form.variable is not None, "calls": form.shows_calls, "results": form.shows_results}
        return {
            "shown_by_template": [part for part, is_shown in shown.items() if is_shown],
            "dialect": None if dialect is None else dialect.name,
            "can_be_forced": dialect is not None and bool(dialect.call),
        }

    async def cost(self, http: HttpRequest) -> Response:
        """Sizes of any Subnet: ``?layers=…&experts=…&top_k=…``; an axis left out is full."""
        size = parse_body(Size, dict(http.query_params), strict=False)
        return JSONResponse(self._sizes(size.of(self._model.config, SubnetChoice(), "subnet")))

    async def health(self, http: HttpRequest) -> Response:
        service, gate = self._backend.service, self._backend.gate
        status = "failed" if service.error else "draining" if gate.is_draining or not service.is_accepting else "ok"
        about = {"model": self._model.name, "max_model_len": self._model.max_len}
        body = {"status": status} | about | ({"error": str(service.error)} if service.error else {})
        return JSONResponse(body, 200 if status == "ok" else 503)

    async def metrics(self, http: HttpRequest) -> Response:
        text = self._backend.metrics.render(await self._stats())
        return Response(text, media_type="text/plain; version=0.0.4")

    async def tokenize(self, tree: Any) -> Response:
        body = parse_body(TokenizeBody, tree)
        self._backend.resolver.preset_of(body.model)
        prompts = self._backend.prompts
        if body.messages is not None:
            rest = body.tools, body.add_generation_prompt, body.chat_template_kwargs
            ids = await asyncio.to_thread(prompts.chat, body.messages, *rest)
        else:
            ids = await asyncio.to_thread(prompts.text, body.prompt or "", body.parse_special)
            ids = [*(() if body.add_special_tokens is False else prompts.missing_start(ids)), *ids]
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._model.max_len})

    async def detokenize(self, tree: Any) -> Response:
        body = parse_body(DetokenizeBody, tree)
        self._backend.resolver.preset_of(body.model)
        tokenizer = self._backend.prompts.tokenizer
        ids = self._backend.check_ids(body.tokens, "tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(tokenizer.decode, ids)})

    async def tokenizer_info(self, http: HttpRequest) -> Response:
        """tokenizer_config.json with the chat template, in vLLM's form. lm-eval needs it to tokenise through the server."""
        tokenizer = self._backend.prompts.tokenizer
        about = {"vocab_size": tokenizer.vocab_size, "chat_template": tokenizer.chat_template}
        return JSONResponse({**tokenizer.config, **about, **named_tokens(tokenizer)})

    async def load_weights(self, tree: Any) -> Response:
        body = parse_body(LoadWeightsBody, tree)
        service = self._backend.service
        try:
            await service.load_weights(body.version, body.path, keep_cache=body.keep_cache, checksum=body.checksum)
        except OSError as error:
            raise FieldError("path", f"cannot be read: {error.strerror}") from None
        return JSONResponse({"weight_version": body.version})

    async def _stats(self) -> EngineStats | None:
        """The engine's counters; None if the engine is dead or in a long step."""
        try:
            async with asyncio.timeout(_STATS_S):
                return await self._backend.service.stats()
        except (EngineFailed, TimeoutError):
            return None

    def _entry(self, name: str) -> dict[str, Any]:
        about = {"object": "model", "created": self._started, "owned_by": "stretto"}
        return {"id": name, **about, "max_model_len": self._model.max_len}

    def _sizes(self, subnet: Subnet) -> dict[str, Any]:
        model = self._model
        counts = count(model.config, subnet)
        return {
            "layers": len(subnet.layers),
            "experts": max(subnet.experts, default=0),
            "top_k": max(subnet.top_k, default=0),
            "total_params": counts.total_params,
            "active_params": counts.active_params,
            "flops_per_token": counts.linear_flops,
            "kv_bytes_per_token": counts.kv_elements * model.dtype.itemsize,
            "weight_bytes": model.weight_bytes(subnet),
        }
