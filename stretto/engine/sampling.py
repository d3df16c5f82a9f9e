"""Sampling: logits processors, the choice of tokens, and random numbers.

Order of the processors: grammar mask, logit bias, repetition, frequency and presence penalty, end tokens before
``min_tokens``, temperature, top-k, top-p, min-p, as in transformers. vLLM's V1 sampler has the same order, except that min-p
comes before top-k and top-p; the two differ only for rows with both top-p and min-p. A mask of -inf
commutes with bias and penalties, so grammar and ``min_tokens`` are one mask here.

- Top-k keeps the k most probable tokens; top-p the fewest most probable tokens whose probabilities sum to at least that share
  of what top-k kept; min-p the tokens with at least that share of the most probable token's probability. Each filter is a
  threshold: tokens as probable as the last one kept are kept too, so the result does not depend on the order of a sort.
- Greedy rows are not filtered; their log-probabilities are those of temperature 1 after mask, bias and penalties.
- If a grammar allows only the end, a sequence may end before ``min_tokens``.
- A row's result does not depend, to the bit, on other rows: no sum covers more than one row, and every sum
  whose order torch could choose by the number of rows is taken over short chunks or in fp64.

Shape letters: M rows of logits, V vocabulary, F rows with filters, K candidates, P pairs of a row and an earlier token,
Q (row, token) pairs with a bias, R rows with a grammar, W words of 32 tokens, C chunks, S tokens of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.engine.request import Sampling, TopLogprob
from stretto.engine.sequence import SEED_MASK, TokenCounts

NUM_CANDIDATES = 256
"""Number of most probable tokens that top-p examines first; sorting a whole vocabulary takes tens of times longer."""
NUM_BATCHES = 8
"""Number of cached batch compositions."""
CHUNK = 256
"""Tokens per partial sum: about the square root of a large vocabulary, so both levels of a draw are short."""
LARGEST = 1.0 - 2.0**-52
"""Largest random number. Its product with any total is less than that total in fp64; with one more bit, it might not be."""
_WEYL = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of the rows that have any. Numbers are fp64, so thresholds are not rounded."""

    rows_F: Tensor | None
    """int64 indices; None: all rows of the batch."""
    top_k_F1: Tensor
    """int64; the size of the vocabulary for rows without top-k."""
    top_p_F1: Tensor
    log_min_p_F1: Tensor
    """-inf for rows without min-p."""
    most_k: int
    """Largest top-k of a row; 0: no row has one."""
    any_top_p: bool
    needs_full_mass: bool
    """Whether a row has top-k and top-p: its top-p is a share of what top-k kept."""
    any_without_top_k: bool
    """Whether a row has top-p without top-k."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sampling parameters of the rows of one step as tensors. Built by `SamplerCache.batch`, immutable."""

    rows: tuple[Sampling, ...]
    end_ids: tuple[int, ...]
    seeds_M: np.ndarray
    """uint64; 0 for greedy rows, which draw no random number."""
    greedy_M: Tensor | None
    """int64 indices of greedy rows; None: there are none."""
    drawn_M: Tensor | None
    """int64 indices of rows that are not greedy; None: there are none."""
    temperature_M1: Tensor | None
    """fp32, 1 for greedy rows; None: 1 for all rows."""
    bias: tuple[Tensor, ...] | None
    """Row, token and bias, each [Q]."""
    penalised: tuple[int, ...]
    """Rows with penalties."""
    penalties_M3: np.ndarray
    """fp32: repetition, presence, frequency."""
    too_short: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(row, min_tokens, end tokens) of rows with ``min_tokens``."""
    filters: Filters | None


class SamplerCache:
    """Tensors of recent batches for one vocabulary and device. Saves time and changes no result; one per engine."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []  # most recently used first

    def batch(self, rows: Sequence[Sampling], vocab: int, device: torch.device, end_ids: tuple[int, ...] = ()) -> Batch:
        """The tensors of these rows, from the cache if the rows are the same objects."""
        for place, batch in enumerate(self._batches):
            # compared by identity: comparing all parameters would take longer than the cache saves
            if len(batch.rows) == len(rows) and all(map(is_, batch.rows, rows)) and batch.end_ids == end_ids:
                self._batches.insert(0, self._batches.pop(place))
                return batch
        self._batches = [_build(tuple(rows), vocab, device, end_ids), *self._batches[: NUM_BATCHES - 1]]
        return self._batches[0]


