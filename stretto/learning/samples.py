"""Storage of samples: one format for unfinished samples and finished groups.

The files lie in the run's `stretto.runtime.store.Store`. A file is a list of frames. The first frame names the task; each further
frame is a part of a sample (a prompt, a chunk from an engine, a tool turn) or the sample's end. A *log* is written part by part, so
that an interrupted rollout resumes from it. Restarting instead would lose long samples more often and bias the policy towards short
answers. Only a sample whose session state is lost restarts; it uses its own seed again, so that with the same weights and the same
tool results it becomes the same sample, and restarts are counted. A *stored group* is the same file written at once, with chunks
joined and routes packed.

There is one log for each attempt at a group, because on many disks a new file costs more than all writes to it. Only its own
attempt appends to a log. A later attempt starts with a copy of the latest earlier log, so that an agent whose lease ended does
not interfere. Nothing is overwritten: old tokens keep the log-probabilities, versions and routes with which they were sampled,
whatever weights sample the rest. In a run folder, writes survive ``kill -9`` of the process; they are not fsynced. A power
failure, or a kill with another store, loses chunks, which costs time only. A torn last frame is dropped.

Imports no torch. Shape letters: R rows of routes, one per token (P: of all tokens but the last), L MoE layers of the
maximum network, K route slots, N = P·L·K ids of J bits, Q = ⌈N / 8⌉ octets of ids.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

import msgspec
import numpy as np

from stretto.base.errors import InfraError, UserError
from stretto.base.trajectory import Group, GroupRef, Outcome, Segment, Task, Trajectory, Verdict
from stretto.learning.recipe import GROUPS, LOGS
from stretto.runtime.store import FILES, LOG_SUFFIX, Store

SUFFIX = ".group"

Ended = Literal["", "stop", "length"]
"""How the model's turn ended with a part; empty if the turn continues."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Unit of appending: a prompt, a chunk that an engine returned, or a tool turn."""

    segment: Segment
    routes: np.ndarray | None = None
    """[R, L, K], for all positions without routes up to the last token but one; None if not sampled."""
    ended: Ended = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Of a tool turn: the tools' messages. A tool turn without tokens is the last part of its sample."""


def context(tokens: np.ndarray, started_s: float = 0.0, finished_s: float = 0.0) -> Segment:
    """A segment that the model did not sample."""
    num = len(tokens)
    return Segment(tokens, False, np.zeros(num, np.float32), np.full(num, -1, np.int32), started_s, finished_s)


class _Start(msgspec.Struct, tag="start", array_like=True):
    """First frame of a file."""

    task: Task
    attempt: int
    samples: tuple[int, ...] | None = None
    """Numbers of the samples in a stored group; None: all."""
    prompts: dict[str, np.ndarray] = {}
    """`Group.prompts` of a stored group."""


class _Next(msgspec.Struct, tag="part", array_like=True):
    """Next part of a sample."""

    sample: int
    num_tokens: int
    """Number of the sample's tokens before this part."""
    num_rows: int
    """Number of the sample's route rows before this part."""
    part: Part


class _End(msgspec.Struct, tag="end", array_like=True):
    """End of a sample."""

    sample: int
    finish_reason: str
    verdict: Verdict
    routes: bytes = b""
    """All routes of the sample, packed; in a stored group only."""


class _Anew(msgspec.Struct, tag="anew", array_like=True):
    """Restart of a sample: its earlier frames are void, because its session state is lost."""

    sample: int
    why: str


_Record = _Start | _Next | _End | _Anew
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda array: (array.dtype.str, array.shape, array.tobytes()))
_DECODER = msgspec.msgpack.Decoder(
    _Record, dec_hook=lambda _, array: np.frombuffer(array[2], array[0]).reshape(array[1])
)
_HEAD = struct.Struct("<4sII")
"""Magic, number of bytes that follow (a record as msgpack), CRC-32 of these bytes."""
_MAGIC = b"STS1"


def _frame(record: _Record) -> bytes:
    body = _ENCODER.encode(record)
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def frames(content: bytes) -> Iterator[tuple[_Record, int]]:
    """The record of each frame and the offset of its end, up to the first frame that is torn or damaged."""
    end = 0
    while end + _HEAD.size <= len(content):
        magic, num_bytes, checksum = _HEAD.unpack_from(content, end)
        start, end = end + _HEAD.size, end + _HEAD.size + num_bytes
        body = content[start:end]
        if magic != _MAGIC or len(body) != num_bytes or zlib.crc32(body) != checksum:
            return
        yield _DECODER.decode(body), end


