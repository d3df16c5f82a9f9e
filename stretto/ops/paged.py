"""Operators over a paged cache, for steps with few tokens per layer. Forward only.

The tokens of a step are one flat list. A chunk is a part of that list: neighbouring positions of one sequence.

Shape letters: N tokens of a step, D hidden, H query heads, G key/value heads, J = H + G rotated heads, C head width, R rotated
channels of a head, X = (H + 2·G)·C, P pages of the cache, Z tokens per page, B chunks of a group, L tokens of each chunk, M pages
of the longest chunk, T = M·Z keys, E experts, K chosen, S = N·K (token, expert) pairs, F = 2·I, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops import exact
from stretto.ops.grouped import Experts, grouped_swiglu, swiglu
from stretto.ops.operators import (
    ORDINARY,
    Operators,
    Routes,
    Weight,
    attention,
    in_best_groups,
    rotate,
    selection,
)

MAX_PAIRS = 24
"""Largest number of (token, expert) pairs that a CPU computes one by one. The time of a grouped product depends on all experts of
the layer; measured, both take the same time for four tokens with six experts each (24 experts, hidden 128) or with four (32, 512)."""
MAX_ALL = 1024
"""Largest number of tokens for which a GPU computes all experts if it has no grouped product."""


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring chunks of one length, computed by one call of attention."""

    start: int
    """Place of the group's first token in the step."""
    num_chunks: int
    length: int
    """Tokens of each chunk; 1 when decoding."""
    pages: Tensor
    """int64 [B·M]: pages of the chunks, padded with any page after a chunk's last."""
    mask_B1LT: Tensor | None
    """Added to the scores, [B, 1, length, T]. None: the chunks begin at position 0, and attention is causal."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Positions and cache places of the tokens of a step. Built once per step for all layers that compute these tokens."""

    cos_N1R: Tensor
    """Cosine for each rotated channel."""
    sin_N1R: Tensor
    """Sine, negative for the first half of the channels."""
    slots_N: Tensor
    """int64: place of each token's keys and values in the cache, page · page size + place in the page."""
    groups: tuple[Group, ...]
    """Groups that cover all tokens, in order."""
    window_groups: tuple[Group, ...] = ()
    """The groups for layers with a sliding window, with the pages and masks of the window."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Options of a layer's attention: norm and clipping of queries, keys and values, scale, sinks, window."""

    norm_JC: Tensor | None
    """Weights of the norm of queries and keys; None: no norm."""
    is_wide: bool
    """True: one norm over all query heads of a token and one over all its key heads; False: one norm per head."""
    clip: float | None
    """Largest magnitude to which queries, keys and values are clamped; None: no clamp."""
    scale: float | None
    """Factor of the scores; None: 1/√C."""
    sinks_H: Tensor | None
    """Score of an additional key with value zero, which every query of a head sees."""
    is_sliding: bool
    """Whether the layer attends to a sliding window (``Spans.window_groups``)."""


@dataclass(frozen=True, slots=True)
class RouteRule:
    """Routing options of one layer for the tokens of a step; see `stretto.ops.operators.route`."""

    top_k: int
    """Largest top-k of the tokens."""
    softmax: bool
    normalize: bool
    scaling: float
    groups: tuple[int, int]
    bias: Tensor | None
    """[E] or [N, E], added to the scores for the selection only; `MASKED` where an expert may not be chosen."""
    mask: Tensor | None
    """[E] or [N, E], 0 or `MASKED`, added to the logits; None for a sigmoid, whose scores are independent of each other."""
    dropped_NK: Tensor | None
    """True for choices after a token's own top-k; None: all tokens have the same top-k."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of a layer's experts, and views of single experts, made once."""

    experts: Experts
    gate_ups: tuple[Tensor, ...]
    downs: tuple[Tensor, ...]
    bounds_E: Tensor
    """0 … E − 1, int64."""

    @staticmethod
    def of(experts: Experts) -> ExpertWeights:
        bounds_E = torch.arange(len(experts.gate_up_EFD), device=experts.gate_up_EFD.device)
        return ExpertWeights(experts, experts.gate_up_EFD.unbind(0), experts.down_EDI.unbind(0), bounds_E)


