"""Grammar-constrained decoding: the set of tokens that may come next.

A thin layer over llguidance: a parser over bytes and a trie of the vocabulary, so it needs no table for each grammar
and works with any tokenizer. Imports no torch.

Grammars come from strangers, and no limit of the library's own bounds what reading one costs: a schema of a kilobyte can
take 20 s and gigabytes, one of 60 KB overflows the stack. So each is tried in a process of its own first, and read here
only when that went well. What a mask costs is bounded by the library (items of one mask) and by us (processor time).
Shape letters: W words of 32 tokens.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from stretto.base.errors import UserError, one_line
from stretto.base.limited import LimitedProcess, Overrun, serve
from stretto.engine.request import Grammar, QueueFull
from stretto.text.tokenizer import Tokenizer

T = TypeVar("T")
NUM_COMPILED = 64
"""Grammars kept compiled, most recently used: agents send the same few schemas over and over."""
MAX_CHARS = 1 << 18
"""Of a grammar's text."""
MAX_TRIALS = 16
"""Grammars that wait to be tried; a further one is told to come back."""
TRIAL_S = 2.0
"""Processor seconds that it may take to read a grammar and compute its first mask."""
_TRIAL_BYTES, _TRIAL_STACK = 1 << 30, 1 << 20
"""Far below the stack of any thread here, so that what passed the trial passes."""
MASK_S, MASK_PATIENCE_S = 0.002, 0.2
"""Processor seconds a token that a grammar may take on average, and how far it may exceed that. With a vocabulary of
100,000, schemas take a hundredth of it and broad regular expressions half."""
WHITESPACE = r" |\n[ \t]{0,16}"
"""Between the parts of JSON: a space, or a new line and its indentation. Without a limit a small model may produce
whitespace until it runs out of tokens."""
_LIMITS = LLParserLimits(step_max_items=10_000, max_lexer_states=20_000, verbose_errors=False)
"""Items of a mask: the library's default lets an ambiguous grammar take seconds. States: each takes 1-2 kB, of each sequence."""


