"""Requests of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto.base.errors import UserError
from stretto.flow.servers.client import from_text
from stretto.flow.servers.dialect import DTYPES, Ask, ByFolder, Reply, labels_of


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
        dtype, wanted = str(model.get("dtype")).removeprefix("torch."), str(DTYPES[self._recipe.precision.engines])
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
            labels_of(choice.get("weight_versions") or (), len(choice["token_ids"])),
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
