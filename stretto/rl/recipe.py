"""The recipe of a reinforcement-learning run, complete before anything is built; the layout of its folder; its prompts.

Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.trajectory import Task
from stretto.data.loader import key_of, permute
from stretto.model.spec import ModelConfig
from stretto.optim.schedule import OptimConfig
from stretto.rl.controller import Limits

Precision = Literal["fp32", "bf16", "fp8"]
SNAPSHOTS, WEIGHTS, GROUPS, LOGS, START = "snapshots", "weights", "groups", "tokens", "sft"
"""Folders of a run, beside `stretto.base.paths.CHECKPOINT`: trainer states, published versions, finished groups, token logs,
and a start that the run made itself."""
RECIPE_FILE, START_FILE = "recipe.json", "start.json"
"""What it follows, and which checkpoint it began with."""
JOURNAL_FILE, OLD_JOURNAL_FILE = "groups.sqlite", "groups.jsonl"
STATUS_FILE, SPANS_FILE, TRACE_FILE = "status.json", "spans.jsonl", "trace.json"
"""What it tells, beside the files of `stretto.base.track`."""
LAYOUT = ("runtime.", "failures.", "sandbox.")
"""Tables of the recipe that say where and with what patience, not what; a resumed run may change them."""


class SourceConfig(Config):
    """A set of problems."""

    kind: str
    """Registered task kind: ``gym``, ``math``, ``code``, ``tools``, ``verifiers``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """What that kind takes; its own configuration refuses unknown keys."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts, relative to the other sources'."""


class StartConfig(Config):
    """Supervised training on the sources' own answers before RL: for a network that starts from nothing."""

    model: ModelConfig
    optim: OptimConfig
    steps: int = Field(gt=0)
    rows: int = Field(default=16, gt=0)
    noise: float = Field(default=0.0, ge=0, lt=1)
    """Share of answers that are replaced by another problem's: a known headroom for RL."""


class RolloutConfig(Config):
    """How samples are drawn."""

    group: int = Field(default=8, gt=1)
    """Samples of one prompt."""
    max_tokens: int = Field(default=64, gt=0)
    """Tokens the model may write in one sample, over all its turns."""
    max_turns: int = Field(default=1, gt=0)
    temperature: float = Field(default=1.0, gt=0)
    chunk_tokens: int = Field(default=64, gt=0)
    """Tokens asked of an engine at once: what the token log may lose with an engine."""
    engines: int = Field(default=1, gt=0)
    max_batch: int = Field(default=64, gt=0)
    cache_bytes: int = Field(default=256 << 20, gt=0)
    page_size: int = Field(default=8, gt=0)
    """Tokens. Samples of a group have their prompt's full pages in common; short prompts want short pages."""
    threads: int = Field(default=1, gt=0)
    """Of one engine on a CPU."""


