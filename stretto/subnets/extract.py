"""Check before extraction: the logits of a masked Subnet and of the extracted network must agree.

A router sums its softmax over all experts of the masked network, and over fewer of the extracted one. If two selection scores are nearly
equal, rounding decides between their experts, and may decide otherwise in each network. So the extracted network uses the masked one's
choices, and each choice must be its own up to rounding.

Shape letters: B rows, T positions, N tokens compared, V vocabulary, E experts, K experts per token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.evals.loss import EvalBatch
from stretto.model.elastic import extract
from stretto.model.spec import ModelConfig, Subnet, check_subnet, kept_experts
from stretto.model.transformer import Recorder, Transformer
from stretto.ops import exact
from stretto.ops.operators import MASKED, Operators

FLOOR = 1e-5
"""Smallest relative tolerance (ours): about a hundred roundings of fp32, and a thousandth of the effect of one wrong expert."""


class _LowestFirst(Operators):
    """Operators that choose the lower id among equal scores. torch's choice depends on the number of experts, and equal scores are common
    in a network that was cut from a dense one.
    """

    def highest(self, choice_NE: Tensor, top_k: int) -> Tensor:
        return exact.top_k(choice_NE, top_k)


class _Following(_LowestFirst):
    """Operators and `Routing` of an extracted network that uses the experts which the masked network chose."""

    def __init__(self, chosen_BTK: Sequence[Tensor], real_BT: Tensor):
        """``chosen_BTK``: the choices by MoE layer, as expert ids of the extracted network."""
        self.chosen_BTK, self.real_BT = chosen_BTK, real_BT
        self.choice_NE = torch.empty(0)
        """Selection scores of the current layer."""
        self.shortfall = torch.zeros((), dtype=torch.float64, device=real_BT.device)
        """By how much a chosen expert's score is below the lowest score of the network's own choice: largest share of the range of a
        token's scores. Groups of experts that the network itself does not choose count as infinitely low."""

    def highest(self, choice_NE: Tensor, top_k: int) -> Tensor:
        self.choice_NE = choice_NE  # of the experts in the last call of a layer, after those of groups
        return super().highest(choice_NE, top_k)

    def choose(self, row: int, own_BTK: Tensor) -> Tensor:
        """The masked network's choice in MoE layer ``row``."""
        chosen_BTK, real_N = self.chosen_BTK[row], self.real_BT.flatten()
        scores_NE = self.choice_NE[real_N]
        own_N1 = scores_NE.gather(1, own_BTK.flatten(0, 1)[real_N, -1:])
        lowest_N1 = scores_NE.gather(1, chosen_BTK.flatten(0, 1)[real_N]).amin(1, keepdim=True)
        high_N1 = scores_NE.amax(1, keepdim=True)
        low_N1 = scores_NE.where(scores_NE > MASKED, high_N1).amin(1, keepdim=True)
        # scores were rounded in units of the largest one, which may be much more than their range
        rounding_N1 = 4 * torch.finfo(scores_NE.dtype).eps * torch.maximum(high_N1.abs(), low_N1.abs())
        shortfall_N1 = (own_N1 - lowest_N1) / (high_N1 - low_N1 + rounding_N1 / FLOOR).clamp_min(1e-30)
        self.shortfall = torch.maximum(self.shortfall, shortfall_N1.amax())
        return chosen_BTK


