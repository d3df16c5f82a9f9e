from __future__ import annotations

import json
from pathlib import Path

from stretto.rl.trace import SPANS_FILE, Span, Trace, read_spans, write_trace


def test_overlapping_spans_lie_in_lanes_of_their_own(tmp_path: Path) -> None:
    with Trace(tmp_path) as trace:
        with trace.span("agents", "group", ordinal=1), trace.span("agents", "group", ordinal=2):
            pass
        with trace.span("agents", "group", ordinal=3):
            pass
        trace.add(Span("trainer", "step", 10.0, 12.5))
        assert trace.busy_s["trainer/step"] == 2.5
    lanes = {span.facts["ordinal"]: span.lane for span in read_spans(tmp_path) if span.facts}
    assert lanes == {1: 0, 2: 1, 3: 0}


def test_a_run_that_goes_on_after_a_kill_loses_one_line_at_most(tmp_path: Path) -> None:
    with Trace(tmp_path) as trace:
        trace.add(Span("trainer", "step", 1.0, 2.0))
    with (tmp_path / SPANS_FILE).open("a") as file:
        file.write('["trainer","st')
    with Trace(tmp_path) as trace:
        trace.add(Span("trainer", "step", 3.0, 5.0))
    assert [span.seconds for span in read_spans(tmp_path)] == [1.0, 2.0]


def test_viewers_get_processes_threads_and_microseconds(tmp_path: Path) -> None:
    with Trace(tmp_path) as trace:
        trace.add(Span("trainer", "step", 100.0, 100.5))
        trace.add(Span("agents", "group", 100.25, 101.0, 3, {"ordinal": 7}))
    tree = json.loads(write_trace(tmp_path).read_text())
    named = {event["pid"]: event["args"]["name"] for event in tree["traceEvents"] if event["ph"] == "M"}
    work = [event for event in tree["traceEvents"] if event["ph"] == "X"]
    assert [(named[event["pid"]], event["tid"], event["ts"], event["dur"]) for event in work] == [
        ("trainer", 0, 0, 500_000),
        ("agents", 3, 250_000, 750_000),
    ]
    assert work[1]["args"] == {"ordinal": 7}
