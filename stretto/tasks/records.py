"""Problems from JSONL files: one record a line, read whole at the start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError


class Range(Config):
    """Which records of a file. Two sources with ranges apart make a training and a held-out set."""

    first: int = Field(default=0, ge=0)
    """Records of the file that are left out at its start."""
    limit: int | None = Field(default=None, gt=0)
    """Records at most; None: all."""


def read_records(path: Path, part: Range, fields: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The chosen records, each with at least one of every group of ``fields``.

    Raises:
        UserError: no such file, a line that is no JSON object, or one without a field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: path: cannot be read as UTF-8 text: {error}; give a JSONL file") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: line {number}: not valid JSON: {error}; one object a line") from None
        for names in fields:
            if not isinstance(record, dict) or not any(name in record for name in names):
                raise UserError(f"{path}: line {number}: no field {' or '.join(names)}; give one")
        records.append(record)
    stop = None if part.limit is None else part.first + part.limit
    if not records[part.first : stop]:
        raise UserError(f"{path}: first: no records from {part.first} on, of {len(records)}; lower it")
    return records[part.first : stop]
