"""Advantages and weights of every token from finished samples. Imports no torch.

An algorithm is a function of all groups of an update that says what each token of each sample earned: ours by name, or
anybody's as ``file.py:function`` (`load_algorithm`). What it sees is `Streams`, what it says is a number, an array or a
`Credit` for each sample. The trainer reads only that; how a ratio is bounded is `rl.objective`'s.

A sample of n tokens is n − 1 inputs, each with the token after it as its target.

Shape letters: G samples of a group, S inputs of a sample, L MoE layers of the maximum network, K route slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import UserError
from stretto.base.plugin import load_named
from stretto.base.trajectory import Group, Outcome, Trajectory

_STD_FLOOR = 1e-4
"""Added to a group's standard deviation, as TRL does."""


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """One sample as streams; written by `unroll`. Those that end in S describe the target of each input."""

    number: int
    """Within the update."""
    trajectory: Trajectory
    """Its turns (segments), verdict, finish reason."""
    reward: float
    """The verdict's, less what an overlong answer costs."""
    tokens: NDArray[np.int32]
    """[S + 1]."""
    logprobs_S: NDArray[np.float32]
    """Recorded when the target was sampled, as is the next."""
    versions_S: NDArray[np.int32]
    routes_SLK: NDArray[np.unsignedinteger] | None
    """Recorded for the input."""
    mask_S: NDArray[np.bool_]
    """The model sampled the target."""
    turns_S: NDArray[np.int32]
    """Which of the model's turns it belongs to, from 0; −1 where the model did not sample it."""
    steps_S: NDArray[np.float32]
    """Rewards of turns and steps (`Verdict.steps`), each at the last token of what it is for; 0 elsewhere."""
    source: str = ""
    """Of the problem, by its name in the recipe."""
    prompts: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)
    """The problem as teachers read it, by their names, where that is not how the sample begins."""
    scores: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Log-probabilities [S] of the targets under other networks, 0 where not sampled: each of the recipe's ``teachers``
    by its name, beside them ``policy``, the trained one before the update, and with a KL ``reference``. Written by the
    trainer."""

    @property
    def num_inputs(self) -> int:
        return len(self.tokens) - 1

    @property
    def where(self) -> str:
        """For messages."""
        return f"ordinal {self.trajectory.ordinal}, sample {self.trajectory.sample}"


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """What an algorithm says of one sample."""

    advantages: float | NDArray[np.floating]
    """Of every sampled token the same, or [S]."""
    mask_S: NDArray[np.bool_] | None = None
    """Tokens to be trained among the sampled ones; the others count in no normaliser. None: all."""
    weights_S: NDArray[np.floating] | None = None
    """Shares of the update's loss, instead of the recipe's normaliser; from all samples or from none."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenCredit:
    """One sample's part of the loss, zero where the model did not sample the target. Written by `give_credit`."""

    advantages_S: NDArray[np.float32]
    weights_S: NDArray[np.float32]
    """Share of the update's loss; with them, the loss of the update is a plain sum over its tokens."""


Update = Sequence[Sequence[Streams]]
"""Samples by group: at least two each where rewards are compared, fewer than were asked for where some never ended."""
Algorithm = Callable[[Update], Sequence[Sequence[float | NDArray[np.floating] | Credit]]]


