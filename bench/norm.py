"""What multi-teacher on-policy distillation keeps of its teachers, beside every other way to make one network of several.

    python -m bench.norm OUT --jobs 14 --seeds 0 1 2 3 4 5 --minutes 9      again: goes on; --report: prints what there is
    python -m bench.norm OUT --mutant wrong-teachers                        after that: must end in FAILED

A mixture of experts learns three skills that have nothing in common, and a wrong way beside each, from examples (SFT;
`bench/norm.toml`, `bench.common.skills`); then there is an expert for each domain, by reinforcement learning until its curve is
flat. Of these one network is made, with each seed anew:

distil      the experts teach the student what it samples, by the full reverse KL: ours
mixed       reinforcement learning on all domains at once, with the samples and the FLOPs of experts and distillation together
cascade     reinforcement learning on one domain after the other: as many samples as the experts took
offline     supervised training on the experts' right answers, of as many samples as distillation drew
average, task arithmetic, TIES      of the experts' weights

Norm is the mean over domains of (student − SFT) / (expert − SFT), each the share of right answers to held-out problems at
temperature 1. The first seed is searched: there every arm has its rate, strength or density chosen, on problems of their own. The
others are reported, on other problems. Samples and FLOPs are counted where they are spent, sampling and teachers included. Exits
with 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy.optimize import isotonic_regression

from bench.common.measure import table
from bench.common.post_runs import Asked, begin_alike, imitate, learn, merged, start
from bench.common.study import RESULT, Results, Run, carry_out, read_results
from stretto.base.config import read_recipe, validate
from stretto.base.paths import CHECKPOINT
from stretto.learning.recipe import RlRecipe
from stretto.post.merge import MergeOptions
from stretto.post.pipeline import PipelineRecipe, plan
from stretto.post.pipeline import merged as over

RECIPE = Path(__file__).with_suffix(".toml")
SELECTION, REPORT = 1 << 23, 3 << 22
"""First items of the held-out problems: of the seed that is searched, and of the others. Runs train below."""
MIXED_MORE = 1.2
"""Samples of mixed reinforcement learning over those of experts and distillation: so that it has their FLOPs, too, as a sample costs
it less without a teacher."""
DENSER = 5
"""Points of a curve of distillation, to as many samples, over those of reinforcement learning: it needs fewer."""
NO_RATE = 1e-6
"""What the mutant multiplies the rate by."""
AIM, WORST_AIM, LEAD_AIM, FEWER_AIM = 0.95, 0.90, 0.15, 1 / 7
ANCHORS = {
    "distil": 0.937,
    "mixed": 0.882,
    "task arithmetic": 0.857,
    "offline": 0.824,
    "cascade": 0.775,
    "average": 0.328,
}
"""Norm of the same arms at 30B (MOPD, 2606.30406)."""
SHARES = (0.5, 0.8, 0.9, 0.95)
"""Of an expert's lead: after how many samples a run has so much."""
WIDTH = 200
"""Columns of the tables."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a search chooses between."""

    factor: float = 1.0
    """Of the recipe's rate."""
    optim: str = "adamw"
    epochs: int = 1
    merge: MergeOptions | None = None

    def __str__(self) -> str:
        if self.merge is not None:
            density = f", density {self.merge.density:g}" if self.merge.method == "ties" else ""
            return "" if self.merge.method == "average" else f"λ {self.merge.scale:g}{density}"
        name = "" if self.optim == "adamw" else f"{self.optim} "
        return f"{name}rate x{self.factor:.2g}" + (f", {self.epochs} epochs" if self.epochs > 1 else "")


AS_IT_IS = Setting()
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
"""What a search has chosen before, for studies that cannot afford one."""
REINFORCED = ("expert", "mixed", "cascade")
"""Arms that need no expert."""
MUTANTS = ("wrong-teachers", "no-rate")
"""Of distillation: each domain is taught by another domain's expert; nothing is learnt."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an arm with one seed."""

    scores: dict[str, float]
    """By domain, at temperature 1; of experts each one's own."""
    greedy: dict[str, float]
    samples: int
    tokens: int
    """Trained on."""
    flops: int


