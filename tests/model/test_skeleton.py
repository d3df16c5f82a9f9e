"""A skeleton is made in no time: without random numbers, and without torch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stretto.model.spec import ModelConfig
from stretto.model.transformer import skeleton

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, num_experts=4, top_k=2,
    expert_intermediate_size=8,
)  # fmt: skip
CODE = f"""
import sys
from stretto.model.spec import ModelConfig
from stretto.model.transformer import skeleton
skeleton(ModelConfig.model_validate_json('{CONFIG.model_dump_json()}'))
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_skeleton_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_skeleton_has_shapes_and_no_memory() -> None:
    tensors = skeleton(CONFIG).state_dict()
    assert tensors["embedding.weight"].shape == (64, 16) and all(each.is_meta for each in tensors.values())
