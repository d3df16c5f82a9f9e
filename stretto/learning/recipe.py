"""Recipe of a reinforcement-learning run, layout of its folder, and its order of prompts.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError, nearest
from stretto.base.trajectory import Task
from stretto.data.loader import key_of, permute
from stretto.model.spec import ModelConfig
from stretto.optim.schedule import OptimConfig
from stretto.text.similar import Similarity
from stretto.train.recipe import SelfTaughtConfig

Precision = Literal["fp32", "bf16", "fp8"]
SNAPSHOTS, WEIGHTS, GROUPS, LOGS, START = "snapshots", "weights", "groups", "tokens", "sft"
"""Folders of a run, beside `stretto.base.paths.CHECKPOINT`: trainer states, published versions, finished groups, token logs,
and a start that the run made itself."""
RECIPE_FILE, START_FILE = "recipe.json", "start.json"
"""What it follows, and which checkpoint it began with."""
JOURNAL_FILE, OLD_JOURNAL_FILE = "groups.sqlite", "groups.jsonl"
STATUS_FILE, SPANS_FILE, TRACE_FILE = "status.json", "spans.jsonl", "trace.json"
"""What it tells, beside the files of `stretto.base.track`."""
ADVANTAGES = ("grpo", "dr_grpo", "rloo")
"""Those of `stretto.learning.algorithms`."""
LAYOUT = ("runtime.", "failures.", "sandbox.")
"""Tables of the recipe that say where and with what patience, not what; a resumed run may change them."""
STEERING = (
    "optim.lr",
    "train.steps",
    "train.eval_every",
    "train.snapshot_every",
    "train.snapshot_minutes",
    "train.keep_snapshots",
)
"""Fields that a resumed run may change beside: they steer the steps that are still to come. Its lineage lists the changes."""


class SourceConfig(Config):
    """A set of problems."""

    kind: str
    """Registered task kind: ``gym``, ``math``, ``code``, ``tools``, ``service``, ``verifiers``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """What that kind takes; its own configuration refuses unknown keys."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts, relative to the other sources'."""
    held_out: int = Field(default=0, ge=0)
    """Least of its problems that are not trained on, where ``train.eval_prompts`` holds out fewer of a source that ends."""


class StartConfig(Config):
    """Supervised training on the sources' own answers before RL."""

    model: ModelConfig | None = None
    """The network that begins with random weights; None: the one of ``--model`` is trained further."""
    optim: OptimConfig
    steps: int = Field(gt=0)
    rows: int = Field(default=16, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; bfloat16 is several times faster on a GPU."""
    noise: float = Field(default=0.0, ge=0, lt=1)
    """Share of answers that are replaced by another problem's: a known headroom for RL."""
    learns_prompts: bool = False
    """Prompts, and what tools and users say, are learnt too: a network of random weights finds in them how to copy, long before
    it would from the few tokens that it is to write."""
    elastic: SelfTaughtConfig | None = None
    """Train this mixture of Subnets, so that parts of the start work too; None: the full network alone."""


class RolloutConfig(Config):
    """How samples are drawn."""

    group: int = Field(default=8, gt=0)
    """Samples of one prompt; two at least where their rewards are compared."""
    max_tokens: int = Field(default=64, gt=0)
    """Tokens the model may write in one sample, over all its turns."""
    max_turns: int = Field(default=1, gt=0)
    tool_chars: int = Field(default=4000, ge=100)
    """Characters shown to the model of what a tool gave: the beginning and the end, around a mark; verifiers see all."""
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


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "tis": {"policy": "cispo", "clip_high": 1.0},
    "grpo": {"policy": "ppo", "normaliser": "sequence", "kl_weight": 0.04, "drop_uniform": False},
    "dr_grpo": {"policy": "ppo", "advantage": "dr_grpo", "normaliser": "constant", "drop_uniform": False},
    "dapo": {"policy": "ppo", "clip_high": 0.28, "overlong_share": 0.2},
    "gspo": {"policy": "gspo", "normaliser": "sequence", "drop_uniform": False},
    "cispo": {"policy": "cispo", "overlong_share": 0.2},
    "icepop": {"policy": "icepop", "normaliser": "sequence", "drop_uniform": False},
    "decoupled": {"policy": "ppo", "proximal": "recompute", "correction": "icepop", "icepop_range": (0.0, 5.0)},
}
"""The papers' own values, where they differ from `LossConfig`'s and from those that belong to a policy or correction.

``tis``: π/μ cut off at 2 (truncated importance sampling), as one update of a batch has it. ``grpo``: 2402.03300. ``dr_grpo``:
2503.20783. ``dapo``: 2503.14476; 4,096 of its 20,480 tokens are punished. ``gspo``: 2507.18071. ``cispo``: 2506.13585, with
DAPO's filter and length penalty, no KL. ``icepop``: 2510.18855, as one update of a batch has it. ``decoupled``: AReaL
(2505.24298), whose code leaves tokens out whose proximal/μ is more than 5.
"""
_OF_POLICY: Final[Mapping[str, Mapping[str, float]]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    # its paper has no lower bound and names no upper one; 5: ScaleRL, 2510.13786
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "icepop": {"clip_low": 0.5, "clip_high": 4.0},
}
_OF_CORRECTION: Final[Mapping[str, Mapping[str, Any]]] = {
    "none": {},
    "tis": {"tis_cap": 2.0},
    "icepop": {"icepop_range": (0.5, 5.0)},
}


