"""The runtime of a Ray cluster: every role is a Ray actor.

Ray starts and restarts the actors, and executes each call at most once. The driver polls the state of every actor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import stretto
from stretto.base.errors import UserError, one_line
from stretto.runtime.actor import CLOSE_S, Actor, Worker
from stretto.runtime.runtime import (
    CONSTRUCTOR,
    Caller,
    DeadlinePassed,
    Handle,
    Needs,
    Placement,
    Restarts,
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
"""Interval between two polls of an actor, in seconds."""
_POLL_S = 0.05
_CONNECT_S = 10.0
"""Longest wait for a cluster's answer, in seconds."""
_VERSION_S, _WORK_S = 30.0, 120.0
"""Longest wait for a node to name its version of the package, and to do short work after which nothing waits, in seconds. A busy node
needs more than a minute to start a process."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class RayCaller(Caller):
    """`Caller` in the driver or in an actor."""

    def __init__(self) -> None:
        super().__init__()
        self._away: set[str] = set()
        """Ids of handles whose last call met an actor that was restarting. The next call waits until the actor answers."""

    @property
    def host(self) -> str:
        return str(ray.util.get_node_ip_address())

    async def call(self, handle: Handle, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        ref = None
        try:
            async with deadline(handle.name, method, deadline_s):
                await self._is_back(handle)
                ref = handle.address.call.remote(method, args, kwargs)
                result, error = await ref
        except (asyncio.CancelledError, DeadlinePassed):
            if ref is not None:
                ray.cancel(ref)
            raise
        except RayTaskError as error:  # arguments or results that cannot be sent
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise RoleError(handle.name, method, type(cause).__name__, str(cause), str(error)) from None
        except RayError as error:
            if isinstance(error, ActorUnavailableError):
                self._away.add(handle.id)
            raise RoleDied(handle.name, _reason(error)) from None
        if error is not None:
            raise error
        return result

    async def _is_back(self, handle: Handle) -> None:
        """Wait for the next incarnation of an actor that was restarting."""
        while handle.id in self._away:
            try:
                await handle.address.look.remote()
                self._away.discard(handle.id)
            except ActorUnavailableError:
                await asyncio.sleep(_BEAT_S)


class RoleActor:
    """One incarnation of a role. Ray creates a new one with the same arguments when the process dies."""

    def __init__(self, name: str, work: Sequence[Any], folder: str):
        """
        Args:
            work: list with a Ray reference to the role's class and arguments; Ray would replace a bare reference by its value.
            folder: the driver's working directory. Where it exists, relative paths of a recipe mean the same here.
        """
        with suppress(OSError):  # this node does not share it
            os.chdir(folder)
        self._name = name
        self._work = work
        self._incarnation = uuid.uuid4().hex
        self._actor: Actor | None = None
        self._is_begun = asyncio.Event()

    async def look(self) -> tuple[str, int, str, str]:
        """The incarnation's id, its process id, and the address and the id of its node."""
        node_id = ray.get_runtime_context().get_node_id()
        return self._incarnation, os.getpid(), ray.util.get_node_ip_address(), node_id

    async def start(self) -> Exception | None:
        """Create the role, and return the exception of its constructor, or None. Ray starts a process again at once and without limit;
        its role is created when the driver calls this."""
        worker = Worker()
        threading.Thread(target=worker.run, name=self._name, daemon=True).start()
        self._actor = actor = Actor(self._name, worker)
        self._is_begun.set()
        work = await self._work[0]
        try:
            await actor.start(lambda: work, RayCaller())
        except (UserError, RuntimeFailure) as error:
            return error
        return None

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Exception | None]:
        """Result and exception of ``method``. The exception is returned, because Ray would wrap a raised one."""
        await self._is_begun.wait()
        assert self._actor is not None
        try:
            return await self._actor.call(method, args, kwargs), None
        except (UserError, RuntimeFailure) as error:
            return None, error

    async def close(self) -> None:
        if self._actor is not None:
            self._actor.end("it was ended")
            await self._actor.close()


@dataclass(eq=False, kw_only=True)
class _RayRole(Role):
    work: Any
    """Reference that keeps class and arguments in Ray's object store. Ray frees large arguments once an actor has started, and then
    could not restart it."""
    needs: Needs
    incarnation: str = ""
    node_id: str = ""
    is_away: bool = False
    """Whether an incarnation that works did not answer the last time."""


