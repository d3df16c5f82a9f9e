"""Cost of a stage (`Receipt`, counted by a `Meter`), origin of a checkpoint (`Lineage`), and sums of costs (`ledger`, `family`).

Every cost is stated twice: for a model alone, which means all stages after the network that it was cut from, and with that
parent. Only values of receipts count as measured; estimates of the caller are marked as computed.
"""

from __future__ import annotations

import hashlib
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from stretto.base.config import Config, read_versioned
from stretto.base.errors import UserError
from stretto.base.numbers import duration, params, si
from stretto.base.paths import write_json
from stretto.base.table import Cell, Table, Tabled

LINEAGE_FILE = "lineage.json"
SCHEMA = 1
"""Version of the lineage file; incremented when a reader of the old form would misread the new one."""


class Receipt(Config):
    """Cost of one stage. Written by the stage's `Meter`; receipts are added along a lineage."""

    stage: str
    """Name of the stage: ``pretrain``, ``extract``, ``heal``… A sum joins the distinct names with `` + ``."""
    device: str
    """Model name of the device that the stage computed on, from its driver or the CPU."""
    num_devices: int = Field(default=1, ge=1)
    """Devices used at once, over all ranks; a sum keeps the largest."""
    flops: int = Field(default=0, ge=0)
    """Floating-point operations of all devices, computed from shapes; a multiply-add is two. Attention is counted as if every row were
    one document, so packed rows, whose documents attend to themselves alone, execute less. An integer, because floats are not exact."""
    tokens: int = Field(default=0, ge=0)
    """Tokens the stage trained on, without padding, counted each time they are used; tokens of evaluations are not counted."""
    device_s: float = Field(default=0.0, ge=0)
    """Wall seconds times number of devices."""
    wall_s: float = Field(default=0.0, ge=0)
    """Wall seconds; a sum is the time of the stages run one after another."""
    sandbox_s: float = Field(default=0.0, ge=0)
    """CPU seconds of the sandboxes that ran tools or verifiers."""
    peak_memory_bytes: int = Field(default=0, ge=0)
    """Largest memory in use at once on one device (on a CPU: resident memory of one process); a sum keeps the largest."""
    bytes_read: int = Field(default=0, ge=0)
    """Bytes of data and checkpoints that the stage read, counted by the stage itself."""
    bytes_written: int = Field(default=0, ge=0)
    """Bytes of checkpoints and shards that the stage wrote, counted by the stage itself."""

    def __add__(self, other: Receipt) -> Receipt:
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in Receipt.model_fields}
        joined = {name: _join(*pairs.pop(name)) for name in ("stage", "device")}
        largest = {name: max(pairs.pop(name)) for name in ("num_devices", "peak_memory_bytes")}
        return Receipt(**joined, **largest, **{name: sum(pair) for name, pair in pairs.items()})


class Elsewhere(Config):
    """Training cost of an imported checkpoint, as stated by the user: it cannot be measured here."""

    flops: int | None = Field(default=None, ge=0)
    """Floating-point operations of its training; None: unknown."""
    tokens: int | None = Field(default=None, ge=0)
    """Tokens it was trained on; None: unknown."""


