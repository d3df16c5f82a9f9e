"""Normalised score of multi-teacher on-policy distillation, against six other ways to make one network of several experts.

    python -m bench.norm OUT --jobs 14 --seeds 0 1 2 3 4 5 --minutes 9      run again to continue; --report: only print
    python -m bench.norm OUT --mutant wrong-teachers                        after that; must end in FAILED

A small mixture of experts learns three unrelated skills by SFT on examples of which half are wrong (`bench/norm.toml`,
`bench.common.skills`). Reinforcement learning then trains one expert per domain. Each arm makes one network of the experts:

distil      on-policy distillation with the full reverse KL to the experts (Stretto's pipeline)
mixed       RL on all domains at once, with the samples and FLOPs of experts and distillation together
cascade     RL on one domain after the other, with the samples of the experts
offline     SFT on the experts' right answers, with the samples of distillation
average, task arithmetic, TIES      merges of the experts' weights

The normalised score (Norm) is the mean over domains of (student − SFT) / (expert − SFT). Each term is the share of right answers to
held-out problems at temperature 1. The first seed chooses rate, strength or density of every arm, on its own problems; the other
seeds are reported. Samples and FLOPs include sampling and teachers. Exit code 1: an aim is missed, or an arm is not done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy.optimize import isotonic_regression

from bench.common.measure import bench_parser, table
from bench.common.post_runs import HeldOut, imitate, learn, merged, start
from bench.common.study import Results, Run, carry_out, read_results
from stretto.base.config import read_recipe, validate
from stretto.base.paths import CHECKPOINT
from stretto.learning.recipe import RlRecipe
from stretto.post.merge import MergeOptions
from stretto.post.pipeline import PipelineRecipe, plan
from stretto.post.pipeline import merged as over

RECIPE = Path(__file__).with_suffix(".toml")
SELECTION, REPORT = 1 << 23, 3 << 22
"""First held-out item of the searched seed, and of the reported seeds. Runs train on smaller items."""
MIXED_MORE = 1.2
"""Samples of mixed RL over those of experts and distillation: its samples cost less, without a teacher, so FLOPs are equal."""
DENSER = 5
"""Points per sample in a curve of distillation over those in a curve of RL, because distillation needs fewer samples."""
NO_RATE = 1e-6
"""Factor of the learning rate in the mutant ``no-rate``."""
AIM, WORST_AIM, LEAD_AIM, FEWER_AIM = 0.95, 0.90, 0.15, 1 / 7
PUBLISHED = {
    "distil": 0.937,
    "mixed": 0.882,
    "task arithmetic": 0.857,
    "offline": 0.824,
    "cascade": 0.775,
    "average": 0.328,
}
"""Normalised scores of the same arms at 30B parameters (MOPD, 2606.30406)."""
SHARES = (0.5, 0.8, 0.9, 0.95)
"""Shares of an expert's gain over SFT at which the samples of both are compared."""
WIDTH = 200
"""Width of the tables, columns."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A candidate of the search."""

    factor: float = 1.0
    """Multiple of the recipe's learning rate."""
    optim: str = "adamw"
    epochs: int = 1
    merge: MergeOptions | None = None

    def __str__(self) -> str:
        if self.merge is not None:
            density = f", density {self.merge.density:g}" if self.merge.method == "ties" else ""
            return "" if self.merge.method == "average" else f"λ {self.merge.scale:g}{density}"
        name = "" if self.optim == "adamw" else f"{self.optim} "
        return f"{name}rate x{self.factor:.2g}" + (f", {self.epochs} epochs" if self.epochs > 1 else "")


