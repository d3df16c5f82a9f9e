"""Numbers and intervals as cells of tables about evaluations, and the notes below such tables."""

from __future__ import annotations

import math
from collections.abc import Callable

from stretto.base.numbers import percent, rounded
from stretto.base.table import NOTHING, Cell
from stretto.evals.diversity import MEASURES
from stretto.evals.scores import LEVEL, Interval
from stretto.post.suite import DomainResult

INTERVALS = f"Intervals are {percent(LEVEL)} confidence intervals over problems (Gaffke's; Clopper-Pearson's for a domain with one sample per problem)."
INFRA = "Infra errors (infrastructure errors): samples without a verdict, left out of the score."
STAR = "✱"
BASELINE_NAMES = {
    "empty": "empty answer",
    "constant": "always 0",
    "frequent": "most frequent",
    "another": "another's answer",
    "calls": "empty calls",
}
"""Names of the trivial baselines; a source's own baselines are printed under their own names."""
MEASURE_NAMES = {name: name.replace("_", "-") for name in MEASURES} | {
    "entropy": "entropy, nats",
    "num_tokens": "tokens",
}
"""Measures of answers, and the headings of their columns."""
DIVERSITY = ("distinct_2", "vendi", "clusters")
"""Measures of answers whose fall is a loss."""


def interval_text(found: Interval) -> str:
    if not math.isfinite(found.low + found.high):
        return "undetermined"
    return f"{percent(found.low).removesuffix(' %')} … {percent(found.high)}"


def ends_text(found: Interval, form: Callable[[float], str]) -> str:
    return f"{form(found.low)} … {form(found.high)}" if math.isfinite(found.low + found.high) else "undetermined"


def share_cell(found: Interval | None, note: str = "") -> Cell:
    if found is None:
        return NOTHING
    if not math.isfinite(found.value):
        return Cell("undetermined", note=note)
    return Cell(percent(found.value), found.value, note or interval_text(found))


def number_cell(value: float | None) -> Cell:
    return NOTHING if value is None else Cell(rounded(value), value)


def signed_points(found: Interval) -> str:
    low, value, high = (f"{100 * each:+.1f}".replace("-", "−") for each in (found.low, found.value, found.high))
    return f"{value} ({low} … {high})"


def measures_of(result: DomainResult) -> dict[str, float]:
    """Measures of the domain's answers, by the names of `MEASURE_NAMES`; without those that were not measured."""
    own = {name: found.value for name, found in result.diversity.items()}
    entropy = {} if result.entropy is None else {"entropy": result.entropy}
    return own | entropy | {"num_tokens": result.num_tokens}


def strongest_baseline(result: DomainResult) -> tuple[str, Interval] | None:
    """The best trivial baseline: its printed name and its score; None without baselines."""
    best = max(result.baselines, key=lambda kind: result.baselines[kind].value, default=None)
    return None if best is None else (BASELINE_NAMES.get(best, best), result.baselines[best])
