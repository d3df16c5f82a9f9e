"""The report and the ledger: gather what a run left in its folder, and hand it to `stretto.evals.report`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rich
import torch

from stretto.apps.run import read_info
from stretto.apps.shape import LATENCY_FILE, read_search
from stretto.apps.train import held_out
from stretto.apps.write import read_samples
from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder, read_json
from stretto.base.receipt import Alone, Family, family, history, ledger
from stretto.base.records import Lineage, git_commit, read_lineage
from stretto.base.track import progress, read_metrics
from stretto.evals.captions import headline
from stretto.evals.ledger import family_sentence, family_table, ledger_table, summary_table
from stretto.evals.loss import EvalBatch, evaluate, evaluate_many
from stretto.evals.report import write_report
from stretto.evals.report_data import Curve, Kept, Load, ReportData, SearchData, SearchPoint, Size
from stretto.evals.routing import routing
from stretto.model.hub import Checkpoint, read_checkpoint, read_config
from stretto.model.parallel import device_name, join
from stretto.model.spec import ModelConfig, Subnet, count, named_subnets
from stretto.search.frontier import SearchResult
from stretto.search.latency import LatencyTable
from stretto.train.recipe import ElasticConfig, Recipe

KV_BYTES = 2
"""Bytes of a cache element where a model is served: bf16."""


@dataclass(frozen=True, slots=True)
class Healed:
    """A healed descendant of the run's network, found in the run folder."""

    folder: Path
    lineage: Lineage
    subnet: Subnet
    """What was cut out of the run's network."""
    nll: float


def report_command(run: Path, quiet: bool = True) -> Path:
    """Write ``report/`` into the run folder; returns the page. Prints the tables unless ``quiet``."""
    data = gather(run)
    page = write_report(data, run)
    if not quiet:
        rich.print(headline(data))
        rich.print(summary_table(data))
        if data.ledger is not None:
            rich.print(ledger_table(data.ledger))
        if data.family is not None:
            rich.print(family_table(data.family))
    return page


def cost_command(folders: Sequence[Path]) -> None:
    """Print the ledger of one model, or of several together as a family."""
    lineages = [read_lineage(checkpoint_folder(folder)) for folder in folders]
    for lineage in lineages:
        rich.print(ledger_table(ledger(lineage)))
    configs = [read_config(checkpoint_folder(folder)) for folder in folders]
    found = _family(lineages, configs)
    if found is not None:
        rich.print(family_table(found))
        rich.print(family_sentence(found))


def gather(run: Path) -> ReportData:
    """Everything the run folder holds, evaluated on the run's held-out data where need be."""
    info = read_info(run)
    if not isinstance(info.recipe, Recipe):
        raise UserError(f"{run}: a {info.stage} run; name the folder of the pre-training run")
    recipe, ranks = info.recipe, join("auto")
    checkpoint = read_checkpoint(checkpoint_folder(run), device=ranks.device)
    batches = held_out(info, recipe.train, ranks)
    found = read_search(run)
    result = found.result if found else None
    table = _latency(run / LATENCY_FILE)
    healed = _find_healed(run, batches, str(ranks.device))
    subnets = _subnets(checkpoint, result)
    best = result.chosen.name or "best" if result else None
    lineage = checkpoint.lineage
    mixture = lineage.config.get("mixture", {}) if lineage else {}
    total = sum(mixture.values()) or 1
    newest = healed[-1].lineage if healed else lineage
    steps = recipe.train.steps
    return ReportData(
        name=run.name,
        sizes=_sizes(run, checkpoint, subnets, best, healed, batches, table, recipe.train.seq_len),
        shape=_shape(checkpoint.config),
        environment=f"{device_name(ranks.device)}, torch {torch.__version__}, commit {git_commit() or 'unknown'}",
        prompt=next((sample.prompt for sample in read_samples(run)), ""),
        pretraining=Curve("full", tuple(read_metrics(run)), total / steps),
        healing=tuple(_healing_curve(each, subnets) for each in healed),
        search=_search(result, table) if result else None,
        kept=_kept(checkpoint.config, result.chosen.subnet) if result else None,
        loads=_loads(checkpoint, {"full": subnets["full"]} | ({best: subnets[best]} if best else {}), batches),
        ledger=ledger(newest) if newest else None,
        family=_family_of(run),
        mixture_drawn={kind: num / total for kind, num in sorted(mixture.items())},
        mixture_configured=_configured(recipe.elastic),
        recipe=json.dumps(recipe.model_dump(mode="json"), indent=2),
    )


