"""Training runs: pre-training, elasticising, healing, and the loop around the step that all share.

Batches in; log lines, held-out losses and snapshots out. Pre-training draws Subnets of the maximum network in every step and
trains them together; elasticising does so with a network that was trained before, which stays as it was beside itself and
teaches them; healing trains an extracted network for a short while, towards the data and towards its parent.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.base.config import check_unchanged
from stretto.base.errors import UserError
from stretto.base.records import Lineage, Meter, Receipt, new_lineage, new_run_id
from stretto.base.track import Tracker, progress, say
from stretto.data.loader import Batches
from stretto.evals.loss import EvalBatch, held_out_losses
from stretto.evals.order import expert_orders, rank_layers, survey
from stretto.model.checkpoint import write_checkpoint
from stretto.model.elastic import load_balance, order_experts, with_branch_rows
from stretto.model.families import Family
from stretto.model.parallel import Ranks, device_name, full_state, placed, spread
from stretto.model.spec import ModelConfig, SubnetChoice, count
from stretto.model.transformer import Transformer, initial_state
from stretto.ops.logprob import IGNORED
from stretto.ops.tuning import deterministic, threads_kept
from stretto.optim.build import build_optimizers, set_learning_rate
from stretto.optim.schedule import learning_rate
from stretto.text.tokenizer import load_tokenizer
from stretto.train.pace import Pace, find_pace
from stretto.train.recipe import ElasticizeRecipe, HealRecipe, Recipe, SelfTaughtConfig, SftRecipe, with_branches
from stretto.train.sampler import MicroPlan, Sampler, WidthPlan
from stretto.train.snapshot import LAYOUT, STEERING, Change, SnapshotMeta, Snapshots, changes_between, read_meta
from stretto.train.step import (
    Distil,
    MicroBatch,
    NonFiniteError,
    Recorded,
    StepResult,
    TaughtRows,
    optimisation_step,
    row_widths,
)
from stretto.train.teacher import CacheKey, LogitCache, Lookup, hash_state


@dataclass(frozen=True, slots=True)
class Job:
    """What a run is given beside its recipe, by whoever starts it."""

    run: Path
    """Its folder."""
    loader: Batches
    """One batch is one micro-batch."""
    held_out: Sequence[EvalBatch]
    """This rank's, for the losses in the log and the layer order; without any, neither is measured."""
    data_hash: str
    ranks: Ranks
    tracker: Callable[[int], Tracker] | None = None
    """Opens the log at a first step; only rank 0 has one."""
    resume: bool = False
    """Go on from the newest snapshot of ``run``, bit for bit as if it had not been interrupted."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a finished stage hands on."""

    model: Transformer
    meter: Meter
    run_id: str
    tokens_by_kind: dict[str, int]
    pace: Pace
    changes: tuple[Change, ...]
    """What resumes told the run otherwise than it began."""


@threads_kept()
def pretrain(recipe: Recipe, job: Job, read_parent: Callable[[], Transformer] | None = None) -> Trained:
    """Train ``recipe`` and return the maximum network.

    Args:
        read_parent: gives a network of the recipe's shape to go on from; None: random weights.

    Raises:
        UserError: a resume without a snapshot or under another recipe or data.
        NonFiniteError: a loss or gradient was not finite; the last snapshot is good.
    """
    train, elastic, config = recipe.train, recipe.elastic, recipe.network()
    rank_at = {max(1, round(share * train.steps)) for share in elastic.rank_layers_at}
    if read_parent is None:
        state = initial_state(config, train.seed)
    else:
        parent = read_parent()
        state = with_branch_rows(parent.config, config, parent.state_dict())
        del parent  # goes with the generator, when the run has its own copy
    training = _Training("pretrain", recipe, job, config, state, elastic.anchors, rank_at)
    return training.run(_own_lessons(training, elastic))


