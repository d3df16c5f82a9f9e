"""A router between clients and two servers: the fields that routers add, and, where one is installed, a real one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.common.networks import write_network
from bench.common.server import serving
from bench.router import SETTLE_S, killed, problems, routed

ROUTER = shutil.which("vllm-router")
ADDED = {"no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True, "return_hidden_states": False}
"""What vllm-router 0.1.17 and sglang-router 0.3.2 write into every body."""
ADDED_TO_CHATS = {
    "logprobs": False,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2, "echo": False, **ADDED},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        **ADDED,
        **ADDED_TO_CHATS,
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_routers_add_are_accepted_in_the_value_that_holds(
    ask: Callable[..., httpx.Response], path: str
) -> None:
    assert ask("POST", path, json=BODIES[path]).status_code == 200
    for name in ("no_stop_trim", "skip_special_tokens", "return_hidden_states"):
        answer = ask("POST", path, json={**BODIES[path], name: not BODIES[path][name]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name, answer.text


@pytest.mark.slow
@pytest.mark.skipif(ROUTER is None, reason="vllm-router is not on the PATH")
def test_a_router_goes_on_with_the_other_server(tmp_path: Path) -> None:
    assert ROUTER is not None
    source = write_network(tmp_path, "tiny")
    with ExitStack() as stack:
        first, second = (stack.enter_context(serving(source, "--cache-memory", "64MB")) for _ in range(2))
        router = stack.enter_context(routed(ROUTER, (first.url, second.url), tmp_path / "router.log"))
        assert problems(first.url, router) == []
        requests = killed(router, second, num_clients=4, seconds=3.0)
    later = [each for each in requests if each.started_s > SETTLE_S]
    assert later and not [each.problem for each in later if each.problem]
    assert not [each.problem for each in requests if each.problem and not each.is_stream], "they can be sent again"
