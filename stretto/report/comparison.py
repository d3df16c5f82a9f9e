"""Paired comparison of models: differences with intervals, and its report."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from stretto.base.config import differences
from stretto.base.errors import UserError
from stretto.base.numbers import counted, percent, rounded, si
from stretto.base.paths import quoted
from stretto.base.records import git_commit
from stretto.base.table import NOTHING, Cell, Table
from stretto.evals.battles import Battles
from stretto.evals.scores import LEVEL, Interval, Norm, flip_p, holm, judged, mean_interval, norm, retention
from stretto.post.pipeline import COMPARISON_FILE
from stretto.post.suite import Evaluation, read_result
from stretto.report import style
from stretto.report.cells import (
    DIVERSITY,
    INFRA,
    INTERVALS,
    MEASURE_NAMES,
    STAR,
    ends_text,
    interval_text,
    measures_of,
    number_cell,
    share_cell,
    signed_points,
    strongest_baseline,
)
from stretto.report.page import Page, Section
from stretto.report.style import BLUE, INK, LABEL_PT, MUTED, SERIES, Label


@dataclass(frozen=True, slots=True)
class Comparison:
    """Models on the same problems. Written by `compare`."""

    models: list[str]
    reference: int
    """Index of the reference model: the others are compared with it, and teachers were trained from it."""
    num_problems: dict[str, int]
    """Number of problems compared, by domain: those with a verdict for every model and the domain's teacher."""
    num_evaluated: dict[str, int]
    """Number of problems that any of the models was evaluated on, by domain."""
    scores: dict[str, list[Interval]]
    """Scores by domain, one per model."""
    differences: dict[str, list[Interval]]
    """Paired differences to the reference, by domain, one per model."""
    p_values: dict[str, list[float]]
    """p values of these differences: paired permutation test, corrected with Holm's method over all of them; 1 for the reference."""
    means: list[Interval]
    """Mean score over domains, one per model."""
    mean_differences: list[Interval]
    """Paired difference of the means to the reference's, one per model."""
    kept: list[Interval]
    """Retention: mean over domains of score / the reference's score; undetermined where the latter may be 0."""
    previous: list[int | None]
    """Index of the stage before, one per model: its nearest ancestor among the models. None: no ancestor is among them."""
    changes: dict[str, list[Interval | None]]
    """Paired differences to the stage before, by domain, one per model."""
    mean_changes: list[Interval | None]
    """Paired difference of the means to the stage before, one per model."""
    answers: dict[str, list[float | None]]
    """Mean over domains of each measure of answers, by name; None: its similarity is not that of the first model, or the model was
    evaluated on other problems than those compared."""
    baselines: dict[str, tuple[str, Interval]]
    """By domain: name and score of the best trivial baseline. Left out: domains without one, and those in which the reference, whose
    evaluation it is from, was evaluated on other problems than those compared."""
    teachers: dict[str, tuple[str, Interval]]
    """By domain: name and score of its teacher."""
    norms: list[Norm | None]
    """Normalised score of each model; None where it is not defined."""
    refusal: str
    """Why there is no normalised score; empty: there is one."""
    active_params: list[int]
    flops_per_task: list[float | None]
    """Mean over domains, one per model; None: the model was evaluated on other problems than those compared."""
    num_infra: list[int]
    """Samples without a verdict (infrastructure errors), one number per model."""
    battles: Battles | None = None
    omitted: list[str] = field(default_factory=list)
    """Domains that not all models were evaluated on; nothing of them is compared."""

    def significant(self, index: int) -> list[str]:
        """Domains in which a model differs significantly from the reference."""
        return [name for name, each in self.p_values.items() if each[index] < 1 - LEVEL]

    @property
    def worst(self) -> list[str]:
        """Domain with the smallest difference to the reference, one per model."""
        gains = self.differences
        return [min(gains, key=lambda name: gains[name][index].value) for index in range(len(self.models))]


