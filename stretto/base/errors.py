"""The error that users read, which names file, field and remedy; and the error of our own infrastructure, which is tried again."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST = 200
"""Characters of a name that are looked at: strangers send names of megabytes."""


class UserError(ValueError):
    """Bad input. The message is one line that names the file (or flag), the field and the remedy.

    The command line prints it and exits with its code; everything else lets it pass.
    """

    exit_code = 2


def of_system(error: OSError) -> UserError | None:
    """What the operating system refuses about a named file, as a `UserError`; None where it names no file."""
    if error.filename is None:
        return None
    return UserError(f"{os.fsdecode(error.filename)[:200]}: {error.strerror}; check the path and its permissions")


def user_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function of the public API: an `OSError` about a file becomes a `UserError`, as on the command line."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            if (told := of_system(error)) is None:
                raise
            raise told from error

    return wrapped


class InfraError(RuntimeError):
    """An infrastructure error: a dead engine, a full queue, a missed deadline. The caller tries again; it is never a reward."""


def one_line(value: object, most: int | None = None) -> str:
    """Its text on one line, cut to ``most`` characters; None: all of it."""
    return " ".join(str(value).split())[:most]


def nearest(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the known name closest to ``name``, or an empty string."""
    match = difflib.get_close_matches(name[:_LONGEST], list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
