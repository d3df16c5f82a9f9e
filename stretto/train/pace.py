"""In which dtype a run computes, and with how many threads: what its recipe says, or what a second of its own work says.

A processor with units for bf16 can be slower in it, and a machine that others use slower with all of its threads. So a run on a
CPU times forward and backward of its own micro-batches before the first step. What it chose is kept in its snapshots: a resume
computes as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch

from stretto.base.config import Config
from stretto.base.numbers import counted, short
from stretto.base.track import say
from stretto.model.parallel import Ranks
from stretto.model.spec import ModelConfig, extracted_config, fixed_layers
from stretto.model.transformer import build
from stretto.ops.tuning import MARGIN, fastest_threads, multiplies_bf16, seconds_of, thread_counts
from stretto.train.step import MicroBatch, forward_backward

LONG_S = 2.0
"""A micro-batch that takes longer than this is timed in part: a network of 135M parameters needs half a minute for 4,096 tokens."""
FEW_TOKENS = 128
"""At least, of which the time that all take is foretold."""


class Pace(Config):
    """How a run computes. Written by its first life, followed by all."""

    dtype: Literal["float32", "bfloat16"]
    num_threads: int
    """Of a rank on a CPU."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def follow(self) -> None:
        """Take so many threads, or as many as there are now; what a user set stands."""
        if len(thread_counts()) > 1:
            torch.set_num_threads(min(self.num_threads, torch.get_num_threads()))


def find_pace(
    choice: Literal["auto", "float32", "bfloat16"],
    config: ModelConfig,
    next_batch: Callable[[], MicroBatch],
    ranks: Ranks,
) -> Pace:
    """What ``choice`` of a recipe means for a network of ``config`` here; leaves torch with that number of threads.

    On a GPU ``auto`` is bf16 where there are units for it. On a CPU it is the faster dtype where there are, and fewer threads
    are tried: one line tells what was found. Ranks agree on a dtype, and count threads on their own; all must call this.

    Args:
        next_batch: gives batches of the full network with routes of their own, as training does: products of sizes that were
            seen before are faster.
    """
    has_units = multiplies_bf16(ranks.device)
    if ranks.device.type != "cpu":
        told = choice if choice != "auto" else "bfloat16" if has_units else "float32"
        return Pace(dtype=told, num_threads=torch.get_num_threads())
    first: Literal["float32", "bfloat16"] = "float32" if choice == "auto" else choice
    others: list[Literal["bfloat16"]] = ["bfloat16"] if choice == "auto" and has_units else []
    if not others and len(thread_counts()) == 1:
        return Pace(dtype=first, num_threads=torch.get_num_threads())
    if ranks.world > 1:  # a rank that holds its part of the network only has no room for all of it
        config = extracted_config(config, config.subnet(depth=len(fixed_layers(config.num_layers))))
    network = build(config, 0)

    def work(dtype: str, num_tokens: int) -> None:
        batch = replace(_part(next_batch(), num_tokens), subnet=config.full())
        forward_backward(network, batch, getattr(torch, dtype))
        network.zero_grad(set_to_none=True)

    work(first, FEW_TOKENS)
    start = time.perf_counter()
    work(first, FEW_TOKENS)
    foretold = int(FEW_TOKENS * LONG_S / (time.perf_counter() - start))
    batch = next_batch()
    whole, num_tokens = batch.ids_BT.numel(), _part(batch, max(foretold, FEW_TOKENS)).ids_BT.numel()
    if num_tokens < whole and ranks.is_first:
        say(f"timing the first {num_tokens:,} of a micro-batch's {whole:,} tokens, about ten seconds")

    def seconds(dtype: str) -> float:
        return seconds_of(lambda: work(dtype, num_tokens))

    by_threads = fastest_threads(lambda: seconds(first))
    num_threads = torch.get_num_threads()
    by_dtype: dict[str, float] = {first: by_threads[num_threads]}
    by_dtype |= {dtype: seconds(dtype) for dtype in others}
    over_ranks = ranks.sum(torch.tensor(list(by_dtype.values()), dtype=torch.float64)).tolist()
    chosen = "bfloat16" if others and over_ranks[0] > MARGIN * over_ranks[1] else first
    if ranks.is_first:
        rates = [f"{dtype} {short(num_tokens / each)}" for dtype, each in by_dtype.items()] if others else []
        if len(by_threads) > 1:
            rates += [f"{counted(num, 'thread')} {short(num_tokens / each)}" for num, each in by_threads.items()]
        say(f"forward and backward, tokens/s: {', '.join(rates)}; using {chosen}, {counted(num_threads, 'thread')}")
    return Pace(dtype=chosen, num_threads=num_threads)


def _part(batch: MicroBatch, most_tokens: int) -> MicroBatch:
    """So many of its tokens at the most: whole rows, or the beginning of the first."""
    length = batch.ids_BT.shape[1]
    part = (slice(max(1, most_tokens // length)), slice(min(length, most_tokens)))
    documents_BT = batch.ctx.documents_BT
    ctx = replace(
        batch.ctx,
        positions_BT=batch.ctx.positions_BT[part],
        documents_BT=None if documents_BT is None else documents_BT[part],
    )
    return replace(batch, ids_BT=batch.ids_BT[part], targets_BT=batch.targets_BT[part], ctx=ctx)
