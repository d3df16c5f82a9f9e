"""Judges of our own behind real HTTP: the server, whose answers a grammar makes judgements, and a local judge, which does nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from bench.common.server import in_thread
from stretto.base.errors import UserError
from stretto.engine.async_engine import AsyncEngine
from stretto.evals.ranker import LocalJudge, open_judge
from stretto.server.elastic import ServedModel
from stretto.server.judge import judge_app, judge_server
from stretto.server.server import ServeSettings
from stretto.tasks.judge import _RATE, JudgeFailed, _material
from stretto.tasks.registry import open_source
from stretto.tasks.task import Answer, Problem
from tests.evals.judges import judge, network
from tests.server.live import live


def test_our_server_judges(
    service: AsyncEngine, served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a cat"}')
    monkeypatch.setenv("KEY", "key")
    with live(service, served, ServeSettings.model_validate({"api_keys": ["key"]})) as (url, _):

        def compared(body: dict[str, Any]) -> list[float]:
            told = {"url": f"{url}/v1", "model": "x", "key_env": "KEY", "retries": 0, "cache": str(tmp_path / "cache")}
            args = {"path": str(tmp_path / "prompts.jsonl"), "by": "group", "judge": {**told, "body": body}}
            source = open_source("open", SimpleNamespace(kind="judged", args=args))
            scores = source.compare(source.problem(0), [Answer("mat"), Answer("the mat"), Answer("")])
            source.close()
            return [score.reward for score in scores]

        with pytest.raises(JudgeFailed, match="which is not a judgement"):  # a network that was never trained
            compared({"max_tokens": 8})
        schema = {"enum": ["VERDICT: A", "VERDICT: B", "VERDICT: TIE"]}
        forced = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
        rewards = compared({"max_tokens": 32, "response_format": forced})
    assert rewards[2] == 0.0 and rewards[0] + rewards[1] == 1.5 and rewards[0] in (0.5, 0.75, 1.0)


# A local judge


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalJudge:
    folder = tmp_path_factory.mktemp("judge")
    judge(network(folder), folder / "judge")
    return open_judge(folder / "judge")


@pytest.fixture
def address(local: LocalJudge) -> Iterator[str]:
    with in_thread(judge_server(local)) as url:
        yield f"{url}/v1"


def _source(tmp_path: Path, url: str, model: str, prompt: str = "The river rose.", **args: Any) -> Any:
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"prompt": prompt, "rubric": [{"criterion": "x", "points": 4}, "y"]})
    )
    told = {"url": url, "model": model, "retries": 0, "cache": str(tmp_path / "cache")}
    told = {"path": str(tmp_path / "prompts.jsonl"), "judge": told, **args}
    return open_source("open", SimpleNamespace(kind="judged", args=told))


def test_a_local_judge_rates_and_compares(tmp_path: Path, address: str, local: LocalJudge) -> None:
    texts = ["The river watched the bread.", "- The river watched the bread.", "Clock clock, the."]
    rating = _source(tmp_path, address, local.record.name)
    found = [rating.score(rating.problem(0), Answer(text)).reward for text in texts]
    want = local.shares_of(local.scores([("The river rose.", text) for text in texts]))
    assert found == pytest.approx(
        want.tolist(), abs=2e-3
    )  # four digits of each criterion's points; bf16 where there is
    comparing = _source(tmp_path, address, local.record.name, by="group")
    won = [each.reward for each in comparing.compare(comparing.problem(0), [Answer(text) for text in texts])]
    assert won[0] == won[1] and sum(won) == pytest.approx(1.5)  # layout is a tie, whichever is shown first


class Slow:
    """Stands for a judge whose network reads when it is told to."""

    record = SimpleNamespace(name="reward-x")
    first_of, shares_of = staticmethod(LocalJudge.first_of), staticmethod(np.asarray)

    def __init__(self, at_once: int):
        self.at_once, self.asked = at_once, list[list[str]]()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def scores(self, told: list[tuple[str, str]]) -> np.ndarray:
        self.asked.append([text for _, text in told])
        self.begun.set()
        self.go_on.wait(10)
        if any(text == "strange" for _, text in told):
            raise UserError("a prompt in no language")
        return np.array([len(text) / 10 for _, text in told])


def _rate(text: str) -> dict[str, Any]:
    problem = Problem(0, ({"role": "user", "content": "Write."},), "", {})
    content = _material(problem, {"Answer": text}) + _RATE.format(criteria="1. [1] It is good.")
    return {"model": "reward-x", "messages": [{"role": "user", "content": content}]}


def test_a_judge_on_this_machine_answers_no_other_host_name() -> None:
    judge: Any = Slow(at_once=1)
    for settings, status in ({}, 403), ({"allowed_hosts": ["judge.example"]}, 200), ({"host": "0.0.0.0"}, 200):
        app = judge_app(judge, ServeSettings.model_validate(settings))
        answer = TestClient(app, base_url="http://judge.example").get("/v1/models")
        assert answer.status_code == status, settings


@pytest.mark.slow
def test_who_gave_up_waiting_is_not_answered() -> None:
    judge: Any = Slow(at_once=8)
    with in_thread(judge_server(judge)) as url, ThreadPoolExecutor() as pool:
        post = partial(httpx.post, f"{url}/v1/chat/completions", timeout=10)
        first = pool.submit(post, json=_rate("one"))
        assert judge.begun.wait(10)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json=_rate("two"), timeout=0.3)
        time.sleep(0.2)
        judge.go_on.set()
        assert first.result().status_code == post(json=_rate("three")).status_code == 200
    assert judge.asked == [["one"], ["three"]]


def test_the_network_reads_for_one_at_a_time_also_if_the_one_goes_away() -> None:
    judge: Any = Slow(at_once=1)

    async def work() -> None:
        transport = httpx.ASGITransport(judge_app(judge))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            first, second = (
                asyncio.create_task(client.post("/v1/chat/completions", json=_rate(text))) for text in ("one", "two")
            )
            await asyncio.to_thread(judge.begun.wait, 10)
            first.cancel()
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert judge.asked == [["one"]]
            judge.go_on.set()
            assert (await second).status_code == 200

    asyncio.run(work())
    assert judge.asked == [["one"], ["two"]]


def test_those_who_wait_are_read_together_and_one_that_cannot_be_read_spoils_no_other() -> None:
    judge: Any = Slow(at_once=3)
    with (
        in_thread(judge_server(judge)) as url,
        httpx.Client(timeout=10) as client,  # a busy machine makes four of them in longer than is waited
        ThreadPoolExecutor(8) as pool,
    ):
        post = partial(client.post, f"{url}/v1/chat/completions")
        first = pool.submit(post, json=_rate("one"))
        assert judge.begun.wait(10)
        texts = ["four", "sixsix", "strange", "seven77"]
        others = {text: pool.submit(post, json=_rate(text)) for text in texts}
        time.sleep(0.5)
        judge.go_on.set()
        assert first.result().status_code == 200
        said = {text: each.result() for text, each in others.items()}
    assert [said[text].status_code for text in texts] == [200, 200, 422, 200]
    points = {text: re.findall(r"[\d.]+", said[text].json()["choices"][0]["message"]["content"]) for text in texts[:2]}
    assert points["four"] != points["sixsix"] and any("0.6" in each for each in points["sixsix"])
    assert judge.asked[0] == ["one"] and max(map(len, judge.asked)) == 3


def test_what_a_local_judge_refuses(tmp_path: Path, address: str, local: LocalJudge) -> None:
    def scored(*args: str) -> Any:
        made = _source(tmp_path, address, *args)
        return made.score(made.problem(0), Answer("The cat sat."))

    with pytest.raises(UserError, match=r"the judge refuses: 404: .*no model 'judge' here: the judge is 'reward-"):
        scored("judge")
    with pytest.raises(UserError, match=r"the judge refuses: 422: .*a prompt in the script CJK"):
        scored(local.record.name, "写一个故事。")
    assert httpx.get(f"{address}/models").json()["data"][0]["id"] == local.record.name
    said = httpx.post(
        f"{address}/chat/completions", json={"model": local.record.name, "messages": [{"content": "Hello?"}]}
    )
    assert said.status_code == 400 and "does not chat" in said.text
    kind = {"Content-Type": "application/json"}
    assert httpx.post(f"{address}/chat/completions", content=b"no JSON", headers=kind).status_code == 400
    at = httpx.URL(address)
    sender = HTTPConnection(at.host, at.port, timeout=10)
    told = {**kind, "Content-Length": str(64 << 20), "Expect": "100-continue"}
    sender.request("POST", f"{at.path}/chat/completions", headers=told)
    assert sender.getresponse().status == 413  # before any of it has come
    sender.close()
