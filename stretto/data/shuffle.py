"""Randomness as a function of counters: nothing to store, nothing to restore, the same on every machine.

numpy's own generators may change their streams between versions, and a stored permutation grows with the data.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4
"""Feistel rounds: four make a permutation that no order statistics tell from random (Luby and Rackoff, 1988)."""


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each value: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit numbers."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def key_of(*numbers: int) -> int:
    """One 64-bit key from several counters (seed, epoch, …), all of whose orders and values matter."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix(key ^ np.array([number % 2**64], np.uint64))
    return int(key[0])


def permute(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where ``positions`` of a shuffled order of ``range(size)`` point to: a bijection chosen by ``key``.

    A balanced Feistel network over the next even number of bits; values outside ``size`` are sent through it again
    until they fall inside (cycle walking, Black and Rogaway 2002), less than four times on average.
    """
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < size), f"positions outside {size}"
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    keys = mix(np.arange(_ROUNDS, dtype=np.uint64) ^ np.uint64(key))
    values = positions.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        left, right = values[outside] >> half, values[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        values[outside] = (left << half) | right
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)
