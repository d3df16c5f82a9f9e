"""Code of users, by the names that recipes give: ``file.py:name`` or ``module:name``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError, one_line
from stretto.base.paths import RECIPES


def load_named(name: str, where: str) -> Any:
    """The object that ``name`` names; None: its module has none of that name. A file's path counts from the working folder.
    Raises UserError: beginning with ``where``: the module cannot be imported."""
    place, _, attribute = name.rpartition(":")
    if place == "__main__" and not hasattr(sys.modules["__main__"], attribute):
        raise UserError(
            f"{where}: {attribute} is defined in a notebook or a script, which this process cannot import; write it to a file and name it "
            f"FILE.py:{attribute} (in Jupyter, begin its cell with %%writefile FILE.py)"
        )
    try:
        return getattr(_module(place), attribute, None)
    except Exception as error:  # it is code of others, which runs when it is imported
        problem = f"cannot import {place!r}: {error_line(error)}"
        raise UserError(f"{where}: {problem}; check the name and what the file imports") from error


def name_of(thing: Any) -> str:
    """The name by which `load_named` finds a class or a function again: ``module:name``. Raises `UserError`: it has none."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module is None or name is None or "<" in name:
        raise UserError(
            f"recipe: {thing!r}: defined inside a function; define it at the top of the notebook or of a file"
        )
    return f"{module}:{name}"


def error_line(error: Exception) -> str:
    """What went wrong, on one line; by its class too where that is not about names and files."""
    text = one_line(error)
    return text if isinstance(error, ImportError | OSError | SyntaxError) else f"{type(error).__name__}: {text}"


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    if not path.exists() and path.parts[:1] == (RECIPES.name,):  # a shipped example, named as in the documents
        path = RECIPES.parent / path
    path = path.resolve()
    digest = blake2b(str(path).encode(), digest_size=6).hexdigest()  # two folders may have a file of one name
    name = f"stretto_user_{path.stem}_{digest}"
    if name in sys.modules:  # once a process, as modules are: what it remembers, it remembers
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"no loader for {path}"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and pydantic look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