class LossConfig(Config):
    """The policy loss: names as in the papers that METHODS cites. π is trained, μ has sampled. What would change nothing
    beside the other fields is refused."""

    preset: str = "tis"
    """Of `PRESETS`: gives every other field the value that it has where the recipe does not say."""
    advantage: str = "grpo"
    """``grpo`` divides by the group's standard deviation, ``dr_grpo`` does not, ``rloo`` leaves the sample itself out; or
    ``file.py:function``, one's own (`stretto.learning.algorithms`)."""
    policy: Literal["ppo", "gspo", "cispo", "icepop"] = "cispo"
    """What becomes of a ratio π/centre out of bounds. ``ppo``: its token's gradient ends, where it would go further out;
    ``gspo``: so, by whole samples; ``cispo``: it is bounded; ``icepop``: its token is left out."""
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """The ratio's lower bound is 1 less this: with 1 there is none."""
    clip_high: float = Field(default=1.0, gt=0)
    """Its upper bound is 1 and this."""
    normaliser: Literal["token", "sequence", "constant"] = "token"
    """Of the loss, over the whole global batch: its tokens (DAPO), its sequences' own means (GRPO), or samples times
    ``max_tokens`` (Dr.GRPO)."""
    proximal: Literal["behaviour", "recompute"] = "behaviour"
    """The ratio's centre: μ itself, as recorded; or the trainer's own forward before the updates (decoupled PPO), which a
    single update cannot leave, so that it needs ``train.minibatches``."""
    correction: Literal["none", "tis", "icepop"] = "none"
    """What a recomputed centre's ratio to μ does: cut off at ``tis_cap``, or drop tokens outside ``icepop_range``."""
    tis_cap: float | None = Field(default=None, gt=0)
    icepop_range: tuple[float, float] | None = None
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference network (k2 as a loss, whose gradient is right; weighted by π/μ, as tokens are of
    μ)."""
    overlong_share: float = Field(default=0.0, ge=0, lt=1)
    """Answers lose up to 1 of their reward for reaching into this last share of ``rollout.max_tokens`` (DAPO)."""
    overlong_filter: bool = False
    """Truncated answers are not trained on; their reward still counts in the group's mean (DAPO)."""
    drop_uniform: bool = True
    """Groups whose rewards are all equal teach nothing: they are dropped and others drawn (DAPO)."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """What was not given, by the preset; what belongs to another policy or correction than the preset's, by that."""
        if not isinstance(given, Mapping):
            return given
        tree = {"policy": "cispo", "correction": "none", **PRESETS.get(given.get("preset", "tis"), {})}
        for whole, table in (("policy", _OF_POLICY), ("correction", _OF_CORRECTION)):
            kind = given.get(whole, tree[whole])
            own = table.get(kind, {})
            kept = tree if kind == tree[whole] else {}
            tree = {name: value for name, value in tree.items() if name not in table[tree[whole]]}
            tree |= {name: kept.get(name, value) for name, value in own.items()}
        return tree | dict(given)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.preset not in PRESETS:
            raise ValueError(f"preset: no {self.preset!r}{nearest(self.preset, PRESETS)}; one of {', '.join(PRESETS)}")
        if self.advantage not in ADVANTAGES and ":" not in self.advantage:
            names = f"one of {', '.join(ADVANTAGES)}, or file.py:function"
            raise ValueError(f"advantage: no {self.advantage!r}{nearest(self.advantage, ADVANTAGES)}; {names}")
        if self.correction != "none" and self.proximal == "behaviour":
            raise ValueError(
                f"correction {self.correction!r} is of a centre that was recomputed, and proximal is 'behaviour': π/μ is "
                'bounded by clip_low and clip_high; leave it out, or set proximal = "recompute"'
            )
        for field, correction in (("tis_cap", "tis"), ("icepop_range", "icepop")):
            is_given = getattr(self, field) is not None
            if is_given is not (self.correction == correction):
                remedy = "leave it out" if is_given else "give it"
                raise ValueError(
                    f"{field} belongs to correction {correction!r}, and that is {self.correction!r}; {remedy}"
                )
        if self.icepop_range is not None and not 0 <= self.icepop_range[0] < self.icepop_range[1]:
            raise ValueError(f"icepop_range {list(self.icepop_range)}: give a lower and a higher ratio")
        return self