@dataclass(frozen=True, slots=True)
class Study:
    """What is to be run, as a function of what has been; and where its results are."""

    out: Path
    recipes: Mapping[str, RlRecipe]
    """By step of the pipeline: ``sft``, ``experts/NAME``, ``distill``."""
    domains: tuple[str, ...]
    seeds: tuple[int, ...]
    """The first is searched, unless everything is settled."""
    candidates: Mapping[str, Sequence[Setting]]
    """By arm, ``expert`` among them: of `CANDIDATES`, or `SETTLED`."""
    is_settled: bool
    num_problems: int
    """Of each domain."""
    every: int
    """Samples between two points of a curve."""
    device: str
    start_device: str
    one_start: bool
    mutant: str | None

    @property
    def reported(self) -> tuple[int, ...]:
        """Seeds that nothing was chosen on."""
        return self.seeds if self.is_settled else self.seeds[1:]

    @property
    def budget(self) -> int:
        """Samples of all experts and of distillation."""
        names = [*(f"experts/{domain}" for domain in self.domains), "distill"]
        return sum(num_samples(self.recipes[name]) for name in names)

    # What is to be run

    def runs(self, results: Results) -> list[Run]:
        """All that are known to be wanted: of the seed that is searched every candidate, of the others the winners."""
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
        """The candidate with the best mean over domains on the seed that is searched; None: not all of them are done."""
        scores = [self.searched(arm, setting, results) for setting in self.candidates[arm]]
        done = [score for score in scores if score is not None]
        return self.candidates[arm][int(np.argmax(done))] if len(done) == len(scores) else None

    def searched(self, arm: str, setting: Setting, results: Results) -> float | None:
        """What the search compares; None: not done."""
        try:
            return float(np.mean([*self.outcome(arm, self.seeds[0], setting, results).scores.values()]))
        except KeyError:
            return None

    def name(self, arm: str, seed: int, setting: Setting) -> str:
        """Of a run: its folder."""
        return f"{seed}/{arm} {setting}".strip()

    def folder(self, name: str) -> Path:
        return self.out / name / CHECKPOINT

    def asked(self, seed: int) -> Asked:
        return Asked(REPORT if seed in self.reported else SELECTION, self.num_problems)

    def experts(self, seed: int, results: Results) -> dict[str, str]:
        """Names of the chosen ones' runs, by domain."""
        winner = self.chosen("expert", results)
        assert winner is not None, "asked for before the search is done"
        return {domain: self.name(f"expert-{domain}", seed, winner) for domain in self.domains}

    def parts(self, arm: str, seed: int, setting: Setting) -> list[str]:
        """Runs of ``expert`` or ``cascade``, a domain each; a cascade begins with what is the first domain's expert."""
        kinds = ["expert"] + [arm] * (len(self.domains) - 1)
        return [self.name(f"{kind}-{domain}", seed, setting) for kind, domain in zip(kinds, self.domains, strict=True)]

    def _start(self, seed: int) -> Run:
        name, recipe, first = f"{seed}/sft", told(self.recipes["sft"], seed), f"{self.seeds[0]}/sft"
        if self.one_start and name != first:
            work = partial(begin_alike, recipe, self.folder(first), self.asked(seed), self.device)
            return Run(name, work, (first,))
        return Run(name, partial(start, recipe, self.asked(seed), self.start_device))

    def _arm(self, arm: str, seed: int, setting: Setting, results: Results) -> list[Run]:
        """The runs of an arm, with whatever only they need."""
        begin = f"{seed}/sft"
        if arm in ("expert", "cascade"):
            found, before = [], begin
            for domain, name in zip(self.domains, self.parts(arm, seed, setting), strict=True):
                recipe = told(self.recipes[f"experts/{domain}"], seed, setting)
                scored = [domain] if name.partition("/")[2].startswith("expert") else []
                found.append(self._learn(name, recipe, before, scored, keeps=True))
                before = begin if arm == "expert" else name
            return found
        name, teachers = self.name(arm, seed, setting), {} if arm == "mixed" else self.experts(seed, results)
        if arm == "mixed":
            return [self._learn(name, self._mixed(seed, setting), begin, [])]
        places = {domain: self.folder(each) for domain, each in teachers.items()}
        recipe = told(self.recipes["distill"], seed, setting)
        rest, needs = (self.asked(seed), self.device), (begin, *teachers.values())
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
        recipe = told(recipe, seed, Setting(optim=setting.optim), {"optim": {"lr": lr}, "distill": {"teachers": table}})
        return [self._learn(name, recipe, begin, self.domains, tuple(teachers.values()))]

    def _mixed(self, seed: int, setting: Setting) -> RlRecipe:
        recipe = told(self.recipes[f"experts/{self.domains[0]}"], seed, setting)
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
        asked, judged = self.asked(recipe.train.seed), self.recipes["distill"].sources
        every = max(1, round(self.every / (DENSER if teachers else 1) / (recipe.train.prompts * recipe.rollout.group)))
        work = partial(learn, recipe, self.folder(begin), judged, tuple(scored), asked, every, keeps, self.device)
        return Run(name, work, (begin, *teachers))

    # What came of it

    def outcome(self, arm: str, seed: int, setting: Setting, results: Results) -> Outcome:
        """Raises KeyError: not done."""
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
    """That a run draws."""
    return recipe.train.steps * recipe.train.prompts * recipe.rollout.group


