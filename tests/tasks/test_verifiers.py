"""Task sets of the optional package `verifiers`; without the package only `test_without_the_package` runs."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import closing
from pathlib import Path

import pytest

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.tasks.session import tool_turn
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


SHELF = """
import verifiers.v1 as vf

class ShelfState(vf.State):
    things: list[str] = []

class Shelf(vf.Toolset[vf.ToolsetConfig, ShelfState]):
    async def setup_task(self, task):
        self.most = task.most

    @vf.tool
    async def put(self, thing: str, times: int = 1) -> str:
        "Put a thing on the shelf."
        if len(self.state.things) + times > self.most:
            raise ValueError("the shelf is full")
        self.state.things += [thing] * times
        return f"{len(self.state.things)} things"

class ShelfData(vf.TaskData):
    answer: str
    most: int = 3

class ShelfTask(vf.Task[ShelfData, ShelfState, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Shelf(vf.ToolsetConfig(CONFIG))]

    @vf.reward
    async def stands(self, trace) -> float:
        said = trace.last_message.content == self.data.answer
        calls = sum(len(node.message.tool_calls or ()) for node in trace.nodes if node.message.role == "assistant")
        return float(said and trace.state.things == ["cup"] * calls)

class ShelfTaskset(vf.Taskset[ShelfTask, vf.TasksetConfig]):
    def load(self):
        for number in range(8):
            yield ShelfTask(ShelfData(prompt=f"Put a cup there, then say {number}.", answer=str(number)), self.config.task)

__all__ = ["ShelfTaskset"]
"""


@needs_package
def test_tools_share_their_state_with_the_rewards_and_are_judged_by_repeating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shelf_a.py").write_text(SHELF.replace("CONFIG", ""))
    monkeypatch.syspath_prepend(tmp_path)
    source = VerifiersSource("v", VerifiersArgs(id="shelf_a"))
    source.validate()
    problem = source.problem(4)
    with closing(source.open(problem)) as session, closing(source.open(problem)) as other:
        [tool] = session.tools
        assert tool.name == "shelf_put" and tool.schema()["function"]["parameters"]["required"] == ["thing"]
        call = {"name": "shelf_put", "arguments": {"thing": "cup"}}
        turns = [{"role": "assistant", "content": "", "tool_calls": [{"function": call}]}, tool_turn(session, call)]
        assert turns[1]["content"] == "1 things" and session.digest() != other.digest()
        full = {"name": "shelf_put", "arguments": {"thing": "cup", "times": 9}}
        assert "the shelf is full" in tool_turn(session, full)["content"]
        assert tool.call({"times": 1}).outcome is Outcome.WRONG
    last = {"role": "assistant", "content": "4"}
    assert source.score(problem, Answer("4", (*turns, last))).ok
    ball = {"role": "assistant", "content": "", "tool_calls": [{"function": call | {"arguments": {"thing": "ball"}}}]}
    assert not source.score(problem, Answer("4", (ball, {"role": "tool", "name": "shelf_put"}, last))).ok


@needs_package
def test_a_tool_server_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shelf_b.py").write_text(SHELF.replace("CONFIG", "url='http://127.0.0.1:9'"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="needs the tool server Shelf in another process"):
        VerifiersSource("v", VerifiersArgs(id="shelf_b"))
