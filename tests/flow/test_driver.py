"""The driver against roles that only remember what they were asked: the order of things, every way a run can stop, and
engines that die while they are given weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.base.errors import UserError
from stretto.base.trajectory import GroupRef, Task, WeightVersion
from stretto.flow import driver
from stretto.flow.agent import GroupUnfinished, Wait
from stretto.flow.controller import Controller, Limits
from stretto.flow.driver import Driver, EngineWeights
from stretto.flow.launch import Factories, Roles, TrainerLost, start_roles
from stretto.flow.ledger import Ledger
from stretto.flow.log import Trace
from stretto.learning.metrics import StepReport
from stretto.learning.recipe import RlRecipe
from stretto.runtime.local import LocalRuntime
from stretto.runtime.pool import ElasticPool
from stretto.runtime.runtime import DeadlinePassed, Handle, RoleDied, RoleError
from stretto.runtime.store import FolderStore
from tests.flow.refs import check, ref, task

PROMPTS = 2
Group = Callable[[Task, int], Awaitable[GroupRef]]


class Stored(FolderStore):
    """Has all groups but those in ``lost``."""

    def __init__(self) -> None:
        super().__init__("")
        self.lost: set[str] = set()

    def missing(self, locations: Iterable[str]) -> set[str]:
        return self.lost.intersection(locations)

    def remove(self, locations: Iterable[str]) -> None:
        self.lost.update(locations)


@dataclass
class World:
    """What the roles of one run share. They live in this process, so they tell it directly."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    version: int = 0
    """Of the trainer."""
    active: dict[str, int] = field(default_factory=dict)
    """By engine."""
    on_group: Group | None = None
    """What an agent does in the place of an ordinary group."""
    on_step: Callable[[int], None] = lambda step: None
    on_publish: Callable[[int], Awaitable[None]] = lambda version: asyncio.sleep(0)
    on_activate: Callable[[str, int], None] = lambda name, version: None
    waits: tuple[Wait, ...] = ()
    num_looks: int = 0
    """Times that the driver asked the first engine how it is."""
    now_s: float = 0.0
    """The controller's clock."""
    loop: asyncio.AbstractEventLoop = field(init=False)
    store: Stored = field(default_factory=Stored)
    runtime: LocalRuntime | None = None
    roles: Roles | None = None


class Trainer:
    def __init__(self, world: World):
        self._world = world

    def step(self, refs: tuple[GroupRef, ...], step: int) -> StepReport:
        assert step == self._world.version
        self._world.events.append(("step", step, tuple(each.ordinal for each in refs)))
        self._world.on_step(step)
        self._world.version += 1
        return StepReport(self._world.version, 4, 20, {"reward/mean": 0.5})

    def copy_weights(self) -> None:
        self._copied = self._world.version

    async def publish(self) -> WeightVersion:
        version = self._copied
        await self._world.on_publish(version)
        self._world.events.append(("publish", version))
        return weights(version)

    def save(self, cut: dict[str, Any]) -> None:
        assert cut["state"]["version"] == self._world.version
        self._world.events.append(("save", self._world.version))


class Engine:
    def __init__(self, world: World, name: str):
        self._world, self._name = world, name

    async def activate(self, version: WeightVersion) -> None:
        self._world.on_activate(self._name, version.number)
        self._world.active[self._name] = version.number
        self._world.events.append(("activate", self._name, version.number))

    async def failure(self) -> str:
        self._world.num_looks += self._name == "engine-0"
        return ""


class Agent:
    def __init__(self, world: World):
        self._world = world

    async def run_group(self, task: Task, attempt: int, is_last: bool = False) -> GroupRef:
        oldest = min(self._world.active.values())
        self._world.events.append(("group", task.ordinal, oldest))
        if self._world.on_group is not None:
            return await self._world.on_group(task, attempt)
        return ref(task.ordinal, attempt, version=oldest)

    async def forget(self, ordinal: int) -> None: ...

    async def waits(self) -> tuple[Wait, ...]:
        return self._world.waits


def weights(number: int) -> WeightVersion:
    return WeightVersion(number, f"weights-{number}", "", 0)


