"""Cost of a model with and without its parents, and of a family of sizes against separate training: tables and a figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from stretto.base import numbers
from stretto.base.records import Elsewhere, Family, Ledger, Receipt
from stretto.base.table import NOTHING, Cell, Table, in_columns
from stretto.report import style
from stretto.report.style import INK, SERIES, TEXT_PT

UNKNOWN = "unknown (adopted)"
"""Printed for the unknown training cost of an adopted checkpoint."""
ORDINARY = "at an ordinary run's price, above its own"
"""Printed where a parent counts with more than its measured cost."""
EQUAL = 0.02
"""Relative difference below which tokens or FLOPs of two runs are called equal: it changes the loss by less than the seed does."""


@dataclass(frozen=True, slots=True)
class Control:
    """A control: an ordinary run of the same shape. Ratios and differences are elastic run / control."""

    name: str
    tokens_ratio: float
    flops_ratio: float
    loss_difference: float | None
    """Final held-out loss of the full network minus the control's, nats per token on the same text; None: other text."""


@dataclass(frozen=True, slots=True)
class Elasticity:
    """Cost of training smaller sizes together with the full network."""

    flops: int
    """Measured FLOPs of the elastic run."""
    ordinary_flops: int
    """Computed FLOPs of training the full network alone on as many positions."""
    controls: tuple[Control, ...]


def ledger_table(ledger: Ledger, name: str = "") -> Table:
    """Cost of every stage of a model's lineage, alone and with its parents; ``name``: of the model, where there are several."""

    def line(name: str, counts_as: str, receipt: Receipt, note: str = "") -> tuple[Cell, ...]:
        return (
            Cell(name, note=note),
            Cell(counts_as),
            _flops(receipt.flops),
            Cell(numbers.si(receipt.tokens), receipt.tokens),
            Cell(numbers.duration(receipt.device_s), receipt.device_s),
            Cell(numbers.size_in_bytes(receipt.peak_memory_bytes), receipt.peak_memory_bytes),
        )

    roles = {"parent": "parent", "own": "this model"}
    rows = tuple(_elsewhere(name, adopted) for name, adopted in ledger.adopted)
    rows += tuple(line(row.receipt.stage, roles[row.role], row.receipt, row.name) for row in ledger.rows)
    label = "With its parent, known part" if ledger.adopted else "With its parent"
    totals = [line("This model alone", "", ledger.alone)]
    if _has_parent(ledger):
        totals.append(line(label, "", ledger.with_parents))
    shown = in_columns((*rows, *totals), None, None, _flops_alike, numbers.si_alike, numbers.durations_alike)
    columns = ("Stage", "Counts as", "FLOPs", "Tokens", "Device time", "Peak memory")
    title = f"Cost by stage: {name}" if name else "Cost by stage"
    note = (
        "FLOPs: attention is counted as if every row were one document; packed rows execute less. "
        "Tokens: those that a loss was computed on; in SFT only the tokens of the answers."
    )
    return Table(title, columns, shown[: len(rows)], shown[len(rows) :], note, num_words=2)


def _elsewhere(name: str, adopted: Elsewhere) -> tuple[Cell, ...]:
    """The row of the training before the checkpoint was adopted."""

    def cell(value: int | None, unit: str) -> Cell:
        return Cell(UNKNOWN) if value is None else Cell(numbers.si(value, unit), value, "as published")

    flops, tokens = cell(adopted.flops, "FLOPs"), cell(adopted.tokens, "")
    return Cell("before adoption", note=name), Cell("parent"), flops, tokens, NOTHING, NOTHING


def _has_parent(ledger: Ledger) -> bool:
    return any(row.role == "parent" for row in ledger.rows) or bool(ledger.adopted)


def _flops_alike(values: Sequence[float]) -> list[str]:
    return numbers.si_alike(values, "FLOPs")


def _flops(flops: int, note: str = "") -> Cell:
    return Cell(numbers.si(flops, "FLOPs"), flops, note)


