"""Measuring the latency table.

Whole extracted networks are timed and the cost of one layer, by (experts kept, k), is solved for by least squares.
Timing single blocks in a loop would find their weights in the cache, where a decoding network never has them.

Shape letters: B rows, T positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from stretto.base.config import Config
from stretto.base.track import progress
from stretto.evals.loss import without_layers
from stretto.model.elastic import extract
from stretto.model.spec import ModelConfig, Subnet, droppable_layers, fixed_layers
from stretto.model.transformer import Context, Transformer
from stretto.search.latency import (
    DECODE,
    Cell,
    LatencyTable,
    Timing,
    Workload,
    require_match,
    speed_shape,
    this_machine,
)

WARM_UP_STEPS = 2
TIMED_STEPS = 10
MAX_SLOWDOWN = 1.25
"""A sample counts as disturbed when a matmul beside it ran this much slower than the fastest one of the run (ours)."""
MATMUL_SIZE = 512
"""Long enough to feel a neighbour (a few milliseconds on a CPU), short enough to run beside every sample (ours)."""


TimeFn = Callable[[Transformer, Workload], float]
"""Seconds of one step of an ordinary (extracted) network under a workload, warm."""


def measure(
    model: Transformer,
    experts: Sequence[int],
    top_ks: Sequence[int],
    workloads: Sequence[Workload] = (DECODE,),
    *,
    num_rounds: int = 7,
    time_fn: TimeFn | None = None,
) -> LatencyTable:
    """Measure the table of ``model`` in its own dtype, on the device that holds it.

    Each combination of ``experts`` and ``top_ks`` is timed at full and at least depth. The networks take turns, so that
    a slow spell of the machine meets all of them, and the fastest of their samples counts. Each sample stands between
    two runs of a fixed matmul, which tell how many were disturbed.

    Args:
        time_fn: times one network; by default a forward pass without a cache (`forward_seconds`).
    """
    config = model.config
    time_fn = time_fn or forward_seconds
    pairs = sorted({(num, min(k, num)) for num in {*experts, config.num_experts} for k in {*top_ks, config.top_k}})
    depths = sorted({len(fixed_layers(config.num_layers)), config.num_layers})
    subnets = [config.subnet(depth, num, k) for num, k in pairs for depth in depths]
    droppable_dense = set(droppable_layers(config)) & set(config.dense_layers)
    if droppable_dense:  # otherwise dense layers come and go together with MoE layers, and share their cost
        subnets.append(without_layers(config, droppable_dense))
    samples = _Samples(model, time_fn)
    with progress("measure latency", num_rounds * len(subnets) * len(workloads)) as advance:
        for _ in range(num_rounds):
            for index, subnet in enumerate(subnets):
                network = extract(model, subnet)  # made anew each round: all at once would not fit in memory
                for workload in workloads:
                    samples.take((index, workload), network, workload)
                    advance(1)
    kept_ms = samples.fastest_ms()
    timings = tuple(
        _solve(config, workload, subnets, [kept_ms[index, workload] for index in range(len(subnets))])
        for workload in workloads
    )
    return LatencyTable(
        machine=this_machine(model),
        shape=speed_shape(config),
        timings=timings,
        num_samples=samples.num_samples,
        num_disturbed=samples.num_disturbed,
        num_uncertain=samples.num_uncertain,
    )


class Check(Config):
    """Prediction against a true measurement of one Subnet."""

    subnet: Subnet
    workload: Workload
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Signed relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1.0


def check(
    table: LatencyTable,
    model: Transformer,
    subnets: Sequence[Subnet],
    *,
    num_rounds: int = 7,
    time_fn: TimeFn | None = None,
) -> list[Check]:
    """Measure ``subnets`` as they are and set the table's prediction beside it, for every workload of the table."""
    require_match(table, model, "latency table")
    samples = _Samples(model, time_fn or forward_seconds)
    workloads = [timing.workload for timing in table.timings]
    with progress("check latency", num_rounds * len(subnets) * len(workloads)) as advance:
        for _ in range(num_rounds):
            for index, subnet in enumerate(subnets):
                network = extract(model, subnet)
                for workload in workloads:
                    samples.take((index, workload), network, workload)
                    advance(1)
    measured_ms = samples.fastest_ms()
    return [
        Check(
            subnet=subnet,
            workload=workload,
            predicted_ms=table.predict_ms(model.config, subnet, workload),
            measured_ms=measured_ms[index, workload],
        )
        for index, subnet in enumerate(subnets)
        for workload in workloads
    ]


