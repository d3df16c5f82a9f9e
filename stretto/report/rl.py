"""The report of a reinforcement-learning run: its record, its page, its pictures, and a sentence beside each of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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
from stretto.base.paths import CHECKPOINT, read_json
from stretto.base.records import git_commit, read_lineage
from stretto.base.track import progress, read_metrics
from stretto.report import style
from stretto.report.page import Cell, Page, Section, Table, pictured, write_page
from stretto.report.rl_timeline import timeline, timeline_caption
from stretto.report.style import BLUE, GREEN, INK, MUTED, ORANGE, PALE, PINK, SAND, SERIES, SKY, Ends, Form, Label
from stretto.rl.log import Span, read_spans
from stretto.rl.recipe import JOURNAL_FILE, RECIPE_FILE, RlRecipe

_SMOOTH_SHARE = 1 / 15
"""Of a run's steps that one point of a bold curve is the mean of."""
_FEW = 30
"""Points up to which each is marked."""

fine = partial(short, digits=5)
"""For what stays near 1."""


@dataclass(frozen=True, slots=True)
class RlData:
    """Everything that the report shows."""

    name: str
    """Name of the run."""
    rows: tuple[Mapping[str, float], ...]
    """Rows of ``metrics.jsonl``, each with ``step``."""
    bound: int
    """On staleness, in versions."""
    num_steps: int
    """That the recipe asks for."""
    spans: tuple[Span, ...] = ()
    """Who worked when."""
    shape: tuple[str, ...] = ()
    """The run in a few short lines."""
    environment: str = ""
    """Device and commit."""
    recipe: str = ""
    """The complete recipe, as text."""

    def series(self, metric: str) -> tuple[list[float], list[float]]:
        """Steps and the finite values of ``metric``."""
        found = {row["step"]: row[metric] for row in self.rows if math.isfinite(row.get(metric, math.nan))}
        return list(found), list(found.values())

    def values(self, metric: str) -> list[float]:
        return self.series(metric)[1]

    def at(self, metric: str, steps: Sequence[float]) -> np.ndarray:
        """Its values at ``steps``; 0 where it was not logged."""
        known = dict(zip(*self.series(metric), strict=True))
        return np.array([known.get(step, 0.0) for step in steps])

    def has(self, *metrics: str) -> bool:
        """Whether one of them was logged."""
        return any(math.isfinite(row.get(metric, math.nan)) for row in self.rows for metric in metrics)

    def last(self, metric: str) -> float | None:
        """Its last finite value."""
        values = self.values(metric)
        return values[-1] if values else None

    def mean(self, metric: str) -> float:
        """Over the steps that logged it."""
        return float(np.mean(self.values(metric)))

    def total(self, metric: str) -> float:
        """Sum over all steps; 0 where it was not logged."""
        return math.fsum(self.values(metric))

    def named(self, prefix: str) -> list[str]:
        """Metrics that begin with ``prefix``, in alphabetical order, without it."""
        found = {name.removeprefix(prefix) for row in self.rows for name in row if name.startswith(prefix)}
        return sorted(name for name in found if self.has(prefix + name))


def is_rl_run(run: Path) -> bool:
    """Whether ``stretto rl`` made the folder."""
    return (run / RECIPE_FILE).is_file() and (run / JOURNAL_FILE).is_file()


def read_rl_run(run: Path) -> RlData:
    """What the run folder holds.

    Raises:
        UserError: the run has logged nothing yet, or its files are damaged.
    """
    path, checkpoint = run / RECIPE_FILE, run / CHECKPOINT
    recipe = validate(RlRecipe, read_json(path), str(path))
    train, rollout, loss = recipe.train, recipe.rollout, recipe.loss
    correction = "no correction" if loss.correction == "none" else loss.correction
    device = f"{read_lineage(checkpoint).receipt.device}, " if (checkpoint / "lineage.json").is_file() else ""
    return RlData(
        name=run.resolve().name,
        rows=tuple(read_metrics(run)),
        bound=recipe.staleness,
        num_steps=train.steps,
        spans=tuple(read_spans(run)),
        shape=(
            f"problems: {', '.join(f'{name} ({source.kind})' for name, source in recipe.sources.items())}",
            f"{train.prompts} groups of {rollout.group} samples a step, {rollout.max_tokens} tokens at most, staleness {recipe.staleness}",
            f"{loss.policy} with {loss.advantage} advantages and {correction}, routes {recipe.replay}, "
            f"rollout in {recipe.precision.rollout}, training in {recipe.precision.train}",
        ),
        environment=f"{device}commit {git_commit() or 'unknown'}",
        recipe=json.dumps(recipe.model_dump(mode="json"), indent=2),
    )


