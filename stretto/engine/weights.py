"""Reading and checking the weights that an engine in service changes to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from stretto.base.errors import UserError
from stretto.model.checkpoint import read_checkpoint, read_config, weights_hash
from stretto.model.spec import ModelConfig


def state_checksum(state: Mapping[str, Tensor]) -> str:
    """XXH3 of 128 bits over names, types, shapes and bytes of all tensors, in order of name.

    Against damage, not against malice: it is taken of all weights at every step of a run, on both ends, and a
    cryptographic hash would take a hundred times as long.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_weights(
    source: Mapping[str, Tensor] | Path | str, config: ModelConfig, checksum: str | None
) -> Mapping[str, Tensor]:
    """The state dict of ``source``, a state dict already or a checkpoint folder, for a network of ``config``.

    Args:
        checksum: `state_checksum` of a state dict, or the ``weights_hash`` of a folder's lineage; None: not checked.

    Raises:
        UserError: another checksum, another network, or a checkpoint that cannot be read.
    """
    if isinstance(source, Mapping):
        found = None if checksum is None else state_checksum(source)
        _refuse_other(found, checksum, "state")
        return source
    folder = Path(source)
    stored = read_config(folder)
    if stored != config:
        field = next(name for name in ModelConfig.model_fields if getattr(stored, name) != getattr(config, name))
        raise UserError(
            f"{folder}: {field}: is {getattr(stored, field)!r}, the network in service has {getattr(config, field)!r}; "
            "serve this checkpoint in an engine of its own"
        )
    _refuse_other(None if checksum is None else weights_hash(folder), checksum, str(folder))
    return read_checkpoint(folder).model.state_dict()


def _refuse_other(found: str | None, wanted: str | None, source: str) -> None:
    if found != wanted:
        raise UserError(f"{source}: checksum: is {found}, {wanted} was announced; send the weights again")


def weights_salt(version: int) -> bytes:
    """What keeps cached pages of one set of weights from being found under another."""
    return f"weights {version}".encode()
