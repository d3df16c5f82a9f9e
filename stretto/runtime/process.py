"""A role in a process of its own: the driver's side (`RoleProcess`) and the process's (`main`).

The driver holds one listening socket for the role, which each incarnation inherits: callers keep the address, and those
who connect between two incarnations wait in the socket's queue. A socket pair beside it is for the driver alone: over it
the role is started, counted, drained and closed. The process ends by itself when its driver does.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError
from stretto.runtime.caller import LocalCaller
from stretto.runtime.host import CLOSE_S, CONSTRUCTOR, Counts, Host, Worker, build
from stretto.runtime.peer import Connection, accept, serve
from stretto.runtime.runtime import DeadlinePassed, RoleDied, RoleError
from stretto.runtime.store import Store

_CONTROL = "control"
"""What the driver's own connection asks."""
_BEAT_S = 0.5
"""Between two looks at a role's counts, and at whether the driver lives."""
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from stretto.runtime.process import main; main(*sys.argv[2:])"


@dataclass(frozen=True, slots=True)
class Spec:
    """All that a process needs to become a role."""

    id: str
    name: str
    work: bytes
    """Pickled (role, args)."""
    folder: str
    """The runtime's: of its store."""


class RoleProcess:
    """One incarnation, as the driver sees it. Belongs to the driver's loop."""

    def __init__(self, spec: Spec, listener: socket.socket):
        self._spec = spec
        self._listener = listener
        self._process: Process | None = None
        self._control: Connection | None = None
        self._beat: asyncio.Task[None] | None = None
        self._is_cleared = False
        self.counts = Counts(0, 0.0, 0)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, deadline_s: float) -> None:
        """Start the process and wait for the role's constructor; a failure leaves nothing behind.

        Raises:
            UserError, RoleError, DeadlinePassed, RoleDied: as `Runtime.spawn`.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._start()
        except TimeoutError:
            await self.kill()
            raise DeadlinePassed(self._spec.name, CONSTRUCTOR, deadline_s) from None
        except RoleDied:
            raise RoleDied(self._spec.name, await self.kill()) from None
        except BaseException:
            await self.kill()
            raise
        self._beat = asyncio.create_task(self._count())

    async def wait(self) -> str:
        """Wait for the process to end, and end what it started and left; returns why it did."""
        assert self._process is not None, "never started"
        code = await self._process.wait()
        if not self._is_cleared:
            self._is_cleared = True
            self._signal_all()
            if self._beat is not None:
                self._beat.cancel()
            if self._control is not None:
                await self._control.close()
        if code >= 0:
            return f"its process ended by itself, with exit code {code}"
        return f"its process was killed by {signal.Signals(-code).name}"

    async def kill(self) -> str:
        """By force, with all that it started; returns why it ended."""
        if self._process is None:
            return "its process could not be started"
        if self._process.returncode is None:
            self._signal_all()
        return await self.wait()

    async def drain(self) -> None:
        await self._ask("drain")

    async def close(self) -> None:
        """Let the role close itself, then end the process; by force if it takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * CLOSE_S):
                with suppress(RoleDied):  # it may be gone before its answer is
                    await self._ask("close")
                await self.wait()
        await self.kill()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            descriptors = [theirs.fileno(), self._listener.fileno()]
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, descriptors)),
                stdin=DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # so that it can be killed with all that it started, and Ctrl-C is the driver's
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control = Connection(ours, self._spec.name)
        error = await self._ask("start", self._spec)
        if error is not None:
            raise error

    def _signal_all(self) -> None:
        assert self._process is not None, "never started"
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _ask(self, method: str, *args: Any) -> Any:
        assert self._control is not None, "never started"
        return await self._control.call(_CONTROL, method, args, {})

    async def _count(self) -> None:
        with suppress(RoleDied):  # `wait` tells
            while True:
                await asyncio.sleep(_BEAT_S)
                self.counts = await self._ask("counts")


class _Control:
    """The role that the driver alone calls, in the role's process."""

    def __init__(self, listener: socket.socket, worker: Worker):
        self._listener = listener
        self._worker = worker
        self._hosts: dict[str, Host] = {}
        self._host: Host | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self, spec: Spec) -> Exception | None:
        """What the constructor raised; None: it stands."""
        loop = asyncio.get_running_loop()
        host = self._hosts[spec.id] = self._host = Host(spec.name, loop, self._worker)
        caller = LocalCaller(self._hosts, Store(Path(spec.folder)))

        def make() -> Any:
            role, args = pickle.loads(spec.work)
            return build(role, args, caller)

        try:
            await host.start(make)
        except (UserError, RoleError) as error:
            return error
        gc.freeze()  # the collector would look through torch's modules again and again while the role works
        self._accepting = asyncio.create_task(accept(self._listener, self._hosts))
        return None

    async def counts(self) -> Counts:
        assert self._host is not None, "never started"
        return self._host.counts()

    async def drain(self) -> None:
        assert self._host is not None, "never started"
        await self._host.drain()

    async def close(self) -> None:
        if self._host is not None:
            self._host.end("it has been closed")
            await self._host.close()
        self._worker.stop()


def main(control: str, listener: str) -> None:
    """The process. Its main thread is the role's own, so that alarms and signal handlers work there.

    Args:
        control: descriptor of the socket to the driver.
        listener: descriptor of the role's own.
    """
    threading.Thread(target=_watch_driver, args=(os.getppid(),), daemon=True).start()
    worker = Worker()
    serving = _serve_driver(_inherited(control), _inherited(listener), worker)
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    worker.run()


def _inherited(descriptor: str) -> socket.socket:
    sock = socket.socket(fileno=int(descriptor))
    sock.set_inheritable(False)  # a program that the role runs must not keep its callers waiting
    sock.setblocking(False)
    return sock


async def _serve_driver(control: socket.socket, listener: socket.socket, worker: Worker) -> None:
    host = Host(_CONTROL, asyncio.get_running_loop(), None)
    await host.start(lambda: _Control(listener, worker))
    await serve(control, {_CONTROL: host})
    _die()  # the driver has gone


def _watch_driver(driver: int) -> None:
    """Its end of the socket may live on in a process that it forked."""
    while os.getppid() == driver:
        time.sleep(_BEAT_S)
    _die()


def _die() -> None:
    os.killpg(0, signal.SIGKILL)


def pickled(role: Callable[..., Any], args: Sequence[Any], name: str) -> bytes:
    """`Spec.work`.

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
