"""CUDA graphs for decoding: one launch for all kernels of a step.

For small batches, the kernels of a layer take less time than a processor needs to launch them one by one. A graph
repeats the same kernels at the same addresses. A step is therefore padded to one of few shapes (numbers of sequences and cache
pages are rounded up; padding sequences use a spare page), and its tensors are copied to those of the first step of that shape.

Graphs serve steps with one token per sequence and one Subnet in plain arithmetic; other steps are launched kernel by kernel. On a
CPU the padded steps are computed without graphs, for tests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.engine.forward_torch import KvPool, Layout, TorchForward
from stretto.engine.sequence import Chunk
from stretto.ops.paged import MAX_ALL

MAX_GRAPHS = 64
"""Largest number of cached graphs; each takes the memory of its logits and some MB of launches."""


class Shape(NamedTuple):
    """Key of a graph: the properties of a step that determine its kernels."""

    subnet: int
    num_sequences: int
    num_pages: int
    """Pages per sequence."""
    want_routes: bool


class Captured(NamedTuple):
    """The graph of one shape, with its tensors."""

    layout: Layout
    """The kernels read it; the tensors of each step are copied into it."""
    graph: torch.cuda.CUDAGraph | None
    """None on a CPU."""
    logits_MV: Tensor | None


class DecodeGraphs:
    """Steps of one `TorchForward`, by shape."""

    def __init__(self, forward: TorchForward, pool: KvPool):
        """``pool``: its last page is used by padding sequences only."""
        self._forward = forward
        _, num_pages, self._page_size = pool.keys_LPZGC.shape[:3]
        self._spare = num_pages - 1
        self._is_cuda = pool.keys_LPZGC.is_cuda
        self._captured: OrderedDict[Shape, Captured] = OrderedDict()
        self._memory = torch.cuda.graph_pool_handle() if self._is_cuda else None

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the step has one token per sequence and one Subnet."""
        subnet = chunks[0].subnet
        return len(chunks) <= MAX_ALL and all(
            [len(chunk.tokens) == 1 == chunk.num_logits and chunk.subnet == subnet for chunk in chunks]
        )

    def forward(self, chunks: Sequence[Chunk], want_routes: bool) -> Tensor:
        """See `TorchForward.forward`."""
        num_pages = max([len(chunk.pages) for chunk in chunks])
        shape = Shape(chunks[0].subnet, rounded_up(len(chunks)), 1 << (num_pages - 1).bit_length(), want_routes)
        blank = Chunk((0,), 0, (self._spare,), shape.subnet, 1)
        filled = [*chunks, *[blank] * (shape.num_sequences - len(chunks))]
        layout = self._forward.planner.decoding(filled, shape.num_pages)
        captured = self._captured.pop(shape, None)
        if captured is None or captured.layout.runs[0].rules is not layout.runs[0].rules:
            captured = self._capture(layout, want_routes)
        else:
            for target, source in zip(_varying(captured.layout), _varying(layout), strict=True):
                target.copy_(source)
        self._captured[shape] = captured
        if len(self._captured) > MAX_GRAPHS:
            self._captured.popitem(last=False)
        if captured.graph is None:
            return self._forward.compute(captured.layout, want_routes)[: len(chunks)]
        captured.graph.replay()
        assert captured.logits_MV is not None
        return captured.logits_MV[: len(chunks)].clone()

    def _capture(self, layout: Layout, want_routes: bool) -> Captured:
        if not self._is_cuda:
            return Captured(layout, None, None)
        # one step before the capture, on another stream: libraries create handles and choose kernels in their first call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward.compute(layout, want_routes)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread-local, because a trainer in another thread of this process may allocate memory meanwhile
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits_MV = self._forward.compute(layout, want_routes)
        return Captured(layout, graph, logits_MV)


def rounded_up(num: int) -> int:
    """``num`` rounded up to a power of two up to 32, then to a multiple of 32: few shapes, and little padding."""
    return 1 << (num - 1).bit_length() if num <= 32 else -(-num // 32) * 32


def _varying(layout: Layout) -> Iterator[Tensor]:
    """Tensors that differ between steps of one shape."""
    spans = layout.runs[0].spans
    yield layout.ids_N
    yield from (spans.cos_N1R, spans.sin_N1R, spans.slots_N)
    for group in (*spans.groups, *spans.window_groups):
        yield group.pages
        if group.mask_B1LT is not None:
            yield group.mask_B1LT
