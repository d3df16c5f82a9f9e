"""Report of an elastic network: data, tables, and figures of loss over compute and over training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stretto.base import numbers
from stretto.base.records import Family, Ledger
from stretto.base.table import NOTHING, Cell, Table, in_columns
from stretto.report import style
from stretto.report.comparison import Comparison, comparison_headline, domains_section
from stretto.report.cost import Elasticity, cost_bars, cost_caption, family_table, ledger_table
from stretto.report.page import Page, Section, pictured
from stretto.report.search import (
    Kept,
    Load,
    candidates,
    expert_load,
    kept_caption,
    kept_grid,
    load_caption,
    search_caption,
)
from stretto.report.style import MUTED, Ends, Label
from stretto.subnets.candidate import pareto_front
from stretto.subnets.search import SearchResult

_EDGE_SHARE = 0.15
"""Share of a run, at its start, that may lie above the frame: the initial loss would flatten the rest of the curve."""
_LEAST_INSIDE = 10
"""Smallest number of points of each curve that the rest of the run must have for that."""


@dataclass(frozen=True, slots=True)
class Size:
    """One size of the network in the report."""

    name: str
    """Preset or run folder: ``full``, ``corner``…; also the name of its curve in the metrics (``loss/corner``)."""
    label: str
    """Its shape in words (`Subnet.label`)."""
    total_params: int
    active_params: int
    flops_per_token: int
    """Forward FLOPs per token at the training context length."""
    kv_bytes_per_token: int
    """Bytes of KV cache per token in the serving dtype."""
    latency_ms: float | None = None
    """Measured milliseconds per decoding step on this machine; None without a latency table."""
    nll: float | None = None
    """Zero-shot held-out loss, inside the elastic network; nats per token."""
    healed_nll: float | None = None
    """Held-out loss on the same tokens after extraction and healing; nats per token."""

    @property
    def best_nll(self) -> float | None:
        return self.nll if self.healed_nll is None else self.healed_nll


@dataclass(frozen=True, slots=True)
class Curve:
    """The metrics of one training stage."""

    name: str
    """Name of the size that was trained; ``full`` for pre-training."""
    rows: tuple[Mapping[str, float], ...]
    """Rows of ``metrics.jsonl``, each with ``step``."""
    tokens_per_step: float
    """Mean number of training tokens per step."""
    is_other_text: bool = False
    """Whether its held-out loss was measured on other rows than pre-training's, so that the two are not comparable."""

    def series(self, metric: str) -> tuple[list[float], list[float]]:
        """Tokens and the finite values of ``metric``."""
        found = [row for row in self.rows if math.isfinite(row.get(metric, math.nan))]
        return [row["step"] * self.tokens_per_step for row in found], [row[metric] for row in found]

    def held_out(self) -> tuple[str, ...]:
        """Names with a held-out loss at two steps or more, the full network first."""
        names = {name.removeprefix("loss/") for row in self.rows for name in row if name.startswith("loss/")}
        found = [name for name in names - {"train"} if len(self.series(f"loss/{name}")[0]) > 1]
        return tuple(sorted(found, key=lambda name: (name != "full", name)))

    def losses(self) -> tuple[str, ...]:
        """The names of `held_out`; ``train`` if the run is too short for them but logged its training loss at two steps or more."""
        return self.held_out() or (("train",) if len(self.series("loss/train")[0]) > 1 else ())


@dataclass(frozen=True, slots=True)
class ReportData:
    """Data of the report. Parts that a run does not have are None or empty, and the report omits them."""

    name: str
    sizes: tuple[Size, ...]
    """Sizes, the full network first."""
    shape: tuple[str, ...] = ()
    """Short description of the maximum network, a few lines."""
    environment: str = ""
    """Device, version of torch, commit."""
    samples: tuple[tuple[str, str, str], ...] = ()
    """Size, prompt and generated text."""
    pretraining: Curve | None = None
    stage: str = "pretrain"
    """Stage of the curve ``pretraining``; `STAGES` has the printed names."""
    healing: tuple[Curve, ...] = ()
    """One curve per healed size; its held-out loss is ``loss/full``."""
    search: SearchResult | None = None
    kept: Kept | None = None
    loads: tuple[Load, ...] = ()
    """Expert loads of the full network and of the corner, if there is one."""
    ledger: Ledger | None = None
    family: Family | None = None
    elasticity: Elasticity | None = None
    mixture_drawn: Mapping[str, float] = field(default_factory=dict)
    """Actual share of the training tokens by kind."""
    mixture_configured: Mapping[str, float] = field(default_factory=dict)
    """Configured share of the training tokens by kind."""
    post: Comparison | None = None
    """Comparison of the post-training stages."""
    commands: tuple[tuple[str, str], ...] = ()
    """Suggested commands: purpose and command line."""
    recipe: str = ""

    def curves(self) -> list[Curve]:
        """The curves with a held-out loss, and the run's own with its training loss if it has no other."""
        own = [self.pretraining] if self.pretraining is not None and self.pretraining.losses() else []
        return own + [curve for curve in self.healing if curve.held_out()]


