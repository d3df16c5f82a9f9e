"""Doubles of vLLM (0.32) and SGLang over our engine, with the endpoints, fields and forms of their schemas."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bench.common.server import in_thread
from stretto.base.errors import UserError
from stretto.base.trajectory import WeightVersion
from stretto.flow.clients import Generated, GenerateRequest
from stretto.flow.rollout import EngineRole
from stretto.flow.servers.client import to_text
from stretto.learning.canary import score_canary
from stretto.learning.weights import publish
from stretto.model.checkpoint import read_checkpoint
from stretto.model.transformer import Transformer
from stretto.server.limits import cut_connection
from tests.engine.engines import CONFIG, engine, network
from tests.flow.policies import recipe

WRONG = network(seed=9)
VLLM_SAMPLING = {
    *("temperature", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "logprobs", "detokenize", "prompt_logprobs"),
    "routed_experts_prompt_start",
}
"""Fields of vLLM's SamplingParams that the double knows."""
SGLANG_SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("sampling_seed", "max_new_tokens", "stop_token_ids"),
}


def version_of(folder: Path, number: int, model: Transformer, precision: str = "fp32") -> WeightVersion:
    """A published version with the canary of the trainer, for vLLM. ``precision``: that of the engines."""
    at = {"group": 4, "max_tokens": 18, "engine": "vllm", "address": "http://127.0.0.1:9"}
    plan = recipe(rollout=at, precision={"rollout": precision}).on("fp32")
    canary, tolerance = score_canary(model, plan, torch.device("cpu"))
    return replace(publish(folder, number, model.state_dict()), canary=canary, tolerance=tolerance)


class Double:
    """What both doubles share. A test sets its switches."""

    def __init__(self) -> None:
        self.loads_wrong = self.dies_in_update = self.forgets_labels = self.has_no_routes = False
        self.left_out: tuple[str, ...] = ()
        """Endpoints that this server does not have."""
        self.calls: list[str] = []
        self.role = EngineRole(lambda: engine(network(seed=9)), self._read, name="double")
        self._numbers = itertools.count(1)
        self._labels = {0: "default"}
        self._is_dead = False

    def app(self) -> Starlette:
        paths = {path: work for path, work in self.endpoints().items() if path not in self.left_out}
        paths["/openapi.json"] = self._openapi
        return Starlette(
            routes=[Route(path, self._answering(work), methods=["GET", "POST"]) for path, work in paths.items()]
        )

    def endpoints(self) -> dict[str, Any]:
        raise NotImplementedError

    def _answering(self, work: Any) -> Any:
        async def endpoint(http: Request) -> Response:
            self.calls.append(http.url.path)
            if self._is_dead:
                self._die(http)
            body = await http.json() if http.method == "POST" else {}
            try:
                return JSONResponse(await work(http, body))
            except UserError as error:
                return JSONResponse({"error": {"message": str(error)}}, 400)

        return endpoint

    def _die(self, http: Request) -> None:
        self._is_dead = True
        cut_connection(http.scope["uvicorn.send"])
        raise ConnectionError

    async def _openapi(self, http: Request, body: Any) -> Any:
        return {"paths": {path: {} for path in self.endpoints() if path not in self.left_out}}

    async def health(self, http: Request, body: Any) -> Any:
        return {}

    def _read(self, version: WeightVersion) -> Any:
        return WRONG.state_dict() if self.loads_wrong else read_checkpoint(version.location).model.state_dict()

    async def _load(self, http: Request, path: str) -> None:
        if self.dies_in_update:
            self._die(http)
        number = next(self._numbers)
        self._labels[number] = "unlabelled"
        await self.role.activate(WeightVersion(number, path, "", 0))

    async def _sample(self, ids: Sequence[int], params: dict[str, Any], seed: int, num: int) -> Generated:
        tokens, stop_ids = np.array(ids, np.int32), tuple(params.get("stop_token_ids", ()))
        request = GenerateRequest("double", tokens, num, params.get("temperature", 1.0), seed, stop_ids)
        return await self.role.generate(request)

    def _all_layers(self, done: Generated, start: int) -> np.ndarray:
        """Routes of all layers, with zeros for the dense ones, as both servers return them."""
        assert done.routes is not None
        routes_RNK = np.zeros((len(done.routes), CONFIG.num_layers, done.routes.shape[2]), np.uint8)
        routes_RNK[:, list(CONFIG.moe_layers)] = done.routes
        return routes_RNK[start:]


