"""Task sets of the `verifiers` package (its v1 stack), single-turn ones that need no container: an optional extra.

There a `Taskset` yields `Task`s: frozen data with a prompt, and methods marked as rewards that judge a `Trace`, the
graph of the messages. This builds the trace of one conversation and runs the task's own metrics and rewards on it.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from typing import Any

from pydantic import Field, ValidationError

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.task import Answer, Problem, Score, TaskSource


class VerifiersArgs(Config):
    """Of kind ``verifiers``."""

    id: str
    """Of an installed task set: the module that exports it."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Of that task set."""
    gold_field: str = "answer"
    """Of the task's data: its right answer."""
    gold_template: str = "{}"
    """What a right answer looks like as the model writes it, ``{}`` being the field."""
    right_at: float = 1.0
    """An answer is right where the sum of weighted rewards is at least this."""
    limit: int = Field(default=10_000, gt=0)
    """Tasks read at the start, at most."""


class VerifiersSource(TaskSource):
    """Prompt, system prompt and rewards are the task's own."""

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

    @property
    def num_items(self) -> int:
        return len(self._tasks)

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

    def score(self, problem: Problem, answer: Answer) -> Score:
        task = self._tasks[problem.item]
        trace = self._trace(task, problem, answer)
        asyncio.run(task.score(trace))
        if unscored := [name for name, reward in trace.rewards.items() if reward is None]:
            raise RuntimeError(f"reward {unscored[0]!r} of {self.args.id} gave nothing")
        parts = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        parts |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        right = trace.reward >= self.args.right_at
        return Score(trace.reward, Outcome.OK if right else Outcome.WRONG, parts)

    def _trace(self, task: Any, problem: Problem, answer: Answer) -> Any:
        """The conversation as one path of nodes, the model's turns marked as sampled."""
        vf = self._vf
        turns = answer.messages or ({"role": "assistant", "content": answer.text},)
        nodes = [
            vf.MessageNode(
                parent=index - 1 if index else None,
                # As its message types want it: tool calls look different there, and there are none without tools.
                message={"role": message["role"], "content": message["content"]},
                sampled=index >= len(problem.messages) and message["role"] == "assistant",
            )
            for index, message in enumerate((*problem.messages, *turns))
        ]
        data = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig())
        ended = {"is_completed": True, "ok": True, "stop_condition": "agent_completed"}
        return vf.Trace(task=data, agent=agent, nodes=nodes, **ended)

    def _refused(self, item: int, problem: str, remedy: str) -> UserError:
        return UserError(f"sources.{self.name}: item {item} of {self.args.id}: {problem}; {remedy}")


def _load(vf: Any, name: str, args: VerifiersArgs) -> list[Any]:
    where = f"sources.{name}.args"
    try:
        config = vf.taskset_config_type(args.id)(id=args.id, **args.config)
        taskset = vf.load_taskset(config)
        environment = vf.environment_class(args.id)
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(f"{where}: id: {args.id!r} is no installed task set: {error}; install its package") from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))
        raise UserError(f"{where}: config.{field}: {problem['msg']}; see {args.id}'s own fields") from None
    if environment is not vf.SingleAgentEnv:
        raise UserError(f"{where}: id: {args.id!r} has an environment of its own; only single agents are supported")
    tasks = list(itertools.islice(taskset, args.limit))
    if tasks and (need := _needs(vf, tasks[0])):  # a task set has one class of tasks
        raise UserError(f"{where}: id: {args.id!r} needs {need}, which this adapter does not give; choose another")
    return tasks


def _needs(vf: Any, task: Any) -> str:
    """What a task needs beside a conversation; empty: nothing."""
    kind = type(task)
    if kind.NEEDS_CONTAINER:
        return "a container"
    if kind.toolsets.__func__ is not vf.Task.toolsets.__func__ and kind.toolsets(task.config):
        return "tool servers"
    if kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize:
        return "a runtime in setup() or finalize()"
    for hook in (*task.hooks("reward"), *task.hooks("metric")):
        runtime = inspect.signature(hook).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"a runtime in {hook.__name__}()"
    return ""
