"""Settings of torch for this machine: number of threads, data type, and a fixed order of sums.

A busy machine, a container that shares its cores, a library that prepares products for minutes: how many threads are fastest cannot
be read off the processor. A second of the real work can tell.
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
"""Each candidate's share of the second or two that a choice may take."""
MARGIN = 1.1
"""How much faster than the default another candidate must be: below that it is noise."""
ROUGH_WIDTH = 256
"""Hidden channels from which products in bf16 pay (ours): below, what stands between them takes longer."""


def thread_counts() -> list[int]:
    """How many threads to try, the default first: fewer and fewer, as long as that helps. One count where a user set it."""
    counts = [torch.get_num_threads()]
    while counts[-1] > 1 and "OMP_NUM_THREADS" not in os.environ:
        counts.append(counts[-1] // 2)
    return counts


def seconds_of(work: Callable[[], object]) -> float:
    """Fastest of a few calls of ``work``, after one that is not counted."""
    work()
    start = time.perf_counter()
    times: list[float] = []
    while not times or time.perf_counter() - start < TIMED_S:
        before = time.perf_counter()
        work()
        times.append(time.perf_counter() - before)
    return min(times)


def fastest_threads(measure: Callable[[], float]) -> dict[int, float]:
    """Seconds that ``measure`` (such as `seconds_of` some work) took, by number of threads; torch is left with the best.

    Tried in the order of `thread_counts`, until fewer are slower; the default stays unless another is faster by `MARGIN`.
    """
    default, *others = thread_counts()
    found = {default: measure()}
    for num in others:
        torch.set_num_threads(num)
        found[num] = measure()
        if found[num] > min(found.values()):
            break
    best = min(found, key=lambda num: found[num])
    torch.set_num_threads(best if found[default] > MARGIN * found[best] else default)
    return found


def rough_products(device: torch.device, width: int) -> torch.autocast:
    """A block in which products are bf16 where ``device`` has units for it and a network of ``width`` hidden channels is wide enough
    to gain by it: for what is compared with its like and not reported, such as what a layer is worth.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=width >= ROUGH_WIDTH and multiplies_bf16(device))


@contextmanager
def threads_kept() -> Iterator[None]:
    """What runs in this block may change torch's number of threads; afterwards it is as before."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """A block in which torch takes only kernels that add up in one order, so that the same work gives the same bits on a GPU, too.

    cuBLAS wants to be told before it is first used, so call this before then.

    Raises:
        UserError: in the block, by an operation that has no such kernel. Mere warnings (``warn_only``) leave the gradients of
            attention the atomic sums that they are.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic  # type: ignore[attr-defined]
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # a search for mistakes, which costs a write of every new tensor
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise UserError(f"train.deterministic: {str(error).splitlines()[0]} Set it to false.") from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def multiplies_bf16(device: torch.device) -> bool:
    """Whether ``device`` has units for products in bf16; a CPU without them emulates it a hundred times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
