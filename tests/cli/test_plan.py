"""`stretto plan`: table, JSON, figure and page, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.planner.plan import plan
from stretto.report.plan import plan_figure
from tests.api.conftest import Run, refused
from tests.test_house import heavy_imports


def test_the_table_names_limit_and_origin(stretto: Run) -> None:
    result = stretto("plan", "small", "--gpus", "8xH200", "--sweep", "--price", "3")
    assert result.code == 0, result.err
    for words in ("8xH200", "predicted", "Limit", "8 ranks", "assumed, never measured"):
        assert words in " ".join(result.out.split())


def test_a_session_shows_the_table_of_the_command(stretto: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    found = plan("small", gpus="8xH200", sweep=True)
    assert repr(found) == str(found) == found.table.text()
    printed = stretto("plan", "small", "--gpus", "8xH200", "--sweep").out
    assert printed.rstrip() == repr(found) and "Limit" in printed
    assert found._repr_html_().startswith("<table><caption>small.toml on 8xH200: predicted")


def test_json_has_all_figures_and_the_files_are_written(stretto: Run, tmp_path: Path) -> None:
    picture, page = tmp_path / "plan.png", tmp_path / "plan.html"
    result = stretto("plan", "rl_gym", "--gpus", "4xH100", "--verdict-s", "2", "--json", "-o", picture)
    tree = json.loads(result.out)
    assert tree["status"] == "predicted" and tree["kind"] == "rl"
    assert tree["layouts"][0]["fits"] and {"weights", "optimiser"} <= tree["layouts"][0]["memory"].keys()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert stretto("plan", "small", "--gpus", "4xA100", "-o", page).code == 0
    assert "4xA100" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["small", "--gpus", "64xH10"], ("--gpus 64xH10", "did you mean 'H100'?", "MI300X")),
        (["small", "--gpus", "64"], ("--gpus 64", "64xH100")),
        (["rl_gym", "--gpus", "4xH100", "--set", "trainer.ranks=3"], ("train.micro_rows 8", "trainer.ranks 3")),
        (["small", "--gpus", "4xH100", "--set", "train.ep=8"], ("ep 8", "4 ranks")),
        (["small", "--gpus", "4xH100", "--price", "-1"], ("--price -1",)),
        (["small", "--gpus", "4xH100", "--model", "runs/x"], ("--model",)),
        (["small", "--gpus", "4xH100", "-o", "plan.txt"], ("plan.txt", ".png")),
        (["pipeline", "--gpus", "4xH100"], ("pipeline", "`stretto run`")),
        (["heal", "--gpus", "4xH100"], ("heal", "`stretto heal`")),
        (["rl_gym", "--gpus", "4xH100", "--answer-tokens", "-3"], ("--answer-tokens: must",)),
        (["rl_gym", "--gpus", "4xH100", "--answer-tokens", "9999"], ("--answer-tokens 9999", "rollout.max_tokens")),
        (["rl_gym", "--gpus", "4xH100", "--prompt-tokens", "9999"], ("--prompt-tokens 9999", "train.seq_len")),
        (["rl_gym", "--gpus", "1xH100", "--set", "trainer.ranks=2"], ("2 trainer ranks leave 0",)),
        (["elasticize", "--gpus", "1xH100"], ("--model: missing; name the run or checkpoint to elasticize",)),
        (
            ["elasticize", "--gpus", "1xH100", "--model", "runs/x", "--set", "model.max_positions=64"],
            ("model: unknown key (from the setting model.max_positions=64)",),
        ),
        (
            ["small", "--gpus", "8xH100", "--answer-tokens", "50"],
            ("--answer-tokens: only a plan of RL uses it", "leave"),
        ),
        (["small", "--gpus", "8xH100", "--verdict-s", "2"], ("--verdict-s: only a plan of RL uses it",)),
        (["nothing", "--gpus", "4xH100"], ("nothing", "no such recipe")),
    ],
)
def test_bad_input_is_one_line(stretto: Run, arguments: list[str], words: tuple[str, ...]) -> None:
    refused(stretto("plan", *arguments), *words)


@pytest.mark.parametrize(("gpus", "hours"), [("2xcpu", "Core-hours"), ("2xH100", "GPU-hours")])
def test_the_hours_are_those_of_the_hardware(stretto: Run, tmp_path: Path, gpus: str, hours: str) -> None:
    page = tmp_path / "plan.html"
    shown = stretto("plan", "small", "--gpus", gpus, "-o", page).out + page.read_text(encoding="utf-8")
    other = {"Core-hours": "GPU-hours", "GPU-hours": "Core-hours"}[hours]
    assert shown.count(hours) >= 3 and other not in shown, "table, headline and table of the page"


def test_the_network_of_a_pre_training_recipe_may_come_from_settings(stretto: Run, recipe: Path) -> None:
    model, rest = recipe.read_text().split("[elastic]", 1)
    keys = [line.replace(" ", "") for line in model.splitlines() if "=" in line]
    recipe.write_text(f"[elastic]{rest}")
    settings = [word for key in keys for word in ("--set", f"model.{key}")]
    planned = stretto("plan", recipe, "--gpus", "1xH100", *settings, "--json")
    assert planned.code == 0, planned.err
    tree = json.loads(planned.out)
    assert tree["kind"] == "pretrain"
    recipe.write_text(f"{model}[elastic]{rest}")
    assert json.loads(stretto("plan", recipe, "--gpus", "1xH100", "--json").out) == tree


def test_memory_is_drawn_at_the_scale_of_the_bars() -> None:
    small, large = (
        plan_figure(plan("small", "1xH100", settings=settings)).axes
        for settings in ([], ["model.num_experts=512", "model.expert_intermediate_size=4096"])
    )
    needed, texts = plan("small", "1xH100").best.peak / 2**20, [each.get_text() for each in small[0].texts]
    assert small[0].get_xlabel() == "MiB" and needed < small[0].get_xlim()[1] < 2 * needed
    assert any("an accelerator has 70 GiB" in each for each in texts)
    assert large[0].get_xlabel() == "GiB" and large[0].get_xlim()[1] > 70
    legend = small[1].get_legend()
    assert legend is not None and "kernel launches" in [each.get_text() for each in legend.get_texts()]


def test_planning_imports_no_torch() -> None:
    code = "import stretto\nstretto.plan('small', '8xH100', sweep=True)\nstretto.plan('rl_gym', '8xH100')"
    assert heavy_imports(code, ["torch", "transformers", "matplotlib"]) == []