class Lineage(Tabled, Config):
    """Origin of a checkpoint. Created by `new_lineage`; written beside the weights by the stage that wrote them.

    The records of its parents are part of it, so the total cost is known after the parents' folders are deleted.
    """

    schema_version: int
    """Version of the format; see `SCHEMA`."""
    run_id: str
    """Random id of the run, kept by its resumes. Of two records of one run, the later includes the cost of the earlier."""
    name: str
    """Name of the run folder at the time of writing, for display."""
    stage: str
    """Name of the stage that produced the weights, as in the receipt."""
    parents: tuple[Lineage, ...]
    """Records of the checkpoints that this stage started from; empty for training from scratch."""
    weights_hash: str
    """SHA-256 of the weight files (`hash_files`)."""
    data_hash: str | None
    """SHA-256 of the token shards of the training; None for a stage that reads no data."""
    tokenizer_hash: str | None
    """SHA-256 of ``tokenizer.json``; None where the checkpoint has no tokenizer."""
    git_commit: str | None
    """Commit of the code, with ``-dirty`` appended for local changes; None outside a checkout."""
    config: dict[str, Any]
    """The complete recipe of the stage, as plain JSON values."""
    total_params: int = Field(ge=0)
    """Number of parameters of the checkpoint."""
    active_params: int = Field(ge=0)
    """Number of parameters that one token uses."""
    receipt: Receipt
    """Cost of this stage alone."""
    adopted: Elsewhere | None = None
    """Training cost before an import; None: not an import stage."""
    created: str
    """Time of writing: ISO 8601, UTC."""

    @property
    def table(self) -> Table:
        """All stages that led to the checkpoint, ancestors first."""
        rows = tuple(
            (
                Cell(stage.name),
                Cell(stage.stage),
                Cell(params(stage.total_params), stage.total_params),
                Cell(params(stage.active_params), stage.active_params),
                Cell(si(stage.receipt.tokens), stage.receipt.tokens),
                Cell(si(stage.receipt.flops), stage.receipt.flops),
                Cell(duration(stage.receipt.wall_s), stage.receipt.wall_s),
                Cell(stage.created[:10]),
            )
            for stage in history(self)
        )
        columns = ("name", "stage", "params", "active", "tokens", "FLOPs", "time", "created")
        return Table("", columns, rows, note="tokens: trained on; settings: .config; parents: .parents", num_words=2)

    __str__ = Tabled.__repr__


def new_lineage(**fields: Any) -> Lineage:
    """The record of a checkpoint that is about to be written by this code.

    ``fields`` are fields of `Lineage`; missing hashes, parents and config are empty. A resumed run passes the ``run_id`` of its
    snapshot; without one, a new id is drawn.
    """
    empty: dict[str, Any] = {"weights_hash": "", "parents": (), "data_hash": None, "tokenizer_hash": None, "config": {}}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    current = {"schema_version": SCHEMA, "git_commit": git_commit(), "created": now}
    return Lineage(**(empty | fields | current | {"run_id": fields.get("run_id") or new_run_id()}))


def new_run_id() -> str:
    """A unique id. It does not depend on the run's seed, because two runs of one recipe are two runs."""
    return uuid.uuid4().hex


def write_lineage(folder: Path | str, lineage: Lineage) -> None:
    """Write ``lineage.json`` into the checkpoint folder."""
    write_json(Path(folder) / LINEAGE_FILE, lineage.model_dump(mode="json"))


def read_lineage(folder: Path | str) -> Lineage:
    """Read the ``lineage.json`` of a checkpoint folder. Raises `UserError`: the file is missing, damaged or of another version."""
    path = Path(folder) / LINEAGE_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; {folder} is not a checkpoint that Stretto wrote")
    return read_versioned(path, Lineage, SCHEMA)


