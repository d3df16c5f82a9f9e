"""Search of a learning rate for an arm of a study: a few candidates, and more beyond an end that is the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def search(first: Sequence[float], loss_of: Callable[[float], float | None]) -> tuple[tuple[float, ...], float | None]:
    """Candidates, and the one that the search chooses; None: losses of candidates are missing.

    A search whose choice is an end of its candidates has not found a minimum. It goes on beyond that end, by factors of two.
    One or two candidates stay as they are.

    Args:
        first: candidates to begin with.
        loss_of: loss of a short run with a rate, nats per token; None: that run is not done.
    """
    rates = tuple(sorted(first))
    while (chosen := _chosen(rates, [loss_of(rate) for rate in rates])) is not None:
        if len(rates) < 3 or rates[0] < chosen < rates[-1]:
            break
        rates = (rates[0] / 2, *rates) if chosen == rates[0] else (*rates, 2 * rates[-1])
    return rates, chosen


def _chosen(rates: Sequence[float], losses: Sequence[float | None]) -> float | None:
    """The candidate nearest to the minimum of a parabola through the losses over the logarithm of the rate.

    The best single loss would choose by noise among rates that are equally good. Nearest by value, which favours the lower of two,
    as longer runs do. None: a loss is missing.
    """
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(rates):
        return None
    if len(rates) > 2:
        curvature, slope, _ = np.polyfit(np.log2(rates), known, 2)
        if curvature > 0:
            best = 2 ** (-slope / (2 * curvature))
            return min(rates, key=lambda rate: abs(rate - best))
    return rates[int(np.argmin(known))]
