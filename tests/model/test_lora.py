"""Adapters: nothing at first, the merged network is the trained one, and peft with transformers computes the same."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stretto.base.errors import UserError
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.families import Family
from stretto.model.lora import add_adapters, load_adapters, merge, read_adapter_config, write_adapters
from stretto.model.spec import LoraConfig, ModelConfig
from stretto.model.transformer import Transformer, build

ALL = ("attention", "experts", "shared", "dense", "router")


def network(family: Family) -> ModelConfig:
    told: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "num_experts": 4,
        "top_k": 2, "expert_intermediate_size": 16, "max_positions": 64,
    }  # fmt: skip
    if family == "qwen3_moe":
        told |= {"router": "softmax", "selection_bias": False, "qk_norm": True}
    elif family == "llama":
        told |= {"dense_layers": (0, 1, 2), "dense_intermediate_size": 48}
    elif family == "ernie4_5_moe":
        told |= {"router": "softmax", "dense_layers": (0,), "dense_intermediate_size": 48, "num_shared_experts": 1}
    elif family == "deepseek_v3":
        told |= {
            "latent": {"query_rank": 16, "kv_rank": 16, "rope_dim": 4, "value_dim": 8},
            "num_kv_heads": 4,
            "dense_layers": (0,),
        }
        told |= {"dense_intermediate_size": 48, "num_shared_experts": 1}
    else:
        told |= {"dense_layers": (0,), "dense_intermediate_size": 48, "num_shared_experts": 1}
    return ModelConfig.model_validate(told)


def adapted(model: Transformer, family: Family, config: LoraConfig) -> None:
    """With adapters that do something."""
    add_adapters(model, family, config, seed=1)
    for name, parameter in model.named_parameters():
        if ".b." in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe", "ernie4_5_moe", "deepseek_v3", "mixtral", "llama"])
def test_peft_computes_what_the_merged_network_does(family: Family, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    if family == "mixtral":
        config = network("qwen3_moe").replace(qk_norm=False)
    else:
        config = network(family)
    model = build(config, 0)
    ids_BT = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    plain = model.logits(ids_BT)
    write_checkpoint(tmp_path / "base", model, config, family=family)
    targets = tuple(kind for kind in ALL if family != "llama" or kind in ("attention", "dense"))
    lora = LoraConfig(rank=3, alpha=5, targets=targets)
    add_adapters(model, family, lora, seed=0)
    assert torch.equal(model.logits(ids_BT), plain)  # B is zero
    model = read_checkpoint(tmp_path / "base").model
    adapted(model, family, lora)
    with torch.no_grad():
        trained = model.logits(ids_BT)
        write_adapters(tmp_path / "adapter", model, family, lora, str(tmp_path / "base"))
        merge(model)
        merged = model.logits(ids_BT)
    assert torch.equal(merged, trained) and (trained - plain).abs().max() > 0.05
    assert set(model.state_dict()) == set(build(config, 0).state_dict())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        wrapped = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
        # fp32, other orders of summation; logits of order 1
        assert (wrapped(ids_BT).logits - trained).abs().max() < 2e-5


@pytest.mark.parametrize("parts", [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)])
def test_what_peft_writes_comes_back(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """Their file of a network that they adapted and changed, and ours of the same network."""
    peft = pytest.importorskip("peft")
    config = network("glm4_moe")
    write_checkpoint(tmp_path / "base", build(config, 0), config, family="glm4_moe")
    ids_BT = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        told = peft.LoraConfig(
            r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM",
            target_parameters=[f"mlp.experts.{part}" for part in parts],
        )  # fmt: skip
        wrapped = peft.get_peft_model(theirs, told)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        wrapped.save_pretrained(tmp_path / "adapter")
    model = read_checkpoint(tmp_path / "base").model
    lora = read_adapter_config(tmp_path / "adapter", config, "glm4_moe")
    assert (lora.rank, lora.alpha, set(lora.targets)) == (2, 4, {"attention", "experts"})
    add_adapters(model, "glm4_moe", lora, seed=0)
    load_adapters(tmp_path / "adapter", model, "glm4_moe", lora)
    with torch.no_grad():
        assert (model.logits(ids_BT) - wrapped(ids_BT).logits).abs().max() < 2e-5  # as above


def test_only_adapters_are_trained_and_a_narrow_subnet_has_them_too() -> None:
    config = network("glm4_moe")
    model = build(config, 0)
    adapted(model, "glm4_moe", LoraConfig(rank=2, targets=("experts",)))
    ids_BT = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    model.logits(ids_BT, config.subnet(experts=2, top_k=1)).square().mean().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".a." in name or ".b." in name for name in trained)
    assert all(p.grad is None for n, p in model.named_parameters() if n not in trained)
    (gradient,) = (p.grad for n, p in model.named_parameters() if n == "blocks.1.mlp.parametrizations.gate_up.0.b.0")
    outer = list(config.expert_orders[0][2:])
    assert gradient[outer].abs().max() == 0 < gradient.abs().max()


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    config = network("glm4_moe")
    with pytest.raises(UserError, match=r"adapter_config.json: no such file; name a folder that peft"):
        read_adapter_config(tmp_path, config, "glm4_moe")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "use_dora": True})
    )
    with pytest.raises(UserError, match="use_dora: True is not supported; merge the adapter with peft"):
        read_adapter_config(tmp_path, config, "glm4_moe")
    settings: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    damaged: list[tuple[Any, str]] = [
        ([settings], "adapter_config.json: not a JSON object; save"),
        ({"lora_alpha": 2}, "adapter_config.json: r: must be a whole number above 0, is None; save"),
        (settings | {"r": 2.5}, "r: must be a whole number above 0, is 2.5; save"),
        (settings | {"lora_alpha": "x"}, "lora_alpha: must be a number above 0, is 'x'; save"),
    ]
    for tree, message in damaged:
        (tmp_path / "adapter_config.json").write_text(json.dumps(tree))
        with pytest.raises(UserError, match=message):
            read_adapter_config(tmp_path, config, "glm4_moe")
    model = build(network("llama"), 0)
    with pytest.raises(UserError, match=r"lora.targets: the network has no experts; name others"):
        add_adapters(model, "llama", LoraConfig(targets=("experts",)), seed=0)
