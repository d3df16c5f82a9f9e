"""HTTP requests that nobody should send, from a seed: valid ones of every endpoint, and what can be done to them.

A request starts as one that must be answered with a 2xx. Most are then bent: in the tree of their body (wrong types, extreme
numbers, unknown names, half characters, depth, size, grammars that never end), in its bytes (cut, flipped, another
encoding), in their head (method, path, lengths, hosts, keys, hundreds of headers), or in that the client hangs up midway.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

MOST_TOKENS = 8
"""Of most answers: a body's fate is mostly known before its first token."""
ORIGIN = "http://page.example"
"""A page that the server lets in."""


@dataclass(frozen=True, slots=True)
class World:
    """What valid requests must know. Written by the bench."""

    model: str
    presets: tuple[str, ...]
    vocab_size: int
    checkpoint: Path
    """Whose weights /admin/load_weights may load again."""
    key: str
    admin_key: str


@dataclass(frozen=True, slots=True)
class Case:
    """One request as it goes over the wire. Written by `make_case`."""

    number: int
    kind: str
    """Endpoint, and what was done to it."""
    raw: bytes
    is_valid: bool
    """Nothing was done to it: the answer is a 2xx."""
    is_whole: bool
    """Its framing is right: there is an answer."""
    sends: int | None = None
    """Bytes after which the client hangs up; None: it sends them all."""
    reads: int | None = None
    """Bytes of the answer after which the client hangs up; None: it reads them all."""

    def dump(self) -> dict[str, Any]:
        """As JSON can hold it."""
        fields = {name: getattr(self, name) for name in Case.__slots__}
        return fields | {
            "raw": base64.b64encode(self.raw).decode(),
            "body": self.raw[-4000:].decode("utf-8", "replace"),
        }

    @staticmethod
    def load(fields: Mapping[str, Any]) -> Case:
        """From `dump`."""
        known = {name: fields[name] for name in Case.__slots__}
        return Case(**{**known, "raw": base64.b64decode(fields["raw"])})


@dataclass(frozen=True, slots=True)
class _Http:
    """A request whose body is still a tree, or bytes already."""

    name: str
    method: str
    path: str
    tree: Any = None
    """None: no body."""
    body: bytes | None = None
    key: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    done: tuple[str, ...] = ()
    """What was done to it."""
    is_whole: bool = True

    def bent(self, how: str, **changes: Any) -> _Http:
        return replace(self, done=(*self.done, how), **changes)


def make_case(seed: int, number: int, world: World) -> Case:
    """Request ``number`` of ``seed``; the same each time."""
    rng = Random(f"{seed}:{number}")
    names = list(ENDPOINTS)
    http = ENDPOINTS[rng.choices(names, [WEIGHTS.get(name, 1) for name in names])[0]](rng, world)
    if rng.random() < 0.8:
        for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
            http = _bend_tree(rng, http)
    if http.body is None and http.tree is not None:
        http = replace(http, body=_dumped(rng, http.tree))
    if rng.random() < 0.12:
        http = _bend_bytes(rng, http)
    if rng.random() < 0.15:
        http = rng.choice(HEAD_BENDS)(rng, http)
    raw = _framed(http)
    sends = reads = None
    if rng.random() < 0.06:
        sends, http = rng.randrange(len(raw)), http.bent("hangs up sending")
    elif rng.random() < 0.06:
        reads, http = rng.choice((0, 1, 20, 200, 400, 1000)), http.bent("hangs up reading")
    kind = ", ".join([http.name, *http.done])
    return Case(number, kind, raw, not http.done, http.is_whole and sends is None, sends, reads)


def _framed(http: _Http) -> bytes:
    given = {name.lower() for name, _ in http.headers}
    headers = [] if b"host" in given else [(b"Host", b"localhost")]
    if http.key and b"authorization" not in given:
        headers.append((b"Authorization", b"Bearer " + http.key.encode()))
    if http.body is not None and b"content-type" not in given:
        headers.append((b"Content-Type", b"application/json"))
    if http.body is not None and not given & {b"content-length", b"transfer-encoding"}:
        headers.append((b"Content-Length", str(len(http.body)).encode()))
    headers += [*http.headers, (b"Connection", b"close")]
    version = b"HTTP/1.0" if "HTTP/1.0" in http.done else b"HTTP/1.1"
    first = b" ".join(
        (http.method.encode("utf-8", "surrogatepass"), http.path.encode("utf-8", "surrogatepass"), version)
    )
    lines = [first, *(name + b": " + value for name, value in headers)]
    return b"\r\n".join([*lines, b"", http.body or b""])


