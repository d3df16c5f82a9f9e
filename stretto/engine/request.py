"""Input and output records of the engine. Imports no torch.

A request is token ids, never text: what was sampled is never tokenised again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.model.spec import Subnet

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
"""``timeout``: it waited for a place in the batch longer than it may."""
VERSIONS = range(-(1 << 63), 1 << 63)
"""Numbers that weights may have."""
MAX_IDS = 4096
"""Token ids that one request may name in ``logit_bias`` or ``stop_ids``: each is looked at in every step, for all to wait."""
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in vLLM: dividing logits by them would overflow."""


class Grammar(Config):
    """Constraint on the text of a completion."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""
    """The schema as JSON, the expression or the grammar; nothing for ``json_object``."""


class Sampling(Config):
    """How tokens are chosen. The defaults sample from the model's own distribution."""

    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Least probability kept, as a share of the most probable token's."""
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, 1909.05858)."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Both look at the output only, as OpenAI defines them."""
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=MAX_IDS)
    """Added to the logits of these token ids; -100 bans a token and 100 forces it, as in OpenAI's API."""
    seed: int | None = None
    """None: drawn for the request and reported in the completion. The same seed and request give the same tokens."""
    max_tokens: int = Field(default=16, gt=0)
    min_tokens: int = Field(default=0, ge=0)
    """End tokens and stop strings count only after this number of tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; they are not part of its text."""
    stop_ids: tuple[int, ...] = Field(default=(), max_length=MAX_IDS)
    """Token ids that end it, beside the tokenizer's own end; the token is part of the ids, not of the text."""
    ignore_eos: bool = False
    n: int = Field(default=1, gt=0, le=128)
    """Completions of the one prompt; choice i samples with seed + i."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """Most probable alternatives reported beside each token."""
    prompt_logprobs: bool = False
    """Report the log-probability of each prompt token too (the first has none)."""
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_filters(self) -> bool:
        """Whether some tokens are left out of the draw. Greedy rows never filter: their most probable token stays."""
        return (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0) and not self.is_greedy

    @property
    def plain_temperature(self) -> float | None:
        """The temperature (0: greedy) where nothing else comes between a row's logits and its token, else None."""
        if self.grammar is not None or self.min_tokens or self.logit_bias or self.top_logprobs:
            return None
        if self.has_penalties or self.has_filters:
            return None
        return 0.0 if self.is_greedy else self.temperature

    def check(self, vocab: int, source: str) -> None:
        """Refuse what the vocabulary rules out, before a request joins a batch.

        Raises:
            UserError: a token id of ``logit_bias`` or ``stop_ids`` is no token.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_ids", self.stop_ids)):
            if wrong := [token for token in ids if not 0 <= token < vocab]:
                raise UserError(f"{source}: {name}: {wrong[0]} is not a token id; they go from 0 to {vocab - 1}")


@dataclass(frozen=True, slots=True)
class Phases:
    """Which Subnet runs when. A later phase reads the cache of the earlier ones, so its layers must be among theirs."""

    answer: Subnet
    prefill: Subnet | None = None
    """For the prompt; None: as what follows it."""
    thinking: Subnet | None = None
    """For generated tokens up to and including ``thinking_end``; None: as the answer."""
    thinking_end: int | None = None
    """Token id that ends the thinking phase."""

    def __post_init__(self) -> None:
        assert (self.thinking is None) == (self.thinking_end is None), "thinking needs the id of its last token"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete. Written by whoever asks (server, agent loop, command line)."""

    id: str
    """Unique among the requests in flight."""
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sampling: Sampling
    phases: Phases
    want_routes: bool = False
    """Return the experts each token chose, for rollout router replay."""
    visible_ids: frozenset[int] = frozenset()
    """Special tokens that are part of the text all the same, because its reader looks for them."""
    client: str = ""
    """Who asks: clients take turns for places in the batch."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """An alternative to a sampled token."""

    token: int
    logprob: float
    """Nats, processed: after penalties, grammar, temperature and filters."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one choice. Written by the engine as soon as it is final."""

    request_id: str
    index: int
    """Which of the request's n choices."""
    token: int
    logprob: float
    """Nats, processed, fp32."""
    text: str
    """What this token adds to the visible text; held back while it may belong to a stop string or half a character."""
    weight_version: int
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Cost of one choice. Written by the engine."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were in the prefix cache."""
    output_tokens: int
    flops: int
    """Of the tokens computed for it, recomputation after a preemption included."""
    subnet: str
    """Label of the Subnet of the answer."""
    queued_s: float
    """From arrival to the first step it was part of."""
    first_token_s: float
    """From arrival to its first token."""
    total_s: float
    num_preemptions: int


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished choice. Written by the engine; everything that RL needs is in it."""

    request_id: str
    index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """Sampled ids, an ending id included."""
    logprobs: np.ndarray
    """fp32 [T], processed log-probability of each sampled token, nats."""
    versions: np.ndarray
    """int64 [T], weight version each token was sampled under."""
    text: str
    finish_reason: FinishReason
    stop: str | int | None
    """The stop string or id that ended it."""
    seed: int
    usage: Usage
    top: tuple[tuple[TopLogprob, ...], ...] = ()
    prompt_logprobs: np.ndarray | None = None
    """fp32 [P − 1], of prompt tokens 1…P − 1, unprocessed (temperature 1, no penalties)."""
    prompt_top: tuple[tuple[TopLogprob, ...], ...] = ()
    """Of the same tokens: the most probable ones in their places; as many as ``top_logprobs`` says."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [P + T − 1, L, K]: experts chosen by each token that was computed, by MoE layer of the maximum
    network. The last sampled token was never computed and has no row. The dtype's largest value: no expert (the layer
    was skipped, or the token's top-k is smaller)."""
    error: str | None = None
    """Why, for the finish reasons ``error`` and ``timeout``."""
    is_refused: bool = False
    """The error is the request's own fault: its grammar cannot be followed."""


