"""Compiled forward and backward passes for training on a CPU (train.cpp): attention, the experts of a layer, and single products.

All tensors are in fp32. Under autocast in bf16 a processor with a matrix unit (AMX) or with products of vectors in bf16 (AVX512_BF16: AMD
from Zen 4 on) multiplies operands that are rounded to bf16, and sums in fp32: attention, experts and linear layers then give fp32, where
torch would give bf16.

Results are equal, to the bit, for every number of threads. Without a compiler torch computes instead, which `load` reports once.

Shape letters: B rows, T positions, H query heads, G key/value heads, C head width, N tokens, S slots sorted by expert (places),
D hidden, E experts, I expert width, F = 2·I; in `product` M rows, K depth, N columns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from stretto.ops.native import TRAINING, c_fields, load

MAX_WIDTH = 256
"""Largest width of an attention head: the width of a block in blocks.h."""
MAX_LENGTH = 8192
"""Largest number of positions whose scores are kept in the cache: 48 queries of a thread then take 1.7 MB, in bf16 32 queries 1.1 MB."""
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, loaded at the first call; None: they are not available or not wanted."""
    return load(source=TRAINING).handle


def kernels() -> ctypes.CDLL:
    """The kernels, where they are known to be available."""
    handle = library()
    assert handle is not None, "no compiled kernels"
    return handle


# The records of train.cpp and train_attention.h, field by field; the fields are documented there.


class _Heads(ctypes.Structure):
    _fields_ = c_fields(_POINTER, "at") + c_fields(ctypes.c_int64, "by_row by_head by_position")

    @classmethod
    def of(cls, x_BHTC: Tensor) -> _Heads:
        assert x_BHTC.stride(3) == 1, f"strides {x_BHTC.stride()}"
        return cls(x_BHTC.data_ptr(), *x_BHTC.stride()[:3])


class _Attention(ctypes.Structure):
    _fields_ = (
        c_fields(_INT, "num_rows num_heads num_kv_heads length width num_threads")
        + [("scale", _FLOAT), ("mask_rows", _INT), ("mask", _POINTER)]
        + c_fields(_Heads, "q k v out")
        + [("lse", _POINTER)]
        + c_fields(_Heads, "grad_out grad_q grad_k grad_v")
        + [("in_bf16", _INT)]
    )


class _Experts(ctypes.Structure):
    _fields_ = (
        c_fields(_INT, "num_tokens top_k num_experts hidden inner num_threads")
        + c_fields(_POINTER, "token place end x gates gate_up down middle out grad_out")
        + c_fields(_POINTER, "grad_x grad_gates grad_gate_up grad_down")
        + [("in_bf16", _INT)]
    )


class _Product(ctypes.Structure):
    _fields_ = (
        c_fields(_INT, "rows columns depth num_threads")
        + c_fields(_POINTER, "a b")
        + c_fields(ctypes.c_int64, "a_stride b_stride")
        + c_fields(_INT, "a_by_row b_by_row")
        + [("c", _POINTER), ("adds", _INT)]
    )


RECORDS = (_Experts, _Attention, _Product)


def attends(q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, mask_B1TT: Tensor | None) -> bool:
    """Whether `attention` computes these tensors."""
    B, H, T, C = q_BHTC.shape
    return (
        type(q_BHTC) is Tensor
        and q_BHTC.device.type == "cpu"
        and q_BHTC.dtype == k_BGTC.dtype == v_BGTC.dtype == torch.float32
        and k_BGTC.shape == v_BGTC.shape == (B, k_BGTC.shape[1], T, C)
        and (mask_B1TT is None or (mask_B1TT.dtype == torch.bool and mask_B1TT.shape in ((B, 1, T, T), (1, 1, T, T))))
        and H % k_BGTC.shape[1] == 0
        and 0 < C <= MAX_WIDTH
        and 0 < T <= MAX_LENGTH
        and B > 0
        and not torch.compiler.is_compiling()
        and library() is not None
    )


def attention(q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, mask_B1TT: Tensor | None, scale: float) -> Tensor:
    """Softmax attention [B, H, T, C]; the mask is True where a query may see a key, None: causal attention. Products are made in bf16 where
    `rounds` is True."""
    return _AttentionFunction.apply(q_BHTC, k_BGTC, v_BGTC, mask_B1TT, scale)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        (q, k, v), mask = _rows(q, k, v), None if mask is None else mask.contiguous()
        out, lse_BHT = _by_position(q), q.new_empty(q.shape[:3])
        ctx.in_bf16 = rounds(q, k, v)
        record = _attention_record(q, k, v, mask, scale, ctx.in_bf16, out, lse_BHT)
        kernels().stretto_attention_forward(ctypes.byref(record))
        ctx.save_for_backward(q, k, v, mask, out, lse_BHT)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse_BHT = ctx.saved_tensors
        (grad_out,), results = _rows(grads[0]), [_by_position(x) for x in (q, k, v)]
        record = _attention_record(q, k, v, mask, ctx.scale, ctx.in_bf16, out, lse_BHT, grad_out, *results)
        kernels().stretto_attention_backward(ctypes.byref(record))
        return *results, None, None


def _rows(*tensors: Tensor) -> list[Tensor]:
    """The tensors, with channels that lie side by side."""
    return [x if x.stride(3) == 1 else x.contiguous() for x in tensors]


def _by_position(x_BHTC: Tensor) -> Tensor:
    """A new tensor of this shape in which all heads of a position lie side by side, as the next product needs them."""
    B, H, T, C = x_BHTC.shape
    return x_BHTC.new_empty(B, T, H, C).transpose(1, 2)


