"""Quantisation of a network to integer weights: rounding to nearest, and GPTQ.

GPTQ (Frantar et al., 2210.17323) quantises a weight input by input, and the inputs that follow make up for the error. The error is that of
the outputs on calibration text, so it depends on the products of the inputs, their Hessian. Inputs that matter most come first, and the
scales of a weight are fitted to it before. A routed expert has a Hessian of its own, from the tokens that were routed to it; the inputs of
its down projection are multiplied by the gates. The network is walked through once, layer by layer, for the full network and for smaller
Subnets together, since one set of weights serves them all. Each layer sees the outputs of the quantised layers before it. Its weights are
first moved a little, so that they give on these inputs what the unquantised network gives (GPTAQ, Li et al., 2504.02692).

Shape letters: B matrices, F outputs, D inputs, J groups, G inputs of a group, C inputs of a block, N tokens, E experts, I expert width,
K experts per token, P places sorted by expert, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stretto.base.errors import UserError
from stretto.model.attention import Geometry
from stretto.model.families import Family, stored_tensors
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Context, Transformer, skeleton
from stretto.ops.grouped import Experts, group_slots, swiglu
from stretto.ops.int_weights import IntScheme, IntWeight, check_group, code_values, fitted_grid, nearest_codes, quantise
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
MOVE = 0.25
"""Share of the way to the unquantised network's outputs that a weight is moved (that of the code of GPTAQ's authors)."""
MOVE_DAMPING = 0.2
"""`DAMPING` of that move."""
BLOCK = 64
"""Inputs after which the errors are passed on to all inputs that follow, in one product."""


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
    """The weights in ``schemes``, each rounded to nearest. Raises `UserError`: one of them is not finite."""
    _require_finite(state, schemes)
    return {name: quantise(state[name], scheme) for name, scheme in schemes.items()}


def _require_finite(state: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Raises `UserError`: one of the weights ``names`` holds a number that is not finite."""
    for name in names:
        if not state[name].isfinite().all():
            raise UserError(
                f"{name}: holds numbers that are not finite; quantise an earlier checkpoint, or download this one again"
            )


