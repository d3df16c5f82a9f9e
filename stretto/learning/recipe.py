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
from stretto.runtime.runtime import Needs
from stretto.text.similar import Similarity
from stretto.train.recipe import SelfTaughtConfig

Precision = Literal["fp32", "bf16", "fp8"]
ChannelKind = Literal["store", "gloo"]
SNAPSHOTS, WEIGHTS, GROUPS, LOGS, START = "snapshots", "weights", "groups", "tokens", "sft"
"""Folders of a run, beside `stretto.base.paths.CHECKPOINT`: trainer states, published versions, finished groups, token logs,
and the start, if the run trained it."""
RECIPE_FILE, START_FILE = "recipe.json", "start.json"
"""The run's recipe, and the checkpoint with which it began."""
JOURNAL_FILE, OLD_JOURNAL_FILE = "groups.sqlite", "groups.jsonl"
STATUS_FILE, SPANS_FILE, TRACE_FILE = "status.json", "spans.jsonl", "trace.json"
"""Outputs for monitoring, beside the files of `stretto.base.track`."""
ADVANTAGES = ("grpo", "dr_grpo", "rloo")
"""Names of the algorithms in `stretto.learning.algorithms`."""
LAYOUT = (
    "runtime.",
    "failures.",
    "sandbox.",
    "trainer.",
    "resources.",
    "store",
    "channel",
    "rollout.address",
    "rollout.start_s",
)
"""Tables and fields of the recipe that do not affect the result, except for rounding: placement, deadlines, isolation, number of trainer
ranks. A resumed run may change them."""
STEERING = (
    "optim.lr",
    "train.steps",
    "train.eval_every",
    "train.snapshot_every",
    "train.snapshot_minutes",
    "train.keep_snapshots",
)
"""Other fields that a resumed run may change, with effect on the steps that follow. Its lineage lists the changes."""


class SourceConfig(Config):
    """A set of problems."""

    kind: str
    """Kind of task: ``gym``, ``math``, ``code``, ``tools``, ``service``, ``verifiers``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that kind. Unknown keys are refused."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts, relative to the other sources."""
    held_out: int = Field(default=0, ge=0)
    """Smallest number of problems that are not trained on, if ``train.eval_prompts`` holds out fewer of a finite source."""


