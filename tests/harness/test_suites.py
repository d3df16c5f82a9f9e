"""What is refused without any harness; with inspect_ai, what its log says of an agent that caught a failure."""

from __future__ import annotations

import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from stretto.api.evaluate import _result
from stretto.base.errors import UserError
from stretto.harness import suites
from stretto.harness.suites import (
    BFCL,
    Budget,
    Judged,
    ask,
    ask_bfcl,
    bfcl_folder,
    bfcl_python,
    harness_names,
    serving,
    trivial_server,
)
from stretto.post.suite import Cost, Evaluation
from stretto.report.evals import evaluation_page, score_table


def judged(num: int, num_failed: int) -> Judged:
    made = Judged()
    for number in range(num):
        made.add(f"p{number}", None if number < num_failed else float(number % 2), "no answer came")
    return made


def test_above_a_twentieth_there_is_no_score() -> None:
    judged(40, 2).refuse("d")
    with pytest.raises(
        UserError, match=r"d: no score: 3 infrastructure errors in 40 samples, the last one: no answer came"
    ):
        judged(40, 3).refuse("d")
    with pytest.raises(UserError, match="0 infrastructure errors in 0 samples"):
        Judged().refuse("d")


def test_a_server_that_is_gone_gives_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "SUITES", {"x": lambda *_: {"d": judged(10, 0)}})
    with pytest.raises(UserError, match="x: no score: the server died"):
        ask("x", "http://127.0.0.1:9", tmp_path, Budget(), has_baselines=False)


def test_what_an_attempt_before_left_behind_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def suite(url: str, folder: Path, budget: Budget) -> dict[str, Judged]:
        assert not folder.exists()
        return {"d": judged(10, 0)}

    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "bfcl.jsonl").write_text("of a run that failed")
    (tmp_path / "x" / suites.CONSOLE_FILE).touch()
    monkeypatch.setattr(suites, "SUITES", {"x": suite})
    with trivial_server("empty") as url:
        assert ask("x", url, tmp_path / "x", Budget(), has_baselines=False)["d"].values == judged(10, 0).values
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"mine: holds other files; move them"):
        ask("x", "http://127.0.0.1:9", tmp_path / "mine", Budget())
    assert (tmp_path / "mine" / "notes.txt").exists()


def test_what_cannot_be_asked_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--suite tao: no harness.*tau"):
        ask("tao", "http://127.0.0.1:9", tmp_path, Budget())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"inspect_ai is not installed; pip install 'stretto\[eval\]'"):
        ask("tau", "http://127.0.0.1:9", tmp_path, Budget())
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    with pytest.raises(UserError, match="needs numpy"):
        bfcl_python()


@pytest.mark.slow
@pytest.mark.parametrize("has_baselines", [True, False])
def test_a_suite_has_the_scores_of_trivial_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_baselines: bool
) -> None:
    """A suite like BFCL's irrelevance, where no call is the correct answer, and its opposite."""
    tools = [{"type": "function", "function": {"name": "f"}}]

    def suite(url: str, folder: Path, budget: Budget) -> dict[str, Judged]:
        found = {"calls": Judged(), "irrelevance": Judged()}
        assert httpx.get(f"{url}/v1/models").json()["data"]
        for name, one in found.items():
            for number in range(4):
                body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": tools}
                answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()
                called = answer["choices"][0]["message"].get("tool_calls") is not None
                one.add(f"p{number}", float(called == (name == "calls")), finish="stop")
        return found

    monkeypatch.setattr(suites, "SUITES", {"x": suite})
    with suites.trivial_server("empty") as url:  # stands for a model that calls nothing
        monkeypatch.setattr(httpx.Response, "raise_for_status", lambda self: self)
        found = ask("x", url, tmp_path, Budget(), has_baselines)
    results = {name: _result("x", name, one, 1, seed=0) for name, one in found.items()}
    scores = {name: {rule: each.value for rule, each in result.baselines.items()} for name, result in results.items()}
    expected = {"calls": {"empty": 0.0, "calls": 1.0}, "irrelevance": {"empty": 1.0, "calls": 0.0}}
    assert scores == (expected if has_baselines else {"calls": {}, "irrelevance": {}})
    assert results["irrelevance"].score.value == 1.0
    if has_baselines:
        cost = Cost(1, 1, 1, 1, 1, 1.0)
        asked = {"prompt": "chat", "suites": {"x": Budget().model_dump() | {"sources": dict.fromkeys(results, "x")}}}
        done = Evaluation("m", asked, results["irrelevance"].score, results, cost)
        assert "Not clearly above the trivial baseline: calls, irrelevance" in evaluation_page(done).headline
        mean = score_table(done).totals[0][2]
        assert mean.value == 1.0 and mean.note == "best of each domain"


