"""Measures of open-ended answers without a judge: distinct answers, repetition, overused words.

Shape letter: N texts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.base.errors import UserError
from stretto.evals.diversity import vendi
from stretto.text.similar import clusters_N, compression, distinct, ngrams, words

SAME_AT = 0.8
"""Smallest cosine of two answers of one cluster (our choice: paraphrases have 0.9, two stories for one prompt 0.5)."""
_RUN = 4
"""Length in words of a repeated run."""
_MARK = re.compile(r"^[ \t]*(?:#|[-*+>] |---|\*\*\*|•|\d{1,3}[.)] )", re.MULTILINE)
_PRIOR = 0.5
"""Occurrences that are added to every n-gram's count before rates are compared."""
_OVERUSED_N, _MAX_OVERUSED = 3, 12
"""Words of an overused n-gram, and largest number of them that is reported."""
_MIN_COUNT, _MIN_ANSWERS = 3, 0.02
"""Smallest number of occurrences of an overused n-gram, and smallest share of answers that contain it."""

Similarity = Callable[[Sequence[str]], np.ndarray]
"""Pairwise similarities of texts: [N, N], 1 on the diagonal."""


@dataclass(frozen=True, slots=True)
class Overused:
    """An n-gram that is more frequent in answers than in human texts. Written by `overused`."""

    ngram: str
    answers: float
    """Occurrences per 10,000 words of the answers."""
    people: float
    """Occurrences per 10,000 words of the human texts."""


def distinct_k(alike_NN: np.ndarray) -> int:
    """Number of different answers (NoveltyBench, 2504.05228, with a similarity in place of its classifier): each answer is compared with
    the first answer of every class so far, and starts a new class if it is similar to none of them."""
    firsts = list[int]()
    for at in range(len(alike_NN)):
        if not any(alike_NN[at, first] >= SAME_AT for first in firsts):
            firsts.append(at)
    return len(firsts)


def group_measures(texts: Sequence[str], alike_NN: np.ndarray) -> dict[str, float]:
    """Measures of the answers to one prompt."""
    return {
        "distinct_k": float(distinct_k(alike_NN)),
        "vendi": vendi(alike_NN),
        "clusters": float(clusters_N(alike_NN, SAME_AT).max() + 1),
        "distinct_2": distinct(*texts, n=2),
    }


def text_measures(text: str) -> dict[str, float]:
    """Measures of one answer: compressed size / size (zlib), share of runs of words that are repetitions, number of words, and layout
    marks per line."""
    own, lines = words(text), [line for line in text.splitlines() if line.strip()]
    runs = ngrams(own, _RUN)
    return {
        "zlib": compression(text),
        "repeats": 1 - len(set(runs)) / len(runs) if runs else 0.0,
        "words": float(len(own)),
        "layout": marked(text) / max(1, len(lines)),
    }


def chapter_measures(chapters: Sequence[str]) -> list[dict[str, float]]:
    """Measures of each chapter: number of words, share of different word pairs, share of runs repeated within the chapter, and share of
    runs that earlier chapters contain."""
    found, before = list[dict[str, float]](), set[tuple[str, ...]]()
    for text in chapters:
        runs = ngrams(words(text), _RUN)
        again = sum(run in before for run in runs) / max(1, len(runs))
        one = text_measures(text)
        found.append({"words": one["words"], "distinct_2": distinct(text), "repeats": one["repeats"], "again": again})
        before.update(runs)
    return found


def marked(text: str) -> int:
    """Number of lines that begin as headings, list items or rules, plus number of emphasised spans."""
    return len(_MARK.findall(text)) + text.count("**") // 2


def overused(texts: Sequence[str], people: Iterable[str]) -> list[Overused]:
    """The word n-grams whose rate in ``texts`` is the largest multiple of their rate in ``people``. Raises `UserError`: ``people`` is
    empty."""
    runs = [ngrams(words(text), _OVERUSED_N) for text in texts]
    here, among = Counter(run for own in runs for run in own), Counter(run for own in runs for run in set(own))
    there, num_there = Counter[tuple[str, ...]](), 0
    for text in people:
        own = ngrams(words(text), _OVERUSED_N)
        num_there += len(own)
        there.update(run for run in own if run in here)  # other n-grams are not needed, and a corpus may be large
    if not num_there:
        raise UserError("--human: contains no text; name a corpus of human-written texts")
    num_here, least = max(1, here.total()), max(2, math.ceil(_MIN_ANSWERS * len(texts)))
    often = [run for run, num in here.items() if num >= _MIN_COUNT and among[run] >= least]
    rates = {run: (here[run] / num_here, (there[run] + _PRIOR) / (num_there + _PRIOR)) for run in often}
    worst = sorted(rates, key=lambda run: -(here[run] + _PRIOR) / num_here / rates[run][1])[:_MAX_OVERUSED]
    return [Overused(" ".join(run), 1e4 * rates[run][0], 1e4 * there[run] / num_there) for run in worst]
