"""Chat templates: rendering of messages, and the tokens of a conversation that the model itself wrote.

Templates are Jinja sources, as in a checkpoint's ``chat_template.jinja``. They are rendered in Jinja's sandbox with the helper
functions of transformers, whose import would take seconds; the text equals that of transformers.

Many templates show no tools, or omit earlier calls or their results. `tool_form` detects this: it renders a test conversation
and searches the text for its parts, like llama.cpp's minja. Missing parts are then written into turns that the template does
show, in Stretto's own format, wherever conversations are rendered.

The assistant's tokens are those that the template marks (``{% generation %}``), else those that a turn adds to the preceding
conversation. Each turn is encoded separately from the text before it, as in sampling: no token spans the border between a prompt
and an answer.
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
from stretto.text.contents import MARKS, Contents
from stretto.text.tokenizer import Tokenizer, spelling

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
"""Template of the tokenizers that Stretto trains."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as tokens. Written by `tokenise_chat`."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    """One per token: whether the assistant wrote it, end-of-turn token included, so that a loss may be taken of it."""


OWN_NAMES = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", *MARKS)
"""Variables that `render` passes to every template."""
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MAX_QUADRATIC_TURNS = 8
"""Number of answers up to which the conversation before each is rendered; the time grows with the square of the number."""


class Arguments(dict[str, Any]):
    """Arguments of a call for a template: an object for most templates, JSON text for those that append it to a string (DeepSeek's)."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, text: str) -> str:
        return text + str(self)

    def __add__(self, text: str) -> str:
        return str(self) + text


def named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Spellings of the special tokens that templates refer to by name (``bos_token`` etc.), as in transformers."""
    tokens = {name: spelling(value) for name, value in tokenizer.config.items() if name.endswith("_token")}
    return {name: text for name, text in tokens.items() if text is not None}


