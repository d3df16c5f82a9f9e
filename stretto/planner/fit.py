"""Choice of the optimiser's states by the memory of the device: the most precise setting that fits. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from stretto.base.errors import UserError
from stretto.base.numbers import size_in_bytes
from stretto.model.counts import count
from stretto.model.spec import ModelConfig
from stretto.optim.schedule import Master, Moments, OptimConfig
from stretto.planner.hardware import Dtype
from stretto.planner.memory import BYTES, Layout, Memory, training_memory
from stretto.train.recipe import ElasticizeRecipe, Recipe

SETTINGS: tuple[tuple[Moments, Master, bool], ...] = (
    ("fp32", "fp32", False),
    ("bf16", "split", False),
    ("int8", "split", False),
    ("int8", "split", True),
    ("int8", "bf16_stochastic", False),
    ("int8", "bf16_stochastic", True),
)
"""Moments, master and in_backward; 16, 10, 8, 6, 6 and 4 bytes per parameter with gradients. Exact weights come before rounded ones."""
Trained = TypeVar("Trained", Recipe, ElasticizeRecipe)


def computes_in(recipe: Recipe | ElasticizeRecipe, *, on_gpu: bool) -> Dtype:
    """Data type of the products."""
    chooses_bf16 = recipe.train.dtype == "auto" and (on_gpu or recipe.optim.master != "fp32")
    return "bfloat16" if chooses_bf16 or recipe.train.dtype == "bfloat16" else "float32"


def peak(recipe: Recipe | ElasticizeRecipe, config: ModelConfig, *, on_gpu: bool) -> Memory:
    """Peak of training ``config`` on one rank, with the teacher of elasticizing."""
    train, optim, elastic, dtype = recipe.train, recipe.optim, recipe.elastic, computes_in(recipe, on_gpu=on_gpu)
    layout = Layout(1, 1, train.micro_rows, train.micro_batches, train.recompute)
    if isinstance(recipe, ElasticizeRecipe):
        taught, repeats = recipe.cached_logits is None, False
    else:
        taught = elastic.sampler != "off" and bool(elastic.anchors) and recipe.elastic.anchor_ce_weight < 1
        repeats = elastic.sampler != "off" and recipe.elastic.joint
    shape = config, layout, train.seq_len, dtype
    memory = training_memory(*shape, optim, taught=taught, repeats=repeats, on_gpu=on_gpu, rounds=not on_gpu)
    if isinstance(recipe, ElasticizeRecipe) and recipe.cached_logits is None:
        memory = replace(memory, teacher=BYTES[recipe.teacher_dtype] * count(config, config.full()).total_params)
    if train.snapshot_writes == "background" and not on_gpu:
        memory = replace(memory, snapshot=memory.weights + memory.optimiser)
    return memory


def fitted(recipe: Trained, config: ModelConfig, available: float, *, on_gpu: bool) -> tuple[Trained, str]:
    """``recipe`` with the first of `SETTINGS` that fits into ``available`` bytes, and a line that says which and why.

    Raises:
        UserError: none fits; the line names changes that would.
    """
    tried = list(_candidates(recipe))
    peaks = [peak(each, config, on_gpu=on_gpu).total for each in tried]
    found = next((place for place, needed in enumerate(peaks) if needed <= available), None)
    if found is None:
        raise UserError(_what_would_fit(tried[-1], config, available, on_gpu))
    line = f"memory: {words(tried[found].optim)}, {size_in_bytes(peaks[found])} of {size_in_bytes(available)}"
    if found:
        line += f"; {words(tried[found - 1].optim)} would need {size_in_bytes(peaks[found - 1])}"
    return tried[found], line


def _candidates(recipe: Trained) -> Iterator[Trained]:
    for moments, master, in_backward in SETTINGS if recipe.optim.name == "adamw" else SETTINGS[:1]:
        is_possible = not in_backward or recipe.train.micro_batches == 1
        if is_possible and not (master != "fp32" and recipe.train.dtype == "float32"):
            changed = recipe.optim.replace(moments=moments, master=master, in_backward=in_backward)
            yield recipe.replace(optim=changed)


def _what_would_fit(recipe: Recipe | ElasticizeRecipe, config: ModelConfig, available: float, on_gpu: bool) -> str:
    """Error of a device that is too small for ``recipe``, the smallest setting: single changes that fit, or how far the last one is off."""
    train = recipe.train
    changes = [("train.recompute = true", recipe.replace(train=train.replace(recompute=True)))]
    if train.micro_rows > 1:
        small = train.replace(micro_batches=train.rows, recompute=True)
        optim = recipe.optim.replace(in_backward=False)
        name = f"train.micro_batches = {train.rows} with train.recompute"
        changes.append((name, recipe.replace(train=small, optim=optim)))
    if isinstance(recipe, ElasticizeRecipe) and recipe.cached_logits is None:
        changes.append(("teacher_dtype = bfloat16", recipe.replace(teacher_dtype="bfloat16")))
        changes.append(("cached_logits = 64", recipe.replace(cached_logits=64)))
        changes.append(
            (
                "cached_logits = 64 with train.recompute",
                recipe.replace(cached_logits=64, train=train.replace(recompute=True)),
            )
        )
    needed = [(name, peak(changed, config, on_gpu=on_gpu).total) for name, changed in changes]
    fitting = [f"{name} ({size_in_bytes(size)})" for name, size in needed if size <= available]
    own = size_in_bytes(peak(recipe, config, on_gpu=on_gpu).total)
    least = min(size for _, size in needed)
    remedy = (
        f"these fit: {', '.join(fitting)}" if fitting else f"with other rows or teacher at least {size_in_bytes(least)}"
    )
    return f"train.memory: {words(recipe.optim)} need {own} of {size_in_bytes(available)}; {remedy}"


def words(optim: OptimConfig) -> str:
    """``int8 moments, split weights, updates in the backward pass``."""
    weights = {"fp32": "fp32", "split": "split", "bf16_stochastic": "stochastically rounded bf16"}[optim.master]
    return f"{optim.moments} moments, {weights} weights" + (
        ", updates in the backward pass" if optim.in_backward else ""
    )
