"""The compiled attention and experts of training against torch in fp64, and against themselves with other numbers of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops import moe
from stretto.ops.grouped import Clamp, ExpertBiases, Experts
from stretto.ops.native import training
from stretto.ops.operators import attention, document_mask
from tests.ops.references import experts_reference

Close = Callable[[Tensor, Tensor, int], None]
pytestmark = pytest.mark.usefixtures("library")


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
    answers_BT = (torch.arange(T) * 6 // T).expand(B, T)  # the first of six equal parts is the prompt of the others
    prompt_BT2 = torch.tensor([0, int((answers_BT[0] == 0).sum())]).expand(B, T, 2)
    any_BTT = torch.rand(B, 1, T, T, generator=generator) < 0.3
    return {
        "causal": None,
        "documents": document_mask(documents_BT),
        "one for all rows": document_mask(documents_BT[:1]),
        "answers to one prompt": document_mask(answers_BT, prompt_BT2),
        "keys after the query": any_BTT | torch.eye(T, dtype=torch.bool),
        "far keys only": torch.eye(T, dtype=torch.bool).expand(B, 1, T, T) | (torch.arange(T) == 0)[None, None, None],
    }


# the last two: more keys than a block of scores has columns; widths and lengths that no vector divides
SHAPES = {
    "grouped": (3, 4, 2, 64, 32),
    "one head": (2, 1, 1, 40, 16),
    "odd": (2, 3, 1, 77, 20),
    "long": (1, 2, 2, 301, 9),
    "longer": (2, 2, 1, 640, 16),
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


CHOICES = {
    "ragged": (
        torch.rand(700, 5, generator=torch.Generator().manual_seed(2)) ** 3 * 9
    ).long(),  # over 252 slots of some experts
    "empty experts": torch.tensor([[5, 1]] * 7),
    "one expert takes all": torch.zeros(600, 1, dtype=torch.int64),
    "one token": torch.tensor([[4, 2]]),
    "an expert twice": torch.tensor([[2, 2], [0, 2]]),
}
# hidden size and expert width; the last needs two blocks of columns, and no width is a multiple of a vector's
WIDTHS = [(32, 16), (20, 9), (270, 131)]


def layer(chosen_NK: Tensor, hidden: int, width: int) -> list[Tensor]:
    """Rows, gates, of which some are 0, and weights."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((len(chosen_NK), hidden), chosen_NK.shape, (9, 2 * width, hidden), (9, hidden, width))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[1][::3] = 0.0
    return [x.requires_grad_() for x in tensors]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
def test_experts_and_their_gradients_equal_the_reference_in_fp64(
    chosen: Tensor, widths: tuple[int, int], close: Close, threads: Callable[[int], None]
) -> None:
    inputs = layer(chosen, *widths)
    x, gates, gate_up, down = inputs
    assert moe.backend_for(x, Experts(gate_up, down)) == "native"

    def passes() -> list[Tensor]:
        out = moe.experts(x, chosen, gates, Experts(gate_up, down))
        return [out, *torch.autograd.grad(out, inputs, upstream)]

    upstream = torch.ones_like(x).cumsum(-1).sin()
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = experts_reference(wide[0], chosen, *wide[1:])
    wanted = [expected, *torch.autograd.grad(expected, wide, upstream.double())]
    threads(2)
    found = passes()
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs, sum(widths) + chosen.numel())  # sums over channels, then over tokens
    threads(1)
    assert all(torch.equal(one, two) for one, two in zip(passes(), found, strict=True))


def test_experts_of_which_parts_are_frozen() -> None:
    chosen = CHOICES["ragged"]
    x, gates, gate_up, down = inputs = layer(chosen, 32, 16)
    everything = torch.autograd.grad(moe.experts(x, chosen, gates, Experts(gate_up, down)).sum(), inputs)
    for frozen in range(len(inputs)):
        for index, tensor in enumerate(inputs):
            tensor.requires_grad_(index != frozen)
        trained = [tensor for tensor in inputs if tensor.requires_grad]
        found = torch.autograd.grad(moe.experts(x, chosen, gates, Experts(gate_up, down)).sum(), trained)
        rest = [grad for index, grad in enumerate(everything) if index != frozen]
        assert all(torch.equal(one, other) for one, other in zip(found, rest, strict=True)), frozen


def test_other_experts_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _, gate_up, down = layer(CHOICES["one token"], 32, 16)
    assert moe.backend_for(x, Experts(gate_up, down)) == "native"
    biases = ExpertBiases(torch.zeros(9, 32), torch.zeros(9, 32))
    assert moe.backend_for(x, Experts(gate_up, down, biases)) == "torch"
    assert moe.backend_for(x, Experts(gate_up, down, clamp=Clamp(1.7, 7.0))) == "torch"
    assert moe.backend_for(x.double(), Experts(gate_up.double(), down.double())) == "torch"
    assert moe.backend_for(x, Experts(gate_up.bfloat16(), down.bfloat16())) == "torch"
    monkeypatch.setattr(training, "library", lambda: None)
    assert moe.backend_for(x, Experts(gate_up, down)) == "torch"
