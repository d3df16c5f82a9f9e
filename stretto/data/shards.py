"""Token shards: tokenised documents on disk, written once and then memory-mapped.

A data folder holds, for each split, ``{split}-00000.tokens`` (little-endian uint16, or uint32 for a large vocabulary) and
``{split}-00000.index`` (pairs of little-endian int64, one per document: end offset in the shard, number of the domain), and one
``data.json`` for all of them, written last: a folder without it is unfinished. In the shards of conversations a number is twice
the token's id, plus one if a loss is taken of the token.

A shard is the unit of work: about ``shard_bytes`` of text, encoded by one process. Its documents depend on the order of the
documents only, so the files are the same for any number of processes, and after a kill only the missing shards are encoded.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, groupby, islice
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stretto.base import numbers
from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.parent import end_with_parent
from stretto.base.paths import LOCK_FILE, read_json, remove, replacing, write_json
from stretto.data.holdout import By, Holdout
from stretto.data.sources import Document

MANIFEST = "data.json"
TOKENIZER = "tokenizer"
"""Folder beside the shards in which callers store the tokenizer."""
_TOKENS, _INDEX = ".tokens", ".index"
_INDEX_DTYPE = np.dtype("<i8")
_INDEX_FIELDS = 2
"""Columns of the index: end offset of the document in tokens, number of the domain."""
_PROGRESS = "unfinished"
"""Folder with the records of finished shards while others are unfinished."""
_BATCH_CHARS = 1 << 19
"""Characters of text encoded between two writes: limits the tokens that a process holds as Python integers."""


class Shard(Config):
    """Record of one shard. Written by the process that encoded it."""

    name: str
    text_hash: str
    """blake2b of the documents, in order. A shard with unchanged text is not encoded again."""
    sha256: str
    """Of the tokens file followed by the index file."""
    num_tokens: int
    num_documents: int
    num_bytes: int
    """UTF-8 bytes of text."""


class Settings(Config):
    """Settings common to all shards of a folder."""

    tokenizer: str
    """`Tokenizer.fingerprint`."""
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    val_fraction: float
    """0: the val split comes from the sources, or there is none."""
    val_by: By = "documents"
    shard_bytes: int
    is_marked: bool = False
    """Whether every number includes whether a loss is taken of its token; otherwise all tokens are targets."""
    start: tuple[int, ...] = ()
    """Ids with which every document begins, and with ``is_marked`` every prompt without a chat template, as the BOS of Llama."""

    @property
    def token_dtype(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype("<u2" if self.dtype == "uint16" else "<u4")


class Manifest(Config):
    """Content of ``data.json``."""

    settings: Settings
    data_hash: str
    """sha256 of the settings and of the hashes of all shards. Identifies the data in a checkpoint's lineage."""
    num_tokens: int
    num_documents: int
    num_bytes: int
    domains: tuple[str, ...]
    splits: dict[str, tuple[Shard, ...]]


def read_settings(folder: Path | str) -> Settings | None:
    """Settings of a data folder, finished or not; None if it was not started."""
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        return read_manifest(folder).settings
    begun = folder / _PROGRESS / "settings.json"
    return validate(Settings, read_json(begun), str(begun)) if begun.exists() else None


