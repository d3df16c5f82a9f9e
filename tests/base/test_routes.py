"""Routes packed to the bit and back."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.routes import (
    HEADER_BYTES,
    id_bits,
    pack_routes,
    packed_bytes,
    route_dtype,
    signed_routes,
    unpack_routes,
)


def drawn(shape: tuple[int, int, int], num_experts: int, absent: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    dtype = route_dtype(num_experts)
    routes = rng.integers(0, num_experts, shape).astype(dtype)
    routes[rng.random(shape) < absent] = np.iinfo(dtype).max
    return routes


@settings(max_examples=80, deadline=None)
@given(
    st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(1, 9)),
    st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 255, 256, 257, 511, 512, 1025, 65534, 65535])),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 99),
)
def test_what_was_packed_comes_back(shape: tuple[int, int, int], num_experts: int, absent: float, seed: int) -> None:
    routes = drawn(shape, num_experts, absent, seed)
    packed = pack_routes(routes, num_experts)
    again = unpack_routes(packed)
    assert again.dtype == routes.dtype and np.array_equal(again, routes)
    has_absent = bool((routes == np.iinfo(routes.dtype).max).any())
    assert len(packed) == packed_bytes(*shape, num_experts, has_absent)


@pytest.mark.parametrize("num_experts", [2, 6, 16, 24, 64, 128, 255, 256, 512])
def test_a_token_costs_the_bits_that_name_its_experts(num_experts: int) -> None:
    tokens, layers, slots = 1000, 6, 4
    packed = pack_routes(drawn((tokens, layers, slots), num_experts, 0.0, 1), num_experts)
    assert (len(packed) - HEADER_BYTES) / tokens <= math.ceil(math.log2(num_experts)) * slots * layers / 8
    assert HEADER_BYTES <= 24


def test_absence_costs_a_value_and_only_where_it_occurs() -> None:
    assert id_bits(16, False) == 4 and id_bits(16, True) == 5
    assert id_bits(24, False) == id_bits(24, True) == 5
    assert id_bits(1, False) == 0 and id_bits(1, True) == 1


def test_the_trainer_sees_minus_one_for_no_expert() -> None:
    assert signed_routes(np.array([[[3, 255]]], np.uint8)).tolist() == [[[3, -1]]]
    assert signed_routes(np.array([[[300, 65535]]], np.uint16)).tolist() == [[[300, -1]]]


def test_damaged_bytes_are_refused() -> None:
    packed = pack_routes(drawn((9, 2, 3), 24, 0.0, 2), 24)
    flipped = bytearray(packed)
    flipped[-1] ^= 1
    for bad in (b"", b"SR", packed[:-1], packed + b"\0", bytes(flipped), b"XX" + packed[2:]):
        with pytest.raises(ValueError, match="packed routes"):
            unpack_routes(bad)


def test_an_expert_outside_the_network_is_refused() -> None:
    with pytest.raises(AssertionError, match="expert 24 of 24"):
        pack_routes(np.full((1, 1, 1), 24, np.uint8), 24)
