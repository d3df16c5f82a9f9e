"""Grammar-constrained decoding: the set of tokens that a grammar allows next.

A thin layer over llguidance, which combines a parser over bytes with a trie of the vocabulary, so it needs no table per
grammar and works with any tokenizer. Imports no torch.

Clients can send any grammar, and the library does not limit the cost of reading one: a schema of a kilobyte can
take 20 s and gigabytes, and one of 60 KB overflows the stack. Each grammar is therefore tried in a separate process first, and read
here only if the trial succeeds. The cost of a mask is limited by the library (number of items) and here (processor time).
Shape letters: W words of 32 tokens.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from stretto.base.errors import UserError, one_line
from stretto.base.limited import LimitedProcess, Overrun, serve
from stretto.engine.request import Grammar, QueueFull
from stretto.text.tokenizer import Tokenizer

T = TypeVar("T")
MAX_CACHE_BYTES = 1 << 28
"""Largest size of all compiled grammars in the cache; agents send the same few schemas again and again. A small schema takes half a
megabyte, one with 3,000 properties thirteen."""
MAX_CHARS = 1 << 18
"""Largest length of a grammar's text, in characters."""
MAX_TRIALS = 16
"""Largest number of grammars that wait for their trial; further ones are refused for the moment."""
TRIAL_S = 2.0
"""Longest processor time for reading a grammar and computing its first mask, in seconds."""
_TRIAL_BYTES, _TRIAL_STACK = 1 << 30, 1 << 20
"""Limits of the trial process. Its stack is far smaller than that of any thread here, so a grammar that passes cannot overflow it."""
MASK_S, MASK_PATIENCE_S = 0.002, 0.2
"""Longest mean processor time per token, and largest excess over that mean, in seconds. With a vocabulary of
100,000, schemas take a hundredth of it and broad regular expressions half."""
WHITESPACE = r" |\n[ \t]{0,16}"
"""Whitespace between the parts of JSON: a space, or a new line with indentation. Without a limit a small model can produce
whitespace until its last token."""
_LIMITS = LLParserLimits(step_max_items=10_000, max_lexer_states=20_000, verbose_errors=False)
"""Items per mask: with the library's default, an ambiguous grammar takes seconds. Lexer states: each takes 1-2 kB per sequence."""


