"""Tensors of a checkpoint between their form on disk, the family's `Stored`, and their place in our state dict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.model.families import Alias, Family, Stored, readable_tensors
from stretto.model.headers import STRETTO_FILE, damaged
from stretto.model.quantised import TensorSource
from stretto.model.spec import ModelConfig


def readable(config: ModelConfig, family: Family, files: TensorSource, folder: Path) -> list[Stored]:
    """The tensors to read from ``files``, after a check of their headers, so that nothing of the size in config.json is allocated for
    files that do not fit.

    Raises UserError: a tensor is missing, unexpected, of another shape or of an unsupported dtype.
    """
    tensors = []
    for stored in readable_tensors(config, family):
        if (place := _place(stored, files, folder)) is not None:
            files.check(place.name, place.shape)
        tensors.append(stored)
    _refuse_unexpected(files, tensors, config)
    return tensors


ROUTERS = (".gate", ".gate_bias")
"""Endings of the names of routers' tensors in our state dict. Their logits are computed in fp32."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Dtypes in memory of the tensors of a checkpoint."""

    weights: torch.dtype
    fp32: frozenset[str] = frozenset()
    """Routers that are fp32 beside narrower weights, by their names in our state dict."""
    rounded: tuple[str, ...] = ()
    """Names on disk of norms and biases that are fp32 there and are rounded to ``weights``."""

    @staticmethod
    def on_disk(tensors: Sequence[Stored], files: TensorSource, folder: Path) -> Dtypes:
        """fp32 if any matrix but a router has it in ``files``, else the dtype of the embedding. Routers in fp32 stay exact: a rounded
        router chooses other experts."""
        wide: dict[str, Stored] = {}
        for stored in tensors:
            place = None if stored.ours is None or stored.always_fp32 else _place(stored, files, folder)
            if place is not None and files.dtype(place.name) == torch.float32:
                wide[stored.name] = stored
        routers = {str(stored.ours) for stored in wide.values() if str(stored.ours).endswith(ROUTERS)}
        others = {name: stored for name, stored in wide.items() if stored.ours not in routers}
        if any(len(stored.shape) > 1 and not str(stored.ours).endswith("bias") for stored in others.values()):
            return Dtypes(torch.float32)
        return Dtypes(files.dtype("model.embed_tokens.weight"), frozenset(routers), tuple(others))

    def of(self, name: str) -> torch.dtype:
        """Dtype of the tensor ``name`` of our state dict."""
        return torch.float32 if name.endswith(".bias_WE") or name in self.fp32 else self.weights


def _place(stored: Stored, files: TensorSource, folder: Path) -> Alias | None:
    """Name and shape under which ``files`` have ``stored``; None: they do not have it, and it is optional. Raises `UserError`: it is
    missing.
    """
    places = [Alias(stored.name, stored.shape), *stored.aliases]
    place = next((place for place in places if place.name in files.names), None)
    if place is None:
        if stored.ours is None or stored.is_copy:
            return None
        raise damaged(folder, stored.name, "missing from the weights, and config.json needs it")
    if stored.ours is None and files.is_empty(place.name):
        return None  # transformers stores a shared expert of width 0 if ``n_shared_experts`` is 0
    return place


def fill(stored: Stored, files: TensorSource, state: Mapping[str, Tensor], folder: Path) -> None:
    """Read ``stored`` from the ``files`` of the checkpoint ``folder`` into ``state``, our state dict or a part of it.

    Raises UserError as `read_checkpoint` does.
    """
    place = _place(stored, files, folder)
    if place is None:
        return
    if not all(from_stored(piece, tensor, state) for piece, tensor in _pieces(stored, place, files, state)):
        remedy = "use a checkpoint without them"
        if (folder / STRETTO_FILE).is_file():
            remedy = f"delete {STRETTO_FILE} to read the folder as an ordinary checkpoint"
        raise UserError(
            f"{files.path(place.name)}: {place.name}: holds weights that have no place in this network; {remedy}"
        )


def fill_rows(stored: Stored, files: TensorSource, start: int, rows: Tensor, folder: Path) -> None:
    """Read the part of ``stored`` that belongs to ``rows``, the rows of our tensor from number ``start`` on. Of an expert or a
    projection outside these rows nothing is read.

    Raises UserError as `read_checkpoint` does.
    """
    place = _place(stored, files, folder)
    assert place is not None and stored.ours is not None, stored.name
    stop = start + len(rows)
    if stored.is_stacked:
        for expert in range(start, stop):
            tensor = files.read(place.name, place.shape, (expert,))
            rows[expert - start].copy_(paired(stored, (tensor.mT if tensor.dim() == 2 else tensor)[None], False)[0])
        return
    index, *rest = stored.part or (slice(0, stored.shape[0]),)
    if isinstance(index, int):  # an expert
        if start <= index < stop:
            moved = replace(stored, part=(index - start, *rest))
            from_stored(moved, files.read(place.name, place.shape, place.part), {stored.ours: rows})
        return
    first, last = max(index.start, start), min(index.stop, stop)
    if first < last:
        group = stored.neighbours_of or 1  # rows of a group are read together, because they are permuted
        low, high = (first - index.start) // group * group, -(-(last - index.start) // group) * group
        values = paired(stored, files.read(place.name, place.shape, (slice(low, high),)), on_disk=False)
        rows[first - start : last - start].copy_(values[first - index.start - low : last - index.start - low])


