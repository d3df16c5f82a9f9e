"""The one error a user is meant to read: which file, which field, what to do."""

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


def one_line(value: object, most: int | None = None) -> str:
    """Its text on one line, cut to ``most`` characters; None: all of it."""
    return " ".join(str(value).split())[:most]


def nearest(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the known name closest to ``name``, or an empty string."""
    match = difflib.get_close_matches(name[:_LONGEST], list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
