"""Construction of the roles of a run from its recipe.

Each role is made by a picklable factory. Roles run in pools, threads or processes, or on the driver's loop, behind one runtime.
Imports no torch: only the processes of trainer and engines import it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from stretto.base.errors import InfraError, UserError
from stretto.base.paths import RECIPE_FILE, read_json
from stretto.base.trajectory import WeightVersion
from stretto.flow.agent import AgentRole, Wait
from stretto.flow.clients import Verifiers, connect
from stretto.flow.files import RunFiles
from stretto.flow.prompts import SourceTables
from stretto.flow.reward import RewardRole
from stretto.learning.recipe import WEIGHTS, RlRecipe
from stretto.learning.roles import NeedsConfig, PoolConfig, Precision, PrecisionConfig
from stretto.model.spec import ModelConfig
from stretto.runtime.pool import ElasticPool, Limits
from stretto.runtime.runtime import (
    Caller,
    DeadlinePassed,
    Handle,
    Placement,
    RoleDied,
    RoleError,
    RoleState,
    Runtime,
    RuntimeFailure,
    cancel_all,
)
from stretto.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
ERROR_FILE = "error.txt"
"""In the run folder: traceback of the role whose error ended the run."""
_START_S = 300.0
"""Deadline for the start of a role: start an interpreter, import torch. Longer for a large checkpoint, see `checkpoint_s`."""
_STEP_S = 3600.0
"""Deadline of a call to the trainer. The watchdog reports other roles earlier."""
_DEATH_S = 20.0
"""Longest time from the death of a process to its report: the time for which the error of a trainer's rank may be the consequence of
another rank's death."""
_POLL_S = 0.1
_ASK_S = 10.0
"""Deadline for a role to report its state."""
CALL_SLACK_S = 10.0
"""Time by which the deadline of an agent's call exceeds the group's lease."""
_LOAD_S = 120.0
"""Deadline for an engine to load new weights. Longer for a large checkpoint, see `checkpoint_s`."""
_SLOWEST = 50e6
"""Bytes of the start checkpoint per second by which deadlines grow. A network disk moves 200 MB/s or more (assumed), and a call moves
the weights up to four times: an engine reads, hashes, writes and reads them again, a snapshot has optimiser states beside them."""
_OWN_GPU = "cuda:0"
"""Device of a role for which Ray has reserved a GPU: it sees no other one."""
_AGENT_GROUPS = 64
"""Groups of one isolated agent: with small models, enough to keep one core busy. The limit rises if the largest pool could not
hold all groups of the run."""


@dataclass(frozen=True, slots=True)
class Job:
    """Arguments of a run."""

    recipe: RlRecipe
    folder: Path
    start: Path
    """Checkpoint folder of the initial policy."""
    resume: bool = False
    devices: tuple[str, ...] = ("cpu",)
    """Devices to use; `spread` assigns them to trainer and engines."""
    wandb_project: str | None = None
    stage: str = "rl"
    """Name of the stage in the lineage of the result."""


class _Device:
    """A role that says which precision the trainer has on its device unless the recipe chooses."""

    def __init__(self, device: str):
        self._device = device

    def precision(self) -> Precision:
        from stretto.ops.matmul import default_precision  # imports torch, where the device is

        return default_precision(self._device)


async def with_precision(runtime: Runtime, job: Job, say: Callable[[str], None]) -> Job:
    """``job`` with its precision in place of ``auto``: that of the run in its folder, or of the trainer's device."""
    recipe, path = job.recipe, job.folder / RECIPE_FILE
    given, source = recipe.precision, ""
    if "auto" in (given.train, given.rollout) and job.resume and path.exists():
        kept = PrecisionConfig.model_validate(read_json(path)["precision"])
        given, source = given.filled(kept.trainer, kept.engines), ", as when the run started"
    elif given.train == "auto":
        device = _own_or(job.devices[0], recipe.resources.trainer)
        place = Placement.THREAD if recipe.runtime.kind == "local" else Placement.PROCESS
        needs = recipe.resources.needs()["trainer"]
        role = await runtime.spawn(
            partial(_Device, device), name="device", placement=place, deadline_s=_START_S, needs=needs
        )
        given = given.filled(await runtime.call(role, "precision", deadline_s=_START_S))
        await runtime.kill(role)
        source = f", which the trainer's device {device} decides"
    else:
        given = given.filled(given.train)
    say(f"precision: trainer {given.trainer}, engines {given.engines}{source}")
    return replace(job, recipe=recipe.replace(precision=given))