class RayRuntime(Runtime[_RayRole]):
    """A `Runtime` of the running loop. Use it as an async context manager, or call `close`."""

    def __init__(self, owns_cluster: bool):
        """For a process that is connected to a cluster: see `open`."""
        super().__init__(RayCaller())
        self._owns_cluster = owns_cluster
        self._draining: frozenset[str] = frozenset()
        """Ids of the nodes that are about to go, as Ray told them last."""
        self._asks_at_s = 0.0
        """Time of the next question for them."""

    @classmethod
    async def open(cls, address: str) -> Self:
        """Connect to a cluster.

        Args:
            address: ``host:port``; ``auto``: the cluster of this machine or of RAY_ADDRESS; ``local``: a new cluster for this
                run.

        Raises:
            UserError: the cluster does not answer or cannot be started.
        """
        if ray.is_initialized():
            return cls(owns_cluster=False)
        options: dict[str, Any] = {"address": address, "log_to_driver": True, "logging_level": "error"}
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # In this thread, because the kernel kills the processes of a cluster when the thread that started them ends.
            problem = _init({**options, "include_dashboard": False})
            message = f"Ray starts no cluster here ({problem}); use --runtime local"
        else:
            problem = await _reach(address, options)
            message = (
                f"no Ray cluster answers there ({problem}); start one with `ray start --head`, "
                f"or run without one: --runtime local"
            )
        if problem is not None:
            raise UserError(f"--address {address}: {message}")
        return cls(owns_cluster=True)

    async def close(self) -> None:
        await super().close()
        if self._owns_cluster:
            await asyncio.to_thread(ray.shutdown)

    async def check(self, needs: Mapping[str, Needs]) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        for role, need in needs.items():
            if not any(_fits(node, need) for node in nodes):
                described = "; ".join(_described(node) for node in nodes)
                raise UserError(
                    f"resources.{role}: no node has {_wanted(need)}; change it, or add such a node. The nodes: {described}"
                )
        if len(nodes) > 1:
            own = _version()
            for node, found in zip(nodes, await asyncio.gather(*map(_version_of, nodes)), strict=True):
                if found != own:
                    raise UserError(
                        f"--address: node {node['NodeManagerAddress']} has {found}, this machine has {own}; install the same there"
                    )

    async def on_all_machines(self, work: Callable[[], None]) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        results = await asyncio.gather(*(_on(node, work, _WORK_S) for node in nodes), return_exceptions=True)
        for node, result in zip(nodes, results, strict=True):
            if isinstance(result, Exception):
                cause = result.cause if isinstance(result, RayTaskError) else result
                _log.warning("node %s: %s", node["NodeManagerAddress"], one_line(cause, 200))

    def _place(self, id: str, name: str, work: Work, placement: Placement, again: Restarts, needs: Needs) -> _RayRole:
        actor = ray.remote(RoleActor).options(
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            memory=needs.memory_bytes,
            label_selector=dict(needs.labels),
            scheduling_strategy="SPREAD",
            max_restarts=-1 if again.most else 0,  # `_watch` counts them
            max_concurrency=10_000,  # the role's own worker queues calls, so Ray must not
        )
        reference = ray.put(work)
        handle = Handle(id, name, actor.remote(name, [reference], os.getcwd()))
        return _RayRole(handle, again, work=reference, needs=needs)

    async def _start(self, role: _RayRole) -> None:
        try:
            await self._look(role)
            error: Exception | None = await role.handle.address.start.remote()
        except RayError as problem:
            raise RoleDied(role.handle.name, _reason(problem)) from None
        if error is not None:
            raise error

    async def _interrupt(self, role: _RayRole) -> None:
        role.is_away = False
        ray.kill(role.handle.address, no_restart=False)

    async def _watch(self, role: _RayRole) -> None:
        while True:
            await asyncio.sleep(_BEAT_S if role.state is RoleState.ALIVE else _POLL_S)
            try:
                if await self._look(role):
                    if not await self._pause(role):
                        return
                    async with deadline(role.handle.name, CONSTRUCTOR, role.deadline_s):
                        await self._start(role)
                    role.state = RoleState.ALIVE
                    role.again.began()
                elif role.is_away:
                    role.state, role.is_away = RoleState.ALIVE, False
                elif role.state is RoleState.ALIVE and await self._should_move(role):
                    role.state, role.why = RoleState.RESTARTING, "its node is about to go"
                    await self._interrupt(role)
            except ActorUnavailableError as error:
                if role.state is RoleState.ALIVE:
                    role.state, role.why, role.is_away = RoleState.RESTARTING, _reason(error), True
            except RayActorError as error:
                # Ray reports calls in flight so, also of an actor that it starts again: one that the runtime killed, or whose node ended
                if await asyncio.to_thread(_is_dead, role.handle):
                    self._bury(role, _reason(error))
                    return
                if role.state is RoleState.ALIVE:
                    role.state, role.why = RoleState.RESTARTING, _reason(error)
            except RoleDied as error:  # in its constructor: the next incarnation follows
                role.why = error.why
            except (UserError, RuntimeFailure) as error:
                role.why = str(error)
                await self._interrupt(role)

    async def _should_move(self, role: _RayRole) -> bool:
        """Whether the role's node is about to go (Ray starts nothing there any more), and another node can take the role."""
        if (now_s := time.monotonic()) >= self._asks_at_s:
            self._asks_at_s = now_s + _BEAT_S
            self._draining = await asyncio.to_thread(_draining_nodes)
        if role.node_id not in self._draining or not role.again.most:
            return False
        return any(
            node["Alive"] and node["NodeID"] not in self._draining and _fits(node, role.needs) for node in ray.nodes()
        )

    async def _look(self, role: _RayRole) -> bool:
        """Poll the actor; returns whether it is another incarnation than the last time, which does not work yet."""
        last = role.incarnation
        role.incarnation, role.pid, role.node, role.node_id = await role.handle.address.look.remote()
        if is_new := role.incarnation != last and bool(last):
            role.is_away = False
            if role.state is RoleState.ALIVE:
                role.state, role.why = RoleState.RESTARTING, "its process has ended"
        return is_new

    async def _end(self, role: _RayRole, hard: bool) -> None:
        """Kill the actor, and wait until Ray reports its death."""
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


