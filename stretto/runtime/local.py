"""The default runtime: one machine, nothing to install or to start. Roles are threads and processes of the driver."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from stretto.base.errors import UserError
from stretto.runtime.caller import LocalCaller, deadline
from stretto.runtime.host import Counts, Host
from stretto.runtime.peer import accept
from stretto.runtime.process import RoleProcess, Spec, pickled
from stretto.runtime.runtime import (
    NO_LABELS,
    NO_RESOURCES,
    START_DEADLINE_S,
    Handle,
    NoRoom,
    Placement,
    Ref,
    Resources,
    RoleDied,
    RoleState,
    RoleStatus,
    RuntimeFailure,
)
from stretto.runtime.store import Folder, Store
from stretto.runtime.thread import RoleThread

_DRAINING = "it is draining and takes no new calls"
_BACKLOG = 1024
"""Callers that may wait while a role restarts."""
_QUICK_S, _PAUSE_S, _LONGEST_PAUSE_S = 1.0, 0.05, 5.0
"""A role that died so soon after its start is restarted after a pause, which doubles each time."""


class Incarnation(Protocol):
    """One life of a role: `RoleThread` or `RoleProcess`."""

    @property
    def pid(self) -> int | None: ...

    @property
    def counts(self) -> Counts: ...

    async def start(self, deadline_s: float) -> None: ...

    async def wait(self) -> str:
        """Until it ends, whatever ends it; returns why."""
        ...

    async def drain(self) -> None: ...

    async def close(self) -> None: ...

    async def kill(self) -> str: ...


@dataclass(slots=True, eq=False)
class _Role:
    handle: Handle
    incarnate: Callable[[], Incarnation]
    incarnation: Incarnation
    resources: Resources
    labels: Mapping[str, str]
    max_restarts: int
    deadline_s: float
    listener: socket.socket | None
    state: RoleState = RoleState.ALIVE
    restarts: int = 0
    why: str = ""
    task: asyncio.Task[None] | None = None
    """Watches the incarnation, or starts the next."""


class LocalRuntime:
    """A `Runtime` of the running loop. Use it as an async context manager, or close it."""

    def __init__(self, capacity: Resources | None = None, folder: Path | None = None):
        """
        Args:
            capacity: what the roles may reserve together; None: the machine's cores, and no GPU.
            folder: where sockets and stored values go, below it; None: shared memory, or else the temporary folder.
        """
        self._capacity = capacity or Resources(cpus=float(os.cpu_count() or 1))
        self._folder = Folder(folder)
        self._hosts: dict[str, Host] = {}
        self._store = Store(self._folder.path)
        self._roles: dict[str, _Role] = {}
        self._ended: dict[str, RoleStatus] = {}
        self._address = str(self._folder.path / "driver")
        self._listener = _listen(self._address)
        self._caller = LocalCaller(self._hosts, self._store, self._address)
        self._accepting = asyncio.get_running_loop().create_task(accept(self._listener, self._hosts))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def spawn(
        self,
        role: Callable[..., Any],
        *args: Any,
        name: str,
        placement: Placement,
        restarts: int = 0,
        resources: Resources = NO_RESOURCES,
        labels: Mapping[str, str] = NO_LABELS,
        deadline_s: float = START_DEADLINE_S,
    ) -> Handle:
        self._check_room(name, resources)
        id = uuid.uuid4().hex[:16]
        if placement is Placement.PROCESS:
            handle = Handle(id, name, str(self._folder.path / id))
            spec = Spec(id, name, pickled(role, args, name), str(self._folder.path))
            listener = _listen(handle.address)

            def incarnate() -> Incarnation:
                return RoleProcess(spec, listener)
        else:
            handle, listener = Handle(id, name, self._address), None

            def incarnate() -> Incarnation:
                return RoleThread(self._hosts, handle, role, args, self._store, placement is Placement.THREAD)

        spawned = _Role(handle, incarnate, incarnate(), resources, dict(labels), restarts, deadline_s, listener)
        self._roles[id] = spawned
        try:
            await spawned.incarnation.start(deadline_s)
        except BaseException:
            self._bury(spawned, "it could not be started")
            raise
        spawned.task = asyncio.create_task(self._watch(spawned))
        return handle

    async def call(
        self, handle: Handle, method: str, *args: Any, deadline_s: float, key: str | None = None, **kwargs: Any
    ) -> Any:
        if self._role(handle).state is RoleState.DRAINING:
            raise RoleDied(handle.name, _DRAINING)
        return await self._caller.call(handle, method, *args, deadline_s=deadline_s, key=key, **kwargs)

    def cast(self, handle: Handle, method: str, *args: Any, **kwargs: Any) -> None:
        self._caller.cast(handle, method, *args, **kwargs)

    async def put(self, value: Any) -> Ref:
        return await self._caller.put(value)

    async def get(self, ref: Ref, deadline_s: float) -> Any:
        return await self._caller.get(ref, deadline_s)

    def free(self, ref: Ref) -> None:
        self._caller.free(ref)

    async def kill(self, handle: Handle, *, hard: bool = False) -> None:
        role = self._roles.get(handle.id)
        if role is None:
            return
        role.state = RoleState.DRAINING
        await _stop(role.task)
        if hard:
            await role.incarnation.kill()
        else:
            await role.incarnation.close()
        self._bury(role, "it was killed" if hard else "it was ended")

    async def restart(self, handle: Handle) -> None:
        role = self._role(handle)
        await _stop(role.task)
        role.state, role.why = RoleState.RESTARTING, "it was restarted"
        await role.incarnation.kill()
        revival = role.task = asyncio.create_task(self._revive(role, _PAUSE_S))
        await asyncio.wait([revival])
        role = self._role(handle)  # raises where no restart was left, or somebody killed it
        role.task = asyncio.create_task(self._watch(role))

    async def drain(self, handle: Handle, deadline_s: float) -> None:
        role = self._role(handle)
        role.state = RoleState.DRAINING
        async with deadline(handle.name, "drain", deadline_s):
            await role.incarnation.drain()

    def status(self, handle: Handle) -> RoleStatus:
        if handle.id in self._ended:
            return self._ended[handle.id]
        role = self._role(handle)
        counts = role.incarnation.counts
        return RoleStatus(
            name=handle.name,
            state=role.state,
            pid=role.incarnation.pid,
            restarts=role.restarts,
            num_calls=counts.num_calls,
            oldest_call_s=counts.oldest_call_s,
            failed_casts=counts.failed_casts + self._caller.failed_casts[handle.id],
            labels=role.labels,
            why=role.why,
        )

    def handles(self) -> tuple[Handle, ...]:
        return tuple(role.handle for role in self._roles.values())

    async def close(self) -> None:
        await asyncio.gather(*(self.kill(handle) for handle in self.handles()))
        await self._caller.disconnect()
        await _stop(self._accepting)
        self._listener.close()
        self._folder.remove()

    def _role(self, handle: Handle) -> _Role:
        if handle.id in self._ended:
            raise RoleDied(handle.name, self._ended[handle.id].why)
        assert handle.id in self._roles, f"{handle} is not of this runtime"
        return self._roles[handle.id]

    def _check_room(self, name: str, wanted: Resources) -> None:
        held = [role.resources for role in self._roles.values()]
        for kind in ("cpus", "gpus"):
            asked, total = getattr(wanted, kind), getattr(self._capacity, kind)
            free = total - sum(getattr(each, kind) for each in held)
            if asked > free + 1e-9:  # shares of a device need not add up exactly
                raise NoRoom(f"{name}: asks for {asked:g} {kind}; {free:g} of {total:g} are free")

    async def _watch(self, role: _Role) -> None:
        loop, pause_s = asyncio.get_running_loop(), _PAUSE_S
        while role.handle.id in self._roles:
            started = loop.time()
            role.why = await role.incarnation.wait()
            if role.state is RoleState.DRAINING:
                self._bury(role, role.why)
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if loop.time() - started < _QUICK_S else _PAUSE_S
            role.state = RoleState.RESTARTING
            await self._revive(role, pause_s)

    async def _revive(self, role: _Role, pause_s: float) -> None:
        """Until one incarnation stands, or no restart is left."""
        while role.restarts < role.max_restarts:
            role.restarts += 1
            if pause_s > _PAUSE_S:
                await asyncio.sleep(pause_s)
            role.incarnation = role.incarnate()
            try:
                await role.incarnation.start(role.deadline_s)
            except (UserError, RuntimeFailure) as error:
                role.why = str(error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            role.state = RoleState.ALIVE
            return
        self._bury(role, role.why)

    def _bury(self, role: _Role, why: str) -> None:
        if role.handle.id in self._ended:
            return  # two have killed it at once
        role.state, role.why = RoleState.DEAD, why
        status = self.status(role.handle)
        self._ended[role.handle.id] = replace(status, pid=None, num_calls=0, oldest_call_s=0.0)
        del self._roles[role.handle.id]
        if role.listener is not None:
            role.listener.close()
            Path(role.handle.address).unlink(missing_ok=True)


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.bind(address)
    listener.listen(_BACKLOG)
    return listener


async def _stop(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
