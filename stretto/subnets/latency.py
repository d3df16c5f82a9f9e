"""The latency table: cost of a layer on this machine by (experts, top-k), from which the latency of any Subnet is predicted as a sum.

Whole extracted networks are timed in the engine that serves them, and the cost of one layer follows by least squares. Timing
single blocks in a loop would find their weights in the cache, which does not happen in decoding.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, write_json
from stretto.base.track import Advance, progress
from stretto.engine.engine import Engine
from stretto.engine.forward_cpu import Integers
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.evals.loss import without_layers
from stretto.model.elastic import extract
from stretto.model.parallel import device_name
from stretto.model.spec import ModelConfig, Subnet, droppable_layers, fixed_layers
from stretto.model.transformer import Transformer
from stretto.ops.native import Library, load


class Workload(Config):
    """Work of one timed step."""

    phase: Literal["decode", "prefill"]
    """``decode``: one new token in each row; ``prefill``: all tokens of each row at once."""
    batch: int = Field(gt=0)
    """Rows."""
    context: int = Field(gt=0)
    """Tokens per row: the prompt of a prefill, or the cached tokens before a decoded one."""

    def label(self) -> str:
        return f"{self.phase} of {self.batch} x {self.context}"


DECODE = Workload(phase="decode", batch=1, context=64)
"""One sequence alone, early in its answer."""


def usual_workloads(config: ModelConfig) -> tuple[Workload, Workload]:
    """Decoding and prefilling one sequence, shorter if the network has few positions. Raises `UserError`: they are fewer than three, for
    a cached token, a decoded one and its successor."""
    longest = config.max_positions
    if longest < 3:
        raise UserError(
            f"max_positions: {longest}, and a measured decoding step needs 3; use a network with more positions"
        )
    return (
        DECODE.replace(context=min(DECODE.context, longest // 2)),
        Workload(phase="prefill", batch=1, context=min(256, longest - 1)),
    )


class Machine(Config):
    """Machine on which a table was measured. The table is valid on this machine only."""

    device: str
    """Model name of the device, as reported by its driver or the CPU."""
    num_threads: int
    """torch's number of threads on the host."""
    torch_version: str
    dtype: str
    """Data type of the weights, without ``torch.``."""


class Cell(Config):
    """Cost of one layer."""

    experts: int
    """Number of experts; 0 for a dense layer."""
    top_k: int
    """0 for a dense layer."""
    ms: float
    """Milliseconds per step."""


class Timing(Config):
    """Costs under one workload, from the fit."""

    workload: Workload
    fixed_ms: float
    """Embedding, final norm, head, and everything else that is independent of the layers, in milliseconds per step."""
    cells: tuple[Cell, ...]
    fit_error: float
    """Largest relative difference between the measured and the fitted time of a network."""
    held_out_error: float = 0.0
    """The same for networks of intermediate sizes, which were measured but not used in the fit."""

    def predict_ms(self, subnet: Subnet) -> float:
        """Milliseconds of one step of ``subnet``. Raises `UserError`: it is outside the measured range."""
        costs = {(cell.experts, cell.top_k): cell.ms for cell in self.cells}
        num_dense = len(subnet.layers) - len(subnet.experts)
        moe_ms = sum(_cell_ms(costs, *shape) for shape in zip(subnet.experts, subnet.top_k, strict=True))
        return self.fixed_ms + num_dense * costs.get((0, 0), 0.0) + moe_ms


Scalar = int | float | bool | str | None
Shape = dict[str, Scalar | tuple[int, ...] | dict[str, Scalar]]
"""Fields of a `ModelConfig`, nested records included."""


class LatencyTable(Config):
    """Measured costs of layers. Predicts the latency of any Subnet within the measured range."""

    machine: Machine
    shape: Shape
    """The maximum network's fields that affect its speed."""
    timings: tuple[Timing, ...] = Field(min_length=1)
    """By workload; searches use the first."""
    num_samples: int
    num_disturbed: int
    """Samples taken while other work slowed the machine."""
    num_uncertain: int
    """Networks without an undisturbed sample. Above 0, measure again on a less busy machine."""

    def timing(self, workload: Workload) -> Timing:
        for timing in self.timings:
            if timing.workload == workload:
                return timing
        measured = ", ".join(timing.workload.label() for timing in self.timings)
        raise UserError(
            f"latency table: {workload.label()} was not measured (only {measured}); run `stretto latency` again"
        )

    def predict_ms(self, subnet: Subnet, workload: Workload) -> float:
        """Milliseconds of one step of ``subnet``. Raises `UserError`: the workload was not measured, or the Subnet is outside the
        measured range."""
        return self.timing(workload).predict_ms(subnet)


