"""Finished groups as files: written where their agent loop ran, read where the trainer is.

A sample of n tokens is n − 1 inputs, each with the token after it as its target. The engine computed exactly these
inputs, so that its routes have a row for each of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.base.routes import pack_routes, unpack_routes
from stretto.base.trajectory import Group, Segment, Task, Trajectory, Verdict
from stretto.rl.ledger import GroupRef
from stretto.rl.logframes import frame, frames

SUFFIX = ".group"
_STREAMS = {"tokens": "<i4", "logprobs": "<f4", "versions": "<i4"}
"""Of all segments, one after the other; behind them the packed routes of each sample. One frame is a whole file."""


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
    path = Path(folder) / f"group-{task.ordinal:08d}-{trajectories[0].attempt}{SUFFIX}"
    streams = (
        np.concatenate([getattr(segment, name) for segment in segments]).astype(dtype).tobytes()
        for name, dtype in _STREAMS.items()
    )
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(frame(meta, b"".join((*streams, *packed))))
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
        found = next(frames(path.read_bytes()), None)
        if found is None:
            raise ValueError("it is torn, or damaged")
        meta, raw, _ = found
        num_tokens = sum(length for each in meta["trajectories"] for length, *_ in each["segments"])
        streams, byte = {}, 0
        for name, dtype in _STREAMS.items():
            streams[name] = np.frombuffer(raw, dtype, num_tokens, byte)
            byte += streams[name].nbytes
        trajectories, at = [], 0
        for each in meta["trajectories"]:
            segments = []
            for length, is_sampled, started_s, finished_s in each.pop("segments"):
                part = {name: stream[at : at + length] for name, stream in streams.items()}
                segments.append(Segment(**part, is_sampled=is_sampled, started_s=started_s, finished_s=finished_s))
                at += length
            num_bytes = each.pop("route_bytes")
            own = unpack_routes(raw[byte : byte + num_bytes]) if num_bytes else None
            byte += num_bytes
            verdict = Verdict.from_json(each.pop("verdict"))
            trajectories.append(Trajectory(**each, segments=tuple(segments), routes=own, verdict=verdict))
        group = Group(Task(**meta["task"]), tuple(trajectories))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file, and the run needs it; restore it, or start a new run folder") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
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


def _num_experts(trajectory: Trajectory) -> int:
    """Experts that the ids of its routes can name: one more than the largest."""
    assert trajectory.routes is not None
    used = trajectory.routes[trajectory.routes != np.iinfo(trajectory.routes.dtype).max]
    return int(used.max()) + 1 if used.size else 1


def _describe(trajectory: Trajectory, packed: bytes) -> Mapping[str, Any]:
    """All of a trajectory that is not arrays, as plain JSON."""
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
        "verdict": trajectory.verdict.to_json(),
    }
