"""Settings of torch for this machine: number of threads, data type, and a fixed order of sums.

The fastest number of threads depends on other load, on shared cores and on libraries that prepare products, so it is measured
during about a second of the run's own work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stretto.base.errors import UserError

TIMED_S = 0.25
"""Measuring time for each candidate, in seconds."""
MARGIN = 1.1
"""Least speed of another candidate relative to the default; smaller differences are noise."""
ROUGH_WIDTH = 256
"""Smallest hidden width for which bf16 products save time (our choice); below it, other operators take most of the time."""


def thread_counts() -> list[int]:
    """Numbers of threads to try: the default, its half, and so on; only the default if OMP_NUM_THREADS is set."""
    counts = [torch.get_num_threads()]
    while counts[-1] > 1 and "OMP_NUM_THREADS" not in os.environ:
        counts.append(counts[-1] // 2)
    return counts


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls of ``work``, after one call that is not counted."""
    work()
    start = time.perf_counter()
    times: list[float] = []
    while not times or time.perf_counter() - start < TIMED_S:
        before = time.perf_counter()
        work()
        times.append(time.perf_counter() - before)
    return min(times)


def fastest_threads(measure: Callable[[], float]) -> dict[int, float]:
    """Result of ``measure``, in seconds, by number of threads. Sets torch to the fastest number.

    Tries `thread_counts` in order, until a smaller number is slower. The default stays unless another is faster by `MARGIN`.
    """
    default, *others = thread_counts()
    seconds = {default: measure()}
    for num in others:
        torch.set_num_threads(num)
        seconds[num] = measure()
        if seconds[num] > min(seconds.values()):
            break
    best = min(seconds, key=lambda num: seconds[num])
    torch.set_num_threads(best if seconds[default] > MARGIN * seconds[best] else default)
    return seconds


def rough_products(device: torch.device, width: int) -> torch.autocast:
    """Context in which products are bf16 if ``device`` has bf16 units and the hidden ``width`` is large enough. For measurements
    that are only compared with each other, such as the importance of layers.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=width >= ROUGH_WIDTH and multiplies_bf16(device))


@contextmanager
def threads_kept() -> Iterator[None]:
    """Context that restores torch's number of threads at its end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """Context in which torch uses only kernels with a fixed order of sums, so the same work gives the same bits on a GPU too.

    Must be entered before cuBLAS is first used, which reads its configuration then. With torch's ``warn_only`` the gradients of
    attention would still be atomic sums, so an operation without such a kernel is an error.

    Raises:
        UserError: an operation in the block has no deterministic kernel.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic  # type: ignore[attr-defined]
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # a debugging aid, which writes every new tensor
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise UserError(f"train.deterministic: {str(error).splitlines()[0]} Set it to false.") from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def trains_in_bf16(device: torch.device) -> bool:
    """Whether training on ``device`` computes in bf16 unless the user chooses: on a GPU with bf16 units. On a CPU with such units
    fp32 may be faster."""
    return device.type != "cpu" and multiplies_bf16(device)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether ``device`` has units for products in bf16; a CPU without them emulates them, a hundred times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