def write_table(path: Path | str, table: LatencyTable) -> None:
    write_json(path, table.model_dump(mode="json"))


def read_table(path: Path | str, model: Transformer) -> LatencyTable:
    """Read a table that is valid for ``model`` on this machine. Raises `UserError`: no such file, not a table, or measured on another
    machine, data type or network.
    """
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: not a latency table; measure one with `stretto latency`")
    table = validate(LatencyTable, tree, source=str(path))
    require_match(table, model, str(path))
    return table


def require_match(table: LatencyTable, model: Transformer, source: str) -> None:
    """Raise `UserError` if ``table`` was measured on another machine or network. ``source``: its name in the message."""
    actual = {**this_machine(model).model_dump(), **speed_shape(model.config)}
    for field, value in {**table.machine.model_dump(), **table.shape}.items():
        if actual.get(field) != value:
            problem = f"{field}: measured with {value}, now it is {actual.get(field)}"
            raise UserError(f"{source}: {problem}; run `stretto latency` again")


def this_machine(model: Transformer) -> Machine:
    device = model.head_VD.device
    return Machine(
        device=device_name(device),
        num_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        dtype=str(serving_dtype(device)).removeprefix("torch."),
    )


def serving_dtype(device: torch.device) -> torch.dtype:
    """Default data type in which a network is served, and so the data type of tables."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _cell_ms(costs: dict[tuple[int, int], float], experts: int, top_k: int) -> float:
    """Cost of a layer, interpolated linearly in k, and for each k in the number of experts."""
    if (experts, top_k) in costs:
        return costs[experts, top_k]
    ks = sorted({k for num, k in costs if num})
    nums = sorted({num for num, _ in costs if num})
    if not (ks[0] <= top_k <= ks[-1] and nums[0] <= experts <= nums[-1]):
        raise UserError(
            f"latency table: a layer of {experts} experts, top-{top_k} lies outside the measured "
            f"{nums[0]}-{nums[-1]} experts, top-{ks[0]}-{ks[-1]}; measure the table again with that size"
        )
    below, above = max(k for k in ks if k <= top_k), min(k for k in ks if k >= top_k)

    def at(k: int) -> float:
        measured = sorted((num, ms) for (num, cell_k), ms in costs.items() if cell_k == k)
        # below the smallest measured number of experts np.interp repeats the end value: a cost slightly too high
        return float(np.interp(experts, [num for num, _ in measured], [ms for _, ms in measured]))

    return float(np.interp(top_k, [below, above], [at(below), at(above)]))


def speed_shape(config: ModelConfig) -> Shape:
    """Fields of ``config`` that affect the speed: all except orders, balance branches and rotary frequencies."""
    ignored = {"expert_order", "layer_order", "widths", "num_branches", "norm_eps", "max_positions"}
    return config.model_dump(exclude={*ignored, "rope_theta", "rope_scaling"})


WARM_UP_STEPS = 2
TIMED_STEPS = 10
MIN_STEPS, SAMPLE_S = 3, 0.5
"""A sample of long steps ends after this number of steps (warm-up included) and this many seconds (ours): disturbances and cold caches
are then a small share of each.
"""
BUDGET_S = 60.0
"""Seconds after which no further round of measurements starts, except that every network is measured twice (ours)."""
PAGE_SIZE = 16
MAX_SLOWDOWN = 1.25
"""A sample counts as disturbed if the matmul beside it was slower than the fastest one of the run by this factor (ours)."""
MATMUL_SIZE = 512
"""Long enough to be slowed by other work (a few milliseconds on a CPU), and short enough to run beside every sample (ours)."""


TimeFn = Callable[[Transformer, Workload], float]
"""Seconds of one step of an ordinary (extracted) network under a workload, after warm-up."""


def engine_seconds(device: torch.device, integers: Integers = MappingProxyType({})) -> TimeFn:
    """A function that times steps of the engine as it serves: with cache, sampling, and compiled kernels if available. ``integers`` are
    those of the model, as in `Engine`."""
    return partial(step_seconds, library=load() if device.type == "cpu" else None, integers=integers)


def step_seconds(
    model: Transformer, workload: Workload, library: Library | None, integers: Integers = MappingProxyType({})
) -> float:
    """Seconds of one engine step: the fastest of a few after a warm-up. Rows of a decoding step have ``workload.context`` cached tokens
    or a few more; a prefill step computes all tokens and samples one per row.
    """
    num_steps = WARM_UP_STEPS + TIMED_STEPS
    room = model.config.max_positions - workload.context
    num_new = min(num_steps + 1, room) if workload.phase == "decode" else 1
    longest = workload.context + num_new
    pages = -(-longest // PAGE_SIZE) + 1
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=workload.batch * pages + 1,
        max_batch=workload.batch,
        max_len=longest,
        max_step_tokens=workload.batch * workload.context,
        prefix_cache=False,
    )
    engine = Engine(model.requires_grad_(False), None, config, routes=False, library=library, integers=integers)
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=0, max_tokens=num_new, ignore_eos=True)
    steps_s: list[float] = []

    def is_enough() -> bool:
        return len(steps_s) >= num_steps or (len(steps_s) >= MIN_STEPS and sum(steps_s) >= SAMPLE_S)

    while not is_enough():
        for row in range(workload.batch):
            ids = torch.randint(model.config.vocab_size, (workload.context,), generator=generator).tolist()
            engine.add(Request(f"timing-{row}", tuple(ids), sampling, Phases(model.config.full())), stream=False)
        if workload.phase == "decode":
            engine.step()  # prefills all prompts
        while engine.has_work and not is_enough():
            start = time.perf_counter()
            engine.step()  # returns tokens, so the device has finished
            steps_s.append(time.perf_counter() - start)
    return min(steps_s[min(WARM_UP_STEPS, len(steps_s) - 2) :])


def measure(
    model: Transformer,
    experts: Sequence[int],
    top_ks: Sequence[int],
    workloads: Sequence[Workload] = (DECODE,),
    *,
    num_rounds: int = 7,
    time_fn: TimeFn | None = None,
) -> LatencyTable:
    """Measure the table of ``model`` in the data type of serving, on the device that holds it.

    Each combination of ``experts`` and ``top_ks`` is timed at full depth, and the smallest and largest also at minimum depth. This
    determines the cost of a layer of each combination and the fixed cost. A few intermediate sizes are timed but not used in the fit:
    they give the error of predictions. Networks are timed in turns, so that a slow phase of the machine affects all of them, and the
    fastest sample of each counts. Each sample is between two runs of a fixed matmul, from which disturbed samples are counted.

    Args:
        num_rounds: largest number of turns of every network; fewer if they would take longer than `BUDGET_S`.
        time_fn: times one network; None: `engine_seconds`.
    """
    config, time_fn = model.config, time_fn or engine_seconds(model.head_VD.device)
    # the layers' own sizes too: a cell that occurs in few layers of every network could not be separated from the others
    widths = {num for num in (*experts, config.num_experts, *config.experts_by_layer) if config.choosable(num)}
    own_ks = {config.top_k, *config.top_k_by_layer}
    pairs = sorted({(num, min(k, config.choosable(num))) for num in widths for k in {*top_ks, *own_ks}})
    min_depth = len(fixed_layers(config.num_layers))
    fitted = [_at_most(config, config.num_layers, *pair) for pair in pairs]
    fitted += [_at_most(config, min_depth, *pair) for pair in (pairs[0], pairs[-1])]
    droppable_dense = set(droppable_layers(config)) & set(config.dense_layers)
    if (
        droppable_dense
    ):  # else every network drops dense layers together with MoE layers, and the costs cannot be separated
        fitted.append(without_layers(config, droppable_dense))
    fitted = list(dict.fromkeys(fitted))
    held_out = [_at_most(config, (min_depth + config.num_layers) // 2, *pair) for pair in _between(config, pairs)]
    held_out = [subnet for subnet in held_out if subnet not in fitted]
    samples = _Samples(model, time_fn)
    measured = samples.fastest_ms([*fitted, *held_out], workloads, num_rounds)

    def timing(workload: Workload) -> Timing:
        fitted_ms, held_out_ms = measured[workload][: len(fitted)], measured[workload][len(fitted) :]
        solved = _solve(config, workload, fitted, fitted_ms)
        errors = [abs(solved.predict_ms(subnet) / ms - 1.0) for subnet, ms in zip(held_out, held_out_ms, strict=True)]
        return solved.replace(held_out_error=max(errors, default=0.0))

    return LatencyTable(
        machine=this_machine(model),
        shape=speed_shape(config),
        timings=tuple(timing(workload) for workload in workloads),
        num_samples=samples.num_samples,
        num_disturbed=samples.num_disturbed,
        num_uncertain=samples.num_uncertain,
    )


def _at_most(config: ModelConfig, depth: int, experts: int, top_k: int) -> Subnet:
    """The nested Subnet of ``depth`` layers with so many experts and so large a top-k, or a layer's own if they are fewer."""
    full = config.subnet(depth)
    kept = tuple(min(experts, own) for own in full.experts)
    limits = zip(full.top_k, kept, strict=True)
    return full.replace(experts=kept, top_k=tuple(min(top_k, own, config.choosable(num)) for own, num in limits))


