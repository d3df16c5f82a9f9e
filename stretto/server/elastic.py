"""The size (Subnet) of each request: requested size, default size, or a smaller one under load.

When the queue grows, a new request that leaves its Subnet open gets a smaller one, never one below the declared floor.
`ladder` orders the Subnets, `decide` is the policy (a function of numbers, tested as a table), `LoadControl` gives it
a clock and a memory, `Resolver` applies it to the fields of a request.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from pydantic import model_validator

from stretto.base.errors import UserError, nearest
from stretto.engine.request import Phases
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, count, named_subnets, parse_subnet
from stretto.server.limits import ApiError, overloaded
from stretto.server.messages import Body, FieldError
from stretto.text.tokenizer import Tokenizer

ENVIRONMENT = {"ERNIE_ELASTIC_LAYERS": "layers", "ERNIE_ELASTIC_EXPERTS": "experts", "ERNIE_ELASTIC_TOPK": "top_k"}
"""Environment variable -> axis of the default Subnet."""
THINKING_END = "</think>"
"""Ends the thinking of every reasoning model whose template we know."""
# When to shrink, when to grow back, when to refuse: ours; the burst benchmark judges them.
SHRINK_WAITING = 8
"""Requests waiting at which the first step down is taken; each doubling takes another."""
GROW_WAITING = 1
"""Most requests waiting at which a step up may be taken."""
REFUSE_WAITING = 256
"""Requests waiting at which, on the floor, further ones are refused."""
SHRINK_AFTER_S = 0.5
"""Between two steps down for slow first tokens: the effect of one must show before the next."""
GROW_AFTER_S = 5.0
"""Calm needed for each step up."""
_WINDOW_S = 5.0
"""First tokens that count as recent."""
_MIN_RATED = 16
"""First tokens from which a rate is taken: fewer may have come out of one step."""
_LEAST_SPAN_S = 0.25


@dataclass(frozen=True, slots=True)
class Least:
    """Smallest number of layers, experts and top-k that a network was trained with; 1 where unknown."""

    layers: int = 1
    experts: int = 1
    top_k: int = 1

    def warnings(self, subnet: Subnet) -> list[str]:
        """One warning for each number of ``subnet`` that is smaller than any the network was trained with: its quality is unknown."""
        sizes = {"layers": len(subnet.layers), "experts": min(subnet.experts, default=self.experts)}
        sizes["top_k"] = min(subnet.top_k, default=self.top_k)
        return [
            f"{axis} {size}: below the smallest number that this network was trained with, {getattr(self, axis)}"
            for axis, size in sizes.items()
            if size < getattr(self, axis)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """The network behind a server. Written by whoever starts it."""

    name: str
    """Under which it is asked for; presets are ``name:preset``."""
    config: ModelConfig
    presets: Mapping[str, SubnetChoice]
    tokenizer: Tokenizer | None
    """None: only token ids go in and out."""
    max_len: int
    """Prompt and completion together, tokens; the engine's."""
    default: SubnetChoice = field(default_factory=SubnetChoice)
    """What a request gets that asks for none, while there is no load."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end an answer beside the tokenizer's own (``eos_token_id`` of generation_config.json)."""
    weight_bytes: int = 4
    """Bytes of one weight and of one cache element in the engine's dtype."""
    least: Least = Least()
    """The smallest it was trained to be."""
    is_chat_tuned: bool = True
    """Whether a chat template, if there is one, was trained with: a network that never saw it can only continue texts."""

    def choices(self) -> dict[str, SubnetChoice]:
        """Every preset by name; ``full`` is always one."""
        return {"full": SubnetChoice(), **self.presets}

    def names(self) -> list[str]:
        """Under which it is asked for, whole or at a preset."""
        return [self.name, *(f"{self.name}:{preset}" for preset in self.choices())]


def environment_subnet(environ: Mapping[str, str], config: ModelConfig) -> SubnetChoice | None:
    """The default Subnet that the environment sets; None where it sets no axis. Raises `UserError` for an impossible one."""
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
    """Forward, a token, in products with weights."""


