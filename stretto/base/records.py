"""What a stage cost (`Receipt`, by a `Meter`), where a checkpoint comes from (`Lineage`), and what that adds up to (`ledger`).

Every cost is stated twice: for a model alone, meaning all stages after the network it was cut from, and with that
parent. Only what a receipt holds counts as measured; an estimate handed in is marked as computed.
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

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, write_json

LINEAGE_FILE = "lineage.json"
SCHEMA = 1
"""Version of the lineage file. Raised when a reader of the old form would misread the new one."""


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
    """Tokens the stage trained on, padding excluded; one seen twice counts twice, one that was only evaluated not at all."""
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


class Elsewhere(Config):
    """What it cost to train a checkpoint before it came here: nothing of it was measured, so only its user can tell."""

    flops: int | None = Field(default=None, ge=0)
    """As told; None: unknown, which is not 0."""
    tokens: int | None = Field(default=None, ge=0)
    """The same."""


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
    adopted: Elsewhere | None = None
    """Of a stage that took in a checkpoint from elsewhere: what that had cost. None: the weights were made here."""
    created: str
    """When the record was written: ISO 8601, UTC."""


def new_lineage(**fields: Any) -> Lineage:
    """The record of a checkpoint about to be written, by this code, now: ``fields`` of `Lineage`, what is left out being empty.

    A resumed run hands in the ``run_id`` of its snapshot; None draws a new one.
    """
    empty: dict[str, Any] = {"weights_hash": "", "parents": (), "data_hash": None, "tokenizer_hash": None, "config": {}}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    made = {"schema_version": SCHEMA, "git_commit": git_commit(), "created": now}
    return Lineage(**(empty | fields | made | {"run_id": fields.get("run_id") or new_run_id()}))


def new_run_id() -> str:
    """An id no other run has. Drawn from the system, not from the run's seed: two runs of one recipe are two runs."""
    return uuid.uuid4().hex


def write_lineage(folder: Path | str, lineage: Lineage) -> None:
    """Write ``lineage.json`` into the checkpoint folder."""
    write_json(Path(folder) / LINEAGE_FILE, lineage.model_dump(mode="json"))


def read_lineage(folder: Path | str) -> Lineage:
    """Read the ``lineage.json`` of a checkpoint folder. Raises `UserError`: there is none, it is damaged, or another
    version or program wrote it.
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


def file_sha256(path: Path) -> str:
    """Of the contents of a file, in constant memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(digests: Mapping[str, str]) -> str:
    """One hash of several files: SHA-256 over what ``sha256sum`` prints of them, in order of name. ``digests``: by name."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


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


Basis = Literal["measured", "computed"]


class Meter:
    """Accumulates the cost of one stage; the clock runs inside ``with meter:``, which may be entered again and again."""

    def __init__(
        self,
        stage: str,
        device: str,
        num_devices: int = 1,
        spent: Receipt | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start at zero, or at ``spent``: what the stage had cost when the snapshot it resumes from was written."""
        self._total = Receipt(stage=stage, device=device, num_devices=num_devices)
        if spent is not None:
            assert spent.stage == stage, f"a {stage} stage cannot go on from the receipt of {spent.stage}"
            self._total = self._total + spent
        self._num_devices = num_devices
        self._clock = clock
        self._entered: float | None = None

    def add(self, **work: Any) -> None:
        """Count work done, over all devices: fields of `Receipt`, in their units."""
        self._total += Receipt(stage=self._total.stage, device=self._total.device, **work)

    def receipt(self, peak_memory_bytes: int | None = None) -> Receipt:
        """The cost so far; may be called at any time, so that a snapshot can carry it.

        ``peak_memory_bytes`` is the accelerator's peak, as its runtime counts it; None: this process's largest resident
        memory since it started, which may include an earlier stage of the same process.
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
        """With the time since the clock was started."""
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
    """``parent``: a network others may be cut from as well; ``own``: every stage after it."""
    receipt: Receipt
    """Cost of this stage only, measured."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a model cost, with and without its parent."""

    rows: tuple[LedgerRow, ...]
    """Every stage once, ancestors first."""
    alone: Receipt
    """Sum of the ``own`` stages."""
    with_parents: Receipt
    """Sum of all stages."""
    adopted: tuple[tuple[str, Elsewhere], ...] = ()
    """Names of the stages that took in a checkpoint from elsewhere, and what that had cost: in no sum, for it was not measured."""


