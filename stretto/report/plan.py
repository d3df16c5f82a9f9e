"""Plan of a run as a table, a figure and a page: memory and time of the best layouts, and what limits each."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stretto.base import numbers
from stretto.base.paths import replacing
from stretto.planner.plan import Plan, Prediction
from stretto.report import style
from stretto.report.page import NOTHING, Cell, Page, Section, Table, render, to_png
from stretto.report.style import INK, MUTED, PINK, SERIES, TEXT_PT

MOST_SHOWN = 6
"""Layouts in the table and in the figure."""
_MEMORY = {
    "weights": "weights", "gradients": "gradients", "optimiser": "optimiser", "activations": "activations", "head": "head",
    "transient": "temporary", "gathered": "gathered", "exchanged": "all-to-all", "teacher": "teachers",
    "snapshot": "copy for snapshots", "cache": "KV cache",
}  # fmt: skip
_SMALL = 0.05
"""Share of an accelerator's memory below which bars would be too short to read beside it."""
_COLOURS = (*SERIES, PINK, MUTED, "#7a5195", "#2f4b7c")


def plan_table(plan: Plan) -> Table:
    """The best layouts, fastest first."""
    rows = tuple(_line(plan, each) for each in plan.predictions[:MOST_SHOWN])
    columns: tuple[str, ...] = ("Layout", "Fits", "Limit", "Memory", "Step", "Tokens/s", _hours(plan))
    if plan.best.dollars is not None:
        columns = (*columns, "Dollars")
    return Table(title(plan), columns, rows, note=" ".join([*plan.notes, origins(plan)]), num_words=3)


def _hours(plan: Plan) -> str:
    return "GPU-hours" if plan.cluster.hardware.is_gpu else "Core-hours"


def title(plan: Plan) -> str:
    sizes = f"{numbers.params(plan.params)} parameters, {numbers.params(plan.active_params)} active"
    status = "measured efficiencies" if plan.is_measured else "predicted"
    return f"{plan.recipe} on {plan.cluster}: {status} ({sizes}, {plan.dtype}, {plan.steps:,} steps)"


def origins(plan: Plan) -> str:
    """The log entry behind each efficiency."""
    known = [f"{name}: measured, “{source}”" for name, source in plan.sources.items() if source]
    assumed = [name for name, source in plan.sources.items() if not source]
    text = "; ".join(
        [*known, f"assumed, never measured on this hardware: {numbers.listed(assumed)}" if assumed else ""]
    )
    return f"Efficiencies: {text.rstrip('; ')}."


def _line(plan: Plan, each: Prediction) -> tuple[Cell, ...]:
    cells = (
        Cell(each.name),
        Cell("yes" if each.fits else "NO"),
        Cell(each.limit),
        Cell(f"{numbers.size_in_bytes(each.peak)}", each.peak, f"of {numbers.size_in_bytes(each.available)}"),
        Cell(numbers.duration(each.step_s), each.step_s),
        Cell(numbers.si(each.tokens_per_s), each.tokens_per_s),
        Cell(numbers.rounded(each.gpu_hours), each.gpu_hours),
    )
    if plan.best.dollars is None:
        return cells
    return *cells, NOTHING if each.dollars is None else Cell(numbers.rounded(each.dollars), each.dollars)


def plan_figure(plan: Plan) -> Figure:
    """Stacked bars of the best layouts: memory of the fullest accelerator, and time of a step."""
    shown = plan.predictions[:MOST_SHOWN]
    figure = style.blank(15.0, 3.2 + 0.75 * len(shown))
    memory, time = figure.subplots(1, 2, sharey=True)
    available = shown[0].available
    is_small = max(each.memory.total for each in shown) < _SMALL * available
    unit, name = (2**20, "MiB") if is_small else (2**30, "GiB")
    style.dress(memory, f"Memory of a rank, {plan.cluster}", name, "", grid="x")
    _bars(memory, [{label: getattr(each.memory, part) / unit for part, label in _MEMORY.items()} for each in shown])
    limit = "dashed: what an accelerator has"
    if is_small:
        limit = f"an accelerator has {numbers.size_in_bytes(available)}"
    else:
        memory.axvline(available / unit, color=INK, linewidth=1.4, linestyle=(0, (3, 2)), zorder=4)
    style.subtitle(memory, [limit, "trainer" if plan.kind == "rl" else "the peak of a step"])
    style.dress(time, "Time of a step", "seconds", "", grid="x")
    _bars(time, [_times(each) for each in shown])
    style.subtitle(time, ["measured efficiencies" if plan.is_measured else "predicted: not measured on this hardware"])
    memory.set_yticks(range(len(shown)), [_two_lines(each) for each in shown], fontsize=TEXT_PT - 1, color=INK)
    memory.invert_yaxis()
    return figure


def _two_lines(each: Prediction) -> str:
    """The layout, and below it what limits it."""
    return f"{each.name}\nlimit: {each.limit}"


def _times(each: Prediction) -> dict[str, float]:
    """Seconds of a step by part; what overlaps with computing is not drawn, unless it takes longer."""
    return each.step.parts | {"waits for samples": max(0.0, each.step_s - each.step.total)}


def _bars(axes: Axes, rows: list[dict[str, float]]) -> None:
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]
    for colour, name in zip(_COLOURS, names, strict=False):
        lefts = [sum(row.get(before, 0.0) for before in names[: names.index(name)]) for row in rows]
        widths = [row.get(name, 0.0) for row in rows]
        axes.barh(
            range(len(rows)), widths, left=lefts, height=0.6, color=colour, edgecolor="white", label=name, zorder=2
        )
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.13), ncols=4, frameon=False, fontsize=TEXT_PT - 2)


def write_plan(plan: Plan, path: Path) -> None:
    """Write the figure (``.png``), or the page with it (``.html``). Raises `UserError`: the file cannot be written."""
    png = to_png(plan_figure(plan))
    with replacing(path) as temporary:
        if path.suffix.lower() == ".png":
            temporary.write_bytes(png)
            return
        best = plan.best
        headline = f"{best.name}: {numbers.duration(best.step_s)} a step, {numbers.rounded(best.gpu_hours)} {_hours(plan)}; limited by {best.limit}."
        caption = "Peak memory and time of a step of the best layouts."
        section = Section("plan", "Layouts", caption, lambda: plan_figure(plan), "stacked bars", (plan_table(plan),))
        page = Page(plan.recipe, headline, (title(plan), *plan.notes), (section,), origins(plan), "")
        temporary.write_text(render(page, {"plan": png}), encoding="utf-8")
