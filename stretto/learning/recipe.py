"""Recipe of a reinforcement-learning run, and layout of its folder.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from stretto.base.config import Config
from stretto.base.errors import nearest
from stretto.learning.roles import (
    FailureConfig,
    Precision,
    PrecisionConfig,
    ResourcesConfig,
    RuntimeConfig,
    SandboxConfig,
    TrainerConfig,
)
from stretto.model.spec import ModelConfig
from stretto.optim.schedule import OptimConfig
from stretto.text.similar import Similarity
from stretto.train.recipe import SelfTaughtConfig

ChannelKind = Literal["store", "gloo"]
SNAPSHOTS, WEIGHTS, GROUPS, LOGS, START = "snapshots", "weights", "groups", "tokens", "sft"
"""Folders of a run, beside `stretto.base.paths.CHECKPOINT`: trainer states, published versions, finished groups, token logs,
and the start, if the run trained it."""
START_FILE = "start.json"
"""The checkpoint with which the run began."""
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
    "rollout.cache_bytes",
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
    "distill.kl_floor",
)
"""Other fields that a resumed run may change, with effect on the steps that follow. Its lineage lists the changes."""


def _server_address(url: str) -> str:
    """``url`` without a last ``/v1``, which clients of the API write. Raises ValueError: it is not the address of a server."""
    address = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(address)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or re.search(r"[\s?#]", address):
        raise ValueError(f"{url!r} is not of the form http://HOST:PORT")
    return address


def _no_path(address: str) -> str:
    if urlsplit(address).path:
        raise ValueError(f"{address!r} is not of the form http://HOST:PORT")
    return address


def _no_endpoint(address: str) -> str:
    if address.endswith("/completions"):
        raise ValueError(f"{address!r} is an endpoint; give the address of its server, as http://HOST:PORT")
    return address


ServerAddress = Annotated[str, AfterValidator(_server_address), AfterValidator(_no_path)]
"""``http://HOST:PORT``; a ``/v1`` at its end is removed."""
ServerUrl = Annotated[str, AfterValidator(_server_address), AfterValidator(_no_endpoint)]
"""``http://HOST:PORT`` or, behind a proxy, ``http://HOST:PORT/PATH``; a ``/v1`` at its end is removed."""


class SourceConfig(Config):
    """A set of problems."""

    kind: str
    """Kind of task: ``gym``, ``math``, ``code``, ``tools``, ``service``, ``verifiers``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that kind. Unknown keys are refused."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts, relative to the other sources."""
    held_out: int = Field(default=0, ge=0)
    """Smallest number of problems (each with all variants) that are not trained on, if ``train.eval_prompts`` holds out fewer of a finite source."""


class StartConfig(Config):
    """Supervised training on the sources' own answers before RL."""

    model: ModelConfig | None = None
    """Architecture of a network that starts with random weights; None: the checkpoint of ``--model`` is trained further."""
    optim: OptimConfig
    steps: int = Field(gt=0)
    """Number of training steps."""
    rows: int = Field(default=16, gt=0)
    """Answers per step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; bfloat16 is several times faster on a GPU."""
    noise: float = Field(default=0.0, ge=0, lt=1)
    """Share of answers that are replaced by another problem's answer, which leaves a known headroom for RL."""
    learns_prompts: bool = False
    """Also train on prompts and on tool and user turns. A network with random weights learns to copy from them, long before it
    would from the few tokens of the answers."""
    elastic: SelfTaughtConfig | None = None
    """Mixture of Subnets to train, so that smaller Subnets of the start work too; None: the full network only. Not with
    ``rank_layers_at`` or ``rank_experts_at``: fine-tuning keeps the orders."""


