"""Whole runs of distillation: a tiny student learns what a tiny teacher does, and a run that was broken off is the whole one."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench.common.plain_loop import run_plainly
from bench.common.run_account import checksum
from bench.sync_equality import recipe, start_of, whole_run
from stretto.base.config import read_recipe, validate
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, RECIPES
from stretto.base.records import Receipt, new_lineage
from stretto.flow.launch import Job
from stretto.flow.run import run_rl
from stretto.learning.recipe import DistillConfig, RlRecipe
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.post.distill import STAGE, gaps, parent_settings, teacher_settings

STEPS = 9


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A student, and the same network with other words in mind."""
    folder = tmp_path_factory.mktemp("starts")
    tables = {**recipe().model_dump()["start"], "steps": 12}
    student = start_of(recipe(start=tables), folder / "student")
    found = read_checkpoint(student)
    with torch.no_grad():
        weight = found.model.embedding.weight
        weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 2 * weight.std()
    options = {"family": found.family, "tokenizer_dir": student}
    lineage = new_lineage(
        name="teacher",
        stage="rl",
        total_params=1,
        active_params=1,
        receipt=Receipt(stage="rl", device="none"),
    )
    write_checkpoint(folder / "teacher", found.model, found.config, lineage=lineage, **options)
    return {"student": student, "teacher": folder / "teacher"}


def plan(starts: dict[str, Path], **tables: Any) -> RlRecipe:
    return recipe(
        STEPS,
        **{
            "rollout": {"group": 2, "max_tokens": 8},
            "optim": {"lr": 5e-3, "decay_fraction": 0.0},
            "distill": {"balance": "gap", "teachers": {"digits": {"checkpoint": str(starts["teacher"])}}},
            "runtime": {"isolate": "none"},
            "train": {"eval_every": 100, "eval_prompts": 2},
            **tables,
        },
    )


class Broken(RuntimeError):  # noqa: N818
    """Stands for a kill."""


@pytest.mark.slow
def test_a_student_learns_its_teacher_and_a_broken_run_is_the_whole_one(
    tmp_path: Path, starts: dict[str, Path]
) -> None:
    chosen, student = plan(starts), starts["student"]
    reports = asyncio.run(run_plainly(chosen, tmp_path / "plain", student, tmp_path / "plain" / CHECKPOINT))
    kls = [report.scalars["distill/kl/digits"] for report in reports]
    assert kls[-1] < 0.5 * kls[0], kls

    def breaks(num: int, status: str | None) -> None:
        nonlocal left
        left -= num
        if left == 0:
            raise Broken

    left = 4  # its snapshot is of step 3
    with pytest.raises(Broken):
        run_rl(Job(chosen, tmp_path / "run", student, stage=STAGE), breaks, lambda text: None)
    run_rl(
        Job(chosen, tmp_path / "run", student, resume=True, stage=STAGE), lambda num, status: None, lambda text: None
    )
    assert checksum(tmp_path / "run") == checksum(tmp_path / "plain")
    assert chosen.distill is not None
    (gap,) = gaps(tmp_path / "run", chosen.distill)
    assert (gap.source, gap.teacher, gap.first_kl, gap.share) == ("digits", "digits", kls[0], 1.0)
    assert gap.last_kl == kls[-1]
    lineage = read_checkpoint(tmp_path / "run" / CHECKPOINT).lineage
    assert lineage is not None and lineage.stage == STAGE
    whence = [read_checkpoint(starts[name]).lineage for name in ("student", "teacher")]
    assert [each.run_id for each in lineage.parents] == [each.run_id for each in whence if each is not None]


@pytest.mark.slow
def test_a_killed_run_is_the_whole_one(tmp_path: Path, starts: dict[str, Path]) -> None:
    chosen = plan(starts, runtime={"isolate": "all"})
    asyncio.run(run_plainly(chosen, tmp_path / "plain", starts["student"], tmp_path / "plain" / CHECKPOINT))
    found = whole_run("killed", chosen, tmp_path / "run", starts["student"], lambda num, status: None, (1, 3, 4))
    assert found.checksum == checksum(tmp_path / "plain")


def with_checkpoints(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Work in ``folder``, with checkpoints at ``names``."""
    monkeypatch.chdir(folder)
    for name in names:
        Path(name).mkdir(parents=True)
        Path(name, "config.json").write_text("{}")
        save_file({"embedding": torch.zeros(2)}, Path(name, "model.safetensors"))


def test_teachers_as_a_command_line_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_checkpoints(monkeypatch, tmp_path, "runs/a b", "runs/net")
    told = teacher_settings(["maths=runs/a b", "code=runs/net:experts=4,top_k=1", "far=https://x:8/y"])
    assert told == [
        'distill.teachers.maths.checkpoint="runs/a b"',
        'distill.teachers.code.checkpoint="runs/net"',
        'distill.teachers.code.subnet="experts=4,top_k=1"',
        'distill.teachers.far.url="https://x:8/y"',
    ]
    assert parent_settings(Path("runs/net"))[1] == 'distill.teachers.parent.domains=["*"]'


def test_a_teacher_that_is_missing_or_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_checkpoints(monkeypatch, tmp_path, "runs/net")
    with pytest.raises(UserError, match=r"^--teacher far=runs/none: runs/none: config.json: no such file"):
        teacher_settings(["far=runs/none"])
    Path("runs/net/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"^--teacher near=runs/net: runs/net/model.safetensors: not readable"):
        teacher_settings(["near=runs/net"])


def test_the_recipes_that_are_shown_are_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_checkpoints(monkeypatch, tmp_path, "runs/rl_gym")
    page = (RECIPES.parents[1] / "docs" / "DISTILL.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    shown = validate(RlRecipe, tomllib.loads(block), "docs/DISTILL.md")
    assert shown.distill is not None and shown.distill.teacher_of() == {"maths": "maths", "code": "coder"}
    bare = DistillConfig(teachers=shown.distill.teachers)
    assert shown.distill == bare, "it shows the defaults"
    shipped = read_recipe(RECIPES / "distill.toml", RlRecipe, teacher_settings(["backward=runs/rl_gym"]))
    expert = read_recipe(RECIPES / "rl_gym.toml", RlRecipe)
    assert shipped.sources == expert.sources and shipped.rollout.max_tokens == expert.rollout.max_tokens
    healing = read_recipe(RECIPES / "distill.toml", RlRecipe, parent_settings(Path("runs/x")))
    assert healing.distill is not None and healing.distill.teacher_of() == {"backward": "parent"}
