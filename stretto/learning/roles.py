"""Settings of the roles of a reinforcement-learning run: arithmetic, places, pools, deadlines and limits.

Imports no torch.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.runtime.runtime import Needs

Precision = Literal["fp32", "bf16", "fp8"]


class PrecisionConfig(Config):
    """Arithmetic of engines and trainer. Weights and optimiser states of the trainer are in fp32 in every precision."""

    rollout: Precision | Literal["auto"] = "auto"
    """``auto``: that of the trainer."""
    train: Precision | Literal["auto"] = "auto"
    """``auto``: bf16 on a GPU that multiplies in bf16, else fp32 (`RlRecipe.on`). A resumed run keeps the precision of its start."""
    batch_invariant: bool = False
    """Use operators whose result for a token does not depend on the rest of the batch, in engines and trainer."""

    @property
    def engines(self) -> Precision:
        """Precision of the engines of a run."""
        assert self.rollout != "auto", "the run has a precision before its roles start"
        return self.rollout

    @property
    def trainer(self) -> Precision:
        """Precision of the trainer of a run."""
        assert self.train != "auto", "the run has a precision before its roles start"
        return self.train

    def filled(self, train: Precision, rollout: Precision | None = None) -> Self:
        """These settings with the arguments in place of ``auto``; ``rollout`` None: that of the trainer."""
        train = train if self.train == "auto" else self.train
        return self.replace(train=train, rollout=(rollout or train) if self.rollout == "auto" else self.rollout)


class PoolConfig(Config):
    """An elastic pool of workers, which grows and shrinks with its load."""

    min: int = Field(default=1, gt=0)
    """Smallest number of workers."""
    max: int = Field(default=2, gt=0)
    """Largest number of workers."""
    utilisation: float = Field(default=0.7, gt=0, le=1)
    """Target of arrival rate × mean service time / workers."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Deadline of one call, in seconds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is less than min {self.min}")
        return self


class AgentPoolConfig(PoolConfig):
    """`PoolConfig` with one worker unless the recipe names more."""

    max: int = Field(default=1, gt=0)
    """Largest number of workers."""


class SandboxConfig(Config):
    """Limits of one program that a verifier or a tool runs."""

    strict: bool = False
    """Refuse to start if full isolation is not available."""
    wall_s: float = Field(default=5.0, gt=0)
    """Seconds from the start of a program to its end."""
    cpu_s: float = Field(default=5.0, gt=0)
    """Processor seconds of all processes of a program."""
    memory_bytes: int = Field(default=512 << 20, gt=0)
    """Address space of each process, and resident memory of all together."""
    output_bytes: int = Field(default=1 << 20, gt=0)
    """Largest standard output, and largest standard error."""
    processes: int = Field(default=32, gt=0)
    """Processes and threads at a time."""


class FailureConfig(Config):
    """Deadlines and retries."""

    lease_s: float = Field(default=300.0, gt=0)
    """Seconds that an agent has for a group, without the wait for a free agent; an unfinished group is then dispatched again."""
    max_attempts: int = Field(default=5, gt=0)
    """Attempts at a group or a verdict before it is given up."""
    restarts: int = Field(default=10, ge=0)
    """Largest number of restarts of one role within ``restart_window_s``; for a pool, times its largest size. One more ends the run."""
    restart_window_s: float = Field(default=600.0, gt=0)
    """Seconds over which restarts are counted. A role that dies soon after its start waits before the next one, longer each time."""
    copies: int = Field(default=1, gt=0)
    """With ``store = "ray"``: nodes that each keep all groups and token logs. Groups that are lost with all copies are sampled again."""
    stuck_s: float = Field(default=600.0, gt=0)
    """Seconds without progress after which the watchdog names the component that is stuck, and the run stops."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lease_s > self.stuck_s:
            raise ValueError(
                f"lease_s: {self.lease_s:g} s exceeds stuck_s, {self.stuck_s:g} s, so the run would stop before a lost group is "
                "dispatched again; lower lease_s or raise stuck_s"
            )
        return self


class RuntimeConfig(Config):
    """Placement of the roles.

    On one machine, unless all roles are isolated, one agent on the driver's loop serves all groups (it mostly waits), and the
    verifiers are elastic pools, one for all sources with the same number of answers judged at once (`TaskSource.at_once`). On
    Ray, or with all roles isolated, agents are an elastic pool of processes and call ``rewards.max`` verifiers directly.
    """

    kind: Literal["local", "ray"] = "local"
    """``local``: this machine. ``ray``: a Ray cluster."""
    stop_s: float | None = Field(default=None, gt=0)
    """Seconds after which the run ends as after its last step. The step in progress is completed; the first step is completed in
    any case. A resumed run counts anew."""
    address: str = "auto"
    """Address of the Ray cluster."""
    agents: AgentPoolConfig = AgentPoolConfig()
    """Pool of agents on Ray, or if all roles are isolated; its deadline is ``failures.lease_s``."""
    rewards: PoolConfig = PoolConfig()
    """Pool of verifiers."""
    isolate: Literal["none", "torch", "all"] = "torch"
    """Local roles, beside the verifiers, with a process each. ``torch``: trainer and engines, which would otherwise wait for each
    other's interpreter lock (a factor of three with small models). ``all``: the agents too."""
    verifiers: Literal["process", "thread"] = "process"
    """Placement of local verifiers. ``thread``: in the process of ``stretto rl``, for tasks that are defined in a notebook; a
    verification that hangs cannot be ended there."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.verifiers == "thread" and (self.kind == "ray" or self.isolate == "all"):
            raise ValueError("verifiers 'thread' needs kind 'local' and an isolate other than 'all'")
        return self


class TrainerConfig(Config):
    """Ranks of the trainer: processes that share its weights and its rows. Their number changes sums by rounding only."""

    ranks: int = Field(default=1, gt=0)
    """Number of ranks; each of several has a process, and a GPU where there are GPUs. Divides ``train.micro_rows``."""
    ep: int = Field(default=1, gt=0)
    """Number of neighbouring ranks over which the experts of a layer are divided. Divides ``ranks`` and the number of experts of
    every layer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ranks % self.ep:
            raise ValueError(f"ep {self.ep} does not divide the number of ranks, {self.ranks}; choose a divisor")
        return self


class NeedsConfig(Config):
    """What each role of a kind needs of its node, on a Ray cluster."""

    cpus: float = Field(default=0.0, ge=0)
    """Processor cores."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs; roles with less than one share it."""
    memory_gb: float = Field(default=0.0, ge=0)
    """Memory in gigabytes. Ray keeps it free; it does not limit the role."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the node, such as ``{pool = "gpu"}`` for nodes that were started with ``ray start --labels pool=gpu``."""


class ResourcesConfig(Config):
    """Places of the roles on a Ray cluster. A role without needs runs on any node."""

    trainer: NeedsConfig = NeedsConfig()
    engines: NeedsConfig = NeedsConfig()
    agents: NeedsConfig = NeedsConfig()
    rewards: NeedsConfig = NeedsConfig()

    def needs(self) -> dict[str, Needs]:
        """By kind of role."""
        roles = {"trainer": self.trainer, "engines": self.engines, "agents": self.agents, "rewards": self.rewards}
        return {
            name: Needs(role.cpus, role.gpus, int(role.memory_gb * 1e9), role.labels) for name, role in roles.items()
        }
