"""The canary: fixed tokens by which an engine at an address shows that it computes with the weights that the trainer has published.

The trainer scores the tokens in fp32, with weights rounded as the engine rounds them, and a second time in the engine's precision. The
difference between the two is rounding alone, so a right engine differs by about as much. This is the tolerance: it follows the network,
the weights and the precision, and is no constant (measured in docs/log/rl.md).

Rounding is chaotic: another weight, however small the change, gives other roundings everywhere. In bf16 a small update is therefore hidden
by rounding, but scores that have not changed in a single bit show that nothing was loaded.

Shape letters: B rows, T positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from stretto.base.trajectory import WeightVersion, canary_tokens
from stretto.learning.recipe import RlRecipe
from stretto.learning.weights import is_quantised
from stretto.model.parallel import reshard
from stretto.model.transformer import Context, Transformer
from stretto.ops.matmul import PLAIN, Arithmetic
from stretto.ops.shards import local_part

NUM_TOKENS = 256
"""Most tokens of the canary that have a log-probability. The first tokens of a text, which attend to few others, differ the most: the
mean over 32 tokens is nearly twice that over 256."""
_MARGIN = 2.0
"""Tolerance over the predicted rounding. Right weights of a dense network in bf16 gave at most 1.3 of it."""
_MARGIN_OF_EXPERTS = 10.0
"""The same with experts: a token whose router has two nearly equal choices may be sent to other experts. Right weights gave at most 4.6
in a hundred updates."""
_FP32 = 2.0**-15 * 16
"""Tolerance in fp32 over the predicted rounding in bf16: the ratio of their units, times four for sums of hundreds of products, which are
in fp32 in both, times a margin of four. vLLM on a CPU differed by a quarter of it."""
_LEAST = 4e-6
"""Least tolerance, in nats: log-probabilities are fp32 numbers, with steps of 1e-6 around -14."""
_NOTICED = 1e-3
"""Change of the trainer's scores, over the tolerance, from which an engine's scores must change too."""


@torch.no_grad()
def score_canary(model: Transformer, recipe: RlRecipe, device: torch.device) -> tuple[tuple[float, ...], float]:
    """`WeightVersion.canary` and `WeightVersion.tolerance` of the weights of ``model``. All ranks must call this."""
    precision, is_foreign = recipe.precision.engines, recipe.rollout.engine != "stretto"
    num = min(NUM_TOKENS, recipe.train.seq_len - 2)  # an engine takes as many, and samples one more
    ids_BT = torch.tensor([canary_tokens(model.config.vocab_size, num)], device=device)
    # vLLM and SGLang convert a whole network; our engine multiplies in bf16, and all else is in fp32
    rounds: Callable[[str], bool] = (lambda name: True) if is_foreign else is_quantised
    coarse = Arithmetic("fp8" if precision == "fp8" else "bf16")
    with _rounded(model, rounds if precision == "bf16" else lambda name: False):
        exact_T = _scores(model, ids_BT, PLAIN, PLAIN)
        coarse_T = _scores(model, ids_BT, coarse, coarse if is_foreign else PLAIN)
    rounding = float((coarse_T - exact_T).abs().mean())
    margin = _MARGIN_OF_EXPERTS if model.config.num_moe_layers else _MARGIN
    tolerance = max(_LEAST, rounding * (_FP32 if precision == "fp32" else margin))
    return tuple(exact_T.tolist()), tolerance


def disagreement(
    scores: Sequence[float],
    version: WeightVersion,
    tolerance: float,
    active: WeightVersion | None,
    before: Sequence[float],
) -> str:
    """What is wrong with an engine that gave ``scores`` after it was to load ``version``; empty if nothing is.

    Args:
        active: the version before; None: there was none.
        before: the engine's scores with ``active``.
    """
    difference = float(np.abs(np.subtract(scores, version.canary)).mean())
    if not difference <= tolerance:  # also true of NaN
        return (
            f"its log-probabilities of {len(scores)} fixed tokens differ from the trainer's by {difference:.2g} nats on average, more than "
            f"{tolerance:.2g}"
        )
    if active is None or list(scores) != list(before):
        return ""
    change = float(np.abs(np.subtract(active.canary, version.canary)).mean())
    if change <= max(_NOTICED * tolerance, _LEAST):
        return ""
    return (
        f"its log-probabilities of {len(scores)} fixed tokens are those of version {active.number} to the bit, and the trainer's differ by "
        f"{change:.2g} nats on average"
    )


def _scores(model: Transformer, ids_BT: Tensor, arithmetic: Arithmetic, of_head: Arithmetic) -> Tensor:
    """Log-probabilities [T - 1] of the one row of ``ids_BT``. ``of_head``: arithmetic of the logits."""
    ctx = replace(Context.plain(ids_BT[:, :-1]), operators=arithmetic.operators)
    hidden_BTD = model(ids_BT[:, :-1], model.config.full(), ctx).hidden_BTD
    logits_TV = of_head.operators.linear(hidden_BTD[0], model.head_VD)
    return logits_TV.float().log_softmax(-1).gather(-1, ids_BT[0, 1:, None])[:, 0]


@contextmanager
def _rounded(model: Transformer, rounds: Callable[[str], bool]) -> Iterator[None]:
    """Context in which the parameters of ``model`` whose name ``rounds`` are rounded to bf16."""
    reshard(model)
    parts = [local_part(parameter) for name, parameter in model.named_parameters() if rounds(name)]
    kept = [part.clone() for part in parts]
    try:
        for part in parts:
            part.copy_(part.bfloat16())
        yield
    finally:
        reshard(model)  # else the next forward pass would use the matrices that this one has gathered
        for part, before in zip(parts, kept, strict=True):
            part.copy_(before)
