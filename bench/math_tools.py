"""What tools gain in arithmetic and counting, at every size of one network: the same problems with a tool and without.

    python -m bench.math_tools OUT [--samples 4] [--problems 60] [--mutant]

A small elastic network learns from demonstrations (bench/math_tools.toml: `stretto sft`): to call the calculator, or to write and
run a line of Python in the sandbox, and to say what it gave; and to say the answer of the same kinds of problems at once. Then
`stretto eval` asks it new ones at each of its sizes: avg@k over ``--samples``, with intervals over problems, and the gain problem by
problem. Exits with 1 where a gain is not above 0 beyond its interval, at any size, as with ``--mutant``, which compares the sources
without tools with themselves.

A harsh reader: multiplication and counting at once is what so small a network cannot learn, so a gain is to be expected; what is
shown is that calls are written, run, read and judged at every size. Of a larger model on real problems: `stretto eval RUN --suite FILE
--presets` with sources of kind ``tools`` in both forms, as in that file. ``--set start.steps=4000 --problems 500`` is the long run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from bench.common.measure import table, wide_console
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.numbers import si
from stretto.base.paths import write_json
from stretto.evals.scores import Interval, interval, resampled
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import read_presets
from stretto.post.sft import STAGE
from stretto.post.suite import RESULT_FILE, Evaluation, read_evaluation

RECIPE = Path(__file__).with_suffix(".toml")
WITH, WITHOUT = "_with", "_without"


def _run(*arguments: str) -> None:
    if subprocess.run([sys.executable, "-m", "stretto", *arguments]).returncode:
        raise UserError(f"stretto {arguments[0]}: failed; see above")


def evaluated(options: argparse.Namespace, recipe: RlRecipe, checkpoint: Path, size: str) -> Evaluation:
    folder, suite = options.out / "scores" / size, options.out / "suite.json"
    if not (folder / RESULT_FILE).is_file():
        sources = {name: source.model_dump() for name, source in recipe.sources.items()}
        turns = {key: getattr(recipe.rollout, key) for key in ("max_tokens", "max_turns")}
        write_json(suite, {"math": {"problems": options.problems, "sources": sources, **turns}})
        flags = ["--samples", str(options.samples), "--subnet", size, "--device", options.device]
        _run("eval", str(checkpoint), "--suite", str(suite), "-o", str(folder), *flags)
    return read_evaluation(folder)


def gain(found: Evaluation, more: str, less: str) -> Interval:
    """Paired: the same problems."""
    one, other = (np.array(found.domains[name].values, np.float64) for name in (more, less))
    return interval(resampled({"": (one - other)[None]})[""][:, 0])


def _percent(score: Interval) -> str:
    return f"{100 * score.value:.1f} [{100 * score.low:.1f}, {100 * score.high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=4, help="of a problem")
    parser.add_argument("--problems", type=int, default=60, help="of each kind")
    parser.add_argument("--mutant", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of bench/math_tools.toml")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    recipe, checkpoint = read_recipe(RECIPE, RlRecipe), options.out / STAGE
    if not checkpoint.is_dir():
        settings = [part for each in options.set for part in ("--set", each)]
        _run("sft", str(RECIPE), "-o", str(options.out), "--device", options.device, *settings)
    title = f"Right, %, avg@{options.samples} of {options.problems} problems each, with 95 % intervals"
    shown = table(title, "size", "tool", "without", "with", "gain", "FLOPs an answer without, with")
    is_gained = True
    for size in ["full", *(name for name in read_presets(checkpoint) if name != "full")]:
        found = evaluated(options, recipe, checkpoint, size)
        for tool in (name.removesuffix(WITH) for name in recipe.sources if name.endswith(WITH)):
            less, more = tool + WITHOUT, tool + (WITHOUT if options.mutant else WITH)
            gained = gain(found, more, less)
            is_gained = is_gained and gained.low > 0
            scores = [_percent(each) for each in (found.domains[less].score, found.domains[more].score, gained)]
            flops = ", ".join(si(found.domains[name].flops) for name in (less, more))
            shown.add_row(size, tool, *scores, flops)
    wide_console().print(shown)
    sys.exit(0 if is_gained else 1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
