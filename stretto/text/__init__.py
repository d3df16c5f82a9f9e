"""Tokenizers, chat templates and incremental text: the only room that converts between text and tokens."""

VOCAB_SIZE = 8192
"""Vocabulary size of the tokenizer that `stretto.tokenize` trains, unless one is given."""
