"""Tensor parallelism of the engine on gloo: tokens, logits, speed and memory of 2 and 4 ranks beside one.

    python -m bench.tensor_parallel [--ranks 1,2,4] [--tokens N] [--networks NAME,…]

Each network has random weights and is written as a checkpoint, which every rank reads in parts. Requests are greedy, alternate between
the full network and its smallest preset, and share beginnings of prompts. ``equal`` counts requests whose tokens are those of one rank.
The logit difference is the largest over all positions of all prompts, each computed in one step. Memory is that of the tensors of
rank 0; ``of 1/N`` is its ratio to an N-th of one rank's. Embedding and output matrix are whole on every rank, and so is
the cache of latent attention. ``CPU ms/token`` adds the processor time of all ranks, which other programs on the machine change less
than tokens/s. All ranks run torch's operators; the last row of a network has the compiled kernels, which
one rank uses by default. Fails (exit code 1) unless all tokens are equal.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.common.measure import bench_parser, finish, table
from bench.common.networks import random_network
from stretto.base.track import wide_console
from stretto.engine.engine import Engine
from stretto.engine.loading import open_engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.engine.sequence import Chunk
from stretto.model.checkpoint import write_checkpoint
from stretto.model.spec import LatentAttention, ModelConfig
from stretto.ops.native import Library, load

PAGE_SIZE, NUM_PAGES = 16, 256
NUM_REQUESTS, PROMPT_TOKENS = 16, 40
_SHAPE = ModelConfig(
    vocab_size=2048,
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    num_experts=16,
    top_k=4,
    expert_intermediate_size=256,
    max_positions=512,
    qk_norm=True,
    router="softmax",
    selection_bias=False,
)
_SHARED = {"num_shared_experts": 1, "qk_norm": False, "router": "sigmoid", "selection_bias": True}
_LATENT = LatentAttention(query_rank=192, kv_rank=128, rope_dim=32, value_dim=64)
NETWORKS: dict[str, ModelConfig] = {
    "dense": _SHAPE.replace(dense_layers=tuple(range(8)), dense_intermediate_size=1536),
    "experts": _SHAPE,
    "experts, one shared": _SHAPE.replace(**_SHARED, dense_layers=(0,), dense_intermediate_size=1536),
    "latent, one shared": _SHAPE.replace(**_SHARED, latent=_LATENT, num_kv_heads=8, head_dim=96),
}
TORCH = Library(None, "compared without kernels")


@dataclass(frozen=True, slots=True)
class Found:
    """Result of one engine."""

    tokens: list[tuple[int, ...]]
    logits_MV: Tensor
    tokens_per_s: float
    """Sampled tokens of all requests by wall time, prompts included in the time."""
    processor_ms: float
    """Processor time of all ranks for one sampled token, milliseconds."""
    weight_bytes: int
    cache_bytes: int


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks; the first must be 1")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each request")
    parser.add_argument("--networks", help="names, separated by commas; default: all")
    options = parser.parse_args()
    ranks = [int(text) for text in options.ranks.split(",")]
    assert ranks[0] == 1, "the first number of ranks is the reference"
    failures: list[str] = []
    for name, network in NETWORKS.items():
        if options.networks and name not in options.networks.split(","):
            continue
        columns = (
            "ranks",
            "equal",
            "logit difference",
            "tokens/s",
            "CPU ms/token",
            "weights",
            "of 1/N",
            "cache",
            "of 1/N",
        )
        shown = table(f"{name}: {NUM_REQUESTS} greedy requests of {options.tokens} tokens, fp32", *columns)
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(folder, random_network(network), network)
            one = measure(Path(folder), 1, options.tokens, TORCH)
            for num in ranks:
                found = one if num == 1 else measure(Path(folder), num, options.tokens, TORCH)
                num_equal = sum(a == b for a, b in zip(found.tokens, one.tokens, strict=True))
                if num_equal < NUM_REQUESTS:
                    failures.append(
                        f"{name}, {num} ranks: {NUM_REQUESTS - num_equal} of {NUM_REQUESTS} requests differ"
                    )
                shown.add_row(str(num), f"{num_equal} of {NUM_REQUESTS}", *_cells(found, one, num))
            kernels = measure(Path(folder), 1, options.tokens, load())
            shown.add_row("1, kernels", "", *_cells(kernels, one, 1))
        wide_console().print(shown)
    finish(failures)


def measure(folder: Path, num_ranks: int, num_tokens: int, library: Library) -> Found:
    """Tokens, logits, speed and memory of one engine."""
    sizes = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES, "max_batch": NUM_REQUESTS, "max_step_tokens": 256}
    config = EngineConfig(**sizes, tp=num_ranks)
    engine = open_engine(folder, config, with_tokenizer=False, library=library).engine
    with closing(engine):
        asked = list(requests(engine.network, num_tokens))
        logits_MV = torch.cat([_logits(engine, request) for request in asked])
        list(map(engine.add, asked))
        started_s, used_s, tokens = time.perf_counter(), _processor_s(engine), dict[str, list[int]]()
        while engine.has_work:
            for event in engine.step():
                if hasattr(event, "token"):
                    tokens.setdefault(event.request_id, []).append(event.token)
        elapsed_s, used_s = time.perf_counter() - started_s, _processor_s(engine) - used_s
        weights = {tensor.data_ptr(): tensor.nbytes for tensor in engine.model.state_dict().values()}
        cache_bytes = engine.stats().cache_bytes
    del engine
    gc.collect()
    found = [tuple(tokens[request.id]) for request in asked]
    num_found = sum(map(len, found))
    times = (num_found / elapsed_s, 1000 * used_s / num_found)
    return Found(found, logits_MV, *times, sum(weights.values()), cache_bytes)


def requests(network: ModelConfig, num_tokens: int) -> Iterator[Request]:
    """Greedy requests at two sizes; every fourth prompt begins like the one four before it."""
    generator = torch.Generator().manual_seed(0)
    small = network.subnet(depth=6, **({"experts": 8, "top_k": 2} if network.moe_layers else {}))
    prompts = torch.randint(3, network.vocab_size, (NUM_REQUESTS, PROMPT_TOKENS), generator=generator)
    prompts[4::4, : PROMPT_TOKENS // 2] = prompts[0, : PROMPT_TOKENS // 2]
    sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts.tolist()):
        yield Request(f"r{number}", tuple(prompt), sampling, Phases(network.full() if number % 3 else small))


def _logits(engine: Engine, request: Request) -> Tensor:
    """Logits [T, V] of all positions of the prompt, in one step of the engine's runner. The engine must be idle."""
    subnet, num_tokens = engine._subnets.number(request.phases.answer), len(request.prompt)
    pages = tuple(range(-(-num_tokens // PAGE_SIZE)))
    return engine._runner.forward([Chunk(request.prompt, 0, pages, subnet, num_tokens)], False).clone()


def _processor_s(engine: Engine) -> float:
    """Processor time of all ranks, seconds."""
    followers = [] if engine._team is None else engine._team._followers.processes
    ticks = 0
    for process in followers:
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system time
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _cells(found: Found, one: Found, num_ranks: int) -> list[str]:
    difference, largest = float((found.logits_MV - one.logits_MV).abs().max()), float(one.logits_MV.abs().max())
    sizes = []
    for own, whole in ((found.weight_bytes, one.weight_bytes), (found.cache_bytes, one.cache_bytes)):
        sizes += [f"{own / 1e6:.1f} MB", f"{own * num_ranks / whole:.2f}"]
    return [f"{difference:.1e} of {largest:.0f}", f"{found.tokens_per_s:.0f}", f"{found.processor_ms:.1f}", *sizes]


if __name__ == "__main__":
    main()