class Sample:
    """An unfinished or finished sample. From its first sampled token on, parts are written to the log before they count."""

    def __init__(self, task: Task, number: int, attempt: int):
        self.task, self.number, self.attempt = task, number, attempt
        self.log: Callable[[bytes], None] | None = None
        """Appends to the log that the samples of the group's attempt share; None: no log."""
        self.parts: list[Part] = []
        self.num_tokens = 0
        """Number of all tokens, sampled or not."""
        self.num_sampled = 0
        self.num_rows = 0
        """Number of leading tokens whose routes are known."""
        self.num_resumed = 0
        """Number of sampled tokens from the logs of earlier attempts."""
        self.num_lost = 0
        """Number of restarts."""
        self.finish_reason = ""
        self.verdict: Verdict | None = None
        """None until the sample is closed."""
        self.routes: np.ndarray | None = None
        """All routes of a sample of a stored group."""
        self.waits_for, self.since_s = "its problem", time.time()
        """Current wait and its start. Written by the agent; read by the watchdog."""
        self._unwritten = b""

    def append(self, part: Part) -> None:
        """Write ``part`` to the log and add it.

        Raises:
            InfraError: the number of route rows does not match the tokens; nothing is written.
            UserError: the disk is full.
        """
        assert self.verdict is None, "it is closed"
        assert self.parts or not part.segment.is_sampled, "a sample begins with its prompt"
        num_wanted = self.num_tokens + len(part.segment.tokens) - 1 - self.num_rows
        if part.routes is not None and len(part.routes) != num_wanted:
            raise InfraError(f"{len(part.routes)} rows of routes were returned, {num_wanted} belong to the tokens")
        self._record(_Next(self.number, self.num_tokens, self.num_rows, part), part.segment.is_sampled)

    def close(self, finish_reason: str, verdict: Verdict) -> None:
        """Finish the sample. The outcome of ``verdict`` is not INFRA."""
        assert self.verdict is None and verdict.outcome is not Outcome.INFRA, f"{self.verdict}, {verdict}"
        self._record(_End(self.number, finish_reason, verdict), True)

    def begin_anew(self, why: str) -> None:
        """Restart the sample. The log keeps its parts and the reason ``why``."""
        assert self.verdict is None, "it is closed"
        self._record(_Anew(self.number, why), True)

    def tokens(self) -> np.ndarray:
        """int32 [num_tokens]."""
        return np.concatenate([part.segment.tokens for part in self.parts])

    def turns(self) -> list[np.ndarray]:
        """int32 tokens of each of the model's turns."""
        return [segment.tokens for segment in self.segments() if segment.is_sampled]

    def segments(self) -> tuple[Segment, ...]:
        """The parts, with consecutive sampled parts joined and consecutive others: a turn of the model is one segment."""
        runs = groupby((part.segment for part in self.parts if len(part.segment.tokens)), attrgetter("is_sampled"))
        return tuple(_joined(list(run)) for _, run in runs)

    def trajectory(self) -> Trajectory:
        """The record of a closed sample."""
        assert self.verdict is not None, "it is not closed"
        rows = [part.routes for part in self.parts if part.routes is not None]
        routes = np.concatenate(rows) if rows else self.routes
        ids = (self.task.ordinal, self.number, self.attempt)
        return Trajectory(*ids, self.segments(), routes, self.finish_reason, self.verdict)

    def _record(self, record: _Record, is_due: bool) -> None:
        """Append ``record`` to the log in one write, and apply it. Frames before the first sampled token are written later, unless
        this one ``is_due``."""
        content = self._unwritten + _frame(record) if self.log is not None else b""
        if self.log is not None and (is_due or self.num_sampled):
            self.log(content)
            content = b""
        self._unwritten = content
        self.apply(record)

    def apply(self, record: _Record) -> bool:
        """Change the sample by a record. Returns False if it does not continue this sample, because another process wrote it."""
        if self.verdict is not None:
            return False
        if isinstance(record, _End):
            self.finish_reason, self.verdict = record.finish_reason, record.verdict
            self.routes = unpack_routes(record.routes) if record.routes else None
        elif isinstance(record, _Next) and (record.num_tokens, record.num_rows) == (self.num_tokens, self.num_rows):
            segment, routes = record.part.segment, record.part.routes
            self.parts.append(record.part)
            self.num_tokens += len(segment.tokens)
            self.num_sampled += len(segment.tokens) if segment.is_sampled else 0
            self.num_rows += 0 if routes is None else len(routes)
        elif isinstance(record, _Anew):
            self.parts, self.num_tokens, self.num_sampled, self.num_rows, self.num_resumed = [], 0, 0, 0, 0
            self.num_lost += 1
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
    """The first frame of a file (None: the file has none), its samples, and the bytes of the further valid frames."""
    records = frames(content)
    start, end = next(records, (None, 0))
    if not isinstance(start, _Start):
        return None, (), []
    samples = tuple(Sample(start.task, number, start.attempt) for number in range(start.task.group))
    valid, ended = [], set[int]()
    for record, next_end in records:
        number = len(samples) if isinstance(record, _Start) else record.sample  # a second start is never valid
        if number not in ended and number < len(samples) and samples[number].apply(record):
            valid.append(content[end:next_end])
        else:
            ended.add(number)
        end = next_end
    return start, samples, valid


