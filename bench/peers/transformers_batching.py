"""Worker: transformers' continuous batching, its manager kept between calls as a server would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from bench.peers.protocol import Options, read_options, serve
from bench.peers.transformers_generate import choose_experts, expert_ways

ATTENTION = ("sdpa", "paged|eager")
PAGE_SIZE = 64


def main() -> None:
    options = read_options()
    generator = Generator(options)
    settings = [
        f"{experts}, {attention}, {threads} threads"
        for experts in expert_ways(generator.model)
        for attention in ATTENTION
        for threads in options.threads
    ]
    serve(options, f"transformers {transformers.__version__}", settings, generator)


class Generator:
    """Continuous batching under a setting ``experts, attention, N threads``."""

    def __init__(self, options: Options):
        self.options = options
        model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.dtype))
        self.model = model.to(options.device).eval()
        self.manager: ContinuousBatchingManager | None = None
        self.attention = ""

    def __call__(self, prompts: Sequence[Sequence[int]], num_tokens: int, setting: str) -> list[list[int]]:
        experts, attention, threads = setting.split(", ")
        torch.set_num_threads(int(threads.split()[0]))
        if attention != self.attention:
            self._start(attention)
        choose_experts(self.model, experts)
        assert self.manager is not None
        ids = self.manager.add_requests([list(prompt) for prompt in prompts], max_new_tokens=num_tokens)
        tokens: dict[str, list[int]] = {}
        while len(tokens) < len(ids):
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                assert not result.error, result.error
                tokens[result.request_id] = list(result.generated_tokens)
            assert self.manager.is_running(), "the generation thread ended"
        return [tokens[name] for name in ids]

    def _start(self, attention: str) -> None:
        if self.manager is not None:
            self.manager.stop(block=True)
            self.manager.destroy()
        self.model.set_attn_implementation(attention)
        pages = -(-self.options.max_len // PAGE_SIZE) * (self.options.max_batch + 1)
        fields = ContinuousBatchingConfig.__dataclass_fields__
        page: dict[str, Any] = {"page_size" if "page_size" in fields else "block_size": PAGE_SIZE}  # renamed after 5.17
        batching = ContinuousBatchingConfig(
            **page,
            num_blocks=pages,
            max_batch_tokens=self.options.max_batch * self.options.max_len,
            max_requests_per_batch=self.options.max_batch,
            allow_block_sharing=False,
        )
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=self.options.max_len)
        self.manager = self.model.init_continuous_batching(config, continuous_batching_config=batching)
        self.manager.start()
        self.attention = attention


if __name__ == "__main__":
    main()
