"""Writer of GGUF files for llama.cpp.

llama.cpp's own converter rejects tokenizers whose hash it does not know, so the file is written directly, with the names of
`stretto.model.gguf.names`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.model.checkpoint import describe, read_integers
from stretto.model.families import Family, Stored, stored_tensors, to_hf
from stretto.model.gguf.names import (
    ARCHITECTURES,
    LATENT_KEYS,
    LATENT_UP,
    LATENT_VALUES,
    OUTSIDE,
    ROPE_FACTORS,
    Architecture,
)
from stretto.model.gguf.read import llama3_factors, llama3_scaling
from stretto.model.gguf.tokenizer import add_tokenizer, rule_name
from stretto.model.spec import ClampedSwiGlu, LatentAttention, ModelConfig, RopeScaling
from stretto.model.stored import to_stored
from stretto.model.streamed import StreamedState
from stretto.ops.int_weights import IntWeight
from stretto.text.tokenizer import load_tokenizer

_TYPES: dict[str, tuple[Kind, gguf.LlamaFileType]] = {
    "f32": (Kind.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (Kind.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (Kind.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Kind.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Kind.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
_INTEGERS = (Kind.Q8_0, Kind.Q4_0)
_VALUE_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=experts\.)\d+")
_GPT_OSS = ("sliding_layers", "attention_sinks", "clamped_swiglu", "router_bias", "expert_bias")
_MISSING = (*_GPT_OSS, "latent", "qkv_clip")
"""Fields of `ModelConfig` that are not supported; those of `_GPT_OSS` only for gpt-oss, ``latent`` only for DeepSeek-V3."""
_BIASES = {
    "attention_bias": ("llama", "qwen2", "qwen3_moe", "glm4_moe", "gpt_oss"),
    "attention_out_bias": ("llama", "gpt_oss"),
    "mlp_bias": ("llama",),
}
"""Families for which llama.cpp loads each kind of bias."""


def why_not_gguf(config: ModelConfig, family: str) -> str | None:
    """The reason, in one sentence, why llama.cpp cannot run ``config`` as ``family``; None if it can."""
    if not any(each.family == family for each in ARCHITECTURES):
        return f"Stretto does not write {family} as GGUF"
    for name in _MISSING:
        is_supported = (family == "gpt_oss" and name in _GPT_OSS) or (family == "deepseek_v3" and name == "latent")
        if getattr(config, name) and not is_supported:
            return f"it has {name}, which Stretto does not write as GGUF"
    for name, families in _BIASES.items():
        if getattr(config, name) and family not in families:
            return f"it has {name}, which llama.cpp's {family} does not load"
    if config.expert_groups > 1:
        return "its experts are chosen by groups, which Stretto does not write as GGUF"
    if config.rope_scaling is not None and not _is_supported(config.rope_scaling, family):
        return f"its rotary frequencies are scaled ({config.rope_scaling.kind}) in a way that llama.cpp does not have"
    if family in ("qwen3_moe", "mixtral"):
        if not config.normalize_gates:
            return f"llama.cpp renormalises the gates of every {family} and this network's are not"
        if config.dense_layers:
            return f"llama.cpp's {family} has no dense layers"
    if family in ("qwen2", "olmoe") and config.head_dim * config.num_heads != config.hidden_size:
        return f"llama.cpp's {family} has heads that fill the hidden size and this network's do not"
    if family == "gpt_oss":
        if config.sliding_layers != tuple(range(0, config.num_layers, 2)):
            return f"llama.cpp's gpt_oss has a window in every other layer, and this network in {config.sliding_layers}"
        if config.clamped_swiglu != ClampedSwiGlu() or not config.attention_bias or not config.attention_out_bias:
            return "llama.cpp's gpt_oss has its own clamps and biases, and this network others"
    if config.latent is not None:
        if config.rope_scaling is not None:
            return "its rotary frequencies are scaled, which Stretto does not write as GGUF for latent attention"
        if config.latent.norm_eps != config.norm_eps:
            return f"llama.cpp's deepseek2 has one eps for all norms and this network {config.norm_eps} and {config.latent.norm_eps}"
    if family == "olmoe":
        if config.normalize_gates:
            return "llama.cpp renormalises the gates of no olmoe and this network's are"
        if config.num_kv_heads != config.num_heads:
            return "llama.cpp's olmoe has one key/value head for each query head"
    if family == "ernie4_5_moe" and config.dense_layers != tuple(range(len(config.dense_layers))):
        return f"llama.cpp's ernie4_5_moe has its dense layers first, and this network has {config.dense_layers}"
    return None


def _is_supported(scaling: RopeScaling, family: str) -> bool:
    """Whether llama.cpp can express a scaling of rotary frequencies."""
    if scaling.kind == "yarn":
        return scaling.truncate and scaling.attention_factor is scaling.mscale is scaling.mscale_all_dim is None
    if scaling.kind == "llama3":
        return family in ("llama", "mixtral") and scaling == llama3_scaling(scaling.factor)
    return scaling.kind == "linear"


def write_gguf(
    folder: Path | str,
    path: Path | str,
    dtype: str = "f32",
    *,
    pre_tokenizer: str | None = None,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Write the checkpoint in ``folder`` as the GGUF file ``path``.

    Args:
        dtype: ``f32``, ``f16``, ``bf16``, ``q8_0`` or ``q4_0``; norms, routers and biases are fp32, as in llama.cpp's own files. With
            ``q8_0`` and ``q4_0``, weights that ``folder`` stores as integers in groups of 32 keep their codes and scales, those of 8
            bits as ``q8_0``; other weights are rounded.
        pre_tokenizer: llama.cpp's name of the tokenizer's splitting rule, which is not checked. Needed only for byte-level tokenizers
            that are neither common nor trained by Stretto.
        advance: called with the number of bytes of each tensor written.

    Raises:
        UserError: llama.cpp cannot run this network, the folder's tokenizer is missing or cannot be expressed, or the disk is full.
    """
    folder, path = Path(folder), Path(path)
    if dtype not in _TYPES:
        raise UserError(f"--dtype {dtype}: not a supported type of GGUF weights; choose {', '.join(_TYPES)}")
    if path.is_dir():
        raise UserError(f"{path}: a folder; name the file to write: {path / 'model.gguf'}")
    description = describe(folder)
    config, family = description.config, description.family
    reason = why_not_gguf(config, family)
    if reason is not None:
        raise UserError(
            f"{folder}: cannot be written as GGUF: {reason}; change the recipe or serve the folder with another engine"
        )
    tokenizer = load_tokenizer(folder)
    pre = rule_name(folder / "tokenizer.json", tokenizer, pre_tokenizer)
    kind, file_type = _TYPES[dtype]
    architecture = next(each for each in ARCHITECTURES if each.family == family)
    tensors = _tensors(config, family, architecture, kind)
    integers = read_integers(folder) if kind in _INTEGERS else {}
    tensors = [tensor.with_integers(integers) for tensor in tensors]
    uneven = next((tensor for tensor in tensors if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[tensor.kind][0]), None)
    if uneven is not None:
        raise UserError(
            f"--dtype {dtype}: {uneven.name} has rows of {uneven.shape[-1]}, not a multiple of 32; choose bf16"
        )
    with StreamedState(folder, torch.float32) as state, replacing(path) as partial:
        writer = gguf.GGUFWriter(partial, architecture.name)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(folder.resolve().name)
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_settings(writer, architecture, config, to_hf(config, family, "float32"))
        add_tokenizer(writer, tokenizer, config.vocab_size, pre)
        for tensor in tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.data(state))
            if advance is not None:
                advance(tensor.num_bytes)
        writer.close()


