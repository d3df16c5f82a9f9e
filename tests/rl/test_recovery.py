from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.common.killing import RECIPE
from bench.common.run_account import kolmogorov_smirnov
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.trajectory import Task, WeightVersion
from stretto.rl.buffer import GroupRef
from stretto.rl.controller import Controller
from stretto.rl.fleet import Fleet
from stretto.rl.folder import JOURNAL_FILE, claimed, sweep, take_up
from stretto.rl.recipe import RlRecipe
from stretto.rl.samples import log_path
from stretto.rl.throttle import Limits
from stretto.rl.trace import Trace
from stretto.rl.weights import fetch, publish
from stretto.runtime.runtime import RoleDied


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(f"staleness = 2\n{RECIPE}")
    return path


def task_of(ordinal: int) -> Task:
    return Task(ordinal, "short", ordinal, 2, ordinal, 8)


def limits(prompts: int = 2) -> Limits:
    return Limits(prompts, 1, 1, False, 60.0, 3, 10)


def ref(ordinal: int, folder: Path) -> GroupRef:
    return GroupRef(ordinal, 0, str(folder / f"group-{ordinal:08d}-0.group"), 2, 4, 0, 0.5, False, 0.0)


def test_a_changed_recipe_is_refused_by_its_field_before_anything_is_written(tmp_path: Path, recipe_file: Path) -> None:
    run = tmp_path / "run"
    recipe = read_recipe(recipe_file, RlRecipe)
    assert not take_up(recipe, run, resume=False)
    changed = read_recipe(recipe_file, RlRecipe, ["optim.lr=0.5", "staleness=3"])
    assert not take_up(changed, run, resume=True), "no group was handed out: there is nothing to go on with"
    take_up(recipe, run, resume=True)
    before = (run / "recipe.json").read_text()
    (run / JOURNAL_FILE).touch()
    with pytest.raises(UserError, match=r"optim\.lr: was 3e-05 when this run started, is 0\.5 now") as error:
        take_up(changed, run, resume=True)
    assert "\n" not in str(error.value) and (run / "recipe.json").read_text() == before
    with pytest.raises(UserError, match="holds a run already; continue it with --resume"):
        take_up(recipe, run, resume=False)
    assert take_up(read_recipe(recipe_file, RlRecipe, ["runtime.isolate=none"]), run, resume=True)


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from stretto.rl.folder import claimed\n"
        "with claimed(Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"in\n"
        with pytest.raises(UserError, match="another process is running it"), claimed(tmp_path / "run"):
            raise AssertionError("claimed twice")
        other.kill()
        other.wait()
    with claimed(tmp_path / "run"):
        pass


def test_what_a_kill_left_behind_goes_and_what_is_needed_stays(tmp_path: Path) -> None:
    groups, logs = tmp_path / "groups", tmp_path / "tokens"
    controller = Controller.start(limits(), task_of, tmp_path / JOURNAL_FILE)
    controller.engine_active("engine-0", 0)
    assert [handout.task.ordinal for handout in controller.admit()] == [0, 1, 2, 3]
    controller.group_ready(ref(0, groups))
    controller.close()
    groups.mkdir()
    for name in ("group-00000000-0.group", "group-00000001-0.group", ".group-00000002-0.group.77.partial"):
        (groups / name).touch()  # the second was stored, and its agent killed before it could tell
    for ordinal in (0, 1, 9):
        path = log_path(logs, ordinal, 0)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    resumed = Controller.resume(limits(), task_of, tmp_path / JOURNAL_FILE, None)
    sweep(tmp_path, resumed)
    assert [path.name for path in groups.iterdir()] == ["group-00000000-0.group"]
    assert [path.name for path in logs.iterdir()] == ["00000001-000.log"], "the log of the one that is handed out again"


class Engines:
    """As `Roles` shows them to a `Fleet`; one dies when the test says so."""

    engine_names: tuple[str, ...] = ("engine-0",)

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

    def restarts(self, name: str) -> int:
        return self.num_restarts if name == "engine-0" else 0

    async def activate(self, name: str, weights: WeightVersion) -> None:
        if name != "engine-0":
            return
        await self.is_open.wait()
        await asyncio.sleep(0)
        death = next(self.dies, "")
        if death == "before":
            self.has = -1
            raise RoleDied(name, "its process was killed")
        if death:  # it answers, and the runtime has noticed a death before the answer is read
            self.num_restarts += 1
        self.has = -1 if death == "after" else weights.number  # between: the next incarnation has answered
        if not death:
            self.serves.append(weights.number)


