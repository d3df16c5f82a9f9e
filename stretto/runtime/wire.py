"""Frames between the processes of one machine: an envelope, a pickled body, and its large buffers beside it.

A pickle of protocol 5 leaves numpy's buffers out, so an array goes from the sender's memory into the socket and from
the socket into the receiver's array, with no copy between.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_HEAD = struct.Struct("<QQQ")
"""Bytes of the envelope, bytes of the body, number of buffers; the buffers' lengths follow, 8 bytes each."""
_JOIN_BYTES = 1 << 16
"""Parts up to this size are copied together, and read ahead: one system call is dearer."""
_SOCKET_BYTES = 1 << 20

Buffer = memoryview | bytes | bytearray


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled value. Its buffers are views of the value's own memory until they are sent."""

    body: Buffer
    buffers: Sequence[Buffer]

    @property
    def num_bytes(self) -> int:
        return len(self.body) + sum(len(buffer) for buffer in self.buffers)


def pack(value: Any) -> Packed:
    """Raises TypeError for a value that cannot be sent."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    except Exception as error:  # pickle has several for it, and a class may raise its own
        raise TypeError(f"a value cannot be sent to another process: {error}") from error
    return Packed(body, [buffer.raw() for buffer in buffers])


def unpack(packed: Packed) -> Any:
    """Raises whatever the classes in it raise: the bytes are ours, but a module may not be importable here."""
    return pickle.loads(packed.body, buffers=packed.buffers)


class Link:
    """One socket, which it owns: sends frames in order without waiting, receives them one by one."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._ahead = memoryview(bytearray(_JOIN_BYTES))
        """Bytes that came along with those asked for: from `_at` to `_end`."""
        self._at = self._end = 0
        self._outbox: deque[tuple[tuple[Any, ...], Packed]] = deque()
        self._has_work = asyncio.Event()
        # A task of its own: a sender who is cancelled must not leave half a frame behind.
        self._writer = self._loop.create_task(self._write())

    def send(self, envelope: tuple[Any, ...], packed: Packed) -> None:
        """Of a link that is gone, nothing is heard here: `receive` tells."""
        self._outbox.append((envelope, packed))
        self._has_work.set()

    async def receive(self) -> tuple[tuple[Any, ...], Packed]:
        """The next frame.

        Raises:
            OSError: the other side is gone.
        """
        envelope_bytes, body_bytes, num_buffers = _HEAD.unpack(await self._read(_HEAD.size))
        lengths = struct.unpack(f"<{num_buffers}Q", await self._read(8 * num_buffers))
        head = memoryview(await self._read(envelope_bytes + body_bytes))
        buffers = [await self._read(length) for length in lengths]
        return pickle.loads(head[:envelope_bytes]), Packed(head[envelope_bytes:], buffers)

    async def close(self) -> None:
        """Nobody may be inside `receive` any more."""
        self._writer.cancel()
        try:
            await asyncio.gather(self._writer, return_exceptions=True)
            # The loop takes a cancelled reader or writer out in its next round, by number, and a new socket may get it.
            await asyncio.sleep(0)
        finally:
            self._socket.close()

    async def _read(self, num_bytes: int) -> bytearray:
        """The next bytes: from what came along with the last ones, as far as that goes."""
        into = bytearray(num_bytes)
        view, done = memoryview(into), 0
        while done < num_bytes:
            if self._at < self._end:
                count = min(num_bytes - done, self._end - self._at)
                view[done : done + count] = self._ahead[self._at : self._at + count]
                self._at += count
            elif num_bytes - done >= len(self._ahead):
                count = self._received(await self._loop.sock_recv_into(self._socket, view[done:]))
            else:
                self._end = self._received(await self._loop.sock_recv_into(self._socket, self._ahead))
                self._at = count = 0
            done += count
        return into

    def _received(self, count: int) -> int:
        if count == 0:
            raise ConnectionResetError("the other side has closed the connection")
        return count

    async def _write(self) -> None:
        while True:
            while self._outbox:
                try:
                    await self._write_frames()
                except OSError:
                    with suppress(OSError):  # the other side may have done it
                        self._socket.shutdown(socket.SHUT_RDWR)  # wakes `receive`, which tells everybody
                    return
            self._has_work.clear()
            await self._has_work.wait()

    async def _write_frames(self) -> None:
        """Everything that waits, small parts joined."""
        joined = bytearray()
        while self._outbox:
            envelope, packed = self._outbox.popleft()
            envelope_bytes = pickle.dumps(envelope, protocol=5)
            lengths = [len(buffer) for buffer in packed.buffers]
            joined += _HEAD.pack(len(envelope_bytes), len(packed.body), len(lengths))
            joined += struct.pack(f"<{len(lengths)}Q", *lengths)
            for part in (envelope_bytes, packed.body, *packed.buffers):
                if len(joined) + len(part) > _JOIN_BYTES:
                    await self._loop.sock_sendall(self._socket, joined)
                    joined = bytearray()
                if len(part) <= _JOIN_BYTES:
                    joined += part
                else:
                    await self._loop.sock_sendall(self._socket, part)
            del envelope, packed
        if joined:
            await self._loop.sock_sendall(self._socket, joined)