def _pieces(
    stored: Stored, place: Alias, files: TensorSource, state: Mapping[str, Tensor]
) -> Iterator[tuple[Stored, Tensor]]:
    """``stored`` and its tensor; stacked experts one after another, because a stack may have gigabytes."""
    if not stored.is_stacked:
        yield stored, files.read(place.name, place.shape, place.part)
        return
    num_ours = 0 if stored.ours is None else len(state[stored.ours])
    for expert in range(place.shape[0]):
        tensor = files.read(place.name, place.shape, (expert,))
        yield stored.of_expert(expert, num_ours), tensor.mT if tensor.dim() == 2 else tensor


def _refuse_unexpected(files: TensorSource, tensors: list[Stored], config: ModelConfig) -> None:
    known = {stored.name for stored in tensors} | {alias.name for stored in tensors for alias in stored.aliases}
    # layers for multi-token prediction, in checkpoints of GLM, DeepSeek and ERNIE, are not used
    mtp_layers = {_layer(name) for name in files.names if ".eh_proj." in name}
    for name in sorted(files.names):
        if name in known or name.endswith("rotary_emb.inv_freq") or name.startswith("model.mtp_"):
            continue
        layer = _layer(name)
        if layer is not None and layer >= config.num_layers:
            if layer in mtp_layers:
                continue
            problem = f"a layer more than the {config.num_layers} (num_hidden_layers) of config.json"
            raise damaged(files.path(name), name, f"{problem}; the files do not belong together")
        raise UserError(
            f"{files.path(name)}: {name}: this architecture has no such tensor; use a checkpoint of the plain text model"
        )


def _layer(name: str) -> int | None:
    """Number of the layer of a tensor; None for a tensor outside the layers."""
    number = name.split(".")[2] if name.startswith("model.layers.") else ""
    return int(number) if number.isdigit() else None


def to_stored(stored: Stored, state: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The tensor ``stored`` in its form on disk, on the CPU, from our state dict ``state``."""
    dtype = torch.float32 if stored.always_fp32 else dtype
    if stored.ours is None:
        return torch.full(stored.shape, stored.filling, dtype=dtype)
    tensor = state[stored.ours].detach()[stored.part].to("cpu", dtype)
    tensor = paired(stored, tensor, on_disk=True)
    if stored.is_stacked:
        tensor = tensor.mT if tensor.dim() == 3 else tensor
        missing = stored.shape[0] - tensor.shape[0]
    else:
        missing = math.prod(stored.shape) // math.prod(tensor.shape[1:]) - tensor.shape[0]
    if missing:
        tensor = torch.cat((tensor, tensor.new_full((missing, *tensor.shape[1:]), stored.filling)))
    tensor = tensor.reshape(stored.shape).contiguous()
    return tensor.clone() if stored.is_copy else tensor  # safetensors rejects two names for the same memory


def from_stored(stored: Stored, tensor: Tensor, state: Mapping[str, Tensor]) -> bool:
    """Copy ``tensor``, of ``stored.shape``, into its place in ``state``; for stacked experts, one `Stored.of_expert` at a time.

    Returns False if a constant, a padding or a copy does not have the expected values.
    """
    if stored.ours is None:
        return bool(_is_filling(tensor, stored.filling))
    place = state[stored.ours][stored.part]
    if stored.is_copy:
        return torch.equal(tensor.to(place), place)
    rows = tensor.reshape(-1, *place.shape[1:])
    own, padding = rows[: place.shape[0]], rows[place.shape[0] :]
    if not _is_filling(padding, stored.filling):
        return False
    place.copy_(paired(stored, own, on_disk=False))
    return True


def _is_filling(tensor: Tensor, filling: float) -> bool:
    # tolerance of 1 %: other software may have rounded a bias to bf16
    return bool(((tensor.float() - filling).abs() <= 0.01 * abs(filling)).all())


def paired(stored: Stored, rows: Tensor, on_disk: bool) -> Tensor:
    """Convert rotated rows between memory, where halves of a head are paired, and disk, where neighbours are (``on_disk``: the
    direction).
    """
    width, start = stored.neighbours_of, stored.neighbours_from
    if not width:
        return rows
    outer, inner = (2, (width - start) // 2) if on_disk else ((width - start) // 2, 2)
    rest = rows.shape[2:] if stored.is_stacked else rows.shape[1:]
    groups = rows.reshape(-1, width, *rest)
    pairs = groups[:, start:].unflatten(1, (outer, inner)).transpose(1, 2).flatten(1, 2)
    return torch.cat((groups[:, :start], pairs), dim=1).reshape(rows.shape)