def advantages(rewards_G: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    """Advantage of each sample over its group of at least two.

    ``grpo`` (2402.03300): centred, over the sample standard deviation. ``dr_grpo`` (2503.20783): centred; dividing would
    weigh prompts by how even their answers are. ``rloo`` (2402.14740): against the mean of the others, which does not
    depend on the sample itself.
    """
    num = len(rewards_G)
    assert num > 1 and np.isfinite(rewards_G).all(), f"rewards of a group: {rewards_G}"
    centred_G = rewards_G - rewards_G.mean()
    if rewards_G.max() == rewards_G.min():
        return np.zeros(num)  # the mean of equal numbers may round to another one
    if kind == "grpo":
        return centred_G / (rewards_G.std(ddof=1) + _STD_FLOOR)
    if kind == "rloo":
        return centred_G * (num / (num - 1))
    assert kind == "dr_grpo", f"advantage {kind!r}"
    return centred_G


def _by_outcome(groups: Update, kind: str) -> list[list[float]]:
    return [advantages(np.array([sample.reward for sample in group]), kind).tolist() for group in groups]


ALGORITHMS: Mapping[str, Algorithm] = {kind: partial(_by_outcome, kind=kind) for kind in ("grpo", "dr_grpo", "rloo")}
"""What ``loss.advantage`` may be, beside ``file.py:function``."""


def load_algorithm(name: str) -> Algorithm:
    """The function that ``loss.advantage`` names. Raises UserError: there is none."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    found = load_named(name, "loss.advantage")
    if not callable(found):
        raise UserError(f"loss.advantage: {name!r} is no function; name one after the colon")
    algorithm: Algorithm = found
    return algorithm


def token_weights(nums_trained: Sequence[int], kind: str, max_tokens: int) -> list[float]:
    """Weight of every trained token of each sample, over *all* samples of an update, whatever batches they go to.

    ``token``: every token the same (DAPO, 2503.14476). ``sequence``: every sample the same, its tokens share (GRPO).
    ``constant``: samples times ``max_tokens``, the longest one could be (Dr.GRPO): long answers are not weighed down.
    """
    if kind == "token":
        return [1.0 / max(1, sum(nums_trained))] * len(nums_trained)
    if kind == "sequence":
        num_samples = sum(num > 0 for num in nums_trained)
        return [1.0 / (num_samples * num) if num else 0.0 for num in nums_trained]
    assert kind == "constant", f"normaliser {kind!r}"
    return [1.0 / (len(nums_trained) * max_tokens)] * len(nums_trained)


def overlong_penalty(num_tokens: int, max_tokens: int, share: float) -> float:
    """What a reward loses where the answer reaches into the last ``share`` of its tokens: 0 at the beginning of that, 1 at
    its end, a straight line between (DAPO's soft punishment, 2503.14476)."""
    num_dear = share * max_tokens
    return min(1.0, max(0.0, num_tokens - max_tokens + num_dear) / num_dear) if num_dear else 0.0


def unroll(groups: Sequence[Group], overlong_share: float = 0.0) -> list[list[Streams]]:
    """Streams by group and sample, numbered over the update."""
    result: list[list[Streams]] = []
    number = 0
    for group in groups:
        outcomes = {trajectory.verdict.outcome for trajectory in group.trajectories}
        assert Outcome.INFRA not in outcomes, f"ordinal {group.task.ordinal}: a failure of ours is taken for a reward"
        samples = []
        for trajectory in group.trajectories:
            penalty = overlong_penalty(trajectory.num_sampled, group.task.max_tokens, overlong_share)
            streams = _streams(trajectory, number, trajectory.verdict.reward - penalty)
            samples.append(replace(streams, source=group.task.source, prompts=group.prompts))
            number += 1
        result.append(samples)
    return result


def _streams(trajectory: Trajectory, number: int, reward: float) -> Streams:
    segments = trajectory.segments
    tokens, logprobs, versions = (
        np.concatenate([getattr(segment, name) for segment in segments]) for name in ("tokens", "logprobs", "versions")
    )
    turns, steps = np.full(len(tokens), -1, np.int32), np.zeros(len(tokens), np.float32)
    starts = np.cumsum([0, *(len(segment.tokens) for segment in segments)])
    spans = [slice(*starts[place : place + 2]) for place, segment in enumerate(segments) if segment.is_sampled]
    for turn, span in enumerate(spans):
        turns[span] = turn
    for step in trajectory.verdict.steps:
        span = spans[step.turn]
        length = span.stop - span.start
        steps[span.start + min(max(step.end or length, 1), length) - 1] += step.reward
    mask_S = turns[1:] >= 0
    assert mask_S.any(), f"ordinal {trajectory.ordinal}, sample {trajectory.sample}: not one sampled token"
    routes = trajectory.routes
    return Streams(number, trajectory, reward, tokens, logprobs[1:], versions[1:], routes, mask_S, turns[1:], steps[1:])


def give_credit(
    groups: Update, advantage: str, normaliser: str, max_tokens: int, overlong_filter: bool = False
) -> list[TokenCredit]:
    """By the samples' numbers: what the algorithm ``advantage`` says of them, and weights by ``normaliser`` unless it gives
    its own; kinds as of `load_algorithm` and `token_weights`. ``overlong_filter`` trains nothing of a truncated sample, whose reward
    still counts in its group (DAPO, 2503.14476).
    Raises UserError: somebody's own algorithm raised, or said something that cannot be trained on."""
    algorithm = load_algorithm(advantage)
    try:
        said = [list(each) for each in algorithm(groups)]
    except Exception as error:
        if advantage in ALGORITHMS:
            raise
        raise UserError(f"loss.advantage: {advantage} raised {type(error).__name__}: {error}; correct it") from error
    if [len(each) for each in said] != [len(group) for group in groups]:
        raise UserError(f"loss.advantage: {advantage}: give one list for each group, with a number for each sample")
    samples = [sample for group in groups for sample in group]
    credits = [each if isinstance(each, Credit) else Credit(each) for some in said for each in some]
    masks = [
        sample.mask_S
        if credit.mask_S is None
        else sample.mask_S & _checked(credit.mask_S, sample, advantage).astype(bool)
        for sample, credit in zip(samples, credits, strict=True)
    ]
    if overlong_filter:
        is_whole = [sample.trajectory.finish_reason != "length" for sample in samples]
        masks = [mask_S & whole for mask_S, whole in zip(masks, is_whole, strict=True)]
    given = [credit.weights_S for credit in credits if credit.weights_S is not None]
    if given and len(given) < len(samples):
        raise UserError(f"loss.advantage: {advantage}: gives weights for {len(given)} samples of {len(samples)}")
    weights = token_weights([int(mask_S.sum()) for mask_S in masks], normaliser, max_tokens)
    return [
        TokenCredit(
            _checked(credit.advantages, sample, advantage) * mask_S,
            _checked(weight if credit.weights_S is None else credit.weights_S, sample, advantage) * mask_S,
        )
        for sample, credit, mask_S, weight in zip(samples, credits, masks, weights, strict=True)
    ]


def _checked(value: float | NDArray[np.generic], sample: Streams, algorithm: str) -> NDArray[np.float32]:
    """As a stream of the sample."""
    try:
        stream_S = np.broadcast_to(np.asarray(value, np.float32), (sample.num_inputs,))
    except (TypeError, ValueError) as error:
        problem = f"{error} for the {sample.num_inputs} inputs of {sample.where}"
        raise UserError(f"loss.advantage: {algorithm}: {problem}; give a number, or one for each input") from None
    if not np.isfinite(stream_S[sample.mask_S]).all():
        raise UserError(f"loss.advantage: {algorithm}: says of {sample.where} what is no finite number; correct it")
    return np.where(sample.mask_S, stream_S, np.float32(0.0))
