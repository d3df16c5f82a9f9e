"""Work of the runs of `bench.study`: training, healing, cutting and measuring one network in a folder of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.nn import functional

from bench.common.document_pools import DocumentPools, trained_in_pools
from bench.common.expert_criteria import Orders, orders_by_criterion
from stretto.api.train import held_out, open_loader
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, replacing, write_json
from stretto.base.track import Tracker
from stretto.evals.loss import EvalBatch, evaluate_many
from stretto.evals.order import expert_orders, rank_experts, rank_layers, survey
from stretto.learning.recipe import SNAPSHOTS
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.counts import count
from stretto.model.elastic import extract, order_experts
from stretto.model.parallel import in_memory, join, random_network
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice
from stretto.model.transformer import Transformer
from stretto.train.loop import Job
from stretto.train.recipe import ElasticizeRecipe, HealRecipe, MixtureConfig, Recipe, TrainConfig
from stretto.train.run_folder import RunInfo
from stretto.train.sampler import Sampler
from stretto.train.snapshot import META, SnapshotMeta, Snapshots, read_meta
from stretto.train.stages import elasticize, heal, pretrain

CONTINUED_RATE = 0.2
"""Learning rate of training from a finished network, over the recipe's."""
RANKING_BATCHES = 4
"""Held-out batches by which layers and experts are ranked."""
NUM_RANDOM = 10
"""Random Subnets that are not anchors."""
EXPERTS = (2 / 3, 1 / 2, 1 / 3)
"""Shares of the experts of `fewer_experts`."""


def random_subnets(config: ModelConfig, anchors: Mapping[str, SubnetChoice]) -> list[Subnet]:
    """The same random Subnets in every run: between the smallest anchor and the full network, and neither of them."""
    rng, taken = np.random.default_rng(7), {choice.of(config) for choice in anchors.values()} | {config.full()}
    low = anchors["corner"]
    found: list[Subnet] = []
    while len(found) < NUM_RANDOM:
        depth = int(rng.integers(low.layers or 1, config.num_layers + 1))
        experts = int(rng.integers(low.experts or 1, config.num_experts + 1))
        subnet = config.subnet(depth, experts, int(rng.integers(low.top_k or 1, min(config.top_k, experts) + 1)))
        if subnet not in taken:
            found.append(subnet)
            taken.add(subnet)
    return found


@dataclass(frozen=True, slots=True)
class Trunk:
    """First steps of an ordinary network that other runs with its seed and rate share, and need not train again."""

    run: Path
    """Folder of the ordinary network's run."""
    settings: TrainConfig
    """Of that run."""
    share: float
    """Share of its steps that are shared."""

    def begin(self, folder: Path, recipe: Recipe) -> None:
        """Begin the run of ``recipe`` in ``folder`` with the newest snapshot of the shared steps, unless it has begun. Without such a
        snapshot it begins with its first step."""
        snapshots = folder / SNAPSHOTS
        shared = [path for path in sorted((self.run / SNAPSHOTS).glob("step-*")) if self._is_shared(read_meta(path))]
        if snapshots.is_dir() or not shared:
            return
        meta = read_meta(shared[-1]).replace(recipe=recipe.model_dump(mode="json"))
        with replacing(snapshots) as fresh:
            _copy_with_biases(shared[-1], fresh / shared[-1].name, len(recipe.network().widths))
            write_json(fresh / shared[-1].name / META, meta.model_dump(mode="json"))

    @property
    def last_snapshot(self) -> Path:
        """Folder of the last snapshot of the shared steps."""
        num_shared = math.ceil(self.share * self.settings.steps) - 1
        step = num_shared // self.settings.snapshot_every * self.settings.snapshot_every
        return Snapshots(self.run / SNAPSHOTS, self.settings.keep_snapshots).path(step)

    def _is_shared(self, meta: SnapshotMeta) -> bool:
        return meta.step < self.share * self.settings.steps


