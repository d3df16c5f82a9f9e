"""The forward pass over paged sequences: all tokens of a step in one flat list, each under a Subnet of its own.

Shape letters: N tokens of a step, M tokens whose logits are wanted, V vocabulary, D hidden, H query heads, G key/value
heads, J = H + G, C head width, X = (H + 2·G)·C, F = 2·I, I SwiGLU width, E experts, K chosen, L MoE layers, P pages,
Z tokens a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.engine.layout import Layout, Run
from stretto.model.transformer import Block, MoeLayer, SwiGlu, Transformer
from stretto.ops.grouped import swiglu
from stretto.ops.paged import ExpertWeights, RouteRule, Spans, attend, chosen_experts, norm, route_tokens, store


@dataclass(frozen=True, slots=True)
class Routed:
    """What one MoE layer chose."""

    row: int
    """Of the layer among the maximum network's MoE layers."""
    tokens_N: Tensor | None
    """Which tokens of the step ran it; None: all."""
    chosen_NK: Tensor
    """Expert ids, int64; E for no expert."""
    is_even: bool
    """Every token has the same top-k, so E does not occur."""


@dataclass(frozen=True, slots=True)
class SwiGluWeights:
    """A dense or shared SwiGLU; ``down_ID`` is transposed."""

    gate_up_FD: Tensor
    down_ID: Tensor

    @staticmethod
    def of(layer: SwiGlu) -> SwiGluWeights:
        return SwiGluWeights(layer.gate_up.weight.detach(), layer.down.weight.detach().t())


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router, experts and shared experts."""

    row: int
    gate_ED: Tensor
    """fp32: routers decide on small differences."""
    experts: ExpertWeights
    shared: SwiGluWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block as the step wants it: views of the model's tensors, but for ``qk_norm_JC`` and a gate that is not fp32."""

    attention_norm_D: Tensor
    qkv_XD: Tensor
    qkv_bias_X: Tensor | None
    qk_norm_JC: Tensor | None
    out_HD: Tensor
    """Transposed, [H·C, D]."""
    mlp_norm_D: Tensor
    mlp: SwiGluWeights | MoeWeights

    @staticmethod
    def of(block: Block, row: int) -> LayerWeights:
        """``row`` counts MoE layers."""
        attention, mlp = block.attention, block.mlp
        qk_norm_JC = None
        if attention.q_norm is not None and attention.k_norm is not None:
            rows = (
                attention.q_norm.expand(attention.num_heads, -1),
                attention.k_norm.expand(attention.num_kv_heads, -1),
            )
            qk_norm_JC = torch.cat(rows).detach()
        weights: SwiGluWeights | MoeWeights
        if isinstance(mlp, MoeLayer):
            experts = ExpertWeights.of(mlp.gate_up.detach(), mlp.down.detach())
            shared = None if mlp.shared is None else SwiGluWeights.of(mlp.shared)
            weights = MoeWeights(row, mlp.gate.detach().float(), experts, shared)
        else:
            weights = SwiGluWeights.of(mlp)
        return LayerWeights(
            attention_norm_D=block.attention_norm.weight.detach(),
            qkv_XD=attention.qkv.weight.detach(),
            qkv_bias_X=None if attention.qkv.bias is None else attention.qkv.bias.detach(),
            qk_norm_JC=qk_norm_JC,
            out_HD=attention.out.weight.detach().t(),
            mlp_norm_D=block.mlp_norm.weight.detach(),
            mlp=weights,
        )


@dataclass(frozen=True, slots=True)
class NetworkWeights:
    """A whole network. Made anew when weights change: some of it is copies."""

    embedding_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    head_VD: Tensor
    eps: Tensor
    """fp32 scalar."""

    @staticmethod
    def of(model: Transformer) -> NetworkWeights:
        layers: list[LayerWeights] = []
        row = 0
        for block in model.blocks:
            assert isinstance(block, Block)
            layers.append(LayerWeights.of(block, row))
            row += isinstance(block.mlp, MoeLayer)
        return NetworkWeights(
            model.embedding.weight.detach(),
            tuple(layers),
            model.norm.weight.detach(),
            model.head_VD.detach(),
            torch.tensor(model.config.norm_eps, device=model.norm.weight.device),
        )


def forward(
    network: NetworkWeights,
    layout: Layout,
    keys_LPZGC: Tensor,
    values_LPZGC: Tensor,
    routed: list[Routed] | None,
) -> Tensor:
    """Compute a step: keys and values go to the pools, what was chosen is appended to ``routed`` (None: nobody asks).

    Returns fp32 logits [M, V] of the wanted tokens.
    """
    x_ND = network.embedding_VD.index_select(0, layout.ids_N)
    for run in layout.runs:
        part_ND = x_ND if run.tokens_N is None else x_ND.index_select(0, run.tokens_N)
        for layer in run.layers:
            weights = network.layers[layer]
            part_ND = _attention(weights, network.eps, part_ND, run.spans, keys_LPZGC[layer], values_LPZGC[layer])
            part_ND = _feed_forward(weights, network.eps, part_ND, run, routed)
        x_ND = part_ND if run.tokens_N is None else x_ND.index_copy_(0, run.tokens_N, part_ND)
    if layout.wanted_M is not None:
        x_ND = x_ND.index_select(0, layout.wanted_M)
    return F.linear(norm(x_ND, network.norm_D, network.eps), network.head_VD).float()


def _attention(
    weights: LayerWeights, eps: Tensor, x_ND: Tensor, spans: Spans, keys_PZGC: Tensor, values_PZGC: Tensor
) -> Tensor:
    qkv_NX = F.linear(norm(x_ND, weights.attention_norm_D, eps), weights.qkv_XD, weights.qkv_bias_X)
    q_NHC = store(qkv_NX, weights.qk_norm_JC, eps, spans, keys_PZGC, values_PZGC)
    return torch.addmm(x_ND, attend(q_NHC, keys_PZGC, values_PZGC, spans.groups), weights.out_HD)


def _feed_forward(weights: LayerWeights, eps: Tensor, x_ND: Tensor, run: Run, routed: list[Routed] | None) -> Tensor:
    normed_ND = norm(x_ND, weights.mlp_norm_D, eps)
    mlp = weights.mlp
    if isinstance(mlp, SwiGluWeights):
        return _add_swiglu(x_ND, normed_ND, mlp)
    rule: RouteRule = run.rules[mlp.row]
    routes = route_tokens(normed_ND, mlp.gate_ED, rule)
    if routed is not None:
        routed.append(Routed(mlp.row, run.tokens_N, routes.chosen_NK, rule.dropped_NK is None))
    x_ND = chosen_experts(normed_ND, routes, mlp.experts).add_(x_ND)
    return x_ND if mlp.shared is None else _add_swiglu(x_ND, normed_ND, mlp.shared)


def _add_swiglu(x_ND: Tensor, normed_ND: Tensor, weights: SwiGluWeights) -> Tensor:
    return torch.addmm(x_ND, swiglu(F.linear(normed_ND, weights.gate_up_FD)), weights.down_ID)
