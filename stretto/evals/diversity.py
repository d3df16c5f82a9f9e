"""Diversity of the answers to one problem: measures of a group of texts, and means over problems.

The measures need pairwise similarities (`stretto.text.similar`).

Shape letters: N texts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from stretto.text.similar import clusters_N, distinct, ngrams, words

MEASURES = ("distinct_1", "distinct_2", "self_bleu", "vendi", "clusters")
"""Keys of `diversity`, in the order of reports."""
SAME_AT = 0.8
"""Smallest similarity by characters of two texts of one cluster (our choice: one changed word in a sentence of ten)."""
_ORDERS, _SMOOTHING = 4, 0.1
"""BLEU: longest n-gram, and the count that replaces a count of 0 (nltk's smoothing method 1)."""


def diversity(texts: Sequence[str], alike_NN: np.ndarray, same_at: float) -> dict[str, float]:
    """The `MEASURES` of ``texts`` that answer one problem.

    ``distinct_n``: number of different word n-grams divided by the number of all (1510.03055). ``self_bleu``: mean BLEU of each text against
    the others, 1 for equal texts (1802.01886). ``vendi``: effective number of different texts, from 1 for equal texts to N for texts
    without similarity (2210.02410). ``clusters``: number of clusters.

    Args:
        alike_NN: similarities, positive semi-definite, 1 on the diagonal.
        same_at: smallest similarity of two texts of one cluster.
    """
    return {
        "distinct_1": distinct(*texts, n=1),
        "distinct_2": distinct(*texts, n=2),
        "self_bleu": self_bleu([words(text) for text in texts]),
        "vendi": vendi(alike_NN),
        "clusters": float(clusters_N(alike_NN, same_at).max() + 1),
    }


def vendi(alike_NN: np.ndarray) -> float:
    """Vendi score: exp of the entropy of the eigenvalues of ``alike_NN / N`` (2210.02410)."""
    values_N = np.linalg.eigvalsh(alike_NN / len(alike_NN))
    values_N = values_N[values_N > 1e-12]  # smaller eigenvalues are rounding errors
    return float(np.exp(-(values_N * np.log(values_N)).sum()))


def self_bleu(texts: Sequence[Sequence[str]]) -> float:
    """Mean BLEU of each text (a list of words) with the other texts as references; NaN for a single text.

    N-grams have up to 4 words, or as many as the text. For texts of at least four words, the result is nltk's with smoothing method 1.
    """
    if len(texts) < 2:
        return math.nan
    counts = [[Counter(ngrams(each, n)) for n in range(1, _ORDERS + 1)] for each in texts]
    scores = []
    for place, own in enumerate(texts):
        others = [number for number in range(len(texts)) if number != place]
        if not own:
            scores.append(float(any(not texts[number] for number in others)))
            continue
        shares = []
        for order, grams in enumerate(counts[place][: len(own)]):
            most = Counter[tuple[str, ...]]()
            for number in others:
                most |= counts[number][order]
            shares.append(max(_SMOOTHING, (grams & most).total()) / grams.total())
        closest = min((abs(len(texts[number]) - len(own)), len(texts[number])) for number in others)[1]
        brevity = min(1.0, math.exp(1 - closest / len(own)))
        scores.append(brevity * math.exp(sum(map(math.log, shares)) / len(shares)))
    return float(np.mean(scores))
