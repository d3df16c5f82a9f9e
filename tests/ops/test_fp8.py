"""The FP8 quantiser and its product: to the bit what they say, and close to what they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.ops import fp8
from stretto.ops.fp8 import linear, product_reference, quantise_rows, quantise_weight


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.floats(1e-20, 1e20), st.integers(0, 99))
def test_a_weight_is_within_half_a_step_and_quantises_to_itself(rows: int, inner: int, size: float, seed: int) -> None:
    weight_FD = rand(rows, inner, seed=seed) * size
    once = quantise_weight(weight_FD)
    values_FD = once.dequantise()
    # E4M3 has three bits after the leading one; below 2^-6 of it steps are 2^-9
    scale_FD = once.scale_IJ.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :inner]
    bound_FD = torch.maximum(weight_FD.abs() * 2**-4, scale_FD * 2**-10)
    assert ((values_FD - weight_FD).abs() <= bound_FD * 1.00001).all()
    twice = quantise_weight(values_FD)
    assert torch.equal(twice.bytes_FD.view(torch.uint8), once.bytes_FD.view(torch.uint8))
    assert torch.equal(twice.scale_IJ, once.scale_IJ)
    assert torch.equal(twice.bytes_FD.view(torch.uint8), once.bytes_FD.view(torch.uint8))


def test_each_block_has_a_scale_of_its_own_from_its_largest_entry() -> None:
    weight_FD = rand(256, 200)
    weight_FD[130, 5] = 1e4
    scale_IJ = quantise_weight(weight_FD).scale_IJ
    assert scale_IJ.shape == (2, 2) and scale_IJ[1, 0] == torch.tensor(1e4) / 448
    assert scale_IJ[0, 1] == weight_FD[:128, 128:].abs().max() / 448
    x_ND = rand(3, 200, seed=1)
    rows = quantise_rows(x_ND)
    assert torch.equal(rows.scale_NJ[:, 1], x_ND[:, 128:].abs().amax(1) / 448)
    assert rows.bytes_ND.float().abs().amax() == 448
    nothing = quantise_rows(torch.zeros(2, 128))
    assert torch.equal(nothing.dequantise(), torch.zeros(2, 128))
    tiny = torch.zeros(128, 128)
    tiny[3, 5] = 1e-44
    for quantised in (quantise_rows(tiny), quantise_weight(tiny)):
        assert torch.equal(quantised.dequantise(), torch.zeros(128, 128)), "a scale of 0 would make NaN of the zeros"


def test_the_emulation_is_the_product_of_the_dequantised_operands() -> None:
    x, weight = quantise_rows(rand(20, 400)), quantise_weight(rand(150, 400, seed=1))
    true_NF = x.dequantise().double() @ weight.dequantise().double().T
    size_NF = x.dequantise().abs().double() @ weight.dequantise().abs().double().T
    # four blocks, each rounded when cast, scaled and added; scales rounded once
    assert ((product_reference(x, weight).double() - true_NF).abs() <= 16 * 2**-24 * size_NF).all()
    assert torch.equal(product_reference(x, weight.widened()), product_reference(x, weight))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(0, 99), st.integers(1, 2))
def test_a_row_is_the_same_alone_and_in_any_batch(rows: int, seed: int, threads: int) -> None:
    x_ND, weight = rand(rows, 300, seed=seed), quantise_weight(rand(40, 300, seed=1))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    whole_NF = linear(x_ND, weight)
    assert torch.equal(linear(x_ND[order], weight), whole_NF[order])
    for row in range(0, rows, 9):
        assert torch.equal(linear(x_ND[row : row + 1], weight), whole_NF[row : row + 1])
    torch.set_num_threads(before)


def test_the_sum_of_a_block_is_exact_whatever_its_order() -> None:
    """Terms of the most and the least size together, which no fp32 sum would keep."""
    x_ND = torch.zeros(1, 128)
    x_ND[0, 0], x_ND[0, 1:] = 448.0, 2**-9
    weight_FD = x_ND.clone()
    x, weight = quantise_rows(x_ND), quantise_weight(weight_FD)
    wide = x.bytes_ND.double() @ weight.bytes_FD.double().T
    assert wide.item() == 448.0**2 + 127 * 2**-18
    order = torch.randperm(128)
    assert (x.bytes_ND.double()[:, order] @ weight.bytes_FD.double()[:, order].T).item() == wide.item()


def test_gradients_are_products_of_quantised_operands() -> None:
    x_ND, weight_FD = rand(30, 200).requires_grad_(), rand(140, 200, seed=1).requires_grad_()
    upstream_NF = rand(30, 140, seed=2)
    y_NF = linear(x_ND, weight_FD)
    y_NF.backward(upstream_NF)
    assert torch.equal(y_NF, linear(x_ND.detach(), quantise_weight(weight_FD)))
    assert x_ND.grad is not None and weight_FD.grad is not None
    quantised = quantise_weight(weight_FD.detach()).dequantise()
    assert torch.allclose(x_ND.grad, quantise_rows(upstream_NF).dequantise() @ quantised, rtol=1e-4, atol=1e-4)
    assert torch.allclose(
        weight_FD.grad, upstream_NF.T @ quantise_rows(x_ND.detach()).dequantise(), rtol=1e-4, atol=1e-4
    )
    # and near those of full precision: two operands, each off by up to 2^-4 of an entry, at random
    assert torch.nn.functional.cosine_similarity(x_ND.grad, upstream_NF @ weight_FD.detach(), dim=-1).min() > 0.99


def test_what_runs_is_said() -> None:
    assert fp8.why_emulated(torch.zeros(128, 128), False) == "on cpu"


@pytest.mark.skipif(
    not torch.cuda.is_available() or bool(fp8.why_emulated(torch.zeros(128, 128, device="cuda"), False)),
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize("shape", [(1, 128, 128), (37, 256, 384), (300, 640, 1024)])
def test_the_gpu_kernel_computes_what_the_emulation_does(shape: tuple[int, int, int]) -> None:
    rows, outputs, inner = shape
    x, weight = quantise_rows(rand(rows, inner).cuda()), quantise_weight(rand(outputs, inner, seed=1).cuda())
    expected_NF = product_reference(x, weight)
    error = (fp8.product_hopper(x, weight) - expected_NF).abs()
    # bf16 results, and sums that tensor cores keep to some 13 bits between promotions
    assert (error <= 2**-8 * expected_NF.abs() + 2**-10 * expected_NF.abs().max()).all()