def _own_lessons(training: _Training, elastic: SelfTaughtConfig) -> Callable[[int], Plan]:
    """Plans of a run that trains the Subnets of a mixture, taught by the network as it is."""
    train = training.train
    decay_starts = train.steps - round(training.optim.decay_fraction * train.steps)

    def plan(step: int) -> Plan:
        config = training.model.config  # with the layer order in force
        full = config.full()
        micro = Sampler(config, elastic, train.micro_rows, train.micro_batches, train.steps, train.seed).draw(step)
        teacher = Distil(training.model, full, elastic.anchor_ce_weight, elastic.joint)
        smaller = [each.subnet != full or each.num_narrow_rows > 0 for each in micro]
        taught = [
            each.is_anchor or (elastic.joint and is_smaller) for each, is_smaller in zip(micro, smaller, strict=True)
        ]
        passes = [(each, teacher if is_taught else None) for each, is_taught in zip(micro, taught, strict=True)]
        return Plan(passes, elastic.balance_final_rate if step >= decay_starts else elastic.balance_rate)

    return plan


@threads_kept()
def elasticize(
    recipe: ElasticizeRecipe,
    job: Job,
    read_parent: Callable[[], Transformer],
    read_teacher: Callable[[], Transformer] | None = None,
) -> Trained:
    """Train the network that ``read_parent`` gives so that Subnets of it work too; returns it, elastic.

    Every pass, the full network's included, is pulled to the text and to a frozen teacher: the parent as it came, or what
    ``read_teacher`` gives. Layers and experts are dropped in the orders that the parent brings; those that it does not are
    measured before the first step. Errors are those of `pretrain`.

    Args:
        recipe: complete for this network (`ElasticizeRecipe.for_network`).
    """
    train, elastic = recipe.train, recipe.elastic
    parent = read_parent()
    config = with_branches(parent.config, elastic)
    state = with_branch_rows(parent.config, config, parent.state_dict())
    rank_at = {round(share * train.steps) for share in elastic.rank_layers_at}
    if config.layer_order is None:
        rank_at.add(0)
    training = _Training("elasticize", recipe, job, config, state, elastic.anchors, rank_at)
    if training.step == 0 and config.expert_order is None and config.num_moe_layers:
        training.rank_experts(parent)
    lesson = _lesson(parent if read_teacher is None else read_teacher(), recipe, training)
    del parent  # where its logits were kept, it takes no memory from here on
    decay_starts = train.steps - round(recipe.optim.decay_fraction * train.steps)

    def plan(step: int) -> Plan:
        config = training.model.config  # with the orders in force
        mixture = recipe.mixture_at(config, step)
        micro = Sampler(config, mixture, train.micro_rows, train.micro_batches, train.steps, train.seed).draw(step)
        taught = replace(lesson, ce_weight=recipe.ce_weight_at(step))
        rate = elastic.balance_final_rate if step >= decay_starts else elastic.balance_rate
        return Plan([(each, taught) for each in micro], rate)

    return training.run(plan)


def _lesson(teacher: Transformer, recipe: ElasticizeRecipe, training: _Training) -> Distil | Lookup:
    """What ``teacher``, which lies on a CPU, says: computed beside the network it teaches, or once before it is trained."""
    train, ranks, job = recipe.train, training.ranks, training.job
    dtype = torch.bfloat16 if recipe.teacher_dtype == "bfloat16" else torch.float32
    for parameter in teacher.requires_grad_(False).parameters():  # balance biases stay in fp32
        parameter.data = parameter.data.to(dtype)
    if recipe.cached_logits is None:
        # ep divides the student's experts, which need not be as many as the teacher's
        beside = spread(teacher, replace(ranks, ep=1), training.dtype).requires_grad_(False)
        return Distil(beside, beside.config.full(), ce_weight=1.0)
    key = CacheKey(
        data_hash=job.data_hash,
        loader_seed=train.seed,
        seq_len=train.seq_len,
        top_k=recipe.cached_logits,
        teacher=hash_state(teacher),
        dtype=training.pace.dtype,
    )
    cache = LogitCache(job.run / "teacher", key, teacher.config.vocab_size)
    with training.meter:
        cache.fill(teacher, job.loader, train.steps * train.rows, train.micro_rows, ranks)
    return Lookup(cache, teacher.config, ce_weight=1.0)


