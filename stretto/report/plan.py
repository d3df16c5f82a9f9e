"""Plan of a run as a figure and a page: memory and time of the best layouts, and what limits each."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stretto.base import numbers
from stretto.base.paths import replacing
from stretto.planner.plan import MOST_SHOWN, Plan, Prediction
from stretto.report import style
from stretto.report.page import Page, Section, render, to_png
from stretto.report.style import INK, MUTED, PINK, SERIES, TEXT_PT

_MEMORY = {
    "weights": "weights", "gradients": "gradients", "optimiser": "optimiser", "activations": "activations", "head": "head",
    "transient": "temporary", "gathered": "gathered", "exchanged": "all-to-all", "teacher": "teachers",
    "snapshot": "copy for snapshots", "cache": "KV cache",
}  # fmt: skip
_SMALL = 0.05
"""Share of an accelerator's memory below which bars would be too short to read beside it."""
_COLOURS = (*SERIES, PINK, MUTED, "#7a5195", "#2f4b7c")


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
        headline = f"{best.name}: {numbers.duration(best.step_s)} a step, {numbers.rounded(best.gpu_hours)} {plan.hours_name}; limited by {best.limit}."
        caption = "Peak memory and time of a step of the best layouts."
        section = Section("plan", "Layouts", caption, lambda: plan_figure(plan), "stacked bars", (plan.table,))
        page = Page(plan.recipe, headline, (plan.title, *plan.notes), (section,), plan.origins, "")
        temporary.write_text(render(page, {"plan": png}), encoding="utf-8")
