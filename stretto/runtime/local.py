"""The default runtime: one machine, nothing to install or to start. Roles are threads and processes of the driver.

For each role of a process the driver holds one listening socket, which every incarnation inherits: callers keep the
address, and those who connect between two incarnations wait in the socket's queue. A socket pair beside it is for the
driver alone: over it the role is started and closed. The process ends by itself when its driver does.

asyncio starts and watches the processes. `multiprocessing` would import the driver's main module into each, and hold up
the driver's loop while one starts.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError
from stretto.runtime.actor import CLOSE_S, Actor, Connection, LocalCaller, Worker
from stretto.runtime.runtime import (
    Handle,
    Placement,
    Role,
    RoleDied,
    RoleState,
    Runtime,
    RuntimeFailure,
    Work,
)

_BACKLOG = 1024
"""Callers that may wait while a role restarts."""
_CONTROL = "control"  # what the driver's own connection to a process asks
_QUICK_S, _PAUSE_S, _LONGEST_PAUSE_S = 1.0, 0.1, 5.0
"""A role that died so soon after its start is restarted after a pause, which doubles each time."""
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from stretto.runtime.local import main; main(*map(int, sys.argv[2:]))"


class _RoleThread:
    """One incarnation in the driver's process."""

    def __init__(self, actors: dict[str, Actor], caller: LocalCaller, handle: Handle, work: Work, has_thread: bool):
        """``actors``: of the process, by handle id; this one's is put in, and callers wait in it from now on."""
        self._actors, self._caller, self._handle, self._work = actors, caller, handle, work
        self._worker = Worker() if has_thread else None
        self._actor = actors[handle.id] = Actor(handle.name, self._worker)
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> int:  # as `_RoleProcess.start`
        if self._worker is not None:
            threading.Thread(target=self._worker.run, name=self._handle.name, daemon=True).start()
        await self._actor.start(lambda: self._work, self._caller)
        return os.getpid()

    async def wait(self) -> str:
        return await asyncio.shield(self._over)

    async def close(self) -> None:
        self._actor.end("it was ended")
        await self._actor.close()
        await self.kill()

    async def kill(self) -> str:
        """Whatever its thread does, it is left to it."""
        if not self._over.done():
            self._over.set_result("it was killed")
            self._actor.end("it was killed")
            del self._actors[self._handle.id]
            if self._worker is not None:
                self._worker.stop()
        return await self._over


class _RoleProcess:
    """One incarnation in a process of its own, as the driver sees it. Belongs to the driver's loop."""

    def __init__(self, handle: Handle, work: bytes, listener: socket.socket):
        """``listener``: on the handle's address."""
        self._handle, self._work, self._listener = handle, work, listener
        self._process: Process | None = None
        self._control: Connection | None = None

    async def start(self) -> int:
        """Wait for the role's constructor; returns the process's number.

        Raises:
            UserError, RoleError, RoleDied: as `Runtime.spawn`; whoever called it is to `kill`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            control = self._control = Connection(self._handle.name, {})
            await asyncio.get_running_loop().create_unix_connection(lambda: control, sock=ours)
            descriptors = (theirs.fileno(), self._listener.fileno())
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, descriptors), str(os.getpid())),
                stdin=DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # so that it can be killed with all that it started, and Ctrl-C is the driver's
            )
        try:
            error = await control.call(_CONTROL, "start", (self._handle.id, self._handle.name, self._work), {})
        except RoleDied:
            raise RoleDied(self._handle.name, await self.kill()) from None
        if error is not None:
            raise error
        return self._process.pid

    async def wait(self) -> str:
        """Wait for the process to end, and end what it started and left; returns why it did."""
        if self._process is None:
            return "its process could not be started"
        code = await self._process.wait()
        if self._control is not None:  # else it has been waited for before, and its number may be another's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._control.close()
            self._control = None
        if code >= 0:
            return f"its process ended by itself, with exit code {code}"
        return f"its process was killed by {signal.Signals(-code).name}"

    async def close(self) -> None:
        """Let the role close itself, then end the process; by force if it takes too long."""
        with suppress(TimeoutError, RoleDied):  # it may be gone before its answer is
            async with asyncio.timeout(2 * CLOSE_S):
                if self._control is not None:
                    await self._control.call(_CONTROL, "close", (), {})
                await self.wait()
        await self.kill()

    async def kill(self) -> str:
        """By force, with all that it started; returns why it ended."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return await self.wait()


class _Control:
    """The role that the driver alone calls, in the role's process."""

    def __init__(self, listener: socket.socket, worker: Worker):
        self._listener, self._worker = listener, worker
        self._actor: Actor | None = None

    async def start(self, id: str, name: str, work: bytes) -> Exception | None:
        """What the constructor raised; None: it stands."""
        self._actor = Actor(name, self._worker)
        actors = {id: self._actor}
        try:
            await self._actor.start(lambda: pickle.loads(work), LocalCaller(actors))
        except (UserError, RuntimeFailure) as error:
            return error
        gc.freeze()  # the collector would look through torch's modules again and again while the role works
        await _serve(name, actors, sock=self._listener)
        return None

    async def close(self) -> None:
        if self._actor is not None:
            self._actor.end("it has been closed")
            await self._actor.close()
        self._worker.stop()


