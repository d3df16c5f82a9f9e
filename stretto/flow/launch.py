"""Construction of the roles of a run from its recipe, after a check of all sources.

A role is made by a factory that is small enough to be pickled. Roles live in pools, threads or processes, or on the driver's
loop, behind one runtime. Imports no torch: that happens where the trainer and the engines live.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError
from stretto.base.trajectory import WeightVersion
from stretto.flow.agent import AgentRole, Wait, check_room
from stretto.flow.clients import Verifiers, connect
from stretto.flow.reward import RewardRole
from stretto.learning.dialogue import Dialogue, teacher_dialogues
from stretto.learning.recipe import PoolConfig, Prompts, RlRecipe, SandboxConfig, SourceConfig, plan_prompts
from stretto.runtime.pool import ElasticPool, Limits
from stretto.runtime.runtime import (
    DeadlinePassed,
    Handle,
    Placement,
    RoleDied,
    RoleError,
    RoleState,
    Runtime,
    RuntimeFailure,
)
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.registry import open_source
from stretto.tasks.session import schemas
from stretto.tasks.task import TaskSource
from stretto.text.chat import tool_form
from stretto.text.similar import embeddings
from stretto.text.tokenizer import Tokenizer

_NEED_SANDBOX = ("code", "sheets", "tools")
"""Kinds that run programs; one of somebody else's may, too."""
_MAY_WAIT = (*_NEED_SANDBOX, "judged")
"""Kinds whose verdicts may take longer than sampling."""
_TRIED_PROMPTS = 32
"""Of the run, and as many held-out ones: whether they leave room for an answer. A later one that does not stops the run."""
_START_S = 300.0
"""For a role to be made: reading a checkpoint, starting an interpreter that imports torch."""
_STEP_S = 3600.0
"""For a call of the trainer, which hangs then; the watchdog speaks up earlier for everybody else."""
_ASK_S = 10.0
"""For a role to say how it is."""
CALL_SLACK_S = 10.0
"""Between a group's lease and the deadline of the call that carries it."""
_LOAD_S = 120.0
"""For an engine to fetch and take over new weights."""
_AGENT_GROUPS = 64
"""Groups of one isolated agent, unless the largest pool could not hold all of the run's then: what keeps a core busy
with small models' tokens. More than that and there should be another agent."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a run is told."""

    recipe: RlRecipe
    folder: Path
    start: Path
    """Checkpoint folder of the policy to begin with."""
    resume: bool = False
    devices: tuple[str, ...] = ("cpu",)
    """That it may use; `spread` says who has which."""
    wandb_project: str | None = None
    stage: str = "rl"
    """What the lineage of its result calls it."""


@dataclass(frozen=True, slots=True)
class SourceTables:
    """The recipe's sources; called, it opens them where it is called, behind one sandbox."""

    sources: Mapping[str, SourceConfig]
    sandbox: SandboxConfig

    @property
    def run_programs(self) -> bool:
        """Whether any of them does, or may."""
        return any(source.kind in _NEED_SANDBOX or ":" in source.kind for source in self.sources.values())

    @property
    def are_slow(self) -> bool:
        """Whether groups may stand outside of the engines for long, for tools and verdicts."""
        return any(source.kind in _MAY_WAIT or ":" in source.kind for source in self.sources.values())

    def __call__(self) -> dict[str, TaskSource]:
        """Raises UserError: a source refuses, or the isolation that is asked for is not to be had."""
        sandbox = Sandbox(self.sandbox, strict=self.sandbox.strict) if self.run_programs else None
        return {name: open_source(name, source, sandbox) for name, source in self.sources.items()}

    @contextmanager
    def opened(self) -> Iterator[dict[str, TaskSource]]:
        """Open for the block."""
        sources = self()
        try:
            yield sources
        finally:
            for source in sources.values():
                source.close()


