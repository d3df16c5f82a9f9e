"""Completions that must match a grammar: which tokens may come next.

A thin layer over llguidance: a parser over bytes and a trie of the vocabulary, so it needs no table for each grammar
and works with any tokenizer. Imports no torch.
Shape letters: W words of 32 tokens.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from stretto.base.errors import UserError
from stretto.engine.request import Grammar
from stretto.text.tokenizer import Tokenizer

NUM_COMPILED = 64
"""Grammars kept compiled, most recently used: agents send the same few schemas over and over."""
WHITESPACE = r"[ \t\r\n]{1,40}"
"""Between the parts of JSON. Without a limit a small model may produce whitespace until it runs out of tokens."""


class GrammarCompiler:
    """Grammars of one tokenizer. Keep one for each engine: reading a large vocabulary takes about a second."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Raises:
            UserError: llguidance does not know how this tokenizer spells bytes.
        """
        try:
            self._tokenizer = LLTokenizer(
                tokenizer.rust.to_str(), n_vocab=tokenizer.vocab_size, eos_token=tokenizer.eos_id
            )
        except ValueError as error:
            raise UserError(
                f"tokenizer: {_one_line(error)}; grammars need byte-level or byte-fallback tokens"
            ) from None
        self._eos_id = tokenizer.eos_id
        self._vocab = tokenizer.vocab_size
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar, end_ids: Sequence[int] = (), source: str = "request") -> GrammarState:
        """The state before the first token. Large schemas take up to a second, without holding Python's lock.

        Args:
            end_ids: tokens that end a completion beside the tokenizer's own end.
            source: what a message says the grammar came from.

        Raises:
            UserError: it cannot be read, or nothing matches it.
        """
        outside = [token for token in end_ids if not 0 <= token < self._vocab]
        assert not outside, f"ends {outside} are outside the vocabulary of {self._vocab}"
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, _definition(grammar, source), log_level=0)
            if matcher.is_error():
                raise UserError(_problem(grammar, matcher.get_error(), source))
            self._compiled[grammar] = matcher
            if len(self._compiled) > NUM_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return GrammarState(matcher.deep_copy(), frozenset((self._eos_id, *end_ids)), self._vocab, source)


class GrammarState:
    """How far one sequence has come in its grammar. Made by `GrammarCompiler.compile`."""

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int], vocab: int, source: str) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._source = source
        # The library does not count an end for `rollback` where nothing else could follow, so it never sees one.
        self._end_ids = end_ids
        self._num_ends = 0
        end_words = np.zeros(-(-vocab // 32), dtype=np.uint32)
        for token in end_ids:
            end_words[token // 32] |= np.uint32(1 << token % 32)
        self._ends_W = end_words.view(np.int32)

    def mask(self) -> np.ndarray:
        """int32 [W]: bit b of word w is set where token 32·w + b may come next; see `stretto.engine.sampling.process`.

        The end is among them exactly when what was accepted matches the grammar.

        Raises:
            UserError: the grammar is too ambiguous to follow.
        """
        if self._num_ends:
            return self._ends_W.copy()
        mask_W = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: len(self._ends_W)]
        self._check()
        return mask_W | self._ends_W if self._matcher.is_accepting() else mask_W.copy()

    def accept(self, token: int) -> bool:
        """Take the next token; False, and nothing has changed, where it is not allowed.

        Raises:
            UserError: the grammar is too ambiguous to follow.
        """
        if token in self._end_ids and (self._num_ends or self._matcher.is_accepting()):
            self._num_ends += 1
            return True
        if self._num_ends or not 0 <= token < self._vocab:
            return False
        num_taken = self._matcher.try_consume_tokens([token])
        self._check()
        return num_taken == 1

    def rollback(self, num: int) -> None:
        """Take back the last ``num`` accepted tokens."""
        num_ends = min(num, self._num_ends)
        self._num_ends -= num_ends
        if num > num_ends:
            taken_back = self._matcher.rollback(num - num_ends)
            assert taken_back, f"cannot take back {num} tokens: {_one_line(self._matcher.get_error())}"

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end may follow, or it has come."""
        return self._num_ends > 0 or self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            problem = _one_line(self._matcher.get_error())
            raise UserError(f"{self._source}: grammar: {problem}; use a simpler one")


def _definition(grammar: Grammar, source: str) -> str:
    """The library's own form of a grammar."""
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    try:
        schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise UserError(_problem(grammar, f"not JSON: {error}", source)) from None
    if schema is True:  # the schema of anything; the library takes options beside an object only
        schema = {}
    if schema is False:
        raise UserError(_problem(grammar, "nothing matches the schema false", source))
    if not isinstance(schema, dict):
        raise UserError(_problem(grammar, f"a schema is an object, not {type(schema).__name__}", source))
    overrides = {"whitespace_pattern": WHITESPACE}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)  # type: ignore[arg-type]


def _problem(grammar: Grammar, message: str, source: str) -> str:
    remedy = {
        "json_schema": "send a JSON Schema of supported keywords",
        "json_object": "report this",
        "regex": "send a regular expression without look-around or back-references",
        "lark": "send a Lark grammar with a rule named start",
    }[grammar.kind]
    return f"{source}: grammar.{grammar.kind}: {_one_line(message)}; {remedy}"


def _one_line(message: object) -> str:
    return " ".join(str(message).split("<state>")[0].split())[:200]
