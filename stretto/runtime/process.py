"""A role in a process of its own: the driver's side (`RoleProcess`) and the process's (`main`).

The driver holds one listening socket for the role, which each incarnation inherits: callers keep the address, and those
who connect between two incarnations wait in the socket's queue. A socket pair beside it is for the driver alone: over it
the role is started and closed. The process ends by itself when its driver does.

asyncio starts and watches the processes. `multiprocessing` would import the driver's main module into each, and hold up
the driver's loop while a process starts.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from stretto.base.errors import UserError
from stretto.runtime.actor import CLOSE_S, Actor, Worker
from stretto.runtime.connection import Connection, LocalCaller
from stretto.runtime.runtime import Handle, RoleDied, RoleError

BACKLOG = 1024
"""Callers that may wait while a role restarts."""
_CONTROL = "control"
"""What the driver's own connection asks."""
_BEAT_S = 0.5
"""Between two looks at whether the driver lives."""
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from stretto.runtime.process import main; main(*map(int, sys.argv[2:]))"


class RoleProcess:
    """One incarnation, as the driver sees it. Belongs to the driver's loop."""

    def __init__(self, handle: Handle, work: bytes, listener: socket.socket):
        """
        Args:
            work: `pickled` class and arguments.
            listener: on the handle's address.
        """
        self._handle = handle
        self._work = work
        self._listener = listener
        self._process: Process | None = None
        self._control: Connection | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait for the role's constructor.

        Raises:
            UserError, RoleError, RoleDied: as `Runtime.spawn`; whoever called it is to `kill`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._control = await _connected(ours, Connection(self._handle.name, {}))
            descriptors = (theirs.fileno(), self._listener.fileno())
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, descriptors), str(os.getpid())),
                stdin=DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # so that it can be killed with all that it started, and Ctrl-C is the driver's
            )
        error = await self._control.call(_CONTROL, "start", (self._handle.id, self._handle.name, self._work), {})
        if error is not None:
            raise error

    async def wait(self) -> str:
        """Wait for the process to end, and end what it started and left; returns why it did."""
        if self._process is None:
            return "its process could not be started"
        code = await self._process.wait()
        if self._control is not None:  # else it has been waited for before, and its number may be another's
            self._signal_all()
            self._control.close()
            self._control = None
        if code >= 0:
            return f"its process ended by itself, with exit code {code}"
        return f"its process was killed by {signal.Signals(-code).name}"

    async def kill(self) -> str:
        """By force, with all that it started; returns why it ended."""
        if self._process is not None and self._process.returncode is None:
            self._signal_all()
        return await self.wait()

    async def close(self) -> None:
        """Let the role close itself, then end the process; by force if it takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * CLOSE_S):
                with suppress(RoleDied):  # it may be gone before its answer is
                    if self._control is not None:
                        await self._control.call(_CONTROL, "close", (), {})
                await self.wait()
        await self.kill()

    def _signal_all(self) -> None:
        assert self._process is not None, "never started"
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class _Control:
    """The role that the driver alone calls, in the role's process."""

    def __init__(self, listener: socket.socket, worker: Worker):
        self._listener = listener
        self._worker = worker
        self._actor: Actor | None = None

    async def start(self, id: str, name: str, work: bytes) -> Exception | None:
        """What the constructor raised; None: it stands."""
        loop = asyncio.get_running_loop()
        self._actor = Actor(name, loop, self._worker)
        actors = {id: self._actor}
        try:
            await self._actor.start(lambda: pickle.loads(work), LocalCaller(actors))
        except (UserError, RoleError) as error:
            return error
        gc.freeze()  # the collector would look through torch's modules again and again while the role works
        await loop.create_unix_server(lambda: Connection(name, actors), sock=self._listener, backlog=BACKLOG)
        return None

    async def close(self) -> None:
        if self._actor is not None:
            self._actor.end("it has been closed")
            await self._actor.close()
        self._worker.stop()


def main(control: int, listener: int, driver: int) -> None:
    """The process. Its main thread is the role's own, so that alarms and signal handlers work there.

    Args:
        control: descriptor of the socket to the driver.
        listener: descriptor of the role's own.
        driver: its process.
    """
    threading.Thread(target=_watch_driver, args=(driver,), daemon=True).start()
    worker = Worker()
    serving = _serve_driver(_inherited(control), _inherited(listener), worker)
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    worker.run()


def _inherited(descriptor: int) -> socket.socket:
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)  # a program that the role runs must not keep its callers waiting
    return sock


async def _serve_driver(control: socket.socket, listener: socket.socket, worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    actor = Actor(_CONTROL, loop, None)
    await actor.start(lambda: (_Control, (listener, worker)), LocalCaller({}))
    await _connected(control, Connection(_CONTROL, {_CONTROL: actor}))
    await loop.create_future()  # for ever


def _watch_driver(driver: int) -> None:
    while os.getppid() == driver:
        time.sleep(_BEAT_S)
    os.killpg(0, signal.SIGKILL)


async def _connected(sock: socket.socket, connection: Connection) -> Connection:
    await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=sock)
    return connection


def pickled(role: Callable[..., Any], args: Sequence[Any], name: str) -> bytes:
    """For `RoleProcess`.

    Raises:
        TypeError: it cannot be sent to another process.
    """
    plain = getattr(role, "func", role)  # of a functools.partial
    if getattr(plain, "__module__", None) == "__main__":
        raise TypeError(
            f"{name}: {plain!r} is defined in the program itself; put it in a module, for a process to import"
        )
    try:
        return pickle.dumps((role, args), protocol=5)
    except Exception as error:
        raise TypeError(f"{name}: its class or arguments cannot be sent to a process: {error}") from error
