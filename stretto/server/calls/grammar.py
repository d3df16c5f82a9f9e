"""The grammar of answers that consist of tool calls, in Lark's syntax as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import regex

from stretto.base.errors import UserError
from stretto.server.calls.dialect import (
    ARGUMENTS,
    FREE,
    KEY,
    LINE,
    NAME,
    VALUE,
    Dialect,
    Schemas,
    Slot,
    Spelling,
    Think,
    ending_of,
)
from stretto.server.calls.recognise import unreadable_name
from stretto.server.schemas import Schema, alone, constants, kinds, properties, required, ways

# Spacing of json.dumps, which chat templates render and models are trained on.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = "/(?s:.*)/"
_UNSUPPORTED = {
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies", "not", "if"),
}
"""Keywords of a tool's parameters that formats without JSON do not express."""


def answer_rules(
    dialect: Dialect,
    schemas: Schemas,
    marked: Mapping[str, int],
    parallel: bool,
    beside: Mapping[str, Any] | None = None,
    thinks: Think | None = None,
    *,
    is_thinking: bool = True,
    is_free: bool = False,
) -> str:
    """The Lark grammar of answers that consist of calls of the tools, or of JSON that follows a schema.

    Args:
        marked: see `marks`. llguidance needs their ids; it would have the model spell them character by character.
        parallel: whether several calls may follow each other.
        beside: schema of a JSON answer that is allowed in place of calls.
        thinks: marks of reasoning with which the answer may begin.
        is_thinking: the prompt has opened the reasoning, so the answer begins with it.
        is_free: text is allowed before calls and in place of them. Text that begins like a call must continue as one.
    """
    if dialect.argument:
        for name, schema in schemas.items():
            _check_expressible(dialect, name, schema)
    spell = _Speller(marked)
    choices, rules, lead = [], [], ""
    if is_free:
        dialect, lead, texts = _beside_text(dialect, spell)
        choices.append("text")
        rules += texts
    if schemas:
        again = f" ({spell(dialect.between)} call)*" if parallel else ""
        choices.append(f"{lead} {spell(dialect.begin)} call{again} {spell(dialect.end)}".strip())
        rules.append("call: " + " | ".join(f"call{number}" for number in range(len(schemas))))
        for number, (name, schema) in enumerate(schemas.items()):
            rules += _call_rules(dialect, name, schema, spell, str(number))
    if beside is not None:
        choices.append(f"{spell(dialect.answer)} answer".strip())
        rules.append(f"answer: {_json_rule(beside)}")
    start = " | ".join(choices)
    if thinks is not None:
        between = spell(dialect.turn) or "/[ \\n]/? /[ \\n]/?"
        after = f"thought {between} ({start})"
        start = after if is_thinking else f"{spell((thinks.open,))} {after} | {start}"
        rules.append(spell.text_up_to(thinks.close, "thought"))
    return "\n".join([f"start: {start}", *rules]) + "\n"


def _beside_text(dialect: Dialect, spell: _Speller) -> tuple[Dialect, str, list[str]]:
    """For answers that may be text: the dialect without the mark that begins its calls, the name of the rule for text up to and including
    that mark, and the rules."""
    if dialect.is_first:  # text must not begin like a call
        (first, *_) = (*dialect.begin, *dialect.call)
        assert isinstance(first, str)
        return dialect, "", [f"text: TEXT\nTEXT: {_TEXT} & ~/(?s:\\s*{_escaped(first[0])}.*)/"]
    # Some formats also open at a later mark, with which a model may begin: <function= without <tool_call>.
    found = [dialect.open.search(part) for part in (*dialect.begin, *dialect.call) if isinstance(part, str)]
    opening = [match.group() for match in found if match and not match.groupdict().get("no")]
    if dialect.begin:
        mark, rest = spell.cut(dialect.begin)
        dialect = replace(dialect, begin=rest)
    else:
        mark, rest = spell.cut(dialect.call)
        dialect = replace(dialect, call=rest, between=(*dialect.between, mark))
    without = spell.text_without(*opening)
    return (
        dialect,
        "lead",
        [f"text: TEXT\nTEXT: {spell.text_without(mark, *opening)}", spell.text_up_to(mark, "lead", without)],
    )


def _escaped(text: str) -> str:
    """A regular expression for exactly this text, for use between slashes."""
    return regex.escape(text).replace("/", r"\/").replace("\n", r"\n")