class _Inputs(Operators):
    """Operators that keep the inputs of given weights while they compute."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """``weights``: by name, the parameters of a network, [F, D] or [E, F, D]."""
        self._name_of = {id(weight): name for name, weight in weights.items()}
        self.found: dict[str, Tensor] = {}
        """By name, the last inputs [N, D]. For experts: those of the layer, by the name of the first product."""

    def linear(self, x_ND: Tensor, weight: Weight, bias_F: Tensor | None = None) -> Tensor:
        self._keep(weight, x_ND.flatten(0, -2))
        return super().linear(x_ND, weight, bias_F)

    def experts(self, x_ND: Tensor, routes: Routes, weights: Experts) -> Tensor:
        self._keep(weights.gate_up_EFD, x_ND)
        return super().experts(x_ND, routes, weights)

    def _keep(self, weight: Weight, x_ND: Tensor) -> None:
        name = self._name_of.get(id(weight))
        if name is not None:
            self.found[name] = x_ND


class Moments(Operators):
    """Operators that add up products of the inputs of given weights while they compute."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """``weights``: by name, the parameters of a network, [F, D] or [E, F, D]."""
        self._name_of = {id(weight): name for name, weight in weights.items()}
        self.hessians = {
            name: weight.new_zeros(*weight.shape[:-2], weight.shape[-1], weight.shape[-1], dtype=torch.float32)
            for name, weight in weights.items()
        }
        """Sum of the products of the inputs with themselves, fp32 [D, D] or [E, D, D]."""
        self.drifts = {name: torch.zeros_like(hessian) for name, hessian in self.hessians.items()}
        """Sum of the products of (input of the unquantised network − input) with the input, fp32, the same shapes."""
        self.unquantised: Mapping[str, Tensor] = {}
        """`_Inputs.found` of the unquantised network for the same tokens."""

    def linear(self, x_ND: Tensor, weight: Weight, bias_F: Tensor | None = None) -> Tensor:
        if id(weight) in self._name_of:
            self._add(weight, x_ND.flatten(0, -2), self.unquantised[self._name_of[id(weight)]])
        return super().linear(x_ND, weight, bias_F)

    def experts(self, x_ND: Tensor, routes: Routes, weights: Experts) -> Tensor:
        if id(weights.gate_up_EFD) in self._name_of:
            self._add_experts(x_ND, self.unquantised[self._name_of[id(weights.gate_up_EFD)]], routes, weights)
        return super().experts(x_ND, routes, weights)

    def _add_experts(self, x_ND: Tensor, unquantised_ND: Tensor, routes: Routes, weights: Experts) -> None:
        slots = group_slots(routes.chosen_NK, len(weights.down_EDI))
        gates_S = routes.gates_NK.flatten()[slots.order_P]
        start = 0
        for expert, end in enumerate(slots.ends_E.tolist()):
            tokens_P = slots.token_P[start:end]
            own_ND, others_ND, gates_N1 = x_ND[tokens_P], unquantised_ND[tokens_P], gates_S[start:end, None]
            self._add(weights.gate_up_EFD, own_ND, others_ND, expert)
            own_NI, others_NI = (_hidden(each_ND, weights, expert) * gates_N1 for each_ND in (own_ND, others_ND))
            self._add(weights.down_EDI, own_NI, others_NI, expert)
            start = end

    def _add(self, weight: Tensor, x_ND: Tensor, unquantised_ND: Tensor, expert: int | None = None) -> None:
        name, place = self._name_of[id(weight)], slice(None) if expert is None else expert
        wide_ND = x_ND.float()
        add_product_(self.hessians[name][place], wide_ND.mT, wide_ND)
        add_product_(self.drifts[name][place], (unquantised_ND.float() - wide_ND).mT, wide_ND)


def _hidden(x_ND: Tensor, weights: Experts, expert: int) -> Tensor:
    """Inputs [N, I] of the down projection of ``expert``."""
    hidden_NF = x_ND @ weights.gate_up_EFD[expert].mT
    if weights.biases is not None:
        hidden_NF = hidden_NF + weights.biases.gate_up_EF[expert]
    return swiglu(hidden_NF, weights.clamp)


@dataclass(slots=True)
class _Stream:
    """One batch on its way through one Subnet."""

    subnet: Subnet
    ctx: Context
    geometry: Geometry
    x_BTD: Tensor
    """Outputs of the quantised layers so far."""
    unquantised_BTD: Tensor
    """Outputs of the same layers before they were quantised."""


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

    Raises:
        UserError: a weight, or its inputs on the calibration text, are not finite.
    """
    config, parameters = model.config, dict(model.named_parameters())
    _require_finite(parameters, schemes)
    moe_rows = {layer: row for row, layer in enumerate(config.moe_layers)}
    streams = []
    for subnet in subnets:
        for ids_BT, ctx in batches:
            x_BTD = model.embedding(ids_BT)
            streams.append(_Stream(subnet, ctx, model.geometry(ctx), x_BTD, x_BTD))
    result: dict[str, IntWeight] = {}

    def run(layer: int, stream: _Stream, x_BTD: Tensor, operators: Operators) -> Tensor:
        num_experts, top_k = 0, 0
        if layer in moe_rows:
            place = config.moe_rows(stream.subnet.layers).index(moe_rows[layer])
            num_experts, top_k = stream.subnet.experts[place], stream.subnet.top_k[place]
        ctx = replace(stream.ctx, operators=operators)
        y_BTD: Tensor = model.blocks[layer](x_BTD, stream.geometry, num_experts, top_k, ctx)[0]
        return y_BTD

    def settle(moments: Moments) -> None:
        for name, hessian in moments.hessians.items():
            if not (hessian.isfinite().all() and moments.drifts[name].isfinite().all()):
                raise UserError(
                    f"{name}: its inputs on the calibration text are not finite; choose --method rtn, or download the checkpoint again"
                )
            moved = moved_to_unquantised(parameters[name], hessian, moments.drifts[name])
            result[name] = compensated(moved, hessian, schemes[name])
            parameters[name].copy_(result[name].dequantise())

    for layer in range(config.num_layers):
        weights = {name: parameters[name] for name in schemes if name.startswith(f"blocks.{layer}.")}
        moments = Moments(weights)
        inside = [stream for stream in streams if layer in stream.subnet.layers]
        for stream in inside:
            inputs = _Inputs(weights)
            stream.unquantised_BTD = run(layer, stream, stream.unquantised_BTD, inputs)
            moments.unquantised = inputs.found
            run(layer, stream, stream.x_BTD, moments)
        settle(moments)
        for stream in inside:
            stream.x_BTD = run(layer, stream, stream.x_BTD, stream.ctx.operators)
        if advance is not None:
            advance(1)
    outside = Moments({name: parameters[name] for name in schemes if name == "head.weight"})
    for stream in streams if outside.hessians else ():
        outside.unquantised = {"head.weight": model.norm(stream.unquantised_BTD).flatten(0, -2)}
        outside.linear(model.norm(stream.x_BTD), model.head_VD)
    settle(outside)
    return result


