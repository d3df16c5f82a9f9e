"""Which layers and experts matter: rankings, new nested orders, and what each axis costs on held-out loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field

from stretto.base.config import Config
from stretto.base.track import progress
from stretto.evals.loss import EvalBatch, compare_many, evaluate_many
from stretto.evals.routing import routing
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Transformer


def fixed_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that are never dropped: the first and the last two."""
    return tuple(sorted({0, 1, num_layers - 2, num_layers - 1} & set(range(num_layers))))


def droppable_layers(config: ModelConfig) -> tuple[int, ...]:
    fixed = fixed_layers(config.num_layers)
    return tuple(layer for layer in range(config.num_layers) if layer not in fixed)


@dataclass(frozen=True, slots=True)
class LayerRanking:
    """Importance of the layers, each measured by leaving it out of the full network."""

    order: tuple[int, ...]
    """Layers from first kept to first dropped: fits `ModelConfig.layer_order`."""
    logit_error: dict[int, float]
    """By layer that may be dropped: normalised mean squared error of the final logits without it."""
    loss_increase: dict[int, float]
    """By layer that may be dropped: held-out loss without it minus the full network's, nats per token."""


def rank_layers(
    model: Transformer, batches: Sequence[EvalBatch], *, autocast: torch.dtype | None = None
) -> LayerRanking:
    """Rank layers by leave-one-out normalised MSE on the final logits (Nemotron Elastic, 2511.16664).

    The first and last two layers come first, whatever their error.
    """
    config = model.config
    layers = droppable_layers(config)
    subnets = [config.full(), *(without_layers(config, {layer}) for layer in layers)]
    with progress("rank layers", len(subnets) * len(batches)) as advance:
        full, *reports = compare_many(model, subnets, batches, autocast=autocast, advance=advance)
    errors = {layer: _present(report.logit_error) for layer, report in zip(layers, reports, strict=True)}
    return LayerRanking(
        order=(*fixed_layers(config.num_layers), *sorted(layers, key=lambda layer: (-errors[layer], layer))),
        logit_error=errors,
        loss_increase={layer: report.nll - full.nll for layer, report in zip(layers, reports, strict=True)},
    )


def rank_experts(
    model: Transformer, batches: Sequence[EvalBatch], *, autocast: torch.dtype | None = None
) -> tuple[tuple[int, ...], ...]:
    """Per MoE layer, experts from the most to the least salient (REAP): fits `ModelConfig.expert_order`."""
    with progress("rank experts", len(batches)) as advance:
        layers = routing(model, model.config.full(), batches, autocast=autocast, advance=advance)
    return tuple(
        tuple(sorted(range(len(layer.saliency)), key=lambda expert: (-layer.saliency[expert], expert)))
        for layer in layers
    )


def without_layers(config: ModelConfig, dropped: set[int]) -> Subnet:
    """The full network less some layers."""
    kept = tuple(layer for layer in range(config.num_layers) if layer not in dropped)
    rows = [row for row, layer in enumerate(config.moe_layers) if layer not in dropped]
    return Subnet(
        layers=kept,
        experts=tuple(config.experts_by_layer[row] for row in rows),
        top_k=tuple(config.top_k_by_layer[row] for row in rows),
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
    autocast: torch.dtype | None = None,
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
        reports = evaluate_many(model, list(subnets.values()), batches, autocast=autocast, advance=advance)
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


def _present(value: float | None) -> float:
    assert value is not None
    return value
