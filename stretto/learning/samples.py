"""Storage of samples: one format for unfinished samples and finished groups.

A file is a list of frames. The first says whose samples these are; each further one is a part of a sample (a prompt, a
chunk of an engine, the turn of tools) or its end. A *log* takes parts as they come: a rollout that is lost halfway goes
on from it. Begun anew instead, long samples would be lost more often, and the policy would learn from answers that are
biased towards short ones. It has to be where the state of a session is lost: then it draws by its own seed again, so that
under the same weights it becomes the same sample as far as its tools say the same, and it is counted. A *stored group* is the
same file written at once, chunks joined and routes packed.

One log a group and attempt: on many disks a new file costs more than all that is written to it. Only its own attempt
appends to it. A later attempt starts with a copy of the latest earlier one, so that an agent that was given up but
lives on disturbs nobody. Nothing is ever overwritten: old tokens keep the log-probabilities, versions and routes they
were sampled with, whatever weights the rest is sampled under. What a process has written survives its ``kill -9``; it
is not fsynced, so losing the machine loses chunks, which costs time and nothing else. A torn last frame is dropped.

Imports no torch. Shape letters: R rows of routes, one a token (P: of all tokens but the last), L MoE layers of the
maximum network, K route slots, N = P·L·K ids of J bits, Q = ⌈N / 8⌉ octets of ids.
"""

from __future__ import annotations

import errno
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from stretto.base.errors import InfraError, UserError
from stretto.base.paths import replacing, writing
from stretto.base.trajectory import Group, GroupRef, Outcome, Segment, Task, Trajectory, Verdict

SUFFIX = ".group"

Ended = Literal["", "stop", "length"]
"""Whether the model's turn ended with a part, and by what."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What is appended at once: a prompt, a chunk that an engine returned, or the turn of a tool."""

    segment: Segment
    routes: np.ndarray | None = None
    """[R, L, K], of the positions that had none yet, up to the last token but one; None where not sampled."""
    ended: Ended = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Where it is the turn of tools: what they answered, for whoever reads messages. With no tokens, the last part: the model
    goes on no more."""


def context(tokens: np.ndarray, started_s: float = 0.0, finished_s: float = 0.0) -> Segment:
    """A segment that the model did not write."""
    num = len(tokens)
    return Segment(tokens, False, np.zeros(num, np.float32), np.full(num, -1, np.int32), started_s, finished_s)


class _Start(msgspec.Struct, tag="start", array_like=True):
    """The first frame of a file."""

    task: Task
    attempt: int
    samples: tuple[int, ...] | None = None
    """Of a stored group: those that it holds; None: all."""
    prompts: dict[str, np.ndarray] = {}
    """Of a stored group: as `Group.prompts`."""


class _Next(msgspec.Struct, tag="part", array_like=True):
    """What a sample goes on with."""

    sample: int
    num_tokens: int
    """The sample has before, as the next."""
    num_rows: int
    part: Part


class _End(msgspec.Struct, tag="end", array_like=True):
    """A sample is finished."""

    sample: int
    finish_reason: str
    verdict: Verdict
    routes: bytes = b""
    """Of a stored group: all of the sample's, packed."""


class _Anew(msgspec.Struct, tag="anew", array_like=True):
    """All frames of a sample before this one are void: what they came to cannot be reached again."""

    sample: int
    why: str


_Record = _Start | _Next | _End | _Anew
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda array: (array.dtype.str, array.shape, array.tobytes()))
_DECODER = msgspec.msgpack.Decoder(
    _Record, dec_hook=lambda _, array: np.frombuffer(array[2], array[0]).reshape(array[1])
)
_HEAD = struct.Struct("<4sII")
"""Magic, bytes that follow (a record as msgpack), CRC-32 over them."""
_MAGIC = b"STS1"


def _frame(record: _Record) -> bytes:
    body = _ENCODER.encode(record)
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def frames(content: bytes) -> Iterator[tuple[_Record, int]]:
    """The record of each frame and where it ends, up to the first that is torn or damaged."""
    end = 0
    while end + _HEAD.size <= len(content):
        magic, num_bytes, checksum = _HEAD.unpack_from(content, end)
        start, end = end + _HEAD.size, end + _HEAD.size + num_bytes
        body = content[start:end]
        if magic != _MAGIC or len(body) != num_bytes or zlib.crc32(body) != checksum:
            return
        yield _DECODER.decode(body), end


