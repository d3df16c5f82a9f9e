"""The agent loop as a role: runs groups of samples, many at once, between engines, tools and verifiers.

It waits most of its time, so one loop carries any number of samples, whatever the engines' batches are. All that a
sample has come to is in its token log, so an agent may be killed at any point and another goes on.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.base.errors import UserError
from stretto.base.trajectory import Group, Task, Trajectory
from stretto.rl.asking import (
    EngineClient,
    GroupFailed,
    Patience,
    RewardClient,
    Troubles,
    group_failure,
)
from stretto.rl.crew import Crew
from stretto.rl.dialogue import Dialogue
from stretto.rl.ledger import GroupRef
from stretto.rl.recipe import RlRecipe
from stretto.rl.threads import Threads
from stretto.rl.tokenlog import TokenLog, open_logs, remove_logs
from stretto.rl.turns import Limits, SampleLoop
from stretto.runtime.runtime import Caller
from stretto.tasks.task import TaskSource
from stretto.text.tokenizer import Tokenizer

LOGS, GROUPS = "tokens", "groups"
"""Folders of a run, for token logs and for finished groups."""
_TOOL_SLOTS = 16
"""Tools that one agent has at work at once; others wait, so that a crowd of samples does not start a crowd of processes."""
_PROBLEM_S = 60.0


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent needs of the recipe."""

    folder: Path
    """Of the run."""
    limits: Limits
    lease_s: float
    """A group that takes longer is given up; its logs stay."""
    patience: Patience
    """With engines and tools."""

    @classmethod
    def of(cls, recipe: RlRecipe, folder: Path | str) -> AgentSettings:
        """Those of ``recipe``, for a run in ``folder``."""
        rollout, failures = recipe.rollout, recipe.failures
        limits = Limits(
            chunk_tokens=rollout.chunk_tokens,
            temperature=rollout.temperature,
            max_turns=rollout.max_turns,
            max_len=recipe.train.seq_len,
            want_routes=recipe.replay == "r3",
            call_s=failures.lease_s,
            tool_s=recipe.runtime.rewards.deadline_s,
            verify_attempts=min(3, failures.max_attempts),
        )
        return cls(Path(folder), limits, failures.lease_s, Patience(failures.max_attempts))


@dataclass(frozen=True, slots=True)
class Clients:
    """Whom an agent talks to."""

    engines: Sequence[EngineClient]
    rewards: RewardClient


@dataclass(frozen=True, slots=True)
class Wait:
    """A sample in flight. Written by the agent, read by the watchdog."""

    ordinal: int
    sample: int
    attempt: int
    waits_for: str
    """``an engine``, ``tool python``, ``a verdict``, ``its group``."""
    seconds: float
    """Since it began to wait for that."""
    num_sampled: int


@dataclass(frozen=True, slots=True)
class AgentStats:
    """Counts since the start, but for what is in flight. Written by the agent, read by metrics."""

    num_groups: int
    """In flight, as the next."""
    num_samples: int
    groups_finished: int
    groups_failed: int
    tokens_sampled: int
    """Received from engines by this agent."""
    tokens_resumed: int
    """Taken from the logs of earlier attempts: work that a failure did not lose."""
    cached_tokens: int
    """Prompt tokens that engines had in their prefix caches."""
    computed_tokens: int
    """The other prompt tokens."""
    route_bytes: int
    """Of routes as received."""
    engine_s: float
    """Summed over requests, queues included, as the next; several wait at once."""
    queued_s: float
    verify_s: float
    """As verifiers report it."""
    sandbox_s: float
    """Processor seconds of tools and verifiers."""
    troubles: Mapping[str, int]
    """Failed tries by what was tried."""