def history(lineage: Lineage) -> tuple[Lineage, ...]:
    """All stages that led to ``lineage``, ancestors first, itself last; a shared ancestor once.

    Two records of one run (the run went on after the first child was cut from it) are one stage: the later record,
    which has more FLOPs, includes the earlier.
    """
    return distinct(_walk(lineage))


def ledger(lineage: Lineage) -> Ledger:
    """Cost of ``lineage`` alone and with its parents.

    The parents are the stages that started from no checkpoint, and all that came before something was cut out. A model trained
    from scratch has none: all is its own.
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
    """Run ids of the stages before ``lineage`` whose network others may come from as well."""
    before = [stage for stage in _walk(lineage) if stage.run_id != lineage.run_id]
    cut = [
        above
        for stage in _walk(lineage)
        if stage.stage == "extract"
        for parent in stage.parents
        for above in _walk(parent)
    ]
    return frozenset(stage.run_id for stage in [*cut, *(stage for stage in before if not stage.parents)])


@dataclass(frozen=True, slots=True)
class Alone:
    """Cost of training one size by itself."""

    flops: int
    basis: Basis
    """``computed`` from shape and tokens, or ``measured`` by the receipt of a control that was run."""


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """One size of a family."""

    name: str
    own_flops: int
    """FLOPs after the parents, measured; a stage that sizes share counts with the first of them."""
    alone: Alone


@dataclass(frozen=True, slots=True)
class Family:
    """Several sizes out of one parent, against training each alone."""

    rows: tuple[FamilyRow, ...]
    """In the order given."""
    parent_flops: int
    """FLOPs of the parents, each once: what they cost, but never less than an ordinary run would have."""
    basis: Basis
    """``measured`` only if every cost of training alone is."""
    parent_basis: Basis = "measured"
    """``computed`` where the ordinary run's price stands in."""

    @property
    def family_flops(self) -> int:
        return self.parent_flops + sum(row.own_flops for row in self.rows)

    @property
    def alone_flops(self) -> int:
        return sum(row.alone.flops for row in self.rows)

    @property
    def share_of_alone(self) -> float:
        """Cost of the family over the cost of training every size alone."""
        return self.family_flops / self.alone_flops

    @property
    def share_of_largest(self) -> float:
        """Cost of the family over the cost of training its dearest size alone."""
        return self.family_flops / max(row.alone.flops for row in self.rows)

    @property
    def break_even(self) -> int | None:
        """Number of sizes from which the family is the cheaper way; None if it never is.

        Computed for sizes that cost what these cost on average.
        """
        return break_even(self.parent_flops, sum(row.own_flops for row in self.rows), self.alone_flops, len(self.rows))


def family(members: Sequence[Lineage], alone: Sequence[Alone]) -> Family:
    """Add up sizes out of one parent; ``alone[i]`` is what training ``members[i]`` by itself costs.

    The parent may be a member too (the full network, used as it is): it then costs nothing beyond being the parent. An
    elastic run skips layers and experts in some of its steps, and may so cost less than training its full network on the
    same tokens would; that is no saving, so the family then pays the ordinary run's price.
    """
    assert members and len(members) == len(alone), f"{len(members)} members, {len(alone)} costs of training alone"
    stages = distinct(stage for member in members for stage in _walk(member))
    cost = {stage.run_id: stage.receipt.flops for stage in stages}
    parents = {stage.run_id for stage in stages if not stage.parents}.union(*map(parents_of, members))
    counted = set(parents)
    ordinary = {member.run_id: each.flops for member, each in zip(members, alone, strict=True) if not member.parents}
    parent_flops = sum(max(cost[run], ordinary.get(run, 0)) for run in parents)
    rows = []
    for member, by_itself in zip(members, alone, strict=True):
        own = {stage.run_id for stage in _walk(member)} - counted
        counted |= own
        rows.append(FamilyRow(member.name, sum(cost[run] for run in own), by_itself))
    return Family(
        rows=tuple(rows),
        parent_flops=parent_flops,
        basis="measured" if all(each.basis == "measured" for each in alone) else "computed",
        parent_basis="measured" if parent_flops == sum(cost[run] for run in parents) else "computed",
    )


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
    """One record a run, the one with most FLOPs, at the place where the run first appears."""
    latest: dict[str, Lineage] = {}
    for stage in stages:
        known = latest.get(stage.run_id)
        if known is None or stage.receipt.flops > known.receipt.flops:
            latest[stage.run_id] = stage
    return tuple(latest.values())
