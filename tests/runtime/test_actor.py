"""Frames over a socket: whole and in order, however they were joined on the way out and torn on the way in."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.runtime.actor import Actor, Connection, LocalCaller
from stretto.runtime.runtime import RoleDied
from tests.runtime.roles import Worker

SIZES = st.lists(st.sampled_from([0, 1, 100, 4_000, 65_530, 65_536, 70_000, 300_000]), min_size=1, max_size=12)


async def connected(sock: socket.socket, actors: dict[str, Actor]) -> Connection:
    connection = Connection("subject", actors)
    await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=sock)
    return connection


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, num_buffers=st.integers(0, 3))
def test_frames_of_any_size_arrive_in_order(sizes: list[int], num_buffers: int) -> None:
    """Small ones share system calls and are read ahead; large ones go straight to where they belong."""
    values = [
        (
            number,
            bytes([number % 256]) * size,
            [np.full(size, number + extra, np.uint8) for extra in range(num_buffers)],
        )
        for number, size in enumerate(sizes)
    ]

    async def work() -> None:
        actor = Actor("subject", None)
        await actor.start(lambda: (Worker, ()), LocalCaller({}))
        left, right = socket.socketpair()
        answering, asking = await connected(left, {"id": actor}), await connected(right, {})
        try:
            await asyncio.gather(*(asking.call("id", "note", (value,), {}) for value in values))
            echoed = await asyncio.gather(*(asking.call("id", "echo", (value,), {}) for value in values))
            noted: list[Any] = await asking.call("id", "read_log", (), {})
            for found in (echoed, noted):
                for value, got in zip(values, found, strict=True):
                    assert got[:2] == value[:2]
                    for one, other in zip(got[2], value[2], strict=True):
                        np.testing.assert_array_equal(one, other)
        finally:
            asking.close()
            answering.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_value_with_several_small_arrays_is_one_write() -> None:
    async def work() -> None:
        near, far = socket.socketpair()
        asking, writes = await connected(near, {}), list[int]()
        send = asking._transport.write
        asking._transport.write = lambda part: (writes.append(len(part)), send(part))[1]  # type: ignore[method-assign]
        call = asyncio.create_task(asking.call("id", "echo", ([np.zeros(9), np.zeros(0), np.ones(7)],), {}))
        await asyncio.sleep(0)
        assert len(writes) == 1 and writes[0] > 8 * (9 + 7)
        far.close()
        with pytest.raises(RoleDied):
            await call

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_link_that_ends_within_a_frame_says_so() -> None:
    async def work() -> None:
        near, far = socket.socketpair()
        asking = await connected(near, {})
        call = asyncio.create_task(asking.call("id", "echo", (1,), {}))
        await asyncio.sleep(0.1)
        far.send(b"\x01\x00")  # the beginning of a head
        far.close()
        with pytest.raises(RoleDied, match="subject"):
            await call
        with pytest.raises(RoleDied, match="subject"):
            await asking.call("id", "echo", (1,), {})

    asyncio.run(asyncio.wait_for(work(), 60))
