"""Evaluation of a checkpoint on suites of task sources: samples, scores, trivial baselines, cost.

Answers are generated and scored as in reinforcement learning, with the same agent loop, verifiers, tools and turns. Each finished
sample is a line of `SAMPLES_FILE`. A second call resumes with the same result, because every sample has its own seed. A sample
without a verdict is an infrastructure error: it is left out and retried by the next call. With too many of them there is no score.

Shape letters: P problems, S samples.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import msgspec
import numpy as np
import torch
from pydantic import Field

from stretto.base.config import Config, check_unchanged, read_tree, validate
from stretto.base.errors import UserError, nearest
from stretto.base.paths import claimed, read_json, write_json, write_text, writing
from stretto.base.track import progress, say
from stretto.base.trajectory import Outcome, Task
from stretto.data.loader import key_of
from stretto.evals.diversity import MEASURES, SAME_AT, cosines, diversity, embed
from stretto.evals.scores import (
    MOST_INFRA,
    Interval,
    interval,
    majority_at_k,
    mean_interval,
    pass_at_k,
    pass_hat_k,
    resampled,
)
from stretto.flow.agent import AgentRole, GroupFailed
from stretto.flow.clients import Clients, RewardRequest
from stretto.flow.launch import SourceTables
from stretto.flow.reward import RewardRole
from stretto.flow.rollout import EngineRole, open_rollout_engine
from stretto.learning.dialogue import Dialogue
from stretto.learning.recipe import RlRecipe, SandboxConfig, SourceConfig
from stretto.model.checkpoint import read_checkpoint, read_config, weights_hash
from stretto.model.spec import Counts, Subnet, count
from stretto.runtime.runtime import to_end
from stretto.tasks.math import as_number
from stretto.tasks.session import schemas
from stretto.tasks.task import FIRST_REPORTED, Found, Problem, TaskSource, spoken
from stretto.text.similar import similarity_NN
from stretto.text.tokenizer import load_tokenizer

ASKED_FILE, SAMPLES_FILE, RESULT_FILE = "asked.json", "samples.jsonl", "eval.json"
SUITES = Path(__file__).with_name("suites.toml")
_DONORS, _DRAW = 200, 7
"""Number of other problems whose answers baselines use; purpose of their random seed."""
_LEASE_S = 7200.0
"""Time limit of a sample, seconds: a slow engine is not a failure."""
_CACHE_BYTES = 1 << 24
"""KV cache bytes per sequence of a batch."""
_LONGEST_VOTE = 200
"""Longest answer, in characters, that maj@k compares with others: prose never agrees."""
_KS = (1, 2, 4, 8, 16, 32, 64, 128)
"""For pass@k, pass^k and maj@k, beside the number of samples."""
BASELINES: Final = ("empty", "constant", "frequent", "another", "calls")
"""Trivial baselines: an empty answer; ``0``; the most frequent correct answer of other problems; a random one of those; a call of
every tool without arguments. A source may have more of its own (`TaskSource.baselines`)."""


class SuiteConfig(Config):
    """A table of a suite file."""

    sources: dict[str, SourceConfig] = Field(min_length=1)
    """Sources by name; each is a domain."""
    data: str = ""
    """Content of the file that the suite needs (``--suite NAME=PATH``); empty: none."""
    problems: int = Field(default=100, gt=0)
    """Number of problems per source; all problems of a smaller source."""
    max_tokens: int = Field(default=512, gt=0)
    """Tokens that the model may write per sample, over all turns."""
    max_turns: int = Field(default=1, gt=0)
    temperature: float = Field(default=1.0, ge=0)
    sandbox: SandboxConfig = SandboxConfig()


class EvalOptions(Config):
    """Options of `evaluate`."""

    samples: int = Field(default=4, gt=0)
    """Number of samples per problem."""
    limit: int | None = Field(default=None, gt=0)
    """Number of problems per source; None: the suite's."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; None: the suite's."""
    seed: int = 0
    baselines: bool = True
    embed: Path | None = None
    """Checkpoint whose hidden states measure the similarity of answers; None: character trigrams."""
    threads: int = Field(default=1, gt=0)
    max_batch: int = Field(default=64, gt=0)


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
    def said(self) -> list[str]:
        """Text of each turn without the reasoning."""
        return [spoken(turn) for turn in self.turns or (self.text,)]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_sampled + self.num_between


@dataclass(frozen=True, slots=True)
class Place:
    """One option position of multiple choice, and how often it is chosen."""

    chosen: float
    """Share of the readable answers that choose this position."""
    right: float
    """Share of these answers for which this position is correct; an unbiased model chooses it as often."""
    recall: float | None
    """Recall: share of the answers that choose it where it is correct; None: never correct."""


@dataclass(frozen=True, slots=True)
class DomainResult:
    """Result of a domain. Intervals are bootstrap intervals over its problems."""

    suite: str
    is_graded: bool
    """Whether the score is the mean reward (open-ended answers) instead of the share of correct answers."""
    items: list[int]
    values: list[float | None]
    """Mean over the samples of each problem, used by comparisons; None: no verdict."""
    score: Interval
    pass_at: dict[int, Interval]
    majority_at: dict[int, Interval]
    baselines: dict[str, Interval]
    diversity: dict[str, Interval]
    entropy: float | None
    """Mean −log p of sampled tokens; None: not reported by another harness."""
    num_tokens: float
    """Mean number of sampled tokens per sample."""
    finishes: dict[str, int]
    num_infra: int
    """Number of samples without a verdict (infrastructure errors)."""
    pass_hat: dict[int, Interval] = field(default_factory=dict)
    """pass^k: all of k samples are correct. Older evaluations lack this and the following fields."""
    flops: float = 0.0
    """Mean FLOPs of the forward passes of a sample, computed as `Cost.flops_per_token`."""
    num_unread: int = 0
    """Number of wrong answers without an answer in the required format."""
    places: dict[str, Place] = field(default_factory=dict)
    """Option positions of multiple choice, by letter."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of an evaluation."""

    total_params: int
    active_params: int
    flops_per_token: float
    """Forward FLOPs per token, computed from the shape and the samples' lengths."""
    num_prompt: int
    num_sampled: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation, as `RESULT_FILE` holds it."""

    name: str
    asked: dict[str, Any]
    """Settings, and hash of the weights: two evaluations are comparable if suites and settings are equal."""
    mean: Interval
    """Mean of the domains' scores."""
    domains: dict[str, DomainResult]
    cost: Cost


