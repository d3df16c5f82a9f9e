"""Load and saliency of every expert on held-out batches.

Shape letters: B rows, T positions, N = B·T tokens, K chosen experts, S = N·K slots, P slots sorted by expert, D hidden,
I expert width, F = 2·I, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.evals.loss import EvalBatch
from stretto.model.parallel import Ranks
from stretto.model.spec import ModelConfig, Subnet, check_subnet
from stretto.model.transformer import Context, Transformer
from stretto.ops.grouped import Experts, gated_outputs
from stretto.ops.operators import Operators, Routes, route

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Routing of one MoE layer over real tokens (padding excluded)."""

    row: int
    """Index of the layer among the MoE layers of the maximum network."""
    load: tuple[int, ...]
    """Number of tokens routed to each expert."""
    saliency: tuple[float, ...]
    """Saliency of each expert (REAP, see `Watch`); 0 for an expert that was never chosen."""
    peak: tuple[float, ...]
    """Largest absolute element of each expert's output before the gate; 0 for an expert that was never chosen."""


class Watch(Operators):
    """The ordinary operators with identical results, which also record statistics of every expert's output.

    Saliency is REAP's S_j = mean over tokens routed to j of gate_j · ‖f_j‖₂ (2510.13999). As in the published code, gates are a softmax of
    the router's logits, renormalised over the chosen experts if the network does so, for sigmoid routers too: sigmoid gates differ
    too little between experts. Tokens that were routed to an expert by its selection bias alone are left out, unlike in the published
    code: their gates are small, so with them the mean would rank experts by the size of the bias (docs/log/elastic.md).
    """

    def __init__(self, config: ModelConfig, device: torch.device | str) -> None:
        counts = config.experts_by_layer
        self._config = config
        self._load_E = [torch.zeros(num, dtype=torch.int64, device=device) for num in counts]
        self._num_E = [torch.zeros(num, dtype=torch.int64, device=device) for num in counts]
        self._weight_E = [torch.zeros(num, dtype=torch.float64, device=device) for num in counts]
        self._peak_E = [torch.zeros(num, device=device) for num in counts]
        self._row, self._logits_NE = 0, torch.empty(0)
        self._real_N = torch.empty(0)
        self.inputs: list[Tensor] | None = None
        """Inputs [N, D] of the layers, without padding, one tensor per call; recorded only if the caller sets a list."""

    def over(self, batch: EvalBatch) -> Context:
        """Context of a forward pass over ``batch`` with recording; valid until the next call."""
        self._real_N = batch.real_BT.reshape(-1)
        return replace(batch.ctx, operators=self, routing=self._note_row)

    def _note_row(self, row: int, own_BTK: Tensor) -> Tensor:
        """Record the layer, which requests its routes right before it computes its experts."""
        self._row = row
        return own_BTK

    def router_scores(self, logits_NE: Tensor, softmax: bool) -> Tensor:
        self._logits_NE = logits_NE  # experts outside the Subnet are masked
        return super().router_scores(logits_NE, softmax)

    def _weighed(self, chosen_NK: Tensor) -> tuple[Tensor, Tensor]:
        """For each choice: whether it would be chosen without the selection bias, and its weight in the saliency."""
        config, (_, top_k) = self._config, chosen_NK.shape
        groups = config.expert_groups, config.top_groups
        logits_NE, softmax = self._logits_NE, config.router == "softmax"
        scores_NE = logits_NE.softmax(-1)
        free = route(logits_NE, None, None, top_k, softmax=softmax, normalize=False, scaling=1.0, groups=groups)
        is_free_NE = torch.zeros_like(scores_NE, dtype=torch.bool).scatter_(1, free.chosen_NK, True)
        if config.normalize_gates:
            scores_NE = scores_NE / scores_NE.gather(1, free.chosen_NK).sum(-1, keepdim=True)
        return is_free_NE.gather(1, chosen_NK), scores_NE.gather(1, chosen_NK)

    def experts(self, x_ND: Tensor, routes: Routes, weights: Experts) -> Tensor:
        self.note(x_ND, routes, weights)
        return super().experts(
            x_ND, routes, weights
        )  # not the sum of the noted outputs, which another kernel may have rounded otherwise

    def note(self, x_ND: Tensor, routes: Routes, weights: Experts) -> None:
        """Record the outputs of the experts that ``routes`` choose."""
        row, chosen_NK, gates_NK = self._row, routes.chosen_NK, routes.gates_NK
        is_free_NK, weight_NK = self._weighed(chosen_NK)
        y_NKD, once_NK = gated_outputs(x_ND, chosen_NK, gates_NK, weights), gates_NK.clamp_min(TINY)
        real_NK, expert_S = self._real_N[:, None].expand_as(chosen_NK), chosen_NK.reshape(-1)
        length_NK = y_NKD.float().norm(dim=-1) / once_NK * weight_NK * (real_NK & is_free_NK)
        self._load_E[row].index_add_(0, expert_S, real_NK.reshape(-1).long())
        self._num_E[row].index_add_(0, expert_S, (real_NK & is_free_NK).reshape(-1).long())
        self._weight_E[row].index_add_(0, expert_S, length_NK.reshape(-1).double())
        peak_NK = y_NKD.abs().amax(dim=-1).float() / once_NK * real_NK
        self._peak_E[row].scatter_reduce_(0, expert_S, peak_NK.reshape(-1), "amax")
        if self.inputs is not None:
            self.inputs.append(x_ND[self._real_N])

    def over_ranks(self, ranks: Ranks) -> None:
        """Combine the statistics with those of the other ranks, which have recorded other tokens."""
        for sums_E in (*self._load_E, *self._num_E, *self._weight_E):
            ranks.sum(sums_E)
        for peak_E in self._peak_E:
            peak_E.copy_(ranks.gather(peak_E).amax(0))

    def noted(self, row: int) -> LayerRouting:
        """Statistics of MoE layer ``row``."""
        saliency_E = self._weight_E[row] / self._num_E[row].clamp_min(1)
        return LayerRouting(
            row,
            load=tuple(self._load_E[row].tolist()),
            saliency=tuple(saliency_E.tolist()),
            peak=tuple(self._peak_E[row].tolist()),
        )


@torch.no_grad()
def routing(model: Transformer, subnet: Subnet, batches: Sequence[EvalBatch]) -> list[LayerRouting]:
    """Load and saliency of the experts of every MoE layer of ``subnet``, by depth."""
    check_subnet(model.config, subnet)
    watch = Watch(model.config, model.embedding.weight.device)
    for batch in batches:
        model(batch.ids_BT, subnet, watch.over(batch))
    return [watch.noted(row) for row in model.config.moe_rows(subnet.layers)]
