"""`stretto.write_report` and `stretto.cost`, which the commands call: collect the data of run folders for `stretto.report`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.api.arguments import ModelLike, model_path, model_paths
from stretto.api.pipeline import last_result
from stretto.api.search import read_search, warn_if_far_off
from stretto.api.train import held_out
from stretto.base.config import validate
from stretto.base.errors import UserError, user_errors
from stretto.base.paths import CHECKPOINT, LATENCY_FILE, checkpoint_folder, quoted, read_json
from stretto.base.records import (
    LINEAGE_FILE,
    Family,
    Ledger,
    Lineage,
    distinct,
    family,
    git_commit,
    history,
    ledger,
    parents_of,
    read_lineage,
)
from stretto.base.table import Table, Tabled
from stretto.base.track import METRICS_FILE, progress, read_metrics, wide_console
from stretto.evals.loss import EvalBatch, evaluate, evaluate_many
from stretto.evals.routing import routing
from stretto.model.checkpoint import Checkpoint, read_checkpoint, read_config
from stretto.model.counts import count
from stretto.model.parallel import device_name, join
from stretto.model.spec import ModelConfig, Subnet, named_subnets
from stretto.ops.logprob import num_head_tokens
from stretto.post.pipeline import EVALUATED
from stretto.report.comparison import comparison_table, read_comparison
from stretto.report.cost import (
    Control,
    Elasticity,
    adopted_sentence,
    cost_bars,
    elasticity_sentence,
    family_sentence,
    family_table,
    ledger_table,
)
from stretto.report.page import Plot, write_page
from stretto.report.rl import is_rl_run, report_rl_run
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
"""Bytes per element of the KV cache of a served model: bf16."""


@dataclass(frozen=True, slots=True)
class Healed:
    """A healed descendant of the run's network, found in the run folder."""

    folder: Path
    lineage: Lineage
    subnet: Subnet
    """The Subnet that was extracted from the run's network."""
    nll: float
    """Loss on the run's held-out rows, nats per token."""


def report_command(run: Path, quiet: bool = True, controls: Sequence[Path] = ()) -> Path:
    """Write ``report/`` into the run folder and return its page. Prints the tables unless ``quiet``.

    Args:
        controls: ordinary runs of the same shape, in addition to those found in the folder that contains ``run``.
    """
    data = gather(run, controls)
    page = write_page(report_page(data), run)
    if not quiet:
        wide_console().print(headline(data), size_table(data))
        if data.post is not None:
            wide_console().print(comparison_table(data.post))
        if data.ledger is not None:
            wide_console().print(ledger_table(data.ledger))
        if data.family is not None:
            wide_console().print(family_table(data.family))
    return page


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Cost of one model."""

    folder: Path
    ledger: Ledger
    """Cost of every stage; sums for this model alone and with its parents."""
    elasticity: Elasticity | None
    """Cost of training smaller sizes together with the full network; None: it was trained at one size."""


@dataclass(frozen=True, slots=True, repr=False)
class Costs(Tabled):
    """What models cost."""

    models: tuple[ModelCost, ...]
    family: Family | None
    """The models as sizes of one parent, against training each size alone; None: they are no such family, or the cost of training
    their parent is unknown."""

    @property
    def table(self) -> Table:
        """The family's table, or that of the last model."""
        return [part for part in self.parts() if isinstance(part, Table)][-1]

    def parts(self) -> list[Table | str]:
        """All tables and sentences, in the order of the command's output."""
        found: list[Table | str] = []
        for each in self.models:
            found.append(ledger_table(each.ledger, each.ledger.rows[-1].name if len(self.models) > 1 else ""))
            found += [adopted_sentence(name, adopted) for name, adopted in each.ledger.adopted]
            found += [elasticity_sentence(each.elasticity)] if each.elasticity is not None else []
        if self.family is not None:
            found += [family_table(self.family), family_sentence(self.family)]
        elif len(self.models) > 1 and any(each.ledger.adopted for each in self.models):
            found.append(
                "No comparison with training each model alone: their parent was adopted, so its training cost is unknown."
            )
        return found

    def plot(self) -> Plot:
        """FLOPs of the last model's stages, and of the family against training each size alone."""
        return Plot(cost_bars(self.models[-1].ledger, self.family))

    def __repr__(self) -> str:
        return "\n".join(part.text() if isinstance(part, Table) else part for part in self.parts())


