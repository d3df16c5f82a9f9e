"""Import of users' code by the names in recipes: ``file.py:name`` or ``module:name``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError, nearest, one_line
from stretto.base.paths import RECIPES


def load_named(name: str, where: str) -> Any:
    """The object called ``name``. File paths are relative to the current folder.

    Raises UserError, with a message that starts with ``where``: the module cannot be imported, or has no such attribute.
    """
    place, _, attribute = name.rpartition(":")
    if place == "__main__" and not hasattr(sys.modules["__main__"], attribute):
        raise UserError(
            f"{where}: {attribute} is defined in a notebook or a script, which this process cannot import; write it to a file and name it "
            f"FILE.py:{attribute} (in Jupyter, start its cell with %%writefile FILE.py)"
        )
    try:
        module = _module(place)
        if hasattr(module, attribute):
            return getattr(module, attribute)
    except Exception as error:  # the import runs users' code, which may raise anything
        problem = f"cannot import {place!r}: {error_line(error)}"
        raise UserError(f"{where}: {problem}; check the name and what the file imports") from error
    near = nearest(attribute, [each for each in vars(module) if not each.startswith("_")])
    raise UserError(f"{where}: {place} has no {attribute!r}{near}; name what it defines")


def name_of(thing: Any) -> str:
    """Name of a class or function for `load_named`: ``module:name``. Raises `UserError`: it cannot be imported by a name."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module is None or name is None or "<" in name:
        raise UserError(
            f"recipe: {thing!r}: defined inside a function; define it at the top of the notebook or of a file"
        )
    return f"{module}:{name}"


def error_line(error: Exception) -> str:
    """An exception on one line; with its class, unless it is an error of imports, files or syntax."""
    text = one_line(error)
    return text if isinstance(error, ImportError | OSError | SyntaxError) else f"{type(error).__name__}: {text}"


def line_of(error: BaseException, owner: type) -> str:
    """`` (FILE:LINE)``: the last line that ran before ``error`` in the module of the user's class ``owner``; empty: none did, or the class
    is Stretto's."""
    if owner.__module__.startswith("stretto."):
        return ""
    lines = [
        (Path(frame.f_code.co_filename), line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == owner.__module__
    ]
    if not lines:
        return ""
    path, line = lines[-1]
    with suppress(ValueError, FileNotFoundError):  # elsewhere, or the current folder was deleted
        path = path.relative_to(Path.cwd())
    return f" ({path}:{line})"


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    if not path.exists() and path.parts[:1] == (RECIPES.name,):  # a shipped example: recipes/examples/…
        path = RECIPES.parent / path
    path = path.resolve()
    digest = blake2b(str(path).encode(), digest_size=6).hexdigest()  # tells files of the same name apart
    name = f"stretto_user_{path.stem}_{digest}"
    if name in sys.modules:  # imported once per process, as other modules are, so that its state is kept
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"no loader for {path}"
    module = sys.modules[name] = importlib.util.module_from_spec(
        spec
    )  # dataclasses and pydantic need it in sys.modules
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
