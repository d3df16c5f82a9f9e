"""Which layers and experts matter: rankings, new nested orders, and what each axis costs on held-out loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import Field

from stretto.base.config import Config
from stretto.base.track import progress
from stretto.evals.loss import EvalBatch, evaluate_many, without_layers
from stretto.evals.routing import routing
from stretto.model.spec import ModelConfig, Subnet, droppable_layers, fixed_layers
from stretto.model.transformer import Transformer


def rank_experts(model: Transformer, batches: Sequence[EvalBatch]) -> tuple[tuple[int, ...], ...]:
    """Per MoE layer, experts from the most to the least salient (REAP): fits `ModelConfig.expert_order`."""
    with progress("rank experts", len(batches)) as advance:
        layers = routing(model, model.config.full(), batches, advance=advance)
    return tuple(
        tuple(sorted(range(len(layer.saliency)), key=lambda expert: (-layer.saliency[expert], expert)))
        for layer in layers
    )


class Sensitivities(Config):
    """Increase of the held-out loss over the full network's (nats per token) for one change at a time."""

    full_nll: float
    """Loss of the full network, nats per token."""
    drop: dict[int, float]
    """By layer left out alone."""
    depth: dict[int, float]
    """By number of layers kept, in the nested order."""
    experts: dict[int, float]
    """By number of experts kept in all MoE layers."""
    top_k: dict[int, float]
    """By k of all MoE layers."""
    experts_by_row: dict[int, dict[int, float]] = Field(default_factory=dict)
    """By MoE row and experts kept in that layer alone; empty where it was not asked for."""
    top_k_by_row: dict[int, dict[int, float]] = Field(default_factory=dict)
    """By MoE row and k of that layer alone; empty where it was not asked for."""

    def predict(self, config: ModelConfig, subnet: Subnet) -> float:
        """Held-out loss of ``subnet`` if the changes added up.

        A choice that was measured on its own axis is met exactly; another choice of layers, or counts that differ by
        layer, move away from it by the differences of the single-layer measurements.
        """
        kept = set(subnet.layers)
        nested = set(config.layer_ranking[: len(kept)])
        depth = _interpolate(self.depth, len(kept))
        depth += sum(self.drop.get(layer, 0.0) for layer in nested - kept)
        depth -= sum(self.drop.get(layer, 0.0) for layer in kept - nested)
        rows = [row for row, layer in enumerate(config.moe_layers) if layer in kept]
        num_rows = config.num_moe_layers
        return (
            self.full_nll
            + depth
            + _axis(self.experts, self.experts_by_row, rows, subnet.experts, num_rows)
            + _axis(self.top_k, self.top_k_by_row, rows, subnet.top_k, num_rows)
        )


def measure_sensitivities(
    model: Transformer,
    batches: Sequence[EvalBatch],
    experts: Sequence[int],
    top_ks: Sequence[int],
    *,
    each_layer: bool = False,
) -> Sensitivities:
    """Measure every depth of the nested order, every layer left out, and the given expert counts and k.

    Args:
        experts, top_ks: the counts to measure; the full ones are known to cost nothing.
        each_layer: also measure them in one MoE layer at a time, which takes as many times longer.
    """
    config = model.config
    subnets: dict[tuple[str, int, int], Subnet] = {("full", 0, 0): config.full()}
    for layer in droppable_layers(config):
        subnets["drop", layer, 0] = without_layers(config, {layer})
    for depth in range(len(fixed_layers(config.num_layers)), config.num_layers):
        subnets["depth", depth, 0] = config.subnet(depth=depth)
    rows = range(config.num_moe_layers)
    everywhere = set(rows)
    for name, counts in (("experts", experts), ("top_k", top_ks)):
        for num in counts:
            subnets[name, num, 0] = narrowed(config, name, everywhere, num)
            if each_layer:
                subnets |= {(f"{name}_by_row", num, row): narrowed(config, name, {row}, num) for row in rows}
    with progress("sensitivities", len(subnets) * len(batches)) as advance:
        reports = evaluate_many(model, list(subnets.values()), batches, advance=advance)
    full_nll = reports[0].nll
    increase = {key: report.nll - full_nll for key, report in zip(subnets, reports, strict=True)}

    def axis(name: str, full: Mapping[int, float]) -> dict[int, float]:
        return {**full, **{num: value for (axis, num, _), value in increase.items() if axis == name}}

    def by_row(name: str, full: Sequence[int]) -> dict[int, dict[int, float]]:
        found = {(num, row): value for (axis, num, row), value in increase.items() if axis == name}
        return {
            row: {full[row]: 0.0} | {num: v for (num, at), v in found.items() if at == row} for row in rows if found
        }

    return Sensitivities(
        full_nll=full_nll,
        drop=axis("drop", {}),
        depth=axis("depth", {config.num_layers: 0.0}),
        experts=axis("experts", {config.num_experts: 0.0}),
        top_k=axis("top_k", {config.top_k: 0.0}),
        experts_by_row=by_row("experts_by_row", config.experts_by_layer),
        top_k_by_row=by_row("top_k_by_row", config.top_k_by_layer),
    )


def narrowed(config: ModelConfig, axis: str, rows: set[int], num: int) -> Subnet:
    """The full network with ``num`` experts (or top-``num``) in the MoE layers ``rows``; k never exceeds the experts."""
    full = config.full()
    counts = {
        name: tuple(min(num, value) if name == axis and row in rows else value for row, value in enumerate(values))
        for name, values in (("experts", full.experts), ("top_k", full.top_k))
    }
    top_k = tuple(min(pair) for pair in zip(counts["experts"], counts["top_k"], strict=True))
    return Subnet(layers=full.layers, experts=counts["experts"], top_k=top_k)


def _axis(
    uniform: Mapping[int, float],
    by_row: Mapping[int, Mapping[int, float]],
    rows: Sequence[int],
    counts: Sequence[int],
    num_rows: int,
) -> float:
    """Each kept layer's even share of the uniform cost, plus how much that layer differs from the average layer."""
    total = 0.0
    for row, num in zip(rows, counts, strict=True):
        total += _interpolate(uniform, num) / num_rows
        if by_row:
            own = {at: _interpolate(values, num) for at, values in by_row.items()}
            total += own[row] - sum(own.values()) / len(own)
    return total


def _interpolate(values: Mapping[int, float], at: int) -> float:
    if at in values:
        return values[at]
    known = sorted(values)
    return float(np.interp(at, known, [values[num] for num in known]))