def _latency(path: Path) -> LatencyTable | None:
    """The table as it was measured, also if this process runs on another machine or with other threads."""
    return validate(LatencyTable, read_json(path), str(path)) if path.is_file() else None


def _subnets(checkpoint: Checkpoint, result: SearchResult | None) -> dict[str, Subnet]:
    found = named_subnets(checkpoint.config, checkpoint.presets)
    if result is not None:
        found.setdefault(result.chosen.name or "best", result.chosen.subnet)
    return found


def _sizes(
    run: Path,
    checkpoint: Checkpoint,
    subnets: dict[str, Subnet],
    best: str | None,
    healed: Sequence[Healed],
    batches: tuple[EvalBatch, ...],
    table: LatencyTable | None,
    context: int,
) -> tuple[Size, ...]:
    with progress("evaluate sizes", len(subnets) * len(batches)) as advance:
        losses = evaluate_many(checkpoint.model, list(subnets.values()), batches, advance=advance)
    samples = {sample.size: sample.text for sample in reversed(read_samples(run))}
    if best is not None and "best" in samples:
        samples.setdefault(best, samples["best"])
    sizes = []
    for (name, subnet), report in zip(subnets.items(), losses, strict=True):
        counts = count(checkpoint.config, subnet)
        latency = None
        if table is not None:
            latency = table.predict_ms(checkpoint.config, subnet, table.timings[0].workload)
        sizes.append(
            Size(
                name=name,
                label=subnet.label(),
                total_params=counts.total_params,
                active_params=counts.active_params,
                flops_per_token=counts.forward_flops(1, context / 2),
                kv_bytes_per_token=counts.kv_elements * KV_BYTES,
                latency_ms=latency,
                nll=report.nll,
                healed_nll=next((each.nll for each in healed if each.subnet == subnet), None),
                sample=samples.get(name),
            )
        )
    return tuple(sizes)


def _find_healed(run: Path, batches: tuple[EvalBatch, ...], device: str) -> list[Healed]:
    """Healed checkpoints directly in the run folder, oldest first; an export of one is the same model."""
    found: list[Healed] = []
    for path in sorted(run.glob("*/lineage.json")):
        lineage = read_lineage(path.parent)
        if (
            lineage.stage != "heal"
            or not lineage.parents
            or any(lineage.run_id == each.lineage.run_id for each in found)
        ):
            continue
        cut = lineage.parents[0].config.get("subnet")
        if cut is None:
            continue
        model = read_checkpoint(path.parent, device=device).model
        nll = evaluate(model, model.config.full(), batches).nll
        found.append(Healed(path.parent, lineage, Subnet.model_validate(cut), nll))
    return sorted(found, key=lambda each: each.lineage.created)


def _healing_curve(healed: Healed, subnets: dict[str, Subnet]) -> Curve:
    name = next((name for name, subnet in subnets.items() if subnet == healed.subnet), healed.folder.name)
    log = healed.folder.with_name(healed.folder.name + ".run")
    rows = tuple(read_metrics(log)) if (log / "metrics.jsonl").is_file() else ()
    steps = max((row["step"] for row in rows), default=1)
    return Curve(name, rows, healed.lineage.receipt.tokens / steps)


def _search(result: SearchResult, table: LatencyTable | None) -> SearchData:
    points = tuple(
        SearchPoint(
            total_params=candidate.total_params,
            active_params=candidate.active_params,
            predicted_nll=candidate.predicted_nll,
            nll=candidate.nll,
            latency_ms=candidate.latency_ms,
            healed_nll=candidate.healed_nll,
            name=candidate.name,
            on_front=index in result.front,
            within=candidate.fits(result.limits),
            chosen=candidate.subnet == result.chosen.subnet,
        )
        for index, candidate in enumerate(result.candidates)
        if candidate.nll is not None
    )
    return SearchData(
        points=points,
        num_predicted=result.num_predicted,
        max_total=result.limits.max_total,
        max_active=result.limits.max_active,
        max_latency_ms=result.limits.max_latency_ms,
        workload=result.workload.label() if result.workload else None,
        predicted_true=result.correlations.predicted_true,
        predicted_true_within=result.correlations.predicted_true_within,
        before_after_healing=result.correlations.before_after_healing,
    )


