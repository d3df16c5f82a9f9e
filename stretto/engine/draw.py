"""Random numbers without state, and draws from distributions with them.

Shape letters: M rows, V vocabulary, C chunks, S tokens of a chunk.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from stretto.engine.sampler_state import SEED_MASK

CHUNK = 256
"""Tokens summed at once: near the root of a large vocabulary, so that both levels of the draw are short."""
LARGEST = 1.0 - 2.0**-52
"""Largest random number: times any total it stays below that total, which one more bit would not ensure in fp64."""
_WEYL_INT = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_WEYL = np.uint64(_WEYL_INT)
_SHIFTS = np.array([shift for shift, _ in _ROUNDS], dtype=np.uint64)
_FACTORS = np.array([factor for _, factor in _ROUNDS], dtype=np.uint64)


class Purpose(IntEnum):
    """What a random number decides. Numbers of different purposes are independent."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def uniform(seed: int | np.ndarray, position: int | np.ndarray, purpose: int | np.ndarray) -> np.ndarray:
    """fp64 in [0, 1) with 52 random bits; a pure function of its arguments, which broadcast: [1] of three numbers.

    Each argument is stirred in with the finaliser of SplitMix64 (Steele, Lea and Flood 2014, constants by Stafford):
    its avalanche makes neighbouring seeds and positions independent.
    """
    words = [
        np.array([word & SEED_MASK], dtype=np.uint64) if isinstance(word, int) else np.asarray(word).astype(np.uint64)
        for word in (seed, position, purpose)
    ]
    if all([word.shape == (1,) for word in words]):
        return np.array([_uniform_of(*[int(word[0]) for word in words])])
    state = np.zeros(1, dtype=np.uint64)  # arrays wrap around modulo 2^64 in silence, numpy's scalars warn
    for word in words:
        state = (state ^ word) + _WEYL
        state = (state ^ (state >> _SHIFTS[0])) * _FACTORS[0]
        state = (state ^ (state >> _SHIFTS[1])) * _FACTORS[1]
        state = state ^ (state >> _SHIFTS[2])
    return (state >> np.uint64(12)) * 2.0**-52


def _uniform_of(*words: int) -> float:
    """`uniform` of one number each, without the tens of microseconds that as many numpy calls on one number take."""
    state = 0
    for word in words:
        state = ((state ^ word) + _WEYL_INT) & SEED_MASK
        for shift, factor in _ROUNDS:
            state = ((state ^ (state >> shift)) * factor) & SEED_MASK
    return (state >> 12) * 2.0**-52


def acceptance(target_MV: Tensor, draft_MV: Tensor, drafted_M: Tensor) -> Tensor:
    """Probability [M] (fp32) of keeping each drafted token: min(1, target / draft) (Leviathan 2211.17192)."""
    target_M = target_MV.gather(-1, drafted_M[:, None]).squeeze(-1)
    draft_M = draft_MV.gather(-1, drafted_M[:, None]).squeeze(-1)
    return torch.where(draft_M > 0, target_M / draft_M, 0.0).clamp_max(1.0)


def residual(target_MV: Tensor, draft_MV: Tensor) -> Tensor:
    """Distribution [M, V] a rejected draft is replaced from: max(target − draft, 0), normalised.

    Where the two are equal nothing is ever rejected but by rounding; the target stands in.
    """
    excess_MV = (target_MV - draft_MV).clamp_min_(0.0)
    total_M1 = row_sums(excess_MV)[:, None].float()
    return torch.where(total_M1 > 0, excess_MV / total_M1, target_MV)


def draw(probs_MV: Tensor, uniform_M: np.ndarray) -> Tensor:
    """Token ids [M] drawn by inverting the running sum of each row; rows need not add up to 1 exactly."""
    padded_MCS = _empty_chunks(probs_MV)
    padded_MCS.flatten(1)[:, : probs_MV.shape[1]] = probs_MV
    return _draw(padded_MCS, uniform_M)


def draw_log(logp_MV: Tensor, uniform_M: np.ndarray) -> Tensor:
    """`draw` from the exponentials of log-probabilities [M, V]."""
    padded_MCS = _empty_chunks(logp_MV)
    torch.exp(logp_MV, out=padded_MCS.flatten(1)[:, : logp_MV.shape[1]])
    return _draw(padded_MCS, uniform_M).clamp_max_(logp_MV.shape[1] - 1)  # a row of NaN ends in the padding


