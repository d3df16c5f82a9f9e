"""Networks that transformers made, with its weights copied over: the same logits, switch by switch; and windows on packed rows.

`tests/model/test_families.py` does it through files; here nothing lies between the two forward passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig, OlmoeConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import AutoModelForCausalLM

from stretto.model.attention import rotary_frequencies
from stretto.model.spec import ClampedSwiGlu, LatentAttention, ModelConfig, RopeScaling, yarn_mscale
from stretto.model.transformer import Context, Transformer, build, load_state, skeleton
from stretto.ops.matmul import Arithmetic, Precision

VOCAB, LENGTH = 37, 20
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "num_experts": 8, "top_k": 3, "expert_intermediate_size": 12, "max_positions": 64,
}  # fmt: skip
THEIRS: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 3, "max_position_embeddings": 64, "attn_implementation": "eager", "initializer_range": 0.3,
    "pad_token_id": None,
}  # fmt: skip

SCALINGS: dict[str, RopeScaling] = {
    "linear": RopeScaling(kind="linear", factor=3.0),
    "dynamic": RopeScaling(kind="dynamic", factor=2.0),
    "llama3": RopeScaling(kind="llama3", factor=8.0, original_positions=256),
    "llama3, narrow": RopeScaling(
        kind="llama3", factor=2.5, original_positions=90, low_freq_factor=2.0, high_freq_factor=3.0
    ),
    "yarn": RopeScaling(kind="yarn", factor=4.0, original_positions=512),
    "yarn, whole channels": RopeScaling(kind="yarn", factor=40.0, original_positions=4096, truncate=True),
    "yarn, as gpt-oss": RopeScaling(kind="yarn", factor=32.0, original_positions=4096, truncate=False),
    "yarn, as deepseek": RopeScaling(kind="yarn", factor=40.0, original_positions=64, mscale=1.0, mscale_all_dim=0.7),
    "yarn, told": RopeScaling(
        kind="yarn", factor=8.0, original_positions=128, attention_factor=1.3, beta_fast=8.0, beta_slow=2.0
    ),
    "yarn, no stretch": RopeScaling(kind="yarn", factor=1.0, original_positions=64),
}


def as_parameters(scaling: RopeScaling, theta: float, **more: Any) -> dict[str, Any]:
    """transformers' ``rope_parameters``."""
    told = scaling.model_dump(exclude_none=True)
    told["rope_type"], positions = told.pop("kind"), told.pop("original_positions", None)
    return told | {"rope_theta": theta, "original_max_position_embeddings": positions, **more}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("head_dim", "fraction"), [(64, 1.0), (64, 0.5), (8, 1.0), (2, 1.0)])
def test_frequencies_and_magnitude_are_transformers_own(name: str, head_dim: int, fraction: float) -> None:
    scaling, theta = SCALINGS[name], 5e4
    if scaling.kind == "dynamic" and head_dim == 2:
        pytest.skip("transformers divides by zero")
    config = ModelConfig.model_validate(
        SHAPE | {"head_dim": head_dim, "rotary_fraction": fraction, "rope_theta": theta, "rope_scaling": scaling}
    )
    theirs = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=64,
        rope_parameters=as_parameters(scaling, theta, partial_rotary_factor=fraction),
    )
    frequencies_R, magnitude = ROPE_INIT_FUNCTIONS[scaling.kind](theirs, "cpu")
    assert torch.equal(rotary_frequencies(config, "cpu"), frequencies_R)
    assert config.rope_magnitude == magnitude


def gpt_oss(**changes: Any) -> tuple[PreTrainedConfig, ModelConfig]:
    scaling = SCALINGS["yarn, as gpt-oss"]
    theirs = GptOssConfig(
        **THEIRS, head_dim=6, num_local_experts=8, intermediate_size=12, sliding_window=5, swiglu_limit=0.8,
        rope_parameters=as_parameters(scaling, 15e4), **changes,
    )  # fmt: skip
    ours = ModelConfig.model_validate(
        SHAPE
        | {
            "router": "softmax", "selection_bias": False, "router_bias": True, "expert_bias": True, "attention_bias": True,
            "attention_out_bias": True, "attention_sinks": True, "sliding_window": 5, "sliding_layers": (0, 2),
            "rope_theta": 15e4, "rope_scaling": scaling, "clamped_swiglu": ClampedSwiGlu(limit=0.8),
        }
    )  # fmt: skip
    return theirs, ours


