"""CUDA graphs for decoding: one launch for all kernels of a step.

At the sizes that people decode, a layer's kernels take less time than a processor needs to launch them one by one. A graph
repeats the very kernels of a step at the very addresses, so a step is brought into one of few shapes (sequences and cache pages
rounded up, with sequences of a spare page to fill up) and copied to where the first of its shape stood.

Graphs are for steps of one token a sequence under one Subnet in plain arithmetic; all else is launched kernel by kernel. On a CPU
the same shapes are computed without graphs, which is how they are tested.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.engine.forward_torch import KvPool, Layout, TorchForward
from stretto.engine.sequence import Chunk
from stretto.ops.paged import MAX_ALL

MAX_GRAPHS = 64
"""Kept at once, those used last; each holds its logits and some MB of launches."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph is good for."""

    subnet: int
    num_sequences: int
    num_pages: int
    """Of each sequence."""
    want_routes: bool


@dataclass(frozen=True, slots=True)
class Captured:
    """A step of one shape."""

    layout: Layout
    """Read by the kernels; every step's own is copied here."""
    graph: torch.cuda.CUDAGraph | None
    """None on a CPU."""
    logits_MV: Tensor | None


class DecodeGraphs:
    """Steps of one `TorchForward`, by shape."""

    def __init__(self, forward: TorchForward, pool: KvPool):
        """The pool's last page is nobody's: it belongs to the sequences that fill a shape up."""
        self._forward = forward
        _, num_pages, self._page_size = pool.keys_LPZGC.shape[:3]
        self._spare = num_pages - 1
        self._is_cuda = pool.keys_LPZGC.is_cuda
        self._captured: OrderedDict[Shape, Captured] = OrderedDict()
        self._memory = torch.cuda.graph_pool_handle() if self._is_cuda else None

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a step is of the kind that graphs are for."""
        subnet = chunks[0].subnet
        return len(chunks) <= MAX_ALL and all(
            [len(chunk.tokens) == 1 == chunk.num_logits and chunk.subnet == subnet for chunk in chunks]
        )

    def forward(self, chunks: Sequence[Chunk], want_routes: bool) -> Tensor:
        """As `TorchForward.forward`."""
        most = max([len(chunk.pages) for chunk in chunks])
        shape = Shape(chunks[0].subnet, rounded_up(len(chunks)), 1 << (most - 1).bit_length(), want_routes)
        blank = Chunk((0,), 0, (self._spare,), shape.subnet, 1)
        filled = [*chunks, *[blank] * (shape.num_sequences - len(chunks))]
        layout = self._forward.planner.decoding(filled, shape.num_pages)
        kept = self._captured.pop(shape, None)
        if kept is None or kept.layout.runs[0].rules is not layout.runs[0].rules:
            kept = self._capture(layout, want_routes)
        else:
            for mine, new in zip(_moving(kept.layout), _moving(layout), strict=True):
                mine.copy_(new)
        self._captured[shape] = kept
        if len(self._captured) > MAX_GRAPHS:
            self._captured.popitem(last=False)
        if kept.graph is None:
            return self._forward.compute(kept.layout, want_routes)[: len(chunks)]
        kept.graph.replay()
        assert kept.logits_MV is not None
        return kept.logits_MV[: len(chunks)].clone()

    def _capture(self, layout: Layout, want_routes: bool) -> Captured:
        if not self._is_cuda:
            return Captured(layout, None, None)
        # once beforehand, on a stream of its own: libraries make their handles and choose their kernels in a first call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward.compute(layout, want_routes)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # a trainer in another thread of this process may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits_MV = self._forward.compute(layout, want_routes)
        return Captured(layout, graph, logits_MV)


def rounded_up(num: int) -> int:
    """Powers of two up to 32, then multiples of 32: few shapes, and little that is computed for nobody."""
    return 1 << (num - 1).bit_length() if num <= 32 else -(-num // 32) * 32


def _moving(layout: Layout) -> Iterator[Tensor]:
    """What differs between steps of one shape."""
    spans = layout.runs[0].spans
    yield layout.ids_N
    yield from (spans.cos_N1R, spans.sin_N1R, spans.slots_N)
    for group in (*spans.groups, *spans.window_groups):
        yield group.pages
        if group.mask_B1LT is not None:
            yield group.mask_B1LT
