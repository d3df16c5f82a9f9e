"""What ``--force`` replaces, and that a refusal comes before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.api import search, stages
from stretto.base.paths import CHECKPOINT
from tests.api.conftest import Run, refused


def test_a_checkpoint_with_a_latency_table_is_replaced(stretto: Run, served_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not stretto("export", served_run, "-o", out).code
    (out / "latency.json").write_text("{}")
    assert not stretto("export", served_run, "-o", out, "--force").code
    assert not (out / "latency.json").exists()


@pytest.mark.parametrize("command", ["extract", "heal", "quantise", "export", "merge"])
def test_a_folder_that_is_never_replaced_is_refused_before_the_work(
    stretto: Run,
    served_run: Path,
    healing: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    out, checkpoint = tmp_path / "out", served_run / CHECKPOINT
    out.mkdir()
    (out / "notes.txt").write_text("mine")

    def worked(*_: object, **__: object) -> None:
        raise AssertionError("the work had begun")

    for module, name in ((search, "load_checkpoint"), (search, "read_checkpoint"), (stages, "claim_run")):
        monkeypatch.setattr(module, name, worked)
    monkeypatch.setattr("stretto.api.post.merge_checkpoints", worked)
    arguments = {
        "extract": (checkpoint, "--subnet", "half"),
        "heal": (checkpoint, "--data", text, "--recipe", healing),
        "quantise": (checkpoint, "--group", 16),
        "export": (checkpoint,),
        "merge": ("average", checkpoint, checkpoint),
    }[command]
    refused(stretto(command, *arguments, "-o", out, "--force"), f"{out}: would be replaced, and holds notes.txt")
    assert (out / "notes.txt").read_text() == "mine"


def test_a_file_in_place_of_the_folder_is_refused_before_the_work(
    stretto: Run, served_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("mine")
    refused(
        stretto("extract", served_run / CHECKPOINT, "--subnet", "half", "-o", tmp_path / "out", "--force"),
        "out: is a file, not a folder",
    )