def read_manifest(folder: Path | str) -> Manifest:
    """``data.json`` of a data folder.

    Raises:
        UserError: the folder is missing or unfinished, or its manifest is damaged.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        remedy = "the folder is not token data, or its writing was interrupted: tokenise again"
        raise UserError(f"{path}: no such file; {remedy}")
    return validate(Manifest, read_json(path), str(path))


class TokenSet:
    """One split of a data folder, memory-mapped: documents by number, in the order of the sources."""

    def __init__(self, folder: Path | str, split: str = "train", verify: bool = False) -> None:
        """Open a split of the data folder ``folder``.

        Args:
            verify: also read all bytes and compare the hashes.

        Raises:
            UserError: no such split, or a shard is missing, truncated or changed.
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
            if damage := _damage(folder, shard, settings, verify) or _index_damage(folder, shard):
                raise UserError(damage)
        self._tokens = [np.memmap(folder / f"{shard.name}{_TOKENS}", settings.token_dtype, "r") for shard in shards]
        indexes = [np.memmap(folder / f"{shard.name}{_INDEX}", _INDEX_DTYPE, "r") for shard in shards]
        self._index = [index.reshape(-1, _INDEX_FIELDS) for index in indexes]
        self._first = np.cumsum([0, *(shard.num_documents for shard in shards)])
        self.num_documents = int(self._first[-1])
        self.num_tokens = sum(shard.num_tokens for shard in shards)

    @property
    def identity(self) -> str:
        """See `stretto.data.loader.Documents`."""
        return f"{self.split}:{self.manifest.data_hash}"

    @property
    def all_lengths(self) -> NDArray[np.int64]:
        """`lengths` of all documents."""
        return np.concatenate([np.diff(index[:, 0].astype(np.int64), prepend=0) for index in self._index])

    def lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of tokens of each document, its end-of-text token included."""
        shards = np.searchsorted(self._first, documents, side="right") - 1
        rows = documents - self._first[shards]
        lengths = np.zeros(len(documents), np.int64)
        for shard in np.unique(shards):
            here = shards == shard
            ends, at = self._index[shard][:, 0], rows[here]
            lengths[here] = ends[at] - np.where(at > 0, ends[at - 1], 0)
        return lengths

    def document(self, number: int) -> NDArray[np.unsignedinteger]:
        """All tokens of one document, as a view of the file if it has no marks."""
        numbers = self._numbers(number)
        return np.right_shift(numbers, 1, dtype=numbers.dtype) if self.manifest.settings.is_marked else numbers

    def learnt(self, number: int) -> NDArray[np.bool_] | None:
        """For each token of one document whether a loss is taken of it; None: of all."""
        return (self._numbers(number) & 1).astype(np.bool_) if self.manifest.settings.is_marked else None

    def _numbers(self, number: int) -> NDArray[np.unsignedinteger]:
        """The stored numbers of one document, as a view of the file."""
        assert 0 <= number < self.num_documents, f"document {number} of {self.num_documents}"
        shard = int(np.searchsorted(self._first, number, side="right")) - 1
        row, ends = int(number - self._first[shard]), self._index[shard][:, 0]
        return self._tokens[shard][int(ends[row - 1]) if row else 0 : int(ends[row])]

    def of_domain(self, domain: str) -> NDArray[np.int64]:
        """Numbers of the documents of a domain."""
        domains = np.concatenate([index[:, 1] for index in self._index])
        return np.flatnonzero(domains == self.manifest.domains.index(domain))


def _files(folder: Path, shard: Shard, settings: Settings) -> dict[Path, int]:
    """Files of a shard, with the size in bytes that each must have."""
    return {
        folder / f"{shard.name}{_TOKENS}": shard.num_tokens * settings.token_dtype.itemsize,
        folder / f"{shard.name}{_INDEX}": shard.num_documents * _INDEX_FIELDS * _INDEX_DTYPE.itemsize,
    }


def _damage(folder: Path, shard: Shard, settings: Settings, verify: bool = False) -> str | None:
    """Problem with a shard's files, by their sizes, with ``verify`` also by their hash; None: none."""
    digest = hashlib.sha256()
    for path, size in _files(folder, shard, settings).items():
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            problem = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            return f"{path}: {problem}; the shard is damaged: tokenise into this folder again to repair it"
        with path.open("rb") as handle:
            while verify and (block := handle.read(1 << 20)):
                digest.update(block)
    if verify and digest.hexdigest() != shard.sha256:
        path = folder / f"{shard.name}{_TOKENS}"
        return f"{path}: content does not match its hash in {MANIFEST}; delete it and tokenise again"
    return None


def _index_damage(folder: Path, shard: Shard) -> str | None:
    """Problem with the offsets in an index of the right size; None: none."""
    path = folder / f"{shard.name}{_INDEX}"
    ends = np.fromfile(path, _INDEX_DTYPE).reshape(-1, _INDEX_FIELDS)[:, 0]
    if len(ends) and ends[0] > 0 and ends[-1] == shard.num_tokens and (ends[1:] > ends[:-1]).all():
        return None
    return f"{path}: its offsets do not rise; the shard is damaged: delete it and tokenise into this folder again"


