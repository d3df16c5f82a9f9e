"""Evaluation of a checkpoint on suites of task sources: scores with intervals, trivial baselines, cost.

Shape letters: P problems, S samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from stretto.base.config import check_unchanged, completed
from stretto.base.errors import UserError
from stretto.base.paths import claimed, quoted, read_json, write_text
from stretto.base.records import find_lineage, history
from stretto.base.trajectory import Outcome
from stretto.evals.diversity import MEASURES, SAME_AT, diversity
from stretto.evals.scores import (
    Interval,
    majority_at_k,
    mean_interval,
    pass_at_k,
    pass_hat_k,
    student_interval,
)
from stretto.model.checkpoint import read_config, weights_hash
from stretto.model.counts import Counts, count
from stretto.model.spec import Subnet
from stretto.post.suite_samples import (
    ASKED_FILE,
    SAMPLES_FILE,
    Domain,
    Key,
    Sample,
    Sampler,
    problem_means,
    read_samples,
)
from stretto.post.suites import EvalOptions, SuiteConfig, opened_sources, samples_at, suites_of
from stretto.runtime.runtime import to_end
from stretto.tasks.math import as_number
from stretto.tasks.task import Found, bare
from stretto.text.similar import similarity_NN
from stretto.text.tokenizer import load_tokenizer

T = TypeVar("T")
RESULT_FILE = "eval.json"
_MAX_VOTE_CHARS = 200
"""Longest answer, in characters, that maj@k compares with others: longer texts are never equal."""
_KS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Values of k of pass@k, pass^k and maj@k; the number of samples is added."""


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
    """Mean −log p of sampled tokens, nats; None: no token was sampled, or not measured."""
    flops: float = 0.0
    """Mean FLOPs of the forward passes of a sample, computed as `Cost.flops_per_token`."""
    num_off_format: int = 0
    """Number of answers, correct or not, without the marker that the prompt asks for; their last line is scored as the answer."""
    places: dict[str, Place] = field(default_factory=dict)
    """Option positions of multiple choice, by letter."""
    num_unscored: int = 0
    """Number of answers of baselines without a verdict."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of an evaluation."""

    total_params: int
    active_params: int
    flops_per_token: float
    """Forward FLOPs per token, computed from the shape and the samples' lengths."""
    num_prompt: int
    """Number of prompt tokens of the samples with an answer."""
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
    """Evaluate the checkpoint ``folder`` on ``suites`` and write ``out``. Finished samples in ``out`` are kept; samples and answers of
    baselines without a verdict are retried. ``subnet``: size of the network; None: the full network.

    Raises:
        UserError: a bad source, another evaluation in ``out``, or more than `MOST_INFRA` infrastructure errors in a domain.
    """
    config, tokenizer = read_config(folder), load_tokenizer(folder)
    suites = {key: _resolved(key, suite, options, config.max_positions) for key, suite in suites.items()}
    asked = options.model_dump(mode="json", include={"seed", "baselines"}) | {
        "weights": weights_hash(folder),
        "subnet": None if subnet is None else subnet.model_dump(mode="json"),
        "prompt": "plain text" if tokenizer.chat_template is None else "chat template",
        "suites": {key: suite.model_dump(mode="json") for key, suite in suites.items()},
    }
    with claimed(out):
        if (out / ASKED_FILE).is_file():
            before = read_json(out / ASKED_FILE)
            before["suites"] = {name: completed(SuiteConfig, suite) for name, suite in before["suites"].items()}
            check_unchanged(
                before,
                asked,
                out,
                ("baselines", "embed"),  # older versions asked for ``embed``, too
                work="evaluation",
                remedy="choose another folder with --out",
                options={"problems": "--limit", "samples": "--samples", "temperature": "--temperature"},
            )
        if (out / RESULT_FILE).is_file():
            found = read_evaluation(out)
            if found.asked == asked and not any(each.num_infra or each.num_unscored for each in found.domains.values()):
                return found
        sampler = Sampler(folder, tokenizer, out, options, suites, config.max_positions)
        to_end(sampler.run(subnet, device, asked))
        counts, samples = count(config, subnet or config.full()), sampler.samples
        domains = {name: _result(name, domain, samples, options, counts) for name, domain in sampler.domains.items()}
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


