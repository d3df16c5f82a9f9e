"""The report and the ledger: gather what a run left in its folder, and hand it to `stretto.report`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rich
import torch

from stretto.apps.run import read_info, read_samples
from stretto.apps.search import LATENCY_FILE, read_search
from stretto.apps.train import held_out
from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder, read_json
from stretto.base.records import Alone, Family, Lineage, family, git_commit, history, ledger, read_lineage
from stretto.base.track import progress, read_metrics
from stretto.evals.loss import EvalBatch, evaluate, evaluate_many
from stretto.evals.routing import routing
from stretto.model.checkpoint import Checkpoint, read_checkpoint, read_config
from stretto.model.parallel import device_name, join
from stretto.model.spec import ModelConfig, Subnet, count, named_subnets
from stretto.report.cost import family_sentence, family_table, ledger_table
from stretto.report.page import write_page
from stretto.report.search import Kept, Load
from stretto.report.training import Curve, ReportData, Size, headline, report_page, size_table
from stretto.search.latency import LatencyTable
from stretto.train.recipe import ElasticConfig, ElasticizeRecipe, MixtureConfig, Recipe

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
    page = write_page(report_page(data), run)
    if not quiet:
        rich.print(headline(data), size_table(data))
        if data.ledger is not None:
            rich.print(ledger_table(data.ledger))
        if data.family is not None:
            rich.print(family_table(data.family))
    return page


def cost_command(folders: Sequence[Path]) -> None:
    """Print the ledger of one model, or of several together as a family."""
    models = [(checkpoint_folder(folder), read_lineage(checkpoint_folder(folder))) for folder in folders]
    for _, lineage in models:
        rich.print(ledger_table(ledger(lineage)))
    found = _family(models)
    if found is not None:
        rich.print(family_table(found), family_sentence(found))


def gather(run: Path) -> ReportData:
    """Everything the run folder holds, evaluated on the run's held-out data where need be."""
    info = read_info(run)
    if not isinstance(info.recipe, Recipe | ElasticizeRecipe):
        raise UserError(
            f"{run}: a {info.stage} run; name the folder of the pre-training run, or `stretto elasticize` it"
        )
    recipe, ranks = info.recipe, join("auto")
    checkpoint = read_checkpoint(checkpoint_folder(run), device=ranks.device)
    config, lineage = checkpoint.config, checkpoint.lineage
    subnets = named_subnets(config, checkpoint.presets)
    batches = held_out(info, recipe.train, ranks)
    search = found.result if (found := read_search(run)) else None
    shown = {"full": subnets["full"]}
    if search is not None:
        name = search.chosen.name or "best"
        subnets.setdefault(name, search.chosen.subnet)
        shown[name] = subnets[name]
    models = _models(run, lineage)
    healed = _find_healed(models, batches, str(ranks.device))
    # of one Subnet only its healed form counts in the family, which includes the cost of cutting it out
    used = {parent.run_id for _, each in models for parent in each.parents}
    last = [(folder, each) for folder, each in reversed(models) if each.parents and each.run_id not in used]
    newest = healed[-1].lineage if healed else lineage
    # as the ledger counts them: padding is no token
    num_tokens = lineage.receipt.tokens if lineage else recipe.train.steps * recipe.train.rows * recipe.train.seq_len
    mixture = lineage.config.get("mixture", {}) if lineage else {}
    total = sum(mixture.values()) or 1
    return ReportData(
        name=run.name,
        sizes=_sizes(run, checkpoint, subnets, batches, recipe.train.seq_len, healed),
        shape=(
            f"{config.num_layers} layers, hidden {config.hidden_size}, vocabulary {config.vocab_size:,}",
            f"{config.num_experts} experts of width {config.expert_intermediate_size}, top-{config.top_k}, {config.router} router",
            f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads of {config.head_dim}",
        ),
        environment=f"{device_name(ranks.device)}, torch {torch.__version__}, commit {git_commit() or 'unknown'}",
        samples=_samples(run),
        pretraining=Curve("full", tuple(read_metrics(run)), num_tokens / recipe.train.steps),
        healing=tuple(_healing_curve(each, subnets) for each in healed),
        search=search,
        kept=_kept(config, search.chosen.subnet) if search else None,
        loads=tuple(_load(checkpoint, name, subnet, batches) for name, subnet in shown.items()),
        ledger=ledger(newest) if newest else None,
        family=_family(last),
        mixture_drawn={kind: num / total for kind, num in sorted(mixture.items())},
        mixture_configured=_configured(recipe.elastic),
        recipe=json.dumps(recipe.model_dump(mode="json"), indent=2),
    )


def _samples(run: Path) -> tuple[tuple[str, str, str], ...]:
    """What each size wrote after each prompt, prompt by prompt."""
    samples = read_samples(run)
    prompts = dict.fromkeys(sample.prompt for sample in samples)
    return tuple((each.size, prompt, each.text) for prompt in prompts for each in samples if each.prompt == prompt)


def _sizes(
    run: Path,
    checkpoint: Checkpoint,
    subnets: Mapping[str, Subnet],
    batches: tuple[EvalBatch, ...],
    context: int,
    healed: Sequence[Healed],
) -> tuple[Size, ...]:
    config, path = checkpoint.config, run / LATENCY_FILE
    # as it was measured, also if this process runs on another machine or with other threads
    table = validate(LatencyTable, read_json(path), str(path)) if path.is_file() else None
    with progress("evaluate sizes", len(subnets) * len(batches)) as advance:
        losses = evaluate_many(checkpoint.model, list(subnets.values()), batches, advance=advance)
    sizes = []
    for (name, subnet), report in zip(subnets.items(), losses, strict=True):
        counts = count(config, subnet)
        sizes.append(
            Size(
                name=name,
                label=subnet.label(),
                total_params=counts.total_params,
                active_params=counts.active_params,
                flops_per_token=counts.forward_flops(1, context / 2),
                kv_bytes_per_token=counts.kv_elements * KV_BYTES,
                latency_ms=table.predict_ms(config, subnet, table.timings[0].workload) if table else None,
                nll=report.nll,
                healed_nll=next((each.nll for each in healed if each.subnet == subnet), None),
            )
        )
    return tuple(sizes)