Event = TokenEvent | Completion


class EngineConfig(Config):
    """Sizes of an engine."""

    page_size: int = Field(default=16, gt=0)
    """Tokens a cache page holds."""
    num_pages: int | None = Field(default=None, gt=0)
    """None: as many as fit into ``cache_bytes``."""
    cache_bytes: int | None = Field(default=None, gt=0)
    """None: a share of what is free beside the weights (`stretto.engine.runner.pages_within`)."""
    max_batch: int = Field(default=64, gt=0)
    """Sequences computed at once."""
    max_step_tokens: int = Field(default=1024, gt=0)
    """Tokens of one step, over all sequences; longer prompts are computed in chunks."""
    max_len: int | None = Field(default=None, gt=0)
    """Prompt and completion together; None: the network's positions, or what the cache holds where that is less."""
    max_waiting: int = Field(default=4096, gt=0)
    """Requests queued before further ones are refused."""
    max_wait_s: float | None = Field(default=None, gt=0)
    """Longest wait of a request for its first step, in seconds; then it ends with the reason ``timeout``. None: no limit."""
    max_step_s: float | None = Field(default=600.0, gt=0)
    """Longest that one step, or one command between two steps, may take; then the engine counts as hung and ends. None: no limit.
    The first steps may compile kernels, which takes minutes on a GPU."""
    prefix_cache: bool = True
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Of the products with weights, as the trainer's operators understand it; ``fp32`` is the weights' own dtype."""
    batch_invariant: bool = False
    """A token's logits do not depend, to the bit, on the batch, the chunking or the cache. Slow, and needs fp32 weights."""
    fast_prefill: bool = False
    """On a CPU: steps of many tokens go through torch's matrix library instead of the compiled kernels, which is faster for
    large networks in fp32, and in bf16 where the processor has no matrix unit. A token's result then depends on which of the two
    computed it, and so on what else is in the batch."""
    cuda_graphs: bool = True
    """On a GPU, launch a step that decodes as one; takes memory for each size of a batch. In plain arithmetic alone."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_step_tokens < self.max_batch:
            raise ValueError(f"max_step_tokens {self.max_step_tokens} is less than max_batch {self.max_batch}")
        return self


class QueueFull(RuntimeError):  # noqa: N818 - a state of the engine, not a fault
    """The queue of the engine is full (``max_waiting``)."""


@dataclass(slots=True)
class EngineStats:
    """State of an engine at one moment. The engine counts in one and hands out copies, to metrics and elasticity."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    """Free, or cached and not in use."""
    num_cached_pages: int
    max_len: int
    """Prompt and completion of one request that the cache holds, tokens."""
    cache_bytes: int
    """Of keys, values and routes, in use or not."""
    is_batch_invariant: bool
    """A token's result does not depend, to the bit, on what else is computed, on chunking, caching or preemption."""
    weight_version: int
    num_steps: int = 0
    prompt_tokens: int = 0
    """Computed since the start, prefix-cache hits excluded."""
    cached_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    num_timeouts: int = 0
    """Requests that found no place in the batch within ``max_wait_s``."""
    busy_s: float = 0.0
    """Since the start, in steps. Written by `AsyncEngine`; 0 for an engine without one."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Operator -> the implementation that runs it."""
