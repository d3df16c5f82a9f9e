"""Checkpoints: nothing damaged or foreign gets through, and nothing is half-written."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.base.errors import UserError
from stretto.model.hub import read_checkpoint, write_checkpoint
from stretto.model.spec import SubnetChoice
from tests.model.checkpoints import ERNIE, GLM, QWEN, drop, edit_json, forget_ours, logits, network, put, truncate


def test_a_family_that_cannot_hold_the_network_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = network(**GLM)
    with pytest.raises(UserError, match=r"--family qwen3_moe.*selection bias"):
        write_checkpoint(tmp_path / "c", model, model.config, family="qwen3_moe")
    with pytest.raises(UserError, match="experts=9"):
        write_checkpoint(tmp_path / "c", model, model.config, presets={"wide": SubnetChoice(experts=9)})
    with pytest.raises(UserError, match="float64"):
        write_checkpoint(tmp_path / "c", model, model.config, dtype=torch.float64)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_anything_else_is_not_replaced(tmp_path: Path) -> None:
    model = network(**GLM)
    write_checkpoint(tmp_path / "c", model, model.config)
    write_checkpoint(tmp_path / "c", model, model.config)  # a checkpoint may be
    (tmp_path / "c" / "metrics.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        write_checkpoint(tmp_path / "c", model, model.config)
    assert (tmp_path / "c" / "metrics.jsonl").exists()


def test_an_interrupted_write_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    older, newer = network(**GLM), network(**ERNIE)
    write_checkpoint(tmp_path / "c", older, older.config)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "c", newer, newer.config, max_shard_bytes=100_000, advance=interrupt)
    assert torch.equal(logits(read_checkpoint(tmp_path / "c").model), logits(older))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_full_disk_is_one_line_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    model = network(**GLM)
    write_checkpoint(tmp_path / "c", model, model.config)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            write_checkpoint(tmp_path / "c", model, model.config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(logits(read_checkpoint(tmp_path / "c").model), logits(model))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json: no such file"),
    "config is no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        r"config\.json: not readable as JSON",
    ),
    "config is a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        r"config\.json: .*not a JSON object",
    ),
    "foreign architecture": (
        lambda folder: edit_json(folder / "config.json", model_type="llama"),
        "model_type.*'llama'",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors: no such file"),
    "truncated": (truncate, r"model\.safetensors: not readable as safetensors"),
    "tensor missing": (
        drop("model.layers.2.mlp.experts.1.up_proj.weight"),
        r"layers\.2\.mlp\.experts\.1\.up_proj\.weight: missing",
    ),
    "embedding missing": (drop("model.embed_tokens.weight"), r"embed_tokens\.weight: missing"),
    "unexpected tensor": (
        put("model.safetensors", "model.layers.0.adapter", torch.zeros(1)),
        r"layers\.0\.adapter: a tensor",
    ),
    "wrong shape": (put("model.safetensors", "model.norm.weight", torch.zeros(3)), r"norm\.weight: shape \[3\]"),
    "wrong dtype": (
        put("model.safetensors", "model.norm.weight", torch.zeros(64).to(torch.int8)),
        r"norm\.weight: dtype I8",
    ),
    "stale stretto.json": (
        lambda folder: edit_json(folder / "config.json", rms_norm_eps=1e-3),
        r"stretto\.json: .*rms_norm_eps",
    ),
    "newer stretto.json": (
        lambda folder: edit_json(folder / "stretto.json", schema_version=99),
        r"stretto\.json: schema_version: 99",
    ),
    "unknown key": (
        lambda folder: edit_json(folder / "stretto.json", preset={}),
        r"stretto\.json: preset: unknown key",
    ),
    "no biases": (lambda folder: (folder / "elastic.tensors").unlink(), r"elastic\.tensors: no such file"),
    "biases of another network": (
        put("elastic.tensors", "blocks.1.mlp.bias_WE", torch.ones(1, 8)),
        r"elastic\.tensors: blocks\.1\.mlp\.bias_WE: is not of these weights",
    ),
    "weights where there are none": (
        put("model.safetensors", "model.layers.0.mlp.shared_experts.up_proj.weight", torch.ones(16, 64)),
        r"shared_experts\.up_proj\.weight: holds weights that have no place in this network",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line_that_names_file_and_field(damage: str, tmp_path: Path) -> None:
    model = network()
    write_checkpoint(tmp_path / "c", model, model.config)
    act, message = DAMAGE[damage]
    act(tmp_path / "c")
    with pytest.raises(UserError, match=message) as caught:
        read_checkpoint(tmp_path / "c")
    assert "\n" not in str(caught.value) and str(tmp_path / "c") in str(caught.value)


@pytest.mark.parametrize("damage", ["missing", "moved"])
def test_a_shard_that_is_not_what_the_index_says(damage: str, tmp_path: Path) -> None:
    model = network(**GLM)
    write_checkpoint(tmp_path / "c", model, model.config, max_shard_bytes=100_000)
    first, second, *_ = sorted((tmp_path / "c").glob("model-*.safetensors"))
    if damage == "missing":
        second.unlink()
    else:
        second.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=second.name):
        read_checkpoint(tmp_path / "c")


def test_an_output_bias_that_is_not_zero_is_refused(tmp_path: Path) -> None:
    model = network(**QWEN, attention_bias=True)
    write_checkpoint(tmp_path / "c", model, model.config)
    forget_ours(tmp_path / "c")
    put("model.safetensors", "model.layers.0.self_attn.o_proj.bias", torch.ones(64))(tmp_path / "c")
    with pytest.raises(
        UserError, match=r"o_proj\.bias: holds weights that have no place in this network; use a checkpoint without"
    ):
        read_checkpoint(tmp_path / "c")
