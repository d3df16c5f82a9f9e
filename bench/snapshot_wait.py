"""Time that a training step waits for a snapshot of a network of a billion parameters: written in the background, and blocking.

    python -m bench.snapshot_wait [--params 1e9] [--moments 1] [--snapshots 3] [--folder FOLDER]

One rank. The state is the network in fp32 and ``--moments`` tensors of the same size (AdamW has two, Muon one). In the background,
memory holds the state twice. Before each snapshot the weights change, and a matrix product is timed alone and while the thread writes:
what writing takes from training. On a shared machine the processor time of a wait says what it is on a quiet one.

Fails (exit code 1) if a step waits longer than `AIM_S` for a background snapshot, or if one read back is not the state of its step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.optim import Optimizer

from bench.common.measure import bench_parser, finish, table
from stretto.base.records import Meter
from stretto.base.track import wide_console
from stretto.model.counts import count
from stretto.model.parallel import Ranks, join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer, initial_state, load_state, skeleton
from stretto.optim.build import build_optimizers
from stretto.optim.schedule import OptimConfig
from stretto.train.snapshot import SnapshotMeta, Snapshots, SnapshotWriter

AIM_S = 1.0
PRODUCT_SIZE, NUM_PRODUCTS = 1024, 5


@dataclass(slots=True)
class Times:
    """Of the snapshots that were written in one way."""

    waits_s: list[float] = field(default_factory=list)
    """How long the step waited."""
    busy_s: list[float] = field(default_factory=list)
    """Processor time of that wait."""
    disk_s: list[float] = field(default_factory=list)
    """Time until the snapshot was on disk."""
    slower: list[float] = field(default_factory=list)
    """Time of a product while the thread wrote, over its time alone; empty where no thread writes."""

    def cells(self) -> list[str]:
        slower = f"{statistics.median(self.slower):.2f}" if self.slower else ""
        waits = f"{max(self.waits_s):.2f}", f"{min(self.waits_s):.2f}", f"{min(self.busy_s):.2f}"
        return [*waits, f"{max(self.disk_s):.1f}", slower]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--params", type=float, default=1e9)
    parser.add_argument("--moments", type=int, default=1, choices=(0, 1, 2))
    parser.add_argument("--snapshots", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; default: the temporary folder")
    options = parser.parse_args()
    ranks, model = join("cpu"), network(options.params)
    optimizers = build_optimizers(OptimConfig(lr=1e-3), model)
    for name in ("exp_avg", "exp_avg_sq")[: options.moments]:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter][name] = torch.full_like(parameter, 0.5)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    gigabytes = 4e-9 * num_params * (1 + options.moments)
    title = f"{num_params / 1e9:.2f}B parameters, fp32, {options.moments} moments: {gigabytes:.1f} GB"
    waits = "a step waits, s: slowest", "fastest", "its processor time"
    shown, failures = table(title, "snapshots", *waits, "until it is on disk, s", "product, × alone"), list[str]()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        snapshots = Snapshots(Path(folder), keep=1)
        for writes in ("background", "blocking"):
            writer = SnapshotWriter(snapshots, ranks, writes)
            if writes == "background":
                start_s = time.perf_counter()
                writer.reserve(model, optimizers)
                reserve_s = f"{time.perf_counter() - start_s:.2f}"
                shown.add_row("memory of the copy, once, after step 1", reserve_s, *[""] * 4)
            times = write_snapshots(writer, model, optimizers, options.snapshots, writes == "background")
            shown.add_row(f"{writes}, {options.snapshots} snapshots", *times.cells())
            if writes == "background":
                slowest_s = max(times.waits_s)
                failures += [f"a step waits {slowest_s:.2f} s, more than {AIM_S:g} s"] * (slowest_s > AIM_S)
                is_restored = restores(snapshots, model, options.snapshots, ranks)
                failures += ["a snapshot is not the state of its step"] * (not is_restored)
    wide_console().print(shown)
    wide_console().print(f"aim: a step waits at most {AIM_S:g} s for a snapshot in the background")
    finish(failures)


def write_snapshots(
    writer: SnapshotWriter, model: Transformer, optimizers: Sequence[Optimizer], num: int, in_background: bool
) -> Times:
    """Write snapshots of steps 1 to ``num`` and close ``writer``."""
    times = Times()
    for step in range(1, 1 + num):
        change(model, step)
        alone_s, start_s, start_busy_s = product_s(), time.perf_counter(), time.thread_time()
        writer.save(model, optimizers, meta(step))
        times.waits_s.append(time.perf_counter() - start_s)
        times.busy_s.append(time.thread_time() - start_busy_s)
        if in_background:
            times.slower.append(product_s() / alone_s)
            change(model, -1)  # training goes on; the snapshot must not see it
        writer.wait()
        times.disk_s.append(time.perf_counter() - start_s)
    writer.close()
    return times


def restores(snapshots: Snapshots, model: Transformer, step: int, ranks: Ranks) -> bool:
    """Whether the snapshot of ``step`` holds the weights of that step."""
    change(model, -1)
    snapshots.load(snapshots.path(step), model, (), ranks)
    return all(float(parameter.detach().flatten()[0]) == step for parameter in model.parameters())


def network(num_params: float) -> Transformer:
    """A network of about ``num_params`` parameters with 32 experts of which 4 are used, on the CPU."""
    shape = {"vocab_size": 32_000, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
    shape |= {"num_experts": 32, "top_k": 4, "expert_intermediate_size": 512}
    sizes = [count(each, each.full()).total_params for each in (ModelConfig(**shape, num_layers=num) for num in (4, 5))]
    num_layers = 4 + round((num_params - sizes[0]) / (sizes[1] - sizes[0]))
    config = ModelConfig(**shape, num_layers=num_layers)
    return load_state(skeleton(config), initial_state(config, 0), torch.device("cpu"))


@torch.no_grad()
def change(model: Transformer, step: int) -> None:
    """The weights of ``step``."""
    for parameter in model.parameters():
        parameter.fill_(float(step))


def product_s() -> float:
    """Median time of a matrix product."""
    left, times_s = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE), []
    for _ in range(NUM_PRODUCTS):
        start_s = time.perf_counter()
        left @ left
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


def meta(step: int) -> SnapshotMeta:
    receipt = Meter("pretrain", "cpu", 1).receipt(None)
    return SnapshotMeta(
        step=step,
        loader={},
        receipt=receipt,
        run_id="bench",
        layer_order=(),
        tokens_by_kind={},
        recipe={},
        data_hash="",
    )


if __name__ == "__main__":
    main()
