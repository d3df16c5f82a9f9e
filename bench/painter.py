"""How often the tiny painter shows what its prompt says, read back exactly.

    make painter
    python -m bench.painter [--folder runs/painter] [--num N]
    python -m bench.painter --model CHAT_MODEL              and what an enhancer makes of the first 40 requests: minutes

Prompts are drawn apart from the training's, and those of two things are ones the painter was never taught; `stretto paint` would make the same
pictures. A picture is right if every thing, number, colour and relation is there, and nothing else. Beside it: the pictures of another
prompt, the same pipeline without its training, what the autoencoder makes of drawn pictures (an upper bound), and those pictures
themselves. All shapes lie on white in a loose grid, 32 pixels wide: this says that the pipeline works, not that it paints.

Then the same requests as an enhancer writes them out, by a chat model or, where it writes nothing, with plain phrases behind them. The
painter was taught requests with made-up words behind them, so it can only show that such phrases do no harm: it has no style or light.
Exit code 1: too few are right, too many by chance, or fewer with an enhancer than without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.common.measure import table, wide_console
from stretto.api.agent import endpoint
from stretto.api.serve import ServeOptions
from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.pictures.backend import PaintRequest
from stretto.pictures.diffusers import Diffusers
from stretto.pictures.enhance import enhance, repaired
from stretto.pictures.painter import RECIPE_FILE, SIDE, Recipe, build, is_held_out, lessons, sample
from stretto.tasks.shapes.draw import draw, place, see, unmet
from stretto.tasks.shapes.fields import joined
from stretto.tasks.shapes.ledger import Ledger, describe, read

AIM, MOST_BY_CHANCE = 0.85, 0.02
KINDS = ("alone", "several", "two things", "with a relation")
NUM_WRITTEN = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/painter"))
    parser.add_argument("--num", type=int, default=200, help="prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="run or checkpoint of a chat model that writes requests out")
    options = parser.parse_args()
    painter = Diffusers(options.folder)
    kept = json.loads((options.folder / "pipeline" / RECIPE_FILE).read_text())
    recipe = Recipe(**{name: value for name, value in kept.items() if name in Recipe.__dataclass_fields__})
    ledgers = _asked(options.num, options.seed)
    requests = [describe(ledger) for ledger in ledgers]
    with tempfile.TemporaryDirectory() as folder:
        build(recipe, [prompt for prompt, _ in lessons(recipe)]).save_pretrained(folder)
        untrained = _paint(Diffusers(folder), requests)
    painted = _paint(painter, requests)
    drawn = [draw(place(ledger, 10**6 + item), SIDE, SIDE) for item, ledger in enumerate(ledgers)]
    rows = {
        "painter": (painted, ledgers),
        "another prompt's picture": (painted, [*ledgers[1:], ledgers[0]]),
        "without training": (untrained, ledgers),
        "autoencoder, of drawn pictures": (_through(painter, drawn), ledgers),
        "drawn pictures": (drawn, ledgers),
    }
    rights = _judged("Figure 5: pictures that show what was asked for", rows)
    some = requests[:NUM_WRITTEN]
    rows = {
        "the request itself": (painted[:NUM_WRITTEN], ledgers[:NUM_WRITTEN]),
        "plain phrases behind it": (_paint(painter, [_plain(request) for request in some]), ledgers[:NUM_WRITTEN]),
    }
    if options.model:
        written = asyncio.run(_written(options.model, some))
        rows["written out by a model"] = (_paint(painter, written), ledgers[:NUM_WRITTEN])
    bare, *enhanced = _judged("Figure 7: with an enhancer, and without", rows)
    sys.exit(int(rights[0] < AIM or rights[1] > MOST_BY_CHANCE or min(enhanced) < bare))


def _judged(title: str, rows: Mapping[str, tuple[Sequence[Image.Image], Sequence[Ledger]]]) -> list[float]:
    """Prints a table of pictures held against ledgers; the share that is right, row by row."""
    shown, shares = table(title, "what", "right", *KINDS), list[float]()
    for name, (pictures, asked) in rows.items():
        rights = [not unmet(ledger, see(picture)) for ledger, picture in zip(asked, pictures, strict=True)]
        parts = [
            [right for right, ledger in zip(rights, asked, strict=True) if _kind(ledger) == kind] for kind in range(4)
        ]
        shares.append(float(np.mean(rights)))
        shown.add_row(name, f"{shares[-1]:.1%}", *(f"{np.mean(part):.0%}" if part else "–" for part in parts))
    wide_console().print(shown)
    return shares


def _plain(request: str) -> str:
    return joined(repaired(read(request), request, {})[0])


async def _written(model: Path, requests: Sequence[str]) -> list[str]:
    async with endpoint(model, None, ServeOptions(max_batch=1)) as asked:

        async def ask(body: Mapping[str, Any]) -> Any:
            return await asked.client.chat({"model": asked.model, **body})

        written = []
        with progress("enhancer", len(requests)) as advance:
            for request in requests:
                written.append((await enhance(ask, request, SIDE, SIDE)).prompt)
                advance(1, written[-1])
        return written


def _asked(num: int, seed: int) -> list[Ledger]:
    """As in training, those of two things held out."""
    rng, found = random.Random(f"bench/{seed}"), list[Ledger]()
    while len(found) < num:
        ledger = sample(rng)
        while len(ledger.things) == 2 and not is_held_out(describe(ledger)):
            again = sample(rng)
            ledger = again if len(again.things) == 2 else ledger
        if not found or describe(ledger) != describe(found[-1]):  # else the next one's picture could be right by design
            found.append(ledger)
    return found


def _kind(ledger: Ledger) -> int:
    return (2 if not ledger.relations else 3) if len(ledger.things) == 2 else int((ledger.things[0].count or 1) > 1)


def _paint(painter: Diffusers, prompts: Sequence[str]) -> list[Image.Image]:
    pictures = []
    with progress(painter.name, len(prompts)) as advance:
        for seed, prompt in enumerate(prompts):
            pictures.append(painter.paint(PaintRequest(prompt, SIDE, SIDE, seed)))
            advance()
    return pictures


@torch.no_grad()
def _through(painter: Diffusers, pictures: Sequence[Image.Image]) -> list[Image.Image]:
    vae = painter._pipeline.vae
    real_BHWC = torch.from_numpy(np.stack([np.asarray(each, dtype=np.float32) for each in pictures])) / 127.5 - 1
    made_BCHW = vae.decode(vae.encode(real_BHWC.permute(0, 3, 1, 2)).latent_dist.mode()).sample
    made_BHWC = ((made_BCHW.permute(0, 2, 3, 1) + 1) * 127.5).clamp(0, 255).round().byte().numpy()
    return [Image.fromarray(each_HWC) for each_HWC in made_BHWC]


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
