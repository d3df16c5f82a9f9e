"""One decoding step of a whole network in one call of the compiled kernels.

Shape letters: L layers, D hidden, Q rows of the qkv matrix, C head width, G key/value heads, E experts, F = 2·I,
I SwiGLU width, W branches of balance state, R half the rotated width, N tokens, M tokens whose logits are wanted,
V vocabulary, P pages, Z page size, K experts a token.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from stretto.ops.native.records import POINTER, DraftRecord, LayerRecord, ShapeRecord, StepRecord, check_layout

DTYPES = (torch.float32, torch.bfloat16)
"""Of weights and cache; arithmetic is fp32 for both."""


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's weights, as `stretto.model` keeps them; None where the layer has none."""

    attention_norm_D: Tensor
    qkv_QD: Tensor
    qkv_bias_Q: Tensor | None
    out_DX: Tensor
    q_norm_C: Tensor | None
    k_norm_C: Tensor | None
    mlp_norm_D: Tensor
    gate_up: Tensor
    """[E, F, D], or [F, D] of a dense block."""
    down: Tensor
    """[E, D, I], or [D, I] of a dense block."""
    router_ED: Tensor | None = None
    """None: a dense block."""
    bias_WE: Tensor | None = None
    """fp32; None: nothing is added to the scores that choose."""
    rank_E: Tensor | None = None
    """Each expert's place in the nested order, int64."""
    shared_gate_up_FD: Tensor | None = None
    shared_down_DI: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """What the kernels compute with. The tensors are read where they lie: weights written in place are seen at once."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    softmax: bool
    normalize: bool
    scaling: float
    max_top_k: int
    cos_TR: Tensor
    """fp32, for every position that may occur."""
    sin_TR: Tensor
    layers: Sequence[LayerTensors]
    embedding_VD: Tensor
    norm_D: Tensor
    head_VD: Tensor
    keys_LPZGC: Tensor
    values_LPZGC: Tensor
    routes_PZLK: Tensor | None
    """uint8 or uint16; L counts MoE layers here, K is ``max_top_k``."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one Subnet does in one layer."""

    num_experts: int = 0
    """Experts of lower rank may be chosen; 0 in a dense layer."""
    top_k: int = 0
    branch: int = 0
    """Row of balance state."""


@dataclass(slots=True)
class Step:
    """Tokens of one step, all sequences in one list."""

    tokens: list[int]
    positions: list[int]
    tables: list[int]
    """Where in ``pages`` the table of the token's sequence starts."""
    subnets: list[int]
    """Numbers that `Decoder.subnet` gave."""
    pages: list[int]
    """Page tables of all sequences, one after the other."""
    logits: list[int]
    """Tokens whose logits are wanted."""


@dataclass(slots=True)
class Drafting:
    """What to draft for each sequence, all lists by sequence."""

    tokens: list[int]
    """Computed first: the newest of each sequence."""
    positions: list[int]
    tables: list[int]
    subnets: list[int]
    pages: list[int]
    """As in `Step`; the tables reach to the last drafted position."""
    most: list[int]
    """Tokens to draft at most."""
    ends: list[int]
    """A token that nothing is drafted after; -1: none."""
    temperatures: list[float]
    """0: the most probable token is drafted."""
    seeds: list[int]
    """uint64."""