def open_samples(store: Store, task: Task, attempt: int) -> tuple[Sample, ...]:
    """All samples of ``attempt``, resumed from the log of this or the latest earlier attempt if there is one.
    Raises UserError: the log is of another task, or the disk is full. InfraError: the store does not answer."""
    start: _Start | None = None
    samples, valid = tuple[Sample, ...](), list[bytes]()
    for number in range(attempt, -1, -1):
        try:
            start, samples, valid = _read(store.read(log_name(task.ordinal, number)))
        except FileNotFoundError:
            continue
        if start is not None and start.task != task:
            where = store.describe(log_name(task.ordinal, number))
            raise UserError(f"{where}: task: these logs are of another run or recipe; choose an empty run folder")
        break
    own = log_name(task.ordinal, attempt)
    store.write(own, b"".join((_frame(_Start(task, attempt)), *valid)))
    samples = samples or tuple(Sample(task, number, attempt) for number in range(task.group))
    for sample in samples:
        sample.attempt, sample.log, sample.num_resumed = attempt, partial(store.append, own), sample.num_sampled
    return samples


def log_name(ordinal: int, attempt: int) -> str:
    """Name of an attempt's log in the store."""
    return f"{LOGS}/{ordinal:08d}-{attempt:03d}{LOG_SUFFIX}"


def remove_logs(store: Store, ordinal: int) -> None:
    """Delete the logs of an ordinal that has ended."""
    store.remove(name for name in store.names(LOGS) if name.startswith(f"{LOGS}/{ordinal:08d}-"))


def logged_ordinals(store: Store) -> tuple[int, ...]:
    """Ordinals with logs, ascending."""
    ordinals = {name.removeprefix(f"{LOGS}/").partition("-")[0] for name in store.names(LOGS)}
    return tuple(sorted(int(ordinal) for ordinal in ordinals if ordinal.isdecimal()))


# Finished groups


def store_group(store: Store, group: Group) -> GroupRef:
    """Write ``group`` to ``store``. The complete file is there under its name when this returns.
    Raises UserError: the disk is full. InfraError: the store does not answer."""
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
    name = f"{GROUPS}/group-{task.ordinal:08d}-{attempt}{SUFFIX}"
    location = store.write(name, b"".join(content), durable=True)
    verdicts = [trajectory.verdict for trajectory in trajectories]
    return GroupRef(
        ordinal=task.ordinal,
        attempt=attempt,
        location=location,
        num_samples=len(trajectories),
        num_tokens=sum(trajectory.num_sampled for trajectory in trajectories),
        oldest_version=min(trajectory.oldest_version for trajectory in trajectories),
        mean_reward=float(np.mean([verdict.reward for verdict in verdicts])),
        is_uniform=len({(verdict.reward, verdict.steps) for verdict in verdicts}) == 1,
    )


def load_group(location: str, layers: int | None = None, top_k: int | None = None, store: Store = FILES) -> Group:
    """The group that `store_group` wrote at ``location`` of ``store``.
    Raises UserError: the file is missing or damaged; or as `check_routes`. InfraError: the store does not answer."""
    where, problem = store.describe(location), "it is torn, or damaged"
    try:
        start, samples, _ = _read(store.read(location))
    except FileNotFoundError:
        raise UserError(f"{where}: no such file, and the run needs it; restore it, or start a new run folder") from None
    except (OSError, ValueError) as error:
        start, samples, problem = None, (), str(error).splitlines()[0]
    if start is not None and start.samples is not None:
        samples = tuple(samples[number] for number in start.samples)
    if start is None or any(sample.verdict is None for sample in samples):
        raise UserError(f"{where}: not readable as a group: {problem}; restore it, or start a new run folder")
    group = Group(start.task, tuple(sample.trajectory() for sample in samples), start.prompts)
    check_routes(group, where, layers, top_k)
    return group


