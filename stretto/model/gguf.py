"""A checkpoint as one GGUF file, which llama.cpp and the programs built on it run.

llama.cpp's own converter refuses tokenizers that it does not know by hash, so the file is written directly. What each
architecture loads, and what it takes for granted, was read from llama.cpp's ``src/models`` and ``src/llama-graph.cpp``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch

from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.model.checkpoint import read_checkpoint, to_stored
from stretto.model.families import Family, Stored, stored_experts, stored_shared_experts, stored_tensors
from stretto.model.spec import ModelConfig
from stretto.text.tokenizer import TURN_END, Tokenizer, load_tokenizer

_ARCHITECTURES: dict[Family, gguf.MODEL_ARCH] = {
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
}
_TYPES: dict[str, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")


def why_not_gguf(config: ModelConfig, family: Family) -> str | None:
    """The reason, in one sentence, why llama.cpp cannot run ``config`` as ``family``; None if it can."""
    if family == "qwen3_moe":
        if not config.normalize_gates:
            return "llama.cpp renormalises the gates of every qwen3_moe and this network's are not"
        if config.dense_layers:
            return "llama.cpp's qwen3_moe has no dense layers"
    if family == "ernie4_5_moe" and config.dense_layers != tuple(range(len(config.dense_layers))):
        return f"llama.cpp's ernie4_5_moe has its dense layers first, and this network has {config.dense_layers}"
    return None


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
        dtype: ``f32``, ``f16`` or ``bf16``; norms, routers and biases stay fp32, as in llama.cpp's own files.
        pre_tokenizer: llama.cpp's name of the rule by which the tokenizer splits text into words. Tokenizers trained
            here need none; for another byte-level tokenizer the caller answers for it.
        advance: called with the bytes of each tensor written.

    Raises:
        UserError: llama.cpp cannot run this network, the folder has no tokenizer or one that cannot be expressed, or
            the disk is full.
    """
    folder, path = Path(folder), Path(path)
    if dtype not in _TYPES:
        raise UserError(f"--dtype {dtype}: not a type of GGUF weights written here; choose {', '.join(_TYPES)}")
    checkpoint = read_checkpoint(folder)
    reason = why_not_gguf(checkpoint.config, checkpoint.family)
    if reason is not None:
        raise UserError(
            f"{folder}: cannot be written as GGUF: {reason}; change the recipe or serve the folder with another engine"
        )
    tokenizer = load_tokenizer(folder)
    pre = _pre_tokenizer(folder, tokenizer, pre_tokenizer)
    kind, file_type = _TYPES[dtype]
    with replacing(path) as partial:
        writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[checkpoint.family]])
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(folder.resolve().name)
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_shape(writer, checkpoint.config, checkpoint.family)
        _add_tokenizer(writer, tokenizer, checkpoint.config.vocab_size, pre)
        tensors, state = _tensors(checkpoint.config, checkpoint.family, kind), checkpoint.model.state_dict()
        for tensor in tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            parts = [to_stored(member, state, torch.float32) for member in tensor.members]
            writer.write_tensor_data(gguf.quants.quantize(torch.stack(parts).view(tensor.shape).numpy(), tensor.kind))
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

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * (4 if self.kind == gguf.GGMLQuantizationType.F32 else 2)


