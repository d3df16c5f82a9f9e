"""What is counted of answers, by hand."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from stretto.base.errors import UserError
from stretto.evals.writing import distinct_k, group_measures, marked, overused, text_measures
from stretto.text.similar import similarity_NN


def test_distinct_k_compares_with_the_first_of_each_class() -> None:
    alike = np.eye(4)
    alike[0, 1] = alike[1, 0] = alike[1, 2] = alike[2, 1] = 0.9
    # 2 is like 1, which is like 0, which opened the class; 2 is not like 0
    assert distinct_k(alike) == 3 and distinct_k(np.ones((5, 5))) == 1 and distinct_k(np.eye(5)) == 5
    assert group_measures(["a b"] * 3, similarity_NN(["a b"] * 3, "characters"))["distinct_k"] == 1


def test_one_answer() -> None:
    found = text_measures("# Title\n\n- one two three four one two three four\n**Bold** 1. no\n2. yes")
    assert found["layout"] == 1.0 and marked("plain text\nand more - or less\n3 of 4.") == 0
    assert marked("1) one\n  12. two\n\t- three\n---\n> four") == 5
    assert text_measures("one two three four one two three four")["repeats"] == pytest.approx(0.2)  # 1 of 5 runs
    assert text_measures("") == {"zlib": 1.0, "repeats": 0.0, "words": 0.0, "layout": 0.0}


def test_what_is_overused() -> None:
    texts = [f"a testament to the {word} of it" for word in ("power", "beauty", "art")] + ["the end of the day came"]
    people = ["she came to the end of the day and slept", "a testament was read"] * 20
    found = overused(texts, people)
    assert found[0].ngram == "a testament to" and found[0].people == 0
    assert {each.ngram for each in found} == {
        "a testament to",
        "testament to the",
    }  # others are not in several answers, often
    with pytest.raises(UserError, match="--human: contains no text"):
        overused(texts, [])


def test_embeddings_know_meaning_and_stay_offline() -> None:
    level = logging.getLogger().level
    alike = similarity_NN(
        ["A dog runs in the park.", "A hound is running in a garden.", "Shares fell on Monday.", ""], "meaning"
    )
    assert alike[0, 1] > 0.3 > alike[0, 2] and (alike.diagonal() == 1).all() and np.isfinite(alike).all()
    assert np.linalg.eigvalsh(alike).min() > -1e-6  # Vendi takes its eigenvalues
    assert logging.getLogger().level == level
