"""The tables of a report: sizes, what a model cost with and without its parent, a family of sizes, the mixture."""

from __future__ import annotations

from rich.table import Table

from stretto.base.receipt import Family, Ledger
from stretto.base.records import Receipt
from stretto.evals import numbers
from stretto.evals.report_data import ReportData, Size
from stretto.evals.sheet import NOTHING, Cell, Column, Sheet, to_rich


def summary_table(data: ReportData) -> Table:
    """Every size with what it costs and how well it predicts, for the console."""
    return to_rich(size_sheet(data))


def ledger_table(ledger: Ledger) -> Table:
    """Every stage of a model's history, and its cost alone and with its parents."""
    return to_rich(ledger_sheet(ledger))


def family_table(family: Family) -> Table:
    """Several sizes out of one parent against training each alone."""
    return to_rich(family_sheet(family))


def size_sheet(data: ReportData) -> Sheet:
    columns = (
        Column("Size", is_number=False),
        Column("Total"),
        Column("Active"),
        Column("FLOPs"),
        Column("KV"),
        Column("Latency"),
        Column("Zero-shot"),
        Column("Healed"),
    )
    return Sheet(
        "Sizes: FLOPs and cache a token, held-out loss in nats",
        columns,
        tuple(_size_row(size, data.full) for size in data.sizes),
    )


def _size_row(size: Size, full: Size) -> tuple[Cell, ...]:
    def share(own: int, whole: int) -> str:
        return "" if size is full else numbers.percent(own / whole)

    def loss(nll: float | None) -> Cell:
        if nll is None:
            return NOTHING
        versus = "" if size is full or full.nll is None else numbers.difference(nll - full.nll)
        return Cell(numbers.loss(nll), nll, versus)

    latency = size.latency_ms
    return (
        Cell(size.name, note=size.label),
        Cell(numbers.params(size.total_params), size.total_params, share(size.total_params, full.total_params)),
        Cell(numbers.params(size.active_params), size.active_params, share(size.active_params, full.active_params)),
        Cell(
            numbers.si(size.flops_per_token),
            size.flops_per_token,
            share(size.flops_per_token, full.flops_per_token),
        ),
        Cell(
            numbers.size_in_bytes(size.kv_bytes_per_token),
            size.kv_bytes_per_token,
            share(size.kv_bytes_per_token, full.kv_bytes_per_token),
        ),
        NOTHING if latency is None else Cell(numbers.milliseconds(latency), latency),
        loss(size.nll),
        loss(size.healed_nll),
    )


def ledger_sheet(ledger: Ledger) -> Sheet:
    columns = (
        Column("Stage", is_number=False),
        Column("Counts as", is_number=False),
        Column("FLOPs"),
        Column("Tokens"),
        Column("Device time"),
        Column("Peak memory"),
    )
    roles = {"parent": "parent", "own": "this model"}
    rows = tuple(
        (Cell(row.receipt.stage, note=row.name), Cell(roles[row.role]), *_receipt_cells(row.receipt))
        for row in ledger.rows
    )
    totals = [(Cell("This model alone"), Cell(""), *_receipt_cells(ledger.alone))]
    if any(row.role == "parent" for row in ledger.rows):
        totals.append((Cell("With its parent"), Cell(""), *_receipt_cells(ledger.with_parents)))
    return Sheet("Cost", columns, rows, tuple(totals))


def _receipt_cells(receipt: Receipt) -> tuple[Cell, ...]:
    return (
        Cell(numbers.si(receipt.flops, "FLOPs"), receipt.flops),
        Cell(numbers.si(receipt.tokens), receipt.tokens),
        Cell(numbers.duration(receipt.device_s), receipt.device_s),
        Cell(numbers.size_in_bytes(receipt.peak_memory_bytes), receipt.peak_memory_bytes),
    )


def family_sheet(family: Family) -> Sheet:
    columns = (Column("Size", is_number=False), Column("Out of the parent"), Column("Trained alone"), Column("Share"))
    rows = tuple(
        (
            Cell(row.name),
            Cell(numbers.si(row.own_flops, "FLOPs"), row.own_flops),
            Cell(numbers.si(row.alone.flops, "FLOPs"), row.alone.flops, row.alone.basis),
            _share(row.own_flops, row.alone.flops),
        )
        for row in family.rows
    )
    parent = (
        Cell("The parent, once"),
        Cell(numbers.si(family.parent_flops, "FLOPs"), family.parent_flops),
        NOTHING,
        NOTHING,
    )
    together = (
        Cell(f"All {len(family.rows)} together" if len(family.rows) > 1 else "Together"),
        Cell(numbers.si(family.family_flops, "FLOPs"), family.family_flops),
        Cell(numbers.si(family.alone_flops, "FLOPs"), family.alone_flops, family.basis),
        _share(family.family_flops, family.alone_flops),
    )
    return Sheet("Family", columns, rows, (parent, together))


def _share(part: int, whole: int) -> Cell:
    return Cell(numbers.percent(part / whole), part / whole) if whole else NOTHING


def family_sentence(family: Family) -> str:
    """Which way is cheaper, and from how many sizes on."""
    num = numbers.counted(len(family.rows), "size")
    least = family.break_even
    verdict = (
        "never pays off at these costs: a size out of it costs as much as one trained alone"
        if least is None
        else f"pays off from {numbers.counted(least, 'size')} on"
    )
    basis = "" if family.basis == "measured" else "; training alone is computed from shape and tokens, not measured"
    return (
        f"{num} out of one parent cost {numbers.percent(family.share_of_alone)} of training each alone, and "
        f"{numbers.percent(family.share_of_largest)} of the dearest one; the parent {verdict}{basis}."
    )


def mixture_sheet(data: ReportData) -> Sheet:
    """What the sampler was asked for and what it drew, as shares of the training tokens."""
    columns = (Column("Trained as", is_number=False), Column("Configured"), Column("Drawn"))
    kinds = list(dict.fromkeys([*data.mixture_configured, *data.mixture_drawn]))

    def cell(share: float | None) -> Cell:
        return NOTHING if share is None else Cell(f"{100 * share:.1f} %", share)

    rows = tuple(
        (Cell(kind), cell(data.mixture_configured.get(kind)), cell(data.mixture_drawn.get(kind))) for kind in kinds
    )
    return Sheet("Mixture", columns, rows)