class TeacherConfig(Config):
    """Who scores what the student samples of some sources: a checkpoint, part of one, or a server."""

    checkpoint: str | None = None
    """Run or checkpoint folder. Beside ``url``: the folder whose tokenizer and template are those of what is served; without
    it, the student's are taken. Its tokenizer may be another than the student's for the form ``sampled``, of answers of one
    turn, where both are byte-level: it is then told of spans of text (`stretto.text.spans`)."""
    subnet: str = "full"
    """Of that checkpoint: a preset (``corner``) or a size (``layers=8,experts=16,top_k=2``)."""
    url: str | None = None
    """A server that answers /v1/completions with log-probabilities of the prompt (``echo``), without that path; for the form
    ``sampled``. OPENAI_API_KEY is sent where it is set."""
    model: str | None = None
    """What the server calls it; None: the first that it lists."""
    domains: tuple[str, ...] | None = None
    """Sources that it teaches, ``["*"]`` all; None: the one of its own name."""
    template: Literal["own", "student"] = "own"
    """Whose chat template renders the prompt that it reads; what the student sampled follows, to the token."""
    residence: Literal["resident", "swapped"] = "resident"
    """``swapped``: it is read from the disk for its turn in each step, and only its head is kept."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.checkpoint is None and self.url is None:
            raise ValueError("name a checkpoint, or the url of a server")
        if self.url is not None and (self.subnet, self.residence) != ("full", "resident"):
            raise ValueError("url: subnet and residence are of a checkpoint that is read here; leave them out")
        return self


class DistillConfig(Config):
    """Multi-teacher on-policy distillation (2606.30406): the student samples, the teacher of the prompt's source scores, the
    loss is the reverse KL of every token that the student sampled. π is the student, with its current weights; q a teacher;
    both at temperature 1."""

    form: Literal["full", "sampled", "top_k", "tail"] = "full"
    """``full``: Σ π·(log π − log q) over the vocabulary. ``sampled``: of the sampled token alone, as an advantage of
    log q − log π in the policy loss. ``top_k``: of the student's likeliest tokens, with the correction − π + q. ``tail``:
    of these, and of all others as one."""
    top_k: int = Field(default=64, gt=0)
    """Tokens that ``top_k`` and ``tail`` look at."""
    clip: float = Field(default=5.0, gt=0)
    """Of ``sampled``: the advantage's bound, in nats."""
    balance: Literal["sequence", "tokens", "gap", "sigma", "none"] = "sequence"
    """What each source weighs. ``none``: every token the same, so that long answers are nearly all of the gradient. The others
    give each source the share of its ``weight``, by its sequences' own means or (``tokens``) over its tokens; then ``gap``
    multiplies by its last KL over its first, ``sigma`` divides by the spread of its log q − log π."""
    entropy_aware: float | None = Field(default=None, ge=0)
    """Where the teacher's entropy is more than so many nats, the forward KL is added (2603.07079): reverse KL alone takes the
    student to one of many good continuations. Not of ``sampled``."""
    outcome_weight: float = Field(default=0.0, ge=0)
    """What the advantages of ``loss.advantage`` are multiplied by before they are added; 0: rewards are only logged."""
    kl_floor: float = Field(default=1e-4, ge=0)
    """Least KL, in nats a token, between the student and its teacher where a source comes up first: below, the teacher is taken
    for the student itself, a wrong path. 0: whatever it is, as of a student that is to stay where it is."""
    untaught: tuple[str, ...] = ()
    """Sources without a teacher, which learn by ``outcome_weight`` alone."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """By name; at least one, here or on the command line."""

    def teacher_of(self) -> dict[str, str]:
        """Teachers' names by source."""
        return {source: name for name, each in self.teachers.items() for source in each.domains or (name,)}

    @property
    def has_policy_loss(self) -> bool:
        """Whether the policy loss of ``[loss]`` is a part of it."""
        return self.outcome_weight > 0 or self.form == "sampled"

    def check(self, sources: Collection[str]) -> None:
        """Raises ValueError: no teacher, one without a source, or a source with two teachers or none."""
        if not self.teachers:
            raise ValueError("distill: no teachers; name them in [distill.teachers.NAME], or with --teacher NAME=DIR")
        for name, each in self.teachers.items():
            for source in each.domains or (name,):
                if source not in sources:
                    remedy = f"name some of {', '.join(sources)} in its domains"
                    raise ValueError(
                        f"distill.teachers.{name}: no source {source!r}{nearest(source, sources)}; {remedy}"
                    )
            if each.url is not None and self.form != "sampled":
                raise ValueError(
                    f"distill.teachers.{name}: a server gives log-probabilities of single tokens; set distill.form = "
                    '"sampled", or name a checkpoint'
                )
        for source in sources:
            names = [name for name, each in self.teachers.items() if source in (each.domains or (name,))]
            if len(names) + (source in self.untaught) > 1:
                others = " and ".join([*names, *["distill.untaught"][: source in self.untaught]])
                raise ValueError(f"distill: source {source!r} is named by {others}; one must be responsible")
            if not names and source not in self.untaught:
                raise ValueError(
                    f"distill: source {source!r} has no teacher; name it in the domains of one, or in distill.untaught"
                )
        for source in self.untaught:
            if source not in sources:
                raise ValueError(f"distill.untaught: no source {source!r}{nearest(source, sources)}")
        if self.untaught and not self.outcome_weight:
            raise ValueError(
                "distill.untaught: learns nothing without distill.outcome_weight; set that, or leave it out"
            )
        if self.entropy_aware is not None and self.form == "sampled":
            raise ValueError("distill.entropy_aware: form 'sampled' does not know the teacher's entropy; leave it out")