class Sample:
    """One sample as far as it has come. From its first sampled token on, everything appended is on the disk first."""

    def __init__(self, task: Task, number: int, attempt: int):
        self.task, self.number, self.attempt = task, number, attempt
        self.log: Path | None = None
        """The file that it appends to, with the others of its group and attempt; None: it is not written down."""
        self.parts: list[Part] = []
        self.num_tokens = 0
        """Of all authors."""
        self.num_sampled = 0
        self.num_rows = 0
        """Leading tokens whose routes are known."""
        self.num_resumed = 0
        """Sampled tokens that an earlier attempt had written."""
        self.num_lost = 0
        """Times that it was begun anew."""
        self.finish_reason = ""
        self.verdict: Verdict | None = None
        """None until it is closed."""
        self.routes: np.ndarray | None = None
        """All of them, where they are known at once: of a stored group."""
        self.waits_for, self.since_s = "its problem", time.time()
        """Written by the agent loop; read by the watchdog."""
        self._unwritten = b""

    def append(self, part: Part) -> None:
        """Write ``part`` down, then take it.

        Raises:
            InfraError: rows of routes that are not those of its tokens: nothing is written.
            UserError: the disk is full.
        """
        assert self.verdict is None, "it is closed"
        assert self.parts or not part.segment.is_sampled, "a sample begins with its prompt"
        num_wanted = self.num_tokens + len(part.segment.tokens) - 1 - self.num_rows
        if part.routes is not None and len(part.routes) != num_wanted:
            raise InfraError(f"{len(part.routes)} rows of routes were returned, {num_wanted} belong to the tokens")
        self._write(_Next(self.number, self.num_tokens, self.num_rows, part), part.segment.is_sampled)
        self._take(part)

    def close(self, finish_reason: str, verdict: Verdict) -> None:
        """Write the end down. A verdict that says nothing about the answer is none."""
        assert self.verdict is None and verdict.outcome is not Outcome.INFRA, f"{self.verdict}, {verdict}"
        self._write(_End(self.number, finish_reason, verdict), True)
        self.finish_reason, self.verdict = finish_reason, verdict

    def begin_anew(self, why: str) -> None:
        """Forget all that it has come to. The log keeps it, and ``why``."""
        assert self.verdict is None, "it is closed"
        self._write(_Anew(self.number, why), True)
        self._forget()

    def tokens(self) -> np.ndarray:
        """int32 [num_tokens]."""
        return np.concatenate([part.segment.tokens for part in self.parts])

    def turns(self) -> list[np.ndarray]:
        """Tokens int32 of each of the model's turns."""
        return [segment.tokens for segment in self.segments() if segment.is_sampled]

    def segments(self) -> tuple[Segment, ...]:
        """Parts of one author joined: a turn of the model is one segment, in however many chunks it came."""
        runs = groupby((part.segment for part in self.parts if len(part.segment.tokens)), attrgetter("is_sampled"))
        return tuple(_joined(list(run)) for _, run in runs)

    def trajectory(self) -> Trajectory:
        """The record of a closed sample."""
        assert self.verdict is not None, "it is not closed"
        rows = [part.routes for part in self.parts if part.routes is not None]
        routes = np.concatenate(rows) if rows else self.routes
        ids = (self.task.ordinal, self.number, self.attempt)
        return Trajectory(*ids, self.segments(), routes, self.finish_reason, self.verdict)

    def _write(self, record: _Record, is_due: bool) -> None:
        """Append to the log, in one write, once there is something that could be lost."""
        if self.log is None:
            return
        content = self._unwritten + _frame(record)
        if not is_due and not self.num_sampled:
            self._unwritten = content
            return
        with writing(self.log), self.log.open("ab", buffering=0) as file:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._unwritten = b""

    def _take(self, part: Part) -> None:
        self.parts.append(part)
        self.num_tokens += len(part.segment.tokens)
        self.num_sampled += len(part.segment.tokens) if part.segment.is_sampled else 0
        self.num_rows += 0 if part.routes is None else len(part.routes)

    def _forget(self) -> None:
        self.parts, self.num_tokens, self.num_sampled, self.num_rows, self.num_resumed = [], 0, 0, 0, 0
        self.num_lost += 1

    def _replay(self, record: _Record) -> bool:
        """Take what a file says; False: another writer does."""
        if self.verdict is not None:
            return False
        if isinstance(record, _End):
            self.finish_reason, self.verdict = record.finish_reason, record.verdict
            self.routes = unpack_routes(record.routes) if record.routes else None
        elif isinstance(record, _Next) and (record.num_tokens, record.num_rows) == (self.num_tokens, self.num_rows):
            self._take(record.part)
        elif isinstance(record, _Anew):
            self._forget()
        else:
            return False
        return True


