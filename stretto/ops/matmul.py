"""Matrix products with weights, and the operators around them, in the precision that trainer and engine share.

Trainer and engine compute with the operators of the same `Arithmetic`, so the engine samples from the distribution that the
trainer learns from, up to the order of sums; with batch-invariant arithmetic, to the bit.

- ``fp32``: the data type of the tensors, or autocast's: torch's ordinary operators.
- ``bf16``: operands and results of every product are rounded to bf16, as is the residual stream. On a CPU the products
  themselves are in fp32, because the machine may have no bf16 unit.
- ``fp8``: attention projections, feed-forward networks and experts use the products of `stretto.ops.fp8`; results are not rounded.
- Router, norms, softmax and head stay in fp32 in every precision.

Shape letters: N tokens, D hidden, F outputs (2·I in an expert), I expert width, E experts, K experts per token, … any leading
dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops import exact, fp8, fp8_rows, grouped
from stretto.ops.exact import FixedMatrix
from stretto.ops.grouped import Clamp, Experts, group_slots
from stretto.ops.operators import ORDINARY, Operators, Routes, Weight, rms_norm
from stretto.ops.tuning import trains_in_bf16

Precision = Literal["fp32", "bf16", "fp8"]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Precision of products, and whether they are batch-invariant."""

    precision: Precision = "fp32"
    batch_invariant: bool = False
    """A token's result does not depend, to the bit, on other tokens of the step. Slow: products go through fp64."""

    @property
    def is_plain(self) -> bool:
        """Whether all operators are torch's ordinary ones."""
        return self.precision == "fp32" and not self.batch_invariant

    @property
    def inner(self) -> Arithmetic:
        """Arithmetic of router and head, which stay in fp32."""
        return Arithmetic("fp32", self.batch_invariant)

    @property
    def operators(self) -> Operators:
        """Operators for a forward pass in this arithmetic."""
        if self.is_plain:
            return ORDINARY
        return InvariantOperators(self) if self.batch_invariant else ArithmeticOperators(self)

    def training(self, device: torch.device) -> tuple[Operators, torch.dtype]:
        """Operators for forward and backward passes on ``device``, and autocast's data type for them; fp32: without autocast.

        On a GPU, bf16 is autocast's with torch's ordinary operators, as in pre-training and SFT: grouped products and fused attention.
        It differs from `operators` in that the residual stream and norms are not rounded. With replayed routes, engine and trainer
        then differed by 1e-5 to 5e-4 nats (k3), and by 3e-6 with the same operators; without replay, by up to 1e-2. FP8 products have one
        scale per row there from Hopper on (`stretto.ops.fp8_rows`).
        """
        if not self.batch_invariant and trains_in_bf16(device):
            if self.precision == "bf16":
                return ORDINARY, torch.bfloat16
            if self.precision == "fp8" and not fp8_rows.said_emulated(device):
                return fp8_rows.Fp8Operators(), torch.bfloat16
        return self.operators, torch.float32


PLAIN = Arithmetic()


def default_precision(device: torch.device | str) -> Precision:
    """Precision of an RL run whose recipe leaves it to the trainer's ``device``."""
    return "bf16" if trains_in_bf16(torch.device(device)) else "fp32"


