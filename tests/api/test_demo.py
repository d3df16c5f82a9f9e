"""The demo on tiny recipes: every stage runs, in order; an interrupted run resumes; post-training goes on from its result."""

from __future__ import annotations

import html
import re
import shutil
from itertools import product
from pathlib import Path

import pytest

from stretto.api import demo
from stretto.api.demo import PROMPTS, Stage, demo_command, run_stages
from stretto.base.errors import UserError
from stretto.base.paths import RECIPES, write_text
from stretto.base.records import history, read_lineage
from stretto.data.demo_text import passages
from stretto.subnets.candidate import Limits
from stretto.train.run_folder import read_samples

STEPS = r"(?m)^(steps|eval_every|snapshot_every|problems|samples) = .*$"
SMALL = {"num_layers": 5, "hidden_size": 64, "num_experts": 6, "expert_intermediate_size": 16, "vocab_size": 600}


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """The shipped ones, of a tiny network, with a few steps each, two domains, and no processes for engines."""
    folder = tmp_path / "recipes"
    shutil.copytree(RECIPES, folder)
    for name in ("demo.toml", "heal.toml", "demo_pipeline.toml"):
        text = re.sub(STEPS, r"\1 = 4", (folder / name).read_text())
        text = re.sub(r"(?m)^(rows|prompts|eval_rows|warmup_steps|eval_prompts) = .*$", r"\1 = 4", text)
        if name == "demo.toml":
            for key, value in SMALL.items():
                text = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
            text = text.replace("layers = 5\nexperts = 12", "layers = 5\nexperts = 4")
            text = text.replace("layers = 4\nexperts = 8\ntop_k = 2", "layers = 3\nexperts = 2\ntop_k = 1")
            text = text.replace("min_depth = 4", "min_depth = 3").replace("top_k = 6", "top_k = 3")
        if name == "demo_pipeline.toml":
            text = re.sub(r"(?s)\[domains\.multiples.*?(?=\[common\])", '[common.runtime]\nisolate = "none"\n\n', text)
            text = text.replace("threads = 2", "threads = 1")
            text = text.replace('form = "full"', 'form = "full"\nkl_floor = 0.0')  # nothing is learnt here
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen processes, one after the other: minutes on a machine that others use
def test_the_demo_and_its_post_training(
    tmp_path: Path, recipes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "RECIPES", recipes)
    monkeypatch.setattr(demo, "SEARCH_HEAL_STEPS", 1)
    monkeypatch.setattr(demo, "LIMITS", Limits(max_total=0.9, max_active=0.9))
    monkeypatch.setattr(demo, "MAX_CODE_CHARS", 150_000)
    monkeypatch.setattr(demo, "MAX_EXERCISE_CHARS", 60_000)
    monkeypatch.setattr(demo, "passages", lambda: list(passages())[:40])
    run = tmp_path / "run"
    demo_command(run)
    page, shown = html.unescape((run / "report/report.html").read_text()), capsys.readouterr().out
    assert f"stretto serve {run}" in page and "Scores by domain" not in page
    assert {(each.size, each.prompt) for each in read_samples(run)} == set(product(("full", "half", "best"), PROMPTS))
    parts = ("text:", "pre-train", "measure", "search:", "extract", "heal", "export", "generate")
    order = [f"{number}/8  {part}" for number, part in enumerate(parts, 1)]
    order += ["The same prompts", "report: ", "serve every size"]
    places = [shown.index(words) for words in order]
    assert places == sorted(places), dict(zip(order, places, strict=True))
    assert f"demo --post -o {run}" in shown and not (run / "post").exists()
    demo_command(run, post=True)
    stages = [stage.stage for stage in history(read_lineage(run / "post/online/checkpoint"))]
    assert stages == ["pretrain", "extract", "heal", "sft", "rl", "rl", "merge", "distill", "online"]
    page = html.unescape((run / "report/report.html").read_text())
    for words in (
        "Scores by domain",
        "Change by stage",
        "online after distill",
        "Trivial baseline",
        "Teacher",
        "sums",
        "vendi",
    ):
        assert words in page, words
    assert f"stretto serve {run / 'post/online/checkpoint'}" in page
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    (run / "report/report.html").unlink()
    demo_command(run, post=True)  # all but that is done
    assert (run / "report/report.html").is_file()
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}


def stages_in(run: Path) -> list[Stage]:
    return [Stage("write", "data/result", lambda: write_text(run / "data" / "result", "done"))]


def test_fresh_deletes_only_what_a_demo_made(tmp_path: Path) -> None:
    other, run = tmp_path / "precious", tmp_path / "run"
    write_text(other / "data" / "thesis.tex", "x")
    with pytest.raises(UserError, match="precious: --fresh: nothing shows that this demo made the folder"):
        run_stages(other, stages_in, "data", fresh=True)
    assert (other / "data" / "thesis.tex").is_file()
    run.mkdir()  # an empty folder is fine
    run_stages(run, stages_in, "data", fresh=True)
    write_text(run / "data" / "result", "old")
    with pytest.raises(UserError, match="nothing shows that this demo"):
        run_stages(run, stages_in, "smol", fresh=True)
    run_stages(run, stages_in, "data", fresh=True)
    assert (run / "data" / "result").read_text() == "done"


def test_a_running_demo_is_not_deleted(tmp_path: Path) -> None:
    run, refused = tmp_path / "run", []

    def again() -> None:
        for fresh in (True, False):
            with pytest.raises(UserError, match="is running in it") as caught:
                run_stages(run, stages_in, "data", fresh)
            refused.append(caught.value)
        write_text(run / "data" / "result", "done")

    run_stages(run, lambda run: [Stage("write", "data/result", again)], "data", fresh=True)
    assert len(refused) == 2 and (run / "data" / "result").is_file()


def test_prompts_end_with_a_word() -> None:
    """A prompt that ends in a space makes the model continue in the middle of a word: its tokens begin with the space."""
    assert all(prompt == prompt.rstrip() for prompt in PROMPTS)
