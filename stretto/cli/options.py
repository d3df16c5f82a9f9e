"""Arguments, options and checks that several commands share, lines that several commands print, and what SIGTERM does to conversions."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

from typer import Argument, Option
from typer.core import TyperCommand

from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder

P = ParamSpec("P")
T = TypeVar("T")

Recipe = Annotated[Path, Argument(help="Recipe: a TOML file, or the name of a shipped recipe.", show_default=False)]
Source = Annotated[Path, Argument(help="Run or checkpoint folder.", show_default=False)]
Start = Annotated[Path | None, Option(help="Run or checkpoint to begin with. Default: the recipe's [start].")]
Vocabulary = Annotated[Path | None, Option(help="tokenizer.json, or its folder. Default: one is trained on the data.")]
RunFolder = Annotated[Path, Argument(help="Run folder.", show_default=False)]
Out = Annotated[Path, Option("-o", "--out")]
OptionalOut = Annotated[Path | None, Option("-o", "--out")]
RunOut = Annotated[
    Path | None, Option("-o", "--out", help="Run folder to write. Default: runs/ and the name of the recipe.")
]
Settings = Annotated[list[str], Option("--set", help="Override of one recipe key, for example train.steps=100.")]
Steps = Annotated[int | None, Option(help="Number of training steps; short for --set train.steps=N.")]
Resume = Annotated[bool, Option("--resume", help="Continue from the newest snapshot.")]
ResumeOrBegin = Annotated[
    bool,
    Option(
        "--resume",
        help="Continue from the newest snapshot; begin where there is no run yet, so that restarts repeat one command.",
    ),
]
Launch = Annotated[
    int | None,
    Option(
        "--launch",
        help="Number of ranks to start on this machine with torchrun, which restarts them all, with --resume, when one dies. Default: "
        "this process is the only rank.",
    ),
]
MaxRestarts = Annotated[int, Option("--max-restarts", help="With --launch: largest number of restarts.")]
Force = Annotated[bool, Option("--force", help="Replace what the output folder or file holds.")]
Device = Annotated[str, Option(help="Device: cpu, cuda or auto.")]
Wandb = Annotated[str | None, Option(help="W&B project to log to, beside TensorBoard.")]
Data = Annotated[
    list[str],
    Option(
        help="Text: a file, a folder of text, code, JSONL, CSV or Parquet, or a Hugging Face dataset. Repeat the option for a "
        "mixture: PATH@WEIGHT.",
        show_default=False,
    ),
]
Val = Annotated[str | None, Option(help="Held-out text, in the same forms as --data. Default: a part of the data.")]
ValFraction = Annotated[
    float | None, Option(help="Share of the data to hold out, 0 to 0.5. Default: 0.01, up to 0.1 of little text.")
]
TextField = Annotated[str, Option(help="Field that holds the text in JSONL, CSV, Parquet and datasets.")]

_TEXTS = ("prompt", "question", "system", "negative")
"""Parameters that take text, which may be empty or has a refusal of its own."""


class Command(TyperCommand):
    """A command of a function whose docstring has the help of the parameters, under ``Args:``.

    A parameter without a default is an argument unless its annotation says that it is an option. A boolean that is False by default
    is an option without a ``--no-`` form. The command refuses an empty value of any parameter but `_TEXTS`: as a path, it would name
    the current folder.
    """

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.help, _, described = (self.help or "").partition("\n\nArgs:\n")
        parameters: dict[str | None, Any] = {each.name: each for each in self.params}
        _, *parts = re.split(r"^ {4}(\w+): ", described, flags=re.MULTILINE)
        for name, meaning in zip(parts[::2], parts[1::2], strict=True):
            parameters[name].help = " ".join(meaning.split())
        for each in self.params:
            if each.default is False:
                each.secondary_opts = []

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # type of click, which typer vendors
        try:
            given, _, _ = self.make_parser(ctx).parse_args(list(args))
        except Exception as error:
            # click's error about an option without its value does not name the command
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise
        for parameter in self.params:
            value = given.get(parameter.name)
            if parameter.name not in _TEXTS and "" in (value if isinstance(value, list | tuple) else [value]):
                command = " ".join(ctx.command_path.split()[1:])
                raise UserError(f"{command}: {parameter.opts[-1]}: is empty; give a value, or leave it out")
        return super().parse_args(ctx, args)


def check_exists(model: Path) -> None:
    """Raises `UserError` if nothing has the name ``model``, a run or checkpoint. Before torch is imported, which takes seconds."""
    if not model.exists():
        checkpoint_folder(model)


def check_ending(out: Path, *endings: str) -> None:
    """Raises UserError if the file ``out`` to write has none of ``endings``."""
    if out.suffix.lower() not in endings:
        problem = "is a folder; name a file that ends" if out.is_dir() else "must end"
        raise UserError(f"--out {out}: {problem} in {' or '.join(endings)}")


def say(text: str) -> None:
    """Print ``text`` on the first rank; under torchrun the other ranks would repeat it."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text + "\n")


def removing_unfinished(convert: Callable[P, T]) -> Callable[P, T]:
    """``convert`` with another action of SIGTERM: as after Ctrl-C, the unfinished output is removed. A second signal acts at once.

    Only for work that this process does itself: it would wait for the end of other processes and of threads.
    """

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.exit(128 + number)

    @wraps(convert)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        before = signal.signal(signal.SIGTERM, end)
        try:
            return convert(*args, **kwargs)
        finally:
            signal.signal(signal.SIGTERM, before)

    return wrapped