def check_sources(
    recipe: RlRecipe, tables: SourceTables, tokenizer: Tokenizer, say: Callable[[str], None]
) -> tuple[Prompts, dict[str, int]]:
    """Open every source, have it validate itself, and try the first prompts; then close them again. Returns the prompts of
    the run; and by source, how many answers one verifier judges at once.
    Raises UserError: naming the source, and the item where it is about one."""
    train, dialogue = recipe.train, Dialogue(tokenizer)
    for name, reward in recipe.rewards.items():
        if reward.diversity == "meaning":
            try:
                embeddings()
            except UserError as error:
                raise UserError(f"rewards.{name}.diversity: {error}") from error
    teacher_dialogues(recipe, tokenizer)  # refuses teachers of another tokenizer
    with tables.opened() as sources:
        for name, source in sources.items():
            if source.verdict_s >= recipe.runtime.rewards.deadline_s:
                raise UserError(
                    f"sources.{name}: a verdict may take {source.verdict_s:g} s, and runtime.rewards.deadline_s is "
                    f"{recipe.runtime.rewards.deadline_s:g}; raise that"
                )
            source.validate()
        sizes = {name: source.num_items for name, source in sources.items()}
        said = ", ".join(f"{name} ({'endless' if num is None else f'{num:,}'})" for name, num in sizes.items())
        walls = [source.sandbox.isolation for source in sources.values() if source.sandbox is not None]
        say(f"problems: {said}" + "".join(f"; sandbox isolation: {each}" for each in walls[:1]))
        prompts = plan_prompts(recipe, sizes)
        tasks = [prompts.task(ordinal) for ordinal in range(min(_TRIED_PROMPTS, train.steps * train.prompts))]
        tasks += [prompts.held_out(number) for number in range(min(_TRIED_PROMPTS, train.eval_prompts))]
        offers_tools = False
        for task in tasks:
            source = sources[task.source]
            problem = source.tried(task.item)
            offered = schemas(source, problem)
            offers_tools |= bool(offered)
            check_room(task, len(dialogue.prompt(problem.messages, offered)), train.seq_len)
        if offers_tools and tokenizer.chat_template and (note := tool_form(tokenizer.chat_template).note()):
            say(note)
        return prompts, {name: source.at_once for name, source in sources.items()}


@dataclass(frozen=True, slots=True)
class Factories:
    """What the roles are made by, each picklable: they may be called in other processes."""

    trainer: Callable[[], Any]
    engines: Sequence[Callable[[], Any]]
    reward: Callable[[Collection[str]], Callable[[], Any]]
    """From sources to the factory of a verifier for them."""
    agent: Callable[[tuple[Handle, ...], Verifiers], Callable[..., Any]]
    """From engines and verifiers to the factory of an agent."""


def spread(devices: Sequence[str], num_engines: int) -> tuple[str, list[str]]:
    """The trainer's device, and each engine's: of several the trainer has the first to itself, and engines take turns on the
    others."""
    trainer, *others = devices
    others = others or [trainer]
    return trainer, [others[number % len(others)] for number in range(num_engines)]


def make_factories(job: Job, tables: SourceTables, tokenizer: Tokenizer) -> Factories:
    """The factories of the roles of ``job``."""
    recipe, deadline_s = job.recipe, job.recipe.runtime.rewards.deadline_s

    def agent(engines: tuple[Handle, ...], rewards: Verifiers) -> Callable[..., Any]:
        clients = partial(connect, engines, rewards, deadline_s)
        return partial(AgentRole, recipe, job.folder, tokenizer, tables, clients)

    def reward(names: Collection[str]) -> Callable[[], Any]:
        some = SourceTables({name: tables.sources[name] for name in names}, tables.sandbox)
        return partial(RewardRole, some, deadline_s)

    own, others = spread(job.devices, recipe.rollout.engines)
    engines = [partial(_engine, job, f"engine-{number}", device) for number, device in enumerate(others)]
    return Factories(partial(_trainer, job, own), engines, reward, agent)


def _trainer(job: Job, device: str) -> Any:
    from stretto.learning.trainer import open_trainer  # torch, where the role lives

    return open_trainer(job.recipe, job.folder, job.start, device, job.stage)


def _engine(job: Job, name: str, device: str) -> Any:
    from stretto.flow.rollout import EngineRole, open_rollout_engine  # torch, as above

    return EngineRole(partial(open_rollout_engine, job.recipe, job.start, device), name=name, waits=True)


