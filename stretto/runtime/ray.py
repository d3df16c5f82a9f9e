"""The runtime of a cluster: every role is a Ray actor, the store is Ray's own.

Ray keeps the actors, and restarts them; its calls are at most once. The driver asks every actor now and then how it is.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from stretto.runtime.caller import deadline
from stretto.runtime.host import CLOSE_S, CONSTRUCTOR, Counts
from stretto.runtime.ray_actor import Pulse, RayCaller, RoleActor, StoreActor, reason
from stretto.runtime.ray_connect import connect
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
)

_BEAT_S = 0.5
"""Between two looks at an actor."""
_POLL_S = 0.05
_CONCURRENCY = 10_000
"""Calls that Ray lets into one actor at once; the role's host does the queueing."""


@dataclass(slots=True, eq=False)
class _Role:
    handle: Handle
    resources: Resources
    labels: Mapping[str, str]
    deadline_s: float
    state: RoleState = RoleState.ALIVE
    pulse: Pulse = field(default_factory=lambda: Pulse("", 0, Counts(0, 0.0, 0)))
    restarts: int = 0
    why: str = ""
    task: asyncio.Task[None] | None = None
    """Watches the actor."""

    @property
    def actor(self) -> Any:
        return self.handle.address


class RayRuntime:
    """A `Runtime` of the running loop. Use it as an async context manager, or close it."""

    def __init__(self, owns_cluster: bool):
        """Of a cluster that this process is connected to: see `open`."""
        self._owns_cluster = owns_cluster
        self._store: Any = ray.remote(StoreActor).options(num_cpus=0).remote()
        self._caller = RayCaller(self._store)
        self._roles: dict[str, _Role] = {}
        self._ended: dict[str, RoleStatus] = {}

    @classmethod
    async def open(cls, address: str, num_cpus: int | None = None, object_store_bytes: int | None = None) -> Self:
        """Connect to a cluster.

        Args:
            address: ``host:port``; ``auto``: the one that runs on this machine, or that RAY_ADDRESS names; ``local``:
                a new one, for this run alone.
            num_cpus: of a new one; None: the machine's.
            object_store_bytes: of a new one; None: Ray's default.

        Raises:
            UserError: it does not answer.
        """
        if ray.is_initialized():
            return cls(owns_cluster=False)
        options: dict[str, Any] = {"address": address, "log_to_driver": True, "logging_level": "error"}
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options |= {"num_cpus": num_cpus, "object_store_memory": object_store_bytes, "include_dashboard": False}
        await connect(address, options)
        return cls(owns_cluster=True)

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
        _check_room(name, resources)
        options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_restarts": restarts}
        actor = ray.remote(RoleActor).options(**options, max_concurrency=_CONCURRENCY)
        id = uuid.uuid4().hex[:16]
        # Stored, since Ray lets go of an actor's large arguments once it has started, and then cannot start it again.
        await self._store.keep.remote(id, [ray.put((role, args))])
        handle = Handle(id, name, actor.remote(id, name, self._store))
        spawned = _Role(handle, resources, dict(labels), deadline_s)
        self._roles[handle.id] = spawned
        try:
            async with deadline(name, CONSTRUCTOR, deadline_s):
                error = await spawned.actor.start.remote()
                if error is None:
                    await self._look(spawned)
        except BaseException as problem:
            await self._end(spawned, "it could not be started")
            if isinstance(problem, RayError):
                raise RoleDied(name, reason(problem)) from None
            raise
        if error is not None:
            await self._end(spawned, "its constructor failed")
            raise error
        spawned.task = asyncio.create_task(self._watch(spawned))
        return handle

    async def call(
        self, handle: Handle, method: str, *args: Any, deadline_s: float, key: str | None = None, **kwargs: Any
    ) -> Any:
        if self._role(handle).state is RoleState.DRAINING:
            raise RoleDied(handle.name, "it is draining and takes no new calls")
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
        if not hard:
            with suppress(TimeoutError, RayError):
                async with asyncio.timeout(2 * CLOSE_S):
                    await role.actor.close.remote()
        await self._end(role, "it was killed" if hard else "it was ended")

    async def restart(self, handle: Handle) -> None:
        role = self._role(handle)
        role.state, role.why = RoleState.RESTARTING, "it was restarted"
        old = role.pulse.incarnation
        ray.kill(role.actor, no_restart=False)
        async with deadline(handle.name, CONSTRUCTOR, role.deadline_s):
            while self._role(handle).pulse.incarnation == old or role.state is not RoleState.ALIVE:
                await asyncio.sleep(_POLL_S)  # `_watch` sees it, or its end

    async def drain(self, handle: Handle, deadline_s: float) -> None:
        role = self._role(handle)
        role.state = RoleState.DRAINING
        async with deadline(handle.name, "drain", deadline_s):
            try:
                await role.actor.drain.remote()
            except RayError as error:
                raise RoleDied(handle.name, reason(error)) from None

    def status(self, handle: Handle) -> RoleStatus:
        if handle.id in self._ended:
            return self._ended[handle.id]
        role = self._role(handle)
        counts = role.pulse.counts
        return RoleStatus(
            name=handle.name,
            state=role.state,
            pid=role.pulse.pid,
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
        ray.kill(self._store)
        if self._owns_cluster:
            await asyncio.to_thread(ray.shutdown)

    def _role(self, handle: Handle) -> _Role:
        if handle.id in self._ended:
            raise RoleDied(handle.name, self._ended[handle.id].why)
        assert handle.id in self._roles, f"{handle} is not of this runtime"
        return self._roles[handle.id]

    async def _watch(self, role: _Role) -> None:
        while True:
            await asyncio.sleep(_BEAT_S if role.state is RoleState.ALIVE else _POLL_S)
            try:
                await self._look(role)
            except ActorUnavailableError as error:
                if role.state is RoleState.ALIVE:
                    role.state, role.why = RoleState.RESTARTING, reason(error)
            except RayActorError as error:
                role.restarts = await self._num_restarts(role)
                self._bury(role, reason(error))
                return

    async def _look(self, role: _Role) -> None:
        error = await role.actor.start.remote()  # of a new incarnation, this waits for the constructor
        if error is not None:
            return  # it ends itself
        pulse = await role.actor.pulse.remote()
        if role.pulse.incarnation not in ("", pulse.incarnation):
            role.restarts = await self._num_restarts(role)
            role.state = RoleState.ALIVE if role.state is RoleState.RESTARTING else role.state
        role.pulse = pulse

    async def _num_restarts(self, role: _Role) -> int:
        """A life may be too short to be seen from here."""
        return max(0, await self._store.num_births.remote(role.handle.id) - 1)

    async def _end(self, role: _Role, why: str) -> None:
        """Kill the actor and wait until Ray says that it is dead."""
        if role.task is not None:
            role.task.cancel()
            await asyncio.gather(role.task, return_exceptions=True)
        ray.kill(role.actor)
        with suppress(RayActorError):
            while True:
                with suppress(ActorUnavailableError, TimeoutError):
                    await asyncio.wait_for(asyncio.wrap_future(role.actor.pulse.remote().future()), CLOSE_S)
                await asyncio.sleep(_POLL_S)
        self._bury(role, why)

    def _bury(self, role: _Role, why: str) -> None:
        if role.handle.id in self._ended:
            return  # two have killed it at once
        self._store.free.remote(role.handle.id)
        role.state, role.why = RoleState.DEAD, why
        self._ended[role.handle.id] = replace(self.status(role.handle), pid=None, num_calls=0, oldest_call_s=0.0)
        del self._roles[role.handle.id]


def _check_room(name: str, wanted: Resources) -> None:
    there = ray.cluster_resources()
    for kind, asked in (("CPU", wanted.cpus), ("GPU", wanted.gpus)):
        if asked > there.get(kind, 0.0):
            raise NoRoom(f"{name}: asks for {asked:g} {kind}; the cluster has {there.get(kind, 0.0):g}")
