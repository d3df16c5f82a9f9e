"""Who was busy when: the whole run in a strip, and a few steps of it close up. A record in, a Figure out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from stretto.evals import numbers
from stretto.evals.canvas import ABSENT, HALO, INK, MUTED, SERIES, Label, blank, dress, name_ends, subtitle
from stretto.evals.rl_data import RlData, Work
from stretto.evals.rl_panels import PALE, Ends

_CLOSE_STEPS = 5
"""Steps of the close-up."""
_BINS = 240
_MOST_LANES = 64
"""Groups that the close-up shows side by side; more would be thinner than a pixel or two."""
_GAP_SHARE = 0.1
"""Of the run's time for which nobody worked before it is cut out of the strip: the run was stopped."""
_TRAINER = (
    ("step", "step", SERIES[0]),
    ("publish", "publish", SERIES[2]),
    ("snapshot", "snapshot", SERIES[5]),
    ("wait", "waits", SERIES[1]),
)


@dataclass(frozen=True, slots=True)
class Cut:
    """Time taken out of the strip."""

    at_s: float
    """On the strip."""
    seconds: float


def timeline(data: RlData) -> Figure:
    """The trainer's time and the groups in flight over the whole run; below, what each did in a few steps."""
    works, cuts = without_gaps(data.works)
    start_s = min(work.started_s for work in works)
    steps = [work for work in works if work.role == "trainer" and work.name == "step"]
    figure = blank(10.0, 11.0 if steps else 4.6)
    if not steps:
        trainer, groups = figure.subplots(2, 1, height_ratios=[1, 1.25])
    else:
        trainer, groups, close = figure.subplots(3, 1, height_ratios=[1, 1.25, 4.2])
        _close_up(close, works, steps, start_s)
    ends = [_trainer_strip(trainer, works, start_s), _groups_strip(groups, works, start_s)]
    for axes in (trainer, groups):
        for cut in cuts:
            axes.axvline(cut.at_s - start_s, color=INK, linewidth=1.2, linestyle=(0, (2, 2)), zorder=5)
    if cuts:
        subtitle(
            groups,
            [f"dotted: the run was stopped, for {numbers.listed([numbers.duration(cut.seconds) for cut in cuts])}"],
        )
    name_ends(*ends)
    return figure


def without_gaps(works: Sequence[Work]) -> tuple[list[Work], list[Cut]]:
    """The works in order of time, later ones moved up to where a long time without any began; and those times."""
    works = sorted(works, key=lambda work: work.started_s)
    worked_s = sum(max(0.0, after - before) for before, after in _busy(works))
    moved: list[Work] = []
    cuts: list[Cut] = []
    shift_s, end_s = 0.0, works[0].started_s
    for work in works:
        idle_s = work.started_s - end_s
        if idle_s > _GAP_SHARE * worked_s:
            cuts.append(Cut(end_s - shift_s, idle_s))
            shift_s += idle_s
        end_s = max(end_s, work.finished_s)
        moved.append(replace(work, started_s=work.started_s - shift_s, finished_s=work.finished_s - shift_s))
    return moved, cuts


def _busy(works: Sequence[Work]) -> list[tuple[float, float]]:
    """Times during which anybody worked, in order."""
    spans: list[tuple[float, float]] = []
    for work in works:
        if spans and work.started_s <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], work.finished_s))
        else:
            spans.append((work.started_s, work.finished_s))
    return spans


def _trainer_strip(axes: Axes, works: Sequence[Work], start_s: float) -> Ends:
    """Shares of each bin of the run's time."""
    end_s = max(work.finished_s for work in works) - start_s
    edges = np.linspace(0.0, max(end_s, 1e-6), _BINS + 1)
    dress(axes, "The trainer", "", "")
    found, labels, bottom = [], [], np.zeros(_BINS)
    for name, shown, colour in _TRAINER:
        some = [work for work in works if work.role == "trainer" and work.name == name]
        found.append((shown, colour, covered(some, start_s, edges) / np.diff(edges)))
    for shown, colour, share in found:
        axes.stairs(bottom + share, edges, baseline=bottom, fill=True, color=colour, linewidth=0, zorder=2)
        if share.mean() > 1e-4:
            labels.append(
                Label(
                    end_s,
                    min(1.0, float((bottom + share / 2).mean())),
                    f"{shown}  {numbers.percent(float(share.mean()))}",
                    colour,
                )
            )
        bottom = bottom + share
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_locator(MaxNLocator(2))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.percent(value)))
    _time_axis(axes, end_s)
    return axes, labels


def covered(works: Sequence[Work], start_s: float, edges: np.ndarray) -> np.ndarray:
    """Seconds of the works that lie in each bin of ``edges``, which count from ``start_s``."""
    begins = np.array([work.started_s for work in works]) - start_s
    ends = np.array([work.finished_s for work in works]) - start_s
    # time worked before each edge, summed over works
    before = np.array([np.clip(edge - begins, 0.0, ends - begins).sum() for edge in edges])
    return np.diff(before)


