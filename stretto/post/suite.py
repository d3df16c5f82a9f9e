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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import msgspec
import numpy as np
import torch
from pydantic import Field

from stretto.base.config import Config, check_unchanged, completed, read_tree, validate
from stretto.base.errors import UserError, nearest
from stretto.base.paths import claimed, read_json, write_json, write_text, writing
from stretto.base.records import find_lineage, history
from stretto.base.track import progress, say
from stretto.base.trajectory import Outcome, Task
from stretto.data.loader import key_of
from stretto.evals.diversity import MEASURES, SAME_AT, cosines, diversity, embed
from stretto.evals.scores import (
    MOST_INFRA,
    Interval,
    majority_at_k,
    mean_interval,
    pass_at_k,
    pass_hat_k,
    student_interval,
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
from stretto.runtime.store import FolderStore
from stretto.tasks.math import as_number
from stretto.tasks.session import schemas
from stretto.tasks.task import FIRST_REPORTED, Found, Problem, TaskSource, spoken
from stretto.text.similar import similarity_NN
from stretto.text.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")
ASKED_FILE, SAMPLES_FILE, RESULT_FILE = "asked.json", "samples.jsonl", "eval.json"
SUITES = Path(__file__).with_name("suites.toml")
DEFAULT_SAMPLES = 4
"""Number of samples per problem where answers are sampled; greedy decoding gives one."""
_DONORS, _DRAW = 200, 7
"""Number of other problems whose answers baselines use; purpose of their random seed."""
_LEASE_S = 7200.0
"""Time limit of a sample, seconds: a slow engine is not a failure."""
_CACHE_BYTES = 1 << 24
"""KV cache bytes per sequence of a batch."""
_MAX_VOTE_CHARS = 200
"""Longest answer, in characters, that maj@k compares with others: longer texts are never equal."""
_KS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Values of k of pass@k, pass^k and maj@k; the number of samples is added."""


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
    """Sampling temperature; 0: greedy decoding, as published figures of most benchmarks use it."""
    samples: int | None = Field(default=None, gt=0)
    """Number of samples per problem; None: 1 for greedy decoding, otherwise `DEFAULT_SAMPLES`."""
    sandbox: SandboxConfig = SandboxConfig()


class EvalOptions(Config):
    """Options of `evaluate`."""

    samples: int | None = Field(default=None, gt=0)
    """Number of samples per problem; None: the suite's."""
    limit: int | None = Field(default=None, gt=0)
    """Number of problems per source; None: the suite's."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; None: the suite's."""
    seed: int = 0
    baselines: bool = True
    """Whether to score trivial baselines."""
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
    def spoken(self) -> list[str]:
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
    """Result of a domain. Intervals are over its problems (`mean_interval`)."""

    suite: str
    is_graded: bool
    """Whether the score is the mean reward (open-ended answers) instead of the share of correct answers."""
    items: list[int]
    values: list[float | None]
    """Mean over the samples of each problem, used by comparisons; None: no verdict."""
    score: Interval
    pass_at: dict[int, Interval]
    pass_hat: dict[int, Interval]
    """pass^k: all of k samples are correct."""
    num_tokens: float
    """Mean number of sampled tokens per sample."""
    finishes: dict[str, int]
    num_infra: int
    """Number of samples without a verdict (infrastructure errors)."""
    majority_at: dict[int, Interval] = field(default_factory=dict)
    """maj@k. Other harnesses do not report this and the following fields."""
    baselines: dict[str, Interval] = field(default_factory=dict)
    diversity: dict[str, Interval] = field(default_factory=dict)
    entropy: float | None = None
    """Mean −log p of sampled tokens, nats."""
    flops: float = 0.0
    """Mean FLOPs of the forward passes of a sample, computed as `Cost.flops_per_token`."""
    num_off_format: int = 0
    """Number of answers, correct or not, without the marker that the prompt asks for; their last line is scored as the answer."""
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
    """Settings, prompt format and hash of the weights: two evaluations are comparable if suites and settings are equal."""
    mean: Interval
    """Mean of the domains' scores."""
    domains: dict[str, DomainResult]
    cost: Cost
    stages: list[str] = field(default_factory=list)
    """Run ids of the stages that led to the checkpoint, ancestors first, the checkpoint's own last; empty without a lineage."""


def parse_suites(named: Sequence[str], beside: Collection[str] = ()) -> dict[str, SuiteConfig]:
    """Suites by name. An element of ``named`` is ``NAME`` or ``NAME=DATA`` of a shipped suite, a TOML or JSON file with tables of suites, or
    an RL recipe (its sources, and as many problems as it holds out), or several of them joined by commas.

    Args:
        beside: further names that error messages offer.

    Raises:
        UserError: no such suite or file, a suite without its data, or two suites or two domains with the same name.
    """
    found: dict[str, SuiteConfig] = {}

    def add(key: str, suite: SuiteConfig) -> None:
        if found.setdefault(key, suite) != suite:
            raise UserError(f"--suite: two suites are called {key}; rename one, or evaluate it into another folder")

    for text in ",".join(named).split(",") if named else ():
        name, _, data = text.partition("=")
        path = Path(name)
        is_file = path.suffix in (".toml", ".json")
        tree = read_tree(path if is_file else SUITES)
        if not is_file and name not in tree:
            known = [*tree, *beside]
            raise UserError(
                f"--suite {name}: no such suite{nearest(name, known)}; use {', '.join(known)}, or FILE.toml"
            )
        if not tree:
            raise UserError(f"--suite {name}: contains no suite; add a table [NAME.sources.DOMAIN]")
        if "train" in tree:
            recipe = validate(RlRecipe, tree, str(path))
            limits = {key: getattr(recipe.rollout, key) for key in ("max_tokens", "max_turns", "temperature")}
            num = -(-recipe.train.eval_prompts // len(recipe.sources))
            add(path.stem, SuiteConfig(sources=recipe.sources, problems=num, sandbox=recipe.sandbox, **limits))
            continue
        for key in tree if is_file else [name]:
            suite = validate(SuiteConfig, tree[key], f"{name}: {key}")
            if suite.data and not data:
                raise UserError(f"--suite {name}: needs its data: {name}=PATH, {suite.data}")
            path_args = {"path": data} if data else {}
            sources = {each: source.replace(args=source.args | path_args) for each, source in suite.sources.items()}
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
    config, tokenizer = read_config(folder), load_tokenizer(folder)
    suites = {key: _resolved(key, suite, options, config.max_positions) for key, suite in suites.items()}
    asked = options.model_dump(mode="json", include={"seed", "baselines", "embed"}) | {
        "weights": weights_hash(folder),
        "subnet": None if subnet is None else subnet.model_dump(mode="json"),
        "prompt": "plain text" if tokenizer.chat_template is None else "chat template",
        "suites": {key: suite.model_dump(mode="json") for key, suite in suites.items()},
    }
    with claimed(out):
        if (out / ASKED_FILE).is_file():
            before = read_json(out / ASKED_FILE)
            before["suites"] = {name: completed(SuiteConfig, suite) for name, suite in before["suites"].items()}
            check_unchanged(before, asked, out, free=("baselines", "embed"))
        if (out / RESULT_FILE).is_file():
            found = read_evaluation(out)
            if found.asked == asked and not any(domain.num_infra for domain in found.domains.values()):
                return found
        sampler = _Sampler(folder, tokenizer, out, options, suites, config.max_positions)
        to_end(sampler.run(subnet, device, asked))
        counts, samples = count(config, subnet or config.full()), sampler.samples
        similarity = _similarity(sampler.domains, options.embed)
        domains = {
            name: _result(name, domain, samples, options, similarity, counts)
            for name, domain in sampler.domains.items()
        }
        cost = _cost(counts, list(samples.values()))
        mean = mean_of(domains, options.seed)
        found = Evaluation(name, asked, mean, domains, cost, [stage.run_id for stage in history(find_lineage(folder))])
        write_result(out / RESULT_FILE, found)
    return found


def write_result(path: Path, found: Any) -> None:
    """Write a record as JSON; numbers that are not finite become null."""
    write_text(path, msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n")


def _resolved(name: str, suite: SuiteConfig, options: EvalOptions, max_positions: int) -> SuiteConfig:
    """``suite`` under ``options``, for a network with so many positions. Raises `UserError`: several samples with greedy decoding."""
    temperature = suite.temperature if options.temperature is None else options.temperature
    num_samples = samples_at(temperature, options.samples or suite.samples, f"suite {name}")
    return suite.replace(
        problems=options.limit or suite.problems,
        temperature=temperature,
        samples=num_samples,
        max_tokens=min(suite.max_tokens, max_positions - 1),
    )


def samples_at(temperature: float, wanted: int | None, where: str) -> int:
    """Number of samples per problem: ``wanted``, or the default at this temperature. Raises `UserError`: several samples with greedy
    decoding; the message begins with the suite ``where``."""
    num_samples = wanted or (DEFAULT_SAMPLES if temperature > 0 else 1)
    if temperature == 0 and num_samples > 1:
        raise UserError(
            f"--samples {num_samples}: {where} decodes greedily (temperature 0), so all samples of a problem are equal; "
            "leave --samples out, or give a --temperature above 0"
        )
    return num_samples


def _cost(counts: Counts, samples: Sequence[Sample]) -> Cost:
    flops = _flops(counts, samples) / max(1, sum(sample.num_tokens for sample in samples))
    sums = (sum(getattr(one, field) for one in samples) for field in ("num_prompt", "num_sampled", "seconds"))
    return Cost(counts.total_params, counts.active_params, flops, *sums)


def _flops(counts: Counts, samples: Sequence[Sample]) -> float:
    """FLOPs of all forward passes: each token is computed once and attends to half of its sample's tokens, on average."""
    return sum(counts.forward_flops(each.num_tokens, (each.num_tokens + 1) / 2) for each in samples)


def read_result(path: Path, kind: type[T], command: str) -> T:
    """Read a record that `write_result` wrote. Raises `UserError`: no such file, or it is not readable; ``command`` writes it again."""

    def with_nan(tree: Any) -> Any:
        """``tree`` with NaN for null in intervals: JSON has no infinity."""
        if isinstance(tree, list):
            return [with_nan(each) for each in tree]
        if not isinstance(tree, dict):
            return tree
        ends = Interval.__dataclass_fields__
        return {key: math.nan if value is None and key in ends else with_nan(value) for key, value in tree.items()}

    try:
        return msgspec.convert(with_nan(msgspec.json.decode(path.read_bytes())), kind, str_keys=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `{command}` makes or finishes it") from None
    except (OSError, msgspec.MsgspecError) as error:
        kind_name = kind.__name__.lower()
        raise UserError(f"{path}: not readable as {kind_name}: {error}; repeat `{command}` in another folder") from None


def read_evaluation(out: Path) -> Evaluation:
    """The finished evaluation in ``out``. Raises `UserError`: there is none, or it is not readable."""
    return read_result(out / RESULT_FILE, Evaluation, f"stretto eval … -o {out}")


def suites_of(asked: Mapping[str, Any]) -> dict[str, SuiteConfig]:
    """The suites that an evaluation's settings record."""
    return {name: validate(SuiteConfig, suite, name) for name, suite in asked["suites"].items()}


def only_domains(suites: Mapping[str, SuiteConfig], domains: Collection[str]) -> dict[str, SuiteConfig]:
    """``suites`` with the sources named in ``domains`` only; suites without any are left out."""
    found = {}
    for name, suite in suites.items():
        if sources := {key: source for key, source in suite.sources.items() if key in domains}:
            found[name] = suite.replace(sources=sources)
    return found


def write_right_answers(out: Path, path: Path) -> int:
    """Write the correct answers of the finished evaluation ``out`` to ``path`` as conversations for SFT, one JSON object per line. Equal
    answers to a problem are written once. Returns the number of answers.

    Raises:
        UserError: the evaluation is not finished, no answer is correct, a suite has several turns (only the last one is stored),
            or a domain is graded.
    """
    found = read_evaluation(out)
    suites = suites_of(found.asked)
    for name, suite in suites.items():
        if suite.max_turns > 1:
            raise UserError(
                f"{out}: suite {name} has up to {suite.max_turns} turns, of which only the last is stored; leave it out"
            )
    if graded := [name for name, domain in found.domains.items() if domain.is_graded]:
        raise UserError(f"{out}: {graded[0]}: its answers are graded, not right or wrong; leave it out")
    samples = read_samples(out / SAMPLES_FILE).values()
    right = sorted({(one.domain, one.item, one.text) for one in samples if one.outcome is Outcome.OK})
    if not right:
        raise UserError(f"{out}: no answer is correct; use problems that the network solves now and then")
    lines = []
    with opened_sources(suites) as sources:
        for name, item, text in right:
            messages = [*sources[name].problem(item).messages, {"role": "assistant", "content": text}]
            lines.append({"domain": name, "messages": messages})
    write_text(path, "".join(f"{msgspec.json.encode(line).decode()}\n" for line in lines))
    return len(lines)


Key = tuple[str, int, int]
"""Key of a sample: domain, item, number."""
Transcript = tuple[Mapping[str, Any], ...]
"""All messages after the prompt."""


@contextmanager
def opened_sources(suites: Mapping[str, SuiteConfig]) -> Iterator[dict[str, TaskSource]]:
    """All sources of ``suites`` by name, open until the context ends."""
    with ExitStack() as stack:
        tables = [SourceTables(suite.sources, suite.sandbox) for suite in suites.values()]
        yield {name: source for table in tables for name, source in stack.enter_context(table.opened()).items()}


@dataclass(slots=True)
class Domain:
    """The problems of one source in an evaluation. Written by `_Sampler`."""

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


class _Sampler:
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
                # agent and verifier use their sources in different threads
                opened[name] = stack.enter_context(tables.opened()), stack.enter_context(tables.opened())
                for key, source in opened[name][0].items():
                    source.validate()
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
                await agent.close()
                await rewards.close()

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
    """Scores [P] of each trivial baseline. A baseline without a verdict is left out and reported.

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
        verdicts = await asyncio.gather(*map(rewards.score, requests))
        values = [domain.value(each.outcome, each.reward) for each in verdicts]
        values_PV = np.array(values).reshape(-1, source.variants)
        if np.isnan(values_PV).all():
            say(f"sources.{name}: baseline {kind}: could not be scored: {verdicts[0].detail}")
        else:
            found[kind] = problem_means(values_PV)
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


# From samples to scores


def mean_of(domains: Mapping[str, DomainResult], seed: int) -> Interval:
    """Mean of the domains' scores."""
    return mean_interval({name: np.array(each.values, np.float64) for name, each in domains.items()}, seed)


def scored(name: str, value_PS: np.ndarray, ks: Sequence[int], seed: int) -> dict[str, Any]:
    """Fields of a `DomainResult` that follow from the values of its samples; NaN: no verdict."""
    means_P = problem_means(value_PS)
    return {
        "values": [None if math.isnan(value) else value for value in means_P.tolist()],
        "score": mean_interval({name: means_P}, seed),
        "pass_at": {k: mean_interval({name: pass_at_k(value_PS, k)}, seed) for k in ks},
        "pass_hat": {k: mean_interval({name: pass_hat_k(value_PS, k)}, seed) for k in ks},
    }


Similarity = Callable[[Sequence[Sample]], np.ndarray]


def _result(
    name: str,
    domain: Domain,
    samples: Mapping[Key, Sample],
    options: EvalOptions,
    similarity: Similarity,
    counts: Counts,
) -> DomainResult:
    num, every = domain.source.variants * domain.num_samples, [samples.get(key) for key in domain.keys(name)]
    table = [every[at : at + num] for at in range(0, len(every), num)]
    groups = [[one for one in row if one is not None] for row in table]
    own = [one for group in groups for one in group]
    read = {(one.item, one.number): domain.source.read(domain.asked[one.item], one.text) for one in own}
    value_PS = np.array([[domain.value(one.outcome, one.reward) if one else math.nan for one in row] for row in table])
    votes_PS = [[_vote(read[one.item, one.number].text) if one else None for one in row] for row in table]
    ks = [] if domain.is_graded else [k for k in _KS if k < num] + [num]
    majorities = {k: majority_at_k(value_PS, votes_PS, k, options.seed) for k in ks if k > 2}
    same_at = SAME_AT["hidden" if options.embed else "characters"]
    kinds = [diversity([one.text for one in group], similarity(group), same_at) for group in groups if len(group) > 1]
    measures = {measure: [each[measure] for each in kinds] for measure in MEASURES}
    return DomainResult(
        **scored(name, value_PS, ks, options.seed),
        suite=domain.suite,
        is_graded=domain.is_graded,
        items=list(domain.problems),
        majority_at={k: mean_interval({name: shares_P}, options.seed) for k, shares_P in majorities.items()},
        baselines={kind: mean_interval({name: each_P}, options.seed) for kind, each_P in domain.baselines.items()},
        diversity={key: student_interval(each) for key, each in measures.items() if not np.isnan(each).all()},
        entropy=float(np.mean([one.entropy for one in own])),
        num_tokens=float(np.mean([one.num_sampled for one in own])),
        finishes=dict(Counter(one.finish for one in own)),
        num_infra=len(domain.failures),
        flops=_flops(counts, own) / max(1, len(own)),
        num_off_format=sum(not each.is_marked for each in read.values()),
        places=_places(domain, own, read),
    )


def problem_means(value_PS: np.ndarray) -> np.ndarray:
    """Mean of the judged samples of each problem; NaN without any."""
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
    """Canonical form of an answer, the same for equal answers; None: the answer has no vote."""
    answer = " ".join(answer.casefold().split())
    if not answer or len(answer) > _MAX_VOTE_CHARS:
        return None
    number = as_number(answer)
    return answer if number is None else str(number)


def _similarity(domains: Mapping[str, Domain], folder: Path | None) -> Similarity:
    """Similarity of the answers to one problem: by hidden states of the checkpoint ``folder``, else by character trigrams."""
    if folder is None:
        return lambda group: similarity_NN([one.text for one in group], "characters")
    model, tokenizer = read_checkpoint(folder, dtype=torch.float32).model, load_tokenizer(folder)
    # centred on the prompts, which are the same for every evaluated model
    centres = {
        name: embed(model, tokenizer.encode_batch([text for text, _ in domain.prompts.values()])).mean(0)
        for name, domain in domains.items()
    }
    return lambda group: cosines(
        embed(model, tokenizer.encode_batch([one.text for one in group])), centres[group[0].domain]
    )