def family_table(family: Family) -> Table:
    """Several sizes from one parent against training each size alone."""

    def line(name: str, own: int, alone: int) -> tuple[Cell, ...]:
        share = Cell(numbers.percent(own / alone), own / alone) if alone else NOTHING
        return Cell(name), _flops(own), _flops(alone, "computed"), share

    rows = tuple(line(row.name, row.own_flops, row.alone_flops) for row in family.rows)
    label = f"All {len(rows)} together" if len(rows) > 1 else "Together"
    totals = (
        (Cell("Parent", note=ORDINARY * family.is_parent_raised), _flops(family.parent_flops), NOTHING, NOTHING),
        line(label, family.family_flops, family.alone_flops),
    )
    shown = in_columns((*rows, *totals), None, _flops_alike, _flops_alike)
    columns = ("Size", "From the parent", "Trained alone", "Share")
    return Table("Several sizes from one parent", columns, shown[: len(rows)], shown[len(rows) :])


def family_sentence(family: Family) -> str:
    """Which way is cheaper, and the number of sizes at which both cost the same."""
    verdict = "never pays off: a size from it costs as much as one trained alone"
    if family.break_even is not None:
        verdict = f"pays off from {numbers.counted(family.break_even, 'size')} on"
    return (
        f"{numbers.counted(len(family.rows), 'size')} from one parent cost {numbers.percent(family.share_of_alone)} of "
        f"training each alone, and {numbers.percent(family.share_of_largest)} of the most expensive one; the parent {verdict}; "
        "training alone is computed from shape and tokens, not measured."
    )


_PARENT = "#56616f"
_LEGEND_CHARS = 104
"""Characters of a line of the legend."""
_ENTRY_CHARS = 8
"""Room beside a name in the legend, in characters: for the colour, and the distance to the next entry."""
_Part = tuple[str, int, str]
"""Name, FLOPs and colour of a part of a bar."""


def cost_bars(ledger: Ledger | None, family: Family | None) -> Figure:
    """FLOPs of every stage: this model alone and with its parent, and a family of sizes against training each alone."""
    bars = _bars(ledger, family)
    totals = [sum(flops for _, flops, _ in parts) for _, parts in bars]
    factor, prefix = numbers.scale_of(max(totals))
    largest = max(totals) / factor
    has_room = {part: part[1] > 0.0145 * factor * largest * len(part[0]) for _, parts in bars for part in parts}
    nameless = dict.fromkeys((name, colour) for (name, flops, colour), fits in has_room.items() if flops and not fits)
    num_columns = max(1, _LEGEND_CHARS // (_ENTRY_CHARS + max((len(name) for name, _ in nameless), default=0)))
    num_lines = -(-len(nameless) // num_columns)
    title = "Cost with and without the parent"
    figure = style.blank(10.0, 1.9 + 0.95 * len(bars) + 0.27 * num_lines)
    axes = style.dress(
        figure.subplots(), title, f"{prefix}FLOPs, attention counted as if every row were one document", "", grid="x"
    )
    for place, ((_, parts), total) in enumerate(zip(bars, totals, strict=True)):
        left = 0.0
        for part in parts:
            name, flops, colour = part
            width = flops / factor
            bar = axes.barh(place, width, left=left, height=0.56, color=colour, edgecolor="white", linewidth=1.5)
            if has_room[part]:
                look: dict[str, Any] = {"color": "white", "fontsize": TEXT_PT - 0.5, "parse_math": False}
                axes.bar_label(bar, [name], label_type="center", **look)
            left += width
        axes.text(left + 0.012 * largest, place, numbers.si(total, "FLOPs"), va="center", fontsize=TEXT_PT, color=INK)
    if nameless:
        keys = [Rectangle((0, 0), 1, 1, facecolor=colour) for _, colour in nameless]
        below: dict[str, Any] = {"loc": "outside lower left", "ncols": num_columns, "frameon": False}
        most = _LEGEND_CHARS - _ENTRY_CHARS
        names = [name if len(name) <= most else f"{name[: most - 1]}…" for name, _ in nameless]
        legend = figure.legend(keys, names, fontsize=TEXT_PT - 0.5, labelcolor=INK, **below)
        for text in legend.get_texts():
            text.set_parse_math(False)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=TEXT_PT, color=INK, parse_math=False)
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.17 * largest if largest else 1.0)
    style.ticks(axes.xaxis, numbers.short, 6)
    return figure


