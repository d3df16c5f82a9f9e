"""Win rates: pairwise comparison of evaluated models by an LLM judge, each pair in both orders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.evals.battles import COVARIATES, Battles, Duel, Verdicts, controlled, fight
from stretto.evals.scores import MOST_INFRA
from stretto.evals.writing import text_measures
from stretto.flow.launch import SourceTables
from stretto.post.suite import SAMPLES_FILE, Evaluation, SuiteConfig, read_samples
from stretto.tasks.judge import JudgedSource, JudgeFailed


def battle(models: Sequence[Evaluation], folders: Sequence[Path], reference: int = 0, seed: int = 0) -> Battles:
    """Compare the answers of ``models``, evaluated in ``folders``, in all judged domains, sample by sample. The reference's answers are
    also compared with its own next samples, where an unbiased judge gives 50 %.

    Raises:
        UserError: no judged domain, or more than `MOST_INFRA` infrastructure errors.
    """
    assert len(models) > 1, "one model alone has no opponent"
    names = [name for name in models[0].domains if all(name in model.domains for model in models)]
    samples = [read_samples(folder / SAMPLES_FILE) for folder in folders]
    num_models, asked, contradicted, infra = len(models), 0, 0, 0
    won, itself, fought = list[np.ndarray](), list[float](), list[Duel]()
    with ExitStack() as held:
        judged = {name: source for name, source in _sources(models[0], held).items() if name in names}
        if not judged:
            raise UserError(
                "--battle: no judged domain in all evaluations; evaluate --suite writing, or a suite of your own with a judge"
            )
        work = [(name, item) for name in judged for item in _common(name, models)]
        with progress("comparisons", len(work)) as advance:
            for name, item in work:
                texts = [
                    {key[2]: "\n\n".join(each.said) for key, each in own.items() if key[:2] == (name, item)}
                    for own in samples
                ]
                duels = list(_meetings(texts, reference))
                flat = [text for _, _, pair in duels for text in pair]
                pairs = [(2 * at, 2 * at + 1) for at in range(len(duels))]
                asked += len(duels)
                advance(1)
                try:
                    said = judged[name].duels(judged[name].problem(item), flat, pairs)
                except JudgeFailed as failed:
                    infra += len(duels)
                    if infra > MOST_INFRA * len(work) * len(duels):
                        raise UserError(
                            f"--battle: {infra} comparisons could not be judged: {failed}; correct that and repeat the command"
                        ) from failed
                    continue
                got = [one if one == other else 0.5 for one, other in said]
                contradicted += sum(one != other for one, other in said)
                fought += [
                    Duel(len(won), i, j, each, _differences(*pair))
                    for each, (i, j, pair) in zip(got, duels, strict=True)
                    if i != j
                ]
                wins_MM = np.full((num_models, num_models), np.nan)
                for i, j in {(i, j) for i, j, _ in duels if i != j}:
                    wins_MM[i, j] = np.mean([each for each, duel in zip(got, duels, strict=True) if duel[:2] == (i, j)])
                    wins_MM[j, i] = 1 - wins_MM[i, j]
                own = [each for each, (i, j, _) in zip(got, duels, strict=True) if i == j]
                won.append(wins_MM)
                itself.append(float(np.mean(own)) if own else math.nan)
    told = Verdicts(asked, contradicted / max(1, asked - infra), infra)
    found = fight([model.name for model in models], np.array(won), np.array(itself), reference, told, seed)
    strengths, effects = controlled(fought, num_models, reference, seed)
    return replace(found, controlled=strengths, effects=dict(zip(COVARIATES, effects, strict=True)))


def _differences(first: str, second: str) -> tuple[float, float]:
    """Of `COVARIATES`."""
    one, other = text_measures(first), text_measures(second)
    return math.log2((1 + one["words"]) / (1 + other["words"])), one["layout"] - other["layout"]


def _meetings(texts: Sequence[Mapping[int, str]], reference: int) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """Pairs of answers: equal sample numbers of every two models, and pairs of consecutive samples of the reference."""
    for i, first in enumerate(texts):
        for j, second in enumerate(texts[i + 1 :], i + 1):
            yield from ((i, j, (first[number], second[number])) for number in sorted(first.keys() & second.keys()))
    own = texts[reference]
    yield from ((reference, reference, (own[at], own[at + 1])) for at in sorted(own)[::2] if at + 1 in own)


def _sources(model: Evaluation, held: ExitStack) -> dict[str, JudgedSource]:
    """Judged sources, opened."""
    found: dict[str, JudgedSource] = {}
    for told in model.asked["suites"].values():
        suite = validate(SuiteConfig, told, model.name)
        sources = {name: each for name, each in suite.sources.items() if each.kind == "judged" or ":" in each.kind}
        opened = held.enter_context(SourceTables(sources, suite.sandbox).opened())
        found |= {name: source for name, source in opened.items() if isinstance(source, JudgedSource)}
    return found


def _common(name: str, models: Sequence[Evaluation]) -> list[int]:
    rest = [set(model.domains[name].items) for model in models[1:]]
    return [item for item in models[0].domains[name].items if all(item in each for each in rest)]