class StartConfig(Config):
    """Supervised training on the sources' own answers before RL."""

    model: ModelConfig | None = None
    """Architecture of a network that starts with random weights; None: the checkpoint of ``--model`` is trained further."""
    optim: OptimConfig
    steps: int = Field(gt=0)
    rows: int = Field(default=16, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; bfloat16 is several times faster on a GPU."""
    noise: float = Field(default=0.0, ge=0, lt=1)
    """Share of answers that are replaced by another problem's answer, which leaves a known headroom for RL."""
    learns_prompts: bool = False
    """Also train on prompts and on tool and user turns. A network with random weights learns to copy from them, long before it
    would from the few tokens of the answers."""
    elastic: SelfTaughtConfig | None = None
    """Mixture of Subnets to train, so that smaller Subnets of the start work too; None: the full network only."""


class RolloutConfig(Config):
    """Sampling."""

    group: int = Field(default=8, gt=0)
    """Samples per prompt; at least two if their rewards are compared."""
    max_tokens: int = Field(default=64, gt=0)
    """Largest number of sampled tokens of one sample, over all its turns."""
    max_turns: int = Field(default=1, gt=0)
    tool_chars: int = Field(default=4000, ge=100)
    """Characters of a tool's result that the model reads: its beginning and its end, around a mark. Verifiers read all of it."""
    temperature: float = Field(default=1.0, gt=0)
    chunk_tokens: int = Field(default=64, gt=0)
    """Tokens per request to an engine: the largest number of tokens of a sample that are lost with an engine."""
    engine: Literal["own", "stretto", "vllm", "sglang"] = "own"
    """``own``: engines that the run starts. The others are servers at ``address``: ``stretto serve --rollout``, vLLM, SGLang."""
    address: tuple[str, ...] = ()
    """Addresses of the servers, or the only one: ``http://HOST:PORT``. The server must be able to read files of the run folder."""
    start_s: float = Field(default=30.0, gt=0)
    """Time for a server to answer at the start of the run, or again after it has stopped answering, in seconds."""
    canary: float | None = Field(default=None, gt=0)
    """Largest mean difference between the log-probabilities of a server and of the trainer on fixed tokens, in nats. A server
    with a larger difference has not loaded the weights that it was given. None: what rounding explains (`stretto.learning.canary`)."""
    engines: int = Field(default=1, gt=0)
    """Number of engines; with ``address``, the number of addresses."""
    max_batch: int = Field(default=64, gt=0)
    cache_bytes: int = Field(default=256 << 20, gt=0)
    page_size: int = Field(default=8, gt=0)
    """Tokens per page of the cache. Samples of a group share their prompt's full pages, so short prompts need short pages."""
    threads: int = Field(default=1, gt=0)
    """Threads of one engine on a CPU."""
    keep_cache: bool = False
    """Whether samples in flight keep their keys and values when new weights are loaded, as in PipelineRL (2509.19128). The engine does
    not compute them again, so it samples more, and tokens after a change of the weights see keys of older weights."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """One address may stand alone, and ``engines`` defaults to the number of addresses."""
        if not isinstance(given, Mapping) or not given.get("address"):
            return given
        address = given["address"]
        address = (address,) if isinstance(address, str) else address
        return {"engines": len(address), **given, "address": address}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.address) is (self.engine == "own"):
            remedy = "leave it out, or set engine" if self.address else "give the addresses of its servers"
            raise ValueError(f"address does not fit engine {self.engine!r}: {remedy}")
        if self.keep_cache and self.address:
            raise ValueError(
                "keep_cache is for engines that the run starts; servers at an address compute keys again: leave it out"
            )
        for address in self.address:
            if not re.fullmatch(r"https?://[^/\s?#]+/?", address):
                raise ValueError(f"address: {address!r} is not of the form http://HOST:PORT")
        if self.address and self.engines != len(set(self.address)):
            num = len(set(self.address))
            raise ValueError(
                f"engines {self.engines} and {num} different addresses; leave engines out, and repeat no address"
            )
        return self


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
"""The papers' values where they differ from the defaults of `LossConfig` and of the policy or correction.

``tis``: π/μ is clipped at 2 (truncated importance sampling), for one update per batch. ``grpo``: 2402.03300. ``dr_grpo``:
2503.20783. ``dapo``: 2503.14476; 4,096 of its 20,480 tokens are punished. ``gspo``: 2507.18071. ``cispo``: 2506.13585, with
DAPO's filter and length penalty, no KL. ``icepop``: 2510.18855, for one update per batch. ``decoupled``: AReaL (2505.24298),
whose code omits tokens with proximal/μ above 5.
"""
_OF_POLICY: Final[Mapping[str, Mapping[str, float]]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    # the paper has no lower bound and names no upper one; 5: ScaleRL, 2510.13786
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "icepop": {"clip_low": 0.5, "clip_high": 4.0},
}
_OF_CORRECTION: Final[Mapping[str, Mapping[str, Any]]] = {
    "none": {},
    "tis": {"tis_cap": 2.0},
    "icepop": {"icepop_range": (0.5, 5.0)},
}


class LossConfig(Config):
    """The policy loss, with the names of the papers that METHODS cites. π: the trained policy. μ: the policy that sampled. A
    field that has no effect beside the other fields is refused."""

    preset: str = "tis"
    """Set of values from `PRESETS`, used for every field that the recipe does not give."""
    advantage: str = "grpo"
    """``grpo`` divides by the group's standard deviation, ``dr_grpo`` does not, ``rloo`` excludes the sample itself; or
    ``file.py:function``, a function of your own (`stretto.learning.algorithms`)."""
    policy: Literal["ppo", "gspo", "cispo", "icepop"] = "cispo"
    """Treatment of a ratio π/proximal out of bounds. ``ppo``: the token has no gradient where the ratio would move further out;
    ``gspo``: the same for whole samples; ``cispo``: the ratio is clipped; ``icepop``: the token is left out."""
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """The ratio's lower bound is 1 − ``clip_low``; 1: no lower bound."""
    clip_high: float = Field(default=1.0, gt=0)
    """The ratio's upper bound is 1 + ``clip_high``."""
    normaliser: Literal["token", "sequence", "constant"] = "token"
    """Normaliser of the loss over the whole global batch: number of tokens (DAPO), means over sequences (GRPO), or number of
    samples times ``max_tokens`` (Dr.GRPO)."""
    proximal: Literal["behaviour", "recompute"] = "behaviour"
    """Denominator of the ratio. ``behaviour``: μ as recorded. ``recompute``: the trainer's own forward pass before the updates
    (decoupled PPO), which needs several ``train.minibatches``, because with one update the ratio is always 1."""
    correction: Literal["none", "tis", "icepop"] = "none"
    """Weight for the ratio of a recomputed policy to μ: clipped at ``tis_cap``, or 0 outside ``icepop_range``."""
    tis_cap: float | None = Field(default=None, gt=0)
    icepop_range: tuple[float, float] | None = None
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference network (k2 as a loss, whose gradient is unbiased; weighted by π/μ, because tokens were
    sampled by μ)."""
    overlong_share: float = Field(default=0.0, ge=0, lt=1)
    """Last share of ``rollout.max_tokens`` in which answers lose up to 1 of their reward (DAPO)."""
    overlong_filter: bool = False
    """Do not train on truncated answers; their reward still counts in the group's mean (DAPO)."""
    drop_uniform: bool = True
    """Drop groups whose rewards are all equal, which have no gradient, and sample others (DAPO)."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Fill missing fields from the preset; fields of another policy or correction than the preset's from their tables."""
        if not isinstance(given, Mapping):
            return given
        tree = {"policy": "cispo", "correction": "none", **PRESETS.get(given.get("preset", "tis"), {})}
        for field, table in (("policy", _OF_POLICY), ("correction", _OF_CORRECTION)):
            kind = given.get(field, tree[field])
            preset = tree if kind == tree[field] else {}
            defaults = {name: preset.get(name, value) for name, value in table.get(kind, {}).items()}
            tree = {name: value for name, value in tree.items() if name not in table[tree[field]]} | defaults
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
                f"correction {self.correction!r} applies to a recomputed policy, and proximal is 'behaviour': π/μ is "
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
    """A teacher of some sources: a checkpoint, a Subnet of one, or a server."""

    checkpoint: str | None = None
    """Run or checkpoint folder. Beside ``url``: the folder with tokenizer and template of the served model; without it, the
    student's are used. Another tokenizer than the student's is possible for the form ``sampled`` and answers of one turn, if
    both tokenizers are byte-level: the teacher then scores spans of text (`stretto.text.spans`)."""
    subnet: str = "full"
    """Subnet of that checkpoint: a preset (``corner``) or a size (``layers=8,experts=16,top_k=2``)."""
    url: str | None = None
    """Address of a server whose /v1/completions returns log-probabilities of the prompt (``echo``), without that path; for the
    form ``sampled``. OPENAI_API_KEY is sent if it is set."""
    model: str | None = None
    """Name of the model on the server; None: the first model that the server lists."""
    domains: tuple[str, ...] | None = None
    """Sources that it teaches, ``["*"]`` for all; None: the source with the teacher's name."""
    template: Literal["own", "student"] = "own"
    """Chat template for the teacher's prompt: its own or the student's. The student's sampled tokens follow unchanged."""
    residence: Literal["resident", "swapped"] = "resident"
    """``resident``: the teacher stays in memory. ``swapped``: it is read from disk in each step, and only its head stays."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.checkpoint is None and self.url is None:
            raise ValueError("name a checkpoint, or the url of a server")
        if self.url is not None and (self.subnet, self.residence) != ("full", "resident"):
            raise ValueError("url: subnet and residence are of a checkpoint that is read here; leave them out")
        return self


class DistillConfig(Config):
    """Multi-teacher on-policy distillation (2606.30406): the student samples, the teacher of the prompt's source scores, and the
    loss is the reverse KL at every sampled token. π: the student with its current weights. q: a teacher. Both at temperature 1."""

    form: Literal["full", "sampled", "top_k", "tail"] = "full"
    """``full``: Σ π·(log π − log q) over the vocabulary. ``sampled``: log q − log π of the sampled token, as an advantage in the
    policy loss. ``top_k``: over the student's most likely tokens, with the correction − π + q. ``tail``: over these, with all
    other tokens as one."""
    top_k: int = Field(default=64, gt=0)
    """Number of tokens for ``top_k`` and ``tail``."""
    clip: float = Field(default=5.0, gt=0)
    """Bound of the advantage of ``sampled``, in nats."""
    balance: Literal["sequence", "tokens", "gap", "sigma", "none"] = "sequence"
    """Weight of each source. ``none``: every token counts the same, so that long answers dominate the gradient. The other values
    give each source the share of its ``weight``, by the means over its sequences or (``tokens``) over its tokens; ``gap``
    also multiplies by its last KL over its first, ``sigma`` divides by the standard deviation of its log q − log π."""
    entropy_aware: float | None = Field(default=None, ge=0)
    """Entropy of the teacher, in nats, above which the forward KL is added (2603.07079), because the reverse KL alone selects
    one of many good continuations. Not for ``sampled``."""
    outcome_weight: float = Field(default=0.0, ge=0)
    """Factor of the advantages of ``loss.advantage`` when they are added; 0: rewards are only logged."""
    merge_scale: float = Field(default=0.0, ge=0)
    """Factor λ by which the sum of the teachers' differences to the student is added to the student before the first step (task
    arithmetic, 2212.04089), so that distillation begins with most of what the teachers know. 0: the student begins as it is. The
    teachers must be checkpoints that were trained from the student."""
    kl_floor: float = Field(default=1e-4, ge=0)
    """Smallest KL between student and teacher at a source's first step, in nats per token. A smaller KL is refused as a teacher
    that is the student itself. 0: any KL, as for a student that must not change. Not checked with ``merge_scale``, because a merged
    student may already answer as its teacher does."""
    untaught: tuple[str, ...] = ()
    """Sources without a teacher, which are trained by ``outcome_weight`` alone."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Teachers by name; at least one, here or on the command line."""

    def teacher_of(self) -> dict[str, str]:
        """Names of the teachers by source."""
        return {source: name for name, each in self.teachers.items() for source in each.domains or (name,)}

    @property
    def has_policy_loss(self) -> bool:
        """Whether the policy loss of ``[loss]`` is part of the loss."""
        return self.outcome_weight > 0 or self.form == "sampled"

    def check(self, sources: Collection[str]) -> None:
        """Raises ValueError: no teacher, a teacher without a source, or a source with two teachers or none."""
        if not self.teachers:
            raise ValueError("distill: no teachers; name them in [distill.teachers.NAME], or with --teacher NAME=DIR")
        for name, each in self.teachers.items():
            if each.url is not None and self.form != "sampled":
                raise ValueError(
                    f"distill.teachers.{name}: a server gives log-probabilities of single tokens; set distill.form = "
                    '"sampled", or name a checkpoint'
                )
        if self.merge_scale:
            self._check_merge()
        claims = [
            (f"teachers.{name}", source) for name, each in self.teachers.items() for source in each.domains or (name,)
        ]
        claims += [("untaught", source) for source in self.untaught]
        for owner, source in claims:
            if source not in sources:
                known = f"no source {source!r}{nearest(source, sources)}; name some of {', '.join(sources)}"
                raise ValueError(f"distill.{owner}: {known}")
        for source in sources:
            owners = [owner for owner, claimed in claims if claimed == source]
            if len(owners) > 1:
                raise ValueError(f"distill: source {source!r} is named by {' and '.join(owners)}; keep one of them")
            if not owners:
                raise ValueError(
                    f"distill: source {source!r} has no teacher; name it in the domains of one, or in distill.untaught"
                )
        if self.untaught and not self.outcome_weight:
            raise ValueError(
                "distill.untaught: learns nothing without distill.outcome_weight; set that, or leave it out"
            )
        if self.entropy_aware is not None and self.form == "sampled":
            raise ValueError("distill.entropy_aware: form 'sampled' does not know the teacher's entropy; leave it out")

    def _check_merge(self) -> None:
        for name, each in self.teachers.items():
            if each.url is not None or each.subnet != "full":
                kind = "a server" if each.url is not None else f"the Subnet {each.subnet}"
                raise ValueError(
                    f"distill.merge_scale: teacher {name!r} is {kind}, whose weights cannot be added to the student's; set it to 0"
                )
        if len(self.teachers) < 2:
            raise ValueError("distill.merge_scale: one teacher only, and a merge needs two; set it to 0")


