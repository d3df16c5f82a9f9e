"""``stretto rl`` against TRL's ``GRPOTrainer``: same network, problems, group size and loss, on the same two cores.

    python -m bench.rl_trl --peer trl=/path/to/python [--long] [--start CHECKPOINT] [--steps N] [--rounds N]

The shipped recipe's answers have a handful of tokens, those of ``--long`` (rl_trl_long.toml) 128. The peer's interpreter
needs TRL and this package. Both sides read one folder, an ordinary transformers checkpoint without our own files, so that
ties and shared experts are the same too; without ``--start`` the recipe's own start is trained first, which takes minutes.
Both train on the same problems in the same order, groups without variance included, with the token normaliser over the
step, no KL and AdamW without decay, in fp32. Runs take turns; each round draws other samples.

TRL first tries its settings in one process, step by step, and goes on with the fastest by wall time. Gradient
checkpointing, bf16, evaluation and snapshots are off there. Left out: batched_mm, which copies an expert's weights for
every token and choice (tens of times slower). Ours runs as shipped, engine and trainer with a thread each, and once
synchronously, with both threads for whoever's turn it is. A run's first steps, in which caches and pipelines fill,
do not count. Held-out rewards of all policies are measured by the one engine, on the same problems with the same seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from rich.console import Console

from bench.common.measure import SLOW, Calibration, table, times, wide_console
from bench.common.policies import held_out_reward, our_gradient, worst_advantage
from bench.common.watched import Tick, watched
from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, RECIPES, checkpoint_folder, write_json
from stretto.base.records import LINEAGE_FILE
from stretto.base.track import progress, read_metrics
from stretto.flow.launch import SourceTables
from stretto.learning.recipe import Prompts, RlRecipe, plan_prompts
from stretto.model.checkpoint import ELASTIC_FILE, STRETTO_FILE

AIM = 3.0
THEIRS = "TRL"
OURS: Mapping[str, Sequence[str]] = {
    "stretto, asynchronous": ("staleness=4",),
    "stretto, synchronous": ("staleness=0", "rollout.threads=2", "train.threads=2"),
}
SAME = (
    "loss.drop_uniform=false", "loss.policy=ppo", "train.eval_every=1000000", "train.eval_prompts=8", "train.snapshot_every=1000000",
)  # fmt: skip
"""Settings that make the comparison one: TRL trains on every group, and neither evaluates nor saves meanwhile."""
WARM_UP = 3
"""Steps of a run that do not count."""
TRIALS = 3
"""Steps of each of TRL's settings; the first does not count."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. Written by `_run`."""

    samples_per_s: float
    samples_per_processor_s: float
    rewards: tuple[float, ...]
    """By step: mean over its samples, before its update."""
    held_out: float
    tokens: float
    """Mean of an answer."""
    calibration_s: float
    """The slower of the matrix products before and after."""


