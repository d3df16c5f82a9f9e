from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from stretto.data.demo_text import EXERCISES, TEMPLATE, demo_documents
from stretto.text.chat import render


@pytest.mark.slow
def test_domains_and_limits() -> None:
    pytest.importorskip("reasoning_gym")
    sizes: Counter[str] = Counter()
    for document in demo_documents(300_000, 60_000):
        assert document.text.strip()
        sizes[document.domain] += len(document.text)
    assert set(sizes) == {"code", "docs", "exercises"}
    assert 100_000 < sizes["code"] <= 300_000
    assert 0.8 * 60_000 < sizes["exercises"] <= 60_000


SCRIPT = """
import hashlib
from stretto.data.demo_text import EXERCISES, TEMPLATE, demo_documents
from stretto.text.chat import render
print(hashlib.sha256(repr(list(demo_documents(50_000, 40_000))).encode()).hexdigest())
"""


@pytest.mark.slow
def test_the_same_in_every_process() -> None:
    pytest.importorskip("reasoning_gym")
    here = hashlib.sha256(repr(list(demo_documents(50_000, 40_000))).encode()).hexdigest()
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip() == here


def test_exercises_have_short_answers() -> None:
    pytest.importorskip("reasoning_gym")
    documents = [document.text for document in demo_documents(0, 40_000) if document.domain == "exercises"]
    answers = [line for text in documents for line in text.splitlines() if line.startswith("Answer: ")]
    assert len(answers) > 10 * len(EXERCISES)
    assert max(map(len, answers)) < 60


def test_the_template_writes_exercises_as_the_text_does() -> None:
    pytest.importorskip("reasoning_gym")
    text = next(document.text for document in demo_documents(0, 40_000) if document.domain == "exercises")
    question, answer = text.removeprefix("Question: ").split("\nAnswer: ")[:2]
    answer = answer.splitlines()[0]
    ends = {"eos_token": ""}
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert text.startswith(render(TEMPLATE, turns, variables=ends).strip())
    assert text.startswith(render(TEMPLATE, turns[:1], add_generation_prompt=True, variables=ends))
