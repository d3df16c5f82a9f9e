"""Records that cross a process or a disk; each field names its unit and who writes it."""

from __future__ import annotations

import hashlib
import subprocess
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, write_json

LINEAGE_FILE = "lineage.json"
SCHEMA = 1
"""Version of the lineage file. Raised when a reader of the old form would misread the new one."""

_HASH_CHUNK_BYTES = 1 << 20


class Receipt(Config):
    """What one stage cost. Written by the stage's `Meter`; receipts add up along a lineage."""

    stage: str
    """Name of the stage: ``pretrain``, ``extract``, ``heal``… A sum joins the distinct names with `` + ``."""
    device: str
    """Model name of the device the stage computed on, as its driver or the CPU gives it."""
    num_devices: int = Field(default=1, ge=1)
    """Devices used at once, over all ranks; a sum keeps the largest."""
    flops: int = Field(default=0, ge=0)
    """Floating-point operations executed, over all devices; one multiply-add is two. An integer: floats lose count."""
    tokens: int = Field(default=0, ge=0)
    """Tokens the stage trained on or evaluated, padding excluded; a token seen twice counts twice."""
    device_s: float = Field(default=0.0, ge=0)
    """Seconds devices were held: wall seconds times devices."""
    wall_s: float = Field(default=0.0, ge=0)
    """Seconds on the clock; a sum is the time of the stages run one after another."""
    sandbox_s: float = Field(default=0.0, ge=0)
    """CPU seconds spent in sandboxes that ran tools or verifiers."""
    peak_memory_bytes: int = Field(default=0, ge=0)
    """Most memory held at once on one device (on a CPU: resident memory of one process); a sum keeps the largest."""
    bytes_read: int = Field(default=0, ge=0)
    """Bytes of data and checkpoints the stage read, as counted by the stage itself."""
    bytes_written: int = Field(default=0, ge=0)
    """Bytes of checkpoints and shards the stage wrote, as counted by the stage itself."""

    def __add__(self, other: Receipt) -> Receipt:
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in Receipt.model_fields}
        joined = {name: _join(*pairs.pop(name)) for name in ("stage", "device")}
        largest = {name: max(pairs.pop(name)) for name in ("num_devices", "peak_memory_bytes")}
        return Receipt(**joined, **largest, **{name: sum(pair) for name, pair in pairs.items()})


class Lineage(Config):
    """Where a checkpoint comes from. Written beside the weights, by the stage that wrote them; made by `new_lineage`.

    Parents are embedded whole, so that what a model cost with its parents is known after their folders are gone.
    """

    schema_version: int
    """Form of this record; see `SCHEMA`."""
    run_id: str
    """Drawn when the run starts and kept by its resumes: two records of one run are one cost, the later includes the earlier."""
    name: str
    """Name of the run folder when it was written, for people."""
    stage: str
    """What made the weights; the same name as in the receipt."""
    parents: tuple[Lineage, ...]
    """Records of the checkpoints this stage started from; empty for one trained from scratch."""
    weights_hash: str
    """SHA-256 of the weight files (`hash_files`)."""
    data_hash: str | None
    """SHA-256 of the token shards trained on; None for a stage that reads no data."""
    tokenizer_hash: str | None
    """SHA-256 of ``tokenizer.json``; None where the checkpoint has no tokenizer."""
    git_commit: str | None
    """Commit of the code that ran, ``-dirty`` appended if it had local changes; None outside a checkout."""
    config: dict[str, Any]
    """The complete recipe of the stage, as plain JSON values."""
    total_params: int = Field(ge=0)
    """Parameters stored."""
    active_params: int = Field(ge=0)
    """Parameters one token uses."""
    receipt: Receipt
    """Cost of this stage alone."""
    created: str
    """When the record was written: ISO 8601, UTC."""


def new_lineage(
    *,
    name: str,
    stage: str,
    weights_hash: str,
    total_params: int,
    active_params: int,
    receipt: Receipt,
    parents: tuple[Lineage, ...] = (),
    run_id: str | None = None,
    data_hash: str | None = None,
    tokenizer_hash: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Lineage:
    """The record of a checkpoint about to be written, by this code, now (fields as in `Lineage`).

    A resumed run hands in the ``run_id`` of its snapshot; None draws a new one.
    """
    return Lineage(
        schema_version=SCHEMA,
        run_id=run_id or new_run_id(),
        name=name,
        stage=stage,
        parents=parents,
        weights_hash=weights_hash,
        data_hash=data_hash,
        tokenizer_hash=tokenizer_hash,
        git_commit=git_commit(),
        config=dict(config or {}),
        total_params=total_params,
        active_params=active_params,
        receipt=receipt,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def new_run_id() -> str:
    """An id no other run has. Drawn from the system, not from the run's seed: two runs of one recipe are two runs."""
    return uuid.uuid4().hex


def write_lineage(folder: Path | str, lineage: Lineage) -> None:
    """Write ``lineage.json`` into the checkpoint folder."""
    write_json(Path(folder) / LINEAGE_FILE, lineage.model_dump(mode="json"))


def read_lineage(folder: Path | str) -> Lineage:
    """Read the ``lineage.json`` of a checkpoint folder.

    Raises:
        UserError: there is none, it is damaged, or another version or program wrote it.
    """
    path = Path(folder) / LINEAGE_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; {folder} is not a checkpoint that Stretto wrote")
    tree = read_json(path)
    version = tree.get("schema_version") if isinstance(tree, dict) else None
    if version is None:
        raise UserError(f"{path}: schema_version: missing; the file is damaged or not one of ours")
    if version != SCHEMA:
        raise UserError(
            f"{path}: schema_version: {version} cannot be read, this Stretto reads {SCHEMA}; use the version that wrote it"
        )
    return validate(Lineage, tree, source=str(path))


def hash_files(paths: Iterable[Path]) -> str:
    """SHA-256 over names and contents of files, in order of name; in constant memory."""
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def git_commit(package: Path | None = None) -> str | None:
    """Commit of the checkout that tracks ``package`` (default: this package), with ``-dirty`` for local changes.

    None without git, outside a checkout, or when installed into an environment that merely lies inside another
    repository: that repository's commit would say nothing about this code.
    """
    package = package or Path(__file__).resolve().parents[1]
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    # --exclude=* keeps tags out of the answer, so that it is always the plain hash.
    return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _join(left: str, right: str) -> str:
    return " + ".join(dict.fromkeys([*left.split(" + "), *right.split(" + ")]))
