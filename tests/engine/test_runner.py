"""The runner: pools, routes and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stretto.base.errors import UserError
from stretto.engine.forward_torch import KvPool
from stretto.engine.request import EngineConfig
from stretto.engine.runner import Runner, pages_within
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Transformer
from stretto.ops.fp8_rows import Fp8Weights
from stretto.ops.matmul import Arithmetic
from tests.networks import sharpened

SHAPE: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "num_experts": 6, "top_k": 3, "expert_intermediate_size": 8, "max_positions": 32, "qk_norm": True,
}  # fmt: skip
FP8 = {"hidden_size": 32, "expert_intermediate_size": 16, "num_heads": 4}
"""Changes after which FP8 multiplies every matrix: its widths are multiples of 16."""
TOKENS = (5, 6, 7, 8, 9, 10, 11)
TABLE = SubnetTable()
ROUNDING = 4e-5
"""32 roundings of logits that reach 10, in fp32; see test_forward."""


def network(seed: int = 0, **changes: Any) -> Transformer:
    return sharpened(ModelConfig(**{**SHAPE, **changes}), seed, 2.5)


def runner(model: Transformer, routes: bool = True) -> Runner:
    return Runner(model, TABLE, num_pages=8, page_size=4, routes=routes)


def chunk(model: Transformer, tokens: tuple[int, ...] = TOKENS, start: int = 0, subnet: Subnet | None = None) -> Chunk:
    return Chunk(tokens, start, (3, 1, 6, 2), TABLE.number(subnet or model.config.full()), len(tokens))


def expected(model: Transformer, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(torch.tensor([tokens]))[0]


def test_a_page_takes_what_the_pool_allocates() -> None:
    for num_experts, routes in ((6, True), (300, True), (6, False)):
        config = ModelConfig(**{**SHAPE, "num_experts": num_experts})
        pool = KvPool.allocate(config, 5, 4, torch.bfloat16, torch.device("cpu"), routes)
        tensors = [tensor for tensor in (pool.keys_LPZGC, pool.values_LPZGC, pool.routes_PZLK) if tensor is not None]
        assert sum(tensor.nbytes for tensor in tensors) == 5 * KvPool.bytes_per_page(config, torch.bfloat16, 4, routes)


def test_positions_can_be_computed_again() -> None:
    """New keys and values take the place of the old ones, and later tokens see the new ones only."""
    model = network()
    engine = runner(model)
    engine.forward([chunk(model)], True)
    engine.forward([chunk(model, (20, 21, 22), 3, model.config.subnet(depth=2, top_k=1))], True)
    final = (*TOKENS[:3], 12, 13, 14, 15)
    logits_MV = engine.forward([chunk(model, final[2:], 2)], True)
    assert (logits_MV - expected(model, final)[2:]).abs().max() <= ROUNDING
    fresh = runner(model)
    fresh.forward([chunk(model, final)], True)
    np.testing.assert_array_equal(engine.read_routes((3, 1, 6, 2), 0, 7), fresh.read_routes((3, 1, 6, 2), 0, 7))


def test_logits_come_in_the_order_of_the_chunks_and_only_where_wanted() -> None:
    model = network()
    engine, full = runner(model), TABLE.number(model.config.full())
    chunks = [
        Chunk(TOKENS, 0, (0, 1), full, 2),
        Chunk((3,), 0, (2,), full, 1),
        Chunk(TOKENS[:5], 0, (3, 4), full, 0),
        Chunk(TOKENS[:2], 0, (5,), full, 1),
    ]
    logits_MV = engine.forward(chunks, False)
    wanted = torch.cat((expected(model, TOKENS)[-2:], expected(model, (3,))[-1:], expected(model, TOKENS[:2])[-1:]))
    assert (logits_MV - wanted).abs().max() <= ROUNDING
    assert engine.forward([chunks[2]], False).shape == (0, 31)


def test_routes_of_skipped_layers_and_of_absent_choices_are_the_sentinel() -> None:
    model = network(num_experts=300)
    engine, subnet = runner(model), model.config.subnet(depth=2, top_k=2)
    pages = (3, 1, 6, 2)
    assert engine.read_routes(pages, 0, 2).dtype == np.uint16
    engine.forward([chunk(model, TOKENS[:4]), Chunk((9, 9), 0, (0,), TABLE.number(subnet), 1)], True)
    full, small = engine.read_routes(pages, 0, 4), engine.read_routes((0,), 0, 2)
    assert full.shape == (4, 3, 3)
    assert full.max() < 300
    (skipped,) = {0, 1, 2} - set(subnet.layers)
    assert (small[:, skipped] == 65535).all()
    assert (small[:, :, 2] == 65535).all()
    assert (small[:, list(subnet.layers), :2] < 300).all()
    assert (engine.read_routes(pages, 4, 6) == 65535).all()


def test_routes_not_wanted_leave_the_pool_alone() -> None:
    model = network()
    engine = runner(model)
    engine.forward([chunk(model)], False)
    assert (engine.read_routes((3, 1, 6, 2), 0, 7) == 255).all()
    assert runner(model, routes=False).pool.routes_PZLK is None


def test_loaded_weights_serve_at_once() -> None:
    model, other = network(num_branches=2), network(1, num_branches=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in other.blocks:
            block.mlp.bias_WE.normal_(generator=generator)
            block.attention.q_norm.normal_(generator=generator)
    engine = runner(model)
    engine.forward([chunk(model)], False)
    place = model.embedding.weight.data_ptr()
    engine.load_weights(other.state_dict())
    assert model.embedding.weight.data_ptr() == place
    logits_MV = engine.forward([chunk(model)], False)
    assert torch.equal(logits_MV, runner(other).forward([chunk(other)], False))
    assert (logits_MV - expected(other, TOKENS)).abs().max() <= ROUNDING


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda state: state.pop("blocks.1.mlp.gate"), "missing"),
        (lambda state: state.update({"blocks.9.mlp.gate": torch.zeros(1)}), "no such tensor"),
        (lambda state: state.update({"norm.weight": torch.zeros(5)}), "shape"),
    ],
)
def test_wrong_weights_are_refused_and_change_nothing(damage: Any, problem: str) -> None:
    model, state = network(), dict(network(1).state_dict())
    engine = runner(model)
    before = engine.forward([chunk(model)], False)
    damage(state)
    with pytest.raises(UserError, match=f"^weights: .*{problem}.*; "):
        engine.load_weights(state)
    assert torch.equal(engine.forward([chunk(model)], False), before)


def test_an_fp8_runner_multiplies_by_rounded_weights_and_rounds_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are kernels, which a CPU has not: their steps are tested in test_graphs.py."""
    kernels = "stretto.engine.runner.has_fp8_kernels"
    monkeypatch.setattr(kernels, lambda config, device, arithmetic: arithmetic.precision == "fp8")
    fp8, other, sizes = Arithmetic("fp8"), network(1, **FP8), {"num_pages": 8, "page_size": 4, "routes": True}
    monkeypatch.setattr("stretto.engine.runner.free_bytes", lambda device: 60_000)
    some, fewer = (pages_within(network(**FP8), EngineConfig(precision=each), 32, True) for each in ("fp32", "fp8"))
    assert 0 < fewer < some
    engine = Runner(model := network(**FP8), TABLE, arithmetic=fp8, **sizes)
    for weights in (network(**FP8), other):
        if weights is other:
            engine.load_weights(weights.state_dict())
        exact = expected(weights, TOKENS)
        Fp8Weights(weights.blocks, "blocks.")
        seen, wanted = engine.forward([chunk(model)], False), expected(weights, TOKENS)
        assert (seen - wanted).abs().max() <= 10 * ROUNDING < (exact - wanted).abs().max()
    assert engine.kernels["weights"] == "FP8 with one scale per output, their values in bf16"
