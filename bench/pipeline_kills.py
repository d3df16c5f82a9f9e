"""`stretto run`, killed with SIGKILL at random points and called again: the same result to the bit, and no stage done twice.

    python -m bench.pipeline_kills [--kills 10] [--seed 0]               some minutes on two cores
    python -m bench.pipeline_kills --kills 2 --break staleness           what is sampled hangs on who was fast: must fail
    python -m bench.pipeline_kills --kills 2 --break from                each call begins with `--from sft`: must fail

A pipeline of five steps, each a command that starts trainer and engine in processes of their own: supervised training, two
experts, their student, online reinforcement learning, all at a staleness of 0. It is run once without interruption. Then again: of each step in turn a
life is ended (every process of the run dies at once), half of them when a random number of optimiser steps is logged, half
a random time after the step's command began, which on small networks is starting up and reporting; and `stretto run` is
called again, as one would by hand. Exit code 1: a checkpoint differs in a bit from the uninterrupted run's, a step that had
its result began again, or there were fewer kills than asked for. With --out the uninterrupted run is kept, for another seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common.measure import table, wide_console
from stretto.api.pipeline import STATE_FILE, State
from stretto.base.config import validate
from stretto.base.paths import read_json, remove
from stretto.base.track import METRICS_FILE, progress, read_metrics
from stretto.model.checkpoint import weights_hash
from stretto.post.pipeline import PipelineRecipe, Step, plan
from stretto.train.snapshot import Snapshots

MODEL: dict[str, Any] = {
    "vocab_size": 280, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
    "num_experts": 4, "top_k": 2, "expert_intermediate_size": 16,
}  # fmt: skip
STEPS, SNAPSHOT_EVERY = 15, 3
BREAKS = ("staleness", "from")
POLL_S = 0.02
LIFE_S = (0.5, 12.0)
"""Seconds after a step's command began."""
PATIENCE_S = 600.0
"""Without a step's beginning or the run's end for so long, it hangs."""


def recipe(staleness: int) -> dict[str, Any]:
    """The pipeline, as a file holds it."""
    sources = {
        name: {name: {"kind": "strings", "args": {"operation": name, "length": 3, "graded": True}}}
        for name in ("complement", "reverse")
    }
    start = {"steps": 200, "rows": 4, "noise": 0.3, "model": MODEL, "optim": {"lr": 5e-3}}
    train = {
        "steps": STEPS, "prompts": 4, "seq_len": 64, "micro_rows": 4, "snapshot_every": SNAPSHOT_EVERY, "eval_every": 100,
        "eval_prompts": 4,
    }  # fmt: skip
    return {
        "domains": {name: {"sources": each} for name, each in sources.items()},
        "common": {
            "staleness": staleness,
            "rollout": {"group": 4, "max_tokens": 10},
            "loss": {"drop_uniform": False},
            "optim": {"lr": 1e-3},
            "train": train,
            "runtime": {"rewards": {"max": 1}},
        },
        "sft": {"recipe": {"start": start}},
        "experts": {},
        "distill": {"distill": {"form": "full", "kl_floor": 0.0}},
        "online": {"rewards": {"reverse": {"length_budget": 2.0}}},
        "evaluate": None,
    }


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill. Written by `Lives`."""

    step: str
    after_s: float
    """It had begun, in this life."""
    logged: int
    """Optimiser steps in the step's log."""
    snapshot: int | None
    """Steps that its newest snapshot holds."""
    done: tuple[str, ...]
    """Steps that had their result."""