def compare(
    models: Sequence[Evaluation], teachers: Mapping[str, Evaluation], seed: int = 0, reference: int = 0
) -> Comparison:
    """Compare ``models`` on the problems that all of them and the domain's teacher answered.

    Args:
        teachers: by domain.
        reference: index of the model that the others are compared with.

    Raises:
        UserError: a teacher of an unknown domain, or evaluations with different settings or without common problems.
    """
    names = [name for name in models[0].domains if all(name in model.domains for model in models)]
    evaluated = dict.fromkeys(name for model in models for name in model.domains)
    if not names:
        raise UserError(
            f"no domain in common: {', '.join(model.name for model in models)} have {', '.join(evaluated)}; evaluate all with one --suite"
        )
    if absent := sorted(set(teachers) - set(names)):
        raise UserError(f"--teacher {absent[0]}: no such domain in all evaluations; they have {', '.join(names)}")
    rows = {name: [*models, *filter(None, [teachers.get(name)])] for name in names}
    common = {name: _common_items(name, rows[name]) for name in names}
    values = {name: _common_values(name, rows[name], common[name]) for name in names}
    indices = range(len(models))
    scores = {name: [mean_interval({name: x_P}, seed) for x_P in values_MP] for name, values_MP in values.items()}
    previous, refusal = [_previous(index, models) for index in indices], ""
    norms: list[Norm | None] = [None] * len(models)
    if teachers:
        try:
            norms = [norm(values, index, reference, dict.fromkeys(teachers, len(models)), seed) for index in indices]
        except UserError as refused:
            refusal = str(refused)

    def is_same(model: Evaluation, name: str) -> bool:
        """Whether ``model`` was evaluated on no other problems of a domain than those compared."""
        return len(model.domains[name].items) == len(common[name])

    are_same = [all(is_same(model, name) for name in names) for model in models]

    def difference(domains: Sequence[str], index: int, other: int) -> Interval:
        gains = {name: values[name][index] - values[name][other] for name in domains}
        return mean_interval(gains, seed, bounds=(-1.0, 1.0))

    def changes(domains: Sequence[str]) -> list[Interval | None]:
        return [None if before is None else difference(domains, index, before) for index, before in enumerate(previous)]

    return Comparison(
        models=[model.name for model in models],
        reference=reference,
        num_problems={name: values[name].shape[1] for name in names},
        num_evaluated={name: len({item for each in models for item in each.domains[name].items}) for name in names},
        scores={name: scores[name][: len(models)] for name in names},
        differences={name: [difference([name], index, reference) for index in indices] for name in names},
        p_values=_p_values(values, len(models), reference, seed),
        means=[mean_interval({name: values[name][index] for name in names}, seed) for index in indices],
        mean_differences=[difference(names, index, reference) for index in indices],
        kept=[retention(values, index, reference, seed) for index in indices],
        previous=previous,
        changes={name: changes([name]) for name in names},
        mean_changes=changes(names),
        answers={measure: _answers(measure, models, names, are_same) for measure in MEASURE_NAMES},
        baselines={
            name: best
            for name in names
            if (best := strongest_baseline(models[reference].domains[name])) and is_same(models[reference], name)
        },
        teachers={name: (teachers[name].name, scores[name][-1]) for name in teachers},
        norms=norms,
        refusal=refusal,
        active_params=[model.cost.active_params for model in models],
        flops_per_task=[
            float(np.mean([model.domains[name].flops for name in names])) if same else None
            for model, same in zip(models, are_same, strict=True)
        ],
        num_infra=[sum(model.domains[name].num_infra for name in names) for model in models],
        omitted=[name for name in evaluated if name not in names],
    )


def _common_items(domain: str, rows: Sequence[Evaluation]) -> list[int]:
    """Problems that every row was asked, in the order of the first. Raises `UserError`: the domain's settings differ."""
    for other in rows[1:]:
        _check_asked(domain, rows[0], other)
    shared = set.intersection(*(set(each.domains[domain].items) for each in rows))
    return [item for item in rows[0].domains[domain].items if item in shared]


def _common_values(domain: str, rows: Sequence[Evaluation], items: Sequence[int]) -> np.ndarray:
    """Scores [row, problem] of ``items``; problems without a verdict in every row are left out."""
    known = [dict(zip(each.domains[domain].items, each.domains[domain].values, strict=True)) for each in rows]
    return judged(domain, np.array([[each[item] for item in items] for each in known], np.float64))


