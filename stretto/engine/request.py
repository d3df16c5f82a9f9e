"""Input and output records of the engine. Imports no torch.

A request is token ids, never text, so sampled tokens are never tokenised again.
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
"""``timeout``: the request waited longer than ``max_wait_s`` for a place in the batch."""
VERSIONS = range(-(1 << 63), 1 << 63)
"""Allowed weight versions."""
MAX_IDS = 4096
"""Largest number of token ids in ``logit_bias`` or ``stop_ids`` of a request: every id costs time in each step of the batch."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: logits divided by them would overflow."""
CONSOLE_PENALTY = 1.1
"""Repetition penalty of commands and functions that write for a person, as small networks repeat themselves. A server's is 1."""


class Grammar(Config):
    """Constraint on the text of a completion."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""
    """The JSON Schema, regular expression or Lark grammar; empty for ``json_object``."""
    field: str = ""
    """Field of a client's request that this constraint comes from, for error messages; empty: ``grammar`` and the kind."""


class Sampling(Config):
    """Sampling parameters. The defaults sample from the model's own distribution."""

    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 keeps all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Lowest probability that is kept, relative to that of the most probable token."""
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    """Divides positive and multiplies negative logits of tokens that occur in prompt or output (CTRL, 1909.05858)."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens that occur in the output, as OpenAI defines it."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens, times their number in the output, as OpenAI defines it."""
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=MAX_IDS)
    """Added to the logits of these token ids; -100 bans a token and 100 forces it, as in OpenAI's API."""
    seed: int | None = None
    """Seed of the random numbers; None: a random seed, reported in the completion. Equal seed and request give equal tokens."""
    max_tokens: int = Field(default=16, gt=0)
    min_tokens: int = Field(default=0, ge=0)
    """Number of tokens before which end tokens and stop strings have no effect."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; they are not part of its text."""
    stop_ids: tuple[int, ...] = Field(default=(), max_length=MAX_IDS)
    """Token ids that end the completion, in addition to the tokenizer's end token; part of the token ids, not of the text."""
    ignore_eos: bool = False
    n: int = Field(default=1, gt=0, le=128)
    """Number of completions (choices) of the prompt; choice i samples with seed + i."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """Number of most probable alternatives reported for each token."""
    prompt_logprobs: bool = False
    """Report the log-probability of each prompt token as well, except the first."""
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p exclude tokens; False for greedy sampling, where they have no effect."""
        return (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0) and not self.is_greedy

    @property
    def plain_temperature(self) -> float | None:
        """The temperature (0: greedy) if no other option changes the distribution, else None."""
        if self.grammar is not None or self.min_tokens or self.logit_bias or self.top_logprobs:
            return None
        if self.has_penalties or self.has_filters:
            return None
        return 0.0 if self.is_greedy else self.temperature

    def check(self, vocab: int, source: str) -> None:
        """Check token ids against the size of the vocabulary.

        Raises:
            UserError: a token id in ``logit_bias`` or ``stop_ids`` is outside the vocabulary.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_ids", self.stop_ids)):
            if wrong := [token for token in ids if not 0 <= token < vocab]:
                raise UserError(f"{source}: {name}: {wrong[0]} is not a token id; they go from 0 to {vocab - 1}")


@dataclass(frozen=True, slots=True)
class Phases:
    """Subnets of prompt, thinking and answer. A later phase reads the cache of earlier ones, so it cannot have more layers."""

    answer: Subnet
    prefill: Subnet | None = None
    """Subnet of the prompt; None: that of the phase after it."""
    thinking: Subnet | None = None
    """Subnet of generated tokens up to and including ``thinking_end``; None: that of the answer."""
    thinking_end: int | None = None
    """Token id that ends the thinking phase."""

    def __post_init__(self) -> None:
        assert (self.thinking is None) == (self.thinking_end is None), "thinking needs the id of its last token"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete. Written by a client of the engine (server, RL engine role, command line)."""

    id: str
    """Unique among the requests in flight."""
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sampling: Sampling
    phases: Phases
    want_routes: bool = False
    """Return the experts of each token, for routing replay."""
    visible_ids: frozenset[int] = frozenset()
    """Special tokens that are included in the text, because its reader looks for them."""
    client: str = ""
    """Name of the client; clients take turns for places in the batch."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """An alternative to a sampled token."""

    token: int
    logprob: float
    """Processed log-probability, nats: after penalties, grammar, temperature and filters."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one choice. Written by the engine as soon as the token is final."""

    request_id: str
    index: int
    """Index of the choice within the request."""
    token: int
    logprob: float
    """Processed log-probability, nats, fp32."""
    text: str
    """Text that this token adds; withheld while it may be part of a stop string or of an incomplete character."""
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
    """FLOPs of all tokens computed for this choice, including recomputation after a preemption."""
    subnet: str
    """Label of the answer's Subnet."""
    queued_s: float
    """Seconds from arrival to the first step that computes the choice."""
    first_token_s: float
    """Seconds from arrival to the first token."""
    total_s: float
    """Seconds from arrival to the end."""
    num_preemptions: int


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished choice, with everything that RL needs. Written by the engine."""

    request_id: str
    index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """Sampled token ids, including an end token."""
    logprobs: np.ndarray
    """fp32 [T], processed log-probability of each sampled token, nats."""
    versions: np.ndarray
    """int64 [T], weight version with which each token was sampled."""
    text: str
    finish_reason: FinishReason
    stop: str | int | None
    """The stop string or token id that ended the choice."""
    seed: int
    usage: Usage
    top: tuple[tuple[TopLogprob, ...], ...] = ()
    prompt_logprobs: np.ndarray | None = None
    """fp32 [P − 1], log-probabilities of prompt tokens 1…P − 1, nats, unprocessed (temperature 1, no penalties)."""
    prompt_top: tuple[tuple[TopLogprob, ...], ...] = ()
    """``top_logprobs`` most probable tokens at the places of prompt tokens 1…P − 1."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [P + T − 1, L, K]: experts chosen by each computed token, by MoE layer of the maximum
    network. The last sampled token was not computed and has no row. The largest value of the type means no expert (the layer
    was skipped, or the token's top-k is smaller)."""
    error: str | None = None
    """Error message, for the finish reasons ``error`` and ``timeout``."""
    is_refused: bool = False
    """True if the request caused the error, for example by a grammar that no text can match."""


Event = TokenEvent | Completion


class EngineConfig(Config):
    """Sizes and options of an engine."""

    page_size: int = Field(default=16, gt=0)
    """Tokens per cache page."""
    num_pages: int | None = Field(default=None, gt=0)
    """Number of cache pages; None: as many as fit into ``cache_bytes``."""
    cache_bytes: int | None = Field(default=None, gt=0)
    """Size of the cache; None: a share of the free memory (`stretto.engine.runner.pages_within`)."""
    max_batch: int = Field(default=64, gt=0)
    """Largest number of sequences computed at once."""
    max_step_tokens: int = Field(default=1024, gt=0)
    """Largest number of tokens of one step, over all sequences; longer prompts are computed in chunks."""
    max_len: int | None = Field(default=None, gt=0)
    """Largest length of prompt and completion together; None: the network's positions, or the size of the cache if it is less."""
    max_waiting: int = Field(default=4096, gt=0)
    """Largest number of waiting requests; further ones are refused."""
    max_wait_s: float | None = Field(default=None, gt=0)
    """Longest wait of a request for its first step, in seconds; then it ends with the reason ``timeout``. None: no limit."""
    max_step_s: float | None = Field(default=600.0, gt=0)
    """Longest time of one step, or of one command between two steps, in seconds; then the engine counts as hung and ends. None: no
    limit. The first steps may compile kernels, which takes minutes on a GPU."""
    prefix_cache: bool = True
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Precision of products with weights, as in `stretto.ops.matmul`; ``fp32`` is the data type of the weights."""
    batch_invariant: bool = False
    """A token's logits do not depend, to the bit, on the batch, the chunking or the cache. Slow, and needs fp32 weights."""
    fast_prefill: bool = False
    """On a CPU: compute steps of many tokens with torch's matrix library instead of the compiled kernels. Faster for
    large networks in fp32, and in bf16 if the processor has no matrix unit. A token's result then depends on which of the two
    computed it, and so on the rest of the batch."""
    tp: int = Field(default=1, gt=0)
    """Ranks of tensor parallelism: processes on this machine, or GPUs, that divide heads and widths of the network. Sizes of
    the cache and of memory then apply to each rank."""
    cuda_graphs: bool = True
    """On a GPU, in plain arithmetic: launch a decoding step as one CUDA graph. Takes memory for each size of a batch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_step_tokens < self.max_batch:
            raise ValueError(f"max_step_tokens {self.max_step_tokens} is less than max_batch {self.max_batch}")
        if self.tp > 1 and (self.batch_invariant or self.precision != "fp32"):
            name = "batch_invariant" if self.batch_invariant else f"precision {self.precision}"
            raise ValueError(f"tp {self.tp}: sums over ranks do not round as {name} promises; leave one of the two out")
        return self


class QueueFull(RuntimeError):  # noqa: N818 - a state of the engine, not a fault
    """The queue of the engine is full (``max_waiting``)."""


@dataclass(slots=True)
class EngineStats:
    """State of an engine at one moment, for metrics and elastic serving. Written by the engine."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    """Pages that are free, or cached and not in use."""
    num_cached_pages: int
    max_len: int
    """Largest length of prompt and completion together that the cache holds, in tokens."""
    cache_bytes: int
    """Size of keys, values and routes, in use or not."""
    is_batch_invariant: bool
    """Whether a token's result does not depend, to the bit, on the rest of the batch, on chunking, caching or preemption."""
    weight_version: int
    num_steps: int = 0
    prompt_tokens: int = 0
    """Computed since the start, prefix-cache hits excluded."""
    cached_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    num_timeouts: int = 0
    """Requests without a place in the batch after ``max_wait_s``."""
    busy_s: float = 0.0
    """Seconds spent in steps since the start. Written by `AsyncEngine`; 0 for an engine without one."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Kind of step or operator -> its implementation."""
