"""Weights in FP8 for rollouts on a GPU, quantised as the trainer quantises them: one scale per output, see `stretto.ops.fp8_rows`.

Decoding steps read the bytes (`stretto.engine.decode.KernelSteps`), half as many as bf16 has; activations stay in bf16, because products
of few tokens take the time to read the weights. Other steps multiply by the values of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stretto.ops.fp8_rows import MULTIPLE, Rows


class Fp8Weights:
    """The quantised weights of a network, whose own weights become their values."""

    def __init__(self, blocks: nn.Module, prefix: str):
        """``prefix``: of the names of the weights of ``blocks`` in the network's state dict."""
        self._blocks, self._prefix = blocks, prefix
        self.rows = {name: Rows.of(weight.bfloat16()) for name, weight in self._weights()}
        """By name in the state dict. `refresh` writes to these tensors."""
        self._write()

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the network's weights anew, which were replaced."""
        for name, weight in self._weights():
            fresh, own = Rows.of(weight.bfloat16()), self.rows[name]
            own.bytes_ND.copy_(fresh.bytes_ND)
            own.scale_N.copy_(fresh.scale_N)
        self._write()

    @torch.no_grad()
    def _write(self) -> None:
        for name, weight in self._weights():
            weight.copy_(self.rows[name].dequantise())

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices of attention, feed-forward networks and experts. The router decides on small differences, and stays."""
        for name, weight in self._blocks.named_parameters():
            is_matrix = weight.ndim > 1 and not name.endswith(("mlp.gate", "bias"))
            if is_matrix and not any(width % MULTIPLE for width in weight.shape[-2:]):
                yield self._prefix + name, weight.detach()
