"""RMSNorm.

Shape letters: D the normalised width, … any leading dims.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm written out, statistics in fp32: the definition that `rms_norm` is tested against."""
    wide_D = x_D.float()
    scale = torch.rsqrt(wide_D.pow(2).mean(-1, keepdim=True) + eps)
    return (wide_D * scale).to(x_D.dtype) * weight_D


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise the last dim of ``x_D`` […, D] and scale by ``weight_D`` (D, or any shape that broadcasts to ``x_D``)."""
    if x_D.device.type == "cpu" and x_D.dtype in (torch.float32, torch.float64):
        return _CpuRmsNorm.apply(x_D, weight_D, eps)
    if weight_D.dim() == 1:
        return F.rms_norm(x_D, (x_D.shape[-1],), weight_D.to(x_D.dtype), eps)
    return F.rms_norm(x_D, (x_D.shape[-1],), None, eps) * weight_D.to(x_D.dtype)


class _CpuRmsNorm(torch.autograd.Function):
    """torch's composite backward makes about a dozen passes over memory on a CPU; this one makes five."""

    @staticmethod
    def forward(ctx: Any, x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True).square_().div_(x_D.shape[-1]).add_(eps).rsqrt_()
        normed_D = x_D * scale
        ctx.save_for_backward(normed_D, weight_D, scale)
        return normed_D * weight_D

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_D,) = grads
        normed_D, weight_D, scale = ctx.saved_tensors
        grad_weight = (grad_D * normed_D).sum_to_size(weight_D.shape)
        inner_D = grad_D * weight_D
        mean = (inner_D * normed_D).mean(-1, keepdim=True)
        return inner_D.addcmul_(normed_D, mean, value=-1).mul_(scale), grad_weight, None
