"""EVIDENCE.md: complete sections, commands that exist, README's figures among them, and small versions of the studies that run."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

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
        *("--tokens", "1e4", "--eval-rows", "16", "--seeds", "0", "1", "--rates", "4", "--set", "model.num_layers=4"),
        *("--set", "elastic.min_depth=3", "--set", "elastic.anchors.corner.layers=3"),
        *("--set", "model.num_experts=12", "--set", "model.top_k=3"),
    ),
    "replay": (
        *("--sizes", "small", "--seeds", "0", "1", "--set", "train.steps=4", "--set", "start.steps=4"),
        *("--set", "train.prompts=2"),
    ),
    "distillation": (
        *("--regimes", "judge", "--seeds", "0", "1", "--problems", "8", "--set", "common.train.steps=2"),
        *("--set", "experts.recipe.train.steps=2", "--set", "distill.train.steps=2"),
        *("--set", "sft.recipe.start.steps=30", "--set", "distill.distill.kl_floor=0"),
        *("--set", "sft.recipe.start.model.num_layers=2"),
    ),
    "async_speed": ("--staleness", "0", "1", "--seeds", "0", "1", "--steps", "3", "--rates", "1e-3", "--set", "start.steps=4"),
}  # fmt: skip
"""Arguments of a version of each study that takes about a minute."""


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
@pytest.mark.parametrize("name", SMALL)
def test_a_small_version_of_a_study_runs_and_its_record_prints_the_same(name: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", f"bench.{name}"]
    done = subprocess.run(
        [*command, str(tmp_path / "out"), *SMALL[name], "--record", str(record)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert ": failed:" not in done.stdout + done.stderr and "run the command again" not in done.stdout
    more = ["--report"] if name == "study" else []
    again = subprocess.run([*command, str(record), *more], cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == done.returncode
    assert again.stdout and again.stdout in done.stdout
