"""The MoE operator: the routed experts of a layer as one differentiable function, for any backend.

The forward pass keeps its inputs, the outputs of the gate-up product and the permutation of the slots. The backward pass gathers the
inputs again and computes the gradient of the gates from the kept outputs, so that neither gathered rows nor outputs of experts are
kept (the algorithm of SonicMoE, 2512.14080).

Shape letters: N tokens, K experts per token, E experts, S = N·K slots, P places of the slots sorted by expert, padding included,
D hidden, I expert width, F = 2·I.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.ops import kernels
from stretto.ops.grouped import (
    Clamp,
    ExpertBiases,
    Experts,
    Gradients,
    Slots,
    Wants,
    compute_dtype,
    down_outputs,
    expert_of_places,
    gate_up_outputs,
    gated_swiglu_backward,
    group_multiple,
    group_slots,
    grouped_mm,
    grouped_weight_gradient,
    most_places,
    sum_of_places,
)
from stretto.ops.native import training

KERNEL_WIDTH = 64
"""Widths of experts that the Triton kernels compute are multiples of it: the number of columns that they read at once."""
_log = logging.getLogger(__name__)


def experts(x_ND: Tensor, chosen_NK: Tensor, gates_NK: Tensor, weights: Experts, backend: str | None = None) -> Tensor:
    """Output [N, D] of SwiGLU experts, in autocast's dtype (fp32 where the compiled kernels multiply in bf16, see
    `stretto.ops.native.training`); reference: ``tests/ops/references.py:experts_reference``.

    The K outputs of a token are added in the order of ``chosen_NK``, whatever the rest of the batch is. Gates multiply the input of the
    down projection, which is linear, because that input is narrower than the output. Gates of 0 have gradients like any other.
    """
    dtype = compute_dtype(x_ND)
    multiplies = _is_plain(weights) and training.multiplies(x_ND, *weights[:2])
    if backend is None and multiplies and training.rounds(x_ND, *weights[:2]):
        backend, dtype = "tiles", torch.float32
    biases = (None, None) if weights.biases is None else (bias.to(dtype) for bias in weights.biases)
    matrices = weights.gate_up_EFD.to(dtype), weights.down_EDI.to(dtype)
    alpha, limit = (None, None) if weights.clamp is None else weights.clamp
    is_traced = torch.compiler.is_compiling()
    run = _traced if is_traced else _Eager.apply
    return run(x_ND, gates_NK, *matrices, *biases, chosen_NK, alpha, limit, backend or "", is_traced)[0]


# --- backends ---------------------------------------------------------------------------------------------------------


class Backend(Protocol):
    """Implementation of the operator. Products are computed in the dtype of ``weights``; ``x_ND`` may have a wider one.

    Places between the end of an expert's slots and the next expert are padding: their gates are 0, and their tokens any. Places after
    ``slots.ends_E[-1]`` belong to no expert and may hold anything, NaN included.
    """

    def multiple(self, x_ND: Tensor, dtype: torch.dtype, mean_slots: float) -> int:
        """Multiple to which the number of an expert's places is rounded up; an expert has ``mean_slots`` on average."""

    def forward(self, x_ND: Tensor, gates_P: Tensor, slots: Slots, weights: Experts) -> tuple[Tensor, Tensor]:
        """Output [N, D], and the outputs of the gate-up product with bias [P, F]."""

    def backward(
        self,
        grad_ND: Tensor,
        x_ND: Tensor,
        gates_P: Tensor,
        hidden_PF: Tensor,
        slots: Slots,
        weights: Experts,
        wants: Wants,
    ) -> Gradients:
        """Gradients, from the gradient of the output and from what `forward` received and returned.

        Gradients of ``x_ND`` and ``gates_P`` have their dtypes, others that of the weights.
        """


def backend_for(x_ND: Tensor, weights: Experts) -> str:
    """Name of the fastest backend that computes ``weights``, which have the dtype of the products, on the device of ``x_ND``."""
    dtype = weights.down_EDI.dtype
    if x_ND.is_cuda and dtype != torch.bfloat16:
        return "torch"  # without tensor cores, Triton's kernels gain nothing, and take minutes to compile
    if x_ND.is_cuda:
        if reason := why_no_kernels(x_ND.device, weights):
            _say(reason)
        return "torch" if reason else "triton"
    return "native" if _is_plain(weights) and training.multiplies(x_ND, *weights[:2]) else "torch"


