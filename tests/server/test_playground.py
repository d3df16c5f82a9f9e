"""The page in a real browser, against a real server with a tiny random network."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from stretto.engine.async_engine import AsyncEngine
from stretto.server.elastic import ServedModel
from stretto.server.server import ServeSettings, create_app, make_server, open_socket
from tests.server.visits import ACCESSIBILITY, FOCUS, OBSERVE, PAIRS, PROMPT, STOPS, Visit, expected_routes

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is in the PATH")


@dataclass
class Served:
    """A server in a thread."""

    url: str
    gate: Any


@pytest.fixture(scope="module")
def server(service: AsyncEngine, served: ServedModel) -> Iterator[Served]:
    settings = ServeSettings(port=0, max_open=4)
    app = create_app(service, served, settings)
    listening = open_socket(settings.host, settings.port)
    process = make_server(app)
    thread = threading.Thread(target=process.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", app.state.gate)
    process.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Inside containers the browser's own sandbox finds no user namespaces.
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, server: Served) -> Iterator[Visit]:
    """The page, opened; afterwards it must have logged nothing, broken no policy and asked no other host."""
    page = browser.new_page(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page.set_default_timeout(20_000)
    visit, hosts = Visit(page), set[str]()
    page.on("console", lambda message: visit.messages.append(message.text))
    page.on("pageerror", lambda error: visit.messages.append(str(error)))

    def asked(request: Any) -> None:
        hosts.add(request.url.split("/")[2])
        if request.method == "POST":
            visit.bodies.append(json.loads(request.post_data))

    page.on("request", asked)
    page.add_init_script(OBSERVE)
    page.goto(server.url)
    page.wait_for_selector(".pane .slider")
    yield visit
    assert page.evaluate("violations") == []
    assert hosts == {server.url.split("/")[2]}
    page.close()
    assert visit.messages == []


@pytest.mark.slow
def test_an_answer_streams_in_chat(visit: Visit) -> None:
    visit.send()
    page, body = visit.page, visit.bodies[-1]
    assert body["messages"] == [{"role": "user", "content": PROMPT}]
    assert len({num for num, num_busy in page.evaluate("batches") if num_busy}) >= 3, "the tokens came all at once"
    text = "".join(choice["delta"].get("content") or "" for choice in visit.chunks())
    assert page.locator(".tokens").inner_text().strip() == text.strip()
    assert page.locator(".live dd").all_inner_texts() != ["–", "–", "–"]
    assert f"seed {body['seed']}" in page.locator(".facts").inner_text()
    assert "done" in page.locator("#status").inner_text()
    visit.send("and then", num_panes=2)
    assert [message["role"] for message in visit.bodies[-1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.slow
def test_tokens_are_tinted_by_their_surprise(visit: Visit) -> None:
    visit.send()
    entries = [entry for choice in visit.chunks() for entry in (choice["logprobs"] or {"content": []})["content"]]
    spans = visit.page.eval_on_selector_all(
        ".token", "all => all.map(one => [one.className, one.dataset.from, one.dataset.to])"
    )
    assert len(spans) > 4
    for class_name, start, end in spans:
        surprise = -sum(entry["logprob"] for entry in entries[int(start) : int(end) + 1])
        tint = sum(surprise >= least for least in (0.25, 0.75, 1.5, 2.5, 4))
        assert f"tint-{tint}" in class_name.split(), (class_name, surprise)
    tinted = visit.page.locator(".token:not(.tint-0, .blank)").first
    read = "one => getComputedStyle(one).backgroundColor"
    assert tinted.evaluate(read) != "rgba(0, 0, 0, 0)"
    visit.page.uncheck("#colours")
    assert tinted.evaluate(read) == "rgba(0, 0, 0, 0)"


@pytest.mark.slow
def test_map_and_card_show_a_tokens_route(visit: Visit) -> None:
    visit.send()
    page, choices = visit.page, visit.chunks()
    routes, none = expected_routes(choices)
    cells = {
        (row, expert): int((routes[:, row] == expert).any(axis=1).sum())
        for row in range(routes.shape[1])
        for expert in range(8)
    }
    drawn = page.eval_on_selector_all(".map .chosen", "all => all.map(one => [+one.dataset.row, +one.dataset.expert])")
    assert sorted(map(tuple, drawn)) == sorted(cell for cell, count in cells.items() if count)
    place = page.locator(".token").nth(3)
    place.hover()
    token = int(place.get_attribute("data-to"))
    lit = page.eval_on_selector_all(".map .on", "all => all.map(one => [+one.dataset.row, +one.dataset.expert])")
    if place.get_attribute("data-from") == str(token):
        assert sorted(map(tuple, lit)) == sorted(
            (row, int(expert)) for row, slots in enumerate(routes[token]) for expert in slots if expert != none
        )
    entry = [choice["logprobs"]["content"][0] for choice in choices if choice["logprobs"]][token]
    card = page.locator("#card")
    assert f"{-entry['logprob']:.2f} nats" in card.inner_text()
    assert card.locator("li").count() == 5
    assert card.locator("dd").nth(2).inner_text() == "7"  # the fixture's weight version
    page.locator(".map").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.locator(".routes .readout").inner_text().startswith("Layer 0, expert 1: ")


@pytest.mark.slow
def test_two_sizes_answer_side_by_side(visit: Visit) -> None:
    page = visit.page
    page.keyboard.press("Control+2")  # opens the second pane, at the smallest preset
    assert page.locator(".pane").count() == 2
    visit.send(num_tokens=48, num_panes=2, seed="")
    one, other = visit.bodies[-2:]
    assert one["elastic"] != other["elastic"]
    assert one["seed"] == other["seed"]
    assert max(num_busy for _, num_busy in page.evaluate("batches")) == 2, "one waited for the other"
    assert all(page.locator(f".pane[data-name={name}] .token").count() for name in "AB"), page.inner_text("main")
    page.click("#again")
    page.wait_for_function("() => document.querySelectorAll('.turn[aria-busy=false]').length === 2")
    assert len(visit.bodies) == 4
    page.click("#clear")
    assert page.locator(".turn").count() == 0


@pytest.mark.slow
def test_sliders_work_by_keyboard(visit: Visit) -> None:
    page = visit.page
    page.keyboard.press("Control+1")
    layers, experts, top_k = (page.locator(".slider input").nth(place) for place in range(3))
    weights = page.locator(".cost b").first
    full = weights.inner_text()
    assert layers.evaluate("one => one === document.activeElement")
    page.keyboard.press("ArrowLeft")
    assert layers.input_value() == "3"
    page.wait_for_function("(full) => document.querySelector('.cost b').textContent !== full", arg=full)
    page.keyboard.press("Tab")
    page.keyboard.press("Home")
    assert (experts.input_value(), top_k.input_value()) == ("1", "1")  # top-k gives way
    assert {"absent", "kept"} == set.union(*visit.classes(".map rect"))
    assert visit.classes(".map .kept").__len__() == 3
    page.get_by_role("button", name="full").click()
    assert layers.input_value() == "4"
    visit.send(num_tokens=4)
    assert visit.bodies[-1]["elastic"] == {"layers": 4, "experts": 8, "top_k": 2}


@pytest.mark.slow
def test_completion_continues_a_text(visit: Visit) -> None:
    page = visit.page
    page.check("#mode [value=completion]")
    visit.send(num_tokens=12)
    assert visit.bodies[-1]["prompt"] == PROMPT
    text = "".join(choice["text"] for choice in visit.chunks())
    page.get_by_role("button", name="Use as prompt").click()
    assert page.input_value("#prompt") == PROMPT + text


@pytest.mark.slow
def test_keys_break_lines_stop_and_walk_through_tokens(visit: Visit) -> None:
    page = visit.page
    page.focus("#prompt")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    assert page.input_value("#prompt") == "one\n"
    page.evaluate(
        """new MutationObserver((_, observer) => {
             if (document.querySelectorAll(".token").length < 5) return;
             observer.disconnect();
             document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
           }).observe(document.querySelector("#panes"), {childList: true, subtree: true})"""
    )
    visit.send(num_tokens=400)
    assert "stopped" in page.locator(".facts").inner_text()
    assert page.locator(".token").count() < 400
    page.locator(".token").first.focus()
    assert page.is_visible("#card")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")
    assert page.locator(".token[tabindex='0']").count() == 1
    page.keyboard.press("Escape")
    assert page.is_hidden("#card")


@pytest.mark.slow
def test_errors_are_shown_where_the_answer_would_be(visit: Visit, server: Served) -> None:
    page, error = visit.page, visit.page.locator(".error")
    slots = [server.gate.enter() for _ in range(4)]
    for slot in slots:
        slot.__enter__()
    visit.send(num_tokens=4)
    assert "Try again in" in error.inner_text()
    for slot in slots[1:]:  # the first keeps a draining server from stopping
        slot.__exit__(None, None, None)
    server.gate.is_draining = True
    page.get_by_role("button", name="Try again").click()
    page.wait_for_function("() => document.querySelector('.error')?.textContent.includes('shutting down')")
    server.gate.is_draining = False
    slots[0].__exit__(None, None, None)
    page.context.set_offline(True)
    page.get_by_role("button", name="Try again").click()
    page.wait_for_function("() => document.querySelector('.error')?.textContent.includes('cannot be reached')")
    page.context.set_offline(False)
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector(".token")
    assert error.count() == 0
    statuses = [message for message in visit.messages if message.startswith("Failed to load resource")]
    assert len(statuses) == len(visit.messages) == 3  # the browser's own lines, one a refusal
    visit.messages.clear()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessible(visit: Visit, theme: str) -> None:
    page = visit.page
    page.emulate_media(color_scheme=theme)
    page.keyboard.press("Control+2")
    visit.send(num_panes=2)
    assert page.evaluate(ACCESSIBILITY, PAIRS) == []
    # In the order of the document, each with a focus that can be seen.
    page.focus(".skip")
    page.evaluate(STOPS)
    places = []
    for _ in range(60):
        page.keyboard.press("Tab")
        place, ring = page.evaluate(FOCUS)
        if place < 0:
            break
        assert ring, page.evaluate("document.activeElement.outerHTML")
        places.append(place)
    assert places == sorted(places)
    assert len(places) > 20


@pytest.mark.slow
def test_fits_a_small_screen_and_remembers_the_theme(visit: Visit) -> None:
    page = visit.page
    page.set_viewport_size({"width": 360, "height": 740})
    page.click("#compare")
    visit.send(num_panes=2)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert [page.locator(".pane").nth(place).is_visible() for place in (0, 1)] == [True, False]
    page.check("#which [value='1']")
    assert [page.locator(".pane").nth(place).is_visible() for place in (0, 1)] == [False, True]
    page.click("#theme")
    page.click("#theme")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
    page.wait_for_selector(".pane .slider")


@pytest.mark.slow
def test_numbers_fall_with_the_size(visit: Visit) -> None:
    shares = visit.page.locator(".cost dd span")
    shares.first.wait_for()  # the costs are asked for once the sliders are there
    assert shares.all_inner_texts() == ["100 %"] * 4
    visit.page.locator(".preset").last.click()
    visit.page.wait_for_function("() => document.querySelector('.cost dd span').textContent !== '100 %'")
    assert all(
        0 < float(each.removesuffix(" %")) < 100 and math.isfinite(float(each[:-2]))
        for each in shares.all_inner_texts()
    )
