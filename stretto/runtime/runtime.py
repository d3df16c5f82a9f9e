"""The contract between a driver, the roles that it starts, and the runtime on which they run.

A *role* is a plain class. The runtime creates one object of it in a thread or process, and others call its methods through a
`Handle`. The *driver* is the asyncio loop that owns a `Runtime`; it starts, monitors and ends the roles.

Guarantees for roles, under every runtime:

- Sync methods, including the constructor, run one at a time, in a thread of the role (`Placement.ASYNC`: on the
  loop). Async methods run concurrently on the loop of the role's process, which sync methods in that thread do not block.
- A constructor parameter named ``caller`` receives a `Caller` for that loop, with which the role calls the handles
  that it was given. Such calls go directly from role to role; the driver does not see their data.
- A method ``close()``, sync or async, is called when the role is ended without force.
- Sender and receiver must not change arguments and results: they may share memory. Between processes they are pickled, so
  the class of a role that runs in a process must be importable from a module.
- Methods whose name begins with an underscore cannot be called from outside.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Self, TypeVar

from stretto.base.errors import UserError

START_DEADLINE_S = 60.0
"""Default deadline for the start of a role's process and its constructor, in seconds."""
CONSTRUCTOR = "__init__"
"""Name of the method in errors of a constructor."""
_CALM_S, _PAUSE_S, _LONGEST_PAUSE_S = 10.0, 0.1, 30.0
"""Before the restart of a process that worked for less than _CALM_S there is a pause, which doubles each time."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel those of ``tasks`` that have not ended, and wait until all have. Their errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end as `asyncio.run` does; in a new thread if this one has a running loop, as in a notebook."""
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
        except (KeyboardInterrupt, SystemExit):  # the notebook's stop button, or a program's handler of SIGTERM
            loop, task = started.result()
            loop.call_soon_threadsafe(task.cancel)
            raise


class Placement(Enum):
    """Place of a role in the local runtime. On a Ray cluster every role is an actor in its own process."""

    ASYNC = "async"
    """On the driver's loop, for roles that mostly wait. Sync methods block the loop, so they must be short."""
    THREAD = "thread"
    """In a thread of the driver's process, for torch, whose kernels release Python's lock."""
    PROCESS = "process"
    """In its own process, for Python code that computes, and for code that may crash or hang."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a role needs of its node in a cluster. On one machine there is no choice."""

    cpus: float = 0.0
    gpus: float = 0.0
    """A role with a whole GPU sees it as ``cuda:0``; several roles with parts of one share it."""
    memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the node."""


NOTHING = Needs()


@dataclass(frozen=True, slots=True)
class Handle:
    """Reference to a role, valid for all its incarnations. Can be passed to other roles; created by `Runtime.spawn`."""

    id: str
    """Unique in the runtime."""
    name: str
    """Name for log lines and errors."""
    address: Any = field(compare=False, repr=False)
    """Address of the role; internal to the runtime."""


class RoleState(Enum):
    """State of a role, as the driver sees it."""

    ALIVE = "alive"
    RESTARTING = "restarting"
    """Calls wait for the next incarnation."""
    DRAINING = "draining"
    """The role is being ended and accepts no new calls."""
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class RoleStatus:
    """State, process and restarts of a role."""

    name: str
    state: RoleState
    pid: int | None
    """Id of the role's process; None while it has none."""
    restarts: int
    why: str = ""
    """Cause of the end of the last incarnation."""
    node: str = ""
    """Address of the role's node in a cluster; empty on one machine."""


class RuntimeFailure(RuntimeError):  # noqa: N818 - as all of these, it says what happened
    """A call of a role failed without a mistake of the user (for which there is `UserError`). The caller decides what to do."""


@dataclass(eq=False)
class RoleDied(RuntimeFailure):
    """The role ended before it answered, or accepts no more calls. The method may or may not have run."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(eq=False)
class DeadlinePassed(RuntimeFailure):
    """The role has not answered before the deadline. The method may still run."""

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
    """Class name of the exception in the role, such as ``ZeroDivisionError``."""
    message: str
    trace: str
    """Traceback as text."""

    def __str__(self) -> str:
        return f"{self.name}: {self.method} raised {self.kind}: {self.message}"


@asynccontextmanager
async def deadline(name: str, method: str, seconds: float) -> AsyncIterator[None]:
    """Context that raises `DeadlinePassed` if it takes longer than ``seconds``."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlinePassed(name, method, seconds) from None


