"""The loop around the step: batches in, log lines, held-out losses and snapshots out. Shared by every training stage."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from stretto.base.receipt import Meter
from stretto.base.track import Tracker, progress
from stretto.data.loader import Batch, Loader
from stretto.model.elastic import load_balance
from stretto.model.parallel import Ranks, compute_dtype
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer
from stretto.optim.build import set_learning_rate
from stretto.optim.schedule import OptimConfig, learning_rate
from stretto.train.batch import row_widths, tensors
from stretto.train.recipe import TrainConfig
from stretto.train.sampler import MicroPlan
from stretto.train.snapshot import SnapshotMeta, Snapshots
from stretto.train.step import Distil, MicroBatch, StepResult, optimisation_step

Observe = Callable[[Transformer, int], Mapping[str, float]]
"""Called on every rank with the model and the number of steps done; returns scalars to log (held-out losses)."""


@dataclass(frozen=True, slots=True)
class Job:
    """What stays the same for a whole run."""

    stage: str
    run: Path
    train: TrainConfig
    optim: OptimConfig
    recipe: dict[str, Any]
    """The complete recipe as plain values: a resume under another one is refused."""
    data_hash: str
    run_id: str
    ranks: Ranks

    @property
    def snapshots(self) -> Snapshots:
        return Snapshots(self.run / "snapshots", self.train.keep_snapshots)


@dataclass(slots=True)
class State:
    """What a step changes."""

    model: Transformer
    optimizers: Sequence[Optimizer]
    loader: Loader
    meter: Meter
    step: int = 0
    tokens_by_kind: Counter[str] = field(default_factory=Counter)
    window: Window = field(default_factory=lambda: Window())


@dataclass(slots=True)
class Window:
    """Sums since the last log line."""

    nll_by_kind: Counter[str] = field(default_factory=Counter)
    tokens_by_kind: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0
    num_narrow_rows: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(self, result: StepResult, micro: Sequence[MicroPlan], rows: int) -> None:
        """Count a step of ``rows`` rows, over all ranks."""
        self.nll_by_kind.update(result.nll_by_kind)
        self.tokens_by_kind.update(result.tokens_by_kind)
        self.num_rows += rows
        self.num_narrow_rows += sum(plan.num_narrow_rows for plan in micro)

    def scalars(self) -> dict[str, float]:
        tokens = sum(self.tokens_by_kind.values())
        values = {"loss/train": sum(self.nll_by_kind.values()) / max(1, tokens)}
        values |= {
            f"train/{kind}": self.nll_by_kind[kind] / num for kind, num in sorted(self.tokens_by_kind.items()) if num
        }
        values["mixture/narrow_rows"] = self.num_narrow_rows / max(1, self.num_rows)
        values["speed/tokens_per_s"] = tokens / max(1e-9, time.perf_counter() - self.started)
        return values


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step trains, and how its balance biases move."""

    micro: Sequence[MicroPlan]
    distil: Mapping[int, Distil]
    """Teachers, by micro-batch index."""
    balance_rate: float


