"""Report of a reinforcement-learning run: data, tables, figures and captions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from stretto.base.config import validate
from stretto.base.numbers import counted, duration, listed, percent, short, si
from stretto.base.paths import CHECKPOINT, RECIPE_FILE, read_json
from stretto.base.records import find_lineage, git_commit
from stretto.base.table import Cell, Table
from stretto.base.track import read_metrics
from stretto.flow.log import Span, read_spans
from stretto.flow.run import MOVED
from stretto.learning.recipe import JOURNAL_FILE, RlRecipe
from stretto.report import style
from stretto.report.page import Page, Section, pictured, write_page
from stretto.report.rl_timeline import timeline, timeline_caption
from stretto.report.style import BLUE, GREEN, INK, MUTED, ORANGE, PALE, PINK, SAND, SERIES, SKY, Ends, Form, Label

_SMOOTH_SHARE = 1 / 15
"""Width of the running mean of bold curves, as a share of the run's steps."""
_FEW = 30
"""Largest number of points that are drawn with markers."""

fine = partial(short, digits=5)
"""Format of values near 1."""


@dataclass(frozen=True, slots=True)
class RlData:
    """Data of the report."""

    name: str
    rows: tuple[Mapping[str, float], ...]
    """Rows of ``metrics.jsonl``, each with ``step``."""
    bound: int
    """Bound on staleness, in versions."""
    num_steps: int
    """Number of steps in the recipe."""
    spans: tuple[Span, ...] = ()
    shape: tuple[str, ...] = ()
    """Short description of the run, a few lines."""
    environment: str = ""
    """Device and commit."""
    recipe: str = ""

    def series(self, metric: str) -> dict[float, float]:
        """The finite values of ``metric`` by step."""
        return {row["step"]: row[metric] for row in self.rows if math.isfinite(row.get(metric, math.nan))}

    def values(self, metric: str) -> list[float]:
        return list(self.series(metric).values())

    def at(self, metric: str, steps: Sequence[float]) -> np.ndarray:
        """Its values at ``steps``; 0 where it was not logged."""
        known = self.series(metric)
        return np.array([known.get(step, 0.0) for step in steps])

    def has(self, *metrics: str) -> bool:
        """Whether any of ``metrics`` was logged."""
        return any(self.series(metric) for metric in metrics)

    def last(self, metric: str) -> float | None:
        return next(reversed(self.values(metric)), None)

    def mean(self, metric: str) -> float:
        """Mean over the steps that logged ``metric``."""
        return float(np.mean(self.values(metric)))

    def total(self, metric: str) -> float:
        """Sum over all steps; 0 where it was not logged."""
        return math.fsum(self.values(metric))

    def named(self, prefix: str) -> list[str]:
        """Names of logged metrics behind ``prefix``, in alphabetical order."""
        found = sorted({name for row in self.rows for name in row if name.startswith(prefix)})
        return [name.removeprefix(prefix) for name in found if self.has(name)]


def is_rl_run(run: Path) -> bool:
    """Whether ``run`` is the folder of an RL run."""
    return (run / RECIPE_FILE).is_file() and (run / JOURNAL_FILE).is_file()


def read_rl_run(run: Path) -> RlData:
    """What the run folder holds. Raises `UserError` where nothing was logged yet, or files are damaged."""
    path = run / RECIPE_FILE
    recipe = validate(RlRecipe, read_json(path), str(path))
    train, rollout, loss = recipe.train, recipe.rollout, recipe.loss
    centre = (
        "the sampling policy"
        if loss.proximal == "behaviour"
        else f"the policy before the step (correction {loss.correction})"
    )
    device = f"{lineage.receipt.device}, " if (lineage := find_lineage(run / CHECKPOINT)) else ""
    return RlData(
        name=run.resolve().name,
        rows=tuple(read_metrics(run)),
        bound=recipe.staleness,
        num_steps=train.steps,
        spans=tuple(read_spans(run)),
        shape=(
            f"problems: {', '.join(f'{name} ({source.kind})' for name, source in recipe.sources.items())}",
            f"{train.prompts} groups of {rollout.group} samples per step, at most {rollout.max_tokens} tokens per sample, staleness {recipe.staleness}",
            f"{loss.policy} around {centre}, {loss.advantage} advantages (preset {loss.preset}), routing replay {recipe.replay}, "
            f"rollout {recipe.precision.rollout}, training {recipe.precision.train}",
        ),
        environment=f"{device}commit {git_commit() or 'unknown'}",
        recipe=json.dumps(recipe.model_dump(mode="json"), indent=2),
    )


