"""Answers that meet before a judge, of models that are known to be better, worse or the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.evals.battles import Battles
from stretto.post.battle import battle
from stretto.post.suite import RESULT_FILE, Evaluation
from stretto.post.suite_samples import SAMPLES_FILE, Sample
from stretto.report.comparison import battle_table
from stretto.tasks.judge import JudgedSource, JudgeFailed, ScriptedJudge
from tests.report.test_evals import evaluation

WORDS = [left + right for left in ("ash", "bay", "cob", "dew", "elm") for right in ("by", "er", "ly", "son", "ton")]
ITEMS = 12


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps({'prompt': f'Write about {at}.'})}\n" for at in range(ITEMS)))
    return path


def answered(tmp_path: Path, prompts: Path, name: str, lengths: list[int], num: int = 2) -> tuple[Evaluation, Path]:
    """An evaluation whose answers have so many different words, in turn: the scripted judge likes more better, up to forty."""
    suites = {"s": {"sources": {"stories": {"kind": "judged", "args": {"path": str(prompts), "judge": "scripted"}}}}}
    made = evaluation(name, {"stories": [0.5] * ITEMS})
    made = replace(made, asked={"suites": suites, "samples": num})
    rng, folder = np.random.default_rng(len(name)), tmp_path / name
    folder.mkdir()
    (folder / RESULT_FILE).write_bytes(msgspec.json.encode(made))
    lines = []
    for item in range(ITEMS):
        for number in range(num):
            text = " ".join(rng.permutation(WORDS)[: lengths[(item + number) % len(lengths)]])
            lines.append(Sample("stories", item, number, Outcome.OK, 0.5, text, "stop", 5, 5, 1, 1.0, 0.1))
    (folder / SAMPLES_FILE).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return made, folder


def met(*models: tuple[Evaluation, Path]) -> Battles:
    return battle([model for model, _ in models], [folder for _, folder in models])


def test_the_better_one_wins_and_itself_is_a_draw(tmp_path: Path, prompts: Path) -> None:
    good, poor = answered(tmp_path, prompts, "good", [20, 22, 8]), answered(tmp_path, prompts, "poor", [6, 7, 12])
    found = met(good, poor)
    rate = found.rates[0][1]
    assert rate is not None and rate.value == pytest.approx(2 / 3) and rate.low > 0.4
    assert found.strengths[1].value < 0 and found.strengths[1].high < 0
    assert found.itself is not None and found.itself.low <= 0.5 <= found.itself.high
    assert (found.num_problems, found.verdicts.num, found.verdicts.contradicted) == (ITEMS, 3 * ITEMS, 0)
    row = battle_table(found).rows[1]
    assert row[1].text.startswith("−") and row[2].text == "33 %" and row[3].text == "–"


def test_all_chapters_of_an_answer_meet(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = answered(tmp_path, prompts, "one", [20], 1)
    line = Sample(
        "stories", 0, 0, Outcome.OK, 0.5, "The end.", "stop", 5, 5, 2, 1.0, 0.1, turns=("A start.", "The end.")
    )
    (folder / SAMPLES_FILE).write_bytes(msgspec.json.encode(line) + b"\n")
    seen = set[str]()
    monkeypatch.setattr(JudgedSource, "duels", lambda self, problem, texts, pairs: [seen.update(texts) or (0.5, 0.5)])
    only = replace(model, domains={"stories": replace(model.domains["stories"], items=[0])})
    battle([only, only], [folder, folder])
    assert seen == {"A start.\n\nThe end."}


def test_a_model_against_its_twin_is_an_even_match(tmp_path: Path, prompts: Path) -> None:
    one = answered(tmp_path, prompts, "one", [20, 8, 15])
    found = met(one, one)
    rate = found.rates[0][1]
    assert rate is not None and rate.value == 0.5 and rate.low > 0.3 and rate.high < 0.7
    assert [each.value for each in found.strengths] == [0, 0]


def test_a_judge_that_likes_a_place_decides_nothing(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedJudge, "prefer", lambda *arguments: 1.0)  # whatever is shown first
    found = met(answered(tmp_path, prompts, "good", [20]), answered(tmp_path, prompts, "poor", [5]))
    rate = found.rates[0][1]
    assert found.verdicts.contradicted == 1 and rate is not None and rate.value == 0.5
    assert "100 %" in battle_table(found).note


def test_what_was_not_judged_is_no_battle(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = answered(tmp_path, prompts, "good", [20], 1), answered(tmp_path, prompts, "poor", [5], 1)
    meet = JudgedSource.duels

    def out(self: JudgedSource, problem: object, *rest: object) -> object:
        if getattr(problem, "item", 0) % every == 0:
            raise JudgeFailed("it is out")
        return meet(self, problem, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(JudgedSource, "duels", out)
    every = 2
    with pytest.raises(UserError, match=r"--battle: 1 comparisons could not be judged: it is out"):
        met(*models)
    monkeypatch.setattr("stretto.post.battle.MOST_INFRA", 0.1)
    every = 99
    found = met(*models)
    assert (found.verdicts.num_infra, found.num_problems, found.verdicts.num) == (1, ITEMS - 1, ITEMS)


def test_without_a_judge_there_is_no_battle(tmp_path: Path, prompts: Path) -> None:
    model, folder = answered(tmp_path, prompts, "one", [20])
    plain = replace(model, asked={"suites": {"s": {"sources": {"stories": {"kind": "tools"}}}}})
    with pytest.raises(UserError, match="--battle: no judged domain"):
        battle([plain, plain], [folder, folder])
