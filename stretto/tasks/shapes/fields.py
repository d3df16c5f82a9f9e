"""Fields of an enhanced prompt: the subject as it was requested, and one field for each other aspect of a picture.

A model writes them as JSON, if possible under the grammar of `schema`. The reward counts fields that the grammar would accept. A field
counts for its aspect if it contains a word of the table `ASPECTS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from stretto.tasks.session import arguments_of
from stretto.tasks.task import without_thoughts

ASPECTS: Final = {
    "scene": "background|room|interior|street|forest|garden|field|city|sky|beach|kitchen|studio|table|floor|wall|landscape|park|window|paper",
    "style": "style|painting|photo|photograph|illustration|render|watercolor|cartoon|sketch|realistic|minimalist|cinematic|impressionist",
    "lighting": "light|lighting|lit|sunlight|shadow|shadows|glow|sunset|moonlight|daylight|candlelight|lamplight|backlit",
    "composition": "composition|centered|foreground|symmetrical|balanced|framed|arranged|rule of thirds|negative space|diagonal|layered",
    "camera": "camera|shot|view|close-up|lens|angle|depth of field|focus|macro|perspective|bokeh",
}  # fmt: skip
"""Words by aspect. A field of an aspect must contain at least one of its words."""
PLAIN: Final = {
    "scene": "fitting background",
    "style": "consistent style",
    "lighting": "fitting light",
    "composition": "balanced composition",
    "camera": "fitting view",
}
"""Neutral phrase for every aspect: it agrees with every request, whatever its time, place and medium."""
EXCLUSIVE: Final = tuple(
    tuple(frozenset(words.split()) for words in group.split("|"))
    for group in (
        "night midnight moonlight moonlit moon stars starry|noon midday daylight sunlight sunny|dawn sunrise morning|dusk sunset evening",
        "indoors interior inside room kitchen office bedroom shop cafe studio window dinner home|"
        "outdoors street beach forest field park city desert lake mountain sea ocean sky storm underwater mars",
        "beach|forest|desert|city street|field|mountain|mars",
        "photo photograph photography photographic|oil acrylic impressionist|watercolor watercolour|crayon pencil sketch drawing|"
        "cartoon anime|pixel render 3d|realistic realism",
        "aerial|close-up macro|eye-level street",
        "soft|storm stormy",
    )
)
"""Groups of classes of words. A field with a word of one class contradicts a request that has only words of other classes of the group."""
FIELDS: Final = ("subject", *ASPECTS)
_WORDS = r"[A-Za-z]{1,14}([ -][A-Za-z]{1,14})"
_PATTERNS: Final = {
    "subject": r"^[A-Za-z][A-Za-z0-9 ,'-]{2,160}$",
    **{name: f"^({_WORDS}{{0,6}} )?({signs})( {_WORDS}{{0,4}})?$" for name, signs in ASPECTS.items()},
}
SYSTEM = (
    "You write prompts for an image model. Repeat the subject of the request word for word, then say in a few words what scene, "
    "style, lighting, composition and camera suit it. Answer in JSON."
)
EXAMPLE = (
    {"prompt": "two white cups on a wooden table", "width": 1024, "height": 1024},
    {
        "subject": "two white cups on a wooden table",
        "scene": "a quiet kitchen with a window",
        "style": "warm still life photograph",
        "lighting": "soft morning light from the side",
        "composition": "centered with negative space",
        "camera": "close-up shot with shallow depth of field",
    },
)


def messages(prompt: str, width: int, height: int) -> list[dict[str, str]]:
    """Messages for the model. The last one has the form that diffusers sends to a prompt enhancer."""
    request = json.dumps({"prompt": prompt, "width": width, "height": height}, ensure_ascii=False)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": json.dumps(EXAMPLE[0])},
        {"role": "assistant", "content": json.dumps(EXAMPLE[1])},
        {"role": "user", "content": request},
    ]


def schema() -> dict[str, Any]:
    """JSON schema of the fields: short texts without quotation marks, each with a word of its aspect."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "pattern": pattern} for name, pattern in _PATTERNS.items()},
        "required": list(FIELDS),
        "additionalProperties": False,
    }


def fields_of(text: str) -> dict[str, str]:
    """The fields of an answer; empty without valid JSON. Thoughts before the JSON, and fences and sentences around it, are ignored."""
    text = without_thoughts(text)
    tree = arguments_of(text[text.find("{") : text.rfind("}") + 1]) or {}
    return {
        name: " ".join(tree[name].split()) for name in FIELDS if isinstance(tree.get(name), str) and tree[name].strip()
    }


def at_odds(request: str, field: str) -> list[str]:
    """Words of ``field`` about time, place, medium or view that contradict the request."""
    asked, told = ({*re.findall(r"[a-z0-9-]+", text.lower())} for text in (request, field))
    found = []
    for group in EXCLUSIVE:
        if any(asked & words for words in group):
            found += sorted(word for words in group if not asked & words for word in told & words)
    return found


def spoken(fields: Mapping[str, str]) -> tuple[str, ...]:
    """Aspects whose field matches `schema`, differs from the example and is not repetitive."""
    return tuple(
        name
        for name in ASPECTS
        if re.fullmatch(_PATTERNS[name], field := fields.get(name, ""))
        and field != EXAMPLE[1][name]
        and not repeats(field)
    )


def joined(fields: Mapping[str, str]) -> str:
    """The prompt: one sentence for every field that is there."""
    return " ".join(f"{fields[name][0].upper()}{fields[name][1:]}." for name in FIELDS if name in fields)


def repeats(field: str) -> bool:
    """Whether at least a quarter of the words are repetitions, as in the loops of small networks."""
    words = field.lower().split()
    return len({*words}) <= 0.75 * len(words)