def _build(rows: tuple[Sampling, ...], vocab: int, device: torch.device, end_ids: tuple[int, ...]) -> Batch:
    greedy = [index for index, row in enumerate(rows) if row.is_greedy]
    drawn = [index for index, row in enumerate(rows) if not row.is_greedy]
    assert all([rows[index].seed is not None for index in drawn]), "a row that is not greedy has no seed"
    temperature_M = [1.0 if row.is_greedy else row.temperature for row in rows]
    bias = [(index, token, value) for index, row in enumerate(rows) for token, value in row.logit_bias.items()]
    assert all([0 <= token < vocab for _, token, _ in bias]), f"logit_bias outside the vocabulary of {vocab}"

    def tensor(values: Sequence[object]) -> Tensor:
        return torch.tensor(values, device=device)

    return Batch(
        rows=rows,
        end_ids=end_ids,
        seeds_M=np.array([0 if row.is_greedy else (row.seed or 0) & SEED_MASK for row in rows], dtype=np.uint64),
        greedy_M=tensor(greedy) if greedy else None,
        drawn_M=tensor(drawn) if drawn else None,
        temperature_M1=tensor(temperature_M)[:, None] if set(temperature_M) - {1.0} else None,
        bias=tuple(map(tensor, zip(*bias, strict=True))) if bias else None,
        penalised=tuple(index for index, row in enumerate(rows) if row.has_penalties),
        penalties_M3=np.array(
            [(row.repetition_penalty, row.presence_penalty, row.frequency_penalty) for row in rows], dtype=np.float32
        ).reshape(-1, 3),
        too_short=tuple(
            (index, row.min_tokens, (*(() if row.ignore_eos else end_ids), *row.stop_ids))
            for index, row in enumerate(rows)
            if row.min_tokens
        ),
        filters=_build_filters(rows, vocab, device),
    )


def _build_filters(rows: tuple[Sampling, ...], vocab: int, device: torch.device) -> Filters | None:
    indices = [index for index, row in enumerate(rows) if row.has_filters]
    chosen = [rows[index] for index in indices]
    if not chosen:
        return None
    top_k_F = [min(row.top_k, vocab) if row.top_k else vocab for row in chosen]
    with np.errstate(divide="ignore"):
        log_min_p_F = np.log(np.array([row.min_p for row in chosen], dtype=np.float64))
    return Filters(
        rows_F=None if len(indices) == len(rows) else torch.tensor(indices, device=device),
        top_k_F1=torch.tensor(top_k_F, device=device)[:, None],
        top_p_F1=torch.tensor([row.top_p for row in chosen], dtype=torch.float64, device=device)[:, None],
        log_min_p_F1=torch.from_numpy(log_min_p_F).to(device)[:, None],
        most_k=max((k for k in top_k_F if k < vocab), default=0),
        any_top_p=any(row.top_p < 1.0 for row in chosen),
        needs_full_mass=any(row.top_p < 1.0 and k < vocab for row, k in zip(chosen, top_k_F, strict=True)),
        any_without_top_k=any(row.top_p < 1.0 and k == vocab for row, k in zip(chosen, top_k_F, strict=True)),
    )


class Row(NamedTuple):
    """Everything that the processed log-probabilities of one row depend on."""

    sampling: Sampling
    """The cache works only if a sequence has the same object in every step."""
    tokens: Sequence[int] = ()
    """Prompt and output before the new token; read only for penalties and ``min_tokens``."""
    num_prompt: int = 0
    """Number of prompt tokens in ``tokens``."""
    mask: np.ndarray | None = None
    """Tokens that a grammar allows, in the format of `stretto.engine.grammar.GrammarState.mask`; None: all."""
    counts: TokenCounts | None = None
    """Token counts of the sequence, which `process` updates; None: counted from the start."""


