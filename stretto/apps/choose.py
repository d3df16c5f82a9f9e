"""Which Subnet this machine can carry: `stretto serve --subnet auto`."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from stretto.apps.shape import read_search
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.base.track import progress
from stretto.engine.engine import Engine
from stretto.engine.loading import free_bytes, least_bytes
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.model.count import count
from stretto.model.elastic import extract
from stretto.model.hub import read_checkpoint
from stretto.model.presets import named_subnets
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, extracted_config
from stretto.model.transformer import Transformer
from stretto.ops.native import Library, load

CONTEXT, TIMED_TOKENS = 64, 24
"""Prompt and decoded tokens of a timing (ours): short enough to try a dozen sizes, long enough for a median."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class Fit:
    """A Subnet within the limits. Written by `fitting_subnet`."""

    subnet: Subnet
    name: str
    weight_bytes: int
    step_ms: float | None
    """Measured time of one decoded token, alone in the batch; None where no latency was asked for."""
    nll: float | None
    """Held-out loss, where the run's search evaluated it."""


def parse_bytes(text: str, source: str) -> int:
    """``8GB``, ``512MiB``, ``1e9``.

    Raises:
        UserError: beginning with ``source``: not a size.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).upper() if match else ""
    try:
        value = float(match.group(1)) if match else -1.0
    except ValueError:
        value = -1.0
    if value <= 0 or math.isinf(value) or unit not in _UNITS:
        raise UserError(f"{source} {text}: not a size; write for example 8GB or 512MiB")
    return int(value * _UNITS[unit])


def fitting_subnet(
    source: Path,
    memory_bytes: int | None,
    latency_ms: float | None,
    device: torch.device,
    dtype: torch.dtype,
    config: EngineConfig,
) -> Fit:
    """The best Subnet of ``source`` whose weights and one longest sequence fit, and that decodes fast enough.

    Best is the lowest held-out loss where the run was searched, else the most active parameters. Speed is measured here
    and now, on the Subnet cut out, one sequence at a time.

    Raises:
        UserError: nothing fits; it says what comes nearest.
    """
    folder = checkpoint_folder(source)
    checkpoint = read_checkpoint(folder, device=device, dtype=dtype)
    model, network = checkpoint.model.requires_grad_(False), checkpoint.config
    available = free_bytes(device) if memory_bytes is None else memory_bytes
    ranked = _candidates(source, network, checkpoint.presets)
    sizes = {subnet: least_bytes(extracted_config(network, subnet), config, dtype) for _, subnet, _ in ranked}
    small = [each for each in ranked if sizes[each[1]] <= available]
    if not small:
        least = min(sizes.values())
        raise UserError(
            f"--memory {available}: the smallest sub-model of {source} needs {least} bytes with one sequence; give it that much"
        )
    weights = {subnet: count(network, subnet).total_params * dtype.itemsize for _, subnet, _ in small}
    if latency_ms is None:
        name, subnet, nll = small[0]
        return Fit(subnet, name, weights[subnet], None, nll)
    library = load() if device.type == "cpu" else None
    fastest = float("inf")
    with progress("measure sizes", len(small)) as advance:
        for name, subnet, nll in small:
            step_ms = 1e3 * decode_seconds(extract(model, subnet), library)
            advance(1, f"{name}: {step_ms:.2f} ms a token")
            if step_ms <= latency_ms:
                return Fit(subnet, name, weights[subnet], step_ms, nll)
            fastest = min(fastest, step_ms)
    raise UserError(
        f"--latency-ms {latency_ms:g}: the fastest sub-model of {source} that fits takes {fastest:.2f} ms a token here; allow that much"
    )


def decode_seconds(model: Transformer, library: Library | None) -> float:
    """Median time of one decoded token, alone in the batch, through the engine."""
    tokens = CONTEXT + TIMED_TOKENS + 1
    config = EngineConfig(page_size=16, num_pages=tokens // 16 + 2, max_batch=1, max_len=tokens, prefix_cache=False)
    engine = Engine(model.requires_grad_(False), None, config, routes=False, library=library)
    ids = torch.randint(model.config.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(0)).tolist()
    sampling = Sampling(temperature=0, max_tokens=TIMED_TOKENS, ignore_eos=True)
    engine.add(Request("timing", tuple(ids), sampling, Phases(model.config.full())), stream=False)
    engine.step()  # the prompt
    seconds = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _candidates(
    source: Path, network: ModelConfig, presets: Mapping[str, SubnetChoice]
) -> list[tuple[str, Subnet, float | None]]:
    """Name, Subnet and known loss, best first."""
    record = read_search(source)
    if record is not None:
        known = [(each, each.nll) for each in record.result.candidates if each.nll is not None]
        known.sort(key=lambda pair: pair[1])
        return [(each.name or each.subnet.label(), each.subnet, nll) for each, nll in known]
    named = named_subnets(network, presets)
    ordered = sorted(named.items(), key=lambda item: count(network, item[1]).active_params, reverse=True)
    return [(name, subnet, None) for name, subnet in ordered]
