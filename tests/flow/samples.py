"""Groups of made-up samples, as an agent loop would have finished them, and the samples in a log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stretto.base.trajectory import Group, Outcome, Segment, Task, Trajectory, Verdict
from stretto.learning.samples import Sample, _read

VOCAB = 31


def segment(rng: np.random.Generator, length: int, is_sampled: bool, versions: Sequence[int] = (0,)) -> Segment:
    """Random tokens; sampled ones were, in turn, sampled under each of ``versions``."""
    logprobs = -rng.exponential(1.0, length) if is_sampled else np.zeros(length)
    return Segment(
        tokens=rng.integers(0, VOCAB, length).astype(np.int32),
        is_sampled=is_sampled,
        logprobs=logprobs.astype(np.float32),
        versions=np.resize(np.array(versions), length).astype(np.int32)
        if is_sampled
        else np.full(length, -1, np.int32),
        started_s=10.0,
        finished_s=10.0 + length,
    )


def read_logs(content: bytes) -> tuple[Sample, ...]:
    """The samples in a log with ``content``, detached from it. () if the log has no frame."""
    return _read(content)[1]


def equal(one: Any, other: Any) -> bool:
    """Records and arrays, to the bit and the type."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "__slots__"):
        return type(one) is type(other) and all(equal(getattr(one, n), getattr(other, n)) for n in one.__slots__)
    return bool(one == other)


def trajectory(
    rng: np.random.Generator,
    turns: Sequence[int],
    *,
    ordinal: int = 0,
    sample: int = 0,
    reward: float = 0.0,
    versions: Sequence[int] = (0,),
    routes: tuple[int, int, int] | None = None,
) -> Trajectory:
    """``turns`` are lengths, prompt and answer by turns. ``routes`` are layers, slots and experts."""
    segments = tuple(segment(rng, length, index % 2 == 1, versions) for index, length in enumerate(turns))
    rows = None
    if routes is not None:
        layers, slots, experts = routes
        scores = rng.random((sum(turns) - 1, layers, experts))
        rows = scores.argsort(-1)[..., :slots].astype(np.uint8)
    verdict = Verdict(reward, Outcome.OK if reward > 0 else Outcome.WRONG, 0.5, 0.25, "why", {"format": 1.0})
    return Trajectory(ordinal, sample, 0, segments, rows, "stop", verdict)


def group(
    rng: np.random.Generator,
    rewards: Sequence[float],
    *,
    ordinal: int = 0,
    versions: Sequence[int] = (0,),
    routes: tuple[int, int, int] | None = None,
    longest: int = 9,
) -> Group:
    """A sample for each reward: one prompt, answers of any length, every third with a tool's turn in between.

    Routes of the prompt are the same, but for every fourth sample's last ones.
    """
    prompt = int(rng.integers(2, 6))
    samples: list[Trajectory] = []
    for index, reward in enumerate(rewards):
        turns = [prompt, int(rng.integers(1, longest + 1))]
        if index % 3 == 2:
            turns += [int(rng.integers(1, 4)), int(rng.integers(1, longest + 1))]
        made = trajectory(rng, turns, ordinal=ordinal, sample=index, reward=reward, versions=versions, routes=routes)
        if samples:
            made = replace(made, segments=(samples[0].segments[0], *made.segments[1:]))
        if samples and made.routes is not None and samples[0].routes is not None:
            same = prompt // 2 if index % 4 == 3 else prompt - 1
            made = replace(made, routes=np.concatenate([samples[0].routes[:same], made.routes[same:]]))
        samples.append(made)
    return Group(Task(ordinal, "digits", ordinal * 3, len(rewards), 7 + ordinal, 2 * longest), tuple(samples))
