"""Roles for the tests: in a module of their own, which another process can import."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.errors import UserError
from stretto.runtime.runtime import Caller, Handle


class Worker:
    """A bit of everything."""

    def __init__(self, start: int = 0):
        self.total = start
        self.log: list[Any] = []
        self.event = asyncio.Event()

    def add(self, num: int) -> int:
        self.total += num
        return self.total

    async def add_slowly(self, num: int, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.add(num)

    def echo(self, value: Any) -> Any:
        return value

    def where(self) -> tuple[int, str]:
        return os.getpid(), threading.current_thread().name

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    async def nap(self, seconds: float) -> float:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        self.log.append("slept")
        return seconds

    async def meet(self) -> bool:
        """Returns when `release` is called meanwhile."""
        await self.event.wait()
        return True

    async def release(self) -> None:
        self.event.set()

    def read_log(self) -> list[Any]:
        return self.log

    def note(self, value: Any) -> None:
        self.log.append(value)

    def divide(self, num: int) -> float:
        return num / 0

    async def divide_later(self, num: int) -> float:
        return num / 0

    def refuse(self) -> None:
        error = UserError("recipe.toml: steps: is negative; give a positive number")
        error.exit_code = 3
        raise error

    def leave(self) -> None:
        sys.exit(3)

    def lock(self) -> Any:
        return threading.Lock()

    def mean(self, values: np.ndarray) -> float:
        assert not values.size or values.flags.c_contiguous
        return float(values.mean())

    def ones(self, num: int) -> np.ndarray:
        return np.ones(num, np.float32)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def start_program(self) -> int:
        """One that would outlive everybody."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def ring_alarm(self) -> bool:
        """Only a main thread may."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return True

    def imported(self, name: str) -> bool:
        return name in sys.modules

    def _private(self) -> int:
        return 1


class Asker:
    """Uses other roles."""

    def __init__(self, other: Handle, caller: Caller):
        self.other = other
        self.caller = caller

    async def ask(self, method: str, *args: Any, deadline_s: float = 20.0) -> Any:
        return await self.caller.call(self.other, method, *args, deadline_s=deadline_s)

    async def ask_this(self, handle: Handle, method: str, *args: Any) -> Any:
        return await self.caller.call(handle, method, *args, deadline_s=20.0)

    async def tell(self, method: str, *args: Any) -> None:
        self.caller.cast(self.other, method, *args)


class Closing:
    """Leaves a file when it is closed."""

    def __init__(self, path: str):
        self.path = Path(path)

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self.path.write_text("closed", encoding="utf-8")


class Refusing:
    def __init__(self, path: str):
        raise UserError(f"{path}: no such file; name one")


class Failing:
    def __init__(self) -> None:
        raise KeyError("nothing")


class Hanging:
    def __init__(self) -> None:
        time.sleep(600)


class OnceOnly:
    """Its constructor fails in every incarnation after the first."""

    def __init__(self, path: str):
        if Path(path).exists():
            raise RuntimeError("not again")
        Path(path).touch()

    def pid(self) -> int:
        return os.getpid()
