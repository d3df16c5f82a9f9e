"""Matrix products with weights, and the operators around them, in the precision that trainer and engine share.

An `Arithmetic` is an argument of everything that multiplies. Both sides call these functions with the same one (the trainer's
network through `Arithmetic.operators`), so what one side samples from is what the other learns from; where it is
batch-invariant, to the bit.

- ``fp32``: the tensors' own dtype, or autocast's: torch's ordinary operators.
- ``bf16``: operands and results of every product are rounded to bf16, as is the residual stream. On a CPU the products
  themselves are in fp32 (emulated: the machine may have no bf16 unit).
- ``fp8``: the products of attention projections, feed-forward and experts are `stretto.ops.fp8`'s; what lies between stays
  as it is.
- Router, norms, softmax and head stay in fp32 throughout.

Shape letters: N tokens, D hidden, F outputs (of an expert: 2·I), I expert width, E experts, K experts a token, … any leading
dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops import exact, fp8, grouped
from stretto.ops.exact import FixedMatrix
from stretto.ops.fp8 import Fp8Weight
from stretto.ops.grouped import Clamp, ExpertBiases, Experts, group_slots
from stretto.ops.operators import ORDINARY, Operators, Routes, causal_mask, rms_norm

Precision = Literal["fp32", "bf16", "fp8"]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How products are computed."""

    precision: Precision = "fp32"
    batch_invariant: bool = False
    """A token's result does not depend, to the bit, on what is computed beside it; through fp64, slowly."""

    @property
    def is_plain(self) -> bool:
        """Nothing but torch's ordinary operators."""
        return self.precision == "fp32" and not self.batch_invariant

    @property
    def inner(self) -> Arithmetic:
        """That of router and head, which stay in fp32."""
        return Arithmetic("fp32", self.batch_invariant)

    @property
    def operators(self) -> Operators:
        """What a `Transformer` that computes in this arithmetic is given."""
        if self.is_plain:
            return ORDINARY
        return InvariantOperators(self) if self.batch_invariant else ArithmeticOperators(self)


PLAIN = Arithmetic()
Weight = Tensor | Fp8Weight | FixedMatrix
"""As a parameter, or prepared for one arithmetic (`prepare`)."""


def prepare(weight_FD: Tensor, arithmetic: Arithmetic) -> Weight:
    """``weight_FD`` as `linear` wants it, made once for many steps; it takes no gradient."""
    weight_FD = weight_FD.detach()
    if arithmetic.precision == "fp8":
        weight = fp8.quantise_weight(weight_FD)
        return weight.widened() if fp8.why_emulated(weight_FD, arithmetic.batch_invariant) else weight
    weight_FD = rounded(weight_FD, arithmetic)
    return FixedMatrix.of(weight_FD) if arithmetic.batch_invariant else weight_FD