def _dumped(rng: Random, tree: Any) -> bytes:
    separators = rng.choice(((",", ":"), (", ", ": ")))
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5, separators=separators)
    return text.encode("utf-8", "surrogatepass")


# Valid requests. ------------------------------------------------------------------------------------------------------


def _text(rng: Random) -> str:
    return " ".join(
        rng.choice(("The", "cat", "sat", "über", "東京", "🙂", "{}", "42", "\n", "x = 1"))
        for _ in range(rng.randint(1, 12))
    )


def _schema(rng: Random) -> dict[str, Any]:
    return rng.choice(
        (
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            {"enum": ["red", "green"]},
            {"anyOf": [{"type": "null"}, {"const": 1}]},
            {"$defs": {"n": {"type": "null"}}, "$ref": "#/$defs/n"},
        )
    )


def _function(rng: Random) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    return {"name": rng.choice(("add", "look-up", "f.g")), "description": _text(rng), "parameters": parameters}


def _messages(rng: Random) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "system", "content": _text(rng)}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(0, 2)):
        turns += [{"role": "user", "content": _text(rng)}, {"role": "assistant", "content": _text(rng)}]
    if rng.random() < 0.1:
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        turns += [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        ]
    parts = [{"type": "text", "text": _text(rng)}]
    return [*turns, {"role": "user", "content": _text(rng) if rng.random() < 0.8 else parts}]


def _generation(rng: Random, world: World) -> dict[str, Any]:
    """Fields of every generating endpoint, few at a time."""
    size = {"layers": rng.randint(2, 4), "experts": rng.choice((2, 4, 8)), "top_k": rng.randint(1, 2)}
    options: dict[str, Callable[[], Any]] = {
        "model": lambda: rng.choice((world.model, *(f"{world.model}:{preset}" for preset in world.presets))),
        "stream": lambda: rng.random() < 0.7,
        "temperature": lambda: rng.choice((0, 0.7, 1.0, 2.0)),
        "top_p": lambda: rng.choice((0.1, 0.9, 1.0)),
        "top_k": lambda: rng.choice((0, 1, 5)),
        "min_p": lambda: rng.choice((0.0, 0.05)),
        "repetition_penalty": lambda: rng.choice((0.9, 1.1)),
        "presence_penalty": lambda: rng.choice((-2, 0.5)),
        "frequency_penalty": lambda: rng.choice((-0.5, 2)),
        "logit_bias": lambda: {str(rng.randrange(world.vocab_size)): rng.choice((-100, 5, 100)) for _ in range(3)},
        "seed": lambda: rng.choice((0, 7, -1, 2**40)),
        "min_tokens": lambda: 1,
        "ignore_eos": lambda: rng.random() < 0.5,
        "stop": lambda: rng.choice(("x", ["a", "the"], ["\n"])),
        "stop_token_ids": lambda: [rng.randrange(world.vocab_size)],
        "elastic": lambda: rng.choice(("corner", size, {"prefill": "full", "answer": {"preset": "full", "top_k": 1}})),
        "return_token_ids": lambda: True,
        "return_routes": lambda: rng.random() < 0.5,
        "user": lambda: _text(rng),
    }
    return {name: make() for name, make in options.items() if rng.random() < 0.15}


def _shape(rng: Random) -> dict[str, Any]:
    """At most one of the fields that say what an answer must match."""
    chosen = rng.random()
    if chosen > 0.3:
        return {}
    return (
        {"regex": rng.choice((r"[a-c]{1,4}", r"\d+", "yes|no"))}
        if chosen < 0.15
        else {"grammar": 'start: ("a" | "b")+'}
    )