def moved_to_unquantised(weight: Tensor, hessian: Tensor, drift: Tensor) -> Tensor:
    """``weight`` [F, D] or [E, F, D], fp32, moved towards the outputs that it gives on the inputs of the unquantised network.

    With X the inputs, H = X·Xᵀ the ``hessian`` and ``drift`` the product of (inputs of the unquantised network − X) with X, the outputs
    of W + W·drift·H⁻¹ on X are nearest in squared error. This fits the calibration text too closely and makes others worse, so a
    share of the step is taken, and H is damped.
    """
    H_BDD = _damped(hessian, MOVE_DAMPING)
    wide = weight.detach().double()
    return (wide + MOVE * torch.linalg.solve(H_BDD, (wide @ drift.double()).mT).mT).float()


def compensated(weight: Tensor, hessian: Tensor, scheme: IntScheme) -> IntWeight:
    """GPTQ of ``weight`` [F, D] or [E, F, D] with the ``hessian`` [D, D] or [E, D, D] of its inputs.

    The inputs are quantised in the order of the Hessian's diagonal, largest first, with scales that were fitted before with the
    diagonal as the importance. An input that never was other than 0, and every input of an expert without tokens, is rounded to nearest.
    """
    num_outputs, num_inputs = weight.shape[-2:]
    values_BFD = weight.detach().float().reshape(-1, num_outputs, num_inputs)
    H_BDD = _damped(hessian.reshape(-1, num_inputs, num_inputs), DAMPING)
    diagonal_BD = H_BDD.diagonal(dim1=-2, dim2=-1)
    importance_BJG = diagonal_BD.float().unflatten(-1, (-1, scheme.group))
    scales_BFJ, zeros_BFJ = fitted_grid(values_BFD.unflatten(-1, (-1, scheme.group)), importance_BJG[:, None], scheme)

    order_BD = diagonal_BD.argsort(-1, descending=True)
    as_rows_BFD = order_BD[:, None].expand(-1, num_outputs, -1)
    values_BFD = values_BFD.gather(-1, as_rows_BFD)
    H_BDD = H_BDD.gather(-1, order_BD[:, None].expand_as(H_BDD)).gather(-2, order_BD[..., None].expand_as(H_BDD))
    inverse_BDD = torch.cholesky_inverse(torch.linalg.cholesky(H_BDD))
    upper_BDD = torch.linalg.cholesky(inverse_BDD, upper=True).float()
    codes_BFD = torch.empty_like(values_BFD, dtype=torch.int8)
    for start in range(0, num_inputs, BLOCK):
        end = min(start + BLOCK, num_inputs)
        part_BFC, error_BFC = values_BFD[..., start:end].clone(), torch.empty_like(values_BFD[..., start:end])
        for place in range(end - start):
            row_BC = upper_BDD[:, start + place, start:end]
            group_BF1 = (order_BD[:, start + place] // scheme.group)[:, None, None].expand(-1, num_outputs, 1)
            scale_BF = scales_BFJ.gather(-1, group_BF1)[..., 0]
            zero_BF = None if zeros_BFJ is None else zeros_BFJ.gather(-1, group_BF1)[..., 0]
            codes_BF = nearest_codes(part_BFC[..., place], scale_BF, zero_BF, scheme.bits)
            codes_BFD[..., start + place] = codes_BF.to(torch.int8)
            meant_BF = code_values(codes_BF, scale_BF, zero_BF)
            error_BF = (part_BFC[..., place] - meant_BF) / row_BC[:, place, None]
            part_BFC[..., place:] -= error_BF[..., None] * row_BC[:, None, place:]
            error_BFC[..., place] = error_BF
        values_BFD[..., end:] -= error_BFC @ upper_BDD[:, start:end, end:]
    codes_BFD = torch.empty_like(codes_BFD).scatter_(-1, as_rows_BFD, codes_BFD)
    shape = (*weight.shape[:-1], -1)
    zeros = None if zeros_BFJ is None else zeros_BFJ.reshape(shape)
    return IntWeight(codes_BFD.reshape(weight.shape), scales_BFJ.reshape(shape), zeros, scheme.bits)


def _damped(hessian: Tensor, share: float) -> Tensor:
    """``hessian`` […, D, D] in fp64, with 1 on the diagonal for inputs that never were other than 0, then ``share`` of the diagonal's mean
    added to the diagonal."""
    damped = hessian.to(torch.float64, copy=True)
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    diagonal.add_((diagonal == 0).double())
    diagonal.add_(share * diagonal.mean(-1, keepdim=True))
    return damped
