"""The size (Subnet) of each request: requested size, default size, or a smaller one under load.

When the queue grows, a new request that names no Subnet gets a smaller one, never one below the floor. `ladder` orders the Subnets,
`decide` is the policy (a function of numbers), `LoadControl` adds a clock and recent measurements, and `Resolver` applies the policy to
the fields of a request.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from stretto.base.errors import UserError, nearest
from stretto.engine.loading import OpenedEngine, generation_ends, held_bytes
from stretto.engine.request import Phases
from stretto.model.counts import count
from stretto.model.elastic import slice_integers
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, extracted_config, named_subnets, parse_subnet
from stretto.ops.int_weights import IntWeight
from stretto.server.limits import ApiError, overloaded
from stretto.server.messages import SUBNET, Body, FieldError
from stretto.text.tokenizer import Tokenizer

ENVIRONMENT = {"ERNIE_ELASTIC_LAYERS": "layers", "ERNIE_ELASTIC_EXPERTS": "experts", "ERNIE_ELASTIC_TOPK": "top_k"}
"""Environment variables that set the default Subnet, and the axis that each one sets."""
THINKING_END = "</think>"
"""Ends the thinking of every supported reasoning model."""
# Thresholds of the policy: our own choice, tuned with a benchmark of bursts.
SHRINK_WAITING = 8
"""Number of waiting requests at which the first step down is taken; each doubling takes another step."""
GROW_WAITING = 1
"""Largest number of waiting requests at which a step up is allowed."""
REFUSE_WAITING = 256
"""Number of waiting requests at which the server, at the floor, refuses further ones."""
SHRINK_AFTER_S = 0.5
"""Seconds between two steps down because of slow first tokens, so that the effect of the first step shows."""
GROW_AFTER_S = 5.0
"""Seconds without load for each step up."""
_WINDOW_S = 5.0
"""Age in seconds up to which first tokens count as recent."""
_MIN_RATED = 16
"""Smallest number of recent first tokens from which a rate is computed: fewer may all come from one engine step."""
_MIN_SPAN_S = 0.25
"""Shortest time span over which a rate is computed, seconds."""


@dataclass(frozen=True, slots=True)
class Least:
    """Smallest numbers of layers, experts and top-k that a network was trained with; 1 where unknown."""

    layers: int = 1
    experts: int = 1
    top_k: int = 1

    def warnings(self, subnet: Subnet) -> list[str]:
        """A warning for each axis of ``subnet`` that is smaller than in training: the quality is unknown."""
        sizes = {"layers": len(subnet.layers), "experts": min(subnet.experts, default=self.experts)}
        sizes["top_k"] = min(subnet.top_k, default=self.top_k)
        return [
            f"{axis} {size}: below the smallest number that this network was trained with, {getattr(self, axis)}"
            for axis, size in sizes.items()
            if size < getattr(self, axis)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """The network behind a server."""

    name: str
    """Name in the field ``model``; presets are ``name:preset``."""
    config: ModelConfig
    presets: Mapping[str, SubnetChoice]
    tokenizer: Tokenizer | None
    """None: requests and answers hold token ids only."""
    max_len: int
    """Context of the engine: largest number of tokens of prompt and completion together."""
    default: SubnetChoice = field(default_factory=SubnetChoice)
    """Subnet of requests that name none, while there is no load."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end an answer beside the tokenizer's own (``eos_token_id`` of generation_config.json)."""
    dtype: torch.dtype = torch.float32
    """Of the cache, and of the weights that are not integers."""
    integers: Mapping[str, IntWeight] = field(default_factory=dict)
    """Weights that the engine holds as integers only, on the meta device."""
    least: Least = Least()
    is_chat_tuned: bool = True
    """Whether the network was trained with its chat template. Otherwise it can only continue texts."""
    is_enhancer: bool = False
    """Whether the network was trained to expand requests for pictures."""

    @classmethod
    def of(cls, opened: OpenedEngine, presets: Mapping[str, SubnetChoice], **settings: Any) -> ServedModel:
        """An opened checkpoint with the sizes ``presets``. ``settings``: fields that the checkpoint does not determine."""
        engine, config = opened.engine, opened.engine.network
        return cls(
            opened.name,
            config,
            presets,
            engine.tokenizer,
            engine.max_len,
            stop_ids=generation_ends(opened.folder, config.vocab_size),
            dtype=engine.model.embedding.weight.dtype,
            integers=opened.integers,
            **settings,
        )

    def choices(self) -> dict[str, SubnetChoice]:
        """Every preset by name, ``full`` included."""
        return {"full": SubnetChoice(), **self.presets}

    def weight_bytes(self, subnet: Subnet) -> int:
        """Bytes of the weights of ``subnet`` if it is cut out and served alone."""
        integers = slice_integers(self.config, subnet, self.integers)
        return held_bytes(extracted_config(self.config, subnet), self.dtype, integers)

    def names(self) -> list[str]:
        """Values of the field ``model``: the default size and every preset."""
        return [self.name, *(f"{self.name}:{preset}" for preset in self.choices())]