def check_routes(group: Group, where: str, layers: int | None = None, top_k: int | None = None) -> None:
    """Raises UserError, with ``where`` and the sample: there is not one row of routes for each token but the last, or the rows
    are not of a network with ``layers`` MoE layers and ``top_k`` choices."""
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


# Routes, packed into ⌈log2 E⌉ bits per expert id

_ROUTES = struct.Struct("<2sBBIIHHI")
"""Mark, bits per id, bytes per unpacked id, rows, experts, layers, slots, CRC-32 of the packed ids."""
_MARK = b"SR"
HEADER_BYTES = _ROUTES.size


def id_bits(num_experts: int, has_absent: bool) -> int:
    """Bits of one id: ⌈log2 E⌉, with one more value if some slots have no expert."""
    return (num_experts + has_absent - 1).bit_length()


def packed_bytes(routes_PLK: np.ndarray) -> int:
    """Length of the result of `pack_routes`."""
    num_experts, has_absent = _ids(routes_PLK)
    return HEADER_BYTES + -(-routes_PLK.size * id_bits(num_experts, has_absent) // 8)


def _ids(routes_PLK: np.ndarray) -> tuple[int, bool]:
    """Number of experts up to the largest id, and whether some slots have no expert."""
    absent_PLK = routes_PLK == np.iinfo(routes_PLK.dtype).max
    has_absent = bool(absent_PLK.any())
    return 1 + int((routes_PLK[~absent_PLK] if has_absent else routes_PLK).max(initial=0)), has_absent


def pack_routes(routes_PLK: np.ndarray, num_experts: int | None = None) -> bytes:
    """``routes_PLK`` (uint8 or uint16; the dtype's largest value means no expert) with `id_bits` bits per id. ``num_experts``
    None: as many as the largest id requires.

    Ids follow each other in C order without gaps, low bits first, so a row takes L·K·`id_bits` / 8 bytes. (numpy's packbits
    takes four times as long.)
    """
    assert routes_PLK.ndim == 3 and routes_PLK.dtype in (np.uint8, np.uint16), f"{routes_PLK.dtype} {routes_PLK.shape}"
    flat_N = routes_PLK.reshape(-1)
    least, has_absent = _ids(routes_PLK)
    num_experts = least if num_experts is None else num_experts
    assert least <= num_experts, f"expert {least - 1} of {num_experts}"
    absent = np.iinfo(routes_PLK.dtype).max
    ids_N = np.where(flat_N == absent, np.uint16(num_experts), flat_N) if has_absent else flat_N
    bits = id_bits(num_experts, has_absent)
    # eight ids fill ``bits`` bytes, the first bytes of two words of 64 bits into which they are shifted
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
    """Inverse of `pack_routes`. Raises ValueError: the bytes are not packed routes, or damaged."""
    if len(packed) < HEADER_BYTES or packed[:2] != _MARK:
        raise ValueError(f"{len(packed)} bytes that are not packed routes")
    _, bits, itemsize, num_rows, num_experts, num_layers, num_slots, checksum = _ROUTES.unpack_from(packed)
    num_ids, body = num_rows * num_layers * num_slots, packed[HEADER_BYTES:]
    if len(body) != -(-num_ids * bits // 8) or zlib.crc32(body) != checksum:
        raise ValueError(f"packed routes of {num_rows} rows are damaged: {len(body)} bytes do not match their header")
    dtype: type[np.uint8 | np.uint16] = np.uint8 if itemsize == 1 else np.uint16
    bits_NJ = np.unpackbits(np.frombuffer(body, np.uint8), count=num_ids * bits, bitorder="little")
    # a product by BLAS is fastest, and exact in fp32 because ids are below 2^16
    ids_N = bits_NJ.reshape(num_ids, bits).astype(np.float32) @ (2.0 ** np.arange(bits)).astype(np.float32)
    routes_N = ids_N.astype(dtype)
    routes_N[routes_N == num_experts] = np.iinfo(dtype).max
    return routes_N.reshape(num_rows, num_layers, num_slots)


def signed_routes(routes_PLK: np.ndarray) -> np.ndarray:
    """``routes_PLK`` as int16 with −1 for no expert, the form for the trainer's forward pass."""
    absent_PLK = routes_PLK == np.iinfo(routes_PLK.dtype).max
    assert not routes_PLK.size or int(routes_PLK[~absent_PLK].max(initial=0)) < 32768, "an expert id past int16"
    return np.where(absent_PLK, -1, routes_PLK.astype(np.int32)).astype(np.int16)
