"""``stretto rl`` against TRL's ``GRPOTrainer``: same network, problems, group size and loss, on the same two cores.

    python -m bench.rl_trl --peer trl=/path/to/python [--long] [--start CHECKPOINT] [--steps N] [--rounds N]

Answers of the shipped recipe have a few tokens, those of ``--long`` (rl_trl_long.toml) 128. The peer's interpreter needs TRL and
this package. Both sides read one folder, an ordinary transformers checkpoint without Stretto's own files, so that tied embeddings
and shared experts are the same. Without ``--start`` the recipe's own start is trained first, which takes minutes. Both train on the
same problems in the same order, groups without variance included, with the loss divided by the tokens of the step, no KL term, and
AdamW without weight decay, in fp32. Runs alternate; each round draws other samples.

TRL's settings are first compared step by step in one process; the fastest by wall time is used. Its gradient checkpointing, bf16,
evaluation and snapshots are off. batched_mm is left out: it copies an expert's weights for every token and choice, and is tens of
times slower. Stretto runs as shipped (one thread each for engine and trainer), and once synchronously (two threads for both, in
turns). The first steps of a run, in which caches and pipelines fill, do not count. One engine measures the held-out rewards of all
policies, on the same problems with the same seeds. Exit code 1: advantages or the first step's gradient norm differ, or one of our ways
is slower than `AIM` times TRL.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from rich.console import Console

import stretto
from bench.common.measure import SLOW, Calibration, bench_parser, finish, refusing, table, times
from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, RECIPES, checkpoint_folder, write_json
from stretto.base.records import LINEAGE_FILE
from stretto.base.track import METRICS_FILE, progress, read_metrics, wide_console
from stretto.base.trajectory import Group, Outcome, Segment, Trajectory, Verdict
from stretto.engine.loading import open_engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.flow.prompts import Prompts, SourceTables, prompts_of
from stretto.learning.algorithms import advantages
from stretto.learning.dialogue import Dialogue
from stretto.learning.recipe import RlRecipe
from stretto.learning.samples import store_group
from stretto.learning.trainer import TrainerRole
from stretto.model.headers import ELASTIC_FILE, STRETTO_FILE
from stretto.runtime.store import FolderStore
from stretto.sandbox.isolate import usage
from stretto.tasks.task import Answer, TaskSource

AIM = 3.0
ADVANTAGE_LIMIT = 1e-5
"""Largest difference of advantages: a few roundings in fp32 of values that are below the root of the group's size."""
GRADIENT_LIMIT = 1e-4
"""Largest relative difference of gradient norms: sums in fp32 in another order."""
THEIRS = "TRL"
OURS: Mapping[str, Sequence[str]] = {
    "stretto, asynchronous": ("staleness=4",),
    "stretto, synchronous": ("staleness=0", "rollout.threads=2", "train.threads=2"),
}
SAME = (
    "loss.drop_uniform=false", "loss.policy=ppo", "train.eval_every=1000000", "train.eval_prompts=8", "train.snapshot_every=1000000",
)  # fmt: skip
"""Settings for equal work: TRL trains on every group, and neither side evaluates or saves during training."""
WARM_UP = 3
"""Steps of a run that do not count."""
TRIALS = 3
"""Steps with each of TRL's settings; the first does not count."""
POLL_S = 0.02
STEP_MARK = b'"reward/mean"'
"""Text that the row of a training step has in the metrics, and no other row."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one run. Written by `Bench.run`."""

    samples_per_s: float
    samples_per_processor_s: float
    rewards: tuple[float, ...]
    """Mean reward of each step's samples."""
    held_out: float
    tokens: float
    """Mean number of tokens per answer."""
    calibration_s: float
    """Time of the slower matrix product, of one before and one after the run."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A finished step. Written by `run_watched`."""

    step: int
    """Number of finished steps."""
    at_s: float
    """Time of the performance counter."""
    processor_s: float
    """Processor time of the run so far, all threads of all processes."""


def run_watched(command: Sequence[str], folder: Path, advance: Callable[[int], None]) -> list[Tick]:
    """Run ``command``, which logs to ``folder``, to its end, and note when steps end. No other child of this process may run.

    Raises:
        UserError: the command failed; the message has the last line of its output.
    """
    ticks: list[Tick] = []
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        earlier_s, num_done = usage(os.getpid()).cpu_s, 0  # processor time of earlier commands
        with subprocess.Popen(command, stdout=log, stderr=log) as process:
            while process.poll() is None:
                time.sleep(POLL_S)
                metrics = folder / METRICS_FILE
                step = metrics.read_bytes().count(STEP_MARK) if metrics.is_file() else 0
                if step > num_done:
                    advance(step - num_done)
                    ticks.append(Tick(step, time.perf_counter(), usage(os.getpid()).cpu_s - earlier_s))
                    num_done = step
        if process.returncode:
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()] or ["no output"]
            raise UserError(f"{folder.name}: failed with exit code {process.returncode}: {lines[-1]}")
    return ticks