class TrainerLost(RuntimeError):  # noqa: N818 - data for whoever starts the run again
    """The trainer died, or hangs: the run goes on from its last snapshot."""


@dataclass(frozen=True, slots=True)
class Roles:
    """All roles of one attempt. Made by `start_roles`."""

    runtime: Runtime
    trainer: Handle
    engines: Mapping[str, Handle]
    agents: ElasticPool
    """Leased for a group each."""
    rewards: Mapping[str, ElasticPool]
    """Verifiers by pool name; empty where there is a fixed number."""
    fixed_rewards: tuple[Handle, ...]
    """Those that agents elsewhere call directly."""

    @property
    def pools(self) -> tuple[ElasticPool, ...]:
        return (self.agents, *self.rewards.values())

    @property
    def verifiers(self) -> list[Handle]:
        return [*self.fixed_rewards, *(handle for pool in self.rewards.values() for handle in pool.handles())]

    @property
    def alone(self) -> tuple[Handle, ...]:
        """Roles in no pool."""
        return (self.trainer, *self.engines.values(), *self.fixed_rewards)

    def restarts(self, engine: str) -> int:
        return self.runtime.status(self.engines[engine]).restarts

    def num_restarts(self) -> int:
        """Of all roles of this attempt, so far."""
        alone = sum(self.runtime.status(handle).restarts for handle in self.alone)
        return alone + sum(pool.stats().num_replaced for pool in self.pools)

    async def activate(self, engine: str, weights: WeightVersion) -> None:
        await self.runtime.call(self.engines[engine], "activate", weights, deadline_s=_LOAD_S)

    async def call_trainer(self, method: str, *args: Any, deadline_s: float = _STEP_S) -> Any:
        """What the trainer's method returns.
        Raises TrainerLost: it died, or hangs. UserError: it refuses, or its method raised anything else."""
        try:
            return await self.runtime.call(self.trainer, method, *args, deadline_s=deadline_s)
        except (RoleDied, DeadlinePassed) as lost:
            raise TrainerLost(str(lost)) from lost
        except RoleError as error:
            said = f"trainer: {method}: {error.kind}: {error.message}"
            raise UserError(f"{said}; see the log, then continue with --resume") from error

    def forget(self, ordinal: int) -> None:
        """Delete the token logs of a group that is stored."""
        if agent := next(filter(self._is_alive, self.agents.handles()), None):
            self.runtime.cast(agent, "forget", (ordinal,))

    async def mend(self) -> None:
        """Start verifiers again whose threads are stuck in a task, and engines that have died inside.
        Raises TrainerLost: the trainer died. UserError: another role cannot be started any more."""
        for handle in self.alone:
            status = self.runtime.status(handle)
            if status.state is RoleState.DEAD and handle == self.trainer:
                raise TrainerLost(f"{handle.name}: {status.why}")
            if status.state is RoleState.DEAD:
                raise UserError(
                    f"{handle.name}: {status.why}; failures.restarts: it was started again {status.restarts} times; "
                    "continue with --resume"
                )
        for pool in self.pools:
            if pool.error is not None:
                raise UserError(f"{pool.name}: no worker can be started: {pool.error}; continue with --resume")
        for handle, stats in await self.ask_all(self.verifiers, "stats"):
            if stats.num_stuck and handle in self.fixed_rewards:
                await self.restart(handle)
            elif stats.num_stuck:
                for pool in self.rewards.values():
                    pool.replace(handle, hard=False)  # what else it judges may well end
        for handle, failure in await self.ask_all(self.engines.values(), "failure"):
            if failure:
                await self.restart(handle)

    async def restart(self, handle: Handle) -> None:
        """Another incarnation of an engine or a fixed verifier. Raises UserError: there cannot be one."""
        if not self._is_alive(handle):
            return  # it has died meanwhile, which its runtime mends
        try:
            await self.runtime.restart(handle)
        except RuntimeFailure as failure:
            raise UserError(f"{handle.name}: cannot be started again: {failure}; continue with --resume") from failure

    async def waits(self) -> list[Wait]:
        """Samples in flight over all agents, longest wait first."""
        told = await self.ask_all(self.agents.handles(), "waits")
        return sorted((wait for _, waits in told for wait in waits), key=lambda wait: -wait.seconds)

    async def ask_all(self, handles: Collection[Handle], method: str) -> list[tuple[Handle, Any]]:
        """What each says; those that are dead, busy or being started again are left out."""

        async def ask(handle: Handle) -> Any:
            if self._is_alive(handle):
                with suppress(RuntimeFailure):
                    return await self.runtime.call(handle, method, deadline_s=_ASK_S)
            return None

        found = await asyncio.gather(*map(ask, handles))
        return [(handle, said) for handle, said in zip(handles, found, strict=True) if said is not None]

    def _is_alive(self, handle: Handle) -> bool:
        return self.runtime.status(handle).state is RoleState.ALIVE


