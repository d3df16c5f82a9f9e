"""Measure what a stage costs (`Meter`) and add receipts up along a lineage (`ledger`, `family`).

Every cost is stated twice: for a model alone, meaning all stages after the network it was cut from, and with that
parent. Only what a receipt holds counts as measured; an estimate handed in is marked as computed.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from types import TracebackType
from typing import Any, Literal, Self

from stretto.base.records import Lineage, Receipt

Basis = Literal["measured", "computed"]


class Meter:
    """Accumulates the cost of one stage; the clock runs inside ``with meter:``, which may be entered again and again."""

    def __init__(
        self,
        stage: str,
        device: str,
        num_devices: int = 1,
        spent: Receipt | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start at zero, or at ``spent``: what the stage had cost when the snapshot it resumes from was written."""
        self._total = Receipt(stage=stage, device=device, num_devices=num_devices)
        if spent is not None:
            assert spent.stage == stage, f"a {stage} stage cannot go on from the receipt of {spent.stage}"
            self._total = self._total + spent
        self._num_devices = num_devices
        self._clock = clock
        self._entered: float | None = None

    def add(self, **work: float) -> None:
        """Count work done, over all devices: fields of `Receipt`, in their units."""
        self._total += self._spent(**work)

    def receipt(self, peak_memory_bytes: int | None = None) -> Receipt:
        """The cost so far; may be called at any time, so that a snapshot can carry it.

        Args:
            peak_memory_bytes: the accelerator's peak, as its runtime counts it. None: this process's largest resident
                memory since it started, which may include an earlier stage of the same process.
        """
        peak = process_peak_bytes() if peak_memory_bytes is None else peak_memory_bytes
        total = self._total if self._entered is None else self._total + self._running()
        return total.replace(peak_memory_bytes=max(total.peak_memory_bytes, peak))

    def __enter__(self) -> Self:
        assert self._entered is None, "this meter is already running"
        self._entered = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._total += self._running()
        self._entered = None

    def _running(self) -> Receipt:
        """Time since the clock was started."""
        assert self._entered is not None, "this meter is not running"
        wall_s = self._clock() - self._entered
        return self._spent(wall_s=wall_s, device_s=wall_s * self._num_devices)

    def _spent(self, **work: Any) -> Receipt:
        return Receipt(stage=self._total.stage, device=self._total.device, **work)


def process_peak_bytes() -> int:
    """Largest resident memory of this process since it started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One stage in a model's history."""

    name: str
    """Name of its run folder."""
    role: Literal["parent", "own"]
    """``parent``: a network others may be cut from as well; ``own``: every stage after it."""
    receipt: Receipt
    """Cost of this stage only, measured."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a model cost, with and without its parent."""

    rows: tuple[LedgerRow, ...]
    """Every stage once, ancestors first."""
    alone: Receipt
    """Sum of the ``own`` stages."""
    with_parents: Receipt
    """Sum of all stages."""


def history(lineage: Lineage) -> tuple[Lineage, ...]:
    """All stages that led to ``lineage``, ancestors first, itself last; a shared ancestor once.

    Two records of one run (the run went on after the first child was cut from it) are one stage: the later record,
    which has more FLOPs, includes the earlier.
    """
    return _distinct(_walk(lineage))


def ledger(lineage: Lineage) -> Ledger:
    """Cost of ``lineage`` alone and with its parents.

    The parents are the stages that started from no checkpoint. A model trained from scratch has none: all is its own.
    """
    stages = history(lineage)
    has_parents = len(stages) > 1
    rows = tuple(
        LedgerRow(stage.name, "parent" if has_parents and not stage.parents else "own", stage.receipt)
        for stage in stages
    )
    return Ledger(
        rows=rows,
        alone=_total(row.receipt for row in rows if row.role == "own"),
        with_parents=_total(row.receipt for row in rows),
    )


@dataclass(frozen=True, slots=True)
class Alone:
    """Cost of training one size by itself."""

    flops: int
    basis: Basis
    """``computed`` from shape and tokens, or ``measured`` by the receipt of a control that was run."""


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """One size of a family."""

    name: str
    own_flops: int
    """FLOPs after the parents, measured; a stage that sizes share counts with the first of them."""
    alone: Alone


@dataclass(frozen=True, slots=True)
class Family:
    """Several sizes out of one parent, against training each alone."""

    rows: tuple[FamilyRow, ...]
    """In the order given."""
    parent_flops: int
    """FLOPs of the parents, each once; measured."""
    basis: Basis
    """``measured`` only if every cost of training alone is."""

    @property
    def family_flops(self) -> int:
        return self.parent_flops + sum(row.own_flops for row in self.rows)

    @property
    def alone_flops(self) -> int:
        return sum(row.alone.flops for row in self.rows)

    @property
    def share_of_alone(self) -> float:
        """Cost of the family over the cost of training every size alone."""
        return self.family_flops / self.alone_flops

    @property
    def share_of_largest(self) -> float:
        """Cost of the family over the cost of training its dearest size alone."""
        return self.family_flops / max(row.alone.flops for row in self.rows)

    @property
    def break_even(self) -> int | None:
        """Number of sizes from which the family is the cheaper way; None if it never is.

        Computed for sizes that cost what these cost on average.
        """
        return break_even(self.parent_flops, sum(row.own_flops for row in self.rows), self.alone_flops, len(self.rows))


def family(members: Sequence[Lineage], alone: Sequence[Alone]) -> Family:
    """Add up sizes out of one parent; ``alone[i]`` is what training ``members[i]`` by itself costs.

    The parent may be a member too (the full network, used as it is): it then costs nothing beyond being the parent.
    """
    assert members and len(members) == len(alone), f"{len(members)} members, {len(alone)} costs of training alone"
    stages = _distinct(stage for member in members for stage in _walk(member))
    cost = {stage.run_id: stage.receipt.flops for stage in stages}
    parents = {stage.run_id for stage in stages if not stage.parents}
    counted = set(parents)
    rows = []
    for member, by_itself in zip(members, alone, strict=True):
        own = {stage.run_id for stage in _walk(member)} - counted
        counted |= own
        rows.append(FamilyRow(member.name, sum(cost[run] for run in own), by_itself))
    return Family(
        rows=tuple(rows),
        parent_flops=sum(cost[run] for run in parents),
        basis="measured" if all(each.basis == "measured" for each in alone) else "computed",
    )


def break_even(parent_flops: int, own_flops: int, alone_flops: int, num_sizes: int) -> int | None:
    """Smallest n with ``parent + n * own / num_sizes <= n * alone / num_sizes``; None if there is none.

    ``own_flops`` and ``alone_flops`` are sums over ``num_sizes`` sizes. Exact: integers throughout.
    """
    assert num_sizes > 0, num_sizes
    saved = alone_flops - own_flops
    if saved <= 0:
        return 1 if saved == parent_flops == 0 else None
    return max(1, -(-parent_flops * num_sizes // saved))


def _walk(lineage: Lineage) -> Iterable[Lineage]:
    for parent in lineage.parents:
        yield from _walk(parent)
    yield lineage


def _distinct(stages: Iterable[Lineage]) -> tuple[Lineage, ...]:
    """One record a run, the one with most FLOPs, at the place where the run first appears."""
    latest: dict[str, Lineage] = {}
    for stage in stages:
        known = latest.get(stage.run_id)
        if known is None or stage.receipt.flops > known.receipt.flops:
            latest[stage.run_id] = stage
    return tuple(latest.values())


def _total(receipts: Iterable[Receipt]) -> Receipt:
    return reduce(add, receipts)
