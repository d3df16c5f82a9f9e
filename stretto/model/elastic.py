"""Extraction of a Subnet from a maximum network, and balancing of expert load.

Shape letters: W branches of balance state, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stretto.model.spec import ModelConfig, Subnet, extracted_config, kept_experts
from stretto.model.transformer import MoeLayer, Transformer, skeleton
from stretto.ops.int_weights import IntWeight


def slice_state(config: ModelConfig, subnet: Subnet, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the ordinary network that is extracted as ``subnet``, from that of ``config``. Tensors are copies.

    Each MoE layer keeps the first experts of its order, their router rows and the balance bias of that width.
    """
    target = extracted_config(config, subnet)
    experts_of = {
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
        if rest in EXPERT_TENSORS and layer in experts_of:
            num, experts = experts_of[layer]
            if rest == "mlp.bias_WE":
                tensor = tensor[[config.branch(width) for width in (num, *target.widths[1:])]]
            tensor = tensor.index_select(
                -1 if rest == "mlp.bias_WE" else 0, torch.tensor(experts, device=tensor.device)
            )
        result[f"blocks.{subnet.layers.index(layer)}.{rest}"] = tensor.clone()
    return result


def slice_integers(config: ModelConfig, subnet: Subnet, integers: Mapping[str, IntWeight]) -> dict[str, IntWeight]:
    """The integer weights of the ordinary network that is extracted as ``subnet``, by `slice_state`."""
    result: dict[str, IntWeight] = {}
    for bits in {weight.bits for weight in integers.values()}:
        weights = {name: weight for name, weight in integers.items() if weight.bits == bits}
        zeros = {name: weight.zeros for name, weight in weights.items() if weight.zeros is not None}
        codes = {name: weight.codes for name, weight in weights.items()}
        scales = {name: weight.scales for name, weight in weights.items()}
        codes, scales, zeros = (slice_state(config, subnet, tensors) for tensors in (codes, scales, zeros))
        result |= {name: IntWeight(codes[name], scales[name], zeros.get(name), bits) for name in codes}
    return result


EXPERT_TENSORS = (
    "mlp.gate", "mlp.gate_bias", "mlp.gate_up", "mlp.gate_up_bias", "mlp.down", "mlp.down_bias", "mlp.bias_WE",
)  # fmt: skip
"""Names, within an MoE block, of the tensors with one row (for biases of selection: column) per expert."""


def extract(model: Transformer, subnet: Subnet) -> Transformer:
    """``subnet`` of ``model`` as an ordinary network, with copied weights on the same device and in the same dtype."""
    smaller = skeleton(extracted_config(model.config, subnet))
    # assign, so that each tensor keeps its dtype (selection biases are fp32 beside bf16 weights) and its device (meta for a weight
    # without values)
    smaller.load_state_dict(slice_state(model.config, subnet, model.state_dict()), assign=True)
    _set_orders(smaller, smaller.config.expert_orders, next(model.parameters()).device)
    return smaller


def with_branch_rows(
    config: ModelConfig, wider: ModelConfig, state: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Convert the state dict of ``config`` for ``wider``, the same network with more branches of balance state.

    The bias of a new width is copied from the smallest old width that is large enough, that of a complement from the full width.
    """
    if (config.widths, config.num_branches) == (wider.widths, wider.num_branches):
        rows = list(range(config.num_branches))  # also keeps the biases of complements
    else:
        rows = [config.branch(width) for width in wider.widths]
        rows += [0] * (wider.num_branches - len(rows))
    for name, tensor in state:
        yield name, tensor[rows] if name.endswith(".bias_WE") else tensor


def order_experts(model: Transformer, orders: tuple[tuple[int, ...], ...]) -> None:
    """Set, in place, the nested orders of the experts of ``model``, which decide the experts that smaller Subnets keep."""
    model.config = model.config.replace(expert_order=orders)
    _set_orders(model, orders, model.embedding.weight.device)


def _set_orders(model: Transformer, orders: Sequence[tuple[int, ...]], device: torch.device) -> None:
    layers = (block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer))
    for layer, order in zip(layers, orders, strict=True):
        layer.set_order(order, device)


@torch.no_grad()
def update_balance(model: Transformer, counts: dict[int, Tensor], rate: float) -> None:
    """Balance expert load without auxiliary loss (2408.15664): raise the bias of experts below the mean load, lower the others.

    ``counts``: slots per expert of one optimisation step (all micro-batches, all ranks), by MoE row. Each width has a bias of its own,
    updated from its own tokens and experts, because one bias for all widths would be pulled in opposite directions. Branches
    without tokens in this step do not change.
    """
    config = model.config
    if not config.selection_bias or rate == 0.0:
        return
    layers = [block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer)]
    for row, counts_WE in counts.items():
        layer = layers[row]
        # a width balances its prefix of the order; a branch beyond the widths, the complement of the second width
        prefixes = [layer.rank_E < width for width in config.widths]
        complement = [layer.rank_E >= (config.widths[1] if len(config.widths) > 1 else 0)]
        allowed_WE = torch.stack(prefixes + complement * (config.num_branches - len(prefixes)))
        load_WE = counts_WE.float() * allowed_WE
        mean_W1 = load_WE.sum(1, keepdim=True) / allowed_WE.sum(1, keepdim=True)
        step_WE = rate * torch.sign(mean_W1 - load_WE) * allowed_WE
        layer.bias_WE += torch.where(mean_W1 > 0, step_WE, 0.0)


def load_balance(counts_E: Tensor) -> float:
    """Largest load divided by the mean load of the experts: 1.0 is perfect balance."""
    return float(counts_E.max() / counts_E.float().mean().clamp_min(1e-9))
