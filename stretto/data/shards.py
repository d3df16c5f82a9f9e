"""Token shards: documents on disk as numbers, written once and memory-mapped ever after.

A data folder holds, for each split, ``{split}-00000.tokens`` (little-endian uint16, or uint32 for a large vocabulary)
and ``{split}-00000.index`` (little-endian int64 pairs a document: end offset in the shard, domain number), and one
``data.json`` over all of them, written last: a folder without it is unfinished. Of conversations, whose prompts are not
learnt, a number is twice the token's id, and one more where a loss is taken of it.

A shard is one unit of work: about ``shard_bytes`` of text, encoded by one process. Which documents it holds follows
from the order of the documents alone, so the bytes do not depend on the number of processes, and a run that was killed
reads its sources again but encodes only the shards that are missing.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stretto.base import numbers
from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import LOCK_FILE, read_json, remove, replacing, write_json
from stretto.data.holdout import By, Holdout
from stretto.data.sources import Document

MANIFEST = "data.json"
TOKENIZER = "tokenizer"
"""Folder beside the shards where callers keep the tokenizer that made them."""
_TOKENS, _INDEX = ".tokens", ".index"
_INDEX_DTYPE = np.dtype("<i8")
_INDEX_FIELDS = 2
"""Columns of the index: end offset of the document in tokens, domain number."""
_PROGRESS = "unfinished"
"""Folder of the records of shards that are done while others are not."""
_BATCH_CHARS = 1 << 19
"""Text encoded between two writes: bounds what a process holds as Python integers."""


class Shard(Config):
    """One shard, recorded by the process that wrote it."""

    name: str
    text_hash: str
    """blake2b over the documents, in order: a shard whose text is unchanged is not encoded again."""
    sha256: str
    """Over the tokens file, then the index file."""
    num_tokens: int
    num_documents: int
    num_bytes: int
    """UTF-8 bytes of text."""


class Settings(Config):
    """What all shards of a folder have in common."""

    tokenizer: str
    """`Tokenizer.fingerprint`."""
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    val_fraction: float
    """0: the sources' own, or none."""
    val_by: By = "documents"
    shard_bytes: int
    is_marked: bool = False
    """Every number says whether its token is learnt; else all are."""

    @property
    def token_dtype(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype("<u2" if self.dtype == "uint16" else "<u4")


class Manifest(Config):
    """``data.json``."""

    settings: Settings
    data_hash: str
    """sha256 over the settings and every shard's own hash: names the data in a checkpoint's lineage."""
    num_tokens: int
    num_documents: int
    num_bytes: int
    domains: tuple[str, ...]
    splits: dict[str, tuple[Shard, ...]]


def read_settings(folder: Path | str) -> Settings | None:
    """Of a data folder, finished or not; None where none was begun."""
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        return read_manifest(folder).settings
    begun = folder / _PROGRESS / "settings.json"
    return validate(Settings, read_json(begun), str(begun)) if begun.exists() else None


def read_manifest(folder: Path | str) -> Manifest:
    """``data.json`` of a data folder.

    Raises:
        UserError: the folder is missing, unfinished, or its manifest damaged.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        remedy = "the folder is not token data, or its writing was interrupted: tokenise again"
        raise UserError(f"{path}: no such file; {remedy}")
    return validate(Manifest, read_json(path), str(path))


class TokenSet:
    """One split of a data folder, memory-mapped: documents by number, in the order of the sources."""

    def __init__(self, folder: Path | str, split: str = "train", verify: bool = False) -> None:
        """
        Args:
            folder: a data folder.
            verify: also read every byte and compare the hashes.

        Raises:
            UserError: no such split, or a shard that is missing, truncated or changed.
        """
        folder = Path(folder)
        self.split = split
        self.manifest = read_manifest(folder)
        if split not in self.manifest.splits:
            problem = f"split {split!r} is not there; it has {', '.join(self.manifest.splits)}"
            raise UserError(
                f"{folder}: {problem}: tokenise again with --val-fraction, or name held-out text with --val"
            )
        shards, settings = self.manifest.splits[split], self.manifest.settings
        for shard in shards:
            if damage := _damage(folder, shard, settings, verify) or _misled(folder, shard):
                raise UserError(damage)
        self._tokens = [np.memmap(folder / f"{shard.name}{_TOKENS}", settings.token_dtype, "r") for shard in shards]
        indexes = [np.memmap(folder / f"{shard.name}{_INDEX}", _INDEX_DTYPE, "r") for shard in shards]
        self._index = [index.reshape(-1, _INDEX_FIELDS) for index in indexes]
        self._first = np.cumsum([0, *(shard.num_documents for shard in shards)])
        self.num_documents = int(self._first[-1])
        self.num_tokens = sum(shard.num_tokens for shard in shards)

    @property
    def identity(self) -> str:
        """As `stretto.data.loader.Documents` has it."""
        return f"{self.split}:{self.manifest.data_hash}"

    def lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each document, its eos included."""
        shards = np.searchsorted(self._first, documents, side="right") - 1
        rows = documents - self._first[shards]
        lengths = np.zeros(len(documents), np.int64)
        for shard in np.unique(shards):
            here = shards == shard
            ends, own = self._index[shard][:, 0], rows[here]
            lengths[here] = ends[own] - np.where(own > 0, ends[own - 1], 0)
        return lengths

    def document(self, number: int) -> NDArray[np.unsignedinteger]:
        """All tokens of one document, as a view of the file."""
        numbers = self._numbers(number)
        return np.right_shift(numbers, 1, dtype=numbers.dtype) if self.manifest.settings.is_marked else numbers

    def learnt(self, number: int) -> NDArray[np.bool_] | None:
        """Of which tokens of one document a loss is taken; None: of all."""
        return (self._numbers(number) & 1).astype(np.bool_) if self.manifest.settings.is_marked else None

    def _numbers(self, number: int) -> NDArray[np.unsignedinteger]:
        shard, row = self._place(number)
        ends = self._index[shard][:, 0]
        return self._tokens[shard][int(ends[row - 1]) if row else 0 : int(ends[row])]

    def domain(self, number: int) -> str:
        """Domain of one document, empty where it has none."""
        shard, row = self._place(number)
        return self.manifest.domains[int(self._index[shard][row, 1])]

    def of_domain(self, domain: str) -> NDArray[np.int64]:
        """The numbers of a domain's documents."""
        domains = np.concatenate([index[:, 1] for index in self._index])
        return np.flatnonzero(domains == self.manifest.domains.index(domain))

    def _place(self, number: int) -> tuple[int, int]:
        """Shard of a document, and its number in it."""
        assert 0 <= number < self.num_documents, f"document {number} of {self.num_documents}"
        shard = int(np.searchsorted(self._first, number, side="right")) - 1
        return shard, int(number - self._first[shard])


def _files(folder: Path, shard: Shard, settings: Settings) -> dict[Path, int]:
    """A shard's files, and the bytes that each must have."""
    return {
        folder / f"{shard.name}{_TOKENS}": shard.num_tokens * settings.token_dtype.itemsize,
        folder / f"{shard.name}{_INDEX}": shard.num_documents * _INDEX_FIELDS * _INDEX_DTYPE.itemsize,
    }


def _damage(folder: Path, shard: Shard, settings: Settings, verify: bool = False) -> str | None:
    """What is wrong with a shard's files: as far as their sizes tell, or ``verify`` by every byte."""
    digest = hashlib.sha256()
    for path, size in _files(folder, shard, settings).items():
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            problem = "is missing" if found is None else f"has {found} bytes instead of {size}"
            return f"{path}: {problem}; the shard is damaged: tokenise into this folder again to mend it"
        with path.open("rb") as handle:
            while verify and (block := handle.read(1 << 20)):
                digest.update(block)
    if verify and digest.hexdigest() != shard.sha256:
        place = f"{folder / shard.name}{_TOKENS}"
        return f"{place}: content does not match its hash in {MANIFEST}; delete it and tokenise again"
    return None


def _misled(folder: Path, shard: Shard) -> str | None:
    """What is wrong with an index of the right size: where it points."""
    path = folder / f"{shard.name}{_INDEX}"
    ends = np.fromfile(path, _INDEX_DTYPE).reshape(-1, _INDEX_FIELDS)[:, 0]
    if len(ends) and ends[0] > 0 and ends[-1] == shard.num_tokens and (ends[1:] > ends[:-1]).all():
        return None
    return f"{path}: documents do not follow each other in it; the shard is damaged: delete it and tokenise into this folder again"


class Encoder(Protocol):
    """What is asked of a tokenizer here, which lies in a sibling package; `stretto.text.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: Sequence[str], /) -> list[list[int]]: ...


@runtime_checkable
class MarkingEncoder(Protocol):
    """One that also says which tokens are learnt; `stretto.text.chat.ChatEncoder` is one."""

    @property
    def vocab_size(self) -> int: ...
    def fingerprint(self) -> str: ...
    def encode_marked(self, texts: Sequence[str], places: Sequence[str], /) -> list[list[int]]:
        """Of each text, ends included: twice each token's id, and one more where it is learnt. ``places``: where they stand."""


def tokenise(
    sources: Mapping[str, Iterable[Document]],
    tokenizer: Encoder | MarkingEncoder,
    out_dir: Path | str,
    *,
    processes: int | None = None,
    holdout: Holdout | None = None,
    shard_bytes: int = 8 << 20,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Manifest:
    """Encode documents into token shards; each document ends with the tokenizer's eos token.

    Memory is bounded by ``shard_bytes`` times the processes, whatever the input. Called again after a kill, or after
    documents were appended, it encodes only what is missing.

    Args:
        sources: documents of each split; names are ``train``, ``val`` or others.
        tokenizer: encodes; special tokens spelled in a document are ordinary text. A `MarkingEncoder` ends documents itself.
        out_dir: the data folder.
        processes: workers; None takes the cores this process may use, 1 works in this process, as does what one shard holds.
        holdout: what of ``train`` goes to ``val``; None: nothing.
        shard_bytes: UTF-8 bytes of text in a shard.
        advance: called with the bytes of text that were encoded, or found done.

    Raises:
        UserError: bad input, a folder that holds other data, or a full disk.
    """
    out_dir = Path(out_dir)
    assert holdout is None or "val" not in sources, "the sources have a val split of their own"
    is_marked = isinstance(tokenizer, MarkingEncoder)
    settings = Settings(
        tokenizer=tokenizer.fingerprint(),
        vocab_size=tokenizer.vocab_size,
        dtype="uint16" if tokenizer.vocab_size << is_marked <= 1 << 16 else "uint32",
        is_marked=is_marked,
        val_fraction=holdout.fraction if holdout else 0.0,
        val_by=holdout.by if holdout else "documents",
        shard_bytes=shard_bytes,
    )
    done = _reopen(out_dir, settings)
    domains: dict[str, int] = {}
    shards: list[Shard] = []

    def missing() -> Iterator[_Unit]:
        for unit in _units(sources, holdout, shard_bytes, domains):
            known = done.get(unit.name)
            if known and known.text_hash == unit.text_hash and _damage(out_dir, known, settings) is None:
                shards.append(known)
                advance(known.num_bytes)
            else:
                yield unit

    if processes is None:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    work = partial(_encode, tokenizer=tokenizer, out_dir=out_dir, settings=settings)
    units, begun, num_bytes = missing(), list[_Unit](), 0
    while num_bytes <= shard_bytes and (unit := next(units, None)) is not None:
        begun.append(unit)
        num_bytes += unit.num_bytes
    if num_bytes <= shard_bytes:  # a single worker would do it all, and to start one can take longer
        processes = 1
    with closing(in_order(processes, work, chain(begun, units))) as encoded:
        for shard in encoded:
            write_json(out_dir / _PROGRESS / f"{shard.name}.json", shard.model_dump())
            shards.append(shard)
            advance(shard.num_bytes)
    return _finish(out_dir, settings, shards, tuple(domains), tuple(sources))


def _reopen(out_dir: Path, settings: Settings) -> dict[str, Shard]:
    """Records of the shards that an earlier call finished in ``out_dir``, which is marked unfinished again."""
    progress = out_dir / _PROGRESS
    old = read_settings(out_dir)
    finished: tuple[Shard, ...] = ()
    if (out_dir / MANIFEST).exists():
        finished = tuple(chain.from_iterable(read_manifest(out_dir).splits.values()))
    elif (
        old is None and out_dir.exists() and any(path.name not in (TOKENIZER, LOCK_FILE) for path in out_dir.iterdir())
    ):
        raise UserError(f"{out_dir}: holds other files and no {MANIFEST}; choose an empty or a new folder")
    # what is held out may change: a shard whose text is the same is the same
    for name in (name for name in Settings.model_fields if name not in ("val_fraction", "val_by")):
        was, now = getattr(old or settings, name), getattr(settings, name)
        if was != now:
            raise UserError(f"{out_dir}: {name}: was {was}, is now {now}; choose a new folder or delete this one")
    for shard in finished:
        write_json(progress / f"{shard.name}.json", shard.model_dump())
    write_json(progress / "settings.json", settings.model_dump())
    (out_dir / MANIFEST).unlink(missing_ok=True)
    records = [path for path in progress.glob("*-*.json") if not path.name.startswith(".")]
    return {path.stem: validate(Shard, read_json(path), str(path)) for path in records}


@dataclass(slots=True)
class _Unit:
    """Documents of a shard to be, on their way to a worker."""

    name: str
    texts: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    domains: list[int] = field(default_factory=list)
    num_bytes: int = 0
    text_hash: str = ""


def _units(
    sources: Mapping[str, Iterable[Document]], holdout: Holdout | None, shard_bytes: int, domains: dict[str, int]
) -> Iterator[_Unit]:
    """Cut the documents into units; number the domains by first appearance."""
    counts: Counter[str] = Counter()
    open_units: dict[str, _Unit] = {}
    for split, document in _divided(sources, holdout):
        if split not in open_units:
            open_units[split] = _Unit(f"{split}-{counts[split]:05d}")
            counts[split] += 1
        unit, text = open_units[split], document.text.encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        domain = domains.setdefault(document.domain, len(domains))
        chained = unit.text_hash.encode() + digest + domain.to_bytes(4, "little")
        unit.text_hash = hashlib.blake2b(chained, digest_size=16).hexdigest()
        unit.texts.append(document.text)
        unit.places.append(document.place)
        unit.domains.append(domain)
        unit.num_bytes += len(text)
        if unit.num_bytes >= shard_bytes:
            yield open_units.pop(split)
    yield from open_units.values()


def _divided(sources: Mapping[str, Iterable[Document]], holdout: Holdout | None) -> Iterator[tuple[str, Document]]:
    """Documents with their splits."""
    for split, documents in sources.items():
        for document in filter(lambda each: each.text, documents):
            if split == "train" and holdout is not None:
                yield from holdout.divide(document)
            else:
                yield split, document


def _encode(unit: _Unit, tokenizer: Encoder | MarkingEncoder, out_dir: Path, settings: Settings) -> Shard:
    """Write a unit's two files."""
    digest, dtype = hashlib.sha256(), settings.token_dtype
    lengths: list[int] = []
    with replacing(out_dir / f"{unit.name}{_TOKENS}") as temporary, temporary.open("wb") as handle:
        sized = zip(unit.texts, unit.places, accumulate(map(len, unit.texts)), strict=True)
        for _, group in groupby(sized, key=lambda each: each[2] // _BATCH_CHARS):
            batch = list(group)
            for ids in _encoded(tokenizer, [text for text, _, _ in batch], [place for _, place, _ in batch]):
                block = np.array(ids, dtype).tobytes()
                digest.update(block)
                handle.write(block)
                lengths.append(len(ids))
    columns = np.cumsum(lengths, dtype=_INDEX_DTYPE), np.array(unit.domains, _INDEX_DTYPE)
    index = np.stack(columns, axis=1).tobytes()
    digest.update(index)
    with replacing(out_dir / f"{unit.name}{_INDEX}") as temporary:
        temporary.write_bytes(index)
    return Shard(
        name=unit.name,
        text_hash=unit.text_hash,
        sha256=digest.hexdigest(),
        num_tokens=sum(lengths),
        num_documents=len(lengths),
        num_bytes=unit.num_bytes,
    )


def _encoded(tokenizer: Encoder | MarkingEncoder, texts: list[str], places: list[str]) -> list[list[int]]:
    if isinstance(tokenizer, MarkingEncoder):
        return tokenizer.encode_marked(texts, places)
    return [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)]


def _finish(
    out_dir: Path, settings: Settings, shards: list[Shard], domains: tuple[str, ...], wanted: tuple[str, ...]
) -> Manifest:
    """Write ``data.json`` and remove what does not belong to it."""
    splits: dict[str, tuple[Shard, ...]] = {}
    for shard in sorted(shards, key=lambda shard: (len(shard.name), shard.name)):
        split = shard.name.rpartition("-")[0]
        splits[split] = (*splits.get(split, ()), shard)
    for split in wanted:
        if split not in splits:
            raise UserError(f"{out_dir}: split {split!r} has no documents; give it some text, or lower --val-fraction")
    num_documents = sum(shard.num_documents for shard in shards)
    if settings.val_fraction and "val" not in splits:
        raise UserError(
            f"{out_dir}: too little text to hold any out ({numbers.counted(num_documents, 'document')}, "
            f"{numbers.size_in_bytes(sum(shard.num_bytes for shard in shards))}); give more, raise --val-fraction, or name some with --val"
        )
    hashes = {split: [shard.sha256 for shard in held] for split, held in splits.items()}
    told = settings.model_dump(exclude=set() if settings.is_marked else {"is_marked"})
    described = json.dumps([told, domains, hashes], sort_keys=True)
    manifest = Manifest(
        settings=settings,
        data_hash=hashlib.sha256(described.encode()).hexdigest(),
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_documents=num_documents,
        num_bytes=sum(shard.num_bytes for shard in shards),
        domains=domains,
        splits=dict(sorted(splits.items())),
    )
    kept = {path for shard in shards for path in _files(out_dir, shard, settings)}
    for path in out_dir.iterdir():
        if (path.suffix in (_TOKENS, _INDEX) and path not in kept) or path.name.endswith(".partial"):
            remove(path)
    write_json(out_dir / MANIFEST, manifest.model_dump(mode="json"))
    remove(out_dir / _PROGRESS)
    return manifest


Unit = TypeVar("Unit")
Result = TypeVar("Result")


def in_order(processes: int, work: Callable[[Unit], Result], units: Iterable[Unit]) -> Generator[Result, None, None]:
    """``work`` of each unit, in the order of the units; with one process, it is done in the caller's.

    Both are pickled, ``work`` once for each worker; results should be small. Not more than two units a process are under
    way, so that memory stays bounded. What ``work`` raises is raised here; where that, an interrupt or ``close`` ends it
    early, the units in hand are finished and their results dropped.

    Raises:
        UserError: a worker process died.
    """
    if processes == 1:
        yield from map(work, units)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of the caller hold
    pool = ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(work,))
    waiting: deque[Future[Result]] = deque()
    try:
        for unit in units:
            while waiting and (waiting[0].done() or len(waiting) == 2 * processes):
                yield waiting.popleft().result()
            waiting.append(pool.submit(_work, unit))
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            f"one of {processes} worker processes died, perhaps for lack of memory; "
            "start again to go on where it was; on fewer cores (taskset -c 0) it needs less"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker: list[Callable[[Any], Any]] = []
"""In a worker process, its ``work``: a pool offers no other place for what is sent once and not with every unit."""


def _start_worker(work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.append(work)


def _end_with_parent() -> None:
    """A pool's workers outlive a parent that was killed, for they hold both ends of its queue."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "no worker process"
    parent.join()
    os._exit(1)


def _work(unit: Any) -> Any:
    return _worker[0](unit)
