"""The formats of calls and reasoning of a checkpoint, recognised by its chat template.

For a checkpoint with a ``response_template`` (transformers 5), that template replaces marks and parser. Marks may be special tokens,
which are usually removed from the text of answers; `marks` lists those that must stay.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import regex

from stretto.base.errors import UserError
from stretto.server.calls.answers import AnswerReader, read_answer
from stretto.server.calls.dialect import (
    ARGUMENTS,
    INDEX,
    KEY,
    LINE,
    NAME,
    SPACE,
    VALUE,
    Call,
    Dialect,
    Found,
    Schemas,
    Slot,
    Spelling,
    Think,
    ending_of,
)
from stretto.server.calls.formats import DIALECTS, HERMES, tree_calls, typed
from stretto.server.schemas import argument
from stretto.text.chat import tool_form

_ANALYSIS = "<|channel|>analysis<|message|>"
THINKS = (
    Think("<think>", "</think>"),
    Think("[THINK]", "[/THINK]"),
    Think("<seed:think>", "</seed:think>"),
    Think(_ANALYSIS, "<|end|>", _ANALYSIS),
)
"""Known marks of reasoning."""


def dialect_of(template: str, response_template: Mapping[str, Any] | None = None) -> Dialect | None:
    """The format in which a chat template writes calls: the first in `DIALECTS` that can read a call rendered by the template; None: none
    can. Raises `UserError` for an invalid template, or a ``response_template`` that transformers refuses."""
    form = tool_form(template)
    if not form.shows_calls:
        return HERMES
    known = next((each for each in DIALECTS if each.asked and each.asked in template), None)
    known = known or next((each for each in DIALECTS if _reads(each, form.call)), None)
    return known if response_template is None else _declared(response_template, known)


def _reads(dialect: Dialect, call: str) -> bool:
    calls = read_answer(AnswerReader(dialect, {"calledname": {}}), call).calls
    return [(each.name, each.arguments) for each in calls] == [("calledname", '{"calledkey": "calledvalue"}')]


def _declared(response_template: Mapping[str, Any], known: Dialect | None) -> Dialect | None:
    """The format that the checkpoint declares. The spelling of forced calls is that of ``known``, if the declared format can read it."""
    # Imported here because the import takes half a second and few checkpoints need it.
    from transformers.utils.chat_parsing.content_parsers import process_field
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        field = load_response_template(dict(response_template)).fields.get("tool_calls")
    except (ValueError, TypeError) as error:
        raise UserError(f"tokenizer_config.json: response_template: {error}; correct or remove it") from None
    if field is None or field.open_re is None:
        return known

    def read(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
        try:
            found = tree_calls(process_field(body, field, dict(groups)))
        except (KeyError, TypeError) as error:
            raise ValueError from error
        return [(name, _all_typed(tree, schemas.get(name, {}))) for name, tree in found]

    opening = regex.compile(field.open_re.pattern.removeprefix(r"\s*"), field.open_re.flags)
    if known is None:
        return Dialect("declared", opening, field.close_re, read, ())
    declared = replace(known, open=opening, close=field.close_re, read=read, is_first=False)
    reader = AnswerReader(declared)
    pieces = [*reader.push(_example(known)), *reader.finish()]
    is_spelt = [(each.name, each.arguments) for each in pieces if isinstance(each, Call)] == [("f", '{"a": "b"}')]
    return declared if is_spelt else replace(declared, call=())


def _all_typed(arguments: Any, schema: Mapping[str, Any]) -> Any:
    if not isinstance(arguments, dict):
        return arguments
    known = {key: argument(schema, key) for key in arguments}
    return {
        key: typed(each, known[key]) if isinstance(each, str) and known[key] else each
        for key, each in arguments.items()
    }


def unreadable_name(dialect: Dialect, names: Collection[str]) -> str | None:
    """The first of ``names`` that no argument of a call in this format can have, because there is no way to quote it; None: there is none."""
    left = list(names)
    if not left or _reads_names(dialect, left):
        return None
    while left[1:]:
        half = left[: len(left) // 2]
        left = left[len(half) :] if _reads_names(dialect, half) else half
    return left[0]


def _reads_names(dialect: Dialect, names: Sequence[str]) -> bool:
    calls = read_answer(AnswerReader(dialect), _example(dialect, names)).calls
    return [each.arguments for each in calls] == [json.dumps(dict.fromkeys(names, "b"), ensure_ascii=False)]


def _example(dialect: Dialect, names: Sequence[str] = ("a",)) -> str:
    """The spelling of a call of ``f`` with the argument ``"b"`` for each of ``names``."""
    fill = {VALUE: "b" if ending_of(dialect.argument) else '"b"', NAME: "f", SPACE: "", LINE: "", INDEX: "0"}

    def spelt(parts: Spelling, fill: Mapping[Slot, str]) -> str:
        return "".join(part if isinstance(part, str) else fill[part] for part in parts)

    inner = dialect.comma.join(spelt(dialect.argument, fill | {KEY: name}) for name in names)
    fill[ARGUMENTS] = inner or json.dumps(dict.fromkeys(names, "b"), ensure_ascii=False)
    return spelt((*dialect.begin, *dialect.call, *dialect.end), fill)


def think_of(template: str, response_template: Mapping[str, Any] | None = None) -> Think | None:
    """The marks of reasoning in a chat template; None: it has none."""
    fields = (response_template or {}).get("fields") or {}
    declared = fields.get("reasoning_content") or fields.get("thinking") or {}
    match declared:
        case {"open": str(open), "close": str(close)}:
            return Think(open.strip(), close.strip())
    return next((each for each in THINKS if (each.sign or each.close) in template), None)


def marks(added: Mapping[str, int], dialect: Dialect | None, think: Think | None) -> dict[str, int]:
    """The tokens among ``added`` (ids by spelling) that are marks of ``dialect`` or ``think``."""
    spellings = (dialect.spelt if dialect else "") + ("" if think is None else f"\n{think.open}\n{think.close}")
    return {text: token for text, token in added.items() if text in spellings and text.strip()}
