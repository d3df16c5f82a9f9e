"""The program that `test_limited` asks: it does what it is told, whatever that costs."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

from stretto.base.limited import serve


def _obey(setup: bytes) -> Callable[[bytes], bytes]:
    def answer(question: bytes) -> bytes:
        if question == b"spin":
            while True:
                pass
        elif question == b"eat":
            ctypes.CDLL(None).abort()  # what a library does that gets no memory
        elif question == b"recurse":
            ctypes.string_at(0)  # where a stack ends there is nothing either
        elif question == b"exit":
            sys.exit(7)
        return setup + question + str(os.getpid()).encode()

    return answer


if __name__ == "__main__":
    serve(_obey, memory_bytes=1 << 30, stack_bytes=1 << 20)
