"""The training loop that pre-training, elasticizing, healing and supervised fine-tuning share.

Input: batches, and the plan of every step. Output: log lines, held-out losses, snapshots and the trained network.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.base.config import Config, check_unchanged, completed
from stretto.base.errors import UserError
from stretto.base.records import Meter, new_run_id
from stretto.base.track import Advance, Tracker, progress, say
from stretto.data.loader import Batches
from stretto.evals.loss import EvalBatch, held_out_losses
from stretto.evals.order import rank_experts, rank_layers
from stretto.model.elastic import load_balance, order_experts
from stretto.model.parallel import Origin, Ranks, device_name, placed
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.model.transformer import Transformer
from stretto.ops.logprob import IGNORED
from stretto.ops.master import masters, restore
from stretto.ops.memory import freed_memory_kept, peak_bytes
from stretto.ops.shards import whole
from stretto.ops.tuning import deterministic
from stretto.optim.build import build_optimizers, set_learning_rate
from stretto.optim.compact import trained_parameters
from stretto.optim.schedule import learning_rate
from stretto.train.pace import Pace, find_pace
from stretto.train.recipe import (
    ElasticizeRecipe,
    HealRecipe,
    MixtureConfig,
    Recipe,
    SftRecipe,
)
from stretto.train.sampler import MicroPlan, Sampler, WidthPlan
from stretto.train.snapshot import (
    LAYOUT,
    STEERING,
    Change,
    SnapshotMeta,
    Snapshots,
    SnapshotWriter,
    changes_between,
    read_meta,
)
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
from stretto.train.teacher import Lookup
from stretto.train.watch import OwnTime, watched


@dataclass(frozen=True, slots=True)
class Job:
    """Inputs of a training run besides its recipe. Written by the function of the stage (`stretto.api`)."""

    run: Path
    """Run folder."""
    loader: Batches
    """Source of micro-batches: each `next` gives one."""
    held_out: Sequence[EvalBatch]
    """Held-out batches of this rank, for the losses in the log and for the layer order. Empty: neither is measured."""
    data_hash: str
    ranks: Ranks
    tracker: Callable[[int], Tracker] | None = None
    """Opens the log at the number of the first step. Used on rank 0 only."""
    resume: bool = False
    """Continue from the newest snapshot in ``run``. The result is bit-identical to a run without interruption."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a training stage. Written by `Training.run`."""

    model: Transformer
    meter: Meter
    run_id: str
    tokens_by_kind: dict[str, int]
    """Target tokens trained on, by kind of micro-batch."""
    pace: Pace
    changes: tuple[Change, ...]
    """Fields of the recipe that resumed runs changed, in order."""


@dataclass(frozen=True, slots=True)
class RankAt:
    """Shares of the run at which orders are measured."""

    layers: Sequence[float] = ()
    experts: Sequence[float] = ()
    first: int = 0
    """The earliest number of completed steps; 0: before the first step."""

    def step(self, share: float, steps: int) -> int:
        """Number of completed steps after which the order of ``share`` is measured in a run of so many ``steps``."""
        return max(self.first, round(share * steps))


@dataclass(frozen=True, slots=True)
class Plan:
    """Micro-batches of one step. Written by the stage, read by `Training`."""

    passes: Sequence[tuple[MicroPlan, Distil | Lookup | None]]
    """Each micro-batch with its teacher."""
    balance_rate: float
    """Step size of the balance biases."""


@dataclass(slots=True)
class _Window:
    """Sums since the last log line."""

    nll_by_kind: Counter[str] = field(default_factory=Counter)
    tokens_by_kind: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    """Target tokens of the data. A token is counted once, also if the full network learns it beside a smaller Subnet."""
    num_rows: int = 0
    num_narrow_rows: int = 0
    started_s: float = field(default_factory=time.perf_counter)

    def scalars(self) -> dict[str, float]:
        by_kind = sorted(self.tokens_by_kind.items())
        return {
            "loss/train": sum(self.nll_by_kind.values()) / max(1, sum(self.tokens_by_kind.values())),
            **{f"train/{kind}": self.nll_by_kind[kind] / num for kind, num in by_kind if num},
            "mixture/narrow_rows": self.num_narrow_rows / max(1, self.num_rows),
            "speed/tokens_per_s": self.num_tokens / max(1e-9, time.perf_counter() - self.started_s),
        }


