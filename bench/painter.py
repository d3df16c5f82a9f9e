"""How often the tiny painter shows what its prompt says, read back exactly.

    make painter
    python -m bench.painter [--folder runs/painter] [--num N]

Prompts are drawn apart from the training's, and those of two things are ones the painter was never taught; `stretto paint` would make the same
pictures. A picture is right if every thing, number, colour and relation is there, and nothing else. Beside it: the pictures of another
prompt, the same pipeline without its training, what the autoencoder makes of drawn pictures (an upper bound), and those pictures
themselves. All shapes lie on white in a loose grid, 32 pixels wide: this says that the pipeline works, not that it paints.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bench.common.measure import table, wide_console
from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.pictures.backend import PaintRequest
from stretto.pictures.diffusers import Diffusers
from stretto.pictures.painter import RECIPE_FILE, SIDE, Recipe, build, is_held_out, lessons, sample
from stretto.tasks.shapes.draw import draw, place, see, unmet
from stretto.tasks.shapes.ledger import Ledger, describe

AIM, MOST_BY_CHANCE = 0.85, 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/painter"))
    parser.add_argument("--num", type=int, default=200, help="prompts")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    painter = Diffusers(options.folder)
    kept = json.loads((options.folder / "pipeline" / RECIPE_FILE).read_text())
    recipe = Recipe(**{name: value for name, value in kept.items() if name in Recipe.__dataclass_fields__})
    ledgers = _asked(options.num, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        build(recipe, [prompt for prompt, _ in lessons(recipe)]).save_pretrained(folder)
        untrained = _paint(Diffusers(folder), ledgers)
    painted = _paint(painter, ledgers)
    drawn = [draw(place(ledger, 10**6 + item), SIDE, SIDE) for item, ledger in enumerate(ledgers)]
    shown = table(
        "Figure 5: pictures that show what was asked for",
        "what",
        "right",
        "alone",
        "several",
        "two things",
        "with a relation",
    )
    for name, pictures, asked in (
        ("painter", painted, ledgers),
        ("another prompt's picture", painted, [*ledgers[1:], ledgers[0]]),
        ("without training", untrained, ledgers),
        ("autoencoder, of drawn pictures", _through(painter, drawn), ledgers),
        ("drawn pictures", drawn, ledgers),
    ):
        rights = [not unmet(ledger, see(picture)) for ledger, picture in zip(asked, pictures, strict=True)]
        kinds = [_kind(ledger) for ledger in asked]
        parts = [[right for right, kind in zip(rights, kinds, strict=True) if kind == each] for each in range(4)]
        shown.add_row(name, f"{np.mean(rights):.1%}", *(f"{np.mean(part):.0%}" if part else "–" for part in parts))
    wide_console().print(shown)


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


def _paint(painter: Diffusers, ledgers: Sequence[Ledger]) -> list[Image.Image]:
    pictures = []
    with progress(painter.name, len(ledgers)) as advance:
        for seed, ledger in enumerate(ledgers):
            pictures.append(painter.paint(PaintRequest(describe(ledger), SIDE, SIDE, seed)).image)
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