@torch.inference_mode()
def forward_seconds(model: Transformer, workload: Workload) -> float:
    """Seconds of a forward pass with the head at the last position of each row: the fastest of a few, after a warm-up.

    There is no cache: a decode step reads all weights that one token a row reads, and none of its context.
    """
    head_VD = model.head_VD
    length = 1 if workload.phase == "decode" else workload.context
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(model.config.vocab_size, (workload.batch, length), generator=generator).to(head_VD.device)
    subnet, ctx = model.config.full(), Context.plain(ids_BT)
    taken_s = []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        _synchronise(head_VD.device)
        start = time.perf_counter()
        hidden_BTD = model(ids_BT, subnet, ctx).hidden_BTD
        F.linear(hidden_BTD[:, -1], head_VD)
        _synchronise(head_VD.device)
        taken_s.append(time.perf_counter() - start)
    return min(taken_s[WARM_UP_STEPS:])


class _Samples:
    """Timed samples, each between two runs of the same matmul that say how busy the machine was."""

    def __init__(self, model: Transformer, time_fn: TimeFn):
        first = next(model.parameters())
        self._time_fn, self._device = time_fn, first.device
        self._square = torch.ones(MATMUL_SIZE, MATMUL_SIZE, device=first.device)
        self._taken: dict[tuple[int, Workload], list[tuple[float, float]]] = {}
        for _ in range(WARM_UP_STEPS):
            self._calibrate()
        self._before_s = self._calibrate()
        self._fastest_s = self._before_s
        self.num_samples = self.num_disturbed = self.num_uncertain = 0

    def take(self, key: tuple[int, Workload], network: Transformer, workload: Workload) -> None:
        taken_s = self._time_fn(network, workload)
        after_s = self._calibrate()
        self._taken.setdefault(key, []).append((max(self._before_s, after_s), taken_s))
        self._before_s = after_s
        self._fastest_s = min(self._fastest_s, after_s)

    def fastest_ms(self) -> dict[tuple[int, Workload], float]:
        """Fastest sample of each key: what disturbs a step only ever adds time.

        So a disturbed sample need not be thrown away to do no harm; a key of which all were disturbed is counted.
        """
        fastest = {}
        for key, samples in self._taken.items():
            fastest[key] = 1000.0 * min(taken_s for _, taken_s in samples)
            calm = [sample for sample in samples if sample[0] <= MAX_SLOWDOWN * self._fastest_s]
            self.num_samples += len(samples)
            self.num_disturbed += len(samples) - len(calm)
            self.num_uncertain += not calm
        return fastest

    def _calibrate(self) -> float:
        _synchronise(self._device)
        start = time.perf_counter()
        self._square @ self._square
        _synchronise(self._device)
        return time.perf_counter() - start


def _solve(config: ModelConfig, workload: Workload, subnets: Sequence[Subnet], measured_ms: Sequence[float]) -> Timing:
    """Least squares of measured = fixed + Σ layers, in relative errors: small networks count as much as large ones.

    Where dense layers are never dropped, their cost cannot be told from the fixed part; the minimum-norm solution
    splits it, and every prediction is the same.
    """
    shapes = sorted({shape for subnet in subnets for shape in zip(subnet.experts, subnet.top_k, strict=True)})
    if config.dense_layers:
        shapes.insert(0, (0, 0))
    rows = []
    for subnet in subnets:
        layers = list(zip(subnet.experts, subnet.top_k, strict=True))
        layers += [(0, 0)] * (len(subnet.layers) - len(layers))
        rows.append([1.0, *(layers.count(shape) for shape in shapes)])
    matrix, target = np.array(rows), np.array(measured_ms)
    solution = np.linalg.lstsq(matrix / target[:, None], np.ones(len(target)), rcond=None)[0]
    fitted = matrix @ solution
    return Timing(
        workload=workload,
        fixed_ms=float(solution[0]),
        cells=tuple(
            Cell(experts=num, top_k=k, ms=float(ms)) for (num, k), ms in zip(shapes, solution[1:], strict=True)
        ),
        fit_error=float(np.abs(fitted / target - 1.0).max()),
    )


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