def report_rl_run(run: Path) -> Path:
    """Write ``report/`` into the run folder, all of it or nothing; returns its page.

    Raises:
        UserError: as `read_rl_run`, or the folder cannot be written.
    """
    page = rl_page(read_rl_run(run))
    with progress("report", len(page.sections)) as advance:
        return write_page(page, run, advance)


def rl_page(data: RlData) -> Page:
    """The page, its pictures not drawn yet."""
    absent = "It was not logged." if data.rows else "No step was made."
    sections = [
        pictured(slug, heading, alt, data if data.has(metric) else None, absent, draw, caption)
        for slug, heading, alt, metric, draw, caption in (
            ("reward", "Reward", "Mean reward of each step, and of held-out problems, over steps.", "reward/mean", reward, reward_caption),
            ("staleness", "Staleness", "Mean and largest age of the trained tokens, in versions, against the bound.",
             "staleness/max", staleness, staleness_caption),
            ("mismatch", "Mismatch", "K3 between engine and trainer, mean, 99th percentile and maximum, on a logarithmic axis.",
             "mismatch/same_share", mismatch, mismatch_caption),
            ("policy", "Off-policy", "Effective samples, chi-squared, clipped and corrected tokens, ratios.",
             "policy/ess", policy, policy_caption),
            ("health", "Policy", "Entropy, gradient norm, route flips, and the busiest expert.", "policy/entropy", health, health_caption),
            ("samples", "Samples", "Tokens a sample, truncations, verdicts and their latency.",
             "samples/tokens_mean", samples, samples_caption),
            ("waits", "Waits", "Shares of the trainer's time, and the share of time each role had nothing to do.",
             "time/wall_s", waits, waits_caption),
            ("queues", "Queues", "Groups by state, and requests that wait, over steps.", "groups/ready", queues, queues_caption),
            ("endings", "Endings", "Groups by how they ended, and what was thrown away or done again.",
             "groups/trained", endings, endings_caption),
            ("throughput", "Throughput", "Tokens and samples a second, and the parts of a step's time.",
             "speed/tokens_per_s", throughput, throughput_caption),
        )
    ]  # fmt: skip
    who = pictured(
        "timeline", "Who was busy when",
        "The trainer's time and the groups in flight over the whole run; below, bars for the work of each role in a few steps.",
        data.spans or None, "No spans were recorded.", timeline, timeline_caption,
    )  # fmt: skip
    numbers = Section("summary", "In numbers", tables=(summary(data),))
    found = (numbers, sections[0], who, *sections[1:])
    return Page(data.name, headline(data), data.shape, found, data.environment, data.recipe)


def headline(data: RlData) -> str:
    """The run in a sentence or two."""
    done = int(max((row["step"] for row in data.rows), default=0))
    text = counted(done, "step") + ("" if done >= data.num_steps else f" of {data.num_steps:,}")
    held_out, rewards = data.values("eval/reward"), data.values("reward/mean")
    if len(held_out) > 1:
        text += f": held-out reward from {held_out[0]:.3f} to {held_out[-1]:.3f}"
    elif rewards:
        text += f": reward from {rewards[0]:.3f} to {rewards[-1]:.3f}"
    text += "."
    if data.has("staleness/max"):
        oldest = int(max(data.values("staleness/max")))
        text += f" No trained token was older than {counted(oldest, 'version')}; the bound is {data.bound}."
    return text