@user_errors
def cost(models: ModelLike | Sequence[ModelLike], *, controls: ModelLike | Sequence[ModelLike] = ()) -> Costs:
    """What a model cost: alone, with its parents, and as a family against training each size separately.

    Args:
        models: runs or checkpoints, one or several; several are a family. A model in several folders counts once.
        controls: one or several runs of a network of the same shape trained without smaller sizes, in addition to those in the folder of the run.

    Raises:
        UserError: a checkpoint without a lineage, or a control of another shape.
    """
    folders, ordinary = model_paths(models, "models"), model_paths(controls, "controls")
    if not folders:
        raise UserError("cost: no models; name at least one")
    checkpoints: dict[str, tuple[Path, Lineage]] = {}
    costs: list[ModelCost] = []
    for folder in folders:
        checkpoint = checkpoint_folder(folder)
        lineage = read_lineage(checkpoint)
        if lineage.run_id not in checkpoints:
            checkpoints[lineage.run_id] = checkpoint, lineage
            costs.append(ModelCost(folder, ledger(lineage), _elasticity(checkpoint, lineage, ordinary)))
    _check_used(ordinary, [each.elasticity for each in costs])
    return Costs(tuple(costs), _family([*checkpoints.values()]))


@user_errors
def write_report(run: ModelLike, *, controls: ModelLike | Sequence[ModelLike] = ()) -> Path:
    """Draw the results of a run. Writes ``report/report.html`` and its pictures into the run folder.

    Args:
        run: folder of a run of pre-training, elasticizing, SFT or RL.
        controls: as of `cost`; not for an RL run.

    Returns:
        The page.

    Raises:
        UserError: no such run, or one of another stage.
    """
    folder, ordinary = model_path(run), model_paths(controls, "controls")
    if not is_rl_run(folder):
        return report_command(folder, controls=ordinary)
    if ordinary:
        raise UserError(f"--control: {folder} is an RL run, which has no control; leave it out")
    return report_rl_run(folder)


def gather(run: Path, controls: Sequence[Path] = ()) -> ReportData:
    """The data of a report. Sizes are evaluated on the run's held-out rows."""
    info = read_info(run)
    if not isinstance(info.recipe, Recipe | ElasticizeRecipe | SftRecipe):
        raise UserError(
            f"{run}: written by `stretto {info.stage}`; name the folder of the pre-training run, or `stretto elasticize` it"
        )
    recipe, ranks = info.recipe, join("auto")
    checkpoint = read_checkpoint(checkpoint_folder(run), device=ranks.device)
    config, lineage = checkpoint.config, checkpoint.lineage
    elasticity = _elasticity(checkpoint.folder, lineage, controls) if lineage else None
    _check_used(controls, [elasticity])
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
    newest = healed[-1].lineage if healed else lineage
    commands = [("Serve all sizes, with a web page", f"stretto serve {quoted(run)}")]
    if (post_trained := last_result(run / POST)) is not None:
        newest = read_lineage(post_trained)
        commands.insert(0, ("Serve the small model after post-training", f"stretto serve {quoted(post_trained)}"))
    # without padding, as the cost ledger counts tokens
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
        healing=tuple(_healing_curve(each, subnets, lineage) for each in healed),
        search=search,
        kept=_kept(config, search.chosen.subnet) if search else None,
        loads=tuple(_load(checkpoint, name, subnet, batches) for name, subnet in shown.items()),
        ledger=ledger(newest) if newest else None,
        family=_family([*reversed(models)]),
        elasticity=elasticity,
        mixture_drawn={kind: num / total for kind, num in sorted(mixture.items())},
        mixture_configured=_configured(recipe.elastic) if recipe.elastic is not None else {},
        post=read_comparison(run / POST / EVALUATED),
        commands=tuple(commands),
        recipe=json.dumps(recipe.model_dump(mode="json"), indent=2),
    )


def _samples(run: Path) -> tuple[tuple[str, str, str], ...]:
    """Size, prompt and continuation of the run's samples, grouped by prompt."""
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
    # the stored measurement, although this process may run on another machine or with other threads
    table = validate(LatencyTable, read_json(path), str(path)) if path.is_file() else None
    if table is not None:
        warn_if_far_off(path, table)
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
                latency_ms=table.predict_ms(subnet, table.timings[0].workload) if table else None,
                nll=report.nll,
                healed_nll=next((each.nll for each in healed if each.subnet == subnet), None),
            )
        )
    return tuple(sizes)


