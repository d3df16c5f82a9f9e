"""The token log: what was appended comes back, whatever was torn off its end."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome, Segment, Task, Verdict
from stretto.rl.asking import Trouble
from stretto.rl.logframes import Part, context, frames
from stretto.rl.tokenlog import (
    Closing,
    TokenLog,
    log_path,
    logged_ordinals,
    open_logs,
    read_logs,
    remove_logs,
)

TASK = Task(ordinal=3, source="toy", item=7, group=2, seed=5, max_tokens=99)
VERDICT = Verdict(0.5, Outcome.WRONG, 0.25, 0.125, "near", {"form": 0.5})


def open_log(folder: Path, task: Task, sample: int, attempt: int) -> TokenLog:
    return open_logs(folder, task, attempt)[sample]


def read_log(path: Path, sample: int = 0) -> TokenLog:
    return read_logs(path)[sample]


def sampled(log: TokenLog, num: int, version: int = 0, ended: str = "", dtype: str = "uint8") -> Part:
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


def fill(log: TokenLog, dtype: str = "uint8") -> None:
    log.append(Part(context(np.array([4, 5, 6], np.int32), 0.5, 1.0)))
    log.append(sampled(log, 4, dtype=dtype))
    log.append(sampled(log, 2, version=1, ended="stop", dtype=dtype))
    log.append(Part(context(np.array([9, 9], np.int32)), messages=({"role": "tool", "content": "5"},)))
    log.append(sampled(log, 3, version=2, ended="stop", dtype=dtype))


def assert_same(left: TokenLog, right: TokenLog, num_parts: int | None = None) -> None:
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
    log.close(Closing("stop", VERDICT))
    again = open_log(tmp_path, TASK, 1, 1)
    assert_same(again, log)
    assert again.closing == log.closing == Closing("stop", VERDICT)
    assert (again.num_tokens, again.num_sampled, again.num_turns, again.num_resumed) == (14, 9, 2, 9)
    done = again.trajectory(TASK, 1, 1)
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
    ends = [end for _, _, end in frames(content)]
    full = TokenLog()
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
    one, other = open_logs(tmp_path, TASK, 0)
    for log in (one, other):
        log.append(Part(context(np.array([1, 2], np.int32))))
    stale = open_logs(tmp_path, TASK, 0)[0]  # of an agent that was given up but lives on
    stale.append(Part(context(np.array([1, 2], np.int32))))
    one.append(sampled(one, 3))
    other.append(sampled(other, 4))
    stale.append(sampled(stale, 5))
    other.append(sampled(other, 2, ended="stop"))
    one.append(sampled(one, 1))
    other.close(Closing("stop", VERDICT))
    assert [path.name for path in tmp_path.iterdir()] == ["00000003-000.log"]
    lost, whole = open_logs(tmp_path, TASK, 1)
    assert_same(lost, one, 2)
    assert lost.closing is None and lost.num_sampled == 3
    assert_same(whole, other)
    assert whole.closing == Closing("stop", VERDICT)


def test_rows_must_be_those_of_the_tokens(tmp_path: Path) -> None:
    log = open_log(tmp_path, TASK, 0, 0)
    log.append(Part(context(np.array([1, 2], np.int32))))
    log.append(sampled(log, 1))
    part = sampled(log, 3)
    assert part.routes is not None
    size = log_path(tmp_path, 3, 0).stat().st_size
    for rows in (part.routes[:-1], np.concatenate((part.routes, part.routes[:1])), part.routes[:0]):
        with pytest.raises(Trouble, match=r"rows of routes were returned, 3 belong"):
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
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot be written: No space left on device; free some space"):
        log.append(sampled(log, 3))
    assert log.num_tokens == 2


def test_no_verdict_of_ours_is_written_down(tmp_path: Path) -> None:
    log = open_log(tmp_path, TASK, 0, 0)
    with pytest.raises(AssertionError):
        log.close(Closing("stop", replace(VERDICT, outcome=Outcome.INFRA)))


def test_logs_are_forgotten_by_ordinal(tmp_path: Path) -> None:
    assert logged_ordinals(tmp_path / "none") == ()
    for ordinal in (3, 12, 5):
        fill(open_log(tmp_path, replace(TASK, ordinal=ordinal), 0, 0))
    remove_logs(tmp_path, 5)
    remove_logs(tmp_path, 6)
    assert logged_ordinals(tmp_path) == (3, 12)
