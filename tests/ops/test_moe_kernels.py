"""The Triton kernels, interpreted on the CPU in fp32 and bf16, against the reference."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from stretto.ops import fp8_rows, kernels, moe
from stretto.ops.grouped import Clamp, ExpertBiases, Experts
from stretto.ops.moe import experts
from tests.ops.references import experts_reference

HIDDEN, WIDTH, NUM_EXPERTS = 32, 48, 5
RAGGED = torch.rand(37, NUM_EXPERTS, generator=torch.Generator().manual_seed(0)).topk(3).indices
CHOICES = {
    "ragged": RAGGED,
    "empty experts": torch.tensor([[4, 1]] * 19),
    "one expert takes all": torch.full((35, 1), 2),
    "an expert twice": torch.tensor([[2, 2], [0, 2]]),
    "whole tiles": torch.arange(NUM_EXPERTS).repeat(16)[:, None],
}


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(moe, "backend_for", lambda x_ND, weights: "triton")


def _inputs(chosen_NK: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """With a gate of 0, as a choice has that a rollout's routes do not have."""
    generator, num = torch.Generator().manual_seed(1), len(chosen_NK)
    x_ND = torch.randn(num, HIDDEN, generator=generator).to(dtype)
    gates_NK = torch.rand(chosen_NK.shape, generator=generator)
    gates_NK[1, -1] = 0.0
    gate_up_EFD = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, generator=generator).mul_(HIDDEN**-0.5).to(dtype)
    down_EDI = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, generator=generator).mul_(WIDTH**-0.5).to(dtype)
    return [each.requires_grad_() for each in (x_ND, gates_NK, gate_up_EFD, down_EDI)]


def _results(compute: object, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    y_ND = compute(*inputs)
    return [y_ND.detach(), *torch.autograd.grad(y_ND, inputs, upstream.to(y_ND.dtype))]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CHOICES), ("ragged", torch.bfloat16)])
def test_outputs_and_gradients(name: str, dtype: torch.dtype, on_triton: None) -> None:
    """Against the reference in fp64, an error of a few roundings: of each element in bf16, of sums of up to 48 terms in fp32."""
    chosen_NK = CHOICES[name]
    inputs = _inputs(chosen_NK, dtype)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    upstream = torch.randn(len(chosen_NK), HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = _results(lambda x, gates, *weights: experts(x, chosen_NK, gates, Experts(*weights)), inputs, upstream)
    wanted = _results(lambda x, gates, *weights: experts_reference(x, chosen_NK, gates, *weights), exact, upstream)
    for ours, theirs, given in zip(found, wanted, (inputs[0], *inputs), strict=True):
        assert ours.dtype == given.dtype
        error = float((ours.double() - theirs).norm() / theirs.norm())
        assert error <= 8 * torch.finfo(dtype).eps, f"{error:.2e}"


@pytest.mark.slow
def test_fp8_products_are_those_of_the_same_rows_by_torch() -> None:
    """Both backends quantise the same rows and matrices; they round what is between the products at other places."""
    pytest.importorskip("triton", reason="Triton is not installed")
    assert fp8_rows.BACKENDS is moe.BACKENDS
    inputs = _inputs(RAGGED, torch.bfloat16)
    upstream = torch.randn(len(RAGGED), HIDDEN, generator=torch.Generator().manual_seed(2))

    def compute(backend: str, x: Tensor, gates: Tensor, *weights: Tensor) -> Tensor:
        return experts(x, RAGGED, gates, Experts(*weights), backend=backend)

    by_kernels, by_torch, exact = (
        _results(partial(compute, backend), inputs, upstream) for backend in ("triton-fp8", "fp8", "torch")
    )
    for name, ours, theirs, wanted in zip(
        ("y", "x", "gates", "gate-up", "down"), by_kernels, by_torch, exact, strict=True
    ):
        error, rounding = (float((ours.double() - other).norm() / wanted.double().norm()) for other in (theirs, wanted))
        assert error < 0.5 * rounding < 0.05, f"{name}: {error:.4f}, {rounding:.4f}"


@pytest.mark.slow
def test_frozen_inputs_cost_nothing(on_triton: None) -> None:
    x, gates, gate_up, down = _inputs(RAGGED, torch.float32)
    y = experts(x.detach(), RAGGED, gates, Experts(gate_up.detach(), down.detach()))
    (grad,) = torch.autograd.grad(y.sum(), gates)
    (wanted,) = torch.autograd.grad(experts_reference(x, RAGGED, gates, gate_up, down).sum(), gates)
    assert torch.allclose(grad, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_no_tokens(on_triton: None) -> None:
    """A rank of expert parallelism may get none."""
    chosen_NK = RAGGED[:0]
    x, gates, *weights = _inputs(RAGGED, torch.float32)
    inputs = [x.detach()[:0].requires_grad_(), gates.detach()[:0].requires_grad_(), *weights]
    y_ND, *grads = _results(lambda x, gates, *weights: experts(x, chosen_NK, gates, Experts(*weights)), inputs, x[:0])
    assert y_ND.shape == (0, HIDDEN) and [grad.shape for grad in grads] == [each.shape for each in inputs]
    assert not any(grad.any() for grad in grads)


@pytest.mark.slow
def test_the_same_bits_every_time(on_triton: None) -> None:
    """The order of a token's neighbours changes no bit of it, nor does a second run."""
    x, gates, gate_up, down = _inputs(RAGGED, torch.bfloat16)
    once, again, reversed_ = (
        experts(x[order], RAGGED[order], gates[order], Experts(gate_up, down))
        for order in (torch.arange(37), torch.arange(37), torch.arange(36, -1, -1))
    )
    assert torch.equal(once, again) and torch.equal(once, reversed_.flip(0))


def test_what_the_kernels_do_not_compute() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    gate_up, down, cpu = torch.zeros(2, 128, 64), torch.zeros(2, 64, 64), torch.device("cpu")
    biases = ExpertBiases(torch.zeros(2, 128), torch.zeros(2, 64))
    assert moe.why_no_kernels(cpu, Experts(gate_up, down)) == ""  # interpreted
    assert "biases" in moe.why_no_kernels(cpu, Experts(gate_up, down, biases))
    assert "clamp" in moe.why_no_kernels(cpu, Experts(gate_up, down, None, Clamp(1.7, 7.0)))
    assert "64 x 48" in moe.why_no_kernels(cpu, Experts(gate_up, torch.zeros(2, 64, 48)))
    assert moe.backend_for(SimpleNamespace(is_cuda=True), Experts(gate_up, down)) == "torch", "products in fp32"


def test_without_triton_torch_computes_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moe._say.cache_clear()
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    matrices = (torch.zeros(*size, dtype=torch.bfloat16) for size in ((2, 128, 64), (2, 64, 64)))
    weights, x = Experts(*matrices), SimpleNamespace(is_cuda=True, device="cuda")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert moe.backend_for(x, weights) == "torch"
    (record,) = caplog.records
    assert "Triton is missing" in record.getMessage()
