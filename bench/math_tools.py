"""What a calculator gains in arithmetic, at every size of one network: the same problems with it and without.

    python -m bench.math_tools OUT [--samples 4] [--problems 60] [--mutant]

A small elastic network learns both from demonstrations (bench/math_tools.toml: `stretto sft`): to call the calculator and say what it
gave, and to say the answer at once; the same problems, a source each, as many of each. Then `stretto eval` asks it new ones of both at
each of its sizes: avg@k over ``--samples``, with intervals over problems, and the gain problem by problem. Exits with 1 where the
gain of the full size is not above 0 beyond its interval, as with ``--mutant``, which compares the source without tools with itself.

A harsh reader: multiplication at once is what so small a network cannot learn, so a gain is to be expected; what is shown is that calls are
written, run, read and judged at every size. Of a larger model on real problems: `stretto eval RUN --suite FILE --presets` with
sources of kind ``tools`` in both forms, as in that file. ``--set start.steps=4000 --problems 500`` is the long run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from bench.common.measure import table, wide_console
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, write_json
from stretto.evals.scores import Interval, interval, resampled
from stretto.model.checkpoint import read_presets
from stretto.post.suite import RESULT_FILE, Evaluation, read_evaluation

RECIPE = Path(__file__).with_suffix(".toml")
_SOURCE = {"kind": "tools", "args": {"tools": ["calculator"], "digits": 2}}


def _run(*arguments: str) -> None:
    if subprocess.run([sys.executable, "-m", "stretto.apps.cli", *arguments]).returncode:
        raise UserError(f"stretto {arguments[0]}: failed; see above")


def evaluated(options: argparse.Namespace, checkpoint: Path, size: str) -> Evaluation:
    folder, suite = options.out / "scores" / size, options.out / "suite.json"
    if not (folder / RESULT_FILE).is_file():
        without = {**_SOURCE, "args": {**_SOURCE["args"], "offered": False}}  # type: ignore[dict-item]
        asked = {"problems": options.problems, "max_tokens": 96, "max_turns": 3}
        suite.parent.mkdir(parents=True, exist_ok=True)
        write_json(suite, {"math": {**asked, "sources": {"with": _SOURCE, "without": without}}})
        flags = ["--samples", str(options.samples), "--subnet", size, "--device", options.device]
        _run("eval", str(checkpoint), "--suite", str(suite), "-o", str(folder), *flags)
    return read_evaluation(folder)


def gain(found: Evaluation, more: str, less: str) -> Interval:
    """Paired: the same problems."""
    one, other = (np.array(found.domains[name].values, np.float64) for name in (more, less))
    return interval(resampled({"": (one - other)[None]})[""][:, 0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=4, help="of a problem")
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--mutant", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of bench/math_tools.toml")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    checkpoint = options.out / "sft" / CHECKPOINT
    if not checkpoint.is_dir():
        settings = [part for each in options.set for part in ("--set", each)]
        _run("sft", str(RECIPE), "-o", str(options.out), "--device", options.device, *settings)
        checkpoint = options.out / "sft" / CHECKPOINT if checkpoint.is_dir() else options.out / "sft"
    more = "without" if options.mutant else "with"
    shown = table(f"Right, %, avg@{options.samples} of {options.problems} problems", "size", "without", "with", "gain")
    gains = {}
    for size in ["full", *(name for name in read_presets(checkpoint) if name != "full")]:
        found = evaluated(options, checkpoint, size)
        gains[size] = gain(found, more, "without")
        cells = [found.domains["without"].score, found.domains[more].score, gains[size]]
        shown.add_row(
            size, *(f"{100 * each.value:.1f} [{100 * each.low:.1f}, {100 * each.high:.1f}]" for each in cells)
        )
    wide_console().print(shown)
    sys.exit(0 if gains["full"].low > 0 else 1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
