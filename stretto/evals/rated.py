"""Readers' ratings of texts: reading them, a head that learns to predict them, and its correlation on authors that it has not read.

Ratings of one kind of text do not carry over to another, so a head's record says what it was trained on, and its correlation stands beside
the length and the compression of a text, which cost nothing.

Shape letters: N texts, D hidden, R draws of the bootstrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import scipy  # its parts are imported when they are used: stats takes most of a second
import torch
from pydantic import Field
from torch import Tensor

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.records import file_sha256
from stretto.data.sources import read_rows
from stretto.evals.scores import TAIL, Interval, group_draws
from stretto.text.similar import compression, words

CRITERIA: Final = ("Relevance", "Coherence", "Empathy", "Surprise", "Engagement", "Complexity")
"""Ratings of a record of HANNA's annotations (https://github.com/dig-team/hanna-benchmark-asg); the rating is their mean."""
MIN_TEXTS, MIN_AUTHORS = 100, 5
"""Smallest numbers of rated texts and of their authors; with fewer, the interval on other authors says nothing (our choice)."""
RATED: Final = "rated"
"""Part of the names of judges that were trained on ratings."""
LIKE_THESE: Final = (
    "ranks texts like those whose ratings it was trained on; on other kinds of text its scores may contradict readers"
)
_FOLDS = 10
_DECAY = 6.0
"""Weight decay divided by the number of texts. Correlation in five folds of 750 rated paragraphs: .29 at 1, .31 at 4 to 10, .30 at 20."""
_MAX_DEVIATIONS = 4.0
"""Standardised states are clipped at this value, so that a text unlike all training texts gets no extreme score."""


@dataclass(frozen=True, slots=True)
class RatedText:
    """Written by `read_rated`."""

    prompt: str
    text: str
    author: str
    """A person or a model."""
    rating: float
    """Mean over the people who rated the text."""


class Ratings(Config):
    """What a judge's head was trained on, and how it ranks texts by authors that it has not read. Written by `measure_ratings`."""

    file: str
    """Name of the file of ratings."""
    sha256: str
    num_texts: int = Field(gt=0)
    num_authors: int = Field(gt=0)
    correlation: Interval
    """Spearman's rank correlation of scores and ratings; all intervals are 95 % bootstrap intervals over authors."""
    above_words: Interval
    """The correlation less that of the number of words."""
    above_zlib: Interval
    """The correlation less that of the zlib ratio."""

    @property
    def is_above(self) -> bool:
        """Whether the scores follow the ratings more closely than length and compression do, intervals included."""
        return min(self.above_words.low, self.above_zlib.low) > 0

    @property
    def scope(self) -> str:
        """What the judge is for, after its name."""
        measured = f"rank correlation with ratings of held-out authors {signed(self.correlation)}"
        if not self.is_above:
            return f"does not follow the ratings of {self.file} more closely than length and compression do ({measured}): do not use it"
        return (
            f"{LIKE_THESE} ({self.file}: {measured}). Check it there with bench/rated_stories.py, or use an LLM judge"
        )


def signed(found: Interval) -> str:
    return f"{found.value:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def read_rated(path: Path) -> list[RatedText]:
    """The texts of JSONL, CSV or Parquet with the fields text, author, rating and optionally prompt, or of HANNA's annotations. Ratings of
    one text by several people are averaged. Raises `UserError`: a missing field, or a rating that is not a finite number."""
    ratings = dict[tuple[str, str, str], list[float]]()
    for number, (record, _) in enumerate(read_rows([path]), 1):
        is_hanna = "Story" in record
        names = ("Prompt", "Story", "Model") if is_hanna else ("prompt", "text", "author")
        values = [record.get(name) for name in (CRITERIA if is_hanna else ("rating",))]
        try:
            rating = float(np.mean([float(value) for value in values]))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            rating = np.nan
        if not np.isfinite(rating) or not all(record.get(name) for name in names[1:]):
            raise UserError(f"{path}: record {number}: needs 'text', 'author' and a number as 'rating'")
        ratings.setdefault((str(record.get(names[0]) or ""), str(record[names[1]]), str(record[names[2]])), []).append(
            rating
        )
    return [RatedText(*key, float(np.mean(each))) for key, each in ratings.items()]


