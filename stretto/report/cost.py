"""What a model cost, with and without its parent, and a family of sizes against training each alone: tables and a picture."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from stretto.base import numbers
from stretto.base.records import Family, Ledger, Receipt
from stretto.report import style
from stretto.report.page import NOTHING, Cell, Table
from stretto.report.style import BLUE, GREEN, INK, ORANGE, PINK, SAND, SKY, TEXT_PT


def ledger_table(ledger: Ledger) -> Table:
    """Every stage of a model's history, and its cost alone and with its parents."""
    roles = {"parent": "parent", "own": "this model"}
    rows = [
        (Cell(row.receipt.stage, note=row.name), Cell(roles[row.role]), *_amounts(row.receipt)) for row in ledger.rows
    ]
    totals = [(Cell("This model alone"), Cell(""), *_amounts(ledger.alone))]
    if _has_parent(ledger):
        totals.append((Cell("With its parent"), Cell(""), *_amounts(ledger.with_parents)))
    columns = ("Stage", "Counts as", "FLOPs", "Tokens", "Device time", "Peak memory")
    return Table("Every stage", columns, tuple(rows), tuple(totals), num_words=2)


def _has_parent(ledger: Ledger) -> bool:
    return any(row.role == "parent" for row in ledger.rows)


def _amounts(receipt: Receipt) -> tuple[Cell, ...]:
    return (
        _flops(receipt.flops),
        Cell(numbers.si(receipt.tokens), receipt.tokens),
        Cell(numbers.duration(receipt.device_s), receipt.device_s),
        Cell(numbers.size_in_bytes(receipt.peak_memory_bytes), receipt.peak_memory_bytes),
    )


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
        (Cell("The parent, once"), _flops(family.parent_flops), NOTHING, NOTHING),
        line(whole, family.family_flops, family.alone_flops, family.basis),
    )
    columns = ("Size", "Out of the parent", "Trained alone", "Share")
    return Table("Several sizes out of one parent", columns, rows, totals)


def family_sentence(family: Family) -> str:
    """Which way is cheaper, and from how many sizes on."""
    least = family.break_even
    verdict = (
        "never pays off at these costs: a size out of it costs as much as one trained alone"
        if least is None
        else f"pays off from {numbers.counted(least, 'size')} on"
    )
    basis = "" if family.basis == "measured" else "; training alone is computed from shape and tokens, not measured"
    return (
        f"{numbers.counted(len(family.rows), 'size')} out of one parent cost {numbers.percent(family.share_of_alone)} of "
        f"training each alone, and {numbers.percent(family.share_of_largest)} of the dearest one; the parent {verdict}{basis}."
    )


_PARENT, _OWN = "#56616f", (ORANGE, GREEN, SKY, PINK, SAND)


def cost_bars(ledger: Ledger | None, family: Family | None) -> Figure:
    """FLOPs of every stage: this model alone and with its parent, and a family of sizes against training each alone."""
    bars: list[tuple[str, list[tuple[str, int, str]]]] = []  # name; label, FLOPs and colour of each part
    if ledger is not None:
        own = [row for row in ledger.rows if row.role == "own"]
        parts = [(row.receipt.stage, row.receipt.flops, _OWN[place % len(_OWN)]) for place, row in enumerate(own)]
        bars.append(("this model alone", parts))
        parents = [(row.receipt.stage, row.receipt.flops, _PARENT) for row in ledger.rows if row.role == "parent"]
        if parents:
            bars.append(("with its parent", parents + parts))
    if family is not None:
        num, rows = numbers.counted(len(family.rows), "size"), list(enumerate(family.rows))
        shades, computed = (BLUE, SKY), "" if family.basis == "measured" else "\n(computed)"
        parts = [(row.name, row.own_flops, shades[place % 2]) for place, row in rows]
        bars.append((f"{num} out of\none parent", [("parent", family.parent_flops, _PARENT), *parts]))
        parts = [(row.name, row.alone.flops, shades[place % 2]) for place, row in rows]
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
        alone, whole = ledger.alone.flops, ledger.with_parents.flops
        if _has_parent(ledger):
            share = f", {numbers.percent(alone / whole)} of it" if whole else ""
            text.append(
                f"With its parent this model cost {numbers.si(whole, 'FLOPs')}; what came after the parent cost "
                f"{numbers.si(alone, 'FLOPs')}{share}."
            )
        else:
            text.append(f"This model cost {numbers.si(alone, 'FLOPs')}; it has no parent.")
    if family is not None:
        text.append(family_sentence(family))
    return " ".join(text)
