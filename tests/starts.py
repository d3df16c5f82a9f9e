"""A tokenizer that adds a token before each text, as those of Llama and Mistral do."""

from __future__ import annotations

from dataclasses import replace

import tokenizers
from tokenizers.processors import TemplateProcessing

from stretto.text.tokenizer import TURN_START, Tokenizer


def llama_like(tokenizer: Tokenizer, single: str = f"{TURN_START} $A") -> Tokenizer:
    """``tokenizer`` with a post-processor of the form ``single``; its BOS is the token that opens turns."""
    rust = tokenizers.Tokenizer.from_str(tokenizer.rust.to_str())
    tokens = [(token, rust.token_to_id(token)) for token in (TURN_START, tokenizer.eos_token)]
    rust.post_processor = TemplateProcessing(single=single, special_tokens=tokens)
    return replace(tokenizer, rust=rust, config={**tokenizer.config, "bos_token": TURN_START})
