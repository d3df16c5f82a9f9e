"""A run's folder from one life of the run to the next; and whole runs that are killed, or whose parts fail (slow)."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.common.killing import GROUP, PROMPTS, RECIPE, STEPS, Killed
from bench.common.run_account import Account
from stretto.base.config import read_recipe
from stretto.base.errors import InfraError, UserError
from stretto.base.paths import RECIPE_FILE, read_json, write_json
from stretto.base.trajectory import GroupRef, Task, WeightVersion
from stretto.engine.engine import Engine
from stretto.engine.request import Event
from stretto.flow import rollout, run
from stretto.flow import rollout as engines
from stretto.flow.clients import Generated
from stretto.flow.controller import Controller, Limits
from stretto.flow.files import RunFiles, open_files
from stretto.flow.launch import Job, with_precision
from stretto.flow.ledger import Ledger
from stretto.flow.log import Say, read_status
from stretto.flow.prompts import plan_prompts
from stretto.flow.run import (
    Result,
    check_recipe,
    check_steps,
    in_order,
    opened,
    run_rl,
    sweep,
    take_up,
    teacher_weights,
)
from stretto.learning import channel
from stretto.learning.metrics import StepReport
from stretto.learning.recipe import JOURNAL_FILE, START_FILE, RlRecipe
from stretto.learning.samples import log_name
from stretto.learning.trainer import TrainerRole
from stretto.learning.weights import fetch, publish
from stretto.ops import matmul
from stretto.runtime.local import open_runtime
from stretto.runtime.runtime import RoleError
from stretto.runtime.store import FolderStore, UrlStore, remove_local_folder, send_folder
from tests.flow.policies import recipe as policy_recipe


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
    return GroupRef(ordinal, 0, str(folder / f"group-{ordinal:08d}-0.group"), 2, 4, 0, 0.5, False)


def began(recipe: RlRecipe, run: Path) -> None:
    """Leave a run folder as a run of ``recipe`` does that was killed after its first group."""
    write_json(run / RECIPE_FILE, recipe.model_dump(mode="json"))
    (run / JOURNAL_FILE).touch()


def test_a_folder_is_opened_once_and_says_whether_it_holds_a_run(tmp_path: Path, recipe_file: Path) -> None:
    run = tmp_path / "runs" / "run"
    with pytest.raises(UserError, match=r"--resume: there is no such run"), opened(run, resume=True):
        pass
    with opened(run, resume=False) as has_run, pytest.raises(UserError, match="is running in it"), opened(run, True):
        assert not has_run
    assert list(tmp_path.iterdir()) == [recipe_file], "nothing was written"
    write_json(run / RECIPE_FILE, {})
    with opened(run, resume=True) as has_run:
        assert not has_run, "no group was dispatched: there is nothing to go on with"
    (run / JOURNAL_FILE).touch()
    with opened(run, resume=True) as has_run:
        assert has_run
    with pytest.raises(UserError, match="holds a run already; continue it with --resume"), opened(run, resume=False):
        pass


def test_a_changed_recipe_is_refused_by_its_field(tmp_path: Path, recipe_file: Path) -> None:
    run = tmp_path / "run"
    recipe = read_recipe(recipe_file, RlRecipe)
    began(recipe, run)
    check_recipe(recipe, run)
    changed = read_recipe(recipe_file, RlRecipe, ["optim.weight_decay=0.5", "staleness=3"])
    with pytest.raises(UserError, match=r"optim\.weight_decay: was .* when this run started, is 0\.5 now") as error:
        check_recipe(changed, run)
    assert "\n" not in str(error.value)
    check_recipe(read_recipe(recipe_file, RlRecipe, ["runtime.isolate=none", "rollout.cache_bytes=9999999"]), run)


@pytest.mark.parametrize(
    ("given", "is_bf16", "recorded", "expected"),
    [
        ({}, False, None, ("fp32", "fp32", "which the trainer's device cuda:0 decides")),
        ({}, True, None, ("bf16", "bf16", "which the trainer's device cuda:0 decides")),
        ({"train": "fp32"}, True, None, ("fp32", "fp32", "")),
        ({"rollout": "fp8"}, True, None, ("bf16", "fp8", "which the trainer's device cuda:0 decides")),
        ({}, True, ("fp32", "fp32"), ("fp32", "fp32", "as when the run started")),
        ({}, False, ("bf16", "fp8"), ("bf16", "fp8", "as when the run started")),
        ({"train": "bf16"}, False, ("bf16", "fp32"), ("bf16", "fp32", "as when the run started")),
    ],
)
def test_the_precision_is_the_recipes_else_the_runs_else_that_of_the_trainers_device(
    given: dict[str, str],
    is_bf16: bool,
    recorded: tuple[str, str] | None,
    expected: tuple[str, str, str],
    tmp_path: Path,
    recipe_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU is played by what it would answer."""
    monkeypatch.setattr(matmul, "trains_in_bf16", lambda device: is_bf16 and device == torch.device("cuda:0"))
    recipe, said = (
        read_recipe(recipe_file, RlRecipe, [f'precision.{name}="{each}"' for name, each in given.items()]),
        [],
    )
    if recorded is not None:
        train, rollout = recorded
        write_json(
            tmp_path / "recipe.json", recipe.replace(precision={"train": train, "rollout": rollout}).model_dump()
        )

    async def found() -> RlRecipe:
        async with await open_runtime("local", "") as runtime:
            job = Job(recipe, tmp_path, tmp_path / "start", recorded is not None, ("cuda:0", "cuda:1"))
            return (await with_precision(runtime, job, said.append)).recipe

    precision = asyncio.run(found()).precision
    train, rollout, why = expected
    assert (precision.trainer, precision.engines) == (train, rollout)
    assert said == [f"precision: trainer {train}, engines {rollout}{why and ', '}{why}"]


