"""Figure 1: staleness of trained groups over random schedules of the real controller.

    python -m bench.staleness [--schedules 10000] [--staleness 0 1 2 4 8]

Every schedule draws the prompts of a step, the window, the delays of groups, steps and weight activation, stragglers,
failed, hanging and late attempts, dropped groups, and kills of the whole run with a resume from the last snapshot. Asserted
besides the bound: every step is reached, every group handed out ends once, a step that a kill undid is made again from the
same samples, and no group that was ready is generated twice. Exits with 1 if the bound is broken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.common.flow import Run, random_schedule
from stretto.base.track import progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=10_000, help="in all, spread over the bounds")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    table = Table("η", "schedules", "groups trained", "kills", "retries", "dropped", "max staleness", "mean", "stale")
    num, broken = options.schedules // len(options.staleness), False
    with progress("schedules", num * len(options.staleness)) as advance:
        for staleness in options.staleness:
            seen: Counter[int] = Counter()
            sums: Counter[str] = Counter()
            for seed in range(options.seed, options.seed + num):
                schedule = random_schedule(seed, staleness)
                # Journals are synced to the disk at every ending; on a file system in memory that costs nothing.
                with tempfile.TemporaryDirectory(dir=_memory()) as folder:
                    result = Run(schedule, Path(folder) / "journal.jsonl").play()
                assert set(result.trained.values()) == {1} == set(result.num_generated.values()), schedule
                seen.update(result.staleness)
                sums.update(result.counts)
                sums["kills"] += result.num_kills
                advance(1)
            largest = max(seen)
            broken |= largest > staleness
            groups = seen.total()
            mean = sum(age * count for age, count in seen.items()) / groups
            retries = sums["expired"] + sums["failed_attempts"]
            cells = (staleness, num, groups, sums["kills"], retries, sums["filtered"] + sums["failed"], largest)
            table.add_row(*(f"{cell:,.0f}" for cell in cells), f"{mean:.2f}", f"{sums['stale']:.0f}")
    Console().print(table)
    sys.exit(broken)


def _memory() -> Path | None:
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else None


if __name__ == "__main__":
    main()
