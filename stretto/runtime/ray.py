"""The runtime of a cluster: every role is a Ray actor.

Ray keeps the actors, and restarts them; its calls are at most once. The driver asks every actor now and then how it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from stretto.base.errors import UserError
from stretto.runtime.actor import CLOSE_S, Actor, Worker
from stretto.runtime.runtime import (
    Caller,
    DeadlinePassed,
    Handle,
    Placement,
    Role,
    RoleDied,
    RoleError,
    RoleState,
    Runtime,
    RuntimeFailure,
    Work,
    deadline,
)

_BEAT_S = 0.5
"""Between two looks at an actor."""
_POLL_S = 0.05
_CONNECT_S = 10.0
"""For a cluster to answer."""
_log = logging.getLogger(__name__)


class RayCaller(Caller):
    """Of the driver, or of an actor."""

    async def call(self, handle: Handle, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        ref = handle.address.call.remote(method, args, kwargs)
        try:
            async with deadline(handle.name, method, deadline_s):
                result, error = await ref
        except (asyncio.CancelledError, DeadlinePassed):
            ray.cancel(ref)
            raise
        except RayTaskError as error:  # arguments or results that do not come through
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise RoleError(handle.name, method, type(cause).__name__, str(cause), str(error)) from None
        except RayError as error:
            raise RoleDied(handle.name, _reason(error)) from None
        if error is not None:
            raise error
        return result


class RoleActor:
    """One incarnation of a role. Ray makes a new one of the same arguments when the process dies."""

    def __init__(self, name: str, work: Sequence[Any]):
        """``work``: a reference to the role's class and arguments, in a list: Ray would hand over the value of a bare one."""
        self._name = name
        self._work = work
        self._incarnation = uuid.uuid4().hex
        self._begun: tuple[Actor, asyncio.Task[Exception | None]] | None = None

    async def look(self) -> tuple[str, int, Exception | None]:
        """The incarnation, its process, and what the role's constructor raised: waits for it."""
        return self._incarnation, os.getpid(), await asyncio.shield(self._begin()[1])

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Exception | None]:
        """The result, or what was raised: Ray would wrap it."""
        try:
            return await self._begin()[0].call(method, args, kwargs), None
        except (UserError, RuntimeFailure) as error:
            return None, error

    async def close(self) -> None:
        actor, _ = self._begin()
        actor.end("it was ended")
        await actor.close()

    def _begin(self) -> tuple[Actor, asyncio.Task[Exception | None]]:
        """Not by the constructor, which Ray does not call on the actor's loop."""
        if self._begun is None:
            worker = Worker()
            threading.Thread(target=worker.run, name=self._name, daemon=True).start()
            actor = Actor(self._name, worker)
            self._begun = actor, asyncio.create_task(self._start(actor))
        return self._begun

    async def _start(self, actor: Actor) -> Exception | None:
        work = await self._work[0]
        try:
            await actor.start(lambda: work, RayCaller())
        except (UserError, RuntimeFailure) as error:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                _log.warning("%s: could not be restarted: %s", self._name, error)
                os._exit(1)  # one more restart, if there is one
            return error
        return None


@dataclass(eq=False, kw_only=True)
class _RayRole(Role):
    work: Any
    """Keeps the class and the arguments in Ray's store: Ray lets go of large ones once an actor has started, and could
    not start it again."""
    incarnation: str = ""


