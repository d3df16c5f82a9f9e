"""Groups in files: what is stored comes back, and what is damaged is refused in one line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stretto.base.errors import UserError
from stretto.base.trajectory import Group
from stretto.rl.groups import check_routes, load_group, store_group
from tests.rl.samples import equal, group

ROUTES = (3, 2, 8)


@pytest.mark.parametrize("routes", [ROUTES, None])
def test_a_stored_group_comes_back_bit_for_bit(tmp_path: Path, routes: tuple[int, int, int] | None) -> None:
    before = group(np.random.default_rng(0), [1.0, 0.25, 0.0], ordinal=17, versions=(4, 5, 5), routes=routes)
    ref = store_group(tmp_path / "groups", before)
    assert equal(load_group(ref.location), before)
    assert (ref.ordinal, ref.attempt, ref.num_samples, ref.oldest_version) == (17, 0, 3, 4)
    assert ref.num_tokens == sum(sample.num_sampled for sample in before.trajectories)
    assert ref.mean_reward == pytest.approx(1.25 / 3) and not ref.is_uniform
    assert os.listdir(tmp_path / "groups") == ["group-00000017-0.group"]


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
        load_group(tmp_path / "group-00000001-0.group")
