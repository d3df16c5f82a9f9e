"""What an engine takes in memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from stretto.base.errors import UserError
from stretto.engine.request import EngineConfig
from stretto.engine.runner import KvPool
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, count
from stretto.model.transformer import Transformer

HEADROOM = 0.1
"""Share of the weights' bytes kept free for activations and the process itself (a guess, generous)."""


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
    least = _sequence_bytes(network, config, dtype, routes)
    fits: list[str] = []
    if weights + least <= available:
        fits.append(f"a cache of {_size(available - weights)}")
    if dtype == torch.float32 and _weight_bytes(network, network.full(), torch.bfloat16) + cache // 2 <= available:
        fits.append("dtype bfloat16")
    for name, choice in presets.items():
        if not fits and _weight_bytes(network, choice.of(network), dtype) + least <= available:
            fits.append(f"the sub-model {name}, extracted")
    remedy = f"would fit: {' or '.join(fits)}" if fits else "nothing of this network would fit; use a smaller one"
    raise UserError(
        f"{folder}: memory: weights of {_size(weights)} and a cache of {_size(cache)} are more than the "
        f"{_size(available)} there are; {remedy}"
    )


def cache_within(
    network: ModelConfig, config: EngineConfig, dtype: torch.dtype, available: int, routes: bool = True
) -> EngineConfig:
    """``config`` with no larger a cache than ``available`` bytes leave beside the weights.

    As it is, where not even one longest sequence would fit: `check_memory` says so.
    """
    left = available - _weight_bytes(network, network.full(), dtype)
    if left < _sequence_bytes(network, config, dtype, routes):
        return config
    return config.replace(cache_bytes=min(config.cache_bytes, left))


def least_bytes(network: ModelConfig, config: EngineConfig, dtype: torch.dtype, routes: bool = True) -> int:
    """What the weights take with a cache of one longest sequence; with less, `check_memory` refuses."""
    return _weight_bytes(network, network.full(), dtype) + _sequence_bytes(network, config, dtype, routes)


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on ``device`` now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    limits = [_available_memory(), _group_limit()]
    return min(limit for limit in limits if limit is not None)


def pages_within(model: Transformer, config: EngineConfig, max_len: int, routes: bool) -> int:
    """Cache pages that ``config.cache_bytes`` pay for, at most twice what a full batch of longest sequences needs.

    Raises:
        UserError: not even one sequence of ``max_len`` tokens fits.
    """
    dtype = model.embedding.weight.dtype
    page_bytes = KvPool.bytes_per_page(model.config, dtype, config.page_size, routes)
    per_sequence = -(-max_len // config.page_size)
    num_pages = min(config.cache_bytes // page_bytes, 2 * config.max_batch * per_sequence)
    if num_pages < 1:
        raise UserError(f"cache_bytes: {config.cache_bytes} hold no page of {page_bytes} bytes; give the cache more")
    return num_pages


def _cache_bytes(network: ModelConfig, config: EngineConfig, dtype: torch.dtype, routes: bool) -> int:
    """What the engine will take for its cache; see `pages_within`."""
    if config.num_pages:
        return config.num_pages * KvPool.bytes_per_page(network, dtype, config.page_size, routes)
    return min(config.cache_bytes, 2 * config.max_batch * _sequence_bytes(network, config, dtype, routes))


def _sequence_bytes(network: ModelConfig, config: EngineConfig, dtype: torch.dtype, routes: bool) -> int:
    """Cache of one longest sequence."""
    num_tokens = min(config.max_len or network.max_positions, network.max_positions)
    return KvPool.bytes_per_page(network, dtype, config.page_size, routes) * -(-num_tokens // config.page_size)


def _weight_bytes(network: ModelConfig, subnet: Subnet, dtype: torch.dtype) -> int:
    return int(count(network, subnet).total_params * dtype.itemsize * (1 + HEADROOM))


def _available_memory() -> int | None:
    path = Path("/proc/meminfo")
    for line in path.read_text().splitlines() if path.is_file() else ():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 1 << 62  # not Linux: no limit known, and the system says so itself when it is reached


def _group_limit() -> int | None:
    """What the control group (a container) still allows; None: no limit."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.is_file() or not used.is_file() or limit.read_text().strip() == "max":
        return None
    return max(0, int(limit.read_text()) - int(used.read_text()))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / (1 << 20):.1f} MiB"
