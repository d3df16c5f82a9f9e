"""Mutation testing: small wrong changes to the code that matters most, and whether the fast tests notice.

    python -m bench.mutants [--mutants 300] [--seed 0] [--only cache,ledger] [--workers 2] [--keep FILE]

Places are drawn evenly over the files below, then a change for each place (operators of cosmic-ray: a comparison turned, a number
moved, a condition negated, a decorator removed …). Annotations and a dataclass's own settings are left alone, since they
compute nothing. Each mutant is put into a copy of this checkout and the tests of its area run against it until one fails. What
survives is printed as a difference: each is a missing test, or changes nothing that anybody could see. A mutant that runs past
five times its area's time counts as killed. ``--keep`` writes every outcome and takes up where an interrupted run of the
same seed and revision stopped. Exit code 1 below the share that is asked for.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import IO

from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.tree import Node
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
AIM = 0.88
"""The share of mutants that must be killed."""
SAME = ("Eq_Is", "NotEq_IsNot", "Is_Eq", "IsNot_NotEq")
"""Replacements that mean the same for None, enums and small integers, which is what the code compares so."""
PATIENCE, GRACE_S = 5.0, 10.0
"""A mutant's time: so many times what its area's tests take unchanged, and so much more."""


@dataclass(frozen=True, slots=True)
class Area:
    """Files that are mutated, and the tests that ought to notice, below ``stretto/`` and ``tests/``; the quickest to notice first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


