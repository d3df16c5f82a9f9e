"""The intervals of the bench of integer weights are over documents, whose tokens are not independent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import quantise
from bench.common.measure import half_width
from stretto.evals.loss import EvalBatch
from stretto.model.transformer import Context
from stretto.ops.logprob import IGNORED


def test_repeated_tokens_of_a_document_do_not_make_the_interval_narrower() -> None:
    means = torch.tensor([0.1, -0.2, 0.4, 0.3, 0.0])
    documents_N = torch.arange(5).repeat_interleave(100)
    half = quantise.half_over_documents(means.repeat_interleave(100), documents_N)
    assert half == pytest.approx(half_width(means.tolist()), rel=1e-6)


def test_a_document_counts_by_its_tokens() -> None:
    """Sums of the deviations from the mean over tokens, 0.25: -0.75, 0.75 and 0."""
    half = quantise.half_over_documents(torch.tensor([0.0, 0.0, 0.0, 1.0, 0.25]), torch.tensor([7, 7, 7, 9, 30]))
    assert half == pytest.approx(half_width([-0.75 * 3 / 5, 0.75 * 3 / 5, 0.0]), rel=1e-6)


def test_every_held_out_token_has_the_document_of_its_row() -> None:
    documents_BT = torch.tensor([[0, 0, 1, 1], [0, 0, 0, -1]])
    targets_BT = torch.tensor([[5, IGNORED, 6, 7], [8, 9, IGNORED, IGNORED]])
    ids_BT = torch.ones_like(targets_BT)
    ctx = replace(Context.plain(ids_BT), documents_BT=documents_BT)
    batch = EvalBatch(ids_BT=ids_BT, targets_BT=targets_BT, ctx=ctx)
    documents = quantise.documents_of([batch, batch]).tolist()
    first, second, third, *rest = documents
    assert len(documents) == 10 and second == third != first and rest[0] == rest[1]
    assert len(set(documents)) == 6, "rows and batches have documents of their own"
