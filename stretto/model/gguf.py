"""Writer of GGUF files for llama.cpp.

llama.cpp's own converter refuses tokenizers that it does not know by hash, so the file is written directly, by the table that
`stretto.model.gguf_read` reads by.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.model.checkpoint import read_checkpoint, to_stored
from stretto.model.families import Family, Stored, stored_tensors, to_hf
from stretto.model.gguf_names import (
    ARCHITECTURES,
    LATENT_KEYS,
    LATENT_UP,
    LATENT_VALUES,
    OUTSIDE,
    ROPE_FACTORS,
    Architecture,
)
from stretto.model.gguf_read import LLAMA3, llama3_factors
from stretto.model.gguf_tokenizer import add_tokenizer, rule_name
from stretto.model.spec import ClampedSwiGlu, LatentAttention, ModelConfig, RopeScaling
from stretto.text.tokenizer import load_tokenizer

_TYPES: dict[str, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
_VALUE_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}
_LLAMA3_ORDER = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=experts\.)\d+")
_GPT_OSS = ("sliding_layers", "attention_sinks", "clamped_swiglu", "router_bias", "expert_bias")
_MISSING = (*_GPT_OSS, "latent", "qkv_clip")
"""Parts of a `ModelConfig` that no architecture is written with here, the first ones but gpt-oss."""
_BIASES = {
    "attention_bias": ("llama", "qwen2", "qwen3_moe", "glm4_moe", "gpt_oss"),
    "attention_out_bias": ("llama", "gpt_oss"),
    "mlp_bias": ("llama",),
}
"""Families whose biases llama.cpp loads."""


def why_not_gguf(config: ModelConfig, family: str) -> str | None:
    """The reason, in one sentence, why llama.cpp cannot run ``config`` as ``family``; None if it can."""
    if not any(each.family == family for each in ARCHITECTURES):
        return f"{family} is not written as GGUF here"
    for name in _MISSING:
        has_place = (family == "gpt_oss" and name in _GPT_OSS) or (family == "deepseek_v3" and name == "latent")
        if getattr(config, name) and not has_place:
            return f"it has {name}, which is not written as GGUF here"
    for name, families in _BIASES.items():
        if getattr(config, name) and family not in families:
            return f"it has {name}, which llama.cpp's {family} does not load"
    if config.expert_groups > 1:
        return "its experts are chosen by groups, which is not written as GGUF here"
    if config.rope_scaling is not None and not _is_llama_cpp_s(config.rope_scaling, family):
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
            return "its rotary frequencies are scaled, which for latent attention is not written as GGUF here"
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


def _is_llama_cpp_s(scaling: RopeScaling, family: str) -> bool:
    if scaling.kind == "yarn":
        return scaling.truncate and scaling.attention_factor is scaling.mscale is scaling.mscale_all_dim is None
    if scaling.kind == "llama3":
        own = (scaling.original_positions, scaling.low_freq_factor, scaling.high_freq_factor)
        return family in ("llama", "mixtral") and own == tuple(LLAMA3[name] for name in _LLAMA3_ORDER)
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
        dtype: ``f32``, ``f16``, ``bf16`` or ``q8_0``; norms, routers and biases stay fp32, as in llama.cpp's own files.
        pre_tokenizer: llama.cpp's name of the rule by which the tokenizer splits text into words. Tokenizers trained
            here and the common ones need none; for another byte-level tokenizer the caller answers for it.
        advance: called with the bytes of each tensor written.

    Raises:
        UserError: llama.cpp cannot run this network, the folder has no tokenizer or one that cannot be expressed, or
            the disk is full.
    """
    folder, path = Path(folder), Path(path)
    if dtype not in _TYPES:
        raise UserError(f"--dtype {dtype}: not a type of GGUF weights written here; choose {', '.join(_TYPES)}")
    if path.is_dir():
        raise UserError(f"{path}: a folder; name the file to write: {path / 'model.gguf'}")
    checkpoint = read_checkpoint(folder)
    config, family = checkpoint.config, checkpoint.family
    reason = why_not_gguf(config, family)
    if reason is not None:
        raise UserError(
            f"{folder}: cannot be written as GGUF: {reason}; change the recipe or serve the folder with another engine"
        )
    tokenizer = load_tokenizer(folder)
    pre = rule_name(folder / "tokenizer.json", tokenizer, pre_tokenizer)
    kind, file_type = _TYPES[dtype]
    architecture = next(each for each in ARCHITECTURES if each.family == family)
    tensors, state = _tensors(config, family, architecture, kind), checkpoint.model.state_dict()
    uneven = next((tensor for tensor in tensors if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[tensor.kind][0]), None)
    if uneven is not None:
        raise UserError(
            f"--dtype {dtype}: {uneven.name} has rows of {uneven.shape[-1]}, which blocks of 32 do not fill; choose bf16"
        )
    with replacing(path) as partial:
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
            writer.write_tensor_data(gguf.quants.quantize(tensor.values(state).numpy(), tensor.kind))
            if advance is not None:
                advance(tensor.num_bytes)
        writer.close()


