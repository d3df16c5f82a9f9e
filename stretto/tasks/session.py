"""Sessions: task sources whose tools have state, and the replay of recorded calls. No torch.

A user's own world is a `SessionSource` with `problem`, `open` and `demonstration`, and a `Session` with the tools.
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
"""Largest length of a tool's result, in characters: longer than a model's context, short enough to log and to repeat."""


class Diverged(RuntimeError):  # noqa: N818 - data, not a fault
    """Repeated calls had other results than the first time, so the state is lost."""


class SessionSource(TaskSource):
    """A source whose problems have a state. An answer is judged by repeating its calls in a new session."""

    @abstractmethod
    def open(self, problem: Problem, seed: int | None = None) -> Session: ...

    def score(self, problem: Problem, answer: Answer) -> Score:
        """Repeat the calls of ``answer``, then score the state. Raises `Diverged`: the calls lead to another state than before."""
        with closing(self.open(problem, answer.seed)) as session:
            replay(session, answer.messages)
            return session.score(answer)

    def right_answer(self, problem: Problem) -> Answer:
        """The demonstration with calls, results and state digests, which scoring repeats and compares."""
        turns = self.demonstration(problem)
        return Answer(str(turns[-1].get("content") or ""), tuple(turns))

    def wrong_answer(self, other: Problem) -> Answer:
        """The demonstration of ``other`` without the results of its calls."""
        turns = self.demonstration(other)
        bare = [{"role": "tool", "name": turn.get("name")} if turn["role"] == "tool" else turn for turn in turns]
        return Answer(str(turns[-1].get("content") or ""), tuple(bare))


def schemas(source: TaskSource, problem: Problem) -> list[dict[str, Any]]:
    """Schemas of the problem's tools, as chat templates expect them."""
    with closing(source.open(problem)) as session:
        return [tool.schema() for tool in session.tools]


def use(tools: Sequence[Tool], name: str, arguments: Mapping[str, Any] | None) -> ToolResult:
    """The result of a model's call. ``arguments`` None: not a JSON object. A call of an unknown tool returns WRONG and changes nothing.
    A result longer than `MOST_TEXT` is shortened, with a line that says so."""
    known = {tool.name: tool for tool in tools}
    if name not in known:
        return ToolResult(f"error: there is no tool {name!r}; there are {', '.join(known)}", Outcome.WRONG)
    if arguments is None:
        return ToolResult("error: the arguments are not a JSON object", Outcome.WRONG)
    result = known[name].call(arguments)
    return result if len(result.text) <= MOST_TEXT else replace(result, text=shorten(result.text, MOST_TEXT))


def arguments_of(told: object) -> Mapping[str, Any] | None:
    """The JSON object in a text, such as a call's arguments, or ``told`` itself if it is one; None: not a JSON object. Half of a surrogate
    pair, which cannot be stored or sent, becomes a question mark."""
    if isinstance(told, dict):
        return told
    try:
        tree = json.loads(told) if isinstance(told, str) else None
        whole = json.loads(json.dumps(tree, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):  # ValueError also for a number of thousands of digits
        return None
    return whole if isinstance(whole, dict) else None


def calling(name: str, arguments: Mapping[str, Any], thought: str = "") -> dict[str, Any]:
    """An assistant message with one call."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": thought, "tool_calls": [call]}


def tool_turn(session: Session, call: Mapping[str, Any]) -> dict[str, Any]:
    """Make a ``call`` (``name`` and ``arguments``); returns the tool message. Its ``state`` is the digest of the state after the call;
    sessions without state have no such field."""
    result = use(session.tools, call["name"], call["arguments"])
    message = {"role": "tool", "name": call["name"], "content": result.text, "outcome": result.outcome.value}
    state = session.digest()
    return message | {"state": state} if state else message


def recorded(session: Session, turns: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """``turns`` of a model and a user, each call followed by its result in the new ``session``; tool messages in ``turns`` are ignored.
    Raises RuntimeError: a tool failed."""
    messages: list[Mapping[str, Any]] = []
    for turn in turns:
        if turn["role"] != "tool":
            messages += [turn, *(_finished(session, call["function"]) for call in turn.get("tool_calls") or ())]
    return tuple(messages)


def replay(session: Session, messages: Sequence[Mapping[str, Any]]) -> None:
    """Repeat the calls in ``messages``, all messages after the prompt, on a new session. The ``content`` and ``state`` of a tool message
    are compared with the new result and digest; fields that are missing are not compared. Calls after the end of an episode are skipped.

    Raises:
        Diverged: a result or a state differs.
        RuntimeError: a tool failed.
    """
    calls: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls") or ()]
        elif message["role"] == "tool" and calls and not session.is_over:
            call, *calls = calls
            result = _finished(session, call)
            if result["content"] != message.get("content", result["content"]):
                before = str(message["content"])[:80]
                raise Diverged(f"{call['name']}: returned {result['content'][:80]!r}, and {before!r} before")
            if result.get("state", "") != message.get("state", result.get("state", "")):
                raise Diverged(f"{call['name']}: left another state than before")


def _finished(session: Session, call: Mapping[str, Any]) -> dict[str, Any]:
    message = tool_turn(session, call)
    if message["outcome"] == Outcome.INFRA.value:
        raise RuntimeError(f"{call['name']}: {message['content']}")
    return message
