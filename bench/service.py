"""Agents at a service desk whose schemas they have never seen: what demonstrations teach a network, and what rewards add.

    python -m bench.service runs/service                            one process
    python -m bench.service runs/service --seeds 1 --problems 50    a look
    python -m bench.service runs/service --set start.steps=1 --set train.steps=1 --set loss.drop_uniform=false      must fail
    python -m bench.service runs/smol_desk --recipe recipes/service_smol.toml --model runs/smol --device cuda --at-once 5

A network of random weights (`recipes/service.toml`), or that of ``--model``, learns from demonstrations, and from there, for each
seed with other problems, by reinforcement, all on schemas of part ``train``. It is asked problems of part ``held_out``, whose names
occur in no other, at temperature 1, as it was trained: pass^1 and pass^4, the chance that one sample is right, and that all of four
are. Neither chooses anything here: steps and rates are the recipe's, for all seeds alike. Beside them stand agents that need no
network: one that says nothing, one that always transfers, and one that does all that it is asked after a yes and never reads the
policy (it is told the customer's mind, so it writes without a fault).

What has ended is kept in OUT, and not done again; supervised training and evaluations go on where they were stopped, and
``--set runtime.stop_s=300`` ends each seed's rewards by the clock. Exit code 1: pass^1 is below 80 % or pass^4 below 60 % in the mean
over seeds, or doing nothing is right more often than 5 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import torch

from bench.common.measure import half_width, table, wide_console
from bench.common.worlds import ask, train
from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.paths import checkpoint_folder
from stretto.evals.scores import Interval, mean_interval
from stretto.learning.recipe import RlRecipe
from stretto.post.suite import Evaluation
from stretto.tasks.task import Answer
from stretto.tasks.worlds.service import ServiceArgs, ServiceSource

RECIPE = Path(__file__).parents[1] / "stretto/recipes/service.toml"
SOURCE = "service"
DEMONSTRATIONS, REWARDS = "demonstrations", "and rewards"
IDLE, TRANSFERS = "empty", "always transfer"
K = 4
AIMS = {1: 0.8, K: 0.6}
"""Of pass^k."""
MOST_IDLE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--model", type=Path, help="what learns, where the recipe describes no network")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=1, help="seeds, each a process")
    parser.add_argument("--problems", type=int, default=100, help="held out, of every seed")
    parser.add_argument("--samples", type=int, default=8, help="of each")
    parser.add_argument("--own-starts", action="store_true", help="demonstrations anew for each seed, not once for all")
    parser.add_argument(
        "--starts-only", action="store_true", help="demonstrations alone; the same call without it goes on"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override one recipe key")
    options = parser.parse_args()
    starts = range(options.seeds if options.own_starts else 1)
    stages = {DEMONSTRATIONS: starts} | ({} if options.starts_only else {REWARDS: range(options.seeds)})
    found: dict[str, list[Evaluation]] = {}
    # a process for each: what a training leaves behind on a GPU is not there for the next
    with ProcessPoolExecutor(options.at_once, get_context("spawn"), max_tasks_per_child=1) as pool:
        for stage, seeds in stages.items():
            checkpoints = list(pool.map(partial(learn, options, stage), seeds))
            found[stage] = list(pool.map(partial(answered, options, stage), seeds, checkpoints))
    show(options, found)
    if options.starts_only:
        return
    last = [each.domains[SOURCE] for each in found[REWARDS]]
    reached = all(mean(one.pass_hat[k].value for one in last) >= aim for k, aim in AIMS.items())
    sys.exit(not reached or any(one.baselines[IDLE].value > MOST_IDLE for one in last))


def recipe_of(options: argparse.Namespace, seed: int) -> RlRecipe:
    seeds = [f"train.seed={seed}", f"sources.{SOURCE}.args.seed={seed}"]
    return read_recipe(options.recipe, RlRecipe, [*options.settings, *seeds])


def learn(options: argparse.Namespace, stage: str, seed: int) -> Path:
    """A seed's checkpoint after a stage."""
    torch.set_num_threads(1)
    recipe, folder = recipe_of(options, seed), options.out / f"seed-{seed}"
    origin = checkpoint_folder(options.model) if options.model else None
    start = made_start(recipe, folder if options.own_starts else options.out / "seed-0", origin, options.device)
    return train(recipe, folder, start, options.device) if stage == REWARDS else start


def answered(options: argparse.Namespace, stage: str, seed: int, checkpoint: Path) -> Evaluation:
    """To held-out problems, which are the same for all seeds."""
    torch.set_num_threads(1)
    recipe, (samples, device) = recipe_of(options, 0), (options.samples, options.device)
    found = ask(recipe, checkpoint, "held_out", options.problems, samples=samples, device=device)
    scores = (f"pass^{k} {value.value:.3f}" for k, value in found.domains[SOURCE].pass_hat.items() if k in AIMS)
    print(f"seed {seed}, {stage}: {', '.join(scores)}", flush=True)
    return found


def show(options: argparse.Namespace, found: Mapping[str, list[Evaluation]]) -> None:
    first = found[DEMONSTRATIONS][0]
    cost = first.cost
    shown = table(
        f"{options.problems} problems of held-out schemas, {options.samples} samples each, {options.seeds} seeds of "
        f"{cost.total_params / 1e6:.1f}M parameters: mean ± 95 % over seeds (lowest to highest)",
        *("", "pass^1", f"pass^{K}", "tokens", "ended by a limit"),
    )
    args = first.asked["suites"][SOURCE]["sources"][SOURCE]["args"]
    desk, domain = ServiceSource(SOURCE, ServiceArgs.model_validate(args)), first.domains[SOURCE]
    problems = [desk.problem(item) for item in domain.items]
    obliging = [float(desk.score(each, Answer("", desk.obliging(each))).ok) for each in problems]
    agents = {
        "does nothing": domain.baselines[IDLE],
        TRANSFERS: domain.baselines[TRANSFERS],
        "always obliges": mean_interval("obliging", obliging),
    }
    for name, interval in agents.items():
        shown.add_row(name, told(interval), told(interval), "", "")
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
