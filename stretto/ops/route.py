"""The router: which experts a token chooses, and with what weight.

Shape letters: N tokens, E experts, K chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
) -> Routes:
    """Choose ``top_k`` experts a token.

    Selection looks at score + ``bias_NE`` (auxiliary-loss-free balancing, 2408.15664), weights at the score alone.
    ``allowed_NE`` masks experts *before* the softmax, so that the router of a narrower network is exactly this one
    with columns removed. ``bias_NE`` and ``allowed_NE`` broadcast over tokens. Gates are renormalised over the chosen
    (``normalize``) and multiplied by ``scaling``: the output's norm then does not depend on ``top_k``.
    """
    logits_NE = logits_NE.float()
    if allowed_NE is not None:
        logits_NE = logits_NE.masked_fill(~allowed_NE, MASKED)
    scores_NE = logits_NE.softmax(-1) if softmax else logits_NE.sigmoid()
    with torch.no_grad():
        choice_NE = scores_NE if bias_NE is None else scores_NE + bias_NE
        if allowed_NE is not None:  # a masked sigmoid or softmax score is 0, which a negative bias could fall below
            choice_NE = choice_NE.masked_fill(~allowed_NE, MASKED)
        chosen_NK = choice_NE.topk(top_k, dim=-1).indices
    gates_NK = scores_NE.gather(-1, chosen_NK)
    if normalize:
        gates_NK = gates_NK / (gates_NK.sum(-1, keepdim=True) + 1e-20)
    return Routes(chosen_NK, gates_NK * scaling if scaling != 1.0 else gates_NK)
