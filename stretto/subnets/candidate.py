"""Candidates of a search: their costs, predicted and measured losses, and the limits that they must meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.model.counts import count
from stretto.model.spec import ModelConfig, Subnet
from stretto.subnets.latency import LatencyTable, Workload
from stretto.subnets.sensitivity import Sensitivities

Third = Literal["active", "latency"]
"""Third objective beside loss and total parameters."""


class Limits(Config):
    """Limits that a chosen Subnet must meet, all at once; None: no limit."""

    max_total: float | None = Field(default=None, gt=0, le=1)
    """Total parameters (memory), as a share of the full network's."""
    max_active: float | None = Field(default=None, gt=0, le=1)
    """Active parameters (compute), as a share of the full network's."""
    max_latency_ms: float | None = Field(default=None, gt=0)
    """Milliseconds per step on the machine of the latency table."""

    def asked(self) -> dict[str, float]:
        """The limits that are set, by ``total``, ``active`` and ``latency``."""
        limits = {"total": self.max_total, "active": self.max_active, "latency": self.max_latency_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}


class Candidate(Config):
    """A Subnet with its cost and its losses."""

    subnet: Subnet
    name: str | None = None
    """Name of the preset, if it is one."""
    total_params: int
    active_params: int
    total_share: float
    """Of the full network's total parameters."""
    active_share: float
    """Of the full network's active parameters."""
    latency_ms: float | None = None
    """Milliseconds per step, predicted by the latency table; None without a table."""
    predicted_nll: float
    """Held-out loss predicted from sensitivities, nats per token."""
    nll: float | None = None
    """Evaluated held-out loss, nats per token; None if not evaluated."""
    kl: float | None = None
    """KL(full ‖ Subnet) on the same tokens, nats per token."""
    healed_nll: float | None = None
    """Held-out loss after short healing; None if not healed."""

    def excess(self, limits: Limits) -> dict[str, float]:
        """By limit that is set: relative amount by which it is exceeded; 0 or less if it is met."""
        costs = {"total": self.total_share, "active": self.active_share, "latency": self.latency_ms}
        excess = {}
        for name, limit in limits.asked().items():
            cost = costs[name]
            assert cost is not None, f"a limit on {name}, but no value for it"
            # the difference has the right sign in floats, cost / limit - 1 may not
            excess[name] = (cost - limit) / limit
        return excess

    def fits(self, limits: Limits) -> bool:
        return all(over <= 0 for over in self.excess(limits).values())

    def objectives(self, third: Third) -> tuple[float, float, float]:
        """Loss before healing (evaluated if known), total share, and active share or latency. Smaller is better."""
        loss = self.predicted_nll if self.nll is None else self.nll
        last = self.latency_ms if third == "latency" else self.active_share
        assert last is not None, "latency is an objective, but there is no latency table"
        return loss, self.total_share, last


def require_feasible(candidates: Sequence[Candidate], limits: Limits) -> None:
    """Raise `UserError` if no candidate meets ``limits``. The message names the nearest one (smallest summed excess), its values, and the
    limits to raise.
    """
    if any(candidate.fits(limits) for candidate in candidates):
        return

    def excess(candidate: Candidate) -> float:
        return sum(max(0.0, over) for over in candidate.excess(limits).values())

    nearest = min(candidates, key=excess)
    values = {"total": nearest.total_share, "active": nearest.active_share, "latency": nearest.latency_ms}
    flags = {"total": "--max-total", "active": "--max-active", "latency": "--max-latency-ms"}
    units, asked, subnet = {"latency": " ms"}, limits.asked(), nearest.subnet
    under = " and ".join(f"{name} {limit:g}{units.get(name, '')}" for name, limit in asked.items())
    at = ", ".join(f"{name} {values[name]:.3g}{units.get(name, '')}" for name in asked)
    exceeded = " and ".join(flags[name] for name, over in nearest.excess(limits).items() if over > 0)
    choice = f"layers={len(subnet.layers)},experts={_range(subnet.experts)},top_k={_range(subnet.top_k)}"
    raise UserError(f"limits: nothing fits under {under}; the nearest is {choice} at {at}; raise {exceeded}")


def _range(values: tuple[int, ...]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low}-{high}"


class Scorer:
    """Sizes and predicted losses of candidates. Each Subnet is computed once."""

    def __init__(self, config: ModelConfig, table: LatencyTable | None, workload: Workload | None):
        self.config = config
        self.sensitivities: Sensitivities | None = None
        """Set once measured; sizes need none."""
        self._table, self._workload = table, workload
        self._full = count(config, config.full())
        self._scored: dict[Subnet, Candidate] = {}

    def sized(self, subnet: Subnet, predicted_nll: float = float("nan"), name: str | None = None) -> Candidate:
        """``subnet`` with its size and latency."""
        latency_ms = None
        if self._table is not None:
            assert self._workload is not None
            latency_ms = self._table.predict_ms(subnet, self._workload)
        size = count(self.config, subnet)
        return Candidate(
            subnet=subnet,
            name=name,
            total_params=size.total_params,
            active_params=size.active_params,
            total_share=size.total_params / self._full.total_params,
            active_share=size.active_params / self._full.active_params,
            latency_ms=latency_ms,
            predicted_nll=predicted_nll,
        )

    def score(self, subnet: Subnet, name: str | None = None) -> Candidate:
        """``subnet`` with size and predicted loss. ``name`` is used only if the Subnet is new."""
        if subnet not in self._scored:
            assert self.sensitivities is not None, "sensitivities must be measured before scoring"
            self._scored[subnet] = self.sized(subnet, self.sensitivities.predict(self.config, subnet), name)
        return self._scored[subnet]

    def all(self) -> list[Candidate]:
        """All scored candidates, oldest first."""
        return list(self._scored.values())


def pareto_front(points: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Indices of the points that no other point dominates (nowhere larger, somewhere smaller), in order."""
    front = np.empty((0, len(points[0]) if points else 0))
    kept = []
    # in sorted order no point is beaten by a later one, so each is compared with the current front only
    for index in sorted(range(len(points)), key=lambda index: tuple(points[index])):
        point = np.asarray(points[index], dtype=np.float64)
        if not ((front <= point).all(axis=1) & (front < point).any(axis=1)).any():
            front = np.vstack([front, point])
            kept.append(index)
    return tuple(sorted(kept))
