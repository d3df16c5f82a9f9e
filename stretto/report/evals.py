"""Report of an evaluation of one model: scores, trivial baselines, cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from stretto.base.numbers import counted, duration, params, percent, rounded, si
from stretto.base.records import git_commit
from stretto.base.table import NOTHING, Cell, Table
from stretto.evals.scores import LEVEL
from stretto.post.panel import Chapters, Panel
from stretto.post.suite import Evaluation
from stretto.report import style
from stretto.report.cells import (
    BASELINE_NAMES,
    INFRA,
    INTERVALS,
    MEASURE_NAMES,
    ends_text,
    interval_text,
    measures_of,
    number_cell,
    share_cell,
    strongest_baseline,
)
from stretto.report.page import Page, Section
from stretto.report.style import BLUE, INK, LABEL_PT, ORANGE


def score_table(found: Evaluation) -> Table:
    """A row for each domain."""
    nums = {max(result.pass_at) for result in found.domains.values() if result.pass_at}
    most = max(nums) if len(nums) == 1 else "k"  # in multiple choice, answers to all orders are samples of the problem
    several = (f"pass@{most}", f"pass^{most}", f"maj@{most}") if max(nums, default=1) > 1 else ()
    rows = []
    for name, result in found.domains.items():
        cells = [share_cell(result.score)]
        for of in (result.pass_at, result.pass_hat, result.majority_at) if several else ():
            cells.append(share_cell(of.get(max(result.pass_at, default=0))))
        found_best = strongest_baseline(result)
        cells.append(share_cell(found_best[1], found_best[0]) if found_best else NOTHING)
        cells.append(Cell(f"{result.num_infra}", result.num_infra))
        num_long = result.finishes.get("prompt", 0)
        long = f"{counted(num_long, 'sample')} with score 0: the prompt is longer than the network's context"
        notes = ["mean reward"] * result.is_graded + [long] * bool(num_long)
        rows.append((Cell(name, note=", ".join(notes)), *cells))
    columns = ("Domain", "Score", *several, "Trivial baseline", "Infra errors")
    best = [each[1].value for result in found.domains.values() if (each := strongest_baseline(result))]
    mean = float(np.mean(best)) if best and len(best) == len(rows) else None
    trivial = NOTHING if mean is None else Cell(percent(mean), mean, "best of each domain")
    total = (Cell("Mean of domains"), share_cell(found.mean), *[NOTHING] * len(several), trivial, NOTHING)
    return Table("Scores", columns, tuple(rows), (total,) if len(rows) > 1 else (), f"{INTERVALS} {INFRA}")


def asked_table(found: Evaluation) -> Table:
    """Settings of each domain (prompt format, number of problems and samples, temperature), and length and cost of its answers."""
    rows = []
    for name, result in found.domains.items():
        suite = found.asked["suites"][result.suite]
        source = suite["sources"][name]
        marker = source["args"].get("format") if isinstance(source, dict) else None
        temperature = suite["temperature"]
        rows.append(
            (
                Cell(name, note="greedy decoding" if temperature == 0 else ""),
                Cell(", ".join(filter(None, (found.asked["prompt"], marker)))),
                Cell(f"{len(result.items)}", len(result.items)),
                Cell(f"{suite['samples']}", suite["samples"]),
                Cell(f"{temperature:g}", temperature),
                Cell(f"{result.num_off_format}", result.num_off_format),
                number_cell(result.num_tokens),
                Cell(si(result.flops, "FLOPs"), result.flops, "computed"),
            )
        )
    columns = ("Domain", "Prompt", "Problems", "Samples", "Temperature", "Off-format", "Tokens", "FLOPs")
    note = (
        "Samples: per problem. Off-format: answers, correct or not, without the marker that the prompt asks for; their last line is scored. "
        "Tokens and FLOPs: per sample. Prompts of Stretto's own suites are 0-shot."
    )
    for name, suite in found.asked["suites"].items():
        if "sample_s" in suite:
            limits = f"{suite['max_tokens']} tokens per turn and {suite['sample_s']:,} s per sample"
            note += f" Limits of {name} beside the benchmark's own: {limits}."
    return Table("Settings", columns, tuple(rows), note=note, num_words=2, optional=("FLOPs", "Tokens"))


def panel_table(found: Sequence[Panel]) -> Table:
    """Measures of open-ended answers, a row for each domain."""
    names = list(dict.fromkeys(name for each in found for name in each.measures))
    rows = [
        (
            Cell(each.domain, note=_missing(each)),
            *(number_cell(each.measures[name].value if name in each.measures else None) for name in names),
            share_cell(each.kept),
        )
        for each in found
    ]
    note = "distinct-k, Vendi, clusters and distinct-2 compare the answers to one prompt; the other measures are means over answers."
    columns = ("Domain", *(name.replace("_", "-") for name in names), "Constraints kept")
    return Table("Writing", columns, tuple(rows), (), note)


def overused_table(found: Panel) -> Table:
    """Word trigrams that answers use more often than human texts do."""
    rows = [(Cell(each.ngram), number_cell(each.answers), number_cell(each.people)) for each in found.overused]
    return Table(f"Overused in {found.domain}", ("Words", "Per 10,000 words", "Human texts"), tuple(rows))


def _missing(found: Panel) -> str:
    short = found.chapters.num_short if found.chapters else 0
    return ", ".join([f"{found.num_empty} empty"] * bool(found.num_empty) + [f"{short} end early"] * bool(short))


def chapters_table(domain: str, found: Chapters) -> Table:
    """Measures of long answers by chapter, a row for each measure."""
    rows = [
        (
            Cell(name.replace("_", "-")),
            *(number_cell(value) for value in values),
            Cell(rounded(change.value), change.value, ends_text(change, rounded)),
        )
        for (name, values), change in zip(found.measures.items(), found.changes.values(), strict=True)
    ]
    num = len(next(iter(found.measures.values()), []))
    note = f"Means over answers with all chapters; {found.num_short} answers have fewer."
    columns = ("Chapter", *map(str, range(1, num + 1)), "Last − first")
    return Table(f"Chapters of {domain}", columns, tuple(rows), (), note)


def baseline_table(found: Evaluation) -> Table:
    """Scores of all trivial baselines, a row for each kind."""
    rows = [
        (Cell(name), Cell(BASELINE_NAMES.get(kind, kind)), share_cell(score))
        for name, result in found.domains.items()
        for kind, score in result.baselines.items()
    ]
    return Table("Trivial baselines", ("Domain", "Baseline", "Score"), tuple(rows))


def place_table(found: Evaluation) -> Table:
    """Multiple choice: how often each option position is chosen, and how often it is correct."""
    rows, biases = [], []
    for name, result in found.domains.items():
        for place, each in result.places.items():
            shares = Cell(percent(each.chosen), each.chosen), Cell(percent(each.right), each.right)
            recall = NOTHING if each.recall is None else Cell(percent(each.recall))
            rows.append((Cell(name), Cell(place), *shares, recall))
        if result.places:
            moved = sum(abs(each.chosen - each.right) for each in result.places.values()) / 2
            biases.append(f"{name} {percent(moved)}")
    note = "Position bias (half the sum of |chosen − correct|): " + ", ".join(biases)
    return Table("Option positions", ("Domain", "Position", "Chosen", "Correct", "Recall"), tuple(rows), (), note)


def answers_table(found: Evaluation) -> Table:
    """Diversity of the answers to one problem, their length, and their finish reasons."""
    rows = []
    for name, result in found.domains.items():
        measured = measures_of(result)
        ends = ", ".join(f"{why} {num}" for why, num in sorted(result.finishes.items()))
        rows.append((Cell(name), *(number_cell(measured.get(each)) for each in MEASURE_NAMES), Cell(ends)))
    note = (
        "Diversity of the answers to one problem; similarity by character trigrams. Finish reason prompt: no answer, because the prompt is "
        "longer than the network's context."
    )
    return Table("Answers", ("Domain", *MEASURE_NAMES.values(), "Finish reasons"), tuple(rows), (), note)


def cost_table(found: Evaluation) -> Table:
    cost = found.cost
    cells = (
        Cell(found.name),
        Cell(params(cost.total_params), cost.total_params),
        Cell(params(cost.active_params), cost.active_params),
        Cell(si(cost.flops_per_token, "FLOPs"), cost.flops_per_token, "computed"),
        Cell(si(cost.num_sampled), cost.num_sampled, f"prompt {si(cost.num_prompt)}"),
        Cell(duration(cost.seconds), cost.seconds),
    )
    columns = ("Model", "Parameters", "Active", "FLOPs per token", "Tokens generated", "Time")
    note = "FLOPs: forward, with attention over half of a sample's length on average; of a harness, whose lengths are unknown, without attention."
    return Table("Cost", columns, (cells,), note=note)


def score_bars(found: Evaluation) -> Figure:
    """Each domain's score with its confidence interval, pass^k and pass@k, and the best trivial baseline."""
    names = list(found.domains)
    figure = style.blank(9.0, 1.7 + 0.62 * len(names))
    axes = style.dress(figure.subplots(), f"{found.name}: scores by domain", "%", "", grid="x")
    for place, result in enumerate(found.domains.values()):
        score, best = result.score, strongest_baseline(result)
        axes.barh(place, 100 * score.value, height=0.5, color=BLUE)
        axes.plot([100 * score.low, 100 * score.high], [place, place], color=INK, linewidth=1.6)
        for of, mark in ((result.pass_hat, "<"), (result.pass_at, ">")):
            if (most := max(of, default=1)) > 1:
                axes.plot(100 * of[most].value, place, mark, color=INK, markersize=7)
        if best is not None:
            axes.plot([100 * best[1].value] * 2, [place - 0.36, place + 0.36], color=ORANGE, linewidth=3.0)
    axes.set_yticks(range(len(names)), names, fontsize=LABEL_PT, color=INK, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    legend = [
        f"line: {percent(LEVEL)} confidence interval",
        "◂ pass^k: all samples correct, ▸ pass@k: any sample correct",
        "orange: best trivial baseline",
    ]
    style.subtitle(axes, legend)
    return figure


def evaluation_page(found: Evaluation) -> Page:
    best = {
        name: each[1].value if (each := strongest_baseline(result)) else 0.0 for name, result in found.domains.items()
    }
    idle = [name for name, result in found.domains.items() if result.score.low <= best[name]]
    num = counted(len(found.domains), "domain")
    headline = f"{found.name} scores {percent(found.mean.value)} ({interval_text(found.mean)}) on average over {num}."
    if idle:
        headline += f" Not clearly above the trivial baseline: {', '.join(idle)}."
    total, active = params(found.cost.total_params), params(found.cost.active_params)
    facts = (f"{total} parameters, {active} of them active",)
    tables = [score_table(found), asked_table(found), baseline_table(found)]
    if any(result.places for result in found.domains.values()):
        tables.append(place_table(found))
    sections = (
        Section("scores", "Scores", headline, lambda: score_bars(found), "bars", tuple(tables)),
        Section("answers", "Answers", tables=(answers_table(found),)),
        Section("cost", "Cost", tables=(cost_table(found),)),
    )
    return Page(found.name, headline, facts, sections, f"commit {git_commit() or 'unknown'}", str(found.asked))


# Models against each other