def _joined(run: list[Segment]) -> Segment:
    if len(run) == 1:
        return run[0]
    names = ("tokens", "logprobs", "versions")
    streams: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in run]) for name in names}
    return replace(run[0], **streams, finished_s=run[-1].finished_s)


def _read(content: bytes) -> tuple[_Start | None, tuple[Sample, ...], list[bytes]]:
    """What lies in a file: its first frame (None: nobody got so far), its samples, and the further frames that are good."""
    found = frames(content)
    start, end = next(found, (None, 0))
    if not isinstance(start, _Start):
        return None, (), []
    samples = tuple(Sample(start.task, number, start.attempt) for number in range(start.task.group))
    good, lost = [], set[int]()
    for record, after in found:
        number = len(samples) if isinstance(record, _Start) else record.sample  # a second start is another writer's too
        if number not in lost and number < len(samples) and samples[number]._replay(record):
            good.append(content[end:after])
        else:
            lost.add(number)
        end = after
    return start, samples, good


def open_samples(folder: Path, task: Task, attempt: int) -> tuple[Sample, ...]:
    """All samples for ``attempt``: as far as this or the latest earlier attempt has written them, or empty ones.
    Raises UserError: the logs there are of another task, or the disk is full."""
    paths = (log_path(folder, task.ordinal, number) for number in range(attempt, -1, -1))
    found = next((path for path in paths if path.exists()), None)
    start, samples, good = _read(found.read_bytes()) if found else (None, (), [])
    if start is not None and start.task != task:
        raise UserError(f"{found}: task: these logs are of another run or recipe; choose an empty run folder")
    own = log_path(folder, task.ordinal, attempt)
    with replacing(own) as partial:
        partial.write_bytes(b"".join((_frame(_Start(task, attempt)), *good)))
    samples = samples or tuple(Sample(task, number, attempt) for number in range(task.group))
    for sample in samples:
        sample.attempt, sample.log, sample.num_resumed = attempt, own, sample.num_sampled
    return samples


def read_logs(path: Path) -> tuple[Sample, ...]:
    """What lies at ``path``, for a look: appending to it changes no file. () where nobody got so far."""
    return _read(path.read_bytes())[1]


def log_path(folder: Path, ordinal: int, attempt: int) -> Path:
    """Where the log of a group lies in a run's folder of logs."""
    return folder / f"{ordinal:08d}-{attempt:03d}.log"


def remove_logs(folder: Path, ordinal: int) -> None:
    """Forget an ordinal that has ended."""
    for path in folder.glob(f"{ordinal:08d}-*.log"):
        path.unlink(missing_ok=True)


def logged_ordinals(folder: Path) -> tuple[int, ...]:
    """Ordinals that have logs, rising: after a crash those that ended meanwhile are to be removed."""
    names = {path.stem.partition("-")[0] for path in folder.glob("*.log")}
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


# Finished groups


