"""The batch edge, both ends: finished groups lie in files, and are packed into the arrays that a trainer steps on.

A sample of n tokens is n − 1 inputs, each with the token after it as its target; only targets that the model sampled
carry a loss. The engine computed exactly these inputs, so that its routes have a row for each of them.

Shape letters: B rows, T positions, S tokens of one sample less one, L MoE layers of the maximum network, K route slots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.base.routes import pack_routes, signed_routes, unpack_routes
from stretto.base.trajectory import Group, Outcome, Segment, Task, Trajectory, Verdict
from stretto.data.pack import IGNORED, PADDING, Piece, plan_rows
from stretto.rl.buffer import GroupRef
from stretto.rl.credit import Credit

_ROUND = 8
"""Rows are cut to the longest that is used, rounded up to this: few distinct shapes, little padding."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of one forward and backward pass, written by `pack`. Streams describe the target of each position."""

    tokens_BT: NDArray[np.int64]
    targets_BT: NDArray[np.int64]
    """The next token where the model sampled it, `IGNORED` elsewhere."""
    positions_BT: NDArray[np.int64]
    """Place in the sample."""
    documents_BT: NDArray[np.int64]
    """Number of the sample within its row, `PADDING` where there is none: attention stays within equal numbers."""
    samples_BT: NDArray[np.int64]
    """Number of the sample within the update, over all its batches, −1 at padding."""
    behaviour_BT: NDArray[np.float32]
    """Processed log-probability when it was sampled; 0 without a target, as in the next two."""
    advantages_BT: NDArray[np.float32]
    weights_BT: NDArray[np.float32]
    """What its loss is multiplied by; the weights of an update know all of its tokens, so that losses just add up."""
    versions_BT: NDArray[np.int32]
    """Weight version it was sampled under, −1 without a target."""
    routes_BTLK: NDArray[np.int16] | None
    """Experts that the engine used for the *input*, −1 for none and at padding."""

    @property
    def num_targets(self) -> int:
        return int((self.targets_BT != IGNORED).sum())

    def rows(self, part: slice) -> Batch:
        """Some of the rows: a rank's share."""
        streams = {field.name: getattr(self, field.name) for field in fields(self)}
        cut: dict[str, Any] = {name: None if value is None else value[part] for name, value in streams.items()}
        return Batch(**cut)


def store_group(folder: Path | str, group: Group) -> GroupRef:
    """Write ``group`` into ``folder``; the file is on the disk, whole and under its name, when this returns.

    Raises:
        UserError: the disk is full.
    """
    task, trajectories = group.task, group.trajectories
    assert len(trajectories) == task.group, f"ordinal {task.ordinal}: {len(trajectories)} samples of {task.group}"
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    packed = [b"" if each.routes is None else pack_routes(each.routes, _num_experts(each)) for each in trajectories]
    meta = {"task": asdict(task), "trajectories": [_describe(*pair) for pair in zip(trajectories, packed, strict=True)]}
    path = Path(folder) / f"group-{task.ordinal:08d}-{trajectories[0].attempt}.npz"
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(
            file,
            meta=np.frombuffer(json.dumps(meta).encode(), np.uint8),
            tokens=np.concatenate([segment.tokens for segment in segments]).astype(np.int32),
            logprobs=np.concatenate([segment.logprobs for segment in segments]).astype(np.float32),
            versions=np.concatenate([segment.versions for segment in segments]).astype(np.int32),
            routes=np.frombuffer(b"".join(packed), np.uint8),
        )
        file.flush()
        os.fsync(file.fileno())
    rewards = [trajectory.verdict.reward for trajectory in trajectories]
    return GroupRef(
        ordinal=task.ordinal,
        attempt=trajectories[0].attempt,
        location=str(path),
        num_samples=len(trajectories),
        num_tokens=sum(trajectory.num_sampled for trajectory in trajectories),
        oldest_version=min(trajectory.oldest_version for trajectory in trajectories),
        mean_reward=float(np.mean(rewards)),
        is_uniform=max(rewards) == min(rewards),
        finished_s=max(segment.finished_s for segment in segments),
        extra={"source": task.source, "item": task.item, "route_bytes": sum(map(len, packed))},
    )


