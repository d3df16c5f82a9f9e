"""Writing token shards: in constant memory, in parallel, and again without repeating what is done.

A shard is one unit of work: about ``shard_bytes`` of text, encoded by one process. Which documents it holds follows
from the order of the documents alone, so the bytes do not depend on the number of processes, and a run that was killed
reads its sources again but encodes only the shards that are missing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json, remove, replacing, write_json
from stretto.data.shards import INDEX, INDEX_DTYPE, MANIFEST, TOKENS, Manifest, Settings, Shard, file_sizes, token_dtype
from stretto.data.sources import Document
from stretto.data.workers import in_order

_PROGRESS = "unfinished"
"""Folder of the records of shards that are done while others are not."""
TOKENIZER = "tokenizer"
"""Folder beside the shards where callers keep the tokenizer that made them."""
_BATCH_CHARS = 1 << 19
"""Text encoded between two writes: bounds what a process holds as Python integers."""


class Encoder(Protocol):
    """What is asked of a tokenizer here, which lies in a sibling package; `stretto.text.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    def fingerprint(self) -> str: ...

    def encode_batch(self, texts: Sequence[str], /) -> list[list[int]]: ...


@dataclass(slots=True)
class _Unit:
    """Documents of a shard to be, on their way to a worker."""

    name: str
    texts: list[str] = field(default_factory=list)
    domains: list[int] = field(default_factory=list)
    num_bytes: int = 0
    text_hash: str = ""


def tokenise(
    sources: Mapping[str, Iterable[Document]],
    tokenizer: Encoder,
    out_dir: Path | str,
    *,
    processes: int | None = None,
    val_fraction: float = 0.0,
    shard_bytes: int = 8 << 20,
    advance: Callable[[int], None] | None = None,
) -> Manifest:
    """Encode documents into token shards; each document ends with the tokenizer's eos token.

    Memory is bounded by ``shard_bytes`` times the processes, whatever the input. Called again after a kill, or after
    documents were appended, it encodes only what is missing.

    Args:
        sources: documents of each split; names are ``train``, ``val`` or others.
        tokenizer: encodes; special tokens spelled in a document are ordinary text.
        out_dir: the data folder.
        processes: workers; None takes the cores this process may use, 1 works in this process.
        val_fraction: share of the ``train`` documents that go to ``val``, chosen by a hash of the text: a document
            stays on its side when others come or go, and copies of it never end up on both.
        shard_bytes: UTF-8 bytes of text in a shard.
        advance: called with the bytes of text that were encoded, or found done.

    Raises:
        UserError: bad input, a folder that holds other data, or a full disk.
    """
    out_dir = Path(out_dir)
    if not 0 <= val_fraction < 1:
        raise UserError(f"val_fraction: {val_fraction} lies outside 0 <= x < 1")
    if val_fraction and "val" in sources:
        raise UserError("val_fraction: the sources have a val split of their own; set it to 0")
    settings = Settings(
        tokenizer=tokenizer.fingerprint(),
        vocab_size=tokenizer.vocab_size,
        dtype="uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        val_fraction=val_fraction,
        shard_bytes=shard_bytes,
    )
    done = _reopen(out_dir, settings)
    domains: dict[str, int] = {}
    shards: list[Shard] = []

    def finish(shard: Shard) -> None:
        write_json(out_dir / _PROGRESS / f"{shard.name}.json", shard.model_dump())
        collect(shard)

    def collect(shard: Shard) -> None:
        shards.append(shard)
        if advance:
            advance(shard.num_bytes)

    work = partial(_encode, tokenizer=tokenizer, out_dir=out_dir, settings=settings)
    with in_order(processes or _num_cores(), work, finish) as submit:
        for unit in _units(sources, val_fraction, shard_bytes, domains):
            known = done.get(unit.name)
            if known and known.text_hash == unit.text_hash and _intact(out_dir, known, settings):
                collect(known)
            else:
                submit(unit)
    return _finish(out_dir, settings, shards, tuple(domains), tuple(sources))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _reopen(out_dir: Path, settings: Settings) -> dict[str, Shard]:
    """Records of the shards that an earlier call finished in ``out_dir``, which is marked unfinished again."""
    progress = out_dir / _PROGRESS
    if (out_dir / MANIFEST).exists():
        manifest = validate(Manifest, read_json(out_dir / MANIFEST), str(out_dir / MANIFEST))
        _require_same(out_dir, manifest.settings, settings)
        for shard in (shard for split in manifest.splits.values() for shard in split):
            write_json(progress / f"{shard.name}.json", shard.model_dump())
    elif (progress / "settings.json").exists():
        path = progress / "settings.json"
        _require_same(out_dir, validate(Settings, read_json(path), str(path)), settings)
    elif out_dir.exists() and any(path.name != TOKENIZER for path in out_dir.iterdir()):
        raise UserError(f"{out_dir}: holds other files and no {MANIFEST}; choose an empty or a new folder")
    write_json(progress / "settings.json", settings.model_dump())
    (out_dir / MANIFEST).unlink(missing_ok=True)
    records = [path for path in progress.glob("*-*.json") if not path.name.startswith(".")]
    return {path.stem: validate(Shard, read_json(path), str(path)) for path in records}


def _require_same(out_dir: Path, old: Settings, new: Settings) -> None:
    for name in Settings.model_fields:
        if getattr(old, name) != getattr(new, name):
            raise UserError(
                f"{out_dir}: {name}: was {getattr(old, name)}, is now {getattr(new, name)}; choose a new folder or delete this one"
            )


def _units(
    sources: Mapping[str, Iterable[Document]], val_fraction: float, shard_bytes: int, domains: dict[str, int]
) -> Iterator[_Unit]:
    """Cut the documents into units; number the domains by first appearance."""
    counts: dict[str, int] = {}
    open_units: dict[str, _Unit] = {}
    for source_split, documents in sources.items():
        for document in documents:
            if not document.text:
                continue
            text = document.text.encode()
            digest = hashlib.blake2b(text, digest_size=16).digest()
            is_val = source_split == "train" and int.from_bytes(digest[:8], "little") < val_fraction * 2**64
            split = "val" if is_val else source_split
            if split not in open_units:
                open_units[split] = _Unit(f"{split}-{counts.setdefault(split, 0):05d}")
                counts[split] += 1
            unit = open_units[split]
            domain = domains.setdefault(document.domain, len(domains))
            unit.text_hash = _chain(unit.text_hash, digest, domain)
            unit.texts.append(document.text)
            unit.domains.append(domain)
            unit.num_bytes += len(text)
            if unit.num_bytes >= shard_bytes:
                yield open_units.pop(split)
    yield from open_units.values()


def _chain(text_hash: str, digest: bytes, domain: int) -> str:
    return hashlib.blake2b(text_hash.encode() + digest + domain.to_bytes(4, "little"), digest_size=16).hexdigest()


def _encode(unit: _Unit, tokenizer: Encoder, out_dir: Path, settings: Settings) -> Shard:
    """Write a unit's two files."""
    digest, dtype = hashlib.sha256(), token_dtype(settings)
    ends: list[int] = []
    num_tokens = 0
    with replacing(out_dir / f"{unit.name}{TOKENS}") as temporary, temporary.open("wb") as handle:
        for batch in _batches(unit.texts):
            for ids in tokenizer.encode_batch(batch):
                ids.append(tokenizer.eos_id)
                block = np.array(ids, dtype).tobytes()
                digest.update(block)
                handle.write(block)
                num_tokens += len(ids)
                ends.append(num_tokens)
    index = np.stack([np.array(ends, INDEX_DTYPE), np.array(unit.domains, INDEX_DTYPE)], axis=1).tobytes()
    digest.update(index)
    with replacing(out_dir / f"{unit.name}{INDEX}") as temporary:
        temporary.write_bytes(index)
    return Shard(
        name=unit.name,
        text_hash=unit.text_hash,
        sha256=digest.hexdigest(),
        num_tokens=num_tokens,
        num_documents=len(ends),
        num_bytes=unit.num_bytes,
    )


def _batches(texts: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        batch.append(text)
        num_chars += len(text)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _intact(out_dir: Path, shard: Shard, settings: Settings) -> bool:
    sizes = {out_dir / f"{shard.name}{suffix}": size for suffix, size in file_sizes(shard, settings).items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())


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
            raise UserError(f"{out_dir}: split {split!r} has no documents; give it some text, or lower val_fraction")
    if settings.val_fraction and "val" not in splits:
        num = sum(shard.num_documents for shard in shards)
        raise UserError(f"val_fraction: {settings.val_fraction} of {num} documents leaves val empty; raise it")
    described = [
        settings.model_dump(),
        domains,
        {split: [shard.sha256 for shard in held] for split, held in splits.items()},
    ]
    manifest = Manifest(
        settings=settings,
        data_hash=hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest(),
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_documents=sum(shard.num_documents for shard in shards),
        num_bytes=sum(shard.num_bytes for shard in shards),
        domains=domains,
        splits=dict(sorted(splits.items())),
    )
    kept = {f"{shard.name}{suffix}" for shard in shards for suffix in (TOKENS, INDEX)}
    for path in out_dir.iterdir():
        if (path.suffix in (TOKENS, INDEX) and path.name not in kept) or path.name.endswith(".partial"):
            remove(path)
    write_json(out_dir / MANIFEST, manifest.model_dump(mode="json"))
    remove(out_dir / _PROGRESS)
    return manifest