@pytest.mark.slow
@pytest.mark.skipif(
    not (bfcl_folder() / "whole").is_file(),
    reason=f"{BFCL} is not installed in its own environment; run: stretto eval CHECKPOINT --suite bfcl --limit 1 -o OUT",
)
@pytest.mark.parametrize(("rule", "right"), [("empty", {"bfcl_irrelevance"}), ("calls", set[str]())])
def test_bfcls_own_questions_and_checker_score_the_trivial_baselines(
    tmp_path: Path, rule: str, right: set[str]
) -> None:
    with trivial_server(rule) as url:
        found = ask_bfcl(url, tmp_path, Budget(limit=3))
    assert set(found) == {"bfcl_simple_python", "bfcl_multiple", "bfcl_parallel", "bfcl_irrelevance"}
    for name, one in found.items():
        assert list(one.values.values()) == [[float(name in right)]] * 3 and not one.failures, name


@pytest.mark.slow
def test_a_server_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed, problem = r"its server did not start \(exit code 2\): ", f"{tmp_path}: config.json: no such file"
    with pytest.raises(UserError, match=failed + re.escape(problem)), serving(tmp_path):
        pass
    said = capsys.readouterr()
    assert f"stretto: {problem}" in said.err and f"open {tmp_path}: stopped" in said.out and "done" not in said.out
    log = tmp_path / "log"
    with log.open("w") as file, pytest.raises(UserError, match=f"{failed}{log} says why"), serving(tmp_path, log=file):
        pass
    assert problem in log.read_text()


LOUD = """
import subprocess, sys, time
sys.stderr.write("word " * 60_000 + "\\n")
left = subprocess.Popen(["sleep", "1000"])
open("left", "w").write(str(left.pid))
print("serving at http://127.0.0.1:1", flush=True)
time.sleep(1000)
"""


def test_no_stderr_and_no_process_that_is_left_stops_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stderr", None)
    with serving(tmp_path, program=("-c", LOUD)) as (url, _):
        assert url == "http://127.0.0.1:1"
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)  # it is there, with the server's stderr open


