"""Passages of books, each with the preceding text as its prompt, and six kinds of damage: the training data of a local judge.

A damaged passage is about as long as the original, so that the length does not reveal which of the two is damaged.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Final, Literal

Part = Literal["reward", "evaluation", "held_out"]
"""Part of the authors: training data of a judge for rewards, training data of a judge for evaluation, and authors that neither has
read.
"""
_SHARES: Final[Mapping[Part, range]] = {"reward": range(2), "evaluation": range(2, 4), "held_out": range(4, 5)}
"""Fifths of the authors, by a hash of the name, that belong to each part."""
_PROMPT_WORDS, _TEXT_WORDS = (90, 130), (150, 200)
"""Ranges of lengths in words. With a third of the first and half of the second, a network told another author's passage in 86 % of
pairs, and another order of sentences in 71 %. With texts of 120 to 170 words it told the order in 93 %.
"""
_MAX_WORDS = 220
"""Largest number of words of a passage with long sentences."""
_MIN_SENTENCES = 6
"""Four or five sentences are too often just as good in another order."""
_MAX_OF_AUTHOR = 40
"""Largest number of passages per author, so that a prolific one does not dominate."""
_MARKS = re.compile(
    r"^[ \t]*(?:[-*+•>]|#{1,6}|\d{1,3}[.)])[ \t]+|^[ \t]*[-*_=]{3,}[ \t]*$|\*{1,3}|`{1,3}|\b_|_\b", re.MULTILINE
)
_SENTENCE = re.compile(
    r".+?(?:(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?…]+[\"'”’)]*(?=\s+[\"'“‘(]*[^\Wa-z_])|[。！？]+|$)"
)
_FILLERS: Final = (
    "It is important to note that there is much to be said here.", "Needless to say, this matters in many ways.",
    "In today's world, such things are more relevant than ever.", "There are many aspects to consider in this regard.",
    "This is, of course, a point of great significance.", "As we can see, the situation is what it is.",
    "It goes without saying that every detail plays a role.", "All things considered, this is worth keeping in mind.",
    "At the end of the day, it is what truly matters.", "This serves as a reminder of how important it is.",
    "In other words, it is a very meaningful thing.", "One could go on at length about this subject.",
    "Overall, it can be said that this is noteworthy.", "It should be mentioned that this is a key element.",
    "To put it simply, there is a lot going on here.", "This really highlights the importance of the matter.",
    "Indeed, it is hard to overstate how true this is.", "Many people would agree that this is interesting.",
    "Let us take a moment to appreciate what this means.", "Furthermore, it is worth pointing this out again.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Passage:
    """Written by `passages`."""

    author: str
    prompt: str
    """The text before it."""
    text: str
    rest: str
    """The text after it."""


Damage = Callable[[Passage, Passage, random.Random, Sequence[str]], str]
"""Creates a damaged text for a prompt from the passage, a passage of another author, a random generator, and empty sentences."""


def plain(text: str) -> str:
    """Words and punctuation only: no list marks, headings, emphasis or rules; white space becomes single blanks."""
    return " ".join(_MARKS.sub("", text).split())


def scripts(text: str) -> dict[str, float]:
    """Shares of the text's letters by script, as in Unicode's names: LATIN, CJK, CYRILLIC."""
    counts = Counter(unicodedata.name(letter, "?").split()[0] for letter in text if letter.isalpha())
    return {name: num / counts.total() for name, num in counts.items()}


def bulleted(text: str) -> str:
    """The same sentences as a list."""
    return "\n".join(f"- {sentence}" for sentence in sentences(text))


def spaced(text: str) -> str:
    """The same sentences with blank lines and a rule between them."""
    return "\n\n---\n\n".join(sentences(text))


def sentences(text: str) -> list[str]:
    """The sentences of plain text. Joined by blanks they give the text again."""
    return [sentence for match in _SENTENCE.finditer(text) if (sentence := match[0].strip())]


def part_of(author: str) -> Part:
    """The part that ``author`` belongs to; the same on every machine."""
    fifth = blake2b(author.encode(), digest_size=8).digest()[0] % 5
    return next(part for part, fifths in _SHARES.items() if fifth in fifths)


def fillers(part: Part) -> Sequence[str]:
    """Empty sentences for `padded`. Held-out authors get other ones than the training data."""
    return _FILLERS[1::2] if part == "held_out" else _FILLERS[::2]


def passages(books: Iterable[tuple[str, str]], part: Part, num: int, seed: int = 0) -> list[Passage]:
    """``num`` passages of ``books`` (pairs of author and text) by authors of ``part``, or all if there are fewer."""
    rng, by_author = random.Random(f"{part} {seed}"), dict[str, list[Passage]]()
    for author, text in books:
        if part_of(author) == part:
            by_author.setdefault(author, []).extend(_cut(author, text, rng))
    for of_author in by_author.values():
        rng.shuffle(of_author)
    drawn = [passage for of_author in by_author.values() for passage in of_author[:_MAX_OF_AUTHOR]]
    return rng.sample(drawn, min(num, len(drawn)))


def _cut(author: str, text: str, rng: random.Random) -> Iterator[Passage]:
    """Passages that start at paragraphs and do not overlap."""
    blocks = [block for block in re.split(r"\n\s*\n", text) if not block.lstrip().startswith("#") and len(block) > 80]
    paragraphs = [sentences(plain(block)) for block in blocks]
    rest = [sentence for paragraph in paragraphs[len(paragraphs) // 20 :] for sentence in paragraph]
    for _ in range(_MAX_OF_AUTHOR):
        skipped = rng.randrange(max(1, len(rest) // _MAX_OF_AUTHOR))
        prompt, at = _first_words(rest, skipped, rng.randint(*_PROMPT_WORDS))
        own, end = _first_words(rest, at, rng.randint(*_TEXT_WORDS))
        after, last = _first_words(rest, end, _TEXT_WORDS[1])
        if not after:
            return
        if len(own) >= _MIN_SENTENCES and max(map(_num_words, (own, prompt))) <= _MAX_WORDS:
            yield Passage(author, " ".join(prompt), " ".join(own), " ".join(after))
        rest = rest[last:]


def _first_words(parts: Sequence[str], start: int, num_words: int) -> tuple[list[str], int]:
    """Sentences of ``parts`` from ``start`` with about ``num_words`` words, and the index of the next sentence."""
    end, left = start, float(num_words)
    while end < len(parts) and left > len(parts[end].split()) / 2:
        left -= len(parts[end].split())
        end += 1
    return list(parts[start:end]), end


def _num_words(parts: Iterable[str]) -> int:
    return sum(len(part.split()) for part in parts)


def shuffled(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """Its sentences in another order."""
    parts = sentences(own.text)
    order = list(range(len(parts)))
    for _ in range(100):
        rng.shuffle(order)
        if all(after != before + 1 for before, after in pairwise(order)):
            break
    return " ".join(parts[place] for place in order)


def loops(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """From somewhere in its first half on, the same one or two sentences again and again."""
    parts, num = sentences(own.text), rng.randint(1, 2)
    kept = parts[: rng.randint(num, max(num, len(parts) // 2))]
    return " ".join(_first_words(kept + kept[-num:] * len(own.text), 0, _num_words(parts))[0])


def truncated(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """Cut off inside a sentence, sometimes later than the original end."""
    parts = sentences(f"{own.text} {own.rest}")
    before, at = _first_words(parts[:-1], 0, round(len(own.text.split()) * rng.uniform(0.7, 1.2)))
    last = parts[at].split()
    return " ".join([*before, *last[: rng.randint(1, max(1, len(last) - 2))]]).rstrip(".!?,;:")


def swapped(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """Another author's passage, about another subject."""
    return other.text


