"""A process that answers, and what ends it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from stretto.base.limited import LimitedProcess, Overrun


@pytest.fixture(scope="module")
def process() -> Iterator[LimitedProcess]:
    process = LimitedProcess("tests.base.questions", b"setup ", limit_s=0.3)
    yield process
    process.close()


def test_one_process_answers_all_who_ask(process: LimitedProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = set(pool.map(process.ask, [b"a "] * 20))
    assert len(answers) == 1 and answers.pop().startswith(b"setup a ")


@pytest.mark.parametrize(
    ("question", "problem", "is_late"),
    [
        (b"spin", "took more than 0.3 processor seconds", True),
        (b"recurse", "overflowed the stack", False),
        (b"eat", "took too much memory", False),
        (b"exit", "ended its process", False),
    ],
)
def test_a_question_that_takes_too_much_is_told_so_and_the_next_is_answered(
    process: LimitedProcess, question: bytes, problem: str, is_late: bool
) -> None:
    with pytest.raises(Overrun, match=problem) as caught:
        process.ask(question)
    assert caught.value.is_late == is_late
    assert process.ask(b"b ").startswith(b"setup b ")


def test_a_process_that_died_between_questions_is_nobodys_fault(process: LimitedProcess) -> None:
    pid = int(process.ask(b"c ").split()[-1])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert int(process.ask(b"d ").split()[-1]) != pid


def test_it_goes_with_whoever_asked() -> None:
    process = LimitedProcess("tests.base.questions", limit_s=1)
    pid = int(process.ask(b" ").split()[-1])
    del process
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
