"""Advantages and weights of every token from finished samples. Imports no torch.

An algorithm is a function from all groups of an update to the advantages of every token of every sample: one of ours by name,
or a user's as ``file.py:function`` (`load_algorithm`). Its input are `Streams`; it returns a number, an array or a `Credit` for
each sample. The trainer reads nothing else. Bounds of ratios belong to `stretto.learning.objective`.

A sample of n tokens has n − 1 inputs, each with the next token as its target.

Shape letters: G samples of a group, S inputs of a sample, L MoE layers of the maximum network, K route slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import UserError
from stretto.base.plugin import load_named
from stretto.base.trajectory import Group, Outcome, Trajectory

_STD_FLOOR = 1e-4
"""Added to a group's standard deviation, as TRL does."""


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """One sample as arrays; written by `unroll`. Arrays whose names end in S describe the target of each input."""

    number: int
    """Number within the update."""
    trajectory: Trajectory
    """Turns (segments), verdict, finish reason."""
    reward: float
    """Reward of the verdict, minus the penalty of an overlong answer."""
    tokens: NDArray[np.int32]
    """[S + 1]."""
    logprobs_S: NDArray[np.float32]
    """Log-probability of the target, recorded when it was sampled."""
    versions_S: NDArray[np.int32]
    """Version of the weights with which the target was sampled."""
    routes_SLK: NDArray[np.unsignedinteger] | None
    """The engine's routes of the input."""
    mask_S: NDArray[np.bool_]
    """Whether the model sampled the target."""
    turns_S: NDArray[np.int32]
    """Number of the target's turn among the model's turns, from 0; −1 if the model did not sample it."""
    steps_S: NDArray[np.float32]
    """Rewards of turns and steps (`Verdict.steps`), each at the last token of its turn or step; 0 elsewhere."""
    source: str = ""
    """Source of the problem, by its name in the recipe."""
    prompts: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)
    """Tokens of the prompt by teacher, for teachers that read another prompt than the student."""
    scores: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """By network: log-probabilities [S] of the targets, 0 where not sampled. The networks are the recipe's ``teachers`` by name,
    ``policy`` (the trained network before the update) and, with a KL, ``reference``. Written by the trainer."""

    @property
    def num_inputs(self) -> int:
        return len(self.tokens) - 1

    @property
    def where(self) -> str:
        """Name of the sample in error messages."""
        return f"ordinal {self.trajectory.ordinal}, sample {self.trajectory.sample}"


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """An algorithm's result for one sample."""

    advantages: float | NDArray[np.floating]
    """One advantage for all sampled tokens, or [S]."""
    mask_S: NDArray[np.bool_] | None = None
    """Sampled tokens to train, by reward and by a teacher; the others count in no normaliser but ``constant``, which
    divides by the number of all samples. None: all."""
    weights_S: NDArray[np.floating] | None = None
    """Shares of the update's loss in place of the recipe's normaliser; for all samples or for none. Not beside distillation,
    which balances the sources."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenCredit:
    """Advantages and weights of one sample's tokens, 0 where the model did not sample the target. Written by `give_credit`."""

    advantages_S: NDArray[np.float32]
    weights_S: NDArray[np.float32]
    """Share of the update's loss, so that the loss is a plain sum over all tokens."""


Update = Sequence[Sequence[Streams]]
"""Samples by group: at least two per group where rewards are compared; fewer than requested if some did not end."""
Algorithm = Callable[[Update], Sequence[Sequence[float | NDArray[np.floating] | Credit]]]