def find_lineage(folder: Path | str) -> Lineage | None:
    """As `read_lineage`; None: Stretto did not write the checkpoint."""
    return read_lineage(folder) if (Path(folder) / LINEAGE_FILE).is_file() else None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's contents, in constant memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(digests: Mapping[str, str]) -> str:
    """One hash of several files: SHA-256 of the output of ``sha256sum``, sorted by name. ``digests``: SHA-256 by file name."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def git_commit(package: Path | None = None) -> str | None:
    """Commit of the checkout that tracks ``package`` (default: this package), with ``-dirty`` for local changes.

    None without git, outside a checkout, or if the package is installed in an environment inside another repository, whose
    commit is not that of this code.
    """
    package = package or Path(__file__).resolve().parents[1]
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    # --exclude=* leaves tags out of the output, so that it is always the plain hash.
    return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _join(left: str, right: str) -> str:
    return " + ".join(dict.fromkeys([*left.split(" + "), *right.split(" + ")]))


class Meter:
    """Counts the cost of one stage. The clock runs inside ``with meter:``, which may be entered several times."""

    def __init__(
        self,
        stage: str,
        device: str,
        num_devices: int = 1,
        spent: Receipt | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start at zero, or at ``spent``, the receipt in the snapshot that the stage resumes from."""
        self._total = Receipt(stage=stage, device=device, num_devices=num_devices)
        if spent is not None:
            assert spent.stage == stage, f"a {stage} stage cannot resume from the receipt of {spent.stage}"
            self._total = self._total + spent
        self._num_devices = num_devices
        self._clock = clock
        self._entered: float | None = None

    def add(self, **work: Any) -> None:
        """Add work over all devices: fields of `Receipt`, in their units."""
        self._total += Receipt(stage=self._total.stage, device=self._total.device, **work)

    def receipt(self, peak_memory_bytes: int | None = None) -> Receipt:
        """The cost so far. May be called at any time, for example for a snapshot.

        ``peak_memory_bytes`` is the peak that the accelerator's runtime counted; None: the largest resident memory of this process
        since its start, which includes earlier stages of the same process.
        """
        peak = process_peak_bytes() if peak_memory_bytes is None else peak_memory_bytes
        total = self._so_far()
        return total.replace(peak_memory_bytes=max(total.peak_memory_bytes, peak))

    def __enter__(self) -> Self:
        assert self._entered is None, "this meter is already running"
        self._entered = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        self._total, self._entered = self._so_far(), None

    def _so_far(self) -> Receipt:
        """The total, with the time since the clock was started."""
        if self._entered is None:
            return self._total
        wall_s, total = self._clock() - self._entered, self._total
        device_s = wall_s * self._num_devices
        return total + Receipt(stage=total.stage, device=total.device, wall_s=wall_s, device_s=device_s)


def process_peak_bytes() -> int:
    """Largest resident memory of this process since it started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One stage in a model's history."""

    name: str
    """Name of its run folder."""
    role: Literal["parent", "own"]
    """``parent``: a network that other models may be cut from too; ``own``: every stage after it."""
    receipt: Receipt
    """Measured cost of this stage alone."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Cost of a model, with and without its parents."""

    rows: tuple[LedgerRow, ...]
    """Every stage once, ancestors first."""
    alone: Receipt
    """Sum of the ``own`` stages."""
    with_parents: Receipt
    """Sum of all stages."""
    adopted: tuple[tuple[str, Elsewhere], ...] = ()
    """Names of import stages and the stated cost of their checkpoints, which is in no sum because it was not measured."""


def history(lineage: Lineage | None) -> tuple[Lineage, ...]:
    """All stages that led to ``lineage``, ancestors first, itself last; a shared ancestor once. Without a lineage, none.

    Two records of one run, which was resumed after a child was cut from it, are one stage: the later record, which has more FLOPs,
    includes the earlier.
    """
    return () if lineage is None else distinct(_walk(lineage))


def ledger(lineage: Lineage) -> Ledger:
    """Cost of ``lineage`` alone and with its parents.

    The parents are the stages that started from scratch and all stages before an extraction. A model that was itself trained from
    scratch has no parents.
    """
    stages, parents = history(lineage), parents_of(lineage)
    rows = tuple(
        LedgerRow(stage.name, "parent" if stage.run_id in parents else "own", stage.receipt) for stage in stages
    )
    return Ledger(
        rows=rows,
        alone=reduce(add, (row.receipt for row in rows if row.role == "own")),
        with_parents=reduce(add, (row.receipt for row in rows)),
        adopted=tuple((stage.name, stage.adopted) for stage in stages if stage.adopted is not None),
    )


def parents_of(lineage: Lineage) -> frozenset[str]:
    """Run ids of the stages before ``lineage`` whose network other models may come from too."""
    before = [stage for stage in _walk(lineage) if stage.run_id != lineage.run_id]
    extractions = [stage for stage in _walk(lineage) if stage.stage == "extract"]
    cut = [above for stage in extractions for above in _walk(stage) if above is not stage]
    return frozenset(stage.run_id for stage in [*cut, *(stage for stage in before if not stage.parents)])


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """One size of a family."""

    name: str
    own_flops: int
    """Measured FLOPs after the parents; a stage that several sizes share is counted for the first of them."""
    alone_flops: int
    """FLOPs of training it by itself, computed from shape and tokens."""


