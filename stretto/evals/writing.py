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
"""Cosine of embeddings from which two answers are one (ours: 0.9 between paraphrases, 0.5 between two stories to one prompt)."""
_RUN = 4
"""Words: a text that says as many in the same order again repeats itself."""
_MARK = re.compile(r"^[ \t]*(?:#|[-*+>] |---|\*\*\*|•|\d{1,3}[.)] )", re.MULTILINE)
_PRIOR = 0.5
"""Occurrences that every n-gram is given on both sides before rates are compared."""
_OVERUSED_N, _MOST_OVERUSED = 3, 12
"""Words of an overused n-gram, and how many of these are told."""
_OFTEN, _ANSWERS = 3, 0.02
"""An overused n-gram occurs so often at least, and in so many of the answers."""

Similarity = Callable[[Sequence[str]], np.ndarray]
"""From texts to how alike each two are: [N, N], 1 on the diagonal."""


@dataclass(frozen=True, slots=True)
class Overused:
    """An n-gram that answers have more often than people do. Written by `overused`."""

    ngram: str
    answers: float
    """Times in ten thousand words of the answers."""
    people: float
    """The same of the human corpus."""


def distinct_k(alike_NN: np.ndarray) -> int:
    """How many different answers there are: each is compared with the first of every class so far, and opens one of its own if it is
    like none of them (NoveltyBench, 2504.05228, whose likeness is a trained classifier's)."""
    firsts = list[int]()
    for at in range(len(alike_NN)):
        if not any(alike_NN[at, first] >= SAME_AT for first in firsts):
            firsts.append(at)
    return len(firsts)


def group_measures(texts: Sequence[str], alike_NN: np.ndarray) -> dict[str, float]:
    """Of the answers to one prompt."""
    return {
        "distinct_k": float(distinct_k(alike_NN)),
        "vendi": vendi(alike_NN),
        "clusters": float(clusters_N(alike_NN, SAME_AT).max() + 1),
        "distinct_2": distinct(*texts, n=2),
    }


def text_measures(text: str) -> dict[str, float]:
    """Of one answer: bytes of zlib over its own, the share of its words in runs that it has said before, its words, and how much of
    its lines is layout."""
    said, lines = words(text), [line for line in text.splitlines() if line.strip()]
    runs = ngrams(said, _RUN)
    return {
        "zlib": compression(text),
        "repeats": 1 - len(set(runs)) / len(runs) if runs else 0.0,
        "words": float(len(said)),
        "layout": marked(text) / max(1, len(lines)),
    }


def chapter_measures(chapters: Sequence[str]) -> list[dict[str, float]]:
    """Of each of a text's ``chapters``: the words, the share of different word pairs, of words in runs that it has said before, and in runs
    that chapters before it have."""
    found, before = list[dict[str, float]](), set[tuple[str, ...]]()
    for text in chapters:
        runs = ngrams(words(text), _RUN)
        again = sum(run in before for run in runs) / max(1, len(runs))
        single = text_measures(text)
        found.append(
            {"words": single["words"], "distinct_2": distinct(text), "repeats": single["repeats"], "again": again}
        )
        before.update(runs)
    return found


def marked(text: str) -> int:
    """Lines that begin as headings, list items or rules, and spans of emphasis."""
    return len(_MARK.findall(text)) + text.count("**") // 2


def overused(texts: Sequence[str], people: Iterable[str]) -> list[Overused]:
    """The n-grams of words of ``texts`` whose rates are the most times those of ``people``, in several of the texts each. Raises
    `UserError`: nobody has written anything."""
    runs = [ngrams(words(text), _OVERUSED_N) for text in texts]
    here, among = Counter(run for own in runs for run in own), Counter(run for own in runs for run in set(own))
    there, num_there = Counter[tuple[str, ...]](), 0
    for text in people:
        own = ngrams(words(text), _OVERUSED_N)
        num_there += len(own)
        there.update(run for run in own if run in here)  # nothing else is looked up: a corpus may be large
    if not num_there:
        raise UserError("--human: no text to compare with; name a corpus of what people have written")
    num_here, least = max(1, here.total()), max(2, math.ceil(_ANSWERS * len(texts)))
    often = [run for run, num in here.items() if num >= _OFTEN and among[run] >= least]
    rates = {run: (here[run] / num_here, (there[run] + _PRIOR) / (num_there + _PRIOR)) for run in often}
    worst = sorted(rates, key=lambda run: -(here[run] + _PRIOR) / num_here / rates[run][1])[:_MOST_OVERUSED]
    return [Overused(" ".join(run), 1e4 * rates[run][0], 1e4 * there[run] / num_there) for run in worst]
