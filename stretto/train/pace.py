"""Choice of data type and number of threads for a run: from the recipe, or measured on the run's own micro-batches.

bf16 can be slower than fp32 even on a processor with bf16 units, and all threads can be slower than a few on a shared machine. A
run on a CPU therefore times forward and backward passes of its own micro-batches before the first step. The snapshots keep the
result, so that a resumed run computes as before.
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
from stretto.ops.tuning import MARGIN, fastest_threads, multiplies_bf16, seconds_of, thread_counts, trains_in_bf16
from stretto.train.step import MicroBatch, forward_backward

LONG_BATCH_S = 2.0
"""Micro-batches that take longer than this are timed in part, in seconds. A network of 135M parameters needs half a minute for
4,096 tokens.
"""
MIN_TIMED_TOKENS = 128
"""Smallest number of tokens from which the time of a whole micro-batch is extrapolated."""


class Pace(Config):
    """Data type and number of threads of a run. Written when the run starts; resumed runs follow it."""

    dtype: Literal["float32", "bfloat16"]
    num_threads: int
    """Threads of each rank on a CPU."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def follow(self) -> None:
        """Set torch to this number of threads, or to the available number if that is smaller. A number set by the user stays."""
        if len(thread_counts()) > 1:
            torch.set_num_threads(min(self.num_threads, torch.get_num_threads()))


def find_pace(
    choice: Literal["auto", "float32", "bfloat16"],
    config: ModelConfig,
    next_batch: Callable[[], MicroBatch],
    ranks: Ranks,
    is_lean: bool = False,
) -> Pace:
    """Data type and number of threads for ``choice`` on this machine, for a network of ``config``. Sets torch to that number of threads.

    On a GPU ``auto`` is bf16 if the GPU has bf16 units. On a CPU with bf16 units it is the faster data type. Fewer threads are tried
    on every CPU. One line prints the measurements. All ranks must call this: they agree on the data type, and each chooses its own
    number of threads.

    Args:
        next_batch: returns batches of the full network with the router's own routes, as in training. Each call must give a new
            batch: matrix products of sizes that were seen before are faster.
        is_lean: the run takes less memory than a network in fp32 with gradients of all weights, so that a shallow one is timed, as on
            several ranks.
    """
    if ranks.device.type != "cpu":
        dtype = choice if choice != "auto" else "bfloat16" if trains_in_bf16(ranks.device) else "float32"
        return Pace(dtype=dtype, num_threads=torch.get_num_threads())
    first: Literal["float32", "bfloat16"] = "float32" if choice == "auto" else choice
    others: list[Literal["bfloat16"]] = ["bfloat16"] if choice == "auto" and multiplies_bf16(ranks.device) else []
    if not others and len(thread_counts()) == 1:
        return Pace(dtype=first, num_threads=torch.get_num_threads())
    if ranks.world > 1 or is_lean:  # a rank that holds a part of the network may not have memory for all of it
        config = extracted_config(config, config.subnet(depth=len(fixed_layers(config.num_layers))))
    network = build(config, 0)

    def work(dtype: str, num_tokens: int) -> None:
        batch = replace(_first_tokens(next_batch(), num_tokens), subnet=config.full())
        forward_backward(network, batch, getattr(torch, dtype))
        network.zero_grad(set_to_none=True)

    work(first, MIN_TIMED_TOKENS)
    start = time.perf_counter()
    work(first, MIN_TIMED_TOKENS)
    num_in_time = int(MIN_TIMED_TOKENS * LONG_BATCH_S / (time.perf_counter() - start))
    batch = next_batch()
    num_all = batch.ids_BT.numel()
    num_tokens = _first_tokens(batch, max(num_in_time, MIN_TIMED_TOKENS)).ids_BT.numel()
    if num_tokens < num_all and ranks.is_first:
        say(f"timing the first {num_tokens:,} of a micro-batch's {num_all:,} tokens, about ten seconds")
    by_threads = fastest_threads(lambda: seconds_of(lambda: work(first, num_tokens)))
    num_threads = torch.get_num_threads()
    by_dtype: dict[str, float] = {first: by_threads[num_threads]}
    by_dtype |= {dtype: seconds_of(lambda dtype=dtype: work(dtype, num_tokens)) for dtype in others}  # type: ignore[misc]
    sums_s = ranks.sum(torch.tensor(list(by_dtype.values()), dtype=torch.float64)).tolist()
    chosen = "bfloat16" if others and sums_s[0] > MARGIN * sums_s[1] else first
    if ranks.is_first:
        rates = [f"{dtype} {short(num_tokens / wall_s)}" for dtype, wall_s in by_dtype.items()] if others else []
        if len(by_threads) > 1:
            rates += [f"{counted(num, 'thread')} {short(num_tokens / wall_s)}" for num, wall_s in by_threads.items()]
        say(f"forward and backward, tokens/s: {', '.join(rates)}; using {chosen}, {counted(num_threads, 'thread')}")
    return Pace(dtype=chosen, num_threads=num_threads)


def _first_tokens(batch: MicroBatch, num_tokens: int) -> MicroBatch:
    """At most ``num_tokens`` tokens of ``batch``: whole rows, or the start of the first row."""
    length = batch.ids_BT.shape[1]
    part = (slice(max(1, num_tokens // length)), slice(min(length, num_tokens)))
    documents_BT = batch.ctx.documents_BT
    ctx = replace(
        batch.ctx,
        positions_BT=batch.ctx.positions_BT[part],
        documents_BT=None if documents_BT is None else documents_BT[part],
    )
    return replace(batch, ids_BT=batch.ids_BT[part], targets_BT=batch.targets_BT[part], ctx=ctx)
