from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple

import numpy as np
import pytest

from stretto.base.errors import UserError
from stretto.data import loader as module
from stretto.data.loader import Batch, Loader, RowStream, eval_batches
from stretto.data.pack import IGNORED, PADDING
from stretto.data.shards import TokenSet

Make = Callable[[str, int], TokenSet]
T = 32


def same(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(astuple(one), astuple(other), strict=True))


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows an epoch, as with real data."""
    monkeypatch.setattr(RowStream.__init__, "__defaults__", (40,))
    monkeypatch.setattr(module, "_LOOK_AHEAD", 7)


def test_an_epoch_gives_every_token_once(make_set: Make) -> None:
    data = make_set("a", 60)
    loader = Loader([data], [1.0], rows=1, seq_len=T, seed=3)
    expected = Counter(int(token) for number in range(60) for token in data.document(number))
    orders = []
    for epoch in range(2):
        seen: Counter[int] = Counter()
        order = []
        while loader.epochs == [epoch - 1] or not loader._streams[0].at_epoch_end:
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


@pytest.mark.parametrize("world", [2, 4])
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
        same(*pair) for pair in zip(batches[:2], eval_batches(data, rows=8, seq_len=T, num_batches=2), strict=True)
    )
    halves = [eval_batches(data, rows=8, seq_len=T, rank=rank, world=2) for rank in range(2)]
    for batch, first, second in zip(batches, *halves, strict=True):
        assert np.array_equal(batch.tokens_BT, np.concatenate([first.tokens_BT, second.tokens_BT]))


def test_refuses_another_run(make_set: Make) -> None:
    one, other = make_set("a", 30), make_set("b", 30)
    state = Loader([one], [1], rows=4, seq_len=T, seed=0).state()
    for name, loader in {
        "data": Loader([other], [1], rows=4, seq_len=T, seed=0),
        "weights": Loader([one], [2], rows=4, seq_len=T, seed=0),
        "seq_len": Loader([one], [1], rows=4, seq_len=16, seed=0),
        "seed": Loader([one], [1], rows=4, seq_len=T, seed=1),
    }.items():
        with pytest.raises(UserError, match=f"loader state: {name}: was .*; resume with the same data and recipe"):
            loader.restore(state)
    with pytest.raises(UserError, match="rows: 5 rows cannot be shared evenly by 2 ranks"):
        Loader([one], [1], rows=5, seq_len=T, seed=0, world=2)


def test_resumes_on_another_number_of_ranks(make_set: Make) -> None:
    data = make_set("a", 50)
    whole = Loader([data], [1], rows=4, seq_len=T, seed=0)
    for _ in range(9):
        whole.next()
    half = Loader([data], [1], rows=4, seq_len=T, seed=0, rank=1, world=2)
    half.restore(whole.state())
    assert np.array_equal(whole.next().tokens_BT[2:], half.next().tokens_BT)
