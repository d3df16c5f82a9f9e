"""Which problem an ordinal is: a pure function of the recipe, so that any process of any attempt draws the same one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

import numpy as np

from stretto.base.errors import UserError
from stretto.base.trajectory import Task
from stretto.data.loader import key_of, permute
from stretto.rl.recipe import RlRecipe

# A source without end has at least 2^24 problems: a quarter for the run, a quarter for supervised training, half held out.
SUPERVISED = 1 << 22
"""First ordinal of supervised training before the run; the run's own lie below."""
_HELD_OUT = 1 << 23
"""First held-out item."""


class _Purpose(IntEnum):
    SOURCE = 1
    SAMPLE = 2
    HELD_OUT = 3
    ORDER = 4


@dataclass(frozen=True, slots=True)
class Prompts:
    """The endless list of prompts of a run, and the held-out ones. Made by `plan_prompts`."""

    names: tuple[str, ...]
    cumulative: tuple[float, ...]
    """Shares of the sources, summed up."""
    sizes: tuple[int | None, ...]
    """Items of each source that are trained on; None: no end."""
    group: int
    max_tokens: int
    seed: int

    def task(self, ordinal: int) -> Task:
        """The task of ``ordinal``: its source drawn by weight, its item new until a source is used up, then shuffled anew."""
        place = bisect_right(self.cumulative, key_of(self.seed, _Purpose.SOURCE, ordinal) / 2**64)
        place = min(place, len(self.names) - 1)
        item, size = ordinal, self.sizes[place]
        if size is not None:
            epoch, within = divmod(ordinal, size)
            order = key_of(self.seed, _Purpose.ORDER, place, epoch)
            item = int(permute(np.array([within], np.int64), size, order)[0])
        return self._task(ordinal, place, item, self.group, _Purpose.SAMPLE)

    def held_out(self, number: int) -> Task:
        """Held-out problem ``number``, one sample of it; the sources take turns. Its ordinal is negative."""
        place = number % len(self.names)
        size, within = self.sizes[place], number // len(self.names)
        item = (_HELD_OUT if size is None else size) + within
        return self._task(-1 - number, place, item, 1, _Purpose.HELD_OUT)

    def _task(self, ordinal: int, place: int, item: int, group: int, purpose: _Purpose) -> Task:
        seed = key_of(self.seed, purpose, ordinal) >> 1
        return Task(ordinal, self.names[place], item, group, seed, self.max_tokens)


def plan_prompts(recipe: RlRecipe, num_items: Mapping[str, int | None]) -> Prompts:
    """The prompts of ``recipe``; of each source that ends, the last items are held out.

    Raises:
        UserError: a source has too few problems to hold some out.
    """
    names, sizes = tuple(recipe.sources), list[int | None]()
    num_held_out = -(-recipe.train.eval_prompts // len(names))
    for name in names:
        size = num_items[name]
        if size is not None and size <= num_held_out:
            raise UserError(
                f"sources.{name}: has {size} problems, and {num_held_out} are held out; lower train.eval_prompts"
            )
        sizes.append(None if size is None else size - num_held_out)
    total = sum(source.weight for source in recipe.sources.values())
    cumulative = tuple(accumulate(source.weight / total for source in recipe.sources.values()))
    return Prompts(names, cumulative, tuple(sizes), recipe.rollout.group, recipe.rollout.max_tokens, recipe.train.seed)
