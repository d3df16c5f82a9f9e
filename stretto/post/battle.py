"""Win rates: pairwise comparison of evaluated models by an LLM judge, each pair in both orders.

Shape letters: P problems, M models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.evals.battles import COVARIATES, Battles, Duel, Verdicts, controlled, fight
from stretto.evals.scores import MOST_INFRA
from stretto.evals.writing import text_measures
from stretto.post.suite import Evaluation
from stretto.post.suite_samples import SAMPLES_FILE, Key, Sample, read_samples
from stretto.post.suites import only_domains, opened_sources, suites_of
from stretto.tasks.judge import JudgedSource, JudgeFailed

Pairing = tuple[int, int, tuple[str, str]]
"""Two models, by number, and an answer of each."""


@dataclass(frozen=True, slots=True)
class _Fought:
    """The comparisons of one problem."""

    wins_MM: np.ndarray
    """Win rate of each model against each other one; NaN: not compared."""
    own: float
    """Win rate of the reference's answers against its own next samples; NaN: not compared."""
    duels: list[Duel]
    num_contradicted: int
    """Pairs whose two orders got different verdicts."""


def battle(models: Sequence[Evaluation], folders: Sequence[Path], reference: int = 0, seed: int = 0) -> Battles:
    """Compare the answers of ``models``, evaluated in ``folders``, in all judged domains, sample by sample. The reference's answers are
    also compared with its own next samples, where an unbiased judge gives 50 %.

    Raises:
        UserError: no judged domain, or more than `MOST_INFRA` infrastructure errors.
    """
    assert len(models) > 1, "one model alone has no opponent"
    suites, samples = suites_of(models[0].asked), [read_samples(folder / SAMPLES_FILE) for folder in folders]
    candidates = [
        name
        for suite in suites.values()
        for name, source in suite.sources.items()
        if (source.kind == "judged" or ":" in source.kind) and all(name in model.domains for model in models)
    ]
    num_duels, num_infra, fought = 0, 0, list[_Fought]()
    with opened_sources(only_domains(suites, candidates)) as opened:
        judged = {name: source for name, source in opened.items() if isinstance(source, JudgedSource)}
        if not judged:
            raise UserError(
                "--battle: no judged domain in all evaluations; evaluate --suite writing, or a suite of your own with a judge"
            )
        work = [(name, item) for name in judged for item in _common_items(name, models)]
        with progress("comparisons", len(work)) as advance:
            for name, item in work:
                pairings = list(_pairings([_texts(own, name, item) for own in samples], reference))
                num_duels += len(pairings)
                advance(1)
                try:
                    fought.append(_judge_problem(judged[name], item, pairings, len(models), len(fought)))
                except JudgeFailed as failed:
                    num_infra += len(pairings)
                    if num_infra > MOST_INFRA * len(work) * len(pairings):
                        raise UserError(
                            f"--battle: {num_infra} comparisons could not be judged: {failed}; correct that and repeat the command"
                        ) from failed
    num_contradicted = sum(each.num_contradicted for each in fought)
    counts = Verdicts(num_duels, num_contradicted / max(1, num_duels - num_infra), num_infra)
    wins_PMM, own_P = np.array([each.wins_MM for each in fought]), np.array([each.own for each in fought])
    found = fight([model.name for model in models], wins_PMM, own_P, reference, counts, seed)
    strengths, effects = controlled([duel for each in fought for duel in each.duels], len(models), reference, seed)
    return replace(found, controlled=strengths, effects=dict(zip(COVARIATES, effects, strict=True)))


def _texts(samples: Mapping[Key, Sample], name: str, item: int) -> dict[int, str]:
    """What a model wrote to the problem ``item`` of the domain ``name``, by number of the sample."""
    return {
        number: "\n\n".join(one.spoken)
        for (domain, problem, number), one in samples.items()
        if (domain, problem) == (name, item)
    }


def _judge_problem(
    source: JudgedSource, item: int, pairings: Sequence[Pairing], num_models: int, place: int
) -> _Fought:
    """Have the judge of ``source`` compare all ``pairings`` of the problem ``item``, which is number ``place`` of the duels.
    Raises `JudgeFailed`."""
    verdicts = source.duels(
        source.problem(item),
        [text for _, _, pair in pairings for text in pair],
        [(2 * at, 2 * at + 1) for at in range(len(pairings))],
    )
    own, duels, by_pair = list[float](), list[Duel](), dict[tuple[int, int], list[float]]()
    for (one, other), (i, j, pair) in zip(verdicts, pairings, strict=True):
        won = one if one == other else 0.5
        if i == j:
            own.append(won)
        else:
            by_pair.setdefault((i, j), []).append(won)
            duels.append(Duel(place, i, j, won, _differences(*pair)))
    wins_MM = np.full((num_models, num_models), np.nan)
    for (i, j), each in by_pair.items():
        wins_MM[i, j] = np.mean(each)
        wins_MM[j, i] = 1 - wins_MM[i, j]
    num_contradicted = sum(one != other for one, other in verdicts)
    return _Fought(wins_MM, float(np.mean(own)) if own else math.nan, duels, num_contradicted)


def _differences(first: str, second: str) -> tuple[float, float]:
    """Differences of two answers in the `COVARIATES`."""
    one, other = text_measures(first), text_measures(second)
    return math.log2((1 + one["words"]) / (1 + other["words"])), one["layout"] - other["layout"]


def _pairings(texts: Sequence[Mapping[int, str]], reference: int) -> Iterator[Pairing]:
    """Pairs of answers: equal sample numbers of every two models, and pairs of consecutive samples of the reference."""
    for i, first in enumerate(texts):
        for j, second in enumerate(texts[i + 1 :], i + 1):
            yield from ((i, j, (first[number], second[number])) for number in sorted(first.keys() & second.keys()))
    own = texts[reference]
    yield from ((reference, reference, (own[at], own[at + 1])) for at in sorted(own)[::2] if at + 1 in own)


def _common_items(name: str, models: Sequence[Evaluation]) -> list[int]:
    rest = [set(model.domains[name].items) for model in models[1:]]
    return [item for item in models[0].domains[name].items if all(item in each for each in rest)]