def environment_subnet(environ: Mapping[str, str], config: ModelConfig) -> SubnetChoice | None:
    """The default Subnet that environment variables set; None if none is set. Raises `UserError` for a Subnet that ``config`` lacks."""
    given = {variable: text for variable in ENVIRONMENT if (text := environ.get(variable, "").strip())}
    for variable, text in given.items():
        if not (text.isascii() and text.isdecimal()) or int(text) < 1:
            raise UserError(f"{variable}: {text!r} is not a whole number above 0; unset it or set one")
    choice = SubnetChoice(**{ENVIRONMENT[variable]: int(text) for variable, text in given.items()})
    try:
        choice.of(config)
    except UserError as error:
        named = ", ".join(f"{variable}={int(text)}" for variable, text in given.items())
        raise UserError(f"{named}: {error}; choose numbers that this network has") from None
    return choice if given else None


@dataclass(frozen=True, slots=True)
class Rung:
    """One Subnet of the ladder. Written by `ladder`."""

    name: str
    subnet: Subnet
    flops: int
    """FLOPs of the matrix products of one token's forward pass."""


def contains(outer: Subnet, inner: Subnet, config: ModelConfig) -> bool:
    """Whether ``outer`` has every layer of ``inner``, with at least as many experts and as large a top-k."""
    if not set(inner.layers) <= set(outer.layers):
        return False
    width = dict(zip(config.moe_rows(outer.layers), zip(outer.experts, outer.top_k, strict=True), strict=True))
    return all(
        experts <= width[row][0] and k <= width[row][1]
        for row, experts, k in zip(config.moe_rows(inner.layers), inner.experts, inner.top_k, strict=True)
    )


def ladder(config: ModelConfig, named: Mapping[str, Subnet], target: Subnet, floor: Subnet) -> tuple[Rung, ...]:
    """``target``, the ``named`` Subnets between it and ``floor``, and ``floor``, in decreasing FLOPs. Raises `UserError` if
    ``target`` does not contain ``floor``."""
    if not contains(target, floor, config):
        raise UserError(
            f"floor: {floor.label()} is not contained in the default size, {target.label()}; choose a smaller floor"
        )

    def rung(subnet: Subnet) -> Rung:
        return Rung(_name_of(subnet, named), subnet, count(config, subnet).linear_flops)

    rungs, last = [rung(target)], rung(floor)
    for each in sorted(map(rung, named.values()), key=lambda each: -each.flops):
        is_between = contains(target, each.subnet, config) and contains(each.subnet, floor, config)
        if is_between and rungs[-1].flops > each.flops > last.flops:
            rungs.append(each)
    return tuple(rungs if floor == target else [*rungs, last])


def _name_of(subnet: Subnet, named: Mapping[str, Subnet]) -> str:
    return next((name for name, known in named.items() if known == subnet), subnet.label())


@dataclass(frozen=True, slots=True)
class Load:
    """Load measurements that the policy uses. Written by `LoadControl`."""

    num_waiting: int
    first_token_s: float = 0.0
    """95th percentile of recent times to first token, seconds; 0: no recent one."""
    wait_s: float = 0.0
    """Expected waiting time at the recent rate of first tokens, seconds; 0: too few for an estimate."""


def is_calm(load: Load, aim_s: float) -> bool:
    """Whether the load allows a larger Subnet. ``aim_s``: see `decide`."""
    return load.num_waiting <= GROW_WAITING and load.first_token_s < aim_s / 2


def decide(level: int, load: Load, aim_s: float, num_rungs: int, since_change_s: float, calm_s: float) -> int:
    """Number of the rung that new requests get; 0 is the target.

    Args:
        level: the current rung, unchanged for ``since_change_s`` seconds.
        aim_s: time to first token above which a step down is taken, seconds. A step up needs less than half of it, so that
            steps do not alternate.
        calm_s: seconds for which `is_calm` has held.
    """
    last, waiting = num_rungs - 1, load.num_waiting
    wanted = 0 if waiting < SHRINK_WAITING else 1 + int(math.log2(waiting / SHRINK_WAITING))
    if min(wanted, last) > level:
        return min(wanted, last)
    if load.first_token_s > aim_s and since_change_s >= SHRINK_AFTER_S:
        return min(level + 1, last)
    if is_calm(load, aim_s):
        # Several steps at once after a pause without requests.
        return max(level - int(min(calm_s, since_change_s) / GROW_AFTER_S), 0)
    return level


