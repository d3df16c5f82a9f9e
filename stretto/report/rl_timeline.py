"""Execution trace of an RL run: the whole run as a strip, and a few steps in detail."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stretto.base.numbers import counted, duration, listed, percent, short
from stretto.flow.log import Span
from stretto.report import style
from stretto.report.style import ABSENT, BLUE, GREEN, HALO, INK, MUTED, ORANGE, PALE, SAND, SERIES, SKY, Label

_CLOSE_STEPS = 5
"""Number of steps shown in detail."""
_BINS = 240
_MOST_LANES = 64
"""Largest number of groups that the detail shows side by side; more would be thinner than two pixels."""
_GAP_SHARE = 0.1
"""Idle time, as a share of the run, that is cut out of the strip: the run was stopped."""
_STEP_SHARE, _VERSION_SHARE = 0.09, 0.035
"""Least distance of two labels in the detail, as a share of its width: of steps, and of versions."""
_TRAINER = {"start": MUTED, "step": BLUE, "publish": GREEN, "snapshot": SAND, "wait": ORANGE}


@dataclass(frozen=True, slots=True)
class Cut:
    """Time that is cut out of the strip."""

    at_s: float
    """Position on the strip, in seconds."""
    seconds: float


def _fact(span: Span, name: str) -> Any:
    return (span.facts or {}).get(name)


def _step(span: Span) -> int:
    """Number of the step as in the metrics, which is also the version of the weights that it produced."""
    return int(_fact(span, "step")) + 1


def timeline(spans: Sequence[Span]) -> Figure:
    """The trainer's time and the groups in flight over the run; below, the work of each role in a few steps."""
    spans, cuts = without_gaps(spans)
    steps = [span for span in spans if span.role == "trainer" and span.name == "step"]
    figure = style.blank(10.0, 11.0 if steps else 4.6)
    heights = [1, 1.25, 4.2] if steps else [1, 1.25]
    trainer, groups, *close = figure.subplots(len(heights), 1, height_ratios=heights)
    if steps:
        _close_up(close[0], spans, steps)
    end_s = max(span.finished_s for span in spans)
    edges = np.linspace(0.0, max(end_s, 1e-6), _BINS + 1)
    labels = _trainer_strip(trainer, spans, edges)
    num_groups = covered([span for span in spans if span.role == "agents"], edges)
    style.dress(groups, "Groups in flight", "Time since the start", "")
    groups.stairs(num_groups, edges, fill=True, color=SKY, linewidth=0, alpha=0.85, zorder=2)
    groups.set_ylim(0, max(1.0, num_groups.max()) * 1.08)
    groups.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    mean = Label(end_s, float(num_groups.mean()), f"⌀ {short(num_groups.mean())}", SKY)
    for axes in (trainer, groups):
        axes.set_xlim(0, end_s)
        style.ticks(axes.xaxis, lambda value: _clock(value, end_s), 8, steps=[1, 2, 3, 6, 10])
        for cut in cuts:
            axes.axvline(cut.at_s, color=INK, linewidth=1.2, linestyle=(0, (2, 2)), zorder=5)
    if cuts:
        stops = listed([duration(cut.seconds) for cut in cuts])
        style.subtitle(groups, [f"dotted: the run was stopped, for {stops}"])
    style.name_ends((trainer, labels), (groups, [mean]))
    return figure


def timeline_caption(spans: Sequence[Span]) -> str:
    times = sorted(span.seconds for span in spans if span.role == "agents")
    if not times:
        return "No group was dispatched."
    text = f"{counted(len(times), 'group')} dispatched; median duration {duration(times[len(times) // 2])}, longest {duration(times[-1])}. "
    if starts := [span.seconds for span in spans if (span.role, span.name) == ("trainer", "start")]:
        text += (
            f"Shares and means are of all the time drawn, of which starts of the trainer took {duration(sum(starts))}. "
        )
    return f"{text}trace.json in the run folder holds all of them."


def without_gaps(spans: Sequence[Span]) -> tuple[list[Span], list[Cut]]:
    """The spans in order from second 0, with long idle times removed, and the removed times."""
    spans = sorted(spans, key=lambda span: span.started_s)
    starts = np.array([span.started_s for span in spans])
    ends = np.maximum.accumulate([span.finished_s for span in spans])
    idle = np.maximum(starts - np.append(starts[0], ends[:-1]), 0.0)  # idle time before each span
    is_cut = idle > _GAP_SHARE * (ends[-1] - starts[0] - idle.sum())
    shifts = starts[0] + np.cumsum(np.where(is_cut, idle, 0.0))
    moved = [
        replace(span, started_s=span.started_s - shift, finished_s=span.finished_s - shift)
        for span, shift in zip(spans, shifts.tolist(), strict=True)
    ]
    return moved, [Cut(moved[place].started_s, float(idle[place])) for place in np.flatnonzero(is_cut)]


def _trainer_strip(axes: Axes, spans: Sequence[Span], edges: np.ndarray) -> list[Label]:
    """Draw the trainer's activities as shares of each time bin."""
    style.dress(axes, "Trainer time", "", "")
    labels, bottom = [], np.zeros(_BINS)
    for name, colour in _TRAINER.items():
        share = covered([each for each in spans if (each.role, each.name) == ("trainer", name)], edges)
        axes.stairs(bottom + share, edges, baseline=bottom, fill=True, color=colour, linewidth=0, zorder=2)
        if share.mean() > 1e-4:
            middle = min(1.0, float((bottom + share / 2).mean()))
            words = "idle" if name == "wait" else name
            labels.append(Label(edges[-1], middle, f"{words}  {percent(share.mean())}", colour))
        bottom = bottom + share
    axes.set_ylim(0, 1)
    style.ticks(axes.yaxis, percent, 2)
    return labels