DEFAULT = Setting()
RATES = tuple(Setting(factor) for factor in (0.5, 1.0, 2.0))
LARGE = tuple(Setting(factor) for factor in (1.0, 2.0, 4.0))
MUON = tuple(Setting(factor, "muon") for factor in (1.0, 2.0))
SCALES, DENSITIES = (0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0), (0.2, 0.5, 0.8)
CANDIDATES: Mapping[str, Sequence[Setting]] = {
    "expert": (*LARGE, *MUON),
    "distil": (*RATES, *MUON),
    "mixed": (*LARGE, *MUON),
    "cascade": LARGE[:2],
    "offline": tuple(Setting(each.factor, epochs=epochs) for epochs in (1, 4) for each in RATES),
    "average": (Setting(merge=MergeOptions(method="average")),),
    "task arithmetic": tuple(Setting(merge=MergeOptions(method="task-arithmetic", scale=scale)) for scale in SCALES),
    "TIES": tuple(
        Setting(merge=MergeOptions(method="ties", scale=scale, density=density))
        for density in DENSITIES
        for scale in SCALES
    ),
}
SETTLED: Mapping[str, Sequence[Setting]] = {
    "expert": (Setting(2.0),),
    "distil": (Setting(0.5),),
    "mixed": (Setting(),),
    "cascade": (Setting(),),
    "offline": (Setting(2.0, epochs=4),),
    "average": CANDIDATES["average"],
    "task arithmetic": (Setting(merge=MergeOptions(method="task-arithmetic", scale=0.5)),),
    "TIES": (Setting(merge=MergeOptions(method="ties", scale=0.7, density=0.8)),),
}
"""Winners of an earlier search, for ``--settled``."""
REINFORCED = ("expert", "mixed", "cascade")
"""Arms that do not need the experts."""
MUTANTS = ("wrong-teachers", "no-rate")
"""Broken distillation: each domain learns from another domain's expert; the learning rate is almost zero."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an arm with one seed."""

    scores: dict[str, float]
    """By domain, at temperature 1; for ``expert``, the score of each domain's own expert."""
    greedy: dict[str, float]
    samples: int
    tokens: int
    """Tokens in training steps."""
    flops: int


