"""One sample from its prompt to its end: what comes next is a pure function of its token log, so a resumed sample is
an ordinary one.

Tokens in, tokens out: each request is everything so far, to the token, and what comes back is appended. Text is read
to find tool calls and to be judged, never to be tokenised again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome, Segment, Task, Trajectory, Verdict
from stretto.rl.asking import (
    Generated,
    GenerateRequest,
    Patience,
    RewardClient,
    RewardRequest,
    Trouble,
    Troubles,
    patiently,
)
from stretto.rl.dialogue import Dialogue, ToolCall
from stretto.rl.logframes import Part, context
from stretto.rl.threads import Threads
from stretto.rl.tokenlog import Closing, TokenLog
from stretto.sandbox.outcome import ToolResult
from stretto.tasks.task import Problem, Tool


@dataclass(frozen=True, slots=True)
class Limits:
    """How samples are drawn; from the recipe."""

    chunk_tokens: int
    """Asked of an engine at once."""
    temperature: float
    max_turns: int
    max_len: int
    """Tokens of a whole sample, prompt and tools included."""
    want_routes: bool
    call_s: float
    """Deadline of one request to an engine."""
    tool_s: float
    """Deadline of one call of a tool; tools have limits of their own, so this is for those that hang."""
    verify_attempts: int
    """Times that a verifier without a verdict is asked."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Next: the model writes."""

    max_tokens: int