@dataclass(slots=True)
class Bench:
    """What all runs share, and what they found."""

    recipe: RlRecipe
    recipe_path: Path
    settings: list[str]
    start: Path
    folder: Path
    python: str
    """The peer's interpreter."""
    steps: int
    num_held_out: int
    prompts: Prompts
    sources: Mapping[str, Any]
    calibration: Calibration = field(default_factory=Calibration)

    def peer(self, settings: Sequence[str], steps: int, seed: int, name: str) -> tuple[list[str], Path]:
        """Command and folder of a run of TRL."""
        recipe, folder = self.recipe, self.folder / name
        (source,) = recipe.sources
        items = [self.prompts.task(ordinal).item for ordinal in range(steps * recipe.train.prompts)]
        told = {
            "folder": str(self.start),
            "run": str(folder),
            "source": source,
            "kind": recipe.sources[source].kind,
            "args": recipe.sources[source].args,
            "items": items,
            "settings": list(settings),
            "steps": steps,
            "prompts": recipe.train.prompts,
            "group": recipe.rollout.group,
            "max_tokens": recipe.rollout.max_tokens,
            "temperature": recipe.rollout.temperature,
            "clip_low": recipe.loss.clip_low,
            "clip_high": recipe.loss.clip_high,
            **{name: getattr(recipe.optim, name) for name in ("lr", "beta1", "beta2", "eps", "clip_norm")},
            "seed": seed,
        }
        write_json(self.folder / f"{name}.json", told)
        return [self.python, "-m", "bench.peers.trl", str(self.folder / f"{name}.json")], folder

    def ours(self, settings: Sequence[str], seed: int, name: str) -> tuple[list[str], Path]:
        """Command and folder of a run of ours."""
        chosen = [*self.settings, *settings, f"train.steps={self.steps}", f"train.seed={seed}"]
        flags = [part for each in chosen for part in ("--set", each)]
        command = [sys.executable, "-m", "stretto", "rl", str(self.recipe_path), "--model", str(self.start)]
        return [*command, "--out", str(self.folder / name), "--device", "cpu", *flags], self.folder / name

    def run(self, command: Sequence[str], folder: Path, advance: Callable[[int], None]) -> Outcome:
        """A run to its end, and its policy's held-out reward."""
        before_s = self.calibration.seconds()
        ticks = watched(command, folder, advance)
        calibration_s = max(before_s, self.calibration.seconds())
        num_samples = self.recipe.train.prompts * self.recipe.rollout.group
        wall, processor = _rates(ticks, num_samples)
        rows = [row for row in read_metrics(folder) if "reward/mean" in row]
        rewards = tuple(row["reward/mean"] for row in rows)
        tokens = mean(row["samples/tokens_mean"] for row in rows)
        assert len(rewards) == self.steps, f"{folder}: {len(rewards)} steps of {self.steps}"
        return Outcome(wall, processor, rewards, self.held_out(folder / CHECKPOINT), tokens, calibration_s)

    def held_out(self, folder: Path) -> float:
        return held_out_reward(folder, self.recipe, self.prompts, self.sources, self.num_held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, metavar="trl=PYTHON", help="an interpreter that has TRL")
    parser.add_argument("--start", type=Path, help="run or checkpoint to begin with")
    parser.add_argument("--recipe", type=Path, default=RECIPES / "rl_gym.toml")
    parser.add_argument(
        "--long",
        dest="recipe",
        action="store_const",
        const=Path(__file__).with_name("rl_trl_long.toml"),
        help="answers of 128 tokens",
    )
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="of the recipe"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=512, help="problems")
    parser.add_argument("--setting", help="of TRL: do not try all, take this one")
    parser.add_argument("--keep", type=Path, help="folder for the runs; a temporary one by default")
    options = parser.parse_args()
    name, _, python = options.peer.partition("=")
    if name != "trl" or not shutil.which(python):
        raise UserError(
            f"--peer {options.peer}: no interpreter there; pip install trl in an environment of its own, with this package"
        )
    if options.steps <= WARM_UP + 1:
        raise UserError(f"--steps: {options.steps}: the first {WARM_UP} do not count; take more")
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        settings = [*SAME, *options.settings]
        recipe = read_recipe(options.recipe, RlRecipe, settings)
        sources = SourceTables(dict(recipe.sources), recipe.sandbox)()
        prompts = plan_prompts(recipe, {name: source.num_items for name, source in sources.items()})
        start = _plain(options.start or made_start(recipe, folder), folder / "start")
        bench = Bench(
            recipe, options.recipe, settings, start, folder, python, options.steps, options.held_out, prompts, sources
        )
        _compare(bench, options.setting, options.rounds, wide_console())


def _compare(bench: Bench, setting: str | None, rounds: int, console: Console) -> None:
    best = setting or _fastest(bench, console)
    found: dict[str, list[Outcome]] = {name: [] for name in (*OURS, THEIRS)}
    with progress("runs in turn", rounds * len(found) * bench.steps) as advance:
        for number in range(rounds):
            for name, outcomes in found.items():
                run = f"{name.replace(', ', '-')}-{number}"
                pair = (
                    bench.peer([best], bench.steps, number, run)
                    if name == THEIRS
                    else bench.ours(OURS[name], number, run)
                )
                outcomes.append(bench.run(*pair, advance))
    versions = json.loads((bench.folder / f"{THEIRS}-0" / "versions.json").read_text())
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    console.print(f"{THEIRS}: {told}; {best}", soft_wrap=True)
    _show_agreement(bench, console)
    _show_speed(found, console)
    _show_rewards(found, bench.held_out(bench.start), bench.num_held_out, console)


def _plain(start: Path, out: Path) -> Path:
    """A copy of a checkpoint without our own files: what transformers reads of it is then all that we read."""
    ours = shutil.ignore_patterns(STRETTO_FILE, ELASTIC_FILE, LINEAGE_FILE)
    shutil.rmtree(out, ignore_errors=True)
    return Path(shutil.copytree(checkpoint_folder(start), out, ignore=ours))