class RewardConfig(Config):
    """Rewards over the whole group in place of the task's reward (`stretto.flow.group_reward`): quality × length × diversity,
    where quality is the task's reward. Fields that are not given have no effect."""

    diversity: Similarity | None = None
    """Multiply by the share of the group's other answers that differ (DARLING, 2509.02534), by their similarity in ``words``,
    ``characters`` or ``meaning`` (`stretto.text.similar`)."""
    same_at: float = Field(default=0.5, gt=0, le=1)
    """Similarity from which two answers count as the same; connected pairs form one cluster."""
    floor: float = Field(default=0.1, ge=0, le=1)
    """Smallest factor of diversity, so that the better of several equal answers still earns more. 1: diversity is only measured."""
    contrast: float | None = Field(default=None, gt=0)
    """Exponent of the answer's mean dissimilarity to the others over the group's mean, which replaces the clusters: long answers
    often have a cluster of their own."""
    length_budget: float | None = Field(default=None, gt=0)
    """Multiple of the median length of right answers above which answers lose reward; at twice that, all of it."""
    length_control: bool = False
    """Subtract the part of the judge's score that the group's length trend explains."""
    enough_words: int | None = Field(default=None, gt=0)
    """Number of words below which the reward is reduced in proportion, so that the model does not learn to answer briefly."""
    copy_at: float | None = Field(default=None, gt=0, le=1)
    """Share of an answer's words, in runs of four, that may not be copied from the prompt or the reference: no reward from there."""
    distinct_at: float | None = Field(default=None, gt=0, le=1)
    """Smallest share of distinct word pairs: no reward below."""
    format: str | None = None
    """Regular expression that an answer must contain: no reward without."""

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
    max: int = Field(default=2, gt=0)
    utilisation: float = Field(default=0.7, gt=0, le=1)
    """Target of arrival rate × mean service time / workers."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Deadline of one call, in seconds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is less than min {self.min}")
        return self


class SandboxConfig(Config):
    """Limits of one program that a verifier or a tool runs."""

    strict: bool = False
    """Refuse to start if full isolation is not available."""
    wall_s: float = Field(default=5.0, gt=0)
    cpu_s: float = Field(default=5.0, gt=0)
    memory_bytes: int = Field(default=512 << 20, gt=0)
    output_bytes: int = Field(default=1 << 20, gt=0)
    processes: int = Field(default=32, gt=0)


class FailureConfig(Config):
    """Deadlines and retries."""

    lease_s: float = Field(default=300.0, gt=0)
    """Seconds that an agent has for a group, without the wait for a free agent; an unfinished group is then dispatched again."""
    max_attempts: int = Field(default=5, gt=0)
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
    stop_s: float | None = Field(default=None, gt=0)
    """Seconds after which the run ends as after its last step. The step in progress is completed; the first step is completed in
    any case. A resumed run counts anew."""
    address: str = "auto"
    """Address of the Ray cluster."""
    agents: PoolConfig = PoolConfig(min=1, max=1)
    """Pool of agents on Ray, or if all roles are isolated; its deadline is ``failures.lease_s``."""
    rewards: PoolConfig = PoolConfig()
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


class RlTrainConfig(Config):
    """The training loop."""

    steps: int = Field(gt=0)
    prompts: int = Field(gt=0)
    """Groups trained in one step."""
    seq_len: int = Field(gt=0)
    """Longest sequence in tokens, prompt included, and length of packed rows. A row that has room for a prompt and all samples of it
    computes the prompt once."""
    micro_rows: int = Field(default=8, gt=0)
    """Rows of one forward and backward pass."""
    minibatches: int = Field(default=1, gt=0)
    """Optimiser updates per step, each on its share of the groups; more than one need a trust region."""
    seed: int = 0
    threads: int = Field(default=1, gt=0)
    snapshot_every: int = Field(default=20, gt=0)
    """Steps between snapshots."""
    snapshot_minutes: float = Field(default=3.0, gt=0)
    """Longest time between snapshots in minutes, whatever the number of steps: the most that a killed run loses."""
    keep_snapshots: int = Field(default=2, gt=0)
    eval_every: int = Field(default=20, gt=0)
    eval_prompts: int = Field(default=64, gt=0)
    balance_rate: float = Field(default=0.0, ge=0)
    """Step size of the experts' balance bias. 0: a changing bias would add to the mismatch between engines and trainer."""


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