def process(
    logits_MV: Tensor, rows: Sequence[Row], *, end_ids: tuple[int, ...] = (), cache: SamplerCache | None = None
) -> Tensor:
    """Processed log-probabilities [M, V] (fp32, nats) from which tokens are drawn; -inf for excluded tokens.

    Args:
        logits_MV: fp32; not changed.
        end_ids: end tokens of the tokenizer, excluded before ``min_tokens`` unless ``ignore_eos``; a row's ``stop_ids`` are too.
        cache: the engine's cache; None: no cache.
    """
    assert logits_MV.dtype == torch.float32, f"logits are {logits_MV.dtype}; the sampler works in fp32"
    assert len(rows) == len(logits_MV), f"{len(logits_MV)} rows of logits for {len(rows)} sequences"
    samplings = [row.sampling for row in rows]
    batch = (cache or SamplerCache()).batch(samplings, logits_MV.shape[1], logits_MV.device, end_ids)
    x_MV = logits_MV
    has_grammar = any([row.mask is not None for row in rows])
    if has_grammar or batch.bias is not None or batch.penalised or batch.too_short:
        x_MV = logits_MV.clone()
        _mask(x_MV, batch, rows)
        if batch.bias is not None:
            x_MV.index_put_(batch.bias[:2], batch.bias[2], accumulate=True)
        if batch.penalised:
            _penalise(x_MV, batch, rows)
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
    samplings: Sequence[Sampling],
    positions: Sequence[int] | np.ndarray,
    *,
    end_ids: tuple[int, ...] = (),
    cache: SamplerCache | None = None,
) -> Tensor:
    """Choose a token for each row of log-probabilities from `process`; int64 [M].

    A greedy row gets its most probable token, the lowest id among equals. Other rows draw a token with the random number
    `uniform` of seed and position.

    Args:
        positions: index of the chosen token in the sequence of each row, including the prompt.
        end_ids: those given to `process`, so that both use one batch of the cache.
    """
    assert len(samplings) == len(positions) == len(logp_MV), (
        f"{len(logp_MV)}, {len(samplings)} and {len(positions)} rows"
    )
    batch = (cache or SamplerCache()).batch(samplings, logp_MV.shape[1], logp_MV.device, end_ids)
    if batch.drawn_M is None:
        return _argmax(logp_MV)
    uniform_M = uniform(batch.seeds_M, np.asarray(positions))
    if batch.greedy_M is None:
        return draw(logp_MV, uniform_M)
    ids_M = torch.empty(len(logp_MV), dtype=torch.int64, device=logp_MV.device)
    ids_M[batch.greedy_M] = _argmax(logp_MV[batch.greedy_M])
    ids_M[batch.drawn_M] = draw(logp_MV[batch.drawn_M], uniform_M[[not row.is_greedy for row in batch.rows]])
    return ids_M


def _argmax(x_MV: Tensor) -> Tensor:
    """Column [M] of each row's largest entry, the first among equals. On a CPU, numpy takes a tenth of torch's time."""
    return torch.from_numpy(x_MV.numpy().argmax(-1)) if x_MV.device.type == "cpu" else x_MV.argmax(-1)


def top_log_probs(logp_MV: Tensor, num: int) -> list[tuple[TopLogprob, ...]]:
    """The ``num`` most probable tokens of each row, best first, ties by id, without excluded tokens."""
    values_MK, ids_MK = logp_MV.topk(min(num, logp_MV.shape[1]), dim=-1)
    return [
        tuple(
            TopLogprob(token, value)
            for value, token in sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
            if value > -math.inf
        )
        for values, ids in zip(values_MK.tolist(), ids_MK.tolist(), strict=True)
    ]