def prepare(weight_FD: Tensor, arithmetic: Arithmetic) -> Weight:
    """``weight_FD`` converted once for the ``linear`` of many steps: a `Tensor`, `Fp8Weight` or `FixedMatrix`, without gradient."""
    weight_FD = weight_FD.detach()
    if arithmetic.precision == "fp8":
        weight = fp8.quantise_weight(weight_FD)
        return weight.widened() if fp8.why_emulated(weight_FD, arithmetic.batch_invariant) else weight
    weight_FD = arithmetic.operators.rounded(weight_FD)
    return FixedMatrix.of(weight_FD) if arithmetic.batch_invariant else weight_FD


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The two matrices of each expert of a layer, in a form that ``linear`` takes."""

    gate_ups: Sequence[Weight]
    downs: Sequence[Weight]

    @staticmethod
    def of(gate_up_EFD: Tensor, down_EDI: Tensor, arithmetic: Arithmetic) -> ExpertMatrices:
        """Matrices prepared for ``arithmetic``."""
        gate_ups, downs = ([prepare(one, arithmetic) for one in stack] for stack in (gate_up_EFD, down_EDI))
        return ExpertMatrices(gate_ups, downs)


class ArithmeticOperators(Operators):
    """Operators for an arithmetic that is not plain."""

    is_plain = False

    def __init__(self, arithmetic: Arithmetic):
        self.arithmetic = arithmetic

    def linear(self, x_ND: Tensor, weight: Weight, bias_F: Tensor | None = None) -> Tensor:
        x_MD = x_ND.reshape(-1, x_ND.shape[-1])
        if self.arithmetic.precision == "fp8":
            y_MF = fp8.linear(x_MD, weight, self.arithmetic.batch_invariant)
        else:
            y_MF = self._product(self.rounded(x_MD), weight)
        if bias_F is not None:
            y_MF = y_MF + bias_F
        return self.rounded(y_MF).to(x_ND.dtype).view(*x_ND.shape[:-1], y_MF.shape[-1])

    def _product(self, x_MD: Tensor, weight: Tensor | FixedMatrix) -> Tensor:
        """Product with an fp32 or bf16 weight. Rounding a prepared weight again changes nothing."""
        if isinstance(weight, FixedMatrix):
            return exact.product(x_MD, weight)
        weight = self.rounded(weight)
        if self.arithmetic.batch_invariant:
            return exact.linear(x_MD, weight)
        if self.arithmetic.precision == "bf16" and x_MD.is_cuda:
            return F.linear(x_MD.bfloat16(), weight.bfloat16()).to(x_MD.dtype)
        return F.linear(x_MD, weight)

    def norm(self, x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        function = exact.rms_norm if self.arithmetic.batch_invariant else rms_norm
        return self.rounded(function(x_D, weight_D, eps))

    def rounded(self, x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype) if self.arithmetic.precision == "bf16" else x

    def swiglu(self, gate_up_NF: Tensor, clamp: Clamp | None = None) -> Tensor:
        function = exact.swiglu if self.arithmetic.batch_invariant else grouped.swiglu
        return self.rounded(function(gate_up_NF, clamp))

    def experts(self, x_ND: Tensor, routes: Routes, weights: Experts) -> Tensor:
        return self.prepared_experts(x_ND, routes, self.matrices(weights), weights)

    @staticmethod
    def matrices(weights: Experts) -> ExpertMatrices:
        """The matrices of ``weights``, which are rounded when they are used."""
        return ExpertMatrices(weights.gate_up_EFD.unbind(0), weights.down_EDI.unbind(0))

    def prepared_experts(self, x_ND: Tensor, routes: Routes, matrices: ExpertMatrices, weights: Experts) -> Tensor:
        """Output of the experts [N, D], computed expert by expert; only biases and clamp are taken from ``weights``.

        Expert E does not exist and adds nothing. As in `stretto.ops.moe.experts`, gates multiply the input of the down
        projection, and outputs are added in the order of ``routes.chosen_NK``.
        """
        num_experts = len(matrices.downs)
        (num_tokens, num_chosen), slots = routes.chosen_NK.shape, group_slots(routes.chosen_NK, num_experts + 1)
        x_SD = x_ND.index_select(0, slots.token_P)
        gates_S1 = self.rounded(routes.gates_NK).reshape(-1).index_select(0, slots.order_P)[:, None]
        ends = slots.ends_E.tolist()[:num_experts]
        y_SD = self.expert_rows(x_SD[: ends[-1]], gates_S1[: ends[-1]], ends, matrices, weights)
        if ends[-1] < len(x_SD):
            y_SD = torch.cat([y_SD, x_ND.new_zeros(len(x_SD) - ends[-1], x_ND.shape[1])])
        return self.summed_experts(y_SD.index_select(0, slots.place_S).view(num_tokens, num_chosen, -1))

    def summed_experts(self, y_NKD: Tensor) -> Tensor:
        """Sum of the gated outputs of each token's experts, in the order of the experts."""
        return self.rounded(exact.sum_in_order(y_NKD, 1))

    def expert_rows(
        self, x_SD: Tensor, gates_S1: Tensor, ends: Sequence[int], matrices: ExpertMatrices, weights: Experts
    ) -> Tensor:
        """Gated outputs [S, D] of slots sorted by expert. ``ends``: end of each expert's slots. Without a single slot, the result still
        depends on all matrices, so that these get gradients of zero, as on the other ranks of expert parallelism."""
        parts, start = [], 0
        for expert, end in enumerate(ends):
            if end > start or not len(x_SD):
                part = slice(start, end)
                gate_up_bias_F, down_bias_D = (
                    (bias[expert] for bias in weights.biases) if weights.biases else (None, None)
                )
                hidden_SF = self.linear(x_SD[part], matrices.gate_ups[expert], gate_up_bias_F)
                hidden_SI = self.rounded(self.swiglu(hidden_SF, weights.clamp) * gates_S1[part])
                bias_SD = None if down_bias_D is None else down_bias_D * gates_S1[part]
                parts.append(self.linear(hidden_SI, matrices.downs[expert], bias_SD))
            start = end
        return torch.cat(parts)

    def head(self, weight_VD: Tensor) -> Callable[[Tensor], Tensor]:
        inner = self.arithmetic.inner
        # a weight that receives a gradient cannot be prepared; the result has the same bits
        is_trained = torch.is_grad_enabled() and weight_VD.requires_grad
        weight, linear = weight_VD if is_trained else prepare(weight_VD, inner), inner.operators.linear
        return lambda x_ND: linear(x_ND, weight)