def report_page(data: ReportData) -> Page:
    """The page, its pictures not drawn yet."""
    mixture = [mixture_table(data)] if data.mixture_drawn or data.mixture_configured else []
    sections = (
        Section("sizes", "Sizes", tables=(size_table(data),)),
        pictured(
            "loss_compute", "Loss against compute",
            "Scatter plot of held-out loss over forward FLOPs per token, one mark for each size, zero-shot and healed.",
            data if sum(size.best_nll is not None for size in data.sizes) > 1 else None,
            loss_against_compute, compute_caption,
        ),
        pictured(
            "pareto_front", "Search",
            "Scatter plot of the search's candidates: loss over total parameters, coloured by latency, sized by active parameters.",
            data.search, candidates, search_caption,
        ),
        pictured(
            "kept", "Chosen Subnet", "Grid of layers by experts; filled cells are part of the chosen Subnet.",
            data.kept, kept_grid, kept_caption,
        ),
        pictured(
            "expert_load", "Expert load",
            "Heat map of the share of tokens routed to each expert of each layer, relative to perfect balance.",
            data.loads or None, expert_load, load_caption,
        ),
        pictured(
            "training_curves", "Training",
            "Line plot of the loss over training tokens; each line ends with its name and its last loss.",
            data if data.curves() else None,
            training_curves, curves_caption, *mixture,
        ),
        *([domains_section(data.post)] if data.post is not None else []),
        pictured(
            "cost", "Cost", "Stacked bars of the FLOPs of each stage, with and without the parent.",
            data if data.ledger or data.family else None,
            lambda data: cost_bars(data.ledger, data.family), lambda data: cost_caption(data.ledger, data.family, data.elasticity),
            *([ledger_table(data.ledger)] if data.ledger else []), *([family_table(data.family)] if data.family else []),
        ),
        Section("samples", "Samples of every size", samples=data.samples),
        Section("next", "Next commands", samples=tuple((why, "", line) for why, line in data.commands)),
    )  # fmt: skip
    return Page(data.name, headline(data), data.shape, sections, data.environment, data.recipe)


def headline(data: ReportData) -> str:
    """Summary of the run in one or two sentences."""
    full, *others = data.sizes
    text = f"One network of {numbers.params(full.total_params)} parameters, {numbers.params(full.active_params)} active"
    text += f", and {numbers.counted(len(others), 'smaller size')} inside it." if others else "."
    small = min(others, key=lambda size: size.total_params, default=None)
    if small is None or full.nll is None:
        return text
    text += f" The smallest size, {small.name}, has {numbers.percent(small.total_params / full.total_params)} of the parameters"
    text += f" and {numbers.percent(small.active_params / full.active_params)} of the active parameters"
    if small.best_nll is None:
        return f"{text}."
    healed = "" if small.healed_nll is None else "healed, "
    gap = round(small.best_nll - full.nll, 3)  # as shown, so that a tie reads as one
    lies = "equal to" if gap == 0 else f"{abs(gap):.3f} nats {'above' if gap > 0 else 'below'}"
    text += f"; {healed}its held-out loss is {lies} the full network's."
    return text if data.post is None else f"{text} Post-trained: {comparison_headline(data.post)}"


def size_table(data: ReportData) -> Table:
    """Cost and held-out loss of every size."""
    sizes, full = data.sizes, data.sizes[0]
    notes = [
        "Loss: nats per token on held-out text. FLOPs: forward, per token, with attention to half of the training context.",
        "KV cache: bytes per token in bf16.",
    ]
    if all(size.latency_ms is None for size in sizes):
        notes.append("Latency was not measured.")
    if all(size.healed_nll is None for size in sizes):
        notes.append("No size was healed.")
    if len(sizes) > 1 and full.nll is not None:
        notes.append("Second lines: share of the full network, and difference to its loss.")
    columns = ("Size", "Total", "Active", "FLOPs", "KV", "Latency", "Zero-shot", "Healed")
    forms = (None, _params_alike, _params_alike, numbers.si_alike)
    rows = in_columns(tuple(_size_row(size, full) for size in sizes), *forms)
    return Table("Sizes", columns, rows, note=" ".join(notes), optional=("KV", "FLOPs", "Latency", "Active"))


