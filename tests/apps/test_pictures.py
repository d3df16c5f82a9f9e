"""`stretto enhance` and `stretto paint` as users call them, on a random network and the exact renderer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.model.checkpoint import write_checkpoint
from stretto.pictures.enhance import FIELDS
from stretto.tasks.shapes.ledger import read, unkept
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer
from tests.apps.conftest import HEALING, PRESETS, RECIPE, SERVED, refused
from tests.apps.conftest import Run as Command
from tests.engine.engines import network


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_NATIVE", "0")


@pytest.fixture(scope="module")
def roomy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `served_run`, with room for the instruction."""
    folder, config = tmp_path_factory.mktemp("runs") / "roomy", SERVED.replace(max_positions=4096)
    tokenizer = train_tokenizer(iter([RECIPE + HEALING]), config.vocab_size, chat_template=CHATML)
    tokenizer.save(folder / "tokenizer")
    write_checkpoint(
        folder / "checkpoint", network(3, config), config, tokenizer_dir=folder / "tokenizer", presets=PRESETS
    )
    (folder / "run.json").write_text("{}")
    return folder


def test_a_random_network_keeps_everything_and_writes_six_fields(stretto: Command, roomy_run: Path) -> None:
    request = "two red cubes left of a blue sphere"
    done = stretto("enhance", request, "--model", roomy_run, "--subnet", "corner", "--size", "512x256", "--json")
    assert done.code == 0, done
    told = json.loads(done.out)
    assert list(told["fields"]) == list(FIELDS) and all(told["fields"].values())
    assert unkept(read(request), told["prompt"]) == ()
    # the subject a random network writes is rubbish, but the grammar gave every other field a word of its aspect
    assert any(note.startswith("subject: put back") for note in told["notes"])
    assert not any("nothing that can be read" in note for note in told["notes"]) and "corner" in told["subnet"]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("", "--model", "x"), ("prompt", "empty")),
        (("a red blue cube", "--model", "x"), ("prompt", "red or blue")),
        (("Ein Haus und das Auto mit der Frau", "--model", "x"), ("prompt", "English")),
        (("a cat",), ("--model", "--server")),
        (("a cat", "--model", "x", "--size", "big"), ("--size", "1024x1024")),
        (("a cat", "--server", "http://127.0.0.1:9"), ("--server", "nobody answers")),
    ],
)
def test_bad_input(stretto: Command, told: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(stretto("enhance", *told), *words)
