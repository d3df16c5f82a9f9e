"""Sessions: tasks whose tools have state, and the replay of recorded calls. No torch.

A world of one's own is a `SessionSource` with `problem`, `open` and `demonstration`, and a `Session` whose tools act on it.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from stretto.base.trajectory import Outcome
from stretto.sandbox.outcome import ToolResult
from stretto.sandbox.tools import shorten
from stretto.tasks.task import Answer, Problem, Score, Session, TaskSource, Tool

MOST_TEXT = 1 << 17
"""Characters of a tool's result: more than models' contexts hold, less than anybody minds to log and to repeat."""


class Diverged(RuntimeError):  # noqa: N818 - data, not a fault
    """Calls that were repeated gave something else than the first time: the state they led to is lost."""


class SessionSource(TaskSource):
    """A source whose problems have a state. It judges by repeating an answer's calls in a session of its own."""

    @abstractmethod
    def open(self, problem: Problem, seed: int | None = None) -> Session: ...

    def score(self, problem: Problem, answer: Answer) -> Score:
        """Raises `Diverged`: its calls do not lead to the state that they led to."""
        with closing(self.open(problem, answer.seed)) as session:
            replay(session, answer.messages)
            return session.score(answer)

    def right_answer(self, problem: Problem) -> Answer:
        """The demonstration, calls included, which judging it repeats: with what `recorded` wrote into it, state by state."""
        turns = self.demonstration(problem)
        return Answer(str(turns[-1].get("content") or ""), tuple(turns))

    def wrong_answer(self, other: Problem) -> Answer:
        """Its demonstration, but for what its calls gave there."""
        turns = self.demonstration(other)
        bare = [{"role": "tool", "name": turn.get("name")} if turn["role"] == "tool" else turn for turn in turns]
        return Answer(str(turns[-1].get("content") or ""), tuple(bare))


def schemas(source: TaskSource, problem: Problem) -> list[dict[str, Any]]:
    """Of the tools that the problem offers, as chat templates want them."""
    with closing(source.open(problem)) as session:
        return [tool.schema() for tool in session.tools]


def use(tools: Sequence[Tool], name: str, arguments: Mapping[str, Any] | None) -> ToolResult:
    """What a call that the model wrote comes to; ``arguments`` None: they are no JSON object. A call of what is not there is the
    model's mistake and changes nothing. A text beyond `MOST_TEXT` is cut, which can be seen."""
    known = {tool.name: tool for tool in tools}
    if name not in known:
        return ToolResult(f"error: there is no tool {name!r}; there are {', '.join(known)}", Outcome.WRONG, 0.0)
    if arguments is None:
        return ToolResult("error: the arguments are not a JSON object", Outcome.WRONG, 0.0)
    result = known[name].call(arguments)
    return result if len(result.text) <= MOST_TEXT else replace(result, text=shorten(result.text, MOST_TEXT))


def arguments_of(text: str) -> Mapping[str, Any] | None:
    """The JSON object that a model wrote, such as a call's arguments; None: it is none."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):  # the first also of a number of thousands of digits
        return None
    return tree if isinstance(tree, dict) else None


def calling(name: str, arguments: Mapping[str, Any], thought: str = "") -> dict[str, Any]:
    """A turn of the model with one call."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": thought, "tool_calls": [call]}


def tool_turn(session: Session, call: Mapping[str, Any]) -> dict[str, Any]:
    """Make a ``call`` (its ``name`` and ``arguments``): the message that answers it. ``state`` is the digest of what it left;
    no field of it where calls change nothing."""
    result = use(session.tools, call["name"], call["arguments"])
    told = {"role": "tool", "name": call["name"], "content": result.text, "outcome": result.outcome.value}
    state = session.digest()
    return told | {"state": state} if state else told


def recorded(session: Session, turns: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """``turns`` of a model and a user, with what each call gives in the new ``session`` behind it; tool turns in them are
    left out. Raises RuntimeError: a tool could not do its work."""
    told: list[Mapping[str, Any]] = []
    for turn in turns:
        if turn["role"] != "tool":
            told += [turn, *(_done(session, call["function"]) for call in turn.get("tool_calls") or ())]
    return tuple(told)


def replay(session: Session, messages: Sequence[Mapping[str, Any]]) -> None:
    """Repeat on a new session the calls in ``messages``, all since the prompt. Tool turns say what each gave (``content``) and
    what state it left (``state``, a digest) the first time; where they do not, nothing is compared. Behind a call that ends the
    episode none is made.

    Raises:
        Diverged: a result, or the state after it, is another one.
        RuntimeError: a tool could not do its work.
    """
    calls: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls") or ()]
        elif message["role"] == "tool" and calls and not session.is_over:
            call, *calls = calls
            found = _done(session, call)
            if found["content"] != message.get("content", found["content"]):
                before = str(message["content"])[:80]
                raise Diverged(f"{call['name']}: gave {found['content'][:80]!r}, and {before!r} before")
            if found.get("state", "") != message.get("state", found.get("state", "")):
                raise Diverged(f"{call['name']}: left another state than before")


def _done(session: Session, call: Mapping[str, Any]) -> dict[str, Any]:
    found = tool_turn(session, call)
    if found["outcome"] == Outcome.INFRA.value:
        raise RuntimeError(f"{call['name']}: {found['content']}")
    return found