@dataclass(frozen=True, slots=True)
class Factories:
    """Factories of the roles. Role factories are picklable, because they are called in other processes."""

    trainers: Sequence[Callable[..., Any]]
    """By rank."""
    engines: Sequence[Callable[[], Any]]
    reward: Callable[[Collection[str]], Callable[[], Any]]
    """Returns the factory of a verifier for some sources."""
    agent: Callable[[tuple[Handle, ...], Verifiers], Callable[..., Any]]
    """Returns the factory of an agent with some engines and verifiers."""
    checkpoint_s: float = 0.0
    """See `checkpoint_s`."""


def checkpoint_s(start: Path) -> float:
    """Time by which the deadlines of calls that read or write weights exceed those for a tiny network, in seconds. ``start``: the
    start checkpoint."""
    return sum(file.stat().st_size for file in start.glob("*.safetensors")) / _SLOWEST


def spread(devices: Sequence[str], num_ranks: int, num_engines: int) -> tuple[list[str], list[str]]:
    """Devices of each rank of the trainer and of each engine. The ranks get the first devices, and the engines share the others in
    turn, or all devices if there are no others."""
    trainers = [devices[rank % len(devices)] for rank in range(num_ranks)]
    others = devices[num_ranks:] or devices
    return trainers, [others[number % len(others)] for number in range(num_engines)]


def make_factories(job: Job, tables: SourceTables, tokenizer: Tokenizer, files: RunFiles) -> Factories:
    """The factories of the roles of ``job``, whose files are ``files``."""
    recipe, deadline_s = job.recipe, job.recipe.runtime.rewards.deadline_s

    def agent(engines: tuple[Handle, ...], rewards: Verifiers) -> Callable[..., Any]:
        clients = partial(connect, engines, rewards, deadline_s, recipe.failures.lease_s)
        return partial(AgentRole, recipe, files.store, tokenizer, tables, clients)

    def reward(names: Collection[str]) -> Callable[[], Any]:
        part = SourceTables({name: tables.sources[name] for name in names}, tables.sandbox)
        return partial(RewardRole, part, deadline_s)

    own, others = spread(job.devices, recipe.trainer.ranks, recipe.rollout.engines)
    engines = [partial(_engine, job, files, number, device) for number, device in enumerate(others)]
    trainers = [partial(_trainer_rank, job, files, *each) for each in enumerate(own)]
    if len(own) == 1:
        trainers = [partial(_trainer, job, files, own[0])]
    return Factories(trainers, engines, reward, agent, checkpoint_s(job.start))


def _trainer(job: Job, files: RunFiles, device: str, caller: Caller) -> Any:
    from stretto.learning.trainer import open_trainer  # imports torch, in the role's process

    return open_trainer(_trainer_with(job, files, caller), _own_or(device, job.recipe.resources.trainer))


def _trainer_rank(job: Job, files: RunFiles, rank: int, device: str, caller: Caller) -> Any:
    from stretto.learning.trainer import TrainerRank

    device = _own_or(device, job.recipe.resources.trainer)
    return TrainerRank(_trainer_with(job, files, caller), job.recipe.trainer, rank, device, caller)


def _trainer_with(job: Job, files: RunFiles, caller: Caller) -> Callable[..., Any]:
    """Returns the trainer of the ``ranks`` that it is given."""
    from stretto.learning.remote_trainer import RemoteTrainer
    from stretto.learning.trainer import TrainerRole

    kind = TrainerRole if files.is_shared else RemoteTrainer
    opened = partial(kind, job.recipe, files.folder_here(), files.start_here(), stage=job.stage)
    return partial(opened, store=files.store, host=caller.host)


