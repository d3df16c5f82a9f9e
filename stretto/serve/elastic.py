"""Elastic under load: when the queue grows, a new request gets a smaller Subnet, never one below the declared floor.

`ladder` orders the Subnets, `decide` is the policy (a function of numbers, tested as a table), `LoadControl` gives it
a clock and a memory. A request that names a Subnet gets that Subnet; only those that leave it open move on the ladder.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.model.spec import ModelConfig, Subnet, count

_MIN_RATED = 16
"""First tokens from which a rate is taken: fewer may have come out of one step."""
_LEAST_SPAN_S = 0.25


class ElasticPolicy(Config):
    """When to shrink, when to grow back, when to refuse. The numbers are ours; the burst benchmark judges them."""

    shrink_waiting: int = Field(default=8, gt=0)
    """Requests waiting at which the first step down is taken; each doubling takes another."""
    grow_waiting: int = Field(default=1, ge=0)
    """Most requests waiting at which a step up may be taken."""
    refuse_waiting: int = Field(default=256, gt=0)
    """Requests waiting at which, on the floor, further ones are refused."""
    first_token_s: float = Field(default=2.0, gt=0)
    """Time to first token (95th percentile of the last ``window_s``) above which a step down is taken; a step up needs
    less than half of it, so that the two never alternate. On the floor, a request that would wait longer is refused:
    an answer that comes too late costs those behind it, too."""
    shrink_after_s: float = Field(default=0.5, ge=0)
    """Between two steps down for slow first tokens: the effect of one must show before the next."""
    grow_after_s: float = Field(default=5.0, gt=0)
    """Calm needed for each step up."""
    window_s: float = Field(default=5.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.grow_waiting < self.shrink_waiting <= self.refuse_waiting:
            raise ValueError(
                f"need grow_waiting {self.grow_waiting} < shrink_waiting {self.shrink_waiting} <= refuse_waiting {self.refuse_waiting}"
            )
        return self


@dataclass(frozen=True, slots=True)
class Rung:
    """One Subnet of the ladder. Written by `ladder`."""

    name: str
    subnet: Subnet
    flops: int
    """Forward, a token, in products with weights."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the policy looks at. Written by `LoadControl`."""

    num_waiting: int
    first_token_s: float | None
    """Recent time to first token; None: nothing answered lately."""
    wait_s: float | None = None
    """How long those who wait will take, at the recent rate of first tokens; None: too few came to tell."""


def contains(outer: Subnet, inner: Subnet, config: ModelConfig) -> bool:
    """Whether every layer, expert and choice of ``inner`` is one of ``outer``."""
    if not set(inner.layers) <= set(outer.layers):
        return False
    kept = [layer for layer in outer.layers if layer not in config.dense_layers]
    width = dict(zip(kept, zip(outer.experts, outer.top_k, strict=True), strict=True))
    layers = [layer for layer in inner.layers if layer not in config.dense_layers]
    return all(
        experts <= width[layer][0] and k <= width[layer][1]
        for layer, experts, k in zip(layers, inner.experts, inner.top_k, strict=True)
    )


def ladder(config: ModelConfig, named: Mapping[str, Subnet], target: Subnet, floor: Subnet) -> tuple[Rung, ...]:
    """From ``target`` down to ``floor``: both, and the ``named`` Subnets between them, by falling FLOPs.

    Raises:
        UserError: the floor is not part of the target.
    """
    if not contains(target, floor, config):
        raise UserError(f"floor: {floor.label()} is not part of the target, {target.label()}; lower it")

    def rung(subnet: Subnet, name: str | None = None) -> Rung:
        known = next((key for key, value in named.items() if value == subnet), subnet.label())
        return Rung(name or known, subnet, count(config, subnet).linear_flops)

    between = [
        rung(subnet, name)
        for name, subnet in named.items()
        if contains(target, subnet, config) and contains(subnet, floor, config)
    ]
    rungs = [rung(target)]
    last = rung(floor)
    for each in sorted(between, key=lambda each: -each.flops):
        if rungs[-1].flops > each.flops > last.flops:
            rungs.append(each)
    return tuple(rungs if floor == target else [*rungs, last])


def is_calm(load: Load, policy: ElasticPolicy) -> bool:
    """Whether the load leaves room to grow."""
    return load.num_waiting <= policy.grow_waiting and (load.first_token_s or 0.0) < policy.first_token_s / 2


def decide(level: int, load: Load, policy: ElasticPolicy, num_rungs: int, since_change_s: float, calm_s: float) -> int:
    """The rung (0: the target) that new requests get.

    Args:
        level: the one they got so far, for ``since_change_s``.
        calm_s: since when every look at the load found it calm.
    """
    last = num_rungs - 1
    waiting = load.num_waiting
    wanted = 0 if waiting < policy.shrink_waiting else 1 + int(math.log2(waiting / policy.shrink_waiting))
    if min(wanted, last) > level:
        return min(wanted, last)
    if (load.first_token_s or 0.0) > policy.first_token_s and since_change_s >= policy.shrink_after_s:
        return min(level + 1, last)
    if is_calm(load, policy):
        # Several steps at once after a pause in which nobody asked.
        return max(level - int(min(calm_s, since_change_s) / policy.grow_after_s), 0)
    return level


def refuses(level: int, load: Load, policy: ElasticPolicy, num_rungs: int) -> bool:
    """Whether a new request must be turned away: the floor is reached, and the queue is full or too slow."""
    is_late = load.wait_s is not None and load.wait_s > policy.first_token_s
    return level == num_rungs - 1 and (load.num_waiting >= policy.refuse_waiting or is_late)


class LoadControl:
    """The policy with a clock: remembers the rung, when it changed, and recent times to first token."""

    def __init__(self, rungs: tuple[Rung, ...], policy: ElasticPolicy, clock: Callable[[], float]) -> None:
        assert rungs
        self.rungs = rungs
        self.level = 0
        self._policy = policy
        self._clock = clock
        self._changed_s = self._busy_s = clock()
        self._recent: deque[tuple[float, float]] = deque(maxlen=4096)  # (when, time to first token)

    def observe(self, first_token_s: float) -> None:
        """Note that a request's first token came ``first_token_s`` after it arrived."""
        self._recent.append((self._clock(), first_token_s))

    def choose(self, num_waiting: int) -> Rung | None:
        """The rung of a request that arrives now; None: refuse it."""
        now_s = self._clock()
        while self._recent and self._recent[0][0] < now_s - self._policy.window_s:
            self._recent.popleft()
        times = sorted(first_token_s for _, first_token_s in self._recent)
        rate = self._rate(now_s)
        load = Load(
            num_waiting,
            times[int(0.95 * (len(times) - 1))] if times else None,
            num_waiting / rate if rate and len(times) >= _MIN_RATED else None,
        )
        if not is_calm(load, self._policy):
            self._busy_s = now_s
        level = decide(self.level, load, self._policy, len(self.rungs), now_s - self._changed_s, now_s - self._busy_s)
        if level != self.level:
            self._changed_s = now_s
        self.level = level
        return None if refuses(level, load, self._policy, len(self.rungs)) else self.rungs[level]

    def retry_after_s(self, num_waiting: int) -> float:
        """When the queue is likely to have halved, at the recent rate of first tokens; one second to a minute."""
        rate = self._rate(self._clock())
        return min(60.0, max(1.0, num_waiting / 2 / rate)) if rate else 5.0

    def _rate(self, now_s: float) -> float:
        """First tokens a second, since the oldest that is remembered; 0 where there is none."""
        return len(self._recent) / max(_LEAST_SPAN_S, now_s - self._recent[0][0]) if self._recent else 0.0
