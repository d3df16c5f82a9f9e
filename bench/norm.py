"""Normalised score of multi-teacher on-policy distillation, against two other ways to make one network of several experts.

    python -m bench.norm OUT --jobs 14 --seeds 0 1 2 3 4 5 --minutes 9      run again to continue; --report: only print

A small mixture of experts learns three unrelated skills by SFT on examples of which half are wrong (`bench/norm.toml`,
`bench.common.skills`). Reinforcement learning then trains one expert per domain. Each arm makes one network:

distil      on-policy distillation with the full reverse KL to the experts (Stretto's pipeline)
mixed       RL on all domains at once, with the samples and FLOPs of experts and distillation together
offline     SFT on the experts' right answers, with the samples of distillation

The normalised score (Norm) is the mean over domains of (student − SFT) / (expert − SFT). Each term is the share of right answers to
held-out problems at temperature 1. The first seed chooses rate, optimiser and epochs of every arm, on its own problems; the other
seeds are reported. Samples and FLOPs include sampling and teachers. Exit code 1: an aim is missed, or an arm is not done.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.common.measure import bench_parser, finish, table
from bench.common.post_runs import HeldOut, imitate, learn, start
from bench.common.study import Results, Run, carry_out, read_results
from stretto.base.config import read_recipe, validate
from stretto.base.paths import CHECKPOINT
from stretto.learning.recipe import RlRecipe
from stretto.post.pipeline import PipelineRecipe, merged, plan

RECIPE = Path(__file__).with_suffix(".toml")
SELECTION, REPORT = 1 << 23, 3 << 22
"""First held-out item of the searched seed, and of the reported seeds. Runs train on smaller items."""
MIXED_MORE = 1.2
"""Samples of mixed RL over those of experts and distillation: its samples cost less, without a teacher, so FLOPs are equal."""
AIM, WORST_AIM, LEAD_AIM = 0.95, 0.90, 0.15
WIDTH = 200
"""Width of the tables, columns."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A candidate of the search."""

    factor: float = 1.0
    """Multiple of the recipe's learning rate."""
    optim: str = "adamw"
    epochs: int = 1

    def __str__(self) -> str:
        epochs = f", {self.epochs} epochs" if self.epochs > 1 else ""
        return f"{self.optim} rate x{self.factor:.2g}{epochs}"


RATES = tuple(Setting(factor) for factor in (0.5, 1.0, 2.0))
LARGE = tuple(Setting(factor) for factor in (1.0, 2.0, 4.0))
MUON = tuple(Setting(factor, "muon") for factor in (1.0, 2.0))
CANDIDATES: Mapping[str, Sequence[Setting]] = {
    "expert": (*LARGE, *MUON),
    "distil": (*RATES, *MUON),
    "mixed": (*LARGE, *MUON),
    "offline": tuple(Setting(each.factor, epochs=epochs) for epochs in (1, 4) for each in RATES),
}
COSTS = ("samples", "tokens", "flops")
"""Cost of a run in its result; tokens are those of training steps."""


