"""Optimisers: torch's fused AdamW, or Muon for the matrices it is defined for with AdamW for the rest.

torch has a Muon of its own. It orthogonalises in bf16, which a CPU without bf16 units emulates: there one step of it
cost more than the whole forward and backward (450 ms against 20 ms here, on 5 million parameters). It also refuses stacks, and shards.

Shape letters: S matrices in a stack, M rows, N columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from stretto.optim.schedule import OptimConfig


def build_optimizers(config: OptimConfig, model: nn.Module) -> tuple[Optimizer, ...]:
    """One optimiser for AdamW, two for Muon; each group carries ``lr_factor``, its rate over the schedule's."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hidden = [parameter for name, parameter in named if config.name == "muon" and _is_hidden_matrix(name, parameter)]
    chosen = {id(parameter) for parameter in hidden}
    rest = [parameter for _, parameter in named if id(parameter) not in chosen]
    is_vector = {id(parameter): parameter.dim() < 2 or name.endswith("bias") for name, parameter in named}
    is_apart = {
        id(parameter): config.router_lr_factor != 1.0 and name.endswith("mlp.gate") for name, parameter in named
    }
    routers = [parameter for parameter in rest if is_apart[id(parameter)]]
    matrices = [parameter for parameter in rest if not is_vector[id(parameter)] and not is_apart[id(parameter)]]
    vectors = [parameter for parameter in rest if is_vector[id(parameter)]]
    kinds = (
        (matrices, config.weight_decay, 1.0),
        (vectors, 0.0, 1.0),
        (routers, config.weight_decay, config.router_lr_factor),
    )
    groups = [
        {"params": params, "weight_decay": decay, "lr_factor": factor}
        for some, decay, factor in kinds
        for params in _by_mesh(some)
    ]
    # FSDP2 shards are DTensors, which the fused kernel takes only on an accelerator
    fused = all(type(parameter) is nn.Parameter for parameter in rest) or rest[0].device.type == "cuda"
    adamw = AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
    if not hidden:
        return (adamw,)
    factor = config.muon_lr_factor
    groups = [{"params": hidden, "weight_decay": config.weight_decay / factor, "lr_factor": factor}]
    return (adamw, Muon(groups, lr=config.lr * factor))


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Apart by the ranks they are spread over: torch's multi-tensor kernels take one kind at a time."""
    found: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(found.values())


def set_learning_rate(optimizers: Iterable[Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Muon is for matrices between hidden states, experts included: not for embeddings, heads, routers and experts' biases."""
    return parameter.dim() >= 2 and name.startswith("blocks.") and not name.endswith(("mlp.gate", "bias"))


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration, chosen by Muon's author for the steepest slope at zero; it does not converge
to 1 but keeps every singular value within about 0.7 to 1.2, which is enough."""
_ITERATIONS = 5


class Muon(Optimizer):
    """Muon (Jordan et al., 2024) with Nesterov momentum and decoupled weight decay.

    Groups take ``lr`` and ``weight_decay``; the rate is multiplied by √max(1, M/N), so that a tall matrix changes its
    output as much as a square one.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
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
                shape = math.sqrt(max(1.0, parameter.shape[-2] / parameter.shape[-1]))
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * shape)


def orthogonal(update: Tensor) -> Tensor:
    """The nearest thing to U·Vᵀ of ``update`` [(S,) M, N] = U·Σ·Vᵀ that five matrix products' worth of work finds.

    A shard is gathered first: orthogonality is a property of the whole matrix.
    """
    if isinstance(update, DTensor):
        whole = orthogonal(update.full_tensor())
        return distribute_tensor(whole, update.device_mesh, update.placements)
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