def _copy_with_biases(source: Path, target: Path, num_widths: int) -> None:
    """Copy the tensors of a snapshot, with selection biases for ``num_widths`` numbers of experts, of which those without any are 0."""
    target.mkdir(parents=True)
    plain = target / "plain.pt"
    dcp_to_torch_save(source, plain)
    state = torch.load(plain)
    for name, tensor in state["model"].items():
        if name.endswith(".bias_WE"):
            state["model"][name] = functional.pad(tensor, (0, 0, 0, num_widths - len(tensor)))
    torch.save(state, plain)
    torch_save_to_dcp(plain, target)
    plain.unlink()


def shared_share(recipe: Recipe) -> float:
    """Share of an ordinary network's steps that are also the first ones of ``recipe``, elastic or longer: until the rate decays, or layers
    and experts are ranked or smaller sizes are trained before that."""
    elastic, decays_at = recipe.elastic, 1.0 - recipe.optim.decay_fraction
    if elastic.sampler == "off":
        return decays_at
    return min(elastic.starts_at, *elastic.rank_layers_at, *elastic.rank_experts_at, decays_at)


def train(info: RunInfo, recipe: Recipe, in_pools: bool, trunk: Trunk | None, folder: Path) -> dict[str, Any]:
    """Pre-train ``recipe`` and measure all its sizes, on both halves of the held-out rows. ``in_pools``: with EMO's pools."""
    if trunk is not None:
        trunk.begin(folder, recipe)
    ranks = join("auto")
    choosing, reported = held_out_halves(info, recipe.train)
    job = Job(
        folder,
        open_loader(info, recipe.train, ranks),
        choosing[:RANKING_BATCHES],
        info.data_hash,
        ranks,
        tracker=lambda step: Tracker(folder, first_step=step, tensorboard=False),
        resume=(folder / SNAPSHOTS).is_dir(),
    )
    start = random_network(recipe.network(), recipe.train.seed)
    trained = pretrain(recipe, job, trained_in_pools(start) if in_pools else start)
    write_checkpoint(folder / CHECKPOINT, trained.model, trained.model.config)
    receipt, anchors = trained.meter.receipt(), recipe.elastic.anchors
    subnets = sizes_of(trained.model.config, anchors)
    if anchors:
        subnets |= {f"random-{n}": subnet for n, subnet in enumerate(random_subnets(trained.model.config, anchors))}
    losses = measured(trained.model, subnets, (choosing, reported))
    chosen_by = ["full", *(anchors if recipe.elastic.sampler != "off" else ())]
    return {
        "select": {name: loss for name, loss in losses["select"].items() if name in chosen_by},
        "report": losses["report"],
        "token_flops": {name: count(trained.model.config, each).forward_flops(1, recipe.train.seq_len) for name, each in subnets.items()},
        "parameters": count(trained.model.config, trained.model.config.full()).total_params,
        "flops": receipt.flops,
        "tokens": receipt.tokens,
        "lr": recipe.optim.lr,
    }  # fmt: skip


def held_out_halves(info: RunInfo, train: TrainConfig) -> tuple[Sequence[EvalBatch], Sequence[EvalBatch]]:
    """Held-out batches that choose rates and rank layers and experts, and those that are reported. Raises UserError: there is only one
    batch."""
    batches = held_out(info, train, join("auto"))
    if len(batches) < 2:
        raise UserError(f"--eval-rows {train.eval_rows}: one batch, which has no second half to report; ask for more")
    return batches[::2], batches[1::2]


def sizes_of(config: ModelConfig, choices: Mapping[str, SubnetChoice]) -> dict[str, Subnet]:
    """The full network and the named smaller ones."""
    return {"full": config.full()} | {name: choice.of(config) for name, choice in choices.items()}


def measured(
    model: Transformer, sizes: Mapping[str, Subnet], halves: tuple[Sequence[EvalBatch], Sequence[EvalBatch]]
) -> dict[str, Any]:
    """Losses of ``sizes`` on both halves of the held-out rows, nats per token."""
    select, shown = (dict(zip(sizes, _losses(model, list(sizes.values()), half), strict=True)) for half in halves)
    return {"select": select, "report": shown}