class RolloutConfig(Config):
    """Sampling."""

    group: int = Field(default=8, gt=0)
    """Samples per prompt; at least two if their rewards are compared."""
    max_tokens: int = Field(default=64, gt=0)
    """Largest number of sampled tokens of one sample, over all its turns."""
    max_turns: int = Field(default=1, gt=0)
    """Largest number of the model's turns in one sample."""
    tool_chars: int = Field(default=4000, ge=100)
    """Characters of a tool's result that the model reads: its beginning and its end, around a mark. Verifiers read all of it."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; 1 samples from the model's own distribution."""
    chunk_tokens: int = Field(default=64, gt=0)
    """Tokens per request to an engine: the largest number of tokens of a sample that are lost with an engine."""
    engine: Literal["own", "stretto", "vllm", "sglang"] = "own"
    """``own``: engines that the run starts. The others are servers at ``address``: ``stretto serve --rollout``, vLLM, SGLang."""
    address: tuple[ServerAddress, ...] = ()
    """Addresses of the servers, or the only one: ``http://HOST:PORT``. The server must be able to read files of the run folder."""
    start_s: float = Field(default=30.0, gt=0)
    """Time for a server to answer at the start of the run, or again after it has stopped answering, in seconds."""
    canary: float | None = Field(default=None, gt=0)
    """Largest mean difference between the log-probabilities of a server and of the trainer on fixed tokens, in nats. A server
    with a larger difference has not loaded the weights that it was given. None: what rounding explains (`stretto.learning.canary`)."""
    engines: int = Field(default=1, gt=0)
    """Number of engines; with ``address``, the number of addresses."""
    max_batch: int = Field(default=64, gt=0)
    """Sequences that an engine computes at once."""
    cache_bytes: int = Field(default=256 << 20, gt=0)
    """Memory of an engine's cache of keys and values, in bytes."""
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
        if not isinstance(address, Sequence):
            return given
        return {"engines": len(address), **given, "address": address}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.address) is (self.engine == "own"):
            remedy = "leave it out, or set engine" if self.address else "give the addresses of its servers"
            raise ValueError(f"address does not fit engine {self.engine!r}: {remedy}")
        if self.canary is not None and not self.address:
            raise ValueError("canary is for servers at an address; leave it out")
        if self.keep_cache and self.address:
            raise ValueError(
                "keep_cache is for engines that the run starts; servers at an address compute keys again: leave it out"
            )
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
    """Do not train on answers that reached the limit of tokens; their reward still counts in the group's mean (DAPO)."""
    drop_uniform: bool = True
    """Drop groups whose rewards are all equal before the penalty of ``overlong_share``, and sample others (DAPO)."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Fill missing fields from the preset; fields of another policy or correction than the preset's from their tables."""
        if not isinstance(given, Mapping):
            return given
        if not all(isinstance(given.get(field, ""), str) for field in ("preset", "policy", "correction")):
            return given  # refused by the fields
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
    url: ServerUrl | None = None
    """Address of a server whose /v1/completions returns log-probabilities of the prompt (``echo``); for the form
    ``sampled``. It may have a path, as behind a proxy. OPENAI_API_KEY is sent if it is set."""
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
    """Number of tokens for ``top_k`` and ``tail``; the other forms ignore it."""
    clip: float = Field(default=5.0, gt=0)
    """Bound of the advantage of ``sampled``, in nats; the other forms ignore it."""
    balance: Literal["sequence", "tokens", "gap", "sigma", "none"] = "sequence"
    """Weight of each source. ``none``: every token counts the same, so that long answers dominate the gradient. The other values
    give each source the share of its ``weight``, by the means over its sequences or (``tokens``) over its tokens; ``gap``
    also multiplies by its last KL over its first, at most by 1; ``sigma`` divides the taught sources' part among them by the standard deviation of
    their log q − log π."""
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


def _everywhere(teacher: Any, sources: Collection[str]) -> Any:
    """``teacher``, which may be anything, with all ``sources`` in place of the domains ``["*"]``."""
    if isinstance(teacher, TeacherConfig):
        teacher = teacher.model_dump()
    if isinstance(teacher, Mapping) and teacher.get("domains") in (["*"], ("*",)):
        return {**teacher, "domains": list(sources)}
    return teacher


class RewardConfig(Config):
    """Rewards over the whole group in place of the task's reward (`stretto.flow.group_reward`): quality × length × diversity,
    where quality is the task's reward. Fields that are not given have no effect."""

    diversity: Similarity | None = None
    """Multiply by the share of the group's other answers that differ (DARLING, 2509.02534), by their similarity in ``words``,
    ``characters`` or ``meaning`` (`stretto.text.similar`)."""
    same_at: float = Field(default=0.5, gt=0, le=1)
    """Similarity from which two answers count as the same; connected pairs form one cluster."""
    floor: float = Field(default=0.1, ge=0, le=1)
    """Smallest factor of diversity, so that the better of several equal answers still earns more. 1: diversity takes no
    reward; without ``contrast`` it is then only measured, with it, answers that differ more still earn more."""
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
                raise ValueError(f"format {self.format!r} is not a regular expression: {error}") from None
        if self.contrast is not None and self.diversity is None:
            raise ValueError("contrast is a power of diversity, and there is none; give diversity")
        if self.model_fields_set <= {"same_at", "floor"}:
            raise ValueError("the table changes nothing; give diversity, a length or a guard, or leave it out")
        return self


