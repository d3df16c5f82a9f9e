"""Experts and on-policy distillation against RL on all domains at once, at equal FLOPs, in several regimes.

    python -m bench.distillation OUT --record FILE --minutes 60        run again to continue
    python -m bench.distillation FILE [--picture FILE.png]             print a record again
    python -m bench.distillation OUT --regimes base --mutant wrong-teachers        after that, for teachers of other domains

A small mixture of experts learns skills that share nothing by SFT on examples of which half are wrong (`bench/distillation.toml`,
`bench.common.skills`). Reinforcement learning then trains one expert per domain. Each arm makes one network:

distil      on-policy distillation with the full reverse KL to the experts
merged      the same, from SFT plus λ times the sum of the experts' differences to it (``distill.merge_scale``, Stretto's pipeline)
offline     SFT on the experts' right answers, with the FLOPs of distillation
mixed       RL on all domains at once, with the FLOPs of experts and distillation together

The score is the share of right answers to held-out problems at temperature 1, mean over domains. The first seed chooses the settings of
every arm, and of every expert, in every regime, on its own problems; the other seeds are reported. FLOPs include sampling and teachers. Exit code 1:
``merged`` is behind mixed RL, by more than the 95 % interval, in half of the regimes or more, or an arm is not done. With the mutant,
exit code 1: its ``merged`` does not score less than the study's by more than the interval, so that the study would not notice wrong teachers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.common.measure import NO_INTERVAL, finish, half_width, refusing, shown_mean, table
from bench.common.pictures import draw_means, save_picture
from bench.common.post_runs import HeldOut, imitate, learn, start
from bench.common.skills import KIND
from bench.common.study import Results, Run, carry_out, is_record, read_fields, recorded, study_parser, write_record
from stretto.base.config import read_recipe, validate
from stretto.base.paths import CHECKPOINT
from stretto.base.track import wide_console
from stretto.learning.recipe import RlRecipe, SourceConfig
from stretto.post.merge import merge_teachers
from stretto.post.pipeline import PipelineRecipe, merged
from stretto.post.pipeline import plan as planned
from stretto.report import style

RECIPE = Path(__file__).with_suffix(".toml")
SELECTION, REPORT = 1 << 23, 3 << 22
"""First held-out item of the searched seed, and of the reported seeds. Runs train on smaller items."""
SKILLS = ("reverse", "shift", "sort")
"""Domains of the recipe."""
MORE_SKILLS = ("rotate", "fold", "add")
EXISTING = "existing"
BASE = "base"
OURS = "merged"


@dataclass(frozen=True, slots=True)
class Regime:
    """A setting in which the arms are compared."""

    about: str
    settings: tuple[str, ...] = ()
    """Overrides of the recipe."""
    shared: frozenset[str] = frozenset()
    """Arms whose runs are those of `BASE`."""


def _each(key: str, *values: object) -> tuple[str, ...]:
    """Overrides of an argument of the skills: one value for all, or one for each."""
    values = values * len(SKILLS) if len(values) == 1 else values
    return tuple(
        f"domains.{skill}.sources.{skill}.args.{key}={value}" for skill, value in zip(SKILLS, values, strict=True)
    )


REGIMES: Mapping[str, Regime] = {
    BASE: Regime("three domains, verdicts are right, answers of six digits"),
    EXISTING: Regime("experts exist: their FLOPs do not count", shared=frozenset({"sft", "expert", "distil", "merged", "offline"})),
    "judge": Regime("a fifth of the verdicts is wrong", _each("error", 0.2), frozenset({"sft"})),
    "weak": Regime("weak experts: 24 steps, not 64", ("experts.recipe.train.steps=24",), frozenset({"sft"})),
    "sparse": Regime("sparse rewards: three of four pairs in SFT's examples are wrong", _each("noise", 0.75)),
    "lengths": Regime("answers of 3, 12 and 6 digits", (*_each("length", 3, 12, 6), "common.rollout.max_tokens=16")),
    "six": Regime(
        "six domains",
        (
            *(f'domains.{skill}.sources.{skill}={{kind = "{KIND}", args = {{skill = "{skill}"}}}}' for skill in MORE_SKILLS),
            "distill.train.steps=300",
            "sft.recipe.start.steps=500",
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """A candidate of the search."""

    factor: float = 1.0
    """Multiple of the recipe's learning rate."""
    epochs: int = 1
    scale: float = 0.0
    """Factor of the experts' differences in the student's start."""

    def __str__(self) -> str:
        more = f", {self.epochs} epochs" * (self.epochs > 1) + f", λ {self.scale:g}" * (self.scale > 0)
        return f"rate x{self.factor:g}{more}"


