"""Teachers of a distillation as command-line settings, and the progress of each source.

The run itself is `stretto.flow.run.run_opened`'s, under this name. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import UserError
from stretto.base.paths import sized
from stretto.base.track import read_metrics
from stretto.learning.recipe import DistillConfig
from stretto.model.headers import check_files

STAGE = "distill"


def teacher_settings(teachers: Sequence[str]) -> list[str]:
    """``--set`` overrides of teachers given as NAME=DIR, NAME=DIR:SUBNET or NAME=URL.
    Raises UserError: one is neither, or its checkpoint is missing or damaged."""
    settings = []
    for each in teachers:
        name, equals, place = each.partition("=")
        if not (name and equals and place) or "." in name:
            raise UserError(f"--teacher {each}: expected NAME=DIR, NAME=DIR:SUBNET or NAME=URL, NAME without dots")
        if place.startswith(("http://", "https://")):
            fields = {"url": place}
        else:
            folder, subnet = sized(place)
            try:
                check_files(folder)
            except UserError as error:
                raise UserError(f"--teacher {each}: {error}") from None
            fields = {"checkpoint": str(folder)} | ({"subnet": subnet} if subnet else {})
        settings += [f"distill.teachers.{name}.{key}={json.dumps(value)}" for key, value in fields.items()]
    return settings


def parent_settings(model: Path) -> list[str]:
    """``--set`` overrides that make ``model`` the teacher of every source."""
    return [f"distill.teachers.parent.checkpoint={json.dumps(str(model))}", 'distill.teachers.parent.domains=["*"]']


@dataclass(frozen=True, slots=True)
class Gap:
    """KL between the student and the teacher of a source. Written by `gaps`."""

    source: str
    teacher: str
    first_kl: float
    """KL in nats per token on the samples of the first step with this source."""
    last_kl: float
    share: float
    """Share of the gradient, mean over the steps."""


def gaps(folder: Path, config: DistillConfig) -> list[Gap]:
    """KL and share of every taught source, from the metrics of a run. Raises UserError: there are no metrics."""
    rows, found, kinds = read_metrics(folder), [], ("kl", "share")
    for source, teacher in config.teacher_of().items():
        kls, shares = ([row[key] for row in rows if (key := f"distill/{kind}/{source}") in row] for kind in kinds)
        if kls:
            found.append(Gap(source, teacher, kls[0], kls[-1], sum(shares) / len(shares)))
    return found
