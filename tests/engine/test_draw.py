"""That draws follow their distribution, by chi-square, and that random numbers are what they claim to be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stretto.engine.request import Sampling
from stretto.engine.sampler import Purpose, acceptance, draw, probabilities, process, residual, sample, uniform
from tests.engine.chi_square import chi_square

VOCAB = 12


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
    logp_1V = process(logits_1V, [row], [[1, 2, 2]], [1])
    rows = [row.replace(seed=seed) for seed in range(num)] if vary == "seed" else [row] * num
    positions = [7] * num if vary == "seed" else range(num)
    chosen = sample(logp_1V.expand(num, -1), rows, positions)
    chi_square(chosen.ids_M.numpy(), logp_1V[0].double().exp().numpy())


@pytest.mark.parametrize("vocab", [256, 1000, 3000])
def test_draw_inverts_the_running_sum(vocab: int) -> None:
    probs_MV = torch.randn(200, vocab, generator=torch.Generator().manual_seed(4)).mul(3).softmax(-1)
    probs_MV[:, ::3] = 0.0
    u_M = uniform(np.arange(200), 0, 0)
    u_M[:2] = 0.0, 1.0 - 2.0**-52
    ids_M = draw(probs_MV, u_M)
    ends_MV = probs_MV.double().cumsum(-1)
    share_M1 = torch.from_numpy(u_M)[:, None] * ends_MV[:, -1:]
    rounding = 1e-6  # chunks are summed in fp32
    taken_M1 = ends_MV.gather(-1, ids_M[:, None])
    assert (probs_MV.gather(-1, ids_M[:, None]) > 0).all()
    assert (taken_M1 > share_M1 - rounding).all()
    assert (taken_M1 - probs_MV.gather(-1, ids_M[:, None]) <= share_M1 + rounding).all()


def test_random_numbers_are_even_and_independent() -> None:
    seeds, positions = np.meshgrid(np.arange(300), np.arange(300), indexing="ij")
    u = uniform(seeds, positions, Purpose.SAMPLE)
    flat = np.full(20, 0.05)
    assert u.min() >= 0.0 and u.max() < 1.0
    chi_square((u.ravel() * 20).astype(int), flat)
    for other in (u[1:], u[:, 1:], u.T, uniform(seeds, positions, Purpose.ACCEPT)):
        mine = u[: other.shape[0], : other.shape[1]]
        pairs = (mine * 10).astype(int) * 10 + (other * 10).astype(int)
        off_diagonal = pairs[~np.eye(*pairs.shape, dtype=bool)]  # the transpose shares its diagonal
        chi_square(off_diagonal, np.full(100, 0.01))
    assert uniform(3, 4, 1) == uniform(np.array([3]), np.array([4]), 1) == uniform(3 + 2**64, 4, 1)
    assert uniform(-1, 4, 1) == uniform(np.array([-1]), 4, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
def test_speculation_pieces_give_the_target_distribution(temperature: float) -> None:
    num, generator = 8_000, torch.Generator().manual_seed(8)
    row = Sampling(temperature=temperature, seed=0)
    rows = [row.replace(seed=seed) for seed in range(num)]
    target_1V, draft_1V = torch.randn(2, 1, VOCAB, generator=generator).log_softmax(-1)
    drafted_M = sample(draft_1V.expand(num, -1), rows, [9] * num, Purpose.DRAFT).ids_M
    p_MV, q_MV = (probabilities(logp_1V, [row]).expand(num, -1) for logp_1V in (target_1V, draft_1V))
    seeds = np.arange(num)
    accepted_M = torch.from_numpy(uniform(seeds, 9, Purpose.ACCEPT)) < acceptance(p_MV, q_MV, drafted_M)
    replaced_M = draw(residual(p_MV, q_MV), uniform(seeds, 9, Purpose.RESIDUAL))
    final_M = torch.where(accepted_M, drafted_M, replaced_M)
    if temperature:
        chi_square(final_M.numpy(), p_MV[0].double().numpy())
        expected = float(torch.minimum(p_MV[0], q_MV[0]).sum())
        assert abs(float(accepted_M.double().mean()) - expected) < 5 * math.sqrt(0.25 / num)
    else:
        assert (final_M == target_1V.argmax()).all()
        assert bool(accepted_M.all()) == bool(target_1V.argmax() == draft_1V.argmax())


def test_residual_of_equal_distributions_is_the_target() -> None:
    probs_MV = torch.randn(2, VOCAB).softmax(-1)
    assert torch.equal(residual(probs_MV, probs_MV), probs_MV)
