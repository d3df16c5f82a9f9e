"""The command `stretto`: all commands in the order of ``stretto --help``, and the exit codes and messages of errors."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from stretto import __version__
from stretto.base.errors import UserError, of_system
from stretto.base.openmp import wait_briefly
from stretto.cli.judge import judge
from stretto.cli.launch import end_for_good, exit_if_ended
from stretto.cli.options import Command, say
from stretto.cli.pictures import enhance, paint, studio
from stretto.cli.post import compare, distill, evaluate, merge, online, run, sft
from stretto.cli.rl import rl, top
from stretto.cli.serve import agent, bench_serve, chat, generate, serve
from stretto.cli.stages import (
    adopt,
    cost,
    demo,
    elasticize,
    export,
    extract,
    heal,
    latency,
    plan,
    pretrain,
    quantise,
    report,
    search,
    tokenize,
)

SECTIONS: dict[str, tuple[Callable[..., None], ...]] = {
    "From text to a small model": (
        pretrain,
        adopt,
        elasticize,
        tokenize,
        latency,
        search,
        extract,
        heal,
        quantise,
        export,
        demo,
    ),
    "Results": (report, cost, plan),
    "Post-training": (run, sft, rl, distill, online, top, merge),
    "Evaluation": (evaluate, compare),
    "Serving and applications": (serve, chat, generate, agent, bench_serve, enhance, paint, studio),
}
"""The commands in the order of ``stretto --help``."""
NAMES = {evaluate: "eval"}
"""Names of commands that differ from their function's name."""


class Commands(typer.core.TyperGroup):
    """The list of commands by section, each with the whole first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # types of click, which typer vendors
        shown = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = {name: (name, _first_paragraph(each)) for name, each in shown.items() if each is not None}
        for section, functions in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([rows.pop(_name(function)) for function in functions])
        with formatter.section("Groups of commands"):
            formatter.write_dl(list(rows.values()))


def _first_paragraph(command: Any) -> str:
    return " ".join((command.help or "").strip().split("\n\n")[0].split())


def _name(function: Callable[..., None]) -> str:
    return NAMES.get(function, function.__name__.replace("_", "-"))


app = typer.Typer(
    help="Train one Mixture-of-Experts language model that contains every smaller version of itself.",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts name tables such as [model], which markup would swallow
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        say(f"stretto {__version__}")
        raise typer.Exit


@app.callback(help=app.info.help, cls=Commands, no_args_is_help=True)
def _general(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass  # the option has a callback of its own


for functions in SECTIONS.values():
    for function in functions:
        app.command(_name(function), cls=Command)(function)
app.add_typer(judge, name="judge")
command = typer.main.get_command(app)  # once for a process: it reads the signature of every command


def main() -> None:
    """Entry point: bad input becomes one line and exit code 2, a run that diverged 3, Ctrl-C 130."""
    exit_if_ended()
    wait_briefly(os.environ)  # before torch is imported
    try:
        code = command(prog_name="stretto", standalone_mode=False)  # newer versions of typer return the exit code
        sys.stdout.flush()
    except UserError as error:
        _fail(error.command_text or str(error), error.exit_code)
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EPIPE):
            _drop_output()
            if error.errno == errno.EPIPE:  # the reader, such as head, has seen enough
                sys.exit(1)
            _fail("cannot write: No space left on device; free some space, or write elsewhere", 2)
        if (problem := of_system(error)) is None:
            raise
        _fail(str(problem), problem.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if not hasattr(error, "exit_code"):  # click's own errors about arguments carry one
            raise
        if (message := usage_problem(error, sys.argv[1:])) is not None:
            _fail(message, 2)
        error.show()  # type: ignore[attr-defined]  # prints the help of a command without arguments
        sys.exit(int(error.exit_code))
    if code == 130:
        remedy = (
            "; a training run continues with --resume; `stretto report RUN` writes the report of a run that is done"
        )
        _fail("interrupted" + remedy * _resumes(sys.argv[1:]), 130)
    sys.exit(code or 0)


def _drop_output() -> None:
    """Send what is still buffered for the standard output to nowhere; Python would try to write it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _resumes(arguments: Sequence[str]) -> bool:
    """Whether the command that ``arguments`` name has the option ``--resume``."""
    found: Any = command
    for argument in arguments:
        found = getattr(found, "commands", {}).get(argument, found)
    return any("--resume" in parameter.opts for parameter in found.params)


def usage_problem(error: Any, arguments: Sequence[str]) -> str | None:
    """Click's message about wrong ``arguments`` in one line with a remedy; None if the error is only a request for help."""
    context, message = getattr(error, "ctx", None), error.format_message()
    problem = " ".join(message.split()).rstrip(".")
    if context is None or not problem or "\n" in message.strip():
        return None
    remedy = _repeat_option(context.command, arguments) if "extra argument" in message else None
    place = "".join(f"{name}: " for name in context.command_path.split()[1:])
    return f"{place}{problem[0].lower()}{problem[1:]}; {remedy or f'see `{context.command_path} --help`'}"


def _repeat_option(command: Any, arguments: Sequence[str]) -> str | None:
    """The remedy for ``--option A B`` where ``--option A --option B`` is right; None if ``arguments`` have no such mistake."""
    repeated = {
        name for parameter in command.params if getattr(parameter, "multiple", False) for name in parameter.opts
    }
    for place, argument in enumerate(arguments, start=1):
        name, _, first = argument.partition("=")
        values = [first] if first else []
        values += takewhile(lambda each: not each.startswith("-"), arguments[place:])
        if name in repeated and len(values) > 1:
            return f"repeat {name} before each value: {name} {values[0]} {name} {values[1]}"
    return None


def _fail(message: str, code: int) -> NoReturn:
    end_for_good(message, code)
    # a message may quote a file's content: control characters are escaped
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)
    sys.stderr.write(f"stretto: {shown}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
