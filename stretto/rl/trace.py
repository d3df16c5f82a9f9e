"""Who was busy when: spans in Chrome's trace format, which Perfetto and chrome://tracing draw. Imports no torch.

Spans are appended as they end, one JSON object a line; `write_trace` makes the one document that viewers read. A run that
goes on after a kill goes on in the same file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stretto.base.errors import UserError
from stretto.base.paths import write_text, writing

SPANS_FILE = "spans.jsonl"
TRACE_FILE = "trace.json"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of work. Written by the driver, from its own clock."""

    role: str
    """A row of the picture: ``trainer``, ``agents``…"""
    name: str
    started_s: float
    """Unix seconds, as is the next."""
    finished_s: float
    lane: int = 0
    """Spans of one role that overlap lie in different lanes."""
    facts: dict[str, Any] | None = None

    @property
    def seconds(self) -> float:
        return self.finished_s - self.started_s


class Trace:
    """Appends spans to the run folder and remembers how long each role was busy."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = path = folder / SPANS_FILE
        is_torn = path.is_file() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if is_torn:
            self._file.write("\n")
        self._lanes: dict[str, list[bool]] = {}
        self.busy_s: dict[str, float] = {}
        """By role and name, joined by a slash."""

    @contextmanager
    def span(self, role: str, name: str, **facts: Any) -> Iterator[None]:
        """Note how long the block took, in a lane of the role that is free meanwhile."""
        lanes = self._lanes.setdefault(role, [])
        lane = lanes.index(False) if False in lanes else len(lanes)
        lanes[lane : lane + 1] = [True]
        started_s = time.time()
        try:
            yield
        finally:
            lanes[lane] = False
            self.add(Span(role, name, started_s, time.time(), lane, facts or None))

    def add(self, span: Span) -> None:
        key = f"{span.role}/{span.name}"
        self.busy_s[key] = self.busy_s.get(key, 0.0) + span.seconds
        row = [span.role, span.name, round(span.started_s, 6), round(span.finished_s, 6), span.lane, span.facts]
        with writing(self._path):
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def close(self) -> None:
        with writing(self._path):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(*(() if error is None else (UserError,))):  # what came first is to be heard
            self.close()


def read_spans(folder: Path) -> list[Span]:
    """The spans of a run; [] where there are none. A torn last line is left out."""
    path = folder / SPANS_FILE
    if not path.is_file():
        return []
    spans = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            spans.append(Span(*json.loads(line)))
        except (ValueError, TypeError):
            continue  # torn by a kill; the next line is whole
    return spans


def write_trace(folder: Path) -> Path:
    """Write ``trace.json``: one process a role, one thread a lane, microseconds since the first span."""
    spans = read_spans(folder)
    start_s = min((span.started_s for span in spans), default=0.0)
    roles = {role: number for number, role in enumerate(dict.fromkeys(span.role for span in spans), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": role}} for role, number in roles.items()
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": roles[span.role],
            "tid": span.lane,
            "ts": round((span.started_s - start_s) * 1e6),
            "dur": round(span.seconds * 1e6),
            "args": span.facts or {},
        }
        for span in spans
    ]
    path = folder / TRACE_FILE
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path