@asynccontextmanager
async def start_roles(
    runtime: Runtime, factories: Factories, recipe: RlRecipe, at_once: Mapping[str, int]
) -> AsyncIterator[Roles]:
    """All roles of an attempt; at the end its pools are closed, and the other roles are left to the runtime.
    ``at_once``: answers of each source that one verifier judges at once.
    Raises UserError: a role refused to start. RuntimeFailure: it died, or hangs."""
    config, again = recipe.runtime, recipe.failures.restarts
    is_together = config.kind == "local" and config.isolate != "all"
    place = Placement.THREAD if config.kind == "local" and config.isolate == "none" else Placement.PROCESS

    spawn = partial(runtime.spawn, deadline_s=_START_S)
    pool = partial(ElasticPool, runtime, deadline_s=_START_S, hangs_whole=True)

    def limits(sizes: PoolConfig, slots: int) -> Limits:
        return Limits(min=sizes.min, max=sizes.max, utilisation=sizes.utilisation, slots=slots)

    # the trainer is not restarted alone: its weights and the ledger go back to a snapshot together
    work = [spawn(factories.trainer, name="trainer", placement=place)]
    work += [
        spawn(factory, name=f"engine-{number}", placement=place, restarts=again)
        for number, factory in enumerate(factories.engines)
    ]
    rewards: dict[str, ElasticPool] = {}
    by_source: dict[str, ElasticPool] = {}
    if is_together:
        for num in sorted(set(at_once.values())):  # sources of which as many are judged at once share a pool
            names = [source for source, each in at_once.items() if each == num]
            name, sizes = "reward" if num == 1 else f"reward-x{num}", limits(config.rewards, num)
            where = Placement.PROCESS if config.verifiers == "process" else Placement.THREAD
            rewards[name] = pool(factories.reward(names), name=name, placement=where, limits=sizes)
            by_source |= dict.fromkeys(names, rewards[name])
    else:
        verifier = factories.reward(tuple(at_once))
        names = [f"reward-{number}" for number in range(config.rewards.max)]
        work += [spawn(verifier, name=name, placement=Placement.PROCESS, restarts=again) for name in names]
    async with AsyncExitStack() as stack:
        made = await _together(*work, *map(stack.enter_async_context, rewards.values()))
        trainer, *others = made[: len(work)]
        engines, fixed = tuple(others[: len(factories.engines)]), tuple(others[len(factories.engines) :])
        most = (recipe.staleness + 1) * recipe.train.prompts + recipe.train.eval_prompts  # groups at once
        agent = factories.agent(engines, by_source if is_together else fixed)
        placement, sizes = Placement.ASYNC, Limits(min=1, max=1, slots=most)
        if not is_together:
            placement = Placement.PROCESS
            sizes = limits(config.agents, max(_AGENT_GROUPS, -(-most // config.agents.max)))
        agents = pool(agent, name="agent", placement=placement, limits=sizes, drain_s=recipe.failures.lease_s)
        await stack.enter_async_context(agents)
        yield Roles(runtime, trainer, {handle.name: handle for handle in engines}, agents, rewards, fixed)


async def _together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """All results, in order. The first failure ends the others before it is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
