"""Triton kernels for GPUs (experts, decoding, optimisers, FP8), and whether they can run. The modules of this package import Triton."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which tensor cores multiply bf16 (Ampere)."""


def why_not(device: torch.device) -> str:
    """Reason why the kernels cannot run on ``device``; empty if they can. On a CPU, Triton's interpreter runs them, for tests."""
    if find_spec("triton") is None:
        return "Triton is missing"
    if device.type == "cpu":
        return "" if os.environ.get("TRITON_INTERPRET") == "1" else "on cpu"
    if device.type != "cuda":
        return f"on {device.type}"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return "the GPU is older than Ampere"
    return ""
