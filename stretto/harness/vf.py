"""Stretto's task sources as a task set of `verifiers` (v1), for its `vf-eval`, training and dashboards.

    vf-eval stretto_vf --env.taskset.kind service -m NAME --client.base-url http://127.0.0.1:8000/v1

The agent loop is Stretto's. It runs in the process of the rollout and sends its requests to the endpoint of verifiers, whose trace, budgets
and log so contain every turn. Tools and simulated users are those of the problem's session. The reward repeats the calls of the trace, as
everywhere in Stretto.
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
from stretto.flow.prompts import SourceTables
from stretto.learning.recipe import SourceConfig
from stretto.learning.roles import SandboxConfig
from stretto.tasks.session import arguments_of, tool_turn
from stretto.tasks.task import FIRST_REPORTED, Answer, TaskSource

__all__ = ["LocalEnv", "SessionLoop", "SourceTaskset"]


class SourceData(vf.TaskData):
    """A problem, by its source and number. Its messages are the prompt."""

    kind: str
    args: dict[str, Any]
    item: int


class SourceTask(vf.Task[SourceData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def verdict(self, trace: Any) -> float:
        """The source's reward. Raises RuntimeError for an infrastructure error, which is not a reward of 0."""
        data = self.data
        source = opened(data.kind, json.dumps(data.args))
        problem = source.problem(data.item)
        turns = [_turn(message) for message in trace.messages[len(problem.messages) :]]
        text = str(turns[-1].get("content") or "") if turns else ""
        # The result of a call that ends the episode is never sent, so the trace lacks it.
        calls = [call for turn in turns[-1:] for call in turn.get("tool_calls") or ()]
        turns += [{"role": "tool", "name": call["function"]["name"]} for call in calls]
        score = await asyncio.to_thread(source.score, problem, Answer(text, tuple(turns)))
        if score.outcome is Outcome.INFRA:
            raise RuntimeError(f"{data.kind}: item {data.item} could not be judged: {score.detail}")
        return score.reward


class SourceTasksetConfig(vf.TasksetConfig):
    kind: str = "gym"
    """Kind of source, as in a recipe (docs/RL.md)."""
    args: dict[str, Any] = Field(default_factory=dict)
    first: int | None = None
    """Number of the first item; None: 0, or for an endless source the first number that no run trains on."""


class SourceTaskset(vf.Taskset[SourceTask, SourceTasksetConfig]):
    INFINITE = True
    """Stands for finite sources, too: they then yield all their items."""

    def load(self) -> Any:
        kind, args = self.config.kind, self.config.args
        source = opened(kind, json.dumps(args))
        num = source.num_items
        first = self.config.first if self.config.first is not None else 0 if num is not None else FIRST_REPORTED
        for item in count(first) if num is None else islice(count(first), max(0, num - first)):
            messages = [dict(message) for message in source.problem(item).messages]
            yield SourceTask(SourceData(kind=kind, args=args, item=item, prompt=messages), self.config.task)


class SessionLoop(vf.Harness[vf.HarnessConfig]):
    """The agent loop: turns of the model, its tools and the problem's user, until one of them or a budget ends the episode."""

    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> ProgramResult:
        source = opened(data.kind, json.dumps(data.args))
        problem, turns = source.problem(data.item), list[dict[str, Any]]()
        headers = {"Authorization": f"Bearer {secret}"}
        with closing(source.open(problem)) as session:
            offered = {"tools": [tool.schema() for tool in session.tools]} if session.tools else {}
            # no timeout: the budgets of verifiers end the episode
            async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=False) as http:
                while True:
                    body = {"model": ctx.model, "messages": [*problem.messages, *map(_wire, turns)], **offered}
                    answer = await http.post(f"{endpoint}/chat/completions", json=body)
                    if answer.is_error:  # also of a used-up budget, which the trace of verifiers reports
                        return ProgramResult(1, "", f"{answer.status_code}: {excerpt(answer)}")
                    turns.append(turn := answer.json()["choices"][0]["message"])
                    for call in turn.get("tool_calls") or ():
                        done = await asyncio.to_thread(tool_turn, session, _call(call))
                        turns.append({**done, "tool_call_id": call["id"]})
                        if session.is_over:
                            return ProgramResult(0, "", "")
                    if not turn.get("tool_calls"):
                        reply = await asyncio.to_thread(session.reply, list(map(_turn, turns)))
                        if reply is None:
                            return ProgramResult(0, "", "")
                        turns.append({"role": "user", "content": reply})


class LocalConfig(vf.SingleAgentEnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    """A local subprocess, because the loop runs no program. The default of verifiers is a rented machine."""


class LocalEnv(vf.SingleAgentEnv, vf.Env[LocalConfig]):
    """Environment of one agent that solves one problem."""


@lru_cache
def opened(kind: str, args: str) -> TaskSource:
    """The source, opened once per process. Raises `UserError`."""
    return SourceTables({"vf": SourceConfig(kind=kind, args=json.loads(args))}, SandboxConfig())()["vf"]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Name and arguments of a call in OpenAI's form."""
    function = call["function"]
    return {"name": function["name"], "arguments": arguments_of(function["arguments"])}


def _wire(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn in the endpoint's form."""
    names = ("role", "content", "tool_calls", "tool_call_id", "name")
    return {name: turn[name] for name in names if turn.get(name) is not None}


def _turn(message: Any) -> dict[str, Any]:
    """A turn as task sources read it, from the form of the endpoint or of a trace."""
    fields = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    turn = {name: fields[name] for name in ("role", "name") if name in fields} | {
        "content": fields.get("content") or ""
    }
    calls: Sequence[Any] = fields.get("tool_calls") or ()
    if calls:
        turn["tool_calls"] = [{"function": _call(call if "function" in call else {"function": call})} for call in calls]
    return turn
