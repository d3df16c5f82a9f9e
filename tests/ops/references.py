"""Slow definitions of fast operators, which the tests compare them with. Shape letters are those of the operators' own files."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.grouped import Clamp, ExpertBiases, swiglu, swiglu_reference
from stretto.ops.logprob import IGNORED, Teacher, TopLogProbs, processed_log_probs
from stretto.ops.operators import MASKED, Routes, route
from stretto.ops.paged import ExpertWeights, RouteRule


def experts_reference(
    x_ND: Tensor,
    chosen_NK: Tensor,
    gates_NK: Tensor,
    gate_up_EFD: Tensor,
    down_EDI: Tensor,
    biases: ExpertBiases | None = None,
    clamp: Clamp | None = None,
) -> Tensor:
    """SwiGLU experts, one token group at a time: the definition that `experts` is tested against.

    ``gate_up_EFD`` holds the gate's rows, then the up projection's (F = 2·I). Returns [N, D].
    """
    out_ND = torch.zeros_like(x_ND)
    for expert in range(gate_up_EFD.shape[0]):
        token, choice = (chosen_NK == expert).nonzero(as_tuple=True)
        gate_up_bias_F, down_bias_D = (None, None) if biases is None else (each[expert] for each in biases)
        hidden = swiglu_reference(F.linear(x_ND[token], gate_up_EFD[expert], gate_up_bias_F), clamp)
        y = F.linear(hidden, down_EDI[expert], down_bias_D) * gates_NK[token, choice, None].to(x_ND.dtype)
        out_ND = out_ND.index_add(0, token, y.to(x_ND.dtype))
    return out_ND


def head_loss_reference(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    teacher: Teacher | TopLogProbs | None = None,
    ce_weight: float = 1.0,
) -> Tensor:
    """Sum over kept tokens of ``ce_weight``·CE + (1 − ``ce_weight``)·KL(teacher ‖ student), by autograd."""
    kept_N = targets_N != IGNORED
    loss = -ce_weight * chosen_logprobs_reference(hidden_ND, head_VD, targets_N)[0].sum()
    if isinstance(teacher, TopLogProbs):
        student_NV = F.linear(hidden_ND, head_VD).float().log_softmax(-1)
        gap_NK = teacher.logprobs_NK - student_NV.gather(-1, teacher.ids_NK)
        kl_N = (teacher.logprobs_NK.exp() * gap_NK).sum(-1)
        rest_N = student_NV.exp().scatter(-1, teacher.ids_NK, 0.0).sum(-1)
        has_rest_N = teacher.rest_N > 0
        shares_N = torch.where(has_rest_N, teacher.rest_N, 1.0) / torch.where(has_rest_N, rest_N, 1.0)
        loss = loss + (1.0 - ce_weight) * torch.where(kept_N, kl_N + teacher.rest_N * shares_N.log(), 0.0).sum()
    elif teacher is not None:
        student_NV = F.linear(hidden_ND, head_VD).float().log_softmax(-1)
        teacher_NV = F.linear(teacher.hidden_ND.detach(), teacher.head_VD.detach()).float().log_softmax(-1)
        kl_N = (teacher_NV.exp() * (teacher_NV - student_NV)).sum(-1)
        loss = loss + (1.0 - ce_weight) * torch.where(kept_N, kl_N, 0.0).sum()
    return loss


def chosen_logprobs_reference(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`chosen_logprobs` by autograd, all logits at once."""
    logp_NV = processed_log_probs(F.linear(hidden_ND, head_VD), temperature)
    kept_N = targets_N != IGNORED
    picked_N = logp_NV.gather(-1, targets_N.clamp_min(0)[:, None]).squeeze(-1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1).detach()
    return torch.where(kept_N, picked_N, 0.0), torch.where(kept_N, entropy_N, 0.0)


def route_tokens_reference(x_ND: Tensor, gate_ED: Tensor, rule: RouteRule, bias_E: Tensor | None = None) -> Routes:
    """`stretto.ops.operators.route` a token at a time, each with its own top-k.

    Choices past a token's own top-k name expert E, which does not exist, with a weight of 0. Gates are fp32.
    """
    num_experts = gate_ED.shape[0]
    logits_NE = F.linear(x_ND.float(), gate_ED.float(), bias_E)
    chosen_NK = torch.full((len(x_ND), rule.top_k), num_experts, device=x_ND.device)
    gates_NK = torch.zeros(len(x_ND), rule.top_k, device=x_ND.device)
    for token, logits_E in enumerate(logits_NE):
        top_k = rule.top_k if rule.dropped_NK is None else rule.top_k - int(rule.dropped_NK[token].sum())
        bias_E = None if rule.bias is None else rule.bias.expand_as(logits_NE)[token]
        allowed_E = None if bias_E is None else bias_E != MASKED
        routes = route(
            logits_E,
            bias_E,
            allowed_E,
            top_k,
            softmax=rule.softmax,
            normalize=rule.normalize,
            scaling=rule.scaling,
            groups=rule.groups,
        )
        chosen_NK[token, :top_k], gates_NK[token, :top_k] = routes.chosen_NK, routes.gates_NK
    return Routes(chosen_NK, gates_NK)


def chosen_experts_reference(x_ND: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Each token's sum over its choices of gate · down(swiglu(gate_up(x))), in the order it chose; expert E adds nothing."""
    out_ND = torch.zeros_like(x_ND)
    gate_up_EFD, down_EDI, biases, clamp = weights.experts
    for token in range(len(x_ND)):
        for expert, gate in zip(routes.chosen_NK[token].tolist(), routes.gates_NK[token], strict=True):
            if expert < len(down_EDI):
                bias_F, bias_D = (None, None) if biases is None else (each[expert] for each in biases)
                hidden_I = swiglu(F.linear(x_ND[token], gate_up_EFD[expert], bias_F), clamp)
                out_ND[token] += F.linear(hidden_I, down_EDI[expert], bias_D) * gate.to(x_ND.dtype)
    return out_ND
