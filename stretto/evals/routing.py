"""Where tokens go: load and saliency of every expert over held-out batches.

Shape letters: B rows, T positions, N = B·T tokens, K chosen, S = N·K slots, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.evals.loss import EvalBatch
from stretto.model.spec import Subnet, check_subnet
from stretto.model.transformer import MoeLayer, RowWidths, Transformer
from stretto.ops.grouped import group_slots, grouped_swiglu


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Routing of one MoE layer over real tokens (padding excluded)."""

    row: int
    """Place of the layer among the MoE layers of the maximum network."""
    load: tuple[int, ...]
    """How many times each expert was chosen."""
    saliency: tuple[float, ...]
    """Mean over the tokens routed to an expert of gate · length of its output; 0 for one never chosen."""


@torch.no_grad()
def routing(
    model: Transformer,
    subnet: Subnet,
    batches: Sequence[EvalBatch],
    *,
    advance: Callable[[int], None] = lambda num: None,
) -> list[LayerRouting]:
    """Load and saliency of the experts of every kept MoE layer, in depth order.

    Saliency is REAP's S_j = mean over tokens routed to j of gate_j · ‖f_j‖₂, with the gates that weight the outputs in
    this network (renormalised over the chosen experts where the network does so). ``advance(1)`` after each batch.
    """
    check_subnet(model.config, subnet)
    kept = [mlp for layer in subnet.layers if isinstance(mlp := model.blocks[layer].mlp, MoeLayer)]
    load_E = {mlp.row: torch.zeros(len(mlp.gate), dtype=torch.int64, device=mlp.gate.device) for mlp in kept}
    weight_E = {row: torch.zeros_like(each, dtype=torch.float64) for row, each in load_E.items()}
    real_BT = torch.empty(0)  # which tokens of the batch that runs are no padding

    def observe(layer: MoeLayer, arguments: tuple[Tensor, int, int, RowWidths | None]) -> None:
        """A forward pre-hook, which sees exactly what the layer is given."""
        x_BTD, num_experts, top_k, widths = arguments
        routes, _ = layer.route(x_BTD, num_experts, top_k, widths)
        slots = group_slots(routes.chosen_NK, len(layer.gate))
        x_SD = x_BTD.flatten(0, 1)[slots.token_P]
        length_S = grouped_swiglu(x_SD, slots.ends_E, layer.gate_up, layer.down).float().norm(dim=-1)
        real_S = real_BT.reshape(-1)[slots.token_P]
        expert_S = routes.chosen_NK.reshape(-1)[slots.order_P]
        gate_S = routes.gates_NK.reshape(-1)[slots.order_P]
        load_E[layer.row].index_add_(0, expert_S, real_S.long())
        weight_E[layer.row].index_add_(0, expert_S, (gate_S * length_S * real_S).double())

    with ExitStack() as hooks:
        for mlp in kept:
            hooks.callback(mlp.register_forward_pre_hook(observe).remove)
        for batch in batches:
            real_BT = batch.real_BT
            model(batch.ids_BT, subnet, batch.ctx)
            advance(1)
    return [
        LayerRouting(row, tuple(load.tolist()), tuple((weight_E[row] / load.clamp_min(1)).tolist()))
        for row, load in load_E.items()
    ]