CANDIDATES: Mapping[str, Sequence[Setting]] = {
    "expert": tuple(Setting(factor) for factor in (0.5, 1.0, 2.0, 4.0)),
    "distil": tuple(Setting(factor) for factor in (0.25, 0.5, 1.0, 2.0)),
    "merged": (
        *(Setting(0.5, scale=scale) for scale in (0.3, 0.5, 0.7, 1.0)),
        *(Setting(factor, scale=0.5) for factor in (0.25, 1.0)),
    ),
    "offline": tuple(Setting(factor, epochs) for epochs in (2, 4) for factor in (1.0, 2.0, 4.0)),
    "mixed": tuple(Setting(factor) for factor in (0.5, 1.0, 2.0, 4.0)),
}
OFFLINE_SHARE = {2: 0.53, 4: 0.28}
"""By epochs: answers of the offline arm over the samples of distillation, so that their FLOPs are equal."""
TAUGHT = ("distil", "merged")
TRAINED_BY_EXPERTS = (*TAUGHT, "offline")
COSTS = ("samples", "flops")


@dataclass(frozen=True)
class Plan:
    """The runs of one regime as a function of the results so far, and access to their results. An arm is a key of `CANDIDATES`, or
    ``expert-NAME`` for the expert of a domain, which has a rate of its own."""

    name: str
    out: Path
    seeds: tuple[int, ...]
    """The first one is searched, the others are reported."""
    num_problems: int
    """Held-out problems per domain."""
    settings: tuple[str, ...]
    mutant: str | None

    @property
    def study(self) -> Plan:
        """The plan without the mutant, which is compared with it."""
        return replace(self, mutant=None)

    @property
    def regime(self) -> Regime:
        return REGIMES[self.name]

    @cached_property
    def pipeline(self) -> PipelineRecipe:
        return read_recipe(RECIPE, PipelineRecipe, [*self.regime.settings, *self.settings])

    @cached_property
    def recipes(self) -> Mapping[str, RlRecipe]:
        """By step of the pipeline: ``sft``, ``experts/NAME``, ``distill``."""
        steps = {step.name: step.recipe for step in planned(self.pipeline, str(RECIPE))}
        return {name: recipe for name, recipe in steps.items() if isinstance(recipe, RlRecipe)}

    @property
    def domains(self) -> list[str]:
        return list(self.pipeline.domains)

    @property
    def experts(self) -> dict[str, str]:
        """Arms of the experts by domain."""
        return {domain: f"expert-{domain}" for domain in self.domains}

    @property
    def candidates(self) -> dict[str, Sequence[Setting]]:
        """Candidates of each arm, in the order of the runs."""
        others = {arm: candidates for arm, candidates in CANDIDATES.items() if arm != "expert"}
        return dict.fromkeys(self.experts.values(), CANDIDATES["expert"]) | others

    def runs(self, results: Results) -> list[Run]:
        """All runs that can be planned now: every candidate of the searched seed, the winners of the other seeds."""
        found: list[Run] = []
        for seed in self.seeds:
            sft = partial(start, seeded(self.recipes["sft"], seed), self._held_out(seed), "cpu")
            found.append(Run(self.run_name("sft", seed), sft))
            for arm, candidates in self.candidates.items():
                if self.mutant and arm not in (*TAUGHT, *self.experts.values()):
                    continue
                winner = self.chosen(arm, results)
                for setting in candidates if seed == self.seeds[0] else [winner] * (winner is not None):
                    assert setting is not None
                    run = self._run(arm, seed, setting, results)
                    if run is not None:
                        found.append(run)
        return found

    def chosen(self, arm: str, results: Results) -> Setting | None:
        """The candidate with the best score on the searched seed; None: not all candidates are done."""
        scores = {setting: self.searched(arm, setting, results) for setting in self.candidates[arm]}
        done = {setting: score for setting, score in scores.items() if score is not None}
        return max(done, key=lambda setting: done[setting]) if len(done) == len(scores) else None

    def searched(self, arm: str, setting: Setting, results: Results) -> float | None:
        """Score on the searched seed, an expert's in its domain, else the mean over domains; None: not done."""
        result = results.get(self.run_name(arm, self.seeds[0], setting))
        return None if result is None else fmean(self._own(arm, result))

    def run_name(self, arm: str, seed: int, setting: Setting | None = None) -> str:
        """Name of a run, which is also its folder."""
        kind = "expert" if arm in self.experts.values() else arm
        owner = BASE if kind in self.regime.shared else self.name
        mutant = f"-{self.mutant}" if self.mutant and arm in TAUGHT else ""
        return f"{owner}/{seed}/{arm}{mutant}" + (f" {setting}" if setting else "")

    def best(self, arm: str, seed: int, results: Results) -> str:
        """Name of the run of ``arm`` with its chosen setting. Raises KeyError: nothing is chosen yet."""
        setting = self.chosen(arm, results)
        if setting is None:
            raise KeyError(arm)
        return self.run_name(arm, seed, setting)

    def scores(self, arm: str, seed: int, results: Results) -> list[float]:
        """Scores by domain of ``sft``, an arm, or all experts together, each in its own. Raises KeyError: not done."""
        if arm == "expert":
            return [self.scores(each, seed, results)[0] for each in self.experts.values()]
        name = self.run_name(arm, seed) if arm == "sft" else self.best(arm, seed, results)
        return self._own(arm, results[name])

    def cost(self, kind: str, arm: str, seed: int, results: Results) -> float:
        """Samples or FLOPs that lead from SFT to the network of ``arm`` at its chosen setting. Raises KeyError: not done."""
        arms = [] if arm == "expert" else [arm]
        if arm == "expert" or (arm in TRAINED_BY_EXPERTS and self.name != EXISTING):
            arms += self.experts.values()
        return float(sum(results[self.best(each, seed, results)][kind] for each in arms))

    def _own(self, arm: str, result: Mapping[str, Any]) -> list[float]:
        """Scores by domain in the result of ``arm``; of an expert, that in its domain."""
        domains = [domain for domain, expert in self.experts.items() if expert == arm] or self.domains
        return [result["scores"][domain] for domain in domains]

    def _run(self, arm: str, seed: int, setting: Setting, results: Results) -> Run | None:
        """The run of an arm with one seed and setting; None before the runs that it depends on are chosen."""
        name = self.run_name(arm, seed, setting)
        for domain, expert in self.experts.items():
            if arm == expert:
                return self._learn(name, seeded(self.recipes[f"experts/{domain}"], seed, setting.factor), ())
        if arm == "mixed":
            recipe = self._mixed(seed, setting, results)
            return None if recipe is None else self._learn(name, recipe, ())
        try:
            teachers = {domain: self.best(expert, seed, results) for domain, expert in self.experts.items()}
        except KeyError:
            return None
        recipe = seeded(self.recipes["distill"], seed, setting.factor)
        places = {domain: self._folder(teacher) for domain, teacher in teachers.items()}
        if arm == "offline":
            begin, num = self.run_name("sft", seed), round(OFFLINE_SHARE[setting.epochs] * num_samples(recipe))
            rest = places, num, setting.epochs, self._judged, self._held_out(seed), "cpu"
            return Run(name, partial(imitate, recipe, self._folder(begin), *rest), (begin, *teachers.values()))
        if self.mutant:
            places = dict(zip(self.domains, [*places.values()][1:] + [*places.values()][:1], strict=True))
        table = {domain: {"checkpoint": str(place), "domains": [domain]} for domain, place in places.items()}
        taught = validate(
            RlRecipe,
            merged(recipe.model_dump(mode="json"), {"distill": {"teachers": table, "merge_scale": setting.scale}}),
            "distil",
        )
        return self._learn(name, taught, tuple(teachers.values()))

    def _mixed(self, seed: int, setting: Setting, results: Results) -> RlRecipe | None:
        """As many steps as distillation's FLOPs pay; a step costs as much as one of the experts on average. None: not known yet."""
        try:
            budget = self.cost("flops", "distil", seed, results)
            of_experts = self.cost("flops", "expert", seed, results) / len(self.experts)
        except KeyError:
            return None
        recipe = seeded(self.recipes[f"experts/{self.domains[0]}"], seed, setting.factor)
        steps = max(1, round(budget / (of_experts / recipe.train.steps)))
        return recipe.replace(sources=self.recipes["distill"].sources, train=recipe.train.replace(steps=steps))

    def _learn(self, name: str, recipe: RlRecipe, teachers: Sequence[str]) -> Run:
        begin, judged = self.run_name("sft", recipe.train.seed), {each: self._judged[each] for each in recipe.sources}
        rest = recipe, self._folder(begin), judged, self._held_out(recipe.train.seed), "cpu"
        is_merged = recipe.distill is not None and recipe.distill.merge_scale > 0
        return Run(name, partial(learn_from_sum if is_merged else learn, *rest), (begin, *teachers))

    @property
    def _judged(self) -> dict[str, SourceConfig]:
        """The sources with verdicts that are right."""
        sources = self.recipes["distill"].sources
        return {name: each.replace(args={**each.args, "error": 0.0}) for name, each in sources.items()}

    def _held_out(self, seed: int) -> HeldOut:
        return HeldOut(SELECTION if seed == self.seeds[0] else REPORT, self.num_problems)

    def _folder(self, name: str) -> Path:
        return self.out / name / CHECKPOINT