class ExtractionError(UserError):
    """Masked and extracted logits differ: the extracted weights are not those of the Subnet."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """An extracted network that passed the check."""

    model: Transformer
    """In the dtype and on the device of the maximum network."""
    difference: float
    """Largest |masked − extracted| over all compared logits, in fp32."""
    tolerance: float
    """Largest allowed difference."""
    num_tokens: int
    """Number of compared positions."""


def verified_extract(model: Transformer, subnet: Subnet, batches: Sequence[EvalBatch]) -> Extracted:
    """Extract ``subnet`` from ``model`` and `verify` it. Raises `UserError` also if it lies outside the network."""
    return verify(model, subnet, extract(model, check_subnet(model.config, subnet)), batches)


@torch.no_grad()
def verify(
    model: Transformer,
    subnet: Subnet,
    smaller: Transformer,
    batches: Sequence[EvalBatch],
    tolerance: float | None = None,
) -> Extracted:
    """Compare the logits of ``smaller``, the extracted ``subnet`` of ``model``, with the masked logits of ``model``.

    Both run in fp32, whatever their storage type: the rounding of a lower precision would hide a wrong weight. ``smaller`` uses the
    experts that ``model`` chose, whose selection scores must be its own highest up to `FLOOR` of the range of a token's scores.

    Args:
        batches: a few hundred real tokens suffice if they reach every expert. All logits of a batch are in memory at once.
        tolerance: largest allowed difference, whatever experts ``smaller`` would choose; None: `derived_tolerance`, from the size of the logits.

    Raises:
        UserError: ``batches`` have no tokens.
        ExtractionError: the logits differ by more than the tolerance, or are not finite; or ``smaller`` would choose other experts.
    """
    wide, wide_smaller = _in_fp32(model), _in_fp32(smaller)
    differences, scales, shortfalls, num_tokens = [], [], [], 0
    with _full_precision():
        for batch in batches:
            # logits at padding are arbitrary, so only tokens of documents are compared
            real_BT = batch.real_BT
            if not real_BT.any():
                continue
            recorder = Recorder(model.config, batch.ids_BT)
            ctx = replace(batch.ctx, operators=_LowestFirst(), routing=recorder)
            masked_NV = wide.logits(batch.ids_BT, subnet, ctx)[real_BT]
            following = _Following(_as_extracted(model.config, subnet, recorder), real_BT)
            ctx = replace(batch.ctx, operators=following, routing=following.choose)
            extracted_NV = wide_smaller.logits(batch.ids_BT, wide_smaller.config.full(), ctx)[real_BT]
            shortfalls.append(following.shortfall)
            differences.append((masked_NV - extracted_NV).abs().amax())
            scales.append(masked_NV.abs().amax())
            num_tokens += masked_NV.shape[0]
    if not differences:
        raise UserError("extract: no tokens to compare the logits on; give a held-out batch")
    # torch's maximum propagates NaN, Python's may not
    difference, scale = float(torch.stack(differences).amax()), float(torch.stack(scales).amax())
    allowed = derived_tolerance(model.config, subnet, scale) if tolerance is None else tolerance
    shortfall = float(torch.stack(shortfalls).amax())
    problem = None
    if not difference <= allowed:  # also true for NaN
        problem = f"logits differ by {difference:.3g}, {allowed:.3g} is allowed"
    elif tolerance is None and not shortfall <= FLOOR:
        problem = f"selection scores of experts differ by {shortfall:.3g} of their range, {FLOOR:.3g} is allowed"
    if problem is not None:
        raise ExtractionError(
            f"extract: {subnet.label()}: masked and extracted {problem}; nothing was written: the checkpoint is damaged, or its layer or "
            "expert order is not that of its training"
        )
    return Extracted(smaller, difference, allowed, num_tokens)


def _as_extracted(config: ModelConfig, subnet: Subnet, recorder: Recorder) -> list[Tensor]:
    """The choices of each MoE layer of ``subnet`` in ``recorder``, [B, T, K], as expert ids of the extracted network."""
    chosen_BTK = []
    for row, num, top_k in zip(config.moe_rows(subnet.layers), subnet.experts, subnet.top_k, strict=True):
        kept = torch.tensor(kept_experts(config.expert_orders[row], num), device=recorder.own_BTLK.device)
        chosen_BTK.append(torch.searchsorted(kept, recorder.own_BTLK[:, :, row, :top_k].long()))
    return chosen_BTK


def derived_tolerance(config: ModelConfig, subnet: Subnet, scale: float) -> float:
    """Largest difference that rounding can cause between two fp32 evaluations whose largest logit is ``scale``.

    Both evaluate the same sums, in another order if a kernel blocks another number of experts differently. A product of length D then
    differs by about u·√D (u = 2⁻²⁴, roundings as a random walk), and the two products in a row of each of the 2·L sub-layers add up
    as a random walk: u·√(4·L·D), relative to the size of the logits.
    """
    walk = 2.0**-24 * math.sqrt(4 * len(subnet.layers) * config.hidden_size)
    return max(FLOOR, walk) * max(1.0, scale)


def _in_fp32(model: Transformer) -> Transformer:
    if all(tensor.dtype == torch.float32 for tensor in model.state_dict().values()):
        return model
    return copy.deepcopy(model).float()


@contextmanager
def _full_precision() -> Iterator[None]:
    """Matrix products of fp32 in fp32: a training run may have enabled TF32 or bf16 passes."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
