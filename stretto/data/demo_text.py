"""Real text that every machine has: the interpreter's own library, its documentation, and generated exercises.

Nothing is downloaded and nothing third-party is kept: the demo and the tests that need text begin here. The same
Python and reasoning-gym versions give the same documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics

from stretto.data.sources import Document

SEED = 1234
"""Of the generated exercises; whoever evaluates on them takes another."""
EXERCISES = (
    "basic_arithmetic", "chain_sum", "gcd", "lcm", "leg_counting", "count_bits", "letter_counting", "spell_backward",
    "base_conversion", "products", "calendar_arithmetic", "syllogism", "family_relationships", "count_primes",
)  # fmt: skip
"""reasoning-gym generators with short answers, none of which depends on the hash seed of the process."""
TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- 'Answer: ' + (message.content or '') + eos_token + '\\n' }}
{%- else %}
{{- ('Question: ' if message.role == 'user' else '') + (message.content or '') + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Answer:' }}{%- endif %}
"""
"""Chat template in the form of the exercises: the network has seen no turns, but it has seen questions answered."""
CHAT_PROMPTS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Write a haiku about autumn.",
    "What is 12 plus 30?",
    "Name three animals that live in the sea.",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that adds two numbers.",
    "Give me one tip for sleeping better.",
    "Who wrote Romeo and Juliet?",
    "What should I cook with eggs and tomatoes?",
)
"""For a chat model, to be compared at several sizes."""
_TOPICS = (
    "bread", "rivers", "music", "the moon", "bicycles", "winter", "chess", "whales", "honey", "volcanoes", "libraries", "tea",
    "glass", "trains", "gardens", "paint", "thunder", "maps", "wool", "clocks", "the desert", "soap", "bridges", "spices",
    "dreams", "paper", "dancing", "snow", "computers", "coffee", "friendship", "the heart", "money", "photographs", "rain",
    "robots", "cheese", "stars", "shoes", "elephants",
)  # fmt: skip
_ASKED = (
    "What is special about {}?", "Tell me something interesting about {}.", "Write two sentences about {}.",
    "Explain {} to a child.", "Give me three words that go with {}, and say why.", "How would you describe {} to a stranger?",
    "Why do people care about {}?", "Write a short story about {}.",
)  # fmt: skip
_PAIRS_PER_DOCUMENT = 4
_BEGUN, _GOES_ON = 10, 24
"""Words of a passage that are shown, and that are to follow."""
_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__"}
_MAX_FILE_BYTES = 200_000
"""Larger files are mostly tables."""


def demo_documents(max_code_chars: int = 8_000_000, max_exercise_chars: int = 3_000_000) -> Iterator[Document]:
    """Documents of the domains ``code``, ``docs`` and ``exercises``.

    Args:
        max_code_chars: characters of library source; whole files are taken until the next would go over.
        max_exercise_chars: characters of generated questions and answers, shared evenly by the generators.
    """
    yield from _code(max_code_chars)
    for name in sorted(topics):  # chapters of the language reference that ``help()`` shows
        yield Document(topics[name].strip() + "\n", "docs")
    yield from _exercises(max_exercise_chars)


def chat_questions() -> list[str]:
    """Questions for a chat model to answer, none of them of `CHAT_PROMPTS`."""
    return [form.format(topic) for topic, form in product(_TOPICS, _ASKED)]


def passages() -> Iterator[tuple[str, str]]:
    """Of the paragraphs of the language reference, how each begins and how it goes on."""
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            found = paragraph.split()
            if len(found) > _BEGUN + _GOES_ON and paragraph[0].isupper():
                yield " ".join(found[:_BEGUN]), " ".join(found[_BEGUN : _BEGUN + _GOES_ON])


def _code(max_chars: int) -> Iterator[Document]:
    """Standard library modules, in alphabetical order."""
    root = Path(os.__file__).parent
    num_chars = 0
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED & set(path.relative_to(root).parts) or path.stat().st_size > _MAX_FILE_BYTES:
            continue
        raw = path.read_bytes()
        if b"coding:" in raw[:200] and b"utf-8" not in raw[:200].lower():
            continue  # a few sources of codecs are not UTF-8
        text = raw.decode()
        num_chars += len(text)
        if num_chars > max_chars:
            return
        yield Document(text, "code")


def _exercises(max_chars: int) -> Iterator[Document]:
    """Questions with answers, a few of one kind a document."""
    from reasoning_gym import create_dataset  # seconds to import

    for name in EXERCISES:
        num_chars = 0
        exercises = create_dataset(name, seed=SEED, size=1 << 20)  # generated one by one, as they are asked for
        for first in range(0, len(exercises), _PAIRS_PER_DOCUMENT):
            pairs = [exercises[first + offset] for offset in range(_PAIRS_PER_DOCUMENT)]
            text = "\n".join(f"Question: {pair['question'].strip()}\nAnswer: {pair['answer']}\n" for pair in pairs)
            num_chars += len(text)
            if num_chars > max_chars // len(EXERCISES):
                break
            yield Document(text, "exercises")
