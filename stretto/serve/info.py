"""The endpoints that generate nothing: models, sizes, tokens, health, metrics, and the admin's weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from stretto.base.errors import nearest
from stretto.engine.async_engine import AsyncEngine as Service
from stretto.engine.async_engine import EngineFailed
from stretto.engine.request import EngineStats
from stretto.model.count import count
from stretto.model.spec import Subnet, SubnetChoice
from stretto.serve.bodies import DetokenizeBody, LoadWeightsBody, TokenizeBody, parse_body
from stretto.serve.errors import bad
from stretto.serve.generate import Shared
from stretto.serve.limits import read_json
from stretto.serve.openai import Desk
from stretto.serve.prompts import check_ids
from stretto.serve.settings import ServedModel

Handler = Callable[[HttpRequest], Awaitable[Response]]
_STATS_S = 1.0
"""How long a scrape waits for the engine, which answers between two steps."""


class Info:
    """Handlers over one served model."""

    def __init__(self, shared: Shared, desk: Desk, model: ServedModel) -> None:
        self._shared = shared
        self._desk = desk
        self._model = model
        self._started = int(time.time())

    def gets(self) -> dict[str, Handler]:
        """Path -> handler, for GET."""
        return {
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/api/info": self.info,
            "/api/cost": self.cost,
            "/health": self.health,
            "/metrics": self.metrics,
        }

    def posts(self) -> dict[str, Handler]:
        """Path -> handler, for POST."""
        posts: dict[str, Handler] = {"/tokenize": self.tokenize, "/detokenize": self.detokenize}
        if self._shared.settings.admin_key is not None:
            posts["/admin/load_weights"] = self.load_weights
        return posts

    async def models(self, http: HttpRequest) -> Response:
        name = self._model.name
        names = [name, *(f"{name}:{preset}" for preset in self._model.choices())]
        return JSONResponse({"object": "list", "data": [self._entry(each) for each in names]})

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        self._shared.chooser.preset_of(name)
        return JSONResponse(self._entry(name))

    async def info(self, http: HttpRequest) -> Response:
        model, config = self._model, self._model.config
        stats = await engine_stats(self._shared.service)
        return JSONResponse(
            {
                "model": model.name,
                "presets": {name: self._sizes(choice.of(config)) for name, choice in model.choices().items()},
                "default": self._shared.chooser.control.rungs[0].name,
                "limits": {
                    "layers": config.num_layers,
                    "min_layers": model.min_depth,
                    "experts": config.num_experts,
                    "top_k": config.top_k,
                },
                "max_len": model.max_len,
                "vocab_size": config.vocab_size,
                "num_experts": config.num_experts,
                "num_moe_layers": config.num_moe_layers,
                # What a Subnet keeps of each axis is a beginning of these.
                "moe_layers": config.moe_layers,
                "expert_orders": config.expert_orders,
                "layer_ranking": config.layer_ranking,
                "has_chat_template": model.tokenizer is not None and model.tokenizer.chat_template is not None,
                "kernels": {} if stats is None else stats.kernels,
            }
        )

    async def cost(self, http: HttpRequest) -> Response:
        """Sizes of any Subnet: ``?layers=…&experts=…&top_k=…``; an axis left out is full."""
        axes: dict[str, int] = {}
        for axis, text in http.query_params.items():
            if axis not in SubnetChoice.model_fields:
                raise bad(axis, f"unknown axis{nearest(axis, SubnetChoice.model_fields)}")
            if not (text.isascii() and text.isdecimal()) or len(text) > 9:
                raise bad(axis, "is not a whole number")
            axes[axis] = int(text)
        ordered = [axes.get(axis) for axis in SubnetChoice.model_fields]
        return JSONResponse(self._sizes(self._model.config.subnet(*ordered)))

    async def health(self, http: HttpRequest) -> Response:
        service, gate = self._shared.service, self._shared.gate
        status = "failed" if service.error else "draining" if gate.is_draining or not service.is_accepting else "ok"
        body = {"status": status, "model": self._model.name} | ({"error": str(service.error)} if service.error else {})
        return JSONResponse(body, status_code=200 if status == "ok" else 503)

    async def metrics(self, http: HttpRequest) -> Response:
        stats = await engine_stats(self._shared.service)
        return Response(self._shared.metrics.render(stats), media_type="text/plain; version=0.0.4")

    async def tokenize(self, http: HttpRequest) -> Response:
        body = parse_body(TokenizeBody, await self._json(http))
        self._shared.chooser.preset_of(body.model)
        prompts = self._desk.need_prompts()
        if body.messages is not None:
            ids = await asyncio.to_thread(prompts.chat, body.messages, body.tools, body.add_generation_prompt)
        else:
            ids = await asyncio.to_thread(prompts.text, body.prompt or "", body.parse_special)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._model.max_len})

    async def detokenize(self, http: HttpRequest) -> Response:
        body = parse_body(DetokenizeBody, await self._json(http))
        self._shared.chooser.preset_of(body.model)
        tokenizer = self._desk.need_prompts().tokenizer
        ids = check_ids(body.tokens, self._model.config.vocab_size, "tokens")
        return JSONResponse({"prompt": tokenizer.decode(ids)})

    async def load_weights(self, http: HttpRequest) -> Response:
        body = parse_body(LoadWeightsBody, await self._json(http))
        await self._shared.service.load_weights(
            body.version, body.path, keep_cache=body.keep_cache, checksum=body.checksum
        )
        return JSONResponse({"weight_version": body.version})

    async def _json(self, http: HttpRequest) -> Any:
        settings = self._shared.settings
        return await read_json(http, settings.max_body_bytes, settings.body_timeout_s)

    def _entry(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "stretto",
            "max_model_len": self._model.max_len,
        }

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
            "kv_bytes_per_token": counts.kv_elements * model.weight_bytes,
            "weight_bytes": counts.total_params * model.weight_bytes,
        }


async def engine_stats(service: Service) -> EngineStats | None:
    """The engine's stats; None where it is dead, or in the midst of a long step."""
    try:
        async with asyncio.timeout(_STATS_S):
            return await service.stats()
    except (EngineFailed, TimeoutError):
        return None