def _params_alike(values: Sequence[float]) -> list[str]:
    return [text.replace("G", "B") for text in numbers.si_alike(values)]


def _size_row(size: Size, full: Size) -> tuple[Cell, ...]:
    counts = (
        (size.total_params, full.total_params, numbers.params),
        (size.active_params, full.active_params, numbers.params),
        (size.flops_per_token, full.flops_per_token, numbers.si),
        (size.kv_bytes_per_token, full.kv_bytes_per_token, numbers.size_in_bytes),
    )
    cells = [Cell(form(own), own, "" if size is full else numbers.percent(own / whole)) for own, whole, form in counts]
    latency = size.latency_ms
    cells.append(NOTHING if latency is None else Cell(numbers.duration(latency / 1e3), latency))
    for nll in (size.nll, size.healed_nll):
        versus = "" if size is full or full.nll is None or nll is None else numbers.difference(nll - full.nll)
        cells.append(NOTHING if nll is None else Cell(numbers.loss(nll), nll, versus))
    return Cell(size.name, note=size.label), *cells


def mixture_table(data: ReportData) -> Table:
    """Configured and actual mixture of training tokens."""

    both = [
        {kind: Cell(f"{100 * share:.1f} %", share) for kind, share in shares.items()}
        for shares in (data.mixture_configured, data.mixture_drawn)
    ]
    rows = tuple((Cell(kind), *(shares.get(kind, NOTHING) for shares in both)) for kind in both[0] | both[1])
    columns = ("Subnets", "Configured", "Actual")
    return Table("Training mixture", columns, rows, note="Share of the training tokens.")


def loss_against_compute(data: ReportData) -> Figure:
    """Held-out loss of every size over its forward FLOPs per token, zero-shot and healed."""
    shown = [size for size in data.sizes if size.best_nll is not None]
    figure = style.blank(10.0, 6.0)
    title, x_name = "Held-out loss against compute", "Forward compute, FLOPs per token (log scale)"
    axes = style.dress(figure.subplots(), title, x_name, "Held-out loss, nats per token")
    colour = style.colours(size.name for size in data.sizes)
    flops = [size.flops_per_token for size in shown]
    style.log_ticks(axes, min(flops), max(flops))
    labels: list[Label] = []
    marks: list[tuple[float, float, float]] = []
    for size in shown:
        x, own = size.flops_per_token, colour[size.name]
        if size.nll is not None and size.healed_nll is not None:
            axes.plot([x, x], [size.nll, size.healed_nll], color=own, linewidth=1.6, alpha=0.55, zorder=3)
            marks += [(x, y, 4.0) for y in np.linspace(size.nll, size.healed_nll, 12)]
        if size.nll is not None:
            axes.plot(x, size.nll, "o", color=own, markersize=12, markeredgecolor="white", zorder=4)
            labels.append(Label(x, size.nll, f"{size.name}  {numbers.loss(size.nll)}", own, bold=True))
            marks.append((x, size.nll, 6.0))
        if size.healed_nll is not None:
            axes.plot(x, size.healed_nll, "D", color=own, markersize=10, markeredgecolor="white", zorder=4)
            name = "healed" if size.nll is not None else f"{size.name}, healed"
            labels.append(Label(x, size.healed_nll, f"{name}  {numbers.loss(size.healed_nll)}", own))
            marks.append((x, size.healed_nll, 6.0))
    axes.margins(y=0.16)
    axes.autoscale_view(scalex=False)
    kinds = {"o": "circle: zero-shot, inside the elastic network", "D": "diamond: healed"}
    drawn = {line.get_marker() for line in axes.lines}
    style.subtitle(axes, [words for marker, words in kinds.items() if marker in drawn])
    style.place_labels(axes, labels, marks)
    return figure


def compute_caption(data: ReportData) -> str:
    known = [(size.flops_per_token, nll, size) for size in data.sizes if (nll := size.best_nll) is not None]
    # the caption names the sizes on the Pareto front
    front = [known[place] for place in pareto_front([(flops, nll) for flops, nll, _ in known])]
    (_, low, best), (_, high, least) = (end(front, key=lambda each: each[1]) for end in (min, max))
    text = f"{best.name} reaches {numbers.loss(low)} nats per token with the least compute."
    if least is not best:
        share = numbers.percent(least.flops_per_token / best.flops_per_token)
        text = f"From {best.name} at {numbers.loss(low)} to {least.name} at {numbers.loss(high)} nats per token, "
        text += f"for {share} of its FLOPs."
    beaten = [size.name for _, _, size in known if all(size is not each for *_, each in front)]
    if beaten:
        text += f" Not on the Pareto front: {numbers.listed(beaten)}."
    changes = [
        f"{size.name} by {numbers.difference(size.healed_nll - size.nll)}"
        for size in data.sizes
        if size.nll is not None and size.healed_nll is not None
    ]
    return text + (f" Healing changes the loss of {numbers.listed(changes)}." if changes else "")