AREAS: Mapping[str, Area] = {
    "router": Area(
        ("ops/operators.py",),
        ("ops/test_operators.py", "model/test_transformer.py", "model/test_elastic.py", "ops/test_exact.py"),
    ),
    "attention": Area(
        ("model/attention.py",), ("model/test_attention.py", "model/test_transformer.py", "model/test_elastic.py")
    ),
    "experts": Area(
        ("model/transformer.py", "model/elastic.py", "ops/grouped.py"),
        (
            "ops/test_grouped.py",
            "model/test_transformer.py",
            "model/test_elastic.py",
            "model/test_families.py",
            "train/test_step.py",
        ),
    ),
    "credit": Area(("learning/algorithms.py",), ("learning/test_algorithms.py", "learning/test_batch.py")),
    "losses": Area(
        ("learning/objective.py", "ops/logprob.py"),
        ("learning/test_objective.py", "ops/test_logprob.py", "learning/test_trainer.py"),
    ),
    "throttle": Area(("flow/controller.py",), ("flow/test_controller.py", "flow/test_driver.py")),
    "ledger": Area(("flow/ledger.py",), ("flow/test_ledger.py", "flow/test_controller.py", "flow/test_driver.py")),
    "scheduler": Area(
        ("engine/scheduler.py",), ("engine/test_scheduler.py", "engine/test_engine.py", "engine/test_speculation.py")
    ),
    "samplers": Area(
        ("train/sampler.py", "engine/sampling.py"),
        ("train/test_sampler.py", "engine/test_sampling.py", "engine/test_engine.py"),
    ),
    "packing": Area(
        ("data/pack.py", "learning/batch.py"),
        ("data/test_pack.py", "learning/test_batch.py", "data/test_loader.py", "learning/test_trainer.py"),
    ),
    "cache": Area(("engine/cache.py",), ("engine/test_cache.py", "engine/test_scheduler.py", "engine/test_engine.py")),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong file."""

    area: str
    file: str
    operator: str
    line: int
    source: str
    """The whole file, changed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests said of one mutant."""

    area: str
    file: str
    operator: str
    line: int
    killed: bool
    how: str
    """Killed by tests or by time; the difference where it survived."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(AREAS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="JSON lines of outcomes, taken up again")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve_tests()
        return
    unknown = set(arguments.only.split(",")) - set(AREAS)
    if unknown:
        sys.exit(f"--only {min(unknown)}: no such area; there are {', '.join(AREAS)}")
    mutants = draw(arguments.only.split(","), arguments.mutants, random.Random(arguments.seed))
    done = read_outcomes(arguments.keep)
    outcomes = done + list(run(mutants[len(done) :], arguments.workers, arguments.keep))
    console = Console(width=120)
    console.print(summary(outcomes))
    for outcome in outcomes:
        if not outcome.killed:
            console.print(f"\nsurvived: {outcome.area} {outcome.file}:{outcome.line} {outcome.operator}", style="bold")
            console.print(outcome.how, markup=False, highlight=False, soft_wrap=True)
    share = sum(outcome.killed for outcome in outcomes) / len(outcomes)
    console.print(f"\n{share:.1%} of {len(outcomes)} mutants killed, seed {arguments.seed}; the aim is {AIM:.0%}")
    sys.exit(share < AIM)


# ---- mutants -------------------------------------------------------------------------------------------------------------------------------


def draw(areas: Sequence[str], count: int, rng: random.Random) -> list[Mutant]:
    """``count`` mutants: a place first, so that an operator with many replacements is not drawn more often, then what happens there."""
    places = [
        (area, file, place, changes)
        for area in areas
        for file in AREAS[area].files
        for place, changes in sorted(changes_by_place(ROOT / "stretto" / file).items())
    ]
    rng.shuffle(places)
    mutants: list[Mutant] = []
    for area, file, (line, _), changes in places:
        operator, occurrence = rng.choice(changes)
        source = mutated(ROOT / "stretto" / file, operator, occurrence)
        if source is not None:
            mutants.append(Mutant(area, file, operator, line, source))
        if len(mutants) == count:
            break
    else:
        sys.exit(f"--mutants {count}: only {len(mutants)} can be made; ask for at most that many")
    return mutants


def changes_by_place(path: Path) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """(line, column) → [(operator, its how-manieth occurrence in the file)], without those that change nothing that runs."""
    source = path.read_text()
    spared = list(silent(ast.parse(source)))
    tree = get_ast(source)
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name in sorted(operator_names()):
        if not name.endswith(SAME) and not name.startswith("core/Variable"):  # which want arguments
            positions = Positions(get_operator(name)())
            positions.walk(tree)
            for occurrence, place in enumerate(positions.found):
                if not any(start <= place < end for start, end in spared):
                    found.setdefault(place, []).append((name, occurrence))
    return found


class Positions(Visitor):
    """Where an operator finds something to change."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self.found: list[tuple[int, int]] = []

    def visit(self, node: Node) -> Node:
        self.found.extend(start for start, _ in self._operator.mutation_positions(node))
        return node


def silent(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """From where to where nothing runs: annotations, which are postponed, and what a dataclass says of itself (frozen, slots)."""
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        parts += [part for part in getattr(node, "decorator_list", []) if "dataclass" in ast.unparse(part)]
        for part in parts:
            if part is not None:
                yield (part.lineno, part.col_offset - 1), (part.end_lineno, part.end_col_offset)  # with a decorator's @


def mutated(path: Path, operator: str, occurrence: int) -> str | None:
    """The file changed; None where the operator writes what is no Python, or cannot treat what it found."""
    try:
        source = mutate_code(path.read_text(), get_operator(operator)(), occurrence)
        with warnings.catch_warnings(action="ignore"):
            compile(source, "mutant", "exec")
    except (SyntaxError, AttributeError):
        return None
    return str(source)


# ---- tests ---------------------------------------------------------------------------------------------------------------------------------


class Tree:
    """A copy of this checkout, and a process that runs tests in it."""

    def __init__(self, folder: Path) -> None:
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self.folder = folder
        # Without byte code: a mutant of the same size in the same second would be taken for the one before.
        env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "bench.mutants", "--worker"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def test(self, area: str, limit_s: float) -> tuple[int | None, float]:
        """pytest's exit code, None after ``limit_s``; and the seconds it took."""
        assert self._worker.stdin is not None and self._worker.stdout is not None
        self._worker.stdin.write(json.dumps({"tests": AREAS[area].tests, "limit_s": limit_s}) + "\n")
        self._worker.stdin.flush()
        code, seconds = json.loads(self._worker.stdout.readline())
        return code, seconds

    def judge(self, mutant: Mutant, limit_s: float) -> Outcome:
        path = self.folder / "stretto" / mutant.file
        original = path.read_text()
        path.write_text(mutant.source)
        try:
            code, _ = self.test(mutant.area, limit_s)
        finally:
            path.write_text(original)
        how = "time" if code is None else "tests"
        if code == 0:
            how = "\n".join(
                list(difflib.unified_diff(original.split("\n"), mutant.source.split("\n"), lineterm="", n=1))[2:]
            )
        return Outcome(mutant.area, mutant.file, mutant.operator, mutant.line, code != 0, how)

    def close(self) -> None:
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        self._worker.wait()


def serve_tests() -> None:
    """In a tree's process: run what a line asks for, in a fork that already has the slow libraries."""
    import hypothesis  # noqa: F401
    import pytest
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            tests = [f"tests/{name}" for name in asked["tests"]]
            os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
        code = wait(child, asked["limit_s"])
        answers.write(json.dumps([code, time.monotonic() - start]) + "\n")
        answers.flush()


def wait(child: int, limit_s: float) -> int | None:
    """The exit code of ``child``, or None once it was ended with everything it started."""
    deadline = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)