def parse_suites(named: Sequence[str], beside: Collection[str] = ()) -> dict[str, SuiteConfig]:
    """Suites by name, from ``NAME`` or ``NAME=DATA`` of the shipped ones, a TOML or JSON file with tables of that form, or an RL recipe:
    its sources, and as many problems as it holds out. Several may be joined by commas. ``beside``: what else the user may name.
    Raises `UserError`: no such suite or file, a suite without its data, or two suites or domains of one name."""
    found: dict[str, SuiteConfig] = {}

    def add(key: str, suite: SuiteConfig) -> None:
        if found.setdefault(key, suite) != suite:
            raise UserError(f"--suite: two suites are called {key}; rename one, or evaluate it into another folder")

    for text in (part for each in named for part in each.split(",")):
        name, _, data = text.partition("=")
        path = Path(name)
        is_file = path.suffix in (".toml", ".json")
        tree = read_tree(path if is_file else SUITES)
        if not is_file and name not in tree:
            known = [*tree, *beside]
            raise UserError(
                f"--suite {name}: no such suite{nearest(name, known)}; one of {', '.join(known)}, or FILE.toml"
            )
        if not tree:
            raise UserError(f"--suite {name}: contains no suite; add a table [NAME.sources.DOMAIN]")
        if "train" in tree:
            recipe = validate(RlRecipe, tree, str(path))
            told = {key: getattr(recipe.rollout, key) for key in ("max_tokens", "max_turns", "temperature")}
            num = -(-recipe.train.eval_prompts // len(recipe.sources))
            add(path.stem, SuiteConfig(sources=recipe.sources, problems=num, sandbox=recipe.sandbox, **told))
            continue
        for key in tree if is_file else [name]:
            suite = validate(SuiteConfig, tree[key], f"{name}: {key}")
            if suite.data and not data:
                raise UserError(f"--suite {name}: needs its data: {name}=PATH, {suite.data}")
            given = {"path": data} if data else {}
            sources = {each: source.replace(args=source.args | given) for each, source in suite.sources.items()}
            add(key, suite.replace(sources=sources))
    names = Counter(name for suite in found.values() for name in suite.sources)
    if twice := [name for name, num in names.items() if num > 1]:
        raise UserError(f"--suite: {twice[0]}: two sources have this name; rename one")
    return found


def evaluate(
    folder: Path,
    suites: Mapping[str, SuiteConfig],
    out: Path,
    options: EvalOptions,
    *,
    name: str,
    subnet: Subnet | None = None,
    device: str = "cpu",
) -> Evaluation:
    """Evaluate the checkpoint ``folder`` on ``suites`` and write ``out``. Finished samples in ``out`` are kept; samples without a verdict
    are retried. ``subnet``: size of the network; None: the full network.

    Raises:
        UserError: a bad source, another evaluation in ``out``, or more than `MOST_INFRA` infrastructure errors in a domain.
    """
    config = read_config(folder)
    suites = {key: _told(suite, options, config.max_positions) for key, suite in suites.items()}
    asked = options.model_dump(mode="json", exclude={"limit", "temperature", "threads", "max_batch"}) | {
        "weights": weights_hash(folder),
        "subnet": None if subnet is None else subnet.model_dump(mode="json"),
        "suites": {key: suite.model_dump(mode="json") for key, suite in suites.items()},
    }
    with claimed(out):
        if (out / ASKED_FILE).is_file():
            check_unchanged(read_json(out / ASKED_FILE), asked, out, free=("baselines", "embed"))
        if (out / RESULT_FILE).is_file():
            found = read_evaluation(out)
            if found.asked == asked and not any(domain.num_infra for domain in found.domains.values()):
                return found
        sitting = _Sitting(folder, out, options, suites, config.max_positions)
        to_end(sitting.answer(subnet, device, asked))
        counts = count(config, subnet or config.full())
        domains, mean = results(sitting.domains, sitting.samples, options, counts)
        cost = _cost(counts, list(sitting.samples.values()))
        found = Evaluation(name, asked, mean, domains, cost)
        write_result(out / RESULT_FILE, found)
    return found


def write_result(path: Path, found: Any) -> None:
    """Write a record as JSON; numbers that are not finite become null."""
    write_text(path, msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n")


def _told(suite: SuiteConfig, options: EvalOptions, most: int) -> SuiteConfig:
    """``suite`` as it is asked of a network of so many positions."""
    temperature = suite.temperature if options.temperature is None else options.temperature
    if temperature == 0 and options.samples > 1:
        raise UserError(
            f"--samples {options.samples}: at temperature 0 (greedy decoding) all samples are equal; give --samples 1"
        )
    tokens, num = min(suite.max_tokens, most - 1), options.limit or suite.problems
    return suite.replace(problems=num, temperature=temperature, max_tokens=tokens)


def _cost(counts: Counts, samples: Sequence[Sample]) -> Cost:
    flops = _flops(counts, samples) / max(1, sum(sample.num_tokens for sample in samples))
    sums = (sum(getattr(one, field) for one in samples) for field in ("num_prompt", "num_sampled", "seconds"))
    return Cost(counts.total_params, counts.active_params, flops, *sums)


def _flops(counts: Counts, samples: Sequence[Sample]) -> float:
    """Of all forward passes, each token computed once; of the keys before it a token sees half, on average."""
    return sum(counts.forward_flops(each.num_tokens, (each.num_tokens + 1) / 2) for each in samples)


def read_evaluation(out: Path) -> Evaluation:
    """What lies in ``out``. Raises `UserError`: no finished evaluation does."""
    path = out / RESULT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Evaluation)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `stretto eval … -o {out}` makes or finishes it") from None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path}: not readable as an evaluation: {error}; evaluate again into another folder") from None


