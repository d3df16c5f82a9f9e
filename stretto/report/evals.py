"""Report of an evaluation (scores, trivial baselines, cost), and report of a paired comparison of models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from stretto.base.config import differences
from stretto.base.errors import UserError
from stretto.base.numbers import counted, duration, params, percent, rounded, si
from stretto.base.records import git_commit
from stretto.evals.battles import Battles
from stretto.evals.diversity import MEASURES
from stretto.evals.scores import LEVEL, Interval, Norm, flip_p, holm, judged, mean_interval, norm, retention
from stretto.post.panel import Chapters, Panel
from stretto.post.pipeline import COMPARISON_FILE
from stretto.post.suite import DomainResult, Evaluation, read_result
from stretto.report import style
from stretto.report.page import NOTHING, Cell, Page, Section, Table
from stretto.report.style import BLUE, INK, LABEL_PT, MUTED, ORANGE, SERIES, Label

_INTERVALS = f"Intervals are {percent(LEVEL)} confidence intervals over problems (Gaffke's; Clopper-Pearson's for one sample per problem)."
_INFRA = "Infra errors (infrastructure errors): samples without a verdict, left out of the score."
_WORDS = {
    "empty": "empty answer",
    "constant": "always 0",
    "frequent": "most frequent",
    "another": "another's answer",
    "calls": "empty calls",
}
"""Names of the trivial baselines; a source's own baselines are printed under their own names."""
_STAR = "✱"
_MEASURES = {name: name.replace("_", "-") for name in MEASURES} | {"entropy": "entropy, nats", "num_tokens": "tokens"}
"""Measures of answers, and the headings of their columns."""
_DIVERSITY = ("distinct_2", "vendi", "clusters")
"""Measures of answers whose fall is a loss."""


def _range(found: Interval) -> str:
    if not math.isfinite(found.low + found.high):
        return "undetermined"
    return f"{percent(found.low).removesuffix(' %')} … {percent(found.high)}"


def _ends(found: Interval, form: Callable[[float], str]) -> str:
    return f"{form(found.low)} … {form(found.high)}" if math.isfinite(found.low + found.high) else "undetermined"


def _share(found: Interval | None, note: str = "") -> Cell:
    return NOTHING if found is None else Cell(percent(found.value), found.value, note or _range(found))


def _number(value: float | None) -> Cell:
    return NOTHING if value is None else Cell(rounded(value), value)


def _signed(found: Interval) -> str:
    low, value, high = (f"{100 * each:+.1f}".replace("-", "−") for each in (found.low, found.value, found.high))
    return f"{value} ({low} … {high})"


def _measured(result: DomainResult) -> dict[str, float]:
    """Measures of the domain's answers, by the names of `_MEASURES`; without those that were not measured."""
    own = {name: found.value for name, found in result.diversity.items()}
    entropy = {} if result.entropy is None else {"entropy": result.entropy}
    return own | entropy | {"num_tokens": result.num_tokens}


def _baseline(result: DomainResult) -> tuple[str, Interval] | None:
    """The best trivial baseline: its printed name and its score; None without baselines."""
    best = max(result.baselines, key=lambda kind: result.baselines[kind].value, default=None)
    return None if best is None else (_WORDS.get(best, best), result.baselines[best])


def score_table(found: Evaluation) -> Table:
    """A row for each domain."""
    nums = {max(result.pass_at) for result in found.domains.values() if result.pass_at}
    most = max(nums) if len(nums) == 1 else "k"  # in multiple choice, answers to all orders are samples of the problem
    several = (f"pass@{most}", f"pass^{most}", f"maj@{most}") if max(nums, default=1) > 1 else ()
    rows = []
    for name, result in found.domains.items():
        cells = [_share(result.score)]
        for of in (result.pass_at, result.pass_hat, result.majority_at) if several else ():
            cells.append(_share(of.get(max(result.pass_at, default=0))))
        found_best = _baseline(result)
        cells.append(_share(found_best[1], found_best[0]) if found_best else NOTHING)
        cells.append(Cell(f"{result.num_infra}", result.num_infra))
        rows.append((Cell(name, note="mean reward" if result.is_graded else ""), *cells))
    columns = ("Domain", "Score", *several, "Trivial baseline", "Infra errors")
    best = [each[1].value for result in found.domains.values() if (each := _baseline(result))]
    mean = float(np.mean(best)) if best and len(best) == len(rows) else None
    trivial = NOTHING if mean is None else Cell(percent(mean), mean, "best of each domain")
    total = (Cell("Mean of domains"), _share(found.mean), *[NOTHING] * len(several), trivial, NOTHING)
    return Table("Scores", columns, tuple(rows), (total,) if len(rows) > 1 else (), f"{_INTERVALS} {_INFRA}")


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
                _number(result.num_tokens),
                Cell(si(result.flops, "FLOPs"), result.flops, "computed"),
            )
        )
    columns = ("Domain", "Prompt", "Problems", "Samples", "Temperature", "Off-format", "Tokens", "FLOPs")
    note = (
        "Samples: per problem. Off-format: answers, correct or not, without the marker that the prompt asks for; their last line is scored. "
        "Tokens: per answer. FLOPs: per sample. Prompts of Stretto's own suites are 0-shot."
    )
    return Table("Settings", columns, tuple(rows), note=note, num_words=2, optional=("FLOPs", "Tokens"))


