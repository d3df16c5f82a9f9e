"""Opening an engine from a folder: a run, a checkpoint of ours, or one of a supported family; memory check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.base.errors import UserError
from stretto.base.paths import RUN_FILE, checkpoint_folder, read_json
from stretto.base.records import Lineage
from stretto.engine.engine import Engine
from stretto.engine.forward_torch import KvPool
from stretto.engine.request import EngineConfig
from stretto.model.checkpoint import read_checkpoint, read_config, read_presets
from stretto.model.elastic import extract
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, count, extracted_config
from stretto.ops.memory import free_bytes
from stretto.ops.native import Library, load
from stretto.text.tokenizer import Tokenizer, load_tokenizer

HEADROOM = 0.1
"""Share of the weights' bytes kept free for activations and the process itself (a guess, generous)."""
LEAST_LEN = 2048
"""Positions that a cache must hold to be worth opening an engine with, where a network has as many (ours): a chat of some
turns."""


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
        memory_bytes: what weights and cache may take; the cache gets all that the weights leave, unless ``config`` says how
            large it is. None: what is free on ``device``, of which the cache gets a share (`pages_within`).
        cut: serve this Subnet as a network of its own; the rest of the weights is let go after reading.
        with_tokenizer: False: token ids only, for checkpoints that hold no tokenizer.
        library: compiled CPU kernels; None: those that the environment asks for (see `stretto.ops.native.load`).

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
            "use the tokenizer that the network was trained with"
        )
    available = free_bytes(device) if memory_bytes is None else memory_bytes
    kept = network if cut is None else extracted_config(network, cut)
    check_memory(folder, kept, presets if cut is None else {}, config, dtype, available, routes)
    if memory_bytes is not None and config.cache_bytes is None:
        config = config.replace(cache_bytes=memory_bytes - _weight_bytes(kept, kept.full(), dtype))
    checkpoint = read_checkpoint(folder, device=device, dtype=dtype)
    model = checkpoint.model.requires_grad_(False)
    if cut is not None:
        model, presets = extract(model, cut).requires_grad_(False), {}
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


def check_memory(
    folder: Path,
    network: ModelConfig,
    presets: Mapping[str, SubnetChoice],
    config: EngineConfig,
    dtype: torch.dtype,
    available: int,
    routes: bool,
) -> None:
    """Refuse an engine that would not fit into ``available`` bytes, before anything large is read.

    Raises:
        UserError: with the sizes, and what would fit.
    """
    weights, cache = _weight_bytes(network, network.full(), dtype), _cache_bytes(network, config, dtype, routes)
    if weights + cache <= available:
        return
    fits: list[str] = []
    least, half = _cache_bytes(network, config.replace(num_pages=None, cache_bytes=None), dtype, routes), torch.bfloat16
    if weights + least <= available:
        fits.append(f"a cache of {_size(available - weights)}")
    narrow = _weight_bytes(network, network.full(), half) + _cache_bytes(network, config, half, routes)
    if dtype == torch.float32 and narrow <= available:
        fits.append("dtype bfloat16")
    for name, choice in presets.items():
        if len(fits) < 2 and _weight_bytes(network, choice.of(network), dtype) + least <= available:
            fits.append(f"the sub-model {name}, extracted")
    remedy = "neither a preset nor another dtype would fit; let `stretto serve --subnet auto` look for a smaller size"
    if fits:
        remedy = f"would fit: {' or '.join(fits)}"
    raise UserError(
        f"{folder}: memory: weights of {_size(weights)} and a cache of {_size(cache)} exceed the "
        f"{_size(available)} available; {remedy}"
    )


def least_bytes(network: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """What the weights take with the cache that ``config`` asks for, or the least one; with less, `check_memory` refuses."""
    return _weight_bytes(network, network.full(), dtype) + _cache_bytes(network, config, dtype, routes=True)


def _cache_bytes(network: ModelConfig, config: EngineConfig, dtype: torch.dtype, routes: bool) -> int:
    """Of the cache that ``config`` asks for. Where it leaves that open: of the least, which holds one sequence of ``max_len``,
    or of `LEAST_LEN` where that is open too."""
    page_bytes = KvPool.bytes_per_page(network, dtype, config.page_size, routes)

    def holding(num_tokens: int) -> int:
        return page_bytes * -(-min(num_tokens, network.max_positions) // config.page_size)

    if config.num_pages is not None:
        return config.num_pages * page_bytes
    if config.cache_bytes is not None:  # see `pages_within`
        return min(config.cache_bytes, 2 * config.max_batch * holding(config.max_len or network.max_positions))
    return holding(config.max_len or LEAST_LEN)


def _weight_bytes(network: ModelConfig, subnet: Subnet, dtype: torch.dtype) -> int:
    return int(count(network, subnet).total_params * dtype.itemsize * (1 + HEADROOM))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / (1 << 20):.1f} MiB"