@dataclass(frozen=True, slots=True)
class Family:
    """Cost of several sizes from one parent, compared with training each size separately."""

    rows: tuple[FamilyRow, ...]
    """The sizes, in the caller's order."""
    parent_flops: int
    """FLOPs of the parents, each counted once: the measured cost, but at least that of an ordinary run (see `family`)."""
    is_parent_raised: bool = False
    """Whether the computed cost of an ordinary run replaces the parents' measured cost."""

    @property
    def family_flops(self) -> int:
        return self.parent_flops + sum(row.own_flops for row in self.rows)

    @property
    def alone_flops(self) -> int:
        return sum(row.alone_flops for row in self.rows)

    @property
    def share_of_alone(self) -> float:
        """Cost of the family divided by the cost of training every size separately."""
        return self.family_flops / self.alone_flops

    @property
    def share_of_largest(self) -> float:
        """Cost of the family divided by the cost of training its most expensive size alone."""
        return self.family_flops / max(row.alone_flops for row in self.rows)

    @property
    def break_even(self) -> int | None:
        """Number of sizes from which the family is cheaper than separate training; None if it never is.

        Assumes that every size costs the average of these.
        """
        return break_even(self.parent_flops, sum(row.own_flops for row in self.rows), self.alone_flops, len(self.rows))


def family(members: Sequence[Lineage], alone_flops: Sequence[int]) -> Family:
    """Cost of several sizes from one parent; ``alone_flops[i]`` are the FLOPs of training ``members[i]`` by itself.

    The parent may be a member too (the full network without changes); it then costs nothing beyond the parent's cost. An elastic
    run skips layers and experts in some steps, so it may cost less than training its full network on the same tokens. That is not
    a saving, so the parent is counted with at least the cost of that ordinary run.
    """
    stages = distinct(stage for member in members for stage in _walk(member))
    cost = {stage.run_id: stage.receipt.flops for stage in stages}
    parents = {stage.run_id for stage in stages if not stage.parents}.union(*map(parents_of, members))
    counted = set(parents)
    ordinary = {each.run_id: flops for each, flops in zip(members, alone_flops, strict=True) if not each.parents}
    parent_flops = sum(max(cost[run], ordinary.get(run, 0)) for run in parents)
    rows = []
    for member, by_itself in zip(members, alone_flops, strict=True):
        own = {stage.run_id for stage in _walk(member)} - counted
        counted |= own
        rows.append(FamilyRow(member.name, sum(cost[run] for run in own), by_itself))
    return Family(tuple(rows), parent_flops, parent_flops > sum(cost[run] for run in parents))


def break_even(parent_flops: int, own_flops: int, alone_flops: int, num_sizes: int) -> int | None:
    """Smallest n with ``parent + n * own / num_sizes <= n * alone / num_sizes``; None if there is none.

    ``own_flops`` and ``alone_flops`` are sums over ``num_sizes`` sizes. Exact: integers throughout.
    """
    assert num_sizes > 0, num_sizes
    saved = alone_flops - own_flops
    if saved <= 0:
        return 1 if saved == parent_flops == 0 else None
    return max(1, -(-parent_flops * num_sizes // saved))


def _walk(lineage: Lineage) -> Iterable[Lineage]:
    for parent in lineage.parents:
        yield from _walk(parent)
    yield lineage


def distinct(stages: Iterable[Lineage]) -> tuple[Lineage, ...]:
    """One record per run, the one with most FLOPs, at the place where the run first appears."""
    latest: dict[str, Lineage] = {}
    for stage in stages:
        latest[stage.run_id] = max(latest.get(stage.run_id, stage), stage, key=lambda record: record.receipt.flops)
    return tuple(latest.values())
