"""Real text available on every machine: Python's standard library and its documentation, and generated exercises.

Nothing is downloaded or stored. The demo, and tests that need text, use it. The same versions of Python and reasoning-gym give
the same documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics

from stretto.data.sources import Document

SEED = 1234
"""Seed of the generated exercises. Evaluations on exercises must use another seed."""
EXERCISES = (
    "basic_arithmetic", "chain_sum", "gcd", "lcm", "leg_counting", "count_bits", "letter_counting", "spell_backward",
    "base_conversion", "products", "calendar_arithmetic", "syllogism", "family_relationships", "count_primes",
)  # fmt: skip
"""Generators of reasoning-gym with short answers that do not depend on the hash seed of the process."""
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
"""Chat template in the format of the exercises: the network was trained on questions and answers, not on chat turns."""
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
"""Prompts for the comparison of several sizes of a chat model."""
_TOPICS = (
    "bread", "rivers", "music", "the moon", "bicycles", "winter", "chess", "whales", "honey", "volcanoes", "libraries", "tea",
    "glass", "trains", "gardens", "paint", "thunder", "maps", "wool", "clocks", "the desert", "soap", "bridges", "spices",
    "dreams", "paper", "dancing", "snow", "computers", "coffee", "friendship", "the heart", "money", "photographs", "rain",
    "robots", "cheese", "stars", "shoes", "elephants",
)  # fmt: skip
_QUESTIONS = (
    "What is special about {}?", "Tell me something interesting about {}.", "Write two sentences about {}.",
    "Explain {} to a child.", "Give me three words that go with {}, and say why.", "How would you describe {} to a stranger?",
    "Why do people care about {}?", "Write a short story about {}.",
)  # fmt: skip
_PAIRS_PER_DOCUMENT = 4
_PREFIX_WORDS, _CONTINUATION_WORDS = 10, 24
"""Words in the beginning and in the continuation of a passage."""
_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__"}
_MAX_FILE_BYTES = 200_000
"""Larger files consist mostly of tables."""


def demo_documents(max_code_chars: int = 8_000_000, max_exercise_chars: int = 3_000_000) -> Iterator[Document]:
    """Documents of the domains ``code``, ``docs`` and ``exercises``.

    Args:
        max_code_chars: characters of library source. Files are taken whole until the next one would exceed the limit.
        max_exercise_chars: characters of generated questions and answers, the same number for each generator.
    """
    yield from _code(max_code_chars)
    for name in sorted(topics):  # chapters of the language reference that ``help()`` shows
        yield Document(topics[name].strip() + "\n", "docs")
    yield from _exercises(max_exercise_chars)


def chat_questions() -> list[str]:
    """Questions for a chat model; none of them is in `CHAT_PROMPTS`."""
    return [form.format(topic) for topic, form in product(_TOPICS, _QUESTIONS)]


def passages() -> Iterator[tuple[str, str]]:
    """Beginning and continuation of paragraphs of the language reference."""
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            words, end = paragraph.split(), _PREFIX_WORDS + _CONTINUATION_WORDS
            if len(words) > end and paragraph[0].isupper():
                yield " ".join(words[:_PREFIX_WORDS]), " ".join(words[_PREFIX_WORDS:end])


def _code(max_chars: int) -> Iterator[Document]:
    """Modules of the standard library, in alphabetical order."""
    root = Path(os.__file__).parent
    num_chars = 0
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED & set(path.relative_to(root).parts) or path.stat().st_size > _MAX_FILE_BYTES:
            continue
        raw = path.read_bytes()
        if b"coding:" in raw[:200] and b"utf-8" not in raw[:200].lower():
            continue  # a few modules are not UTF-8
        text = raw.decode()
        num_chars += len(text)
        if num_chars > max_chars:
            return
        yield Document(text, "code")


def _exercises(max_chars: int) -> Iterator[Document]:
    """Questions with answers, a few of the same kind per document."""
    from reasoning_gym import create_dataset  # seconds to import

    for name in EXERCISES:
        num_chars = 0
        exercises = create_dataset(name, seed=SEED, size=1 << 20)  # generated on access
        for first in range(0, len(exercises), _PAIRS_PER_DOCUMENT):
            pairs = [exercises[first + offset] for offset in range(_PAIRS_PER_DOCUMENT)]
            text = "\n".join(f"Question: {pair['question'].strip()}\nAnswer: {pair['answer']}\n" for pair in pairs)
            num_chars += len(text)
            if num_chars > max_chars // len(EXERCISES):
                break
            yield Document(text, "exercises")