def covered(spans: Sequence[Span], edges: np.ndarray) -> np.ndarray:
    """Mean number of spans in each time bin of ``edges``."""
    starts, ends = (np.array([getattr(span, name) for span in spans]) for name in ("started_s", "finished_s"))
    # time worked before each edge, summed over spans
    return np.diff([np.clip(edge - starts, 0.0, ends - starts).sum() for edge in edges]) / np.diff(edges)


def _close_up(axes: Axes, spans: Sequence[Span], steps: Sequence[Span]) -> None:
    """Draw a bar per group in the colour of the step that trains it, below the trainer and the engines."""
    starts = [span.started_s for span in spans if (span.role, span.name) == ("trainer", "start")]
    stretches: dict[int, list[Span]] = {}  # steps by the number of starts before them
    for span in steps:
        stretches.setdefault(bisect(starts, span.started_s), []).append(span)
    longest = max(stretches.values(), key=len)
    first = max(0, min(len(longest) // 2, len(longest) - _CLOSE_STEPS))
    shown = longest[first : first + _CLOSE_STEPS]
    low, high = shown[0].started_s, shown[-1].finished_s
    low, high = low - 0.06 * (high - low), high + 0.02 * (high - low)
    inside = [span for span in spans if span.finished_s > low and span.started_s < high]
    colour = {_step(span): SERIES[place % len(SERIES)] for place, span in enumerate(shown)}
    owner = {ordinal: _step(span) for span in steps for ordinal in _fact(span, "ordinals") or ()}
    engines = sorted({span.role for span in spans} - {"trainer", "agents"})
    num_lanes = min(max((span.lane for span in inside if span.role == "agents"), default=0) + 1, _MOST_LANES)
    thick = num_lanes / 9  # of the trainer and the engines, in lanes
    top = thick * (0.9 + len(engines))
    rows = {name: thick * (0.5 + place) for place, name in enumerate(engines)}
    labels_s: dict[str, float] = {}  # place of the last label, by role

    def has_room(role: str, at_s: float, share: float) -> bool:
        """Whether a label at ``at_s`` is far enough from the one before it, and has its place recorded."""
        is_far = at_s - labels_s.get(role, -math.inf) > share * (high - low)
        labels_s[role] = at_s if is_far else labels_s[role]
        return is_far

    for span in inside:
        bar = [(span.started_s, span.seconds)]
        if span.role == "trainer":
            is_named = span.name == "step" and _step(span) in colour
            is_named = is_named and has_room(span.role, span.started_s + span.seconds / 2, _STEP_SHARE)
            _trainer_bar(axes, span, colour, (top, thick * 1.2), is_named)
        elif span.role in rows:
            y = rows[span.role]
            axes.broken_barh(bar, (y, thick * 0.7), facecolor=INK, zorder=3)
            look: dict[str, Any] = {"va": "center", "fontsize": 9.5, "color": MUTED, "clip_on": True}
            if has_room(span.role, span.finished_s, _VERSION_SHARE):
                axes.text(span.finished_s, y + thick * 0.35, f" v{_fact(span, 'version')}", **look)
        elif span.lane < num_lanes:
            step = owner.get(_fact(span, "ordinal"))
            face, edge = (ABSENT, PALE) if step is None else (colour.get(step, PALE), "none")
            axes.broken_barh(bar, (-span.lane - 0.9, 0.8), facecolor=face, edgecolor=edge, linewidth=0.7, zorder=2)
    style.dress(axes, f"Steps {_step(shown[0])} to {_step(shown[-1])} in detail", "Time since the start", "", grid="x")
    axes.set_xlim(low, high)
    axes.set_ylim(-num_lanes - 0.4, top + 1.5 * thick)
    places = [-num_lanes / 2, *(y + thick * 0.35 for y in rows.values()), top + thick * 0.6]
    axes.set_yticks(places, ["groups", *rows, "trainer"], fontsize=11.5, color=INK)
    style.ticks(axes.xaxis, lambda value: _clock(value, high - low), 7)
    style.subtitle(axes, ["bar: a group, in the colour of the step that trains it", "grey: trained in another step",
                    "hollow: dropped, or not trained yet", "v: version that an engine activates"])  # fmt: skip


def _trainer_bar(axes: Axes, span: Span, colour: dict[int, str], row: tuple[float, float], is_named: bool) -> None:
    look: dict[str, Any] = {"facecolor": _TRAINER.get(span.name, "none"), "linewidth": 0.0}
    if span.name == "step":
        look = {"facecolor": colour.get(_step(span), PALE), "edgecolor": "white", "linewidth": 1.2}
        if is_named:
            words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 10.5, "fontweight": "bold"}
            middle = (span.started_s + span.seconds / 2, row[0] + row[1] / 2)
            axes.text(*middle, f"step {_step(span)}", color=INK, path_effects=[HALO], clip_on=True, zorder=4, **words)
    elif span.name == "wait":
        look |= {"facecolor": ABSENT, "hatch": "////", "edgecolor": MUTED}
    axes.broken_barh([(span.started_s, span.seconds)], row, zorder=3, **look)


def _clock(at_s: float, span_s: float) -> str:
    """A time as ``0.25 s``, ``1:36`` or ``2 h 05``, by the span of the figure."""
    if span_s < 30:
        return f"{short(at_s)} s"
    minutes, rest = divmod(round(at_s), 60)
    return f"{minutes}:{rest:02d}" if span_s < 7200 else f"{minutes // 60} h {minutes % 60:02d}"
