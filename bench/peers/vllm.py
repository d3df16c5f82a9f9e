"""Worker: vLLM with its engine core in the worker's process, so that the measured processor time includes the core.

It compiles when it starts, which is its default.
"""

from __future__ import annotations

from collections.abc import Sequence

import vllm

from bench.peers.protocol import Options, read_options, serve


def main() -> None:
    options = read_options()
    serve(options, f"vLLM {vllm.__version__}", [f"compiled, {max(options.threads)} threads"], Generator(options))


class Generator:
    """Greedy decoding; vLLM reads the number of threads from the environment when the process starts."""

    def __init__(self, options: Options):
        self.engine = vllm.LLM(
            model=options.folder,
            dtype=options.dtype,
            max_model_len=options.max_len,
            max_num_seqs=options.max_batch,
            max_num_batched_tokens=options.max_batch * options.max_len,
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )

    def __call__(self, prompts: Sequence[Sequence[int]], num_tokens: int, setting: str) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        rows = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        made = self.engine.generate(rows, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in made]


if __name__ == "__main__":
    main()
