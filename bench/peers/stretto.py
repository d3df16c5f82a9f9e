"""Worker: our engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import stretto
from bench.peers.protocol import Options, read_options, serve
from stretto.engine.loading import open_engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.ops.native import load


def main() -> None:
    options = read_options()
    kernels = ("native", "torch") if options.device == "cpu" and load().handle is not None else ("torch",)
    settings = [f"{kernel} kernels, {threads} threads" for kernel in kernels for threads in options.threads]
    serve(options, f"stretto {stretto.__version__}", settings, Generator(options, kernels))


class Generator:
    """Greedy decoding of the full network under a setting ``kernels, N threads``."""

    def __init__(self, options: Options, kernels: Sequence[str]):
        config = EngineConfig(
            max_batch=options.max_batch,
            max_step_tokens=options.max_batch * options.max_len,
            max_len=options.max_len,
            num_pages=options.max_batch * -(-options.max_len // 16) + 1,
            prefix_cache=False,
        )
        self.engines = {
            name: open_engine(
                options.folder,
                config,
                device=options.device,
                dtype=getattr(torch, options.dtype),
                with_tokenizer=False,
                library=load({"STRETTO_NATIVE": "1" if name == "native" else "0"}),
            )
            for name in kernels
        }

    def __call__(self, prompts: Sequence[Sequence[int]], num_tokens: int, setting: str) -> list[list[int]]:
        kernels, threads = setting.split(", ")
        torch.set_num_threads(int(threads.split()[0]))
        opened = self.engines[kernels.split()[0]]
        sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        phases = Phases(opened.engine.model.config.full())
        asked = [Request(str(index), tuple(prompt), sampling, phases) for index, prompt in enumerate(prompts)]
        return [list(done.tokens) for done in opened.engine.generate(asked)]


if __name__ == "__main__":
    main()
