"""Operators over a paged cache, for steps with few tokens per layer. Forward only.

The tokens of a step are one flat list; a chunk of it is neighbouring positions of one sequence.

Shape letters: N tokens of a step, D hidden, H query heads, G key/value heads, J = H + G heads that are rotated,
C head width, R channels of it that are rotated, X = (H + 2·G)·C, P pages of the cache, Z tokens a page, B chunks of a
group, L tokens of each, M pages of the longest of them, T = M·Z, E experts, K chosen, S = N·K pairs, F = 2·I, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops import exact, matmul
from stretto.ops.grouped import Clamp, ExpertBiases, grouped_mm, swiglu
from stretto.ops.matmul import PLAIN, Arithmetic, Weight, rounded
from stretto.ops.operators import Routes, attention, in_best_groups, rotate, selection

MAX_PAIRS = 24
"""Most (token, expert) pairs that are computed one by one on a CPU: a grouped product pays for every expert of the
layer, and is level with single pairs near four tokens of six experts (24 experts, hidden 128) or of four (32, 512)."""
MAX_ALL = 1024
"""Most tokens that a GPU takes through all experts where it has no grouped product."""


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring chunks of one length that attend together."""

    start: int
    """First of their tokens in the step."""
    num_chunks: int
    length: int
    """Tokens of each chunk; 1 is decoding."""
    pages: Tensor
    """int64 [B·M]: their pages, any page beyond a chunk's last."""
    mask_B1LT: Tensor | None
    """Added to the scores, [B, 1, length, T]. None: they begin at position 0 and see all, so plain causal attention does."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the tokens of a step stand: made once a step, read by every layer that computes these tokens."""

    cos_N1R: Tensor
    """Cosine for each rotated channel."""
    sin_N1R: Tensor
    """Sine, negative for the first half of the channels."""
    slots_N: Tensor
    """int64: where each token's keys and values go, page · page size + place in it."""
    groups: tuple[Group, ...]
    """All tokens, in order."""
    window_groups: tuple[Group, ...] = ()
    """The same where tokens see a window of positions: its pages and its masks."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer does to queries, keys and values before they are cached, and how it attends to them."""

    norm_JC: Tensor | None
    """Scales the normed queries and keys; None: they are not normed."""
    is_wide: bool
    """All query heads of a token are normed as one vector, and all its key heads; otherwise each head by itself."""
    clip: float | None
    """Queries, keys and values are clamped to ± this."""
    scale: float | None
    """Of the scores; None: 1/√C."""
    sinks_H: Tensor | None
    """Scores of a key that every query sees and whose value is zero."""
    is_sliding: bool
    """It attends to the groups of the window."""


@dataclass(frozen=True, slots=True)
class RouteRule:
    """How a layer's router chooses for these tokens."""

    top_k: int
    """The largest of the tokens'."""
    softmax: bool
    normalize: bool
    scaling: float
    groups: tuple[int, int]
    """Of `stretto.ops.operators.route`."""
    bias: Tensor | None
    """[E] or [N, E], added to the scores for the choice alone; `MASKED` where an expert may not be chosen."""
    mask: Tensor | None
    """[E] or [N, E], 0 or `MASKED`, added to the logits; None for a sigmoid, whose scores do not feel each other."""
    dropped_NK: Tensor | None
    """True for choices past a token's own top-k; None where all tokens have the same."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A layer's experts, and the views of them that single products take."""

    gate_up_EFD: Tensor
    down_EDI: Tensor
    gate_ups: tuple[Tensor, ...]
    downs: tuple[Tensor, ...]
    bounds_E: Tensor
    """0 … E − 1, int64."""
    biases: ExpertBiases | None
    clamp: Clamp | None

    @staticmethod
    def of(
        gate_up_EFD: Tensor, down_EDI: Tensor, biases: ExpertBiases | None = None, clamp: Clamp | None = None
    ) -> ExpertWeights:
        bounds_E = torch.arange(gate_up_EFD.shape[0], device=gate_up_EFD.device)
        gate_ups, downs = tuple(gate_up_EFD.unbind(0)), tuple(down_EDI.unbind(0))
        return ExpertWeights(gate_up_EFD, down_EDI, gate_ups, downs, bounds_E, biases, clamp)


def norm(x_D: Tensor, weight_D: Tensor, eps: Tensor) -> Tensor:
    """`stretto.ops.operators.rms_norm_reference`; the weight may be any shape that broadcasts to ``x_D``.

    ``eps`` is an fp32 scalar *tensor*: then the scale is three operators, and each costs as much as a row's product.
    """
    y_D = x_D * _scale(x_D, eps)
    return (y_D if x_D.dtype == torch.float32 else y_D.to(x_D.dtype)).mul_(weight_D)