class RlRecipe(Config):
    """A whole run."""

    command: ClassVar[str] = "`stretto rl`"

    start: StartConfig | None = None
    """None: the run needs ``--model``."""
    sources: dict[str, SourceConfig] = Field(min_length=1)
    rollout: RolloutConfig = RolloutConfig()
    rewards: dict[str, RewardConfig] = Field(default_factory=dict)
    """Group rewards by source; other sources keep their tasks' own rewards."""
    loss: LossConfig = LossConfig()
    optim: OptimConfig
    train: RlTrainConfig
    staleness: int = Field(default=4, ge=0)
    """Bound η of trainer version − oldest version among a trained sample's tokens; 0: the synchronous loop."""
    window: int | None = Field(default=None, gt=0)
    """Number of oldest groups among which the trainer chooses ready ones; None: the widest window that costs no waiting."""
    replay: Literal["off", "r2", "r3"] = "r3"
    """Routes of the trainer's forward passes: its own (``off``), those of its forward pass before the update (``r2``), or the
    engine's (``r3``, 2510.11370)."""
    teachers: dict[str, str] = Field(default_factory=dict)
    """Checkpoint folders by name, with the start's tokenizer: networks whose log-probabilities are passed to an algorithm of your
    own."""
    distill: DistillConfig | None = None
    """On-policy distillation, in place of rewards or beside them."""
    precision: PrecisionConfig = PrecisionConfig()
    sandbox: SandboxConfig = SandboxConfig()
    failures: FailureConfig = FailureConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    resources: ResourcesConfig = ResourcesConfig()
    store: str = "file"
    """Where groups, token logs and weights lie. ``file``: in the run folder, which all roles see. An address such as
    ``s3://bucket/runs``: in an object store. ``ray``: in the memory of the Ray cluster. Keys belong into the environment."""
    channel: ChannelKind = "store"
    """How weights reach the run's own engines. ``store``: as files or chunks in ``store``. ``gloo``: from the memory of the trainer's
    process, by torch.distributed."""
    trainer: TrainerConfig = TrainerConfig()

    def on(self, default: Precision) -> Self:
        """This recipe without precisions ``auto``. ``default``: precision of the trainer's device."""
        return self.replace(precision=self.precision.filled(default))

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """With distillation, keep groups with equal rewards, which still have a gradient, and expand the domains ``["*"]``."""
        if not isinstance(given, Mapping) or not isinstance(given.get("distill"), Mapping):
            return given
        loss, distill = given.get("loss", {}), given["distill"]
        if isinstance(loss, Mapping):
            loss = {"drop_uniform": False, **loss}
        teachers, sources = distill.get("teachers", {}), given.get("sources")
        if isinstance(teachers, Mapping) and isinstance(sources, Mapping):
            is_general = {
                name for name, each in teachers.items() if isinstance(each, Mapping) and each.get("domains") == ["*"]
            }
            everywhere = {name: {**teachers[name], "domains": list(sources)} for name in is_general}
            teachers = {name: everywhere.get(name, each) for name, each in teachers.items()}
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
        if self.rollout.engine in ("vllm", "sglang") and self.precision.rollout == "fp8":
            raise ValueError(
                f"precision.rollout 'fp8': weights go to {self.rollout.engine} in fp32 or bf16; choose one of these"
            )
        if self.train.micro_rows % self.trainer.ranks:
            raise ValueError(
                f"train.micro_rows {self.train.micro_rows} cannot be divided among trainer.ranks {self.trainer.ranks}; use a multiple"
            )
        if self.optim.master != "fp32" or self.optim.in_backward:
            raise ValueError(
                "optim: master and in_backward are for pre-training, elasticizing, healing and SFT; RL keeps fp32 weights: leave them out"
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
                    f"{field} {name!r} uses the policy before the updates of a step, and with one update that is the policy "
                    "itself: set train.minibatches to 2 or more, or leave it out"
                )
        if self.teachers and self.loss.advantage in ADVANTAGES:
            raise ValueError(
                f"teachers: {self.loss.advantage!r} asks none; set loss.advantage to a function of your own, or leave them out"
            )
        if self.runtime.kind == "local" and self.resources != ResourcesConfig():
            raise ValueError("resources: places on a Ray cluster; start with --runtime ray, or leave the table out")
        if self.store not in ("file", "ray") and "://" not in self.store:
            raise ValueError(
                f"store {self.store!r}: no such place; choose file, ray, or an address such as s3://bucket/runs"
            )
        if "@" in self.store:
            raise ValueError("store: its address contains a key; put keys into the environment, as AWS_ACCESS_KEY_ID")
        if self.store == "ray" and self.runtime.kind != "ray":
            raise ValueError("store 'ray' needs runtime.kind 'ray': start with --runtime ray, or choose another store")
        if self.store != "file" and self.rollout.address:
            raise ValueError("rollout.address: servers read the weights from the run folder; set store to 'file'")
        if self.channel == "gloo" and self.rollout.address:
            raise ValueError("rollout.address: servers read the weights from the run folder; set channel to 'store'")
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