@pytest.mark.parametrize(
    "deaths", [("", ""), ("before", ""), ("after", ""), ("between", ""), ("before", "after", "between", "")]
)
def test_an_engine_gets_the_newest_weights_whenever_it_dies(tmp_path: Path, deaths: tuple[str, ...]) -> None:
    async def play() -> list[int]:
        crew = Engines()
        crew.dies = iter(deaths)
        controller = Controller.start(limits(), task_of, tmp_path / JOURNAL_FILE)
        problems: list[BaseException] = []
        with Trace(tmp_path) as trace:
            first = WeightVersion(0, "", "", 0)
            fleet = Fleet(crew, controller, trace, first, moved=lambda _: None, failed=problems.append)  # type: ignore[arg-type]
            fleet.publish(first)
            waiting = asyncio.create_task(fleet.settled())
            while not waiting.done():
                fleet.tend()
                await asyncio.sleep(0.01)
            assert controller.counts()["engine_lag"] == 0 and controller.admit(), "groups are handed out to it"
            crew.num_restarts += 1  # killed while idle: nobody's call fails
            for _ in range(20):
                fleet.tend()
                await asyncio.sleep(0.01)
            await fleet.close()
        assert not problems
        return crew.serves

    assert asyncio.run(play()) == [0, 0]


@pytest.mark.parametrize("death", ["", "noticed", "between", "after"])
def test_an_engine_is_never_believed_to_have_newer_weights_than_it_samples_under(tmp_path: Path, death: str) -> None:
    """It comes back while others go ahead: what is handed out meanwhile may land on it, and is charged for that."""

    async def play() -> None:
        crew = Engines()
        crew.engine_names = ("engine-0", "engine-1")
        controller = Controller.start(limits(), task_of, tmp_path / JOURNAL_FILE)
        problems: list[BaseException] = []
        versions = [WeightVersion(number, "", "", 0) for number in range(3)]
        with Trace(tmp_path) as trace:
            fleet = Fleet(crew, controller, trace, versions[0], moved=lambda _: None, failed=problems.append)  # type: ignore[arg-type]
            fleet.publish(versions[0])
            await fleet.settled()
            for version in versions[1:]:
                if version.number == 1:
                    crew.num_restarts, crew.has = 1, -1
                    crew.is_open.clear()
                    fleet.tend()  # engine-0 is on its way to version 0 again
                    await asyncio.sleep(0)
                for handout in controller.admit():
                    controller.group_ready(ref(handout.task.ordinal, tmp_path))
                assert controller.next_batch() is not None
                controller.trained(version.number - 1)
                fleet.publish(version)
                await asyncio.sleep(0.01)
            assert controller.counts()["engine_lag"] == 2 and not controller.admit(), "η is 1"
            if death == "noticed":  # the call waits at the socket meanwhile, and the next incarnation takes it
                crew.num_restarts += 1
                fleet.tend()
            else:
                crew.dies = iter([death])
            crew.is_open.set()
            while crew.has != 2:
                fleet.tend()
                lag = controller.counts()["engine_lag"]
                assert crew.has < 0 or 2 - crew.has <= lag, (
                    f"it has version {crew.has}, and is believed to lag by {lag}"
                )
                await asyncio.sleep(0)
            await fleet.settled()
            assert controller.counts()["engine_lag"] == 0 and controller.admit()
            await fleet.close()
        assert not problems, problems

    asyncio.run(play())


def test_weights_that_are_damaged_on_the_disk_are_refused_and_then_published_again(tmp_path: Path) -> None:
    state = {"a": torch.arange(8.0)}
    version = publish(tmp_path, 3, state)
    path = Path(version.location)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path.name}: checksum: is .*, version 3 was announced with"):
        fetch(version)
    assert publish(tmp_path, 3, state) == version
    assert torch.equal(fetch(version)["a"], state["a"])


def test_the_distance_of_two_samples_of_lengths() -> None:
    rng = np.random.default_rng(0)
    same = [kolmogorov_smirnov(rng.normal(size=400), rng.normal(size=300))[1] for _ in range(400)]
    assert 0.01 < np.mean(np.array(same) < 0.05) < 0.09, "p is uniform where nothing differs"
    assert kolmogorov_smirnov(rng.normal(size=400), rng.normal(0.5, size=300))[1] < 1e-4
    distance, p = kolmogorov_smirnov([1, 2, 3, 4], [3, 4, 5, 6])
    assert distance == 0.5 and 0.5 < p < 0.8
