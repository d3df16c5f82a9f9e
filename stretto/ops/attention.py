"""Causal grouped-query attention that does not cross document borders.

Shape letters: B rows, T positions, H query heads, G key/value heads, C head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def document_mask(documents_BT: Tensor, shared_BT2: Tensor | None = None) -> Tensor:
    """Who may look at whom, [B, 1, T, T] bool: itself, earlier positions of the same document, and a shared beginning.

    A padding position (document −1) sees the other padding before it; its output is never used.

    Args:
        documents_BT: number of each position's document.
        shared_BT2: first and one past the last column of the beginning that its document continues.
    """
    mask_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()
    if shared_BT2 is not None:
        columns_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
        first_BT1, end_BT1 = shared_BT2.split(1, dim=-1)
        mask_BTT |= (columns_T >= first_BT1) & (columns_T < end_BT1)
    return mask_BTT.unsqueeze(1)


def attention_reference(q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, mask_B1TT: Tensor | None) -> Tensor:
    """Softmax attention written out in fp32; ``mask_B1TT`` None is plain causal attention. Returns [B, H, T, C]."""
    groups = q_BHTC.shape[1] // k_BGTC.shape[1]
    k_BHTC = k_BGTC.repeat_interleave(groups, dim=1).float()
    v_BHTC = v_BGTC.repeat_interleave(groups, dim=1).float()
    scores_BHTT = q_BHTC.float() @ k_BHTC.transpose(-1, -2) / math.sqrt(q_BHTC.shape[-1])
    if mask_B1TT is None:
        length = q_BHTC.shape[2]
        mask_B1TT = torch.ones(1, 1, length, length, dtype=torch.bool, device=q_BHTC.device).tril()
    scores_BHTT = scores_BHTT.masked_fill(~mask_B1TT, float("-inf"))
    return (scores_BHTT.softmax(-1) @ v_BHTC).to(q_BHTC.dtype)


def attention(q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, mask_B1TT: Tensor | None) -> Tensor:
    """`attention_reference` through torch's fused kernels. Returns [B, H, T, C]."""
    grouped = q_BHTC.shape[1] != k_BGTC.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTC, k_BGTC, v_BGTC, attn_mask=mask_B1TT, is_causal=mask_B1TT is None, enable_gqa=grouped
    )


def rotary_tables(positions_BT: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, T, rotary_dim / 2] in fp32 of the rotation at each position (RoFormer, 2104.09864)."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions_BT.device) / rotary_dim
    angle_BTR = positions_BT[..., None].float() * (1.0 / theta**exponent)
    return angle_BTR.cos(), angle_BTR.sin()


def rotate(x_BTHC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Rotate the leading 2R of the C channels of every head; channel i is paired with channel i + R."""
    half = cos_BTR.shape[-1]
    cos, sin = cos_BTR.unsqueeze(2).to(x_BTHC.dtype), sin_BTR.unsqueeze(2).to(x_BTHC.dtype)
    first, second = x_BTHC[..., :half], x_BTHC[..., half : 2 * half]
    rest = x_BTHC[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
