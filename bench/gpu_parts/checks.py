"""Checks: the same network on the GPU and on the CPU, the engine against slow references and the trainer, and reproducible training.

Logits and gradients of one network on both devices, in fp32; greedy tokens of the engine against `generate_naive` (if one differs, the
reference's log-probabilities of the two tokens must be equal within rounding); log-probabilities of the engine and the trainer in
batch-invariant arithmetic, equal to the bit; FP8 products of the GPU's kernel against the exact emulation, forward and backward; the same
training twice; the places where a training step waits for the GPU; and the kernels that decode (`bench.common.kernel_checks`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.common import kernel_checks
from bench.common.gpu_part import Case, Outcome, Setting, batch_of, network, relative_error, training_step
from bench.common.naive_engine import generate_naive, logits_naive, subnets_by_position
from bench.common.networks import random_network, shape
from bench.engine_equality import requests
from stretto.engine.engine import Engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Context, Transformer, build
from stretto.ops import fp8, fp8_rows
from stretto.ops.documents import Documents
from stretto.ops.logprob import IGNORED, chosen_logprobs
from stretto.ops.matmul import Arithmetic, Precision
from stretto.ops.operators import attention, attention_reference, document_mask
from stretto.ops.tuning import deterministic
from stretto.train.step import forward_backward

CLOSE = 1e-5
"""Limit of ‖GPU − CPU‖ / ‖CPU‖; another order of summation in fp32 changes less, TF32 changes 1e-3."""
NEAR = 1e-4
"""Limit of the difference, in nats, between two tokens whose order rounding can change."""
FP8_ERROR = 2.0**-8
"""The kernel returns bf16: half a unit in the last of its 8 bits, and the tensor cores' own rounding of sums."""
BITS_STEPS = 8
MAX_WAITS = 1
"""Times that a training step may wait for the GPU: once, to read its losses and the norm of its gradient."""


