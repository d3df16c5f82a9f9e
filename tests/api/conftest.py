"""A tiny text, a tiny recipe, and the command line called as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from stretto.api.rl import rl
from stretto.cli.main import main
from stretto.model.checkpoint import write_checkpoint
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.report import rl as report
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer
from tests.api.rl_recipes import TINY
from tests.engine.engines import network

SERVED = ModelConfig(
    vocab_size=320, hidden_size=32, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=8, top_k=2,
    expert_intermediate_size=16, max_positions=256, widths=(8, 4, 2), tie_embeddings=True,
)  # fmt: skip
PRESETS = {
    "half": SubnetChoice(layers=3, experts=4, top_k=2),
    "corner": SubnetChoice(layers=2, experts=2, top_k=1),
}

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


def refused(result: Result, *words: str, code: int = 2) -> None:
    """Exit code ``code`` and one line on stderr that holds all of ``words``."""
    assert result.code == code, result
    lines = result.err.strip().splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("stretto: "), lines[0]
    for word in words:
        assert word in lines[0], f"{word!r} not in {lines[0]!r}"


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


@pytest.fixture(scope="session")
def served_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoint has presets, a tokenizer and a chat template; its network is random. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    tokenizer = train_tokenizer(iter([RECIPE + HEALING]), SERVED.vocab_size, chat_template=CHATML)
    tokenizer.save(folder / "tokenizer")
    write_checkpoint(
        folder / "checkpoint", network(3, SERVED), SERVED, tokenizer_dir=folder / "tokenizer", presets=PRESETS
    )
    (folder / "run.json").write_text("{}")
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``stretto rl`` that made its own start, by relative paths, without its pictures. Not to be changed."""
    folder = tmp_path_factory.mktemp("rl")
    (folder / "tiny.toml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(report, "report_rl_run", lambda run: run)  # drawing would take most of the time
        result = rl("tiny.toml", out="run", device="cpu").result
    assert result.checkpoint == Path("run/checkpoint")
    return folder / "run"
