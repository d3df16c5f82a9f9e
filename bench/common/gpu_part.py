"""What the parts of `bench.gpu` share: the interface of a part, networks of known shapes, and a timed training step.

A part is a module of `bench.gpu_parts` with a function ``cases(setting: Setting) -> Iterator[Case]``. The command runs the cases in
order and stores each outcome at once, so a case should take a minute at most, and must not need the outcome of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench.common.networks import shape
from stretto.model.counts import count
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Transformer, load_state, skeleton
from stretto.ops.logprob import IGNORED
from stretto.ops.matmul import Arithmetic
from stretto.ops.operators import ORDINARY
from stretto.optim.build import build_optimizers
from stretto.optim.schedule import OptimConfig
from stretto.train.step import MicroBatch, StepResult, optimisation_step

OPTIM = OptimConfig(lr=1e-5)
CEILING_SIZE = 8192
"""Rows and columns of the largest products that the others are compared with."""
_WIDE = ModelConfig(
    vocab_size=32768, hidden_size=2048, num_layers=8, num_heads=16, num_kv_heads=4, head_dim=128, num_experts=32, top_k=4,
    expert_intermediate_size=1024, max_positions=2048, qk_norm=True,
)  # fmt: skip
SHAPES = {
    "tiny": shape("tiny")[0],
    "small": ModelConfig(
        vocab_size=8192, hidden_size=256, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=64, num_experts=16, top_k=4,
        expert_intermediate_size=128, max_positions=1024,
    ),
    "1.8b": _WIDE,
    "3.4b": _WIDE.model_copy(update={"num_experts": 64, "top_k": 8, "widths": (64,)}),
    "olmoe": ModelConfig(
        vocab_size=50304, hidden_size=2048, num_layers=16, num_heads=16, num_kv_heads=16, head_dim=128, num_experts=64, top_k=8,
        expert_intermediate_size=1024, qk_norm_wide=True, router="softmax", selection_bias=False, normalize_gates=False,
    ),
    "qwen-moe": ModelConfig(
        vocab_size=151936, hidden_size=2048, num_layers=24, num_heads=16, num_kv_heads=16, head_dim=128, num_experts=60, top_k=4,
        expert_intermediate_size=1408, num_shared_experts=4, attention_bias=True, router="softmax", selection_bias=False,
        normalize_gates=False, max_positions=8192,
    ),
}  # fmt: skip
"""Networks: 18 million, 1.8 and 3.4 billion parameters, and those of OLMoE-1B-7B (6.9 billion) and Qwen1.5-MoE-A2.7B (14.3)."""
_ROWS = {"tiny": (4, 64), "small": (32, 512)}
"""Rows and length of a micro-batch; 8 rows of 2,048 where nothing is listed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a part is given."""

    device: torch.device
    size: str
    """A key of `SHAPES`."""
    num_steps: int
    """Timed steps of each kind."""
    num_requests: int
    """Requests whose greedy answers are compared."""
    mutant: str | None = None
    """Fault that the checks must find."""

    @property
    def config(self) -> ModelConfig:
        return SHAPES[self.size]

    @property
    def rows(self) -> tuple[int, int]:
        """Rows and length of a micro-batch: 16,384 tokens of the networks that are larger than `small`."""
        return _ROWS.get(self.size, (8, 2048))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a case."""

    values: Mapping[str, float | str]
    """By name with unit, in the order in which they are shown."""
    holds: bool | None = None
    """Result of a check; None: a measurement."""


@dataclass(frozen=True, slots=True)
class Case:
    """One check or measurement."""

    name: str
    """Unique in its part, with everything that distinguishes it, such as the size of the network."""
    run: Callable[[], Outcome]


def network(config: ModelConfig, device: torch.device, seed: int = 0) -> Transformer:
    """Random weights like `stretto.model.transformer.build`'s, drawn on ``device``, which takes no time for billions of them."""
    generator, std = torch.Generator(device).manual_seed(seed), 0.5 / config.hidden_size**0.5

    def values(name: str, size: torch.Size) -> Tensor:
        if name.endswith(("norm.weight", "_norm")):
            return torch.ones(size, device=device)
        if name.endswith(("bias", "sinks")):
            return torch.zeros(size, device=device)
        return torch.randn(size, device=device, generator=generator).mul_(std)

    model = skeleton(config)
    return load_state(model, ((name, values(name, each.shape)) for name, each in model.named_parameters()), device)


