"""Forward pass through the compiled CPU kernels, with the interface of `TorchForward`.

Shape letters: L layers, P pages, Z tokens per page, G key/value heads, C head width, K experts per token, N tokens, M returned
logits, V vocabulary, T positions, R rotated pairs, D hidden.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from stretto.engine.forward_torch import KvPool, largest_top_k
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.attention import Attention, rotary_frequencies
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Block, SwiGlu, Transformer
from stretto.ops.int_weights import SCALE_DTYPE, IntWeight
from stretto.ops.native import INT_GROUP, MAX_GROUP, MAX_TOP_K, PANEL, Decoder, Network, Panels
from stretto.ops.operators import rotary_tables


def why_not(config: ModelConfig) -> str:
    """Reason why the compiled kernels cannot compute this network; empty if they can."""
    if config.latent is not None:
        return "no kernels for latent attention"
    if (group := config.num_heads // config.num_kv_heads) > MAX_GROUP:
        return f"kernels for {MAX_GROUP} query heads to a key head at most, not {group}"
    if (top_k := largest_top_k(config)) > MAX_TOP_K:
        return f"kernels for {MAX_TOP_K} experts a token at most, not {top_k}"
    return ""


_NAME = re.compile(r"blocks\.(\d+)\.(?:attention|mlp)\.(.+?)(?:\.weight)?")


Integers = Mapping[str, IntWeight | Panels]
"""Integer weights by their names in the state dict, as they are stored or in the kernels' order."""


def fits_kernels(name: str, weight: IntWeight) -> bool:
    """Whether there are kernels for the integer weight ``name``: groups of 32, fp16 scales, and matrices that begin at a panel of rows."""
    rows = weight.codes.shape[-2] // (2 if name.removesuffix(".weight").endswith("gate_up") else 1)
    is_read = weight.group == INT_GROUP and weight.scales.dtype == SCALE_DTYPE
    return is_read and (name == "head.weight" or rows % PANEL == 0)


def in_panels(integers: Integers) -> dict[str, Panels]:
    """Those of ``integers`` that have kernels, in the kernels' order; none of those on the meta device, which hold no codes."""
    return {
        name: weight if isinstance(weight, Panels) else Panels.of(weight)
        for name, weight in integers.items()
        if isinstance(weight, Panels) or (fits_kernels(name, weight) and not weight.codes.is_meta)
    }


