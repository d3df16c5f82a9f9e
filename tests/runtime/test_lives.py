"""One contract, every runtime: how roles begin, end, and begin again."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from stretto.base.errors import UserError
from stretto.runtime.runtime import (
    DeadlinePassed,
    Placement,
    Restarts,
    RoleDied,
    RoleError,
    RoleState,
    Runtime,
)
from tests.runtime.roles import Asker, Closing, Failing, Hanging, OnceOnly, Refusing, Worker
from tests.runtime.stages import FAST_S, Stage, concurrent, everywhere, is_running, persistently, processes, until


@everywhere
def test_a_constructor_that_fails_leaves_nothing(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        with pytest.raises(UserError, match=r"^data\.txt: no such file; name one$"):
            await stage.spawn(runtime, Refusing, "data.txt")
        with pytest.raises(RoleError) as caught:
            await stage.spawn(runtime, Failing)
        assert (caught.value.kind, caught.value.method) == ("KeyError", "__init__")
        assert runtime.handles() == ()
        await stage.spawn(runtime, functools.partial(Worker, start=2))

    stage.run(work)


@concurrent
def test_a_constructor_that_hangs_meets_the_deadline(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        with pytest.raises(DeadlinePassed, match="subject: __init__ has not answered"):
            await stage.spawn(runtime, Hanging, deadline_s=3.0 if stage.kind == "ray" else 0.5)
        assert runtime.handles() == ()

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


@pytest.mark.slow
@processes
def test_large_arguments_are_there_at_every_restart(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime, functools.partial(Worker, np.ones(1 << 18)), restarts=3)
        pids = [(await persistently(runtime, handle, "where"))[0]]
        for _ in range(3):
            with pytest.raises(RoleDied):
                await runtime.call(handle, "die", deadline_s=FAST_S)
            pids.append((await persistently(runtime, handle, "where"))[0])
        assert len(set(pids)) == 4

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


@pytest.mark.slow
@processes
def test_a_restart_whose_constructor_fails_counts(stage: Stage, tmp_path: Path) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime, OnceOnly, str(tmp_path / "was here"), restarts=2)
        pid = await runtime.call(handle, "pid", deadline_s=FAST_S)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: runtime.status(handle).state is RoleState.DEAD)

    stage.run(work)


@processes
def test_relative_paths_mean_the_same_in_a_role(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(runtime: Runtime) -> None:
        monkeypatch.chdir(tmp_path)
        closing = await stage.spawn(runtime, Closing, "left here")
        await runtime.kill(closing)
        assert (tmp_path / "left here").read_text() == "closed"

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


def test_restarts_are_counted_within_a_window_and_slow_down_while_they_are_quick() -> None:
    now_s = 0.0
    again = Restarts(4, window_s=100.0, clock=lambda: now_s)
    assert str(again) == "4 restarts within 100 s"
    pauses_s = []
    for _ in range(3):
        pauses_s.append(again.next_pause_s())
        again.began()
        now_s += 1.0
    assert pauses_s == [0.1, 0.2, 0.4], "each worked for a second only"
    now_s += 20.0
    assert again.next_pause_s() == 0.0, "it worked for long"
    assert again.next_pause_s() is None, "the window is full"
    now_s = 100.0
    assert again.next_pause_s() == 0.1, "the first restart has left the window, and nothing worked since the last one"
    assert again.next_pause_s() is None
    assert Restarts(0).next_pause_s() is None


def test_the_pause_has_a_limit() -> None:
    again = Restarts(20, clock=lambda: 0.0)
    assert [again.next_pause_s() for _ in range(11)][-3:] == [25.6, 30.0, 30.0]


@pytest.mark.slow
@processes
def test_the_call_after_one_that_met_a_death_waits_for_the_next_incarnation(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime, Worker, 5, restarts=3)
        for _ in range(2):
            with pytest.raises(RoleDied):
                await runtime.call(handle, "die", deadline_s=FAST_S)
            assert await runtime.call(handle, "add", 1, deadline_s=3 * FAST_S) == 6

    stage.run(work)


@processes
def test_the_last_words_of_a_role_name_the_limit(stage: Stage) -> None:
    async def work(runtime: Runtime) -> None:
        handle = await stage.spawn(runtime, Worker, 5, restarts=1, window_s=60.0)
        for _ in range(2):
            with pytest.raises(RoleDied):
                await persistently(runtime, handle, "echo", 1)
                await runtime.call(handle, "die", deadline_s=FAST_S)
        await until(lambda: runtime.status(handle).state is RoleState.DEAD)
        assert runtime.status(handle).why.endswith(", after 1 restart within 60 s")

    stage.run(work)
