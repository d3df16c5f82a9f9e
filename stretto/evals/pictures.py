"""The pictures of a report, in the order of its page; each says by itself when it cannot be drawn."""

from __future__ import annotations

from stretto.evals import captions, maps, pareto, plots
from stretto.evals.page import Picture
from stretto.evals.report_data import ReportData


def pictures() -> tuple[Picture[ReportData], ...]:
    """All pictures, in the order of the page."""
    return (
        Picture(
            "loss_compute",
            "Loss against compute",
            "Scatter plot of held-out loss over forward FLOPs per token, one mark for each size, zero-shot and healed.",
            lambda data: None if _is_evaluated(data) else "No size was evaluated.",
            plots.loss_against_compute,
            captions.compute_caption,
        ),
        Picture(
            "pareto_front",
            "The search",
            "Scatter plot of the search's candidates: loss over total parameters, coloured by latency, sized by active parameters.",
            lambda data: None if data.search is not None and data.search.points else "No search was run.",
            pareto.pareto_front,
            captions.search_caption,
        ),
        Picture(
            "kept",
            "What was kept",
            "Grid of layers by experts; filled cells are kept by the chosen sub-model.",
            lambda data: None if data.kept is not None else "No sub-model was chosen, so nothing was dropped.",
            maps.kept_grid,
            captions.kept_caption,
        ),
        Picture(
            "expert_load",
            "Expert load",
            "Heat map of the share of tokens routed to each expert of each layer, relative to perfect balance.",
            lambda data: None if data.loads else "Expert load was not measured.",
            maps.expert_load,
            captions.load_caption,
        ),
        Picture(
            "training_curves",
            "Training",
            "Line plot of held-out loss over training, one line for the full network and each anchor, healing beside it.",
            lambda data: None if _has_curves(data) else "No held-out loss was logged during training.",
            plots.training_curves,
            captions.curves_caption,
        ),
        Picture(
            "cost",
            "Cost",
            "Stacked bars of the FLOPs of each stage, with and without the parent.",
            lambda data: None if data.ledger is not None or data.family is not None else "No cost was measured.",
            maps.cost_bars,
            captions.cost_caption,
        ),
    )


def _is_evaluated(data: ReportData) -> bool:
    return any(size.nll is not None or size.healed_nll is not None for size in data.sizes)


def _has_curves(data: ReportData) -> bool:
    return any(curve is not None and curve.held_out() for curve in (data.pretraining, *data.healing))
