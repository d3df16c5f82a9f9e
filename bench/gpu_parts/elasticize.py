"""Steps of elasticizing under the memory of one 80 GB card: OLMoE's shape with its teacher in bf16, Qwen1.5-MoE's with cached logits.

The optimiser's states are those that ``train.memory = 80`` chooses; blocks are recomputed. With ``--size tiny`` or ``small``, that size stands
in for both, with the setting that Qwen's shape needs. A step trains the largest Subnet, which takes the most memory and time. A case draws
billions of weights first. ``--memory-gb 80`` makes a larger card as small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from bench.common.gpu_part import SHAPES, Case, Outcome, Rate, Setting, batch_of, network, random_ids, step_rate
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig
from stretto.ops.logprob import top_log_probs
from stretto.optim.build import build_optimizers
from stretto.planner.fit import SETTINGS, fitted, peak, words
from stretto.train.recipe import ElasticizeRecipe
from stretto.train.step import Distil, Recorded, optimisation_step

CARD_GB, USABLE = 80, 0.94
KEPT = 64
"""Cached log-probabilities of a token."""
_SMALL = ("tiny", "small")


def cases(setting: Setting) -> Iterator[Case]:
    for name, is_cached in (("olmoe", False), ("qwen-moe", True)):
        size = setting.size if setting.size in _SMALL else name
        own, teacher = replace(setting, size=size), "cached logits" if is_cached else "teacher in bf16"
        yield Case(f"{size}, {own.rows[0]} rows of {own.rows[1]}, {teacher}", partial(_elasticized, own, is_cached))


def recipe_of(config: ModelConfig, rows: int, length: int, is_cached: bool) -> ElasticizeRecipe:
    train = {"steps": 1, "rows": rows, "seq_len": length, "recompute": True, "dtype": "bfloat16", "memory": CARD_GB}
    tree = {"optim": {"lr": 1e-5}, "train": train, "teacher_dtype": "bfloat16"}
    recipe = ElasticizeRecipe.model_validate({**tree, "cached_logits": KEPT if is_cached else None})
    if config in (SHAPES[name] for name in _SMALL):  # every setting fits
        moments, master, in_backward = SETTINGS[-1]
        return recipe.replace(optim=recipe.optim.replace(moments=moments, master=master, in_backward=in_backward))
    return fitted(recipe, config, CARD_GB * 1e9 * USABLE, on_gpu=True)[0]


def _elasticized(setting: Setting, is_cached: bool) -> Outcome:
    config, on_gpu = setting.config, setting.device.type == "cuda"
    recipe = recipe_of(config, *setting.rows, is_cached)
    rate = step_rate(training_step(setting, recipe), setting)
    predicted = peak(recipe, config, on_gpu=on_gpu).total / 2**30
    values = {"states": words(recipe.optim), **rate.values, "predicted peak GiB": predicted}
    return Outcome(values, _fits(rate) if on_gpu else None)


def _fits(rate: Rate) -> bool:
    return rate.peak_gib * 2**30 <= CARD_GB * 1e9 * USABLE


def training_step(setting: Setting, recipe: ElasticizeRecipe) -> Callable[[], object]:
    """A step of ``recipe`` on new rows at each call; cached logits are those of the first rows of another network's head."""
    config, ranks = setting.config, join(setting.device.type)
    model = network(config, setting.device)
    optimizers = build_optimizers(recipe.optim, model)
    lesson: Distil | Recorded
    if recipe.cached_logits is None:
        teacher = network(config, setting.device, seed=1).to(torch.bfloat16).requires_grad_(False)
        lesson = Distil(teacher, config.full(), ce_weight=0.0)
    else:
        rows, length = setting.rows
        hidden_ND = torch.randn(rows * length, config.hidden_size, device=setting.device)
        lesson = Recorded(top_log_probs(hidden_ND, model.head_VD, recipe.cached_logits), config, ce_weight=0.0)
        torch.cuda.empty_cache()

    def step() -> object:
        batch = batch_of(random_ids(setting), config)
        batch = replace(batch, distil=lesson, ctx=replace(batch.ctx, recompute=recipe.train.recompute))
        return optimisation_step(
            model, optimizers, [batch], ranks, clip_norm=1.0, balance_rate=1e-4, dtype=torch.bfloat16
        )

    return step