def refuses(level: int, load: Load, aim_s: float, num_rungs: int) -> bool:
    """Whether a new request is refused: the floor is reached, and the queue is full or slower than ``aim_s`` (late
    answers delay the requests behind them, too)."""
    return level == num_rungs - 1 and (load.num_waiting >= REFUSE_WAITING or load.wait_s > aim_s)


class LoadControl:
    """The policy with its state: the current rung, the time of its last change, and recent times to first token."""

    def __init__(self, rungs: tuple[Rung, ...], aim_s: float, clock: Callable[[], float]) -> None:
        self.rungs = rungs
        self.level = 0
        self.num_waiting = 0
        """Number of prompts without a first token. Counted by `Ticket`."""
        self.clock = clock
        self._aim_s = aim_s
        self._changed_s = self._busy_s = clock()
        self._recent: deque[tuple[float, float]] = deque(maxlen=4096)  # (when, time to first token)

    def observe(self, first_token_s: float) -> None:
        """Note a time to first token in seconds."""
        self._recent.append((self.clock(), first_token_s))

    def choose(self, num_waiting: int) -> Rung | None:
        """The rung of a request that arrives now; None: refuse the request."""
        now_s = self.clock()
        while self._recent and self._recent[0][0] < now_s - _WINDOW_S:
            self._recent.popleft()
        times = sorted(first_token_s for _, first_token_s in self._recent)
        wait_s = num_waiting / self._rate(now_s) if len(times) >= _MIN_RATED else 0.0
        load = Load(num_waiting, times[int(0.95 * (len(times) - 1))] if times else 0.0, wait_s)
        if not is_calm(load, self._aim_s):
            self._busy_s = now_s
        level = decide(self.level, load, self._aim_s, len(self.rungs), now_s - self._changed_s, now_s - self._busy_s)
        if level != self.level:
            self.level, self._changed_s = level, now_s
        return None if refuses(level, load, self._aim_s, len(self.rungs)) else self.rungs[level]

    def retry_after_s(self, num_waiting: int) -> float:
        """Seconds until half of the queue is served at the recent rate of first tokens, within 1 to 60."""
        rate = self._rate(self.clock())
        return min(60.0, max(1.0, num_waiting / 2 / rate)) if rate else 5.0

    def _rate(self, now_s: float) -> float:
        """Recent first tokens per second; 0 without any."""
        return len(self._recent) / max(_MIN_SPAN_S, now_s - self._recent[0][0]) if self._recent else 0.0


class Ticket:
    """Counts the prompts of one HTTP request that have no first token yet. `close` removes the rest of the count."""

    def __init__(self, control: LoadControl) -> None:
        self._control = control
        self._num = 0
        self._start_s = control.clock()

    def add(self, num: int) -> None:
        self._num += num
        self._control.num_waiting += num

    def first_token(self) -> None:
        """Note the first token of one prompt."""
        self.add(-1)
        self._control.observe(self._control.clock() - self._start_s)

    def close(self) -> None:
        self.add(-self._num)


class Size(Body):
    """Axes of a Subnet, see `SubnetChoice`."""

    layers: int | None = Field(default=None, ge=1)
    experts: int | None = Field(default=None, ge=1)
    top_k: int | None = Field(default=None, ge=1)

    def given(self) -> dict[str, int]:
        """The axes that are set."""
        return self.model_dump(include=set(Size.model_fields), exclude_none=True)

    def of(self, config: ModelConfig, base: SubnetChoice, param: str) -> Subnet:
        """The Subnet; ``base`` sets the other axes. Raises `FieldError` of ``param`` for a Subnet that ``config`` does not have."""
        try:
            return base.model_copy(update=self.given()).of(config)
        except UserError as error:
            raise FieldError(param, str(error).removeprefix("subnet: "), SUBNET) from None


class Axes(Size):
    """A Subnet: a preset (its name alone stands for an object), and axes that replace the preset's own."""

    preset: str | None = None

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    def words(self) -> list[str]:
        """The preset and the axes that are set, for example ``["half", "top_k=1"]``."""
        axes = [f"{axis}={value}" for axis, value in self.given().items()]
        return axes if self.preset is None else [self.preset, *axes]

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value


class Elastic(Axes):
    """The field ``elastic``: the Subnet of the answer, and other Subnets for the phases before it."""

    answer: Axes | None = None
    prefill: Axes | None = None
    thinking: Axes | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """The size that a request gets, and the reason. Written by `Resolver.resolve`, read by ``usage.elastic`` and the metrics."""

    phases: Phases
    name: str
    """Name of a preset, or the axes."""
    asked: str
    """The requested size; ``auto``: none."""
    reason: Literal["asked", "default", "load"]