def summary(data: RlData) -> Table:
    """The run's totals."""
    steps, wall = data.series("time/wall_s")
    wall_s, waited_s = math.fsum(wall), data.total("wait/trainer_s")
    rows = [("time in steps", Cell(duration(wall_s), wall_s))]
    if wall_s:
        for kind in ("samples", "tokens"):
            num = float(data.at(f"speed/{kind}_per_s", steps) @ wall)
            rows.append((f"{kind} trained", Cell(f"{num:,.0f}", round(num), f"{short(num / wall_s)} a second")))
        rows.append(("the trainer waited", Cell(percent(waited_s / wall_s), waited_s / wall_s, duration(waited_s))))
    given_up = [value for name in ("stale", "failed") if (value := data.last(f"groups/{name}")) is not None]
    known = (
        ("largest staleness, versions", max(data.values("staleness/max"), default=None)),
        ("mismatch K3 of the same version, largest mean", max(data.values("mismatch/same_k3_mean"), default=None)),
        ("groups trained", data.last("groups/trained")),
        ("groups dropped, all rewards equal", data.last("groups/filtered")),
        ("groups too old, given up", sum(given_up) if given_up else None),
        ("roles restarted", data.total("failures/restarts") if data.has("failures/restarts") else None),
    )
    rows += [(name, Cell(short(value), value)) for name, value in known if value is not None]
    return Table("In numbers", ("", "over the run"), tuple((Cell(name), cell) for name, cell in rows))


@dataclass(frozen=True, slots=True)
class Line:
    """A curve over steps."""

    metric: str
    name: str
    colour: str = ""
    """Without one, that of its place in the house's series."""
    kind: Literal["smooth", "plain", "points"] = "smooth"
    """``smooth``: bold is the running mean, the values themselves are faint. ``points``: diamonds."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over steps, or areas on top of each other, named at their ends."""

    title: str
    lines: Sequence[Line] = ()
    form: Form = short
    """How a value is written, on the axis and at the end of its curve."""
    notes: Sequence[str] = ()
    """How to read it, between title and axes."""
    areas: Mapping[str, tuple[np.ndarray, str]] = field(default_factory=dict)
    """By name: values at ``steps``, and colour."""
    steps: Sequence[float] = ()
    zero: bool = True
    """The axis begins at 0."""
    log: bool = False
    top: float | None = None
    """The axis reaches so far at least."""
    bound: float | None = None
    """A dashed line that no curve may cross; ticks are whole numbers then."""


def panels(data: RlData, *found: Panel, columns: int = 2) -> Figure:
    """A figure with those panels of which anything was logged."""
    shown = [panel for panel in found if panel.areas or data.has(*(line.metric for line in panel.lines))]
    figure, places = grid(len(shown), columns)
    style.name_ends(*(plot(axes, data, panel) for axes, panel in zip(places, shown, strict=True)))
    return figure


