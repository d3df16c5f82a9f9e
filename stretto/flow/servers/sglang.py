"""Requests of SGLang."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.errors import UserError, one_line
from stretto.flow.servers.dialect import Ask, ByFolder, Reply


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