@dataclass(frozen=True, slots=True)
class Study:
    """Plan of the runs as a function of the results so far, and access to the results."""

    out: Path
    recipes: Mapping[str, RlRecipe]
    """By step of the pipeline: ``sft``, ``experts/NAME``, ``distill``."""
    domains: tuple[str, ...]
    seeds: tuple[int, ...]
    """The first one is searched, the others are reported."""
    arms: tuple[str, ...]
    """Names of `CANDIDATES`, including ``expert``."""
    num_problems: int
    """Held-out problems per domain."""
    device: str

    def runs(self, results: Results) -> list[Run]:
        """All runs that can be planned now: every candidate of the searched seed, the winners of the other seeds."""
        found = {f"{seed}/sft": self._start(seed) for seed in self.seeds}
        for arm in self.arms:
            if arm in ("distil", "offline") and self.chosen("expert", results) is None:
                continue
            winner = self.chosen(arm, results)
            for seed in self.seeds:
                for setting in CANDIDATES[arm] if seed == self.seeds[0] else [winner] * (winner is not None):
                    assert setting is not None
                    found |= {run.name: run for run in self._arm(arm, seed, setting, results)}
        return [*found.values()]

    def chosen(self, arm: str, results: Results) -> Setting | None:
        """The candidate with the best score on the searched seed; None: not all candidates are done."""
        scores = [self.searched(arm, setting, results) for setting in CANDIDATES[arm]]
        done = [score for score in scores if score is not None]
        return CANDIDATES[arm][int(np.argmax(done))] if len(done) == len(scores) else None

    def searched(self, arm: str, setting: Setting, results: Results) -> float | None:
        """Mean score over domains on the searched seed; None: not done."""
        try:
            return float(np.mean(self.scores(arm, self.seeds[0], setting, results)))
        except KeyError:
            return None

    def names(self, arm: str, seed: int, setting: Setting | None) -> list[str]:
        """Names of an arm's runs, which are also their folders: an expert for each domain, one run of the other arms."""
        if setting is None:
            return [f"{seed}/{arm}"]
        parts = [f"expert-{domain}" for domain in self.domains] if arm == "expert" else [arm]
        return [f"{seed}/{part} {setting}" for part in parts]

    def scores(
        self, arm: str, seed: int, setting: Setting | None, results: Results, kind: str = "sampled"
    ) -> list[float]:
        """Scores by domain; each expert in its own. Raises KeyError: a run is not done."""
        found = [results[name]["scores"][kind] for name in self.names(arm, seed, setting)]
        return [found[place % len(found)][domain] for place, domain in enumerate(self.domains)]

    def cost(self, arm: str, seed: int, setting: Setting | None, results: Results) -> list[float]:
        """`COSTS` of an arm; of all experts together."""
        return [sum(results[name][kind] for name in self.names(arm, seed, setting)) for kind in COSTS]

    def _start(self, seed: int) -> Run:
        work = partial(start, seeded(self.recipes["sft"], seed), self._held_out(seed), self.device)
        return Run(f"{seed}/sft", work)

    def _held_out(self, seed: int) -> HeldOut:
        return HeldOut(SELECTION if seed == self.seeds[0] else REPORT, self.num_problems)

    def _arm(self, arm: str, seed: int, setting: Setting, results: Results) -> list[Run]:
        """The runs of an arm with one seed and setting."""
        names, begin = self.names(arm, seed, setting), f"{seed}/sft"
        if arm == "expert":
            recipes = [seeded(self.recipes[f"experts/{domain}"], seed, setting) for domain in self.domains]
            return [self._learn(name, recipe, begin) for name, recipe in zip(names, recipes, strict=True)]
        if arm == "mixed":
            return [self._learn(names[0], self._mixed(seed, setting), begin)]
        teachers = self.names("expert", seed, self.chosen("expert", results))
        places = dict(zip(self.domains, map(self._folder, teachers), strict=True))
        recipe = seeded(self.recipes["distill"], seed, setting)
        if arm == "offline":
            rest = num_samples(recipe), setting.epochs, self._held_out(seed), self.device
            return [Run(names[0], partial(imitate, recipe, self._folder(begin), places, *rest), (begin, *teachers))]
        table = {domain: {"checkpoint": str(place), "domains": [domain]} for domain, place in places.items()}
        tree = merged(recipe.model_dump(mode="json"), {"distill": {"teachers": table}})
        return [self._learn(names[0], validate(RlRecipe, tree, "norm"), begin, teachers)]

    def _mixed(self, seed: int, setting: Setting) -> RlRecipe:
        recipe = seeded(self.recipes[f"experts/{self.domains[0]}"], seed, setting)
        budget = sum(
            num_samples(self.recipes[name]) for name in (*(f"experts/{each}" for each in self.domains), "distill")
        )
        steps = round(MIXED_MORE * budget / (recipe.train.prompts * recipe.rollout.group))
        return recipe.replace(sources=self.recipes["distill"].sources, train=recipe.train.replace(steps=steps))

    def _learn(self, name: str, recipe: RlRecipe, begin: str, teachers: Sequence[str] = ()) -> Run:
        judged = self.recipes["distill"].sources
        work = partial(learn, recipe, self._folder(begin), judged, self._held_out(recipe.train.seed), self.device)
        return Run(name, work, (begin, *teachers))

    def _folder(self, name: str) -> Path:
        return self.out / name / CHECKPOINT


