"""An agent that has learnt to search, beside agents that learn nothing, on corpora without a word in common with its own.

    python -m bench.search_world OUT                       trains recipes/search.toml in OUT, one process
    python -m bench.search_world OUT --problems 1000 --set train.steps=300
    python -m bench.search_world OUT --set train.seed=1 --set sources.search.args.seed=1
    python -m bench.search_world OUT --recipe recipes/search_smol.toml --model runs/smol --device cuda

What is told of held-out corpora, and of what, are words that no trained one has. Beside the trained agent: its own supervised start; an
agent that always opens the first hit of the question and reads it without a fault, which is more than a network does; and a closed
book, which can do no better than abstain. All agents are asked the same problems, and differences are paired.

Exits with 1 unless the trained agent beats first hit and closed book beyond the interval, and at most 2 % of its citations
are unsupported. What a harsh reader would say: the world is small and regular, its questions all have one form, and the
trained agent's search is by the names that they mention. The column "astray" counts citations more strictly: of documents
outside the answer's own chain, however well they were read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.common.measure import table, wide_console
from bench.common.searching import Asked, ask_network, closed_book, first_hit, write_asked
from bench.common.worlds import train
from stretto.api.agent import AgentOptions
from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.paths import checkpoint_folder
from stretto.evals.scores import interval, resampled, share_interval
from stretto.learning.recipe import RlRecipe
from stretto.tasks.worlds.search import SearchArgs, SearchSource

RECIPE = Path("recipes/search.toml")
TRAINED, BEGUN, FIRST_HIT, CLOSED = "trained", "its start", "first hit, read perfectly", "closed book"
MOST_UNSUPPORTED = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--model", type=Path, help="what learns, where the recipe describes no network")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--device", default="cpu", help="trains; what answers takes an accelerator where there is one")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override one recipe key")
    options = parser.parse_args()
    recipe = read_recipe(options.recipe, RlRecipe, options.settings)
    origin = checkpoint_folder(options.model) if options.model else None
    start = made_start(recipe, options.out, origin, options.device)
    trained = train(recipe, options.out, start, options.device)
    args = SearchArgs.model_validate(next(iter(recipe.sources.values())).args)
    source = SearchSource("held_out", args.replace(part="held_out"))
    allowed = AgentOptions(turns=recipe.rollout.max_turns, tokens=2 * recipe.rollout.max_tokens)
    asked = {
        FIRST_HIT: first_hit(source, options.problems),
        CLOSED: closed_book(source, options.problems),
        BEGUN: ask_network(start, source, options.problems, [allowed])[0],
        TRAINED: ask_network(trained, source, options.problems, [allowed])[0],
    }
    write_asked(options.out / "search_world.jsonl", asked)
    sys.exit(not show(wide_console(), asked))


def show(console: Console, asked: Mapping[str, Sequence[Asked]]) -> bool:
    """Print what each came to. Returns: whether the trained agent is what it should be."""
    names = list(asked)
    right = np.array([[each.score.reward for each in asked[name]] for name in names])
    draws = resampled({"held out": right})["held out"]
    shown = table(
        f"{right.shape[1]} problems of held-out corpora, greedy",
        *("", "right (95 %)", "1 document", "2", "more", "none tells", "cited", "unsupported", "astray", "abstained"),
    )
    unsupported = {}
    for place, name in enumerate(names):
        found = share_interval(draws[:, place], right.shape[1])
        cited = sum(each.score.parts["cited"] for each in asked[name])
        shares = {part: sum(each.score.parts[part] for each in asked[name]) for part in ("unsupported", "astray")}
        unsupported[name] = shares["unsupported"] / cited if cited else 0.0
        by_hops = {
            hops: [each.score.reward for each in asked[name] if min(each.hops, 3) == hops] for hops in (1, 2, 3, 0)
        }
        shown.add_row(
            name,
            f"{found.value:.1%} ({found.low:.1%} to {found.high:.1%})",
            *(f"{np.mean(values):.0%} of {len(values)}" if values else "–" for values in by_hops.values()),
            f"{cited:.0f}",
            *(f"{share / cited:.1%}" if cited else "–" for share in shares.values()),
            f"{np.mean([each.score.parts['abstained'] for each in asked[name]]):.0%}",
        )
    console.print(shown)
    trained, is_better = names.index(TRAINED), True
    for name in (FIRST_HIT, CLOSED):
        lead = interval(draws[:, trained] - draws[:, names.index(name)])
        is_better &= lead.low > 0
        console.print(f"{TRAINED} less {name}: {lead.value:+.1%} ({lead.low:+.1%} to {lead.high:+.1%})")
    return is_better and unsupported[TRAINED] <= MOST_UNSUPPORTED


if __name__ == "__main__":
    main()