STAGES = {"pretrain": "pre-training", "elasticize": "elasticizing", "sft": "fine-tuning"}
_Named = tuple[str, list[float], list[float]]
"""Name, tokens and losses."""


def training_curves(data: ReportData) -> Figure:
    """Held-out loss of the full network and every anchor over training, or the training loss without one, and the held-out loss of every
    healed size in a second panel."""
    curves = data.curves()
    trained = [name for curve in curves for name in curve.losses()]
    colour = style.colours([*(size.name for size in data.sizes), *trained])
    pretraining = data.pretraining if data.pretraining in curves else None
    healing = [curve for curve in curves if curve is not pretraining]
    widths = [1.55, 1.0] if pretraining and healing else [1.0]
    figure = style.blank(10.0, 5.8)
    places = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    ends: list[Ends] = []
    if pretraining is not None:
        title = STAGES.get(data.stage, "training").capitalize()
        kind = _kind(pretraining)
        axes = style.dress(places[0], title, "Training tokens", f"{kind}, nats per token")
        lines = [(name, *pretraining.series(f"loss/{name}")) for name in pretraining.losses()]
        ends.append((axes, _plot(axes, lines, colour, _EDGE_SHARE)))
        is_clipped = max(max(y) for *_, y in lines) > axes.get_ylim()[1]
        is_inside = bool(pretraining.held_out())
        note = (
            "sizes inside the elastic network" if is_inside else "mean since the previous point, on the training text"
        )
        style.subtitle(axes, [note, *(["the first losses lie above the frame"] if is_clipped else [])])
    if healing:
        y_name = "" if pretraining else "Held-out loss, nats per token"
        axes = style.dress(places[-1], "Healing", "Training tokens", y_name)
        healed = [(curve.name, *curve.series("loss/full")) for curve in healing]
        ends.append((axes, _plot(axes, healed, colour, edge=0.0)))
        is_other_text = any(curve.is_other_text for curve in healing)
        style.subtitle(axes, ["extracted sizes, trained alone", *["other held-out rows"] * is_other_text])
    style.name_ends(*ends)
    return figure


def _kind(curve: Curve) -> str:
    return "Held-out loss" if curve.held_out() else "Training loss"


def _plot(axes: Axes, lines: Sequence[_Named], colour: dict[str, str], edge: float) -> list[Label]:
    """Draw curves and return the labels at their ends. Values in the first share ``edge`` of a curve may lie above the frame."""
    lines = [line for line in lines if line[1]]
    labels = []
    for name, x, y in lines:
        own, marker = colour.get(name, MUTED), "o" if len(x) <= 40 else ""
        axes.plot(x, y, color=own, linewidth=2.2, marker=marker, markersize=4.5, zorder=3)
        labels.append(Label(x[-1], y[-1], f"{name}  {numbers.loss(y[-1])}", own, name == "full"))
    late = [[value for at, value in zip(x, y, strict=True) if at >= x[0] + edge * (x[-1] - x[0])] for _, x, y in lines]
    is_long = min(map(len, late)) >= _LEAST_INSIDE
    settled = [value for (_, _, y), end in zip(lines, late, strict=True) for value in (end if is_long else y)]
    top, low = max(settled), min(min(y) for *_, y in lines)
    room = max(top - low, 1e-3)
    axes.set_ylim(low - 0.08 * room, top + 0.08 * room)
    axes.margins(x=0.02)
    style.ticks(axes.xaxis, numbers.si)
    return labels


def curves_caption(data: ReportData) -> str:
    text = []
    for curve in data.curves():
        if curve is data.pretraining:
            ends = [f"{name} {numbers.loss(curve.series(f'loss/{name}')[1][-1])}" for name in curve.losses()]
            at = curve.series(f"loss/{curve.losses()[0]}")[0][-1]
            stage = STAGES.get(data.stage, "training")
            text.append(f"{_kind(curve)} after {numbers.si(at)} tokens of {stage}: {', '.join(ends)}.")
        elif values := curve.series("loss/full")[1]:
            first = f"from {numbers.loss(values[0])} at its first evaluation to " if len(values) > 1 else "to "
            mark = ", on other held-out rows than pre-training: not comparable with it" if curve.is_other_text else ""
            text.append(f"Healing changes the held-out loss of {curve.name} {first}{numbers.loss(values[-1])}{mark}.")
    return " ".join(text)