def _kept(config: ModelConfig, subnet: Subnet) -> Kept:
    experts: list[tuple[bool, ...]] = []
    kept_moe = iter(subnet.experts)
    for layer in range(config.num_layers):
        if layer in config.dense_layers:
            experts.append(())
            continue
        row = config.moe_layers.index(layer)
        num = next(kept_moe) if layer in subnet.layers else 0
        chosen = set(config.expert_orders[row][:num])
        experts.append(tuple(expert in chosen for expert in range(config.experts_by_layer[row])))
    return Kept(tuple(layer in subnet.layers for layer in range(config.num_layers)), tuple(experts))


def _loads(checkpoint: Checkpoint, subnets: dict[str, Subnet], batches: tuple[EvalBatch, ...]) -> tuple[Load, ...]:
    config = checkpoint.config
    loads = []
    for name, subnet in subnets.items():
        kept = _kept(config, subnet)
        by_row = {layer.row: layer.load for layer in routing(checkpoint.model, subnet, batches)}
        shares: list[tuple[float | None, ...]] = []
        for row, layer in enumerate(config.moe_layers):
            load = by_row.get(row, (0,) * config.experts_by_layer[row])
            total = sum(load) or 1
            shares.append(
                tuple(num / total if there else None for num, there in zip(load, kept.experts[layer], strict=True))
            )
        loads.append(Load(name, config.moe_layers, tuple(shares)))
    return tuple(loads)


def _family_of(run: Path) -> Family | None:
    """Every model cut out of this run's network that lies in its folder; an export of one is the same model.

    Of one Subnet only its healed form counts, which includes the cost of cutting it out.
    """
    folders = [path.parent for path in sorted(run.glob("*/lineage.json"))]
    found = {folder: read_lineage(folder) for folder in folders}
    used = {parent.run_id for lineage in found.values() for parent in lineage.parents}
    members = {lineage.run_id: folder for folder, lineage in reversed(found.items()) if lineage.run_id not in used}
    descendants = [folder for folder in members.values() if found[folder].parents]
    if not descendants:
        return None
    return _family([found[folder] for folder in descendants], [read_config(folder) for folder in descendants])


def _family(lineages: Sequence[Lineage], configs: Sequence[ModelConfig]) -> Family | None:
    """The parent and these sizes, against training each alone on the parent's tokens; None without a parent."""
    roots = [stage for stage in history(lineages[0]) if not stage.parents]
    recipe = roots[0].config.get("recipe") if roots else None
    if recipe is None or all(not lineage.parents for lineage in lineages):
        return None
    parent = Recipe.model_validate(recipe)
    tokens, length = roots[0].receipt.tokens, parent.train.seq_len
    shapes = [parent.model, *configs]
    alone = [Alone(3 * count(shape, shape.full()).forward_flops(tokens, length), "computed") for shape in shapes]
    return family([roots[0], *lineages], alone)


def _shape(config: ModelConfig) -> tuple[str, ...]:
    return (
        f"{config.num_layers} layers, hidden {config.hidden_size}, vocabulary {config.vocab_size:,}",
        f"{config.num_experts} experts of width {config.expert_intermediate_size}, top-{config.top_k}, {config.router} router",
        f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads of {config.head_dim}",
    )


def _configured(elastic: ElasticConfig) -> dict[str, float]:
    """Shares of the trained passes as the recipe asks for; empty for samplers whose kinds are not exclusive."""
    if elastic.sampler not in ("anchored", "complements"):
        return {}
    shares = dict.fromkeys(elastic.anchors, elastic.anchor_share / max(1, len(elastic.anchors)))
    shares |= {"depth": elastic.depth_share, "top_k": elastic.top_k_share}
    shares = {name: (1.0 - elastic.starts_at) * share for name, share in shares.items()}
    shares["full"] = 1.0 if elastic.joint else 1.0 - sum(shares.values())
    return {name: share / sum(shares.values()) for name, share in shares.items()}
