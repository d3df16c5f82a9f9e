"""Forward pass over paged sequences in torch: one flat list of tokens, each with its own Subnet.

`Planner` builds the tensors that depend only on the step, and `TorchForward` computes the network. Plain arithmetic is
optimised for speed: products that are added to the residual stream use transposed matrices, and sums are in place. Other
arithmetics use the operators of `stretto.ops.matmul`, so a rollout rounds as the trainer's forward pass does; with batch-invariant
operators, both give the same bits.

Shape letters: N tokens of a step or of a part of a step, M tokens with returned logits, V vocabulary, D hidden, H query
heads, G key/value heads, J = H + G, C head width, X = (H + 2·G)·C, R rotated channels, F = 2·I, I SwiGLU width, E experts,
K chosen, L layers (MoE layers in routes), P pages, Z tokens per page; in a layout: Q chunks, B chunks of a group, M most pages
that a chunk of the group sees, T = M·Z keys, U Subnets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import accumulate, chain, groupby

import numpy as np
import torch
from torch import Tensor, nn

from stretto.engine.ranks import Ranks
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.attention import Attention, Mla, rotary_frequencies
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Block, MoeLayer, SwiGlu, Transformer, clamp_of
from stretto.ops import paged
from stretto.ops.grouped import ExpertBiases, Experts
from stretto.ops.latent import LatentWeights, latent_attention
from stretto.ops.matmul import Arithmetic, ArithmeticOperators, ExpertMatrices, prepare
from stretto.ops.operators import MASKED, Operators, Weight
from stretto.ops.paged import ExpertWeights, Group, Heads, RouteRule, Spans

_MAX_KNOWN = 1024
"""Largest number of cached Subnets and of cached batch compositions: a client can send a new Subnet in every request."""


@dataclass(frozen=True, slots=True)
class KvPool:
    """Cache of keys, values and routes. A page has the same index in all three tensors and in every layer."""

    keys_LPZGC: Tensor
    """Keys; with latent attention, the rows of `stretto.ops.latent` as one head."""
    values_LPZGC: Tensor | None
    """None with latent attention, where the rows contain the values."""
    routes_PZLK: Tensor | None
    """uint8 or uint16 expert ids; the largest value of the type means no expert. None: the cache stores no routes."""

    @staticmethod
    def allocate(
        config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device, routes: bool
    ) -> KvPool:
        # zeros, because a masked key that is NaN would make the sum NaN
        shape, latent = (config.num_layers, num_pages, page_size), config.latent
        heads = (config.num_kv_heads, config.head_dim) if latent is None else (1, latent.kv_rank + latent.rope_dim)
        keys = _zeros((*shape, *heads), dtype, device)
        values = _zeros((*shape, *heads), dtype, device) if latent is None else None
        pool = None
        if routes:
            kind = torch.uint8 if max(config.experts_by_layer, default=0) <= 255 else torch.uint16
            shape_PZLK = (num_pages, page_size, config.num_moe_layers, largest_top_k(config))
            pool = torch.full(shape_PZLK, torch.iinfo(kind).max, dtype=kind, device=device)
        return KvPool(keys, values, pool)

    @staticmethod
    def bytes_per_page(config: ModelConfig, dtype: torch.dtype, page_size: int, routes: bool) -> int:
        """Size of one page in bytes."""
        page = KvPool.allocate(config, 1, page_size, dtype, torch.device("meta"), routes)
        return sum(x.nbytes for x in (page.keys_LPZGC, page.values_LPZGC, page.routes_PZLK) if x is not None)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`; on a CPU, the operating system allocates the memory only when it is written: a cache may stay half empty."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Choices:
    """A Subnet's choices in each MoE layer of the maximum network."""

    num_experts: tuple[int, ...]
    """Number of experts by MoE row; 0 if the Subnet leaves the layer out."""
    top_k: tuple[int, ...]
    """Experts per token by MoE row; 0 if the Subnet leaves the layer out."""
    bias_LE: Tensor
    """fp32, added to the scores: the balance bias, or `MASKED` for experts that may not be chosen."""


