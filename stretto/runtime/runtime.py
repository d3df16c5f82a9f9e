"""The contract between a driver, the roles it starts and whatever they run on.

A *role* is a plain class: the runtime makes one object of it, somewhere, and others call its methods through a `Handle`.
The *driver* is the one asyncio loop that owns a `Runtime` and starts, watches and ends the roles.

What a role may count on, under every runtime:

- Sync methods, the constructor among them, run one at a time, in a thread of the role's own. Async methods run
  concurrently on the role's own loop, which no sync method holds up (`Placement.ASYNC` shares the driver's for both).
- A constructor parameter named ``caller`` is filled with a `Caller`, for the role's own loop: with it the role calls the
  handles it was given. Such calls go straight from role to role; the driver does not see their data.
- ``close()``, sync or async, if there is one, is called when the role is ended without force.
- Arguments and results are read-only to whoever receives them, and are not changed any more by who sent them: they may
  be shared. Between processes they are pickled, so a role of a process must be importable from a module.
- Methods whose name begins with an underscore are not called from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol, Self

START_DEADLINE_S = 60.0
"""For a role's process and its constructor, unless the caller says otherwise."""
NO_LABELS: Mapping[str, str] = MappingProxyType({})


class Placement(Enum):
    """Where the local runtime puts a role. On a Ray cluster each is an actor, in a process of its own, whatever is asked."""

    ASYNC = "async"
    """On the driver's loop: for roles that only wait. Sync methods hold everything up, so they must be short."""
    THREAD = "thread"
    """In the driver's process, with threads of its own: for torch, whose kernels let the others run."""
    PROCESS = "process"
    """In a process of its own: for Python that computes, and for what may crash or hang."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a role takes from its machine; a reservation, not a limit that anything enforces."""

    cpus: float = 0.0
    """Cores."""
    gpus: float = 0.0
    """Devices; a share where roles go halves."""


NO_RESOURCES = Resources()


@dataclass(frozen=True, slots=True)
class Handle:
    """Names a role, over all its incarnations. May be passed to other roles; written by `Runtime.spawn`."""

    id: str
    """Unique in the runtime."""
    name: str
    """For people: log lines and errors."""
    address: Any = field(compare=False, repr=False)
    """How the runtime reaches it; nobody else's business."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Names a value in the runtime's store. Written by `Caller.put`; may be passed to other roles."""

    id: str
    num_bytes: int
    """Size of the value as stored, where the store says so, else 0."""
    address: Any = field(compare=False, repr=False)


class RoleState(Enum):
    """What may be asked of a role."""

    ALIVE = "alive"
    RESTARTING = "restarting"
    """Calls wait for the next incarnation."""
    DRAINING = "draining"
    """Takes no new calls."""
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class RoleStatus:
    """A role as the driver sees it. What a process reports of itself may be a second old."""

    name: str
    state: RoleState
    pid: int | None
    """Of the process it lives in; None while there is none."""
    restarts: int
    num_calls: int
    """In flight, whoever made them, those that wait for the role's thread included."""
    oldest_call_s: float
    """Age of the oldest of them; 0 without any."""
    failed_casts: int
    """Casts that raised, or found the role dead, as far as this incarnation and the driver know."""
    labels: Mapping[str, str]
    why: str = ""
    """Why the last incarnation ended."""


class RuntimeFailure(RuntimeError):  # noqa: N818 - as all of these, it says what happened
    """Something went wrong between a caller and a role: data for the one who calls, unlike a `UserError`."""


class RoleDied(RuntimeFailure):
    """The role ended before it answered, or takes no calls any more. It may or may not have done the work."""

    def __init__(self, name: str, why: str):
        super().__init__(f"{name}: {why}")
        self.name = name
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return RoleDied, (self.name, self.why)


class DeadlinePassed(RuntimeFailure):
    """The role has not answered in time. It may still do the work."""

    def __init__(self, name: str, method: str, seconds: float):
        super().__init__(f"{name}: {method} has not answered within {seconds:g} s")
        self.name = name
        self.method = method
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return DeadlinePassed, (self.name, self.method, self.seconds)


