"""Pictures of how the work of a reinforcement-learning run went: waits, queues, losses, pace. A record in, a Figure out."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from stretto.evals import numbers
from stretto.evals.canvas import INK, MUTED, SERIES, Label, dress, name_ends, subtitle
from stretto.evals.rl_data import RlData
from stretto.evals.rl_panels import PALE, Ends, grid, lines, panel, plain, seconds, share, stack, step_axis

BLUE, ORANGE, GREEN, PINK, SKY, SAND = SERIES
_PHASES = (("step", "step", BLUE), ("publish", "publish", GREEN), ("snapshot", "snapshot", SAND))
_STATES = (("training", "being trained", BLUE), ("ready", "ready", GREEN), ("in_flight", "in flight", SKY))
_ENDINGS = (
    ("trained", "trained", BLUE),
    ("filtered", "dropped", PALE),
    ("stale", "too old", ORANGE),
    ("failed", "given up", PINK),
    ("cancelled", "cancelled", SAND),
)
_LOSSES = (
    ("groups/filtered", "groups, equal rewards"),
    ("groups/stale", "groups, too old"),
    ("groups/failed", "groups, given up"),
    ("groups/failed_attempts", "failed attempts"),
    ("groups/expired", "leases run out"),
    ("groups/late", "late reports"),
)
"""Counts since the start."""
_REPEATED = (
    ("failures/restarts", "roles restarted"),
    ("failures/steps_undone", "steps made again"),
    ("failures/tokens_resumed", "tokens taken up again"),
)
"""Counts of each step, as are ``discarded/…``."""


def waits(data: RlData) -> Figure:
    """What the trainer's time went into, and how much of theirs the roles had nothing to do."""
    bubbles = data.named("bubble/")[: len(SERIES)]
    figure, places = grid(2 if bubbles else 1)
    steps, wall = data.series("time/wall_s")
    waited = np.array(_by_step(data, "wait/trainer_s", steps)) / wall
    found = [
        (name, np.array(_by_step(data, f"busy/trainer/{key}_s", steps)) / wall, colour) for key, name, colour in _PHASES
    ]
    used = sum((values for _, values, _ in found), waited)
    found += [("waits", waited, ORANGE), ("other", np.maximum(0.0, 1.0 - used), PALE)]
    axes = dress(places[0], "The trainer's time", "Step", "")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.percent(value)))
    subtitle(axes, ["shares of the time from step to step"], line_chars=58)
    parts = [
        (f"{name}  {share(values.mean())}", list(values), colour) for name, values, colour in found if values.any()
    ]
    ends = [stack(axes, data, parts, steps)]
    if bubbles:
        curves = lines(*((f"bubble/{name}", name) for name in bubbles))
        ends.append(
            panel(places[1], data, "Bubble of each role", curves, share, ["share of time with nothing to do"], top=1.0)
        )
    name_ends(*ends)
    return figure


def queues(data: RlData) -> Figure:
    """Groups by state at the end of each step, and requests that wait for an engine or a verifier."""
    depths = data.named("queue/")[: len(SERIES)]
    figure, places = grid(2 if depths else 1)
    steps, _ = data.series("groups/in_flight")
    axes = dress(places[0], "Groups alive", "Step", "")
    subtitle(axes, ["when a step ended", "⌀: mean of the run"], line_chars=58)
    found = [(name, _by_step(data, f"groups/{key}", steps), colour) for key, name, colour in _STATES]
    found = [each for each in found if any(each[1])] or found[:1]  # the synchronous loop ends its steps with none alive
    parts = [(f"{name}  ⌀ {plain(_mean(values))}", values, colour) for name, values, colour in found]
    ends = [stack(axes, data, parts, steps)]
    axes.set_ylim(bottom=0)
    if depths:
        curves = lines(*((f"queue/{name}", name.replace("_", " ")) for name in depths))
        ends.append(panel(places[1], data, "Requests", curves, plain, ["computed or waiting, at one moment of a step"]))
    name_ends(*ends)
    return figure


def endings(data: RlData) -> Figure:
    """How groups ended, summed up over the run, and all that was thrown away or done again."""
    figure, (left, right) = grid(2)
    dress(left, "Groups that ended", "Step", "")
    subtitle(left, ["since the start"], line_chars=58)
    steps, _ = data.series("groups/trained")
    bottom = np.zeros(len(steps))
    labels = []
    for key, name, colour in _ENDINGS:
        values = np.array(_by_step(data, f"groups/{key}", steps))
        if values.any():
            left.fill_between(steps, bottom, bottom + values, color=colour, linewidth=0, zorder=2)
            middle = float(bottom[-1] + values[-1] / 2)
            shown = MUTED if colour == PALE else colour
            labels.append(Label(steps[-1], middle, f"{name}  {values[-1]:,.0f}", shown))
            bottom = bottom + values
    left.set_ylim(bottom=0)
    step_axis(left, data)
    _losses(right, data)
    name_ends((left, labels))
    return figure


def _losses(axes: Axes, data: RlData) -> None:
    """Bars of what was thrown away or done again; log scale, since a filter drops thousands and a crash one."""
    known = [(name, value) for metric, name in _LOSSES if (value := data.last(metric)) is not None]
    known += [(name, data.total(metric)) for metric, name in _REPEATED if data.has(metric)]
    discarded = data.named("discarded/")
    known += [(f"tokens, {name.removesuffix('_tokens')}", data.total(f"discarded/{name}")) for name in discarded]
    dress(axes, "Lost or repeated", "", "", grid=None)
    subtitle(axes, ["over the run", "length of a bar: log scale"], line_chars=58)
    places = np.arange(len(known))[::-1]
    lengths = [float(np.log10(value + 1)) for _, value in known]
    axes.barh(places, lengths, color=SKY, height=0.62, zorder=2)
    for place, length, (_, value) in zip(places, lengths, known, strict=True):
        axes.annotate(
            f"{value:,.0f}",
            (length, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=11.5,
            color=INK if value else MUTED,
        )
    axes.set_yticks(places, [name for name, _ in known], fontsize=11.0)
    axes.set_xlim(0, max([1.0, *lengths]) * 1.25)
    axes.set_xticks([])


def throughput(data: RlData) -> Figure:
    """What was trained in a second, what a step took, and how the engines did."""
    has_engines = data.has("engines/cached_share")
    figure, places = grid(5 if has_engines else 4)
    tokens = lines(("speed/tokens_per_s", "trained"), ("engines/tokens_per_s", "sampled"))
    parts = ("wall", "whole"), ("update", "update"), ("recompute", "recompute"), ("load", "load")
    activate = lines(("time/activate_s", "activate"))
    ends: list[Ends] = [
        panel(places[0], data, "Tokens a second", tokens, plain),
        panel(places[1], data, "Samples a second", lines(("speed/samples_per_s", "trained")), plain),
        panel(places[2], data, "Time of a step", lines(*((f"time/{key}_s", name) for key, name in parts)), seconds),
        panel(places[3], data, "Weights into an engine", activate, seconds, ["reading, checking, taking over"]),
    ]
    if has_engines:
        cached = lines(("engines/cached_share", "cached"), ("wait/engine_queue_share", "queued"))
        notes = ["prompt tokens cached", "requests' time in queue"]
        ends.append(panel(places[4], data, "Cache and queue", cached, share, notes, top=0.1))
    name_ends(*ends)
    return figure


def _by_step(data: RlData, metric: str, steps: list[float]) -> list[float]:
    """Its values at ``steps``; 0 where it was not logged."""
    known = dict(zip(*data.series(metric), strict=True))
    return [known.get(step, 0.0) for step in steps]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
