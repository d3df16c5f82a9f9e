"""A tiny text, a tiny recipe, and the command line called as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from stretto.apps.cli import main

RECIPE = """
[model]
vocab_size = 320
hidden_size = 32
num_layers = 5
num_heads = 2
num_kv_heads = 1
head_dim = 16
num_experts = 4
top_k = 2
expert_intermediate_size = 16
tie_embeddings = true
max_positions = 64

[elastic]
anchor_share = 0.3
width_share = 0.1
min_depth = 4

[elastic.anchors.corner]
layers = 4
experts = 2
top_k = 1

[optim]
lr = 1e-2
warmup_steps = 2

[train]
steps = 6
rows = 8
seq_len = 32
micro_batches = 4
eval_every = 3
eval_rows = 16
snapshot_every = 2
log_every = 2
"""

HEALING = """
[optim]
lr = 3e-3
decay_fraction = 1.0

[train]
steps = 3
rows = 8
seq_len = 32
micro_batches = 2
eval_every = 3
eval_rows = 16
snapshot_every = 3
log_every = 1
"""


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def stretto(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call ``stretto ARGUMENTS…`` in this process."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr("sys.argv", ["stretto", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def healing(tmp_path: Path) -> Path:
    path = tmp_path / "healing.toml"
    path.write_text(HEALING)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of a few hundred short documents."""
    path = tmp_path / "text" / "train.jsonl"
    path.parent.mkdir()
    lines = [f'{{"text": "line {n}: {n * n} is the square of {n}, and {n + 7} is {n} and seven."}}' for n in range(600)]
    path.write_text("\n".join(lines))
    return path.parent
