"""Prompts of `stretto enhance`: contradictions of the request, distinct suffixes, and kept requirements, by writer.

    python -m bench.enhance [MODEL] [--subnet corner] [--show]

The 40 requests are in ``bench/data/enhance.tsv``. Prints one row for the fixed suffix and, with MODEL, one for the model's own words
(`--writer model`). A prompt contradicts its request if a field behind the subject has a word that was listed by hand for this request:
another time, place, weather, medium or view. The lists were written before any model ran on these requests, and share nothing with those of
`stretto.tasks.shapes.fields`. Contradictions by words that are not listed are not counted, so read the prompts with --show, too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from bench.common.measure import bench_parser, table
from stretto.api.agent import endpoint
from stretto.api.serve import ServeOptions
from stretto.base.track import wide_console
from stretto.pictures.enhance import Enhanced, enhance, suffixed
from stretto.tasks.shapes.fields import FIELDS
from stretto.tasks.shapes.rules import unkept
from stretto.tasks.shapes.syntax import understand

REQUESTS: Final = Path(__file__).parent / "data/enhance.tsv"


def read_requests() -> dict[str, frozenset[str]]:
    """Requests with the words that contradict them."""
    rows = [line.split("\t") for line in REQUESTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    classes = {name: words for name, words in rows if name.isupper()}
    return {
        request: frozenset(" ".join(classes.get(word, word) for word in words.split()).split())
        for request, words in rows
        if request not in classes
    }


def contradicted(enhanced: Enhanced, listed: frozenset[str]) -> list[str]:
    """Listed words of the fields behind the subject."""
    text = " ".join(enhanced.fields[name] for name in FIELDS[1:]).lower()
    return sorted({*re.findall(r"[\w-]+", text)} & listed)


async def written_by(model: Path, subnet: str | None, requests: Iterable[str]) -> list[Enhanced]:
    async with endpoint(model, None, ServeOptions(max_batch=1)) as asked:
        own = {"model": asked.model, "temperature": 0.0} | ({"elastic": subnet} if subnet else {})

        async def ask(body: Mapping[str, Any]) -> Any:
            return await asked.client.chat({**body, **own})

        return [await enhance(ask, request, 512, 512) for request in requests]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="run or checkpoint whose own words are measured, too")
    parser.add_argument("--subnet", help="size of the network")
    parser.add_argument("--show", action="store_true", help="print all prompts of the model")
    args = parser.parse_args()
    requests = read_requests()
    arms = {"fixed suffix": [*map(suffixed, requests)]}
    if args.model is not None:
        arms["model"] = asyncio.run(written_by(args.model, args.subnet, requests))
    shown = table(
        f"{len(requests)} requests", "writer", "contradictions", "distinct suffixes", "requirements kept", "s"
    )
    for name, prompts in arms.items():
        against = [contradicted(each, listed) for each, listed in zip(prompts, requests.values(), strict=True)]
        ledgers = [*map(understand, requests)]
        lost = sum(len(unkept(ledger, each.prompt, understand)) for ledger, each in zip(ledgers, prompts, strict=True))
        asked = sum(ledger.num_constraints for ledger in ledgers)
        num = sum(map(bool, against))
        suffixes = {tuple(each.fields[name] for name in FIELDS[1:]) for each in prompts}
        seconds = sum(each.seconds for each in prompts) / len(prompts)
        shown.add_row(
            name,
            f"{num} ({num / len(prompts):.0%})",
            str(len(suffixes)),
            f"{asked - lost} of {asked}",
            f"{seconds:.1f}",
        )
        for each, words in zip(prompts, against, strict=True) if args.show and name == "model" else ():
            print(each.prompt, words or "")
    wide_console().print(shown)


if __name__ == "__main__":
    main()
