"""Tensors and modules that are sharded over ranks, recognised without importing torch's distributed tensors.

That import takes half a second of every command. In a process in which nothing has imported them, nothing is sharded.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_shard(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether ``tensor`` is this rank's shard of a tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether FSDP2 gathers the parameters of ``module``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of ``tensor``; the whole of a tensor that is not sharded."""
    return tensor.to_local() if is_shard(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """``tensor``, gathered from all ranks if it is sharded; then all of them must call this together."""
    return tensor.full_tensor() if is_shard(tensor) else tensor
