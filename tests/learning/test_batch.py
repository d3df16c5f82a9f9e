"""The batch edge: packing moves every stream by one and the same permutation, and lays shared beginnings down once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stretto.base.errors import UserError
from stretto.base.trajectory import Group, Trajectory
from stretto.data.pack import IGNORED, PADDING
from stretto.learning.algorithms import Streams, TokenCredit, give_credit, unroll
from stretto.learning.batch import Batch, at_targets, by_sample, pack
from tests.flow.samples import equal, group, trajectory

ROUTES = (3, 2, 8)


def packed(groups: list[Group], seq_len: int = 24, rows: int = 4, **extra: Any) -> list[Batch]:
    return pack(unroll(groups), seq_len, rows, **extra)


def check_sample(
    batch: Batch,
    advantages_BT: NDArray[np.float32],
    row: int,
    number: int,
    sample: Trajectory,
    streams: Streams,
    credit: TokenCredit,
) -> int:
    """Its own columns behind those it shares are the sample, in every stream; returns how many it shares."""
    own = np.flatnonzero(batch.documents_BT[row] == number)
    assert (np.diff(own) == 1).all(), "a sample lies in one piece"
    first, end = batch.shared_BT2[row, own[0]]
    assert (batch.shared_BT2[row, own] == (first, end)).all() and 0 <= first <= end <= own[0]
    at = np.concatenate([np.arange(first, end), own])
    tokens, logprobs, versions = (
        np.concatenate([getattr(part, name) for part in sample.segments]) for name in ("tokens", "logprobs", "versions")
    )
    mask = streams.mask_S
    assert not mask[: end - first].any()
    assert np.array_equal(batch.tokens_BT[row, at], tokens[:-1])
    assert np.array_equal(batch.targets_BT[row, at], np.where(mask, tokens[1:], IGNORED))
    assert np.array_equal(batch.positions_BT[row, at], np.arange(len(at)))
    assert np.array_equal(batch.behaviour_BT[row, at], np.where(mask, logprobs[1:], 0))
    assert np.array_equal(batch.versions_BT[row, at], np.where(mask, versions[1:], -1))
    assert np.array_equal(advantages_BT[row, at], credit.advantages_S)
    assert batch.routes_BTLK is None or np.array_equal(batch.routes_BTLK[row, at], sample.routes)
    return int(end - first)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num=st.integers(1, 5),
    seq_len=st.sampled_from([30, 41, 90]),
    rows=st.integers(1, 5),
    with_routes=st.booleans(),
)
def test_all_streams_follow_the_tokens(seed: int, num: int, seq_len: int, rows: int, with_routes: bool) -> None:
    rng = np.random.default_rng(seed)
    rewards = [1.0, 0.0, 0.5, 0.0, 1.0]
    groups = [group(rng, rewards, ordinal=index, versions=(2, 3), routes=ROUTES) for index in range(num)]
    streams = [one for each in unroll(groups) for one in each]
    credits = give_credit(unroll(groups), "grpo", "token", 18)
    samples = [sample for each in groups for sample in each.trajectories]
    seen, num_inputs, num_shared = [], 0, 0
    batches = packed(groups, seq_len, rows, with_routes=with_routes)
    back = by_sample(batches, [batch.behaviour_BT for batch in batches], [each.num_inputs for each in streams])
    for one, found_S in zip(streams, back, strict=True):
        assert np.array_equal(found_S, np.where(one.mask_S, one.logprobs_S, 0))
    for batch in batches:
        advantages_BT = at_targets(batch, [each.advantages_S for each in credits])
        assert not advantages_BT[batch.targets_BT == IGNORED].any()
        B, T = batch.tokens_BT.shape
        assert rows >= B and seq_len >= T and (batch.routes_BTLK is None) is not with_routes
        padding = batch.documents_BT == PADDING
        if batch.routes_BTLK is not None:
            assert (batch.routes_BTLK[padding] == -1).all(), "0 would name an expert"
        assert (batch.targets_BT[padding] == IGNORED).all() and (batch.samples_BT[padding] == -1).all()
        assert (batch.shared_BT2[padding] == 0).all()
        num_inputs += batch.num_inputs
        for row in range(B):
            for number in range(batch.documents_BT[row].max() + 1):
                index = int(batch.samples_BT[row, batch.documents_BT[row] == number][0])
                if index >= 0:
                    seen.append(index)
                    sample = (samples[index], streams[index], credits[index])
                    num_shared += check_sample(batch, advantages_BT, row, number, *sample)
    assert sorted(seen) == list(range(len(samples)))
    assert num_inputs < sum(sample.num_tokens - 1 for sample in samples) or not num_shared


def test_a_prompt_lies_in_a_row_once() -> None:
    """Eight answers to one prompt, of which one was computed by other experts from the prompt's middle on."""
    rng = np.random.default_rng(0)
    first = trajectory(rng, [10, 3], routes=ROUTES)
    assert first.routes is not None
    samples = []
    for number in range(8):
        answer = trajectory(rng, [10, 3], sample=number, reward=float(number % 2), routes=ROUTES)
        assert answer.routes is not None
        routes = np.concatenate([first.routes[:9], answer.routes[9:]])
        if number == 5:
            routes[4, 1] = (routes[4, 1] + 1) % 8
        samples.append(replace(answer, segments=(first.segments[0], answer.segments[1]), routes=routes))
    whole = group(rng, [1.0])
    groups = [Group(replace(whole.task, group=8), tuple(samples))]
    (batch,) = packed(groups, 64, 1)
    assert batch.num_inputs == 9 + 7 * 3 + (5 + 3), "one prompt but its last token, then what each has for itself"
    assert sorted(set(map(tuple, batch.shared_BT2[0].tolist()))) == [(0, 0), (0, 4), (0, 9)]
    assert len(packed(groups, 64, 1, with_routes=False)[0].tokens_BT[0]) == 40, "33 inputs without routes to part them"
    apart = packed(groups, 12, 16)
    assert sum(each.num_inputs for each in apart) == 8 * 12, "rows that hold one answer share nothing"


def test_rows_are_as_long_as_leaves_least_empty() -> None:
    """Rows of 100 would take two samples of 40 inputs each, and be padded to 80 for the third."""
    samples = tuple(trajectory(np.random.default_rng(number), [20, 21], sample=number) for number in range(3))
    groups = [Group(group(np.random.default_rng(0), [1.0, 0.0, 0.0]).task, samples)]
    (batch,) = packed(groups, 100, 8, with_routes=False)
    assert batch.tokens_BT.shape == (3, 40)


def test_the_same_groups_make_the_same_batches() -> None:
    groups = [group(np.random.default_rng(1), [1.0, 0.0, 0.0], ordinal=index, routes=ROUTES) for index in range(3)]
    for one, other in zip(packed(groups, 40), packed(groups, 40), strict=True):
        assert equal(one, other)


def test_rows_are_shared_evenly_with_empty_ones() -> None:
    groups = [group(np.random.default_rng(seed), [1.0, 0.0], ordinal=seed, routes=ROUTES) for seed in range(4)]
    alone, shared = packed(groups, 24, 4, share=1), packed(groups, 24, 4, share=4)
    assert all(len(batch.tokens_BT) % 4 == 0 for batch in shared)
    assert sum(batch.num_targets for batch in alone) == sum(batch.num_targets for batch in shared)
    for batch in shared:  # what fills a row belongs to nobody
        filled = batch.documents_BT == PADDING
        assert (batch.versions_BT[filled] == -1).all() and (batch.samples_BT[filled] == -1).all()
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
