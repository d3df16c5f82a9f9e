"""Task sets of the `verifiers` package (v1) that need no container: an optional extra.

In `verifiers`, a `Taskset` yields `Task`s: frozen data with a prompt, and reward methods that judge a `Trace`, the graph of the messages.
This adapter builds the trace of one conversation and runs the task's own metrics and rewards on it. `verifiers` serves the tools of a task
from another process; here they are methods of objects in the sample's session and share its state with the rewards.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import Field, ValidationError

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.outcome import ToolResult
from stretto.tasks.session import SessionSource
from stretto.tasks.task import Answer, Problem, Score, Session, Tool


class VerifiersArgs(Config):
    """Arguments of kind ``verifiers``."""

    id: str
    """Id of an installed task set: the module that exports it."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task set."""
    gold_field: str = "answer"
    """Field of the task's data with the correct answer."""
    gold_template: str = "{}"
    """Correct answer as the model should write it; ``{}`` stands for the field."""
    right_at: float = 1.0
    """Smallest sum of weighted rewards of a correct answer."""
    limit: int = Field(default=10_000, gt=0)
    """Largest number of tasks, which are read at the start."""


class VerifiersSource(SessionSource):
    """Problems with the prompt, system prompt, tools and rewards of the task set."""

    args_kind = VerifiersArgs
    args: VerifiersArgs

    def __init__(self, name: str, args: VerifiersArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        try:
            import verifiers.v1 as vf  # optional
        except ImportError as error:
            raise UserError(f"sources.{name}: kind: verifiers: {error}; pip install 'stretto[verifiers]'") from None
        self._vf = vf
        self._tasks = _load(vf, name, args)
        self.num_items = len(self._tasks)
        self._loop = _Loop()

    def problem(self, item: int) -> Problem:
        data = self._tasks[item].data
        messages = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        if isinstance(data.prompt, str):
            messages.append({"role": "user", "content": data.prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in data.prompt or ()]
        if any(not isinstance(message.get("content"), str) for message in messages):
            raise self._refused(item, "its prompt is not text alone", "leave it out")
        answer = getattr(data, self.args.gold_field, None)
        if not isinstance(answer, (str, int, float)):
            raise self._refused(item, f"its data has no answer in {self.args.gold_field!r}", "set gold_field")
        return Problem(item, tuple(messages), self.args.gold_template.replace("{}", str(answer)))

    def open(self, problem: Problem, seed: int | None = None) -> Session:
        return _VerifiersSession(self._vf, self.args, self._tasks[problem.item], problem, self._loop)

    def close(self) -> None:
        self._loop.close()

    def _refused(self, item: int, problem: str, remedy: str) -> UserError:
        return UserError(f"sources.{self.name}: item {item} of {self.args.id}: {problem}; {remedy}")


class _Loop:
    """An event loop that several threads share, one at a time. The resources of a tool server belong to one loop, and a loop for each of
    a thousand sessions would need three open files each."""

    def __init__(self) -> None:
        self._loop, self._lock = asyncio.new_event_loop(), threading.Lock()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        with self._lock:
            return self._loop.run_until_complete(work)

    def close(self) -> None:
        self._loop.close()


class _VerifiersSession(Session):
    def __init__(self, vf: Any, args: VerifiersArgs, task: Any, problem: Problem, loop: _Loop) -> None:
        self._vf, self._args, self._task, self._problem, self._loop = vf, args, task, problem, loop
        kind = type(task)
        self._state = vf.state.state_cls(kind)()
        self.tools = ()
        for toolset in kind.toolsets(task.config):
            if isinstance(self._state, toolset._state_cls):
                toolset._inert_state = self._state  # ``self.state`` of a tool server that is not served
            loop.run(toolset.setup())
            loop.run(toolset.setup_task(task.data))
            self.tools += tuple(map(partial(self._tool, toolset.server_name), _marked(toolset)))

    def _tool(self, server: str, function: Callable[..., Any]) -> Tool:
        from mcp.server.mcpserver.tools.base import Tool as Served  # comes with verifiers

        name = getattr(function, "tool_name", None) or function.__name__
        served = Served.from_function(function, f"{server}_{name}" if server else name)

        def call(arguments: Mapping[str, Any]) -> ToolResult:
            try:
                result = self._loop.run(served.run(dict(arguments), None))
                return ToolResult(result if isinstance(result, str) else json.dumps(result, default=str), Outcome.OK)
            except Exception as error:  # as in verifiers, the model sees the error
                return ToolResult(f"error: {error}", Outcome.WRONG)

        return Tool(served.name, (served.description or "").strip(), served.parameters, call)

    def digest(self) -> str:
        return hashlib.sha256(self._state.model_dump_json().encode()).hexdigest() if self.tools else ""

    def score(self, answer: Answer) -> Score:
        args, trace = self._args, self._trace(answer)
        self._loop.run(self._task.score(trace))
        if unscored := [name for name, reward in trace.rewards.items() if reward is None]:
            raise RuntimeError(f"reward {unscored[0]!r} of {args.id} returned nothing")
        parts = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        parts |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        right = trace.reward >= args.right_at
        return Score(trace.reward, Outcome.OK if right else Outcome.WRONG, parts)

    def _trace(self, answer: Answer) -> Any:
        """The conversation as a linear graph in which the model's turns are marked as sampled."""
        vf, task, prompt = self._vf, self._task, self._problem.messages
        turns = answer.messages or ({"role": "assistant", "content": answer.text},)
        nodes = [
            vf.MessageNode(
                parent=index - 1 if index else None,
                message=message,
                sampled=index >= len(prompt) and message["role"] == "assistant",
            )
            for index, message in enumerate(_numbered([*prompt, *turns]))
        ]
        data = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig())
        ended = {"is_completed": True, "ok": True, "stop_condition": "agent_completed"}
        return vf.Trace(task=data, agent=agent, nodes=nodes, state=self._state, **ended)


def _marked(toolset: Any) -> list[Callable[..., Any]]:
    """Methods of a tool server that the model may call."""
    found = (getattr(toolset, name) for name in dir(type(toolset)) if not name.startswith("_"))
    return [each for each in found if callable(each) and getattr(each, "tool", False)]


def _numbered(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` in the form of the package's message types: calls have ids, which results repeat, and arguments as JSON text."""
    numbered, open_ids = list[dict[str, Any]](), list[str]()
    for number, message in enumerate(messages):
        turn: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
        if calls := message.get("tool_calls"):
            open_ids = [f"{number}.{place}" for place in range(len(calls))]
            functions = [call["function"] for call in calls]
            turn["tool_calls"] = [
                {"id": name, "name": each["name"], "arguments": json.dumps(each["arguments"])}
                for name, each in zip(open_ids, functions, strict=True)
            ]
        elif message["role"] == "tool":
            turn["tool_call_id"] = open_ids.pop(0) if open_ids else "0"
        numbered.append(turn)
    return numbered


def _load(vf: Any, name: str, args: VerifiersArgs) -> list[Any]:
    where = f"sources.{name}.args"
    try:
        config = vf.taskset_config_type(args.id)(id=args.id, **args.config)
        taskset = vf.load_taskset(config)
        environment = vf.environment_class(args.id)
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(
            f"{where}: id: {args.id!r} is not an installed task set: {error}; install its package"
        ) from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))
        raise UserError(f"{where}: config.{field}: {problem['msg']}; see {args.id}'s own fields") from None
    if environment is not vf.SingleAgentEnv:
        raise UserError(f"{where}: id: {args.id!r} has its own environment; only single agents are supported")
    tasks = list(itertools.islice(taskset, args.limit))
    if tasks and (need := _needs(vf, tasks[0])):  # a task set has one class of tasks
        raise UserError(f"{where}: id: {args.id!r} needs {need}, which is not supported; choose another")
    return tasks


def _needs(vf: Any, task: Any) -> str:
    """A requirement of the task that this adapter does not support; empty: none."""
    kind = type(task)
    if kind.NEEDS_CONTAINER:
        return "a container"
    for toolset in kind.toolsets(task.config):
        if toolset.config.url or getattr(toolset.config, "colocated", False):
            return f"the tool server {type(toolset).__name__} in another process"
    if kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize:
        return "a runtime in setup() or finalize()"
    for hook in (*task.hooks("reward"), *task.hooks("metric")):
        runtime = inspect.signature(hook).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"a runtime in {hook.__name__}()"
    return ""
