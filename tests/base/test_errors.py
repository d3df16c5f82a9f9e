"""Errors of Python functions name arguments in place of options of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from stretto.base.errors import UserError, user_errors_naming


@pytest.mark.parametrize("passed", [{}, {"limit": 3, "density": 0.5}])
@pytest.mark.parametrize(
    ("command_text", "text"),
    [
        ("--from online: no such stage", "first online: no such stage"),
        ("--from distill, --until sft: exchange them", "first distill, until sft: exchange them"),
        ("undo it, or repeat the stage with --from sft", "undo it, or repeat the stage with `first` sft"),
        ("problems (--limit): was 2; choose another folder with --out", "problems (limit): was 2; choose another folder with `out`"),
        ("--density: must be at most 1", "density: must be at most 1"),
        ("no adapters are trained; add --lora 16, or leave --out out", "no adapters are trained; add `lora` 16, or leave `out` out"),
        ("leave --out out, or give a --density above 0", "leave `out` out, or give a `density` above 0"),
        ("use --order none", "use `order` none"),
        ("run: holds a run already; add --resume to continue it", "run: holds a run already; add resume=True to continue it"),
        ("--resume: no such run", "resume=True: no such run"),
        ("skip it with --set train.skip_steps=[3]", "skip it with `settings` train.skip_steps=[3]"),
        ("no teachers; name them with --teacher NAME=DIR", "no teachers; name them with `teachers` NAME=DIR"),
        ("start `stretto serve --out x` with --unknown", "start `stretto serve --out x` with --unknown"),
    ],
)  # fmt: skip
def test_an_error_names_arguments_whatever_was_passed(passed: dict[str, Any], command_text: str, text: str) -> None:
    @user_errors_naming(further=("limit", "density", "order"), renamed={"from": "first"})
    def function(
        out: str,
        *,
        first: str = "",
        until: str = "",
        lora: int = 0,
        resume: bool = False,
        teachers: Any = (),
        settings: Any = (),
        **options: Any,
    ) -> None:
        raise UserError(command_text)

    with pytest.raises(UserError) as caught:
        function("o", **passed)
    assert (str(caught.value), caught.value.command_text) == (text, command_text)


def test_text_that_the_locale_cannot_read() -> None:
    code = "import sys; from stretto.base.errors import check_text; check_text(sys.argv[1], '--prompt')"
    ascii_only = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, "dé".encode()]
    done = subprocess.run(command, env=os.environ | ascii_only, capture_output=True, text=True, check=False)
    said = "--prompt: character 2 is not in ascii, the encoding of the locale; set LC_ALL=C.UTF-8"
    assert done.stderr.splitlines()[-1].endswith(said)