class RoleError(RuntimeFailure):
    """The role's method, or its constructor, raised something other than a `UserError`."""

    def __init__(self, name: str, method: str, kind: str, message: str, trace: str):
        super().__init__(f"{name}: {method} raised {kind}: {message}")
        self.name = name
        self.method = method
        self.kind = kind
        """Class name of what was raised there: ``ZeroDivisionError``."""
        self.message = message
        self.trace = trace
        """The traceback, as text."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RoleError, (self.name, self.method, self.kind, self.message, self.trace)


class NoRoom(RuntimeFailure):
    """The runtime does not have the resources that a role asks for."""


class RefLost(RuntimeFailure):
    """The value was freed, or went with the machine that held it."""


class Caller(Protocol):
    """What a role may do with others. It belongs to one asyncio loop: a sync method that needs it is an async one."""

    async def call(
        self, handle: Handle, method: str, *args: Any, deadline_s: float, key: str | None = None, **kwargs: Any
    ) -> Any:
        """What ``method`` returns.

        A call to a role that is restarting waits for it, where the runtime can tell; else it fails with `RoleDied`.
        When the deadline passes, or the caller is cancelled, an async method is cancelled at its next await and a sync
        one that waits for its turn is dropped; one that runs is left to finish. With a ``key`` nothing is cancelled:
        the work goes on, once, and whoever calls again with the same key gets its result; an incarnation remembers its
        latest successful ones.

        Raises:
            UserError: raised by the method, passed on as it is.
            RoleError: the method raised anything else.
            RoleDied: the role died meanwhile, or had before and is not restarted.
            DeadlinePassed: no answer within ``deadline_s`` seconds.
        """
        ...

    def cast(self, handle: Handle, method: str, *args: Any, **kwargs: Any) -> None:
        """Call ``method`` and wait for nothing. What fails is logged and counted."""
        ...

    async def put(self, value: Any) -> Ref:
        """Store an immutable value until `free`, or the runtime's end.

        On a cluster the value goes with the process that stored it; on one machine it outlives its role.
        """
        ...

    async def get(self, ref: Ref, deadline_s: float) -> Any:
        """The value, its arrays read-only and not copied where the store allows it.

        Raises:
            RefLost: it is not there any more.
            DeadlinePassed: it did not come in time.
        """
        ...

    def free(self, ref: Ref) -> None:
        """Forget the value; those who have it keep it. Freeing twice is nothing."""
        ...


class Runtime(Caller, Protocol):
    """The driver's side. Everything belongs to the loop it was opened on; as an async context manager, it closes itself."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None: ...

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
        """Start a role and wait until its constructor has returned.

        Args:
            role: a class, or a `functools.partial` of one.
            restarts: how many times a process that dies by itself (or by `restart`) is started afresh, from ``role``
                and ``args``. Calls in flight fail; later ones meet the next incarnation.
            labels: facts about the role, kept for whoever chooses among handles.

        Raises:
            UserError, RoleError: the constructor raised it; nothing is left behind.
            DeadlinePassed: the constructor hangs; it has been killed where it can be.
            RoleDied: its process died first.
            NoRoom: the resources are not to be had.
        """
        ...

    async def kill(self, handle: Handle, *, hard: bool = False) -> None:
        """End the role for good and wait until it has ended. Calls in flight fail with `RoleDied`.

        Without force its ``close`` is called first, for a few seconds at most. A thread cannot be killed: what a sync
        method does there goes on, unheard.
        """
        ...

    async def restart(self, handle: Handle) -> None:
        """End this incarnation by force and start the next, if any of ``restarts`` are left: for a role that hangs."""
        ...

    async def drain(self, handle: Handle, deadline_s: float) -> None:
        """Take no new calls and wait for those in flight; the role lives on until `kill`.

        Raises:
            DeadlinePassed: some are still in flight.
        """
        ...

    def status(self, handle: Handle) -> RoleStatus:
        """How the role is; a role that has ended keeps its last status."""
        ...

    def handles(self) -> tuple[Handle, ...]:
        """Roles that have not ended for good, in the order they were spawned."""
        ...

    async def close(self) -> None:
        """End every role without force, all at once, and drop every stored value. No process is left."""
        ...
