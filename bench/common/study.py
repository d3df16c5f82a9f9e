"""A study of many small runs that depend on each other: parallel processes, results on disk, a time limit.

The caller names the runs as a function of the results so far. That function is called again after every result, so a search can name
runs of its winner. Every finished run has a `RESULT` file in its own folder and is not run again. A run that the time limit
interrupts starts from the beginning at the next call, or resumes if it can.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from bench.common.measure import bench_parser
from stretto.base.config import Config, completed
from stretto.base.errors import UserError
from stretto.base.numbers import counted
from stretto.base.parent import end_with_parent
from stretto.base.paths import read_json, remove, replacing, write_json
from stretto.base.records import git_commit
from stretto.base.track import say
from stretto.learning.recipe import SNAPSHOTS
from stretto.model.parallel import device_name, join

RESULT = "result.json"
LOG_FILE = "runs.log"
"""Standard output and standard error of all runs."""
_POLL_S = 0.05
"""Time between two checks for finished runs."""

Results = Mapping[str, dict[str, Any]]
"""Results by name of the run."""
Work = Callable[[Path], dict[str, Any]]
"""Work of one run in its folder, which may leave files there. Returns plain data. Must be picklable."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a study."""

    name: str
    """Also the folder within the study's folder."""
    work: Work
    needs: tuple[str, ...] = ()
    """Names of the runs whose folders it reads."""
    starts_with: Path | None = None
    """All that it reads of them: a file or folder that they leave before they end. When it exists, the run waits no longer."""
    resumes: bool = False
    """Whether its work goes on from what an interrupted call left in the folder."""
    keeps_snapshots: bool = False
    """Whether other runs begin with one of its snapshots; those of other runs are deleted when the run has ended."""
    lr: float | None = None
    """Learning rate that a search chose for it. A finished run that had another one is refused."""


class _Seeds(argparse.Action):
    """Stores the seeds of a study. Raises UserError: none is left to report."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        refuse_one_seed(values, "--seeds")
        setattr(namespace, self.dest, values)


def refuse_one_seed(seeds: Sequence[int], where: str) -> None:
    """Raises UserError: there is one seed, which searches, and none to report."""
    if len(set(seeds)) < 2:
        raise UserError(f"{where}: the first seed only searches; name a second one, which is reported")


def study_parser(
    docstring: str | None, picture: str = "", seeds: Sequence[int] = (0, 1, 2, 3)
) -> argparse.ArgumentParser:
    """The parser of a study with the options that all studies share.

    Args:
        picture: what its --picture shows, if it has one.
        seeds: default of --seeds.
    """
    parser = bench_parser(docstring)
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        action=_Seeds,
        default=list(seeds),
        help="the first one searches, the others are reported",
    )
    parser.add_argument(
        "out", type=Path, help="folder of the study, where finished runs are not repeated, or a file of --record"
    )
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override one key of the recipe")
    parser.add_argument("--minutes", type=float, default=1e6, help="time limit; run again to continue")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="file of settings and results (JSON): runs in it are not repeated"
    )
    if picture:
        parser.add_argument("--picture", type=Path, metavar="FILE", help=f"{picture}, PNG")
    return parser


def read_results(out: Path) -> dict[str, dict[str, Any]]:
    """Results of all finished runs in the study's folder ``out``."""
    return {str(path.parent.relative_to(out)): read_json(path) for path in sorted(out.rglob(RESULT))}


def recorded(
    path: Path, identity: Mapping[str, Any], may_differ: Callable[[str], bool] = lambda key: False
) -> dict[str, dict[str, Any]]:
    """Results in the record ``path`` of the study with this ``identity``; none if there is no file. A recipe in the record may lack
    settings that were added later: its runs had their defaults. Raises UserError: of another study.

    Args:
        may_differ: whether the value of a recipe key may differ between the record and the study; nested keys are joined by dots.
    """
    if not path.exists():
        return {}
    record = read_fields(path, ("runs",))
    for name, own in identity.items():
        stored = record.get(name)
        if isinstance(own, Config) and isinstance(stored, dict):
            trees = [completed(type(own), tree) for tree in (stored, own.model_dump(mode="json"))]
            stored, own = ({key: value for key, value in tree.items() if not may_differ(key)} for tree in trees)
        if stored != own:
            raise UserError(f"{path}: {name}: of another study; give its settings, or name another record")
    return dict(record["runs"])


def unfinished(missing: Sequence[str], can_go_on: bool) -> list[str]:
    """What a report says first where the reported runs ``missing`` have no result. ``can_go_on``: it is of a folder, not of a record."""
    if not missing:
        return []
    lacking = f"{counted(len(missing), 'run')}: {', '.join(missing)}"
    return [f"{lacking}: missing; run the command again" if can_go_on else f"the record lacks {lacking}"]


def is_record(out: Path) -> bool:
    """Whether ``out`` is a file of --record and not a folder. Raises UserError: it is named like a file that does not exist."""
    if out.suffix == ".json" and not out.exists():
        raise UserError(f"{out}: no such record; name one that exists, or a folder without .json for a new study")
    return out.is_file()


