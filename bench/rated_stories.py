"""Compare the scores of local judges with ratings by readers, beside two baselines: number of words, and compression.

    python -m bench.rated_stories RATED --judge JUDGE [--judge JUDGE] [--device cuda]

RATED: JSONL, CSV or Parquet with the fields prompt, text, author (a person or a model) and rating, or HANNA's annotations (Prompt, Story,
Model and six criteria; https://github.com/dig-team/hanna-benchmark-asg). Ratings of one text by several people are averaged. JUDGE: a folder
of `stretto judge train`. Prints rank correlations with the ratings, over all texts and within authors, with 95 % bootstrap intervals over
prompts (all texts of a prompt are resampled together), and the paired differences of each judge to the baselines. Exits with 1 unless a judge
beats both baselines: all four differences above 0, intervals included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

import numpy as np
from scipy import stats

from bench.common.measure import bench_parser, finish, table
from stretto.base.track import progress, wide_console
from stretto.evals.ranker import open_judge
from stretto.evals.rated import read_rated
from stretto.evals.scores import TAIL, group_draws
from stretto.text.similar import compression, words

BASELINES = ("words", "zlib ratio")
MEASURES = ("Spearman", "Kendall", "Spearman within authors")


def correlations(scores_N: np.ndarray, ratings_N: np.ndarray, authors_N: np.ndarray) -> list[float]:
    """One value for each of `MEASURES`; within authors: the mean weighted by the number of texts."""
    within, sizes = [], []
    for author in np.unique(authors_N):
        own_N = authors_N == author
        if own_N.sum() > 2 and len(set(ratings_N[own_N])) > 1 and len(set(scores_N[own_N])) > 1:
            within.append(stats.spearmanr(scores_N[own_N], ratings_N[own_N]).statistic)
            sizes.append(own_N.sum())
    overall = stats.spearmanr(scores_N, ratings_N).statistic, stats.kendalltau(scores_N, ratings_N).statistic
    return [*overall, np.average(within, weights=sizes) if within else np.nan]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("rated", type=Path, help="texts with ratings")
    parser.add_argument("--judge", type=Path, action="append", required=True, help="folder of a judge; repeatable")
    parser.add_argument("--device", default="cpu", help="device of the judges; default: cpu")
    options = parser.parse_args(arguments)
    rated = read_rated(options.rated)
    prompts, texts, authors, ratings = zip(*map(astuple, rated), strict=True)
    scores = {"words": [len(words(text)) for text in texts], "zlib ratio": [compression(text) for text in texts]}
    for folder in options.judge:
        judge = open_judge(folder, options.device)
        with progress(f"{folder.name}: texts", len(texts)) as advance:
            scores[folder.name] = []
            for pair in zip(prompts, texts, strict=True):
                scores[folder.name].append(float(judge.scores([pair])[0]))
                advance(1)
    scores_N = {name: np.array(values) for name, values in scores.items()}
    ratings_N, authors_N = np.array(ratings), np.array(authors)
    of_prompt = [np.flatnonzero(np.array(prompts) == prompt) for prompt in dict.fromkeys(prompts)]
    draws = list(group_draws(of_prompt, np.random.default_rng(0)))
    statistics = {
        name: np.array([correlations(values_N[draw], ratings_N[draw], authors_N[draw]) for draw in draws])
        for name, values_N in scores_N.items()
    }
    differences = {
        (judge.name, name): statistics[judge.name] - statistics[name] for judge in options.judge for name in BASELINES
    }
    num_authors = len(set(authors))
    title = f"{options.rated.name}: {len(texts)} texts, {len(of_prompt)} prompts, {num_authors} authors or models"
    shown, lower = table(title, "", *MEASURES), {}
    for name, values in (*statistics.items(), *differences.items()):
        low, high = np.nanquantile(values[1:], (TAIL, 1 - TAIL), axis=0)
        lower[name] = low[[0, 2]]
        cells = (f"{v:+.2f} ({a:+.2f} to {b:+.2f})" for v, a, b in zip(values[0], low, high, strict=True))
        shown.add_row(name if isinstance(name, str) else " − ".join(name), *cells)
    wide_console().print(shown)
    beats = any(all((lower[judge.name, name] > 0).all() for name in BASELINES) for judge in options.judge)
    print(f"a judge beats both baselines: {'yes' if beats else 'no'}")
    finish([] if beats else ["no judge beats both baselines"])


if __name__ == "__main__":
    main()
