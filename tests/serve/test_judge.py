"""Our own server as the judge of open-ended answers: requests that it takes, and answers that a grammar makes judgements."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.engine.async_engine import AsyncEngine
from stretto.serve.elastic import ServedModel
from stretto.serve.server import ServeSettings
from stretto.tasks.judge import JudgeFailed
from stretto.tasks.registry import open_source
from stretto.tasks.task import Answer
from tests.serve.live import live


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

        with pytest.raises(JudgeFailed, match="which is no judgement"):  # a network that was never trained
            compared({"max_tokens": 8})
        schema = {"enum": ["VERDICT: A", "VERDICT: B", "VERDICT: TIE"]}
        forced = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
        rewards = compared({"max_tokens": 32, "response_format": forced})
    assert rewards[2] == 0.0 and rewards[0] + rewards[1] == 1.5 and rewards[0] in (0.5, 0.75, 1.0)
