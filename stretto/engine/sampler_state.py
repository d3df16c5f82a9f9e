"""What the sampler keeps between steps: parameter tensors of recent batches, token counts of penalised sequences.

None of it changes a result: `stretto.engine.sampler` gives the same with a new `SamplerCache` on every call.
Shape letters: M rows of logits, F rows that filter, Q (row, token) pairs with a bias.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.request import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in vLLM: dividing logits by them would overflow."""
NUM_BATCHES = 8
"""Compositions remembered: a step and, when speculating, one for each number of drafted tokens."""
NUM_SEQUENCES = 256
"""Sequences whose counts are remembered; at least four batches' worth are kept whatever this says."""
SEED_MASK = (1 << 64) - 1


def is_greedy(sampling: Sampling) -> bool:
    """Whether the most probable token is taken."""
    return sampling.temperature < GREEDY_BELOW


def wants_penalties(sampling: Sampling) -> bool:
    """Whether the tokens so far change the logits."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def wants_filters(sampling: Sampling) -> bool:
    """Whether some tokens are left out of the draw. Greedy rows never filter: their most probable token stays."""
    filters = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return filters and not is_greedy(sampling)


def check_sampling(sampling: Sampling, vocab: int, source: str) -> None:
    """Refuse what the vocabulary rules out, before a request joins a batch.

    Raises:
        UserError: a token id of ``logit_bias`` or ``stop_ids`` is no token, or a bias is not a finite number.
    """
    for field, ids in (("logit_bias", sampling.logit_bias), ("stop_ids", sampling.stop_ids)):
        for token in ids:
            if not 0 <= token < vocab:
                raise UserError(f"{source}: {field}: {token} is not a token id; they go from 0 to {vocab - 1}")
    for token, bias in sampling.logit_bias.items():
        if not np.isfinite(bias):
            raise UserError(f"{source}: logit_bias: {bias} for token {token}; use -100 to ban a token, 100 to force it")


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
    """Held so that their identities, by which the batch is found again, stay theirs."""
    seeds_M: np.ndarray
    """uint64; 0 for greedy rows, which draw nothing."""
    greedy_M: Tensor | None
    """int64 indices; None: no row is greedy."""
    drawn_M: Tensor | None
    """int64 indices of the others; None: every row is greedy."""
    temperature_M1: Tensor | None
    """fp32, 1 for greedy rows; None: 1 everywhere."""
    bias_row_Q: Tensor | None
    bias_token_Q: Tensor | None
    bias_Q: Tensor | None
    penalised: tuple[int, ...]
    """Rows that look at the tokens so far."""
    penalties_M3: np.ndarray
    """fp32: repetition, presence, frequency."""
    held: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(row, min_tokens, ids that would end it) of rows that set a least length."""
    filters: Filters | None


class SamplerCache:
    """State of one engine's sampler; pass the same object on every call."""

    def __init__(self) -> None:
        self._batches: OrderedDict[tuple[object, ...], Batch] = OrderedDict()
        self._counts: OrderedDict[int, tuple[Sampling, TokenCounts]] = OrderedDict()
        self._plain: dict[int, tuple[Sampling, float | None]] = {}

    def plain(self, row: Sampling) -> float | None:
        """The temperature (0: greedy) where nothing else comes between a row's logits and its token, else None."""
        known = self._plain.get(id(row))
        if known is None:
            if len(self._plain) >= NUM_SEQUENCES:
                self._plain.clear()
            known = self._plain[id(row)] = (
                row,
                _plain_temperature(row),
            )  # the row is held, so its identity stays its own
        return known[1]

    def batch(self, rows: Sequence[Sampling], vocab: int, device: torch.device, end_ids: tuple[int, ...] = ()) -> Batch:
        """The tensors of these rows, built anew only when the composition has changed."""
        key = (*map(id, rows), vocab, device, end_ids)
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = _build(tuple(rows), vocab, device, end_ids)
            if len(self._batches) > NUM_BATCHES:
                self._batches.popitem(last=False)
        self._batches.move_to_end(key)
        return batch

    def counts(self, row: Sampling, tokens: Sequence[int], num_prompt: int, num_rows: int) -> TokenCounts:
        """Counts of ``tokens``; those of the row's last call are moved there, which costs only what differs."""
        known = self._counts.get(id(row))
        counts = known[1] if known is not None else None
        if counts is None or not counts.move_to(tokens, num_prompt):
            counts = TokenCounts(tokens, num_prompt)
            self._counts[id(row)] = (row, counts)
        self._counts.move_to_end(id(row))
        while len(self._counts) > max(NUM_SEQUENCES, 4 * num_rows):
            self._counts.popitem(last=False)
        return counts


