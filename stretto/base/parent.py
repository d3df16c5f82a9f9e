"""Processes of a pool that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process of a pool when its parent ends. It would outlive a killed parent, since it holds both ends of the pool's queue."""
    threading.Thread(target=_wait, daemon=True).start()


def _wait() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "no worker process"
    parent.join()
    os._exit(1)
