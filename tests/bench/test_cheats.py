"""The bench of cheating agents passes on the worlds, and fails where a task pays for less than its work."""

from __future__ import annotations

import sys

import pytest

from bench import cheats
from stretto.tasks.registry import KINDS
from stretto.tasks.strings import StringsSource
from stretto.tasks.task import Answer, Problem, Score


class PaysForEcho(StringsSource):
    """Accepts an answer that repeats the question and gives the right answer somewhere in it."""

    def score(self, problem: Problem, answer: Answer) -> Score:
        return Score.of(problem.messages[0]["content"] in answer.text or problem.gold == answer.text)


def test_it_passes_on_worlds_and_fails_where_echoing_pays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cheats", "--problems", "12", "--kinds", "service,search,briefs"])
    cheats.main()
    assert "service long" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["cheats", "--problems", "4", "--kinds", "strings"])
    monkeypatch.setitem(KINDS, "strings", PaysForEcho)  # type: ignore[misc]
    with pytest.raises(SystemExit) as ended:
        cheats.main()
    assert ended.value.code == 1 and "above the trivial baseline: strings sort False: echo" in capsys.readouterr().out
