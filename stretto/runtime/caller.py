"""How roles of the local runtime reach each other: in one process by its hosts, between two by the role's socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from stretto.base.errors import UserError
from stretto.runtime.host import Host, on_loop
from stretto.runtime.peer import Connection
from stretto.runtime.runtime import DeadlinePassed, Handle, Ref, RoleDied, RuntimeFailure
from stretto.runtime.store import Store

_log = logging.getLogger(__name__)


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


class LocalCaller:
    """A `Caller`; belongs to the loop it is first used on."""

    def __init__(self, hosts: Mapping[str, Host], store: Store, address: str | None = None):
        """
        Args:
            hosts: of this process, by handle id; looked up at every call.
            address: where others reach them; None: nobody has to.
        """
        self._hosts = hosts
        self._store = store
        self._address = address
        self._connections: dict[str, Connection] = {}
        self._connecting: dict[str, asyncio.Lock] = {}
        self._casts: set[asyncio.Task[None]] = set()
        self.failed_casts: Counter[str] = Counter()
        """By handle id: casts that did not reach their role."""

    async def call(
        self, handle: Handle, method: str, *args: Any, deadline_s: float, key: str | None = None, **kwargs: Any
    ) -> Any:
        async with deadline(handle.name, method, deadline_s):
            host = self._host(handle)
            if host is not None:
                return await on_loop(host.loop, host.call(method, args, kwargs, key))
            connection = await self._connect(handle)
            return await connection.call(handle.id, method, args, kwargs, key)

    def cast(self, handle: Handle, method: str, *args: Any, **kwargs: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._cast(handle, method, args, kwargs))
        self._casts.add(task)
        task.add_done_callback(self._casts.discard)

    async def put(self, value: Any) -> Ref:
        return await asyncio.to_thread(self._store.put, value)

    async def get(self, ref: Ref, deadline_s: float) -> Any:
        async with deadline("the store", "get", deadline_s):
            return await asyncio.to_thread(self._store.get, ref)

    def free(self, ref: Ref) -> None:
        self._store.free(ref)

    async def disconnect(self) -> None:
        for task in tuple(self._casts):
            task.cancel()
        for connection in self._connections.values():
            await connection.close()
        self._connections.clear()

    def _host(self, handle: Handle) -> Host | None:
        """The role's host in this process; None: it lives in another."""
        host = self._hosts.get(handle.id)
        if host is not None and host.refusal is not None:
            raise RoleDied(handle.name, host.refusal)
        if host is None and handle.address == self._address:
            raise RoleDied(handle.name, "it has ended")
        return host

    async def _cast(self, handle: Handle, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            host = self._host(handle)
            if host is not None:
                host.loop.call_soon_threadsafe(host.cast, method, lambda: (args, kwargs))
            else:
                (await self._connect(handle)).cast(handle.id, method, args, kwargs)
        except (UserError, RuntimeFailure) as error:
            self.failed_casts[handle.id] += 1
            _log.warning("cast of %s failed: %s", method, error)

    async def _connect(self, handle: Handle) -> Connection:
        """The one connection to the role's process; a new one where the last incarnation took it along."""
        async with self._connecting.setdefault(handle.address, asyncio.Lock()):
            connection = self._connections.get(handle.address)
            if connection is not None and connection.is_open:
                return connection
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, handle.address)
            except (ConnectionRefusedError, FileNotFoundError):
                sock.close()
                raise RoleDied(handle.name, "it has ended") from None
            except BaseException:
                sock.close()
                raise
            connection = self._connections[handle.address] = Connection(sock, handle.name)
            return connection
