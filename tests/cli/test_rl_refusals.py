"""What ``stretto rl`` refuses: one line that names the place and the remedy, exit code 2, nothing left behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.flow.ledger import read_events
from stretto.learning.recipe import JOURNAL_FILE, RlRecipe
from tests.api.conftest import Run, refused
from tests.api.rl_recipes import OWN, TINY


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.stepz=3", ("tiny.toml: train.stepz", "unknown key", "steps")),
        ("rollout.grp=3", ("tiny.toml: rollout.grp", "unknown key", "group")),
        ("nonsense", ("--set nonsense", "key.path=value")),
        ("staleness=-1", ("tiny.toml: staleness", "greater than or equal to 0")),
        ("window=99", ("tiny.toml", "window 99", "at most 3")),
        ("train.minibatches=3", ("tiny.toml", "train.prompts 2", "train.minibatches 3")),
        ("rollout.max_tokens=64", ("tiny.toml", "rollout.max_tokens 64", "train.seq_len 64")),
        ("train.seq_len=12", ("sources.flip: item 0: its prompt of 24 tokens", "train.seq_len 12")),
        ("train.seq_len=24", ("sources.flip: item 0: its prompt of 24 tokens", "raise that")),
        (
            "train.seq_len=5000 rollout.max_turns=2",
            ("train.seq_len: a sample may have 5000 tokens, and the network has 4096 positions; lower it",),
        ),
        (
            "train.seq_len=6000 rollout.max_tokens=5000",
            ("rollout.max_tokens: a sample may have 5001 tokens, and the network has 4096 positions; lower it",),
        ),
        (
            "precision.batch_invariant=true train.seq_len=8200",
            ("train.seq_len: 8200 exceeds the 8192 tokens that batch-invariant attention takes", "at most that many"),
        ),
        ("runtime.kind=slurm", ("tiny.toml: runtime.kind", "'local' or 'ray'")),
        ("sources.flip.kind=strinks", ("sources.flip: kind", "did you mean 'strings'", "file.py:Class")),
        ("sources.flip.kind=none.py:Task", ("sources.flip: kind", "cannot import 'none.py'")),
        ("loss.advantage=none.py:mine", ("loss.advantage: cannot import 'none.py'", "check the name")),
        ("loss.advantage=grop", ("tiny.toml: loss: advantage: no 'grop'", "did you mean 'grpo'")),
        ("loss.preset=gpso", ("tiny.toml: loss: preset: no 'gpso'", "did you mean 'gspo'")),
        ("loss.proximal=recompute", ("tiny.toml", "loss.proximal 'recompute'", "train.minibatches")),
        ("loss.correction=tis", ("tiny.toml: loss: correction 'tis'", "proximal")),
        ("sources.flip.args.operation=halve", ("sources.flip.args: operation", "'complement'")),
    ],
)
def test_a_bad_recipe_is_refused_before_anything_is_written(
    stretto: Run, tiny: Path, finished: Path, tmp_path: Path, setting: str, words: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    overrides = ["--set", "rollout.max_tokens=10"] + [word for each in setting.split() for word in ("--set", each)]
    refused(stretto("rl", tiny, "--out", run, "--model", finished / "sft", "--device", "cpu", *overrides), *words)
    assert not run.exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ("rollout.engine=vllm", "rollout.address=http://127.0.0.1:9", "rollout.start_s=0.1"),
            ("rollout.address: vllm at http://127.0.0.1:9: does not answer", "correct the address"),
        ),
        (("store=file:///proc/run",), ("store: file:///proc/run: ", "check the address")),
        (("runtime.kind=ray", "runtime.address=127.0.0.1:1"), ("--address 127.0.0.1:1: no Ray cluster answers",)),
        (("loss.advantage=lesson.py:mine", "teachers.big=nowhere"), ("teachers.big: nowhere", "no such file")),
        (
            ("distill.form=sampled", "distill.teachers.flip.url=http://127.0.0.1:9"),
            ("distill.teachers.flip.url: http://127.0.0.1:9: does not answer", "correct the address"),
        ),
    ],
)
def test_a_wrong_address_is_refused_before_the_start_is_trained(
    stretto: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], words: Any
) -> None:
    (tmp_path / "lesson.py").write_text("def mine(groups, config):\n    return []\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stretto.api.rl.sft", lambda *_, **__: pytest.fail("the start was trained"))
    overrides = [word for setting in settings for word in ("--set", setting)]
    refused(stretto("rl", tiny, "--out", "runs/run", "--device", "cpu", *overrides), *words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("start.steps=26", ("run: start.steps: was 25 when this run started, is 26 now", "new run folder")),
        ("sources.flip.args.operation=reverse", ("sources.flip.args.operation: was 'complement'", "is 'reverse' now")),
        ("train.seed=9", ("train.seed: was 0", "is 9 now")),
        ("train.seq_len=80", ("train.seq_len: was 64", "is 80 now")),
        ("train.eval_prompts=5", ("train.eval_prompts: was 4", "is 5 now")),
        ("rollout.tool_chars=100", ("rollout.tool_chars: was 4000", "is 100 now")),
    ],
)
def test_a_start_that_was_trained_by_another_recipe_is_not_used(
    stretto: Run, tiny: Path, finished: Path, tmp_path: Path, setting: str, words: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished / "sft", run / "sft")
    refused(stretto("rl", tiny, "--out", run, "--device", "cpu", "--set", setting), *words)


def _further(tiny: Path) -> RlRecipe:
    """The recipe with a short ``[start]`` that trains the checkpoint of ``--model``."""
    tree = tomllib.loads(tiny.read_text())
    del tree["start"]["model"]
    return read_recipe(tree, RlRecipe, ["start.steps=2"])


def test_a_start_that_was_trained_from_another_model_is_not_used(
    tiny: Path, finished: Path, served_run: Path, tmp_path: Path
) -> None:
    recipe, run = _further(tiny), tmp_path / "run"
    start = made_start(recipe, run, finished / "sft", "cpu")
    moved = shutil.copytree(finished / "sft", tmp_path / "moved")
    assert made_start(recipe, run, moved, "cpu") == start
    said = r"run: --model: was 'weights \w{12}' when this run started, is 'weights \w{12}' now; .* new run folder"
    with pytest.raises(UserError, match=said):
        made_start(recipe, run, served_run / "checkpoint", "cpu")


def test_an_interrupted_start_goes_on_with_its_own_recipe_only(
    tiny: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    recipe, run = _further(tiny), tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("stretto.post.sft.write_trained", stop)
        made_start(recipe, run, finished / "sft", "cpu")
    assert not (run / "sft").exists()
    for setting, words in {
        "start.noise=0.9": "start.noise: was 0.3 when this run started, is 0.9 now",
        "start.learns_prompts=true": "start.learns_prompts: was False",
        "rollout.tool_chars=100": "rollout.tool_chars: was 4000",
        "sources.flip.args.length=4": "sources.flip.args.length: was 3",
    }.items():
        with pytest.raises(UserError, match=words):
            made_start(read_recipe(recipe, RlRecipe, [setting]), run, finished / "sft", "cpu")
    assert made_start(recipe, run, finished / "sft", "cpu") == run / "sft"


def test_a_start_that_was_refused_leaves_no_record(tiny: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="describes a new network"):
        made_start(read_recipe(tiny, RlRecipe), tmp_path / "run", finished / "sft", "cpu")
    assert not list((tmp_path / "run").glob("*.json"))


def test_r2_needs_several_updates(stretto: Run, tiny: Path, tmp_path: Path) -> None:
    refused(stretto("rl", tiny, "--out", tmp_path / "run", "--set", "replay=r2"), "replay 'r2'", "train.minibatches")
    assert not (tmp_path / "run").exists()


def test_starts_that_are_none(stretto: Run, tiny: Path, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def start(model: Path) -> Any:
        return stretto("rl", tiny, "--out", run, "--model", model, "--device", "cpu")

    refused(start(tmp_path / "none"), "none: config.json: no such file", "checkpoint folder")
    bare = tmp_path / "bare"
    shutil.copytree(finished / "sft", bare)
    (bare / "tokenizer.json").unlink()
    refused(start(bare), "bare/tokenizer.json: no such file")
    broken = tmp_path / "broken"
    shutil.copytree(finished / "sft", broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(start(broken), "broken/model.safetensors", "truncated")
    names = load_file(finished / "sft" / "model.safetensors")
    save_file({name: tensor for name, tensor in names.items() if "norm" not in name}, weights, {"format": "pt"})
    refused(start(broken), "norm.weight: missing from the weights")
    assert not run.exists()

    without = tmp_path / "without.toml"
    without.write_text(TINY[: TINY.index("[start]")] + TINY[TINY.index("[rollout]") :])
    refused(stretto("rl", without, "--out", run), "--model", "[start]")
    refused(stretto("rl", tiny, "--out", tmp_path / "nothing", "--resume"), "nothing", "no such run")
    assert not (tmp_path / "nothing").exists()


TRIED = """
import sys
from stretto.cli.main import main