class GrammarCompiler:
    """Grammars of one tokenizer, for any thread. Keep one for each engine: reading a large vocabulary takes about a second."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Raises:
            UserError: llguidance does not know how this tokenizer spells bytes.
        """
        spelling = tokenizer.rust.to_str(), tokenizer.vocab_size, tokenizer.eos_id
        try:
            self._tokenizer = _read_tokenizer(*spelling)
        except ValueError as error:
            raise UserError(
                f"tokenizer: {_one_line(error)}; grammars need byte-level or byte-fallback tokens"
            ) from None
        self._eos_id = tokenizer.eos_id
        self._vocab = tokenizer.vocab_size
        self._compiled: OrderedDict[Grammar, LLMatcher | str] = OrderedDict()  # or why it is refused
        self._lock = threading.Lock()
        self._trial = LimitedProcess("stretto.engine.grammar", json.dumps(spelling).encode(), limit_s=TRIAL_S)
        self._trials = threading.BoundedSemaphore(MAX_TRIALS)

    def compile(self, grammar: Grammar, end_ids: Sequence[int] = (), source: str = "request") -> GrammarState:
        """The state before the first token. One that is not kept takes up to seconds, without holding Python's lock.

        Args:
            end_ids: tokens that end a completion beside the tokenizer's own end.
            source: what a message says the grammar came from.

        Raises:
            UserError: it cannot be read, costs too much, or nothing matches it. QueueFull: too many wait to be read.
        """
        outside = [token for token in end_ids if not 0 <= token < self._vocab]
        assert not outside, f"ends {outside} are outside the vocabulary of {self._vocab}"
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            if not self._trials.acquire(blocking=False):
                raise QueueFull(f"{MAX_TRIALS} grammars wait to be read already; try again later")
            try:
                matcher = self._read(grammar)
            finally:
                self._trials.release()
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > NUM_COMPILED:
                self._compiled.popitem(last=False)
        if isinstance(matcher, str):
            raise UserError(f"{source}: grammar.{grammar.kind}: {matcher}")
        return GrammarState(matcher, frozenset((self._eos_id, *end_ids)), self._vocab, source)

    def _read(self, grammar: Grammar) -> LLMatcher | str:
        """The grammar before its first token, or why there is none."""
        if len(grammar.text) > MAX_CHARS:
            return f"{len(grammar.text):,} characters are more than {MAX_CHARS:,}; send a shorter one"
        try:
            problem = self._trial.ask(json.dumps([grammar.kind, grammar.text]).encode()).decode()
        except Overrun as error:
            return f"reading it {error}; send a simpler one"
        if problem:
            return f"{problem}; {_REMEDIES[grammar.kind]}"
        matcher = LLMatcher(self._tokenizer, _definition(grammar), log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()  # the first mask is the dearest: what it builds is in every copy
        return matcher


class GrammarState:
    """How far one sequence has come in its grammar. Made by `GrammarCompiler.compile`."""

    def __init__(self, start: LLMatcher, end_ids: frozenset[int], vocab: int, source: str) -> None:
        self._start = start
        self._matcher = start.deep_copy()
        self._vocab = vocab
        self._source = source
        self._debt_s = 0.0  # processor time beyond what the tokens so far may take
        self._end_ids = end_ids  # never given to the library
        self._has_ended = False
        end_words = np.zeros(-(-vocab // 32), dtype=np.uint32)
        for token in end_ids:
            end_words[token // 32] |= np.uint32(1 << token % 32)
        self._ends_W = end_words.view(np.int32)

    def fresh(self) -> GrammarState:
        """Another state before the first token."""
        return GrammarState(self._start, self._end_ids, self._vocab, self._source)

    def mask(self) -> np.ndarray:
        """int32 [W]: bit b of word w is set where token 32·w + b may come next; see `stretto.engine.sampling.process`.

        The end is among them exactly when what was accepted matches the grammar.

        Raises:
            UserError: the grammar is too ambiguous to follow.
        """
        if self._has_ended:
            return self._ends_W.copy()
        mask_W = np.frombuffer(self._timed(self._matcher.compute_bitmask), dtype=np.int32)[: len(self._ends_W)]
        return mask_W | self._ends_W if self._matcher.is_accepting() else mask_W.copy()

    def accept(self, token: int) -> bool:
        """Take the next token; False, and nothing has changed, where it is not allowed.

        Raises:
            UserError: the grammar is too ambiguous to follow.
        """
        if token in self._end_ids and (self._has_ended or self._matcher.is_accepting()):
            self._has_ended = True
            return True
        if self._has_ended or not 0 <= token < self._vocab:
            return False
        self._debt_s = max(0.0, self._debt_s - MASK_S)
        return bool(self._timed(lambda: self._matcher.try_consume_tokens([token])))

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end may follow, or it has come."""
        return self._has_ended or self._matcher.is_stopped()

    def _timed(self, work: Callable[[], T]) -> T:
        """Let the matcher ``work``, within the limits of it."""
        started_s = time.thread_time()
        result = work()
        self._debt_s += time.thread_time() - started_s
        problem = _one_line(self._matcher.get_error()) if self._matcher.is_error() else ""
        if self._debt_s > MASK_PATIENCE_S:
            problem = problem or f"takes more than {1e3 * MASK_S:g} ms a token"
        if problem:
            raise UserError(f"{self._source}: grammar: {problem}; use a simpler one")
        return result


def _read_tokenizer(spelling: str, vocab: int, eos_id: int) -> LLTokenizer:
    return LLTokenizer(spelling, n_vocab=vocab, eos_token=eos_id)


def _definition(grammar: Grammar) -> str:
    """The library's own form of a grammar. Raises ValueError where it is none."""
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    try:
        schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if schema is True:  # the schema of anything; the library takes options beside an object only
        schema = {}
    if schema is False:
        raise ValueError("nothing matches the schema false")
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, not {type(schema).__name__}")
    overrides = {"whitespace_pattern": WHITESPACE}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)  # type: ignore[arg-type]


_REMEDIES = {
    "json_schema": "send a JSON Schema of supported keywords",
    "json_object": "report this",
    "regex": "send a regular expression without look-around or back-references",
    "lark": "send a Lark grammar with a rule named start",
}


def _one_line(message: object) -> str:
    line = one_line(re.split("<state>|<non-verbose/>", str(message))[0], 200)
    return "nothing matches it" if line.startswith("NoExtension") else line


def _try(setup: bytes) -> Callable[[bytes], bytes]:
    """Answers a grammar with what is wrong with it; nothing where nothing is."""
    tokenizer = _read_tokenizer(*json.loads(setup))

    def answer(question: bytes) -> bytes:
        try:
            kind, text = json.loads(question)
            definition = _definition(Grammar(kind=kind, text=text))
        except (ValueError, RecursionError) as error:
            return _one_line(error).encode()
        matcher = LLMatcher(tokenizer, definition, log_level=0, limits=_LIMITS)
        started_s = time.process_time()
        is_empty = not any(matcher.compute_bitmask())
        if matcher.is_error():
            return _one_line(matcher.get_error()).encode()
        if time.process_time() - started_s > MASK_PATIENCE_S:
            return b"its masks take too long"
        return b"nothing matches it" if is_empty else b""

    return answer


if __name__ == "__main__":
    serve(_try, memory_bytes=_TRIAL_BYTES, stack_bytes=_TRIAL_STACK)
