"""What runs inside a Ray cluster: a role's actor, the store's, and how roles call each other there.

Ray is imported by whoever opens the cluster; everybody else does without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError, RayTaskError

from stretto.base.errors import UserError
from stretto.runtime.caller import deadline
from stretto.runtime.host import Counts, Host, Worker, build
from stretto.runtime.runtime import Handle, Ref, RefLost, RoleDied, RoleError, RuntimeFailure

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pulse:
    """What an actor answers when the driver asks how it is."""

    incarnation: str
    pid: int
    counts: Counts


class StoreActor:
    """Knows what is stored, so that `Caller.free` frees it, and how often each role was started. The values themselves
    lie in Ray's object stores, on the machines of those who put them."""

    def __init__(self) -> None:
        self._refs: dict[str, Any] = {}
        self._births: Counter[str] = Counter()

    def born(self, role: str) -> None:
        self._births[role] += 1

    def num_births(self, role: str) -> int:
        return self._births[role]

    def keep(self, id: str, ref: Sequence[Any]) -> None:
        """``ref`` in a list: Ray would hand over the value of a bare one."""
        (self._refs[id],) = ref

    def find(self, id: str) -> Sequence[Any]:
        return [self._refs[id]] if id in self._refs else []

    def free(self, id: str) -> None:
        self._refs.pop(id, None)


class RayCaller:
    """A `Caller`, in the driver or in an actor."""

    def __init__(self, store: Any):
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed_casts: Counter[str] = Counter()
        """By handle id: casts that did not reach their role."""

    async def call(
        self, handle: Handle, method: str, *args: Any, deadline_s: float, key: str | None = None, **kwargs: Any
    ) -> Any:
        ref = handle.address.call.remote(method, args, kwargs, key)
        try:
            async with deadline(handle.name, method, deadline_s):
                return await awaited(ref, handle.name, method)
        except (asyncio.CancelledError, RuntimeFailure):
            ray.cancel(ref)  # nothing, where it has ended
            raise

    def cast(self, handle: Handle, method: str, *args: Any, **kwargs: Any) -> None:
        sent = handle.address.cast.remote(method, args, kwargs)
        task = asyncio.get_running_loop().create_task(self._see_off(handle, method, sent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def put(self, value: Any) -> Ref:
        id = uuid.uuid4().hex
        ref = await asyncio.to_thread(ray.put, value)
        await self._store.keep.remote(id, [ref])
        return Ref(id, 0, None)

    async def get(self, ref: Ref, deadline_s: float) -> Any:
        async with deadline("the store", "get", deadline_s):
            found = await self._store.find.remote(ref.id)
            if not found:
                raise RefLost(f"the value {ref.id} was freed")
            try:
                return await found[0]
            except ObjectLostError as error:
                raise RefLost(f"the value {ref.id} went with its machine: {_first_line(error)}") from None

    def free(self, ref: Ref) -> None:
        self._store.free.remote(ref.id)

    async def _see_off(self, handle: Handle, method: str, sent: Any) -> None:
        try:
            await awaited(sent, handle.name, method)
        except (UserError, RuntimeFailure) as error:
            self.failed_casts[handle.id] += 1
            _log.warning("cast of %s failed: %s", method, error)


class RoleActor:
    """One incarnation of a role. Ray makes a new one of the same arguments when the process dies."""

    def __init__(self, id: str, name: str, store: Any):
        """``store`` holds the role's class and arguments under its id."""
        store.born.remote(id)
        self._id = id
        self._name = name
        self._store = store
        self._incarnation = uuid.uuid4().hex
        self._host: Host | None = None
        self._starting: asyncio.Task[Exception | None] | None = None

    async def start(self) -> Exception | None:
        """What the role's constructor raised; None: it stands."""
        self._hosted()
        assert self._starting is not None, "a host that is not being started"
        return await asyncio.shield(self._starting)

    async def call(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], key: str | None
    ) -> tuple[Any, Exception | None]:
        """The result, or what was raised: Ray would wrap it."""
        try:
            return await self._hosted().call(method, args, kwargs, key), None
        except (UserError, RuntimeFailure) as error:
            return None, error

    async def cast(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[None, None]:
        self._hosted().cast(method, lambda: (args, kwargs))
        return None, None

    async def pulse(self) -> Pulse:
        return Pulse(self._incarnation, os.getpid(), self._hosted().counts())

    async def drain(self) -> None:
        await self._hosted().drain()

    async def close(self) -> None:
        self._hosted().end("it was ended")
        await self._hosted().close()

    def _hosted(self) -> Host:
        """The host. Made here, since the actor's constructor does not run on the actor's loop."""
        if self._host is None:
            worker = Worker()
            threading.Thread(target=worker.run, name=self._name, daemon=True).start()
            self._host = Host(self._name, asyncio.get_running_loop(), worker)
            self._starting = asyncio.create_task(self._start(self._host))
        return self._host

    async def _start(self, host: Host) -> Exception | None:
        caller = RayCaller(self._store)
        (made,) = await self._store.find.remote(self._id)
        role, args = await made
        try:
            await host.start(lambda: build(role, args, caller))
        except (UserError, RoleError) as error:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                _log.warning("%s: could not be restarted: %s", self._name, error)
                os._exit(1)  # one more restart, if there is one
            return error
        return None


async def awaited(ref: Any, name: str, method: str) -> Any:
    """The first of what an actor answers; raises the second, or what Ray's trouble means here."""
    try:
        result, error = await ref
    except RayTaskError as error:  # arguments or results that do not come through
        cause = error.cause if isinstance(error.cause, Exception) else error
        raise RoleError(name, method, type(cause).__name__, str(cause), str(error)) from None
    except RayError as error:
        raise RoleDied(name, reason(error)) from None
    if error is not None:
        raise error
    return result


def reason(error: RayError) -> str:
    if isinstance(error, ActorUnavailableError):
        return "its process does not answer; perhaps it restarts"
    if isinstance(error, RayActorError):
        return f"its process has ended: {_first_line(error)}"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