class AgentRole:
    """Runs groups. All methods belong to the loop of the first call."""

    def __init__(
        self,
        settings: AgentSettings,
        tokenizer: Tokenizer,
        open_sources: Callable[[], Mapping[str, TaskSource]],
        connect: Callable[[Caller | None], Clients],
        store: Callable[[Path, Group], GroupRef],
        *,
        name: str = "agent",
        caller: Caller | None = None,
    ):
        """
        Args:
            open_sources: called once, here, where the role lives.
            connect: makes the clients; ``caller`` is what the runtime gives to roles that call others.
            store: puts a finished group where trainers find it, durably (`stretto.rl.groups.store_group`).
        """
        self.name = name
        self._settings = settings
        self._dialogue = Dialogue(tokenizer)
        self._sources = open_sources()
        clients = connect(caller)
        self._crew = Crew(clients.engines)
        self._rewards = clients.rewards
        self._store = store
        self._troubles = Troubles()
        self._tool_slots = asyncio.Semaphore(_TOOL_SLOTS)
        self._threads = Threads()
        self._problems = asyncio.Lock()  # sources need not be safe to use from two threads
        self._open: dict[tuple[int, int], list[SampleLoop]] = {}
        self._finished = self._failed = self._resumed = 0
        self._verify_s = self._sandbox_s = 0.0

    async def run_group(self, task: Task, attempt: int) -> GroupRef:
        """Draw and verify all samples of ``task``, store the group, and say where it lies.

        Raises:
            GroupFailed: for reasons of ours, within the lease; the next attempt goes on from the token logs.
            UserError: what no attempt would mend: a full disk, a prompt that is too long, a template without tool turns.
        """
        try:
            group = await self._within_lease(task, attempt)
            # not interruptible by a lease that ends meanwhile: a stored group is reported
            ref = await asyncio.to_thread(self._store, self._settings.folder / GROUPS, group)
        except BaseException:
            self._failed += 1
            raise
        self._finished += 1
        return ref

    async def evaluate(self, task: Task, temperature: float) -> Group:
        """The same samples, of no run: not logged, not stored, without routes.

        Raises:
            GroupFailed, UserError: as `run_group`.
        """
        limits = replace(self._settings.limits, temperature=temperature, want_routes=False)
        return await self._within_lease(task, 0, limits)

    async def forget(self, ordinals: Sequence[int]) -> None:
        """Delete the token logs of ordinals that have ended."""
        for ordinal in ordinals:
            remove_logs(self._settings.folder / LOGS, ordinal)

    async def waits(self) -> tuple[Wait, ...]:
        """Every sample in flight and what it waits for, longest first."""
        now_s = time.time()
        found = [
            Wait(
                ordinal=loop.task.ordinal,
                sample=loop.sample,
                attempt=loop.attempt,
                waits_for=loop.waits_for,
                seconds=now_s - loop.since_s,
                num_sampled=loop.log.num_sampled,
            )
            for loops in self._open.values()
            for loop in loops
        ]
        return tuple(sorted(found, key=lambda wait: -wait.seconds))

    async def stats(self) -> AgentStats:
        crew = self._crew
        return AgentStats(
            num_groups=len(self._open),
            num_samples=sum(len(loops) for loops in self._open.values()),
            groups_finished=self._finished,
            groups_failed=self._failed,
            tokens_sampled=crew.tokens_sampled,
            tokens_resumed=self._resumed,
            cached_tokens=crew.cached_tokens,
            computed_tokens=crew.computed_tokens,
            route_bytes=crew.route_bytes,
            engine_s=crew.engine_s,
            queued_s=crew.queued_s,
            verify_s=self._verify_s,
            sandbox_s=self._sandbox_s,
            troubles=dict(self._troubles.counts),
        )

    async def close(self) -> None:
        self._threads.close()

    async def _within_lease(self, task: Task, attempt: int, evaluated: Limits | None = None) -> Group:
        lease_s = self._settings.lease_s
        try:
            async with asyncio.timeout(lease_s) as lease:
                return await self._run(task, attempt, evaluated)
        except TimeoutError as error:
            if not lease.expired():
                raise
            raise GroupFailed(task.ordinal, attempt, f"not finished within its lease of {lease_s:g} s") from error

    async def _run(self, task: Task, attempt: int, evaluated: Limits | None) -> Group:
        """All samples at once; the first that fails ends the others, whose logs stay."""
        source = self._sources.get(task.source)
        if source is None:
            raise UserError(f"sources.{task.source}: no such source; there are {', '.join(sorted(self._sources))}")
        share = self._crew.share(task)
        key = (task.ordinal, -1 if evaluated else attempt)
        assert key not in self._open, f"ordinal {task.ordinal}, attempt {attempt} is in flight here already"
        loops = self._open[key] = []
        try:
            async with self._problems:
                what = f"sources.{task.source}: item {task.item}"
                problem = await self._threads.run(lambda: source.problem(task.item), _PROBLEM_S, what)
            prompt = self._dialogue.prompt(problem.messages, [tool.schema() for tool in source.tools()])
            folder = self._settings.folder / LOGS
            logs = [TokenLog() for _ in range(task.group)] if evaluated else open_logs(folder, task, attempt)
            self._resumed += sum(log.num_resumed for log in logs)
            for sample, log in enumerate(logs):
                loops.append(
                    SampleLoop(
                        log,
                        task,
                        sample,
                        attempt,
                        problem=problem,
                        prompt=prompt,
                        tools=source.tools(),
                        dialogue=self._dialogue,
                        limits=evaluated or self._settings.limits,
                        generate=share.generate,
                        rewards=self._rewards,
                        patience=self._settings.patience,
                        troubles=self._troubles,
                        threads=self._threads,
                        tool_slots=self._tool_slots,
                    )
                )
            async with asyncio.TaskGroup() as crowd:
                runs = [crowd.create_task(loop.run()) for loop in loops]
            trajectories = tuple(run.result() for run in runs)
        except Exception as error:
            raise group_failure(error, task.ordinal, attempt) from error
        finally:
            share.leave()
            del self._open[key]
        self._count(trajectories, loops)
        return Group(task, trajectories)

    def _count(self, trajectories: Sequence[Trajectory], loops: Sequence[SampleLoop]) -> None:
        self._verify_s += sum(each.verdict.seconds for each in trajectories)
        self._sandbox_s += sum(each.verdict.sandbox_s for each in trajectories)
        self._sandbox_s += sum(loop.sandbox_s for loop in loops)