def load_group(location: Path | str) -> Group:
    """The group that `store_group` wrote at ``location``.

    Raises:
        UserError: the file is missing or damaged, or its routes are not of its tokens.
    """
    path = Path(location)
    try:
        with np.load(path) as arrays:
            meta = json.loads(arrays["meta"].tobytes())
            streams = {name: arrays[name] for name in ("tokens", "logprobs", "versions")}
            routes = arrays["routes"].tobytes()
        trajectories, at, byte = [], 0, 0
        for each in meta["trajectories"]:
            segments = []
            for length, is_sampled, started_s, finished_s in each.pop("segments"):
                part = {name: stream[at : at + length] for name, stream in streams.items()}
                assert len(part["tokens"]) == length, f"segment of {length} tokens, {len(part['tokens'])} left"
                segments.append(Segment(**part, is_sampled=is_sampled, started_s=started_s, finished_s=finished_s))
                at += length
            num_bytes = each.pop("route_bytes")
            own = unpack_routes(routes[byte : byte + num_bytes]) if num_bytes else None
            byte += num_bytes
            verdict = each.pop("verdict")
            verdict = Verdict(**{**verdict, "outcome": Outcome(verdict["outcome"])})
            trajectories.append(Trajectory(**each, segments=tuple(segments), routes=own, verdict=verdict))
        group = Group(Task(**meta["task"]), tuple(trajectories))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file, and the run needs it; restore it, or start a new run folder") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, AssertionError, BadZipFile) as error:
        problem = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: not readable as a group: {problem}; restore it, or start a new run folder") from error
    check_routes(group, str(path))
    return group


def discard(locations: Iterable[Path | str]) -> None:
    """Delete stored groups that nobody will train on again."""
    for location in locations:
        Path(location).unlink(missing_ok=True)


def check_routes(group: Group, where: str, layers: int | None = None, top_k: int | None = None) -> None:
    """Refuse routes that are not one row an input, or not of a network with so many MoE layers and choices.

    Raises:
        UserError: naming ``where`` and the sample.
    """
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