def store_group(folder: Path | str, group: Group) -> GroupRef:
    """Write ``group`` into ``folder``; the file is on the disk, whole and under its name, when this returns.
    Raises UserError: the disk is full."""
    task, trajectories = group.task, group.trajectories
    assert 0 < len(trajectories) <= task.group, f"ordinal {task.ordinal}: {len(trajectories)} samples of {task.group}"
    attempt = trajectories[0].attempt
    content = [_frame(_Start(task, attempt, tuple(each.sample for each in trajectories), dict(group.prompts)))]
    for each in trajectories:
        num_tokens = 0
        for segment in each.segments:
            content.append(_frame(_Next(each.sample, num_tokens, 0, Part(segment))))
            num_tokens += len(segment.tokens)
        packed = b"" if each.routes is None else pack_routes(each.routes)
        content.append(_frame(_End(each.sample, each.finish_reason, each.verdict, packed)))
    path = Path(folder) / f"group-{task.ordinal:08d}-{attempt}{SUFFIX}"
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(b"".join(content))
        file.flush()
        os.fsync(file.fileno())
    verdicts = [trajectory.verdict for trajectory in trajectories]
    return GroupRef(
        ordinal=task.ordinal,
        attempt=attempt,
        location=str(path),
        num_samples=len(trajectories),
        num_tokens=sum(trajectory.num_sampled for trajectory in trajectories),
        oldest_version=min(trajectory.oldest_version for trajectory in trajectories),
        mean_reward=float(np.mean([verdict.reward for verdict in verdicts])),
        is_uniform=len({(verdict.reward, verdict.steps) for verdict in verdicts}) == 1,
    )


