"""Frames over a socket: whole and in order, however they were joined on the way out and torn on the way in."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.runtime.wire import Link, pack, unpack

SIZES = st.lists(st.sampled_from([0, 1, 100, 4_000, 65_530, 65_536, 70_000, 300_000]), min_size=1, max_size=12)


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
        left, right = map(Link, socket.socketpair())
        try:
            for number, value in enumerate(values):
                left.send(("frame", number), pack(value))
            for number, (first, text, arrays) in enumerate(values):
                envelope, packed = await right.receive()
                got = unpack(packed)
                assert envelope == ("frame", number) and got[:2] == (first, text)
                for one, other in zip(got[2], arrays, strict=True):
                    np.testing.assert_array_equal(one, other)
            right.send(("back",), pack("and back"))
            assert unpack((await left.receive())[1]) == "and back"
        finally:
            await left.close()
            await right.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_link_that_ends_within_a_frame_says_so() -> None:
    async def work() -> None:
        near, far = socket.socketpair()
        link = Link(near)
        far.send(b"\x01\x00")  # the beginning of a head
        far.close()
        with pytest.raises(ConnectionResetError):
            await link.receive()
        await link.close()

    asyncio.run(asyncio.wait_for(work(), 60))