def learn_from_sum(
    recipe: RlRecipe, base: Path, judged: Mapping[str, SourceConfig], held_out: HeldOut, device: str, folder: Path
) -> dict[str, Any]:
    """`learn` from the merge that ``distill.merge_scale`` asks for, as `stretto distill` does."""
    assert recipe.distill is not None
    return learn(recipe, merge_teachers(recipe.distill, base, folder / "sum"), judged, held_out, device, folder)


def num_samples(recipe: RlRecipe) -> int:
    """Number of samples that a run draws."""
    return recipe.train.steps * recipe.train.prompts * recipe.rollout.group


def seeded(recipe: RlRecipe, seed: int, factor: float = 1.0) -> RlRecipe:
    """The pipeline's recipe for the synchronous loop, with a seed and a multiple of its learning rate."""
    ours = {
        "staleness": 0,
        "replay": "off",
        "loss": {"drop_uniform": False},
        "optim": {"lr": recipe.optim.lr * factor},
        "train": {"seed": seed},
    }
    return validate(RlRecipe, merged(recipe.model_dump(mode="json"), ours), "distillation")


@refusing()
def main() -> None:
    parser = study_parser(__doc__, "differences by regime", seeds=range(6))
    parser.add_argument("--regimes", choices=REGIMES, nargs="+", help="default: all, or those in the record")
    parser.add_argument("--problems", type=int, default=400, help="held-out problems per domain")
    parser.add_argument(
        "--mutant", choices=("wrong-teachers",), help="each domain's teacher is another domain's expert"
    )
    parser.add_argument("--jobs", type=int, default=2, help="parallel processes of one thread each")
    _study(parser.parse_args())


