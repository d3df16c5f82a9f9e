"""The elastic pool, over the local runtime: growing, shrinking, its dead and those who leave; its sizing on lists of numbers."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.runtime.local import LocalRuntime
from stretto.runtime.pool import (
    ElasticPool,
    Limits,
    Load,
    Turn,
    measure,
    percentile,
    settled_size,
    target_size,
)
from stretto.runtime.runtime import DeadlinePassed, Placement, RoleDied, RoleState
from tests.runtime.roles import Failing, Refusing, Worker

FAST_S = 20.0
LIMITS = Limits(min=1, max=4, wait_aim_s=0.05, window_s=0.4, patience_s=0.4)
SIZING = Limits(min=1, max=50, utilisation=0.5, wait_aim_s=1.0, window_s=10.0, patience_s=5.0)


def run(work: Callable[[LocalRuntime], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), LocalRuntime() as runtime:
            await work(runtime)

    asyncio.run(main())


def pool(
    runtime: LocalRuntime, limits: Limits = LIMITS, role: Callable[..., Any] = Worker, **options: Any
) -> ElasticPool:
    return ElasticPool(runtime, role, **{"name": "pool", "placement": Placement.ASYNC, "limits": limits, **options})


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(FAST_S):
        while not is_so():
            await asyncio.sleep(0.02)


@pytest.mark.slow
def test_it_grows_with_a_burst_and_shrinks_after_it() -> None:
    async def work(runtime: LocalRuntime) -> None:
        async with pool(runtime) as subject:
            assert subject.stats().size == 1
            calls = [subject.call("nap", 0.1, deadline_s=FAST_S) for _ in range(60)]
            sizes: set[int] = set()

            async def watch() -> None:
                while True:
                    sizes.add(len(runtime.handles()))
                    await asyncio.sleep(0.01)

            watcher = asyncio.create_task(watch())
            await asyncio.gather(*calls)
            watcher.cancel()
            assert max(sizes) == 4
            await until(lambda: len(runtime.handles()) == 1)
            stats = subject.stats()
            assert (stats.size, stats.num_served, stats.num_replaced, stats.num_leased) == (1, 60, 0, 0)
            assert stats.worker_s >= 60 * 0.1
        assert runtime.handles() == ()

    run(work)


def test_first_come_first_served() -> None:
    async def work(runtime: LocalRuntime) -> None:
        order: list[int] = []

        async def take(subject: ElasticPool, number: int) -> None:
            async with subject.lease():
                order.append(number)
                await asyncio.sleep(0)

        async with pool(runtime, Limits(min=1, max=1)) as subject:
            await asyncio.gather(*(take(subject, number) for number in range(20)))
        assert order == list(range(20))

    run(work)


def test_a_slot_is_a_place_in_a_worker() -> None:
    async def work(runtime: LocalRuntime) -> None:
        async with pool(runtime, Limits(min=2, max=2, slots=3)) as subject:
            leases = [subject.lease(wait_s=0.1) for _ in range(7)]
            handles = [await lease.__aenter__() for lease in leases[:6]]
            assert sorted(handles.count(handle) for handle in set(handles)) == [3, 3], "the least laden first"
            with pytest.raises(DeadlinePassed, match="pool: lease"):
                await leases[6].__aenter__()
            for lease in leases[:6]:
                await lease.__aexit__(None, None, None)
            assert subject.stats().num_leased == 0

    run(work)


@pytest.mark.slow
def test_a_worker_that_goes_finishes_first() -> None:
    async def work(runtime: LocalRuntime) -> None:
        async with pool(runtime) as subject:
            long = [asyncio.create_task(subject.call("nap", 3.0, deadline_s=FAST_S)) for _ in range(2)]
            await until(lambda: subject.stats().num_leased == 2)
            # Alone they would not keep two: their ages are the service times, but nobody arrives any more.
            await until(lambda: len(runtime.handles()) == subject.stats().size + 1)
            assert subject.stats().num_leased == 2
            assert await asyncio.gather(*long) == [3.0, 3.0]
            await until(lambda: len(runtime.handles()) == 1)

    run(work)


@pytest.mark.parametrize("how", ["dies", "dies idle", "hangs"])
def test_the_dead_and_the_hung_are_replaced(how: str) -> None:
    async def work(runtime: LocalRuntime) -> None:
        async with pool(runtime, Limits(min=1, max=1), placement=Placement.PROCESS) as subject:
            (first,) = runtime.handles()
            if how == "dies":
                with pytest.raises(RoleDied):
                    await subject.call("die", deadline_s=FAST_S)
            elif how == "hangs":
                with pytest.raises(DeadlinePassed):
                    await subject.call("sleep", 60.0, deadline_s=0.2)
            else:
                os.kill(runtime.status(first).pid or 0, signal.SIGKILL)
                await until(lambda: subject.stats().num_replaced == 1)
            assert await subject.call("add", 1, deadline_s=FAST_S) == 1
            await until(lambda: len(runtime.handles()) == 1)
            assert runtime.handles() != (first,)
            assert subject.stats().num_replaced == 1
            assert runtime.status(first).state is RoleState.DEAD

    run(work)


def test_a_worker_of_several_slots_is_replaced_when_one_call_hangs() -> None:
    async def work(runtime: LocalRuntime) -> None:
        async with pool(runtime, Limits(min=1, max=1, slots=3)) as subject:
            with pytest.raises(DeadlinePassed):
                await subject.call("nap", 60.0, deadline_s=0.1)
            await until(lambda: subject.stats().size == 1)
            assert subject.stats().num_replaced == 1
            assert await subject.call("add", 1, deadline_s=FAST_S) == 1

    run(work)


def test_a_worker_that_is_replaced_in_peace_finishes_first() -> None:
    async def work(runtime: LocalRuntime) -> None:
        async with pool(runtime, Limits(min=1, max=1, slots=2)) as subject:
            (first,) = subject.handles()
            long = asyncio.create_task(subject.call("nap", 0.5, deadline_s=FAST_S))
            await until(lambda: subject.stats().num_leased == 1)
            subject.replace(first, hard=False)
            subject.replace(first, hard=False)  # it is on its way already
            await until(lambda: len(subject.handles()) == 1)
            assert not long.done() and subject.handles() != (first,)
            assert await long == 0.5
            await until(lambda: len(runtime.handles()) == 1)
            assert (subject.stats().size, subject.stats().num_replaced) == (1, 1)

    run(work)


def test_who_leaves_the_queue_takes_no_worker_along() -> None:
    async def work(runtime: LocalRuntime) -> None:
        async with pool(runtime, Limits(min=1, max=1)) as subject:
            for delay_s in (0.0, 0.01, 0.02, 0.03):
                tasks = [asyncio.create_task(subject.call("nap", 0.01, deadline_s=FAST_S)) for _ in range(20)]
                await asyncio.sleep(delay_s)
                for task in tasks[::2]:
                    task.cancel()
                done = await asyncio.gather(*tasks, return_exceptions=True)
                assert done[1::2] == [0.01] * 10
            assert subject.stats().num_leased == 0
            assert subject.stats().load.num_waiting == 0

    run(work)


def test_an_error_of_the_caller_costs_no_worker() -> None:
    async def work(runtime: LocalRuntime) -> None:
        async with pool(runtime) as subject:
            (first,) = runtime.handles()
            with pytest.raises(UserError):
                await subject.call("refuse", deadline_s=FAST_S)
            with pytest.raises(KeyError):
                async with subject.lease():
                    raise KeyError
            assert await subject.call("add", 1, deadline_s=FAST_S) == 1
            assert runtime.handles() == (first,)

    run(work)


def test_workers_that_cannot_start_are_told_of() -> None:
    async def work(runtime: LocalRuntime) -> None:
        with pytest.raises(UserError, match=r"^data\.txt: no such file"):
            async with pool(runtime, role=lambda: Refusing("data.txt")):
                pass
        with pytest.raises(Exception, match="KeyError"):
            async with pool(runtime, Limits(min=3, max=3), role=Failing):
                pass
        assert runtime.handles() == ()

    run(work)


@pytest.mark.slow
@pytest.mark.parametrize("error", [UserError("data.txt: no such file"), RoleDied("pool", "no memory")])
def test_workers_that_cannot_be_added_are_not_tried_all_the_time(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool wants to grow at every beat, and the first worker works on."""
    monkeypatch.setattr("stretto.runtime.pool._BEAT_S", 0.001)
    num_starts = 0

    async def work(runtime: LocalRuntime) -> None:
        spawn = runtime.spawn

        async def start(role: Any, *args: Any, **options: Any) -> Any:
            nonlocal num_starts
            num_starts += 1
            if num_starts > 1:
                raise error
            return await spawn(role, *args, **options)

        monkeypatch.setattr(runtime, "spawn", start)
        async with pool(runtime, Limits(min=1, max=2, wait_aim_s=0.05, window_s=0.4, patience_s=0.4)) as subject:
            calls = [asyncio.create_task(subject.call("nap", 0.05, deadline_s=FAST_S)) for _ in range(30)]
            await asyncio.gather(*calls)
            assert subject.error is None and len(subject.handles()) == 1
        assert 1 < num_starts <= (2 if isinstance(error, UserError) else 8)

    run(work)


