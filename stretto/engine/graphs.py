"""CUDA graphs for decoding: one launch for all kernels of a step.

For small batches, the kernels of a layer take less time than a processor needs to launch them one by one. A graph
repeats the same kernels at the same addresses. A step is therefore padded to one of few shapes (`stretto.engine.decode.Shape`; padding
sequences use a spare page), and what differs between steps of a shape is copied to the tensors that its graph reads.

Graphs serve steps with one token per sequence in plain arithmetic, of any Subnets; other steps are launched kernel by kernel. On a
CPU the padded steps are computed without graphs, for tests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.base.track import say
from stretto.engine.decode import (
    MAX_SUBNETS,
    Host,
    Inputs,
    KernelSteps,
    Shape,
    Steps,
    SubnetRows,
    TorchSteps,
    shape_of,
    why_torch,
)
from stretto.engine.forward_torch import KvPool, TorchForward
from stretto.engine.sequence import Chunk, SubnetTable
from stretto.model.spec import ModelConfig
from stretto.ops.fp8_rows import Rows
from stretto.ops.int_weights import IntWeight
from stretto.ops.paged import MAX_ALL

MAX_GRAPHS = 64
"""Largest number of cached graphs; each takes the memory of its logits and some MB of launches."""
LEAST_PAGES = 64
"""Smallest width of a table of pages, where a wider one costs nothing but its copy."""


class Captured(NamedTuple):
    """The graph of one shape, with its tensors."""

    host: Host
    flat: Tensor
    """The kernels read `Inputs` in it; those of each step are copied into it."""
    inputs: Inputs
    graph: torch.cuda.CUDAGraph | None
    """None on a CPU."""
    logits_MV: Tensor | None


class DecodeGraphs:
    """Steps of one `TorchForward`, by shape."""

    def __init__(
        self,
        forward: TorchForward,
        pool: KvPool,
        config: ModelConfig,
        subnets: SubnetTable,
        quantised: Mapping[str, IntWeight | Rows] = MappingProxyType({}),
        with_kernels: bool | None = None,
    ):
        """
        Args:
            pool: its last page is used by padding sequences only.
            quantised: integer or FP8 weights by their names in the state dict; the kernels multiply by them.
            with_kernels: whether the Triton kernels compute; None: if they can, on a GPU.
        """
        self._subnets, self._device = subnets, pool.keys_LPZGC.device
        _, num_pages, self._page_size = pool.keys_LPZGC.shape[:3]
        self._spare, self._is_cuda = num_pages - 1, self._device.type == "cuda"
        self._rows = SubnetRows(forward.planner, config, subnets, self._device)
        reason = why_torch(pool)
        self.kernels = "Triton"
        """The kernels that compute, for display."""
        if with_kernels or (with_kernels is None and self._is_cuda and not reason):
            self._steps: Steps = KernelSteps(forward, pool, self._rows, config, quantised)
        else:
            self._steps, self.kernels = TorchSteps(forward, pool, self._rows, config), f"torch ({reason or 'chosen'})"
            if self._is_cuda:
                say(f"decoding gathers keys and values in every step, which is slower: {reason}")
        self.multiplies_quantised = bool(quantised) and isinstance(self._steps, KernelSteps)
        self._captured: OrderedDict[Shape, Captured] = OrderedDict()
        self._memory = torch.cuda.graph_pool_handle() if self._is_cuda else None

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the step has one token per sequence, and not too many sequences or Subnets."""
        return (
            len(chunks) <= MAX_ALL
            and all([len(chunk.tokens) == 1 == chunk.num_logits for chunk in chunks])
            and len({chunk.subnet for chunk in chunks}) <= MAX_SUBNETS
        )

    def forward(self, chunks: Sequence[Chunk], want_routes: bool) -> Tensor:
        """See `TorchForward.forward`."""
        rows = self._rows.rows([chunk.subnet for chunk in chunks])
        num_pages = max([len(chunk.pages) for chunk in chunks])
        if not self._steps.reads_whole_pages:
            num_pages = max(num_pages, LEAST_PAGES)
        num_pages = 1 << (num_pages - 1).bit_length()
        shape = shape_of(chunks, rounded_up(len(chunks)), self._rows, self._subnets, num_pages, want_routes)
        captured = self._captured.pop(shape, None)
        if captured is None:
            host = Host(shape, self._spare)
            captured = self._capture(host, host.write(chunks, rows).to(self._device, copy=True), shape)
        else:
            captured.flat.copy_(captured.host.write(chunks, rows))
        self._captured[shape] = captured
        if len(self._captured) > MAX_GRAPHS:
            self._captured.popitem(last=False)
        if captured.graph is None:
            return self._steps.compute(captured.inputs, shape)[: len(chunks)]
        captured.graph.replay()
        assert captured.logits_MV is not None
        return captured.logits_MV[: len(chunks)].clone()

    def refresh(self) -> None:
        """Follow new weights, which were copied into the tensors of the forward pass."""
        self._rows.refresh()

    def _capture(self, host: Host, flat: Tensor, shape: Shape) -> Captured:
        inputs = Inputs.views(flat, shape)
        if not self._is_cuda:
            return Captured(host, flat, inputs, None, None)
        # one step before the capture, on another stream: libraries create handles and choose kernels in their first call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._steps.compute(inputs, shape)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread-local, because a trainer in another thread of this process may allocate memory meanwhile
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits_MV = self._steps.compute(inputs, shape)
        return Captured(host, flat, inputs, graph, logits_MV)


def rounded_up(num: int) -> int:
    """``num`` rounded up to a power of two up to 32, then to a multiple of 32: few shapes, and little padding."""
    return 1 << (num - 1).bit_length() if num <= 32 else -(-num // 32) * 32