@dataclass(frozen=True, slots=True)
class Skips:
    """The layers that each token of a run skips, as data on the device."""

    stays_LN: Tensor
    """bool, by layer of the network; a token that does not stay keeps its residual stream."""
    slots_LN: Tensor
    """int64, place of each token's keys and values; a place that nobody reads, where the token does not stay."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers that compute the same tokens."""

    layers: tuple[int, ...]
    tokens_N: Tensor | None
    """int64, indices of these tokens in the step; None: all."""
    spans: Spans
    rules: dict[int, RouteRule]
    """Routing options by MoE row."""
    skips: Skips | None = None
    """None: all tokens run all layers."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors of one step, in the planner's order of tokens."""

    ids_N: Tensor
    slots_N: Tensor
    """int64, place of each token in the cache."""
    runs: tuple[Run, ...]
    wanted_M: Tensor | None
    """int64, tokens whose logits are returned, in the caller's order of chunks; None: all, in order."""


class Planner:
    """Builds layouts for one network and caches the choices of Subnets. A copy of the balance biases is in it, so new weights need
    a new planner or `refresh`."""

    def __init__(self, model: Transformer, subnets: SubnetTable, page_size: int, operators: Operators):
        config, embedding_VD = model.config, model.embedding.weight
        self._config, self._subnets, self._page_size = config, subnets, page_size
        self._device, self._dtype = embedding_VD.device, embedding_VD.dtype
        self._moe = [block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer)]
        positions, frequencies_R = torch.arange(config.max_positions), rotary_frequencies(config, self._device)
        cos_PR, sin_PR = operators.rotary_tables(positions.to(self._device), frequencies_R, config.rope_magnitude)
        halves = (torch.cat((cos_PR, cos_PR), -1), torch.cat((-sin_PR, sin_PR), -1))
        self.rotary_P2R = torch.stack(halves, 1).to(self._device, self._dtype)
        self._choices: dict[int, Choices] = {}
        self._rules: dict[tuple[tuple[int, int], ...], dict[int, RouteRule]] = {}

    def layout(self, chunks: Sequence[Chunk]) -> Layout:
        """Layout of a step over ``chunks``; tokens are reordered so that chunks of equal length are neighbours."""
        places = sorted(range(len(chunks)), key=lambda place: _group_key(chunks[place], self._page_size))
        ordered = [chunks[place] for place in places]
        layers = {chunk.subnet: self._subnets[chunk.subnet].layers for chunk in ordered}
        runs: list[Run] = []
        parts: dict[tuple[int, ...], Run] = {}
        for subnets, members in groupby(
            range(self._config.num_layers), lambda layer: tuple(number for number in layers if layer in layers[number])
        ):
            if subnets:
                if subnets not in parts:
                    parts[subnets] = self._part(ordered, None if len(subnets) == len(layers) else subnets)
                runs.append(replace(parts[subnets], layers=tuple(members)))
        spans = next((run.spans for run in runs if run.tokens_N is None), None) or self._spans(ordered)
        ids_N = self._tensor(np.fromiter(chain.from_iterable(chunk.tokens for chunk in ordered), np.int64))
        return Layout(ids_N, spans.slots_N, tuple(runs), self._wanted(chunks, places))

    def refresh(self) -> None:
        """Copy the model's current balance biases into the tensors of existing rules."""
        for number, choices in self._choices.items():
            choices.bias_LE.copy_(self.read(number).bias_LE)
        for key, rules in self._rules.items():
            fresh = self._make_rules(key)
            for row, rule in rules.items():
                for target, source in ((rule.bias, fresh[row].bias), (rule.mask, fresh[row].mask)):
                    if target is not None and source is not None:
                        target.copy_(source)

    def _choices_of(self, number: int) -> Choices:
        if number not in self._choices:
            if len(self._choices) >= _MAX_KNOWN:
                self._choices.clear()
                self._rules.clear()
            self._choices[number] = self.read(number)
        return self._choices[number]

    def read(self, number: int) -> Choices:
        """Choices of the Subnet ``number`` with the model's current balance biases."""
        config, subnet = self._config, self._subnets[number]
        num_experts, top_k = [0] * len(self._moe), [0] * len(self._moe)
        rows = [row for row, layer in enumerate(config.moe_layers) if layer in subnet.layers]
        bias_LE = torch.full((len(self._moe), config.num_experts), MASKED, device=self._device)
        for row, width, k in zip(rows, subnet.experts, subnet.top_k, strict=True):
            num_experts[row], top_k[row], layer = width, k, self._moe[row]
            own_E = layer.bias_WE[config.branch(width)].float() if config.selection_bias else torch.tensor(0.0)
            allowed_E = layer.rank_E < width
            bias_LE[row, : len(allowed_E)] = torch.where(allowed_E, own_E.to(self._device), MASKED)
        return Choices(tuple(num_experts), tuple(top_k), bias_LE)

    def _part(self, chunks: list[Chunk], subnets: tuple[int, ...] | None) -> Run:
        """Run of the tokens whose Subnet is in ``subnets`` (None: all), without its layers."""
        tokens_N = None
        if subnets is not None:
            stays_Q = np.array([chunk.subnet in subnets for chunk in chunks])
            stays_N = np.repeat(stays_Q, [len(chunk.tokens) for chunk in chunks])
            tokens_N = self._tensor(np.flatnonzero(stays_N))
            chunks = [chunk for chunk in chunks if chunk.subnet in subnets]
        return Run((), tokens_N, self._spans(chunks), self._rules_of(chunks))

    def _spans(self, chunks: list[Chunk]) -> Spans:
        size = self._page_size
        lengths_Q = np.array([len(chunk.tokens) for chunk in chunks])
        starts_Q = np.array([chunk.start for chunk in chunks])
        num_pages_Q = -(-(starts_Q + lengths_Q) // size)
        table_QM = np.zeros((len(chunks), num_pages_Q.max()), np.int64)
        for row, (chunk, num_pages) in enumerate(zip(chunks, num_pages_Q.tolist(), strict=True)):
            assert len(chunk.pages) >= num_pages, f"{len(chunk.pages)} pages for {chunk.end} tokens"
            # padded with the chunk's own first page: masked keys of another sequence could be NaN and make the sum NaN
            table_QM[row] = chunk.pages[0]
            table_QM[row, :num_pages] = chunk.pages[:num_pages]
        chunk_N = np.repeat(np.arange(len(chunks)), lengths_Q)
        first_Q = np.cumsum(lengths_Q) - lengths_Q
        positions_N = np.arange(len(chunk_N)) + (starts_Q - first_Q)[chunk_N]
        assert positions_N.max() < self._config.max_positions, f"position {positions_N.max()} is beyond the network's"
        slots_N = table_QM[chunk_N, positions_N // size] * size + positions_N % size
        rotary_N2R = self.rotary_P2R.index_select(0, self._tensor(positions_N))
        ranges = list(_neighbours(chunks, size))
        windows = (None, self._config.sliding_window) if self._config.sliding_layers else (None,)
        groups = [
            tuple(
                self._group(int(first_Q[a]), int(lengths_Q[a]), starts_Q[a:b], table_QM[a:b], window) for a, b in ranges
            )
            for window in windows
        ]
        return Spans(rotary_N2R[:, :1], rotary_N2R[:, 1:], self._tensor(slots_N), *groups)

    def _group(
        self,
        first: int,
        length: int,
        starts_B: np.ndarray,
        table_BM: np.ndarray,
        window: int | None,
    ) -> Group:
        """Group of chunks of equal length.

        Args:
            first: index of the group's first token in the step.
            starts_B: position of each chunk's first token.
            table_BM: pages of the chunks, padded.
            window: largest number of positions that a token sees; None: all.
        """
        size, end = self._page_size, int(starts_B.max()) + length
        begin_B = np.zeros_like(starts_B) if window is None else np.maximum(starts_B + 1 - window, 0) // size
        num_pages = int((-(-(starts_B + length) // size) - begin_B).max())
        # a chunk that sees fewer pages than others is padded with the pages after them in its table
        places_BM = np.minimum(begin_B[:, None] + np.arange(num_pages), table_BM.shape[1] - 1)
        mask_B1LT = None
        if length == 1 or starts_B.any() or (window is not None and end > window):
            position_BL1 = starts_B[:, None, None] + np.arange(length)[:, None]
            key_B1T = begin_B[:, None, None] * size + np.arange(num_pages * size)
            hidden_BLT = key_B1T > position_BL1
            if window is not None:
                hidden_BLT |= key_B1T <= position_BL1 - window
            mask_BLT = torch.zeros(hidden_BLT.shape, dtype=self._dtype, device=self._device)
            mask_B1LT = mask_BLT.masked_fill_(self._tensor(hidden_BLT), float("-inf")).unsqueeze(1)
        pages = self._tensor(np.take_along_axis(table_BM, places_BM, 1).reshape(-1))
        return Group(first, len(starts_B), length, pages, mask_B1LT)

    def _rules_of(self, chunks: list[Chunk]) -> dict[int, RouteRule]:
        distinct = list(dict.fromkeys(chunk.subnet for chunk in chunks))
        key: tuple[tuple[int, int], ...] = ((distinct[0], 0),)
        if len(distinct) > 1:
            key = tuple((chunk.subnet, len(chunk.tokens)) for chunk in chunks)
        if key not in self._rules:
            if len(self._rules) >= _MAX_KNOWN:
                self._rules.clear()
            self._rules[key] = self._make_rules(key)
        return self._rules[key]

    def _make_rules(self, chunks: tuple[tuple[int, int], ...]) -> dict[int, RouteRule]:
        """Routing options by MoE row, for the rows that all Subnets have.

        ``chunks``: number of the Subnet and length of each chunk; the length does not matter if there is only one Subnet.
        """
        config, softmax = self._config, self._config.router == "softmax"
        numbers = list(dict.fromkeys(number for number, _ in chunks))
        indices, lengths = [numbers.index(number) for number, _ in chunks], [length for _, length in chunks]
        subnet_N = self._tensor(np.repeat(indices, lengths))
        choices = [self._choices_of(number) for number in numbers]
        rules: dict[int, RouteRule] = {}
        for row, (moe, own) in enumerate(zip(self._moe, config.experts_by_layer, strict=True)):
            widths = {choice.num_experts[row] for choice in choices}
            ks = [choice.top_k[row] for choice in choices]
            if 0 in widths:
                continue
            bias = mask = dropped_NK = None
            if config.selection_bias or widths != {own}:
                bias_UE = torch.stack([choice.bias_LE[row, : len(moe.rank_E)] for choice in choices])
                bias = bias_UE[0] if len(widths) == 1 else bias_UE.index_select(0, subnet_N)
                if softmax and widths != {own}:
                    mask = torch.where(bias == MASKED, MASKED, 0.0)
            if len(set(ks)) > 1:
                k_N = torch.tensor(ks, device=self._device).index_select(0, subnet_N)
                dropped_NK = torch.arange(max(ks), device=self._device) >= k_N[:, None]
            groups, normalize, scaling = (
                (config.expert_groups, config.top_groups),
                config.normalize_gates,
                config.routed_scaling,
            )
            rules[row] = RouteRule(max(ks), softmax, normalize, scaling, groups, bias, mask, dropped_NK)
        return rules

    def _wanted(self, chunks: Sequence[Chunk], places: list[int]) -> Tensor | None:
        """`Layout.wanted_M`; ``places``: order of the chunks in the step."""
        ends = list(accumulate(len(chunks[place].tokens) for place in places))
        end_of = dict(zip(places, ends, strict=True))
        wanted = [row for at, chunk in enumerate(chunks) for row in range(end_of[at] - chunk.num_logits, end_of[at])]
        return None if wanted == list(range(ends[-1])) else self._tensor(np.array(wanted, np.int64))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _group_key(chunk: Chunk, page_size: int) -> tuple[int, bool, int]:
    return len(chunk.tokens), chunk.start == 0 and len(chunk.tokens) > 1, chunk.end // page_size


def _neighbours(chunks: list[Chunk], page_size: int) -> Iterator[tuple[int, int]]:
    """Ranges of ordered chunks that form a group: chunks of equal length, none of which reads more than about twice its pages."""
    first = 0
    for end in range(1, len(chunks) + 1):
        if end < len(chunks):
            (length, is_fresh, pages), start = _group_key(chunks[end], page_size), _group_key(chunks[first], page_size)
            if (length, is_fresh) == start[:2] and pages <= 2 * start[2] + 4:
                continue
        yield first, end
        first = end


@dataclass(frozen=True, slots=True)
class SwiGluWeights:
    """Weights of a dense or shared SwiGLU. Matrices here and below are prepared for the arithmetic."""

    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    """In the form of `TorchForward._added`."""
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Weights of router, experts and shared experts."""

    row: int
    """Index of the layer among the maximum network's MoE layers."""
    gate: Weight
    """fp32, as is its bias: routers decide on small differences."""
    gate_bias_E: Tensor | None
    experts: Experts
    prepared: ExpertWeights | ExpertMatrices
    """``experts`` prepared for plain arithmetic, or for another."""
    shared: SwiGluWeights | None


@dataclass(frozen=True, slots=True)
class HeadsWeights:
    """Weights of grouped-query attention."""

    qkv: Weight
    qkv_bias_X: Tensor | None
    heads: Heads


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one block."""

    attention_norm_D: Tensor
    attention: HeadsWeights | LatentWeights
    out: Weight
    """In the form of `TorchForward._added`."""
    out_bias_D: Tensor | None
    mlp_norm_D: Tensor
    mlp: SwiGluWeights | MoeWeights


class TorchForward:
    """The forward pass of one model over one cache. Some of its weights are copies, so new weights need a new object or `refresh`."""

    def __init__(
        self, model: Transformer, subnets: SubnetTable, pool: KvPool, arithmetic: Arithmetic, ranks: Ranks | None = None
    ):
        """``ranks``: those that ``model`` is divided over; None: it is whole."""
        self._ranks, self._is_first = ranks, ranks is None or ranks.shard.rank == 0
        eps, self._clamp = model.config.norm_eps, clamp_of(model.config)
        self._arithmetic, self._is_plain = arithmetic, arithmetic.is_plain
        self._operators, self._inner = arithmetic.operators, arithmetic.inner.operators
        self._eps, self._eps_tensor = eps, torch.tensor(eps, device=pool.keys_LPZGC.device)
        self._norm = (
            partial(paged.norm, eps=self._eps_tensor) if self._is_plain else partial(self._operators.norm, eps=eps)
        )
        self._keys_LPZGC, self._values_LPZGC, self._routes_PZLK = pool.keys_LPZGC, pool.values_LPZGC, pool.routes_PZLK
        self._no_expert = 0 if pool.routes_PZLK is None else torch.iinfo(pool.routes_PZLK.dtype).max
        self.planner = Planner(model, subnets, pool.keys_LPZGC.shape[2], self._operators)
        rows = {layer: row for row, layer in enumerate(model.config.moe_layers)}
        self.embedding_VD = model.embedding.weight.detach()
        self.layers = [self._layer(block, rows.get(place, -1)) for place, block in enumerate(model.blocks)]
        self.norm_D = model.norm.weight.detach()
        self.head = prepare(model.head_VD, arithmetic.inner)

    def forward(self, chunks: Sequence[Chunk], want_routes: bool) -> Tensor:
        """Logits [M, V] (fp32) of the chunks' last tokens. Writes keys, values and (``want_routes``) routes to the cache."""
        return self.compute(self.planner.layout(chunks), want_routes)

    def compute(self, layout: Layout, want_routes: bool) -> Tensor:
        """`forward` of a planned step. On a GPU, it only launches kernels, which depend on shapes and not on values."""
        pool, routes_NLK = self._routes_PZLK, None
        if want_routes:
            assert pool is not None, "the cache stores no routes"
            # the value for layers that a token skips, and for choices beyond its top-k
            routes_NLK = layout.slots_N.new_full((len(layout.ids_N), *pool.shape[2:]), self._no_expert)
        x_ND = self._operators.rounded(self.embedding_VD.index_select(0, layout.ids_N))
        for run in layout.runs:
            part_ND = x_ND if run.tokens_N is None else x_ND.index_select(0, run.tokens_N)
            for place in run.layers:
                part_ND = self._block(place, part_ND, run, routes_NLK)
            x_ND = part_ND if run.tokens_N is None else x_ND.index_copy_(0, run.tokens_N, part_ND)
        if pool is not None and routes_NLK is not None:
            # index_copy_ supports int16 but not uint16
            narrow = torch.int16 if pool.dtype == torch.uint16 else torch.uint8
            pool.view(narrow).flatten(0, 1).index_copy_(0, layout.slots_N, routes_NLK.to(pool.dtype).view(narrow))
        if layout.wanted_M is not None:
            x_ND = x_ND.index_select(0, layout.wanted_M)
        return self._inner.linear(self._norm(x_ND, self.norm_D), self.head).float()

    def refresh(self, fresh: TorchForward) -> None:
        """Copy the tensors of ``fresh``, which was built after the weights changed, into the tensors of this object."""
        for target, source in zip(_tensors(self.layers), _tensors(fresh.layers), strict=True):
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        self.planner.refresh()

    def _block(self, place: int, x_ND: Tensor, run: Run, routes_NLK: Tensor | None) -> Tensor:
        if run.skips is None:
            return self._computed(place, x_ND, run, routes_NLK)
        spans = replace(run.spans, slots_N=run.skips.slots_LN[place])
        y_ND = self._computed(place, x_ND, replace(run, spans=spans), routes_NLK)
        return torch.where(run.skips.stays_LN[place][:, None], y_ND, x_ND)

    def _computed(self, place: int, x_ND: Tensor, run: Run, routes_NLK: Tensor | None) -> Tensor:
        layer, operators = self.layers[place], self._operators
        normed_ND = self._norm(x_ND, layer.attention_norm_D)
        if isinstance(layer.attention, LatentWeights):
            rows_PZ1Z = self._keys_LPZGC[place]
            y_NX = latent_attention(normed_ND, layer.attention, run.spans, rows_PZ1Z, self._arithmetic)
        else:
            y_NX = self._attend(place, layer.attention, normed_ND, run.spans)
        x_ND = self._sum(self._add(self._stream(x_ND), y_NX, layer.out, layer.out_bias_D))
        normed_ND, mlp = self._norm(x_ND, layer.mlp_norm_D), layer.mlp
        if isinstance(mlp, SwiGluWeights):
            return self._sum(self._add_swiglu(self._stream(x_ND), normed_ND, mlp))
        rule = run.rules[mlp.row]
        routes = paged.route_tokens(normed_ND, mlp.gate, rule, mlp.gate_bias_E, self._inner)
        if routes_NLK is not None:
            chosen_NK = routes.chosen_NK
            if rule.dropped_NK is not None:
                chosen_NK = chosen_NK.masked_fill(rule.dropped_NK, self._no_expert)
            routes_NLK[slice(None) if run.tokens_N is None else run.tokens_N, mlp.row, : rule.top_k] = chosen_NK
        if isinstance(mlp.prepared, ExpertWeights):
            x_ND = paged.chosen_experts(normed_ND, routes, mlp.prepared).add_(self._stream(x_ND))
            return self._sum(x_ND if mlp.shared is None else self._add_swiglu(x_ND, normed_ND, mlp.shared))
        assert isinstance(operators, ArithmeticOperators)
        y_ND = operators.prepared_experts(normed_ND, routes, mlp.prepared, mlp.experts)
        if mlp.shared is not None:
            y_ND = self._add_swiglu(y_ND, normed_ND, mlp.shared)
        return operators.rounded(x_ND + y_ND)

    def _attend(self, place: int, weights: HeadsWeights, normed_ND: Tensor, spans: Spans) -> Tensor:
        assert self._values_LPZGC is not None, "a cache without values"
        keys_PZGC, values_PZGC, heads = self._keys_LPZGC[place], self._values_LPZGC[place], weights.heads
        qkv_NX = self._operators.linear(normed_ND, weights.qkv, weights.qkv_bias_X)
        if self._is_plain:
            q_NHC = paged.store(qkv_NX, heads, self._eps_tensor, spans, keys_PZGC, values_PZGC)
        else:
            q_NHC = paged.store_rounded(qkv_NX, heads, self._eps, spans, keys_PZGC, values_PZGC, self._operators)
        return paged.attend(q_NHC, keys_PZGC, values_PZGC, spans, heads, self._arithmetic.batch_invariant)

    def _stream(self, x_ND: Tensor) -> Tensor:
        """The residual stream to which this rank adds its part of a layer: rank 0's own, and zeros on the others, because `_sum`
        adds them."""
        return x_ND if self._is_first else torch.zeros_like(x_ND)

    def _sum(self, part_ND: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        return part_ND if self._ranks is None else self._ranks.sum(part_ND)

    def _add(self, x_ND: Tensor, y_NF: Tensor, weight: Weight, bias_D: Tensor | None) -> Tensor:
        """``x_ND`` plus the product of ``y_NF`` with a matrix in the form of `_added`."""
        if self._is_plain:
            sum_ND = torch.addmm(x_ND, y_NF, weight)
            return sum_ND if bias_D is None else sum_ND.add_(bias_D)
        return self._operators.rounded(x_ND + self._operators.linear(y_NF, weight, bias_D))

    def _add_swiglu(self, x_ND: Tensor, normed_ND: Tensor, weights: SwiGluWeights) -> Tensor:
        hidden_NF = self._operators.linear(normed_ND, weights.gate_up, weights.gate_up_bias)
        return self._add(x_ND, self._operators.swiglu(hidden_NF, self._clamp), weights.down, weights.down_bias)

    def _layer(self, block: nn.Module, row: int) -> LayerWeights:
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        return LayerWeights(
            attention_norm_D=block.attention_norm.weight.detach(),
            attention=self._heads(attention) if isinstance(attention, Attention) else self._latent(attention),
            out=self._added(attention.out.weight),
            out_bias_D=_detached(attention.out.bias),
            mlp_norm_D=block.mlp_norm.weight.detach(),
            mlp=self._moe(mlp, row) if isinstance(mlp, MoeLayer) else self._swiglu_weights(mlp),
        )

    def _heads(self, attention: Attention) -> HeadsWeights:
        norm_JC = None
        if attention.q_norm is not None and attention.k_norm is not None:
            shape = (-1, attention.head_dim)
            q_HC = attention.q_norm.detach().view(shape).expand(attention.num_heads, -1)
            norm_JC = torch.cat((q_HC, attention.k_norm.detach().view(shape).expand(attention.num_kv_heads, -1)))
        heads = Heads(
            norm_JC=norm_JC,
            is_wide=attention.is_wide,
            clip=attention.clip,
            scale=attention.scale,
            sinks_H=_detached(attention.sinks),
            is_sliding=attention.is_sliding,
        )
        return HeadsWeights(prepare(attention.qkv.weight, self._arithmetic), _detached(attention.qkv.bias), heads)

    def _latent(self, attention: Mla) -> LatentWeights:
        q_down, q_up, arithmetic = attention.q_down, attention.q or attention.q_up, self._arithmetic
        assert q_up is not None
        return LatentWeights(
            q_down=None if q_down is None else prepare(q_down.weight, arithmetic),
            q_down_bias=None if q_down is None else _detached(q_down.bias),
            q_down_norm=_detached(attention.q_down_norm),
            q_up=prepare(q_up.weight, arithmetic),
            kv_down=prepare(attention.kv_down.weight, arithmetic),
            kv_down_bias=_detached(attention.kv_down.bias),
            kv_down_norm=attention.kv_down_norm.detach(),
            kv_up=prepare(attention.kv_up.weight, arithmetic),
            num_heads=attention.num_heads,
            nope_dim=attention.nope_dim,
            value_dim=attention.value_dim,
            scale=attention.scale,
            eps=attention.eps,
        )

    def _moe(self, layer: MoeLayer, row: int) -> MoeWeights:
        gate_bias_E = None if layer.gate_bias is None else layer.gate_bias.detach().float()
        own = layer.experts.biases
        biases = None if own is None else ExpertBiases(*(bias.detach() for bias in own))
        experts = Experts(layer.gate_up.detach(), layer.down.detach(), biases, self._clamp)
        prepared: ExpertWeights | ExpertMatrices = ExpertWeights.of(experts)
        if not self._is_plain:
            prepared = ExpertMatrices.of(experts.gate_up_EFD, experts.down_EDI, self._arithmetic)
        shared = None if layer.shared is None else self._swiglu_weights(layer.shared)
        gate = prepare(layer.gate.float(), self._arithmetic.inner)
        return MoeWeights(row, gate, gate_bias_E, experts, prepared, shared)

    def _swiglu_weights(self, layer: SwiGlu) -> SwiGluWeights:
        return SwiGluWeights(
            gate_up=prepare(layer.gate_up.weight, self._arithmetic),
            gate_up_bias=_detached(layer.gate_up.bias),
            down=self._added(layer.down.weight),
            down_bias=_detached(layer.down.bias),
        )

    def _added(self, weight_FD: Tensor) -> Weight:
        """``weight_FD`` in the form that `_add` takes: transposed for plain arithmetic, prepared for others."""
        return weight_FD.detach().t() if self._is_plain else prepare(weight_FD, self._arithmetic)


def _tensors(tree: object) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and records, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif is_dataclass(tree):
        yield from _tensors([getattr(tree, part.name) for part in fields(tree)])


def _detached(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


def largest_top_k(config: ModelConfig) -> int:
    """Largest number of experts per token in any layer; at least 1, so that the cache of routes has a shape."""
    return max((config.top_k, *config.top_k_by_layer))
