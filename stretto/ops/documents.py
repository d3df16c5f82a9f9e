"""Attention by document: every document of packed rows attends to itself, and to a prefix that it shares, without a mask [T, T].

The reference is attention with `stretto.ops.operators.document_mask`. On CUDA, torch's kernel for sequences of any lengths computes all
documents at once (FlashAttention-2, 2307.08691); on a CPU they are computed one after the other.

Shape letters: B rows, T positions, N = B·T tokens, S documents, M keys, H query heads, G key/value heads, C head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch._compile import _disable_dynamo

from stretto.ops.native import training

SHORT = 32
"""Mean length of documents below which a mask is faster on a CPU: measured on Zen 4, 0.8x at 16 tokens, 1.4x at 64, 2x at 128."""
_ENDS_MULTIPLE = 64
"""The number of documents is rounded up to a multiple of this by empty ones, so that compiled blocks see few shapes."""


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Where the documents of packed rows lie; made by `of`."""

    documents_BT: Tensor
    """Document number of each token. The other fields describe these numbers: if the numbers change, make a new object with `of`."""
    spans: tuple[tuple[int, int, int], ...]
    """Of each document: number of tokens, number of the document in which its shared prefix begins, and the prefix's length. Documents
    follow each other, row by row."""
    ends_S: Tensor
    """Cumulative number of tokens of the documents, from 0, int32; for CUDA."""
    key_ends_S: Tensor
    """The same of their keys."""
    keys_M: Tensor | None
    """Token of each key, int64; None: no document shares a prefix, and the keys are the tokens."""
    repeats_keys: bool
    """Whether the kernel needs one key head per query head; for CUDA."""

    @staticmethod
    def of(
        documents_BT: Tensor, host_BT: NDArray[np.integer[Any]], shared_BT2: NDArray[np.integer[Any]] | None = None
    ) -> Documents:
        """Documents of rows whose numbers and shared prefixes are as `stretto.ops.operators.document_mask` takes them.

        The tokens of a document are neighbours, and a prefix begins where a document begins. ``host_BT``: ``documents_BT`` on the host.
        """
        is_first_BT = np.ones(host_BT.shape, bool)
        is_first_BT[:, 1:] = host_BT[:, 1:] != host_BT[:, :-1]
        starts_S = np.flatnonzero(is_first_BT)
        lengths_S = np.diff(starts_S, append=host_BT.size)
        prefixes_S2 = np.zeros((len(starts_S), 2), np.int64)  # first token, and length
        if shared_BT2 is not None:
            first_S, end_S = shared_BT2.reshape(-1, 2)[starts_S].T.astype(np.int64)
            prefixes_S2 = np.stack((starts_S // host_BT.shape[1] * host_BT.shape[1] + first_S, end_S - first_S), 1)
        keys_M = None
        if prefixes_S2[:, 1].any():
            parts = zip(*prefixes_S2.T, starts_S, lengths_S, strict=True)
            spans = [span for start, num, own, length in parts for span in ((start, num), (own, length))]
            keys_M = torch.from_numpy(np.concatenate([np.arange(at, at + num) for at, num in spans]))
        homes_S = np.searchsorted(starts_S, prefixes_S2[:, 0])
        device = documents_BT.device
        return Documents(
            documents_BT,
            tuple(zip(lengths_S.tolist(), homes_S.tolist(), prefixes_S2[:, 1].tolist(), strict=True)),
            _ends(lengths_S).to(device, non_blocking=True),
            _ends(lengths_S + prefixes_S2[:, 1]).to(device, non_blocking=True),
            None if keys_M is None else keys_M.to(device, non_blocking=True),
            device.type == "cuda" and not _shares_heads(),
        )

    def are_worth(self, dtype: torch.dtype) -> bool:
        """Whether attention by document in ``dtype`` is possible on the device, and faster than a mask."""
        if self.documents_BT.is_cuda:
            return dtype in (torch.bfloat16, torch.float16)
        if dtype == torch.float32 and training.library() is not None:
            return False  # the compiled kernels skip keys that no query sees
        return self.documents_BT.device.type == "cpu" and self.documents_BT.numel() >= SHORT * len(self.spans)


def _ends(lengths_S: NDArray[np.int64]) -> Tensor:
    ends_S = np.cumsum([0, *lengths_S, *[0] * (-len(lengths_S) % _ENDS_MULTIPLE)])
    return torch.from_numpy(ends_S.astype(np.int32))


def document_attention(
    q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, documents: Documents, scale: float | None
) -> Tensor:
    """Attention of the ``documents`` of B rows. Returns [B, H, T, C]; reference: `stretto.ops.operators.attention_reference`."""
    B, _, T, _ = q_BHTC.shape
    q_NHC, k_NGC, v_NGC = (each.transpose(1, 2).flatten(0, 1) for each in (q_BHTC, k_BGTC, v_BGTC))
    compute = _on_cuda if q_BHTC.is_cuda else _one_by_one
    return compute(q_NHC, k_NGC, v_NGC, documents, scale, T).unflatten(0, (B, T)).transpose(1, 2)


@cache
def _shares_heads() -> bool:
    """Whether the kernel of this torch lets query heads share key heads; 2.11's does not."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


def _on_cuda(
    q_NHC: Tensor, k_NGC: Tensor, v_NGC: Tensor, documents: Documents, scale: float | None, length: int
) -> Tensor:
    """All documents at once; queries are aligned with the last of their keys, so that a document sees its whole prefix."""
    from torch.nn.attention.varlen import varlen_attn

    kind = q_NHC.device.type
    if torch.is_autocast_enabled(kind):  # which does not know the kernel
        q_NHC, k_NGC, v_NGC = (each.to(torch.get_autocast_dtype(kind)) for each in (q_NHC, k_NGC, v_NGC))
    if documents.keys_M is not None:
        k_NGC, v_NGC = (each.index_select(0, documents.keys_M) for each in (k_NGC, v_NGC))
    options: dict[str, Any] = {}
    if (groups := q_NHC.shape[1] // k_NGC.shape[1]) > 1:
        if documents.repeats_keys:
            k_NGC, v_NGC = (each.repeat_interleave(groups, dim=1) for each in (k_NGC, v_NGC))
        else:
            options = {"enable_gqa": True}
    ends = documents.ends_S, documents.key_ends_S
    # no document and its prefix are longer than a row; a fixed limit keeps compiled blocks from compiling again
    y_NHC = varlen_attn(q_NHC, k_NGC, v_NGC, *ends, length, length, scale=scale, window_size=(-1, 0), **options)
    assert isinstance(y_NHC, Tensor), "no other results were asked for"
    return y_NHC


@_disable_dynamo  # a compiled block would be compiled again for every number of documents
def _one_by_one(
    q_NHC: Tensor, k_NGC: Tensor, v_NGC: Tensor, documents: Documents, scale: float | None, length: int
) -> Tensor:
    """One document after the other; the row's ``length`` is unused, so that the parameters are those of `_on_cuda`."""
    lengths, parts = [num for num, _, _ in documents.spans], []
    keys, values = k_NGC.split(lengths), v_NGC.split(lengths)
    grouped = q_NHC.shape[1] != k_NGC.shape[1]
    for number, (q_LHC, (num, home, num_shared)) in enumerate(zip(q_NHC.split(lengths), documents.spans, strict=True)):
        k_MGC, v_MGC = keys[number], values[number]
        bias = None
        if num_shared:
            k_MGC, v_MGC = (torch.cat((of[home][:num_shared], of[number])) for of in (keys, values))
            bias = q_LHC.new_ones(num, num + num_shared, dtype=torch.bool).tril(num_shared)
        q, k, v = (each.transpose(0, 1)[None] for each in (q_LHC, k_MGC, v_MGC))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=grouped
        )
        parts.append(y[0].transpose(0, 1))
    return torch.cat(parts)
