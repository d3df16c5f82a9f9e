"""Threads for code that may hang: used again, left behind, never in the way."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from stretto.rl.asking import Trouble
from stretto.rl.threads import Threads


def test_one_after_the_other_needs_one_thread_and_many_at_once_as_many() -> None:
    async def work() -> tuple[set[int], set[int]]:
        threads = Threads()
        serial = {await threads.run(threading.get_ident, 60, "who") for _ in range(5)}
        barrier = threading.Barrier(6)

        def meet() -> int:
            barrier.wait(60)
            return threading.get_ident()

        together = set(await asyncio.gather(*(threads.run(meet, 60, "meet") for _ in range(6))))
        threads.close()
        return serial, together

    serial, together = asyncio.run(work())
    assert len(serial) == 1 and len(together) == 6


def test_one_that_hangs_is_left_behind_and_comes_back_when_it_can() -> None:
    async def work() -> None:
        threads, gate = Threads(), threading.Event()
        with pytest.raises(Trouble, match=r"slow: no answer within 0\.05 s"):
            await threads.run(gate.wait, 0.05, "slow")
        assert await threads.run(lambda: 7, 60, "next") == 7
        gate.set()
        while len(threads._idle) < 2:
            await asyncio.sleep(0.001)
        threads.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_what_it_raises_is_raised_here() -> None:
    def late() -> None:
        raise TimeoutError("its own")

    async def work() -> None:
        threads = Threads()
        with pytest.raises(TimeoutError, match="its own"):
            await threads.run(late, 60, "late")
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0, 60, "wrong")
        assert await threads.run(lambda: "well", 60, "after") == "well"
        threads.close()

    asyncio.run(work())


def test_idle_ones_end_when_they_are_told() -> None:
    before = threading.active_count()

    async def work() -> None:
        threads = Threads()
        await asyncio.gather(*(threads.run(lambda: time.sleep(0.01), 60, "nap") for _ in range(12)))
        threads.close()

    asyncio.run(work())
    deadline = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < deadline, "idle threads stay"
        time.sleep(0.01)