def padded(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """Its first part, with empty sentences inserted."""
    parts = sentences(own.text)
    kept = parts[: max(2, round(len(parts) * rng.uniform(0.4, 0.7)))]
    unused, num = rng.sample(empty, len(empty)), _num_words(parts)
    while unused and _num_words(kept) < num:
        kept.insert(rng.randint(1, len(kept)), unused.pop())
    return " ".join(kept)


def copied(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """The prompt again, followed by the start of the passage, in the length of the passage."""
    parts = sentences(f"{own.prompt} {own.text}")
    return " ".join(_first_words(parts, 0, len(own.text.split()))[0])


DAMAGES: Final[Mapping[str, Damage]] = {
    damage.__name__: damage for damage in (shuffled, loops, truncated, swapped, padded, copied)
}


def damaged(originals: Sequence[Passage], part: Part, seed: int = 0) -> list[dict[str, str]]:
    """Damaged texts of each passage, by kind of damage. A text depends only on ``seed`` and on ``originals``."""
    texts = []
    for place, own in enumerate(originals):
        others = [passage for passage in originals if passage.author != own.author]
        assert others, "passages of a single author cannot be swapped"
        rng = random.Random(f"{seed} {place}")
        other = rng.choice(others)
        texts.append({name: damage(own, other, rng, fillers(part)) for name, damage in DAMAGES.items()})
    return texts
