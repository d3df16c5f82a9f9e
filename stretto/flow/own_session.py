"""Session of one sample in the agent loop: opening, replay, calls, failure, closing.

After a call that raised, gave no answer in time or was cancelled nobody knows what state it left: the session is given up,
and whoever asks next has a new one, with all calls before repeated (`stretto.tasks.session.replay`). Imports no torch.
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
SoFar = Callable[[], Sequence[Mapping[str, Any]]]
"""All that followed the prompt so far; read only where a session is to be reached by it."""


class OwnSession:
    """One sample's. Belongs to the agent's loop; what it asks of the session runs in threads, one after the other."""

    def __init__(
        self, source: TaskSource, problem: Problem, seed: int, threads: Threads, deadline_s: float, turn: asyncio.Lock
    ):
        """``deadline_s``: of opening it, of repeating all calls, and of each thing that is asked. ``turn``: held while one is
        opened: a source need not open two at once."""
        self._open, self._has_state = partial(source.open, problem, seed), isinstance(source, SessionSource)
        self._where, self._threads, self._deadline_s, self._turn = f"sources.{source.name}", threads, deadline_s, turn
        self._used: _Used | None = None

    @property
    def is_reached(self) -> bool:
        return self._used is not None

    @property
    def is_over(self) -> bool:
        """A call has ended the episode."""
        return self._used is not None and self._used.is_over

    async def reach(self, said: SoFar) -> None:
        """Have a session in the state that the calls lead to; nothing where calls change none. Raises as `ask`."""
        if self._used is not None:
            return
        self._used = _Used(self._open)
        if not self._has_state:
            return
        async with self._turn:
            await self._run(lambda session: None, "open()")
        messages = said()
        if any(message["role"] == "tool" for message in messages):
            await self._run(lambda session: replay(session, messages), "a repeated call")

    async def ask(self, work: Callable[[Session], T], said: SoFar, what: str) -> T:
        """What ``work``, called ``what``, gives of the session.

        Raises:
            InfraError: it raised, or gave no answer in time.
            Diverged: the state that it is about cannot be reached again.
            UserError: as it comes.
        """
        await self.reach(said)
        return await self._run(work, what)

    def end(self) -> None:
        """Close it, or have whoever still uses it close it then."""
        used, self._used = self._used, None
        if used is not None and self._has_state:
            self._threads.start(used.end, "close()")

    async def _run(self, work: Callable[[Session], T], what: str) -> T:
        assert self._used is not None, "it is not reached"
        try:
            done = partial(self._used.run, work, what)
            return await self._threads.run(done, self._deadline_s, f"{self._where}: {what}")
        except BaseException:
            self.end()
            raise


class _Used:
    """A session, and whether a thread is at it."""

    def __init__(self, open_session: Callable[[], Session]) -> None:
        self._open = open_session
        self._session: Session | None = None
        self._lock, self._is_busy, self._is_ended = threading.Lock(), False, False
        self.is_over = False

    def run(self, work: Callable[[Session], T], what: str) -> T:
        if self._is_given_up(is_busy=True):  # cancelled before its thread came to it
            raise InfraError(f"{what}: its session has failed")
        try:
            if self._session is None:
                self._session = self._open()
            found = work(self._session)
            self.is_over = self._session.is_over
            return found
        except (InfraError, Diverged, UserError):
            raise
        except Exception as error:  # whatever a task raises is no answer to the model
            raise InfraError(f"{what} raised {type(error).__name__}: {error}") from error
        finally:
            if self._is_given_up(is_busy=False):
                self._close()

    def end(self) -> None:
        with self._lock:
            self._is_ended = True
            if self._is_busy:
                return
        self._close()

    def _is_given_up(self, *, is_busy: bool) -> bool:
        """Note whether a thread is at it, where it is not."""
        with self._lock:
            self._is_busy = is_busy and not self._is_ended
            return self._is_ended

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
