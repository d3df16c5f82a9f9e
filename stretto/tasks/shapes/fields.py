"""What a written-out prompt is made of: the subject as it was asked for, and a field for each aspect of a picture besides it.

A model is asked for them in JSON and may be held to `schema`; a reward counts what that schema would take. One table says which
words speak of which aspect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from stretto.tasks.session import arguments_of

ASPECTS: Final = {
    "scene": "background|room|interior|street|forest|garden|field|city|sky|beach|kitchen|studio|table|floor|wall|landscape|park|window|paper",
    "style": "style|painting|photo|photograph|illustration|render|watercolor|cartoon|sketch|realistic|minimalist|cinematic|impressionist",
    "lighting": "light|lighting|lit|sunlight|shadow|shadows|glow|sunset|moonlight|daylight|candlelight|lamplight|backlit",
    "composition": "composition|centered|foreground|symmetrical|balanced|framed|arranged|rule of thirds|negative space|diagonal|layered",
    "camera": "camera|shot|view|close-up|lens|angle|depth of field|focus|macro|perspective|bokeh",
}  # fmt: skip
"""Words of which a field has one: what makes it speak of its aspect."""
PLAIN: Final = {
    "scene": "plain background",
    "style": "realistic style",
    "lighting": "soft natural light",
    "composition": "balanced composition",
    "camera": "eye-level shot",
}
"""A field that fits everything."""
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
    """What a model is asked; the last one is diffusers' input of a prompt enhancer."""
    request = json.dumps({"prompt": prompt, "width": width, "height": height}, ensure_ascii=False)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": json.dumps(EXAMPLE[0])},
        {"role": "assistant", "content": json.dumps(EXAMPLE[1])},
        {"role": "user", "content": request},
    ]


def schema() -> dict[str, Any]:
    """JSON schema of the fields: short, without quotation marks, and each with a word of its aspect."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "pattern": pattern} for name, pattern in _PATTERNS.items()},
        "required": list(FIELDS),
        "additionalProperties": False,
    }


def fields_of(text: str) -> dict[str, str]:
    """The fields of an answer; none of one that is no such JSON."""
    tree = arguments_of(text) or {}
    return {
        name: " ".join(tree[name].split()) for name in FIELDS if isinstance(tree.get(name), str) and tree[name].strip()
    }


def spoken(fields: Mapping[str, str]) -> tuple[str, ...]:
    """The aspects whose field `schema` would take and that is neither the example's nor repeats itself."""
    return tuple(
        name
        for name in ASPECTS
        if re.fullmatch(_PATTERNS[name], field := fields.get(name, ""))
        and field != EXAMPLE[1][name]
        and not repeats(field)
    )


def joined(fields: Mapping[str, str]) -> str:
    """The prompt of the fields that are there."""
    return " ".join(f"{fields[name][0].upper()}{fields[name][1:]}." for name in FIELDS if name in fields)


def repeats(field: str) -> bool:
    """Whether a quarter of its words have been there before: how small networks write on."""
    words = field.lower().split()
    return len({*words}) <= 0.75 * len(words)
