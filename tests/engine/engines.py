"""A network small enough to generate with by hand, its tokenizer, and requests of every kind."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bench.common.naive_engine import logits_naive, subnets_by_position
from stretto.engine.engine import Engine
from stretto.engine.request import Completion, EngineConfig, Phases, Request, Sampling
from stretto.model.spec import ClampedSwiGlu, LatentAttention, ModelConfig, RopeScaling, Subnet
from stretto.model.transformer import Transformer, build
from stretto.text.tokenizer import Tokenizer, train_tokenizer
from tests.engine.scheduler_loop import check_pages

CONFIG = ModelConfig(
    vocab_size=288, hidden_size=32, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=8, top_k=3,
    expert_intermediate_size=16, num_shared_experts=1, qk_norm=True, dense_layers=(0,), dense_intermediate_size=32,
    widths=(8, 4), max_positions=160,
)  # fmt: skip
FULL = CONFIG.full()
CORNER = CONFIG.subnet(depth=3, experts=4, top_k=1)
SHALLOW = CONFIG.subnet(depth=3)
NARROW = CONFIG.subnet(experts=5, top_k=2)
SUBNETS = (FULL, CORNER, SHALLOW, NARROW)
SWITCHES: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": RopeScaling(kind="linear", factor=4)},
    "yarn": {"rope_scaling": RopeScaling(kind="yarn", factor=4, original_positions=16)},
    "llama3": {"rope_scaling": RopeScaling(kind="llama3", factor=8, original_positions=32)},
    "biases": {
        "attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "router_bias": True, "expert_bias": True,
        "num_shared_experts": 1, "dense_layers": (1,), "dense_intermediate_size": 20,
    },
    "sinks and windows": {
        "attention_sinks": True, "sliding_window": 5, "sliding_layers": (0, 2), "clamped_swiglu": ClampedSwiGlu(limit=0.5),
        "attention_bias": True, "attention_out_bias": True, "router_bias": True, "expert_bias": True,
        "router": "softmax", "selection_bias": False,
    },
    "wide norm, clip": {"qk_norm_wide": True, "qk_norm": False, "qkv_clip": 1.2, "router": "softmax", "selection_bias": False},
    "scale, groups": {"attention_scale": 0.25, "expert_groups": 2, "top_groups": 1, "routed_scaling": 1.5},
}  # fmt: skip
"""What networks of other families have; for any of four heads, three layers and six experts or more."""
LATENT: dict[str, dict[str, Any]] = {
    "latent": {
        "latent": LatentAttention(query_rank=10, kv_rank=12, rope_dim=4, value_dim=6), "num_kv_heads": 4, "qk_norm": False,
    },
    "latent, queries at once": {
        "latent": LatentAttention(kv_rank=8, rope_dim=2, value_dim=10), "num_kv_heads": 4, "qk_norm": False,
        "attention_bias": True, "attention_scale": 0.3,
        "rope_scaling": RopeScaling(kind="yarn", factor=4, original_positions=16, mscale=1.0, mscale_all_dim=0.7),
    },
}  # fmt: skip
"""As `SWITCHES`, but none that the compiled kernels know."""
PHASES = Phases(answer=CORNER, prefill=FULL, thinking=SHALLOW, thinking_end=7)
SIZES: dict[str, Any] = {"num_pages": 200, "page_size": 4, "max_batch": 8, "max_step_tokens": 48}


@functools.cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(["the cat sat on the mat and the dog sat on the log " * 20]), 288)


def network(seed: int = 0, config: ModelConfig = CONFIG) -> Transformer:
    """Random weights of such a size that logits are spread like a trained network's: argmax is never a near tie."""
    model = build(config, seed).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.mul_(2.5 if name.startswith("blocks") else 4.0)
    torch.manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("bias_WE"):
            buffer.normal_(0.0, 0.05)
    return model