def main(control: int, listener: int, driver: int) -> None:
    """A role's process. Its main thread is the role's own, so that alarms and signal handlers work there.

    ``control`` and ``listener`` are descriptors, of the socket to the driver and of the role's own.
    """
    inherited = [socket.socket(fileno=descriptor) for descriptor in (control, listener)]
    for sock in inherited:
        sock.set_inheritable(False)  # a program that the role runs must not keep its callers waiting
    worker = Worker()

    async def serve() -> None:
        actor = Actor(_CONTROL, None)
        await actor.start(lambda: (_Control, (inherited[1], worker)), LocalCaller({}))
        await asyncio.get_running_loop().create_unix_connection(
            lambda: Connection(_CONTROL, {_CONTROL: actor}), sock=inherited[0]
        )
        await asyncio.Event().wait()  # for ever

    def watch_driver() -> None:
        while os.getppid() == driver:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    for work in (watch_driver, lambda: asyncio.run(serve())):
        threading.Thread(target=work, daemon=True).start()
    worker.run()


@dataclass(eq=False, kw_only=True)
class _LocalRole(Role):
    begin: Callable[[], _RoleThread | _RoleProcess]
    """Makes the next incarnation."""
    listener: socket.socket | None
    incarnation: _RoleThread | _RoleProcess = field(init=False)


class LocalRuntime(Runtime[_LocalRole]):
    """A `Runtime` of the running loop. Use it as an async context manager, or close it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-")  # of sockets, for this user alone
        self._address = str(Path(self._folder.name) / "driver")
        self._actors: dict[str, Actor] = {}
        """Of the driver's process, by handle id."""
        self._local = LocalCaller(self._actors, self._address)
        super().__init__(self._local)
        self._server = asyncio.create_task(_serve("the driver", self._actors, path=self._address))

    async def close(self) -> None:
        await super().close()
        await self._local.disconnect()
        (await self._server).close()
        self._folder.cleanup()

    def _place(self, id: str, name: str, work: Work, placement: Placement, restarts: int) -> _LocalRole:
        begin: Callable[[], _RoleThread | _RoleProcess]
        if placement is Placement.PROCESS:
            pickled, handle = _pickled(work, name), Handle(id, name, str(Path(self._folder.name) / id))
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(handle.address)
            listener.listen(_BACKLOG)
            begin = functools.partial(_RoleProcess, handle, pickled, listener)
        else:
            handle, listener = Handle(id, name, self._address), None
            begin = functools.partial(
                _RoleThread, self._actors, self._local, handle, work, placement is Placement.THREAD
            )
        return _LocalRole(handle, restarts, begin=begin, listener=listener)

    async def _start(self, role: _LocalRole) -> None:
        role.incarnation = role.begin()
        role.pid = await role.incarnation.start()

    async def _interrupt(self, role: _LocalRole) -> None:
        await role.incarnation.kill()

    async def _watch(self, role: _LocalRole) -> None:
        pause_s, began_s = 0.0, time.monotonic()
        while True:
            why = await role.incarnation.wait()
            if role.state is RoleState.ALIVE:  # else `restart` has ended it, or its start has failed
                role.state, role.why = RoleState.RESTARTING, why
            role.pid = None
            if role.restarts == role.max_restarts:
                self._bury(role, role.why)
                return
            role.restarts += 1
            is_quick = time.monotonic() - began_s < _QUICK_S
            pause_s = min(max(2 * pause_s, _PAUSE_S), _LONGEST_PAUSE_S) if is_quick else 0.0
            await asyncio.sleep(pause_s)
            began_s = time.monotonic()
            try:
                await self._begin(role)
                role.state = RoleState.ALIVE
            except (UserError, RuntimeFailure) as error:
                role.why = str(error)

    async def _end(self, role: _LocalRole, hard: bool) -> None:
        await (role.incarnation.kill() if hard else role.incarnation.close())

    def _bury(self, role: _LocalRole, why: str) -> None:
        super()._bury(role, why)
        if role.listener is not None:
            role.listener.close()
            Path(role.handle.address).unlink(missing_ok=True)


async def _serve(name: str, actors: Mapping[str, Actor], **where: Any) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    return await loop.create_unix_server(lambda: Connection(name, actors), backlog=_BACKLOG, **where)


def _pickled(work: Work, name: str) -> bytes:
    """Raises TypeError where it cannot be sent to another process."""
    plain = getattr(work[0], "func", work[0])  # of a functools.partial
    if getattr(plain, "__module__", None) == "__main__":
        raise TypeError(
            f"{name}: {plain!r} is defined in the program itself; put it in a module, for a process to import"
        )
    try:
        return pickle.dumps(work, protocol=5)
    except Exception as error:
        raise TypeError(f"{name}: its class or arguments cannot be sent to a process: {error}") from error


async def open_runtime(kind: str, address: str = "auto") -> Runtime[Any]:
    """A runtime of the running loop, to be closed by whoever asked for it.

    Args:
        kind: ``local`` or ``ray``.
        address: of the Ray cluster: ``host:port``, ``auto``, or ``local`` for one of this run's own.

    Raises:
        UserError: Ray is not installed, or no cluster answers.
    """
    if kind == "local":
        return LocalRuntime()
    assert kind == "ray", f"no runtime of kind {kind!r}"
    try:
        from stretto.runtime.ray import RayRuntime
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError(
            "--runtime ray: Ray is not installed; pip install 'stretto[ray]', or use --runtime local"
        ) from None
    return await RayRuntime.open(address)