# The problem of each ordinal is a pure function of the recipe, so that any process of any attempt computes the same one

# A source without end has at least 2^24 problems: a quarter for the run, a quarter for supervised training, half held out.
SUPERVISED = 1 << 22
"""First ordinal of supervised training before the run; the run's own ordinals are smaller."""
_HELD_OUT = 1 << 23
"""First held-out item of a source without end."""


_SOURCE, _SAMPLE, _HELD_OUT_SAMPLE, _ORDER = 1, 2, 3, 4
"""Purposes of random numbers, mixed into the seed."""
_DECK = 64
"""Ordinals per deck. Within a deck each source appears by its weight, up to one occurrence that moves to the next deck."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The endless list of prompts of a run, and the held-out ones. Made by `plan_prompts`.

    The number of occurrences of a source before an ordinal must be known without enumerating all earlier ordinals. So sources
    are dealt in shuffled decks: before the end of deck d, each has come ⌊64·d·its share⌋ times.
    """

    names: tuple[str, ...]
    shares: tuple[float, ...]
    """Shares of the sources, with sum 1."""
    sizes: tuple[int | None, ...]
    """Number of training items of each source; None: no end."""
    group: int
    max_tokens: int
    seed: int

    def task(self, ordinal: int) -> Task:
        """The task of ``ordinal``. Its source is drawn by weight; items do not repeat before a source is used up, then they are
        shuffled again."""
        phase, number = divmod(ordinal, SUPERVISED)  # supervised training has epochs of its own
        place, num_before = self._dealt(phase, number)
        item, size = ordinal, self.sizes[place]
        if size is not None:
            epoch, within = divmod(num_before, size)
            order = key_of(self.seed, _ORDER, phase, place, epoch)
            item = int(permute(np.array([within], np.int64), size, order)[0])
        return self._task(ordinal, place, item, self.group, _SAMPLE)

    def held_out(self, number: int) -> Task:
        """Held-out problem ``number``, with one sample; the sources take turns. Its ordinal is negative."""
        place = number % len(self.names)
        size, within = self.sizes[place], number // len(self.names)
        item = (_HELD_OUT if size is None else size) + within
        return self._task(-1 - number, place, item, 1, _HELD_OUT_SAMPLE)

    def _dealt(self, phase: int, number: int) -> tuple[int, int]:
        """Index of the source of prompt ``number`` of a phase, and how often the source came before."""
        deck = number // _DECK  # the deck starts there, or up to one ordinal per source earlier
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
        """Occurrences of each source before a deck."""
        return [int(deck * _DECK * share) for share in self.shares]

    def _task(self, ordinal: int, place: int, item: int, group: int, purpose: int) -> Task:
        seed = key_of(self.seed, purpose, ordinal) >> 1
        return Task(ordinal, self.names[place], item, group, seed, self.max_tokens)


def plan_prompts(recipe: RlRecipe, num_items: Mapping[str, int | None]) -> Prompts:
    """The prompts of ``recipe``. The last items of each finite source are held out.
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
