"""Sampler of Subnets: the Subnet of each micro-batch, drawn from (seed, step), so that every rank and every resumed run draws the same.

Imports no torch. Shape letters: B rows of a micro-batch over all ranks, E experts in nested order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.model.spec import ModelConfig, Subnet, fixed_layers
from stretto.train.recipe import MixtureConfig

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of the golden ratio, modulo one, fill [0, 1) evenly: every stretch of a run has nearly the configured shares."""


@dataclass(frozen=True, slots=True)
class WidthPlan:
    """Experts that each row of a micro-batch may use, over all ranks. Written by the sampler. `stretto.train.step.row_widths` turns a
    rank's rows into `stretto.model.transformer.RowWidths`, which describes the fields.
    """

    branch_B: np.ndarray
    allowed_BE: np.ndarray
    counted_B: np.ndarray


@dataclass(frozen=True, slots=True)
class MicroPlan:
    """Subnet and row widths of one micro-batch. Written by the sampler, read by the step."""

    kind: str
    """Label in the log: ``full``, ``depth``, ``top_k``, ``mixed``, or the name of an anchor."""
    subnet: Subnet
    widths: WidthPlan | None
    is_anchor: bool

    @property
    def num_narrow_rows(self) -> int:
        """Rows, over all ranks, that use fewer experts than the Subnet."""
        return 0 if self.widths is None else int((~self.widths.allowed_BE.all(axis=1)).sum())


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws the micro-batches of a step."""

    config: ModelConfig
    elastic: MixtureConfig
    rows: int
    """Rows of a micro-batch, over all ranks."""
    micro_batches: int
    num_steps: int
    seed: int
    past: int = 0
    """Earlier steps have this step's share of smaller sizes; see `stretto.train.loop.Training`."""

    def draw(self, step: int) -> tuple[MicroPlan, ...]:
        """The plans of ``step`` (0-based), one per micro-batch."""
        return tuple(self._draw_one(step, index) for index in range(self.micro_batches))

    def _draw_one(self, step: int, index: int) -> MicroPlan:
        if self.elastic.sampler == "off":
            return MicroPlan("full", self.config.full(), None, False)
        number = step * self.micro_batches + index
        rng = np.random.default_rng((self.seed, number))
        strength = self._strength(max(step, self.past))
        if self.elastic.sampler == "ernie":
            return self._independent(rng, strength)
        offset = np.random.default_rng(self.seed).random()
        return self._stratified((offset + number * GOLDEN_RATIO) % 1.0, rng, strength)

    def _strength(self, step: int) -> float:
        """Factor on the shares of the mixture at ``step``: it rises from 0 to 1, or falls from ``early_factor`` to 1."""
        elastic = self.elastic
        if elastic.early_factor > 1:
            left = max(0.0, 1.0 - step / (elastic.early_until * self.num_steps))
            return 1.0 + (elastic.early_factor - 1.0) * left
        done = step - round(elastic.starts_at * self.num_steps)
        ramp_steps = elastic.ramp_fraction * self.num_steps
        if done < 0:
            return 0.0
        return min(1.0, (done + 1) / ramp_steps) if ramp_steps > 0 else 1.0

    def _stratified(self, point: float, rng: np.random.Generator, strength: float) -> MicroPlan:
        """An anchor, or one reduced axis; ``point`` in [0, 1) selects the kind by its share."""
        elastic = self.elastic
        anchor_share = elastic.anchor_share * strength if elastic.anchors else 0.0
        if point < anchor_share:
            name = self._anchor(point / anchor_share)
            return MicroPlan(name, elastic.anchors[name].of(self.config), None, True)
        point -= anchor_share
        narrow_share = elastic.width_share * strength / max(1e-9, 1.0 - anchor_share)
        widths = self._widths(rng, narrow_share)
        if point < elastic.depth_share * strength:
            return MicroPlan("depth", self.config.subnet(depth=self._depth(rng)), widths, False)
        point -= elastic.depth_share * strength
        if point < elastic.top_k_share * strength:
            # one draw per layer, at most the layer's full top-k
            full, low = self.config.full(), elastic.min_top_k
            top_k = tuple(int(rng.integers(min(low, k), k + 1)) for k in full.top_k)
            return MicroPlan("top_k", full.replace(top_k=top_k), widths, False)
        return MicroPlan("full", self.config.full(), widths, False)

    def _anchor(self, place: float) -> str:
        """The anchor whose part of [0, 1) has ``place``."""
        parts = self.elastic.anchor_parts()
        for name, part in parts.items():
            if place < part:
                return name
            place -= part
        return list(parts)[-1]  # rounded parts may end before 1

    def _independent(self, rng: np.random.Generator, strength: float) -> MicroPlan:
        """ERNIE 5.0's sampler: every axis is reduced independently, with random subsets of experts (2602.04705)."""
        depth, top_k, narrow = rng.random(3) < np.array((0.25, 0.2, 1.0)) * strength
        subnet = self.config.subnet(depth=self._depth(rng)) if depth else self.config.full()
        if top_k:
            k = int(rng.integers(self.elastic.min_top_k, max(self.config.top_k, self.elastic.min_top_k + 1)))
            subnet = subnet.replace(top_k=tuple(min(k, full) for full in subnet.top_k))
        widths = self._widths(rng, 0.2, at_random=True) if narrow else None
        kind = "mixed" if depth or top_k else "full"
        return MicroPlan(kind, subnet, widths, False)

    def _depth(self, rng: np.random.Generator) -> int:
        """A random depth below the full one that keeps the first and last two layers, if there is one."""
        num_layers = self.config.num_layers
        low = max(self.elastic.min_depth, len(fixed_layers(num_layers)))
        return int(rng.integers(low, max(num_layers, low + 1)))

    def _widths(self, rng: np.random.Generator, share: float, at_random: bool = False) -> WidthPlan | None:
        """Rows narrowed to one of the network's widths: a prefix of the experts, or a random subset. Widths that cannot hold the
        largest top-k of any layer are not used.
        """
        config, branches = self.config, _narrow_branches(self.config)
        narrow_B = rng.random(self.rows) < share
        if not branches or not narrow_B.any():
            return None
        branch_B = np.where(narrow_B, rng.choice(branches, self.rows), 0)
        limit_B1 = np.array(config.widths)[branch_B][:, None]
        if not at_random:
            return WidthPlan(branch_B, np.arange(config.num_experts) < limit_B1, np.ones(self.rows, dtype=bool))
        place_BE = rng.random((self.rows, config.num_experts)).argsort(1).argsort(1)
        # all rows share one balance bias; rows with masked experts would bias its load counts, so they are not counted
        return WidthPlan(np.zeros(self.rows, dtype=np.int64), place_BE < limit_B1, ~narrow_B)


def _narrow_branches(config: ModelConfig) -> list[int]:
    """Branches of the widths below the full one that hold the largest top-k of any layer."""
    top_k = max(config.top_k_by_layer, default=1)
    return [branch for branch in range(1, len(config.widths)) if config.choosable(config.widths[branch]) >= top_k]


def idle_widths(config: ModelConfig, elastic: MixtureConfig) -> str | None:
    """A note for a mixture that asks for rows with fewer experts and can draw none; None: it asks for none, or can draw some.

    The default of ``width_share`` does not ask for them.
    """
    default = MixtureConfig.model_fields["width_share"].default
    asks = elastic.sampler == "ernie" or (elastic.sampler == "anchored" and elastic.width_share not in (0.0, default))
    if not asks or not config.num_moe_layers or _narrow_branches(config):
        return None
    field = "sampler" if elastic.sampler == "ernie" else "width_share"
    return (
        f"elastic.{field}: no row uses fewer experts, because no anchor has fewer than the {config.num_experts} experts and at least as many "
        f"as the top-k of {max(config.top_k_by_layer)}; name one such anchor to train this axis"
    )