def _study(options: argparse.Namespace) -> None:
    if is_record(options.out):
        record = read_fields(options.out, ("runs", "seeds", "problems", "settings", "mutant"))
        results = record["runs"]
        regimes = [name for name in REGIMES if any(run.startswith(f"{name}/") and "/mixed" in run for run in results)]
        plans = plans_of(record, options.regimes or regimes, Path())
    else:
        record = {"settings": options.settings, "problems": options.problems, "mutant": options.mutant}
        plans = plans_of({**record, "seeds": options.seeds}, options.regimes or list(REGIMES), options.out.resolve())
        known = recorded(options.record, record) if options.record else {}
        found = carry_out(partial(all_runs, plans), options.out.resolve(), options.jobs, options.minutes, known)
        results = {**known, **found}
        if options.record:
            write_record(options.record, {**record, "seeds": options.seeds}, results)
    finish(report(plans, results, options.picture))


def plans_of(record: Mapping[str, Any], regimes: Sequence[str], out: Path) -> list[Plan]:
    """Plans of ``regimes`` with the settings in ``record``."""
    seeds, settings = tuple(record["seeds"]), tuple(record["settings"])
    return [Plan(name, out, seeds, record["problems"], settings, record["mutant"]) for name in regimes]


def all_runs(plans: Sequence[Plan], results: Results) -> list[Run]:
    """The runs of all plans, and of the studies with which mutants are compared; shared ones once."""
    every = dict.fromkeys(each for plan in plans for each in (plan.study, plan))
    return list({run.name: run for plan in every for run in plan.runs(results)}.values())


