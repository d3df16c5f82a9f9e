"""Triton's kernels against the slow references, in Triton's interpreter.

Shape letters: see `stretto.ops.kernels`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops import paged
from stretto.ops.grouped import Clamp, ExpertBiases, Experts
from stretto.ops.int_weights import IntScheme, quantise
from stretto.ops.operators import MASKED, Routes, attention_reference
from stretto.ops.paged import ExpertWeights, Heads, RouteRule, Spans
from tests.ops.conftest import Close

pytest.importorskip("triton")
from stretto.ops.kernels import layer, products
from stretto.ops.kernels.paged_attention import paged_attention

PAGE = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random(*size: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return (std * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


def tables(lengths: list[int], num_pages: int) -> tuple[Tensor, Tensor]:
    """Pages of sequences, of which the first two share their first page, and their lengths. The last page belongs to none."""
    order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(3)).int()
    table_NM, used = torch.full((len(lengths), 64), num_pages - 1, dtype=torch.int32), 0
    for row, length in enumerate(lengths):
        num = -(-length // PAGE)
        table_NM[row, :num] = order[used : used + num]
        used += num
    table_NM[1, 0] = table_NM[0, 0]
    return table_NM.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_pages(splits: int, window: int | None, with_sinks: bool, dtype: torch.dtype) -> None:
    """Lengths from one key to more than a split has blocks; NaN in pages and places that belong to no sequence."""
    lengths, (H, G, C), num_pages = [1, 77, 150], (6, 2, 24), 64
    table_NM, lengths_N = tables(lengths, num_pages)
    q_NHC, sinks_H = random(3, H, C).to(dtype), random(H, seed=9) if with_sinks else None
    keys, values = (random(num_pages, PAGE, G, C, seed=seed).to(dtype) for seed in (1, 2))
    for pool in (keys, values):
        pool[-1] = torch.nan
        pool[table_NM[2, 37].item(), 2:] = torch.nan  # the last page of the sequence of 150
    y_NX = paged_attention(q_NHC, keys, values, table_NM, lengths_N, sinks_H=sinks_H, window=window, splits=splits)
    for row, length in enumerate(lengths):
        k_1GTC, v_1GTC = (
            pool[table_NM[row].long()].flatten(0, 1)[:length].transpose(0, 1)[None].float() for pool in (keys, values)
        )
        mask_111T = torch.arange(length, device=DEVICE)[None, None, None] >= length - (window or length)
        q_1H1C = q_NHC[row][None, :, None].float()
        wanted_X = attention_reference(q_1H1C, k_1GTC, v_1GTC, mask_111T, None, sinks_H).flatten()
        # weights and result are rounded to the type; in the interpreter, towards zero
        unit = torch.finfo(dtype).eps * float(wanted_X.abs().max())
        assert float((y_NX[row].float() - wanted_X).abs().max()) <= 16 * unit


def matrices(bits: int, zeros: bool, *weights: Tensor) -> list[tuple[products.Matrix, Tensor]]:
    """The kernels' form of weights, and their values."""
    if bits == 16:
        return [(products.Matrix(weight), weight) for weight in weights]
    quantised = [quantise(weight.cpu(), IntScheme(bits, zeros=zeros)) for weight in weights]
    moved = [weight.map(lambda x: x.to(DEVICE)) for weight in quantised]
    return [(products.Matrix.of(weight), weight.dequantise()) for weight in moved]


@pytest.mark.parametrize(("bits", "zeros"), [(16, False), (8, False), (8, True), (4, False), (4, True)])
def test_linear_with_integers(bits: int, zeros: bool, close: Close) -> None:
    """37 outputs do not fill a tile, and 160 inputs are more than one."""
    ((matrix, weight_FD),) = matrices(bits, zeros, random(37, 160))
    for num in (1, 19):
        x_ND, bias_F = random(num, 160, seed=num), random(37, seed=5)
        close(products.linear(x_ND, matrix, bias_F), F.linear(x_ND, weight_FD, bias_F), 160)


@pytest.mark.parametrize(("bits", "zeros"), [(16, False), (8, False), (4, True)])
@pytest.mark.parametrize(
    ("num_tokens", "options"), [(1, {}), (3, {"biases": True}), (19, {"biases": True, "clamp": True})]
)
def test_experts(bits: int, zeros: bool, num_tokens: int, options: dict[str, Any], close: Close) -> None:
    """Few pairs and many; a token without experts, one with fewer than others, and an expert with more tokens than a tile."""
    D, width, E, K = 64, 32, 6, 2
    stacks = random(E, 2 * width, D, std=D**-0.5), random(E, D, width, seed=1, std=width**-0.5)
    (gate_up, gate_up_EFD), (down, down_EDI) = matrices(bits, zeros, *stacks)
    biases = ExpertBiases(random(E, 2 * width, seed=2), random(E, D, seed=3)) if "biases" in options else None
    clamp = Clamp(1.7, 1.0) if "clamp" in options else None
    chosen_NK = random(num_tokens, E, seed=4).argsort(1)[:, :K].contiguous()
    if num_tokens > 2:
        chosen_NK[0], chosen_NK[1, 1], chosen_NK[2:, 0] = E, E, 5
        chosen_NK[2:, 1].clamp_(max=4)
    gates_NK = random(num_tokens, K, seed=5).sigmoid().masked_fill(chosen_NK == E, 0.0)
    x_ND = random(num_tokens, D, seed=6)
    wanted_ND = paged.chosen_experts(
        x_ND, Routes(chosen_NK, gates_NK), ExpertWeights.of(Experts(gate_up_EFD, down_EDI, biases, clamp))
    )
    parts_NKD = products.expert_outputs(x_ND, chosen_NK.int(), gates_NK, gate_up, down, biases, clamp, num_more=1)
    parts_NKD[:, K] = 1.0
    ones_D, chosen = torch.ones(D, device=DEVICE), chosen_NK.int()
    sum_ND, _, _ = layer.add_norm(x_ND, parts_NKD, ones_D, 1e-6, chosen_NK=chosen, num_experts=E)
    close(sum_ND, x_ND + wanted_ND + 1.0, D + width)


