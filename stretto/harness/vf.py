"""Our sources as a task set of `verifiers` (its v1 stack), for its `vf-eval`, its training and its dashboards.

    vf-eval stretto_vf --env.taskset.kind service -m NAME --client.base-url http://127.0.0.1:8000/v1

The agent loop is ours, as verifiers allows: it runs in the process of the rollout and asks the model through their endpoint, so that their
trace, budgets and log have every turn. Tools and users are those of the problem's session. The reward repeats the calls in the trace, as
a verifier of ours does anywhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import count, islice
from typing import Any

import httpx
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.runtimes import ProgramResult

from stretto.base.endpoint import excerpt
from stretto.base.trajectory import Outcome
from stretto.flow.launch import SourceTables
from stretto.learning.recipe import SandboxConfig, SourceConfig
from stretto.tasks.session import arguments_of, tool_turn
from stretto.tasks.task import FIRST_REPORTED, Answer, TaskSource

__all__ = ["LocalEnv", "SessionLoop", "SourceTaskset"]


class SourceData(vf.TaskData):
    """A problem by its number; what it asks is its prompt."""

    kind: str
    args: dict[str, Any]
    item: int


class SourceTask(vf.Task[SourceData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def verdict(self, trace: Any) -> float:
        """What the source gives; raises where it could not judge, which is no reward of 0."""
        data = self.data
        source = opened(data.kind, json.dumps(data.args))
        problem = source.problem(data.item)
        turns = [_turn(message) for message in trace.messages[len(problem.messages) :]]
        text = str(turns[-1].get("content") or "") if turns else ""
        # what a call gave that ended the episode was never sent, so no trace has it
        called = [call for turn in turns[-1:] for call in turn.get("tool_calls") or ()]
        turns += [{"role": "tool", "name": call["function"]["name"]} for call in called]
        score = await asyncio.to_thread(source.score, problem, Answer(text, tuple(turns)))
        if score.outcome is Outcome.INFRA:
            raise RuntimeError(f"{data.kind}: item {data.item} could not be judged: {score.detail}")
        return score.reward


class SourceTasksetConfig(vf.TasksetConfig):
    kind: str = "gym"
    """As in a recipe: docs/RL.md lists them."""
    args: dict[str, Any] = Field(default_factory=dict)
    first: int | None = None
    """Item to begin with; None: the first, or of a source without end one that no run trains on."""


class SourceTaskset(vf.Taskset[SourceTask, SourceTasksetConfig]):
    INFINITE = True
    """Of those with an end, all that there are."""

    def load(self) -> Any:
        kind, args = self.config.kind, self.config.args
        source = opened(kind, json.dumps(args))
        num = source.num_items
        first = self.config.first if self.config.first is not None else 0 if num is not None else FIRST_REPORTED
        for item in count(first) if num is None else islice(count(first), max(0, num - first)):
            messages = [dict(message) for message in source.problem(item).messages]
            yield SourceTask(SourceData(kind=kind, args=args, item=item, prompt=messages), self.config.task)


class SessionLoop(vf.Harness[vf.HarnessConfig]):
    """Asks the model, calls its tools, lets the problem's user answer, until one of them ends it or a budget does."""

    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> ProgramResult:
        source = opened(data.kind, json.dumps(data.args))
        problem, turns = source.problem(data.item), list[dict[str, Any]]()
        headers = {"Authorization": f"Bearer {secret}"}
        with closing(source.open(problem)) as session:
            offered = {"tools": [tool.schema() for tool in session.tools]} if session.tools else {}
            # their budgets end it
            async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=False) as http:
                while True:
                    told = {"model": ctx.model, "messages": [*problem.messages, *map(_wire, turns)], **offered}
                    answer = await http.post(f"{endpoint}/chat/completions", json=told)
                    if answer.is_error:  # of a budget that is used up, too: then their trace says so
                        return ProgramResult(1, "", f"{answer.status_code}: {excerpt(answer)}")
                    turns.append(said := answer.json()["choices"][0]["message"])
                    for call in said.get("tool_calls") or ():
                        done = await asyncio.to_thread(tool_turn, session, _call(call))
                        turns.append({**done, "tool_call_id": call["id"]})
                        if session.is_over:
                            return ProgramResult(0, "", "")
                    if not said.get("tool_calls"):
                        reply = await asyncio.to_thread(session.reply, [_turn(turn) for turn in turns])
                        if reply is None:
                            return ProgramResult(0, "", "")
                        turns.append({"role": "user", "content": reply})


class LocalConfig(vf.SingleAgentEnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    """Here: the loop runs no program, and verifiers' default is a rented machine."""


class LocalEnv(vf.SingleAgentEnv, vf.Env[LocalConfig]):
    """One agent over a problem."""


@lru_cache
def opened(kind: str, args: str) -> TaskSource:
    """The source, opened once a process. Raises `UserError`."""
    told = SourceConfig(kind=kind, args=json.loads(args))
    return SourceTables({"vf": told}, SandboxConfig())()["vf"]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Of a call as OpenAI writes it."""
    function = call["function"]
    return {"name": function["name"], "arguments": arguments_of(function["arguments"])}


def _wire(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn as the endpoint takes it."""
    return {
        name: turn[name]
        for name in ("role", "content", "tool_calls", "tool_call_id", "name")
        if turn.get(name) is not None
    }


def _turn(message: Any) -> dict[str, Any]:
    """A turn as our sources read it, from the endpoint's form or that of a trace."""
    told = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    turn = {name: told[name] for name in ("role", "content", "name") if name in told}
    turn["content"] = turn.get("content") or ""
    calls: Sequence[Any] = told.get("tool_calls") or ()
    if calls:
        turn["tool_calls"] = [{"function": _call(call if "function" in call else {"function": call})} for call in calls]
    return turn