def _models(run: Path, origin: Lineage | None) -> list[tuple[Path, Lineage]]:
    """Those in the run folder, and what was cut from its network and lies beside it; an export of one is the same model."""
    found: dict[str, tuple[Path, Lineage]] = {}
    for path in sorted(run.glob("*/lineage.json")):
        lineage = read_lineage(path.parent)
        found.setdefault(lineage.run_id, (path.parent, lineage))
    if origin is None:
        return list(found.values())
    whole = run.resolve()
    beside = {path for pattern in ("*/lineage.json", "*/*/lineage.json") for path in whole.parent.glob(pattern)}
    for path in sorted(path for path in beside if not path.is_relative_to(whole)):
        lineage = read_lineage(path.parent)
        stems = any(stage.run_id == origin.run_id for stage in history(lineage)[:-1])
        if stems and lineage.stage in ("extract", "heal"):
            found.setdefault(lineage.run_id, (path.parent, lineage))
    return list(found.values())


def _find_healed(models: Sequence[tuple[Path, Lineage]], batches: tuple[EvalBatch, ...], device: str) -> list[Healed]:
    """The healed ones, oldest first."""
    found: list[Healed] = []
    for folder, lineage in models:
        cut = lineage.parents[0].config.get("subnet") if lineage.stage == "heal" and lineage.parents else None
        if cut is not None:
            model = read_checkpoint(folder, device=device).model
            nll = evaluate(model, model.config.full(), batches).nll
            found.append(Healed(folder, lineage, Subnet.model_validate(cut), nll))
    return sorted(found, key=lambda each: each.lineage.created)


def _healing_curve(healed: Healed, subnets: Mapping[str, Subnet]) -> Curve:
    name = next((name for name, subnet in subnets.items() if subnet == healed.subnet), healed.folder.name)
    log = healed.folder.with_name(healed.folder.name + ".run")
    rows = tuple(read_metrics(log)) if (log / "metrics.jsonl").is_file() else ()
    return Curve(name, rows, healed.lineage.receipt.tokens / max((row["step"] for row in rows), default=1))


def _kept(config: ModelConfig, subnet: Subnet) -> Kept:
    experts: list[tuple[bool, ...]] = [()] * config.num_layers
    kept = dict(zip(config.moe_rows(subnet.layers), subnet.experts, strict=True))
    for row, (layer, order) in enumerate(zip(config.moe_layers, config.expert_orders, strict=True)):
        chosen = set(order[: kept.get(row, 0)])
        experts[layer] = tuple(expert in chosen for expert in range(len(order)))
    return Kept(tuple(layer in subnet.layers for layer in range(config.num_layers)), tuple(experts))


def _load(checkpoint: Checkpoint, name: str, subnet: Subnet, batches: tuple[EvalBatch, ...]) -> Load:
    config = checkpoint.config
    kept = _kept(config, subnet)
    by_row = {layer.row: layer.load for layer in routing(checkpoint.model, subnet, batches)}
    shares: list[tuple[float | None, ...]] = []
    for row, layer in enumerate(config.moe_layers):
        load = by_row.get(row, (0,) * config.experts_by_layer[row])
        total = sum(load) or 1
        shares.append(
            tuple(num / total if there else None for num, there in zip(load, kept.experts[layer], strict=True))
        )
    return Load(name, config.moe_layers, tuple(shares))


def _family(models: Sequence[tuple[Path, Lineage]]) -> Family | None:
    """The parent and these sizes, each once, against training each alone on the parent's tokens.

    None where there is no size beside the parent, or not one parent to all of them.
    """
    origins = {stage.run_id: stage for _, lineage in models for stage in history(lineage) if not stage.parents}
    sizes = list({lineage.run_id: (folder, lineage) for folder, lineage in models if lineage.parents}.values())
    origin = next(iter(origins.values()), None)
    recipe = origin.config.get("recipe") if origin else None
    if origin is None or recipe is None or len(origins) > 1 or not sizes:
        return None
    parent = Recipe.model_validate(recipe)
    tokens = parent.train.steps * parent.train.rows * parent.train.seq_len
    shapes = [parent.model, *(read_config(folder) for folder, _ in sizes)]
    alone = [
        Alone(3 * count(shape, shape.full()).forward_flops(tokens, parent.train.seq_len), "computed")
        for shape in shapes
    ]
    return family([origin, *(lineage for _, lineage in sizes)], alone)


def _configured(elastic: MixtureConfig) -> dict[str, float]:
    """Shares of the trained passes as the recipe asks for; empty for samplers whose kinds are not exclusive, and where axes
    join one after another.
    """
    if not isinstance(elastic, ElasticConfig) or elastic.sampler not in ("anchored", "complements"):
        return {}
    shares = dict.fromkeys(elastic.anchors, elastic.anchor_share / max(1, len(elastic.anchors)))
    shares |= {"depth": elastic.depth_share, "top_k": elastic.top_k_share}
    shares = {name: (1.0 - elastic.starts_at) * share for name, share in shares.items()}
    shares["full"] = 1.0 if elastic.joint else 1.0 - sum(shares.values())
    return {name: share / sum(shares.values()) for name, share in shares.items()}
