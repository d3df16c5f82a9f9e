"""One contract, every runtime: calls, casts, errors and deadlines."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from stretto.base.errors import UserError
from stretto.runtime.runtime import (
    DeadlinePassed,
    Placement,
    RoleError,
    RoleState,
    Runtime,
)
from tests.runtime.roles import Asker, Worker
from tests.runtime.stages import FAST_S, Stage, concurrent, everywhere, processes


@everywhere
def test_a_role_keeps_its_state_and_answers(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime, Worker, 3)
        assert await runtime.call(handle, "add", 4, deadline_s=FAST_S) == 7
        assert await runtime.call(handle, "add_slowly", num=1, seconds=0.0, deadline_s=FAST_S) == 8
        answers = await asyncio.gather(*(runtime.call(handle, "add", 1, deadline_s=FAST_S) for _ in range(50)))
        assert sorted(answers) == list(range(9, 59)), "sync methods run one at a time"
        status = runtime.status(handle)
        assert (status.state, status.restarts) == (RoleState.ALIVE, 0)
        assert runtime.handles() == (handle,)
        pid, _ = await runtime.call(handle, "where", deadline_s=FAST_S)
        assert pid == status.pid
        assert (pid != os.getpid()) is stage.has_processes

    stage.run(work)


@pytest.mark.slow
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
def test_work_is_done_once_on_every_machine(stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(runtime: Runtime) -> None:
        await runtime.on_all_machines(partial(Path.mkdir, tmp_path / "made"))
        assert not caplog.text and (tmp_path / "made").is_dir()
        await runtime.on_all_machines(partial(Path.mkdir, tmp_path / "made"))
        assert "File exists" in caplog.text

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
        with pytest.raises(UserError, match=r"^recipe.toml: steps: is negative; give a positive number$") as told:
            await runtime.call(handle, "refuse", deadline_s=FAST_S)
        assert told.value.exit_code == 3
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


@pytest.mark.slow
@concurrent
def test_a_deadline_passes_for_the_caller_alone(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime)
        start = time.monotonic()
        with pytest.raises(DeadlinePassed, match=r"subject: sleep has not answered within 0\.2 s"):
            await runtime.call(handle, "sleep", 3.0, deadline_s=0.2)
        assert time.monotonic() - start < 3.0
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
def test_casts_are_done_or_logged(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime)
        runtime.cast(handle, "note", 1)
        runtime.cast(handle, "divide", 1)
        runtime.cast(handle, "refuse")
        async with asyncio.timeout(FAST_S):
            while await runtime.call(handle, "read_log", deadline_s=FAST_S) != [1]:
                await asyncio.sleep(0.02)
        if not stage.has_processes:  # they write logs of their own
            async with asyncio.timeout(FAST_S):
                while len([text for text in caplog.messages if "failed" in text]) != 2:
                    await asyncio.sleep(0.02)
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
def test_large_arrays_travel(stage: Stage) -> None:
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

    stage.run(work)