@dataclass(frozen=True, slots=True)
class _GgufTensor:
    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    members: list[Stored]
    """What it holds, stacked: all experts of a layer, or one tensor."""
    heads: int = 0
    """Whose rows, halves of a head in ``members``, become neighbours; 0: they keep their order."""
    constant: Tensor | None = None
    """What it holds instead of ``members``."""
    columns: slice | None = None
    """Of a stack of transposed experts, those that it holds."""
    rows: slice | None = None
    """Of each of ``heads``, those that it holds: a projection from latent vectors."""
    is_transposed: bool = False

    @property
    def num_bytes(self) -> int:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * block_bytes

    def values(self, state: Mapping[str, Tensor]) -> Tensor:
        if self.constant is not None:
            return self.constant
        if self.columns is not None:
            (whole,) = (to_stored(member, state, torch.float32)[..., self.columns] for member in self.members)
            return (whole.mT if whole.dim() == 3 else whole).contiguous()
        if self.rows is not None:
            (whole,) = (to_stored(member, state, torch.float32) for member in self.members)
            part = whole.unflatten(0, (self.heads, -1))[:, self.rows]
            return (part.mT if self.is_transposed else part).contiguous()
        values = torch.stack([to_stored(member, state, torch.float32) for member in self.members]).view(self.shape)
        if self.heads:
            values = values.view(self.heads, 2, -1, *self.shape[1:]).transpose(1, 2).reshape(self.shape)
        return values


