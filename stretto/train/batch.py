"""From the loader's numpy batches to what the model takes."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.data.loader import Batch
from stretto.model.transformer import Context, RowWidths
from stretto.train.sampler import WidthPlan


def tensors(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Context]:
    """Ids [B, T], targets [B, T] (int64, `IGNORED` where there is no loss) and the context of ``batch``."""
    ids, targets, documents, positions = (
        torch.from_numpy(array).to(device=device, dtype=torch.int64, non_blocking=True)
        for array in (batch.tokens_BT, batch.targets_BT, batch.documents_BT, batch.positions_BT)
    )
    return ids, targets, Context(positions, documents)


def row_widths(plan: WidthPlan | None, rows: slice, device: torch.device) -> RowWidths | None:
    """This rank's ``rows`` of a width plan."""
    if plan is None:
        return None
    return RowWidths(
        torch.from_numpy(plan.branch_B[rows]).to(device),
        torch.from_numpy(plan.allowed_BE[rows]).to(device),
        torch.from_numpy(plan.counted_B[rows]).to(device),
    )
