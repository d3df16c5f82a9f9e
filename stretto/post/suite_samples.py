"""Samples of an evaluation: generated and scored as in reinforcement learning, kept in a file, and trivial baselines beside them.

Each finished sample is a line of `SAMPLES_FILE`. A second call resumes with the same result, because every sample has its own seed. A
sample without a verdict is an infrastructure error: it is left out and retried by the next call. With too many of them there is no score.

Shape letters: P problems, V variants of a problem, S samples.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.base.numbers import counted
from stretto.base.paths import write_json, writing
from stretto.base.track import progress, say
from stretto.base.trajectory import Outcome, Task
from stretto.data.loader import key_of
from stretto.evals.scores import MOST_INFRA
from stretto.flow.agent import AgentRole, GroupFailed
from stretto.flow.clients import Clients, RewardRequest
from stretto.flow.prompts import SourceTables, check_source
from stretto.flow.reward import RewardRole
from stretto.flow.rollout import EngineRole, open_rollout_engine
from stretto.learning.dialogue import Dialogue
from stretto.learning.recipe import RlRecipe
from stretto.model.spec import Subnet
from stretto.post.suites import EvalOptions, SuiteConfig, errors_about
from stretto.runtime.store import FolderStore
from stretto.tasks.session import schemas
from stretto.tasks.task import FIRST_REPORTED, Problem, TaskSource, spoken
from stretto.text.tokenizer import Tokenizer

ASKED_FILE, SAMPLES_FILE = "asked.json", "samples.jsonl"
_DONORS, _DRAW = 200, 7
"""Number of other problems whose answers baselines use; purpose of their random seed."""
_TRIES = 3
"""Largest number of attempts to score an answer of a baseline, as for the model's answers."""
_LEASE_S = 7200.0
"""Time limit of a sample, seconds: a slow engine is not a failure."""
_CACHE_BYTES = 1 << 24
"""KV cache bytes per sequence of a batch."""
Key = tuple[str, int, int]
"""Key of a sample: domain, item, number."""
Transcript = tuple[Mapping[str, Any], ...]
"""All messages after the prompt."""


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One answer, a line of `SAMPLES_FILE`. Written by `evaluate`."""

    domain: str
    item: int
    number: int
    outcome: Outcome
    reward: float
    text: str
    """Text of the last turn."""
    finish: str
    num_prompt: int
    """Number of prompt tokens."""
    num_sampled: int
    num_turns: int
    entropy: float
    """Mean of −log p of the sampled tokens, nats: an unbiased estimate where they are sampled at temperature 1."""
    seconds: float
    """Wall time since the previous sample ended; the sum over samples is the whole time, also of resumed evaluations."""
    num_between: int = 0
    """Number of tokens between the turns, from tools and users."""
    turns: tuple[str, ...] = ()
    """All turns of an open-ended answer with several turns."""

    @property
    def spoken(self) -> list[str]:
        """Text of each turn without the reasoning."""
        return [spoken(turn) for turn in self.turns or (self.text,)]

    @property
    def is_generated(self) -> bool:
        """Whether the network generated an answer; it does not if the prompt is longer than its context."""
        return self.num_sampled > 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_sampled + self.num_between


@dataclass(slots=True)
class Domain:
    """The problems of one source in an evaluation. Written by `Sampler`."""

    suite: str
    source: TaskSource
    """Closed after sampling; its `TaskSource.read` still works."""
    num_samples: int
    """Number of samples per item."""
    items: range
    """Items to solve; ``source.variants`` consecutive ones are one problem."""
    donors: range
    """Other items, whose correct answers are used as trivial baselines."""
    asked: dict[int, Problem]
    """Problems by item."""
    prompts: dict[int, tuple[str, int]]
    """By item: text of the prompt's last message, and number of prompt tokens."""
    baselines: dict[str, np.ndarray] = field(default_factory=dict)
    """Scores [P] of the trivial baselines (`score_baselines`)."""
    num_unscored: int = 0
    """Number of answers of baselines without a verdict (`score_baselines`)."""
    failures: list[str] = field(default_factory=list)
    """Error message of every sample without a verdict."""

    @property
    def is_graded(self) -> bool:
        """Whether answers are better or worse instead of right or wrong."""
        return not self.source.is_verifiable

    @property
    def problems(self) -> range:
        """Numbers of the problems."""
        return range(self.items.start // self.source.variants, self.items.stop // self.source.variants)

    def keys(self, name: str) -> list[Key]:
        """Keys of all samples of the domain, which is called ``name``, by item."""
        return [(name, item, number) for item in self.items for number in range(self.num_samples)]

    def value(self, outcome: Outcome, reward: float) -> float:
        """Contribution of a sample to the score; NaN without a verdict."""
        if outcome is Outcome.INFRA:
            return math.nan
        return reward if self.is_graded else float(outcome is Outcome.OK)


class Sampler:
    """Generates and scores the samples of an evaluation that are missing in its folder."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        out: Path,
        options: EvalOptions,
        suites: Mapping[str, SuiteConfig],
        max_positions: int,
    ):
        self._folder, self._options, self._suites, self._max_positions = folder, options, suites, max_positions
        self._dialogue = Dialogue(tokenizer)
        self._path, self._ended_s = out / SAMPLES_FILE, time.perf_counter()
        self._ordinals = itertools.count()
        self.domains: dict[str, Domain] = {}
        self.samples = read_samples(self._path)

    async def run(self, subnet: Subnet | None, device: str, asked: Mapping[str, Any]) -> None:
        """Generate and score the missing samples, suite by suite, on one engine. First check every problem and write ``asked``."""
        with ExitStack() as stack:
            opened = {}
            for name, suite in self._suites.items():
                tables = SourceTables(suite.sources, suite.sandbox)
                with errors_about(f"suite {name}"):
                    # agent and verifier use their sources in different threads
                    opened[name] = stack.enter_context(tables.opened()), stack.enter_context(tables.opened())
                    for key, source in opened[name][0].items():
                        check_source(source, self._recipe(suite))
                        self.domains[key] = self._planned(name, suite, source)
            write_json(self._path.with_name(ASKED_FILE), asked)
            any_recipe = self._recipe(next(iter(self._suites.values())))
            engine = EngineRole(partial(open_rollout_engine, any_recipe, self._folder, device), subnet=subnet)
            stack.callback(engine.close)
            for name in opened:
                await self._sample_suite(name, engine, *opened[name])

    def _recipe(self, suite: SuiteConfig) -> RlRecipe:
        """The recipe from which the agent loop and the engine take their settings."""
        tokens, options = suite.max_tokens, self._options
        rollout = {"max_tokens": tokens, "chunk_tokens": tokens, "max_turns": suite.max_turns}
        rollout |= {"max_batch": options.max_batch, "cache_bytes": _CACHE_BYTES * options.max_batch}
        recipe = {
            "sources": suite.sources,
            "sandbox": suite.sandbox,
            "rollout": rollout | {"threads": options.threads},
            "failures": {"lease_s": _LEASE_S, "stuck_s": _LEASE_S, "max_attempts": 3},
            "replay": "off",
            "train": {
                "steps": 1,
                "prompts": 1,
                "seq_len": self._max_positions,
            },  # required fields; only seq_len is read
            "optim": {"lr": 1.0},
        }
        return validate(RlRecipe, recipe, "suite")

    def _planned(self, suite_name: str, suite: SuiteConfig, source: TaskSource) -> Domain:
        size, num = source.num_items, suite.problems * source.variants
        items = range(FIRST_REPORTED, FIRST_REPORTED + num) if size is None else range(max(0, size - num), size)
        if len(items) < num:
            num_problems = len(items) // source.variants
            say(f"sources.{source.name}: has {num_problems} problems, fewer than the {suite.problems} of the suite")
        donors = range(items.stop, items.stop + _DONORS) if size is None else range(min(_DONORS, items.start))
        asked = {item: source.problem(item) for item in items}
        if source.compares and not all(problem.gold for problem in asked.values()):
            raise UserError(
                f"sources.{source.name}: compares answers, and one model alone has no opponent; give references or a rubric, or "
                "compare two evaluations: stretto compare A B --battle"
            )
        prompts = {}
        for item, problem in asked.items():
            num_tokens = len(self._dialogue.prompt(problem.messages, schemas(source, problem)))
            prompts[item] = str(problem.messages[-1]["content"]), num_tokens
        assert suite.samples is not None, "an unresolved suite"
        return Domain(suite_name, source, suite.samples, items, donors or items, asked, prompts)

    async def _sample_suite(
        self, name: str, engine: EngineRole, sources: Mapping[str, TaskSource], judging: Mapping[str, TaskSource]
    ) -> None:
        """``sources`` are the agent's, ``judging`` the verifier's."""
        suite, options = self._suites[name], self._options
        recipe = self._recipe(suite)
        rewards = RewardRole(lambda: judging, recipe.runtime.rewards.deadline_s)
        clients, tokenizer = Clients([engine], rewards), self._dialogue.tokenizer
        agent = AgentRole(recipe, FolderStore(self._path.parent), tokenizer, lambda: sources, lambda caller: clients)
        keys = [key for name in sources for key in self.domains[name].keys(name)]
        missing = [key for key in keys if key not in self.samples]
        slots = asyncio.Semaphore(2 * options.max_batch)
        with progress(f"evaluate {name}", len(keys)) as advance:
            advance(len(keys) - len(missing))

            async def one(key: Key) -> None:
                async with slots:
                    if (sample := await self._sampled(agent, suite, key)) is not None:
                        self._keep(sample)
                advance(1)

            try:
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(_fails_with(engine))
                    if drawn := [tasks.create_task(one(key)) for key in missing]:
                        await asyncio.wait(drawn)
                    watch.cancel()
                for domain in sources if options.baselines else ():
                    own = self.domains[domain]
                    own.baselines = await score_baselines(domain, own, judging[domain], rewards, options.seed)
            except ExceptionGroup as group:  # user errors first
                raise min(group.exceptions, key=lambda error: not isinstance(error, UserError)) from group
            finally:
                agent.end_threads()
                rewards.end_threads()

    async def _sampled(self, agent: AgentRole, suite: SuiteConfig, key: Key) -> Sample | None:
        """A sample; None: no verdict (infrastructure error)."""
        name, item, number = key
        domain = self.domains[name]
        num_prompt = domain.prompts[item][1]
        if num_prompt >= self._max_positions:  # a prompt that does not fit counts as not solved
            return Sample(*key, Outcome.WRONG, 0.0, "", "prompt", num_prompt, 0, 0, 0.0, self._lap())
        seed = key_of(self._options.seed, crc32(name.encode()), item, number) >> 1
        task = Task(next(self._ordinals), name, item, 1, seed, suite.max_tokens)
        try:
            (done,) = (await agent.evaluate(task, suite.temperature)).trajectories
        except GroupFailed as failed:
            domain.failures.append(str(failed))
            num, num_failed = len(domain.items) * domain.num_samples, len(domain.failures)
            if num_failed > MOST_INFRA * num:
                raise UserError(
                    f"sources.{name}: {num_failed} of {num} samples could not be scored, the last one of item {item}: {failed}; "
                    "correct that and repeat the command: finished samples are kept"
                ) from failed
            return None
        sampled = [segment for segment in done.segments if segment.is_sampled]
        turns = tuple(self._dialogue.text(segment.tokens) for segment in sampled)
        return Sample(
            *key,
            outcome=done.verdict.outcome,
            reward=done.verdict.reward,
            text=turns[-1],
            finish=done.finish_reason,
            num_prompt=num_prompt,
            num_sampled=done.num_sampled,
            num_turns=done.num_turns,
            entropy=-float(np.concatenate([segment.logprobs for segment in sampled]).mean(dtype=np.float64)),
            seconds=self._lap(),
            num_between=done.num_tokens - done.num_sampled - num_prompt,
            turns=turns if len(turns) > 1 and domain.is_graded else (),
        )

    def _lap(self) -> float:
        """Seconds since the last call."""
        before, self._ended_s = self._ended_s, time.perf_counter()
        return self._ended_s - before

    def _keep(self, sample: Sample) -> None:
        with writing(self._path), self._path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(sample) + b"\n")
        self.samples[sample.domain, sample.item, sample.number] = sample


async def _fails_with(engine: EngineRole) -> None:
    """Wait until the engine fails; an evaluation does not restart it. Raises `UserError`: it failed."""
    while not (why := await engine.failure()):
        await asyncio.sleep(1.0)
    raise UserError(
        f"{why.splitlines()[0]}; finished samples are kept: repeat the command, with a lower --max-batch if memory ran out"
    )


async def score_baselines(
    name: str, domain: Domain, source: TaskSource, rewards: RewardRole, seed: int
) -> dict[str, np.ndarray]:
    """Scores [P] of each trivial baseline. Answers without a verdict are tried again where others got one, then left out, counted in
    ``domain.num_unscored`` and reported.

    The baselines are an empty answer (``empty``), ``0`` (``constant``), the most frequent correct answer of other problems (``frequent``), a
    random one of those (``another``), a call of every tool without arguments (``calls``), and the source's own (`TaskSource.baselines`).
    """
    asked = list(domain.asked.values())
    golds = [source.problem(item).gold for item in domain.donors]
    draw = np.random.default_rng(key_of(seed, _DRAW, crc32(name.encode())))
    others = [golds[int(place)] for place in draw.integers(len(golds), size=len(asked))]
    policies: list[dict[str, Transcript]] = []
    for problem, other in zip(asked, others, strict=True):
        texts = {"empty": "", "constant": "0"}
        if any(golds):
            texts |= {"frequent": Counter(golds).most_common(1)[0][0], "another": other}
        policy: dict[str, Transcript] = {
            kind: ({"role": "assistant", "content": text},) for kind, text in texts.items()
        }
        calls = [{"function": {"name": each["function"]["name"], "arguments": {}}} for each in schemas(source, problem)]
        if calls:
            called = {"role": "assistant", "content": "", "tool_calls": calls}
            policy["calls"] = (called, *[{"role": "tool"} for _ in calls], {"role": "assistant", "content": ""})
        policies.append(policy | dict(source.baselines(problem)))
    found = {}
    for kind in [kind for kind in policies[0] if all(kind in policy for policy in policies)]:
        requests = [
            RewardRequest(
                name, problem.item, policy[kind][-1]["content"], policy[kind], key_of(seed, _DRAW, problem.item) >> 1
            )
            for problem, policy in zip(asked, policies, strict=True)
        ]
        verdicts = await asyncio.gather(*[rewards.score(request) for request in requests])
        for _ in range(_TRIES - 1):
            again = [at for at, each in enumerate(verdicts) if each.outcome is Outcome.INFRA]
            if len(again) == len(verdicts):  # a judge that is down would take its whole time limit again
                break
            retried = await asyncio.gather(*[rewards.score(requests[at]) for at in again])
            for at, verdict in zip(again, retried, strict=True):
                verdicts[at] = verdict
        values = [domain.value(each.outcome, each.reward) for each in verdicts]
        if failed := [each.detail for each in verdicts if each.outcome is Outcome.INFRA]:
            num = f"{len(failed)} of {counted(len(verdicts), 'answer')}"
            say(f"sources.{name}: baseline {kind}: {num} could not be scored: {failed[-1]}", style="yellow")
            domain.num_unscored += len(failed)
        if len(failed) < len(verdicts):
            found[kind] = problem_means(np.array(values).reshape(-1, source.variants))
    return found


def read_samples(path: Path) -> dict[Key, Sample]:
    """Samples of earlier calls. An incomplete last line, left by a killed process, is removed. Raises `UserError`: a damaged file."""
    content = path.read_bytes() if path.is_file() else b""
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    try:
        samples = [msgspec.json.decode(line, type=Sample) for line in complete.splitlines()]
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: damaged: {error}; evaluate again into another folder") from None
    return {(sample.domain, sample.item, sample.number): sample for sample in samples}


def problem_means(value_PS: np.ndarray) -> np.ndarray:
    """Mean of the judged samples of each problem; NaN without any."""
    return np.ma.masked_invalid(value_PS).mean(1).filled(math.nan)
