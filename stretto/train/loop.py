"""Training runs: pre-training, healing, and the loop around the step that both share.

Batches in; log lines, held-out losses and snapshots out. Pre-training draws Subnets of the maximum network in every step and
trains them together; healing trains an extracted network for a short while, towards the data and towards its parent.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stretto.base.config import check_unchanged
from stretto.base.errors import UserError
from stretto.base.records import Lineage, Meter, Receipt, new_lineage, new_run_id
from stretto.base.track import Tracker, progress
from stretto.data.loader import Loader
from stretto.evals.loss import EvalBatch, held_out_losses, rank_layers
from stretto.model.checkpoint import write_checkpoint
from stretto.model.elastic import load_balance
from stretto.model.families import Family
from stretto.model.parallel import Ranks, compute_dtype, device_name, full_state, shard
from stretto.model.spec import SubnetChoice, count
from stretto.model.transformer import Transformer, build
from stretto.optim.build import build_optimizers, set_learning_rate
from stretto.optim.schedule import learning_rate
from stretto.text.tokenizer import load_tokenizer
from stretto.train.recipe import HealRecipe, Recipe
from stretto.train.sampler import MicroPlan, Sampler
from stretto.train.snapshot import LAYOUT, SnapshotMeta, Snapshots, read_meta
from stretto.train.step import Distil, MicroBatch, StepResult, metered, optimisation_step, row_widths


@dataclass(frozen=True, slots=True)
class Job:
    """What a run is given beside its recipe, by whoever starts it."""

    run: Path
    """Its folder."""
    loader: Loader
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


def pretrain(recipe: Recipe, job: Job) -> Trained:
    """Train ``recipe`` and return the maximum network.

    Raises:
        UserError: a resume without a snapshot or under another recipe or data.
        NonFiniteError: a loss or gradient was not finite; the last snapshot is good.
    """
    train, elastic = recipe.train, recipe.elastic
    model = build(recipe.network(), train.seed, job.ranks.device)
    rank_at = {max(1, round(share * train.steps)) for share in elastic.rank_layers_at}
    training = _Training("pretrain", recipe, job, model, elastic.anchors, rank_at)
    decay_starts = train.steps - round(recipe.optim.decay_fraction * train.steps)

    def plan(step: int) -> Plan:
        config = training.model.config  # with the layer order in force
        full = config.full()
        micro = Sampler(config, elastic, train.micro_rows, train.micro_batches, train.steps, train.seed).draw(step)
        teacher = Distil(training.model, full, elastic.anchor_ce_weight, elastic.joint)
        taught = [each.is_anchor or (elastic.joint and each.subnet != full) for each in micro]
        passes = [(each, teacher if is_taught else None) for each, is_taught in zip(micro, taught, strict=True)]
        return Plan(passes, elastic.balance_final_rate if step >= decay_starts else elastic.balance_rate)

    return training.run(plan)


def heal(recipe: HealRecipe, job: Job, model: Transformer, teacher: Transformer | None) -> Trained:
    """Train ``model`` in place with a fresh optimiser; ``teacher`` is the frozen parent, run in full.

    The loss is CE where there is no teacher or ``ce_weight`` is 1, otherwise a blend with KL(teacher ‖ model). Errors are
    those of `pretrain`.
    """
    training = _Training("heal", recipe, job, model.to(job.ranks.device), {}, set())
    lesson = None
    if teacher is not None and recipe.ce_weight < 1.0:
        teacher = teacher.to(job.ranks.device).requires_grad_(False)
        lesson = Distil(teacher, teacher.config.full(), recipe.ce_weight)
    micro = MicroPlan("full", model.config.full(), None, False)
    plan = Plan([(micro, lesson)] * recipe.train.micro_batches, recipe.balance_rate)
    return training.run(lambda step: plan)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step trains, and how its balance biases move."""

    passes: Sequence[tuple[MicroPlan, Distil | None]]
    """Each micro-batch, and its teacher."""
    balance_rate: float


@dataclass(slots=True)
class _Window:
    """Sums since the last log line."""

    nll_by_kind: Counter[str] = field(default_factory=Counter)
    tokens_by_kind: Counter[str] = field(default_factory=Counter)
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
        values["speed/tokens_per_s"] = tokens / max(1e-9, time.perf_counter() - self.started)
        return values