class RayRuntime(Runtime[_RayRole]):
    """A `Runtime` of the running loop. Use it as an async context manager, or close it."""

    def __init__(self, owns_cluster: bool):
        """Of a cluster that this process is connected to: see `open`."""
        super().__init__(RayCaller())
        self._owns_cluster = owns_cluster

    @classmethod
    async def open(cls, address: str) -> Self:
        """Connect to a cluster.

        Args:
            address: ``host:port``; ``auto``: the one that runs on this machine, or that RAY_ADDRESS names; ``local``:
                a new one, for this run alone.

        Raises:
            UserError: it does not answer.
        """
        if ray.is_initialized():
            return cls(owns_cluster=False)
        options: dict[str, Any] = {"address": address, "log_to_driver": True, "logging_level": "error"}
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # In this thread: the kernel kills a cluster's processes together with the thread that started them.
            problem = _init({**options, "include_dashboard": False})
            told = f"Ray starts no cluster here ({problem}); use --runtime local"
        else:
            problem = await _reach(address, options)
            told = (
                f"no Ray cluster answers there ({problem}); start one with `ray start --head`, "
                f"or run without one: --runtime local"
            )
        if problem is not None:
            raise UserError(f"--address {address}: {told}")
        return cls(owns_cluster=True)

    async def close(self) -> None:
        await super().close()
        if self._owns_cluster:
            await asyncio.to_thread(ray.shutdown)

    def _place(self, id: str, name: str, work: Work, placement: Placement, restarts: int) -> _RayRole:
        # The role's own worker does the queueing, not Ray.
        actor = ray.remote(RoleActor).options(num_cpus=0, max_restarts=restarts, max_concurrency=10_000)
        kept = ray.put(work)
        return _RayRole(Handle(id, name, actor.remote(name, [kept])), restarts, work=kept)

    async def _start(self, role: _RayRole) -> None:
        try:
            error = await self._look(role)
        except RayError as problem:
            raise RoleDied(role.handle.name, _reason(problem)) from None
        if error is not None:
            raise error

    async def _interrupt(self, role: _RayRole) -> None:
        ray.kill(role.handle.address, no_restart=False)

    async def _watch(self, role: _RayRole) -> None:
        while True:
            await asyncio.sleep(_BEAT_S if role.state is RoleState.ALIVE else _POLL_S)
            try:
                await self._look(role)
            except ActorUnavailableError as error:
                if role.state is RoleState.ALIVE:
                    role.state, role.why = RoleState.RESTARTING, _reason(error)
            except RayActorError as error:
                role.restarts = role.max_restarts  # a life may have been too short to be seen from here
                self._bury(role, _reason(error))
                return

    async def _look(self, role: _RayRole) -> Exception | None:
        """What the constructor raised, for which a later incarnation ends itself."""
        incarnation, pid, error = await role.handle.address.look.remote()
        if role.incarnation not in ("", incarnation) and error is None:
            role.restarts += 1
            role.state = RoleState.ALIVE
        role.incarnation, role.pid = incarnation, pid
        return error

    async def _end(self, role: _RayRole, hard: bool) -> None:
        """Kill the actor and wait until Ray says that it is dead."""
        actor = role.handle.address
        if not hard:
            with suppress(TimeoutError, RayError):
                async with asyncio.timeout(2 * CLOSE_S):
                    await actor.close.remote()
        ray.kill(actor)
        with suppress(RayActorError):
            while True:
                with suppress(ActorUnavailableError, TimeoutError):
                    await asyncio.wait_for(asyncio.wrap_future(actor.look.remote().future()), CLOSE_S)
                await asyncio.sleep(_POLL_S)


def _reason(error: Exception) -> str:
    """On one line."""
    if isinstance(error, ActorUnavailableError):
        return "its process does not answer; perhaps it restarts"
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return f"its process has ended: {line}" if isinstance(error, RayActorError) else line


async def _reach(address: str, options: Mapping[str, Any]) -> str | None:
    """`ray.init`, which may wait for a cluster for minutes, in a thread that can be left to it; why it failed."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        try:
            await asyncio.to_thread(lambda: socket.create_connection((host, int(port)), _CONNECT_S / 2).close())
        except OSError as error:
            return error.strerror or str(error)
    worker = Worker()
    done = asyncio.wrap_future(worker.submit(lambda: _init(options)))
    worker.stop()
    threading.Thread(target=worker.run, name="ray.init", daemon=True).start()
    with suppress(TimeoutError):
        return await asyncio.wait_for(done, _CONNECT_S)
    return "it does not answer"


def _init(options: Mapping[str, Any]) -> str | None:
    """Why it failed, on one line; None: it did not."""
    try:
        ray.init(**options)
    except Exception as error:  # Ray has no one class for it
        return _reason(error)
    return None
