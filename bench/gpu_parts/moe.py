"""The MoE layer alone, forward and backward, against the composition of grouped products; and graph breaks of compiled blocks.

Each layer is first compared with the composition in its output and all gradients. Activations are what the forward pass keeps for the
backward pass, inputs included; the limit is inputs, gates, gate-up outputs and 8 bytes for each index. Choices are random, so experts
have ragged numbers of tokens. Several passes are timed together, so that the host's launches take no time, as in a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bench.common.gpu_part import Case, Outcome, Setting, median_seconds, network, random_ids, relative_error
from bench.common.moe_composition import experts_composed
from bench.gpu_parts.packed import packed_context
from bench.gpu_parts.profile import shares
from stretto.model.spec import ModelConfig
from stretto.model.transformer import RowWidths
from stretto.ops.grouped import Experts
from stretto.ops.moe import experts

CLOSE = 2.0**-6
"""Limit of the difference of two results in bf16, relative in norm: a few roundings of 8 bits."""
TOGETHER = 4
"""Passes that are timed together."""
NAMES = ("output", "inputs", "gates", "gate-up", "down")
"""Of the output and the gradients."""
Compute = Callable[[Tensor, Tensor, Tensor, Experts], Tensor]


class Layer(NamedTuple):
    """Size of a layer."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int


LAYERS = (Layer(32768, 2048, 1024, 32, 4), Layer(32768, 2048, 1024, 64, 8), Layer(32768, 2048, 768, 128, 8))
SMALL = (Layer(512, 64, 64, 8, 2),)


def cases(setting: Setting) -> Iterator[Case]:
    for layer in SMALL if setting.size in ("tiny", "small") else LAYERS:
        size = f"{layer.tokens} tokens, {layer.hidden} x {layer.width}, {layer.experts} experts, top-{layer.top_k}"
        yield Case(f"{size}: agreement", partial(_agreement, layer, setting))
        if setting.device.type == "cuda":
            yield Case(f"{size}: FP8 agreement", partial(_fp8_agreement, layer, setting))
        yield Case(f"{size}: speed", partial(_speed, layer, setting))
        yield Case(f"{size}: kernels by time", partial(_kernels, layer, setting))
    yield Case("graph breaks of a compiled block", lambda: _breaks(setting))


