"""Steps of few tokens through the compiled CPU kernels: what `forward` does for them, in one call.

Shape letters: L layers, P pages, Z page size, G key/value heads, C head width, K experts a token, N tokens, M wanted logits,
V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.engine.layout import largest_top_k
from stretto.engine.sequence import Chunk
from stretto.model.spec import Subnet
from stretto.model.transformer import Block, SwiGlu, Transformer
from stretto.ops.native.choose import Chosen, choose
from stretto.ops.native.decode import Choice, Decoder, Drafting, LayerTensors, Network, Step
from stretto.ops.operators import rotary_tables

_MAX_KNOWN = 1024
"""Objects remembered; every request may come with one of its own."""


class NativeForward:
    """The compiled forward pass of one model over one pool. Weights must be changed in place, never replaced."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: Transformer,
        keys_LPZGC: Tensor,
        values_LPZGC: Tensor,
        routes_PZLK: Tensor | None,
    ):
        config = model.config
        longest = min(config.max_positions, keys_LPZGC.shape[1] * keys_LPZGC.shape[2])
        cos_TR, sin_TR = rotary_tables(torch.arange(longest), config.rotary_dim, config.rope_theta)
        network = Network(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            softmax=config.router == "softmax",
            normalize=config.normalize_gates,
            scaling=config.routed_scaling,
            max_top_k=largest_top_k(config),
            cos_TR=cos_TR,
            sin_TR=sin_TR,
            layers=[_layer_tensors(block, config.selection_bias) for block in model.blocks],
            embedding_VD=model.embedding.weight.detach(),
            norm_D=model.norm.weight.detach(),
            head_VD=model.head_VD.detach(),
            keys_LPZGC=keys_LPZGC,
            values_LPZGC=values_LPZGC,
            routes_PZLK=routes_PZLK,
        )
        self._config = config
        self._library = library
        self._decoder = Decoder(library, network)
        self._numbers: dict[Subnet, int] = {}
        self._by_id: dict[int, tuple[Subnet, int]] = {}

    def forward(self, chunks: Sequence[Chunk], want_routes: bool) -> Tensor:
        """Logits [M, V] (fp32) of the chunks' last tokens; keys, values and routes go to the pools."""
        step = Step([], [], [], [], [], [])
        for chunk in chunks:
            num, number = len(chunk.tokens), self._known(chunk.subnet)
            step.tables += [len(step.pages)] * num
            step.subnets += [number] * num
            step.tokens += chunk.tokens
            step.positions += range(chunk.start, chunk.start + num)
            step.pages += chunk.pages
            step.logits += range(len(step.tokens) - chunk.num_logits, len(step.tokens))
        return self._decoder.step(step, want_routes)

    def draft(
        self,
        chunks: Sequence[Chunk],
        most: Sequence[int],
        ends: Sequence[int],
        end_ids: Sequence[int],
        temperatures: Sequence[float],
        seeds: Sequence[int],
    ) -> tuple[np.ndarray, Tensor | None]:
        """Let chunks of one token each decode on by themselves; see `Decoder.draft`.

        Args:
            chunks: their page tables reach to the last position that may be drafted.
            most: tokens to draft for each, at most.
            ends: for each a token that nothing is drafted after; -1: none.
        """
        drafting = Drafting([], [], [], [], [], list(most), list(ends), list(temperatures), list(seeds))
        for chunk in chunks:
            drafting.tokens.append(chunk.tokens[0])
            drafting.positions.append(chunk.start)
            drafting.tables.append(len(drafting.pages))
            drafting.subnets.append(self._known(chunk.subnet))
            drafting.pages += chunk.pages
        return self._decoder.draft(drafting, max(most), end_ids)

    def choose(
        self,
        logits_MV: Tensor,
        positions: Sequence[int],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        drafts: Sequence[Sequence[int]],
        draft_rows: Sequence[int] = (),
    ) -> Chosen:
        """Tokens of sequences whose settings are plain (`stretto.engine.sampler_state.SamplerCache.plain`); see `stretto.ops.native.choose.choose`."""
        return choose(self._library, logits_MV, positions, temperatures, seeds, drafts, draft_rows)

    def _known(self, subnet: Subnet) -> int:
        known = self._by_id.get(id(subnet))
        return known[1] if known is not None and known[0] is subnet else self._number(subnet)

    def _number(self, subnet: Subnet) -> int:
        """Number of ``subnet`` in the kernels; the object is remembered, since to hash one costs as much as a layer."""
        number = self._numbers.get(subnet)
        if number is None:
            number = self._numbers[subnet] = self._decoder.subnet(self._choices(subnet))
        if len(self._by_id) >= _MAX_KNOWN:
            self._by_id.clear()
        self._by_id[id(subnet)] = subnet, number
        return number

    def _choices(self, subnet: Subnet) -> list[Choice | None]:
        choices: list[Choice | None] = []
        kept = iter(zip(subnet.experts, subnet.top_k, strict=True))
        for layer in range(self._config.num_layers):
            if layer not in subnet.layers:
                choices.append(None)
            elif layer in self._config.dense_layers:
                choices.append(Choice())
            else:
                num_experts, top_k = next(kept)
                choices.append(Choice(num_experts, top_k, self._config.branch(num_experts)))
        return choices


def _layer_tensors(block: nn.Module, selection_bias: bool) -> LayerTensors:
    assert isinstance(block, Block)
    attention, mlp = block.attention, block.mlp
    common: dict[str, Any] = {
        "attention_norm_D": block.attention_norm.weight.detach(),
        "qkv_QD": attention.qkv.weight.detach(),
        "qkv_bias_Q": _detached(attention.qkv.bias),
        "out_DX": attention.out.weight.detach(),
        "q_norm_C": _detached(attention.q_norm),
        "k_norm_C": _detached(attention.k_norm),
        "mlp_norm_D": block.mlp_norm.weight.detach(),
    }
    if isinstance(mlp, SwiGlu):
        return LayerTensors(**common, gate_up=mlp.gate_up.weight.detach(), down=mlp.down.weight.detach())
    return LayerTensors(
        **common,
        gate_up=mlp.gate_up.detach(),
        down=mlp.down.detach(),
        router_ED=mlp.gate.detach(),
        bias_WE=mlp.bias_WE if selection_bias else None,
        rank_E=mlp.rank_E,
        shared_gate_up_FD=None if mlp.shared is None else mlp.shared.gate_up.weight.detach(),
        shared_down_DI=None if mlp.shared is None else mlp.shared.down.weight.detach(),
    )


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
