"""Learning curves over seeds where the engine's routers choose other experts than the trainer's: what replay (R3) is for.

    python -m bench.rl_learning [--seeds N] [--noise S] [--set KEY=VALUE]

Networks small enough for this machine forgive what bf16 or FP8 do to their routes, so the mismatch is forced: with each
version the engine draws normal noise of ``--noise`` onto the bias by which its routers choose (scores lie between 0 and 1),
never onto the weights of what they chose. Trainer and engine compute in fp32, so that nothing else differs. Three runs a
seed, all from one supervised start: without noise, with noise, and with noise and the engine's routes replayed.

A run has collapsed where its last fifth of the steps is rewarded less than half as much as its first step or its best
stretch of a fifth. Exits with 1 unless the noise without replay collapses with every seed, and nothing else does with any.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.common.measure import table, wide_console
from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT, checkpoint_folder
from stretto.base.track import progress
from stretto.base.trajectory import WeightVersion
from stretto.data.loader import key_of
from stretto.flow.plain import run_plainly
from stretto.learning.metrics import StepReport
from stretto.learning.recipe import RlRecipe
from stretto.learning.weights import fetch

RECIPE = Path(__file__).with_suffix(".toml")
FORCED = "noise, no replay"
RUNS = {"no noise, no replay": (False, "off"), FORCED: (True, "off"), "noise, R3": (True, "r3")}
FIFTH = 5


@dataclass(frozen=True, slots=True)
class Curve:
    """One run, by step. Written by `run`."""

    rewards: np.ndarray
    mismatch: np.ndarray
    """Mean K3 between trainer and engine."""
    entropy: np.ndarray

    @property
    def last(self) -> float:
        return float(self.rewards[-max(1, len(self.rewards) // FIFTH) :].mean())

    @property
    def best(self) -> float:
        size = max(1, len(self.rewards) // FIFTH)
        fifths = np.convolve(self.rewards, np.full(size, 1 / size), "valid")
        return float(max(self.rewards[0], fifths.max()))

    @property
    def has_collapsed(self) -> bool:
        return self.last < self.best / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--start", type=Path, help="run or checkpoint; default: the recipe's own, trained once")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override one recipe key")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    curves: dict[str, list[Curve]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe = read_recipe(options.recipe, RlRecipe, options.settings)
        start = checkpoint_folder(options.start) if options.start else made_start(recipe, folder / "start")
        with progress("runs", len(seeds) * len(RUNS)) as advance:
            for seed in seeds:
                for number, (name, (is_noisy, replay)) in enumerate(RUNS.items()):
                    told = [*options.settings, f"train.seed={seed}", f"replay={replay}"]
                    chosen = read_recipe(options.recipe, RlRecipe, told)
                    noise = options.noise if is_noisy else 0.0
                    curves[name].append(run(chosen, folder / f"{seed}-{number}", start, noise))
                    advance(1, f"seed {seed}, {name}: reward {curves[name][-1].last:.3f}")
    show(options, recipe, curves)
    sys.exit(any(each.has_collapsed != (name == FORCED) for name, runs in curves.items() for each in runs))


def run(recipe: RlRecipe, folder: Path, start: Path, noise: float) -> Curve:
    reports: list[StepReport] = []
    taken_over = partial(noisy, noise, recipe.train.seed)
    asyncio.run(run_plainly(recipe, folder, start, folder / CHECKPOINT, reports.append, taken_over))
    names = ("reward/mean", "mismatch/same_k3_mean", "policy/entropy")
    return Curve(*(np.array([report.scalars[name] for report in reports]) for name in names))


def noisy(noise: float, seed: int, version: WeightVersion) -> Mapping[str, Tensor]:
    """The weights of ``version``, with noise on the bias by which routers choose."""
    state = fetch(version)
    generator = torch.Generator().manual_seed(key_of(seed, version.number) >> 1)
    for name in [name for name in state if name.endswith("bias_WE")]:
        state[name] = state[name] + noise * torch.randn(state[name].shape, generator=generator)
    return state


def show(options: argparse.Namespace, recipe: RlRecipe, curves: Mapping[str, list[Curve]]) -> None:
    console = wide_console()
    train, loss = recipe.train, recipe.loss
    shown = table(
        f"{train.steps} steps of {train.minibatches} updates, rate {recipe.optim.lr:g}, correction {loss.correction}, "
        f"noise {options.noise:g}, {options.seeds} seeds: means (lowest to highest)",
        *("", "first reward", "best fifth", "last fifth", "K3, first fifth", "last", "entropy at the end", "collapsed"),
    )
    for name, runs in curves.items():
        size = max(1, train.steps // FIFTH)
        last = [each.last for each in runs]
        k3 = [np.mean([each.mismatch[part] for each in runs]) for part in (slice(size), slice(-size, None))]
        shown.add_row(
            name,
            f"{np.mean([each.rewards[0] for each in runs]):.3f}",
            f"{np.mean([each.best for each in runs]):.3f}",
            f"{np.mean(last):.3f} ({min(last):.3f} to {max(last):.3f})",
            *(f"{value:.1e}" for value in k3),
            f"{np.mean([each.entropy[-1] for each in runs]):.2f}",
            f"{sum(each.has_collapsed for each in runs)} of {len(runs)}",
        )
    console.print(shown)
    for name, runs in curves.items():
        parts = np.array_split(np.mean([each.rewards for each in runs], axis=0), min(10, train.steps))
        console.print(f"{name}: reward by tenths {'  '.join(f'{part.mean():.3f}' for part in parts)}", soft_wrap=True)


if __name__ == "__main__":
    main()