class _Compiled(NamedTuple):
    """Entry of the cache of compiled grammars."""

    matcher: LLMatcher | str
    """A matcher before the first token, or the reason why the grammar is refused."""
    num_bytes: int
    """Memory that the entry takes."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe. One per engine, because reading a large vocabulary takes about a second."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Raises:
            UserError: llguidance does not support the byte encoding of this tokenizer.
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
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._trial = LimitedProcess("stretto.engine.grammar", json.dumps(spelling).encode(), limit_s=TRIAL_S)
        self._trials = threading.BoundedSemaphore(MAX_TRIALS)
        self._reading: dict[Grammar, Future[_Compiled]] = {}
        """Trials in progress."""

    def compile(self, grammar: Grammar, end_ids: Sequence[int] = (), source: str = "request") -> GrammarState:
        """The grammar's state before the first token. Takes up to seconds, without Python's lock, if it is not in the cache.

        Args:
            end_ids: tokens that end a completion, in addition to the tokenizer's end token.
            source: origin of the grammar, for error messages.

        Raises:
            UserError: the grammar is invalid, too expensive, or matches no text. QueueFull: too many grammars wait for their trial.
        """
        outside = [token for token in end_ids if not 0 <= token < self._vocab]
        assert not outside, f"ends {outside} are outside the vocabulary of {self._vocab}"
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = self._read_once(grammar)
        if isinstance(compiled.matcher, str):
            raise UserError(f"{source}: {grammar.field or f'grammar.{grammar.kind}'}: {compiled.matcher}")
        source = f"{source}: {grammar.field or 'grammar'}"
        ends = frozenset((self._eos_id, *end_ids))
        return GrammarState(compiled.matcher, ends, self._vocab, source, self._tokenizer)

    def _read_once(self, grammar: Grammar) -> _Compiled:
        """As `_read`, into the cache; requests with the same grammar at the same time wait for one trial. Raises QueueFull."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                return known
            found = self._reading.get(grammar)
            is_first = found is None
            if found is None:
                if not self._trials.acquire(blocking=False):
                    raise QueueFull(f"{MAX_TRIALS} grammars wait to be read already; try again later")
                found = self._reading[grammar] = Future[_Compiled]()
        if is_first:
            try:
                compiled = self._read(grammar)
                with self._lock:
                    self._keep(grammar, compiled)
                found.set_result(compiled)
            except BaseException as error:
                found.set_exception(error)
            finally:
                self._trials.release()
                with self._lock:
                    del self._reading[grammar]
        return found.result()

    def _keep(self, grammar: Grammar, compiled: _Compiled) -> None:
        self._compiled[grammar] = compiled
        self._num_bytes += compiled.num_bytes
        while self._num_bytes > MAX_CACHE_BYTES:
            self._num_bytes -= self._compiled.popitem(last=False)[1].num_bytes

    def _read(self, grammar: Grammar) -> _Compiled:
        text_bytes = sys.getsizeof(grammar.text)
        if len(grammar.text) > MAX_CHARS:
            problem = f"{len(grammar.text):,} characters are more than {MAX_CHARS:,}; send a shorter one"
            return _Compiled(problem, text_bytes)
        try:
            answer = self._trial.ask(json.dumps([grammar.kind, grammar.text]).encode()).decode()
        except Overrun as error:
            return _Compiled(f"reading it {error}; send a simpler one", text_bytes)
        num_bytes, _, problem = answer.partition(" ")
        if problem:
            if _is_made_here(grammar):
                problem = re.sub(r"^at \d+\(\d+\): ", "", problem)  # a place in a grammar that the client does not know
            return _Compiled(f"{problem}; {_remedy(grammar)}", text_bytes)
        matcher = LLMatcher(self._tokenizer, _definition(grammar), log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()  # the first mask is the most expensive; copies of the matcher share its tables
        return _Compiled(matcher, text_bytes + int(num_bytes))


class GrammarState:
    """Progress of one sequence in its grammar. Created by `GrammarCompiler.compile`."""

    def __init__(
        self, start: LLMatcher, end_ids: frozenset[int], vocab: int, source: str, tokenizer: LLTokenizer
    ) -> None:
        self._start = start
        self._tokenizer = tokenizer
        self._matcher = start.deep_copy()
        self._vocab = vocab
        self._source = source
        self._debt_s = 0.0  # processor time beyond the mean for the tokens so far
        self._end_ids = end_ids  # the library never sees them
        self._has_ended = False
        end_words = np.zeros(-(-vocab // 32), dtype=np.uint32)
        for token in end_ids:
            end_words[token // 32] |= np.uint32(1 << token % 32)
        self._ends_W = end_words.view(np.int32)

    def fresh(self) -> GrammarState:
        """Another state before the first token."""
        return GrammarState(self._start, self._end_ids, self._vocab, self._source, self._tokenizer)

    def mask(self) -> np.ndarray:
        """int32 [W]: bit b of word w is set if token 32·w + b is allowed next; see `stretto.engine.sampling.process`.

        End tokens are allowed exactly if the accepted text matches the grammar.

        Raises:
            UserError: the grammar is too ambiguous.
        """
        if self._has_ended:
            return self._ends_W.copy()
        mask_W = np.frombuffer(self._timed(self._matcher.compute_bitmask), dtype=np.int32)[: len(self._ends_W)]
        if self._matcher.is_accepting():
            return mask_W | self._ends_W
        return self._spelt(mask_W.copy())

    def _spelt(self, mask_W: np.ndarray) -> np.ndarray:
        """The mask, with the first token that spells the text of an added token in place of the added token itself. Where the library
        sees that the text must follow, it allows the added token alone, and then does not accept it."""
        if np.count_nonzero(mask_W) != 1:  # a tenth of the time of np.flatnonzero
            return mask_W
        word = int(np.argmax(mask_W != 0))
        bits = int(mask_W[word]) & 0xFFFFFFFF
        if bits & (bits - 1):  # several tokens
            return mask_W
        token = 32 * word + bits.bit_length() - 1
        if self._tokenizer.is_special_token(token) and not self._matcher.validate_tokens([token]):
            text = self._matcher.compute_ff_bytes().decode(errors="ignore")
            first = self._tokenizer.greedy_tokenize(text)[0]
            mask_W[word] = 0
            mask_W[first // 32] = np.uint32(1 << first % 32).view(np.int32)
        return mask_W

    def accept(self, token: int) -> bool:
        """Accept the next token; False, without a change, if it is not allowed.

        Raises:
            UserError: the grammar is too ambiguous.
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
        """Whether only the end is allowed, or has been accepted."""
        return self._has_ended or self._matcher.is_stopped()

    def _timed(self, work: Callable[[], T]) -> T:
        """Result of ``work`` by the matcher, with its processor time counted against the limit."""
        started_s = time.thread_time()
        result = work()
        self._debt_s += time.thread_time() - started_s
        problem = _one_line(self._matcher.get_error()) if self._matcher.is_error() else ""
        if self._debt_s > MASK_PATIENCE_S:
            problem = problem or f"takes more than {1e3 * MASK_S:g} ms a token"
        if problem:
            raise UserError(f"{self._source}: {problem}; use a simpler one")
        return result


def _read_tokenizer(spelling: str, vocab: int, eos_id: int) -> LLTokenizer:
    return LLTokenizer(spelling, n_vocab=vocab, eos_token=eos_id)


def _definition(grammar: Grammar) -> str:
    """The grammar in the library's format. Raises ValueError: it is invalid."""
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    try:
        schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if schema is True:  # matches everything; the library accepts options only with an object
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


_DETAILS = re.compile(r"<state>|<non-verbose/>|\n *\d+ \| ")
"""What begins the state of the parser, or the lines of the grammar, in an error message of the library."""


def _remedy(grammar: Grammar) -> str:
    """What the sender of a refused grammar can do."""
    return _REMEDIES["json_schema" if _is_made_here(grammar) else grammar.kind]


def _is_made_here(grammar: Grammar) -> bool:
    """Whether the grammar was made from the schemas of a request."""
    return grammar.kind == "lark" and grammar.field not in ("", "grammar")


def _one_line(message: object) -> str:
    """An error message of the library, shortened to one line."""
    line = one_line(_DETAILS.split(str(message))[0], 200)
    if "oneOf constraints are not supported" in line:
        return "oneOf is supported only where its alternatives cannot overlap, anyOf everywhere"
    return "nothing matches it" if line.startswith("NoExtension") else line


def _try(setup: bytes) -> Callable[[bytes], bytes]:
    """Function of the trial process: from a grammar to "BYTES PROBLEM": the memory of its matcher, and the reason why the grammar is
    refused (empty if it is accepted)."""
    tokenizer = _read_tokenizer(*json.loads(setup))

    def answer(question: bytes) -> bytes:
        try:
            kind, text = json.loads(question)
            definition = _definition(Grammar(kind=kind, text=text))
        except (ValueError, RecursionError) as error:
            return f"0 {_one_line(error)}".encode()
        before_bytes = _allocated_bytes()
        matcher = LLMatcher(tokenizer, definition, log_level=0, limits=_LIMITS)
        started_s = time.process_time()
        problem = "" if any(matcher.compute_bitmask()) else "nothing matches it"
        if matcher.is_error():
            problem = _one_line(matcher.get_error())
        elif time.process_time() - started_s > MASK_PATIENCE_S:
            problem = "its masks take too long"
        return f"{max(0, _allocated_bytes() - before_bytes)} {problem}".encode()

    return answer


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(f"field_{place}", ctypes.c_size_t) for place in range(10)]


def _allocated_bytes() -> int:
    """Memory that this process has allocated with malloc; 0 if the C library cannot tell (it is not glibc 2.33 or later)."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return 0
    function.restype = _MallocInfo
    info = function()
    return int(info.field_4 + info.field_7)  # hblkhd (in mapped blocks) and uordblks (in the heap)


if __name__ == "__main__":
    serve(_try, memory_bytes=_TRIAL_BYTES, stack_bytes=_TRIAL_STACK)