def drive(
    folder: Path,
    world: World,
    *,
    steps: int = 3,
    staleness: int = 0,
    num_engines: int = 2,
    drop_uniform: bool = True,
    max_attempts: int = 2,
    stuck_s: float = 600.0,
    stop_s: float | None = None,
    watch: Callable[[Controller], None] = lambda controller: None,
    opened: Callable[[Path], Ledger] = Ledger.start,
) -> list[tuple[int, tuple[int, ...]]]:
    """Run to the end, or to whatever stops it; nothing may be left either way. Returns what the observer was told."""
    told: list[tuple[int, tuple[int, ...]]] = []
    recipe = RlRecipe.model_validate(
        {
            "sources": {"test": {"kind": "strings"}},
            "optim": {"lr": 1e-3},
            "train": {"steps": steps, "prompts": PROMPTS, "seq_len": 128, "snapshot_every": 2, "keep_snapshots": 2},
            "staleness": staleness,
            "failures": {"lease_s": min(60.0, stuck_s), "stuck_s": stuck_s},
            "runtime": {"isolate": "none", "stop_s": stop_s},  # the roles share the test's world
        }
    )
    factories = Factories(
        trainers=[partial(Trainer, world)],
        engines=[partial(Engine, world, f"engine-{number}") for number in range(num_engines)],
        reward=lambda names: object,
        agent=lambda engines, verifiers: partial(Agent, world),
    )
    limits = Limits(PROMPTS, staleness, 1, drop_uniform, 60.0, max_attempts, steps)

    def observe(report: StepReport, refs: tuple[GroupRef, ...]) -> None:
        told.append((report.step, tuple(each.ordinal for each in refs)))

    async def run() -> None:
        world.loop = asyncio.get_running_loop()
        async with asyncio.timeout(60), LocalRuntime() as runtime:
            with Trace(folder) as trace:
                async with start_roles(runtime, factories, recipe, {}) as roles:
                    world.runtime, world.roles = runtime, roles
                    ledger = opened(folder / "groups.sqlite")
                    controller = Controller(limits, task, ledger, lambda: world.now_s)
                    before = asyncio.all_tasks()
                    try:
                        async with Driver(
                            recipe, roles, controller, weights(0), trace, observe, world.store
                        ).at_work() as driver:
                            await driver.run()
                    finally:
                        while any(["Caller.cast" in repr(each) for each in asyncio.all_tasks()]):
                            await asyncio.sleep(0)  # the role that was told has not run yet
                        left = [repr(each) for each in asyncio.all_tasks() - before]
                        mine = ("LocalRuntime", "ElasticPool")  # of the runtime, that ends after us
                        assert all([any(name in each for name in mine) for each in left]), left
                        check(controller.state)
                        watch(controller)

    asyncio.run(run())
    return told


