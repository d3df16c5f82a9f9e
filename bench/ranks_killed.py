"""``kill -9`` of a random rank of ``stretto pretrain --launch 4``, at random moments: the run goes on by itself, to the same bits.

    python -m bench.ranks_killed [--arms fp32 bf16 joint muon ep] [--kills 20] [--interval 6] [--seed 0]

Each arm first trains without a kill. Then it trains again and is killed ``--kills`` times; a run that ends before is followed by
another. A kill comes a random time, up to 1.5 snapshot intervals, after the first new step since the last kill.

Lost time is the time from the kill to the next step that the run had not trained before: torchrun notices the death, ends the other ranks
and starts all again, which import torch, read the newest snapshot, and repeat the steps since. Fails (exit code 1) if a loss of
training or of held-out text or a byte of the weights differs from the unbroken run's, or if a kill cost more than the interval and
`RESTART_S`.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.common.measure import bench_parser, finish, table
from stretto.base.track import METRICS_FILE, progress, read_metrics, say, wide_console
from stretto.data.demo_text import demo_documents
from stretto.model.checkpoint import weights_hash

RANKS, STEPS = 4, 60
RESTART_S = 30.0
"""Aim for the time that a restart may take beside the steps since the last snapshot."""
POLL_S = 0.05
ARMS = {
    "fp32": "--set train.dtype=float32",
    "bf16": "--set train.dtype=bfloat16",
    "joint": "--set train.dtype=float32 --set elastic.joint=true",
    "muon": "--set train.dtype=float32 --set optim.name=muon",
    "ep": "--set train.dtype=float32 --set train.ep=2",
}
RECIPE = f"""
[model]
vocab_size = 320
hidden_size = 64
num_layers = 6
num_heads = 4
num_kv_heads = 2
head_dim = 16
num_experts = 8
top_k = 2
expert_intermediate_size = 32
num_shared_experts = 1
widths = [8, 4]

[elastic]
anchor_share = 0.2
depth_share = 0.2
top_k_share = 0.2
width_share = 0.25

[elastic.anchors.corner]
layers = 5
experts = 4
top_k = 1

[optim]
lr = 2e-3
warmup_steps = 2

[train]
steps = {STEPS}
rows = 16
seq_len = 64
micro_batches = 2
log_every = 1
eval_every = 20
eval_rows = 16
snapshot_every = 1000000
"""


@dataclass(frozen=True, slots=True)
class Kill:
    rank: int
    lost_s: float


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=tuple(ARMS))
    parser.add_argument("--kills", type=int, default=20, help="number of kills of each arm")
    parser.add_argument("--interval", type=float, default=6.0, help="seconds between snapshots")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    title = f"{RANKS} gloo ranks, kill -9 of a random rank, snapshots every {options.interval:g} s"
    aim = f"aim: at most {options.interval + RESTART_S:g} s"
    shown = table(
        title, "arm", "kills", "runs", f"most lost, s ({aim})", "median lost, s", "losses", "weights", "verdict"
    )
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "recipe.toml").write_text(RECIPE)
        (folder / "text.txt").write_text("\n\n".join(each.text for each in demo_documents(200_000, 0)))
        for arm in options.arms:
            rng, kills, runs = random.Random(f"{options.seed} {arm}"), list[Kill](), 0
            same = {"losses": True, "weights": True}
            train(folder / f"{arm}-whole", arm, options.interval, rng, 0)
            whole = result(folder / f"{arm}-whole")
            with progress(f"kills of {arm}", options.kills) as advance:
                while len(kills) < options.kills:
                    runs += 1
                    run = folder / f"{arm}-{runs}"
                    made = train(run, arm, options.interval, rng, options.kills - len(kills))
                    kills += made
                    say(f"{arm}: lost {', '.join(f'{kill.lost_s:.1f} s (rank {kill.rank})' for kill in made)}")
                    same = {name: same[name] and result(run)[name] == whole[name] for name in same}
                    advance(len(made))
            lost_s = [kill.lost_s for kill in kills]
            missed = [f"{arm}: {name} differ" for name in same if not same[name]]
            if max(lost_s) > options.interval + RESTART_S:
                missed.append(f"{arm}: a kill cost {max(lost_s):.1f} s")
            failures += missed
            words = ["equal" if same[name] else "DIFFER" for name in same]
            figures = [str(len(kills)), str(runs), f"{max(lost_s):.1f}", f"{statistics.median(lost_s):.1f}"]
            shown.add_row(arm, *figures, *words, "MISSED" if missed else "pass")
    wide_console().print(shown)
    finish(failures)


def train(run: Path, arm: str, interval_s: float, rng: random.Random, num_kills: int) -> list[Kill]:
    """Train ``arm`` in ``run`` to its end, with at most ``num_kills`` kills on the way. One more restart is left for a hang of gloo."""
    told = f"pretrain recipe.toml --data text.txt -o {run} --device cpu {ARMS[arm]} --launch {RANKS} --max-restarts {num_kills + 1}"
    command = [sys.executable, "-m", "stretto", *told.split(), "--set", f"train.snapshot_minutes={interval_s / 60}"]
    kills, step = list[Kill](), 0
    killed: tuple[int, float] | None = None
    kill_at_s: float | None = None
    with (run.parent / f"{run.name}.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=run.parent, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(POLL_S)
            now_s, found = time.monotonic(), last_step(run)
            if found > step:
                if killed is not None:
                    kills.append(Kill(killed[0], now_s - killed[1]))
                step, killed = found, None
                if kill_at_s is None and len(kills) < num_kills:
                    kill_at_s = now_s + rng.uniform(0.0, 1.5 * interval_s)
            if kill_at_s is not None and now_s >= kill_at_s:
                rank, kill_at_s = rng.randrange(RANKS), None
                ranks = children(children(process.pid)[0])
                os.kill(ranks[rank], signal.SIGKILL)
                killed = rank, time.monotonic()
    if process.returncode:
        say((run.parent / f"{run.name}.txt").read_text())
        raise SystemExit(f"{arm}: exit code {process.returncode}")
    return kills


def last_step(run: Path) -> int:
    """Last step in the log of ``run``; a restarted run drops the steps after its snapshot and logs them again."""
    path = run / METRICS_FILE
    rows = read_metrics(run) if path.is_file() else []
    return int(rows[-1]["step"]) if rows else 0


def children(pid: int) -> list[int]:
    """Child processes of ``pid``, in the order of their start: of torchrun, its ranks."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def result(run: Path) -> dict[str, object]:
    """All logged losses of a run, and a hash of its weights."""
    losses = [
        {name: value for name, value in row.items() if name == "step" or name.startswith(("loss/", "train/"))}
        for row in read_metrics(run)
    ]
    return {"losses": losses, "weights": weights_hash(run / "checkpoint")}


if __name__ == "__main__":
    main()