def suites_of(asked: Mapping[str, Any]) -> dict[str, SuiteConfig]:
    """Of an evaluation's record."""
    return {name: validate(SuiteConfig, told, name) for name, told in asked["suites"].items()}


def write_right_answers(out: Path, path: Path) -> int:
    """Write the right answers that the finished evaluation ``out`` holds to ``path``, as the conversations that SFT reads, a line of
    JSON each; returns how many. A text is one for its problem however often it was given; ``domain`` is the source.

    Raises:
        UserError: the evaluation is not finished, nothing was right, a suite has several turns, of which only the last is kept,
            or a source where nothing is right or wrong.
    """
    found = read_evaluation(out)
    suites = suites_of(found.asked)
    for name, suite in suites.items():
        if suite.max_turns > 1:
            raise UserError(
                f"{out}: suite {name} has up to {suite.max_turns} turns, and the last is kept alone; leave it out"
            )
    if graded := [name for name, domain in found.domains.items() if domain.is_graded]:
        raise UserError(f"{out}: {graded[0]}: nothing is right or wrong there, but better or worse; leave it out")
    samples = read_samples(out / SAMPLES_FILE).values()
    right = sorted({(one.domain, one.item, one.text) for one in samples if one.outcome is Outcome.OK})
    if not right:
        raise UserError(f"{out}: no answer is right; take problems that the network solves now and then")
    with ExitStack() as held:
        tables = [SourceTables(suite.sources, suite.sandbox) for suite in suites.values()]
        sources = {name: source for table in tables for name, source in held.enter_context(table.opened()).items()}
        lines = [
            {
                "domain": name,
                "messages": [*sources[name].problem(item).messages, {"role": "assistant", "content": text}],
            }
            for name, item, text in right
        ]
    write_text(path, "".join(f"{msgspec.json.encode(line).decode()}\n" for line in lines))
    return len(lines)


