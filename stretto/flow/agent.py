"""Agent role: samples groups through turns with engines, tools and verifiers, many groups at once.

An agent mostly waits, so one loop carries any number of samples. Everything a sample has produced is in its log, and the
next action depends on the log alone. An agent may therefore be killed at any point, and another one resumes its groups.

Requests and results are tokens: each request continues all earlier tokens exactly, and only tokens that the engine does
not have yet are sent. Text is read to find tool calls and to be verified, and is never tokenised again. Imports no torch.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from stretto.base.errors import InfraError, UserError
from stretto.base.trajectory import Group, GroupRef, Outcome, Task, Verdict
from stretto.flow.clients import (
    CallsInFlight,
    Clients,
    Forgotten,
    GenerateRequest,
    RewardRequest,
    Threads,
    Unavailable,
    within,
)
from stretto.flow.group_reward import Written, group_rewards
from stretto.flow.own_session import History, OwnSession
from stretto.learning.dialogue import Dialogue, ToolCall, Trees, teacher_dialogues
from stretto.learning.recipe import RlRecipe
from stretto.learning.samples import Ended, Part, Sample, context, open_samples, remove_logs, store_group
from stretto.runtime.runtime import Caller
from stretto.runtime.store import Store
from stretto.sandbox.tools import shorten
from stretto.tasks.session import MOST_TEXT, Diverged, schemas, tool_turn
from stretto.tasks.task import Problem, TaskSource, close_sources
from stretto.text.tokenizer import Tokenizer

T = TypeVar("T")

TOOL_SLOTS = 16
"""Largest number of tools that one agent runs at once, which bounds the number of processes that many samples start."""
_REPLY_SLOTS = 64
"""Largest number of environment replies at once. Higher than `TOOL_SLOTS`, because many environments call a remote model."""
_PROBLEM_S = 60.0
"""Deadline for a source to return a problem."""
_MAX_VERIFICATIONS = 3
"""Largest number of attempts at one verification."""
_OVERTIME_S = 5.0
"""Time after the lease in which the finished samples of a last attempt can still be judged together. Less than
`stretto.flow.launch.CALL_SLACK_S`, after which the agent would count as hung."""
_PENDING = Verdict(0.0, Outcome.WRONG, 0.0, detail="its group is judged once all of it is there")
"""Placeholder in the log of a sample that is judged together with its group. Never part of a stored group."""


class GroupFailed(RuntimeError):  # noqa: N818 - data, not a fault
    """An infrastructure error ended the attempt. The log stays, and the next attempt continues from it."""


class GroupUnfinished(GroupFailed):
    """The attempt failed but added tokens or verdicts, so the group may only be long."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What one sample in flight waits for. Written by the agent, read by the watchdog."""

    ordinal: int
    sample: int
    waits_for: str
    """``an engine``, ``tool python``, ``its session``, ``a verdict``, ``its group``."""
    seconds: float
    """Seconds since this wait began."""
    num_sampled: int

    def __str__(self) -> str:
        what = f"has waited for {self.waits_for} for {self.seconds:,.0f} s"
        return f"sample {self.sample} of group {self.ordinal} {what} ({self.num_sampled} tokens so far)"


@dataclass(slots=True)
class AgentStats:
    """Counters since the start of the agent. Written by the agent, which returns copies; read by metrics."""

    num_samples: int = 0
    """Samples in flight now."""
    groups_finished: int = 0
    tokens_resumed: int = 0
    """Tokens read from the logs of earlier attempts instead of being sampled again."""
    cached_tokens: int = 0
    """Prompt tokens found in the engines' prefix caches."""
    computed_tokens: int = 0
    """Prompt tokens not found in the prefix caches."""
    engine_s: float = 0.0
    """Duration of all engine requests, queues included; concurrent requests are summed."""
    queued_s: float = 0.0
    """Part of ``engine_s`` spent in queues."""
    troubles: Counter[str] = field(default_factory=Counter)
    """Number of failed calls, by what was called."""
    sessions_lost: Counter[str] = field(default_factory=Counter)
    """By source: times that a sample's state could not be restored, so that the sample restarted or its group failed."""


