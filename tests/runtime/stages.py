"""The runtimes that the conformance tests run on, and what those tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from stretto.runtime.local import LocalRuntime
from stretto.runtime.runtime import (
    Handle,
    Placement,
    RoleDied,
    RoleState,
    Runtime,
)
from tests.runtime.roles import Worker

FAST_S = 20.0
"""A deadline that is not meant to pass, on a machine that stalls now and then."""


@dataclass(frozen=True)
class Stage:
    """A runtime and where its roles are put."""

    kind: str
    placement: Placement

    @property
    def has_processes(self) -> bool:
        return self.placement is Placement.PROCESS

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Runtime]:
        if self.kind == "local":
            async with LocalRuntime() as runtime:
                yield runtime
        else:
            from stretto.runtime.ray import RayRuntime

            async with await RayRuntime.open("local") as runtime:
                yield runtime

    def run(self, work: Callable[[Runtime], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(120), self.open() as runtime:
                await work(runtime)

        asyncio.run(main())

    async def spawn(self, runtime: Runtime, role: Callable[..., Any] = Worker, *args: Any, **options: Any) -> Handle:
        return await runtime.spawn(role, *args, **{"name": "subject", "placement": self.placement, **options})


THREAD, PROCESS = Stage("local", Placement.THREAD), Stage("local", Placement.PROCESS)
ASYNC = Stage("local", Placement.ASYNC)
RAY = Stage("ray", Placement.PROCESS)
_LOCAL = [pytest.param(THREAD, id="thread"), pytest.param(PROCESS, id="process")]
_CLUSTER = pytest.param(RAY, id="ray", marks=pytest.mark.slow)
everywhere = pytest.mark.parametrize("stage", [pytest.param(ASYNC, id="async"), *_LOCAL, _CLUSTER])
concurrent = pytest.mark.parametrize("stage", [*_LOCAL, _CLUSTER])
"""Where a sync method does not hold up everything else."""
processes = pytest.mark.parametrize("stage", [pytest.param(PROCESS, id="process"), _CLUSTER])


async def until(is_so: Callable[[], bool]) -> None:
    """Long enough for Ray beside other work, which starts processes one after the other."""
    async with asyncio.timeout(3 * FAST_S):
        while not is_so():
            await asyncio.sleep(0.02)


async def persistently(runtime: Runtime, handle: Handle, method: str, *args: Any) -> Any:
    """Call until it is not met by a death."""
    while True:
        try:
            return await runtime.call(handle, method, *args, deadline_s=3 * FAST_S)
        except RoleDied:
            assert runtime.status(handle).state is not RoleState.DEAD
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
