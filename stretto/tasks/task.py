"""Interface of a task source: problems by number, and a verdict on an answer. No torch, quick to import.

A user's own task source is a class with `problem` and `score`; `TaskSource.validate` tries it before a run starts. The end of the file
has helpers that several sources share: finding the answer in a text, and reading problems from files.
"""

from __future__ import annotations

import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError, one_line
from stretto.base.plugin import line_of
from stretto.base.trajectory import Outcome, StepReward
from stretto.data.sources import read_rows
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.outcome import ToolResult

FIRST_REPORTED: Final = 3 << 22
"""First item of an endless source that evaluations use: beyond the items of training and of held-out checks during a run."""
_GARBAGE = "\u2205 no such answer \u2205"
_FAR_ITEM = 1_000_003
"""Item that `validate` tries in an endless source: a generator with a finite list would fail hours into a run."""


class ScoreTimeoutError(UserError):
    """`TaskSource.score` took longer than `TaskSource.validate` allows. It goes on in a thread that ends with the process, and still uses
    its source and the sandbox, which therefore cannot be closed."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. Written by its source; the same for the same item on every machine."""

    item: int
    messages: tuple[Mapping[str, Any], ...]
    """Prompt: ``{"role": …, "content": …}``; the last message is the user's."""
    gold: str
    """The last turn of a correct answer as the model should write it, with the marks of the format: the target of SFT."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Further data for `TaskSource.score`; plain JSON values."""

    @classmethod
    def of(cls, item: int, question: str, answer: str, form: AnswerFormat, /, **payload: Any) -> Self:
        """A problem with one question, which asks for the format ``form``, and its answer in that format."""
        return cls(item, ({"role": "user", "content": ask(question, form)},), write_answer(answer, form), payload)


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer to a problem. Written by the agent loop."""

    text: str
    """The last turn without special tokens. A truncated answer is scored like any other: it may still be correct."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """All messages after the prompt, with tool results and the last turn; empty: only the last turn."""
    seed: int | None = None
    """Seed of the sample, the same in every repetition of the verdict, for verifiers that draw random numbers. None: not from a run."""


@dataclass(frozen=True, slots=True)
class Score:
    """A source's verdict. ``outcome`` says whether the answer is correct; whether it has the requested form is at most a part."""

    reward: float
    outcome: Outcome
    """OK: correct. WRONG, TIMEOUT, CRASH: incorrect by the answer's own fault. INFRA: unknown, by an infrastructure error."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Metrics for the log by name, such as ``marked``: whether the answer had the requested form."""
    detail: str = ""
    """Reason for a refusal, one line."""
    sandbox_s: float = 0.0
    """Processor seconds in the sandbox."""
    steps: tuple[StepReward, ...] = ()
    """Rewards of single turns or of steps within turns, for algorithms with finer credit assignment."""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @classmethod
    def of(cls, right: bool, parts: Mapping[str, float] | None = None, detail: str = "") -> Score:
        """A score with reward 1 if ``right``, else 0."""
        return cls(float(right), Outcome.OK if right else Outcome.WRONG, parts or {}, detail)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call between its turns."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    call: Callable[[Mapping[str, Any]], ToolResult]
    """Runs the tool. Bad arguments are the model's mistake: the outcome is WRONG, never an exception."""

    def schema(self) -> dict[str, Any]:
        """The tool in the format of the chat API, as chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class Session(ABC):
    """The state of one sample of a problem, and the tools that change it. One thread at a time uses a session, not always the
    same thread; several sessions of a source are in use at once.

    The state is a function of the problem, the seed and the calls so far in their order. So `stretto.tasks.session.replay` restores it
    in a new session from the messages alone: an agent resumes a killed agent's sample, and a verifier judges on another machine.
    """

    tools: tuple[Tool, ...]
    """Tools, the same in every session of the problem and from its start to its end. Written by the constructor."""

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """As `TaskSource.reply`. May read the state, and does not change it."""
        return None

    @abstractmethod
    def score(self, answer: Answer) -> Score:
        """As `TaskSource.score`, for the current state."""

    @property
    def is_over(self) -> bool:
        """Whether a call has ended the episode: the model writes no more, and further calls of its turn are not made."""
        return False

    def digest(self) -> str:
        """Hash of the state, the same on every machine; empty: the session has no state."""
        return ""

    def close(self) -> None:  # noqa: B027 - most sessions hold no resources
        """Release the session's resources."""


