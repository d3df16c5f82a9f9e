"""Roles for benchmarks of the runtime: in a module of their own, which another process imports quickly."""

from __future__ import annotations

import time


class Sleeper:
    """A worker whose calls take a known time and no processor."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
