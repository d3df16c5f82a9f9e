"""Rollout and trainer in one arithmetic: however the engine cuts its work up, the trainer's forward pass agrees."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.engine import Engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.learning.samples import signed_routes
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Context, Recorder, Replay, Transformer, build
from stretto.ops import exact
from stretto.ops.logprob import chosen_logprobs
from stretto.ops.matmul import Arithmetic
from tests.engine.engines import LATENT, SWITCHES

VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "num_experts": 8, "top_k": 3, "expert_intermediate_size": 12, "max_positions": 96, "dense_layers": (0,),
    "dense_intermediate_size": 20,
}  # fmt: skip
NETWORKS: dict[str, dict[str, Any]] = {
    "sigmoid": {"qk_norm": True, "widths": (8, 4), "num_shared_experts": 1, "routed_scaling": 1.7},
    "softmax": {"router": "softmax", "widths": (8, 4), "tie_embeddings": True, "attention_bias": True, "rotary_fraction": 0.5},
    **{name: SWITCHES[name] for name in ("biases", "sinks and windows", "wide norm, clip", "scale, groups")},
    **LATENT,
}  # fmt: skip
EXACT = [Arithmetic("fp32", True), Arithmetic("bf16", True), Arithmetic("fp8", True)]
PAIRS = [
    pytest.param(name, arithmetic, marks=() if arithmetic is EXACT[0] or name == "sigmoid" else pytest.mark.slow)
    for name in NETWORKS
    for arithmetic in EXACT
]
"""Every network in fp32, and one in every arithmetic; the other pairs are slow."""


@cache
def network(name: str) -> Transformer:
    model = build(ModelConfig(**{**SHAPE, **NETWORKS[name]}), seed=1).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for key, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        is_gain = key.endswith(("norm.weight", "_norm", "bias", "bias_WE", "sinks"))
        tensor.add_(0.2 * noise) if is_gain else tensor.mul_(2.5)
    return model


def engine(model: Transformer, arithmetic: Arithmetic, **options: Any) -> Engine:
    sizes = {"num_pages": 120, "page_size": 4, "max_batch": 8, "max_step_tokens": 24}
    config = EngineConfig(
        **{**sizes, "precision": arithmetic.precision, "batch_invariant": arithmetic.batch_invariant, **options}
    )
    return Engine(model, None, config)


def requests(config: ModelConfig, seed: int, num: int = 5) -> list[Request]:
    """Random prompts, half of which share a beginning with an earlier one, of several Subnets and temperatures."""
    rng = random.Random(seed)
    subnets = [config.full(), config.subnet(experts=4, top_k=2), config.subnet(depth=2)]
    prompts: list[tuple[int, ...]] = []
    for _ in range(num):
        shared = rng.choice(prompts)[:20] if prompts and rng.random() < 0.5 else ()
        prompts.append((*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 30)))))
    return [
        Request(
            f"r{index}", prompt,
            Sampling(temperature=rng.choice((1.0, 0.7)), seed=index, max_tokens=rng.randint(2, 20)),
            Phases(rng.choice(subnets)), want_routes=True,
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip


def trainer_log_probs(
    model: Transformer, tokens: list[int], subnet: Subnet, arithmetic: Arithmetic, temperature: float, before: int = 0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``tokens[1:]`` and routes, by one forward pass; ``before`` tokens of another document and some
    padding share the row, and another row the batch."""
    total = before + len(tokens) + 3
    ids_BT = torch.zeros(2, total, dtype=torch.int64)
    positions_BT, documents_BT = torch.zeros_like(ids_BT), torch.full_like(ids_BT, -1)
    place = slice(before, before + len(tokens))
    ids_BT[0, place], positions_BT[0, place], documents_BT[0, place] = (
        torch.tensor(tokens),
        torch.arange(len(tokens)),
        1,
    )
    ids_BT[0, :before], positions_BT[0, :before], documents_BT[0, :before] = 5, torch.arange(before), 0
    ids_BT[1], positions_BT[1], documents_BT[1] = 7, torch.arange(total), 0
    recorder = Recorder(model.config, ids_BT)
    ctx = Context(positions_BT, documents_BT, operators=arithmetic.operators, routing=recorder)
    output = model(ids_BT, subnet, ctx)
    hidden_TD, targets_T = output.hidden_BTD[0, place][:-1], torch.tensor(tokens[1:])
    logp_T, _ = chosen_logprobs(hidden_TD, model.head_VD, targets_T, temperature, operators=arithmetic.operators)
    return logp_T, recorder.own_BTLK[0, place]


@pytest.mark.parametrize(("name", "arithmetic"), PAIRS, ids=str)
def test_the_trainer_agrees_to_the_bit_with_whatever_the_engine_did(name: str, arithmetic: Arithmetic) -> None:
    """Decoding, chunked prefill, prefix hits, batches that change at every step: K3 is exactly 0, and no route differs."""
    model, rng = network(name), random.Random(3)
    subject = engine(model, arithmetic)
    asked = requests(model.config, seed=4)
    cached = 0
    for request, done in zip(asked, subject.generate(asked), strict=True):
        tokens = [*done.prompt, *done.tokens]
        cached += done.usage.cached_tokens
        logp_T, routes_TLK = trainer_log_probs(
            model, tokens, request.phases.answer, arithmetic, request.sampling.temperature, rng.randint(0, 9)
        )
        assert np.array_equal(logp_T[len(done.prompt) - 1 :].numpy(), done.logprobs)
        assert done.routes is not None and np.array_equal(signed_routes(done.routes), routes_TLK[:-1].numpy())
    assert cached, "no prompt came from the prefix cache, so that was not tried"


