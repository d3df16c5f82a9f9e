"""Expert parallelism: every rank holds a block of each layer's experts, and tokens travel to the experts they chose.

Shape letters: N tokens, K experts a token, S = N·K slots of this rank, M slots that arrived, E experts of the layer,
L of them here, R ranks, D hidden, F = 2·I, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from stretto.ops.grouped import compute_dtype, group_slots, grouped_swiglu


@dataclass(frozen=True, slots=True)
class Exchange:
    """`stretto.ops.grouped.experts` over the ranks of ``group``; every one of them must call it at the same time.

    Rank r holds experts r·L to (r + 1)·L − 1. Dropless: an expert takes whatever comes. The nested expert order is
    interleaved, so a narrow Subnet loads all ranks alike.
    """

    group: dist.ProcessGroup

    def experts(
        self, x_ND: Tensor, chosen_NK: Tensor, gates_NK: Tensor, gate_up_EFD: Tensor, down_EDI: Tensor
    ) -> Tensor:
        """Returns [N, D]. The weights are whole tensors of which this rank holds its block."""
        assert isinstance(gate_up_EFD, DTensor) and isinstance(down_EDI, DTensor), "experts were not spread"
        (num_tokens, num_chosen), num_experts = chosen_NK.shape, gate_up_EFD.shape[0]
        slots = group_slots(chosen_NK, num_experts)
        counts_RL = slots.ends_E.diff(prepend=slots.ends_E.new_zeros(1)).view(self.group.size(), -1)
        arriving_RL = torch.empty_like(counts_RL)
        dist.all_to_all_single(arriving_RL, counts_RL, group=self.group)
        there, back = counts_RL.sum(1).tolist(), arriving_RL.sum(1).tolist()
        # Copy, then permute: the gradient of a permutation has one writer a row, so no order of summation to depend on.
        # Slots sorted by expert are sorted by the rank that holds it, too.
        x_SD = x_ND.to(compute_dtype(x_ND)).repeat_interleave(num_chosen, dim=0).index_select(0, slots.order_S)
        x_MD = _Swap.apply(x_SD, there, back, self.group)
        y_MD = _local_experts(x_MD, arriving_RL, gate_up_EFD.to_local(), down_EDI.to_local())
        y_SD = _Swap.apply(y_MD, back, there, self.group).index_select(0, slots.place_S)
        y_NKD = y_SD.view(num_tokens, num_chosen, x_ND.shape[1])
        return (y_NKD * gates_NK.unsqueeze(-1).to(y_NKD.dtype)).sum(1)


def _local_experts(x_MD: Tensor, arrived_RL: Tensor, gate_up_LFD: Tensor, down_LDI: Tensor) -> Tensor:
    """Outputs [M, D] of rows that lie in order of source rank, then expert; ``arrived_RL`` says how many of each.

    Within an expert, rows keep the order of ranks: that of the global batch, as on one rank.
    """
    num_ranks, num_local = arrived_RL.shape
    expert_M = torch.arange(num_local, device=x_MD.device).repeat(num_ranks).repeat_interleave(arrived_RL.flatten())
    slots = group_slots(expert_M[:, None], num_local)
    y_MD = grouped_swiglu(x_MD.index_select(0, slots.order_S), slots.ends_E, gate_up_LFD, down_LDI)
    return y_MD.index_select(0, slots.place_S)


class _Swap(torch.autograd.Function):
    """Send the first ``sent[0]`` rows to rank 0 and so on; the result is what arrives, in order of rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Swap.apply(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None
