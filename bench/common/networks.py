"""Networks for the comparison of engines: random weights of a named shape."""

from __future__ import annotations

import tomllib
from pathlib import Path

import torch

from stretto.data.demo_text import demo_documents
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.families import Family
from stretto.model.gguf.write import write_gguf
from stretto.model.headers import ELASTIC_FILE
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.model.transformer import Transformer, build
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer
from stretto.train.recipe import Recipe

DEMO_RECIPE = Path(__file__).parents[2] / "stretto/recipes" / "demo.toml"
TOKENIZER_CHARS = 200_000
"""Length of the text that trains a random network's tokenizer (a few seconds)."""
SHAPES = ("tiny", "demo", "100m")


def shape(name: str) -> tuple[ModelConfig, dict[str, SubnetChoice], Family]:
    """Configuration, presets and family on disk of a named shape."""
    if name == "demo":
        recipe = Recipe(**tomllib.loads(DEMO_RECIPE.read_text(encoding="utf-8")))
        return recipe.network(), dict(recipe.elastic.anchors), "glm4_moe"
    if name == "tiny":  # steps of a fraction of a millisecond, for tests of everything but the network
        config = ModelConfig(
            vocab_size=512,
            hidden_size=32,
            num_layers=4,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            num_experts=8,
            top_k=2,
            expert_intermediate_size=16,
            widths=(8, 4, 2),
            max_positions=1024,
            qk_norm=True,
            router="softmax",
            selection_bias=False,
        )
        return config, {"corner": SubnetChoice(layers=2, experts=2, top_k=1)}, "qwen3_moe"
    config = ModelConfig(
        vocab_size=16384,
        hidden_size=512,
        num_layers=12,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        num_experts=32,
        top_k=4,
        expert_intermediate_size=128,
        widths=(32, 8),
        max_positions=1024,
        qk_norm=True,
        router="softmax",
        selection_bias=False,
    )
    return config, {"corner": SubnetChoice(layers=9, experts=8, top_k=1)}, "qwen3_moe"


def random_network(config: ModelConfig, seed: int = 0) -> Transformer:
    """Random weights, scaled so that logits are spread like a trained network's and experts differ by token.

    With its initial weights a network repeats its last token. With this factor (tried: 2.5, 4, 6) most tokens of an answer
    differ, and the best two logits are at least about 1e-4 apart.
    """
    model = build(config, seed).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and name.startswith("blocks"):
            parameter.mul_(6.0)
    return model


def write_network(folder: Path, name: str, *, with_gguf: bool = False) -> Path:
    """Write a random network of a named shape, with a tokenizer, to ``folder/name``; returns that folder."""
    config, presets, family = shape(name)
    texts = (document.text for document in demo_documents(TOKENIZER_CHARS, 0))
    train_tokenizer(texts, config.vocab_size, CHATML).save(folder / "tokenizer")
    target = folder / name
    write_checkpoint(
        target, random_network(config), config, family=family, presets=presets, tokenizer_dir=folder / "tokenizer"
    )
    if with_gguf:
        write_gguf(target, gguf_path(target))
    return target


def gguf_path(checkpoint: Path) -> Path:
    """Path of the GGUF file of a checkpoint."""
    return checkpoint.with_suffix(".gguf")


def plain_copy(checkpoint: Path, target: Path, dtype: torch.dtype, gguf_type: str | None = None) -> Path:
    """Write the full network of ``checkpoint`` for other software, without Stretto's own files, and its GGUF, in ``gguf_type``; None: in
    ``dtype``."""
    read = read_checkpoint(checkpoint, dtype=dtype)
    write_checkpoint(target, read.model, read.config, family=read.family, tokenizer_dir=checkpoint)
    ordinary = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    write_gguf(target, gguf_path(target), gguf_type or ordinary)
    (target / ELASTIC_FILE).unlink(missing_ok=True)  # vLLM reads every safetensors file of a folder
    return target
