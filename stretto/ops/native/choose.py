"""Tokens from logits through the compiled CPU kernels: one call instead of some thirty of torch and numpy.

Shape letters: M rows of logits, S sequences, N drafts of all sequences, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.ops.native.records import ChooseRecord


class Chosen(NamedTuple):
    """For each sequence, the accepted drafts and one token more."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    """Nats, of the distribution that the token was drawn from; of temperature 1 where it was not drawn."""


def choose(
    library: ctypes.CDLL,
    logits_MV: Tensor,
    positions: Sequence[int],
    temperatures: Sequence[float],
    seeds: Sequence[int],
    drafts: Sequence[Sequence[int]],
    draft_rows: Sequence[int],
) -> Chosen:
    """Choose the next tokens of sequences whose distribution nothing but a temperature changes.

    A draft stands where a greedy sequence would have chosen it, or else with the probability that keeps the
    distribution the target's (Leviathan 2211.17192); the first that does not is replaced and ends its sequence.

    Args:
        logits_MV: fp32; the rows of each sequence together, one more than it has drafts.
        positions: of the token that each sequence's first row chooses.
        temperatures: 0: the most probable token, of several the one with the lowest id.
        seeds: uint64; `stretto.engine.draw.uniform` of seed, position and purpose decides.
        drafts: of each sequence.
        draft_rows: for each draft the address of the probabilities [V] (fp32) it was drawn by; 0 where it was certain,
            or its sequence is greedy. Those tables must live until this returns.
    """
    num_rows, vocab = logits_MV.shape
    counts = [len(tokens) for tokens in drafts]
    drafted = [token for tokens in drafts for token in tokens]
    assert logits_MV.is_contiguous() and logits_MV.dtype == torch.float32, f"{logits_MV.dtype}, {logits_MV.stride()}"
    assert num_rows == len(drafted) + len(drafts) and len(draft_rows) == len(drafted), f"{num_rows} rows for {counts}"
    assert all([0 <= token < vocab for token in drafted]), f"drafts {drafted} of {vocab}"
    num = len(counts)
    numbers = np.array([*counts, *positions, *drafted], np.int32)
    wide = np.array([*seeds, *draft_rows], np.uint64)
    temperature_S = np.array(temperatures, np.float32)
    assert len(temperatures) == len(seeds) == len(positions) == num, f"{num} sequences, {len(seeds)} seeds"
    out = np.empty(num + num_rows, np.int32)
    logprob_M = np.empty(num_rows, np.float32)
    start, wide_start, out_start = numbers.ctypes.data, wide.ctypes.data, out.ctypes.data
    record = ChooseRecord(
        *(num, vocab, torch.get_num_threads(), len(drafted)),
        logits_MV.data_ptr(),
        start,
        start + 4 * num,
        start + 8 * num,
        wide_start + 8 * num,
        temperature_S.ctypes.data,
        wide_start,
        out_start,
        out_start + 4 * num,
        logprob_M.ctypes.data,
    )
    library.stretto_choose(ctypes.byref(record))
    found, logprobs = out.tolist(), logprob_M.tolist()
    if not drafted:
        return Chosen([[token] for token in found[num:]], [[logprob] for logprob in logprobs])
    result = Chosen([], [])
    row = 0
    for count, num_kept in zip(counts, found[:num], strict=True):
        result.ids.append(found[num + row : num + row + num_kept + 1])
        result.logprobs.append(logprobs[row : row + num_kept + 1])
        row += count + 1
    return result
