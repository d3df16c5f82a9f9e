"""The study of distillation against mixed RL: its plan, equal FLOPs, and the verdicts that follow from scores."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bench import distillation
from bench.common.measure import NO_INTERVAL
from bench.common.skills import Skill, SkillArgs
from bench.distillation import BASE, CANDIDATES, EXISTING, REGIMES, Plan, all_runs, plans_of, rows_of
from stretto.tasks.task import Answer

RECORD = {"settings": (), "problems": 10, "seeds": (0, 1, 2), "mutant": None}
FLOPS = {"expert": 100.0, "distil": 60.0, "merged": 60.0, "offline": 60.0, "mixed": 360.0}


def results(plans: list[Plan], scores: dict[str, float]) -> dict[str, dict[str, Any]]:
    """All runs: the second candidate of each arm is the best, and the arms have ``scores``."""
    found: dict[str, dict[str, Any]] = {}
    for plan in plans:
        for seed in plan.seeds:
            found[plan.run_name("sft", seed)] = {"scores": dict.fromkeys(plan.domains, 0.1)}
            for arm, candidates in plan.candidates.items():
                kind = arm.split("-")[0]
                for place, setting in enumerate(candidates):
                    score = scores.get(kind, 0.5) + 0.01 * seed - 0.1 * (place != 1)
                    run = {"scores": dict.fromkeys(plan.domains, score), "samples": 8, "flops": FLOPS[kind]}
                    found[plan.run_name(arm, seed, setting)] = run
    return found


def test_every_regime_is_a_pipeline_that_can_be_planned() -> None:
    for plan in plans_of(RECORD, list(REGIMES), Path()):
        assert {"sft", "distill"} | {f"experts/{domain}" for domain in plan.domains} <= plan.recipes.keys()
    assert len(plan.domains) == 6 and plan.name == "six"


def test_reported_runs_follow_the_search_and_shared_ones_are_planned_once() -> None:
    plans = plans_of(RECORD, [BASE, EXISTING], Path())
    found = {name: run for name, run in results(plans, {}).items() if "/0/" in name or name.endswith("sft")}
    ready = {run.name for run in all_runs(plans, found) if set(run.needs) <= found.keys()} - found.keys()
    best = str(CANDIDATES["expert"][1])
    assert ready == {f"{BASE}/{seed}/expert-{domain} {best}" for seed in (1, 2) for domain in plans[0].domains}
    everything = all_runs(plans, results(plans, {}))
    assert len({run.name for run in everything}) == len(everything)
    assert not any(run.name.startswith(EXISTING) and "mixed" not in run.name for run in everything)


def test_mixed_rl_has_the_flops_of_experts_and_distillation() -> None:
    plans = plans_of(RECORD, [BASE, EXISTING], Path())
    everything = {run.name: run for run in all_runs(plans, results(plans, {}))}
    steps_of_an_expert = plans[0].recipes["experts/sort"].train.steps
    for plan, budget in zip(plans, (3 * 100.0 + 60.0, 60.0), strict=True):
        name = plan.run_name("mixed", 1, CANDIDATES["mixed"][1])
        work = everything[name].work
        assert isinstance(work, partial)
        assert work.args[0].train.steps == round(budget / (100.0 / steps_of_an_expert))
        assert set(work.args[0].sources) == set(plan.domains)


def test_every_expert_has_the_rate_that_is_best_in_its_domain() -> None:
    (plan,) = plans_of(RECORD, [BASE], Path())
    found = results([plan], {})
    first, *_, last = CANDIDATES["expert"]
    for domain, setting in (("shift", first), ("sort", last)):
        found[plan.run_name(f"expert-{domain}", 0, setting)]["scores"] = {domain: 0.9}
    chosen = [plan.chosen(arm, found) for arm in plan.experts.values()]
    assert chosen == [CANDIDATES["expert"][1], first, last]


@pytest.mark.parametrize(("mixed", "num_behind"), [(0.4, 0), (0.5, 0), (0.6, 1)])
def test_the_verdict_follows_the_scores(mixed: float, num_behind: int) -> None:
    plans = plans_of(RECORD, [BASE], Path())
    failures = distillation.report(plans, results(plans, {distillation.OURS: 0.5, "mixed": mixed}))
    assert len(failures) == num_behind, failures


def test_one_reported_seed_gives_no_interval_and_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    plans = plans_of({**RECORD, "seeds": (0, 1)}, [BASE], Path())
    assert distillation.report(plans, results(plans, {distillation.OURS: 0.4, "mixed": 0.6})) == [NO_INTERVAL]
    shown = capsys.readouterr().out
    assert "inf" not in shown and "level" not in shown


def test_what_is_not_done_is_named() -> None:
    plans = plans_of(RECORD, [BASE], Path())
    found = results(plans, {})
    del found[plans[0].run_name("mixed", 2, CANDIDATES["mixed"][1])]
    assert distillation.report(plans, found) == ["base: not done yet: mixed"]


def test_a_mutant_teaches_each_domain_by_anothers_expert() -> None:
    (plan,) = plans_of({**RECORD, "mutant": "wrong-teachers"}, [BASE], Path())
    runs = {run.name: run for run in plan.runs(results([plan], {}))}
    work = runs[plan.run_name("distil", 1, CANDIDATES["distil"][1])].work
    assert isinstance(work, partial)
    teachers = work.args[0].distill.teachers
    assert "expert-shift" in teachers["reverse"].checkpoint and "expert-reverse" in teachers["sort"].checkpoint


@pytest.mark.parametrize(("mutant", "seen"), [(0.2, True), (0.5, False)])
def test_a_mutant_must_score_less_than_the_study_also_where_mixed_rl_is_ahead(mutant: float, seen: bool) -> None:
    plans = plans_of({**RECORD, "mutant": "wrong-teachers"}, [BASE], Path())
    scores = {distillation.OURS: 0.5, "mixed": 0.6}
    study = results([plan.study for plan in plans], scores)
    assert distillation.report(plans, study) == ["base: not done yet: merged"]
    failures = distillation.report(plans, study | results(plans, {**scores, distillation.OURS: mutant}))
    assert len(failures) == (0 if seen else 1), failures
    assert seen or "+0.000 ± 0.000; must be lower" in failures[0]


def test_a_mutant_trains_its_students_beside_the_whole_study() -> None:
    (plan,) = plans_of({**RECORD, "mutant": "wrong-teachers"}, [BASE], Path())
    study = results([plan.study], {})
    planned = {run.name for run in all_runs([plan], study)}
    assert planned >= {run.name for run in all_runs([plan.study], study)}
    mutants = {name.split("/")[2].split(" ")[0] for name in planned - study.keys()}
    assert mutants == {"distil-wrong-teachers", "merged-wrong-teachers"}


def test_a_judge_errs_in_its_share_of_the_verdicts_and_always_alike() -> None:
    sources = [Skill("sort", SkillArgs(skill="sort", error=error)) for error in (0.0, 0.25)]
    verdicts = [
        [[source.score(problem, Answer(text)).ok for text in (problem.gold, "1 2 3")] for problem in map(source.problem, range(400))]
        for source in sources
    ]  # fmt: skip
    assert all(right and not wrong for right, wrong in verdicts[0])
    errors = sum(one != other for pair in zip(*verdicts, strict=True) for one, other in zip(*pair, strict=True))
    assert 150 < errors < 250
    problem = sources[1].problem(3)
    assert len({sources[1].score(problem, Answer(problem.gold)).reward for _ in range(5)}) == 1


def test_the_committed_record_gives_the_figures_that_the_documents_state() -> None:
    docs = Path(distillation.__file__).parents[1] / "docs"
    record = json.loads((docs / "evidence" / "distillation.json").read_text(encoding="utf-8"))
    stated = (docs / "EVIDENCE.md").read_text(encoding="utf-8")
    plans = plans_of(record, ["base", "existing", "judge", "weak", "sparse", "lengths"], Path())
    assert distillation.report(plans, record["runs"]) == []
    for plan in plans:
        rows = rows_of(plan, record["runs"])
        gain = fmean(rows["merged"].minus(rows["mixed"]))
        assert f"{gain:+.3f}".replace("0.", ".").replace("-", "−") in stated, plan.name
    base = rows_of(plans[0], record["runs"])
    for arm in ("expert", "merged", "mixed"):
        assert f"{base[arm].scores_SD.mean():.3f}".removeprefix("0") in stated, arm
