"""A rank's part of a network: what is read from the files, and what is cut from whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.quantiser import KINDS, quantise
from stretto.base.errors import UserError
from stretto.model.attention import Geometry
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.gguf.write import write_gguf
from stretto.model.shard import Shard
from stretto.model.spec import ClampedSwiGlu, LatentAttention, ModelConfig
from stretto.model.transformer import Transformer
from stretto.model.weight_files import TensorFiles
from stretto.text.tokenizer import train_tokenizer
from tests.model.checkpoints import NETWORKS, QWEN, SHAPE, network

GPT_OSS: dict[str, Any] = {
    "attention_sinks": True, "sliding_window": 5, "sliding_layers": (0, 2), "clamped_swiglu": ClampedSwiGlu(),
    "attention_bias": True, "attention_out_bias": True, "router_bias": True, "expert_bias": True,
    "router": "softmax", "selection_bias": False,
}  # fmt: skip
"""Experts of a layer are one tensor, in which rows of gate and up alternate."""
LATENT = {"latent": LatentAttention(query_rank=10, kv_rank=12, rope_dim=4, value_dim=6), "num_kv_heads": 4}
OTHERS = {"gpt-oss": ("gpt_oss", GPT_OSS), "latent": ("deepseek_v3", {**LATENT, "num_shared_experts": 1})}


@pytest.mark.parametrize("name", [*NETWORKS, *OTHERS])
def test_a_rank_reads_its_part_and_nothing_else_of_divided_tensors(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = (NETWORKS | OTHERS)[name]
    model = network(**changes)
    write_checkpoint(tmp_path, model, model.config, family=family)
    whole, num_bytes = read_checkpoint(tmp_path).model.state_dict(), [0]

    def raw(self: TensorFiles, name: str, part: Any = (), read: Any = TensorFiles.raw) -> torch.Tensor:
        tensor: torch.Tensor = read(self, name, part)
        num_bytes[0] += tensor.nbytes
        return tensor

    monkeypatch.setattr(TensorFiles, "raw", raw)
    parts: list[dict[str, torch.Tensor]] = []
    for rank in range(2):
        shard = Shard(rank, 2)
        num_bytes[0] = 0
        read = read_checkpoint(tmp_path, shard=shard)
        assert read.model.config == read.config == shard.config(model.config)
        parts.append(read.model.state_dict())
        expected = {each: shard.cut(each, whole[each], tuple(parts[-1][each].shape), model.config) for each in whole}
        for each, tensor in expected.items():
            assert torch.equal(parts[-1][each], tensor), (rank, each)
        kept = sum(tensor.nbytes for each, tensor in parts[-1].items() if not each.endswith("bias_WE"))
        # copies of the embedding, padding experts and balance biases of further widths
        extra = parts[-1]["embedding.weight"].nbytes + 0.3 * kept
        assert num_bytes[0] <= kept + extra, f"{num_bytes[0]} bytes read for {kept}"
    assert (
        sum(part["blocks.1.attention.out.weight"].numel() for part in parts)
        == whole["blocks.1.attention.out.weight"].numel()
    )


@pytest.mark.parametrize("form", ["fp8 in small blocks", "mxfp4", "gguf"])
def test_quantised_weights_are_cut_after_they_are_dequantised(tmp_path: Path, form: str) -> None:
    family, changes = OTHERS["gpt-oss"] if form == "mxfp4" else NETWORKS["glm"]
    shape = {"hidden_size": 64, "expert_intermediate_size": 64, "vocab_size": 320}
    model, source = network(**{**changes, **shape}), tmp_path / "c"
    train_tokenizer(iter(["what is written " * 9]), 300).save(tmp_path / "tokenizer")
    write_checkpoint(source, model, model.config, family=family, tokenizer_dir=tmp_path / "tokenizer")
    if form == "gguf":
        source = tmp_path / "c.gguf"
        write_gguf(tmp_path / "c", source)
    else:
        quantise(source, KINDS[form], tmp_path / "meant")
        (source / "stretto.json").unlink()
    whole = read_checkpoint(source, dtype=torch.float32).model.state_dict()
    for rank in range(2):
        shard = Shard(rank, 2)
        for name, tensor in read_checkpoint(source, dtype=torch.float32, shard=shard).model.state_dict().items():
            assert torch.equal(tensor, shard.cut(name, whole[name], tuple(tensor.shape), model.config)), (rank, name)


def test_sums_over_the_parts_of_a_layer_are_the_layer() -> None:
    """Outputs of attention and of a SwiGLU, biases included: each rank's part is an ordinary layer with fewer heads."""
    model = network(**GPT_OSS, dense_layers=(1,), dense_intermediate_size=48, mlp_bias=True)
    config, state = model.config, model.state_dict()
    x_BTD = torch.randn(1, 7, config.hidden_size, generator=torch.Generator().manual_seed(0))
    sums = torch.zeros(2, 7, config.hidden_size)
    geometry = Geometry.of(config, torch.arange(7)[None])
    for rank in range(2):
        shard = Shard(rank, 2)
        part = Transformer(shard.config(config))
        shapes = {name: tuple(tensor.shape) for name, tensor in part.state_dict().items()}
        part.load_state_dict({name: shard.cut(name, state[name], shapes[name], config) for name in state})
        with torch.no_grad():
            sums[0] += part.blocks[0].attention(x_BTD, geometry)[0]
            sums[1] += part.blocks[1].mlp(x_BTD)[0]
    with torch.no_grad():
        expected = torch.cat((model.blocks[0].attention(x_BTD, geometry), model.blocks[1].mlp(x_BTD)))
    # sums of 64 and of 96 products in fp32, in another order
    torch.testing.assert_close(sums, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 4, r"tp: 4 does not divide num_kv_heads 2; choose tp from 1, 2$"),
        ({"num_kv_heads": 4, "num_heads": 4}, 3, "tp: 3 does not divide num_heads 4; choose tp from 1, 2, 4$"),
        ({"expert_intermediate_size": 15}, 2, "tp: 2 does not divide expert_intermediate_size 15; choose tp from 1$"),
        ({"dense_layers": (0,), "dense_intermediate_size": 9}, 2, "dense_intermediate_size 9; choose tp from 1$"),
        ({**QWEN, "qk_norm": False, "qk_norm_wide": True}, 2, "tp: 2: qk_norm_wide: .*; use tp 1$"),
    ],
)
def test_ranks_that_cannot_divide_a_network(changes: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Shard(0, ranks).config(ModelConfig(**{**SHAPE, **changes}))