class LossConfig(Config):
    """The policy loss: names as in the papers that METHODS cites."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """``grpo`` divides by the group's standard deviation, ``dr_grpo`` does not, ``rloo`` leaves the sample itself out."""
    policy: Literal["ppo", "gspo", "cispo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.2, gt=0)
    """0.28 with a low of 0.2 is DAPO's."""
    normaliser: Literal["token", "sequence", "constant"] = "token"
    """Of the loss, over the whole global batch: its tokens (DAPO), its sequences' own means (GRPO), or samples times
    ``max_tokens`` (Dr.GRPO)."""
    proximal: Literal["recompute", "behaviour"] = "recompute"
    """Where the trust region's centre comes from: the trainer's own forward before the update (decoupled PPO), or the
    rollout's log-probabilities (naive PPO)."""
    correction: Literal["none", "tis", "icepop"] = "tis"
    """What the ratio trainer/rollout does: cut off at ``tis_cap``, or drop tokens outside ``icepop_range``."""
    tis_cap: float = Field(default=2.0, gt=0)
    icepop_range: tuple[float, float] = (0.5, 5.0)
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference network (k2 as a loss, whose gradient is right)."""
    drop_uniform: bool = True
    """Groups whose rewards are all equal teach nothing: they are dropped and others drawn (DAPO)."""


class PrecisionConfig(Config):
    """What each side computes in."""

    rollout: Precision = "fp32"
    train: Precision = "fp32"
    batch_invariant: bool = False
    """Operators whose result for a token does not depend on the rest of the batch, on both sides."""


class PoolConfig(Config):
    """An elastic pool of workers: grows and shrinks with its load."""

    min: int = Field(default=1, gt=0)
    max: int = Field(default=2, gt=0)
    utilisation: float = Field(default=0.7, gt=0, le=1)
    """Aim of arrival rate × mean service time / workers."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Of one call."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is less than min {self.min}")
        return self


class SandboxConfig(Config):
    """Limits of one program that a verifier or a tool runs."""

    strict: bool = False
    """Refuse to start where full isolation is not to be had."""
    wall_s: float = Field(default=5.0, gt=0)
    cpu_s: float = Field(default=5.0, gt=0)
    memory_bytes: int = Field(default=512 << 20, gt=0)
    output_bytes: int = Field(default=1 << 20, gt=0)
    processes: int = Field(default=32, gt=0)


class FailureConfig(Config):
    """Deadlines and patience."""

    lease_s: float = Field(default=300.0, gt=0)
    """A group must report within this, or it is handed out again."""
    max_attempts: int = Field(default=5, gt=0)
    restarts: int = Field(default=100, ge=0)
    """Of one role, over the run."""
    stuck_s: float = Field(default=600.0, gt=0)
    """Without progress for so long, the watchdog names what is stuck and the run stops."""


class RuntimeConfig(Config):
    """Where roles run.

    On one machine, unless all are isolated, one agent on the driver's loop carries all groups (it only waits), and the verifiers
    are elastic pools, one for all sources that are judged equally many at once (`TaskSource.at_once`). On Ray, or all
    isolated, agents are an elastic pool of processes and call their verifiers directly: ``rewards.max`` of them.
    """

    kind: Literal["local", "ray"] = "local"
    address: str = "auto"
    """Of the Ray cluster."""
    agents: PoolConfig = PoolConfig(min=1, max=1)
    """On Ray, or all isolated; its deadline is ``failures.lease_s``."""
    rewards: PoolConfig = PoolConfig()
    isolate: Literal["none", "torch", "all"] = "torch"
    """Locally, which roles beside the verifiers have a process each: ``torch`` the trainer and the engines, which would
    wait for each other's interpreter lock otherwise (three times, with small models); ``all`` the agents too."""


class RlTrainConfig(Config):
    """The loop."""

    steps: int = Field(gt=0)
    prompts: int = Field(gt=0)
    """Groups trained in one step."""
    seq_len: int = Field(gt=0)
    """Longest sequence, prompt included; rows of packed batches are this long."""
    micro_rows: int = Field(default=8, gt=0)
    """Rows of one forward and backward pass."""
    minibatches: int = Field(default=1, gt=0)
    """Optimiser updates a step; more than one needs the trust region."""
    seed: int = 0
    threads: int = Field(default=1, gt=0)
    snapshot_every: int = Field(default=20, gt=0)
    keep_snapshots: int = Field(default=2, gt=0)
    eval_every: int = Field(default=20, gt=0)
    eval_prompts: int = Field(default=64, gt=0)
    balance_rate: float = Field(default=0.0, ge=0)
    """Step of the experts' balance bias. 0: a moving bias would be one more difference between rollout and trainer."""


class RlRecipe(Config):
    """A whole run."""

    start: StartConfig | None = None
    """None: the run needs ``--model``."""
    sources: dict[str, SourceConfig] = Field(min_length=1)
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig
    train: RlTrainConfig
    staleness: int = Field(default=4, ge=0)
    """Hard bound η of trainer version − oldest version among a trained sample's tokens; 0 is the synchronous loop."""
    window: int | None = Field(default=None, gt=0)
    """Oldest groups among which the trainer takes those that are ready; None: as many as the bound allows to pay off."""
    replay: Literal["off", "r2", "r3"] = "r3"
    """Which routes the trainer's forward passes take: its own, those of its recomputation before the update, or the
    engine's (2510.11370)."""
    precision: PrecisionConfig = PrecisionConfig()
    sandbox: SandboxConfig = SandboxConfig()
    failures: FailureConfig = FailureConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.train.prompts % self.train.minibatches:
            raise ValueError(
                f"train.prompts {self.train.prompts} is not a multiple of train.minibatches {self.train.minibatches}"
            )
        if self.rollout.max_tokens >= self.train.seq_len:
            raise ValueError(
                f"rollout.max_tokens {self.rollout.max_tokens} leaves no room for a prompt in train.seq_len {self.train.seq_len}"
            )
        if self.window is not None:
            Limits(self.train.prompts, self.staleness, self.window)  # refuses one that is too wide
        if self.replay == "r2" and self.loss.proximal != "recompute":
            raise ValueError(
                "replay 'r2' replays the recomputation before the update; set loss.proximal = \"recompute\""
            )
        return self


# Which problem an ordinal is: a pure function of the recipe, so that any process of any attempt draws the same one

# A source without end has at least 2^24 problems: a quarter for the run, a quarter for supervised training, half held out.
SUPERVISED = 1 << 22
"""First ordinal of supervised training before the run; the run's own lie below."""
_HELD_OUT = 1 << 23
"""First held-out item."""


_SOURCE, _SAMPLE, _HELD_OUT_SAMPLE, _ORDER = 1, 2, 3, 4
"""What a number is drawn from the seed for."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The endless list of prompts of a run, and the held-out ones. Made by `plan_prompts`."""

    names: tuple[str, ...]
    cumulative: tuple[float, ...]
    """Shares of the sources, summed up."""
    sizes: tuple[int | None, ...]
    """Items of each source that are trained on; None: no end."""
    group: int
    max_tokens: int
    seed: int

    def task(self, ordinal: int) -> Task:
        """The task of ``ordinal``: its source drawn by weight, its item new until a source is used up, then shuffled anew."""
        drawn = bisect_right(self.cumulative, key_of(self.seed, _SOURCE, ordinal) / 2**64)
        place = min(drawn, len(self.names) - 1)
        item, size = ordinal, self.sizes[place]
        if size is not None:
            epoch, within = divmod(ordinal, size)
            order = key_of(self.seed, _ORDER, place, epoch)
            item = int(permute(np.array([within], np.int64), size, order)[0])
        return self._task(ordinal, place, item, self.group, _SAMPLE)

    def held_out(self, number: int) -> Task:
        """Held-out problem ``number``, one sample of it; the sources take turns. Its ordinal is negative."""
        place = number % len(self.names)
        size, within = self.sizes[place], number // len(self.names)
        item = (_HELD_OUT if size is None else size) + within
        return self._task(-1 - number, place, item, 1, _HELD_OUT_SAMPLE)

    def _task(self, ordinal: int, place: int, item: int, group: int, purpose: int) -> Task:
        seed = key_of(self.seed, purpose, ordinal) >> 1
        return Task(ordinal, self.names[place], item, group, seed, self.max_tokens)


def plan_prompts(recipe: RlRecipe, num_items: Mapping[str, int | None]) -> Prompts:
    """The prompts of ``recipe``; of each source that ends, the last items are held out.
    Raises UserError: a source has too few problems to hold some out."""
    names, sizes = tuple(recipe.sources), list[int | None]()
    num_held_out = -(-recipe.train.eval_prompts // len(names))
    for name in names:
        size = num_items[name]
        if size is not None and size <= num_held_out:
            raise UserError(
                f"sources.{name}: has {size} problems, and {num_held_out} are held out; lower train.eval_prompts"
            )
        sizes.append(None if size is None else size - num_held_out)
    total = sum(source.weight for source in recipe.sources.values())
    cumulative = tuple(accumulate(source.weight / total for source in recipe.sources.values()))
    return Prompts(names, cumulative, tuple(sizes), recipe.rollout.group, recipe.rollout.max_tokens, recipe.train.seed)