def test_everything_has_its_turn(tmp_path: Path) -> None:
    world = World()
    told = drive(tmp_path, world)
    steps = [("step", step, (2 * step, 2 * step + 1)) for step in range(3)]
    saved = [("save", 2), ("save", 3)]
    assert [event for event in world.events if event[0] in ("step", "save")] == [
        *steps[:2],
        saved[0],
        steps[2],
        saved[1],
    ]
    # without staleness the next step's groups wait for the weights
    published = [("publish", version) for version in (1, 2, 3)]
    found = [event for event in world.events if event[0] in ("step", "publish")]
    assert found == [event for pair in zip(steps, published, strict=True) for event in pair]
    assert told == [(1, (0, 1)), (2, (2, 3)), (3, (4, 5))]
    # without staleness, each group is drawn by engines that have all steps before its own
    assert [event for event in world.events if event[0] == "group"] == [("group", n, n // 2) for n in range(6)]
    for version in (1, 2):
        activated = [world.events.index(("activate", f"engine-{n}", version)) for n in range(2)]
        assert world.events.index(("publish", version)) < min(activated)
        assert max(activated) < world.events.index(("group", 2 * version, version))


def test_groups_that_the_store_lost_are_drawn_again(tmp_path: Path) -> None:
    """Ordinal 2 is lost after it was stored, before its step."""
    world, attempts = World(), list[tuple[int, int]]()

    async def once_lost(task: Task, attempt: int) -> GroupRef:
        attempts.append((task.ordinal, attempt))
        stored = ref(task.ordinal, attempt, version=min(world.active.values()))
        if (task.ordinal, attempt) == (2, 0):
            world.store.lost.add(stored.location)
        return stored

    world.on_group = once_lost
    told = drive(tmp_path, world)
    assert told == [(1, (0, 1)), (2, (2, 3)), (3, (4, 5))]
    assert [each for each in attempts if each[1]] == [(2, 1)]


def test_a_group_that_the_store_loses_as_its_step_begins_is_no_error_of_the_users(tmp_path: Path) -> None:
    world = World()

    def step(step: int) -> None:
        if step == 1:
            world.store.lost.add("group-2-0")
            raise UserError("group-2-0: no such file, and the run needs it; restore it, or start a new run folder")

    world.on_step = step
    with pytest.raises(TrainerLost, match="the store lost groups of step 2"):
        drive(tmp_path, world)


def test_a_group_that_the_store_loses_of_a_step_that_is_repeated_takes_the_trainer_back(tmp_path: Path) -> None:
    """Two steps were made before the run returned to its start; the store loses a group of the second one later."""
    ledger = Ledger.start(tmp_path / "groups.sqlite")
    before = Controller(Limits(PROMPTS, 0, 1, True, 60.0, 2, 3), task, ledger)
    for step in range(2):
        before.engine_active("engine-0", step)
        for dispatch in before.admit():
            before.group_ready(ref(dispatch.task.ordinal, version=step))
        assert before.next_batch() is not None
        before.trained(step)
    ledger.close()
    world = World(on_step=lambda step: world.store.lost.add("group-3-0"))
    with pytest.raises(TrainerLost, match="the store lost groups of step 2, which is repeated"):
        drive(tmp_path, world, opened=partial(Ledger.resume, cut=None))
    assert [event for event in world.events if event[0] == "step"] == [("step", 0, (0, 1))]


def test_out_of_time_it_ends_as_after_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the test's: it stands still but for the fifth step."""
    world = World()
    late = SimpleNamespace(time=time.time, monotonic=lambda: 600.0 * (world.version > 4))
    monkeypatch.setattr(driver, "time", late)
    told = drive(tmp_path, world, steps=1000, stop_s=300.0)
    steps = [event[1] for event in world.events if event[0] == "step"]
    assert 4 <= steps[-1] < 999 and [step for step, _ in told] == [step + 1 for step in steps]
    assert ("save", steps[-1] + 1) in world.events and set(world.active.values()) == {steps[-1] + 1}


def test_out_of_time_it_waits_no_longer_for_groups_that_teach(tmp_path: Path) -> None:
    """It waited on, where what was sampled after the last step taught nothing."""

    async def teaches_once(task: Task, attempt: int) -> GroupRef:
        await asyncio.sleep(0.02)
        return ref(task.ordinal, attempt, version=min(world.active.values()), is_uniform=task.ordinal >= PROMPTS)

    world = World(on_group=teaches_once)
    drive(tmp_path, world, steps=1000, stop_s=0.5)
    assert [event for event in world.events if event[0] in ("step", "save")] == [("step", 0, (0, 1)), ("save", 1)]
    assert set(world.active.values()) == {1}


def test_the_trainer_works_while_groups_are_drawn(tmp_path: Path) -> None:
    world = World()
    drive(tmp_path, world, steps=6, staleness=2)
    drawn = {event[1]: event[2] for event in world.events if event[0] == "group"}
    lags = [event[1] - drawn[ordinal] for event in world.events if event[0] == "step" for ordinal in event[2]]
    assert sorted(drawn) == list(range(12)) and 0 < max(lags) <= 2


def test_weights_are_published_beside_the_next_step_in_order(tmp_path: Path) -> None:
    world = World()
    begun = asyncio.Event()

    async def after_the_next_step_has_begun(version: int) -> None:
        if version < 4:
            await begun.wait()
        begun.clear()

    def step(step: int) -> None:
        if step:
            world.loop.call_soon_threadsafe(begun.set)

    world.on_publish, world.on_step = after_the_next_step_has_begun, step
    drive(tmp_path, world, steps=4, staleness=4)
    assert [event[1] for event in world.events if event[0] == "publish"] == [1, 2, 3, 4]
    assert set(world.active.values()) == {4}, "at the end all engines have the last step's"


def test_weights_that_cannot_be_published_stop_the_run_at_the_next_step(tmp_path: Path) -> None:
    world = World()

    async def refuse(version: int) -> None:
        await asyncio.sleep(0.05)
        if version == 2:
            raise UserError("weights: cannot be written: No space left on device; free some space")

    world.on_publish = refuse
    with pytest.raises(UserError, match=r"^weights: cannot be written"):
        drive(tmp_path, world, steps=9, staleness=4)
    assert 2 <= world.version <= 3, "the step that was begun, and none after"


def test_a_group_that_cannot_even_be_written_down_as_lost_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(task: Task, attempt: int) -> GroupRef:
        raise RuntimeError("its verifier is broken")

    def full(controller: Controller, ordinal: int, attempt: int, why: str, counts: bool = True) -> None:
        raise UserError("groups.sqlite: cannot be written: No space left on device; free some space")

    monkeypatch.setattr(Controller, "group_failed", full)
    with pytest.raises(UserError, match=r"^groups\.sqlite: cannot be written"):
        drive(tmp_path, World(on_group=fail))


def test_an_engine_that_does_not_take_its_weights_is_asked_again_and_waited_for(tmp_path: Path) -> None:
    world, tries = World(), []

    def refuse(name: str, version: int) -> None:
        if (name, version) == ("engine-1", 1):
            tries.append(version)
            if len(tries) < 3:
                raise RuntimeError("no memory")

    world.on_activate = refuse
    assert len(drive(tmp_path, world, steps=2)) == 2
    assert len(tries) == 3 and ("activate", "engine-1", 1) in world.events


def test_weights_of_another_checksum_stop_the_run(tmp_path: Path) -> None:
    world = World()

    def refuse(name: str, version: int) -> None:
        if version == 1:
            raise UserError("weights-1: checksum: is a, version 1 was announced with b; publish the version again")

    world.on_activate = refuse
    with pytest.raises(UserError, match=r"^weights-1: checksum: is a"):
        drive(tmp_path, world)
    assert ("step", 1, (2, 3)) not in world.events


def test_a_users_mistake_in_a_group_stops_the_run(tmp_path: Path) -> None:
    async def refuse(task: Task, attempt: int) -> GroupRef:
        if task.ordinal == 3:
            raise UserError("sources.test: item 3: its prompt is too long; choose shorter ones")
        return ref(task.ordinal, attempt, version=task.ordinal // 2)

    world = World(on_group=refuse)
    with pytest.raises(UserError, match=r"^sources\.test: item 3: "):
        drive(tmp_path, world)
    assert world.version == 1


def test_groups_that_teach_nothing_are_replaced_until_it_is_hopeless(tmp_path: Path) -> None:
    async def uniform(task: Task, attempt: int) -> GroupRef:
        return ref(task.ordinal, attempt, is_uniform=task.ordinal > 1, mean_reward=0.25)

    world = World(on_group=uniform)
    with pytest.raises(UserError, match=r"^sources: 129 groups .* equal rewards, the last 0\.25; start from") as caught:
        drive(tmp_path, world)
    assert "\n" not in str(caught.value) and world.version == 1

    kept = World(on_group=uniform)
    assert len(drive(tmp_path / "kept", kept, drop_uniform=False, staleness=9)) == 3, "kept, they are trained on"


def test_a_group_that_keeps_failing_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    async def fail(task: Task, attempt: int) -> GroupRef:
        if task.ordinal == 1:
            raise RuntimeError("its verifier is broken")
        return ref(task.ordinal, attempt)

    world = World(on_group=fail)
    counts: dict[str, float] = {}
    told = drive(tmp_path, world, steps=1, watch=lambda controller: counts.update(controller.counts()))
    assert [ordinals for _, ordinals in told] == [(0, 2)]
    assert counts["failed"] == 1 and counts["trained"] == 2 and counts["failed_attempts"] == 2


def test_a_group_that_comes_further_with_each_lease_is_not_given_up(tmp_path: Path) -> None:
    """One that takes five of them, where two failures are the end."""

    async def go_on(task: Task, attempt: int) -> GroupRef:
        if task.ordinal == 1 and attempt < 5:
            raise GroupUnfinished("not finished within its lease")
        return ref(task.ordinal, attempt)

    world = World(on_group=go_on)
    counts: dict[str, float] = {}
    told = drive(tmp_path, world, steps=1, watch=lambda controller: counts.update(controller.counts()))
    assert [ordinals for _, ordinals in told] == [(0, 1)] and counts["failed"] == 0


def lease_after(monkeypatch: pytest.MonkeyPatch, waited: Callable[[], None]) -> None:
    """Have ``waited`` happen to every group before it gets its agent."""
    lease = ElasticPool.lease

    @asynccontextmanager
    async def slow(pool: ElasticPool, wait_s: float) -> AsyncIterator[Handle]:
        waited()
        async with lease(pool, wait_s) as handle:
            yield handle

    monkeypatch.setattr(ElasticPool, "lease", slow)


def test_a_wait_for_an_agent_does_not_use_up_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of the step waits 50 s for its agent and takes 50 s, where the lease is 60 s."""

    async def take_long(task: Task, attempt: int) -> GroupRef:
        world.now_s, num_looks = 100.0, world.num_looks
        while world.num_looks < num_looks + 2:  # the driver has looked for leases that ran out
            await asyncio.sleep(0.01)
        return ref(task.ordinal, attempt)

    world = World(on_group=take_long)

    def wait() -> None:
        world.now_s = max(world.now_s, 50.0)

    lease_after(monkeypatch, wait)
    counts: dict[str, float] = {}
    drive(tmp_path, world, steps=1, watch=lambda controller: counts.update(controller.counts()))
    assert counts["expired"] == counts["late"] == 0 and counts["trained"] == 2


def test_groups_that_got_no_agent_in_time_are_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times, where two failures of its own are the end of a group."""
    world, num_refused = World(), iter(range(4))

    def refuse() -> None:
        if next(num_refused, None) is not None:
            raise DeadlinePassed("agent", "lease", 60.0)

    lease_after(monkeypatch, refuse)
    counts: dict[str, float] = {}
    told = drive(tmp_path, world, steps=1, watch=lambda controller: counts.update(controller.counts()))
    assert [ordinals for _, ordinals in told] == [(0, 1)] and counts["failed"] == 0 and counts["failed_attempts"] == 4


def test_a_run_whose_groups_all_fail_stops_with_the_reason(tmp_path: Path) -> None:
    async def fail(task: Task, attempt: int) -> GroupRef:
        raise RuntimeError("verifier: sources.test: item 4: raised KeyError (3 attempts)")

    world = World(on_group=fail)
    with pytest.raises(UserError, match=r"^sources: 5 groups .* verifier: sources\.test: item 4: raised") as caught:
        drive(tmp_path, world)
    assert "\n" not in str(caught.value) and world.version == 0


def test_a_trainer_that_dies_is_lost_at_once_also_while_nobody_asks_it(tmp_path: Path) -> None:
    async def kill(task: Task, attempt: int) -> GroupRef:
        assert world.runtime is not None and world.roles is not None
        await world.runtime.kill(world.roles.trainer.ranks[0], hard=True)
        await asyncio.sleep(60)
        raise AssertionError("nobody waits for this group")

    world = World(on_group=kill)
    with pytest.raises(TrainerLost, match="trainer"):
        drive(tmp_path, world)


def test_a_trainer_that_raises_is_one_line(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise FloatingPointError("the loss is not finite")

    with pytest.raises(UserError, match=r"^trainer: step: FloatingPointError: the loss is not finite; .*--resume"):
        drive(tmp_path, World(on_step=fail))


@pytest.mark.slow
def test_a_step_longer_than_the_watchdogs_patience_is_not_stuck(tmp_path: Path) -> None:
    """Groups finish during the step, and the driver looks for stuck waits for longer than these allow."""

    async def finish_in_the_step(task: Task, attempt: int) -> GroupRef:
        while task.ordinal > 1 and not any(event[0] == "step" for event in world.events):
            await asyncio.sleep(0.01)
        return ref(task.ordinal, attempt)

    def step(step: int) -> None:
        num_looks = world.num_looks
        while step == 0 and world.num_looks < num_looks + 12:
            time.sleep(0.01)

    world = World(on_group=finish_in_the_step, on_step=step)
    assert len(drive(tmp_path, world, steps=2, staleness=2, stuck_s=2.0)) == 2


@pytest.mark.slow
def test_a_group_longer_than_the_watchdogs_patience_is_not_stuck_while_others_finish(tmp_path: Path) -> None:
    async def take_long(task: Task, attempt: int) -> GroupRef:
        while task.ordinal == 1 and world.num_looks < 12:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2 * (task.ordinal > 1))
        return ref(task.ordinal, attempt, is_uniform=task.ordinal > 1 and world.version == 0)

    world = World(on_group=take_long)
    assert drive(tmp_path, world, steps=2, staleness=1, stuck_s=2.0)[0] == (1, (0, 1))


def test_what_is_stuck_is_named(tmp_path: Path) -> None:
    async def hang(task: Task, attempt: int) -> GroupRef:
        if attempt == 0 and task.ordinal == 1:
            raise RuntimeError("engine-1: no answer")
        await asyncio.sleep(60)
        raise AssertionError("nobody waits so long")

    waits = (Wait(0, 3, "a verdict", 41.0, 7),)
    with pytest.raises(UserError) as caught:
        drive(tmp_path, World(on_group=hang, waits=waits), stuck_s=0.2)
    said = str(caught.value)
    assert "\n" not in said and said.startswith("run: ")
    for words in (
        "has waited for agent-",
        "sample 3 of group 0 has waited for a verdict for 41 s",
        "engine-1: no answer",
    ):
        assert words in said, said


LIMITS = Limits(2, 1, 1, False, 60.0, 3, 10)


class Engines:
    """As `Roles` shows them to `EngineWeights`; one dies when the test says so."""

    engines: tuple[str, ...] = ("engine-0",)

    def __init__(self) -> None:
        self.num_restarts = 0
        self.is_open = asyncio.Event()
        """Of engine-0: its activations end."""
        self.is_open.set()
        self.has = -1
        """Version that engine-0's present incarnation has; −1: none."""
        self.serves: list[int] = []
        """Versions activated, in every incarnation."""
        self.dies: Iterator[str] = iter(())
        """For each activation, a death ``before`` it was done, ``after``, ``between`` asking and doing, or none."""
        self.gone: dict[int, Exception] = {}
        """Versions that cannot be fetched any more, and what fetching them raises."""

    def restarts(self, name: str) -> int:
        return self.num_restarts if name == "engine-0" else 0

    async def activate(self, name: str, weights: WeightVersion) -> None:
        if name != "engine-0":
            return
        await self.is_open.wait()
        await asyncio.sleep(0)
        if weights.number in self.gone:
            raise self.gone[weights.number]
        death = next(self.dies, "")
        if death == "before":
            self.has = -1
            raise RoleDied(name, "its process was killed")
        if death:  # it answers, and the runtime has noticed a death before the answer is read
            self.num_restarts += 1
        self.has = -1 if death == "after" else weights.number  # between: the next incarnation has answered
        if not death:
            self.serves.append(weights.number)


async def settled(following: EngineWeights) -> None:
    while not following.are_current:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "deaths", [("", ""), ("before", ""), ("after", ""), ("between", ""), ("before", "after", "between", "")]
)
def test_an_engine_gets_the_newest_weights_whenever_it_dies(tmp_path: Path, deaths: tuple[str, ...]) -> None:
    async def play() -> list[int]:
        roles = Engines()
        roles.dies = iter(deaths)
        controller = Controller(LIMITS, task, Ledger.start(tmp_path / "groups.sqlite"))
        problems: list[BaseException] = []
        with Trace(tmp_path) as trace:
            first = WeightVersion(0, "", "", 0)
            following = EngineWeights(roles, controller, trace, moved=lambda: None, failed=problems.append)  # type: ignore[arg-type]
            following.publish(first)
            while not following.are_current:
                following.tend()
                await asyncio.sleep(0.01)
            assert controller.counts()["engine_lag"] == 0 and controller.admit(), "groups are handed out to it"
            roles.num_restarts += 1  # killed while idle: nobody's call fails
            for _ in range(20):
                following.tend()
                await asyncio.sleep(0.01)
            await following.close()
        assert not problems
        return roles.serves

    assert asyncio.run(play()) == [0, 0]


@pytest.mark.parametrize(
    "error",
    [
        RoleError("engine-0", "activate", "InfraError", "the trainer has a newer version", ""),
        UserError("weights-0000000.safetensors: no such file"),
    ],
)
def test_an_engine_that_comes_too_late_for_a_version_gets_the_next_one_without_a_restart(
    error: Exception, tmp_path: Path
) -> None:
    async def play() -> None:
        roles = Engines()
        controller = Controller(LIMITS, task, Ledger.start(tmp_path / "groups.sqlite"))
        problems: list[BaseException] = []  # also of a restart, which these roles have not
        with Trace(tmp_path) as trace:
            following = EngineWeights(roles, controller, trace, moved=lambda: None, failed=problems.append)  # type: ignore[arg-type]
            roles.is_open.clear()
            following.publish(WeightVersion(0, "", "", 0))
            await asyncio.sleep(0)  # the engine is asked for version 0
            for dispatch in controller.admit():
                controller.group_ready(ref(dispatch.task.ordinal))
            assert controller.next_batch() is not None
            controller.trained(0)
            roles.gone = {0: error}
            following.publish(WeightVersion(1, "", "", 0))
            roles.is_open.set()
            await asyncio.wait_for(settled(following), 60)
            await following.close()
        assert roles.serves == [1] and not problems, problems

    asyncio.run(play())


@pytest.mark.parametrize("death", ["", "noticed", "between", "after"])
def test_an_engine_is_never_believed_to_have_newer_weights_than_it_samples_under(tmp_path: Path, death: str) -> None:
    """It comes back while others go ahead: what is handed out meanwhile may land on it, and is charged for that."""

    async def play() -> None:
        roles = Engines()
        roles.engines = ("engine-0", "engine-1")
        controller = Controller(LIMITS, task, Ledger.start(tmp_path / "groups.sqlite"))
        problems: list[BaseException] = []
        versions = [WeightVersion(number, "", "", 0) for number in range(3)]
        with Trace(tmp_path) as trace:
            following = EngineWeights(roles, controller, trace, moved=lambda: None, failed=problems.append)  # type: ignore[arg-type]
            following.publish(versions[0])
            await settled(following)
            for version in versions[1:]:
                if version.number == 1:
                    roles.num_restarts, roles.has = 1, -1
                    roles.is_open.clear()
                    following.tend()  # engine-0 is on its way to version 0 again
                    await asyncio.sleep(0)
                for dispatch in controller.admit():
                    controller.group_ready(ref(dispatch.task.ordinal))
                assert controller.next_batch() is not None
                controller.trained(version.number - 1)
                following.publish(version)
                await asyncio.sleep(0.01)
            assert controller.counts()["engine_lag"] == 2 and not controller.admit(), "η is 1"
            if death == "noticed":  # the call waits at the socket meanwhile, and the next incarnation takes it
                roles.num_restarts += 1
                following.tend()
            else:
                roles.dies = iter([death])
            roles.is_open.set()
            while roles.has != 2:
                following.tend()
                lag = controller.counts()["engine_lag"]
                assert roles.has < 0 or 2 - roles.has <= lag, (
                    f"it has version {roles.has}, and is believed to lag by {lag}"
                )
                await asyncio.sleep(0)
            await settled(following)
            assert controller.counts()["engine_lag"] == 0 and controller.admit()
            await following.close()
        assert not problems, problems

    asyncio.run(play())
