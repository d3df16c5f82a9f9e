"""Routing replay (R3) and other remedies where the engine's routers choose other experts than the trainer's, at three sizes.

    python -m bench.replay OUT [--sizes small medium large] [--seeds 0 1 2 3] [--noise 0.1] [--record FILE] [--picture FILE.png]
    python -m bench.replay FILE                    print a record again
    python -m bench.replay OUT --noise 0           must end in FAILED: there is nothing to mend

Networks small enough for this machine forgive what bf16 or FP8 do to their routes, so the mismatch is forced: with each version of the
weights, the engine draws normal noise of ``--noise`` onto the bias by which its routers choose (scores lie between 0 and 1), never onto
the gates. Trainer and engine compute in fp32, so that nothing else differs. The task, digits written backwards, and the network are those
of `bench/replay.toml`. All runs of a size begin with one supervised start. Arms:

no noise     a control without noise
none         noise; the trainer uses its own routes, and nothing corrects the loss
TIS          noise; tokens are weighted by recomputed policy / engine's policy, at most 2 (truncated importance sampling)
IcePop       noise; tokens whose ratio is outside 0.5 to 5 are left out (2510.18855)
R2           noise; the updates use the routes of the trainer's own pass before them
PR2          noise; R2 with routes that a second matrix of every router predicts for the updates (2606.00395)
R3           noise; the trainer uses the engine's routes (2510.11370)

The first seed searches the learning rate of each arm; the others are reported, at that rate, and at the best rate without noise, which is
the same for all. A run has collapsed where its last fifth of the steps is rewarded less than half as much as its first step or its best
stretch of a fifth. Exit code 1: R3 collapses with a seed, or is not rewarded more than another arm with noise, each at its best rate.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from bench.common.measure import finish, refusing, shown_mean, table
from bench.common.pictures import save_picture
from bench.common.plain_loop import run_plainly
from bench.common.predicted_routes import BEFORE_KL, PREDICTED_KL, PredictingTrainer
from bench.common.rl_curves import at_end, best_rate, fifth, start_once
from bench.common.study import Results, Run, carry_out, is_record, read_fields, recorded, study_parser, write_record
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT
from stretto.base.track import wide_console
from stretto.base.trajectory import WeightVersion
from stretto.data.loader import key_of
from stretto.learning.metrics import StepReport
from stretto.learning.recipe import RlRecipe
from stretto.learning.trainer import TrainerRole
from stretto.learning.weights import fetch
from stretto.report import style

RECIPE = Path(__file__).with_suffix(".toml")
SIZES: Mapping[str, Sequence[str]] = {
    "small": [],
    "medium": ["start.model.num_layers=6", "start.model.hidden_size=96", "start.model.head_dim=24",
               "start.model.expert_intermediate_size=64"],
    "large": ["start.model.num_layers=8", "start.model.hidden_size=160", "start.model.head_dim=40",
              "start.model.expert_intermediate_size=96"],
}  # fmt: skip
"""Settings of the networks: 0.7, 3.9 and 12.8 million parameters."""
ARMS: Mapping[str, Sequence[str]] = {
    "no noise": ["replay=off"],
    "none": ["replay=off"],
    "TIS": ["replay=off", "loss.correction=tis"],
    "IcePop": ["replay=off", "loss.correction=icepop"],
    "R2": ["replay=r2"],
    "PR2": ["replay=r2"],
    "R3": ["replay=r3"],
}
CONTROL = "no noise"
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
CURVES = {"rewards": "reward/mean", "k3": "mismatch/same_k3_mean", "predicted": PREDICTED_KL, "before": BEFORE_KL}
"""What a run keeps of each step, by the name of the metric; the last two exist in runs with predicted routes."""


@dataclass(frozen=True, slots=True)
class Study:
    """Settings of all runs."""

    sizes: Sequence[str]
    seeds: Sequence[int]
    noise: float
    settings: Sequence[str]

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal in runs of one record."""
        recipe = read_recipe(RECIPE, RlRecipe, self.settings)
        return {"noise": self.noise, "first_seed": self.seeds[0], "recipe": recipe}

    def recipe(self, size: str, arm: str, rate: float, seed: int) -> RlRecipe:
        told = [*SIZES[size], *ARMS[arm], f"optim.lr={rate:g}", f"train.seed={seed}"]
        return read_recipe(RECIPE, RlRecipe, [*self.settings, *told])

    def runs(self, results: Results, out: Path) -> list[Run]:
        """All runs that ``results`` make possible."""
        runs = []
        for size in self.sizes:
            start = f"{size}-start"
            runs.append(Run(start, partial(start_once, self.recipe(size, CONTROL, RATES[0], self.seeds[0]))))
            for arm in ARMS:
                chosen = {chosen_rate(results, size, each, self.seeds[0]) for each in (CONTROL, arm)} - {None}
                wanted = [(rate, self.seeds[0]) for rate in RATES]
                wanted += [(rate, seed) for rate in RATES if rate in chosen for seed in self.seeds[1:]]
                noise = 0.0 if arm == CONTROL else self.noise
                runs += [
                    Run(
                        name(size, arm, rate, seed),
                        partial(
                            _run,
                            self.recipe(size, arm, rate, seed),
                            out / start / CHECKPOINT,
                            noise,
                            PredictingTrainer if arm == "PR2" else TrainerRole,
                        ),
                        needs=(start,),
                    )
                    for rate, seed in wanted
                ]
        return runs


