"""The token log: a sample's tokens on the disk as soon as an engine has returned them, with all that belongs to them.

A rollout that is lost halfway goes on from its log. Begun anew instead, long samples would be lost more often than
short ones, and the policy would learn from a sample of answers that is biased towards short ones.

One file a group and attempt, of all its samples: on many disks a new file costs more than all that is written to it.
Only its own attempt appends to it. A later attempt starts with a copy of the latest earlier one, so that an agent that was
given up but lives on disturbs nobody. Nothing is ever overwritten: old tokens keep the log-probabilities, versions and
routes they were sampled with, whatever weights the rest is sampled under.

A file is a list of frames (`stretto.rl.logframes`), each appended by one write; it begins to exist with the first
sampled token, since a prompt alone is nothing that could be lost. What a process has written survives its ``kill -9``; it
is not fsynced, so losing the machine loses chunks, which costs time and nothing else. A torn last frame is dropped.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.errors import UserError
from stretto.base.paths import replacing, writing
from stretto.base.trajectory import Outcome, Segment, Task, Trajectory, Verdict
from stretto.rl.asking import Trouble
from stretto.rl.logframes import Part, decode_part, encode_part, frame, frames


@dataclass(frozen=True, slots=True)
class Closing:
    """The end of a sample."""

    finish_reason: str
    verdict: Verdict


class LogFile:
    """What samples of one group append to."""

    def __init__(self, path: Path, unwritten: bytes = b""):
        """
        Args:
            unwritten: what comes before all else in a file that does not exist yet.
        """
        self.path = path
        self._unwritten = unwritten

    def append(self, content: bytes) -> None:
        """In one write.

        Raises:
            UserError: the disk is full.
        """
        whole = self._unwritten + content
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with writing(self.path):
            try:
                file = os.open(self.path, flags, 0o666)
            except FileNotFoundError:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = os.open(self.path, flags, 0o666)
            try:
                num_written = os.write(file, whole)
            finally:
                os.close(file)
            if num_written < len(whole):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._unwritten = b""


class TokenLog:
    """One sample as far as it has come. From its first sampled token on, everything appended is on the disk first."""

    def __init__(self, sample: int = 0, file: LogFile | None = None):
        """
        Args:
            file: where it is written; None: nowhere.
        """
        self._sample, self._file = sample, file
        self._unwritten = b""
        self._parts: list[Part] = []
        self._num_rows = 0
        self.closing: Closing | None = None
        self.num_tokens = 0
        """Of all authors."""
        self.num_sampled = 0
        self.num_resumed = 0
        """Sampled tokens that an earlier attempt had written."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._parts)

    @property
    def last(self) -> Part | None:
        return self._parts[-1] if self._parts else None

    @property
    def num_rows(self) -> int:
        """Leading tokens whose routes are known."""
        return self._num_rows

    @property
    def num_turns(self) -> int:
        """Of the model, the one that it is writing included."""
        return sum(1 for segment in self.segments() if segment.is_sampled)

    def append(self, part: Part) -> None:
        """Write ``part`` down, then take it.

        Raises:
            Trouble: rows of routes that are not those of its tokens: nothing is written.
            UserError: the disk is full.
        """
        self._check(part)
        if self._file is not None:
            content = self._unwritten + encode_part(part, self._sample, self.num_tokens, self._num_rows)
            if self.num_sampled or part.segment.is_sampled:
                self._file.append(content)
                self._unwritten = b""
            else:
                self._unwritten = content
        self._take(part)

    def close(self, closing: Closing) -> None:
        """Write the end down. A verdict that says nothing about the answer is none."""
        assert self.closing is None, "it is closed"
        assert closing.verdict.outcome is not Outcome.INFRA, str(closing.verdict)
        if self._file is not None:
            verdict = closing.verdict.to_json()
            described = {"what": "closing", "sample": self._sample, "finish_reason": closing.finish_reason}
            self._file.append(self._unwritten + frame(described | {"verdict": verdict}))
        self.closing = closing

    def tokens(self) -> np.ndarray:
        """int32 [num_tokens]."""
        return np.concatenate([part.segment.tokens for part in self._parts])

    def turn(self) -> np.ndarray:
        """Tokens int32 of the model's last turn."""
        return self.turns()[-1]

    def turns(self) -> list[np.ndarray]:
        """Tokens of each of the model's turns."""
        return [segment.tokens for segment in self.segments() if segment.is_sampled]

    def segments(self) -> tuple[Segment, ...]:
        """Parts of one author joined: a turn of the model is one segment, in however many chunks it came."""
        runs: list[list[Segment]] = []
        for part in self._parts:
            if runs and part.segment.is_sampled and runs[-1][-1].is_sampled:
                runs[-1].append(part.segment)
            else:
                runs.append([part.segment])
        return tuple(_joined(run) for run in runs)

    def trajectory(self, task: Task, sample: int, attempt: int) -> Trajectory:
        """The record of a closed sample."""
        assert self.closing is not None, "it is not closed"
        rows = [part.routes for part in self._parts if part.routes is not None]
        routes = np.concatenate(rows) if rows else None
        if routes is not None:
            assert len(routes) == self.num_tokens - 1, f"{len(routes)} rows of routes for {self.num_tokens} tokens"
        return Trajectory(
            ordinal=task.ordinal,
            sample=sample,
            attempt=attempt,
            segments=self.segments(),
            routes=routes,
            finish_reason=self.closing.finish_reason,
            verdict=self.closing.verdict,
            num_turns=self.num_turns,
        )

    def _check(self, part: Part) -> None:
        assert self.closing is None, "it is closed"
        assert self._parts or not part.segment.is_sampled, "a sample begins with its prompt"
        if part.routes is None:
            return
        num_wanted = self.num_tokens + len(part.segment.tokens) - 1 - self._num_rows
        if not part.segment.is_sampled or len(part.routes) != num_wanted:
            raise Trouble(f"{len(part.routes)} rows of routes were returned, {num_wanted} belong to the tokens")

    def _take(self, part: Part) -> None:
        self._parts.append(part)
        self.num_tokens += len(part.segment.tokens)
        self.num_sampled += len(part.segment.tokens) if part.segment.is_sampled else 0
        self._num_rows += 0 if part.routes is None else len(part.routes)

    def _replay(self, described: Mapping[str, Any], raw: bytes) -> bool:
        """Take a frame of a file; False: it is another writer's."""
        if self.closing is not None:
            return False
        if described["what"] == "closing":
            self.closing = Closing(described["finish_reason"], Verdict.from_json(described["verdict"]))
        elif (described["start"], described["rows"]) == (self.num_tokens, self._num_rows):
            self._take(decode_part(described, raw))
        else:
            return False
        return True


