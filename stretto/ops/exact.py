"""Batch-invariant operators: a token's result does not depend, to the bit, on other tokens of the step.

Results do not depend on the number of rows, their order, the chunking of a sequence, masked keys, the number of threads or the
matrix library, because no operator here rounds in an order that one of them decides:

- Products: both operands are rounded to 22-bit integers, each row in units of a power of two of its own largest
  entry. Sums of products of such integers are integers below 2⁵³, which fp64 adds without rounding, in any order.
  (One slice of the splitting of Ozaki, Ogita, Oishi and Rump 2012; Demmel and Nguyen 2013 sum in this way.)
- Sums over a dim whose length the network fixes are trees of elementwise additions. Sums over keys, whose number depends
  on the batch, are sums of integers.
- exp is a polynomial of elementwise operations, each of which IEEE 754 defines to the bit. torch's own exp treats the last
  elements of a tensor differently from the others.

Gradients are those of the ordinary operators. The operators are slow: they serve proofs, and training without a mismatch between
trainer and engine.

Shape letters: B rows, T queries, S keys, H query heads, G key/value heads, C head width, N tokens, D inner dim, F outputs,
E experts, K chosen, P positions, R rotated pairs, U width of values, … any leading dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.grouped import Clamp, swiglu_reference
from stretto.ops.operators import attention_reference, causal_mask, rms_norm_reference

BITS = 22
"""Bits of each operand of a product. A sum over `CHUNK` products needs 2·22 + 9 = 53 bits, the precision of fp64."""
CHUNK = 512
"""Longest inner dim of one integer sum; products over longer dims add chunks in order."""
KEY_BITS = 20
"""Bits of attention weights and of values in a sum over keys. Fewer than `BITS`, so that one sum can span `MAX_KEYS` keys: keys
cannot be cut into chunks, because the borders would depend on where a document begins in its row."""
MAX_KEYS = 1 << (53 - 2 * KEY_BITS)
_WEIGHT_UNIT = 2.0**-30
"""Unit of the integers to which attention weights are rounded for their sum."""


def longest(page_size: int) -> int:
    """Length of the longest sequence that `attention` takes, of keys in whole cache pages of ``page_size`` tokens."""
    return MAX_KEYS // page_size * page_size


class _Straight(torch.autograd.Function):
    """Forward pass of ``exact``, gradient of ``plain``, which computes nearly the same function."""

    @staticmethod
    def forward(ctx: Any, exact: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*tensors)
        return exact(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        tensors = [tensor.detach().requires_grad_(need) for tensor, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            result = ctx.plain(*tensors)
        results = iter(torch.autograd.grad(result, [tensor for tensor in tensors if tensor.requires_grad], grads[0]))
        return (None, None, *(next(results) if need else None for need in needed))


def fixed_point(x: Tensor, bits: int = BITS) -> tuple[Tensor, Tensor]:
    """Integers (fp64, magnitude at most 2^bits) and units […, 1] (powers of two, fp64) whose product is the nearest to ``x``."""
    _, exponent = torch.frexp(x.abs().amax(-1, keepdim=True))
    unit = ((exponent.long() - bits + 1023) << 52).view(torch.float64)  # 2^(exponent − bits); pow may round
    return torch.round(x.double() / unit), unit


@dataclass(frozen=True, slots=True)
class FixedMatrix:
    """A matrix [F, D] as integers and units of rows, in chunks of its inner dim."""

    chunks: tuple[tuple[Tensor, Tensor], ...]

    @staticmethod
    def of(weight_FD: Tensor) -> FixedMatrix:
        return FixedMatrix(tuple(fixed_point(part) for part in weight_FD.detach().float().split(CHUNK, dim=-1)))


def product(x_ND: Tensor, weight: FixedMatrix) -> Tensor:
    """``x`` · ``weight``ᵀ, fp32 […, F]; the error is that of fp32 products of a few hundred terms."""
    total: Tensor | None = None
    for part, (weight_FD, unit_F1) in zip(x_ND.float().split(CHUNK, dim=-1), weight.chunks, strict=True):
        ints_ND, unit_N1 = fixed_point(part)
        sum_NF = (ints_ND @ weight_FD.transpose(-1, -2)) * unit_N1 * unit_F1.squeeze(-1)
        total = sum_NF if total is None else total + sum_NF
    assert total is not None, "an inner dim of 0"
    return total.float()


def linear(x_ND: Tensor, weight_FD: Tensor) -> Tensor:
    """`product` with the gradient of `torch.nn.functional.linear`."""
    return _Straight.apply(lambda x, weight: product(x, FixedMatrix.of(weight)), F.linear, x_ND, weight_FD)


def tree_sum(x_D: Tensor) -> Tensor:
    """Sum over the last dim […, 1] as a tree: its order depends only on the length of that dim."""
    while (width := x_D.shape[-1]) > 1:
        half = (width + 1) // 2
        tail = x_D[..., half:]
        x_D = x_D[..., :half] + (F.pad(tail, (0, 1)) if width % 2 else tail)
    return x_D


def exp(x: Tensor) -> Tensor:
    """e to the power of ``x`` in fp32, within two units in the last place; 0 below −87, and e^88 above 88.

    Algorithm of Cephes' expf: x = n·ln 2 + r, and a polynomial for e^r.
    """
    x = x.float()
    n = torch.round(x.clamp(-87.0, 88.0) * 1.44269504088896341)
    r = x.clamp(-87.0, 88.0) - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + coefficient
    y = p * r * r + r + 1.0
    scale = ((n.int() + 127) << 23).view(torch.float32)
    return torch.where(x < -87.0, 0.0, y * scale)


def wide_sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^−x) in fp64, within a few units in the last place; |x| above 708 counts as 708.

    Algorithm of Cephes' exp: −x = n·ln 2 + r, and a rational function for e^r.
    """
    negative = -x.double().clamp(-708.0, 708.0)
    n = torch.round(negative * 1.4426950408889634074)
    r = negative - n * 0.693145751953125
    r = r - n * 1.42860682030941723212e-6
    square = r * r
    above = square * 1.26177193074810590878e-4 + 3.02994407707441961300e-2
    above = r * (above * square + 9.99999999999999999910e-1)
    below = square * 3.00198505138664455042e-6 + 2.52448340349684104192e-3
    below = (below * square + 2.27265548208155028766e-1) * square + 2.0
    y = above / (below - above) * 2.0 + 1.0
    return 1.0 / (1.0 + y * ((n.long() + 1023) << 52).view(torch.float64))


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`stretto.ops.operators.rms_norm` in fp32."""

    def exact(x_D: Tensor, weight_D: Tensor) -> Tensor:
        mean = tree_sum(x_D * x_D) / x_D.shape[-1]
        return x_D * (1.0 / (mean + eps).sqrt()) * weight_D

    return _Straight.apply(exact, lambda x, weight: rms_norm_reference(x, weight, eps), x_D, weight_D)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^−x), fp32."""
    return _Straight.apply(lambda x: 1.0 / (1.0 + exp(-x)), torch.sigmoid, x)


