from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.engine.grammar import MASK_PATIENCE_S, MASK_S, MAX_CHARS, GrammarCompiler, GrammarState
from stretto.engine.request import Grammar, QueueFull, Sampling
from stretto.engine.sampling import Row, process, sample
from stretto.text.stream import Detokenizer
from stretto.text.tokenizer import TURN_END, Tokenizer, train_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
TEXT = [Path(json.__file__).read_text(encoding="utf-8"), json.dumps(SCHEMA), "naïve 中文 ab abc abcabc aab bb"] * 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(TEXT), 420)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


@pytest.fixture(scope="module")
def spelt(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Bytes of the tokens that the patterns below can be made of; special tokens have none."""
    ordinary = set(range(tokenizer.vocab_size)) - tokenizer.special_ids
    pieces = {token: Detokenizer(tokenizer)._bytes(token) for token in ordinary}
    return {token: piece for token, piece in pieces.items() if set(piece) <= set("abc1é".encode())}


def allowed(state: GrammarState, vocab: int) -> set[int]:
    bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
    assert not bits[vocab:].any()
    return set(np.flatnonzero(bits).tolist())


def accept_text(state: GrammarState, tokenizer: Tokenizer, text: str) -> list[bool]:
    return [state.accept(token) for token in tokenizer.encode(text)]


@cache
def partial(pattern: str, text: bytes) -> bool:
    """Whether ``text`` can be continued to a match, by trying all continuations that the test's patterns can need."""
    tails = [
        b"",
        b"a",
        b"b",
        b"c",
        b"bc",
        b"abc",
        b"1",
        b"\xa9",
        b"\xc3\xa9",
        b"abc\xc3\xa9",
        b"c\xc3\xa9",
        b"bc\xc3\xa9",
    ]
    return any(re.fullmatch(pattern.encode(), text + tail) for tail in tails)


@settings(max_examples=40)
@given(pattern=st.sampled_from(["ab*c", "(abc)*", "a|b1?", "[ab]+", "abcé", "(a|ab)(c|bc)"]), data=st.data())
def test_mask_equals_brute_force(
    compiler: GrammarCompiler, tokenizer: Tokenizer, spelt: dict[int, bytes], pattern: str, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(["regex", "lark"]))
    state = compiler.compile(Grammar(kind=kind, text=pattern if kind == "regex" else f"start: /{pattern}/"))
    text = b""
    for _ in range(6):
        ends = re.fullmatch(pattern.encode(), text) is not None
        expected = {token for token, piece in spelt.items() if partial(pattern, text + piece)}
        got = allowed(state, tokenizer.vocab_size)
        assert got - {tokenizer.eos_id} == expected
        assert (tokenizer.eos_id in got) == ends, "the end is allowed exactly when the grammar may end"
        assert state.is_finished == (ends and not expected)
        if not expected:
            break
        forbidden = data.draw(st.sampled_from(sorted(set(range(tokenizer.vocab_size)) - got)))
        assert not state.accept(forbidden)
        token = data.draw(st.sampled_from(sorted(expected)))
        assert state.accept(token)
        text += spelt[token]


def generate(state: GrammarState, tokenizer: Tokenizer, seed: int, end_ids: tuple[int, ...]) -> tuple[list[int], bool]:
    row, ids = Sampling(seed=seed), []
    bias_1V = torch.zeros(1, tokenizer.vocab_size)
    bias_1V[0, [tokenizer.encode(piece)[0] for piece in ('"', "}", ":", "]")]] = 4.0  # or strings would go on and on
    while len(ids) < 300:
        logp_1V = process(bias_1V, [Row(row, ids, 0, state.mask())])
        token = int(sample(logp_1V, [row], [len(ids)]))
        assert state.accept(token)
        if token in end_ids:
            return ids, True
        ids.append(token)
    return ids, False


@given(seed=st.integers(0, 10**9))
@settings(max_examples=15)
def test_random_completions_are_instances_of_the_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    turn_end = tokenizer.rust.token_to_id(TURN_END)
    state = compiler.compile(Grammar(kind="json_schema", text=json.dumps(SCHEMA)), end_ids=[turn_end])
    ids, ended = generate(state, tokenizer, seed, (tokenizer.eos_id, turn_end))
    if ended:
        jsonschema.validate(json.loads(tokenizer.decode(ids)), SCHEMA)
        assert allowed(state, tokenizer.vocab_size) == {tokenizer.eos_id, turn_end}


@pytest.mark.parametrize("text", ['{"a": [1, null, {"é": "中"}]}', "{}", '{\n  "a": -1.5e3\n}'])
def test_json_object_takes_any_object_and_nothing_else(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str
) -> None:
    state = compiler.compile(Grammar(kind="json_object"))
    assert all(accept_text(state, tokenizer, text)) and state.accept(tokenizer.eos_id)
    state = compiler.compile(Grammar(kind="json_object"))
    assert not state.accept(tokenizer.eos_id)
    assert not accept_text(state, tokenizer, "[1]")[0]
    assert not all(accept_text(state, tokenizer, '{"a":' + " " * 99)), "whitespace without end"


def test_the_text_of_an_added_token_can_be_written() -> None:
    """The library allows the added token where a grammar leaves no choice, and does not accept it."""
    trained = train_tokenizer(iter(TEXT), 420)
    trained.rust.add_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(trained.rust, trained.eos_token, None, trained.config)
    compiler = GrammarCompiler(tokenizer)
    for grammar, expected in (
        (Grammar(kind="regex", text="<think>a</think>"), "<think>a</think>"),
        (Grammar(kind="lark", text='start: "a" "<think>" "b"'), "a<think>b"),
        (Grammar(kind="json_schema", text='{"const": "a <think>"}'), '"a <think>"'),
    ):
        state, ids = compiler.compile(grammar), []
        while (token := min(allowed(state, tokenizer.vocab_size))) != tokenizer.eos_id:
            assert state.accept(token)
            ids.append(token)
        assert tokenizer.decode(ids) == expected


def test_states_of_one_grammar_are_apart(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = Grammar(kind="regex", text="abc")
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    before = second.mask()
    assert all(accept_text(first, tokenizer, "abc")) and first.is_finished
    assert (second.mask() == before).all() and not second.is_finished


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar(kind="json_schema", text="{"), "request: grammar.json_schema: not JSON"),
        # Python 3.12 has no recursion limit in C: there it is the stack that ends
        (
            Grammar(kind="json_schema", text="[" * 100_000),
            "request: grammar.json_schema: (not JSON|.*overflowed the stack)",
        ),
        (Grammar(kind="json_schema", text="[1]"), "a schema is an object, not list"),
        (Grammar(kind="json_schema", text='{"type": "objec"}'), "Invalid type: objec"),
        (Grammar(kind="json_schema", text='{"type": "array", "minItems": 2, "maxItems": 1}'), "Unsatisfiable"),
        (Grammar(kind="json_schema", text='{"if": {}}'), "Unimplemented keys"),
        (Grammar(kind="json_schema", text='{"type": "string", "pattern": "("}'), "unclosed group"),
        (Grammar(kind="json_schema", text="false"), "nothing matches"),
        (Grammar(kind="json_schema", text='{"$ref": "https://example.org/x"}'), "grammar.json_schema: Resource"),
        (Grammar(kind="regex", text="(a"), "request: grammar.regex: .*unclosed group"),
        (Grammar(kind="lark", text="start: missing"), 'request: grammar.lark: at 1.8.: unknown name: "missing"; send'),
        (Grammar(kind="lark", text="start: missing", field="tools"), 'request: tools: unknown name: "missing"; send'),
        (
            Grammar(kind="json_schema", text='{"oneOf": [{"type": "string"}, {"maxLength": 2}]}'),
            "request: grammar.json_schema: oneOf is supported only where [^;]*, anyOf everywhere; send a JSON Schema",
        ),
    ],
)
def test_bad_grammars_are_one_line(compiler: GrammarCompiler, grammar: Grammar, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        compiler.compile(grammar)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def chain(length: int) -> str:
    """Of references, each to the next."""
    links = {str(at): {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{at + 1}"}}} for at in range(length)}
    return json.dumps({"$ref": "#/$defs/0", "$defs": {**links, str(length): {}}})


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", nested(64), "recursion limit exceeded"),
        ("json_schema", nested(300), "recursion limit exceeded"),
        ("json_schema", chain(1000), "reading it overflowed the stack; send a simpler one"),
        ("json_schema", '{"$ref":"#"}', "nothing matches it"),
        ("json_schema", '{"const": "\\ud800"}', "hex escape"),
        ("regex", r"[^\s\S]", "nothing matches it"),
        ("regex", "\ud800", "surrogates not allowed"),
        ("regex", "a" * (MAX_CHARS + 1), "characters are more than"),
        ("lark", "start: start", "nothing matches it"),
        (
            "lark",
            "start: r0\n" + "\n".join(f'r{at}: "a" r{at + 1}' for at in range(5000)) + '\nr5000: "b"',
            "overflowed",
        ),
    ],
    ids=range(10),
)
def test_what_cannot_be_followed_is_refused_at_once(
    compiler: GrammarCompiler, kind: str, text: str, message: str
) -> None:
    for source in ("first", "second"):  # the second is remembered, and says whose it is
        with pytest.raises(UserError, match=rf"^{source}: grammar\.{kind}: .*{message}") as caught:
            compiler.compile(Grammar(kind=kind, text=text), source=source)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.slow
def test_reading_takes_no_longer_than_it_may(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.engine.grammar.TRIAL_S", 0.3)
    parts = [{"type": "string", "pattern": f".*{chr(97 + at)}.{{{5 + at}}}x"} for at in range(20)]
    impatient = GrammarCompiler(tokenizer)
    with pytest.raises(UserError, match=r"reading it took more than 0\.3 processor seconds; send a simpler one"):
        impatient.compile(Grammar(kind="json_schema", text=json.dumps({"allOf": parts})))
    assert impatient.compile(Grammar(kind="regex", text="a")).accept(tokenizer.encode("a")[0])


def test_equal_grammars_at_the_same_time_are_read_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    cold, num_read = GrammarCompiler(tokenizer), 0
    read = cold._read

    def counted(grammar: Grammar) -> Any:
        nonlocal num_read
        num_read += 1
        return read(grammar)

    monkeypatch.setattr(cold, "_read", counted)
    with ThreadPoolExecutor(40) as pool:
        states = list(pool.map(cold.compile, [Grammar(kind="regex", text="[ab]+")] * 40))
    assert num_read == 1 and len(states) == 40
    with pytest.raises(UserError):
        cold.compile(Grammar(kind="regex", text="("))
    assert not cold._reading


def test_those_who_wait_to_be_read_are_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Grammar(kind="regex", text="known")
    compiler.compile(known)
    monkeypatch.setattr(compiler, "_trials", BoundedSemaphore(1))
    assert compiler._trials.acquire()
    with pytest.raises(QueueFull, match="try again later"):
        compiler.compile(Grammar(kind="regex", text="another"))
    compiler.compile(known)


def test_the_cache_of_compiled_grammars_is_bounded_in_bytes(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar of 1,000 keywords takes megabytes, one of a single word less than a tenth of that."""
    monkeypatch.setattr("stretto.engine.grammar.MAX_CACHE_BYTES", 16 << 20, raising=False)
    compiler = GrammarCompiler(tokenizer)
    wide = [Grammar(kind="lark", text="start: " + " ".join(f'"k{at}x{i}"' for i in range(1000))) for at in range(5)]
    small = Grammar(kind="regex", text="small")
    for grammar in (*wide, small):
        compiler.compile(grammar)
    assert len(compiler._compiled) < 5 and {wide[4], small} <= compiler._compiled.keys()
    monkeypatch.setattr("stretto.engine.grammar.MAX_CACHE_BYTES", 1 << 20)
    state = compiler.compile(wide[0])  # larger than the whole cache: compiled, but not kept
    assert state.mask().any() and wide[0] not in compiler._compiled
    assert compiler._num_bytes <= 1 << 20


def walk(state: GrammarState, tokenizer: Tokenizer, num_tokens: int, wanted: str = "") -> str:
    """Random text of a grammar; of the tokens that may come, those made of ``wanted`` characters first."""
    rng, ids = random.Random(0), []
    while len(ids) < num_tokens and not state.is_finished:
        choices = sorted(allowed(state, tokenizer.vocab_size))
        text = {token: tokenizer.decode([token]) for token in choices}
        token = rng.choice([at for at in choices if text[at] and set(text[at]) <= set(wanted)] or choices)
        assert state.accept(token)
        ids.append(token)
    return tokenizer.decode(ids)


def test_json_does_not_run_on_in_whitespace(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """A model that likes nothing better than whitespace still finishes an object of two fields."""
    fields = {"city": {"enum": ["Rome", "Oslo"]}, "people": {"type": "integer", "maximum": 10**6, "minimum": 0}}
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    state = compiler.compile(Grammar(kind="json_schema", text=json.dumps(schema)))
    text = walk(state, tokenizer, 200, wanted=" \t\r\n")
    assert set(json.loads(text)) == {"city", "people"}
    assert 1 < max(map(len, re.findall(r"\s+", text))) <= 17


@pytest.mark.parametrize("rule", ["x x | /[a-z ]/", "x x x | x x | /[a-z ]/ | "])
def test_what_is_too_ambiguous_is_not_followed(compiler: GrammarCompiler, tokenizer: Tokenizer, rule: str) -> None:
    with pytest.raises(UserError, match=r"request: grammar: .*; use a simpler one"):
        walk(compiler.compile(Grammar(kind="lark", text=f"start: x\nx: {rule}")), tokenizer, 400, "abc xyz")


def test_masks_may_be_dear_once_but_not_always(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, cost_s = 0.0, 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += cost_s
        return now_s

    monkeypatch.setattr("stretto.engine.grammar.time.thread_time", clock)
    state = compiler.compile(Grammar(kind="regex", text="[a-z]*"))
    for cost_s in (MASK_PATIENCE_S / 2, MASK_S / 4, MASK_PATIENCE_S / 2):
        state.mask()
        cost_s = MASK_S / 4
        walk(state, tokenizer, 400, wanted="abc")
    with pytest.raises(UserError, match="takes more than 2 ms a token"):
        for cost_s in [2 * MASK_S] * 200:  # noqa: B007
            walk(state, tokenizer, 1, wanted="abc")


def test_a_grammar_that_grows_too_wide_is_refused(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(text)[0] for text in "ab")
    grammar = 'start: "b" "a" wide | "b" "b"\nwide: ' + " | ".join(f'"z" "w{at}" wide?' for at in range(2500))
    state = compiler.compile(Grammar(kind="lark", text=grammar))
    assert state.accept(b)
    with pytest.raises(UserError, match="Current row has"):
        state.accept(a)
        state.mask()