def _p_values(values: Mapping[str, np.ndarray], num_models: int, reference: int, seed: int) -> dict[str, list[float]]:
    """By domain, one p-value per model for its difference to the reference: sign-flip tests, corrected by Holm over all of them.
    1 for the reference itself."""
    tests = [(name, index) for name in values for index in range(num_models) if index != reference]
    raw = [flip_p(values[name][index] - values[name][reference], seed=seed) for name, index in tests]
    p_values = {name: [1.0] * num_models for name in values}
    for (name, index), p in zip(tests, holm(raw), strict=True):
        p_values[name][index] = p
    return p_values


def _previous(index: int, models: Sequence[Evaluation]) -> int | None:
    """Index of the nearest ancestor of a model among ``models``, by their lineages; None: there is none."""
    ancestors = models[index].stages[:-1]
    found = [
        (ancestors.index(each.stages[-1]), -at)
        for at, each in enumerate(models)
        if each.stages[-1:] and each.stages[-1] in ancestors
    ]
    return -max(found)[1] if found else None


def read_comparison(out: Path) -> Comparison | None:
    """The comparison that the stage `evaluate` of a pipeline wrote to its folder ``out``; None: there is none. Raises `UserError`: it is
    not readable, for example because an older version wrote it."""
    path = out / COMPARISON_FILE
    remedy = f"repeat the stage: `stretto run RECIPE -o {quoted(out.parent)} --from evaluate`, with the same recipe and --model"
    return read_result(path, Comparison, remedy) if path.is_file() else None


def _answers(
    measure: str, models: Sequence[Evaluation], names: Sequence[str], are_same: Sequence[bool]
) -> list[float | None]:
    means: list[float | None] = []
    for model, same in zip(models, are_same, strict=True):
        values = [own[measure] for name in names if measure in (own := measures_of(model.domains[name]))]
        means.append(float(np.mean(values)) if len(values) == len(names) and same else None)
    return means


def _check_asked(name: str, first: Evaluation, other: Evaluation) -> None:
    """Raises `UserError`: the two evaluations of the domain ``name`` have different settings."""
    if name not in other.domains:
        raise UserError(f"{other.name}: {name}: not evaluated; evaluate it with the same --suite")
    settings = []
    for each in (first, other):
        suite = dict(each.asked["suites"][each.domains[name].suite])
        settings.append(suite | {"sources": suite["sources"][name], "problems": 0, "samples": 0})
    if differs := differences(*settings):
        field, (before, after) = next(iter(differs.items()))
        raise UserError(
            f"{other.name}: {name}: {field} was {after!r}, of {first.name} {before!r}; evaluate both with the same settings"
        )


def comparison_table(found: Comparison) -> Table:
    """Scores by domain (rows) and model (columns), with the domain's teacher and the trivial baseline."""
    reference, reference_name = found.reference, found.models[found.reference]
    beside = {"Teacher": found.teachers, "Trivial baseline": found.baselines}
    beside = {title: scores for title, scores in beside.items() if scores}
    rest = [NOTHING] * len(beside)
    rows = []
    for name, scores in found.scores.items():
        notes = _gains(found, found.differences[name], found.p_values[name])
        last = [share_cell(each[name][1], each[name][0]) if name in each else NOTHING for each in beside.values()]
        rows.append((Cell(name, note=_problems(found, [name])), *map(share_cell, scores, notes), *last))

    def total(label: str, note: str, cells: Iterable[Cell]) -> tuple[Cell, ...]:
        """A row with values for all models but the reference."""
        others = [NOTHING if index == reference else cell for index, cell in enumerate(cells)]
        return (Cell(label, note=note), *others, *rest)

    totals = [
        (Cell("Mean of domains"), *map(share_cell, found.means, _gains(found, found.mean_differences)), *rest),
        total("Retention", f"of {reference_name}'s score, mean of domains", map(share_cell, found.kept)),
        total("Worst domain", "by its difference", map(Cell, found.worst)),
    ]
    if any(found.norms):
        totals.append(total("Normalised score", "share of the teachers' gain", map(_lead, found.norms)))
        totals.append(total("Worst normalised score", "and its domain", map(_least_lead, found.norms)))
    flops = [NOTHING if each is None else Cell(si(each, "FLOPs"), each) for each in found.flops_per_task]
    totals.append((Cell("FLOPs per task"), *flops, *rest))
    totals.append((Cell("Infra errors"), *[Cell(f"{num}", num) for num in found.num_infra], *rest))
    columns = ("Domain", *found.models, *beside)
    note = _compared_problems(found)
    if None in found.flops_per_task:
        note += " Trivial baselines, measures of answers and FLOPs of an evaluation with other problems are left out."
    note += f" {INTERVALS} {INFRA} Differences are paired, in points, to {reference_name}; {STAR}: significant (permutation test, Holm)."
    if found.omitted:
        note += f" Omitted, because not all models were evaluated on them: {', '.join(found.omitted)}."
    return Table("Scores by domain", columns, tuple(rows), tuple(totals), f"{note} {found.refusal}".strip())