def _losses(model: Transformer, subnets: Sequence[Subnet], batches: Sequence[EvalBatch]) -> list[float]:
    return [each.nll for each in evaluate_many(model, subnets, batches)]


def heal_size(
    info: RunInfo, recipe: Recipe, parent: Path, size: str, flops: float, seed: int, folder: Path
) -> dict[str, Any]:
    """Extract ``size`` from ``parent`` and heal it by cross-entropy with ``flops``."""
    ranks = join("auto")
    choosing, reported = held_out_halves(info, recipe.train)
    big = read_checkpoint(parent / CHECKPOINT, device=ranks.device).model
    if recipe.elastic.sampler == "off":  # a parent without orders of its own
        rows = choosing[:RANKING_BATCHES]
        num_experts = recipe.elastic.anchors[size].experts or big.config.num_experts
        order_by_better(big, candidate_orders(big, rows), choosing, num_experts)
        big.config = big.config.replace(layer_order=rank_layers(big, rows).order)
    student = extract(big, recipe.elastic.anchors[size].of(big.config))
    loop, length = recipe.train, recipe.train.seq_len
    step_flops = 3 * count(student.config, student.config.full()).forward_flops(loop.rows * length, length)
    steps = max(1, int(flops / step_flops))
    healing = HealRecipe(
        optim=recipe.optim.replace(
            lr=recipe.optim.lr * CONTINUED_RATE, warmup_steps=min(5, steps), decay_fraction=1.0, final_lr_fraction=0.0
        ),
        train=loop.replace(steps=steps, seed=seed, eval_every=steps, snapshot_every=steps, micro_batches=1),
        ce_weight=1.0,
    )
    info = info.replace(stage="heal", recipe=healing)
    job = Job(folder, open_loader(info, healing.train, ranks), (), info.data_hash, ranks)
    done = heal(healing, job, in_memory(student), in_memory(big))
    (loss,) = _losses(done.model, [done.model.config.full()], reported)
    return {"report": {"full": loss}, "flops": done.meter.receipt().flops}


def make_elastic(info: RunInfo, recipe: Recipe, parent: Path, flops: float, folder: Path) -> dict[str, Any]:
    """Make the ordinary network ``parent`` elastic by continued training with ``flops``, of which rankings and teacher are a part.

    ``recipe``: of elastic training from the start.
    """
    ranks = join("auto")
    choosing, reported = held_out_halves(info, recipe.train)
    rows = choosing[:RANKING_BATCHES]
    big = read_checkpoint(parent / CHECKPOINT, device=ranks.device).model
    layers, experts = rank_layers(big, rows), rank_experts(big, rows)
    big.config = big.config.replace(layer_order=layers.order)
    order_experts(big, experts.orders)
    ranking_flops = layers.flops + experts.flops
    continued = continued_recipe(recipe, big.config, flops - ranking_flops)
    info = info.replace(stage="elasticize", recipe=continued)
    job = Job(folder, open_loader(info, continued.train, ranks), (), info.data_hash, ranks)
    done = elasticize(continued, job, in_memory(big))
    subnets = sizes_of(done.model.config, continued.elastic.anchors)
    return measured(done.model, subnets, (choosing, reported)) | {
        "flops": ranking_flops + done.meter.receipt().flops,
        "lr": continued.optim.lr,
    }


