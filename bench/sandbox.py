"""Hostile programs in the sandbox: escapes, hangs, leaked processes; and how many honest ones it runs a second.

    python -m bench.sandbox [--rounds N] [--level LEVEL] [--workers N]

Every kind of `tests.sandbox.hostile` runs ``--rounds`` times, in an order drawn afresh each round, beside bait on the
host: a secret, a folder, listening sockets, a process; and out of a driver that holds ``--descriptors`` open ones. An
escape is a program's own word or damage to the bait; a run hangs when it is not over a second after the longest that it
may take; a process leaks when it is still there after its run. The control is the same sandbox with one wall taken down,
the call that closes descriptors: if nothing escapes there, this could not have seen an escape.
Honest programs run in the sandbox, in a new interpreter each without any sandbox, and in a new interpreter in bubblewrap,
in turns. Exits with 1 if anything escaped, hung or leaked, or if nothing escaped from the control.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
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

from bench.common.measure import table
from stretto.base.track import progress
from stretto.sandbox import isolate, walls
from stretto.sandbox.isolate import PATIENCE, Sandbox, descendants
from stretto.sandbox.outcome import Level, Limits, Outcome
from tests.sandbox.hostile import HOSTILE, PREAMBLE, Bait, bait, many_descriptors

LIMITS = Limits(wall_s=1.0, cpu_s=1.0, memory_bytes=256 << 20, output_bytes=1 << 16, processes=16, file_bytes=8 << 20)
LATE_S = 1.0
"""After its time a run must be over, on a machine that others use too."""
LONGEST_S = PATIENCE * max(LIMITS.wall_s, LIMITS.cpu_s) + LATE_S
OF_DESCRIPTORS = ("leftover descriptors", "forged replies")
"""Kinds that the control lets through."""
HONEST = (
    "def primes(n):\n    return [p for p in range(2, n) if all(p % d for d in range(2, int(p**0.5) + 1))]\n"
    "assert primes(30)[-1] == 29\nimport collections, re\nprint(collections.Counter(re.findall(r'[a-z]', 'a short program')))\n"
)
TURN = 40
"""Honest programs a turn; each way has as many turns as the others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="runs of each kind")
    parser.add_argument("--turns", type=int, default=10, help=f"of {TURN} honest programs each way")
    parser.add_argument("--level", choices=[level.name.lower() for level in Level], help="default: the best there is")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--python", type=Path, help="for programs; root without namespaces needs one that all can read")
    parser.add_argument("--descriptors", type=int, default=2000, help="that the driver holds open")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    level = Level[options.level.upper()] if options.level else None
    console = Console()
    with (
        many_descriptors(options.descriptors),
        Sandbox(LIMITS, level=level, workers=options.workers, python=options.python) as sandbox,
    ):
        console.print(f"{sandbox.isolation}; {options.descriptors:,} descriptors open", soft_wrap=True)
        holds = Hostilities(sandbox, options.rounds, options.seed).run(console)
        with descriptors_left_open(), Sandbox(LIMITS, level=sandbox.isolation.level, python=options.python) as control:
            num_out = num_escapes(control)
        console.print(
            f"control, which closes no descriptors: {num_out} of {len(OF_DESCRIPTORS)} kinds escaped (aim: all)"
        )
        compare(sandbox, options.turns, console)
    if not holds or num_out < len(OF_DESCRIPTORS):
        sys.exit(1)


@contextmanager
def descriptors_left_open() -> Iterator[None]:
    """Keepers that start meanwhile have everything but `walls.close_from`."""
    call = "    if _libc.syscall(_SYS_CLOSE_RANGE"
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "stretto" / "sandbox"
        shutil.copytree(isolate._CODE, code)
        text = (code / "walls.py").read_text()
        assert text.count(call) == 1, "walls.py closes descriptors in another way now"
        (code / "walls.py").write_text(text.replace(call, f"    return\n{call}"))
        with mock.patch.object(isolate, "_CODE", code):
            yield


def num_escapes(sandbox: Sandbox) -> int:
    """Of the kinds that look for descriptors, those that found one."""
    with bait() as laid:
        ends = [sandbox.run(PREAMBLE + HOSTILE[kind].source, stdin=laid.line()) for kind in OF_DESCRIPTORS]
        return sum(bool(laid.damage(finished.stdout) or finished.outcome is Outcome.INFRA) for finished in ends)


