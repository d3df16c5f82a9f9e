"""Runs programs that nobody trusts: limits, walls, and an outcome that says whose fault it was.

    with Sandbox() as sandbox:
        print(sandbox.isolation)
        finished = sandbox.run("print(6 * 7)")

Best isolation that the machine gives: namespaces made by bubblewrap, or by our own helper, or process limits only. Each
is tried by running a program in it, never guessed. Programs run in forks of warm interpreters (`stretto.sandbox.keeper`).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from stretto.base.errors import UserError
from stretto.sandbox import walls
from stretto.sandbox.hire import Hired, KeeperDiedError, NoIsolationError, Program, check_readable
from stretto.sandbox.outcome import Finished, Isolation, Level, Limits, LimitsLike, Outcome

_PROBE = Program(source=b"print(6 * 7)", argv=None, stdin=b"", files={})


class Sandbox:
    """A pool of warm keepers. Safe to use from several threads; as many programs run at once as there are workers."""

    def __init__(
        self,
        limits: LimitsLike | None = None,
        *,
        level: Level | None = None,
        strict: bool = False,
        workers: int = 1,
        python: str | Path | None = None,
        import_paths: Iterable[str | Path] = (),
    ) -> None:
        """Find the isolation and start the first keeper; the others start when they are needed.

        Args:
            limits: of every program; a recipe's sandbox table will do.
            level: this one and no other; None: the best there is.
            strict: refuse anything less than full isolation.
            python: the interpreter for programs; None: this process's, without its virtual environment.
            import_paths: folders that programs can import from, beside the standard library; they can read all of them.

        Raises:
            UserError: ``level`` or ``strict`` asks for more than the machine gives, or programs could not read
                the interpreter.
        """
        assert workers > 0, f"{workers} workers"
        self.limits = Limits() if limits is None else Limits.of(limits)
        self.workers = workers
        self._room = walls.Room.of(str(Path(python or walls.base_python()).resolve()), map(str, import_paths))
        self._bwrap = shutil.which("bwrap")
        self._lock = threading.Lock()
        self._num_hired = 0
        self._idle: queue.LifoQueue[Hired | None] = queue.LifoQueue()
        """One entry a worker that is not busy; None: its keeper is yet to be started."""
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        first, missing = self._find_level(level)
        self.isolation = Isolation(first.level, first.has_filter, first.has_landlock, first.own_uid, missing)
        """What programs of this sandbox are kept in."""
        for _ in range(workers - 1):
            self._idle.put(None)
        self._idle.put(first)
        if strict:
            try:
                require_strict(self.isolation)
            except UserError:
                self.close()
                raise

    def _find_level(self, wanted: Level | None) -> tuple[Hired, tuple[str, ...]]:
        missing: list[str] = []
        for level in sorted(Level, reverse=True) if wanted is None else [wanted]:
            try:
                return self._hire(level), tuple(missing)
            except NoIsolationError as problem:
                missing.append(f"no {level.name.lower()}: {problem}")
        raise UserError(f"sandbox: isolation: {'; '.join(missing)}; allow user namespaces or install bubblewrap")

    def _hire(self, level: Level) -> Hired:
        """Start a keeper and see it run a program right."""
        if level == Level.BUBBLEWRAP and self._bwrap is None:
            raise NoIsolationError("bwrap is not installed")
        if level == Level.LIMITS:
            check_readable(self._room)
        with self._lock:
            self._num_hired += 1
            number = self._num_hired
        hired = Hired(level, self._room, self._bwrap, number)
        try:
            finished = hired.run(_PROBE, Limits(wall_s=30.0))
        except KeeperDiedError as error:
            hired.close()
            raise NoIsolationError(str(error)) from None
        if finished.stdout != b"42\n":
            hired.close()
            raise NoIsolationError(finished.why or f"a program that should print 42 printed {finished.stdout[:80]!r}")
        return hired

    def run(
        self,
        program: str | bytes | Sequence[str],
        stdin: bytes | str = b"",
        files: Mapping[str, bytes | str] | None = None,
        limits: LimitsLike | None = None,
    ) -> Finished:
        """Run one program to its end; waits for a free worker first.

        Args:
            program: Python text, or an argument list whose first may be ``"python"``.
            files: put into its work folder, which is its current one, by relative path.
            limits: instead of the sandbox's own.

        Returns:
            How it ended. What goes wrong on our side is an outcome too: INFRA.
        """
        job = _program(program, stdin, files or {})
        hired = self._idle.get()
        try:
            if hired is None:
                hired = self._hire(self.isolation.level)
            return hired.run(job, self.limits if limits is None else Limits.of(limits))
        except (KeeperDiedError, NoIsolationError) as error:
            if hired is not None:
                hired.close()
                hired = None
            return Finished(Outcome.INFRA, f"the sandbox's keeper is gone: {error}")
        finally:
            self._idle.put(hired)

    async def run_async(
        self,
        program: str | bytes | Sequence[str],
        stdin: bytes | str = b"",
        files: Mapping[str, bytes | str] | None = None,
        limits: LimitsLike | None = None,
    ) -> Finished:
        """`run` from an event loop. A cancelled call leaves its program to its limits."""
        call = partial(self.run, program, stdin, files, limits)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    @property
    def idle_pids(self) -> tuple[int, ...]:
        """Of the keepers that run nothing now; each has no process below it."""
        with self._idle.mutex:
            return tuple(hired.pid for hired in self._idle.queue if hired is not None)

    def close(self) -> None:
        """End the idle keepers; call it when no program runs."""
        self._threads.shutdown()
        with contextlib.suppress(queue.Empty):
            while True:
                hired = self._idle.get_nowait()
                if hired is not None:
                    hired.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def describe_isolation() -> Isolation:
    """The best isolation this machine gives, found by running a program in it.

    Raises:
        UserError: none at all, not even process limits.
    """
    with Sandbox() as sandbox:
        return sandbox.isolation


def require_strict(isolation: Isolation) -> None:
    """Raises:
    UserError: programs would not be fully isolated.
    """
    if not isolation.is_full:
        raise UserError(
            f"sandbox: strict: {isolation}; install bubblewrap, allow user namespaces, or set sandbox.strict = false"
        )


def available_levels(python: str | Path | None = None) -> Iterator[Level]:
    """Every level that this machine gives, best first."""
    for level in sorted(Level, reverse=True):
        try:
            with Sandbox(level=level, python=python):
                yield level
        except UserError:
            continue


def _program(program: str | bytes | Sequence[str], stdin: bytes | str, files: Mapping[str, bytes | str]) -> Program:
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
            raise ValueError(
                f"sandbox: files: {name!r} does not lie in the work folder; use a relative path without '..'"
            )
    is_source = isinstance(program, str | bytes)
    return Program(
        source=_bytes(program) if isinstance(program, str | bytes) else b"",
        argv=None if is_source else tuple(program),  # type: ignore[arg-type]
        stdin=_bytes(stdin),
        files={name: _bytes(content) for name, content in files.items()},
    )


def _bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
