from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stretto.base.errors import UserError
from stretto.ops import tuning
from stretto.ops.matmul import default_precision
from stretto.ops.tuning import ROUGH_WIDTH, deterministic, rough_products, trains_in_bf16


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


@pytest.mark.parametrize(
    ("device", "has_units", "precision"), [("cpu", True, "fp32"), ("cuda:1", True, "bf16"), ("cuda:1", False, "fp32")]
)
def test_training_is_in_bf16_on_a_gpu_that_multiplies_in_it(monkeypatch, device, has_units, precision):
    """Every pre-training and every RL run asks this; a CPU's units may be slower than fp32."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_units)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_units or including_emulation)
    assert trains_in_bf16(torch.device(device)) == (precision == "bf16")
    assert default_precision(device) == precision


def test_an_operation_without_a_kernel_that_adds_in_one_order_is_named():
    pooled, places = F.max_pool1d(torch.ones(1, 1, 4), 2, return_indices=True)
    F.max_unpool1d(pooled, places, 2)
    with (
        pytest.raises(UserError, match=r"^train\.deterministic: max_unpool\S* does not .* Set it to false\.$"),
        deterministic(),
    ):
        assert torch.are_deterministic_algorithms_enabled()
        F.max_unpool1d(pooled, places, 2)
    assert not torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(RuntimeError, match="another"), deterministic():
        raise RuntimeError("another mistake")
    with deterministic(wanted=False):
        assert not torch.are_deterministic_algorithms_enabled()