def _is_plain(weights: Experts) -> bool:
    """Whether the compiled kernels for CPUs compute these experts."""
    return weights.biases is None and weights.clamp is None


def why_no_kernels(device: torch.device, weights: Experts, multiple: int = KERNEL_WIDTH) -> str:
    """Reason why the Triton kernels cannot compute ``weights`` in bf16 on ``device``; empty if they can. ``multiple``: of hidden size and
    widths."""
    hidden, width = weights.down_EDI.shape[1:]
    if weights.biases is not None or weights.clamp is not None:
        return "experts with biases or a clamp"
    if hidden % multiple or width % multiple:
        return f"experts of {hidden} x {width}, where the kernels need multiples of {multiple}"
    return kernels.why_not(device)


@cache
def _say(reason: str) -> None:
    _log.warning("Torch's grouped products compute the experts, which are slower than the Triton kernels: %s", reason)


@cache
def _kernel_backends() -> dict[str, Backend]:
    from stretto.ops.kernels.experts import Fp8Backend, TritonBackend  # imports Triton, which takes a second

    return {"triton": TritonBackend(), "triton-fp8": Fp8Backend()}


class TorchBackend:
    """Grouped products of torch, for all devices and dtypes."""

    def multiple(self, x_ND: Tensor, dtype: torch.dtype, mean_slots: float) -> int:
        return group_multiple(x_ND.device, dtype, mean_slots)

    def multiply(self, rows_PD: Tensor, weights_EDF: Tensor, ends_E: Tensor) -> Tensor:
        """`grouped_mm`; every product with weights is made by this function."""
        return grouped_mm(rows_PD, weights_EDF, ends_E)

    def forward(self, x_ND: Tensor, gates_P: Tensor, slots: Slots, weights: Experts) -> tuple[Tensor, Tensor]:
        x_PD = x_ND.to(weights.down_EDI.dtype).index_select(0, slots.token_P)
        hidden_PF = gate_up_outputs(x_PD, slots.ends_E, weights, self.multiply)
        y_PD = down_outputs(hidden_PF, slots.ends_E, weights, gates_P, self.multiply)
        return sum_of_places(y_PD, slots.place_S, len(x_ND), y_PD.dtype), hidden_PF

    def backward(
        self,
        grad_ND: Tensor,
        x_ND: Tensor,
        gates_P: Tensor,
        hidden_PF: Tensor,
        slots: Slots,
        weights: Experts,
        wants: Wants,
    ) -> Gradients:
        gate_up_EFD, down_EDI, biases, clamp = weights
        dtype, ends_E = down_EDI.dtype, slots.ends_E
        grad_PD = grad_ND.to(dtype).index_select(0, slots.token_P)
        grad_PI = self.multiply(grad_PD, down_EDI, ends_E)
        inner_PI, gates, grad_PF = gated_swiglu_backward(grad_PI, gates_P, hidden_PF, clamp)
        gate_up, down, gate_up_bias, down_bias, x = (None,) * 5
        if biases is not None:
            bias_PD = biases.down_ED.index_select(0, expert_of_places(ends_E, len(grad_PD)))
            gates += (grad_PD * bias_PD).sum(-1, dtype=gates.dtype)
        if wants.down:
            down = grouped_weight_gradient(grad_PD, inner_PI, ends_E)
        if wants.down_bias:
            down_bias = _sum_of_experts(grad_PD * gates_P[:, None].to(dtype), ends_E)
        if wants.gate_up:
            gate_up = grouped_weight_gradient(grad_PF, x_ND.to(dtype).index_select(0, slots.token_P), ends_E)
        if wants.gate_up_bias:
            gate_up_bias = _sum_of_experts(grad_PF, ends_E)
        if wants.x:
            x = sum_of_places(self.multiply(grad_PF, gate_up_EFD, ends_E), slots.place_S, len(x_ND), x_ND.dtype)
        return Gradients(x, gates, gate_up, down, gate_up_bias, down_bias)


