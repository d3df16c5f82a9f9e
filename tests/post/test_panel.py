"""The panel of a finished evaluation, and judges that may not judge."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import msgspec
import pytest

from stretto.base.errors import UserError
from stretto.base.records import Receipt, new_lineage, write_lineage
from stretto.base.trajectory import Outcome
from stretto.post.panel import judged_by, panels
from stretto.post.suite_samples import SAMPLES_FILE, Sample, read_samples
from stretto.post.suites import SuiteConfig, suites_of
from stretto.report.evals import chapters_table, overused_table, panel_table
from stretto.tasks.judge import JudgeFailed, ScriptedJudge
from stretto.tasks.task import Problem
from stretto.text.similar import similarity_NN

URL = "http://127.0.0.1:9/v1"

letters = partial(similarity_NN, kind="characters")


def suites(path: Path) -> dict[str, SuiteConfig]:
    sources = {
        "tales": {"kind": "judged", "args": {"path": str(path), "judge": "scripted"}},
        "sums": {"kind": "arithmetic"},
    }
    return suites_of({"suites": {"s": {"sources": sources}}})


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    brief = {"prompt": "Write of rain.", "constraints": {"words": [2, 4], "include": ["rain"]}}
    path.write_text(f"{json.dumps(brief)}\n{json.dumps({'prompt': 'Write.'})}\n")
    return path


def test_a_panel_counts_answers(tmp_path: Path, prompts: Path) -> None:
    texts = {0: ["<think>rain</think>The rain fell.", ""], 1: ["one two three", "one two three"]}
    lines = [
        json.dumps({"domain": "tales", "item": item, "number": number, "outcome": "ok", "reward": 0.5, "text": text, "finish": "stop",
                    "num_prompt": 1, "num_sampled": 1, "num_turns": 1, "entropy": 1.0, "seconds": 0.1})
        for item, own in texts.items() for number, text in enumerate(own)
    ]  # fmt: skip
    (tmp_path / SAMPLES_FILE).write_text("".join(f"{line}\n" for line in lines))
    assert next(iter(read_samples(tmp_path / SAMPLES_FILE).values())).outcome is Outcome.OK
    (found,) = panels(tmp_path, suites(prompts), letters, ["one two four"])
    assert found.domain == "tales" and found.num_empty == 1
    assert (
        found.kept is not None and found.kept.value == 0.5
    )  # both of the one that says something, none of the empty one
    assert found.measures["distinct_k"].value == 1 and found.measures["words"].value == 3
    assert found.measures["vendi"].value == pytest.approx(1)
    assert panel_table([found]).rows and not overused_table(found).rows


def test_a_table_without_constraints_constrains_nothing(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Write.", "constraints": {}}) + "\n")
    sample = Sample("tales", 0, 0, Outcome.OK, 0.5, "one two", "stop", 1, 1, 1, 1.0, 0.1)
    (tmp_path / SAMPLES_FILE).write_bytes(msgspec.json.encode(sample) + b"\n")
    (found,) = panels(tmp_path, suites(prompts), letters, None)
    assert found.kept is None and found.measures["words"].value == 2


def test_chapters_are_counted_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"judge": "scripted", "chapters": 2, "enough_words": 4}
    told = suites_of({"suites": {"s": {"sources": {"tales": {"kind": "judged", "args": args}}}}})
    first, loop = (
        "The rain fell on the old roof.",
        "It fell and it fell and it fell and it fell. The rain fell on the old roof.",
    )
    answers = [(first, loop), (first,), ("One two three four five.", "Six seven eight nine ten eleven.")]
    for item, turns in enumerate(answers):
        head = {
            "domain": "tales",
            "item": item,
            "number": 0,
            "outcome": "ok",
            "reward": 0.5,
            "text": turns[-1],
            "turns": turns,
        }
        counts = {"finish": "stop", "num_prompt": 1, "num_sampled": 1, "num_turns": 1, "entropy": 1.0, "seconds": 0.1}
        with (tmp_path / SAMPLES_FILE).open("a") as file:
            file.write(json.dumps(head | counts) + "\n")
    (found,) = panels(tmp_path, told, letters, None)
    long = found.chapters
    assert long is not None and long.num_short == 1 and long.measures["words"] == [6.0, 12.0]
    assert long.measures["again"] == [0.0, pytest.approx(4 / 15 / 2)]  # 4 of 15 runs, in one of two
    assert long.changes["points"].value == pytest.approx(long.measures["points"][1] - long.measures["points"][0])
    assert long.changes["points"].value < 0 < long.changes["repeats"].value
    assert panel_table([found]).rows[0][0].note == "1 end early"
    assert len(chapters_table("tales", long).rows) == 5 and found.measures["words"].value == pytest.approx(43 / 3)
    rate = ScriptedJudge.rate

    def fails(self: ScriptedJudge, problem: Problem, text: str, stop_s: float) -> float:
        if text == loop:
            raise JudgeFailed("it is out")
        return rate(self, problem, text, stop_s)

    monkeypatch.setattr(ScriptedJudge, "rate", fails)
    (rest,) = panels(tmp_path, told, letters, None)
    assert rest.chapters is not None and rest.chapters.num_short == 1 and rest.chapters.measures["words"] == [5.0, 6.0]


def test_who_may_not_judge(tmp_path: Path, prompts: Path) -> None:
    told = suites(prompts)
    kept = judged_by(told, URL, "evaluation-1", tmp_path)["s"].sources
    assert kept["tales"].args["judge"] == {"url": URL, "model": "evaluation-1"} and kept["tales"].args["rubric"]
    assert kept["sums"] == told["s"].sources["sums"]
    with pytest.raises(UserError, match=r"--judge http.*: reward-1 was trained to reward; evaluate with"):
        judged_by(told, URL, "reward-1", tmp_path)
    with pytest.raises(UserError, match="--judge: no suite has open-ended prompts"):
        judged_by(
            suites_of({"suites": {"s": {"sources": {"sums": {"kind": "arithmetic"}}}}}), URL, "evaluation-1", tmp_path
        )
    config = {"sources": {"tales": {"kind": "judged", "args": {"judge": {"url": f"{URL}/", "model": "m"}}}}}
    receipt = Receipt(stage="online", device="cpu")
    first = new_lineage(name="a", stage="online", total_params=1, active_params=1, receipt=receipt, config=config)
    write_lineage(
        tmp_path, new_lineage(name="b", stage="sft", total_params=1, active_params=1, receipt=receipt, parents=(first,))
    )
    with pytest.raises(
        UserError,
        match=r"--judge http.*: m rewarded .* in training, so its verdict would be biased; evaluate with another",
    ):
        judged_by(told, URL, "m", tmp_path)
    assert judged_by(told, URL, "other", tmp_path)
