"""Session of one sample in the agent loop: opening, replay, calls, failure, closing.

After a call that raised, timed out or was cancelled, the state of a session is unknown. The session is then closed, and the
next call opens a new one and repeats all earlier calls (`stretto.tasks.session.replay`). Imports no torch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from stretto.base.errors import InfraError, UserError
from stretto.flow.clients import Threads
from stretto.tasks.session import Diverged, SessionSource, replay
from stretto.tasks.task import Problem, Session, TaskSource

T = TypeVar("T")
History = Callable[[], Sequence[Mapping[str, Any]]]
"""Returns all messages after the prompt; called only if a session must be restored from them."""


class OwnSession:
    """Session of one sample. Belongs to the agent's loop; calls of the session run in threads, one at a time."""

    def __init__(
        self, source: TaskSource, problem: Problem, seed: int, threads: Threads, deadline_s: float, turn: asyncio.Lock
    ):
        """``deadline_s``: deadline of opening, of the replay, and of each call. ``turn``: held while a session is opened,
        because a source need not support two openings at once."""
        self._open, self._has_state = partial(source.open, problem, seed), isinstance(source, SessionSource)
        self._where, self._threads, self._deadline_s, self._turn = f"sources.{source.name}", threads, deadline_s, turn
        self._used: _Guarded | None = None

    @property
    def is_reached(self) -> bool:
        """Whether a session is open in the sample's state; always, if the source has no state."""
        return self._used is not None or not self._has_state

    @property
    def is_over(self) -> bool:
        """Whether a call has ended the episode."""
        return self._used is not None and self._used.is_over

    async def reach(self, history: History) -> None:
        """Restore the state that the calls in ``history`` lead to. Does nothing for a source without state. Raises as `ask`."""
        if self._used is not None:
            return
        self._used = _Guarded(self._open)
        if not self._has_state:
            return
        async with self._turn:
            await self._run(lambda session: None, "open()")
        messages = history()
        if any(message["role"] == "tool" for message in messages):
            await self._run(lambda session: replay(session, messages), "a repeated call")

    async def ask(self, work: Callable[[Session], T], history: History, what: str) -> T:
        """Result of ``work`` on the restored session. ``what`` names it in errors.

        Raises:
            InfraError: ``work`` raised, or did not return in time.
            Diverged: the state cannot be restored.
            UserError: passed on.
        """
        await self.reach(history)
        return await self._run(work, what)

    def end(self) -> None:
        """Close the session, or have the thread that still uses it close it."""
        used, self._used = self._used, None
        if used is not None and self._has_state:
            self._threads.start(used.end, "close()")

    async def _run(self, work: Callable[[Session], T], what: str) -> T:
        assert self._used is not None, "it is not reached"
        try:
            call = partial(self._used.run, work, what)
            return await self._threads.run(call, self._deadline_s, f"{self._where}: {what}")
        except BaseException:
            self.end()
            raise


class _Guarded:
    """A session that is closed once, by `end` or by the thread that uses it at that moment."""

    def __init__(self, open_session: Callable[[], Session]) -> None:
        self._open = open_session
        self._session: Session | None = None
        self._lock, self._is_busy, self._is_ended = threading.Lock(), False, False
        self.is_over = False

    def run(self, work: Callable[[Session], T], what: str) -> T:
        if self._mark(is_busy=True):  # ended before this thread started
            raise InfraError(f"{what}: its session has failed")
        try:
            if self._session is None:
                self._session = self._open()
            result = work(self._session)
            self.is_over = self._session.is_over
            return result
        except (InfraError, Diverged, UserError):
            raise
        except (Exception, SystemExit) as error:  # an exception of the task is not an answer for the model
            raise InfraError(f"{what} raised {type(error).__name__}: {error}") from error
        finally:
            if self._mark(is_busy=False):
                self._close()

    def end(self) -> None:
        with self._lock:
            self._is_ended = True
            if self._is_busy:
                return
        self._close()

    def _mark(self, *, is_busy: bool) -> bool:
        """Record whether a thread uses the session, unless it has ended. Returns whether it has ended."""
        with self._lock:
            self._is_busy = is_busy and not self._is_ended
            return self._is_ended

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