PARENT = """
import sys
from pathlib import Path
from stretto.harness.suites import serving
with serving(Path("x")) as (url, process):
    print(process.pid, flush=True)
    sys.stdin.read()
"""
SERVER = f"""#!{sys.executable}
import runpy, sys, time, types
cli = types.ModuleType("stretto.cli.main")  # a server without a network, which takes a moment to open
def main():
    print("serving at http://127.0.0.1:1", flush=True)
    while True:
        time.sleep(60)
cli.main = main
sys.modules["stretto.cli.main"] = cli
module, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.slow
def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(SERVER)
    python.chmod(0o755)
    script = f"import sys; sys.executable = {str(python)!r}\n{PARENT}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        server = os.pidfd_open(next(int(line) for line in parent.stdout if line.strip().isdigit()))
        try:
            parent.kill()
            assert select.select([server], [], [], 60)[0], "the server outlives its parent"
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(server, signal.SIGKILL)
            os.close(server)


def test_infrastructure_errors_are_left_out_of_a_score() -> None:
    found = _result("x", "d", judged(40, 2), 1, seed=0)
    assert found.num_infra == 2 and found.values.count(None) == 2 and found.score.value == 0.5
    assert harness_names(["gym,tau", "bfcl"]) == (["tau", "bfcl"], ["gym"])


def test_conversations_have_the_benchmarks_own_number_of_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(suites, "ask_inspect", lambda *told: commands.append([*told[3].values(), *told[4:]]) or {})
    assert suites.ask_tau("http://127.0.0.1:9", tmp_path, Budget(), ["retail"]) == {}
    assert commands == [["inspect_evals/tau2_retail", "-T", "shuffle=false"]]  # no message_limit
    assert set(Budget.model_fields) == {"limit", "samples", "temperature", "at_once", "max_tokens", "sample_s"}


def test_samples_that_a_limit_ended_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few, many = judged(40, 0), judged(40, 0)
    for one, num in ((few, 2), (many, 3)):
        for number in range(num):
            one.add(f"late{number}", 0.0, finish="time")
    monkeypatch.setattr(suites, "SUITES", {"x": lambda *_: {"few": few, "many": many}})
    with trivial_server("empty") as url:
        monkeypatch.setattr(httpx.Response, "raise_for_status", lambda self: self)
        ask("x", url, tmp_path, Budget(), has_baselines=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "many: limits ended 3 of 43 samples (time 3)" in said and "few" not in said


@pytest.mark.skipif(importlib.util.find_spec("inspect_ai") is None, reason="the package inspect_ai is not installed")
def test_a_log_tells_of_a_failure_that_the_agent_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a provider that lets it be caught: the log says success, and 100 %."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    from tests.harness.test_inspect_model import deaf, untouched

    def answer(messages: Any, *_: Any) -> ModelOutput:
        if "broken" in messages[-1].text:
            raise ConnectionError("nobody there")
        output = ModelOutput.from_content("mock", "yes")
        output.usage = ModelUsage(
            input_tokens=1, output_tokens=1
        )  # else it is counted, with a tokenizer from the network
        return output

    questions = [Sample(input=text, target="") for text in ["fine"] * 30 + ["broken"]]
    task = Task(name="t", dataset=questions, solver=deaf(), scorer=untouched())
    [log] = eval(task, model=get_model("mockllm/m", custom_outputs=answer), display="none", log_dir=str(tmp_path))
    assert log.status == "success" and log.results and log.results.scores[0].metrics["accuracy"].value == 1.0
    empty = Task(name="t", dataset=questions[:1], solver=deaf(), scorer=untouched())
    eval(
        empty, model=get_model("mockllm/m"), display="none", log_dir=str(tmp_path / "baseline-empty")
    )  # not the model's
    monkeypatch.setattr(suites, "_run", lambda *_, **__: 0)
    found = suites.ask_inspect("http://127.0.0.1:9", tmp_path, Budget(), {"d": "t"})["d"]
    assert len(found.failures) == 1 and "nobody there" in found.failures[0]
    assert list(found.values.values()).count([None]) == 1


@pytest.mark.skipif(importlib.util.find_spec("inspect_ai") is None, reason="the package inspect_ai is not installed")
def test_why_a_sample_was_ended_is_told(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """inspect says of it that an operator cancelled it."""
    from tests.harness.test_inspect_model import asked

    log = asked(checkpoint, tmp_path, question="policy " * 600)
    monkeypatch.setattr(suites, "_run", lambda *_, **__: 0)
    with pytest.raises(UserError, match="d: no score: 1 infrastructure errors in 1 samples") as raised:
        suites.ask_inspect("http://127.0.0.1:9", tmp_path, Budget(), {"d": log.eval.task})
    assert "exceed this server's context of 512 tokens" in str(raised.value)
