"""Which engine draws which group: the least loaded one, for as long as it works. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from stretto.base.trajectory import Task
from stretto.rl.asking import EngineClient, Generated, GenerateRequest, Trouble


class Crew:
    """The engines and who uses them. A group stays on one engine, where its prompt is cached, while that one works."""

    def __init__(self, engines: Sequence[EngineClient]):
        assert engines, "an agent needs an engine"
        self.engines = tuple(engines)
        self.loads = [0] * len(self.engines)
        """Samples of this agent by engine."""
        self.tokens_sampled = self.cached_tokens = self.computed_tokens = self.route_bytes = 0
        self.engine_s = self.queued_s = 0.0

    def share(self, task: Task) -> Share:
        """A place for the group on the least loaded engine."""
        return Share(self, task.group, self.choose(first=task.ordinal))

    def choose(self, first: int, avoid: int | None = None) -> int:
        """The least loaded engine, another than ``avoid`` if there is one. Ties go round by ``first``: several agents
        that know nothing of each other do not all begin at the same one."""
        num = len(self.engines)
        order = [(first + step) % num for step in range(num)]
        return min((place for place in order if place != avoid or num == 1), key=self.loads.__getitem__)


class Share:
    """The engine of one group."""

    def __init__(self, crew: Crew, num_samples: int, place: int):
        self._crew, self._num_samples, self.place = crew, num_samples, place
        crew.loads[place] += num_samples

    async def generate(self, request: GenerateRequest) -> Generated:
        """From the group's engine. If that fails, the group moves: whoever tries next meets another."""
        crew, place = self._crew, self.place
        started_s = time.perf_counter()
        try:
            done = await crew.engines[place].generate(request)
        except Trouble as trouble:
            if self.place == place:
                self._move(crew.choose(first=place + 1, avoid=place))
            raise type(trouble)(f"{crew.engines[place].name}: {trouble}") from trouble
        crew.engine_s += time.perf_counter() - started_s
        crew.queued_s += done.queued_s
        crew.tokens_sampled += len(done.tokens)
        crew.cached_tokens += done.cached_tokens
        crew.computed_tokens += done.computed_tokens
        crew.route_bytes += 0 if done.routes is None else done.routes.nbytes
        return done

    def leave(self) -> None:
        self._crew.loads[self.place] -= self._num_samples

    def _move(self, place: int) -> None:
        self.leave()
        self.place = place
        self._crew.loads[place] += self._num_samples