def _tensors(config: ModelConfig, family: Family, kind: gguf.GGMLQuantizationType) -> list[_GgufTensor]:
    """A checkpoint's tensors under llama.cpp's names."""
    names = gguf.get_tensor_name_map(_ARCHITECTURES[family], config.num_layers)
    groups: dict[str, list[Stored]] = {}
    for stored in stored_tensors(config, family):
        name = stored.name
        if stored.is_copy or name.endswith("o_proj.bias"):
            continue  # llama.cpp ties the head itself; the bias is a zero that only transformers' qwen3_moe asks for
        match = _EXPERT.fullmatch(name)
        if match:
            groups.setdefault(f"blk.{match[1]}.ffn_{match[2]}_exps.weight", []).append(stored)
            continue
        theirs = names.get_name(name.replace("correction_bias", "correction.bias"), try_suffixes=(".weight", ".bias"))
        assert theirs is not None, f"{name} has no place in llama.cpp's {family}"
        groups[theirs] = [stored]
    tensors = []
    for theirs, members in groups.items():
        shape = members[0].shape
        if "_exps." in theirs:
            shape = (len(members), *shape)
        elif len(shape) > 1:
            shape = tuple(size for size in shape if size > 1)
        is_wide = len(shape) == 1 or "ffn_gate_inp" in theirs
        tensors.append(_GgufTensor(theirs, shape, gguf.GGMLQuantizationType.F32 if is_wide else kind, members))
    return tensors


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig, family: Family) -> None:
    num_shared = stored_shared_experts(config, family)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.dense_intermediate_size or config.expert_intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_expert_count(stored_experts(config, family))
    writer.add_expert_used_count(config.top_k)
    writer.add_expert_feed_forward_length(config.expert_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling)
    writer.add_expert_weights_norm(config.normalize_gates)
    sigmoid = config.router == "sigmoid"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    if family != "qwen3_moe":
        writer.add_leading_dense_block_count(len(config.dense_layers))
        writer.add_expert_shared_count(num_shared)
    if family == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(1)
        writer.add_expert_shared_feed_forward_length(num_shared * config.expert_intermediate_size)


def _pre_tokenizer(folder: Path, tokenizer: Tokenizer, named: str | None) -> str:
    """llama.cpp's name of the tokenizer's splitting rule. Raises `UserError`: it is no byte-level BPE, or splits or
    normalises text in a way that has no known name.
    """
    source = folder / "tokenizer.json"
    definition = json.loads(tokenizer.rust.to_str())
    if definition["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(definition["pre_tokenizer"]):
        raise UserError(
            f"{source}: model: not a byte-level BPE; only those can be written as GGUF here, use llama.cpp's own converter"
        )
    if named is not None:
        return named
    splitter = definition["pre_tokenizer"]
    plain = definition["normalizer"] is None and not definition["model"].get("ignore_merges")
    is_gpt2 = splitter["type"] == "ByteLevel" and splitter.get("use_regex", True) and not splitter["add_prefix_space"]
    if not (plain and is_gpt2):
        raise UserError(
            f"{source}: pre_tokenizer: not the one of GPT-2; give llama.cpp's name of it as pre_tokenizer, or use llama.cpp's own converter"
        )
    return "gpt-2"


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, vocab_size: int, pre: str) -> None:
    definition = json.loads(tokenizer.rust.to_str())["model"]
    by_id = {index: token for token, index in tokenizer.rust.get_vocab(with_added_tokens=True).items()}
    added = tokenizer.rust.get_added_tokens_decoder()
    tokens, types = [], []
    for index in range(vocab_size):
        tokens.append(by_id.get(index, f"[PAD{index}]"))
        if index in added:
            types.append(gguf.TokenType.CONTROL if added[index].special else gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.NORMAL if index in by_id else gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")  # llama.cpp's word for every byte-level BPE
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in definition["merges"]])
    bos_id = tokenizer.named_id("bos_token")
    pad_id = tokenizer.named_id("pad_token")
    # without one llama.cpp assumes GPT-2's own id, which here is any token
    writer.add_bos_token_id(tokenizer.eos_id if bos_id is None else bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    if pad_id is not None:
        writer.add_pad_token_id(pad_id)
    turn_end = tokenizer.rust.token_to_id(TURN_END)
    if turn_end is not None:
        writer.add_eot_token_id(turn_end)
    around = tokenizer.rust.encode("").ids  # what a post-processor puts round every text
    writer.add_add_bos_token(bool(around) and around[0] == bos_id)
    writer.add_add_eos_token(bool(around) and around[-1] == tokenizer.eos_id and around[-1] != bos_id)
    writer.add_add_space_prefix(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