class Training:
    """State of one training run (network, optimiser, position, cost) and the loop over its steps."""

    def __init__(
        self,
        stage: str,
        recipe: Recipe | ElasticizeRecipe | HealRecipe | SftRecipe,
        job: Job,
        origin: Origin,
        presets: Mapping[str, SubnetChoice],
        rank_at: RankAt,
        adapt: Callable[[Transformer], None] | None = None,
    ):
        """Place the network ``origin`` on the ranks, or restore the newest snapshot, ready for the next step.

        Args:
            presets: Subnets whose held-out losses are logged beside the full network's.
            rank_at: when layers and experts are ranked.
            adapt: called with the network before its optimiser is created.
        """
        train, ranks = recipe.train, job.ranks
        assert train.ep == ranks.ep, f"train.ep is {train.ep}, the ranks were joined with ep={ranks.ep}"
        self.stage, self.train, self.optim, self.job, self.ranks = stage, train, recipe.optim, job, ranks
        self.presets, self.rank_at = presets, rank_at
        self.recipe = recipe.model_dump(mode="json")
        self.snapshots = Snapshots(job.run / "snapshots", train.keep_snapshots)
        self.writer = SnapshotWriter(self.snapshots, ranks, train.snapshot_writes)
        self.run_id, self.step = new_run_id(), 0
        self.meter = Meter(stage, device_name(ranks.device), ranks.world)
        self.tokens_by_kind: Counter[str] = Counter()
        self.window = _Window()
        self.own_time: OwnTime | None = None
        self.changes: tuple[Change, ...] = ()
        self.past = 0
        """Step of the present schedule up to which the run had come before `train.steps` changed. Until this step the mixture is that of
        this step: a longer schedule does not start it again."""
        meta, config = self._read_meta(type(recipe)) if job.resume else None, origin.config
        if meta is not None and meta.expert_order is not None:
            config = config.replace(expert_order=meta.expert_order)
        trains_all = adapt is None and not (isinstance(recipe, ElasticizeRecipe) and recipe.trainable == "routers")
        self.pace = self._choose_pace(config, meta, is_lean=recipe.optim.is_compact or not trains_all)
        self.dtype = self.pace.torch_dtype
        self.model = origin.place(config, ranks, self.dtype, torch.float32)
        if isinstance(recipe, ElasticizeRecipe) and recipe.trainable == "routers":
            self._freeze_all_but_routers()
        if adapt is not None:
            adapt(self.model)
        self.optimizers = build_optimizers(recipe.optim, self.model, train.seed)
        if meta is not None:
            self._resume(meta)
        self.saved_s, self.saved_step = time.monotonic(), self.step if meta is not None else None

    def _freeze_all_but_routers(self) -> None:
        """Freeze all parameters except routers, norms and biases, and print the memory that this saves."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(parameter.dim() == 1 or name.endswith(("mlp.gate", "bias")))
        if self.ranks.is_first:
            sizes = [(parameter.numel(), parameter.requires_grad) for parameter in self.model.parameters()]
            num_all, num_trained = sum(num for num, _ in sizes), sum(num for num, is_trained in sizes if is_trained)
            mb_each = 4e-6 * (3 if self.optim.name == "adamw" else 2)  # gradient and moments, in fp32
            say(
                f"trainable routers: {num_trained:,} of {num_all:,} parameters; their gradients and moments take "
                f"{num_trained * mb_each:,.1f} MB, all parameters' would take {num_all * mb_each:,.1f} MB"
            )

    def _read_meta(self, kind: type[Config]) -> SnapshotMeta | None:
        """Metadata of the newest snapshot, with its recipe of ``kind`` completed; None: the run was killed before its first one, and
        begins again. Raises `UserError`: the recipe or the data do not continue it."""
        job, path = self.job, self.snapshots.latest()
        if path is None:
            if self.ranks.is_first:
                say(f"{self.stage}: no snapshot yet; begins with the first step")
            return None
        meta = read_meta(path)
        if meta.data_hash != job.data_hash:
            raise UserError(
                f"{job.run}: data: changed since this run started; use the same data, or start a new run folder"
            )
        meta = meta.replace(recipe=completed(kind, meta.recipe))
        check_unchanged(meta.recipe, self.recipe, job.run, (*LAYOUT, *STEERING))
        if meta.step > self.train.steps:
            raise UserError(
                f"{job.run}: train.steps: {self.train.steps} is less than the {meta.step} steps that are done; raise it"
            )
        return meta

    def _choose_pace(self, config: ModelConfig, meta: SnapshotMeta | None, is_lean: bool) -> Pace:
        """The pace in the snapshot, else a measured one (``is_lean``: as of `find_pace`). The loader's position is restored."""
        if meta is not None and meta.pace is not None:
            meta.pace.follow()
            return meta.pace
        loader, first_state = self.job.loader, self.job.loader.state()

        def next_batch() -> MicroBatch:
            batch = EvalBatch.of(loader.next(), self.ranks.device)
            ctx = replace(batch.ctx, recompute=self.train.recompute)
            return MicroBatch("full", batch.ids_BT, batch.targets_BT, ctx, config.full(), 1)

        in_bf16 = self.train.dtype == "auto" and self.optim.master != "fp32"
        pace = find_pace("bfloat16" if in_bf16 else self.train.dtype, config, next_batch, self.ranks, is_lean)
        loader.restore(first_state)
        return pace

    def _resume(self, meta: SnapshotMeta) -> None:
        self.snapshots.load(self.snapshots.path(meta.step), self.model, self.optimizers, self.ranks)
        self.model.config = self.model.config.replace(layer_order=meta.layer_order)
        self.job.loader.restore(meta.loader)
        self.run_id, self.step, self.tokens_by_kind = meta.run_id, meta.step, Counter(meta.tokens_by_kind)
        self.meter = Meter(self.stage, meta.receipt.device, self.ranks.world, spent=meta.receipt)
        self.changes = meta.changes + changes_between(meta.recipe, self.recipe, STEERING, meta.step)
        done = [change.step / change.before for change in self._reschedules]
        self.past = round(max(done, default=0.0) * self.train.steps)

    @property
    def _reschedules(self) -> list[Change]:
        """The changes of `train.steps`."""
        return [change for change in self.changes if change.field == "train.steps"]

    def run(self, plan: Callable[[int], Plan]) -> Trained:
        """Train to the end of the recipe and write a last snapshot. Snapshots are written while training goes on; a failed one raises
        `UserError` after the next step.

        After Ctrl-C or SIGTERM the current step ends and a snapshot is written. Ctrl-C then raises KeyboardInterrupt, and SIGTERM ends
        the process with its usual exit code. A second signal acts at once.
        """
        train, ranks, tracker = self.train, self.ranks, self.job.tracker
        if train.compile:
            for block in self.model.blocks:
                block.compile()
        else:
            self.own_time = OwnTime(self.model, ranks)  # its hooks would cut compiled blocks into pieces
        log = tracker(self.step) if tracker is not None and ranks.is_first else None
        try:
            with (
                deterministic(train.deterministic),
                freed_memory_kept(ranks.device),
                watched(self.model, ranks, 60 * train.hang_minutes, lambda: self.writer.is_waited_for) as goes_on,
                progress(self.stage, train.steps, "steps", is_shown=ranks.is_first) as advance,
                _deferred_signals() as received,
            ):
                self._take_steps(plan, log, advance, received, goes_on)
            self._save()
            self.writer.wait()
            for optimizer in self.optimizers:  # their memory is needed for the fp32 weights
                optimizer.state.clear()
            restore(trained_parameters(self.optimizers))
        finally:
            self.writer.close()
            if log is not None:
                log.close()
        return Trained(
            self.model, self.meter, self.run_id, dict(self.tokens_by_kind), pace=self.pace, changes=self.changes
        )

    def _take_steps(
        self,
        plan: Callable[[int], Plan],
        log: Tracker | None,
        advance: Advance,
        received: Set[int],
        goes_on: Callable[..., None],
    ) -> None:
        """All steps that are left. ``received``: the signals so far; ``goes_on``: from `watched`."""
        train, first_step = self.train, self.step + 1
        advance(self.step)
        if self.step and self.ranks.is_first:
            say(f"{self.stage}: resumes after step {self.step:,} of {train.steps:,}")
        if self.step == 0 or self._is_rescheduled:
            self._rank(goes_on)
        if self.step == 0 and self.stage in ("heal", "sft") and self.job.held_out:
            self._log(log, {}, self._held_out_losses())
        while self.step < train.steps:
            with self.meter:
                result = self._step(plan(self.step))
            if self.step == first_step:
                self.writer.reserve(self.model, self.optimizers)
            self._rank(goes_on)
            self._report(result, log)
            advance(1, "skipped" if result is None else f"loss {result.nll:.3f}")
            self._obey(received)

    def _obey(self, received: Set[int]) -> None:
        """Save a snapshot if one is due, and end as the signals ``received`` ask.

        Signals and clocks differ between ranks, and all ranks must save at the same step, so what one rank has to do all do.
        """
        ranks = self.ranks
        is_due = ranks.is_first and time.monotonic() - self.saved_s >= 60 * self.train.snapshot_minutes
        flags = [signal.SIGINT in received, signal.SIGTERM in received, is_due, self.writer.has_failed]
        interrupted, terminated, due, failed = ranks.sum(torch.tensor(flags, device=ranks.device).long()).tolist()
        if failed:
            self.writer.wait()  # raises
        if interrupted or terminated or due:
            self._save()
        if interrupted or terminated:
            self.writer.wait()
            raise KeyboardInterrupt if interrupted else SystemExit(128 + signal.SIGTERM)

    def _step(self, plan: Plan) -> StepResult | None:
        """Train one step; None if the recipe skips it, or if its rows have no target. (The last token of a document has none, and documents
        of ``seq_len`` + 1 tokens leave pieces of one token, which fill rows.)"""
        train, ranks = self.train, self.ranks
        if self.step + 1 in train.skip_steps:
            for _ in plan.passes:
                self.job.loader.next()
            self.step += 1
            return None
        set_learning_rate(self.optimizers, learning_rate(self.optim, self.step, train.steps))
        batches = [self._micro_batch(number, *each) for number, each in enumerate(plan.passes)]
        if not any(batch.num_target_tokens for batch in batches):
            self.step += 1
            return None
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
            number = self.step + 1
            remedy = f"then continue with --resume; or skip the step with --set train.skip_steps=[{number}]"
            raise NonFiniteError(f"step {number}: {error}, {remedy}") from None
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

    def _micro_batch(self, number: int, micro: MicroPlan, teacher: Distil | Lookup | None) -> MicroBatch:
        """Micro-batch ``number`` of this step: this rank's next rows with the plan ``micro`` and their teacher."""
        train, device = self.train, self.ranks.device
        loaded, rows = self.job.loader.next(), self._plan_rows(train.micro_rows)
        batch = EvalBatch.of(loaded, device)
        ctx = replace(batch.ctx, widths=row_widths(micro.widths, rows, device), recompute=train.recompute)
        distil: Distil | Recorded | None
        if isinstance(teacher, Lookup):
            first_row = (self.step * train.micro_batches + number) * train.micro_rows
            distil = teacher.at(first_row, rows, device)
        elif teacher is not None and teacher.learns and micro.widths is not None and micro.subnet == teacher.subnet:
            distil = replace(teacher, rows=self._narrow_rows(micro.widths, batch.targets_BT))
        else:
            distil = teacher
        return MicroBatch(
            micro.kind,
            batch.ids_BT,
            batch.targets_BT,
            ctx,
            micro.subnet,
            loaded.global_target_tokens,
            distil,
            num_rows=train.micro_rows,
            num_own_targets=int((loaded.targets_BT != IGNORED).sum()),
        )

    def _plan_rows(self, num_rows: int) -> slice:
        """This rank's rows in the plan of a micro-batch. A rank without rows uses the plan of row 0 for its row of padding."""
        rows = self.ranks.rows(num_rows)
        return rows if np.arange(num_rows)[rows].size else slice(0, 1)

    def _narrow_rows(self, widths: WidthPlan, targets_BT: Tensor) -> TaughtRows:
        """The rows that use fewer experts than the Subnet. In the other rows the trained Subnet is the full network, its own teacher."""
        ranks, narrow_B = self.ranks, np.logical_not(widths.allowed_BE.all(axis=1))
        own_B = torch.from_numpy(narrow_B[self._plan_rows(len(narrow_B))]).to(ranks.device)
        num_targets = ranks.sum((targets_BT[own_B] != IGNORED).sum())
        return TaughtRows(own_B, int(narrow_B.sum()), int(num_targets))

    def draw(self, elastic: MixtureConfig, step: int) -> tuple[MicroPlan, ...]:
        """Micro-batch plans of ``step`` (0-based) for the mixture ``elastic`` of the network's current orders."""
        train = self.train
        config, past = self.model.config, self.past
        sampler = Sampler(config, elastic, train.micro_rows, train.micro_batches, train.steps, train.seed, past)
        return sampler.draw(step)

    def frozen(self, origin: Origin, weights: torch.dtype = torch.float32) -> Transformer:
        """The network ``origin`` as a frozen teacher with parameters in ``weights``; on several ranks they are in fp32."""
        # expert parallelism divides the student's experts; the teacher may have another number of them
        ranks = replace(self.ranks, ep=1)
        return origin.place(origin.config, ranks, self.dtype, weights).requires_grad_(False)

    def _autocast(self) -> torch.autocast:
        """Autocast for measurements in the dtype of training, since sharded weights are gathered in that dtype."""
        return torch.autocast(self.ranks.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def _rank(self, goes_on: Callable[..., None]) -> None:
        """Measure the orders that are due after this step on held-out text, and add the cost to the meter. ``goes_on`` is called after
        each layer."""
        named = ("layers", self.rank_at.layers), ("experts", self.rank_at.experts)
        due = [name for name, shares in named if any(map(self._is_due, shares))]
        if not due or not self.job.held_out:
            return
        if self.ranks.is_first:
            say(f"{self.stage}: ranking {' and '.join(due)} on held-out text")
        with self.meter, self._autocast():
            if "layers" in due:
                layers = rank_layers(self.model, self.job.held_out, goes_on, self.ranks)
                self.model.config = self.model.config.replace(layer_order=layers.order)
                self.meter.add(flops=layers.flops)
            if "experts" in due:
                experts = rank_experts(self._with_whole_layers(), self.job.held_out, goes_on, self.ranks)
                order_experts(self.model, experts.orders)
                self.meter.add(flops=experts.flops)

    @property
    def _is_rescheduled(self) -> bool:
        """Whether `train.steps` changed after this step."""
        return any(change.step == self.step for change in self._reschedules)

    def _is_due(self, share: float) -> bool:
        """Whether the order of ``share`` is measured after this step: at its own step, or at once if a change of `train.steps` put that
        step before this one. An order that was measured before the change is not measured again."""
        step_in = partial(self.rank_at.step, share)
        if any(step_in(change.before) <= change.step for change in self._reschedules):
            return False
        due = step_in(self.train.steps)
        return due == self.step or (due < self.step and self._is_rescheduled)

    def _with_whole_layers(self) -> Transformer:
        """The network, or a copy if expert parallelism divides the experts of a layer, which a ranking compares."""
        if self.ranks.ep == 1:
            return self.model
        state = ((name, whole(tensor)) for name, tensor in masters(self.model))
        return placed(self.model.config, state, replace(self.ranks, ep=1), self.dtype)

    def _report(self, result: StepResult | None, log: Tracker | None) -> None:
        train, step = self.train, self.step
        last = step == train.steps
        scalars: dict[str, float] = {}
        if result is not None and (step % train.log_every == 0 or last):
            lr = learning_rate(self.optim, step - 1, train.steps)
            scalars |= {**self.window.scalars(), "optim/lr": lr, "optim/grad_norm": result.grad_norm}
            scalars |= {} if self.own_time is None else self.own_time.report(step)
            # the full network's experts: largest load over the mean
            loads = [load_balance(counts_WE[0]) for counts_WE in result.counts.values() if counts_WE[0].sum() > 0]
            if loads:
                scalars |= {"experts/max_overload": max(loads), "experts/mean_overload": sum(loads) / len(loads)}
            total = sum(self.tokens_by_kind.values())
            scalars |= {f"mixture/{kind}": num / total for kind, num in sorted(self.tokens_by_kind.items())}
            self.window = _Window()
        is_due = self.job.held_out and (step % train.eval_every == 0 or last)
        self._log(log, scalars, self._held_out_losses() if is_due else {})
        if step % train.snapshot_every == 0 or last:
            self._save()

    def _held_out_losses(self) -> dict[str, float]:
        with self._autocast():
            losses = held_out_losses(self.model, self.presets, self.job.held_out, self.ranks)
        return {f"loss/{name}": loss for name, loss in losses.items()}

    def _log(self, log: Tracker | None, scalars: Mapping[str, float], losses: Mapping[str, float]) -> None:
        if log is not None and (scalars or losses):
            log.log(self.step, {**scalars, **losses}, line=False)
            if losses:
                log.say(f"step {self.step:>6,}  " + "  ".join(f"{name} {value:.4f}" for name, value in losses.items()))

    def _save(self) -> None:
        """Begin to write a snapshot, unless this step already has one."""
        if self.saved_step == self.step:
            return
        meta = SnapshotMeta(
            step=self.step,
            loader=self.job.loader.state(),
            receipt=self.meter.receipt(peak_bytes(self.ranks.device)),
            run_id=self.run_id,
            layer_order=self.model.config.layer_ranking,
            expert_order=self.model.config.expert_order,
            tokens_by_kind=dict(self.tokens_by_kind),
            recipe=self.recipe,
            data_hash=self.job.data_hash,
            pace=self.pace,
            changes=self.changes,
        )
        self.writer.save(self.model, self.optimizers, meta)
        self.saved_s, self.saved_step = time.monotonic(), self.step


@contextmanager
def _deferred_signals() -> Iterator[Set[int]]:
    """Defer Ctrl-C and SIGTERM, and yield the set of the received ones: inside a step, weights and loader are inconsistent.

    A second signal acts at once. Python delivers signals to the main thread only; in another thread nothing is deferred.
    """
    received: set[int] = set()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    default: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

    def record(number: int, _: object) -> None:
        received.add(number)
        signal.signal(number, default[number])

    before = {number: signal.signal(number, record) for number in default}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
