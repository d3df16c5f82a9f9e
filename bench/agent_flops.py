"""Score over FLOPs of an agent at every preset of one network, and with a small size that calls tools while the full one answers.

    python -m bench.agent_flops MODEL OUT.png --recipe recipes/search.toml --set sources.search.args.part=\"held_out\"
    python -m bench.agent_flops MODEL OUT.png --recipe bench/math_tools.toml --sources calculator_with python_with --problems 400

MODEL is a run or checkpoint with presets that was trained on the recipe's sources. Every point answers the same problems, of no
run, through the chat API; FLOPs are what the server counts, drafts that are thrown away included, prompts found in the cache not.
Points that think small and answer large are compared with the preset that thinks the same: what the larger answer adds, with its
interval, and what it costs. Prints, never judges: there is no aim.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bench.common.measure import table, wide_console
from bench.common.searching import ask_network
from stretto.api.agent import AgentOptions
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.numbers import si
from stretto.base.paths import checkpoint_folder
from stretto.evals.scores import interval, resampled, share_interval
from stretto.flow.launch import SourceTables
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import read_presets
from stretto.report.page import to_png


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/search.toml"))
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override one recipe key")
    parser.add_argument("--sources", nargs="+", help="of the recipe; its first one by default")
    parser.add_argument("--problems", type=int, default=100, help="of each source")
    options = parser.parse_args()
    folder, recipe = checkpoint_folder(options.model), read_recipe(options.recipe, RlRecipe, options.settings)
    presets = [name for name in read_presets(folder) if name != "full"]
    if not presets:
        raise UserError(f"{folder}: has no presets, so there is one point; name an elastic network")
    named = options.sources or list(recipe.sources)[:1]
    if unknown := [name for name in named if name not in recipe.sources]:
        raise UserError(f"--sources {unknown[0]}: the recipe has none of this name; it has {', '.join(recipe.sources)}")
    sizes = [(name, name) for name in (*presets, "full")] + [(name, "full") for name in presets]
    allowed = AgentOptions(turns=recipe.rollout.max_turns, tokens=2 * recipe.rollout.max_tokens)
    told = [allowed.replace(think=think, answer=answer) for think, answer in sizes]
    with SourceTables({name: recipe.sources[name] for name in named}, recipe.sandbox).opened() as sources:
        by_source = [ask_network(folder, source, options.problems, told) for source in sources.values()]
    asked = [[one for each in those for one in each] for those in zip(*by_source, strict=True)]
    num = len(asked[0])
    draws = resampled({"": np.array([[one.score.reward for one in each] for each in asked])})[""]
    flops = [float(np.mean([one.flops for one in each])) for each in asked]
    shown = table(
        f"{num} problems of {', '.join(named)}",
        "calls tools, answers",
        "right (95 %)",
        "FLOPs a problem",
        "the larger answer adds",
    )
    for place, (think, answer) in enumerate(sizes):
        found = share_interval(draws[:, place], num)
        added = interval(draws[:, place] - draws[:, sizes.index((think, think))])
        gain = "" if think == answer else f"{added.value:+.1%} ({added.low:+.1%} to {added.high:+.1%})"
        shown.add_row(
            f"{think}, {answer}", f"{found.value:.1%} ({found.low:.1%} to {found.high:.1%})", si(flops[place]), gain
        )
    wide_console().print(shown)
    options.picture.write_bytes(to_png(_drawn(sizes, flops, draws, named)))


def _drawn(sizes: list[tuple[str, str]], flops: list[float], draws: np.ndarray, named: Sequence[str]) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for place, (think, answer) in enumerate(sizes):
        found = share_interval(draws[:, place], 1 << 30)
        reach = [[found.value - found.low], [found.high - found.value]]
        axes.errorbar(flops[place], found.value, yerr=reach, fmt="o" if think == answer else "^", capsize=3)
        name = think if think == answer else f"{think}, answered by {answer}"
        axes.annotate(name, (flops[place], found.value), xytext=(6, 6), textcoords="offset points")
    axes.set(xscale="log", xlabel="FLOPs a problem", ylabel=f"right, {', '.join(named)}", ylim=(-0.02, 1.02))
    return figure


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