@threads_kept()
def heal(recipe: HealRecipe, job: Job, model: Transformer, read_teacher: Callable[[], Transformer] | None) -> Trained:
    """Train a copy of ``model`` with a fresh optimiser; ``read_teacher`` gives the frozen parent, run in full.

    The loss is CE where there is no teacher or ``ce_weight`` is 1, otherwise a blend with KL(teacher ‖ model). Errors are
    those of `pretrain`.
    """
    training = _Training("heal", recipe, job, model.config, model.state_dict().items(), {}, set())
    lesson = None
    if read_teacher is not None and recipe.ce_weight < 1.0:
        # ep divides the student's experts, which need not be as many as the teacher's
        teacher = spread(read_teacher(), replace(job.ranks, ep=1), training.dtype).requires_grad_(False)
        lesson = Distil(teacher, teacher.config.full(), recipe.ce_weight)
    return training.run(_full_network(training, lesson, recipe.balance_rate))


def _full_network(training: _Training, lesson: Distil | None, balance_rate: float) -> Callable[[int], Plan]:
    """Plans of a run that trains the full network alone."""
    micro = MicroPlan("full", training.model.config.full(), None, False)
    plan = Plan([(micro, lesson)] * training.train.micro_batches, balance_rate)
    return lambda step: plan


