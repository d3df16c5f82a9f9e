"""A network with one part at a time in memory, to run, rank and write checkpoints that are larger than memory.

A part is the embedding, a layer, the final norm or the head. Weights are read by `stretto.model.checkpoint`, which also dequantises
and renames them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from stretto.model.checkpoint import StrettoFile, describe, fill_branches
from stretto.model.families import Stored
from stretto.model.headers import STRETTO_FILE
from stretto.model.spec import ModelConfig
from stretto.model.stored import Dtypes, fill, fill_rows, readable
from stretto.model.transformer import MoeLayer, Transformer, skeleton
from stretto.model.weight_files import TensorFiles, open_tensors


class StreamedState(Mapping[str, Tensor]):
    """State dict of a checkpoint that reads its tensors on access, one part at a time. A context manager that closes its files.

    The tensors of a part are released when another part is accessed, so access should follow the order of the layers.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Open the files and read their headers. ``dtype``: dtype of all tensors except balance biases; None: as `Dtypes.on_disk`.

        Raises:
            UserError: as `read_checkpoint` does, except for errors in the values of tensors.
        """
        self.folder = folder
        self.description: StrettoFile = describe(folder)
        self.config = config = self.description.config
        with ExitStack() as stack:
            self._files = stack.enter_context(open_tensors(folder))
            tensors = readable(config, self.description.family, self._files, folder)
            self.dtypes = Dtypes.on_disk(tensors, self._files, folder) if dtype is None else Dtypes(dtype)
            self._open_files = stack.pop_all()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in skeleton(config).state_dict().items()}
        self._stored: dict[str, list[Stored]] = defaultdict(list)
        part = ""
        for stored in tensors:
            part = part_of(stored.ours) if stored.ours is not None else part  # a constant follows tensors of its layer
            self._stored[part].append(stored)
        self._part = ""
        self._tensors: dict[str, Tensor] = {}

    def __enter__(self) -> StreamedState:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def __getitem__(self, name: str) -> Tensor:
        if name.endswith(".bias_WE"):  # `write_checkpoint` accesses these after all layers
            return self._read(part_of(name), {name})[name]
        if part_of(name) != self._part:
            self._tensors = {}  # released before the next part is read, so that memory holds one part
            self._part, self._tensors = part_of(name), self.part(part_of(name))
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def part(self, part: str) -> dict[str, Tensor]:
        """All tensors of ``part``. Raises `UserError` as `read_checkpoint` does."""
        return self._read(part, {name for name in self._shapes if part_of(name) == part})

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of the tensor ``name``; other rows are not read. Not for balance biases."""
        rows = torch.zeros((stop - start, *self._shapes[name][1:]), dtype=self.dtypes.of(name))
        for stored in self._stored[part_of(name)]:
            if stored.ours == name and not stored.is_copy:
                fill_rows(stored, self._files, start, rows, self.folder)
        return rows

    def check_constants(self) -> None:
        """Check the values that `rows` does not read: constants, copies and padding. Raises `UserError` as `read_checkpoint` does."""
        for part, tensors in self._stored.items():
            names = {stored.ours for stored in tensors if stored.ours and (stored.is_copy or self._has_padding(stored))}
            if names or any(stored.ours is None for stored in tensors):
                self._read(part, names)

    def _has_padding(self, stored: Stored) -> bool:
        assert stored.ours is not None
        return stored.always_fp32 or math.prod(stored.shape) > math.prod(self._shapes[stored.ours])

    def _read(self, part: str, names: Collection[str]) -> dict[str, Tensor]:
        """The tensors ``names`` of ``part``. Also checks the constants of the part."""
        state = {name: torch.zeros(self._shapes[name], dtype=self.dtypes.of(name)) for name in names}
        for stored in self._stored[part]:
            if stored.ours is None or stored.ours in names:
                fill(stored, self._files, state, self.folder)
        if (self.folder / STRETTO_FILE).is_file() and any(name.endswith(".bias_WE") for name in names):
            fill_branches(self.folder, self.config, state)
        return state

    def unchanged(self, dtype: torch.dtype, fp32: Collection[str] = ()) -> tuple[Path, ...]:
        """Tensor files with exactly the bytes that `write_checkpoint` would write for this network in its family, ``dtype`` and
        ``fp32``: all their tensors have the names, shapes and dtypes of the result.
        """
        files = self._files
        if not isinstance(files, TensorFiles):
            return ()  # another format, or quantised
        known = {stored.name: stored for tensors in self._stored.values() for stored in tensors}

        def is_same(name: str) -> bool:
            stored = known.get(name)
            if stored is None or stored.ours is None or stored.is_copy or name not in files.names:
                return False
            is_fp32 = stored.always_fp32 or stored.ours in fp32
            return files.stored_as(name) == (torch.float32 if is_fp32 else dtype, stored.shape)

        return tuple(path for path, names in sorted(files.files.items()) if all(map(is_same, names)))


def part_of(name: str) -> str:
    """Name of the part that the tensor ``name`` of a state dict belongs to: ``embedding``, ``blocks.3``, ``norm`` or ``head``."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first


def _computable(tensor: Tensor) -> Tensor:
    """``tensor`` in fp32 if it is fp16 on a CPU, where matrix products in fp16 are about a hundred times slower than in other dtypes."""
    return tensor.float() if tensor.dtype == torch.float16 and tensor.device.type == "cpu" else tensor


class StreamedNetwork:
    """A network whose parts have weights only inside `hold`; used by `stretto.evals.order.survey`."""

    def __init__(self, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
        """``state``: state dict of ``config``, such as a `StreamedState`; accessed one part at a time."""
        self._state = state
        self.model: Transformer = skeleton(config)

    @contextmanager
    def hold(self, part: str) -> Iterator[None]:
        """Context in which ``part`` has its weights. Raises `UserError` as `read_checkpoint` does."""
        module = self.model.get_submodule(part)
        names = [name for name in self._state if part_of(name) == part]
        tensors = {name.removeprefix(f"{part}."): _computable(self._state[name]) for name in names}
        module.load_state_dict(tensors, assign=True)
        for layer in (each for each in module.modules() if isinstance(each, MoeLayer)):
            layer.set_order(self.model.config.expert_orders[layer.row], "cpu")
        del tensors
        try:
            yield
        finally:
            module.to("meta")
