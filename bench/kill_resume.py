"""``kill -9`` at random moments, then resume: the final weights against those of an uninterrupted run.

    python -m bench.kill_resume [--kills N] [--seed S] [--stage sft|rl|elasticize|demo]

A small real pre-training (anchors, depth, top-k and row widths, layers ranked anew half-way) runs in a process of its
own, which is killed by its id: in turns at a random moment of a step, and while a snapshot is being written. The text
is the interpreter's standard library. Every life imports the package anew: an edit meanwhile makes the results differ.

With ``--stage`` a command is killed at random times. The table shows the work lost, in seconds between the newest snapshot and
the kill, or between the start of training and the kill if a life wrote no snapshot.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common.killing import RECIPE as RL_RECIPE
from bench.common.measure import wide_console
from stretto.base.track import progress
from stretto.data.demo_text import demo_documents
from stretto.data.loader import Loader, eval_batches
from stretto.data.shards import TokenSet, tokenise
from stretto.evals.loss import EvalBatch
from stretto.model.parallel import join
from stretto.text.tokenizer import train_tokenizer
from stretto.train.loop import Job, pretrain
from stretto.train.recipe import Recipe

VOCAB, TEXT_CHARS = 512, 300_000
SNAPSHOT_EVERY = 6
STEPS_A_LIFE = (1, 14)
"""A process is killed after so many steps: some die before their first snapshot."""
POLL_S = 0.002
MINUTES = 0.1
"""Interval of snapshots by time in the stages whose recipe is set here."""
STAGES = {
    "sft": ("sft recipe.toml --set start.steps=100000", MINUTES, (40.0, 70.0), "sft …"),
    "rl": (
        "rl recipe.toml --set train.steps=100000 --set train.snapshot_every=100000",
        MINUTES,
        (50.0, 90.0),
        "held-out reward",
    ),
    "elasticize": (
        "elasticize start/sft --data text.txt --set train.steps=100000 --set train.snapshot_every=100000 --set train.seq_len=64",
        MINUTES,
        (40.0, 70.0),
        "elasticize …",
    ),
    "demo": ("demo", 3.0, (20.0, 400.0), "pretrain …"),
}
"""By stage: its command, the interval of its snapshots in minutes, the seconds after which a life is killed, and the output with
which training begins (or "resumes after step")."""
WRITING_S = 5.0
"""Seconds beyond the interval: for the step in progress and for writing the snapshot."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One life of the training process; written by `_live`."""

    resumed_from: int | None
    """Step of the snapshot it went on from; None for a start afresh."""
    step: int
    """Steps done when it was killed."""
    moment: str
    """``step``, or ``snapshot`` where one was left half-written."""


def recipe(steps: int) -> Recipe:
    model = {
        "vocab_size": VOCAB, "hidden_size": 48, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12,
        "num_experts": 8, "top_k": 3, "expert_intermediate_size": 32, "num_shared_experts": 1, "qk_norm": True,
        "dense_layers": (0,), "dense_intermediate_size": 96, "tie_embeddings": True,
    }  # fmt: skip
    elastic = {
        "sampler": "anchored", "anchors": {"corner": {"layers": 4, "experts": 4, "top_k": 2}}, "anchor_share": 0.2,
        "depth_share": 0.15, "top_k_share": 0.15, "width_share": 0.2, "ramp_fraction": 0.2, "rank_layers_at": (0.5,),
    }  # fmt: skip
    train = {
        "steps": steps, "rows": 8, "micro_batches": 2, "seq_len": 128, "eval_every": 50, "snapshot_every": SNAPSHOT_EVERY,
        "log_every": 1, "dtype": "float32",
    }  # fmt: skip
    return Recipe.model_validate({"model": model, "elastic": elastic, "optim": {"lr": 2e-3}, "train": train})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stage", choices=STAGES, help="kill this command instead, and measure the work lost by time")
    options = parser.parse_args()
    if options.stage:
        with tempfile.TemporaryDirectory() as temporary:
            kept = _kill_stage(Path(temporary), options.stage, options.kills, random.Random(options.seed))
        raise SystemExit(0 if kept else 1)
    if options.worker:
        _train(options.worker, options.tokens, options.steps, options.resume)
        return
    with tempfile.TemporaryDirectory() as temporary:
        same = _compare(Path(temporary), options.kills, random.Random(options.seed))
    raise SystemExit(0 if same else 1)


