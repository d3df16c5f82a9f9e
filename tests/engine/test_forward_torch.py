"""The paged forward pass: whatever a step is made of, its logits and routes are the model's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.common.naive_engine import generate_naive, logits_naive, subnets_by_position
from stretto.engine.request import Phases, Sampling
from stretto.engine.runner import Runner
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Context, MoeLayer, Transformer, build
from stretto.ops.native import load
from tests.engine.engines import LATENT, SWITCHES

TABLE = SubnetTable()
PAGE = 4
VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "num_experts": 8, "top_k": 3, "expert_intermediate_size": 12, "max_positions": 64,
}  # fmt: skip
NETWORKS: dict[str, dict[str, Any]] = {
    "sigmoid, branches": {"qk_norm": True, "widths": (8, 4), "num_shared_experts": 1, "dense_layers": (1,), "dense_intermediate_size": 20},
    "softmax, no bias": {"router": "softmax", "selection_bias": False, "tie_embeddings": True, "attention_bias": True},
    "softmax with bias": {"router": "softmax", "widths": (8, 4), "routed_scaling": 1.7, "rotary_fraction": 0.5},
    "uneven layers": {"experts_per_layer": (8, 3, 5, 2), "top_k_per_layer": (3, 2, 1, 2), "normalize_gates": False, "qk_norm": True},
    "many heads to one": {"num_kv_heads": 1, "attention_bias": True, "qk_norm": True, "rotary_fraction": 0.5},
    "a head each": {"num_kv_heads": 4, "selection_bias": False},
    "all dense": {"dense_layers": (0, 1, 2, 3), "dense_intermediate_size": 20},
    **SWITCHES,
    **LATENT,
}  # fmt: skip


@cache
def network(name: str) -> Transformer:
    return with_noise(build(ModelConfig(**{**SHAPE, **NETWORKS[name]}), seed=1))


def with_noise(model: Transformer) -> Transformer:
    """Every tensor matters: norms are not one, biases are not zero, routes are uneven."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if key.endswith(("norm.weight", "_norm")):
                tensor.add_(0.3 * noise)
            elif key.endswith(("bias", "bias_WE")):
                tensor.add_(0.1 * noise)
            elif key.endswith("sinks"):
                tensor.add_(noise)
            else:
                tensor.mul_(2.5)
    return model


def runner(model: Transformer, num_pages: int = 64) -> Runner:
    return Runner(model, TABLE, num_pages=num_pages, page_size=PAGE, routes=True)


def subnets(config: ModelConfig) -> list[Subnet]:
    """Full, every axis alone, several at once."""
    least = min(config.top_k_by_layer, default=1)
    few = min(config.experts_by_layer, default=1)
    made = [config.full(), config.subnet(depth=3), config.subnet(depth=1), config.subnet(top_k=min(2, least))]
    if config.num_moe_layers:
        made += [config.subnet(experts=few, top_k=1), config.subnet(depth=2, experts=few, top_k=min(2, least))]
        made.append(config.subnet(depth=3, experts=few, top_k=1))
    return made