class _Speller:
    """Converts spellings to right-hand sides of Lark rules."""

    def __init__(self, marked: Mapping[str, int]) -> None:
        self._marked = marked
        longest = sorted(map(regex.escape, marked), key=len, reverse=True)
        self._split = regex.compile(f"({'|'.join(longest)})") if marked else None

    def __call__(self, parts: Spelling, fill: Mapping[Slot, str] | None = None) -> str:
        return " ".join(filter(None, (self._part(part, fill or {}) for part in parts)))

    def _part(self, part: str | Slot, fill: Mapping[Slot, str]) -> str:
        if isinstance(part, Slot):
            return FREE.get(part) or fill[part]
        pieces = self._pieces(part)
        return " ".join(f"<[{self._marked[piece]}]>" if self.is_token(piece) else _quoted(piece) for piece in pieces)

    def _pieces(self, text: str) -> list[str]:
        """``text`` split into marks that are tokens and the text between them."""
        return [each for each in ([text] if self._split is None else self._split.split(text)) if each]

    def is_token(self, mark: str) -> bool:
        """Whether a mark is a token of its own."""
        return mark in self._marked

    def cut(self, parts: Spelling) -> tuple[str, Spelling]:
        """The first mark of ``parts``, and the rest."""
        assert isinstance(parts[0], str)
        mark, *rest = self._pieces(parts[0])
        return mark, (*rest, *parts[1:])

    def text_without(self, *marks: str) -> str:
        """Terminal for text that contains none of ``marks``."""
        return " & ".join(
            [_TEXT, *(f"~/(?s:.*{_escaped(mark)}.*)/" for mark in dict.fromkeys(marks) if not self.is_token(mark))]
        )

    def text_up_to(self, end: str, rule: str, text: str = _TEXT) -> str:
        """Definition of ``rule``: the terminal ``text`` followed by the literal ``end``."""
        terminal = f"TEXT_{rule.upper()}"
        if self.is_token(end):
            return f"{rule}: {terminal} <[{self._marked[end]}]>\n{terminal}: {text}"
        return f"{rule}[suffix={_quoted(end)}]: {terminal}\n{terminal}: {text}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def _call_rules(dialect: Dialect, name: str, schema: Schema, spell: _Speller, number: str) -> Iterator[str]:
    """Rules for a call of the tool ``name``."""
    arguments, call = f"arguments{number}", dialect.call
    if dialect.is_first and not dialect.argument:
        # The call is JSON, and so may an answer be. llguidance takes the longest literal that fits, so those of both must be equally long.
        head = "".join(name if part is NAME else str(part) for part in call[: call.index(ARGUMENTS)])
        call = (*filter(None, regex.split(r'("[^"]*"|[{}])', head)), *call[call.index(ARGUMENTS) :])
    yield f"call{number}: {spell(call, {NAME: _quoted(name), ARGUMENTS: arguments})}"
    if not dialect.argument:
        yield f"{arguments}: {_json_rule({'type': 'object', **schema})}"
        return
    lists, problem = [], f"no arguments are allowed by the parameters of {name}"
    for at, way in enumerate(ways(schema, schema)):
        named, others = properties(way), way.get("additionalProperties")
        values = {key: found for key, each in named.items() if (found := ways(each, schema))}
        impossible = [key for key in required(way) if key in named and key not in values]
        if impossible:  # nothing follows this alternative
            problem = f"no value is allowed for the argument {impossible[0]!r} of {name}"
            continue
        rules = {key: f"argument{number}_{at}_{place}" for place, key in enumerate(values)}
        for key, rule in rules.items():
            yield from _argument_rules(dialect, _quoted(key), values[key], schema, spell, rule)
        other = ""
        other_values = ways(others, schema)
        if other_values and (others or (others is None and not named)):
            other = f"argument{number}_{at}"
            taken = f" & ~/{'|'.join(map(_escaped, named))}/" if named else ""
            yield f"KEY_{other.upper()}: /[A-Za-z0-9_.-]+/{taken}"
            yield from _argument_rules(dialect, f"KEY_{other.upper()}", other_values, schema, spell, other)
        wanted = required(way)
        first = [rule for key, rule in rules.items() if key in wanted]
        later = [rule for key, rule in rules.items() if key not in wanted]
        lists.append(_listed(first, later, other, dialect.comma))
    if not lists:
        reason = "its enum is empty or parts of its schema exclude each other, such as type and enum"
        raise UserError(f"tools: {problem}: {reason}; correct the schema")
    yield f"{arguments}: {' | '.join(lists)}"


def _check_expressible(dialect: Dialect, name: str, schema: Schema) -> None:
    """Raises `UserError` for what a call of the tool ``name`` in a format without JSON cannot follow or name."""
    several = ways(schema, schema)
    for way in several:
        if unknown := sorted(word for word in way.keys() & _UNSUPPORTED if not _always_holds(way, word)):
            problem = f"cannot enforce {unknown[0]} at the top of the parameters of {name}; remove it"
            raise UserError(f"tools: this model's format of calls {problem}")
    names = dict.fromkeys(key for way in several for key in properties(way))
    if (key := unreadable_name(dialect, names)) is not None:
        problem = f"cannot name the argument {key!r} of {name}; rename it"
        raise UserError(f"tools: this model's format of calls {problem}")


