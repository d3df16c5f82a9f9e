"""Learning curves over seeds, with the engine's routes replayed in the trainer and without, under a forced mismatch.

    python -m bench.rl_learning [--seeds N] [--steps N] [--start CHECKPOINT] [--recipe FILE] [--rollout fp8]

The same recipe and the same supervised start; the engine computes in ``--rollout``, the trainer in fp32, so that the two
disagree. Each seed draws other problems and samples. Reward: mean over the last fifth of the steps, and on held-out
problems at the end. A run has collapsed where its last rewards are below half of its best stretch of a fifth.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common.measure import table, wide_console
from stretto.apps.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.paths import RECIPES, checkpoint_folder
from stretto.base.track import progress, read_metrics
from stretto.rl.recipe import RlRecipe

REPLAYS = ("r3", "off")
FIFTH = 5


@dataclass(frozen=True, slots=True)
class Curve:
    """One run. Written by `run`."""

    rewards: np.ndarray
    """By step."""
    held_out: float
    mismatch: float
    """Mean K3 over all steps, tokens of the same version where there are any, else of all."""

    @property
    def last(self) -> float:
        return float(self.rewards[-max(1, len(self.rewards) // FIFTH) :].mean())

    @property
    def has_collapsed(self) -> bool:
        size = max(1, len(self.rewards) // FIFTH)
        best = max(float(self.rewards[at : at + size].mean()) for at in range(len(self.rewards) - size + 1))
        return self.last < best / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPES / "rl_gym.toml")
    parser.add_argument("--start", type=Path, help="run or checkpoint; default: the recipe's own, trained once")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rollout", choices=("fp8", "bf16", "fp32"), default="fp8")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override one recipe key")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe = read_recipe(options.recipe, RlRecipe, options.settings)
        start = checkpoint_folder(options.start) if options.start else made_start(recipe, folder / "start")
        curves: dict[str, list[Curve]] = {name: [] for name in REPLAYS}
        with progress("runs", options.seeds * len(REPLAYS)) as advance:
            for seed in range(options.seeds):
                for name in REPLAYS:  # in turn, so that a slow spell meets both
                    curves[name].append(run(options, start, folder / f"{name}-{seed}", seed, name))
                    advance(1, f"seed {seed}, replay {name}: reward {curves[name][-1].last:.3f}")
    show(options, curves)


def run(options: argparse.Namespace, start: Path, folder: Path, seed: int, replay: str) -> Curve:
    """One run of the command in a process of its own."""
    settings = [
        f"train.seed={seed}",
        f"train.steps={options.steps}",
        f"train.eval_every={options.steps}",
        f"precision.rollout={options.rollout}",
        f"replay={replay}",
        *options.settings,
    ]
    command = [sys.executable, "-m", "stretto.apps.cli", "rl", str(options.recipe), "--model", str(start)]
    flags = [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run([*command, "-o", str(folder), *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"seed {seed}, replay {replay}: {done.stderr.strip() or done.stdout.strip()}")
    rows = read_metrics(folder)
    steps = [row for row in rows if "reward/mean" in row]
    k3 = [row.get("mismatch/same_k3_mean", row.get("mismatch/stale_k3_mean", 0.0)) for row in steps]
    held_out = [row["eval/reward"] for row in rows if "eval/reward" in row]
    return Curve(np.array([row["reward/mean"] for row in steps]), held_out[-1], float(np.mean(k3)))


def show(options: argparse.Namespace, curves: dict[str, list[Curve]]) -> None:
    console = wide_console()
    shown = table(
        f"{options.recipe.name}, {options.steps} steps, {options.seeds} seeds, rollout {options.rollout}, trainer fp32",
        *("replay", "reward, last fifth", "lowest to highest", "held-out", "lowest to highest", "K3", "collapsed"),
    )
    for name, runs in curves.items():
        last, held_out = [each.last for each in runs], [each.held_out for each in runs]
        shown.add_row(
            name,
            *(f"{np.mean(last):.3f}", f"{min(last):.3f} to {max(last):.3f}"),
            *(f"{np.mean(held_out):.3f}", f"{min(held_out):.3f} to {max(held_out):.3f}"),
            f"{np.mean([each.mismatch for each in runs]):.1e}",
            f"{sum(each.has_collapsed for each in runs)} of {len(runs)}",
        )
    console.print(shown)
    for name, runs in curves.items():
        parts = np.array_split(np.mean([each.rewards for each in runs], axis=0), min(10, options.steps))
        console.print(f"{name}: reward by tenths {'  '.join(f'{part.mean():.3f}' for part in parts)}", soft_wrap=True)


if __name__ == "__main__":
    main()
