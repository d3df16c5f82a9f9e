"""What the stages of post-training do to diversity, and whether the last one gives it back at equal quality (figure 7).

    python -m bench.stage_diversity OUT --jobs 4 --seeds 0 1 2 3      again: goes on

A small network learns to write a sentence about an animal and a place (`bench.common.sentences`), with favourite words as its
examples have them, and to complement digits, which can be verified. Reinforcement learning makes an expert of each: of writing by
what the rewarding judge likes, which is nearly one sentence. Both teach one student. From that student stage 4 goes on as ``stretto
online --self-teacher`` does: writing earns quality times diversity, digits stay in the mix, and the student itself teaches them.
Its control is the same without the diversity (a floor of 1, at which it is only measured): it must lose.

Quality is said by another judge than the one that rewards, of prompts that no stage has seen. Diversity is that of 16 answers to
one prompt, by letters, where the reward goes by words; and, since what is wrong is various too, of right answers alone.

Exits with 1 unless, on the mean over seeds, stage 4 has at least SFT's Vendi score, of all answers and of right ones, at no less than
SFT's quality, keeps 98 % of the student's digits, and its control has a lower Vendi score than SFT.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common.measure import half_width, table, wide_console
from bench.common.sentences import KIND
from bench.common.stages import MODEL, carry_out, mean_and_width, told
from bench.common.studies import Run, Study
from stretto.api.rl import self_taught
from stretto.learning.recipe import RlRecipe

WRITING, DIGITS = "writing", "digits"
STAGE_4, CONTROL = "stage 4", "stage 4, quality alone"
SHOWN = ("start", "writing expert", "digits expert", "distilled", STAGE_4, CONTROL)
KEPT = 0.98


@dataclass(frozen=True, slots=True)
class Bench:
    """The rounds of the study, each of which begins with what the one before has made."""

    options: argparse.Namespace
    study: Study

    def stages(self) -> dict[str, dict[int, Run]]:
        """What each stage found, by name and seed."""
        options, seeds = self.options, self.options.seeds
        start = self._round("start", {seed: self._told("start", seed, "start", {"steps": 1}) for seed in seeds})
        tables: dict[str, dict[str, Any]] = {"loss": {"advantage": "dr_grpo"}, "optim": {"lr": 2e-3}}
        experts = {
            f"{name} expert": {
                seed: self._told("rl", seed, name, {"steps": steps}, begun, own, (name,))
                for seed, begun in start.items()
            }
            for name, steps, own in ((WRITING, options.expert_steps, tables), (DIGITS, options.digit_steps, {}))
        }
        found = {"start": start, **self._rounds("experts", experts)}
        taught = {
            seed: {name: {"checkpoint": found[f"{name} expert"][seed]["checkpoint"]} for name in (WRITING, DIGITS)}
            for seed in start
            if all(seed in found[f"{name} expert"] for name in (WRITING, DIGITS))
        }
        students = {
            seed: self._told(
                "distill",
                seed,
                "distilled",
                {"steps": options.distill_steps, "prompts": 24},
                start[seed],
                {"rollout": {"group": 1}, "distill": {"teachers": teachers}},
            )
            for seed, teachers in taught.items()
        }
        found["distilled"] = self._round("distilled", students)
        last = {
            name: {seed: self._online(seed, name, floor, begun) for seed, begun in found["distilled"].items()}
            for name, floor in ((STAGE_4, options.floor), (CONTROL, 1.0))
        }
        return found | self._rounds("stage 4", last)

    def _round(self, name: str, runs: Mapping[int, dict[str, Any]]) -> dict[int, Run]:
        return self._rounds(name, {name: runs})[name]

    def _rounds(self, title: str, runs: Mapping[str, Mapping[int, dict[str, Any]]]) -> dict[str, dict[int, Run]]:
        named = {f"{seed}, {name}": (name, seed) for name, own in runs.items() for seed in own}
        done = self.study.run(title, carry_out, {key: runs[name][seed] for key, (name, seed) in named.items()})
        return {
            name: {seed: done[key] for key, (own, seed) in named.items() if own == name and key in done}
            for name in runs
        }

    def _sources(self, seed: int, judge: str) -> dict[str, Any]:
        return {
            WRITING: {"kind": KIND, "args": {"judge": judge, "seed": seed, "skew": self.options.skew}},
            DIGITS: {"kind": "strings", "args": {"operation": "complement", "length": 5, "seed": seed}},
        }

    def _recipe(
        self, seed: int, train: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]], names: Sequence[str]
    ) -> dict[str, Any]:
        sources = self._sources(seed, "taste")
        tree: dict[str, Any] = {
            "sources": {name: sources[name] for name in names},
            "start": {
                "model": {**MODEL, "vocab_size": 400, "max_positions": 128},
                "optim": {"name": "muon", "lr": 3e-3, "warmup_steps": 10, "decay_fraction": 0.3},
                "steps": self.options.start_steps,
                "rows": 8,
                "noise": 0.25,
            },
            "rollout": {
                "group": 8, "max_tokens": 40, "chunk_tokens": 40, "max_batch": 128, "cache_bytes": 1 << 24, "page_size": 8,
            },
            "optim": {"lr": 1e-3, "decay_fraction": 0.0, "weight_decay": 0.0},
            "train": {
                "prompts": 6, "seq_len": 96, "micro_rows": 32, "seed": seed, "snapshot_every": 1000, "eval_every": 1000,
                "eval_prompts": 16, **train,
            },
            "staleness": 0,
            "runtime": {"isolate": "none"},
            "failures": {"lease_s": 3600.0, "stuck_s": 3600.0},
        }  # fmt: skip
        for name, fields in tables.items():
            tree[name] = {**tree.get(name, {}), **fields}
        return tree

    def _told(
        self,
        stage: str,
        seed: int,
        name: str,
        train: Mapping[str, Any],
        begun: Run | None = None,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
        names: Sequence[str] = (WRITING, DIGITS),
    ) -> dict[str, Any]:
        return self._asked(stage, seed, name, self._recipe(seed, train, tables or {}, names), begun)

    def _asked(self, stage: str, seed: int, name: str, tree: Mapping[str, Any], begun: Run | None) -> dict[str, Any]:
        folder = self.options.out / str(seed) / name.replace(", ", "-").replace(" ", "-")
        scored = {"sources": self._sources(seed, "strict"), "samples": 16, "problems": self.options.problems}
        begin = None if begun is None else Path(begun["checkpoint"])
        return told(stage, tree, folder, self.options.device, scored, begin)

    def _online(self, seed: int, name: str, floor: float, begun: Run) -> dict[str, Any]:
        """Stage 4, three prompts of four for writing."""
        sources = self._sources(seed, "taste")
        tables: dict[str, dict[str, Any]] = {
            "sources": {WRITING: {**sources[WRITING], "weight": 3.0}},
            "rewards": {WRITING: {"diversity": "words", "same_at": self.options.same_at, "floor": floor}},
            "rollout": {"group": 12},
            "loss": {"advantage": "dr_grpo", "drop_uniform": False},
            "optim": {"lr": self.options.rate},
        }
        tree = self._recipe(seed, {"steps": self.options.online_steps, "prompts": 8}, tables, (WRITING, DIGITS))
        recipe = self_taught(RlRecipe.model_validate(tree), Path(begun["checkpoint"]), [DIGITS], [WRITING])
        return self._asked("online", seed, name, recipe.model_dump(mode="json"), begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--start-steps", type=int, default=400)
    parser.add_argument("--expert-steps", type=int, default=25, help="of writing's expert")
    parser.add_argument("--digit-steps", type=int, default=40, help="of the digits' expert")
    parser.add_argument("--distill-steps", type=int, default=40)
    parser.add_argument("--online-steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2e-3, help="of stage 4")
    parser.add_argument(
        "--same-at", type=float, default=0.35, help="likeness in words from which two answers say the same"
    )
    parser.add_argument("--floor", type=float, default=0.1, help="of stage 4's diversity; 1 fails: it is the control")
    parser.add_argument("--skew", type=float, default=1.5, help="how much the examples prefer some words")
    parser.add_argument("--problems", type=int, default=30, help="held-out prompts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after so many nothing further is begun")
    options = parser.parse_args()
    found = Bench(options, Study(options.out, options.jobs, options.minutes)).stages()
    sys.exit(report(found))


def report(found: Mapping[str, Mapping[int, Run]]) -> bool:
    """Print the figure of the seeds that have all stages; whether an aim is missed."""
    console = wide_console()
    seeds = sorted(set.intersection(*(set(found[name]) for name in SHOWN)))
    if not seeds:
        console.print("no seed has all stages yet: call again")
        return True
    shown = table(
        f"{len(seeds)} seeds: mean ± half of Student's 95 % interval",
        "", "quality", "digits", "Vendi", "of right", "distinct-2", "clusters", "FLOPs",
    )  # fmt: skip
    for name in SHOWN:
        own = [found[name][seed] for seed in seeds]
        shown.add_row(
            name,
            *(mean_and_width([each["scores"][source] for each in own]) for source in (WRITING, DIGITS)),
            *(
                mean_and_width([measure(each, kind) for each in own])
                for kind in ("vendi", "right", "distinct_2", "clusters")
            ),
            f"{fmean(each['flops'] for each in own):.2e}",
        )
    console.print(shown)

    def paired(one: str, other: str, of: Callable[[Run], float]) -> list[float]:
        return [of(found[one][seed]) - of(found[other][seed]) for seed in seeds]

    def kept(source: str) -> float:
        before, after = (
            fmean(found[name][seed]["scores"][source] for seed in seeds) for name in ("distilled", STAGE_4)
        )
        return after / before

    differences = {
        "Vendi, stage 4 − SFT": (paired(STAGE_4, "start", partial(measure, kind="vendi")), True),
        "of right answers, stage 4 − SFT": (paired(STAGE_4, "start", partial(measure, kind="right")), True),
        "quality, stage 4 − SFT": (paired(STAGE_4, "start", lambda run: float(run["scores"][WRITING])), True),
        "Vendi, quality alone − SFT": (paired(CONTROL, "start", partial(measure, kind="vendi")), False),
        "Vendi, distilled − SFT": (paired("distilled", "start", partial(measure, kind="vendi")), None),
    }
    missed = False
    for name, (found_S, should_win) in differences.items():
        mean, width = fmean(found_S), half_width(found_S)
        settled = "" if abs(mean) > width else ", not settled"
        is_missed = should_win is not None and (mean >= 0) is not should_win
        missed |= is_missed
        console.print(f"{name}: {mean:+.3f} ± {width:.3f}{settled}{'  MISSED' if is_missed else ''}")
    missed |= kept(DIGITS) < KEPT
    console.print(f"digits kept of the student's: {kept(DIGITS):.1%}{'  MISSED' if kept(DIGITS) < KEPT else ''}")
    console.print(f"quality kept of the student's: {kept(WRITING):.1%}")
    return missed


def measure(run: Run, kind: str) -> float:
    """Of the diversity of its writing; NaN where there were too few right answers."""
    found = run["diversity"][WRITING][kind]
    return math.nan if found is None else float(found)


if __name__ == "__main__":
    main()
