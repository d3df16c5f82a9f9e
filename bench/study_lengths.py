"""What elastic training costs and gives by length of training, network and schedule, from several records of `bench.study`.

    python -m bench.study_lengths RECORD RECORD … [--picture FILE.png]

Each difference is a mean over the reported seeds that have its arms, in nats per token on held-out text. Records of one network and one
schedule of the smaller sizes are a series. Exit code 1: the longest training of a series misses an aim, or the full network's distance
at equal FLOPs is not smaller there than after its shortest training.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from rich.table import Table

from bench.common.measure import bench_parser, finish, refusing, shown_mean, table
from bench.common.pictures import draw_means, save_picture, sign_differences
from bench.common.study import read_fields
from bench.common.study_picture import Row
from bench.common.study_tables import (
    EQUAL_FLOPS_AIM,
    EQUAL_TOKENS_AIM,
    HEALED_AIM,
    SIZES,
    ZERO_SHOT_AIM,
    in_seeds,
    minus,
)
from bench.study import read_record, rows_of
from stretto.base.errors import UserError
from stretto.base.numbers import si
from stretto.base.track import say, wide_console
from stretto.report import style


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between two ``arms``, as `minus` gives it."""

    label: str
    arms: Sequence[str]
    value: Callable[[Row], float]
    aim: float
    """Largest mean that meets it."""

    def in_seeds(self, rows: Sequence[Row]) -> list[float]:
        return in_seeds(rows, self.arms, self.value)


EQUAL_FLOPS = Difference("equal FLOPs", *minus("elastic", "full", "ordinary+"), EQUAL_FLOPS_AIM)
GROUPS: Mapping[str, Sequence[Difference]] = {
    "full network − ordinary": (
        Difference("equal tokens", *minus("elastic", "full", "ordinary"), EQUAL_TOKENS_AIM),
        EQUAL_FLOPS,
    ),
    "size, not healed − alone": [
        Difference(size, *minus("elastic", size, f"scratch-{size}"), ZERO_SHOT_AIM) for size in SIZES
    ],
    "size, healed − alone": [
        Difference(size, *minus(f"heal-elastic-{size}", "full", f"scratch-{size}"), HEALED_AIM) for size in SIZES
    ],
}
"""What a table shows, by its title."""
PANELS_IN_ROW = 3


class Series(NamedTuple):
    """What differs in length only."""

    parameters: int
    starts_at: float
    """Share of the steps after which the smaller sizes are trained."""
    share: float
    """Share of the passes with a trained size from then on."""

    @property
    def label(self) -> str:
        return f"{si(self.parameters)}, sizes from {self.starts_at:g} in {self.share:g} of the passes"


class Training(NamedTuple):
    """Results of the reported seeds of one record; the shortest training of a series comes first."""

    series: Series
    per_parameter: float
    """Tokens."""
    rows: Sequence[Row]


@refusing()
def main() -> None:
    options = _parse()
    trainings = read_trainings(options.records)
    say("Smaller sizes are trained from a share of the steps on, a trained size in a share of the passes.")
    for title, differences in GROUPS.items():
        if any(each.in_seeds(training.rows) for each in differences for training in trainings):
            wide_console().print(_table(title, differences, trainings))
    if options.picture:
        draw(trainings, options.picture)
    finish(missed(trainings))


def _parse() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="records of `bench.study`")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="differences over the length, PNG")
    return parser.parse_args()


def read_trainings(records: Sequence[Path]) -> list[Training]:
    """What the ``records`` hold, sorted. Raises UserError: one has no ordinary network, or is of one length and series with another."""
    found = dict[tuple[Series, float], Training]()
    for path in records:
        rows, _ = rows_of(*read_record(path))
        first = next((row["ordinary"] for row in rows if "ordinary" in row), None)
        if first is None:
            raise UserError(f"{path}: runs: no ordinary network with a reported seed; name a record that has one")
        schedule = read_fields(path, ["recipe"])["recipe"]["elastic"]
        series = Series(first["parameters"], schedule["starts_at"], schedule["anchor_share"])
        key = series, first["tokens"] / first["parameters"]
        if key in found:
            raise UserError(f"{path}: network, schedule and length are those of a record before; leave one out")
        found[key] = Training(*key, rows)
    return [found[key] for key in sorted(found)]


