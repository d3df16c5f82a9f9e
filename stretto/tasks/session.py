"""Sessions with a state: calls that change it, and how it is reached again from what was said. No torch.

A world of one's own is a `SessionSource` with `problem` and `open`, and a `Session` whose tools act on it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from stretto.base.trajectory import Outcome
from stretto.sandbox.outcome import ToolResult
from stretto.tasks.task import Answer, Problem, Score, Session, TaskSource


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


def use(session: Session, name: str, arguments: Mapping[str, Any] | None) -> ToolResult:
    """What a call that the model wrote comes to; ``arguments`` None: they are no JSON object. A call of what is not there is the
    model's mistake and changes nothing."""
    tools = {tool.name: tool for tool in session.tools}
    if name not in tools:
        return ToolResult(f"error: there is no tool {name!r}; there are {', '.join(tools)}", Outcome.WRONG, 0.0)
    if arguments is None:
        return ToolResult("error: the arguments are not a JSON object", Outcome.WRONG, 0.0)
    return tools[name].call(arguments)


def replay(session: Session, messages: Sequence[Mapping[str, Any]]) -> None:
    """Repeat on a new session the calls in ``messages``, all since the prompt. Tool turns say what each gave (``content``) and
    what state it left (``state``, a digest) the first time; where they do not, nothing is compared.

    Raises:
        Diverged: a result, or the state after it, is another one.
    """
    calls: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls", ())]
        elif message["role"] == "tool" and calls:
            call, *calls = calls
            found = use(session, call["name"], call["arguments"])
            if found.text != message.get("content", found.text):
                raise Diverged(f"{call['name']}: gave {found.text[:80]!r}, and {str(message['content'])[:80]!r} before")
            if session.digest() != message.get("state", session.digest()):
                raise Diverged(f"{call['name']}: left another state than before")
