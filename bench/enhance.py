"""What becomes of a request for a picture: what is kept of it, bound as it was, and what is added.

    python -m bench.enhance runs/x                          twelve requests, at full, half and corner
    python -m bench.enhance runs/x --geneval FILE -n 30     requests of GenEval's evaluation_metadata.jsonl instead
    python -m bench.enhance runs/x --unrepaired             what the model wrote, not put right: must fail

Rows: the request itself, a fixed suffix, the model asked without grammar or repair (for a text, and for fields, which is what
recipes/enhancer.toml trains), with the grammar alone, and both.
What a request asks for is written down by hand (or by GenEval's authors) and looked for by the expressions in this file, which share nothing with the
ledger that repairs. A colour counts if it stands at its object and no other colour does at the same noun, a number if it stands before it, a
relation if subject, preposition and object follow each other in one sentence, or the inverse the other way round. Aspects: of subject,
scene, style, lighting, composition and camera, those that some word speaks of; "own": whose text no other request was given, which a
fixed suffix cannot have. Naming an aspect is not writing it well, and nothing here looks at a picture. Exit code 1: at full size something
is lost, or fewer than four aspects are there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bench.common.measure import table, wide_console
from stretto.api.agent import Endpoint, endpoint
from stretto.api.serve import ServeOptions
from stretto.base.track import progress
from stretto.pictures.enhance import enhance
from stretto.server.client import ApiFailure
from stretto.tasks.shapes.fields import EXAMPLE, FIELDS, SYSTEM, fields_of, joined, messages

SUFFIX = "Highly detailed photograph, soft natural light, centered composition, 50mm lens, plain background."
SIZES = ("full", "half", "corner")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
COLOURS = "red|green|blue|yellow|orange|purple|pink|brown|black|white|grey|gray"
INVERSES = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
SPEAKS = {
    "scene": r"background|room|interior|street|forest|garden|field|city|town|sky|beach|kitchen|cafe|studio|landscape|park|window|indoors|outdoors",
    "style": r"style|painting|photo\w*|illustration|render\w*|watercolou?r|cartoon|sketch|realis\w+|minimalis\w+|cinematic|vintage",
    "lighting": r"light\w*|sunlit|\w+light|shadows?|glow\w*|sunset|dusk|dawn|backlit",
    "composition": r"composition|cent(?:er|re)d|foreground|symmetr\w+|balanced|fram(?:ed|ing)|rule of thirds|negative space|diagonal",
    "camera": r"camera|shot|close-up|lens|angle|depth of field|focus|macro|perspective|bokeh|\d+ ?mm",
}
Attribute = tuple[str, ...]


@dataclass(frozen=True)
class Request:
    text: str
    asked: tuple[Attribute, ...]


def request(text: str, *asked: str) -> Request:
    """``asked``: parts by colons: ``cube:2``, ``cube:red``, ``cube:left of:ball``, ``"OPEN"``."""
    return Request(text, tuple(tuple(each.split(":")) for each in asked))


REQUESTS = (
    request("A cat in a coffee shop", "cat:1", "coffee shop:1", "cat:in:coffee shop"),
    request("Two red cubes to the left of a blue sphere", "cube:2", "cube:red", "sphere:blue", "cube:left of:sphere"),
    request("an old man holding a green umbrella", "man:old", "umbrella:green", "man:holding:umbrella"),
    request('A wooden door with a sign that says "OPEN 24h"', "door:wooden", "sign:1", '"OPEN 24h"'),
    request("a black dog above a white car", "dog:black", "car:white", "dog:above:car"),
    request("three yellow ducks and one brown bear", "duck:3", "duck:yellow", "bear:1", "bear:brown"),
    request("a pink teapot below a purple lamp", "teapot:pink", "lamp:purple", "teapot:below:lamp"),
    request("a photo of four oranges in a white bowl", "orange:4", "bowl:white", "orange:in:bowl"),
    request("an oil painting of a small boat on a lake", "boat:small", "lake:1", "boat:on:lake", "oil painting:1"),
    request("A child wearing a red hat next to a grey horse", "hat:red", "horse:grey", "child:wearing:hat"),
    request("a poster that says 'Jazz Night' behind a green guitar", "poster:1", "guitar:green", "'Jazz Night'"),
    request("two white cats on a blue sofa", "cat:2", "cat:white", "sofa:blue", "cat:on:sofa"),
)


def of_geneval(path: Path, num: int) -> list[Request]:
    """Requests with numbers, colours or places, in equal shares."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kinds = ("counting", "position", "color_attr")
    chosen = [
        record for kind in kinds for record in [each for each in records if each["tag"] == kind][: num // len(kinds)]
    ]
    requests = []
    for record in chosen:
        nouns = [each["class"] for each in record["include"]]
        asked = [(noun, str(each["count"])) for noun, each in zip(nouns, record["include"], strict=True)]
        asked += [(each["class"], each["color"]) for each in record["include"] if "color" in each]
        places = [(each["class"], *each["position"]) for each in record["include"] if "position" in each]
        asked += [(noun, kind, nouns[other]) for noun, kind, other in places]
        requests.append(Request(record["prompt"], tuple(asked)))
    return requests


def is_kept(attribute: Attribute, text: str) -> bool:
    """By expressions of its own; see the head of the file."""
    if len(attribute) == 1:
        return attribute[0].strip("\"'") in text
    lower = text.lower()
    noun = rf"{re.escape(attribute[0])}(?:s|es)?\b"
    if len(attribute) == 3:
        subject, kind, other = attribute
        turned = [(other, INVERSES[kind], subject)] if kind in INVERSES else []
        return any(_follows(*each, lower) for each in ((subject, kind, other), *turned))
    value = attribute[1]
    if value.isdigit():
        words = f"{value}|{NUMBERS[int(value)]}" + ("|a|an|the" if value == "1" else "")
        return re.search(rf"\b(?:{words}) (?:[\w-]+ ){{0,2}}{noun}", lower) is not None
    if value in COLOURS.split("|"):
        at_noun = set(re.findall(rf"\b({COLOURS}) (?:(?!(?:{COLOURS}) )[\w-]+ )?{noun}", lower))
        at_noun |= set(re.findall(rf"{noun} (?:is|are) ({COLOURS})\b", lower))
        return at_noun == {value}
    return re.search(rf"\b{value} (?:[\w-]+ ){{0,2}}{noun}", lower) is not None


def _follows(subject: str, kind: str, other: str, text: str) -> bool:
    near = r"(?:(?:is|are|to the|on the|[\w-]+ing) )?"
    there = rf"{re.escape(subject)}(?:s|es)? {near}{kind} (?:[\w-]+ ){{0,3}}{re.escape(other)}(?:s|es)?\b"
    return any(re.search(there, sentence) for sentence in re.split(r"[.;!?]", text))


def spoken(text: str, asked: str) -> dict[str, str]:
    """Of the aspects that a text speaks of, what it says: the parts between commas and stops with a word of it."""
    found = {"subject": asked} if text.lower().startswith(asked.lower()[:12]) else {}
    parts = [part.strip() for part in re.split(r"[.,;\n]", text.lower().replace(asked.lower(), ""))]
    for name, signs in SPEAKS.items():
        said = [part for part in parts if re.search(rf"\b(?:{signs})\b", part)]
        if said:
            found[name] = ", ".join(said)
    return found


async def ungrammatical(asked: Endpoint, prompt: str, size: str | None) -> str:
    """The fields, asked for as the enhancer does, without grammar and repair: what `recipes/enhancer.toml` trains."""
    told = await asked.client.chat(
        {"model": asked.model, "messages": messages(prompt, 1024, 1024), "temperature": 0.0, "max_tokens": 200}
        | ({"elastic": size} if size else {})
    )
    return joined(fields_of(told["choices"][0]["message"]["content"] or ""))


async def plain(asked: Endpoint, prompt: str, size: str | None, seed: int) -> tuple[str, float]:
    """The model without grammar and repair: what a user of the chat API gets for the same instruction."""
    body: dict[str, Any] = {
        "model": asked.model,
        "messages": [
            {"role": "system", "content": SYSTEM.replace(" Answer in JSON.", "")},
            {"role": "user", "content": EXAMPLE[0]["prompt"]},
            {"role": "assistant", "content": joined(EXAMPLE[1])},
            {"role": "user", "content": prompt},
        ],
        "temperature": 0.0,
        "seed": seed,
        "max_tokens": 120,
    }
    told = await asked.client.chat(body | ({"elastic": size} if size else {}))
    return told["choices"][0]["message"]["content"] or "", 0.0


async def all_rows(
    model: Path, requests: Sequence[Request], sizes: Sequence[str], dtype: str | None
) -> dict[str, list[tuple[str, float]]]:
    rows: dict[str, list[tuple[str, float]]] = {
        "the request itself": [(each.text, 0.0) for each in requests],
        "a fixed suffix": [(f"{each.text.rstrip('.')}. {SUFFIX}", 0.0) for each in requests],
    }
    async with endpoint(model, None, ServeOptions(max_batch=1, dtype=dtype)) as asked:

        async def ask(body: Mapping[str, Any]) -> Any:
            return await asked.client.chat({"model": asked.model, **body} | ({"elastic": size} if size else {}))

        with progress("enhance", len(requests) * len(sizes)) as advance:
            for size in sizes:
                try:
                    await enhance(ask, "a cup", 1024, 1024)  # reads the grammar, once
                except ApiFailure as failure:
                    sys.exit(f"{model}: {size}: {failure.message}")
                for each in requests:
                    if size == sizes[0]:
                        rows.setdefault(f"{size}: no grammar, no repair", []).append(
                            await plain(asked, each.text, size, 0)
                        )
                        rows.setdefault(f"{size}: fields, the same", []).append(
                            (await ungrammatical(asked, each.text, size), 0.0)
                        )
                    made = await enhance(ask, each.text, 1024, 1024)
                    written = joined({name: made.written.get(name) or "-" for name in FIELDS})
                    rows.setdefault(f"{size}: grammar alone", []).append((written, made.seconds))
                    rows.setdefault(f"{size}: enhanced", []).append((made.prompt, made.seconds))
                    advance(1)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="run or checkpoint of a chat model")
    parser.add_argument("--geneval", type=Path, help="GenEval's evaluation_metadata.jsonl")
    parser.add_argument("-n", type=int, default=30, help="requests of it")
    parser.add_argument("--sizes", default=",".join(SIZES), help="presets, the largest first")
    parser.add_argument("--dtype", help="as in stretto serve")
    parser.add_argument("--unrepaired", action="store_true", help="judge what the model wrote; must fail")
    parser.add_argument("--show", action="store_true", help="print the prompts")
    told = parser.parse_args()
    requests = of_geneval(told.geneval, told.n) if told.geneval else list(REQUESTS)
    sizes = told.sizes.split(",")
    rows = asyncio.run(all_rows(told.model, requests, sizes, told.dtype))
    lines = []
    results: dict[str, tuple[int, float]] = {}
    num = sum(len(each.asked) for each in requests)
    for name, outs in rows.items():
        kept = [
            is_kept(attribute, text) for each, (text, _) in zip(requests, outs, strict=True) for attribute in each.asked
        ]
        places = [
            is_kept(attribute, text)
            for each, (text, _) in zip(requests, outs, strict=True)
            for attribute in each.asked
            if len(attribute) == 3
        ]
        said = [spoken(text, each.text) for each, (text, _) in zip(requests, outs, strict=True)]
        counts = Counter((aspect, words) for each in said for aspect, words in each.items())
        own = [sum(counts[pair] == 1 for pair in each.items()) for each in said]
        results[name] = sum(kept), mean(map(len, said))
        lines.append(
            [name, f"{sum(kept)} of {num}", f"{sum(places)} of {len(places)}", f"{mean(map(len, said)):.1f}", f"{mean(own):.1f}",
             f"{1e3 * mean(seconds for _, seconds in outs):,.0f}"]
        )  # fmt: skip
        if told.show:
            for each, (text, _) in zip(requests, outs, strict=True):
                lost = [":".join(attribute) for attribute in each.asked if not is_kept(attribute, text)]
                print(f"[{name}] {text}" + (f"   LOST {lost}" if lost else ""))
    console = wide_console()
    made = table(f"{len(requests)} requests", "prompt", "kept", "relations", "aspects of 6", "own", "ms")
    for line in lines:
        made.add_row(*line)
    console.print(made)
    kept_num, aspects = results[f"{sizes[0]}: {'grammar alone' if told.unrepaired else 'enhanced'}"]
    sys.exit(int(kept_num < num or aspects < 4))


if __name__ == "__main__":
    main()
