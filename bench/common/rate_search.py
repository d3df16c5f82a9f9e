"""Search of the learning rate of each arm of a study, by runs named ``search-ARM-xRATE`` whose results have losses in ``select``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from bench.common.measure import table
from bench.common.study import Results, is_record, read_fields, recorded, study_parser
from stretto.base.errors import UserError

_SEARCH = "search-"
"""What the names of the search's runs begin with."""


def searching_parser(
    docstring: str | None,
    rates: Sequence[float],
    arms: Sequence[str],
    eval_rows: int,
    picture: str = "",
    parts: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """The parser of a study of ``arms`` that searches rates, beginning with ``rates``, on one half of ``eval_rows`` held-out rows.

    Args:
        picture: as of `study_parser`.
        parts: parts of arms that --arms takes as well.
    """
    parser = study_parser(docstring, picture, seeds=(0, 1))
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=list(rates),
        help="first candidates of the search: multiples of the recipe's rate",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=(*arms, *parts),
        default=list(arms),
        metavar="ARM",
        help=f"arms to search and to train now, with those whose networks or FLOPs they begin with; default: {' '.join(arms)}",
    )
    parser.add_argument("--jobs", type=int, default=2, help="parallel processes of one thread each")
    parser.add_argument("--eval-rows", type=int, default=eval_rows, help="held-out rows, of which one half chooses")
    parser.add_argument("--report", action="store_true", help="only print the results so far")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Options of a `searching_parser`; a record without --report is refused."""
    options = parser.parse_args()
    if is_record(options.out) and not options.report:
        parser.error(f"{options.out}: a file holds results only; add --report to print them, or name a folder")
    return options


def recorded_search(
    path: Path, identity: Mapping[str, Any], seed: int, may_differ: Callable[[str], bool] = lambda key: False
) -> dict[str, dict[str, Any]]:
    """`recorded` results of a study whose search uses ``seed``. Raises UserError: the record's search used another."""
    results = recorded(path, identity, may_differ)
    if results and (first := read_fields(path, ("seeds",))["seeds"][0]) != seed:
        raise UserError(f"{path}: seeds: the search used {first}; name it first in --seeds")
    return results


def searched_before(path: Path, seed: int, rates: Sequence[float]) -> dict[str, dict[str, Any]]:
    """The runs of the search in the record ``path`` of a shorter study. Raises UserError: that search began with another seed, or with
    other candidates than ``rates``."""
    record = read_fields(path, ("seeds", "rates", "runs"))
    for name, stored, own in (("seeds", record["seeds"][:1], [seed]), ("rates", record["rates"], list(rates))):
        if stored != own:
            raise UserError(
                f"{path}: {name}: its search began with {stored}, this study's with {own}; give --{name} the same"
            )
    return {name: result for name, result in record["runs"].items() if name.startswith(_SEARCH)}


def search_run(arm: str, rate: float) -> str:
    """Name of the run that tries ``rate``, a multiple of the recipe's."""
    return f"{_SEARCH}{arm}-x{rate:g}"


def search(arm: str, first: Sequence[float], results: Results) -> tuple[tuple[float, ...], float | None]:
    """Last candidates of ``arm``, and the one that the search chose; None: runs of candidates are missing.

    A search whose choice is an end of its candidates has not found a minimum. It leaves the other end out and goes on beyond the
    chosen one, by a factor of two: losses far from the minimum would bend the parabola. One or two candidates stay as they are.
    A lowest loss at an end is no choice of that end, see `_chosen`: the search ends, although the best rate may lie beyond.

    Args:
        first: candidates to begin with.
    """
    rates, seen = tuple(sorted(first)), set[tuple[float, ...]]()
    while (chosen := _chosen(rates, [_loss(arm, rate, results) for rate in rates])) is not None:
        if len(rates) < 3 or rates[0] < chosen < rates[-1] or rates in seen:
            break
        seen.add(rates)
        rates = (rates[0] / 2, *rates[:-1]) if chosen == rates[0] else (*rates[1:], 2 * rates[-1])
    return rates, chosen


def _loss(arm: str, rate: float, results: Results) -> float | None:
    """Selection loss of a run of the search, nats per token; None: it is not done."""
    found = results.get(search_run(arm, rate))
    return None if found is None else fmean(found["select"].values())


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


def search_table(arms: Iterable[str], first: Sequence[float], seed: int, results: Results) -> Table:
    """Losses of the search by arm and rate. Arms without any run, which an earlier record lacks, are left out."""
    chosen = {arm: search(arm, first, results)[1] for arm in arms}
    tried = {arm: _tried(arm, results) for arm in chosen}
    rates = sorted(set(first).union(*tried.values()))
    lengths = {result["tokens"] for name, result in results.items() if name.startswith(_SEARCH) and "tokens" in result}
    tokens = f" with {max(lengths) / 1e6:.2g}M tokens" if lengths else ""
    title = f"search on seed {seed}{tokens}: selection loss by multiple of the recipe's rate; *: chosen"
    shown = table(title, "arm", *map(str, rates))
    for arm, best in chosen.items():
        if tried[arm]:
            losses = [_loss(arm, rate, results) for rate in rates]
            cells = (
                "" if loss is None else f"{loss:.4f}{'*' if rate == best else ''}"
                for rate, loss in zip(rates, losses, strict=True)
            )
            shown.add_row(arm, *cells)
    return shown


def _tried(arm: str, results: Results) -> list[float]:
    """Rates of the finished runs of the search of ``arm``."""
    prefix = search_run(arm, 1).removesuffix("1")
    return [float(name.removeprefix(prefix)) for name in results if name.startswith(prefix)]
