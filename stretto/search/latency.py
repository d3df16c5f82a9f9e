"""The latency table: what a layer costs on this machine, by (experts kept, k), and what any Subnet costs as their sum.

`stretto.search.timing` measures it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, write_json
from stretto.model.parallel import device_name
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Transformer


class Workload(Config):
    """What one timed step does."""

    phase: Literal["decode", "prefill"]
    """``decode``: one new token in each row; ``prefill``: all tokens of each row at once."""
    batch: int = Field(gt=0)
    """Rows."""
    context: int = Field(gt=0)
    """Tokens a row has: the prompt of a prefill, the cache behind a decoded token."""

    def label(self) -> str:
        return f"{self.phase} of {self.batch} x {self.context}"


DECODE = Workload(phase="decode", batch=1, context=1)


class Machine(Config):
    """Where a table was measured; a table holds nowhere else."""

    device: str
    """Model name of the device, as its driver or the CPU gives it."""
    num_threads: int
    """Threads torch computes with on the host."""
    torch_version: str
    dtype: str
    """Of the weights, without ``torch.``."""


class Cell(Config):
    """Cost of one layer."""

    experts: int
    """Experts kept; 0 for a dense layer."""
    top_k: int
    """0 for a dense layer."""
    ms: float
    """Milliseconds a step."""


class Timing(Config):
    """The solved costs under one workload."""

    workload: Workload
    fixed_ms: float
    """Embedding, final norm, head and whatever else does not grow with the layers; milliseconds a step."""
    cells: tuple[Cell, ...]
    fit_error: float
    """Largest relative difference between a measured network and its fitted time."""


class LatencyTable(Config):
    """Measured layer costs; predicts the latency of any Subnet within the measured range as their sum."""

    machine: Machine
    shape: dict[str, int | float | bool | str | tuple[int, ...] | None]
    """The maximum network's fields that decide its speed."""
    timings: tuple[Timing, ...]
    num_samples: int
    num_disturbed: int
    """Samples taken while the machine was busy with something else."""
    num_uncertain: int
    """Measured networks none of whose samples was undisturbed: above 0, measure again on a calmer machine."""

    def timing(self, workload: Workload) -> Timing:
        for timing in self.timings:
            if timing.workload == workload:
                return timing
        known = ", ".join(timing.workload.label() for timing in self.timings)
        raise UserError(f"latency table: {workload.label()} was not measured (there is {known}); measure it again")

    def predict_ms(self, config: ModelConfig, subnet: Subnet, workload: Workload) -> float:
        """Milliseconds of one step of ``subnet`` of ``config``.

        Raises:
            UserError: the workload was not measured, or the Subnet lies outside the measured range.
        """
        timing = self.timing(workload)
        costs = {(cell.experts, cell.top_k): cell.ms for cell in timing.cells}
        num_dense = len(subnet.layers) - len(subnet.experts)
        moe_ms = sum(_cell_ms(costs, *shape) for shape in zip(subnet.experts, subnet.top_k, strict=True))
        return timing.fixed_ms + num_dense * costs.get((0, 0), 0.0) + moe_ms


def write_table(path: Path | str, table: LatencyTable) -> None:
    write_json(path, table.model_dump(mode="json"))


def read_table(path: Path | str, model: Transformer) -> LatencyTable:
    """Read a table that holds for ``model`` on this machine.

    Raises:
        UserError: no such file, not a table, or one of another machine, dtype or network.
    """
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: not a latency table; measure one with `stretto latency`")
    table = validate(LatencyTable, tree, source=str(path))
    require_match(table, model, str(path))
    return table


def require_match(table: LatencyTable, model: Transformer, source: str) -> None:
    """Refuse a table that was measured elsewhere, or of another network; ``source`` names it in the message."""
    asked = {**this_machine(model).model_dump(), **speed_shape(model.config)}
    for field, value in {**table.machine.model_dump(), **table.shape}.items():
        if asked.get(field) != value:
            raise UserError(
                f"{source}: {field}: measured with {value}, now it is {asked.get(field)}; run `stretto latency` again"
            )


def this_machine(model: Transformer) -> Machine:
    first = next(model.parameters())
    return Machine(
        device=device_name(first.device),
        num_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        dtype=str(first.dtype).removeprefix("torch."),
    )


def _cell_ms(costs: dict[tuple[int, int], float], experts: int, top_k: int) -> float:
    """Cost of a layer, linear between measured neighbours: in k, and for each k in the experts."""
    if (experts, top_k) in costs:
        return costs[experts, top_k]
    ks = sorted({k for num, k in costs if num})
    nums = sorted({num for num, _ in costs if num})
    if not (ks[0] <= top_k <= ks[-1] and nums[0] <= experts <= nums[-1]):
        raise UserError(
            f"latency table: a layer of {experts} experts, top-{top_k} lies outside the measured "
            f"{nums[0]}-{nums[-1]} experts, top-{ks[0]}-{ks[-1]}; measure it again with that size"
        )
    below, above = max(k for k in ks if k <= top_k), min(k for k in ks if k >= top_k)

    def at(k: int) -> float:
        known = sorted((num, ms) for (num, own), ms in costs.items() if own == k)
        # np.interp holds the end value where fewer experts than k are asked for: a cost slightly too high
        return float(np.interp(experts, [num for num, _ in known], [ms for _, ms in known]))

    return float(np.interp(top_k, [below, above], [at(below), at(above)]))


def speed_shape(config: ModelConfig) -> dict[str, int | float | bool | str | tuple[int, ...] | None]:
    """What decides the speed of a network: not its orders, its balance branches or its rotation's base."""
    ignored = {"expert_order", "layer_order", "widths", "num_branches", "rope_theta", "norm_eps", "max_positions"}
    return config.model_dump(exclude=ignored)
