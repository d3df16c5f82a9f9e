"""The default runtime, for one machine: roles are threads of the driver and processes that it starts.

For each role in a process the driver holds one listening socket, which every incarnation inherits: the address stays the same,
and callers that connect between two incarnations wait in the socket's queue. The driver starts and closes the role
over a separate socket pair. The process ends when its driver does.

asyncio starts and monitors the processes. `multiprocessing` would import the driver's main module into each of them, and block
the driver's loop while a process starts.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError
from stretto.base.parent import end_with_parent
from stretto.runtime.actor import CLOSE_S, Actor, Connection, LocalCaller, Worker
from stretto.runtime.runtime import (
    Handle,
    Needs,
    Placement,
    Restarts,
    Role,
    RoleDied,
    RoleState,
    Runtime,
    RuntimeFailure,
    Work,
)

_log = logging.getLogger(__name__)
_BACKLOG = 1024
"""Largest number of callers that wait while a role restarts."""
_CONTROL = "control"  # id of the role that the driver calls in a process
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from stretto.runtime.local import main; main(*map(int, sys.argv[2:]))"


class _RoleThread:
    """One incarnation in the driver's process, on its loop or in a thread."""

    def __init__(self, actors: dict[str, Actor], caller: LocalCaller, handle: Handle, work: Work, has_thread: bool):
        """``actors``: actors of the process by handle id, to which this one is added; callers wait for it from then on."""
        self._actors, self._caller, self._handle, self._work = actors, caller, handle, work
        self._worker = Worker() if has_thread else None
        self._actor = actors[handle.id] = Actor(handle.name, self._worker)
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> int:  # see `_RoleProcess.start`
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
        """End the incarnation. A method that runs in its thread continues."""
        if not self._over.done():
            self._over.set_result("it was killed")
            self._actor.end("it was killed")
            del self._actors[self._handle.id]
            if self._worker is not None:
                self._worker.stop()
        return await self._over