@threads_kept()
def finetune(
    recipe: SftRecipe,
    job: Job,
    read_parent: Callable[[], Transformer],
    presets: Mapping[str, SubnetChoice],
    adapt: Callable[[Transformer], None] | None = None,
) -> Trained:
    """Train the network that ``read_parent`` gives on what the batches mark as targets: the full network, or the recipe's mixture
    of its Subnets, each taught by the network as it is. Errors are those of `pretrain`.

    Args:
        recipe: complete for this network (`SftRecipe.for_network`).
        presets: Subnets whose held-out losses are logged.
        adapt: called with the network before its optimiser is made: freezes weights, and puts others in
            (`stretto.model.lora`).
    """
    parent, elastic = read_parent(), recipe.elastic
    config = parent.config if elastic is None else with_branches(parent.config, elastic)
    state = with_branch_rows(parent.config, config, parent.state_dict())
    del parent
    training = _Training("sft", recipe, job, config, state, presets, set(), adapt)
    if elastic is None:
        return training.run(_full_network(training, None, recipe.balance_rate))
    return training.run(_own_lessons(training, elastic))


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step trains, and how its balance biases move."""

    passes: Sequence[tuple[MicroPlan, Distil | Lookup | None]]
    """Each micro-batch, and its teacher."""
    balance_rate: float


@dataclass(slots=True)
class _Window:
    """Sums since the last log line."""

    nll_by_kind: Counter[str] = field(default_factory=Counter)
    tokens_by_kind: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    """Of the data, each once, also where the full network learns them beside a smaller Subnet."""
    num_rows: int = 0
    num_narrow_rows: int = 0
    started: float = field(default_factory=time.perf_counter)

    def scalars(self) -> dict[str, float]:
        tokens = sum(self.tokens_by_kind.values())
        values = {"loss/train": sum(self.nll_by_kind.values()) / max(1, tokens)}
        values |= {
            f"train/{kind}": self.nll_by_kind[kind] / num for kind, num in sorted(self.tokens_by_kind.items()) if num
        }
        values["mixture/narrow_rows"] = self.num_narrow_rows / max(1, self.num_rows)
        values["speed/tokens_per_s"] = self.num_tokens / max(1e-9, time.perf_counter() - self.started)
        return values


class _Training:
    """One run: what it was told, what a step changes, and the loop."""

    def __init__(
        self,
        stage: str,
        recipe: Recipe | ElasticizeRecipe | HealRecipe | SftRecipe,
        job: Job,
        config: ModelConfig,
        state: Iterable[tuple[str, Tensor]],
        presets: Mapping[str, SubnetChoice],
        rank_at: Set[int],
        adapt: Callable[[Transformer], None] | None = None,
    ):
        """Ready for the next step of a network of ``config`` that begins with ``state``.

        Args:
            presets: Subnets whose held-out losses are logged beside the full network's.
            rank_at: numbers of steps done at which the layer order is measured anew; 0: before the first.
            adapt: what is done to the network before its optimiser is made.
        """
        train, ranks = recipe.train, job.ranks
        assert train.ep == ranks.ep, (
            f"the recipe wants {train.ep} expert-parallel ranks, they were joined with {ranks.ep}"
        )
        self.stage, self.train, self.optim, self.job, self.ranks = stage, train, recipe.optim, job, ranks
        self.presets, self.rank_at = presets, rank_at
        self.recipe = recipe.model_dump(mode="json")
        self.snapshots = Snapshots(job.run / "snapshots", train.keep_snapshots)
        self.run_id, self.step = new_run_id(), 0
        self.meter = Meter(stage, device_name(ranks.device), ranks.world)
        self.tokens_by_kind: Counter[str] = Counter()
        self.window = _Window()
        self.changes: tuple[Change, ...] = ()
        meta = self._begun() if job.resume else None
        if meta is not None and meta.expert_order is not None:
            config = config.replace(expert_order=meta.expert_order)
        self.pace = self._pace(config, meta)
        self.dtype = self.pace.torch_dtype
        self.model = placed(config, state, ranks, self.dtype)
        if isinstance(recipe, ElasticizeRecipe) and recipe.trainable == "routers":
            self._freeze()
        if adapt is not None:
            adapt(self.model)
        self.optimizers = build_optimizers(recipe.optim, self.model)
        if meta is not None:
            self._resume(meta)
        self.saved_s = time.monotonic()

    def _freeze(self) -> None:
        """Leave only routers, norms and biases to be trained; tells what that saves."""
        num_all = num_kept = 0
        for name, parameter in self.model.named_parameters():
            num_all += parameter.numel()
            if parameter.dim() == 1 or name.endswith(("mlp.gate", "bias")):
                num_kept += parameter.numel()
            else:
                parameter.requires_grad_(False)
        if self.ranks.is_first:
            per_parameter = 4 * (3 if self.optim.name == "adamw" else 2)  # gradient and moments, in fp32
            say(
                f"trainable routers: {num_kept:,} of {num_all:,} parameters; their gradients and moments take "
                f"{num_kept * per_parameter / 1e6:,.1f} MB, all parameters' would take {num_all * per_parameter / 1e6:,.1f} MB"
            )

    def _begun(self) -> SnapshotMeta:
        """What the newest snapshot says of the run so far, which the recipe must go on with."""
        job, path = self.job, self.snapshots.latest()
        if path is None:
            raise UserError(f"{job.run}: --resume: there is no snapshot in it; start the run without --resume")
        meta = read_meta(path)
        if meta.data_hash != job.data_hash:
            raise UserError(
                f"{job.run}: data: changed since this run started; use the same data, or start a new run folder"
            )
        check_unchanged(meta.recipe, self.recipe, job.run, (*LAYOUT, *STEERING))
        if meta.step > self.train.steps:
            raise UserError(
                f"{job.run}: train.steps: {self.train.steps} is less than the {meta.step} steps that are done; raise it"
            )
        return meta

    def _pace(self, config: ModelConfig, meta: SnapshotMeta | None) -> Pace:
        """The one that the run has, else what is found; the loader is left where it is."""
        if meta is not None and meta.pace is not None:
            meta.pace.follow()
            return meta.pace
        loader, first_state = self.job.loader, self.job.loader.state()

        def next_batch() -> MicroBatch:
            batch = EvalBatch.of(loader.next(), self.ranks.device)
            ctx = replace(batch.ctx, recompute=self.train.recompute)
            return MicroBatch("full", batch.ids_BT, batch.targets_BT, ctx, config.full(), 1)

        pace = find_pace(self.train.dtype, config, next_batch, self.ranks)
        loader.restore(first_state)
        return pace

    def _resume(self, meta: SnapshotMeta) -> None:
        self.snapshots.load(self.snapshots.path(meta.step), self.model, self.optimizers, self.ranks)
        self.model.config = self.model.config.replace(layer_order=meta.layer_order)
        self.job.loader.restore(meta.loader)
        self.run_id, self.step, self.tokens_by_kind = meta.run_id, meta.step, Counter(meta.tokens_by_kind)
        self.meter = Meter(self.stage, meta.receipt.device, self.ranks.world, spent=meta.receipt)
        self.changes = meta.changes + changes_between(meta.recipe, self.recipe, STEERING, meta.step)

    def run(self, plan: Callable[[int], Plan]) -> Trained:
        """Train to the end of the recipe; ends on a snapshot.

        Ctrl-C and SIGTERM let the step end and a snapshot be written; then the one is raised and the other ends the process
        with its usual code. A second one acts at once.
        """
        train, ranks, tracker = self.train, self.ranks, self.job.tracker
        if train.compile:
            for block in self.model.blocks:
                block.compile()
        log = tracker(self.step) if tracker is not None and ranks.is_first else None
        bar = progress(self.stage, train.steps) if ranks.is_first else nullcontext(lambda num=1, status=None: None)
        try:
            with deterministic(train.deterministic), bar as advance, _interrupts() as came:
                advance(self.step)
                if self.step and ranks.is_first:
                    say(f"{self.stage}: resumes after step {self.step:,} of {train.steps:,}")
                if self.step == 0 and 0 in self.rank_at:
                    self._rank_layers()
                if self.step == 0 and self.stage == "heal" and self.job.held_out:
                    self._log(log, {}, self._held_out_losses())
                while self.step < train.steps:
                    with self.meter:
                        result = self._step(plan(self.step))
                    if self.step in self.rank_at and self.job.held_out:
                        self._rank_layers()
                    self._report(result, log)
                    advance(1, "skipped" if result is None else f"loss {result.nll:.3f}")
                    # ranks see a signal, and their clocks, at different times, and a snapshot needs them all at the same step
                    is_due = ranks.is_first and time.monotonic() - self.saved_s >= 60 * train.snapshot_minutes
                    seen = [signal.SIGINT in came, signal.SIGTERM in came, is_due]
                    interrupted, ended, due = ranks.sum(torch.tensor(seen, device=ranks.device).long()).tolist()
                    if interrupted or ended or due:
                        self._save()
                    if interrupted or ended:
                        raise KeyboardInterrupt if interrupted else SystemExit(128 + signal.SIGTERM)
            self._save()
        finally:
            if log is not None:
                log.close()
        return Trained(
            self.model, self.meter, self.run_id, dict(self.tokens_by_kind), pace=self.pace, changes=self.changes
        )

    def _step(self, plan: Plan) -> StepResult | None:
        """One step; None where the recipe passes it over."""
        train, ranks = self.train, self.ranks
        if self.step + 1 in train.skip_steps:
            for _ in plan.passes:
                self.job.loader.next()
            self.step += 1
            return None
        set_learning_rate(self.optimizers, learning_rate(self.optim, self.step, train.steps))
        batches = []
        for number, (micro, distil) in enumerate(plan.passes):
            loaded = self.job.loader.next()
            batch = EvalBatch.of(loaded, ranks.device)
            widths = row_widths(micro.widths, ranks.rows(train.micro_rows), ranks.device)
            ctx = replace(batch.ctx, widths=widths, recompute=train.recompute)
            num = loaded.global_target_tokens
            lesson: Distil | Recorded | None
            if isinstance(distil, Lookup):
                first_row = (self.step * train.micro_batches + number) * train.micro_rows
                lesson = distil.at(first_row, ranks.rows(train.micro_rows), ranks.device)
            elif distil is not None and distil.learns and micro.widths is not None and micro.subnet == distil.subnet:
                lesson = replace(distil, rows=self._narrow_rows(micro.widths, batch.targets_BT))
            else:
                lesson = distil
            batches.append(MicroBatch(micro.kind, batch.ids_BT, batch.targets_BT, ctx, micro.subnet, num, lesson))
        try:
            result = optimisation_step(
                self.model,
                self.optimizers,
                batches,
                ranks,
                clip_norm=self.optim.clip_norm,
                balance_rate=plan.balance_rate,
                dtype=self.dtype,
            )
        except NonFiniteError as error:
            done = self.step + 1
            raise NonFiniteError(
                f"step {done}: {error}, then continue with --resume; or pass it over with --set train.skip_steps=[{done}]"
            ) from None
        self.step += 1
        self.tokens_by_kind.update(result.tokens_by_kind)
        self.meter.add(flops=result.flops, tokens=result.num_tokens)
        window = self.window
        window.nll_by_kind.update(result.nll_by_kind)
        window.tokens_by_kind.update(result.tokens_by_kind)
        window.num_tokens += result.num_tokens
        window.num_rows += train.rows
        window.num_narrow_rows += sum(micro.num_narrow_rows for micro, _ in plan.passes)
        return result

    def _narrow_rows(self, widths: WidthPlan, targets_BT: Tensor) -> TaughtRows:
        """The rows that use fewer experts: in the others the trained Subnet, the full network, is its teacher itself."""
        ranks, narrow_B = self.ranks, np.logical_not(widths.allowed_BE.all(axis=1))
        mine_B = torch.from_numpy(narrow_B[ranks.rows(len(narrow_B))]).to(ranks.device)
        num_targets = ranks.sum((targets_BT[mine_B] != IGNORED).sum())
        return TaughtRows(mine_B, int(narrow_B.sum()), int(num_targets))

    def _autocast(self) -> torch.autocast:
        """Measurements compute as training does: sharded weights are gathered in its dtype."""
        return torch.autocast(self.ranks.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def _rank_layers(self) -> None:
        """Measure the layer order anew, and count what that costs."""
        with self.meter, self._autocast():
            ranking = rank_layers(self.model, self.job.held_out)
            self.meter.add(flops=ranking.flops * self.ranks.world)
        order = self.ranks.agree(ranking.order)  # each rank saw rows of its own
        self.model.config = self.model.config.replace(layer_order=order)

    def rank_experts(self, parent: Transformer) -> None:
        """Order the experts of every layer by their saliency (REAP) on held-out text, and count what that costs.

        ``parent`` is what the network starts as, on a CPU: experts that are divided among ranks cannot be watched, its own can.
        """
        whole = replace(self.ranks, ep=1)
        model = self.model if self.ranks.ep == 1 else spread(parent, whole, self.dtype)
        with self.meter, self._autocast():
            found = survey(model, self.job.held_out, side_by_side=1)
        self.meter.add(flops=self.ranks.world * found.flops)
        orders = expert_orders(self.model.config, found, "reap")
        order_experts(self.model, tuple(self.ranks.agree(order) for order in orders))  # each rank saw rows of its own

    def _report(self, result: StepResult | None, log: Tracker | None) -> None:
        train, step = self.train, self.step
        last = step == train.steps
        scalars: dict[str, float] = {}
        if result is not None and (step % train.log_every == 0 or last):
            scalars |= self.window.scalars()
            scalars |= {
                "optim/lr": learning_rate(self.optim, step - 1, train.steps),
                "optim/grad_norm": result.grad_norm,
            }
            # the full network's experts: largest load over the mean
            loads = [load_balance(counts_WE[0]) for counts_WE in result.counts.values() if counts_WE[0].sum() > 0]
            if loads:
                scalars |= {"experts/max_overload": max(loads), "experts/mean_overload": sum(loads) / len(loads)}
            total = sum(self.tokens_by_kind.values())
            scalars |= {f"mixture/{kind}": num / total for kind, num in sorted(self.tokens_by_kind.items())}
            self.window = _Window()
        losses: dict[str, float] = {}
        if self.job.held_out and (step % train.eval_every == 0 or last):
            losses = self._held_out_losses()
        self._log(log, scalars, losses)
        if step % train.snapshot_every == 0 or last:
            self._save()

    def _held_out_losses(self) -> dict[str, float]:
        with self._autocast():
            found = held_out_losses(self.model, self.presets, self.job.held_out, self.ranks)
        return {f"loss/{name}": loss for name, loss in found.items()}

    def _log(self, log: Tracker | None, scalars: Mapping[str, float], losses: Mapping[str, float]) -> None:
        if log is not None and (scalars or losses):
            log.log(self.step, {**scalars, **losses}, line=False)
            if losses:
                log.say(f"step {self.step:>6,}  " + "  ".join(f"{name} {value:.4f}" for name, value in losses.items()))

    def _save(self) -> None:
        """Write a snapshot, unless this step's is written."""
        if self.snapshots.latest() == self.snapshots.path(self.step):
            return
        meta = SnapshotMeta(
            step=self.step,
            loader=self.job.loader.state(),
            receipt=self.meter.receipt(peak_memory(self.ranks)),
            run_id=self.run_id,
            layer_order=self.model.config.layer_ranking,
            expert_order=self.model.config.expert_order,
            tokens_by_kind=dict(self.tokens_by_kind),
            recipe=self.recipe,
            data_hash=self.job.data_hash,
            pace=self.pace,
            changes=self.changes,
        )
        self.snapshots.save(self.model, self.optimizers, meta, self.ranks)
        self.saved_s = time.monotonic()


