"""Worker processes that hand back results in the order of the work."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Unit = TypeVar("Unit")
Result = TypeVar("Result")

_DIED = "a worker process died, perhaps for lack of memory; start again to go on where it was, with fewer processes"


@contextmanager
def in_order(
    processes: int, work: Callable[[Unit], Result], finish: Callable[[Result], None]
) -> Iterator[Callable[[Unit], None]]:
    """Yield ``submit(unit)``; ``finish`` gets each unit's result in the order submitted, all of them by the end.

    Units go round the workers in turn, each over a pipe of its own, and results should be small. Sending waits while
    its worker is busy, so no more than one unit lies ready and memory stays bounded. What ``work`` raises is raised
    here. With one process the work is done in the caller's.

    Args:
        processes: workers at most; they start as units come.
        work: picklable; keeps what state it likes, once for each worker.
        finish: called in this process.
    """
    if processes == 1:
        yield lambda unit: finish(work(unit))
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of the caller hold
    pipes: list[Connection] = []
    workers: list[Any] = []
    waiting: deque[Connection] = deque()
    num_sent = 0

    def submit(unit: Unit) -> None:
        nonlocal num_sent
        if len(workers) < processes:
            ours, theirs = context.Pipe()
            workers.append(context.Process(target=_serve, args=(theirs, work), daemon=True))
            workers[-1].start()
            theirs.close()
            pipes.append(ours)
        while waiting and (waiting[0].poll() or len(waiting) >= 2 * processes):
            finish(_receive(waiting.popleft()))
        pipe = pipes[num_sent % processes]
        num_sent += 1
        try:
            pipe.send(unit)
        except BrokenPipeError:
            raise RuntimeError(_DIED) from None
        waiting.append(pipe)

    try:
        yield submit
        while waiting:
            finish(_receive(waiting.popleft()))
    finally:
        for pipe in pipes:
            pipe.close()
        for worker in workers:
            worker.terminate()
            worker.join()


def _receive(pipe: Connection) -> Any:
    try:
        is_result, value = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise RuntimeError(_DIED) from None
    if not is_result:
        raise value
    return value


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    """A worker: units in, results out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes the pipe
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    while True:
        try:
            unit = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, work(unit))
        except Exception as error:  # raised again in the parent
            answer = (False, error)
        pipe.send(answer)
