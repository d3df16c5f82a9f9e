"""Tools: which may be called, the grammar that forces a call, and the calls in what the model wrote.

A call is ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as `stretto.text.chat.CHATML` and the templates of
Qwen and its relatives render it. An answer that begins one and does not finish it stays text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.engine.request import Grammar
from stretto.serve.bodies import AllowedToolsChoice, NamedTool, ResponseFormat, Tool, ToolChoice
from stretto.serve.errors import bad

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
# Spacing of json.dumps, which is what templates render and models have seen.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request may call. Written by `tool_use`."""

    offered: tuple[Tool, ...]
    """Rendered into the prompt; empty: none."""
    forced: bool
    """A call must come; the grammar sees to it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the model wrote."""

    id: str
    name: str
    arguments: str
    """A JSON object as text."""

    def body(self, index: int | None = None) -> dict[str, Any]:
        """OpenAI's form; ``index`` is part of streamed ones."""
        function = {"name": self.name, "arguments": self.arguments}
        head = {} if index is None else {"index": index}
        return {**head, "id": self.id, "type": "function", "function": function}


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None) -> ToolUse:
    """Apply ``tool_choice``: what is offered, and whether a call is forced.

    Raises:
        ApiError: two tools of one name, a choice without tools, or of one that is not there.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad("tools", "two tools have the same name")
    match choice:
        case None | "auto":
            return ToolUse(tuple(tools), False)
        case "none":
            return ToolUse((), False)
        case "required":
            wanted, forced = names, True
        case NamedTool():
            wanted, forced = [choice.function.name], True
        case AllowedToolsChoice():
            wanted = [tool.function.name for tool in choice.allowed_tools.tools]
            forced = choice.allowed_tools.mode == "required"
    if missing := [name for name in wanted if name not in names]:
        raise bad("tool_choice", f"{missing[0]!r} is not among the tools")
    if not wanted:
        raise bad("tool_choice", "a call is wanted and there are no tools")
    return ToolUse(tuple(tool for tool in tools if tool.function.name in wanted), forced)


def answer_grammar(use: ToolUse, form: ResponseFormat | None, parallel: bool) -> Grammar | None:
    """The grammar that tools and ``response_format`` ask for together; None where anything may be written.

    Raises:
        ApiError: ``json_object`` or a schema beside tools that may, but need not, be called has no schema to combine.
    """
    schema = None if form is None or form.json_schema is None else form.json_schema.schema_
    if use.forced:
        return Grammar(kind="lark", text=_call_grammar(use.offered, parallel))
    if form is None or form.type == "text":
        return None
    if use.offered:
        either = _call_grammar(use.offered, parallel, beside=schema if schema is not None else {"type": "object"})
        return Grammar(kind="lark", text=either)
    if schema is None:
        return Grammar(kind="json_object")
    return Grammar(kind="json_schema", text=json.dumps(schema))


def _call_grammar(tools: Sequence[Tool], parallel: bool, beside: dict[str, Any] | None = None) -> str:
    definitions = {}
    forms = []
    for number, tool in enumerate(tools):
        schema = tool.function.parameters or {"type": "object"}
        definitions[f"tool{number}"] = _moved(schema, f"#/$defs/tool{number}")
        forms.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "arguments": {"$ref": f"#/$defs/tool{number}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    root = {"x-guidance": _SPACING, "anyOf": forms, "$defs": definitions}
    lines = [
        f"start: {'call+' if parallel else 'call'}{'' if beside is None else ' | answer'}",
        f'call: "{CALL_START}" body "{CALL_END}"',
        f"body: %json {json.dumps(root)}",
    ]
    if beside is not None:
        lines.append(f"answer: %json {json.dumps(beside)}")
    return "\n".join(lines) + "\n"


def _moved(schema: Any, root: str) -> Any:
    """``schema`` with its references to its own root pointing at ``root``, where it now lies."""
    if isinstance(schema, dict):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, root)
            for key, value in schema.items()
        }
    return [_moved(each, root) for each in schema] if isinstance(schema, list) else schema


def read_call(text: str) -> Call | None:
    """The call that ``text`` (between the marks) spells, or None."""
    try:
        tree = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    tree = tree.get("function", tree) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        return None
    arguments = tree.get("arguments", {})
    if isinstance(arguments, str):  # some models write the object as a string of JSON
        return Call(_call_id(), tree["name"], arguments)
    return Call(_call_id(), tree["name"], json.dumps(arguments, ensure_ascii=False))


class CallReader:
    """Splits streamed text into content and calls; holds back what may be the beginning of a mark."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._searched = 0  # within the held call: no end mark that closes a readable call lies before

    def push(self, text: str) -> list[str | Call]:
        """What is certain now: pieces of content and finished calls, in order."""
        self._held += text
        found: list[str | Call] = []
        while self._take_call(found) if self._inside else self._take_content(found):
            pass
        return found

    def finish(self) -> list[str | Call]:
        """The rest; a call that was not finished is text."""
        rest = (CALL_START if self._inside else "") + self._held
        self._held, self._inside = "", False
        return [rest] if rest else []

    def _take_content(self, found: list[str | Call]) -> bool:
        start = self._held.find(CALL_START)
        keep = start if start >= 0 else len(self._held) - _overlap(self._held, CALL_START)
        if self._held[:keep]:
            found.append(self._held[:keep])
        self._held = self._held[keep:]
        if start < 0:
            return False
        self._held, self._inside, self._searched = self._held[len(CALL_START) :], True, 0
        return True

    def _take_call(self, found: list[str | Call]) -> bool:
        # An end mark inside a string of the arguments does not close the call: what is before it is not yet JSON.
        while (end := self._held.find(CALL_END, self._searched)) >= 0:
            call = read_call(self._held[:end])
            if call is not None:
                found.append(call)
                self._held, self._inside = self._held[end + len(CALL_END) :], False
                return True
            self._searched = end + len(CALL_END)
        return False


def read_answer(text: str) -> tuple[str, list[Call]]:
    """Content and calls of a whole answer; white space between calls is no content."""
    reader = CallReader()
    pieces = [*reader.push(text), *reader.finish()]
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return (content.strip() if calls else content), calls


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
