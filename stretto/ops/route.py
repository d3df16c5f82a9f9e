"""The router: which experts a token chooses, and with what weight.

Shape letters: N tokens, E experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.ops.operators import ORDINARY, Operators

MASKED = -1e9
"""Logit of an expert that may not be chosen. Finite: −inf gives NaN gradients through the softmax of a masked row."""


@dataclass(frozen=True, slots=True)
class Routes:
    """What the router decided for N tokens."""

    chosen_NK: Tensor
    """Expert ids, int64, from the highest selection score down."""
    gates_NK: Tensor
    """Weights of the chosen experts, fp32; gradients reach the router through them."""


def route(
    logits_NE: Tensor,
    bias_NE: Tensor | None,
    allowed_NE: Tensor | None,
    top_k: int,
    *,
    softmax: bool,
    normalize: bool,
    scaling: float,
    operators: Operators = ORDINARY,
    choose: Callable[[Tensor], Tensor] | None = None,
) -> Routes:
    """Choose ``top_k`` experts a token.

    Selection looks at score + ``bias_NE`` (auxiliary-loss-free balancing, 2408.15664), weights at the score alone.
    ``allowed_NE`` masks experts *before* the softmax, so that the router of a narrower network is exactly this one
    with columns removed. ``bias_NE`` and ``allowed_NE`` broadcast over tokens. Gates are renormalised over the chosen
    (``normalize``) and multiplied by ``scaling``: the output's norm then does not depend on ``top_k``.

    ``choose`` takes other experts than this router would: from its own choice [N, K] to the one that counts, int64. Their
    weights come from these logits all the same, so that gradients reach the router. −1 is no expert (a token that used
    fewer than ``top_k``): such a place repeats the row's first expert with a weight of 0.
    """
    logits_NE = logits_NE.float()
    if allowed_NE is not None:
        logits_NE = logits_NE.masked_fill(~allowed_NE, MASKED)
    scores_NE = operators.router_scores(logits_NE, softmax)
    is_absent_NK = None
    with torch.no_grad():
        choice_NE = scores_NE if bias_NE is None else scores_NE + bias_NE
        if allowed_NE is not None:  # a masked sigmoid or softmax score is 0, which a negative bias could fall below
            choice_NE = choice_NE.masked_fill(~allowed_NE, MASKED)
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
