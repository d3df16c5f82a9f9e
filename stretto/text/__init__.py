"""Tokenizers, chat templates and incremental text: the only room that converts between text and tokens."""
