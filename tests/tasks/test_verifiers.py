"""Needs the optional package; `test_without_the_package` is what runs elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.tasks.task import Answer
from stretto.tasks.verifiers import VerifiersArgs, VerifiersSource

HERE = importlib.util.find_spec("verifiers") is not None
needs_package = pytest.mark.skipif(not HERE, reason="the package verifiers is not installed")

TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: int

class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace) -> float:
        return float(trace.last_message.content.strip() == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_message.content) < 4)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)

    HOOK

class SumConfig(vf.TasksetConfig):
    size: int = 12

class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.size):
            yield SumTask(SumData(prompt=f"{i} + 3 =", answer=i + 3, system_prompt="Add."), self.config.task)

__all__ = ["SumTaskset"]
"""


def install(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, hook: str = "") -> None:
    (folder / f"{name}.py").write_text(TASKSET.replace("HOOK", hook))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.skipif(HERE, reason="the package verifiers is installed")
def test_without_the_package() -> None:
    with pytest.raises(UserError, match=r"sources\.v: kind: .*pip install 'stretto\[verifiers\]'"):
        VerifiersSource("v", VerifiersArgs(id="x"))


@needs_package
def test_a_task_set_validates_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "sums_a", monkeypatch)
    source = VerifiersSource("v", VerifiersArgs(id="sums_a", config={"size": 5}))
    assert source.num_items == 5
    source.validate()
    problem = source.problem(2)
    assert [m["role"] for m in problem.messages] == ["system", "user"] and problem.gold == "5"
    score = source.score(problem, Answer("5"))
    assert (score.reward, score.outcome) == (1.0, Outcome.OK)
    assert dict(score.parts) == {"right": 0.5, "short": 0.5, "turns": 1.0}
    wrong = source.score(problem, Answer("6"))
    assert (wrong.reward, wrong.outcome) == (0.5, Outcome.WRONG)


@needs_package
@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("NEEDS_CONTAINER = True", "a container"),
        ("async def setup(self, trace, runtime): pass", "a runtime in setup"),
        ("@vf.reward\n    async def ran(self, runtime) -> float: return 1.0", "a runtime in ran"),
    ],
)
def test_what_the_adapter_cannot_give_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str, said: str
) -> None:
    name = f"sums_{abs(hash(hook))}"
    install(tmp_path, name, monkeypatch, hook)
    with pytest.raises(UserError, match=said):
        VerifiersSource("v", VerifiersArgs(id=name))


@needs_package
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"id": "no_such_task_set"}, "no installed task set"),
        ({"id": "sums_b", "config": {"sizes": 3}}, "config.sizes"),
        ({"id": "sums_b", "gold_field": "gold"}, "set gold_field"),
    ],
)
def test_bad_arguments_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: dict[str, object], said: str
) -> None:
    install(tmp_path, "sums_b", monkeypatch)
    with pytest.raises(UserError, match=said) as caught:
        VerifiersSource("v", VerifiersArgs.model_validate(args)).validate()
    assert "\n" not in str(caught.value)


@needs_package
def test_a_reward_that_raises_is_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "sums_c", monkeypatch, "@vf.reward\n    async def odd(self, trace) -> float: return 1 / 0")
    source = VerifiersSource("v", VerifiersArgs(id="sums_c"))
    with pytest.raises(UserError, match=r"item 0: score\(\) raised"):
        source.validate()
