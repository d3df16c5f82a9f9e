"""A request for a picture, written out as a prompt: what was asked for is kept, and style, light, composition, camera and scene are added.

A model writes six fields under a grammar, at any size of the network, behind any server of the chat API. What it writes is held
against the ledger of the request: a subject that lost something, or bound it to another object, gives way to the user's own words; a
field that contradicts them gives way to a plain phrase. Words to be rendered are never in the model's hands: its grammar has no
quotation marks. What was put right is told.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import UserError
from stretto.tasks.shapes.fields import PLAIN, fields_of, joined, messages, repeats, schema
from stretto.tasks.shapes.ledger import Ledger, contradictions, unkept
from stretto.tasks.shapes.syntax import understand

_MAX_TOKENS = 1024
"""More than the longest answer of the grammar: one that is cut was cut by the server."""

Ask = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""Posts a body to a chat API's completions and gives its JSON. What it puts into the body counts: model, size, temperature, seed."""


@dataclass(frozen=True, slots=True)
class Enhanced:
    """What came of a request. Written by `enhance`."""

    prompt: str
    fields: Mapping[str, str]
    """As they stand in the prompt, by `FIELDS`."""
    notes: tuple[str, ...]
    """What was put right, a line each."""
    written: Mapping[str, str]
    """As the model wrote them; empty where it wrote nothing that can be read."""
    seconds: float
    subnet: str = ""
    """Size that wrote it, if the server tells."""


async def enhance(ask: Ask, prompt: str, width: int, height: int) -> Enhanced:
    """Write ``prompt`` out.

    Raises:
        UserError: the request is empty, in another language, or contradicts itself. What ``ask`` raises passes.
    """
    ledger = readable(prompt)
    body: dict[str, Any] = {
        "messages": messages(prompt, width, height),
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "prompt", "schema": schema(), "strict": True},
        },
        "temperature": 0.0,
        "seed": 0,
        "max_tokens": _MAX_TOKENS,
    }
    started_s = time.perf_counter()
    told = await ask(body)
    seconds = time.perf_counter() - started_s
    written = fields_of(told["choices"][0]["message"].get("content") or "")
    fields, notes = repaired(ledger, prompt, written)
    spent = (told.get("usage") or {}).get("elastic") or {}
    return Enhanced(joined(fields), fields, notes, written, seconds, str(spent.get("subnet", "")))


def readable(prompt: str) -> Ledger:
    """The ledger of a request. Raises `UserError`: it cannot be read, or contradicts itself."""
    ledger = understand(prompt)
    if asked := contradictions(ledger):
        raise UserError(f"prompt: it contradicts itself: {asked[0]} Say it once")
    if not (ledger.num_constraints or ledger.size):
        raise UserError(f"prompt: {prompt.strip()[:60]!r} names nothing that can be painted; name an object")
    return ledger


def repaired(ledger: Ledger, prompt: str, written: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The fields that keep the ``ledger`` of ``prompt``, all six, and what was put right."""
    notes: list[str] = []
    asked = prompt.strip().rstrip(".")
    fields = {"subject": written.get("subject", "").rstrip(".")}
    if lost := _lost(ledger, fields["subject"]):
        fields["subject"] = asked
        why = f"subject: put back as it was asked ({'; '.join(lost)})"
        notes.append(why if written else "the model wrote nothing that can be read")
    for name, plain in PLAIN.items():
        field = _spoken_of(ledger, written.get(name, "").rstrip("."))
        if not field:
            wrong = ["it is empty"]
        elif repeats(field):
            wrong = ["it repeats itself"]
        else:
            wrong = _lost(ledger, f"{fields['subject']}. {field}")
        fields[name] = plain if wrong else field
        if wrong and written:
            notes.append(f"{name}: {plain!r} instead of {field!r} ({'; '.join(wrong)})")
    if lost := _lost(ledger, joined(fields)):  # fields that only together contradict it
        fields |= PLAIN
        notes.append(f"all but the subject: plain words ({'; '.join(lost)})")
    return fields, tuple(notes)


def _spoken_of(ledger: Ledger, field: str) -> str:
    """``field`` with "the" before what the request has one of: "a quiet coffee shop" would be another one."""
    for thing in ledger.things:
        if thing.count == 1:
            field = re.sub(rf"\b(?:a|an) (?=(?:[\w-]+ ){{0,2}}{re.escape(thing.noun)}\b)", "the ", field)
    return field


def _lost(ledger: Ledger, text: str) -> list[str]:
    try:
        return [each.says for each in unkept(ledger, text, understand)]
    except UserError as error:
        return [str(error)]
