"""What long answers do to the domains beside them: distillation from three teachers, with and without balance (figure 4).

    python -m bench.unequal_lengths OUT --jobs 15 --seeds 0 1 2 3 --minutes 10      again: goes on
    python -m bench.unequal_lengths OUT --all-rates --jobs 15                       every rate with every seed, not only the chosen
    python -m bench.unequal_lengths OUT2 --lengths 4 4 4                            nothing to balance: must exit with 1

A network knows of three sources of digits (`bench.common.digits`) a rule and, better, a wrong one; reinforcement learning makes an
expert of each source, which knows the rule alone; and one student learns from all three. A fifth of the prompts asks for answers of
four digits, the others for answers ten times as long, so that a token in forty is of a short one. Students differ in
``distill.balance`` alone: ``none`` weighs all tokens alike. Their rate falls to zero over the same number of steps.

Norm is (student − start) / (expert − start) of the share of right digits in answers to held-out problems. The first seed is
searched: there each balance has its rate chosen, by the mean Norm over sources. The others are reported. Exits with 1 unless one
of the balances has a mean Norm of 0.9, and the short source does better by it than by ``none`` beyond the interval of seeds.
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

from bench.common.digits import KIND
from bench.common.measure import half_width, table, wide_console
from bench.common.stages import MODEL, carry_out, mean_and_width, told
from bench.common.studies import Run, Study

RULES = {"cat": ((9, 9), (7, 3)), "owl": ((3, 2), (1, 7)), "elk": ((1, 1), (3, 5))}
"""The right and the wrong one of each source; the first has the short answers."""
SHORT = next(iter(RULES))
SHARES = (1.0, 2.0, 2.0)
"""Of the prompts: Open-MOPD (2608.19098) saw a domain with a fifth of them have a hundredth of the gradient's tokens."""
BALANCES = ("none", "sequence", "tokens", "gap", "sigma")
AIM = 0.9


