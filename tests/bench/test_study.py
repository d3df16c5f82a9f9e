"""A record of the study of elastic pre-training prints the same verdicts as the folder that it was written from."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bench import async_speed, distillation, keep_cache, real_sizes, replay, study
from bench.common.rate_search import search, searched_before
from bench.common.study import RESULT, Results, Run, _do, carry_out, is_record, without_lost, write_record
from bench.common.study_picture import draw
from bench.common.study_runs import NUM_RANDOM, Trunk, shared_share, train
from stretto.base import track
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.base.track import read_metrics
from stretto.train.recipe import Recipe

ROOT = Path(study.__file__).parents[1]


def results(gap: float) -> dict[str, dict[str, Any]]:
    """Results of two seeds, in which the elastic full network is ``gap`` nats above the ordinary one."""
    sizes = {"full": 2.0, "large": 2.1, "half": 2.2, "corner": 2.4}
    flops = {"full": 4.0, "large": 3.0, "half": 2.0, "corner": 1.0}
    randoms = {f"random-{number}": 2.3 for number in range(NUM_RANDOM)}
    found: dict[str, dict[str, Any]] = {}
    for arm in study.TRAINED:
        for rate in study.RATES:
            found[f"search-{arm}-x{rate:g}"] = {"select": {"full": 3.0 + (rate - 2) ** 2}, "report": {"full": 3.0}}

    def trained(report: dict[str, float], executed: float, per_token: dict[str, float]) -> dict[str, Any]:
        return {"report": report, "flops": executed, "token_flops": per_token, "parameters": 2e6, "tokens": 1e6}

    per_token = flops | dict.fromkeys(randoms, 1.5)
    for arm, more in {
        "elastic": gap,
        "ernie": 0.1,
        "ordinary": 0.0,
        "emo": 0.0,
        "ordinary+": 0.0,
        "ernie+": 0.1,
        "single": 0.05,
        "single+": 0.05,
        "grown": 0.02,
        "grown+": 0.02,
    }.items():
        losses = {name: loss + more for name, loss in (sizes | randoms).items()}
        found[f"{arm}-1"] = trained(losses, 110.0 if arm == "elastic" else 100.0, per_token)
    for arm in study.MAXIMUM:
        found[f"experts-{arm}-1"] = {"report": {"kept-16": 2.1, "pooled-16": 2.05}}
    losses = {"ours": 2.1, "published": 2.1, "reap": 2.1, "frequency": 2.2, "random-0": 2.3, "random-1": 2.4}
    found["criteria-1"] = {"report": losses}
    found["continued-1"] = {"report": sizes, "flops": 10.0}
    for size in study.SIZES:
        found[f"scratch-{size}-1"] = trained({"full": sizes[size]}, 25 * flops[size], {"full": flops[size]})
        for parent in ("elastic", "ordinary", "emo"):
            found[f"heal-{parent}-{size}-1"] = {"report": {"full": sizes[size] - 0.01}, "flops": 1.0}
        found[f"marginal-{size}-1"] = trained({"full": sizes[size] + 0.5}, 5.0, {"full": flops[size]})
    return found


@pytest.mark.parametrize(("gap", "missed"), [(0.01, 0), (0.025, 1)])
def test_a_record_has_the_verdicts_of_the_aims(gap: float, missed: int, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"seeds": [0, 1], "rates": study.RATES, "mutant": None, "runs": results(gap)}))
    arms, runs = study.read_record(record)
    assert arms.rate("elastic", runs) == 2 and arms.reported == (1,)
    failures = study.report(arms, runs)
    assert len(failures) == missed, failures


def test_a_comparison_has_the_seeds_that_have_its_arms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(track, "PIPE_COLUMNS", 200)  # no cell is wrapped
    found = results(0.025)
    for arm in ("ernie", "ernie+", "heal-emo-half", "experts-elastic", "criteria"):
        del found[f"{arm}-1"]
    failures = study.report(study.Arms((0, 1, 2), None, study.RATES), found)
    second = [name.replace("-1", "-2") for name in results(0.0) if name.endswith("-1")]
    told, _, names = failures[0].partition(": ")
    assert told == f"the record lacks {5 + len(second)} runs" and len(failures) == 2
    first = {"ernie-1", "ernie+-1", "heal-emo-half-1", "experts-elastic-1", "criteria-1"}
    assert set(names.split(", ")) == first | set(second)
    shown = " ".join(capsys.readouterr().out.split())
    assert "elastic full − ordinary, equal tokens │ +0.0250 │ │ ≤ 0.02 │ 1 │" in shown
    assert "ERNIE" not in shown and "kept by" not in shown
    assert "EMO; sizes cut, both healed │ -0.025 │ +0.000 │ │ +0.000 │ │ 1 │" in shown, "no healed half of EMO"
    assert "half, healed − scratch │ -0.0100" in shown


@pytest.mark.slow
def test_a_picture_has_the_arms_that_are_done(tmp_path: Path) -> None:
    everything = results(0.01)
    without = {name: each for name, each in everything.items() if not name.startswith(("heal-emo", "scratch-half"))}
    for name, found in {"all": everything, "some": without, "none": {}}.items():
        rows, _ = study.rows_of(study.Arms((0, 1), None, study.RATES), found)
        draw(rows, list(study.SIZES), tmp_path / f"{name}.png")
    sizes = [(tmp_path / f"{name}.png").stat().st_size for name in ("all", "some", "none")]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3


@pytest.mark.parametrize(("gap", "missed"), [(0.2, []), (0.05, ["half", "corner"])])
def test_untrained_sizes_must_be_much_worse_than_trained_alone(gap: float, missed: list[str]) -> None:
    arms, found = study.Arms((0, 1), "no-anchors", study.RATES), results(0.0)
    failures = study.report(arms, found | {"elastic-no-anchors-1": untrained(found, gap)})
    assert [each.split(",")[0] for each in failures] == missed, failures


def test_untrained_sizes_must_be_done_with_every_reported_seed() -> None:
    arms, found = study.Arms((0, 1, 2), "no-anchors", study.RATES), results(0.0)
    for gap, missed in ((0.2, []), (0.05, ["+0.0500, must be above 0.1"])):
        failures = study.report(arms, found | {"elastic-no-anchors-1": untrained(found, gap)})
        expected = ["done in 1 of 2 reported seeds", *missed]
        assert failures == [
            f"{size}, zero-shot − scratch, no-anchors: {each}" for size in ("half", "corner") for each in expected
        ]
    for runs in (found, {}):
        assert study.report(arms, runs)[0] == "half, zero-shot − scratch, no-anchors: done in 0 of 2 reported seeds"


def untrained(found: Results, gap: float) -> dict[str, Any]:
    """Result of the elastic arm with every loss higher by ``gap``."""
    elastic = found["elastic-1"]
    return elastic | {"report": {name: loss + gap for name, loss in elastic["report"].items()}}


def test_a_folder_that_lacks_runs_can_go_on(tmp_path: Path) -> None:
    recipe: Any = read_recipe(study.RECIPE, Recipe, [])
    info: Any = None  # the report does not read it
    found = results(0.01)
    del found["criteria-1"]
    planned = study.Study((0, 1), None, study.RATES, tmp_path, info, recipe, ())
    assert study.report(planned, found) == ["1 run: criteria-1: missing; run the command again"]


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_only_the_chosen_arms_are_trained(share: float, tmp_path: Path) -> None:
    info: Any = None  # the plan does not read it
    recipe = read_recipe(study.RECIPE, Recipe, [f"elastic.anchor_share={share}"])
    anchors = dict.fromkeys(study.SIZES, recipe.elastic.anchors["corner"])
    recipe = recipe.replace(elastic=recipe.elastic.replace(anchors=anchors, anchor_weights=study.PARTS))

    def planned(*arms: str) -> set[str]:
        runs = study.Study((0, 1), None, (1.0,), tmp_path, info, recipe, arms).runs(found)
        return {run.name for run in runs}

    found: dict[str, dict[str, Any]] = {
        f"search-{arm}-x1": {"select": {"full": 3.0}, "flops": 5.0, "tokens": 100} for arm in study.SEARCHED
    }
    found["search-elastic-x1"]["flops"] = 6.0
    for arm in study.TRAINED:
        found[f"{arm}-1"] = {"flops": 6.0 if arm == "elastic" else 5.0, "lr": recipe.optim.lr, "tokens": 100}
    names = {"search-elastic-x1", "search-ordinary-x1", "elastic-1", "ordinary-1"}
    assert planned("elastic", "ordinary", "ordinary+") == names | {"ordinary+-1"}
    assert planned("ernie", "ernie+") == {"search-ernie-x1", "ernie-1", "ernie+-1"}
    healed = {f"heal-{parent}-{size}-1" for parent in ("elastic", "ordinary") for size in study.SIZES}
    assert planned("elastic", "ordinary", "heal") == names | healed
    assert planned("scratch-half") == {"search-scratch-half-x1", "scratch-half-1"}
    assert planned("elastic", "scratch-half", "heal-elastic-half") == {
        *("search-elastic-x1", "search-scratch-half-x1", "elastic-1", "scratch-half-1", "heal-elastic-half-1"),
    }
    assert planned(*study.ARMS) > names | {"experts-emo-1", "criteria-1", "search-continued-x1", "continued-1"}
    assert not {"experts-emo-1", "experts-ernie-1"} & planned("elastic", "experts")
    del found["single-1"]
    found["search-single-x1"]["tokens"] = 25
    assert planned("single", "single+") == {"search-single-x1", "single-1", "single+-1"}
    runs = study.Study((0, 1), None, (1.0,), tmp_path, info, recipe, ("single+",)).runs(found)
    assert [run.name for run in runs] == ["search-single-x1", "single+-1"]
    _, longer, *_ = runs[1].work.args  # type: ignore[attr-defined]
    # 5 FLOPs for 25 tokens: 20 for the 100 of the elastic network, which took 6
    assert longer.train.steps == round(0.3 * recipe.train.steps)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_longer_run_begins_with_an_ordinary_one_that_is_there(is_there: bool, tmp_path: Path) -> None:
    recipe = read_recipe(study.RECIPE, Recipe, [])
    info: Any = SimpleNamespace(data_hash="one")
    one = {"flops": 5.0, "tokens": 100, "lr": recipe.optim.lr}
    found = {f"search-{arm}-x1": {"select": {"full": 3.0}, **one} for arm in study.SEARCHED}
    found |= {"elastic-1": {**one, "flops": 6.0}, "ordinary-1": one}
    if is_there:
        (tmp_path / "ordinary-1").mkdir()
    (run,) = study.Study((0, 1), None, (1.0,), tmp_path, info, recipe, ("ordinary+",)).runs(found)
    assert run.name == "ordinary+-1" and (run.starts_with is not None) == is_there


def test_the_search_smooths_over_equal_rates() -> None:
    losses = {1: 5.30, 2: 5.20, 4: 5.20, 8: 5.19}  # the last one is the lowest by noise
    arms = study.Arms((0, 1), None, tuple(losses))
    found = {f"search-ordinary-x{rate}": {"select": {"full": loss}} for rate, loss in losses.items()}
    assert arms.rate("ordinary", found) == 4
    assert arms.rate("ordinary", {}) is None


def test_a_longer_study_takes_the_rates_of_a_shorter_one(tmp_path: Path) -> None:
    record = tmp_path / "short.json"
    write_record(record, {"seeds": [0, 1], "rates": list(study.RATES)}, results(0.0))
    found = searched_before(record, 0, study.RATES)
    assert {name.split("-")[0] for name in found} == {"search"}, "other results have another length"
    arms = study.Arms((0, 7), None, study.RATES)
    assert [arms.rate(arm, found) for arm in study.TRAINED] == [2.0] * len(study.TRAINED)
    for seed, rates, field in ((1, study.RATES, "seeds"), (0, (1.0, 2.0), "rates")):
        with pytest.raises(UserError, match=rf"short\.json: {field}: its search began with .* --{field} the same"):
            searched_before(record, seed, rates)


def test_another_schedule_takes_the_controls_of_a_record_and_nothing_else(tmp_path: Path) -> None:
    recipe = read_recipe(study.RECIPE, Recipe, [])
    info: Any = SimpleNamespace(data_hash="one")
    old, other = (
        recipe.replace(elastic=recipe.elastic.replace(starts_at=0.9)),
        recipe.replace(model=recipe.model.replace(vocab_size=64)),
    )
    kept = ["experts-ordinary-1", "heal-emo-half-1", "ordinary-1", "scratch-half-1", "search-ordinary-x1"]
    others = ["search-elastic-x1", "ordinary+-1", "elastic-1", "ernie-1", "heal-elastic-half-1", "experts-ernie-1"]
    runs = {name: {"flops": 1} for name in (*kept, *others, "marginal-half-1", "continued-1")}
    record = tmp_path / "old.json"
    planned = study.Study((0, 1), None, study.RATES, tmp_path, info, old, ())
    write_record(record, {**study.identity(planned), "seeds": [0, 1], "rates": [1]}, runs)
    controls = study.read_controls(record, replace(planned, recipe=recipe))
    assert sorted(controls) == kept
    with pytest.raises(UserError, match="recipe: of another study"):
        study.read_controls(record, replace(planned, recipe=other))
    with pytest.raises(UserError, match=r"none\.json"):
        study.read_controls(tmp_path / "none.json", planned)


def test_a_finished_run_of_another_learning_rate_is_refused(tmp_path: Path) -> None:
    def plan(results: Results) -> list[Run]:
        return [Run("one", _nothing, lr=0.01)]

    assert carry_out(plan, tmp_path, jobs=1, minutes=1, recorded={"one": {"lr": 0.01}}) == {"one": {"lr": 0.01}}
    with pytest.raises(UserError, match=r"one: trained at lr 0\.02, the search now chooses 0\.01; remove the run"):
        carry_out(plan, tmp_path, jobs=1, minutes=1, recorded={"one": {"lr": 0.02}})


@pytest.mark.slow
def test_a_run_that_begins_with_the_steps_it_shares_is_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"the square of {n} is {n * n}; " * 20}) for n in range(200)))
    small = ("model.vocab_size=300", "train.rows=4", "train.seq_len=32", "train.log_every=1")
    told = ["study", tmp_path / "study", "--data", text, "--tokens", 20 * 4 * 32, "--eval-rows", 16, "--seeds", 0, 1]
    monkeypatch.setattr(sys, "argv", [*map(str, told), *(word for each in small for word in ("--set", each))])
    planned = study.open_study(study._parse())
    recipes = {arm: planned.recipe_of(arm, 1.0, 1) for arm in ("ordinary", "elastic", "ordinary+")}
    recipes["ordinary+"] = planned.recipe_of("ordinary+", 1.0, 1, 1.2)
    ordinary = planned.out / "ordinary"
    train(planned.info, recipes["ordinary"], False, None, ordinary)
    for arm, last_shared in (("elastic", 8), ("ordinary+", 13)):
        trunk = Trunk(ordinary, recipes["ordinary"].train, shared_share(recipes[arm]))
        assert trunk.last_snapshot.name == f"step-{last_shared:07d}" and trunk.last_snapshot.is_dir()
        whole = train(planned.info, recipes[arm], False, None, planned.out / f"{arm}-whole")
        assert train(planned.info, recipes[arm], False, trunk, planned.out / arm) == whole
        first = read_metrics(planned.out / arm)[0]["step"]
        assert first == last_shared + 1, "steps that are shared are not trained again"


@pytest.mark.parametrize(
    ("best", "tried"),
    [(8, (4, 8, 16)), (0.5, (0.25, 0.5, 1)), (2, (1, 2, 4))],
)
def test_the_search_goes_on_beyond_an_end_that_is_best(best: float, tried: tuple[float, ...]) -> None:
    arms, found = study.Arms((0, 1), None, (1, 2, 4)), dict[str, dict[str, Any]]()
    while (chosen := arms.rate("ordinary", found)) is None:
        for rate in search("ordinary", arms.rates, found)[0]:
            loss = 5 + (math.log2(rate) - math.log2(best)) ** 2
            found[f"search-ordinary-x{rate:g}"] = {"select": {"full": loss}}
    assert chosen == best and search("ordinary", arms.rates, found)[0] == tried
    assert study.Arms((0, 1), None, (1, 2)).rate("ordinary", found) == min((1, 2), key=lambda rate: abs(rate - best))


def test_losses_far_from_the_minimum_do_not_choose_the_rate() -> None:
    """Those of the arm ernie at 8.2M tokens: a parabola through all four chose 2."""
    losses = {1: 4.4558, 2: 4.4346, 4: 4.4106, 8: 4.4964}
    found = {f"search-ernie-x{rate}": {"select": {"full": loss}} for rate, loss in losses.items()}
    assert search("ernie", (1, 2, 4), found) == ((2, 4, 8), 4)


def test_a_search_whose_windows_point_at_each_other_ends() -> None:
    losses = {1: 5.0, 2: 4.9, 4: 4.89, 8: 6.9}  # (1, 2, 4) chooses 4, and (2, 4, 8) chooses 2
    found = {f"search-emo-x{rate}": {"select": {"full": loss}} for rate, loss in losses.items()}
    assert search("emo", (2, 4, 8), found)[1] != 4
    assert search("emo", (1, 2, 4), found) == ((1, 2, 4), 4)


def test_a_file_that_is_no_record_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match="no record of this study"):
        study.read_record(tmp_path / "other.json")


@pytest.mark.parametrize("bench", [async_speed, distillation, keep_cache, real_sizes, replay, study])
def test_a_study_of_one_seed_is_refused_before_it_starts(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["study", str(tmp_path / "out"), "--seeds", "3"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    told = "--seeds: the first seed only searches; name a second one, which is reported\n"
    assert ended.value.code == 2 and capsys.readouterr().err == told
    assert not (tmp_path / "out").exists()


def test_a_record_of_one_seed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"seeds": [0], "rates": [1], "mutant": None, "runs": {}}))
    with pytest.raises(UserError, match=r"one\.json: seeds: the first seed only searches"):
        study.read_record(tmp_path / "one.json")


def test_a_missing_record_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such record"):
        is_record(tmp_path / "record.json")
    assert not is_record(tmp_path) and not is_record(tmp_path / "new")


def test_the_committed_record_prints_the_misses_that_the_documents_state() -> None:
    record = Path(study.__file__).parents[1] / "docs" / "evidence" / "study_2M_2M.json"
    missed = study.report(*study.read_record(record))
    assert [line.split(":")[0] for line in missed] == [
        "the record lacks 12 runs",
        "elastic full − ordinary, equal tokens",
        "elastic full − ordinary, equal FLOPs",
        "random Subnets in which ernie is not worse than ours, equal FLOPs",
    ]


def test_a_recorded_run_is_repeated_only_for_a_folder_that_an_unfinished_run_needs(tmp_path: Path) -> None:
    parent, other = {"report": {}, "seconds": 1.0}, {"report": {}, "seconds": 2.0}

    def plan(results: Any) -> list[Run]:
        return [Run("parent", _nothing), Run("other", _nothing), Run("child", _nothing, needs=("parent",))]

    recorded = {"parent": parent, "other": other}
    assert without_lost(plan, recorded, tmp_path) == {"other": other}
    assert without_lost(plan, recorded | {"child": other}, tmp_path) == recorded | {"child": other}
    (tmp_path / "parent").mkdir()
    assert without_lost(plan, recorded, tmp_path) == recorded


@pytest.mark.slow
def test_a_recorded_run_is_repeated_for_a_run_that_is_planned_later(tmp_path: Path) -> None:
    def plan(results: Any) -> list[Run]:
        later = [Run("child", _nothing, needs=("parent",))] if "other" in results else []
        return [Run("parent", _nothing), Run("other", _nothing), *later]

    results = carry_out(plan, tmp_path, jobs=1, minutes=1, recorded={"parent": {"seconds": 7.0}})
    assert sorted(results) == ["child", "other", "parent"] and (tmp_path / "parent").is_dir()
    assert results["parent"]["seconds"] != 7.0


def test_snapshots_are_kept_only_where_other_runs_begin_with_them(tmp_path: Path) -> None:
    for run in (Run("ended", _snapshot), Run("begins others", _snapshot, keeps_snapshots=True)):
        assert _do(run, tmp_path)["losses"] == 1
        assert (tmp_path / run.name / "snapshots").is_dir() == run.keeps_snapshots


@pytest.mark.slow
def test_a_run_starts_with_what_an_unfinished_one_has_left(tmp_path: Path) -> None:
    snapshot = tmp_path / "parent" / "snapshot"
    parent = Run("parent", _leaves_and_waits_for_child)
    child = Run("child", _nothing, needs=("parent",), starts_with=snapshot)
    results = carry_out(lambda results: [child, parent], tmp_path, jobs=2, minutes=1)
    assert sorted(results) == ["child", "parent"], "the parent fails if the child has not ended before it"


@pytest.mark.slow
def test_a_killed_process_ends_the_study_with_the_results_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [Run("first", _nothing), Run("killed", _killed, needs=("first",)), Run("last", _nothing, needs=("killed",))]
    results = carry_out(lambda results: plan, tmp_path, jobs=1, minutes=1)
    assert list(results) == ["first"] and "a process was killed" in capsys.readouterr().out
    again = carry_out(lambda results: [Run("first", _killed), Run("second", _nothing)], tmp_path, jobs=1, minutes=1)
    assert sorted(again) == ["first", "second"], "finished runs are not repeated"


@pytest.mark.slow
def test_the_processes_of_a_killed_study_end(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from bench.common.study import Run, carry_out; from tests.bench.test_study import _sleeps\n"
        "if __name__ == '__main__': carry_out(lambda results: [Run('one', _sleeps)], Path(sys.argv[1]), jobs=1, minutes=1)"
    )
    study = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT)
    pid_file = tmp_path / "one" / "pid"
    until(pid_file.exists)
    study.kill()
    study.wait()
    pid = int(pid_file.read_text())
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _sleeps(folder: Path) -> dict[str, Any]:
    with replacing(folder / "pid") as fresh:
        fresh.write_text(str(os.getpid()))
    time.sleep(1000)
    return {}


def _leaves_and_waits_for_child(folder: Path) -> dict[str, Any]:
    (folder / "snapshot").mkdir()
    until((folder.parent / "child" / RESULT).exists)
    return {}


def _killed(folder: Path) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _snapshot(folder: Path) -> dict[str, Any]:
    (folder / "snapshots" / "step-0000001").mkdir(parents=True)
    return {"losses": 1}


def _nothing(folder: Path) -> dict[str, Any]:
    return {}
