"""Needs inspect_ai: an evaluation in this process, of a task whose agent catches every exception, as tau2's does."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

pytest.importorskip("inspect_ai", reason="the package inspect_ai is not installed")

from inspect_ai import Task, eval
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import Solver, TaskState, solver

from stretto.harness import inspect_model
from stretto.harness.inspect_model import StrettoAPI
from tests.harness.conftest import written


@solver
def deaf(num: int = 5) -> Solver:
    """Asks so often and goes on whatever happens."""

    async def solve(state: TaskState, generate: Any) -> TaskState:
        for _ in range(num):
            with suppress(Exception):
                state.output = await get_model().generate(state.messages)
        return state

    return solve


@scorer(metrics=[accuracy()])
def untouched() -> Any:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value="C")

    return score


def asked(checkpoint: Path, folder: Path, question: str = "The cat?", num: int = 5, **told: Any) -> EvalLog:
    task = Task(dataset=[Sample(input=question, target="")], solver=deaf(num), scorer=untouched())
    [log] = eval(task, model=f"stretto/{checkpoint}", display="none", log_dir=str(folder), max_tokens=4, **told)
    return log


def test_a_checkpoint_answers_at_the_size_that_is_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    small = asked(Path(f"{checkpoint}:small"), tmp_path)
    assert small.status == "success" and small.samples and small.samples[0].scores
    assert small.samples[0].output.metadata and small.samples[0].output.metadata["elastic"]["subnet"] == "small"
    other = asked(checkpoint, tmp_path, extra_body={"elastic": {"top_k": 1}})
    assert other.samples and other.samples[0].output.metadata
    assert other.samples[0].output.metadata["elastic"]["asked"] == "top_k=1"


def dying(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine fails at its next step."""
    inspect_model._opened.cache_clear()
    app, _ = inspect_model._opened(str(checkpoint))

    def fail() -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(app.state.service._engine, "step", fail)


@pytest.mark.parametrize("num", [5, 1])
def test_an_engine_that_dies_is_an_error_though_the_agent_catches_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    dying(checkpoint, monkeypatch)
    log = asked(checkpoint, tmp_path, num=num)
    assert log.status == "error" and log.results is None
    assert log.samples and log.samples[0].error and not log.samples[0].scores
    assert any(event.event == "info" and "no memory left" in str(event.data) for event in log.samples[0].events)


def test_without_the_guard_the_same_death_scores_100(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying(checkpoint, monkeypatch)
    monkeypatch.setattr(inspect_model, "_end_sample", AsyncMock())
    log = asked(checkpoint, tmp_path)
    assert log.status == "success" and log.results and log.results.scores[0].metrics["accuracy"].value == 1.0


def test_a_task_longer_than_the_context_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    inspect_model._opened.cache_clear()
    log = asked(checkpoint, tmp_path, question="policy " * 600)
    assert log.status == "error"
    assert log.samples and "exceed this server's context of 512 tokens" in log.samples[0].model_dump_json()


def test_what_cannot_be_opened_is_told_in_a_line(checkpoint: Path, tmp_path: Path) -> None:
    for name, problem in {
        f"{checkpoint}:smal": "no preset 'smal' \\(did you mean 'small'\\?\\); known: full, small",
        f"{checkpoint}:nosuch": "no preset 'nosuch'; known: full, small",
        "http://127.0.0.1:9": "no server of models answers there",
        f"{written(tmp_path, None)}": "chat_template: the tokenizer has none",
        f"{tmp_path / 'nowhere'}:small": "nowhere",
        f"{tmp_path / 'nowhere'}": "nowhere: config.json",
    }.items():
        with pytest.raises(PrerequisiteError, match=problem):
            StrettoAPI(name, config=GenerateConfig())
    for told, problem in (({"dtype": "float33"}, "-M: dtype"), ({"max_bach": 3}, "max_bach: unknown key")):
        with pytest.raises(PrerequisiteError, match=problem):
            StrettoAPI(str(checkpoint), config=GenerateConfig(), **told)
