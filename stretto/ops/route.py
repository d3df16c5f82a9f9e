"""The router: which experts a token chooses, and with what weight.

Shape letters: N tokens, E experts, K chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.ops import exact

MASKED = -1e9
"""Logit of an expert that may not be chosen. Finite: −inf gives NaN gradients through the softmax of a masked row."""


@dataclass(frozen=True, slots=True)
class Routes:
    """What the router decided for N tokens."""

    chosen_NK: Tensor
    """Expert ids, int64, from the highest selection score down."""
    gates_NK: Tensor
    """Weights of the chosen experts, fp32; gradients reach the router through them."""
    own_NK: Tensor | None = None
    """What the router would have chosen by itself, where `chosen_NK` was recorded elsewhere; None: that is the same."""


def route(
    logits_NE: Tensor,
    bias_NE: Tensor | None,
    allowed_NE: Tensor | None,
    top_k: int,
    *,
    softmax: bool,
    normalize: bool,
    scaling: float,
    recorded_NK: Tensor | None = None,
    batch_invariant: bool = False,
) -> Routes:
    """Choose ``top_k`` experts a token.

    Selection looks at score + ``bias_NE`` (auxiliary-loss-free balancing, 2408.15664), weights at the score alone.
    ``allowed_NE`` masks experts *before* the softmax, so that the router of a narrower network is exactly this one
    with columns removed. ``bias_NE`` and ``allowed_NE`` broadcast over tokens. Gates are renormalised over the chosen
    (``normalize``) and multiplied by ``scaling``: the output's norm then does not depend on ``top_k``.

    ``recorded_NK`` (any integer type) replays choices made elsewhere (2510.11370): the experts are the recorded ones, in
    their recorded order, while their weights come from these logits, so that gradients reach the router. A row that
    begins with −1 has no record and chooses freely. −1 after that is a token that used fewer experts than ``top_k``:
    such a place repeats the first expert with a weight of 0.

    ``batch_invariant`` computes with `stretto.ops.exact`.
    """
    logits_NE = logits_NE.float()
    if allowed_NE is not None:
        logits_NE = logits_NE.masked_fill(~allowed_NE, MASKED)
    scores_NE = router_scores(logits_NE, softmax, batch_invariant)
    with torch.no_grad():
        choice_NE = scores_NE if bias_NE is None else scores_NE + bias_NE
        if allowed_NE is not None:  # a masked sigmoid or softmax score is 0, which a negative bias could fall below
            choice_NE = choice_NE.masked_fill(~allowed_NE, MASKED)
        own_NK = chosen_NK = highest(choice_NE, top_k, batch_invariant)
        if recorded_NK is not None:
            assert recorded_NK.shape == own_NK.shape, f"{tuple(recorded_NK.shape)} routes for {tuple(own_NK.shape)}"
            is_absent_NK = recorded_NK < 0
            first_N1 = recorded_NK[:, :1].long()
            chosen_NK = torch.where(is_absent_NK, first_N1, recorded_NK.long())
            chosen_NK = torch.where(first_N1 < 0, own_NK, chosen_NK)
    gates_NK = scores_NE.gather(-1, chosen_NK)
    if recorded_NK is not None:
        gates_NK = gates_NK.masked_fill(is_absent_NK & (first_N1 >= 0), 0.0)
    if normalize:
        gates_NK = gates_NK / (gate_sum(gates_NK, batch_invariant) + 1e-20)
    gates_NK = gates_NK * scaling if scaling != 1.0 else gates_NK
    return Routes(chosen_NK, gates_NK, None if recorded_NK is None else own_NK)


def router_scores(logits_NE: Tensor, softmax: bool, batch_invariant: bool) -> Tensor:
    """Scores of all experts, fp32."""
    if batch_invariant:
        return exact.softmax(logits_NE) if softmax else exact.sigmoid(logits_NE)
    return logits_NE.softmax(-1) if softmax else logits_NE.sigmoid()


def highest(choice_NE: Tensor, top_k: int, batch_invariant: bool) -> Tensor:
    """Experts of the ``top_k`` highest scores; which of equals is torch's affair, unless batch-invariant: the lower id."""
    return exact.top_k(choice_NE, top_k) if batch_invariant else choice_NE.topk(top_k, dim=-1).indices


def gate_sum(gates_NK: Tensor, batch_invariant: bool) -> Tensor:
    """[N, 1]."""
    return exact.sum_in_order(gates_NK, -1)[:, None] if batch_invariant else gates_NK.sum(-1, keepdim=True)
