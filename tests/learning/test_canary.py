"""The canary: right weights pass, however an engine rounds, and planted wrong updates do not. In fp32 and in bf16."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.base.trajectory import WeightVersion, canary_tokens
from stretto.flow.rollout import EngineRole
from stretto.learning.canary import disagreement, score_canary
from stretto.learning.recipe import RlRecipe
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Transformer
from tests.engine.engines import engine, network
from tests.flow.policies import recipe

SHAPE: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "qk_norm": True,
    "max_positions": 160, "selection_bias": False,
}  # fmt: skip
DENSE = ModelConfig(
    **SHAPE, num_experts=1, top_k=1, expert_intermediate_size=1, dense_layers=(0, 1, 2, 3), dense_intermediate_size=128
)
MIXTURE = ModelConfig(**SHAPE, num_experts=8, top_k=2, expert_intermediate_size=32)
State = Mapping[str, Tensor]
Engine = Callable[[State], list[float]]
"""An engine's scores of the canary with some weights."""


def recipe_of(precision: str) -> RlRecipe:
    at = {"engine": "vllm", "address": "http://127.0.0.1:9"}
    train = {"steps": 6, "prompts": 4, "seq_len": 130, "micro_rows": 2}
    plan = recipe(rollout={"group": 4, "max_tokens": 18, **at}, train=train, precision={"rollout": precision})
    return plan.on("fp32")


def version_of(number: int, model: Transformer, precision: str) -> WeightVersion:
    canary, tolerance = score_canary(model, recipe_of(precision), torch.device("cpu"))
    return WeightVersion(number, "", f"{number}", 0, canary, tolerance)


def moved(state: State, step: float, seed: int) -> dict[str, Tensor]:
    """``state`` after a step of the size of one of Adam with the learning rate ``step``."""
    rng = torch.Generator().manual_seed(seed)
    return {name: each + step * (2.0 * torch.randint(2, each.shape, generator=rng) - 1) for name, each in state.items()}


def in_bf16(config: ModelConfig, state: State) -> list[float]:
    """An engine that has weights, activations and logits in bf16, as vLLM."""
    model = network(config=config)
    model.load_state_dict(state)
    model.bfloat16()
    ids_BT = torch.tensor([canary_tokens(config.vocab_size, 128)])
    with torch.no_grad():
        hidden_BTD = model(ids_BT[:, :-1], config.full(), Context.plain(ids_BT[:, :-1])).hidden_BTD
        logp_TV = (hidden_BTD[0] @ model.head_VD.T).float().log_softmax(-1)
    return logp_TV.gather(-1, ids_BT[0, 1:, None])[:, 0].tolist()


def in_fp32(config: ModelConfig, state: State) -> list[float]:
    """Our engine's compiled kernels."""
    model = network(config=config)
    model.load_state_dict(state)
    role = EngineRole(partial(engine, model), name="canary")
    try:
        return asyncio.run(role.score(canary_tokens(config.vocab_size, 128)))
    finally:
        role.close()


def exchanged(one: str, other: str, old: State, new: State) -> dict[str, Tensor]:
    return {**new, one: new[other], other: new[one]}


def forgotten(part: str, old: State, new: State) -> dict[str, Tensor]:
    """``new``, in which the tensors whose name begins with ``part`` are still the old ones."""
    assert any(name.startswith(part) for name in new), part
    return {name: old[name] if name.startswith(part) else each for name, each in new.items()}


def expert_forgotten(old: State, new: State) -> dict[str, Tensor]:
    name = next(name for name in new if name.startswith("blocks.1.") and name.endswith("gate_up"))
    return {**new, name: torch.cat([new[name][:3], old[name][3:4], new[name][4:]])}


def experts_exchanged(old: State, new: State) -> dict[str, Tensor]:
    name = next(name for name in new if name.startswith("blocks.1.") and name.endswith("down"))
    return {**new, name: new[name].roll(1, 0)}