@dataclass(slots=True)
class Lives:
    """A pipeline in its folder, one process group after the other."""

    path: Path
    folder: Path
    steps: tuple[Step, ...]
    kills: list[Kill] = field(default_factory=list)
    made: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By step that had its result at some kill: when the files of it were written."""
    repeated: set[str] = field(default_factory=set)
    """Steps that had their result and were begun, or written, again."""

    def live(self, flags: tuple[str, ...] = ()) -> None:
        """Run to the end."""
        process = self._start(flags)
        process.wait()
        self._check_end(process)
        self._look()

    def die(self, target: int, rng: random.Random, by_steps: bool, flags: tuple[str, ...] = ()) -> bool:
        """Run until a random moment in the step ``target`` or, where that is done, in the next; then kill every process. False: the
        run was over before. ``by_steps``: when so many optimiser steps are logged, where the step logs any."""
        process, since_s = self._start(flags), time.time()
        names = [step.name for step in self.steps[target:]]
        while not (begun := {name: at_s for name, at_s in self._begun(since_s).items() if name in names}):
            if process.poll() is not None:
                self._check_end(process)
                return False
            if time.time() - since_s > PATIENCE_S:
                raise SystemExit(f"{self.folder}: hangs; see {self._log()}")
            time.sleep(POLL_S)
        name, at_s = next(iter(begun.items()))
        goal, wait_s = rng.randint(min(self._logged(name) + 1, STEPS), STEPS), rng.uniform(*LIFE_S)
        by_steps &= name != "sft"
        while (self._logged(name) < goal if by_steps else time.time() - at_s < wait_s) and process.poll() is None:
            time.sleep(POLL_S)
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else self._check_end(process)
        was_alive = process.wait() == -signal.SIGKILL
        if was_alive:
            name, at_s = max(self._begun(since_s).items(), key=lambda each: each[1])
            latest = Snapshots(self.folder / name / "snapshots", 1).latest()
            done = tuple(step.name for step in self.steps if self._result(step).exists())
            number = None if latest is None else int(latest.name.removeprefix("step-"))
            self.kills.append(Kill(name, time.time() - at_s, self._logged(name), number, done))
        self._look()
        return was_alive

    def _logged(self, name: str) -> int:
        """Optimiser steps in the log of a step."""
        path = self.folder / name
        return (
            int(max((row["step"] for row in read_metrics(path)), default=0)) if (path / METRICS_FILE).is_file() else 0
        )

    def hashes(self) -> dict[str, str]:
        return {step.name: weights_hash(self._result(step)) for step in self.steps}

    def _start(self, flags: tuple[str, ...]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "stretto", "run", str(self.path), "-o", str(self.folder)]
        with self._log().open("ab") as log:
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            told = [*command, "--device", "cpu", *(flags if self.folder.is_dir() else ())]
            return subprocess.Popen(told, env=environment, stdout=log, stderr=log, start_new_session=True)

    def _check_end(self, process: subprocess.Popen[bytes]) -> None:
        if process.returncode:
            raise SystemExit(f"{self.folder}: ended with {process.returncode}:\n{self._log().read_text()[-4000:]}")

    def _log(self) -> Path:
        return self.folder.with_suffix(".log")

    def _result(self, step: Step) -> Path:
        return self.folder / step.name / step.result

    def _begun(self, since_s: float) -> dict[str, float]:
        """Steps that this life has begun, and when: a step's recipe is written right before its command starts."""
        files = {step.name: self.folder / f"{step.name}.json" for step in self.steps}
        times = {name: file.stat().st_mtime for name, file in files.items() if file.is_file()}
        return {name: at_s for name, at_s in times.items() if at_s >= since_s}

    def _look(self) -> None:
        """What is done, is it as it was when that was first seen?"""
        path = self.folder / STATE_FILE
        state = validate(State, read_json(path), str(path)).steps if path.is_file() else {}
        for step in self.steps:
            result, ended = self._result(step), step.name in state and state[step.name].has_ended
            if not result.exists():
                if ended or step.name in self.made:
                    self.repeated.add(step.name)
                continue
            times = tuple(file.stat().st_mtime_ns for file in sorted(result.iterdir()))
            if self.made.setdefault(step.name, times) != times:
                self.repeated.add(step.name)
            if (self.folder / f"{step.name}.json").stat().st_mtime_ns > max(times):
                self.repeated.add(step.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments")
    parser.add_argument("--out", type=Path, help="folder in which both runs stay; default: a temporary one")
    parser.add_argument("--break", dest="break_", choices=BREAKS, help="a mutant, which must fail")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(compare(options.out or Path(temporary), options))


def compare(folder: Path, options: argparse.Namespace) -> int:
    """Run the pipeline both ways and print what came of it; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    remove(folder / "killed")
    path, rng = folder / "pipeline.recipe.json", random.Random(options.seed)
    path.write_text(json.dumps(recipe(2 if options.break_ == "staleness" else 0)))
    steps = plan(validate(PipelineRecipe, read_json(path), str(path)), str(path))
    whole, killed = Lives(path, folder / "whole", steps), Lives(path, folder / "killed", steps)
    flags = ("--from", "sft") if options.break_ == "from" else ()
    with progress("lives", options.kills + 2) as advance:
        whole.live()
        advance(1)
        for number in range(options.kills):
            if not killed.die(number * len(steps) // options.kills, rng, number % 2 == 1, flags):
                break
            advance(1, f"killed in {killed.kills[-1].step}")
        killed.live(flags)
        advance(1)
    console = wide_console()
    shown = table(
        f"SIGKILL to all of a run, seed {options.seed}",
        *("kill", "in", "s after it began", "steps logged", "last snapshot", "done"),
    )
    for number, kill in enumerate(killed.kills, start=1):
        latest = "none" if kill.snapshot is None else f"step {kill.snapshot}"
        shown.add_row(
            str(number), kill.step, f"{kill.after_s:.1f}", str(kill.logged), latest, ", ".join(kill.done) or "nothing"
        )
    console.print(shown)
    one, other = whole.hashes(), killed.hashes()
    differing = [name for name in one if one[name] != other[name]]
    console.print(f"weights of {', '.join(one)}: {f'DIFFERENT in {differing}' if differing else 'equal to the bit'}")
    console.print(f"steps that had their result and began again: {', '.join(sorted(killed.repeated)) or 'none'}")
    if len(killed.kills) < options.kills:
        console.print(f"only {len(killed.kills)} of {options.kills} kills: the run was over before")
    return int(bool(differing or killed.repeated or len(killed.kills) < options.kills))


if __name__ == "__main__":
    main()
