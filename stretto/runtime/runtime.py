"""The contract between a driver, the roles it starts and whatever they run on.

A *role* is a plain class: the runtime makes one object of it, somewhere, and others call its methods through a `Handle`.
The *driver* is the one asyncio loop that owns a `Runtime` and starts, watches and ends the roles.

What a role may count on, under every runtime:

- Sync methods, the constructor among them, run one at a time, in a thread of the role's own (`Placement.ASYNC`: on the
  loop). Async methods run concurrently on the loop of the role's process, which such a thread does not hold up.
- A constructor parameter named ``caller`` is filled with a `Caller`, for that loop: with it the role calls the handles
  it was given. Such calls go straight from role to role; the driver does not see their data.
- ``close()``, sync or async, if there is one, is called when the role is ended without force.
- Arguments and results are read-only to whoever receives them, and are not changed any more by who sent them: they may
  be shared. Between processes they are pickled, so a role of a process must be importable from a module.
- Methods whose name begins with an underscore are not called from outside.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Self, TypeVar

from stretto.base.errors import UserError

START_DEADLINE_S = 60.0
"""For a role's process and its constructor, unless the caller says otherwise."""
CONSTRUCTOR = "__init__"
"""The method that a constructor's failure names."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


def to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, as `asyncio.run` does; in a thread of its own where this one has a running loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def reported() -> T:
        task = asyncio.current_task()
        assert task is not None
        started.set_result((asyncio.get_running_loop(), task))
        return await work

    with ThreadPoolExecutor(1, "loop") as thread:
        done = thread.submit(asyncio.run, reported())
        try:
            return done.result()
        except KeyboardInterrupt:  # the notebook's stop button
            loop, task = started.result()
            loop.call_soon_threadsafe(task.cancel)
            raise


class Placement(Enum):
    """Where the local runtime puts a role. On a Ray cluster each is an actor, in a process of its own, whatever is asked."""

    ASYNC = "async"
    """On the driver's loop: for roles that only wait. Sync methods hold everything up, so they must be short."""
    THREAD = "thread"
    """In the driver's process, with a thread of its own: for torch, whose kernels let the others run."""
    PROCESS = "process"
    """In a process of its own: for Python that computes, and for what may crash or hang."""


@dataclass(frozen=True, slots=True)
class Handle:
    """Names a role, over all its incarnations. May be passed to other roles; written by `Runtime.spawn`."""

    id: str
    """Unique in the runtime."""
    name: str
    """For people: log lines and errors."""
    address: Any = field(compare=False, repr=False)
    """How the runtime reaches it; nobody else's business."""


class RoleState(Enum):
    """What may be asked of a role."""

    ALIVE = "alive"
    RESTARTING = "restarting"
    """Calls wait for the next incarnation."""
    DRAINING = "draining"
    """It is being ended, and takes no new calls."""
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class RoleStatus:
    """A role as the driver sees it."""

    name: str
    state: RoleState
    pid: int | None
    """Of the process it lives in; None while there is none."""
    restarts: int
    why: str = ""
    """Why the last incarnation ended."""


class RuntimeFailure(RuntimeError):  # noqa: N818 - as all of these, it says what happened
    """Something went wrong between a caller and a role: data for the one who calls, unlike a `UserError`."""


@dataclass(eq=False)
class RoleDied(RuntimeFailure):
    """The role ended before it answered, or takes no calls any more. It may or may not have done the work."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(eq=False)
class DeadlinePassed(RuntimeFailure):
    """The role has not answered in time. It may still do the work."""

    name: str
    method: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}: {self.method} has not answered within {self.seconds:g} s"


@dataclass(eq=False)
class RoleError(RuntimeFailure):
    """The role's method, or its constructor, raised something other than a `UserError`."""

    name: str
    method: str
    kind: str
    """Class name of what was raised there: ``ZeroDivisionError``."""
    message: str
    trace: str
    """The traceback, as text."""

    def __str__(self) -> str:
        return f"{self.name}: {self.method} raised {self.kind}: {self.message}"


@asynccontextmanager
async def deadline(name: str, method: str, seconds: float) -> AsyncIterator[None]:
    """Raises DeadlinePassed where what is inside takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlinePassed(name, method, seconds) from None


class Caller(ABC):
    """What a role may do with others. It belongs to one asyncio loop: a sync method that needs it is an async one."""

    def __init__(self) -> None:
        self._casts: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def call(self, handle: Handle, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """What ``method`` returns.

        A call to a role that is restarting waits for it, where the runtime can tell; else it fails with `RoleDied`.
        When the deadline passes, or the caller is cancelled, an async method is cancelled at its next await and a sync
        one that waits for its turn is dropped; one that runs is left to finish.

        Raises:
            UserError: raised by the method, passed on as it is.
            RoleError: the method raised anything else.
            RoleDied: the role died meanwhile, or had before and is not restarted.
            DeadlinePassed: no answer within ``deadline_s`` seconds.
        """

    def cast(self, handle: Handle, method: str, *args: Any, **kwargs: Any) -> None:
        """Call ``method`` and wait for nothing. What fails is logged."""

        async def work() -> None:
            try:
                await self.call(handle, method, *args, deadline_s=math.inf, **kwargs)
            except (UserError, RuntimeFailure) as error:
                _log.warning("cast of %s failed: %s", method, error)

        task = asyncio.get_running_loop().create_task(work())
        self._casts.add(task)
        task.add_done_callback(self._casts.discard)


@dataclass(eq=False)
class Role:
    """A role as its runtime keeps it, until it has ended for good."""

    handle: Handle
    max_restarts: int
    deadline_s: float = START_DEADLINE_S
    state: RoleState = RoleState.ALIVE
    pid: int | None = None
    restarts: int = 0
    why: str = ""
    watch: asyncio.Task[None] | None = None

    def status(self) -> RoleStatus:
        return RoleStatus(self.handle.name, self.state, self.pid, self.restarts, self.why)


R = TypeVar("R", bound=Role)
Work = tuple[Callable[..., Any], tuple[Any, ...]]
"""A role's class, and the arguments of its constructor."""