def test_a_pool_fails_if_its_last_worker_leaves_and_no_other_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(runtime: LocalRuntime) -> None:
        spawn, can_start = runtime.spawn, True

        async def start(role: Any, *args: Any, **options: Any) -> Any:
            if not can_start:
                raise UserError("data.txt: no such file")
            return await spawn(role, *args, **options)

        monkeypatch.setattr(runtime, "spawn", start)
        async with pool(runtime, Limits(min=1, max=1)) as subject, subject.lease() as leaving:
            can_start = False
            subject.replace(leaving, hard=False)
            with pytest.raises(UserError, match=r"^data\.txt: no such file"):
                async with subject.lease(wait_s=5.0):
                    pass

    run(work)


def test_a_pool_whose_workers_die_again_and_again_fails() -> None:
    async def work(runtime: LocalRuntime) -> None:
        async with pool(
            runtime, Limits(min=1, max=2), placement=Placement.PROCESS, restarts=1, window_s=60.0
        ) as subject:
            for _ in range(3):
                with pytest.raises(RoleDied):
                    await subject.call("die", deadline_s=FAST_S)
            with pytest.raises(RoleDied, match="after 2 restarts within 60 s"):
                await subject.call("add", 1, deadline_s=FAST_S)

    run(work)


def test_closing_tells_those_who_wait() -> None:
    async def work(runtime: LocalRuntime) -> None:
        subject = pool(runtime, Limits(min=1, max=1))
        async with subject:
            tasks = [asyncio.create_task(subject.call("nap", 60.0, deadline_s=90.0)) for _ in range(3)]
            await until(lambda: subject.stats().num_leased == 1)
        for failed in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(failed, RoleDied)
        assert subject.stats().num_replaced == 0 and not runtime.handles(), "a closed pool hires nobody"
        with pytest.raises(RoleDied, match="closed"):
            await subject.call("nap", 0.0, deadline_s=FAST_S)

    run(work)


