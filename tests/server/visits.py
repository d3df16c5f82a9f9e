"""A visit to the playground: the page in a browser, what it has asked for, and what is looked for on it."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PROMPT = "The cat sat"
ACCESSIBILITY = (Path(__file__).parent / "accessibility.js").read_text(encoding="utf-8")
AA, AA_CONTROL = 4.5, 3.0  # WCAG 2.2, 1.4.3 for text and 1.4.11 for the borders of controls
PAIRS = [
    *((".asked, .token, .slider label, .live dd, .bar-row b, figcaption, .preset", "color", AA),),
    *((".facts, .who, .readout, .live dt, .bar-row dt, .plain:enabled, .slider output, .legend b", "color", AA),),
    *((".primary, .preset[aria-pressed=true], .badge, .segmented span", "color", AA),),
    *((".field, .check", "color", AA), (".box, .field input, .preset", "borderTopColor", AA_CONTROL)),
]
STOPS = "window.stops = [...document.querySelectorAll('a, input, textarea, button, summary, [tabindex]')]"
FOCUS = """() => {
  const at = document.activeElement;
  const marked = (element, pseudo) => {
    const style = getComputedStyle(element, pseudo);
    return (style.outlineStyle !== "none" && style.outlineWidth !== "0px") || style.boxShadow !== "none";
  };
  const ring = marked(at) || marked(at.parentElement) || marked(at, "::-webkit-slider-thumb")
    || marked(at.nextElementSibling ?? at);
  return [stops.indexOf(at), ring];
}"""
"""Place of the focused element among the stops, and whether it, its box or its label shows that."""
OBSERVE = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(`${event.violatedDirective} ${event.blockedURI}`));
window.streams = [];  // a copy of every answer's body: the browser keeps none of a body read as a stream
const ask = window.fetch;
window.fetch = async (...call) => {
  const response = await ask(...call);
  if (call[1].method === "POST") streams.push(response.clone().text().catch(String));
  return response;
};
window.batches = [];  // number of tokens, and of answers under way, at every change of the page
document.addEventListener("DOMContentLoaded", () => new MutationObserver(() => batches.push(
  [document.querySelectorAll(".token").length, document.querySelectorAll("[aria-busy=true]").length],
)).observe(document.querySelector("#panes"), {childList: true, subtree: true}));
"""


@dataclass
class Visit:
    """A page that has been opened, and what it has asked for."""

    page: Any
    bodies: list[dict[str, Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def send(self, text: str = PROMPT, num_tokens: int = 24, num_panes: int = 1, seed: int | str = 5) -> None:
        """Type, press Enter, and wait for every answer to end. An empty seed is drawn by the page."""
        self.set("max-tokens", num_tokens)
        self.set("seed", seed)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.page.wait_for_function(
            "([count]) => document.querySelectorAll('.turn[aria-busy=false]').length >= count", arg=[num_panes]
        )

    def set(self, name: str, value: object) -> None:
        if self.page.is_hidden("#settings"):
            self.page.click("#sampling")
        self.page.fill(f"#{name}", str(value))

    def chunks(self, index: int = -1) -> list[dict[str, Any]]:
        """Choices of the chunks of one streamed answer, as the server sent them."""
        lines = self.page.evaluate("index => streams.at(index)", index).splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return [choice for event in events for choice in event["choices"]]

    def classes(self, selector: str) -> list[set[str]]:
        found: list[str] = self.page.eval_on_selector_all(selector, "all => all.map(one => one.getAttribute('class'))")
        return [set(each.split()) for each in found]


def expected_routes(choices: list[dict[str, Any]]) -> tuple[np.ndarray, int]:
    """[T, L, K] of the steps that sampled the answer's tokens, and the mark of an empty slot."""
    packed = choices[-1]["routed_experts"]
    routes = np.frombuffer(base64.b64decode(packed["data"]), packed["dtype"]).reshape(packed["shape"])
    num_tokens = sum(len(choice.get("token_ids", ())) for choice in choices)
    return routes[len(routes) - num_tokens :], int(np.iinfo(routes.dtype).max)
