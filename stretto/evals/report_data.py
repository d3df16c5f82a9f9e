"""What a report shows, as plain records: an app fills them from the files of a run, the report only draws them.

Whatever a run has not done is None or empty, and the report then says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.base.receipt import Family, Ledger


@dataclass(frozen=True, slots=True)
class Size:
    """One sub-model that the report speaks of."""

    name: str
    """Preset or run folder: ``full``, ``corner``…; also the name of its curve in the metrics (``loss/corner``)."""
    label: str
    """Its shape in words (`Subnet.label`)."""
    total_params: int
    active_params: int
    flops_per_token: int
    """Forward FLOPs a token at the context the run trained with."""
    kv_bytes_per_token: int
    """Bytes of cache a token takes in the dtype it is served in."""
    latency_ms: float | None = None
    """Milliseconds a step on this machine, measured; None without a latency table."""
    nll: float | None = None
    """Held-out loss inside the elastic network, never trained on by itself (zero-shot); nats per token."""
    healed_nll: float | None = None
    """Held-out loss on the same tokens after extraction and healing; nats per token."""
    sample: str | None = None
    """Text this size wrote after `ReportData.prompt`."""


@dataclass(frozen=True, slots=True)
class Control:
    """A network of one size's shape, trained from scratch for comparison."""

    name: str
    """Name of the size it is compared with."""
    flops_per_token: int
    """Forward FLOPs a token."""
    nll: float
    """Held-out loss on the same tokens, nats per token."""


@dataclass(frozen=True, slots=True)
class SearchPoint:
    """A candidate that the search evaluated."""

    total_params: int
    active_params: int
    predicted_nll: float
    """Loss if sensitivities added up, nats per token."""
    nll: float
    """Held-out loss as evaluated, nats per token."""
    latency_ms: float | None = None
    """Predicted by the latency table, milliseconds a step."""
    healed_nll: float | None = None
    """Loss after short healing."""
    name: str | None = None
    """Its preset's name, if it is one."""
    on_front: bool = False
    """No other candidate beats it."""
    within: bool = True
    """Meets every limit."""
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class SearchData:
    """What a search looked at and chose."""

    points: tuple[SearchPoint, ...]
    num_predicted: int
    """Candidates whose loss was predicted; the points are those that were evaluated too."""
    max_total: float | None = None
    """Limit on total parameters over the full network's; None set no limit."""
    max_active: float | None = None
    """Limit on active parameters over the full network's."""
    max_latency_ms: float | None = None
    """Limit on milliseconds a step."""
    workload: str | None = None
    """What ``latency_ms`` is a step of, in words."""
    predicted_true: float | None = None
    """Spearman correlation of predicted and evaluated loss; None where it cannot be ranked."""
    predicted_true_within: float | None = None
    """The same among the candidates within the limits."""
    before_after_healing: float | None = None
    """Spearman correlation of evaluated loss and loss after healing."""

    @property
    def chosen(self) -> SearchPoint | None:
        return next((point for point in self.points if point.chosen), None)


@dataclass(frozen=True, slots=True)
class Kept:
    """What the chosen Subnet keeps of the maximum network."""

    layers: tuple[bool, ...]
    """By layer."""
    experts: tuple[tuple[bool, ...], ...]
    """By layer and expert; an empty row is a dense layer, a dropped layer's experts are all False."""

    def __post_init__(self) -> None:
        assert len(self.layers) == len(self.experts), f"{len(self.layers)} layers, {len(self.experts)} rows of experts"


@dataclass(frozen=True, slots=True)
class Load:
    """Where held-out tokens were routed in one size."""

    name: str
    layers: tuple[int, ...]
    """Depth of each row in the maximum network."""
    shares: tuple[tuple[float | None, ...], ...]
    """By MoE layer of the maximum network and expert: share of the layer's routed tokens. None: not in this size."""

    @property
    def relative(self) -> tuple[tuple[float, ...], ...]:
        """Load over that of perfect balance in the experts the layer keeps; NaN where there is no expert."""
        kept = [sum(share is not None for share in row) for row in self.shares]
        return tuple(
            tuple(math.nan if share is None else share * num for share in row)
            for row, num in zip(self.shares, kept, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """The metrics of one training stage."""

    name: str
    """Name of the size that was trained; ``full`` for pre-training."""
    rows: tuple[Mapping[str, float], ...]
    """Rows of ``metrics.jsonl``, each with ``step``."""
    tokens_per_step: float | None = None
    """Tokens a step trained on, on average; None draws the curve over steps."""

    def series(self, metric: str) -> tuple[list[float], list[float]]:
        """Tokens (or steps) and the finite values of ``metric``."""
        scale = self.tokens_per_step or 1.0
        pairs = [
            (row["step"] * scale, row[metric]) for row in self.rows if metric in row and math.isfinite(row[metric])
        ]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def held_out(self) -> tuple[str, ...]:
        """Names with a held-out loss, the full network's first."""
        names = {name.removeprefix("loss/") for row in self.rows for name in row if name.startswith("loss/")}
        found = [name for name in names - {"train"} if self.series(f"loss/{name}")[0]]
        return tuple(sorted(found, key=lambda name: (name != "full", name)))


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything a report shows."""

    name: str
    """Name of the run."""
    sizes: tuple[Size, ...]
    """The full network first."""
    shape: tuple[str, ...] = ()
    """The maximum network in a few short lines."""
    environment: str = ""
    """Device, version of torch, commit."""
    prompt: str = ""
    """What the samples go on from."""
    controls: tuple[Control, ...] = ()
    pretraining: Curve | None = None
    healing: tuple[Curve, ...] = ()
    """One for each size that was healed; its held-out loss is ``loss/full``."""
    search: SearchData | None = None
    kept: Kept | None = None
    loads: tuple[Load, ...] = ()
    """The full network's and, if there is one, the corner's."""
    ledger: Ledger | None = None
    family: Family | None = None
    mixture_drawn: Mapping[str, float] = field(default_factory=dict)
    """Share of the training tokens, by kind, as drawn."""
    mixture_configured: Mapping[str, float] = field(default_factory=dict)
    """The same as the recipe asked for."""
    recipe: str = ""
    """The complete recipe, as text."""

    def __post_init__(self) -> None:
        assert self.sizes, "a report needs at least the full network"

    @property
    def full(self) -> Size:
        return self.sizes[0]