def _inputs(layer: Layer, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The choices, and the inputs that get gradients: hidden states, gates, and both matrices."""
    generator = torch.Generator(device).manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    gates_NK, chosen_NK = values(layer.tokens, layer.experts).softmax(-1).topk(layer.top_k)
    x_ND = values(layer.tokens, layer.hidden).bfloat16()
    gate_up_EFD = values(layer.experts, 2 * layer.width, layer.hidden).mul_(layer.hidden**-0.5).bfloat16()
    down_EDI = values(layer.experts, layer.hidden, layer.width).mul_(layer.width**-0.5).bfloat16()
    return chosen_NK, [each.requires_grad_() for each in (x_ND, gates_NK, gate_up_EFD, down_EDI)]


def _agreement(layer: Layer, setting: Setting) -> Outcome:
    chosen_NK, inputs = _inputs(layer, setting.device)
    x_ND, gates_NK, *weights = inputs
    results = []
    for compute in (experts, experts_composed):
        y_ND = compute(x_ND, chosen_NK, gates_NK, Experts(*weights))
        results.append([y_ND.detach(), *torch.autograd.grad(y_ND, inputs, torch.ones_like(y_ND) / layer.tokens)])
    errors = {name: relative_error(*pair) for name, pair in zip(NAMES, zip(*results, strict=True), strict=True)}
    return Outcome(errors, max(errors.values()) < CLOSE)


def _fp8_agreement(layer: Layer, setting: Setting) -> Outcome:
    """Our FP8 kernels against torch's on the same rows; the difference of both to bf16 is the rounding to FP8."""
    chosen_NK, inputs = _inputs(layer, setting.device)
    x_ND, gates_NK, *weights = inputs
    results = []
    for backend in ("triton-fp8", "fp8", "triton"):
        y_ND = experts(x_ND, chosen_NK, gates_NK, Experts(*weights), backend)
        results.append([y_ND.detach(), *torch.autograd.grad(y_ND, inputs, x_ND.detach())])
    errors: dict[str, float | str] = {}
    holds = True
    for name, ours, theirs, wanted in zip(NAMES, *results, strict=True):
        error, rounding = relative_error(ours, theirs), relative_error(ours, wanted)
        errors |= {name: error, f"{name}, to bf16": rounding}
        holds &= error < 0.5 * rounding < 0.05
    return Outcome(errors, holds)


def _step(inputs: list[Tensor], chosen_NK: Tensor, compute: Compute) -> None:
    """Forward and backward pass of the layer."""
    x_ND, gates_NK, *weights = inputs
    y_ND = compute(x_ND, chosen_NK, gates_NK, Experts(*weights))
    torch.autograd.grad(y_ND, inputs, x_ND.detach())


def _kernels(layer: Layer, setting: Setting) -> Outcome:
    chosen_NK, inputs = _inputs(layer, setting.device)
    return Outcome(shares(partial(_step, inputs, chosen_NK, experts), setting))


def _speed(layer: Layer, setting: Setting) -> Outcome:
    chosen_NK, inputs = _inputs(layer, setting.device)
    x_ND, gates_NK, *weights = inputs

    def steps(compute: Compute) -> None:
        for _ in range(TOGETHER):
            _step(inputs, chosen_NK, compute)

    ours_s, peer_s = (
        median_seconds(partial(steps, compute), setting.device, setting.num_steps) / TOGETHER
        for compute in (experts, experts_composed)
    )
    kept, peers = (
        _kept_bytes(partial(compute, x_ND, chosen_NK, gates_NK, Experts(*weights)), weights)
        for compute in (experts, experts_composed)
    )
    slots = chosen_NK.numel()
    limit = x_ND.nbytes + gates_NK.nbytes + slots * (2 * layer.width * x_ND.itemsize + 3 * 8) + 4 * layer.experts
    flops = 3 * 2 * slots * 3 * layer.width * layer.hidden
    return Outcome(
        {
            "ms": 1e3 * ours_s,
            "ms, composition": 1e3 * peer_s,
            "over the composition": peer_s / ours_s,
            "TFLOP/s": flops / ours_s / 1e12,
            "activations, MB": kept / 1e6,
            "of the limit": kept / limit,
            "activations of the composition, MB": peers / 1e6,
        }
    )


def _kept_bytes(compute: Callable[[], Tensor], weights: list[Tensor]) -> int:
    """Bytes that the forward pass keeps for the backward pass, without the weights."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        y_ND = compute()  # holds what is kept, so that no address is used twice
    for weight in weights:
        kept.pop(weight.untyped_storage().data_ptr(), None)
    assert y_ND.grad_fn is not None
    return sum(kept.values())


def _breaks(setting: Setting) -> Outcome:
    """A dense and an MoE block, with whole rows, and with packed rows of which each has experts of its own."""
    config = ModelConfig(
        vocab_size=64, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, num_experts=8, top_k=2,
        expert_intermediate_size=64, dense_layers=(0,), dense_intermediate_size=128,
    )  # fmt: skip
    model = network(config, setting.device)
    ids_BT = random_ids(replace(setting, size="tiny")) % config.vocab_size
    packed = packed_context(ids_BT)
    row_B = torch.zeros(len(ids_BT), dtype=torch.int64, device=setting.device)
    widths = RowWidths(row_B, torch.ones(len(ids_BT), 8, dtype=torch.bool, device=setting.device), row_B == 0)
    found: dict[str, float | str] = {}
    whole = replace(packed, documents_BT=None)
    for name, ctx in (("whole rows", whole), ("packed rows of several widths", replace(packed, widths=widths))):
        for kind, block in zip(("dense", "MoE"), model.blocks, strict=True):
            torch._dynamo.reset()
            arguments = (model.embedding(ids_BT), model.geometry(ctx), 8, 2, ctx)
            with torch.autocast(setting.device.type, torch.bfloat16):
                explained = torch._dynamo.explain(block.forward)(*arguments)
            found[f"{kind}, {name}"] = explained.graph_break_count
    return Outcome(found, not any(found.values()))