async def check_servers(runtime: Runtime[Any], job: Job, config: ModelConfig) -> None:
    """`stretto.flow.rollout_remote.check_server` for all addresses of ``job``, from where its engines will run."""
    recipe = job.recipe
    needs = recipe.resources.needs()["engines"]

    async def check(number: int, address: str) -> None:
        work = partial(_check_server, recipe, address, config, job.folder)
        name = f"engine-{number}"
        await runtime.kill(
            await runtime.spawn(work, name=name, placement=Placement.THREAD, deadline_s=_START_S, needs=needs)
        )

    await _together(*(check(*each) for each in enumerate(recipe.rollout.address)))


def _check_server(recipe: RlRecipe, address: str, config: ModelConfig, run: Path) -> None:
    from stretto.flow.rollout_remote import check_server  # imports torch

    check_server(recipe, address, config, run)


def _own_or(device: str, needs: NeedsConfig) -> str:
    """The device of a role with ``needs``: the GPU that Ray has reserved for it, or else ``device``."""
    return _OWN_GPU if needs.gpus else device


def _engine(job: Job, files: RunFiles, number: int, device: str) -> Any:
    from stretto.flow.rollout import EngineRole, open_run_engine  # imports torch
    from stretto.flow.rollout_remote import RemoteEngineRole
    from stretto.learning.channel import open_channel

    device = _own_or(device, job.recipe.resources.engines)
    name, start = f"engine-{number}", files.start_here()
    fetch = open_channel(job.recipe.channel, files.store, files.run).fetch
    if addresses := job.recipe.rollout.address:
        folder = files.folder_here() / WEIGHTS / name
        return RemoteEngineRole(job.recipe, addresses[number], start, folder, fetch, name=name)
    opened, keep_cache = partial(open_run_engine, job.recipe, start, device), job.recipe.rollout.keep_cache
    return EngineRole(opened, fetch, name=name, waits=True, keep_cache=keep_cache)


class TrainerLost(RuntimeError):  # noqa: N818 - data for `stretto.flow.run`, which starts the next attempt
    """The trainer died or hangs, or cannot go on from its weights. The run resumes from its last snapshot."""


