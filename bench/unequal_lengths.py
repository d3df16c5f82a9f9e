"""What long answers do to the domains beside them: distillation from three teachers, with and without balance (figure 4).

    python -m bench.unequal_lengths OUT                         three seeds, none and sequence: some minutes on two cores; again: goes on
    python -m bench.unequal_lengths OUT --seeds 0 1 2 3 4 5 --balances none sequence tokens gap sigma --jobs 15     long
    python -m bench.unequal_lengths OUT2 --lengths 5 5 5        nothing to balance: must exit with 1

Three sources of walks over digits (`bench.common.walks`), each with rules of its own; one has answers ten times as long, and three
prompts of five. A start has learnt mostly wrong rules, an expert of each source (supervised on right examples) the right ones, and
one student learns from all three, another sample a prompt. Students differ in ``distill.balance`` alone: ``none`` weighs all tokens
alike. Their rate falls to zero over the same number of steps, and all cost about the same tokens.

Norm is (student − start) / (expert − start) of the share of right digits. The first seed is searched: there each balance has its rate
chosen, by the mean Norm over sources. The others are reported, whose rules are others. Exits with 1 unless one of the balances has
a mean Norm of 0.9, the short sources have less than 0.5 without, and gain from it beyond the interval of seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common.measure import half_width, table, wide_console
from bench.common.post_runs import Asked, Sampler, learn
from bench.common.stages import MODEL, mean_and_width
from bench.common.studies import Run, Study
from bench.common.walks import KIND
from stretto.base.paths import CHECKPOINT, remove
from stretto.base.records import read_lineage
from stretto.flow.launch import SourceTables
from stretto.learning.recipe import RlRecipe, SourceConfig
from stretto.model.parallel import join
from stretto.post.sft import sft

NAMES = ("cat", "owl", "elk")
"""Of the sources; the last has the long answers."""
SHORT = NAMES[:2]
BALANCES = ("none", "sequence", "tokens", "gap", "sigma")
AIM = 0.9
COLLAPSED = 0.5
"""Norm of the short sources without balance, below which it is one."""
SHARES = (1.0, 1.0, 3.0)
"""Of the prompts: Open-MOPD (2608.19098) saw a domain with a fifth of them have a hundredth of the gradient's tokens."""
NOISE = 0.9
"""Of the start's examples."""
HELD_OUT = 1 << 22
"""First item of the answers that are scored."""