@dataclass(frozen=True, slots=True)
class Student:
    """What came of a student with one seed."""

    norms: dict[str, float]
    """By source."""
    first_shares: dict[str, float]
    """Of the gradient, mean over the first fifth of the steps."""
    flops: int

    @property
    def norm(self) -> float:
        return fmean(self.norms.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="the first is searched")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="of students")
    parser.add_argument("--all-rates", action="store_true", help="tell every rate; the verdict is of those chosen")
    parser.add_argument("--lengths", type=int, nargs=3, default=[4, 49, 49], help="digits of an answer, by source")
    parser.add_argument("--steps", type=int, default=50, help="of students")
    parser.add_argument("--prompts", type=int, default=20, help="of a student's step")
    parser.add_argument("--start-steps", type=int, default=160)
    parser.add_argument("--expert-steps", type=int, default=80)
    parser.add_argument("--problems", type=int, default=128, help="held-out ones of each source")
    parser.add_argument("--balances", nargs="+", choices=BALANCES, default=BALANCES)
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
        shares = {name: found["curve"][f"distill/share/{name}"] for name in RULES}
        return Student(
            {name: (found["scores"][name] - before[name]) / leads[name] for name in RULES},
            {name: fmean(each[: max(1, len(each) // 5)]) for name, each in shares.items()},
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
        starts = self._round("starts", {f"{seed}-start": self._told("start", seed, RULES, 1) for seed in seeds})
        wanted = {
            f"{seed}-{name}": self._expert(seed, name, starts[f"{seed}-start"]["checkpoint"])
            for seed in seeds
            if f"{seed}-start" in starts
            for name in RULES
        }
        experts = self._round("experts", wanted)
        return {
            seed: Taught(starts[f"{seed}-start"], {name: experts[f"{seed}-{name}"] for name in RULES})
            for seed in seeds
            if all(f"{seed}-{name}" in experts for name in RULES)
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

    def _sources(self, seed: int) -> dict[str, Any]:
        return {
            name: {
                "kind": KIND,
                "weight": share,
                "args": {"name": name, "rule": rule, "wrong": wrong, "length": length, "seed": seed},
            }
            for (name, (rule, wrong)), share, length in zip(RULES.items(), SHARES, self.options.lengths, strict=True)
        }

    def _told(
        self,
        stage: str,
        seed: int,
        names: Sequence[str] | Mapping[str, Any],
        steps: int,
        begin: str | None = None,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
        label: str = "",
    ) -> dict[str, Any]:
        """A stage on the sources ``names``."""
        sources, most = self._sources(seed), 2 * max(self.options.lengths) + 4
        tree: dict[str, Any] = {
            "sources": {name: sources[name] for name in names},
            "start": {
                "model": {**MODEL, "vocab_size": 300, "max_positions": 256},
                "optim": {"name": "muon", "lr": 3e-3, "warmup_steps": 10, "decay_fraction": 0.3},
                "steps": self.options.start_steps,
                "rows": 12,
            },
            "rollout": {
                "group": 2, "max_tokens": most, "chunk_tokens": most, "max_batch": 64, "cache_bytes": 1 << 24, "page_size": 8,
            },
            "optim": {"lr": 1e-3, "weight_decay": 0.0},
            "train": {
                "steps": steps, "prompts": self.options.prompts, "seq_len": 256, "micro_rows": 16, "seed": seed,
                "snapshot_every": 1000, "eval_every": 1000, "eval_prompts": 4 * len(names),
            },
            "staleness": 0,
            "runtime": {"isolate": "none"},
            "failures": {"lease_s": 3600.0, "stuck_s": 3600.0},
        }  # fmt: skip
        for name, fields in (tables or {}).items():
            tree[name] = {**tree.get(name, {}), **fields}
        folder = self.options.out / str(seed) / (label or "-".join([stage, *([] if len(names) > 1 else names)]))
        scored = {"sources": sources, "samples": 1, "problems": self.options.problems}
        return told(stage, tree, folder, self.options.device, scored, None if begin is None else Path(begin))

    def _expert(self, seed: int, name: str, begin: str) -> dict[str, Any]:
        tables: dict[str, dict[str, Any]] = {
            "optim": {"lr": 2e-3, "decay_fraction": 0.0},
            "rollout": {"group": 8},
            "train": {"prompts": 6},
            "loss": {"drop_uniform": name != SHORT},  # of four digits all are right often
        }
        return self._told("rl", seed, [name], self.options.expert_steps, begin, tables)

    def _student(self, seed: int, balance: str, rate: float, taught: Taught) -> dict[str, Any]:
        teachers = {name: {"checkpoint": each["checkpoint"]} for name, each in taught.experts.items()}
        tables: dict[str, dict[str, Any]] = {
            "distill": {"balance": balance, "teachers": teachers},
            "rollout": {"group": 1},
            "optim": {"lr": rate, "decay_fraction": 1.0},
        }
        begin = taught.start["checkpoint"]
        return self._told("distill", seed, RULES, self.options.steps, begin, tables, f"{balance}-{rate:g}")


def chosen(searched: Students, seed: int) -> dict[str, float]:
    """The rate of each balance, the best balance first, ``none`` last: by the mean Norm of the seed that is searched."""
    norms = {pair: own[seed].norm for pair, own in searched.items() if seed in own}
    best = {name: max((pair for pair in norms if pair[0] == name), key=norms.__getitem__) for name, _ in norms}
    order = sorted(best, key=lambda name: (name == "none", -norms[best[name]]))
    return {name: best[name][1] for name in order}


def show_search(searched: Students, seed: int) -> None:
    shown = table(
        f"Seed {seed}, which is searched", "balance", "rate", *(f"Norm {name}" for name in RULES), "mean Norm"
    )
    for (balance, rate), own in searched.items():
        if seed in own:
            norms = own[seed].norms
            shown.add_row(balance, f"{rate:g}", *(f"{norms[name]:.2f}" for name in RULES), f"{own[seed].norm:.2f}")
    wide_console().print(shown)


def report(rates: Mapping[str, float], found: Students, taught: Mapping[int, Taught]) -> bool:
    """Print the figure; whether an aim is missed."""
    console = wide_console()
    for name in RULES:
        pairs = [(each.start["scores"][name], each.experts[name]["scores"][name]) for each in taught.values()]
        start, expert = (mean_and_width(values) for values in zip(*pairs, strict=True))
        console.print(f"{name}: share of right digits, start {start}, expert {expert}")
    shown = table(
        f"{len(taught)} seeds: mean ± half of Student's 95 % interval; share: of {SHORT} in the gradient; *: chosen",
        "balance", "rate", *(f"Norm {name}" for name in RULES), "mean", "worst", "share, first fifth", "FLOPs",
    )  # fmt: skip
    for (balance, rate), by_seed in found.items():
        if students := list(by_seed.values()):
            shown.add_row(
                balance,
                f"{rate:g}{' *' if rates[balance] == rate else ''}",
                *(mean_and_width([each.norms[name] for each in students]) for name in RULES),
                mean_and_width([each.norm for each in students]),
                mean_and_width([min(each.norms.values()) for each in students]),
                f"{fmean(each.first_shares[SHORT] for each in students):.1%}",
                f"{fmean(each.flops for each in students):.1e}",
            )
    console.print(shown)
    best = next(iter(rates))
    plain, ours = ({} if name not in rates else found[name, rates[name]] for name in ("none", best))
    seeds = sorted(set(plain) & set(ours))
    if not seeds or best == "none":
        console.print("not enough runs for a verdict: call again")
        return True
    gains = [ours[seed].norms[SHORT] - plain[seed].norms[SHORT] for seed in seeds]
    reached, is_settled = fmean(ours[seed].norm for seed in seeds), fmean(gains) > half_width(gains)
    console.print(
        f"{best}, best where rates were searched: mean Norm {reached:.2f} (aim {AIM}); {SHORT} gains "
        f"{mean_and_width(gains)} over none: {'beyond' if is_settled else 'within'} the interval"
    )
    return reached < AIM or not is_settled


if __name__ == "__main__":
    main()
