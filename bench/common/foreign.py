"""Random tiny checkpoints that transformers makes and saves: every family, every field of its configuration class.

A `Draw` is a function of its seed. It records whether the checkpoint must be refused, and because of which field.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from bench.common.quantiser import KINDS, quantise
from stretto.model.families import Family

LENGTH = 44
"""Positions per row: more than every sliding window and RoPE border that is drawn."""
_DENSE = ("llama", "mistral", "qwen2", "qwen3", "ernie4_5")
_LATENT = ("deepseek_v3", "glm4_moe_lite")


@dataclass(slots=True)
class Draw:
    """Description of one checkpoint."""

    family: Family
    seed: int
    fields: dict[str, Any]
    """Fields of transformers' configuration class."""
    refused: str | None = None
    """Field that makes the checkpoint unreadable, so that it must be refused; None: it must be read."""
    edits: dict[str, Any] = field(default_factory=dict)
    """Changes of config.json after saving."""
    is_sharded: bool = False
    is_fused: bool = False
    """Experts are stored in one tensor, as transformers has them in memory."""
    is_old: bool = False
    """config.json has the spelling of transformers 4."""
    zeroed: str | None = None
    """Name of a tensor that is set to zero."""
    quantised: str | None = None
    """Format: a key of `bench.common.quantiser.KINDS`; None: not quantised."""

    def label(self) -> str:
        fields = {name: value for name, value in self.fields.items() if name not in _SIZES}
        kind = [name for name in ("is_sharded", "is_fused", "is_old") if getattr(self, name)]
        return f"{self.family} seed {self.seed} {' '.join(kind)} {self.quantised or ''} {fields} {self.edits}"


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "pad_token_id"),
    *("bos_token_id", "eos_token_id"),
)


def draw(family: Family, seed: int, refused: float = 0.2) -> Draw:
    """The checkpoint of this seed. A share ``refused`` of the checkpoints has a field that must be refused."""
    rng = random.Random(f"{family} {seed}")
    made = Draw(family, seed, _sizes(family, rng))
    made.fields |= {
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.3,
        "rope_parameters": _rope(family, rng),
        **_SWITCHES[family](rng, made.fields),
    }
    made.is_old, made.is_sharded = rng.random() < 0.3, rng.random() < 0.3
    made.is_fused = family not in _DENSE and rng.random() < 0.2
    if family == "glm4_moe" and _has_odd_rotation(made.fields):
        made.refused = "partial_rotary_factor"
    elif made.fields.get("use_bias") and family == "ernie4_5_moe":
        made.zeroed = "lm_head.bias" if _maybe(rng, 0.7) else None
        made.refused = None if made.zeroed else "lm_head.bias"
    elif rng.random() < refused:
        rng.choice([*_REFUSALS, *_REFUSALS_OF.get(family, [])])(made, rng)
    if made.refused is None and rng.random() < 0.3:
        made.quantised = rng.choice([name for name in KINDS if name != "mxfp4"])
        if family == "gpt_oss":
            made.quantised = "mxfp4"
            made.fields |= {"hidden_size": 32, "intermediate_size": 64}
    return made


def _sizes(family: Family, rng: random.Random) -> dict[str, Any]:
    kv_heads = rng.choice([1, 2])
    heads = kv_heads * rng.choice([1, 2, 3])
    head_dim = rng.choice([8, 12, 16])
    if family == "olmoe":
        hidden = heads * head_dim
    else:
        hidden = heads * rng.choice([8, 10, 16])
    sizes = {
        "vocab_size": rng.choice([61, 96]),
        "hidden_size": hidden,
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": rng.choice([2, 3, 4]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family in _LATENT else kv_heads,
        "max_position_embeddings": rng.choice([64, 100]),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    if family not in _LATENT and family != "olmoe":
        sizes["head_dim"] = head_dim
    if family not in (*_DENSE, "mixtral", "olmoe", "gpt_oss"):
        sizes["moe_intermediate_size"] = rng.choice([10, 16])
    return sizes


def _rope(family: Family, rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["default", "default", "linear", "dynamic", "yarn", "yarn", "llama3"])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([100.0, 1e4, 5e5])}
    if kind != "default":
        rope["factor"] = rng.choice([1.0, 2.0, 4.0, 7.5])
    if kind == "llama3":
        original = rng.choice([8, 16, 32])
        rope |= {"original_max_position_embeddings": original, "low_freq_factor": rng.choice([1.0, 2.0])}
        rope["high_freq_factor"] = rng.choice([4.0, 5.0])
    if kind == "yarn":
        rope["original_max_position_embeddings"] = rng.choice([8, 16, 32])
        for key, values in {
            "beta_fast": [32.0, 8.0, 1.0],  # Kimi K2 has two equal ones
            "beta_slow": [1.0, 0.5],
            "truncate": [True, False],
            "attention_factor": [0.7, 1.3],
            "mscale": [1.0, 0.707],
            "mscale_all_dim": [1.0, 0.5],
        }.items():
            if rng.random() < 0.4:
                rope[key] = rng.choice(values)
    if family == "glm4_moe" and rng.random() < 0.7:
        rope["partial_rotary_factor"] = rng.choice([0.25, 0.5, 1.0])
    return rope