@dataclass(slots=True)
class Bench:
    """Inputs of all runs."""

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
        options = {
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
        write_json(self.folder / f"{name}.json", options)
        return [self.python, "-m", "bench.peers.trl", str(self.folder / f"{name}.json")], folder

    def ours(self, settings: Sequence[str], seed: int, name: str) -> tuple[list[str], Path]:
        """Command and folder of a run of Stretto."""
        chosen = [*self.settings, *settings, f"train.steps={self.steps}", f"train.seed={seed}"]
        flags = [part for each in chosen for part in ("--set", each)]
        command = [sys.executable, "-m", "stretto", "rl", str(self.recipe_path), "--model", str(self.start)]
        return [*command, "--out", str(self.folder / name), "--device", "cpu", *flags], self.folder / name

    def run(self, command: Sequence[str], folder: Path, advance: Callable[[int], None]) -> Measured:
        """Run ``command`` to its end, and measure the held-out reward of its policy."""
        before_s = self.calibration.seconds()
        ticks = run_watched(command, folder, advance)
        calibration_s = max(before_s, self.calibration.seconds())
        num_samples = self.recipe.train.prompts * self.recipe.rollout.group
        wall, processor = _rates(ticks, num_samples)
        rows = [row for row in read_metrics(folder) if "reward/mean" in row]
        rewards = tuple(row["reward/mean"] for row in rows)
        tokens = mean(row["samples/tokens_mean"] for row in rows)
        assert len(rewards) == self.steps, f"{folder}: {len(rewards)} steps of {self.steps}"
        return Measured(wall, processor, rewards, self.held_out(folder / CHECKPOINT), tokens, calibration_s)

    def held_out(self, folder: Path) -> float:
        return held_out_reward(folder, self.recipe, self.prompts, self.sources, self.num_held_out)


@refusing()
def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--peer", required=True, metavar="trl=PYTHON", help="interpreter with TRL")
    parser.add_argument("--start", type=Path, help="run or checkpoint to start from")
    parser.add_argument("--recipe", type=Path, default=RECIPES / "rl_gym.toml")
    long = Path(__file__).with_name("rl_trl_long.toml")
    parser.add_argument("--long", dest="recipe", action="store_const", const=long, help="answers of 128 tokens")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="recipe key")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=512, help="number of held-out problems")
    options = parser.parse_args()
    name, _, python = options.peer.partition("=")
    if name != "trl" or not shutil.which(python):
        raise UserError(
            f"--peer {options.peer}: no such interpreter; name one that has trl and this package: trl=/path/to/python"
        )
    if options.steps <= WARM_UP + 1:
        raise UserError(f"--steps: {options.steps}: the first {WARM_UP} do not count; name at least {WARM_UP + 2}")
    settings = [*SAME, *options.settings]
    recipe = read_recipe(options.recipe, RlRecipe, settings)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sources = SourceTables(dict(recipe.sources), recipe.sandbox)()
        prompts = prompts_of(recipe, sources)
        start = _plain(options.start or made_start(recipe, folder), folder / "start")
        bench = Bench(
            recipe, options.recipe, settings, start, folder, python, options.steps, options.held_out, prompts, sources
        )
        finish(_compare(bench, options.rounds, wide_console()))


def _compare(bench: Bench, rounds: int, console: Console) -> list[str]:
    """Run both sides in turn and print the tables; returns what does not agree, and the aims that are missed."""
    best = _fastest(bench, console)
    runs: dict[str, list[Measured]] = {name: [] for name in (*OURS, THEIRS)}
    with progress("runs in turn", rounds * len(runs) * bench.steps) as advance:
        for number in range(rounds):
            for name, outcomes in runs.items():
                run = f"{name.replace(', ', '-')}-{number}"
                if name == THEIRS:
                    command, folder = bench.peer([best], bench.steps, number, run)
                else:
                    command, folder = bench.ours(OURS[name], number, run)
                outcomes.append(bench.run(command, folder, advance))
    versions = json.loads((bench.folder / f"{THEIRS}-0" / "versions.json").read_text())
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    console.print(f"{THEIRS}: {packages}; {best}", soft_wrap=True)
    too_slow = show_speed(runs, console)
    _show_rewards(runs, bench.held_out(bench.start), bench.num_held_out, console)
    return [*_show_agreement(bench, console), *too_slow]


