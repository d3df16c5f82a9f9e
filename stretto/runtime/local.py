"""The default runtime: one machine, nothing to install or to start. Roles are threads and processes of the driver."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError
from stretto.runtime.actor import CLOSE_S, CONSTRUCTOR, Actor, Worker, deadline, on_loop
from stretto.runtime.connection import Connection, LocalCaller
from stretto.runtime.process import BACKLOG, RoleProcess, pickled
from stretto.runtime.runtime import (
    NO_RESOURCES,
    START_DEADLINE_S,
    Handle,
    NoRoom,
    Placement,
    Resources,
    Role,
    RoleDied,
    RoleState,
    Runtime,
    RuntimeFailure,
)

_POLL_S = 0.02
_QUICK_S, _PAUSE_S, _LONGEST_PAUSE_S = 1.0, 0.1, 5.0
"""A role that died so soon after its start is restarted after a pause, which doubles each time."""


class _RoleThread:
    """One incarnation in the driver's process: on daemon threads of its own, or on the driver's loop."""

    def __init__(
        self,
        actors: dict[str, Actor],
        handle: Handle,
        work: tuple[Callable[..., Any], Sequence[Any]],
        has_threads: bool,
    ):
        """
        Args:
            actors: of the driver's process, by handle id; this one's is put in, and callers wait in it from now on.
            has_threads: False: the driver's loop does everything.
        """
        self.pid = os.getpid()
        self._actors, self._handle, self._work = actors, handle, work
        self._worker = Worker() if has_threads else None
        self._loop = asyncio.new_event_loop() if has_threads else asyncio.get_running_loop()
        self._actor = actors[handle.id] = Actor(handle.name, self._loop, self._worker)
        self._caller = LocalCaller(actors, handle.address)
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run_loop, name=f"{handle.name} loop", daemon=True)
        if self._worker is not None:
            self._thread.start()
            threading.Thread(target=self._worker.run, name=handle.name, daemon=True).start()

    async def start(self) -> None:
        """Raises UserError and RoleError, as `Runtime.spawn`; whoever called it is to `kill`."""
        await on_loop(self._loop, self._actor.start(lambda: self._work, self._caller))

    async def wait(self) -> str:
        """Until it has been ended; returns why."""
        return await asyncio.shield(self._over)

    async def close(self) -> None:
        self._end("it was ended")
        await on_loop(self._loop, self._actor.close())
        await self._stop()
        if self._worker is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_S)

    async def kill(self) -> str:
        """Whatever its threads do, they are left to it."""
        if not self._over.done():
            self._end("it was killed")
            await self._stop()
        return await self._over

    def _end(self, why: str) -> None:
        self._actor.refusal = why
        self._loop.call_soon_threadsafe(self._actor.end, why)
        del self._actors[self._handle.id]
        self._over.set_result(why)

    async def _stop(self) -> None:
        if self._worker is None:
            await self._caller.disconnect()
        else:
            self._worker.stop()
            self._loop.call_soon_threadsafe(self._stopped.set)

    def _run_loop(self) -> None:
        async def live() -> None:
            await self._stopped.wait()
            await self._caller.disconnect()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(live())


@dataclass(eq=False, kw_only=True)
class _LocalRole(Role):
    begin: Callable[[], _RoleThread | RoleProcess]
    """Makes the next incarnation."""
    incarnation: _RoleThread | RoleProcess
    resources: Resources
    listener: socket.socket | None


class LocalRuntime(Runtime[_LocalRole]):
    """A `Runtime` of the running loop. Use it as an async context manager, or close it."""

    _caller: LocalCaller

    def __init__(self, capacity: Resources | None = None):
        """``capacity``: what the roles may reserve together; None: the machine's cores, and no GPU."""
        self._capacity = capacity or Resources(cpus=float(os.cpu_count() or 1))
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-")  # of sockets, for this user alone
        self._address = str(Path(self._folder.name) / "driver")
        self._actors: dict[str, Actor] = {}
        """Of the driver's process, by handle id."""
        super().__init__(LocalCaller(self._actors, self._address))
        loop, listener = asyncio.get_running_loop(), _listen(self._address)
        self._server = loop.create_task(
            loop.create_unix_server(lambda: Connection("the driver", self._actors), sock=listener, backlog=BACKLOG)
        )

    async def spawn(
        self,
        role: Callable[..., Any],
        *args: Any,
        name: str,
        placement: Placement,
        restarts: int = 0,
        resources: Resources = NO_RESOURCES,
        deadline_s: float = START_DEADLINE_S,
    ) -> Handle:
        self._check_room(name, resources)
        id, listener = uuid.uuid4().hex[:16], None
        begin: Callable[[], _RoleThread | RoleProcess]
        if placement is Placement.PROCESS:
            work, handle = pickled(role, args, name), Handle(id, name, str(Path(self._folder.name) / id))
            listener = _listen(handle.address)
            begin = functools.partial(RoleProcess, handle, work, listener)
        else:
            handle = Handle(id, name, self._address)
            begin = functools.partial(_RoleThread, self._actors, handle, (role, args), placement is Placement.THREAD)
        spawned = _LocalRole(
            handle, deadline_s, restarts, begin=begin, incarnation=begin(), resources=resources, listener=listener
        )
        self._roles[id] = spawned
        try:
            await self._start(spawned)
        except BaseException:
            self._bury(spawned, "it could not be started")
            raise
        spawned.watch = asyncio.create_task(self._watch(spawned))
        return handle

    async def restart(self, handle: Handle) -> None:
        role = self._find(handle)
        role.state, role.why = RoleState.RESTARTING, "it was restarted"
        await role.incarnation.kill()
        while self._find(handle).state is not RoleState.ALIVE:  # `_watch` starts the next
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        await super().close()
        await self._caller.disconnect()
        (await self._server).close()
        self._folder.cleanup()

    def _check_room(self, name: str, wanted: Resources) -> None:
        held = [role.resources for role in self._roles.values()]
        for kind in ("cpus", "gpus"):
            asked, total = getattr(wanted, kind), getattr(self._capacity, kind)
            free = total - sum(getattr(each, kind) for each in held)
            if asked > free + 1e-9:  # shares of a device need not add up exactly
                raise NoRoom(f"{name}: asks for {asked:g} {kind}; {free:g} of {total:g} are free")

    async def _start(self, role: _LocalRole) -> None:
        """Raises what `spawn` does; nothing but a thread that hangs is left then."""
        try:
            async with deadline(role.handle.name, CONSTRUCTOR, role.deadline_s):
                await role.incarnation.start()
        except BaseException as error:
            why = await role.incarnation.kill()
            if isinstance(error, RoleDied):
                raise RoleDied(role.handle.name, why) from None
            raise
        role.pid = role.incarnation.pid

    async def _watch(self, role: _LocalRole) -> None:
        """Start the next incarnation when one has ended, until no restart is left."""
        loop, pause_s = asyncio.get_running_loop(), 0.0
        began_s = loop.time()
        while True:
            why = await role.incarnation.wait()
            if role.state is RoleState.ALIVE:  # else `restart` has ended it, or its start has failed
                role.state, role.why = RoleState.RESTARTING, why
            role.pid = None
            if role.restarts == role.max_restarts:
                self._bury(role, role.why)
                return
            role.restarts += 1
            is_quick = loop.time() - began_s < _QUICK_S
            pause_s = min(max(2 * pause_s, _PAUSE_S), _LONGEST_PAUSE_S) if is_quick else 0.0
            await asyncio.sleep(pause_s)
            began_s = loop.time()
            role.incarnation = role.begin()
            try:
                await self._start(role)
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


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(BACKLOG)
    return listener


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