class _RoleProcess:
    """The driver's side of one incarnation in its own process. Belongs to the driver's loop."""

    def __init__(self, handle: Handle, work: bytes, listener: socket.socket):
        """``listener``: socket that listens on the handle's address."""
        self._handle, self._work, self._listener = handle, work, listener
        self._process: Process | None = None
        self._control: Connection | None = None

    async def start(self) -> int:
        """Start the process, wait for the role's constructor, and return the process id.

        Raises:
            UserError, RoleError, RoleDied: see `Runtime.spawn`; the caller must then call `kill`.
        """
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                control = Connection(self._handle.name, {})
                await asyncio.get_running_loop().create_unix_connection(lambda: control, sock=ours)
                self._control = control
                descriptors = (theirs.fileno(), self._listener.fileno())
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, descriptors), str(os.getpid())),
                    stdin=DEVNULL,
                    pass_fds=descriptors,
                    start_new_session=True,  # to kill it with its child processes, and to keep Ctrl-C for the driver
                )
        except OSError as problem:  # too many open files or processes, or too little memory: for now, perhaps
            if self._control is not None:
                self._control.close()
                self._control = None
            raise RoleDied(self._handle.name, f"its process could not be started: {problem}") from problem
        try:
            error = await control.call(_CONTROL, "start", (self._handle.id, self._handle.name, self._work), {})
        except RoleDied:
            raise RoleDied(self._handle.name, await self.kill()) from None
        if error is not None:
            raise error
        return self._process.pid

    async def wait(self) -> str:
        """Wait for the end of the process, kill its child processes, and return the cause."""
        if self._process is None:
            return "its process could not be started"
        code = await self._process.wait()
        if self._control is not None:  # else this has been done, and the process id may belong to another process
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._control.close()
            self._control = None
        if code >= 0:
            return f"its process ended by itself, with exit code {code}"
        return f"its process was killed by {signal.Signals(-code).name}"

    async def close(self) -> None:
        """Call the role's ``close``, then end the process; kill it if that takes too long."""
        with suppress(TimeoutError, RoleDied):  # the process may end before its answer arrives
            async with asyncio.timeout(2 * CLOSE_S):
                if self._control is not None:
                    await self._control.call(_CONTROL, "close", (), {})
                await self.wait()
        await self.kill()

    async def kill(self) -> str:
        """Kill the process with its child processes, and return the cause of its end."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return await self.wait()


class _Control:
    """Role in the process of another role, through which the driver starts and closes that role."""

    def __init__(self, listener: socket.socket, worker: Worker):
        self._listener, self._worker = listener, worker
        self._actor: Actor | None = None

    async def start(self, id: str, name: str, work: bytes) -> Exception | None:
        """Create the role, and return the exception of its constructor, or None."""
        self._actor = Actor(name, self._worker)
        actors = {id: self._actor}
        try:
            await self._actor.start(lambda: pickle.loads(work), LocalCaller(actors))
        except (UserError, RuntimeFailure) as error:
            return error
        gc.freeze()  # or each garbage collection would scan torch's modules again
        await _serve(name, actors, sock=self._listener)
        return None

    async def close(self) -> None:
        if self._actor is not None:
            self._actor.end("it has been closed")
            await self._actor.close()
        self._worker.stop()


def main(control: int, listener: int, driver: int) -> None:
    """Program of a role's process. The role's sync methods run in the main thread, so alarms and signal handlers work there.

    Args:
        control: descriptor of the socket to the driver.
        listener: descriptor of the role's listening socket.
        driver: process id of the driver.
    """
    inherited = [socket.socket(fileno=descriptor) for descriptor in (control, listener)]
    for sock in inherited:
        sock.set_inheritable(False)  # a child process of the role must not keep its sockets open
    worker = Worker()

    async def serve() -> None:
        actor = Actor(_CONTROL, None)
        await actor.start(lambda: (_Control, (inherited[1], worker)), LocalCaller({}))
        await asyncio.get_running_loop().create_unix_connection(
            lambda: Connection(_CONTROL, {_CONTROL: actor}), sock=inherited[0]
        )
        await asyncio.Event().wait()  # for ever

    end_with_parent(driver, group=True)
    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    worker.run()


@dataclass(eq=False, kw_only=True)
class _LocalRole(Role):
    begin: Callable[[], _RoleThread | _RoleProcess]
    """Creates the next incarnation."""
    listener: socket.socket | None
    incarnation: _RoleThread | _RoleProcess = field(init=False)


class LocalRuntime(Runtime[_LocalRole]):
    """A `Runtime` of the running loop. Use it as an async context manager, or call `close`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-")  # for sockets, accessible to this user only
        self._address = str(Path(self._folder.name) / "driver")
        self._actors: dict[str, Actor] = {}
        """Actors of the driver's process, by handle id."""
        self._local = LocalCaller(self._actors, self._address)
        super().__init__(self._local)
        self._server = asyncio.create_task(_serve("the driver", self._actors, path=self._address))

    async def close(self) -> None:
        await super().close()
        await self._local.disconnect()
        (await self._server).close()
        self._folder.cleanup()

    async def check(self, needs: Mapping[str, Needs]) -> None:
        """Every role has its place on this machine."""

    async def on_all_machines(self, work: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(work)
        except Exception as error:
            _log.warning("this machine: %s", error)

    def _place(self, id: str, name: str, work: Work, placement: Placement, again: Restarts, needs: Needs) -> _LocalRole:
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
        return _LocalRole(handle, again, begin=begin, listener=listener)

    async def _start(self, role: _LocalRole) -> None:
        role.incarnation = role.begin()
        role.pid = await role.incarnation.start()

    async def _interrupt(self, role: _LocalRole) -> None:
        await role.incarnation.kill()

    async def _watch(self, role: _LocalRole) -> None:
        while True:
            why = await role.incarnation.wait()
            if role.state is RoleState.ALIVE:  # else `restart` has killed it, or its start has failed
                role.state, role.why = RoleState.RESTARTING, why
            role.pid = None
            if not await self._pause(role):
                return
            try:
                await self._begin(role)
                role.state = RoleState.ALIVE
                role.again.began()
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
    """``work`` for another process. Raises TypeError: it cannot be pickled, or not be imported there."""
    plain = getattr(work[0], "func", work[0])  # the class in a functools.partial
    if getattr(plain, "__module__", None) == "__main__":
        raise TypeError(
            f"{name}: {plain!r} is defined in the main program; put it in a module, so another process can import it"
        )
    try:
        return pickle.dumps(work, protocol=5)
    except Exception as error:
        raise TypeError(f"{name}: its class or arguments cannot be sent to a process: {error}") from error


async def open_runtime(kind: str, address: str = "auto") -> Runtime[Any]:
    """A runtime of the running loop, which the caller must close.

    Args:
        kind: ``local`` or ``ray``.
        address: address of the Ray cluster: ``host:port``, ``auto``, or ``local`` for a new cluster of this run.

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
