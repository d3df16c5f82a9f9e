"""Steps with one token per sequence whose Subnets are data: the function that a CUDA graph repeats.

Everything that differs between steps of one shape is in a few tensors on the device: token, length and pages of each sequence, and rows of
tables that hold the choices of its Subnet. So one graph serves sequences of any lengths and of different Subnets. The layers that no
sequence runs, and the largest top-k, belong to the shape: a step of small Subnets does not compute the layers of the largest.

`TorchSteps` computes with torch's operators. `KernelSteps` computes the same with the Triton kernels of `stretto.ops.kernels`, about a
dozen a layer. Neither waits for the device.

Shape letters: as in `stretto.engine.forward_torch`; M pages of each sequence, U rows of the tables of Subnets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.engine.forward_torch import (
    HeadsWeights,
    KvPool,
    Layout,
    MoeWeights,
    Planner,
    Run,
    Skips,
    SwiGluWeights,
    TorchForward,
)
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.spec import ModelConfig
from stretto.model.transformer import clamp_of
from stretto.ops import kernels
from stretto.ops.fp8_rows import Rows
from stretto.ops.grouped import swiglu
from stretto.ops.int_weights import IntWeight
from stretto.ops.operators import MASKED
from stretto.ops.paged import Group, RouteRule, Spans

if TYPE_CHECKING:
    from stretto.ops.kernels.products import Matrix

MAX_SUBNETS = 64
"""Rows of the tables: the largest number of Subnets in a step."""
_FP32_BYTES = 151_616
"""Shared memory of the largest program in fp32, in bytes: attention with a head width of 256, as Triton compiles it. GPUs with capability
8.6, 8.9 or 12.0 have 101,376."""


class Shape(NamedTuple):
    """The properties of a step that determine its kernels."""

    num_sequences: int
    num_pages: int
    """Places for pages of each sequence."""
    layers: tuple[int, ...]
    """Layers that any sequence runs."""
    top_ks: tuple[int, ...]
    """By MoE row: largest top-k of the sequences."""
    is_uniform: bool
    """Whether all sequences run all of these layers."""
    want_routes: bool


class Inputs(NamedTuple):
    """What differs between steps of a shape. The tensors are parts of one, so that one copy fills them."""

    ids_N: Tensor
    """int32, as all of them."""
    lengths_N: Tensor
    """Tokens of each sequence with this one."""
    subnet_N: Tensor
    """Rows of `SubnetRows`."""
    table_NM: Tensor
    """Pages, padded with the sequence's first: torch reads and masks them, and NaN in other pages would make a sum NaN."""

    @staticmethod
    def views(flat: Tensor, shape: Shape) -> Inputs:
        """The parts of a tensor of `size`."""
        N = shape.num_sequences
        return Inputs(flat[:N], flat[N : 2 * N], flat[2 * N : 3 * N], flat[3 * N :].view(N, shape.num_pages))

    @staticmethod
    def size(shape: Shape) -> int:
        return shape.num_sequences * (3 + shape.num_pages)


class SubnetRows:
    """Choices of Subnets as rows of tensors on the device, rewritten in place when all rows are in use."""

    def __init__(self, planner: Planner, config: ModelConfig, subnets: SubnetTable, device: torch.device):
        self._planner, self._subnets = planner, subnets
        self.bias_ULE = torch.full((MAX_SUBNETS, config.num_moe_layers, config.num_experts), MASKED, device=device)
        """fp32, by MoE row: see `Choices`."""
        self.top_k_UL = torch.zeros(MAX_SUBNETS, config.num_moe_layers, dtype=torch.int32, device=device)
        self.stays_LU = torch.zeros(config.num_layers, MAX_SUBNETS, dtype=torch.uint8, device=device)
        """By layer of the network: 1 where a Subnet runs it."""
        self._rows: dict[int, int] = {}
        self.top_ks: dict[int, tuple[int, ...]] = {}
        """Top-k by MoE row of the Subnets in the tables, by their numbers."""

    def rows(self, numbers: Sequence[int]) -> dict[int, int]:
        """Rows of the Subnets of a step, by their numbers; at most `MAX_SUBNETS`."""
        if len(self._rows.keys() | set(numbers)) > MAX_SUBNETS:
            self._rows.clear()
            self.top_ks.clear()
        for number in numbers:
            if number not in self._rows:
                self._rows[number] = len(self._rows)
                self._write(number)
        return self._rows

    def refresh(self) -> None:
        """Write all rows again: balance biases have changed."""
        for number in self._rows:
            self._write(number)

    def _write(self, number: int) -> None:
        row, choices = self._rows[number], self._planner.read(number)
        self.top_ks[number] = choices.top_k
        self.bias_ULE[row].copy_(choices.bias_LE)
        self.top_k_UL[row].copy_(torch.tensor(choices.top_k, dtype=torch.int32))
        stays_L = torch.zeros(len(self.stays_LU), dtype=torch.uint8)
        stays_L[list(self._subnets[number].layers)] = 1
        self.stays_LU[:, row].copy_(stays_L)