def _problems(found: Comparison, names: Collection[str]) -> str:
    """``4 of 20 problems``, or ``20 problems`` if all are compared."""
    num, evaluated = (sum(counts[name] for name in names) for counts in (found.num_problems, found.num_evaluated))
    return counted(num, "problem") if num == evaluated else f"{num:,} of {counted(evaluated, 'problem')}"


def _compared_problems(found: Comparison) -> str:
    """How many problems are compared, one sentence."""
    text = f"Compared on {_problems(found, found.scores)}"
    return f"{text}." if found.num_problems == found.num_evaluated else f"{text}: those with a score of every model."


def _stage_measures(found: Comparison) -> dict[str, list[float | None]]:
    """Normalised score and diversity of every model, by printed name: a fall is a loss."""
    norms = [None if each is None else each.mean.value for each in found.norms]
    return {"normalised score": norms} | {MEASURE_NAMES[name]: found.answers[name] for name in DIVERSITY}


def stage_table(found: Comparison) -> Table:
    """Change of every model against the stage before it: scores by domain, normalised score, and diversity of answers."""
    stages = [(index, before) for index, before in enumerate(found.previous) if before is not None]

    def row(label: str, gains: Sequence[Interval | None]) -> tuple[Cell, ...]:
        known = [gain for gain in gains if gain is not None]
        texts = [signed_points(gain).split(" ", 1) for gain in known]
        return (Cell(label), *(Cell(text, gain.value, note) for gain, (text, note) in zip(known, texts, strict=True)))

    totals = [row("Mean of domains", found.mean_changes)]
    for label, values in _stage_measures(found).items():
        cells = []
        for index, before in stages:
            old, new = values[before], values[index]
            if old is None or new is None:
                cells.append(NOTHING)
            else:
                cells.append(Cell(f"{rounded(old)} → {rounded(new)}", new - old))
        if any(cell is not NOTHING for cell in cells):
            totals.append((Cell(label), *cells))
    columns = ("Domain", *(f"{found.models[index]} after {found.models[before]}" for index, before in stages))
    note = f"Scores: paired differences to the stage before, in points, with {percent(LEVEL)} confidence intervals."
    rows = tuple(row(name, gains) for name, gains in found.changes.items())
    return Table("Change by stage", columns, rows, tuple(totals), note)


def losses(found: Comparison) -> str:
    """Every loss against the stage before, in words: scores, normalised score and diversity. Empty without stages."""
    sentences = []
    for index, before in enumerate(found.previous):
        if before is None:
            continue
        gains = {name: each[index] for name, each in found.changes.items()}
        worse = [
            f"{name} {signed_points(gain)} points" for name, gain in gains.items() if gain and round(gain.value, 3) < 0
        ]
        for label, values in _stage_measures(found).items():
            old, new = values[before], values[index]
            if old is not None and new is not None and new < old and rounded(new) != rounded(old):
                worse.append(f"{label} from {rounded(old)} to {rounded(new)}")
        if worse:
            sentences.append(f"{found.models[index]} loses against {found.models[before]}: {'; '.join(worse)}.")
    if not sentences and any(before is not None for before in found.previous):
        sentences.append("No stage loses against the stage before.")
    return " ".join(sentences)


