"""Final weights of asynchronous RL runs with a staleness of 0 against the plain synchronous loop, to the bit.

    python -m bench.sync_equality [--steps 8] [--ray] [--s3] [--gloo] [--precision fp32 --batch-invariant] [--threads 1]

All runs use one tiny recipe and one start: a network after a few steps of SFT on digits, so that groups with equal rewards, which are
dropped and replaced, occur. The plain loop (`bench.common.plain_loop`) samples, trains and loads weights in turn. The other runs are
whole runs with controller, leases, snapshots and held-out evaluations: roles in threads; in threads with two engines with small
caches; in processes; and with ``--ray`` as actors of a Ray cluster that the bench starts. With
``--s3``, groups, token logs, snapshots and weights of processes pass through an S3 server, and with ``--ray`` through the memory of the
cluster, so that no role reads another's folder. With ``--gloo``, torch.distributed sends weights from the trainer to the engines of
processes. The runs in processes are repeated with a process killed by SIGKILL after every other step, the trainer's included. The last
run has a staleness of 1 and must differ. Exit code 1: another run differs from the plain loop, or the last one does not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.common.measure import bench_parser, finish, table
from bench.common.plain_loop import run_plainly
from bench.common.run_account import checksum
from bench.common.s3 import s3_server
from stretto.base.paths import CHECKPOINT
from stretto.base.track import progress, read_metrics, wide_console
from stretto.flow.launch import Job
from stretto.flow.prompts import SourceTables
from stretto.flow.run import run_rl
from stretto.learning.metrics import StepReport
from stretto.learning.recipe import RlRecipe
from stretto.post.sft import sft

KILLED = ", killed"
Advance = Callable[[int, str | None], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one run."""

    name: str
    checksum: str
    """SHA-256 of all tensors of the final checkpoint."""
    num_dropped: int | None
    """Groups with equal rewards; None: not counted."""
    rewards: tuple[float, ...]
    """Mean reward by step."""
    mismatch: tuple[float, ...]
    """Mean K3 of trainer and engine under the same weights, by step."""
    wall_s: float