def _plain_temperature(row: Sampling) -> float | None:
    if row.grammar is not None or row.min_tokens or row.logit_bias or row.top_logprobs:
        return None
    if wants_penalties(row) or wants_filters(row):
        return None
    return 0.0 if is_greedy(row) else row.temperature


class TokenCounts:
    """How often each distinct token of a sequence stands in its prompt and in its output."""

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        assert 0 <= num_prompt <= len(tokens), f"{num_prompt} prompt tokens of {len(tokens)}"
        self._tokens = list(tokens)
        self._num_prompt = num_prompt
        prompt = np.array(self._tokens[:num_prompt], dtype=np.int64)
        output = np.array(self._tokens[num_prompt:], dtype=np.int64)
        ids, slots = np.unique(np.concatenate([prompt, output]), return_inverse=True)
        self._slot = {token: slot for slot, token in enumerate(ids.tolist())}
        # Columns: token id, times in the prompt, times in the output. Room for as many again before it must grow.
        self._table = np.zeros((2 * len(ids) + 16, 3), dtype=np.int64)
        self._table[: len(ids), 0] = ids
        self._table[: len(ids), 1] = np.bincount(slots[:num_prompt], minlength=len(ids))
        self._table[: len(ids), 2] = np.bincount(slots[num_prompt:], minlength=len(ids))

    @property
    def table(self) -> np.ndarray:
        """int64 [distinct tokens, 3]: id, times in the prompt, times in the output (both 0 after a rejected draft)."""
        return self._table[: len(self._slot)]

    def move_to(self, tokens: Sequence[int], num_prompt: int) -> bool:
        """Count ``tokens`` instead; False, and nothing has changed, where the prompt is another."""
        tokens = list(tokens)
        num_same = len(self._tokens)
        if tokens[:num_same] != self._tokens:
            pairs = zip(self._tokens, tokens, strict=False)
            num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if num_prompt != self._num_prompt or num_same < num_prompt:
            return False
        for token in self._tokens[num_same:]:
            self._table[self._slot[token], 2] -= 1
        for token in tokens[num_same:]:
            slot = self._slot.get(token)
            if slot is None:
                slot = self._slot[token] = len(self._slot)
                if slot == len(self._table):
                    self._table = np.concatenate([self._table, np.zeros_like(self._table)])
                self._table[slot, 0] = token
            self._table[slot, 2] += 1
        self._tokens[num_same:] = tokens[num_same:]
        return True


def _build(rows: tuple[Sampling, ...], vocab: int, device: torch.device, end_ids: tuple[int, ...]) -> Batch:
    greedy = [index for index, row in enumerate(rows) if is_greedy(row)]
    drawn = [index for index, row in enumerate(rows) if not is_greedy(row)]
    assert all([rows[index].seed is not None for index in drawn]), "a request has its seed before it is sampled"
    temperature_M = [1.0 if is_greedy(row) else row.temperature for row in rows]
    bias = [(index, token, value) for index, row in enumerate(rows) for token, value in row.logit_bias.items()]
    assert all([0 <= token < vocab for _, token, _ in bias]), f"logit_bias outside the vocabulary of {vocab}"

    def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        rows=rows,
        seeds_M=np.array([0 if is_greedy(row) else (row.seed or 0) & SEED_MASK for row in rows], dtype=np.uint64),
        greedy_M=tensor(greedy, torch.int64) if greedy else None,
        drawn_M=tensor(drawn, torch.int64) if drawn else None,
        temperature_M1=tensor(temperature_M, torch.float32)[:, None] if set(temperature_M) - {1.0} else None,
        bias_row_Q=tensor([row for row, _, _ in bias], torch.int64) if bias else None,
        bias_token_Q=tensor([token for _, token, _ in bias], torch.int64) if bias else None,
        bias_Q=tensor([value for _, _, value in bias], torch.float32) if bias else None,
        penalised=tuple(index for index, row in enumerate(rows) if wants_penalties(row)),
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
    indices = [index for index, row in enumerate(rows) if wants_filters(row)]
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