def _gains(found: Comparison, gains: Sequence[Interval], p_values: Sequence[float] = ()) -> list[str]:
    stars = [f" {STAR}" if p < 1 - LEVEL else "" for p in p_values] or [""] * len(gains)
    texts = [f"{signed_points(gain)}{star}" for gain, star in zip(gains, stars, strict=True)]
    return ["" if index == found.reference else text for index, text in enumerate(texts)]


def battle_table(found: Battles) -> Table:
    """Win rates of each model against the others, and Bradley-Terry strengths."""
    even = found.controlled or []
    rows = [
        (Cell(name), _elo(strength), *map(share_cell, rates), *([_elo(even[at])] if even else []))
        for at, (name, strength, rates) in enumerate(zip(found.models, found.strengths, found.rates, strict=True))
    ]
    verdicts = found.verdicts
    note = f"{verdicts.num} comparisons over {found.num_problems} problems, each in both orders"
    note += f"; {percent(verdicts.contradicted)} contradictory verdicts, counted as ties"
    if found.itself:
        note += (
            f"; win rate of the reference against itself {percent(found.itself.value)} ({interval_text(found.itself)})"
        )
    note += f"; {verdicts.num_infra} infrastructure errors. Strength: Bradley-Terry in Elo points; 400 points are a win rate of 10 to 1."
    if even:
        worth = ", ".join(f"{name} {_points(each.value)}" for name, each in found.effects.items())
        note += f" Controlled: strength after controlling for length and layout; effect on this judge: {worth} points."
    columns = ("Model", "Strength", *(f"against {name}" for name in found.models), *(["Controlled"] if even else []))
    return Table("Win rates", columns, tuple(rows), (), note)


def _elo(found: Interval) -> Cell:
    if not math.isfinite(found.low + found.high):
        return Cell("undetermined", found.value)
    return Cell(_points(found.value), found.value, ends_text(found, _points) if found.low != found.high else "")


def _points(value: float) -> str:
    return f"{value:+.0f}".replace("-", "−")


def _lead(found: Norm | None) -> Cell:
    return (
        NOTHING if found is None else Cell(rounded(found.mean.value), found.mean.value, ends_text(found.mean, rounded))
    )


def _least_lead(found: Norm | None) -> Cell:
    return NOTHING if found is None else Cell(rounded(found.domains[found.worst].value), note=found.worst)


def compared_answers(found: Comparison) -> Table:
    """Diversity, entropy and length of the answers of every model."""
    rows = [(Cell(MEASURE_NAMES[measure]), *map(number_cell, values)) for measure, values in found.answers.items()]
    return Table("Answers, mean of domains", ("", *found.models), tuple(rows))


def domain_lines(found: Comparison) -> Figure:
    """Score of each domain over the models; lines join a model with the stage before it, and the score of the domain's teacher is dashed."""
    figure = style.blank(10.0, 5.6)
    axes = style.dress(figure.subplots(), "Scores by domain", "", "score, %", grid="y")
    ends, colours = [], style.shades(SERIES, len(found.scores))
    for index, ((name, scores), colour) in enumerate(zip(found.scores.items(), colours, strict=True)):
        x = np.arange(len(scores)) + 0.03 * index
        y = np.array([100 * score.value for score in scores])
        spread = np.array([[score.value - score.low, score.high - score.value] for score in scores]).T * 100
        axes.errorbar(x, y, spread, color=colour, fmt="o", elinewidth=1.0, capsize=3)
        for model, before in enumerate(found.previous):
            if before is not None:
                axes.plot(x[[before, model]], y[[before, model]], color=colour, linewidth=2.0)
        if name in found.teachers:
            axes.axhline(100 * found.teachers[name][1].value, color=colour, linewidth=1.0, linestyle=(0, (5, 4)))
        ends.append(Label(x[-1], y[-1], name, colour))
    axes.set_xticks(range(len(found.models)), found.models, fontsize=LABEL_PT, color=INK, parse_math=False)
    axes.margins(x=0.08)
    is_staged = any(before is not None for before in found.previous)
    notes = [f"bars: {percent(LEVEL)} confidence intervals", *["lines: from the stage before"] * is_staged]
    style.subtitle(axes, [*notes, *(["dashed: the domain's teacher"] if found.teachers else [])])
    style.name_ends((axes, ends))
    return figure


