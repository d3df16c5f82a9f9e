"""Opening an engine from a run folder or a checkpoint folder, with a check of the memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder, model_name, read_json
from stretto.base.records import Lineage
from stretto.engine.engine import Engine
from stretto.engine.forward_cpu import fits_kernels
from stretto.engine.forward_torch import KvPool
from stretto.engine.ranks import Team
from stretto.engine.request import EngineConfig
from stretto.engine.runner import logit_bytes, why_torch
from stretto.model.checkpoint import (
    Checkpoint,
    each_integer,
    integer_forms,
    read_checkpoint,
    read_config,
    read_presets,
)
from stretto.model.counts import count
from stretto.model.elastic import extract, slice_integers
from stretto.model.shard import Shard
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, extracted_config
from stretto.model.transformer import Transformer
from stretto.ops.int_weights import IntWeight
from stretto.ops.matmul import Arithmetic
from stretto.ops.memory import free_bytes, trim
from stretto.ops.native import Library, Panels, load
from stretto.text.tokenizer import Tokenizer, load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Data types of the weights in memory, by name."""
HEADROOM = 0.1
"""Memory for activations and the process itself, as a share of the weights' bytes (a generous guess)."""
_COLLECTIVE_S = 24 * 3600.0
"""Longest time of a collective of tensor parallelism if ``max_step_s`` has no limit: torch needs one."""
LEAST_LEN = 2048
"""Smallest number of positions in a cache, if the network has as many: enough for a chat of several turns (our choice)."""


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine, with the metadata of its checkpoint."""

    engine: Engine
    presets: dict[str, Subnet]
    """Named Subnets of the network in service, always with ``full``."""
    lineage: Lineage | None
    folder: Path
    """Folder of the checkpoint."""
    name: str
    """As `model_name`."""
    integers: Mapping[str, IntWeight]
    """Weights of the network in service that the engine holds as integers only, on the meta device."""


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
    """Open the network at ``path`` for generation.

    Args:
        dtype: data type of weights and cache; None: fp32 on a CPU, bf16 elsewhere.
        memory_bytes: memory for weights and cache. The cache gets all memory beside the weights and the logits of a step
            (`logit_bytes`), but at least that of one sequence, unless ``config`` has its size. None: the free memory of ``device``,
            of which the cache gets a share (`pages_within`). With ``tp``: of each rank.
        cut: extract this Subnet and serve it alone; the other weights are freed after reading. Not with ``tp``.
        with_tokenizer: False: token ids only, for checkpoints without a tokenizer.
        library: compiled CPU kernels; None: loaded as the environment says (`stretto.ops.native.load`).

    Raises:
        UserError: the checkpoint is missing, damaged or unsupported; the tokenizer is missing; or the memory is too small (the
            message says what would fit); ``tp`` does not divide the network, or exceeds the number of GPUs.
    """
    config = config or EngineConfig()
    device = torch.device(device)
    dtype = dtype or (torch.float32 if device.type == "cpu" or config.batch_invariant else torch.bfloat16)
    if config.batch_invariant and dtype != torch.float32:
        raise UserError(
            f"dtype: {str(dtype).removeprefix('torch.')}: batch_invariant needs fp32; leave one of the two out"
        )
    folder = checkpoint_folder(path)
    network, presets = read_config(folder), read_presets(folder) if cut is None else {}
    tokenizer = _fitting_tokenizer(folder, network) if with_tokenizer else None
    if config.tp > 1:
        _check_ranks(folder, config.tp, device, cut)
    available = free_bytes(device) // (config.tp if device.type == "cpu" else 1)
    available = available if memory_bytes is None else memory_bytes
    served = _part_of(folder, network, config.tp) if cut is None else extracted_config(network, cut)
    if library is None and device.type == "cpu" and config.tp == 1:
        library = load()
    held = held_integers(folder, network, config, device, dtype, library)
    served_integers = held if cut is None else slice_integers(network, cut, held)
    share = _integer_share(served, served_integers, dtype)
    check_memory(folder, served, presets, config, dtype, available, routes, share)
    if memory_bytes is not None and config.cache_bytes is None:
        weights = _weight_bytes(served, served.full(), dtype, share)
        spare = memory_bytes - weights - logit_bytes(served, config, dtype)
        config = config.replace(cache_bytes=max(spare, _cache_bytes(served, config, dtype, routes)))
    with ExitStack() as stack:  # ends the other ranks after an error
        team = None
        if config.tp > 1:
            team = Team.start(folder, network, config.tp, device, dtype, config.max_step_s or _COLLECTIVE_S)
            stack.callback(team.close)
        shard = None if team is None else team.setup.shard
        # weights by which the kernels multiply as integers are not read as values
        checkpoint = read_checkpoint(folder, device=device, dtype=dtype, shard=shard, without=held)
        ranks = None if team is None else team.join()
        model, integers = read_part(checkpoint, cut, held)
        trim()
        end_ids = generation_ends(folder, model.config.vocab_size)
        engine = Engine(
            *(model, tokenizer, config),
            end_ids=end_ids,
            routes=routes,
            library=library,
            ranks=ranks,
            integers=integers,
        )
        stack.pop_all()
    subnets = {"full": model.config.full(), **{name: choice.of(model.config) for name, choice in presets.items()}}
    return OpenedEngine(engine, subnets, checkpoint.lineage, folder, model_name(folder), served_integers)


def _fitting_tokenizer(folder: Path, network: ModelConfig) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises `UserError`: it is missing, or has more tokens than the network."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > network.vocab_size:
        raise UserError(
            f"{folder / 'tokenizer.json'}: has {tokenizer.vocab_size} tokens, the network {network.vocab_size}; "
            "use the tokenizer that the network was trained with"
        )
    return tokenizer


def held_integers(
    folder: Path,
    network: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    library: Library | None,
) -> dict[str, IntWeight]:
    """Weights of the checkpoint ``folder`` that an engine holds as integers only, on the meta device. The others it holds as values in
    ``dtype``."""
    arithmetic = Arithmetic(config.precision, config.batch_invariant)
    if why_torch(library, network, device, dtype, arithmetic, config.tp):
        return {}
    return {name: weight for name, weight in integer_forms(folder).items() if fits_kernels(name, weight)}


def read_part(
    checkpoint: Checkpoint, cut: Subnet | None, held: Collection[str]
) -> tuple[Transformer, dict[str, IntWeight | Panels]]:
    """The network of ``checkpoint`` (None) or its Subnet ``cut``, with its integer weights: those of ``held`` in the kernels' order, which
    ``checkpoint`` was read without. On a CPU no kernel reads the others, which are on the meta device."""
    model = checkpoint.model if cut is None else extract(checkpoint.model, cut)
    integers: dict[str, IntWeight | Panels] = {}
    names = held if model.embedding.weight.device.type == "cpu" else None
    for name, weight in each_integer(checkpoint.folder, names):  # one at a time is in memory twice
        part = {name: weight} if cut is None else slice_integers(checkpoint.config, cut, {name: weight})
        integers |= {key: Panels.of(piece) if name in held else piece for key, piece in part.items()}
    return model.requires_grad_(False), integers


def _check_ranks(folder: Path, tp: int, device: torch.device, cut: Subnet | None) -> None:
    """Raises UserError: ``tp`` ranks cannot run on the device, or not with an extracted Subnet."""
    if cut is not None:
        raise UserError(
            f"{folder}: tp: {tp}: a Subnet cannot be extracted while ranks read their parts; serve all sizes and choose this one "
            "per request, or extract it with `stretto extract`"
        )
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"tp: {tp}: ranks run on a CPU or on CUDA devices, not on {device.type}; choose another device")
    num = torch.cuda.device_count() - (device.index or 0) if device.type == "cuda" else tp
    if tp > num:
        raise UserError(f"tp: {tp}: {num} CUDA devices are available from {device} on; choose tp {num} at most")


def _part_of(folder: Path, network: ModelConfig, tp: int) -> ModelConfig:
    """The part of ``network`` on each of ``tp`` ranks. Raises UserError: as `Shard.config`."""
    try:
        return Shard(0, tp).config(network)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def generation_ends(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """End token ids in generation_config.json and config.json."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        tree: Any = read_json(folder / name) if (folder / name).is_file() else {}
        ids = tree.get("eos_token_id") if isinstance(tree, dict) else None
        ends.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(end for end in ends if 0 <= end < vocab_size))