def _attention_record(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    in_bf16: bool,
    out: Tensor,
    lse: Tensor,
    *grads: Tensor,
) -> _Attention:
    B, H, T, C = q.shape
    sizes = (B, H, k.shape[1], T, C, torch.get_num_threads(), scale)
    masked = (0, None) if mask is None else (len(mask), mask.data_ptr())
    heads = [_Heads.of(x) for x in (q, k, v, out)]
    record = _Attention(*sizes, *masked, *heads, lse.data_ptr(), *(_Heads.of(x) for x in grads))
    record.in_bf16 = in_bf16
    return record


def has_bf16_kernels() -> bool:
    """Whether the kernels multiply in bf16 on this processor: by AMX, if the system lets this process use it, or by AVX512_BF16 where there
    is no AMX."""
    handle = library()
    return handle is not None and bool(handle.stretto_training_in_bf16())


def rounds(*tensors: Tensor) -> bool:
    """Whether the kernels make products of these tensors in bf16, with rounded operands."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and all(type(x) in (Tensor, Parameter) and x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
        and has_bf16_kernels()
    )


def product(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor | None = None, adds: bool = False) -> Tensor:
    """``a`` · ``b`` [M, N] of tensors for which `rounds` is True, also of transposed ones; in ``out`` if it is given, and added to what it
    holds if it ``adds``."""
    (num_rows, depth), num_columns = a_MK.shape, b_KN.shape[1]
    if out_MN is None:
        out_MN = a_MK.new_empty(num_rows, num_columns)
    if not a_MK.numel() or not b_KN.numel():
        return out_MN if adds else out_MN.zero_()
    assert out_MN.is_contiguous() and out_MN.shape == (num_rows, num_columns) and depth == len(b_KN), (
        "shapes of a product"
    )
    a_MK, b_KN = (each if 1 in each.stride() else each.contiguous() for each in (a_MK, b_KN))
    by_row = [each.stride(1) == 1 for each in (a_MK, b_KN)]
    strides = [each.stride(0 if is_by_row else 1) for each, is_by_row in zip((a_MK, b_KN), by_row, strict=True)]
    sizes, addresses = (num_rows, num_columns, depth, torch.get_num_threads()), (a_MK.data_ptr(), b_KN.data_ptr())
    record = _Product(*sizes, *addresses, *strides, *by_row, out_MN.data_ptr(), adds)
    kernels().stretto_product(ctypes.byref(record))
    return out_MN


def multiplies(x_ND: Tensor, gate_up_EFD: Tensor, down_EDI: Tensor) -> bool:
    """Whether `experts_forward` computes experts without biases and clamps of these sizes."""
    return (
        not torch.compiler.is_compiling()
        and x_ND.device.type == "cpu"
        and x_ND.dtype == gate_up_EFD.dtype == down_EDI.dtype == torch.float32
        and min(*x_ND.shape, *down_EDI.shape) > 0
        and library() is not None
    )


def experts_forward(
    x_ND: Tensor,
    gates_S: Tensor,
    order: tuple[Tensor, Tensor, Tensor],
    gate_up_EFD: Tensor,
    down_EDI: Tensor,
    in_bf16: bool,
) -> tuple[Tensor, Tensor]:
    """Output of the experts [N, D], and the outputs of the gate-up product [S, F], which the backward pass needs.

    Args:
        gates_S: by place.
        order: the token of each place and the place of each slot (int64), and the end of each expert's places (int32).
        in_bf16: whether the products are made in bf16, from rounded operands; needs `has_bf16_kernels`.
    """
    inputs = [tensor.contiguous() for tensor in (x_ND, gates_S, gate_up_EFD, down_EDI)]
    middle_SF, out_ND = x_ND.new_empty(len(gates_S), gate_up_EFD.shape[1]), torch.empty_like(inputs[0])
    record = _experts_record(order, inputs, in_bf16, middle_SF, out_ND)
    kernels().stretto_experts_forward(ctypes.byref(record))
    return out_ND, middle_SF


def experts_backward(
    grad_ND: Tensor,
    x_ND: Tensor,
    gates_S: Tensor,
    middle_SF: Tensor,
    order: tuple[Tensor, Tensor, Tensor],
    gate_up_EFD: Tensor,
    down_EDI: Tensor,
    in_bf16: bool,
    wants: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of ``x_ND``, ``gates_S``, ``gate_up_EFD`` and ``down_EDI``; None for those that are not in ``wants``."""
    inputs = [tensor.contiguous() for tensor in (x_ND, gates_S, gate_up_EFD, down_EDI)]
    results = [torch.empty_like(x) if is_wanted else None for x, is_wanted in zip(inputs, wants, strict=True)]
    grad_ND = grad_ND.contiguous()  # a name, because the record holds its address only
    record = _experts_record(order, inputs, in_bf16, middle_SF, None, grad_ND, *results)
    kernels().stretto_experts_backward(ctypes.byref(record))
    return results


def _experts_record(
    order: tuple[Tensor, Tensor, Tensor], inputs: Sequence[Tensor], in_bf16: bool, *others: Tensor | None
) -> _Experts:
    (N, D), (E, F, _) = inputs[0].shape, inputs[2].shape
    token_S, place_S, ends_E = order
    assert token_S.dtype == place_S.dtype == torch.int64 and ends_E.dtype == torch.int32, "types of the order"
    assert len(token_S) == len(place_S) == len(inputs[1]), f"{len(token_S)} places of {len(place_S)} slots"
    sizes = (N, len(place_S) // N, E, D, F // 2, torch.get_num_threads())
    record = _Experts(*sizes, *(None if x is None else x.data_ptr() for x in (*order, *inputs, *others)))
    record.in_bf16 = in_bf16
    return record