def continued_recipe(recipe: Recipe, config: ModelConfig, flops: float) -> ElasticizeRecipe:
    """The mixture and the optimiser of ``recipe``, which begin at once, for the steps that ``flops`` pay for."""
    elastic, loop = recipe.elastic, recipe.train
    mixture = MixtureConfig(
        anchors=elastic.anchors, anchor_weights=elastic.anchor_weights, anchor_share=elastic.anchor_share,
        depth_share=elastic.depth_share, top_k_share=elastic.top_k_share, width_share=elastic.width_share,
        ramp_fraction=0.1, balance_rate=1e-4, balance_final_rate=1e-5,
    )  # fmt: skip
    train = loop.replace(micro_batches=4, seed=loop.seed + 100)
    optim = recipe.optim.replace(
        lr=recipe.optim.lr * CONTINUED_RATE, decay_fraction=0.7, final_lr_fraction=0.05, weight_decay=0.0
    )
    complete = ElasticizeRecipe(elastic=mixture, optim=optim, train=train).for_network(config, {})
    steps = _steps_for(complete, config, flops)
    optim = optim.replace(warmup_steps=max(1, steps // 10))
    return complete.replace(optim=optim, train=train.replace(steps=steps, eval_every=steps, snapshot_every=steps))


def _steps_for(recipe: ElasticizeRecipe, config: ModelConfig, flops: float) -> int:
    """Steps that ``flops`` pay for: three passes of the drawn Subnet, one of the teacher."""
    train = recipe.train

    def forward(subnet: Subnet) -> int:
        return count(config, subnet).forward_flops(train.micro_rows * train.seq_len, train.seq_len)

    fewest = max(1, int(flops / (4 * train.micro_batches * forward(config.full()))))  # of the full network alone
    sampler = Sampler(config, recipe.elastic, train.micro_rows, train.micro_batches, fewest, train.seed)

    def cost(step: int) -> int:
        return sum(3 * forward(plan.subnet) + forward(config.full()) for plan in sampler.draw(step))

    step = 0
    while (flops := flops - cost(step)) >= 0:
        step += 1
    return max(1, step)


def fewer_experts(info: RunInfo, recipe: Recipe, parent: Path, folder: Path) -> dict[str, Any]:
    """Losses of ``parent`` with `EXPERTS`: "kept" for all text, ranked unless it was trained with an order, and "pooled", the
    likeliest of each document."""
    choosing, reported = held_out_halves(info, recipe.train)
    model = read_checkpoint(parent / CHECKPOINT, device=join("auto").device).model
    full, losses = model.config.full(), {}
    candidates = () if recipe.elastic.sampler == "anchored" else candidate_orders(model, choosing[:RANKING_BATCHES])
    for share in EXPERTS:
        num = round(share * model.config.num_experts)
        if candidates:
            order_by_better(model, candidates, choosing, num)
        pools = [
            replace(each, ctx=replace(each.ctx, operators=DocumentPools(each.ids_BT, each.ctx, range(num, num + 1))))
            for each in reported
        ]
        losses[f"kept-{num}"] = _losses(model, [model.config.subnet(experts=num)], reported)[0]
        losses[f"pooled-{num}"] = _losses(model, [full], pools)[0]
    return {"report": losses}


def candidate_orders(model: Transformer, rows: Sequence[EvalBatch]) -> tuple[Orders, ...]:
    """Orders of the experts of a control by removal and by REAP, measured on ``rows``."""
    found = survey(model, rows, removal=True)
    return expert_orders(model.config, found, "removal"), expert_orders(model.config, found, "reap")


def order_by_better(model: Transformer, candidates: Sequence[Orders], choosing: Sequence[EvalBatch], num: int) -> None:
    """Order the experts of a control by the candidate that keeps the better ``num`` on the rows that choose."""
    subnet, losses = model.config.subnet(experts=num), {}
    for orders in candidates:
        order_experts(model, orders)
        losses[orders] = _losses(model, [subnet], choosing)[0]
    order_experts(model, min(losses, key=lambda orders: losses[orders]))


def half_of_experts(info: RunInfo, recipe: Recipe, parent: Path, folder: Path) -> dict[str, Any]:
    """Losses of ``parent`` with half of its experts, kept by each criterion."""
    choosing, reported = held_out_halves(info, recipe.train)
    model = read_checkpoint(parent / CHECKPOINT, device=join("auto").device).model
    subnet, losses = model.config.subnet(experts=model.config.num_experts // 2), {}
    for criterion, orders in orders_by_criterion(model, choosing[:RANKING_BATCHES], recipe.train.seed).items():
        order_experts(model, orders)
        losses[criterion] = _losses(model, [subnet], reported)[0]
    return {"report": losses}
