"""Win rates: pairwise comparison of evaluated models by an LLM judge, each pair in both orders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.evals.battles import COVARIATES, Battles, Duel, Verdicts, controlled, fight
from stretto.evals.scores import MOST_INFRA
from stretto.evals.writing import text_measures
from stretto.post.suite import Evaluation
from stretto.post.suite_samples import SAMPLES_FILE, read_samples
from stretto.post.suites import only_domains, opened_sources, suites_of
from stretto.tasks.judge import JudgedSource, JudgeFailed


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
    num_duels, num_contradicted, num_infra = 0, 0, 0
    wins, self_wins, fought = list[np.ndarray](), list[float](), list[Duel]()
    with opened_sources(only_domains(suites, candidates)) as opened:
        judged = {name: source for name, source in opened.items() if isinstance(source, JudgedSource)}
        if not judged:
            raise UserError(
                "--battle: no judged domain in all evaluations; evaluate --suite writing, or a suite of your own with a judge"
            )
        work = [(name, item) for name in judged for item in _common_items(name, models)]
        with progress("comparisons", len(work)) as advance:
            for name, item in work:
                texts = [
                    {key[2]: "\n\n".join(one.spoken) for key, one in own.items() if key[:2] == (name, item)}
                    for own in samples
                ]
                pairings = list(_pairings(texts, reference))
                num_duels += len(pairings)
                advance(1)
                try:
                    verdicts = judged[name].duels(
                        judged[name].problem(item),
                        [text for _, _, pair in pairings for text in pair],
                        [(2 * at, 2 * at + 1) for at in range(len(pairings))],
                    )
                except JudgeFailed as failed:
                    num_infra += len(pairings)
                    if num_infra > MOST_INFRA * len(work) * len(pairings):
                        raise UserError(
                            f"--battle: {num_infra} comparisons could not be judged: {failed}; correct that and repeat the command"
                        ) from failed
                    continue
                num_contradicted += sum(one != other for one, other in verdicts)
                wins_MM, own = np.full((len(models), len(models)), np.nan), list[float]()
                by_pair: dict[tuple[int, int], list[float]] = {}
                for (one, other), (i, j, pair) in zip(verdicts, pairings, strict=True):
                    won = one if one == other else 0.5
                    if i == j:
                        own.append(won)
                    else:
                        by_pair.setdefault((i, j), []).append(won)
                        fought.append(Duel(len(wins), i, j, won, _differences(*pair)))
                for (i, j), each in by_pair.items():
                    wins_MM[i, j] = np.mean(each)
                    wins_MM[j, i] = 1 - wins_MM[i, j]
                wins.append(wins_MM)
                self_wins.append(float(np.mean(own)) if own else math.nan)
    counts = Verdicts(num_duels, num_contradicted / max(1, num_duels - num_infra), num_infra)
    found = fight([model.name for model in models], np.array(wins), np.array(self_wins), reference, counts, seed)
    strengths, effects = controlled(fought, len(models), reference, seed)
    return replace(found, controlled=strengths, effects=dict(zip(COVARIATES, effects, strict=True)))


def _differences(first: str, second: str) -> tuple[float, float]:
    """Differences of two answers in the `COVARIATES`."""
    one, other = text_measures(first), text_measures(second)
    return math.log2((1 + one["words"]) / (1 + other["words"])), one["layout"] - other["layout"]


def _pairings(texts: Sequence[Mapping[int, str]], reference: int) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """Pairs of answers: equal sample numbers of every two models, and pairs of consecutive samples of the reference."""
    for i, first in enumerate(texts):
        for j, second in enumerate(texts[i + 1 :], i + 1):
            yield from ((i, j, (first[number], second[number])) for number in sorted(first.keys() & second.keys()))
    own = texts[reference]
    yield from ((reference, reference, (own[at], own[at + 1])) for at in sorted(own)[::2] if at + 1 in own)


def _common_items(name: str, models: Sequence[Evaluation]) -> list[int]:
    rest = [set(model.domains[name].items) for model in models[1:]]
    return [item for item in models[0].domains[name].items if all(item in each for each in rest)]