def _sum_of_experts(y_PD: Tensor, ends_E: Tensor) -> Tensor:
    """For each expert, the sum of the rows of its places."""
    rows_ED = y_PD.new_zeros(len(ends_E), y_PD.shape[1], dtype=torch.promote_types(y_PD.dtype, torch.float32))
    is_own_P = torch.arange(len(y_PD), device=y_PD.device) < ends_E[-1]
    y_PD = torch.where(is_own_P[:, None], y_PD, 0).to(rows_ED.dtype)
    return rows_ED.index_add_(0, expert_of_places(ends_E, len(y_PD)), y_PD).to(y_PD.dtype)


class NativeBackend:
    """Compiled kernels for fp32 on a CPU, without biases and clamps: `stretto.ops.native.training`. ``in_bf16``: operands of products are
    rounded to bf16."""

    def __init__(self, in_bf16: bool):
        self.in_bf16 = in_bf16

    def multiple(self, x_ND: Tensor, dtype: torch.dtype, mean_slots: float) -> int:
        return 1

    def forward(self, x_ND: Tensor, gates_P: Tensor, slots: Slots, weights: Experts) -> tuple[Tensor, Tensor]:
        order = slots.token_P, slots.place_S, slots.ends_E
        return training.experts_forward(x_ND, gates_P, order, *weights[:2], self.in_bf16)

    def backward(
        self,
        grad_ND: Tensor,
        x_ND: Tensor,
        gates_P: Tensor,
        hidden_PF: Tensor,
        slots: Slots,
        weights: Experts,
        wants: Wants,
    ) -> Gradients:
        matrices, order = weights[:2], (slots.token_P, slots.place_S, slots.ends_E)
        inputs = grad_ND, x_ND, gates_P, hidden_PF, order, *matrices
        return Gradients(*training.experts_backward(*inputs, self.in_bf16, wants[:4]))


BACKENDS: dict[str, Backend] = {"torch": TorchBackend(), "native": NativeBackend(False), "tiles": NativeBackend(True)}


def _backend(name: str, x_ND: Tensor, weights: Experts) -> Backend:
    """The backend ``name``; an empty name: `backend_for`. torch.compile does not look into it."""
    name = name or backend_for(x_ND, weights)
    return BACKENDS[name] if name in BACKENDS else _kernel_backends()[name]


# --- the differentiable function --------------------------------------------------------------------------------------


