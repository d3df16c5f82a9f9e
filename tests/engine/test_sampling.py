"""The batched sampler against a definition of every processor for one row, in plain Python and fp64; that draws follow their
distribution, by chi-square; and that random numbers are what they claim to be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine import sampling as sampling_module
from stretto.engine.request import MAX_IDS, Sampling
from stretto.engine.sampling import (
    LARGEST,
    Row,
    SamplerCache,
    draw,
    draw_on_device,
    process,
    sample,
    top_log_probs,
    uniform,
)
from stretto.engine.sequence import TokenCounts
from tests.engine.chi_square import chi_square

VOCAB = 12
END = 0
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NEAR = 1e-5
"""Cases in which a token lies this close to a threshold are left out: fp32 may put it on either side."""


def processed(
    logits_MV: Tensor,
    samplings: Sequence[Sampling],
    tokens: Sequence[Sequence[int]],
    num_prompt: Sequence[int],
    masks: Sequence[np.ndarray | None] = (),
    counts: Sequence[TokenCounts | None] = (),
    **options: Any,
) -> Tensor:
    """`process` of rows given by column."""
    none = [None] * len(samplings)
    rows = zip(samplings, tokens, num_prompt, masks or none, counts or none, strict=True)
    return process(logits_MV, [Row(*row) for row in rows], **options)


def reference(
    logits: Sequence[float], row: Sampling, tokens: Sequence[int], num_prompt: int, allowed: set[int] | None
) -> list[float]:
    """Processed log-probabilities of one row, processor by processor."""
    x = [v if allowed is None or i in allowed else -math.inf for i, v in enumerate(logits)]
    x = [v + row.logit_bias.get(i, 0.0) for i, v in enumerate(x)]
    output = list(tokens[num_prompt:])
    for token in set(tokens):
        x[token] = x[token] / row.repetition_penalty if x[token] > 0 else x[token] * row.repetition_penalty
    x = [v - row.frequency_penalty * output.count(i) - row.presence_penalty * (i in output) for i, v in enumerate(x)]
    if len(output) < row.min_tokens:
        ends = {*row.stop_ids, *(() if row.ignore_eos else (END,))}
        held = [-math.inf if i in ends else v for i, v in enumerate(x)]
        x = held if max(held) > -math.inf else x
    if row.is_greedy:
        return log_softmax(x)
    probs = [math.exp(v) for v in log_softmax([v / row.temperature for v in x])]
    if row.top_k:
        least = sorted(probs, reverse=True)[min(row.top_k, len(probs)) - 1]
        probs = keep(probs, [p >= least for p in probs])
    if row.top_p < 1.0:
        descending = sorted(probs, reverse=True)
        sums = np.cumsum(descending)
        assume(np.abs(sums - row.top_p).min() > NEAR)
        least = descending[int(np.argmax(sums >= row.top_p))]
        probs = keep(probs, [p >= least for p in probs])
    if row.min_p:
        least = row.min_p * max(probs)
        assume(row.min_p == 1.0 or min(abs(p - least) for p in probs) > NEAR * least)
        probs = keep(probs, [p >= least for p in probs])
    return [math.log(p) if p else -math.inf for p in probs]


def log_softmax(x: Sequence[float]) -> list[float]:
    best = max(x)
    total = math.fsum(math.exp(v - best) for v in x)
    return [v - best - math.log(total) for v in x]


def keep(probs: Sequence[float], kept: Sequence[bool]) -> list[float]:
    total = math.fsum(p for p, is_kept in zip(probs, kept, strict=True) if is_kept)
    return [p / total if is_kept else 0.0 for p, is_kept in zip(probs, kept, strict=True)]


def pack(allowed: set[int] | None) -> np.ndarray | None:
    if allowed is None:
        return None
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 3, VOCAB, 99]),
    top_p=st.sampled_from([1.0, 1.0, 0.013, 0.487, 0.913]),
    min_p=st.sampled_from([0.0, 0.0, 0.07, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.9]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.1, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 0.6]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.3, 0.9, 100.0]), max_size=2),
    min_tokens=st.integers(0, 4),
    stop_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    seed=st.integers(-(2**63), 2**64),
)
# Halves make ties, which every filter must treat as one.
LOGITS = st.lists(st.integers(-10, 10).map(lambda v: v / 2), min_size=VOCAB, max_size=VOCAB)
CASES = st.tuples(
    LOGITS,
    SETTINGS,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    st.integers(0, 9),
    st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1),
)
Case = tuple[list[float], Sampling, list[int], int, set[int] | None]


def run(cases: Sequence[Case], cache: SamplerCache | None = None) -> Tensor:
    return processed(
        torch.tensor([case[0] for case in cases]).reshape(-1, VOCAB),
        [case[1] for case in cases],
        [case[2] for case in cases],
        [min(case[3], len(case[2])) for case in cases],
        [pack(case[4]) for case in cases],
        end_ids=(END,),
        cache=cache,
    )


@given(cases=st.lists(CASES, min_size=1, max_size=5))
@settings(max_examples=150)
def test_processors_equal_the_reference(cases: list[Case]) -> None:
    expected = [reference(x, row, toks, min(num, len(toks)), allowed) for x, row, toks, num, allowed in cases]
    logp_MV = run(cases)
    for got, want in zip(logp_MV.tolist(), expected, strict=True):
        assert [v > -math.inf for v in got] == [v > -math.inf for v in want]
        # Logits reach 100 / 0.3 and cancel: the bound is their rounding, not that of the log-probabilities.
        assert got == pytest.approx(want, rel=1e-5, abs=1e-4)


@given(cases=st.lists(CASES, min_size=1, max_size=6), position=st.integers(0, 10**6))
@settings(max_examples=50)
def test_a_row_does_not_depend_on_the_rows_beside_it(cases: list[Case], position: int) -> None:
    rows = [case[1] for case in cases]
    logp_MV = run(cases)
    chosen = sample(logp_MV, rows, [position] * len(rows))
    for index, case in enumerate(cases):
        alone_1V = run([case])
        assert torch.equal(alone_1V[0], logp_MV[index])
        assert sample(alone_1V, [case[1]], [position])[0] == chosen[index]
        assert logp_MV[index, chosen[index]] > -math.inf


@pytest.mark.parametrize("vocab", [700, 2048, 40_000])
def test_large_rows_do_not_depend_on_their_number_or_on_threads(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits_MV = torch.randn(9, vocab, generator=generator) * 2
    kinds = [{}, {"top_p": 0.95}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.2, "temperature": 0.7}]
    rows = [Sampling(seed=index, **kinds[index % len(kinds)]) for index in range(9)]
    logp_MV = processed(logits_MV, rows, [()] * 9, [0] * 9)
    chosen = sample(logp_MV, rows, range(9))
    num_threads = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for index, row in enumerate(rows):
            alone_1V = processed(logits_MV[index : index + 1], [row], [()], [0])
            assert torch.equal(alone_1V[0], logp_MV[index])
            assert sample(alone_1V, [row], [index])[0] == chosen[index]
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("vocab", [300, 5000])
@pytest.mark.parametrize("scale", [0.01, 3.0], ids=["flat", "peaked"])
def test_filters_of_a_large_vocabulary_equal_a_sort(vocab: int, scale: float) -> None:
    # Flat rows need more than the first candidates, peaked ones do not.
    logits_MV = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1)) * scale
    rows = [
        Sampling(seed=0, top_p=p, top_k=k) for p, k in [(0.9, 0), (0.5, 0), (0.99, 0), (0.9, 290), (1, 7), (0.5, 7)]
    ]
    logp_MV = processed(logits_MV, rows, [()] * 6, [0] * 6)
    for logits_V, row, logp_V in zip(logits_MV, rows, logp_MV, strict=True):
        probs_V = logits_V.double().softmax(-1)
        if row.top_k:
            probs_V = keep_most(probs_V, row.top_k)
        kept_V = logp_V > -math.inf
        least = float(probs_V[kept_V].min())
        # A log-probability of about -10 in fp32 stands for probabilities up to 1e-6 of it apart: such tokens are ties.
        assert float(probs_V[~kept_V].max()) <= least * (1 + 4e-6)
        assert float(probs_V[kept_V].sum()) >= row.top_p - 4e-6
        assert row.top_p == 1.0 or float(probs_V[kept_V & (probs_V > least * (1 + 4e-6))].sum()) < row.top_p + 4e-6
        assert float(logp_V.double().exp().sum()) == pytest.approx(1.0, abs=1e-5)


def keep_most(probs_V: Tensor, num: int) -> Tensor:
    """The ``num`` largest, normalised."""
    kept_V = torch.where(probs_V >= probs_V.sort(descending=True).values[num - 1], probs_V, 0.0)
    return kept_V / kept_V.sum()


@given(
    steps=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=4), max_size=12),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
)
@settings(max_examples=50)
def test_counts_kept_from_step_to_step_equal_counting_anew(steps: list[list[int]], prompt: list[int]) -> None:
    rows = [Sampling(temperature=0, repetition_penalty=1.4), Sampling(temperature=0, presence_penalty=0.5)]
    cache, tokens, other = SamplerCache(), list(prompt), list(prompt)
    counts = [TokenCounts(prompt, len(prompt)) for _ in rows]
    logits_MV = torch.linspace(-2, 2, 2 * VOCAB).reshape(2, VOCAB)
    for new in steps:
        tokens += new
        other.append(len(tokens) % VOCAB)
        for order in ([0, 1], [1, 0], [0]):  # the composition of a batch changes
            args = ([rows[i] for i in order], [[tokens, other][i] for i in order], [len(prompt)] * len(order))
            got_MV = processed(logits_MV[order], *args, counts=[counts[i] for i in order], cache=cache)
            assert torch.equal(got_MV, processed(logits_MV[order], *args))


def test_end_tokens_beyond_the_words_of_a_grammar_are_not_allowed_anyway() -> None:
    """The embedding has more rows than the tokenizer has tokens."""
    row = Sampling(temperature=0.0, min_tokens=1, stop_ids=(3, 70))
    logp_MV = processed(torch.zeros(1, 80), [row], [[1]], [1], [pack({2, 3})])
    assert [token for token, logp in enumerate(logp_MV[0].tolist()) if logp > -math.inf] == [2]


def test_a_step_builds_its_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built, build = [], sampling_module._build
    monkeypatch.setattr(sampling_module, "_build", lambda *args: built.append(args) or build(*args))
    cache, rows = SamplerCache(), [Sampling(seed=1, top_k=2), Sampling(temperature=0.0)]
    for _ in range(2):
        logp_MV = processed(torch.zeros(2, VOCAB), rows, [[1], [2]], [1, 1], end_ids=(END,), cache=cache)
        sample(logp_MV, rows, [1, 1], end_ids=(END,), cache=cache)
    assert len(built) == 1


def test_greedy_takes_the_lowest_id_of_equals_and_reports_temperature_one() -> None:
    logits_MV = torch.tensor([[0.0, 2.0, 2.0, 1.0]]).expand(3, -1)
    rows = [Sampling(temperature=0, top_k=1), Sampling(temperature=0, top_p=0.1), Sampling(temperature=1, seed=1)]
    logp_MV = processed(logits_MV, rows, [()] * 3, [0] * 3)
    chosen = sample(logp_MV, rows, [0, 1, 2])
    assert chosen.tolist()[:2] == [1, 1]
    assert logp_MV[[0, 1], chosen[:2]].tolist() == pytest.approx([float(logits_MV[0].log_softmax(-1)[1])] * 2)


def test_alternatives_are_ordered_and_possible() -> None:
    rows = [Sampling(temperature=0), Sampling(seed=1, top_k=2)]
    logp_MV = processed(torch.tensor([[1.0, 3.0, 2.0, 3.0]] * 2), rows, [()] * 2, [0] * 2)
    first, second = top_log_probs(logp_MV, 3)
    assert [entry.token for entry in first] == [1, 3, 2]
    assert [entry.token for entry in second] == [1, 3]
    assert first[0].logprob == pytest.approx(float(logp_MV[0, 1]))


def test_a_step_without_logits_is_empty() -> None:
    logp_MV = processed(torch.empty(0, VOCAB), [], [], [])
    assert sample(logp_MV, [], []).tolist() == []


def test_logits_are_left_as_they_were() -> None:
    logits_MV = torch.randn(2, VOCAB)
    before_MV = logits_MV.clone()
    rows = [Sampling(seed=1, logit_bias={1: 2.0}, repetition_penalty=2.0, min_tokens=3, temperature=0.5, top_k=3)] * 2
    processed(logits_MV, rows, [[1, 2]] * 2, [1] * 2, [pack({1, 2}), None], end_ids=(END,))
    assert torch.equal(logits_MV, before_MV)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(logit_bias={VOCAB: 1.0}), "request: logit_bias: 12 is not a token id; they go from 0 to 11"),
        (Sampling(stop_ids=(-1,)), "request: stop_ids: -1 is not a token id"),
    ],
)
def test_settings_beyond_the_vocabulary_are_refused(sampling: Sampling, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sampling.check(VOCAB, "request")


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {1: 1e308}},
        {"logit_bias": {1: -100.5}},
        {"logit_bias": dict.fromkeys(range(MAX_IDS + 1), 0.0)},
        {"stop_ids": tuple(range(MAX_IDS + 1))},
        {"repetition_penalty": 1e-320},
        {"repetition_penalty": 1e308},
        {"repetition_penalty": -0.0},
        {"temperature": 1e30},
        {"temperature": -1e-320},
        {"top_p": 0.0},
        {"top_p": 1.0000001},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -1e308},
        *({name: value} for name in FLOATS for value in (math.nan, math.inf, -math.inf)),
        {"logit_bias": {1: math.nan}},
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        Sampling(**fields)
    assert caught.value.errors()[0]["loc"][0] == next(iter(fields))


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, -0.0, 1e-320, 1e-6, 1e-5, 1.0, 100.0]),
        "top_p": st.sampled_from([1e-320, 1e-45, 0.5, 1.0 - 2.0**-53, 1.0]),
        "top_k": st.sampled_from([0, 1, VOCAB, 10**30]),
        "min_p": st.sampled_from([0.0, -0.0, 1e-320, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.01, 1.0, 100.0]),
        "presence_penalty": st.sampled_from([-2.0, 1e-320, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, -0.0, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 1e-320, 100.0])),
        "min_tokens": st.sampled_from([0, 10**30]),
        "seed": st.sampled_from([0, 2**63, 2**64 - 1, -(2**63), 10**40]),
    },
)


@given(fields=SETTINGS, scale=st.sampled_from([0.0, 1.0, 1e6, 1e30]), shift=st.sampled_from([0.0, -1e6, 1e6]))
def test_every_value_in_range_gives_a_token(fields: dict[str, Any], scale: float, shift: float) -> None:
    """And a log-probability that is a number; the row beside it keeps its own, to the bit."""
    row, other = Sampling(**{"seed": 1, **fields}), Sampling(seed=3, temperature=0.7, top_p=0.9)
    logits_MV = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5)) * scale + shift
    tokens = [[1, 1, 2, 2, 3], [4]]
    logp_MV = processed(logits_MV, [row, other], tokens, [2, 1], end_ids=(END,))
    ids = sample(logp_MV, [row, other], [5, 1])
    assert torch.isfinite(logp_MV[range(2), ids]).all(), (fields, logp_MV)
    alone_1V = processed(logits_MV[1:], [other], tokens[1:], [1], end_ids=(END,))
    assert torch.equal(alone_1V[0], logp_MV[1]) and sample(alone_1V, [other], [1]) == ids[1]


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(
    "row",
    [
        Sampling(seed=5),
        Sampling(seed=5, temperature=0.6, top_k=7),
        Sampling(seed=5, temperature=1.5, top_p=0.83, repetition_penalty=1.5),
    ],
    ids=["plain", "top-k", "top-p"],
)
def test_draws_follow_the_processed_distribution(row: Sampling, vary: str) -> None:
    num = 5_000
    logits_1V = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    logp_1V = processed(logits_1V, [row], [[1, 2, 2]], [1])
    rows = [row.replace(seed=seed) for seed in range(num)] if vary == "seed" else [row] * num
    positions = [7] * num if vary == "seed" else range(num)
    chosen = sample(logp_1V.expand(num, -1), rows, positions)
    chi_square(chosen.numpy(), logp_1V[0].double().exp().numpy())


@pytest.mark.parametrize("vocab", [256, 1000, 3000])
def test_draw_inverts_the_running_sum(vocab: int) -> None:
    probs_MV = torch.randn(200, vocab, generator=torch.Generator().manual_seed(4)).mul(3).softmax(-1)
    probs_MV[:, ::3] = 0.0
    u_M = uniform(np.arange(200), 0)
    u_M[:2] = 0.0, 1.0 - 2.0**-52
    ids_M = draw(probs_MV.log(), u_M)
    assert torch.equal(draw_on_device(probs_MV.log(), torch.from_numpy(u_M)), ids_M)
    ends_MV = probs_MV.double().cumsum(-1)
    share_M1 = torch.from_numpy(u_M)[:, None] * ends_MV[:, -1:]
    rounding = 1e-6  # chunks are summed in fp32
    taken_M1 = ends_MV.gather(-1, ids_M[:, None])
    assert (probs_MV.gather(-1, ids_M[:, None]) > 0).all()
    assert (taken_M1 > share_M1 - rounding).all()
    assert (taken_M1 - probs_MV.gather(-1, ids_M[:, None]) <= share_M1 + rounding).all()


def test_random_numbers_are_even_and_independent() -> None:
    seeds, positions = np.meshgrid(np.arange(300), np.arange(300), indexing="ij")
    u = uniform(seeds, positions)
    flat = np.full(20, 0.05)
    assert u.min() >= 0.0 and u.max() < 1.0
    chi_square((u.ravel() * 20).astype(int), flat)
    for other in (u[1:], u[:, 1:], u.T):
        mine = u[: other.shape[0], : other.shape[1]]
        pairs = (mine * 10).astype(int) * 10 + (other * 10).astype(int)
        off_diagonal = pairs[~np.eye(*pairs.shape, dtype=bool)]  # the transpose shares its diagonal
        chi_square(off_diagonal, np.full(100, 0.01))
    for total in (1e-300, 0.3, 1.0, 3.0, 1e300):
        assert 0.99 * total < LARGEST * total < total
    # a release that draws other numbers answers every seed with other tokens
    assert uniform(3, 4) == 0.3771699994638149
    assert uniform(3, 4) == uniform(np.array([3]), np.array([4])) == uniform(3 + 2**64, 4)
    assert uniform(-1, 4) == uniform(np.array([-1]), 4)


def test_one_number_alone_is_the_one_among_many() -> None:
    many = uniform(np.arange(40), 9)
    assert [float(uniform(seed, 9)[0]) for seed in range(40)] == many.tolist()
    assert all(one != other for one, other in pairwise(many.tolist()))
