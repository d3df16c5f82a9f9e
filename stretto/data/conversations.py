"""Conversations from records: TRL's conversational, prompt-completion and tool formats, and which turns are learnt.

``messages`` are turns with ``role`` and ``content`` (a text, or parts that are texts), of an assistant also ``tool_calls``;
``tools`` are JSON schemas, a list or the JSON text of one; ``chat_template_kwargs`` go to the template. ``prompt`` and
``completion`` are both texts or both turns. Every turn of an assistant is learnt, but those of a prompt and those that say
``"train": false`` (Axolotl's key) or ``"weight": 0`` (OpenAI's and Mistral's). ``domain`` says where a conversation comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import UserError, nearest
from stretto.data.shards import TokenSet
from stretto.data.sources import Document, is_writable

ROLES = ("system", "developer", "user", "assistant", "tool")
FORMATS = "messages, or prompt and completion"
_FOREIGN = {
    "conversations": 'rename it to messages, with "role" (user, assistant) and "content" for "from" and "value"',
    "text": "plain text is learnt by `stretto pretrain --from`; give prompt and completion to learn answers",
    "instruction": "rename it to prompt, and its output to completion",
}
"""Fields of other formats, and what to do with them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One example. Written by `read_conversation`."""

    messages: tuple[Mapping[str, Any], ...]
    """As chat templates read them: contents are texts, arguments of calls are objects."""
    is_learnt: tuple[bool, ...]
    """One a message: whether a loss is taken of it."""
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] | None = None
    """What else the template is given."""
    is_plain: bool = False
    """Prompt and completion are texts that no template renders; the end of text follows."""

    def to_json(self) -> str:
        """On one line, as `stretto.text.chat.ChatEncoder` reads it."""
        told = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({name: value for name, value in told.items() if value}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ConversationForm:
    """Records as conversations: a `stretto.data.sources.Form`, whose documents' texts are `Conversation.to_json`."""

    domain: str = ""
    """Of records that name none."""

    @property
    def columns(self) -> None:
        return None

    @property
    def blank(self) -> str:
        return "conversations without a turn to learn"

    def document(self, record: dict[str, Any], place: str) -> Document:
        domain = record.get("domain")
        if domain is not None and not isinstance(domain, str):
            raise UserError(f"{place}: domain: {_kind(domain)}, not a text; name where the conversation comes from")
        conversation = read_conversation(record, place)
        text = conversation.to_json() if any(conversation.is_learnt) else ""
        if not is_writable(text):
            raise UserError(f"{place}: half of a surrogate pair, which is no character; remove it")
        return Document(text, domain or self.domain, place)


def read_conversation(record: Mapping[str, Any], place: str) -> Conversation:
    """The conversation of ``record``, which stands at ``place`` (a file and a line).

    Raises:
        UserError: it is none; the message names place, turn and remedy.
    """
    record = {name: value for name, value in record.items() if value is not None}
    tools = _listed(record.get("tools", ()), f"{place}: tools")
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise UserError(f"{place}: tools: tool {number}: {_kind(tool)}, not an object; give its JSON schema")
    variables = record.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        raise UserError(
            f"{place}: chat_template_kwargs: {_kind(variables)}, not an object; name the template's variables"
        )
    offered, given = tuple(_without_nulls(tools)), _without_nulls(variables)
    if "messages" in record:
        messages, is_learnt = _turns(record["messages"], f"{place}: messages")
        return Conversation(messages, is_learnt, offered, given)
    if "prompt" not in record or "completion" not in record:
        _refuse(record, place)
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": completion})
        return Conversation(messages, (False, bool(completion)), is_plain=True)
    for name, part in (("prompt", prompt), ("completion", completion)):
        if isinstance(part, str):
            raise UserError(f"{place}: {name}: a text, and the other is turns; give both as texts or both as turns")
    before, _ = _turns(prompt, f"{place}: prompt")
    after, is_learnt = _turns(completion, f"{place}: completion", len(before))
    return Conversation((*before, *after), (*(False for _ in before), *is_learnt), offered, given)


def _refuse(record: Mapping[str, Any], place: str) -> NoReturn:
    found = next((f"; {name}: {remedy}" for name, remedy in _FOREIGN.items() if name in record), "")
    raise UserError(f"{place}: no {FORMATS}; it has {', '.join(map(str, record))[:200] or 'no field'}{found}")


def _turns(told: Any, place: str, first: int = 0) -> tuple[tuple[Mapping[str, Any], ...], tuple[bool, ...]]:
    """Turns, and which of them are learnt; ``first``: how many come before them."""
    turns = _listed(told, place)
    if not turns:
        raise UserError(f"{place}: empty; give at least one turn, or remove the record")
    read = [_turn(turn, f"{place}: turn {number}") for number, turn in enumerate(turns)]
    if not first and read[0][0]["role"] in ("assistant", "tool"):
        raise UserError(
            f"{place}: turn 0: the {read[0][0]['role']} cannot speak first; begin with a system or user turn"
        )
    return tuple(turn for turn, _ in read), tuple(is_learnt for _, is_learnt in read)


