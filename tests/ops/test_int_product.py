"""The kernels of integer weights against products of integers in fp64.

Shape letters: N tokens, D inputs, F rows, J groups of 32 inputs.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from stretto.ops.int_weights import IntScheme, IntWeight, quantise
from stretto.ops.native import Panels
from tests.ops.conftest import Close

SCHEMES = {"int8": IntScheme(8), "int4": IntScheme(4), "int4 with zeros": IntScheme(4, zeros=True)}


def int_product(library: ctypes.CDLL, weight: Panels, x_ND: Tensor, num_rows: int) -> Tensor:
    """``x`` · ``weight``ᵀ [N, ``num_rows``] with the kernels of integer weights; tokens are quantised to 8 bits in groups. fp32."""
    y_NF = torch.empty(len(x_ND), num_rows)
    x_ND = x_ND.float().contiguous()
    record = weight.record()
    sizes = (ctypes.c_int32(len(x_ND)), ctypes.c_int32(x_ND.shape[1]), ctypes.c_int32(num_rows))
    library.stretto_int_product(
        ctypes.byref(record), ctypes.c_void_p(x_ND.data_ptr()), *sizes, ctypes.c_void_p(y_NF.data_ptr())
    )
    return y_NF


def reference(weight: IntWeight, x_ND: Tensor) -> Tensor:
    """Tokens quantised to 8 bits in groups of 32, times the dequantised weight, in fp64."""
    groups_NJ = x_ND.unflatten(-1, (-1, 32))
    largest_NJ1 = groups_NJ.abs().amax(-1, keepdim=True)
    codes = torch.where(largest_NJ1 > 0, groups_NJ * (127 / largest_NJ1), 0.0).round()
    return (codes.double() * (largest_NJ1 / 127)).flatten(-2) @ weight.dequantise().flatten(0, -2).double().mT


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(16, 32), (64, 96), (53, 320), (1, 64)])
def test_products_are_those_of_the_integers(
    library: ctypes.CDLL, scheme: IntScheme, num_rows: int, num_inputs: int, close: Close
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = quantise(torch.randn(num_rows, num_inputs, generator=generator), scheme)
    x_ND = torch.randn(9, num_inputs, generator=generator) * torch.logspace(-3, 3, 9)[:, None]
    x_ND[3, :32] = 0.0
    for num in range(1, 10):
        y_NF = int_product(library, Panels.of(weight), x_ND[:num], num_rows)
        for mine, meant in zip(y_NF, reference(weight, x_ND[:num]), strict=True):
            close(mine, meant.float(), num_inputs)
        # a token's result does not depend on the others, to the bit
        assert torch.equal(y_NF[0], int_product(library, Panels.of(weight), x_ND[:1], num_rows)[0])


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_codes_do_not_overflow(library: ctypes.CDLL, bits: int, close: Close) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    codes = torch.tensor([low, high]).repeat_interleave(8)[:, None].expand(16, 512).to(torch.int8).contiguous()
    weight = IntWeight(codes, torch.ones(16, 16, dtype=torch.float16), None, bits)
    for sign in (1.0, -1.0):
        x_ND = torch.full((2, 512), 127 * sign)
        close(int_product(library, Panels.of(weight), x_ND, 16), x_ND @ codes.float().mT, 512)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_has_no_finite_result(library: ctypes.CDLL, value: float) -> None:
    weight = quantise(torch.randn(16, 96, generator=torch.Generator().manual_seed(8)), IntScheme(8))
    x_ND = torch.ones(2, 96)
    x_ND[1, 40] = value
    y_NF = int_product(library, Panels.of(weight), x_ND, 16)
    assert y_NF[0].isfinite().all() and not y_NF[1].isfinite().any()


def test_every_fp16_scale_is_read(library: ctypes.CDLL) -> None:
    """Subnormal and negative ones, too."""
    scales = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    scales = scales[scales.isfinite()].reshape(-1, 1)
    weight = IntWeight(torch.ones(len(scales), 32, dtype=torch.int8), scales, None, 8)
    x_ND = torch.zeros(1, 32)
    x_ND[0, 5] = 127.0
    assert torch.equal(int_product(library, Panels.of(weight), x_ND, len(scales))[0], 127 * scales.flatten().float())


def test_panels_hold_rows_of_all_experts() -> None:
    weight = quantise(torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(7)), IntScheme(4))
    panels = Panels.of(weight)
    assert panels.codes_QJB.shape == (6, 2, 256) and panels.scales_QJ16.shape == (6, 2, 16)
    # the first byte of a row has inputs 0 and 4 of its group
    assert (
        int(panels.codes_QJB[5, 1, 4 * 9])
        == (int(weight.codes[2, 25, 32]) + 8) | (int(weight.codes[2, 25, 36]) + 8) << 4
    )
    assert torch.equal(panels.scales_QJ16[5, 1], weight.scales[2, 16:, 1])