def _between(config: ModelConfig, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Two pairs of experts and k between ``pairs``; the middle one of ``pairs`` if there are none between."""
    nums, ks = zip(*pairs, strict=True)
    grid = itertools.product(range(min(nums), max(nums) + 1), range(min(ks), max(ks) + 1))
    others = [(num, k) for num, k in grid if k <= config.choosable(num) and (num, k) not in pairs]
    return [others[len(others) // 3], others[len(others) * 2 // 3]] if others else [pairs[len(pairs) // 2]]


class _Samples:
    """Timed samples, each between two runs of the same matmul, which show whether other work slowed the machine."""

    def __init__(self, model: Transformer, time_fn: TimeFn):
        device = model.head_VD.device
        self._model, self._time_fn, self._dtype = model, time_fn, serving_dtype(device)
        self._square = torch.ones(MATMUL_SIZE, MATMUL_SIZE, device=device)
        for _ in range(WARM_UP_STEPS):
            self._calibrate()
        self.num_samples = self.num_disturbed = self.num_uncertain = 0

    def fastest_ms(
        self, subnets: Sequence[Subnet], workloads: Sequence[Workload], num_rounds: int
    ) -> dict[Workload, list[float]]:
        """Milliseconds of the fastest sample of each of ``subnets``, by workload.

        Disturbances only add time, so disturbed samples need not be discarded. Networks without an undisturbed sample are counted.
        """
        samples: dict[tuple[Workload, int], list[tuple[float, float]]] = {}
        before_s = fastest_s = self._calibrate()

        def round_of(advance: Advance) -> None:
            nonlocal before_s, fastest_s
            for index, subnet in enumerate(subnets):
                # extracted again each round: all networks at once would not fit into memory
                network = extract(self._model, subnet).to(self._dtype)
                for workload in workloads:
                    step_s = self._time_fn(network, workload)
                    after_s = self._calibrate()
                    samples.setdefault((workload, index), []).append((max(before_s, after_s), step_s))
                    before_s, fastest_s = after_s, min(fastest_s, after_s)
                    advance(1)

        start = time.perf_counter()
        with progress(f"measure latency of {len(subnets)} sizes", len(subnets) * len(workloads)) as advance:
            round_of(advance)
        num_more = min(num_rounds - 1, max(1, int(BUDGET_S / (time.perf_counter() - start)) - 1))
        if num_more:
            with progress("measure latency, again", num_more * len(subnets) * len(workloads)) as advance:
                for _ in range(num_more):
                    round_of(advance)
        for of_network in samples.values():
            num_undisturbed = sum(matmul_s <= MAX_SLOWDOWN * fastest_s for matmul_s, _ in of_network)
            self.num_samples += len(of_network)
            self.num_disturbed += len(of_network) - num_undisturbed
            self.num_uncertain += not num_undisturbed
        places = range(len(subnets))
        return {
            workload: [1000.0 * min(step_s for _, step_s in samples[workload, index]) for index in places]
            for workload in workloads
        }

    def _calibrate(self) -> float:
        """Seconds of the fixed matmul."""
        _synchronise(self._square.device)
        start = time.perf_counter()
        self._square @ self._square
        _synchronise(self._square.device)
        return time.perf_counter() - start


def _solve(config: ModelConfig, workload: Workload, subnets: Sequence[Subnet], measured_ms: Sequence[float]) -> Timing:
    """Least squares of measured = fixed + Σ layers, in relative errors, so that small networks count as much as large ones.

    If dense layers are never dropped, their cost cannot be separated from the fixed cost. The minimum-norm solution divides it
    between them, and all predictions are the same.
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
