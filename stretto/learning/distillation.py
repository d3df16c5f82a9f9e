"""On-policy distillation: loss of the sampled tokens against the teacher, and weights of the sources.

The student's distribution is always that of its current weights, so samples may be stale or come from several versions. Teachers'
final hidden states are kept, not their logits (V ≫ D): both heads are applied to one chunk of tokens at a time, and the full
[N, V] logits of neither network exist at once.

Every form of the loss, and its gradient, is zero where the two distributions are equal. A plain top-k sum
Σ_K π·(log π − log q) would have the gradient of Σ_K π there, and is not offered.

Shape letters: N positions of a pass, M tokens that a teacher scores, C of these in a chunk, D hidden, V vocabulary, K of its
tokens, S statistics of each position (`STATISTICS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.learning.objective import PolicyObjective
from stretto.learning.recipe import DistillConfig
from stretto.ops.logprob import IGNORED, Teacher, add_product_, chosen_logprobs, head_dtype
from stretto.ops.native.products import product
from stretto.ops.operators import ORDINARY, Operators
from stretto.train.step import Measured

_TINY = torch.finfo(torch.float32).tiny
_CHUNK, _CHUNK_LOGITS = 1024, 1 << 26
"""Largest number of tokens, and of logits, in a chunk: 256 MiB in fp32, for about six arrays."""
_MIN_GAP = 0.01
"""Smallest weight of a source relative to one whose KL has not changed, so that learnt sources are still trained."""
STATISTICS = ("logp", "entropy", "kl", "signal", "teacher_entropy", "slope")
"""Statistics of each token: log π, the student's entropy, KL(π ‖ q), log q − log π, the teacher's entropy, and the sum of the
absolute gradient of the loss by the logits, from which each source's share of the gradient is computed. To the last one,
`DistillObjective` adds that of the policy loss."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A teacher's scores of some positions of a pass. Made by `stretto.learning.teachers`."""

    places_M: Tensor
    """Indices into the flattened positions of a rank's rows; int64."""
    scores: Teacher | Tensor
    """Final hidden states [M, D] with their head, or log-probabilities [M] of the targets or of their spans."""
    spans_M: Tensor | None = None
    """For a teacher with another tokenizer: number of the span of text of each target, int64; each target then has the
    log-probability of its whole span. None: each target has its own."""

    def summed(self, values_M: Tensor) -> Tensor:
        """Sums of ``values_M`` over spans, at each target of the span."""
        if self.spans_M is None:
            return values_M
        spans, at_M = self.spans_M.unique(return_inverse=True)
        return values_M.new_zeros(len(spans)).index_add(0, at_M, values_M)[at_M]

    def estimate(self, gap_M: Tensor) -> Tensor:
        """Non-negative estimate of each target's part in KL(π ‖ q): half of the squared gap, divided by the length of its span."""
        return 0.5 * gap_M.square() / self.summed(torch.ones_like(gap_M))


# Forms of the loss


def form_loss(student_CV: Tensor, teacher_CV: Tensor, config: DistillConfig) -> tuple[Tensor, Tensor]:
    """Loss [C] and its gradient [C, V] by the student's logits, from the log-probabilities [C, V] of student and teacher."""
    probs_CV, gap_CV = student_CV.exp(), student_CV - teacher_CV
    if config.form == "full":
        loss_C1 = (probs_CV * gap_CV).sum(-1, keepdim=True)
        grad_CV = probs_CV * (gap_CV - loss_C1)
    else:
        ids_CK = student_CV.topk(min(config.top_k, student_CV.shape[-1])).indices
        gap_CK, probs_CK = gap_CV.gather(-1, ids_CK), probs_CV.gather(-1, ids_CK)
        loss_C1 = (probs_CK * gap_CK).sum(-1, keepdim=True)
        if config.form == "top_k":  # d/dπ of π·log(π/q) − π + q is log(π/q) alone
            rest_C1, mean_C1 = torch.zeros_like(loss_C1), loss_C1
            loss_C1 = loss_C1 + (teacher_CV.gather(-1, ids_CK).exp() - probs_CK).sum(-1, keepdim=True)
        else:
            own_C1, others_C1 = (
                each.scatter(-1, ids_CK, 0.0).sum(-1, keepdim=True) for each in (probs_CV, teacher_CV.exp())
            )
            rest_C1 = own_C1.clamp_min(_TINY).log() - others_C1.clamp_min(_TINY).log()
            loss_C1 = mean_C1 = loss_C1 + own_C1 * rest_C1
        grad_CV = probs_CV * (rest_C1 - mean_C1)
        grad_CV.scatter_(-1, ids_CK, probs_CK * (gap_CK - mean_C1))
    if config.entropy_aware is not None:
        taught_CV = teacher_CV.exp()
        is_open_C1 = -(taught_CV * teacher_CV).sum(-1, keepdim=True) > config.entropy_aware
        loss_C1 = loss_C1 - is_open_C1 * (taught_CV * gap_CV).sum(-1, keepdim=True)
        grad_CV += is_open_C1 * (probs_CV - taught_CV)
    return loss_C1.squeeze(-1), grad_CV


