"""The forward pass over paged sequences in an arithmetic that is not plain: by the very operators the trainer calls.

`stretto.engine.forward` is this in fp32, arranged for speed. Here each product goes through `stretto.ops.matmul`, so that a
rollout in bf16 or FP8 rounds as the trainer's forward pass does, and, batch-invariant, agrees with it to the bit.

Shape letters: N tokens of a step, M tokens whose logits are wanted, V vocabulary, D hidden, X heads of q, k and v together,
J query and key heads, C head width, E experts, L layers, P pages, Z tokens a page, G key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.engine.forward import Routed
from stretto.engine.layout import Layout, Run
from stretto.model.transformer import Block, MoeLayer, SwiGlu, Transformer
from stretto.ops.matmul import Arithmetic, ExpertMatrices, Weight, experts, linear, norm, prepare, rounded, swiglu
from stretto.ops.paged import Spans, attend, route_tokens
from stretto.ops.paged_exact import attend_exact, route_tokens_exact, store_rotated


@dataclass(frozen=True, slots=True)
class PreciseSwiGlu:
    """A dense or shared SwiGLU."""

    gate_up: Weight
    down: Weight

    @staticmethod
    def of(layer: SwiGlu, arithmetic: Arithmetic) -> PreciseSwiGlu:
        return PreciseSwiGlu(prepare(layer.gate_up.weight, arithmetic), prepare(layer.down.weight, arithmetic))

    def __call__(self, x_ND: Tensor, arithmetic: Arithmetic) -> Tensor:
        return linear(swiglu(linear(x_ND, self.gate_up, None, arithmetic), arithmetic), self.down, None, arithmetic)


@dataclass(frozen=True, slots=True)
class PreciseMoe:
    """Router, experts and shared experts."""

    row: int
    gate: Weight
    experts: ExpertMatrices
    shared: PreciseSwiGlu | None


@dataclass(frozen=True, slots=True)
class PreciseLayer:
    """One block."""

    attention_norm_D: Tensor
    qkv: Weight
    qkv_bias_X: Tensor | None
    qk_norm_JC: Tensor | None
    out: Weight
    mlp_norm_D: Tensor
    mlp: PreciseSwiGlu | PreciseMoe

    @staticmethod
    def of(block: nn.Module, row: int, arithmetic: Arithmetic) -> PreciseLayer:
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        qk_norm_JC = None
        if attention.q_norm is not None and attention.k_norm is not None:
            heads = (
                attention.q_norm.expand(attention.num_heads, -1),
                attention.k_norm.expand(attention.num_kv_heads, -1),
            )
            qk_norm_JC = torch.cat(heads).detach()
        weights: PreciseSwiGlu | PreciseMoe
        if isinstance(mlp, MoeLayer):
            weights = PreciseMoe(
                row,
                prepare(mlp.gate.float(), arithmetic.inner),
                ExpertMatrices.of(mlp.gate_up, mlp.down, arithmetic),
                None if mlp.shared is None else PreciseSwiGlu.of(mlp.shared, arithmetic),
            )
        else:
            weights = PreciseSwiGlu.of(mlp, arithmetic)
        return PreciseLayer(
            attention_norm_D=block.attention_norm.weight.detach(),
            qkv=prepare(attention.qkv.weight, arithmetic),
            qkv_bias_X=None if attention.qkv.bias is None else attention.qkv.bias.detach(),
            qk_norm_JC=qk_norm_JC,
            out=prepare(attention.out.weight, arithmetic),
            mlp_norm_D=block.mlp_norm.weight.detach(),
            mlp=weights,
        )


@dataclass(frozen=True, slots=True)
class PreciseWeights:
    """A whole network, quantised or rounded once. Made anew when weights change."""

    arithmetic: Arithmetic
    embedding_VD: Tensor
    layers: tuple[PreciseLayer, ...]
    norm_D: Tensor
    head: Weight
    eps: float

    @staticmethod
    def of(model: Transformer, arithmetic: Arithmetic) -> PreciseWeights:
        rows = {layer: row for row, layer in enumerate(model.config.moe_layers)}
        return PreciseWeights(
            arithmetic,
            model.embedding.weight.detach(),
            tuple(PreciseLayer.of(block, rows.get(place, -1), arithmetic) for place, block in enumerate(model.blocks)),
            model.norm.weight.detach(),
            prepare(model.head_VD, arithmetic.inner),
            model.config.norm_eps,
        )


def forward(
    network: PreciseWeights,
    layout: Layout,
    keys_LPZGC: Tensor,
    values_LPZGC: Tensor,
    routed: list[Routed] | None,
) -> Tensor:
    """As `stretto.engine.forward.forward`: fills the pools, appends to ``routed``, returns fp32 logits [M, V]."""
    arithmetic = network.arithmetic
    x_ND = rounded(network.embedding_VD.index_select(0, layout.ids_N), arithmetic)
    for run in layout.runs:
        part_ND = x_ND if run.tokens_N is None else x_ND.index_select(0, run.tokens_N)
        for place in run.layers:
            layer = network.layers[place]
            attended_ND = _attention(network, layer, part_ND, run.spans, keys_LPZGC[place], values_LPZGC[place])
            part_ND = rounded(part_ND + attended_ND, arithmetic)
            part_ND = rounded(part_ND + _feed_forward(network, layer, part_ND, run, routed), arithmetic)
        x_ND = part_ND if run.tokens_N is None else x_ND.index_copy_(0, run.tokens_N, part_ND)
    if layout.wanted_M is not None:
        x_ND = x_ND.index_select(0, layout.wanted_M)
    return linear(norm(x_ND, network.norm_D, network.eps, arithmetic), network.head, None, arithmetic.inner).float()


def _attention(
    network: PreciseWeights, layer: PreciseLayer, x_ND: Tensor, spans: Spans, keys_PZGC: Tensor, values_PZGC: Tensor
) -> Tensor:
    arithmetic = network.arithmetic
    normed_ND = norm(x_ND, layer.attention_norm_D, network.eps, arithmetic)
    qkv_NX = linear(normed_ND, layer.qkv, layer.qkv_bias_X, arithmetic)
    G, C = keys_PZGC.shape[2:]
    qkv_NHC = qkv_NX.view(len(qkv_NX), -1, C)
    qk_NJC, v_NGC = qkv_NHC[:, :-G], qkv_NHC[:, -G:]
    if layer.qk_norm_JC is not None:
        qk_NJC = norm(qk_NJC, layer.qk_norm_JC, network.eps, arithmetic)
    q_NHC = store_rotated(qk_NJC, v_NGC, spans, keys_PZGC, values_PZGC, arithmetic)
    attending = attend_exact if arithmetic.batch_invariant else attend
    return linear(attending(q_NHC, keys_PZGC, values_PZGC, spans.groups), layer.out, None, arithmetic)


def _feed_forward(
    network: PreciseWeights, layer: PreciseLayer, x_ND: Tensor, run: Run, routed: list[Routed] | None
) -> Tensor:
    arithmetic, mlp = network.arithmetic, layer.mlp
    normed_ND = norm(x_ND, layer.mlp_norm_D, network.eps, arithmetic)
    if isinstance(mlp, PreciseSwiGlu):
        return mlp(normed_ND, arithmetic)
    rule = run.rules[mlp.row]
    if arithmetic.batch_invariant:
        routes = route_tokens_exact(linear(normed_ND.float(), mlp.gate, None, arithmetic.inner), rule)
    else:
        assert isinstance(mlp.gate, Tensor)
        routes = route_tokens(normed_ND, mlp.gate, rule)
    if routed is not None:
        routed.append(Routed(mlp.row, run.tokens_N, routes.chosen_NK, rule.dropped_NK is None))
    y_ND = experts(normed_ND, routes.chosen_NK, routes.gates_NK, mlp.experts, arithmetic)
    return y_ND if mlp.shared is None else rounded(y_ND + mlp.shared(normed_ND, arithmetic), arithmetic)