def panel_table(found: Sequence[Panel]) -> Table:
    """Measures of open-ended answers, a row for each domain."""
    names = list(dict.fromkeys(name for each in found for name in each.measures))
    rows = [
        (
            Cell(each.domain, note=_missing(each)),
            *(_number(each.measures[name].value if name in each.measures else None) for name in names),
            _share(each.kept),
        )
        for each in found
    ]
    note = "distinct-k, Vendi, clusters and distinct-2 compare the answers to one prompt; the other measures are means over answers."
    columns = ("Domain", *(name.replace("_", "-") for name in names), "Constraints kept")
    return Table("Writing", columns, tuple(rows), (), note)


def overused_table(found: Panel) -> Table:
    """Word trigrams that answers use more often than human texts do."""
    rows = [(Cell(each.ngram), _number(each.answers), _number(each.people)) for each in found.overused]
    return Table(f"Overused in {found.domain}", ("Words", "Per 10,000 words", "Human texts"), tuple(rows))


def _missing(found: Panel) -> str:
    short = found.chapters.num_short if found.chapters else 0
    return ", ".join([f"{found.num_empty} empty"] * bool(found.num_empty) + [f"{short} end early"] * bool(short))


def chapters_table(domain: str, found: Chapters) -> Table:
    """Measures of long answers by chapter, a row for each measure."""
    rows = [
        (
            Cell(name.replace("_", "-")),
            *(_number(value) for value in values),
            Cell(rounded(change.value), change.value, _ends(change, rounded)),
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
        (Cell(name), Cell(_WORDS.get(kind, kind)), _share(score))
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
        measured = _measured(result)
        ends = ", ".join(f"{why} {num}" for why, num in sorted(result.finishes.items()))
        rows.append((Cell(name), *(_number(measured.get(each)) for each in _MEASURES), Cell(ends)))
    embedder = found.asked.get("embed")
    by = f"hidden states of {embedder}" if embedder else "character trigrams"
    note = f"Diversity of the answers to one problem; similarity by {by}."
    return Table("Answers", ("Domain", *_MEASURES.values(), "Finish reasons"), tuple(rows), (), note)


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
    return Table("Cost", columns, (cells,))


def score_bars(found: Evaluation) -> Figure:
    """Each domain's score with its confidence interval, pass^k and pass@k, and the best trivial baseline."""
    names = list(found.domains)
    figure = style.blank(9.0, 1.7 + 0.62 * len(names))
    axes = style.dress(figure.subplots(), f"{found.name}: scores by domain", "%", "", grid="x")
    for place, result in enumerate(found.domains.values()):
        score, best = result.score, _baseline(result)
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
    best = {name: each[1].value if (each := _baseline(result)) else 0.0 for name, result in found.domains.items()}
    idle = [name for name, result in found.domains.items() if result.score.low <= best[name]]
    num = counted(len(found.domains), "domain")
    headline = f"{found.name} scores {percent(found.mean.value)} ({_range(found.mean)}) on average over {num}."
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Models on the same problems. Written by `compare`."""

    models: list[str]
    reference: int
    """Index of the reference model: the others are compared with it, and teachers were trained from it."""
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
    """Mean over domains of each measure of answers, by name; None: its similarity is not that of the first model."""
    baselines: dict[str, tuple[str, Interval]]
    """By domain: name and score of the best trivial baseline; domains without one are left out."""
    teachers: dict[str, tuple[str, Interval]]
    """By domain: name and score of its teacher."""
    norms: list[Norm | None]
    """Normalised score of each model; None where it is not defined."""
    refusal: str
    """Why there is no normalised score; empty: there is one."""
    flops_per_token: list[float]
    flops_per_task: list[float]
    """Mean over domains, one per model."""
    num_infra: list[int]
    """Samples without a verdict (infrastructure errors), one number per model."""
    battles: Battles | None = None

    def significant(self, place: int) -> list[str]:
        """Domains in which a model differs significantly from the reference."""
        return [name for name, each in self.p_values.items() if each[place] < 1 - LEVEL]

    @property
    def worst(self) -> list[str]:
        """Domain with the smallest difference to the reference, one per model."""
        gains = self.differences
        return [min(gains, key=lambda name: gains[name][place].value) for place in range(len(self.models))]


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
    if absent := sorted(set(teachers) - set(names)):
        raise UserError(f"--teacher {absent[0]}: no such domain in all evaluations; they have {', '.join(names)}")
    values = {}
    for name in names:
        rows = [*models, *([teachers[name]] if name in teachers else [])]
        for other in rows[1:]:
            _check_asked(name, rows[0], other)
        known = [dict(zip(each.domains[name].items, each.domains[name].values, strict=True)) for each in rows]
        items = [item for item in known[0] if all(item in each for each in known)]
        values[name] = judged(name, np.array([[each[item] for item in items] for each in known], np.float64))
    places = range(len(models))
    others = [place for place in places if place != reference]
    tests = [(name, place) for name in names for place in others]
    raw = [flip_p(values[name][place] - values[name][reference], seed=seed) for name, place in tests]
    p_values = {name: [1.0] * len(models) for name in names}
    for (name, place), p in zip(tests, holm(raw), strict=True):
        p_values[name][place] = p
    scores = {name: [mean_interval({name: x_P}, seed) for x_P in values_MP] for name, values_MP in values.items()}
    previous, refusal = [_previous(place, models) for place in places], ""
    norms: list[Norm | None] = [None] * len(models)
    if teachers:
        try:
            norms = [norm(values, place, reference, dict.fromkeys(teachers, len(models)), seed) for place in places]
        except UserError as refused:
            refusal = str(refused)

    def difference(domains: Sequence[str], place: int, other: int) -> Interval:
        gains = {name: values[name][place] - values[name][other] for name in domains}
        return mean_interval(gains, seed, bounds=(-1.0, 1.0))

    def changes(domains: Sequence[str]) -> list[Interval | None]:
        return [None if before is None else difference(domains, place, before) for place, before in enumerate(previous)]

    return Comparison(
        models=[model.name for model in models],
        reference=reference,
        scores={name: scores[name][: len(models)] for name in names},
        differences={name: [difference([name], place, reference) for place in places] for name in names},
        p_values=p_values,
        means=[mean_interval({name: values[name][place] for name in names}, seed) for place in places],
        mean_differences=[difference(names, place, reference) for place in places],
        kept=[retention(values, place, reference, seed) for place in places],
        previous=previous,
        changes={name: changes([name]) for name in names},
        mean_changes=changes(names),
        answers={measure: _answers(measure, models, names) for measure in _MEASURES},
        baselines={name: best for name in names if (best := _baseline(models[reference].domains[name]))},
        teachers={name: (teachers[name].name, scores[name][-1]) for name in teachers},
        norms=norms,
        refusal=refusal,
        flops_per_token=[model.cost.flops_per_token for model in models],
        flops_per_task=[float(np.mean([model.domains[name].flops for name in names])) for model in models],
        num_infra=[sum(model.domains[name].num_infra for name in names) for model in models],
    )


def _previous(place: int, models: Sequence[Evaluation]) -> int | None:
    """Index of the nearest ancestor of a model among ``models``, by their lineages; None: there is none."""
    ancestors = models[place].stages[:-1]
    found = [
        (ancestors.index(each.stages[-1]), -at)
        for at, each in enumerate(models)
        if each.stages[-1:] and each.stages[-1] in ancestors
    ]
    return -max(found)[1] if found else None


def read_comparison(out: Path) -> Comparison | None:
    """The comparison that `stretto compare` wrote to ``out``; None: there is none. Raises `UserError`: it is not readable."""
    path = out / COMPARISON_FILE
    return read_result(path, Comparison, f"stretto compare … -o {out}") if path.is_file() else None


def _answers(measure: str, models: Sequence[Evaluation], names: Sequence[str]) -> list[float | None]:
    means: list[float | None] = []
    for model in models:
        values = [own[measure] for name in names if measure in (own := _measured(model.domains[name]))]
        is_like = measure not in ("vendi", "clusters") or model.asked.get("embed") == models[0].asked.get("embed")
        means.append(float(np.mean(values)) if len(values) == len(names) and is_like else None)
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
        last = [_share(each[name][1], each[name][0]) if name in each else NOTHING for each in beside.values()]
        rows.append((Cell(name), *map(_share, scores, notes), *last))

    def total(label: str, note: str, cells: Iterable[Cell]) -> tuple[Cell, ...]:
        """A row with values for the models after the reference only."""
        later = [cell if place > reference else NOTHING for place, cell in enumerate(cells)]
        return (Cell(label, note=note), *later, *rest)

    totals = [
        (Cell("Mean of domains"), *map(_share, found.means, _gains(found, found.mean_differences)), *rest),
        total("Retention", f"of {reference_name}'s score, mean of domains", map(_share, found.kept)),
        total("Worst domain", "by its difference", map(Cell, found.worst)),
    ]
    if any(found.norms):
        totals.append(total("Normalised score", "share of the teachers' gain", map(_lead, found.norms)))
        totals.append(total("Worst normalised score", "and its domain", map(_least_lead, found.norms)))
    totals.append((Cell("FLOPs per task"), *[Cell(si(each, "FLOPs"), each) for each in found.flops_per_task], *rest))
    totals.append((Cell("Infra errors"), *[Cell(f"{num}", num) for num in found.num_infra], *rest))
    columns = ("Domain", *found.models, *beside)
    note = f"{_INTERVALS} {_INFRA} Differences are paired, in points, to {reference_name}; {_STAR}: significant (permutation test, Holm)."
    return Table("Scores by domain", columns, tuple(rows), tuple(totals), f"{note} {found.refusal}".strip())


def _stage_measures(found: Comparison) -> dict[str, list[float | None]]:
    """Normalised score and diversity of every model, by printed name: a fall is a loss."""
    norms = [None if each is None else each.mean.value for each in found.norms]
    return {"normalised score": norms} | {_MEASURES[name]: found.answers[name] for name in _DIVERSITY}


def stage_table(found: Comparison) -> Table:
    """Change of every model against the stage before it: scores by domain, normalised score, and diversity of answers."""
    stages = [(place, before) for place, before in enumerate(found.previous) if before is not None]

    def row(label: str, gains: Sequence[Interval | None]) -> tuple[Cell, ...]:
        known = [gain for gain in gains if gain is not None]
        texts = [_signed(gain).split(" ", 1) for gain in known]
        return (Cell(label), *(Cell(text, gain.value, note) for gain, (text, note) in zip(known, texts, strict=True)))

    totals = [row("Mean of domains", found.mean_changes)]
    for label, values in _stage_measures(found).items():
        cells = []
        for place, before in stages:
            old, new = values[before], values[place]
            if old is None or new is None:
                cells.append(NOTHING)
            else:
                cells.append(Cell(f"{rounded(old)} → {rounded(new)}", new - old))
        if any(cell is not NOTHING for cell in cells):
            totals.append((Cell(label), *cells))
    columns = ("Domain", *(f"{found.models[place]} after {found.models[before]}" for place, before in stages))
    note = f"Scores: paired differences to the stage before, in points, with {percent(LEVEL)} confidence intervals."
    rows = tuple(row(name, gains) for name, gains in found.changes.items())
    return Table("Change by stage", columns, rows, tuple(totals), note)


def losses(found: Comparison) -> str:
    """Every loss against the stage before, in words: scores, normalised score and diversity. Empty without stages."""
    sentences = []
    for place, before in enumerate(found.previous):
        if before is None:
            continue
        gains = {name: each[place] for name, each in found.changes.items()}
        worse = [f"{name} {_signed(gain)} points" for name, gain in gains.items() if gain and round(gain.value, 3) < 0]
        for label, values in _stage_measures(found).items():
            old, new = values[before], values[place]
            if old is not None and new is not None and new < old and rounded(new) != rounded(old):
                worse.append(f"{label} from {rounded(old)} to {rounded(new)}")
        if worse:
            sentences.append(f"{found.models[place]} loses against {found.models[before]}: {'; '.join(worse)}.")
    if not sentences and any(before is not None for before in found.previous):
        sentences.append("No stage loses against the stage before.")
    return " ".join(sentences)


def _gains(found: Comparison, gains: Sequence[Interval], p_values: Sequence[float] = ()) -> list[str]:
    stars = [f" {_STAR}" if p < 1 - LEVEL else "" for p in p_values] or [""] * len(gains)
    texts = [f"{_signed(gain)}{star}" for gain, star in zip(gains, stars, strict=True)]
    return ["" if place == found.reference else text for place, text in enumerate(texts)]


def battle_table(found: Battles) -> Table:
    """Win rates of each model against the others, and Bradley-Terry strengths."""
    even = found.controlled or []
    rows = [
        (Cell(name), _elo(strength), *map(_share, rates), *([_elo(even[at])] if even else []))
        for at, (name, strength, rates) in enumerate(zip(found.models, found.strengths, found.rates, strict=True))
    ]
    verdicts = found.verdicts
    note = f"{verdicts.num} comparisons over {found.num_problems} problems, each in both orders"
    note += f"; {percent(verdicts.contradicted)} contradictory verdicts, counted as ties"
    if found.itself:
        note += f"; win rate of the reference against itself {percent(found.itself.value)} ({_range(found.itself)})"
    note += f"; {verdicts.num_infra} infrastructure errors. Strength: Bradley-Terry in Elo points; 400 points are a win rate of 10 to 1."
    if even:
        worth = ", ".join(f"{name} {_points(each.value)}" for name, each in found.effects.items())
        note += f" Controlled: strength after controlling for length and layout; effect on this judge: {worth} points."
    columns = ("Model", "Strength", *(f"against {name}" for name in found.models), *(["Controlled"] if even else []))
    return Table("Win rates", columns, tuple(rows), (), note)


def _elo(found: Interval) -> Cell:
    if not math.isfinite(found.low + found.high):
        return Cell("undetermined", found.value)
    return Cell(_points(found.value), found.value, _ends(found, _points) if found.low != found.high else "")


def _points(value: float) -> str:
    return f"{value:+.0f}".replace("-", "−")


def _lead(found: Norm | None) -> Cell:
    return NOTHING if found is None else Cell(rounded(found.mean.value), found.mean.value, _ends(found.mean, rounded))


def _least_lead(found: Norm | None) -> Cell:
    return NOTHING if found is None else Cell(rounded(found.domains[found.worst].value), note=found.worst)


def compared_answers(found: Comparison) -> Table:
    """Diversity, entropy and length of the answers of every model."""
    rows = [(Cell(_MEASURES[measure]), *map(_number, values)) for measure, values in found.answers.items()]
    return Table("Answers, mean of domains", ("", *found.models), tuple(rows))


def domain_lines(found: Comparison) -> Figure:
    """Score of each domain over the models; the score of the domain's teacher is dashed."""
    figure = style.blank(10.0, 5.6)
    axes = style.dress(figure.subplots(), "Scores by domain", "", "score, %", grid="y")
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
    style.subtitle(
        axes,
        [f"bars: {percent(LEVEL)} confidence intervals", *(["dashed: the domain's teacher"] if found.teachers else [])],
    )
    style.name_ends((axes, ends))
    return figure


def score_by_cost(found: Comparison) -> Figure:
    """Score of each domain, and the mean of all, over the FLOPs per token."""
    figure = style.blank(9.0, 5.4)
    axes = style.dress(figure.subplots(), "Score over size", "FLOPs per token", "score, %")
    x, y = found.flops_per_token, [100 * mean.value for mean in found.means]
    order, ends = np.argsort(x), []
    for place, (name, scores) in enumerate(found.scores.items()) if len(found.scores) > 1 else ():
        each, colour = [100 * scores[model].value for model in order], SERIES[place % len(SERIES)]
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
    last = len(found.models) - 1
    worst = found.differences[found.worst[last]][last]
    was, now = (percent(found.means[place].value) for place in (found.reference, last))
    headline = f"{found.models[last]} scores {now}, {found.models[found.reference]} {was}; its worst domain is {found.worst[last]}, {_signed(worst)} points."
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
        "Line plot of each domain's score over the models, with 95 % confidence intervals; the teacher's score is dashed.",
        (comparison_table(found), *stages, compared_answers(found)),
    )


def comparison_page(found: Comparison) -> Page:
    headline, sections = comparison_headline(found), [domains_section(found)]
    if len(set(found.flops_per_token)) > 1:
        sections.append(Section("cost", "Score over size", "", lambda: score_by_cost(found), "points"))
    if found.battles is not None:
        sections.append(Section("battles", "Win rates", tables=(battle_table(found.battles),)))
    return Page("comparison", headline, tuple(found.models), tuple(sections), f"commit {git_commit() or 'unknown'}", "")
