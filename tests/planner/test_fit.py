"""Choice of the optimiser's states by memory: the most precise that fits, and what would fit where none does."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.base.errors import UserError
from stretto.model.counts import count
from stretto.model.spec import ModelConfig
from stretto.planner.fit import SETTINGS, fitted, peak
from stretto.train.recipe import ElasticizeRecipe, HealRecipe

OLMOE = ModelConfig(
    vocab_size=50304, hidden_size=2048, num_layers=16, num_heads=16, num_kv_heads=16, head_dim=128, num_experts=64, top_k=8,
    expert_intermediate_size=1024, qk_norm_wide=True, router="softmax", selection_bias=False, normalize_gates=False,
)  # fmt: skip
QWEN = ModelConfig(
    vocab_size=151936, hidden_size=2048, num_layers=24, num_heads=16, num_kv_heads=16, head_dim=128, num_experts=60, top_k=4,
    expert_intermediate_size=1408, num_shared_experts=4, attention_bias=True, router="softmax", selection_bias=False,
    normalize_gates=False, max_positions=8192,
)  # fmt: skip
H100 = 75.2e9  # 80 GB without what context and fragmentation take


def recipe(**changes: Any) -> ElasticizeRecipe:
    train = {"steps": 10, "rows": 4, "seq_len": 1024, "memory": "auto", **changes.pop("train", {})}
    return ElasticizeRecipe.model_validate(
        {"optim": {"lr": 1e-4}, "train": train, "teacher_dtype": "bfloat16", **changes}
    )


def test_7b_and_14b_networks_fit_on_80_gb() -> None:
    """The rows of the table in docs/ADOPT.md: weights, gradients and moments of 6.9 and 14.3 billion parameters."""
    assert count(OLMOE, OLMOE.full()).total_params == pytest.approx(6.92e9, rel=0.01)
    assert count(QWEN, QWEN.full()).total_params == pytest.approx(14.3e9, rel=0.01)
    olmoe, line = fitted(recipe(), OLMOE, H100, on_gpu=True)
    assert (olmoe.optim.moments, olmoe.optim.master) == ("int8", "split") and peak(
        olmoe, OLMOE, on_gpu=True
    ).total < H100
    assert "int8 moments, split weights" in line and "would need" in line
    qwen, _ = fitted(recipe(cached_logits=64, train={"recompute": True}), QWEN, H100, on_gpu=True)
    assert (qwen.optim.master, qwen.optim.in_backward) == ("bf16_stochastic", True)


def test_the_first_that_fits_is_taken() -> None:
    own = recipe(train={"micro_batches": 1})
    peaks = []
    for moments, master, in_backward in SETTINGS:
        optim = own.optim.replace(moments=moments, master=master, in_backward=in_backward)
        peaks.append(peak(own.replace(optim=optim), OLMOE, on_gpu=True).total)
    assert peaks[0] == max(peaks) and peaks[-1] == min(peaks)
    for place, needed in enumerate(peaks):
        found, _ = fitted(own, OLMOE, needed, on_gpu=True)
        first = next(setting for setting, size in zip(SETTINGS, peaks, strict=True) if size <= needed)
        assert (found.optim.moments, found.optim.master, found.optim.in_backward) == first, place


def test_gradients_of_several_micro_batches_cannot_be_freed_early() -> None:
    found, _ = fitted(recipe(train={"rows": 8, "micro_batches": 4, "recompute": True}), OLMOE, 1e12, on_gpu=True)
    assert not found.optim.in_backward
    with pytest.raises(UserError, match="bf16 weights need"):
        fitted(recipe(train={"rows": 8, "micro_batches": 4}, cached_logits=64), QWEN, H100, on_gpu=True)
    with pytest.raises(ValueError, match="in_backward"):
        recipe(optim={"lr": 1e-4, "in_backward": True}, train={"micro_batches": 2})


def test_where_none_fits_one_line_says_what_would() -> None:
    with pytest.raises(UserError, match=r"need .* of 22.*; with other rows or teacher at least") as raised:
        fitted(recipe(), OLMOE, 24e9, on_gpu=True)
    assert len(str(raised.value).splitlines()) == 1
    with pytest.raises(UserError, match=r"these fit: .*cached_logits = 64 with"):
        fitted(recipe(), QWEN, H100, on_gpu=True)
    with pytest.raises(UserError, match="fp32 moments"):  # products in fp32 cannot read bf16 weights
        fitted(recipe(train={"dtype": "float32"}), OLMOE, 50e9, on_gpu=True)


def test_other_stages_refuse_the_setting() -> None:
    given = {"optim": {"lr": 1e-4}, "train": {"steps": 1, "rows": 1, "seq_len": 8, "memory": "auto"}}
    with pytest.raises(ValueError, match=r"train\.memory"):
        HealRecipe.model_validate(given)
