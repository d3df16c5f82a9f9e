"""What a model cost, with and without its parent, and a family of sizes against training each alone: tables and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, repeat
from typing import Any

from matplotlib.figure import Figure

from stretto.base import numbers
from stretto.base.records import Basis, Family, Ledger, Receipt
from stretto.report import style
from stretto.report.page import NOTHING, Cell, Table
from stretto.report.style import BLUE, GREEN, INK, ORANGE, PINK, SAND, SKY, TEXT_PT

ORDINARY: Mapping[Basis, str] = {"measured": "", "computed": "at an ordinary run's price, above its own"}


def ledger_table(ledger: Ledger) -> Table:
    """Every stage of a model's history, and its cost alone and with its parents."""

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
    rows = tuple(line(row.receipt.stage, roles[row.role], row.receipt, row.name) for row in ledger.rows)
    totals = (line("This model alone", "", ledger.alone), line("With its parent", "", ledger.with_parents))
    columns = ("Stage", "Counts as", "FLOPs", "Tokens", "Device time", "Peak memory")
    return Table("Every stage", columns, rows, totals if _has_parent(ledger) else totals[:1], num_words=2)


def _has_parent(ledger: Ledger) -> bool:
    return any(row.role == "parent" for row in ledger.rows)


def _flops(flops: int, note: str = "") -> Cell:
    return Cell(numbers.si(flops, "FLOPs"), flops, note)


def family_table(family: Family) -> Table:
    """Several sizes out of one parent against training each alone."""

    def line(name: str, own: int, alone: int, basis: str) -> tuple[Cell, ...]:
        share = Cell(numbers.percent(own / alone), own / alone) if alone else NOTHING
        return Cell(name), _flops(own), _flops(alone, basis), share

    rows = tuple(line(row.name, row.own_flops, row.alone.flops, row.alone.basis) for row in family.rows)
    whole = f"All {len(rows)} together" if len(rows) > 1 else "Together"
    totals = (
        (Cell("The parent, once", note=ORDINARY[family.parent_basis]), _flops(family.parent_flops), NOTHING, NOTHING),
        line(whole, family.family_flops, family.alone_flops, family.basis),
    )
    columns = ("Size", "Out of the parent", "Trained alone", "Share")
    return Table("Several sizes out of one parent", columns, rows, totals)


def family_sentence(family: Family) -> str:
    """Which way is cheaper, and from how many sizes on."""
    verdict = "never pays off at these costs: a size out of it costs as much as one trained alone"
    if family.break_even is not None:
        verdict = f"pays off from {numbers.counted(family.break_even, 'size')} on"
    basis = "" if family.basis == "measured" else "; training alone is computed from shape and tokens, not measured"
    return (
        f"{numbers.counted(len(family.rows), 'size')} out of one parent cost {numbers.percent(family.share_of_alone)} of "
        f"training each alone, and {numbers.percent(family.share_of_largest)} of the dearest one; the parent {verdict}{basis}."
    )


_PARENT = "#56616f"


def cost_bars(ledger: Ledger | None, family: Family | None) -> Figure:
    """FLOPs of every stage: this model alone and with its parent, and a family of sizes against training each alone."""
    bars: list[tuple[str, list[tuple[str, int, str]]]] = []  # name; label, FLOPs and colour of each part
    if ledger is not None:
        shades = {"parent": repeat(_PARENT), "own": cycle((ORANGE, GREEN, SKY, PINK, SAND))}
        stages = [(row.role, (row.receipt.stage, row.receipt.flops, next(shades[row.role]))) for row in ledger.rows]
        bars.append(("this model alone", [part for role, part in stages if role == "own"]))
        if _has_parent(ledger):
            bars.append(("with its parent", [part for _, part in stages]))
    if family is not None:
        num, computed = numbers.counted(len(family.rows), "size"), "" if family.basis == "measured" else "\n(computed)"
        parts = [(row.name, row.own_flops, shade) for row, shade in zip(family.rows, cycle((BLUE, SKY)))]
        bars.append((f"{num} out of\none parent", [("parent", family.parent_flops, _PARENT), *parts]))
        parts = [(row.name, row.alone.flops, shade) for row, shade in zip(family.rows, cycle((BLUE, SKY)))]
        bars.append((f"{num},\neach trained alone{computed}", parts))
    totals = [sum(flops for _, flops, _ in parts) for _, parts in bars]
    factor, prefix = numbers.scale_of(max(totals))
    largest = max(totals) / factor
    title = "What it cost, with and without the parent"
    figure = style.blank(10.0, 1.9 + 0.95 * len(bars))
    axes = style.dress(figure.subplots(), title, f"{prefix}FLOPs executed", "", grid="x")
    for place, ((_, parts), total) in enumerate(zip(bars, totals, strict=True)):
        left = 0.0
        for label, flops, colour in parts:
            width = flops / factor
            bar = axes.barh(place, width, left=left, height=0.56, color=colour, edgecolor="white", linewidth=1.5)
            if width > 0.0145 * largest * len(label):  # room for the text inside
                look: dict[str, Any] = {"color": "white", "fontsize": TEXT_PT - 0.5, "parse_math": False}
                axes.bar_label(bar, [label], label_type="center", **look)
            left += width
        axes.text(left + 0.012 * largest, place, numbers.si(total, "FLOPs"), va="center", fontsize=TEXT_PT, color=INK)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=TEXT_PT, color=INK, parse_math=False)
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.17 * largest if largest else 1.0)
    style.ticks(axes.xaxis, numbers.short, 6)
    return figure


def cost_caption(ledger: Ledger | None, family: Family | None) -> str:
    text = []
    if ledger is not None:
        alone, whole = (numbers.si(receipt.flops, "FLOPs") for receipt in (ledger.alone, ledger.with_parents))
        said = f"This model cost {alone}; it has no parent."
        if _has_parent(ledger):
            said = f"With its parent this model cost {whole}; what came after the parent cost {alone}"
            flops = ledger.with_parents.flops
            said += f", {numbers.percent(ledger.alone.flops / flops)} of it." if flops else "."
        text.append(said)
    if family is not None:
        text.append(family_sentence(family))
    return " ".join(text)