def _turn(turn: Any, place: str) -> tuple[dict[str, Any], bool]:
    if not isinstance(turn, Mapping):
        raise UserError(f'{place}: {_kind(turn)}, not an object; give {{"role": …, "content": …}}')
    turn = {name: value for name, value in turn.items() if value is not None}
    role = turn.get("role")
    if role is None:
        raise UserError(f"{place}: no role; it has {', '.join(map(str, turn))[:200] or 'no field'}")
    if role not in ROLES:
        raise UserError(f"{place}: role {role!r}{nearest(str(role), ROLES)}; use {', '.join(ROLES)}")
    is_learnt = role == "assistant"
    for key in ("train", "weight"):
        said = turn.pop(key, None)
        if said is None:
            continue
        if said not in (0, 1):
            raise UserError(f"{place}: {key}: {said!r}; write {'true or false' if key == 'train' else '0 or 1'}")
        if said and role != "assistant":
            raise UserError(
                f"{place}: {key}: only the assistant's turns are learnt, this is the {role}'s; leave it out"
            )
        is_learnt = is_learnt and bool(said)
    calls = [
        _call(call, f"{place}: tool_calls") for call in _listed(turn.pop("tool_calls", ()), f"{place}: tool_calls")
    ]
    if calls and role != "assistant":
        raise UserError(
            f"{place}: tool_calls: only an assistant calls tools, this is the {role}'s turn; correct the role"
        )
    if "content" not in turn and not calls:
        raise UserError(f"{place}: no content" + (" and no tool_calls" if role == "assistant" else "") + "; fill it")
    turn["content"] = _content(turn.get("content", ""), f"{place}: content")
    turn["role"] = "system" if role == "developer" else role  # as requests are rendered
    return turn | ({"tool_calls": calls} if calls else {}), is_learnt


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    parts = []
    for number, part in enumerate(_listed(content, place)):
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            if isinstance(part, Mapping) and part.get("type") == "text":
                raise UserError(
                    f"{place}: part {number}: no text; it has {', '.join(map(str, part))}; put it into a field text"
                )
            kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
            raise UserError(f"{place}: part {number}: {kind!r} is no text, and the network reads text only; remove it")
        parts.append(text)
    return "".join(parts)


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(function, Mapping):
        raise UserError(f'{place}: a call without a name; give {{"function": {{"name": …, "arguments": …}}}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise UserError(f"{place}: arguments of {name} are not JSON: {error}; correct them") from None
    arguments = {} if arguments is None else _without_nulls(arguments)
    if not isinstance(arguments, Mapping):
        raise UserError(f"{place}: arguments of {name}: {_kind(arguments)}, not an object; name each argument")
    named = {"id": call["id"]} if call.get("id") is not None else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def _listed(value: Any, place: str) -> Sequence[Any]:
    """A list, or the JSON text of one, as columns whose records have different fields are kept."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise UserError(f"{place}: a text that is not JSON; give a list") from None
    if not isinstance(value, list | tuple):
        raise UserError(f"{place}: {_kind(value)}, not a list")
    return value


def _without_nulls(value: Any) -> Any:
    """``value`` without the fields that are null: Arrow gives every record of a column the fields of all."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _kind(value: Any) -> str:
    names = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")


Long = Literal["refuse", "cut", "leave_out"]


class Fitted:
    """The conversations of a `TokenSet` that rows of ``seq_len`` hold, whole or, where told so, cut."""

    def __init__(self, data: TokenSet, seq_len: int, long: Long, domain: str | None = None) -> None:
        """
        Args:
            long: what becomes of longer ones: an error, their first ``seq_len`` tokens, or nothing. Cut ones of which
                nothing is learnt are left out.
            domain: take this one alone; None: all.

        Raises:
            UserError: some are too long and may be neither cut nor left out, or none is left.
        """
        numbers = np.arange(data.num_documents) if domain is None else data.of_domain(domain)
        lengths = data.lengths(numbers)
        too_long = numbers[lengths > seq_len]
        self.num_before, self.num_long, self.longest = (
            len(numbers),
            len(too_long),
            int(lengths.max(initial=0)),
        )
        if len(too_long) and long == "refuse":
            raise UserError(
                f"train.seq_len: {seq_len} tokens hold all but {len(too_long):,} of {len(numbers):,} conversations, the "
                f'longest has {self.longest:,}; raise it, or set long = "cut" or "leave_out"'
            )
        kept = [number for number in too_long if long == "cut" and self._teaches(data, int(number), seq_len)]
        self.num_left_out = len(too_long) - len(kept)
        self._data, self._seq_len = data, seq_len
        self._numbers: NDArray[np.int64] = np.sort(
            np.concatenate([numbers[lengths <= seq_len], np.array(kept, np.int64)])
        )
        if not len(self._numbers):
            raise UserError(
                f"--data: no conversation is left: all {len(numbers):,} are longer than train.seq_len {seq_len}"
            )

    @staticmethod
    def _teaches(data: TokenSet, number: int, seq_len: int) -> bool:
        learnt = data.learnt(number)
        return learnt is None or bool(learnt[1:seq_len].any())

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