class Restarts:
    """Limits restarts within a window of time, and slows those down that follow each other quickly."""

    def __init__(self, most: int, window_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        """``most``: largest number of restarts within any ``window_s`` seconds of ``clock``."""
        self.most, self._window_s, self._clock = most, window_s, clock
        self._times_s: list[float] = []
        self._began_s = math.inf
        self._pause_s = 0.0

    def __str__(self) -> str:
        window = "" if self._window_s == math.inf else f" within {self._window_s:g} s"
        return f"{self.most} restart{'' if self.most == 1 else 's'}{window}"

    def began(self) -> None:
        """What may be restarted works from now on."""
        self._began_s = self._clock()

    def next_pause_s(self) -> float | None:
        """Count a restart. Returns the pause before it, in seconds; None: the window is full, and there must be no restart."""
        now_s = self._clock()
        self._times_s = [each_s for each_s in self._times_s if now_s - each_s < self._window_s]
        if len(self._times_s) >= self.most:
            return None
        self._times_s.append(now_s)
        is_calm = now_s - self._began_s >= _CALM_S
        self._pause_s = 0.0 if is_calm else min(max(2 * self._pause_s, _PAUSE_S), _LONGEST_PAUSE_S)
        self._began_s = math.inf
        return self._pause_s


class Caller(ABC):
    """Calls of roles. Belongs to one asyncio loop, so only async methods can use it."""

    def __init__(self) -> None:
        self._casts: set[asyncio.Task[None]] = set()

    @property
    @abstractmethod
    def host(self) -> str:
        """Address of this process's machine, which the processes of other roles can reach."""

    @abstractmethod
    async def call(self, handle: Handle, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """Result of ``method``.

        A call to a restarting role waits for the next incarnation if the runtime knows of the restart; otherwise it fails with
        `RoleDied`. When the deadline passes or the caller is cancelled, an async method is cancelled at its next await, a sync
        method that waits for its turn is dropped, and a sync method that already runs continues to its end.

        Raises:
            UserError: raised by the method.
            RoleError: the method raised another exception.
            RoleDied: the role died during the call, or before it without a restart.
            DeadlinePassed: no answer within ``deadline_s`` seconds.
        """

    def cast(self, handle: Handle, method: str, *args: Any, **kwargs: Any) -> None:
        """Call ``method`` without waiting for its result. Failures are logged."""

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
    """A runtime's record of a role that has not ended permanently."""

    handle: Handle
    again: Restarts
    deadline_s: float = START_DEADLINE_S
    state: RoleState = RoleState.ALIVE
    pid: int | None = None
    restarts: int = 0
    why: str = ""
    node: str = ""
    watch: asyncio.Task[None] | None = None

    def status(self) -> RoleStatus:
        return RoleStatus(self.handle.name, self.state, self.pid, self.restarts, self.why, self.node)


R = TypeVar("R", bound=Role)
Work = tuple[Callable[..., Any], tuple[Any, ...]]
"""Class of a role, and the arguments of its constructor."""


class Runtime(Caller, Generic[R]):
    """The driver's interface: starts, monitors and ends roles. Belongs to the loop on which it was opened; an async context manager.

    This class keeps the list of roles; `LocalRuntime` and `RayRuntime` implement processes and calls.
    """

    def __init__(self, caller: Caller):
        super().__init__()
        self._caller = caller
        self._roles: dict[str, R] = {}
        """By handle id."""
        self._ended: dict[str, RoleStatus] = {}

    @property
    def host(self) -> str:
        return self._caller.host

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
        window_s: float = math.inf,
        deadline_s: float = START_DEADLINE_S,
        needs: Needs = NOTHING,
    ) -> Handle:
        """Start a role and wait until its constructor has returned.

        Args:
            role: a class, or a `functools.partial` of a class.
            restarts: number of times within ``window_s`` seconds that a process which dies (or is ended by `restart`) is started again
                with ``role`` and ``args``, each time after a longer pause if it dies soon. Calls in flight fail; later calls reach the
                next incarnation.

        Raises:
            UserError, RoleError: raised by the constructor; the role does not exist.
            DeadlinePassed: the constructor took too long; its process was killed.
            RoleDied: its process died before.
        """
        spawned = self._place(uuid.uuid4().hex[:16], name, (role, args), placement, Restarts(restarts, window_s), needs)
        spawned.deadline_s = deadline_s
        self._roles[spawned.handle.id] = spawned
        try:
            await self._begin(spawned)
        except BaseException:
            self._bury(spawned, "it could not be started")
            raise
        spawned.again.began()
        spawned.watch = asyncio.create_task(self._watch(spawned))
        return spawned.handle

    async def call(self, handle: Handle, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """See `Caller.call`."""
        self._find(handle)
        return await self._caller.call(handle, method, *args, deadline_s=deadline_s, **kwargs)

    async def kill(self, handle: Handle, *, hard: bool = False) -> None:
        """End the role permanently, and wait until it has ended. Calls in flight fail with `RoleDied`.

        Unless ``hard``, its ``close`` is called first, for a few seconds at most. A thread cannot be killed: a sync
        method in a thread continues, and its result is dropped.
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
        """Kill the current incarnation of a role that hangs, and start the next one if any of ``restarts`` are left."""
        role = self._find(handle)
        role.state, role.why = RoleState.RESTARTING, "it was restarted"
        await self._interrupt(role)
        async with deadline(handle.name, CONSTRUCTOR, role.deadline_s):
            while self._find(handle).state is not RoleState.ALIVE:  # `_watch` sees the next, or the end
                await asyncio.sleep(0.02)

    def status(self, handle: Handle) -> RoleStatus:
        """Status of the role; the last one if the role has ended."""
        return self._ended.get(handle.id) or self._find(handle).status()

    def handles(self) -> tuple[Handle, ...]:
        """Roles that have not ended permanently, in the order in which they were spawned."""
        return tuple(role.handle for role in self._roles.values())

    async def close(self) -> None:
        """End all roles concurrently, without force. No process is left."""
        await asyncio.gather(*(self.kill(handle) for handle in self.handles()))

    @abstractmethod
    async def check(self, needs: Mapping[str, Needs]) -> None:
        """Check that roles with ``needs``, by the name of the role, have a place.
        Raises UserError: there is none, or a node has not this version of the package."""

    @abstractmethod
    async def on_all_machines(self, work: Callable[[], None]) -> None:
        """Call ``work``, which can be pickled, once on every machine; failures are logged."""

    @abstractmethod
    def _place(self, id: str, name: str, work: Work, placement: Placement, again: Restarts, needs: Needs) -> R:
        """Record of a role that is about to start."""

    @abstractmethod
    async def _start(self, role: R) -> None:
        """Start an incarnation; raises the same errors as `spawn`."""

    @abstractmethod
    async def _interrupt(self, role: R) -> None:
        """Kill the current incarnation, but do not end the role."""

    @abstractmethod
    async def _watch(self, role: R) -> None:
        """Monitor and restart incarnations until the last one has ended; then call `_bury`."""

    @abstractmethod
    async def _end(self, role: R, hard: bool) -> None:
        """End the role's process or thread, see `kill`."""

    async def _begin(self, role: R) -> None:
        """`_start` within the role's deadline; after an error, nothing of the incarnation is left."""
        try:
            async with deadline(role.handle.name, CONSTRUCTOR, role.deadline_s):
                await self._start(role)
        except BaseException:
            await self._end(role, hard=True)
            raise

    def _find(self, handle: Handle) -> R:
        if handle.id in self._ended:
            raise RoleDied(handle.name, self._ended[handle.id].why)
        assert handle.id in self._roles, f"{handle} does not belong to this runtime"
        return self._roles[handle.id]

    async def _pause(self, role: R) -> bool:
        """Count a restart and wait before it. False: there were too many, and the role has ended permanently."""
        pause_s = role.again.next_pause_s()
        if pause_s is None:
            await self._end(role, hard=True)
            self._bury(role, f"{role.why}, after {role.again}" if role.again.most else role.why)
            return False
        role.restarts += 1
        if pause_s > 1:
            _log.warning("%s: %s; it is restarted in %.0f s", role.handle.name, role.why, pause_s)
        await asyncio.sleep(pause_s)
        return True

    def _bury(self, role: R, why: str) -> None:
        """Record that the role has ended permanently."""
        if self._roles.pop(role.handle.id, None) is not None:  # else two tasks have killed it at once
            role.state, role.why, role.pid = RoleState.DEAD, why, None
            self._ended[role.handle.id] = role.status()