@pytest.mark.parametrize(
    ("rate", "service_s", "slots", "workers"),
    [(0.0, 1.0, 1, 1), (10.0, 0.5, 1, 10), (10.0, 0.51, 1, 11), (10.0, 0.5, 4, 3), (1000.0, 1.0, 1, 50)],
)
def test_a_quiet_queue_is_sized_by_littles_law(rate: float, service_s: float, slots: int, workers: int) -> None:
    limits = Limits(min=1, max=50, utilisation=0.5, slots=slots)
    for size in (1, 7, 50):
        assert target_size(Load(rate, service_s, 0.0, 0), size, limits) == workers


def test_who_waits_too_long_is_added_for() -> None:
    calm = Load(4.0, 0.5, p95_wait_s=1.0, num_waiting=20)
    late = Load(4.0, 0.5, p95_wait_s=1.1, num_waiting=20)
    assert target_size(calm, 4, SIZING) == 4
    assert target_size(late, 4, SIZING) == 2 + 10, "2 for the arrivals, 10 to do 20 x 0.5 s in 1 s"
    assert target_size(late, 30, SIZING) == 31, "those there are do not suffice"
    assert target_size(Load(0.0, 0.0, 9.0, 3), 2, SIZING) == 3, "nothing has ended yet"
    assert target_size(Load(4.0, 0.5, p95_wait_s=9.0, num_waiting=0), 4, SIZING) == 4, "the queue is over"


@given(
    rate=st.floats(0, 1e4),
    service_s=st.floats(0, 1e3),
    wait_s=st.floats(0, 1e3),
    waiting=st.integers(0, 10_000),
    size=st.integers(0, 60),
)
def test_the_target_keeps_within_its_limits_and_never_below_the_law(
    rate: float, service_s: float, wait_s: float, waiting: int, size: int
) -> None:
    target = target_size(Load(rate, service_s, wait_s, waiting), size, SIZING)
    assert SIZING.min <= target <= SIZING.max
    assert target == SIZING.max or target * SIZING.utilisation >= rate * service_s * (1 - 1e-6)


@pytest.mark.parametrize(
    ("targets", "settled"),
    [
        ([(99.0, 9)], 9),
        ([(99.0, 2)], 5),
        ([(94.0, 2), (96.0, 4), (99.0, 2)], 4),
        ([(94.0, 9), (96.0, 2), (99.0, 3)], 3),
        ([(94.0, 2), (96.0, 8), (99.0, 2)], 5),
    ],
)
def test_workers_go_after_a_time_of_patience_only(targets: list[tuple[float, int]], settled: int) -> None:
    assert settled_size(targets, size=5, now_s=100.0, patience_s=5.0) == settled


def test_the_percentile_is_the_nearest_rank() -> None:
    assert percentile([], 0.95) == 0.0
    assert percentile(range(1, 101), 0.95) == 95
    assert percentile([7.0], 0.5) == 7.0
    assert percentile([3, 1, 2], 1.0) == 3


def test_what_left_the_window_is_not_measured() -> None:
    turns = [Turn(float(second), second + 0.25, second + 0.75) for second in range(20)]
    load = measure(turns, 20.0, 10.0)
    assert load == Load(arrivals_per_s=1.0, mean_service_s=0.5, p95_wait_s=0.25, num_waiting=0)
    assert measure(turns, 100.0, 10.0) == Load(0.0, 0.0, 0.0, 0)


def test_those_who_are_not_done_are_measured() -> None:
    turns = [Turn(0.0, 0.0, 1.0), Turn(0.0, 1.0), Turn(2.0), Turn(3.0, ended_s=4.0)]
    load = measure(turns, 6.0, 10.0)
    assert math.isclose(load.mean_service_s, 3.0), "one took 1 s, the other has taken 5 s"
    assert (load.p95_wait_s, load.num_waiting) == (4.0, 1), "one waits, another has left"
