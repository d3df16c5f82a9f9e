"""Sentences of a report: each is worked out from the numbers it speaks of and claims nothing that they do not show."""

from __future__ import annotations

import math

from stretto.evals import numbers, pareto
from stretto.evals.ledger import family_sentence
from stretto.evals.report_data import ReportData, Size


def headline(data: ReportData) -> str:
    """The run in a sentence or two."""
    full, others = data.full, data.sizes[1:]
    text = f"One network of {numbers.params(full.total_params)} parameters, {numbers.params(full.active_params)} active"
    text += f", and {numbers.counted(len(others), 'smaller size')} inside it." if others else "."
    small = min(others, key=lambda size: size.total_params, default=None)
    if small is None or full.nll is None:
        return text
    share = f"The smallest, {small.name}, keeps {numbers.percent(small.total_params / full.total_params)} of them"
    share += f" and {numbers.percent(small.active_params / full.active_params)} of the active ones"
    if small.healed_nll is not None:
        return (
            f"{text} {share}; healed, its held-out loss lies {_beside(small.healed_nll, full.nll)} the full network's."
        )
    if small.nll is not None:
        return f"{text} {share}; its held-out loss lies {_beside(small.nll, full.nll)} the full network's."
    return f"{text} {share}."


def compute_caption(data: ReportData) -> str:
    known = [(size, nll) for size in data.sizes if (nll := _best(size)) is not None]
    low, high = min(known, key=lambda pair: pair[1]), max(known, key=lambda pair: pair[1])
    if len(known) == 1:
        text = f"{low[0].name} reaches {numbers.loss(low[1])} nats per token."
    else:
        text = (
            f"From {low[0].name} at {numbers.loss(low[1])} to {high[0].name} at {numbers.loss(high[1])} nats per token, "
            f"for {numbers.percent(high[0].flops_per_token / low[0].flops_per_token)} of its FLOPs."
        )
    healed = [size for size in data.sizes if size.nll is not None and size.healed_nll is not None]
    if healed:
        changes = [f"{size.name} by {_change(size)}" for size in healed]
        text += f" Healing moves {numbers.listed(changes)}."
    by_name = {size.name: size for size in data.sizes}
    for control in data.controls:
        size = by_name.get(control.name)
        nll = None if size is None else _best(size)
        if nll is not None:
            how = "Healed" if size is not None and size.healed_nll is not None else "Zero-shot"
            text += f" {how}, {control.name} lies {_beside(nll, control.nll)} the same shape trained from scratch."
    return text


def search_caption(data: ReportData) -> str:
    search = data.search
    assert search is not None
    within = sum(point.within for point in search.points)
    asked = pareto.limits(search)
    meeting = f"{within:,} of those meet the limits ({', '.join(asked)})" if asked else "no limit was set"
    text = (
        f"{search.num_predicted:,} candidates were predicted and {len(search.points):,} evaluated; {meeting}, "
        f"and {sum(point.on_front for point in search.points):,} are on the front."
    )
    best = search.chosen
    if best is not None:
        latency = "" if best.latency_ms is None else f", {numbers.milliseconds(best.latency_ms)} a step"
        text += (
            f" The chosen one has {numbers.params(best.total_params)} parameters, "
            f"{numbers.params(best.active_params)} active{latency}, at loss {numbers.loss(best.nll)}."
        )
    ranks = {
        "predicted and evaluated loss": search.predicted_true,
        "the same within the limits": search.predicted_true_within,
        "loss before and after healing": search.before_after_healing,
    }
    known = [f"{name} {value:.2f}" for name, value in ranks.items() if value is not None]
    return text + (f" Rank correlation: {', '.join(known)}." if known else " Too few to rank prediction against truth.")


def kept_caption(data: ReportData) -> str:
    kept = data.kept
    assert kept is not None
    text = f"{sum(kept.layers)} of {numbers.counted(len(kept.layers), 'layer')} are kept"
    dropped = [str(layer) for layer, is_kept in enumerate(kept.layers) if not is_kept]
    if dropped:
        text += f" ({'layer' if len(dropped) == 1 else 'layers'} {numbers.listed(dropped)} dropped)"
    rows = [row for row, is_kept in zip(kept.experts, kept.layers, strict=True) if is_kept and row]
    if rows:
        counts = sorted({sum(row) for row in rows})
        span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        text += f", with {span} of {max(map(len, rows))} experts in each MoE layer that stays"
    return text + "."


def load_caption(data: ReportData) -> str:
    parts = []
    for load in data.loads:
        values = [value for row in load.relative for value in row if not math.isnan(value)]
        if values:
            unused = sum(value == 0 for value in values)
            idle = f"{numbers.counted(unused, 'expert')} never chosen" if unused else "every expert used"
            parts.append(f"in {load.name} {max(values):.2f}× ({idle})")
    return f"Tokens of the busiest expert over an even share: {numbers.listed(parts)}."


def cost_caption(data: ReportData) -> str:
    text = []
    ledger = data.ledger
    if ledger is not None:
        alone, whole = ledger.alone.flops, ledger.with_parents.flops
        if any(row.role == "parent" for row in ledger.rows):
            share = f", {numbers.percent(alone / whole)} of it" if whole else ""
            text.append(
                f"With its parent this model cost {numbers.si(whole, 'FLOPs')}; what came after the parent cost "
                f"{numbers.si(alone, 'FLOPs')}{share}."
            )
        else:
            text.append(f"This model cost {numbers.si(alone, 'FLOPs')}; it has no parent.")
    if data.family is not None:
        text.append(family_sentence(data.family))
    return " ".join(text)


def curves_caption(data: ReportData) -> str:
    text = []
    curve = data.pretraining
    if curve is not None and curve.held_out():
        ends = [f"{name} {numbers.loss(curve.series(f'loss/{name}')[1][-1])}" for name in curve.held_out()]
        at = curve.series(f"loss/{curve.held_out()[0]}")[0][-1]
        unit = "steps" if curve.tokens_per_step is None else "tokens"
        text.append(f"Held-out loss after {numbers.si(at)} {unit} of pre-training: {', '.join(ends)}.")
    for healing in data.healing:
        _, values = healing.series("loss/full")
        if values:
            first = f"from {numbers.loss(values[0])} at its first evaluation to " if len(values) > 1 else "to "
            text.append(f"Healing takes {healing.name} {first}{numbers.loss(values[-1])}.")
    return " ".join(text)


def remarks(data: ReportData) -> list[str]:
    """What the table of sizes leaves open, in plain sentences."""
    found = []
    if all(size.latency_ms is None for size in data.sizes):
        found.append("Latency was not measured.")
    if all(size.healed_nll is None for size in data.sizes):
        found.append("No size was healed.")
    if len(data.sizes) > 1 and data.full.nll is not None:
        found.append("Small figures: share of the full network, and difference to its loss.")
    return found


def _best(size: Size) -> float | None:
    return size.nll if size.healed_nll is None else size.healed_nll


def _change(size: Size) -> str:
    assert size.nll is not None and size.healed_nll is not None
    return numbers.difference(size.healed_nll - size.nll)


def _beside(nll: float, other: float) -> str:
    """``0.031 nats above``, ``0.004 nats below``; rounded as shown, so that a tie reads as one."""
    gap = round(nll - other, 3)
    return "level with" if gap == 0 else f"{abs(gap):.3f} nats {'above' if gap > 0 else 'below'}"
