"""The process that a command runs in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stretto.cli.main import wait_briefly
from tests.api.conftest import Run, refused


@pytest.mark.slow
def test_threads_wait_briefly_by_the_time_torch_is_loaded() -> None:
    """The library itself says how it was told to wait."""
    code = "import sys, stretto.cli.main as cli; assert 'torch' not in sys.modules; cli.wait_briefly(cli.os.environ); import torch"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment["OMP_DISPLAY_ENV"] = "verbose"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if "OPENMP DISPLAY ENVIRONMENT" not in done.stderr:
        pytest.skip("this build of torch has no OpenMP")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr or "KMP_BLOCKTIME='1" in done.stderr, done.stderr


@pytest.mark.parametrize("told", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}, {"KMP_BLOCKTIME": "200"}])
def test_how_a_user_wants_threads_to_wait_stands(told: dict[str, str]) -> None:
    environment = dict(told)
    wait_briefly(environment)
    assert environment == told


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
