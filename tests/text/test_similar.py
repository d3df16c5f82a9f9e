"""Likeness and repetition of texts, against what can be counted by hand."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from stretto.base.errors import UserError
from stretto.text import similar
from stretto.text.similar import clusters_N, compression, copied, distinct, similarity_NN, words


def test_words_of_several_scripts() -> None:
    assert words("The cat's 2nd MAT, déjà-vu!") == ["the", "cat", "s", "2nd", "mat", "déjà", "vu"]
    assert words("写诗 about 雨") == ["写", "诗", "about", "雨"]
    assert words(" .,\n") == []


def test_distinct_counts_pairs() -> None:
    assert distinct("a b c d") == 1.0
    assert distinct("a b a b a") == pytest.approx(2 / 4)
    assert distinct("no no no no no") == pytest.approx(1 / 4)
    assert distinct("one") == distinct("") == 1.0
    assert distinct("a b a", n=1) == pytest.approx(2 / 3)
    assert distinct("a b c", "b c d") == pytest.approx(3 / 4) and distinct() == 1.0


def test_compression_falls_with_repetition() -> None:
    once = "The rain came late that year, and nobody had mended the roof over the long barn by the river. "
    assert compression(once * 20) < 0.2 < compression(once) <= 1.0
    assert compression("") == compression("yes") == 1.0


def test_copied_is_the_share_of_words_in_long_runs() -> None:
    prompt = "write a short poem about rain in the city"
    assert copied(prompt, prompt) == 1.0
    assert copied("Write a short poem: wet streets shine", prompt) == pytest.approx(4 / 7)
    assert copied("a poem about the rain in a city", prompt) == 0.0  # the same words, no run of four
    assert copied("rain", prompt) == 0.0  # named, not copied
    assert copied("tell me", "Tell me!") == 1.0
    assert copied("", "") == copied("", prompt) == 0.0


def test_meaning_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wordllama", None)
    similar.embeddings.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'stretto\[writing\]'"):
        similarity_NN(["a", "b"], "meaning")


def test_words_are_compared_by_jaccard() -> None:
    """Of words and pairs: {a, b, ab} and {b, c, bc} have one of five in common."""
    alike_NN = similarity_NN(["a b", "b c", "a b", ""])
    expected = [[1, 1 / 5, 1, 0], [1 / 5, 1, 1 / 5, 0], [1, 1 / 5, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_allclose(alike_NN, expected, atol=1e-15)


def test_characters_are_compared_by_cosine() -> None:
    """Of runs of three: abc, bcd against bcd, cde; counts of aaaa are one run twice."""
    alike_NN = similarity_NN(["abcd", "bcde", "aaa", "aaaa", "x", "X "], "characters")
    assert alike_NN[0, 1] == pytest.approx(1 / 2)
    assert alike_NN[2, 3] == pytest.approx(1.0)
    assert alike_NN[0, 2] == 0.0 and alike_NN[4, 5] == 1.0
    assert similarity_NN([], "characters").shape == (0, 0)


@pytest.mark.parametrize("kind", ["words", "characters"])
def test_likeness_is_symmetric_and_one_for_the_same(kind: str) -> None:
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(["rain", "sun", "wind", "snow"], int(num))) for num in draw.integers(0, 12, 12)]
    alike_NN = similarity_NN([*texts, *texts], kind)  # type: ignore[arg-type]
    np.testing.assert_array_equal(alike_NN, alike_NN.T)
    np.testing.assert_allclose(np.diag(alike_NN, 12), 1.0, rtol=0, atol=1e-15)
    assert alike_NN.min() >= 0.0 and alike_NN.max() <= 1.0


def test_clusters_are_joined_by_chains() -> None:
    alike_NN = np.eye(4)
    alike_NN[0, 2] = alike_NN[2, 0] = alike_NN[2, 3] = alike_NN[3, 2] = 0.5
    assert clusters_N(alike_NN, 0.5).tolist() == [0, 1, 0, 0]
    long = np.eye(30) + np.eye(30, k=1) + np.eye(30, k=-1)
    assert clusters_N(long, 1.0).tolist() == [0] * 30 and clusters_N(np.eye(0), 1.0).tolist() == []
    assert clusters_N(alike_NN, 0.51).tolist() == [0, 1, 2, 3]
