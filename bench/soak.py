"""Kills of actors, nodes, trainer ranks and the store server, and drained nodes, in one soak: RL on a Ray cluster of four nodes with files on an S3 server.

    python -m bench.soak [--kills 30] [--minutes M] [--steps 60] [--seed 0] [--kinds drain] [--keep DIR]

The cluster is that of `bench.common.nodes`: nodes of this machine that share no folder. Labels place trainer (two ranks, gloo), engines,
and agents and verifiers on nodes 1 to 3; the driver and Ray's head are on node 0, which is not killed. Staleness is 0. The kills, all but drains by
SIGKILL, each kind ``--kills`` times in random order:

- actor: one process of a role (trainer rank, engine, agent, verifier) that the run's status names;
- node: the raylet of node 1, 2 or 3 with all its processes. A new node with the same label and an empty disk starts at once;
- rank: one rank of the trainer;
- drain: Ray is told that node 1, 2 or 3 goes in `bench.common.nodes.DRAIN_S`, after another node with its label has started;
  the node is killed at that time, or ends when its roles have left it;
- store: the S3 server. After 2 to 6 s it starts again, with the objects that it had (`bench.common.s3` keeps them on disk).

Half of the kills or more are alone: the run has trained a step since the last one. The others are pairs of two kinds, up to 4 s apart. When a run
ends before all kills are made, another one of the same recipe follows. Each must train the samples of an unbroken run of local processes
with the same ranks, with equal tokens, none lost or twice, and end with its bits. A restart is the time from a kill to the next step.

Two controls must end with an error: a run whose store server comes back without its objects, as moto does by itself, and a run that may
restart a role once while the trainer is killed three times. Fails (exit code 1) if an aim is missed or a control run finishes.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.common.killing import POLL_S, RECIPE, STEPS, Killed
from bench.common.measure import table
from bench.common.nodes import ROLES, cluster
from bench.common.run_account import Account, checksum, num_other
from bench.common.s3 import s3_process
from bench.common.soaked import KINDS, Soak
from bench.rl_ranks import HEAD, RESTART_S
from stretto.base.track import progress, wide_console

RESTARTS = 60
"""`failures.restarts`: the soak kills roles more often than the default allows within ten minutes."""
CHANGES = {
    "chunk_tokens = 1 ": "chunk_tokens = 8 ",
    "engines = 2\n": "engines = 1\n",
    "agents = { min = 2, max = 2 }": "agents = { min = 1, max = 1 }",
    "rewards = { min = 1, max = 2 }": "rewards = { min = 1, max = 1 }",
}
"""One engine, agent and verifier, because starts of processes take most of the time of a restart on a machine of two cores."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="number of kills of each kind")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no more kills after this time")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of kills")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    options = parser.parse_args()
    rng, runs, failed = random.Random(options.seed), list[Killed](), list[Killed]()
    base = options.keep or Path(tempfile.mkdtemp(prefix="stretto-", dir="/var/tmp"))
    base.mkdir(parents=True, exist_ok=True)
    moments = plan(options.kills, options.kinds, rng)
    try:
        text = local_recipe(options.steps)
        (base / "recipe.toml").write_text(text)
        whole = Killed(base / "recipe.toml", Account(base / "whole", base / "whole-groups"), rng)
        whole.finish([])
        start = base / "whole" / "sft"
        with s3_process(base / "s3.db") as server, cluster(base) as machines:
            text, began_s = cluster_recipe(text, machines.address, server.url), time.monotonic()
            with progress("kills", len(options.kinds) * options.kills) as advance:
                soak = Soak(machines, server, base, rng, advance, began_s + 60 * options.minutes)
                while moments and time.monotonic() < soak.stop_s:
                    runs.append(soak.run(f"killed-{len(runs)}", start, text))
                    try:
                        soak.strike(runs[-1], moments)
                    except SystemExit as error:
                        print(error)
                        failed.append(runs.pop())
                        break
            soak.stop_s = math.inf
            good = report(whole, runs, options.kinds, options.kills, time.monotonic() - began_s) and not failed
            storm = text.replace(f"restarts = {RESTARTS}", "restarts = 1")
            runs = [soak.run(f"control-{number}", start, each) for number, each in enumerate((storm, text))]
            good &= control("one restart allowed", lambda: soak.strike(runs[0], [("rank",)] * 3))
            good &= control("a store server without its objects", lambda: forget(soak, runs[1]))
    finally:
        if not options.keep:
            shutil.rmtree(base)
    sys.exit(not good)