class Decoder:
    """The compiled step of one network. Not for use from two threads at once."""

    def __init__(self, library: ctypes.CDLL, network: Network):
        check_layout(library)
        library.stretto_create.restype = POINTER
        self._library, self._network = library, network
        self._ranks = [None if layer.rank_E is None else layer.rank_E.to(torch.int32) for layer in network.layers]
        layers = (LayerRecord * len(network.layers))()
        dtype, moe_row = network.embedding_VD.dtype, 0
        for record, layer, rank_E in zip(layers, network.layers, self._ranks, strict=True):
            _fill_layer(record, layer, rank_E, dtype)
            record.moe_row = moe_row
            moe_row += layer.router_ED is not None
        self._handle = library.stretto_create(ctypes.byref(_shape(network, moe_row)), layers)
        weakref.finalize(self, library.stretto_destroy, POINTER(self._handle))
        self._choices = np.zeros((0, len(network.layers), 4), np.int32)

    def subnet(self, choices: Sequence[Choice | None]) -> int:
        """Register a Subnet, one entry a layer (None: skipped); returns its number."""
        assert len(choices) == len(self._network.layers), f"{len(choices)} for {len(self._network.layers)} layers"
        rows = [(0, 0, 0, 0) if c is None else (1, c.num_experts, c.top_k, c.branch) for c in choices]
        for row, layer in zip(rows, self._network.layers, strict=True):
            experts = 0 if layer.router_ED is None else layer.router_ED.shape[0]
            assert not row[0] or not experts or 1 <= row[2] <= row[1] <= experts, f"choice {row} of {experts} experts"
        self._choices = np.concatenate((self._choices, np.array([rows], np.int32)))
        return len(self._choices) - 1

    def step(self, step: Step, write_routes: bool) -> Tensor:
        """Compute the step: keys, values and (``write_routes``) routes go to the pools. Returns fp32 logits [M, V].

        A token's result does not depend, to the bit, on the others in the step. Of experts with equal scores the one
        with the lowest id is chosen first. The experts of a token are added in rising order of id.
        """
        num_tokens, num_logits = len(step.tokens), len(step.logits)
        assert not write_routes or self._network.routes_PZLK is not None, "no pool for routes"
        # out of range they would read memory that is not ours
        vocab, positions = self._network.head_VD.shape[0], self._network.cos_TR.shape[0]
        assert min(step.tokens) >= 0 and max(step.tokens) < vocab, f"token ids {step.tokens} of {vocab}"
        assert min(step.positions) >= 0 and max(step.positions) < positions, f"{step.positions} of {positions}"
        lists = (step.tokens, step.positions, step.tables, step.subnets, step.pages, step.logits)
        numbers = np.array([*chain(*lists)], np.int32)
        starts = accumulate([4 * len(values) for values in lists[:-1]], initial=numbers.ctypes.data)
        token, position, table, subnet, pages, logit_tokens = starts
        logits_MV = torch.empty(num_logits, vocab)
        record = StepRecord(
            num_tokens,
            num_logits,
            torch.get_num_threads(),
            write_routes,
            token,
            position,
            table,
            subnet,
            pages,
            self._choices.ctypes.data,
            logit_tokens,
            logits_MV.data_ptr(),
        )
        self._library.stretto_step(POINTER(self._handle), ctypes.byref(record))
        return logits_MV

    def draft(self, drafting: Drafting, num_steps: int, end_ids: Sequence[int]) -> tuple[np.ndarray, Tensor | None]:
        """Let each sequence decode up to ``num_steps`` tokens; keys and values go to the pools, routes nowhere.

        A sequence stops after one of ``end_ids`` or its own end, and gets nothing more where it stands at one already.

        Returns:
            The tokens [R, S], int32, -1 behind the last; and, unless all are greedy, the probabilities [S, R, V] (fp32)
            by which those of the others were drawn.
        """
        num_rows, (vocab, _) = len(drafting.tokens), self._network.head_VD.shape
        positions = self._network.cos_TR.shape[0]
        assert min(drafting.tokens) >= 0 and max(drafting.tokens) < vocab, f"token ids {drafting.tokens} of {vocab}"
        last = [start + min(most, num_steps) for start, most in zip(drafting.positions, drafting.most, strict=True)]
        assert min(drafting.positions) >= 0 and max(last) <= positions, f"drafts up to {last} of {positions}"
        lists = (drafting.tokens, drafting.positions, drafting.tables, drafting.subnets, drafting.most, drafting.ends)
        numbers = np.array([*chain(*lists), *end_ids, *drafting.pages], np.int32)
        starts = list(accumulate([4 * len(values) for values in (*lists, end_ids)], initial=numbers.ctypes.data))
        temperatures = np.array(drafting.temperatures, np.float32)
        seeds = np.array(drafting.seeds, np.uint64)
        drafted_RS = np.empty((num_rows, num_steps), np.int32)
        probs_SRV = torch.empty(num_steps, num_rows, vocab) if any(drafting.temperatures) else None
        record = DraftRecord(
            *(num_rows, num_steps, torch.get_num_threads(), len(end_ids)),
            *starts,
            self._choices.ctypes.data,
            temperatures.ctypes.data,
            seeds.ctypes.data,
            drafted_RS.ctypes.data,
            None if probs_SRV is None else probs_SRV.data_ptr(),
        )
        self._library.stretto_draft(POINTER(self._handle), ctypes.byref(record))
        return drafted_RS, probs_SRV