class Hostilities:
    """The hostile runs and what came of them."""

    def __init__(self, sandbox: Sandbox, num_rounds: int, seed: int):
        self.sandbox = sandbox
        self.num_rounds = num_rounds
        self.rng = random.Random(seed)
        self.lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.troubles: Counter[str] = Counter()
        """Escapes, hangs and endings that a kind should not have, by kind."""
        self.slowest_s = 0.0

    def run(self, console: Console) -> bool:
        """All rounds; whether all aims hold."""
        num_runs = self.num_rounds * len(HOSTILE)
        with bait() as laid, progress("hostile programs", num_runs) as advance:
            with ThreadPoolExecutor(self.sandbox.workers) as threads:
                for _ in range(self.num_rounds):
                    kinds = list(HOSTILE)
                    self.rng.shuffle(kinds)
                    for _ in threads.map(lambda kind: self._run_one(kind, laid), kinds):
                        advance(1)
            leaked = self._leaked()
        shown = table(f"{len(HOSTILE)} kinds, {num_runs:,} runs", "", "seen", "aim")
        for what in ("escape", "hang", "ending"):
            num = sum(num for trouble, num in self.troubles.items() if trouble.startswith(what))
            shown.add_row({"escape": "escapes", "hang": "hung", "ending": "unexpected endings"}[what], f"{num:,}", "0")
        shown.add_row("leaked processes", f"{leaked:,}", "0")
        shown.add_row("slowest run", f"{self.slowest_s:.2f} s", f"≤ {LONGEST_S:g} s")
        for outcome, num in sorted(self.outcomes.items()):
            shown.add_row(f"outcome {outcome}", f"{num:,}", "0" if outcome == Outcome.INFRA.value else "")
        console.print(shown)
        for trouble, num in self.troubles.most_common(20):
            console.print(f"{num} x {trouble}", soft_wrap=True, markup=False)
        return not self.troubles and not leaked

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
            if finished.outcome not in (*hostile.ends, Outcome.TIMEOUT):  # a slow machine may end any of them
                self.troubles[f"ending: {kind}: {finished.outcome.value}: {finished.why}"] += 1

    def _leaked(self) -> int:
        """Processes below the keepers, now that nothing runs."""
        keepers = self.sandbox.idle_pids
        return sum(len(list(descendants(pid))) for pid in keepers)


def compare(sandbox: Sandbox, num_turns: int, console: Console) -> None:
    """Honest programs a second each way."""
    python = walls.base_python()
    bare = [python, "-I", "-S", "-c", HONEST]

    def run_new(command: list[str]) -> None:
        # In a session of its own, as keepers are: the scheduler shares the processor out by session.
        _check(subprocess.run(command, capture_output=True, check=True, start_new_session=True).stdout)

    ways: dict[str, Callable[[], None]] = {
        "sandbox, warm": lambda: _check(sandbox.run(HONEST).stdout),
        "new interpreter, no sandbox": lambda: run_new(bare),
    }
    if sandbox.isolation.level == Level.BUBBLEWRAP:
        room = walls.Room.of(python)
        prefix = walls.bubblewrap_arguments("bwrap", room, str(Path(walls.__file__).parent))
        ways["new interpreter in bubblewrap"] = lambda: run_new([*prefix, *bare])
    rates: dict[str, list[float]] = {name: [] for name in ways}
    total = num_turns * len(ways) * TURN
    with progress("honest programs", total) as advance, ThreadPoolExecutor(sandbox.workers) as threads:
        for _ in range(num_turns):
            for name, way in ways.items():
                with _timed(rates[name]):
                    list(threads.map(lambda _, way=way: way(), range(TURN)))
                advance(TURN)
    base = median(rates["new interpreter, no sandbox"])
    shown = table(f"honest programs, {sandbox.workers} at a time", "", "programs/s", "ratio")
    for name, samples in rates.items():
        shown.add_row(
            name, f"{median(samples):.0f} ({min(samples):.0f}-{max(samples):.0f})", f"{median(samples) / base:.2f}x"
        )
    console.print(shown)


@contextmanager
def _timed(rates: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    rates.append(TURN / (time.perf_counter() - start))


def _check(output: bytes) -> None:
    assert output.startswith(b"Counter({'"), output


if __name__ == "__main__":
    main()
