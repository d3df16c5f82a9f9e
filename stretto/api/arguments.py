"""Arguments of the Python functions: models, data and folders, as paths."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from stretto.api.model import Model
from stretto.base.errors import UserError, one_line
from stretto.base.paths import expanded, user_cache, user_path

PathLike = str | os.PathLike[str]
_MODEL_WORDS = "a folder or an opened model"
ModelLike = Annotated[PathLike | Model, _MODEL_WORDS]
"""A run or checkpoint folder, or an opened `Model`."""
_DATA_REMEDY = "write text to a file and a DataFrame to a Parquet file, and give the path of the file"
Data = Annotated[
    PathLike | Sequence[PathLike],
    "the path of a file or folder, or OWNER/NAME on the hub, or several in a list",
    _DATA_REMEDY,
]
"""Text: the path of a file or folder, ``PATH@WEIGHT`` in a mixture, or ``OWNER/NAME`` of a dataset on the Hugging Face hub; several as a
list. Text itself and tables are refused."""
_MAX_NAME_BYTES = 255
"""Longest name of a file or folder on Linux and macOS."""


def model_path(model: ModelLike, name: str = "model") -> Path:
    """The folder of ``model``, an argument called ``name``. Raises `UserError`: it names no folder."""
    if isinstance(model, Model):
        return model.source
    if not isinstance(model, str | os.PathLike):
        raise UserError(f"{name}: needs {_MODEL_WORDS}, is {model!r}")
    return user_path(model, name)


def model_paths(models: ModelLike | Sequence[ModelLike], name: str) -> list[Path]:
    """The folders of one model or of several. Raises `UserError`: one of them names no folder."""
    return [model_path(each, name) for each in several(models)]


def several(models: ModelLike | Sequence[ModelLike]) -> list[ModelLike]:
    """``models`` as a list, also if it is one model."""
    if isinstance(models, str | os.PathLike | Model) or not isinstance(models, Iterable):
        return [models]
    return list(models)


def shown(model: ModelLike) -> str:
    """``model`` as the commands take it: a path, ``PATH:SUBNET`` or a URL."""
    return str(model.source) if isinstance(model, Model) else expanded(model, "model")


def listed_data(data: Data) -> list[str]:
    """``data`` as the commands take it."""
    paths = [data] if isinstance(data, str | os.PathLike) else data
    return [_text_path(each, "data") for each in paths]


def held_out_path(val: PathLike | None) -> str | None:
    """``val`` as the commands take it."""
    return None if val is None else _text_path(val, "val")


def _text_path(given: PathLike, name: str) -> str:
    """`expanded`. Raises `UserError` also if it is text instead of a path."""
    path = expanded(given, name)
    if "\n" in path or any(len(part) > _MAX_NAME_BYTES for part in os.fsencode(path).split(b"/")):
        raise UserError(f"--{name}: {one_line(path, 40)}…: is text, and a path is needed; {_DATA_REMEDY}")
    return path


def run_folder(out: PathLike | None, recipe: object, stage: str) -> Path:
    """``out``, or ``runs/`` and the name of the recipe's file, or of the stage where the recipe is not a file.
    Raises `UserError`: there is a file with that name."""
    name = Path(recipe).stem if isinstance(recipe, str | os.PathLike) else stage
    folder = Path("runs") / name if out is None else user_path(out, "out")
    if folder.is_file():
        raise UserError(f"{folder}: is a file, and the run needs a folder; choose another name with --out")
    return folder


def new_folder(model: ModelLike, stage: str) -> Path:
    """A folder beside the model's that does not exist yet: ``runs/demo-heal`` for ``runs/demo`` and ``heal``, then ``runs/demo-heal-2`` …
    A model in a cache or in a Python package has its results in ``runs/``."""
    source = model_path(model).resolve()
    base = source.with_name(f"{source.name}-{stage}")
    if _is_cached(source):
        is_snapshot = source.parent.name == "snapshots"  # of the hub: models--OWNER--NAME/snapshots/COMMIT
        name = source.parents[1].name.rpartition("--")[2] if is_snapshot else source.name
        base = Path("runs") / f"{name}-{stage}"
    numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([base], numbered) if not path.exists())


def _is_cached(source: Path) -> bool:
    """Whether ``source`` lies in a cache of this user or of the Hugging Face hub, or in a Python package."""
    hub = Path(os.environ.get("HF_HOME") or user_cache().parent / "huggingface") / "hub"
    caches = [user_cache(), Path(os.environ.get("HF_HUB_CACHE") or hub).expanduser()]
    return "site-packages" in source.parts or any(source.is_relative_to(cache.resolve()) for cache in caches)