@dataclass(frozen=True, slots=True)
class Study:
    """Plan of the runs as a function of the results so far, and access to the results."""

    out: Path
    recipes: Mapping[str, RlRecipe]
    """By step of the pipeline: ``sft``, ``experts/NAME``, ``distill``."""
    domains: tuple[str, ...]
    seeds: tuple[int, ...]
    """The first one is searched, unless ``is_settled``."""
    candidates: Mapping[str, Sequence[Setting]]
    """By arm, including ``expert``: from `CANDIDATES` or `SETTLED`."""
    is_settled: bool
    num_problems: int
    """Held-out problems per domain."""
    every: int
    """Samples between two points of a curve of RL."""
    device: str
    mutant: str | None

    @property
    def reported(self) -> tuple[int, ...]:
        """Seeds on which nothing was chosen."""
        return self.seeds if self.is_settled else self.seeds[1:]

    @property
    def budget(self) -> int:
        """Samples of all experts and of distillation together."""
        names = [*(f"experts/{domain}" for domain in self.domains), "distill"]
        return sum(num_samples(self.recipes[name]) for name in names)

    def runs(self, results: Results) -> list[Run]:
        """All runs that can be planned now: every candidate of the searched seed, the winners of the other seeds."""
        found = {f"{seed}/sft": self._start(seed) for seed in self.seeds}
        winners = {arm: self.chosen(arm, results) for arm in self.candidates}
        for seed in self.seeds:
            for arm, candidates in self.candidates.items():
                if arm not in REINFORCED and winners["expert"] is None:
                    continue
                winner = winners[arm]
                for setting in candidates if seed == self.seeds[0] else [winner] * (winner is not None):
                    assert setting is not None
                    found |= {run.name: run for run in self._arm(arm, seed, setting, results)}
        if self.mutant is not None and (winner := self.chosen("distil", results)) is not None:
            for seed in self.reported:
                found |= {run.name: run for run in self._arm(self.mutant, seed, winner, results)}
        return [*found.values()]

    def chosen(self, arm: str, results: Results) -> Setting | None:
        """The candidate with the best score on the searched seed; None: not all candidates are done."""
        scores = [self.searched(arm, setting, results) for setting in self.candidates[arm]]
        done = [score for score in scores if score is not None]
        return self.candidates[arm][int(np.argmax(done))] if len(done) == len(scores) else None

    def searched(self, arm: str, setting: Setting, results: Results) -> float | None:
        """Mean score over domains on the searched seed; None: not done."""
        try:
            return float(np.mean([*self.outcome(arm, self.seeds[0], setting, results).scores.values()]))
        except KeyError:
            return None

    def name(self, arm: str, seed: int, setting: Setting) -> str:
        """Name of a run, and its folder."""
        return f"{seed}/{arm} {setting}".strip()

    def folder(self, name: str) -> Path:
        return self.out / name / CHECKPOINT

    def held_out(self, seed: int) -> HeldOut:
        return HeldOut(REPORT if seed in self.reported else SELECTION, self.num_problems)

    def experts(self, seed: int, results: Results) -> dict[str, str]:
        """Names of the chosen experts' runs, by domain."""
        winner = self.chosen("expert", results)
        assert winner is not None, "the search of experts is not done"
        return {domain: self.name(f"expert-{domain}", seed, winner) for domain in self.domains}

    def parts(self, arm: str, seed: int, setting: Setting) -> list[str]:
        """Runs of ``expert`` or ``cascade``, one per domain. The first run of a cascade is the first domain's expert."""
        kinds = ["expert"] + [arm] * (len(self.domains) - 1)
        return [self.name(f"{kind}-{domain}", seed, setting) for kind, domain in zip(kinds, self.domains, strict=True)]

    def _start(self, seed: int) -> Run:
        work = partial(start, seeded(self.recipes["sft"], seed), self.held_out(seed), self.device)
        return Run(f"{seed}/sft", work)

    def _arm(self, arm: str, seed: int, setting: Setting, results: Results) -> list[Run]:
        """The runs of an arm with one seed and setting."""
        begin = f"{seed}/sft"
        if arm in ("expert", "cascade"):
            found, before = [], begin
            for domain, name in zip(self.domains, self.parts(arm, seed, setting), strict=True):
                recipe = seeded(self.recipes[f"experts/{domain}"], seed, setting)
                scored = [domain] if name.partition("/")[2].startswith("expert") else []
                found.append(self._learn(name, recipe, before, scored, keeps=True))
                before = begin if arm == "expert" else name
            return found
        name, teachers = self.name(arm, seed, setting), {} if arm == "mixed" else self.experts(seed, results)
        if arm == "mixed":
            return [self._learn(name, self._mixed(seed, setting), begin, [])]
        places = {domain: self.folder(each) for domain, each in teachers.items()}
        recipe = seeded(self.recipes["distill"], seed, setting)
        rest, needs = (self.held_out(seed), self.device), (begin, *teachers.values())
        if setting.merge is not None:
            work = partial(merged, recipe, self.folder(begin), tuple(places.values()), setting.merge, *rest)
            return [Run(name, work, needs)]
        if arm == "offline":
            num = num_samples(recipe)
            return [Run(name, partial(imitate, recipe, self.folder(begin), places, num, setting.epochs, *rest), needs)]
        shift = int(arm == "wrong-teachers")
        owners = [self.domains[(place + shift) % len(self.domains)] for place in range(len(self.domains))]
        table = {
            domain: {"checkpoint": str(places[owner]), "domains": [domain]}
            for domain, owner in zip(self.domains, owners, strict=True)
        }
        lr = recipe.optim.lr * (NO_RATE if arm == "no-rate" else 1.0)
        recipe = seeded(
            recipe, seed, Setting(optim=setting.optim), {"optim": {"lr": lr}, "distill": {"teachers": table}}
        )
        return [self._learn(name, recipe, begin, self.domains, tuple(teachers.values()))]

    def _mixed(self, seed: int, setting: Setting) -> RlRecipe:
        recipe = seeded(self.recipes[f"experts/{self.domains[0]}"], seed, setting)
        steps = MIXED_MORE * self.budget / (recipe.train.prompts * recipe.rollout.group)
        train = recipe.train.replace(steps=round(steps))
        return recipe.replace(sources=self.recipes["distill"].sources, train=train)

    def _learn(
        self,
        name: str,
        recipe: RlRecipe,
        begin: str,
        scored: Sequence[str],
        teachers: Sequence[str] = (),
        keeps: bool = False,
    ) -> Run:
        held_out, judged = self.held_out(recipe.train.seed), self.recipes["distill"].sources
        every = max(1, round(self.every / (DENSER if teachers else 1) / (recipe.train.prompts * recipe.rollout.group)))
        work = partial(learn, recipe, self.folder(begin), judged, tuple(scored), held_out, every, keeps, self.device)
        return Run(name, work, (begin, *teachers))

    def outcome(self, arm: str, seed: int, setting: Setting, results: Results) -> Outcome:
        """Result of an arm. Raises KeyError: a run is not done."""
        if arm in ("expert", "cascade"):
            parts = [results[name] for name in self.parts(arm, seed, setting)]
            samples, tokens, flops = (sum(part[kind] for part in parts) for kind in ("samples", "tokens", "flops"))
            if arm == "cascade":
                parts = parts[-1:] * len(parts)
            scores, greedy = (
                {domain: part["scores"][kind][domain] for domain, part in zip(self.domains, parts, strict=True)}
                for kind in ("sampled", "greedy")
            )
            return Outcome(scores, greedy, samples, tokens, flops)
        result = results[f"{seed}/sft" if arm == "sft" else self.name(arm, seed, setting)]
        scores = result["scores"]
        return Outcome(scores["sampled"], scores["greedy"], result["samples"], result["tokens"], result["flops"])