def _models(run: Path, origin: Lineage | None) -> list[tuple[Path, Lineage]]:
    """Checkpoints in the run folder, and those extracted from its network in the folders beside it. Exports of one model count once."""
    found: dict[str, tuple[Path, Lineage]] = {}
    for path in sorted(run.glob("*/lineage.json")):
        lineage = read_lineage(path.parent)
        found.setdefault(lineage.run_id, (path.parent, lineage))
    if origin is None:
        return list(found.values())
    folder = run.resolve()
    beside = {path for pattern in ("*/lineage.json", "*/*/lineage.json") for path in folder.parent.glob(pattern)}
    for path in sorted(path for path in beside if not path.is_relative_to(folder)):
        lineage = read_lineage(path.parent)
        descends = any(stage.run_id == origin.run_id for stage in history(lineage)[:-1])
        if descends and lineage.stage in ("extract", "heal"):
            found.setdefault(lineage.run_id, (path.parent, lineage))
    return list(found.values())


def _find_healed(models: Sequence[tuple[Path, Lineage]], batches: tuple[EvalBatch, ...], device: str) -> list[Healed]:
    """Healed models, oldest first."""
    found: list[Healed] = []
    for folder, lineage in models:
        cut = lineage.parents[0].config.get("subnet") if lineage.stage == "heal" and lineage.parents else None
        if cut is not None:
            model = read_checkpoint(folder, device=device).model
            nll = evaluate(model, model.config.full(), batches).nll
            found.append(Healed(folder, lineage, Subnet.model_validate(cut), nll))
    return sorted(found, key=lambda each: each.lineage.created)


def _healing_curve(healed: Healed, subnets: Mapping[str, Subnet], origin: Lineage | None) -> Curve:
    name = next((name for name, subnet in subnets.items() if subnet == healed.subnet), healed.folder.name)
    log = healed.folder.with_name(healed.folder.name + ".run")
    rows = tuple(read_metrics(log)) if (log / "metrics.jsonl").is_file() else ()
    is_other_text = origin is not None and not _same_rows(healed.lineage, origin)
    tokens_per_step = healed.lineage.receipt.tokens / max((row["step"] for row in rows), default=1)
    return Curve(name, rows, tokens_per_step, is_other_text)


def _same_rows(first: Lineage, second: Lineage) -> bool:
    """Whether two stages measured their held-out losses on the same rows. Lineages without that record: whether their data is the same."""
    hashes = [lineage.config.get("held_out", {}).get("hash") for lineage in (first, second)]
    return hashes[0] == hashes[1] if all(hashes) else first.data_hash == second.data_hash


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
        pairs = zip(load, kept.experts[layer], strict=True)
        shares.append(tuple(num / total if is_kept else None for num, is_kept in pairs))
    return Load(name, config.moe_layers, tuple(shares))


def _family(models: Sequence[tuple[Path, Lineage]]) -> Family | None:
    """Cost of the parent and these sizes against training each size alone on the parent's tokens. A model of the parent's shape is not a size.
    A checkpoint and what was made of it, such as an extracted one and the healed one, are one size: the last one, whose cost includes the others.

    None if there is no size, if they have several parents, or if the parent's training was not measured.
    """
    stages = {stage.run_id: stage for stage in distinct(stage for _, lineage in models for stage in history(lineage))}
    shared = frozenset().union(*(parents_of(lineage) for _, lineage in models))
    ancestors = {stage.run_id for _, lineage in models for stage in history(lineage) if stage.run_id != lineage.run_id}
    sizes = list({lineage.run_id: (folder, lineage) for folder, lineage in models if lineage.parents}.values())
    sizes = [(folder, lineage) for folder, lineage in sizes if lineage.run_id not in ancestors]
    origins = [stage for stage in stages.values() if not stage.parents]
    recipes = {run: recipe for run, stage in stages.items() if (recipe := _recipe_of(stage)) is not None}
    if len(origins) != 1 or not sizes or not isinstance(first := recipes.get(origins[0].run_id), Recipe):
        return None
    together = shared | {origins[0].run_id}
    trained = [run for run in recipes if run in together]
    positions = sum(recipes[run].train.num_positions for run in trained)
    targets = sum(stages[run].receipt.tokens for run in trained)
    others = [(lineage, read_config(folder)) for folder, lineage in sizes]
    others = [each for each in others if _shape(each[1]) != _shape(first.model)]  # SFT, merges and RL keep the shape
    if not others:
        return None
    members = [(origins[0], first.model), *others]
    alone_flops = [_ordinary_flops(model, first.train, positions, targets) for _, model in members]
    return family([lineage for lineage, _ in members], alone_flops)


