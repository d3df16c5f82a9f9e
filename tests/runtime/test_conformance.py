"""One contract, every runtime: what a driver and a role may count on."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from stretto.base.errors import UserError
from stretto.runtime.local import LocalRuntime
from stretto.runtime.runtime import (
    DeadlinePassed,
    Handle,
    NoRoom,
    Placement,
    RefLost,
    Resources,
    RoleDied,
    RoleError,
    RoleState,
    Runtime,
)
from tests.runtime.roles import Asker, Closing, Failing, Hanging, OnceOnly, Refusing, Worker

FAST_S = 20.0
"""A deadline that is not meant to pass, on a machine that stalls now and then."""


@dataclass(frozen=True)
class Stage:
    """A runtime and where its roles are put."""

    kind: str
    placement: Placement

    @property
    def has_processes(self) -> bool:
        return self.placement is Placement.PROCESS

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Runtime]:
        if self.kind == "local":
            async with LocalRuntime(Resources(cpus=2)) as runtime:
                yield runtime
        else:
            from stretto.runtime.ray import RayRuntime

            async with await RayRuntime.open("local") as runtime:
                yield runtime

    def run(self, work: Callable[[Runtime], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(120), self.open() as runtime:
                await work(runtime)

        asyncio.run(main())

    async def spawn(self, runtime: Runtime, role: Callable[..., Any] = Worker, *args: Any, **options: Any) -> Handle:
        return await runtime.spawn(role, *args, **{"name": "subject", "placement": self.placement, **options})


THREAD, PROCESS = Stage("local", Placement.THREAD), Stage("local", Placement.PROCESS)
ASYNC = Stage("local", Placement.ASYNC)
RAY = pytest.param(Stage("ray", Placement.PROCESS), id="ray", marks=pytest.mark.slow)
LOCAL = [pytest.param(THREAD, id="thread"), pytest.param(PROCESS, id="process")]
everywhere = pytest.mark.parametrize("stage", [pytest.param(ASYNC, id="async"), *LOCAL, RAY])
"""Where a sync method may hold up everything else."""
concurrent = pytest.mark.parametrize("stage", [*LOCAL, RAY])
processes = pytest.mark.parametrize("stage", [pytest.param(PROCESS, id="process"), RAY])


@pytest.fixture(scope="module", autouse=True)
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """One Ray for all tests that want it: it takes seconds to start."""
    if not any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items):
        yield
        return
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, object_store_memory=160 << 20, include_dashboard=False, logging_level="error")
    yield
    ray.shutdown()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(FAST_S):
        while not is_so():
            await asyncio.sleep(0.02)


async def persistently(runtime: Runtime, handle: Handle, method: str, *args: Any) -> Any:
    """Call until it is not met by a death."""
    while True:
        try:
            return await runtime.call(handle, method, *args, deadline_s=FAST_S)
        except RoleDied:
            assert runtime.status(handle).state is not RoleState.DEAD
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@everywhere
def test_a_role_keeps_its_state_and_answers(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime, Worker, 3, labels={"kind": "cpu"})
        assert await runtime.call(handle, "add", 4, deadline_s=FAST_S) == 7
        assert await runtime.call(handle, "add_slowly", num=1, seconds=0.0, deadline_s=FAST_S) == 8
        answers = await asyncio.gather(*(runtime.call(handle, "add", 1, deadline_s=FAST_S) for _ in range(50)))
        assert sorted(answers) == list(range(9, 59)), "sync methods run one at a time"
        status = runtime.status(handle)
        assert (status.state, status.labels, status.restarts) == (RoleState.ALIVE, {"kind": "cpu"}, 0)
        assert runtime.handles() == (handle,)
        pid, _ = await runtime.call(handle, "where", deadline_s=FAST_S)
        assert pid == status.pid
        assert (pid != os.getpid()) is stage.has_processes

    stage.run(work)


@concurrent
def test_async_methods_go_on_beside_a_sync_one(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime)
        busy = asyncio.create_task(runtime.call(handle, "sleep", 1.5, deadline_s=FAST_S))
        meeting = asyncio.create_task(runtime.call(handle, "meet", deadline_s=FAST_S))
        await asyncio.sleep(0.1)
        await runtime.call(handle, "release", deadline_s=FAST_S)
        assert await meeting
        assert not busy.done()
        assert await busy == 1.5

    stage.run(work)


@everywhere
def test_what_a_method_raises_reaches_the_caller(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime)
        for method in ("divide", "divide_later"):
            with pytest.raises(RoleError, match=r"subject: divide.* raised ZeroDivisionError") as caught:
                await runtime.call(handle, method, 1, deadline_s=FAST_S)
            assert caught.value.kind == "ZeroDivisionError"
            assert "return num / 0" in caught.value.trace
        with pytest.raises(UserError, match=r"^recipe.toml: steps: is negative; give a positive number$"):
            await runtime.call(handle, "refuse", deadline_s=FAST_S)
        for method in ("missing", "_private", "leave"):
            with pytest.raises(RoleError):
                await runtime.call(handle, method, deadline_s=FAST_S)
        assert await runtime.call(handle, "add", 1, deadline_s=FAST_S) == 1, "it lives on"

    stage.run(work)


@processes
def test_what_cannot_be_sent_is_an_error_of_its_own_call_only(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime)
        with pytest.raises(RoleError):
            await runtime.call(handle, "lock", deadline_s=FAST_S)
        with pytest.raises(TypeError):
            await runtime.call(handle, "echo", threading.Lock(), deadline_s=FAST_S)
        assert await runtime.call(handle, "add", 1, deadline_s=FAST_S) == 1

    stage.run(work)


@everywhere
def test_a_constructor_that_fails_leaves_nothing(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        with pytest.raises(UserError, match=r"^data\.txt: no such file; name one$"):
            await stage.spawn(runtime, Refusing, "data.txt", resources=Resources(cpus=1))
        with pytest.raises(RoleError) as caught:
            await stage.spawn(runtime, Failing, resources=Resources(cpus=1))
        assert (caught.value.kind, caught.value.method) == ("KeyError", "__init__")
        assert runtime.handles() == ()
        await stage.spawn(runtime, functools.partial(Worker, start=2), resources=Resources(cpus=2))  # all there is

    stage.run(work)


@concurrent
def test_a_constructor_that_hangs_meets_the_deadline(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        with pytest.raises(DeadlinePassed, match="subject: __init__ has not answered"):
            await stage.spawn(runtime, Hanging, deadline_s=3.0 if stage.kind == "ray" else 0.5)
        assert runtime.handles() == ()

    stage.run(work)


@concurrent
def test_more_than_there_is_is_refused(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        with pytest.raises(NoRoom, match="subject: asks for 64"):
            await stage.spawn(runtime, resources=Resources(cpus=64))
        with pytest.raises(NoRoom, match=r"gpu|GPU"):
            await stage.spawn(runtime, resources=Resources(gpus=1))

    stage.run(work)


@concurrent
def test_a_deadline_passes_for_the_caller_alone(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime)
        start = time.monotonic()
        with pytest.raises(DeadlinePassed, match=r"subject: sleep has not answered within 0\.2 s"):
            await runtime.call(handle, "sleep", 3.0, deadline_s=0.2)
        assert time.monotonic() - start < 3.0
        await until(lambda: runtime.status(handle).num_calls == 1)  # the thread sleeps on
        assert await runtime.call(handle, "add", 1, deadline_s=FAST_S) == 1

    stage.run(work)


@everywhere
def test_who_leaves_cancels(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime)
        with pytest.raises(DeadlinePassed):
            await runtime.call(handle, "nap", 60.0, deadline_s=0.3)
        leaving = asyncio.create_task(runtime.call(handle, "nap", 60.0, deadline_s=FAST_S))
        await asyncio.sleep(0.3)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        async with asyncio.timeout(FAST_S):
            while await runtime.call(handle, "read_log", deadline_s=FAST_S) != ["cancelled", "cancelled"]:
                await asyncio.sleep(0.05)

    stage.run(work)


@everywhere
def test_a_key_makes_a_repeated_call_one(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime)
        with pytest.raises(DeadlinePassed):
            await runtime.call(handle, "add_slowly", 5, 1.0, deadline_s=0.3, key="a")
        both = [runtime.call(handle, "add_slowly", 5, 1.0, deadline_s=FAST_S, key="a") for _ in range(2)]
        assert await asyncio.gather(*both) == [5, 5]
        assert await runtime.call(handle, "add_slowly", 5, 0.0, deadline_s=FAST_S, key="b") == 10
        for _ in range(2):
            with pytest.raises(RoleError):
                await runtime.call(handle, "divide", 1, deadline_s=FAST_S, key="c")

    stage.run(work)


@everywhere
def test_casts_are_done_or_counted(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime)
        runtime.cast(handle, "note", 1)
        runtime.cast(handle, "divide", 1)
        runtime.cast(handle, "refuse")
        async with asyncio.timeout(FAST_S):
            while await runtime.call(handle, "read_log", deadline_s=FAST_S) != [1]:
                await asyncio.sleep(0.02)
        await until(lambda: runtime.status(handle).failed_casts == 2)
        await runtime.kill(handle, hard=True)
        runtime.cast(handle, "note", 2)

    stage.run(work)


@everywhere
def test_roles_use_the_handles_they_are_given(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        worker = await stage.spawn(runtime, Worker, 1, name="worker")
        asker = await stage.spawn(runtime, Asker, worker, name="asker")
        elsewhere = await runtime.spawn(Asker, worker, name="elsewhere", placement=Placement.THREAD)
        for handle in (asker, elsewhere):
            total = await runtime.call(worker, "add", 1, deadline_s=FAST_S)
            assert await runtime.call(handle, "ask", "add", 1, deadline_s=FAST_S) == total + 1
            with pytest.raises(RoleError) as caught:
                await runtime.call(handle, "ask", "divide", 1, deadline_s=FAST_S)
            assert caught.value.name == handle.name
            assert "worker: divide raised ZeroDivisionError" in caught.value.message
            with pytest.raises(UserError, match=r"recipe\.toml"):
                await runtime.call(handle, "ask", "refuse", deadline_s=FAST_S)
            await runtime.call(handle, "tell", "note", handle.name, deadline_s=FAST_S)
        ask_itself = runtime.call(asker, "ask_this", elsewhere, "ask", "add", 1, deadline_s=FAST_S)
        assert await ask_itself == 6
        async with asyncio.timeout(FAST_S):
            while set(await runtime.call(worker, "read_log", deadline_s=FAST_S)) != {"asker", "elsewhere"}:
                await asyncio.sleep(0.02)
        await runtime.kill(worker)
        for handle in (asker, elsewhere):
            with pytest.raises(RoleError) as caught:
                await runtime.call(handle, "ask", "add", 1, deadline_s=FAST_S)
            assert caught.value.kind == "RoleDied"

    stage.run(work)


@concurrent
def test_large_arrays_travel_and_are_stored(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        worker = await stage.spawn(runtime, name="worker")
        asker = await stage.spawn(runtime, Asker, worker, name="asker")
        large = np.arange(3_000_000, dtype=np.float64)
        assert await runtime.call(worker, "mean", large, deadline_s=FAST_S) == large.mean()
        odd = {
            "cut": large[::7],
            "none": np.zeros((0, 3), np.int16),
            "small": np.arange(3),
            "turned": large.reshape(2, -1).T,
        }
        found = await runtime.call(asker, "ask", "echo", odd, deadline_s=FAST_S)
        assert all(
            [np.array_equal(found[name], value) and found[name].dtype == value.dtype for name, value in odd.items()]
        )
        ref = await runtime.call(asker, "store", large, deadline_s=FAST_S)
        assert await runtime.call(asker, "mean_of", ref, deadline_s=FAST_S) == large.mean()
        value = await runtime.get(ref, FAST_S)
        assert np.array_equal(value, large)
        assert not value.flags.writeable
        runtime.free(ref)
        runtime.free(ref)
        with pytest.raises(RefLost):
            await runtime.get(ref, FAST_S)
        assert value[-1] == large[-1], "who has it keeps it"

    stage.run(work)


@everywhere
def test_draining_finishes_and_takes_no_more(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime)
        asker = await stage.spawn(runtime, Asker, handle, name="asker")
        napping = asyncio.create_task(runtime.call(handle, "nap", 1.0, deadline_s=FAST_S))
        await asyncio.sleep(0.3)
        with pytest.raises(DeadlinePassed, match="drain"):
            await runtime.drain(handle, deadline_s=0.1)
        assert runtime.status(handle).state is RoleState.DRAINING
        for refused in (
            runtime.call(handle, "add", 1, deadline_s=FAST_S),
            runtime.call(asker, "ask", "add", 1, deadline_s=FAST_S),
        ):
            with pytest.raises((RoleDied, RoleError), match="draining"):
                await refused
        await runtime.drain(handle, deadline_s=FAST_S)
        assert napping.done() or await asyncio.wait_for(napping, 1.0) == 1.0

    stage.run(work)


@everywhere
@pytest.mark.parametrize("hard", [False, True])
def test_killing_fails_what_is_in_flight_and_is_final(stage: Stage, hard: bool, tmp_path: Path) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime, restarts=3)
        napping = asyncio.create_task(runtime.call(handle, "nap", 60.0, deadline_s=FAST_S))
        await asyncio.sleep(0.3)
        await runtime.kill(handle, hard=hard)
        with pytest.raises(RoleDied, match="subject"):
            await napping
        with pytest.raises(RoleDied):
            await runtime.call(handle, "add", 1, deadline_s=FAST_S)
        assert runtime.status(handle).state is RoleState.DEAD
        assert runtime.handles() == ()
        await runtime.kill(handle)
        path = tmp_path / str(hard)
        closing = await stage.spawn(runtime, Closing, str(path))
        pid = await runtime.call(closing, "pid", deadline_s=FAST_S)
        await runtime.kill(closing, hard=hard)
        assert path.exists() is not hard
        if stage.has_processes:
            await until(lambda: not is_running(pid))

    stage.run(work)


@processes
def test_a_killed_process_is_replaced(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime, Worker, 5, restarts=2)
        asker = await runtime.spawn(Asker, handle, name="asker", placement=Placement.PROCESS)
        assert await runtime.call(asker, "ask", "add", 1, deadline_s=FAST_S) == 6
        first = runtime.status(handle).pid
        assert first is not None
        napping = asyncio.create_task(runtime.call(handle, "nap", 60.0, deadline_s=FAST_S))
        await asyncio.sleep(0.3)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RoleDied):
            await napping
        assert await persistently(runtime, handle, "add", 1) == 6, "made afresh of the same arguments"
        await until(lambda: runtime.status(handle).restarts == 1 and runtime.status(handle).pid != first)
        async with asyncio.timeout(FAST_S):
            while True:
                try:
                    assert await runtime.call(asker, "ask", "add", 1, deadline_s=FAST_S) == 7
                    break
                except RoleError as error:
                    assert error.kind == "RoleDied"  # noqa: PT017
        for _ in range(2):
            with pytest.raises(RoleDied):
                await persistently(runtime, handle, "echo", 1)  # until it stands
                await runtime.call(handle, "die", deadline_s=FAST_S)
        await until(lambda: runtime.status(handle).state is RoleState.DEAD)
        assert runtime.status(handle).restarts == 2
        with pytest.raises(RoleDied):
            await runtime.call(handle, "add", 1, deadline_s=FAST_S)

    stage.run(work)


@concurrent
def test_a_role_that_hangs_is_restarted(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime, Worker, 5, restarts=1)
        with pytest.raises(DeadlinePassed):
            await runtime.call(handle, "sleep", 30.0, deadline_s=0.3)
        await runtime.restart(handle)
        assert await runtime.call(handle, "add", 1, deadline_s=FAST_S) == 6
        assert runtime.status(handle).restarts == 1
        with pytest.raises(RoleDied):
            await runtime.restart(handle)
        assert runtime.status(handle).state is RoleState.DEAD

    stage.run(work)


@processes
def test_a_restart_whose_constructor_fails_counts(stage: Stage, tmp_path: Path) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime, OnceOnly, str(tmp_path / "was here"), restarts=2)
        pid = await runtime.call(handle, "pid", deadline_s=FAST_S)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: runtime.status(handle).state is RoleState.DEAD)

    stage.run(work)


@concurrent
def test_closing_leaves_no_process(stage: Stage) -> None:
    pids: list[int] = []

    async def work(runtime: Runtime) -> None:
        for _ in range(2):
            handle = await stage.spawn(runtime)
            pids.append((await runtime.call(handle, "where", deadline_s=FAST_S))[0])
        runtime.cast(handle, "sleep", 2.0)  # it does not even listen

    stage.run(work)
    if stage.has_processes:
        psutil.wait_procs([psutil.Process(pid) for pid in pids if is_running(pid)], timeout=FAST_S)
        assert not any(is_running(pid) for pid in pids)