def _plain(start: Path, out: Path) -> Path:
    """A copy of a checkpoint without Stretto's own files, so that both sides read the same."""
    ours = shutil.ignore_patterns(STRETTO_FILE, ELASTIC_FILE, LINEAGE_FILE)
    shutil.rmtree(out, ignore_errors=True)
    return Path(shutil.copytree(checkpoint_folder(start), out, ignore=ours))


def _fastest(bench: Bench, console: Console) -> str:
    """TRL's setting with the shortest wall time per step."""
    num_samples = bench.recipe.train.prompts * bench.recipe.rollout.group
    axes = [["grouped_mm", "eager"], ["growing cache", "static cache"], ["1 threads", "2 threads"]]
    settings = [", ".join([*each, f"{num_samples} rows"]) for each in itertools.product(*axes)]
    command, folder = bench.peer(settings, TRIALS * len(settings), 0, "trial")
    with progress("TRL's settings", TRIALS * len(settings)) as advance:
        run_watched(command, folder, advance)
    rows = read_metrics(folder)[len(settings) :]
    walls = {}
    shown = table("TRL's settings, per step", "experts, cache, threads, rows of a pass", "wall s", "processor s")
    for place, name in enumerate(settings):
        own = rows[place :: len(settings)]
        walls[name] = median(row["time/wall_s"] for row in own)
        shown.add_row(name, f"{walls[name]:.2f}", f"{median(row['time/processor_s'] for row in own):.2f}")
    console.print(shown)
    return min(walls, key=lambda name: walls[name])


def held_out_reward(
    folder: Path, recipe: RlRecipe, prompts: Prompts, sources: Mapping[str, TaskSource], num: int
) -> float:
    """Mean reward on ``num`` held-out problems, one sample of each at the recipe's temperature, drawn by our engine."""
    opened = open_engine(folder, EngineConfig(cache_bytes=recipe.rollout.cache_bytes))
    assert opened.engine.tokenizer is not None
    dialogue, phases = Dialogue(opened.engine.tokenizer), Phases(opened.engine.model.config.full())
    tasks = [prompts.held_out(number) for number in range(num)]
    problems = [sources[task.source].problem(task.item) for task in tasks]
    requests = [
        Request(
            str(number),
            tuple(dialogue.prompt(problem.messages).tolist()),
            Sampling(
                temperature=recipe.rollout.temperature,
                seed=number,
                max_tokens=task.max_tokens,
                stop_ids=dialogue.stop_ids,
            ),
            phases,
        )
        for number, (task, problem) in enumerate(zip(tasks, problems, strict=True))
    ]
    done = opened.engine.generate(requests)
    assert len(done) == num, f"{len(done)} answers to {num} problems"
    by_id = {int(each.request_id): dialogue.text(np.array(each.tokens)) for each in done}
    scores = [
        sources[task.source].score(problem, Answer(by_id[number])).reward
        for number, (task, problem) in enumerate(zip(tasks, problems, strict=True))
    ]
    return float(np.mean(scores))


def worst_advantage(rows: Sequence[Mapping[str, Any]], group: int) -> float:
    """Largest difference between our GRPO advantages and those in ``rows``, for the same rewards."""
    worst = 0.0
    for row in rows:
        rewards, theirs = (np.array(row[name], np.float64).reshape(-1, group) for name in ("rewards", "advantages"))
        ours = np.stack([advantages(rewards_G, "grpo") for rewards_G in rewards])
        worst = max(worst, float(np.abs(ours - theirs).max()))
    return worst


def our_gradient(row: Mapping[str, Any], recipe: RlRecipe, prompts: Prompts, start: Path, folder: Path) -> float:
    """Gradient norm of our first step on the samples of ``row``: prompts, completions and rewards, sorted by group.

    The start itself gives the log-probabilities of the rollout, as in the peer's first step. No routes are replayed.
    """
    policy = stretto.load(start, device="cpu", dtype="float32")
    role = TrainerRole(recipe.replace(replay="off"), folder, start)
    size = prompts.group
    samples = list(zip(row["prompt_ids"], row["completion_ids"], row["rewards"], strict=True))
    refs = []
    for ordinal, begin in enumerate(range(0, len(samples), size)):
        trajectories = tuple(
            Trajectory(
                ordinal=ordinal,
                sample=sample,
                attempt=0,
                segments=_segments(policy, prompt, completion, recipe.rollout.temperature),
                routes=None,
                finish_reason="stop",
                verdict=Verdict(reward, Outcome.OK, 0.0),
            )
            for sample, (prompt, completion, reward) in enumerate(samples[begin : begin + size])
        )
        refs.append(store_group(FolderStore(folder), Group(prompts.task(ordinal), trajectories)))
    return role.step(refs, 0).scalars["optim/grad_norm"]