def render(
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Text of ``messages`` under a chat template. Parts about tools that the template omits are added in Stretto's format.

    Args:
        template: Jinja source.
        messages: at least one.
        tools: JSON schemas of the functions that may be called.
        add_generation_prompt: end with the header of an assistant turn that is to be generated.
        variables: further variables of the template, except `OWN_NAMES`.

    Raises:
        UserError: the template is not valid or refuses the messages.
    """
    if not messages:
        raise UserError("messages: the conversation is empty; give at least one message")
    has_tools = tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
    form = tool_form(template) if has_tools else None
    of_template: dict[str, Any] = {"tools": None}
    if tools and form is not None and form.variable is not None:
        of_template[form.variable] = list(tools)
    try:
        messages = messages if form is None else form.completed(messages, tools)
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return _filled(template, {**(variables or {}), **own, **of_template})
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
    """How a chat template renders tools. Written by `tool_form`."""

    variable: str | None
    """Name of the variable of tools; None: the template shows no tools, or omits a part of their schemas."""
    shows_calls: bool
    """If False, tools are not passed to the template either, so that definitions and calls have the same format."""
    shows_results: bool
    has_system: bool
    call: str
    """Text of a turn that calls the function ``calledname`` with ``{"calledkey": "calledvalue"}``."""
    names_by_id: bool = False
    """Whether the name of a called function is shown by the call's id, ``functions.NAME:NUMBER`` (Kimi K2)."""
    has_short_ids: bool = False
    """Whether the template refuses ids of calls that are not nine letters and digits (Mistral)."""

    def note(self) -> str:
        """A line for users if a part is in Stretto's format, else empty."""
        shown = {"tools": self.variable, "calls of tools": self.shows_calls, "results of tools": self.shows_results}
        missing = ", ".join(name for name, is_shown in shown.items() if not is_shown)
        return f"tools: the chat template leaves out {missing}; Stretto adds them in its own format" if missing else ""

    def completed(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
        """``messages`` with the parts that the template omits written into their contents, and ids as it needs them."""
        messages = _numbered_calls(messages) if self.names_by_id else messages
        messages = _with_short_ids(messages) if self.has_short_ids else messages
        turns: list[Any] = []
        for number, message in enumerate(messages):
            turn = dict(message)
            if turn.get("tool_calls") and not self.shows_calls:
                calls = [_CALL.format(_json(call.get("function", call))) for call in turn.pop("tool_calls")]
                turn["content"] = "\n".join(filter(None, [turn.get("content"), *calls]))
            elif turn.get("role") == "tool" and not self.shows_results:
                turn = {"role": "user", "content": _RESULT.format(turn["content"])}
                if (
                    number and messages[number - 1].get("role") == "tool"
                ):  # some templates refuse two user turns in a row
                    turn["content"] = f"{turns.pop()['content']}\n{turn['content']}"
            turns.append(turn)
        if tools and self.variable is None:
            schemas = "\n".join(_json(tool.get("function", tool)) for tool in tools)
            words = {"calledname": "NAME", "calledkey": "ARGUMENT", "calledvalue": "VALUE"}
            call = re.sub("|".join(words), lambda match: words[match.group()], self.call).strip()
            block, roles = _BLOCK.format(tools=schemas, call=call), [turn.get("role") for turn in turns]
            if self.has_system and roles[:1] == ["system"]:
                turns[0]["content"] = f"{turns[0]['content']}\n\n{block}"
            elif not self.has_system and "user" in roles:
                first = turns[roles.index("user")]
                first["content"] = f"{block}\n\n{first['content']}"
            else:
                turns.insert(0, {"role": "system" if self.has_system else "user", "content": block})
        return turns


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """``messages`` in which every id of a call is nine letters and digits, in the results too."""

    def short(call_id: Any) -> Any:
        is_short = not isinstance(call_id, str) or re.fullmatch("[A-Za-z0-9]{9}", call_id)
        return call_id if is_short else hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]

    turns: list[Message] = []
    for message in messages:
        turn = dict(message)
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = [call | {"id": short(call["id"])} if "id" in call else call for call in calls]
        if "tool_call_id" in turn:
            turn["tool_call_id"] = short(turn["tool_call_id"])
        turns.append(turn)
    return turns


def _numbered_calls(messages: Sequence[Message]) -> list[Message]:
    """``messages`` in which the ids of calls are ``functions.NAME:NUMBER``, counted over the conversation, in the results too. Results
    without a known id belong to the calls before them, in order."""
    turns: list[Message] = []
    ids: dict[str | None, str] = {}
    waiting: list[str] = []
    num_calls = 0
    for message in messages:
        turn = dict(message)
        if calls := turn.get("tool_calls"):
            waiting = [
                f"functions.{call.get('function', call)['name']}:{number}"
                for number, call in enumerate(calls, num_calls)
            ]
            num_calls += len(calls)
            ids |= {call["id"]: new for call, new in zip(calls, waiting, strict=True) if call.get("id")}
            turn["tool_calls"] = [{**call, "id": new} for call, new in zip(calls, waiting, strict=True)]
        elif turn.get("role") == "tool":
            new = ids.get(turn.get("tool_call_id")) or next(iter(waiting), None)
            waiting = [other for other in waiting if other != new]
            turn |= {} if new is None else {"tool_call_id": new}
        turns.append(turn)
    return turns


@lru_cache(maxsize=64)
def tool_form(template: str) -> ToolForm:
    """How ``template`` renders tools, calls and results, found by rendering test messages. Raises `UserError`: it is not valid."""
    try:
        names = _undeclared(template)
    except jinja2.TemplateError as error:
        raise UserError(f"chat_template: {error}; correct the template") from None
    blank = _blank_tokens(template)

    def shows(words: Sequence[str], *turns: Message, header: bool = False, **variables: Any) -> str:
        """The rendered text if it contains all ``words``, else an empty one."""
        own = {"messages": turns, "tools": None, "add_generation_prompt": header}
        try:
            text = _filled(template, {**blank, **own, **variables})
        except _REFUSED:
            return ""
        return text if all(word in text for word in words) else ""

    system, user = {"role": "system", "content": "systemsaid"}, {"role": "user", "content": "usersaid"}
    has_system = bool(shows(["systemsaid", "usersaid"], system, user))
    starts = [[user], [system, user]] if has_system else [[user]]
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
    given: dict[str, Any] = {} if variable is None else {variable: tools}
    called = {"name": "calledname", "arguments": Arguments({"calledkey": "calledvalue"})}
    words, answered = ["calledname", "calledkey", "calledvalue"], {"role": "assistant", "content": "answered"}
    numbered = "functions.calledname:0"

    def calling_by(call_id: str) -> Message:
        return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": called}]}

    for call_id in ("call00001", numbered):
        calling = calling_by(call_id)
        if text := shows(words, user, {**calling, "content": ""}, **given):
            break
    shows_calls = bool(text and shows(words, user, {**calling, **answered}, **given))  # some hide calls beside content
    if shows_calls:
        prompt, plain = shows([], user, header=True, **given), shows([], user, answered, **given)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False))
        head = "".join(letter for letter, _ in same)
        head = head if head == prompt else re.sub(r"<\w*$", "", head)  # the prompt opens reasoning with another tag
        call = text.removeprefix(head).removesuffix(plain.rpartition("answered")[2])
    else:
        variable, call = None, _CALL.format(_json(called))
    before = {**calling, "content": ""} if shows_calls else answered
    result = {"role": "tool", "tool_call_id": call_id, "name": "calledname", "content": "resultsaid"}
    shows_results = bool(shows(["resultsaid"], user, before, result))
    names_by_id = shows_calls and numbered in text
    long = {**calling_by("call_of_more_than_nine"), "content": ""}
    has_short_ids = shows_calls and not names_by_id and not shows(words, user, long, **given)
    return ToolForm(variable, shows_calls, shows_results, has_system, call, names_by_id, has_short_ids)


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
    """Token ids of a conversation, and which of them the assistant wrote.

    Special tokens spelled by other roles are encoded as ordinary text.

    Args:
        is_learnt: one per message: False for turns of the assistant whose mask stays off; None: all are on.
        variables: as for `render`.

    Raises:
        UserError: there is no template. Or it omits tools or calls of this conversation. Or it marks no answers and rewrites
            earlier turns when later ones follow (some templates drop old reasoning): train on one answer at a time then.
    """
    template = tokenizer.chat_template
    if template is None:
        raise UserError("chat_template: the tokenizer has none; put a chat_template.jinja beside its tokenizer.json")
    contents = Contents(tokenizer)
    # the assistant's text keeps its special tokens: tags of calls and reasoning, which the model learns to write, may be some
    messages = [contents.hidden(turn, keeps_special=turn.get("role") == "assistant") for turn in messages]
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
            raise UserError(f"messages: {problem}, so no answer can be excluded; remove train and weight")
        if learnt == turns:
            turns = learnt = list(range(len(pieces) // 2))
    else:
        pieces = _turn_pieces(rendered, messages, turns)
    special = tokenizer.special_ids
    tokens: list[int] = []
    mask: list[bool] = []
    has_no_end = False
    for number, piece in enumerate(pieces):
        ids = contents.encode(piece)
        num = int(
            has_no_end and ids[:1] != [] and ids[0] in special
        )  # an end-of-turn token outside of the template's mark
        has_no_end = False
        if number % 2 and turns[number // 2] in learnt:
            end = max((end for end, token in enumerate(ids, start=1) if token in special), default=None)
            # text of the template after the end-of-turn token (the line break of ChatML) is never sampled
            if end is not None and tokenizer.decode(ids[end:]).strip():  # a special token in the middle of the answer
                end = None
            num = len(ids) if end is None or is_marked else end
            has_no_end = end is None
        tokens += ids
        mask += [True] * num + [False] * (len(ids) - num)
    return Chat(tuple(tokens), tuple(mask))


Rendered = Callable[..., str]
"""`render` with all arguments but the messages."""


def check_shown(rendered: Rendered, messages: Sequence[Message], tools: Sequence[Message]) -> None:
    """Raise `UserError` if the rendered conversation stays the same without its tools, without its calls, or without the last of several
    calls.
    """
    reduced: dict[str, tuple[Sequence[Message], Sequence[Message]]] = {"tools": (messages, ())} if tools else {}
    for part, are_several in (("tool_calls", False), ("several tool_calls of a turn", True)):
        without = [_without_last_call(message, are_several) for message in messages]
        if without != list(messages):
            reduced[part] = without, tools
    full = rendered(messages, tools=tools) if reduced else ""
    for part, (fewer_messages, fewer_tools) in reduced.items():
        try:
            is_same = rendered(fewer_messages, tools=fewer_tools) == full
        except UserError:  # the template needs this part, so it shows it
            continue
        if is_same:
            remedy = "remove them, or put a chat_template.jinja that renders them beside its tokenizer.json"
            raise UserError(
                f"{part}: this model's chat template does not show them, so the model would not see them; {remedy}"
            )


def _without_last_call(message: Message, are_several: bool) -> Message:
    """``message`` without its only call, or with ``are_several`` without the last of several calls."""
    calls = message.get("tool_calls") or ()
    if not calls or (len(calls) > 1) != are_several:
        return message
    return {**message, "tool_calls": calls[:-1]} if are_several else {**message, "tool_calls": None}


def _marked_pieces(rendered: Rendered, messages: Sequence[Message]) -> list[str]:
    """Texts outside and inside the template's marks, alternating. The first and the last are outside."""
    start, end = MARKS.values()
    text = rendered(messages, variables={**rendered.keywords["variables"], **MARKS})  # type: ignore[attr-defined]
    pieces = re.split(f"[{start}{end}]", text)
    if text.count(start) != len(pieces) // 2 or re.search(f"{start}[^{end}]*{start}", text):
        raise UserError("chat_template: its {% generation %} marks are nested; let one end before the next begins")
    return pieces


def _turn_pieces(rendered: Rendered, messages: Sequence[Message], turns: Sequence[int]) -> list[str]:
    """The text before each of the assistant's ``turns`` and the turn itself, alternating, and the text after the last."""
    if turns and turns[0] == 0:
        raise UserError("messages: message 0: the assistant cannot speak first; begin with a system or user turn")
    full = rendered(messages)
    pieces = _by_windows(rendered, messages, turns, full) if len(turns) > _MAX_QUADRATIC_TURNS else None
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
    """`_turn_pieces` in time linear in the conversation's length: each turn is rendered after the first messages and the previous turn
    only. None if the pieces joined are not a prefix of ``full``: the template then looks further back, or writes the last turn in
    another way.
    """
    head, pieces = messages[: turns[0]], list[str]()
    for before, turn in zip([None, *turns[:-1]], turns, strict=True):
        shown = head if before is None else [*head, *messages[before:turn]]
        prefix = "" if before is None else rendered([*head, messages[before]])
        prompt, through = rendered(shown, add_generation_prompt=True), rendered([*shown, messages[turn]])
        if not (prompt.startswith(prefix) and through.startswith(prompt)):
            return None
        pieces += [prompt[len(prefix) :], through[len(prompt) :]]
    return pieces if full.startswith("".join(pieces)) else None


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Encoder of conversations to marked tokens: a `stretto.data.shards.MarkingEncoder`.

    A text is the JSON object of a `stretto.data.conversations.Conversation`.
    """

    tokenizer: Tokenizer
    start: tuple[int, ...] = ()
    """Ids before a prompt without a chat template; templates write them."""

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def fingerprint(self) -> str:
        parts = self.tokenizer.fingerprint(), self.tokenizer.chat_template, named_tokens(self.tokenizer), "Contents"
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    def encode_marked(self, texts: Sequence[str], places: Sequence[str], /) -> list[list[int]]:
        """For each text twice each token's id, plus one if a loss is taken of it, up to the last such token.

        Raises:
            UserError: the chat template refuses a conversation; the message names its place.
        """
        marked = []
        for text, place in zip(texts, places, strict=True):
            try:
                chat = self._chat(json.loads(text))
            except UserError as error:
                raise UserError(f"{place}: {error}") from None
            end = max((number for number, is_target in enumerate(chat.mask, start=1) if is_target), default=0)
            marked.append(
                [2 * token + is_target for token, is_target in zip(chat.tokens[:end], chat.mask, strict=False)]
            )
        return marked

    def _chat(self, conversation: Mapping[str, Any]) -> Chat:
        messages = conversation["messages"]
        if conversation.get("is_plain"):
            prompt, answer = (self.tokenizer.encode(message["content"]) for message in messages)
            prompt, answer = [*self.start, *prompt], [*answer, self.tokenizer.eos_id]
            return Chat((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))
        if self.tokenizer.chat_template is None:
            raise UserError(
                "chat_template: the tokenizer has none; put a chat_template.jinja beside its tokenizer.json, or give prompt and "
                "completion as strings"
            )
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = Arguments(call["function"]["arguments"])
        options = {"is_learnt": conversation["is_learnt"], "variables": conversation.get("variables")}
        return tokenise_chat(self.tokenizer, messages, conversation.get("tools", ()), **options)


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}``, with which some templates mark answers. Renders its body, between marks if the caller
    passes some.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.Name(name, "load")]) for name in MARKS)
        return [start, *body, end]


def _filled(template: str, variables: dict[str, Any]) -> str:
    """The text of ``template``, with its messages in the form that it reads."""
    if _reads_parts_alone(template):
        variables["messages"] = [_with_parts(message) for message in variables["messages"]]
    return _compile(template).render(variables)


@lru_cache(maxsize=64)
def _reads_parts_alone(template: str) -> bool:
    """Whether ``template`` shows a content that is a list of parts, and not one that is a text (templates of networks that see pictures)."""
    user = {"role": "user", "content": "usersaid"}

    def shows(message: Message) -> bool:
        own = {"messages": [message], "tools": None, "add_generation_prompt": False}
        try:
            return "usersaid" in _compile(template).render(_blank_tokens(template) | own)
        except _REFUSED:
            return False

    return not shows(user) and shows(_with_parts(user))


def _with_parts(message: Message) -> Message:
    """``message`` with its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _undeclared(template: str) -> set[str]:
    """Names of the variables of ``template``. Raises `jinja2.TemplateError`: it is not valid."""
    return meta.find_undeclared_variables(_environment().parse(template))


def _blank_tokens(template: str) -> dict[str, Any]:
    """Empty spellings of the special tokens that ``template`` names."""
    return {name: "" for name in _undeclared(template) if name.endswith("_token")}


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    # as in transformers; Jinja's own filter would escape HTML
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **layout: json.dumps(
        value, ensure_ascii=ensure_ascii, **layout
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda layout: datetime.now().strftime(layout)}
    return environment


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