def _scale(x_D: Tensor, eps: Tensor) -> Tensor:
    """1 / root mean square, fp32."""
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
    """Norm, clip and rotate queries and keys, put keys and values into one layer's cache, return the queries [N, H, C].

    ``qkv_NX`` holds each token's query heads, then its key heads, then its value heads, and is overwritten.
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
    rotated = qk_NJC if R == C else qk_NJC[..., :R]
    torch.addcmul(rotated * spans.cos_N1R, rotated.roll(R // 2, -1), spans.sin_N1R, out=rotated)
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
    arithmetic: Arithmetic,
) -> Tensor:
    """`store` in an arithmetic that is not plain, rounded as the model's attention does; leaves ``qkv_NX`` alone."""
    G, C = keys_PZGC.shape[2:]
    qk_NJC, v_NGC = qkv_NX.view(len(qkv_NX), -1, C).tensor_split((-G,), dim=1)
    if heads.norm_JC is not None and heads.is_wide:
        parts = zip(qk_NJC.tensor_split((-G,), 1), heads.norm_JC.tensor_split((-G,), 0), strict=True)
        normed = [matmul.norm(x.flatten(1), weight.flatten(), eps, arithmetic).view_as(x) for x, weight in parts]
        qk_NJC = torch.cat(normed, 1)
    elif heads.norm_JC is not None:
        qk_NJC = matmul.norm(qk_NJC, heads.norm_JC, eps, arithmetic)
    if heads.clip is not None:
        qk_NJC, v_NGC = (x.clamp(-heads.clip, heads.clip) for x in (qk_NJC, v_NGC))
    qk_NJC = rounded(rotated(qk_NJC, spans), arithmetic)
    for pool_PZGC, rows_NGC in ((keys_PZGC, qk_NJC[:, -G:]), (values_PZGC, v_NGC)):
        pool_PZGC.flatten(0, 1).index_copy_(0, spans.slots_N, rows_NGC.to(pool_PZGC.dtype))
    return qk_NJC[:, :-G]


def rotated(x_NHC: Tensor, spans: Spans) -> Tensor:
    """`stretto.ops.operators.rotate` at the tokens' positions."""
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
    """Attention of every token to its own sequence up to itself, [N, H·C]; one call of torch's attention a group.

    ``batch_invariant``: by `stretto.ops.exact.attention`, the same bits however the sequence was cut into chunks.
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
        # the query heads that share a key head stand as its queries, which is faster than telling torch so
        q_BGHC = q_NHC.view(B, G, H // G, C)
        y_BGHC = F.scaled_dot_product_attention(q_BGHC, k_BGTC, v_BGTC, attn_mask=group.mask_B1LT, scale=heads.scale)
        return y_BGHC.reshape(B, H * C)
    q_BHLC = q_NHC.view(B, L, H, C).transpose(1, 2)
    y_BHLC = attend_rows(q_BHLC, k_BGTC, v_BGTC, group, heads.scale, heads.sinks_H, batch_invariant)
    return y_BHLC.transpose(1, 2).reshape(B * L, H * C)


def gathered(pool_PZGC: Tensor, group: Group) -> Tensor:
    """What one layer's cache holds of the group's sequences, [B, T, G, C]."""
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
    if batch_invariant:
        if group.mask_B1LT is None:
            seen_B1LT = torch.ones(1, 1, group.length, k_BGTC.shape[2], dtype=torch.bool, device=k_BGTC.device).tril()
        else:
            seen_B1LT = group.mask_B1LT == 0
        return exact.attention(q_BHLC, k_BGTC, v_BGTU, seen_B1LT, scale, sinks_H)
    if group.mask_B1LT is None:
        k_BGTC, v_BGTU = k_BGTC[:, :, : group.length], v_BGTU[:, :, : group.length]
    return attention(q_BHLC, k_BGTC, v_BGTU, group.mask_B1LT, scale, sinks_H)


def route_tokens(
    x_ND: Tensor, gate: Weight, rule: RouteRule, bias_E: Tensor | None = None, arithmetic: Arithmetic = PLAIN
) -> Routes:
    """`stretto.ops.operators.route` for all tokens at once, each with its own top-k (``tests/ops/references.py``).

    Choices past a token's own top-k name expert E, which does not exist, with a weight of 0. Gates are fp32. ``gate`` and
    ``bias_E`` (of the logits) are fp32, prepared for ``arithmetic``, the router's own: batch-invariant, it gives `route`'s bits.
    """
    x_ND, is_exact = x_ND.float(), arithmetic.batch_invariant
    logits_NE = matmul.linear(x_ND, gate, bias_E, arithmetic)
    if rule.mask is not None:
        logits_NE = logits_NE + rule.mask
    if is_exact:
        scores_NE = (exact.softmax if rule.softmax else exact.sigmoid)(logits_NE)
    else:
        scores_NE = logits_NE.softmax(-1) if rule.softmax else logits_NE.sigmoid()
    choice_NE = selection(logits_NE, scores_NE, rule.bias, rule.softmax)
    operators = arithmetic.operators
    if rule.groups[0] > 1:
        choice_NE = in_best_groups(choice_NE, *rule.groups, operators)
    chosen_NK = operators.highest(choice_NE, rule.top_k)
    gates_NK = scores_NE.gather(-1, chosen_NK)
    if rule.dropped_NK is not None:
        gates_NK.masked_fill_(rule.dropped_NK, 0.0)
        chosen_NK.masked_fill_(rule.dropped_NK, logits_NE.shape[1])
    if rule.normalize:
        sum_N1 = exact.sum_in_order(gates_NK, -1)[:, None] if is_exact else gates_NK.sum(-1, keepdim=True)
        gates_NK.div_(sum_N1 + 1e-20)
    return Routes(chosen_NK, gates_NK.mul_(rule.scaling) if rule.scaling != 1.0 else gates_NK)


def chosen_experts(x_ND: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Each token's sum over its choices of gate · down(swiglu(gate_up(x))), in the order it chose; expert E adds nothing.

    Pair by pair for a handful of tokens on a CPU, else through grouped products (defined in ``tests/ops/references.py``).

    A GPU has them for bf16 in whole 16 bytes alone. Elsewhere torch would wait for the groups' sizes and multiply one group after
    another; few tokens go through all experts instead, which no kernel waits for.
    """
    if x_ND.device.type == "cpu" and routes.chosen_NK.numel() <= MAX_PAIRS:
        return _single_experts(x_ND, routes, weights)
    is_even = not any(width % 8 for width in weights.gate_up_EFD.shape[1:])
    if x_ND.is_cuda and len(x_ND) <= MAX_ALL and not (x_ND.dtype == torch.bfloat16 and is_even):
        return _all_experts(x_ND, routes, weights)
    return _grouped_experts(x_ND, routes, weights)