@dataclass(frozen=True, slots=True)
class UseTools:
    """Next: tools answer."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Next: nothing but the verdict."""

    reason: str


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one sample of a group: 63 bits that no two samples share but by accident."""
    return int.from_bytes(blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest(), "little") >> 1


def room(log: TokenLog, task: Task, limits: Limits) -> int:
    """Tokens that the model may still write: one budget over all turns, and the length of the whole."""
    return min(task.max_tokens - log.num_sampled, limits.max_len - log.num_tokens)


def check_room(task: Task, num_tokens: int, max_len: int) -> None:
    """
    Raises:
        UserError: a prompt of ``num_tokens`` leaves none for the answer.
    """
    if num_tokens >= max_len:
        raise UserError(
            f"sources.{task.source}: item {task.item}: its prompt of {num_tokens} tokens leaves no room to answer in "
            f"train.seq_len {max_len}; raise that or choose shorter problems"
        )


def next_move(
    log: TokenLog, task: Task, limits: Limits, dialogue: Dialogue, has_tools: bool
) -> Generate | UseTools | Finish:
    """What a sample that has its prompt does next."""
    last, left = log.last, room(log, task, limits)
    assert last is not None, f"ordinal {task.ordinal}: no prompt"
    if last.segment.is_sampled and last.ended == "length":
        return Finish("length")
    if last.ended != "stop":
        return Generate(min(limits.chunk_tokens, left)) if left > 0 else Finish("length")
    calls = dialogue.calls(log.turn()) if has_tools else ()
    if not calls:
        return Finish("stop")
    if log.num_turns >= limits.max_turns:
        return Finish("turns")
    return UseTools(calls) if left > 0 else Finish("length")


class SampleLoop:
    """Writes one sample. Owned by the agent; ``waits_for`` and ``since_s`` are read by the watchdog."""

    def __init__(
        self,
        log: TokenLog,
        task: Task,
        sample: int,
        attempt: int,
        *,
        problem: Problem,
        prompt: np.ndarray,
        tools: Sequence[Tool],
        dialogue: Dialogue,
        limits: Limits,
        generate: Callable[[GenerateRequest], Awaitable[Generated]],
        rewards: RewardClient,
        patience: Patience,
        troubles: Troubles,
        threads: Threads,
        tool_slots: asyncio.Semaphore,
    ):
        self.log, self.task, self.sample, self.attempt = log, task, sample, attempt
        self._problem, self._prompt, self._dialogue, self._limits = problem, prompt, dialogue, limits
        self._tools = {tool.name: tool for tool in tools}
        self._offers = [tool.schema() for tool in tools]
        self._generate, self._rewards = generate, rewards
        self._patience, self._troubles = patience, troubles
        self._threads, self._tool_slots = threads, tool_slots
        self.waits_for = "its problem"
        self.since_s = time.time()
        self.sandbox_s = 0.0
        """Processor seconds of its tools."""

    async def run(self) -> Trajectory:
        """The sample, closed.

        Raises:
            Trouble: an engine, a tool or the verifier kept failing; the log goes on from here at the next attempt.
            UserError: the prompt leaves no room to write, or what a patient caller cannot mend either.
        """
        if self.log.last is None:
            self._begin()
        while self.log.closing is None:
            match next_move(self.log, self.task, self._limits, self._dialogue, bool(self._tools)):
                case Generate(max_tokens):
                    await self._write(max_tokens)
                case UseTools(calls):
                    await self._use(calls)
                case Finish(reason):
                    await self._finish(reason)
        return self.log.trajectory(self.task, self.sample, self.attempt)

    def _begin(self) -> None:
        now_s = time.time()
        check_room(self.task, len(self._prompt), self._limits.max_len)
        self.log.append(Part(context(self._prompt, now_s, now_s)))

    async def _write(self, max_tokens: int) -> None:
        """One chunk of an engine."""
        self._wait_for("an engine")

        async def ask() -> None:
            log, limits = self.log, self._limits
            request = GenerateRequest(
                id=f"{self.task.ordinal}.{self.sample}.{self.attempt}",
                tokens=log.tokens(),
                max_tokens=max_tokens,
                temperature=limits.temperature,
                seed=sample_seed(self.task.seed, self.sample),
                stop_ids=self._dialogue.stop_ids,
                want_routes=limits.want_routes,
                routes_from=log.num_rows,
                deadline_s=limits.call_s,
            )
            done = await self._generate(request)
            num = len(done.tokens)
            if not 0 < num <= max_tokens:
                raise Trouble(f"{num} tokens were returned, 1 to {max_tokens} asked for")
            if limits.want_routes and done.routes is None:
                raise Trouble("no routes were returned")
            # an engine that stops short of what was asked has come to the end of its positions
            is_over = num < max_tokens or num == room(log, self.task, limits)
            ended = "stop" if done.finish_reason == "stop" else "length" if is_over else ""
            segment = Segment(done.tokens, True, done.logprobs, done.versions, done.started_s, done.finished_s)
            log.append(Part(segment, done.routes if limits.want_routes else None, ended))  # type: ignore[arg-type]

        await patiently("engine", ask, self._patience, self._troubles)

    async def _use(self, calls: Sequence[ToolCall]) -> None:
        """The turn of the tools that the model called."""
        started_s = time.time()
        results = [await self._call(call) for call in calls]
        tokens = self._dialogue.tool_turn(
            self._problem.messages, self._offers, calls, [result.text for result in results]
        )
        if self.log.num_tokens + len(tokens) >= self._limits.max_len:
            await self._finish("length")  # no room for the model to go on from it
            return
        told = [
            {"role": "tool", "name": call.name, "content": result.text, "outcome": result.outcome.value}
            for call, result in zip(calls, results, strict=True)
        ]
        self.log.append(Part(context(tokens, started_s, time.time()), messages=tuple(told)))

    async def _call(self, call: ToolCall) -> ToolResult:
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(
                f"error: there is no tool {call.name!r}; there are {', '.join(self._tools)}", Outcome.WRONG, 0.0
            )
        arguments = call.arguments
        if arguments is None:
            return ToolResult("error: the arguments are not a JSON object", Outcome.WRONG, 0.0)
        what = f"tool {tool.name}"

        async def ask() -> ToolResult:
            async with self._tool_slots:
                self._wait_for(what)
                result = await self._threads.run(lambda: _called(tool, arguments), self._limits.tool_s, what)
            self.sandbox_s += result.sandbox_s
            if result.outcome is Outcome.INFRA:
                raise Trouble(result.text)
            return result

        return await patiently(what, ask, self._patience, self._troubles)

    async def _finish(self, reason: str) -> None:
        """Have it verified and close it."""
        self._wait_for("a verdict")
        log, dialogue = self.log, self._dialogue
        told = [part.messages for part in log.parts if part.messages]
        messages: list[Mapping[str, Any]] = []
        for number, turn in enumerate(log.turns()):
            messages += [dialogue.message(turn), *(told[number] if number < len(told) else ())]
        seed = sample_seed(self.task.seed, self.sample)
        request = RewardRequest(self.task.source, self.task.item, dialogue.text(log.turn()), tuple(messages), seed)

        async def ask() -> Verdict:
            verdict = await self._rewards.score(request)
            if verdict.outcome is Outcome.INFRA:
                raise Trouble(verdict.detail)
            return verdict

        patience = Patience(self._limits.verify_attempts, self._patience.first_s, self._patience.most_s)
        verdict = await patiently("verifier", ask, patience, self._troubles)
        self.log.close(Closing(reason, replace(verdict, latency_s=time.time() - self.since_s)))
        self._wait_for("its group")

    def _wait_for(self, what: str) -> None:
        self.waits_for, self.since_s = what, time.time()


def _called(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
    try:
        return tool.call(arguments)
    except Exception as error:  # whatever a tool raises is no answer to the model
        raise Trouble(f"{tool.name} raised {type(error).__name__}: {error}") from error