try:
    main()
except SystemExit as stop:
    sys.exit(1 if "torch" in sys.modules else stop.code)
"""


@pytest.mark.parametrize("command", ["rl", "online", "distill"])
def test_a_damaged_start_is_refused_before_torch_is_imported(tiny: Path, tmp_path: Path, command: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(100))
    arguments = [command, str(tiny), "--model", str(model), "-o", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", TRIED, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "model.safetensors: not readable as safetensors" in done.stderr and not (tmp_path / "run").exists()


def own(tmp_path: Path, fault: str) -> tuple[str, ...]:
    (tmp_path / "own.py").write_text(OWN)
    source = f"sources.flip={{kind = '{tmp_path}/own.py:Own', args = {{fault = '{fault}'}}}}"
    return ("--set", source)


def test_a_task_that_refuses_its_own_answers_is_named(stretto: Run, tiny: Path, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for start in ((), ("--model", finished / "sft")):
        result = stretto("rl", tiny, "--out", run, *start, "--device", "cpu", *own(tmp_path, "gold"))
        refused(result, "sources.flip: item 0: its own gold answer '0' is refused", "correct the task")
    assert not run.exists()


def test_a_task_whose_check_never_ends_is_named(
    stretto: Run, tiny: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.flow.prompts._CHECK_S", 0.2)
    for start in ((), ("--model", finished / "sft")):
        settings = ("--set", "runtime.rewards.deadline_s=0.2", *own(tmp_path, "never returns"))
        result = stretto("rl", tiny, "-o", tmp_path / "run", *start, "--device", "cpu", *settings)
        refused(result, "sources.flip: item 0: score() has not returned after 0.2 s; correct the task")


def test_ctrl_c_is_one_line_and_its_exit_code(stretto: Run, tiny: Path, finished: Path, tmp_path: Path) -> None:
    for start in ((), ("--model", finished / "sft")):
        run = tmp_path / "run"
        result = stretto("rl", tiny, "--out", run, *start, "--device", "cpu", *own(tmp_path, "interrupted"))
        assert result.code == 130 and result.err.count("\n") == 1 and "interrupted" in result.err, result
        assert "; `stretto report RUN` writes the report of a run that is done" in result.err
        assert not run.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "raised KeyError"),
        ("nan", "score() gave reward as nan, not a finite number"),
        ("string", "score() returned '1.0', not a Score"),
        ("hangs", "no answer within 2 s"),
        ("exits", "its process"),
    ],
)
def test_a_verifier_that_fails_later_ends_the_run_by_its_name(
    stretto: Run, tiny: Path, finished: Path, tmp_path: Path, fault: str, said: str
) -> None:
    few = (
        "train.eval_prompts=1",
        "train.prompts=1",
        "rollout.group=2",
        "failures.max_attempts=1",
    )  # each meets the fault
    told = (*(word for setting in few for word in ("--set", setting)), *own(tmp_path, fault))
    start = ("--out", tmp_path / "run", "--model", finished / "sft", "--device", "cpu")
    refused(stretto("rl", tiny, *start, *told), "sources.flip: item", said, "--resume")
    events = read_events(tmp_path / "run" / JOURNAL_FILE)
    assert not any("step" in event.facts for event in events), "a fault of ours was trained on"


def test_a_run_of_an_older_version_is_left_to_it(stretto: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "groups.jsonl").touch()
    refused(stretto("rl", tiny, "--out", tmp_path, "--resume"), "groups.jsonl: written by an older version", "--out")


def test_fewer_steps_than_are_done_are_refused_before_a_role_is_started(
    stretto: Run, tiny: Path, finished: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    told = ("rl", tiny, "--out", run, "--resume", "--model", run / "sft", "--device", "cpu", "--set", "train.steps=2")
    refused(stretto(*told), f"{run}: train.steps: 2 is less than the 4 steps that are done; raise it")
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_cluster_that_does_not_answer(stretto: Run, tiny: Path, finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    start = ("--out", tmp_path / "run", "--model", finished / "sft", "--device", "cpu")
    result = stretto("rl", tiny, *start, "--runtime", "ray", "--address", "127.0.0.1:1")
    refused(result, "--address 127.0.0.1:1: no Ray cluster answers there", "ray start --head", "--runtime local")
    assert not (tmp_path / "run").exists()