def rounded(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """``x`` as the arithmetic keeps it between operators."""
    return x.bfloat16().to(x.dtype) if arithmetic.precision == "bf16" else x


def linear(x_ND: Tensor, weight: Weight, bias_F: Tensor | None = None, arithmetic: Arithmetic = PLAIN) -> Tensor:
    """``x`` · ``weight``ᵀ + ``bias`` for ``x`` […, D]."""
    if arithmetic.is_plain:
        assert isinstance(weight, Tensor)
        return F.linear(x_ND, weight, bias_F)
    flat_ND = x_ND.reshape(-1, x_ND.shape[-1])
    if arithmetic.precision == "fp8":
        assert not isinstance(weight, FixedMatrix)
        y_NF = fp8.linear(flat_ND, weight, arithmetic.batch_invariant)
    else:
        y_NF = _rounded_linear(flat_ND, weight, arithmetic)
    if bias_F is not None:
        y_NF = y_NF + bias_F
    return rounded(y_NF, arithmetic).to(x_ND.dtype).view(*x_ND.shape[:-1], y_NF.shape[-1])


def _rounded_linear(x_ND: Tensor, weight: Weight, arithmetic: Arithmetic) -> Tensor:
    """fp32 or bf16 operands; prepared weights are rounded already, and doing so again changes nothing."""
    x_ND = rounded(x_ND, arithmetic)
    if isinstance(weight, FixedMatrix):
        return exact.product(x_ND, weight)
    assert isinstance(weight, Tensor)
    weight = rounded(weight, arithmetic)
    if arithmetic.batch_invariant:
        return exact.linear(x_ND, weight)
    if arithmetic.precision == "bf16" and x_ND.is_cuda:
        return F.linear(x_ND.bfloat16(), weight.bfloat16()).to(x_ND.dtype)
    return F.linear(x_ND, weight)


def norm(x_D: Tensor, weight_D: Tensor, eps: float, arithmetic: Arithmetic = PLAIN) -> Tensor:
    """`stretto.ops.operators.rms_norm`."""
    if arithmetic.batch_invariant:
        return rounded(exact.rms_norm(x_D, weight_D, eps), arithmetic)
    return rounded(rms_norm(x_D, weight_D, eps), arithmetic)


def swiglu(gate_up_NF: Tensor, arithmetic: Arithmetic = PLAIN, clamp: Clamp | None = None) -> Tensor:
    """`stretto.ops.grouped.swiglu`."""
    function = exact.swiglu if arithmetic.batch_invariant else grouped.swiglu
    return rounded(function(gate_up_NF, clamp), arithmetic)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """A layer's experts, each as `linear` takes it."""

    gate_ups: Sequence[Weight]
    downs: Sequence[Weight]

    @staticmethod
    def of(gate_up_EFD: Tensor, down_EDI: Tensor, arithmetic: Arithmetic) -> ExpertMatrices:
        """Prepared, without gradients."""
        gate_ups, downs = ([prepare(one, arithmetic) for one in stack] for stack in (gate_up_EFD, down_EDI))
        return ExpertMatrices(gate_ups, downs)


def experts(
    x_ND: Tensor,
    chosen_NK: Tensor,
    gates_NK: Tensor,
    weights: ExpertMatrices,
    arithmetic: Arithmetic,
    biases: ExpertBiases | None = None,
    clamp: Clamp | None = None,
) -> Tensor:
    """`stretto.ops.grouped.experts` expert by expert, in an arithmetic that is not plain. Returns [N, D].

    A choice of expert E adds nothing. Gates multiply the input of the down projection, as there; outputs are added in the
    order of ``chosen_NK``.
    """
    num_experts = len(weights.downs)
    (num_tokens, num_chosen), slots = chosen_NK.shape, group_slots(chosen_NK, num_experts + 1)
    x_SD = x_ND.index_select(0, slots.token_P)
    gates_S1 = rounded(gates_NK, arithmetic).reshape(-1).index_select(0, slots.order_P)[:, None]
    parts, start = [], 0
    for expert, end in enumerate(slots.ends_E.tolist()[:num_experts]):
        if end > start:
            part = slice(start, end)
            gate_up_bias_F, down_bias_D = (None, None) if biases is None else (each[expert] for each in biases)
            hidden_SF = linear(x_SD[part], weights.gate_ups[expert], gate_up_bias_F, arithmetic)
            hidden_SI = rounded(swiglu(hidden_SF, arithmetic, clamp) * gates_S1[part], arithmetic)
            bias_SD = None if down_bias_D is None else down_bias_D * gates_S1[part]
            parts.append(linear(hidden_SI, weights.downs[expert], bias_SD, arithmetic))
        start = end
    parts.append(x_ND.new_zeros(num_tokens * num_chosen - start, x_ND.shape[1]))
    y_SD = torch.cat(parts).index_select(0, slots.place_S)
    return rounded(exact.sum_in_order(y_SD.view(num_tokens, num_chosen, -1), 1), arithmetic)


class ArithmeticOperators(Operators):
    """The functions of this file."""

    def __init__(self, arithmetic: Arithmetic):
        self.arithmetic = arithmetic

    def linear(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        return linear(x_ND, weight_FD, bias_F, self.arithmetic)

    def norm(self, x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return norm(x_D, weight_D, eps, self.arithmetic)

    def rounded(self, x: Tensor) -> Tensor:
        return rounded(x, self.arithmetic)

    def swiglu(self, gate_up_NF: Tensor, clamp: Clamp | None = None) -> Tensor:
        return swiglu(gate_up_NF, self.arithmetic, clamp)

    def experts(self, x_ND: Tensor, routes: Routes, weights: Experts) -> Tensor:
        matrices = ExpertMatrices(weights.gate_up_EFD.unbind(0), weights.down_EDI.unbind(0))
        chosen_NK, gates_NK = routes.chosen_NK, routes.gates_NK
        return experts(x_ND, chosen_NK, gates_NK, matrices, self.arithmetic, weights.biases, weights.clamp)

    def head(self, weight_VD: Tensor) -> Callable[[Tensor], Tensor]:
        inner = self.arithmetic.inner
        # what takes a gradient cannot be prepared; the bits are the same
        is_trained = torch.is_grad_enabled() and weight_VD.requires_grad
        weight = weight_VD if is_trained else prepare(weight_VD, inner)
        return lambda x_ND: linear(x_ND, weight, None, inner)


class InvariantOperators(ArithmeticOperators):
    """Batch-invariant also where nothing is multiplied by a weight: `stretto.ops.exact`."""

    def rotary_tables(
        self, positions_BT: Tensor, frequencies_R: Tensor, magnitude: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        tables = exact.rotary_tables(int(positions_BT.max()) + 1, frequencies_R, magnitude)
        cos_PR, sin_PR = (table.to(positions_BT.device) for table in tables)
        return cos_PR[positions_BT], sin_PR[positions_BT]

    def attention(
        self,
        q_BHTC: Tensor,
        k_BGTC: Tensor,
        v_BGTU: Tensor,
        mask_B1TT: Tensor | None,
        scale: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        if mask_B1TT is None:
            mask_B1TT = causal_mask(q_BHTC.shape[2], q_BHTC.device)
        return exact.attention(q_BHTC, k_BGTC, v_BGTU, mask_B1TT, scale, sinks_H)

    def router_logits(self, x_ND: Tensor, gate_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        return linear(x_ND.float(), gate_ED.float(), None if bias_E is None else bias_E.float(), self.arithmetic.inner)

    def router_scores(self, logits_NE: Tensor, softmax: bool) -> Tensor:
        return exact.softmax(logits_NE) if softmax else exact.sigmoid(logits_NE)

    def highest(self, choice_NE: Tensor, top_k: int) -> Tensor:
        """Of equals, the lower id."""
        return exact.top_k(choice_NE, top_k)

    def gate_sum(self, gates_NK: Tensor) -> Tensor:
        return exact.sum_in_order(gates_NK, -1)[:, None]


def kernels(arithmetic: Arithmetic, weights_FD: Sequence[Tensor]) -> dict[str, str]:
    """What computes the products with these weights, for people: operator -> implementation."""
    if arithmetic.precision == "fp8":
        reasons = sorted({fp8.why_emulated(weight, arithmetic.batch_invariant) for weight in weights_FD})
        names = [f"exact fp64 emulation ({why})" if why else "torch scaled_mm, 1×128 by 128×128" for why in reasons]
        return {"linear": "fp8: " + "; ".join(names)}
    if arithmetic.batch_invariant:
        return {"linear": f"{arithmetic.precision}: fixed point in fp64 (batch-invariant)"}
    is_cuda = any(weight.is_cuda for weight in weights_FD)
    emulated = "" if is_cuda or arithmetic.precision == "fp32" else " (operands rounded, products in fp32)"
    return {"linear": f"{arithmetic.precision}: torch{emulated}"}