class Resolver:
    """Resolves the fields ``model`` and ``elastic``. Not thread-safe: used on the event loop."""

    def __init__(
        self, model: ServedModel, floor: str | None, aim_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``floor``: smallest Subnet under load; None: the size does not depend on the load. Raises `UserError` for a default size
        or a floor that the network does not have."""
        self._model = model
        self._has_floor = floor is not None
        self.named = named_subnets(model.config, model.presets)
        target = model.default.of(model.config)
        least = target if floor is None else parse_subnet(floor, model.config, model.presets, "--floor")
        self.control = LoadControl(ladder(model.config, self.named, target, least), aim_s, clock)
        self._thinking_end = None if model.tokenizer is None else model.tokenizer.rust.token_to_id(THINKING_END)

    def rung(self, num_waiting: int) -> Rung:
        """The Subnet for a request that names none. Raises `ApiError` 429 at the floor with a full queue."""
        rung = self.control.choose(num_waiting)
        if rung is None and self._has_floor:
            full = f"{num_waiting} requests wait and the floor ({self.control.rungs[-1].name}) is reached"
            wait_s = self.control.retry_after_s(num_waiting)
            raise overloaded(f"the server is full: {full}; try again later", wait_s)
        return rung or self.control.rungs[0]  # without a floor, only the engine's queue limits the load

    def preset_of(self, name: str | None) -> str | None:
        """The preset in ``model:preset``; None for the model's own name. Raises `ApiError` 404 for any other name."""
        if name is None or name == self._model.name:
            return None
        if name in self._model.names():
            return name.removeprefix(f"{self._model.name}:")
        # Names of presets share the model's name as a prefix and so resemble each other: compare the rest alone, too.
        own, names = f"{self._model.name}:", self._model.names()
        rest = [each.removeprefix(own) for each in names]
        near = nearest(name, names) if nearest(name.removeprefix(own), rest) else ""
        problem = f"model: {name!r} is not served here{near}; GET /v1/models lists what is"
        raise ApiError(404, problem, param="model", code="model_not_found")

    def resolve(self, model: str | None, asked: Elastic | None, rung: Rung) -> Given:
        """The size for the fields ``model`` and ``elastic``; ``rung``: the size of a request that names none.

        Raises:
            ApiError: an unknown model. FieldError: an unknown preset, a Subnet that the network lacks, or phases that do not nest.
        """
        preset = self.preset_of(model)
        base = self._model.default if preset is None else self._model.choices()[preset]
        asked = asked or Elastic()
        wanted: Axes = asked
        if asked.answer is not None:
            if asked.words():
                problem = "cannot be given together with layers, experts, top_k or preset, which mean the same"
                raise FieldError("elastic.answer", problem)
            wanted = asked.answer
        is_open = preset is None and not wanted.words()
        answer = rung.subnet if is_open else self._subnet(wanted, base, "elastic")
        before = {"prefill": asked.prefill, "thinking": asked.thinking}
        phases = {name: self._subnet(axes, base, f"elastic.{name}") for name, axes in before.items() if axes}
        # A later phase reads the cache of the earlier ones, so its layers must be among theirs.
        for (earlier, outer), (later, inner) in pairwise([*phases.items(), ("answer", answer)]):
            if not set(inner.layers) <= set(outer.layers):
                counts = f"{len(inner.layers)} layers that the {earlier} ({len(outer.layers)} layers)"
                problem = f"the {later} runs {counts} did not all compute; give the {earlier} at least as many"
                raise FieldError("elastic", problem, SUBNET)
        if "thinking" in phases and self._thinking_end is None:
            raise FieldError("elastic.thinking", f"the tokenizer has no {THINKING_END}, which ends this phase")
        given = Phases(answer, **phases, thinking_end=self._thinking_end if "thinking" in phases else None)
        if is_open:
            return Given(given, rung.name, "auto", "default" if rung == self.control.rungs[0] else "load")
        spelled = wanted.words() if wanted.preset or preset is None else [preset, *wanted.words()]
        return Given(given, _name_of(answer, self.named), ",".join(spelled), "asked")

    def _subnet(self, wanted: Axes, base: SubnetChoice, param: str) -> Subnet:
        if wanted.preset is not None:
            known = self._model.choices()
            if wanted.preset not in known:
                problem = f"no preset {wanted.preset!r}{nearest(wanted.preset, known)}; known: {', '.join(known)}"
                raise FieldError(param, problem, SUBNET)
            base = known[wanted.preset]
        return wanted.of(self._model.config, base, param)
