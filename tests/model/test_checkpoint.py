"""Checkpoints: what is written comes back, other software reads it, nothing damaged gets through, nothing is half-written."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from stretto.base.errors import UserError
from stretto.base.records import Receipt, new_lineage, read_lineage
from stretto.model import checkpoint, streamed
from stretto.model.checkpoint import read_checkpoint, read_config, read_presets, weights_hash, write_checkpoint
from stretto.model.families import NEVER_CHOSEN
from stretto.model.spec import SubnetChoice
from stretto.model.streamed import StreamedState
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer
from tests.model.checkpoints import (
    AGREEMENT,
    ERNIE,
    GLM,
    IDS,
    NETWORKS,
    drop,
    edit_json,
    edit_tensors,
    forget_ours,
    logits,
    network,
    put,
    their_logits,
    truncate,
)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_comes_back_bit_for_bit_and_transformers_computes_the_same(name: str, tmp_path: Path) -> None:
    family, changes = NETWORKS[name]
    model = network(**changes)
    write_checkpoint(tmp_path / "c", model, model.config, family=family)
    back = read_checkpoint(tmp_path / "c")
    assert (back.config, back.family, back.lineage) == (model.config, family, None)
    state = back.model.state_dict()
    assert set(state) == set(model.state_dict())
    for key, tensor in model.state_dict().items():
        assert torch.equal(state[key], tensor), key
    expected = logits(model)
    assert torch.equal(logits(back.model), expected)
    assert (their_logits(tmp_path / "c") - expected).abs().max() <= AGREEMENT
    # and from config.json alone, as other software sees it
    forget_ours(tmp_path / "c")
    foreign = read_checkpoint(tmp_path / "c")
    assert foreign.config.num_branches == 1
    assert (logits(foreign.model) - expected).abs().max() <= AGREEMENT


def test_many_files_hold_what_one_would(tmp_path: Path) -> None:
    model = network(**GLM)
    written: list[int] = []
    write_checkpoint(tmp_path / "one", model, model.config)
    write_checkpoint(tmp_path / "many", model, model.config, max_shard_bytes=100_000, advance=written.append)
    shards = sorted((tmp_path / "many").glob("model-*.safetensors"))
    assert len(shards) == len(written) > 3 and max(written) <= 100_000
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(written)
    assert torch.equal(logits(read_checkpoint(tmp_path / "many").model), logits(model))
    assert torch.equal(their_logits(tmp_path / "many"), their_logits(tmp_path / "one"))


def test_weights_are_rounded_on_request_and_selection_biases_never(tmp_path: Path) -> None:
    model = network(**GLM)
    write_checkpoint(tmp_path / "c", model, model.config, dtype=torch.bfloat16)
    assert AutoConfig.from_pretrained(tmp_path / "c").dtype == torch.bfloat16
    stored = load_file(tmp_path / "c" / "model.safetensors")
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    back = read_checkpoint(tmp_path / "c").model
    wide = read_checkpoint(tmp_path / "c", dtype=torch.float32).model
    for name, tensor in model.state_dict().items():
        exact = name.endswith("bias_WE")
        assert torch.equal(back.state_dict()[name], tensor if exact else tensor.bfloat16()), name
        assert torch.equal(wide.state_dict()[name], tensor if exact else tensor.bfloat16().float()), name


def test_a_network_read_back_trains(tmp_path: Path) -> None:
    model = network(**GLM)
    write_checkpoint(tmp_path / "c", model.state_dict(), model.config)
    back = read_checkpoint(tmp_path / "c").model
    back.logits(IDS).sum().backward()
    model.logits(IDS).sum().backward()
    ours, theirs = dict(back.named_parameters()), dict(model.named_parameters())
    assert all(torch.equal(ours[name].grad, theirs[name].grad) for name in theirs)


def test_a_network_read_back_is_as_elastic_as_before(tmp_path: Path) -> None:
    orders = tuple(tuple(torch.randperm(8, generator=torch.Generator().manual_seed(row)).tolist()) for row in range(4))
    model = network(**GLM, widths=(8, 4), num_branches=3, expert_order=orders, layer_order=(3, 0, 2, 1))
    write_checkpoint(tmp_path / "c", model, model.config)
    back = read_checkpoint(tmp_path / "c").model
    subnet = model.config.subnet(depth=3, experts=4, top_k=1)
    with torch.no_grad():
        assert torch.equal(back.logits(IDS, subnet), model.logits(IDS, subnet))


def test_no_file_but_the_models_has_its_suffix(tmp_path: Path) -> None:
    """vLLM takes every *.safetensors of a folder for the model's own."""
    model = network(**GLM, widths=(8, 4))
    write_checkpoint(tmp_path / "out", model, model.config)
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]


