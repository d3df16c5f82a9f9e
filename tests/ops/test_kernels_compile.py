"""Triton's kernels compile for a Hopper GPU, which needs no GPU. The interpreter accepts more than the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

WEIGHTS = {"rows": "i8", "scales": "fp16", "zeros": "i8", "bias": "bf16"}
EXPERTS = {"lists": "i32", "counts": "i32", "gates": "fp32", **WEIGHTS}
PRODUCT = {"GROUP": 32, "HAS_ZEROS": True, "HAS_BIAS": True, "BLOCK_M": 16, "BLOCK_D": 128}
PAIRS = {**PRODUCT, "BY_PAIR": True, "BLOCK_S": 64, "BLOCK_W": 32}
SCALARS = {"scale": "fp32", "scaling": "fp32", "eps": "fp32", "clip": "fp32", "alpha": "fp32", "limit": "fp32"}
"""Arguments that are neither pointers nor integers."""
HEADS = {"H": 16, "G": 4, "C": 128}
KERNELS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "paged_attention._attend": (
        {"q": "bf16", "keys": "bf16", "values": "bf16", "table": "i32", "lengths": "i32", "sinks": "bf16", "y": "bf16",
         "parts": "fp32", "stats": "fp32"},
        {**HEADS, "Z": 16, "SPLITS": 4, "HAS_SINKS": True, "BLOCK_R": 16, "BLOCK_C": 128, "BLOCK_T": 64},
    ),
    "paged_attention._combine": (
        {"parts": "fp32", "stats": "fp32", "sinks": "bf16", "y": "bf16"},
        {"H": 16, "C": 128, "SPLITS": 4, "HAS_SINKS": True, "BLOCK_C": 128},
    ),
    "products._linear": ({"x": "bf16", "y": "bf16", **WEIGHTS}, {**PRODUCT, "BLOCK_W": 16}),
    "products._gate_up": ({"x": "bf16", "inner": "bf16", **EXPERTS}, {**PAIRS, "CLAMPED": True}),
    "products._down": ({"inner": "bf16", "y": "bf16", **EXPERTS}, PAIRS),
    "products._list_pairs": ({"chosen": "i32", "lists": "i32", "counts": "i32"}, {"BLOCK_S": 128}),
    "layer._add_norm": (
        {"x": "bf16", "parts": "bf16", "stays": "u8", "chosen": "i32", "weight": "bf16", "sums": "bf16", "y": "bf16",
         "wide": "fp32"},
        {"K": 9, "HAS_STAYS": True, "NUM_CHOSEN": 8, "WITH_FP32": True, "BLOCK_D": 2048},
    ),
    "layer._rotate_and_store": (
        {"qkv": "bf16", "norm": "bf16", "rotary": "bf16", "table": "i32", "lengths": "i32", "stays": "u8", "q": "bf16",
         "keys": "bf16", "values": "bf16"},
        {**HEADS, "R": 64, "Z": 16, "HAS_NORM": True, "IS_WIDE": True, "HAS_CLIP": True, "HAS_STAYS": True,
         "BLOCK_C": 128, "BLOCK_WIDE": 2048},
    ),
    "layer._choose_experts": (
        {"logits": "fp32", "bias": "fp32", "top_k": "i32", "subnet": "i32", "chosen": "i32", "gates": "fp32"},
        {"K": 8, "BLOCK_E": 64, "BLOCK_K": 8, "SOFTMAX": False, "NORMALIZE": True, "GROUPS": 8, "TOP_GROUPS": 4,
         "BLOCK_G": 8},
    ),
}  # fmt: skip
"""Types of the pointers, and constants, by kernel. Other arguments are int32 or in `SCALARS`."""


def compile_all() -> None:
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, (pointers, constants) in KERNELS.items():
        module, _, kernel = name.partition(".")
        function = getattr(import_module(f"stretto.ops.kernels.{module}"), kernel)
        for bits, rows in ((16, "bf16"), (8, "i8"), (4, "u8")) if "GROUP" in constants else ((0, ""),):
            constants, pointers = (
                ({**constants, "BITS": bits}, {**pointers, "rows": rows}) if bits else (constants, pointers)
            )
            others = {name: SCALARS.get(name, "i32") for name in function.arg_names}
            types = {
                **others,
                **{name: f"*{kind}" for name, kind in pointers.items()},
                **dict.fromkeys(constants, "constexpr"),
            }
            signature = {name: types[name] for name in function.arg_names}
            triton.compile(ASTSource(function, signature, constants), target=GPUTarget("cuda", 90, 32))


@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, __file__], check=True, env=environment)


if __name__ == "__main__":
    compile_all()