class Encoder(Protocol):
    """Interface of tokenizers, which are in a sibling package; `stretto.text.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: Sequence[str], /) -> list[list[int]]: ...


@runtime_checkable
class MarkingEncoder(Protocol):
    """Interface of encoders that mark the tokens of which a loss is taken; `stretto.text.chat.ChatEncoder` is one."""

    @property
    def vocab_size(self) -> int: ...
    def fingerprint(self) -> str: ...
    def encode_marked(self, texts: Sequence[str], places: Sequence[str], /) -> list[list[int]]:
        """For each text twice each token's id, plus one if a loss is taken of it; ends of documents included. ``places``: file and line of
        each text, for error messages.
        """


def tokenise(
    sources: Mapping[str, Iterable[Document]],
    tokenizer: Encoder | MarkingEncoder,
    out_dir: Path | str,
    *,
    processes: int | None = None,
    holdout: Holdout | None = None,
    start: Sequence[int] = (),
    shard_bytes: int = 8 << 20,
    advance: Callable[[int], None] = lambda num_bytes: None,
    name: str | None = None,
) -> Manifest:
    """Encode documents into token shards. Each document begins with ``start`` and ends with the tokenizer's end-of-text token.

    Memory is bounded by ``shard_bytes`` times the number of processes. After a kill, or after documents were appended, a second
    call encodes only the missing shards.

    Args:
        sources: documents of each split; names are ``train``, ``val`` or others.
        tokenizer: special tokens spelled in a document are encoded as ordinary text. A `MarkingEncoder` writes the starts and
            ends of documents itself.
        out_dir: the data folder.
        processes: worker processes; None: the cores that this process may use. With 1, and for a single shard, this process works.
        holdout: the part of ``train`` that goes to ``val``; None: nothing.
        start: ids that the tokenizer adds before a text.
        shard_bytes: UTF-8 bytes of text in a shard.
        advance: called with the bytes of text that were encoded or already finished.
        name: the user's name of the text, for messages; None: the data folder.

    Raises:
        UserError: bad input, a folder with other data, or a full disk.
    """
    out_dir = Path(out_dir)
    assert holdout is None or "val" not in sources, "the sources have a val split of their own"
    is_marked = isinstance(tokenizer, MarkingEncoder)
    settings = Settings(
        tokenizer=tokenizer.fingerprint(),
        vocab_size=tokenizer.vocab_size,
        dtype="uint16" if tokenizer.vocab_size << is_marked <= 1 << 16 else "uint32",
        is_marked=is_marked,
        start=tuple(start),
        val_fraction=holdout.fraction if holdout else 0.0,
        val_by=holdout.by if holdout else "documents",
        shard_bytes=shard_bytes,
    )
    finished = _reopen(out_dir, settings)
    domains: dict[str, int] = {}
    shards: list[Shard] = []

    def missing() -> Iterator[_Unit]:
        for unit in _units(sources, holdout, shard_bytes, domains):
            old = finished.get(unit.name)
            if old and old.text_hash == unit.text_hash and _damage(out_dir, old, settings) is None:
                shards.append(old)
                advance(old.num_bytes)
            else:
                yield unit

    if processes is None:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    work = partial(_encode, tokenizer=tokenizer, out_dir=out_dir, settings=settings)
    units = missing()
    first = list(islice(units, 2))
    if (
        sum(unit.num_bytes for unit in first) <= shard_bytes
    ):  # starting worker processes would take longer than the work
        processes = 1
    with closing(in_order(processes, work, chain(first, units))) as encoded:
        for shard in encoded:
            write_json(out_dir / _PROGRESS / f"{shard.name}.json", shard.model_dump())
            shards.append(shard)
            advance(shard.num_bytes)
    return _finish(out_dir, settings, shards, tuple(domains), tuple(sources), name or str(out_dir))


def require_own(out_dir: Path) -> None:
    """Raises `UserError` if the folder ``out_dir`` holds anything but token data, finished or not."""
    if not out_dir.is_dir() or read_settings(out_dir) is not None:
        return
    if {path.name for path in out_dir.iterdir()} - {TOKENIZER, LOCK_FILE}:
        raise UserError(f"{out_dir}: holds other files and no {MANIFEST}; choose an empty or a new folder")


def _reopen(out_dir: Path, settings: Settings) -> dict[str, Shard]:
    """Records of the shards that an earlier call finished in ``out_dir``. Marks the folder as unfinished again."""
    progress = out_dir / _PROGRESS
    old = read_settings(out_dir)
    finished: tuple[Shard, ...] = ()
    if (out_dir / MANIFEST).exists():
        finished = tuple(chain.from_iterable(read_manifest(out_dir).splits.values()))
    require_own(out_dir)
    # the held-out text may change: a shard with the same text stays valid
    for name in Settings.model_fields if old else ():
        before, now = getattr(old, name), getattr(settings, name)
        if before != now and name not in ("val_fraction", "val_by"):
            raise UserError(f"{out_dir}: {name}: was {before}, is now {now}; choose a new folder or delete this one")
    for shard in finished:
        write_json(progress / f"{shard.name}.json", shard.model_dump())
    write_json(progress / "settings.json", settings.model_dump())
    (out_dir / MANIFEST).unlink(missing_ok=True)
    records = [path for path in progress.glob("*-*.json") if not path.name.startswith(".")]
    return {path.stem: validate(Shard, read_json(path), str(path)) for path in records}


@dataclass(slots=True)
class _Unit:
    """Documents of a shard that is not encoded yet."""

    name: str
    texts: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    domains: list[int] = field(default_factory=list)
    num_bytes: int = 0
    text_hash: str = ""


def _units(
    sources: Mapping[str, Iterable[Document]], holdout: Holdout | None, shard_bytes: int, domains: dict[str, int]
) -> Iterator[_Unit]:
    """Divide the documents into units, and number the domains by first appearance."""
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
        for document in filter(lambda document: document.text, documents):
            if split == "train" and holdout is not None:
                yield from holdout.divide(document)
            else:
                yield split, document


def _encode(unit: _Unit, tokenizer: Encoder | MarkingEncoder, out_dir: Path, settings: Settings) -> Shard:
    """Encode a unit and write the two files of its shard."""
    digest, dtype = hashlib.sha256(), settings.token_dtype
    lengths: list[int] = []
    with replacing(out_dir / f"{unit.name}{_TOKENS}") as temporary, temporary.open("wb") as handle:
        sized = zip(unit.texts, unit.places, accumulate(map(len, unit.texts)), strict=True)
        for _, group in groupby(sized, key=lambda item: item[2] // _BATCH_CHARS):
            texts, places, _ = zip(*group, strict=True)
            for ids in _encoded(tokenizer, texts, places, settings.start):
                block = np.array(ids, dtype).tobytes()
                digest.update(block)
                handle.write(block)
                lengths.append(len(ids))
    index = np.stack([np.cumsum(lengths), unit.domains], axis=1).astype(_INDEX_DTYPE).tobytes()
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


def _encoded(
    tokenizer: Encoder | MarkingEncoder, texts: Sequence[str], places: Sequence[str], start: Sequence[int]
) -> list[list[int]]:
    """Numbers of each text as they are stored, starts and ends of documents included."""
    if isinstance(tokenizer, MarkingEncoder):
        return tokenizer.encode_marked(texts, places)
    return [[*start, *ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)]


def is_slight(folder: Path, *others: str, most: int = 1) -> bool:
    """Whether ``folder`` holds at most ``most`` shards, and nothing beside them but ``others``: seconds of work."""
    known = {_PROGRESS, LOCK_FILE, *others}
    names = [path.name for path in folder.iterdir() if path.suffix not in (_TOKENS, _INDEX)]
    return set(names) <= known and sum(path.suffix == _TOKENS for path in folder.iterdir()) <= most


def forget_shards(folder: Path) -> None:
    """Delete the shards in the data folder ``folder``, finished or not, and the records of them. Other files stay."""
    shards = [path for path in folder.iterdir() if path.suffix in (_TOKENS, _INDEX)]
    for path in (*shards, folder / _PROGRESS, folder / MANIFEST):  # after a kill, the records still name the settings
        remove(path)


def _finish(
    out_dir: Path,
    settings: Settings,
    shards: list[Shard],
    domains: tuple[str, ...],
    required: tuple[str, ...],
    name: str,
) -> Manifest:
    """Write ``data.json`` and remove files that do not belong to it. ``name``: see `tokenise`."""
    splits: dict[str, tuple[Shard, ...]] = {}
    for shard in sorted(shards, key=lambda shard: (len(shard.name), shard.name)):
        split = shard.name.rpartition("-")[0]
        splits[split] = (*splits.get(split, ()), shard)
    for split in required:
        if split not in splits:
            raise UserError(f"{name}: split {split!r} has no documents; give it some text, or lower --val-fraction")
    num_documents, num_bytes = sum(each.num_documents for each in shards), sum(each.num_bytes for each in shards)
    if settings.val_fraction and "val" not in splits:
        size = f"{numbers.counted(num_documents, 'document')}, {numbers.size_in_bytes(num_bytes)}"
        raise UserError(
            f"{name}: too little text to hold any out ({size}); give more, raise --val-fraction, or name held-out text with --val"
        )
    hashes = {split: [shard.sha256 for shard in of_split] for split, of_split in splits.items()}
    fields = settings.model_dump(exclude={name for name in ("is_marked", "start") if not getattr(settings, name)})
    description = json.dumps([fields, domains, hashes], sort_keys=True)
    manifest = Manifest(
        settings=settings,
        data_hash=hashlib.sha256(description.encode()).hexdigest(),
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_documents=num_documents,
        num_bytes=num_bytes,
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
    """Results of ``work`` for each unit, in the order of the units. With one process, the caller's process works.

    ``work`` is pickled once per worker, and each unit once; results should be small. At most two units per process are submitted, so
    that memory stays bounded. Exceptions of ``work`` are raised here. After an exception, an interrupt or ``close``, submitted units
    are finished and their results dropped.

    Raises:
        UserError: a worker process died.
    """
    if processes == 1:
        yield from map(work, units)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of the caller hold
    pool = ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(work, os.getpid()))
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
            "start again to continue; with fewer cores (taskset -c 0) less memory is needed"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker: list[Callable[[Any], Any]] = []
"""In a worker process, its ``work``: a pool can send an object once per worker only through the initialiser."""


def _start_worker(work: Callable[[Any], Any], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    end_with_parent(parent)
    _worker.append(work)


def _work(unit: Any) -> Any:
    return _worker[0](unit)
