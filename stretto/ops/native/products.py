"""Products of matrices on a CPU, by the fastest that the processor has.

Under autocast to bf16, the compiled kernels multiply where the processor has instructions for it (`stretto.ops.native.training`).
In fp32 torch multiplies with MKL, which uses no AVX-512 on processors of other makers than Intel. There oneDNN, which torch also
contains, is 2.2 times as fast (measured on Zen 5). Everything else is left to torch.

Shape letters: M rows, K depth, N columns of a product; N inputs, D and F their width before and after a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from stretto.ops.native import training

PIECE_BYTES = 16 << 20
"""Bytes that oneDNN's product needs beside the result that it is written or added to. Memory of this size is used again and again;
larger pieces come from the system every time."""
LEAST = 1 << 22
"""Multiplications of the smallest product for which oneDNN gains more than its call costs."""


@cache
def has_fast_onednn() -> bool:
    """Whether fp32 products of oneDNN are faster than torch's own on this processor."""
    cpuinfo = Path("/proc/cpuinfo")
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and cpuinfo.is_file()
        and "GenuineIntel" not in cpuinfo.read_text()
    )


def product(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor | None = None) -> Tensor:
    """``a`` · ``b`` [M, N]; in ``out`` if it is given."""
    if training.rounds(a_MK, b_KN):
        return training.product(a_MK, b_KN, out_MN)
    if not _is_for_onednn(len(a_MK), a_MK, b_KN):
        return torch.mm(a_MK, b_KN) if out_MN is None else torch.mm(a_MK, b_KN, out=out_MN)
    if out_MN is None:
        return _onednn(a_MK, b_KN)
    for rows, columns in _pieces(out_MN):
        out_MN[rows, columns] = _onednn(a_MK[rows], b_KN[:, columns])
    return out_MN


def add_product_(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """Add ``a`` · ``b``, of the same data type, to ``total``."""
    if training.rounds(total_MN, a_MK, b_KN):
        training.product(a_MK, b_KN, total_MN, adds=True)
    elif not _is_for_onednn(len(a_MK), a_MK, b_KN):
        total_MN.addmm_(a_MK, b_KN)
    else:
        for rows, columns in _pieces(total_MN):
            total_MN[rows, columns] += _onednn(a_MK[rows], b_KN[:, columns])


def _pieces(out_MN: Tensor) -> Iterator[tuple[slice, slice]]:
    """Parts of a result along its longer dimension, of `PIECE_BYTES` at most: oneDNN's products come in memory of their own."""
    longer = 0 if out_MN.shape[0] >= out_MN.shape[1] else 1
    step = max(1, PIECE_BYTES // (out_MN.element_size() * out_MN.shape[1 - longer]))
    for start in range(0, out_MN.shape[longer], step):
        part = slice(start, start + step)
        yield (part, slice(None)) if longer == 0 else (slice(None), part)


def linear(x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """``x`` · ``weight``ᵀ + ``bias``, […, F], for ``x`` […, D]; differentiable."""
    if training.rounds(x_ND, weight_FD):
        multiply: Callable[[Tensor, Tensor], Tensor] = training.product
    elif _is_for_onednn(x_ND.numel() // max(1, x_ND.shape[-1]), x_ND, weight_FD):
        multiply = _onednn
    else:
        return F.linear(x_ND, weight_FD, bias_F)
    y_NF: Tensor = _Linear.apply(x_ND, weight_FD, multiply)
    return y_NF if bias_F is None else y_NF + bias_F


def _is_for_onednn(num_rows: int, a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN multiplies ``num_rows`` rows of ``a`` with the matrix ``b``."""
    return (
        num_rows * b.numel() >= LEAST
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and all(type(x) in (Tensor, Parameter) and x.dtype == torch.float32 and x.device.type == "cpu" for x in (a, b))
        and has_fast_onednn()
    )


def _onednn(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """``a`` · ``b`` of matrices, also of transposed ones. oneDNN copies a left operand whose rows are not contiguous, so a large one is the
    right operand of the transposed product, whose result is transposed."""
    is_transposed = a_MK.stride(1) != 1 and a_MK.numel() > 2 * b_KN.numel()
    pair = (b_KN.t(), a_MK) if is_transposed else (a_MK, b_KN.t())
    left, right = (x if 1 in x.stride() and 0 not in x.stride() else x.contiguous() for x in pair)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return y.t() if is_transposed else y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_FD: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x_ND, weight_FD)
        ctx.multiply = multiply
        return multiply(x_ND.flatten(0, -2), weight_FD.t()).view(*x_ND.shape[:-1], len(weight_FD))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_FD = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        grad_NF = grads[0].flatten(0, -2)
        return (
            ctx.multiply(grad_NF, weight_FD).view(x_ND.shape) if wants_x else None,
            ctx.multiply(grad_NF.t(), x_ND.flatten(0, -2)) if wants_weight else None,
            None,
        )
