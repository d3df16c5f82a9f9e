"""The bench that sends what nobody should send: its requests, its judgement, and a short run of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.engine.async_engine import AsyncEngine
from stretto.engine.engine import Engine
from stretto.engine.request import EngineConfig
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build
from stretto.server.elastic import ServedModel
from stretto.server.openapi import BEYOND_SCHEMA
from stretto.server.server import ServeSettings
from stretto.text.tokenizer import Tokenizer
from tests.server.bodies import ENDPOINTS, Case, World, make_case
from tests.server.fuzz_server import KEY, Answer, main, verdict
from tests.server.live import live

WORLD = World("x", ("full",), 512, Path("/x"), "key", "admin")
HEAD, STREAM = b"content-type: application/json", b"content-type: text/event-stream"


def test_requests_come_from_a_seed() -> None:
    first, again, other = ([make_case(seed, number, WORLD) for number in range(300)] for seed in (1, 1, 2))
    assert first == again != other
    assert [Case.load(json.loads(json.dumps(case.dump()))) for case in first] == first
    assert {case.kind.partition(",")[0] for case in first} == set(ENDPOINTS)
    assert 20 < sum(case.is_valid for case in first) < 150
    assert all(b"\r\n\r\n" in case.raw for case in first)


def case(**changes: object) -> Case:
    return Case(**{"number": 0, "kind": "chat", "raw": b"POST", "is_valid": False, "is_whole": True} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(200, HEAD, b"{}"), None),
        (Answer(400, HEAD, b'{"error": {"message": "no"}}'), None),
        (Answer(400, HEAD, b"no"), "unreadable answers"),
        (Answer(200, HEAD, b"{"), "unreadable answers"),
        (Answer(500, HEAD, b"{}"), "500s"),
        (Answer(502), "500s"),
        (Answer(503, HEAD, b'{"error": {"message": "later"}}'), None),
        (Answer(None), "no answer"),
        (Answer(None, has_ended=False), "hangs"),
        (Answer(200, STREAM, b'data: {"choices": []}\n\ndata: [DONE]\n\n'), None),
        (Answer(200, STREAM, b'data: {"choices": []}\n\n'), "unreadable answers"),
        (Answer(200, STREAM, b'data: {"error": {"type": "server_error"}}\n\n'), "500s"),
        (Answer(200, STREAM, b'data: {"error": {"type": "server_error", "code": "aborted"}}\n\n'), None),
        (Answer(200, STREAM, b'data: {"type": "error", "code": "server_error"}\n\n'), "500s"),
        (Answer(200, STREAM, b'data: {"type": "error", "code": "aborted"}\n\n'), None),
        (Answer(200, STREAM, b'event: x\ndata: {"type": "response.completed"}\n\n'), None),
    ],
)
def test_answers_are_judged(answer: Answer, problem: str | None) -> None:
    assert verdict(case(), answer) == problem


def test_what_may_be_expected_of_whom() -> None:
    refusal = Answer(400, HEAD, b'{"error": {"message": "no"}}')
    assert verdict(case(is_valid=True), refusal) == "valid refused"
    assert verdict(case(is_valid=True), Answer(429, HEAD, refusal.body)) is None
    assert verdict(case(is_whole=False), Answer(None)) is None
    assert verdict(case(is_whole=False), Answer(400, b"content-type: text/plain", b"Invalid")) is None
    assert verdict(case(is_whole=False, sends=3), Answer(None, has_ended=False)) == "hangs"


def fuzz(monkeypatch: pytest.MonkeyPatch, failures: Path, *arguments: object) -> str | int | None:
    """Run the bench in this process, its servers in theirs; the exit code."""
    monkeypatch.setattr("sys.argv", ["fuzz_server", "--failures", str(failures), *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.slow
def test_a_short_run_finds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failures = tmp_path / "failures.jsonl"
    assert fuzz(monkeypatch, failures, "--bodies", 400, "--seed", 3) == 0, failures.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "problem"),
    [("dies", "engine died"), ("forgets", "hangs"), ("misreads", "control"), ("stumbles", "500s")],
)
def test_it_finds_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, problem: str) -> None:
    failures = tmp_path / "failures.jsonl"
    assert fuzz(monkeypatch, failures, "--bodies", 300, "--seed", 3, "--mutant", fault, "--patience", 10) == 1
    assert problem in failures.read_text()


def agreement(url: str, num_cases: int, num_random: int) -> tuple[Counter[str], dict[str, str]]:
    """Send at least ``num_cases`` requests in rounds of schemathesis. A round has cases at the boundaries of each field, and ``num_random``
    random cases of each endpoint. Returns counts, and a request for each kind of difference: a body that follows /openapi.json and is
    refused, one that breaks it and is accepted, or an answer that it does not describe. A refusal is no difference if its code is one that
    the document names for conditions that no schema can state."""
    import schemathesis
    from schemathesis.engine import Status, events, from_schema
    from schemathesis.openapi.checks import RejectedPositiveData

    counts, samples = Counter[str](), dict[str, str]()
    key = {"Authorization": f"Bearer {KEY}"}
    generation = {"max-examples": num_random}
    options = {"continue-on-failure": True, "headers": key, "request-timeout": 120.0, "generation": generation}

    def is_difference(context: Any, failure: Any, case: Any, response: Any) -> bool:
        is_refusal = isinstance(failure, RejectedPositiveData) and response.status_code == 400
        return not (is_refusal and response.json()["error"]["code"] in BEYOND_SCHEMA)

    for number in count():
        config = schemathesis.Config.from_dict({"seed": number, **options})
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=config, headers=key)
        schema.hook("filter_failure")(is_difference)
        for event in from_schema(schema).execute():
            if isinstance(event, events.NonFatalError | events.FatalError):
                raise RuntimeError(f"schemathesis failed: {event}")
            if not isinstance(event, events.ScenarioFinished):
                continue
            seen = event.recorder
            statuses = [each.response.status_code if each.response else 599 for each in seen.interactions.values()]
            counts += Counter({"cases": len(statuses), "5xx": sum(status >= 500 for status in statuses)})
            counts["accepted"] += sum(status < 300 for status in statuses)
            for check in (each for checks in seen.checks.values() for each in checks):
                if check.failure_info is not None and check.status is Status.FAILURE:
                    counts["differences"] += 1
                    sample = f"{check.failure_info.code_sample}\n{check.failure_info.failure.message}"
                    samples.setdefault(f"{seen.label}: {check.name}", sample)
        if counts["cases"] >= num_cases:
            return counts, samples
    raise AssertionError("count ends")


@pytest.fixture
def brief(config: ModelConfig, tokenizer: Tokenizer) -> Iterator[AsyncEngine]:
    """An engine whose answers are short: most of the time went to tokens of answers that no request limited. The first channel of every
    token is constant, and of the end token it is larger, so that the end token is the likeliest everywhere."""
    net, sizes = build(config, seed=3), EngineConfig(num_pages=256, page_size=8, max_batch=8, max_step_tokens=128)
    with torch.no_grad():
        net.embedding.weight[:, 0] = 1.0
        net.embedding.weight[tokenizer.eos_id, 0] = 2.0
    service = AsyncEngine(Engine(net, tokenizer, sizes, weight_version=7)).start()
    yield service
    service.close()


@pytest.mark.slow
@pytest.mark.timeout(900)  # more than a thousand requests in one process
def test_the_document_and_the_server_agree(brief: AsyncEngine, served: ServedModel) -> None:
    """One round of schemathesis: the boundaries of every field, and a few random bodies of each endpoint."""
    pytest.importorskip("schemathesis", reason="the package schemathesis is not installed: make test-deps")
    settings = ServeSettings(api_keys=(KEY,), admin_key=KEY)
    with live(brief, served, settings) as (url, _):
        counts, samples = agreement(url, num_cases=1, num_random=5)
    assert counts["cases"] > 1000 and counts["accepted"] > 500
    assert not samples and not counts["5xx"], samples