def score_by_cost(found: Comparison) -> Figure:
    """Score of each domain, and the mean of all, over the number of active parameters."""
    figure = style.blank(9.0, 5.4)
    axes = style.dress(figure.subplots(), "Score over size", "active parameters", "score, %")
    x, y = found.active_params, [100 * mean.value for mean in found.means]
    order, ends = np.argsort(x), []
    domains = found.scores if len(found.scores) > 1 else {}
    for (name, scores), colour in zip(domains.items(), style.shades(SERIES, len(domains)), strict=True):
        each = [100 * scores[model].value for model in order]
        axes.plot([x[model] for model in order], each, color=colour, marker=".", linewidth=1.2, alpha=0.7)
        ends.append(Label(max(x), each[-1], name, colour))
    spread = [[100 * (mean.value - mean.low), 100 * (mean.high - mean.value)] for mean in found.means]
    axes.errorbar(x, y, np.transpose(spread), color=BLUE, ecolor=MUTED, fmt="o", markersize=8, capsize=3)
    style.log_ticks(axes, min(x), max(x))
    style.subtitle(axes, [f"points: mean of domains, {percent(LEVEL)} confidence intervals"])
    style.place_labels(axes, [Label(*each) for each in zip(x, y, found.models, strict=True)])
    style.name_ends((axes, ends))
    return figure


def comparison_headline(found: Comparison) -> str:
    """The last model that is not the reference, against the reference."""
    last = max((index for index in range(len(found.models)) if index != found.reference), default=found.reference)
    worst = found.differences[found.worst[last]][last]
    was, now = (percent(found.means[index].value) for index in (found.reference, last))
    headline = (
        f"{found.models[last]} scores {now}, {found.models[found.reference]} {was}; its worst domain is {found.worst[last]}, "
        f"{signed_points(worst)} points."
    )
    if found.num_problems != found.num_evaluated:
        headline += f" {_compared_problems(found)}"
    if last != found.reference:
        headline += f" Significant differences: {', '.join(found.significant(last)) or 'no domain'}, of {counted(len(found.scores), 'domain')}."
    if (mean := found.norms[last]) is not None:
        headline += f" Its normalised score is {rounded(mean.mean.value)} of its teachers' gain, {rounded(mean.domains[mean.worst].value)} in {mean.worst}."
    scores = {name: (found.scores[name][last], best.value) for name, (_, best) in found.baselines.items()}
    below = [name for name, (score, best) in scores.items() if score.value < best]
    if below:
        headline += f" Below the trivial baseline: {', '.join(below)}."
    idle = [name for name, (score, best) in scores.items() if score.low <= best and name not in below]
    if idle:
        headline += f" Not clearly above the trivial baseline: {', '.join(idle)}."
    return f"{headline} {losses(found)}".rstrip()


def domains_section(found: Comparison) -> Section:
    stages = [stage_table(found)] if any(before is not None for before in found.previous) else []
    return Section(
        "domains",
        "Scores by domain",
        f"{comparison_headline(found)} {found.refusal}".strip(),
        lambda: domain_lines(found),
        "Plot of each domain's score over the models, with 95 % confidence intervals; the teacher's score is dashed.",
        (comparison_table(found), *stages, compared_answers(found)),
    )


def comparison_page(found: Comparison) -> Page:
    headline, sections = comparison_headline(found), [domains_section(found)]
    if len(set(found.active_params)) > 1:
        sections.append(Section("cost", "Score over size", "", lambda: score_by_cost(found), "points"))
    if found.battles is not None:
        sections.append(Section("battles", "Win rates", tables=(battle_table(found.battles),)))
    return Page("comparison", headline, tuple(found.models), tuple(sections), f"commit {git_commit() or 'unknown'}", "")
