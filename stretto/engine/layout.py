"""One step as tensors: which tokens there are, where they stand in the cache, which layers and experts each may use.

All that depends only on the step is made here, once; the layers read it.

Shape letters: N tokens of a step or of a part of it, Q chunks, B chunks of a group, M pages of the longest chunk, T = M·Z
keys, Z tokens a page, U Subnets, L MoE layers of the maximum network, E experts of its widest layer, K largest top-k,
R rotated channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from stretto.engine.sequence import Chunk
from stretto.model.spec import ModelConfig, Subnet, check_subnet
from stretto.model.transformer import MoeLayer, Transformer
from stretto.ops.operators import MASKED, rotary_tables
from stretto.ops.paged import Group, RouteRule, Spans

_MAX_KNOWN = 1024
"""Subnets and compositions remembered; a client may name a Subnet of its own in every request."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a Subnet means in each MoE layer of the maximum network."""

    layers: frozenset[int]
    num_experts: tuple[int, ...]
    """By MoE row; 0 where the layer is left out. So is ``top_k``."""
    top_k: tuple[int, ...]
    bias_LE: Tensor
    """fp32, added to scores: the balance bias, `MASKED` where an expert may not be chosen."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring layers that compute the same tokens."""

    layers: tuple[int, ...]
    tokens_N: Tensor | None
    """int64, which tokens of the step; None: all."""
    spans: Spans
    rules: dict[int, RouteRule]
    """By MoE row."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A whole step."""

    ids_N: Tensor
    slots_N: Tensor
    """int64, place of each token in the cache."""
    runs: tuple[Run, ...]
    wanted_M: Tensor | None
    """int64, tokens whose logits are wanted, by chunk as the caller ordered them; None: all, in order."""


