"""EVIDENCE.md: complete sections, commands that exist, README's figures among them, and small versions of the studies that run."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import distillation, replay

ROOT = Path(__file__).parents[2]
EVIDENCE = (ROOT / "docs" / "EVIDENCE.md").read_text(encoding="utf-8")
SECTIONS = {
    re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): text
    for title, text in re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", EVIDENCE, re.MULTILINE | re.DOTALL)
}
"""Text of each section by its anchor."""
NUMBER = re.compile(r"\d*\.?\d+")

SMALL = {
    "study": (
        *("--tokens", "2500", "--eval-rows", "16", "--seeds", "0", "1", "--rates", "4", "--network", "0.5M"),
        *("--set", "model.num_layers=4", "--set", "model.num_experts=12", "--set", "model.top_k=3"),
        *("--set", "elastic.min_depth=3", "--set", "elastic.anchors.corner.layers=3", "--set", "train.seq_len=64"),
    ),
    "replay": (
        *("--sizes", "small", "--seeds", "0", "1", "--set", "train.steps=4", "--set", "start.steps=4"),
        *("--set", "train.prompts=2"),
    ),
    "distillation": (
        *("--regimes", "judge", "--seeds", "0", "1", "--problems", "8", "--set", "common.train.steps=2"),
        *("--set", "common.train.prompts=4", "--set", "experts.recipe.train.steps=2", "--set", "distill.train.steps=2"),
        *("--set", "sft.recipe.start.steps=30", "--set", "distill.distill.kl_floor=0"),
        *("--set", "sft.recipe.start.model.num_layers=2"),
    ),
    "async_speed": (
        *("--staleness", "0", "1", "--seeds", "0", "1", "--steps", "3", "--rates", "1e-3", "--set", "start.steps=4"),
        *("--set", 'sources.backward={kind = "strings", args = {operation = "reverse", length = 3}}'),
        *("--set", "start.model.num_layers=2", "--set", "start.model.hidden_size=32", "--set", "start.model.head_dim=8"),
        *("--set", "runtime.isolate=none"),
    ),
}  # fmt: skip
"""Arguments of a small version of each study."""


@pytest.fixture
def one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches with a single candidate, where no argument names the candidates."""
    monkeypatch.setattr(replay, "RATES", replay.RATES[:1])
    first = {arm: settings[:1] for arm, settings in distillation.CANDIDATES.items()}
    monkeypatch.setattr(distillation, "CANDIDATES", first)


def test_every_section_says_what_a_reader_needs() -> None:
    assert len(SECTIONS) >= 10
    for anchor, text in SECTIONS.items():
        for part in ("Claim.", "Figure.", "Controls.", "Command.", "Would be wrong if", "Objection."):
            assert f"**{part}" in text, f"{anchor}: no {part}"


def test_every_command_names_a_bench_that_exists_unless_it_is_marked_removed() -> None:
    commands = re.findall(r"`python -m (bench\.\w+)[^`]*`( \(removed\))?", EVIDENCE)
    assert len(commands) >= 10
    for module, removed in commands:
        exists = find_spec(module) is not None
        assert exists != bool(removed), f"{module}: {'exists' if exists else 'does not exist'}"


def test_the_readme_states_figures_of_the_section_that_it_links() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\[([^\]]+)\]\(docs/EVIDENCE\.md#([\w-]+)\)", readme)
    assert len(links) >= 6
    for text, anchor in links:
        for number in NUMBER.findall(text):
            assert number in SECTIONS[anchor], f"README: {number} of {text!r} is not in {anchor}"


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes on a machine that others use
@pytest.mark.usefixtures("one_candidate")
@pytest.mark.parametrize("name", SMALL)
def test_a_small_version_of_a_study_runs_and_its_record_prints_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs have processes of their own; what starts them and prints the tables is called in this one."""
    study, record = import_module(f"bench.{name}"), tmp_path / "record.json"

    def called(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        try:
            study.main()
        except SystemExit as stop:
            return int(stop.code or 0), "".join(capsys.readouterr())
        return 0, "".join(capsys.readouterr())

    code, printed = called(tmp_path / "out", *SMALL[name], "--record", record)
    assert code in (0, 1), printed
    assert ": failed:" not in printed and "run the command again" not in printed, printed
    more = ["--report"] if name == "study" else []
    again, shown = called(record, *more)
    assert again == code
    assert shown and shown in printed
