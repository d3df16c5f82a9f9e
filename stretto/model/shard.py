"""Tensor parallelism: one rank's part of a network, of its weights in memory, and of its files.

A rank has some heads of each attention and a part of the width of each SwiGLU, dense, shared or routed. Its part is an ordinary
`Transformer` with fewer heads and narrower experts, whose attention and feed-forward outputs are summed over the ranks. Embedding,
norms, routers, balance biases and the output matrix are whole on every rank. Biases that are added to a sum over ranks are on rank 0;
the other ranks hold zeros in their place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.model.families import Stored
from stretto.model.quantised import TensorSource
from stretto.model.spec import ModelConfig

_ADDED_ONCE = (".out.bias", ".down.bias", ".down_bias")
"""Endings of the names of biases that are added to sums over ranks."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank of tensor parallelism."""

    rank: int
    num_ranks: int

    def config(self, network: ModelConfig) -> ModelConfig:
        """The configuration of this rank's part of ``network``, the same on every rank.

        Raises:
            UserError: the number of ranks does not divide heads or widths, or the network normalises all heads together.
        """
        if network.qk_norm_wide and self.num_ranks > 1:
            raise UserError(
                f"tp: {self.num_ranks}: qk_norm_wide: the network normalises all heads of a token together, and no rank has "
                "them all; use tp 1"
            )
        names = ["num_heads", "num_kv_heads"]
        names += ["expert_intermediate_size"] if network.moe_layers else []
        names += ["dense_intermediate_size"] if network.dense_layers else []
        sizes = {name: getattr(network, name) for name in names}
        for name, size in sizes.items():
            if size % self.num_ranks:
                most = math.gcd(*sizes.values())
                known = ", ".join(str(num) for num in range(1, most + 1) if most % num == 0)
                raise UserError(f"tp: {self.num_ranks} does not divide {name} {size}; choose tp from {known}")
        return network.replace(**{name: size // self.num_ranks for name, size in sizes.items()})

    def cut(self, name: str, whole: Tensor, shape: tuple[int, ...], network: ModelConfig) -> Tensor:
        """This rank's part, of ``shape``, of the tensor ``name`` of the state dict of ``network``. A view where that is possible."""
        assert whole.dim() == len(shape), f"{name}: {tuple(whole.shape)} has no part {shape}"
        dims = [dim for dim, size in enumerate(shape) if size != whole.shape[dim]]
        if not dims:
            return torch.zeros_like(whole) if self.rank and name.endswith(_ADDED_ONCE) else whole
        (dim,) = dims
        kinds: tuple[int, ...] = (1,)  # relative sizes of the matrices that are stored as one
        if ".qkv." in name:
            kinds = (network.num_heads, network.num_kv_heads, network.num_kv_heads)
        elif "gate_up" in name:
            kinds = (1, 1)
        unit = whole.shape[dim] // sum(kinds)
        matrices = whole.split([kind * unit for kind in kinds], dim)
        parts = [matrix.tensor_split(self.num_ranks, dim)[self.rank] for matrix in matrices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def silence(self, state: Mapping[str, Tensor]) -> None:
        """On all ranks but rank 0, set those biases to zero that rank 0 adds."""
        for name, tensor in state.items():
            if self.rank and name.endswith(_ADDED_ONCE):
                tensor.zero_()


class ShardSource:
    """Reads one rank's part of each tensor of ``files``, with the interface of `TensorSource`: shapes and parts are those of the rank.

    The dims along which a tensor is divided are those in which both shapes differ. A part that a rank reads is contiguous along such a
    dim: gate and up of experts that are stored as one matrix are two parts or, in gpt-oss, alternate.
    """

    def __init__(self, files: TensorSource, stored: list[Stored], shard: Shard) -> None:
        """``stored``: tensors of the whole network."""
        self._files, self._shard = files, shard
        self._shapes = {each.name: each.shape for each in stored}
        self._shapes |= {alias.name: alias.shape for each in stored for alias in each.aliases}

    @property
    def names(self) -> frozenset[str]:
        return self._files.names

    def path(self, name: str) -> Path:
        return self._files.path(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._files.dtype(name)

    def is_empty(self, name: str) -> bool:
        return self._files.is_empty(name)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        self._files.check(name, self._shapes[name])

    def read(self, name: str, shape: tuple[int, ...], part: tuple[int | slice, ...] = ()) -> Tensor:
        whole, rank = self._shapes[name], self._shard.rank
        if whole == shape:
            return self._files.read(name, whole, part)
        wanted: list[int | slice] = []
        for dim, size in enumerate(shape):
            own = part[dim] if dim < len(part) else slice(0, size)
            if whole[dim] != size:
                assert isinstance(own, slice), f"{name}: part {part} of {shape}"
                length = own.stop - own.start
                start = own.start * self._shard.num_ranks + rank * length
                own = slice(start, start + length)
            wanted.append(own)
        return self._files.read(name, whole, tuple(wanted))