def load_group(location: Path | str, layers: int | None = None, top_k: int | None = None) -> Group:
    """The group that `store_group` wrote at ``location``.
    Raises UserError: the file is missing or damaged, or as `check_routes`."""
    path = Path(location)
    problem = "it is torn, or damaged"
    try:
        start, samples, _ = _read(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file, and the run needs it; restore it, or start a new run folder") from None
    except (OSError, ValueError) as error:
        start, samples, problem = None, (), str(error).splitlines()[0]
    if start is not None and start.samples is not None:
        samples = tuple(samples[number] for number in start.samples)
    if start is None or any(sample.verdict is None for sample in samples):
        raise UserError(f"{path}: not readable as a group: {problem}; restore it, or start a new run folder")
    group = Group(start.task, tuple(sample.trajectory() for sample in samples), start.prompts)
    check_routes(group, str(path), layers, top_k)
    return group


def discard(locations: Iterable[Path | str]) -> None:
    """Delete stored groups that nobody will train on again."""
    for location in locations:
        Path(location).unlink(missing_ok=True)


def check_routes(group: Group, where: str, layers: int | None = None, top_k: int | None = None) -> None:
    """Refuse routes that are not one row a token but the last, or not of a network with so many MoE layers and choices.
    Raises UserError: naming ``where`` and the sample."""
    for trajectory in group.trajectories:
        routes, sample = trajectory.routes, f"{where}: routes of sample {trajectory.sample}"
        if routes is None:
            continue
        if len(routes) != trajectory.num_tokens - 1:
            raise UserError(
                f"{sample}: {len(routes)} rows for {trajectory.num_tokens} tokens, where {trajectory.num_tokens - 1} "
                'belong; sample it again, or train with replay = "off"'
            )
        if (layers or routes.shape[1], top_k or routes.shape[2]) != routes.shape[1:]:
            raise UserError(
                f"{sample}: {routes.shape[1]} layers of {routes.shape[2]} experts, the trained network has {layers} of "
                f"{top_k}; sample with the network that is trained"
            )


# Routes, as few bits as can name the experts

_ROUTES = struct.Struct("<2sBBIIHHI")
"""Mark, bits an id, bytes an id when unpacked, rows, experts, layers, slots, CRC-32 of the ids' bytes."""
_MARK = b"SR"
HEADER_BYTES = _ROUTES.size
"""What a sample of any length pays beside its ids."""


def id_bits(num_experts: int, has_absent: bool) -> int:
    """Bits of one id: ⌈log2 E⌉, of one value more where some places name no expert."""
    return (num_experts + has_absent - 1).bit_length()


def packed_bytes(routes_PLK: np.ndarray) -> int:
    """Bytes that `pack_routes` makes of them."""
    num_experts, has_absent = _ids(routes_PLK)
    return HEADER_BYTES + -(-routes_PLK.size * id_bits(num_experts, has_absent) // 8)


def _ids(routes_PLK: np.ndarray) -> tuple[int, bool]:
    """Experts that the largest id speaks of, and whether some places name none."""
    absent_PLK = routes_PLK == np.iinfo(routes_PLK.dtype).max
    has_absent = bool(absent_PLK.any())
    return 1 + int((routes_PLK[~absent_PLK] if has_absent else routes_PLK).max(initial=0)), has_absent


def pack_routes(routes_PLK: np.ndarray, num_experts: int | None = None) -> bytes:
    """``routes_PLK`` (uint8 or uint16, the dtype's largest value: no expert) in `id_bits` bits an id; None: as many experts
    as the largest id needs.

    Ids follow each other in C order without gaps, low bits first, so a row costs L·K·`id_bits` / 8 bytes. (numpy's
    packbits does the same in twice the time.)
    """
    assert routes_PLK.ndim == 3 and routes_PLK.dtype in (np.uint8, np.uint16), f"{routes_PLK.dtype} {routes_PLK.shape}"
    flat_N = routes_PLK.reshape(-1)
    least, has_absent = _ids(routes_PLK)
    num_experts = least if num_experts is None else num_experts
    assert least <= num_experts, f"expert {least - 1} of {num_experts}"
    absent = np.iinfo(routes_PLK.dtype).max
    ids_N = np.where(flat_N == absent, np.uint16(num_experts), flat_N) if has_absent else flat_N
    bits = id_bits(num_experts, has_absent)
    # eight ids make ``bits`` whole bytes: the first of two words of 64 bits into which they are shifted
    padded_Q8 = np.zeros((-(-len(ids_N) // 8), 8), "<u8")
    padded_Q8.reshape(-1)[: len(ids_N)] = ids_N
    words_Q2 = np.zeros((len(padded_Q8), 2), "<u8")
    for place in range(8):
        word, shift = divmod(bits * place, 64)
        words_Q2[:, word] |= padded_Q8[:, place] << np.uint64(shift)
        if shift + bits > 64:
            words_Q2[:, 1] |= padded_Q8[:, place] >> np.uint64(64 - shift)
    body = words_Q2.view(np.uint8)[:, :bits].tobytes()[: -(-len(ids_N) * bits // 8)]
    num_rows, *layers_slots = routes_PLK.shape
    itemsize = routes_PLK.dtype.itemsize
    return _ROUTES.pack(_MARK, bits, itemsize, num_rows, num_experts, *layers_slots, zlib.crc32(body)) + body


def unpack_routes(packed: bytes) -> np.ndarray:
    """What `pack_routes` was given. Raises ValueError: the bytes are not packed routes, or damaged."""
    if len(packed) < HEADER_BYTES or packed[:2] != _MARK:
        raise ValueError(f"{len(packed)} bytes that are no packed routes")
    _, bits, itemsize, num_rows, num_experts, num_layers, num_slots, checksum = _ROUTES.unpack_from(packed)
    num_ids, body = num_rows * num_layers * num_slots, packed[HEADER_BYTES:]
    if len(body) != -(-num_ids * bits // 8) or zlib.crc32(body) != checksum:
        raise ValueError(f"packed routes of {num_rows} rows are damaged: {len(body)} bytes do not match their header")
    dtype: type[np.uint8 | np.uint16] = np.uint8 if itemsize == 1 else np.uint16
    bits_NJ = np.unpackbits(np.frombuffer(body, np.uint8), count=num_ids * bits, bitorder="little")
    # exact: ids are less than 2^16. By BLAS: packbits would take as long for each row as for many bytes
    ids_N = bits_NJ.reshape(num_ids, bits).astype(np.float32) @ (2.0 ** np.arange(bits)).astype(np.float32)
    routes_N = ids_N.astype(dtype)
    routes_N[routes_N == num_experts] = np.iinfo(dtype).max
    return routes_N.reshape(num_rows, num_layers, num_slots)


def signed_routes(routes_PLK: np.ndarray) -> np.ndarray:
    """int16, −1 for no expert: as the trainer's forward pass takes them."""
    absent_PLK = routes_PLK == np.iinfo(routes_PLK.dtype).max
    assert not routes_PLK.size or int(routes_PLK[~absent_PLK].max(initial=0)) < 32768, "an expert id past int16"
    return np.where(absent_PLK, -1, routes_PLK.astype(np.int32)).astype(np.int16)
