"""GGUF files: what they hold, and that llama.cpp computes with them what we compute."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from stretto.base.errors import UserError
from stretto.model.checkpoint import write_checkpoint
from stretto.model.families import Family
from stretto.model.gguf.write import write_gguf
from stretto.model.transformer import Transformer
from stretto.text.chat import CHATML
from stretto.text.tokenizer import Tokenizer, train_tokenizer
from tests.model import checkpoints

DENSE = {"dense_layers": (0,), "dense_intermediate_size": 48}
ALL_DENSE = {
    "dense_layers": (0, 1, 2, 3),
    "dense_intermediate_size": 48,
    "num_experts": 1,
    "top_k": 1,
    "expert_intermediate_size": 48,
    "selection_bias": False,
}
LATENT: dict[str, Any] = {
    "num_kv_heads": 4,
    "head_dim": 24,
    "latent": {"query_rank": 20, "kv_rank": 28, "rope_dim": 8, "value_dim": 12},
    "norm_eps": 1e-6,
}
GPT_OSS: dict[str, Any] = {
    "family": "gpt_oss",
    "router": "softmax",
    "selection_bias": False,
    "attention_bias": True,
    "attention_out_bias": True,
    "attention_sinks": True,
    "router_bias": True,
    "expert_bias": True,
    "clamped_swiglu": {},
    "sliding_window": 6,
    "sliding_layers": (0, 2),
    "expert_intermediate_size": 32,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "glm": {"num_shared_experts": 2, "rotary_fraction": 0.5, "routed_scaling": 1.7, **DENSE},
    "glm with everything optional": {
        "qk_norm": True,
        "attention_bias": True,
        "normalize_gates": False,
        "tie_embeddings": True,
    },
    "glm, layers of different width": {"num_shared_experts": 1, "experts_per_layer": (8, 3, 5, 2)},
    "qwen": {"router": "softmax", "selection_bias": False, "qk_norm": True, "attention_bias": True},
    "mixtral": {"family": "mixtral", "router": "softmax", "selection_bias": False, "expert_intermediate_size": 48},
    "olmoe": {
        "family": "olmoe",
        "router": "softmax",
        "selection_bias": False,
        "qk_norm_wide": True,
        "normalize_gates": False,
        "num_kv_heads": 4,
        "head_dim": 16,
    },
    "gpt-oss": GPT_OSS,
    "gpt-oss, linear": {**GPT_OSS, "rope_scaling": {"kind": "linear", "factor": 4.0}},
    "gpt-oss, yarn": {**GPT_OSS, "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 32}},
    "deepseek": {"family": "deepseek_v3", **LATENT, "num_shared_experts": 1, "routed_scaling": 2.5, **DENSE},
    "deepseek, queries at once": {
        "family": "deepseek_v3",
        **LATENT,
        "latent": LATENT["latent"] | {"query_rank": None},
        "normalize_gates": False,
        "experts_per_layer": (8, 3, 5, 2),
    },
    "llama": {"family": "llama", **ALL_DENSE, "tie_embeddings": True},
    "llama with biases": {
        "family": "llama",
        **ALL_DENSE,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
    },
    "llama 3": {
        "family": "llama",
        **ALL_DENSE,
        "rope_theta": 500_000.0,
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_positions": 8192},
    },
    "llama, linear": {"family": "llama", **ALL_DENSE, "rope_scaling": {"kind": "linear", "factor": 4.0}},
    "qwen3, yarn": {
        "family": "qwen3",
        **ALL_DENSE,
        "qk_norm": True,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 32},
    },
    "qwen2": {"family": "qwen2", **ALL_DENSE, "attention_bias": True, "head_dim": 16, "norm_eps": 1e-6},
    "qwen3": {"family": "qwen3", **ALL_DENSE, "qk_norm": True},
    "ernie4_5": {"family": "ernie4_5", **ALL_DENSE, "tie_embeddings": True, "rope_theta": 500_000.0},
    "ernie": {"router": "softmax", "num_shared_experts": 1, "tie_embeddings": True, **DENSE},
    "ernie, one expert": {"router": "softmax", "num_experts": 1, "top_k": 1},
}
TEXTS = (
    "def f(x):\n    return x + 1  # naïve 東京, I've 'told\n\n\n   it's\t3333 🚀 end  ",
    "a document that spells <|endoftext|> and\r\n\r\ntwo  lines",
    " \n \n\n \t\t x\n",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = " ".join(f"{word} {word}s return x it's the 333 …" for word in ("alpha", "beta", "train", "naïve"))
    return train_tokenizer(iter([words] * 4), 300, CHATML)


def network(**changes: Any) -> Transformer:
    """One of the hub's small networks, with room for this file's tokenizer."""
    return checkpoints.network(vocab_size=320, **changes)


def checkpoint(folder: Path, tokenizer: Tokenizer, family: Family | None = None, **changes: Any) -> Transformer:
    tokenizer.save(folder / "tokenizer")
    model = network(**changes)
    write_checkpoint(folder / "c", model, model.config, family=family, tokenizer_dir=folder / "tokenizer")
    return model


@pytest.mark.parametrize("name", NETWORKS)
def test_llama_cpp_computes_the_same_log_probs(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = checkpoint(tmp_path, tokenizer, **NETWORKS[name])
    write_gguf(tmp_path / "c", tmp_path / "c.gguf")
    llama = llama_cpp.Llama(
        str(tmp_path / "c.gguf"),
        n_ctx=128,
        logits_all=True,
        verbose=False,
        n_threads=1,
        n_threads_batch=1,  # its threads wait by spinning, seconds of it on a busy machine
        type_k=0,
        type_v=0,  # fp32 cache
    )
    for text in TEXTS:
        ids = llama.tokenize(text.encode(), add_bos=True, special=False)
        assert ids == tokenizer.encode(text)
        llama.reset()
        llama.eval(ids)
        theirs = torch.tensor(np.array(llama.scores[: len(ids)])).log_softmax(-1)
        with torch.no_grad():
            ours = model.logits(torch.tensor([ids]))[0].log_softmax(-1)
        # both add in fp32, in different orders, through four layers of weights of order one
        assert (ours - theirs).abs().max() <= 1e-3
    rendered = "<|im_start|>user\nhi<|im_end|>\n"
    assert llama.tokenize(rendered.encode(), add_bos=False, special=True) == tokenizer.encode_rendered(rendered)
    assert llama.token_eos() == tokenizer.eos_id
    assert llama.metadata["tokenizer.chat_template"] == CHATML
    llama.close()


@pytest.mark.parametrize(
    ("dtype", "rounded"), [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_weights_are_rounded_and_what_routes_is_not(
    dtype: str, rounded: torch.dtype, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model = checkpoint(tmp_path, tokenizer, **NETWORKS["glm, layers of different width"])
    written: list[int] = []
    write_gguf(tmp_path / "c", tmp_path / "c.gguf", dtype, advance=written.append)
    assert 0 < (tmp_path / "c.gguf").stat().st_size - sum(written) < 100_000  # the tokenizer and the names
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "c.gguf").tensors}
    state = model.state_dict()

    def data(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))

    down_EDI = data("blk.1.ffn_down_exps.weight")
    assert torch.equal(down_EDI[:3], state["blocks.1.mlp.down"].to(rounded).float())
    assert down_EDI.shape[0] == 8 and not down_EDI[3:].any()
    assert torch.equal(data("blk.1.ffn_gate_inp.weight")[:3], state["blocks.1.mlp.gate"])
    assert torch.equal(data("blk.1.exp_probs_b.bias")[:3], state["blocks.1.mlp.bias_WE"][0])
    assert torch.equal(data("blk.1.post_attention_norm.weight"), state["blocks.1.mlp_norm.weight"])
    assert torch.equal(data("token_embd.weight"), state["embedding.weight"].to(rounded).float())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({**NETWORKS["qwen"], **DENSE}, "no dense layers"),
        ({**NETWORKS["qwen"], "normalize_gates": False}, "renormalises"),
        ({**NETWORKS["ernie"], "dense_layers": (0, 2)}, "dense layers first"),
        ({**NETWORKS["llama"], "rope_scaling": {"kind": "dynamic", "factor": 2.0}}, r"scaled \(dynamic\)"),
        ({**NETWORKS["qwen2"], "head_dim": 24}, "heads that fill the hidden size"),
        ({**NETWORKS["olmoe"], "num_kv_heads": 2}, "one key/value head for each query head"),
        ({**NETWORKS["olmoe"], "qkv_clip": 4.0}, "qkv_clip"),
        ({**NETWORKS["deepseek"], "norm_eps": 1e-5}, "one eps for all norms"),
        ({**NETWORKS["deepseek"], "expert_groups": 2}, "chosen by groups"),
        ({**NETWORKS["deepseek"], "family": "glm4_moe_lite"}, "Stretto does not write glm4_moe_lite"),
        (
            {**NETWORKS["deepseek"], "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 32}},
            "does not write as GGUF for latent attention",
        ),
    ],
)
def test_what_llama_cpp_takes_for_granted_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    checkpoint(tmp_path, tokenizer, **changes)
    with pytest.raises(UserError, match=reason):
        write_gguf(tmp_path / "c", tmp_path / "c.gguf")
    assert not (tmp_path / "c.gguf").exists()


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = network()
    write_checkpoint(tmp_path / "c", model, model.config)
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file"):
        write_gguf(tmp_path / "c", tmp_path / "c.gguf")


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--dtype q4_k"):
        write_gguf(tmp_path / "c", tmp_path / "c.gguf", "q4_k")


def test_a_tokenizer_that_splits_otherwise_needs_a_name(tmp_path: Path) -> None:
    rust = tokenizers.Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(tokenizers.Regex(r"\p{N}| ?\p{L}+|\s+"), "isolated")
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    rust.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust.train_from_iterator(
        ["some text"],
        trainers.BpeTrainer(
            vocab_size=270, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    foreign = Tokenizer(rust, "</s>", None, {"bos_token": "<s>"})
    checkpoint(tmp_path, foreign)
    with pytest.raises(UserError, match=r"tokenizer\.json: pre_tokenizer: not a known rule of llama"):
        write_gguf(tmp_path / "c", tmp_path / "c.gguf")
    write_gguf(tmp_path / "c", tmp_path / "c.gguf", pre_tokenizer="qwen2")
    fields = gguf.GGUFReader(tmp_path / "c.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "qwen2"
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert fields["tokenizer.ggml.add_eos_token"].contents() is False
    assert fields["tokenizer.ggml.tokens"].contents()[-1] == "[PAD319]"


def test_a_tokenizer_without_bytes_is_refused(tmp_path: Path) -> None:
    rust = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    checkpoint(tmp_path, Tokenizer(rust, "</s>"))
    with pytest.raises(UserError, match="not a byte-level BPE"):
        write_gguf(tmp_path / "c", tmp_path / "c.gguf")


def test_a_full_disk_leaves_the_older_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    checkpoint(tmp_path, tokenizer)
    write_gguf(tmp_path / "c", tmp_path / "c.gguf", "f16")
    older = (tmp_path / "c.gguf").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"c\.gguf: cannot be written"):
            write_gguf(tmp_path / "c", tmp_path / "c.gguf", "f32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "c.gguf").read_bytes() == older
    assert not list(tmp_path.glob(".c.gguf*"))