def batch_of(ids_BT: Tensor, config: ModelConfig, ctx: Context | None = None) -> MicroBatch:
    """A micro-batch that trains the full network on every next token of ``ids_BT``."""
    targets_BT = torch.cat((ids_BT[:, 1:], torch.full_like(ids_BT[:, :1], IGNORED)), dim=1)
    num_targets = ids_BT.shape[0] * (ids_BT.shape[1] - 1)
    ctx = ctx or Context.plain(ids_BT)
    return MicroBatch("full", ids_BT, targets_BT, ctx, config.full(), num_targets, num_own_targets=num_targets)


def random_ids(setting: Setting) -> Tensor:
    """Ids of one micro-batch [B, T]."""
    return torch.randint(setting.config.vocab_size, setting.rows, device=setting.device)


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of a training step."""

    tokens_per_s: float
    tflops: float
    """Model FLOPs per second in 10¹²: forward and twice that for backward, without recomputation."""
    peak_gib: float

    @property
    def values(self) -> dict[str, float | str]:
        return {"tokens/s": self.tokens_per_s, "TFLOP/s": self.tflops, "peak GiB": self.peak_gib}


def training_step(
    model: Transformer,
    setting: Setting,
    *,
    num_micro: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    arithmetic: Arithmetic | None = None,
    context: Callable[[Tensor], Context] = Context.plain,
    optim: OptimConfig = OPTIM,
) -> Callable[[], object]:
    """A whole step, with clipping, the router's own choices, balance biases and AdamW, on new rows at each call. ``arithmetic``: that of
    an RL trainer; None: torch's operators under autocast in ``dtype``."""
    optimizers, config, operators = build_optimizers(optim, model), setting.config, ORDINARY
    if arithmetic is not None:
        operators, dtype = arithmetic.training(setting.device)

    def step() -> object:
        batches = []
        for _ in range(num_micro):
            ids_BT = random_ids(setting)
            batches.append(batch_of(ids_BT, config, replace(context(ids_BT), operators=operators)))
        return run_step(model, optimizers, batches, setting, dtype)

    return step


def run_step(
    model: Transformer,
    optimizers: Sequence[Optimizer],
    batches: Sequence[MicroBatch],
    setting: Setting,
    dtype: torch.dtype,
) -> StepResult:
    """One optimisation step with clipping and balance biases."""
    ranks = join(setting.device.type)
    return optimisation_step(
        model, optimizers, batches, ranks, clip_norm=OPTIM.clip_norm, balance_rate=1e-3, dtype=dtype
    )


def step_rate(step: Callable[[], object], setting: Setting, num_micro: int = 1) -> Rate:
    """Speed of ``step``, of ``num_micro`` micro-batches: the median over the setting's steps."""
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setting.device)
    seconds = median_seconds(step, setting.device, setting.num_steps)
    peak = torch.cuda.max_memory_allocated(setting.device) / 2**30 if setting.device.type == "cuda" else 0.0
    rows, length = setting.rows
    num_tokens = num_micro * rows * length
    flops = 3 * count(setting.config, setting.config.full()).forward_flops(num_tokens, length)
    return Rate(num_tokens / seconds, flops / seconds / 1e12, peak)


def median_seconds(work: Callable[[], object], device: torch.device, num: int, warm_up: int = 3) -> float:
    """Median duration of ``work`` over ``num`` calls, after ``warm_up`` others."""
    times_s = []
    for index in range(-warm_up, num):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        if index >= 0:
            times_s.append(time.perf_counter() - start)
    return median(times_s)


def wait(device: torch.device) -> None:
    """Wait for the kernels of ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relative_error(seen: Tensor, wanted: Tensor) -> float:
    """‖seen − wanted‖ / ‖wanted‖, in fp64."""
    seen, wanted = seen.double().cpu(), wanted.double().cpu()
    return float((seen - wanted).norm() / wanted.norm())