def test_a_run_of_an_older_version_goes_on_and_only_a_real_change_is_refused(tmp_path: Path, recipe_file: Path) -> None:
    run, recipe = tmp_path / "run", read_recipe(recipe_file, RlRecipe)
    began(recipe, run)
    written = read_json(run / RECIPE_FILE)
    del written["resources"], written["rollout"]["tool_chars"], written["window"]
    write_json(run / RECIPE_FILE, written)
    check_recipe(recipe, run)  # keys that the older version did not know have their defaults
    changed = read_recipe(recipe_file, RlRecipe, ["rollout.tool_chars=500"])
    with pytest.raises(
        UserError, match=r"rollout\.tool_chars: was 4000 when this run started, is 500 now; change it back"
    ):
        check_recipe(changed, run)
    with pytest.raises(UserError, match=r"window: was not set when this run started, is 2 now"):
        check_recipe(read_recipe(recipe_file, RlRecipe, ["window=2"]), run)
    written["rollout"]["forgotten"] = written["failures"]["forgotten"] = 3
    write_json(run / RECIPE_FILE, written)
    with pytest.raises(UserError, match=r"rollout\.forgotten: was 3 when this run started, is not set now"):
        check_recipe(recipe, run)


def test_a_teacher_may_move_and_may_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(
        "stretto.flow.run.find_lineage", lambda folder: SimpleNamespace(weights_hash=(folder / "weights").read_text())
    )

    def taught_by(name: str, weights: str) -> RlRecipe:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").touch()
        (tmp_path / name / "weights").write_text(weights)
        teacher = {"checkpoint": str(tmp_path / name), "domains": ["digits"]}
        return policy_recipe(distill={"teachers": {"x": teacher}})

    recipe = taught_by("old", "1")
    began(recipe, run)
    write_json(run / START_FILE, {"checkpoint": "", "teachers": teacher_weights(recipe)})
    check_recipe(taught_by("new", "1"), run)
    for name in ("new", "old"):
        with pytest.raises(UserError, match=r"run: distill\.teachers\.x\.checkpoint: its weights are not those"):
            check_recipe(taught_by(name, "2"), run)
    write_json(run / START_FILE, {"checkpoint": ""})  # of an older version
    with pytest.raises(UserError, match=r"distill\.teachers\.x\.checkpoint: was .*old' when this run started"):
        check_recipe(taught_by("new", "1"), run)
    served = {"checkpoint": str(tmp_path / "old"), "url": "http://127.0.0.1:1/v1", "domains": ["digits"]}
    assert not teacher_weights(policy_recipe(distill={"form": "sampled", "teachers": {"x": served}})), (
        "the server has the weights"
    )


