"""Needs the package verifiers: the loop against a server whose model is a rule, and the reward of the trace it leaves."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="the package verifiers is not installed")

import uvicorn
import verifiers.v1 as vf

from bench.common.server import in_thread
from stretto.harness.vf import SessionLoop, SourceData, SourceTask, SourceTaskset, SourceTasksetConfig, _turn
from stretto.tasks.task import Problem
from tests.harness.scripted import app


@pytest.fixture(scope="module")
def endpoint() -> Any:
    server = uvicorn.Server(uvicorn.Config(app("empty-call"), log_level="warning", lifespan="off"))
    with in_thread(server) as url:
        yield f"{url}/v1"


def first(kind: str) -> SourceTask:
    return next(iter(SourceTaskset(SourceTasksetConfig(id="stretto_vf", kind=kind)).load()))


def trace_of(task: SourceTask, turns: list[dict[str, Any]]) -> Any:
    messages = [*task.data.model_dump()["prompt"], *turns]
    nodes = [
        vf.MessageNode(parent=index - 1 if index else None, message=message, sampled=message["role"] == "assistant")
        for index, message in enumerate(messages)
    ]
    data = vf.TraceTask(type="SourceTask", data=task.data, key=task.key, hash=task.hash)
    ended = {"is_completed": True, "ok": True, "stop_condition": "agent_completed"}
    return vf.Trace(task=data, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, **ended)


def test_the_reward_is_that_of_the_source() -> None:
    from stretto.harness.vf import opened

    task = first("tools")
    problem: Problem = opened("tools", "{}").problem(task.data.item)
    right = trace_of(task, [{"role": "assistant", "content": problem.gold}])
    wrong = trace_of(task, [{"role": "assistant", "content": "no"}])
    for trace, reward in ((right, 1.0), (wrong, 0.0)):
        asyncio.run(task.score(trace))
        assert trace.reward == reward


def test_a_call_that_ended_the_episode_counts() -> None:
    """Its result is never sent to the model, so the trace ends with the call."""
    from stretto.harness.vf import opened

    source = opened("service", "{}")
    for task in islice(SourceTaskset(SourceTasksetConfig(id="stretto_vf", kind="service")).load(), 8):
        *turns, last = [
            {"role": turn["role"], "content": turn["content"]}
            | ({"tool_calls": [_flat(call) for call in turn["tool_calls"]]} if "tool_calls" in turn else {})
            | ({"tool_call_id": "a"} if turn["role"] == "tool" else {})
            for turn in source.demonstration(source.problem(task.data.item))
        ]
        trace = trace_of(task, turns if last["role"] == "tool" else [*turns, last])
        asyncio.run(task.score(trace))
        assert trace.reward == 1.0


def _flat(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"id": "a", "name": function["name"], "arguments": json.dumps(function["arguments"])}


def test_the_loop_calls_tools_and_ends(endpoint: str) -> None:
    data = SourceData(**first("tools").data.model_dump())
    context: Any = SimpleNamespace(model="empty-call")
    done = asyncio.run(SessionLoop(vf.HarnessConfig(id="x")).launch(context, None, None, endpoint, "key", {}, data))
    assert done.exit_code == 0
    bad = asyncio.run(
        SessionLoop(vf.HarnessConfig(id="x")).launch(context, None, None, f"{endpoint}/no", "key", {}, data)
    )
    assert bad.exit_code == 1 and "404" in bad.stderr


@pytest.mark.slow
def test_its_own_command_asks_our_sources_here(endpoint: str, tmp_path: Path) -> None:
    """By default verifiers rents a machine, which fails without a network."""
    told = {"env.taskset.kind": "tools", "model": "empty-call", "client.base-url": endpoint, "output-dir": tmp_path}
    flags = [part for name, value in told.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-c", "from verifiers.v1.cli.eval.main import main; main()", "stretto_vf", *flags]
    subprocess.run([*command, "-n", "2", "--no-push", "--no-rich"], check=True, capture_output=True)
    [path] = tmp_path.rglob("traces.jsonl")
    for line in path.read_text().splitlines():
        [trace] = json.loads(line)["traces"]
        assert trace["ok"] and not trace["errors"] and trace["rewards"]["verdict"]["score"] == 0.0


def test_calls_of_a_trace_are_read_back() -> None:
    call = {"id": "a", "name": "f", "arguments": "{broken"}
    turn = _turn(vf.AssistantMessage(content=None, tool_calls=[call]))
    assert turn == {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}
