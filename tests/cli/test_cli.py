"""The process that a command runs in."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stretto import __version__
from stretto.base import paths
from stretto.cli.main import _resumes
from tests.api.conftest import Run, refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pretrain", "r.toml", "--data", "a", "b", "-o", "x"), ("stretto: pretrain: got", "(b)", "--data a --data b")),
        (("pretrain", "r.toml", "--data=a", "b"), ("(b)", "--data a --data b")),
        (("pretrain", "r.toml", "--data", "a", "--set", "a=1", "b=2"), ("(b=2)", "--set a=1 --set b=2")),
        (("elasticize", "run", "--data", "a", "b", "c"), ("(b c)", "--data a --data b")),
        (("tokenize", "-o", "x", "--data", "a", "b"), ("(b)", "--data a --data b")),
        (("search", "run", "--data", "a", "b"), ("(b)", "--data a --data b")),
        (("heal", "src", "-o", "x", "--data", "a", "b"), ("(b)", "--data a --data b")),
        (("adopt", "src", "-o", "x", "--calibration", "a", "b"), ("(b)", "--calibration a --calibration b")),
        (("report", "run", "--control", "a", "b"), ("(b)", "--control a --control b")),
        (("serve", "run", "--api-key", "a", "b"), ("(b)", "--api-key a --api-key b")),
        (("adopt", "src", "-o", "x", "y"), ("(y)", "see `stretto adopt --help`")),
        (("adopt", "src"), ("missing option '-o' / '--out'", "see `stretto adopt --help`")),
        (("extract",), ("stretto: extract: missing argument", "see `stretto extract --help`")),
        (("pretrain", "r.toml", "--steps", "many"), ("invalid value for '--steps'", "integer")),
        (("pretrain", "r.toml", "--dta", "a"), ("no such option: --dta", "--data")),
        (
            ("sft", "r.toml", "-o", "x", "--lora"),
            ("stretto: sft: option '--lora' requires an argument; see `stretto sft --help`",),
        ),
        (("pretrian",), ("pretrian", "see `stretto --help`")),
    ],
)
def test_wrong_arguments_are_one_line_with_the_remedy(
    stretto: Run, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(stretto(*arguments), *words)


def test_no_arguments_are_a_question(stretto: Run) -> None:
    asked = stretto()
    assert asked.code == 2 and "elasticize" in asked.out + asked.err and "stretto: " not in asked.err


def test_a_name_does_not_break_the_line_that_tells_it(stretto: Run) -> None:
    refused(stretto("cost", "a\nb\x1b[2J\r"), r"a\nb\x1b[2J\r: config.json: no such file")


def test_the_version_is_printed(stretto: Run) -> None:
    done = stretto("--version")
    assert (done.code, done.out) == (0, f"stretto {__version__}\n")


@pytest.mark.slow
def test_output_that_cannot_be_written_is_one_line() -> None:
    for arguments in (["--version"], ["plan", "demo", "--gpus", "2xcpu"]):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "stretto", *arguments]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space left" in done.stderr, done


def test_only_commands_that_resume_say_so_when_interrupted() -> None:
    assert _resumes(["pretrain", "small", "--data", "generate"]) and _resumes(["rl", "x"])
    assert not any(_resumes([name, "run"]) for name in ("generate", "top", "chat")) and not _resumes([])


@pytest.mark.parametrize(
    "command",
    [
        ("adopt", "--order", "none"),
        ("extract", "--subnet", "half"),
        ("quantise", "--group", "8"),
        ("export",),
        ("export", "--gguf"),
        ("merge", "average"),
    ],
)
def test_sigterm_leaves_no_unfinished_checkpoint(
    stretto: Run, served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def put(temporary: Path, path: Path) -> None:
        assert temporary.exists() and temporary.is_relative_to(tmp_path), path
        signal.raise_signal(signal.SIGTERM)

    def unexpected(number: int, _: object) -> None:
        raise AssertionError("the command has no handler")

    monkeypatch.setattr(paths, "_put", put)
    before = signal.signal(signal.SIGTERM, unexpected)
    models = [served_run / "checkpoint"] * (2 if command[0] == "merge" else 1)
    try:
        done = stretto(*command, *models, "-o", tmp_path / "out.gguf")
        assert signal.getsignal(signal.SIGTERM) is unexpected
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (done.code, done.err) == (143, "") and list(tmp_path.iterdir()) == []