class RewardConfig(Config):
    """What a group's answers earn beside each other, instead of what the task says of each (`stretto.flow.group_reward`):
    quality × length × diversity, quality being the task's reward. What is left out does nothing."""

    diversity: Similarity | None = None
    """Times the share of the group's other answers that say something else (DARLING, 2509.02534), by their likeness in
    ``words``, ``characters`` or ``meaning`` (`stretto.text.similar`)."""
    same_at: float = Field(default=0.5, gt=0, le=1)
    """Likeness from which two answers say the same; a chain of such pairs is one cluster."""
    floor: float = Field(default=0.1, ge=0, le=1)
    """What diversity counts at least: where all answers say the same, the better ones still earn more. 1: it is only measured."""
    contrast: float | None = Field(default=None, gt=0)
    """Instead of counting clusters, which long answers are all alone in: how unlike the others an answer is, over what the group's
    are on average, to this power."""
    length_budget: float | None = Field(default=None, gt=0)
    """Answers longer than this many times the median right one lose reward, all of it at twice that."""
    length_control: bool = False
    """Take off what the judge gave longer answers of the group for their length."""
    enough_words: int | None = Field(default=None, gt=0)
    """Answers of fewer words earn less, in proportion: who learns to end before ``max_tokens`` else learns to be short."""
    copy_at: float | None = Field(default=None, gt=0, le=1)
    """An answer earns nothing where this share of its words, in runs of four, is the prompt's or the reference's."""
    distinct_at: float | None = Field(default=None, gt=0, le=1)
    """Or where less than this share of its word pairs are different ones."""
    format: str | None = None
    """Or where this regular expression is not found in it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.format is not None:
            try:
                re.compile(self.format)
            except re.error as error:
                raise ValueError(f"format {self.format!r} is no regular expression: {error}") from None
        if self.contrast is not None and self.diversity is None:
            raise ValueError("contrast is a power of diversity, and there is none; give diversity")
        if self.model_fields_set <= {"same_at", "floor"}:
            raise ValueError("the table changes nothing; give diversity, a length or a guard, or leave it out")
        return self


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
    stop_s: float | None = Field(default=None, gt=0)
    """Seconds after which the run ends as after its last step: with the step it is at, and without waiting longer for groups that
    teach something, unless no step has been made yet. Each resumed one counts anew."""
    address: str = "auto"
    """Of the Ray cluster."""
    agents: PoolConfig = PoolConfig(min=1, max=1)
    """On Ray, or all isolated; its deadline is ``failures.lease_s``."""
    rewards: PoolConfig = PoolConfig()
    isolate: Literal["none", "torch", "all"] = "torch"
    """Locally, which roles beside the verifiers have a process each: ``torch`` the trainer and the engines, which would
    wait for each other's interpreter lock otherwise (three times, with small models); ``all`` the agents too."""
    verifiers: Literal["process", "thread"] = "process"
    """Locally, where verifiers run. ``thread``: in the process of ``stretto rl``, for tasks that are defined in a notebook; a verdict
    that hangs cannot be ended there."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.verifiers == "thread" and (self.kind == "ray" or self.isolate == "all"):
            raise ValueError("verifiers 'thread' needs kind 'local' and an isolate other than 'all'")
        return self


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
    """Optimiser updates a step, each of its share of the groups; more than one need a trust region."""
    seed: int = 0
    threads: int = Field(default=1, gt=0)
    snapshot_every: int = Field(default=20, gt=0)
    """Steps between snapshots."""
    snapshot_minutes: float = Field(default=3.0, gt=0)
    """Minutes after the last snapshot at which another is written, however few steps were made: what a killed run may lose."""
    keep_snapshots: int = Field(default=2, gt=0)
    eval_every: int = Field(default=20, gt=0)
    eval_prompts: int = Field(default=64, gt=0)
    balance_rate: float = Field(default=0.0, ge=0)
    """Step of the experts' balance bias. 0: a moving bias would be one more difference between rollout and trainer."""