def advantages(rewards_G: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    """Advantage [G] of each sample of a group of at least two.

    ``grpo`` (2402.03300): centred, divided by the sample standard deviation. ``dr_grpo`` (2503.20783): centred only, because the
    division gives more weight to prompts with similar rewards. ``rloo`` (2402.14740): minus the mean of the other samples, a
    baseline that does not depend on the sample itself.
    """
    num = len(rewards_G)
    assert num > 1 and np.isfinite(rewards_G).all(), f"rewards of a group: {rewards_G}"
    centred_G = rewards_G - rewards_G.mean()
    if rewards_G.max() == rewards_G.min():
        return np.zeros(num)  # the mean of equal numbers may differ from them by rounding
    if kind == "grpo":
        return centred_G / (rewards_G.std(ddof=1) + _STD_FLOOR)
    if kind == "rloo":
        return centred_G * (num / (num - 1))
    assert kind == "dr_grpo", f"advantage {kind!r}"
    return centred_G


def _by_outcome(groups: Update, kind: str) -> list[list[float]]:
    return [advantages(np.array([sample.reward for sample in group]), kind).tolist() for group in groups]


ALGORITHMS: Mapping[str, Algorithm] = {kind: partial(_by_outcome, kind=kind) for kind in ("grpo", "dr_grpo", "rloo")}
"""Values of ``loss.advantage`` other than ``file.py:function``."""


def load_algorithm(name: str) -> Algorithm:
    """The function named by ``loss.advantage``. Raises UserError: it does not exist or is not callable."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    function = load_named(name, "loss.advantage")
    if not callable(function):
        raise UserError(f"loss.advantage: {name!r} is not a function; name one after the colon")
    algorithm: Algorithm = function
    return algorithm


def token_weights(nums_trained: Sequence[int], kind: str, max_tokens: int) -> list[float]:
    """Weight of each trained token by sample, normalised over *all* samples of an update, however they are batched.

    ``token``: equal weights of tokens (DAPO, 2503.14476). ``sequence``: equal weights of samples, shared by their tokens (GRPO).
    ``constant``: 1 / (samples × ``max_tokens``), so that long answers do not get smaller weights (Dr.GRPO).
    """
    if kind == "token":
        return [1.0 / max(1, sum(nums_trained))] * len(nums_trained)
    if kind == "sequence":
        num_samples = sum(num > 0 for num in nums_trained)
        return [1.0 / (num_samples * num) if num else 0.0 for num in nums_trained]
    assert kind == "constant", f"normaliser {kind!r}"
    return [1.0 / (len(nums_trained) * max_tokens)] * len(nums_trained)


def overlong_penalty(num_tokens: int, max_tokens: int, share: float) -> float:
    """Penalty of an answer that uses some of its last ``share`` of ``max_tokens``: from 0 at the start of that interval, linearly
    to 1 at its end (DAPO's soft punishment, 2503.14476)."""
    interval = share * max_tokens
    return min(1.0, max(0.0, num_tokens - max_tokens + interval) / interval) if interval else 0.0


def unroll(groups: Sequence[Group], overlong_share: float = 0.0) -> list[list[Streams]]:
    """Streams by group and sample, numbered over the update."""
    numbers = count()
    return [[_streams(group, each, next(numbers), overlong_share) for each in group.trajectories] for group in groups]


def _streams(group: Group, trajectory: Trajectory, number: int, overlong_share: float) -> Streams:
    segments, verdict = trajectory.segments, trajectory.verdict
    assert verdict.outcome is not Outcome.INFRA, f"ordinal {trajectory.ordinal}: an infrastructure error has a reward"
    reward = verdict.reward - overlong_penalty(trajectory.num_sampled, group.task.max_tokens, overlong_share)
    tokens, logprobs, versions = (
        np.concatenate([getattr(segment, name) for segment in segments]) for name in ("tokens", "logprobs", "versions")
    )
    turns, steps = np.full(len(tokens), -1, np.int32), np.zeros(len(tokens), np.float32)
    starts = np.cumsum([0, *(len(segment.tokens) for segment in segments)])
    spans = [slice(*starts[place : place + 2]) for place, segment in enumerate(segments) if segment.is_sampled]
    for turn, span in enumerate(spans):
        turns[span] = turn
    for step in verdict.steps:
        span = spans[step.turn]
        length = span.stop - span.start
        steps[span.start + min(max(step.end or length, 1), length) - 1] += step.reward
    mask_S = turns[1:] >= 0
    assert mask_S.any(), f"ordinal {trajectory.ordinal}, sample {trajectory.sample}: not one sampled token"
    streams = (tokens, logprobs[1:], versions[1:], trajectory.routes, mask_S, turns[1:], steps[1:])
    return Streams(number, trajectory, reward, *streams, group.task.source, group.prompts)


def give_credit(
    groups: Update,
    advantage: str,
    normaliser: str,
    max_tokens: int,
    overlong_filter: bool = False,
    may_weigh: bool = True,
) -> list[TokenCredit]:
    """Credit by the samples' numbers: advantages by the algorithm ``advantage`` (`load_algorithm`), and weights by ``normaliser``
    (`token_weights`) unless the algorithm gives its own.

    ``overlong_filter``: no token of a sample that reached the limit of tokens is trained; its reward still counts in its group (DAPO, 2503.14476).
    ``may_weigh``: whether the algorithm may give weights.
    Raises UserError: a user's algorithm raised, or returned values that cannot be trained on."""
    algorithm = load_algorithm(advantage)
    try:
        values = [list(each) for each in algorithm(groups)]
    except Exception as error:
        if advantage in ALGORITHMS:
            raise
        raise UserError(f"loss.advantage: {advantage} raised {type(error).__name__}: {error}; correct it") from error
    if [len(each) for each in values] != [len(group) for group in groups]:
        raise UserError(f"loss.advantage: {advantage}: give one list for each group, with a number for each sample")
    samples = [sample for group in groups for sample in group]
    credits = [each if isinstance(each, Credit) else Credit(each) for group in values for each in group]
    masks = []
    for sample, credit in zip(samples, credits, strict=True):
        mask_S = sample.mask_S & (not overlong_filter or sample.trajectory.finish_reason != "length")
        if credit.mask_S is not None:
            mask_S = mask_S & _checked(credit.mask_S, sample, advantage).astype(bool)
        masks.append(mask_S)
    num_weighted = sum(credit.weights_S is not None for credit in credits)
    if 0 < num_weighted < len(samples):
        raise UserError(f"loss.advantage: {advantage}: gives weights for {num_weighted} samples of {len(samples)}")
    if num_weighted and not may_weigh:
        raise UserError(
            f"loss.advantage: {advantage}: gives weights, and distill.balance is in their place; leave weights_S out"
        )
    weights = token_weights([int(mask_S.sum()) for mask_S in masks], normaliser, max_tokens)
    return [
        TokenCredit(
            _checked(credit.advantages, sample, advantage) * mask_S,
            _checked(weight if credit.weights_S is None else credit.weights_S, sample, advantage) * mask_S,
        )
        for sample, credit, mask_S, weight in zip(samples, credits, masks, weights, strict=True)
    ]


def _checked(value: float | NDArray[np.generic], sample: Streams, algorithm: str) -> NDArray[np.float32]:
    """``value`` as a stream [S] of the sample. Raises UserError: it has another shape, or is not finite."""
    try:
        stream_S = np.broadcast_to(np.asarray(value, np.float32), (sample.num_inputs,))
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"{error} for the {sample.num_inputs} inputs of {sample.where}"
        raise UserError(f"loss.advantage: {algorithm}: {problem}; give a number, or one for each input") from None
    if not np.isfinite(stream_S[sample.mask_S]).all():
        raise UserError(f"loss.advantage: {algorithm}: the value for {sample.where} is not a finite number; correct it")
    return np.where(sample.mask_S, stream_S, np.float32(0.0))
