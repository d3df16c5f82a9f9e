"""Run the demo in an empty folder; measure wall time, processor time, time to the first loss and peak memory; check its results.

    python -m bench.demo [--post] [--settings native avx2] [--out FOLDER] [--no-limits]

Runs `stretto demo` (with --post, then `stretto demo --post`) with an empty cache of compiled kernels, so that the times include the
compilation. ``avx2`` makes torch and its libraries compute as on a processor without AVX-512. Processor time is the user and system
time of the command and all its processes; peak memory is that of the largest process. Wall time depends on other jobs of the machine,
so the load average is printed beside it.

Exits with 1 if a time limit is exceeded or one of these is false:

- held-out loss rises from the full network to half and from half to corner;
- healing reduces the loss of the best size;
- of the pairs of neighbouring words that a size writes, at least half occur in the training text.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.common.measure import bench_parser, finish, table
from stretto.api.demo import MAX_CODE_CHARS, MAX_EXERCISE_CHARS
from stretto.api.report import gather
from stretto.base.numbers import duration, percent, size_in_bytes
from stretto.base.track import wide_console
from stretto.data.demo_text import demo_documents
from stretto.train.run_folder import read_samples

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SETTINGS: dict[str, dict[str, str]] = {"native": {}, "avx2": AVX2}
FIRST_LOSS_S = 60.0
WALL_S = {False: 300.0, True: 480.0}
"""Limits without and with post-training."""
PROCESSOR_S = {False: 480.0, True: 720.0}
"""Limits under the AVX2 settings, without and with post-training."""
SEEN_SHARE = 0.5
"""Lower limit of the share of written word pairs that occur in the training text."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Cost of one command."""

    name: str
    wall_s: float
    processor_s: float
    first_loss_s: float | None
    """None: the command printed no loss."""
    peak_bytes: int
    load: float
    """Load average over the last minute of the run."""


def run_timed(name: str, arguments: list[str], environment: dict[str, str]) -> Timing:
    """Run ``stretto`` with ``arguments`` and print its output. Raises `RuntimeError`: the command failed."""
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
    """Share of the pairs of neighbouring words in ``text`` that are in ``seen``; 0 for a text without pairs."""
    pairs = list(pairwise(_words(text)))
    return sum(pair in seen for pair in pairs) / max(1, len(pairs))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def false_results(run: Path) -> list[str]:
    """Print losses and shares of word pairs of the demo in ``run``; returns a sentence for each expected result that is false."""
    sizes = {size.name: size for size in gather(run).sizes}
    documents = demo_documents(MAX_CODE_CHARS, MAX_EXERCISE_CHARS)
    seen = {pair for document in documents for pair in pairwise(_words(document.text))}
    texts: dict[str, str] = {}
    for sample in read_samples(run):
        texts[sample.size] = f"{texts.get(sample.size, '')}\n{sample.prompt}{sample.text}"
    shares = {name: seen_share(text, seen) for name, text in texts.items()}
    shown = table(
        "loss in nats per token; share of word pairs that occur in the training text", "size", "loss", "healed", "pairs"
    )
    for name in dict.fromkeys((*sizes, *shares)):
        losses = (sizes[name].nll, sizes[name].healed_nll) if name in sizes else (None, None)
        cells = ("–" if nll is None else f"{nll:.3f}" for nll in losses)
        shown.add_row(name, *cells, percent(shares[name]) if name in shares else "–")
    wide_console().print(shown)
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
            failures.append(f"{name}: {shares.get(name, 0.0):.0%} of the written word pairs occur in the training text")
    return failures


def exceeded_limits(timing: Timing, setting: str, is_post: bool) -> list[str]:
    """A sentence for each time limit that ``timing`` exceeds."""
    failures = []
    if setting == "native" and timing.wall_s > WALL_S[is_post]:
        failures.append(f"{timing.name}: {timing.wall_s:.0f} s of wall time, at most {WALL_S[is_post]:.0f}")
    if setting == "avx2" and timing.processor_s > PROCESSOR_S[is_post]:
        failures.append(
            f"{timing.name}: {timing.processor_s:.0f} s of processor time, at most {PROCESSOR_S[is_post]:.0f}"
        )
    if not is_post and (timing.first_loss_s is None or timing.first_loss_s > FIRST_LOSS_S):
        failures.append(f"{timing.name}: first loss after {timing.first_loss_s} s, at most {FIRST_LOSS_S:.0f}")
    return failures


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--post", action="store_true", help="also run the post-training")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--out", type=Path, help="folder for the runs; default: a temporary one")
    parser.add_argument("--no-limits", action="store_true", help="do not compare times with the limits")
    options = parser.parse_args()
    shown = table("the demo", "run", "wall", "processor", "first loss", "peak memory", "load")
    failures = []
    with tempfile.TemporaryDirectory() as temporary:
        for setting in options.settings:
            run = (options.out or Path(temporary)) / setting
            environment = SETTINGS[setting] | {"XDG_CACHE_HOME": str(Path(temporary) / f"cache-{setting}")}
            for is_post in (False, True) if options.post else (False,):
                arguments = ["demo", "-o", str(run), *(["--post"] if is_post else ["--fresh"])]
                timing = run_timed(f"{setting}{', post' if is_post else ''}", arguments, environment)
                failures += [] if options.no_limits else exceeded_limits(timing, setting, is_post)
                first = "–" if timing.first_loss_s is None else duration(timing.first_loss_s)
                times = duration(timing.wall_s), duration(timing.processor_s), first
                shown.add_row(timing.name, *times, size_in_bytes(timing.peak_bytes), f"{timing.load:.1f}")
            failures += [f"{setting}: {each}" for each in false_results(run)]
    wide_console().print(shown)
    finish(failures)


if __name__ == "__main__":
    main()
