"""Time to import the package, and the size of its installation: core packages beside the development environment.

    python -m bench.startup [--rounds 7]

Each round starts a fresh interpreter and times ``import stretto``, beside ``import torch`` as the control. Sizes are those of the
packages that are installed here, followed from the requirements of the package with and without its extra ``dev``.
Exits with 1 where the median import takes more than 0.2 s or loads torch, or the core installation is larger than two thirds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from statistics import median

from packaging.requirements import Requirement

from bench.common.measure import table, wide_console

MOST_IMPORT_S, MOST_SHARE = 0.2, 2 / 3
CODE = (
    "import sys, time; t = time.perf_counter(); import {name}; print(time.perf_counter() - t, 'torch' in sys.modules)"
)


def import_seconds(name: str, rounds: int) -> tuple[float, bool]:
    """Median seconds of ``import name`` in fresh interpreters, and whether torch was loaded."""
    found = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(name=name)], capture_output=True, text=True, check=True
        )
        seconds, has_torch = done.stdout.split()
        found.append((float(seconds), has_torch == "True"))
    return median(seconds for seconds, _ in found), any(has_torch for _, has_torch in found)


def closure(name: str, extras: frozenset[str], seen: dict[str, Distribution]) -> dict[str, Distribution]:
    """All packages that ``name`` with ``extras`` requires and that are installed here, itself included."""
    for extra in extras or {""}:
        key = f"{name.lower().replace('_', '-')}[{extra}]"
        if key in seen:
            continue
        try:
            seen[key] = found = distribution(name)
        except PackageNotFoundError:  # another system's, or an extra that is not installed
            continue
        for text in found.requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                closure(wanted.name, frozenset(wanted.extras), seen)
    return seen


def megabytes(found: dict[str, Distribution]) -> tuple[int, float]:
    """Number of packages, and what their files take on disk."""
    unique = {each.name: each for each in found.values()}
    sizes = [
        path.locate().stat().st_size for each in unique.values() for path in each.files or () if path.locate().is_file()
    ]
    return len(unique), sum(sizes) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds, console = parser.parse_args().rounds, wide_console()
    (ours_s, has_torch), (torch_s, _) = import_seconds("stretto", rounds), import_seconds("torch", rounds)
    core, dev = (megabytes(closure("stretto", extras, {})) for extras in (frozenset[str](), frozenset({"", "dev"})))
    shown = table("start and installation", "", "found", "control", "ratio", "limit")
    shown.add_row(
        "import stretto, s", f"{ours_s:.3f}", f"import torch {torch_s:.2f}", f"{ours_s / torch_s:.2f}", "0.2 s"
    )
    shown.add_row("torch is loaded", str(has_torch), "", "", "False")
    for what, ours, theirs in (("packages", core[0], dev[0]), ("MB on disk", core[1], dev[1])):
        shown.add_row(f"core, {what}", f"{ours:,.0f}", f"core + dev {theirs:,.0f}", f"{ours / theirs:.2f}", "0.67")
    console.print(shown)
    if ours_s > MOST_IMPORT_S or has_torch or core[0] > MOST_SHARE * dev[0] or core[1] > MOST_SHARE * dev[1]:
        sys.exit(1)


if __name__ == "__main__":
    main()