def test_presets_and_lineage_are_kept(tmp_path: Path) -> None:
    model = network(**GLM, widths=(8, 4))
    presets = {"corner": SubnetChoice(layers=3, experts=4, top_k=1)}
    receipt = Receipt(stage="pretrain", device="cpu", flops=7)
    lineage = new_lineage(name="x", stage="pretrain", weights_hash="", total_params=1, active_params=1, receipt=receipt)
    written = write_checkpoint(tmp_path / "c", model, model.config, presets=presets, lineage=lineage)
    assert read_presets(tmp_path / "c") == presets and read_config(tmp_path / "c") == model.config
    assert written == read_checkpoint(tmp_path / "c").lineage == read_lineage(tmp_path / "c")
    assert written is not None and written.weights_hash == weights_hash(tmp_path / "c") != ""
    with torch.no_grad():
        model.norm.weight[0] += 1.0
    other = write_checkpoint(tmp_path / "d", model, model.config, lineage=lineage)
    assert other is not None and other.weights_hash != written.weights_hash


def test_padding_experts_are_never_chosen_and_leave_no_trace(tmp_path: Path) -> None:
    model = network(**GLM, experts_per_layer=(8, 3, 5, 2))
    write_checkpoint(tmp_path / "c", model, model.config)
    stored = load_file(tmp_path / "c" / "model.safetensors")
    bias_E = stored["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias_E.shape == (8,) and (bias_E[3:] == NEVER_CHOSEN).all() and (bias_E[:3] > -1).all()
    assert not stored["model.layers.1.mlp.experts.7.up_proj.weight"].any()
    assert [layer.mlp.gate.shape[0] for layer in read_checkpoint(tmp_path / "c").model.blocks] == [8, 3, 5, 2]


def test_the_tokenizer_travels_with_the_weights(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(iter(["some text to learn from"] * 3), 280, CHATML)
    tokenizer.save(tmp_path / "tokenizer")
    model = network(**GLM)
    write_checkpoint(tmp_path / "c", model, model.config, tokenizer_dir=tmp_path / "tokenizer")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "c")
    assert theirs("some text")["input_ids"] == tokenizer.encode("some text")
    assert theirs.chat_template == CHATML
    assert AutoConfig.from_pretrained(tmp_path / "c").eos_token_id == tokenizer.eos_id
    ends = GenerationConfig.from_pretrained(tmp_path / "c").eos_token_id
    assert ends == [tokenizer.eos_id, tokenizer.rust.token_to_id("<|im_end|>")]
    small = network(**GLM, vocab_size=270)
    with pytest.raises(UserError, match="vocab_size 270"):
        write_checkpoint(tmp_path / "d", small, small.config, tokenizer_dir=tmp_path / "tokenizer")
    assert not (tmp_path / "d").exists()


def test_ends_in_config_json_count_without_a_generation_config(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(iter(["some text to learn from"] * 3), 280)
    model = network(**GLM)
    tokenizer.save(tmp_path / "source")
    config = tmp_path / "source" / "config.json"
    config.write_text(json.dumps({"eos_token_id": [tokenizer.eos_id, 2], "pad_token_id": None}))
    write_checkpoint(tmp_path / "c", model, model.config, tokenizer_dir=tmp_path / "source")
    made = GenerationConfig.from_pretrained(tmp_path / "c")
    assert (made.eos_token_id, made.pad_token_id) == ([tokenizer.eos_id, 2], tokenizer.eos_id)
    config.write_text(json.dumps({"eos_token_id": [-1, 50256], "bos_token_id": 50256, "pad_token_id": -1}))
    write_checkpoint(tmp_path / "c", model, model.config, tokenizer_dir=tmp_path / "source")
    made = GenerationConfig.from_pretrained(tmp_path / "c")
    assert (made.eos_token_id, made.bos_token_id, made.pad_token_id) == ([tokenizer.eos_id], None, tokenizer.eos_id)
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    write_checkpoint(tmp_path / "c", model, model.config, tokenizer_dir=tmp_path / "source")
    assert GenerationConfig.from_pretrained(tmp_path / "c").eos_token_id == 5
    (tmp_path / "source" / "generation_config.json").unlink()
    edit_json(config, eos_token_id="end")
    with pytest.raises(UserError, match=r"config\.json: eos_token_id: 'end' is not a token id; correct or remove it$"):
        write_checkpoint(tmp_path / "c", model, model.config, tokenizer_dir=tmp_path / "source")


def test_multi_token_prediction_layers_are_left_out(tmp_path: Path) -> None:
    model = network(**GLM)
    write_checkpoint(tmp_path / "c", model, model.config)
    put("model.safetensors", "model.layers.4.eh_proj.weight", torch.zeros(3))(tmp_path / "c")
    assert torch.equal(logits(read_checkpoint(tmp_path / "c").model), logits(model))


@pytest.mark.parametrize("name", ["glm tied, no shared expert", "qwen with biases", "ernie"])
def test_a_tied_head_may_be_stored_and_must_be_the_embedding(name: str, tmp_path: Path) -> None:
    family, changes = NETWORKS[name]
    model = network(**changes)
    write_checkpoint(tmp_path / "c", model, model.config)
    stored = load_file(tmp_path / "c" / "model.safetensors")
    engines_tie = family == "ernie4_5_moe"
    assert (
        ("lm_head.weight" not in stored)
        == engines_tie
        == AutoConfig.from_pretrained(tmp_path / "c").tie_word_embeddings
    )
    put("model.safetensors", "lm_head.weight", model.embedding.weight.detach())(tmp_path / "c")
    back = read_checkpoint(tmp_path / "c").model
    assert back.head is None and torch.equal(logits(back), logits(model))
    put("model.safetensors", "lm_head.weight", torch.ones(300, 64))(tmp_path / "c")
    with pytest.raises(UserError, match=r"lm_head\.weight: holds weights that have no place"):
        read_checkpoint(tmp_path / "c")


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


def test_a_checkpoint_that_other_software_wrote_is_not_replaced(tmp_path: Path) -> None:
    model = network(**GLM)
    write_checkpoint(tmp_path / "c", model, model.config)
    forget_ours(tmp_path / "c")
    before = (tmp_path / "c" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="c: would be replaced, and holds a checkpoint of other software"):
        write_checkpoint(tmp_path / "c", network(**ERNIE), network(**ERNIE).config)
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == before


SIZES = (
    ({"num_hidden_layers": 3}, r"model\.layers\.3\.\S+: a layer more than the 3 \(num_hidden_layers\) of config\.json"),
    ({"num_hidden_layers": 10_000}, r"model\.layers\.4\.input_layernorm\.weight: missing"),
    ({"n_routed_experts": 10_000}, r"mlp\.gate\.weight: shape \[8, 64\] where config\.json gives \[10000, 64\]"),
    ({"vocab_size": 10**15}, r"embed_tokens\.weight: shape \[300, 64\]"),
    ({"num_attention_heads": 10**6}, r"q_proj\.weight: shape"),
    ({"moe_intermediate_size": 10**12}, r"gate_proj\.weight: shape \[16, 64\]"),
)


@pytest.mark.parametrize(("told", "message"), SIZES)
def test_a_config_that_tells_other_sizes_is_refused_before_anything_is_built(
    told: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(**GLM)
    write_checkpoint(tmp_path / "c", model, model.config)
    forget_ours(tmp_path / "c")
    edit_json(tmp_path / "c" / "config.json", **told)
    for module in (checkpoint, streamed):
        monkeypatch.setattr(module, "skeleton", None)
    for read in (read_checkpoint, StreamedState):
        with pytest.raises(UserError, match=message) as caught:
            read(tmp_path / "c")
        assert str(tmp_path / "c") in str(caught.value)


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
        lambda folder: edit_json(folder / "config.json", model_type="bert"),
        "model_type.*'bert'",
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
        r"layers\.0\.adapter: this architecture has no such tensor",
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
        r"elastic\.tensors: blocks\.1\.mlp\.bias_WE: does not belong to these weights",
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


OF_SHARDS: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "missing": (lambda folder, shard: shard.unlink(), r"00002-of-\d+\.safetensors: no such file"),
    "another's": (
        lambda folder, shard: shard.write_bytes(next(folder.glob("model-00001*")).read_bytes()),
        r"00002-of-\d+\.safetensors: .*: missing, and the index names this file",
    ),
    "of another dtype": (
        lambda folder, shard: edit_tensors(
            shard, lambda tensors: tensors.update({_first(tensors): torch.ones(1).byte()})
        ),
        r"00002-of-\d+\.safetensors: .*: dtype U8 is not supported",
    ),
    "of another shape": (
        lambda folder, shard: edit_tensors(shard, lambda tensors: tensors.update({_first(tensors): torch.ones(1)})),
        r"00002-of-\d+\.safetensors: .*: shape \[1\] where config\.json gives",
    ),
    "left out of the index": (
        lambda folder, shard: _edit_index(folder, lambda places: places.pop(min(places))),
        "missing from the weights",
    ),
    "outside the folder": (
        lambda folder, shard: _edit_index(folder, lambda places: places.update({min(places): "../model.safetensors"})),
        r"index\.json: weight_map\..*: '\.\./model\.safetensors' is not a file of this folder",
    ),
}


def _first(tensors: dict[str, torch.Tensor]) -> str:
    return min(name for name in tensors if name.endswith("weight"))


def _edit_index(folder: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    tree = json.loads(path.read_text())
    edit(tree["weight_map"])
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize("damage", OF_SHARDS)
def test_a_shard_that_is_not_what_the_index_says(damage: str, tmp_path: Path) -> None:
    model = network(**GLM)
    write_checkpoint(tmp_path / "c", model, model.config, max_shard_bytes=100_000)
    act, message = OF_SHARDS[damage]
    act(tmp_path / "c", next((tmp_path / "c").glob("model-00002*")))
    with pytest.raises(UserError, match=message) as caught:
        read_checkpoint(tmp_path / "c")
    assert "\n" not in str(caught.value) and str(tmp_path / "c") in str(caught.value)


def test_a_bias_of_the_head_that_is_not_zero_is_refused(tmp_path: Path) -> None:
    model = network(**ERNIE, attention_bias=True)
    write_checkpoint(tmp_path / "c", model, model.config)
    forget_ours(tmp_path / "c")
    assert json.loads((tmp_path / "c" / "config.json").read_text())["use_bias"] is True
    assert torch.equal(logits(read_checkpoint(tmp_path / "c").model), logits(model))
    put("model.safetensors", "lm_head.bias", torch.ones(300))(tmp_path / "c")
    with pytest.raises(
        UserError, match=r"lm_head\.bias: holds weights that have no place in this network; use a checkpoint without"
    ):
        read_checkpoint(tmp_path / "c")
