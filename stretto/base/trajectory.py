"""Records that the roles of an RL run exchange.

They contain tokens, not text: sampled tokens are never tokenised again. Each record is written once, by the role that its docstring
names. This module is separate from `stretto.base.records` so that the controller starts without pydantic.

Shape letters: T tokens of a segment, P rows of routes, L MoE layers of the maximum network, K route slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np


class Outcome(Enum):
    """Result of a verification. INFRA is an infrastructure error and never becomes a reward."""

    OK = "ok"
    """Verified; the task set the reward."""
    WRONG = "wrong"
    """Verified and rejected."""
    TIMEOUT = "timeout"
    """A program in the answer exceeded its limit of wall or processor time. Counts as a wrong answer."""
    CRASH = "crash"
    """A program in the answer crashed or exceeded another limit. Counts as a wrong answer."""
    INFRA = "infra"
    """The verifier failed: a dead worker, an exception in the task, or a reward that is not finite."""


class Ending(Enum):
    """How a group (an ordinal of the run) ended. Every group ends exactly once."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """Dropped on purpose, for example because all its rewards are equal."""
    STALE = "stale"
    """Too old for training. The controller's limit on running groups prevents this."""
    FAILED = "failed"
    """Every attempt that the recipe allows failed with an infrastructure error."""
    CANCELLED = "cancelled"
    """The run ended before the group did."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt for a group of samples. Written by the controller when it dispatches the group."""

    ordinal: int
    """Place in the run's infinite list of prompts, from 0. Identifies the group in the ledger, in seeds and in files."""
    source: str
    """Name of the task source in the recipe."""
    item: int
    """Index of the problem in its source; a source returns the same problem for an index on every machine."""
    group: int
    """Number of samples."""
    seed: int
    """Base of the samples' seeds. The seed of sample i depends on this and i alone, so a retry under the same weights repeats it."""
    max_tokens: int
    """Largest number of tokens that the model may write over all turns of one sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens of one sample with the same author. Written by the agent role, from the engine's reply."""

    tokens: np.ndarray
    """int32 [T]."""
    is_sampled: bool
    """Whether the model wrote the tokens; False: a prompt, a tool's answer or the template between turns."""
    logprobs: np.ndarray
    """fp32 [T]: log-probability of each token under the weights and sampling settings that drew it; 0 if not sampled."""
    versions: np.ndarray
    """int32 [T]: version of the weights that sampled each token; −1 if not sampled."""
    started_s: float = 0.0
    """Start of the generation, Unix time in seconds."""
    finished_s: float = 0.0
    """End of the generation, Unix time in seconds."""

    def __post_init__(self) -> None:
        lengths = len(self.tokens), len(self.logprobs), len(self.versions)
        assert lengths[0] == lengths[1] == lengths[2], f"a segment has streams of lengths {lengths}"


@dataclass(frozen=True, slots=True)
class StepReward:
    """Reward of a part of a sample: a turn, or a step of reasoning within a turn. Written by a task."""

    turn: int
    """Number of the turn among those of the model, from 0."""
    reward: float
    """A finite number."""
    end: int | None = None
    """End of the step within the turn: in characters of its text where a task writes the record, in tokens once the agent role has
    converted it. None: the end of the turn."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on one sample. Written by the verifier role."""

    reward: float
    """A finite number; without meaning if the outcome is INFRA."""
    outcome: Outcome
    seconds: float
    """Wall time of the verification, without time in queues."""
    sandbox_s: float = 0.0
    """Processor seconds of the sandboxes."""
    detail: str = ""
    """Reason of a rejection, one line for display."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components of the reward, for the log."""
    latency_s: float = 0.0
    """Seconds from the request to the verdict, with queues and retries. Written by the agent role."""
    steps: tuple[StepReward, ...] = ()
    """Rewards of turns and steps, for algorithms that assign credit within a sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One finished sample. Written by the agent role."""

    ordinal: int
    sample: int
    """Number of the sample in its group, from 0."""
    attempt: int
    """Number of earlier dispatches of the group. A sample (ordinal, sample) is trained at most once, whatever the attempt."""
    segments: tuple[Segment, ...]
    routes: np.ndarray | None
    """uint8 or uint16 [P, L, K], P = tokens − 1: experts that the engine used for each token, as computed when the token was sampled.
    The last token has no row. The largest value of the dtype means no expert."""
    finish_reason: str
    """``stop``, ``length``, ``turns`` (limit of turns reached) or ``tool`` (a tool ended the episode)."""
    verdict: Verdict

    @property
    def num_turns(self) -> int:
        """Number of turns of the model."""
        return sum(segment.is_sampled for segment in self.segments)

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def num_sampled(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments if segment.is_sampled)

    @property
    def oldest_version(self) -> int:
        """Oldest weight version among the sampled tokens; staleness counts from it."""
        return min(
            int(segment.versions.min()) for segment in self.segments if segment.is_sampled and len(segment.tokens)
        )


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one task. If the last attempt left samples unfinished, they are missing, but two or more remain."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    """In the order of the sample numbers."""
    prompts: Mapping[str, np.ndarray] = field(default_factory=dict)
    """int32 tokens of the problem by teacher's name, for teachers of its source whose chat template renders the problem differently
    from the student's. Written by the agent role."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Immutable weights. Written by the trainer when it publishes them."""

    number: int
    """Number of optimisation steps."""
    location: str
    """Where the channel of the run finds the tensors; with files, their path."""
    checksum: str
    """SHA-256 over names, types, shapes and bytes of all tensors."""
    num_bytes: int
    canary: tuple[float, ...] = ()
    """Log-probabilities of `canary_tokens` under these weights, in nats, as the trainer computes them. An engine at an address must
    agree with them after it has loaded the weights. Empty: not computed. Written by `stretto.learning.canary`."""
    tolerance: float = 0.0
    """Largest mean difference to ``canary``, in nats, that the rounding of the engine's precision explains."""


def canary_tokens(vocab_size: int, num: int) -> list[int]:
    """The tokens on which trainer and engine are compared after an update of weights: one without a log-probability, then ``num``,
    spread over the vocabulary."""
    return [(number * 2_654_435_761 + 1) % vocab_size for number in range(num + 1)]


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A finished group in the store. Written by `stretto.learning.samples.store_group`."""

    ordinal: int
    attempt: int
    """Number of the dispatch that finished it, from 0."""
    location: str
    """Path of the group's file."""
    num_samples: int
    num_tokens: int
    """Number of sampled tokens, over all samples."""
    oldest_version: int
    """Oldest weight version among the sampled tokens; staleness counts from it."""
    mean_reward: float
    is_uniform: bool
    """Whether all rewards of the verifier are equal, also those of steps: without a penalty for overlong answers, all advantages are 0."""