# Shape letters of the figures: S reported seeds, D domains.


@dataclass(frozen=True, slots=True)
class Row:
    """An arm over the reported seeds."""

    setting: str
    scores_SD: np.ndarray
    samples: float
    """As ``flops``: from SFT to the arm's network, mean over seeds."""
    flops: float

    def minus(self, other: Row) -> list[float]:
        """Differences of the mean scores by seed."""
        return list(map(float, (self.scores_SD - other.scores_SD).mean(1)))


def rows_of(plan: Plan, results: Results) -> dict[str, Row]:
    """Rows of the arms that are done with all reported seeds; ``expert``: all of them, each in its domain."""
    found: dict[str, Row] = {}
    for arm in ("sft", *CANDIDATES):
        try:
            scores = np.array([plan.scores(arm, seed, results) for seed in plan.seeds[1:]])
            costs = [
                0.0 if arm == "sft" else fmean(plan.cost(kind, arm, seed, results) for seed in plan.seeds[1:])
                for kind in COSTS
            ]
        except KeyError:
            continue
        setting = "" if arm in ("sft", "expert") else str(plan.chosen(arm, results))
        found[arm] = Row(setting, scores, *costs)
    return found


def report(plans: Sequence[Plan], results: Results, picture: Path | None = None) -> list[str]:
    """Print the tables of all regimes, and draw ``picture``. Returns what is missing, and whether distillation is behind, or for a mutant,
    whether it is not."""
    if any(plan.mutant for plan in plans):
        return [failure for plan in plans for failure in _show_mutant(plan, results)]
    tables = {plan.name: rows_of(plan, results) for plan in plans}
    for plan in plans:
        _show_search(plan, results)
        _show_arms(plan, tables[plan.name])
    missing = [f"{name}: not done yet: {arm}" for name, rows in tables.items() for arm in CANDIDATES if arm not in rows]
    compared = {name: rows for name, rows in tables.items() if {OURS, "mixed"} <= rows.keys()}
    if not compared:
        return missing
    verdicts = {name: _verdict(rows[OURS].minus(rows["mixed"])) for name, rows in compared.items()}
    _show_regimes(compared, verdicts)
    if picture:
        draw(compared, picture)
    if not any(verdicts.values()):
        return [*missing, NO_INTERVAL]
    behind = [name for name, verdict in verdicts.items() if verdict == "behind"]
    if 2 * len(behind) >= len(verdicts):
        missing.append(
            f"distillation is behind mixed RL in {len(behind)} of {len(verdicts)} regimes: {', '.join(behind)}"
        )
    return missing


