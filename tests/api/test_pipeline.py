"""A pipeline is done stage by stage, and whatever ends it, it goes on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import rich

from stretto.api.pipeline import Pipeline, State, StepState, check_unchanged, run
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.base.records import read_lineage
from stretto.learning.recipe import JOURNAL_FILE
from stretto.post.pipeline import PipelineRecipe, plan
from tests.api.conftest import Run
from tests.flow.policies import checkpoint as small_checkpoint
from tests.post.test_pipeline import PARTS, SOURCE, START


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Two experts and their student, at staleness 0: what comes out is the same to the bit."""
    other = {**SOURCE, "args": {**SOURCE["args"], "operation": "reverse"}}
    tree = {
        "domains": {"flip": {"sources": {"flip": SOURCE}}, "back": {"sources": {"back": other}}},
        "common": {**PARTS, "staleness": 0},
        "sft": {"recipe": {"start": START}},
        "experts": {},
        "distill": {"distill": {"form": "full", "kl_floor": 0.0}},
        "evaluate": None,
    }
    path = tmp_path / "p.json"
    path.write_text(json.dumps(tree))
    return path


def state(folder: Path) -> dict[str, StepState]:
    path = folder / "pipeline.json"
    return State.model_validate_json(path.read_text()).steps if path.is_file() else {}


def changed(path: Path, **tables: Any) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **tables}))
    return path


def in_few_processes(pipeline: Path, path: Path) -> Path:
    """The same pipeline in ``path``, each stage in one process, engine and trainer in it: what comes out is the same to the bit."""
    tree = json.loads(pipeline.read_text())
    runtime = {**tree["common"]["runtime"], "isolate": "none"}
    path.write_text(json.dumps({**tree, "common": {**tree["common"], "runtime": runtime}}))
    return path


