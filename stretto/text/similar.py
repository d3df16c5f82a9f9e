"""Similarity of texts, and repetition within texts, by words, letters or word vectors; no language model is needed.

Rewards and reports use the same measures. Letters are folded to lower case, and a Chinese or Japanese character counts as a word.
Words and letters do not recognise paraphrases; use a judge for those.

Shape letters: N texts, G different n-grams of all texts, D dimensions of an embedding.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import UserError

Similarity = Literal["words", "characters", "meaning"]
"""``words``: Jaccard index of the sets of words and word pairs. ``characters``: cosine of the counts of letter trigrams, with white
space as one blank; for short answers, and for small differences in long texts. ``meaning``: cosine of the mean word vectors, which
represents topics but not word order; needs the extra ``writing``.
"""

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_LETTERS = 3
_COPIED_WORDS = 4


def words(text: str) -> list[str]:
    """The words of ``text`` in order, without punctuation."""
    return _WORD.findall(text.casefold())


def ngrams(items: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of ``n`` items, in order."""
    return list(zip(*(items[start:] for start in range(n)), strict=False))


def distinct(*texts: str, n: int = 2) -> float:
    """Share of different n-grams of words among all n-grams of the texts together (distinct-n, 1510.03055); 1 if there are none."""
    runs = [run for text in texts for run in ngrams(words(text), n)]
    return len(set(runs)) / len(runs) if runs else 1.0


def compression(text: str) -> float:
    """Size after zlib over size before, at most 1. The lower, the more the text repeats itself. Short texts have 1."""
    content = text.encode(errors="replace")
    return min(1.0, len(zlib.compress(content, 9)) / len(content)) if content else 1.0


def copied(text: str, of: str) -> float:
    """Share of the words of ``text`` that are in runs of at least four words of ``of``. A text of fewer words counts as copied only
    if it equals ``of``: a short answer may well repeat words of the question.
    """
    own, other = words(text), words(of)
    if len(own) < _COPIED_WORDS:
        return float(own == other and bool(own))
    known = set(ngrams(other, _COPIED_WORDS))
    is_copied = np.zeros(len(own), bool)
    for start, run in enumerate(ngrams(own, _COPIED_WORDS)):
        if run in known:
            is_copied[start : start + _COPIED_WORDS] = True
    return float(is_copied.mean())


def similarity_NN(texts: Sequence[str], kind: Similarity = "words") -> NDArray[np.float64]:
    """Similarity of each pair of texts: 1 for equal n-grams, 0 for no common one; ``meaning`` can be as low as -1. Symmetric. Raises
    `UserError` as `embeddings`.
    """
    if kind == "meaning":
        units_ND = embeddings()(texts)
        alike_NN = np.clip(units_ND @ units_ND.T, -1.0, 1.0)
        np.fill_diagonal(alike_NN, 1.0)
        return alike_NN
    from scipy.sparse import csr_array  # imported late: takes half a second, and most callers do not need it

    if kind == "words":
        counts = [Counter({run: 1 for n in (1, 2) for run in ngrams(found, n)}) for found in map(words, texts)]
    else:
        letters = [list(" ".join(text.casefold().split())) for text in texts]
        counts = [Counter(ngrams(found, _LETTERS) or [tuple(found)] * bool(found)) for found in letters]
    numbers = {run: number for number, run in enumerate(dict.fromkeys(chain.from_iterable(counts)))}
    rows = np.repeat(np.arange(len(texts)), [len(found) for found in counts])
    columns = np.array([numbers[run] for run in chain.from_iterable(counts)], np.int64)
    values = np.array([num for found in counts for num in found.values()], np.float64)
    counts_NG = csr_array((values, (rows, columns)), shape=(len(texts), len(numbers)))
    common_NN = (counts_NG @ counts_NG.T).toarray()
    sizes_N = common_NN.diagonal()
    if kind == "words":
        total_NN = sizes_N[:, None] + sizes_N - common_NN
    else:
        total_NN = np.sqrt(sizes_N[:, None] * sizes_N)
    # two texts without n-grams have similarity 1, and so have equal texts, whatever the rounding
    alike_NN = np.divide(common_NN, total_NN, out=np.zeros_like(common_NN), where=total_NN > 0)
    alike_NN[(sizes_N[:, None] == 0) & (sizes_N == 0)] = 1.0
    np.fill_diagonal(alike_NN, 1.0)
    return np.minimum(alike_NN, 1.0)


@cache
def embeddings() -> Callable[[Sequence[str]], NDArray[np.float64]]:
    """Function from texts to unit vectors [N, D]: the means of word vectors in wordllama's table, which is in its wheel. Raises
    `UserError`: the package is not installed.
    """
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        import wordllama  # optional
    except ImportError:
        raise UserError("similarity by word vectors needs a package: pip install 'stretto[writing]'") from None
    finally:  # the package sets the logging of the whole process to INFO
        root.setLevel(level)
        root.handlers[:] = handlers
    # without cache_dir the package does not find the tokenizer in its wheel, and downloads one
    model = wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)

    def embed(texts: Sequence[str]) -> NDArray[np.float64]:
        vectors_ND = np.nan_to_num(np.asarray(model.embed(list(texts)), np.float64))
        return vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-9)

    return embed


def clusters_N(alike_NN: NDArray[np.float64], same_at: float) -> NDArray[np.int32]:
    """Cluster of each text, numbered from 0 by first appearance. Two texts are in the same cluster if their similarity is at least
    ``same_at``, or if a chain of such pairs connects them (single linkage).
    """
    from scipy.sparse.csgraph import connected_components

    labels_N: NDArray[np.int32] = connected_components(alike_NN >= same_at, directed=False)[1]
    return labels_N