@pytest.mark.parametrize("arithmetic", EXACT, ids=str)
def test_one_by_one_without_a_cache_gives_the_same_bits(arithmetic: Arithmetic) -> None:
    model = network("sigmoid")
    asked = requests(model.config, seed=8, num=3)
    together = engine(model, arithmetic).generate(asked)
    alone = engine(model, arithmetic, prefix_cache=False, max_batch=1, max_step_tokens=5, page_size=7)
    for request, done in zip(asked, together, strict=True):
        (again,) = alone.generate([request])
        assert again.tokens == done.tokens and np.array_equal(again.logprobs, done.logprobs)


@pytest.mark.parametrize("arithmetic", [Arithmetic("bf16"), Arithmetic("fp8")], ids=str)
def test_without_invariance_the_sides_still_round_alike(arithmetic: Arithmetic) -> None:
    """With the engine's routes replayed nothing is left but sums in another order; fp32 instead is far off."""
    model = network("sigmoid")
    (done,) = engine(model, arithmetic).generate([requests(model.config, seed=1, num=1)[0]])
    tokens = torch.tensor([[*done.prompt, *done.tokens]])
    assert done.routes is not None
    routes_1TLK = torch.from_numpy(np.pad(signed_routes(done.routes), ((0, 1), (0, 0), (0, 0)), constant_values=-1))[
        None
    ]
    subnet = requests(model.config, seed=1, num=1)[0].phases.answer
    ctx = replace(Context.plain(tokens), routing=Replay(routes_1TLK))
    temperature = requests(model.config, seed=1, num=1)[0].sampling.temperature
    apart = []
    for own in (arithmetic, Arithmetic()):
        hidden_TD = model(tokens, subnet, replace(ctx, operators=own.operators)).hidden_BTD[0, :-1]
        logp_T, _ = chosen_logprobs(hidden_TD, model.head_VD, tokens[0, 1:], temperature, operators=own.operators)
        apart.append(float((logp_T[len(done.prompt) - 1 :] - torch.from_numpy(done.logprobs)).abs().mean()))
    assert apart[0] < 0.3 * apart[1], apart


def test_the_engine_says_what_runs() -> None:
    kernels = engine(network("sigmoid"), Arithmetic("fp8", True)).stats().kernels
    assert kernels["decode"] == "torch (batch-invariant)" and kernels["linear"].startswith("fp8: exact fp64 emulation")
    assert "linear" not in engine(network("sigmoid"), Arithmetic()).stats().kernels


def test_a_batch_invariant_engine_keeps_to_the_keys_that_its_attention_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "MAX_KEYS", 30)
    model, invariant = network("sigmoid"), Arithmetic("fp32", True)
    subject = engine(model, invariant)
    assert subject.max_len == subject.stats().max_len == 28, "whole pages of 4 tokens"
    phases = Phases(model.config.full())

    def of(num: int) -> Request:
        return Request(f"{num} tokens", (5,) * num, Sampling(max_tokens=40), phases)

    assert [len(done.tokens) for done in subject.generate([of(26), of(2)])] == [2, 26]
    with pytest.raises(UserError, match="prompt: 28 tokens leave no room"):
        subject.add(of(28))
    assert engine(model, invariant, max_len=28).max_len == 28 and engine(model, Arithmetic(), max_len=29).max_len == 29
    with pytest.raises(
        UserError, match="max_len: 29 tokens; batch-invariant attention takes 28 at most: lower it"
    ) as e:
        engine(model, invariant, max_len=29)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("arithmetic", [Arithmetic("bf16"), Arithmetic("fp8"), *EXACT], ids=str)
def test_every_arithmetic_trains_every_weight(arithmetic: Arithmetic) -> None:
    model = build(ModelConfig(**{**SHAPE, **NETWORKS["sigmoid"]}), seed=1)
    ids_BT = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    grads = []
    for own, recompute in ((arithmetic, False), (arithmetic, True), (Arithmetic(), False)):
        model.zero_grad()
        ctx = replace(Context.plain(ids_BT), operators=own.operators, recompute=recompute)
        output = model(ids_BT, model.config.full(), ctx)
        hidden_ND = output.hidden_BTD[:, :-1].flatten(0, 1)
        logp_N, _ = chosen_logprobs(hidden_ND, model.head_VD, ids_BT[:, 1:].flatten(), operators=own.operators)
        (-logp_N.mean()).backward()
        grads.append(
            torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        )
    assert torch.equal(grads[0], grads[1])
    similarity = torch.nn.functional.cosine_similarity(grads[0], grads[2], dim=0)
    assert similarity > (0.9999 if arithmetic.precision == "fp32" else 0.98), similarity
