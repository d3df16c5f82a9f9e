"""The runner: owns the model's weights and the cache's tensors on one device, and computes steps.

Shape letters: L layers (of the pool of routes: MoE layers), P pages, Z tokens a page, G key/value heads, C head width,
K route slots, N tokens of a step, M tokens whose logits are wanted, V vocabulary, T positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.forward import NetworkWeights, Routed, forward
from stretto.engine.layout import Planner, largest_top_k
from stretto.engine.native import NativeForward
from stretto.engine.precise import PreciseWeights
from stretto.engine.precise import forward as forward_precise
from stretto.engine.sequence import Chunk
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer
from stretto.ops import exact
from stretto.ops.matmul import PLAIN, Arithmetic, kernels
from stretto.ops.native.build import Library
from stretto.ops.native.decode import DTYPES

MAX_NATIVE_TOKENS = 128
"""Longest step that goes through the compiled kernels; longer ones multiply faster through torch's matrix library."""


@dataclass(frozen=True, slots=True)
class KvPool:
    """Cache of keys, values and routes. A page is the same place in all three, whatever the layer."""

    keys_LPZGC: Tensor
    values_LPZGC: Tensor
    routes_PZLK: Tensor | None
    """uint8 or uint16; the dtype's largest value: no expert."""

    @staticmethod
    def allocate(
        config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device, routes: bool
    ) -> KvPool:
        # zeros, not whatever memory held: a masked key of NaN would still spoil the sum
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        pool = None
        if routes:
            kind = _route_dtype(config)
            shape_PZLK = (num_pages, page_size, config.num_moe_layers, largest_top_k(config))
            pool = torch.full(shape_PZLK, torch.iinfo(kind).max, dtype=kind, device=device)
        return KvPool(keys, values, pool)

    @staticmethod
    def bytes_per_page(config: ModelConfig, dtype: torch.dtype, page_size: int, routes: bool) -> int:
        """Bytes that one page takes."""
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        if routes:
            per_token += config.num_moe_layers * largest_top_k(config) * _route_dtype(config).itemsize
        return per_token * page_size


def _route_dtype(config: ModelConfig) -> torch.dtype:
    return torch.uint8 if max(config.experts_by_layer, default=0) <= 255 else torch.uint16


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of a step."""

    logits_MV: Tensor
    """fp32, chunk by chunk in the caller's order, positions rising."""


def _why_torch(library: Library | None, device: torch.device, dtype: torch.dtype, arithmetic: Arithmetic) -> str:
    """Why the compiled kernels do not run; empty where they do."""
    if not arithmetic.is_plain:
        return "batch-invariant" if arithmetic.batch_invariant else f"in {arithmetic.precision}"
    if device.type != "cpu":
        return f"on {device.type}"
    if library is None or library.handle is None:
        return "no kernels were asked for" if library is None else library.reason
    return "" if dtype in DTYPES else f"no kernels for {dtype}"