def test_a_resumed_run_keeps_the_order_of_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the prompts of the run depend on, and TOML tables are written in any order."""
    sources = {name: {"kind": "strings", "weight": weight} for name, weight in (("b", 2.0), ("a", 1.0), ("c", 4.0))}
    recipe = policy_recipe(sources=sources)
    began(recipe, tmp_path)
    moved = policy_recipe(sources=dict(sorted(sources.items())))
    check_recipe(moved, tmp_path)
    again, sizes = in_order(moved, tmp_path), dict.fromkeys(sources)
    assert list(again.sources) == ["b", "a", "c"] and again == moved
    assert plan_prompts(again, sizes, {}) == plan_prompts(recipe, sizes, {}) != plan_prompts(moved, sizes, {})
    seen = []

    def stop(recipe: RlRecipe, *_: Any) -> None:
        seen.append(list(recipe.sources))
        raise UserError("enough")

    monkeypatch.setattr(run, "load_tokenizer", lambda start: None)
    monkeypatch.setattr(run, "check_sources", stop)
    with pytest.raises(UserError, match="enough"):
        run_rl(Job(moved, tmp_path, tmp_path, resume=True), lambda *_: None, print)
    assert seen == [["b", "a", "c"]]


def test_the_traceback_of_a_role_that_ended_the_run_is_in_its_folder(
    tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = RoleError("engine-0", "__init__", "RuntimeError", "CUDA out of memory", "Traceback: in engine.py")

    async def fail(*_: Any) -> Result:
        raise inside

    monkeypatch.setattr(run, "_run", fail)
    job = Job(read_recipe(recipe_file, RlRecipe), tmp_path / "out", tmp_path / "start")
    (tmp_path / "out").mkdir()
    with pytest.raises(
        UserError, match=r"engine-0: __init__ raised RuntimeError: CUDA out of memory; .*error\.txt has"
    ):
        run.run_opened(job, False, lambda *_: None, lambda _: None)
    assert (tmp_path / "out" / run.ERROR_FILE).read_text() == "Traceback: in engine.py"


def test_what_a_kill_left_behind_goes_and_what_is_needed_stays(tmp_path: Path) -> None:
    groups, logs = tmp_path / "groups", tmp_path / "tokens"
    controller = Controller(limits(), task_of, Ledger.start(tmp_path / JOURNAL_FILE))
    controller.engine_active("engine-0", 0)
    assert [dispatch.task.ordinal for dispatch in controller.admit()] == [0, 1, 2, 3]
    controller.group_ready(ref(0, groups))
    controller.ledger.close()
    groups.mkdir()
    for name in ("group-00000000-0.group", "group-00000001-0.group", ".group-00000002-0.group.77.partial"):
        (groups / name).touch()  # the second was stored, and its agent killed before it could tell
    for ordinal in (0, 1, 9):
        path = tmp_path / log_name(ordinal, 0)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    resumed = Controller(limits(), task_of, Ledger.resume(tmp_path / JOURNAL_FILE, None))
    sweep(tmp_path, FolderStore(tmp_path), resumed.ledger)
    assert [path.name for path in groups.iterdir()] == ["group-00000000-0.group"]
    assert [path.name for path in logs.iterdir()] == ["00000001-000.log"], "the log of the one that is handed out again"


def test_a_run_that_is_over_keeps_what_a_resume_and_its_users_need(tmp_path: Path) -> None:
    for name in ("checkpoint", "snapshots", "groups", "tokens", "weights"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    RunFiles(FolderStore(tmp_path), "", tmp_path, tmp_path).finish()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "snapshots"}


def test_fewer_steps_than_a_stored_snapshot_has_are_refused(tmp_path: Path) -> None:
    start, snapshot = tmp_path / "start", tmp_path / "snapshot"
    for folder in (start, snapshot):
        folder.mkdir()
        (folder / "file").touch()
    files = open_files(policy_recipe(store=(tmp_path / "bucket").as_uri()), tmp_path, start)
    check_steps(policy_recipe(train__steps=1), files)
    send_folder(files.store, snapshot, "snapshots/step-0000002")
    files.store.write("snapshots/step-0000004/file", b"of a snapshot that is not complete")
    check_steps(policy_recipe(train__steps=2), files)
    with pytest.raises(UserError, match=r"train.steps: 1 is less than the 2 steps that are done; raise it"):
        check_steps(policy_recipe(train__steps=1), files)


def stored(folder: Path) -> tuple[RlRecipe, RunFiles]:
    """A recipe and the files of its run in ``folder``: run folder, start checkpoint, and the bucket that is the store."""
    for name in ("start", "run"):
        (folder / name).mkdir()
    (folder / "start" / "config.json").write_text("{}")
    recipe = policy_recipe(store=(folder / "bucket").as_uri())
    return recipe, open_files(recipe, folder / "run", folder / "start")


def test_a_run_that_is_over_in_a_store_leaves_nothing_and_is_not_resumed(tmp_path: Path) -> None:
    start, run_folder, bucket = tmp_path / "start", tmp_path / "run", tmp_path / "bucket"
    recipe, files = stored(tmp_path)
    assert (files.start_here() / "config.json").exists()
    assert open_files(recipe, run_folder, start).id == files.id
    here = files.folder_here()
    send_folder(files.remote, start, "checkpoint")
    files.finish()
    assert (run_folder / "checkpoint" / "config.json").exists() and not any(bucket.iterdir()) and not here.exists()
    with pytest.raises(UserError, match=r"run: this run has ended, and its store was emptied; .* --model"):
        open_files(recipe, run_folder, start)
    assert not any(bucket.iterdir())


def test_a_run_that_was_killed_while_its_store_was_emptied_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, run_folder, bucket = tmp_path / "start", tmp_path / "run", tmp_path / "bucket"
    recipe, files = stored(tmp_path)
    send_folder(files.remote, start, "checkpoint")

    def killed(store: UrlStore) -> None:
        (bucket / files.id / "start" / "000000-000000").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(UrlStore, "destroy", killed)
        files.finish()
    with pytest.raises(UserError, match=r"run: this run has ended, and its store was emptied; .* --model"):
        open_files(recipe, run_folder, start)
    assert not any(bucket.iterdir()), "the refused resume deletes what the kill left"
    remove_local_folder(files.id)


def test_a_start_checkpoint_of_which_the_store_lost_a_part_is_sent_again(tmp_path: Path) -> None:
    start, run_folder, bucket = tmp_path / "start", tmp_path / "run", tmp_path / "bucket"
    recipe, files = stored(tmp_path)
    (bucket / files.id / "start" / "000000-000000").unlink()
    with pytest.raises(UserError, match=r"start: incomplete: 000000-000000 is missing; continue with --resume"):
        open_files(recipe, run_folder, start).start_here()
    assert (open_files(recipe, run_folder, start).start_here() / "config.json").read_text() == "{}"
    remove_local_folder(files.id)


def test_logs_with_tokens_of_weights_that_are_not_made_again_go(tmp_path: Path) -> None:
    """The trainer returns to the start while the store loses a group of its first step."""
    groups = tmp_path / "groups"
    controller = Controller(limits(), task_of, Ledger.start(tmp_path / JOURNAL_FILE))
    controller.engine_active("engine-0", 0)
    controller.admit()
    for ordinal in (0, 1, 2):
        controller.group_ready(ref(ordinal, groups))
    assert controller.next_batch() is not None
    controller.trained(0)
    controller.ledger.close()
    groups.mkdir()
    for ordinal in (1, 2):
        Path(ref(ordinal, groups).location).touch()
    (tmp_path / log_name(3, 0)).parent.mkdir()
    (tmp_path / log_name(3, 0)).touch()
    resumed = Controller(limits(), task_of, Ledger.resume(tmp_path / JOURNAL_FILE, None))
    assert take_up(tmp_path, FolderStore(tmp_path), resumed) == (1, 2)
    assert not any((tmp_path / "tokens").iterdir()) and not resumed.ledger.ready_groups()


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


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's start, made once."""
    folder = tmp_path_factory.mktemp("start")
    recipe = folder / "recipe.toml"
    recipe.write_text(f"staleness = 2\n{RECIPE}")
    code = "import sys; from pathlib import Path; from stretto.api.rl import made_start; from stretto.base.config import read_recipe; from stretto.learning.recipe import RlRecipe; made_start(read_recipe(sys.argv[1], RlRecipe), Path(sys.argv[2]))"  # noqa: E501
    subprocess.run([sys.executable, "-c", code, recipe, folder], check=True)
    return folder / "sft"


