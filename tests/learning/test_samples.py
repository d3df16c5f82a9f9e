"""Samples on the disk: what was written comes back, whatever was torn off its end; what is damaged is refused in a line."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import InfraError, UserError
from stretto.base.trajectory import Group, Outcome, Segment, StepReward, Task, Verdict
from stretto.learning.recipe import LOGS
from stretto.learning.samples import (
    HEADER_BYTES,
    Part,
    Sample,
    check_routes,
    context,
    frames,
    id_bits,
    load_group,
    log_name,
    logged_ordinals,
    open_samples,
    pack_routes,
    packed_bytes,
    remove_logs,
    signed_routes,
    store_group,
    unpack_routes,
)
from stretto.runtime.store import FolderStore
from tests.flow.samples import equal, group, read_logs

TASK = Task(ordinal=3, source="toy", item=7, group=2, seed=5, max_tokens=99)
VERDICT = Verdict(0.5, Outcome.WRONG, 0.25, 0.125, "near", {"form": 0.5})


def open_log(folder: Path, task: Task, sample: int, attempt: int) -> Sample:
    return open_samples(FolderStore(folder), task, attempt)[sample]


def log_path(folder: Path, ordinal: int, attempt: int) -> Path:
    return folder / log_name(ordinal, attempt)


def read_log(path: Path, sample: int = 0) -> Sample:
    return read_logs(path.read_bytes())[sample]


def sampled(log: Sample, num: int, version: int = 0, ended: str = "", dtype: str = "uint8") -> Part:
    """A chunk whose every number says where it belongs."""
    start = log.num_tokens
    places = np.arange(start, start + num)
    rows = np.arange(log.num_rows, start + num - 1)
    routes = np.stack([rows, rows + 50 * (version + 1)], 1)[:, None].astype(dtype) if num else None
    segment = Segment(
        places.astype(np.int32),
        True,
        (-places / 7).astype(np.float32),
        np.full(num, version, np.int32),
        1.5,
        2.5,
    )
    return Part(segment, routes, ended)  # type: ignore[arg-type]


def fill(log: Sample, dtype: str = "uint8") -> None:
    log.append(Part(context(np.array([4, 5, 6], np.int32), 0.5, 1.0)))
    log.append(sampled(log, 4, dtype=dtype))
    log.append(sampled(log, 2, version=1, ended="stop", dtype=dtype))
    log.append(Part(context(np.array([9, 9], np.int32)), messages=({"role": "tool", "content": "5"},)))
    log.append(sampled(log, 3, version=2, ended="stop", dtype=dtype))


def assert_same(left: Sample, right: Sample, num_parts: int | None = None) -> None:
    """``left`` is the first ``num_parts`` parts of ``right``."""
    wanted = right.parts[:num_parts]
    assert len(left.parts) == len(wanted)
    for one, other in zip(left.parts, wanted, strict=True):
        for name in ("tokens", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(one.segment, name), getattr(other.segment, name))
        assert (one.segment.is_sampled, one.ended) == (other.segment.is_sampled, other.ended)
        assert one.messages == other.messages
        assert (one.segment.started_s, one.segment.finished_s) == (other.segment.started_s, other.segment.finished_s)
        assert (one.routes is None) == (other.routes is None)
        if one.routes is not None and other.routes is not None:
            assert one.routes.dtype == other.routes.dtype
            np.testing.assert_array_equal(one.routes, other.routes)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_comes_back_whole(tmp_path: Path, dtype: str) -> None:
    log = open_log(tmp_path, TASK, 1, 0)
    fill(log, dtype)
    log.close("stop", VERDICT)
    again = open_log(tmp_path, TASK, 1, 1)
    assert_same(again, log)
    assert again.finish_reason == log.finish_reason == "stop" and again.verdict == log.verdict == VERDICT
    assert (again.num_tokens, again.num_sampled, len(again.turns()), again.num_resumed) == (14, 9, 2, 9)
    done = again.trajectory()
    assert (done.sample, done.attempt) == (1, 1)
    assert [len(segment.tokens) for segment in done.segments] == [3, 6, 2, 3]  # one segment a turn
    assert done.routes is not None
    np.testing.assert_array_equal(done.routes[:, 0, 0], np.arange(done.num_tokens - 1))
    # row 6 is of the last token of the first chunk: only the second call computed it, as row 8 only the third
    assert (done.routes[:, 0, 1].astype(int) - np.arange(13)).tolist() == [50] * 6 + [100] * 2 + [150] * 5
    assert done.oldest_version == 0 and done.verdict == VERDICT


def test_torn_anywhere_and_written_on(tmp_path: Path) -> None:
    """Cut at every byte: what is left is a beginning in whole parts, and appending gives the whole again."""
    fill(open_log(tmp_path / "whole", TASK, 0, 0))
    content = log_path(tmp_path / "whole", 3, 0).read_bytes()
    ends = [end for _, end in frames(content)]
    full = Sample(TASK, 0, 0)
    fill(full)
    path = log_path(tmp_path / "torn", 3, 0)
    path.parent.mkdir(parents=True)
    near = {end + step for end in ends for step in (-1, 0, 1, 15, 16)}
    for size in sorted(near | set(range(0, len(content), 13))):
        path.write_bytes(content[:size])
        torn = open_log(tmp_path / "torn", TASK, 0, 0)
        num_parts = max(0, sum(end <= size for end in ends) - 1)
        assert_same(torn, full, num_parts)
        for part in full.parts[num_parts:]:
            torn.append(part)
        assert path.read_bytes() == content


@given(st.data())
def test_damage_never_brings_wrong_tokens(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        log = open_log(Path(name), TASK, 0, 0)
        path = log_path(Path(name), 3, 0)
        fill(log)
        content = bytearray(path.read_bytes())
        *_, head = next(frames(bytes(content)))
        place = data.draw(st.integers(head, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        found = read_log(path)
        assert_same(found, log, len(found.parts))
        assert len(found.parts) < len(log.parts)


def test_an_attempt_goes_on_from_the_latest_and_disturbs_nobody(tmp_path: Path) -> None:
    first = open_log(tmp_path, TASK, 0, 0)
    first.append(Part(context(np.array([1, 2], np.int32))))
    first.append(sampled(first, 3))
    second = open_log(tmp_path, TASK, 0, 1)
    second.append(sampled(second, 2, version=1))
    first.append(sampled(first, 7))  # the one that was given up lives on
    fourth = open_log(tmp_path, TASK, 0, 3)  # the third died before it began
    assert_same(fourth, second)
    assert fourth.num_tokens == 7 and first.num_tokens == 12
    assert_same(read_log(log_path(tmp_path, 3, 0)), first)


def test_what_another_writer_appended_is_dropped(tmp_path: Path) -> None:
    first = open_log(tmp_path, TASK, 0, 0)
    first.append(Part(context(np.array([1, 2], np.int32))))
    first.append(sampled(first, 3))
    twin = open_log(tmp_path, TASK, 0, 0)
    first.append(sampled(first, 3))
    twin.append(sampled(twin, 5))
    assert_same(read_log(log_path(tmp_path, 3, 0)), first)


def test_samples_of_a_group_are_in_one_file_and_do_not_disturb_each_other(tmp_path: Path) -> None:
    one, other = open_samples(FolderStore(tmp_path), TASK, 0)
    for log in (one, other):
        log.append(Part(context(np.array([1, 2], np.int32))))
    stale = open_samples(FolderStore(tmp_path), TASK, 0)[0]  # of an agent that was given up but lives on
    stale.append(Part(context(np.array([1, 2], np.int32))))
    one.append(sampled(one, 3))
    other.append(sampled(other, 4))
    stale.append(sampled(stale, 5))
    other.append(sampled(other, 2, ended="stop"))
    one.append(sampled(one, 1))
    other.close("stop", VERDICT)
    assert [path.name for path in (tmp_path / LOGS).iterdir()] == ["00000003-000.log"]
    lost, whole = open_samples(FolderStore(tmp_path), TASK, 1)
    assert_same(lost, one, 2)
    assert lost.verdict is None and lost.num_sampled == 3
    assert_same(whole, other)
    assert (whole.finish_reason, whole.verdict) == ("stop", VERDICT)


def test_rows_must_be_those_of_the_tokens(tmp_path: Path) -> None:
    log = open_log(tmp_path, TASK, 0, 0)
    log.append(Part(context(np.array([1, 2], np.int32))))
    log.append(sampled(log, 1))
    part = sampled(log, 3)
    assert part.routes is not None
    size = log_path(tmp_path, 3, 0).stat().st_size
    for rows in (part.routes[:-1], np.concatenate((part.routes, part.routes[:1])), part.routes[:0]):
        with pytest.raises(InfraError, match=r"rows of routes were returned, 3 belong"):
            log.append(replace(part, routes=rows))
    assert log_path(tmp_path, 3, 0).stat().st_size == size and log.num_tokens == 3


def test_a_log_of_another_task_is_refused(tmp_path: Path) -> None:
    fill(open_log(tmp_path, TASK, 0, 0))
    with pytest.raises(UserError, match=r"00000003-000\.log: task: .* choose an empty run folder"):
        open_log(tmp_path, replace(TASK, seed=6), 0, 1)


def test_a_full_disk_is_told_in_a_line(tmp_path: Path) -> None:
    log = open_log(tmp_path, TASK, 0, 0)
    log.append(Part(context(np.array([1, 2], np.int32))))
    path = log_path(tmp_path, 3, 0)
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot be written: No space left on device; free some space"):
        log.append(sampled(log, 3))
    assert log.num_tokens == 2


def test_no_verdict_of_ours_is_written_down(tmp_path: Path) -> None:
    log = open_log(tmp_path, TASK, 0, 0)
    with pytest.raises(AssertionError):
        log.close("stop", replace(VERDICT, outcome=Outcome.INFRA))


def test_logs_are_forgotten_by_ordinal(tmp_path: Path) -> None:
    assert logged_ordinals(FolderStore(tmp_path / "none")) == ()
    for ordinal in (3, 12, 5):
        fill(open_log(tmp_path, replace(TASK, ordinal=ordinal), 0, 0))
    remove_logs(FolderStore(tmp_path), 5)
    remove_logs(FolderStore(tmp_path), 6)
    assert logged_ordinals(FolderStore(tmp_path)) == (3, 12)


ROUTES = (3, 2, 8)


@pytest.mark.parametrize("routes", [ROUTES, None])
def test_a_stored_group_comes_back_bit_for_bit(tmp_path: Path, routes: tuple[int, int, int] | None) -> None:
    before = group(np.random.default_rng(0), [1.0, 0.25, 0.0], ordinal=17, versions=(4, 5, 5), routes=routes)
    ref = store_group(FolderStore(tmp_path), before)
    assert equal(load_group(ref.location), before)
    assert (ref.ordinal, ref.attempt, ref.num_samples, ref.oldest_version) == (17, 0, 3, 4)
    assert ref.num_tokens == sum(sample.num_sampled for sample in before.trajectories)
    assert ref.mean_reward == pytest.approx(1.25 / 3) and not ref.is_uniform
    assert os.listdir(tmp_path / "groups") == ["group-00000017-0.group"]


def test_a_group_without_some_of_its_samples_comes_back(tmp_path: Path) -> None:
    whole = group(np.random.default_rng(0), [1.0, 0.0, 0.5, 0.0], ordinal=3, routes=ROUTES)
    some = Group(whole.task, (whole.trajectories[0], whole.trajectories[2]))
    ref = store_group(FolderStore(tmp_path), some)
    assert ref.num_samples == 2 and ref.mean_reward == 0.75 and equal(load_group(ref.location), some)
    path = Path(ref.location)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="not readable as a group"):
        load_group(str(path))


def test_rewards_of_steps_come_back_and_make_a_group_uneven(tmp_path: Path) -> None:
    whole = group(np.random.default_rng(0), [1.0, 1.0], routes=ROUTES)
    assert store_group(FolderStore(tmp_path), whole).is_uniform
    first, second = whole.trajectories
    steps = (StepReward(0, 0.5), StepReward(0, -0.25, end=3))
    uneven = Group(whole.task, (first, replace(second, verdict=replace(second.verdict, steps=steps))))
    ref = store_group(FolderStore(tmp_path), uneven)
    assert not ref.is_uniform and equal(load_group(ref.location), uneven)


@pytest.mark.parametrize(
    ("dtype", "num_experts", "absent"), [(np.uint8, 24, False), (np.uint8, 32, True), (np.uint16, 300, True)]
)
def test_packed_routes_weigh_what_is_said(dtype: type, num_experts: int, absent: bool) -> None:
    routes = np.random.default_rng(1).integers(0, num_experts, (11, 3, 2)).astype(dtype)
    if absent:
        routes[4, 1] = np.iinfo(dtype).max
    assert packed_bytes(routes) == len(pack_routes(routes))


def test_a_token_without_an_expert_comes_back_as_one(tmp_path: Path) -> None:
    before = group(np.random.default_rng(0), [1.0, 1.0], routes=ROUTES)
    for sample in before.trajectories:
        assert sample.routes is not None
        sample.routes[0, 1] = 255
    ref = store_group(FolderStore(tmp_path), before)
    assert ref.is_uniform and equal(load_group(ref.location), before)


def test_another_attempt_is_another_file(tmp_path: Path) -> None:
    before = group(np.random.default_rng(0), [1.0, 0.0])
    again = Group(before.task, tuple(replace(sample, attempt=2) for sample in before.trajectories))
    first, second = store_group(FolderStore(tmp_path), before), store_group(FolderStore(tmp_path), again)
    assert first.location != second.location and second.attempt == 2


@pytest.mark.parametrize("change", [-1, 1])
def test_routes_of_the_wrong_length_are_refused(tmp_path: Path, change: int) -> None:
    """An engine returns a row for each token but the last: neither one fewer nor one for each."""
    whole = group(np.random.default_rng(0), [1.0, 0.0], routes=ROUTES)
    sample = whole.trajectories[1]
    rows = sample.num_tokens - 1 + change
    assert sample.routes is not None
    wrong = replace(sample, routes=np.resize(sample.routes, (rows, 3, 2)))
    ref = store_group(FolderStore(tmp_path), Group(whole.task, (whole.trajectories[0], wrong)))
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
    ref = store_group(FolderStore(tmp_path), group(np.random.default_rng(0), [1.0, 0.0], routes=ROUTES))
    path = Path(ref.location)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="not readable as a group") as caught:
        load_group(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_group(str(tmp_path / "group-00000001-0.group"))


def drawn(shape: tuple[int, int, int], num_experts: int, absent: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    dtype = np.dtype(np.uint8 if num_experts <= 255 else np.uint16)
    routes = rng.integers(0, num_experts, shape).astype(dtype)
    routes[rng.random(shape) < absent] = np.iinfo(dtype).max
    return routes


@settings(max_examples=80, deadline=None)
@given(
    st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(1, 9)),
    st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 255, 256, 257, 511, 512, 1025, 65534, 65535])),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 99),
)
def test_what_was_packed_comes_back(shape: tuple[int, int, int], num_experts: int, absent: float, seed: int) -> None:
    routes = drawn(shape, num_experts, absent, seed)
    packed = pack_routes(routes, num_experts)
    again = unpack_routes(packed)
    assert again.dtype == routes.dtype and np.array_equal(again, routes)
    has_absent = bool((routes == np.iinfo(routes.dtype).max).any())
    assert len(packed) == HEADER_BYTES + math.ceil(routes.size * id_bits(num_experts, has_absent) / 8)


@pytest.mark.parametrize("num_experts", [2, 6, 16, 24, 64, 128, 255, 256, 512])
def test_a_token_costs_the_bits_that_name_its_experts(num_experts: int) -> None:
    tokens, layers, slots = 1000, 6, 4
    packed = pack_routes(drawn((tokens, layers, slots), num_experts, 0.0, 1), num_experts)
    assert (len(packed) - HEADER_BYTES) / tokens <= math.ceil(math.log2(num_experts)) * slots * layers / 8
    assert HEADER_BYTES <= 24


def test_absence_costs_a_value_and_only_where_it_occurs() -> None:
    assert id_bits(16, False) == 4 and id_bits(16, True) == 5
    assert id_bits(24, False) == id_bits(24, True) == 5
    assert id_bits(1, False) == 0 and id_bits(1, True) == 1


def test_the_trainer_sees_minus_one_for_no_expert() -> None:
    assert signed_routes(np.array([[[3, 255]]], np.uint8)).tolist() == [[[3, -1]]]
    assert signed_routes(np.array([[[300, 65535]]], np.uint16)).tolist() == [[[300, -1]]]


def test_damaged_bytes_are_refused() -> None:
    packed = pack_routes(drawn((9, 2, 3), 24, 0.0, 2), 24)
    flipped = bytearray(packed)
    flipped[-1] ^= 1
    for bad in (b"", b"SR", packed[:-1], packed + b"\0", bytes(flipped), b"XX" + packed[2:]):
        with pytest.raises(ValueError, match="packed routes"):
            unpack_routes(bad)


def test_an_expert_outside_the_network_is_refused() -> None:
    with pytest.raises(AssertionError, match="expert 24 of 24"):
        pack_routes(np.full((1, 1, 1), 24, np.uint8), 24)
