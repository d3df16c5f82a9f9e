"""``stretto distill``: a part of a network learns from the whole of it; and what is refused in one line."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from stretto.base.errors import UserError
from stretto.base.records import Lineage, new_lineage
from stretto.base.track import read_metrics
from stretto.flow.launch import Job
from stretto.learning.recipe import JOURNAL_FILE
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.text.tokenizer import train_tokenizer
from tests.api.conftest import PRESETS, SERVED, Result, Run, refused
from tests.api.rl_recipes import TINY

SMALL = ("--set", "train.seq_len=128", "--set", "train.steps=3", "--set", "runtime.isolate=none", "--device", "cpu")
SECOND = ("--set", 'sources.turn={kind = "strings", args = {operation = "reverse", length = 3}}')
"""A second source, for a second teacher."""


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


def _written(origin: Path, folder: Path, seed: int, parents: tuple[Lineage, ...] = ()) -> Lineage:
    """Write the network of ``origin``, moved a little unless it has no parents, as a checkpoint with a lineage."""
    source, generator = read_checkpoint(origin), torch.Generator().manual_seed(seed)
    state = {
        name: each + 0.05 * len(parents) * torch.randn(each.shape, generator=generator)
        for name, each in source.model.state_dict().items()
    }
    receipt = {"stage": "rl", "device": "none", "flops": 1, "tokens": 1}
    sizes = {"total_params": 1, "active_params": 1}
    lineage = new_lineage(name=folder.name, stage="rl", parents=parents, receipt=receipt, **sizes)
    write_checkpoint(folder, state, source.config, tokenizer_dir=origin, lineage=lineage)
    return lineage


@pytest.mark.slow
def test_a_student_begins_with_its_merged_teachers(stretto: Run, plain: Path, served_run: Path, tmp_path: Path) -> None:
    start, run = tmp_path / "start", tmp_path / "run"
    lineage = _written(served_run / "checkpoint", start, 0)
    teachers = {name: tmp_path / name for name in ("flip", "turn")}
    for seed, place in enumerate(teachers.values()):
        _written(start, place, seed, (lineage,))
    named = [word for name, place in teachers.items() for word in ("--teacher", f"{name}={place}")]
    merged = ("--set", "distill.merge_scale=0.5")
    done = stretto("distill", plain, "--model", start, *named, *SECOND, *merged, "-o", run, *SMALL)
    assert done.code == 0, done
    before, *others = (read_checkpoint(place).model.state_dict() for place in (start, *teachers.values()))
    begun = read_checkpoint(run / "student").model.state_dict()
    for name, each in begun.items():
        if "bias" not in name:  # biases of the balance are averaged
            torch.testing.assert_close(each, before[name] + 0.5 * sum(other[name] - before[name] for other in others))
    trained = read_checkpoint(run / "checkpoint").lineage
    assert trained is not None and [parent.stage for parent in trained.parents] == ["merge", "rl", "rl"]
    resumed = stretto("distill", plain, "--model", start, *named, *SECOND, *merged, "-o", run, "--resume", *SMALL)
    assert resumed.code == 0, resumed


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The weights with which runs began. Each run ends with an error before its first group."""
    starts: list[dict[str, torch.Tensor]] = []

    def end(job: Job, *_: object) -> None:
        starts.append(read_checkpoint(job.start).model.state_dict())
        raise UserError("ended before the first group")

    monkeypatch.setattr("stretto.api.rl.run_opened", end)
    return starts


@pytest.mark.slow
def test_a_merge_of_a_failed_attempt_is_made_again(
    stretto: Run, plain: Path, served_run: Path, tmp_path: Path, begun: list[dict[str, torch.Tensor]]
) -> None:
    start, run = tmp_path / "start", tmp_path / "run"
    teachers = {name: tmp_path / name for name in ("flip", "turn", "other", "near")}
    lineage = _written(served_run / "checkpoint", start, 0)
    for seed, place in enumerate(teachers.values()):
        _written(start, place, seed, (lineage,))

    def distill(model: str, scale: float, *options: str, turn: str = "turn") -> Result:
        named = ("--teacher", f"flip={teachers['flip']}", "--teacher", f"turn={teachers[turn]}")
        merged = ("--set", f"distill.merge_scale={scale}")
        return stretto(
            "distill", plain, "--model", tmp_path / model, *named, *SECOND, *merged, "-o", run, *SMALL, *options
        )

    refused(distill("start", 0.5), "ended before")
    refused(distill("start", 0.1), "ended before")
    refused(distill("start", 0.1, turn="other"), "ended before")
    refused(distill("near", 0.1), "ended before")
    differs = [
        any(not torch.equal(each, after[name]) for name, each in before.items()) for before, after in pairwise(begun)
    ]
    assert differs == [True] * 3

    (run / JOURNAL_FILE).touch()
    refused(distill("near", 0.1, "--resume"), "ended before")
    refused(distill("near", 0.2, "--resume"), "run: distill.merge_scale: was 0.1 when this run started, is 0.2 now")
    refused(distill("near", 0.1, "--resume", turn="other"), "run: distill.teachers.turn: was 'weights ")
    refused(
        distill("start", 0.1, "--resume"), "run: --model: was 'weights ", "change it back, or start a new run folder"
    )
    refused(distill("run/student", 0.1, "--resume"), "ended before")
    for name, each in begun[3].items():
        assert torch.equal(each, begun[4][name]) and torch.equal(each, begun[5][name])


def test_a_student_of_a_failed_attempt_is_cut_out_again(
    stretto: Run, plain: Path, served_run: Path, tmp_path: Path, begun: list[dict[str, torch.Tensor]]
) -> None:
    run = tmp_path / "run"

    def distill(subnet: str, *options: str) -> Result:
        return stretto(
            "distill", plain, "--model", served_run / "checkpoint", "--subnet", subnet, "-o", run, *SMALL, *options
        )

    for subnet in ("corner", "half"):
        refused(distill(subnet), "ended before")
    assert len(begun[0]) < len(begun[1])
    (run / JOURNAL_FILE).touch()
    refused(distill("half", "--resume"), "ended before")
    refused(distill("corner", "--resume"), "run: --subnet: was 'half' when this run started, is 'corner' now")


@pytest.mark.slow
def test_a_run_stopped_by_the_kl_floor_continues_without_it(
    stretto: Run, plain: Path, served_run: Path, tmp_path: Path
) -> None:
    """As for a teacher that an RL run left almost unchanged."""
    near, run = tmp_path / "near", tmp_path / "run"
    checkpoint = read_checkpoint(served_run / "checkpoint")
    state = {name: each * (1 + 1e-5) for name, each in checkpoint.model.state_dict().items()}
    write_checkpoint(near, state, checkpoint.config, tokenizer_dir=served_run / "checkpoint")
    arguments = ("distill", plain, "--model", served_run, "--teacher", f"flip={near}", "-o", run, *SMALL)
    remedies = ("name another checkpoint and a new --out", "or set distill.kl_floor = 0 and add --resume")
    refused(stretto(*arguments), "distill.teachers.flip: differs from the student by", *remedies)
    done = stretto(*arguments, "--set", "distill.kl_floor=0", "--resume")
    assert done.code == 0, done


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
    merged = ("--teacher", f"flip={served_run}", "--teacher", f"turn={served_run}", "--set", "distill.merge_scale=0.5")
    refusal = "--subnet: cuts out a new student, and distill.merge_scale needs"
    distill(*model, *SECOND, *merged, "--subnet", "corner", (refusal, "leave one out"))
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
