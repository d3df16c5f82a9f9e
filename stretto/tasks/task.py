"""Interface of a task source: problems by number, and a verdict on an answer. No torch, quick to import.

A task set of one's own is a class with `problem` and `score`; `TaskSource.validate` tries it before a run starts. What
several sets share is at the end: where in a text the answer is, and problems from files.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError, one_line
from stretto.base.trajectory import Outcome, StepReward
from stretto.data.sources import Rows, read_files
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.outcome import ToolResult

FIRST_REPORTED: Final = 3 << 22
"""Item of an endless source with which reports begin: beyond what runs train on, and beyond the held-out ones they are chosen by."""
_GARBAGE = "\u2205 no such answer \u2205"
_FAR_ITEM = 1_000_003
"""Of an endless source: a generator that holds a list gives its first problems, and fails hours into a run."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. Written by its source; the same for the same item on every machine."""

    item: int
    messages: tuple[Mapping[str, Any], ...]
    """What the model is asked: ``{"role": …, "content": …}``, the last one the user's."""
    gold: str
    """The last turn of a right answer as the model should write it, marks included: what SFT trains on."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What `TaskSource.score` needs besides; plain JSON values."""

    @classmethod
    def of(cls, item: int, question: str, answer: str, form: AnswerFormat, /, **payload: Any) -> Self:
        """One question, and its answer in the format that it asks for."""
        return cls(item, ({"role": "user", "content": ask(question, form)},), write_answer(answer, form), payload)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote. Written by the agent loop."""

    text: str
    """Its last turn, special tokens left out. An answer that ran into a limit is scored like any other: that it did
    not stop says nothing about whether it is right."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """All that followed the prompt, tool turns included, the last turn too; empty: that turn alone."""
    seed: int | None = None
    """Of this sample of the run, the same whenever it is judged again: for a verifier that draws. None: of no run."""


@dataclass(frozen=True, slots=True)
class Score:
    """A source's verdict. Whether the answer is right and whether it has the wanted form are two things: the first is
    ``outcome``, the second at most a part."""

    reward: float
    outcome: Outcome
    """OK: right. WRONG, TIMEOUT, CRASH: not, by the answer's own fault. INFRA: nobody knows."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """For the log, ``marked`` (the form was kept) among them."""
    detail: str = ""
    """One line for people: why it was refused."""
    sandbox_s: float = 0.0
    """Processor seconds in the sandbox."""
    steps: tuple[StepReward, ...] = ()
    """What turns, or steps within them, earned by themselves: for algorithms that give credit more finely."""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @classmethod
    def of(cls, right: bool, parts: Mapping[str, float] | None = None, detail: str = "") -> Score:
        """1 or 0."""
        return cls(float(right), Outcome.OK if right else Outcome.WRONG, parts or {}, detail)


@dataclass(frozen=True, slots=True)
class Tool:
    """Something the model may call between its turns."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    call: Callable[[Mapping[str, Any]], ToolResult]
    """Bad arguments are the model's mistake: an outcome of WRONG, never an exception."""

    def schema(self) -> dict[str, Any]:
        """As chat templates want it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class Session(ABC):
    """A problem under way: the tools of one sample, and what they have changed. One thread at a time uses it, not always
    the same; several sessions of a source are in use at once.

    Its state is what the problem, the seed and the calls so far make of it, in their order, and nothing else:
    `stretto.tasks.session.replay` brings a new session to the same state from the messages alone, which is how a killed agent's
    successor goes on, and how a verifier elsewhere comes to what it judges.
    """

    tools: tuple[Tool, ...]
    """The same from beginning to end, and in every session of the problem. Written by its constructor."""

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """As `TaskSource.reply`. It may look at the state and changes nothing."""
        return None

    @abstractmethod
    def score(self, answer: Answer) -> Score:
        """As `TaskSource.score`, of the state as it is now."""

    @property
    def is_over(self) -> bool:
        """A call has ended the episode: the model writes no more, and no other call of that turn is made."""
        return False

    def digest(self) -> str:
        """Of the state, the same on every machine; empty: calls change nothing."""
        return ""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Ends what the session started."""