@dataclass(frozen=True, slots=True)
class RatingHead:
    """Ridge regression from a text's mean state to its rating. Made by `train_rating_head`."""

    mean_D: Tensor
    scale_D: Tensor
    weight_D: Tensor

    def __call__(self, states_ND: Tensor) -> Tensor:
        """Scores [N], fp64, in standard deviations of the scores of the training texts."""
        return _standardised(states_ND, self.mean_D, self.scale_D).double() @ self.weight_D.double()


def _standardised(states_ND: Tensor, mean_D: Tensor, scale_D: Tensor) -> Tensor:
    return ((states_ND - mean_D) / scale_D).clamp(-_MAX_DEVIATIONS, _MAX_DEVIATIONS)


def train_rating_head(states_ND: Tensor, ratings_N: Tensor) -> RatingHead:
    """Fit the ratings by ridge regression. Raises `UserError`: all ratings are equal."""
    mean_D, scale_D = states_ND.mean(0), states_ND.std(0).clamp_min(1e-6)
    units_ND = _standardised(states_ND, mean_D, scale_D).double()
    gram_DD = units_ND.T @ units_ND + _DECAY * len(units_ND) * torch.eye(units_ND.shape[1], dtype=torch.float64)
    weight_D = torch.linalg.solve(gram_DD, units_ND.T @ (ratings_N - ratings_N.mean()).double())
    spread = (units_ND @ weight_D).std()
    if spread <= 1e-9:
        raise UserError("--rated: all ratings are equal; there is nothing to learn")
    return RatingHead(mean_D, scale_D, (weight_D / spread).float())


def measure_ratings(path: Path, rated: Sequence[RatedText], states_ND: Tensor) -> Ratings:
    """Train heads without a tenth of the authors each, and correlate their scores of that tenth's texts with the ratings.

    Raises:
        UserError: too few texts or authors.
    """
    authors = sorted({each.author for each in rated})
    if len(rated) < MIN_TEXTS or len(authors) < MIN_AUTHORS:
        needed = f"at least {MIN_TEXTS} texts by {MIN_AUTHORS} authors are needed"
        raise UserError(f"--rated {path}: {len(rated)} texts by {len(authors)} authors; {needed}; add rated texts")
    rng = np.random.default_rng(0)
    place = dict(zip(authors, rng.permutation(len(authors)).tolist(), strict=True))
    fold_N = np.array([place[each.author] % _FOLDS for each in rated])
    ratings_N = np.array([each.rating for each in rated])
    score_N = np.zeros(len(rated))
    for fold in np.unique(fold_N):
        kept = torch.from_numpy(fold_N != fold)
        head = train_rating_head(states_ND[kept], torch.from_numpy(ratings_N)[kept])
        score_N[fold_N == fold] = head(states_ND[~kept]).numpy()
    values = (
        score_N,
        np.array([len(words(each.text)) for each in rated]),
        np.array([compression(each.text) for each in rated]),
    )
    of_author = [np.flatnonzero([each.author == author for each in rated]) for author in authors]
    draws = group_draws(of_author, rng)
    found = np.array([[_rank_correlation(each[draw], ratings_N[draw]) for each in values] for draw in draws])

    def interval(values_R: np.ndarray) -> Interval:
        low, high = np.quantile(values_R[1:], (TAIL, 1 - TAIL))
        return Interval(float(values_R[0]), float(low), float(high))

    return Ratings(
        file=path.name, sha256=file_sha256(path), num_texts=len(rated), num_authors=len(authors), correlation=interval(found[:, 0]),
        above_words=interval(found[:, 0] - found[:, 1]), above_zlib=interval(found[:, 0] - found[:, 2]),
    )  # fmt: skip


def _rank_correlation(left_N: np.ndarray, right_N: np.ndarray) -> float:
    """Spearman's rank correlation. 0 if all values of one side are equal, as the lengths of texts may be: they rank nothing."""
    if np.ptp(left_N) == 0 or np.ptp(right_N) == 0:
        return 0.0
    return float(scipy.stats.spearmanr(left_N, right_N).statistic)