@dataclass(slots=True)
class _InFlight:
    """A group in flight: the data that its samples share."""

    task: Task
    temperature: float
    want_routes: bool
    source: TaskSource
    place: int
    """Index of the engine that has the prompt in its cache. After an engine error the group moves to another engine."""
    kept: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By sample: index of the engine that sampled last, and the number of the sample's tokens that it has."""
    problem: Problem = field(init=False)
    schemas: Trees = field(init=False)
    """Schemas of the problem's tools."""
    prompt: np.ndarray = field(init=False)
    samples: Sequence[Sample] = ()


class AgentRole:
    """Samples groups. All methods belong to the loop of the first call."""

    def __init__(
        self,
        recipe: RlRecipe,
        store: Store,
        tokenizer: Tokenizer,
        open_sources: Callable[[], Mapping[str, TaskSource]],
        connect: Callable[[Caller | None], Clients],
        *,
        caller: Caller | None = None,
        pauses_s: tuple[float, float] = (0.1, 5.0),
    ):
        """
        Args:
            store: takes token logs and finished groups.
            open_sources: called once, here, in the process of the role.
            connect: makes the clients from ``caller``, which the runtime provides.
            pauses_s: pause before the second attempt at a call, and the longest pause; each pause doubles.
        """
        clients = connect(caller)
        assert clients.engines, "an agent needs an engine"
        self._recipe, self._store, self._pauses_s = recipe, store, pauses_s
        self._dialogue, self._sources = Dialogue(tokenizer, recipe.rollout.tool_chars), open_sources()
        self._teachers = teacher_dialogues(recipe, tokenizer)
        self._engines, self._rewards = clients.engines, clients.rewards
        self._loads = [0] * len(self._engines)  # samples of this agent by engine
        self._tool_slots, self._reply_slots = asyncio.Semaphore(TOOL_SLOTS), asyncio.Semaphore(_REPLY_SLOTS)
        self._threads, self._calls = Threads(), CallsInFlight("agent")
        self._problems = asyncio.Lock()  # sources need not be thread-safe
        self._in_flight: dict[tuple[int, int | None], _InFlight] = {}
        self._stats = AgentStats()

    async def run_group(self, task: Task, attempt: int, is_last: bool = False) -> GroupRef:
        """Sample and verify all samples of ``task``, store the group, and return its location.

        If the attempt ``is_last`` and makes no progress, the group consists of the finished samples, if there are at least
        two. Earlier attempts do not return partial groups, which would lack the longest samples.

        Raises:
            GroupFailed: an infrastructure error, or the lease ended; the next attempt continues from the logs.
            UserError: another attempt would not help: a full disk, a template without tool turns.
        """
        async with self._calls.one():
            group = await self._within_lease(task, attempt, is_last=is_last)
            # in a thread: if the lease ends meanwhile, the stored group is still reported
            ref = await asyncio.to_thread(store_group, self._store, group)
        self._stats.groups_finished += 1
        return ref

    async def evaluate(self, task: Task, temperature: float | None = None) -> Group:
        """Sample and verify ``task`` outside the run: nothing is logged or stored, and no routes are recorded. Raises as `run_group`."""
        async with self._calls.one():
            return await self._within_lease(task, None, temperature)

    async def rewind(self) -> None:
        """Drop all groups: the trainer returns to a snapshot, and the run dispatches them again."""
        await self._calls.drop()

    async def forget(self, ordinal: int) -> None:
        """Delete the logs of an ordinal that has ended."""
        await asyncio.to_thread(remove_logs, self._store, ordinal)

    async def waits(self) -> tuple[Wait, ...]:
        """All samples in flight and what each waits for."""
        now_s = time.time()
        return tuple(
            Wait(each.task.ordinal, each.number, each.waits_for, now_s - each.since_s, each.num_sampled)
            for group in self._in_flight.values()
            for each in group.samples
        )

    async def stats(self) -> AgentStats:
        self._stats.num_samples = sum(len(group.samples) for group in self._in_flight.values())
        return copy.deepcopy(self._stats)

    async def close(self) -> None:
        """Close the sources and end the threads."""
        await self._threads.close_after(partial(close_sources, self._sources.values()))

    def end_threads(self) -> None:
        """In place of `close`, where the sources belong to the caller."""
        self._threads.close()

    async def _within_lease(
        self, task: Task, attempt: int | None, temperature: float | None = None, is_last: bool = False
    ) -> Group:
        """Sample all samples of the group concurrently; one that fails does not stop the others.

        ``attempt`` None: outside the run. ``temperature`` None: the recipe's."""
        source = self._sources.get(task.source)
        if source is None:
            raise UserError(f"sources.{task.source}: no such source; there are {', '.join(sorted(self._sources))}")
        key, lease_s, started_s = (task.ordinal, attempt), self._recipe.failures.lease_s, time.monotonic()
        assert key not in self._in_flight, f"ordinal {task.ordinal}, attempt {attempt} is in flight here already"
        group = self._in_flight[key] = _InFlight(
            task,
            temperature=self._recipe.rollout.temperature if temperature is None else temperature,
            want_routes=self._recipe.replay == "r3" and attempt is not None,
            source=source,
            place=self._engine(first=task.ordinal),
        )
        self._loads[group.place] += task.group
        trouble: InfraError | None = None
        num_before = 0
        try:
            async with within(lease_s, f"not finished within its lease of {lease_s:g} s"):
                await self._open_problem(group)
                group.prompt = self._dialogue.prompt(group.problem.messages, group.schemas)
                if attempt is None:
                    group.samples = [Sample(task, number, 0) for number in range(task.group)]
                else:
                    group.samples = await asyncio.to_thread(open_samples, self._store, task, attempt)
                self._stats.tokens_resumed += sum(sample.num_resumed for sample in group.samples)
                num_before = _progress(group.samples)
                async with asyncio.TaskGroup() as tasks:
                    runs = [tasks.create_task(self._write(group, sample)) for sample in group.samples]
                trouble = next(filter(None, [run.result() for run in runs]), None)
                if trouble is None:
                    return await self._rewarded(group, group.samples)
        except InfraError as error:
            trouble = error
        except ExceptionGroup as several:  # prefer a user's mistake to an error of the code
            raise min(several.exceptions, key=lambda each: not isinstance(each, UserError)) from several
        finally:
            self._loads[group.place] -= task.group
            del self._in_flight[key]
        finished = [sample for sample in group.samples if sample.verdict is not None]
        has_progress = _progress(group.samples) > num_before
        if is_last and not has_progress and 1 < len(finished) < len(group.samples):
            left_s = max(0.0, lease_s - (time.monotonic() - started_s)) + _OVERTIME_S
            try:
                async with within(left_s, f"{len(finished)} finished samples were not judged before the lease ended"):
                    return await self._rewarded(group, finished)
            except InfraError as error:
                trouble = error
        kind = GroupUnfinished if has_progress else GroupFailed
        raise kind(f"ordinal {task.ordinal}, attempt {attempt or 0}: {trouble}") from trouble

    async def _open_problem(self, group: _InFlight) -> None:
        """Read the group's problem and the schemas of its tools. Raises InfraError: the source does not answer in time."""
        source, item = group.source, group.task.item

        def read() -> tuple[Problem, Trees]:
            problem = source.problem(item)
            return problem, schemas(source, problem)

        async with self._problems:
            what = f"sources.{group.task.source}: item {item}"
            group.problem, group.schemas = await self._threads.run(read, _PROBLEM_S, what)

    async def _write(self, group: _InFlight, sample: Sample) -> InfraError | None:
        """Sample and verify to the end. Returns the error of an engine, tool or verifier that kept failing, or None."""
        rewards, seed = self._recipe.runtime.rewards, _seed(sample)
        own = OwnSession(group.source, group.problem, seed, self._threads, rewards.deadline_s, self._problems)
        try:
            while sample.verdict is None:
                try:
                    await self._continue(group, sample, own)
                except Diverged as error:
                    self._restart(group, sample, error)
        except InfraError as error:
            return error
        finally:
            own.end()
        return None

    async def _continue(self, group: _InFlight, sample: Sample, own: OwnSession) -> None:
        """Produce the next part of the sample, or finish the sample."""
        rollout, now_s = self._recipe.rollout, time.time()
        if not sample.parts:
            try:
                check_room(group.task, len(group.prompt), self._recipe.train.seq_len)
            except UserError as error:  # this group fails, the run goes on
                raise InfraError(str(error)) from None
            sample.append(Part(context(group.prompt, now_s, now_s)))
        last, left = sample.parts[-1], self._room(sample)
        may_call = last.ended == "stop" and group.schemas
        calls = self._dialogue.calls(sample.turns()[-1], group.schemas) if may_call else ()
        if not len(last.segment.tokens):
            await self._reach(group, sample, own)
            await self._finish(group, sample, "tool" if own.is_over else "length")
        elif last.ended == "stop" and not calls:
            await self._reply(group, sample, own)
        elif last.ended == "stop" and len(sample.turns()) >= rollout.max_turns:
            await self._finish(group, sample, "turns")
        elif last.ended == "length" or left <= 0:
            await self._finish(group, sample, "length")
        elif calls:
            await self._use(group, sample, own, calls)
        else:
            await self._reach(group, sample, own)
            await self._generate(group, sample, min(rollout.chunk_tokens, left))

    def _room(self, sample: Sample) -> int:
        """Number of tokens that the model may still sample, by the budget over all turns and by the sequence length."""
        return min(sample.task.max_tokens - sample.num_sampled, self._recipe.train.seq_len - sample.num_tokens)

    async def _generate(self, group: _InFlight, sample: Sample, max_tokens: int) -> None:
        """Sample one chunk on the group's engine."""
        _wait(sample, "an engine")

        async def ask() -> None:
            place, stats, started_s = group.place, self._stats, time.perf_counter()
            engine, tokens = self._engines[place], sample.tokens()
            last_place, num_kept = group.kept.get(sample.number, (place, 0))
            num_kept = num_kept if last_place == place else 0
            request = GenerateRequest(
                id=f"{sample.task.ordinal}.{sample.number}.{sample.attempt}",
                tokens=tokens[num_kept:],
                max_tokens=max_tokens,
                temperature=group.temperature,
                seed=_seed(sample),
                stop_ids=self._dialogue.stop_ids,
                want_routes=group.want_routes,
                num_kept=num_kept,
                routes_from=sample.num_rows,
                deadline_s=self._recipe.failures.lease_s,
            )
            try:
                try:
                    result = await engine.generate(request)
                except Forgotten:
                    result = await engine.generate(replace(request, tokens=tokens, num_kept=0))
            except InfraError as error:
                if group.place == place:
                    self._loads[place] -= group.task.group
                    group.place = self._engine(first=place + 1, avoid=place)
                    self._loads[group.place] += group.task.group
                raise type(error)(f"{engine.name}: {error}") from error
            stats.engine_s += time.perf_counter() - started_s
            stats.queued_s += result.queued_s
            stats.cached_tokens += result.cached_tokens
            stats.computed_tokens += result.computed_tokens
            num = len(result.segment.tokens)
            if not 0 < num <= max_tokens:
                raise InfraError(f"{num} tokens were returned, 1 to {max_tokens} asked for")
            if group.want_routes and result.routes is None:
                raise InfraError("no routes were returned")
            # fewer tokens than requested without a stop token: the engine has no positions left
            is_over = num < max_tokens or num == self._room(sample)
            ended: Ended = "stop" if result.finish_reason == "stop" else "length" if is_over else ""
            sample.append(Part(result.segment, result.routes if group.want_routes else None, ended))
            group.kept[sample.number] = place, sample.num_tokens

        await self._retrying("engine", ask)

    def _engine(self, first: int, avoid: int | None = None) -> int:
        """Index of the least loaded engine, other than ``avoid`` if possible. Ties are resolved in order from ``first``, so
        that agents that start at the same time choose different engines."""
        num = len(self._engines)
        order = [(first + step) % num for step in range(num)]
        return min((place for place in order if place != avoid or num == 1), key=self._loads.__getitem__)

    async def _use(self, group: _InFlight, sample: Sample, own: OwnSession, calls: Sequence[ToolCall]) -> None:
        """Run the tool calls of the model's last turn and append the tools' turn."""
        started_s = time.time()
        answers: list[Mapping[str, Any]] = []
        for call in calls:
            if not own.is_over:
                answers.append(await self._call(sample, own, call, lambda: (*self._messages(group, sample), *answers)))
        tokens = np.zeros(0, np.int32)
        if not own.is_over:
            texts = [str(message["content"]) for message in answers]
            tokens = self._dialogue.tool_turn(group.problem.messages, group.schemas, calls, texts)
            if not self._fits(sample, tokens):
                tokens = tokens[:0]  # the model cannot continue, but the record keeps the calls
        sample.append(Part(context(tokens, started_s, time.time()), messages=tuple(answers)))

    async def _reply(self, group: _InFlight, sample: Sample, own: OwnSession) -> None:
        """Append the environment's reply to a turn without tool calls, or finish the sample if there is none."""
        if not group.source.may_reply:  # to ask would take a thread
            await self._finish(group, sample, "stop")
            return
        started_s, messages = time.time(), self._messages(group, sample)
        ask = partial(own.ask, lambda session: session.reply(messages), lambda: messages, "reply()")
        text = await self._in_slot(self._reply_slots, sample, "its environment", "environment", ask)
        if text is None or len(sample.turns()) >= self._recipe.rollout.max_turns:
            await self._finish(group, sample, "stop" if text is None else "turns")
            return
        text = shorten(text, MOST_TEXT)
        tokens = self._dialogue.user_turn(group.problem.messages, group.schemas, text)
        if not self._fits(sample, tokens):
            await self._finish(group, sample, "length")
            return
        message = {"role": "user", "content": text}
        sample.append(Part(context(tokens, started_s, time.time()), messages=(message,)))

    def _fits(self, sample: Sample, tokens: np.ndarray) -> bool:
        """Whether the model can continue after ``tokens``. A sample must not end with a turn that no engine has read: it would lack
        that turn's routes."""
        has_budget = sample.num_sampled < sample.task.max_tokens
        return has_budget and sample.num_tokens + len(tokens) < self._recipe.train.seq_len

    def _messages(self, group: _InFlight, sample: Sample) -> tuple[Mapping[str, Any], ...]:
        """All messages after the prompt, in the form that verifiers and environments read."""
        answers = [part.messages for part in sample.parts if part.messages]
        messages: list[Mapping[str, Any]] = []
        for number, turn in enumerate(sample.turns()):
            messages += [
                self._dialogue.message(turn, group.schemas),
                *(answers[number] if number < len(answers) else ()),
            ]
        return tuple(messages)

    async def _call(self, sample: Sample, own: OwnSession, call: ToolCall, history: History) -> Mapping[str, Any]:
        """Message with the result of a tool call."""
        what = f"tool {call.name}"

        async def ask() -> Mapping[str, Any]:
            answer = await own.ask(lambda session: tool_turn(session, asdict(call)), history, call.name)
            if answer["outcome"] == Outcome.INFRA.value:
                own.end()  # the state that the call left is unknown
                raise InfraError(answer["content"])
            return answer

        return await self._in_slot(self._tool_slots, sample, what, what, ask)

    async def _reach(self, group: _InFlight, sample: Sample, own: OwnSession) -> None:
        """Restore the sample's session before the model continues, so that a lost state shows before more is sampled."""
        if not own.is_reached:
            restore = partial(own.reach, partial(self._messages, group, sample))
            await self._in_slot(self._tool_slots, sample, "its session", "session", restore)

    def _restart(self, group: _InFlight, sample: Sample, error: Diverged) -> None:
        """Restart a sample whose session state is lost. Raises InfraError: after ``max_attempts`` restarts."""
        self._stats.sessions_lost[group.task.source] += 1
        if sample.num_lost + 1 >= self._recipe.failures.max_attempts:
            raise InfraError(f"session: {error} (restarted {sample.num_lost} times)")
        group.kept.pop(sample.number, None)
        sample.begin_anew(str(error))

    async def _finish(self, group: _InFlight, sample: Sample, reason: str) -> None:
        """Verify the sample and close it."""
        _wait(sample, "a verdict")
        verdict, request = _PENDING, self._request(group, sample)

        async def ask() -> Verdict:
            return self._checked(sample, await self._rewards.score(request))

        if not _is_compared(group, sample):
            verdict = await self._retrying("verifier", ask, _MAX_VERIFICATIONS)
        sample.close(reason, replace(verdict, latency_s=time.time() - sample.since_s))
        _wait(sample, "its group")

    async def _rewarded(self, group: _InFlight, samples: Sequence[Sample]) -> Group:
        """The finished group, with rewards that depend on the whole group."""
        task, problem, config = group.task, group.problem, self._recipe.rewards.get(group.task.source)
        trajectories = [sample.trajectory() for sample in samples]
        verdicts: Sequence[Verdict] = [each.verdict for each in trajectories]
        if _is_compared(group, samples[0]):
            requests = [self._request(group, each) for each in samples]

            async def ask() -> list[Verdict]:
                compared = await self._rewards.compare(requests)
                return [self._checked(each, verdict) for each, verdict in zip(samples, compared, strict=True)]

            for sample in samples:
                _wait(sample, "a verdict on its group")
            compared = await self._retrying("verifier", ask, _MAX_VERIFICATIONS)
            latency_s = time.time() - samples[0].since_s
            verdicts = [replace(verdict, latency_s=latency_s) for verdict in compared]
        if config is not None:
            answers = [
                Written(self._text(each), each.num_sampled, verdict)
                for each, verdict in zip(samples, verdicts, strict=True)
            ]
            prompt = "\n".join(str(message.get("content") or "") for message in problem.messages)
            # a verifiable problem asks for the gold answer, so copying it is not a fault
            reference = "" if group.source.is_verifiable else problem.gold
            verdicts = group_rewards(config, prompt, reference, answers)
        dialogues = self._teachers.get(task.source, {})
        prompts = {name: dialogue.prompt(problem.messages, group.schemas) for name, dialogue in dialogues.items()}
        judged = (replace(each, verdict=verdict) for each, verdict in zip(trajectories, verdicts, strict=True))
        return Group(task, tuple(judged), prompts)

    def _request(self, group: _InFlight, sample: Sample) -> RewardRequest:
        """Request to verify ``sample``."""
        task, messages = sample.task, self._messages(group, sample)
        return RewardRequest(task.source, task.item, self._text(sample), messages, _seed(sample))

    def _text(self, sample: Sample) -> str:
        """Text of the model's last turn."""
        return self._dialogue.text(sample.turns()[-1])

    def _checked(self, sample: Sample, verdict: Verdict) -> Verdict:
        """``verdict`` with the ends of its steps in tokens. Raises InfraError: the verification failed, or it rewards a turn
        that does not exist."""
        turns = sample.turns()
        if verdict.outcome is Outcome.INFRA:
            raise InfraError(verdict.detail)
        if absent := [step.turn for step in verdict.steps if not 0 <= step.turn < len(turns)]:
            source = f"sources.{sample.task.source}"
            raise InfraError(f"{source}: score() rewards turn {absent[0]}, and there are {len(turns)}")
        steps = tuple(
            step if step.end is None else replace(step, end=self._dialogue.num_tokens(turns[step.turn], step.end))
            for step in verdict.steps
        )
        return replace(verdict, steps=steps)

    async def _in_slot(
        self, slots: asyncio.Semaphore, sample: Sample, waits_for: str, what: str, work: Callable[[], Awaitable[T]]
    ) -> T:
        """`_retrying`, where each attempt first takes one of ``slots``; the sample is shown to wait for ``waits_for``."""

        async def ask() -> T:
            async with slots:
                _wait(sample, waits_for)
                return await work()

        return await self._retrying(what, ask)

    async def _retrying(self, what: str, work: Callable[[], Awaitable[T]], max_attempts: int | None = None) -> T:
        """Await ``work()`` until it succeeds.

        An `Unavailable` error is retried until the lease ends. Raises InfraError: the last of the attempts that the recipe
        allows, or of ``max_attempts`` if that is less. Other errors are raised at once.
        """
        allowed, failures = self._recipe.failures.max_attempts, 0
        pause_s, longest_s = self._pauses_s
        while True:
            try:
                return await work()
            except InfraError as error:
                self._stats.troubles[what] += 1
                failures += not isinstance(error, Unavailable)
                if failures == min(allowed, max_attempts or allowed):
                    raise InfraError(f"{what}: {error} ({failures} attempts)") from error
            await asyncio.sleep(pause_s)
            pause_s = min(longest_s, 2 * pause_s)


def check_room(task: Task, num_tokens: int, max_len: int) -> None:
    """Raises UserError: a prompt of ``num_tokens`` leaves no room for an answer."""
    if num_tokens >= max_len:
        raise UserError(
            f"sources.{task.source}: item {task.item}: its prompt of {num_tokens} tokens leaves no room to answer in "
            f"train.seq_len {max_len}; raise that or choose shorter problems"
        )


def _seed(sample: Sample) -> int:
    """63-bit seed, different for every sample up to hash collisions."""
    digest = blake2b(f"{sample.task.seed}/{sample.number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _is_compared(group: _InFlight, sample: Sample) -> bool:
    """Whether the sample is judged together with its group: never a group of one, nor a sample outside the run."""
    return group.source.compares and group.task.group > 1 and sample.log is not None


def _progress(samples: Sequence[Sample]) -> int:
    """A number that grows with every sampled token and every verdict."""
    return sum(sample.num_sampled + (sample.verdict is not None) for sample in samples)


def _wait(sample: Sample, what: str) -> None:
    sample.waits_for, sample.since_s = what, time.time()