class TaskSource(ABC):
    """A set of problems with verdicts. `validate` is not to be overridden. All state is set by the constructor; the attributes below may be
    set by it, or by properties."""

    args_kind: ClassVar[type[Config]] = Config
    """Type of the recipe's ``args``."""
    is_verifiable: ClassVar[bool] = True
    """Whether answers are correct or incorrect. False: they are graded, and a problem may lack a gold answer (then empty)."""
    num_items: int | None = None
    """Number of items, which are counted from 0; None: endless."""
    compares: bool = False
    """Whether `compare` judges the finished answers of a group together, instead of `score` each of them."""
    at_once: int = 1
    """Number of answers that one worker judges concurrently, each in a thread. More than 1: the source mostly waits, for example for a
    judge over the network, and its methods are thread-safe."""
    verdict_s: float = 0.0
    """The source's own time limit of a verdict, seconds; shorter than the caller's. 0: no limit."""
    variants: int = 1
    """Number of consecutive items that ask one problem in different ways. Their answers count as samples of one problem."""

    def __init__(self, name: str, args: Config, sandbox: Sandbox | None = None) -> None:
        """
        Args:
            name: name of the recipe's table; error messages begin with it.
            args: an instance of ``args_kind``.
            sandbox: runs programs; sources without programs ignore it.
        """
        self.name = name
        self.args = args
        self.sandbox = sandbox

    @abstractmethod
    def problem(self, item: int) -> Problem: ...

    @abstractmethod
    def score(self, problem: Problem, answer: Answer) -> Score:
        """Judge an answer. Blocks. A verifier that fails raises or returns INFRA; it never returns a reward of 0 for its own failure."""

    def compare(self, problem: Problem, answers: Sequence[Answer]) -> Sequence[Score]:
        """Judge two or more answers against each other; one score for each. `score` still judges single answers, such as held-out ones."""
        raise NotImplementedError

    def open(self, problem: Problem, seed: int | None = None) -> Session:
        """The session of a new sample; ``seed``: as in `Answer`. The default session has no state and uses the methods below and `score`;
        `SessionSource` has sessions with state."""
        return _Stateless(self, problem)

    def tools(self) -> tuple[Tool, ...]:
        """Tools of all problems. `open` is for tools that have a state or differ between problems."""
        return ()

    def reply(self, problem: Problem, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The environment's answer to a turn of the model without calls; None: the episode is over. ``messages``: all messages after the
        prompt; that turn is the last. Must be a function of its arguments: it is called again after a failure."""
        return None

    @property
    def may_reply(self) -> bool:
        """Whether the environment may answer a turn without calls: the source has a `reply`, or sessions, of its own."""
        own = type(self)
        return own.reply is not TaskSource.reply or own.open is not TaskSource.open

    def demonstration(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
        """The turns of a correct answer with tool results: the target of SFT."""
        return ({"role": "assistant", "content": problem.gold},)

    def right_answer(self, problem: Problem) -> Answer:
        """The answer that `validate` expects to be correct."""
        return Answer(problem.gold)

    def wrong_answer(self, other: Problem) -> Answer:
        """The correct answer of ``other``, which `validate` tries on other problems."""
        return Answer(other.gold)

    def read(self, problem: Problem, text: str) -> Found:
        """The answer in a last turn, normalised so that equal answers have equal texts, for majority votes. Works on a closed source."""
        return find_answer(text, getattr(self.args, "format", "plain"))

    def baselines(self, problem: Problem) -> Mapping[str, tuple[Mapping[str, Any], ...]]:
        """Trivial policies of this source by name, the same names for every problem; each as in `Answer.messages`. A tool message
        without ``content`` stands for the result of the call before it."""
        return {}

    def close(self) -> None:  # noqa: B027 - most sources hold no resources
        """Release the source's resources."""

    def validate(self, num: int = 8, limit_s: float | None = None) -> None:
        """Try ``num`` problems: a problem's gold answer must be correct; an empty answer and a nonsense answer must not.

        The gold answer of another problem may sometimes be correct (yes or no; a puzzle with many solutions), but not every time.
        A graded source is tried on one problem: nonsense earns less than the gold answer, if there is one, and an empty answer nothing.
        ``limit_s``: longest time of one `score`, seconds; None: no limit.

        Raises:
            UserError: names the source and the item.
            ScoreTimeoutError: names them too; the source must not be closed.
        """
        if self.at_once < 1:
            raise UserError(f"sources.{self.name}: at_once: must be at least 1, is {self.at_once}")
        if self.num_items == 0:
            raise UserError(f"sources.{self.name}: it has no problems; check its path and limits")
        if self.num_items is None:
            items = [*range(num - 1), _FAR_ITEM]
        else:
            items = sorted({index * self.num_items // num for index in range(num)})
        problems = [self.tried(item) for item in items]
        if not self.is_verifiable:
            self._check_judge(next((problem for problem in problems if problem.gold), problems[0]), limit_s)
            return
        for problem in problems:
            right = self._attributed(problem.item, "demonstration", partial(self.right_answer, problem))
            own = self._scored(problem, right, limit_s)
            if not own.ok:
                why = own.outcome.value + (f": {own.detail}" if own.detail else "")
                raise self._bad(problem.item, f"its own gold answer {_short(problem.gold)} is refused ({why})")
            for wrong in ("", " \n", _GARBAGE):
                score = self._scored(problem, Answer(wrong), limit_s)
                if score.ok or score.reward >= own.reward:
                    kind = "an empty answer" if not wrong.strip() else f"the answer {_short(wrong)}"
                    raise self._bad(problem.item, f"{kind} is accepted (reward {score.reward:g})")
        wrongs = [self.wrong_answer(problem) for problem in problems]
        pairs = [(at, (at + 1) % len(problems)) for at in range(len(problems))]
        pairs = [(at, other) for at, other in pairs if wrongs[at] != wrongs[other]]
        if pairs and all([self._scored(problems[at], wrongs[other], limit_s).ok for at, other in pairs]):
            problem, other = (problems[place] for place in pairs[0])
            raise self._bad(problem.item, f"the gold answer of item {other.item}, {_short(other.gold)}, is accepted")

    def _check_judge(self, problem: Problem, limit_s: float | None) -> None:
        empty, rubbish = (self._scored(problem, Answer(text), limit_s) for text in ("", _GARBAGE))
        if empty.ok or empty.reward > 0:
            raise self._bad(problem.item, f"an empty answer earns {empty.reward:g}")
        if problem.gold and (own := self._scored(problem, Answer(problem.gold), limit_s)).reward <= rubbish.reward:
            said = f"earns {rubbish.reward:g}, its own gold answer {own.reward:g}"
            raise self._bad(problem.item, f"the answer {_short(_GARBAGE)} {said}")

    def tried(self, item: int) -> Problem:
        """The problem of ``item``, checked. Raises `UserError`: `problem` raised, returned no problem, or is not deterministic."""
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

    def _scored(self, problem: Problem, answer: Answer, limit_s: float | None) -> Score:
        work = partial(self.score, problem, answer)
        score = self._attributed(problem.item, "score", lambda: self._in_time(problem.item, work, limit_s))
        if fault := score_fault(score):
            raise self._bad(problem.item, f"on {_short(answer.text)}, {fault}")
        if score.outcome is Outcome.INFRA:
            raise self._bad(problem.item, f"on {_short(answer.text)}, score() could not do its work: {score.detail}")
        return score

    def _in_time(self, item: int, work: Callable[[], Score], limit_s: float | None) -> Score:
        """The score of ``item`` that ``work`` returns. Raises `ScoreTimeoutError`: it took longer than ``limit_s``."""
        if limit_s is None:
            return work()
        result: Future[Score] = Future()
        threading.Thread(target=_report, args=(result, work), name="score", daemon=True).start()
        if not wait([result], limit_s).done:
            raise ScoreTimeoutError(str(self._bad(item, f"score() has not returned after {limit_s:g} s")))
        return result.result()

    def _attributed(self, item: int, method: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except UserError:
            raise
        except Exception as error:
            problem = f"{method}() raised {type(error).__name__}: {one_line(error)}"
            raise self._bad(item, problem + line_of(error, type(self))) from error

    def _bad(self, item: int, problem: str) -> UserError:
        return UserError(f"sources.{self.name}: item {item}: {problem}; correct the task or take it out of the recipe")


def _report(result: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:
        result.set_exception(error)


class _Stateless(Session):
    def __init__(self, source: TaskSource, problem: Problem) -> None:
        self._source, self._problem, self.tools = source, problem, source.tools()

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        return self._source.reply(self._problem, messages)

    def score(self, answer: Answer) -> Score:
        return self._source.score(self._problem, answer)


def score_fault(score: Any) -> str | None:
    """The error in a return value of `TaskSource.score`; None: it is a valid score."""
    if not isinstance(score, Score):
        return f"score() returned {_short(score)}, not a Score"
    parts: Any = score.parts
    steps: Any = score.steps
    detail: Any = score.detail
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) for name in parts):
        return f"score() gave parts as {_short(parts)}, not numbers by name"
    if not isinstance(steps, tuple | list) or not all(isinstance(step, StepReward) for step in steps):
        return f"score() gave steps as {_short(steps)}, not a tuple of StepReward"
    if not isinstance(detail, str):
        return f"score() gave detail as {_short(detail)}, not a text"
    for number, step in enumerate(steps):
        for name, value in (("turn", step.turn), ("end", 0 if step.end is None else step.end)):
            if type(value) is not int:  # a number of another library could not be stored
                return f"score() gave the {name} of step {number} as {_short(value)}, not an int"
    numbers: dict[str, Any] = {"reward": score.reward, "sandbox_s": score.sandbox_s, **parts}
    numbers |= {f"the reward of step {number}": step.reward for number, step in enumerate(steps)}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"score() gave {name} as {_short(value)}, not an int or float; convert it with float()"
        if not abs(value) <= sys.float_info.max:
            return f"score() gave {name} as {_short(value)}, not a finite number"
    if score.sandbox_s < 0:
        return f"score() gave sandbox_s as {_short(score.sandbox_s)}, less than 0"
    outcome: Any = score.outcome
    if not isinstance(outcome, Outcome):
        return f"score() gave outcome as {_short(outcome)}, not an Outcome"
    return None


def _short(value: object) -> str:
    text = one_line(repr(value))
    return text if len(text) <= 80 else text[:77] + "…"


AnswerFormat = Literal["plain", "line", "tags", "boxed"]
"""Where the answer stands in the text of a model:

``plain``: the whole text. ``line``: the last line that is not blank. ``tags``: inside the last ``<answer>``, which need not be closed,
and in it inside the last ``\\boxed{}``, if there is one. ``boxed``: inside the last ``\\boxed{}``, which must be closed. Without their
marks, ``tags`` and ``boxed`` are read as ``line``.
Text up to the last ``</think>`` and white space around the answer are ignored.

A text without marks still has an answer, because a network that never learned the marks would otherwise score 0 on every answer and
have nothing to learn from. Missing marks are reported separately.
"""

_INSTRUCTIONS = {
    "line": "Write the answer alone on the last line.",
    "tags": "Write the answer between <answer> and </answer>.",
    "boxed": "Write the answer inside \\boxed{}.",
}
_TAGGED = re.compile(r"<answer>(?!.*<answer>)(.*?)(?:</answer>|\Z)", re.DOTALL)
_STYLED = re.compile(r"\\(?:text|math)(?:bf|it|rm|tt)?\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;: ]|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_AROUND = "*_$\"'`“”‘’ "


@dataclass(frozen=True, slots=True)
class Found:
    """The answer found in a text. Written by `find_answer`."""

    text: str
    """Answer without surrounding white space; may be empty."""
    is_marked: bool
    """Whether the text had the marks of the format; True for formats without marks. Says nothing about correctness."""
    place: str = ""
    """In multiple choice: the letter of the chosen option."""


def ask(question: str, form: AnswerFormat) -> str:
    """The text of a user message: the question, and the line that asks for the format."""
    return question if form == "plain" else f"{question}\n\n{_INSTRUCTIONS[form]}"


def write_answer(answer: str, form: AnswerFormat) -> str:
    """``answer`` with the format's marks."""
    return {"tags": f"<answer>{answer}</answer>", "boxed": f"\\boxed{{{answer}}}"}.get(form, answer)


def without_thoughts(text: str) -> str:
    """A completion without the reasoning before the answer."""
    return text.rpartition("</think>")[2]


def spoken(text: str) -> str:
    """An answer as a reader sees it: `without_thoughts`, and without surrounding white space."""
    return without_thoughts(text).strip()


def find_answer(text: str, form: AnswerFormat) -> Found:
    """The answer in ``text``, by the rules of `AnswerFormat`."""
    text = spoken(text)
    last_line = text.rpartition("\n")[2]
    marked: str | None = text if form == "plain" else last_line
    if form == "tags":
        match = _TAGGED.search(text)
        marked = (_last_boxed(match[1]) or match[1]) if match else None
    elif form == "boxed":
        marked = _last_boxed(text)
    return Found(last_line.strip(), False) if marked is None else Found(marked.strip(), True)


def bare(text: str) -> str:
    """A found answer without typography: emphasis, quotation marks, ``$``, a leading ``=`` and a final full stop around it, ``\\text{}`` and
    the like, and LaTeX's spaces. White space is single spaces."""
    text = _STYLED.sub(r"\1", text.replace("\\$", "$").replace("\\!", ""))
    text = re.sub(r"\\[()\[\]]", "$", _THOUSANDS.sub("", text))
    return " ".join(re.sub(r"\\[,;: ]", " ", text).split()).lstrip(_AROUND + "=").rstrip(_AROUND + ".")


def _last_boxed(text: str) -> str | None:
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for index, character in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:index]
    return None


class Range(Config):
    """A range of records in a file. Two sources with disjoint ranges make a training set and a held-out set."""

    first: int = Field(default=0, ge=0)
    """Number of records skipped at the start of the file."""
    limit: int | None = Field(default=None, gt=0)
    """Largest number of records; None: all."""


def read_records(path: Path, part: Range, fields: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The records of a JSONL, CSV or Parquet file that lie in ``part``. Each must have one field of every group in ``fields``.

    Raises:
        UserError: no such file, an unreadable file, or a record without a field.
    """
    rows = read_rows([path])
    for record, place in rows:
        for names in fields:
            if not any(name in record for name in names):
                raise UserError(f"{place}: no field {' or '.join(names)}; it has {', '.join(record)[:200]}")
    if len(rows) <= part.first:
        raise UserError(f"{path}: first: must be less than the number of records, {len(rows)}, is {part.first}")
    return [record for record, _ in rows[part.first :][: part.limit]]


def close_sources(sources: Collection[TaskSource]) -> None:
    """Close ``sources`` and the sandboxes that they share. To be called while no program runs."""
    with ExitStack() as stack:  # closes the others too if one fails
        for sandbox in {source.sandbox for source in sources if source.sandbox is not None}:
            stack.callback(sandbox.close)
        for source in sources:
            stack.callback(source.close)
