"""Worker: llama.cpp through the low-level calls of llama-cpp-python. One batch, one sequence for each prompt."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np

from bench.peers.protocol import Options, read_options, serve

FLASH = {
    "flash attention": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "plain attention": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
CACHE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
"""Numbers of the types in ggml."""


def main() -> None:
    options = read_options()
    settings = [
        f"{flash}, {cache} cache, {threads} threads"
        for flash in FLASH
        for cache in ("split", "unified")
        for threads in options.threads
    ]
    serve(options, f"llama.cpp of llama-cpp-python {llama_cpp.__version__}", settings, Generator(options))


class Generator:
    """Greedy decoding under a setting ``attention, cache, N threads``; each setting has a context, made at its first use."""

    def __init__(self, options: Options):
        self.options = options
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0 if options.device == "cpu" else 999
        self.model = llama_cpp.llama_model_load_from_file(options.gguf.encode(), params)
        assert self.model is not None, f"llama.cpp does not load {options.gguf}"
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.contexts: dict[tuple[str, str, int], llama_cpp.llama_context_p_ctypes] = {}

    def __call__(self, prompts: Sequence[Sequence[int]], num_tokens: int, setting: str) -> list[list[int]]:
        flash, cache, threads = setting.split(", ")
        context = self._context(flash, cache.split()[0], len(prompts))
        llama_cpp.llama_set_n_threads(context, int(threads.split()[0]), int(threads.split()[0]))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        num_prompts, length = len(prompts), len(prompts[0])
        batch = llama_cpp.llama_batch_init(num_prompts * length, 0, 1)
        made = np.zeros((num_prompts, num_tokens), np.int32)
        rows = [(token, position, row) for row, prompt in enumerate(prompts) for position, token in enumerate(prompt)]
        for step in range(num_tokens):
            self._decode(context, batch, rows, last=length + step - 1)
            logits = llama_cpp.llama_get_logits(context)
            logits_BV = np.ctypeslib.as_array(logits, shape=(num_prompts, self.vocab_size))
            made[:, step] = logits_BV.argmax(1)
            rows = [(token, length + step, row) for row, token in enumerate(made[:, step].tolist())]
        llama_cpp.llama_batch_free(batch)
        return made.tolist()

    def _decode(self, context: object, batch: object, rows: list[tuple[int, int, int]], last: int) -> None:
        """Compute tokens (id, position, sequence), with logits for those at position ``last``."""
        batch.n_tokens = len(rows)
        for index, (token, position, row) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0], batch.logits[index] = row, position == last
        code = llama_cpp.llama_decode(context, batch)
        assert code == 0, f"llama_decode: {code}"

    def _context(self, flash: str, cache: str, num_sequences: int) -> object:
        key = (flash, cache, num_sequences)
        if key not in self.contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = num_sequences * -(-self.options.max_len // 256) * 256
            params.n_batch = params.n_ubatch = max(512, num_sequences * self.options.max_len)
            params.n_seq_max = num_sequences
            params.flash_attn_type = FLASH[flash]
            params.type_k = params.type_v = CACHE_TYPES[self.options.dtype]
            params.kv_unified = cache == "unified"
            params.no_perf = True
            context = llama_cpp.llama_init_from_model(self.model, params)
            assert context is not None, f"llama.cpp makes no context with {key}"
            self.contexts[key] = context
        return self.contexts[key]


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


if __name__ == "__main__":
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    main()
