"""Keeps every engine at the newest weights, whichever of them die and come back meanwhile. Owned by the driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from stretto.base.trajectory import WeightVersion
from stretto.rl.controller import Controller
from stretto.rl.roles import Roles
from stretto.rl.trace import Trace
from stretto.runtime.runtime import RoleDied, RuntimeFailure

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Serving:
    """What an engine computes with."""

    version: int
    restarts: int
    """Of the engine when it took these weights over: one that was started again has none."""


class Fleet:
    """The engines' weights. An engine that was started again samples nothing until it was given the newest ones."""

    def __init__(
        self,
        roles: Roles,
        controller: Controller,
        trace: Trace,
        weights: WeightVersion,
        *,
        moved: Callable[[float], None],
        failed: Callable[[BaseException], None],
    ):
        """
        Args:
            weights: to begin with; `publish` others.
            moved: told after each change of weights how many seconds it took.
            failed: told what no other attempt would mend.
        """
        self._roles, self._controller, self._trace, self._weights = roles, controller, trace, weights
        self._moved, self._failed = moved, failed
        self._serving: dict[str, _Serving] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def publish(self, weights: WeightVersion) -> None:
        """Let every engine change to ``weights``; requests go on meanwhile."""
        self._weights = weights
        self._controller.published(weights.number)
        self.tend()

    def tend(self) -> None:
        """See to engines that are behind: because of newer weights, a restart, or a change that came to nothing."""
        for name in self._roles.engine_names:
            running, serving = self._tasks.get(name), self._serving.get(name)
            if running is not None and not running.done():
                continue
            if serving is not None and serving.restarts != self._roles.restarts(name):
                self._lost(name)  # nobody has given the new incarnation weights, since nobody is at it
            if not self._is_current(name):
                self._tasks[name] = asyncio.create_task(self._update(name))

    async def settled(self) -> None:
        """Until all engines have the newest weights; somebody must call `tend` meanwhile."""
        while not all(map(self._is_current, self._roles.engine_names)):
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _is_current(self, name: str) -> bool:
        serving = self._serving.get(name)
        return serving is not None and serving.version == self._weights.number

    def _lost(self, name: str) -> None:
        self._serving.pop(name, None)
        self._controller.engine_gone(name)

    async def _update(self, name: str) -> None:
        try:
            await self._bring_up_to_date(name)
        except Exception as error:
            self._failed(error)

    async def _bring_up_to_date(self, name: str) -> None:
        """Until the engine has the newest weights, however many come meanwhile; what fails is left to the next `tend`.

        The controller must never believe an engine to have newer weights than any of its incarnations samples under.
        """
        if name not in self._serving:
            # It waits for its first weights. Groups that are handed out meanwhile may land on it, so they are charged with
            # these weights from now on, however new those are that other engines take over before it is done.
            self._controller.engine_active(name, self._weights.number)
        while not self._is_current(name):
            weights, started_s = self._weights, time.perf_counter()
            restarts = self._roles.restarts(name)
            try:
                with self._trace.span(name, "activate", version=weights.number):
                    await self._roles.activate(name, weights)
            except RoleDied:
                self._lost(name)
                return
            except RuntimeFailure:  # it hangs, or failed inside: until it is no more it may have whatever weights
                await self._roles.restart_engine(name)
                self._lost(name)
                return
            if self._roles.restarts(name) != restarts:
                continue  # which incarnation answered is not known: this one may have these weights, or none
            self._serving[name] = _Serving(weights.number, restarts)
            self._controller.engine_active(name, weights.number)
            self._moved(time.perf_counter() - started_s)
