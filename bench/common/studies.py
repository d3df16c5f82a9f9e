"""A study of many independent runs: some at a time, each in a process of one thread; what has ended is kept and not run again."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stretto.base.errors import UserError
from stretto.base.track import progress, say

RUNS_FILE = "runs.jsonl"
"""A line for each run that ended: its name, what it was told, what it found."""
LOG_FILE = "runs.log"
"""What the runs print."""
Run = Mapping[str, Any]
"""What a run is told, or found: plain JSON values."""


@dataclass(slots=True)
class Study:
    """Runs that are kept in a folder."""

    out: Path
    jobs: int
    """Processes side by side."""
    minutes: float = math.inf
    """After so many no further run is begun; those at work are waited for."""
    kept: dict[str, tuple[Run, Run]] = field(init=False)
    """By name: what the run was told, and found."""
    _started: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Raises UserError: what is kept is damaged."""
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / RUNS_FILE
        content = path.read_bytes() if path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]  # without a line that a kill has torn
        if len(whole) < len(content):
            path.write_bytes(whole)
        try:
            rows = [json.loads(line) for line in whole.splitlines()]
            self.kept = {row["name"]: (row["told"], row["found"]) for row in rows}
        except (ValueError, KeyError) as error:
            raise UserError(f"{path}: damaged: {error}; choose another --out") from None

    def run(self, title: str, work: Callable[[Run], Run], runs: Mapping[str, Run]) -> dict[str, Run]:
        """What each of ``runs`` found, by name; those that failed or were not begun in time are missing, and said to be.

        Args:
            work: a function of a module, called in another process with what a run is told.

        Raises:
            UserError: a run of this name was told something else before.
        """
        runs = json.loads(json.dumps(runs))  # as they come out of the file
        for name, told in runs.items():
            before = self.kept.get(name, (told, {}))[0]
            if before != told:
                raise UserError(
                    f"{self.out / RUNS_FILE}: {name} was told {before}, is {told} now; choose another --out"
                )
        waiting = [name for name in runs if name not in self.kept]
        if waiting:
            with progress(title, len(runs)) as advance:
                advance(len(runs) - len(waiting))
                self._run(work, {name: runs[name] for name in waiting}, advance)
        if missing := [name for name in runs if name not in self.kept]:
            say(
                f"{title}: {len(missing)} of {len(runs)} are missing ({', '.join(missing)}); call again to have them done"
            )
        return {name: self.kept[name][1] for name in runs if name in self.kept}

    def _run(self, work: Callable[[Run], Run], runs: Mapping[str, Run], advance: Callable[..., None]) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes, which are begun afresh
        queue, at_work = list(runs), dict[Future[Run], str]()
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(self.jobs, len(runs)), context, begin, (self.out / LOG_FILE,))
        with pool, (self.out / RUNS_FILE).open("a", encoding="utf-8") as file:
            while queue or at_work:
                is_over = time.monotonic() - self._started > 60 * self.minutes
                while queue and not is_over and len(at_work) < self.jobs:
                    name = queue.pop(0)
                    at_work[pool.submit(work, runs[name])] = name
                if not at_work:
                    return
                for done in wait(at_work, return_when=FIRST_COMPLETED).done:
                    name = at_work.pop(done)
                    if (error := done.exception()) is not None:
                        say(f"{name} failed: {''.join(traceback.format_exception(error))}")
                    else:
                        self.kept[name] = runs[name], done.result()
                        file.write(json.dumps({"name": name, "told": runs[name], "found": done.result()}) + "\n")
                        file.flush()
                    advance(1, name)


def begin(log: Path) -> None:
    """In a process of runs: one thread, and what it prints goes to the end of ``log``."""
    """In a process of runs."""
    torch.set_num_threads(1)
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
