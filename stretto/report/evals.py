"""Evaluations on a page: scores beside what knowing nothing scores and what it costs; and models against each other, paired."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from stretto.base.config import differences
from stretto.base.errors import UserError
from stretto.base.numbers import counted, duration, params, percent, rounded, si
from stretto.base.records import git_commit
from stretto.evals.diversity import MEASURES
from stretto.evals.scores import LEVEL, Interval, Norm, interval, norm, resampled, share_interval
from stretto.post.suite import BASELINES, DomainResult, Evaluation
from stretto.report import style
from stretto.report.page import NOTHING, Cell, Page, Section, Table
from stretto.report.style import BLUE, INK, LABEL_PT, MUTED, ORANGE, SERIES, Label

_READ = f"Ranges hold {LEVEL:.0%} of what other problems of the same kind would give."
_WORDS = {"empty": "nothing", "constant": "always 0", "frequent": "most frequent", "another": "another's"}
_MEASURES = {name: name.replace("_", "-") for name in MEASURES} | {"entropy": "entropy, nats", "num_tokens": "tokens"}
"""What is told of answers, and how columns are headed."""


def _range(found: Interval) -> str:
    if not math.isfinite(found.low + found.high):
        return "undetermined"
    return f"{percent(found.low).removesuffix(' %')} … {percent(found.high)}"


def _share(found: Interval | None, note: str = "") -> Cell:
    return NOTHING if found is None else Cell(percent(found.value), found.value, note or _range(found))


def _number(value: float | None) -> Cell:
    return NOTHING if value is None else Cell(rounded(value), value)


def _signed(found: Interval) -> str:
    low, value, high = (f"{100 * each:+.1f}".replace("-", "−") for each in (found.low, found.value, found.high))
    return f"{value} ({low} … {high})"


def _measured(result: DomainResult) -> dict[str, float]:
    """By names of `_MEASURES`, where it was measured."""
    own = {name: found.value for name, found in result.diversity.items()}
    return own | {"entropy": result.entropy, "num_tokens": result.num_tokens}


def _ignorant(result: DomainResult) -> tuple[str, Interval] | None:
    """The best of the answers that know nothing of the problem."""
    return max(result.baselines.items(), key=lambda each: each[1].value, default=None)


def score_table(found: Evaluation) -> Table:
    """A row for each domain."""
    most = found.asked["samples"]
    several = (f"pass@{most}", f"maj@{most}") if most > 1 else ()
    rows = []
    for name, result in found.domains.items():
        cells = [
            _share(result.score),
            *(_share(of.get(most)) for of in (result.pass_at, result.majority_at) if several),
        ]
        best = _ignorant(result)
        cells.append(_share(best[1], _WORDS[best[0]]) if best else NOTHING)
        unjudged = f"{result.num_infra} samples unjudged" if result.num_infra else ""
        cells.append(Cell(f"{len(result.items)}", len(result.items), unjudged))
        rows.append((Cell(name, note="mean reward" if result.is_graded else ""), *cells))
    columns = ("Domain", "Score", *several, "Knowing nothing", "Problems")
    total = (Cell("Mean of domains"), _share(found.mean), *[NOTHING] * (len(columns) - 2))
    return Table("Scores", columns, tuple(rows), (total,) if len(rows) > 1 else (), _READ)


def baseline_table(found: Evaluation) -> Table:
    """What answers score that know nothing of the problem."""
    rows = [
        (Cell(name), *(_share(result.baselines.get(kind)) for kind in BASELINES))
        for name, result in found.domains.items()
        if result.baselines
    ]
    return Table("Knowing nothing", ("Domain", *(_WORDS[kind] for kind in BASELINES)), tuple(rows))


def answers_table(found: Evaluation) -> Table:
    """How different the answers to one problem are, how long, and how they ended."""
    rows = []
    for name, result in found.domains.items():
        measured = _measured(result)
        ends = ", ".join(f"{why} {num}" for why, num in sorted(result.finishes.items()))
        rows.append((Cell(name), *(_number(measured.get(each)) for each in _MEASURES), Cell(ends)))
    embedder = found.asked.get("embed")
    by = f"hidden states of {embedder}" if embedder else "counts of three letters in a row"
    note = f"Of the answers to one problem; alike by {by}."
    return Table("Answers", ("Domain", *_MEASURES.values(), "ended by"), tuple(rows), (), note)


def cost_table(found: Evaluation) -> Table:
    cost = found.cost
    cells = (
        Cell(found.name),
        Cell(params(cost.total_params), cost.total_params),
        Cell(params(cost.active_params), cost.active_params),
        Cell(si(cost.flops_per_token, "FLOPs"), cost.flops_per_token, "computed"),
        Cell(si(cost.num_sampled), cost.num_sampled, f"after {si(cost.num_prompt)}"),
        Cell(duration(cost.seconds), cost.seconds),
    )
    columns = ("Model", "Parameters", "Active", "A token", "Tokens written", "Time")
    return Table("What the scores cost", columns, (cells,))


def score_bars(found: Evaluation) -> Figure:
    """Each domain's score with its range, and the best that knowing nothing scores."""
    names = list(found.domains)
    figure = style.blank(9.0, 1.7 + 0.62 * len(names))
    axes = style.dress(figure.subplots(), f"{found.name}: scores by domain", "%", "", grid="x")
    for place, result in enumerate(found.domains.values()):
        score, best = result.score, _ignorant(result)
        axes.barh(place, 100 * score.value, height=0.5, color=BLUE)
        axes.plot([100 * score.low, 100 * score.high], [place, place], color=INK, linewidth=1.6)
        if best is not None:
            axes.plot([100 * best[1].value] * 2, [place - 0.36, place + 0.36], color=ORANGE, linewidth=3.0)
    axes.set_yticks(range(len(names)), names, fontsize=LABEL_PT, color=INK, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    style.subtitle(axes, [f"line: {LEVEL:.0%} range", "orange: the best of answers that know nothing of the problem"])
    return figure


def evaluation_page(found: Evaluation) -> Page:
    best = {name: each[1].value if (each := _ignorant(result)) else 0.0 for name, result in found.domains.items()}
    idle = [name for name, result in found.domains.items() if result.score.low <= best[name]]
    num = counted(len(found.domains), "domain")
    headline = f"{found.name} scores {percent(found.mean.value)} ({_range(found.mean)}) on the mean of {num}."
    if idle:
        headline += f" Not clearly above answers that know nothing of the problem: {', '.join(idle)}."
    total, active = params(found.cost.total_params), params(found.cost.active_params)
    facts = f"{total} parameters, {active} of them active", f"{found.asked['samples']} samples a problem"
    tables = score_table(found), baseline_table(found)
    sections = (
        Section("scores", "Scores", headline, lambda: score_bars(found), "bars", tables),
        Section("answers", "Answers", tables=(answers_table(found),)),
        Section("cost", "Cost", tables=(cost_table(found),)),
    )
    return Page(found.name, headline, facts, sections, f"commit {git_commit() or 'unknown'}", str(found.asked))


# Models against each other


@dataclass(frozen=True, slots=True)
class Comparison:
    """Models on the same problems. Written by `compare`."""

    models: list[str]
    """The first is what the others are compared with."""
    scores: dict[str, list[Interval]]
    """By domain, of each model."""
    differences: dict[str, list[Interval]]
    """To the first, paired."""
    means: list[Interval]
    """Over domains."""
    kept: list[Interval]
    """Of the first one's score, the mean over domains; undetermined where that is 0."""
    answers: dict[str, list[float | None]]
    """Mean over domains of what is measured of answers, by its name; None: measured by other similarities than the first's."""
    teachers: dict[str, tuple[str, Interval]]
    """By domain: the name of the one who taught it, and its score."""
    norms: list[Norm | None]
    """Of each model; None where there is none to be had."""
    refusal: str
    """Why there is none; empty: there is."""
    flops_per_token: list[float]

    @property
    def worst(self) -> list[str]:
        """Of each model, the domain that lost most or gained least."""
        return [
            min(self.differences, key=lambda name: self.differences[name][place].value)
            for place in range(len(self.models))
        ]


def compare(models: Sequence[Evaluation], teachers: Mapping[str, Evaluation], seed: int = 0) -> Comparison:
    """``models`` on the problems that all of them answered, each domain's teacher too; ``teachers`` by domain.

    Raises:
        UserError: a teacher of no domain, evaluations that asked differently, or that have no problem in common.
    """
    names = [name for name in models[0].domains if all(name in model.domains for model in models)]
    if absent := sorted(set(teachers) - set(names)):
        raise UserError(f"--teacher {absent[0]}: no such domain in all evaluations; they have {', '.join(names)}")
    values = {}
    for name in names:
        rows = [*models, *([teachers[name]] if name in teachers else [])]
        for other in rows[1:]:
            _check_asked(name, rows[0], other)
        known = [dict(zip(each.domains[name].items, each.domains[name].values, strict=True)) for each in rows]
        items = [item for item in known[0] if all(item in each for each in known)]
        values[name] = np.array([[each[item] for item in items] for each in known], np.float64)
    means = resampled(values, seed=seed)
    nums = {name: int((~np.isnan(values[name]).any(0)).sum()) for name in names}
    scores = {name: [share_interval(column, nums[name]) for column in means[name].T] for name in names}
    places, refusal = range(len(models)), ""
    norms: list[Norm | None] = [None] * len(models)
    if teachers:
        try:
            norms = [norm(means, place, 0, dict.fromkeys(teachers, len(models))) for place in places]
        except UserError as refused:
            refusal = str(refused)

    def over_domains(of: Callable[[np.ndarray, int], np.ndarray]) -> list[Interval]:
        return [interval(np.mean([of(means[name], place) for name in names], axis=0)) for place in places]

    return Comparison(
        models=[model.name for model in models],
        scores={name: scores[name][: len(models)] for name in names},
        differences={name: [interval(means[name][:, place] - means[name][:, 0]) for place in places] for name in names},
        means=over_domains(lambda means_RM, place: means_RM[:, place]),
        kept=over_domains(_ratio),
        answers={measure: _answers(measure, models, names) for measure in _MEASURES},
        teachers={name: (teachers[name].name, scores[name][-1]) for name in teachers},
        norms=norms,
        refusal=refusal,
        flops_per_token=[model.cost.flops_per_token for model in models],
    )


def _ratio(means_RM: np.ndarray, place: int) -> np.ndarray:
    first_R = means_RM[:, 0]
    return np.divide(means_RM[:, place], first_R, out=np.full_like(first_R, np.nan), where=first_R > 0)


def _answers(measure: str, models: Sequence[Evaluation], names: Sequence[str]) -> list[float | None]:
    means: list[float | None] = []
    for model in models:
        values = [own[measure] for name in names if measure in (own := _measured(model.domains[name]))]
        is_like = measure not in ("vendi", "clusters") or model.asked.get("embed") == models[0].asked.get("embed")
        means.append(float(np.mean(values)) if len(values) == len(names) and is_like else None)
    return means


def _check_asked(name: str, first: Evaluation, other: Evaluation) -> None:
    """Raises `UserError`: the two were not asked the same of the domain ``name``."""
    if name not in other.domains:
        raise UserError(f"{other.name}: {name}: not evaluated; evaluate it with the same --suite")
    told = []
    for each in (first, other):
        suite = dict(each.asked["suites"][each.domains[name].suite])
        told.append(suite | {"sources": suite["sources"][name], "problems": 0})
    if differs := differences(*told):
        field, (before, after) = next(iter(differs.items()))
        raise UserError(f"{other.name}: {name}: {field} was {after!r}, of {first.name} {before!r}; evaluate them alike")


def comparison_table(found: Comparison) -> Table:
    """The seesaw: a row for each domain, a column for each model, its teacher at the end."""

    def row(label: str, note: str, cells: Iterable[Cell], teacher: Cell = NOTHING) -> tuple[Cell, ...]:
        return (Cell(label, note=note), *cells, *([teacher] if found.teachers else []))

    rows = []
    for name, scores in found.scores.items():
        notes = ["", *map(_signed, found.differences[name][1:])]
        taught = found.teachers.get(name)
        teacher = _share(taught[1], taught[0]) if taught else NOTHING
        rows.append(row(name, "", map(_share, scores, notes), teacher))
    totals = [
        row("Mean of domains", "", map(_share, found.means)),
        row("Kept", "of the first's, mean of domains", [NOTHING, *map(_share, found.kept[1:])]),
        row("Worst domain", "by its difference", [NOTHING, *map(Cell, found.worst[1:])]),
    ]
    if any(found.norms):
        totals.append(row("Norm", "of the teachers' lead", [NOTHING, *map(_lead, found.norms[1:])]))
    columns = ("Domain", *found.models, *(["its teacher"] if found.teachers else []))
    note = f"{_READ} Differences, in points, are to {found.models[0]} on the same problems."
    return Table("Every domain, every stage", columns, tuple(rows), tuple(totals), f"{note} {found.refusal}".strip())


def _lead(found: Norm | None) -> Cell:
    if found is None:
        return NOTHING
    mean, least = found.mean, rounded(found.domains[found.worst].value)
    note = f"{rounded(mean.low)} … {rounded(mean.high)}; least {found.worst} {least}"
    return Cell(rounded(mean.value), mean.value, note)


def compared_answers(found: Comparison) -> Table:
    """How different, sure and long the answers to one problem are, of every model."""
    rows = [(Cell(_MEASURES[measure]), *map(_number, values)) for measure, values in found.answers.items()]
    return Table("Answers, mean of domains", ("", *found.models), tuple(rows))


def seesaw(found: Comparison) -> Figure:
    """A line for each domain over the models, its teacher's score dashed."""
    figure = style.blank(10.0, 5.6)
    axes = style.dress(figure.subplots(), "Every domain, every stage", "", "score, %", grid="y")
    ends = []
    for place, (name, scores) in enumerate(found.scores.items()):
        colour, x = SERIES[place % len(SERIES)], np.arange(len(scores)) + 0.03 * place
        y = np.array([100 * score.value for score in scores])
        spread = np.array([[score.value - score.low, score.high - score.value] for score in scores]).T * 100
        axes.errorbar(x, y, spread, color=colour, marker="o", linewidth=2.0, elinewidth=1.0, capsize=3)
        if name in found.teachers:
            axes.axhline(100 * found.teachers[name][1].value, color=colour, linewidth=1.0, linestyle=(0, (5, 4)))
        ends.append(Label(x[-1], y[-1], name, colour))
    axes.set_xticks(range(len(found.models)), found.models, fontsize=LABEL_PT, color=INK, parse_math=False)
    axes.margins(x=0.08)
    style.subtitle(axes, [f"bars: {LEVEL:.0%} ranges", *(["dashed: the domain's teacher"] if found.teachers else [])])
    style.name_ends((axes, ends))
    return figure


def score_by_cost(found: Comparison) -> Figure:
    """The mean score of each model against the FLOPs of a token."""
    figure = style.blank(8.0, 5.0)
    axes = style.dress(figure.subplots(), "Score and cost", "FLOPs a token", "mean of domains, %")
    x, y = found.flops_per_token, [100 * mean.value for mean in found.means]
    spread = [[100 * (mean.value - mean.low), 100 * (mean.high - mean.value)] for mean in found.means]
    axes.errorbar(x, y, np.transpose(spread), color=BLUE, ecolor=MUTED, fmt="o", markersize=8, capsize=3)
    style.log_ticks(axes, min(x), max(x))
    style.place_labels(axes, [Label(*each) for each in zip(x, y, found.models, strict=True)])
    return figure


def comparison_page(found: Comparison) -> Page:
    last = len(found.models) - 1
    worst = found.differences[found.worst[last]][last]
    was, now = (percent(found.means[place].value) for place in (0, last))
    headline = f"{found.models[last]} scores {now}, {found.models[0]} {was}; its worst domain is {found.worst[last]}, {_signed(worst)} points."
    if (mean := found.norms[last]) is not None:
        headline += f" It has {rounded(mean.mean.value)} of its teachers' lead, {rounded(mean.domains[mean.worst].value)} in {mean.worst}."
    text, tables = f"{headline} {found.refusal}".strip(), (comparison_table(found), compared_answers(found))
    sections = [Section("seesaw", "Every domain, every stage", text, lambda: seesaw(found), "lines", tables)]
    if len(set(found.flops_per_token)) > 1:
        sections.append(Section("cost", "Score and cost", "", lambda: score_by_cost(found), "points"))
    return Page("comparison", headline, tuple(found.models), tuple(sections), f"commit {git_commit() or 'unknown'}", "")