class NativeForward:
    """The compiled forward pass of one model over one cache. Weights may be overwritten in place, but not replaced; integer weights may
    not be overwritten."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: Transformer,
        subnets: SubnetTable,
        pool: KvPool,
        integers: Mapping[str, Panels] = MappingProxyType({}),
    ):
        """``integers``: weights by their names in the state dict; the parameters of ``model`` that they replace may be on the meta
        device."""
        config = model.config
        assert pool.values_LPZGC is not None, "a pool without values"
        empty = {name for name, parameter in model.named_parameters() if parameter.is_meta} - integers.keys()
        assert not empty, f"weights without values: {sorted(empty)}"
        longest = min(config.max_positions, pool.keys_LPZGC.shape[1] * pool.keys_LPZGC.shape[2])
        frequencies_R = rotary_frequencies(config, torch.device("cpu"))
        cos_TR, sin_TR = rotary_tables(torch.arange(longest), frequencies_R, config.rope_magnitude)
        clamp, windows = config.clamped_swiglu, dict.fromkeys(config.sliding_layers, config.sliding_window or 0)
        network = Network(
            options={
                "num_heads": config.num_heads,
                "eps": config.norm_eps,
                "attention_scale": config.attention_scale or config.head_dim**-0.5,
                "wide_norm": config.qk_norm_wide,
                "qkv_clip": config.qkv_clip or 0.0,
                "alpha": 0.0 if clamp is None else clamp.alpha,
                "limit": 0.0 if clamp is None else clamp.limit,
                "softmax": config.router == "softmax",
                "normalize": config.normalize_gates,
                "scaling": config.routed_scaling,
                "expert_groups": config.expert_groups,
                "top_groups": config.top_groups,
                "route_slots": largest_top_k(config),
            },
            cos_TR=cos_TR,
            sin_TR=sin_TR,
            layers=[_layer(block, config.selection_bias) for block in model.blocks],
            windows=[windows.get(layer, 0) for layer in range(config.num_layers)],
            embedding_VD=model.embedding.weight.detach(),
            norm_D=model.norm.weight.detach(),
            head_VD=model.head_VD.detach(),
            keys_LPZGC=pool.keys_LPZGC,
            values_LPZGC=pool.values_LPZGC,
            routes_PZLK=pool.routes_PZLK,
            integers=_by_layer(integers, config.num_layers) if integers else (),
            int_head=integers.get("head.weight"),
        )
        self.library, self._config, self._subnets = library, config, subnets
        self._decoder = Decoder(library, network)
        self._numbers: dict[int, int] = {}

    def forward(self, chunks: Sequence[Chunk], want_routes: bool) -> Tensor:
        """See `TorchForward.forward`."""
        lists: list[list[int]] = [[] for _ in range(6)]
        tokens, positions, tables, subnets, pages, logits = lists
        for chunk in chunks:
            num = len(chunk.tokens)
            tables += [len(pages)] * num
            subnets += [self._number(chunk.subnet)] * num
            tokens += chunk.tokens
            positions += range(chunk.start, chunk.start + num)
            pages += chunk.pages
            logits += range(len(tokens) - chunk.num_logits, len(tokens))
        return self._decoder.step(tokens, positions, tables, subnets, pages, logits, want_routes)

    def _number(self, subnet: int) -> int:
        """The kernels' number of a Subnet."""
        if subnet not in self._numbers:
            self._numbers[subnet] = self._decoder.subnet(self._choices(self._subnets[subnet]))
        return self._numbers[subnet]

    def _choices(self, subnet: Subnet) -> list[tuple[int, int, int] | None]:
        """The Subnet as `Decoder.subnet` takes it."""
        config = self._config
        choices: list[tuple[int, int, int] | None] = [None] * config.num_layers
        moe = iter(zip(subnet.experts, subnet.top_k, strict=True))
        for layer in subnet.layers:
            if layer in config.dense_layers:
                choices[layer] = (0, 0, 0)
            else:
                num_experts, top_k = next(moe)
                choices[layer] = (num_experts, top_k, config.branch(num_experts))
        return choices


def _by_layer(integers: Mapping[str, Panels], num_layers: int) -> list[dict[str, Panels]]:
    """Integer weights of each layer by their names in `stretto.ops.native.INTEGERS`."""
    layers: list[dict[str, Panels]] = [{} for _ in range(num_layers)]
    for name, weight in integers.items():
        if (found := _NAME.fullmatch(name)) is not None:
            layers[int(found[1])][found[2].replace("shared.", "shared_")] = weight
    return layers


def _layer(block: nn.Module, selection_bias: bool) -> dict[str, Tensor | None]:
    """Tensors of a block by their names in abi.h."""
    assert isinstance(block, Block)
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, Attention)
    tensors = {
        "attention_norm": block.attention_norm.weight,
        "qkv": attention.qkv.weight,
        "qkv_bias": attention.qkv.bias,
        "out": attention.out.weight,
        "out_bias": attention.out.bias,
        "sinks": attention.sinks,
        "q_norm": attention.q_norm,
        "k_norm": attention.k_norm,
        "mlp_norm": block.mlp_norm.weight,
        "router": None,
    }
    if isinstance(mlp, SwiGlu):
        tensors |= _swiglu(mlp)
    else:
        tensors |= {name: getattr(mlp, name) for name in ("gate_up", "gate_up_bias", "down", "down_bias")}
        tensors |= {"router": mlp.gate, "router_bias": mlp.gate_bias, "rank": mlp.rank_E}
        if selection_bias:
            tensors["bias"] = mlp.bias_WE
        if mlp.shared is not None:
            tensors |= {f"shared_{name}": tensor for name, tensor in _swiglu(mlp.shared).items()}
    return {name: None if tensor is None else tensor.detach() for name, tensor in tensors.items()}


def _swiglu(layer: SwiGlu) -> dict[str, Tensor | None]:
    return {
        "gate_up": layer.gate_up.weight,
        "gate_up_bias": layer.gate_up.bias,
        "down": layer.down.weight,
        "down_bias": layer.down.bias,
    }
