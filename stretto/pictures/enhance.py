"""Prompt enhancer: scene, style, lighting, composition and camera are added to a request, and the result is checked against the request.

`suffixed` adds the same neutral phrases to every request. `enhance` has a model write them. Small models contradict the request more often than the
neutral phrases, which never do (docs/log/pictures.md), so `Wording.SUFFIX` is the default for models that were not trained for this task.

A model writes six fields under a grammar, at any size of the network, behind any server with the chat API. Each field is compared with the ledger
of the request. A subject that lost a requirement, or bound it to another object, is replaced by the user's own words; a field that contradicts the
ledger is replaced by a neutral phrase. The grammar has no quotation marks, so the model cannot change words to be rendered. Every replacement is
reported in a note.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stretto.base.errors import UserError, nearest
from stretto.base.records import Lineage, history
from stretto.tasks.shapes.fields import PLAIN, at_odds, fields_of, joined, messages, repeats, schema
from stretto.tasks.shapes.ledger import Ledger, contradictions
from stretto.tasks.shapes.rules import unkept
from stretto.tasks.shapes.syntax import understand

_MAX_TOKENS = 1024
"""Longer than every answer of the grammar, so only the server's own limit can cut one."""

_MAX_WRONG = 2
"""Number of replaced fields from which the others are replaced too: SmolLM2-135M's other fields are no better then (docs/log/pictures.md)."""

Ask = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""Posts a body to a chat API and returns its JSON. Model, size, temperature and seed that the function adds take precedence."""


class Wording(StrEnum):
    """Whose words follow the subject of an enhanced prompt."""

    SUFFIX = "suffix"
    """The neutral phrases of `PLAIN`, equal for all requests."""
    MODEL = "model"
    """A model's, as far as they agree with the request."""

    @classmethod
    def of(cls, name: str | None) -> Wording | None:
        """The value of the option ``--writer``; None: the checkpoint's default. Raises `UserError`: unknown name."""
        if name is not None and name not in [*cls]:
            raise UserError(f"--writer {name}: unknown writer{nearest(name, map(str, cls))}; one of {', '.join(cls)}")
        return None if name is None else cls(name)


def default_wording(is_enhancer: bool) -> Wording:
    """The wording where the user chose none."""
    return Wording.MODEL if is_enhancer else Wording.SUFFIX


def is_enhancer(lineage: Lineage | None) -> bool:
    """Whether a stage of ``lineage`` was trained on the task kind ``shapes``, as by ``recipes/enhancer.toml``."""
    for stage in history(lineage):
        sources = stage.config.get("sources")
        for source in sources.values() if isinstance(sources, Mapping) else ():
            if isinstance(source, Mapping) and source.get("kind") == "shapes":
                return True
    return False


@dataclass(frozen=True, slots=True)
class Enhanced:
    """An enhanced prompt. Written by `enhance` and `suffixed`."""

    prompt: str
    fields: Mapping[str, str]
    """Fields as they stand in the prompt, in the order of `FIELDS`."""
    notes: tuple[str, ...]
    """Replacements, one line each."""
    written: Mapping[str, str]
    """Fields as the model wrote them; empty where its answer is not valid JSON, and where no model was asked."""
    seconds: float
    """Time of the model's answer."""
    writer: Wording = Wording.MODEL
    subnet: str = ""
    """Size (Subnet) of the network that wrote it, if the server reports one."""


def suffixed(prompt: str) -> Enhanced:
    """``prompt`` word for word, followed by the neutral phrases. Raises as `enhance`."""
    ledger = readable(prompt)
    fields = {"subject": prompt.strip().rstrip("."), **PLAIN}
    return Enhanced(joined(fields), fields, _unread(ledger), {}, 0.0, Wording.SUFFIX)


async def enhance(ask: Ask, prompt: str, width: int, height: int) -> Enhanced:
    """Enhance ``prompt`` for a picture of ``width`` x ``height`` pixels.

    Raises:
        UserError: The request is empty, in another language, or contradicts itself. Errors of ``ask`` pass through.
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
    reply = await ask(body)
    seconds = time.perf_counter() - started_s
    written = fields_of(reply["choices"][0]["message"].get("content") or "")
    fields, notes = repaired(ledger, prompt, written)
    usage = (reply.get("usage") or {}).get("elastic") or {}
    return Enhanced(joined(fields), fields, notes, written, seconds, subnet=str(usage.get("subnet", "")))


def readable(prompt: str) -> Ledger:
    """The ledger of a request. Raises `UserError`: the request cannot be read, contradicts itself, or names nothing that can be painted."""
    ledger = understand(prompt)
    if asked := contradictions(ledger):
        raise UserError(f"prompt: it contradicts itself: {asked[0]} Remove one of the two")
    if not (ledger.num_constraints or ledger.size):
        raise UserError(f"prompt: {prompt.strip()[:60]!r} names nothing that can be painted; name an object")
    return ledger


def repaired(ledger: Ledger, prompt: str, written: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """All six fields, corrected so that they keep the ``ledger`` of ``prompt``, and a note for every replacement."""
    notes: list[str] = []
    asked = prompt.strip().rstrip(".")
    fields = {"subject": written.get("subject", "").rstrip(".")}
    if lost := _lost(ledger, fields["subject"]):
        fields["subject"] = asked
        why = f"subject: replaced by the words of the request ({'; '.join(lost)})"
        notes.append(why if written else "the model's answer is not valid JSON; neutral phrases were added")
    num_wrong = 0
    for name, plain in PLAIN.items():
        field = _spoken_of(ledger, written.get(name, "").rstrip("."))
        if not field:
            wrong = ["empty"]
        elif repeats(field):
            wrong = ["repetitive"]
        elif words := at_odds(asked, field):
            wrong = [f"{words[0]!r} contradicts the request"]
        else:
            wrong = _lost(ledger, f"{fields['subject']}. {field}")
        fields[name] = plain if wrong else field
        num_wrong += bool(wrong)
        if wrong and written:
            notes.append(f"{name}: {plain!r} instead of {field!r} ({'; '.join(wrong)})")
    problems = _lost(ledger, joined(fields))  # fields that contradict the ledger only together
    if num_wrong >= _MAX_WRONG and written:
        problems.append(f"{num_wrong} of them were wrong")
    if problems:
        fields |= PLAIN
        notes.append(f"all fields but the subject: replaced by neutral phrases ({'; '.join(problems)})")
    return fields, (*notes, *_unread(ledger))


def _unread(ledger: Ledger) -> tuple[str, ...]:
    return tuple(f"not understood, and passed on in your own words: {each}" for each in ledger.unread)


def _spoken_of(ledger: Ledger, field: str) -> str:
    """``field`` with "the" before things that the request names once: "a quiet coffee shop" would ask for a second shop."""
    for thing in ledger.things:
        if thing.count == 1:
            field = re.sub(rf"\b(?:a|an) (?=(?:[\w-]+ ){{0,2}}{re.escape(thing.noun)}\b)", "the ", field)
    return field


def _lost(ledger: Ledger, text: str) -> list[str]:
    """Requirements that ``text`` does not keep, for the user."""
    try:
        return [each.says for each in unkept(ledger, text, understand)]
    except UserError as error:
        return [str(error)]