# ---- the run -------------------------------------------------------------------------------------------------------------------------------


def run(mutants: Sequence[Mutant], workers: int, keep: Path | None) -> Iterator[Outcome]:
    """Outcomes in the order of ``mutants``, each on the disk as soon as those before it are."""
    if not mutants:
        return
    with tempfile.TemporaryDirectory() as scratch:
        trees: Queue[Tree] = Queue()
        for index in range(workers):
            trees.put(Tree(Path(scratch) / str(index)))
        limits = baselines(trees, sorted({mutant.area for mutant in mutants}))

        def judge(mutant: Mutant) -> Outcome:
            tree = trees.get()
            try:
                return tree.judge(mutant, limits[mutant.area])
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(workers) as pool, open(keep or os.devnull, "a") as log:
            for outcome in track(pool.map(judge, mutants), "mutants", len(mutants)):
                write(outcome, log)
                yield outcome
        while not trees.empty():
            trees.get().close()


def baselines(trees: Queue[Tree], areas: Sequence[str]) -> dict[str, float]:
    """Seconds a mutant of each area may take; ends the bench where tests fail unchanged."""
    limits = {}
    tree = trees.get()
    for area in areas:
        code, seconds = tree.test(area, 600.0)
        if code != 0:
            sys.exit(f"the tests of {area} do not pass unchanged (pytest exit code {code}): run them alone first")
        print(f"{area}: {seconds:.0f} s unchanged", flush=True)
        limits[area] = PATIENCE * seconds + GRACE_S
    trees.put(tree)
    return limits


def write(outcome: Outcome, log: IO[str]) -> None:
    log.write(json.dumps(asdict(outcome)) + "\n")
    log.flush()


def read_outcomes(keep: Path | None) -> list[Outcome]:
    if keep is None or not keep.exists():
        return []
    return [Outcome(**json.loads(line)) for line in keep.read_text().splitlines()]


def summary(outcomes: Sequence[Outcome]) -> Table:
    table = Table("area", "mutants", "killed", "of them by time", "share")
    for area in AREAS:
        mine = [outcome for outcome in outcomes if outcome.area == area]
        if mine:
            killed = [outcome for outcome in mine if outcome.killed]
            by_time = sum(outcome.how == "time" for outcome in killed)
            table.add_row(area, str(len(mine)), str(len(killed)), str(by_time), f"{len(killed) / len(mine):.0%}")
    return table


if __name__ == "__main__":
    main()
