"""A role in the driver's process: with threads of its own, or on the driver's loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from stretto.runtime.caller import LocalCaller, deadline
from stretto.runtime.host import CLOSE_S, CONSTRUCTOR, Counts, Host, Worker, build, on_loop
from stretto.runtime.runtime import Handle
from stretto.runtime.store import Store


class _Threads:
    """A loop and a worker, on daemon threads."""

    def __init__(self, name: str) -> None:
        self.worker = Worker()
        self.loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name} loop", daemon=True)
        self._thread.start()
        threading.Thread(target=self.worker.run, name=name, daemon=True).start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._wait())

    async def _wait(self) -> None:
        await self._stop.wait()

    def stop(self) -> None:
        """Both threads end as soon as what they do lets them."""
        self.worker.stop()
        self.loop.call_soon_threadsafe(self._stop.set)

    async def join(self) -> None:
        """Wait for the loop's thread, but no longer than `CLOSE_S`."""
        await asyncio.to_thread(self._thread.join, CLOSE_S)


class RoleThread:
    """One incarnation. Belongs to the driver's loop."""

    def __init__(
        self,
        hosts: dict[str, Host],
        handle: Handle,
        role: Callable[..., Any],
        args: Sequence[Any],
        store: Store,
        has_threads: bool,
    ):
        """
        Args:
            hosts: of the driver's process, by handle id; this one's is put in, and callers wait in it from now on.
            has_threads: False: the driver's loop does everything.
        """
        self._hosts = hosts
        self._handle = handle
        self._threads = _Threads(handle.name) if has_threads else None
        self._loop = self._threads.loop if self._threads else asyncio.get_running_loop()
        self._host = Host(handle.name, self._loop, self._threads.worker if self._threads else None)
        self._caller = LocalCaller(hosts, store, handle.address)
        self._build = lambda: build(role, args, self._caller)
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        hosts[handle.id] = self._host

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def counts(self) -> Counts:
        return self._host.counts()

    async def start(self, deadline_s: float) -> None:
        """Raises what `Runtime.spawn` does; nothing but a thread that hangs is left then."""
        try:
            async with deadline(self._handle.name, CONSTRUCTOR, deadline_s):
                await on_loop(self._loop, self._host.start(self._build))
        except BaseException:
            await self.kill()
            raise

    async def wait(self) -> str:
        return await asyncio.shield(self._over)  # a thread does not die by itself

    async def drain(self) -> None:
        self._host.refuse("it is draining and takes no new calls")
        await on_loop(self._loop, self._host.drain())

    async def close(self) -> None:
        self._end("it was ended")
        await on_loop(self._loop, self._host.close())
        await self._stop()
        if self._threads:
            await self._threads.join()

    async def kill(self) -> str:
        """Whatever its threads do, they are left to it."""
        if not self._over.done():
            self._end("it was killed")
            await self._stop()
        return await self._over

    def _end(self, why: str) -> None:
        self._host.refuse(why)
        self._loop.call_soon_threadsafe(self._host.end, why)
        if self._hosts.get(self._handle.id) is self._host:
            del self._hosts[self._handle.id]
        if not self._over.done():
            self._over.set_result(why)

    async def _stop(self) -> None:
        if self._threads:
            self._threads.stop()
        else:
            await self._caller.disconnect()
