"""What the search may choose, what limits it, and the record of one candidate.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.model.spec import ModelConfig, Subnet, count, droppable_layers

Third = Literal["active", "latency"]
"""The third objective beside loss and total parameters."""


class Limits(Config):
    """What a chosen Subnet must stay within, all at once; None sets no limit."""

    max_total: float | None = Field(default=None, gt=0)
    """Total parameters (memory) over the full network's."""
    max_active: float | None = Field(default=None, gt=0)
    """Active parameters (compute) over the full network's."""
    max_latency_ms: float | None = Field(default=None, gt=0)
    """Milliseconds a step on the machine of the latency table."""


class Candidate(Config):
    """One Subnet with what it costs and what is known of its loss."""

    subnet: Subnet
    name: str | None = None
    """Its preset's name, if it is one."""
    total_params: int
    active_params: int
    total_share: float
    """Of the full network's total parameters."""
    active_share: float
    """Of the full network's active parameters."""
    latency_ms: float | None = None
    """Predicted by the latency table, milliseconds a step; None without a table."""
    predicted_nll: float
    """Held-out loss if sensitivities added up, nats per token."""
    nll: float | None = None
    """Held-out loss as evaluated; None if it was only predicted."""
    kl: float | None = None
    """KL(full ‖ Subnet) on the same tokens, nats per token."""
    healed_nll: float | None = None
    """Held-out loss after short healing; None if it was not healed."""

    def excess(self, limits: Limits) -> dict[str, float]:
        """By limit that is set (``total``, ``active``, ``latency``): how far above it, as a share of it; 0 or less fits."""
        pairs = {
            "total": (self.total_share, limits.max_total),
            "active": (self.active_share, limits.max_active),
            "latency": (self.latency_ms, limits.max_latency_ms),
        }
        found = {}
        for name, (value, limit) in pairs.items():
            if limit is not None:
                assert value is not None, f"a limit on {name}, and nothing known about it"
                found[name] = (
                    value - limit
                ) / limit  # a difference of floats has the right sign, a ratio less 1 may not
        return found

    def fits(self, limits: Limits) -> bool:
        return all(over <= 0 for over in self.excess(limits).values())

    def objectives(self, third: Third) -> tuple[float, float, float]:
        """Best known loss before healing, total share, and active share or latency; all the smaller the better."""
        loss = self.predicted_nll if self.nll is None else self.nll
        last = self.latency_ms if third == "latency" else self.active_share
        assert last is not None, "latency is an objective and there is no latency table"
        return loss, self.total_share, last


class SearchSpace(Config):
    """The choices. Layers that are never dropped stay in every Subnet; k is one number for all layers, as exports need."""

    droppable: tuple[int, ...]
    """Layers that may be left out."""
    experts: tuple[int, ...]
    """Expert counts a layer may keep, rising."""
    top_k: tuple[int, ...]
    """Values of k, rising; a layer with fewer experts takes all of them."""
    layers: Literal["nested", "free"] = "free"
    """``nested``: the first so many of the layer order; ``free``: any of the droppable layers may go."""
    widths: Literal["uniform", "per_layer"] = "uniform"
    """``per_layer``: counts may differ by layer, which not every export family can express."""

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
        """The space of ``config``: all layers but the first and last two, eighths of the experts and every trained width, all k."""
        total = config.num_experts
        eighths = range(max(1, total // 8), total + 1, max(1, total // 8))
        experts = sorted(num for num in {*config.widths, *eighths, total} if num >= min(config.top_k, 2))
        return SearchSpace(
            droppable=droppable_layers(config),
            experts=tuple(experts),
            top_k=tuple(range(1, config.top_k + 1)),
            layers=layers,
            widths=widths,
        )

    def subnet(self, config: ModelConfig, dropped: Sequence[int], experts: Sequence[int], top_k: int) -> Subnet:
        """The Subnet without ``dropped``, with ``experts[row]`` experts in each MoE row of the maximum network."""
        layers = tuple(layer for layer in range(config.num_layers) if layer not in dropped)
        rows = [row for row, layer in enumerate(config.moe_layers) if layer not in dropped]
        kept = tuple(min(experts[row], config.experts_by_layer[row]) for row in rows)
        limits = [min(num, config.top_k_by_layer[row]) for num, row in zip(kept, rows, strict=True)]
        k = min((top_k, *limits))  # one k for all layers: an exported sub-model has only one
        return Subnet(layers=layers, experts=kept, top_k=(k,) * len(rows))

    def drops(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Which layers go as ever more are dropped, following ``order`` (first kept to first dropped) backwards."""
        falling = [layer for layer in reversed(order) if layer in self.droppable]
        return [tuple(sorted(falling[:num])) for num in range(len(falling) + 1)]

    def grid(self, config: ModelConfig, order: Sequence[int] | None = None) -> Iterator[Subnet]:
        """Every Subnet with equal widths whose layers follow ``order``; None: the network's nested order.

        It holds the smallest Subnet of the space, so it decides what is feasible.
        """
        for dropped in self.drops(order or config.layer_ranking):
            for num in self.experts:
                for k in self.top_k:
                    if k <= num:
                        yield self.subnet(config, dropped, (num,) * config.num_moe_layers, k)


class Sizes:
    """Shares of the full network, counted once."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.full = count(config, config.full())

    def candidate(
        self, subnet: Subnet, predicted_nll: float, latency_ms: float | None, name: str | None = None
    ) -> Candidate:
        own = count(self.config, subnet)
        return Candidate(
            subnet=subnet,
            name=name,
            total_params=own.total_params,
            active_params=own.active_params,
            total_share=own.total_params / self.full.total_params,
            active_share=own.active_params / self.full.active_params,
            latency_ms=latency_ms,
            predicted_nll=predicted_nll,
        )


def require_feasible(candidates: Sequence[Candidate], limits: Limits) -> None:
    """Raise unless one of ``candidates`` meets ``limits``.

    Raises:
        UserError: none does; names the nearest one (least summed excess), what it reaches and what to raise.
    """
    if any(candidate.fits(limits) for candidate in candidates):
        return

    def excess(candidate: Candidate) -> float:
        return sum(max(0.0, over) for over in candidate.excess(limits).values())

    nearest = min(candidates, key=excess)
    reached = {
        "total": f"{nearest.total_share:.3g}",
        "active": f"{nearest.active_share:.3g}",
        "latency": f"{nearest.latency_ms:.3g} ms" if nearest.latency_ms is not None else "",
    }
    asked = {"total": limits.max_total, "active": limits.max_active, "latency": limits.max_latency_ms}
    flags = {"total": "--max-total", "active": "--max-active", "latency": "--max-latency-ms"}
    broken = [name for name, over in nearest.excess(limits).items() if over > 0]
    set_limits = [name for name, limit in asked.items() if limit is not None]
    under = " and ".join(f"{name} {asked[name]:g}{' ms' if name == 'latency' else ''}" for name in set_limits)
    at = ", ".join(f"{name} {reached[name]}" for name in set_limits)
    choice = (
        f"layers={len(nearest.subnet.layers)},experts={_one(nearest.subnet.experts)},top_k={_one(nearest.subnet.top_k)}"
    )
    raise UserError(
        f"limits: nothing fits under {under}; the nearest is {choice} at {at}; "
        f"raise {' and '.join(flags[name] for name in broken)}"
    )


def _one(values: tuple[int, ...]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low}-{high}"
