"""What a run shows of itself while it runs: a small file, replaced every second by the driver, read by `stretto top`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, write_json

STATUS_FILE = "status.json"


class RoleRow(Config):
    """One role."""

    name: str
    state: str
    """As the runtime says: ``alive``, ``restarting``…"""
    load: float
    """What it has in hand: groups of an agent, sequences of an engine, samples of a verifier, 0 or 1 of the trainer."""
    waiting: float
    """Of that, what waits for its turn."""
    restarts: int
    pid: int | None = None
    """Of the process it lives in; None while it has none."""
    note: str = ""


class RunStatus(Config):
    """The whole run at one moment."""

    updated_s: float
    """Unix seconds."""
    step: int
    num_steps: int
    state: str
    """What the run is doing: ``starting``, ``training``, ``evaluating``, ``done``, or why it stopped."""
    counts: dict[str, float]
    """Of groups: alive, in flight, ready, training, and how many ended how."""
    metrics: dict[str, float]
    """The last logged value of each scalar."""
    rewards: list[float]
    """Mean reward of each step so far."""
    roles: list[RoleRow]
    waits: list[str]
    """The longest waits, in words."""


def write_status(folder: Path, status: RunStatus) -> None:
    write_json(folder / STATUS_FILE, status.model_dump(mode="json"))


def read_status(folder: Path) -> RunStatus:
    """
    Raises:
        UserError: the folder holds no such run.
    """
    path = folder / STATUS_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; {folder} is not a run of stretto rl")
    tree = read_json(path)
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: damaged; it is written anew while the run runs")
    return validate(RunStatus, tree, str(path))
