"""Agents at a service desk whose schemas they have never seen: what demonstrations teach a small network, and what rewards add.

    python -m bench.service runs/service                            one process
    python -m bench.service runs/service --seeds 1 --problems 50    a look
    python -m bench.service runs/service --set train.steps=1        rewards for one step alone: must fail

A network of random weights (`recipes/service.toml`) learns from demonstrations, and from there, for each seed with other
problems, by reinforcement, all on schemas of part ``train``. It is asked problems of part ``held_out``, whose names occur in
no other, at temperature 1, as it was trained: pass^1 and pass^4, the chance that one sample is right, and that all of four are.
Neither chooses anything here: steps and rates are the recipe's, for all seeds alike. Beside them stand agents that need no
network: one that says nothing, one that always transfers, and one that does all that it is asked after a yes and never reads the
policy.

What has ended is kept in OUT, and not done again; supervised training and evaluations go on where they were stopped. Exit code 1: pass^1
is below 80 % or pass^4 below 60 % in the mean over seeds, or doing nothing is right more often than 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import torch

from bench.common.measure import half_width, table, wide_console
from stretto.apps.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT, remove
from stretto.base.track import progress
from stretto.evals.scores import Interval
from stretto.post.suite import EvalOptions, Evaluation, SuiteConfig, evaluate
from stretto.rl.log import StepReport
from stretto.rl.plain import run_plainly
from stretto.rl.recipe import RlRecipe

RECIPE = Path(__file__).parents[1] / "recipes/service.toml"
SOURCE = "service"
STAGES = ("demonstrations", "and rewards")
IDLE, TRANSFERS = "empty", "always transfer"
K = 4
AIMS = {1: 0.8, K: 0.6}
"""Of pass^k."""
MOST_IDLE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--problems", type=int, default=100, help="held out, of every seed")
    parser.add_argument("--samples", type=int, default=8, help="of each")
    parser.add_argument("--own-starts", action="store_true", help="demonstrations anew for each seed, not once for all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override one recipe key")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Evaluation]] = {name: [] for name in STAGES}
    for seed in range(options.seeds):
        seeds = [f"train.seed={seed}", f"sources.{SOURCE}.args.seed={seed}"]
        recipe = read_recipe(options.recipe, RlRecipe, [*options.settings, *seeds])
        folder = options.out / f"seed-{seed}"
        start = made_start(recipe, folder if options.own_starts else options.out / "seed-0", device=options.device)
        checkpoints = {"demonstrations": start, "and rewards": train(recipe, folder, start, options.device)}
        for stage, checkpoint in checkpoints.items():
            found[stage].append(ask(recipe, checkpoint, options))
            score = found[stage][-1].domains[SOURCE]
            print(
                f"seed {seed}, {stage}: pass^1 {score.pass_hat[1].value:.3f}, pass^{K} {score.pass_hat[K].value:.3f}",
                flush=True,
            )
    show(options, found)
    last = [each.domains[SOURCE] for each in found["and rewards"]]
    reached = all(mean(one.pass_hat[k].value for one in last) >= aim for k, aim in AIMS.items())
    sys.exit(not reached or any(one.baselines[IDLE].value > MOST_IDLE for one in last))


def train(recipe: RlRecipe, folder: Path, start: Path, device: str) -> Path:
    """A seed's checkpoint after reinforcement learning."""
    run, checkpoint = folder / "rl", folder / CHECKPOINT
    if checkpoint.is_dir():
        return checkpoint
    remove(run)  # of a run that was cut short nothing is to stay
    with progress(f"{folder.name}: rewards", recipe.train.steps) as advance:

        def report(step: StepReport) -> None:
            advance(1, f"reward {step.scalars['reward/mean']:.2f}")

        asyncio.run(run_plainly(recipe, run, start, checkpoint, report, device=device))
    remove(run)
    return checkpoint


def ask(recipe: RlRecipe, checkpoint: Path, options: argparse.Namespace) -> Evaluation:
    source = recipe.sources[SOURCE]
    suite = SuiteConfig(
        sources={SOURCE: source.replace(args={**source.args, "part": "held_out", "seed": 0})},
        problems=options.problems,
        max_tokens=recipe.rollout.max_tokens,
        max_turns=recipe.rollout.max_turns,
    )
    told = EvalOptions(samples=options.samples, max_batch=recipe.rollout.max_batch)
    out = checkpoint.with_name(f"{checkpoint.name}.held_out")
    return evaluate(checkpoint, {SOURCE: suite}, out, told, name=checkpoint.parent.name, device=options.device)


def show(options: argparse.Namespace, found: Mapping[str, list[Evaluation]]) -> None:
    first = found["demonstrations"][0]
    cost = first.cost
    shown = table(
        f"{options.problems} problems of held-out schemas, {options.samples} samples each, {options.seeds} seeds of "
        f"{cost.total_params / 1e6:.1f}M parameters: mean ± 95 % over seeds (lowest to highest)",
        *("", "pass^1", f"pass^{K}", "tokens", "ended by a limit"),
    )
    for name in (IDLE, TRANSFERS):
        value = told(first.domains[SOURCE].baselines[name])
        shown.add_row({IDLE: "does nothing"}.get(name, name), value, value, "", "")
    for stage, evaluations in found.items():
        domains = [each.domains[SOURCE] for each in evaluations]
        cells = []
        for k in AIMS:
            values = [each.pass_hat[k].value for each in domains]
            spread = f" ± {half_width(values):.3f} ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
            cells.append(f"{mean(values):.3f}{spread}")
        cut = [sum(num for why, num in each.finishes.items() if why in ("length", "turns")) for each in domains]
        num_samples = options.problems * options.samples
        shown.add_row(
            stage, *cells, f"{mean(each.num_tokens for each in domains):.0f}", f"{mean(cut) / num_samples:.1%}"
        )
    wide_console().print(shown)


def told(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


if __name__ == "__main__":
    main()
