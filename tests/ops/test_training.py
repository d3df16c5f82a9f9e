"""The compiled attention and experts of training against torch in fp64, and against themselves with other numbers of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.native import training
from stretto.ops.operators import attention, document_mask

Close = Callable[[Tensor, Tensor, int], None]
pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def heads(B: int, H: int, G: int, T: int, C: int) -> list[Tensor]:
    """Queries and keys that are parts of one tensor, as a network has them, and values."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(B, T, H + G, C, generator=generator).split((H, G), dim=2)
    v = torch.randn(B, T, G, C, generator=generator)
    return [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]


def masks(B: int, T: int) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    documents_BT = (torch.rand(B, T, generator=generator) < 4 / T).cumsum(1)
    documents_BT[:, T - T // 5 :] = -1
    any_BTT = torch.rand(B, 1, T, T, generator=generator) < 0.3
    return {
        "causal": None,
        "documents": document_mask(documents_BT),
        "one for all rows": document_mask(documents_BT[:1]),
        "keys after the query": any_BTT | torch.eye(T, dtype=torch.bool),
        "far keys only": torch.eye(T, dtype=torch.bool).expand(B, 1, T, T) | (torch.arange(T) == 0)[None, None, None],
    }


# the last: more keys than a block of scores has columns; widths and lengths that no vector divides
SHAPES = {
    "grouped": (3, 4, 2, 64, 32),
    "one head": (2, 1, 1, 40, 16),
    "odd": (2, 3, 1, 77, 20),
    "long": (1, 2, 2, 301, 9),
}


def passes(qkv: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Output and gradients of our attention."""
    out = training.attention(*qkv, mask, qkv[0].shape[-1] ** -0.5)
    return [out, *torch.autograd.grad(out, qkv, torch.ones_like(out).cumsum(-1).sin())]


@pytest.mark.parametrize("kind", masks(1, 1))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_and_its_gradients_equal_torchs_in_fp64(
    shape: tuple[int, ...], kind: str, close: Close, threads: Callable[[int], None]
) -> None:
    B, H, G, T, C = shape
    qkv, mask = heads(*shape), masks(B, T)[kind]
    assert training.attends(*qkv, mask)
    threads(2)
    found = passes(qkv, mask)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    expected = F.scaled_dot_product_attention(*wide, attn_mask=mask, is_causal=mask is None, enable_gqa=H != G)
    upstream = torch.ones(B, H, T, C).cumsum(-1).sin()
    for ours, theirs in zip(found, [expected, *torch.autograd.grad(expected, wide, upstream.double())], strict=True):
        close(ours, theirs, T + 2 * C)  # a sum over keys of products with scores, which are sums over channels
    threads(1)
    assert all(torch.equal(one, two) for one, two in zip(passes(qkv, mask), found, strict=True))


def test_other_attention_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, close: Close) -> None:
    q, k, v = qkv = heads(2, 4, 2, 16, 8)
    assert training.attends(*qkv, None)
    assert not training.attends(q, k[:, :, :7], v[:, :, :7], None)
    assert not training.attends(*(x.bfloat16() for x in qkv), None)
    assert not training.attends(*qkv, torch.zeros(2, 1, 16, 16))
    assert not training.attends(*(x.to("meta") for x in qkv), None)
    ours = attention(*qkv, None)
    monkeypatch.setattr(training, "library", lambda: None)
    assert not training.attends(*qkv, None)
    close(attention(*qkv, None), ours, 16 + 2 * 8)


def test_records_have_the_sizes_of_the_library() -> None:
    handle = training.library()
    assert handle is not None
    sizes = (ctypes.c_int32 * 2)()
    handle.stretto_training_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(kind) for kind in training.RECORDS]
