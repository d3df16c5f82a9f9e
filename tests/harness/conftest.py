"""A tiny random checkpoint with a chat template, and the reason that is told where inspect_ai is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.model.checkpoint import write_checkpoint
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.model.transformer import build
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("harness"), CHATML)


def written(folder: Path, template: str | None) -> Path:
    text = Path(__file__).read_text() + "The cat sat on the mat. {} [] true false null"
    tokenizer = train_tokenizer(iter([text]), 400, chat_template=template)
    tokenizer.save(folder / "tokenizer")
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=16,
        num_experts=8, top_k=2, expert_intermediate_size=16, max_positions=512, widths=(8, 4, 2),
        tie_embeddings=True,
    )  # fmt: skip
    presets = {"small": SubnetChoice(layers=3, experts=4, top_k=1)}
    write_checkpoint(folder / "net", build(config, seed=3), config, presets=presets, tokenizer_dir=folder / "tokenizer")
    return folder / "net"
