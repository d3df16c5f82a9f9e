"""What the subsystems of a reinforcement-learning run hand each other: records only.

Tokens, never text: what was sampled is never tokenised again. Each record is written once, by whom its text names. Apart
from `stretto.base.records` so that the controller starts without pydantic.

Shape letters: T tokens of a segment, P rows of routes, L MoE layers of the maximum network, K route slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np


class Outcome(Enum):
    """How a verification ended. Only the first two are about the answer; the last is about us and never a reward."""

    OK = "ok"
    """Verified; the reward is the task's."""
    WRONG = "wrong"
    """Verified, and refused."""
    TIMEOUT = "timeout"
    """The answer's own program used up its time or processor seconds: the answer's fault."""
    CRASH = "crash"
    """The answer's own program died, or broke a limit: the answer's fault."""
    INFRA = "infra"
    """The verifier could not do its work: a dead worker, a task that raised, a reward that is no finite number."""


class Ending(Enum):
    """How an ordinal ended: each does exactly once."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """Dropped on purpose: a group without variance in its rewards, say."""
    STALE = "stale"
    """Too old to be trained on; the slot gate exists so that this does not happen."""
    FAILED = "failed"
    """Given up after as many attempts as the recipe allows, always for reasons of ours."""
    CANCELLED = "cancelled"
    """The run ended first."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to be answered by a group. Written by the controller when it charges a slot."""

    ordinal: int
    """Place in the run's endless list of prompts, from 0: the identity that ledger, seeds and files go by."""
    source: str
    """Name of the task set in the recipe."""
    item: int
    """Which of the source's problems; a source gives the same problem for the same item, on every machine."""
    group: int
    """Samples drawn for it."""
    seed: int
    """Sample i draws its tokens with a seed made of this and i alone: a retry under the same weights repeats it."""
    max_tokens: int
    """Tokens the model may write over all turns of one sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens of one sample with one author. Written by the agent loop, from what the engine returned."""

    tokens: np.ndarray
    """int32 [T]."""
    is_sampled: bool
    """The model wrote them; False: a prompt, a tool's answer or the template between turns."""
    logprobs: np.ndarray
    """fp32 [T], processed, under the weights that sampled each; zeros where not sampled."""
    versions: np.ndarray
    """int32 [T], weight version each was sampled under; −1 where not sampled."""
    started_s: float = 0.0
    """Unix seconds, as is the next."""
    finished_s: float = 0.0

    def __post_init__(self) -> None:
        lengths = len(self.tokens), len(self.logprobs), len(self.versions)
        assert lengths[0] == lengths[1] == lengths[2], f"a segment has streams of lengths {lengths}"


@dataclass(frozen=True, slots=True)
class StepReward:
    """What a part of a sample earned by itself: a turn, or a step of reasoning within one. Written by a task."""

    turn: int
    """Of the model's, from 0."""
    reward: float
    """Finite."""
    end: int | None = None
    """Where the step ends: in characters of the turn's text as a task writes it, in tokens of the turn from the agent loop
    on. None: with the turn."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says of one sample. Written by a reward worker."""

    reward: float
    """Finite. Meaningless where the outcome is INFRA."""
    outcome: Outcome
    seconds: float
    """Wall time of the verification, its queue not counted."""
    sandbox_s: float = 0.0
    """Processor seconds of the sandboxes it used."""
    detail: str = ""
    """One line for people: why it was refused."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components of the reward, for the log."""
    latency_s: float = 0.0
    """From asking to this verdict, queues and further tries included. Written by the agent loop."""
    steps: tuple[StepReward, ...] = ()
    """Rewards of turns and steps, beside that of the whole: for algorithms that give credit more finely."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One finished sample. Written by the agent loop."""

    ordinal: int
    sample: int
    """Which of the group, from 0."""
    attempt: int
    """How many times the group was handed out before; the pair above is trained once whatever this is."""
    segments: tuple[Segment, ...]
    routes: np.ndarray | None
    """uint8 or uint16 [P, L, K], P = tokens − 1: the experts that the engine used for each token it computed, original
    rows for tokens sampled before a weight update. The last token has none. The dtype's largest value: no expert."""
    finish_reason: str
    """``stop``, ``length``, ``turns`` (too many) or ``tool`` (one that may end the episode did)."""
    verdict: Verdict

    @property
    def num_turns(self) -> int:
        """Turns of the model."""
        return sum(segment.is_sampled for segment in self.segments)

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def num_sampled(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments if segment.is_sampled)

    @property
    def oldest_version(self) -> int:
        """Of its sampled tokens; what staleness counts from."""
        return min(
            int(segment.versions.min()) for segment in self.segments if segment.is_sampled and len(segment.tokens)
        )


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one ordinal: all of them unless the last attempt left some unfinished, and then at least two."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    """By sample."""
    prompts: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The problem as a teacher's own chat template renders it, int32 tokens by the teacher's name: of those that teach its
    source and render it otherwise than the student. Written by the agent loop."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Immutable weights. Written by the trainer when it publishes; version n is what n optimisation steps made."""

    number: int
    location: str
    """The file of its tensors."""
    checksum: str
    """SHA-256 over names, types, shapes and bytes of all tensors."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A finished group in the store. Written by `stretto.learning.samples.store_group`."""

    ordinal: int
    attempt: int
    """Number of the dispatch that finished it, from 0."""
    location: str
    """Path of its file."""
    num_samples: int
    num_tokens: int
    """Sampled tokens, over all samples."""
    oldest_version: int
    """Weight version of its oldest sampled token; staleness counts from it."""
    mean_reward: float
    is_uniform: bool
    """All rewards are equal, those of steps too, so that advantages within the group are zero."""
