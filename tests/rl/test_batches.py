"""The batch edge: what is stored comes back, and packing moves every stream by one and the same permutation."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.base.trajectory import Group, Trajectory
from stretto.data.pack import IGNORED, PADDING
from stretto.rl.batches import Batch, check_routes, load_group, pack, store_group
from stretto.rl.credit import assign
from stretto.rl.loss import LossConfig
from tests.rl.samples import group, trajectory

ROUTES = (3, 2, 8)
LOSS = LossConfig()


def equal(one: Any, other: Any) -> bool:
    """Records and arrays, to the bit and the type."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "__slots__"):
        return type(one) is type(other) and all(equal(getattr(one, n), getattr(other, n)) for n in one.__slots__)
    return bool(one == other)


@pytest.mark.parametrize("routes", [ROUTES, None])
def test_a_stored_group_comes_back_bit_for_bit(tmp_path: Path, routes: tuple[int, int, int] | None) -> None:
    before = group(np.random.default_rng(0), [1.0, 0.25, 0.0], ordinal=17, versions=(4, 5, 5), routes=routes)
    ref = store_group(tmp_path / "groups", before)
    assert equal(load_group(ref.location), before)
    assert (ref.ordinal, ref.attempt, ref.num_samples, ref.oldest_version) == (17, 0, 3, 4)
    assert ref.num_tokens == sum(sample.num_sampled for sample in before.trajectories)
    assert ref.mean_reward == pytest.approx(1.25 / 3) and not ref.is_uniform
    assert os.listdir(tmp_path / "groups") == ["group-00000017-0.npz"]


def test_a_token_without_an_expert_comes_back_as_one(tmp_path: Path) -> None:
    before = group(np.random.default_rng(0), [1.0, 1.0], routes=ROUTES)
    for sample in before.trajectories:
        assert sample.routes is not None
        sample.routes[0, 1] = 255
    ref = store_group(tmp_path, before)
    assert ref.is_uniform and equal(load_group(ref.location), before)


def test_another_attempt_is_another_file(tmp_path: Path) -> None:
    before = group(np.random.default_rng(0), [1.0, 0.0])
    again = Group(before.task, tuple(replace(sample, attempt=2) for sample in before.trajectories))
    first, second = store_group(tmp_path, before), store_group(tmp_path, again)
    assert first.location != second.location and second.attempt == 2


def cut_rows(sample: Trajectory, num: int) -> Trajectory:
    assert sample.routes is not None
    return replace(sample, routes=sample.routes[:num])


@pytest.mark.parametrize("change", [-1, 1])
def test_routes_of_the_wrong_length_are_refused(tmp_path: Path, change: int) -> None:
    """An engine returns a row for each token but the last: neither one fewer nor one for each."""
    whole = group(np.random.default_rng(0), [1.0, 0.0], routes=ROUTES)
    sample = whole.trajectories[1]
    rows = sample.num_tokens - 1 + change
    assert sample.routes is not None
    wrong = replace(sample, routes=np.resize(sample.routes, (rows, 3, 2)))
    ref = store_group(tmp_path, Group(whole.task, (whole.trajectories[0], wrong)))
    with pytest.raises(UserError, match=rf"routes of sample 1: {rows} rows for {sample.num_tokens} tokens") as caught:
        load_group(ref.location)
    assert ref.location in str(caught.value) and "\n" not in str(caught.value)


def test_routes_of_another_network_are_refused() -> None:
    whole = group(np.random.default_rng(0), [1.0, 0.0], routes=ROUTES)
    check_routes(whole, "here", layers=3, top_k=2)
    with pytest.raises(UserError, match="3 layers of 2 experts, the trained network has 4 of 2"):
        check_routes(whole, "here", layers=4, top_k=2)


