"""Measure the time to import the package and to load a model, and the size of its core installation against that of the development
environment.

    python -m bench.startup [--rounds 7]

Each round starts a fresh interpreter and times ``import stretto``, beside ``import torch`` as the control, and the processor time of a whole
process that loads a small model and computes logits, beside one that only imports torch. Sizes are those of the packages that are installed
on this machine and that the package requires, with and without its extra ``dev``. Exits with 1 if the median import takes more than 0.2 s or
loads torch, if loading takes more than 2.5 times as long as torch's import, or if the core installation is larger than two thirds of the other.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from statistics import median

from packaging.requirements import Requirement

from bench.common.measure import bench_parser, finish, table
from bench.common.networks import write_network
from stretto.base.track import wide_console

MOST_IMPORT_S, MOST_LOAD, MOST_SHARE = 0.2, 2.5, 2 / 3
LOAD = "import stretto; stretto.load({folder!r}).logits([[1, 2, 3]])"
CODE = (
    "import sys, time; t = time.perf_counter(); import {name}; print(time.perf_counter() - t, 'torch' in sys.modules)"
)


def import_seconds(name: str, rounds: int) -> tuple[float, bool]:
    """Median seconds of ``import name`` in fresh interpreters, and whether torch was loaded."""
    command = [sys.executable, "-c", CODE.format(name=name)]
    outputs = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(rounds)
    ]
    return median(float(seconds) for seconds, _ in outputs), any(has_torch == "True" for _, has_torch in outputs)


def processor_seconds(code: str, rounds: int) -> float:
    """Median processor seconds of fresh interpreters that run ``code``, all threads."""
    command = [sys.executable, "-c", f"{code}; import time; print(time.process_time())"]
    return median(
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(rounds)
    )


def closure(name: str, extras: frozenset[str], seen: dict[str, Distribution]) -> dict[str, Distribution]:
    """All packages that ``name`` with ``extras`` requires and that are installed here, itself included."""
    for extra in extras or {""}:
        key = f"{name.lower().replace('_', '-')}[{extra}]"
        if key in seen:
            continue
        try:
            seen[key] = package = distribution(name)
        except PackageNotFoundError:  # a requirement of another operating system, or of an extra that is not installed
            continue
        for text in package.requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                closure(wanted.name, frozenset(wanted.extras), seen)
    return seen


def megabytes(packages: dict[str, Distribution]) -> tuple[int, float]:
    """Number of packages, and the size of their files on disk in MB."""
    unique = {each.name: each for each in packages.values()}
    sizes = [
        path.locate().stat().st_size for each in unique.values() for path in each.files or () if path.locate().is_file()
    ]
    return len(unique), sum(sizes) / 1e6


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="fresh interpreters for each import")
    rounds = parser.parse_args().rounds
    (ours_s, has_torch), (torch_s, _) = import_seconds("stretto", rounds), import_seconds("torch", rounds)
    core, dev = (megabytes(closure("stretto", extras, {})) for extras in (frozenset[str](), frozenset({"", "dev"})))
    with tempfile.TemporaryDirectory() as folder:
        load = LOAD.format(folder=str(write_network(Path(folder), "tiny")))
        processor_seconds(load, 1)  # compiles what is compiled once on a machine
        load_s, alone_s = processor_seconds(load, rounds), processor_seconds("import torch", rounds)
    shown = table("start and installation", "", "stretto", "control", "ratio", "limit")
    control, ratio = f"import torch {torch_s:.2f}", f"{ours_s / torch_s:.2f}"
    shown.add_row("import stretto, s", f"{ours_s:.3f}", control, ratio, f"{MOST_IMPORT_S} s")
    alone = f"import torch {alone_s:.2f}"
    shown.add_row("load a model, processor s", f"{load_s:.2f}", alone, f"{load_s / alone_s:.2f}", f"{MOST_LOAD}")
    shown.add_row("torch is loaded", str(has_torch), "", "", "False")
    for unit, ours, theirs in zip(("packages", "MB on disk"), core, dev, strict=True):
        shown.add_row(
            f"core, {unit}", f"{ours:,.0f}", f"core + dev {theirs:,.0f}", f"{ours / theirs:.2f}", f"{MOST_SHARE:.2f}"
        )
    wide_console().print(shown)
    limits = {
        f"import stretto takes more than {MOST_IMPORT_S} s": ours_s > MOST_IMPORT_S,
        "import stretto loads torch": has_torch,
        f"loading a model takes more than {MOST_LOAD} times as long as importing torch": load_s > MOST_LOAD * alone_s,
        "the core installation is larger than two thirds": core[0] > MOST_SHARE * dev[0]
        or core[1] > MOST_SHARE * dev[1],
    }
    finish([sentence for sentence, is_passed in limits.items() if is_passed])


if __name__ == "__main__":
    main()
