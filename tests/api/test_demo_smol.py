"""The demo with a chat model, on a tiny one in its place: every stage runs, an interrupted run goes on, and the report shows all."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from stretto.api import demo
from stretto.api.demo import CHAT_PROMPTS, Rendered, demo_smol_command
from stretto.base.errors import UserError
from stretto.data.demo_text import chat_questions, demo_documents
from stretto.model.checkpoint import write_checkpoint
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build
from stretto.text.chat import CHATML, tokenise_chat
from stretto.text.tokenizer import Tokenizer, train_tokenizer
from stretto.train.run_folder import read_samples

SMALL = ["train.steps=2", "train.eval_every=2", "train.eval_rows=2", "train.snapshot_every=1", "train.rows=2"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer((each.text for each in demo_documents(20_000, 2_000)), 400, CHATML)


def test_a_conversation_is_encoded_as_it_is_when_the_model_speaks(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "What is tea?"}, {"role": "assistant", "content": "A drink."}]
    text = "<|im_start|>user\nWhat is tea?<|im_end|>\n<|im_start|>assistant\nA drink.<|im_end|>\n"
    (ids,) = Rendered(tokenizer).encode_batch([text])
    assert ids == list(tokenise_chat(tokenizer, messages).tokens)
    assert tokenizer.encode(text) != ids  # as a document's text those spellings are no tokens


def test_nothing_that_is_asked_in_the_end_was_learnt() -> None:
    assert len(CHAT_PROMPTS) == 10 and not set(CHAT_PROMPTS) & set(chat_questions())


@pytest.mark.slow
def test_every_stage_runs_once(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = ModelConfig(
        vocab_size=400,
        hidden_size=64,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        num_experts=1,
        top_k=1,
        expert_intermediate_size=128,
        dense_layers=tuple(range(6)),
        dense_intermediate_size=128,
        selection_bias=False,
        max_positions=512,
    )
    tokenizer.save(tmp_path / "tokenizer")
    write_checkpoint(tmp_path / "tiny", build(dense, 0), dense, family="llama", tokenizer_dir=tmp_path / "tokenizer")
    monkeypatch.setattr(demo, "SMOL_MODEL", str(tmp_path / "tiny"))
    monkeypatch.setattr(demo, "ANSWER_TOKENS", 8)
    monkeypatch.setattr(demo, "SMOL_ELASTICIZE", [*SMALL, "train.seq_len=64", "train.micro_batches=2"])
    monkeypatch.setattr(demo, "SMOL_HEAL", [*SMALL, "train.seq_len=64", "train.micro_batches=1"])
    run = tmp_path / "run"
    demo_smol_command(run)
    samples = read_samples(run)
    assert [sample.prompt for sample in samples] == list(CHAT_PROMPTS) * 4
    assert list(dict.fromkeys(sample.size for sample in samples)) == ["original", "full", "half", "best"]
    rows = [json.loads(line)["text"] for line in (run / "data" / "chat.jsonl").read_text().splitlines()]
    assert len(rows) == len(chat_questions()) and rows[0].count("<|im_end|>") == 2
    page = html.unescape((run / "report" / "report.html").read_text())
    assert all(page.count(prompt) >= 4 for prompt in CHAT_PROMPTS)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    (run / "samples.json").unlink()
    demo_smol_command(run)  # goes on: only the last stage is missing
    assert read_samples(run) == samples and before == {path: path.stat().st_mtime_ns for path in before}
    (tmp_path / "other" / "thing").mkdir(parents=True)
    with pytest.raises(UserError, match="other: not a folder of this demo; choose another with --out"):
        demo_smol_command(tmp_path / "other")
