"""Score over FLOPs of an agent at every preset of one network, and with a small size that searches while the full one answers.

    python -m bench.agent_flops MODEL OUT.png             a run or checkpoint with presets that was trained on `search`
    python -m bench.agent_flops MODEL OUT.png --problems 400 --recipe recipes/search.toml

Every point answers the same held-out problems through the chat API; FLOPs are what the server counts, drafts that are thrown
away included, prompts found in the cache not. Points that think small and answer large are compared with the preset that thinks
the same: what the larger answer adds, with its interval, and what it costs. Prints, never judges: there is no aim.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bench.common.measure import table, wide_console
from bench.common.searching import ask_network
from stretto.apps.agent import AgentOptions
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.numbers import si
from stretto.base.paths import checkpoint_folder
from stretto.evals.scores import interval, resampled, share_interval
from stretto.model.checkpoint import read_presets
from stretto.report.page import to_png
from stretto.rl.recipe import RlRecipe
from stretto.tasks.worlds.search import SearchArgs, SearchSource


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/search.toml"))
    parser.add_argument("--problems", type=int, default=100)
    options = parser.parse_args()
    folder, recipe = checkpoint_folder(options.model), read_recipe(options.recipe, RlRecipe)
    presets = [name for name in read_presets(folder) if name != "full"]
    if not presets:
        raise UserError(f"{folder}: has no presets, so there is one point; name an elastic network")
    args = SearchArgs.model_validate(next(iter(recipe.sources.values())).args)
    source = SearchSource("held_out", args.replace(split="held_out"))
    sizes = [(name, name) for name in (*presets, "full")] + [(name, "full") for name in presets]
    allowed = AgentOptions(turns=recipe.rollout.max_turns, tokens=2 * recipe.rollout.max_tokens)
    told = [allowed.replace(think=think, answer=answer) for think, answer in sizes]
    asked = ask_network(folder, source, options.problems, told)

    draws = resampled({"held out": np.array([[one.score.reward for one in each] for each in asked])})["held out"]
    flops = [float(np.mean([one.flops for one in each])) for each in asked]
    shown = table(
        f"{options.problems} held-out problems",
        "searches, answers",
        "right (95 %)",
        "FLOPs a problem",
        "the larger answer adds",
    )
    for place, (think, answer) in enumerate(sizes):
        found = share_interval(draws[:, place], options.problems)
        added = interval(draws[:, place] - draws[:, sizes.index((think, think))])
        gain = "" if think == answer else f"{added.value:+.1%} ({added.low:+.1%} to {added.high:+.1%})"
        shown.add_row(
            f"{think}, {answer}", f"{found.value:.1%} ({found.low:.1%} to {found.high:.1%})", si(flops[place]), gain
        )
    wide_console().print(shown)
    options.picture.write_bytes(to_png(_drawn(sizes, flops, draws)))


def _drawn(sizes: list[tuple[str, str]], flops: list[float], draws: np.ndarray) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for place, (think, answer) in enumerate(sizes):
        found = share_interval(draws[:, place], 1 << 30)
        reach = [[found.value - found.low], [found.high - found.value]]
        axes.errorbar(flops[place], found.value, yerr=reach, fmt="o" if think == answer else "^", capsize=3)
        name = think if think == answer else f"{think}, answered by {answer}"
        axes.annotate(name, (flops[place], found.value), xytext=(6, 6), textcoords="offset points")
    axes.set(xscale="log", xlabel="FLOPs a problem", ylabel="right, held-out corpora", ylim=(-0.02, 1.02))
    return figure


if __name__ == "__main__":
    main()