def num_samples(recipe: RlRecipe) -> int:
    """Number of samples that a run draws."""
    return recipe.train.steps * recipe.train.prompts * recipe.rollout.group


def seeded(recipe: RlRecipe, seed: int, setting: Setting = Setting()) -> RlRecipe:
    """The pipeline's recipe for the synchronous loop, with a seed and a setting."""
    ours = {
        "staleness": 0,
        "replay": "off",
        "loss": {"drop_uniform": False},
        "optim": {"name": setting.optim, "lr": recipe.optim.lr * setting.factor},
        "train": {"seed": seed},
    }
    return validate(RlRecipe, merged(recipe.model_dump(mode="json"), ours), "norm")


# Shape letters of the figures: S reported seeds, D domains, R resamplings.


@dataclass(frozen=True, slots=True)
class Row:
    """An arm over the reported seeds. Written by `rows_of`."""

    arm: str
    setting: Setting | None
    scores_SD: np.ndarray
    norm_SD: np.ndarray
    greedy: float
    """Mean over seeds and domains."""
    cost: np.ndarray
    """`COSTS`, means over seeds."""


def bootstrapped(values_S: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap confidence interval of the mean over seeds."""
    places_RS = np.random.default_rng(0).integers(len(values_S), size=(10_000, len(values_S)))
    low, high = np.quantile(values_S[places_RS].mean(1), [0.025, 0.975])
    return float(low), float(high)


def rows_of(study: Study, results: Results) -> dict[str, Row]:
    """Rows of all arms that are done with all reported seeds; SFT and experts first."""
    found: dict[str, Row] = {}
    for arm in ("sft", *study.arms):
        setting = None if arm == "sft" else study.chosen(arm, results)
        if arm != "sft" and setting is None:
            continue
        try:
            scores, greedy = (
                np.array([study.scores(arm, seed, setting, results, kind) for seed in study.seeds[1:]])
                for kind in ("sampled", "greedy")
            )
            cost = np.mean([study.cost(arm, seed, setting, results) for seed in study.seeds[1:]], 0)
        except KeyError:
            continue
        found[arm] = Row(arm, setting, scores, scores, float(greedy.mean()), cost)
    if not {"sft", "expert"} <= found.keys():
        return {}
    sft, lead = found["sft"].scores_SD, found["expert"].scores_SD - found["sft"].scores_SD
    return {arm: replace(row, norm_SD=(row.scores_SD - sft) / lead) for arm, row in found.items()}


def report(study: Study, results: Results) -> list[str]:
    """Print the figures of all finished runs. Returns the aims that are missed, and the arms that are not done."""
    console = Console(width=WIDTH)
    _show_search(study, results, console)
    rows = rows_of(study, results) if len(study.seeds) > 1 else {}
    if not rows:
        return ["no report yet: the search of the first seed or another seed is not done"]
    _show_arms(study, rows, console)
    sft, expert, ours = rows["sft"], rows["expert"], rows.get("distil")
    verdicts = {f"every expert {LEAD_AIM:.0%} above SFT": (expert.scores_SD - sft.scores_SD).mean(0).min() >= LEAD_AIM}
    if ours is not None:
        verdicts[f"Norm ≥ {AIM}"] = ours.norm_SD.mean() >= AIM
        verdicts[f"worst domain ≥ {WORST_AIM}"] = ours.norm_SD.mean(0).min() >= WORST_AIM
        for row in (rows[arm] for arm in ("mixed", "offline") if arm in rows):
            gain_S = ours.norm_SD.mean(1) - row.norm_SD.mean(1)
            verdicts[f"Norm significantly above {row.arm}"] = bootstrapped(gain_S)[0] > 0
    seen = results[f"{study.seeds[0]}/sft"]["seen"]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in seen.items())
    console.print(f"held-out problems that are also in SFT's data: {shares}", highlight=False)
    for name, is_met in verdicts.items():
        console.print(f"{'met   ' if is_met else 'MISSED'} {name}", highlight=False)
    return [name for name, is_met in verdicts.items() if not is_met] + [
        f"not done yet: {arm}" for arm in CANDIDATES if arm not in rows
    ]


def _show_search(study: Study, results: Results, console: Console) -> None:
    title = f"search on seed {study.seeds[0]}: mean over domains of the share of right answers to its own problems; *: chosen"
    shown = table(title, "arm", "candidates")
    for arm in study.arms:
        scores = {setting: study.searched(arm, setting, results) for setting in CANDIDATES[arm]}
        done = {setting: score for setting, score in scores.items() if score is not None}
        best = max(done.values(), default=0.0)
        cells = (f"{setting} {score:.3f}{'*' if score == best else ''}" for setting, score in done.items())
        shown.add_row(arm, "; ".join(cells))
    console.print(shown)


def _show_arms(study: Study, rows: Mapping[str, Row], console: Console) -> None:
    title = (
        f"share of right answers at temperature 1 ({study.num_problems} problems per domain); Norm with 95 % bootstrap intervals over "
        f"{len(study.seeds) - 1} seeds; samples, trained tokens and FLOPs of the arm alone; †: in addition to those of the experts"
    )
    headings = ("setting", *study.domains, "greedy", "Norm", "worst domain", "lowest", "distil minus it")
    shown, ours = table(title, "arm", *headings, "samples", "tokens", "FLOPs"), rows.get("distil")
    for arm, row in rows.items():
        mean_S, mean_D = row.norm_SD.mean(1), row.norm_SD.mean(0)
        norms = ["", "", "", ""]
        if arm not in ("sft", "expert"):
            norms[0] = "{:.3f} [{:.3f}, {:.3f}]".format(mean_S.mean(), *bootstrapped(mean_S))
            norms[1:3] = f"{mean_D.min():.3f} {study.domains[int(mean_D.argmin())]}", f"{row.norm_SD.min():.3f}"
            if ours is not None and row is not ours:
                gain_S = ours.norm_SD.mean(1) - mean_S
                norms[3] = "{:+.3f} [{:+.3f}, {:+.3f}]".format(gain_S.mean(), *bootstrapped(gain_S))
        samples, tokens, flops = row.cost
        shown.add_row(
            arm + "†" * (arm in ("distil", "offline")),
            str(row.setting or ""),
            *(f"{score:.3f}" for score in row.scores_SD.mean(0)),
            f"{row.greedy:.3f}",
            *norms,
            f"{samples:,.0f}",
            f"{tokens / 1e6:.2f}M",
            f"{flops / 1e12:.2f}T",
        )
    console.print(shown)


def read_study(options: argparse.Namespace) -> Study:
    pipeline = read_recipe(options.recipe, PipelineRecipe, options.settings)
    steps = {step.name: step.recipe for step in plan(pipeline, str(options.recipe))}
    for name, domain in pipeline.domains.items():
        assert list(domain.sources) == [name], f"domain {name}: must have one source, named like the domain"
    return Study(
        options.out.resolve(),
        {name: recipe for name, recipe in steps.items() if isinstance(recipe, RlRecipe)},
        tuple(pipeline.domains),
        tuple(options.seeds),
        tuple(arm for arm in CANDIDATES if arm in ("expert", *options.arms)),
        options.problems,
        options.device,
    )


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("out", type=Path, help="folder of the study; finished runs there are not repeated")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override one key of the recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5], help="the first one is searched")
    parser.add_argument("--problems", type=int, default=400, help="held-out problems per domain")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; all processes share it")
    parser.add_argument("--arms", nargs="+", choices=CANDIDATES, default=list(CANDIDATES), help="beside the experts")
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes of one thread each")
    parser.add_argument("--minutes", type=float, default=1e6, help="time limit; run again to continue")
    parser.add_argument("--report", action="store_true", help="only print the results so far")
    options = parser.parse_args()
    study = read_study(options)
    if options.report:
        results: Results = read_results(study.out)
    else:
        results = carry_out(study.runs, study.out, options.jobs, options.minutes)
    finish(report(study, results))


if __name__ == "__main__":
    main()