@dataclass(slots=True)
class Domain:
    """What is asked of a source. Written by `_Sitting`."""

    suite: str
    source: TaskSource
    """Read from, not asked, once it is closed."""
    items: range
    """Of whole problems."""
    donors: range
    """Items that are not asked."""
    asked: dict[int, Problem]
    prompts: dict[int, tuple[str, int]]
    """By item: its last message, and its tokens."""
    baselines: dict[str, np.ndarray] = field(default_factory=dict)
    """Scores [P] of each kind of `BASELINES`, and of the source's own."""
    failures: list[str] = field(default_factory=list)
    """Why samples could not be judged."""

    @property
    def is_graded(self) -> bool:
        """Nothing is right or wrong, but better or worse."""
        return not self.source.is_verifiable

    @property
    def problems(self) -> range:
        """Numbers of the problems: of their items, where each is one."""
        return range(self.items.start // self.source.variants, self.items.stop // self.source.variants)

    def value(self, outcome: Outcome, reward: float) -> float:
        """A sample's part of the score; NaN where nobody could judge it."""
        if outcome is Outcome.INFRA:
            return math.nan
        return reward if self.is_graded else float(outcome is Outcome.OK)


Key = tuple[str, int, int]
"""A sample: domain, item, number."""
Transcript = tuple[Mapping[str, Any], ...]
"""All messages that follow a prompt."""


class _Sitting:
    """What is there of an evaluation, and the drawing of what is missing."""

    def __init__(self, folder: Path, out: Path, options: EvalOptions, suites: Mapping[str, SuiteConfig], most: int):
        self._folder, self._options, self._suites, self._most = folder, options, suites, most
        self._dialogue = Dialogue(load_tokenizer(folder))
        self._path, self._ended_s = out / SAMPLES_FILE, time.perf_counter()
        self._ordinals = itertools.count()
        self.domains: dict[str, Domain] = {}
        self.samples = read_samples(self._path)

    async def answer(self, subnet: Subnet | None, device: str, asked: Mapping[str, Any]) -> None:
        """Draw and judge what is missing, one suite after the other, on one engine; before, look at every problem, and then
        write down what is ``asked``."""
        with ExitStack() as held:
            opened = {}
            for name, suite in self._suites.items():
                tables = SourceTables(suite.sources, suite.sandbox)
                # agent and verifier ask theirs from threads of their own
                opened[name] = held.enter_context(tables.opened()), held.enter_context(tables.opened())
                for key, source in opened[name][0].items():
                    source.validate()
                    self.domains[key] = self._planned(name, suite, source)
            write_json(self._path.with_name(ASKED_FILE), asked)
            any_recipe = self._recipe(next(iter(self._suites.values())))
            engine = EngineRole(partial(open_rollout_engine, any_recipe, self._folder, device), subnet=subnet)
            held.callback(engine.close)
            for name in opened:
                await self._answer_suite(name, engine, *opened[name])

    def _recipe(self, suite: SuiteConfig) -> RlRecipe:
        """What the agent loop reads of a run."""
        tokens, options = suite.max_tokens, self._options
        rollout = {"max_tokens": tokens, "chunk_tokens": tokens, "max_turns": suite.max_turns}
        rollout |= {"max_batch": options.max_batch, "cache_bytes": _CACHE_BYTES * options.max_batch}
        told = {
            "sources": suite.sources,
            "sandbox": suite.sandbox,
            "rollout": rollout | {"threads": options.threads},
            "failures": {"lease_s": _LEASE_S, "max_attempts": 3},
            "replay": "off",
            "train": {"steps": 1, "prompts": 1, "seq_len": self._most},  # a run trains; of this, it reads the length
            "optim": {"lr": 1.0},
        }
        return validate(RlRecipe, told, "suite")

    def _planned(self, suite_name: str, suite: SuiteConfig, source: TaskSource) -> Domain:
        size, num = source.num_items, suite.problems * source.variants
        items = range(FIRST_REPORTED, FIRST_REPORTED + num) if size is None else range(max(0, size - num), size)
        if len(items) < num:
            here = len(items) // source.variants
            say(f"sources.{source.name}: {here} problems in all, fewer than the {suite.problems} of the suite")
        donors = range(items.stop, items.stop + _DONORS) if size is None else range(min(_DONORS, items.start))
        asked = {item: source.problem(item) for item in items}
        if source.compares and not all(problem.gold for problem in asked.values()):
            raise UserError(
                f"sources.{source.name}: judges answers beside each other, and one model alone has no opponent: give references, or "
                "a rubric, by which two evaluations may meet, too: stretto compare A B --battle"
            )
        prompts = {}
        for item, problem in asked.items():
            num_tokens = len(self._dialogue.prompt(problem.messages, schemas(source, problem)))
            prompts[item] = str(problem.messages[-1]["content"]), num_tokens
        return Domain(suite_name, source, items, donors or items, asked, prompts)

    async def _answer_suite(
        self, name: str, engine: EngineRole, sources: Mapping[str, TaskSource], judging: Mapping[str, TaskSource]
    ) -> None:
        suite, options = self._suites[name], self._options
        recipe = self._recipe(suite)
        rewards = RewardRole(lambda: judging, recipe.runtime.rewards.deadline_s)
        clients, tokenizer = Clients([engine], rewards), self._dialogue.tokenizer
        agent = AgentRole(recipe, self._path.parent, tokenizer, lambda: sources, lambda caller: clients)
        work = [
            (key, item, num) for key in sources for item in self.domains[key].items for num in range(options.samples)
        ]
        missing = [key for key in work if key not in self.samples]
        slots = asyncio.Semaphore(2 * options.max_batch)
        with progress(f"evaluate {name}", len(work)) as advance:
            advance(len(work) - len(missing))

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
            except ExceptionGroup as several:  # a user's mistake first, then a fault of the code
                raise min(several.exceptions, key=lambda each: not isinstance(each, UserError)) from several
            finally:
                await agent.close()
                await rewards.close()

    async def _sampled(self, agent: AgentRole, suite: SuiteConfig, key: Key) -> Sample | None:
        """A sample; None: no verdict (infrastructure error)."""
        name, item, number = key
        domain = self.domains[name]
        num_prompt = domain.prompts[item][1]
        if num_prompt >= self._most:  # a network that cannot read a problem does not solve it
            return Sample(*key, Outcome.WRONG, 0.0, "", "prompt", num_prompt, 0, 0, 0.0, self._lap())
        seed = key_of(self._options.seed, crc32(name.encode()), item, number) >> 1
        task = Task(next(self._ordinals), name, item, 1, seed, suite.max_tokens)
        try:
            (done,) = (await agent.evaluate(task, suite.temperature)).trajectories
        except GroupFailed as failed:
            domain.failures.append(str(failed))
            num, num_failed = len(domain.items) * self._options.samples, len(domain.failures)
            if num_failed > MOST_INFRA * num:
                raise UserError(
                    f"sources.{name}: {num_failed} of {num} samples could not be judged, the last one of item {item}: {failed}; "
                    "correct that and repeat the command: finished samples are kept"
                ) from failed
            return None
        sampled = [segment for segment in done.segments if segment.is_sampled]
        surprise = -np.concatenate([segment.logprobs for segment in sampled]).mean(dtype=np.float64)
        outcome, reward = done.verdict.outcome, done.verdict.reward
        turns = tuple(self._dialogue.text(each.tokens) for each in sampled)
        told = turns if len(turns) > 1 and not domain.source.is_verifiable else ()
        counts = num_prompt, done.num_sampled, done.num_turns
        between = done.num_tokens - done.num_sampled - num_prompt
        head = (*key, outcome, reward, turns[-1], done.finish_reason, *counts)
        return Sample(*head, float(surprise), self._lap(), between, told)

    def _lap(self) -> float:
        before, self._ended_s = self._ended_s, time.perf_counter()
        return self._ended_s - before

    def _keep(self, sample: Sample) -> None:
        with writing(self._path), self._path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(sample) + b"\n")
        self.samples[sample.domain, sample.item, sample.number] = sample