def _has_odd_rotation(fields: dict[str, Any]) -> bool:
    """transformers rounds the rotated part of a head up; Stretto refuses it."""
    share = fields["rope_parameters"].get("partial_rotary_factor", 0.5)
    return int(fields["head_dim"] * share) % 2 == 1


def _maybe(rng: random.Random, share: float = 0.5) -> bool:
    return rng.random() < share


def _window(rng: random.Random) -> int:
    return rng.choice([1, 3, 8, 17, 43, 44, 60])


def _layer_windows(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    num_layers = fields["num_hidden_layers"]
    if not _maybe(rng):
        return {}
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": _window(rng)}
    if _maybe(rng):
        return windows | {"max_window_layers": rng.randint(0, num_layers)}
    kinds = ["sliding_attention", "full_attention"]
    return windows | {"layer_types": [rng.choice(kinds) for _ in range(num_layers)]}


def _experts(rng: random.Random, name: str, k: str = "num_experts_per_tok", least: int = 1) -> dict[str, Any]:
    num_experts = rng.randint(max(2, least), 7)
    return {name: num_experts, k: rng.randint(1, min(3, num_experts))}


def _grouped_experts(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    groups = rng.choice([1, 1, 2, 4])
    size = rng.choice([2, 3])
    top_groups = rng.randint(1, groups)
    num_experts = groups * size if groups > 1 else rng.randint(2, 7)
    k = rng.randint(1, min(3, size * top_groups if groups > 1 else num_experts))
    return {
        "n_routed_experts": num_experts,
        "num_experts_per_tok": k,
        "n_group": groups,
        "topk_group": top_groups,
        "n_shared_experts": rng.choice([1, 2]),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "norm_topk_prob": _maybe(rng, 0.7),
        "attention_bias": _maybe(rng),
        "first_k_dense_replace": rng.randint(0, fields["num_hidden_layers"]),
    }


def _latent(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return _grouped_experts(rng, fields) | {
        "q_lora_rank": rng.choice([None, 12, 20]),
        "kv_lora_rank": rng.choice([8, 14]),
        "qk_rope_head_dim": rng.choice([4, 8]),
        "qk_nope_head_dim": rng.choice([6, 8, 12]),
        "v_head_dim": rng.choice([6, 10, 16]),
    }


def _glm_lite(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    chosen = _latent(rng, fields)
    del chosen["first_k_dense_replace"]
    if _maybe(rng):
        kinds = ["dense", "sparse"]
        chosen["mlp_layer_types"] = [rng.choice(kinds) for _ in range(fields["num_hidden_layers"])]
    return chosen


def _qwen_moe(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    chosen = _experts(rng, "num_experts") | {"norm_topk_prob": _maybe(rng), "attention_bias": _maybe(rng)}
    if _maybe(rng, 0.4):
        chosen |= {"use_sliding_window": True, "sliding_window": _window(rng)}
    if _maybe(rng, 0.4):
        chosen |= {"decoder_sparse_step": 2} if _maybe(rng) else {"mlp_only_layers": [rng.randint(0, 1)]}
    return chosen


def _ernie_moe(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return _experts(rng, "moe_num_experts", "moe_k") | {
        "moe_num_shared_experts": rng.choice([0, 1, 2]),
        "moe_layer_start_index": rng.choice([0, 1]),
        "moe_layer_end_index": rng.choice([-1, 1]),
        "moe_layer_interval": rng.choice([1, 1, 2]),
        "use_bias": _maybe(rng, 0.3),
    }


def _gpt_oss(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    chosen = _experts(rng, "num_local_experts") | {"sliding_window": _window(rng), "attention_bias": _maybe(rng, 0.7)}
    if _maybe(rng):
        kinds = ["sliding_attention", "full_attention"]
        chosen["layer_types"] = [rng.choice(kinds) for _ in range(fields["num_hidden_layers"])]
    if _maybe(rng, 0.4):
        chosen |= {"swiglu_limit": rng.choice([0.5, 2.0]), "swiglu_alpha": rng.choice([1.0, 1.702])}
    return chosen


_SWITCHES: dict[Family, Callable[[random.Random, dict[str, Any]], dict[str, Any]]] = {
    "llama": lambda rng, fields: {"attention_bias": _maybe(rng), "mlp_bias": _maybe(rng)},
    "mistral": lambda rng, fields: {"sliding_window": _window(rng) if _maybe(rng, 0.7) else None},
    "qwen2": _layer_windows,
    "qwen3": lambda rng, fields: {"attention_bias": _maybe(rng), **_layer_windows(rng, fields)},
    "ernie4_5": lambda rng, fields: {"use_bias": _maybe(rng)},
    "qwen3_moe": _qwen_moe,
    "ernie4_5_moe": _ernie_moe,
    "mixtral": lambda rng, fields: {
        **_experts(rng, "num_local_experts"),
        "sliding_window": _window(rng) if _maybe(rng) else None,
    },
    "olmoe": lambda rng, fields: {
        **_experts(rng, "num_experts"),
        "attention_bias": _maybe(rng),
        "norm_topk_prob": _maybe(rng),
        "clip_qkv": rng.choice([None, 0.3, 2.0]),
    },
    "gpt_oss": _gpt_oss,
    "glm4_moe": lambda rng, fields: {**_grouped_experts(rng, fields), "use_qk_norm": _maybe(rng)},
    "deepseek_v3": _latent,
    "glm4_moe_lite": _glm_lite,
}


# --- refusals ---------------------------------------------------------------------------------------------------------


def _refuse(name: str, value: Any, field: str | None = None) -> Callable[[Draw, random.Random], None]:
    def apply(made: Draw, rng: random.Random) -> None:
        made.edits[name] = value
        made.refused = field or name

    return apply


def _longrope(made: Draw, rng: random.Random) -> None:
    made.edits["rope_parameters"] = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    made.refused = "rope_parameters.rope_type"
    made.is_old = False


def _rope_by_layer(made: Draw, rng: random.Random) -> None:
    made.edits["rope_parameters"] = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    made.refused = "rope_parameters"
    made.is_old = False


_REFUSALS = [
    _refuse("hidden_act", "gelu"),
    _longrope,
    _rope_by_layer,
    _refuse("is_causal", False),
    _refuse("attention_chunk_size", 16),
    _refuse("architectures", ["SomethingForSequenceClassification"]),
    _refuse("quantization_config", {"quant_method": "gptq", "bits": 4}),
    _refuse("model_type", "qwen3_next"),
]
_PART_OF_A_HEAD = _refuse("partial_rotary_factor", 0.5)
_REFUSALS_OF: dict[str, list[Callable[[Draw, random.Random], None]]] = {
    "llama": [_PART_OF_A_HEAD],
    "mixtral": [_PART_OF_A_HEAD],
    "gpt_oss": [_PART_OF_A_HEAD],
    "deepseek_v3": [_PART_OF_A_HEAD, _refuse("rope_interleave", False), _refuse("scoring_func", "softmax")],
    "glm4_moe_lite": [_refuse("rope_interleave", False)],
    "qwen2": [_refuse("layer_types", ["linear_attention"] * 2)],
    "ernie4_5_moe": [_refuse("moe_norm_min", 0.5)],
}


# --- saving -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def make(drawn: Draw, folder: Path, meant: Path | None = None) -> Path:
    """Save the checkpoint into ``folder``, and a dequantised copy of a quantised one into ``meant``. Returns the folder that
    transformers can read.
    """
    config = AutoConfig.for_model(drawn.family, **drawn.fields)
    config._attn_implementation = "eager"
    torch.manual_seed(drawn.seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, torch.Generator().manual_seed(drawn.seed))
    if drawn.zeroed is not None:
        model.state_dict()[drawn.zeroed].zero_()
    if drawn.is_fused:
        model.config.save_pretrained(folder)
        save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    else:
        model.save_pretrained(folder, max_shard_size="20KB" if drawn.is_sharded else "5GB")
    tree = json.loads((folder / "config.json").read_text())
    if drawn.is_old:
        tree = old_spelling(tree)
    tree = {"architectures": [type(model).__name__], **tree, **drawn.edits}
    (folder / "config.json").write_text(json.dumps(tree))
    if drawn.quantised is None or meant is None:
        return folder
    quantise(folder, KINDS[drawn.quantised], meant)
    return meant


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Set values under which every tensor changes the logits: no norm is 1, no bias is 0, routes are uneven."""
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor.copy_(1 + 0.3 * noise)
        elif "correction_bias" in name:
            tensor.copy_(0.05 * noise)
        elif name.endswith(("bias", "sinks")):
            tensor.copy_(0.3 * noise)
        else:
            tensor.copy_(noise * (1.2 / tensor.shape[-1] ** 0.5))


def old_spelling(tree: dict[str, Any]) -> dict[str, Any]:
    """A config.json in the spelling of transformers 4."""
    rope = dict(tree["rope_parameters"])
    old = {name: value for name, value in tree.items() if name not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": tree.get("dtype", "float32")}
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    return old | {"rope_scaling": None if kind == "default" else {"type": kind, **rope}}