@dataclass(frozen=True, slots=True)
class Gang:
    """The ranks of the trainer, of one incarnation: when one dies, the gang is lost."""

    runtime: Runtime
    ranks: tuple[Handle, ...]

    async def join(self, deadline_s: float = _START_S) -> Gang:
        """Let the ranks meet, and build the trainer on each within ``deadline_s``. Raises as `call`."""
        if len(self.ranks) > 1:
            address = await Gang(self.runtime, self.ranks[:1]).call("meet", deadline_s=_ASK_S)
            await self.call("join", address, deadline_s=deadline_s)
        return self

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """Result of the first rank's ``method``, when all ranks, which are called with the same arguments, have answered.
        Raises TrainerLost: a rank died or hangs. UserError: the method raised a UserError or any other error."""
        call = partial(self.runtime.call, deadline_s=deadline_s)
        calls = [asyncio.ensure_future(call(rank, method, *args)) for rank in self.ranks]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            errors = await self._errors(calls)
        finally:
            await cancel_all(calls)
        if not errors:
            return calls[0].result()
        for error in errors:
            if is_loss(error):
                raise TrainerLost(str(error)) from error
        error = next((each for each in errors if isinstance(each, UserError)), errors[0])
        if isinstance(error, RoleError):
            problem = f"trainer: {method}: {error.kind}: {error.message}"
            raise UserError(
                f"{problem}; its traceback is in {ERROR_FILE} of the run folder; then continue with --resume"
            ) from error
        raise error

    async def _errors(self, calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
        """Errors of those of ``calls`` that have ended, and the deaths of ranks.

        When a rank dies, the other ranks may fail before the runtime reports the death. So after an error this waits for a death, at
        most `_DEATH_S`. Only if none is reported, the error is the rank's own.
        """
        end_s = time.monotonic() + _DEATH_S
        while errors := [error for each in calls if each.done() and (error := each.exception()) is not None]:
            statuses = map(self.runtime.status, self.ranks)
            errors += [RoleDied(each.name, each.why) for each in statuses if each.state is not RoleState.ALIVE]
            is_lost = any(map(is_loss, errors))
            is_agreed = sum(isinstance(each, UserError) for each in errors) == len(calls)
            if is_lost or is_agreed or len(calls) == 1 or time.monotonic() > end_s:
                break
            await asyncio.sleep(_POLL_S)
        return errors


def is_loss(error: BaseException) -> bool:
    """Whether ``error`` of a rank loses the trainer: it died or hangs, or a store did not answer, between two steps perhaps."""
    return isinstance(error, (RoleDied, DeadlinePassed)) or (
        isinstance(error, RoleError) and error.kind == InfraError.__name__
    )


@dataclass(frozen=True, slots=True)
class Roles:
    """All roles of a run. Made by `start_roles`; a trainer that is lost is replaced by `with_trainer`."""

    runtime: Runtime
    trainer: Gang
    engines: Mapping[str, Handle]
    agents: ElasticPool
    """Each lease is for one group."""
    rewards: Mapping[str, ElasticPool]
    """Pools of verifiers by name; empty if the number of verifiers is fixed."""
    fixed_rewards: tuple[Handle, ...]
    """Verifiers that isolated agents call directly."""
    checkpoint_s: float = 0.0
    """See `checkpoint_s`."""

    @property
    def pools(self) -> tuple[ElasticPool, ...]:
        return (self.agents, *self.rewards.values())

    @property
    def verifiers(self) -> list[Handle]:
        return [*self.fixed_rewards, *(handle for pool in self.rewards.values() for handle in pool.handles())]

    @property
    def unpooled(self) -> tuple[Handle, ...]:
        """Roles outside the pools."""
        return (*self.trainer.ranks, *self.engines.values(), *self.fixed_rewards)

    def restarts(self, engine: str) -> int:
        return self.runtime.status(self.engines[engine]).restarts

    def num_restarts(self) -> int:
        """Restarts and replacements of all roles but the trainer."""
        restarts = sum(self.runtime.status(handle).restarts for handle in self.unpooled)
        return restarts + sum(pool.stats().num_replaced for pool in self.pools)

    async def activate(self, engine: str, weights: WeightVersion) -> None:
        deadline_s = _LOAD_S + self.checkpoint_s
        await self.runtime.call(self.engines[engine], "activate", weights, deadline_s=deadline_s)

    async def with_trainer(self, factories: Factories, recipe: RlRecipe) -> Roles:
        """These roles with a new trainer, after the last one was lost. The other roles go on: agents drop their groups, and engines
        wait for the new trainer's weights. Raises as `start_trainer`."""
        started, _ = await _together(start_trainer(self.runtime, factories, recipe), self._rewind())
        return replace(self, trainer=started)

    async def _rewind(self) -> None:
        """Let no agent and no engine work for the lost trainer any more. Those that do not answer are restarted."""

        async def rewind(handle: Handle, restart: Callable[[str], Coroutine[Any, Any, None]]) -> None:
            if not self._is_alive(handle):
                return  # its next incarnation begins anew
            try:
                await self.runtime.call(handle, "rewind", deadline_s=_ASK_S)
            except RoleDied:
                pass
            except RuntimeFailure as failure:
                await restart(str(failure))

        async def replace_agent(handle: Handle, why: str) -> None:
            self.agents.replace(handle, why=why)

        # agents first, so that none sends a request to an engine that is ready again
        await _together(*(rewind(each, partial(replace_agent, each)) for each in self.agents.handles()))
        await _together(*(rewind(each, partial(self.restart, each)) for each in self.engines.values()))

    async def call_trainer(self, method: str, *args: Any, deadline_s: float = _STEP_S) -> Any:
        """`Gang.call` of the trainer."""
        return await self.trainer.call(method, *args, deadline_s=deadline_s)

    def forget(self, ordinal: int) -> None:
        """Delete the token logs of a group that is stored."""
        if agent := next(filter(self._is_alive, self.agents.handles()), None):
            self.runtime.cast(agent, "forget", ordinal)

    async def mend(self) -> None:
        """Restart verifiers with threads that hang in a task, and engines that failed inside.
        Raises TrainerLost: the trainer died. UserError: another role cannot be restarted any more."""
        for handle in self.unpooled:
            status = self.runtime.status(handle)
            if status.state is RoleState.DEAD:
                if handle in self.trainer.ranks:
                    raise TrainerLost(f"{handle.name}: {status.why}")
                raise UserError(
                    f"{handle.name}: {status.why}; failures.restarts: correct the cause, or raise it; then continue with --resume"
                )
        for pool in self.pools:
            if pool.error is not None:
                raise UserError(f"{pool.name}: no worker can be started any more: {pool.error}; continue with --resume")
        for handle, stats in await self.ask_all(self.verifiers, "stats"):
            if stats.num_stuck and handle in self.fixed_rewards:
                await self.restart(handle, f"{stats.num_stuck} of its threads hang in a task")
            elif stats.num_stuck:
                for pool in self.rewards.values():
                    pool.replace(handle, hard=False)  # its other verifications may still end
        for handle, failure in await self.ask_all(self.engines.values(), "failure"):
            if failure:
                await self.restart(handle, failure)

    async def restart(self, handle: Handle, why: str) -> None:
        """Restart an engine or a fixed verifier, and log ``why``. Raises UserError: it cannot be restarted."""
        if not self._is_alive(handle):
            return  # the runtime restarts a role that has died
        _log.warning("%s: %s; it is started again", handle.name, why.removeprefix(f"{handle.name}: "))
        try:
            await self.runtime.restart(handle)
        except RuntimeFailure as failure:
            raise UserError(f"{handle.name}: cannot be started again: {failure}; continue with --resume") from failure

    async def waits(self) -> list[Wait]:
        """Samples in flight over all agents, longest wait first."""
        by_agent = await self.ask_all(self.agents.handles(), "waits")
        return sorted((wait for _, waits in by_agent for wait in waits), key=lambda wait: -wait.seconds)

    async def ask_all(self, handles: Collection[Handle], method: str) -> list[tuple[Handle, Any]]:
        """Result of ``method`` of each role, without roles that are dead, restarting or too busy to answer."""

        async def ask(handle: Handle) -> Any:
            if self._is_alive(handle):
                with suppress(RuntimeFailure):
                    return await self.runtime.call(handle, method, deadline_s=_ASK_S)
            return None

        answers = await asyncio.gather(*map(ask, handles))
        return [(handle, answer) for handle, answer in zip(handles, answers, strict=True) if answer is not None]

    def _is_alive(self, handle: Handle) -> bool:
        return self.runtime.status(handle).state is RoleState.ALIVE


def _place_of(recipe: RlRecipe) -> Placement:
    """Place of engines, and of a trainer with one rank."""
    is_thread = recipe.runtime.kind == "local" and recipe.runtime.isolate == "none"
    return Placement.THREAD if is_thread else Placement.PROCESS


async def start_trainer(runtime: Runtime, factories: Factories, recipe: RlRecipe) -> Gang:
    """All ranks of the trainer, in place of those that are left of an earlier one. No rank is restarted alone, because their weights
    and the ledger return to a snapshot together.
    Raises UserError: a rank refused to start. RuntimeFailure, TrainerLost: a rank died or hangs."""
    num = len(factories.trainers)
    names = ["trainer"] if num == 1 else [f"trainer-{rank}" for rank in range(num)]
    await asyncio.gather(*(runtime.kill(handle, hard=True) for handle in runtime.handles() if handle.name in names))
    place = _place_of(recipe) if num == 1 else Placement.PROCESS
    deadline_s = _START_S + factories.checkpoint_s
    spawn = partial(runtime.spawn, placement=place, deadline_s=deadline_s, needs=recipe.resources.needs()["trainer"])
    spawns = [spawn(factory, name=name) for factory, name in zip(factories.trainers, names, strict=True)]
    return await Gang(runtime, tuple(await _together(*spawns))).join(deadline_s)


@asynccontextmanager
async def start_roles(
    runtime: Runtime, factories: Factories, recipe: RlRecipe, at_once: Mapping[str, int]
) -> AsyncIterator[Roles]:
    """Context with all roles of a run. At the end its pools are closed; the other roles are left to the runtime.
    ``at_once``: by source, the number of answers that one verifier judges at once.
    Raises UserError: a role refused to start. RuntimeFailure: a role died or hangs."""
    config, failures = recipe.runtime, recipe.failures
    is_together, place = config.kind == "local" and config.isolate != "all", _place_of(recipe)
    respawn = partial(
        runtime.spawn,
        deadline_s=_START_S + factories.checkpoint_s,
        restarts=failures.restarts,
        window_s=failures.restart_window_s,
    )
    needs = recipe.resources.needs()
    pool = partial(
        ElasticPool,
        runtime,
        deadline_s=_START_S,
        restarts=failures.restarts,
        window_s=failures.restart_window_s,
    )

    def limits(sizes: PoolConfig, slots: int) -> Limits:
        return Limits(min=sizes.min, max=sizes.max, utilisation=sizes.utilisation, slots=slots)

    work: list[Coroutine[Any, Any, Any]] = [start_trainer(runtime, factories, recipe)]
    work += [
        respawn(factory, name=f"engine-{number}", placement=place, needs=needs["engines"])
        for number, factory in enumerate(factories.engines)
    ]
    rewards: dict[str, ElasticPool] = {}
    by_source: dict[str, ElasticPool] = {}
    most = (recipe.staleness + 1) * recipe.train.prompts + recipe.train.eval_prompts  # groups in flight
    if is_together:
        agent_placement, agent_limits = Placement.ASYNC, Limits(min=1, max=1, slots=most)
        for num in sorted(set(at_once.values())):  # sources with equal numbers share a pool
            names = [source for source, each in at_once.items() if each == num]
            name, sizes = "reward" if num == 1 else f"reward-x{num}", limits(config.rewards, num)
            where = Placement.PROCESS if config.verifiers == "process" else Placement.THREAD
            rewards[name] = pool(factories.reward(names), name=name, placement=where, limits=sizes)
            by_source |= dict.fromkeys(names, rewards[name])
    else:
        slots = max(_AGENT_GROUPS, -(-most // config.agents.max))
        agent_placement, agent_limits = Placement.PROCESS, limits(config.agents, slots)
        verifier = factories.reward(tuple(at_once))
        names = [f"reward-{number}" for number in range(config.rewards.max)]
        work += [respawn(verifier, name=name, placement=Placement.PROCESS, needs=needs["rewards"]) for name in names]
    async with AsyncExitStack() as stack:
        started = await _together(*work, *map(stack.enter_async_context, rewards.values()))
        trainer, *others = started[: len(work)]
        engines, fixed = tuple(others[: len(factories.engines)]), tuple(others[len(factories.engines) :])
        agent, drain_s = factories.agent(engines, by_source if is_together else fixed), recipe.failures.lease_s
        agents = pool(
            agent,
            name="agent",
            placement=agent_placement,
            limits=agent_limits,
            drain_s=drain_s,
            needs=needs["agents"],
        )
        await stack.enter_async_context(agents)
        by_name = {handle.name: handle for handle in engines}
        yield Roles(runtime, trainer, by_name, agents, rewards, fixed, factories.checkpoint_s)


async def _together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """All results, in order. The first error cancels the other coroutines before it is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_all(tasks)
        raise