def report_rl_run(run: Path) -> Path:
    """Write ``report/`` into the run folder, all of it or nothing; returns its page. Raises as `read_rl_run`, and
    `UserError` where the folder cannot be written."""
    return write_page(rl_page(read_rl_run(run)), run)


def rl_page(data: RlData) -> Page:
    """The page, its pictures not drawn yet."""

    def section(slug: str, heading: str, metric: str, picture: Callable[[RlData], Picture]) -> Section:
        if not data.has(metric):
            return Section(slug, heading)
        found = picture(data)
        return Section(slug, heading, found.caption, partial(panels, data, found), found.alt)

    who = pictured(
        "timeline", "Execution trace",
        "Above: the trainer's time and the number of groups in flight over the run. Below: the work of each role during a few steps.",
        data.spans or None, timeline, timeline_caption,
    )  # fmt: skip
    sections = (
        Section("summary", "Summary", tables=(summary(data),)),
        section("reward", "Reward", "reward/mean", reward),
        who,
        *(section("teachers", "Teachers", f"distill/kl/{name}", teachers) for name in data.named("distill/kl/")[:1]),
        section("staleness", "Staleness", "staleness/max", staleness),
        section("mismatch", "Mismatch", "mismatch/same_share", mismatch),
        section("policy", "Off-policy", "policy/ess", policy),
        section("health", "Policy and router", "policy/entropy", health),
        section("samples", "Samples", "samples/tokens_mean", samples),
        section("waits", "Idle time", "time/wall_s", waits),
        section("queues", "Queues", "groups/ready", queues),
        section("endings", "Group outcomes", "groups/trained", endings),
        section("throughput", "Throughput", "speed/tokens_per_s", throughput),
    )
    return Page(data.name, headline(data), data.shape, sections, data.environment, data.recipe)


def headline(data: RlData) -> str:
    """The run in a sentence or two."""
    done = int(max((row["step"] for row in data.rows), default=0))
    text = counted(done, "step") + ("" if done >= data.num_steps else f" of {data.num_steps:,}")
    held_out, rewards, ages = (data.values(name) for name in ("eval/reward", "reward/mean", "staleness/max"))
    if len(held_out) > 1:
        text += f": held-out reward from {held_out[0]:.3f} to {held_out[-1]:.3f}"
    elif rewards:
        text += f": reward from {rewards[0]:.3f} to {rewards[-1]:.3f}"
    text += "."
    if ages:
        text += f" Largest staleness of a trained token: {counted(int(max(ages)), 'version')} (bound {data.bound})."
    return text


def summary(data: RlData) -> Table:
    """The run's totals."""
    wall, waited_s = data.series("time/wall_s"), data.total("wait/trainer_s")
    wall_s = math.fsum(wall.values())
    rows = {"time in steps": Cell(duration(wall_s), wall_s)}
    if wall_s:
        for kind in ("samples", "tokens"):
            num = float(data.at(f"speed/{kind}_per_s", list(wall)) @ list(wall.values()))
            rows[f"{kind} trained"] = Cell(f"{num:,.0f}", round(num), f"{short(num / wall_s)} per second")
        rows["trainer idle"] = Cell(percent(waited_s / wall_s), waited_s / wall_s, duration(waited_s))
    given_up = [value for name in ("stale", "failed") if (value := data.last(f"groups/{name}")) is not None]
    known = {
        "largest staleness, versions": max(data.values("staleness/max"), default=None),
        "mismatch k3 on tokens of the same version, largest mean": max(
            data.values("mismatch/same_k3_mean"), default=None
        ),
        "final KL to the start, nats per token": data.last(MOVED),
        "groups trained": data.last("groups/trained"),
        "groups dropped (equal rewards)": data.last("groups/filtered"),
        "groups too stale or failed": sum(given_up) if given_up else None,
        "roles restarted": data.total("failures/restarts") if data.has("failures/restarts") else None,
    }
    rows |= {name: Cell(short(value), value) for name, value in known.items() if value is not None}
    return Table("Summary", ("", "Total or value"), tuple((Cell(name), cell) for name, cell in rows.items()))


