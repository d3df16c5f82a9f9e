"""Conversations from records in TRL's conversational, prompt-completion and tool formats, and the turns of which a loss is taken.

``messages`` are turns with ``role`` and ``content`` (a text, or a list of text parts); turns of an assistant may have
``tool_calls``. ``tools`` are JSON schemas, as a list or as the JSON text of a list. ``chat_template_kwargs`` are passed to the
template. ``prompt`` and ``completion`` are both texts or both lists of turns. A loss is taken of every turn of the assistant,
except turns of a prompt and turns with ``"train": false`` (Axolotl's key) or ``"weight": 0`` (OpenAI's and Mistral's). ``domain``
names the origin of a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import UserError, nearest
from stretto.data.shards import TokenSet
from stretto.data.sources import Document, is_writable, json_kind

ROLES = ("system", "developer", "user", "assistant", "tool")
FORMATS = "messages, or prompt and completion"
_FOREIGN = {
    "conversations": 'rename it to messages, with "role" (user, assistant) and "content" for "from" and "value"',
    "text": "plain text is learnt by `stretto pretrain --from`; give prompt and completion to learn answers",
    "instruction": "rename it to prompt, and its output to completion",
}
"""Fields of other formats, and how to convert them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One example. Written by `read_conversation`."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages in the form of chat templates: contents are texts, arguments of calls are objects."""
    is_learnt: tuple[bool, ...]
    """One per message: whether a loss is taken of it."""
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] | None = None
    """Further variables for the chat template."""
    is_plain: bool = False
    """Prompt and completion are texts without a chat template; the end-of-text token follows."""

    def to_json(self) -> str:
        """One line of JSON, the input of `stretto.text.chat.ChatEncoder`."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({name: value for name, value in values.items() if value}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ConversationForm:
    """Parser of conversations: a `stretto.data.sources.Form` whose documents have `Conversation.to_json` as their text."""

    domain: str = ""
    """Domain of records without one."""

    @property
    def columns(self) -> None:
        return None

    @property
    def blank(self) -> str:
        return "conversations without a turn to learn"

    def document(self, record: dict[str, Any], place: str) -> Document:
        domain = record.get("domain")
        if domain is not None and not isinstance(domain, str):
            raise UserError(f"{place}: domain: {json_kind(domain)}, not a text; name where the conversation comes from")
        conversation = read_conversation(record, place)
        text = conversation.to_json() if any(conversation.is_learnt) else ""
        if not is_writable(text):
            raise UserError(f"{place}: half of a surrogate pair, which is not a character; remove it")
        return Document(text, domain or self.domain, place)


def read_conversation(record: Mapping[str, Any], place: str) -> Conversation:
    """The conversation in ``record``. ``place``: file and line of the record, for error messages.

    Raises:
        UserError: not a conversation; the message names place, turn and remedy.
    """
    record = _without_nulls(record)
    tools = tuple(
        _object(tool, f"{place}: tools: tool {number}", "give its JSON schema")
        for number, tool in enumerate(_list(record.get("tools", ()), f"{place}: tools"))
    )
    variables = record.get("chat_template_kwargs")
    if variables is not None:
        _object(variables, f"{place}: chat_template_kwargs", "name the template's variables")
    if "messages" in record:
        return Conversation(*_turns(record["messages"], f"{place}: messages"), tools, variables)
    if "prompt" not in record or "completion" not in record:
        remedy = next((f"; {name}: {remedy}" for name, remedy in _FOREIGN.items() if name in record), "")
        raise UserError(f"{place}: no {FORMATS}; it has {_fields(record)}{remedy}")
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": completion})
        return Conversation(messages, (False, bool(completion)), is_plain=True)
    for name, part in (("prompt", prompt), ("completion", completion)):
        if isinstance(part, str):
            raise UserError(f"{place}: {name}: a text, and the other is turns; give both as texts or both as turns")
    before, _ = _turns(prompt, f"{place}: prompt")
    after, is_learnt = _turns(completion, f"{place}: completion", is_start=False)
    return Conversation((*before, *after), (*[False] * len(before), *is_learnt), tools, variables)


def _turns(value: Any, place: str, is_start: bool = True) -> tuple[tuple[Mapping[str, Any], ...], tuple[bool, ...]]:
    """Messages, and for each whether a loss is taken of it."""
    turns = _list(value, place)
    if not turns:
        raise UserError(f"{place}: empty; give at least one turn, or remove the record")
    parsed = [_turn(turn, f"{place}: turn {number}") for number, turn in enumerate(turns)]
    if is_start and (role := parsed[0][0]["role"]) in ("assistant", "tool"):
        raise UserError(f"{place}: turn 0: the {role} cannot speak first; begin with a system or user turn")
    return tuple(turn for turn, _ in parsed), tuple(is_learnt for _, is_learnt in parsed)


def _turn(value: Any, place: str) -> tuple[dict[str, Any], bool]:
    """One message in the form of chat templates, and whether a loss is taken of it."""
    turn = dict(_object(value, place, 'give {"role": …, "content": …}'))
    role = turn.get("role")
    if role not in ROLES:
        what = "no role; it has " + _fields(turn) if role is None else f"role {role!r}{nearest(str(role), ROLES)}"
        raise UserError(f"{place}: {what}; use {', '.join(ROLES)}")
    is_learnt = role == "assistant"
    for key, values in (("train", "true or false"), ("weight", "0 or 1")):
        flag = turn.pop(key, is_learnt)
        if flag not in (0, 1):
            raise UserError(f"{place}: {key}: {flag!r}; write {values}")
        if flag and role != "assistant":
            raise UserError(f"{place}: {key}: only the assistant's turns are learnt, not the {role}'s; remove it")
        is_learnt = is_learnt and bool(flag)
    of_calls = f"{place}: tool_calls"
    calls = [_call(call, of_calls) for call in _list(turn.pop("tool_calls", ()), of_calls)]
    if calls and role != "assistant":
        raise UserError(f"{of_calls}: only an assistant calls tools, this is the {role}'s turn; correct the role")
    if "content" not in turn and not calls:
        raise UserError(f"{place}: no content" + (" and no tool_calls" if role == "assistant" else "") + "; add it")
    turn["content"] = _content(turn.get("content", ""), f"{place}: content")
    turn["role"] = "system" if role == "developer" else role  # as the server renders requests
    return turn | ({"tool_calls": calls} if calls else {}), is_learnt


def _content(content: Any, place: str) -> str:
    """The text of a message: ``content`` itself, or its text parts joined."""
    if not isinstance(content, str | list | tuple):
        raise UserError(f"{place}: {json_kind(content)}, not a text; write a string, or a list of text parts")
    texts = []
    for number, part in enumerate([content] if isinstance(content, str) else content):
        fields = part if isinstance(part, Mapping) else {"text": part}
        if not isinstance(fields.get("text"), str):
            if fields.get("type") == "text":
                problem = f"no text; it has {_fields(fields)}; put the text into a field named text"
            else:
                problem = (
                    f"{fields.get('type', json_kind(part))!r} is not text, and the network reads text only; remove it"
                )
            raise UserError(f"{place}: part {number}: {problem}")
        texts.append(fields["text"])
    return "".join(texts)


def _call(call: Any, place: str) -> dict[str, Any]:
    """A tool call in the form of chat templates, with its arguments parsed."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
        raise UserError(f'{place}: a call without a name; give {{"function": {{"name": …, "arguments": …}}}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _without_nulls(json.loads(arguments or "{}"))
        except ValueError as error:
            raise UserError(f"{place}: arguments of {name} are not JSON: {error}; correct them") from None
    arguments = _object({} if arguments is None else arguments, f"{place}: arguments of {name}", "name each argument")
    named = {"id": call["id"]} if "id" in call else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def _object(value: Any, place: str, remedy: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: {json_kind(value)}, not an object; {remedy}")
    return value


def _list(value: Any, place: str) -> Sequence[Any]:
    """``value`` as a list. It may be the JSON text of a list: the form in which columns of records with different fields are stored."""
    if isinstance(value, str):
        try:
            value = _without_nulls(json.loads(value))
        except ValueError:
            raise UserError(f"{place}: a text that is not JSON; give a list") from None
    if not isinstance(value, list | tuple):
        raise UserError(f"{place}: {json_kind(value)}, not a list")
    return value


def _without_nulls(value: Any) -> Any:
    """``value`` without null fields: Arrow gives every record of a column the fields of all its records."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _fields(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record))[:200] or "no field"


Long = Literal["refuse", "cut", "leave_out"]


class Fitted:
    """The conversations of a `TokenSet` that fit into rows of ``seq_len`` tokens: an implementation of `stretto.data.loader.Documents`."""

    def __init__(self, data: TokenSet, seq_len: int, long: Long, domain: str | None = None) -> None:
        """Select the conversations of ``data``.

        Args:
            long: treatment of longer ones: an error, cut to the first ``seq_len`` tokens, or left out. A cut conversation without a
                target token is left out.
            domain: use this domain only; None: all.

        Raises:
            UserError: some are too long and ``long`` is ``refuse``, or none is left.
        """
        numbers = np.arange(data.num_documents) if domain is None else data.of_domain(domain)
        lengths = data.lengths(numbers)
        is_long, self.longest = lengths > seq_len, int(lengths.max(initial=0))
        self.num_before, self.num_long = len(numbers), int(is_long.sum())
        if self.num_long and long == "refuse":
            raise UserError(
                f"train.seq_len: {seq_len} tokens hold all but {self.num_long:,} of {len(numbers):,} conversations, the "
                f'longest has {self.longest:,}; raise it, or set long = "cut" or "leave_out"'
            )
        self._data, self._seq_len, self._numbers = data, seq_len, numbers
        fits = [not exceeds or (long == "cut" and self._has_target(at)) for at, exceeds in enumerate(is_long)]
        self._numbers = numbers[fits]
        self.num_left_out = len(numbers) - len(self._numbers)
        if not len(self._numbers):
            raise UserError(
                f"--data: no conversation is left: all {len(numbers):,} are longer than train.seq_len {seq_len}"
            )

    def _has_target(self, number: int) -> bool:
        """Whether a loss is taken of any token of conversation ``number`` after the cut."""
        learnt = self.learnt(number)
        return learnt is None or bool(learnt[1:].any())

    @property
    def split(self) -> str:
        return self._data.split

    @property
    def identity(self) -> str:
        return f"{self._data.identity}:{len(self._numbers)}"

    @property
    def num_documents(self) -> int:
        return len(self._numbers)

    def lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(self._data.lengths(self._numbers[documents]), self._seq_len)

    def document(self, number: int) -> NDArray[np.unsignedinteger]:
        return self._data.document(int(self._numbers[number]))[: self._seq_len]

    def learnt(self, number: int) -> NDArray[np.bool_] | None:
        learnt = self._data.learnt(int(self._numbers[number]))
        return None if learnt is None else learnt[: self._seq_len]
