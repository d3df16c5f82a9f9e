"""A study of many small runs that build on each other: processes side by side, results kept on disk, stopped by the clock.

What is to be run is a function of the results so far, asked again whenever one arrives: a search ends in runs that its winner
names. Every finished run is a `RESULT` in a folder of its own and is never run again; one that the clock cuts short begins anew.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

from bench.common.studies import LOG_FILE, begin
from stretto.base.paths import read_json, write_json
from stretto.base.track import say

RESULT = "result.json"
_PAUSE_S = 0.05
"""Between two looks at what has ended."""

Results = Mapping[str, dict[str, Any]]
"""By run."""
Work = Callable[[Path], dict[str, Any]]
"""Runs in the folder it is given, where it may leave files; returns plain data. Must be picklable."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a study."""

    name: str
    """Its folder within the study's."""
    work: Work
    needs: tuple[str, ...] = ()
    """Runs whose folders it reads."""


def read_results(out: Path) -> dict[str, dict[str, Any]]:
    """Of all runs that have ended in the study's folder ``out``."""
    return {str(path.parent.relative_to(out)): read_json(path) for path in sorted(out.rglob(RESULT))}


def carry_out(plan: Callable[[Results], Sequence[Run]], out: Path, jobs: int, minutes: float) -> Results:
    """Do what ``plan`` names, the first first, in ``jobs`` processes of a thread each, until nothing is left that can be done or
    the time is up. A run that fails is told; the others go on, but for those that need it. What runs print is in `LOG_FILE`."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes' own; here it is too late for that
    out.mkdir(parents=True, exist_ok=True)
    ends_s, results, failed = time.monotonic() + 60 * minutes, read_results(out), set[str]()
    flying: dict[str, AsyncResult[dict[str, Any]]] = {}
    with multiprocessing.get_context("spawn").Pool(
        jobs, begin, (out / LOG_FILE,)
    ) as pool:  # leaving it ends the processes
        waiting = list(plan(results))
        while True:
            num_before = len(results)
            for name in [name for name, each in flying.items() if each.ready()]:
                try:
                    results[name] = flying.pop(name).get()
                    say(f"{name}: {results[name]['seconds']:.0f} s; {len(results)} done")
                except Exception as error:  # theirs, whatever it is
                    failed.add(name)
                    say(f"{name}: failed: {error}; {out / LOG_FILE} has more")
            if len(results) > num_before:
                waiting = list(plan(results))  # not every time: it makes recipes
            known = results.keys() | flying.keys() | failed
            waiting = [run for run in waiting if run.name not in known]
            free = [run for run in waiting if all(need in results for need in run.needs)]
            if not (free or flying):
                return results
            if time.monotonic() > ends_s:
                say(f"time is up: {len(results)} runs done, {len(flying)} cut short; call again")
                return results
            for run in free[: jobs - len(flying)]:
                flying[run.name] = pool.apply_async(_do, (run, out))
            time.sleep(_PAUSE_S)


def _do(run: Run, out: Path) -> dict[str, Any]:
    folder, started = out / run.name, time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short
    folder.mkdir(parents=True)
    try:
        result = run.work(folder)
    except Exception:
        traceback.print_exc()
        raise
    result = {**result, "seconds": time.perf_counter() - started}
    write_json(folder / RESULT, result)
    return result