def gpt_oss_state(theirs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for layer in range(4):
        his, mine = f"model.layers.{layer}", f"blocks.{layer}"
        for ours, their in (("router.weight", "gate"), ("router.bias", "gate_bias")):
            yield f"{mine}.mlp.{their}", theirs[f"{his}.mlp.{ours}"]
        for part in ("", "_bias"):
            pairs = theirs[f"{his}.mlp.experts.gate_up_proj{part}"]
            halves = torch.cat((pairs[..., ::2], pairs[..., 1::2]), -1)
            yield f"{mine}.mlp.gate_up{part}", halves if part else halves.mT
            down = theirs[f"{his}.mlp.experts.down_proj{part}"]
            yield f"{mine}.mlp.down{part}", down if part else down.mT
        yield f"{mine}.attention.sinks", theirs[f"{his}.self_attn.sinks"]
        yield from grouped_query(theirs, f"{his}.self_attn", f"{mine}.attention", biases=True)


def grouped_query(theirs: dict[str, Tensor], his: str, mine: str, biases: bool) -> Iterator[tuple[str, Tensor]]:
    for part in ("weight", "bias") if biases else ("weight",):
        yield f"{mine}.qkv.{part}", torch.cat([theirs[f"{his}.{name}_proj.{part}"] for name in "qkv"])
        yield f"{mine}.out.{part}", theirs[f"{his}.o_proj.{part}"]


def olmoe(**changes: Any) -> tuple[PreTrainedConfig, ModelConfig]:
    theirs = OlmoeConfig(**THEIRS, num_experts=8, intermediate_size=12, clip_qkv=0.6, **changes)
    ours = {
        "router": "softmax",
        "selection_bias": False,
        "normalize_gates": False,
        "qk_norm_wide": True,
        "qkv_clip": 0.6,
    }
    return theirs, ModelConfig.model_validate(SHAPE | ours)


def fused(theirs: dict[str, Tensor], his: str, mine: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{mine}.gate", theirs[f"{his}.gate.weight"]
    yield f"{mine}.gate_up", theirs[f"{his}.experts.gate_up_proj"]
    yield f"{mine}.down", theirs[f"{his}.experts.down_proj"]


def olmoe_state(theirs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for layer in range(4):
        his, mine = f"model.layers.{layer}", f"blocks.{layer}"
        yield from fused(theirs, f"{his}.mlp", f"{mine}.mlp")
        yield from grouped_query(theirs, f"{his}.self_attn", f"{mine}.attention", biases=False)
        for norm in ("q_norm", "k_norm"):
            yield f"{mine}.attention.{norm}", theirs[f"{his}.self_attn.{norm}.weight"]


def deepseek(
    query_rank: int | None = 10, bias: bool = False, value_dim: int = 5
) -> tuple[PreTrainedConfig, ModelConfig]:
    scaling, head_dim = SCALINGS["yarn, as deepseek"], 10
    theirs = DeepseekV3Config(
        **THEIRS | {"num_key_value_heads": 4}, n_routed_experts=8, n_group=4, topk_group=2, n_shared_experts=2,
        moe_intermediate_size=12, intermediate_size=20, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=query_rank,
        qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=value_dim, attention_bias=bias, rms_norm_eps=1e-4,
        rope_parameters=as_parameters(scaling, 1e4),
    )  # fmt: skip
    assert scaling.mscale_all_dim is not None
    ours = ModelConfig.model_validate(
        SHAPE
        | {
            "num_kv_heads": 4, "head_dim": head_dim, "num_shared_experts": 2, "dense_layers": (0,),
            "dense_intermediate_size": 20, "expert_groups": 4, "top_groups": 2, "routed_scaling": 2.5, "norm_eps": 1e-4,
            "attention_bias": bias, "attention_out_bias": bias, "rope_scaling": scaling,
            "latent": LatentAttention(query_rank=query_rank, kv_rank=8, rope_dim=4, value_dim=value_dim),
            "attention_scale": head_dim**-0.5 * yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2,
        }
    )  # fmt: skip
    return theirs, ours


def deepseek_state(theirs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Its rotated channels are pairs of neighbours: even ones become the first half, odd ones the second."""
    names = {
        "q_proj": "q", "q_a_proj": "q_down", "q_b_proj": "q_up", "kv_a_proj_with_mqa": "kv_down", "kv_b_proj": "kv_up",
        "q_a_layernorm": "q_down_norm", "kv_a_layernorm": "kv_down_norm", "o_proj": "out",
    }  # fmt: skip
    halves = torch.tensor([0, 2, 1, 3])
    for name, tensor in theirs.items():
        if "self_attn" not in name:
            continue
        _, part, kind = name.rsplit(".", 2)
        if part in ("q_proj", "q_b_proj"):
            tensor = tensor.unflatten(0, (4, 10))
            tensor = torch.cat((tensor[:, :6], tensor[:, 6:][:, halves]), 1).flatten(0, 1)
        if part == "kv_a_proj_with_mqa":
            tensor = torch.cat((tensor[:8], tensor[8:][halves]))
        suffix = "" if "norm" in part else f".{kind}"
        yield f"blocks.{name.split('.')[2]}.attention.{names[part]}{suffix}", tensor
    for layer in range(4):
        his, mine = f"model.layers.{layer}.mlp", f"blocks.{layer}.mlp"
        if layer:
            yield from fused(theirs, his, mine)
            yield f"{mine}.bias_WE", theirs[f"{his}.gate.e_score_correction_bias"][None]
        inner, outer = (f"{his}.shared_experts", f"{mine}.shared") if layer else (his, mine)
        parts = [theirs[f"{inner}.{name}_proj.weight"] for name in ("gate", "up")]
        yield f"{outer}.gate_up.weight", torch.cat(parts)
        yield f"{outer}.down.weight", theirs[f"{inner}.down_proj.weight"]


def common(theirs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield "embedding.weight", theirs["model.embed_tokens.weight"]
    yield "head.weight", theirs["lm_head.weight"]
    yield "norm.weight", theirs["model.norm.weight"]
    for layer in range(4):
        yield f"blocks.{layer}.attention_norm.weight", theirs[f"model.layers.{layer}.input_layernorm.weight"]
        yield f"blocks.{layer}.mlp_norm.weight", theirs[f"model.layers.{layer}.post_attention_layernorm.weight"]


CASES: dict[str, tuple[Any, Any]] = {
    "gpt-oss": (gpt_oss(), gpt_oss_state),
    "olmoe": (olmoe(), olmoe_state),
    "deepseek": (deepseek(), deepseek_state),
    "deepseek, biases, wide values": (deepseek(bias=True, value_dim=12), deepseek_state),
    "deepseek, queries at once": (deepseek(query_rank=None, value_dim=10), deepseek_state),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_transformers_own(name: str) -> None:
    (their_config, config), state = CASES[name]
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(their_config).float().eval()
    with torch.no_grad():
        for parameter, tensor in theirs.state_dict().items():
            if "norm" in parameter or "bias" in parameter:
                tensor.add_(0.3 * torch.randn_like(tensor))
        tensors = theirs.state_dict()
        model = load_state(skeleton(config), [*common(tensors), *state(tensors)])
        ids_BT = torch.randint(0, VOCAB, (2, LENGTH))
        expected, actual = theirs(ids_BT).logits, model.logits(ids_BT)
    # ~10 products of up to 48 terms in each of 4 layers, in another order: a random walk of roundings, ten deviations
    bound = 10 * torch.finfo(torch.float32).eps * math.sqrt(10 * 4 * 48) * float(expected.abs().max())
    assert expected.std() > 0.5, "logits too flat to compare"
    assert (actual - expected).abs().max() <= bound


def sliding(window: int, **changes: Any) -> Transformer:
    shape = SHAPE | {"sliding_window": window, "sliding_layers": (0, 2), "attention_sinks": True, **changes}
    model = build(ModelConfig.model_validate(shape), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


@pytest.mark.parametrize("window", [1, 2, 5, 64])
def test_a_window_reaches_as_far_as_it_says(window: int) -> None:
    """One layer: the last logits change with the tokens inside the window and with no other."""
    model = sliding(window, num_layers=1, sliding_layers=(0,), attention_scale=0.02)  # weights nearly even
    ids_1T = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model.logits(ids_1T)[0, -1]
        for position in range(LENGTH):
            changed = ids_1T.clone()
            changed[0, position] = (changed[0, position] + 1) % VOCAB
            difference = float((model.logits(changed)[0, -1] - before).abs().max())
            seen = position > LENGTH - 1 - window
            assert difference > 3e-5 if seen else difference <= 1e-5, (position, difference)


@pytest.mark.parametrize("window", [1, 3, 64])
def test_a_packed_document_is_the_document_alone_under_windows(window: int) -> None:
    model = sliding(window)
    ids_1T = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    documents = torch.tensor([[0] * 11 + [1] * 6 + [-1] * 3])
    positions = torch.tensor([[*range(11), *range(6), *range(3)]])
    with torch.no_grad():
        together = model.logits(ids_1T, ctx=Context(positions, documents))
        alone = torch.cat((model.logits(ids_1T[:, :11]), model.logits(ids_1T[:, 11:17])), 1)
    assert (together[:, :17] - alone).abs().max() <= 200 * torch.finfo(torch.float32).eps * float(alone.abs().max())


def test_windows_are_counted_from_a_shared_beginning() -> None:
    """Two answers to one prompt, packed behind it, see as much of it as each would alone."""
    model = sliding(4)
    prompt, answers = [3, 1, 4, 1, 5], [[9, 2, 6], [5, 3]]
    columns = [*prompt, *answers[0], *answers[1]]
    positions = torch.tensor([[*range(5), 5, 6, 7, 5, 6]])
    documents = torch.tensor([[0] * 5 + [1] * 3 + [2] * 2])
    shared = torch.tensor([[[0, 0]] * 5 + [[0, 5]] * 5])
    with torch.no_grad():
        packed = model.logits(torch.tensor([columns]), ctx=Context(positions, documents, shared_BT2=shared))[0]
        for answer, start in zip(answers, (5, 8), strict=True):
            alone = model.logits(torch.tensor([prompt + answer]))[0, 5:]
            bound = 200 * torch.finfo(torch.float32).eps * float(alone.abs().max())
            assert (packed[start : start + len(answer)] - alone).abs().max() <= bound


PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp8")


@pytest.mark.parametrize("name", ["gpt-oss", "olmoe", "deepseek, biases, wide values"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_batch_invariant_logits_are_the_same_to_the_bit_in_any_company(name: str, precision: Precision) -> None:
    (_, config), _ = CASES[name]
    model = build(config, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
            if parameter.dim() == 1 or parameter.abs().max() == 0:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3)
    ids_BT = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    arithmetic = Arithmetic(precision, batch_invariant=True)
    positions, documents = torch.tensor([[*range(12), *range(8)]] * 3), torch.tensor([[0] * 12 + [1] * 8] * 3)
    with torch.no_grad():
        together = model.logits(ids_BT, ctx=Context(positions, documents, operators=arithmetic.operators))
        for row, part in ((0, slice(0, 12)), (2, slice(12, 20))):
            alone_1T = ids_BT[row : row + 1, part]
            ctx = replace(Context.plain(alone_1T), operators=arithmetic.operators)
            assert torch.equal(model.logits(alone_1T, ctx=ctx)[0], together[row, part])
        ordinary = model.logits(ids_BT, ctx=Context(positions, documents))
    # each of ~40 products rounds its operands by itself; tokens of whom a layer chooses other experts then are few
    unit = {"fp32": 2.0**-22, "bf16": 2.0**-9, "fp8": 2.0**-5}[precision]  # E4M3: 2^-4 at most, half of it on average
    error_BT = (together - ordinary).square().mean(-1).sqrt() / ordinary.square().mean().sqrt()
    assert error_BT.median() <= 4 * math.sqrt(40) * unit


@pytest.mark.parametrize("name", ["gpt-oss", "olmoe", "deepseek, biases, wide values"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_arithmetics_give_every_parameter_a_gradient(name: str, precision: Precision) -> None:
    """Invariant ones take the ordinary operators' gradients, at points that differ by their rounding."""
    (_, config), _ = CASES[name]
    model = build(config, 0)
    ids_BT = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    ctx = replace(Context.plain(ids_BT), operators=Arithmetic(precision, batch_invariant=True).operators)
    model.logits(ids_BT, ctx=ctx).square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name
