"""A tiny engine, a tokenizer with a chat template, toy problems, and an agent that uses them."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.config import Config
from stretto.base.trajectory import Group, Outcome, Segment, Task, Trajectory, Verdict
from stretto.flow.agent import AgentRole
from stretto.flow.clients import Clients, Generated, GenerateRequest, RewardRequest
from stretto.flow.rollout import EngineRole
from stretto.learning.dialogue import Dialogue
from stretto.learning.recipe import RlRecipe
from stretto.learning.samples import log_name
from stretto.runtime.store import FolderStore
from stretto.sandbox.outcome import ToolResult
from stretto.tasks.task import Answer, Problem, Score, TaskSource, Tool
from stretto.text.chat import CHATML
from stretto.text.tokenizer import Tokenizer, train_tokenizer
from tests.engine.engines import CONFIG, check_idle, engine, network

MODEL = network()
OTHER = network(seed=1)
TASK = Task(ordinal=3, source="toy", item=7, group=3, seed=11, max_tokens=24)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3, "why": "the cat sat"}}</tool_call>'
ONE = replace(TASK, group=1, max_tokens=400)
LONG: dict[str, Any] = {"max_len": 900, "chunk_tokens": 10}


@functools.cache
def tokenizer(template: str | None = CHATML) -> Tokenizer:
    made = train_tokenizer(iter(["the cat sat on the mat and the dog sat on the log " * 20]), 288, template)
    assert made.vocab_size <= CONFIG.vocab_size
    return made


class Toy(TaskSource):
    """Any answer is as good as its length says."""

    def __init__(self, tools: tuple[Tool, ...] = ()):
        super().__init__("toy", Config())
        self._tools = tools

    def problem(self, item: int) -> Problem:
        return Problem(item, ({"role": "user", "content": f"the cat {item}"},), "dog", {})

    def score(self, problem: Problem, answer: Answer) -> Score:
        return Score(float(len(answer.text)), Outcome.OK)

    def tools(self) -> tuple[Tool, ...]:
        return self._tools


class Guessing(Toy):
    """An environment that says how often it was spoken to, until it hears 7."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def reply(self, problem: Problem, messages: Sequence[Mapping[str, Any]]) -> str | None:
        self.heard.append(messages[-1]["content"])
        turns = [message["content"] for message in messages if message["role"] == "assistant"]
        return None if turns[-1] == "7" else f"no, {len(turns)}"


class Rewards:
    """A verifier in this loop."""

    def __init__(self, score: Callable[[RewardRequest], Verdict] | None = None):
        self.requests: list[RewardRequest] = []
        self._score = score or (lambda request: Verdict(float(len(request.text)), Outcome.OK, 0.0))

    async def score(self, request: RewardRequest) -> Verdict:
        self.requests.append(request)
        return self._score(request)


class Spoken:
    """An engine that writes given turns, each ended by the template's end of turn, chunk by chunk as it is asked.

    Its routes tell position and call, so that a row in the wrong place is seen.
    """

    name = "spoken"

    def __init__(self, turns: Sequence[np.ndarray]):
        self._turns = list(turns)
        self._left = np.zeros(0, np.int32)
        self.requests: list[GenerateRequest] = []
        self.ends: list[int] = []
        """Tokens of the sample after each request."""

    async def generate(self, request: GenerateRequest) -> Generated:
        if not len(self._left):
            self._left = self._turns.pop(0)
        self.requests.append(request)
        tokens, self._left = np.split(self._left, [min(request.max_tokens, len(self._left))])
        self.ends.append(request.num_kept + len(request.tokens) + len(tokens))
        rows = [[[place, len(self.requests)]] for place in range(request.routes_from, self.ends[-1] - 1)]
        routes = np.array(rows, np.uint16).reshape(-1, 1, 2)
        num = len(tokens)
        reason = "stop" if tokens[-1] in request.stop_ids else "length"
        versions = np.full(num, len(self.requests), np.int32)
        logprobs = np.full(num, -1.0, np.float32)
        segment = Segment(tokens.astype(np.int32), True, logprobs, versions)
        return Generated(segment, routes, reason, 0, 0, 0, 0.0)


def role(
    model: Any = None, *, name: str = "engine", waits: bool = False, keep_cache: bool = False, **options: Any
) -> EngineRole:
    opened = functools.partial(engine, model or MODEL, **options)
    return EngineRole(opened, lambda version: OTHER.state_dict(), name=name, waits=waits, keep_cache=keep_cache)


def recipe(
    lease_s: float = 60.0,
    chunk_tokens: int = 100,
    max_turns: int = 3,
    max_len: int = 150,
    distill: Any = None,
    deadline_s: float = 60.0,
) -> RlRecipe:
    return RlRecipe.model_validate(
        {
            "distill": distill,
            "sources": {"toy": {"kind": "strings"}},
            "rollout": {"max_tokens": 1, "chunk_tokens": chunk_tokens, "max_turns": max_turns},
            "optim": {"lr": 1e-3},
            "train": {"steps": 1, "prompts": 1, "seq_len": max_len},
            "failures": {"lease_s": lease_s, "max_attempts": 3},
            "runtime": {"rewards": {"deadline_s": deadline_s}},
        }
    )