class RlRecipe(Config):
    """A whole run."""

    command: ClassVar[str] = "`stretto rl`"

    start: StartConfig | None = None
    """None: the run needs ``--model``."""
    sources: dict[str, SourceConfig] = Field(min_length=1)
    rollout: RolloutConfig = RolloutConfig()
    rewards: dict[str, RewardConfig] = Field(default_factory=dict)
    """By source; those that have none keep their tasks' own rewards."""
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
    teachers: dict[str, str] = Field(default_factory=dict)
    """Checkpoint folders of networks whose log-probabilities an algorithm of one's own sees, by its names for them; of the
    start's tokenizer."""
    distill: DistillConfig | None = None
    """On-policy distillation instead of, or beside, what rewards say."""
    precision: PrecisionConfig = PrecisionConfig()
    sandbox: SandboxConfig = SandboxConfig()
    failures: FailureConfig = FailureConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """A teacher has something to say of groups with equal rewards too; and all sources are named."""
        if not isinstance(given, Mapping) or not isinstance(given.get("distill"), Mapping):
            return given
        loss, distill = given.get("loss", {}), given["distill"]
        if isinstance(loss, Mapping):
            loss = {"drop_uniform": False, **loss}
        teachers = distill.get("teachers", {})
        if isinstance(teachers, Mapping) and isinstance(given.get("sources"), Mapping):
            everywhere = {"domains": list(given["sources"])}
            is_all = {
                name: isinstance(each, Mapping) and each.get("domains") == ["*"] for name, each in teachers.items()
            }
            teachers = {name: {**each, **everywhere} if is_all[name] else each for name, each in teachers.items()}
        return {**given, "loss": loss, "distill": {**distill, "teachers": teachers}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_distill()
        if self.train.prompts % self.train.minibatches:
            raise ValueError(
                f"train.prompts {self.train.prompts} is not a multiple of train.minibatches {self.train.minibatches}"
            )
        if self.rollout.max_tokens >= self.train.seq_len:
            raise ValueError(
                f"rollout.max_tokens {self.rollout.max_tokens} leaves no room for a prompt in train.seq_len {self.train.seq_len}"
            )
        widest = self.staleness * self.train.prompts + 1
        if self.window is not None and self.window > widest:
            raise ValueError(
                f"window {self.window} with staleness {self.staleness} and {self.train.prompts} prompts a step leaves too few "
                f"groups for a step; set at most {widest}"
            )
        for field, name in (("loss.proximal", self.loss.proximal), ("replay", self.replay)):
            if name in ("recompute", "r2") and self.train.minibatches == 1:
                raise ValueError(
                    f"{field} {name!r} is of the policy before the updates of a step, and with one update that is the policy "
                    "itself: set train.minibatches to 2 or more, or leave it out"
                )
        if self.teachers and self.loss.advantage in ADVANTAGES:
            raise ValueError(
                f"teachers: {self.loss.advantage!r} asks none; set loss.advantage to a function of your own, or leave them out"
            )
        if strange := sorted(self.rewards.keys() - self.sources.keys()):
            known = f"{nearest(strange[0], self.sources)}; there are {', '.join(self.sources)}"
            raise ValueError(f"rewards.{strange[0]}: no such source{known}")
        if taken := sorted({"policy", "reference"} & self.teachers.keys()):
            raise ValueError(f"teachers.{taken[0]}: the name is taken; choose another")
        return self

    def _check_distill(self) -> None:
        distill, loss = self.distill, self.loss
        has_rewards = distill is None or distill.outcome_weight > 0
        if self.rollout.group == 1 and (has_rewards or loss.drop_uniform):
            raise ValueError("rollout.group 1: a reward is compared with those of its group; set 2 or more")
        if distill is None:
            return
        distill.check(self.sources)
        if self.rollout.temperature != 1.0:
            raise ValueError(
                f"rollout.temperature {self.rollout.temperature}: distillation compares distributions at 1; leave it out"
            )
        unused = {"normaliser": "distill.balance is in its place"}
        if not has_rewards:
            unused |= dict.fromkeys(("advantage", "overlong_share", "overlong_filter"), "distill.outcome_weight is 0")
        if not distill.has_policy_loss:
            names = ("preset", "policy", "clip_low", "clip_high", "proximal", "correction", "tis_cap", "icepop_range")
            unused |= dict.fromkeys(names, f"form {distill.form!r} without an outcome reward has no policy loss")
        ordinary = {**LossConfig(preset=loss.preset).model_dump(), "preset": "tis"}
        for field, why in unused.items():
            if getattr(loss, field) != ordinary[field]:
                raise ValueError(f"loss.{field} would change nothing: {why}; leave it out")


# Which problem an ordinal is: a pure function of the recipe, so that any process of any attempt draws the same one

# A source without end has at least 2^24 problems: a quarter for the run, a quarter for supervised training, half held out.
SUPERVISED = 1 << 22
"""First ordinal of supervised training before the run; the run's own lie below."""
_HELD_OUT = 1 << 23
"""First held-out item."""


_SOURCE, _SAMPLE, _HELD_OUT_SAMPLE, _ORDER = 1, 2, 3, 4
"""What a number is drawn from the seed for."""
_DECK = 64
"""Ordinals among which sources come by weight, but for one each that waits for the next deck."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The endless list of prompts of a run, and the held-out ones. Made by `plan_prompts`.

    How often a source came before an ordinal must be known without a look at all earlier ones. So sources are dealt in
    shuffled decks: before the end of deck d, each has come ⌊64·d·its share⌋ times.
    """

    names: tuple[str, ...]
    shares: tuple[float, ...]
    """Of the sources; their sum is 1."""
    sizes: tuple[int | None, ...]
    """Items of each source that are trained on; None: no end."""
    group: int
    max_tokens: int
    seed: int

    def task(self, ordinal: int) -> Task:
        """The task of ``ordinal``: its source drawn by weight, its item new until a source is used up, then shuffled anew."""
        phase, number = divmod(ordinal, SUPERVISED)  # supervised training begins with an epoch of its own
        place, num_before = self._dealt(phase, number)
        item, size = ordinal, self.sizes[place]
        if size is not None:
            epoch, within = divmod(num_before, size)
            order = key_of(self.seed, _ORDER, phase, place, epoch)
            item = int(permute(np.array([within], np.int64), size, order)[0])
        return self._task(ordinal, place, item, self.group, _SAMPLE)

    def held_out(self, number: int) -> Task:
        """Held-out problem ``number``, one sample of it; the sources take turns. Its ordinal is negative."""
        place = number % len(self.names)
        size, within = self.sizes[place], number // len(self.names)
        item = (_HELD_OUT if size is None else size) + within
        return self._task(-1 - number, place, item, 1, _HELD_OUT_SAMPLE)

    def _dealt(self, phase: int, number: int) -> tuple[int, int]:
        """The source of the phase's prompt ``number``, and how often it came before."""
        deck = number // _DECK  # they begin there or a little earlier, as many as there are sources
        while sum(self._before(deck + 1)) <= number:
            deck += 1
        before = self._before(deck)
        nums = [after - earlier for after, earlier in zip(self._before(deck + 1), before, strict=True)]
        cards = np.repeat(np.arange(len(nums)), nums)
        dealt = cards[permute(np.arange(len(cards)), len(cards), key_of(self.seed, _SOURCE, phase, deck))]
        at = number - sum(before)
        place = int(dealt[at])
        return place, before[place] + int((dealt[:at] == place).sum())

    def _before(self, deck: int) -> list[int]:
        """How often each source comes before a deck."""
        return [int(deck * _DECK * share) for share in self.shares]

    def _task(self, ordinal: int, place: int, item: int, group: int, purpose: int) -> Task:
        seed = key_of(self.seed, purpose, ordinal) >> 1
        return Task(ordinal, self.names[place], item, group, seed, self.max_tokens)


def plan_prompts(recipe: RlRecipe, num_items: Mapping[str, int | None]) -> Prompts:
    """The prompts of ``recipe``; of each source that ends, the last items are held out.
    Raises UserError: a source has too few problems to hold some out."""
    names, sizes = tuple(recipe.sources), list[int | None]()
    for name in names:
        size = num_items[name]
        num_held_out = max(-(-recipe.train.eval_prompts // len(names)), recipe.sources[name].held_out)
        if size is not None and size <= num_held_out:
            raise UserError(
                f"sources.{name}: has {size} problems, and {num_held_out} are held out; lower train.eval_prompts and its held_out"
            )
        sizes.append(None if size is None else size - num_held_out)
    total = sum(source.weight for source in recipe.sources.values())
    shares = tuple(source.weight / total for source in recipe.sources.values())
    return Prompts(names, shares, tuple(sizes), recipe.rollout.group, recipe.rollout.max_tokens, recipe.train.seed)
