"""A judge on a tiny random network: it has learnt what such a network can tell of such books."""

from __future__ import annotations

from pathlib import Path

from stretto.evals.ranker import JudgeRecord, Reader, features, open_reader, save_judge, train_head
from stretto.model.checkpoint import write_checkpoint
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build
from stretto.text.passages import Passage, damaged, passages
from stretto.text.tokenizer import train_tokenizer
from tests.text.books import books


def network(folder: Path, max_positions: int = 512) -> Path:
    """A checkpoint."""
    tokenizer = train_tokenizer((text for _, text in books(8)), 400)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16,
        num_experts=4, top_k=2, expert_intermediate_size=16, max_positions=max_positions, tie_embeddings=True,
    )  # fmt: skip
    tokenizer.save(folder / "tokenizer")
    write_checkpoint(folder / "checkpoint", build(config, seed=0), config, tokenizer_dir=folder / "tokenizer")
    return folder / "checkpoint"


def judge(folder: Path, out: Path, num: int = 12) -> tuple[JudgeRecord, Reader, list[Passage]]:
    """Trained on passages of `books`, and written to ``out``."""
    reader, found = open_reader(folder), passages(books(), "reward", num)
    read_KNSF = features(reader, found, damaged(found, "reward"))
    return (
        save_judge(out, reader, train_head(read_KNSF[0], read_KNSF[1:]), "reward", 0, found, read_KNSF[0]),
        reader,
        found,
    )