def _pointer(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    if tensor is None:
        return None
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), f"{tensor.device}, strides {tensor.stride()}"
    assert tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"
    assert not shape or tensor.shape == shape, f"{tuple(tensor.shape)}, not {shape}"
    return tensor.data_ptr()


def _shape(network: Network, num_moe_layers: int) -> ShapeRecord:
    dtype, (vocab, hidden) = network.embedding_VD.dtype, network.embedding_VD.shape
    assert dtype in DTYPES, f"no kernels for {dtype}"
    group = network.num_heads // network.num_kv_heads
    assert group <= 64, f"{group} query heads share a key head; the kernels take 64"
    pool = network.keys_LPZGC.shape
    assert pool == network.values_LPZGC.shape, f"{tuple(pool)} keys, {tuple(network.values_LPZGC.shape)} values"
    routes = network.routes_PZLK
    assert routes is None or routes.shape[2:] == (num_moe_layers, network.max_top_k), f"routes {tuple(routes.shape)}"
    return ShapeRecord(
        num_layers=len(network.layers),
        hidden=hidden,
        num_heads=network.num_heads,
        num_kv_heads=network.num_kv_heads,
        head_dim=network.head_dim,
        rotary_half=network.cos_TR.shape[1],
        vocab=vocab,
        page_size=pool[2],
        num_moe_layers=num_moe_layers,
        route_slots=network.max_top_k,
        route_bytes=0 if routes is None else routes.element_size(),
        softmax=network.softmax,
        normalize=network.normalize,
        is_bfloat16=dtype == torch.bfloat16,
        eps=network.norm_eps,
        scaling=network.scaling,
        num_pages=pool[1],
        cosine=_pointer(network.cos_TR, torch.float32),
        sine=_pointer(network.sin_TR, torch.float32, *network.cos_TR.shape),
        embedding=_pointer(network.embedding_VD, dtype),
        norm=_pointer(network.norm_D, dtype, hidden),
        head=_pointer(network.head_VD, dtype, vocab, hidden),
        keys=_pointer(network.keys_LPZGC, dtype),
        values=_pointer(network.values_LPZGC, dtype),
        routes=None if routes is None else _pointer(routes, routes.dtype),
    )


def _fill_layer(record: LayerRecord, layer: LayerTensors, rank_E: Tensor | None, dtype: torch.dtype) -> None:
    hidden, inner = layer.down.shape[-2:]
    record.attention_norm = _pointer(layer.attention_norm_D, dtype, hidden)
    record.qkv = _pointer(layer.qkv_QD, dtype)
    record.qkv_bias = _pointer(layer.qkv_bias_Q, dtype, layer.qkv_QD.shape[0])
    record.out = _pointer(layer.out_DX, dtype)
    record.q_norm = _pointer(layer.q_norm_C, dtype)
    record.k_norm = _pointer(layer.k_norm_C, dtype)
    record.mlp_norm = _pointer(layer.mlp_norm_D, dtype, hidden)
    record.gate_up = _pointer(layer.gate_up, dtype, *layer.gate_up.shape[:-2], 2 * inner, hidden)
    record.down = _pointer(layer.down, dtype)
    record.router = _pointer(layer.router_ED, dtype)
    record.shared_gate_up = _pointer(layer.shared_gate_up_FD, dtype)
    record.shared_down = _pointer(layer.shared_down_DI, dtype)
    record.bias = _pointer(layer.bias_WE, torch.float32)
    record.rank = _pointer(rank_E, torch.int32)
    record.num_experts = 0 if layer.router_ED is None else layer.router_ED.shape[0]
    record.inner = inner
    record.shared_inner = 0 if layer.shared_down_DI is None else layer.shared_down_DI.shape[-1]