async def _fails_with(engine: EngineRole) -> None:
    """Wait for the failure of the engine, which is not restarted here. Raises `UserError`: it failed."""
    while not (why := await engine.failure()):
        await asyncio.sleep(1.0)
    raise UserError(
        f"{why.splitlines()[0]}; finished samples are kept: repeat the command, with a lower --max-batch if memory ran out"
    )


async def score_baselines(
    name: str, domain: Domain, source: TaskSource, rewards: RewardRole, seed: int
) -> dict[str, np.ndarray]:
    """Scores [P] of each trivial baseline; a baseline without a verdict is left out and reported."""
    asked = list(domain.asked.values())
    golds = [source.problem(item).gold for item in domain.donors]
    draw = np.random.default_rng(key_of(seed, _DRAW, crc32(name.encode())))
    others = [golds[int(place)] for place in draw.integers(len(golds), size=len(asked))]
    texts = {"empty": [""] * len(asked), "constant": ["0"] * len(asked)}
    if any(golds):
        texts |= {"frequent": [Counter(golds).most_common(1)[0][0]] * len(asked), "another": others}
    told = {kind: [({"role": "assistant", "content": text},) for text in each] for kind, each in texts.items()}
    policies: list[dict[str, Transcript]] = [
        {kind: each[place] for kind, each in told.items()} for place in range(len(asked))
    ]
    for policy, problem in zip(policies, asked, strict=True):
        calls = [{"function": {"name": each["function"]["name"], "arguments": {}}} for each in schemas(source, problem)]
        if calls:
            called = {"role": "assistant", "content": "", "tool_calls": calls}
            policy["calls"] = (called, *[{"role": "tool"} for _ in calls], {"role": "assistant", "content": ""})
        policy |= source.baselines(problem)
    found = {}
    for kind in [kind for kind in policies[0] if all(kind in policy for policy in policies)]:
        requests = [
            RewardRequest(
                name, problem.item, policy[kind][-1]["content"], policy[kind], key_of(seed, _DRAW, problem.item) >> 1
            )
            for problem, policy in zip(asked, policies, strict=True)
        ]
        verdicts = await asyncio.gather(*map(rewards.score, requests))
        values = [domain.value(each.outcome, each.reward) for each in verdicts]
        values_PV = np.array(values).reshape(-1, source.variants)
        if np.isnan(values_PV).all():
            say(f"sources.{name}: baseline {kind}: could not be judged: {verdicts[0].detail}")
        else:
            found[kind] = problem_means(values_PV)
    return found