def test_residual_sum_and_norm(close: Close) -> None:
    x_ND, parts_NKD, weight_D = random(3, 40), random(3, 2, 40, seed=1), random(40, seed=2)
    stays_N = torch.tensor([1, 0, 1], dtype=torch.uint8, device=DEVICE)
    eps = torch.tensor(1e-5, device=DEVICE)
    wanted_ND = torch.where(stays_N[:, None] > 0, x_ND + parts_NKD.sum(1), x_ND)
    sum_ND, y_ND, wide_ND = layer.add_norm(x_ND, parts_NKD, weight_D, 1e-5, stays_N=stays_N, with_fp32=True)
    close(sum_ND, wanted_ND, 3)
    assert torch.equal(sum_ND[1], x_ND[1])
    close(y_ND, paged.norm(wanted_ND, weight_D, eps), 40)
    assert torch.equal(y_ND, wide_ND)
    same_ND, y_ND, _ = layer.add_norm(x_ND, None, weight_D, 1e-5)
    assert same_ND is x_ND
    close(y_ND, paged.norm(x_ND, weight_D, eps), 40)


@pytest.mark.parametrize("is_wide", [False, True, None])
@pytest.mark.parametrize(("rotated", "clip"), [(24, None), (8, 0.7)])
def test_rotation_and_write_to_the_cache(is_wide: bool | None, rotated: int, clip: float | None, close: Close) -> None:
    """``is_wide`` None: no norm. The middle token skips the layer."""
    N, H, G, C, num_pages = 3, 4, 2, 24, 64
    table_NM, lengths_N = tables([1, 77, 150], num_pages)
    qkv_NX, norm_JC = random(N, (H + 2 * G) * C), random(H + G, C, seed=1)
    rotary_P2R = random(256, 2, rotated, seed=2)
    stays_N = torch.tensor([1, 0, 1], dtype=torch.uint8, device=DEVICE)
    seen, wanted = ([torch.zeros(num_pages, PAGE, G, C, device=DEVICE) for _ in range(2)] for _ in range(2))
    norm = None if is_wide is None else norm_JC
    q_NHC = layer.rotate_and_store(
        qkv_NX, norm, bool(is_wide), clip, 1e-5, rotary_P2R, table_NM, lengths_N, *seen, stays_N=stays_N
    )
    position_N = lengths_N.long() - 1
    rotary_N2R = rotary_P2R[position_N]
    page_N = table_NM.gather(1, (position_N // PAGE)[:, None]).squeeze(1)
    spans = Spans(rotary_N2R[:, :1], rotary_N2R[:, 1:], page_N * PAGE + position_N % PAGE, ())
    heads = Heads(norm, bool(is_wide), clip, None, None, False)
    wanted_NHC = paged.store(qkv_NX.clone(), heads, torch.tensor(1e-5, device=DEVICE), spans, *wanted)
    close(q_NHC, wanted_NHC, H * C)
    for pool, other in zip(seen, wanted, strict=True):
        other[page_N[1], position_N[1] % PAGE] = 0.0
        close(pool, other, H * C)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize(("num_experts", "groups"), [(12, (1, 1)), (12, (4, 2)), (5, (1, 1))])
def test_choice_of_experts(softmax: bool, num_experts: int, groups: tuple[int, int], close: Close) -> None:
    """Three Subnets: all experts, half of them with a bias, and one that leaves the layer out."""
    N, K, row = 7, 3, 1
    bias_ULE = torch.full((3, 2, 16), MASKED, device=DEVICE)
    bias_ULE[0, row, :num_experts] = 0.0
    half = torch.arange(num_experts, device=DEVICE) % 3 != 1
    bias_ULE[1, row, :num_experts] = torch.where(half, random(num_experts, std=0.1), MASKED)
    top_k_UL = torch.tensor([[9, 3], [9, 2], [9, 0]], dtype=torch.int32, device=DEVICE)
    subnet_N = torch.tensor([0, 1, 2, 1, 0, 0, 1], dtype=torch.int32, device=DEVICE)
    x_ND, gate_ED = random(N, 8), random(num_experts, 8, seed=1)
    bias_NE = bias_ULE[subnet_N.long(), row, :num_experts]
    dropped_NK = torch.arange(K, device=DEVICE) >= top_k_UL[subnet_N.long(), row][:, None]
    mask_NE = torch.where(bias_NE == MASKED, MASKED, 0.0) if softmax else None
    rule = RouteRule(K, softmax, True, 1.7, groups, bias_NE, mask_NE, dropped_NK)
    wanted = paged.route_tokens(x_ND, gate_ED, rule)
    options: dict[str, Any] = {"softmax": softmax, "normalize": True, "scaling": 1.7, "groups": groups}
    chosen_NK, gates_NK = layer.choose_experts(F.linear(x_ND, gate_ED), bias_ULE, top_k_UL, subnet_N, row, K, **options)
    assert torch.equal(chosen_NK.long(), wanted.chosen_NK)
    close(gates_NK, wanted.gates_NK, num_experts)
