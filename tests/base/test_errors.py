"""Errors of Python functions name arguments in place of options of the command line."""

from __future__ import annotations

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
