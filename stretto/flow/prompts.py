"""Order of the prompts of a reinforcement-learning run.

The problem of each ordinal is a pure function of the recipe, so that any process of any attempt computes the same one. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import UserError
from stretto.base.trajectory import Task
from stretto.data.loader import key_of, permute
from stretto.learning.recipe import RlRecipe

# A source without end has at least 2^24 problems: a quarter for the run, a quarter for supervised training, half held out.
SUPERVISED = 1 << 22
"""First ordinal of supervised training before the run; the run's own ordinals are smaller."""
_HELD_OUT = 1 << 23
"""First held-out item of a source without end."""
_SOURCE, _SAMPLE, _HELD_OUT_SAMPLE, _ORDER = 1, 2, 3, 4
"""Purposes of random numbers, mixed into the seed."""
_DECK = 64
"""Ordinals per deck. Within a deck each source appears by its weight, up to one occurrence that moves to the next deck."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The endless list of prompts of a run, and the held-out ones. Made by `plan_prompts`.

    The number of occurrences of a source before an ordinal must be known without enumerating all earlier ordinals. So sources
    are dealt in shuffled decks: before the end of deck d, each has come ⌊64·d·its share⌋ times.
    """

    names: tuple[str, ...]
    shares: tuple[float, ...]
    """Shares of the sources, with sum 1."""
    sizes: tuple[int | None, ...]
    """Number of training items of each source; None: no end."""
    group: int
    max_tokens: int
    seed: int

    def task(self, ordinal: int) -> Task:
        """The task of ``ordinal``. Its source is drawn by weight; items do not repeat before a source is used up, then they are
        shuffled again."""
        phase, number = divmod(ordinal, SUPERVISED)  # supervised training has epochs of its own
        place, num_before = self._dealt(phase, number)
        item, size = ordinal, self.sizes[place]
        if size is not None:
            epoch, within = divmod(num_before, size)
            order = key_of(self.seed, _ORDER, phase, place, epoch)
            item = int(permute(np.array([within], np.int64), size, order)[0])
        return self._task(ordinal, place, item, self.group, _SAMPLE)

    def held_out(self, number: int) -> Task:
        """Held-out problem ``number``, with one sample; the sources take turns. Its ordinal is negative."""
        place = number % len(self.names)
        size, within = self.sizes[place], number // len(self.names)
        item = (_HELD_OUT if size is None else size) + within
        return self._task(-1 - number, place, item, 1, _HELD_OUT_SAMPLE)

    def _dealt(self, phase: int, number: int) -> tuple[int, int]:
        """Index of the source of prompt ``number`` of a phase, and how often the source came before."""
        deck = number // _DECK  # the deck starts there, or up to one ordinal per source earlier
        while sum(self._before(deck + 1)) <= number:
            deck += 1
        before = self._before(deck)
        nums = tuple(after - earlier for after, earlier in zip(self._before(deck + 1), before, strict=True))
        dealt = _shuffled(nums, self.seed, phase, deck)
        at = number - sum(before)
        place = int(dealt[at])
        return place, before[place] + int((dealt[:at] == place).sum())

    def _before(self, deck: int) -> list[int]:
        """Occurrences of each source before a deck."""
        return [int(deck * _DECK * share) for share in self.shares]

    def _task(self, ordinal: int, place: int, item: int, group: int, purpose: int) -> Task:
        seed = key_of(self.seed, purpose, ordinal) >> 1
        return Task(ordinal, self.names[place], item, group, seed, self.max_tokens)


@lru_cache(maxsize=16)
def _shuffled(nums: tuple[int, ...], seed: int, phase: int, deck: int) -> NDArray[np.int64]:
    """Indices of the sources of a deck in which they come ``nums`` times. Consecutive prompts are of the same deck."""
    cards = np.repeat(np.arange(len(nums)), nums)
    return cards[permute(np.arange(len(cards)), len(cards), key_of(seed, _SOURCE, phase, deck))]


def plan_prompts(recipe: RlRecipe, num_items: Mapping[str, int | None]) -> Prompts:
    """The prompts of ``recipe``. The last items of each finite source are held out.
    Raises UserError: a source has too few problems to hold some out."""
    names, sizes = tuple(recipe.sources), list[int | None]()
    for name in names:
        size = num_items[name]
        num_held_out = max(-(-recipe.train.eval_prompts // len(names)), recipe.sources[name].held_out)
        if size is not None and size <= num_held_out:
            raise UserError(
                f"sources.{name}: has {size} problems, and {num_held_out} are held out; lower train.eval_prompts and its held_out"
            )
        sizes.append(None if size is None else size - num_held_out)
    total = sum(source.weight for source in recipe.sources.values())
    shares = tuple(source.weight / total for source in recipe.sources.values())
    return Prompts(names, shares, tuple(sizes), recipe.rollout.group, recipe.rollout.max_tokens, recipe.train.seed)
