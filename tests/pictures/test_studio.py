"""The studio: its routes, and the page in a real browser over the exact renderer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from bench.common.server import in_thread
from stretto.pictures.agent import PaintOptions, respond
from stretto.pictures.renderer import Renderer
from stretto.pictures.studio import Studio, create_studio
from stretto.pictures.verify import ShapesVerifier

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


def made(out: Path | None = None) -> Studio:
    options = PaintOptions(width=128, height=128)
    return Studio(partial(respond, backend=Renderer(), verifier=ShapesVerifier(), options=options), out)


def test_turns_undo_and_refusals_over_http(tmp_path: Path) -> None:
    client = TestClient(create_studio(made(tmp_path)), base_url="http://127.0.0.1")
    assert client.get("/state").json()["versions"] == [] and client.get("/pictures/0.png").status_code == 404
    state = client.post("/turn", json={"text": "two red circles left of a blue square"}).json()
    assert (
        state["ledger"] == ["2 red circles", "1 blue square", "red circles left of blue square"] and state["shown"] == 0
    )
    assert (state["versions"][0]["lacks"], state["versions"][0]["unchecked"]) == ([], "")
    assert client.get("/pictures/0.png").content == (tmp_path / "001.png").read_bytes()
    assert client.post("/turn", json={"text": "make the square red blue"}).json()["turns"][-1]["question"]
    assert client.post("/turn", json={"text": "make the square green"}).json()["shown"] == 1
    state = client.post("/turn", json={"text": "undo"}).json()
    assert (state["shown"], len(state["versions"]), state["undoable"]) == (0, 2, 1)
    assert json.loads((tmp_path / "conversation.json").read_text())["turns"] == state["turns"]
    for body, status in (
        ({"text": ""}, 400),
        ({"text": "start over: a cat"}, 400),
        ({"texts": ""}, 400),
        ({"text": "x" * 70_000}, 413),
    ):
        refused = client.post("/turn", json=body)
        assert refused.status_code == status and refused.json()["error"]
    assert (
        client.post("/turn", content=b'{"text": "a cube"}', headers={"content-type": "text/plain"}).status_code == 415
    )
    assert client.get("/state", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/state").json() == state  # what was refused has changed nothing
    assert "default-src 'self'" in client.get("/").headers["content-security-policy"]


def test_a_turn_that_cannot_be_kept_has_not_been(tmp_path: Path) -> None:
    studio = made(tmp_path / "out")
    (tmp_path / "out").write_text("")
    client = TestClient(create_studio(studio), base_url="http://127.0.0.1")
    before = client.get("/state").json()
    refused = client.post("/turn", json={"text": "a red circle"})
    assert refused.status_code == 400 and "cannot be written" in refused.json()["error"]
    assert client.get("/state").json() == before
    (tmp_path / "out").unlink()
    assert client.post("/turn", json={"text": "a red circle"}).json()["shown"] == 0
    assert (tmp_path / "out" / "001.png").is_file()


@pytest.fixture
def address() -> Iterator[str]:
    with in_thread(uvicorn.Server(uvicorn.Config(create_studio(made()), log_level="warning"))) as url:
        yield url


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is in the PATH")
def test_three_turns_a_comparison_and_undo_in_a_browser(address: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(20_000)
        messages: list[str] = []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(address)
        turns = (
            "two red circles left of a blue square",
            "make the square green",
            "add a yellow triangle above the square",
        )
        for number, turn in enumerate(turns, 1):
            page.fill("#text", turn)
            page.press("#text", "Enter")
            page.locator("#versions li").nth(number - 1).wait_for()
        ledger = page.locator("#ledger li").all_inner_texts()
        assert ledger[:3] == ["2 red circles", "1 green square", "1 yellow triangle"]
        current = page.locator("#versions button[aria-current]")
        assert current.count() == 1 and current.locator("img").get_attribute("alt") == "Version 3"
        assert current.evaluate("each => getComputedStyle(each).opacity") == "1"
        page.locator("#versions button").nth(0).click()
        assert page.locator("#pair figure").count() == 2
        shown: Any = page.evaluate(
            "[...document.querySelectorAll('#pair img')].every(one => one.complete && one.naturalWidth === 128)"
        )
        assert shown and "Version 1" in page.locator("#pair figcaption").nth(0).inner_text()
        page.click("#undo")
        page.locator("#turns li").nth(3).wait_for()
        assert page.locator("#ledger li").all_inner_texts()[:2] == ["2 red circles", "1 green square"]
        assert "Version 2, now" in page.locator("#pair figcaption").nth(1).inner_text()
        page.fill("#text", "make the square red blue")
        page.click("#send")
        page.wait_for_selector("#turns .question")
        page.fill("#text", " ")
        page.click("#send")
        page.wait_for_selector("#status.bad")
        browser.close()
    assert [each for each in messages if "400" not in each] == []
