"""The error that users read, which names file, field and remedy; and the error of our own infrastructure, which is tried again."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 200
"""Characters of a name that are looked at: strangers send names of megabytes."""


class UserError(ValueError):
    """Bad input. The message is one line that names the file (or flag), the field and the remedy.

    The command line prints it and exits with its code; everything else lets it pass.
    """

    exit_code = 2


class InfraError(RuntimeError):
    """An infrastructure error: a dead engine, a full queue, a missed deadline. The caller tries again; it is never a reward."""


def one_line(value: object, most: int | None = None) -> str:
    """Its text on one line, cut to ``most`` characters; None: all of it."""
    return " ".join(str(value).split())[:most]


def nearest(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the known name closest to ``name``, or an empty string."""
    match = difflib.get_close_matches(name[:_LONGEST], list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
