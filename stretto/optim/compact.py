"""AdamW with small states: moments in 32, 16 or 8 bits, and weights whose fp32 master is split or rounded stochastically.

torch has no such optimiser. torchao's has no split weights, compiles once for each shape, takes no factor of clipping, and draws its
random numbers from a generator that no snapshot holds; FlashOptim's (2602.23349) refuses to run without a GPU. Between reading and writing
these states, torch's own fused AdamW makes the update, so that with fp32 moments and exact weights the result is torch's, bit for bit. On
CUDA one kernel does all of it (`stretto.ops.kernels.adamw`).

Shape letters: N elements of a part of a tensor, B blocks of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from stretto.base.track import say
from stretto.ops import kernels
from stretto.ops.master import joined, low_part, rounded_stochastically, split
from stretto.optim.schedule import Moments

BLOCK = 128
"""Numbers that share a scale in 8 bits. 8-bit Adam has 2,048 (2110.02861), torchao 256, FlashOptim 32; with 128 the scales take 1/32 of the
codes' memory."""
_SMALLEST = 4096
"""Smaller tensors keep fp32 moments, as in 8-bit Adam: norms and biases, whose states take no memory and whose errors act on all tokens."""
_PART = 1 << 20
"""Elements that the path without a kernel updates at once: bounds its temporary tensors. A multiple of the vector width, because torch's
kernel rounds the remainder of a vector differently."""
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Update:
    """Numbers of one parameter's update. Written by `CompactAdamW`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """1-based."""
    key: int
    """32 bits for the random numbers of stochastic rounding."""


class CompactAdamW(Optimizer):
    """AdamW (1711.05101). A parameter in bf16 is split (`stretto.ops.master`), or else is rounded stochastically (2010.06192).

    Groups have ``lr`` and ``weight_decay``. Parameters without a gradient are skipped, and do not decay.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments: Moments,
        *,
        seed: int = 0,
        in_backward: bool = False,
    ):
        """``seed``: of stochastic rounding. ``in_backward``: `updating` is used."""
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.betas, self.eps, self.moments, self.seed, self.in_backward = betas, eps, moments, seed, in_backward
        self._groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        self._numbers = {parameter: number for number, parameter in enumerate(self._groups)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, scale: Tensor | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. ``scale``: factor of the gradients, fp32; None: 1."""
        assert closure is None, "CompactAdamW does not evaluate closures"
        for parameter in self._groups:
            if parameter.grad is not None:
                self._update(parameter, scale)

    @contextmanager
    def updating(self, scale: Tensor) -> Iterator[None]:
        """Inside this block, a backward pass updates a parameter as soon as its gradient is complete, and frees the gradient. A gradient
        that is not finite is not applied."""

        def update(parameter: Tensor) -> None:
            self._update(parameter, scale)
            parameter.grad = None

        handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in self._groups]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, clip_norm: float) -> Tensor:
        """Factor that would have clipped the last step's gradients to a global norm of ``clip_norm``; 1 before the first step. Norms are
        collected anew."""
        scale = (clip_norm / (self.gradient_norm() + 1e-6)).clamp(max=1.0)
        for state in self.state.values():
            state["norm"].zero_()
        return scale

    def gradient_norm(self) -> Tensor:
        """Global norm of the gradients since `begin`, before scaling; of the last step after a resume."""
        # in the parameters' own order: states have the order of the first backward pass, or after a resume that of the file
        norms = [self.state[parameter]["norm"] for parameter in self._groups if parameter in self.state]
        device = next(iter(self._groups)).device
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)

    @torch.no_grad()
    def _update(self, parameter: Tensor, scale: Tensor | None) -> None:
        gradient, group, state = parameter.grad, self._groups[parameter], self.state[parameter]
        assert gradient is not None, "no gradient"
        if not state:
            self._begin(parameter, state)
        state["step"] += 1
        norm = None
        if self.in_backward:
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            state["norm"].copy_(norm)
        step = int(state["step"])
        named = f"{self.seed} {step} {self._numbers[parameter]}".encode()
        key = int.from_bytes(hashlib.blake2b(named, digest_size=4).digest(), "little")
        numbers = Update(group["lr"], *self.betas, self.eps, group["weight_decay"], step, key)
        if parameter.device.type == "cuda" and _has_kernel(parameter.device):
            from stretto.ops.kernels.adamw import update

            update(
                parameter.data,
                low_part(parameter),
                gradient,
                state,
                lr=numbers.lr,
                betas=self.betas,
                eps=self.eps,
                weight_decay=numbers.weight_decay,
                step=step,
                key=key,
                scale=scale,
                norm=norm,
                block=BLOCK,
            )
        else:
            update_in_parts(parameter, gradient, state, numbers, scale, norm)

    def _begin(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        num, device = parameter.numel(), parameter.device
        state["step"] = torch.zeros(())
        if self.in_backward:
            state["norm"] = torch.zeros((), device=device)
        in_blocks = self.moments == "int8" and num >= _SMALLEST and num % BLOCK == 0
        for name, codes in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
            dtype = torch.bfloat16 if self.moments == "bf16" and parameter.dim() > 1 else torch.float32
            state[name] = torch.zeros(parameter.shape, dtype=codes if in_blocks else dtype, device=device)
            if in_blocks:
                state[f"{name}_scale"] = torch.zeros(num // BLOCK, device=device)


@cache
def _has_kernel(device: torch.device) -> bool:
    """Whether the kernel can run on ``device``. Says so once if not."""
    if reason := kernels.why_not(device):
        say(
            f"optimiser: {reason}; torch's operations update the weights in parts, which reads and writes them several times"
        )
    return not reason


def update_in_parts(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    numbers: Update,
    scale: Tensor | None,
    norm: Tensor | None,
) -> None:
    """One update of ``parameter`` and ``state`` by torch's fused AdamW, in place. If ``norm`` is not finite, it changes nothing."""
    assert parameter.is_contiguous(), "parameters must be contiguous"
    flat_N, grads_N, low = parameter.data.view(-1), gradient.reshape(-1), low_part(parameter)
    low_N = None if low is None else low.view(-1)
    is_bad = None if norm is None else norm.isfinite().logical_not().float()
    for start in range(0, len(flat_N), _PART):
        part = slice(start, start + _PART)
        high_N, grad_N = flat_N[part], grads_N[part].float()
        weight_N = high_N.float() if low_N is None else joined(high_N, low_N[part])
        first_N, second_N = _read(state, "exp_avg", part), _read(state, "exp_avg_sq", part)
        adamw(
            [weight_N],
            [grad_N if scale is None else grad_N * scale],
            [first_N],
            [second_N],
            [],
            [torch.tensor(numbers.step - 1.0, device=flat_N.device)],
            fused=True,
            found_inf=is_bad,
            amsgrad=False,
            beta1=numbers.beta1,
            beta2=numbers.beta2,
            lr=numbers.lr,
            weight_decay=numbers.weight_decay,
            eps=numbers.eps,
            maximize=False,
        )
        _write(state, "exp_avg", part, first_N)
        _write(state, "exp_avg_sq", part, second_N)
        if low_N is not None:
            high, low_N[part] = split(weight_N)
            high_N.copy_(high)
        elif high_N.dtype == torch.bfloat16:
            high_N.copy_(rounded_stochastically(weight_N, numbers.key, start))


def _read(state: dict[str, Tensor], name: str, part: slice) -> Tensor:
    """Part of a moment in fp32; a view where it is stored so."""
    stored_N = state[name].view(-1)[part]
    if stored_N.dtype in (torch.int8, torch.uint8):
        return dequantised(stored_N, _scales(state, name, part))
    return stored_N.float()


def _write(state: dict[str, Tensor], name: str, part: slice, moment_N: Tensor) -> None:
    stored_N = state[name].view(-1)[part]
    if stored_N.dtype in (torch.int8, torch.uint8):
        codes_N, scale_B = quantised(moment_N, is_second=stored_N.dtype == torch.uint8)
        _scales(state, name, part).copy_(scale_B)
        stored_N.copy_(codes_N)
    elif stored_N.dtype != torch.float32:
        stored_N.copy_(moment_N)


def _scales(state: dict[str, Tensor], name: str, part: slice) -> Tensor:
    return state[f"{name}_scale"][part.start // BLOCK : part.stop // BLOCK]


def quantised(moment_N: Tensor, *, is_second: bool) -> tuple[Tensor, Tensor]:
    """8-bit codes of a moment, and the largest magnitude of each block [B].

    Small numbers need finer steps than large ones (2110.02861). In place of a table, the numbers over their block's scale are bent before
    they are rounded, as FlashOptim does (2602.23349): 2x/(1+|x|) for the first moment, and for the second, whose square root divides the
    update, the fourth root. A second moment above zero never becomes zero, which would divide by eps alone.
    """
    moment_BX = moment_N.view(-1, BLOCK)
    scale_B = moment_BX.abs().amax(1)
    share_BX = moment_BX / scale_B.clamp_min(_TINY)[:, None]
    if is_second:
        codes_BX = (share_BX.sqrt().sqrt() * 255).round().maximum((moment_BX > 0).float())
        return codes_BX.view(-1).to(torch.uint8), scale_B
    return (share_BX * 254 / (1 + share_BX.abs())).round().view(-1).to(torch.int8), scale_B


def dequantised(codes_N: Tensor, scale_B: Tensor) -> Tensor:
    """The fp32 numbers of `quantised` codes: int8 of the first moment, uint8 of the second."""
    codes_BX = codes_N.view(-1, BLOCK).float()
    if codes_N.dtype == torch.uint8:
        return ((codes_BX / 255).square().square() * scale_B[:, None]).view(-1)
    return (codes_BX / (254 - codes_BX.abs()) * scale_B[:, None]).view(-1)


def trained_parameters(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """All parameters of ``optimizers``."""
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
