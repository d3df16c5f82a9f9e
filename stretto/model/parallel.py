"""Ranks: who computes what. One rank is the general case with a world of one."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others; made by `join`."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def rows(self, num_rows: int) -> slice:
        """This rank's share of ``num_rows`` rows of a global batch: contiguous blocks."""
        share = num_rows // self.world
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def clip_gradients(self, model: nn.Module, max_norm: float) -> float:
        """Scale gradients to a global norm of at most ``max_norm``; returns the norm before."""
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)
        return float(norm)


def join(device: str = "auto") -> Ranks:
    """Take this process's place: torchrun's environment if there is one, otherwise a world of one."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local)
        kind = f"cuda:{local}"
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if kind.startswith("cuda") else "gloo")
    return Ranks(rank, world, torch.device(kind))


def compute_dtype(choice: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: ``auto`` is bf16 where the device multiplies it in hardware.

    A CPU without AVX512-BF16 or AMX emulates bf16 a hundred times slower than fp32.
    """
    if choice != "auto":
        return getattr(torch, choice)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device.type == "cpu" and has else torch.float32


def device_name(ranks: Ranks) -> str:
    """Model name of the device, for receipts and latency tables."""
    if ranks.device.type == "cuda":
        return torch.cuda.get_device_name(ranks.device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def shard(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Spread ``model`` over the ranks; a world of one keeps it as it is."""
    assert ranks.world == 1, "sharding is not built yet"
    return model