def _is_dead(handle: Handle) -> bool:
    """Whether Ray will not start the actor again."""
    return ray._private.state.actors(handle.address._actor_id.hex()).get("State") in (None, "DEAD")


def _draining_nodes() -> frozenset[str]:
    """Ids of the nodes that a cloud provider takes back, an autoscaler removes, or `ray drain-node` names."""
    return frozenset(ray._private.state.state.get_draining_nodes())  # Ray Train reads it here too: nothing public tells


def _fits(node: Mapping[str, Any], need: Needs) -> bool:
    """Whether an empty ``node`` of `ray.nodes` has what a role needs."""
    has, labels = node["Resources"], node.get("Labels", {})
    amounts = {"CPU": need.cpus, "GPU": need.gpus, "memory": need.memory_bytes}
    return all(has.get(name, 0) >= amount for name, amount in amounts.items()) and need.labels.items() <= labels.items()


def _wanted(need: Needs) -> str:
    amounts = {"CPUs": need.cpus, "GPUs": need.gpus, "GB of memory": need.memory_bytes / 1e9}
    parts = [f"{amount:g} {name}" for name, amount in amounts.items() if amount]
    return " and ".join(parts + [f"the label {name}={value}" for name, value in need.labels.items()])


def _described(node: Mapping[str, Any]) -> str:
    has, labels = node["Resources"], node.get("Labels", {})
    own = ", ".join(f"{name}={value}" for name, value in labels.items() if not name.startswith("ray.io/"))
    return (
        f"{node['NodeManagerAddress']} has {has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs, "
        f"{has.get('memory', 0) / 1e9:.1f} GB, labels: {own or 'none'}"
    )


def _version() -> str:
    return f"stretto {stretto.__version__}"


async def _on(node: Mapping[str, Any], work: Callable[[], T], limit_s: float) -> T:
    """Result of ``work`` on ``node``. Raises RayError: it failed. TimeoutError: the node does not answer."""
    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    ref: Any = ray.remote(_done).options(num_cpus=0, scheduling_strategy=there, max_retries=0).remote(work)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(ref.future()), limit_s)
    except TimeoutError:
        raise TimeoutError(f"not answered within {limit_s:g} s") from None


def _done(work: Any) -> Any:
    return work()


async def _version_of(node: Mapping[str, Any]) -> str:
    """`_version` on ``node``, or why there is none."""
    try:
        return await _on(node, _version, _VERSION_S)
    except TimeoutError as error:
        return str(error)
    except RayError as error:
        lines = str(error).strip().splitlines()
        missing = next((line for line in reversed(lines) if "No module named" in line), "")
        return f"no stretto ({missing})" if missing else _reason(error)


def _reason(error: Exception) -> str:
    """Cause of a failed call, on one line."""
    if isinstance(error, ActorUnavailableError):
        return "its process does not answer; perhaps it restarts"
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return f"its process has ended: {line}" if isinstance(error, RayActorError) else line


async def _reach(address: str, options: Mapping[str, Any]) -> str | None:
    """`_init` in a thread, because it may wait for minutes; returns the cause of a failure, or None."""
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
    """`ray.init`; returns the cause of a failure on one line, or None."""
    try:
        ray.init(**options)
    except Exception as error:  # Ray raises exceptions of many classes
        return _reason(error)
    return None
