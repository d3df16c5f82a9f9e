"""Compiled functions of single rows for training on a CPU in fp32 (train_rows.h): RMS norm, rotation and softmax.

Each reads and writes its rows once, where torch composes it of operations that all do. Results are equal, to the bit, for every
number of threads.

Shape letters: N rows, D width, B rows of a batch, T positions, H heads, C head width, R rotated pairs, V vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.ops.native import c_fields, training

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


# The records of train_rows.h, field by field; the fields are documented there.


class _Norm(ctypes.Structure):
    _fields_ = (
        c_fields(_INT, "num_rows width num_threads")
        + [("eps", _FLOAT)]
        + c_fields(_POINTER, "x weight out scale grad_out grad_x grad_weight")
    )


class _Rotation(ctypes.Structure):
    _fields_ = (
        c_fields(_INT, "num_rows length num_heads width half num_threads")
        + [("sign", _FLOAT), ("x", _POINTER)]
        + c_fields(ctypes.c_int64, "by_row by_position by_head")
        + c_fields(_POINTER, "cosine sine out")
    )


class _Softmax(ctypes.Structure):
    _fields_ = c_fields(_INT, "num_rows width num_threads") + c_fields(_POINTER, "logits kept lse")


RECORDS = (_Norm, _Rotation, _Softmax)


def _computes(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernels compute these tensors, by type, device and size."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and all(each.dtype == torch.float32 and each.device.type == "cpu" for each in (x, *others))
        and x.numel() > 0
        and training.library() is not None
    )


def norms(x_ND: Tensor, weight_D: Tensor) -> bool:
    """Whether `rms_norm` computes these tensors."""
    return _computes(x_ND, weight_D) and weight_D.dim() == 1 and len(weight_D) == x_ND.shape[-1]


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim of ``x`` […, D], scaled by ``weight``."""
    return _NormFunction.apply(x_ND, weight_D, eps)


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_ND, weight_D = x_ND.contiguous(), weight_D.contiguous()
        out_ND, scale_N = torch.empty_like(x_ND), x_ND.new_empty(x_ND.shape[:-1])
        record = _norm_record(x_ND, weight_D, eps, scale_N)
        record.out = out_ND.data_ptr()
        training.kernels().stretto_norm_forward(ctypes.byref(record))
        ctx.save_for_backward(x_ND, weight_D, scale_N)
        ctx.eps = eps
        return out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_D, scale_N = ctx.saved_tensors
        grad_ND, grad_x = grads[0].contiguous(), torch.empty_like(x_ND)
        grad_weight = torch.empty_like(weight_D) if ctx.needs_input_grad[1] else None
        record = _norm_record(x_ND, weight_D, ctx.eps, scale_N)
        record.grad_out, record.grad_x = grad_ND.data_ptr(), grad_x.data_ptr()
        record.grad_weight = None if grad_weight is None else grad_weight.data_ptr()
        training.kernels().stretto_norm_backward(ctypes.byref(record))
        return grad_x, grad_weight, None


def _norm_record(x_ND: Tensor, weight_D: Tensor, eps: float, scale_N: Tensor) -> _Norm:
    sizes, (x, weight, scale) = (
        (scale_N.numel(), len(weight_D)),
        (each.data_ptr() for each in (x_ND, weight_D, scale_N)),
    )
    return _Norm(*sizes, torch.get_num_threads(), eps, x, weight, scale=scale)


def rotates(x_BTHC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> bool:
    """Whether `rotate` computes these tensors."""
    if not _computes(x_BTHC, cos_BTR, sin_BTR):
        return False
    (B, T, _, C), pairs = x_BTHC.shape, cos_BTR.shape[-1]
    return cos_BTR.shape == sin_BTR.shape == (B, T, pairs) and 2 * pairs <= C and x_BTHC.stride(3) == 1


def rotate(x_BTHC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Rotate the first 2·R of the C channels of every head; channels i and i + R are a pair. The angles receive no gradient."""
    return _RotationFunction.apply(x_BTHC, cos_BTR.contiguous(), sin_BTR.contiguous())


class _RotationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BTR, sin_BTR)
        return _rotated(x_BTHC, 1.0, cos_BTR, sin_BTR)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BTHC,) = grads
        grad_BTHC = grad_BTHC if grad_BTHC.stride(3) == 1 else grad_BTHC.contiguous()
        return _rotated(grad_BTHC, -1.0, *ctx.saved_tensors), None, None


def _rotated(x_BTHC: Tensor, sign: float, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    out_BTHC = torch.empty(x_BTHC.shape, dtype=x_BTHC.dtype)
    sizes = *x_BTHC.shape, cos_BTR.shape[-1], torch.get_num_threads()
    addresses = (each.data_ptr() for each in (cos_BTR, sin_BTR, out_BTHC))
    record = _Rotation(*sizes, sign, x_BTHC.data_ptr(), *x_BTHC.stride()[:3], *addresses)
    training.kernels().stretto_rotate(ctypes.byref(record))
    return out_BTHC


def softmaxes(logits_NV: Tensor) -> bool:
    """Whether `softmax_` computes these logits."""
    return _computes(logits_NV) and logits_NV.is_contiguous()


def softmax_(logits_NV: Tensor, kept_N1: Tensor) -> Tensor:
    """Overwrite logits with probabilities, or with zero in rows that are not kept (bool); returns the logsumexp of the rows [N, 1]."""
    lse_N1, kept_N1 = logits_NV.new_empty(len(logits_NV), 1), kept_N1.contiguous()
    addresses = (each.data_ptr() for each in (logits_NV, kept_N1, lse_N1))
    record = _Softmax(*logits_NV.shape, torch.get_num_threads(), *addresses)
    training.kernels().stretto_softmax(ctypes.byref(record))
    return lse_N1