def _mask(x_MV: Tensor, batch: Batch, rows: Sequence[Row]) -> None:
    """Set to -inf, in place, tokens that a grammar excludes, and end tokens before ``min_tokens``."""
    allowed = {place: row.mask for place, row in enumerate(rows) if row.mask is not None}
    barred: list[tuple[int, int]] = []
    for place, min_tokens, ends in batch.too_short:
        if len(rows[place].tokens) - rows[place].num_prompt >= min_tokens:
            continue
        if place not in allowed:
            barred += [(place, token) for token in ends]
            continue
        longer = allowed[place].copy()
        bytes_of = longer.view(np.uint8)
        for token in ends:
            # a padded embedding has tokens beyond the words, which are not allowed anyway
            if token < 8 * len(bytes_of):
                bytes_of[token // 8] &= ~(1 << token % 8) & 0xFF
        if longer.any():
            allowed[place] = longer
    if barred:
        places, ids = torch.tensor(barred, device=x_MV.device).unbind(-1)
        x_MV[places, ids] = -math.inf
    if allowed:
        # bit b of word w is token 32·w + b; tokens beyond the words are not allowed
        words_RW, vocab = np.stack(list(allowed.values())), x_MV.shape[1]
        bits_RV = np.unpackbits(words_RW.view(np.uint8), axis=1, count=vocab, bitorder="little")
        places = torch.tensor(list(allowed), device=x_MV.device)
        x_MV[places] = x_MV[places].masked_fill_(torch.from_numpy(bits_RV == 0).to(x_MV.device), -math.inf)


def _penalise(x_MV: Tensor, batch: Batch, rows: Sequence[Row]) -> None:
    """Apply repetition, then frequency and presence penalty, in place, to the tokens that occur in each row's sequence."""
    tables = []
    for row in [rows[place] for place in batch.penalised]:
        counts = row.counts or TokenCounts(row.tokens, row.num_prompt)
        counts.extend(row.tokens)
        tables.append(counts.table)
    places = np.repeat(batch.penalised, [len(table) for table in tables])
    row_P = torch.from_numpy(places).to(x_MV.device)
    id_P, in_output_P = torch.from_numpy(np.concatenate(tables)).to(x_MV.device).unbind(-1)
    repetition_P, presence_P, frequency_P = torch.from_numpy(batch.penalties_M3[places]).to(x_MV.device).unbind(-1)
    x_P = x_MV[row_P, id_P]
    x_P = torch.where(x_P > 0, x_P / repetition_P, x_P * repetition_P)
    x_MV[row_P, id_P] = x_P - frequency_P * in_output_P - presence_P * (in_output_P > 0)


def _filter(logp_FV: Tensor, filters: Filters) -> Tensor:
    """Normalised log-probabilities of the tokens above the highest of the three thresholds, -inf for others."""
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
    """Lowest log-probability [F, 1] that top-k and top-p keep; None: more than ``num`` candidates are needed."""
    vocab = logp_FV.shape[1]
    sorted_FK = logp_FV.topk(num, dim=-1).values
    last_k_F1 = (filters.top_k_F1 - 1).clamp_max(num - 1)
    kth_F1 = sorted_FK.gather(-1, last_k_F1)
    top_k_floor_F1 = torch.where(filters.top_k_F1 < vocab, kth_F1, -math.inf)
    if not filters.any_top_p:
        return top_k_floor_F1
    goal_F1 = filters.top_p_F1
    if filters.needs_full_mass:  # top-k also keeps all tokens tied with the k-th, however many there are
        left_F1 = row_sums(logp_FV.exp().masked_fill_(logp_FV < top_k_floor_F1, 0.0))[:, None]
        goal_F1 = torch.where(filters.top_k_F1 < vocab, goal_F1 * left_F1, goal_F1)
    ends_FK = sorted_FK.double().exp().cumsum(-1)
    # The last candidate that is kept is the one with which the sum reaches the goal. If the sum of a top-k row never does,
    # tokens tied with its k-th lie beyond the candidates, so its threshold is still the k-th.
    num_short_F1 = (ends_FK < goal_F1).sum(-1, keepdim=True)
    is_open_F1 = (num_short_F1 >= num) & (filters.top_p_F1 < 1.0) & (filters.top_k_F1 == vocab)
    if num < vocab and bool(is_open_F1.any()):
        return None
    last_F1 = torch.minimum(num_short_F1, last_k_F1)
    top_p_floor_F1 = torch.where(filters.top_p_F1 < 1.0, sorted_FK.gather(-1, last_F1), -math.inf)
    return torch.maximum(top_k_floor_F1, top_p_floor_F1)


def uniform(seed: int | np.ndarray, position: int | np.ndarray) -> np.ndarray:
    """Random numbers in [0, 1), fp64 with 52 random bits: a pure function of the arguments, which broadcast; [1] for two numbers.

    Each argument is mixed into the state with the finaliser of SplitMix64 (Steele, Lea and Flood 2014, constants by Stafford),
    whose avalanche effect makes the numbers of neighbouring seeds and positions independent.
    """
    words = [
        np.array([word & SEED_MASK], dtype=np.uint64) if isinstance(word, int) else np.asarray(word).astype(np.uint64)
        for word in (seed, position, 0)
    ]
    if all([word.shape == (1,) for word in words]):
        return np.array([_uniform_of(*[int(word[0]) for word in words])])
    state = np.zeros(1, dtype=np.uint64)  # an array wraps around modulo 2^64 silently; a numpy scalar would warn
    for word in words:
        state = (state ^ word) + np.uint64(_WEYL)
        for shift, factor in _ROUNDS:
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return (state >> np.uint64(12)) * 2.0**-52


def _uniform_of(*words: int) -> float:
    """`uniform` of single numbers in Python integers, which saves tens of microseconds of numpy calls."""
    state = 0
    for word in words:
        state = ((state ^ word) + _WEYL) & SEED_MASK
        for shift, factor in _ROUNDS:
            state = ((state ^ (state >> shift)) * factor) & SEED_MASK
    return (state >> 12) * 2.0**-52


def draw(logp_MV: Tensor, uniform_M: np.ndarray) -> Tensor:
    """Token ids [M] drawn by inverting the cumulative sum of each row's probabilities, which need not sum to exactly 1.

    First draws a chunk, then a token in the chunk, so it reads the vocabulary once and needs no cumulative sum over it. On a CPU,
    numpy computes the sums: there are many calls with little work.
    """
    if logp_MV.device.type != "cpu":
        return draw_on_device(logp_MV, torch.from_numpy(uniform_M).to(logp_MV.device))
    num_rows, vocab = logp_MV.shape
    probs_MCS = _in_chunks(logp_MV)
    weights_MC, rows_M = probs_MCS.sum(-1).numpy(), np.arange(num_rows)
    ends_MC, goal_M, chunk_M = _invert(weights_MC, uniform_M)
    left_M = (ends_MC[rows_M, chunk_M] - goal_M) / weights_MC[rows_M, chunk_M]
    inside_MS = probs_MCS.numpy()[rows_M, chunk_M]
    _, _, token_M = _invert(inside_MS, np.minimum(np.maximum(1.0 - left_M, 0.0), LARGEST))
    return torch.from_numpy(np.minimum(chunk_M * CHUNK + token_M, vocab - 1))  # a row of NaN ends in the padding


def draw_on_device(logp_MV: Tensor, uniform_M: Tensor) -> Tensor:
    """`draw` without waiting for the device. On a CPU it gives the same tokens; a GPU adds in another order, so that a random number
    within rounding (fp64) of a bound between two tokens may choose the other.
    """
    vocab, probs_MCS = logp_MV.shape[1], _in_chunks(logp_MV)

    def inverted(weights_MC: Tensor, uniform_M1: Tensor) -> tuple[Tensor, Tensor]:
        ends_MC = weights_MC.double().cumsum(-1)
        goal_M1 = uniform_M1 * ends_MC[:, -1:]
        column_M1 = (ends_MC <= goal_M1).sum(-1, keepdim=True).clamp_max(ends_MC.shape[1] - 1)
        return column_M1, ends_MC.gather(1, column_M1) - goal_M1

    weights_MC = probs_MCS.sum(-1)
    chunk_M1, above_M1 = inverted(weights_MC, uniform_M[:, None])
    left_M1 = above_M1 / weights_MC.gather(1, chunk_M1)
    inside_MS = probs_MCS.gather(1, chunk_M1[..., None].expand(-1, -1, CHUNK)).squeeze(1)
    token_M1, _ = inverted(inside_MS, (1.0 - left_M1).clamp(0.0, LARGEST))
    return (chunk_M1 * CHUNK + token_M1).squeeze(1).clamp_max(vocab - 1)


def _in_chunks(logp_MV: Tensor) -> Tensor:
    """Probabilities [M, C, S], with zeros after the vocabulary."""
    num_rows, vocab = logp_MV.shape
    num_chunks = -(-vocab // CHUNK)
    probs_MCS = logp_MV.new_empty(num_rows, num_chunks, CHUNK)
    probs_MCS[:, -1, vocab - (num_chunks - 1) * CHUNK :] = 0.0
    torch.exp(logp_MV, out=probs_MCS.flatten(1)[:, :vocab])
    return probs_MCS


def _invert(weights_MC: np.ndarray, uniform_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cumulative sums [M, C], the goal [M] (``uniform_M`` times the total), and the first column [M] whose sum exceeds the goal.

    A column of weight 0 is never chosen, because the sum before it exceeds the goal if its own sum does. The index of the first
    sum above the goal is the number of sums that are not; in a row of NaN, no sum is.
    """
    ends_MC = weights_MC.cumsum(-1, dtype=np.float64)
    goal_M = uniform_M * ends_MC[:, -1]
    column_M = np.minimum((ends_MC <= goal_M[:, None]).sum(-1), ends_MC.shape[1] - 1)
    return ends_MC, goal_M, column_M


def row_sums(x_MV: Tensor) -> Tensor:
    """Sums of rows, fp64 [M]. torch splits ``sum(-1)`` of a single long row among threads, so its order would depend on M."""
    end = x_MV.shape[1] // CHUNK * CHUNK
    head_M = x_MV[:, :end].unflatten(1, (-1, CHUNK)).sum(-1).double().sum(-1)
    return head_M + x_MV[:, end:].double().sum(-1)