@dataclass(frozen=True, slots=True)
class Line:
    """A curve over steps."""

    metric: str
    name: str
    colour: str = ""
    """Empty: the next colour of `SERIES`."""
    kind: Literal["smooth", "plain", "points"] = "smooth"
    """``smooth``: a bold running mean over faint values. ``points``: diamonds."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over steps, stacked areas with names at their ends, or bars."""

    title: str
    lines: Sequence[Line] = ()
    form: Form = short
    """Format of values, on the axis and at the end of a curve."""
    notes: Sequence[str] = ()
    """Explanations below the title."""
    areas: Mapping[str, tuple[np.ndarray, str]] = field(default_factory=dict)
    """By name: values at ``steps``, and colour."""
    steps: Sequence[float] = ()
    bars: Mapping[str, float] = field(default_factory=dict)
    """Counts by name, drawn on a logarithmic scale."""
    zero: bool = True
    """Whether the axis begins at 0."""
    log: bool = False
    top: float | None = None
    """Smallest upper end of the axis."""
    bound: float | None = None
    """Upper bound, drawn as a dashed line; ticks are whole numbers."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure as data, with its caption."""

    caption: str
    alt: str
    panels: Sequence[Panel]
    columns: int = 2
    """Largest number of panels per row."""


def panels(data: RlData, picture: Picture) -> Figure:
    """A figure with the panels whose metrics were logged."""
    shown = [
        each for each in picture.panels if each.steps or each.bars or data.has(*(line.metric for line in each.lines))
    ]
    columns = min(len(shown), picture.columns)
    rows = -(-len(shown) // columns)
    figure = style.blank(10.0, 1.8 + 3.8 * rows if columns == 1 else 1.0 + 3.7 * rows)
    places = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes in places[len(shown) :]:
        axes.set_visible(False)
    style.name_ends(*(plot(axes, data, panel) for axes, panel in zip(places, shown, strict=False)))
    return figure


def plot(axes: Axes, data: RlData, panel: Panel) -> Ends:
    """Draw the bars, or the areas and the logged curves."""
    if panel.bars:
        return _bars(axes, panel), ()
    style.dress(axes, panel.title, "Step", "")
    notes = [*panel.notes]
    shown = [(line, line.colour or SERIES[place % len(SERIES)]) for place, line in enumerate(panel.lines)]
    found = [(line, colour, each) for line, colour in shown if (each := data.series(line.metric))]
    values = [value for *_, each in found for value in each.values()]
    floor = 0.0
    if panel.log and max(values) > 0:
        axes.set_yscale("log")
        floor = min(value for value in values if value > 0) / 3  # zeros are drawn a little below all others
    if panel.bound is not None:
        axes.axhline(panel.bound, color=INK, linewidth=1.3, linestyle=(0, (5, 3)), zorder=2)
    labels = _stack(axes, panel)
    for line, colour, each in found:
        steps, exact = list(each), np.array(list(each.values()))
        end = _curve(axes, line.kind, colour, steps, np.maximum(exact, floor) if floor else exact)
        text = f"{line.name}  {panel.form(exact[-1] if floor and end <= floor else end)}"
        labels.append(Label(steps[-1], end, text, colour, bold=line.kind == "points"))
    if floor:
        low, high = axes.get_ylim()
        if high / low < 10:  # a decade at least, or there would be no tick
            middle = (low * high) ** 0.5
            axes.set_ylim(middle / 3.3, middle * 3.3)
        axes.yaxis.set_major_locator(LogLocator(numticks=7))
        axes.yaxis.set_minor_locator(NullLocator())
        style.ticks(axes.yaxis, panel.form)
        notes += ["at the lower edge: exactly 0"] if min(values) <= 0 else []
    elif panel.log:
        axes.set_yticks([0.0], ["0"])
        notes.append("exactly 0 in every step")
    else:
        style.ticks(axes.yaxis, panel.form, 6, steps=[1, 2, 5, 10], integer=panel.bound is not None)
        if panel.zero and min(values, default=0.0) >= 0:
            axes.set_ylim(bottom=0.0)
        top = panel.top
        if top is None and panel.zero and values and not any(values):
            top = 1.0  # of zeros alone, matplotlib would show a range of 0.05
        if top is not None:
            axes.set_ylim(top=max(top, 1.08 * max(values, default=0.0)))
    axes.set_xlim(0, max([1, *(row["step"] for row in data.rows)]))
    style.ticks(axes.xaxis, si, 6, integer=True)
    if any(line.kind == "points" for line, *_ in found):
        axes.tick_params(pad=10)  # diamonds on the edge do not touch the tick labels
    style.subtitle(axes, notes)
    return axes, labels


def _curve(axes: Axes, kind: str, colour: str, steps: Sequence[float], values: np.ndarray) -> float:
    """Draw a curve and return its last value."""
    if kind == "points":
        axes.plot(steps, values, color=colour, linewidth=1.4, alpha=0.6, zorder=4)
        axes.plot(steps, values, "D", color=colour, markersize=8.5, markeredgecolor="white", zorder=5, clip_on=False)
        return float(values[-1])
    width = 1.9
    if kind == "smooth":
        axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.28, zorder=2)
        # on a logarithmic axis, smooth the logarithms
        values = np.exp(smoothed(np.log(values))) if axes.get_yscale() == "log" else smoothed(values)
        width = 2.3
    marker = "o" if len(values) <= _FEW else ""
    axes.plot(steps, values, color=colour, linewidth=width, marker=marker, markersize=4.5, zorder=3)
    return float(values[-1])


