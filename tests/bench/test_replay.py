"""The study of routing replay chooses rates on its first seed, and its verdicts follow the rewards."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import replay
from bench.common import predicted_routes
from bench.common.plain_loop import run_plainly
from bench.common.predicted_routes import BEFORE_KL, PREDICTED_KL, PredictedRoutes, PredictingTrainer
from bench.common.study import recorded, write_record
from stretto.api.rl import made_start
from stretto.base.errors import UserError
from stretto.learning.metrics import StepReport
from stretto.learning.trainer import TrainerRole
from stretto.ops.operators import ORDINARY, route

STUDY = replay.Study(("small",), (0, 1, 2), 0.1, ())


def results(rewards: dict[str, float]) -> dict[str, dict[str, Any]]:
    """All runs of a size: at 1e-3 each arm ends with its reward, at other rates with less."""
    found: dict[str, dict[str, Any]] = {"small-start": {}}
    for arm in replay.ARMS:
        for rate in replay.RATES:
            for seed in STUDY.seeds:
                last = rewards.get(arm, 0.5) - (0.0 if rate == 1e-3 else 0.1)
                run = {"rewards": [0.4] * 8 + [last] * 2, "k3": [1e-3] * 10}
                run |= {"predicted": [1e-4] * 10, "before": [1e-4] * 10} if arm == "PR2" else {}
                found[replay.name("small", arm, rate, seed)] = run
    return found


@pytest.mark.parametrize(
    ("rewards", "failures"),
    [
        ({"R3": 0.6}, []),
        ({"R3": 0.6, "none": 0.7}, ["small, R3: -0.100 of the reward of none"]),
        ({"R3": 0.15, **dict.fromkeys(("none", "TIS", "IcePop", "R2", "PR2"), 0.1)}, ["small, R3: 2 of 2 collapsed"]),
    ],
)
def test_verdicts_follow_the_rewards(rewards: dict[str, float], failures: list[str]) -> None:
    assert replay.show(STUDY, "small", results(rewards)) == failures


def test_a_seed_that_is_not_finished_is_left_out_and_named() -> None:
    found = results({"R3": 0.6})
    del found[replay.name("small", "TIS", 1e-3, 2)]
    assert replay.show(STUDY, "small", found) == ["small: seeds 2: not finished"]


def test_one_reported_seed_has_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    replay.show(STUDY, "small", {name: run for name, run in results({"R3": 0.6}).items() if not name.endswith("-2")})
    assert "inf" not in capsys.readouterr().out


def test_reported_runs_follow_the_search() -> None:
    found = {name: run for name, run in results({"R3": 0.6}).items() if name == "small-start" or name.endswith("-0")}
    planned = {run.name for run in STUDY.runs(found, Path())} - found.keys()
    assert planned == {replay.name("small", arm, 1e-3, seed) for arm in replay.ARMS for seed in (1, 2)}


def test_only_the_bias_of_the_choice_is_noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"blocks.0.mlp.bias_WE": torch.zeros(1, 8), "blocks.0.mlp.gate": torch.zeros(8, 4)}
    monkeypatch.setattr(replay, "fetch", lambda version: state)
    once, again, other = (replay.noisy(0.1, 3, SimpleNamespace(number=number)) for number in (1, 1, 2))
    name = "blocks.0.mlp.bias_WE"
    assert torch.equal(once[name], again[name]) and not torch.equal(once[name], other[name])
    assert 0.01 < float(once[name].std()) < 0.3 and not once["blocks.0.mlp.gate"].any() and not state[name].any()


def test_predicted_logits_choose_the_experts_but_not_their_gates() -> None:
    torch.manual_seed(0)
    x_ND, gate_ED, matrix_ED = torch.randn(20, 6), torch.randn(8, 6), torch.randn(8, 6)
    operators = PredictedRoutes({gate_ED: matrix_ED})
    with torch.no_grad():
        logits_NE = operators.router_logits(x_ND, gate_ED)
        routes = route(
            logits_NE, torch.zeros(8), None, 2, softmax=False, normalize=False, scaling=1.0, operators=operators
        )
    predicted_NE = x_ND @ (gate_ED + matrix_ED).T
    assert torch.equal(routes.chosen_NK.sort().values, predicted_NE.topk(2).indices.sort().values)
    assert not torch.equal(routes.chosen_NK.sort().values, logits_NE.topk(2).indices.sort().values)
    torch.testing.assert_close(routes.gates_NK, logits_NE.sigmoid().gather(1, routes.chosen_NK))
    own_NE = operators.router_logits(x_ND, gate_ED)  # an update: the router's own choice, unless it is replaced
    assert torch.equal(operators.highest(own_NE, 2), ORDINARY.highest(own_NE, 2))
    assert len(operators.predictions) == len(operators.later) == 1


@pytest.mark.slow
def test_predicted_routes_without_learning_are_r2_and_with_it_predict_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("start.steps=60", "train.steps=2", "train.prompts=4", "train.minibatches=4", "rollout.max_tokens=8")
    recipe = replay.Study(("small",), (0,), 0.0, settings).recipe("small", "PR2", 3e-3, 0)
    start = made_start(recipe, tmp_path / "made", device="cpu")

    def run(name: str, trainer: type[TrainerRole], rate: float) -> list[StepReport]:
        monkeypatch.setattr(predicted_routes, "RATE", rate)
        out = tmp_path / name
        return asyncio.run(run_plainly(recipe, out / "run", start, out / "checkpoint", open_trainer=trainer))

    def scalars(reports: list[StepReport], name: str) -> list[float]:
        return [report.scalars[name] for report in reports]

    plain, still, learning = (
        run("r2", TrainerRole, 0.0),
        *(run(f"pr2-{rate}", PredictingTrainer, rate) for rate in (0.0, 1e-3)),
    )
    for name in ("reward/mean", "optim/grad_norm", "policy/nll"):
        assert scalars(plain, name) == scalars(still, name)
    assert scalars(still, PREDICTED_KL) == scalars(still, BEFORE_KL)
    assert (
        learning[0].scalars[PREDICTED_KL] < learning[0].scalars[BEFORE_KL]
    )  # within a step the updates go on in one direction


def test_a_record_of_another_study_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, STUDY.identity, found := results({"R3": 0.6}))
    assert recorded(path, STUDY.identity) == found
    write_record(path, {**STUDY.identity, "noise": 0.2}, found)
    with pytest.raises(UserError, match="noise: of another study"):
        recorded(path, STUDY.identity)


def test_a_record_from_before_a_setting_existed_goes_on_with_its_default(tmp_path: Path) -> None:
    path, identity = tmp_path / "record.json", STUDY.identity
    tree = identity["recipe"].model_dump(mode="json")
    del tree["rollout"]["keep_cache"]
    write_record(path, {**identity, "recipe": tree}, found := results({"R3": 0.6}))
    assert recorded(path, identity) == found
    tree["rollout"]["max_batch"] = 7
    write_record(path, {**identity, "recipe": tree}, found)
    with pytest.raises(UserError, match="recipe: of another study"):
        recorded(path, identity)


def test_the_committed_record_gives_the_figures_that_the_documents_state() -> None:
    docs = Path(replay.__file__).parents[1] / "docs"
    record = json.loads((docs / "evidence" / "replay.json").read_text(encoding="utf-8"))
    runs, first = record["runs"], record["first_seed"]
    study = replay.Study(tuple(replay.SIZES), (first,), record["noise"], ())
    stated = (docs / "EVIDENCE.md").read_text(encoding="utf-8")
    for size in replay.SIZES:
        assert replay.show(study, size, runs) == []
        rates = replay.best_rates(runs, size, first)
        rate, seeds = rates["R3"], replay.finished_seeds(size, runs, rates, first)
        for arm in ("R3", "none"):
            reward = fmean(replay.at_end(runs[replay.name(size, arm, rate, seed)]) for seed in seeds)
            assert f"{reward:.3f}".removeprefix("0") in stated, f"{size}, {arm}"


def test_the_leads_at_one_rate_that_the_documents_state_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(replay.__file__).parents[1]
    monkeypatch.setattr(sys, "argv", ["replay", str(root / "docs" / "evidence" / "replay.json")])
    monkeypatch.delenv("COLUMNS", raising=False)
    replay.main()
    stated, readme = ((root / page).read_text(encoding="utf-8") for page in ("docs/EVIDENCE.md", "README.md"))
    (controls,) = re.findall(r"all arms at R3's rate, too:(.+?)\n- ", stated, re.DOTALL)
    tables = capsys.readouterr().out.split("all arms at ")[1:]
    assert len(tables) == len(replay.SIZES)
    for size, printed in zip(replay.SIZES, tables, strict=True):
        lines = printed.partition("PR2:")[0].splitlines()
        rows = [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines]
        headings, *_ = rows = [row for row in rows if row]
        cells = {row[0]: row[headings.index("R3 minus it")].replace("0.", ".") for row in rows}
        leads = [cells[arm] for arm in ("none", "TIS", "IcePop")]
        assert [lead for lead in leads if lead not in controls] == [], size
        means = [lead.split()[0].removeprefix("+") for lead in leads]
        if size != "small":
            assert f"[{means[0]}, {means[1]} and {means[2]}](docs/EVIDENCE.md#routing-replay" in readme