def _fastest(bench: Bench, console: Console) -> str:
    """TRL's setting with the least wall time a step."""
    num_samples = bench.recipe.train.prompts * bench.recipe.rollout.group
    axes = (
        ("grouped_mm", "eager"),
        ("growing cache", "static cache"),
        ("1 threads", "2 threads"),
        (f"{num_samples} rows",),
    )
    settings = [", ".join(each) for each in itertools.product(*axes)]
    command, folder = bench.peer(settings, TRIALS * len(settings), 0, "trial")
    with progress("TRL's settings", TRIALS * len(settings)) as advance:
        watched(command, folder, advance)
    rows = read_metrics(folder)[len(settings) :]
    walls = {
        name: median(row["time/wall_s"] for row in rows[place :: len(settings)]) for place, name in enumerate(settings)
    }
    processors = {
        name: median(row["time/processor_s"] for row in rows[place :: len(settings)])
        for place, name in enumerate(settings)
    }
    shown = table("TRL's settings, a step", "experts, cache, threads, rows of a pass", "wall s", "processor s")
    for name in settings:
        shown.add_row(name, f"{walls[name]:.2f}", f"{processors[name]:.2f}")
    console.print(shown)
    return min(walls, key=lambda name: walls[name])


def _rates(ticks: Sequence[Tick], num_samples: int) -> tuple[float, float]:
    """Samples a second of wall and of processor time, between the first step that counts and the last."""
    first, last = next(tick for tick in ticks if tick.step >= WARM_UP), ticks[-1]
    samples = num_samples * (last.step - first.step)
    return samples / (last.at_s - first.at_s), samples / (last.processor_s - first.processor_s)


def _show_agreement(bench: Bench, console: Console) -> None:
    folder = bench.folder / f"{THEIRS}-0"
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    theirs = next(row["optim/grad_norm"] for row in read_metrics(folder))
    ours = our_gradient(rows[0], bench.recipe, bench.prompts, bench.start, bench.folder / "check")
    worst = worst_advantage(rows, bench.recipe.rollout.group)
    console.print(
        f"same rewards through both: advantages differ by at most {worst:.1e} over {len(rows)} steps\n"
        f"same samples through both, first step: gradient norm {ours:.6f} ours, {theirs:.6f} TRL's",
        soft_wrap=True,
    )


def _show_speed(found: Mapping[str, Sequence[Outcome]], console: Console) -> None:
    every = [outcome for outcomes in found.values() for outcome in outcomes]
    best_s = min(outcome.calibration_s for outcome in every)
    shown = table(
        "trained samples a second; medians over rounds",
        *("", "tokens a sample", "by wall", "over TRL", "by processor", "over TRL", "aim", "quiet runs"),
    )
    theirs = found[THEIRS]
    for name, outcomes in found.items():
        pairs = list(zip(outcomes, theirs, strict=True))
        is_ours = name != THEIRS
        shown.add_row(
            name,
            f"{mean(each.tokens for each in outcomes):.0f}",
            f"{median(each.samples_per_s for each in outcomes):.1f}",
            times(median(a.samples_per_s / b.samples_per_s for a, b in pairs)) if is_ours else "",
            f"{median(each.samples_per_processor_s for each in outcomes):.1f}",
            times(median(a.samples_per_processor_s / b.samples_per_processor_s for a, b in pairs)) if is_ours else "",
            f"≥ {AIM:.0f}x" if is_ours else "",
            f"{sum(each.calibration_s <= SLOW * best_s for each in outcomes)} of {len(outcomes)}",
        )
    console.print(shown)


def _show_rewards(found: Mapping[str, Sequence[Outcome]], before: float, num_held_out: int, console: Console) -> None:
    num_steps = len(found[THEIRS][0].rewards)
    edges = np.linspace(0, num_steps, 5).astype(int).tolist()
    spans = list(itertools.pairwise(edges))
    shown = table(
        f"mean reward by steps, and held out on {num_held_out} problems (before: {before:.3f}); means over rounds",
        *("", *(f"{a + 1}–{b}" for a, b in spans), "all", "held out"),
    )
    for name, outcomes in found.items():
        curve = np.array([outcome.rewards for outcome in outcomes])
        shown.add_row(
            name,
            *(f"{curve[:, a:b].mean():.3f}" for a, b in spans),
            f"{curve.mean():.3f}",
            f"{mean(outcome.held_out for outcome in outcomes):.3f}",
        )
    console.print(shown)


if __name__ == "__main__":
    main()
