"""Tokenizers as GGUF metadata, in both directions, for byte-level BPE with a pre-tokenizer that llama.cpp knows.

GGUF does not say how a tokenizer splits text into words; it names a rule that llama.cpp has in code. `RULES` is that code as the hub's
``tokenizer.json`` has it, read from llama.cpp's ``src/llama-vocab.cpp`` and from the tokenizers that its converter knows.
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
    """What one of llama.cpp's names stands for."""

    pre_tokenizer: Mapping[str, Any]
    ignore_merges: bool = False
    """A word that is an entry of the vocabulary is taken whole."""
    adds_bos: bool = False
    """Where the file does not say."""
    normalizer: Mapping[str, Any] | None = None
    """That the hub's tokenizer has and llama.cpp leaves out: the ids are the same for text that is normal already."""


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
"""By llama.cpp's name; of several names for one rule the first is written."""


def rebuild_tokenizer(metadata: Mapping[str, Any], source: Path) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Raises:
        UserError: no byte-level BPE, or one that splits words by a rule that is not known here.
    """
    remedy = "put the model's own tokenizer.json beside the file"
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":  # llama.cpp's word for every byte-level BPE
        raise UserError(
            f"{source}: tokenizer.ggml.model: {model!r} is not a byte-level BPE, only those are rebuilt; {remedy}"
        )
    if pre not in RULES:
        raise UserError(
            f"{source}: tokenizer.ggml.pre: {pre!r} is a rule of splitting words that is not known here; {remedy}"
        )

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
    named = {
        name: _token(tokens, vocabulary, metadata.get(f"tokenizer.ggml.{key}_token_id")) for name, key in _NAMED.items()
    }
    added = {token: kind == TokenType.CONTROL for token, kind in zip(tokens, types, strict=True) if kind in _ADDED}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(vocabulary[token], token, is_special) for token, is_special in added.items()],
        "normalizer": rule.normalizer,
        "pre_tokenizer": rule.pre_tokenizer,
        "post_processor": _around(metadata, rule, named, vocabulary),
        "decoder": _bytes(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule.ignore_merges,
            "vocab": vocabulary,
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    try:
        rust = tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the Rust library raises a bare Exception
        problem = one_line(error, 200)
        raise UserError(f"{source}: tokenizer.ggml: does not fit together: {problem}; {remedy}") from None
    if named["eos_token"] is None:
        raise UserError(f"{source}: tokenizer.ggml.eos_token_id: missing; {remedy}")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: token for name, token in named.items() if token is not None}
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise UserError(f"{source}: tokenizer.chat_template: not a text; {remedy}")
    return Tokenizer(rust, named["eos_token"], template, config)


_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED)


def _token(tokens: list[str], vocabulary: Mapping[str, int], index: Any) -> str | None:
    token = tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None
    return token if token in vocabulary else None


def _added(index: int, token: str, is_special: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": token, **plain, "special": is_special}


def _around(
    metadata: Mapping[str, Any], rule: Rule, named: Mapping[str, str | None], vocabulary: Mapping[str, int]
) -> dict[str, Any] | None:
    """The post-processor: what stands round every text that is encoded as a whole."""
    bos = named["bos_token"] if metadata.get("tokenizer.ggml.add_bos_token", rule.adds_bos) else None
    eos = named["eos_token"] if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return None

    def template(*texts: str) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for number, text in enumerate(texts):
            around = [[{"SpecialToken": {"id": token, "type_id": number}}] if token else [] for token in (bos, eos)]
            pieces += [*around[0], {"Sequence": {"id": text, "type_id": number}}, *around[1]]
        return pieces

    special = {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in (bos, eos) if token}
    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": special,
    }


def rule_name(source: Path, tokenizer: Tokenizer, named: str | None) -> str:
    """llama.cpp's name of the tokenizer's splitting rule; ``named``, if the caller gives one, for whom he answers.

    Raises:
        UserError: it is no byte-level BPE, or splits or normalises text in a way that has no known name.
    """
    definition = json.loads(tokenizer.rust.to_str())
    if definition["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(definition["pre_tokenizer"]):
        raise UserError(
            f"{source}: model: not a byte-level BPE; only those can be written as GGUF here, use llama.cpp's own converter"
        )
    if named is not None:
        return named
    ignores = bool(definition["model"].get("ignore_merges"))
    for name, rule in RULES.items():
        same = definition["normalizer"] in (None, rule.normalizer) and ignores == rule.ignore_merges
        if same and _plain(definition["pre_tokenizer"]) == _plain(rule.pre_tokenizer):
            return name
    raise UserError(
        f"{source}: pre_tokenizer: none that llama.cpp is known to have; give its name of it as pre_tokenizer, or use its own converter"
    )


def _plain(pre_tokenizer: Any) -> Any:
    """Without what decides about offsets only."""
    if isinstance(pre_tokenizer, Mapping):
        return {key: _plain(value) for key, value in pre_tokenizer.items() if key != "trim_offsets"}
    return [_plain(each) for each in pre_tokenizer] if isinstance(pre_tokenizer, list) else pre_tokenizer


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, vocab_size: int, pre: str) -> None:
    """Write ``tokenizer`` for an embedding of ``vocab_size`` rows; ``pre`` is llama.cpp's name of its splitting rule."""
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
    # without one llama.cpp assumes GPT-2's own id, which here is any token
    writer.add_bos_token_id(tokenizer.eos_id if ids["bos"] is None else ids["bos"])
    writer.add_eos_token_id(tokenizer.eos_id)
    if ids["unknown"] is not None:
        writer.add_unk_token_id(ids["unknown"])
    if ids["padding"] is not None:
        writer.add_pad_token_id(ids["padding"])
    turn_end = tokenizer.rust.token_to_id(TURN_END)
    if turn_end is not None:
        writer.add_eot_token_id(turn_end)
    around = tokenizer.rust.encode("").ids  # what a post-processor puts round every text
    writer.add_add_bos_token(bool(around) and around[0] == ids["bos"])
    writer.add_add_eos_token(bool(around) and around[-1] == tokenizer.eos_id and around[-1] != ids["bos"])
    writer.add_add_space_prefix(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