class Planner:
    """Makes layouts for one network; remembers what Subnets mean. Made anew when weights change: it holds biases."""

    def __init__(self, model: Transformer, page_size: int, rotary: tuple[Tensor, Tensor] | None = None):
        """``rotary`` are cosines and sines by position, where they are not to be `rotary_tables`'."""
        config, device = model.config, model.embedding.weight.device
        self._config, self._page_size, self._device = config, page_size, device
        self._dtype = model.embedding.weight.dtype
        self._moe = [block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer)]
        self._moe_row = {layer: row for row, layer in enumerate(config.moe_layers)}
        cos_PR, sin_PR = rotary or rotary_tables(
            torch.arange(config.max_positions, device=device), config.rotary_dim, config.rope_theta
        )
        halves = (torch.cat((cos_PR, cos_PR), -1), torch.cat((-sin_PR, sin_PR), -1))
        self._rotary_P2R = torch.stack(halves, 1).to(self._dtype)
        self._by_id: dict[int, tuple[Subnet, Choices]] = {}
        self._choices: dict[Subnet, Choices] = {}
        self._rules: dict[tuple[tuple[int, int], ...], dict[int, RouteRule]] = {}

    def layout(self, chunks: Sequence[Chunk]) -> Layout:
        """Tensors of a step over ``chunks``; tokens are reordered so that chunks of one length are neighbours."""
        places = sorted(range(len(chunks)), key=lambda place: _group_key(chunks[place], self._page_size))
        ordered = [chunks[place] for place in places]
        choices = [self.choices(chunk.subnet) for chunk in ordered]
        runs: list[Run] = []
        parts: dict[tuple[bool, ...], Run] = {}
        distinct = list({id(choice): choice for choice in choices}.values())
        for active, members in groupby(
            range(self._config.num_layers), lambda layer: tuple(layer in choice.layers for choice in distinct)
        ):
            if any(active):
                if active not in parts:
                    keep = {id(choice) for choice, is_active in zip(distinct, active, strict=True) if is_active}
                    parts[active] = self._part(ordered, choices, None if all(active) else keep)
                part = parts[active]
                runs.append(Run(tuple(members), part.tokens_N, part.spans, part.rules))
        whole = next((run.spans for run in runs if run.tokens_N is None), None)
        slots_N = self._spans(ordered).slots_N if whole is None else whole.slots_N
        ids_N = self._tensor(np.fromiter(chain.from_iterable(chunk.tokens for chunk in ordered), np.int64))
        return Layout(ids_N, slots_N, tuple(runs), self._wanted(chunks, places))

    def choices(self, subnet: Subnet) -> Choices:
        """What ``subnet`` means; remembered for the object, since to compare Subnets would cost more than a layer."""
        known = self._by_id.get(id(subnet))
        if known is None or known[0] is not subnet:  # an object that is gone lends its id to another
            if len(self._by_id) >= _MAX_KNOWN:
                self._by_id.clear()
                self._choices.clear()
                self._rules.clear()
            if subnet not in self._choices:
                self._choices[subnet] = self._read(check_subnet(self._config, subnet))
            known = self._by_id[id(subnet)] = (subnet, self._choices[subnet])
        return known[1]

    def _read(self, subnet: Subnet) -> Choices:
        config = self._config
        num_experts, top_k = [0] * len(self._moe), [0] * len(self._moe)
        kept = [row for layer, row in self._moe_row.items() if layer in subnet.layers]
        for row, experts, k in zip(kept, subnet.experts, subnet.top_k, strict=True):
            num_experts[row], top_k[row] = experts, k
        bias_LE = torch.full((len(self._moe), config.num_experts), MASKED, device=self._device)
        for row, experts in enumerate(num_experts):
            if experts:
                layer = self._moe[row]
                own_E = layer.bias_WE[config.branch(experts)].float() if config.selection_bias else torch.tensor(0.0)
                allowed_E = layer.rank_E < experts
                bias_LE[row, : len(allowed_E)] = torch.where(allowed_E, own_E.to(self._device), MASKED)
        return Choices(frozenset(subnet.layers), tuple(num_experts), tuple(top_k), bias_LE)

    def _part(self, chunks: list[Chunk], choices: list[Choices], keep: set[int] | None) -> Run:
        """The tokens whose Subnet is in ``keep`` (None: all), for whatever layers."""
        tokens_N = None
        if keep is not None:
            stays_Q = np.array([id(choice) in keep for choice in choices])
            stays_N = np.repeat(stays_Q, [len(chunk.tokens) for chunk in chunks])
            tokens_N = self._tensor(np.flatnonzero(stays_N))
            chunks = [chunk for chunk, stays in zip(chunks, stays_Q, strict=True) if stays]
            choices = [choice for choice, stays in zip(choices, stays_Q, strict=True) if stays]
        return Run((), tokens_N, self._spans(chunks), self._rules_of(chunks, choices))

    def _spans(self, chunks: list[Chunk]) -> Spans:
        size = self._page_size
        lengths_Q = np.array([len(chunk.tokens) for chunk in chunks])
        starts_Q = np.array([chunk.start for chunk in chunks])
        num_pages_Q = -(-(starts_Q + lengths_Q) // size)
        table_QM = np.zeros((len(chunks), num_pages_Q.max()), np.int64)
        for row, (chunk, num_pages) in enumerate(zip(chunks, num_pages_Q.tolist(), strict=True)):
            assert len(chunk.pages) >= num_pages, f"{len(chunk.pages)} pages for {chunk.end} tokens"
            # padded with its own first page: masked keys of somebody else's that are not finite would still spoil the sum
            table_QM[row] = chunk.pages[0]
            table_QM[row, :num_pages] = chunk.pages[:num_pages]
        chunk_N = np.repeat(np.arange(len(chunks)), lengths_Q)
        first_Q = np.cumsum(lengths_Q) - lengths_Q
        positions_N = np.arange(len(chunk_N)) + (starts_Q - first_Q)[chunk_N]
        assert positions_N.max() < self._config.max_positions, f"position {positions_N.max()} is past the network's"
        slots_N = table_QM[chunk_N, positions_N // size] * size + positions_N % size
        rotary_N2R = self._rotary_P2R.index_select(0, self._tensor(positions_N))
        cos_N1R, sin_N1R = rotary_N2R[:, :1], rotary_N2R[:, 1:]
        groups = []
        for a, b in _neighbours(chunks, size):
            num_pages, length = int(num_pages_Q[a:b].max()), int(lengths_Q[a])
            mask_B1LT = None
            if length == 1 or starts_Q[a:b].any():
                visible_BL1 = starts_Q[a:b, None, None] + np.arange(1, length + 1)[:, None]
                hidden_BLT = self._tensor(visible_BL1 <= np.arange(num_pages * size))
                mask_B1LT = torch.zeros(hidden_BLT.shape, dtype=self._dtype, device=self._device)
                mask_B1LT = mask_B1LT.masked_fill_(hidden_BLT, float("-inf")).unsqueeze(1)
            pages = self._tensor(table_QM[a:b, :num_pages].reshape(-1))
            groups.append(Group(int(first_Q[a]), b - a, length, pages, mask_B1LT))
        return Spans(cos_N1R, sin_N1R, self._tensor(slots_N), tuple(groups))

    def _rules_of(self, chunks: list[Chunk], choices: list[Choices]) -> dict[int, RouteRule]:
        distinct = list({id(choice): choice for choice in choices}.values())
        if len(distinct) == 1:
            key: tuple[tuple[int, int], ...] = ((id(distinct[0]), 0),)
        else:
            key = tuple((id(choice), len(chunk.tokens)) for choice, chunk in zip(choices, chunks, strict=True))
        if key not in self._rules:
            if len(self._rules) >= _MAX_KNOWN:
                self._rules.clear()
            index = {id(choice): place for place, choice in enumerate(distinct)}
            subnet_Q = np.array([index[id(choice)] for choice in choices])
            subnet_N = np.repeat(subnet_Q, [len(chunk.tokens) for chunk in chunks])
            self._rules[key] = dict(self._make_rules(distinct, self._tensor(subnet_N)))
        return self._rules[key]

    def _make_rules(self, distinct: list[Choices], subnet_N: Tensor) -> Iterator[tuple[int, RouteRule]]:
        """A rule for each MoE layer that all of ``distinct`` keep; token n belongs to ``distinct[subnet_N[n]]``."""
        config = self._config
        for row, (moe, own) in enumerate(zip(self._moe, config.experts_by_layer, strict=True)):
            widths = {choice.num_experts[row] for choice in distinct}
            ks = [choice.top_k[row] for choice in distinct]
            if 0 in widths:
                continue
            bias = mask = dropped_NK = None
            if config.selection_bias or widths != {own}:
                bias_UE = torch.stack([choice.bias_LE[row, : len(moe.rank_E)] for choice in distinct])
                bias = bias_UE[0] if len(widths) == 1 else bias_UE.index_select(0, subnet_N)
                if config.router == "softmax" and widths != {own}:
                    mask = torch.where(bias == MASKED, MASKED, 0.0)
            if len(set(ks)) > 1:
                k_N = torch.tensor(ks, device=self._device).index_select(0, subnet_N)
                dropped_NK = torch.arange(max(ks), device=self._device) >= k_N[:, None]
            softmax = config.router == "softmax"
            yield (
                row,
                RouteRule(max(ks), softmax, config.normalize_gates, config.routed_scaling, bias, mask, dropped_NK),
            )

    def _wanted(self, chunks: Sequence[Chunk], places: list[int]) -> Tensor | None:
        first = 0
        rows: list[range] = [range(0)] * len(chunks)
        for place in places:
            end = first + len(chunks[place].tokens)
            rows[place] = range(end - chunks[place].num_logits, end)
            first = end
        wanted = list(chain.from_iterable(rows))
        return None if wanted == list(range(first)) else self._tensor(np.array(wanted, np.int64))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _group_key(chunk: Chunk, page_size: int) -> tuple[int, bool, int]:
    return len(chunk.tokens), chunk.start == 0 and len(chunk.tokens) > 1, chunk.end // page_size


def _neighbours(chunks: list[Chunk], page_size: int) -> Iterator[tuple[int, int]]:
    """Ranges of ordered chunks that attend together: alike, and none gathers more than twice the pages it has."""
    first = 0
    for end in range(1, len(chunks) + 1):
        if end < len(chunks):
            (length, is_fresh, pages), start = _group_key(chunks[end], page_size), _group_key(chunks[first], page_size)
            if (length, is_fresh) == start[:2] and pages <= 2 * start[2] + 4:
                continue
        yield first, end
        first = end


def largest_top_k(config: ModelConfig) -> int:
    """Route slots a token has in each layer; 1 where a network has no MoE layer, so that the pool has a shape."""
    return max((config.top_k, *config.top_k_by_layer))