def _kill_stage(folder: Path, stage: str, num_kills: int, rng: random.Random) -> bool:
    """Kill the command of ``stage`` at random times. Returns whether each kill lost at most the interval of its snapshots."""
    command, minutes, life_s, marker = STAGES[stage]
    (folder / "recipe.toml").write_text(RL_RECIPE)
    (folder / "text.txt").write_text("\n\n".join(each.text for each in demo_documents(TEXT_CHARS, 0)))
    if stage == "elasticize":
        subprocess.run(_stretto("sft", "recipe.toml", "-o", "start"), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    arguments = command.split()
    if stage != "demo":
        arguments += ["--set", f"train.snapshot_minutes={minutes}", "--device", "cpu"]
    table = Table(title=f"kill -9 of stretto {stage}: snapshots every {60 * minutes:g} s")
    for heading in ("kill", "seconds lived", "resumed from step", "newest snapshot", "seconds lost"):
        table.add_column(heading, justify="right")
    run, losses, step = folder / "run", list[float](), 0
    with progress("kills", num_kills) as advance:
        for number in range(1, num_kills + 1):
            has_begun = step or (run / "groups.sqlite").exists()
            options = ["--resume"] if has_begun and stage != "demo" else []
            started_s, length_s, before, begun_s = time.time(), rng.uniform(*life_s), step, None
            with (folder / "output").open("wb") as output:
                process = subprocess.Popen(
                    _stretto(*arguments, "-o", "run", *options), cwd=folder, stdout=output, stderr=subprocess.STDOUT
                )
                while time.time() < started_s + length_s:
                    told = (folder / "output").read_text()
                    if process.poll() is not None:
                        raise SystemExit(f"the process ended by itself, {process.returncode}:\n{told}")
                    if begun_s is None and (marker in told or "resumes after step" in told):
                        begun_s = time.time()
                    time.sleep(0.1)
                process.kill()
                process.wait()
            killed_s, snapshots = time.time(), [*run.rglob("snapshots/step-*")]
            step = max([int(path.name.removeprefix("step-")) for path in snapshots], default=0)
            saved = [path.stat().st_mtime for path in (*snapshots, *run.rglob("checkpoint/config.json"))]
            losses.append(killed_s - max([begun_s or killed_s, *saved]))
            table.add_row(str(number), f"{length_s:.0f}", str(before), str(step), f"{losses[-1]:.1f}")
            advance(1, f"lost {losses[-1]:.1f} s")
    wide_console().print(table)
    return max(losses) <= 60 * minutes + WRITING_S


def _stretto(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stretto", *arguments]


def _compare(folder: Path, num_kills: int, rng: random.Random) -> bool:
    documents = list(demo_documents(TEXT_CHARS, 0))
    tokenise({"train": documents}, train_tokenizer((each.text for each in documents), VOCAB), folder / "tokens")
    steps = num_kills * STEPS_A_LIFE[1] // 2 + 4 * SNAPSHOT_EVERY
    with progress("lives", num_kills + 2) as advance:
        expected = _finish(folder, "whole", steps)
        advance(1)
        kills = []
        for number in range(num_kills):
            kills.append(_live(folder, steps, rng, in_snapshot=number % 2 == 1))
            advance(1, f"killed at step {kills[-1].step}")
        found = _finish(folder, "killed", steps)
        advance(1)
    table = Table(title=f"kill -9, then resume: {steps} steps, a snapshot every {SNAPSHOT_EVERY}")
    for heading in ("kill", "resumed from", "killed after step", "while", "steps lost"):
        table.add_column(heading, justify="right")
    for number, kill in enumerate(kills, start=1):
        start = "afresh" if kill.resumed_from is None else str(kill.resumed_from)
        after = kills[number].resumed_from if number < len(kills) else found["resumed_from"]
        table.add_row(str(number), start, str(kill.step), kill.moment, str(kill.step - (after or 0)))
    console = wide_console()
    console.print(table)
    differing = [name for name in expected["result"] if expected["result"][name] != found["result"][name]]
    verdict = "bitwise equal" if not differing else f"DIFFERENT in {', '.join(differing)}"
    console.print(f"weights, balance biases, layer order, tokens and FLOPs after {num_kills} kills: {verdict}")
    return not differing


def _start(folder: Path, name: str, steps: int) -> tuple[subprocess.Popen[bytes], int | None]:
    """A training process in ``folder/name``, and the step of the snapshot that it goes on from."""
    run = folder / name
    snapshots = sorted((run / "snapshots").glob("step-*"))
    command = [sys.executable, "-m", "bench.kill_resume", "--worker", str(run), "--tokens", str(folder / "tokens")]
    command += ["--steps", str(steps), *(["--resume"] if snapshots else [])]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return process, int(snapshots[-1].name.removeprefix("step-")) if snapshots else None


def _finish(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Let the run go to its end."""
    process, resumed_from = _start(folder, name, steps)
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"the run {name} failed:\n{errors.decode()}")
    return {"resumed_from": resumed_from, "result": json.loads((folder / name / "result.json").read_text())}


def _live(folder: Path, steps: int, rng: random.Random, in_snapshot: bool) -> Kill:
    """Start or resume the run and kill it at a random moment."""
    process, resumed_from = _start(folder, "killed", steps)
    snapshots = folder / "killed" / "snapshots"
    leftovers = set(snapshots.glob(".*"))
    # the last two snapshots are left to the life that ends well
    target = min((resumed_from or 0) + rng.randint(*STEPS_A_LIFE), steps - 2 * SNAPSHOT_EVERY)
    while _steps_done(folder) < target or (in_snapshot and not set(snapshots.glob(".step*")) - leftovers):
        if process.poll() is not None:
            errors = process.stderr.read().decode() if process.stderr else ""
            raise SystemExit(f"the process ended by itself, {process.returncode}:\n{errors}")
        time.sleep(POLL_S)
    time.sleep(rng.uniform(0.0, 0.03 if in_snapshot else 0.3))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    torn = bool(set(snapshots.glob(".step*")) - leftovers)
    return Kill(resumed_from, _steps_done(folder), "snapshot" if torn else "step")


def _steps_done(folder: Path) -> int:
    try:
        return int((folder / "killed" / "steps").read_text())
    except (FileNotFoundError, ValueError):  # not there yet, or being written
        return -1


def _train(run: Path, tokens: Path, steps: int, resume: bool) -> None:
    """The worker: train, tell the step after each, and describe the result bit for bit."""
    chosen = recipe(steps)
    data = TokenSet(tokens)
    run.mkdir(exist_ok=True)
    (run / "steps").unlink(missing_ok=True)

    class Steps:
        """A log that keeps the number of steps done."""

        def log(self, step: int, *_: object, **__: object) -> None:
            (run / "steps").write_text(str(step))

        def say(self, *_: object) -> None: ...

        def close(self) -> None: ...

    held_out = [EvalBatch.of(batch, "cpu") for batch in eval_batches(data, 4, chosen.train.seq_len, 1)]
    loader = Loader([data], [1.0], chosen.train.micro_rows, chosen.train.seq_len, chosen.train.seed)
    job = Job(run, loader, held_out, data.manifest.data_hash, join("cpu"), lambda step: Steps(), resume)
    trained = pretrain(chosen, job)
    digest = hashlib.sha256()
    for name, tensor in trained.model.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    receipt = trained.meter.receipt()
    result = {
        "weights and biases": digest.hexdigest(),
        "layer order": trained.model.config.layer_ranking,
        "tokens": trained.tokens_by_kind,
        "FLOPs": receipt.flops,
    }
    (run / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
