"""Chat templates: the only place that renders messages, and that says which of their tokens the model itself wrote.

Templates are Jinja sources as in a checkpoint's ``chat_template.jinja``, rendered in Jinja's sandbox with the helpers that
transformers offers them (without loading it, which takes seconds), so that it is what other software renders.

Many templates know no tools, or leave out the calls of earlier turns, or what they gave. `tool_form` finds that out by
rendering a conversation and looking for what was put into it, as llama.cpp's minja does; what is missing is written in one form
of ours into turns that the template does know, wherever conversations are rendered.

What the assistant wrote is what the template itself marks (``{% generation %}``), else what a turn adds to the conversation
before it. Each turn is encoded apart from what precedes it, as it is when a model is sampled: a token never spans the border
between a prompt and an answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from itertools import takewhile
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stretto.base.errors import UserError
from stretto.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""``{"role": …, "content": …}``, optionally ``tool_calls``, as in TRL's conversational format."""

CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools, one JSON object a line; call one with <tool_call>{"name": …, "arguments": …}</tool_call>:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ((call.function or call) | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""The template of tokenizers that we train."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as tokens, written by `tokenise_chat`."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    """One a token: whether the assistant wrote it (its end-of-turn token included), so that a loss may be taken."""


_MARKS = {"generation_start": "\ufdd0", "generation_end": "\ufdd1"}
"""What answers stand between while a template that marks them is rendered: no characters, by Unicode's own word."""
OWN_NAMES = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", *_MARKS)
"""What `render` gives every template."""
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_FEW = 8
"""Answers up to which each is looked for in the whole conversation before it; the work grows with their square."""


class Arguments(dict[str, Any]):
    """Arguments of a call for a template: an object to most, JSON to those that append it to a text (DeepSeek's)."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, text: str) -> str:
        return text + str(self)

    def __add__(self, text: str) -> str:
        return str(self) + text


_HIDDEN = "\ue000{}\ue001"
_HIDDEN_MARK = re.compile("\ue000(\\d+)\ue001")


@lru_cache(maxsize=8)
def _special_spelling(tokenizer: Tokenizer) -> re.Pattern[str]:
    added = tokenizer.rust.get_added_tokens_decoder().values()
    special = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(["\ue000", *map(re.escape, special)]))  # our own mark is one, too


class Contents:
    """What clients and data spell in one conversation: a message that spells ``<|im_end|>`` must not end its own turn.

    `hidden` replaces spellings of special tokens by marks while a template renders; `encode` writes them as ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._spelling = tokenizer, _special_spelling(tokenizer)
        self._found: list[str] = []

    def hidden(self, value: Any) -> Any:
        """``value`` with marks in its strings."""
        if isinstance(value, Mapping):
            kind = type(value) if isinstance(value, dict) else dict
            return kind({self.hidden(key): self.hidden(item) for key, item in value.items()})
        if isinstance(value, list):
            return [self.hidden(item) for item in value]
        return self._spelling.sub(self._hide, value) if isinstance(value, str) else value

    def encode(self, text: str) -> list[int]:
        """Ids of rendered ``text``: special tokens are those that the template wrote."""
        ids: list[int] = []
        for number, piece in enumerate(_HIDDEN_MARK.split(text)):
            if number % 2:
                ids += self._tokenizer.encode(self._found[int(piece)])
            elif piece:
                ids += self._tokenizer.encode_rendered(piece)
        return ids

    def _hide(self, match: re.Match[str]) -> str:
        self._found.append(match.group())
        return _HIDDEN.format(len(self._found) - 1)


def named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Spellings of the special tokens that templates know by name (``bos_token``…), as transformers gives them."""
    told = {name: value for name, value in tokenizer.config.items() if name.endswith("_token")}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in told.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def render(
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Text of ``messages`` under a chat template, with all that it does not show of tools in the form of ours.

    Args:
        template: Jinja source.
        messages: at least one.
        tools: JSON schemas of the functions that may be called.
        add_generation_prompt: end with the header of an assistant turn that is yet to be written.
        variables: what else the template may ask for; not one of `OWN_NAMES`.

    Raises:
        UserError: the template is not valid or refuses the messages.
    """
    if not messages:
        raise UserError("messages: the conversation is empty; give at least one message")
    is_plain = not tools and all(not each.get("tool_calls") and each.get("role") != "tool" for each in messages)
    form = None if is_plain else tool_form(template)
    offered: dict[str, Any] = {"tools": None}
    if tools and form is not None and form.variable is not None:
        offered[form.variable] = list(tools)
    try:
        messages = messages if form is None else form.told(messages, tools)
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return _compile(template).render({**(variables or {}), **given, **offered})
    except _REFUSED as error:
        raise UserError(f"chat_template: cannot render these messages: {error}; check roles and contents") from None


_REFUSED = (jinja2.TemplateError, TypeError, ValueError, OverflowError)
_BLOCK = """\
You can call these functions, one JSON object each:
{tools}
To call one, write {call}
If none of them helps, answer without a call."""
_CALL = "<tool_call>{}</tool_call>"
_RESULT = "<tool_response>\n{}\n</tool_response>"


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a chat template puts tools. Written by `tool_form`."""

    variable: str | None
    """The name that it takes them under; None: it shows none, or not all that is said of one."""
    shows_calls: bool
    """Where it does not, it is given no tools either, whatever it says of them: calls have one form."""
    shows_results: bool
    has_system: bool
    call: str
    """How a turn calls the function ``calledname`` with ``{"calledkey": "calledvalue"}``."""

    def note(self) -> str:
        """A line for users where something is in our form; else empty."""
        shown = {"tools": self.variable, "calls of tools": self.shows_calls, "results of tools": self.shows_results}
        missing = [what for what, is_shown in shown.items() if not is_shown]
        return (
            f"tools: the chat template leaves out {', '.join(missing)}; Stretto adds them in its own format"
            if missing
            else ""
        )

    def told(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
        """``messages`` with what the template does not show in their contents."""
        turns: list[dict[str, Any]] = []
        for number, message in enumerate(messages):
            turn = dict(message)
            if turn.get("tool_calls") and not self.shows_calls:
                calls = [_CALL.format(_json(call.get("function", call))) for call in turn.pop("tool_calls")]
                turn["content"] = "\n".join(filter(None, [turn.get("content"), *calls]))
            elif turn.get("role") == "tool" and not self.shows_results:
                turn = {"role": "user", "content": _RESULT.format(turn["content"])}
                if number and messages[number - 1].get("role") == "tool":  # users seldom speak twice
                    turn["content"] = f"{turns.pop()['content']}\n{turn['content']}"
            turns.append(turn)
        if tools and self.variable is None:
            told = "\n".join(_json(tool.get("function", tool)) for tool in tools)
            words = {"calledname": "NAME", "calledkey": "ARGUMENT", "calledvalue": "VALUE"}
            call = re.sub("|".join(words), lambda match: words[match.group()], self.call).strip()
            block, roles = _BLOCK.format(tools=told, call=call), [turn.get("role") for turn in turns]
            if self.has_system and roles[:1] == ["system"]:
                turns[0]["content"] = f"{turns[0]['content']}\n\n{block}"
            elif not self.has_system and "user" in roles:
                first = turns[roles.index("user")]
                first["content"] = f"{block}\n\n{first['content']}"
            else:
                turns.insert(0, {"role": "system" if self.has_system else "user", "content": block})
        return list(turns)


@lru_cache(maxsize=8)
def tool_form(template: str) -> ToolForm:
    """How ``template`` puts tools, calls and results, by what it makes of some. Raises `UserError`: it is not valid."""
    try:
        names = meta.find_undeclared_variables(_environment().parse(template))
    except jinja2.TemplateError as error:
        raise UserError(f"chat_template: {error}; mend it") from None
    blank = {name: "" for name in names if name.endswith("_token")}

    def shows(words: Sequence[str], *turns: Message, header: bool = False, **given: Any) -> str:
        """The text, if ``words`` are in it; else nothing."""
        told = {"messages": turns, "tools": None, "add_generation_prompt": header}
        try:
            text = _compile(template).render({**blank, **told, **given})
        except _REFUSED:
            return ""
        return text if all(word in text for word in words) else ""

    system, asked = {"role": "system", "content": "systemsaid"}, {"role": "user", "content": "usersaid"}
    has_system = bool(shows(["systemsaid", "usersaid"], system, asked))
    starts = [[asked], [system, asked]] if has_system else [[asked]]
    schema = {"type": "object", "properties": {"offeredkey": {"type": "string", "description": "keymeaning"}}}
    function = {"name": "offeredname", "description": "offeredmeaning", "parameters": schema}
    tools: Any = [{"type": "function", "function": function}]
    words = ["offeredname", "offeredmeaning", "offeredkey", "keymeaning"]
    variable = next(
        (
            name
            for name in ["tools", *sorted(name for name in names if "tools" in name)]
            if all(shows(words, *start, header=True, **{name: tools}) for start in starts)
        ),
        None,
    )
    offered: dict[str, Any] = {} if variable is None else {variable: tools}
    called = {"name": "calledname", "arguments": Arguments({"calledkey": "calledvalue"})}
    calling = {"role": "assistant", "tool_calls": [{"id": "call00001", "type": "function", "function": called}]}
    words, answered = ["calledname", "calledkey", "calledvalue"], {"role": "assistant", "content": "answered"}
    text = shows(words, asked, {**calling, "content": ""}, **offered)
    shows_calls = bool(text and shows(words, asked, {**calling, **answered}, **offered))  # some: beside no content
    if shows_calls:
        prompt, plain = shows([], asked, header=True, **offered), shows([], asked, answered, **offered)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False))
        head = "".join(letter for letter, _ in same)
        head = head if head == prompt else re.sub(r"<\w*$", "", head)  # the prompt opens reasoning, in another mark
        call = text.removeprefix(head).removesuffix(plain.rpartition("answered")[2])
    else:
        variable, call = None, _CALL.format(_json(called))
    before = {**calling, "content": ""} if shows_calls else answered
    result = {"role": "tool", "tool_call_id": "call00001", "name": "calledname", "content": "resultsaid"}
    return ToolForm(variable, shows_calls, bool(shows(["resultsaid"], asked, before, result)), has_system, call)


def _json(function: Mapping[str, Any]) -> str:
    return json.dumps(function, ensure_ascii=False)


def tokenise_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    *,
    is_learnt: Sequence[bool] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Chat:
    """Token ids of a conversation, and which of them the assistant wrote. Special tokens that a turn of another role spells are
    ordinary text.

    Args:
        is_learnt: one a message: turns of the assistant whose mask stays off; None: none does.
        variables: as of `render`.

    Raises:
        UserError: no template; or one that marks no answers and rewrites earlier turns when later ones arrive (some drop
            old reasoning): train such conversations one answer at a time. Or one that leaves out tools or calls of these.
    """
    template = tokenizer.chat_template
    if template is None:
        raise UserError("chat_template: the tokenizer has none; put a chat_template.jinja beside its tokenizer.json")
    contents = Contents(tokenizer)
    # What the assistant wrote stays: marks of calls and reasoning that it learns to write may be special tokens.
    messages = [each if each.get("role") == "assistant" else contents.hidden(each) for each in messages]
    tools = [contents.hidden(tool) for tool in tools]
    given = {**named_tokens(tokenizer), **contents.hidden(variables or {})}
    rendered = partial(render, template, tools=tools, variables=given)
    check_shown(rendered, messages, tools)
    turns = [turn for turn, message in enumerate(messages) if message.get("role") == "assistant"]
    learnt = [turn for turn in turns if is_learnt is None or is_learnt[turn]]
    is_marked = _MARKED.search(template) is not None
    if is_marked:
        pieces = _marked_pieces(rendered, messages)
        if len(learnt) < len(turns) != len(pieces) // 2:
            problem = f"the chat template marks {len(pieces) // 2} answers of {len(turns)}"
            raise UserError(f"messages: {problem}, so that none can be left out; remove train and weight")
        if learnt == turns:
            turns = learnt = list(range(len(pieces) // 2))
    else:
        pieces = _turn_pieces(rendered, messages, turns)
    special = tokenizer.special_ids()
    tokens: list[int] = []
    mask: list[bool] = []
    has_no_end = False
    for number, piece in enumerate(pieces):
        ids = contents.encode(piece)
        num = int(has_no_end and ids[:1] != [] and ids[0] in special)  # the template left the end out of its mark
        has_no_end = False
        if number % 2 and turns[number // 2] in learnt:
            end = max((end for end, token in enumerate(ids, start=1) if token in special), default=None)
            # behind an answer's end a template writes (the line break of ChatML) what nobody samples
            num = len(ids) if end is None or is_marked else end
            has_no_end = end is None
        tokens += ids
        mask += [True] * num + [False] * (len(ids) - num)
    return Chat(tuple(tokens), tuple(mask))


Rendered = Callable[..., str]
"""`render`, which needs messages alone."""


def check_shown(rendered: Rendered, messages: Sequence[Message], tools: Sequence[Message]) -> None:
    """Raises `UserError`: what the template makes of this conversation is the same without its tools, its calls, or the last of
    several calls."""
    less: dict[str, tuple[Sequence[Message], Sequence[Message]]] = {"tools": (messages, ())} if tools else {}
    for what, are_several in (("tool_calls", False), ("several tool_calls of a turn", True)):
        fewer = [_without_last_call(message, are_several) for message in messages]
        if fewer != list(messages):
            less[what] = fewer, tools
    full = rendered(messages, tools=tools) if less else ""
    for what, (others, offered) in less.items():
        try:
            is_same = rendered(others, tools=offered) == full
        except UserError:  # refused without them: so they are seen
            continue
        if is_same:
            way = "leave them out, or put a chat_template.jinja that renders them beside its tokenizer.json"
            raise UserError(f"{what}: this model's chat template does not show them, it would never see them; {way}")


def _without_last_call(message: Message, are_several: bool) -> Message:
    calls = message.get("tool_calls") or ()
    if not calls or (len(calls) > 1) != are_several:
        return message
    return {**message, "tool_calls": calls[:-1]} if are_several else {**message, "tool_calls": None}


def _marked_pieces(rendered: Rendered, messages: Sequence[Message]) -> list[str]:
    """What stands outside and inside the template's marks, in turn; the first and the last are outside."""
    start, end = _MARKS.values()
    text = rendered(messages, variables={**rendered.keywords["variables"], **_MARKS})  # type: ignore[attr-defined]
    pieces = re.split(f"[{start}{end}]", text)
    if text.count(start) != len(pieces) // 2 or re.search(f"{start}[^{end}]*{start}", text):
        raise UserError("chat_template: its {% generation %} marks are nested; let one end before the next begins")
    return pieces


def _turn_pieces(rendered: Rendered, messages: Sequence[Message], turns: Sequence[int]) -> list[str]:
    """What stands before each of the assistant's ``turns`` and the turn itself, in turn, and what follows the last."""
    if turns and turns[0] == 0:
        raise UserError("messages: message 0: the assistant cannot speak first; begin with a system or user turn")
    full = rendered(messages)
    pieces = _by_windows(rendered, messages, turns, full) if len(turns) > _FEW else None
    if pieces is None:
        pieces, done = [], 0  # characters
        for turn in turns:
            prompt = rendered(messages[:turn], add_generation_prompt=True)
            through = rendered(messages[: turn + 1])
            if not (full.startswith(prompt) and full.startswith(through)) or len(prompt) > len(through):
                problem = "the chat template rewrites earlier turns"
                raise UserError(f"messages: message {turn}: {problem}; split the conversation there")
            pieces += [full[done : len(prompt)], full[len(prompt) : len(through)]]
            done = len(through)
    return [*pieces, full[sum(map(len, pieces)) :]]


def _by_windows(rendered: Rendered, messages: Sequence[Message], turns: Sequence[int], full: str) -> list[str] | None:
    """The same in time that grows with the conversation's length, not its square: each turn is rendered behind the first
    messages and the turn before it alone. None where together they are not the beginning of ``full``: then the template
    looks further back, or writes a turn otherwise when it is not the last.
    """
    head, pieces = messages[: turns[0]], list[str]()
    for before, turn in zip([None, *turns[:-1]], turns, strict=True):
        shown = head if before is None else [*head, *messages[before:turn]]
        known = "" if before is None else rendered([*head, messages[before]])
        prompt, through = rendered(shown, add_generation_prompt=True), rendered([*shown, messages[turn]])
        if not (prompt.startswith(known) and through.startswith(prompt)):
            return None
        pieces += [prompt[len(known) :], through[len(prompt) :]]
    return pieces if full.startswith("".join(pieces)) else None


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Conversations to tokens that say whether they are learnt: a `stretto.data.shards.MarkingEncoder`.

    A text is the JSON object of a `stretto.data.conversations.Conversation`.
    """

    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def fingerprint(self) -> str:
        told = (
            f"{self.tokenizer.fingerprint()}\n{self.tokenizer.chat_template}\n{named_tokens(self.tokenizer)}\nContents"
        )
        return hashlib.sha256(told.encode()).hexdigest()

    def encode_marked(self, texts: Sequence[str], places: Sequence[str], /) -> list[list[int]]:
        """Of each text twice each token's id, and one more where it is learnt; nothing behind the last that is.

        Raises:
            UserError: the chat template refuses a conversation; the message names its place.
        """
        found = []
        for text, place in zip(texts, places, strict=True):
            try:
                chat = self._chat(json.loads(text))
            except UserError as error:
                raise UserError(f"{place}: {error}") from None
            end = max((number for number, is_learnt in enumerate(chat.mask, start=1) if is_learnt), default=0)
            found.append(
                [2 * token + is_learnt for token, is_learnt in zip(chat.tokens[:end], chat.mask, strict=False)]
            )
        return found

    def _chat(self, told: Mapping[str, Any]) -> Chat:
        messages, is_learnt = told["messages"], told["is_learnt"]
        if told.get("is_plain"):
            prompt, answer = (self.tokenizer.encode(message["content"]) for message in messages)
            answer = [*answer, self.tokenizer.eos_id]
            return Chat((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = Arguments(call["function"]["arguments"])
        tools, variables = told.get("tools", ()), told.get("variables")
        return tokenise_chat(self.tokenizer, messages, tools, is_learnt=is_learnt, variables=variables)


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}``: some templates mark answers with it. It renders its body, between marks where
    a caller gives some."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.Name(name, "load")]) for name in _MARKS)
        return [start, *body, end]


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    # As transformers does it: Jinja's own filter would escape HTML.
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **layout: json.dumps(
        value, ensure_ascii=ensure_ascii, **layout
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda layout: datetime.now().strftime(layout)}
    return environment


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
