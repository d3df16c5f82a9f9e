"""From logits to tokens: the processors, the choice, and the distributions that speculative sampling compares.

Order of the processors: grammar mask, logit bias, repetition, frequency and presence penalty, end tokens before
``min_tokens``, temperature, top-k, top-p, min-p. It is that of transformers. vLLM's is the same but for min-p, which it
applies before top-k and top-p (its V1 sampler); the two differ only where a row sets both top-p and min-p. A mask of -inf commutes with
bias and penalties, so grammar and ``min_tokens`` are one mask here.

- Top-k keeps the k most probable tokens; top-p the fewest most probable ones that together have at least that share
  of what top-k left; min-p those with at least that share of the most probable token's probability. Each is a
  threshold: a token as probable as the last one kept is kept too, so the result does not hang on the order of a sort.
- A greedy row is not filtered, and its log-probabilities are those of temperature 1 after mask, bias and penalties.
- Where a grammar allows nothing but the end, it may end before ``min_tokens``.
- A row's result, to the bit, does not depend on the rows beside it: no sum runs over more than a row, and every sum
  whose order torch may choose by the number of rows is taken over short chunks or in fp64.

Shape letters: M rows of logits, V vocabulary, F rows that filter, K candidates, P pairs of a row and a seen token,
R rows with a grammar, W words of 32 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.engine.draw import Purpose, acceptance, draw, draw_log, residual, row_sums, uniform
from stretto.engine.request import Sampling, TopLogprob
from stretto.engine.sampler_state import Batch, Filters, SamplerCache, check_sampling, is_greedy

__all__ = [
    "Purpose",
    "Sampled",
    "SamplerCache",
    "acceptance",
    "check_sampling",
    "draw",
    "is_greedy",
    "probabilities",
    "process",
    "residual",
    "sample",
    "top_log_probs",
    "uniform",
]

NUM_CANDIDATES = 256
"""Most probable tokens among which top-p looks first; sorting a whole vocabulary costs tens of times more."""


class Sampled(NamedTuple):
    """Chosen tokens."""

    ids_M: Tensor
    """int64."""
    logp_M: Tensor
    """fp32, nats, processed."""


def process(
    logits_MV: Tensor,
    rows: Sequence[Sampling],
    tokens_so_far: Sequence[Sequence[int]],
    num_prompt: Sequence[int],
    masks: Sequence[np.ndarray | None] | None = None,
    *,
    end_ids: tuple[int, ...] = (),
    cache: SamplerCache | None = None,
) -> Tensor:
    """Log-probabilities [M, V] (fp32, nats) that tokens are drawn by; -inf where a token is ruled out.

    Args:
        logits_MV: fp32; not changed.
        rows: how each row is sampled; the same object for the same sequence from step to step, or the cache is lost.
        tokens_so_far: prompt and output that precede the token of each row; read only where a row asks for penalties
            or a least length.
        num_prompt: how many of those are the prompt.
        masks: tokens a grammar allows, as `stretto.engine.grammar.GrammarState.mask` packs them; None: any.
        end_ids: the tokenizer's own ends; a row's ``stop_ids`` are added. Unless ``ignore_eos``, neither is drawn
            before ``min_tokens``.
        cache: the engine's; None computes everything anew.
    """
    assert logits_MV.dtype == torch.float32, f"logits are {logits_MV.dtype}; the sampler works in fp32"
    assert len(rows) == len(tokens_so_far) == len(num_prompt) == len(logits_MV), (
        f"{len(logits_MV)} rows of logits, {len(rows)} of settings, {len(tokens_so_far)} of tokens, {len(num_prompt)}"
    )
    cache = SamplerCache() if cache is None else cache
    batch = cache.batch(rows, logits_MV.shape[1], logits_MV.device, end_ids)
    x_MV = logits_MV
    has_grammar = masks is not None and any([mask is not None for mask in masks])
    if has_grammar or batch.bias_Q is not None or batch.penalised or batch.held:
        x_MV = logits_MV.clone()
        _mask(
            x_MV, batch, masks if has_grammar and masks is not None else [None] * len(rows), tokens_so_far, num_prompt
        )
        if batch.bias_row_Q is not None and batch.bias_token_Q is not None and batch.bias_Q is not None:
            x_MV.index_put_((batch.bias_row_Q, batch.bias_token_Q), batch.bias_Q, accumulate=True)
        if batch.penalised:
            _penalise(x_MV, batch, cache, tokens_so_far, num_prompt)
    if batch.temperature_M1 is not None:
        x_MV = x_MV / batch.temperature_M1
    logp_MV = x_MV.log_softmax(-1)
    if batch.filters is None:
        return logp_MV
    if batch.filters.rows_F is None:
        return _filter(logp_MV, batch.filters)
    logp_MV[batch.filters.rows_F] = _filter(logp_MV[batch.filters.rows_F], batch.filters)
    return logp_MV


def sample(
    logp_MV: Tensor,
    rows: Sequence[Sampling],
    positions: Sequence[int] | np.ndarray,
    purpose: Purpose = Purpose.SAMPLE,
    *,
    cache: SamplerCache | None = None,
) -> Sampled:
    """Choose a token of each row of what `process` returned; a row of NaN gives a log-probability of NaN.

    A greedy row takes its most probable token, of several the one with the lowest id. Every other row draws by
    `uniform` of its seed and position.

    Args:
        positions: index in its sequence, prompt included, of the token that each row chooses.
    """
    assert len(rows) == len(positions) == len(logp_MV), f"{len(logp_MV)}, {len(rows)} and {len(positions)} rows"
    cache = SamplerCache() if cache is None else cache
    batch = cache.batch(rows, logp_MV.shape[1], logp_MV.device)
    if batch.drawn_M is None:
        ids_M = _argmax(logp_MV)
    else:
        uniform_M = uniform(batch.seeds_M, np.asarray(positions), purpose)
        if batch.greedy_M is None:
            ids_M = draw_log(logp_MV, uniform_M)
        else:
            ids_M = torch.empty(len(logp_MV), dtype=torch.int64, device=logp_MV.device)
            ids_M[batch.greedy_M] = _argmax(logp_MV[batch.greedy_M])
            ids_M[batch.drawn_M] = draw_log(logp_MV[batch.drawn_M], uniform_M[batch.drawn_M.cpu().numpy()])
    return Sampled(ids_M, logp_MV.gather(-1, ids_M[:, None]).squeeze(-1))


def _argmax(x_MV: Tensor) -> Tensor:
    """Column [M] of each row's largest entry, of equals the first; a tenth of torch's time on a CPU."""
    return torch.from_numpy(x_MV.numpy().argmax(-1)) if x_MV.device.type == "cpu" else x_MV.argmax(-1)


def top_log_probs(logp_MV: Tensor, num: int) -> list[tuple[TopLogprob, ...]]:
    """The ``num`` most probable tokens of each row, best first, ties by id; those ruled out are not listed."""
    values_MK, ids_MK = logp_MV.topk(min(num, logp_MV.shape[1]), dim=-1)
    return [
        tuple(
            TopLogprob(token, value)
            for value, token in sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
            if value > -math.inf
        )
        for values, ids in zip(values_MK.tolist(), ids_MK.tolist(), strict=True)
    ]


def probabilities(logp_MV: Tensor, rows: Sequence[Sampling], *, cache: SamplerCache | None = None) -> Tensor:
    """Probabilities [M, V] with which `sample` chooses each token: all on one token for a greedy row."""
    cache = SamplerCache() if cache is None else cache
    batch = cache.batch(rows, logp_MV.shape[1], logp_MV.device)
    probs_MV = logp_MV.exp()
    if batch.greedy_M is not None:
        best_M1 = logp_MV[batch.greedy_M].argmax(-1, keepdim=True)
        probs_MV[batch.greedy_M] = torch.zeros_like(probs_MV[batch.greedy_M]).scatter_(-1, best_M1, 1.0)
    return probs_MV


def _mask(
    x_MV: Tensor,
    batch: Batch,
    masks: Sequence[np.ndarray | None],
    tokens_so_far: Sequence[Sequence[int]],
    num_prompt: Sequence[int],
) -> None:
    """Set to -inf, in place, what grammars rule out and what would end a row before its least length."""
    allowed = {row: mask for row, mask in enumerate(masks) if mask is not None}
    barred: list[tuple[int, int]] = []
    for row, min_tokens, ends in batch.held:
        if len(tokens_so_far[row]) - num_prompt[row] >= min_tokens:
            continue
        if row not in allowed:
            barred += [(row, token) for token in ends]
            continue
        longer = allowed[row].copy()
        for token in ends:
            longer.view(np.uint8)[token // 8] &= ~(1 << token % 8) & 0xFF
        if longer.any():
            allowed[row] = longer
    if barred:
        rows, ids = torch.tensor(barred, device=x_MV.device).unbind(-1)
        x_MV[rows, ids] = -math.inf
    if allowed:
        banned_RV = ~unpack_masks(np.stack(list(allowed.values())), x_MV.shape[1], x_MV.device)
        rows = torch.tensor(list(allowed), device=x_MV.device)
        x_MV[rows] = x_MV[rows].masked_fill_(banned_RV, -math.inf)


def unpack_masks(words_RW: np.ndarray, vocab: int, device: torch.device) -> Tensor:
    """bool [R, V] of packed masks: bit b of word w is token 32·w + b. Tokens past the words are not allowed."""
    if device.type == "cpu":
        bits_RV = np.unpackbits(words_RW.view(np.uint8), axis=1, count=vocab, bitorder="little")
        return torch.from_numpy(bits_RV.view(np.bool_))
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    unpacked_RV = ((torch.from_numpy(words_RW).to(device)[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab]
    return torch.nn.functional.pad(unpacked_RV, (0, vocab - unpacked_RV.shape[1]))


def _penalise(
    x_MV: Tensor,
    batch: Batch,
    cache: SamplerCache,
    tokens_so_far: Sequence[Sequence[int]],
    num_prompt: Sequence[int],
) -> None:
    """Repetition, then frequency and presence, in place, on the tokens seen only."""
    # copies: several rows may be of one sequence (a verified draft), whose counts are one table
    tables = [
        cache.counts(batch.rows[row], tokens_so_far[row], num_prompt[row], len(batch.rows)).table.copy()
        for row in batch.penalised
    ]
    rows = np.repeat(batch.penalised, [len(table) for table in tables])
    row_P = torch.from_numpy(rows).to(x_MV.device)
    id_P, in_prompt_P, in_output_P = torch.from_numpy(np.concatenate(tables)).to(x_MV.device).unbind(-1)
    repetition_P, presence_P, frequency_P = torch.from_numpy(batch.penalties_M3[rows]).to(x_MV.device).unbind(-1)
    x_P = x_MV[row_P, id_P]
    repeated_P = torch.where(x_P > 0, x_P / repetition_P, x_P * repetition_P)
    x_P = torch.where(in_prompt_P + in_output_P > 0, repeated_P, x_P)
    x_MV[row_P, id_P] = x_P - frequency_P * in_output_P - presence_P * (in_output_P > 0)


def _filter(logp_FV: Tensor, filters: Filters) -> Tensor:
    """Keep what reaches the highest of three thresholds, and normalise."""
    vocab = logp_FV.shape[1]
    best_F1 = logp_FV.amax(-1, keepdim=True)
    floor_F1 = (best_F1.double() + filters.log_min_p_F1).float()
    if filters.most_k or filters.any_top_p:
        num = min(vocab, max(filters.most_k, NUM_CANDIDATES if filters.any_without_top_k else 0))
        threshold_F1 = _candidate_threshold(logp_FV, filters, num)
        while threshold_F1 is None:
            num = min(vocab, 8 * num)
            threshold_F1 = _candidate_threshold(logp_FV, filters, num)
        floor_F1 = torch.maximum(floor_F1, threshold_F1)
    return logp_FV.masked_fill(logp_FV < floor_F1, -math.inf).log_softmax(-1)


def _candidate_threshold(logp_FV: Tensor, filters: Filters, num: int) -> Tensor | None:
    """Least log-probability [F, 1] that top-k and top-p keep; None: more than ``num`` candidates are needed."""
    vocab = logp_FV.shape[1]
    sorted_FK = logp_FV.topk(num, dim=-1).values
    last_k_F1 = (filters.top_k_F1 - 1).clamp_max(num - 1)
    kth_F1 = sorted_FK.gather(-1, last_k_F1)
    top_k_floor_F1 = torch.where(filters.top_k_F1 < vocab, kth_F1, -math.inf)
    if not filters.any_top_p:
        return top_k_floor_F1
    goal_F1 = filters.top_p_F1
    if filters.needs_full_mass:  # tokens tied with the k-th are left too: their number is only known here
        left_F1 = row_sums(logp_FV.exp().masked_fill_(logp_FV < top_k_floor_F1, 0.0))[:, None]
        goal_F1 = torch.where(filters.top_k_F1 < vocab, goal_F1 * left_F1, goal_F1)
    ends_FK = sorted_FK.double().exp().cumsum(-1)
    # Of the sorted candidates, the one with which the sum reaches the goal is the last to stay. A top-k row whose
    # sum never does has ties of its k-th token beyond the candidates, so that its threshold is the k-th all the same.
    num_short_F1 = (ends_FK < goal_F1).sum(-1, keepdim=True)
    is_open_F1 = (num_short_F1 >= num) & (filters.top_p_F1 < 1.0) & (filters.top_k_F1 == vocab)
    if num < vocab and bool(is_open_F1.any()):
        return None
    last_F1 = torch.minimum(num_short_F1, last_k_F1)
    top_p_floor_F1 = torch.where(filters.top_p_F1 < 1.0, sorted_FK.gather(-1, last_F1), -math.inf)
    return torch.maximum(top_k_floor_F1, top_p_floor_F1)
