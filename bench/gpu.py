"""Compare a GPU with the CPU and the slow references, and measure the training step against the matrix products of the GPU.

    python -m bench.gpu [--device cuda] [--requests N] [--size small|large] [--steps N] [--mutant tf32]

Checks: logits and gradients of one network on the GPU and on the CPU, in fp32; greedy tokens of the engine against `generate_naive`
(if one differs, the reference's log-probabilities of the two tokens must be equal within rounding); log-probabilities of the engine and
the trainer in batch-invariant arithmetic, equal to the bit; FP8 products of the GPU's kernel against the exact emulation, forward and
backward. Exits with 1 if a check fails. ``--mutant tf32`` drops 13 bits of each product, which must fail.

Speed: matrix products of the GPU's library in bf16 and FP8, and a training step in fp32, bf16, bf16 with reproducible kernels, bf16
compiled, and with FP8 products, in tokens/s and as a share of the bf16 matrix product. Medians; every step has new rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from bench.common.measure import bench_parser, finish, table, wide_console
from bench.common.naive_engine import generate_naive, logits_naive, subnets_by_position
from bench.common.networks import random_network, shape
from bench.engine_equality import requests
from stretto.base.errors import UserError
from stretto.base.track import progress, say
from stretto.engine.engine import Engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.model.parallel import device_name, join
from stretto.model.spec import ModelConfig, count
from stretto.model.transformer import Context, Transformer, build
from stretto.ops import fp8
from stretto.ops.logprob import IGNORED, chosen_logprobs
from stretto.ops.matmul import PLAIN, Arithmetic
from stretto.ops.tuning import deterministic
from stretto.optim.build import build_optimizers
from stretto.optim.schedule import OptimConfig
from stretto.train.step import MicroBatch, forward_backward, optimisation_step

CLOSE = 1e-5
"""Limit of ‖GPU − CPU‖ / ‖CPU‖; another order of summation in fp32 changes less, TF32 changes 1e-3."""
NEAR = 1e-4
"""Limit of the difference, in nats, between two tokens whose order rounding can change."""
SHARED = (Arithmetic("fp32", True), Arithmetic("bf16", True), Arithmetic("fp8", True))
FP8_ERROR = 2.0**-8
"""The kernel returns bf16: half a unit in the last of its 8 bits, and the tensor cores' own rounding of sums."""
CEILING_SIZE = 8192
BITS_STEPS = 8
REPRODUCIBLE = "bf16, reproducible"
SIZES = {
    "small": ModelConfig(
        vocab_size=8192, hidden_size=256, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=64, num_experts=16, top_k=4,
        expert_intermediate_size=128, max_positions=1024,
    ),
    "large": ModelConfig(
        vocab_size=32768, hidden_size=2048, num_layers=8, num_heads=16, num_kv_heads=4, head_dim=128, num_experts=32,
        top_k=4, expert_intermediate_size=1024, max_positions=2048, qk_norm=True,
    ),
}  # fmt: skip
"""Networks of the training step: 18 million and 1.8 billion parameters."""
ROWS = {"small": (32, 512), "large": (8, 2048)}
OPTIM = OptimConfig(lr=1e-5)


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison with its result."""

    name: str
    result: str
    holds: bool


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=60, help="greedy requests to compare")
    parser.add_argument("--size", choices=SIZES, default="large", help="network of the training step")
    parser.add_argument("--steps", type=int, default=8, help="timed training steps of each kind; 0: checks only")
    parser.add_argument("--mutant", choices=("tf32",), help="compute fp32 products in TF32, which must fail")
    options = parser.parse_args()
    # set before CUDA starts: `deterministic` needs it for cuBLAS
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = join(options.device).device
    torch.backends.cuda.matmul.allow_tf32 = options.mutant == "tf32"
    console, failures = wide_console(), []
    shown = table(f"{device_name(device)}, torch {torch.__version__}", "", "result", "holds")
    for check in checks(device, options.requests):
        say(f"{check.name}: {check.result}")
        shown.add_row(check.name, check.result, "yes" if check.holds else "NO")
        failures += [] if check.holds else [f"{check.name}: {check.result}"]
    console.print(shown)
    if options.mutant is None and options.steps:
        console.print(rates(device, options.size, options.steps))
    finish(failures)


def checks(device: torch.device, num_requests: int) -> Iterator[Check]:
    """All checks, the cheapest first."""
    network = random_network(shape("demo")[0])
    copy = random_network(network.config).to(device)
    yield from _same_logits(network, copy)
    yield _same_gradients(network.config, device)
    yield from _same_bits(device)
    yield from _fp8_products(device)
    yield from _same_as_trainer(copy)
    yield _same_as_reference(copy, num_requests)


def _error(seen: Tensor, wanted: Tensor) -> float:
    seen, wanted = seen.double().cpu(), wanted.double().cpu()
    return float((seen - wanted).norm() / wanted.norm())


def _same_logits(network: Transformer, copy: Transformer) -> Iterator[Check]:
    config, device = network.config, copy.embedding.weight.device
    ids_BT = torch.randint(config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(1))
    half = config.subnet(depth=config.num_layers // 2, experts=config.widths[-1], top_k=1)
    for name, subnet in (("full", config.full()), ("small", half)):
        error = _error(copy.logits(ids_BT.to(device), subnet), network.logits(ids_BT, subnet))
        yield Check(f"logits, {name} network, GPU to CPU", f"{error:.1e}", error < CLOSE)


def _same_gradients(config: ModelConfig, device: torch.device) -> Check:
    """Gradients of a newly initialised network, which amplifies rounding less than a trained one."""
    gradients: list[dict[str, Tensor]] = []
    ids_BT = torch.randint(config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(2))
    for place in (torch.device("cpu"), device):
        model = build(config, 0, place)
        forward_backward(model, _batch(config, ids_BT.to(place)), torch.float32)
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    cpu, gpu = gradients
    assert cpu.keys() == gpu.keys()
    worst = max((_error(gpu[name], grad), name) for name, grad in cpu.items() if float(grad.norm()) > 0)
    return Check("gradients, GPU to CPU, worst parameter", f"{worst[0]:.1e} ({worst[1]})", worst[0] < 10 * CLOSE)


def _same_bits(device: torch.device) -> Iterator[Check]:
    """The same training twice; with torch's default kernels the results may differ."""
    for dtype in (torch.float32, torch.bfloat16):
        for is_packed in (False, True):
            for wanted in (False, True):
                kernels = "reproducible kernels" if wanted else "default kernels"
                name = (
                    f"{str(dtype)[6:]}, {'packed' if is_packed else 'whole'} rows, {BITS_STEPS} steps twice, {kernels}"
                )
                try:
                    with deterministic(wanted):
                        once, again = (_trained(device, dtype, is_packed) for _ in range(2))
                except UserError as error:
                    yield Check(name, str(error).splitlines()[0][:90], holds=False)
                    continue
                num = sum(not torch.equal(one, other) for one, other in zip(once, again, strict=True))
                yield Check(name, f"{num} of {len(once)} parameters differ", not (wanted and num))


