"""Asking servers: which replies are asked for again, and which are the user's to mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest

from stretto.base.endpoint import Chat, ChatConfig, Unanswered, patiently, served_name
from stretto.base.errors import UserError


def asked(*replies: httpx.Response | Exception, tries: int = 3) -> tuple[object, int]:
    """What came of it, and how many replies were left."""
    left = list(replies)

    def send() -> httpx.Response:
        reply = left.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    try:
        return patiently(send, "judge", "check url", tries=tries, pause_s=0.0), len(left)
    except (UserError, Unanswered) as error:
        return error, len(left)


@pytest.mark.parametrize(
    "first", [httpx.Response(503), httpx.Response(429), httpx.Response(408), httpx.Response(200, text="no JSON")]
)
def test_what_may_pass_is_asked_for_again(first: httpx.Response) -> None:
    assert asked(first, httpx.ConnectError("down"), httpx.Response(200, json=[1])) == ([1], 0)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_not(status: int) -> None:
    error, left = asked(httpx.Response(status, text="not\nso"), httpx.Response(200, json=[1]))
    assert isinstance(error, UserError) and left == 1
    assert str(error) == f"judge: {status}: not so; check url"


def test_a_page_of_html_is_not_shown_whole() -> None:
    error, _ = asked(httpx.Response(404, text=" <!DOCTYPE html><html><body>Not found"))
    assert str(error) == "judge: 404: a page of HTML, so no such API; check url"


def test_a_server_is_asked_with_the_key_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(url: str, headers: dict[str, str], timeout: float) -> httpx.Response:
        asked = httpx.Request("GET", url)
        if (url, headers) != ("http://h/v1/models", {"authorization": "Bearer secret"}):
            return httpx.Response(401, request=asked)
        return httpx.Response(200, json={"data": [{"id": "m"}]}, request=asked)

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert served_name("http://h/v1") == served_name("http://h/v1/") == "m"
    with pytest.raises(UserError, match="cannot list its models: InvalidURL"):
        monkeypatch.undo()
        served_name("http://h:port/v1")


def test_the_last_failure_is_told() -> None:
    error, _ = asked(httpx.Response(503, text="busy"), httpx.ReadTimeout("slow"), tries=2)
    assert isinstance(error, Unanswered) and str(error) == "ReadTimeout: slow"


def test_the_wait_for_a_free_slot_counts_as_time_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, now_s, limits_s = Chat(ChatConfig(url="http://x/v1", model="m"), "judge"), [0.0], list[float]()
    monkeypatch.setattr("stretto.base.endpoint.time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda _: None))

    def acquire(timeout: float) -> bool:
        now_s[0] += 4.0
        return True

    @contextmanager
    def stream(method: str, path: str, json: object, timeout: float) -> Iterator[httpx.Response]:
        limits_s.append(timeout)
        yield httpx.Response(200, json={"choices": [{"message": {"content": "5"}}]})

    monkeypatch.setattr(chat, "_slots", SimpleNamespace(acquire=acquire, release=lambda: None))
    monkeypatch.setattr(chat, "_client", SimpleNamespace(stream=stream))
    assert chat.said([], stop_s=10.0) == "5" and limits_s == [6.0]
    with pytest.raises(Unanswered, match="no time is left"):
        chat.said([], stop_s=8.0)
