"""RL with several trainer ranks against one rank: the final weights, and ``kill -9`` of random ranks.

    python -m bench.rl_ranks [--steps N] [--kills N] [--seed S] [--keep DIR]

The recipe of `bench.common.killing`, at staleness 0 with batch-invariant operators, runs to its end with 1, 2 and 4 ranks (local processes,
gloo), experts on 1 rank or split over 2, and 1, 2 and 3 engines. Runs that differ in their engines only must end with equal bits. Other
numbers of ranks sum in another order: their weights must be within the derived `tolerance` of one rank's.

Then a run with two ranks and split experts is killed: a random rank each time, at random moments. It must train the same samples as an
uninterrupted run, none of them lost or twice, and end with its bits.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from bench.common.killing import GROUP, HEAD, PROMPTS, RECIPE, STEPS, Killed
from bench.common.measure import bench_parser, finish, table
from bench.common.run_account import Account, checksum, num_other
from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT
from stretto.base.track import progress, wide_console
from stretto.engine.runner import state_checksum
from stretto.flow.launch import Job
from stretto.flow.run import run_rl
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import read_checkpoint

LAYOUTS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2))
"""Pairs of ``trainer.ranks`` and ``trainer.ep``."""
ENGINES = (1, 2, 3)
LR = 1e-3
KILLED_STEPS = 20
RESTART_S = 60.0
"""Aim: seconds from the death of a rank to the next step."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="steps of the runs of the first table; 0: none")
    parser.add_argument("--kills", type=int, default=5, help="number of kills; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random ranks and moments")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        recipe = folder / "recipe.toml"
        recipe.write_text(HEAD + RECIPE.replace('isolate = "all"', 'isolate = "torch"'))
        good = _compare(recipe, folder, options.steps) if options.steps else True
        if options.kills:
            text = recipe.read_text().replace(f"\nsteps = {STEPS}\n", f"\nsteps = {KILLED_STEPS}\n")
            recipe.write_text(f"{text}\n[trainer]\nranks = 2\nep = 2\n\n[failures]\nrestarts = {options.kills}\n")
            good &= _kill(recipe, folder, options.kills, random.Random(options.seed))
    finish([] if good else ["an aim is missed, see above"])


def tolerance(steps: int, num_tokens: int) -> float:
    """Largest difference of weights (root mean square) that another order of summation explains after ``steps`` steps, in fp32.

    A gradient is a sum of n terms, whose rounding is a random walk: its error is δ = √n·ε times the size of a typical gradient. AdamW
    divides by the gradient's size, so a weight whose gradient is only a times the typical one moves by lr·δ/a too far, and by 2·lr at
    most. With a normal, the mean square over the weights is 8·φ(0)·δ·lr², because small gradients dominate: ∫min(δ/a, 2)²φ(a)da. Errors of
    different steps are independent.
    """
    delta = math.sqrt(num_tokens) * torch.finfo(torch.float32).eps
    return LR * math.sqrt(8 / math.sqrt(2 * math.pi) * delta * steps)


def _compare(recipe: Path, folder: Path, steps: int) -> bool:
    settings = [f"train.steps={steps}", f"optim.lr={LR}", f"train.eval_every={steps}", "runtime.agents.max=2"]
    start = made_start(read_recipe(recipe, RlRecipe, settings), folder / "start", device="cpu")
    weights: dict[tuple[int, int, int], dict[str, Tensor]] = {}
    seconds: dict[tuple[int, int, int], float] = {}
    with progress("runs", len(LAYOUTS) * len(ENGINES)) as advance:
        for ranks, ep in LAYOUTS:
            for engines in ENGINES:
                own = [f"trainer.ranks={ranks}", f"trainer.ep={ep}", f"rollout.engines={engines}"]
                run, began_s = folder / f"run-{ranks}-{ep}-{engines}", time.perf_counter()
                job = Job(read_recipe(recipe, RlRecipe, [*settings, *own]), run, start)
                run_rl(job, lambda num, note: None, lambda text: None)
                weights[ranks, ep, engines] = read_checkpoint(run / CHECKPOINT).model.state_dict()
                seconds[ranks, ep, engines] = time.perf_counter() - began_s
                advance(1, run.name)
    limit = tolerance(steps, PROMPTS * GROUP * read_recipe(recipe, RlRecipe, settings).rollout.max_tokens)
    one = weights[1, 1, 1]
    shown = table(
        f"final weights after {steps} steps; they moved by up to {steps * LR:g}",
        *(
            "ranks",
            "ep",
            "seconds",
            "engines 1, 2, 3: equal bits",
            "RMS difference to one rank",
            "largest",
            "tolerance",
            "verdict",
        ),
    )
    good = True
    for ranks, ep in LAYOUTS:
        is_equal = len({state_checksum(weights[ranks, ep, engines]) for engines in ENGINES}) == 1
        rms, largest = _difference(weights[ranks, ep, 1], one)
        is_good = is_equal and rms <= limit
        good &= is_good
        times = ", ".join(f"{seconds[ranks, ep, engines]:.0f}" for engines in ENGINES)
        figures = f"{rms:.1e}", f"{largest:.1e}", f"{limit:.1e}"
        shown.add_row(
            str(ranks), str(ep), times, "yes" if is_equal else "NO", *figures, "good" if is_good else "MISSED"
        )
    wide_console().print(shown)
    return good


def _difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, float]:
    """Root mean square and largest difference of all weights."""
    assert one.keys() == other.keys()
    flat = torch.cat([(one[name].double() - other[name].double()).flatten() for name in one])
    return float(flat.square().mean().sqrt()), float(flat.abs().max())


def _kill(recipe: Path, folder: Path, num_kills: int, rng: random.Random) -> bool:
    runs = [Killed(recipe, Account(folder / name, folder / f"{name}-groups"), rng) for name in ("whole", "killed")]
    with progress("whole and killed run", len(runs)) as advance:
        for run, kinds in zip(runs, ([], ["trainer"] * num_kills), strict=True):
            run.finish(kinds)
            advance(1, run.account.run.name)
    whole, killed = runs
    (samples, expected), (found, trained) = whole.account.samples(), killed.account.samples()
    lost, twice = sum((expected - trained).values()), sum((trained - expected).values())
    num_others = num_other(samples, found)
    last = [checksum(run.account.run) for run in runs]
    times = sorted(kill.recovered_s for kill in killed.kills if kill.recovered_s is not None)
    names = ", ".join(sorted(kill.name for kill in killed.kills))
    shown = table(f"kill -9 of {len(killed.kills)} ranks: {names}", "", "measured", "aim")
    shown.add_row("samples trained", f"{len(found):,}", f"{len(samples):,}")
    shown.add_row("samples lost, trained twice", f"{lost}, {twice}", "0, 0")
    shown.add_row("samples with other tokens", str(num_others), "0")
    shown.add_row("steps repeated", str(killed.account.num_rolled_back()), "")
    shown.add_row("final weights bitwise equal", "yes" if last[0] == last[1] else "no", "yes")
    shown.add_row("seconds to the next step", ", ".join(f"{each:.1f}" for each in times), f"< {RESTART_S:g}")
    wide_console().print(shown)
    is_prompt = len(killed.kills) == num_kills and bool(times) and times[-1] < RESTART_S
    return lost == twice == num_others == 0 and last[0] == last[1] and is_prompt


if __name__ == "__main__":
    main()
