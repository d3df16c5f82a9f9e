"""The demo in a fresh folder: wall and processor time, time to the first loss, peak memory, and whether its story is true.

    python -m bench.demo [--post] [--settings native avx2] [--out FOLDER] [--no-limits]

Runs `stretto demo` (with --post, `stretto demo --post` after it) in an empty folder with an empty cache of compiled kernels, so
that compiling them counts. ``avx2`` has torch and its libraries compute as on a processor with AVX2 alone. Processor time is
the user and system time of the command and of all its processes. Peak memory is the largest process.

Exits with 1 where a limit is passed or the story is untrue:

- held-out loss: the corner's is above the half's, and the half's above the full network's;
- healing brings the loss of the best size below its loss before;
- each size writes text that resembles the training text: of the pairs of neighbouring words that it writes, at least half
  occur in the training text.

Wall time says little on a machine that other processes use; the load average is printed beside it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.common.measure import wide_console
from stretto.api.demo import MAX_CODE_CHARS, MAX_EXERCISE_CHARS
from stretto.api.report import gather
from stretto.base.numbers import duration, percent, size_in_bytes
from stretto.data.demo_text import demo_documents
from stretto.report.page import NOTHING, Cell, Table
from stretto.train.run_folder import read_samples

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SETTINGS: dict[str, dict[str, str]] = {"native": {}, "avx2": AVX2}
FIRST_LOSS_S = 60.0
WALL_S = {False: 300.0, True: 480.0}
"""By whether post-training is what is timed."""
PROCESSOR_S = {False: 480.0, True: 720.0}
"""Under the AVX2 settings."""
SEEN_SHARE = 0.5
"""Least share of written word pairs that occur in the training text."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One command."""

    name: str
    wall_s: float
    processor_s: float
    first_loss_s: float | None
    """None: the command printed none."""
    peak_bytes: int
    load: float
    """Processes that wanted a core, on average over the last minute of the run."""


def run_timed(name: str, arguments: list[str], environment: dict[str, str]) -> Timing:
    """Run ``stretto`` with ``arguments`` and print what it prints. Raises `RuntimeError`: it failed."""
    start, first_loss_s = time.perf_counter(), None
    command = [sys.executable, "-m", "stretto", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if first_loss_s is None and re.search(r"loss \d", line):
            first_loss_s = time.perf_counter() - start
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"stretto {' '.join(arguments)}: ended with {process.returncode}")
    return Timing(
        name=name,
        wall_s=time.perf_counter() - start,
        processor_s=usage.ru_utime + usage.ru_stime,
        first_loss_s=first_loss_s,
        peak_bytes=1024 * usage.ru_maxrss,
        load=os.getloadavg()[0],
    )


def seen_share(text: str, seen: set[tuple[str, str]]) -> float:
    """Share of the pairs of neighbouring words in ``text`` that are in ``seen``; 0 where there is no pair."""
    pairs = list(pairwise(_words(text)))
    return sum(pair in seen for pair in pairs) / max(1, len(pairs))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def untrue(run: Path) -> list[str]:
    """Print the losses and the resemblance of the demo in ``run``; returns the sentences of the story that do not hold."""
    console, sizes = wide_console(), {size.name: size for size in gather(run).sizes}
    seen = {
        pair
        for document in demo_documents(MAX_CODE_CHARS, MAX_EXERCISE_CHARS)
        for pair in pairwise(_words(document.text))
    }
    texts: dict[str, str] = {}
    for sample in read_samples(run):
        texts[sample.size] = f"{texts.get(sample.size, '')}\n{sample.prompt}{sample.text}"
    shares = {name: seen_share(text, seen) for name, text in texts.items()}
    rows = []
    for name, size in sizes.items():
        losses = [NOTHING if nll is None else Cell(f"{nll:.3f}", nll) for nll in (size.nll, size.healed_nll)]
        share = Cell(percent(shares[name]), shares[name]) if name in shares else NOTHING
        rows.append((Cell(name), *losses, share))
    rows += [
        (Cell(f"{name} (exported)"), NOTHING, NOTHING, Cell(percent(shares[name])))
        for name in shares
        if name not in sizes
    ]
    note = "Loss in nats per token. Seen: share of the word pairs written by the size that occur in the training text."
    console.print(Table("The story", ("Size", "Loss", "Healed", "Seen"), tuple(rows), note=note))
    full, half, corner = (sizes[name].nll or 0.0 for name in ("full", "half", "corner"))
    failures = []
    if not corner > half > full:
        failures.append(f"losses of full, half and corner are {full:.3f}, {half:.3f} and {corner:.3f}: not rising")
    healed = [size for size in sizes.values() if size.healed_nll is not None]
    if not healed:
        failures.append("no size was healed")
    for size in healed:
        if size.healed_nll is not None and size.nll is not None and not size.healed_nll < size.nll:
            failures.append(f"healing took {size.name} from {size.nll:.3f} to {size.healed_nll:.3f}: not lower")
    for name in ("full", "half", "best"):
        if shares.get(name, 0.0) < SEEN_SHARE:
            failures.append(
                f"{name} writes text whose word pairs occur in the training text in {shares.get(name, 0.0):.0%}"
            )
    return failures


def passed_limits(timing: Timing, setting: str, is_post: bool) -> list[str]:
    """The limits that ``timing`` passed, a sentence each."""
    found = []
    if setting == "native" and timing.wall_s > WALL_S[is_post]:
        found.append(f"{timing.name}: {timing.wall_s:.0f} s of wall time, at most {WALL_S[is_post]:.0f}")
    if setting == "avx2" and timing.processor_s > PROCESSOR_S[is_post]:
        found.append(f"{timing.name}: {timing.processor_s:.0f} s of processor time, at most {PROCESSOR_S[is_post]:.0f}")
    if not is_post and (timing.first_loss_s is None or timing.first_loss_s > FIRST_LOSS_S):
        found.append(f"{timing.name}: first loss after {timing.first_loss_s} s, at most {FIRST_LOSS_S:.0f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--post", action="store_true", help="time the post-training, too")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--out", type=Path, help="folder to keep the runs in; a temporary one by default")
    parser.add_argument("--no-limits", action="store_true", help="print times without comparing them with the limits")
    options = parser.parse_args()
    timings, failures = [], []
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        for setting in options.settings:
            run = out / setting
            environment = SETTINGS[setting] | {"XDG_CACHE_HOME": str(Path(temporary) / f"cache-{setting}")}
            for is_post in (False, True) if options.post else (False,):
                arguments = ["demo", "-o", str(run), *(["--post"] if is_post else ["--fresh"])]
                timing = run_timed(f"{setting}{', post' if is_post else ''}", arguments, environment)
                timings.append(timing)
                failures += [] if options.no_limits else passed_limits(timing, setting, is_post)
            failures += [f"{setting}: {each}" for each in untrue(run)]
    rows = [
        (
            Cell(each.name),
            Cell(duration(each.wall_s), each.wall_s),
            Cell(duration(each.processor_s), each.processor_s),
            NOTHING if each.first_loss_s is None else Cell(duration(each.first_loss_s), each.first_loss_s),
            Cell(size_in_bytes(each.peak_bytes), each.peak_bytes),
            Cell(f"{each.load:.1f}", each.load),
        )
        for each in timings
    ]
    columns = ("Run", "Wall", "Processor", "First loss", "Peak memory", "Load")
    wide_console().print(Table("The demo", columns, tuple(rows)))
    for failure in failures:
        print(f"FAILED  {failure}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
