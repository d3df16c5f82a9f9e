"""Integer weights: codes, scales and zeros against their definitions, and the packed form against loops over bits."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from stretto.base.errors import UserError
from stretto.ops.int_weights import IntScheme, check_group, pack, quantise, unpack

WEIGHT = torch.randn(3, 20, 96, generator=torch.Generator().manual_seed(0)) * 0.02
SCHEMES = [IntScheme(8), IntScheme(4), IntScheme(4, zeros=True), IntScheme(4, group=16), IntScheme(8, group=48)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=IntScheme.label)
def test_a_value_is_at_most_half_a_step_from_its_weight(scheme: IntScheme) -> None:
    weight = quantise(WEIGHT, scheme)
    step = weight.scales.float().abs().repeat_interleave(scheme.group, -1)
    # 4 bits without zeros reach from −8 to 7: a value as large as the largest, with the other sign, is a step away; a range with zeros
    # is rounded to a whole number of steps
    room = 1.0 if scheme.bits == 4 else 0.5
    assert ((weight.dequantise() - WEIGHT).abs() <= step * room * 1.001).all()
    assert weight.group == scheme.group and (weight.zeros is not None) == scheme.zeros
    limit = 2 ** (scheme.bits - 1)
    assert int(weight.codes.min()) >= -limit and int(weight.codes.max()) < limit
    assert weight.codes.unique().numel() > 2**scheme.bits * 0.9, "most codes are of use"


@pytest.mark.parametrize("scheme", [IntScheme(8), IntScheme(4)], ids=IntScheme.label)
def test_a_dequantised_weight_quantises_to_the_same_codes(scheme: IntScheme) -> None:
    weight = quantise(WEIGHT, scheme)
    again = quantise(weight.dequantise(), scheme)
    assert torch.equal(again.codes, weight.codes) and torch.equal(again.scales, weight.scales)


@pytest.mark.parametrize(("bits", "kind"), [(8, "Q8_0"), (4, "Q4_0")])
def test_a_dequantised_weight_is_exact_in_llama_cpp_s_type(bits: int, kind: str) -> None:
    values = quantise(WEIGHT, IntScheme(bits)).dequantise().numpy()
    theirs = gguf.GGMLQuantizationType[kind]
    assert np.array_equal(gguf.quants.dequantize(gguf.quants.quantize(values, theirs), theirs), values)


def test_groups_of_zeros_and_of_extreme_values() -> None:
    zero = torch.zeros(2, 64)
    zero[1, :32] = 1e-9  # below every fp16 scale
    for scheme in SCHEMES[:3]:
        assert torch.equal(quantise(zero, scheme).dequantise(), torch.zeros(2, 64))
    huge = torch.full((1, 32), 1e7)
    assert quantise(huge, IntScheme(8)).dequantise().isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_codes_lie_from_the_lowest_bits_of_an_int32_on(bits: int) -> None:
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (2, 5, 32), generator=torch.Generator().manual_seed(1))
    packed = pack(codes.to(torch.int8), bits)
    per = 32 // bits
    for place in np.ndindex(2, 5, 32 // per):
        word = int(packed[place]) & 0xFFFFFFFF
        for number in range(per):
            code = (word >> (bits * number) & (2**bits - 1)) - 2 ** (bits - 1)
            assert code == codes[place[0], place[1], place[2] * per + number]
    assert torch.equal(unpack(packed, bits), codes)


def test_a_group_that_does_not_divide_names_those_that_do() -> None:
    check_group(32, 96, "w")
    with pytest.raises(UserError, match=r"--group 40: w has 96 inputs.* choose one of 8, 16, 24, 32, 48, 96$"):
        check_group(40, 96, "w")
    with pytest.raises(UserError, match=r"--group 4: w has 96 inputs"):
        check_group(4, 96, "w")
    with pytest.raises(UserError, match=r"--group 32: w has 20 inputs.*leave this part of the network unquantised$"):
        check_group(32, 20, "w")