def _chat(rng: Random, world: World) -> _Http:
    tree = {"messages": _messages(rng), "max_tokens": rng.randint(1, MOST_TOKENS), **_generation(rng, world)}
    shape = rng.random()
    if shape < 0.15:
        kinds = (
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "s", "schema": _schema(rng)}},
        )
        tree["response_format"] = rng.choice(kinds)
    elif shape < 0.35:
        tree["tools"] = [{"type": "function", "function": _function(rng)}]
        named = {"type": "function", "function": {"name": tree["tools"][0]["function"]["name"]}}
        tree["tool_choice"] = rng.choice(("auto", "none", "required", named))
        tree["parallel_tool_calls"] = rng.random() < 0.5
    else:
        tree |= _shape(rng)
    if rng.random() < 0.2:
        tree |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
    if rng.random() < 0.15:
        tree["n"] = rng.randint(1, 3)
    return _Http("chat", "POST", "/v1/chat/completions", tree, key=world.key)


def _completion(rng: Random, world: World) -> _Http:
    ids = [rng.randrange(world.vocab_size) for _ in range(rng.randint(1, 20))]
    prompt = rng.choice((_text(rng), ids, [_text(rng), _text(rng)], [ids, ids[:1]]))
    tree = {"prompt": prompt, "max_tokens": rng.randint(1, MOST_TOKENS), **_generation(rng, world), **_shape(rng)}
    if rng.random() < 0.2:
        tree |= {"logprobs": rng.randint(0, 5), "echo": rng.random() < 0.5}
    return _Http("completions", "POST", "/v1/completions", tree, key=world.key)


def _responses(rng: Random, world: World) -> _Http:
    tree = {"max_output_tokens": rng.randint(1, MOST_TOKENS), **_generation(rng, world)}
    tree["input"] = _text(rng)
    if rng.random() < 0.4:
        call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'}
        output = {"type": "function_call_output", "call_id": "c", "output": "2"}
        said = {"role": "user", "content": [{"type": "input_text", "text": _text(rng)}]}
        tree["input"] = [said, *([call, output] if rng.random() < 0.5 else [])]
    if rng.random() < 0.2:
        tree["text"] = {"format": {"type": "json_schema", "name": "s", "schema": _schema(rng)}}
    elif rng.random() < 0.2:
        tree["tools"] = [{"type": "function", **_function(rng)}]
    if rng.random() < 0.2:
        tree["instructions"] = _text(rng)
    return _Http("responses", "POST", "/v1/responses", tree, key=world.key)


def _short_chat(rng: Random, world: World) -> _Http:
    tree = {"messages": _messages(rng), "max_tokens": rng.randint(1, MOST_TOKENS), "temperature": 0.5, "seed": 3}
    return _Http("short chat", "POST", "/api/ernie-5.1/chat", tree, key=world.key)


def _tokenize(rng: Random, world: World) -> _Http:
    tree = {"prompt": _text(rng)} if rng.random() < 0.5 else {"messages": _messages(rng)}
    return _Http("tokenize", "POST", "/tokenize", tree, key=world.key)


def _detokenize(rng: Random, world: World) -> _Http:
    tree = {"tokens": [rng.randrange(world.vocab_size) for _ in range(rng.randint(1, 30))]}
    return _Http("detokenize", "POST", "/detokenize", tree, key=world.key)


def _load_weights(rng: Random, world: World) -> _Http:
    """Of the network that is served: answers stay what they are."""
    tree = {"version": rng.randrange(1, 10**6), "path": str(world.checkpoint), "keep_cache": rng.random() < 0.5}
    return _Http("load_weights", "POST", "/admin/load_weights", tree, key=world.admin_key)


def _read(rng: Random, world: World) -> _Http:
    size = "&".join(rng.sample(("layers=2", "experts=2", "top_k=1"), rng.randint(0, 3)))
    paths = ("/v1/models", f"/v1/models/{world.model}", "/api/info", f"/api/cost?{size}", "/health", "/metrics", "/")
    return _Http("read", "GET", rng.choice(paths), key=world.key)


