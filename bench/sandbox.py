"""Run hostile programs in the sandbox and count escapes, hangs and leaked processes; measure how many honest programs run per second.

    python -m bench.sandbox [--rounds N] [--level LEVEL] [--workers N]

Every kind of `tests.sandbox.hostile` runs ``--rounds`` times, in a random order each round. The host has bait: a secret, a folder,
listening sockets, a process, and a driver that holds ``--descriptors`` open descriptors. An escape is a program that reports one, or
damage to the bait. A run hangs if it takes more than a second above its limit. A process leaks if it remains after its run. The control
is a sandbox without the call that closes descriptors; it shows that the bench can detect an escape.

Honest programs take turns in the sandbox and in a new interpreter without isolation. Exits with 1 if a program escapes, hangs or leaks,
or if none escapes from the control.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest import mock

from rich.console import Console

from bench.common.measure import bench_parser, finish, table
from stretto.base.track import progress
from stretto.base.trajectory import Outcome
from stretto.sandbox import isolate, walls
from stretto.sandbox.isolate import PATIENCE, Sandbox, descendants
from stretto.sandbox.outcome import Level, Limits
from tests.sandbox.hostile import HOSTILE, PREAMBLE, Bait, bait, many_descriptors

LIMITS = Limits(wall_s=1.0, cpu_s=1.0, memory_bytes=256 << 20, output_bytes=1 << 16, processes=16, file_bytes=8 << 20)
LATE_S = 1.0
"""Time above its limit that a run may take on a machine with other jobs."""
LONGEST_S = PATIENCE * max(LIMITS.wall_s, LIMITS.cpu_s) + LATE_S
OF_DESCRIPTORS = ("leftover descriptors", "forged replies")
"""Kinds that escape from the control."""
HONEST = (
    "def primes(n):\n    return [p for p in range(2, n) if all(p % d for d in range(2, int(p**0.5) + 1))]\n"
    "assert primes(30)[-1] == 29\nimport collections, re\nprint(collections.Counter(re.findall(r'[a-z]', 'a short program')))\n"
)
TURN = 40
"""Honest programs in a turn."""


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=25, help="runs of each kind")
    parser.add_argument("--turns", type=int, default=10, help=f"turns of {TURN} honest programs")
    parser.add_argument("--level", choices=[level.name.lower() for level in Level], help="default: the strongest here")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="programs at a time; default: all cores")
    parser.add_argument("--python", type=Path, help="interpreter for programs; all users must be able to read it")
    parser.add_argument("--descriptors", type=int, default=2000, help="open descriptors of the driver")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    level = Level[options.level.upper()] if options.level else None
    console = Console()
    with (
        many_descriptors(options.descriptors),
        Sandbox(LIMITS, level=level, workers=options.workers, python=options.python) as sandbox,
    ):
        console.print(f"sandbox: {sandbox.isolation}; {options.descriptors:,} descriptors open", soft_wrap=True)
        failures = Hostilities(sandbox, options.rounds, options.seed).run(console)
        with descriptors_left_open(), Sandbox(LIMITS, level=sandbox.isolation.level, python=options.python) as control:
            num_out = num_escapes(control)
        line = f"control, which closes no descriptors: {num_out} of {len(OF_DESCRIPTORS)} kinds escaped (aim: all)"
        console.print(line)
        compare(sandbox, options.turns, console)
    finish(failures + ([line] if num_out < len(OF_DESCRIPTORS) else []))


@contextmanager
def descriptors_left_open() -> Iterator[None]:
    """Inside, sandboxes start without the call that closes descriptors."""
    call = "    if _libc.syscall(_SYS_CLOSE_RANGE"
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "stretto" / "sandbox"
        shutil.copytree(isolate._CODE, code)
        text = (code / "walls.py").read_text()
        assert text.count(call) == 1, "walls.py closes descriptors by another call"
        (code / "walls.py").write_text(text.replace(call, f"    return\n{call}"))
        with mock.patch.object(isolate, "_CODE", code):
            yield


def num_escapes(sandbox: Sandbox) -> int:
    """Number of kinds that escape through an open descriptor."""
    with bait() as laid:
        ends = [sandbox.run(PREAMBLE + HOSTILE[kind].source, stdin=laid.line()) for kind in OF_DESCRIPTORS]
        return sum(bool(laid.damage(finished.stdout) or finished.outcome is Outcome.INFRA) for finished in ends)


class Hostilities:
    """The hostile runs and their outcomes."""

    def __init__(self, sandbox: Sandbox, num_rounds: int, seed: int):
        self.sandbox = sandbox
        self.num_rounds = num_rounds
        self.rng = random.Random(seed)
        self.lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.troubles: Counter[str] = Counter()
        """Number of escapes, hangs and unexpected endings of each kind."""
        self.slowest_s = 0.0

    def run(self, console: Console) -> list[str]:
        """Run all rounds and print the table; returns the failures."""
        num_runs = self.num_rounds * len(HOSTILE)
        with bait() as laid, progress("hostile programs", num_runs) as advance:
            with ThreadPoolExecutor(self.sandbox.workers) as threads:
                for _ in range(self.num_rounds):
                    kinds = list(HOSTILE)
                    self.rng.shuffle(kinds)
                    for _ in threads.map(lambda kind: self._run_one(kind, laid), kinds):
                        advance(1)
            leaked = self._leaked()
        shown = table(f"{len(HOSTILE)} kinds, {num_runs:,} runs", "", "number", "aim")
        for trouble, label in {"escape": "escapes", "hang": "hung", "ending": "unexpected endings"}.items():
            num = sum(num for name, num in self.troubles.items() if name.startswith(trouble))
            shown.add_row(label, f"{num:,}", "0")
        shown.add_row("leaked processes", f"{leaked:,}", "0")
        shown.add_row("slowest run", f"{self.slowest_s:.2f} s", f"≤ {LONGEST_S:g} s")
        for outcome, num in sorted(self.outcomes.items()):
            shown.add_row(f"outcome {outcome}", f"{num:,}", "0" if outcome == Outcome.INFRA.value else "")
        console.print(shown)
        failures = [f"{num} x {trouble}" for trouble, num in self.troubles.most_common(20)]
        return failures + ([f"{leaked} leaked processes"] if leaked else [])

    def _run_one(self, kind: str, laid: Bait) -> None:
        hostile = HOSTILE[kind]
        start = time.perf_counter()
        finished = self.sandbox.run(PREAMBLE + hostile.source, stdin=laid.line())
        seconds = time.perf_counter() - start
        with self.lock:
            self.slowest_s = max(self.slowest_s, seconds)
            self.outcomes[finished.outcome.value] += 1
            for damage in laid.damage(finished.stdout + finished.stderr):
                self.troubles[f"escape: {kind}: {damage}"] += 1
            if seconds > LONGEST_S:
                self.troubles[f"hang: {kind}"] += 1
            if finished.outcome not in (
                *hostile.ends,
                Outcome.TIMEOUT,
            ):  # on a slow machine any kind may reach its time limit
                self.troubles[f"ending: {kind}: {finished.outcome.value}: {finished.why}"] += 1

    def _leaked(self) -> int:
        """Number of processes below the keepers while no program runs."""
        return sum(len(list(descendants(pid))) for pid in self.sandbox.idle_pids)


def compare(sandbox: Sandbox, num_turns: int, console: Console) -> None:
    """Honest programs per second in the sandbox and in new interpreters."""
    command = [walls.base_python(), "-I", "-S", "-c", HONEST]

    def run_new() -> bytes:
        # in a session of its own, as keepers are: the scheduler divides processor time by session
        return subprocess.run(command, capture_output=True, check=True, start_new_session=True).stdout

    ways: dict[str, Callable[[], bytes]] = {
        "sandbox, warm": lambda: sandbox.run(HONEST).stdout,
        "new interpreter, no sandbox": run_new,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    total = num_turns * len(ways) * TURN
    with progress("honest programs", total) as advance, ThreadPoolExecutor(sandbox.workers) as threads:
        for _ in range(num_turns):
            for name, way in ways.items():
                start = time.perf_counter()
                outputs = list(threads.map(lambda _, way=way: way(), range(TURN)))
                rates[name].append(TURN / (time.perf_counter() - start))
                assert all(output.startswith(b"Counter({'") for output in outputs), outputs
                advance(TURN)
    base = median(rates["new interpreter, no sandbox"])
    shown = table(f"honest programs, {sandbox.workers} at a time", "", "programs/s", "range", "ratio")
    for name, samples in rates.items():
        middle = median(samples)
        shown.add_row(name, f"{middle:.0f}", f"{min(samples):.0f}-{max(samples):.0f}", f"{middle / base:.2f}x")
    console.print(shown)


if __name__ == "__main__":
    main()
