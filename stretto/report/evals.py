"""Evaluations on a page: scores beside what knowing nothing scores and what it costs; and models against each other, paired."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from matplotlib.figure import Figure

from stretto.base.config import differences
from stretto.base.errors import UserError
from stretto.base.numbers import counted, duration, params, percent, rounded, si
from stretto.base.records import git_commit
from stretto.evals.battles import Battles
from stretto.evals.diversity import MEASURES
from stretto.evals.scores import LEVEL, Interval, Norm, flip_p, holm, interval, norm, resampled, share_interval
from stretto.post.panel import Chapters, Panel
from stretto.post.pipeline import COMPARISON_FILE
from stretto.post.suite import DomainResult, Evaluation
from stretto.report import style
from stretto.report.page import NOTHING, Cell, Page, Section, Table
from stretto.report.style import BLUE, INK, LABEL_PT, MUTED, ORANGE, SERIES, Label

_READ = f"Ranges hold {LEVEL:.0%} of what other problems of the same kind would give."
_WORDS = {
    "empty": "nothing",
    "constant": "always 0",
    "frequent": "most frequent",
    "another": "another's",
    "calls": "empty calls",
}
"""Of what knows nothing; a source's own kinds have names that can be printed."""
_STAR = "✱"
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
    entropy = {} if result.entropy is None else {"entropy": result.entropy}
    return own | entropy | {"num_tokens": result.num_tokens}


def _ignorant(result: DomainResult) -> tuple[str, Interval] | None:
    """The best of the answers that know nothing of the problem, by the name it is printed under."""
    best = max(result.baselines, key=lambda kind: result.baselines[kind].value, default=None)
    return None if best is None else (_WORDS.get(best, best), result.baselines[best])


def score_table(found: Evaluation) -> Table:
    """A row for each domain."""
    nums = {max(result.pass_at) for result in found.domains.values() if result.pass_at}
    most = max(nums) if len(nums) == 1 else "k"  # of multiple choice, answers in every order are samples of the problem
    several = (f"pass@{most}", f"pass^{most}", f"maj@{most}") if max(nums, default=1) > 1 else ()
    rows = []
    for name, result in found.domains.items():
        cells = [_share(result.score)]
        for of in (result.pass_at, result.pass_hat, result.majority_at) if several else ():
            cells.append(_share(of.get(max(result.pass_at, default=0))))
        best = _ignorant(result)
        cells.append(_share(best[1], best[0]) if best else NOTHING)
        cells.append(Cell(f"{result.num_infra}", result.num_infra))
        rows.append((Cell(name, note="mean reward" if result.is_graded else ""), *cells))
    columns = ("Domain", "Score", *several, "Knowing nothing", "Infra errors")
    total = (Cell("Mean of domains"), _share(found.mean), *[NOTHING] * (len(columns) - 2))
    return Table("Scores", columns, tuple(rows), (total,) if len(rows) > 1 else (), _READ)


def asked_table(found: Evaluation) -> Table:
    """What an answer of each domain took, and how many nobody could read."""
    rows = [
        (
            Cell(name),
            Cell(f"{len(result.items)}", len(result.items)),
            Cell(si(result.flops, "FLOPs"), result.flops, "computed"),
            _number(result.num_tokens),
            Cell(f"{result.num_unread}", result.num_unread),
        )
        for name, result in found.domains.items()
    ]
    return Table("What was asked", ("Domain", "Problems", "A task", "Tokens an answer", "Unreadable"), tuple(rows))


def panel_table(found: Sequence[Panel]) -> Table:
    """What can be counted of open-ended answers, a row for each domain."""
    names = list(dict.fromkeys(name for each in found for name in each.measures))
    rows = [
        (
            Cell(each.domain, note=_missing(each)),
            *(_number(each.measures[name].value if name in each.measures else None) for name in names),
            _share(each.kept),
        )
        for each in found
    ]
    note = "distinct-k, Vendi, clusters and distinct-2 are of the answers to one prompt, the rest of single answers."
    return Table(
        "Writing", ("Domain", *(name.replace("_", "-") for name in names), "Constraints kept"), tuple(rows), (), note
    )