def agent(
    folder: Path,
    engines: Sequence[Any],
    rewards: Any = None,
    source: TaskSource | None = None,
    template: str | None = CHATML,
    **settings: Any,
) -> AgentRole:
    return AgentRole(
        recipe(**settings),
        FolderStore(folder),
        tokenizer(template),
        lambda: {"toy": source or Toy()},
        lambda caller: Clients(engines, rewards or Rewards()),
        pauses_s=(0.001, 0.01),
    )


def with_engines(work: Callable[..., Awaitable[Any]], *roles: EngineRole) -> Any:
    """Run ``work`` with the roles, and see that nothing is left in their engines."""

    async def run() -> Any:
        try:
            result = await asyncio.wait_for(work(*roles), 120)
            for each in roles:
                await settled(each)
            return result
        finally:
            for each in roles:
                each.close()

    return asyncio.run(run())


async def begun(subject: EngineRole) -> None:
    """Wait until a request is computed."""
    while not (await subject.stats()).num_running:
        await asyncio.sleep(0)


async def settled(subject: EngineRole) -> None:
    """The engine has nothing to do and holds nothing."""
    call = subject.service.call
    while await call(lambda engine: engine.has_work):
        await asyncio.sleep(0.001)
    await call(check_idle)


def draw(folder: Path, task: Task = TASK, model: Any = None, attempt: int = 0, **options: Any) -> Group:
    """A group by a fresh engine and agent."""
    sizes = options.pop("engine", {})

    async def work(subject: EngineRole) -> Group:
        return await agent(folder, [subject], **options)._within_lease(task, attempt)

    return with_engines(work, role(model, **sizes))


def tokens_of(trajectory: Trajectory) -> list[int]:
    return [token for segment in trajectory.segments for token in segment.tokens.tolist()]


def stream(trajectory: Trajectory, name: str) -> np.ndarray:
    return np.concatenate([getattr(segment, name) for segment in trajectory.segments])


def assert_same(left: Trajectory, right: Trajectory) -> None:
    """The same tokens by the same weights; log-probabilities as near as another order of the same sums leaves them."""
    assert tokens_of(left) == tokens_of(right)
    assert [len(segment.tokens) for segment in left.segments] == [len(segment.tokens) for segment in right.segments]
    np.testing.assert_array_equal(stream(left, "versions"), stream(right, "versions"))
    # logits of about 10 by fp32 sums of 32 terms, through 5 layers: 10 · 2^-24 · 32 · 5
    np.testing.assert_allclose(stream(left, "logprobs"), stream(right, "logprobs"), rtol=0, atol=1e-4)
    assert left.routes is not None and right.routes is not None
    np.testing.assert_array_equal(left.routes, right.routes)
    assert (left.finish_reason, left.num_turns, left.verdict.reward) == (
        right.finish_reason,
        right.num_turns,
        right.verdict.reward,
    )


def calculator(calls: list[Mapping[str, Any]] | None = None, results: Sequence[ToolResult] = ()) -> Tool:
    """A tool that answers as it is told, or adds."""
    told = iter(results)
    seen = calls if calls is not None else []

    def call(arguments: Mapping[str, Any]) -> ToolResult:
        seen.append(arguments)
        given = next(told, None)
        return given or ToolResult(str(arguments["a"] + arguments["b"]), Outcome.OK, 0.0)

    return Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}}, call)


def spoken_turn(text: str) -> np.ndarray:
    """What a model writes in a turn: characters one by one, as no tokenizer would merge them, and the turn's end."""
    made = tokenizer()
    single = [made.encode(character) for character in text]
    end = Dialogue(made).stop_ids[-1]
    return np.array([*itertools.chain.from_iterable(single), end], np.int32)


def log_of(folder: Path, task: Task = TASK, attempt: int = 0) -> Path:
    """Where a run in ``folder`` logs a group."""
    return folder / log_name(task.ordinal, attempt)


class Watched:
    """A client that looks at, changes or refuses what passes to an engine."""

    def __init__(self, inner: Any, before: Any = None):
        self.name = inner.name
        self.inner = inner
        self.before = before
        self.num = 0

    async def generate(self, request: GenerateRequest) -> Generated:
        self.num += 1
        if self.before is not None:
            await self.before(self.num, request)
        return await self.inner.generate(request)


def run_spoken(
    folder: Path, turns: list[str], source: Toy, rewards: Any = None, **limits: Any
) -> tuple[Trajectory, Spoken]:
    engine = Spoken([spoken_turn(turn) for turn in turns])
    subject = agent(folder, [engine], rewards, source, **{**LONG, **limits})
    group = asyncio.run(subject._within_lease(ONE, 0))
    return group.trajectories[0], engine