def _preflight(rng: Random, world: World) -> _Http:
    """What a browser asks before a page of another origin may post."""
    asked = ((b"Origin", ORIGIN.encode()), (b"Access-Control-Request-Method", b"POST"))
    wanted = (b"Access-Control-Request-Headers", b"authorization, content-type")
    return _Http("preflight", "OPTIONS", "/v1/chat/completions", headers=(*asked, wanted))


ENDPOINTS: Mapping[str, Callable[[Random, World], _Http]] = {
    "chat": _chat,
    "completions": _completion,
    "responses": _responses,
    "short chat": _short_chat,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
    "load_weights": _load_weights,
    "read": _read,
    "preflight": _preflight,
}
WEIGHTS = {"chat": 10, "completions": 8, "responses": 6, "short chat": 2, "tokenize": 3, "detokenize": 2, "read": 2}
"""How often each endpoint is asked, where not as often as any."""

# What is done to the tree of a body. -----------------------------------------------------------------------------------


def _nested(depth: int, inner: Any, wrap: Callable[[Any], Any]) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def _in_list(inner: Any) -> Any:
    return [inner]


def _in_field(inner: Any) -> Any:
    return {"a": inner}


def _in_items(inner: Any) -> Any:
    return {"items": inner, "type": "array"}


def _in_schema(inner: Any) -> Any:
    return {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False}


