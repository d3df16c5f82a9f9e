"""Made-up searches: only what a report shows of them."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.model.spec import Subnet
from stretto.subnets.candidate import Candidate, Limits
from stretto.subnets.search import Correlations, SearchOptions, SearchResult
from stretto.subnets.sensitivity import Sensitivities
from stretto.subnets.space import SearchSpace


@dataclass(frozen=True)
class Point:
    """A candidate."""

    total_params: int
    active_params: int
    predicted_nll: float
    nll: float
    latency_ms: float | None = None
    healed_nll: float | None = None
    name: str | None = None
    on_front: bool = False
    chosen: bool = False


def searched(
    points: tuple[Point, ...],
    num_predicted: int,
    max_total: float | None = None,
    max_active: float | None = None,
    max_latency_ms: float | None = None,
    predicted_true: float | None = None,
) -> SearchResult:
    """A search that evaluated ``points``; the first of them is the full network."""
    full = points[0]
    candidates = tuple(
        Candidate(
            subnet=Subnet(layers=(place,), experts=(1,), top_k=(1,)),
            name=point.name,
            total_params=point.total_params,
            active_params=point.active_params,
            total_share=point.total_params / full.total_params,
            active_share=point.active_params / full.active_params,
            latency_ms=point.latency_ms,
            predicted_nll=point.predicted_nll,
            nll=point.nll,
            healed_nll=point.healed_nll,
        )
        for place, point in enumerate(points)
    )
    chosen = next(
        (candidate for candidate, point in zip(candidates, points, strict=True) if point.chosen), candidates[0]
    )
    return SearchResult(
        limits=Limits(max_total=max_total, max_active=max_active, max_latency_ms=max_latency_ms),
        space=SearchSpace(droppable=(1,), experts=(2, 8), top_k=(1, 2)),
        options=SearchOptions(),
        third="active",
        workload=None,
        sensitivities=Sensitivities(full_nll=full.nll, drop={}, depth={}, experts={}, top_k={}),
        num_predicted=num_predicted,
        num_tokens=100,
        candidates=candidates,
        front=tuple(place for place, point in enumerate(points) if point.on_front),
        chosen=chosen,
        correlations=Correlations(predicted_true=predicted_true, predicted_true_within=None, before_after_healing=None),
        wall_s=1.0,
    )
