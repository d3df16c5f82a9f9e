"""Calls over a link: `Connection` is the side that asks, `serve` the side that answers.

Envelopes, with the packed body in brackets: ``("call", number, target, method, key)`` [args, kwargs], ``("cast", target,
method)`` [args, kwargs], ``("cancel", number)``, ``("result", number)`` [value], ``("error", number)`` [exception].
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.runtime.host import Host, as_role_error, on_loop
from stretto.runtime.runtime import RoleDied, RuntimeFailure
from stretto.runtime.wire import Link, Packed, pack, unpack

_NOTHING = pack(None)


class Connection:
    """Asks the hosts behind one socket; any number of calls at once. Belongs to the running loop."""

    def __init__(self, sock: socket.socket, name: str):
        """``name`` is the role's, for errors."""
        self._name = name
        self._link = Link(sock)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Packed]] = {}
        self._is_open = True
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @property
    def is_open(self) -> bool:
        """False once the other side is gone."""
        return self._is_open

    async def call(
        self, target: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], key: str | None = None
    ) -> Any:
        """As `Host.call`; cancelling it cancels there."""
        packed = pack((args, kwargs))
        if not self._is_open:
            raise self._died()
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._link.send(("call", number, target, method, key), packed)
        try:
            answer = await future
        except asyncio.CancelledError:
            self._link.send(("cancel", number), _NOTHING)
            raise
        finally:
            self._waiting.pop(number, None)
        try:
            return unpack(answer)
        except Exception as error:
            raise as_role_error(self._name, method, error) from None

    def cast(self, target: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        packed = pack((args, kwargs))
        if not self._is_open:
            raise self._died()
        self._link.send(("cast", target, method), packed)

    async def close(self) -> None:
        """What waits fails with `RoleDied`."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def _died(self) -> RoleDied:
        return RoleDied(self._name, "its process has ended, or closed the connection")

    async def _read(self) -> None:
        try:
            while True:
                (kind, number), packed = await self._link.receive()
                future = self._waiting.get(number)
                if future is None or future.done():
                    continue  # cancelled meanwhile
                if kind == "result":
                    future.set_result(packed)
                else:
                    future.set_exception(unpack(packed))
        except OSError:
            pass  # told below, to all who wait
        finally:
            self._is_open = False
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._died())
            await self._link.close()


async def serve(sock: socket.socket, hosts: Mapping[str, Host]) -> None:
    """Answer one connection until the other side leaves; what it then still waits for is cancelled.

    Args:
        hosts: by target; looked up when a call comes.
    """
    link, tasks = Link(sock), dict[int, asyncio.Task[None]]()
    try:
        while True:
            envelope, packed = await link.receive()
            if envelope[0] == "call":
                number = envelope[1]
                task = tasks[number] = asyncio.create_task(_answer(link, hosts, envelope, packed))
                task.add_done_callback(lambda _, number=number: tasks.pop(number))  # type: ignore[misc]
            elif envelope[0] == "cancel":
                if envelope[1] in tasks:  # else it has been answered meanwhile
                    tasks[envelope[1]].cancel()
            else:
                assert envelope[0] == "cast", f"a frame of kind {envelope[0]!r}"
                _cast(hosts, envelope, packed)
            del envelope, packed
    except OSError:
        pass  # the other side has gone
    finally:
        for task in tuple(tasks.values()):
            task.cancel()
        await link.close()


async def accept(listener: socket.socket, hosts: Mapping[str, Host]) -> None:
    """`serve` whoever connects, until cancelled."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    try:
        while True:
            sock, _ = await loop.sock_accept(listener)
            task = asyncio.create_task(serve(sock, hosts))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(link: Link, hosts: Mapping[str, Host], envelope: tuple[Any, ...], packed: Packed) -> None:
    _, number, target, method, key = envelope
    try:
        host = _find(hosts, target)
        try:
            args, kwargs = unpack(packed)
        except Exception as error:
            raise as_role_error(host.name, method, error) from None
        del packed
        result = await on_loop(host.loop, host.call(method, args, kwargs, key))
        try:
            answer = pack(result)
        except Exception as error:
            raise as_role_error(host.name, method, error) from None
    except (ValueError, RuntimeFailure) as error:
        link.send(("error", number), pack(error))
    else:
        link.send(("result", number), answer)


def _cast(hosts: Mapping[str, Host], envelope: tuple[Any, ...], packed: Packed) -> None:
    _, target, method = envelope
    host = hosts.get(target)
    if host is None:
        return  # it has ended, which its driver counts and logs
    host.loop.call_soon_threadsafe(host.cast, method, lambda: unpack(packed))


def _find(hosts: Mapping[str, Host], target: str) -> Host:
    host = hosts.get(target)
    if host is None:
        raise RoleDied(target, "it has ended")
    return host