def overused_table(found: Panel) -> Table:
    """What answers have more often than people do."""
    rows = [(Cell(each.ngram), _number(each.answers), _number(each.people)) for each in found.overused]
    return Table(f"Overused in {found.domain}", ("Words", "In ten thousand", "People"), tuple(rows))


def _missing(found: Panel) -> str:
    short = found.chapters.num_short if found.chapters else 0
    return ", ".join([f"{found.num_empty} empty"] * bool(found.num_empty) + [f"{short} end early"] * bool(short))


def chapters_table(domain: str, found: Chapters) -> Table:
    """Long answers chapter by chapter, a row for each measure."""
    rows = [
        (
            Cell(name.replace("_", "-")),
            *(_number(value) for value in values),
            replace(_number(change.value), note=f"{rounded(change.low)} … {rounded(change.high)}"),
        )
        for (name, values), change in zip(found.measures.items(), found.changes.values(), strict=True)
    ]
    num = len(next(iter(found.measures.values()), []))
    note = f"Means of answers that have all chapters; {found.num_short} have fewer."
    return Table(
        f"Chapters of {domain}", ("Of a chapter", *map(str, range(1, num + 1)), "Last − first"), tuple(rows), (), note
    )


def baseline_table(found: Evaluation) -> Table:
    """What answers score that know nothing of the problem, a row for each kind."""
    rows = [
        (Cell(name), Cell(_WORDS.get(kind, kind)), _share(score))
        for name, result in found.domains.items()
        for kind, score in result.baselines.items()
    ]
    return Table("Knowing nothing", ("Domain", "Always answering", "Score"), tuple(rows))


def place_table(found: Evaluation) -> Table:
    """Of multiple choice: what is chosen by where it stands, and how far that is from what should be."""
    rows, biases = [], []
    for name, result in found.domains.items():
        for place, each in result.places.items():
            shares = Cell(percent(each.chosen), each.chosen), Cell(percent(each.right), each.right)
            rows.append(
                (Cell(name), Cell(place), *shares, NOTHING if each.recall is None else Cell(percent(each.recall)))
            )
        if result.places:
            moved = sum(abs(each.chosen - each.right) for each in result.places.values()) / 2
            biases.append(f"{name} {percent(moved)}")
    note = "Answers that would have to move for every place to be chosen as often as it is right: " + ", ".join(biases)
    return Table("Places", ("Domain", "Place", "Chosen", "Right", "Chosen where right"), tuple(rows), (), note)


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
    """Each domain's score with its range, what all and what any of its samples get, and the best that knowing nothing scores."""
    names = list(found.domains)
    figure = style.blank(9.0, 1.7 + 0.62 * len(names))
    axes = style.dress(figure.subplots(), f"{found.name}: scores by domain", "%", "", grid="x")
    for place, result in enumerate(found.domains.values()):
        score, best = result.score, _ignorant(result)
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
    told = [
        f"line: {LEVEL:.0%} range",
        "◂ all samples of a problem right, ▸ any",
        "orange: the best that knowing nothing gets",
    ]
    style.subtitle(axes, told)
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Models on the same problems. Written by `compare`."""

    models: list[str]
    reference: int
    """Its place among them: what the others are compared with, and what the teachers began with."""
    scores: dict[str, list[Interval]]
    """By domain, of each model."""
    differences: dict[str, list[Interval]]
    """To the reference, paired."""
    p_values: dict[str, list[float]]
    """Of these differences, by flipping signs, after Holm for all of them; 1 for the reference."""
    means: list[Interval]
    """Over domains."""
    mean_differences: list[Interval]
    """To the reference's, paired."""
    kept: list[Interval]
    """Of the reference's score, the mean over domains; undetermined where that is 0."""
    answers: dict[str, list[float | None]]
    """Mean over domains of what is measured of answers, by its name; None: measured by other similarities than the first's."""
    baselines: dict[str, tuple[str, Interval]]
    """By domain: the best of the answers that know nothing of the problem, and its score; without any, it is missing."""
    teachers: dict[str, tuple[str, Interval]]
    """By domain: the name of the one who taught it, and its score."""
    norms: list[Norm | None]
    """Of each model; None where there is none to be had."""
    refusal: str
    """Why there is none; empty: there is."""
    flops_per_token: list[float]
    flops_per_task: list[float]
    """Mean over domains."""
    num_infra: list[int]
    """Samples that could not be judged."""
    battles: Battles | None = None

    def significant(self, place: int) -> list[str]:
        """Domains in which a model differs from the reference beyond chance."""
        return [name for name, each in self.p_values.items() if each[place] < 1 - LEVEL]

    @property
    def worst(self) -> list[str]:
        """Of each model, the domain that lost most or gained least."""
        return [
            min(self.differences, key=lambda name: self.differences[name][place].value)
            for place in range(len(self.models))
        ]


