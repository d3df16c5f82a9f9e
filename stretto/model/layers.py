"""Attention and the dense SwiGLU.

Shape letters: B rows, T positions, D hidden, H query heads, G key/value heads, C head width, F = 2·I, I SwiGLU width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.model.spec import ModelConfig
from stretto.ops import exact
from stretto.ops.attention import attention, rotate
from stretto.ops.matmul import PLAIN, Arithmetic, linear, norm, rounded, swiglu


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where tokens stand: computed once a forward pass, read by every layer."""

    cos_BTR: Tensor
    sin_BTR: Tensor
    mask_B1TT: Tensor | None
    """True where a query may see a key; None is plain causal attention."""


class Norm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_D: Tensor, arithmetic: Arithmetic = PLAIN) -> Tensor:
        return norm(x_D, self.weight, self.eps, arithmetic)


class Attention(nn.Module):
    """Grouped-query attention; the q, k and v projections are one matrix (q rows, then k, then v)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        self.eps = config.norm_eps
        self.q_norm = nn.Parameter(torch.ones(config.head_dim)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(config.head_dim)) if config.qk_norm else None

    def forward(self, x_BTD: Tensor, geometry: Geometry, arithmetic: Arithmetic = PLAIN) -> Tensor:
        B, T, _ = x_BTD.shape
        num_rotated = self.num_heads + self.num_kv_heads
        qkv_BTX = linear(x_BTD, self.qkv.weight, self.qkv.bias, arithmetic)
        qkv_BTHC = qkv_BTX.view(B, T, num_rotated + self.num_kv_heads, self.head_dim)
        qk_BTHC, v_BTGC = qkv_BTHC.split((num_rotated, self.num_kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            weight_HC = torch.cat((self.q_norm.expand(self.num_heads, -1), self.k_norm.expand(self.num_kv_heads, -1)))
            qk_BTHC = norm(qk_BTHC, weight_HC, self.eps, arithmetic)
        qk_BTHC = rounded(rotate(qk_BTHC, geometry.cos_BTR, geometry.sin_BTR), arithmetic)
        q_BTHC, k_BTGC = qk_BTHC.split((self.num_heads, self.num_kv_heads), dim=2)
        q_BHTC, k_BGTC, v_BGTC = q_BTHC.transpose(1, 2), k_BTGC.transpose(1, 2), v_BTGC.transpose(1, 2)
        mask_B1TT = geometry.mask_B1TT
        if arithmetic.batch_invariant:
            if mask_B1TT is None:
                mask_B1TT = torch.ones(1, 1, T, T, dtype=torch.bool, device=x_BTD.device).tril()
            y_BHTC = exact.attention(q_BHTC, k_BGTC, v_BGTC, mask_B1TT)
        else:
            y_BHTC = attention(q_BHTC, k_BGTC, v_BGTC, mask_B1TT)
        return linear(y_BHTC.transpose(1, 2).reshape(B, T, -1), self.out.weight, None, arithmetic)


class SwiGlu(nn.Module):
    """Dense feed-forward: silu(gate) · up, then down. Gate and up are one matrix (gate rows first)."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, arithmetic: Arithmetic = PLAIN) -> Tensor:
        hidden_BTI = swiglu(linear(x_BTD, self.gate_up.weight, None, arithmetic), arithmetic)
        return linear(hidden_BTI, self.down.weight, None, arithmetic)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """A product kept in fp32 whatever autocast says: routers decide on small differences."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), weight.float())
