from __future__ import annotations

import pytest
import torch

from stretto.ops import tuning
from stretto.ops.tuning import ROUGH_WIDTH, rough_products


@pytest.mark.parametrize(
    ("width", "has_units", "dtype"),
    [
        (ROUGH_WIDTH, True, torch.bfloat16),
        (ROUGH_WIDTH - 1, True, torch.float32),
        (ROUGH_WIDTH, False, torch.float32),
    ],
)
def test_products_are_rough_where_that_is_faster(monkeypatch, width, has_units, dtype):
    monkeypatch.setattr(tuning, "multiplies_bf16", lambda device: has_units)
    x_NN = torch.ones(2, 2)
    with rough_products(torch.device("cpu"), width):
        assert (x_NN @ x_NN).dtype == dtype
    assert (x_NN @ x_NN).dtype == torch.float32