def check_memory(
    folder: Path,
    network: ModelConfig,
    presets: Mapping[str, SubnetChoice],
    config: EngineConfig,
    dtype: torch.dtype,
    available: int,
    routes: bool,
    share: float,
) -> None:
    """Check that weights and cache fit into ``available`` bytes, before anything large but integers is read.

    Args:
        share: bytes of the weights as they are held, as a share of their bytes in ``dtype``.

    Raises:
        UserError: they do not fit. The message has the sizes, and a configuration that would fit.
    """
    weights = _weight_bytes(network, network.full(), dtype, share)
    cache = _cache_bytes(network, config, dtype, routes)
    if weights + cache <= available:
        return
    fits: list[str] = []
    least, half = _cache_bytes(network, config.replace(num_pages=None, cache_bytes=None), dtype, routes), torch.bfloat16
    if weights + least <= available:
        fits.append(f"a cache of {_size(available - weights)}")
    narrow = _weight_bytes(network, network.full(), half) + _cache_bytes(network, config, half, routes)
    if dtype == torch.float32 and share == 1 and narrow <= available:
        fits.append("dtype bfloat16")
    for name, choice in presets.items():
        if len(fits) < 2 and _weight_bytes(network, choice.of(network), dtype, share) + least <= available:
            fits.append(f"the sub-model {name}, extracted")
    remedy = "neither a preset nor another dtype would fit; let `stretto serve --subnet auto` look for a smaller size"
    if fits:
        remedy = f"would fit: {' or '.join(fits)}"
    raise UserError(
        f"{folder}: memory: weights of {_size(weights)} and a cache of {_size(cache)} exceed the "
        f"{_size(available)} available; {remedy}"
    )