def engine(model: Transformer | None = None, text: bool = False, version: int = 0, **options: Any) -> Engine:
    """An engine of small sizes; ``options`` are `EngineConfig`'s, and those of `Engine` in ``engine``."""
    extra = options.pop("engine", {})
    config = EngineConfig(**{**SIZES, **options})
    seeds = itertools.count(1).__next__
    return Engine(model or network(), tokenizer() if text else None, config, version, **{"seeds": seeds, **extra})


def request(
    name: str, prompt: Sequence[int], subnet: Subnet | Phases = FULL, routes: bool = False, **sampling: Any
) -> Request:
    phases = subnet if isinstance(subnet, Phases) else Phases(subnet)
    return Request(name, tuple(prompt), Sampling(**{"temperature": 0.0, "max_tokens": 10, **sampling}), phases, routes)


def prompts(seed: int, num: int, low: int = 1, high: int = 60) -> list[tuple[int, ...]]:
    """Random prompts; about half share a beginning with an earlier one."""
    rng = random.Random(seed)
    made: list[tuple[int, ...]] = []
    for _ in range(num):
        length = rng.randint(low, high)
        shared = rng.choice(made)[: rng.randint(0, length)] if made and rng.random() < 0.5 else ()
        made.append((*shared, *(rng.randrange(3, CONFIG.vocab_size) for _ in range(length - len(shared)))))
    return made


def mixed(num: int, seed: int, **sampling: object) -> list[Request]:
    """Requests of all lengths, Subnets and phases."""
    subnets = [*SUBNETS, PHASES, Phases(answer=CORNER, prefill=SHALLOW)]
    rng = random.Random(seed)
    return [
        request(f"r{index}", prompt, rng.choice(subnets), max_tokens=rng.randint(1, 24), **sampling)
        for index, prompt in enumerate(prompts(seed, num))
    ]


def run(subject: Engine, steps: int = 10_000) -> dict[tuple[str, int], Completion]:
    """Step until there is nothing to do; completions by request and choice."""
    found: dict[tuple[str, int], Completion] = {}
    for _ in range(steps):
        if not subject.has_work:
            break
        for event in subject.step():
            if isinstance(event, Completion):
                found[event.request_id, event.index] = event
    return found


def check_idle(subject: Engine) -> None:
    """Nothing is held by anyone."""
    check_pages(subject.allocator, [])
    stats = subject.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_pages) == (0, 0, stats.num_pages)


def check_greedy(model: Transformer, asked: Request, done: Completion) -> None:
    """Each token is the most probable one after those before it, by one forward pass without a cache.

    That is what `generate_naive` does token by token, at a fraction of its time.
    """
    assert done.error is None, done.error
    tokens = [*done.prompt, *done.tokens]
    logits_TV = logits_naive(model, tokens, subnets_by_position(tokens, len(done.prompt), asked.phases))
    assert tuple(logits_TV[len(done.prompt) - 1 : -1].argmax(-1).tolist()) == done.tokens


def full_routes(model: Transformer, tokens: Sequence[int], subnet: Subnet) -> np.ndarray:
    """Experts [T, L, K] that one whole forward pass chooses, sentinel 255, read off each layer's own router."""
    config = model.config
    ids_1T = torch.tensor([list(tokens)])
    routes_TLK = np.full((len(tokens), config.num_moe_layers, config.top_k), 255, np.uint8)
    chosen: dict[int, torch.Tensor] = {}

    def watch(row: int, original: Any) -> Any:
        def route(*arguments: Any) -> Any:
            routes, counts = original(*arguments)
            chosen[row] = routes.chosen_NK
            return routes, counts

        return route

    layers = [model.blocks[layer].mlp for layer in config.moe_layers]
    for row, layer in enumerate(layers):
        layer.route = watch(row, layer.route)  # type: ignore[method-assign]
    try:
        model.logits(ids_1T, subnet)
    finally:
        for layer in layers:
            del layer.__dict__["route"]
    for row, chosen_TK in chosen.items():
        routes_TLK[:, row, : chosen_TK.shape[1]] = chosen_TK.numpy()
    return routes_TLK
