"""Expert pools by document, EMO's way to train experts that can be used in part (2605.06663, github.com/allenai/EMO), as a control.

All tokens of a document choose their experts from the same pool: in every layer, the experts with the highest sum of router
probabilities over the document. The size of the pool is drawn for every document and layer, from top-k to all experts. EMO balances the
load over the whole batch; here the selection biases of the network do.

Shape letters: N tokens, E experts, K chosen, M documents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stretto.model.parallel import Origin
from stretto.model.transformer import Context, Transformer
from stretto.ops.operators import MASKED, Operators


class DocumentPools(Operators):
    """The ordinary operators, but experts outside the pool of a token's document cannot be chosen."""

    def __init__(self, ids_BT: Tensor, ctx: Context, sizes: range) -> None:
        """The sizes of the pools are drawn from ``sizes``, the same for the same ``ids_BT``."""
        rows, length = ids_BT.shape
        documents_BT = torch.zeros_like(ids_BT) if ctx.documents_BT is None else ctx.documents_BT
        numbered_BT = documents_BT + torch.arange(rows, device=ids_BT.device)[:, None] * (length + 1)
        documents, self._document_N = numbered_BT.flatten().unique(return_inverse=True)
        self._num_documents, self._sizes = len(documents), sizes
        self._random = torch.Generator(ids_BT.device).manual_seed(int(ids_BT.sum()))
        self._allowed_NE = torch.empty(0)

    @torch.no_grad()
    def _pools(self, logits_NE: Tensor) -> Tensor:
        """Whether each token may choose each expert, bool [N, E]."""
        likely_ME = logits_NE.new_zeros(self._num_documents, logits_NE.shape[1])
        likely_ME.index_add_(0, self._document_N, logits_NE.softmax(-1))
        place_ME = likely_ME.argsort(descending=True).argsort()
        limits = self._sizes.start, self._sizes.stop, (self._num_documents, 1)
        return (place_ME < torch.randint(*limits, generator=self._random, device=logits_NE.device))[self._document_N]

    def router_logits(self, x_ND: Tensor, gate_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        logits_NE = super().router_logits(x_ND, gate_ED, bias_E)
        self._allowed_NE = self._pools(logits_NE)
        return logits_NE.masked_fill(~self._allowed_NE, MASKED)

    def highest(self, choice_NE: Tensor, top_k: int) -> Tensor:
        return super().highest(choice_NE.masked_fill(~self._allowed_NE, MASKED), top_k)


def trained_in_pools(origin: Origin) -> Origin:
    """The network ``origin``, whose passes with gradients use `DocumentPools`."""

    def restrict(model: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.is_grad_enabled():
            return None
        ids_BT, subnet, ctx = arguments
        sizes = range(origin.config.top_k, origin.config.num_experts + 1)
        return ids_BT, subnet, replace(ctx, operators=DocumentPools(ids_BT, ctx, sizes))

    def place(*where: Any) -> Transformer:
        model = origin.place(*where)
        model.register_forward_pre_hook(restrict)
        return model

    return replace(origin, place=place)