class Runtime(Caller, Generic[R]):
    """The driver's side. Everything belongs to the loop it was opened on; as an async context manager, it closes itself.

    Which roles there are is kept here; where and how they live, by `LocalRuntime` and `RayRuntime`.
    """

    def __init__(self, caller: Caller):
        super().__init__()
        self._caller = caller
        self._roles: dict[str, R] = {}
        """By handle id."""
        self._ended: dict[str, RoleStatus] = {}

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
        deadline_s: float = START_DEADLINE_S,
    ) -> Handle:
        """Start a role and wait until its constructor has returned.

        Args:
            role: a class, or a `functools.partial` of one.
            restarts: how many times a process that dies by itself (or by `restart`) is started afresh, from ``role``
                and ``args``. Calls in flight fail; later ones meet the next incarnation.

        Raises:
            UserError, RoleError: the constructor raised it; nothing is left behind.
            DeadlinePassed: the constructor hangs; it has been killed where it can be.
            RoleDied: its process died first.
        """
        spawned = self._place(uuid.uuid4().hex[:16], name, (role, args), placement, restarts)
        spawned.deadline_s = deadline_s
        self._roles[spawned.handle.id] = spawned
        try:
            await self._begin(spawned)
        except BaseException:
            self._bury(spawned, "it could not be started")
            raise
        spawned.watch = asyncio.create_task(self._watch(spawned))
        return spawned.handle

    async def call(self, handle: Handle, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """See `Caller`."""
        self._find(handle)
        return await self._caller.call(handle, method, *args, deadline_s=deadline_s, **kwargs)

    async def kill(self, handle: Handle, *, hard: bool = False) -> None:
        """End the role for good and wait until it has ended. Calls in flight fail with `RoleDied`.

        Without force its ``close`` is called first, for a few seconds at most. A thread cannot be killed: what a sync
        method does there goes on, unheard.
        """
        role = self._roles.get(handle.id)
        if role is None:
            return
        role.state = RoleState.DRAINING
        if role.watch is not None:
            role.watch.cancel()
            await asyncio.gather(role.watch, return_exceptions=True)
        await self._end(role, hard)
        self._bury(role, "it was killed" if hard else "it was ended")

    async def restart(self, handle: Handle) -> None:
        """End this incarnation by force and start the next, if any of ``restarts`` are left: for a role that hangs."""
        role = self._find(handle)
        role.state, role.why = RoleState.RESTARTING, "it was restarted"
        await self._interrupt(role)
        async with deadline(handle.name, CONSTRUCTOR, role.deadline_s):
            while self._find(handle).state is not RoleState.ALIVE:  # `_watch` sees the next, or the end
                await asyncio.sleep(0.02)

    def status(self, handle: Handle) -> RoleStatus:
        """How the role is; a role that has ended keeps its last status."""
        return self._ended.get(handle.id) or self._find(handle).status()

    def handles(self) -> tuple[Handle, ...]:
        """Roles that have not ended for good, in the order they were spawned."""
        return tuple(role.handle for role in self._roles.values())

    async def close(self) -> None:
        """End every role without force, all at once. No process is left."""
        await asyncio.gather(*(self.kill(handle) for handle in self.handles()))

    @abstractmethod
    def _place(self, id: str, name: str, work: Work, placement: Placement, restarts: int) -> R:
        """A role that is about to start."""

    @abstractmethod
    async def _start(self, role: R) -> None:
        """Its incarnation; raises what `spawn` does."""

    @abstractmethod
    async def _interrupt(self, role: R) -> None:
        """End its incarnation by force, but not the role."""

    @abstractmethod
    async def _watch(self, role: R) -> None:
        """See its incarnations end and the next ones start, until the last has ended and is buried."""

    @abstractmethod
    async def _end(self, role: R, hard: bool) -> None:
        """Its process or threads, as `kill` says."""

    async def _begin(self, role: R) -> None:
        """`_start`, or leave nothing."""
        try:
            async with deadline(role.handle.name, CONSTRUCTOR, role.deadline_s):
                await self._start(role)
        except BaseException:
            await self._end(role, hard=True)
            raise

    def _find(self, handle: Handle) -> R:
        if handle.id in self._ended:
            raise RoleDied(handle.name, self._ended[handle.id].why)
        assert handle.id in self._roles, f"{handle} is not of this runtime"
        return self._roles[handle.id]

    def _bury(self, role: R, why: str) -> None:
        if self._roles.pop(role.handle.id, None) is not None:  # else two have killed it at once
            role.state, role.why, role.pid = RoleState.DEAD, why, None
            self._ended[role.handle.id] = role.status()