def _trained(device: torch.device, dtype: torch.dtype, is_packed: bool) -> list[Tensor]:
    config, (rows, length) = SIZES["small"], ROWS["small"]
    generator, documents_BT = torch.Generator().manual_seed(4), torch.zeros(rows, length, dtype=torch.long)
    documents_BT[:, length // 3 :] = 1
    model = build(config, 0, device)
    optimizers, ranks = build_optimizers(OPTIM, model), join(device.type)
    for _ in range(BITS_STEPS):
        batch = _batch(config, torch.randint(config.vocab_size, (rows, length), generator=generator).to(device))
        if is_packed:
            batch = replace(batch, ctx=replace(batch.ctx, documents_BT=documents_BT.to(device)))
        optimisation_step(model, optimizers, [batch], ranks, clip_norm=1.0, balance_rate=1e-3, dtype=dtype)
    return [each.detach().cpu() for each in model.parameters()]


def _fp8_products(device: torch.device) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(3)
    x_ND, weight_FD, grad_NF = (
        torch.randn(*size, generator=generator).to(device) for size in ((384, 1024), (512, 1024), (384, 512))
    )
    why = fp8.why_emulated(weight_FD, batch_invariant=False)
    if why:
        yield Check("FP8 kernel", why, holds=device.type == "cpu")
        return
    x, weight = fp8.quantise_rows(x_ND), fp8.quantise_weight(weight_FD)
    errors = {"forward": _error(fp8.product_hopper(x, weight), fp8.product_reference(x, weight))}
    sides = [], []  # type: tuple[list[Tensor], list[Tensor]]
    for side, batch_invariant in zip(sides, (False, True), strict=True):
        leaves = [each.clone().requires_grad_() for each in (x_ND, weight_FD)]
        fp8.linear(*leaves, batch_invariant=batch_invariant).backward(grad_NF)
        side.extend(each.grad for each in leaves if each.grad is not None)
    for name, seen, wanted in zip(("gradient of x", "gradient of the weight"), *sides, strict=True):
        errors[name] = _error(seen, wanted)
    for name, error in errors.items():
        yield Check(f"FP8 kernel to emulation, {name}", f"{error:.1e}", error < FP8_ERROR)


@torch.no_grad()
def _same_as_trainer(model: Transformer) -> Iterator[Check]:
    """Log-probabilities of sampled tokens: the engine's against those of the trainer's forward pass."""
    config, device = model.config, model.embedding.weight.device
    for arithmetic in SHARED:
        sizes = EngineConfig(num_pages=400, max_batch=8, precision=arithmetic.precision, batch_invariant=True)
        engine = Engine(model, None, sizes)
        asked = [
            Request(str(place), tuple(range(10 + place, 30 + 3 * place)), Sampling(seed=place, max_tokens=24),
                    Phases(config.full()))
            for place in range(8)
        ]  # fmt: skip
        worst = 0.0
        for done in engine.generate(asked):
            ids_BT = torch.tensor([[*done.prompt, *done.tokens]], device=device)
            ctx = replace(Context.plain(ids_BT), operators=arithmetic.operators)
            targets_T = torch.cat((ids_BT[0, 1:], ids_BT.new_full((1,), IGNORED)))
            hidden_TD = model(ids_BT, config.full(), ctx).hidden_BTD[0]
            logp_T, _ = chosen_logprobs(hidden_TD, model.head_VD, targets_T, operators=arithmetic.operators)
            mine_T = torch.from_numpy(done.logprobs).to(device)
            worst = max(worst, float((logp_T[len(done.prompt) - 1 : -1] - mine_T).abs().max()))
        yield Check(f"engine to trainer, {arithmetic.precision} batch-invariant", f"{worst:.1e} nats", worst == 0.0)


def _same_as_reference(model: Transformer, num_requests: int) -> Check:
    asked = list(requests(model.config, num_requests, seed=0))
    engine = Engine(model, None, EngineConfig(num_pages=600, page_size=4, max_batch=8, max_step_tokens=64))
    done = {one.request_id: one.tokens for one in engine.generate(asked)}
    same, worst = 0, 0.0
    with progress("reference, token by token", num_requests) as advance:
        for request in asked:
            wanted = generate_naive(model, request.prompt, request.sampling, request.phases).tokens
            mine = done[request.id]
            same += mine == wanted
            if mine != wanted:
                worst = max(worst, _gap(model, request, mine, wanted))
            advance(1)
    seen = f"{same} of {num_requests}" + (f", others by a gap of at most {worst:.1e} nats" if worst else "")
    return Check("greedy tokens of the engine, fp32, mixed sizes", seen, worst < NEAR)


def _gap(model: Transformer, request: Request, mine: tuple[int, ...], wanted: tuple[int, ...]) -> float:
    """Difference of the two tokens' log-probabilities at the first position that differs, in nats, by the reference."""
    place = next((at for at, (one, other) in enumerate(zip(mine, wanted, strict=False)) if one != other), None)
    if place is None or request.sampling.repetition_penalty != 1.0:
        return float("inf") if place is None else NEAR / 2
    tokens = [*request.prompt, *wanted[:place]]
    subnets = subnets_by_position(tokens, len(request.prompt), request.phases)
    logp_V = logits_naive(model, tokens, subnets)[-1].log_softmax(-1)
    return float(logp_V[wanted[place]] - logp_V[mine[place]])


def _batch(config: ModelConfig, ids_BT: Tensor) -> MicroBatch:
    targets_BT = torch.cat((ids_BT[:, 1:], torch.full_like(ids_BT[:, :1], IGNORED)), dim=1)
    return MicroBatch("full", ids_BT, targets_BT, Context.plain(ids_BT), config.full(), int((targets_BT >= 0).sum()))


def rates(device: torch.device, size: str, num_steps: int) -> object:
    """The table of speeds."""
    config, (rows, length) = SIZES[size], ROWS[size]
    ceiling = _ceiling(device, torch.bfloat16)
    flops = 3 * count(config, config.full()).forward_flops(rows * length, length)
    model = build(config, 0, device)
    num_params = sum(each.numel() for each in model.parameters())
    shown = table(
        f"training step: {num_params / 1e6:,.0f}M parameters, {config.num_layers} layers of {config.hidden_size}, {config.num_experts} experts, "
        f"top-{config.top_k}, {rows} x {length} tokens",
        *("", "tokens/s", "TFLOP/s", "of bf16 products", "peak GiB"),
    )  # fmt: skip
    shown.add_row(f"product of {CEILING_SIZE}², bf16", "", f"{ceiling / 1e12:.0f}", "100%", "")
    if not fp8.why_emulated(torch.empty(128, 128, device=device), batch_invariant=False):
        shown.add_row(f"product of {CEILING_SIZE}², FP8 blocks", "", f"{_fp8_ceiling(device) / 1e12:.0f}", "", "")
    ways = {
        "fp32": (torch.float32, PLAIN, False),
        "bf16": (torch.bfloat16, PLAIN, False),
        REPRODUCIBLE: (torch.bfloat16, PLAIN, False),
        "fp8 products": (torch.float32, Arithmetic("fp8"), False),
        "bf16, compiled": (torch.bfloat16, PLAIN, True),  # last: a block stays compiled
    }
    for name, (dtype, arithmetic, compiled) in ways.items():
        try:
            with deterministic(name == REPRODUCIBLE):
                seconds, peak = _step_seconds(model, rows, length, device, dtype, arithmetic, compiled, num_steps)
        except (RuntimeError, UserError) as error:  # torch.OutOfMemoryError among them
            shown.add_row(name, f"failed: {str(error).splitlines()[0][:80]}", "", "", "")
            torch.cuda.empty_cache()
            continue
        rate = flops / seconds
        shown.add_row(
            name, f"{rows * length / seconds:,.0f}", f"{rate / 1e12:.1f}", f"{rate / ceiling:.0%}", f"{peak:.1f}"
        )
        say(f"{name}: {rows * length / seconds:,.0f} tokens/s")
    return shown


def _step_seconds(
    model: Transformer,
    rows: int,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
    arithmetic: Arithmetic,
    compiled: bool,
    num_steps: int,
) -> tuple[float, float]:
    """Median seconds of a whole step, and GiB at its peak."""
    config = model.config
    if compiled:
        for block in model.blocks:
            block.compile()
    optimizers, ranks = build_optimizers(OPTIM, model), join(device.type)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def step() -> float:
        batch = _batch(config, torch.randint(config.vocab_size, (rows, length), device=device))
        batch = replace(batch, ctx=replace(batch.ctx, operators=arithmetic.operators))
        done = optimisation_step(
            model, optimizers, [batch], ranks, clip_norm=OPTIM.clip_norm, balance_rate=0.0, dtype=dtype
        )
        return done.nll

    seconds = _median_seconds(step, device, num_steps)
    return seconds, torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def _median_seconds(work: Callable[[], object], device: torch.device, num: int, warm_up: int = 3) -> float:
    times_s = []
    for index in range(-warm_up, num):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        if index >= 0:
            times_s.append(time.perf_counter() - start)
    return median(times_s)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large product."""
    size = CEILING_SIZE if device.type == "cuda" else CEILING_SIZE // 8
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _median_seconds(lambda: a @ b, device, 10)


def _fp8_ceiling(device: torch.device) -> float:
    x_ND, weight_FD = (torch.randn(CEILING_SIZE, CEILING_SIZE, device=device) for _ in range(2))
    x, weight = fp8.quantise_rows(x_ND), fp8.quantise_weight(weight_FD)
    return 2 * CEILING_SIZE**3 / _median_seconds(lambda: fp8.product_hopper(x, weight), device, 10)


if __name__ == "__main__":
    main()
