from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.data import loader as module
from stretto.data import pack
from stretto.data.loader import Batch, Loader, Mixture, RowStream, eval_batches, key_of, mix, permute, pick_parts
from stretto.data.pack import IGNORED, PADDING
from stretto.data.shards import TokenSet, tokenise
from tests.data.conftest import Bytes, texts

Make = Callable[[str, int], TokenSet]
T = 32


def same(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(astuple(one), astuple(other), strict=True))


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows an epoch, as with real data."""
    monkeypatch.setattr(module, "WINDOW_PIECES", 50)
    monkeypatch.setattr(pack, "_BLOCK", 7)


def test_an_epoch_gives_every_token_once(make_set: Make) -> None:
    data = make_set("a", 60)
    loader = Loader([data], [1.0], rows=1, seq_len=T, seed=3)
    expected = Counter(int(token) for number in range(60) for token in data.document(number))
    orders = []
    for epoch in range(2):
        seen: Counter[int] = Counter()
        order = []
        while loader._streams[0].epoch == epoch - 1 or not loader._streams[0].at_epoch_end:
            batch = loader.next()
            seen.update(batch.tokens_BT[batch.documents_BT != PADDING].tolist())
            order.append(batch.tokens_BT.tobytes())
        assert seen == expected
        orders.append(order)
    assert orders[0] != orders[1]
    assert len(set(orders[0]) & set(orders[1])) < len(orders[0])


@pytest.mark.parametrize("num_before", [0, 1, 17, 100])
def test_resumes_to_the_token(make_set: Make, num_before: int) -> None:
    parts = [make_set("a", 50), make_set("b", 20)]

    def fresh() -> Loader:
        return Loader(parts, [0.7, 0.3], rows=4, seq_len=T, seed=5)

    loader = fresh()
    for _ in range(num_before):
        loader.next()
    state = json.loads(json.dumps(loader.state()))
    following = [loader.next() for _ in range(40)]
    resumed = fresh()
    resumed.restore(state)
    assert all(same(batch, resumed.next()) for batch in following)
    assert resumed.state() == loader.state()
    assert num_before == 0 or not same(following[0], fresh().next())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_share_one_global_batch(make_set: Make, world: int) -> None:
    parts = [make_set("a", 50), make_set("b", 20)]
    whole = Loader(parts, [1, 1], rows=8, seq_len=T, seed=5)
    ranks = [Loader(parts, [1, 1], rows=8, seq_len=T, seed=5, rank=rank, world=world) for rank in range(world)]
    for _ in range(30):
        batch, shares = whole.next(), [rank.next() for rank in ranks]
        for name in ("tokens_BT", "targets_BT", "documents_BT", "positions_BT", "parts_B"):
            assert np.array_equal(getattr(batch, name), np.concatenate([getattr(share, name) for share in shares]))
        assert batch.num_target_tokens == sum(share.num_target_tokens for share in shares)
        assert {share.global_target_tokens for share in shares} == {batch.num_target_tokens}
        assert batch.num_target_tokens == (batch.targets_BT != IGNORED).sum()
    assert {json.dumps(rank.state()) for rank in ranks} == {json.dumps(whole.state())}


def test_a_rank_without_rows_gets_a_row_of_padding(make_set: Make) -> None:
    data = make_set("a", 50)
    whole = Loader([data], [1], rows=3, seq_len=T, seed=5).next()
    shares = [Loader([data], [1], rows=3, seq_len=T, seed=5, rank=rank, world=5).next() for rank in range(5)]
    assert [len(share.tokens_BT) for share in shares] == [1] * 5
    padding = [share for share in shares if (share.documents_BT == PADDING).all()]
    assert len(padding) == 2 and all((share.targets_BT == IGNORED).all() for share in padding)
    assert [share.num_target_tokens for share in padding] == [0, 0]
    real_BT = np.concatenate([share.tokens_BT for share in shares if (share.documents_BT != PADDING).any()])
    assert np.array_equal(real_BT, whole.tokens_BT)
    assert {share.global_target_tokens for share in shares} == {whole.num_target_tokens}


def test_rows_come_from_the_part_they_name(make_set: Make) -> None:
    parts = [make_set("a", 50), make_set("b", 20)]
    loader = Loader(parts, [3, 1], rows=8, seq_len=T, seed=5)
    for _ in range(30):
        batch = loader.next()
        for tokens, part in zip(batch.tokens_BT, batch.parts_B, strict=True):
            assert (ord("a") in tokens) == (part == 0) and (ord("b") in tokens) == (part == 1)


def test_another_seed_is_another_order(make_set: Make) -> None:
    data = make_set("a", 50)
    one, other = (Loader([data], [1], rows=8, seq_len=T, seed=seed).next() for seed in (0, 1))
    assert not same(one, other)


def test_evaluation_covers_the_split_once_and_stays_the_same(make_set: Make) -> None:
    data = make_set("a", 30)
    batches = eval_batches(data, rows=8, seq_len=T)
    used = sum((batch.documents_BT != PADDING).sum() for batch in batches)
    assert used == data.num_tokens
    assert all(batch.tokens_BT.shape == (8, T) for batch in batches)
    assert all(((batch.documents_BT == PADDING).all(axis=1) == (batch.parts_B == -1)).all() for batch in batches)
    assert all(same(*pair) for pair in zip(batches, eval_batches(data, rows=8, seq_len=T), strict=True))
    assert all(
        same(*pair) for pair in zip(batches[:2], eval_batches(data, rows=8, seq_len=T, num_rows=16), strict=True)
    )
    halves = [eval_batches(data, rows=8, seq_len=T, rank=rank, world=2) for rank in range(2)]
    for batch, first, second in zip(batches, *halves, strict=True):
        assert np.array_equal(batch.tokens_BT, np.concatenate([first.tokens_BT, second.tokens_BT]))


def test_long_documents_are_spread_over_the_epoch(make_set: Make) -> None:
    """Else a few of them would fill a window, and a stretch of the run."""
    data = make_set("a", 60)
    stream = RowStream(data, seq_len=4, key=0)
    first_window = [piece.document for _ in stream._rows for piece in stream.next()]
    assert len(first_window) == module.WINDOW_PIECES < stream._num_pieces / 10
    assert len(set(first_window)) > 30


def test_refuses_another_run(make_set: Make) -> None:
    one, other = make_set("a", 30), make_set("b", 30)
    state = Loader([one], [1], rows=4, seq_len=T, seed=0).state()
    for name, loader in {
        "data": Loader([other], [1], rows=4, seq_len=T, seed=0),
        "weights": Loader([one], [2], rows=4, seq_len=T, seed=0),
        "seq_len": Loader([one], [1], rows=4, seq_len=16, seed=0),
        "seed": Loader([one], [1], rows=4, seq_len=T, seed=1),
    }.items():
        with pytest.raises(
            UserError, match=f"loader state: {name}: was .*; resume with the data, recipe and version of the run"
        ):
            loader.restore(state)
    older = {key: value for key, value in state.items() if key != "window"}  # of a version that shuffled documents
    with pytest.raises(UserError, match="loader state: window: was None, is now 50; resume with"):
        Loader([one], [1], rows=4, seq_len=T, seed=0).restore(older)
    with pytest.raises(UserError, match="rows: 5 rows cannot be shared evenly by 2 ranks"):
        eval_batches(one, rows=5, seq_len=T, world=2)


def test_resumes_on_another_number_of_ranks(make_set: Make) -> None:
    data = make_set("a", 50)
    whole = Loader([data], [1], rows=4, seq_len=T, seed=0)
    for _ in range(9):
        whole.next()
    half = Loader([data], [1], rows=4, seq_len=T, seed=0, rank=1, world=2)
    half.restore(whole.state())
    assert np.array_equal(whole.next().tokens_BT[2:], half.next().tokens_BT)


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


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection_that_needs_no_neighbours(size: int, key: int) -> None:
    whole = permute(np.arange(size), size, key)
    assert sorted(whole) == list(range(size))
    some = np.arange(size)[:: max(size // 7, 1)]
    assert (permute(some, size, key) == whole[some]).all()


def test_keys_give_unlike_orders() -> None:
    size = 10_000
    orders = [permute(np.arange(size), size, key_of(seed, epoch)) for seed in range(3) for epoch in range(3)]
    orders.append(np.arange(size))
    for index, one in enumerate(orders):
        for other in orders[:index]:
            # The correlation of independent orders has a standard deviation of 1/sqrt(size) = 0.01.
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
            assert (one == other).sum() < 12  # Poisson with mean 1


def test_streams_never_change() -> None:
    """Values in use: a change here would reshuffle every run that resumes."""
    assert int(mix(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF  # SplitMix64's first output for seed 0
    assert key_of(1, 2) != key_of(2, 1) != key_of(1, 2, 0)
    assert permute(np.arange(8), 8, 0).tolist() == [4, 5, 7, 2, 0, 1, 3, 6]
