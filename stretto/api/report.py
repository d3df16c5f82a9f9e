"""The report and the ledger: gather what a run left in its folder, and hand it to `stretto.report`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich
import torch

from stretto.api.pipeline import last_result
from stretto.api.search import LATENCY_FILE, read_search
from stretto.api.train import held_out
from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, checkpoint_folder, read_json
from stretto.base.records import (
    LINEAGE_FILE,
    Alone,
    Family,
    Lineage,
    distinct,
    family,
    git_commit,
    history,
    ledger,
    parents_of,
    read_lineage,
)
from stretto.base.track import METRICS_FILE, progress, read_metrics, say
from stretto.evals.loss import EvalBatch, evaluate, evaluate_many
from stretto.evals.routing import routing
from stretto.model.checkpoint import Checkpoint, read_checkpoint, read_config
from stretto.model.parallel import device_name, join
from stretto.model.spec import ModelConfig, Subnet, count, named_subnets
from stretto.post.pipeline import EVALUATED
from stretto.report.cost import (
    Control,
    Elasticity,
    adopted_sentence,
    elasticity_sentence,
    family_sentence,
    family_table,
    ledger_table,
)
from stretto.report.evals import comparison_table, read_comparison
from stretto.report.page import write_page
from stretto.report.search import Kept, Load
from stretto.report.training import Curve, ReportData, Size, headline, report_page, size_table
from stretto.subnets.latency import LatencyTable
from stretto.train.recipe import (
    ElasticizeRecipe,
    MixtureConfig,
    Recipe,
    SelfTaughtConfig,
    SftRecipe,
    TrainConfig,
)
from stretto.train.run_folder import POST, read_info, read_samples

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


def report_command(run: Path, quiet: bool = True, controls: Sequence[Path] = ()) -> Path:
    """Write ``report/`` into the run folder; returns the page. Prints the tables unless ``quiet``.

    ``controls``: ordinary runs of the same shape to set it against, beside those found next to it.
    """
    data = gather(run, controls)
    page = write_page(report_page(data), run)
    if not quiet:
        rich.print(headline(data), size_table(data))
        if data.post is not None:
            rich.print(comparison_table(data.post))
        if data.ledger is not None:
            rich.print(ledger_table(data.ledger))
        if data.family is not None:
            rich.print(family_table(data.family))
    return page


def cost_command(folders: Sequence[Path], controls: Sequence[Path] = ()) -> None:
    """Print the ledger of one model, or of several together as a family: each once, however many folders hold it."""
    named = [(checkpoint_folder(folder), read_lineage(checkpoint_folder(folder))) for folder in folders]
    models = list({lineage.run_id: (folder, lineage) for folder, lineage in reversed(named)}.values())[::-1]
    ledgers = [ledger(lineage) for _, lineage in models]
    for (folder, lineage), each in zip(models, ledgers, strict=True):
        rich.print(ledger_table(each))
        for name, adopted in each.adopted:
            say(adopted_sentence(name, adopted))
        if (found := _elasticity(folder, lineage, controls)) is not None:
            say(elasticity_sentence(found))
    family = _family(models)
    if family is not None:
        rich.print(family_table(family))
        say(family_sentence(family))
    elif len(models) > 1 and any(each.adopted for each in ledgers):
        say(
            "What training each of these alone would have cost is not known, as their parent was adopted: they are not"
            " compared with that."
        )


def gather(run: Path, controls: Sequence[Path] = ()) -> ReportData:
    """Everything the run folder holds, evaluated on the run's held-out data where need be."""
    info = read_info(run)
    if not isinstance(info.recipe, Recipe | ElasticizeRecipe | SftRecipe):
        raise UserError(
            f"{run}: made by `stretto {info.stage}`; name the folder of the pre-training run, or `stretto elasticize` it"
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
    commands = [("Serve every size of it, with a page to try them", f"stretto serve {run}")]
    if (made := last_result(run / POST)) is not None:
        newest = read_lineage(made)
        commands.insert(0, ("Serve what post-training made of the small one", f"stretto serve {made}"))
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
        stage=info.stage,
        healing=tuple(_healing_curve(each, subnets) for each in healed),
        search=search,
        kept=_kept(config, search.chosen.subnet) if search else None,
        loads=tuple(_load(checkpoint, name, subnet, batches) for name, subnet in shown.items()),
        ledger=ledger(newest) if newest else None,
        family=_family(last),
        elasticity=_elasticity(checkpoint.folder, lineage, controls) if lineage else None,
        mixture_drawn={kind: num / total for kind, num in sorted(mixture.items())},
        mixture_configured=_configured(recipe.elastic) if recipe.elastic is not None else {},
        post=read_comparison(run / POST / EVALUATED),
        commands=tuple(commands),
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

    None where there is no size beside the parent, not one parent to all of them, or one whose own training nobody measured.
    """
    stages = {stage.run_id: stage for stage in distinct(stage for _, lineage in models for stage in history(lineage))}
    shared = frozenset().union(*(parents_of(lineage) for _, lineage in models))
    sizes = list({lineage.run_id: (folder, lineage) for folder, lineage in models if lineage.parents}.values())
    sizes = [(folder, lineage) for folder, lineage in sizes if lineage.run_id not in shared]
    origins = [stage for stage in stages.values() if not stage.parents]
    recipes = {run: recipe for run, stage in stages.items() if (recipe := _recipe_of(stage)) is not None}
    if len(origins) != 1 or not sizes or not isinstance(first := recipes.get(origins[0].run_id), Recipe):
        return None
    positions = sum(
        recipe.train.num_positions for run, recipe in recipes.items() if run in shared | {origins[0].run_id}
    )
    shapes = [first.model, *(read_config(folder) for folder, _ in sizes)]
    alone = [Alone(_ordinary_flops(shape, first.train, positions), "computed") for shape in shapes]
    return family([origins[0], *(lineage for _, lineage in sizes)], alone)


def _recipe_of(stage: Lineage) -> Recipe | ElasticizeRecipe | None:
    """What a stage that trains all sizes was told; None for any other."""
    kinds: dict[str, type[Recipe | ElasticizeRecipe]] = {"pretrain": Recipe, "elasticize": ElasticizeRecipe}
    told = stage.config.get("recipe")
    return kinds[stage.stage].model_validate(told) if stage.stage in kinds and told is not None else None


def _ordinary_flops(model: ModelConfig, train: TrainConfig, num_positions: int) -> int:
    """Of training all of ``model``, and nothing else, on so many positions: as `stretto.train.step` counts them."""
    num_passes = 4 if train.recompute else 3
    return num_passes * count(model, model.full()).forward_flops(num_positions, train.seq_len)


def _elasticity(folder: Path, lineage: Lineage, controls: Sequence[Path]) -> Elasticity | None:
    """What it cost that the network of ``folder`` was trained at several sizes; None where it was not.

    Controls are those named, and runs beside it of the same shape and data whose sampler was off. Raises `UserError`: a
    named one is no such run.
    """
    recipe = _recipe_of(lineage)
    if recipe is None or not _is_elastic(recipe) or not recipe.train.num_positions:
        return None
    run, model = folder.parent, recipe.model if isinstance(recipe, Recipe) else read_config(folder)
    beside = [path.parents[1] for path in sorted(run.parent.glob(f"*/{CHECKPOINT}/{LINEAGE_FILE}"))]
    found: dict[str, Control] = {}
    for other in (*controls, *beside):
        ordinary = read_lineage(checkpoint_folder(other))
        told = _recipe_of(ordinary)
        same_shape = isinstance(told, Recipe) and not _is_elastic(told) and _shape(told.model) == _shape(model)
        if other in controls and not same_shape:
            raise UserError(f'{other}: --control: not an ordinary run (sampler "off") of the same shape; leave it out')
        if same_shape and (other in controls or ordinary.data_hash == lineage.data_hash):
            found.setdefault(ordinary.run_id, _control(run, lineage, checkpoint_folder(other).parent, ordinary))
    return Elasticity(
        lineage.receipt.flops, _ordinary_flops(model, recipe.train, recipe.train.num_positions), tuple(found.values())
    )


def _shape(model: ModelConfig) -> dict[str, Any]:
    """``model`` without what only an elastic run changes."""
    return model.model_dump(exclude={"widths", "num_branches", "layer_order", "expert_order"})


def _is_elastic(recipe: Recipe | ElasticizeRecipe) -> bool:
    elastic = recipe.elastic
    shares = elastic.anchor_share, elastic.depth_share, elastic.top_k_share, elastic.width_share
    return any(shares) and getattr(elastic, "sampler", "anchored") != "off"


def _control(run: Path, lineage: Lineage, other: Path, ordinary: Lineage) -> Control:
    ours, theirs = lineage.receipt, ordinary.receipt
    losses = [_last_loss(each) for each in (run, other)] if lineage.data_hash == ordinary.data_hash else [None]
    known = [loss for loss in losses if loss is not None]
    return Control(
        name=other.name,
        tokens_ratio=ours.tokens / max(1, theirs.tokens),
        flops_ratio=ours.flops / max(1, theirs.flops),
        loss_difference=known[0] - known[1] if len(known) == 2 else None,
    )


def _last_loss(run: Path) -> float | None:
    """The full network's held-out loss at the end of a run."""
    rows = read_metrics(run) if (run / METRICS_FILE).is_file() else []
    return next((row["loss/full"] for row in reversed(list(rows)) if "loss/full" in row), None)


def _configured(elastic: MixtureConfig) -> dict[str, float]:
    """Shares of the trained passes as the recipe asks for; empty for samplers whose kinds are not exclusive, and where axes
    join one after another.
    """
    if not isinstance(elastic, SelfTaughtConfig) or elastic.sampler not in ("anchored", "complements"):
        return {}
    shares = dict.fromkeys(elastic.anchors, elastic.anchor_share / max(1, len(elastic.anchors)))
    shares |= {"depth": elastic.depth_share, "top_k": elastic.top_k_share}
    shares = {name: (1.0 - elastic.starts_at) * share for name, share in shares.items()}
    shares["full"] = 1.0 if elastic.joint else 1.0 - sum(shares.values())
    return {name: share / sum(shares.values()) for name, share in shares.items()}
