"""Tiles of rows that are grouped by expert, found on the device: the host never reads how many rows an expert has.

A tile has rows of one expert only. There are at most P / BLOCK_M + E tiles; programs past the last one end at once.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on a CPU, for tests."""


def configs(*shapes: tuple[int, int, int, int]) -> list[triton.Config]:
    """Tile sizes to choose from by measuring: rows, columns, warps and pipeline stages. Each is a kernel to compile, which takes a second.

    The interpreter gets one small tile, which does not divide what the tests compute.
    """
    if INTERPRETED:
        return [triton.Config({"BLOCK_M": 16, "BLOCK_N": 32, "GROUP_M": 2})]
    return [
        triton.Config({"BLOCK_M": rows, "BLOCK_N": cols, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
        for rows, cols, warps, stages in shapes
    ]


def settings(rows: Tensor) -> dict[str, Any]:
    """Arguments that all products of ``rows`` have. BLOCK_K does not depend on the tile, so that every choice adds in the same order; its
    numbers take 128 bytes, the width of a swizzled row of shared memory."""
    return {"BLOCK_K": 16 if INTERPRETED else 128 // rows.itemsize, "PRECISION": "wide" if INTERPRETED else "ieee"}


@triton.jit
def tile_of(tile, ends_ptr, num_experts, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert of a tile, its first row, and where the expert's rows end. An expert past the last one: there is no such tile."""
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + experts, mask=experts < num_experts, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    is_own = experts == expert
    first = tl.sum(tl.where(is_own, starts + (tile - last + tiles) * BLOCK_M, 0), 0)
    return expert, first, tl.sum(tl.where(is_own, ends, 0), 0)


@triton.jit
def position(pid, num_m, num_n, GROUP_M: tl.constexpr):
    """Row and column of a tile. Programs that run together share GROUP_M tiles of rows, so that weights stay in the L2 cache."""
    group = pid // (GROUP_M * num_n)
    first = group * GROUP_M
    size = tl.minimum(num_m - first, GROUP_M)
    inner = pid % (GROUP_M * num_n)
    return first + inner % size, inner // size


@triton.jit
def plus_product(total, a, b, PRECISION: tl.constexpr):
    """``total`` plus the product of two tiles, with fp32 sums. The interpreter cannot multiply bf16 and FP8 (it multiplies the bits)."""
    if PRECISION == "wide":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)