def pack(
    groups: Sequence[Group],
    credits: Sequence[Sequence[Credit]],
    seq_len: int,
    rows: int,
    *,
    share: int = 1,
    with_routes: bool = True,
) -> list[Batch]:
    """Rows of at most ``seq_len`` inputs, best-fit decreasing; samples are never cut. The same call, the same batches.

    Args:
        groups: of one update.
        credits: by group and sample, of the same update.
        seq_len: longest row.
        rows: of each batch; the last may have fewer.
        share: the number of rows is a multiple of it, by empty rows: as many as ranks.
        with_routes: carry the recorded routes.

    Raises:
        UserError: a sample that is longer, or has no routes where they are wanted.
    """
    samples = [trajectory for group in groups for trajectory in group.trajectories]
    streams = [credit for group in credits for credit in group]
    assert len(samples) == len(streams), f"{len(samples)} samples, credit for {len(streams)}"
    assert rows % share == 0, f"{rows} rows among {share} ranks"
    for trajectory in samples:
        where = f"ordinal {trajectory.ordinal}, sample {trajectory.sample}"
        if trajectory.num_tokens - 1 > seq_len:
            raise UserError(
                f"train.seq_len: {seq_len} is less than the {trajectory.num_tokens} tokens of {where}; raise it"
            )
        if with_routes and trajectory.routes is None:
            raise UserError(f'{where}: routes: it has none; let the engine record them, or set replay = "off"')
    pieces = [Piece(index, 0, trajectory.num_tokens - 1, False) for index, trajectory in enumerate(samples)]
    # full rows together, so that the short last ones are cut to what they hold
    plan = sorted(plan_rows(pieces, seq_len), key=lambda row: -_length(row))
    batches = []
    for start in range(0, len(plan), rows):
        some = [*plan[start : start + rows]]
        some += [()] * (-len(some) % share)
        length = min(seq_len, -(-max(map(_length, some)) // _ROUND) * _ROUND)
        batches.append(_fill(some, length, samples, streams, with_routes))
    return batches


def _length(row: Iterable[Piece]) -> int:
    return sum(piece.length for piece in row)


def _fill(
    rows: Sequence[Sequence[Piece]],
    length: int,
    samples: Sequence[Trajectory],
    streams: Sequence[Credit],
    with_routes: bool,
) -> Batch:
    shape = (len(rows), length)
    routes = None
    if with_routes:
        first = samples[0].routes
        assert first is not None, "checked by the caller"
        routes = np.full((*shape, *first.shape[1:]), -1, np.int16)
    batch = Batch(
        tokens_BT=np.zeros(shape, np.int64),
        targets_BT=np.full(shape, IGNORED, np.int64),
        positions_BT=np.zeros(shape, np.int64),
        documents_BT=np.full(shape, PADDING, np.int64),
        samples_BT=np.full(shape, -1, np.int64),
        behaviour_BT=np.zeros(shape, np.float32),
        advantages_BT=np.zeros(shape, np.float32),
        weights_BT=np.zeros(shape, np.float32),
        versions_BT=np.full(shape, -1, np.int32),
        routes_BTLK=routes,
    )
    for row, pieces in enumerate(rows):
        at = 0
        for number, piece in enumerate(pieces):
            sample, credit = samples[piece.document], streams[piece.document]
            assert len(credit.mask_S) == piece.length, f"credit for {len(credit.mask_S)} of {piece.length} targets"
            here = (row, slice(at, at + piece.length))
            tokens = _stream(sample, "tokens")
            batch.tokens_BT[here], batch.targets_BT[here] = tokens[:-1], np.where(credit.mask_S, tokens[1:], IGNORED)
            batch.positions_BT[here], batch.documents_BT[here] = np.arange(piece.length), number
            batch.samples_BT[here] = piece.document
            batch.behaviour_BT[here] = np.where(credit.mask_S, _stream(sample, "logprobs")[1:], 0.0)
            batch.versions_BT[here] = np.where(credit.mask_S, _stream(sample, "versions")[1:], -1)
            batch.advantages_BT[here], batch.weights_BT[here] = credit.advantages_S, credit.weights_S
            if routes is not None and sample.routes is not None:
                routes[here] = signed_routes(sample.routes)
            at += piece.length
    return batch


def _stream(trajectory: Trajectory, name: str) -> np.ndarray:
    return np.concatenate([getattr(segment, name) for segment in trajectory.segments])


def _num_experts(trajectory: Trajectory) -> int:
    """Experts that the ids of its routes can name: one more than the largest."""
    assert trajectory.routes is not None
    used = trajectory.routes[trajectory.routes != np.iinfo(trajectory.routes.dtype).max]
    return int(used.max()) + 1 if used.size else 1


def _describe(trajectory: Trajectory, packed: bytes) -> Mapping[str, Any]:
    """All of a trajectory that is not arrays, as plain JSON."""
    verdict = trajectory.verdict
    plain = asdict(replace(verdict, parts=dict(verdict.parts)))
    return {
        "ordinal": trajectory.ordinal,
        "sample": trajectory.sample,
        "attempt": trajectory.attempt,
        "finish_reason": trajectory.finish_reason,
        "num_turns": trajectory.num_turns,
        "segments": [
            (len(segment.tokens), segment.is_sampled, segment.started_s, segment.finished_s)
            for segment in trajectory.segments
        ],
        "route_bytes": len(packed),
        "verdict": {**plain, "outcome": verdict.outcome.value},
    }
