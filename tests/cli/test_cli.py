"""The process that a command runs in."""

from __future__ import annotations

import pytest

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