def _log_probs(logits_CV: Tensor) -> Tensor:
    """Log-softmax [C, V] in fp32 or higher precision."""
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).log_softmax(-1)


class _TaughtLoss(torch.autograd.Function):
    """The loss of `taught_loss`. Its gradient is computed in the forward pass, while the logits of a chunk exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        targets_N: Tensor,
        weights_N: Tensor,
        lessons: Sequence[Lesson],
        config: DistillConfig,
        operators: Operators,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = head_dtype(hidden_ND, head_VD)
        weight_VD = head_VD.to(dtype)
        head = operators.head(weight_VD)
        wide = torch.promote_types(dtype, torch.float32)
        loss = hidden_ND.new_zeros((), dtype=wide)
        statistics_SN = hidden_ND.new_zeros((len(STATISTICS), len(hidden_ND)), dtype=wide)
        wants_grad = any(ctx.needs_input_grad[:2])
        grad_ND, grad_VD = torch.zeros_like(hidden_ND), torch.zeros_like(head_VD)
        for lesson in lessons:
            assert isinstance(lesson.scores, Teacher), f"form {config.form!r} needs the teacher's hidden states"
            teacher_head = operators.head(lesson.scores.head_VD.detach().to(dtype))
            for at_C, taught_CD in zip(lesson.places_M.split(chunk), lesson.scores.hidden_ND.split(chunk), strict=True):
                hidden_CD, target_C1 = hidden_ND[at_C].to(dtype), targets_N[at_C, None]
                student_CV = _log_probs(head(hidden_CD))
                teacher_CV = _log_probs(teacher_head(taught_CD.to(dtype)))
                loss_C, grad_CV = form_loss(student_CV, teacher_CV, config)
                weights_C = weights_N[at_C].to(wide)
                loss += (weights_C * loss_C).sum()
                grad_CV *= weights_C[:, None]
                logp_C, taught_C = (each.gather(-1, target_C1)[:, 0] for each in (student_CV, teacher_CV))
                probs_CV = student_CV.exp()
                statistics_SN[:, at_C] = torch.stack(
                    [
                        logp_C,
                        -(probs_CV * student_CV).sum(-1),
                        (probs_CV * (student_CV - teacher_CV)).sum(-1),
                        taught_C - logp_C,
                        -(teacher_CV.exp() * teacher_CV).sum(-1),
                        grad_CV.abs().sum(-1),
                    ]
                )
                if wants_grad:
                    delta_CV = grad_CV.to(dtype)
                    grad_ND[at_C] = product(delta_CV, weight_VD).to(grad_ND.dtype)
                    add_product_(grad_VD, delta_CV.t(), hidden_CD)
        ctx.save_for_backward(grad_ND, grad_VD)
        ctx.mark_non_differentiable(statistics_SN)
        return loss, statistics_SN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_ND, grad_VD = ctx.saved_tensors
        return grad_ND * grads[0], grad_VD * grads[0], *[None] * 6


def taught_loss(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    lessons: Sequence[Lesson],
    config: DistillConfig,
    operators: Operators = ORDINARY,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over all lessons' tokens of weight times loss of ``config.form``, which must not be ``sampled``.

    Returns: the loss (a scalar, differentiable in ``hidden_ND`` and ``head_VD``), and the `STATISTICS` [S, N] of each position,
    0 without a teacher.
    """
    chunk = chunk or max(1, min(_CHUNK, _CHUNK_LOGITS // len(head_VD)))
    return _TaughtLoss.apply(hidden_ND, head_VD, targets_N, weights_N, lessons, config, operators, chunk)


def _slope(loss: Tensor, logp_N: Tensor) -> Tensor:
    """Sum [N] of the absolute gradient by each token's logits of a loss of the targets' log-probabilities ``logp_N``."""
    (grad_N,) = torch.autograd.grad(loss, logp_N, retain_graph=True)
    # the gradient of log π(y) is 1 − π(y) at y, and −π elsewhere
    return 2 * (grad_N * torch.expm1(logp_N.detach())).abs()


@dataclass(frozen=True, slots=True, eq=False)
class DistillObjective:
    """Distillation loss on one rank's rows of a batch, plus the policy loss if there are rewards or a KL to a reference."""

    config: DistillConfig
    lessons: tuple[Lesson, ...]
    policy: PolicyObjective
    has_policy: bool
    """Whether the policy loss is added: there are advantages, or a KL to the reference."""

    def __call__(self, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Measured:
        """Sum over the targets of weight·(form of the reverse KL + policy loss)."""
        operators = self.policy.operators
        weights_N, behaviour_N, advantages_N = (
            self.policy.streams[f"{name}_BT"].flatten() for name in ("weights", "behaviour", "advantages")
        )
        if self.config.form == "sampled":
            logp_N, entropy_N = chosen_logprobs(hidden_ND, head_VD, targets_N, operators=operators)
            signal_N, kl_N = torch.zeros_like(logp_N), torch.zeros_like(logp_N)
            for lesson in self.lessons:
                assert isinstance(lesson.scores, Tensor)
                gap_M = lesson.scores - lesson.summed(logp_N.detach()[lesson.places_M])
                signal_N[lesson.places_M], kl_N[lesson.places_M] = gap_M, lesson.estimate(gap_M)
            clipped_N = signal_N.clamp(-self.config.clip, self.config.clip)
            measured = self.policy.measured(logp_N, entropy_N, targets_N, advantages_N + clipped_N)
            statistics = {"signal": signal_N, "kl": kl_N, "slope": _slope(measured.loss, logp_N)}
            return replace(measured, streams_N={**measured.streams_N, **statistics})
        loss, statistics_SN = taught_loss(
            hidden_ND, head_VD, targets_N, weights_N, self.lessons, self.config, operators
        )
        statistics = dict(zip(STATISTICS, statistics_SN.float(), strict=True))
        if self.has_policy:
            logp_N, entropy_N = chosen_logprobs(hidden_ND, head_VD, targets_N, operators=operators)
            measured = self.policy.measured(logp_N, entropy_N, targets_N, advantages_N)
            statistics["slope"] = statistics["slope"] + _slope(measured.loss, logp_N)
            extra = 3 + measured.num_extra_head_products  # `taught_loss` and `chosen_logprobs` both apply the head
            return Measured(loss + measured.loss, measured.nll_N, {**statistics, **measured.streams_N}, extra)
        ratio_N = torch.where(targets_N != IGNORED, (statistics["logp"] - behaviour_N).exp(), 0.0)
        return Measured(loss, -statistics["logp"], {**statistics, "ratio": ratio_N})


# Weights of the sources


@dataclass(frozen=True, slots=True)
class Progress:
    """Distance between the student and the teacher of a source. Written by `progressed`, kept in snapshots."""

    first_kl: float
    """KL in nats per token at the source's first step. For the form ``sampled``, all KLs are estimated by half the mean square of
    log q − log π, which is not negative."""
    kl: float
    """KL in nats per token at the source's last step."""
    sigma: float
    """Standard deviation of log q − log π over the source's tokens at its last step."""


def source_weights(
    sources: Sequence[str],
    nums: Sequence[int],
    balance: str,
    shares: Mapping[str, float],
    progress: Mapping[str, Progress],
) -> list[float]:
    """Weight of each token by sample; over all tokens of the update the weights sum to 1.

    Args:
        sources: source of each sample.
        nums: number of trained tokens of each sample.
        balance: see `DistillConfig.balance`.
        shares: by source, its share relative to the other sources of the update.
        progress: by source, for sources of earlier steps.
    """
    if balance == "none":
        return [1.0 / max(1, sum(nums))] * len(nums)
    samples, tokens = dict.fromkeys(sources, 0), dict.fromkeys(sources, 0)
    for source, num in zip(sources, nums, strict=True):
        samples[source] += num > 0
        tokens[source] += num
    factors = {source: shares[source] for source in tokens if tokens[source]}
    known = {source: progress[source] for source in factors if source in progress}
    if balance == "gap":
        for source, past in known.items():
            factors[source] *= min(max(past.kl / max(past.first_kl, _TINY), _MIN_GAP), 1.0)
    elif balance == "sigma" and known:  # the others, such as untaught sources, keep their shares
        smallest = max(1e-3 * max(past.sigma for past in known.values()), _TINY)
        scaled = {source: factors[source] / max(past.sigma, smallest) for source, past in known.items()}
        kept = sum(factors[source] for source in known) / sum(scaled.values())
        factors |= {source: kept * factor for source, factor in scaled.items()}
    total = sum(factors.values())
    return [
        factors[source] / (total * samples[source] * num if balance == "sequence" else total * tokens[source])
        if num
        else 0.0
        for source, num in zip(sources, nums, strict=True)
    ]


TokenStatistics = Mapping[str, NDArray[np.float64]]
"""Statistics [N] of all tokens of a step, by name."""


def progressed(
    before: Mapping[str, Progress], statistics: TokenStatistics, sources_N: NDArray[np.str_], taught: Sequence[str]
) -> dict[str, Progress]:
    """``before``, updated with the KL and sigma of the step's ``taught`` sources."""
    after = dict(before)
    for source in taught:
        here_N = sources_N == source
        if here_N.any():
            kl, sigma = float(statistics["kl"][here_N].mean()), float(statistics["signal"][here_N].std())
            after[source] = Progress(before[source].first_kl if source in before else kl, kl, sigma)
    return after


def source_scalars(statistics: TokenStatistics, sources_N: NDArray[np.str_], taught: Sequence[str]) -> dict[str, float]:
    """Scalars of the log: each source's share of the gradient, and KL and entropies of each ``taught`` source."""
    scalars: dict[str, float] = {}
    total = max(float(statistics["slope"].sum()), _TINY)
    for source in sorted({*taught, *np.unique(sources_N).tolist()}):
        here_N = sources_N == source
        scalars[f"distill/share/{source}"] = float(statistics["slope"][here_N].sum()) / total
        if source in taught and here_N.any():
            for name in ("kl", "entropy", "teacher_entropy"):
                if name in statistics:
                    scalars[f"distill/{name}/{source}"] = float(statistics[name][here_N].mean())
    return scalars