def softmax(x_E: Tensor) -> Tensor:
    """Softmax over the last dim; the order of its sum depends only on the length of that dim."""

    def exact(x_E: Tensor) -> Tensor:
        weights_E = exp(x_E - x_E.amax(-1, keepdim=True))
        return weights_E / tree_sum(weights_E)

    return _Straight.apply(exact, lambda x: x.softmax(-1), x_E)


def swiglu(gate_up_NF: Tensor, clamp: Clamp | None = None) -> Tensor:
    """`stretto.ops.grouped.swiglu` in fp32."""

    def clamped(gate_up_NF: Tensor) -> Tensor:
        assert clamp is not None
        gate, up = gate_up_NF.chunk(2, dim=-1)
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        return gate / (1.0 + exp(-clamp.alpha * gate)) * (up + 1)

    if clamp is not None:
        return _Straight.apply(clamped, lambda x: swiglu_reference(x, clamp), gate_up_NF)
    gate, up = gate_up_NF.chunk(2, dim=-1)
    return _Straight.apply(lambda gate: gate / (1.0 + exp(-gate)), F.silu, gate) * up


def top_k(scores_NE: Tensor, num: int) -> Tensor:
    """Ids of the ``num`` largest entries of each row, in falling order; the lower id first among equal entries."""
    return scores_NE.sort(dim=-1, descending=True, stable=True).indices[..., :num]


