"""The operators of a forward pass as an argument: the interface, and torch's attention, rotation, norm and router.

A forward pass takes its operators as an argument. Pre-training uses `ORDINARY`. `stretto.ops.matmul` defines operators for bf16,
FP8 and batch-invariant arithmetic, which a trainer and an engine can share; this file does not import them.

Shape letters: B rows, T positions, R rotated pairs, H query heads, G key/value heads, C head width, U head width of values (equal
to C except in latent attention), N tokens, D hidden or inner width, F outputs (2·I in an expert), I expert width, E experts,
K experts per token, V vocabulary, … any leading dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.documents import Documents, document_attention
from stretto.ops.grouped import Experts, swiglu
from stretto.ops.moe import experts
from stretto.ops.native import rows, training
from stretto.ops.native.products import linear

Weight = Any
"""A matrix [F, D] as an operator's ``linear`` takes it: a tensor, or a result of `stretto.ops.matmul.prepare`."""


def rms_norm_reference(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm with statistics in fp32: the reference for `rms_norm`."""
    wide_D = x_D.float()
    scale = torch.rsqrt(wide_D.pow(2).mean(-1, keepdim=True) + eps)
    return (wide_D * scale).to(x_D.dtype) * weight_D


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim of ``x_D`` […, D], scaled by ``weight_D`` ([D], or any shape that broadcasts to ``x_D``)."""
    if rows.norms(x_D, weight_D):
        return rows.rms_norm(x_D, weight_D, eps)
    if x_D.device.type == "cpu" and x_D.dtype in (torch.float32, torch.float64):
        return _CpuRmsNorm.apply(x_D, weight_D, eps)
    if weight_D.dim() == 1:
        return F.rms_norm(x_D, (x_D.shape[-1],), weight_D.to(x_D.dtype), eps)
    return F.rms_norm(x_D, (x_D.shape[-1],), None, eps) * weight_D.to(x_D.dtype)


class _CpuRmsNorm(torch.autograd.Function):
    """RMS norm for a CPU. Its backward pass reads memory five times; torch's composite one, about a dozen times."""

    @staticmethod
    def forward(ctx: Any, x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True).square_().div_(x_D.shape[-1]).add_(eps).rsqrt_()
        normed_D = x_D * scale
        ctx.save_for_backward(normed_D, weight_D, scale)
        return normed_D * weight_D

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad_D,) = grads
        normed_D, weight_D, scale = ctx.saved_tensors
        grad_weight = (grad_D * normed_D).sum_to_size(weight_D.shape) if ctx.needs_input_grad[1] else None
        inner_D = grad_D * weight_D
        mean = (inner_D * normed_D).mean(-1, keepdim=True)
        return inner_D.addcmul_(normed_D, mean, value=-1).mul_(scale), grad_weight, None


def document_mask(documents_BT: Tensor, shared_BT2: Tensor | None = None) -> Tensor:
    """Attention mask [B, 1, T, T], bool, True where a query may see a key: its own and earlier positions of its document, and
    a prefix that several documents share.

    Args:
        documents_BT: document of each position; −1 is padding, which sees earlier padding (its output is never used).
        shared_BT2: first column of the shared prefix of each position, and the column after its last.
    """
    mask_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()
    if shared_BT2 is not None:
        columns_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
        first_BT1, end_BT1 = shared_BT2.split(1, dim=-1)
        mask_BTT |= (columns_T >= first_BT1) & (columns_T < end_BT1)
    return mask_BTT.unsqueeze(1)


def window_mask(positions_BT: Tensor, window: int) -> Tensor:
    """Mask of a sliding window [B, 1, T, T], bool: True for keys less than ``window`` positions before their query, or after it.

    Distances are between positions, not columns: the columns of a shared prefix may be anywhere in the row.
    """
    return (positions_BT[:, :, None] - positions_BT[:, None, :] < window).unsqueeze(1)


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Mask [1, 1, T, T], bool: each position sees itself and earlier positions."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()


