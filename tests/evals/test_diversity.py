"""Measures of diversity against known answers and nltk's BLEU."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stretto.evals.diversity import MEASURES, SAME_AT, diversity, self_bleu, vendi
from stretto.text.similar import similarity_NN

EQUAL = ["the cat sat on the mat today"] * 4
APART = ["abcd efgh", "ijkl mnop", "qrst uvwx", "1234 5678"]


def by_letters(texts: list[str]) -> dict[str, float]:
    return diversity(texts, similarity_NN(texts, "characters"), SAME_AT)


def test_equal_texts_are_one() -> None:
    found = by_letters(EQUAL)
    assert tuple(found) == MEASURES
    assert found == pytest.approx(
        {"distinct_1": 6 / 28, "distinct_2": 6 / 24, "self_bleu": 1.0, "vendi": 1.0, "clusters": 1.0}
    )


def test_texts_with_nothing_in_common_are_as_many_as_they_are() -> None:
    found = by_letters(APART)
    assert found["self_bleu"] < 0.1  # not 0: it is smoothed
    assert {name: found[name] for name in MEASURES if name != "self_bleu"} == pytest.approx(
        {"distinct_1": 1.0, "distinct_2": 1.0, "vendi": 4.0, "clusters": 4.0}
    )


def test_two_of_each_are_two() -> None:
    found = by_letters([APART[0], APART[0], APART[1], APART[1]])
    assert (found["vendi"], found["clusters"], found["distinct_1"]) == pytest.approx((2, 2, 0.5))


def test_vendi_is_the_exponential_of_the_entropy_of_eigenvalues() -> None:
    # two texts alike by s: eigenvalues (1 ± s) / 2
    for s in (0.0, 0.3, 0.9):
        shares = [(1 + s) / 2, (1 - s) / 2]
        assert vendi(np.array([[1, s], [s, 1]])) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)))


def test_short_and_empty_answers() -> None:
    assert by_letters(["7", "7"])["self_bleu"] == 1.0
    assert by_letters(["", ""])["self_bleu"] == 1.0
    assert by_letters(["", "7"])["self_bleu"] < 0.1
    assert by_letters(["7", "8"])["distinct_2"] == 1.0
    assert math.isnan(by_letters(["7"])["self_bleu"])
    assert by_letters(["7"])["vendi"] == 1.0


@pytest.mark.slow  # nltk takes seconds to import
def test_self_bleu_is_nltks() -> None:
    bleu = pytest.importorskip("nltk.translate.bleu_score", reason="nltk is not installed")
    rng = np.random.default_rng(0)
    texts = [[f"w{word}" for word in rng.zipf(1.5, size) % 20] for size in (9, 12, 4, 15, 12)]
    smoothing = bleu.SmoothingFunction().method1
    expected = [
        bleu.sentence_bleu([*texts[:place], *texts[place + 1 :]], text, smoothing_function=smoothing)
        for place, text in enumerate(texts)
    ]
    assert self_bleu(texts) == pytest.approx(np.mean(expected), rel=1e-12)
