"""Quantisation of a network to integer weights: rounding to nearest, and GPTQ.

GPTQ (Frantar et al., 2210.17323) quantises a weight input by input, and the inputs that follow make up for the error. The error is that of
the outputs on calibration text, so it depends on the products of the inputs, their Hessian. A routed expert has a Hessian of its own,
from the tokens that were routed to it; the inputs of its down projection are multiplied by the gates. The network is walked through
once, layer by layer, and each layer sees the outputs of the quantised layers before it, for the full network and for smaller Subnets
together, since one set of weights serves them all.

Shape letters: B matrices, F outputs, D inputs, G inputs of a group, N tokens, E experts, I expert width, K experts per token, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stretto.base.errors import UserError
from stretto.model.attention import Geometry
from stretto.model.families import Family, stored_tensors
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Context, Transformer, skeleton
from stretto.ops.grouped import Experts, group_slots, swiglu
from stretto.ops.int_weights import IntScheme, IntWeight, check_group, group_grid, nearest_codes, quantise
from stretto.ops.native.products import add_product_
from stretto.ops.operators import Operators, Routes, Weight

PARTS = ("experts", "attention", "head")
"""Parts of a network that can be quantised. ``experts`` are all feed-forward weights: routed, shared and dense."""
_PART = re.compile(
    r"blocks\.\d+\.(?P<attention>attention\.\w+\.weight)"
    r"|blocks\.\d+\.mlp\.(?P<experts>(shared\.)?(gate_up|down)(\.weight)?)"
    r"|(?P<head>head\.weight)"
)
DAMPING = 0.01
"""Share of the mean of a Hessian's diagonal that is added to the diagonal (the paper's)."""


def schemes_of(config: ModelConfig, family: Family, plan: Mapping[str, IntScheme]) -> dict[str, IntScheme]:
    """The scheme of every weight (name in the state dict) of the parts in ``plan``.

    Raises:
        UserError: a group does not divide the inputs of a weight, or ``family`` stores the experts in a form without integers.
    """
    stacked = {stored.ours for stored in stored_tensors(config, family) if stored.is_stacked}
    schemes = {}
    for name, tensor in skeleton(config).state_dict().items():
        part = part_of_weight(name)
        if part not in plan:
            continue
        if name in stacked:
            raise UserError(
                f"--{part}: {family} stores all experts of a layer as one tensor, which has no integers; add --{part} none"
            )
        check_group(plan[part].group, tensor.shape[-1], name)
        schemes[name] = plan[part]
    return schemes


def part_of_weight(name: str) -> str:
    """The part of `PARTS` that the weight ``name`` of a state dict belongs to; empty: embeddings, routers, norms and biases."""
    found = _PART.fullmatch(name)
    return "" if found is None else next(part for part in PARTS if found[part] is not None)


def untie(model: Transformer) -> None:
    """Give ``model``, in place, a head of its own with the values of the embedding: the embedding is not quantised, the head may be."""
    if model.head is not None:
        return
    model.config = model.config.replace(tie_embeddings=False)
    weight_VD = model.embedding.weight
    model.head = nn.Linear(weight_VD.shape[1], weight_VD.shape[0], bias=False, device="meta")
    model.head.weight = nn.Parameter(weight_VD.detach().clone())


def round_to_nearest(state: Mapping[str, Tensor], schemes: Mapping[str, IntScheme]) -> dict[str, IntWeight]:
    """The weights in ``schemes``, each rounded to nearest."""
    return {name: quantise(state[name], scheme) for name, scheme in schemes.items()}


class Hessians(Operators):
    """Operators that add up the Hessians of the inputs of given weights while they compute."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """``weights``: by name, the parameters of a network, [F, D] or [E, F, D]."""
        self._name_of = {id(weight): name for name, weight in weights.items()}
        self.sums = {
            name: weight.new_zeros(*weight.shape[:-2], weight.shape[-1], weight.shape[-1], dtype=torch.float32)
            for name, weight in weights.items()
        }
        """Sum of the products of the inputs, fp32 [D, D] or [E, D, D]."""

    def linear(self, x_ND: Tensor, weight: Weight, bias_F: Tensor | None = None) -> Tensor:
        self._add(weight, x_ND.flatten(0, -2))
        return super().linear(x_ND, weight, bias_F)

    def experts(self, x_ND: Tensor, routes: Routes, weights: Experts) -> Tensor:
        slots = group_slots(routes.chosen_NK, len(weights.down_EDI))
        gates_S = routes.gates_NK.flatten()[slots.order_P]
        start = 0
        for expert, end in enumerate(slots.ends_E.tolist()):
            inputs_ND = x_ND[slots.token_P[start:end]]
            self._add(weights.gate_up_EFD, inputs_ND, expert)
            if id(weights.down_EDI) in self._name_of and end > start:
                hidden_NF = inputs_ND @ weights.gate_up_EFD[expert].mT
                if weights.biases is not None:
                    hidden_NF = hidden_NF + weights.biases.gate_up_EF[expert]
                self._add(weights.down_EDI, swiglu(hidden_NF, weights.clamp) * gates_S[start:end, None], expert)
            start = end
        return super().experts(x_ND, routes, weights)

    def _add(self, weight: Weight, x_ND: Tensor, expert: int | None = None) -> None:
        name = self._name_of.get(id(weight))
        if name is not None:
            total = self.sums[name] if expert is None else self.sums[name][expert]
            add_product_(total, x_ND.float().mT, x_ND.float())


@dataclass(slots=True)
class _Stream:
    """One batch on its way through one Subnet."""

    subnet: Subnet
    ctx: Context
    geometry: Geometry
    x_BTD: Tensor


@torch.no_grad()
def gptq(
    model: Transformer,
    schemes: Mapping[str, IntScheme],
    batches: Sequence[tuple[Tensor, Context]],
    subnets: Sequence[Subnet],
    advance: Callable[[int], None] | None = None,
) -> dict[str, IntWeight]:
    """Quantise the weights in ``schemes`` (names in the state dict of ``model``), and overwrite those of ``model`` with their values.

    Args:
        batches: token ids [B, T] and contexts of the calibration text.
        subnets: sizes whose inputs count, each on all batches.
        advance: called with 1 after each layer.
    """
    config, parameters = model.config, dict(model.named_parameters())
    moe_rows = {layer: row for row, layer in enumerate(config.moe_layers)}
    streams = [
        _Stream(subnet, ctx, model.geometry(ctx), model.embedding(ids_BT))
        for subnet in subnets
        for ids_BT, ctx in batches
    ]
    result: dict[str, IntWeight] = {}

    def run(layer: int, stream: _Stream, operators: Operators) -> Tensor:
        num_experts, top_k = 0, 0
        if layer in moe_rows:
            place = config.moe_rows(stream.subnet.layers).index(moe_rows[layer])
            num_experts, top_k = stream.subnet.experts[place], stream.subnet.top_k[place]
        ctx = replace(stream.ctx, operators=operators)
        x_BTD: Tensor = model.blocks[layer](stream.x_BTD, stream.geometry, num_experts, top_k, ctx)[0]
        return x_BTD

    def settle(hessians: Hessians) -> None:
        for name, total in hessians.sums.items():
            result[name] = compensated(parameters[name], total, schemes[name])
            parameters[name].copy_(result[name].dequantise())

    for layer in range(config.num_layers):
        hessians = Hessians({name: parameters[name] for name in schemes if name.startswith(f"blocks.{layer}.")})
        inside = [stream for stream in streams if layer in stream.subnet.layers]
        for stream in inside:
            run(layer, stream, hessians)
        settle(hessians)
        for stream in inside:
            stream.x_BTD = run(layer, stream, stream.ctx.operators)
        if advance is not None:
            advance(1)
    outside = Hessians({name: parameters[name] for name in schemes if name == "head.weight"})
    for stream in streams if outside.sums else ():
        outside.linear(model.norm(stream.x_BTD), model.head_VD)
    settle(outside)
    return result


def compensated(weight: Tensor, hessian: Tensor, scheme: IntScheme) -> IntWeight:
    """GPTQ of ``weight`` [F, D] or [E, F, D] with the ``hessian`` [D, D] or [E, D, D] of its inputs.

    The scale of a group is set from its weights as the inputs before it have left them. An input that never was other than 0, and every
    input of an expert without tokens, is rounded to nearest.
    """
    values_BFD = weight.detach().float().reshape(-1, *weight.shape[-2:]).clone()
    H_BDD = hessian.double().reshape(-1, *hessian.shape[-2:]).clone()
    num_inputs, group = values_BFD.shape[-1], scheme.group
    diagonal_BD = H_BDD.diagonal(dim1=-2, dim2=-1)
    diagonal_BD.add_((diagonal_BD == 0).double())
    diagonal_BD.add_(DAMPING * diagonal_BD.mean(-1, keepdim=True))
    inverse_BDD = torch.cholesky_inverse(torch.linalg.cholesky(H_BDD))
    upper_BDD = torch.linalg.cholesky(inverse_BDD, upper=True).float()
    codes_BFD = torch.empty_like(values_BFD, dtype=torch.int8)
    scales, zeros = [], []
    for start in range(0, num_inputs, group):
        end = start + group
        part_BFG, error_BFG = values_BFD[..., start:end].clone(), torch.empty_like(values_BFD[..., start:end])
        scale_BF, zero_BF = group_grid(part_BFG, scheme)
        for place in range(group):
            row_BG = upper_BDD[:, start + place, start:end]
            codes_BF = nearest_codes(part_BFG[..., place], scale_BF, zero_BF, scheme.bits)
            codes_BFD[..., start + place] = codes_BF.to(torch.int8)
            meant_BF = (codes_BF if zero_BF is None else codes_BF - zero_BF.float()) * scale_BF.float()
            error_BF = (part_BFG[..., place] - meant_BF) / row_BG[:, place, None]
            part_BFG[..., place:] -= error_BF[..., None] * row_BG[:, None, place:]
            error_BFG[..., place] = error_BF
        values_BFD[..., end:] -= error_BFG @ upper_BDD[:, start:end, end:]
        scales.append(scale_BF)
        zeros += [] if zero_BF is None else [zero_BF]
    shape = (*weight.shape[:-1], -1)
    return IntWeight(
        codes_BFD.reshape(weight.shape),
        torch.stack(scales, -1).reshape(shape),
        torch.stack(zeros, -1).reshape(shape) if zeros else None,
        scheme.bits,
    )