def _bars(ledger: Ledger | None, family: Family | None) -> list[tuple[str, list[_Part]]]:
    """Name and parts of every bar. A part has one colour in all bars: grey for the parent and shades of grey for its stages, and for
    every other stage and every size a colour of its own."""
    bars: list[tuple[str, list[_Part]]] = []
    rows, sizes = () if ledger is None else ledger.rows, () if family is None else family.rows
    num_parents = sum(row.role == "parent" for row in rows)
    greys = iter(style.shades([_PARENT], num_parents))
    colours = iter(style.shades(SERIES, len(rows) - num_parents + len(sizes)))
    if ledger is not None:
        num_runs = Counter(row.receipt.stage for row in rows)
        stages = [
            (
                row.receipt.stage if num_runs[row.receipt.stage] == 1 else f"{row.receipt.stage}: {row.name}",
                row.receipt.flops,
                next(greys if row.role == "parent" else colours),
            )
            for row in rows
        ]
        own = [part for part, row in zip(stages, rows, strict=True) if row.role == "own"]
        bars.append(("this model alone", own))
        if _has_parent(ledger):
            bars.append(("with its parent", stages))
    if family is not None:
        num, of_sizes = numbers.counted(len(sizes), "size"), [(row, next(colours)) for row in sizes]
        parts = [(row.name, row.own_flops, colour) for row, colour in of_sizes]
        bars.append((f"{num} from\none parent", [("parent", family.parent_flops, _PARENT), *parts]))
        parts = [(row.name, row.alone_flops, colour) for row, colour in of_sizes]
        bars.append((f"{num},\neach trained alone\n(computed)", parts))
    return bars


def adopted_sentence(name: str, adopted: Elsewhere) -> str:
    """Training cost of a checkpoint before its adoption, one sentence."""
    known = [numbers.si(adopted.flops, "FLOPs")] if adopted.flops is not None else []
    known += [f"{numbers.si(adopted.tokens)} tokens"] if adopted.tokens is not None else []
    return f"Not included: the training of {name} before its adoption, {numbers.listed(known) + ', as published' if known else UNKNOWN}."


def elasticity_sentence(elasticity: Elasticity) -> str:
    """Cost of elasticity, one sentence."""
    ratio = elasticity.flops / elasticity.ordinary_flops
    text = f"The elastic run used {ratio:.2f}x the FLOPs of an ordinary run on the same tokens (computed from shape and tokens)"
    if not elasticity.controls:
        return f"{text}. The effect on the loss is unknown: no control was trained."
    return f"{text}; {'; '.join(map(_control_words, elasticity.controls))}."


def _control_words(control: Control) -> str:
    same_tokens, same_flops = (abs(ratio - 1.0) < EQUAL for ratio in (control.tokens_ratio, control.flops_ratio))
    tokens = "equal tokens" if same_tokens else f"{control.tokens_ratio:.2f}x its tokens"
    flops = "equal FLOPs" if same_flops else f"{control.flops_ratio:.2f}x its FLOPs"
    change = control.loss_difference
    versus = "" if change is None else f", {numbers.difference(change)} nats of held-out loss"
    return f"against the control {control.name}, at {tokens} and {flops}{versus or ', whose loss was measured on other text'}"


def cost_caption(ledger: Ledger | None, family: Family | None, elasticity: Elasticity | None = None) -> str:
    text = []
    if ledger is not None:
        alone, total = (numbers.si(receipt.flops, "FLOPs") for receipt in (ledger.alone, ledger.with_parents))
        sentence = f"This model cost {alone}; it has no parent."
        if _has_parent(ledger):
            sentence = f"With its parent this model cost {total}; the stages after the parent cost {alone}"
            flops = ledger.with_parents.flops
            sentence += f", {numbers.percent(ledger.alone.flops / flops)} of it." if flops else "."
        text.append(sentence + "".join(f" {adopted_sentence(name, adopted)}" for name, adopted in ledger.adopted))
    if family is not None:
        text.append(family_sentence(family))
    if elasticity is not None:
        text.append(elasticity_sentence(elasticity))
    return " ".join(text)