def told(recipe: RlRecipe, seed: int, setting: Setting = AS_IT_IS, *others: Mapping[str, Any]) -> RlRecipe:
    """The pipeline's recipe as the synchronous loop takes it, with a seed, a rate and an optimiser, and what else is said."""
    ours = {
        "staleness": 0,
        "replay": "off",
        "loss": {"drop_uniform": False},
        "optim": {"name": setting.optim, "lr": recipe.optim.lr * setting.factor},
        "train": {"seed": seed},
    }
    return validate(RlRecipe, over(recipe.model_dump(mode="json"), ours, *others), "norm")


# The figures. Shape letters: S reported seeds, D domains, R resamplings, P points of a curve.


@dataclass(frozen=True, slots=True)
class Row:
    """An arm over the reported seeds. Made by `rows_of`."""

    arm: str
    setting: str
    scores_SD: np.ndarray
    norm_SD: np.ndarray
    greedy: float
    """Mean over seeds and domains, as costs are over seeds."""
    samples: float
    tokens: float
    flops: float


def bootstrapped(values_S: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of the means of seeds drawn anew."""
    places_RS = np.random.default_rng(0).integers(len(values_S), size=(10_000, len(values_S)))
    low, high = np.quantile(values_S[places_RS].mean(1), [0.025, 0.975])
    return float(low), float(high)


def rows_of(study: Study, results: Results) -> list[Row]:
    """SFT and experts first; of arms that are done with all reported seeds."""
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
    """Of a score over what was spent; the score as the closest curve that never falls, so that luck counts for nobody."""

    scores_P: np.ndarray
    costs_P: np.ndarray

    @classmethod
    def of(cls, points: Sequence[Mapping[str, Any]], domain: str, kind: str) -> Curve:
        scores_P = np.array([point["scores"][domain] for point in points])
        return cls(isotonic_regression(scores_P).x, np.array([point[kind] for point in points], np.float64))

    def cost_of(self, score: float) -> float:
        """What had been spent when it was reached, between two points in proportion; infinite: never."""
        if self.scores_P[-1] < score:
            return float("inf")
        place = int(np.argmax(self.scores_P >= score))
        if place == 0:
            return float(self.costs_P[0])
        around = slice(place - 1, place + 1)
        return float(np.interp(score, self.scores_P[around], self.costs_P[around]))


def fewer(study: Study, results: Results, share: float, kind: str) -> np.ndarray:
    """By reported seed: what distillation had spent when it had ``share`` of the lead in every domain, over what the experts'
    runs had spent when each had it in its own."""
    experts, distil = study.chosen("expert", results), study.chosen("distil", results)
    assert experts is not None and distil is not None, "there are rows of both"
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
    """Print the figures of what there is; whether every aim is met."""
    console = Console(width=WIDTH)
    if not study.is_settled:
        _show_search(study, results)
    if not study.reported or study.chosen("expert", results) is None:
        console.print("nothing to report before the search of the first seed is done, and another seed")
        return False
    rows = rows_of(study, results)
    by_arm = {row.arm: row for row in rows}
    if "expert" not in by_arm:
        console.print("nothing to report before the experts of all seeds are there")
        return False
    ours = by_arm.get(study.mutant or "distil")
    _show_arms(study, rows, ours)
    verdicts = {f"every expert {LEAD_AIM:.0%} above SFT": _least_lead(by_arm) >= LEAD_AIM}
    if ours is not None:
        verdicts[f"Norm ≥ {AIM}"] = ours.norm_SD.mean() >= AIM
        verdicts[f"worst domain ≥ {WORST_AIM}"] = ours.norm_SD.mean(0).min() >= WORST_AIM
        for row in rows[2:]:
            if row is not ours and row.arm not in MUTANTS and row.arm != "distil":
                gain_S = ours.norm_SD.mean(1) - row.norm_SD.mean(1)
                verdicts[f"Norm above {row.arm} beyond the interval"] = bootstrapped(gain_S)[0] > 0
    if ours is not None and study.mutant is None:
        ratios = _show_fewer(study, results)
        verdicts[f"samples ≤ 1/{1 / FEWER_AIM:.0f} of reinforcement learning's"] = ratios["samples"] <= FEWER_AIM
        verdicts[f"FLOPs ≤ 1/{1 / FEWER_AIM:.0f}"] = ratios["flops"] <= FEWER_AIM
    for line in _caveats(study, results, by_arm):
        console.print(f"- {line}", highlight=False, soft_wrap=True)
    for name, is_met in verdicts.items():
        console.print(f"{'met   ' if is_met else 'MISSED'} {name}", highlight=False)
    missing = [arm for arm in CANDIDATES if arm not in by_arm]
    if missing:
        console.print(f"not done yet: {', '.join(missing)}")
    console.print("ok" if (is_good := all(verdicts.values()) and not missing) else "FAILED")
    return is_good


def _caveats(study: Study, results: Results, by_arm: Mapping[str, Row]) -> list[str]:
    """What a harsh reader would say."""
    sft, expert = by_arm["sft"], by_arm["expert"]
    first = results[f"{study.seeds[0]}/sft"]
    seen = ", ".join(f"{name} {share:.0%}" for name, share in first.get("seen", {}).items())
    return [
        f"Greedy, SFT scores {sft.greedy:.3f} and experts {expert.greedy:.3f}: what is beyond that of a lead at temperature 1 is "
        "answers that were known and drawn too seldom.",
        f"Experts are at their plateau as far as this goes: the last quarter of their curves lies {_rise(study, results)} above the "
        "quarter before it.",
        "Distillation's samples and FLOPs leave out those of its teachers, which must be there first.",
        *([f"Held-out problems that SFT saw word for word: {seen}."] if seen else []),
        f"The intervals are of {len(study.reported)} seeds and know nothing of other domains, networks or lengths.",
        *(
            ["All seeds begin with one SFT."]
            if f"{study.seeds[0]}/sft" != f"{study.seeds[-1]}/sft" and _is_shared(study, results)
            else []
        ),
    ]


def _rise(study: Study, results: Results) -> str:
    """How much an expert's score still rose from the third to the last quarter of its samples: by domain, mean over seeds."""
    winner, found = study.chosen("expert", results), list[str]()
    assert winner is not None, "there are experts"
    for place, domain in enumerate(study.domains):
        rises = []
        for seed in study.reported:
            points = results[study.parts("expert", seed, winner)[place]]["curve"]
            scores_P = np.array([point["scores"][domain] for point in points[1:]])
            size = len(scores_P) // 4
            rises.append(scores_P[-size:].mean() - scores_P[-2 * size : -size].mean())
        found.append(f"{np.mean(rises):+.3f} ({domain})")
    return ", ".join(found)


def _is_shared(study: Study, results: Results) -> bool:
    """Whether later starts were copies of the first."""
    return results.get(f"{study.seeds[-1]}/sft", {}).get("tokens") == 0


def _least_lead(by_arm: Mapping[str, Row]) -> float:
    """Of an expert, the mean over seeds."""
    return float((by_arm["expert"].scores_SD - by_arm["sft"].scores_SD).mean(0).min())


def _show_search(study: Study, results: Results) -> None:
    shown = table(
        f"search: seed {study.seeds[0]}, mean over domains of right answers to its own problems", "arm", "candidates"
    )
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
    headings = ("arm", "chosen", *study.domains, "greedy", "Norm", "worst domain", "lowest", "ours less it", "samples")
    title = (
        f"right answers at temperature 1 (of {study.num_problems} problems a domain), Norm with bootstrap intervals over "
        f"{len(seeds)} seeds; samples, tokens trained on and FLOPs of the arm alone; † comes on top of the experts"
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
            f"{ANCHORS[row.arm]:.3f}" if row.arm in ANCHORS else "",
        )
    Console(width=WIDTH).print(shown)


def _show_fewer(study: Study, results: Results) -> dict[str, float]:
    """What distillation needs for the largest of `SHARES`, over reinforcement learning, by kind of cost: medians over seeds."""
    title = "spent until every domain has so much of its expert's lead: distillation over the experts' runs"
    shown = table(title, "of the lead", "samples", "range", "FLOPs", "range")
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
        assert list(domain.sources) == [name], f"domain {name}: one source of its own name is what is compared"
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
        options.start_device or options.device,
        options.one_start,
        options.mutant,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the study; what is there is not done again")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override one key of the recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5], help="the first is searched")
    parser.add_argument("--problems", type=int, default=400, help="held-out ones of each domain")
    parser.add_argument(
        "--every",
        type=int,
        default=640,
        help="samples between two points of an expert's curve; of distillation's a fifth",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda; all processes share it")
    parser.add_argument("--start-device", help="of SFT alone, whose large steps a GPU is faster at; default: --device")
    parser.add_argument("--arms", nargs="+", choices=CANDIDATES, default=list(CANDIDATES), help="beside the experts")
    parser.add_argument(
        "--settled", action="store_true", help="search nothing: every arm as an earlier search chose it"
    )
    parser.add_argument(
        "--one-start", action="store_true", help="all seeds begin with the first one's SFT: a third of the time"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, a thread each")
    parser.add_argument("--minutes", type=float, default=1e6, help="then stop; called again, it goes on")
    parser.add_argument(
        "--mutant", choices=MUTANTS, help="break the distillation of the reported seeds: must end in FAILED"
    )
    parser.add_argument("--report", action="store_true", help="run nothing, print what there is")
    options = parser.parse_args()
    study = read_study(options)
    if options.report:
        results: Results = read_results(study.out)
    else:
        results = carry_out(study.runs, study.out, options.jobs, options.minutes)
        with tarfile.open(study.out / "results.tar.gz", "w:gz") as tar:
            for path in sorted(study.out.rglob(RESULT)):
                tar.add(path, path.relative_to(study.out))
    sys.exit(not report(study, results))


if __name__ == "__main__":
    main()