def attention_reference(
    q_BHTC: Tensor,
    k_BGTC: Tensor,
    v_BGTU: Tensor,
    mask_B1TT: Tensor | None,
    scale: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Softmax attention in fp32, the reference for `attention`. Returns [B, H, T, U].

    Args:
        mask_B1TT: True where a query may see a key; None: causal attention.
        scale: factor of the scores; None: 1/√C.
        sinks_H: score (not scaled) of an additional key with value zero, which every query of a head sees (gpt-oss).
    """
    groups = q_BHTC.shape[1] // k_BGTC.shape[1]
    k_BHTC = k_BGTC.repeat_interleave(groups, dim=1).float()
    v_BHTU = v_BGTU.repeat_interleave(groups, dim=1).float()
    scores_BHTT = q_BHTC.float() @ k_BHTC.transpose(-1, -2)
    scores_BHTT = scores_BHTT / math.sqrt(q_BHTC.shape[-1]) if scale is None else scores_BHTT * scale
    if mask_B1TT is None:
        mask_B1TT = causal_mask(q_BHTC.shape[2], q_BHTC.device)
    scores_BHTT = scores_BHTT.masked_fill(~mask_B1TT, float("-inf"))
    if sinks_H is None:
        return (scores_BHTT.softmax(-1) @ v_BHTU).to(q_BHTC.dtype)
    sink_BHT1 = sinks_H.float().view(-1, 1, 1).expand(*scores_BHTT.shape[:-1], 1)
    weights_BHTT = torch.cat((sink_BHT1, scores_BHTT), -1).softmax(-1)[..., 1:]
    return (weights_BHTT @ v_BHTU).to(q_BHTC.dtype)


def attention(
    q_BHTC: Tensor,
    k_BGTC: Tensor,
    v_BGTU: Tensor,
    mask_B1TT: Tensor | Documents | None,
    scale: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`attention_reference` with fused kernels: our own for fp32 on a CPU (`stretto.ops.native.training`), else torch's. Documents take
    the place of their mask. Returns [B, H, T, U].
    """
    if isinstance(mask_B1TT, Documents):
        assert sinks_H is None, "attention with sinks needs a mask"
        return document_attention(q_BHTC, k_BGTC, v_BGTU, mask_B1TT, scale)
    if sinks_H is None and training.attends(q_BHTC, k_BGTC, v_BGTU, mask_B1TT):
        scale = 1 / math.sqrt(q_BHTC.shape[-1]) if scale is None else scale
        return training.attention(q_BHTC, k_BGTC, v_BGTU, mask_B1TT, scale)
    if q_BHTC.is_cuda and mask_B1TT is not None and q_BHTC.shape[1] != k_BGTC.shape[1]:
        # CUDA kernels that take a mask and do not store all scores need one key head per query head
        groups = q_BHTC.shape[1] // k_BGTC.shape[1]
        k_BGTC, v_BGTU = (x.repeat_interleave(groups, dim=1) for x in (k_BGTC, v_BGTU))
    grouped, width, value_width = q_BHTC.shape[1] != k_BGTC.shape[1], q_BHTC.shape[-1], v_BGTU.shape[-1]
    if sinks_H is not None:
        scale = 1 / math.sqrt(width) if scale is None else scale
        q_BHTC, k_BGTC, v_BGTU, mask_B1TT = _with_sinks(q_BHTC, k_BGTC, v_BGTU, mask_B1TT, sinks_H / scale)
    elif (
        value_width != width
    ):  # kernels need equal widths; zero padding changes no score and adds empty output channels
        scale = 1 / math.sqrt(width) if scale is None else scale
        q_BHTC, k_BGTC, v_BGTU = (
            F.pad(x, (0, max(width, value_width) - x.shape[-1])) for x in (q_BHTC, k_BGTC, v_BGTU)
        )
    y_BHTU = F.scaled_dot_product_attention(
        q_BHTC, k_BGTC, v_BGTU, attn_mask=mask_B1TT, is_causal=mask_B1TT is None, scale=scale, enable_gqa=grouped
    )
    return y_BHTU if y_BHTU.shape[-1] == value_width else y_BHTU[..., :value_width]


def _with_sinks(
    q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, mask_B1TS: Tensor | None, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and mask with the sinks as an additional first key, since torch's kernels have no sinks.

    All vectors get one more channel: the additional key has 1 in it, other keys 0, and queries the sink of their head. The value
    of the additional key is zero.
    """
    if mask_B1TS is None:
        mask_B1TS = causal_mask(q_BHTC.shape[2], q_BHTC.device)
    sink_BHT1 = sinks_H.to(q_BHTC.dtype).view(-1, 1, 1).expand(*q_BHTC.shape[:-1], 1)
    rest = -(q_BHTC.shape[-1] + 1) % 8  # GPU kernels need widths that are multiples of 8
    q_BHTC = F.pad(torch.cat((q_BHTC, sink_BHT1), -1), (0, rest))
    k_BGSC, v_BGSC = (F.pad(x, (0, 1 + rest, 1, 0)) for x in (k_BGSC, v_BGSC))
    first_S = torch.arange(k_BGSC.shape[2], device=k_BGSC.device) == 0
    sink_key_C = torch.arange(k_BGSC.shape[3], device=k_BGSC.device) == k_BGSC.shape[3] - 1 - rest
    k_BGSC = k_BGSC + (first_S[:, None] & sink_key_C).to(k_BGSC.dtype)
    return q_BHTC, k_BGSC, v_BGSC, F.pad(mask_B1TS, (1, 0), value=float(mask_B1TS.dtype == torch.bool))


def rotary_tables(positions_BT: Tensor, frequencies_R: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, T, R] (fp32) of the rotation at each position, times ``magnitude`` (RoFormer, 2104.09864)."""
    angle_BTR = positions_BT[..., None].float() * frequencies_R
    cos_BTR, sin_BTR = angle_BTR.cos(), angle_BTR.sin()
    return (cos_BTR, sin_BTR) if magnitude == 1.0 else (cos_BTR * magnitude, sin_BTR * magnitude)


def rotate(x_BTHC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Rotate the first 2·R of the C channels of every head; channels i and i + R are a pair."""
    if rows.rotates(x_BTHC, cos_BTR, sin_BTR):
        return rows.rotate(x_BTHC, cos_BTR, sin_BTR)
    half = cos_BTR.shape[-1]
    cos, sin = cos_BTR.unsqueeze(2).to(x_BTHC.dtype), sin_BTR.unsqueeze(2).to(x_BTHC.dtype)
    first, second = x_BTHC[..., :half], x_BTHC[..., half : 2 * half]
    rest = x_BTHC[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


MASKED = -1e9
"""Logit of an expert that may not be chosen. Finite, because −inf gives NaN gradients in the softmax of a masked row."""


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts and gates that the router chose for N tokens."""

    chosen_NK: Tensor
    """Expert ids, int64, in falling order of the selection score."""
    gates_NK: Tensor
    """Weights of the chosen experts, fp32; gradients reach the router through them."""


class Operators:
    """Interface of the operators of a forward pass, implemented with torch's own. Subclasses compute the same functions, with
    gradients, in another arithmetic."""

    is_plain = True
    """Whether these are torch's own, and not those of a `stretto.ops.matmul.Arithmetic`."""
    attends_by_document = True
    """Whether ``attention`` takes `Documents` in the place of a mask."""
    norm = staticmethod(rms_norm)
    swiglu = staticmethod(swiglu)
    rotary_tables = staticmethod(rotary_tables)
    attention = staticmethod(attention)

    def linear(self, x_ND: Tensor, weight: Weight, bias_F: Tensor | None = None) -> Tensor:
        """``x`` · ``weight``ᵀ + ``bias``, […, F], for ``x`` […, D]."""
        return linear(x_ND, weight, bias_F)

    def rounded(self, x: Tensor) -> Tensor:
        """``x`` rounded to the precision in which activations are stored between operators."""
        return x

    def router_logits(self, x_ND: Tensor, gate_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """Router logits [N, E], in fp32 also under autocast: routers decide on small differences."""
        with torch.autocast(x_ND.device.type, enabled=False):
            return F.linear(x_ND.float(), gate_ED.float(), None if bias_E is None else bias_E.float())

    def router_scores(self, logits_NE: Tensor, softmax: bool) -> Tensor:
        """Softmax or sigmoid scores of all experts, fp32 [N, E]."""
        return logits_NE.softmax(-1) if softmax else logits_NE.sigmoid()

    def wide_sigmoid(self, logits_NE: Tensor) -> Tensor:
        """Sigmoid in fp64 [N, E], without gradient."""
        return logits_NE.detach().double().sigmoid_()

    def highest(self, choice_NE: Tensor, top_k: int) -> Tensor:
        """Experts with the ``top_k`` highest scores [N, K], in falling order; torch decides between equal scores."""
        return choice_NE.topk(top_k, dim=-1).indices

    def gate_sum(self, gates_NK: Tensor) -> Tensor:
        """Sum of each token's gates [N, 1]."""
        return gates_NK.sum(-1, keepdim=True)

    def experts(self, x_ND: Tensor, routes: Routes, weights: Experts) -> Tensor:
        """Output of the routed experts [N, D]: `stretto.ops.moe.experts`."""
        return experts(x_ND, routes.chosen_NK, routes.gates_NK, weights)

    def head(self, weight_VD: Tensor) -> Callable[[Tensor], Tensor]:
        """Function from final hidden states […, D] to logits […, V], prepared once and called for many chunks."""
        return partial(self.linear, weight=weight_VD)


ORDINARY = Operators()


def route(
    logits_NE: Tensor,
    bias_NE: Tensor | None,
    allowed_NE: Tensor | None,
    top_k: int,
    *,
    softmax: bool,
    normalize: bool,
    scaling: float,
    groups: tuple[int, int] = (1, 1),
    operators: Operators = ORDINARY,
    choose: Callable[[Tensor], Tensor] | None = None,
) -> Routes:
    """Choose ``top_k`` experts for each token.

    Args:
        bias_NE: added to the scores for the selection only, not for the gates (auxiliary-loss-free balancing, 2408.15664).
            Broadcasts over tokens, as does ``allowed_NE``.
        allowed_NE: False masks an expert *before* the softmax, so the router of a narrower network is exactly this router
            with columns removed.
        normalize: divide the gates by their sum over the chosen experts, so the norm of the output does not depend on ``top_k``.
        scaling: factor of the gates.
        groups: number of equal groups of experts, and number of groups in which each token chooses: those with the highest sum
            of their two best scores.
        choose: replaces the router's choice: receives it, int64 [N, K], and returns the choice to use. Gates still come from
            these logits, so gradients reach the router. −1 means no expert (a token that used fewer than ``top_k``); that place
            repeats the row's first expert with a gate of 0.
    """
    logits_NE = logits_NE.float()
    if allowed_NE is not None:
        logits_NE = logits_NE.masked_fill(~allowed_NE, MASKED)
    scores_NE = operators.router_scores(logits_NE, softmax)
    is_absent_NK = None
    with torch.no_grad():
        choice_NE = selection(logits_NE, scores_NE, bias_NE, softmax, operators)
        if allowed_NE is not None:  # a masked score is 0, and a negative bias could bring allowed experts below it
            choice_NE = choice_NE.masked_fill(~allowed_NE, MASKED)
        if groups[0] > 1:
            choice_NE = in_best_groups(choice_NE, *groups, operators)
        chosen_NK = operators.highest(choice_NE, top_k)
        if choose is not None:
            chosen_NK = choose(chosen_NK)
            is_absent_NK = chosen_NK < 0
            chosen_NK = torch.where(is_absent_NK, chosen_NK[:, :1], chosen_NK)
    gates_NK = scores_NE.gather(-1, chosen_NK)
    if is_absent_NK is not None:
        gates_NK = gates_NK.masked_fill(is_absent_NK, 0.0)
    if normalize:
        gates_NK = gates_NK / (operators.gate_sum(gates_NK) + 1e-20)
    return Routes(chosen_NK, gates_NK * scaling if scaling != 1.0 else gates_NK)


def selection(
    logits_NE: Tensor, scores_NE: Tensor, bias_NE: Tensor | None, softmax: bool, operators: Operators
) -> Tensor:
    """Selection scores [N, E]: score + bias; a sigmoid is computed in fp64.

    Router logits of an upcycled network (`stretto.model.upcycle`) differ by about 1e-5 around a score of ½, a range in which fp32
    has only about a hundred values. In fp32 there would be ties, decided by the rounding of a product with that many experts.
    """
    if not softmax:
        scores_NE = operators.wide_sigmoid(logits_NE)
    return scores_NE if bias_NE is None else scores_NE + bias_NE


def in_best_groups(choice_NE: Tensor, num_groups: int, num_chosen: int, operators: Operators) -> Tensor:
    """``choice_NE`` with `MASKED` outside each token's ``num_chosen`` best groups (DeepSeek-V3, 2412.19437, §2.1.2)."""
    groups_NME = choice_NE.unflatten(-1, (num_groups, -1))
    two_NM2 = groups_NME.gather(-1, operators.highest(groups_NME, 2))
    best_NM = operators.highest(two_NM2[..., 0] + two_NM2[..., 1], num_chosen)
    is_best_NM = torch.zeros_like(two_NM2[..., 0], dtype=torch.bool).scatter_(-1, best_NM, True)
    return groups_NME.masked_fill(~is_best_NM[..., None], MASKED).flatten(-2)
