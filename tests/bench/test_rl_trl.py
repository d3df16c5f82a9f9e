"""Agreement of `bench.rl_trl`: the gradient of our first step on samples that another trainer drew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stretto
from bench import rl_trl
from bench.rl_trl import our_gradient
from stretto.base.config import read_recipe
from stretto.flow.prompts import plan_prompts
from stretto.learning.algorithms import advantages
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import write_checkpoint
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build

RECIPE = """
[sources.words]
kind = "strings"
args = { operation = "reverse", length = 3 }

[rollout]
group = 2
max_tokens = 8
temperature = 0.7

[loss]
policy = "ppo"

[optim]
lr = 1e-3

[train]
steps = 1
prompts = 2
seq_len = 32
micro_rows = 4
"""
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=4, top_k=2,
    expert_intermediate_size=16,
)  # fmt: skip
PROMPTS = [[3, 4, 5], [3, 4, 5], [6, 7, 8, 9], [6, 7, 8, 9]]
COMPLETIONS = [[10, 11], [12, 13, 14], [15], [16, 17]]
REWARDS = [1.0, 0.0, 0.25, 0.75]


@pytest.mark.parametrize("name", ["rl_trl_long", "replay", "quantise"])
def test_the_start_of_a_recipe_can_be_trained(name: str) -> None:
    """One failed when its rows grew: the study had begun from a start that was there."""
    recipe = read_recipe(Path(rl_trl.__file__).with_name(f"{name}.toml"), RlRecipe)
    assert recipe.start is not None and recipe.start.model is not None
    assert recipe.train.seq_len <= recipe.start.model.max_positions


def test_our_gradient_is_that_of_the_policy_gradient_written_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "start", build(CONFIG, seed=0), CONFIG)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = read_recipe(tmp_path / "recipe.toml", RlRecipe)
    row = {"prompt_ids": PROMPTS, "completion_ids": COMPLETIONS, "rewards": REWARDS}
    ours = our_gradient(row, recipe, plan_prompts(recipe, {"words": 100}, {}), tmp_path / "start", tmp_path / "check")

    module = stretto.load(tmp_path / "start", device="cpu", dtype="float32").module
    given = [value for pair in (REWARDS[:2], REWARDS[2:]) for value in advantages(torch.tensor(pair).numpy(), "grpo")]
    loss = torch.zeros(())
    for prompt, completion, advantage in zip(PROMPTS, COMPLETIONS, given, strict=True):
        logits_TV = module.logits(torch.tensor([[*prompt, *completion]]), CONFIG.full())[0, len(prompt) - 1 : -1]
        chosen_T = (logits_TV / 0.7).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])
        loss = loss - float(advantage) * chosen_T.sum()
    (loss / sum(map(len, COMPLETIONS))).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    assert ours == pytest.approx(float(norm), rel=1e-4)