def _always_holds(way: Schema, keyword: str) -> bool:
    """Whether all arguments that the grammar of ``way`` allows follow its ``keyword``, one of `_UNSUPPORTED`."""
    match keyword, way[keyword]:
        case "minProperties", int(least):
            return least <= len(properties(way).keys() & required(way))
        case "propertyNames", names:
            return names in ({}, {"type": "string"})
        case "unevaluatedProperties", others:
            return others is True or (others is False and way.get("additionalProperties") is False)
        case "patternProperties" | "dependentRequired" | "dependentSchemas" | "dependencies", parts:
            return parts == {}
    return False


def _argument_rules(
    dialect: Dialect, key: str, values: Sequence[Schema], root: Schema, spell: _Speller, rule: str
) -> Iterator[str]:
    """Rules for one argument whose value follows one of the schemas ``values``. ``key``: a literal or a terminal."""
    parts, ending, value = dialect.argument, ending_of(dialect.argument), f"value_{rule}"
    line = r"\n?" if LINE in parts else ""
    exact: list[str] = []
    texts: list[str] = []  # used instead of ``exact`` if a string is allowed: unquoted text up to the mark that ends it
    is_text = False
    for way in values:
        if ending and (known := _listed_values(way)):
            exact += map(_quoted, known)
            texts += [f"/{line}{_escaped(each)}{line}/" for each in known]
        elif ending and (not kinds(way) or "string" in kinds(way)):
            texts.append(_text_of(way, line))
            is_text = True
        else:
            exact += [_json_rule(alone(way, root)), *['"True"', '"False"'] * (kinds(way) == {"boolean"})]
            texts.append(_TEXT)
    if not is_text:
        yield f"{rule}: {spell(parts, {KEY: key, VALUE: value})}"
        yield f"{value}: {' | '.join(exact)}"
        return
    until = (*parts[: parts.index(VALUE) + 1], *parts[parts.index(ending) + 1 :])  # the value's rule has the ending
    yield f"{rule}: {spell(until, {KEY: key, VALUE: value})}"
    yield spell.text_up_to(ending, value, _TEXT if _TEXT in texts else " | ".join(f"({text})" for text in texts))


def _listed_values(way: Schema) -> list[str]:
    """Spellings of all values of a schema that lists them; otherwise empty."""
    values = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in constants(way)]
    if not values and kinds(way) and kinds(way) <= {"boolean", "null"}:
        values = ["true", "false", "True", "False"] * ("boolean" in kinds(way)) + ["null"] * ("null" in kinds(way))
    return values


def _text_of(way: Schema, line: str) -> str:
    """Terminal for the texts that the schema of a string allows. ``line``: pattern of the line breaks that templates put around them."""
    found, (least, most) = [], (way.get(name) for name in ("minLength", "maxLength"))
    if isinstance(pattern := way.get("pattern"), str):
        ways = ["".join(_anchored(pieces)) for pieces in _alternatives(pattern)]
        found.append(f"(?:{'|'.join(ways)})")
    if type(least) is int or type(most) is int:
        found.append(f"(?s:.{{{least if type(least) is int else 0},{most if type(most) is int else ''}}})")
    return " & ".join(f"/{line}{each}{line}/" for each in found) or _TEXT


def _alternatives(pattern: str) -> list[list[str]]:
    """The alternatives of a regular expression at its top level, each split into characters, escapes and classes."""
    found: list[list[str]] = [[]]
    depth = 0
    for piece in regex.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, regex.DOTALL):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            found.append([])
        else:
            found[-1].append(piece)
    return found


def _anchored(pieces: list[str]) -> list[str]:
    """An alternative for Lark's terminals, which match whole texts: any text in place of the anchor that it lacks."""
    start, end = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    inner = ["(?s:.*)"] * (not start) + pieces[start : len(pieces) - end] + ["(?s:.*)"] * (not end)
    return [regex.sub(r"(?<!\\)/", r"\/", piece).replace("\n", r"\n") for piece in inner]


def _listed(required: Sequence[str], optional: Sequence[str], other: str, comma: str) -> str:
    """Right-hand side for the ``required`` rules in order, then the ``optional`` ones, then ``other`` any number of times."""
    mark = f"{_quoted(comma)} " if comma else ""
    later = [f"({mark}{rule})?" for rule in optional] + ([f"({mark}{other})*"] if other else [])
    if required or not comma:
        return " ".join([f" {mark}".join(required), *later])
    # the first of them has no comma before it
    firsts = [" ".join([rule, *later[place + 1 :]]) for place, rule in enumerate(optional)]
    firsts += [f"{other} {later[-1]}"] if other else []
    return f"({' | '.join(firsts)})?" if firsts else '""'