def grid(num: int, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """A figure with ``num`` panels, at most ``columns`` a row."""
    columns = min(num, columns)
    rows = -(-num // columns)
    figure = style.blank(10.0, 1.8 + 3.8 * rows if columns == 1 else 1.0 + 3.7 * rows)
    places = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes in places[num:]:
        axes.set_visible(False)
    return figure, places[:num]


def plot(axes: Axes, data: RlData, panel: Panel) -> Ends:
    """Draw the areas, and those of the curves that were logged."""
    style.dress(axes, panel.title, "Step", "")
    notes = [*panel.notes]
    shown = [(line, line.colour or SERIES[place % len(SERIES)]) for place, line in enumerate(panel.lines)]
    found = [(line, colour, *data.series(line.metric)) for line, colour in shown if data.has(line.metric)]
    values = [value for *_, each in found for value in each]
    floor = 0.0
    if panel.log and max(values) > 0:
        axes.set_yscale("log")
        floor = min(value for value in values if value > 0) / 3  # zeros are drawn a little below all others
    if panel.bound is not None:
        axes.axhline(panel.bound, color=INK, linewidth=1.3, linestyle=(0, (5, 3)), zorder=2)
    labels = _stack(axes, panel)
    for line, colour, steps, each in found:
        end = _curve(axes, line.kind, colour, steps, np.maximum(each, floor) if floor else np.array(each))
        text = f"{line.name}  {panel.form(each[-1] if floor and end <= floor else end)}"
        labels.append(Label(steps[-1], end, text, colour, bold=line.kind == "points"))
    if floor:
        low, high = axes.get_ylim()
        if high / low < 10:  # a decade at least, or there would be no tick
            middle = (low * high) ** 0.5
            axes.set_ylim(middle / 3.3, middle * 3.3)
        axes.yaxis.set_major_locator(LogLocator(numticks=7))
        axes.yaxis.set_minor_locator(NullLocator())
        style.ticks(axes.yaxis, panel.form)
        notes += ["at the foot: exactly 0"] if min(values) <= 0 else []
    elif panel.log:
        axes.set_yticks([0.0], ["0"])
        notes.append("exactly 0 in every step")
    else:
        style.ticks(axes.yaxis, panel.form, 6, steps=[1, 2, 5, 10], integer=panel.bound is not None)
        if panel.zero and min(values, default=0.0) >= 0:
            axes.set_ylim(bottom=0.0)
        if panel.top is not None:
            axes.set_ylim(top=max(panel.top, 1.08 * max(values, default=0.0)))
    axes.set_xlim(0, max([1, *(row["step"] for row in data.rows)]))
    style.ticks(axes.xaxis, si, 6, integer=True)
    style.subtitle(axes, notes)
    return axes, labels


def _curve(axes: Axes, kind: str, colour: str, steps: Sequence[float], values: np.ndarray) -> float:
    """Draw it; returns where it ends."""
    if kind == "points":
        axes.plot(steps, values, color=colour, linewidth=1.4, alpha=0.6, zorder=4)
        axes.plot(steps, values, "D", color=colour, markersize=8.5, markeredgecolor="white", zorder=5, clip_on=False)
        return float(values[-1])
    width = 1.9
    if kind == "smooth":
        axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.28, zorder=2)
        # on a logarithmic axis the mean of logarithms is what the eye smooths too
        values = np.exp(smoothed(np.log(values))) if axes.get_yscale() == "log" else smoothed(values)
        width = 2.3
    marker = "o" if len(values) <= _FEW else ""
    axes.plot(steps, values, color=colour, linewidth=width, marker=marker, markersize=4.5, zorder=3)
    return float(values[-1])


def _stack(axes: Axes, panel: Panel) -> list[Label]:
    """Areas on top of each other, smoothed over steps; returns what to write beside them."""
    labels, bottom = [], np.zeros(len(panel.steps))
    for name, (values, colour) in panel.areas.items():
        top = bottom + smoothed(values)
        axes.fill_between(panel.steps, bottom, top, color=colour, edgecolor="white", linewidth=0.8, zorder=2)
        ink = MUTED if colour == PALE else colour
        labels.append(Label(panel.steps[-1], float(bottom[-1] + top[-1]) / 2, name, ink))
        bottom = top
    return labels


def smoothed(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Centred running mean; at the ends, of what there is."""
    window = np.ones(2 * int(len(values) * _SMOOTH_SHARE / 2) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def seconds(value: float) -> str:
    """``0``, ``3.2 ms``, ``1.4 s``, ``120 s``."""
    return "0" if value == 0 else duration(value) if value < 1 else f"{short(value)} s"


def reward(data: RlData) -> Figure:
    """Mean reward of what was trained and of held-out problems; of every source where there are several."""
    lines = [Line("reward/mean", "trained on"), Line("eval/reward", "held-out", ORANGE, "points")]
    notes = [
        "mean of a step, and its running mean",
        *(["diamonds: held-out problems"] if data.has("eval/reward") else []),
    ]
    sources = _each(data, "reward/source/")
    by_source = [Panel("By source", sources)] if len(sources) > 1 else []
    return panels(data, Panel("Reward", lines, notes=notes), *by_source, columns=1)


def _each(data: RlData, prefix: str) -> list[Line]:
    """A line for every metric of that prefix."""
    return [Line(prefix + name, name) for name in data.named(prefix)]


def reward_caption(data: RlData) -> str:
    rewards = data.values("reward/mean")
    part = max(1, len(rewards) // 10)
    first, last = np.mean(rewards[:part]), np.mean(rewards[-part:])
    text = f"Mean reward of the trained samples: {first:.3f} in the first tenth of the run, {last:.3f} in the last."
    held_out = data.values("eval/reward")
    if held_out:
        text += f" On held-out problems, best {max(held_out):.3f} and last {held_out[-1]:.3f}."
    return text + " Groups whose rewards are all equal are not trained on where the recipe drops them."


def staleness(data: RlData) -> Figure:
    """Age of the trained tokens against the bound, and under how many versions a sample was written."""
    ages = [Line("staleness/max", "oldest", ORANGE, "plain"), Line("staleness/mean", "mean", BLUE)]
    notes = ["of the trained tokens", f"dashed: the bound, {data.bound}"]
    versions = [Line("staleness/versions_per_sample", "versions", GREEN)]
    return panels(
        data,
        Panel("Staleness, versions", ages, notes=notes, top=max(data.bound * 1.12, 1.0), bound=data.bound),
        Panel("Versions a sample", versions, notes=["weights may change while it is written"], top=1.2),
    )


def staleness_caption(data: RlData) -> str:
    mean, oldest = data.mean("staleness/mean"), max(data.values("staleness/max"))
    return (
        f"The trained tokens were {short(mean)} versions old on average and {oldest:.0f} at most; "
        f"the bound is {data.bound}."
    )


def mismatch(data: RlData) -> Figure:
    """K3 between engine and trainer, of tokens of the version that is trained and of older ones."""
    same, stale = (
        [Line(f"mismatch/{kind}_k3_{name}", name) for name in ("mean", "p99", "max")] for kind in ("same", "stale")
    )
    return panels(
        data,
        Panel("Mismatch K3, same version", same, notes=["the two implementations alone"], log=True),
        Panel("Mismatch K3, older versions", stale, notes=["and what was learnt since"], log=True),
    )


def mismatch_caption(data: RlData) -> str:
    parts = []
    for kind, words in (("same", "of the version that is trained"), ("stale", "of older ones")):
        if data.has(f"mismatch/{kind}_k3_mean"):
            worst = max(data.values(f"mismatch/{kind}_k3_max"))
            mean = data.mean(f"mismatch/{kind}_k3_mean")
            parts.append(f"over tokens {words}, mean {short(mean)}, largest {short(worst)}")
    alike = percent(data.mean("mismatch/same_share"))
    return (
        f"K3 between the trainer's probabilities and the engine's: {'; '.join(parts)}."
        f" {alike} of the tokens were of the version that was trained."
    )


def policy(data: RlData) -> Figure:
    """How far the trained policy is from the one that sampled, and what was cut off for it."""
    cut = [Line("policy/clip_fraction", "clipped"), Line("policy/correction_fraction", "corrected")]
    ratios = [Line("policy/ratio_max", "largest", ORANGE, "plain"), Line("policy/correction_mean", "correction", GREEN)]
    return panels(
        data,
        Panel("Effective samples", [Line("policy/ess", "ESS")], fine, ["share of the tokens"], zero=False),
        Panel("χ² to the rollout", [Line("policy/chi2", "χ²")], notes=["mean squared ratio − 1"], zero=False),
        Panel("Tokens clipped and corrected", cut, percent, ["trust region", "TIS or IcePop"], top=0.01),
        Panel("Ratios", ratios, fine, ["largest of the update", "mean correction"], zero=False),
    )


def policy_caption(data: RlData) -> str:
    ways = {"clip": "clipped by the trust region", "correction": "cut off or left out by the correction"}
    known = {words: f"policy/{key}_fraction" for key, words in ways.items() if data.has(f"policy/{key}_fraction")}
    parts = [f"{percent(data.mean(metric))} of the tokens were {words}" for words, metric in known.items()]
    text = f"The least effective share of samples was {min(data.values('policy/ess')):.3f}. "
    return text + (f"On average {listed(parts)}." if parts else "")


def health(data: RlData) -> Figure:
    """Entropy, gradient, routes and experts."""
    surprise = [Line("policy/entropy", "entropy"), Line("policy/nll", "surprise")]
    flips, load = [Line("routes/flips", "flipped")], [Line("experts/max_overload", "load")]
    return panels(
        data,
        Panel("Entropy", surprise, notes=["nats per token", "surprise: of what was sampled"]),
        Panel("Gradient norm", [Line("optim/grad_norm", "norm")], notes=["before clipping"]),
        Panel("Route flips", flips, percent, ["choices unlike the engine's"], top=0.01),
        Panel("Busiest expert", load, lambda value: f"{short(value)}×", ["over an even share"], zero=False),
    )


def health_caption(data: RlData) -> str:
    entropy = data.values("policy/entropy")
    text = f"Entropy went from {short(entropy[0])} to {short(entropy[-1])} nats per token."
    if data.has("routes/flips"):
        flips = percent(data.mean("routes/flips"))
        text += f" {flips} of the experts that the trainer's own router would have chosen differ from the engine's."
    return text


def samples(data: RlData) -> Figure:
    """Lengths, truncations, groups that teach nothing, and how long a verdict took."""
    lengths = [("max", "longest", ORANGE), ("p95", "p95", PINK), ("mean", "mean", BLUE)]
    outcomes = [("ok", GREEN), ("wrong", MUTED), ("timeout", SAND), ("crash", PINK), ("infra", ORANGE)]
    verdicts = Panel("Right answers", [Line("reward/ok", "right")], percent, ["of the trained samples"])
    if data.named("verdicts/"):
        lines = [Line(f"verdicts/{name}", name, colour) for name, colour in outcomes]
        verdicts = Panel("Verdicts", lines, percent, ["of all verifications"])
    cut = [Line("samples/truncated", "truncated"), Line("groups/uniform_share", "equal rewards")]
    times = [Line(f"reward/latency_{name}_s", name) for name in ("p50", "p95")]
    return panels(
        data,
        Panel("Tokens a sample", [Line(f"samples/tokens_{key}", name, colour) for key, name, colour in lengths]),
        Panel("Truncated, and equal groups", cut, percent, ["of samples, of groups"], top=0.02),
        verdicts,
        Panel("Verdict latency", times, seconds, ["from asking to verdict"], log=True),
    )


def samples_caption(data: RlData) -> str:
    mean, cut = short(data.mean("samples/tokens_mean")), percent(data.mean("samples/truncated"))
    text = f"A sample had {mean} tokens on average; {cut} ran into a limit."
    slow = sorted(data.values("reward/latency_p95_s"))
    if slow:
        median = seconds(slow[len(slow) // 2])
        text += f" The slowest twentieth of a step's verdicts took {median} or more in the median step."
    return text


def waits(data: RlData) -> Figure:
    """What the trainer's time went into, and how much of theirs the roles had nothing to do."""
    steps, wall = data.series("time/wall_s")
    times = (("step", "busy/trainer/step_s", BLUE), ("publish", "busy/trainer/publish_s", GREEN),
             ("snapshot", "busy/trainer/snapshot_s", SAND), ("waits", "wait/trainer_s", ORANGE))  # fmt: skip
    shares = [(name, data.at(metric, steps) / wall, colour) for name, metric, colour in times]
    used = sum((values for _, values, _ in shares), np.zeros(len(steps)))
    shares.append(("other", np.maximum(0.0, 1.0 - used), PALE))
    areas = {f"{name}  {percent(values.mean())}": (values, colour) for name, values, colour in shares if values.any()}
    bubbles = _each(data, "bubble/")[: len(SERIES)]
    return panels(
        data,
        Panel("The trainer's time", (), percent, ["shares of the time from step to step"], areas, steps, top=1.0),
        Panel("Bubble of each role", bubbles, percent, ["share of time with nothing to do"], top=1.0),
    )


def waits_caption(data: RlData) -> str:
    waited = percent(data.total("wait/trainer_s") / data.total("time/wall_s"))
    text = f"The trainer waited for groups during {waited} of the time."
    for name in data.named("bubble/"):
        if name != "trainer":
            text += f" {name}: nothing to do for {percent(data.mean(f'bubble/{name}'))}."
    return text


def queues(data: RlData) -> Figure:
    """Groups by state at the end of each step, and requests that wait for an engine or a verifier."""
    steps, _ = data.series("groups/in_flight")
    states = (("training", "being trained", BLUE), ("ready", "ready", GREEN), ("in_flight", "in flight", SKY))
    found = [(name, data.at(f"groups/{key}", steps), colour) for key, name, colour in states]
    # the synchronous loop ends its steps with none alive
    found = [each for each in found if each[1].any()] or found[:1]
    areas = {f"{name}  ⌀ {short(num.mean())}": (num, colour) for name, num, colour in found}
    depths = [Line(f"queue/{name}", name.replace("_", " ")) for name in data.named("queue/")[: len(SERIES)]]
    return panels(
        data,
        Panel("Groups alive", (), short, ["when a step ended", "⌀: mean of the run"], areas, steps),
        Panel("Requests", depths, notes=["computed or waiting, at one moment of a step"]),
    )


def queues_caption(data: RlData) -> str:
    text = f"On average {short(data.mean('groups/ready'))} groups were ready when a step ended"
    slots = data.values("groups/free_slots")
    return text + (f", and {short(float(np.mean(slots)))} slots were free." if slots else ".")


_ENDINGS = {"trained": ("trained", BLUE), "filtered": ("dropped", PALE), "stale": ("too old", ORANGE),
            "failed": ("given up", PINK), "cancelled": ("cancelled", SAND)}  # fmt: skip


def endings(data: RlData) -> Figure:
    """How groups ended, summed up over the run, and all that was thrown away or done again."""
    figure, (left, right) = grid(2)
    steps, _ = data.series("groups/trained")
    found = [(name, data.at(f"groups/{key}", steps), colour) for key, (name, colour) in _ENDINGS.items()]
    areas = {f"{name}  {values[-1]:,.0f}": (values, colour) for name, values, colour in found if values.any()}
    ends = plot(left, data, Panel("Groups that ended", (), short, ["since the start"], areas, steps))
    _losses(right, data)
    style.name_ends(ends)
    return figure


def _losses(axes: Axes, data: RlData) -> None:
    """Bars of what was thrown away or done again; log scale, since a filter drops thousands and a crash one."""
    counts = {"filtered": "groups, equal rewards", "stale": "groups, too old", "failed": "groups, given up",
              "failed_attempts": "failed attempts", "expired": "leases run out", "late": "late reports"}  # fmt: skip
    totals = {"failures/restarts": "roles restarted", "failures/steps_undone": "steps made again",
              "failures/tokens_resumed": "tokens taken up again"}  # fmt: skip
    for name in data.named("discarded/"):
        totals[f"discarded/{name}"] = f"tokens, {name.removesuffix('_tokens')}"
    known = [(name, value) for key, name in counts.items() if (value := data.last(f"groups/{key}")) is not None]
    known += [(name, data.total(metric)) for metric, name in totals.items() if data.has(metric)]
    style.dress(axes, "Lost or repeated", "", "", grid=None)
    style.subtitle(axes, ["over the run", "length of a bar: log scale"])
    lengths = np.log10([value + 1 for _, value in known])
    bars = axes.barh(range(len(known)), lengths, color=SKY, height=0.62, zorder=2)
    axes.bar_label(bars, [f"{value:,.0f}" for _, value in known], padding=6, fontsize=11.5, color=INK)
    axes.set_yticks(range(len(known)), [name for name, _ in known], fontsize=11.0)
    axes.invert_yaxis()
    axes.set_xlim(0, max([1.0, *lengths]) * 1.25)
    axes.set_xticks([])


def endings_caption(data: RlData) -> str:
    ended = ((name, data.last(f"groups/{key}")) for key, (name, _) in _ENDINGS.items())
    parts = [f"{value:,.0f} {name}" for name, value in ended if value]
    return f"Groups: {listed(parts)}." if parts else "No group has ended."


def throughput(data: RlData) -> Figure:
    """What was trained in a second, what a step took, and how the engines did."""
    tokens = [Line("speed/tokens_per_s", "trained"), Line("engines/tokens_per_s", "sampled")]
    parts = [("wall", "whole"), ("update", "update"), ("recompute", "recompute"), ("load", "load")]
    activate, cache = ["reading, checking, taking over"], ["prompt tokens cached", "requests' time in queue"]
    cached = [Line("engines/cached_share", "cached"), Line("wait/engine_queue_share", "queued")]
    return panels(
        data,
        Panel("Tokens a second", tokens),
        Panel("Samples a second", [Line("speed/samples_per_s", "trained")]),
        Panel("Time of a step", [Line(f"time/{key}_s", name) for key, name in parts], seconds),
        Panel("Weights into an engine", [Line("time/activate_s", "activate")], seconds, activate),
        Panel("Cache and queue", cached, percent, cache, top=0.1),
    )


def throughput_caption(data: RlData) -> str:
    wall = sorted(data.values("time/wall_s"))
    return f"A step took {seconds(wall[len(wall) // 2])} in the median, from one report to the next."