def test_a_plan_is_printed_and_nothing_is_done(
    stretto: Run, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(rich.get_console(), "width", 80)  # of a test before this one
    shown = stretto("run", pipeline, "-o", tmp_path / "out", "--dry-run")
    assert shown.code == 0 and not (tmp_path / "out").exists()
    commands = [line.split()[:2] for line in shown.out.splitlines() if line.startswith("stretto ")]
    assert commands == [["stretto", name] for name in ("sft", "rl", "rl", "distill")]
    assert "known once a stage has run" in shown.out and "not counted" not in shown.out
    dropping = changed(pipeline, experts={"recipe": {"loss": {"drop_uniform": True}}})
    told = stretto("run", dropping, "-o", tmp_path / "out", "--dry-run").out
    assert "not counted: samples of groups that loss.drop_uniform drops" in told
    named = stretto("run", "pipeline", "-o", tmp_path / "out", "--dry-run").out
    assert "2,457,600" in named and "…" not in named, "no number is cut off at 80 columns"


def test_conversations_that_a_kill_left_half_read_are_read_anew(stretto: Run, pipeline: Path, tmp_path: Path) -> None:
    """No recipe was written down yet that a resumed run could be held to."""
    sft = {"data": ["chats.jsonl"], "recipe": {"optim": {"lr": 1e-3}, "train": {"steps": 2, "rows": 2, "seq_len": 64}}}
    small_checkpoint(tmp_path / "model")
    told, folder = changed(pipeline, sft=sft), tmp_path / "out" / "sft"
    for is_begun in (False, True):
        (folder / "data").mkdir(parents=True, exist_ok=True)
        if is_begun:
            (folder / "run.json").touch()
        shown = stretto("run", told, "-o", tmp_path / "out", "--model", tmp_path / "model", "--dry-run")
        assert shown.code == 0, shown.err
        assert ("--resume" in shown.out.splitlines()[0]) == is_begun


@pytest.mark.parametrize(
    ("tables", "flags", "problem"),
    [
        ({}, ["--from", "distil"], "--from distil: no such stage (did you mean 'distill'?)"),
        ({"sft": None}, [], "--model: missing"),
        ({}, ["--model", "runs/x"], "--model: the [sft.recipe.start.model] of "),
        (
            {},
            ["--model", "runs/x", "--dry-run"],
            "describes a new network, with which this pipeline begins; leave one out",
        ),
        (
            {},
            ["--from", "distill", "--until", "sft"],
            "--from distill, --until sft: the first stage comes after the last",
        ),
        ({}, ["--dry-run", "--price", "-1"], "--price -1.0: must be a number above 0"),
        (
            {"domains": {"a": {"sources": {"x=y": SOURCE}}}},
            [],
            "domains.a.sources.x=y: a name has no equals sign; choose another",
        ),
        ({}, ["--price", "2"], "--price: only the plan of --dry-run uses it"),
        ({"experts": {"recipe": {"optim": {"lr": -1}}}}, [], "experts, flip: optim.lr"),
        ({"online": {}}, [], "p.json: online: sources: none has a judge, and there is no [rewards]"),
        (
            {"domains": {"a": {"sources": {"x": {**SOURCE, "kind": "string"}}}}},
            [],
            "p.json: sft: sources.x: kind: no kind 'string' (did you mean 'strings'?)",
        ),
        (
            {"domains": {"a": {"sources": {"x": {**SOURCE, "args": {"operation": "sort", "lenght": 3}}}}}},
            [],
            "p.json: sft: sources.x.args: lenght: unknown key (did you mean 'length'?)",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    stretto: Run, pipeline: Path, tmp_path: Path, tables: dict[str, Any], flags: list[str], problem: str
) -> None:
    told = stretto("run", changed(pipeline, **tables), "-o", tmp_path / "out", *flags)
    assert told.code == 2 and problem in told.err and told.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["{experts/none}", "{online}", "{recipe}", "{spt}"])
def test_a_teacher_of_a_step_that_does_not_come_before_is_refused(
    stretto: Run, pipeline: Path, tmp_path: Path, place: str
) -> None:
    teachers = {"old": {"checkpoint": place, "domains": ["flip"]}}
    distill = {"untaught": ["back"], "outcome_weight": 1.0, "teachers": teachers}
    told = changed(pipeline, online={"rewards": {"flip": {"diversity": "words"}}, "distill": distill})
    shown = stretto("run", told, "-o", tmp_path / "out", "--dry-run")
    assert shown.code == 2 and shown.err.count("\n") == 1
    assert f"p.json: online: {place}: no such earlier step" in shown.err
    assert "name one of {model}, {sft}, {experts/flip}, {experts/back} and {distill}\n" in shown.err


def test_where_a_stage_runs_may_change_after_it_has_ended(pipeline: Path, tmp_path: Path) -> None:
    folder, ended = tmp_path / "out", {}
    for stop_s in (None, 5.0):
        common = {**PARTS, "staleness": 0, "runtime": {"stop_s": stop_s}}
        told = read_recipe(changed(pipeline, common=common), PipelineRecipe)
        steps = plan(told, "p.json")
        ended[stop_s] = Pipeline(folder, told, steps, None, "cpu")
    told = {
        "recipe": ended[None].steps[0].recipe.model_dump(mode="json"),
        "arguments": ["sft", "{recipe}"],
        "weights": {},
    }
    (folder / "sft" / "sft").mkdir(parents=True)
    (folder / "pipeline.json").write_text(json.dumps({"steps": {"sft": {"inputs": told, "has_ended": True}}}))
    check_unchanged(ended[5.0])
    del told["recipe"]["window"], told["recipe"]["rollout"]["tool_chars"]  # an older version did not know them
    (folder / "pipeline.json").write_text(json.dumps({"steps": {"sft": {"inputs": told, "has_ended": True}}}))
    check_unchanged(ended[5.0])
    told["recipe"]["staleness"] = 3
    (folder / "pipeline.json").write_text(json.dumps({"steps": {"sft": {"inputs": told, "has_ended": True}}}))
    with pytest.raises(UserError, match=r"recipe\.staleness was 3 when this stage ran"):
        check_unchanged(ended[5.0])


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands of a pipeline that only write a result, and their folders' names in order."""
    ran: list[str] = []

    def command(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        out = Path(arguments[arguments.index("--out") + 1])
        ran.append(out.name)
        place = out / ("sft" if out.name == "sft" else "checkpoint")
        place.mkdir(parents=True)
        (out / "metrics.jsonl").write_text('{"step": 1, "eval/kl_start": 1.0}\n')
        (out / "report").mkdir()
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr("stretto.api.pipeline.subprocess.run", command)
    monkeypatch.setattr("stretto.api.pipeline.known_hash", lambda place: place.parent.name)
    monkeypatch.setattr("stretto.api.pipeline.load", lambda place, device: place.parent.name)
    return ran


def test_a_step_that_a_kill_kept_from_being_recorded_is_not_taken_for_another(
    pipeline: Path, tmp_path: Path, instant: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = subprocess.run

    def killed(arguments: list[str], **options: Any) -> None:
        own(arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("stretto.api.pipeline.subprocess.run", killed)
        run(pipeline, out=tmp_path / "out")
    changed(pipeline, sft={"recipe": {"start": {**START, "steps": 9}}})
    with pytest.raises(UserError, match=r"sft: recipe\.start\.steps was 25 when this stage ran, is 9 now"):
        run(pipeline, out=tmp_path / "out")


def test_results_of_a_stage_that_the_recipe_lost_are_not_its_results(
    pipeline: Path, tmp_path: Path, instant: list[str]
) -> None:
    folder, online = tmp_path / "out", {"rewards": {"flip": {"diversity": "words"}}}
    assert run(changed(pipeline, online=online), out=folder) == "online"
    assert run(changed(pipeline, online=None), out=folder) == "distill"
    assert run(pipeline, out=folder, first="distill") == "distill"
    assert (folder / "before-1/online/checkpoint").is_dir()
    assert run(changed(pipeline, online=online), out=folder) == "online"
    assert instant == ["sft", "flip", "back", "distill", "online", "distill", "online"]


def test_a_refusal_moves_nothing_and_names_the_checkpoint_that_is_missing(
    pipeline: Path, tmp_path: Path, instant: list[str]
) -> None:
    folder = tmp_path / "out"
    run(pipeline, out=folder)
    (folder / "sft").rename(tmp_path / "aside")
    with pytest.raises(UserError, match=r"out/sft/sft: no such checkpoint, and experts/flip was made from it; .* sft$"):
        run(pipeline, out=folder, first="distill")
    assert (folder / "distill").is_dir() and not (folder / "before-1").exists()
    assert run(pipeline, out=folder, first="sft") == "distill"


def test_a_text_of_the_recipe_that_looks_like_a_placeholder_stays(
    pipeline: Path, tmp_path: Path, instant: list[str]
) -> None:
    texts = {"flip": {"format": "{recipe} {model} {experts/none}"}, "back": {"format": "{sft}"}}
    teachers = {"a": {"checkpoint": "x={sft}", "domains": ["flip"]}, "b": {"checkpoint": "{sft}", "domains": ["back"]}}
    distill = {"outcome_weight": 1.0, "teachers": teachers}
    run(changed(pipeline, online={"rewards": texts, "distill": distill}), out=tmp_path / "out")
    assert (
        json.loads((tmp_path / "out/online.json").read_text())["rewards"]["flip"]["format"] == texts["flip"]["format"]
    )
    assert json.loads((tmp_path / "out/online.json").read_text())["rewards"]["back"]["format"] == "{sft}"
    taught = json.loads((tmp_path / "out/online.json").read_text())["distill"]["teachers"]
    assert taught["a"]["checkpoint"] == "x={sft}" and taught["b"]["checkpoint"] == str(tmp_path / "out/sft/sft")
    taught = json.loads((tmp_path / "out/distill.json").read_text())["distill"]["teachers"]
    assert taught["flip"]["checkpoint"] == str(tmp_path / "out/experts/flip/checkpoint")


def test_an_evaluation_alone_is_a_pipeline(pipeline: Path, tmp_path: Path, instant: list[str]) -> None:
    small_checkpoint(tmp_path / "model")
    alone = changed(pipeline, sft=None, experts=None, distill=None, evaluate={"problems": 2})
    assert run(alone, tmp_path / "model", tmp_path / "out") is None
    assert instant == ["evaluate"]


@pytest.mark.slow
def test_a_report_that_a_kill_prevented_is_written_later(
    stretto: Run, pipeline: Path, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    (folder / "sft").mkdir(parents=True)
    shutil.copytree(finished / "sft", folder / "sft" / "sft")
    for name in ("flip", "back"):
        shutil.copytree(finished, folder / "experts" / name)
        assert not (folder / "experts" / name / "report").exists()
    done = stretto("run", pipeline, "-o", folder, "--until", "experts")
    assert done.code == 0 and done.out.count("(done before)") == 3, done.err
    for name in ("flip", "back"):
        assert "Staleness" in (folder / "experts" / name / "report" / "report.html").read_text()


def test_an_evaluation_without_its_page_is_not_done(pipeline: Path, tmp_path: Path) -> None:
    evaluate = {"problems": 2}
    told = read_recipe(changed(pipeline, evaluate=evaluate), PipelineRecipe)
    steps = plan(told, "p.json")
    made, place = Pipeline(tmp_path, told, steps, None, "cpu"), tmp_path / steps[-1].name
    place.mkdir()
    (place / steps[-1].result).touch()
    assert not made.is_done(steps[-1])
    (place / "report").mkdir()
    assert made.is_done(steps[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)  # two pipelines, and three that are killed
def test_killed_in_any_stage_it_goes_on_to_the_same_student(stretto: Run, pipeline: Path, tmp_path: Path) -> None:
    in_few_processes(pipeline, pipeline)
    assert stretto("run", pipeline, "-o", tmp_path / "a").code == 0
    command, folder = [sys.executable, "-m", "stretto", "run", str(pipeline), "-o", str(tmp_path / "b")], tmp_path / "b"
    for begun in ("sft", f"experts/flip/{JOURNAL_FILE}", f"distill/{JOURNAL_FILE}"):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = {name: each for name, each in state(folder).items() if each.has_ended}
        while process.poll() is None and not (folder / begun).exists():
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert process.wait() == -signal.SIGKILL, f"it was over before {begun}"
        assert children and not psutil.wait_procs(children, timeout=60)[1], (
            "its step's process ends by itself, with its own"
        )
        assert before.items() <= state(folder).items(), "a stage that had ended was done again"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hashes = [read_lineage(checkpoint_folder(tmp_path / each / "distill")).weights_hash for each in "ab"]
    assert hashes[0] == hashes[1]


@pytest.mark.slow
def test_a_stage_that_was_told_something_else_is_not_taken_for_this_one(
    stretto: Run, pipeline: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    assert stretto("run", pipeline, "-o", folder, "--until", "sft").code == 0
    made = read_lineage(folder / "sft/sft").weights_hash
    longer = {"recipe": {"start": {**START, "steps": START["steps"] + 1}}}
    told = stretto("run", changed(pipeline, sft=longer), "-o", folder, "--until", "sft")
    assert told.code == 2 and "sft: recipe.start.steps was 25 when this stage ran, is 26 now" in told.err
    assert stretto("run", pipeline, "-o", folder, "--until", "sft", "--from", "sft").code == 0
    assert read_lineage(folder / "before-1/sft/sft").weights_hash == made
    assert read_lineage(folder / "sft/sft").weights_hash != made


@pytest.mark.slow
def test_an_expert_that_diverges_is_tried_again_and_does_not_keep_the_others(
    stretto: Run, pipeline: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    in_few_processes(pipeline, pipeline)
    domains = expert(pipeline, "flip", optim={"lr": 1e30, "clip_norm": 1e30})
    told = stretto("run", changed(pipeline, domains=domains), "-o", folder, "--until", "experts")
    assert told.code == 2 and "experts/flip diverged; correct that" in told.err
    assert told.out.count("experts/flip diverged; retrying from its last good snapshot") == 1
    steps = state(folder)
    assert steps["experts/back"].has_ended and not steps["experts/flip"].has_ended
    assert (folder / "experts/back/checkpoint").is_dir() and not (folder / "distill").exists()


ONCE = """
from pathlib import Path

def once(groups):
    seen = Path(__file__).with_suffix(".seen")
    seen.write_text(seen.read_text() + "x" if seen.exists() else "x")
    return [[1e38 if len(seen.read_text()) == 3 else 1.0 for _ in group] for group in groups]
"""
"""An algorithm whose third step is too much."""


@pytest.mark.slow
def test_an_expert_goes_on_from_its_last_good_snapshot_and_one_that_stood_still_is_named(
    stretto: Run, pipeline: Path, tmp_path: Path
) -> None:
    folder, plugin = tmp_path / "out", tmp_path / "own.py"
    plugin.write_text(ONCE)
    in_few_processes(pipeline, pipeline)
    changed(pipeline, domains=expert(pipeline, "flip", loss={"advantage": f"{plugin}:once"}))
    changed(pipeline, domains=expert(pipeline, "back", optim={"lr": 1e-12}), distill={"distill": {"form": "full"}})
    told = stretto("run", pipeline, "-o", folder)
    assert "experts/flip diverged; retrying" in told.out
    assert plugin.with_suffix(".seen").read_text() == "x" * 5, "steps 1, 2 and 3, then 3 and 4"
    assert told.code == 2 and "experts/back has not moved" in told.err and "domains.back.expert" in told.err
    assert told.err.count("there is nothing to distil") == 1
    assert "KL to the start, nats per token: experts/flip" in told.out and not (folder / "distill").exists()


def expert(path: Path, domain: str, **tables: Any) -> dict[str, Any]:
    """The domains of a pipeline, one of them with an expert of its own."""
    domains: dict[str, Any] = json.loads(path.read_text())["domains"]
    return domains | {domain: {**domains[domain], "expert": tables}}