def sum_in_order(x_NK: Tensor, dim: int) -> Tensor:
    """Sum over a short dim, which is removed, from first to last: zeros at its end change nothing."""
    first, *rest = x_NK.unbind(dim)
    for item in rest:
        first = first + item
    return first


def attention(
    q_BHTC: Tensor,
    k_BGSC: Tensor,
    v_BGSU: Tensor,
    mask_B1TS: Tensor | None,
    scale: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`attention_reference`, fp32 [B, H, T, U]. Masked keys may hold any finite numbers, and any number of keys may be masked.

    ``mask_B1TS`` is True where a query may see a key, at least one key for each query; None: causal attention.
    """
    assert k_BGSC.shape[2] <= MAX_KEYS, f"{k_BGSC.shape[2]} keys; batch-invariant attention takes {MAX_KEYS} at most"
    assert q_BHTC.shape[-1] <= CHUNK, f"head width {q_BHTC.shape[-1]}"
    if mask_B1TS is None:
        mask_B1TS = causal_mask(q_BHTC.shape[2], q_BHTC.device)

    def exact(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSU: Tensor, mask_B1TS: Tensor, *sinks: Tensor) -> Tensor:
        groups = q_BHTC.shape[1] // k_BGSC.shape[1]
        q_ints, q_unit = fixed_point(q_BHTC)
        k_ints, k_unit = (x.repeat_interleave(groups, 1) for x in fixed_point(k_BGSC))
        v_ints, v_unit = (x.repeat_interleave(groups, 1) for x in fixed_point(v_BGSU, KEY_BITS))
        scores_BHTS = (q_ints @ k_ints.transpose(-1, -2)) * q_unit * k_unit.transpose(-1, -2)
        scores_BHTS = scores_BHTS / math.sqrt(q_BHTC.shape[-1]) if scale is None else scores_BHTS * scale
        scores_BHTS = scores_BHTS.float().masked_fill(~mask_B1TS, -math.inf)
        most_BHT1 = scores_BHTS.amax(-1, keepdim=True)
        sinks_H11 = [sinks_H.float().view(-1, 1, 1) for sinks_H in sinks]  # one or none
        for sink in sinks_H11:
            most_BHT1 = most_BHT1.maximum(sink)
        weights_BHTS = exp(scores_BHTS - most_BHT1).double()
        total_BHT1 = torch.round(weights_BHTS / _WEIGHT_UNIT).sum(-1, keepdim=True) * _WEIGHT_UNIT
        for sink in sinks_H11:
            total_BHT1 = total_BHT1 + exp(sink - most_BHT1).double()
        # the weights absorb the units of the values, so both operands of the product are integers
        w_ints, w_unit = fixed_point(weights_BHTS * v_unit.transpose(-1, -2), KEY_BITS)
        return ((w_ints @ v_ints) * w_unit / total_BHT1).float()

    def plain(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSU: Tensor, mask_B1TS: Tensor, *sinks: Tensor) -> Tensor:
        return attention_reference(q_BHTC, k_BGSC, v_BGSU, mask_B1TS, scale, *sinks)

    sinks = () if sinks_H is None else (sinks_H,)
    return _Straight.apply(exact, plain, q_BHTC, k_BGSC, v_BGSU, mask_B1TS, *sinks)


def rotary_tables(num_positions: int, frequencies_R: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """`stretto.ops.operators.rotary_tables` of the first positions, fp32 [P, R]; each entry is computed alone, with libm."""
    frequencies = frequencies_R.tolist()
    angles = [[position * frequency for frequency in frequencies] for position in range(num_positions)]
    cos, sin = ([[magnitude * function(angle) for angle in row] for row in angles] for function in (math.cos, math.sin))
    return torch.tensor(cos), torch.tensor(sin)
