"""Bad input is one line that names the file, the field and the remedy; exit code 2; nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stretto.base.paths import LOCK_FILE, claimed
from stretto.text.tokenizer import train_tokenizer
from stretto.train.step import NonFiniteError
from tests.api.conftest import Result, Run, refused


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.stepz=3", ("train.stepz", "unknown key", "steps", "(from the setting train.stepz=3)")),
        ("trane.steps=3", ("trane: unknown key", "(from the setting trane.steps=3)")),
        ("train.steps=0", ("train.steps", "greater than 0")),
        ("model.top_k=9", ("top_k 9 is larger than num_experts 4",)),
        ("model.num_kv_heads=3", ("num_kv_heads 3",)),
        ("elastic.anchors.corner.experts=9", ("elastic.anchors.corner", "1..4")),
        ("elastic.anchor_share=0.95", ("at most 1",)),
        ("train.seq_len=128", ("max_positions 64",)),
        ("nonsense", ("key.path=value",)),
        ("model.attention_sinks=true", ("no supported family can express this network", "has sinks")),
    ],
)
def test_a_bad_recipe_is_refused_before_anything_is_written(
    stretto: Run, recipe: Path, text: Path, tmp_path: Path, setting: str, words: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    result = stretto("pretrain", recipe, "--data", text, "--out", run, "--set", setting)
    refused(result, *words)
    assert not run.exists()


def test_a_missing_recipe_or_one_that_is_not_toml(stretto: Run, tmp_path: Path, text: Path) -> None:
    refused(stretto("pretrain", tmp_path / "none.toml", "--data", text), "none.toml", "no such recipe")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    refused(stretto("pretrain", broken, "--data", text), "broken.toml", "not valid TOML")


def test_bad_data(stretto: Run, recipe: Path, tmp_path: Path) -> None:
    def pretrain(data: Path) -> Result:
        return stretto("pretrain", recipe, "--data", data, "--out", tmp_path / "run")

    refused(pretrain(tmp_path / "none.jsonl"), "none.jsonl")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    refused(pretrain(empty), "empty.txt")
    assert not (tmp_path / "run").exists(), "a tokenizer of no text is not left behind"
    binary = tmp_path / "binary.txt"
    binary.write_bytes(bytes(range(256)) * 10)
    refused(pretrain(binary), "binary.txt")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Grüße aus Köln\n".encode("latin-1") * 50)
    refused(pretrain(latin), "latin.txt")
    no_field = tmp_path / "field.jsonl"
    no_field.write_text('{"body": "text"}\n')
    refused(pretrain(no_field), "field.jsonl", "text")


@pytest.mark.parametrize("weight", ["0", "-1", "inf", "nan"])
def test_a_weight_that_is_no_positive_number(
    stretto: Run, recipe: Path, text: Path, tmp_path: Path, weight: str
) -> None:
    result = stretto("pretrain", recipe, "--data", f"{text}@{weight}", "--out", tmp_path / "run")
    refused(result, f"--data {text}@{weight}: the weight after @")
    assert not (tmp_path / "run").exists()


def test_a_size_for_a_tokenizer_that_has_one(stretto: Run, text: Path, tmp_path: Path) -> None:
    told = ("tokenize", "--data", text, "--vocab-size", 300)
    assert stretto(*told, "--out", tmp_path / "one").code == 0
    tokenizer = tmp_path / "one" / "tokenizer"
    refused(stretto(*told, "--tokenizer", tokenizer, "--out", tmp_path / "two"), "--vocab-size", "leave")
    assert not (tmp_path / "two").exists()
    (tmp_path / "one" / "data.json").unlink()  # an attempt that was killed left its tokenizer
    smaller = ("tokenize", "--data", text, "--vocab-size", 280, "--out", tmp_path / "one")
    refused(stretto(*smaller), "has 300 tokens, more than the 280 asked for")


def test_a_folder_in_which_another_process_runs(stretto: Run, recipe: Path, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with claimed(run):
        refused(stretto("pretrain", recipe, "--data", text, "--out", run), f"process {os.getpid()} on", "running in it")
        refused(stretto("tokenize", "--data", text, "--out", run), f"process {os.getpid()} on", "running in it")
        assert [path.name for path in run.iterdir()] == [".lock"]


def test_a_disk_that_fills_up_while_tokenising(stretto: Run, text: Path, tmp_path: Path) -> None:
    """At any file: the tokenizer's, a shard's, the records of what is done."""
    for kib in (0, 4, 12, 20, 48):
        out = tmp_path / f"tokens-{kib}"
        out.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={max(kib, 4)}k,nr_inodes={5 + kib}", "none", str(out)]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small file system is not permitted here")
        try:
            result = stretto("tokenize", "--data", text, "--vocab-size", 300, "--out", out)
            refused(result, "tokens-", "No space left on device")
            assert not (out / "data.json").exists()
            assert [path.name for path in out.rglob("*") if path.name.endswith(".partial")] == []
        finally:
            subprocess.run(["umount", str(out)], check=True)


@pytest.mark.slow
def test_a_worker_that_dies_while_tokenising(text: Path, tmp_path: Path) -> None:
    """Killed from outside, as the system does where memory is short."""
    command = [sys.executable, "-m", "stretto", "tokenize", "--data", text, "--vocab-size", "300"]
    with subprocess.Popen([*command, "--out", tmp_path / "tokens"], stderr=subprocess.PIPE, text=True) as tokenising:
        killed = False
        while tokenising.poll() is None and not killed:
            for child in psutil.Process(tokenising.pid).children():
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()
                    killed = True
            time.sleep(0.01)
        assert tokenising.stderr is not None
        told = tokenising.stderr.read()
    if not killed:
        pytest.skip("with one core, no other process tokenises")
    assert "Traceback" not in told, told
    assert "worker processes died" in told.strip().splitlines()[-1] and tokenising.returncode == 2, told


@pytest.mark.slow
def test_a_resume_with_another_tokenizer_teacher_or_source(
    stretto: Run, recipe: Path, healing: Path, text: Path, tmp_path: Path
) -> None:
    run, teacher, corner, other, healed = (tmp_path / name for name in ("run", "teacher", "corner", "other", "healed"))

    def ok(*arguments: object) -> None:
        result = stretto(*arguments)
        assert result.code == 0, result.err

    pretrain = ("pretrain", recipe, "--data", text, "--out", run, "--steps", 2)
    ok(*pretrain)
    train_tokenizer(iter(["another text"]), 300).save(tmp_path / "tokenizer")
    refused(
        stretto(*pretrain, "--resume", "--tokenizer", tmp_path / "tokenizer"), "--tokenizer", "not the one", str(run)
    )
    ok(*pretrain, "--resume", "--tokenizer", run / "data" / "00" / "tokenizer")

    for folder in (corner, other):
        ok("extract", run, "--subnet", "corner", "-o", folder)
    shutil.copytree(run / "checkpoint", teacher)
    heal = ("-o", healed, "--data", text, "--recipe", healing)
    ok("heal", corner, *heal, "--teacher", teacher)
    refused(stretto("heal", other, *heal, "--resume"), "source: was ", str(corner), str(other), "change it back")
    against = ("--resume", "--teacher", run)
    refused(stretto("heal", corner, *heal, *against), "--teacher: was ", str(teacher), str(run), "change it back")
    run.rename(tmp_path / "elsewhere")
    ok("heal", corner, *heal, "--resume")  # with the teacher that it had, and not what the student was cut from


def test_commands_on_folders_that_are_not_runs(stretto: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for command in ("search", "latency", "report", "cost"):
        refused(stretto(command, empty), "empty")
    refused(stretto("extract", empty, "--subnet", "corner", "-o", tmp_path / "out"), "empty")
    refused(stretto("heal", empty, "-o", tmp_path / "out", "--data", empty), "empty")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def network(served_run: Path, tmp_path: Path) -> Path:
    """A run that was adopted without text."""
    shutil.copytree(served_run / "checkpoint", tmp_path / "run" / "checkpoint")
    told = {"stage": "adopt", "tokenizer": str(tmp_path / "run" / "checkpoint")}
    (tmp_path / "run" / "run.json").write_text(json.dumps(told))
    return tmp_path / "run"


def test_what_a_network_is_made_from_is_not_replaced_by_it(
    stretto: Run, network: Path, text: Path, tmp_path: Path
) -> None:
    run, part = network, tmp_path / "part"
    assert stretto("extract", run, "--subnet", "half", "-o", part).code == 0
    before = {path: path.read_bytes() for path in (*(run / "checkpoint").iterdir(), *part.iterdir())}
    linked = tmp_path / "linked"
    linked.symlink_to(run, target_is_directory=True)
    for command in (
        ("extract", run, "--subnet", "half", "-o", run / "checkpoint"),
        ("extract", run / "checkpoint", "--subnet", "half", "-o", linked / "checkpoint"),
        ("extract", run / "checkpoint", "--subnet", "half", "-o", run),
        ("export", run, "--dtype", "bfloat16", "-o", run / "checkpoint"),
        ("heal", part, "--data", text, "-o", part),
        ("heal", part, "--data", text, "--teacher", run, "-o", run / "checkpoint"),
    ):
        refused(stretto(*command), f"{command[-1]}: contains the checkpoint that is read", "choose another folder")
    assert {path: path.read_bytes() for path in before} == before and not (tmp_path / "part.run").exists()


def test_a_checkpoint_is_not_written_inside_the_one_that_is_read(stretto: Run, network: Path, tmp_path: Path) -> None:
    inside, part = network / "checkpoint" / "x", tmp_path / "part"
    shutil.copytree(network / "checkpoint", part)
    for command in (
        ("extract", network, "--subnet", "half", "-o", inside),
        ("quantise", network, "-o", inside),
        ("export", network, "-o", inside),
        ("export", network, "--gguf", "-o", inside),
        ("merge", "average", network, part, "-o", inside),
        ("merge", "average", network, part, "-o", part / "x"),
        ("heal", network, "--data", tmp_path, "-o", inside),
    ):
        refused(stretto(*command), f"{command[-1]}: lies inside the checkpoint that is read; choose another folder")
    assert not inside.exists() and not (part / "x").exists()


def test_of_two_commands_that_write_one_checkpoint_the_second_is_refused(
    stretto: Run, network: Path, tmp_path: Path
) -> None:
    out, part = tmp_path / "out", tmp_path / "part"
    shutil.copytree(network / "checkpoint", part)
    commands: list[tuple[object, ...]] = [
        ("extract", network, "--subnet", "half"),
        ("quantise", network, "--group", 16),
        ("export", network),
        ("merge", "average", network, part),
    ]
    for command in commands:
        with claimed(out):
            refused(stretto(*command, "-o", out), f"{out}: process {os.getpid()}", "is running in it")
        assert not out.exists()
    for command in commands:  # also where an older checkpoint is there, or the lock file of a killed process
        assert stretto(*command, "-o", out, "--force").code == 0
        assert not (out / LOCK_FILE).exists()
        (out / LOCK_FILE).touch()


def test_a_folder_is_not_replaced_by_a_file(stretto: Run, network: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "notes.txt").write_text("mine")
    told = stretto("export", network, "--gguf", "-o", tmp_path / "precious")
    refused(told, "precious: a folder; name the file to write", "precious/model.gguf")
    assert (tmp_path / "precious" / "notes.txt").read_text() == "mine"


def test_options_that_would_change_nothing(stretto: Run, network: Path, text: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out")
    refused(stretto("export", network, "--gguf", "--family", "llama", *out), "--family llama", "leave")
    refused(stretto("adopt", network, "--order", "none", "--calibration", text, *out), "--calibration", "leave it out")
    refused(stretto("adopt", network, "--method", "copy", *out), "--method copy: needs --experts")
    alone = ("--set", "ce_weight=1", "--teacher", network)
    refused(stretto("heal", network, "--data", text, *alone, *out), "ce_weight", "leave --teacher out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_read_only(stretto: Run, network: Path, text: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        for command in (
            ("extract", network, "--subnet", "half", "-o", place / "out"),
            ("export", network, "--gguf", "-o", place / "out.gguf"),
            ("tokenize", "--data", text, "-o", place / "out"),
            ("adopt", network, "-o", place / "out"),
        ):
            refused(stretto(*command), str(place), "Read-only file system")
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_while_extracting(stretto: Run, network: Path, tmp_path: Path) -> None:
    """At any file: descriptions, weights, the tokenizer's, the record."""
    whole = tmp_path / "whole"
    assert stretto("extract", network, "--subnet", "half", "-o", whole).code == 0
    pages = sum(-(-path.stat().st_size // 4096) for path in whole.iterdir())
    place = tmp_path / "place"
    place.mkdir()
    for free in (1, 2, pages // 2, *range(pages - 12, pages)):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={4 * free}k", "none", str(place)]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small file system is not permitted here")
        try:
            told = stretto("extract", network, "--subnet", "half", "-o", place / "out")
            refused(told, str(place), "cannot be written", "No space left on device")
            assert list(place.iterdir()) == []
        finally:
            subprocess.run(["umount", str(place)], check=True)


def test_two_searches_in_one_folder(stretto: Run, network: Path, text: Path) -> None:
    with claimed(network / "search"):
        refused(stretto("search", network, "--data", text), "running in it")


def test_a_path_that_no_system_takes(stretto: Run, tmp_path: Path) -> None:
    refused(stretto("adopt", "x" * 5000, "-o", tmp_path / "run"), "xxx: File name too long")


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (("--max-total", "0"), ("--max-total 0", "write 0.34")),
        (("--max-total", "34"), ("--max-total 34", "for 34 % write 0.34")),
        (("--max-active", "nan"), ("--max-active nan",)),
        (("--max-active", "-0.5"), ("--max-active -0.5",)),
        (("--max-latency-ms", "0"), ("--max-latency-ms 0", "milliseconds")),
        (("--max-latency-ms", "inf"), ("--max-latency-ms inf",)),
        (("--heal-steps", "-2"), ("--heal-steps -2: must be 0 or more",)),
        (("--seed", "-1"), ("--seed: must be greater than or equal to 0",)),
        (("--seed", str(2**32)), ("--seed: must be less than 4294967296",)),
    ],
)
def test_limits_that_are_none(stretto: Run, tmp_path: Path, limit: tuple[str, str], words: tuple[str, ...]) -> None:
    refused(stretto("search", tmp_path, *limit), *words)


def test_resume_of_nothing(stretto: Run, recipe: Path, tmp_path: Path) -> None:
    """A resume where there is no run begins one, as a first start by torchrun does, and needs data for that."""
    refused(stretto("pretrain", recipe, "--out", tmp_path / "run", "--resume"), "--data: name at least one")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_refusals_on_a_real_run(stretto: Run, recipe: Path, healing: Path, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = stretto("pretrain", recipe, "--data", text, "--out", run)
    assert made.code == 0, made.err

    refused(stretto("pretrain", recipe, "--data", text, "--out", run), "--resume")
    changed = ("--resume", "--set", "optim.weight_decay=0.5")
    refused(stretto("pretrain", recipe, "--data", text, "--out", run, *changed), "optim.weight_decay")
    other = tmp_path / "other.txt"
    other.write_text("other text")
    resume = ("pretrain", recipe, "--out", run, "--resume")
    refused(stretto(*resume, "--data", other), "--data: was ", str(text), str(other), "leave it out")
    steered = stretto(*resume, "--data", text, "--set", "optim.lr=0.005", "--steps", 8)
    assert steered.code == 0, steered.err
    lineage = json.loads((run / "checkpoint" / "lineage.json").read_text())
    told = [(change["step"], change["field"], change["after"]) for change in lineage["config"]["changes"]]
    assert told == [(6, "optim.lr", 0.005), (6, "train.steps", 8)]
    assert (
        lineage["config"]["recipe"]["train"]["steps"]
        == json.loads((run / "run.json").read_text())["recipe"]["train"]["steps"]
        == 8
    )

    out = tmp_path / "out"
    refused(stretto("extract", run, "--subnet", "cornr", "-o", out), "did you mean 'corner'")
    refused(stretto("extract", run, "--subnet", "layers=9", "-o", out), "1..5")
    refused(stretto("extract", run, "--subnet", "depth=3", "-o", out), "depth")
    refused(stretto("extract", run, "--subnet", "best", "-o", out), "stretto search")
    refused(stretto("search", run, "--max-total", "0.01"), "nothing fits", "--max-total")
    refused(stretto("search", run, "--max-latency-ms", "1"), "stretto latency")
    assert not out.exists()

    assert stretto("extract", run, "--subnet", "corner", "-o", out).code == 0
    refused(stretto("export", out, "--family", "qwen3_moe", "-o", tmp_path / "q"), "qwen3_moe")
    refused(stretto("export", out, "--family", "llama", "-o", tmp_path / "q"), "llama")
    assert not (tmp_path / "q").exists()

    healed = tmp_path / "healed"
    nan = ("--set", "optim.lr=1e30", "--set", "optim.clip_norm=1e30")
    refused(
        stretto("heal", out, "-o", healed, "--data", text, "--recipe", healing, *nan),
        "not finite",
        code=NonFiniteError.exit_code,
    )
    assert not healed.exists()
    for command in ("search", "report"):
        refused(stretto(command, tmp_path / "healed.run"), "heal", "the pre-training run")

    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(stretto("export", out, "-o", tmp_path / "q"), "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    refused(stretto("export", out, "-o", tmp_path / "q"), "config.json")


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["pretrain", "tiny.toml", "--data", "text.txt", "-o", ""], "pretrain: --out"),
        (["pretrain", "tiny.toml", "--data=", "-o", "new"], "pretrain: --data"),
        (["pretrain", "", "--data", "text.txt"], "pretrain: recipe"),
        (["merge", "average", "run", "", "-o", "new"], "merge: models"),
        (["chat", ""], "chat: source"),
        (["enhance", "a hat", "--model="], "enhance: --model"),
        (["judge", "serve", ""], "judge serve: judge"),
    ],
)
def test_an_empty_argument_is_not_the_current_folder(stretto: Run, arguments: list[str], place: str) -> None:
    refused(stretto(*arguments), f"{place}: is empty; give a value, or leave it out")


def test_texts_and_values_of_settings_may_be_empty(stretto: Run) -> None:
    refused(stretto("generate", "nosuch", "--prompt", ""), "nosuch: config.json: no such file")
    refused(stretto("rl", "rl_gym", "--set", "optim.betas="), "rl_gym.toml: optim.betas")