def _run(
    x_ND: Tensor,
    gates_NK: Tensor,
    gate_up_EFD: Tensor,
    down_EDI: Tensor,
    gate_up_bias_EF: Tensor | None,
    down_bias_ED: Tensor | None,
    chosen_NK: Tensor,
    alpha: float | None,
    limit: float | None,
    backend: str,
    bounded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and what the backward pass needs: gate-up outputs and the fields of `Slots`. ``bounded``: whether the number of places
    is `most_places`, which is known before the experts are chosen."""
    weights = _weights(gate_up_EFD, down_EDI, gate_up_bias_EF, down_bias_ED, alpha, limit)
    run = _backend(backend, x_ND, weights)
    num_experts, num_slots = len(down_EDI), chosen_NK.numel()
    multiple = run.multiple(x_ND, down_EDI.dtype, num_slots / num_experts)
    slots = group_slots(
        chosen_NK, num_experts, multiple, most_places(num_slots, num_experts, multiple) if bounded else None
    )
    out_ND, hidden_PF = run.forward(x_ND, _gates_of_places(gates_NK, slots), slots, weights)
    return out_ND, hidden_PF, *slots


def _gradients(
    grad_ND: Tensor,
    x_ND: Tensor,
    gates_NK: Tensor,
    gate_up_EFD: Tensor,
    down_EDI: Tensor,
    gate_up_bias_EF: Tensor | None,
    down_bias_ED: Tensor | None,
    kept: Sequence[Tensor],
    alpha: float | None,
    limit: float | None,
    backend: str,
    wants: Sequence[bool],
) -> list[Tensor]:
    """Gradients of the first six arguments of `_run`; empty tensors for those that are not wanted."""
    hidden_PF, slots = kept[0], Slots(*kept[1:])
    weights = _weights(gate_up_EFD, down_EDI, gate_up_bias_EF, down_bias_ED, alpha, limit)
    gates_P = _gates_of_places(gates_NK, slots)
    run = _backend(backend, x_ND, weights)
    x, gates, *others = run.backward(grad_ND, x_ND, gates_P, hidden_PF, slots, weights, Wants(*wants))
    if gates is not None:
        gates = gates.index_select(0, slots.place_S).view(gates_NK.shape)
    return [x_ND.new_empty(0) if grad is None else grad for grad in (x, gates, *others)]


def _weights(
    gate_up_EFD: Tensor,
    down_EDI: Tensor,
    gate_up_bias_EF: Tensor | None,
    down_bias_ED: Tensor | None,
    alpha: float | None,
    limit: float | None,
) -> Experts:
    biases = None
    if gate_up_bias_EF is not None and down_bias_ED is not None:
        biases = ExpertBiases(gate_up_bias_EF, down_bias_ED)
    return Experts(gate_up_EFD, down_EDI, biases, None if alpha is None or limit is None else Clamp(alpha, limit))


def _gates_of_places(gates_NK: Tensor, slots: Slots) -> Tensor:
    """Gates [P]; 0 for padding, which keeps it out of every gradient."""
    return gates_NK.new_zeros(len(slots.token_P)).index_copy_(0, slots.place_S, gates_NK.reshape(-1))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.settings = inputs[7:10]  # alpha, limit, backend


def _backward(ctx: Any, compute: Any, grad_ND: Tensor | None) -> tuple[Tensor | None, ...]:
    wants = list(ctx.needs_input_grad[:6])
    if grad_ND is None:
        return (None,) * 11
    saved = ctx.saved_tensors
    grads = compute(grad_ND, *saved[:6], saved[6:], *ctx.settings, wants)
    return *(grad if is_wanted else None for grad, is_wanted in zip(grads, wants, strict=True)), *(None,) * 5


class _Eager(torch.autograd.Function):
    """`_run` with its gradient outside torch.compile: the first call of a custom operator imports the compiler, which takes seconds."""

    forward = staticmethod(_run)
    setup_context = staticmethod(_keep)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, _gradients, grads[0])


# torch.compile calls these without looking into them
_traced = torch.library.custom_op("stretto::experts", mutates_args=())(_run)
_traced_gradients = torch.library.custom_op("stretto::experts_backward", mutates_args=())(_gradients)


@_traced.register_fake
def _(x_ND: Tensor, gates_NK: Tensor, *others: Any) -> tuple[Tensor, ...]:
    gate_up_EFD, chosen_NK, backend, weights = others[0], others[4], others[7], _weights(*others[:4], *others[5:7])
    num_experts, num_slots = len(gate_up_EFD), chosen_NK.numel()
    multiple = _backend(backend, x_ND, weights).multiple(x_ND, gate_up_EFD.dtype, num_slots / num_experts)
    num_places = most_places(num_slots, num_experts, multiple)
    return (
        torch.empty_like(x_ND, dtype=gate_up_EFD.dtype),
        gate_up_EFD.new_empty(num_places, gate_up_EFD.shape[1]),
        chosen_NK.new_empty(num_places),
        chosen_NK.new_empty(num_slots),
        chosen_NK.new_empty(num_places),
        chosen_NK.new_empty(num_experts, dtype=torch.int32),
    )


@_traced_gradients.register_fake
def _(grad_ND: Tensor, *arguments: Any) -> list[Tensor]:
    inputs, wants = arguments[:6], arguments[-1]
    return [
        torch.empty_like(each) if is_wanted else grad_ND.new_empty(0)
        for each, is_wanted in zip(inputs, wants, strict=True)
    ]


_traced.register_autograd(lambda ctx, *grads: _backward(ctx, _traced_gradients, grads[0]), setup_context=_keep)