def missed(trainings: Sequence[Training]) -> list[str]:
    """What the longest training of each series misses."""
    found = []
    for series, group in groupby(trainings, key=lambda each: each.series):
        alike = list(group)
        for title, differences in GROUPS.items():
            for each in differences:
                values = each.in_seeds(alike[-1].rows)
                if values and fmean(values) > each.aim:
                    miss = f"{fmean(values):+.4f}, aim at most {each.aim:g}"
                    found.append(f"{series.label}: {title}, {each.label}: {miss}")
        distances = [fmean(values) for training in alike if (values := EQUAL_FLOPS.in_seeds(training.rows))]
        if len(distances) > 1 and distances[-1] >= distances[0]:
            found.append(f"{series.label}: {EQUAL_FLOPS.label}: the distance does not fall with length")
    return found


def _table(title: str, differences: Sequence[Difference], trainings: Sequence[Training]) -> Table:
    headings = (f"{each.label} (≤ {each.aim:g})" for each in differences)
    shown = table(
        f"{title}, nats per token, ± 95 % (seeds)",
        *("parameters", "tokens each", "from", "passes", *headings),
    )
    for series, per_parameter, rows in trainings:
        cells = [_cell(each.in_seeds(rows)) for each in differences]
        if any(cells):
            settings = si(series.parameters), f"{per_parameter:.1f}", f"{series.starts_at:g}", f"{series.share:g}"
            shown.add_row(*settings, *cells)
    return shown


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{shown_mean(values, '+')} ({len(values)})"


def draw(trainings: Sequence[Training], path: Path) -> None:
    """Draw means with intervals, and the single seeds, over tokens per parameter: a panel for each difference that two trainings have."""
    panels = [
        (title, each)
        for title, differences in GROUPS.items()
        for each in differences
        if sum(bool(each.in_seeds(training.rows)) for training in trainings) > 1
    ]
    num_rows = -(-len(panels) // PANELS_IN_ROW)
    figure = style.blank(5.6 * PANELS_IN_ROW, 0.6 + 4.2 * num_rows)
    labels = dict[str, Artist]()
    for number, (title, difference) in enumerate(panels, 1):
        axes = figure.add_subplot(num_rows, PANELS_IN_ROW, number)
        style.dress(axes, difference.label, "training tokens per parameter", f"{title}, nats", grid="y")
        _draw_series(axes, difference, trainings)
        for artist, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels[label] = artist
    figure.legend(
        list(labels.values()), list(labels), loc="outside lower center", ncols=2, frameon=False, fontsize=style.TEXT_PT
    )
    save_picture(figure, path)


def _draw_series(axes: Axes, difference: Difference, trainings: Sequence[Training]) -> None:
    axes.axhline(0.0, color=style.INK, linewidth=1.0)
    axes.axhline(difference.aim, color=style.MUTED, linewidth=1.2, linestyle=":", label="aim: at most")
    every = list(dict.fromkeys(each.series for each in trainings))
    for place, series in enumerate(every):
        measured = {
            each.per_parameter * 1.06 ** (place - 1): values
            for each in trainings
            if each.series == series and (values := difference.in_seeds(each.rows))
        }
        if not measured:
            continue
        colour = style.SERIES[place % len(style.SERIES)]
        draw_means(axes, list(measured), list(measured.values()), colour, series.label, along="y")
        axes.plot(list(measured), [fmean(values) for values in measured.values()], "-", color=colour, linewidth=2.0)
        for x, values in measured.items():
            axes.plot([1.05 * x] * len(values), values, "o", color=colour, markersize=4, alpha=0.6)
    lengths = [each.per_parameter for each in trainings]
    style.log_ticks(axes, min(lengths), max(lengths))
    sign_differences(axes)


if __name__ == "__main__":
    main()
