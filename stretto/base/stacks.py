"""Stacks of all threads, for the log of a process that hangs."""

from __future__ import annotations

import sys
import threading
import traceback


def stacks() -> str:
    """Python stacks of all threads of this process, the main thread's first. (faulthandler leaves out the oldest threads, and so the
    main one, where there are more than a hundred.)"""
    main, names = threading.main_thread().ident, {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda each: each[0] != main)
    parts = [f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames]
    return "\n".join(parts)
