"""How alike texts are, and how much they repeat: by their words, letters or words' vectors, with no network.

What rewards go by and what reports measure is the same here. Letters are folded to lower case; a Chinese or Japanese
character is a word. By words and letters two texts of one meaning in other words are different: where that matters, ask a judge.

Shape letters: N texts, G different n-grams of all of them, D of an embedding.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import UserError

Similarity = Literal["words", "characters", "meaning"]
"""``words``: Jaccard of the sets of words and word pairs. ``characters``: cosine of the counts of three letters in a row,
white space as one blank: for short answers, and for small differences in many words. ``meaning``: cosine of the means of words'
vectors, which knows topics and no order of words; needs the extra ``writing``."""

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_LETTERS = 3


def words(text: str) -> list[str]:
    """Its words in order, without punctuation."""
    return _WORD.findall(text.casefold())


def ngrams(items: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of ``n`` items, in order."""
    return list(zip(*(items[start:] for start in range(n)), strict=False))


def distinct(*texts: str, n: int = 2) -> float:
    """Different n-grams of words over all of them, in all texts together (distinct-n, 1510.03055); 1 where there is none."""
    found = [run for text in texts for run in ngrams(words(text), n)]
    return len(set(found)) / len(found) if found else 1.0


def compression(text: str) -> float:
    """Bytes that zlib makes of the text over its own, at most 1: the less a text repeats, the more. Short texts have 1."""
    content = text.encode(errors="replace")
    return min(1.0, len(zlib.compress(content, 9)) / len(content)) if content else 1.0


def copied(text: str, of: str, n: int = 4) -> float:
    """Share of the words of ``text`` that stand in runs of at least ``n`` words of ``of``. A text of fewer words is copied
    if it is the whole of ``of``, and not at all otherwise: a short answer may well name what it was asked about."""
    own, other = words(text), words(of)
    if len(own) < n:
        return float(own == other and bool(own))
    known = set(ngrams(other, n))
    is_copied = np.zeros(len(own), bool)
    for start, run in enumerate(ngrams(own, n)):
        if run in known:
            is_copied[start : start + n] = True
    return float(is_copied.mean())


def similarity_NN(texts: Sequence[str], kind: Similarity = "words") -> NDArray[np.float64]:
    """How alike each two are: 1 for texts with the same n-grams, 0 where they have none in common, by their meaning down to -1.
    Symmetric. Raises `UserError`: as `embeddings`."""
    if kind == "meaning":
        found_ND = embeddings()(texts)
        alike_NN = np.clip(found_ND @ found_ND.T, -1.0, 1.0)
        np.fill_diagonal(alike_NN, 1.0)
        return alike_NN
    from scipy.sparse import csr_array  # late, as below: half a second that few who import this need

    if kind == "words":
        found = [words(text) for text in texts]
        counts = [Counter({run: 1 for n in (1, 2) for run in ngrams(each, n)}) for each in found]
    else:
        letters = [list(" ".join(text.casefold().split())) for text in texts]
        counts = [Counter(ngrams(each, _LETTERS) or [tuple(each)] * bool(each)) for each in letters]
    numbers = {run: number for number, run in enumerate(dict.fromkeys(run for each in counts for run in each))}
    rows = np.repeat(np.arange(len(texts)), [len(each) for each in counts])
    columns = np.array([numbers[run] for each in counts for run in each], np.int64)
    values = np.array([num for each in counts for num in each.values()], np.float64)
    counts_NG = csr_array((values, (rows, columns)), shape=(len(texts), len(numbers)))
    common_NN = (counts_NG @ counts_NG.T).toarray()
    sizes_N = common_NN.diagonal()
    if kind == "words":
        whole_NN = sizes_N[:, None] + sizes_N - common_NN
    else:
        whole_NN = np.sqrt(sizes_N[:, None] * sizes_N)
    # two texts without any n-gram are alike; a text and itself exactly, whatever roots round to
    alike_NN = np.divide(common_NN, whole_NN, out=np.zeros_like(common_NN), where=whole_NN > 0)
    alike_NN[(sizes_N[:, None] == 0) & (sizes_N == 0)] = 1.0
    np.fill_diagonal(alike_NN, 1.0)
    return np.minimum(alike_NN, 1.0)


@cache
def embeddings() -> Callable[[Sequence[str]], NDArray[np.float64]]:
    """From texts to unit vectors [N, D]: the means of wordllama's table of words' vectors, which is in its wheel. Raises `UserError`: the
    extra is not installed."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        import wordllama  # optional
    except ImportError:
        raise UserError("likeness by words' vectors needs a package: pip install 'stretto[writing]'") from None
    finally:  # it sets the whole process's logging to INFO
        root.setLevel(level)
        root.handlers[:] = handlers
    # its own search misses the tokenizer that its wheel has, and would download one
    model = wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)

    def units_ND(texts: Sequence[str]) -> NDArray[np.float64]:
        found_ND = np.nan_to_num(np.asarray(model.embed(list(texts)), np.float64))
        return found_ND / np.maximum(np.linalg.norm(found_ND, axis=1, keepdims=True), 1e-9)

    return units_ND


def clusters_N(alike_NN: NDArray[np.float64], same_at: float) -> NDArray[np.int32]:
    """The cluster of each text, numbered from 0 in order: two texts are in one if they are alike by at least ``same_at``, or
    if a chain of such pairs joins them (single linkage)."""
    from scipy.sparse.csgraph import connected_components

    labels_N: NDArray[np.int32] = connected_components(alike_NN >= same_at, directed=False)[1]
    return labels_N
