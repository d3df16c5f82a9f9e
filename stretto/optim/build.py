"""Optimisers: torch's fused AdamW, the same with small states, or Muon for hidden matrices and AdamW for the other parameters.

torch has a Muon too. It orthogonalises in bf16, which a CPU without bf16 units emulates: one step took 450 ms on 5 million
parameters, against 20 ms here. It also accepts neither stacks of matrices nor shards.

Shape letters: S matrices in a stack, M rows, N columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from stretto.base.errors import UserError
from stretto.ops.master import split_parameter
from stretto.ops.shards import is_shard
from stretto.optim.compact import CompactAdamW
from stretto.optim.schedule import OptimConfig

_OF_ROUTER = re.compile(r".*\.mlp\.(parametrizations\.)?gate(_bias)?(\..+)?")
"""Names of the parameters of a router: its matrix, its bias, and adapters of the matrix."""


def build_optimizers(config: OptimConfig, model: nn.Module, seed: int = 0) -> tuple[Optimizer, ...]:
    """One optimiser for AdamW, two for Muon, or one if it trains all parameters. Each parameter group has ``lr_factor``, its learning rate over the schedule's.

    Stores the trained weights of ``model`` as ``config.master`` says. ``seed``: of stochastic rounding. Raises `UserError`: the weights are
    divided over ranks, and states are not in fp32.
    """
    hidden: list[nn.Parameter] = []
    # Groups of AdamW: by weight decay, factor of the learning rate, and the ranks that the parameters are sharded over, because
    # torch's multi-tensor kernels take parameters of one kind.
    rest: dict[tuple[float, float, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if config.name == "muon" and _is_hidden_matrix(name, parameter):
            hidden.append(parameter)
            continue
        decay = 0.0 if parameter.dim() < 2 or name.endswith("bias") else config.weight_decay
        factor = config.router_lr_factor if _OF_ROUTER.fullmatch(name) else 1.0
        mesh = getattr(parameter, "device_mesh", None)
        rest.setdefault((decay, factor, mesh), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay, "lr_factor": factor} for (decay, factor, _), params in rest.items()
    ]
    # FSDP2 shards are DTensors, which the fused kernel accepts only on an accelerator.
    params = [parameter for group in rest.values() for parameter in group]
    if config.is_compact:
        if any(is_shard(parameter) for parameter in params):
            raise UserError(
                "optim.moments, optim.master, optim.in_backward: work on one rank; on several, FSDP divides fp32 states over the ranks: "
                "leave them out"
            )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and config.master != "fp32" and _is_hidden_matrix(name, parameter):
                if config.master == "split":
                    split_parameter(parameter)
                else:
                    parameter.data = parameter.data.to(torch.bfloat16)
        betas = (config.beta1, config.beta2)
        settings = (config.lr, betas, config.eps, config.moments)
        return (CompactAdamW(groups, *settings, seed=seed, in_backward=config.in_backward),)
    factor = config.muon_lr_factor
    of_muon = [{"params": hidden, "weight_decay": config.weight_decay / factor, "lr_factor": factor}]
    if hidden and not groups:  # adapters alone are trained
        return (Muon(of_muon, lr=config.lr * factor),)
    fused = all(type(parameter) is nn.Parameter for parameter in params) or params[0].device.type == "cuda"
    adamw = AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
    if not hidden:
        return (adamw,)
    return (adamw, Muon(of_muon, lr=config.lr * factor))


def set_learning_rate(optimizers: Iterable[Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon may update a parameter: matrices of blocks, experts included, but not embeddings, heads, routers and biases."""
    if parameter.dim() < 2 or not name.startswith("blocks."):
        return False
    return not name.endswith("bias") and _OF_ROUTER.fullmatch(name) is None


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration, from Muon's author, with the steepest slope at zero. The singular values do not
converge to 1 but stay within about 0.7 to 1.2, which is sufficient."""
_ITERATIONS = 5


class Muon(Optimizer):
    """Muon (Jordan et al., 2024) with Nesterov momentum and decoupled weight decay.

    Groups have ``lr`` and ``weight_decay``. The rate is multiplied by √max(1, M/N), so that a tall matrix changes its output as much as
    a square one.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, and of stacks the matrices that have one: an expert without tokens has zeros, and
        would otherwise move at the full rate along its last gradients, because `orthogonal` divides by the norm."""
        assert closure is None, "Muon does not evaluate closures"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1.0 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(momentum, group["momentum"]))
                aspect = math.sqrt(max(1.0, parameter.shape[-2] / parameter.shape[-1]))
                kept: Tensor | float = 1.0 - group["lr"] * group["weight_decay"]
                if parameter.dim() > 2:
                    moves_S11 = parameter.grad.abs().amax((-2, -1), keepdim=True) > 0
                    update, kept = update * moves_S11, torch.where(moves_S11, kept, 1.0)
                parameter.mul_(kept)
                parameter.add_(update, alpha=-group["lr"] * aspect)


def orthogonal(update: Tensor) -> Tensor:
    """Approximation of U·Vᵀ for ``update`` [(S,) M, N] = U·Σ·Vᵀ, by five Newton-Schulz iterations.

    Shards are gathered first, because orthogonality is a property of the full matrix.
    """
    if is_shard(update):
        from torch.distributed.tensor import distribute_tensor

        full = orthogonal(update.full_tensor())
        return distribute_tensor(full, update.device_mesh, update.placements)
    a, b, c = _COEFFICIENTS
    x_MN = update.to(torch.bfloat16 if update.device.type == "cuda" else torch.float32)
    tall = x_MN.shape[-2] > x_MN.shape[-1]
    if tall:
        x_MN = x_MN.mT
    x_MN = x_MN / (x_MN.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram_MM = x_MN @ x_MN.mT
        x_MN = a * x_MN + (b * gram_MM + c * gram_MM @ gram_MM) @ x_MN
    return (x_MN.mT if tall else x_MN).to(update.dtype)
