"""The MoE layer: route, compute the chosen experts, add the shared ones.

Shape letters: B rows, T positions, N = B·T tokens, D hidden, E experts, K chosen, W branches of balance state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stretto.model.exchange import Exchange
from stretto.model.layers import SwiGlu, linear_fp32
from stretto.model.spec import ModelConfig
from stretto.ops import matmul
from stretto.ops.grouped import experts
from stretto.ops.matmul import PLAIN, Arithmetic, ExpertMatrices, linear, rounded
from stretto.ops.route import Routes, route


@dataclass(frozen=True, slots=True)
class RowWidths:
    """Which experts each row of a batch may use, in every layer; drawn by the sampler.

    Experts are named by their rank in the layer's nested order, so that one mask serves all layers.
    """

    branch_B: Tensor
    """Row of balance state each batch row reads and feeds, int64."""
    allowed_BE: Tensor
    """Whether the expert of that rank may be chosen, bool."""
    counted_B: Tensor
    """Whether the row's choices feed the balance counts (a random subset must not starve the full network's), bool."""


class MoeOutput(NamedTuple):
    """Result of an MoE layer."""

    y_BTD: Tensor
    counts_WE: Tensor
    """Slots each expert got, by branch, int64."""
    own_BTK: Tensor
    """Experts that the router chose, or, where choices were replayed, would have chosen; int64."""


class MoeLayer(nn.Module):
    """Router, routed experts and shared experts of one layer."""

    rank_E: Tensor
    bias_WE: Tensor

    def __init__(self, config: ModelConfig, row: int):
        super().__init__()
        num_experts = config.experts_by_layer[row]
        hidden, width = config.hidden_size, config.expert_intermediate_size
        self.config = config
        self.gate = nn.Parameter(torch.empty(num_experts, hidden))
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.shared = SwiGlu(hidden, config.num_shared_experts * width) if config.num_shared_experts else None
        rank = torch.empty(num_experts, dtype=torch.int64)
        rank[torch.tensor(config.expert_orders[row])] = torch.arange(num_experts)
        self.register_buffer("rank_E", rank, persistent=False)
        self.register_buffer("bias_WE", torch.zeros(config.num_branches, num_experts))
        self.exchange: Exchange | None = None  # set by `parallel.shard` where the experts lie on several ranks

    def forward(
        self,
        x_BTD: Tensor,
        num_experts: int,
        top_k: int,
        widths: RowWidths | None,
        recorded_BTK: Tensor | None = None,
        arithmetic: Arithmetic = PLAIN,
    ) -> MoeOutput:
        """Route the tokens and run their experts.

        ``num_experts`` and ``top_k`` hold for all rows; ``widths`` narrows single rows further; ``recorded_BTK`` are
        choices to replay (`stretto.ops.route.route`).
        """
        B, T, D = x_BTD.shape
        x_ND = x_BTD.reshape(B * T, D)
        routes, counts_WE = self.route(x_BTD, num_experts, top_k, widths, recorded_BTK, arithmetic)
        if arithmetic.is_plain:
            compute = experts if self.exchange is None else self.exchange.experts
            y_ND = compute(x_ND, routes.chosen_NK, routes.gates_NK, self.gate_up, self.down)
        else:
            assert self.exchange is None, f"experts on several ranks compute in plain fp32, not {arithmetic}"
            weights = ExpertMatrices(self.gate_up.unbind(0), self.down.unbind(0))
            y_ND = matmul.experts(x_ND, routes.chosen_NK, routes.gates_NK, weights, arithmetic)
        y_BTD = y_ND.view(B, T, D)
        if self.shared is not None:
            y_BTD = rounded(y_BTD + self.shared(x_BTD, arithmetic), arithmetic)
        own_NK = routes.chosen_NK if routes.own_NK is None else routes.own_NK
        return MoeOutput(y_BTD, counts_WE, own_NK.view(B, T, top_k))

    def route(
        self,
        x_BTD: Tensor,
        num_experts: int,
        top_k: int,
        widths: RowWidths | None,
        recorded_BTK: Tensor | None = None,
        arithmetic: Arithmetic = PLAIN,
    ) -> tuple[Routes, Tensor]:
        """Routes of all B·T tokens, and the slots each expert got by branch [W, E]."""
        config, T = self.config, x_BTD.shape[1]
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        if arithmetic.batch_invariant:
            logits_NE = linear(x_ND.float(), self.gate.float(), None, arithmetic.inner)
        else:
            logits_NE = linear_fp32(x_ND, self.gate)
        total = logits_NE.shape[-1]
        if widths is None:
            branch = config.branch(num_experts)
            bias_NE = self.bias_WE[branch]
            allowed_NE = None if num_experts == total else self.rank_E < num_experts
        else:
            bias_NE = self.bias_WE[widths.branch_B].repeat_interleave(T, dim=0)
            allowed_BE = widths.allowed_BE[:, self.rank_E] & (self.rank_E < num_experts)
            allowed_NE = allowed_BE.repeat_interleave(T, dim=0)
        routes = route(
            logits_NE,
            bias_NE if config.selection_bias else None,
            allowed_NE,
            top_k,
            softmax=config.router == "softmax",
            normalize=config.normalize_gates,
            scaling=config.routed_scaling,
            recorded_NK=None if recorded_BTK is None else recorded_BTK.flatten(0, 1),
            batch_invariant=arithmetic.batch_invariant,
        )
        if widths is None:
            counts_WE = torch.zeros_like(self.bias_WE, dtype=torch.int64)
            if num_experts == min(config.widths[branch], total):
                counts_WE[branch] = torch.bincount(routes.chosen_NK.reshape(-1), minlength=total)
            # a width without a branch of its own reads the next larger one's bias and feeds none: to that branch, the
            # experts masked here would look idle
        else:
            counts_WE = _counts_by_branch(routes.chosen_NK, widths, T, self.bias_WE.shape)
        return routes, counts_WE


def _counts_by_branch(chosen_NK: Tensor, widths: RowWidths, length: int, shape: torch.Size) -> Tensor:
    num_branches, num_experts = shape
    # rows that do not count go to one branch past the last, which is cut off
    branch_B = torch.where(widths.counted_B, widths.branch_B, num_branches)
    key_NK = branch_B.repeat_interleave(length)[:, None] * num_experts + chosen_NK
    counts = torch.bincount(key_NK.reshape(-1), minlength=(num_branches + 1) * num_experts)
    return counts.view(num_branches + 1, num_experts)[:num_branches]
