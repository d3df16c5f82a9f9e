"""Conversion of tokenizers to and from GGUF metadata, for byte-level BPE with a pre-tokenizer of llama.cpp.

GGUF has only the name of the rule by which a tokenizer splits text into words; llama.cpp implements the rules in code. `RULES` has
them in the form of ``tokenizer.json``. The sources are llama.cpp's ``src/llama-vocab.cpp`` and the tokenizers in its converter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from gguf import TokenType

from stretto.base.errors import UserError, one_line
from stretto.text.tokenizer import LLAMA3_PATTERN, QWEN2_PATTERN, TURN_END, Tokenizer

_GPT4O_CASE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_GPT4O_CASE[0]}*{_GPT4O_CASE[1]}+{_GPT4O_END}|[^\r\n\p{{L}}\p{{N}}]?{_GPT4O_CASE[0]}+{_GPT4O_CASE[1]}*{_GPT4O_END}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """A splitting rule of llama.cpp, in the form of ``tokenizer.json``."""

    pre_tokenizer: Mapping[str, Any]
    ignore_merges: bool = False
    """Whether a word that is in the vocabulary becomes one token without merges."""
    adds_bos: bool = False
    """Default of ``add_bos_token``."""
    normalizer: Mapping[str, Any] | None = None
    """Normaliser of ``tokenizer.json``, which llama.cpp does not have; the ids are equal for normalised text."""


def _bytes(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _bytes(use_regex=False)]}


_GPT2 = Rule(_bytes(use_regex=True))
_DIGITS = Rule(
    {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _bytes(use_regex=True)]}
)
_LLAMA3 = Rule(_split(LLAMA3_PATTERN), ignore_merges=True, adds_bos=True)
_QWEN2 = Rule(_split(QWEN2_PATTERN), normalizer={"type": "NFC"})
RULES: dict[str, Rule] = {
    **dict.fromkeys(("gpt-2", "olmo"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), Rule(_split(LLAMA3_PATTERN))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "gpt-4o": Rule(_split(_GPT4O)),
}
"""Rules by llama.cpp's name; of several names for one rule, the first is written."""


def rebuild_tokenizer(metadata: Mapping[str, Any], source: Path) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata.

    Raises:
        UserError: it is not a byte-level BPE, its splitting rule is not known, or its metadata is invalid.
    """
    remedy = "put the model's own tokenizer.json beside the file"
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":  # llama.cpp's word for every byte-level BPE
        raise UserError(f"{source}: tokenizer.ggml.model: {model!r} is not a byte-level BPE, as supported; {remedy}")
    if pre not in RULES:
        raise UserError(f"{source}: tokenizer.ggml.pre: {pre!r} is not a supported splitting rule; {remedy}")

    def listed(key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        found = metadata.get(f"tokenizer.ggml.{key}") or default
        if found is None:
            raise UserError(f"{source}: tokenizer.ggml.{key}: missing; {remedy}")
        if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
            raise UserError(f"{source}: tokenizer.ggml.{key}: not a list of {kind.__name__}; {remedy}")
        return found

    rule, tokens, merges = RULES[pre], listed("tokens", str), listed("merges", str)
    types = listed("token_type", int, [int(TokenType.NORMAL)] * len(tokens))
    if len(types) != len(tokens):
        raise UserError(f"{source}: tokenizer.ggml.token_type: {len(types)} of {len(tokens)} tokens; {remedy}")
    vocabulary = {
        token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != TokenType.UNUSED
    }
    settings = named_settings(metadata)
    named = {name: settings[name] if settings.get(name) in vocabulary else None for name in _NAMED}
    added = [
        tokenizers.AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    pairs = [merge.split(" ", 1) for merge in merges]
    bos = named["bos_token"] if metadata.get("tokenizer.ggml.add_bos_token", rule.adds_bos) else None
    eos = named["eos_token"] if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    definition: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": rule.normalizer,
        "pre_tokenizer": rule.pre_tokenizer,
        "post_processor": _post_processor(bos, eos, vocabulary) if bos or eos else None,
        "decoder": _bytes(use_regex=True),
        "model": {"type": "BPE", "ignore_merges": rule.ignore_merges, "vocab": vocabulary, "merges": pairs},
    }
    try:
        rust = tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the Rust library raises a bare Exception
        problem = one_line(error, 200)
        raise UserError(f"{source}: tokenizer.ggml: the metadata is inconsistent: {problem}; {remedy}") from None
    rust.add_tokens(added)
    if named["eos_token"] is None:
        raise UserError(f"{source}: tokenizer.ggml.eos_token_id: missing; {remedy}")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: token for name, token in named.items() if token is not None}
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise UserError(f"{source}: tokenizer.chat_template: not a string; {remedy}")
    return Tokenizer(rust, named["eos_token"], template, config)


def named_settings(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens and chat template in a GGUF file's metadata, as in tokenizer_config.json. Invalid ones are left out."""
    tokens, template = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.chat_template")
    tokens = tokens if isinstance(tokens, list) else []
    found = {name: _token(tokens, metadata.get(f"tokenizer.ggml.{key}_token_id")) for name, key in _NAMED.items()}
    found["chat_template"] = template
    return {name: value for name, value in found.items() if isinstance(value, str)}