def compare(
    models: Sequence[Evaluation], teachers: Mapping[str, Evaluation], seed: int = 0, reference: int = 0
) -> Comparison:
    """``models`` on the problems that all of them answered, each domain's teacher too; ``teachers`` by domain, ``reference`` the place
    of the model that the others are compared with.

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
    others = [place for place in range(len(models)) if place != reference]
    tests = [(name, place) for name in names for place in others]
    raw = [flip_p(values[name][place] - values[name][reference], seed=seed) for name, place in tests]
    p_values = {name: [1.0] * len(models) for name in names}
    for (name, place), p in zip(tests, holm(raw), strict=True):
        p_values[name][place] = p
    nums = {name: int((~np.isnan(values[name]).any(0)).sum()) for name in names}
    scores = {name: [share_interval(column, nums[name]) for column in means[name].T] for name in names}
    places, refusal = range(len(models)), ""
    norms: list[Norm | None] = [None] * len(models)
    if teachers:
        try:
            norms = [norm(means, place, reference, dict.fromkeys(teachers, len(models))) for place in places]
        except UserError as refused:
            refusal = str(refused)

    def over_domains(of: Callable[[np.ndarray, int], np.ndarray]) -> list[Interval]:
        return [interval(np.mean([of(means[name], place) for name in names], axis=0)) for place in places]

    return Comparison(
        models=[model.name for model in models],
        reference=reference,
        scores={name: scores[name][: len(models)] for name in names},
        differences={
            name: [interval(means[name][:, place] - means[name][:, reference]) for place in places] for name in names
        },
        p_values=p_values,
        means=over_domains(lambda means_RM, place: means_RM[:, place]),
        mean_differences=over_domains(lambda means_RM, place: means_RM[:, place] - means_RM[:, reference]),
        kept=over_domains(lambda means_RM, place: _ratio(means_RM, place, reference)),
        answers={measure: _answers(measure, models, names) for measure in _MEASURES},
        baselines={name: best for name in names if (best := _ignorant(models[reference].domains[name]))},
        teachers={name: (teachers[name].name, scores[name][-1]) for name in teachers},
        norms=norms,
        refusal=refusal,
        flops_per_token=[model.cost.flops_per_token for model in models],
        flops_per_task=[float(np.mean([model.domains[name].flops for name in names])) for model in models],
        num_infra=[sum(model.domains[name].num_infra for name in names) for model in models],
    )


def read_comparison(out: Path) -> Comparison | None:
    """What `stretto compare` left in ``out``; None: nothing. Raises `UserError`: it is not readable, or of another version."""
    path = out / COMPARISON_FILE
    if not path.is_file():
        return None

    def numbers(tree: Any) -> Any:
        """JSON knows no infinity: an end of a range that is null there was none."""
        if isinstance(tree, list):
            return [numbers(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        ends = Interval.__dataclass_fields__
        return {key: math.nan if value is None and key in ends else numbers(value) for key, value in tree.items()}

    try:
        return msgspec.convert(numbers(msgspec.json.decode(path.read_bytes())), Comparison)
    except (OSError, msgspec.MsgspecError) as error:
        again = f"make it again: stretto compare … -o {out}"
        raise UserError(f"{path}: not readable as a comparison: {error}; {again}") from None


def _ratio(means_RM: np.ndarray, place: int, reference: int) -> np.ndarray:
    whole_R = means_RM[:, reference]
    return np.divide(means_RM[:, place], whole_R, out=np.full_like(whole_R, np.nan), where=whole_R > 0)


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
    """The seesaw: a row for each domain, a column for each model; its teacher and what knowing nothing scores at the end."""
    reference, whole = found.reference, found.models[found.reference]
    beside = {"its teacher": found.teachers, "knowing nothing": found.baselines}
    beside = {title: told for title, told in beside.items() if told}
    rest = [NOTHING] * len(beside)
    rows = []
    for name, scores in found.scores.items():
        notes = _gains(found, found.differences[name], found.p_values[name])
        last = [_share(told[name][1], told[name][0]) if name in told else NOTHING for told in beside.values()]
        rows.append((Cell(name), *map(_share, scores, notes), *last))

    def total(label: str, note: str, cells: Iterable[Cell]) -> tuple[Cell, ...]:
        """Of the models behind the reference."""
        later = [cell if place > reference else NOTHING for place, cell in enumerate(cells)]
        return (Cell(label, note=note), *later, *rest)

    totals = [
        (Cell("Mean of domains"), *map(_share, found.means, _gains(found, found.mean_differences)), *rest),
        total("Kept", f"of {whole}'s, mean of domains", map(_share, found.kept)),
        total("Worst domain", "by its difference", map(Cell, found.worst)),
    ]
    if any(found.norms):
        totals.append(total("Norm", "of the teachers' lead", map(_lead, found.norms)))
        totals.append(total("Least norm", "and its domain", map(_least_lead, found.norms)))
    totals.append((Cell("A task"), *[Cell(si(each, "FLOPs"), each) for each in found.flops_per_task], *rest))
    totals.append((Cell("Infra errors"), *[Cell(f"{num}", num) for num in found.num_infra], *rest))
    columns = ("Domain", *found.models, *beside)
    note = f"{_READ} Differences, in points, are to {whole} on the same problems; {_STAR}: beyond chance by flipping signs, after Holm."
    return Table("Every domain, every stage", columns, tuple(rows), tuple(totals), f"{note} {found.refusal}".strip())


def _gains(found: Comparison, gains: Sequence[Interval], p_values: Sequence[float] = ()) -> list[str]:
    stars = [f" {_STAR}" if p < 1 - LEVEL else "" for p in p_values] or [""] * len(gains)
    told = [f"{_signed(gain)}{star}" for gain, star in zip(gains, stars, strict=True)]
    return ["" if place == found.reference else text for place, text in enumerate(told)]


def battle_table(found: Battles) -> Table:
    """A row for each model: how strong it is, and its share of battles against each other one."""
    even = found.controlled or []
    rows = [
        (Cell(name), _elo(strength), *map(_share, rates), *([_elo(even[at])] if even else []))
        for at, (name, strength, rates) in enumerate(zip(found.models, found.strengths, found.rates, strict=True))
    ]
    told = found.verdicts
    note = f"{told.num} battles over {found.num_problems} problems"
    note += f"; the judge contradicts itself, shown the other order, in {percent(told.contradicted)}: ties"
    if found.itself:
        note += f"; against itself the first one wins {percent(found.itself.value)} ({_range(found.itself)})"
    note += f"; {told.num_infra} not judged. Strength: Bradley and Terry, 400 points are ten wins for each loss."
    if even:
        worth = ", ".join(f"{name} {each.value:+.0f}".replace("-", "−") for name, each in found.effects.items())
        note += f" Equal: if answers were as long and as plain; to this judge {worth} points."
    columns = ("Model", "Strength", *(f"against {name}" for name in found.models), *(["Equal"] if even else []))
    return Table("Battles", columns, tuple(rows), (), note)


def _elo(found: Interval) -> Cell:
    value, low, high = (f"{each:+.0f}".replace("-", "−") for each in (found.value, found.low, found.high))
    if not math.isfinite(found.low + found.high):
        value = low = high = "undetermined"
    return Cell(value, found.value, f"{low} … {high}" if low != high else "")


def _lead(found: Norm | None) -> Cell:
    if found is None:
        return NOTHING
    mean = found.mean
    is_known = math.isfinite(mean.low + mean.high)
    note = f"{rounded(mean.low)} … {rounded(mean.high)}" if is_known else "undetermined"
    return Cell(rounded(mean.value), mean.value, note)


def _least_lead(found: Norm | None) -> Cell:
    if found is None:
        return NOTHING
    least = found.domains[found.worst].value
    return Cell(rounded(least), least, found.worst)


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
    """Each domain's score, and the mean of all, against the FLOPs of a token."""
    figure = style.blank(9.0, 5.4)
    axes = style.dress(figure.subplots(), "Score over size", "FLOPs a token", "score, %")
    x, y = found.flops_per_token, [100 * mean.value for mean in found.means]
    order, ends = np.argsort(x), []
    for place, (name, scores) in enumerate(found.scores.items()) if len(found.scores) > 1 else ():
        each, colour = [100 * scores[model].value for model in order], SERIES[place % len(SERIES)]
        axes.plot([x[model] for model in order], each, color=colour, marker=".", linewidth=1.2, alpha=0.7)
        ends.append(Label(max(x), each[-1], name, colour))
    spread = [[100 * (mean.value - mean.low), 100 * (mean.high - mean.value)] for mean in found.means]
    axes.errorbar(x, y, np.transpose(spread), color=BLUE, ecolor=MUTED, fmt="o", markersize=8, capsize=3)
    style.log_ticks(axes, min(x), max(x))
    style.subtitle(axes, [f"points: mean of domains, {LEVEL:.0%} ranges"])
    style.place_labels(axes, [Label(*each) for each in zip(x, y, found.models, strict=True)])
    style.name_ends((axes, ends))
    return figure


