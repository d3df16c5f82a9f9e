from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.data.mixture import Mixture, pick_parts
from stretto.data.shards import TokenSet
from stretto.data.tokenise import tokenise
from tests.data.conftest import Bytes, texts

Make = Callable[[str, int], TokenSet]


@given(st.lists(st.floats(0.05, 10), min_size=1, max_size=6), st.integers(0, 2**63), st.integers(0, 2**40))
def test_shares_hold_over_any_stretch(weights: list[float], seed: int, start: int) -> None:
    num = 2000
    picked = pick_parts(np.arange(start, start + num), weights, seed)
    shares = np.bincount(picked, minlength=len(weights))
    # An interval's count under a golden-ratio rotation is off by O(log num); 12 is generous for 2,000.
    assert (abs(shares - num * np.array(weights) / sum(weights)) < 12).all()


def test_a_pick_depends_on_seed_and_position_only() -> None:
    whole = pick_parts(np.arange(1000), [1, 2, 3], 7)
    assert np.array_equal(pick_parts(np.arange(400, 600), [1, 2, 3], 7), whole[400:600])
    assert not np.array_equal(pick_parts(np.arange(1000), [1, 2, 3], 8), whole)


def test_opens_its_parts(make_set: Make, tmp_path: Path) -> None:
    for name in "ab":
        make_set(name, 5)
    tree = {"parts": [{"name": "a", "path": tmp_path / "a", "weight": 2}, {"name": "b", "path": tmp_path / "b"}]}
    mixture = validate(Mixture, tree, "recipe")
    assert mixture.weights == (2, 1)
    assert [data.num_documents for data in mixture.open()] == [5, 5]
    tokenise({"train": texts(3)}, Bytes(vocab_size=300), tmp_path / "c", processes=1)
    other = mixture.replace(parts=(*mixture.parts, mixture.parts[0].replace(name="c", path=tmp_path / "c")))
    with pytest.raises(UserError, match="encoded with another tokenizer"):
        other.open()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts"),
        ([{"name": "a", "path": "x", "weight": 0}], r"parts\.0\.weight"),
        ([{"name": "a", "path": "x", "weight": float("inf")}], r"parts\.0\.weight"),
        ([{"name": "a", "path": "x"}, {"name": "a", "path": "y"}], "two parts have the name 'a'"),
    ],
)
def test_impossible_mixtures_are_named(parts: list, message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(Mixture, {"parts": parts}, "recipe")