def contains(outer: Subnet, inner: Subnet, config: ModelConfig) -> bool:
    """Whether every layer, expert and choice of ``inner`` is one of ``outer``."""
    if not set(inner.layers) <= set(outer.layers):
        return False
    width = dict(zip(config.moe_rows(outer.layers), zip(outer.experts, outer.top_k, strict=True), strict=True))
    return all(
        experts <= width[row][0] and k <= width[row][1]
        for row, experts, k in zip(config.moe_rows(inner.layers), inner.experts, inner.top_k, strict=True)
    )


def ladder(config: ModelConfig, named: Mapping[str, Subnet], target: Subnet, floor: Subnet) -> tuple[Rung, ...]:
    """From ``target`` down to ``floor`` (else `UserError`): both, and the ``named`` between them, by falling FLOPs."""
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
    """95th percentile of recent times to first token; 0: nothing answered lately."""
    wait_s: float = 0.0
    """How long those who wait will take, at the recent rate of first tokens; 0: too few came to tell."""


def is_calm(load: Load, aim_s: float) -> bool:
    """Whether the load leaves room to grow; ``aim_s`` as of `decide`."""
    return load.num_waiting <= GROW_WAITING and load.first_token_s < aim_s / 2


def decide(level: int, load: Load, aim_s: float, num_rungs: int, since_change_s: float, calm_s: float) -> int:
    """The rung (0: the target) that new requests get.

    Args:
        level: the one they got so far, for ``since_change_s``.
        aim_s: time to first token above which a step down is taken; a step up needs less than half of it, so that the
            two never alternate.
        calm_s: since when every look at the load found it calm.
    """
    last, waiting = num_rungs - 1, load.num_waiting
    wanted = 0 if waiting < SHRINK_WAITING else 1 + int(math.log2(waiting / SHRINK_WAITING))
    if min(wanted, last) > level:
        return min(wanted, last)
    if load.first_token_s > aim_s and since_change_s >= SHRINK_AFTER_S:
        return min(level + 1, last)
    if is_calm(load, aim_s):
        # Several steps at once after a pause in which nobody asked.
        return max(level - int(min(calm_s, since_change_s) / GROW_AFTER_S), 0)
    return level


def refuses(level: int, load: Load, aim_s: float, num_rungs: int) -> bool:
    """Whether a new request must be turned away: the floor is reached, and the queue is full or slower than ``aim_s``
    (an answer that comes too late costs those behind it, too)."""
    return level == num_rungs - 1 and (load.num_waiting >= REFUSE_WAITING or load.wait_s > aim_s)


class LoadControl:
    """The policy with a clock: remembers the rung, when it changed, and recent times to first token."""

    def __init__(self, rungs: tuple[Rung, ...], aim_s: float, clock: Callable[[], float]) -> None:
        self.rungs = rungs
        self.level = 0
        self.num_waiting = 0
        """Prompts whose first token has not come, what a new request has to wait behind. `Ticket`s count it."""
        self.clock = clock
        self._aim_s = aim_s
        self._changed_s = self._busy_s = clock()
        self._recent: deque[tuple[float, float]] = deque(maxlen=4096)  # (when, time to first token)

    def observe(self, first_token_s: float) -> None:
        """A first token came so long after its request."""
        self._recent.append((self.clock(), first_token_s))

    def choose(self, num_waiting: int) -> Rung | None:
        """The rung of a request that arrives now; None: refuse it."""
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
        """When the queue is likely to have halved, at the recent rate of first tokens; one second to a minute."""
        rate = self._rate(self.clock())
        return min(60.0, max(1.0, num_waiting / 2 / rate)) if rate else 5.0

    def _rate(self, now_s: float) -> float:
        """First tokens a second, since the oldest that is remembered; 0 where there is none."""
        return len(self._recent) / max(_LEAST_SPAN_S, now_s - self._recent[0][0]) if self._recent else 0.0


class Ticket:
    """Count of one HTTP request's prompts without a first token. Must be closed at the end."""

    def __init__(self, control: LoadControl) -> None:
        self._control = control
        self._num = 0
        self._start_s = control.clock()

    def add(self, num: int) -> None:
        self._num += num
        self._control.num_waiting += num

    def came(self) -> None:
        """The first token of one of them."""
        self.add(-1)
        self._control.observe(self._control.clock() - self._start_s)

    def close(self) -> None:
        self.add(-self._num)