def norm(x_D: Tensor, weight_D: Tensor, eps: Tensor) -> Tensor:
    """`stretto.ops.operators.rms_norm_reference`; the weight may have any shape that broadcasts to ``x_D``.

    ``eps`` is an fp32 scalar *tensor*, with which the scale takes only three operators; launching one costs as much as the product
    of a row.
    """
    y_D = x_D * _scale(x_D, eps)
    return (y_D if x_D.dtype == torch.float32 else y_D.to(x_D.dtype)).mul_(weight_D)


def _scale(x_D: Tensor, eps: Tensor) -> Tensor:
    """1 / root mean square over the last dim, fp32."""
    length = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(eps, length, length, value=1.0 / x_D.shape[-1]).rsqrt_()


def store(
    qkv_NX: Tensor,
    heads: Heads,
    eps: Tensor,
    spans: Spans,
    keys_PZGC: Tensor,
    values_PZGC: Tensor,
) -> Tensor:
    """Norm, clip and rotate queries and keys, write keys and values to one layer's cache, and return the queries [N, H, C].

    ``qkv_NX`` holds each token's query heads, key heads and value heads, in this order, and is overwritten.
    """
    G, C = keys_PZGC.shape[2:]
    R, kv = spans.cos_N1R.shape[-1], G * C
    qk_NJC = qkv_NX[:, :-kv].view(len(qkv_NX), -1, C)
    if heads.norm_JC is not None:
        for part in (qkv_NX[:, : -2 * kv], qkv_NX[:, -2 * kv : -kv]) if heads.is_wide else (qk_NJC,):
            part.mul_(_scale(part, eps))
        qk_NJC.mul_(heads.norm_JC)
    if heads.clip is not None:
        qkv_NX.clamp_(-heads.clip, heads.clip)
    turned_NJR = qk_NJC if R == C else qk_NJC[..., :R]
    torch.addcmul(turned_NJR * spans.cos_N1R, turned_NJR.roll(R // 2, -1), spans.sin_N1R, out=turned_NJR)
    keys_PZGC.view(-1, kv).index_copy_(0, spans.slots_N, qkv_NX[:, -2 * kv : -kv])
    values_PZGC.view(-1, kv).index_copy_(0, spans.slots_N, qkv_NX[:, -kv:])
    return qk_NJC[:, :-G]


def store_rounded(
    qkv_NX: Tensor,
    heads: Heads,
    eps: float,
    spans: Spans,
    keys_PZGC: Tensor,
    values_PZGC: Tensor,
    operators: Operators,
) -> Tensor:
    """`store` for an arithmetic that is not plain: rounds where the model's attention rounds. Does not change ``qkv_NX``."""
    G, C = keys_PZGC.shape[2:]
    qk_NJC, v_NGC = qkv_NX.view(len(qkv_NX), -1, C).tensor_split((-G,), dim=1)
    if heads.norm_JC is not None and heads.is_wide:
        parts = zip(qk_NJC.tensor_split((-G,), 1), heads.norm_JC.tensor_split((-G,), 0), strict=True)
        qk_NJC = torch.cat([operators.norm(x.flatten(1), weight.flatten(), eps).view_as(x) for x, weight in parts], 1)
    elif heads.norm_JC is not None:
        qk_NJC = operators.norm(qk_NJC, heads.norm_JC, eps)
    if heads.clip is not None:
        qk_NJC, v_NGC = (x.clamp(-heads.clip, heads.clip) for x in (qk_NJC, v_NGC))
    qk_NJC = operators.rounded(rotated(qk_NJC, spans))
    for pool_PZGC, rows_NGC in ((keys_PZGC, qk_NJC[:, -G:]), (values_PZGC, v_NGC)):
        pool_PZGC.flatten(0, 1).index_copy_(0, spans.slots_N, rows_NGC.to(pool_PZGC.dtype))
    return qk_NJC[:, :-G]


def rotated(x_NHC: Tensor, spans: Spans) -> Tensor:
    """`stretto.ops.operators.rotate` for the positions in ``spans``."""
    half = spans.cos_N1R.shape[-1] // 2
    return rotate(x_NHC[None], spans.cos_N1R[None, :, 0, :half], spans.sin_N1R[None, :, 0, half:])[0]


def attend(
    q_NHC: Tensor,
    keys_PZGC: Tensor,
    values_PZGC: Tensor,
    spans: Spans,
    heads: Heads,
    batch_invariant: bool = False,
) -> Tensor:
    """Causal attention of every token to its own sequence, [N, H·C], with one call of torch's attention per group.

    ``batch_invariant``: use `stretto.ops.exact.attention`, whose bits do not depend on how a sequence was cut into chunks.
    """
    groups = spans.window_groups if heads.is_sliding else spans.groups
    parts = [_attend_group(q_NHC, keys_PZGC, values_PZGC, group, heads, batch_invariant) for group in groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_group(
    q_NHC: Tensor, keys_PZGC: Tensor, values_PZGC: Tensor, group: Group, heads: Heads, batch_invariant: bool
) -> Tensor:
    _, H, C = q_NHC.shape
    G, B, L = keys_PZGC.shape[2], group.num_chunks, group.length
    k_BGTC, v_BGTC = (gathered(pool, group).transpose(1, 2) for pool in (keys_PZGC, values_PZGC))
    q_NHC = q_NHC[group.start : group.start + B * L]
    if L == 1 and heads.sinks_H is None and not batch_invariant:
        # query heads that share a key head are passed as queries of that head, which is faster than torch's enable_gqa
        q_BGHC = q_NHC.view(B, G, H // G, C)
        y_BGHC = F.scaled_dot_product_attention(q_BGHC, k_BGTC, v_BGTC, attn_mask=group.mask_B1LT, scale=heads.scale)
        return y_BGHC.reshape(B, H * C)
    q_BHLC = q_NHC.view(B, L, H, C).transpose(1, 2)
    y_BHLC = attend_rows(q_BHLC, k_BGTC, v_BGTC, group, heads.scale, heads.sinks_H, batch_invariant)
    return y_BHLC.transpose(1, 2).reshape(B * L, H * C)


def gathered(pool_PZGC: Tensor, group: Group) -> Tensor:
    """Rows of one layer's cache for the sequences of a group, [B, T, G, C]."""
    P, _, G, C = pool_PZGC.shape
    return pool_PZGC.view(P, -1).index_select(0, group.pages).view(group.num_chunks, -1, G, C)


def attend_rows(
    q_BHLC: Tensor,
    k_BGTC: Tensor,
    v_BGTU: Tensor,
    group: Group,
    scale: float | None,
    sinks_H: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Attention of a group's queries to the keys and values of its pages, [B, H, L, U]."""
    mask_B1LT = group.mask_B1LT
    if mask_B1LT is None:
        k_BGTC, v_BGTU = k_BGTC[:, :, : group.length], v_BGTU[:, :, : group.length]
    if batch_invariant:
        return exact.attention(q_BHLC, k_BGTC, v_BGTU, None if mask_B1LT is None else mask_B1LT == 0, scale, sinks_H)
    return attention(q_BHLC, k_BGTC, v_BGTU, mask_B1LT, scale, sinks_H)


def route_tokens(
    x_ND: Tensor, gate: Weight, rule: RouteRule, bias_E: Tensor | None = None, operators: Operators = ORDINARY
) -> Routes:
    """`stretto.ops.operators.route` for all tokens at once, each with its own top-k (reference: ``tests/ops/references.py``).

    Choices after a token's own top-k are expert E, which does not exist, with a gate of 0. Gates are fp32. ``gate`` is fp32 and
    prepared for ``operators``, which are the router's own; ``bias_E`` is added to the logits. Batch-invariant operators give the
    same bits as `route`.
    """
    logits_NE = operators.linear(x_ND.float(), gate, bias_E)
    if rule.mask is not None:
        logits_NE = logits_NE + rule.mask
    scores_NE = operators.router_scores(logits_NE, rule.softmax)
    choice_NE = selection(logits_NE, scores_NE, rule.bias, rule.softmax, operators)
    if rule.groups[0] > 1:
        choice_NE = in_best_groups(choice_NE, *rule.groups, operators)
    chosen_NK = operators.highest(choice_NE, rule.top_k)
    gates_NK = scores_NE.gather(-1, chosen_NK)
    if rule.dropped_NK is not None:
        gates_NK.masked_fill_(rule.dropped_NK, 0.0)
        chosen_NK.masked_fill_(rule.dropped_NK, logits_NE.shape[1])
    if rule.normalize:
        gates_NK.div_(operators.gate_sum(gates_NK) + 1e-20)
    return Routes(chosen_NK, gates_NK.mul_(rule.scaling) if rule.scaling != 1.0 else gates_NK)


def chosen_experts(x_ND: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Sum over a token's experts of gate · down(swiglu(gate_up(x))), in the order of choice; expert E adds nothing. Reference:
    ``tests/ops/references.py``.

    A CPU computes few (token, expert) pairs one by one and more of them with grouped products. A GPU has grouped products only for
    bf16 rows of a multiple of 16 bytes. For other weights, torch would wait for the sizes of the groups and multiply them one after
    another; steps of up to `MAX_ALL` tokens compute all experts instead, without waiting.
    """
    if x_ND.device.type == "cpu" and routes.chosen_NK.numel() <= MAX_PAIRS:
        return _single_experts(x_ND, routes, weights)
    is_even = not any(width % 8 for width in weights.experts.gate_up_EFD.shape[1:])
    if x_ND.is_cuda and len(x_ND) <= MAX_ALL and not (x_ND.dtype == torch.bfloat16 and is_even):
        return _all_experts(x_ND, routes, weights)
    return _grouped_experts(x_ND, routes, weights)


def _single_experts(x_ND: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """One matrix-vector product per pair: reads the chosen experts only, without a copy."""
    num_experts, gates_NK, biases = len(weights.downs), routes.gates_NK.to(x_ND.dtype), weights.experts.biases
    pairs = [
        (token, expert, place)
        for place, (token, expert) in enumerate(
            (token, expert) for token, row in enumerate(routes.chosen_NK.tolist()) for expert in row
        )
        if expert < num_experts
    ]
    hidden_SF = x_ND.new_empty(gates_NK.numel(), weights.experts.gate_up_EFD.shape[1])
    tokens, hidden = x_ND.unbind(0), hidden_SF.unbind(0)
    for token, expert, place in pairs:
        torch.mv(weights.gate_ups[expert], tokens[token], out=hidden[place])
    out_ND, expert_S = torch.zeros_like(x_ND), routes.chosen_NK.flatten().clamp(max=num_experts - 1)
    if biases is not None:
        hidden_SF += biases.gate_up_EF[expert_S]
        bias_NKD = biases.down_ED[expert_S].view(*gates_NK.shape, -1)
        out_ND += (bias_NKD * gates_NK[..., None]).sum(1)
    inner = swiglu(hidden_SF, weights.experts.clamp).mul_(gates_NK.view(-1, 1)).unbind(0)
    sums = out_ND.unbind(0)
    for token, expert, place in pairs:
        sums[token].addmv_(weights.downs[expert], inner[place])
    return out_ND


def _all_experts(x_ND: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """All experts for all tokens; experts that were not chosen have a gate of 0."""
    gates_NE = x_ND.new_zeros(len(x_ND), len(weights.downs) + 1)  # the last column is for expert E
    gates_EN1 = gates_NE.scatter_(1, routes.chosen_NK, routes.gates_NK.to(x_ND.dtype))[:, :-1].t()[..., None]
    gate_up_EFD, down_EDI, biases, clamp = weights.experts
    hidden_ENF = x_ND @ gate_up_EFD.transpose(1, 2)
    if biases is not None:
        hidden_ENF += biases.gate_up_EF[:, None]
    inner_ENI = swiglu(hidden_ENF, clamp) * gates_EN1
    y_ND = (inner_ENI @ down_EDI.transpose(1, 2)).sum(0)
    return y_ND if biases is None else y_ND + gates_EN1[..., 0].t() @ biases.down_ED


def _grouped_experts(x_ND: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Grouped products of pairs sorted by expert; pairs of expert E come last and belong to no group."""
    (num_tokens, num_chosen), num_pairs = routes.chosen_NK.shape, routes.chosen_NK.numel()
    expert_S, order_S = routes.chosen_NK.view(-1).sort(stable=True)
    ends_E = torch.searchsorted(expert_S, weights.bounds_E, right=True, out_int32=True)
    x_SD = x_ND.index_select(0, order_S.div(num_chosen, rounding_mode="floor"))
    y_SD = grouped_swiglu(x_SD, ends_E, weights.experts)
    place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(num_pairs, device=order_S.device))
    place_NK = place_S.view(num_tokens, num_chosen)
    # Rows after the last group were never written and may hold NaN, which a gate of 0 would not remove. The row of the token's own first
    # choice was written, and no other token's NaN is in it; a token without any expert takes the first row.
    is_none_NK = routes.chosen_NK == len(weights.downs)
    place_NK.masked_fill_(is_none_NK, 0)
    place_NK = torch.where(is_none_NK, place_NK[:, :1], place_NK)
    return F.embedding_bag(place_NK, y_SD, mode="sum", per_sample_weights=routes.gates_NK.to(x_ND.dtype))