@refusing()
def main() -> None:
    parser = study_parser(__doc__, "curves of reward and mismatch")
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--jobs", type=int, default=2, help="parallel processes of one thread each")
    _study(parser.parse_args())


def _study(options: argparse.Namespace) -> None:
    if is_record(options.out):
        record = read_fields(options.out, ("runs", "first_seed", "noise"))
        results = record["runs"]
        sizes = [size for size in SIZES if f"{size}-start" in results]
        study = Study(sizes, [record["first_seed"]], record["noise"], [])
    else:
        study = Study(options.sizes, options.seeds, options.noise, options.settings)
        known = recorded(options.record, study.identity) if options.record else {}
        plan = partial(study.runs, out=options.out.resolve())
        results = {**known, **carry_out(plan, options.out.resolve(), options.jobs, options.minutes, known)}
        if options.record:
            write_record(options.record, study.identity, results)
    failures = [failure for size in study.sizes for failure in show(study, size, results)]
    if options.picture:
        draw(study, results, options.picture)
    finish(failures)


def name(size: str, arm: str, rate: float, seed: int) -> str:
    return f"{size}-{arm.replace(' ', '_')}-{rate:g}-{seed}"


def chosen_rate(results: Results, size: str, arm: str, seed: int) -> float | None:
    """The rate that the search on ``seed`` chose; None: not all of its runs are known."""
    found = {rate: results.get(name(size, arm, rate, seed)) for rate in RATES}
    return best_rate({rate: run for rate, run in found.items() if run is not None}, RATES)


def best_rates(results: Results, size: str, first: int) -> dict[str, float]:
    """`chosen_rate` of every arm on the seed ``first``; empty: not all are known."""
    found = {arm: rate for arm in ARMS if (rate := chosen_rate(results, size, arm, first)) is not None}
    return found if len(found) == len(ARMS) else {}


def has_collapsed(run: Mapping[str, Any]) -> bool:
    rewards, size = np.array(run["rewards"]), fifth(run)
    best = max(rewards[0], np.convolve(rewards, np.full(size, 1 / size), "valid").max())
    return at_end(run) < best / 2


def _run(
    recipe: RlRecipe, start: Path, noise: float, open_trainer: Callable[..., TrainerRole], folder: Path
) -> dict[str, Any]:
    reports: list[StepReport] = []
    taken_over = partial(noisy, noise, recipe.train.seed)
    made = folder / "run", start, folder / CHECKPOINT
    asyncio.run(run_plainly(recipe, *made, reports.append, taken_over, open_trainer=open_trainer))
    return {
        kept: [float(f"{report.scalars[metric]:.4g}") for report in reports]
        for kept, metric in CURVES.items()
        if metric in reports[0].scalars
    }


def noisy(noise: float, seed: int, version: WeightVersion) -> Mapping[str, Tensor]:
    """The weights of ``version``, with noise on the bias by which routers choose."""
    state = dict(fetch(version))
    generator = torch.Generator().manual_seed(key_of(seed, version.number) >> 1)
    for each in [each for each in state if each.endswith("bias_WE")]:
        state[each] = state[each] + noise * torch.randn(state[each].shape, generator=generator)
    return state


def show(study: Study, size: str, results: Results) -> list[str]:
    """Print the tables of a size; returns what is against the claim, or missing."""
    rates = best_rates(results, size, study.seeds[0])
    seeds = finished_seeds(size, results, rates, study.seeds[0])
    missing = sorted(set(study.seeds[1:]) - set(seeds))
    failures = [f"{size}: seeds {', '.join(map(str, missing))}: not finished"] if missing else []
    if not seeds:
        return failures or [f"{size}: no seed is finished"]
    common = dict.fromkeys(rates, rates[CONTROL])
    best, level = (_runs_at(chosen, size, seeds, results) for chosen in (rates, common))
    wide_console().print(_table(f"{size}, each arm at its best rate", rates, best))
    wide_console().print(_table(f"{size}, all arms at {rates[CONTROL]:g}", common, level))
    if num := sum(map(has_collapsed, best["R3"])):
        failures.append(f"{size}, R3: {num} of {len(seeds)} collapsed")
    leads = {arm: fmean(_leads(best, arm)) for arm in ARMS if arm not in ("R3", CONTROL)}
    failures += [f"{size}, R3: {lead:+.3f} of the reward of {arm}" for arm, lead in leads.items() if lead <= 0]
    _show_prediction(best["PR2"])
    return failures