def _groups_strip(axes: Axes, works: Sequence[Work], start_s: float) -> Ends:
    groups = [work for work in works if work.role == "agents"]
    end_s = max(work.finished_s for work in works) - start_s
    edges = np.linspace(0.0, max(end_s, 1e-6), _BINS + 1)
    mean = covered(groups, start_s, edges) / np.diff(edges)
    dress(axes, "Groups in flight", "Time since the start", "")
    axes.stairs(mean, edges, fill=True, color=SERIES[4], linewidth=0, alpha=0.85, zorder=2)
    axes.set_ylim(0, max(1.0, mean.max()) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    _time_axis(axes, end_s)
    return axes, [Label(end_s, float(mean.mean()), f"⌀ {numbers.trimmed(f'{mean.mean():.1f}')}", SERIES[4])]


def _close_up(axes: Axes, works: Sequence[Work], steps: Sequence[Work], start_s: float) -> None:
    """A bar for each group, coloured like the step that trains it, below the trainer and the engines."""
    first = max(0, min(len(steps) // 2, len(steps) - _CLOSE_STEPS))
    shown = steps[first : first + _CLOSE_STEPS]
    low, high = shown[0].started_s, shown[-1].finished_s
    low, high = low - 0.06 * (high - low), high + 0.02 * (high - low)
    inside = [work for work in works if work.finished_s > low and work.started_s < high]
    colour = {work.number: SERIES[place % len(SERIES)] for place, work in enumerate(shown)}
    owner = {ordinal: work.number for work in steps for ordinal in work.ordinals}
    engines = sorted({work.role for work in works} - {"trainer", "agents"})
    lanes = [work.lane for work in inside if work.role == "agents"]
    num_lanes = min(max(lanes, default=0) + 1, _MOST_LANES)
    thick = num_lanes / 9  # of the trainer and the engines, in lanes
    dress(axes, f"Steps {shown[0].number} to {shown[-1].number}, close up", "Time since the start", "", grid="x")
    for work in inside:
        if work.role == "agents" and work.lane < num_lanes:
            step = owner.get(work.number or 0)
            face = ABSENT if step is None else colour.get(step, PALE)
            axes.broken_barh([_span(work, start_s)], (-work.lane - 0.9, 0.8), facecolor=face, zorder=2,
                             edgecolor=PALE if step is None else "none", linewidth=0.7)  # fmt: skip
    ticks = {"groups": -num_lanes / 2}
    for place, name in enumerate(engines):
        y = thick * (0.5 + place)
        ticks[name] = y + thick * 0.35
        some = [work for work in inside if work.role == name]
        axes.broken_barh([_span(work, start_s) for work in some], (y, thick * 0.7), facecolor=INK, zorder=3)
        for work in some:
            axes.text(
                work.finished_s - start_s,
                y + thick * 0.35,
                f" v{work.number}",
                va="center",
                fontsize=9.5,
                color=MUTED,
                clip_on=True,
            )
    y = thick * (0.9 + len(engines))
    ticks["trainer"] = y + thick * 0.6
    _trainer_row(axes, inside, start_s, colour, (y, thick * 1.2))
    axes.set_xlim(low - start_s, high - start_s)
    axes.set_ylim(-num_lanes - 0.4, y + 1.5 * thick)
    axes.set_yticks(list(ticks.values()), list(ticks), fontsize=11.5, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _clock(value, high - low)))
    subtitle(axes, ["a bar is a group, coloured like the step that trains it", "grey: trained in another step", "hollow: dropped, or not trained yet",
                    "v: weights that an engine takes over"])  # fmt: skip


def _trainer_row(
    axes: Axes, inside: Sequence[Work], start_s: float, colour: dict[int | None, str], row: tuple[float, float]
) -> None:
    others = {name: shade for name, _, shade in _TRAINER if name != "step"}
    for work in inside:
        if work.role != "trainer":
            continue
        left, width = _span(work, start_s)
        if work.name == "step":
            axes.broken_barh(
                [(left, width)],
                row,
                facecolor=colour.get(work.number, PALE),
                edgecolor="white",
                linewidth=1.2,
                zorder=3,
            )
            if work.number in colour:
                axes.text(left + width / 2, row[0] + row[1] / 2, f"step {work.number}", ha="center", va="center", fontsize=10.5,
                          color=INK, fontweight="bold", path_effects=[HALO], clip_on=True, zorder=4)  # fmt: skip
        elif work.name in others:
            hatch = "////" if work.name == "wait" else None
            axes.broken_barh([(left, width)], row, facecolor=ABSENT if hatch else others[work.name], hatch=hatch, edgecolor=MUTED if hatch else "none",
                             linewidth=0.0, zorder=3)  # fmt: skip


def _span(work: Work, start_s: float) -> tuple[float, float]:
    return work.started_s - start_s, work.finished_s - work.started_s


def _time_axis(axes: Axes, end_s: float) -> None:
    axes.set_xlim(0, end_s)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 3, 6, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _clock(value, end_s)))


def _clock(at_s: float, span_s: float) -> str:
    """``96.4 s`` where a picture spans seconds, ``1:36`` where it spans minutes, ``2 h 05`` where hours."""
    if span_s < 30:
        return f"{at_s:,.1f} s"
    minutes, rest = divmod(round(at_s), 60)
    return f"{minutes}:{rest:02d}" if span_s < 7200 else f"{minutes // 60} h {minutes % 60:02d}"
