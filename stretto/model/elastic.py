"""Extraction of a Subnet from a maximum network, and the balance of expert load.

Shape letters: W branches of balance state, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from stretto.model.spec import ModelConfig, Subnet, extracted_config, kept_experts
from stretto.model.transformer import MoeLayer, Transformer


def slice_state(config: ModelConfig, subnet: Subnet, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the ordinary network that ``subnet`` is inside ``config``.

    Drops layers, and keeps of each MoE layer the first experts of its order, their router rows and the balance bias
    that was trained at that width. Tensors are copies.
    """
    target = extracted_config(config, subnet)
    kept_of = {
        config.moe_layers[row]: (num, kept_experts(config.expert_orders[row], num))
        for row, num in zip(config.moe_rows(subnet.layers), subnet.experts, strict=True)
    }
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.startswith("blocks."):
            result[name] = tensor.clone()
            continue
        _, index, rest = name.split(".", 2)
        layer = int(index)
        if layer not in subnet.layers:
            continue
        if rest in EXPERT_TENSORS and layer in kept_of:
            num, experts = kept_of[layer]
            kept = torch.tensor(experts, device=tensor.device)
            if rest == "mlp.bias_WE":
                branches = [config.branch(width) for width in (num, *target.widths[1:])]
                tensor = tensor[torch.tensor(branches, device=tensor.device)][:, kept]
            else:
                tensor = tensor.index_select(0, kept)
        result[f"blocks.{subnet.layers.index(layer)}.{rest}"] = tensor.clone()
    return result


EXPERT_TENSORS = (
    "mlp.gate", "mlp.gate_bias", "mlp.gate_up", "mlp.gate_up_bias", "mlp.down", "mlp.down_bias", "mlp.bias_WE",
)  # fmt: skip
"""Names, inside an MoE block, of what has one row (or column) an expert."""


def extract(model: Transformer, subnet: Subnet) -> Transformer:
    """``subnet`` as an ordinary network of its own (weights copied, same device and dtype)."""
    smaller = Transformer(extracted_config(model.config, subnet))
    # assigned, not copied: each tensor keeps its own dtype, and fp32 biases stay so beside bf16 weights
    smaller.load_state_dict(slice_state(model.config, subnet, model.state_dict()), assign=True)
    return smaller.to(device=next(model.parameters()).device)


def with_branch_rows(
    config: ModelConfig, wider: ModelConfig, state: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """``state`` of ``config`` for ``wider``, the same network with more branches of balance state: a new width begins as a copy
    of the smallest old one that holds it, a complement as one of the full width's.
    """
    rows = [config.branch(width) for width in wider.widths]
    rows += [0] * (wider.num_branches - len(rows))
    for name, tensor in state.items():
        yield name, tensor[rows] if name.endswith(".bias_WE") else tensor


def order_experts(model: Transformer, orders: tuple[tuple[int, ...], ...]) -> None:
    """Let ``orders`` be the nested orders of the experts of ``model``, in place: which of them narrower Subnets keep."""
    model.config = model.config.replace(expert_order=orders)
    layers = (block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer))
    for layer, order in zip(layers, orders, strict=True):
        layer.set_order(order, layer.rank_E.device)


@torch.no_grad()
def update_balance(model: Transformer, counts: dict[int, Tensor], rate: float) -> None:
    """Auxiliary-loss-free balancing (2408.15664): raise the bias of experts below the mean load, lower the others.

    ``counts`` are the slots of one whole optimisation step (all micro-batches, all ranks), by MoE row. Each width has
    a bias of its own and is steered by its own tokens over its own experts: one bias for all widths would be pulled in
    opposite directions. A branch that saw no token in the step is left alone.
    """
    config = model.config
    if not config.selection_bias or rate == 0.0:
        return
    layers = [block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer)]
    for row, counts_WE in counts.items():
        layer = layers[row]
        # a width steers its prefix; a branch beyond the widths, the complement of the largest narrower width
        prefixes = [layer.rank_E < width for width in config.widths]
        complement = [layer.rank_E >= (config.widths[1] if len(config.widths) > 1 else 0)]
        allowed_WE = torch.stack(prefixes + complement * (config.num_branches - len(prefixes)))
        load_WE = counts_WE.float() * allowed_WE
        mean_W1 = load_WE.sum(1, keepdim=True) / allowed_WE.sum(1, keepdim=True)
        step_WE = rate * torch.sign(mean_W1 - load_WE) * allowed_WE
        layer.bias_WE += torch.where(mean_W1 > 0, step_WE, 0.0)


def load_balance(counts_E: Tensor) -> float:
    """Largest load over the mean load of the experts that may be chosen: 1.0 is perfect balance."""
    return float(counts_E.max() / counts_E.float().mean().clamp_min(1e-9))
