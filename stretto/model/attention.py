"""Rotary positions (RoPE) and the two kinds of attention: grouped-query attention and multi-head latent attention (MLA).

Shape letters: B rows, T positions, D hidden, H query heads, G key/value heads, C head width, X = (H + 2·G)·C, U width of a
head's values (C except in MLA), Z width of a latent vector, R rotated pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.model.spec import ModelConfig, RopeScaling
from stretto.ops.documents import Documents
from stretto.ops.grouped import compute_dtype
from stretto.ops.operators import ORDINARY, Operators, causal_mask, document_mask, rotate, window_mask


@dataclass(frozen=True, slots=True)
class Geometry:
    """Rotations and masks of a forward pass: computed once, read by every layer."""

    cos_BTR: Tensor
    sin_BTR: Tensor
    mask_B1TT: Tensor | Documents | None
    """True where a query may attend to a key, or the documents within which queries attend; None: causal attention."""
    window_B1TT: Tensor | None = None
    """The mask of sliding layers; None if there are none."""

    @staticmethod
    def of(
        config: ModelConfig,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        shared_BT2: Tensor | None = None,
        operators: Operators = ORDINARY,
        documents: Documents | None = None,
    ) -> Geometry:
        """Rotations and masks for the layers of ``config``; the arguments are fields of `stretto.model.transformer.Context`.

        Packed rows attend by document where that is faster. Sliding windows, sinks, latent attention and batch-invariant operators need
        masks, as do tensors that `Documents.are_worth` excludes.
        """
        frequencies_R = rotary_frequencies(config, positions_BT.device)
        cos_BTR, sin_BTR = operators.rotary_tables(positions_BT, frequencies_R, config.rope_magnitude)
        mask: Tensor | Documents | None = None
        if documents_BT is not None:
            needs_mask = config.sliding_layers or config.attention_sinks or config.latent is not None
            if not needs_mask and operators.attends_by_document:
                if documents is None or documents.documents_BT is not documents_BT:
                    shared = None if shared_BT2 is None else shared_BT2.cpu().numpy()
                    documents = Documents.of(documents_BT, documents_BT.cpu().numpy(), shared)
                mask = documents if documents.are_worth(compute_dtype(cos_BTR)) else None
            mask = document_mask(documents_BT, shared_BT2) if mask is None else mask
        if not config.sliding_layers:
            return Geometry(cos_BTR, sin_BTR, mask)
        assert config.sliding_window is not None and not isinstance(mask, Documents)
        visible = causal_mask(positions_BT.shape[1], positions_BT.device) if mask is None else mask
        return Geometry(cos_BTR, sin_BTR, mask, visible & window_mask(positions_BT, config.sliding_window))


def rotary_frequencies(config: ModelConfig, device: torch.device | str) -> Tensor:
    """Radians per position of each of the R rotated pairs, fp32, with the rounding of transformers' ``modeling_rope_utils``."""
    num, theta, rope = config.rotary_dim, config.rope_theta, config.rope_scaling
    exponent_R = torch.arange(0, num, 2, dtype=torch.float32, device=device) / num
    plain_R = 1.0 / theta**exponent_R
    if rope is None or rope.kind == "dynamic":
        return plain_R
    if rope.kind == "linear":
        return plain_R / rope.factor
    assert rope.original_positions is not None
    if rope.kind == "llama3":
        return llama3_frequencies(plain_R, rope)
    # yarn: fast frequencies stay, slow ones are divided by the factor, and a linear ramp lies between
    low, high = (
        num * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num - 1)
    ramp_R = (torch.arange(num // 2, dtype=torch.float32, device=device) - low) / ((high - low) or 0.001)
    plain_share_R = 1 - ramp_R.clamp(0, 1)
    return 1.0 / (rope.factor * theta**exponent_R) * (1 - plain_share_R) + plain_R * plain_share_R


def llama3_frequencies(plain_R: Tensor, rope: RopeScaling) -> Tensor:
    """Llama 3's scaling of frequencies: slow ones are divided by ``rope.factor``, fast ones stay, and a linear ramp lies between."""
    assert rope.original_positions is not None
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns_R = rope.original_positions / (2 * math.pi / plain_R)
    smooth_R = (turns_R - low) / (high - low)
    between_R = (1 - smooth_R) * plain_R / rope.factor + smooth_R * plain_R
    stretched_R = torch.where(turns_R < low, plain_R / rope.factor, between_R)
    return torch.where(turns_R > high, plain_R, stretched_R)


class Attention(nn.Module):
    """Grouped-query attention; the query, key and value projections are one matrix (q rows, then k, then v)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.attention_out_bias)
        self.eps, self.scale, self.clip = config.norm_eps, config.attention_scale, config.qkv_clip
        self.is_sliding, self.is_wide = layer in config.sliding_layers, config.qk_norm_wide
        self.q_norm: nn.Parameter | None = None
        self.k_norm: nn.Parameter | None = None
        if config.qk_norm or config.qk_norm_wide:
            q_heads, k_heads = (config.num_heads, config.num_kv_heads) if self.is_wide else (1, 1)
            self.q_norm = nn.Parameter(torch.ones(q_heads * config.head_dim))
            self.k_norm = nn.Parameter(torch.ones(k_heads * config.head_dim))
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.attention_sinks else None

    def forward(self, x_BTD: Tensor, geometry: Geometry, operators: Operators = ORDINARY) -> Tensor:
        B, T, _ = x_BTD.shape
        num_rotated = self.num_heads + self.num_kv_heads
        qkv_BTX = operators.linear(x_BTD, self.qkv.weight, self.qkv.bias)
        qkv_BTHC = qkv_BTX.view(B, T, num_rotated + self.num_kv_heads, self.head_dim)
        qk_BTHC, v_BTGC = qkv_BTHC.split((num_rotated, self.num_kv_heads), dim=2)
        qk_BTHC = self._normed(qk_BTHC, operators)
        if self.clip is not None:
            qk_BTHC, v_BTGC = qk_BTHC.clamp(-self.clip, self.clip), v_BTGC.clamp(-self.clip, self.clip)
        qk_BTHC = operators.rounded(rotate(qk_BTHC, geometry.cos_BTR, geometry.sin_BTR))
        q_BTHC, k_BTGC = qk_BTHC.split((self.num_heads, self.num_kv_heads), dim=2)
        q_BHTC, k_BGTC, v_BGTC = q_BTHC.transpose(1, 2), k_BTGC.transpose(1, 2), v_BTGC.transpose(1, 2)
        mask_B1TT = geometry.window_B1TT if self.is_sliding else geometry.mask_B1TT
        y_BHTC = operators.attention(q_BHTC, k_BGTC, v_BGTC, mask_B1TT, self.scale, self.sinks)
        return operators.linear(y_BHTC.transpose(1, 2).reshape(B, T, -1), self.out.weight, self.out.bias)

    def _normed(self, qk_BTHC: Tensor, operators: Operators) -> Tensor:
        """Apply the query and key norms, if there are any: to each head, or to all heads as one vector (``qk_norm_wide``)."""
        if self.q_norm is None or self.k_norm is None:
            return qk_BTHC
        heads = (self.num_heads, self.num_kv_heads)
        if self.is_wide:
            parts = zip(qk_BTHC.split(heads, dim=2), (self.q_norm, self.k_norm), strict=True)
            return torch.cat([operators.norm(x.flatten(2), weight, self.eps).view_as(x) for x, weight in parts], 2)
        weight_HC = torch.cat((self.q_norm.expand(self.num_heads, -1), self.k_norm.expand(self.num_kv_heads, -1)))
        return operators.norm(qk_BTHC, weight_HC, self.eps)


class Mla(nn.Module):
    """Multi-head latent attention: keys and values are projected from one latent vector, queries from another or directly.

    The channels of a head that are not rotated come first. All heads share the rotated part of the key.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        latent = config.latent
        assert latent is not None
        hidden, heads = config.hidden_size, config.num_heads
        self.eps, self.scale, self.num_heads = latent.norm_eps, config.attention_scale, heads
        self.kv_rank, self.rope_dim, self.value_dim = latent.kv_rank, latent.rope_dim, latent.value_dim
        self.head_dim, self.nope_dim = config.head_dim, config.head_dim - latent.rope_dim
        rank, width = latent.query_rank, heads * config.head_dim
        self.q = nn.Linear(hidden, width, bias=False) if rank is None else None
        self.q_down = None if rank is None else nn.Linear(hidden, rank, bias=config.attention_bias)
        self.q_down_norm = None if rank is None else nn.Parameter(torch.ones(rank))
        self.q_up = None if rank is None else nn.Linear(rank, width, bias=False)
        self.kv_down = nn.Linear(hidden, latent.kv_rank + latent.rope_dim, bias=config.attention_bias)
        self.kv_down_norm = nn.Parameter(torch.ones(latent.kv_rank))
        self.kv_up = nn.Linear(latent.kv_rank, heads * (self.nope_dim + latent.value_dim), bias=False)
        self.out = nn.Linear(heads * latent.value_dim, hidden, bias=config.attention_out_bias)

    def forward(self, x_BTD: Tensor, geometry: Geometry, operators: Operators = ORDINARY) -> Tensor:
        B, T, _ = x_BTD.shape
        q_BTHC = self._queries(x_BTD, operators).view(B, T, self.num_heads, self.head_dim)
        kv_BTZ = operators.linear(x_BTD, self.kv_down.weight, self.kv_down.bias)
        latent_BTZ, rope_BT1C = kv_BTZ[..., : self.kv_rank], kv_BTZ[..., None, self.kv_rank :]
        latent_BTZ = operators.norm(latent_BTZ, self.kv_down_norm, self.eps)
        kv_BTHX = operators.linear(latent_BTZ, self.kv_up.weight).view(B, T, self.num_heads, -1)
        k_BTHC, v_BTHU = kv_BTHX.split((self.nope_dim, self.value_dim), dim=-1)
        q_BTHC, q_rope_BTHC = q_BTHC.split((self.nope_dim, self.rope_dim), dim=-1)
        rotated = torch.cat((q_rope_BTHC, rope_BT1C), dim=2)
        rotated = operators.rounded(rotate(rotated, geometry.cos_BTR, geometry.sin_BTR))
        q_rope_BTHC, rope_BT1C = rotated.split((self.num_heads, 1), dim=2)
        q_BHTC = torch.cat((q_BTHC, q_rope_BTHC), -1).transpose(1, 2)
        k_BHTC = torch.cat((k_BTHC, rope_BT1C.expand(-1, -1, self.num_heads, -1)), -1).transpose(1, 2)
        y_BHTU = operators.attention(q_BHTC, k_BHTC, v_BTHU.transpose(1, 2), geometry.mask_B1TT, self.scale)
        return operators.linear(y_BHTU.transpose(1, 2).reshape(B, T, -1), self.out.weight, self.out.bias)

    def _queries(self, x_BTD: Tensor, operators: Operators) -> Tensor:
        if self.q is not None:
            return operators.linear(x_BTD, self.q.weight)
        assert self.q_down is not None and self.q_down_norm is not None and self.q_up is not None
        latent_BTZ = operators.linear(x_BTD, self.q_down.weight, self.q_down.bias)
        return operators.linear(operators.norm(latent_BTZ, self.q_down_norm, self.eps), self.q_up.weight)