class InvariantOperators(ArithmeticOperators):
    """Batch-invariant operators, also for functions without weights: `stretto.ops.exact`."""

    attends_by_document = False
    attention = staticmethod(exact.attention)  # type: ignore[assignment]  # other shape letters in its parameters

    def rotary_tables(
        self, positions_BT: Tensor, frequencies_R: Tensor, magnitude: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        tables = exact.rotary_tables(int(positions_BT.max()) + 1, frequencies_R, magnitude)
        cos_PR, sin_PR = (table.to(positions_BT.device) for table in tables)
        return cos_PR[positions_BT], sin_PR[positions_BT]

    def router_logits(self, x_ND: Tensor, gate_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        bias_E = None if bias_E is None else bias_E.float()
        return self.arithmetic.inner.operators.linear(x_ND.float(), gate_ED.float(), bias_E)

    def router_scores(self, logits_NE: Tensor, softmax: bool) -> Tensor:
        return exact.softmax(logits_NE) if softmax else exact.sigmoid(logits_NE)

    def wide_sigmoid(self, logits_NE: Tensor) -> Tensor:
        return exact.wide_sigmoid(logits_NE.detach())

    def highest(self, choice_NE: Tensor, top_k: int) -> Tensor:
        return exact.top_k(choice_NE, top_k)

    def gate_sum(self, gates_NK: Tensor) -> Tensor:
        return exact.sum_in_order(gates_NK, -1)[:, None]


def kernels(arithmetic: Arithmetic, weights_FD: Sequence[Tensor]) -> dict[str, str]:
    """Implementation of the products with these weights, for display: operator -> implementation."""
    if arithmetic.precision == "fp8":
        reasons = sorted({fp8.why_emulated(weight, arithmetic.batch_invariant) for weight in weights_FD})
        names = [f"exact fp64 emulation ({why})" if why else "torch scaled_mm, 1×128 by 128×128" for why in reasons]
        return {"linear": "fp8: " + "; ".join(names)}
    if arithmetic.batch_invariant:
        return {"linear": f"{arithmetic.precision}: fixed point in fp64 (batch-invariant)"}
    is_cuda = any(weight.is_cuda for weight in weights_FD)
    emulated = "" if is_cuda or arithmetic.precision == "fp32" else " (operands rounded, products in fp32)"
    return {"linear": f"{arithmetic.precision}: torch{emulated}"}
