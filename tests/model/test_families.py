"""The families' names for a network, held against transformers' own configuration classes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from stretto.base.errors import UserError
from stretto.model.families import (
    FAMILIES,
    Family,
    check_family,
    default_family,
    differing_field,
    from_hf,
    parse_family,
    stored_tied,
    to_hf,
    why_not,
)
from stretto.model.spec import ModelConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "num_experts": 8,
    "top_k": 2,
    "expert_intermediate_size": 32,
}
OF_FAMILY: dict[Family, dict[str, Any]] = {
    "glm4_moe": {"router": "sigmoid", "num_shared_experts": 1},
    "qwen3_moe": {"router": "softmax", "selection_bias": False, "qk_norm": True, "norm_eps": 1e-6},
    "ernie4_5_moe": {"router": "softmax", "num_shared_experts": 2, "tie_embeddings": True},
}


def network(family: Family, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**SHAPE, **OF_FAMILY[family], **changes})


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("glm4_moe", {"router": "softmax"}, "router is a softmax"),
        ("glm4_moe", {"dense_layers": (1,), "dense_intermediate_size": 8}, "not the leading ones"),
        ("glm4_moe", {"top_k_per_layer": (2, 2, 2, 1, 2, 2)}, "one top-k for all layers"),
        ("qwen3_moe", {"router": "sigmoid"}, "router is a sigmoid"),
        ("qwen3_moe", {"selection_bias": True}, "selection bias"),
        ("qwen3_moe", {"num_shared_experts": 1}, "shared experts"),
        ("qwen3_moe", {"qk_norm": False}, "not normalised"),
        ("qwen3_moe", {"routed_scaling": 2.0}, "routed scaling"),
        ("qwen3_moe", {"rotary_fraction": 0.5}, "rotates 0.5"),
        ("qwen3_moe", {"experts_per_layer": (8, 8, 4, 8, 8, 8)}, "different numbers of experts"),
        ("qwen3_moe", {"top_k_per_layer": (2, 2, 2, 1, 2, 2)}, "one top-k for all layers"),
        ("ernie4_5_moe", {"router": "sigmoid"}, "router is a sigmoid"),
        ("ernie4_5_moe", {"normalize_gates": False}, "not renormalised"),
        ("ernie4_5_moe", {"qk_norm": True}, "are normalised"),
        ("ernie4_5_moe", {"attention_bias": True}, "bias"),
        ("ernie4_5_moe", {"dense_layers": (0, 3), "dense_intermediate_size": 8}, "fixed interval"),
        ("ernie4_5_moe", {"experts_per_layer": (8, 8, 4, 8, 8, 8)}, "different numbers of experts"),
        ("ernie4_5_moe", {"routed_scaling": 2.0}, "routed scaling"),
        ("ernie4_5_moe", {"rotary_fraction": 0.5}, "rotates 0.5"),
        ("ernie4_5_moe", {"top_k_per_layer": (2, 2, 2, 1, 2, 2)}, "one top-k for all layers"),
    ],
)
def test_a_family_says_in_one_line_what_it_cannot_hold(family: Family, changes: dict[str, Any], reason: str) -> None:
    assert why_not(network(family), family) is None
    config = network(family, **changes)
    said = why_not(config, family)
    assert said is not None and reason in said
    with pytest.raises(UserError, match=f"--family {family}") as caught:
        check_family(config, family)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_family_is_one_that_fits(family: Family) -> None:
    assert default_family(network(family)) == family


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


@st.composite
def networks(draw: st.DrawFn) -> tuple[ModelConfig, Family]:
    family = draw(st.sampled_from(FAMILIES))
    num_layers = draw(st.integers(1, 7))
    num_experts = draw(st.integers(2, 9))
    changes: dict[str, Any] = {
        "num_layers": num_layers,
        "num_experts": num_experts,
        "top_k": draw(st.integers(1, num_experts)),
        "tie_embeddings": draw(st.booleans()),
        "rope_theta": draw(st.sampled_from([1e4, 5e5, 1e6])),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "max_positions": draw(st.integers(1, 9999)),
    }
    if family == "glm4_moe":
        dense = tuple(range(draw(st.integers(0, num_layers))))
        changes |= {
            "attention_bias": draw(st.booleans()),
            "qk_norm": draw(st.booleans()),
            "normalize_gates": draw(st.booleans()),
            "routed_scaling": draw(st.sampled_from([1.0, 2.5])),
            "rotary_fraction": draw(st.sampled_from([0.25, 0.5, 1.0])),
            "num_shared_experts": draw(st.integers(1, 3)),
        }
    elif family == "qwen3_moe":
        dense = tuple(sorted(draw(st.sets(st.integers(0, num_layers - 1)))))
        changes |= {"attention_bias": draw(st.booleans()), "normalize_gates": draw(st.booleans())}
    else:
        interval, start = draw(st.integers(1, 3)), draw(st.integers(0, num_layers - 1))
        end = draw(st.integers(start, num_layers - 1))
        dense = tuple(
            layer for layer in range(num_layers) if not (start <= layer <= end and (layer + 1) % interval == 0)
        )
        changes |= {"num_shared_experts": draw(st.integers(0, 3))}
        if len(dense) == num_layers:
            dense = ()
    changes |= {"dense_layers": dense, "dense_intermediate_size": 48 if dense else 0}
    return network(family, **changes), family


def as_stored(config: ModelConfig, family: Family) -> ModelConfig:
    return config.replace(tie_embeddings=stored_tied(config, family))


@given(networks())
@settings(max_examples=200, deadline=None)
def test_a_config_json_reads_back_as_the_network_it_was_written_from(drawn: tuple[ModelConfig, Family]) -> None:
    config, family = drawn
    tree = json.loads(json.dumps(to_hf(config, family, "float32")))
    assert from_hf(tree, "config.json") == (as_stored(config, family), family)


@given(networks())
@settings(max_examples=60, deadline=None)
def test_transformers_understands_every_field_as_we_do(drawn: tuple[ModelConfig, Family]) -> None:
    config, family = drawn
    tree = to_hf(config, family, "bfloat16") | {"bos_token_id": None, "eos_token_id": 5, "pad_token_id": 6}
    theirs = AutoConfig.for_model(**json.loads(json.dumps(tree)))
    for name, value in tree.items():
        if name == "torch_dtype":
            continue  # the name that transformers 4 reads
        if name in ("rope_theta", "partial_rotary_factor"):
            assert theirs.rope_parameters[name] == value
            continue
        found = getattr(theirs, name)
        assert (str(found).removeprefix("torch.") if name == "dtype" else found) == value, name
    # and what transformers writes for it describes the same network to us
    assert from_hf(json.loads(theirs.to_json_string()), "config.json") == (as_stored(config, family), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_json_leaves_out_has_transformers_defaults(family: Family) -> None:
    sizes = {
        "model_type": family,
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 128,
        "moe_k" if family == "ernie4_5_moe" else "num_experts_per_tok": 2,
        {"glm4_moe": "n_routed_experts", "qwen3_moe": "num_experts", "ernie4_5_moe": "moe_num_experts"}[family]: 8,
    }
    if family == "ernie4_5_moe":
        sizes["moe_num_shared_experts"] = 2
    full = json.loads(AutoConfig.for_model(**sizes).to_json_string())
    assert from_hf(sizes, "config.json") == from_hf(full, "config.json")


def test_no_engine_is_told_to_look_for_prediction_layers() -> None:
    assert to_hf(network("glm4_moe"), "glm4_moe", "float32")["num_nextn_predict_layers"] == 0


def test_rope_is_read_as_transformers_4_writes_it() -> None:
    tree = to_hf(network("glm4_moe", rope_theta=5e5, rotary_fraction=0.5), "glm4_moe", "float32")
    old = {name: value for name, value in tree.items() if name != "rope_parameters"} | {"rope_scaling": None}
    assert from_hf(old, "config.json") == from_hf(tree, "config.json")


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("glm4_moe", {"model_type": "llama"}, "model_type"),
        ("glm4_moe", {"n_group": 2}, "n_group"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("glm4_moe", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ("glm4_moe", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type"),
        ("glm4_moe", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ("glm4_moe", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("glm4_moe", {"hidden_size": None}, "hidden_size: missing"),
        ("glm4_moe", {"num_attention_heads": "four"}, "num_attention_heads"),
        ("glm4_moe", {"num_experts_per_tok": 99}, "top_k"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
        ("ernie4_5_moe", {"moe_num_experts": [8, 8]}, "num_experts"),
    ],
)
def test_a_foreign_setting_is_refused_by_name(family: Family, changes: dict[str, Any], field: str) -> None:
    tree = to_hf(network(family), family, "float32") | changes
    with pytest.raises(UserError, match=f"^somewhere/config.json: .*{field}") as caught:
        from_hf(tree, "somewhere/config.json")
    assert "\n" not in str(caught.value)


def test_two_descriptions_differ_by_the_field_that_differs() -> None:
    tree = to_hf(network("glm4_moe"), "glm4_moe", "float32")
    assert differing_field(tree | {"dtype": "bfloat16", "eos_token_id": 3}, tree) is None
    assert differing_field(tree | {"hidden_size": 65}, tree) == "hidden_size"