def _segments(
    policy: stretto.Model, prompt: Sequence[int], completion: Sequence[int], temperature: float
) -> tuple[Segment, Segment]:
    """Prompt and completion; the completion as if ``policy`` had sampled it at ``temperature``."""
    logits_TV = policy.logits([*prompt, *completion])[0, len(prompt) - 1 : -1] / temperature
    chosen_T = logits_TV.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
    given, sampled = np.array(prompt, np.int32), np.array(completion, np.int32)
    return (
        Segment(given, False, np.zeros(len(given), np.float32), np.full(len(given), -1, np.int32)),
        Segment(sampled, True, chosen_T.numpy(), np.zeros(len(sampled), np.int32)),
    )


def _rates(ticks: Sequence[Tick], num_samples: int) -> tuple[float, float]:
    """Samples per second of wall time and of processor time, from the first step that counts to the last."""
    first, last = next(tick for tick in ticks if tick.step >= WARM_UP), ticks[-1]
    samples = num_samples * (last.step - first.step)
    return samples / (last.at_s - first.at_s), samples / (last.processor_s - first.processor_s)


def disagreements(worst_advantage: float, ours: float, theirs: float) -> list[str]:
    """What is not equal up to rounding. ``ours``, ``theirs``: gradient norms of the first step."""
    found = []
    if not worst_advantage <= ADVANTAGE_LIMIT:
        found.append(f"advantages differ by {worst_advantage:.1e}, at most {ADVANTAGE_LIMIT:g}")
    if not abs(ours - theirs) <= GRADIENT_LIMIT * theirs:
        found.append(f"gradient norms are {ours:.6f} and {theirs:.6f}, relative difference at most {GRADIENT_LIMIT:g}")
    return found


def _show_agreement(bench: Bench, console: Console) -> list[str]:
    folder = bench.folder / f"{THEIRS}-0"
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    theirs = next(row["optim/grad_norm"] for row in read_metrics(folder))
    ours = our_gradient(rows[0], bench.recipe, bench.prompts, bench.start, bench.folder / "check")
    worst = worst_advantage(rows, bench.recipe.rollout.group)
    console.print(
        f"advantages from the same rewards differ by at most {worst:.1e} over {len(rows)} steps\n"
        f"gradient norm of the first step on the same samples: {ours:.6f} Stretto, {theirs:.6f} TRL",
        soft_wrap=True,
    )
    return disagreements(worst, ours, theirs)


def show_speed(runs: Mapping[str, Sequence[Measured]], console: Console) -> list[str]:
    """Print samples per second; returns our ways that miss the aim."""
    every = [outcome for outcomes in runs.values() for outcome in outcomes]
    best_s = min(outcome.calibration_s for outcome in every)
    shown = table(
        "trained samples per second; medians over rounds",
        *("", "tokens per sample", "by wall", "over TRL", "by processor", "over TRL", "aim", "quiet runs"),
    )
    theirs, missed = runs[THEIRS], []
    for name, outcomes in runs.items():
        pairs, ours = list(zip(outcomes, theirs, strict=True)), name != THEIRS
        wall = median(a.samples_per_s / b.samples_per_s for a, b in pairs)
        processor = median(a.samples_per_processor_s / b.samples_per_processor_s for a, b in pairs)
        shown.add_row(
            name,
            f"{mean(each.tokens for each in outcomes):.0f}",
            f"{median(each.samples_per_s for each in outcomes):.1f}",
            times(wall) if ours else "",
            f"{median(each.samples_per_processor_s for each in outcomes):.1f}",
            times(processor) if ours else "",
            f"≥ {AIM:.0f}x" if ours else "",
            f"{sum(each.calibration_s <= SLOW * best_s for each in outcomes)} of {len(outcomes)}",
        )
        if ours and wall < AIM:
            missed.append(f"{name}: {times(wall)} the speed of {THEIRS}, aim at least {AIM:g}x")
    console.print(shown)
    return missed


def _show_rewards(runs: Mapping[str, Sequence[Measured]], before: float, num_held_out: int, console: Console) -> None:
    num_steps = len(runs[THEIRS][0].rewards)
    spans = list(itertools.pairwise(np.linspace(0, num_steps, 5).astype(int).tolist()))
    shown = table(
        f"mean reward by steps, and held out on {num_held_out} problems (before: {before:.3f}); means over rounds",
        *("", *(f"{a + 1}–{b}" for a, b in spans), "all", "held out"),
    )
    for name, outcomes in runs.items():
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