def recipe(steps: int = 8, threads: int = 1, **tables: Any) -> RlRecipe:
    """The tiny recipe with ``steps`` steps; ``tables`` change its tables."""
    model = {
        "vocab_size": 300, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "num_experts": 8, "top_k": 2, "expert_intermediate_size": 32, "num_shared_experts": 1, "qk_norm": True,
        "tie_embeddings": True, "max_positions": 96,
    }  # fmt: skip
    tree: dict[str, Any] = {
        "sources": {"digits": {"kind": "strings", "args": {"operation": "complement", "length": 3, "graded": True}}},
        "start": {"model": model, "optim": {"name": "muon", "lr": 3e-3}, "steps": 60, "rows": 8, "noise": 0.3},
        "rollout": {"group": 3, "max_tokens": 12, "chunk_tokens": 5, "max_batch": 32, "cache_bytes": 1 << 22},
        "optim": {"lr": 1e-3, "decay_fraction": 0.0},
        "train": {
            "steps": steps, "prompts": 4, "seq_len": 64, "micro_rows": 2, "snapshot_every": 3, "eval_every": 2,
            "eval_prompts": 8, "threads": threads,
        },
        "staleness": 0,
        "failures": {"lease_s": 3600, "stuck_s": 3600},  # however slow the machine is
    }  # fmt: skip
    tree["rollout"]["threads"] = threads
    for name, fields in tables.items():
        tree[name] = {**tree.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return RlRecipe.model_validate(tree)


def variants(options: argparse.Namespace, s3: str) -> dict[str, RlRecipe]:
    """Recipes of the asynchronous runs, by name. ``s3``: address of a store; empty: none."""
    precision = {"rollout": options.precision, "train": options.precision, "batch_invariant": options.batch_invariant}

    def made(**tables: Any) -> RlRecipe:
        return recipe(options.steps, options.threads, precision=precision, **tables)

    threads = {"isolate": "none"}
    runs = {
        "η = 0, threads": made(runtime=threads),
        "η = 0, threads, two small engines": made(
            runtime=threads, rollout={"engines": 2, "max_batch": 8, "cache_bytes": 1 << 16}
        ),
    }
    kinds = {"processes": made(runtime={"isolate": "all"})}
    if s3:
        kinds["processes, store s3"] = made(runtime={"isolate": "all"}, store=s3)
    if options.gloo:
        kinds["processes, channel gloo"] = made(runtime={"isolate": "all"}, channel="gloo", rollout={"engines": 2})
    if options.ray:
        cluster = {"kind": "ray", "address": "local"}
        kinds |= {"Ray": made(runtime=cluster), "Ray, store ray": made(runtime=cluster, store="ray")}
        if options.gloo:
            kinds["Ray, channel gloo"] = made(runtime=cluster, store="ray", channel="gloo")
    runs |= {f"η = 0, {kind}{how}": chosen for kind, chosen in kinds.items() for how in ("", KILLED)}
    return runs | {"η = 1, threads": made(staleness=1, runtime=threads)}


def start_of(chosen: RlRecipe, folder: Path) -> Path:
    """Train the checkpoint from which all runs start."""
    sources = SourceTables(dict(chosen.sources), chosen.sandbox)()
    try:
        return sft(chosen, sources, folder)
    finally:
        for source in sources.values():
            source.close()


def plain_run(chosen: RlRecipe, folder: Path, start: Path, advance: Advance) -> Outcome:
    """Run the plain synchronous loop."""
    started_s = time.perf_counter()

    def report(done: StepReport) -> None:
        advance(1, f"plain loop: step {done.step}")

    reports = asyncio.run(run_plainly(chosen, folder, start, folder / CHECKPOINT, report))
    scalars = [report.scalars for report in reports]
    return Outcome("plain loop", checksum(folder), None, *_series(scalars), time.perf_counter() - started_s)


def whole_run(
    name: str, chosen: RlRecipe, folder: Path, start: Path, advance: Advance, kill_after: Collection[int] = ()
) -> Outcome:
    """Run ``stretto rl``'s code; a process of a random role is killed after each step in ``kill_after``."""
    started_s, killer = time.perf_counter(), Killer(kill_after)

    def stepped(num: int, status: str | None) -> None:
        advance(num, f"{name}: {status}")
        killer.stepped(num)

    run_rl(Job(chosen, folder, start), stepped, lambda text: None)
    assert not killer.left, f"{name}: no process was killed after the steps {sorted(killer.left)}"
    rows = [row for row in read_metrics(folder) if "reward/mean" in row]
    dropped = int(rows[-1]["groups/filtered"])
    return Outcome(name, checksum(folder), dropped, *_series(rows), time.perf_counter() - started_s)


def _series(rows: Sequence[Mapping[str, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Rewards and mismatch by step."""
    names = ("reward/mean", "mismatch/same_k3_mean")
    rewards, mismatch = (tuple(row[name] for row in rows if name in row) for name in names)
    return rewards, mismatch


class Killer:
    """Kills processes of random roles: engine, agent, verifier or trainer."""

    def __init__(self, steps: Collection[int]):
        self.left = set(steps)
        self._step = 0
        self._rng = random.Random(0)

    def stepped(self, num: int) -> None:
        """Count ``num`` steps; negative if the run returns to a snapshot because the trainer died."""
        self._step += num
        if self._step in self.left:
            self.left.discard(self._step)
            roles = [child for child in psutil.Process().children(recursive=True) if _is_role(child)]
            self._rng.choice(sorted(roles, key=lambda child: child.pid)).kill()


def _is_role(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return "RoleActor" in command or "stretto.runtime" in command


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine and of the trainer")
    parser.add_argument("--ray", action="store_true", help="also run on Ray, also with the store ray")
    parser.add_argument("--s3", action="store_true", help="also run with files and weights on an S3 server")
    parser.add_argument("--gloo", action="store_true", help="also run with the channel gloo")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp8"), default="fp32", help="precision of engine and trainer"
    )
    parser.add_argument(
        "--batch-invariant", action="store_true", help="batch-invariant operators in engine and trainer"
    )
    parser.add_argument("--folder", type=Path, help="folder for the runs; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, s3_server() if options.s3 else nullcontext("") as s3:
        runs = variants(options, s3)
        folder = options.folder or Path(temporary)
        first = next(iter(runs.values()))
        start = start_of(first, folder / "sft")
        with progress("runs", (1 + len(runs)) * options.steps) as advance:
            found = [plain_run(first, folder / "plain", start, advance)]
            for number, (name, chosen) in enumerate(runs.items()):
                kill_after = range(1, options.steps, 2) if name.endswith(KILLED) else ()
                found.append(whole_run(name, chosen, folder / f"run-{number}", start, advance, kill_after))
    finish(show(found))


def show(found: list[Outcome]) -> list[str]:
    """Print the table. Returns the failures: runs that differ from the first one, or a last run that does not."""
    plain, *others = found
    headings = ("run", "SHA-256", "against the plain loop", "aim", "dropped groups", "reward", "largest K3", "wall s")
    made, failures = table("Final weights", *headings), list[str]()
    for each in found:
        same, should = each.checksum == plain.checksum, each is not others[-1]
        reward = f"{each.rewards[0]:.3f} → {each.rewards[-1]:.3f}"
        verdict, aim = ("equal" if same else "differs"), ("equal" if should else "differs")
        if verdict != aim:
            failures.append(f"{each.name}: {verdict}; aim: {aim}")
        dropped = "" if each.num_dropped is None else f"{each.num_dropped}"
        largest = f"{max(each.mismatch):.1e}" if any(each.mismatch) else "0"
        made.add_row(each.name, each.checksum[:16], verdict, aim, dropped, reward, largest, f"{each.wall_s:.1f}")
    wide_console().print(made)
    return failures


if __name__ == "__main__":
    main()
