"""What only the local runtime promises: no torch, no process left behind, the role's main thread."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.base.errors import UserError
from stretto.runtime.local import LocalRuntime, open_runtime
from stretto.runtime.runtime import Placement, RoleDied, RoleState, to_end
from tests.runtime.roles import Asker, Worker
from tests.runtime.stages import is_running

ROOT = Path(__file__).resolve().parents[2]
FAST_S = 20.0


def run(work: Callable[[LocalRuntime], Awaitable[None]], folder: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), LocalRuntime() as runtime:
            await work(runtime)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        asyncio.run(main())
    assert list(folder.iterdir()) == [], "sockets go with their runtime"


def wait_until_gone(pids: list[int]) -> None:
    for _ in range(400):
        if not any(is_running(pid) for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {[pid for pid in pids if is_running(pid)]}")


def test_a_process_is_bare_and_its_main_thread_the_roles(tmp_path: Path) -> None:
    async def work(runtime: LocalRuntime) -> None:
        handle = await runtime.spawn(Worker, name="bare", placement=Placement.PROCESS)
        for name in ("torch", "ray", "pydantic"):
            assert not await runtime.call(handle, "imported", name, deadline_s=FAST_S)
        assert await runtime.call(handle, "ring_alarm", deadline_s=FAST_S)
        assert (await runtime.call(handle, "where", deadline_s=FAST_S))[1] == "MainThread"

    run(work, tmp_path)


@pytest.mark.parametrize("how", ["kill", "hard", "die"])
def test_what_a_role_started_goes_with_it(how: str, tmp_path: Path) -> None:
    pids: list[int] = []

    async def work(runtime: LocalRuntime) -> None:
        handle = await runtime.spawn(Worker, name="parent", placement=Placement.PROCESS)
        pids.append(await runtime.call(handle, "start_program", deadline_s=FAST_S))
        if how == "die":
            with pytest.raises(RoleDied):
                await runtime.call(handle, "die", deadline_s=FAST_S)
        else:
            await runtime.kill(handle, hard=how == "hard")
        async with asyncio.timeout(FAST_S):
            while runtime.status(handle).state is not RoleState.DEAD:
                await asyncio.sleep(0.01)

    run(work, tmp_path)
    wait_until_gone(pids)


@pytest.mark.slow
def test_roles_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    program = """
        import asyncio, sys
        from stretto.runtime.local import LocalRuntime
        from stretto.runtime.runtime import Placement
        from tests.runtime.roles import Worker

        async def main():
            runtime = LocalRuntime()
            for busy in (False, True):
                handle = await runtime.spawn(Worker, name="role", placement=Placement.PROCESS)
                print(runtime.status(handle).pid, await runtime.call(handle, "start_program", deadline_s=20), flush=True)
                if busy:
                    runtime.cast(handle, "sleep", 600)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert driver.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in driver.stdout.readline().split()]
    assert len(pids) == 4
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_killed_role_comes_back_while_others_call_it(tmp_path: Path) -> None:
    """At random points: every call is answered, with its own answer, or fails with `RoleDied`; none hangs."""

    async def work(runtime: LocalRuntime) -> None:
        random = np.random.default_rng(0)
        handle = await runtime.spawn(Worker, name="mortal", placement=Placement.PROCESS, restarts=12)
        asker = await runtime.spawn(Asker, handle, name="asker", placement=Placement.THREAD)
        is_over, outcomes = asyncio.Event(), {"answered": 0, "died": 0}

        async def use(number: int) -> None:
            while not is_over.is_set():
                try:
                    found = await runtime.call(asker, "ask", "echo", number, deadline_s=FAST_S)
                    assert found == number
                    outcomes["answered"] += 1
                except Exception as error:
                    assert "RoleDied" in str(error), error  # noqa: PT017
                    outcomes["died"] += 1
                await asyncio.sleep(0.001)

        users = [asyncio.create_task(use(number)) for number in range(8)]
        for _ in range(4):
            await asyncio.sleep(float(random.uniform(0, 0.2)))
            if (pid := runtime.status(handle).pid) is not None:
                with suppress(ProcessLookupError):  # the last kill may not have been noticed yet
                    os.kill(pid, signal.SIGKILL)
            before = outcomes["answered"]
            while outcomes["answered"] < before + 8:
                await asyncio.sleep(0.01)
        is_over.set()
        await asyncio.gather(*users)
        assert outcomes["answered"] >= 32

    run(work, tmp_path)


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, failures = asyncio.create_subprocess_exec, [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))]

    async def start(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await whole(*args, **options)

    async def work(runtime: LocalRuntime) -> None:
        handle = await runtime.spawn(Worker, name="mortal", placement=Placement.PROCESS, restarts=2)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        await runtime.restart(handle)
        assert not failures and runtime.status(handle).restarts == 2
        failures.append(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
        with pytest.raises(RoleDied, match=r"other: its process could not be started: .* memory"):
            await runtime.spawn(Worker, name="other", placement=Placement.PROCESS)

    run(work, tmp_path)


def test_a_role_of_the_program_itself_is_refused_for_a_process(tmp_path: Path) -> None:
    role = type("Inline", (), {"__module__": "__main__"})

    async def work(runtime: LocalRuntime) -> None:
        with pytest.raises(TypeError, match="put it in a module"):
            await runtime.spawn(role, name="inline", placement=Placement.PROCESS)
        with pytest.raises(TypeError, match="cannot be sent"):
            await runtime.spawn(lambda: None, name="inline", placement=Placement.PROCESS)
        assert runtime.handles() == ()

    run(work, tmp_path)


@pytest.mark.slow
def test_a_ray_address_that_does_not_answer_is_one_line() -> None:
    pytest.importorskip("ray")
    with pytest.raises(
        UserError, match=r"^--address 127\.0\.0\.1:1: no Ray cluster answers there \(.*; start one"
    ) as caught:
        asyncio.run(open_runtime("ray", "127.0.0.1:1"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_a_signal_raises_ends_the_work_of_a_notebook(stop: type[BaseException]) -> None:
    ended = []

    def handle(number: int, _: object) -> None:
        raise stop

    def waits() -> bool:
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
        return [frame.name for frame in stack[-2:]] == ["result", "wait"]

    async def work() -> None:
        while not waits():
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        ended.append("done")

    async def notebook() -> None:
        to_end(work())

    before = signal.signal(signal.SIGTERM, handle)
    try:
        with pytest.raises(stop):
            asyncio.run(notebook())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == ["cancelled"]