def _show_mutant(plan: Plan, results: Results) -> list[str]:
    """Print the score of a mutant's `OURS` minus the study's. Returns what is missing, or that it is not lower."""
    mutant, ours = (rows_of(each, results).get(OURS) for each in (plan, plan.study))
    if mutant is None or ours is None:
        return [f"{plan.name}: not done yet: {OURS}"]
    differences = mutant.minus(ours)
    told = f"{plan.name}: {OURS} with {plan.mutant} minus {OURS}: {shown_mean(differences, '+')}"
    print(told)
    if len(differences) < 2:
        return [NO_INTERVAL]
    return [] if _verdict(differences) == "behind" else [f"{told}; must be lower by more than the interval"]


def _verdict(differences: Sequence[float]) -> str:
    """Of the mean difference beside its 95 % interval; empty: one seed has no interval."""
    if len(differences) < 2:
        return ""
    mean = fmean(differences)
    return "level" if abs(mean) <= half_width(differences) else "ahead" if mean > 0 else "behind"


def _show_search(plan: Plan, results: Results) -> None:
    title = f"{plan.name}: search on seed {plan.seeds[0]}: mean score on its own problems; *: chosen"
    shown = table(title, "arm", "candidates")
    for arm, candidates in plan.candidates.items():
        best = plan.chosen(arm, results)
        scores = {setting: plan.searched(arm, setting, results) for setting in candidates}
        cells = (
            f"{setting} {score:.3f}{'*' if setting == best else ''}"
            for setting, score in scores.items() if score is not None
        )  # fmt: skip
        shown.add_row(arm, "; ".join(cells))
    wide_console().print(shown)


def _show_arms(plan: Plan, rows: Mapping[str, Row]) -> None:
    title = f"{plan.name}: {plan.regime.about}; share of right answers, {len(plan.seeds) - 1} seeds, ± half of the 95 % interval"
    shown = table(title, "arm", "setting", *plan.domains, "mean", f"{OURS} minus it", "samples", "FLOPs")
    for arm, row in rows.items():
        means = list(map(float, row.scores_SD.mean(1)))
        gain = shown_mean(rows[OURS].minus(row), "+") if OURS in rows and arm != OURS else ""
        shown.add_row(
            arm,
            row.setting,
            *(f"{score:.3f}" for score in row.scores_SD.mean(0)),
            shown_mean(means),
            gain,
            f"{row.samples:,.0f}",
            f"{row.flops / 1e12:.2f}T",
        )
    wide_console().print(shown)


def _show_regimes(compared: Mapping[str, Mapping[str, Row]], verdicts: Mapping[str, str]) -> None:
    others = [arm for arm in CANDIDATES if arm != OURS]
    shown = table(
        f"score of {OURS}, and {OURS} minus each other arm", "regime", "what", OURS, *others, "beside mixed RL"
    )
    for name, rows in compared.items():
        gains = (shown_mean(rows[OURS].minus(rows[arm]), "+") if arm in rows else "" for arm in others)
        score = f"{float(rows[OURS].scores_SD.mean()):.3f}"
        shown.add_row(name, REGIMES[name].about, score, *gains, verdicts[name])
    wide_console().print(shown)


def draw(compared: Mapping[str, Mapping[str, Row]], path: Path) -> None:
    """Ours minus mixed RL and minus offline distillation, with intervals, a row for each regime."""
    figure, places = style.blank(10.0, 1.2 + 0.7 * len(compared)), np.arange(len(compared))
    axes = style.dress(figure.subplots(), "distillation minus …, equal FLOPs", "share of right answers", "", grid="x")
    axes.axvline(0.0, color=style.INK, linewidth=1.0)
    for arm, colour, shift in (("mixed", style.BLUE, -0.12), ("offline", style.ORANGE, 0.12)):
        pairs = [rows[OURS].minus(rows[arm]) for rows in compared.values() if arm in rows]
        at = [place + shift for place, rows in zip(places, compared.values(), strict=True) if arm in rows]
        draw_means(axes, at, pairs, colour, arm, along="x")
    axes.set_yticks(places, [REGIMES[name].about for name in compared])
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=style.TEXT_PT)
    save_picture(figure, path)


if __name__ == "__main__":
    main()