@dataclass(frozen=True, slots=True)
class Student:
    """What came of a student with one seed."""

    norms: dict[str, float]
    """By source."""
    shares: dict[str, float]
    """Of the gradient, mean over the first half of the steps."""
    flops: int

    @property
    def norm(self) -> float:
        return fmean(self.norms.values())

    @property
    def short(self) -> float:
        """Mean Norm of the short sources."""
        return fmean(self.norms[name] for name in SHORT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the runs; called again, a study goes on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first is searched")
    parser.add_argument("--rates", type=float, nargs="+", default=[6e-3, 1.2e-2, 2.4e-2], help="of students")
    parser.add_argument("--all-rates", action="store_true", help="tell every rate; the verdict is of those chosen")
    parser.add_argument("--optim", choices=("adamw", "muon"), default="adamw", help="of students")
    parser.add_argument("--lengths", type=int, nargs=3, default=[5, 5, 50], help="digits of an answer, by source")
    parser.add_argument("--steps", type=int, default=50, help="of students")
    parser.add_argument("--prompts", type=int, default=40, help="of a student's step")
    parser.add_argument("--start-steps", type=int, default=120)
    parser.add_argument("--expert-steps", type=int, default=60)
    parser.add_argument("--problems", type=int, default=100, help="held-out answers of each source")
    parser.add_argument("--balances", nargs="+", choices=BALANCES, default=["none", "sequence"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after so many nothing further is begun")
    options = parser.parse_args()
    bench, first = Bench(options, Study(options.out, options.jobs, options.minutes)), options.seeds[0]
    taught = bench.taught()
    reported = {seed: each for seed, each in taught.items() if seed != first}
    wanted = [(balance, rate) for balance in options.balances for rate in options.rates]
    searched = bench.students("rates", {seed: each for seed, each in taught.items() if seed == first}, wanted)
    rates = chosen(searched, first)
    found = bench.students("students", reported, wanted if options.all_rates else list(rates.items()))
    show_search(searched, first)
    if not rates or not reported:
        sys.exit("not enough runs for a figure: call again")
    sys.exit(report(rates, found, reported))


@dataclass(frozen=True, slots=True)
class Taught:
    """What students of one seed begin with."""

    start: Run
    experts: dict[str, Run]
    """By source."""

    def student(self, found: Run) -> Student:
        before = self.start["scores"]
        leads = {name: expert["scores"][name] - before[name] for name, expert in self.experts.items()}
        early = found["shares"][: max(1, len(found["shares"]) // 2)]
        return Student(
            {name: (found["scores"]["sampled"][name] - before[name]) / leads[name] for name in NAMES},
            {name: fmean(each[name] for each in early) for name in NAMES},
            found["flops"],
        )


Students = Mapping[tuple[str, float], Mapping[int, Student]]
"""By balance and rate, then by seed."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The rounds of the study, each of which begins with what the one before has made."""

    options: argparse.Namespace
    study: Study

    def taught(self) -> dict[int, Taught]:
        """By seed: starts, and an expert for each source."""
        seeds = self.options.seeds
        starts = self._round("starts", {f"{seed}-start": self._start(seed) for seed in seeds})
        wanted = {
            f"{seed}-{name}": self._expert(seed, name, starts[f"{seed}-start"]["checkpoint"])
            for seed in seeds
            if f"{seed}-start" in starts
            for name in NAMES
        }
        experts = self._round("experts", wanted)
        return {
            seed: Taught(starts[f"{seed}-start"], {name: experts[f"{seed}-{name}"] for name in NAMES})
            for seed in seeds
            if all(f"{seed}-{name}" in experts for name in NAMES)
        }

    def students(self, title: str, taught: Mapping[int, Taught], wanted: Sequence[tuple[str, float]]) -> Students:
        """Students of all who are ``taught``, of each balance and rate that is ``wanted``."""
        keys = {f"{seed}-{balance}-{rate:g}": (seed, balance, rate) for seed in taught for balance, rate in wanted}
        runs = {name: self._student(seed, balance, rate, taught[seed]) for name, (seed, balance, rate) in keys.items()}
        found: dict[tuple[str, float], dict[int, Student]] = {pair: {} for pair in wanted}
        for name, each in self._round(title, runs).items():
            seed, balance, rate = keys[name]
            found[balance, rate][seed] = taught[seed].student(each)
        return found

    def _round(self, title: str, runs: Mapping[str, Run]) -> dict[str, Run]:
        return self.study.run(title, carry_out, runs)

    def _told(
        self, seed: int, names: Sequence[str], noise: float, tables: Mapping[str, Any], label: str, begin: str | None
    ) -> dict[str, Any]:
        """A run on the sources ``names``: supervised by the table ``start``, or taught by ``distill``."""
        options = self.options
        sources = {
            name: {
                "kind": KIND,
                "weight": share,
                "args": {"name": name, "length": length, "noise": noise, "seed": seed},
            }
            for name, length, share in zip(NAMES, options.lengths, SHARES, strict=True)
        }
        most, is_student = 2 * max(options.lengths) + 4, "distill" in tables
        tree = {
            "sources": {name: sources[name] for name in names},
            "rollout": {
                "group": 1 if is_student else 2, "max_tokens": most, "chunk_tokens": most, "max_batch": 128,
                "cache_bytes": 1 << 24, "page_size": 8,
            },
            "optim": {"lr": 1e-3},
            "train": {
                "steps": options.steps if is_student else 1,  # supervised runs have their own, and stay as they are
                "prompts": options.prompts, "seq_len": 256, "micro_rows": 16, "seed": seed,
            },
            "staleness": 0,
            "replay": "off",
            "loss": {"drop_uniform": False},
            **tables,
        }  # fmt: skip
        recipe = RlRecipe.model_validate(tree).model_dump(mode="json")
        folder = str(options.out / str(seed) / label)
        asked = {"problems": options.problems, "device": options.device}
        return {"recipe": recipe, "begin": begin, "folder": folder, "judged": sources, **asked}

    def _start(self, seed: int) -> dict[str, Any]:
        optim = {"name": "muon", "lr": 6e-3, "warmup_steps": 10, "decay_fraction": 0.4}
        model = {**MODEL, "num_layers": 2, "vocab_size": 300, "max_positions": 256}
        start = {"model": model, "optim": optim, "steps": self.options.start_steps, "rows": 10}
        return self._told(seed, NAMES, NOISE, {"start": start}, "start", None)

    def _expert(self, seed: int, name: str, begin: str) -> dict[str, Any]:
        optim = {"name": "muon", "lr": 3e-3, "warmup_steps": 5, "decay_fraction": 0.7}
        start = {"optim": optim, "steps": self.options.expert_steps, "rows": 6}
        return self._told(seed, [name], 0.0, {"start": start}, name, begin)

    def _student(self, seed: int, balance: str, rate: float, taught: Taught) -> dict[str, Any]:
        teachers = {name: {"checkpoint": each["checkpoint"]} for name, each in taught.experts.items()}
        optim = {"name": self.options.optim, "lr": rate, "weight_decay": 0.0, "decay_fraction": 1.0}
        tables = {"distill": {"balance": balance, "teachers": teachers}, "optim": optim}
        return self._told(seed, NAMES, 0.0, tables, f"{balance}-{rate:g}", taught.start["checkpoint"])


def carry_out(told: Run) -> Run:
    """One run, in a process of its own: where its network is, ``scores`` by source, and what it cost."""
    recipe, folder = RlRecipe.model_validate(told["recipe"]), Path(told["folder"])
    asked, device, begin = Asked(HELD_OUT, told["problems"]), told["device"], told["begin"]
    remove(folder)  # of a run that was cut short
    if recipe.distill is not None:
        return learn(recipe, Path(begin), recipe.sources, (), asked, 1, False, device, folder)
    with SourceTables(dict(recipe.sources), recipe.sandbox).opened() as sources:
        made = sft(recipe, sources, folder / CHECKPOINT, origin=begin and Path(begin), ranks=join(device))
    judged = {name: SourceConfig.model_validate(each) for name, each in told["judged"].items()}
    with SourceTables(judged, recipe.sandbox).opened() as sources:
        scores = Sampler(recipe, made, device, sources).score(NAMES, asked, 1.0, recipe.train.seed)
    receipt = read_lineage(made).receipt
    return {"checkpoint": str(made), "scores": scores, "tokens": receipt.tokens, "flops": receipt.flops}


def chosen(searched: Students, seed: int) -> dict[str, float]:
    """The rate of each balance, the best balance first, ``none`` last: by the mean Norm of the seed that is searched."""
    norms = {pair: own[seed].norm for pair, own in searched.items() if seed in own}
    best = {name: max((pair for pair in norms if pair[0] == name), key=norms.__getitem__) for name, _ in norms}
    order = sorted(best, key=lambda name: (name == "none", -norms[best[name]]))
    return {name: best[name][1] for name in order}


def show_search(searched: Students, seed: int) -> None:
    shown = table(
        f"Seed {seed}, which is searched", "balance", "rate", *(f"Norm {name}" for name in NAMES), "mean Norm"
    )
    for (balance, rate), own in searched.items():
        if seed in own:
            norms = own[seed].norms
            shown.add_row(balance, f"{rate:g}", *(f"{norms[name]:.2f}" for name in NAMES), f"{own[seed].norm:.2f}")
    wide_console().print(shown)


def report(rates: Mapping[str, float], found: Students, taught: Mapping[int, Taught]) -> bool:
    """Print the figure; whether an aim is missed."""
    console = wide_console()
    for name in NAMES:
        pairs = [(each.start["scores"][name], each.experts[name]["scores"][name]) for each in taught.values()]
        start, expert = (mean_and_width(values) for values in zip(*pairs, strict=True))
        console.print(f"{name}: share of right digits, start {start}, expert {expert}")
    shown = table(
        f"{len(taught)} seeds: mean ± half of Student's 95 % interval; shares of the gradient: first half; *: chosen",
        "balance", "rate", *(f"Norm {name}" for name in NAMES), "mean", "worst", *(f"share {name}" for name in NAMES), "FLOPs",
    )  # fmt: skip
    for (balance, rate), by_seed in found.items():
        if students := list(by_seed.values()):
            shown.add_row(
                balance,
                f"{rate:g}{' *' if rates[balance] == rate else ''}",
                *(mean_and_width([each.norms[name] for each in students]) for name in NAMES),
                mean_and_width([each.norm for each in students]),
                mean_and_width([min(each.norms.values()) for each in students]),
                *(f"{fmean(each.shares[name] for each in students):.1%}" for name in NAMES),
                f"{fmean(each.flops for each in students):.1e}",
            )
    console.print(shown)
    best = next(iter(rates))
    plain, ours = ({} if name not in rates else found[name, rates[name]] for name in ("none", best))
    seeds = sorted(set(plain) & set(ours))
    if not seeds or best == "none":
        console.print("not enough runs for a verdict: call again")
        return True
    gains = [ours[seed].short - plain[seed].short for seed in seeds]
    reached, without = fmean(ours[seed].norm for seed in seeds), fmean(plain[seed].short for seed in seeds)
    is_settled = fmean(gains) > half_width(gains)
    console.print(
        f"{best}, best where rates were searched: mean Norm {reached:.2f} (aim {AIM}); the short sources have {without:.2f} by "
        f"none (a collapse: below {COLLAPSED}) and gain {mean_and_width(gains)}: "
        f"{'beyond' if is_settled else 'within'} the interval"
    )
    return reached < AIM or without >= COLLAPSED or not is_settled


if __name__ == "__main__":
    main()
