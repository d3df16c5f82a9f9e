"""A network with one part at a time in memory, to run, rank and write checkpoints larger than memory.

A part is the embedding, a layer, the final norm or the head. Weights come through the same reader as everywhere
(`stretto.model.checkpoint`), so whatever that dequantises or renames is so here as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from stretto.model.checkpoint import (
    STRETTO_FILE,
    StrettoFile,
    TensorFiles,
    describe,
    fill,
    fill_branches,
    open_tensors,
    readable,
)
from stretto.model.families import Stored
from stretto.model.spec import ModelConfig
from stretto.model.transformer import MoeLayer, Transformer, skeleton


class StreamedState(Mapping[str, Tensor]):
    """Our state dict of a checkpoint, read when it is asked for: the tensors of one part at a time.

    What was asked for is let go as soon as another part is, so it is to be asked in the order of the layers. A context that
    closes its files.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """``dtype``: of all tensors but balance biases; None: that of the embedding on disk. Reads headers only.

        Raises:
            UserError: as `read_checkpoint` does, but for what lies in the tensors themselves.
        """
        self.folder = folder
        self.description: StrettoFile = describe(folder)
        self.config = config = self.description.config
        with ExitStack() as held:
            self._files = held.enter_context(open_tensors(folder))
            tensors = readable(config, self.description.family, self._files, folder)
            self.dtype = dtype or self._files.dtype("model.embed_tokens.weight")
            self._held_open = held.pop_all()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in skeleton(config).state_dict().items()}
        self._stored: dict[str, list[Stored]] = defaultdict(list)
        part = ""
        for stored in tensors:
            # a constant lies among its layer's tensors
            part = part_of(stored.ours) if stored.ours is not None else part
            self._stored[part].append(stored)
        self._part = ""
        self._held: dict[str, Tensor] = {}

    def __enter__(self) -> StreamedState:
        return self

    def __exit__(self, *_: object) -> None:
        self._held_open.close()

    def __getitem__(self, name: str) -> Tensor:
        if name.endswith(".bias_WE"):  # asked for all together, when the layers are long gone
            return self._read(part_of(name), {name})[name]
        if part_of(name) != self._part:
            self._held = {}  # before the next is read: two layers would be twice the memory
            self._part, self._held = part_of(name), self.part(part_of(name))
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def part(self, part: str) -> dict[str, Tensor]:
        """All tensors of ``part``. Raises `UserError` as `read_checkpoint` does."""
        return self._read(part, {name for name in self._shapes if part_of(name) == part})

    def _read(self, part: str, names: Collection[str]) -> dict[str, Tensor]:
        """Those of ``part`` that are in ``names``, and its constants, which are checked."""
        state = {
            name: torch.zeros(self._shapes[name], dtype=torch.float32 if name.endswith(".bias_WE") else self.dtype)
            for name in names
        }
        for stored in self._stored[part]:
            if stored.ours is None or stored.ours in names:
                fill(stored, self._files, state, self.folder)
        if (self.folder / STRETTO_FILE).is_file() and any(name.endswith(".bias_WE") for name in names):
            fill_branches(self.folder, self.config, state)
        return state

    def unchanged(self, dtype: torch.dtype) -> tuple[Path, ...]:
        """Tensor files that hold, to the bit, what `write_checkpoint` would write of this network in its family and ``dtype``:
        its own tensors, all of them under their own names, in their own shape.
        """
        files = self._files
        if not isinstance(files, TensorFiles):
            return ()  # of another format, or quantised
        wanted = {stored.name: stored for tensors in self._stored.values() for stored in tensors}

        def is_same(name: str) -> bool:
            stored = wanted.get(name)
            if stored is None or stored.ours is None or stored.is_copy or name not in files.names:
                return False
            asked = torch.float32 if stored.always_fp32 else dtype
            return files.stored_as(name) == (asked, stored.shape)

        return tuple(path for path, names in sorted(files.files.items()) if all(map(is_same, names)))


def part_of(name: str) -> str:
    """The part of a network that the tensor ``name`` of its state dict belongs to: ``embedding``, ``blocks.3``, ``norm``, ``head``."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first


def _computable(tensor: Tensor) -> Tensor:
    """fp16 is a dtype of GPUs: on a CPU its products are a hundred times slower than any other's."""
    return tensor.float() if tensor.dtype == torch.float16 and tensor.device.type == "cpu" else tensor


class StreamedNetwork:
    """A network whose parts have weights only while they are held; `stretto.evals.order.survey` walks it."""

    def __init__(self, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
        """``state``: of ``config``, such as a `StreamedState`; it is asked for one part after the other."""
        self._state = state
        self.model: Transformer = skeleton(config)

    @contextmanager
    def hold(self, part: str) -> Iterator[None]:
        """The weights of ``part`` are there meanwhile. Raises `UserError` as `read_checkpoint` does."""
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