def _runs_at(rates: Mapping[str, float], size: str, seeds: Sequence[int], results: Results) -> dict[str, list[Any]]:
    """Results of every arm at its rate in ``rates``, by seed."""
    return {arm: [results[name(size, arm, rate, seed)] for seed in seeds] for arm, rate in rates.items()}


def _table(title: str, rates: Mapping[str, float], runs: Mapping[str, Sequence[Any]]) -> Table:
    """Rewards of every arm, and how far R3 is ahead of it. ``runs``: by arm and seed."""
    shown = table(
        f"{title}: {len(runs[CONTROL])} seeds, mean ± half of the 95 % interval",
        *("arm", "rate", "reward of the last fifth", "collapsed", "R3 minus it", "K3 at first"),
    )
    for arm, each in runs.items():
        lead = "" if arm == "R3" else shown_mean(_leads(runs, arm), "+")
        k3 = fmean(fmean(run["k3"][: fifth(run)]) for run in each)
        collapsed = f"{sum(map(has_collapsed, each))} of {len(each)}"
        reward = shown_mean([at_end(run) for run in each])
        shown.add_row(arm, f"{rates[arm]:g}", reward, collapsed, lead, f"{k3:.1e}")
    return shown


def _leads(runs: Mapping[str, Sequence[Any]], arm: str) -> list[float]:
    """Reward of R3 minus that of ``arm`` at the end of each seed."""
    return [at_end(ours) - at_end(other) for ours, other in zip(runs["R3"], runs[arm], strict=True)]


def _show_prediction(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print how much of the routers' change during the updates was predicted."""
    drifts = {kept: fmean(fmean(run[kept]) for run in runs if kept in run) for kept in ("predicted", "before")}
    print(
        f"PR2: the routers' KL during the updates is {drifts['predicted']:.1e} nats to the predicted routers and "
        f"{drifts['before']:.1e} nats to those before the updates"
    )


def finished_seeds(size: str, results: Results, rates: Mapping[str, float], first: int) -> list[int]:
    """Reported seeds with finished runs of every arm, at the arm's best rate and at the control's; empty without `best_rates`."""
    if not rates:
        return []
    found = {
        int(each.rsplit("-", 1)[1]) for each in results if each.startswith(f"{size}-") and not each.endswith("start")
    }
    wanted = {(arm, rate) for arm in ARMS for rate in (rates[arm], rates[CONTROL])}
    return [
        seed for seed in sorted(found - {first}) if all(name(size, arm, rate, seed) in results for arm, rate in wanted)
    ]


def draw(study: Study, results: Results, path: Path) -> None:
    """Reward and mismatch by step, each arm at its best rate, means over the reported seeds, a column for each size."""
    figure = style.blank(5.2 * len(study.sizes), 8.0)
    with_noise = [arm for arm in ARMS if arm != CONTROL]
    looks: dict[str, dict[str, Any]] = {CONTROL: {"color": style.INK, "linewidth": 1.4, "linestyle": "--"}}
    looks |= {arm: {"color": style.SERIES[place], "linewidth": 2.0} for place, arm in enumerate(with_noise)}
    grid = figure.subplots(2, len(study.sizes), squeeze=False, sharex=True)
    for (upper, lower), size in zip(grid.T, study.sizes, strict=True):
        style.dress(upper, f"{size}: reward", "step", "mean reward")
        style.dress(lower, f"{size}: mismatch", "step", "K3, nats")
        lower.set_yscale("log")
        rates = best_rates(results, size, study.seeds[0])
        seeds = finished_seeds(size, results, rates, study.seeds[0])
        for arm in ARMS if seeds else ():
            runs = [results[name(size, arm, rates[arm], seed)] for seed in seeds]
            rewards, k3 = (np.mean([run[kept] for run in runs], axis=0) for kept in ("rewards", "k3"))
            smooth = np.convolve(rewards, np.full(5, 0.2), "valid")
            upper.plot(np.arange(len(smooth)) + 2, smooth, label=arm, **looks[arm])
            lower.plot(np.maximum(k3, 1e-14), **looks[arm])
    lines, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(ARMS), frameon=False, fontsize=style.TEXT_PT)
    save_picture(figure, path)


if __name__ == "__main__":
    main()
