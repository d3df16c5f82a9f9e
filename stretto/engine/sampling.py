"""Sampling: logits processors, the choice of tokens, and random numbers.

Order of the processors: grammar mask, logit bias, repetition, frequency and presence penalty, end tokens before
``min_tokens``, temperature, top-k, top-p, min-p. It is that of transformers. vLLM's is the same but for min-p, which it
applies before top-k and top-p (its V1 sampler); the two differ only where a row sets both top-p and min-p. A mask of -inf
commutes with bias and penalties, so grammar and ``min_tokens`` are one mask here.

- Top-k keeps the k most probable tokens; top-p the fewest most probable ones that together have at least that share
  of what top-k left; min-p those with at least that share of the most probable token's probability. Each is a
  threshold: a token as probable as the last one kept is kept too, so the result does not hang on the order of a sort.
- A greedy row is not filtered, and its log-probabilities are those of temperature 1 after mask, bias and penalties.
- Where a grammar allows nothing but the end, it may end before ``min_tokens``.
- A row's result, to the bit, does not depend on the rows beside it: no sum runs over more than a row, and every sum
  whose order torch may choose by the number of rows is taken over short chunks or in fp64.

Shape letters: M rows of logits, V vocabulary, F rows that filter, K candidates, P pairs of a row and a seen token,
Q (row, token) pairs with a bias, R rows with a grammar, W words of 32 tokens, C chunks, S tokens of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
import torch
from torch import Tensor

from stretto.engine.request import Sampling, TopLogprob
from stretto.engine.sequence import SEED_MASK, TokenCounts

NUM_CANDIDATES = 256
"""Most probable tokens among which top-p looks first; sorting a whole vocabulary costs tens of times more."""
NUM_BATCHES = 8
"""Compositions of a batch remembered."""
CHUNK = 256
"""Tokens summed at once: near the root of a large vocabulary, so that both levels of the draw are short."""
LARGEST = 1.0 - 2.0**-52
"""Largest random number: times any total it stays below that total, which one more bit would not ensure in fp64."""
_WEYL = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


@dataclass(frozen=True, slots=True)
class Filters:
    """Rows that filter, and how. Numbers are fp64 so that a threshold has no rounding of its own."""

    rows_F: Tensor | None
    """int64; None: all rows of the batch."""
    top_k_F1: Tensor
    """int64; the vocabulary where a row keeps all."""
    top_p_F1: Tensor
    log_min_p_F1: Tensor
    """-inf where a row sets none."""
    most_k: int
    """Largest top-k that a row asks for; 0: none does."""
    any_top_p: bool
    needs_full_mass: bool
    """A row filters by top-k and then by top-p, which looks at the share of what top-k left."""
    any_without_top_k: bool
    """A row asks for top-p alone."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step as tensors. Built by `SamplerCache.batch`; nothing in it changes."""

    rows: tuple[Sampling, ...]
    end_ids: tuple[int, ...]
    seeds_M: np.ndarray
    """uint64; 0 for greedy rows, which draw nothing."""
    greedy_M: Tensor | None
    """int64 indices; None: no row is greedy."""
    drawn_M: Tensor | None
    """int64 indices of the others; None: every row is greedy."""
    temperature_M1: Tensor | None
    """fp32, 1 for greedy rows; None: 1 everywhere."""
    bias: tuple[Tensor, ...] | None
    """Rows, tokens and what is added to their logits, each [Q]."""
    penalised: tuple[int, ...]
    """Rows that look at the tokens so far."""
    penalties_M3: np.ndarray
    """fp32: repetition, presence, frequency."""
    held: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(row, min_tokens, ids that would end it) of rows that set a least length."""
    filters: Filters | None


class SamplerCache:
    """Tensors of recent batches over one vocabulary and device. It changes no result; pass one engine's on every call."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []  # used last first

    def batch(self, rows: Sequence[Sampling], vocab: int, device: torch.device, end_ids: tuple[int, ...] = ()) -> Batch:
        """The tensors of these rows, built anew only when the composition has changed."""
        for place, batch in enumerate(self._batches):
            # of one object each: to compare settings would cost more than they save
            if len(batch.rows) == len(rows) and all(map(is_, batch.rows, rows)) and batch.end_ids == end_ids:
                self._batches.insert(0, self._batches.pop(place))
                return batch
        self._batches = [_build(tuple(rows), vocab, device, end_ids), *self._batches[: NUM_BATCHES - 1]]
        return self._batches[0]