class RlTrainConfig(Config):
    """The training loop."""

    steps: int = Field(gt=0)
    """Number of training steps."""
    prompts: int = Field(gt=0)
    """Groups trained in one step."""
    seq_len: int = Field(gt=0)
    """Longest sequence in tokens, prompt included, and length of packed rows. A row that has room for a prompt and all samples of it
    computes the prompt once."""
    micro_rows: int = Field(default=8, gt=0)
    """Rows of one forward and backward pass."""
    minibatches: int = Field(default=1, gt=0)
    """Optimiser updates per step, each on its share of the groups; more than one need a trust region."""
    seed: int = Field(default=0, ge=0, lt=2**64)
    """Seed of the order of prompts and of sampling."""
    threads: int = Field(default=1, gt=0)
    """Threads of the trainer on a CPU."""
    snapshot_every: int = Field(default=20, gt=0)
    """Steps between snapshots."""
    snapshot_minutes: float = Field(default=3.0, gt=0)
    """Longest time between snapshots in minutes, whatever the number of steps: the most that a killed run loses."""
    keep_snapshots: int = Field(default=2, gt=0)
    """Number of newest snapshots that are kept."""
    eval_every: int = Field(default=20, gt=0)
    """Steps between evaluations on held-out problems."""
    eval_prompts: int = Field(default=64, gt=0)
    """Held-out problems of each evaluation."""
    balance_rate: float = Field(default=0.0, ge=0)
    """Step size of the experts' balance bias. 0: a changing bias would add to the mismatch between engines and trainer."""


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

    @property
    def sample_length(self) -> int:
        """Number of tokens that a sample may have whatever its prompt is. With several turns, replies and results of tools may fill
        ``train.seq_len``; else it is the answer and one token of prompt, since ``train.seq_len`` is also the length of packed rows."""
        longest = self.train.seq_len
        return longest if self.rollout.max_turns > 1 else min(longest, self.rollout.max_tokens + 1)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """With distillation, keep groups with equal rewards, which still have a gradient, and expand the domains ``["*"]``."""
        if not isinstance(given, Mapping):
            return given
        loss, distill = given.get("loss", {}), given.get("distill")
        distill = distill.model_dump() if isinstance(distill, DistillConfig) else distill
        if not isinstance(distill, Mapping):
            return given
        if isinstance(loss, Mapping):
            loss = {"drop_uniform": False, **loss}
        elif isinstance(loss, LossConfig) and "drop_uniform" not in loss.model_fields_set:
            loss = loss.replace(drop_uniform=False)
        teachers, sources = distill.get("teachers", {}), given.get("sources")
        if isinstance(teachers, Mapping) and isinstance(sources, Mapping):
            teachers = {name: _everywhere(each, sources) for name, each in teachers.items()}
        return {**given, "loss": loss, "distill": {**distill, "teachers": teachers}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_distill()
        self._check_step()
        self._check_loss()
        self._check_places()
        if strange := sorted(self.rewards.keys() - self.sources.keys()):
            known = f"{nearest(strange[0], self.sources)}; there are {', '.join(self.sources)}"
            raise ValueError(f"rewards.{strange[0]}: no such source{known}")
        if taken := sorted({"policy", "reference"} & self.teachers.keys()):
            raise ValueError(f"teachers.{taken[0]}: the name is taken; choose another")
        return self

    def _check_step(self) -> None:
        """Sizes of a training step and of a sample."""
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

    def _check_loss(self) -> None:
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

    def _check_places(self) -> None:
        """Where roles run, and where groups and weights are stored."""
        if self.runtime.kind == "local" and self.runtime.address != RuntimeConfig().address:
            raise ValueError("runtime.address: that of a Ray cluster; start with --runtime ray, or leave it out")
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
