"""Worker: transformers' ``generate`` over a batch of prompts of one length, which needs no padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.peers.protocol import Options, read_options, serve

EXPERTS = ("grouped_mm", "batched_mm", "eager")
"""Expert implementations that run without optional kernels."""
DENSE = "no experts"


def main() -> None:
    options = read_options()
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.dtype))
    model = model.to(options.device).eval()
    settings = [f"{experts}, {threads} threads" for experts in expert_ways(model) for threads in options.threads]
    serve(options, f"transformers {transformers.__version__}", settings, Generator(model, options))


def expert_ways(model: transformers.PreTrainedModel) -> tuple[str, ...]:
    """Expert implementations that a model can use; a dense model has one setting."""
    return EXPERTS if any(name.endswith(".experts") for name, _ in model.named_modules()) else (DENSE,)


class Generator:
    """``generate`` under a setting ``experts, N threads``."""

    def __init__(self, model: transformers.PreTrainedModel, options: Options):
        self.model = model
        self.options = options

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Sequence[int]], num_tokens: int, setting: str) -> list[list[int]]:
        experts, threads = setting.split(", ")
        torch.set_num_threads(int(threads.split()[0]))
        if experts != DENSE:
            self.model.set_experts_implementation(experts)
        config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        ids_BT = torch.tensor(prompts, device=self.options.device)
        made_BT = self.model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), generation_config=config)
        return made_BT[:, ids_BT.shape[1] :].tolist()


if __name__ == "__main__":
    main()
