"""How many threads a piece of work is fastest with on this machine, as busy as it is: found by timing the work itself.

A busy machine, a container that shares its cores, a library that prepares products for minutes: none of it can be read off the
processor. A second of the real work can tell.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

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


def multiplies_bf16(device: torch.device) -> bool:
    """Whether ``device`` has units for products in bf16; a CPU without them emulates it a hundred times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
