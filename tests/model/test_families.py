"""The families' names for a network, held against transformers' own configuration classes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoConfig

from bench.common.foreign import draw, old_spelling
from stretto.base.errors import UserError
from stretto.model.families import (
    FAMILIES,
    TABLES,
    Family,
    check_family,
    default_family,
    differing_field,
    from_hf,
    kept_family,
    parse_family,
    remarks,
    to_hf,
    why_not,
)
from stretto.model.families.table import OPTIONAL
from stretto.model.spec import ModelConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "top_k": 2,
    "expert_intermediate_size": 32,
}
DENSE = {"num_experts": 1, "top_k": 1, "dense_layers": tuple(range(6)), "dense_intermediate_size": 32}
SOFTMAX = {"router": "softmax", "selection_bias": False}
LATENT = {"num_kv_heads": 4, "latent": {"query_rank": 8, "kv_rank": 12, "rope_dim": 4, "value_dim": 6}}
OF_FAMILY: dict[Family, dict[str, Any]] = {
    "glm4_moe": {"router": "sigmoid", "num_shared_experts": 1},
    "qwen3_moe": {**SOFTMAX, "qk_norm": True, "norm_eps": 1e-6},
    "ernie4_5_moe": {"router": "softmax", "num_shared_experts": 2, "tie_embeddings": True},
    "mixtral": {**SOFTMAX, "sliding_window": 7, "sliding_layers": tuple(range(6))},
    "olmoe": {**SOFTMAX, "qk_norm_wide": True},
    "gpt_oss": {
        **SOFTMAX,
        "attention_sinks": True,
        "router_bias": True,
        "expert_bias": True,
        "clamped_swiglu": {},
        "sliding_window": 7,
        "sliding_layers": (0, 2, 4),
    },
    "deepseek_v3": {"router": "sigmoid", **LATENT},
    "glm4_moe_lite": {"router": "sigmoid", **LATENT, "dense_layers": (3,), "dense_intermediate_size": 32},
    "llama": DENSE,
    "mistral": {**DENSE, "sliding_window": 7, "sliding_layers": tuple(range(6))},
    "qwen2": {**DENSE, "attention_bias": True},
    "qwen3": {**DENSE, "qk_norm": True},
    "ernie4_5": DENSE,
}
DEFAULTS: dict[Family, Family] = {"ernie4_5": "llama", "qwen2": "llama"}
"""Where an earlier family holds the network too."""


def network(family: Family, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**SHAPE, **OF_FAMILY[family], **changes})


YARN = {"kind": "yarn", "factor": 4.0, "original_positions": 32}
UNEVEN = (8, 8, 4, 8, 8, 8)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("glm4_moe", {"router": "softmax"}, "router is a softmax"),
        ("glm4_moe", {"dense_layers": (1,), "dense_intermediate_size": 8}, "not the leading ones"),
        ("glm4_moe", {"top_k_per_layer": (2, 2, 2, 1, 2, 2)}, "one top-k for all layers"),
        ("glm4_moe", {"attention_out_bias": True}, "output bias"),
        ("glm4_moe", {"sliding_window": 5, "sliding_layers": (1,)}, "sliding window"),
        ("glm4_moe", {"attention_sinks": True}, "sinks"),
        ("glm4_moe", {"expert_bias": True}, "experts have biases"),
        ("glm4_moe", {"clamped_swiglu": {}}, "SwiGLU is clamped"),
        ("glm4_moe", LATENT, "attention is latent"),
        ("glm4_moe", {"attention_scale": 0.5}, "scaled by 0.5"),
        ("glm4_moe", {"top_k": 1, "expert_groups": 2, "experts_per_layer": UNEVEN}, "between groups"),
        ("qwen3_moe", {"router": "sigmoid"}, "router is a sigmoid"),
        ("qwen3_moe", {"selection_bias": True}, "selection bias"),
        ("qwen3_moe", {"num_shared_experts": 1}, "shared experts"),
        ("qwen3_moe", {"qk_norm": False}, "not normalised"),
        ("qwen3_moe", {"routed_scaling": 2.0}, "routed scaling"),
        ("qwen3_moe", {"rotary_fraction": 0.5}, "rotates 0.5"),
        ("qwen3_moe", {"experts_per_layer": UNEVEN}, "different numbers of experts"),
        ("qwen3_moe", {"expert_groups": 2, "top_groups": 1}, "by groups"),
        ("qwen3_moe", {"sliding_window": 5, "sliding_layers": (1,)}, "in all layers or in none"),
        ("ernie4_5_moe", {"router": "sigmoid"}, "router is a sigmoid"),
        ("ernie4_5_moe", {"normalize_gates": False}, "not renormalised"),
        ("ernie4_5_moe", {"qk_norm": True}, "are normalised"),
        ("ernie4_5_moe", {"dense_layers": (0, 3), "dense_intermediate_size": 8}, "fixed interval"),
        ("ernie4_5_moe", {"experts_per_layer": UNEVEN}, "different numbers of experts"),
        ("mixtral", {"normalize_gates": False}, "not renormalised"),
        ("mixtral", {"dense_layers": (0,), "dense_intermediate_size": 8}, "are dense"),
        ("mixtral", {"attention_bias": True}, "bias"),
        ("olmoe", {"qk_norm_wide": False}, "not normalised over all heads"),
        ("olmoe", {"head_dim": 24}, "hidden size"),
        ("gpt_oss", {"clamped_swiglu": None}, "not clamped"),
        ("gpt_oss", {"experts_per_layer": UNEVEN, "router_bias": False}, "would choose dummy experts"),
        ("gpt_oss", {"qkv_clip": 2.0}, "clipped"),
        ("deepseek_v3", {"latent": None}, "not latent"),
        ("deepseek_v3", {"latent": LATENT["latent"] | {"norm_eps": 1e-5}}, "an eps of"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "mscale_all_dim": 1.0}}, "scaled by"),
        ("deepseek_v3", {"head_dim": 4}, "rotates all channels"),
        ("llama", {"dense_layers": (0,)}, "has experts"),
        ("llama", {"qk_norm": True}, "are normalised"),
        ("llama", {"clamped_swiglu": {}}, "SwiGLU is clamped"),
        ("llama", {"hidden_size": 66}, "do not divide the hidden size"),
        ("llama", {"sliding_window": 5, "sliding_layers": (1,)}, "sliding window"),
        ("mistral", {"sliding_layers": (1,)}, "in all layers or in none"),
        ("qwen2", {"mlp_bias": True}, "feed-forward"),
        ("qwen3", {"qk_norm": False}, "not normalised"),
    ],
)
def test_a_family_says_in_one_line_what_it_cannot_hold(family: Family, changes: dict[str, Any], reason: str) -> None:
    assert why_not(network(family), family) is None
    config = network(family, **changes)
    said = why_not(config, family)
    assert said is not None and reason in said and "{" not in said
    with pytest.raises(UserError, match=f"--family {family}") as caught:
        check_family(config, family)
    assert said in str(caught.value) and "\n" not in str(caught.value)


CHANGES: list[dict[str, Any]] = [
    *({name: True} for name in ("qk_norm", "qk_norm_wide", "tie_embeddings", *OPTIONAL)),
    *({"selection_bias": False}, {"router": "softmax"}, {"normalize_gates": False}, {"routed_scaling": 1.5}),
    *({"qkv_clip": 2.0}, {"clamped_swiglu": {"limit": 0.5}}, {"attention_scale": 0.3}, {"rotary_fraction": 0.5}),
    *({"sliding_window": 5, "sliding_layers": layers} for layers in ((0, 2, 4), tuple(range(6)))),
    *({"dense_layers": layers, "dense_intermediate_size": 24} for layers in ((0,), (0, 2, 4), (5,), tuple(range(6)))),
    *({"num_shared_experts": num} for num in (0, 1, 3)),
    *({"num_experts": 1, "top_k": 1}, {"experts_per_layer": UNEVEN}, {"expert_groups": 2, "top_groups": 1}),
    *({"latent": LATENT["latent"], "num_kv_heads": 4, "head_dim": head_dim} for head_dim in (4, 12)),
    *({"rope_scaling": {"kind": kind, "factor": 4.0}} for kind in ("linear", "dynamic")),
    *(
        {"rope_scaling": {**YARN, **more}}
        for more in ({}, {"truncate": False}, {"attention_factor": 1.2}, {"kind": "llama3"})
    ),
]
OF_ROUTERS = (
    *("router", "selection_bias", "router_bias", "normalize_gates", "routed_scaling", "expert_groups", "top_groups"),
    *("expert_bias", "num_shared_experts", "experts_per_layer", "num_experts", "top_k", "expert_intermediate_size"),
)
"""Fields without meaning for a network without experts."""


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25)
@given(changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=4))
def test_what_a_family_can_hold_comes_back_from_its_config_json(family: Family, changes: list[dict[str, Any]]) -> None:
    try:
        config = network(family, **{name: value for each in changes for name, value in each.items()})
    except ValidationError:
        return
    if why_not(config, family) is not None:
        return
    read, found = from_hf(json.loads(json.dumps(to_hf(config, family, "float32"))), "config.json")
    # a family may have tensors and experts that the network lacks, in a form without effect
    form = {name for name in (*OPTIONAL, "num_shared_experts") if not getattr(config, name)}
    form |= {"num_experts", "experts_per_layer", "expert_order", "widths", "tie_embeddings"}
    form |= {"sliding_window"} if not config.sliding_layers else set()
    form |= set(OF_ROUTERS) if not config.moe_layers else set()
    written = config.model_dump(exclude=form)
    assert found == family and read.model_dump(exclude=form) == written
    assert read.num_shared_experts <= max(1, config.num_shared_experts) or not config.moe_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_family_is_one_that_fits(family: Family) -> None:
    assert default_family(network(family)) == DEFAULTS.get(family, family)


def test_a_network_without_experts_gets_a_family_without() -> None:
    assert why_not(network("llama"), "glm4_moe") is None and default_family(network("llama")) == "llama"
    assert default_family(network("llama", sliding_window=5, sliding_layers=(1,))) == "qwen2"
    assert default_family(network("llama", routed_scaling=2.0, expert_groups=1)) == "llama"  # which say nothing of it


def test_a_family_is_kept_as_long_as_it_holds_the_network() -> None:
    assert kept_family(network("qwen2"), "qwen2") == "qwen2"
    assert kept_family(network("qwen3_moe", selection_bias=True, qk_norm=False), "qwen3_moe") == "ernie4_5_moe"


def test_what_a_family_demands_and_a_network_lacks_is_no_hindrance() -> None:
    assert why_not(network("glm4_moe", selection_bias=False, num_shared_experts=0), "glm4_moe") is None
    bare = network("gpt_oss", attention_sinks=False, router_bias=False, expert_bias=False)
    assert why_not(bare, "gpt_oss") is None and to_hf(bare, "gpt_oss", "float32")["attention_bias"] is False
    one_sided = network("llama", attention_out_bias=True)
    assert why_not(one_sided, "llama") is None and to_hf(one_sided, "llama", "float32")["attention_bias"] is True


def test_no_family_fits_and_every_reason_is_given() -> None:
    config = network("ernie4_5_moe", qk_norm=True)
    with pytest.raises(UserError) as caught:
        default_family(config)
    for family in FAMILIES:
        assert f"{family}: {why_not(config, family)}" in str(caught.value)


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'glm4_moe'"):
        parse_family("glm_moe")


def test_shapes_and_families_need_no_torch() -> None:
    code = "import sys, stretto.model.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def described(family: Family, seed: int) -> dict[str, Any]:
    """The config.json of a random network, as transformers writes it."""
    config = AutoConfig.for_model(family, **draw(family, seed, refused=0).fields)
    tree: dict[str, Any] = json.loads(config.to_json_string())
    return tree


def as_stored(config: ModelConfig, family: Family) -> ModelConfig:
    return config.replace(tie_embeddings=TABLES[family].stored_tied(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_json_says_the_same_written_by_us_as_by_transformers_old_or_new(family: Family) -> None:
    for seed in range(20):
        if draw(family, seed, refused=0).refused:
            continue  # what transformers rounds
        tree = described(family, seed)
        config, found = from_hf(tree, "config.json")
        assert found == family
        if family != "gpt_oss" or config.rope_scaling is not None:  # where no RoPE at all means yarn
            assert from_hf(old_spelling(tree), "config.json") == (config, family)
        ours = json.loads(json.dumps(to_hf(config, family, "float32")))
        assert from_hf(ours, "config.json") == (as_stored(config, family), family)
        # and transformers understands ours
        theirs = AutoConfig.for_model(**json.loads(json.dumps(ours)))
        for name in ("torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor"):
            ours.pop(name, None)  # which transformers 4 reads
        told = ours.keys() - {"compression_ratio", "scoring_func", "topk_method", "moe_layer_freq"}
        for name in told:
            value = getattr(theirs, name)
            assert (str(value).removeprefix("torch.") if name == "dtype" else value) == ours[name], name
        assert from_hf(json.loads(theirs.to_json_string()), "config.json") == (as_stored(config, family), family)


SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
}
LATENT_SIZES = {
    "n_routed_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
OWN_SIZES: dict[Family, dict[str, int]] = {
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT_SIZES,
    "glm4_moe_lite": LATENT_SIZES,
    "qwen2": {"num_key_value_heads": 8},
    "qwen3": {"num_key_value_heads": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_json_leaves_out_has_transformers_defaults(family: Family) -> None:
    sizes = {"model_type": family, **SIZES, **OWN_SIZES.get(family, {})}
    full = json.loads(AutoConfig.for_model(**sizes).to_json_string())
    assert from_hf(sizes, "config.json") == from_hf(full, "config.json")


def test_no_engine_is_told_to_look_for_prediction_layers() -> None:
    for family in ("glm4_moe", "deepseek_v3", "glm4_moe_lite"):
        assert to_hf(network(family), family, "float32")["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("glm4_moe", {"model_type": "bert"}, "model_type: 'bert'"),
        ("glm4_moe", {"model_type": "qwen3_next", "layer_types": ["linear_attention"]}, "layers of linear attention"),
        ("glm4_moe", {"model_type": "mistral3", "text_config": {}}, "wrapped with others"),
        ("glm4_moe", {"model_type": "x", "auto_map": {"AutoModel": "x.X"}}, "auto_map., which is never run"),
        (
            "glm4_moe",
            {"architectures": ["Mine"], "auto_map": {"AutoModel": "x.Mine"}},
            "architectures: .'Mine'. is not",
        ),
        ("glm4_moe", {"n_group": 3}, "expert_groups"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("glm4_moe", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_scaling.rope_type: 'longrope'"),
        ("glm4_moe", {"rope_scaling": {"type": "yarn", "finetuned": True}}, "rope_scaling.finetuned"),
        ("glm4_moe", {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope_scaling.high_freq_factor: missing"),
        ("glm4_moe", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor: missing"),
        ("glm4_moe", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ("glm4_moe", {"rope_parameters": "yarn"}, "rope_parameters: 'yarn'"),
        ("glm4_moe", {"hidden_size": None}, "hidden_size: missing"),
        ("glm4_moe", {"num_attention_heads": "four"}, "num_attention_heads"),
        ("glm4_moe", {"num_experts_per_tok": 99}, "top_k"),
        ("glm4_moe", {"is_causal": False}, "is_causal"),
        ("glm4_moe", {"attention_chunk_size": 8}, "attention_chunk_size"),
        ("glm4_moe", {"per_layer_config": {"0": {}}}, "per_layer_config"),
        ("glm4_moe", {"sliding_window": 8}, "sliding_window"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "partial_rotary_factor: 3 rotated channels"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": "all"}}, "partial_rotary_factor: 'all' is not"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": math.nan}}, "partial_rotary_factor: nan is not"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 1e308}}, "partial_rotary_factor: 1e.308 is not"),
        ("glm4_moe", {"max_position_embeddings": 10**12}, "max_position_embeddings: 1000000000000 is not"),
        ("glm4_moe", {"rms_norm_eps": math.inf}, "norm_eps: .*finite"),
        ("glm4_moe", {"rms_norm_eps": "1e-6"}, "norm_eps: '1e-6' is not a number"),
        ("glm4_moe", {"vocab_size": True}, "vocab_size: True is not a number"),
        ("glm4_moe", {"rope_scaling": {"type": "linear", "factor": math.inf}}, "rope_scaling.factor: .*finite"),
        ("gpt_oss", {"swiglu_alpha": math.nan}, "clamped_swiglu.alpha: .*finite"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen3_moe", {"head_dim": 15}, "head_dim: 15 rotated channels"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 6}, "sliding_window: none"),
        ("qwen2", {"layer_types": ["full_attention"] * 5}, "layer_types: not one for each"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 6}, "layer_types: 'chunked_attention'"),
        ("ernie4_5_moe", {"moe_num_experts": [8, 8]}, "num_experts"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ],
)
def test_a_foreign_setting_is_refused_by_name(family: Family, changes: dict[str, Any], field: str) -> None:
    tree = to_hf(network(family), family, "float32") | changes
    with pytest.raises(UserError, match=f"^somewhere/config.json: .*{field}") as caught:
        from_hf(tree, "somewhere/config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_of_any_other_type_is_one_line_or_means_something(family: Family) -> None:
    tree = to_hf(network(family, rope_scaling=YARN), family, "float32")
    rope = tree.pop("rope_scaling")
    for inside in (tree, rope):
        for name in inside:
            for value in (None, "x", "4", -1, 0, 1.5, True, [], [1], {}, {"a": 1}, 10**15, math.nan, math.inf):
                changed = {name: value} if inside is tree else {"rope_scaling": rope | {name: value}}
                said = refusal(tree | changed)
                assert said is None or (said.startswith("config.json: ") and "\n" not in said), (name, value)


def refusal(tree: dict[str, Any]) -> str | None:
    try:
        from_hf(tree, "config.json")
    except UserError as error:
        return str(error)
    return None


def test_another_name_for_an_architecture_is_read_as_it() -> None:
    tree = to_hf(network("deepseek_v3"), "deepseek_v3", "float32")
    named = tree | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    assert from_hf(named, "config.json") == from_hf(tree, "config.json")
    assert [line.partition(":")[0] for line in remarks(named | {"num_nextn_predict_layers": 1})] == [
        "auto_map",
        "num_nextn_predict_layers",
    ]
    assert remarks(tree) == []


def test_two_descriptions_differ_by_the_field_that_differs() -> None:
    tree = to_hf(network("glm4_moe"), "glm4_moe", "float32")
    assert differing_field(tree | {"dtype": "bfloat16", "eos_token_id": 3}, tree) is None
    assert differing_field(tree | {"hidden_size": 65}, tree) == "hidden_size"