@dataclass(frozen=True, slots=True)
class _GgufTensor:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    values: Callable[[Mapping[str, Tensor]], Tensor]
    """Function from our state dict to the tensor, in fp32."""
    rows_of: tuple[str, ...] = ()
    """Weights of our state dict whose rows are the rows of the tensor; empty: their elements are rearranged in another way."""
    integers: Mapping[str, IntWeight] | None = None
    """Integer weights whose codes and scales are written; None: the values are rounded to ``kind``."""

    @property
    def num_bytes(self) -> int:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * block_bytes

    def with_integers(self, integers: Mapping[str, IntWeight]) -> _GgufTensor:
        """The tensor with the codes and scales of ``integers``, if llama.cpp has their form. 4 bits also fit into ``Q8_0``."""
        weights = [integers.get(name) for name in self.rows_of]
        bits = {weight.bits for weight in weights if weight is not None and weight.group == 32 and weight.zeros is None}
        if None in weights or len(bits) != 1 or self.kind not in _INTEGERS:
            return self
        return replace(self, kind=Kind.Q8_0 if 8 in bits else self.kind, integers=integers)

    def data(self, state: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
        """The bytes of the tensor, from our state dict."""
        if self.integers is None:
            return gguf.quants.quantize(self.values(state).numpy(), self.kind)
        codes = self.values({name: self.integers[name].codes.float() for name in self.rows_of})
        scales = self.values(
            {name: self.integers[name].scales.float().repeat_interleave(32, -1) for name in self.rows_of}
        )
        return _blocks(codes.to(torch.int8).numpy(), scales[..., ::32].numpy().astype("<f2"), self.kind)


def _blocks(codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """Blocks of llama.cpp's ``kind`` from codes int8 […, D] and scales fp16 […, D / 32]: a scale, then its codes. Those of 4 bits are 8
    larger, code n in the lower half of a byte and code n + 16 in the upper one."""
    blocks = codes.reshape(*scales.shape, 32)
    if kind == Kind.Q4_0:
        unsigned = (blocks + 8).astype(np.uint8)
        blocks = unsigned[..., :16] | unsigned[..., 16:] << 4
    return np.concatenate((scales[..., None].view(np.uint8), blocks.view(np.uint8)), -1).reshape(*codes.shape[:-1], -1)


def _tensors(config: ModelConfig, family: Family, architecture: Architecture, kind: Kind) -> list[_GgufTensor]:
    """The tensors of a checkpoint, with llama.cpp's names."""
    groups: dict[str, list[Stored]] = {}
    for stored in stored_tensors(config, family):
        if stored.is_copy or (stored.ours is None and stored.name.endswith("o_proj.bias")):
            continue  # llama.cpp ties the head itself; only transformers' qwen3_moe needs the zero bias
        groups.setdefault(_name(stored.name, architecture), []).append(stored)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if architecture.pairs_neighbours else {}
    tensors: list[_GgufTensor] = []
    for name, members in groups.items():
        shape = members[0].shape
        if members[0].is_stacked:
            tensors += _gpt_oss_experts(name.split(".")[1], members[0], kind)
        elif members[0].name.endswith(f"{LATENT_UP}.weight"):
            tensors += _latent_up(config, name.split(".")[1], members[0], kind)
        else:
            if "_exps." in name:
                shape = (len(members), *shape)
            elif name.endswith("exp_probs_b.bias"):
                shape = shape[-1:]  # ERNIE's has a dimension more
            is_fp32 = len(shape) == 1 or "ffn_gate_inp" in name
            values = partial(_stack, members, shape, heads.get(name.split(".")[-2], 0))
            ours = tuple(dict.fromkeys(member.ours for member in members if member.ours is not None))
            tensors.append(_GgufTensor(name, shape, Kind.F32 if is_fp32 else kind, values, ours))
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        factors_R = llama3_factors(config.rope_theta, config.rotary_dim // 2, config.rope_scaling.factor).float()
        tensors.append(_GgufTensor(ROPE_FACTORS, tuple(factors_R.shape), Kind.F32, lambda state: factors_R))
    return tensors


def _stack(members: list[Stored], shape: tuple[int, ...], heads: int, state: Mapping[str, Tensor]) -> Tensor:
    """One tensor, or the stack of a layer's experts. Rotated rows of ``heads`` heads, which are halves, become neighbours."""
    values = torch.stack([to_stored(member, state, torch.float32) for member in members]).view(shape)
    return values.view(heads, 2, -1, *shape[1:]).transpose(1, 2).reshape(shape) if heads else values


def _gpt_oss_experts(layer: str, stored: Stored, kind: Kind) -> Iterator[_GgufTensor]:
    """gpt-oss's experts: gate and up, whose columns alternate on the hub, become two tensors, and all matrices are transposed."""
    is_bias = len(stored.shape) == 2
    names = ("gate", "up") if "gate_up" in stored.name else ("down",)
    rows = stored.shape[-1] // len(names)
    shape = (stored.shape[0], rows) if is_bias else (stored.shape[0], rows, stored.shape[1])

    def values(start: int, state: Mapping[str, Tensor]) -> Tensor:
        columns = to_stored(stored, state, torch.float32)[..., start :: len(names)]
        return (columns if is_bias else columns.mT).contiguous()

    for start, name in enumerate(names):
        full_name = f"blk.{layer}.ffn_{name}_exps.{'bias' if is_bias else 'weight'}"
        yield _GgufTensor(full_name, shape, Kind.F32 if is_bias else kind, partial(values, start))


def _latent_up(config: ModelConfig, layer: str, stored: Stored, kind: Kind) -> Iterator[_GgufTensor]:
    """The projection of MLA from latent vectors: keys, transposed for each head, and values become two tensors."""
    assert config.latent is not None
    heads, rank, value_dim = config.num_heads, config.latent.kv_rank, config.latent.value_dim
    key_dim = config.head_dim - config.latent.rope_dim

    def rows(state: Mapping[str, Tensor]) -> Tensor:
        return to_stored(stored, state, torch.float32).unflatten(0, (heads, -1))

    keys, values = (f"blk.{layer}.{name}.weight" for name in (LATENT_KEYS, LATENT_VALUES))
    yield _GgufTensor(keys, (heads, rank, key_dim), kind, lambda state: rows(state)[:, :key_dim].mT.contiguous())
    yield _GgufTensor(values, (heads, value_dim, rank), kind, lambda state: rows(state)[:, key_dim:].contiguous())


def _name(hub_name: str, architecture: Architecture) -> str:
    """GGUF's name of a hub tensor; all experts of a layer have one."""
    match = _LAYER.fullmatch(hub_name)
    if match is None:
        return next(name for name, hub in OUTSIDE.items() if hub == hub_name)
    layer, rest = match.groups()
    tensor = next((name for name, hub in architecture.tensors.items() if hub == rest), None)
    if tensor is not None:
        return f"blk.{layer}.{tensor}"
    if architecture.family == "gpt_oss" and ".experts." in rest:
        return f"blk.{layer}.{rest}"  # replaced in `_gpt_oss_experts`
    module, end = _EXPERT.sub("{}", rest).rsplit(".", 1)
    # GLM has two names for its second norm; the later one is written
    names = [name for name, hub in architecture.layer.items() if hub == module]
    assert names, f"{hub_name} has no name in llama.cpp's {architecture.name}"
    return f"blk.{layer}.{names[-1]}.{end}"


def _add_settings(
    writer: gguf.GGUFWriter, architecture: Architecture, config: ModelConfig, tree: Mapping[str, Any]
) -> None:
    """Write the settings of the config.json ``tree`` as metadata."""
    for key, value in _settings(architecture, config, tree):
        writer.add_key_value(f"{architecture.name}.{key}", value, _VALUE_TYPES[type(value)])


def _settings(
    architecture: Architecture, config: ModelConfig, tree: Mapping[str, Any]
) -> Iterator[tuple[str, bool | int | float | str]]:
    yield "vocab_size", config.vocab_size
    for key, field in architecture.setting_names().items():
        if tree.get(field) is not None and key not in _DEFAULT:
            yield key, tree[field]
    yield from architecture.given.items()
    if config.latent is None:
        yield "attention.value_length", config.head_dim
    else:
        yield from _latent_settings(config, config.latent)
    yield "rope.dimension_count", config.rotary_dim
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind != "llama3":
        yield "rope.scaling.type", scaling.kind
        yield "rope.scaling.factor", scaling.factor
    if scaling is not None and scaling.kind == "yarn":
        yield "rope.scaling.original_context_length", scaling.original_positions or config.max_positions
        yield "rope.scaling.yarn_beta_fast", scaling.beta_fast
        yield "rope.scaling.yarn_beta_slow", scaling.beta_slow
        if architecture.family == "gpt_oss":
            yield "rope.scaling.truncate", scaling.truncate  # our own key, as llama.cpp has none
    if architecture.family == "ernie4_5_moe":
        yield "expert_shared_feed_forward_length", config.num_shared_experts * config.expert_intermediate_size


def _latent_settings(config: ModelConfig, latent: LatentAttention) -> Iterator[tuple[str, int]]:
    """Settings of MLA, which llama.cpp runs with the latent vector as the only key/value head."""
    yield "attention.head_count_kv", 1
    yield "attention.key_length", latent.kv_rank + latent.rope_dim
    yield "attention.value_length", latent.kv_rank
    yield "attention.key_length_mla", config.head_dim
    yield "attention.value_length_mla", latent.value_dim
    yield "attention.q_lora_rank", latent.query_rank or 0


_DEFAULT = ("nextn_predict_layers", "expert_group_count", "expert_group_used_count")
"""Settings that always have llama.cpp's default values here; for these values llama.cpp requires that some of them are absent."""
