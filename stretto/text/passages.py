"""Passages of books, each with the text before it as its prompt, and six ways to damage one: what a judge of writing learns from.

A damaged passage is about as long as it was, whatever the damage, so that length says nothing of which of the two is whole.
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
"""Of all authors: those a judge that rewards learns from, those of one that evaluates, and those that neither has read."""
_SHARES: Final[Mapping[Part, range]] = {"reward": range(2), "evaluation": range(2, 4), "held_out": range(4, 5)}
"""Of the five fifths that authors fall into by their names."""
_PROMPT_WORDS, _TEXT_WORDS = (90, 130), (150, 200)
"""Ranges of lengths. With a third of the one and half of the other the network could tell another author's passage in 86 % of pairs, and
another order of sentences in 71 %; with texts of 120 to 170 words the latter in 93 %."""
_MOST_WORDS = 220
"""Where sentences are long."""
_FEWEST_SENTENCES = 6
"""Four or five are as good in another order too often."""
_MOST_OF_AUTHOR = 40
"""Passages: a prolific one is one voice."""
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
    """What stands before it."""
    text: str
    rest: str
    """What stands behind it."""


Damage = Callable[[Passage, Passage, random.Random, Sequence[str]], str]
"""From a passage, one of another author, draws, and sentences that say nothing, to a worse text for the first one's prompt."""


def plain(text: str) -> str:
    """Words and punctuation alone: no list marks, headings, emphasis or rules, and white space as one blank."""
    return " ".join(_MARKS.sub("", text).split())


def scripts(text: str) -> dict[str, float]:
    """Shares of its letters by the script that they are of, by Unicode's names: LATIN, CJK, CYRILLIC."""
    counts = Counter(unicodedata.name(each, "?").split()[0] for each in text if each.isalpha())
    return {name: num / counts.total() for name, num in counts.items()}


def bulleted(text: str) -> str:
    """The same sentences as a list."""
    return "\n".join(f"- {each}" for each in sentences(text))


def spaced(text: str) -> str:
    """The same sentences with blank lines and a rule between each two."""
    return "\n\n---\n\n".join(sentences(text))


def sentences(text: str) -> list[str]:
    """Of plain text; joined by blanks they are it again."""
    return [found for match in _SENTENCE.finditer(text) if (found := match[0].strip())]


def part_of(author: str) -> Part:
    """Which judges may learn from ``author``; the same on every machine."""
    fifth = blake2b(author.encode(), digest_size=8).digest()[0] % 5
    return next(part for part, fifths in _SHARES.items() if fifth in fifths)


def fillers(part: Part) -> Sequence[str]:
    """Sentences for `padded`: who has learnt from some is tried with others."""
    return _FILLERS[1::2] if part == "held_out" else _FILLERS[::2]


def passages(books: Iterable[tuple[str, str]], part: Part, num: int, seed: int = 0) -> list[Passage]:
    """``num`` of the passages of ``books``, pairs of author and text, by authors of ``part``; as few as there are."""
    rng, by_author = random.Random(f"{part} {seed}"), dict[str, list[Passage]]()
    for author, text in books:
        if part_of(author) == part:
            by_author.setdefault(author, []).extend(_cut(author, text, rng))
    for own in by_author.values():
        rng.shuffle(own)
    drawn = [each for own in by_author.values() for each in own[:_MOST_OF_AUTHOR]]
    return rng.sample(drawn, min(num, len(drawn)))


def _cut(author: str, text: str, rng: random.Random) -> Iterator[Passage]:
    """Passages that begin at paragraphs, none reaching into another."""
    kept = [each for each in re.split(r"\n\s*\n", text) if not each.lstrip().startswith("#") and len(each) > 80]
    paragraphs = [sentences(plain(each)) for each in kept]
    rest = [each for own in paragraphs[len(paragraphs) // 20 :] for each in own]
    for _ in range(_MOST_OF_AUTHOR):
        skipped = rng.randrange(max(1, len(rest) // _MOST_OF_AUTHOR))
        prompt, at = _taken(rest, skipped, rng.randint(*_PROMPT_WORDS))
        own, end = _taken(rest, at, rng.randint(*_TEXT_WORDS))
        after, last = _taken(rest, end, _TEXT_WORDS[1])
        if not after:
            return
        if len(own) >= _FEWEST_SENTENCES and max(map(_words, (own, prompt))) <= _MOST_WORDS:
            yield Passage(author, " ".join(prompt), " ".join(own), " ".join(after))
        rest = rest[last:]


def _taken(of: Sequence[str], start: int, words: int) -> tuple[list[str], int]:
    """Sentences from ``start`` that have about so many words, and where the next one is."""
    end, left = start, float(words)
    while end < len(of) and left > len(of[end].split()) / 2:
        left -= len(of[end].split())
        end += 1
    return list(of[start:end]), end


def _words(said: Iterable[str]) -> int:
    return sum(len(each.split()) for each in said)


def shuffled(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """Its sentences in another order."""
    said = sentences(own.text)
    order = list(range(len(said)))
    for _ in range(100):
        rng.shuffle(order)
        if all(after != before + 1 for before, after in pairwise(order)):
            break
    return " ".join(said[place] for place in order)


def loops(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """From somewhere in its first half on, the same one or two sentences again and again."""
    said, num = sentences(own.text), rng.randint(1, 2)
    kept = said[: rng.randint(num, max(num, len(said) // 2))]
    return " ".join(_taken(kept + kept[-num:] * len(own.text), 0, _words(said))[0])


def truncated(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """Broken off within a sentence, sometimes later than where it would have ended."""
    said = sentences(f"{own.text} {own.rest}")
    before, at = _taken(said[:-1], 0, round(len(own.text.split()) * rng.uniform(0.7, 1.2)))
    last = said[at].split()
    return " ".join([*before, *last[: rng.randint(1, max(1, len(last) - 2))]]).rstrip(".!?,;:")


def swapped(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """Another author's, about something else."""
    return other.text


def padded(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """Its first part, with sentences in between that say nothing."""
    said = sentences(own.text)
    kept = said[: max(2, round(len(said) * rng.uniform(0.4, 0.7)))]
    unsaid, num = rng.sample(empty, len(empty)), _words(said)
    while unsaid and _words(kept) < num:
        kept.insert(rng.randint(1, len(kept)), unsaid.pop())
    return " ".join(kept)


def copied(own: Passage, other: Passage, rng: random.Random, empty: Sequence[str]) -> str:
    """The prompt again, and of itself what is left of its length."""
    said = sentences(f"{own.prompt} {own.text}")
    return " ".join(_taken(said, 0, len(own.text.split()))[0])


DAMAGES: Final[Mapping[str, Damage]] = {
    each.__name__: each for each in (shuffled, loops, truncated, swapped, padded, copied)
}


def damaged(found: Sequence[Passage], part: Part, seed: int = 0) -> list[dict[str, str]]:
    """By damage, of each passage; the same whichever others are asked for, of the same passages."""
    told = []
    for place, own in enumerate(found):
        others = [each for each in found if each.author != own.author]
        assert others, "passages of one author alone cannot be swapped"
        rng = random.Random(f"{seed} {place}")
        other = rng.choice(others)
        told.append({name: damage(own, other, rng, fillers(part)) for name, damage in DAMAGES.items()})
    return told