class Size(Body):
    """Axes of a Subnet, as `SubnetChoice` has them; any number, so that one out of range is told the range."""

    layers: int | None = None
    experts: int | None = None
    top_k: int | None = None

    def given(self) -> dict[str, int]:
        """The axes that are not left out."""
        return self.model_dump(include=set(Size.model_fields), exclude_none=True)

    def of(self, config: ModelConfig, base: SubnetChoice) -> Subnet:
        """The Subnet, axes left out being those of ``base``. Raises `UserError` for one that ``config`` does not have."""
        return base.model_copy(update=self.given()).of(config)


class Axes(Size):
    """A Subnet: a preset to start from (its name alone will do), and axes that replace its own."""

    preset: str | None = None

    def words(self) -> list[str]:
        """What is given: ``["half", "top_k=1"]``."""
        axes = [f"{axis}={value}" for axis, value in self.given().items()]
        return axes if self.preset is None else [self.preset, *axes]

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value


class Elastic(Axes):
    """The ``elastic`` field: the Subnet of the answer, and of the phases before it where they differ."""

    answer: Axes | None = None
    prefill: Axes | None = None
    thinking: Axes | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """The size that a request got, and the reason. Written by `Resolver.resolve`, read by ``usage.elastic`` and the metrics."""

    phases: Phases
    name: str
    """A preset's name, or the axes."""
    asked: str
    """``auto`` where the request left it open."""
    reason: Literal["asked", "default", "load"]


class Resolver:
    """Resolves the fields ``model`` and ``elastic``. Lives on the event loop."""

    def __init__(
        self, model: ServedModel, floor: str | None, aim_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises `UserError` where the default or the floor is none of this network."""
        self._model = model
        self._has_floor = floor is not None
        self.named = named_subnets(model.config, model.presets)
        target = model.default.of(model.config)
        least = target if floor is None else parse_subnet(floor, model.config, model.presets, "--floor")
        self.control = LoadControl(ladder(model.config, self.named, target, least), aim_s, clock)
        self._thinking_end = None if model.tokenizer is None else model.tokenizer.rust.token_to_id(THINKING_END)

    def rung(self, num_waiting: int) -> Rung:
        """What a request gets now that leaves its Subnet open; raises `ApiError` 429 on the floor with a full queue."""
        rung = self.control.choose(num_waiting)
        if rung is None and self._has_floor:
            full = f"{num_waiting} requests wait and the floor ({self.control.rungs[-1].name}) is reached"
            wait_s = self.control.retry_after_s(num_waiting)
            raise overloaded(f"the server is full: {full}; try again later", wait_s)
        return rung or self.control.rungs[0]  # without a floor nothing may be given up: the engine's queue is the limit

    def preset_of(self, name: str | None) -> str | None:
        """The preset in ``model:preset``; None for the bare model. Raises `ApiError` 404 for any other."""
        if name is None or name == self._model.name:
            return None
        if name in self._model.names():
            return name.removeprefix(f"{self._model.name}:")
        # With the model's name before them, all presets resemble each other: a preset's own name must be near.
        own, names = f"{self._model.name}:", self._model.names()
        rest = [each.removeprefix(own) for each in names]
        near = nearest(name, names) if nearest(name.removeprefix(own), rest) else ""
        problem = f"model: {name!r} is not served here{near}; GET /v1/models lists what is"
        raise ApiError(404, problem, param="model", code="model_not_found")

    def resolve(self, model: str | None, asked: Elastic | None, rung: Rung) -> Given:
        """Resolve ``model`` and ``elastic``; ``rung`` is for a request that leaves its Subnet open.

        Raises:
            ApiError: an unknown model. FieldError: an unknown preset, no Subnet of this network, phases that do not nest.
        """
        preset = self.preset_of(model)
        base = self._model.default if preset is None else self._model.choices()[preset]
        asked = asked or Elastic()
        wanted: Axes = asked
        if asked.answer is not None:
            if asked.words():
                problem = "is given beside layers, experts, top_k or preset, which mean the same"
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
                raise FieldError("elastic", problem, "subnet")
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
                raise FieldError(param, problem, "subnet")
            base = known[wanted.preset]
        try:
            return wanted.of(self._model.config, base)
        except UserError as error:
            raise FieldError(param, str(error), "subnet") from None
