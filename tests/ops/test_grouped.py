from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.ops.grouped import (
    Clamp,
    Experts,
    counted,
    gated_swiglu_backward,
    group_multiple,
    group_slots,
    grouped_swiglu,
    most_places,
    swiglu,
)

Close = Callable[[Tensor, Tensor, int], None]


def test_a_clamped_swiglu_written_out() -> None:
    """gate and up on both sides of the limit; the gate is cut from above alone."""
    clamp = Clamp(alpha=2.0, limit=1.5)
    for gate in (-4.0, -1.0, 0.3, 2.0):
        for up in (-3.0, 0.5, 1.6):
            g, u = min(gate, 1.5), max(-1.5, min(up, 1.5))
            expected = g / (1 + math.exp(-2.0 * g)) * (u + 1)
            both = torch.tensor([[gate, up]])
            assert swiglu(both, clamp).item() == pytest.approx(expected, rel=1e-6)


def test_only_bf16_on_a_cpu_is_filled_up() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert group_multiple(cpu, torch.float32, 1000) == group_multiple(gpu, torch.bfloat16, 1000) == 1
    assert [group_multiple(cpu, torch.bfloat16, mean) for mean in (1, 300, 10_000)] == [16, 32, 64]


def test_gates_of_slots_multiply_their_outputs(close: Close) -> None:
    torch.manual_seed(0)
    x, gates = torch.randn(6, 8), torch.randn(6)
    gate_up, down, ends = torch.randn(2, 8, 8), torch.randn(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
    plain = grouped_swiglu(x, ends, Experts(gate_up, down))
    close(grouped_swiglu(x, ends, Experts(gate_up, down), gates), plain * gates[:, None], 8)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=1, max_size=12))
def test_slots_are_a_stable_sort_and_its_inverse(choices: list[list[int]]) -> None:
    chosen = torch.tensor(choices)
    slots = group_slots(chosen, 5)
    flat = chosen.flatten().tolist()
    assert slots.order_P.tolist() == sorted(range(len(flat)), key=lambda slot: flat[slot])  # sorted() is stable
    assert slots.order_P[slots.place_S].tolist() == list(range(len(flat)))
    assert slots.token_P.tolist() == [slot // 2 for slot in slots.order_P.tolist()]
    assert slots.ends_E.tolist() == [sum(choice <= expert for choice in flat) for expert in range(5)]
    assert slots.ends_E.dtype == torch.int32
    filled = group_slots(chosen, 5, 4)
    assert filled.order_P[filled.place_S].tolist() == list(range(len(flat)))
    assert filled.order_P[filled.place_S.sort().values].tolist() == slots.order_P.tolist()
    counts = filled.ends_E.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    assert counts == [-(-flat.count(expert) // 4) * 4 for expert in range(5)]
    wide = group_slots(chosen, 5, 4, most_places(len(flat), 5, 4))
    assert len(wide.order_P) == len(flat) + 15
    assert torch.equal(wide.place_S, filled.place_S) and torch.equal(wide.ends_E, filled.ends_E)
    assert torch.equal(wide.order_P[: len(filled.order_P)], filled.order_P)
    assert counted(chosen, 6).tolist() == [flat.count(expert) for expert in range(6)]


@pytest.mark.parametrize("clamp", [None, Clamp(alpha=1.7, limit=0.5)])
def test_gradients_of_a_gated_swiglu_are_autograds(clamp: Clamp | None, close: Close) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_NF, gates_N = (torch.randn(shape, generator=generator, requires_grad=True) for shape in ((5, 8), (5,)))
    grad_NI, wanted_NI = torch.randn(5, 4, generator=generator), swiglu(hidden_NF, clamp) * gates_N[:, None]
    wanted = torch.autograd.grad(wanted_NI, (gates_N, hidden_NF), grad_NI)
    found = gated_swiglu_backward(grad_NI, gates_N.detach(), hidden_NF.detach(), clamp)
    for ours, theirs in zip(found, (wanted_NI, *wanted), strict=True):
        close(ours, theirs, 8)