class VllmDouble(Double):
    def endpoints(self) -> dict[str, Any]:
        return {
            "/health": self.health,
            "/v1/models": self.models,
            "/server_info": self.info,
            "/inference/v1/generate": self.generate,
            "/pause": self.pause,
            "/resume": self.health,
            "/collective_rpc": self.rpc,
            "/reset_prefix_cache": self.reset,
            "/update_weight_version": self.label,
        }

    async def models(self, http: Request, body: Any) -> Any:
        return {"object": "list", "data": [{"id": "double", "max_model_len": CONFIG.max_positions}]}

    async def info(self, http: Request, body: Any) -> Any:
        model = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs"}
        routes = {"enable_return_routed_experts": not self.has_no_routes}
        return {"vllm_config": {"model_config": model, "aux_output_config": routes}}

    async def pause(self, http: Request, body: Any) -> Any:
        assert http.query_params["mode"] == "keep"
        return {"status": "paused"}

    async def rpc(self, http: Request, body: Any) -> Any:
        assert body["method"] == "reload_weights" and body.keys() == {"method", "kwargs"}
        await self._load(http, body["kwargs"]["weights_path"])
        return {"results": [None]}

    async def reset(self, http: Request, body: Any) -> Any:
        return {"success": http.query_params["reset_running_requests"] == "true"}

    async def label(self, http: Request, body: Any) -> Any:
        self._labels[self.role.version] = body["new_version"]
        return {"success": True, **body}

    async def generate(self, http: Request, body: Any) -> Any:
        params = body["sampling_params"]
        assert body.keys() == {"token_ids", "sampling_params"} and params.keys() <= VLLM_SAMPLING, body
        done = await self._sample(body["token_ids"], params, params.get("seed", 0), params["max_tokens"])
        tokens = done.segment.tokens.tolist()
        labels = ["default" if self.forgets_labels else self._labels[each] for each in done.segment.versions.tolist()]
        ends = list(itertools.accumulate(len(list(same)) for _, same in itertools.groupby(labels)))
        spans = [
            {"version": labels[end - 1], "start": start, "end": end}
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        routes, prompt = None, None
        if "routed_experts_prompt_start" in params:
            routes = to_text(self._all_layers(done, params["routed_experts_prompt_start"]))
        if "prompt_logprobs" in params:
            scores = await self.role.score(body["token_ids"])
            rows = zip(body["token_ids"][1:], scores, strict=True)
            prompt = [
                None,
                *({str(token): {"logprob": score, "rank": 1, "decoded_token": ""}} for token, score in rows),
            ]
        content = [
            {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
            for token, value in zip(tokens, done.segment.logprobs.tolist(), strict=True)
        ]
        choice = {
            "index": 0, "finish_reason": done.finish_reason, "stop_reason": None, "token_ids": tokens, "routed_experts": routes,
            "sampling_mask": None, "weight_versions": spans, "logprobs": {"content": content} if "logprobs" in params else None,
        }  # fmt: skip
        usage = {
            "prompt_tokens": len(body["token_ids"]),
            "completion_tokens": len(tokens),
            "prompt_tokens_details": None,
        }
        return {"request_id": "r", "model": "double", "usage": usage, "prompt_logprobs": prompt, "choices": [choice]}


class SglangDouble(Double):
    def endpoints(self) -> dict[str, Any]:
        return {
            "/get_model_info": self.health,
            "/get_server_info": self.info,
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.health,
            "/update_weights_from_disk": self.update,
        }

    async def info(self, http: Request, body: Any) -> Any:
        return {"enable_return_routed_experts": not self.has_no_routes, "max_req_input_len": CONFIG.max_positions - 1}

    async def pause(self, http: Request, body: Any) -> Any:
        assert body == {"mode": "retract"}
        return {"status": "ok"}

    async def update(self, http: Request, body: Any) -> Any:
        assert body.keys() == {"model_path", "weight_version", "flush_cache"} and body["flush_cache"]
        await self._load(http, body["model_path"])
        return {"success": True, "message": "", "num_paused_requests": 0}

    async def generate(self, http: Request, body: Any) -> Any:
        params = body["sampling_params"]
        assert params.keys() <= SGLANG_SAMPLING, params
        ids = body["input_ids"]
        done = await self._sample(ids, params, params.get("sampling_seed", 0), params["max_new_tokens"])
        logprobs = done.segment.logprobs.tolist()
        meta: dict[str, Any] = {
            "finish_reason": {"type": done.finish_reason}, "weight_version": "last", "prompt_tokens": len(ids),
            "completion_tokens": len(logprobs), "cached_tokens": done.cached_tokens,
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, done.segment.tokens.tolist(), strict=True)],
        }  # fmt: skip
        if "logprob_start_len" in body:
            scores = await self.role.score(ids)
            meta["input_token_logprobs"] = [
                [value, token, None] for value, token in zip([None, *scores], ids, strict=True)
            ]
        if body.get("return_routed_experts"):
            routes = self._all_layers(done, body["routed_experts_start_len"])
            meta["routed_experts"] = base64.b64encode(routes.astype("<i4").tobytes()).decode()
        return {"text": "", "output_ids": done.segment.tokens.tolist(), "meta_info": meta}


@contextmanager
def running(app: Starlette) -> Iterator[str]:
    """Address of ``app`` on a free loopback port."""

    async def outermost(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "uvicorn.send": send}, receive, send)

    with in_thread(uvicorn.Server(uvicorn.Config(outermost, log_level="critical", lifespan="off"))) as url:
        yield url