def open_logs(folder: Path, task: Task, attempt: int) -> tuple[TokenLog, ...]:
    """The logs of all samples for ``attempt``: what this or the latest earlier attempt has written, or empty ones.

    Raises:
        UserError: the logs there are of another task, or the disk is full.
    """
    own = log_path(folder, task.ordinal, attempt)
    paths = (log_path(folder, task.ordinal, number) for number in range(attempt, -1, -1))
    found = next((path for path in paths if path.exists()), None)
    identity = {"what": "task", "task": asdict(task)}
    head = frame(identity)
    file = LogFile(own, b"" if found is not None else head)
    logs = tuple(TokenLog(sample, file) for sample in range(task.group))
    if found is not None:
        owner, good = _replayed(found.read_bytes(), logs)
        if owner not in (None, identity):
            raise UserError(f"{found}: task: these logs are of another run or recipe; choose an empty run folder")
        for log in logs:
            log.num_resumed = log.num_sampled
        with replacing(own) as partial:
            partial.write_bytes(good or head)
    return logs


def read_logs(path: Path) -> tuple[TokenLog, ...]:
    """What lies at ``path``, for a look: appending to it changes no file. None where nobody got so far."""
    content = path.read_bytes()
    first = next(frames(content), None)
    logs = tuple(TokenLog(sample) for sample in range(0 if first is None else first[0]["task"]["group"]))
    _replayed(content, logs)
    return logs


def _replayed(content: bytes, logs: Sequence[TokenLog]) -> tuple[Mapping[str, Any] | None, bytes]:
    """Fill empty ``logs`` from a file; returns whose they are (None: nobody got so far) and the frames that are good."""
    found = frames(content)
    first = next(found, None)
    if first is None:
        return None, b""
    owner, _, end = first
    good, lost = [content[:end]], set[int]()
    for described, raw, after in found:
        sample = described.get("sample", len(logs))  # a second head is of another writer too
        if sample not in lost and sample < len(logs) and logs[sample]._replay(described, raw):
            good.append(content[end:after])
        else:
            lost.add(sample)
        end = after
    return owner, b"".join(good)


def log_path(folder: Path, ordinal: int, attempt: int) -> Path:
    """Where the logs of a group lie in a run's folder of logs."""
    return folder / f"{ordinal:08d}-{attempt:03d}.log"


def remove_logs(folder: Path, ordinal: int) -> None:
    """Forget an ordinal that has ended."""
    for path in folder.glob(f"{ordinal:08d}-*.log"):
        path.unlink(missing_ok=True)


def logged_ordinals(folder: Path) -> tuple[int, ...]:
    """Ordinals that have logs, rising: after a crash those that ended meanwhile are to be removed."""
    names = {path.stem.partition("-")[0] for path in folder.glob("*.log")}
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def _joined(run: list[Segment]) -> Segment:
    if len(run) == 1:
        return run[0]
    return Segment(
        tokens=np.concatenate([segment.tokens for segment in run]),
        is_sampled=run[0].is_sampled,
        logprobs=np.concatenate([segment.logprobs for segment in run]),
        versions=np.concatenate([segment.versions for segment in run]),
        started_s=run[0].started_s,
        finished_s=run[-1].finished_s,
    )