@dataclass
class Sequence:
    """A sequence that a test feeds through the runner."""

    tokens: list[int]
    subnet: Subnet
    pages: list[int]
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)

    def chunk(self, num: int) -> Chunk:
        num = min(num, len(self.tokens) - self.done)
        end = self.done + num
        pages = tuple(self.pages[: -(-end // PAGE)])
        made = Chunk(tuple(self.tokens[self.done : end]), self.done, pages, TABLE.number(self.subnet), num)
        self.done = end
        return made


def sequences(config: ModelConfig, rng: random.Random, num: int, num_pages: int = 64) -> list[Sequence]:
    pages = list(range(num_pages))
    rng.shuffle(pages)
    made, choices = [], subnets(config)
    for _ in range(num):
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        made.append(Sequence(tokens, rng.choice(choices), [pages.pop() for _ in range(8)]))
    return made


def steps(made: list[Sequence], rng: random.Random, largest: int) -> Iterator[list[Sequence]]:
    while waiting := [sequence for sequence in made if sequence.done < len(sequence.tokens)]:
        yield rng.sample(waiting, rng.randint(1, min(largest, len(waiting))))


def run(engine: Runner, made: list[Sequence], rng: random.Random, chunk: int = 12, want_routes: bool = True) -> None:
    """Compute all of ``made`` in steps of random composition and random chunks."""
    for members in steps(made, rng, len(made)):
        chunks = [member.chunk(rng.choice((1, 1, 2, 3, chunk))) for member in members]
        logits_MV = engine.forward(chunks, want_routes)
        assert logits_MV.dtype == torch.float32
        for member, rows in zip(members, logits_MV.split([len(part.tokens) for part in chunks]), strict=True):
            member.logits.append(rows)


ROUNDINGS = 64
"""Ours and the model's add some ten sums a layer in another order and with other kernels, and the errors of four layers add up: 32 of
each. Against fp64 both were up to 49 away, most of it in common."""


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest difference in roundings of the largest logit; `ROUNDINGS` of them pass."""
    scale = torch.finfo(torch.float32).eps * float(expected.abs().max())
    return float((actual - expected).abs().max()) / scale


def model_logits(model: Transformer, tokens: list[int], subnet: Subnet) -> Tensor:
    with torch.inference_mode():
        return model.logits(torch.tensor([tokens]), subnet)[0]


def model_routes(model: Transformer, tokens: list[int], subnet: Subnet) -> np.ndarray:
    """[T, L, K] as `MoeLayer.route` chooses, caught while the model runs."""
    config, caught = model.config, {}
    handles = []
    for row, layer in enumerate(config.moe_layers):

        def catch(moe: MoeLayer, args: tuple[Any, ...], row: int = row) -> None:
            caught[row] = moe.route(*args)[0].chosen_NK.numpy()

        handles.append(model.blocks[layer].mlp.register_forward_pre_hook(catch))
    with torch.inference_mode():
        model(torch.tensor([tokens]), subnet, Context.plain(torch.tensor([tokens])))
    for handle in handles:
        handle.remove()
    routes = np.full((len(tokens), config.num_moe_layers, max(config.top_k, *config.top_k_by_layer, 0)), 255, np.uint8)
    for row, chosen_NK in caught.items():
        routes[:, row, : chosen_NK.shape[1]] = chosen_NK
    return routes


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=4)
@given(seed=st.integers(0, 1 << 30))
def test_any_step_gives_the_models_logits_and_routes(name: str, seed: int) -> None:
    model, rng = network(name), random.Random(seed)
    engine, made = runner(model), sequences(model.config, rng, rng.randint(1, 8))
    run(engine, made, rng)
    for sequence in made:
        expected = model_logits(model, sequence.tokens, sequence.subnet)
        assert distance(torch.cat(sequence.logits), expected) <= ROUNDINGS, sequence.subnet.label()
        routes = engine.read_routes(sequence.pages, 0, len(sequence.tokens))
        if model.config.num_moe_layers:
            np.testing.assert_array_equal(routes, model_routes(model, sequence.tokens, sequence.subnet))


@pytest.mark.parametrize("name", [*SWITCHES, *LATENT])
def test_bfloat16_is_as_near_as_its_roundings_allow(name: str) -> None:
    """Networks whose tokens use all experts: a route that flips by a rounding would say nothing."""
    own = NETWORKS[name]
    switches = {**own, "top_k": 8, "top_groups": own.get("expert_groups", 1), "expert_intermediate_size": 16}
    wide = with_noise(build(ModelConfig(**{**SHAPE, **switches}), seed=1))
    half = Transformer(wide.config)
    half.load_state_dict(wide.state_dict())
    half = half.to(torch.bfloat16)
    wide.load_state_dict(half.state_dict())
    engine, made = runner(half), sequences(wide.config, random.Random(1), 4)
    for sequence in made:
        sequence.subnet = wide.config.full()
    run(engine, made, random.Random(2), want_routes=False)
    for sequence in made:
        expected = model_logits(wide, sequence.tokens, sequence.subnet)
        actual = torch.cat(sequence.logits)
        # some ten roundings a layer, of half of bf16's 2^-7 at most, add up at random to their root in number
        error = float((actual - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
        assert error < 40**0.5 * 2**-8, error


@pytest.mark.parametrize("name", ["sigmoid, branches", "softmax, no bias"])
@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_chunks_of_one_size_give_the_models_logits(name: str, size: int) -> None:
    model = network(name)
    engine, sequence = runner(model), sequences(model.config, random.Random(3), 1)[0]
    sequence.tokens = [token % VOCAB for token in range(5, 34)]
    parts = []
    while sequence.done < len(sequence.tokens):
        parts.append(engine.forward([sequence.chunk(size)], False))
    expected = model_logits(model, sequence.tokens, sequence.subnet)
    assert distance(torch.cat(parts), expected) <= ROUNDINGS


def test_many_chunks_of_very_different_lengths_decode_together() -> None:
    """Long and short sequences attend in groups of their own."""
    model, rng = network("sigmoid, branches"), random.Random(5)
    engine, made = runner(model, 256), sequences(model.config, rng, 12, 256)
    for sequence, length in zip(made, [1, 2, 3, 60, 4, 61, 33, 5, 2, 1, 17, 8], strict=True):
        sequence.tokens = [rng.randrange(VOCAB) for _ in range(length)]
    spare = iter(range(256))
    for sequence in made:
        sequence.pages = [next(spare) for _ in range(16)]
        while sequence.done < len(sequence.tokens) - 1:
            engine.forward([sequence.chunk(len(sequence.tokens) - 1)], False)
    logits_MV = engine.forward([sequence.chunk(1) for sequence in made], False)
    for sequence, row in zip(made, logits_MV, strict=True):
        assert distance(row, model_logits(model, sequence.tokens, sequence.subnet)[-1]) <= ROUNDINGS


@pytest.mark.parametrize("name", ["sigmoid, branches", "softmax with bias"])
def test_compiled_and_torch_steps_share_a_cache(name: str) -> None:
    """Short steps through the compiled kernels, long ones through torch, on the same pages."""
    library = load()
    if library.handle is None:
        pytest.skip(library.reason)
    model, rng = network(name), random.Random(7)
    engine = Runner(model, TABLE, num_pages=64, page_size=PAGE, routes=True, library=library, max_native_tokens=6)
    made = sequences(model.config, rng, 6)
    run(engine, made, rng)
    for sequence in made:
        expected = model_logits(model, sequence.tokens, sequence.subnet)
        assert distance(torch.cat(sequence.logits), expected) <= ROUNDINGS
        routes = engine.read_routes(sequence.pages, 0, len(sequence.tokens))
        np.testing.assert_array_equal(routes, model_routes(model, sequence.tokens, sequence.subnet))


def test_phases_read_the_cache_of_larger_ones() -> None:
    """Prompt, thinking and answer each under a Subnet of its own, equal to a pass in which skipped tokens do not exist."""
    model = network("sigmoid, branches")
    config = model.config
    phases = Phases(config.subnet(depth=2, experts=4, top_k=2), config.full(), config.subnet(depth=3), thinking_end=7)
    tokens = [3, 9, 27, 20, 7, 11, 12, 7, 30, 31, 7, 1, 2]
    by_position = subnets_by_position(tokens, 5, phases)
    assert [len(subnet.layers) for subnet in by_position] == [4] * 5 + [3] * 3 + [2] * 5
    engine, pages = runner(model), tuple(range(10, 14))
    parts = []
    for start, end in ((0, 3), (3, 5), (5, 6), (6, 8), (8, 9), (9, 13)):
        subnet = TABLE.number(by_position[start])
        chunk = Chunk(tuple(tokens[start:end]), start, pages[: -(-end // PAGE)], subnet, end - start)
        parts.append(engine.forward([chunk], False))
    with torch.inference_mode():
        expected = logits_naive(model, tokens, by_position)
    assert distance(torch.cat(parts), expected) <= ROUNDINGS
    full = model_logits(model, tokens, config.full())
    assert distance(full[:5], expected[:5]) <= ROUNDINGS
    assert distance(full[5:], expected[5:]) > 1e4


def test_naive_generation_is_greedy_and_stops() -> None:
    model = network("softmax with bias")
    result = generate_naive(model, [5, 6], Sampling(temperature=0, max_tokens=6), model.config.full())
    tokens = [5, 6]
    for token, logprob in zip(result.tokens, result.logprobs, strict=True):
        logp_V = model_logits(model, tokens, model.config.full())[-1].log_softmax(-1)
        assert token == int(logp_V.argmax())
        assert logprob == pytest.approx(float(logp_V.max()), abs=1e-5)
        tokens.append(token)
    stop = result.tokens[2]
    sampling = Sampling(temperature=0, max_tokens=6, stop_ids=(stop,))
    first = result.tokens.index(stop)
    assert generate_naive(model, [5, 6], sampling, model.config.full()).tokens == result.tokens[: first + 1]