def cases(setting: Setting) -> Iterator[Case]:
    """All checks, the cheapest first."""
    device, config = setting.device, shape("demo")[0]
    plain, copy = random_network(config), random_network(config).to(device)
    if setting.mutant is not None and device.type == "cpu":
        _drop_bits(copy)
    half = config.subnet(depth=config.num_layers // 2, experts=config.widths[-1], top_k=1)
    for name, subnet in (("full", config.full()), ("small", half)):
        yield Case(f"logits, {name} network, GPU to CPU", partial(_same_logits, plain, copy, subnet))
    yield Case("gradients, GPU to CPU", partial(_same_gradients, config, setting))
    if device.type == "cuda":
        yield Case("waits of a training step for the GPU", partial(_waits, setting))
    for dtype in (torch.float32, torch.bfloat16):
        for rows in ("whole", "packed"):
            for kernels in ("default", "reproducible"):
                name = f"{str(dtype)[6:]}, {rows} rows, {BITS_STEPS} steps twice, {kernels} kernels"
                yield Case(name, partial(_same_bits, setting, dtype, rows == "packed", kernels == "reproducible"))
    yield Case("FP8 kernel to emulation", partial(_fp8_products, device))
    yield Case("rowwise FP8 to emulation", partial(_fp8_rows, device))
    yield Case("attention by document to attention with masks", partial(_documents, device))
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp8")
    for precision in precisions:
        yield Case(f"engine to trainer, {precision} batch-invariant", partial(_same_as_trainer, copy, precision))
    yield Case("greedy tokens of the engine, fp32", partial(_same_as_reference, copy, setting.num_requests))
    yield from kernel_checks.cases(setting)


@torch.no_grad()
def _drop_bits(model: Transformer) -> None:
    """The mutant where there is no TF32: weights with its 10 bits after the leading one."""
    for each in model.parameters():
        each.copy_(((each.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32))


def _same_logits(plain: Transformer, copy: Transformer, subnet: Subnet) -> Outcome:
    config, device = plain.config, copy.embedding.weight.device
    ids_BT = torch.randint(config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(1))
    error = relative_error(copy.logits(ids_BT.to(device), subnet), plain.logits(ids_BT, subnet))
    return Outcome({"relative error": error}, error < CLOSE)


def _same_gradients(config: ModelConfig, setting: Setting) -> Outcome:
    """Gradients of a newly initialised network, which amplifies rounding less than a trained one."""
    gradients: list[dict[str, Tensor]] = []
    ids_BT = torch.randint(config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(2))
    for place in (torch.device("cpu"), setting.device):
        model = build(config, 0, place)
        if setting.mutant is not None and gradients and place.type == "cpu":
            _drop_bits(model)
        forward_backward(model, batch_of(ids_BT.to(place), config), torch.float32)
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    cpu, gpu = gradients
    assert cpu.keys() == gpu.keys()
    errors = {name: relative_error(gpu[name], grad) for name, grad in cpu.items() if float(grad.norm()) > 0}
    worst = max(errors, key=lambda name: errors[name])
    return Outcome({"relative error": errors[worst], "of": worst}, errors[worst] < 10 * CLOSE)


def _waits(setting: Setting) -> Outcome:
    """Synchronising calls of one step after the first ones, by the line of Python that made them."""
    small = replace(setting, size="small")
    step = training_step(network(small.config, setting.device), small)
    for _ in range(2):
        step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{each.filename.rpartition('/')[2]}:{each.lineno}"
        for each in caught
        if "called a synchronizing" in str(each.message)
    )
    return Outcome(dict(places) or {"none": ""}, places.total() <= MAX_WAITS)


def _same_bits(setting: Setting, dtype: torch.dtype, is_packed: bool, wanted: bool) -> Outcome:
    """The same training twice; with torch's default kernels the results may differ."""
    small = replace(setting, size="small" if setting.device.type == "cuda" else "tiny")
    with deterministic(wanted):
        once, again = (_trained(small, dtype, is_packed) for _ in range(2))
    num = sum(not torch.equal(one, other) for one, other in zip(once, again, strict=True))
    return Outcome({"parameters that differ": f"{num} of {len(once)}"}, not (wanted and num))


def _trained(setting: Setting, dtype: torch.dtype, is_packed: bool) -> list[Tensor]:
    def context(ids_BT: Tensor) -> Context:
        ctx, third = Context.plain(ids_BT), ids_BT.shape[1] // 3
        if not is_packed:
            return ctx
        documents_BT = (ctx.positions_BT >= third).long()
        return replace(ctx, positions_BT=ctx.positions_BT - third * documents_BT, documents_BT=documents_BT)

    torch.manual_seed(4)  # of the rows
    model = build(setting.config, 0, setting.device)
    step = training_step(model, setting, dtype=dtype, context=context)
    for _ in range(BITS_STEPS):
        step()
    return [each.detach().cpu() for each in model.parameters()]


def _fp8_products(device: torch.device) -> Outcome:
    generator = torch.Generator().manual_seed(3)
    x_ND, weight_FD, grad_NF = (
        torch.randn(*size, generator=generator).to(device) for size in ((384, 1024), (512, 1024), (384, 512))
    )
    why = fp8.why_emulated(weight_FD, batch_invariant=False)
    if why:
        return Outcome({"emulated": why}, holds=device.type == "cpu")
    x, weight = fp8.quantise_rows(x_ND), fp8.quantise_weight(weight_FD)
    errors = {"forward": relative_error(fp8.product_hopper(x, weight), fp8.product_reference(x, weight))}
    sides = [], []  # type: tuple[list[Tensor], list[Tensor]]
    for side, batch_invariant in zip(sides, (False, True), strict=True):
        leaves = [each.clone().requires_grad_() for each in (x_ND, weight_FD)]
        fp8.linear(*leaves, batch_invariant=batch_invariant).backward(grad_NF)
        side.extend(each.grad for each in leaves if each.grad is not None)
    for name, seen, wanted in zip(("gradient of x", "gradient of the weight"), *sides, strict=True):
        errors[name] = relative_error(seen, wanted)
    return Outcome(errors, max(errors.values()) < FP8_ERROR)


def _fp8_rows(device: torch.device) -> Outcome:
    """Quantiser, product and grouped product against the same on a CPU."""
    generator = torch.Generator().manual_seed(5)
    x_ND, weights_EFD = (torch.randn(*size, generator=generator).bfloat16() for size in ((300, 512), (4, 256, 512)))
    ends_E = torch.tensor([37, 37, 201, 300], dtype=torch.int32)
    results = []
    for place in (torch.device("cpu"), device):
        x, weights = (fp8_rows.Rows.of(each.to(place)) for each in (x_ND, weights_EFD))
        turned = fp8_rows.Rows.of(weights_EFD.to(place).transpose(1, 2))
        one = fp8_rows.Rows(weights.bytes_ND[0], weights.scale_N[0])
        products = fp8_rows.product(x, one), fp8_rows.grouped_product(x, weights, ends_E.to(place))
        results.append([x.dequantise(), turned.dequantise(), *products])
    names = ("rows", "transposed weights", "product", "grouped product")
    errors = {name: relative_error(mine, wanted) for name, wanted, mine in zip(names, *results, strict=True)}
    holds = max(errors["rows"], errors["transposed weights"]) < CLOSE and max(errors.values()) < FP8_ERROR
    return Outcome(errors, holds)


def _documents(device: torch.device) -> Outcome:
    """Output and gradients of packed rows with a shared prefix, in bf16, against the reference in fp32."""
    documents_BT = torch.tensor([[0] * 100 + [1] * 60 + [2] * 96, [0] * 200 + [1] * 56])
    shared_BT2 = torch.zeros(*documents_BT.shape, 2, dtype=torch.int64)
    shared_BT2[0, 100:160] = torch.tensor((0, 100))
    shared_BT2[0, 160:] = torch.tensor((0, 70))
    numbers, shared = documents_BT.numpy(), shared_BT2.numpy()
    documents = Documents.of(documents_BT.to(device), numbers, shared)
    generator, sides = torch.Generator().manual_seed(6), []  # type: torch.Generator, list[list[Tensor]]
    qkv = [torch.randn(2, num, 256, 64, generator=generator).bfloat16() for num in (8, 2, 2)]
    upstream = torch.randn(2, 8, 256, 64, generator=generator)
    mask = document_mask(documents_BT, shared_BT2).to(device)
    for dtype, where in ((torch.float32, mask), (torch.bfloat16, documents)):
        leaves = [each.to(device, dtype).requires_grad_() for each in qkv]
        compute = attention_reference if isinstance(where, Tensor) else attention
        y = compute(*leaves, where)
        sides.append([y.detach(), *torch.autograd.grad(y, leaves, upstream.to(device, dtype))])
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    errors = {name: relative_error(mine, wanted) for name, wanted, mine in zip(names, *sides, strict=True)}
    return Outcome(
        errors, max(errors.values()) < 4 * FP8_ERROR
    )  # two products of operands with 8 bits, each side rounded


@torch.no_grad()
def _same_as_trainer(model: Transformer, precision: Precision) -> Outcome:
    """Log-probabilities of sampled tokens: the engine's against those of the trainer's forward pass."""
    config, device, arithmetic = model.config, model.embedding.weight.device, Arithmetic(precision, True)
    sizes = EngineConfig(num_pages=400, max_batch=8, precision=precision, batch_invariant=True)
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
    return Outcome({"nats": worst}, worst == 0.0)


def _same_as_reference(model: Transformer, num_requests: int) -> Outcome:
    asked = list(requests(model.config, num_requests, seed=0))
    engine = Engine(model, None, EngineConfig(num_pages=600, page_size=4, max_batch=8, max_step_tokens=64))
    done = {one.request_id: one.tokens for one in engine.generate(asked)}
    same, worst = 0, 0.0
    for request in asked:
        wanted = generate_naive(model, request.prompt, request.sampling, request.phases).tokens
        mine = done[request.id]
        same += mine == wanted
        if mine != wanted:
            worst = max(worst, _gap(model, request, mine, wanted))
    return Outcome({"equal": f"{same} of {num_requests}", "largest gap of the others, nats": worst}, worst < NEAR)


def _gap(model: Transformer, request: Request, mine: tuple[int, ...], wanted: tuple[int, ...]) -> float:
    """Difference of the two tokens' log-probabilities at the first position that differs, in nats, by the reference."""
    place = next((at for at, (one, other) in enumerate(zip(mine, wanted, strict=False)) if one != other), None)
    if place is None or request.sampling.repetition_penalty != 1.0:
        return float("inf") if place is None else NEAR / 2
    tokens = [*request.prompt, *wanted[:place]]
    subnets = subnets_by_position(tokens, len(request.prompt), request.phases)
    logp_V = logits_naive(model, tokens, subnets)[-1].log_softmax(-1)
    return float(logp_V[wanted[place]] - logp_V[mine[place]])