def _stack(axes: Axes, panel: Panel) -> list[Label]:
    """Draw stacked areas, smoothed over steps, and return their labels."""
    labels, bottom = [], np.zeros(len(panel.steps))
    for name, (values, colour) in panel.areas.items():
        top = bottom + smoothed(values)
        axes.fill_between(panel.steps, bottom, top, color=colour, edgecolor="white", linewidth=0.8, zorder=2)
        ink = MUTED if colour == PALE else colour
        labels.append(Label(panel.steps[-1], float(bottom[-1] + top[-1]) / 2, name, ink))
        bottom = top
    return labels


def smoothed(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Centred running mean; the window is cut at both ends."""
    window = np.ones(2 * int(len(values) * _SMOOTH_SHARE / 2) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def seconds(value: float) -> str:
    """``0``, ``3.2 ms``, ``1.4 s``, ``120 s``."""
    return "0" if value == 0 else duration(value) if value < 1 else f"{short(value)} s"


def _bars(axes: Axes, panel: Panel) -> Axes:
    """Bars on a log scale: a filter drops thousands of groups, a crash drops one."""
    style.dress(axes, panel.title, "", "", grid=None)
    style.subtitle(axes, panel.notes)
    lengths = np.log10([value + 1 for value in panel.bars.values()])
    bars = axes.barh(range(len(lengths)), lengths, color=SKY, height=0.62, zorder=2)
    axes.bar_label(bars, [f"{value:,.0f}" for value in panel.bars.values()], padding=6, fontsize=11.5, color=INK)
    axes.set_yticks(range(len(lengths)), list(panel.bars), fontsize=11.0)
    axes.invert_yaxis()
    axes.set_xlim(0, max([1.0, *lengths]) * 1.25)
    axes.set_xticks([])
    return axes


def reward(data: RlData) -> Picture:
    rewards, held_out = data.values("reward/mean"), data.values("eval/reward")
    part = max(1, len(rewards) // 10)
    first, last = np.mean(rewards[:part]), np.mean(rewards[-part:])
    caption = f"Mean reward of the trained samples: {first:.3f} in the first tenth of the run, {last:.3f} in the last."
    if held_out:
        caption += f" On held-out problems, best {max(held_out):.3f} and last {held_out[-1]:.3f}."
    caption += " With loss.drop_uniform, groups with equal rewards are not trained."
    lines = [Line("reward/mean", "trained"), Line("eval/reward", "held-out", ORANGE, "points")]
    notes = ["mean per step, and running mean", *(["diamonds: held-out problems"] if held_out else [])]
    sources = _each(data, "reward/source/")
    by_source = [Panel("By source", sources)] if len(sources) > 1 else []
    alt = "Mean reward per step and on held-out problems, over steps."
    return Picture(caption, alt, [Panel("Reward", lines, notes=notes), *by_source], columns=1)


def _each(data: RlData, prefix: str) -> list[Line]:
    """A line for every metric with this prefix."""
    return [Line(prefix + name, name) for name in data.named(prefix)]


def staleness(data: RlData) -> Picture:
    mean, oldest = data.mean("staleness/mean"), max(data.values("staleness/max"))
    ages = [Line("staleness/max", "oldest", ORANGE, "plain"), Line("staleness/mean", "mean", BLUE)]
    notes = ["of the trained tokens", f"dashed: the bound, {data.bound}"]
    versions = [Line("staleness/versions_per_sample", "versions", GREEN)]
    return Picture(
        f"Staleness of the trained tokens, in versions: mean {short(mean)}, largest {oldest:.0f}; "
        f"the bound is {data.bound}.",
        "Mean and largest age of the trained tokens, in versions, against the bound.",
        [
            Panel("Staleness, versions", ages, notes=notes, top=max(data.bound * 1.12, 1.0), bound=data.bound),
            Panel("Versions per sample", versions, notes=["engines may update weights during a sample"], top=1.2),
        ],
    )


def teachers(data: RlData) -> Picture:
    """KL to the teachers, and share of the gradient, by source."""
    kls = {name: data.values(f"distill/kl/{name}") for name in data.named("distill/kl/")}
    parts = [f"{name} from {short(values[0])} to {short(values[-1])}" for name, values in kls.items()]
    return Picture(
        f"KL to their teachers, by source, in nats per token: {'; '.join(parts)}.",
        "KL of the student to its teachers and each source's share of the gradient, over steps.",
        [
            Panel(
                "KL to the teacher",
                _each(data, "distill/kl/"),
                notes=["nats per token", "form sampled: ½ mean (log q − log π)²"],
                log=True,
            ),
            Panel("Share of the gradient", _each(data, "distill/share/"), percent),
        ],
    )


def mismatch(data: RlData) -> Picture:
    shown, parts = [], []
    for kind, name, note, words in (
        ("same", "same version", "difference between the implementations", "of the current weights"),
        ("stale", "older versions", "and training since then", "of older weights"),
    ):
        lines = [Line(f"mismatch/{kind}_k3_{each}", each) for each in ("mean", "p99", "max")]
        shown.append(Panel(f"Mismatch k3, {name}", lines, notes=[note], log=True))
        if data.has(f"mismatch/{kind}_k3_mean"):
            mean, worst = data.mean(f"mismatch/{kind}_k3_mean"), max(data.values(f"mismatch/{kind}_k3_max"))
            parts.append(f"over tokens {words}, mean {short(mean)}, largest {short(worst)}")
    alike = percent(data.mean("mismatch/same_share"))
    return Picture(
        f"k3 estimate of the KL between engine and trainer: {'; '.join(parts)}."
        f" {alike} of the tokens were sampled with the current weights.",
        "k3 between engine and trainer: mean, 99th percentile and maximum, on a logarithmic axis.",
        shown,
    )


def policy(data: RlData) -> Picture:
    """Distance between the trained and the sampling policy, and clipped tokens."""
    ways = {"clip": "clipped by the trust region", "correction": "clipped or dropped by the correction"}
    known = {words: f"policy/{key}_fraction" for key, words in ways.items() if data.has(f"policy/{key}_fraction")}
    parts = [f"{percent(data.mean(metric))} of the tokens were {words}" for words, metric in known.items()]
    cut = [Line("policy/clip_fraction", "clipped"), Line("policy/correction_fraction", "corrected")]
    ratios = [Line("policy/ratio_max", "largest", ORANGE, "plain"), Line("policy/correction_mean", "correction", GREEN)]
    return Picture(
        f"Smallest effective sample size, as a share: {min(data.values('policy/ess')):.3f}. "
        + (f"On average {listed(parts)}." if parts else ""),
        "Effective sample size, chi-squared, clipped and corrected tokens, ratios.",
        [
            Panel("Effective sample size", [Line("policy/ess", "ESS")], fine, ["share of the tokens"], zero=False),
            Panel("χ² to the rollout", [Line("policy/chi2", "χ²")], notes=["mean squared ratio − 1"], zero=False),
            Panel("Tokens clipped and corrected", cut, percent, ["trust region", "TIS or IcePop"], top=0.01),
            Panel("Ratios", ratios, fine, ["largest per update", "mean correction"], zero=False),
        ],
    )


def health(data: RlData) -> Picture:
    entropy = data.values("policy/entropy")
    caption = f"Entropy went from {short(entropy[0])} to {short(entropy[-1])} nats per token."
    if data.has("routes/flips"):
        flips = percent(data.mean("routes/flips"))
        caption += f" For {flips} of the pairs of token and MoE layer, the trainer's router would have chosen at least one other expert."
    surprise = [Line("policy/entropy", "entropy"), Line("policy/nll", "NLL")]
    flipped, load = [Line("routes/flips", "flipped")], [Line("experts/max_overload", "load")]
    return Picture(
        caption,
        "Entropy, gradient norm, route flips, and load of the busiest expert.",
        [
            Panel("Entropy", surprise, notes=["nats per token", "NLL: of the sampled tokens"]),
            Panel("Gradient norm", [Line("optim/grad_norm", "norm")], notes=["before clipping"]),
            Panel("Route flips", flipped, percent, ["share of the pairs of token and MoE layer"], top=0.01),
            Panel("Busiest expert", load, lambda value: f"{short(value)}×", ["load / mean load"], zero=False),
        ],
    )


def samples(data: RlData) -> Picture:
    mean, limited = short(data.mean("samples/tokens_mean")), percent(data.mean("samples/truncated"))
    caption = (
        f"Mean length of a sample: {mean} tokens; {limited} of the samples ended at the limit of tokens or of turns."
    )
    slow = sorted(data.values("reward/latency_p95_s"))
    if slow:
        median = seconds(slow[len(slow) // 2])
        caption += f" 95th percentile of the verdict latency: {median} in the median step."
    lengths = [("max", "longest", ORANGE), ("p95", "p95", PINK), ("mean", "mean", BLUE)]
    outcomes = [("ok", GREEN), ("wrong", MUTED), ("timeout", SAND), ("crash", PINK), ("infra", ORANGE)]
    verdicts = Panel("Correct answers", [Line("reward/ok", "correct")], percent, ["share of the trained samples"])
    if data.named("verdicts/"):
        lines = [Line(f"verdicts/{name}", name, colour) for name, colour in outcomes]
        verdicts = Panel("Verdicts", lines, percent, ["share of all verdicts"])
    cut = [Line("samples/truncated", "at a limit"), Line("groups/uniform_share", "equal rewards")]
    times = [Line(f"reward/latency_{name}_s", name) for name in ("p50", "p95")]
    return Picture(
        caption,
        "Tokens per sample, samples at a limit, verdicts and their latency.",
        [
            Panel("Tokens per sample", [Line(f"samples/tokens_{key}", name, colour) for key, name, colour in lengths]),
            Panel("Truncated samples, uniform groups", cut, percent, ["share of samples, share of groups"], top=0.02),
            verdicts,
            Panel("Verdict latency", times, seconds, ["from request to verdict"], log=True),
        ],
    )


def waits(data: RlData) -> Picture:
    """Parts of the trainer's time, and idle time of each role."""
    wall = data.series("time/wall_s")
    steps, waited = list(wall), percent(data.total("wait/trainer_s") / data.total("time/wall_s"))
    idle = [name for name in data.named("bubble/") if name != "trainer"]
    bubbles = "".join(f" {name}: idle {percent(data.mean(f'bubble/{name}'))}." for name in idle)
    times = (("step", "busy/trainer/step_s", BLUE), ("publish", "busy/trainer/publish_s", GREEN),
             ("snapshot", "busy/trainer/snapshot_s", SAND), ("waits", "wait/trainer_s", ORANGE))  # fmt: skip
    shares = [(name, data.at(metric, steps) / list(wall.values()), colour) for name, metric, colour in times]
    used = sum((values for _, values, _ in shares), np.zeros(len(steps)))
    shares.append(("other", np.maximum(0.0, 1.0 - used), PALE))
    areas = {f"{name}  {percent(values.mean())}": (values, colour) for name, values, colour in shares if values.any()}
    lines, notes = _each(data, "bubble/")[: len(SERIES)], ["share of time without work"]
    return Picture(
        f"The trainer was idle for {waited} of the time.{bubbles}",
        "Shares of the trainer's time, and idle share of each role.",
        [
            Panel("Trainer time", (), percent, ["shares of the time per step"], areas, steps, top=1.0),
            Panel("Idle time by role", lines, percent, notes, top=1.0),
        ],
    )


def queues(data: RlData) -> Picture:
    slots = data.values("groups/free_slots")
    free = f"; free slots: {short(float(np.mean(slots)))}" if slots else ""
    steps = list(data.series("groups/in_flight"))
    states = (("training", "being trained", BLUE), ("ready", "ready", GREEN), ("in_flight", "in flight", SKY))
    found = [(name, data.at(f"groups/{key}", steps), colour) for key, name, colour in states]
    # the synchronous loop ends its steps with none alive
    found = [each for each in found if each[1].any()] or found[:1]
    areas = {f"{name}  ⌀ {short(num.mean())}": (num, colour) for name, num, colour in found}
    depths = [Line(f"queue/{name}", name.replace("_", " ")) for name in data.named("queue/")[: len(SERIES)]]
    return Picture(
        f"Mean number of groups ready at the end of a step: {short(data.mean('groups/ready'))}{free}.",
        "Groups by state, and waiting requests, over steps.",
        [
            Panel("Groups by state", (), short, ["at the end of a step", "⌀: mean over the run"], areas, steps),
            Panel("Requests", depths, notes=["running or waiting, at one moment of a step"]),
        ],
    )


def endings(data: RlData) -> Picture:
    """Outcomes of groups over the run, and discarded or repeated work."""
    ways = {"trained": ("trained", BLUE), "filtered": ("dropped", PALE), "stale": ("too stale", ORANGE),
            "failed": ("failed", PINK), "cancelled": ("cancelled", SAND)}  # fmt: skip
    counts = {"filtered": "groups, equal rewards", "stale": "groups, too stale", "failed": "groups, failed",
              "failed_attempts": "failed attempts", "expired": "leases expired", "late": "late reports"}  # fmt: skip
    totals = {"failures/restarts": "roles restarted", "failures/steps_undone": "steps repeated",
              "failures/tokens_resumed": "tokens resumed from logs"}  # fmt: skip
    totals |= {f"discarded/{name}": f"tokens, {name.removesuffix('_tokens')}" for name in data.named("discarded/")}
    steps = list(data.series("groups/trained"))
    ended = [(name, data.at(f"groups/{key}", steps), colour) for key, (name, colour) in ways.items()]
    areas = {f"{name}  {values[-1]:,.0f}": (values, colour) for name, values, colour in ended if values.any()}
    bars = {name: value for key, name in counts.items() if (value := data.last(f"groups/{key}")) is not None}
    bars |= {name: data.total(metric) for metric, name in totals.items() if data.has(metric)}
    parts = [f"{value:,.0f} {name}" for key, (name, _) in ways.items() if (value := data.last(f"groups/{key}"))]
    return Picture(
        f"Groups: {listed(parts)}." if parts else "No group has finished.",
        "Groups by outcome, and discarded or repeated work.",
        [
            Panel("Finished groups", (), short, ["since the start"], areas, steps),
            Panel("Discarded or repeated", notes=["over the run", "log scale"], bars=bars),
        ],
    )


def throughput(data: RlData) -> Picture:
    wall = sorted(data.values("time/wall_s"))
    tokens = [Line("speed/tokens_per_s", "trained"), Line("engines/tokens_per_s", "sampled")]
    parts = [("wall", "whole"), ("update", "update"), ("recompute", "recompute"), ("load", "load")]
    activate = ["read, check, activate"]
    cache = ["share of prompt tokens in the cache", "share of requests' time in the queue"]
    cached = [Line("engines/cached_share", "cached"), Line("wait/engine_queue_share", "queued")]
    return Picture(
        f"Median time of a step: {seconds(wall[len(wall) // 2])}.",
        "Tokens and samples per second, and the parts of a step's time.",
        [
            Panel("Tokens per second", tokens),
            Panel("Samples per second", [Line("speed/samples_per_s", "trained")]),
            Panel("Time per step", [Line(f"time/{key}_s", name) for key, name in parts], seconds),
            Panel("Weight update of an engine", [Line("time/activate_s", "activate")], seconds, activate),
            Panel("Cache and queue", cached, percent, cache, top=0.1),
        ],
    )