def go_on(recipe_file: Path, run: Path, start: Path, resume: bool = False, say: Say = lambda text: None) -> Result:
    """A short run in this process, so that its parts can be made to fail."""
    short = ["runtime.isolate=none", "rollout.engines=1", "train.steps=6", "train.eval_prompts=2"]
    job = Job(read_recipe(recipe_file, RlRecipe, short), run, start, resume)
    result = run_rl(job, lambda num, text: None, say)
    assert not {"groups", "tokens", "weights"} & {path.name for path in run.iterdir()}, "files of a run that is over"
    return result


def ended(run: Path) -> dict[str, float]:
    counts = read_status(run).counts
    return {name: counts[name] for name in ("trained", "failed", "stale", "filtered") if counts[name]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_that_dies_inside_is_opened_again_and_loses_nothing(
    tmp_path: Path, recipe_file: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, num_steps, num_opened = Engine.step, itertools.count(), itertools.count()

    def step(engine: Engine) -> list[Event]:
        if next(num_steps) in (30, 90):
            raise RuntimeError("an illegal memory access was encountered")
        return whole(engine)

    opened = engines.open_rollout_engine

    def open_slowly(*args: Any) -> Engine:
        if next(num_opened):
            time.sleep(4.0)  # longer than a patient caller tries what is not known to come back
        return opened(*args)

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(engines, "open_rollout_engine", open_slowly)
    go_on(recipe_file, tmp_path / "run", start)
    assert next(num_opened) == 3 and ended(tmp_path / "run") == {"trained": 6 * PROMPTS}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_store_that_loses_groups_while_the_trainer_returns_to_a_snapshot_loses_no_sample(
    tmp_path: Path, recipe_file: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 5 the trainer is lost, before the first snapshot, and the group files of two steps with it. The window lets the groups
    of the third step, which were sampled with weights of the first, go first."""
    whole, refs_of, told = TrainerRole.step, dict[int, Sequence[GroupRef]](), list[str]()

    def step(trainer: TrainerRole, refs: Sequence[GroupRef], step: int) -> StepReport:
        if step == 4 and 4 not in refs_of:
            refs_of[4] = refs
            for each in (*refs_of[0], *refs_of[1]):
                Path(each.location).unlink()
            raise InfraError("its machine is lost")
        refs_of.setdefault(step, refs)
        return whole(trainer, refs, step)

    monkeypatch.setattr(TrainerRole, "step", step)
    text = re.sub("snapshot_every = .*", "snapshot_every = 100", recipe_file.read_text())
    recipe_file.write_text(f"window = {PROMPTS + 1}\n{text}")
    go_on(recipe_file, tmp_path / "run", start, say=told.append)
    assert ended(tmp_path / "run") == {"trained": 6 * PROMPTS}
    assert any(f"{2 * PROMPTS} finished groups are not in the store any more" in line for line in told), told


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_damaged_weights_stop_the_run_in_one_line_and_it_goes_on_with_resume(
    tmp_path: Path, recipe_file: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish_damaged(folder: Path, number: int, state: Any) -> WeightVersion:
        version = publish(folder, number, state)
        if number == 3:
            content = bytearray(Path(version.location).read_bytes())
            content[-1] ^= 1
            Path(version.location).write_bytes(content)
        return version

    with monkeypatch.context() as damaged:
        damaged.setattr(channel, "publish", publish_damaged)
        with pytest.raises(UserError, match=r"checksum: is .*, version 3 was announced with") as error:
            go_on(recipe_file, tmp_path / "run", start)
    assert "\n" not in str(error.value) and "checksum" in read_status(tmp_path / "run").state
    go_on(recipe_file, tmp_path / "run", start, resume=True)
    assert ended(tmp_path / "run") == {"trained": 6 * PROMPTS}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_routes_of_the_wrong_length_are_asked_for_again(
    tmp_path: Path, recipe_file: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, num_calls = rollout._generated, itertools.count()

    def generated(*args: Any) -> Generated:
        done = whole(*args)
        if next(num_calls) % 7 == 3 and done.routes is not None:
            done = replace(done, routes=done.routes[:-1])
        return done

    monkeypatch.setattr(rollout, "_generated", generated)
    go_on(recipe_file, tmp_path / "run", start)
    assert next(num_calls) > 20 and ended(tmp_path / "run") == {"trained": 6 * PROMPTS}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_sample_is_trained_once_whoever_is_killed(tmp_path: Path, recipe_file: Path, start: Path) -> None:
    run, steps = tmp_path / "run", 36  # five lives, each of four steps at most, and what passes until a victim is back
    run.mkdir()
    shutil.copytree(start, run / "sft")
    recipe_file.write_text(recipe_file.read_text().replace(f"\nsteps = {STEPS}\n", f"\nsteps = {steps}\n"))
    killed = Killed(recipe_file, Account(run, tmp_path / "groups"), random.Random(3))
    killed.finish(["engine", "agent", "trainer", "reward", "job"])
    assert {kill.kind for kill in killed.kills} == {"engine", "agent", "trainer", "reward", "job"}
    _, times = killed.account.samples()
    wanted = {(ordinal, sample) for ordinal in range(steps * PROMPTS) for sample in range(GROUP)}
    assert times.keys() == wanted and set(times.values()) == {1}
    assert not any(kill.num_orphans for kill in killed.kills)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_a_trainer_that_is_killed_is_started_again(tmp_path: Path, recipe_file: Path, start: Path) -> None:
    run, steps, ranks = tmp_path / "run", 40, 2  # a machine that is fast must not be done before the kill
    run.mkdir()
    shutil.copytree(start, run / "sft")
    short = recipe_file.read_text().replace(f"\nsteps = {STEPS}\n", f"\nsteps = {steps}\n")
    recipe_file.write_text(f"{short}\n[trainer]\nranks = {ranks}\n")
    killed = Killed(recipe_file, Account(run, tmp_path / "groups"), random.Random(3))

    def pids() -> dict[str, int]:
        return {row.name: row.pid for row in read_status(run).roles if row.pid is not None}

    killed.start()
    while killed.is_running() and len(killed.account.trained()) < 5:  # after the first snapshot
        time.sleep(0.05)
    listed_s = time.monotonic() + 1.1  # the status has all roles then
    while (
        killed.is_running() and time.monotonic() < listed_s
    ):  # the journal is read meanwhile, before the run deletes events
        time.sleep(0.05)
    before = after = pids()
    assert killed._kill("trainer")
    trainers = [name for name in before if name.startswith("trainer")]
    while killed.is_running() and any(after.get(name) in (None, before[name]) for name in trainers):
        time.sleep(0.05)
        after = pids()
    killed.end()
    assert before.keys() == after.keys()
    same = {name for name in before if before[name] == after[name]}
    assert same == before.keys() - set(trainers) and len(trainers) == ranks
    assert not any(entry.restarts for entry in read_status(run).roles)
    _, times = killed.account.samples()
    assert len(times) == steps * PROMPTS * GROUP and set(times.values()) == {1}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    tmp_path: Path, recipe_file: Path, start: Path
) -> None:
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("no file system of a chosen size is to be had here")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f"{sys.executable} -m stretto.cli.main rl {recipe_file} -o {disk}/run --device cpu --set train.steps=8"
    command += " --set runtime.isolate=none --set rollout.engines=1"
    script = f"""
        mount -t tmpfs -o size=1700k none {disk} && mkdir {disk}/run && cp -r {start} {disk}/run/sft
        {command} 2>{tmp_path}/first; echo $? ; ls {disk}/run/snapshots
        mount -o remount,size=64m {disk}
        {command} --resume 2>{tmp_path}/second; echo $?
        ls {disk}/run/snapshots; ls -A {disk}/run | grep partial
    """
    done = subprocess.run(["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True)
    first, second = ((tmp_path / name).read_text() for name in ("first", "second"))
    lines = [line for line in done.stdout.splitlines() if line.isdecimal()]
    assert lines == ["2", "0"], (done.stdout, first, second)
    assert "cannot be written: No space left on device" in first and "Traceback" not in first + second, first
    assert "step-0000008" in done.stdout and "partial" not in done.stdout, done.stdout