class Steps(Protocol):
    """A way to compute steps."""

    reads_whole_pages: bool
    """Whether the time of a step depends on `Shape.num_pages`, and not on the lengths."""

    def compute(self, inputs: Inputs, shape: Shape) -> Tensor:
        """Logits [N, V] (fp32). Writes keys, values and routes to the cache. On a GPU, it only launches kernels."""
        ...


class TorchSteps:
    """Steps with torch's operators, which gather the pages of each sequence."""

    reads_whole_pages = True

    def __init__(self, forward: TorchForward, pool: KvPool, rows: SubnetRows, config: ModelConfig):
        self._forward, self._rows, self._config = forward, rows, config
        self._page_size, self._spare = pool.keys_LPZGC.shape[2], pool.keys_LPZGC.shape[1] - 1

    def compute(self, inputs: Inputs, shape: Shape) -> Tensor:
        size, rows, config = self._page_size, self._rows, self._config
        subnet_N, lengths_N1, table_NM = inputs.subnet_N.long(), inputs.lengths_N.long()[:, None], inputs.table_NM
        position_N1 = lengths_N1 - 1
        slots_N = (table_NM.gather(1, position_N1 // size) * size + position_N1 % size).squeeze(1)
        rotary_N2R = self._forward.planner.rotary_P2R.index_select(0, position_N1.squeeze(1))
        skips = None
        if not shape.is_uniform:
            stays_LN = rows.stays_LU.index_select(1, subnet_N).bool()
            skips = Skips(stays_LN, torch.where(stays_LN, slots_N, self._spare * size))
        groups = (self._group(table_NM, lengths_N1, None),)
        windows = (self._group(table_NM, lengths_N1, config.sliding_window),) if config.sliding_layers else ()
        spans = Spans(rotary_N2R[:, :1], rotary_N2R[:, 1:], slots_N, groups, windows)
        rules = {row: self._rule(row, k, subnet_N) for row, k in enumerate(shape.top_ks) if k}
        run = Run(shape.layers, None, spans, rules, skips)
        return self._forward.compute(Layout(inputs.ids_N, slots_N, (run,), None), shape.want_routes)

    def _group(self, table_NM: Tensor, lengths_N1: Tensor, window: int | None) -> Group:
        (N, M), size, first_N1 = table_NM.shape, self._page_size, torch.zeros_like(lengths_N1)
        num_pages, begin_N1 = M, first_N1
        if window is not None:
            num_pages, first_N1 = min(M, window // size + 2), (lengths_N1 - window).clamp_min(0)
            begin_N1 = first_N1 // size
        places_NM = begin_N1 + torch.arange(num_pages, device=table_NM.device)
        pages = table_NM.gather(1, places_NM.clamp_max(M - 1)).flatten()
        key_NT = begin_N1 * size + torch.arange(num_pages * size, device=table_NM.device)
        is_hidden_NT = (key_NT >= lengths_N1) | (key_NT < first_N1)
        mask_NT = torch.zeros(is_hidden_NT.shape, dtype=self._forward.embedding_VD.dtype, device=table_NM.device)
        return Group(0, N, 1, pages, mask_NT.masked_fill(is_hidden_NT, float("-inf"))[:, None, None])

    def _rule(self, row: int, top_k: int, subnet_N: Tensor) -> RouteRule:
        config = self._config
        is_softmax, num_experts = config.router == "softmax", config.experts_by_layer[row]
        bias_NE = self._rows.bias_ULE[:, row, :num_experts].index_select(0, subnet_N)
        mask_NE = torch.where(bias_NE == MASKED, MASKED, 0.0) if is_softmax else None
        own_N1 = self._rows.top_k_UL[:, row].index_select(0, subnet_N)[:, None]
        dropped_NK = torch.arange(top_k, device=own_N1.device) >= own_N1
        groups = (config.expert_groups, config.top_groups)
        return RouteRule(
            top_k, is_softmax, config.normalize_gates, config.routed_scaling, groups, bias_NE, mask_NE, dropped_NK
        )


def shape_of(
    chunks: Sequence[Chunk],
    num_sequences: int,
    rows: SubnetRows,
    subnets: SubnetTable,
    num_pages: int,
    want_routes: bool,
) -> Shape:
    """Shape of a step over ``chunks``, whose Subnets are in ``rows``."""
    numbers = dict.fromkeys(chunk.subnet for chunk in chunks)
    layers = [subnets[number].layers for number in numbers]
    top_ks = tuple(map(max, zip(*(rows.top_ks[number] for number in numbers), strict=True)))
    union = sorted(set().union(*layers))
    return Shape(num_sequences, num_pages, tuple(union), top_ks, len(set(layers)) == 1, want_routes)


class Host:
    """`Inputs` on the CPU, where each step of a shape is written before it is copied. A table of pages is written when it has changed: in
    most steps of most sequences it has not."""

    def __init__(self, shape: Shape, spare: int):
        """``spare``: page of the sequences that fill the shape up."""
        self._flat, self._spare = np.zeros(Inputs.size(shape), np.int32), spare
        self._head_3N = self._flat[: 3 * shape.num_sequences].reshape(3, -1)
        self._table_NM = self._flat[3 * shape.num_sequences :].reshape(-1, shape.num_pages)
        self._known: list[tuple[int, ...]] = [()] * shape.num_sequences

    def write(self, chunks: Sequence[Chunk], rows: Mapping[int, int]) -> Tensor:
        """The inputs of ``chunks``, flat, valid until the next call."""
        num, head_3N = len(chunks), self._head_3N
        head_3N[0, :num] = [chunk.tokens[0] for chunk in chunks]
        head_3N[1, :num] = [chunk.end for chunk in chunks]
        head_3N[2, :num] = [rows[chunk.subnet] for chunk in chunks]
        head_3N[:, num:] = [[0], [1], [rows[chunks[0].subnet]]]
        blank = (self._spare,)
        for row in range(len(self._known)):
            pages = chunks[row].pages if row < num else blank
            if self._known[row] != pages:
                self._known[row] = pages
                self._table_NM[row] = pages[0]
                self._table_NM[row, : len(pages)] = pages
        return torch.from_numpy(self._flat)


class _Parts(NamedTuple):
    """What is still to be added to the residual stream; the next norm adds it."""

    parts_NKD: Tensor | None = None
    stays_N: Tensor | None = None
    chosen_NK: Tensor | None = None
    """None: all parts are added."""
    num_experts: int = 0


class KernelSteps:
    """Steps with the Triton kernels, for grouped-query attention. Quantised weights are multiplied without dequantising them in memory."""

    reads_whole_pages = False

    def __init__(
        self,
        forward: TorchForward,
        pool: KvPool,
        rows: SubnetRows,
        config: ModelConfig,
        quantised: Mapping[str, IntWeight | Rows],
    ):
        """``quantised``: integer or FP8 weights by their names in the state dict."""
        from stretto.ops.kernels import layer, paged_attention, products

        self._layer, self._attention, self._products = layer, paged_attention, products
        self._forward, self._pool, self._rows, self._config = forward, pool, rows, config
        self._clamp = clamp_of(config)
        device = pool.keys_LPZGC.device
        self._matrices = {
            name: products.Matrix.of(weight if isinstance(weight, Rows) else weight.map(lambda x: x.to(device)))
            for name, weight in quantised.items()
            if products.Matrix.takes(weight)
        }

    def compute(self, inputs: Inputs, shape: Shape) -> Tensor:
        forward, rows = self._forward, self._rows
        stays_LN = None if shape.is_uniform else rows.stays_LU.index_select(1, inputs.subnet_N)
        routes_NLK, pool = None, self._pool.routes_PZLK
        if shape.want_routes:
            assert pool is not None, "the cache stores no routes"
            no_expert = torch.iinfo(pool.dtype).max
            routes_NLK = inputs.ids_N.new_full((shape.num_sequences, *pool.shape[2:]), no_expert)
        x_ND, rest = forward.embedding_VD.index_select(0, inputs.ids_N), _Parts()
        for place in shape.layers:
            stays_N = None if stays_LN is None else stays_LN[place]
            x_ND, rest = self._block(place, x_ND, rest, inputs, shape, stays_N, routes_NLK)
        if routes_NLK is not None:
            self._write_routes(routes_NLK, inputs)
        normed_ND = self._add_norm(x_ND, rest, forward.norm_D)[1]
        return self._linear(normed_ND, forward.head, "head.weight").float()

    def _block(
        self,
        place: int,
        x_ND: Tensor,
        rest: _Parts,
        inputs: Inputs,
        shape: Shape,
        stays_N: Tensor | None,
        routes_NLK: Tensor | None,
    ) -> tuple[Tensor, _Parts]:
        layer, prefix = self._forward.layers[place], f"blocks.{place}."
        x_ND, normed_ND, _ = self._add_norm(x_ND, rest, layer.attention_norm_D)
        assert isinstance(layer.attention, HeadsWeights)
        y_NX = self._attend(place, layer.attention, normed_ND, inputs, stays_N)
        name = f"{prefix}attention.out.weight"
        y_ND = self._linear(y_NX, layer.out.t(), name, layer.out_bias_D)
        mlp, is_moe = layer.mlp, isinstance(layer.mlp, MoeWeights)
        rest = _Parts(y_ND[:, None], stays_N)
        x_ND, normed_ND, wide_ND = self._add_norm(x_ND, rest, layer.mlp_norm_D, with_fp32=is_moe)
        if isinstance(mlp, SwiGluWeights):
            return x_ND, _Parts(self._swiglu(normed_ND, mlp, f"{prefix}mlp.")[:, None], stays_N)
        chosen_NK, gates_NK = self._route(mlp, wide_ND, inputs, shape)
        num_experts = self._config.experts_by_layer[mlp.row]
        if routes_NLK is not None:
            kept_NK = torch.where(chosen_NK < num_experts, chosen_NK, routes_NLK[:, mlp.row, : chosen_NK.shape[1]])
            routes_NLK[:, mlp.row, : chosen_NK.shape[1]] = kept_NK
        parts_NKD = self._products.expert_outputs(
            normed_ND,
            chosen_NK,
            gates_NK,
            self._experts(mlp.experts.gate_up_EFD, f"{prefix}mlp.gate_up"),
            self._experts(mlp.experts.down_EDI, f"{prefix}mlp.down"),
            mlp.experts.biases,
            self._clamp,
            num_more=0 if mlp.shared is None else 1,
        )
        if mlp.shared is not None:
            parts_NKD[:, -1] = self._swiglu(normed_ND, mlp.shared, f"{prefix}mlp.shared.")
        return x_ND, _Parts(parts_NKD, stays_N, chosen_NK, num_experts)

    def _attend(
        self, place: int, weights: HeadsWeights, normed_ND: Tensor, inputs: Inputs, stays_N: Tensor | None
    ) -> Tensor:
        keys_PZGC, values, heads = self._pool.keys_LPZGC[place], self._pool.values_LPZGC, weights.heads
        assert values is not None, "a cache without values"
        values_PZGC, config = values[place], self._config
        qkv_NX = self._linear(normed_ND, weights.qkv, f"blocks.{place}.attention.qkv.weight", weights.qkv_bias_X)
        pages = (inputs.table_NM, inputs.lengths_N)
        q_NHC = self._layer.rotate_and_store(
            *(qkv_NX, heads.norm_JC, heads.is_wide, heads.clip, config.norm_eps, self._forward.planner.rotary_P2R),
            *(*pages, keys_PZGC, values_PZGC, stays_N),
        )
        window = config.sliding_window if heads.is_sliding else None
        return self._attention.paged_attention(
            q_NHC, keys_PZGC, values_PZGC, *pages, scale=heads.scale, sinks_H=heads.sinks_H, window=window
        )

    def _route(self, mlp: MoeWeights, wide_ND: Tensor, inputs: Inputs, shape: Shape) -> tuple[Tensor, Tensor]:
        logits_NE = F.linear(wide_ND, mlp.gate, mlp.gate_bias_E)
        config, tables = self._config, self._rows
        return self._layer.choose_experts(
            *(logits_NE, tables.bias_ULE, tables.top_k_UL, inputs.subnet_N, mlp.row, shape.top_ks[mlp.row]),
            softmax=config.router == "softmax",
            normalize=config.normalize_gates,
            scaling=config.routed_scaling,
            groups=(config.expert_groups, config.top_groups),
        )

    def _add_norm(
        self, x_ND: Tensor, rest: _Parts, weight_D: Tensor, with_fp32: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._layer.add_norm(
            *(x_ND, rest.parts_NKD, weight_D, self._config.norm_eps),
            stays_N=rest.stays_N,
            chosen_NK=rest.chosen_NK,
            num_experts=rest.num_experts,
            with_fp32=with_fp32,
        )

    def _swiglu(self, normed_ND: Tensor, weights: SwiGluWeights, prefix: str) -> Tensor:
        hidden_NF = self._linear(normed_ND, weights.gate_up, f"{prefix}gate_up.weight", weights.gate_up_bias)
        inner_NI = swiglu(hidden_NF, self._clamp)
        return self._linear(inner_NI, weights.down.t(), f"{prefix}down.weight", weights.down_bias)

    def _linear(self, x_ND: Tensor, weight_FD: Tensor, name: str, bias_F: Tensor | None = None) -> Tensor:
        if name in self._matrices:
            return self._products.linear(x_ND, self._matrices[name], bias_F)
        return F.linear(x_ND, weight_FD, bias_F)

    def _experts(self, weight: Tensor, name: str) -> Matrix:
        return self._matrices.get(name) or self._products.Matrix(weight)

    def _write_routes(self, routes_NLK: Tensor, inputs: Inputs) -> None:
        pool = self._pool.routes_PZLK
        assert pool is not None, "the cache stores no routes"
        size, position_N = pool.shape[1], inputs.lengths_N.long() - 1
        page_N = inputs.table_NM.gather(1, (position_N // size)[:, None]).squeeze(1).long()
        narrow = torch.int16 if pool.dtype == torch.uint16 else torch.uint8
        rows_NLK = routes_NLK.to(pool.dtype).view(narrow)
        pool.view(narrow).flatten(0, 1).index_copy_(0, page_N * size + position_N % size, rows_NLK)


def why_torch(pool: KvPool) -> str:
    """Reason why the Triton kernels cannot compute the steps of this network; empty if they can."""
    if pool.values_LPZGC is None:
        return "no kernels for latent attention"
    device = pool.keys_LPZGC.device
    if why := kernels.why_not(device):
        return why
    if device.type != "cuda":  # interpreted
        return ""
    # torch has the number for GPUs of NVIDIA, and declares no type for it
    num_bytes = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)
    return "" if num_bytes is None else why_small(pool.keys_LPZGC.dtype, num_bytes)


def why_small(dtype: torch.dtype, num_bytes: int) -> str:
    """Reason why the kernels do not fit into ``num_bytes`` of shared memory for each program; empty if they do."""
    if dtype == torch.float32 and num_bytes < _FP32_BYTES:
        return f"fp32 kernels need {_FP32_BYTES} bytes of shared memory, and the GPU has {num_bytes}"
    return ""