def comparison_headline(found: Comparison) -> str:
    last = len(found.models) - 1
    worst = found.differences[found.worst[last]][last]
    was, now = (percent(found.means[place].value) for place in (found.reference, last))
    headline = f"{found.models[last]} scores {now}, {found.models[found.reference]} {was}; its worst domain is {found.worst[last]}, {_signed(worst)} points."
    if last != found.reference:
        headline += f" Beyond chance: {', '.join(found.significant(last)) or 'no domain'}, of {counted(len(found.scores), 'domain')}."
    if (mean := found.norms[last]) is not None:
        headline += f" It has {rounded(mean.mean.value)} of its teachers' lead, {rounded(mean.domains[mean.worst].value)} in {mean.worst}."
    idle = [name for name, (_, best) in found.baselines.items() if found.scores[name][last].low <= best.value]
    if idle:
        headline += f" Not clearly above answers that know nothing of the problem: {', '.join(idle)}."
    return headline


def seesaw_section(found: Comparison) -> Section:
    return Section(
        "seesaw",
        "Every domain, every stage",
        f"{comparison_headline(found)} {found.refusal}".strip(),
        lambda: seesaw(found),
        "Line plot of each domain's score over the models, with 95 % ranges; its teacher's score dashed.",
        (comparison_table(found), compared_answers(found)),
    )


def comparison_page(found: Comparison) -> Page:
    headline, sections = comparison_headline(found), [seesaw_section(found)]
    if len(set(found.flops_per_token)) > 1:
        sections.append(Section("cost", "Score over size", "", lambda: score_by_cost(found), "points"))
    if found.battles is not None:
        sections.append(Section("battles", "Battles", tables=(battle_table(found.battles),)))
    return Page("comparison", headline, tuple(found.models), tuple(sections), f"commit {git_commit() or 'unknown'}", "")