class _Training:
    """One run: what it was told, what a step changes, and the loop."""

    def __init__(
        self,
        stage: str,
        recipe: Recipe | HealRecipe,
        job: Job,
        model: Transformer,
        presets: Mapping[str, SubnetChoice],
        rank_at: Set[int],
    ):
        """Ready for the next step.

        Args:
            presets: Subnets whose held-out losses are logged beside the full network's.
            rank_at: numbers of steps done at which the layer order is measured anew.
        """
        train, ranks = recipe.train, job.ranks
        assert train.ep == ranks.ep, (
            f"the recipe wants {train.ep} expert-parallel ranks, they were joined with {ranks.ep}"
        )
        self.stage, self.train, self.optim, self.job, self.ranks = stage, train, recipe.optim, job, ranks
        self.presets, self.rank_at = presets, rank_at
        self.recipe = recipe.model_dump(mode="json")
        self.dtype = compute_dtype(train.dtype, ranks.device)
        self.snapshots = Snapshots(job.run / "snapshots", train.keep_snapshots)
        self.model = shard(model, ranks, self.dtype)
        self.optimizers = build_optimizers(recipe.optim, self.model)
        self.run_id, self.step = new_run_id(), 0
        self.meter = Meter(stage, device_name(ranks.device), ranks.world)
        self.tokens_by_kind: Counter[str] = Counter()
        self.window = _Window()
        if job.resume:
            self._resume()

    def _resume(self) -> None:
        job, path = self.job, self.snapshots.latest()
        if path is None:
            raise UserError(f"{job.run}: --resume: there is no snapshot in it; start the run without --resume")
        meta = read_meta(path)
        if meta.data_hash != job.data_hash:
            raise UserError(
                f"{job.run}: data: changed since this run started; use the same data, or start a new run folder"
            )
        check_unchanged(meta.recipe, self.recipe, job.run, LAYOUT)
        self.snapshots.load(path, self.model, self.optimizers, self.ranks)
        self.model.config = self.model.config.replace(layer_order=meta.layer_order)
        job.loader.restore(meta.loader)
        self.run_id, self.step, self.tokens_by_kind = meta.run_id, meta.step, Counter(meta.tokens_by_kind)
        self.meter = Meter(self.stage, meta.receipt.device, self.ranks.world, spent=meta.receipt)

    def run(self, plan: Callable[[int], Plan]) -> Trained:
        """Train to the end of the recipe; ends on a snapshot.

        Ctrl-C lets the step end, writes a snapshot and is raised then; a second one is raised at once.
        """
        train, ranks, tracker = self.train, self.ranks, self.job.tracker
        if train.compile:
            for block in self.model.blocks:
                block.compile()
        log = tracker(self.step) if tracker is not None and ranks.is_first else None
        bar = progress(self.stage, train.steps) if ranks.is_first else nullcontext(lambda num=1, status=None: None)
        try:
            with bar as advance, _interrupts() as interrupted:
                advance(self.step)
                while self.step < train.steps:
                    with self.meter:
                        result = self._step(plan(self.step))
                    if self.step in self.rank_at and self.job.held_out:
                        self._rank_layers()
                    self._report(result, log)
                    advance(1, f"loss {result.nll:.3f}")
                    # ranks see the signal at different times, and a snapshot needs them all at the same step
                    if ranks.sum(torch.tensor(int(interrupted()), device=ranks.device)):
                        self._save()
                        raise KeyboardInterrupt
            self._save()
        finally:
            if log is not None:
                log.close()
        return Trained(self.model, self.meter, self.run_id, dict(self.tokens_by_kind))

    def _step(self, plan: Plan) -> StepResult:
        train, ranks = self.train, self.ranks
        set_learning_rate(self.optimizers, learning_rate(self.optim, self.step, train.steps))
        batches = []
        for micro, distil in plan.passes:
            loaded = self.job.loader.next()
            batch = EvalBatch.of(loaded, ranks.device)
            widths = row_widths(micro.widths, ranks.rows(train.micro_rows), ranks.device)
            ctx = replace(batch.ctx, widths=widths, recompute=train.recompute)
            num = loaded.global_target_tokens
            batches.append(MicroBatch(micro.kind, batch.ids_BT, batch.targets_BT, ctx, micro.subnet, num, distil))
        result = optimisation_step(
            self.model,
            self.optimizers,
            batches,
            ranks,
            clip_norm=self.optim.clip_norm,
            balance_rate=plan.balance_rate,
            dtype=self.dtype,
        )
        self.step += 1
        self.tokens_by_kind.update(result.tokens_by_kind)
        self.meter.add(flops=result.flops, tokens=result.num_tokens)
        window = self.window
        window.nll_by_kind.update(result.nll_by_kind)
        window.tokens_by_kind.update(result.tokens_by_kind)
        window.num_rows += train.rows
        window.num_narrow_rows += sum(micro.num_narrow_rows for micro, _ in plan.passes)
        return result

    def _rank_layers(self) -> None:
        """Measure the layer order anew, and count what that costs."""
        with self.meter, metered(self.model, self.meter, self.ranks.world):
            order = self.ranks.agree(rank_layers(self.model, self.job.held_out).order)  # each rank saw rows of its own
        self.model.config = self.model.config.replace(layer_order=order)

    def _report(self, result: StepResult, log: Tracker | None) -> None:
        train, step = self.train, self.step
        last = step == train.steps
        scalars: dict[str, float] = {}
        if step % train.log_every == 0 or last:
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
            found = held_out_losses(self.model, self.presets, self.job.held_out, self.ranks)
            losses = {f"loss/{name}": loss for name, loss in found.items()}
        if log is not None and (scalars or losses):
            log.log(step, scalars | losses, line=False)
            if losses:
                log.say(f"step {step:>6,}  " + "  ".join(f"{name} {value:.4f}" for name, value in losses.items()))
        if step % train.snapshot_every == 0 or last:
            self._save()

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
            tokens_by_kind=dict(self.tokens_by_kind),
            recipe=self.recipe,
            data_hash=self.job.data_hash,
        )
        self.snapshots.save(self.model, self.optimizers, meta, self.ranks)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back and tell whether it came: inside a step, the weights and the loader do not belong together.

    A second one is raised at once. Python hands signals to the main thread only; elsewhere nothing is held back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    came = False

    def hold(*_: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


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
