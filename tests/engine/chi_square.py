"""Whether draws follow a distribution."""

from __future__ import annotations

import math

import numpy as np


def chi_square(ids: np.ndarray, probs: np.ndarray) -> None:
    """Fails once in ten thousand seeds: Wilson and Hilferty's normal approximation, 3.72 deviations."""
    counts = np.bincount(ids, minlength=len(probs))
    assert counts[probs == 0].sum() == 0, "drew what has no probability"
    counts, expected = counts[probs > 0], len(ids) * probs[probs > 0]
    assert expected.min() > 5, "too few draws for the test"
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic <= freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