def run_loop(
    job: Job,
    state: State,
    plan: Callable[[int], Plan],
    observe: Observe,
    tracker: Tracker | None,
    after_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Train from ``state.step`` to the end of the recipe; ends on a snapshot.

    Ctrl-C lets the step end, writes a snapshot and is raised then; a second one is raised at once. ``after_step`` runs
    on every rank with the number of steps done, before the snapshot that may follow.
    """
    train, ranks = job.train, job.ranks
    assert train.ep == ranks.ep, (
        f"the recipe wants {train.ep} expert-parallel ranks, the ranks were joined with {ranks.ep}"
    )
    dtype = compute_dtype(train.dtype, ranks.device)
    if train.compile:
        for block in state.model.blocks:
            block.compile()
    bar = progress(job.stage, train.steps) if ranks.is_first else nullcontext(lambda num=1, status=None: None)
    with bar as advance, _interrupts() as interrupted:
        advance(state.step)
        while state.step < train.steps:
            with state.meter:
                result = _step(job, state, plan(state.step), dtype)
            after_step(state.step)
            _report(job, state, result, observe, tracker)
            advance(1, f"loss {result.nll:.3f}")
            # ranks see the signal at different times, and a snapshot needs them all at the same step
            if ranks.sum(torch.tensor(int(interrupted()), device=ranks.device)):
                _save_unless_saved(job, state)
                raise KeyboardInterrupt
    _save_unless_saved(job, state)


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


def _step(job: Job, state: State, plan: Plan, dtype: torch.dtype) -> StepResult:
    rate = learning_rate(job.optim, state.step, job.train.steps)
    set_learning_rate(state.optimizers, rate)
    batches = [
        _micro_batch(job, state.loader.next(), micro, plan.distil.get(index)) for index, micro in enumerate(plan.micro)
    ]
    result = optimisation_step(
        state.model,
        state.optimizers,
        batches,
        job.ranks,
        clip_norm=job.optim.clip_norm,
        balance_rate=plan.balance_rate,
        dtype=dtype,
    )
    state.step += 1
    state.tokens_by_kind.update(result.tokens_by_kind)
    state.window.add(result, plan.micro, job.train.rows)
    state.meter.add(flops=result.flops, tokens=result.num_tokens)
    return result


def _micro_batch(job: Job, batch: Batch, micro: MicroPlan, distil: Distil | None) -> MicroBatch:
    ranks = job.ranks
    ids_BT, targets_BT, ctx = tensors(batch, ranks.device)
    widths = row_widths(micro.widths, ranks.rows(job.train.micro_rows), ranks.device)
    ctx = replace(ctx, widths=widths, recompute=job.train.recompute)
    return MicroBatch(micro.kind, ids_BT, targets_BT, ctx, micro.subnet, batch.global_target_tokens, distil)


def _report(job: Job, state: State, result: StepResult, observe: Observe, tracker: Tracker | None) -> None:
    train, step = job.train, state.step
    last = step == train.steps
    scalars: dict[str, float] = {}
    if step % train.log_every == 0 or last:
        scalars |= state.window.scalars()
        scalars |= {"optim/lr": learning_rate(job.optim, step - 1, train.steps), "optim/grad_norm": result.grad_norm}
        scalars |= _balance(state.model.config, result)
        total = sum(state.tokens_by_kind.values())
        scalars |= {f"mixture/{kind}": num / total for kind, num in sorted(state.tokens_by_kind.items())}
        state.window = Window()
    observed = dict(observe(state.model, step)) if step % train.eval_every == 0 or last else {}
    if tracker is not None and (scalars or observed):
        tracker.log(step, scalars | observed, line=False)
        if observed:
            tracker.say(f"step {step:>6,}  " + "  ".join(f"{name} {value:.4f}" for name, value in observed.items()))
    if step % train.snapshot_every == 0 or last:
        save(job, state)


def _balance(config: ModelConfig, result: StepResult) -> dict[str, float]:
    """Worst and mean overload (largest load over the mean) of the full network's experts."""
    loads = [load_balance(counts_WE[0]) for counts_WE in result.counts.values() if counts_WE[0].sum() > 0]
    return {"experts/max_overload": max(loads), "experts/mean_overload": sum(loads) / len(loads)} if loads else {}


def save(job: Job, state: State) -> None:
    """Write a snapshot of ``state``."""
    meta = SnapshotMeta(
        step=state.step,
        loader=state.loader.state(),
        receipt=state.meter.receipt(peak_memory(job.ranks)),
        run_id=job.run_id,
        layer_order=state.model.config.layer_ranking,
        tokens_by_kind=dict(state.tokens_by_kind),
        recipe=job.recipe,
        data_hash=job.data_hash,
    )
    job.snapshots.save(state.model, state.optimizers, meta, job.ranks)


def _save_unless_saved(job: Job, state: State) -> None:
    if job.snapshots.latest() != job.snapshots.path(state.step):
        save(job, state)


def peak_memory(ranks: Ranks) -> int | None:
    """The accelerator's peak so far; None on a CPU, where the process's own is meant."""
    return torch.cuda.max_memory_allocated() if ranks.device.type == "cuda" else None
