"""Losses and log-probabilities from hidden states, computing the [N, V] logits one chunk of tokens at a time.

Shape letters: N tokens, S tokens with a loss, M tokens of a chunk, D hidden, V vocabulary, K tokens of a top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stretto.ops.grouped import compute_dtype
from stretto.ops.native import products, rows, training
from stretto.ops.operators import ORDINARY, Operators

IGNORED = -100
"""Target of a position without a loss, as in PyTorch's losses."""
CHUNK = 1024
"""Tokens whose logits are in memory at once, on a CPU."""
DEVICE_CHUNK = 4096
"""The same on an accelerator, or more where their logits are small; see `chunk_tokens`."""
CHUNK_BYTES = 2**30
WORTH_LEAVING_OUT = 0.9
"""Largest share of tokens with a loss for which the head is applied to those tokens only. In conversations, half of all tokens
belong to prompts."""


def num_head_tokens(num_tokens: int, num_targets: int) -> int:
    """Number of ``num_tokens`` tokens, of which ``num_targets`` have a loss, to which `head_loss` applies the head if there is no teacher.
    Ranks decide for their own tokens; this decides for all."""
    return num_tokens if num_targets > WORTH_LEAVING_OUT * num_tokens else num_targets


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher's distribution: final hidden states of the student's tokens, and the teacher's head.

    The hidden widths D of teacher and student may differ, the vocabularies may not. Neither tensor receives a gradient.
    """

    hidden_ND: Tensor
    head_VD: Tensor


@dataclass(frozen=True, slots=True)
class TopLogProbs:
    """The K most probable tokens of a teacher's distribution, and the probability of all other tokens.

    A KL divergence to it has K + 1 outcomes, the last of them "any other token". With the K tokens alone, the gradient would not
    be zero where student and teacher are equal.
    """

    ids_NK: Tensor
    """Token ids, int64, distinct in each row."""
    logprobs_NK: Tensor
    """fp32."""
    rest_N: Tensor
    """Probability of all other tokens, fp32; exactly 0 if there are none."""


AnyTeacher = Teacher | TopLogProbs


def chunk_tokens(head_VD: Tensor) -> int:
    """Number of tokens whose logits [M, V], in fp32, are in memory at once.

    Every chunk reads and writes the gradient of the head once. So an accelerator takes as many tokens as have logits of 1 GiB
    (`CHUNK_BYTES`), as a power of two, and at least `DEVICE_CHUNK`. A CPU takes `CHUNK`, whose logits nearly fit its caches.
    """
    if head_VD.device.type == "cpu":
        return CHUNK
    return max(DEVICE_CHUNK, 1 << (CHUNK_BYTES // (4 * head_VD.shape[0])).bit_length() - 1)


def head_dtype(hidden_ND: Tensor, head_VD: Tensor) -> torch.dtype:
    """Data type of the operands of the head's products: autocast's, or fp32 where the products round their operands themselves."""
    return torch.float32 if training.rounds(hidden_ND, head_VD) else compute_dtype(hidden_ND)


def wide_product(a_NM: Tensor, b_MF: Tensor, out_NF: Tensor | None = None) -> Tensor:
    """``a`` · ``b``, fp32 for operands in bf16, which a GPU multiplies as they are, with sums in fp32; in ``out`` if it is given, of
    a `Room`."""
    if out_NF is not None:
        return products.product(a_NM, b_MF, out_NF)
    if a_NM.is_cuda and a_NM.dtype == b_MF.dtype == torch.bfloat16:
        return torch.mm(a_NM, b_MF, out_dtype=torch.float32)
    return products.product(a_NM, b_MF).float()


class Room:
    """Memory for the logits of ``num_tokens`` tokens, chunk after chunk, where the products with ``weight_VD`` give fp32 on a CPU.

    A CPU's memory for each chunk alone would come from the system every time, which first fills it with zeros.
    """

    def __init__(self, num_tokens: int, weight_VD: Tensor | None):
        is_used = weight_VD is not None and weight_VD.device.type == "cpu" and weight_VD.dtype == torch.float32
        self._room_NV = weight_VD.new_empty(num_tokens, len(weight_VD)) if is_used and weight_VD is not None else None

    def of(self, hidden_ND: Tensor) -> Tensor | None:
        """Room for the logits of ``hidden_ND``; None: the product allocates them."""
        return None if self._room_NV is None else self._room_NV[: len(hidden_ND)]


def add_product_(total_FD: Tensor, a_FN: Tensor, b_ND: Tensor) -> None:
    """Add ``a`` · ``b`` to ``total``, whose precision the product has.

    A GPU multiplies operands in bf16 as they are. A CPU widens them: products of the same numbers in fp32 took a quarter of a training
    step on an H100, and on CPUs without bf16 units they are faster.
    """
    if total_FD.is_cuda and a_FN.dtype == b_ND.dtype == torch.bfloat16:
        total_FD.add_(wide_product(a_FN, b_ND))
    else:
        products.add_product_(total_FD, a_FN.to(total_FD.dtype), b_ND.to(total_FD.dtype))


def _zero_gradient(weight_VD: Tensor) -> Tensor:
    """Zeros to sum a weight's gradient in: in fp32 at least, also for a weight in bf16."""
    return torch.zeros_like(weight_VD, dtype=torch.promote_types(weight_VD.dtype, torch.float32))


