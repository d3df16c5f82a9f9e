"""Books that nobody wrote: enough authors for every part, paragraphs of sentences that can be told apart."""

from __future__ import annotations

import random
from functools import cache

NOUNS = (
    "river",
    "lamp",
    "horse",
    "letter",
    "window",
    "garden",
    "sister",
    "captain",
    "winter",
    "bread",
    "valley",
    "clock",
)
VERBS = ("crossed", "watched", "carried", "forgot", "opened", "remembered", "followed", "mended", "lost", "counted")


def book(author: str, paragraphs: int = 60) -> str:
    rng = random.Random(author)

    def sentence() -> str:
        parts = [
            f"the {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}" for _ in range(rng.randint(1, 3))
        ]
        return (", and ".join(parts) + ".").capitalize()

    return "## A chapter\n\n" + "\n\n".join(" ".join(sentence() for _ in range(9)) for _ in range(paragraphs))


@cache
def books(num: int = 24) -> list[tuple[str, str]]:
    """Author and text of each."""
    return [(f"Author {number}", book(f"Author {number}")) for number in range(num)]
