"""Errors: `UserError` for bad input, with file, field and remedy; `InfraError` for infrastructure failures, which are retried."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from stretto.base.annotations import wrong_argument

P = ParamSpec("P")
T = TypeVar("T")

_MAX_NAME_CHARS = 200
"""Longer names are cut before they are compared or shown: requests may contain names of megabytes."""


class UserError(ValueError):
    """Bad input. The message is one line that names the file (or flag), the field and the remedy.

    Only the command line catches it: it prints the message and exits with ``exit_code``.
    """

    exit_code = 2
    command_text: str | None = None
    """The message for the command line, set where that of the exception names arguments of a Python function instead of options."""


def of_system(error: OSError) -> UserError | None:
    """The `UserError` for an error of the operating system about a file; None if it names no file."""
    if error.filename is None:
        return None
    name = os.fsdecode(error.filename)[:_MAX_NAME_CHARS]
    return UserError(f"{name}: {error.strerror}; check the path and its permissions")


def user_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of public API functions: an argument of another type than its annotation raises a `UserError` before the function begins.
    An `OSError` about a file becomes a `UserError`, as on the command line. A `UserError` names arguments of the function instead of
    options of its command: ``force=True`` for ``--force``."""
    return user_errors_naming()(function)


def user_errors_naming(
    *, further: Iterable[str] = (), renamed: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`user_errors` for a function with ``further`` keyword arguments behind ``**``, and with arguments that have another name than their
    option: ``renamed``, by option."""

    def decorator(function: Callable[P, T]) -> Callable[P, T]:
        known = dict.fromkeys(further) | {name: each.default for name, each in signature(function).parameters.items()}

        @wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            if (problem := wrong_argument(function, args, kwargs)) is not None:
                raise UserError(problem)
            try:
                return function(*args, **kwargs)
            except UserError as error:
                if error.command_text is None:
                    error.command_text = str(error)
                    unknown = dict.fromkeys(kwargs)  # such as a misspelt one
                    error.args = (_with_arguments(error.command_text, unknown | known, renamed),)
                raise
            except OSError as error:
                if (user_error := of_system(error)) is None:
                    raise
                raise user_error from error

        return wrapped

    return decorator


_OPTION = re.compile(r"`[^`]*`|(?P<word>\w )?(?<![\w-])--(?P<option>[a-z][a-z-]*)")
"""An option in a message, with the word before it if there is one; or a command in backticks."""


def _with_arguments(message: str, defaults: Mapping[str, object], renamed: Mapping[str, str]) -> str:
    """``message`` with the arguments of a Python function, which have these defaults, in place of options: "out: is a file" for "--out: is a
    file", "add `lora` 16" for "add --lora 16". Commands in backticks stay."""

    def argument(found: re.Match[str]) -> str:
        option = (found["option"] or "").replace("-", "_")
        names = (renamed.get(option, option), f"{option}s", "settings" if option == "set" else "")
        name = next((each for each in names if each in defaults), None)
        if name is None:
            return found[0]
        word = found["word"] or ""
        if defaults[name] is False:
            return f"{word}{name}=True"
        return f"{word}`{name}`" if word else name

    return _OPTION.sub(argument, message)


class InfraError(RuntimeError):
    """An infrastructure error: a dead engine, a full queue, a missed deadline. The caller retries; it never becomes a reward."""


def one_line(value: object, most: int | None = None) -> str:
    """The text of ``value`` on one line, cut to ``most`` characters if given."""
    return " ".join(str(value).split())[:most]


def nearest(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """``" (did you mean 'x'?)"`` for the known name closest to ``name``, or an empty string if none has a similarity of ``least``, by the
    ratio of difflib."""
    match = difflib.get_close_matches(name[:_MAX_NAME_CHARS], list(known), n=1, cutoff=least)
    return f" (did you mean {match[0]!r}?)" if match else ""


def check_text(text: str, source: str) -> None:
    """Raises `UserError` if ``text`` has surrogates: Python's form of bytes from arguments or a console that are not in the encoding of the
    locale."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        if encoding != "utf-8" and "\udc80" <= text[error.start] <= "\udcff":  # the forms of bytes
            problem = f"not in {encoding}, the encoding of the locale; set LC_ALL=C.UTF-8"
        else:
            problem = "not UTF-8; write text in UTF-8"
        raise UserError(f"{source}: character {error.start + 1} is {problem}") from None