def least_bytes(
    network: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    held: Mapping[str, IntWeight] = MappingProxyType({}),
) -> int:
    """Smallest memory for which `check_memory` raises no error, in bytes: the weights and the cache that ``config`` needs. ``held``:
    weights stored as integers."""
    share = _integer_share(network, held, dtype)
    return _weight_bytes(network, network.full(), dtype, share) + _cache_bytes(network, config, dtype, routes=True)


def held_bytes(network: ModelConfig, dtype: torch.dtype, held: Mapping[str, IntWeight]) -> int:
    """Bytes of the weights of ``network`` in an engine. ``held``: weights stored as integers."""
    return round(count(network, network.full()).total_params * dtype.itemsize * _integer_share(network, held, dtype))


def _cache_bytes(network: ModelConfig, config: EngineConfig, dtype: torch.dtype, routes: bool) -> int:
    """Size of the cache in ``config``. If ``config`` has no size: that of the smallest cache, for one sequence of ``max_len``, or
    of `LEAST_LEN` if that is not set either."""
    page_bytes = KvPool.bytes_per_page(network, dtype, config.page_size, routes)

    def holding(num_tokens: int) -> int:
        return page_bytes * -(-min(num_tokens, network.max_positions) // config.page_size)

    if config.num_pages is not None:
        return config.num_pages * page_bytes
    if config.cache_bytes is not None:  # see `pages_within`
        return min(config.cache_bytes, 2 * config.max_batch * holding(config.max_len or network.max_positions))
    return holding(config.max_len or LEAST_LEN)


def _weight_bytes(network: ModelConfig, subnet: Subnet, dtype: torch.dtype, share: float = 1.0) -> int:
    return int(count(network, subnet).total_params * dtype.itemsize * share * (1 + HEADROOM))


def _integer_share(network: ModelConfig, held: Mapping[str, IntWeight], dtype: torch.dtype) -> float:
    """Bytes of the weights of ``network`` if the kernels hold the integers ``held``, as a share of the bytes in ``dtype``."""
    saved = 0.0
    for weight in held.values():
        stored = (weight.scales, *([] if weight.zeros is None else [weight.zeros]))
        saved += weight.codes.numel() * (dtype.itemsize - weight.bits / 8) - sum(each.nbytes for each in stored)
    return 1 - saved / (count(network, network.full()).total_params * dtype.itemsize)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / (1 << 20):.1f} MiB"
