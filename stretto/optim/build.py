"""Optimisers, thin on torch's own: fused AdamW, or Muon for the matrices it is defined for with AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from stretto.optim.muon import Muon
from stretto.optim.schedule import OptimConfig


def build_optimizers(config: OptimConfig, model: nn.Module) -> tuple[Optimizer, ...]:
    """One optimiser for AdamW, two for Muon; each group carries ``lr_factor``, its rate over the schedule's."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hidden = [parameter for name, parameter in named if config.name == "muon" and _is_hidden_matrix(name, parameter)]
    chosen = {id(parameter) for parameter in hidden}
    rest = [parameter for _, parameter in named if id(parameter) not in chosen]
    matrices = [parameter for parameter in rest if parameter.dim() >= 2]
    vectors = [parameter for parameter in rest if parameter.dim() < 2]
    groups = [
        {"params": params, "weight_decay": decay, "lr_factor": 1.0}
        for decay, some in ((config.weight_decay, matrices), (0.0, vectors))
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
    """Muon is for matrices between hidden states, experts included: not for embeddings, heads and routers."""
    return parameter.dim() >= 2 and name.startswith("blocks.") and not name.endswith("mlp.gate")