class Runner:
    """Computes steps of one model. The model is moved to ``device`` and ``dtype``, and is the runner's from then on."""

    def __init__(
        self,
        model: Transformer,
        *,
        num_pages: int,
        page_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
        routes: bool,
        library: Library | None = None,
        arithmetic: Arithmetic = PLAIN,
        max_native_tokens: int | None = MAX_NATIVE_TOKENS,
    ):
        """``library`` holds compiled kernels, for a CPU and plain arithmetic; without it, every operator is torch's.

        ``max_native_tokens``: of a step that they compute; None: any, and so no token depends, to the bit, on what is
        computed beside it.
        """
        assert not arithmetic.batch_invariant or dtype == torch.float32, (
            f"batch-invariant operators are fp32, not {dtype}"
        )
        self.model, self.config = model.to(device), model.config
        for parameter in model.parameters():  # not the buffers: balance biases stay fp32
            parameter.data = parameter.data.to(dtype)
        self.pool = KvPool.allocate(self.config, num_pages, page_size, dtype, torch.device(device), routes)
        self._page_size, self._arithmetic, self._max_native_tokens = page_size, arithmetic, max_native_tokens
        self._rotary: tuple[Tensor, Tensor] | None = None
        if arithmetic.batch_invariant:
            config = self.config
            cos_PR, sin_PR = exact.rotary_tables(config.max_positions, config.rotary_dim, config.rope_theta)
            self._rotary = cos_PR.to(device), sin_PR.to(device)
        self._native: NativeForward | None = None
        self._why_torch = _why_torch(library, torch.device(device), dtype, arithmetic)
        if not self._why_torch:
            assert library is not None and library.handle is not None
            pool = self.pool
            self._native = NativeForward(library.handle, model, pool.keys_LPZGC, pool.values_LPZGC, pool.routes_PZLK)
        self._read_weights()

    @property
    def kernels(self) -> dict[str, str]:
        """Kind of step -> the implementation that runs it, and why where it is the slower one."""
        most = self._max_native_tokens
        native = "native" if most is None else f"native (up to {most} tokens a step)"
        decode = f"torch ({self._why_torch})" if self._why_torch else native
        prefill = "native" if most is None and not self._why_torch else "torch"
        matrices = [parameter for parameter in self.model.blocks.parameters() if parameter.ndim > 1]
        found = {} if self._arithmetic.is_plain else kernels(self._arithmetic, matrices)
        return {"prefill": prefill, "decode": decode, **found}

    @property
    def native(self) -> NativeForward | None:
        """The compiled kernels, where they run."""
        return self._native

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], want_routes: bool) -> StepOutput:
        """Compute ``chunks``: keys, values and (``want_routes``) routes go to the pool, replacing what was there.

        A chunk may begin anywhere, also at positions computed before; what lies before it must be in the pool. No two
        chunks may write the same place.
        """
        assert chunks, "a step without chunks"
        for chunk in chunks:
            assert 0 <= chunk.num_logits <= len(chunk.tokens) and chunk.tokens, f"chunk {chunk}"
        assert not want_routes or self.pool.routes_PZLK is not None, "the pool has no room for routes"
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        if self._native is not None and num_tokens <= (self._max_native_tokens or num_tokens):
            return StepOutput(self._native.forward(chunks, want_routes))
        layout = self._planner.layout(chunks)
        routed: list[Routed] | None = [] if want_routes else None
        keys_LPZGC, values_LPZGC = self.pool.keys_LPZGC, self.pool.values_LPZGC
        if isinstance(self._weights, PreciseWeights):
            logits_MV = forward_precise(self._weights, layout, keys_LPZGC, values_LPZGC, routed)
        else:
            logits_MV = forward(self._weights, layout, keys_LPZGC, values_LPZGC, routed)
        if routed is not None:
            self._store_routes(layout.slots_N, routed)
        return StepOutput(logits_MV)

    def read_routes(self, pages: Sequence[int], start: int, end: int) -> np.ndarray:
        """Routes [T, L, K] of positions ``start`` to ``end`` of the sequence whose page table is ``pages``; a copy."""
        pool = self.pool.routes_PZLK
        assert pool is not None, "the pool has no room for routes"
        positions = np.arange(start, end)
        slots = np.asarray(pages, np.int64)[positions // self._page_size] * self._page_size
        slots_T = torch.from_numpy(slots + positions % self._page_size).to(pool.device)
        return pool.flatten(0, 1).index_select(0, slots_T).cpu().numpy()

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Copy ``state`` (names and shapes of the model's state dict) into the weights in place. All or nothing.

        Raises:
            UserError: a name is missing or unknown, or a shape differs; nothing was changed then.
        """
        own = self.model.state_dict()
        for name in own.keys() | state.keys():
            if name not in state:
                raise UserError(f"weights: {name}: missing; send every tensor of the network")
            if name not in own:
                raise UserError(f"weights: {name}: the network has no such tensor; send the network this engine serves")
            if own[name].shape != state[name].shape:
                raise UserError(
                    f"weights: {name}: shape {list(state[name].shape)}, not {list(own[name].shape)}; "
                    "send the network this engine serves"
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])
        self._read_weights()

    def _read_weights(self) -> None:
        self._weights: NetworkWeights | PreciseWeights
        if self._arithmetic.is_plain:
            self._weights = NetworkWeights.of(self.model)
        else:
            self._weights = PreciseWeights.of(self.model, self._arithmetic)
        self._planner = Planner(self.model, self._page_size, self._rotary)

    def _store_routes(self, slots_N: Tensor, routed: list[Routed]) -> None:
        """Write a step's routes to the pool, the sentinel where a token ran no such layer or has fewer choices."""
        pool = self.pool.routes_PZLK
        assert pool is not None
        num_layers, num_slots = pool.shape[2:]
        sentinel = torch.iinfo(pool.dtype).max
        is_whole = all(
            [choice.tokens_N is None and choice.is_even and choice.chosen_NK.shape[1] == num_slots for choice in routed]
        )
        if routed and len(routed) == num_layers and is_whole:
            routes_NLK = torch.stack([choice.chosen_NK for choice in routed], 1)
        else:
            routes_NLK = slots_N.new_full((len(slots_N), num_layers, num_slots), sentinel)
            for choice in routed:
                top_k = choice.chosen_NK.shape[1]
                assert top_k <= num_slots, f"top-{top_k} does not fit a pool of {num_slots} choices"
                tokens_N = slice(None) if choice.tokens_N is None else choice.tokens_N
                absent_NK = choice.chosen_NK == self.config.experts_by_layer[choice.row]
                routes_NLK[tokens_N, choice.row, :top_k] = choice.chosen_NK.masked_fill(absent_NK, sentinel)
        raw = routes_NLK.to(pool.dtype)
        # torch copies rows of int16 but not of uint16
        narrow = torch.int16 if pool.dtype == torch.uint16 else torch.uint8
        pool.view(narrow).flatten(0, 1).index_copy_(0, slots_N, raw.view(narrow))
