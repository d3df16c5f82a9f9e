"""Weighted mixtures: which data set each row comes from, as a function of the seed and the row's position alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.data.shards import TokenSet
from stretto.data.shuffle import key_of

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: multiples of it, modulo 2^64, fill the circle as evenly as any sequence can."""


class Part(Config):
    """One data set of a mixture."""

    name: str
    path: Path
    """A data folder (written by ``tokenise``)."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of the rows, relative to the other parts' weights."""


class Mixture(Config):
    """Data sets and their shares."""

    parts: tuple[Part, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [part.name for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two parts have the name {name!r}; give each its own")
        return self

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(part.weight for part in self.parts)

    def open(self, split: str = "train", verify: bool = False) -> list[TokenSet]:
        """The parts' data.

        Raises:
            UserError: data that is missing or damaged, or parts that another tokenizer encoded.
        """
        opened = [TokenSet(part.path, split, verify) for part in self.parts]
        for part, data in zip(self.parts, opened, strict=True):
            if data.manifest.settings.tokenizer != opened[0].manifest.settings.tokenizer:
                raise UserError(
                    f"{part.path}: encoded with another tokenizer than {self.parts[0].path}; tokenise both with one"
                )
        return opened


def pick_parts(positions: NDArray[np.int64], weights: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Which part gives the row at each of ``positions``.

    A Weyl sequence with a start chosen by ``seed``: after any number of rows every part's share is within a few rows of
    its weight, where independent draws would be off by the square root of the number.
    """
    assert len(weights) > 0 and min(weights) > 0, f"weights {weights}"
    points = np.uint64(key_of(seed, len(weights))) + positions.astype(np.uint64) * _GOLDEN
    borders = np.cumsum(np.asarray(weights, np.float64))
    return np.searchsorted(borders[:-1] / borders[-1], points / 2.0**64, side="right").astype(np.int64)
