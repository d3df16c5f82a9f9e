"""Triton's kernels compile for a Hopper GPU, which needs no GPU, and keep their numbers in registers. The interpreter accepts more than the
compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
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
TILE = {"BLOCK_M": 128, "BLOCK_N": 256, "GROUP_M": 8, "PRECISION": "ieee"}
FACTORS = {"row_factors_ptr": "fp32", "column_factors_ptr": "fp32"}
GATE_UP = {
    "token_ptr": "i64",
    "gates_ptr": "fp32",
    "ends_ptr": "i32",
    "hidden_ptr": "bf16",
    "inner_ptr": "bf16",
    **FACTORS,
}
PLACES = {"token_ptr": "i64", "ends_ptr": "i32", "out_ptr": "bf16", **FACTORS}
TRAINING: dict[str, tuple[dict[str, str], dict[str, Any], tuple[str, ...]]] = {
    "rows._gate_up": (GATE_UP, {**TILE, "BLOCK_N": 128, "BLOCK_E": 64}, ("x_ptr", "weight_ptr")),
    "rows._product": (PLACES, {**TILE, "BLOCK_E": 64, "GATHERS": True, "stride_k": 1}, ("rows_ptr", "weight_ptr")),
    "rows._swiglu_gradient": (
        {"grad_ptr": "bf16", "gates_ptr": "fp32", "hidden_ptr": "bf16", "grad_gates_ptr": "fp32", "grad_hidden_ptr": "bf16"},
        {"BLOCK_P": 4, "BLOCK_I": 256}, (),
    ),
    "weight_gradient._weight_gradient": (
        {name: PLACES[name] for name in ("token_ptr", "ends_ptr", "out_ptr")}, {**TILE, "GATHERS_LEFT": True},
        ("left_ptr", "right_ptr"),
    ),
}  # fmt: skip
"""The same of the kernels that train, with their largest tiles, and their operands, which are in bf16 or FP8."""
SIZES = ("D", "I", "K", "N", "M", "F", "stride_e", "stride_n")
"""Integer arguments that are multiples of 16."""


def compile_all() -> None:
    for name, (pointers, constants) in KERNELS.items():
        for bits, rows in ((16, "bf16"), (8, "i8"), (4, "u8"), (8, "fp8e4nv")) if "GROUP" in constants else ((0, ""),):
            if bits:
                pointers = {**pointers, "rows": rows, "scales": "fp32" if rows == "fp8e4nv" else "fp16"}
                constants = {**constants, "BITS": bits, "GROUP": 0 if rows == "fp8e4nv" else 32}
            compile_one(name, pointers, constants)
    for name, (pointers, constants, operands) in TRAINING.items():
        for kind, block_k in (("bf16", 64), ("fp8e4nv", 128)):
            if kind == "bf16" or "row_factors_ptr" in pointers:
                more = {"BLOCK_K": block_k} if operands else {}
                if "row_factors_ptr" in pointers:
                    more["HAS_FACTORS"] = kind != "bf16"
                spilled = compile_one(
                    name, {**pointers, **dict.fromkeys(operands, kind)}, {**constants, **more}, num_warps=8
                )
                assert spilled == 0, f"{name}, {kind}: {spilled} bytes of registers are spilled to memory"


def compile_one(name: str, pointers: dict[str, str], constants: dict[str, Any], **options: int) -> int:
    """Bytes that a thread keeps in memory because its registers are full."""
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, kernel = name.partition(".")
    function = getattr(import_module(f"stretto.ops.kernels.{module}"), kernel)
    function = getattr(function, "fn", function) if hasattr(function, "configs") else function
    types = {
        **{name: SCALARS.get(name, "i32") for name in function.arg_names},
        **{name: f"*{kind}" for name, kind in pointers.items()},
        **dict.fromkeys(constants, "constexpr"),
    }
    signature = {name: types[name] for name in function.arg_names}
    aligned: Any = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind == "i32" and name in SIZES)
    }
    source = ASTSource(function, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [tools / "cuobjdump", "--dump-resource-usage", file.name]
        used = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", used)
    return int(stack)


@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, __file__], check=True, env=environment)


if __name__ == "__main__":
    compile_all()