def _single_experts(x_ND: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """A matrix-vector product a pair: reads only the chosen experts, and reads them where they lie."""
    num_experts, gates_NK = len(weights.downs), routes.gates_NK.to(x_ND.dtype)
    pairs = [
        (token, expert, place)
        for place, (token, expert) in enumerate(
            (token, expert) for token, row in enumerate(routes.chosen_NK.tolist()) for expert in row
        )
        if expert < num_experts
    ]
    hidden_SF = x_ND.new_empty(gates_NK.numel(), weights.gate_up_EFD.shape[1])
    tokens, hidden = x_ND.unbind(0), hidden_SF.unbind(0)
    for token, expert, place in pairs:
        torch.mv(weights.gate_ups[expert], tokens[token], out=hidden[place])
    out_ND, expert_S = torch.zeros_like(x_ND), routes.chosen_NK.flatten().clamp(max=num_experts - 1)
    if weights.biases is not None:
        hidden_SF += weights.biases.gate_up_EF[expert_S]
        bias_NKD = weights.biases.down_ED[expert_S].view(*gates_NK.shape, -1)
        out_ND += (bias_NKD * gates_NK[..., None]).sum(1)
    inner = swiglu(hidden_SF, weights.clamp).mul_(gates_NK.view(-1, 1)).unbind(0)
    sums = out_ND.unbind(0)
    for token, expert, place in pairs:
        sums[token].addmv_(weights.downs[expert], inner[place])
    return out_ND


def _all_experts(x_ND: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Every expert for every token, weighted by 0 where it was not chosen."""
    gates_NE = x_ND.new_zeros(len(x_ND), len(weights.downs) + 1)  # the last is no expert
    gates_EN1 = gates_NE.scatter_(1, routes.chosen_NK, routes.gates_NK.to(x_ND.dtype))[:, :-1].t()[..., None]
    hidden_ENF = x_ND @ weights.gate_up_EFD.transpose(1, 2)
    if weights.biases is not None:
        hidden_ENF += weights.biases.gate_up_EF[:, None]
    inner_ENI = swiglu(hidden_ENF, weights.clamp) * gates_EN1
    y_ND = (inner_ENI @ weights.down_EDI.transpose(1, 2)).sum(0)
    return y_ND if weights.biases is None else y_ND + gates_EN1[..., 0].t() @ weights.biases.down_ED


def _grouped_experts(x_ND: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Pairs sorted by expert; those without an expert come last and belong to no group."""
    (num_tokens, num_chosen), num_pairs = routes.chosen_NK.shape, routes.chosen_NK.numel()
    expert_S, order_S = routes.chosen_NK.view(-1).sort(stable=True)
    ends_E = torch.searchsorted(expert_S, weights.bounds_E, right=True, out_int32=True)
    x_SD = x_ND.index_select(0, order_S.div(num_chosen, rounding_mode="floor"))
    hidden_SF = grouped_mm(x_SD, weights.gate_up_EFD.transpose(1, 2), offs=ends_E)
    own_S = expert_S.clamp(max=len(weights.downs) - 1)
    if weights.biases is not None:
        hidden_SF += weights.biases.gate_up_EF[own_S]
    y_SD = grouped_mm(swiglu(hidden_SF, weights.clamp), weights.down_EDI.transpose(1, 2), offs=ends_E)
    if weights.biases is not None:
        y_SD += weights.biases.down_ED[own_S]
    place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(num_pairs, device=order_S.device))
    place_NK = place_S.view(num_tokens, num_chosen)
    # rows past the last group were never written and may hold NaN, which a weight of 0 would not remove
    place_NK = torch.where(routes.chosen_NK == len(weights.downs), place_NK[:, :1], place_NK)
    return F.embedding_bag(place_NK, y_SD, mode="sum", per_sample_weights=routes.gates_NK.to(x_ND.dtype))
