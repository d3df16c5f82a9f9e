"""Attention by document against attention with the mask of the same documents, on a CPU and with a slow form of CUDA's kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from stretto.model.attention import Geometry
from stretto.model.spec import LatentAttention, ModelConfig
from stretto.ops import documents as by_document
from stretto.ops.documents import Documents, document_attention
from stretto.ops.matmul import Arithmetic
from stretto.ops.native import training
from stretto.ops.operators import attention, attention_reference, document_mask

Close = Callable[[Tensor, Tensor, int], None]
WHOLE = torch.tensor([[0] * 16, [0] * 5 + [1] * 9 + [2] * 2, [0] * 11 + [-1] * 5, [-1] * 16])
"""One document, three, one and padding, nothing but padding."""
SHARED = torch.tensor([[0] * 6 + [1] * 4 + [2] * 6, [0] * 3 + [1] * 5 + [2] * 2 + [-1] * 6])
PREFIXES = {(0, 1): (0, 6), (0, 2): (0, 4), (1, 2): (0, 3)}
"""Shared prefixes by row and document: a whole one and a part of it, and a document without one between."""


def _shared() -> Tensor:
    shared_BT2 = torch.zeros(*SHARED.shape, 2, dtype=torch.int64)
    for (row, document), prefix in PREFIXES.items():
        shared_BT2[row, SHARED[row] == document] = torch.tensor(prefix)
    return shared_BT2


def _kernel(
    q_NHC: Tensor, k_NGC: Tensor, v_NGC: Tensor, ends_S: Tensor, key_ends_S: Tensor, max_q: int, max_k: int, *,
    scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.attention.varlen.varlen_attn`, which needs CUDA: each sequence of queries is aligned with the last of its keys."""
    assert window_size == (-1, 0) and ends_S.dtype == key_ends_S.dtype == torch.int32
    assert enable_gqa or q_NHC.shape[1] == k_NGC.shape[1], "the kernel must be told that heads share keys"
    assert ends_S[-1] == len(q_NHC) and key_ends_S[-1] == len(k_NGC)
    parts = []
    for (start, end), (first, last) in zip(
        ends_S.unfold(0, 2, 1).tolist(), key_ends_S.unfold(0, 2, 1).tolist(), strict=True
    ):
        num, num_keys = end - start, last - first
        assert num <= max_q and num_keys <= max_k
        mask = torch.ones(num, num_keys, dtype=torch.bool).tril(num_keys - num)
        sides = (x[None].transpose(1, 2) for x in (q_NHC[start:end], k_NGC[first:last], v_NGC[first:last]))
        parts.append(attention_reference(*sides, mask, scale)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("place", ["cpu", "cuda", "cuda, repeated heads"])
@pytest.mark.parametrize(("documents_BT", "shared_BT2"), [(WHOLE, None), (SHARED, _shared())], ids=["apart", "shared"])
@pytest.mark.parametrize(("heads", "groups", "scale"), [(4, 2, None), (2, 2, 0.3)])
def test_it_equals_the_mask(
    place: str, documents_BT: Tensor, shared_BT2: Tensor | None, heads: int, groups: int, scale: float | None,
    close: Close, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if place != "cpu":
        monkeypatch.setattr(by_document, "_one_by_one", by_document._on_cuda)
        monkeypatch.setattr(varlen, "varlen_attn", _kernel)
    torch.manual_seed(0)
    B, T = documents_BT.shape
    qkv = [torch.randn(B, T, num, 8).transpose(1, 2).requires_grad_() for num in (heads, groups, groups)]
    documents = Documents.of(documents_BT, documents_BT.numpy(), None if shared_BT2 is None else shared_BT2.numpy())
    documents = replace(documents, repeats_keys=place != "cuda")
    actual = document_attention(*qkv, documents, scale)
    expected = attention_reference(*qkv, document_mask(documents_BT, shared_BT2), scale)
    upstream = torch.randn_like(actual) * (documents_BT >= 0)[:, None, :, None]  # outputs of padding are not used
    close(actual * (documents_BT >= 0)[:, None, :, None], expected * (documents_BT >= 0)[:, None, :, None], T)
    for ours, theirs in zip(
        torch.autograd.grad(actual, qkv, upstream), torch.autograd.grad(expected, qkv, upstream), strict=True
    ):
        close(ours, theirs, T * heads // groups)


def test_cuda_gets_few_shapes() -> None:
    for length in (2, 7):
        documents_BT = torch.arange(28).view(2, 14) // length
        assert len(Documents.of(documents_BT, documents_BT.numpy()).ends_S) == by_document._ENDS_MULTIPLE + 1


BASE = ModelConfig(
    vocab_size=8, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, num_experts=2, top_k=1, expert_intermediate_size=4
)  # fmt: skip
LATENT = LatentAttention(kv_rank=4, rope_dim=2, value_dim=4)


def test_rows_of_long_documents_attend_by_document(monkeypatch: pytest.MonkeyPatch) -> None:
    documents_BT = torch.arange(256).view(2, 128) // 64
    positions_BT = torch.arange(64).repeat(2, 2)
    made = Documents.of(documents_BT, documents_BT.numpy())

    def mask(documents: Documents | None, config: ModelConfig = BASE, arithmetic: Arithmetic | None = None) -> object:
        operators = (arithmetic or Arithmetic()).operators
        return Geometry.of(config, positions_BT, documents_BT, None, operators, documents).mask_B1TT

    if training.library() is not None:
        assert isinstance(mask(made), Tensor), "the compiled kernels take a mask"
    monkeypatch.setattr(training, "library", lambda: None)
    assert mask(made) is made
    assert isinstance(mask(None), Documents)
    others = Documents.of(documents_BT.clone(), documents_BT.numpy())
    assert mask(others) is not others, "documents of another tensor describe other rows"
    for change in ({"sliding_window": 4, "sliding_layers": (0,)}, {"attention_sinks": True}, {"latent": LATENT}):
        assert isinstance(mask(made, BASE.model_copy(update=change)), Tensor)
    assert isinstance(mask(made, arithmetic=Arithmetic("bf16", batch_invariant=True)), Tensor)
    assert mask(made, arithmetic=Arithmetic("bf16")) is made
    short_BT = torch.arange(256).view(2, 128) // 16
    assert isinstance(Geometry.of(BASE, positions_BT, short_BT).mask_B1TT, Tensor), (
        "a mask is faster for short documents"
    )


def test_attention_takes_documents_in_the_place_of_a_mask(close: Close) -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(4, num, 16, 8) for num in (4, 2, 2)]
    kept = (WHOLE >= 0)[:, None, :, None]
    close(attention(*qkv, Documents.of(WHOLE, WHOLE.numpy())) * kept, attention(*qkv, document_mask(WHOLE)) * kept, 16)