class TaskSource(ABC):
    """A set of problems. Final methods: `validate`. State is what the constructor makes."""

    args_kind: ClassVar[type[Config]] = Config
    """What the recipe's ``args`` are validated as."""
    is_verifiable: ClassVar[bool] = True
    """Answers are right or wrong. False: they are better or worse, and a problem need not have a gold answer (empty then)."""

    def __init__(self, name: str, args: Config, sandbox: Sandbox | None = None) -> None:
        """
        Args:
            name: of the table in the recipe; messages begin with it.
            args: an ``args_kind``.
            sandbox: where programs run; sources that run none ignore it.
        """
        self.name = name
        self.args = args
        self.sandbox = sandbox

    @property
    def num_items(self) -> int | None:
        """Items are 0 up to this; None: endless."""
        return None

    @abstractmethod
    def problem(self, item: int) -> Problem: ...

    @abstractmethod
    def score(self, problem: Problem, answer: Answer) -> Score:
        """Judge an answer. Blocks. A verifier that could not do its work raises, or says INFRA; it never says 0."""

    @property
    def compares(self) -> bool:
        """Whether the answers of a group are judged by `compare`, once all are there, and none by `score` before."""
        return False

    def compare(self, problem: Problem, answers: Sequence[Answer]) -> Sequence[Score]:
        """Judge two or more answers beside each other: a score for each. Otherwise as `score`, which judges an answer alone,
        held-out ones say."""
        raise NotImplementedError

    @property
    def at_once(self) -> int:
        """Answers that one worker judges at once, each in a thread of its own: more than one for a source that mostly waits
        (for a judge over the network, say), and whose methods may be called by several threads."""
        return 1

    @property
    def verdict_s(self) -> float:
        """Seconds after which it gives a verdict up by itself: less than whoever asks for it waits. 0: it has no such limit."""
        return 0.0

    def open(self, problem: Problem, seed: int | None = None) -> Session:
        """A new sample's session; ``seed`` as in `Answer`. Unless a source has sessions of its own (`SessionSource`), one
        without state, of the three methods below and `score`."""
        return _Stateless(self, problem)

    def tools(self) -> tuple[Tool, ...]:
        """The same for all of its problems; where they differ, or have a state, see `open`."""
        return ()

    def reply(self, problem: Problem, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """What an environment answers to the model's last turn, if that called no tool; ``messages``: all since the prompt,
        that turn the last. None: the episode is over. It is asked again after a failure: what it says, and its state, must
        come from its arguments alone."""
        return None

    def demonstration(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
        """The turns of a right answer, tool turns included: what SFT trains on."""
        return ({"role": "assistant", "content": problem.gold},)

    def right_answer(self, problem: Problem) -> Answer:
        """What `validate` has judged right."""
        return Answer(problem.gold)

    def wrong_answer(self, other: Problem) -> Answer:
        """What is right for ``other``: `validate` has it judged by problems that want something else."""
        return Answer(other.gold)

    @property
    def variants(self) -> int:
        """Items in a row that are one problem asked in as many ways: their answers count as samples of one."""
        return 1

    def read(self, problem: Problem, text: str) -> Found:
        """The answer in a last turn, so that equal answers have equal texts: what majorities vote on. Not marked: there is none in the
        form that was asked for. The source may be closed."""
        return find_answer(text, getattr(self.args, "format", "plain"))

    def baselines(self, problem: Problem) -> Mapping[str, tuple[Mapping[str, Any], ...]]:
        """Policies that know nothing of the problem, by the names they are printed under, the same for every problem: all that follows
        the prompt, as in `Answer.messages`. A tool turn without ``content`` stands for whatever the call before gives."""
        return {}

    def close(self) -> None:  # noqa: B027 - most start nothing
        """Ends what the source started."""

    def validate(self, num: int = 8) -> None:
        """Try ``num`` problems: own gold answers are right, an empty one, rubbish and others' gold answers are not.

        Where answers are not right or wrong, a judge is only tried once: rubbish earns less than a gold answer, if there is
        one, and an empty answer nothing. Others' gold answers may be right now and then (yes or no; a puzzle with many solutions): it is an error where
        none of them is ever refused.

        Raises:
            UserError: naming the source and the item.
        """
        if self.at_once < 1:
            raise UserError(f"sources.{self.name}: at_once: {self.at_once} answers at once; make it 1 or more")
        if self.num_items == 0:
            raise UserError(f"sources.{self.name}: it has no problems; check its path and limits")
        if self.num_items is None:
            items = [*range(num - 1), _FAR_ITEM]
        else:
            items = sorted({index * self.num_items // num for index in range(num)})
        problems = [self.tried(item) for item in items]
        if not self.is_verifiable:
            self._check_judge(next((problem for problem in problems if problem.gold), problems[0]))
            return
        for problem in problems:
            right = self._attributed(problem.item, "demonstration", partial(self.right_answer, problem))
            own = self._scored(problem, right)
            if not own.ok:
                why = own.outcome.value + (f": {own.detail}" if own.detail else "")
                raise self._bad(problem.item, f"its own gold answer {_short(problem.gold)} is refused ({why})")
            for wrong in ("", " \n", _GARBAGE):
                score = self._scored(problem, Answer(wrong))
                if score.ok or score.reward >= own.reward:
                    kind = "an empty answer" if not wrong.strip() else f"the answer {_short(wrong)}"
                    raise self._bad(problem.item, f"{kind} is accepted (reward {score.reward:g})")
        wrongs = [self.wrong_answer(problem) for problem in problems]
        pairs = [(at, (at + 1) % len(problems)) for at in range(len(problems))]
        pairs = [(at, other) for at, other in pairs if wrongs[at] != wrongs[other]]
        if pairs and all([self._scored(problems[at], wrongs[other]).ok for at, other in pairs]):
            problem, other = (problems[place] for place in pairs[0])
            raise self._bad(problem.item, f"the gold answer of item {other.item}, {_short(other.gold)}, is accepted")

    def _check_judge(self, problem: Problem) -> None:
        empty, rubbish = self._scored(problem, Answer("")), self._scored(problem, Answer(_GARBAGE))
        if empty.ok or empty.reward > 0:
            raise self._bad(problem.item, f"an empty answer earns {empty.reward:g}")
        if problem.gold and (own := self._scored(problem, Answer(problem.gold))).reward <= rubbish.reward:
            said = f"earns {rubbish.reward:g}, its own gold answer {own.reward:g}"
            raise self._bad(problem.item, f"the answer {_short(_GARBAGE)} {said}")

    def tried(self, item: int) -> Problem:
        """The problem, looked at.

        Raises:
            UserError: `problem` raised, gave no problem, or gives another one when it is asked again.
        """
        problem = self._attributed(item, "problem", lambda: self.problem(item))
        if not isinstance(problem, Problem) or not problem.messages:
            raise self._bad(item, f"problem() gave {_short(problem)}, not a Problem with messages")
        if not isinstance(problem.gold, str) or (self.is_verifiable and not problem.gold.strip()):
            raise self._bad(item, f"its gold answer is {problem.gold!r}")
        if problem.item != item:
            raise self._bad(item, f"problem() gave item {problem.item}")
        if self._attributed(item, "problem", lambda: self.problem(item)) != problem:
            raise self._bad(item, "problem() gives another problem when it is asked again")
        return problem

    def _scored(self, problem: Problem, answer: Answer) -> Score:
        score = self._attributed(problem.item, "score", lambda: self.score(problem, answer))
        if fault := score_fault(score):
            raise self._bad(problem.item, f"on {_short(answer.text)}, {fault}")
        if score.outcome is Outcome.INFRA:
            raise self._bad(problem.item, f"on {_short(answer.text)}, score() could not do its work: {score.detail}")
        return score

    def _attributed(self, item: int, method: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except UserError:
            raise
        except Exception as error:
            raise self._bad(item, f"{method}() raised {type(error).__name__}: {one_line(error)}") from error

    def _bad(self, item: int, problem: str) -> UserError:
        return UserError(f"sources.{self.name}: item {item}: {problem}; correct the task or take it out of the recipe")


class _Stateless(Session):
    def __init__(self, source: TaskSource, problem: Problem) -> None:
        self._source, self._problem, self.tools = source, problem, source.tools()

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        return self._source.reply(self._problem, messages)

    def score(self, answer: Answer) -> Score:
        return self._source.score(self._problem, answer)


def score_fault(score: Any) -> str | None:
    """What is wrong with a thing that `TaskSource.score` returned; None: it can be trained on."""
    if not isinstance(score, Score):
        return f"score() returned {_short(score)}, not a Score"
    numbers: dict[str, Any] = {"reward": score.reward, **score.parts}
    numbers |= {f"the reward of step {number}": step.reward for number, step in enumerate(score.steps)}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"score() gave {name} as {_short(value)}, not a number"
        if not math.isfinite(value):
            return f"score() gave {name} as {value}, not a finite number"
    outcome: Any = score.outcome
    if not isinstance(outcome, Outcome):
        return f"score() gave outcome as {_short(outcome)}, not an Outcome"
    return None


def _short(value: object) -> str:
    text = one_line(repr(value))
    return text if len(text) <= 80 else text[:77] + "…"


AnswerFormat = Literal["plain", "line", "tags", "boxed"]
"""Of the answer in what the model writes:

``plain``: the whole text. ``line``: its last line that is not blank. ``tags``: inside the last ``<answer>``, which need
not be closed. ``boxed``: inside the last ``\\boxed{}``, which must be. Without its marks, the last two are ``line``.
In all, whatever is before the last ``</think>`` is not looked at, and white space around the answer does not count.

A text without its marks still has an answer: a network that was never taught them would otherwise score 0 on everything,
right or wrong, and have nothing to learn from. That marks are missing is reported beside it.
"""

_INSTRUCTIONS = {
    "line": "Write the answer alone on the last line.",
    "tags": "Write the answer between <answer> and </answer>.",
    "boxed": "Write the answer inside \\boxed{}.",
}
_TAGGED = re.compile(r"<answer>(?!.*<answer>)(.*?)(?:</answer>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Found:
    """An answer in a text. Written by `find_answer`."""

    text: str
    """Stripped; may be empty."""
    is_marked: bool
    """The marks of the format were there; always, where it has none. Says nothing about the answer being right."""
    place: str = ""
    """Of an answer that chooses: which one, by where the problem shows it."""


def ask(question: str, form: AnswerFormat) -> str:
    """A user message: the question, and the line that asks for the format."""
    return question if form == "plain" else f"{question}\n\n{_INSTRUCTIONS[form]}"


def write_answer(answer: str, form: AnswerFormat) -> str:
    """``answer`` with the format's marks."""
    return {"tags": f"<answer>{answer}</answer>", "boxed": f"\\boxed{{{answer}}}"}.get(form, answer)


def without_thoughts(text: str) -> str:
    """A completion without the reasoning before the answer."""
    return text.rpartition("</think>")[2]


def spoken(text: str) -> str:
    """An answer as the reader sees it: `without_thoughts`, and without white space around it."""
    return without_thoughts(text).strip()


def find_answer(text: str, form: AnswerFormat) -> Found:
    """The answer in ``text`` by the rules of `AnswerFormat`."""
    text = spoken(text)
    last_line = text.rpartition("\n")[2]
    marked: str | None = text if form == "plain" else last_line
    if form == "tags":
        match = _TAGGED.search(text)
        marked = match[1] if match else None
    elif form == "boxed":
        marked = _last_boxed(text)
    return Found(last_line.strip(), False) if marked is None else Found(marked.strip(), True)


def _last_boxed(text: str) -> str | None:
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for index, character in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:index]
    return None


class Range(Config):
    """Which records of a file. Two sources with ranges apart make a training and a held-out set."""

    first: int = Field(default=0, ge=0)
    """Records of the file that are left out at its start."""
    limit: int | None = Field(default=None, gt=0)
    """Records at most; None: all."""


def read_records(path: Path, part: Range, fields: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The chosen records of a JSONL, CSV or Parquet file, each with at least one of every group of ``fields``.

    Raises:
        UserError: no such file, one that cannot be read, or a record without a field.
    """
    rows = Rows()
    for _ in read_files([path], rows):
        pass
    for record, place in rows:
        for names in fields:
            if not any(name in record for name in names):
                raise UserError(f"{place}: no field {' or '.join(names)}; it has {', '.join(record)[:200]}")
    if len(rows) <= part.first:
        raise UserError(f"{path}: first: no records from {part.first} on, of {len(rows)}; lower it")
    return [record for record, _ in rows[part.first :][: part.limit]]