_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""GGUF's name of a special token by the hub's."""


def _token(tokens: list[Any], index: Any) -> Any:
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _post_processor(bos: str | None, eos: str | None, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """The post-processor that adds ``bos`` before every text and ``eos`` after it; None: no such token."""

    def around(text: str, type_id: int) -> list[dict[str, Any]]:
        before, after = ([{"SpecialToken": {"id": token, "type_id": type_id}}] if token else [] for token in (bos, eos))
        return [*before, {"Sequence": {"id": text, "type_id": type_id}}, *after]

    special = {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in (bos, eos) if token}
    single, pair = around("A", 0), around("A", 0) + around("B", 1)
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def rule_name(source: Path, tokenizer: Tokenizer, named: str | None) -> str:
    """llama.cpp's name of the tokenizer's splitting rule; ``named``: the caller's choice, which is not checked.

    Raises:
        UserError: it is not a byte-level BPE, or its splitting or normalisation has no known name.
    """
    definition = json.loads(tokenizer.rust.to_str())
    if definition["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(definition["pre_tokenizer"]):
        raise UserError(
            f"{source}: model: not a byte-level BPE, and others cannot be written as GGUF; use llama.cpp's own converter"
        )
    if named is not None:
        return named
    ignores = bool(definition["model"].get("ignore_merges"))
    for name, rule in RULES.items():
        same = definition["normalizer"] in (None, rule.normalizer) and ignores == rule.ignore_merges
        if same and _plain(definition["pre_tokenizer"]) == _plain(rule.pre_tokenizer):
            return name
    raise UserError(
        f"{source}: pre_tokenizer: not a known rule of llama.cpp; give its name as pre_tokenizer, or use llama.cpp's own converter"
    )


def _plain(pre_tokenizer: Any) -> Any:
    """A pre-tokenizer without the setting that affects offsets only."""
    if isinstance(pre_tokenizer, Mapping):
        return {key: _plain(value) for key, value in pre_tokenizer.items() if key != "trim_offsets"}
    return [_plain(each) for each in pre_tokenizer] if isinstance(pre_tokenizer, list) else pre_tokenizer


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, vocab_size: int, pre: str) -> None:
    """Write ``tokenizer`` for an embedding of ``vocab_size`` rows; ``pre``: llama.cpp's name of its splitting rule."""
    definition = json.loads(tokenizer.rust.to_str())["model"]
    by_id = {index: token for token, index in tokenizer.rust.get_vocab(with_added_tokens=True).items()}
    added = tokenizer.rust.get_added_tokens_decoder()
    tokens, types = [], []
    for index in range(vocab_size):
        tokens.append(by_id.get(index, f"[PAD{index}]"))
        if index in added:
            types.append(TokenType.CONTROL if added[index].special else TokenType.USER_DEFINED)
        else:
            types.append(TokenType.NORMAL if index in by_id else TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in definition["merges"]])
    ids = {key: tokenizer.named_id(name) for name, key in _NAMED.items()}
    # without a bos id llama.cpp assumes that of GPT-2, which is another token here
    writer.add_bos_token_id(tokenizer.eos_id if ids["bos"] is None else ids["bos"])
    writer.add_eos_token_id(tokenizer.eos_id)
    if ids["unknown"] is not None:
        writer.add_unk_token_id(ids["unknown"])
    if ids["padding"] is not None:
        writer.add_pad_token_id(ids["padding"])
    turn_end = tokenizer.rust.token_to_id(TURN_END)
    if turn_end is not None:
        writer.add_eot_token_id(turn_end)
    added_ids = tokenizer.rust.encode("").ids  # those that a post-processor adds to every text
    writer.add_add_bos_token(tokenizer.start[:1] == (ids["bos"],))
    writer.add_add_eos_token(added_ids[-1:] == [tokenizer.eos_id] and tokenizer.eos_id != ids["bos"])
    writer.add_add_space_prefix(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
