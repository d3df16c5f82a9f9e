"""Tokens chosen by the compiled kernels, against torch and against the distributions they must follow.

Shape letters: M rows of logits, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch

from stretto.engine.request import Sampling
from stretto.engine.sampling import process, sample
from stretto.ops.native import Chosen, load
from stretto.ops.native import choose_tokens as choose
from tests.engine.chi_square import chi_square

NUM = 10_000


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = load()
    if found.handle is None:
        pytest.skip(found.reason)
    return found.handle


def logits(num: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("vocab", [1, 12, 256, 1000])
def test_one_token_a_row_as_torch_chooses(library: ctypes.CDLL, vocab: int) -> None:
    """Same random numbers, same distribution: only a sum rounded otherwise can make a draw differ."""
    num = 300
    rows = [Sampling(temperature=(0.0, 0.7, 1.0)[index % 3], seed=index * 7919) for index in range(num)]
    logits_MV, positions = logits(num, vocab), list(range(num))
    logp_MV = process(logits_MV, rows, [[]] * num, [0] * num)
    theirs = sample(logp_MV, rows, positions)
    seeds = [row.seed or 0 for row in rows]
    ours = choose(library, logits_MV, positions, [row.temperature for row in rows], seeds, [()] * num, [])
    ids_M = torch.tensor(ours.ids)[:, 0]
    greedy_M = torch.arange(num) % 3 == 0
    assert torch.equal(ids_M[greedy_M], theirs[greedy_M])
    assert (ids_M == theirs).float().mean() > 0.99
    expected_M = logp_MV.gather(1, ids_M[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(ours.logprobs)[:, 0], expected_M, atol=2e-6, rtol=1e-6)


def test_ties_and_numbers_that_are_none(library: ctypes.CDLL) -> None:
    tied = torch.tensor([[0.0, 3.0, 1.0, 3.0] + [0.0] * 300])
    assert choose(library, tied, [0], [0.0], [0], [()], []).ids == [[1]]
    broken = torch.full((1, 300), math.nan)
    for temperature in (0.0, 1.0):
        found = choose(library, broken, [0], [temperature], [0], [()], [])
        assert 0 <= found.ids[0][0] < 300 and math.isnan(found.logprobs[0][0])


def test_a_row_does_not_depend_on_others(library: ctypes.CDLL) -> None:
    logits_MV, seeds = logits(64, 5000, 3), list(range(64))
    together = choose(library, logits_MV, seeds, [1.0] * 64, seeds, [()] * 64, [])
    for row in range(64):
        alone = choose(library, logits_MV[row : row + 1].contiguous(), [row], [1.0], [row], [()], [])
        assert (alone.ids[0], alone.logprobs[0]) == (together.ids[row], together.logprobs[row])


@pytest.mark.parametrize("is_certain", [False, True])
def test_a_draft_leaves_the_distribution_as_it_was(library: ctypes.CDLL, is_certain: bool) -> None:
    """The token at the draft's place follows the target; the one behind an accepted draft follows its own row."""
    vocab, temperature = 12, 0.8
    target_2V, draft_V = logits(2, vocab, 1) * 0.4, (logits(1, vocab, 2)[0] * 0.5).softmax(-1)
    rng = np.random.default_rng(5)
    exact_V = draft_V.double().numpy() / draft_V.double().sum().item()
    drafts = [int(target_2V[0].argmax())] * NUM if is_certain else rng.choice(vocab, NUM, p=exact_V).tolist()
    address = 0 if is_certain else draft_V.data_ptr()
    found: Chosen = choose(
        library,
        target_2V.repeat(NUM, 1),
        [7] * NUM,
        [temperature] * NUM,
        list(range(NUM)),
        [[token] for token in drafts],
        [address] * NUM,
    )
    probs_2V = (target_2V.double() / temperature).softmax(-1).numpy()
    chi_square(np.array([ids[0] for ids in found.ids]), probs_2V[0])
    behind = np.array([ids[1] for ids in found.ids if len(ids) == 2])
    assert 0.02 * NUM < len(behind) < 0.98 * NUM
    chi_square(behind, probs_2V[1])


def test_greedy_drafts_stand_as_far_as_they_are_right(library: ctypes.CDLL) -> None:
    logits_MV = logits(4, 50, 9)
    best = logits_MV.argmax(-1).tolist()
    wrong = (best[1] + 1) % 50
    assert choose(library, logits_MV, [0], [0.0], [0], [best[:3]], [0] * 3).ids == [best]
    assert choose(library, logits_MV, [0], [0.0], [0], [[best[0], wrong, best[2]]], [0] * 3).ids == [best[:2]]
