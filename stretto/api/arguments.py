"""Arguments of the Python functions: models, data and folders, as paths."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from stretto.api.model import Model
from stretto.base.errors import UserError
from stretto.base.paths import expanded, user_cache, user_path

PathLike = str | os.PathLike[str]
ModelLike = PathLike | Model
"""A run or checkpoint folder, or an opened `Model`."""
Data = PathLike | Sequence[PathLike]
"""Text: a file, a folder, or a Hugging Face dataset; several as a list, ``PATH@WEIGHT`` in a mixture."""


def model_path(model: ModelLike, name: str = "model") -> Path:
    """The folder of ``model``, an argument called ``name``. Raises `UserError`: it names no folder."""
    if isinstance(model, Model):
        return model.source
    if not isinstance(model, str | os.PathLike):
        raise UserError(f"{name}: {model!r}; needs a folder or an opened model")
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
    return [expanded(each, "data") for each in paths]


def held_out_path(val: str | None) -> str | None:
    """``val`` as the commands take it."""
    return None if val is None else expanded(val, "val")


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
