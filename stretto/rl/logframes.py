"""The frames of a token log: parts of a sample as bytes that tell by themselves whether they are whole.

A frame is a head (magic, lengths, CRC-32), a JSON description and raw arrays. Imports no torch.

Shape letters: T tokens of a part, R rows of routes, L MoE layers, K route slots.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stretto.base.trajectory import Segment

_HEAD = struct.Struct("<4sIII")
"""Magic, bytes of the description, bytes of the arrays, CRC-32 over both."""
_MAGIC = b"STL1"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What is appended at once: a prompt, a chunk that an engine returned, or the turn of a tool."""

    segment: Segment
    routes: np.ndarray | None = None
    """[R, L, K], of the positions that had none yet, up to the last token but one; None where not sampled."""
    ended: Literal["", "stop", "length"] = ""
    """Whether the model's turn ended with it, and by what."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Where it is the turn of tools: what they answered, for whoever reads messages."""


def context(tokens: np.ndarray, started_s: float = 0.0, finished_s: float = 0.0) -> Segment:
    """A segment that the model did not write."""
    num = len(tokens)
    return Segment(tokens, False, np.zeros(num, np.float32), np.full(num, -1, np.int32), started_s, finished_s)


def encode_part(part: Part, sample: int, start: int, rows: int) -> bytes:
    """``part`` as a frame, with whose it is, and how many ``start`` tokens and ``rows`` of routes are before it."""
    segment, routes = part.segment, part.routes
    described = {
        "what": "part",
        "sample": sample,
        "start": start,
        "rows": rows,
        "tokens": len(segment.tokens),
        "is_sampled": segment.is_sampled,
        "times": [segment.started_s, segment.finished_s],
        "routes": None if routes is None else [routes.dtype.name, *routes.shape],
        "ended": part.ended,
        "messages": list(part.messages),
    }
    raw = segment.tokens.astype("<i4").tobytes()
    if segment.is_sampled:
        raw += segment.logprobs.astype("<f4").tobytes() + segment.versions.astype("<i4").tobytes()
    return frame(described, raw + (b"" if routes is None else routes.tobytes()))


def decode_part(described: Mapping[str, Any], raw: bytes) -> Part:
    """What `encode_part` wrote."""
    num, is_sampled, routes = described["tokens"], described["is_sampled"], None
    tokens = np.frombuffer(raw, "<i4", num)
    if is_sampled:
        logprobs = np.frombuffer(raw, "<f4", num, 4 * num)
        versions = np.frombuffer(raw, "<i4", num, 8 * num)
        if described["routes"] is not None:
            name, *shape = described["routes"]
            routes = np.frombuffer(raw, name, int(np.prod(shape)), 12 * num).reshape(shape)
        segment = Segment(tokens, True, logprobs, versions, *described["times"])
    else:
        segment = context(tokens, *described["times"])
    return Part(segment, routes, described["ended"], tuple(described["messages"]))


def frame(described: Mapping[str, Any], raw: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(described).encode()
    return _HEAD.pack(_MAGIC, len(text), len(raw), zlib.crc32(raw, zlib.crc32(text))) + text + raw


def frames(content: bytes) -> Iterator[tuple[dict[str, Any], bytes, int]]:
    """Description, arrays and end of each frame, up to the first that is torn or damaged."""
    at = 0
    while at + _HEAD.size <= len(content):
        magic, num_text, num_raw, checksum = _HEAD.unpack_from(content, at)
        middle = at + _HEAD.size + num_text
        end = middle + num_raw
        if magic != _MAGIC or end > len(content):
            return
        text, raw = content[at + _HEAD.size : middle], content[middle:end]
        if zlib.crc32(raw, zlib.crc32(text)) != checksum:
            return
        yield json.loads(text), raw, end
        at = end
