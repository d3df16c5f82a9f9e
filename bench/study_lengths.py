"""What elastic training costs and gives by the length of training, from several records of `bench.study`.

    python -m bench.study_lengths RECORD RECORD … [--picture FILE.png]

Each difference is a mean over the reported seeds that have its arms, in nats per token on held-out text. Exit code 1: the longest
training misses an aim, or the full network's distance at equal FLOPs is not smaller there than after the shortest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from rich.table import Table

from bench.common.measure import bench_parser, finish, half_width, refusing, shown_half, table
from bench.common.pictures import draw_means, finish_differences, save_picture
from bench.common.study_picture import Row
from bench.study import (
    EQUAL_FLOPS_AIM,
    EQUAL_TOKENS_AIM,
    HEALED_AIM,
    SIZES,
    ZERO_SHOT_AIM,
    in_seeds,
    minus,
    read_record,
    rows_of,
)
from stretto.base.errors import UserError
from stretto.base.track import wide_console
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


EQUAL_FLOPS = Difference("equal executed FLOPs", *minus("elastic", "full", "ordinary+"), EQUAL_FLOPS_AIM)
PANELS: Mapping[str, Sequence[Difference]] = {
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
"""What is shown together, by title."""
Lengths = Mapping[float, Sequence[Row]]
"""Results of the reported seeds by tokens per parameter, the shortest training first."""


@refusing()
def main() -> None:
    options = _parse()
    lengths = read_lengths(options.records)
    wide_console().print(_table(lengths))
    if options.picture:
        draw(lengths, options.picture)
    finish(missed(lengths))


def _parse() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="records of one network, each after another length")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="differences over the length, PNG")
    return parser.parse_args()


def read_lengths(records: Sequence[Path]) -> Lengths:
    """Results in the ``records``. Raises UserError: one has no ordinary network, another network, or the length of another record."""
    lengths, sizes = dict[float, Sequence[Row]](), set[int]()
    for path in records:
        rows, _ = rows_of(*read_record(path))
        first = next((row["ordinary"] for row in rows if "ordinary" in row), None)
        if first is None:
            raise UserError(f"{path}: runs: no ordinary network with a reported seed; name a record that has one")
        sizes.add(first["parameters"])
        length = first["tokens"] / first["parameters"]
        if len(sizes) > 1 or length in lengths:
            raise UserError(
                f"{path}: its network is another, or its length the same, as of a record before; leave it out"
            )
        lengths[length] = rows
    return dict(sorted(lengths.items()))


def missed(lengths: Lengths) -> list[str]:
    """What the longest training misses."""
    *_, longest = lengths
    found = []
    for title, differences in PANELS.items():
        for each in differences:
            values = each.in_seeds(lengths[longest])
            if values and fmean(values) > each.aim:
                found.append(f"{title}, {each.label}: {fmean(values):+.4f}, aim at most {each.aim:g}")
    distances = [fmean(values) for rows in lengths.values() if (values := EQUAL_FLOPS.in_seeds(rows))]
    if len(distances) > 1 and distances[-1] >= distances[0]:
        found.append(f"{EQUAL_FLOPS.label}: the distance does not fall with length")
    return found


def _table(lengths: Lengths) -> Table:
    shown = table(
        "nats per token, ± 95 % (seeds)", "by tokens per parameter", *(f"{each:.1f}" for each in lengths), "aim"
    )
    for title, differences in PANELS.items():
        for each in differences:
            cells = [_cell(each.in_seeds(rows)) for rows in lengths.values()]
            if any(cells):
                shown.add_row(f"{title}: {each.label}", *cells, f"≤ {each.aim:g}")
    return shown


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{fmean(values):+.4f} {shown_half(half_width(values), '± {:.4f} ')}({len(values)})"


def draw(lengths: Lengths, path: Path) -> None:
    """Draw means with intervals, and the single seeds, over tokens per parameter."""
    figure = style.blank(15.0, 4.8)
    for axes, (title, differences) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        _draw_panel(axes, title, differences, lengths)
    save_picture(figure, path)


def _draw_panel(axes: Axes, title: str, differences: Sequence[Difference], lengths: Lengths) -> None:
    style.dress(axes, title, "training tokens per parameter", "nats per token", grid="y")
    axes.axhline(0.0, color=style.INK, linewidth=1.0)
    for place, (each, colour) in enumerate(zip(differences, style.SERIES, strict=False)):
        found = {length: values for length, rows in lengths.items() if (values := each.in_seeds(rows))}
        if not found:
            continue
        at = [length * 1.06 ** (place - 1) for length in found]
        draw_means(axes, at, list(found.values()), colour, f"{each.label} (aim {each.aim:g})", along="y")
        axes.plot(at, [fmean(values) for values in found.values()], "-", color=colour, linewidth=2.0)
        for x, values in zip(at, found.values(), strict=True):
            axes.plot([1.05 * x] * len(values), values, "o", color=colour, markersize=4, alpha=0.6)
    style.log_ticks(axes, min(lengths), max(lengths))
    finish_differences(axes)


if __name__ == "__main__":
    main()