def read_samples(path: Path) -> dict[Key, Sample]:
    """What earlier sittings have left; a line that a kill has torn is taken off the file. Raises `UserError`: it is damaged."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    try:
        samples = [msgspec.json.decode(line, type=Sample) for line in whole.splitlines()]
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: damaged: {error}; evaluate again into another folder") from None
    return {(sample.domain, sample.item, sample.number): sample for sample in samples}


# From samples to scores


def results(
    domains: Mapping[str, Domain], samples: Mapping[Key, Sample], options: EvalOptions, counts: Counts
) -> tuple[dict[str, DomainResult], Interval]:
    """Results of ``samples`` by domain, and the mean of the domains' scores."""
    alike = _alike(domains, samples, options.embed)
    found = {name: _result(name, domain, samples, options, alike, counts) for name, domain in domains.items()}
    return found, mean_of(found, options.seed)


def mean_of(domains: Mapping[str, DomainResult], seed: int) -> Interval:
    """Mean of the domains' scores."""
    values = {name: np.array([result.values], np.float64) for name, result in domains.items()}
    return interval(np.mean([mean[:, 0] for mean in resampled(values, seed=seed).values()], axis=0))


Alike = Callable[[Sequence[Sample]], np.ndarray]


def _result(
    name: str, domain: Domain, samples: Mapping[Key, Sample], options: EvalOptions, alike: Alike, counts: Counts
) -> DomainResult:
    num = domain.source.variants * options.samples
    every = [samples.get((name, item, number)) for item in domain.items for number in range(options.samples)]
    table = [every[at : at + num] for at in range(0, len(every), num)]
    groups = [[one for one in row if one is not None] for row in table]
    own = [one for group in groups for one in group]
    read = {(one.item, one.number): domain.source.read(domain.asked[one.item], one.text) for one in own}
    value_PS = np.array([[domain.value(one.outcome, one.reward) if one else math.nan for one in row] for row in table])
    votes_PS = [[_vote(read[one.item, one.number].text) if one else None for one in row] for row in table]
    means_P = problem_means(value_PS)
    ks = [] if domain.is_graded else [k for k in _KS if k < num] + [num]

    spread = partial(mean_interval, name, seed=options.seed)
    kinds = [
        diversity([one.text for one in group], alike(group), SAME_AT["hidden" if options.embed else "characters"])
        for group in groups
        if len(group) > 1
    ]
    measured = {measure: [each[measure] for each in kinds] for measure in MEASURES}
    return DomainResult(
        suite=domain.suite,
        is_graded=domain.is_graded,
        items=list(domain.problems),
        values=[None if math.isnan(value) else value for value in means_P.tolist()],
        score=spread(means_P),
        pass_at={k: spread(pass_at_k(value_PS, k)) for k in ks},
        majority_at={k: spread(majority_at_k(value_PS, votes_PS, k, options.seed)) for k in ks if k > 2},
        baselines={kind: spread(values_P) for kind, values_P in domain.baselines.items()},
        diversity={name: spread(values) for name, values in measured.items() if not np.isnan(values).all()},
        entropy=float(np.mean([one.entropy for one in own])),
        num_tokens=float(np.mean([one.num_sampled for one in own])),
        finishes=dict(Counter(one.finish for one in own)),
        num_infra=len(domain.failures),
        pass_hat={k: spread(pass_hat_k(value_PS, k)) for k in ks},
        flops=_flops(counts, own) / max(1, len(own)),
        num_unread=sum(one.outcome is not Outcome.OK and not read[one.item, one.number].is_marked for one in own),
        places=_places(domain, own, read),
    )