def top_log_probs(hidden_ND: Tensor, head_VD: Tensor, top_k: int) -> TopLogProbs:
    """The ``top_k`` most probable tokens at each position, computed as `head_loss` computes a teacher's distribution."""
    dtype = head_dtype(hidden_ND, head_VD)
    weight_VD = head_VD.detach().to(dtype)
    parts = []
    for part_ND in hidden_ND.split(chunk_tokens(head_VD)):
        logp_NV = wide_product(part_ND.to(dtype), weight_VD.t()).log_softmax(-1)
        logprobs_NK, ids_NK = logp_NV.topk(top_k)
        rest_N = logp_NV.exp_().scatter_(-1, ids_NK, 0.0).sum(-1)
        parts.append((ids_NK, logprobs_NK, rest_N))
    return TopLogProbs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def head_loss(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    teacher: AnyTeacher | None = None,
    ce_weight: float = 1.0,
    num_targets: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over tokens with a target of ``ce_weight``·CE + (1 − ``ce_weight``)·KL(teacher ‖ student).

    The gradient is computed in the forward pass, chunk by chunk. Reference: ``tests/ops/references.py:head_loss_reference``.

    Args:
        num_targets: number of tokens with a target, if the host knows it; None: the host waits until the device has counted them.

    Returns:
        The loss (scalar, fp32, differentiable in ``hidden_ND`` and ``head_VD``), and the negative log-likelihood of each token [N]
        (nats, detached, 0 where the target is `IGNORED`).
    """
    assert teacher is not None or ce_weight == 1.0, f"ce_weight {ce_weight} without a teacher"
    limit = WORTH_LEAVING_OUT * len(targets_N)
    if teacher is not None or (num_targets is not None and num_targets > limit):
        return _HeadLoss.apply(hidden_ND, head_VD, targets_N, teacher, ce_weight)
    kept_S = target_places(targets_N, num_targets)
    if len(kept_S) > limit:
        return _HeadLoss.apply(hidden_ND, head_VD, targets_N, None, ce_weight)
    loss, nll_S = _HeadLoss.apply(hidden_ND.index_select(0, kept_S), head_VD, targets_N[kept_S], None, ce_weight)
    return loss, nll_S.new_zeros(len(targets_N)).index_copy_(0, kept_S, nll_S)


def target_places(targets_N: Tensor, num_targets: int | None = None) -> Tensor:
    """Indices of the tokens with a target; the host waits for their number unless it is given."""
    is_target_N = targets_N != IGNORED
    if num_targets is None:
        return is_target_N.nonzero()[:, 0]
    return is_target_N.nonzero_static(size=num_targets)[:, 0]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, teacher: AnyTeacher | None, ce_weight: float
    ) -> tuple[Tensor, Tensor]:
        dtype = head_dtype(hidden_ND, head_VD)
        teacher_VD = teacher.head_VD.detach().to(dtype) if isinstance(teacher, Teacher) else None
        wants_grad, wants_head_grad = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[1]
        weight_VD = head_VD.to(dtype)
        nll_N = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=torch.float32)
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        grad_ND = torch.zeros_like(hidden_ND) if wants_grad else None
        grad_VD = _zero_gradient(head_VD) if wants_head_grad else None  # None: the head is frozen
        chunk = chunk_tokens(head_VD)
        own_room, teacher_room = (Room(min(chunk, len(hidden_ND)), each_VD) for each_VD in (weight_VD, teacher_VD))
        for start in range(0, hidden_ND.shape[0], chunk):
            part = slice(start, start + chunk)
            h_ND, t_N = hidden_ND[part].to(dtype), targets_N[part]
            teacher_NV = None
            if isinstance(teacher, Teacher) and teacher_VD is not None:
                taught_ND = teacher.hidden_ND[part].detach().to(dtype)
                teacher_NV = wide_product(taught_ND, teacher_VD.t(), teacher_room.of(taught_ND))
            # logits, which the next call overwrites with probabilities
            probs_NV = wide_product(h_ND, weight_VD.t(), own_room.of(h_ND))
            if isinstance(teacher, TopLogProbs):
                nll_N[part], kl_sum, teacher_NV = _top_losses(probs_NV, t_N, teacher, part)
            else:
                nll_N[part], kl_sum = _chunk_losses(probs_NV, t_N, teacher_NV)
            loss += ce_weight * nll_N[part].sum() + (1.0 - ce_weight) * kl_sum
            if grad_ND is None:
                continue
            delta_NV = _logit_gradient(probs_NV, t_N, teacher_NV, ce_weight).to(dtype)
            grad_ND[part] = products.product(delta_NV, weight_VD)
            if grad_VD is not None:
                add_product_(grad_VD, delta_NV.t(), h_ND)
        ctx.save_for_backward(grad_ND, grad_VD)
        ctx.head_dtype = head_VD.dtype
        ctx.mark_non_differentiable(nll_N)
        return loss, nll_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_ND, grad_VD = ctx.saved_tensors
        grad_head = None if grad_VD is None else (grad_VD * grads[0]).to(ctx.head_dtype)
        return grad_ND * grads[0], grad_head, None, None, None


def _chunk_losses(logits_NV: Tensor, targets_N: Tensor, teacher_NV: Tensor | None) -> tuple[Tensor, Tensor]:
    """Negative log-likelihoods [N] and the sum of the KL divergences; overwrites both tensors of logits with probabilities.

    Rows without a target become zero, so they add nothing to the KL and receive no gradient.
    """
    kept_N1 = (targets_N != IGNORED)[:, None]
    target_N1 = logits_NV.gather(-1, targets_N.clamp_min(0)[:, None])
    gap_NV = None if teacher_NV is None else teacher_NV - logits_NV
    lse_N1 = _softmax_(logits_NV, kept_N1)
    nll_N = ((lse_N1 - target_N1) * kept_N1).squeeze(-1)
    if teacher_NV is None or gap_NV is None:
        return nll_N, nll_N.new_zeros(())
    # KL = Σ_v p·(teacher − student) − lse_teacher + lse_student, with p the teacher's probabilities
    teacher_lse_N1 = _softmax_(teacher_NV, kept_N1)
    return nll_N, (teacher_NV * gap_NV).sum() + ((lse_N1 - teacher_lse_N1) * kept_N1).sum()


def _top_losses(
    logits_NV: Tensor, targets_N: Tensor, teacher: TopLogProbs, part: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """`_chunk_losses` for a `TopLogProbs` teacher. Also returns the distribution [N, V] whose cross-entropy has the gradient of the
    KL: the teacher's probabilities for its K tokens, and the student's for all others, scaled to the teacher's sum over them.
    """
    kept_N1 = (targets_N != IGNORED)[:, None]
    ids_NK, logp_NK, rest_N1 = teacher.ids_NK[part], teacher.logprobs_NK[part], teacher.rest_N[part, None] * kept_N1
    target_N1 = logits_NV.gather(-1, targets_N.clamp_min(0)[:, None])
    own_NK = logits_NV.gather(-1, ids_NK)
    lse_N1 = _softmax_(logits_NV, kept_N1)
    probs_NK = logp_NK.exp() * kept_N1
    teacher_NV = logits_NV.scatter(-1, ids_NK, 0.0)
    share_N1 = rest_N1 / teacher_NV.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    kl = (probs_NK * (logp_NK - own_NK + lse_N1)).sum() + torch.special.xlogy(rest_N1, share_N1).sum()
    teacher_NV.mul_(share_N1).scatter_(-1, ids_NK, probs_NK)
    return ((lse_N1 - target_N1) * kept_N1).squeeze(-1), kl, teacher_NV


def _softmax_(logits_NV: Tensor, kept_N1: Tensor) -> Tensor:
    """Overwrite logits with probabilities, or with zero in rows that are not kept; returns the logsumexp of the rows [N, 1].

    One exponential per entry. A separate logsumexp and softmax take two, which is most of their time on a CPU.
    """
    if rows.softmaxes(logits_NV):
        return rows.softmax_(logits_NV, kept_N1)
    highest_N1 = logits_NV.amax(-1, keepdim=True)
    total_N1 = logits_NV.sub_(highest_N1).exp_().sum(-1, keepdim=True)
    logits_NV.mul_(kept_N1 / total_N1)
    return total_N1.log().add_(highest_N1)


def _logit_gradient(probs_NV: Tensor, targets_N: Tensor, teacher_NV: Tensor | None, ce_weight: float) -> Tensor:
    """d loss / d logits [N, V] = student − (ce_weight·onehot + (1 − ce_weight)·teacher); overwrites ``probs_NV``."""
    if teacher_NV is not None:
        probs_NV.sub_(teacher_NV, alpha=1.0 - ce_weight)
    hit_N1 = torch.where(targets_N != IGNORED, -ce_weight, 0.0)[:, None].to(probs_NV.dtype)
    return probs_NV.scatter_add_(-1, targets_N.clamp_min(0)[:, None], hit_N1)


def processed_log_probs(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities (fp32) of the distribution that tokens are sampled from, with the temperature applied.

    The engine's sampler performs the same operations, so equal logits give equal bits in trainer and engine.
    """
    logits_NV = logits_NV.float()
    return (logits_NV if temperature == 1.0 else logits_NV / temperature).log_softmax(-1)


def chosen_logprobs(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    temperature: float = 1.0,
    operators: Operators = ORDINARY,
) -> tuple[Tensor, Tensor]:
    """Processed log-probability of each target, and entropy of the distribution that the target comes from.

    The backward pass computes logits again, chunk by chunk, because it receives a gradient for each token, which the forward
    pass cannot know. Tokens without a target cost nothing. ``operators`` compute the head's product, as in the engine.

    Returns:
        Log-probabilities [N] (nats, fp32, differentiable in ``hidden_ND`` and ``head_VD``), and entropies [N] (nats, detached);
        both are 0 where the target is `IGNORED`.
    """
    assert temperature > 0, f"temperature {temperature}: a greedy choice has no log-probability"
    return _ChosenLogProbs.apply(hidden_ND, head_VD, targets_N, temperature, operators)


def _head(operators: Operators, weight_VD: Tensor) -> Callable[[Tensor], Tensor]:
    """The head of ``operators``; torch's own with logits in fp32, as in `head_loss`."""
    return partial(wide_product, b_MF=weight_VD.t()) if operators.is_plain else operators.head(weight_VD)


class _ChosenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, temperature: float, operators: Operators
    ) -> tuple[Tensor, Tensor]:
        dtype = head_dtype(hidden_ND, head_VD)
        kept_M = target_places(targets_N)
        head = _head(operators, head_VD.to(dtype))
        logp_N = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=torch.float32)
        entropy_N = torch.zeros_like(logp_N)
        for part in kept_M.split(chunk_tokens(head_VD)):
            logp_MV = processed_log_probs(head(hidden_ND[part].to(dtype)), temperature)
            logp_N[part] = logp_MV.gather(-1, targets_N[part, None]).squeeze(-1)
            entropy_N[part] = -(logp_MV.exp() * logp_MV).sum(-1)
        ctx.save_for_backward(hidden_ND, head_VD, targets_N, kept_M)
        ctx.dtype, ctx.temperature, ctx.operators = dtype, temperature, operators
        ctx.rounds = training.rounds(hidden_ND, head_VD)
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, head_VD, targets_N, kept_M = ctx.saved_tensors
        weight_VD = head_VD.to(ctx.dtype)
        head = _head(ctx.operators, weight_VD)
        grad_ND, grad_VD = torch.zeros_like(hidden_ND), _zero_gradient(head_VD)
        with torch.autocast("cpu", torch.bfloat16, enabled=ctx.rounds):  # as in the forward pass
            for part in kept_M.split(chunk_tokens(head_VD)):
                h_MD = hidden_ND[part].to(ctx.dtype)
                probs_MV = processed_log_probs(head(h_MD), ctx.temperature).exp_()
                # d log p / d logits = (onehot − p) / temperature
                g_M1 = (grads[0][part] / ctx.temperature)[:, None]
                delta_MV = probs_MV.mul_(-g_M1).scatter_add_(-1, targets_N[part, None], g_M1).to(ctx.dtype)
                grad_ND[part] = products.product(delta_MV, weight_VD).to(grad_ND.dtype)
                add_product_(grad_VD, delta_MV.t(), h_MD)
        return grad_ND, grad_VD.to(head_VD.dtype), None, None, None
