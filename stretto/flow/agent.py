"""Agent role: samples groups through turns with engines, tools and verifiers, many at once.

It waits most of its time, so one loop carries any number of samples. All that a sample has come to is in its log, and what
comes next is a function of that alone: an agent may be killed at any point, and another goes on.

Tokens in, tokens out: each request goes on from everything so far, to the token, and what comes back is appended; of
what an engine has already only the length is sent. Text is read to find tool calls and to be verified, never to be tokenised again. Imports no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from stretto.base.errors import InfraError, UserError
from stretto.base.trajectory import Group, GroupRef, Outcome, Task, Verdict
from stretto.flow.clients import Clients, Forgotten, GenerateRequest, RewardRequest, Threads, Unavailable
from stretto.flow.group_reward import Written, group_rewards
from stretto.flow.own_session import OwnSession, SoFar
from stretto.learning.dialogue import Dialogue, ToolCall, Trees, teacher_dialogues
from stretto.learning.recipe import GROUPS, LOGS, RlRecipe
from stretto.learning.samples import Ended, Part, Sample, context, open_samples, remove_logs, store_group
from stretto.runtime.runtime import Caller
from stretto.sandbox.tools import shorten
from stretto.tasks.session import MOST_TEXT, Diverged, schemas, tool_turn
from stretto.tasks.task import Problem, TaskSource
from stretto.text.tokenizer import Tokenizer

T = TypeVar("T")

_TOOL_SLOTS = 16
"""Tools that one agent has at work at once; others wait, so that a crowd of samples does not start a crowd of processes."""
_REPLY_SLOTS = 64
"""The same of environments that reply: more, for some are models elsewhere, and only wait."""
_PROBLEM_S = 60.0
_NOT_YET = Verdict(0.0, Outcome.WRONG, 0.0, detail="its group is judged once all of it is there")
"""In a log, of a sample that is judged beside the others of its group; never in a stored group."""


class GroupFailed(RuntimeError):  # noqa: N818 - data, not a fault
    """A group could not be finished, for reasons of ours. Its log stays: another attempt goes on from there."""


class GroupUnfinished(GroupFailed):
    """The same, and the attempt has brought it further: it may just be long."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A sample in flight. Written by the agent, read by the watchdog."""

    ordinal: int
    sample: int
    waits_for: str
    """``an engine``, ``tool python``, ``its session``, ``a verdict``, ``its group``."""
    seconds: float
    """Since it began to wait for that."""
    num_sampled: int


@dataclass(slots=True)
class AgentStats:
    """Counts since the start, but for what is in flight. Written by the agent, which hands out copies; read by metrics."""

    num_samples: int = 0
    """In flight."""
    groups_finished: int = 0
    tokens_resumed: int = 0
    """Taken from the logs of earlier attempts: work that a failure did not lose."""
    cached_tokens: int = 0
    """Prompt tokens that engines had in their prefix caches."""
    computed_tokens: int = 0
    """The other prompt tokens."""
    engine_s: float = 0.0
    """Summed over requests, queues included, as the next; several wait at once."""
    queued_s: float = 0.0
    troubles: dict[str, int] = field(default_factory=dict)
    """Failed tries by what was tried."""
    sessions_lost: dict[str, int] = field(default_factory=dict)
    """By source, times that the state of a sample could not be reached again: it began anew, or its group failed."""


@dataclass(slots=True)
class _InFlight:
    """What the samples of a group in flight share."""

    task: Task
    temperature: float
    want_routes: bool
    source: TaskSource
    place: int
    """Its engine's, where its prompt is cached. If that fails, the group moves: whoever tries next meets another."""
    kept: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By sample: the place of the last engine that wrote it, and how many of its tokens that one has."""
    problem: Problem = field(init=False)
    schemas: Trees = field(init=False)
    """Of the problem's tools."""
    prompt: np.ndarray = field(init=False)
    samples: Sequence[Sample] = ()


