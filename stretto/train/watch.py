"""Watching the ranks of a run: a hang ends the process with the stacks of its threads, and ranks that are slow are named."""

from __future__ import annotations

import faulthandler
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stretto.base.stacks import stacks
from stretto.base.track import say
from stretto.model.attention import Attention, Mla
from stretto.model.parallel import Ranks
from stretto.model.transformer import Transformer

GRACE_S = 15.0
"""Time between a rank's stacks and its end. The end of a rank makes torchrun kill all others, which must print theirs before."""
SLOW = 1.5
"""A rank is slow if its own work takes this many times as long for a row as the median rank's (our choice)."""
SLOW_SHARE = 0.1
"""Smallest share of the elapsed time that a slow rank costs; less is not worth a line (our choice)."""


@contextmanager
def watched(
    model: Transformer, ranks: Ranks, timeout_s: float, waits: Callable[[], bool] = lambda: False
) -> Iterator[Callable[..., None]]:
    """End the process with exit code 1 if no forward pass of ``model`` ends within ``timeout_s``; one rank alone is not watched. The time
    in which ``waits()`` is true does not count.

    The stacks of all threads go to stderr first. Yields a function that work without forward passes of the whole ``model``, such as a
    ranking of layers, calls to show that it goes on.
    """
    if ranks.world == 1:
        yield lambda *_: None
        return
    moved_s, ended = time.monotonic(), threading.Event()

    def note(*_: Any) -> None:
        nonlocal moved_s
        moved_s = time.monotonic()

    def watch() -> None:
        while time.monotonic() - moved_s <= timeout_s:
            # where hung native code keeps the interpreter's lock, this thread stands still, and faulthandler's own thread acts
            faulthandler.dump_traceback_later(2 * timeout_s, exit=True, file=2)
            if ended.wait(min(1.0, timeout_s / 4)):
                return
            if waits():
                note()
        reason = f"rank {ranks.rank} of {ranks.world}: no forward pass ended in {timeout_s:g} s"
        # one write, so that the stacks of several ranks do not mix
        os.write(2, f"{reason}; the stacks of its threads:\n{stacks()}\n".encode())
        time.sleep(GRACE_S)
        os._exit(1)

    hook, thread = model.register_forward_hook(note), threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield note
    finally:
        ended.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        hook.remove()


class OwnTime:
    """Time that this rank spends in attention. A slow rank spends more than the others.

    The time of a whole step does not show a slow rank, because all ranks wait for each other in a step. No rank waits in attention.
    """

    def __init__(self, model: Transformer, ranks: Ranks):
        self._ranks, self._begun_s, self._seconds, self._num_rows = ranks, time.perf_counter(), 0.0, 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if ranks.world > 1:
            for attention in (module for module in model.modules() if isinstance(module, Attention | Mla)):
                attention.register_forward_pre_hook(self._begin)
                attention.register_forward_hook(self._end)

    def _begin(self, _: object, arguments: tuple[Any, ...]) -> None:
        self._num_rows += len(arguments[0])
        if self._ranks.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self._events.append((start, end))
        self._started_s = time.perf_counter()

    def _end(self, *_: Any) -> None:
        if self._ranks.device.type == "cuda":
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._started_s

    def report(self, step: int) -> dict[str, float]:
        """The slowest rank's time for a row over the median since the last call, for the log; rank 0 prints the ranks that are slow. All
        ranks must call this."""
        ranks, now_s = self._ranks, time.perf_counter()
        if ranks.world == 1:
            return {}
        if self._events:
            self._events[-1][1].synchronize()
        own = self._seconds + sum(1e-3 * start.elapsed_time(end) for start, end in self._events)
        of_ranks = ranks.gather(torch.tensor([own, self._num_rows], device=ranks.device)).tolist()
        elapsed_s, self._begun_s, self._seconds, self._num_rows = now_s - self._begun_s, now_s, 0.0, 0
        self._events.clear()
        # ranks may have different numbers of rows; of two ranks, the faster one is the median
        row_s = [seconds / max(1, num_rows) for seconds, num_rows in of_ranks]
        median_row_s = statistics.median_low(row_s)
        for rank, (seconds, num_rows) in enumerate(of_ranks):
            median_s = median_row_s * num_rows
            if ranks.is_first and seconds > SLOW * median_s and seconds - median_s > SLOW_SHARE * elapsed_s:
                say(
                    f"step {step:,}: rank {rank} is slow: {seconds:.2f} s in attention in the last {elapsed_s:.1f} s, "
                    f"the median rank {median_s:.2f} s for as many rows"
                )
        return {"speed/slowest_over_median": max(row_s) / max(median_row_s, 1e-9)}