def _build(rows: tuple[Sampling, ...], vocab: int, device: torch.device, end_ids: tuple[int, ...]) -> Batch:
    greedy = [index for index, row in enumerate(rows) if row.is_greedy]
    drawn = [index for index, row in enumerate(rows) if not row.is_greedy]
    assert all([rows[index].seed is not None for index in drawn]), "a request has its seed before it is sampled"
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
        held=tuple(
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


def process(
    logits_MV: Tensor,
    rows: Sequence[Sampling],
    tokens_so_far: Sequence[Sequence[int]],
    num_prompt: Sequence[int],
    masks: Sequence[np.ndarray | None] | None = None,
    *,
    end_ids: tuple[int, ...] = (),
    counts: Sequence[TokenCounts | None] | None = None,
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
        counts: of the row's sequence, moved to these tokens; None, as for all where not given: counted anew.
        cache: the engine's; None computes everything anew.
    """
    assert logits_MV.dtype == torch.float32, f"logits are {logits_MV.dtype}; the sampler works in fp32"
    assert len(rows) == len(tokens_so_far) == len(num_prompt) == len(logits_MV), (
        f"{len(logits_MV)} rows of logits, {len(rows)} of settings, {len(tokens_so_far)} of tokens, {len(num_prompt)}"
    )
    batch = (cache or SamplerCache()).batch(rows, logits_MV.shape[1], logits_MV.device, end_ids)
    x_MV = logits_MV
    has_grammar = masks is not None and any([mask is not None for mask in masks])
    if has_grammar or batch.bias is not None or batch.penalised or batch.held:
        x_MV = logits_MV.clone()
        _mask(x_MV, batch, masks or [None] * len(rows), tokens_so_far, num_prompt)
        if batch.bias is not None:
            x_MV.index_put_(batch.bias[:2], batch.bias[2], accumulate=True)
        if batch.penalised:
            _penalise(x_MV, batch, tokens_so_far, num_prompt, counts or [None] * len(rows))
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
    *,
    cache: SamplerCache | None = None,
) -> Tensor:
    """Choose a token of each row of what `process` returned; int64 [M].

    A greedy row takes its most probable token, of several the one with the lowest id. Every other row draws by
    `uniform` of its seed and position.

    Args:
        positions: index in its sequence, prompt included, of the token that each row chooses.
    """
    assert len(rows) == len(positions) == len(logp_MV), f"{len(logp_MV)}, {len(rows)} and {len(positions)} rows"
    batch = (cache or SamplerCache()).batch(rows, logp_MV.shape[1], logp_MV.device)
    if batch.drawn_M is None:
        return _argmax(logp_MV)
    uniform_M = uniform(batch.seeds_M, np.asarray(positions))
    if batch.greedy_M is None:
        return draw(logp_MV, uniform_M)
    ids_M = torch.empty(len(logp_MV), dtype=torch.int64, device=logp_MV.device)
    ids_M[batch.greedy_M] = _argmax(logp_MV[batch.greedy_M])
    ids_M[batch.drawn_M] = draw(logp_MV[batch.drawn_M], uniform_M[batch.drawn_M.cpu().numpy()])
    return ids_M


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
        # bit b of word w is token 32·w + b; tokens past the words are not allowed
        words_RW, vocab = np.stack(list(allowed.values())), x_MV.shape[1]
        bits_RV = np.unpackbits(words_RW.view(np.uint8), axis=1, count=vocab, bitorder="little")
        rows = torch.tensor(list(allowed), device=x_MV.device)
        x_MV[rows] = x_MV[rows].masked_fill_(torch.from_numpy(bits_RV == 0).to(x_MV.device), -math.inf)


def _penalise(
    x_MV: Tensor,
    batch: Batch,
    tokens_so_far: Sequence[Sequence[int]],
    num_prompt: Sequence[int],
    counts: Sequence[TokenCounts | None],
) -> None:
    """Repetition, then frequency and presence, in place, on the tokens seen only."""
    tables = []
    for row in batch.penalised:
        known = counts[row] or TokenCounts(tokens_so_far[row], num_prompt[row])
        known.move_to(tokens_so_far[row])
        tables.append(known.table.copy())
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


def uniform(seed: int | np.ndarray, position: int | np.ndarray) -> np.ndarray:
    """fp64 in [0, 1) with 52 random bits; a pure function of its arguments, which broadcast: [1] of two numbers.

    Each argument is stirred in with the finaliser of SplitMix64 (Steele, Lea and Flood 2014, constants by Stafford):
    its avalanche makes neighbouring seeds and positions independent.
    """
    words = [
        np.array([word & SEED_MASK], dtype=np.uint64) if isinstance(word, int) else np.asarray(word).astype(np.uint64)
        for word in (seed, position, 0)
    ]
    if all([word.shape == (1,) for word in words]):
        return np.array([_uniform_of(*[int(word[0]) for word in words])])
    state = np.zeros(1, dtype=np.uint64)  # arrays wrap around modulo 2^64 in silence, numpy's scalars warn
    for word in words:
        state = (state ^ word) + np.uint64(_WEYL)
        for shift, factor in _ROUNDS:
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return (state >> np.uint64(12)) * 2.0**-52


def _uniform_of(*words: int) -> float:
    """`uniform` of one number each, without the tens of microseconds that as many numpy calls on one number take."""
    state = 0
    for word in words:
        state = ((state ^ word) + _WEYL) & SEED_MASK
        for shift, factor in _ROUNDS:
            state = ((state ^ (state >> shift)) * factor) & SEED_MASK
    return (state >> 12) * 2.0**-52


def draw(logp_MV: Tensor, uniform_M: np.ndarray) -> Tensor:
    """Token ids [M] drawn by inverting the running sum of each row's exponentials, which need not add up to 1 exactly.

    The chunk first, then the token within it: one pass over the vocabulary, no running sum of it. The sums are numpy's,
    on a GPU too: there are many calls and little work.
    """
    num_rows, vocab = logp_MV.shape
    num_chunks = -(-vocab // CHUNK)
    probs_MCS = logp_MV.new_empty(num_rows, num_chunks, CHUNK)
    probs_MCS[:, -1, vocab - (num_chunks - 1) * CHUNK :] = 0.0
    torch.exp(logp_MV, out=probs_MCS.flatten(1)[:, :vocab])
    weights_MC, rows_M = probs_MCS.sum(-1).cpu().numpy(), np.arange(num_rows)
    ends_MC, goal_M, chunk_M = _invert(weights_MC, uniform_M)
    left_M = (ends_MC[rows_M, chunk_M] - goal_M) / weights_MC[rows_M, chunk_M]
    if probs_MCS.device.type == "cpu":
        inside_MS = probs_MCS.numpy()[rows_M, chunk_M]
    else:
        inside_MS = probs_MCS[torch.from_numpy(rows_M), torch.from_numpy(chunk_M)].cpu().numpy()
    _, _, token_M = _invert(inside_MS, np.minimum(np.maximum(1.0 - left_M, 0.0), LARGEST))
    ids_M = np.minimum(chunk_M * CHUNK + token_M, vocab - 1)  # a row of NaN ends in the padding
    return torch.from_numpy(ids_M).to(logp_MV.device)


def _invert(weights_MC: np.ndarray, uniform_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Running sums [M, C], the share of their total asked for [M], and the first column that exceeds it [M].

    A column of weight 0 is never first to exceed anything, so it is never taken. Sums rise, so the first to exceed is
    behind as many as do not; none does of NaN.
    """
    ends_MC = weights_MC.cumsum(-1, dtype=np.float64)
    goal_M = uniform_M * ends_MC[:, -1]
    column_M = np.minimum((ends_MC <= goal_M[:, None]).sum(-1), ends_MC.shape[1] - 1)
    return ends_MC, goal_M, column_M


def row_sums(x_MV: Tensor) -> Tensor:
    """fp64 [M]; of a single long row torch shares ``sum(-1)`` out among threads, so that its order depends on M."""
    whole = x_MV.shape[1] // CHUNK * CHUNK
    head_M = x_MV[:, :whole].unflatten(1, (-1, CHUNK)).sum(-1).double().sum(-1)
    return head_M + x_MV[:, whole:].double().sum(-1)