class AgentRole:
    """Runs groups. All methods belong to the loop of the first call."""

    def __init__(
        self,
        recipe: RlRecipe,
        folder: Path,
        tokenizer: Tokenizer,
        open_sources: Callable[[], Mapping[str, TaskSource]],
        connect: Callable[[Caller | None], Clients],
        *,
        caller: Caller | None = None,
        pauses_s: tuple[float, float] = (0.1, 5.0),
    ):
        """
        Args:
            folder: of the run.
            open_sources: called once, here, where the role lives.
            connect: makes the clients; ``caller`` is what the runtime gives to roles that call others.
            pauses_s: before the second attempt at anything, and the longest; each is twice the one before.
        """
        clients = connect(caller)
        assert clients.engines, "an agent needs an engine"
        self._recipe, self._folder, self._pauses_s = recipe, folder, pauses_s
        self._dialogue, self._sources = Dialogue(tokenizer, recipe.rollout.tool_chars), open_sources()
        self._teachers = teacher_dialogues(recipe, tokenizer)
        self._engines, self._rewards = clients.engines, clients.rewards
        self._loads = [0] * len(self._engines)  # samples of this agent by engine
        self._tool_slots, self._reply_slots = asyncio.Semaphore(_TOOL_SLOTS), asyncio.Semaphore(_REPLY_SLOTS)
        self._threads = Threads()
        self._problems = asyncio.Lock()  # sources need not be safe to use from two threads
        self._in_flight: dict[tuple[int, int | None], _InFlight] = {}
        self._stats = AgentStats()

    async def run_group(self, task: Task, attempt: int, is_last: bool = False) -> GroupRef:
        """Draw and verify all samples of ``task``, store the group, and say where it lies.

        Where the attempt ``is_last`` and brings the group no further, those samples make it that had ended, if they are two
        or more. Not before: it is the long ones that do not end.

        Raises:
            GroupFailed: for reasons of ours, within the lease; the next attempt goes on from the logs.
            UserError: what no attempt would mend: a full disk, a prompt that is too long, a template without tool turns.
        """
        group = await self._within_lease(task, attempt, is_last=is_last)
        # not interruptible by a lease that ends meanwhile: a stored group is reported
        ref = await asyncio.to_thread(store_group, self._folder / GROUPS, group)
        self._stats.groups_finished += 1
        return ref

    async def evaluate(self, task: Task, temperature: float | None = None) -> Group:
        """The same samples, of no run: not logged, not stored, without routes. Raises as `run_group`."""
        return await self._within_lease(task, None, temperature)

    async def forget(self, ordinals: Sequence[int]) -> None:
        """Delete the logs of ordinals that have ended."""
        for ordinal in ordinals:
            remove_logs(self._folder / LOGS, ordinal)

    async def waits(self) -> tuple[Wait, ...]:
        """Every sample in flight and what it waits for."""
        now_s = time.time()
        return tuple(
            Wait(each.task.ordinal, each.number, each.waits_for, now_s - each.since_s, each.num_sampled)
            for group in self._in_flight.values()
            for each in group.samples
        )

    async def stats(self) -> AgentStats:
        num_samples = sum(len(group.samples) for group in self._in_flight.values())
        troubles, lost = dict(self._stats.troubles), dict(self._stats.sessions_lost)
        return replace(self._stats, num_samples=num_samples, troubles=troubles, sessions_lost=lost)

    async def close(self) -> None:
        self._threads.close()

    async def _within_lease(
        self, task: Task, attempt: int | None, temperature: float | None = None, is_last: bool = False
    ) -> Group:
        """All samples at once; one that fails leaves the others to go on. ``attempt`` None: of no run; ``temperature`` None:
        the recipe's."""
        source = self._sources.get(task.source)
        if source is None:
            raise UserError(f"sources.{task.source}: no such source; there are {', '.join(sorted(self._sources))}")
        key, lease_s = (task.ordinal, attempt), self._recipe.failures.lease_s
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
            async with asyncio.timeout(lease_s) as lease:
                async with self._problems:
                    what = f"sources.{task.source}: item {task.item}"
                    opened = partial(_opened, source, task.item)
                    group.problem, group.schemas = await self._threads.run(opened, _PROBLEM_S, what)
                group.prompt = self._dialogue.prompt(group.problem.messages, group.schemas)
                if attempt is None:
                    group.samples = [Sample(task, number, 0) for number in range(task.group)]
                else:
                    group.samples = open_samples(self._folder / LOGS, task, attempt)
                self._stats.tokens_resumed += sum(sample.num_resumed for sample in group.samples)
                num_before = _progress(group.samples)
                async with asyncio.TaskGroup() as tasks:
                    runs = [tasks.create_task(self._write(group, sample)) for sample in group.samples]
                trouble = next(filter(None, [run.result() for run in runs]), None)
                if trouble is None:
                    return await self._rewarded(group, group.samples)
        except TimeoutError as error:
            if not lease.expired():
                raise
            trouble = InfraError(f"not finished within its lease of {lease_s:g} s")
            trouble.__cause__ = error
        except InfraError as error:
            trouble = error
        except ExceptionGroup as several:  # a user's mistake first, then a fault of the code
            raise min(several.exceptions, key=lambda each: not isinstance(each, UserError)) from several
        finally:
            self._loads[group.place] -= task.group
            del self._in_flight[key]
        ended = [sample for sample in group.samples if sample.verdict is not None]
        is_further = _progress(group.samples) > num_before
        if is_last and not is_further and 1 < len(ended) < len(group.samples):
            try:
                return await self._rewarded(group, ended)
            except InfraError as error:
                trouble = error
        kind = GroupUnfinished if is_further else GroupFailed
        raise kind(f"ordinal {task.ordinal}, attempt {attempt or 0}: {trouble}") from trouble

    async def _write(self, group: _InFlight, sample: Sample) -> InfraError | None:
        """Write and verify the sample to its end. Returns what kept it from that: an engine, a tool or the verifier that kept failing."""
        rewards, seed = self._recipe.runtime.rewards, _seed(sample)
        own = OwnSession(group.source, group.problem, seed, self._threads, rewards.deadline_s, self._problems)
        try:
            while sample.verdict is None:
                try:
                    await self._go_on(group, sample, own)
                except Diverged as lost:
                    self._lose(group, sample, lost)
        except InfraError as trouble:
            return trouble
        finally:
            own.end()
        return None

    async def _go_on(self, group: _InFlight, sample: Sample, own: OwnSession) -> None:
        """The next part of a sample, or its end."""
        rollout, now_s = self._recipe.rollout, time.time()
        if not sample.parts:
            check_room(group.task, len(group.prompt), self._recipe.train.seq_len)
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
        """Tokens that the model may still write: one budget over all turns, and the length of the whole."""
        return min(sample.task.max_tokens - sample.num_sampled, self._recipe.train.seq_len - sample.num_tokens)

    async def _generate(self, group: _InFlight, sample: Sample, max_tokens: int) -> None:
        """One chunk of the group's engine."""
        _wait(sample, "an engine")

        async def ask() -> None:
            place, stats, started_s = group.place, self._stats, time.perf_counter()
            engine, tokens = self._engines[place], sample.tokens()
            keeper, num_kept = group.kept.get(sample.number, (place, 0))
            num_kept = num_kept if keeper == place else 0
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
                    done = await engine.generate(request)
                except Forgotten:
                    done = await engine.generate(replace(request, tokens=tokens, num_kept=0))
            except InfraError as trouble:
                if group.place == place:
                    self._loads[place] -= group.task.group
                    group.place = self._engine(first=place + 1, avoid=place)
                    self._loads[group.place] += group.task.group
                raise type(trouble)(f"{engine.name}: {trouble}") from trouble
            stats.engine_s += time.perf_counter() - started_s
            stats.queued_s += done.queued_s
            stats.cached_tokens += done.cached_tokens
            stats.computed_tokens += done.computed_tokens
            num = len(done.segment.tokens)
            if not 0 < num <= max_tokens:
                raise InfraError(f"{num} tokens were returned, 1 to {max_tokens} asked for")
            if group.want_routes and done.routes is None:
                raise InfraError("no routes were returned")
            # an engine that stops short of what was asked has come to the end of its positions
            is_over = num < max_tokens or num == self._room(sample)
            ended: Ended = "stop" if done.finish_reason == "stop" else "length" if is_over else ""
            sample.append(Part(done.segment, done.routes if group.want_routes else None, ended))
            group.kept[sample.number] = place, sample.num_tokens

        await self._patiently("engine", ask)

    def _engine(self, first: int, avoid: int | None = None) -> int:
        """The least loaded engine, another than ``avoid`` if there is one. Ties go round by ``first``: several agents
        that know nothing of each other do not all begin at the same one."""
        num = len(self._engines)
        order = [(first + step) % num for step in range(num)]
        return min((place for place in order if place != avoid or num == 1), key=self._loads.__getitem__)

    async def _use(self, group: _InFlight, sample: Sample, own: OwnSession, calls: Sequence[ToolCall]) -> None:
        """The turn of the tools that the model called."""
        started_s = time.time()
        told: list[Mapping[str, Any]] = []
        for call in calls:
            if not own.is_over:
                told.append(await self._call(sample, own, call, lambda: (*self._messages(group, sample), *told)))
        tokens = np.zeros(0, np.int32)
        if not own.is_over:
            texts = [str(message["content"]) for message in told]
            tokens = self._dialogue.tool_turn(group.problem.messages, group.schemas, calls, texts)
            if not self._fits(sample, tokens):
                tokens = tokens[:0]  # the model has no room to go on from it; that the calls were made stays true
        sample.append(Part(context(tokens, started_s, time.time()), messages=tuple(told)))

    async def _reply(self, group: _InFlight, sample: Sample, own: OwnSession) -> None:
        """The environment's turn after one of the model's that called no tool; the sample's end where it has none."""
        started_s, what = time.time(), "reply()"
        messages = self._messages(group, sample)

        async def ask() -> str | None:
            async with self._reply_slots:
                _wait(sample, "its environment")
                return await own.ask(lambda session: session.reply(messages), lambda: messages, what)

        text = await self._patiently("environment", ask)
        if text is None:
            await self._finish(group, sample, "stop")
        elif len(sample.turns()) >= self._recipe.rollout.max_turns:
            await self._finish(group, sample, "turns")
        else:
            text = shorten(text, MOST_TEXT)
            tokens = self._dialogue.user_turn(group.problem.messages, group.schemas, text)
            if not self._fits(sample, tokens):
                await self._finish(group, sample, "length")
            else:
                told = {"role": "user", "content": text}
                sample.append(Part(context(tokens, started_s, time.time()), messages=(told,)))

    def _fits(self, sample: Sample, tokens: np.ndarray) -> bool:
        """The model can go on behind them."""
        return sample.num_tokens + len(tokens) < self._recipe.train.seq_len

    def _messages(self, group: _InFlight, sample: Sample) -> tuple[Mapping[str, Any], ...]:
        """All that followed the prompt, as verifiers and environments read it."""
        told = [part.messages for part in sample.parts if part.messages]
        messages: list[Mapping[str, Any]] = []
        for number, turn in enumerate(sample.turns()):
            messages += [self._dialogue.message(turn, group.schemas), *(told[number] if number < len(told) else ())]
        return tuple(messages)

    async def _call(self, sample: Sample, own: OwnSession, call: ToolCall, said: SoFar) -> Mapping[str, Any]:
        """The message that answers a call."""
        what = f"tool {call.name}"

        async def ask() -> Mapping[str, Any]:
            async with self._tool_slots:
                _wait(sample, what)
                told = await own.ask(lambda session: tool_turn(session, asdict(call)), said, call.name)
            if told["outcome"] == Outcome.INFRA.value:
                own.end()  # nobody knows what it left
                raise InfraError(told["content"])
            return told

        return await self._patiently(what, ask)

    async def _reach(self, group: _InFlight, sample: Sample, own: OwnSession) -> None:
        """Its session, before the model goes on: a state that is lost shows before more is written."""
        if own.is_reached:
            return

        async def ask() -> None:
            async with self._tool_slots:
                _wait(sample, "its session")
                await own.reach(lambda: self._messages(group, sample))

        await self._patiently("session", ask)

    def _lose(self, group: _InFlight, sample: Sample, lost: Diverged) -> None:
        """Have it begin anew. Raises InfraError: that has not helped before."""
        name, stats = group.task.source, self._stats
        stats.sessions_lost[name] = stats.sessions_lost.get(name, 0) + 1
        if sample.num_lost + 1 >= self._recipe.failures.max_attempts:
            raise InfraError(f"session: {lost} (restarted {sample.num_lost} times)")
        group.kept.pop(sample.number, None)
        sample.begin_anew(str(lost))

    async def _finish(self, group: _InFlight, sample: Sample, reason: str) -> None:
        """Have it verified and close it."""
        _wait(sample, "a verdict")
        request = self._request(group, sample)

        async def ask() -> Verdict:
            return self._taken(sample, await self._rewards.score(request))

        if _is_compared(group, sample):
            verdict = _NOT_YET
        else:
            verdict = await self._patiently("verifier", ask, most=3)
        sample.close(reason, replace(verdict, latency_s=time.time() - sample.since_s))
        _wait(sample, "its group")

    async def _rewarded(self, group: _InFlight, samples: Sequence[Sample]) -> Group:
        """The finished group, with what its answers earn beside each other."""
        task, config = group.task, self._recipe.rewards.get(group.task.source)
        trajectories, texts = [each.trajectory() for each in samples], [self._text(each) for each in samples]
        if _is_compared(group, samples[0]):
            requests = [self._request(group, each) for each in samples]

            async def ask() -> list[Verdict]:
                said = await self._rewards.compare(requests)
                return [self._taken(each, verdict) for each, verdict in zip(samples, said, strict=True)]

            for sample in samples:
                _wait(sample, "a verdict on its group")
            verdicts = await self._patiently("verifier", ask, most=3)
            latency_s = time.time() - samples[0].since_s
            trajectories = [
                replace(each, verdict=replace(verdict, latency_s=latency_s))
                for each, verdict in zip(trajectories, verdicts, strict=True)
            ]
        if config is not None:
            answers = [
                Written(text, each.num_sampled, each.verdict) for text, each in zip(texts, trajectories, strict=True)
            ]
            prompt = "\n".join(str(message.get("content") or "") for message in group.problem.messages)
            # where answers are right or wrong, the gold answer is what is asked for
            reference = "" if group.source.is_verifiable else group.problem.gold
            verdicts = list(group_rewards(config, prompt, reference, answers))
            trajectories = [replace(each, verdict=new) for each, new in zip(trajectories, verdicts, strict=True)]
        prompts = {
            name: dialogue.prompt(group.problem.messages, group.schemas)
            for name, dialogue in self._teachers.get(task.source, {}).items()
        }
        return Group(task, tuple(trajectories), prompts)

    def _request(self, group: _InFlight, sample: Sample) -> RewardRequest:
        """What a verifier is given."""
        task, messages = sample.task, self._messages(group, sample)
        return RewardRequest(task.source, task.item, self._text(sample), messages, _seed(sample))

    def _text(self, sample: Sample) -> str:
        """The model's last turn."""
        return self._dialogue.text(sample.turns()[-1])

    def _taken(self, sample: Sample, verdict: Verdict) -> Verdict:
        """A verifier's verdict, ends of its steps in tokens. Raises InfraError: it is none, or of turns that are not there."""
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

    async def _patiently(self, what: str, work: Callable[[], Awaitable[T]], most: int | None = None) -> T:
        """Await ``work()`` until it succeeds, or its last attempt is a `InfraError`; anything else is raised at once. Who is
        unavailable is waited for; it is the lease that ends that. ``most``: attempts, where the recipe allows more."""
        allowed, failures = self._recipe.failures.max_attempts, 0
        attempts = min(allowed, most or allowed)
        pause_s, longest_s = self._pauses_s
        while True:
            try:
                return await work()
            except InfraError as trouble:
                self._stats.troubles[what] = self._stats.troubles.get(what, 0) + 1
                failures += not isinstance(trouble, Unavailable)
                if failures == attempts:
                    raise InfraError(f"{what}: {trouble} ({failures} attempts)") from trouble
            await asyncio.sleep(pause_s)
            pause_s = min(longest_s, 2 * pause_s)


def _opened(source: TaskSource, item: int) -> tuple[Problem, Trees]:
    problem = source.problem(item)
    return problem, schemas(source, problem)


def check_room(task: Task, num_tokens: int, max_len: int) -> None:
    """Raises UserError: a prompt of ``num_tokens`` leaves none for the answer."""
    if num_tokens >= max_len:
        raise UserError(
            f"sources.{task.source}: item {task.item}: its prompt of {num_tokens} tokens leaves no room to answer in "
            f"train.seq_len {max_len}; raise that or choose shorter problems"
        )


def _seed(sample: Sample) -> int:
    """63 bits that no two samples share but by accident."""
    digest = blake2b(f"{sample.task.seed}/{sample.number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _is_compared(group: _InFlight, sample: Sample) -> bool:
    """Whether it is judged beside the others of its group: not alone, nor where it is of no run."""
    return group.source.compares and group.task.group > 1 and sample.log is not None


def _progress(samples: Sequence[Sample]) -> int:
    """What grows with every chunk and every verdict."""
    return sum(sample.num_sampled + (sample.verdict is not None) for sample in samples)


def _wait(sample: Sample, what: str) -> None:
    sample.waits_for, sample.since_s = what, time.time()
