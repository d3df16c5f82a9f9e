"""``stretto distill``: a part of a network learns from the whole of it; and what is refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stretto.base.track import read_metrics
from stretto.model.checkpoint import read_checkpoint
from stretto.text.tokenizer import train_tokenizer
from tests.api.conftest import PRESETS, SERVED, Run, refused
from tests.api.rl_recipes import TINY

SMALL = ("--set", "train.seq_len=128", "--set", "train.steps=3", "--set", "runtime.isolate=none", "--device", "cpu")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Without a start of its own."""
    path = tmp_path / "tiny.toml"
    before, _, rest = TINY.partition("[start]")
    path.write_text(before + "[rollout]" + rest.partition("[rollout]")[2])
    return path


@pytest.mark.slow
def test_the_whole_teaches_its_corner(stretto: Run, plain: Path, served_run: Path, tmp_path: Path) -> None:
    """Healing by distillation: no teacher is named, and the student is cut out of what --model holds."""
    run = tmp_path / "run"
    done = stretto("distill", plain, "--model", served_run / "checkpoint", "--subnet", "corner", "-o", run, *SMALL)
    assert done.code == 0, done
    assert "flip: KL to parent" in done.out and "100% of the gradient" in done.out
    page = (run / "report" / "report.html").read_text()
    assert "KL to their teachers" in page
    student = read_checkpoint(run / "checkpoint")
    assert student.config == read_checkpoint(run / "student").config
    assert (student.config.num_layers, student.config.num_experts) == (2, 2) == (PRESETS["corner"].layers, 2)
    assert student.lineage is not None and student.lineage.stage == "distill"
    assert [parent.stage for parent in student.lineage.parents] == ["extract"]
    rows = [row for row in read_metrics(run) if "distill/kl/flip" in row]
    assert len(rows) == 3 and all(row["distill/share/flip"] == 1.0 for row in rows)
    refused(
        stretto("distill", plain, "--model", served_run / "checkpoint", "--subnet", "corner", "-o", run, *SMALL),
        "holds a run already",
    )


def test_what_is_refused(stretto: Run, plain: Path, served_run: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(served_run / "checkpoint", other)
    train_tokenizer(iter(["entirely different words " * 20]), SERVED.vocab_size).save(other)

    def distill(*arguments: object) -> None:
        *options, words = arguments
        assert isinstance(words, tuple)
        refused(stretto("distill", plain, "-o", run, *SMALL, *options), *words)
        assert not run.exists()

    model = ("--model", served_run)
    distill(*model, ("recipe: distill: missing", "--teacher NAME=DIR"))
    distill("--teacher", f"flip={served_run}", ("--model: missing",))
    distill("--teacher", f"flip={served_run}", "--subnet", "corner", ("--subnet: needs --model", "extract the student"))
    distill(*model, "--teacher", "flip", ("--teacher flip: expected NAME=DIR",))
    distill(
        *model, "--teacher", f"flop={served_run}", ("distill.teachers.flop: no source 'flop' (did you mean 'flip'?)",)
    )
    distill(*model, "--teacher", "flip=http://localhost:1", ("distill.teachers.flip", 'distill.form = "sampled"'))
    distill(
        *model,
        "--teacher",
        f"flip={tmp_path / 'none'}",
        (f"--teacher flip={tmp_path / 'none'}: ", "config.json: no such file"),
    )
    weights = tmp_path / "broken" / "model.safetensors"
    shutil.copytree(served_run / "checkpoint", weights.parent)
    weights.write_bytes(weights.read_bytes()[:-100])
    distill(*model, "--teacher", f"flop={weights.parent}", (f"--teacher flop={weights.parent}: {weights}", "truncated"))
    settings = ("--set", f"distill.teachers.flip.checkpoint={weights.parent}")
    distill(*model, *settings, (f"distill.teachers.flip.checkpoint: {weights}", "truncated"))
    distill(
        *model,
        "--teacher",
        f"flip={other}",
        "--set",
        "distill.kl_floor=0",
        ("distill.teachers.flip", "its tokenizer gives other ids"),
    )
    distill(*model, "--teacher", f"flip={served_run}", ("distill.teachers.flip", "the student's own weights"))
    distill(
        *model, "--teacher", f"flip={served_run}:conrer", ("subnet conrer: unknown preset", "did you mean 'corner'")
    )
    url = ("--teacher", "flip=http://127.0.0.1:9", "--set", "distill.form=sampled", "--set", "failures.max_attempts=1")
    done = stretto("distill", plain, "-o", run, *SMALL, *model, *url)
    refused(done, "distill.teachers.flip: http://127.0.0.1:9", "continue with --resume")