def read_fields(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """The record ``path``. Raises UserError: it has not the fields ``names``, or a single seed."""
    record = read_json(path)
    if not isinstance(record, dict) or not set(names) <= record.keys():
        raise UserError(f"{path}: no record of this study; --record writes one")
    if "seeds" in record:
        refuse_one_seed(record["seeds"], f"{path}: seeds")
    return record


def write_record(path: Path, identity: Mapping[str, Any], results: Results) -> None:
    """Write settings and results, without networks, from which the study goes on and its report is printed on any machine: a line for
    each run."""
    plain = {
        name: each.model_dump(mode="json") if isinstance(each, Config) else each for name, each in identity.items()
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(results[name])}" for name in sorted(results))
    with replacing(path) as fresh:
        fresh.write_text(f'{json.dumps(plain)[:-1]}, "runs": {{\n{lines}\n}}}}\n', encoding="utf-8")


def carry_out(
    plan: Callable[[Results], Sequence[Run]],
    out: Path,
    jobs: int,
    minutes: float,
    recorded: Results = MappingProxyType({}),
) -> Results:
    """Run everything that ``plan`` names, in its order, in ``jobs`` processes of one thread each.

    Ends when no run is left whose needs are met, or after ``minutes``. A failed run is reported; runs that need it are not started,
    the others continue. If a process is killed, nothing more is started. `LOG_FILE` has the output of all runs.

    Args:
        recorded: results of finished runs. Their folders may be missing in ``out``; such a run is repeated only if an unfinished run
            needs its folder.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes; this process has read it already
    out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _begin, (out / LOG_FILE, os.getpid()))
    try:
        return _carry_out(plan, out, jobs, time.monotonic() + 60 * minutes, recorded, pool)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


def _carry_out(
    plan: Callable[[Results], Sequence[Run]],
    out: Path,
    jobs: int,
    ends_s: float,
    recorded: Results,
    pool: ProcessPoolExecutor,
) -> Results:
    results, failed = without_lost(plan, {**recorded, **read_results(out)}, out), set[str]()
    running: dict[str, Future[dict[str, Any]]] = {}
    waiting = _unfinished_runs(plan, results, out)
    while True:
        num_before = len(results)
        for name in [name for name, each in running.items() if each.done()]:
            try:
                results[name] = running.pop(name).result()
                say(f"{name}: {results[name]['seconds']:.0f} s; {len(results)} runs done")
            except BrokenProcessPool:
                say(
                    f"a process was killed, most likely for want of memory; runs done: {len(results)}; run the command again with a "
                    "smaller --jobs"
                )
                return results
            except Exception as error:  # of the run, of any kind
                failed.add(name)
                say(f"{name}: failed: {error}; see {out / LOG_FILE}")
        if len(results) > num_before:  # only then: planning validates recipes
            results = without_lost(plan, results, out)
            waiting = _unfinished_runs(plan, results, out)
        known = results.keys() | running.keys() | failed
        waiting = [run for run in waiting if run.name not in known]
        ready = [run for run in waiting if _is_ready(run, results)]
        if not (ready or running):
            return results
        if time.monotonic() > ends_s:
            say(f"time limit: {len(results)} runs done, {len(running)} interrupted; run the command again to continue")
            return results
        for run in ready[: jobs - len(running)]:
            running[run.name] = pool.submit(_do, run, out)
        time.sleep(_POLL_S)


def _is_ready(run: Run, results: Results) -> bool:
    is_left = run.starts_with is not None and run.starts_with.exists()
    return is_left or all(need in results for need in run.needs)


def _unfinished_runs(plan: Callable[[Results], Sequence[Run]], results: Results, out: Path) -> list[Run]:
    """Runs of ``plan`` without a result. Raises UserError: a finished run had another learning rate than the plan says, if its result
    names one."""
    runs = []
    for run in plan(results):
        done = results.get(run.name)
        if done is None:
            runs.append(run)
        elif run.lr is not None and done.get("lr", run.lr) != run.lr:
            raise UserError(
                f"{out / run.name}: trained at lr {done['lr']:g}, the search now chooses {run.lr:g}; remove the run's folder and its line "
                "in the record"
            )
    return runs


def without_lost(plan: Callable[[Results], Sequence[Run]], results: Results, out: Path) -> dict[str, dict[str, Any]]:
    """``results`` without those of runs whose folders are missing in ``out`` and which unfinished runs of ``plan`` need."""
    unfinished_runs = _unfinished_runs(plan, results, out)
    lost = {need for run in unfinished_runs for need in run.needs if not (out / need).is_dir()}
    return {name: result for name, result in results.items() if name not in lost}


def _begin(log: Path, parent: int) -> None:
    """Initialise a process: one thread, output appended to ``log``. It ends with the study."""
    end_with_parent(parent)
    torch.set_num_threads(1)
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def _do(run: Run, out: Path) -> dict[str, Any]:
    folder, started = out / run.name, time.perf_counter()
    if not run.resumes:
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = run.work(folder)
    except Exception:
        traceback.print_exc()
        raise
    where = {"commit": git_commit(), "machine": device_name(join("auto").device)}
    result = {**result, **where, "seconds": time.perf_counter() - started}
    write_json(folder / RESULT, result)
    if not run.keeps_snapshots:
        remove(folder / SNAPSHOTS)
    return result