def _cost(counts: Counts, samples: Sequence[Sample]) -> Cost:
    generated = [one for one in samples if one.is_generated]
    flops = _flops(counts, generated) / max(1, sum(one.num_tokens for one in generated))
    num_prompt, num_sampled = sum(one.num_prompt for one in generated), sum(one.num_sampled for one in generated)
    seconds = sum(one.seconds for one in samples)
    return Cost(counts.total_params, counts.active_params, flops, num_prompt, num_sampled, seconds)


def _flops(counts: Counts, samples: Sequence[Sample]) -> float:
    """FLOPs of all forward passes: each token is computed once and attends to half of its sample's tokens, on average."""
    return sum(counts.forward_flops(each.num_tokens, (each.num_tokens + 1) / 2) for each in samples)


def read_result(path: Path, kind: type[T], remedy: str) -> T:
    """Read a record that `write_result` wrote. Raises `UserError` with ``remedy``: it is not readable."""

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
    except (OSError, msgspec.MsgspecError) as error:
        kind_name = kind.__name__.lower()
        raise UserError(f"{path}: not readable as {kind_name}: {error}; {remedy}") from None


def read_evaluation(out: Path) -> Evaluation:
    """The finished evaluation in ``out``. Raises `UserError`: there is none, or it is not readable."""
    path, command = out / RESULT_FILE, f"`stretto eval … -o {quoted(out)}`"
    if not path.is_file():
        raise UserError(f"{path}: no such file; {command} makes or finishes it")
    return read_result(path, Evaluation, f"repeat {command} in another folder")


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


def _result(
    name: str,
    domain: Domain,
    samples: Mapping[Key, Sample],
    options: EvalOptions,
    counts: Counts,
) -> DomainResult:
    num, every = domain.source.variants * domain.num_samples, [samples.get(key) for key in domain.keys(name)]
    table = [every[at : at + num] for at in range(0, len(every), num)]
    groups = [[one for one in row if one is not None] for row in table]
    own = [one for group in groups for one in group]
    generated = [one for one in own if one.is_generated]
    read = {(one.item, one.number): domain.source.read(domain.asked[one.item], one.text) for one in own}
    value_PS = np.array([[domain.value(one.outcome, one.reward) if one else math.nan for one in row] for row in table])
    votes_PS = [[_vote(read[one.item, one.number].text) if one else None for one in row] for row in table]
    ks = [] if domain.is_graded else [k for k in _KS if k < num] + [num]
    majorities = {k: majority_at_k(value_PS, votes_PS, k, options.seed) for k in ks if k > 2}
    texts = [[one.text for one in group if one.is_generated] for group in groups]
    kinds = [diversity(each, similarity_NN(each, "characters"), SAME_AT) for each in texts if len(each) > 1]
    measures = {measure: [each[measure] for each in kinds] for measure in MEASURES}
    return DomainResult(
        **scored(name, value_PS, ks, options.seed),
        suite=domain.suite,
        is_graded=domain.is_graded,
        items=list(domain.problems),
        majority_at={k: mean_interval({name: shares_P}, options.seed) for k, shares_P in majorities.items()},
        baselines={kind: mean_interval({name: each_P}, options.seed) for kind, each_P in domain.baselines.items()},
        diversity={key: student_interval(each) for key, each in measures.items() if not np.isnan(each).all()},
        entropy=float(np.mean([one.entropy for one in generated])) if generated else None,
        num_tokens=float(np.mean([one.num_sampled for one in own])),
        finishes=dict(Counter(one.finish for one in own)),
        num_infra=len(domain.failures),
        num_unscored=domain.num_unscored,
        flops=_flops(counts, generated) / max(1, len(own)),
        num_off_format=sum(not read[one.item, one.number].is_marked for one in generated),
        places=_places(domain, own, read),
    )


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
    answer = bare(answer).casefold()
    if not answer or len(answer) > _MAX_VOTE_CHARS:
        return None
    number = as_number(answer)
    return answer if number is None else str(number)
