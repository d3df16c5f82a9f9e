"""The choices of a search: which layers, how many experts, which top-k."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Self

from pydantic import model_validator

from stretto.base.config import Config
from stretto.model.counts import count
from stretto.model.spec import ModelConfig, Subnet, droppable_layers
from stretto.subnets.candidate import Limits


class SearchSpace(Config):
    """The choices of a search. Fixed layers are in every Subnet; k is equal in all layers, as export requires."""

    droppable: tuple[int, ...]
    """Layers that may be dropped."""
    experts: tuple[int, ...]
    """Numbers of experts of a layer, rising."""
    top_k: tuple[int, ...]
    """Values of k, rising. A layer with fewer experts uses all of them."""
    layers: Literal["nested", "free"] = "free"
    """``nested``: layers are dropped in the layer order; ``free``: any droppable layers."""
    widths: Literal["uniform", "per_layer"] = "uniform"
    """``per_layer``: numbers of experts may differ by layer, which few export families support."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, values in (("experts", self.experts), ("top_k", self.top_k)):
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise ValueError(f"{name} {list(values)} must be rising counts from 1 up")
        return self

    @staticmethod
    def of(
        config: ModelConfig,
        *,
        layers: Literal["nested", "free"] = "free",
        widths: Literal["uniform", "per_layer"] = "uniform",
    ) -> SearchSpace:
        """The space of ``config``: all layers but the first and last two, eighths of the experts and every trained width, all k.

        The space of a dense network has layers only.
        """
        if not config.moe_layers:
            only = {"experts": (config.num_experts,), "top_k": (config.top_k,)}
            return SearchSpace(droppable=droppable_layers(config), layers=layers, widths="uniform", **only)
        total = config.num_experts
        eighths = range(max(1, total // 8), total + 1, max(1, total // 8))
        min_k = min(config.top_k, 2)
        experts = sorted(num for num in {*config.widths, *eighths, total} if config.choosable(num) >= min_k)
        return SearchSpace(
            droppable=droppable_layers(config),
            experts=tuple(experts),
            top_k=tuple(range(1, config.top_k + 1)),
            layers=layers,
            widths=widths,
        )

    def subnet(self, config: ModelConfig, dropped: Sequence[int], experts: Sequence[int], top_k: int) -> Subnet:
        """The Subnet without the layers ``dropped``, with ``experts[row]`` experts in each MoE row of the maximum network."""
        layers = tuple(layer for layer in range(config.num_layers) if layer not in dropped)
        rows = config.moe_rows(layers)
        kept = tuple(min(experts[row], config.experts_by_layer[row]) for row in rows)
        limits = [min(config.choosable(num), config.top_k_by_layer[row]) for num, row in zip(kept, rows, strict=True)]
        k = min((top_k, *limits))  # one k for all layers, since an exported model has only one
        return Subnet(layers=layers, experts=kept, top_k=(k,) * len(rows))

    def drops(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Sets of dropped layers of rising size, in the reverse of ``order`` (most important layer first)."""
        falling = [layer for layer in reversed(order) if layer in self.droppable]
        return [tuple(sorted(falling[:num])) for num in range(len(falling) + 1)]

    def num_choices(self, config: ModelConfig) -> int:
        """Number of choices that `every` returns."""
        drops = len(self.droppable) + 1 if self.layers == "nested" else 2 ** len(self.droppable)
        widths = 1 if self.widths == "uniform" else config.num_moe_layers
        return drops * len(self.experts) ** widths * len(self.top_k)

    def every(self, config: ModelConfig) -> Iterator[Subnet]:
        """All choices. Some give the same Subnet."""
        drops: Iterable[tuple[int, ...]] = self.drops(config.layer_ranking)
        if self.layers == "free":
            nums = range(len(self.droppable) + 1)
            drops = itertools.chain.from_iterable(itertools.combinations(self.droppable, num) for num in nums)
        rows = config.num_moe_layers
        for dropped in drops:
            uniform = ((num,) * rows for num in self.experts)
            widths = uniform if self.widths == "uniform" else itertools.product(self.experts, repeat=rows)
            for experts, k in itertools.product(widths, self.top_k):
                yield self.subnet(config, dropped, experts, k)

    def grid(self, config: ModelConfig, order: Sequence[int] | None = None) -> Iterator[Subnet]:
        """Every Subnet with equal widths whose layers are dropped in ``order``; None: the nested order of the network.

        It contains the smallest Subnet of the space, so it decides whether limits can be met.
        """
        for dropped, num, k in itertools.product(self.drops(order or config.layer_ranking), self.experts, self.top_k):
            if k <= config.choosable(num):
                yield self.subnet(config, dropped, (num,) * config.num_moe_layers, k)


def reachable_limits(config: ModelConfig) -> Limits:
    """Suggested limits: half-way between the full network and the smallest Subnet of a search, in whole per cent."""
    full = count(config, config.full())
    sizes = [count(config, subnet) for subnet in SearchSpace.of(config).grid(config)]
    total = min(size.total_params for size in sizes) / full.total_params
    active = min(size.active_params for size in sizes) / full.active_params
    return Limits(max_total=math.ceil(50 * (1 + total)) / 100, max_active=math.ceil(50 * (1 + active)) / 100)