@contextmanager
def _interrupts() -> Iterator[Set[int]]:
    """Hold Ctrl-C and SIGTERM back and tell which came: inside a step, the weights and the loader do not belong together.

    A second one acts at once. Python hands signals to the main thread only; elsewhere nothing is held back.
    """
    came: set[int] = set()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

    def hold(number: int, _: object) -> None:
        came.add(number)
        signal.signal(number, usual[number])

    before = {number: signal.signal(number, hold) for number in usual}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_trained(
    folder: Path,
    model: Transformer,
    meter: Meter,
    ranks: Ranks,
    *,
    name: str,
    stage: str,
    config: Mapping[str, Any],
    tokenizer_dir: Path | None,
    parents: tuple[Lineage, ...] = (),
    run_id: str | None = None,
    data_hash: str | None = None,
    family: Family | None = None,
    presets: Mapping[str, SubnetChoice] | None = None,
    spent: Receipt | None = None,
) -> Path:
    """Write the checkpoint of a finished stage with its lineage: from what all ranks hold, by rank 0.

    The keyword arguments are those of `new_lineage` and `write_checkpoint`; ``config`` is what the stage was told, ``spent``
    what was paid for it before ``meter`` ran.
    """
    state = full_state(model)
    if ranks.is_first:
        counts = count(model.config, model.config.full())
        receipt = meter.receipt(peak_memory(ranks))
        lineage = new_lineage(
            name=name,
            stage=stage,
            total_params=counts.total_params,
            active_params=counts.active_params,
            receipt=receipt if spent is None else spent + receipt,
            parents=parents,
            run_id=run_id,
            data_hash=data_hash,
            tokenizer_hash=load_tokenizer(tokenizer_dir).fingerprint() if tokenizer_dir is not None else None,
            config=config,
        )
        write_checkpoint(
            folder, state, model.config, family=family, tokenizer_dir=tokenizer_dir, presets=presets, lineage=lineage
        )
    ranks.barrier()
    return folder


def peak_memory(ranks: Ranks) -> int | None:
    """The accelerator's peak so far; None on a CPU, where the process's own is meant."""
    return torch.cuda.max_memory_allocated() if ranks.device.type == "cuda" else None