def _empty_chunks(like_MV: Tensor) -> Tensor:
    """fp32 [M, C, S] for the entries of [M, V]; what lies beyond V is zero, the rest is not set."""
    num_rows, vocab = like_MV.shape
    num_chunks = -(-vocab // CHUNK)
    padded_MCS = like_MV.new_empty(num_rows, num_chunks, CHUNK)
    padded_MCS[:, -1, vocab - (num_chunks - 1) * CHUNK :] = 0.0
    return padded_MCS


def _draw(probs_MCS: Tensor, uniform_M: np.ndarray) -> Tensor:
    """The chunk first, then the token within it: one pass over the vocabulary, no running sum of it."""
    if probs_MCS.device.type == "cpu":
        weights_MC = probs_MCS.sum(-1).numpy()
        return torch.from_numpy(_draw_numpy(probs_MCS.numpy(), weights_MC, uniform_M))
    return _draw_torch(probs_MCS, uniform_M)


def _draw_torch(probs_MCS: Tensor, uniform_M: np.ndarray) -> Tensor:
    uniform_M1 = torch.from_numpy(np.ascontiguousarray(uniform_M)).to(probs_MCS.device)[:, None]
    weights_MC = probs_MCS.sum(-1)
    ends_MC, goal_M1, chunk_M1 = _invert(weights_MC, uniform_M1)
    left_M1 = (ends_MC.gather(-1, chunk_M1) - goal_M1) / weights_MC.gather(-1, chunk_M1)
    inside_MS = probs_MCS[torch.arange(len(probs_MCS), device=probs_MCS.device), chunk_M1.squeeze(-1)]
    _, _, token_M1 = _invert(inside_MS, (1.0 - left_M1).clamp_(0.0, LARGEST))
    return (chunk_M1 * CHUNK + token_M1).squeeze(-1)


def _invert(weights_MC: Tensor, uniform_M1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Running sums, the share of their total asked for, and the first column that exceeds it.

    A column of weight 0 is never first to exceed anything, so it is never taken. The limit on the column is for NaN.
    """
    ends_MC = weights_MC.cumsum(-1, dtype=torch.float64)
    goal_M1 = uniform_M1 * ends_MC[:, -1:]
    column_M1 = torch.searchsorted(ends_MC, goal_M1, right=True).clamp_max_(ends_MC.shape[1] - 1)
    return ends_MC, goal_M1, column_M1


def _draw_numpy(probs_MCS: np.ndarray, weights_MC: np.ndarray, uniform_M: np.ndarray) -> np.ndarray:
    """`_draw_torch` to the bit, in a quarter of the time: its calls are many and their work is small."""
    rows_M = np.arange(len(probs_MCS))
    ends_MC, goal_M1, chunk_M = _invert_numpy(weights_MC, uniform_M[:, None])
    left_M = (ends_MC[rows_M, chunk_M] - goal_M1[:, 0]) / weights_MC[rows_M, chunk_M]
    _, _, token_M = _invert_numpy(
        probs_MCS[rows_M, chunk_M], np.minimum(np.maximum(1.0 - left_M, 0.0), LARGEST)[:, None]
    )
    return chunk_M * CHUNK + token_M


def _invert_numpy(weights_MC: np.ndarray, uniform_M1: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`_invert`; columns [M]. Sums rise, so the first to exceed is behind as many as do not (none does of NaN)."""
    ends_MC = weights_MC.cumsum(-1, dtype=np.float64)
    goal_M1 = uniform_M1 * ends_MC[:, -1:]
    column_M = np.minimum((ends_MC <= goal_M1).sum(-1), ends_MC.shape[1] - 1)
    return ends_MC, goal_M1, column_M


def row_sums(x_MV: Tensor) -> Tensor:
    """fp64 [M]; of a single long row torch shares ``sum(-1)`` out among threads, so that its order depends on M."""
    whole = x_MV.shape[1] // CHUNK * CHUNK
    head_M = x_MV[:, :whole].unflatten(1, (-1, CHUNK)).sum(-1).double().sum(-1)
    return head_M + x_MV[:, whole:].double().sum(-1)