def _recipe_of(stage: Lineage) -> Recipe | ElasticizeRecipe | None:
    """Recipe of a stage that trains all sizes; None for other stages."""
    kinds: dict[str, type[Recipe | ElasticizeRecipe]] = {"pretrain": Recipe, "elasticize": ElasticizeRecipe}
    recipe = stage.config.get("recipe")
    return kinds[stage.stage].model_validate(recipe) if stage.stage in kinds and recipe is not None else None


def _ordinary_flops(model: ModelConfig, train: TrainConfig, num_positions: int, num_targets: int) -> int:
    """FLOPs of training only the full network of ``model`` on ``num_positions`` positions, of which ``num_targets`` have a target, counted as
    in `stretto.train.step`."""
    head_tokens = num_head_tokens(num_positions, num_targets)
    return count(model, model.full()).trained_flops(num_positions, train.seq_len, train.recompute, head_tokens)


def _elasticity(folder: Path, lineage: Lineage, controls: Sequence[Path]) -> Elasticity | None:
    """Cost of training the network of ``folder`` at several sizes; None if it was trained at one size.

    Controls are ``controls``, and the runs beside ``folder`` with the same shape and data whose sampler was off. Raises `UserError`:
    one of ``controls`` is not an ordinary run of the same shape.
    """
    recipe = _recipe_of(lineage)
    if recipe is None or not _is_elastic(recipe) or not recipe.train.num_positions:
        return None
    run, model = folder.parent, recipe.model if isinstance(recipe, Recipe) else read_config(folder)
    beside = [path.parents[1] for path in sorted(run.parent.glob(f"*/{CHECKPOINT}/{LINEAGE_FILE}"))]
    found: dict[str, Control] = {}
    for other in (*controls, *beside):
        ordinary = read_lineage(checkpoint_folder(other))
        theirs = _recipe_of(ordinary)
        same_shape = isinstance(theirs, Recipe) and not _is_elastic(theirs) and _shape(theirs.model) == _shape(model)
        if other in controls and not same_shape:
            raise UserError(f'{other}: --control: not an ordinary run (sampler "off") of the same shape; leave it out')
        if same_shape and (other in controls or ordinary.data_hash == lineage.data_hash):
            found.setdefault(ordinary.run_id, _control(run, lineage, checkpoint_folder(other).parent, ordinary))
    spent = lineage.receipt
    ordinary_flops = _ordinary_flops(model, recipe.train, recipe.train.num_positions, spent.tokens)
    return Elasticity(spent.flops, ordinary_flops, tuple(found.values()))


def _check_used(controls: Sequence[Path], found: Sequence[Elasticity | None]) -> None:
    """Raises `UserError`: ``controls`` were given, and no model in ``found`` is compared with them."""
    if controls and all(each is None for each in found):
        raise UserError(
            "--control: only a network that pretrain or elasticize trained at several sizes has a control; leave it out"
        )


def _shape(model: ModelConfig) -> dict[str, Any]:
    """``model`` without the fields that only an elastic run changes."""
    return model.model_dump(exclude={"widths", "num_branches", "layer_order", "expert_order"})


def _is_elastic(recipe: Recipe | ElasticizeRecipe) -> bool:
    elastic = recipe.elastic
    shares = elastic.anchor_share, elastic.depth_share, elastic.top_k_share, elastic.width_share
    return any(shares) and getattr(elastic, "sampler", "anchored") != "off"


def _control(run: Path, lineage: Lineage, other: Path, ordinary: Lineage) -> Control:
    ours, theirs = lineage.receipt, ordinary.receipt
    losses = [_last_loss(each) for each in (run, other)] if _same_rows(lineage, ordinary) else [None]
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
    """Configured share of each kind of Subnet in the training passes; empty for samplers whose kinds overlap or change over time."""
    if not isinstance(elastic, SelfTaughtConfig) or elastic.sampler != "anchored":
        return {}
    shares = {name: elastic.anchor_share * part for name, part in elastic.anchor_parts().items()}
    shares |= {"depth": elastic.depth_share, "top_k": elastic.top_k_share}
    shares = {name: elastic.mean_factor * share for name, share in shares.items()}
    shares["full"] = 1.0 if elastic.joint else 1.0 - sum(shares.values())
    return {name: share / sum(shares.values()) for name, share in shares.items()}
