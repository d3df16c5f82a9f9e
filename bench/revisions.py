"""This checkout against another revision of it: its size, and the speed of what a change must not slow down.

    python -m bench.revisions REVISION [--rounds N] [--only help,train,decode,rl]

The other revision is checked out into a temporary folder. Every measurement runs a command that both have, in a process
of its own that sees one of the trees alone; the two take turns, and the ratio of each round is taken before the median.
Ratios are this checkout's speed over the other's: below 1 it is slower. The same revision on both sides shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from bench.common.measure import random_prompts, table, times, wide_console
from bench.common.workers import Worker
from bench.peers.protocol import Options
from stretto.base.errors import UserError
from stretto.base.track import progress

THIS, OTHER = "this checkout", "the other"
ROOT = Path(__file__).resolve().parents[1]
TRAIN = {"steps": 24, "rows": 8, "seq_len": 128, "log_every": 4, "eval_every": 999, "eval_rows": 16, "dtype": "float32"}
RL = {
    "loss.drop_uniform": "false",
    "train.steps": 12,
    "train.eval_every": 99,
    "train.snapshot_every": 99,
    "train.eval_prompts": 8,
}
NUM_TOKENS = 64
"""Decoded for each prompt."""
Measure = Callable[[Path], float]
"""From a tree to a speed: the larger the better."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="help,train,decode,rl")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trees = {THIS: ROOT, OTHER: check_out(arguments.revision, scratch / "other")}
        print_sizes(trees)
        bench = Bench(scratch, stack)
        measures = {
            "start of --help": ("help", bench.help),
            "training, tokens/s": ("train", bench.train),
            "decoding 1 sequence, tokens/s": ("decode", lambda tree: bench.decode(tree, 1)),
            "decoding 16, tokens/s": ("decode", lambda tree: bench.decode(tree, 16)),
            "reinforcement learning, samples/s": ("rl", bench.rl),
        }
        compare({name: measure for name, (key, measure) in measures.items() if key in wanted}, trees, arguments.rounds)


def check_out(revision: str, folder: Path) -> Path:
    """The files of ``revision`` in ``folder``."""
    folder.mkdir()
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", revision], capture_output=True, check=False)
    if packed.returncode:
        raise UserError(f"{revision}: not a revision of {ROOT}; name a commit, a branch or a tag")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder


def print_sizes(trees: Mapping[str, Path]) -> None:
    shown = table("Size of stretto/", "", "lines of Python", "files", "folders over 15 files")
    for name, tree in trees.items():
        files = sorted((tree / "stretto").rglob("*.py"))
        folders = [file.parent for file in files if file.name != "__init__.py"]
        crowded = sorted({folder.name for folder in folders if folders.count(folder) > 15})
        num_lines = sum(len(file.read_bytes().splitlines()) for file in files)
        shown.add_row(name, f"{num_lines:,}", f"{len(files)}", ", ".join(crowded) or "none")
    wide_console().print(shown)


def compare(measures: Mapping[str, Measure], trees: Mapping[str, Path], rounds: int) -> None:
    shown = table("Speed, medians", "", THIS, OTHER, "ratio", "of single rounds")
    with progress("measure", len(measures) * rounds * len(trees)) as advance:
        for name, measure in measures.items():
            speeds: dict[str, list[float]] = {tree: [] for tree in trees}
            for index in range(rounds):
                for tree in (THIS, OTHER) if index % 2 == 0 else (OTHER, THIS):
                    speeds[tree].append(measure(trees[tree]))
                    advance(1)
            ratios = [this / other for this, other in zip(speeds[THIS], speeds[OTHER], strict=True)]
            shown.add_row(
                name,
                *(f"{statistics.median(speeds[tree]):,.4g}" for tree in (THIS, OTHER)),
                times(statistics.median(ratios)),
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            )
    wide_console().print(shown)


class Bench:
    """The measurements, and what they need once."""

    def __init__(self, scratch: Path, stack: ExitStack):
        self._scratch, self._stack = scratch, stack
        self._workers: dict[Path, Worker] = {}
        self._runs = 0

    def help(self, tree: Path) -> float:
        """Starts a second."""
        started_s = time.perf_counter()
        self._stretto(tree, "--help")
        return 1.0 / (time.perf_counter() - started_s)

    def train(self, tree: Path) -> float:
        folder = self._train(tree)
        return speed(folder, "speed/tokens_per_s")

    def decode(self, tree: Path, batch: int) -> float:
        worker = self._workers.get(tree) or self._worker(tree)
        prompts = random_prompts(batch, 16, 300, 0)
        long, short = (worker.generate(prompts, num, worker.settings[0]) for num in (NUM_TOKENS, 1))
        return batch * (NUM_TOKENS - 1) / (long.wall_s - short.wall_s)

    def rl(self, tree: Path) -> float:
        start = self._scratch / "start"
        recipe = ROOT / "stretto/recipes/rl_gym.toml"
        if not start.exists():  # a run of a few steps, whose start is every measured run's
            self._stretto(
                ROOT, "rl", recipe, "-o", start, *settings({**RL, "start.steps": 60, "train.steps": 1}), seconds=900
            )
        folder = self._folder()
        model = start / "start" if (start / "start").is_dir() else start
        self._stretto(tree, "rl", recipe, "--model", model, "-o", folder, *settings(RL), seconds=900)
        return speed(folder, "speed/samples_per_s")

    def _worker(self, tree: Path) -> Worker:
        checkpoint = self._scratch / "trained"
        if not checkpoint.exists():
            self._train(ROOT).rename(checkpoint)
        options = Options(
            folder=str(checkpoint / "checkpoint"),
            gguf="",
            dtype="float32",
            max_batch=16,
            max_len=16 + NUM_TOKENS,
            threads=(torch.get_num_threads(),),
            answers=0,
        )
        worker = Worker("stretto", sys.executable, options, only(tree))
        self._workers[tree] = self._stack.enter_context(worker)
        return worker

    def _train(self, tree: Path) -> Path:
        """A short pre-training of the shipped recipe's network on the interpreter's own library."""
        folder, text = self._folder(), Path(sysconfig.get_path("stdlib")) / "encodings"
        changes = {f"train.{name}": value for name, value in TRAIN.items()} | {"elastic.rank_layers_at": "[]"}
        self._stretto(
            tree,
            "pretrain",
            ROOT / "stretto/recipes/small.toml",
            "--data",
            text,
            "-o",
            folder,
            *settings(changes),
            seconds=600,
        )
        return folder

    def _folder(self) -> Path:
        self._runs += 1
        return self._scratch / f"run-{self._runs}"

    def _stretto(self, tree: Path, *arguments: object, seconds: float = 60) -> None:
        code = "from stretto.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={**os.environ, **only(tree)},
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def only(tree: Path) -> dict[str, str]:
    """An environment in which the modules of ``tree`` are found, and no other's."""
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


def settings(values: Mapping[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def speed(folder: Path, name: str) -> float:
    """Median of a scalar that a run has logged; its first line, which warms up, does not count."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return statistics.median([row[name] for row in rows if row.get(name) is not None][1:])


if __name__ == "__main__":
    main()
