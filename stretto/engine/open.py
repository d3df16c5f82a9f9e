"""From a folder on disk to an engine: a run, a checkpoint of ours, or one of a supported family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.base.errors import UserError
from stretto.base.paths import RUN_FILE, checkpoint_folder, read_json
from stretto.base.records import Lineage
from stretto.engine.engine import Engine
from stretto.engine.memory import check_memory, free_bytes
from stretto.engine.request import EngineConfig
from stretto.model.checkpoint import read_checkpoint, read_config, read_presets
from stretto.model.elastic import extract
from stretto.model.spec import ModelConfig, Subnet, extracted_config
from stretto.ops.native.build import Library, load
from stretto.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine and what its folder says about it."""

    engine: Engine
    tokenizer: Tokenizer | None
    config: ModelConfig
    presets: dict[str, Subnet]
    """Named Subnets of the network in service; ``full`` is always there."""
    lineage: Lineage | None
    folder: Path
    """Of the checkpoint."""
    name: str
    """Of the run, or of the folder where it is no run's."""


def open_engine(
    path: Path | str,
    config: EngineConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    memory_bytes: int | None = None,
    cut: Subnet | None = None,
    with_tokenizer: bool = True,
    routes: bool = True,
    library: Library | None = None,
) -> OpenedEngine:
    """Open the network at ``path`` for service.

    Args:
        dtype: of weights and cache; None: fp32 on a CPU, bf16 elsewhere.
        memory_bytes: what weights and cache may take; None: what is free on ``device``.
        cut: serve this Subnet as a network of its own; the rest of the weights is let go after reading.
        with_tokenizer: False: token ids only, for checkpoints that hold no tokenizer.
        library: compiled CPU kernels; None: those that the environment asks for (see `stretto.ops.native.build.load`).

    Raises:
        UserError: no checkpoint there, one that is damaged or unsupported, no tokenizer, or memory that does not
            suffice (with what would fit).
    """
    config = config or EngineConfig()
    device = torch.device(device)
    dtype = dtype or (torch.float32 if device.type == "cpu" or config.batch_invariant else torch.bfloat16)
    if config.batch_invariant and dtype != torch.float32:
        raise UserError(
            f"dtype: {str(dtype).removeprefix('torch.')}: batch_invariant needs fp32; leave one of the two out"
        )
    folder = checkpoint_folder(path)
    network, presets = read_config(folder), read_presets(folder)
    tokenizer = load_tokenizer(folder) if with_tokenizer else None
    if tokenizer is not None and tokenizer.vocab_size > network.vocab_size:
        raise UserError(
            f"{folder / 'tokenizer.json'}: has {tokenizer.vocab_size} tokens, the network {network.vocab_size}; "
            "put the tokenizer there that it was trained with"
        )
    available = free_bytes(device) if memory_bytes is None else memory_bytes
    kept = network if cut is None else extracted_config(network, cut)
    check_memory(folder, kept, presets if cut is None else {}, config, dtype, available, routes)
    checkpoint = read_checkpoint(folder, device=device, dtype=dtype)
    model = checkpoint.model.requires_grad_(False)
    if cut is not None:
        model = extract(model, cut).requires_grad_(False)
        presets = {}
    choices = {name: choice.of(model.config) for name, choice in presets.items()}
    if library is None and device.type == "cpu":
        library = load()
    engine = Engine(
        model,
        tokenizer,
        config,
        end_ids=generation_ends(folder, model.config.vocab_size),
        routes=routes,
        library=library,
        drafts=tuple(choices.values()),
    )
    name = folder.parent.name if (folder.parent / RUN_FILE).is_file() else folder.resolve().name
    named = {"full": model.config.full(), **choices}
    return OpenedEngine(engine, tokenizer, model.config, named, checkpoint.lineage, folder, name)


def generation_ends(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a completion, as generation_config.json and config.json name them."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        tree: Any = read_json(folder / name) if (folder / name).is_file() else {}
        named = tree.get("eos_token_id") if isinstance(tree, dict) else None
        ends.update(named if isinstance(named, list) else [] if named is None else [named])
    return tuple(sorted(end for end in ends if 0 <= end < vocab_size))
