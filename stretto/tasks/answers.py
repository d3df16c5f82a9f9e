"""Where in a text the answer is. One rule a format, the same for every source.

A text without the marks that were asked for still has an answer: a network that was never taught them would otherwise
score 0 on everything, right or wrong, and have nothing to learn from. That marks are missing is reported beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

AnswerFormat = Literal["plain", "line", "tags", "boxed"]
"""Of the answer in what the model writes:

``plain``: the whole text. ``line``: its last line that is not blank. ``tags``: inside the last ``<answer>``, which need
not be closed. ``boxed``: inside the last ``\\boxed{}``, which must be. Without its marks, the last two are ``line``.
In all, whatever is before the last ``</think>`` is not looked at, and white space around the answer does not count.
"""

_INSTRUCTIONS = {
    "plain": "",
    "line": "Write the answer alone on the last line.",
    "tags": "Write the answer between <answer> and </answer>.",
    "boxed": "Write the answer inside \\boxed{}.",
}
_TAGGED = re.compile(r"<answer>(?!.*<answer>)(.*?)(?:</answer>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Found:
    """An answer in a text. Written by `find_answer`."""

    text: str
    """Stripped; may be empty."""
    is_marked: bool
    """The marks of the format were there; always, where it has none. Says nothing about the answer being right."""


def ask(question: str, form: AnswerFormat) -> str:
    """A user message: the question, and the line that asks for the format."""
    return f"{question}\n\n{_INSTRUCTIONS[form]}" if _INSTRUCTIONS[form] else question


def write_answer(answer: str, form: AnswerFormat) -> str:
    """``answer`` with the format's marks."""
    return {"tags": f"<answer>{answer}</answer>", "boxed": f"\\boxed{{{answer}}}"}.get(form, answer)


def find_answer(text: str, form: AnswerFormat) -> Found:
    """The answer in ``text`` by the rules of `AnswerFormat`."""
    text = text.rpartition("</think>")[2].strip()
    last_line = text.rpartition("\n")[2]
    marked: str | None = text if form == "plain" else last_line
    if form == "tags":
        match = _TAGGED.search(text)
        marked = match[1] if match else None
    elif form == "boxed":
        marked = _last_boxed(text)
    return Found(last_line.strip(), False) if marked is None else Found(marked.strip(), True)


def _last_boxed(text: str) -> str | None:
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for index, character in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:index]
    return None
