from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.engine.grammar import GrammarCompiler, GrammarState
from stretto.engine.request import Grammar, Sampling
from stretto.engine.sampling import process, sample
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
    ordinary = set(range(tokenizer.vocab_size)) - tokenizer.special_ids()
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


@given(steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10**6)), max_size=20))
def test_rollback_undoes_accept(compiler: GrammarCompiler, tokenizer: Tokenizer, steps: list[tuple[int, int]]) -> None:
    state = compiler.compile(Grammar(kind="regex", text="a(b|bc)*d?"))
    masks = [state.mask()]
    for num_back, choice in steps:
        num_back = min(num_back, len(masks) - 1)
        state.rollback(num_back)
        del masks[len(masks) - num_back :]
        assert (state.mask() == masks[-1]).all()
        choices = sorted(allowed(state, tokenizer.vocab_size))
        assert state.accept(choices[choice % len(choices)])  # the end too, and again and again after it
        masks.append(state.mask())
    state.rollback(len(masks) - 1)
    assert (state.mask() == masks[0]).all()


def generate(state: GrammarState, tokenizer: Tokenizer, seed: int, end_ids: tuple[int, ...]) -> tuple[list[int], bool]:
    row, ids = Sampling(seed=seed), []
    bias_1V = torch.zeros(1, tokenizer.vocab_size)
    bias_1V[0, [tokenizer.encode(piece)[0] for piece in ('"', "}", ":", "]")]] = 4.0  # or strings would go on and on
    while len(ids) < 300:
        logp_1V = process(bias_1V, [row], [ids], [0], [state.mask()])
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
        state.rollback(1)
        assert {tokenizer.eos_id, turn_end} <= allowed(state, tokenizer.vocab_size)


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
        (Grammar(kind="json_schema", text="[" * 100_000), "request: grammar.json_schema: not JSON"),
        (Grammar(kind="json_schema", text="[1]"), "a schema is an object, not list"),
        (Grammar(kind="json_schema", text='{"type": "objec"}'), "Invalid type: objec"),
        (Grammar(kind="json_schema", text='{"type": "array", "minItems": 2, "maxItems": 1}'), "Unsatisfiable"),
        (Grammar(kind="json_schema", text='{"if": {}}'), "Unimplemented keys"),
        (Grammar(kind="json_schema", text='{"type": "string", "pattern": "("}'), "unclosed group"),
        (Grammar(kind="json_schema", text="false"), "nothing matches"),
        (Grammar(kind="json_schema", text='{"$ref": "https://example.org/x"}'), "grammar.json_schema: Resource"),
        (Grammar(kind="regex", text="(a"), "request: grammar.regex: .*unclosed group"),
        (Grammar(kind="lark", text="start: missing"), "request: grammar.lark: .*unknown name"),
    ],
)
def test_bad_grammars_are_one_line(compiler: GrammarCompiler, grammar: Grammar, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        compiler.compile(grammar)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
