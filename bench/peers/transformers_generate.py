"""Worker: transformers' ``generate`` over a padded batch (here without padding: prompts have one length)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig

from bench.peers.protocol import Options, read_options, serve

EXPERTS = ("grouped_mm", "batched_mm", "eager")
"""Expert implementations that run without optional kernels."""
DENSE = "no experts"


def main() -> None:
    options = read_options()
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.dtype))
    model = model.to(options.device).eval()
    settings = [f"{experts}, {threads} threads" for experts in expert_ways(model) for threads in options.threads]
    if options.compile:
        settings += [f"{setting}, static cache, compiled" for setting in settings if not setting.startswith("eager")]
    serve(options, f"transformers {transformers.__version__}", settings, Generator(model, options))


def expert_ways(model: transformers.PreTrainedModel) -> tuple[str, ...]:
    """How a model may compute its experts; a dense one has one way."""
    return EXPERTS if any(name.endswith(".experts") for name, _ in model.named_modules()) else (DENSE,)


def choose_experts(model: transformers.PreTrainedModel, way: str) -> None:
    if way != DENSE:
        model.set_experts_implementation(way)


class Generator:
    """``generate`` under a setting ``experts, N threads[, static cache, compiled]``."""

    def __init__(self, model: transformers.PreTrainedModel, options: Options):
        self.model = model
        self.options = options

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Sequence[int]], num_tokens: int, setting: str) -> list[list[int]]:
        experts, threads, *compiled = setting.split(", ")
        torch.set_num_threads(int(threads.split()[0]))
        choose_experts(self.model, experts)
        config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        if compiled:
            config.cache_implementation = "static"
            config.compile_config = CompileConfig(fullgraph=False, mode="default", dynamic=False)
            config.compile_config._compile_all_devices = True  # otherwise only GPUs compile
        ids_BT = torch.tensor(prompts, device=self.options.device)
        made_BT = self.model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), generation_config=config)
        return made_BT[:, ids_BT.shape[1] :].tolist()


if __name__ == "__main__":
    main()