def num_samples(recipe: RlRecipe) -> int:
    """Number of samples that a run draws."""
    return recipe.train.steps * recipe.train.prompts * recipe.rollout.group


def seeded(recipe: RlRecipe, seed: int, setting: Setting = DEFAULT, *others: Mapping[str, Any]) -> RlRecipe:
    """The pipeline's recipe for the synchronous loop, with a seed, a setting and further changes ``others``."""
    ours = {
        "staleness": 0,
        "replay": "off",
        "loss": {"drop_uniform": False},
        "optim": {"name": setting.optim, "lr": recipe.optim.lr * setting.factor},
        "train": {"seed": seed},
    }
    return validate(RlRecipe, over(recipe.model_dump(mode="json"), ours, *others), "norm")


# Shape letters of the figures: S reported seeds, D domains, R resamplings, P points of a curve.


@dataclass(frozen=True, slots=True)
class Row:
    """An arm over the reported seeds. Written by `rows_of`."""

    arm: str
    setting: str
    scores_SD: np.ndarray
    norm_SD: np.ndarray
    greedy: float
    """Mean over seeds and domains; costs are means over seeds."""
    samples: float
    tokens: float
    flops: float


def bootstrapped(values_S: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap confidence interval of the mean over seeds."""
    places_RS = np.random.default_rng(0).integers(len(values_S), size=(10_000, len(values_S)))
    low, high = np.quantile(values_S[places_RS].mean(1), [0.025, 0.975])
    return float(low), float(high)


def rows_of(study: Study, results: Results) -> list[Row]:
    """Rows of all arms that are done with all reported seeds; SFT and experts first."""
    seeds, found = study.reported, list[tuple[str, str, list[Outcome]]]()
    arms = ["sft", *study.candidates, *([study.mutant] if study.mutant else [])]
    for arm in arms:
        winner = Setting() if arm == "sft" else study.chosen("distil" if arm in MUTANTS else arm, results)
        try:
            outcomes = [study.outcome(arm, seed, winner or Setting(), results) for seed in seeds]
            found.append((arm, "" if arm == "sft" else str(winner), outcomes))
        except KeyError:
            continue
    scores = {arm: np.array([[each.scores[name] for name in study.domains] for each in some]) for arm, _, some in found}
    lead_SD = scores["expert"] - scores["sft"]
    return [
        Row(
            arm,
            setting,
            scores[arm],
            (scores[arm] - scores["sft"]) / lead_SD,
            float(np.mean([[*each.greedy.values()] for each in some])),
            *(float(np.mean([getattr(each, kind) for each in some])) for kind in ("samples", "tokens", "flops")),
        )
        for arm, setting, some in found
    ]


@dataclass(frozen=True, slots=True)
class Curve:
    """Score over cost, smoothed to the closest curve that never falls (isotonic regression)."""

    scores_P: np.ndarray
    costs_P: np.ndarray

    @classmethod
    def of(cls, points: Sequence[Mapping[str, Any]], domain: str, kind: str) -> Curve:
        scores_P = np.array([point["scores"][domain] for point in points])
        return cls(isotonic_regression(scores_P).x, np.array([point[kind] for point in points], np.float64))

    def cost_of(self, score: float) -> float:
        """Cost at which the curve reaches ``score``, interpolated between points; infinite: it does not."""
        if self.scores_P[-1] < score:
            return float("inf")
        place = int(np.argmax(self.scores_P >= score))
        if place == 0:
            return float(self.costs_P[0])
        around = slice(place - 1, place + 1)
        return float(np.interp(score, self.scores_P[around], self.costs_P[around]))


def fewer(study: Study, results: Results, share: float, kind: str) -> np.ndarray:
    """By reported seed: cost of distillation to reach ``share`` of the experts' gain in every domain, over the cost of the experts' own
    runs to reach it in their domains."""
    experts, distil = study.chosen("expert", results), study.chosen("distil", results)
    assert experts is not None and distil is not None, "both have rows"
    ratios = []
    for seed in study.reported:
        starts = study.outcome("sft", seed, Setting(), results).scores
        taught = results[study.name("distil", seed, distil)]["curve"]
        theirs, ours = [], []
        for domain in study.domains:
            own = Curve.of(results[study.name(f"expert-{domain}", seed, experts)]["curve"], domain, kind)
            aim = starts[domain] + share * (own.scores_P[-1] - starts[domain])
            theirs.append(own.cost_of(aim))
            ours.append(Curve.of(taught, domain, kind).cost_of(aim))
        ratios.append(max(ours) / sum(theirs) if sum(theirs) else float("inf"))
    return np.array(ratios)


def report(study: Study, results: Results) -> bool:
    """Print the figures of all finished runs. Returns whether every aim is met and every arm done."""
    console = Console(width=WIDTH)
    if not study.is_settled:
        _show_search(study, results)
    if not study.reported or study.chosen("expert", results) is None:
        console.print("no report yet: the search of the first seed or another seed is not done")
        return False
    rows = rows_of(study, results)
    by_arm = {row.arm: row for row in rows}
    if "expert" not in by_arm:
        console.print("no report yet: not all seeds have their experts")
        return False
    ours = by_arm.get(study.mutant or "distil")
    _show_arms(study, rows, ours)
    sft, expert, start_result = by_arm["sft"], by_arm["expert"], results[f"{study.seeds[0]}/sft"]
    verdicts = {f"every expert {LEAD_AIM:.0%} above SFT": (expert.scores_SD - sft.scores_SD).mean(0).min() >= LEAD_AIM}
    if ours is not None:
        verdicts[f"Norm ≥ {AIM}"] = ours.norm_SD.mean() >= AIM
        verdicts[f"worst domain ≥ {WORST_AIM}"] = ours.norm_SD.mean(0).min() >= WORST_AIM
        for row in rows[2:]:
            if row is not ours and row.arm not in MUTANTS and row.arm != "distil":
                gain_S = ours.norm_SD.mean(1) - row.norm_SD.mean(1)
                verdicts[f"Norm significantly above {row.arm}"] = bootstrapped(gain_S)[0] > 0
    if ours is not None and study.mutant is None:
        ratios = _show_fewer(study, results)
        verdicts[f"samples ≤ 1/{1 / FEWER_AIM:.0f} of RL's"] = ratios["samples"] <= FEWER_AIM
        verdicts[f"FLOPs ≤ 1/{1 / FEWER_AIM:.0f} of RL's"] = ratios["flops"] <= FEWER_AIM
    console.print(f"greedy decoding: SFT {sft.greedy:.3f}, experts {expert.greedy:.3f}", highlight=False)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in start_result["seen"].items())
    console.print(f"held-out problems that are also in SFT's data: {shares}", highlight=False)
    for name, is_met in verdicts.items():
        console.print(f"{'met   ' if is_met else 'MISSED'} {name}", highlight=False)
    missing = [arm for arm in CANDIDATES if arm not in by_arm]
    if missing:
        console.print(f"not done yet: {', '.join(missing)}")
    console.print("ok" if (is_good := all(verdicts.values()) and not missing) else "FAILED")
    return is_good


def _show_search(study: Study, results: Results) -> None:
    title = f"search on seed {study.seeds[0]}: mean over domains of the share of right answers to its own problems; *: chosen"
    shown = table(title, "arm", "candidates")
    for arm, candidates in study.candidates.items():
        scores = [study.searched(arm, setting, results) for setting in candidates]
        if any(score is not None for score in scores):
            best = max(score for score in scores if score is not None)
            cells = [
                f"{setting} {score:.3f}{'*' if score == best else ''}".strip()
                for setting, score in zip(candidates, scores, strict=True)
                if score is not None
            ]
            shown.add_row(arm, "; ".join(cells))
    Console(width=WIDTH).print(shown)


def _show_arms(study: Study, rows: Sequence[Row], ours: Row | None) -> None:
    seeds = study.reported
    headings = (
        "arm",
        "setting",
        *study.domains,
        "greedy",
        "Norm",
        "worst domain",
        "lowest",
        "ours minus it",
        "samples",
    )
    title = (
        f"share of right answers at temperature 1 ({study.num_problems} problems per domain); Norm with 95 % bootstrap intervals over "
        f"{len(seeds)} seeds; samples, trained tokens and FLOPs of the arm alone; †: in addition to those of the experts"
    )
    shown = table(title, *headings, "tokens", "FLOPs", "published")
    for row in rows:
        mean_S, mean_D = row.norm_SD.mean(1), row.norm_SD.mean(0)
        low, high = bootstrapped(mean_S)
        gain = ""
        if ours is not None and row is not ours and row.arm not in ("sft", "expert"):
            gain_S = ours.norm_SD.mean(1) - mean_S
            gain = "{:+.3f} [{:+.3f}, {:+.3f}]".format(gain_S.mean(), *bootstrapped(gain_S))
        has_norm = row.arm not in ("sft", "expert")
        needs = "" if row.arm in (*REINFORCED, "sft") else "†"
        shown.add_row(
            row.arm + needs,
            row.setting,
            *(f"{score:.3f}" for score in row.scores_SD.mean(0)),
            f"{row.greedy:.3f}",
            f"{mean_S.mean():.3f} [{low:.3f}, {high:.3f}]" if has_norm else "",
            f"{mean_D.min():.3f} {study.domains[int(mean_D.argmin())]}" if has_norm else "",
            f"{row.norm_SD.min():.3f}" if has_norm else "",
            gain,
            f"{row.samples:,.0f}",
            f"{row.tokens / 1e6:.2f}M",
            f"{row.flops / 1e12:.2f}T",
            f"{PUBLISHED[row.arm]:.3f}" if row.arm in PUBLISHED else "",
        )
    Console(width=WIDTH).print(shown)


def _show_fewer(study: Study, results: Results) -> dict[str, float]:
    """Cost of distillation over that of the experts for the largest of `SHARES`, by kind of cost; medians over seeds."""
    title = "cost until every domain has this share of its expert's gain over SFT: distillation over the experts' runs"
    shown = table(title, "share of the gain", "samples", "range", "FLOPs", "range")
    last = {}
    for share in SHARES:
        cells = []
        for kind in ("samples", "flops"):
            ratios_S = fewer(study, results, share, kind)
            last[kind] = float(np.median(ratios_S))
            cells += [_part(last[kind]), f"{_part(ratios_S.min())} to {_part(ratios_S.max())}"]
        shown.add_row(f"{share:.0%}", *cells)
    Console(width=WIDTH).print(shown)
    return last


def _part(ratio: float) -> str:
    return f"1/{1 / ratio:.1f}" if np.isfinite(ratio) else "not reached"


def read_study(options: argparse.Namespace) -> Study:
    pipeline = read_recipe(options.recipe, PipelineRecipe, options.settings)
    steps = {step.name: step.recipe for step in plan(pipeline, str(options.recipe))}
    candidates = SETTLED if options.settled else CANDIDATES
    for name, domain in pipeline.domains.items():
        assert list(domain.sources) == [name], f"domain {name}: must have one source, named like the domain"
    return Study(
        options.out.resolve(),
        {name: recipe for name, recipe in steps.items() if isinstance(recipe, RlRecipe)},
        tuple(pipeline.domains),
        tuple(options.seeds),
        {arm: some for arm, some in candidates.items() if arm in ("expert", *options.arms)},
        options.settled,
        options.problems,
        options.every,
        options.device,
        options.mutant,
    )


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("out", type=Path, help="folder of the study; finished runs there are not repeated")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override one key of the recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5], help="the first one is searched")
    parser.add_argument("--problems", type=int, default=400, help="held-out problems per domain")
    parser.add_argument("--every", type=int, default=640, help="samples between two points of an expert's curve")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; all processes share it")
    parser.add_argument(
        "--arms", nargs="+", choices=CANDIDATES, default=list(CANDIDATES), help="in addition to the experts"
    )
    parser.add_argument("--settled", action="store_true", help="no search: the winners of an earlier search")
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes of one thread each")
    parser.add_argument("--minutes", type=float, default=1e6, help="time limit; run again to continue")
    parser.add_argument(
        "--mutant", choices=MUTANTS, help="break distillation of the reported seeds; must end in FAILED"
    )
    parser.add_argument("--report", action="store_true", help="only print the results so far")
    options = parser.parse_args()
    study = read_study(options)
    if options.report:
        results: Results = read_results(study.out)
    else:
        results = carry_out(study.runs, study.out, options.jobs, options.minutes)
    sys.exit(not report(study, results))


if __name__ == "__main__":
    main()