def problem_means(value_PS: np.ndarray) -> np.ndarray:
    """By problem, of what was judged; NaN where nothing was."""
    return np.ma.masked_invalid(value_PS).mean(1).filled(math.nan)


def _places(domain: Domain, samples: Sequence[Sample], read: Mapping[tuple[int, int], Found]) -> dict[str, Place]:
    golds = {item: domain.source.read(problem, problem.gold).place for item, problem in domain.asked.items()}
    pairs = [(read[one.item, one.number].place, golds[one.item]) for one in samples]
    pairs = [(chosen, right) for chosen, right in pairs if chosen]
    chosen, right, both = Counter(one for one, _ in pairs), Counter(one for _, one in pairs), Counter(pairs)
    return {
        place: Place(
            chosen[place] / len(pairs),
            right[place] / len(pairs),
            both[place, place] / right[place] if right[place] else None,
        )
        for place in sorted(chosen | right)
    }


def _vote(answer: str) -> str | None:
    """What equal answers have in common; None: it has no equals."""
    answer = " ".join(answer.casefold().split())
    if not answer or len(answer) > _LONGEST_VOTE:
        return None
    number = as_number(answer)
    return answer if number is None else str(number)


def _alike(domains: Mapping[str, Domain], samples: Mapping[Key, Sample], folder: Path | None) -> Alike:
    """Similarity of the answers to one problem."""
    if folder is None:
        return lambda group: similarity_NN([one.text for one in group], "characters")
    model, tokenizer = read_checkpoint(folder, dtype=torch.float32).model, load_tokenizer(folder)
    # seen from where the problems are, which are the same for every model
    centres = {
        name: embed(model, tokenizer.encode_batch([text for text, _ in domain.prompts.values()])).mean(0)
        for name, domain in domains.items()
    }
    return lambda group: cosines(
        embed(model, tokenizer.encode_batch([one.text for one in group])), centres[group[0].domain]
    )
