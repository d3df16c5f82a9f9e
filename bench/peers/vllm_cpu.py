"""Worker extension for vLLM 0.32 on a CPU: reloaded weights reach its packed copies. For ``--worker-extension-cls bench.peers.vllm_cpu.Repacked``.

vLLM packs the weights of experts and of a tied head for its CPU kernels when it loads them first. `reload_weights` leaves the packed head
as it is, and copies unpacked experts over packed ones. It reports no error, and the log-probabilities are wrong (docs/log/rl.md).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def repack(model: nn.Module) -> None:
    """Pack experts and head of ``model`` again, after a reload."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
    method = getattr(model.lm_head, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(model.lm_head)


_reload = CPUModelRunner.reload_weights


def _reload_and_repack(self: CPUModelRunner, *args: Any, **named: Any) -> None:
    _reload(self, *args, **named)
    repack(self.get_model())


CPUModelRunner.reload_weights = _reload_and_repack


class Repacked:
    """Adds nothing to the worker: importing this module does the work."""
