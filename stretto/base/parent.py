"""Processes that end with the process that started them."""

from __future__ import annotations

import os
import signal
import threading
import time

_WATCH_S = 0.5


def end_with_parent(parent: int, group: bool = False) -> None:
    """End this process when its ``parent`` (process id) ends, also from within a call that would wait for it. A worker of a pool would
    outlive a killed parent, since it holds both ends of the pool's queue.

    Args:
        group: whether the processes of its group end, too.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        if group:
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
