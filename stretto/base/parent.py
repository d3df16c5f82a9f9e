"""Processes that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

_WATCH_S = 0.5


def end_pool_worker_with_parent() -> None:
    """End this process of a pool when its parent ends. It would outlive a killed parent, since it holds both ends of the pool's queue."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None, "no worker process"
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end_with_parent(parent: int, group: bool = False) -> None:
    """End this process when its ``parent`` (process id) ends, also from within a call that would wait for it.

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