def plan(num_kills: int, kinds: Sequence[str], rng: random.Random) -> list[tuple[str, ...]]:
    """Kinds to kill at each moment: half of the kills alone, the others as pairs of two kinds; of an odd number of kinds, one is left."""
    moments: list[tuple[str, ...]] = [(kind,) for kind in kinds for _ in range(num_kills - num_kills // 2)]
    for _ in range(num_kills // 2):
        order = rng.sample(kinds, len(kinds))
        moments += [tuple(order[first : first + 2]) for first in range(0, len(order), 2)]
    rng.shuffle(moments)
    return moments


def local_recipe(steps: int) -> str:
    """The unbroken run: every role in a process of its own, two trainer ranks."""
    text = RECIPE
    for old, new in {**CHANGES, f"\nsteps = {STEPS}\n": f"\nsteps = {steps}\n"}.items():
        assert old in text, old
        text = text.replace(old, new)
    return f"{HEAD}{text}\n[trainer]\nranks = 2\nep = 2\n"


def cluster_recipe(text: str, address: str, store: str) -> str:
    """The same run on the cluster."""
    text = text.replace('isolate = "all"', f'kind = "ray"\naddress = "{address}"')
    places = "".join(f'[resources.{role}]\nlabels = {{ node = "{node}" }}\n' for role, node in ROLES.items())
    return f'store = "{store}"\n{text}\n[failures]\nrestarts = {RESTARTS}\n{places}'


def report(whole: Killed, runs: list[Killed], kinds: Sequence[str], num_kills: int, wall_s: float) -> bool:
    """Print both tables; returns whether all aims are met."""
    kills, good = [kill for run in runs for kill in run.kills], True
    title = f"{len(kills)} kills in {len(runs)} runs and {wall_s / 60:.0f} minutes"
    shown = table(title, "kind", "kills", "aim", "median restart, s", "95 %", "longest", "aim", "victims")
    for kind in kinds:
        some = [kill for kill in kills if kill.kind == kind]
        times = [kill.recovered_s for kill in some if kill.recovered_s is not None] or [float("inf")]
        names = ", ".join(f"{num} {name}" for name, num in sorted(Counter(kill.name for kill in some).items()))
        late = sorted(times)[math.ceil(0.95 * len(times)) - 1]
        figures = f"{statistics.median(times):.1f}", f"{late:.1f}", f"{max(times):.1f}", f"< {RESTART_S:g}"
        shown.add_row(kind, f"{len(some)}", f"{num_kills}", *figures, names)
        good &= len(some) == num_kills and max(times) < RESTART_S
    wide_console().print(shown)
    slowest = sorted(kills, key=lambda kill: -(kill.recovered_s or 0.0))[:5]
    print(
        "slowest restarts: "
        + ", ".join(f"{kill.recovered_s or 0.0:.0f} s ({kill.kind}: {kill.name})" for kill in slowest)
    )
    expected, times_expected = whole.account.samples()
    bits, made = checksum(whole.account.run), table("against the unbroken run", "", "measured", "aim")
    accounts = [run.account.samples() for run in runs]
    num_trained = sum(len(found) for found, _ in accounts)
    lost = sum(sum((times_expected - trained).values()) for _, trained in accounts)
    twice = sum(sum((trained - times_expected).values()) for _, trained in accounts)
    num_others = sum(num_other(expected, found) for found, _ in accounts)
    num_equal = sum(checksum(run.account.run) == bits for run in runs)
    made.add_row("samples trained", f"{num_trained:,}", f"{len(runs) * len(expected):,}")
    made.add_row("samples lost, trained twice", f"{lost}, {twice}", "0, 0")
    made.add_row("samples with other tokens", f"{num_others}", "0")
    made.add_row("runs whose final weights are bitwise equal", f"{num_equal}", f"{len(runs)}")
    made.add_row("steps repeated", f"{sum(run.account.num_rolled_back() for run in runs)}", "")
    wide_console().print(made)
    return good and lost == twice == num_others == 0 and num_equal == len(runs)


def forget(soak: Soak, run: Killed) -> None:
    """Control: the store server comes back without its objects."""
    run.start()
    while len(run.account.trained()) < 2:
        assert run.is_running(), "the control run ended before the store server was killed"
        time.sleep(POLL_S)
    soak.server.kill()
    for path in soak.server.disk.parent.glob(f"{soak.server.disk.name}*"):
        path.unlink()
    soak.server.start()
    run.end()


def control(name: str, work: Callable[[], None]) -> bool:
    """Whether the run in ``work`` ends with an error, as it must."""
    try:
        work()
    except SystemExit as error:
        print(f"control, {name}: {str(error).strip().splitlines()[-1]}")
        return True
    print(f"control, {name}: the run ended WITHOUT AN ERROR")
    return False


if __name__ == "__main__":
    main()
