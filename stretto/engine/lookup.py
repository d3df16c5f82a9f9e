"""Drafts that cost nothing: what followed the last time that the text's newest tokens stood in it. Imports no torch.

Code, quotations and lists repeat themselves, and small networks more so (prompt lookup, Saxena 2023; LLMA, 2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ORDER = 3
"""Tokens that must be equal before the rest is looked at; of two, too many stand together by chance."""


class Match(NamedTuple):
    """An earlier place that ends as the sequence does."""

    length: int
    """Equal tokens, counted up to a limit; 0: there is no such place."""
    start: int
    """Position of what followed them."""


NO_MATCH = Match(0, 0)


class Lookup:
    """Where each run of `ORDER` tokens of one growing sequence stood last."""

    __slots__ = ("_num_read", "_starts")

    def __init__(self) -> None:
        self._starts: dict[tuple[int, ...], int] = {}
        self._num_read = ORDER

    def find(self, tokens: Sequence[int], limit: int) -> Match:
        """The newest earlier place; ``tokens`` are those of the last call and more. Counts ``limit`` equal tokens at most."""
        for start in range(self._num_read, len(tokens)):
            self._starts[tuple(tokens[start - ORDER : start])] = start
        self._num_read = max(ORDER, len(tokens))
        found = self._starts.get(tuple(tokens[-ORDER:]))
        if found is None:
            return NO_MATCH
        length = ORDER
        while length < min(limit, found) and tokens[found - 1 - length] == tokens[-1 - length]:
            length += 1
        return Match(length, found)


def continuation(tokens: Sequence[int], start: int, num: int) -> list[int]:
    """``num`` tokens as they went on from ``start``; where the sequence ends first, it goes on as it repeats itself."""
    found = list(tokens[start : start + num])
    period = len(tokens) - start
    while len(found) < num:
        found.append(found[len(found) - period])
    return found