# Tables of values, not code: one line each would bury what is done with them.
# fmt: off
NUMBERS = (
    0, -1, 1, 2, 65, 128, 129, 1023, 1024, 1025, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**40,
    -(2**31), -(2**63), -(10**40), 0.5, -0.0, 1e-5, 1e-320, 5e-324, 1e308, -1e308, math.inf, -math.inf, math.nan,
)
STRINGS = (
    "", " ", "\x00", "\n", "a", "0", "-1", "1e5", "true", "null", "full", "corner", "auto", "text", "function", "user",
    "\ud800", "a\udfff b", "\ufffd", "\ufeff", "\u202e", "\ue0000\ue001", "\ue00099\ue001", "🙂" * 100, "e" + "\u0301" * 500,
    "<|im_end|>", "<|im_start|>system\n", "<tool_call>", '<tool_call>{"name": "add"', "</think>", "{{ 7 * 7 }}", "%s%n",
    "ﷺ" * 200, "a" * 3000, "word " * 600, "\\ud800", "\r\n\r\nGET / HTTP/1.1", "$ref", "__class__", "../../etc/passwd",
)
NAMES = (
    "Temperature", "", "$ref", "ünï", "\n", "\ud800", "a" * 5000, "__class__", "model_config", "str", "0", "a.b", "🙂", "[key]",
    "type", "schema", "schema_", "input", "prompt", "messages", "tools", "n", "best_of", "max_tokens", "logprobs", "elastic",
    "audio", "stream", "stream_options", "store", "include", "text", "conversation", "tokens", "checksum", "x-guidance",
)
REGEXES = (
    r"[^\s\S]", "(a{1,1000}){1,1000}", "(a*)*b", "(?P<x>", "\\", "a{999999999}", "(?=a)b", r"\p{L}+", "(" * 200, "[" * 500,
    ".{0,100000}", "(a?){300}a{300}", r"\b\B", "(?i)ß", r"(.*)\1", "[a-", "[z-a]", "\x00", r"\x{110000}", "^$", "(?s).*",
    "((a|b)*c|(d|e)*f)*", "(" * 60 + "a" + ")*" * 60, "[\U00010000-\U0010ffff]{50}", "(.|.)*(.|.)*x", "\ud800", "(?#",
    "a{2,1}", "(?x) # ", "a|" * 5000,
)
GRAMMARS = (
    "start: start", "start: a", 'start: "a"\nstart: "b"', "start: /[/", "start:", "x: y", 'start: "a"*', "\x00",
    'start: x\nx: x x | "a" | ""', 'start: "x" | ' + " | ".join(f'"w{number}"' for number in range(2000)), "start: @x",
    "%import common.INT\nstart: INT", "start: /a/ start", "start: <|im_end|>", 'start: ("a"?)~300', "start: /(a?){300}a{300}/",
    'start: %json {"$ref": "#"}', "start: %json {", 'start[lazy]: /.*/ "x"', '%llguidance {"x": 1}', "start: <[*]>",
    'start: a\na: b\nb: c\nc: a | "x"', "start: " + "(" * 300 + '"a"' + ")" * 300, 'start: "\\ud800"', "start: !%%",
    "start: /" + "a|" * 3000 + "/", '%ignore /.*/\nstart: "a"', 'start: s s s s s s s s\ns: s s | "a" | "aa" | ""',
    'start: "a"{1000000}', 'start[max_tokens=0]: "a"', "start: <[0-1000000]>",
)
SCHEMAS: tuple[Any, ...] = (
    True, False, {}, [], {"$ref": "#"}, {"$ref": "http://127.0.0.1/x"}, {"$ref": "#/$defs/x"}, {"$ref": 5}, {"not": {}},
    {"allOf": [{"$ref": "#"}]}, {"anyOf": [{"const": number} for number in range(5000)]}, {"enum": []}, {"type": []},
    {"type": "none"}, {"const": 1e308}, {"minimum": 5, "maximum": 1}, {"multipleOf": 1e-300}, {"multipleOf": 0},
    {"type": "string", "minLength": 10**9}, {"type": "string", "maxLength": -1}, {"type": "array", "minItems": 10**6},
    {"type": "array", "maxItems": -1}, {"pattern": "("}, {"type": "string", "pattern": r"[^\s\S]"}, {"format": "no-such"},
    {"type": "string", "pattern": "(a{1,1000}){1,1000}"}, {"type": "string", "format": "uuid"}, {"uniqueItems": True},
    {"patternProperties": {"[": {}}}, {"if": {}, "then": False}, {"propertyNames": {}}, {"dependentRequired": {}},
    {"$defs": {"t": {"type": "object", "properties": {each: {"$ref": "#/$defs/t"} for each in "lr"}}}, "$ref": "#/$defs/t"},
    {"type": "object", "properties": {f"p{number}": {} for number in range(1000)}, "required": ["p0", "p999"]},
    {"x-guidance": {"whitespace_pattern": "("}}, {"x-guidance": {"item_separator": ""}}, {"x-guidance": 5}, {"oneOf": [{}, {}]},
    {"x-guidance": {"lenient": True}, "type": 5}, {"properties": {"": {}, "\ud800": {}, "\x00": {}}},
    _nested(64, {}, _in_schema), _nested(300, {"type": "null"}, _in_schema), _nested(40, {}, _in_items),
    {"type": "integer", "minimum": -1e308}, {"required": ["a"], "properties": {"a": False}},
)
SIZES: tuple[Any, ...] = (
    "corner", "half", "full", "", "\ud800", {}, {"layers": 0}, {"layers": 2**40}, {"experts": 1, "top_k": 2}, {"top_k": 0},
    {"layers": -1, "experts": -1}, {"preset": "corner", "layers": 4}, {"prefill": "corner", "answer": "full"},
    {"thinking": "full"}, {"answer": "corner", "layers": 2}, {"answer": {"answer": 1}}, {"layers": [0, 1]}, {"layers": True},
    {"experts": {"layers": 1}}, {"prefill": {"experts": 2}, "answer": {"experts": 8}},
)
_USER = {"role": "user", "content": "x"}
HOSTILE: Mapping[str, tuple[Any, ...]] = {
    "regex": REGEXES, "grammar": GRAMMARS, "schema": SCHEMAS, "parameters": SCHEMAS, "elastic": SIZES,
    "path": ("", "/", "/dev/null", "/proc/self", "\x00", "a" * 5000, "\ud800", "~", ".", "/etc/passwd", "/no/such/folder"),
    "version": (2**31 - 1, 2**31, 2**63, 2**64, -1, 1.5, "1", True),
    "checksum": ("", "0" * 64, "\ud800"),
    "logit_bias": (
        {"0": 1e308}, {"0": -1e308}, {"-1": 1}, {"99999999999999999999": 1}, {"a": 1}, {"1.5": 1}, {"0": "x"},
        {str(token): 100 for token in range(512)}, {str(token): -100 for token in range(512)},
    ),
    "repetition_penalty": (1e-320, 5e-324, 1e308, 0, -1, 1e-30),
    "temperature": (1e-320, 1e-6, 100, 101, 1e308, -1e-9),
    "top_p": (1e-320, 0, 1.0000001, 5e-324),
    "seed": (-1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, 1.0),
    "n": (0, -1, 64, 65, 128, 10**9),
    "max_tokens": (-1, 0, 1, 1023, 1024, 2**31, 10**40, 1.5, "8"),
    "stop": (["a"] * 16, ["a"] * 17, [""], "\ud800", ["\x00"], "a" * 5000, [["a"]], ["\ufffd"]),
    "prompt": (
        [[]], [""], [0] * 600, [[0]] * 65, ["a", 1], [1.5], [True], [2**40], [[0], "a"], "", [[[0]]], "<|im_end|>" * 50,
    ),
    "messages": (
        [{"role": "user", "content": None}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}, _USER],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 2000}}]}, _USER],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": _nested(150, 1, _in_field)}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":' * 900 + "1" + "}" * 900}}]}, _USER],
        [{"role": "tool", "content": "x"}, {"role": "system", "content": "y"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [_USER | {"name": "\ud800"}], [{"role": "assistant", "content": "x", "reasoning_content": "y" * 100}], [_USER] * 300,
    ),
    "input": (
        [], [{}], [{"type": "reasoning"}], [{"type": "function_call"}], [{"type": "function_call_output", "output": None}],
        [{"role": "king", "content": "x"}],
    ),
    "tool_choice": (
        "required", {"type": "function"}, {"type": "function", "function": {"name": "g"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    ),
    "tokens": ([], [-1], [2**40], [[0]], [1.5], [0] * 20000, "abc"),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": 1}, {"a": 1}, []),
}
"""Values made for a field."""
# fmt: on


def _wild(rng: Random) -> Any:
    """A value that fits nowhere."""
    return rng.choice(
        (
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(STRINGS),
            lambda: rng.choice((None, True, False, [], {}, [[]], [{}], {"": None})),
            lambda: rng.choice(rng.choice(list(HOSTILE.values()))),
            lambda: _nested(rng.choice((5, 64, 150, 300, 900)), rng.choice((1, "x", {})), rng.choice((_in_list, _in_field))),
            lambda: [rng.choice((0, "a", None, 1.5))] * rng.choice((100, 5000)),
        )
    )()  # fmt: skip


def _places(node: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a tree; not those too deep for anybody to look there."""
    keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in list(keys)[:200]:
        yield node, key
        if depth < 12:
            yield from _places(node[key], depth + 1)


def _bend_tree(rng: Random, http: _Http) -> _Http:
    if not isinstance(http.tree, dict):
        return http
    tree = json.loads(json.dumps(http.tree))
    places = list(_places(tree))
    inner = [(tree, None), *((node[key], None) for node, key in places if isinstance(node[key], dict))]
    known = [(node, key) for node, key in places if key in HOSTILE]
    kind = rng.choice(("field", "field", "made", "made", "value", "drop", "name", "name", "wrap", "root"))
    if kind == "made" and known:
        node, key = rng.choice(known)
        node[key], what = rng.choice(HOSTILE[key]), f"{key} made"
    elif kind == "field":
        key = rng.choice(list(HOSTILE))
        tree[key], what = rng.choice(HOSTILE[key]), f"{key} set"
    elif kind == "name":
        name = rng.choice(NAMES)
        rng.choice(inner)[0][name], what = _wild(rng), "name added"
    elif kind == "root" and rng.random() < 0.2:
        return http.bent("not an object", tree=_wild(rng))
    elif not places:
        return http
    else:
        node, key = rng.choice(places)
        if kind == "drop":
            del node[key]
        elif kind == "wrap":
            node[key] = rng.choice((_in_list, _in_field))(node[key])
        else:
            node[key] = _wild(rng)
        what = f"{key if isinstance(key, str) and len(key) < 20 else 'item'} {kind}"
    return http.bent(what, tree=tree)


# What is done to its bytes, and to its head. ----------------------------------------------------------------------------


def _bend_bytes(rng: Random, http: _Http) -> _Http:
    body = http.body or b""
    at = rng.randrange(len(body) + 1)
    bends: dict[str, Callable[[], bytes]] = {
        "cut": lambda: body[:at],
        "byte flipped": lambda: body[: at - 1] + bytes([rng.randrange(256)]) + body[at:] if at else b"\xff",
        "garbage within": lambda: body[:at] + rng.randbytes(rng.randint(1, 30)) + body[at:],
        "garbage behind": lambda: body + rng.choice((b"}", b"\x00", b"{}", b" " * 1000, b"// x")),
        "utf-16": lambda: body.decode("utf-8", "replace").encode("utf-16"),
        "byte order mark": lambda: b"\xef\xbb\xbf" + body,
        "latin-1": lambda: body.decode("utf-8", "replace").encode("latin-1", "replace") + b"\xfc",
        "name twice": lambda: body.replace(b"{", b'{"n": 1, "n": 2, ', 1),
        "empty": lambda: b"",
        "gzip": lambda: gzip.compress(body, mtime=0),
        "noise": lambda: rng.randbytes(rng.choice((1, 10, 5000))),
        "depth": lambda: rng.choice((b"[", b'{"a":')) * rng.choice((1000, 100_000)),
        "big number": lambda: b'{"max_tokens": 1' + b"0" * rng.choice((300, 5000)) + b"}",
        "large": lambda: b'{"prompt": "' + b"a " * rng.choice((20_000, 500_000, 2_500_000)) + b'"}',
        "many": lambda: b'{"messages": [' + b"{}," * rng.choice((1000, 100_000)) + b"{}]}",
    }
    names = list(bends)
    name = rng.choices(names, [0.1 if name in ("large", "many", "depth") else 1 for name in names])[0]
    return http.bent(name, body=bends[name]())


_Headers = tuple[tuple[bytes, bytes], ...]


def _other_method(rng: Random, http: _Http) -> _Http:
    known, unknown = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"), ("BREW", "get", "A" * 300)
    method = rng.choice(known + unknown)
    return http.bent("method", method=method, is_whole=http.is_whole and method in known)


def _bad_line(rng: Random, http: _Http) -> _Http:
    path = rng.choice(("", " /", "/\ud800", "/ü", "/ / HTTP/1.1", "*", "/\x00", "/" + "a" * 70_000))
    return http.bent("request line", path=path, is_whole=False)


def _other_path(rng: Random, http: _Http) -> _Http:
    bent = (f"{http.path}/", f"/{http.path}", f"{http.path}?{'a=1&' * 500}", http.path.upper(), f"{http.path}%00")
    odd = ("/v1/models/" + "x" * 3000, "/v1/models/%0a", "/v1/models/", "/%ff%fe", "/../..%2f..%2fetc/passwd", "/admin")
    costs = ("/api/cost?layers=9999999999999999999999", "/api/cost?a=b&%00=1&layers=%F0", "/api/cost?layers=0")
    others = ("//evil.example/", "http://evil.example/v1/models", "/app.js", "/favicon.ico", "/docs", "/openapi.json")
    return http.bent("path", path=rng.choice((*bent, *odd, *costs, *others)))


def _chunked(rng: Random, http: _Http) -> _Http:
    body, pieces = http.body or b"", []
    while body:
        size = rng.randint(1, 400)
        piece, body = body[:size], body[size:]
        pieces.append(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    good, bad = (b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n"), (b"", b"-1\r\n", b"zz\r\n\r\n", b"ffffffffffffffffff\r\n")
    end = rng.choice(good + bad)
    chunked = http.bent("chunked", body=b"".join(pieces) + end, headers=((b"Transfer-Encoding", b"chunked"),))
    return replace(chunked, is_whole=http.is_whole and end in good)


def _old_version(rng: Random, http: _Http) -> _Http:
    return http.bent("HTTP/1.0")


def _two_requests(rng: Random, http: _Http) -> _Http:
    second = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n{"
    body = http.body or b""
    return http.bent("pipelined", body=body + second, headers=((b"Content-Length", b"%d" % len(body)),))


def _wrong_length(rng: Random, http: _Http) -> _Http:
    true = len(http.body or b"")
    lengths = (b"%d" % (true + 10), b"%d" % (true // 2), b"0", b"-1", b"+5", b"1e3", b"5, 5", b"9" * 30, b"\xb2", b"")
    return http.bent("content-length", headers=((b"Content-Length", rng.choice(lengths)),), is_whole=False)


_UPGRADE = (
    (b"Connection", b"Upgrade"),
    (b"Upgrade", b"websocket"),
    (b"Sec-WebSocket-Key", b"AAAAAAAAAAAAAAAAAAAAAA=="),
    (b"Sec-WebSocket-Version", b"13"),
)
# fmt: off
HEADERS: Mapping[str, tuple[_Headers, ...]] = {
    "content-type": tuple(((b"Content-Type", kind),) for kind in (
        b"", b"text/plain", b"application/json; charset=utf-16", b"application/x+json", b"multipart/form-data; boundary=x",
        b"application/json" * 200, b"\xff",
    )),
    "host": tuple(((b"Host", name),) for name in (
        b"evil.example", b"", b"localhost:99999999", b"[::1", b"\xff", b"localhost.", b"127.0.0.1:", b"a" * 5000, b"localhost@evil",
    )),
    "key": tuple(((b"Authorization", key),) for key in (
        b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Basic a2V5", b"Bearer \xff\xfe", b"Bearer " + b"k" * 20_000, b"bearer\tkey",
    )),
    "header": (
        _UPGRADE, ((b"Expect", b"100-continue"),), ((b"Connection", b"upgrade"),), ((b"Content-Encoding", b"gzip"),),
        ((b"Range", b"bytes=0-1,5-"),), ((b"Origin", b"null"),), ((b"Origin", b"\xff"),), ((b"Origin", ORIGIN.encode()),),
        ((b"If-Modified-Since", b"yesterday"),), ((b"Accept", b"text/\xff"),), ((b"TE", b"trailers"),), ((b"Cookie", b"a" * 4000),),
        ((b"X-Forwarded-For", b"'; drop"),), ((b"X-HTTP-Method-Override", b"DELETE"),), ((b"If-None-Match", b'"x' * 100),),
    ),
}
"""Headers that leave the framing whole."""
BROKEN_HEADERS: Mapping[str, tuple[_Headers, ...]] = {
    "two lengths": (
        ((b"Content-Length", b"3"), (b"Content-Length", b"4")), ((b"Content-Length", b"3"), (b"Transfer-Encoding", b"chunked")),
        ((b"Transfer-Encoding", b"gzip, chunked"),), ((b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"identity")),
    ),
    "two hosts": (((b"Host", b"localhost"), (b"Host", b"evil.example")),),
    "many headers": (
        tuple((b"X-%d" % number, b"y") for number in range(500)), ((b"X", b"y" * 40_000),), ((b"X", b"y" * 100_000),),
        ((b"X" * 10_000, b"y"),),
    ),
    "bad header": (
        ((b"X\x00", b"y"),), ((b"X", b"a\x00b"),), ((b"X y", b"z"),), ((b"", b"z"),), ((b"X", b"a\r\n b"),), ((b"X\r\nY", b"z"),),
        ((b" X", b"y"),), ((b"X", b"\x7f\x01"),),
    ),
}
# fmt: on


def _other_header(rng: Random, http: _Http) -> _Http:
    what = rng.choice(list(HEADERS))
    return http.bent(what, headers=rng.choice(HEADERS[what]))


def _broken_header(rng: Random, http: _Http) -> _Http:
    what = rng.choice(list(BROKEN_HEADERS))
    return http.bent(what, headers=rng.choice(BROKEN_HEADERS[what]), is_whole=False)


HEAD_BENDS: tuple[Callable[[Random, _Http], _Http], ...] = (
    *(_other_method, _other_path, _other_header, _other_header, _other_header, _old_version, _two_requests, _chunked),
    *(_bad_line, _wrong_length, _broken_header, _broken_header),
)