def _tensors(
    config: ModelConfig, family: Family, architecture: Architecture, kind: gguf.GGMLQuantizationType
) -> list[_GgufTensor]:
    """A checkpoint's tensors under llama.cpp's names."""
    groups: dict[str, list[Stored]] = {}
    for stored in stored_tensors(config, family):
        if stored.is_copy or (stored.ours is None and stored.name.endswith("o_proj.bias")):
            continue  # llama.cpp ties the head itself; the bias is a zero that only transformers' qwen3_moe asks for
        groups.setdefault(_name(stored.name, architecture), []).append(stored)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if architecture.pairs_neighbours else {}
    tensors: list[_GgufTensor] = []
    for name, members in groups.items():
        if members[0].name.startswith("model.layers") and ".mlp.experts." in members[0].name and family == "gpt_oss":
            tensors += _halves(name, members, kind)
            continue
        if members[0].name.endswith(f"{LATENT_UP}.weight"):
            tensors += _latent_up(config, name, members, kind)
            continue
        shape = members[0].shape
        if "_exps." in name:
            shape = (len(members), *shape)
        elif len(shape) > 1:
            shape = tuple(size for size in shape if size > 1)
        is_wide = len(shape) == 1 or "ffn_gate_inp" in name
        kept = gguf.GGMLQuantizationType.F32 if is_wide else kind
        tensors.append(_GgufTensor(name, shape, kept, members, heads.get(name.split(".")[-2], 0)))
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        factors_R = llama3_factors(config.rope_theta, config.rotary_dim // 2, config.rope_scaling.factor).float()
        kept = gguf.GGMLQuantizationType.F32
        tensors.append(_GgufTensor(ROPE_FACTORS, tuple(factors_R.shape), kept, [], constant=factors_R))
    return tensors


def _halves(name: str, members: list[Stored], kind: gguf.GGMLQuantizationType) -> Iterator[_GgufTensor]:
    """gpt-oss's experts under llama.cpp's names: gate and up apart, each expert's matrix the way that others store it."""
    shape = members[0].shape
    layer, is_bias = name.split(".")[1], len(shape) == 2
    kept = gguf.GGMLQuantizationType.F32 if is_bias else kind
    parts = (
        {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if "gate_up" in members[0].name else {"down": slice(None)}
    )
    for part, columns in parts.items():
        rows = shape[-1] // len(parts)
        own = (shape[0], rows) if is_bias else (shape[0], rows, shape[1])
        end = "bias" if is_bias else "weight"
        yield _GgufTensor(f"blk.{layer}.ffn_{part}_exps.{end}", own, kept, members, columns=columns)


def _latent_up(
    config: ModelConfig, name: str, members: list[Stored], kind: gguf.GGMLQuantizationType
) -> Iterator[_GgufTensor]:
    """What keys and values of all heads are made of, apart, as llama.cpp has them."""
    assert config.latent is not None
    heads, rank, values = config.num_heads, config.latent.kv_rank, config.latent.value_dim
    plain, layer = config.head_dim - config.latent.rope_dim, name.split(".")[1]
    keys = f"blk.{layer}.{LATENT_KEYS}.weight"
    yield _GgufTensor(keys, (heads, rank, plain), kind, members, heads, rows=slice(0, plain), is_transposed=True)
    below = f"blk.{layer}.{LATENT_VALUES}.weight"
    yield _GgufTensor(below, (heads, values, rank), kind, members, heads, rows=slice(plain, None))


def _name(theirs: str, architecture: Architecture) -> str:
    """GGUF's name of the hub's tensor ``theirs``; all experts of a layer have one."""
    outside = next((name for name, hub in OUTSIDE.items() if hub == theirs), None)
    if outside is not None:
        return outside
    match = _LAYER.fullmatch(theirs)
    assert match is not None, f"{theirs} has no place in llama.cpp's {architecture.name}"
    layer, rest = match.groups()
    whole = next((name for name, hub in architecture.tensors.items() if hub == rest), None)
    if whole is not None:
        return f"blk.{layer}.{whole}"
    if architecture.family == "gpt_oss" and ".experts." in rest:
        return f"blk.{layer}.{rest}"  # several tensors, made and named by `_halves`
    module, end = _EXPERT.sub("{}", rest).rsplit(".", 1)
    # of two names for one the later counts: GLM's second norm
    names = [name for name, hub in architecture.layer.items() if hub == module]
    assert names, f"{theirs} has no place in llama.cpp's {architecture.name}"
    return f"blk.{layer}.{names[-1]}.{end}"


def _add_settings(
    writer: gguf.GGUFWriter, architecture: Architecture, config: ModelConfig, tree: Mapping[str, Any]
) -> None:
    """What the config.json ``tree`` says, as metadata."""
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
    if architecture.family == "ernie4_5_moe":
        yield "expert_shared_feed_forward_length", config.num_shared_experts * config.expert_intermediate_size


def _latent_settings(config: ModelConfig, latent: LatentAttention) -> Iterator[tuple[str, int]]:
    """llama.cpp runs latent attention with the latent vector for the one key/value head of all."""
    yield "attention.head_count_kv", 1
    yield "attention.key_length", latent.kv_rank + latent.rope_dim
    yield "attention.value_length", latent.kv_rank
    yield "attention.key_length_mla", config.head_dim
    yield "attention.value_length_mla", latent.value_dim
    yield "attention.q_lora_rank", latent.query_rank or 0


_DEFAULT = ("nextn_predict_layers", "expert_group_count", "expert_group_used_count")
"""Settings that never differ from llama.cpp's defaults here, which asserts that some of them are absent then."""
