"""How much each single change of the full network raises its held-out loss, and the prediction of any Subnet's loss from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import Field

from stretto.base.config import Config
from stretto.base.track import progress
from stretto.evals.loss import EvalBatch, evaluate_many, without_layers
from stretto.model.spec import ModelConfig, Subnet, droppable_layers, fixed_layers
from stretto.model.transformer import Transformer
from stretto.ops.tuning import rough_products

DEPTHS = 8
"""Largest number of measured depths; the losses between are interpolated, since in a deep network they change smoothly (ours)."""


class Sensitivities(Config):
    """Increase of the held-out loss over the full network's (nats per token), for one change at a time."""

    full_nll: float
    """Loss of the full network, nats per token."""
    drop: dict[int, float]
    """By layer, if it alone is dropped."""
    depth: dict[int, float]
    """By number of layers, in the nested order."""
    experts: dict[int, float]
    """By number of experts in all MoE layers."""
    top_k: dict[int, float]
    """By top-k of all MoE layers."""
    experts_by_row: dict[int, dict[int, float]] = Field(default_factory=dict)
    """By MoE row and number of experts in that layer alone; empty if not measured."""
    top_k_by_row: dict[int, dict[int, float]] = Field(default_factory=dict)
    """By MoE row and top-k of that layer alone; empty if not measured."""

    def predict(self, config: ModelConfig, subnet: Subnet) -> float:
        """Predicted held-out loss of ``subnet``: the sum of the measured changes.

        Changes on one axis that were measured together (nested depths, equal widths, equal top-k) use that measurement. Other layers,
        or counts that differ by layer, are corrected by the differences between the single-layer measurements.
        """
        kept = set(subnet.layers)
        nested = set(config.layer_ranking[: len(kept)])
        depth = _interpolated(self.depth, len(kept))
        depth += sum(self.drop.get(layer, 0.0) for layer in nested - kept)
        depth -= sum(self.drop.get(layer, 0.0) for layer in kept - nested)
        rows = config.moe_rows(kept)
        experts = _axis(self.experts, self.experts_by_row, rows, subnet.experts, config.experts_by_layer)
        top_k = _axis(self.top_k, self.top_k_by_row, rows, subnet.top_k, config.top_k_by_layer)
        return self.full_nll + depth + experts + top_k


def measure_sensitivities(
    model: Transformer,
    batches: Sequence[EvalBatch],
    experts: Sequence[int],
    top_ks: Sequence[int],
    *,
    each_layer: bool = False,
) -> Sensitivities:
    """Measure the loss without each layer, for the given numbers of experts and k, and for depths of the nested order (at most `DEPTHS`).

    Args:
        experts, top_ks: values to measure; the full ones cost nothing by definition.
        each_layer: also measure them in one MoE layer at a time, which multiplies the time by the number of layers.
    """
    config = model.config
    subnets: dict[tuple[str, int, int], Subnet] = {("full", 0, 0): config.full()}
    for layer in droppable_layers(config):
        subnets["drop", layer, 0] = without_layers(config, {layer})
    depths = range(len(fixed_layers(config.num_layers)), config.num_layers)
    for place in np.linspace(0, len(depths) - 1, min(len(depths), DEPTHS)).round().astype(int):
        subnets["depth", depths[place], 0] = config.subnet(depth=depths[place])
    rows = range(config.num_moe_layers)
    everywhere = set(rows)
    for name, counts in (("experts", experts), ("top_k", top_ks)):
        for num in counts:
            subnets[name, num, 0] = narrowed(config, name, everywhere, num)
            if each_layer:
                subnets |= {(f"{name}_by_row", num, row): narrowed(config, name, {row}, num) for row in rows}
    rough = rough_products(model.head_VD.device, config.hidden_size)
    with progress("sensitivities", len(subnets) * len(batches)) as advance, rough:
        reports = evaluate_many(model, list(subnets.values()), batches, advance=advance)
    full_nll = reports[0].nll
    increase = {key: report.nll - full_nll for key, report in zip(subnets, reports, strict=True)}

    def axis(name: str, full: Mapping[int, float]) -> dict[int, float]:
        return {**full, **{num: value for (axis, num, _), value in increase.items() if axis == name}}

    def by_row(name: str, full: Sequence[int]) -> dict[int, dict[int, float]]:
        values: dict[int, dict[int, float]] = {}
        for (axis, num, row), value in increase.items():
            if axis == name:
                values.setdefault(row, {full[row]: 0.0})[num] = value
        return values

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
    """The full network with at most ``num`` experts (or top-``num``) in the MoE layers ``rows``.

    k never exceeds the number of choosable experts.
    """
    full = config.full()
    counts = {
        name: tuple(min(num, value) if name == axis and row in rows else value for row, value in enumerate(values))
        for name, values in (("experts", full.experts), ("top_k", full.top_k))
    }
    top_k = tuple(min(config.choosable(kept), k) for kept, k in zip(counts["experts"], counts["top_k"], strict=True))
    return Subnet(layers=full.layers, experts=counts["experts"], top_k=top_k)


def _axis(
    uniform: Mapping[int, float],
    by_row: Mapping[int, Mapping[int, float]],
    rows: Sequence[int],
    counts: Sequence[int],
    full: Sequence[int],
) -> float:
    """Cost of the counts on one axis; ``full`` are those of all rows of the full network. A row with fewer than its own has an even share
    of the uniform cost, plus its deviation from the mean, of the rows with more in the full network, which are those that were narrowed.
    """
    total = 0.0
    for row, num in zip(rows, counts, strict=True):
        if num < full[row]:
            narrowed = [at for at, own in enumerate(full) if num < own]
            total += _interpolated(uniform, num) / len(narrowed)
            if by_row:
                costs = {at: _interpolated(by_row[at], num) for at in narrowed}
                total += costs[row] - sum(costs.values()) / len(costs)
    return total


def _interpolated(values: Mapping[int, float], at: int) -> float:
    if at in values:
        return values[at]
    measured = sorted(values)
    return float(np.interp(at, measured, [values[num] for num in measured]))