@pytest.mark.parametrize("keep", [0, 40, 300])
def test_a_damaged_file_is_one_line(tmp_path: Path, keep: int) -> None:
    ref = store_group(tmp_path, group(np.random.default_rng(0), [1.0, 0.0], routes=ROUTES))
    path = Path(ref.location)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="not readable as a group") as caught:
        load_group(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_group(tmp_path / "group-00000001-0.npz")


def packed(groups: list[Group], seq_len: int = 24, rows: int = 4, **extra: Any) -> list[Batch]:
    return pack(groups, assign(groups, LOSS), seq_len, rows, **extra)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), num=st.integers(1, 5), seq_len=st.sampled_from([30, 41, 90]), rows=st.integers(1, 5)
)
def test_all_streams_follow_the_tokens(seed: int, num: int, seq_len: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [group(rng, [1.0, 0.0, 0.5], ordinal=index, versions=(2, 3), routes=ROUTES) for index in range(num)]
    credits = [credit for each in assign(groups, LOSS) for credit in each]
    samples = [sample for each in groups for sample in each.trajectories]
    seen = []
    for batch in pack(groups, assign(groups, LOSS), seq_len, rows):
        B, T = batch.tokens_BT.shape
        assert max(B - rows, T - seq_len) <= 0
        padding = batch.documents_BT == PADDING
        assert batch.routes_BTLK is not None
        assert (batch.routes_BTLK[padding] == -1).all(), "0 would name an expert"
        assert (batch.targets_BT[padding] == IGNORED).all() and (batch.samples_BT[padding] == -1).all()
        for row in range(B):
            for number in range(batch.documents_BT[row].max() + 1):
                at = np.flatnonzero(batch.documents_BT[row] == number)
                assert (np.diff(at) == 1).all(), "a sample lies in one piece"
                index = int(batch.samples_BT[row, at[0]])
                sample, credit = samples[index], credits[index]
                seen.append(index)
                tokens, logprobs, versions = (
                    np.concatenate([getattr(part, name) for part in sample.segments])
                    for name in ("tokens", "logprobs", "versions")
                )
                mask = credit.mask_S
                assert np.array_equal(batch.tokens_BT[row, at], tokens[:-1])
                assert np.array_equal(batch.targets_BT[row, at], np.where(mask, tokens[1:], IGNORED))
                assert np.array_equal(batch.positions_BT[row, at], np.arange(len(at)))
                assert np.array_equal(batch.behaviour_BT[row, at], np.where(mask, logprobs[1:], 0))
                assert np.array_equal(batch.versions_BT[row, at], np.where(mask, versions[1:], -1))
                assert np.array_equal(batch.advantages_BT[row, at], credit.advantages_S)
                assert np.array_equal(batch.weights_BT[row, at], credit.weights_S)
                assert np.array_equal(batch.routes_BTLK[row, at], sample.routes)
    assert sorted(seen) == list(range(len(samples)))


def test_the_same_groups_make_the_same_batches() -> None:
    groups = [group(np.random.default_rng(1), [1.0, 0.0, 0.0], ordinal=index, routes=ROUTES) for index in range(3)]
    for one, other in zip(packed(groups, 40), packed(groups, 40), strict=True):
        assert equal(one, other)


def test_rows_are_shared_evenly_with_empty_ones() -> None:
    groups = [group(np.random.default_rng(seed), [1.0, 0.0], ordinal=seed, routes=ROUTES) for seed in range(4)]
    alone, shared = packed(groups, 24, 4, share=1), packed(groups, 24, 4, share=4)
    assert all(len(batch.tokens_BT) % 4 == 0 for batch in shared)
    assert sum(batch.num_targets for batch in alone) == sum(batch.num_targets for batch in shared)
    halves = [shared[-1].rows(slice(0, 2)), shared[-1].rows(slice(2, 4))]
    assert sum(half.num_targets for half in halves) == shared[-1].num_targets
    assert all(half.routes_BTLK is not None and len(half.routes_BTLK) == 2 for half in halves)


def test_a_sample_longer_than_a_row_is_refused() -> None:
    long = group(np.random.default_rng(0), [1.0])
    sample = trajectory(np.random.default_rng(0), [10, 20])
    groups = [Group(replace(long.task, group=2), (sample, replace(sample, sample=1)))]
    with pytest.raises(UserError, match=r"train.seq_len: 28 is less than the 30 tokens of ordinal 0, sample 0"):
        packed(groups, 28, with_routes=False)
    assert packed(groups, 29, with_routes=False)[0].tokens_BT.shape == (2, 29)


def test_replay_without_records_is_refused() -> None:
    with pytest.raises(UserError, match=r"ordinal 0, sample 0: routes: it has none"):
        packed([group(np.random.default_rng(0), [1.0, 0.0])])