OUT, NORM = "blocks.{}.attention.out.weight", "blocks.{}.attention_norm.weight"
GROSS = {
    "the version before": lambda old, new: old,
    "two matrices exchanged": partial(exchanged, OUT.format(1), OUT.format(2)),
    "a matrix of zeros": lambda old, new: {**new, OUT.format(1): torch.zeros_like(new[OUT.format(1)])},
}
"""Plants that are caught in bf16 too, however small the step."""
SUBTLE = {
    "one layer not updated": partial(forgotten, "blocks.1."),
    "one matrix not updated": partial(forgotten, OUT.format(1)),
    "one norm not updated": partial(forgotten, NORM.format(1)),
    "the head not updated": partial(forgotten, "head."),
    "two norms exchanged": partial(exchanged, NORM.format(1), NORM.format(2)),
}
OF_EXPERTS = {"one expert not updated": expert_forgotten, "experts exchanged": experts_exchanged}


def check(config: ModelConfig, precision: str, step: float, plants: Mapping[str, Any], num_right: int = 4) -> set[str]:
    """The names of ``plants`` that are caught. Right updates must pass."""
    scores = partial(in_fp32 if precision == "fp32" else in_bf16, config)
    model = network(config=config)
    state = copy.deepcopy(model.state_dict())
    caught, old, before = set(), version_of(0, model, precision), scores(state)
    assert disagreement(before, old, old.tolerance, None, []) == ""
    for seed in range(num_right):
        now = moved(state, step, seed)
        model.load_state_dict(now)
        new = version_of(1, model, precision)
        assert all(torch.equal(each, now[name]) for name, each in model.state_dict().items()), (
            "scoring changes no weight"
        )
        assert disagreement(scores(now), new, new.tolerance, old, before) == "", seed
    for name, plant in plants.items():
        if disagreement(scores(plant(state, now)), new, new.tolerance, old, before):
            caught.add(name)
    return caught


@pytest.mark.parametrize(
    ("config", "step"),
    [(DENSE, 1e-3), (DENSE, 1e-5), (MIXTURE, 1e-3), (MIXTURE, 1e-4)],
    ids=["dense", "dense, a small step", "experts", "experts, a small step"],
)
def test_in_fp32_the_smallest_part_of_a_step_is_missed(config: ModelConfig, step: float) -> None:
    plants = GROSS | SUBTLE | (OF_EXPERTS if config is MIXTURE else {})
    assert check(config, "fp32", step, plants) == set(plants)


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("step", [1e-2, 1e-4, 1e-6])
def test_in_bf16_an_update_that_was_not_loaded_is_caught_however_small(config: ModelConfig, step: float) -> None:
    assert check(config, "bf16", step, GROSS, num_right=8) == set(GROSS)


def test_in_bf16_a_part_is_missed_if_it_changes_the_scores_by_more_than_rounding() -> None:
    """Norms, which are near 1, change by no more than a unit of bf16."""
    assert check(DENSE, "bf16", 1e-2, SUBTLE) == {name for name in SUBTLE if "norm" not in name}
    assert check(DENSE, "bf16", 1e-5, SUBTLE) == set()


def test_the_tolerance_follows_the_precision_and_the_recipe_may_set_it() -> None:
    model = network(config=DENSE)
    fp32, bf16 = (version_of(0, model, precision) for precision in ("fp32", "bf16"))
    assert 4e-6 <= fp32.tolerance < bf16.tolerance / 1000
    shifted = [each + 2 * fp32.tolerance for each in fp32.canary]
    assert "more than" in disagreement(shifted, fp32, fp32.tolerance, None, [])
    assert disagreement(shifted, fp32, 3 * fp32.tolerance, None, []) == ""
    assert "nan" in disagreement([float("nan"), *shifted[1:]], fp32, 1.0, None, [])


def test_equal_weights_may_give_equal_scores() -> None:
    """As at a learning rate of 0."""
    version = version_of(0, network(config=DENSE), "bf16")
    assert (
        disagreement(version.canary, replace(version, number=1), version.tolerance, version, list(version.canary)) == ""
    )
