"""Documents from files: text, JSONL (also compressed), Parquet, folders of them, and Hugging Face datasets.

Everything streams: memory is bounded by one document (JSONL, Parquet) or by `MAX_TEXT_CHARS` (text files).
A file that is not what its name says is a `UserError` that names the file, the line or field, and the remedy.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError, nearest

MAX_TEXT_CHARS = 4 << 20
"""A text file is one document; a longer one is cut at a line's end into several, so that memory stays bounded."""
COMPRESSIONS = (".gz", ".xz", ".zst", ".bz2")
_JSONL = (".jsonl", ".ndjson")
_TEXT = (".txt", ".text", ".md", ".rst", ".tex", ".py")
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
_HIDDEN = re.compile(r"/(\.|__pycache__)")
_DATASET_NAME = r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?"
_DATASET_MARKS = ("dataset_info.json", "dataset_dict.json", "state.json")


@dataclass(frozen=True, slots=True)
class Document:
    """One text, written by a source."""

    text: str
    domain: str = ""
    """Where it comes from (``code``, ``books``); empty where nobody says."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of a record's fields, in JSONL, Parquet and Hugging Face datasets."""

    text: str = "text"
    domain: str | None = None
    """None: documents get no domain."""


def find_splits(path: Path | str) -> dict[str, list[Path]]:
    """Files of each split below a file or folder, in the order in which they are read.

    In a folder, names that begin with a split's name (``train-00000.jsonl.xz``, ``validation.parquet``) belong to it;
    where none does, all are ``train``. JSONL and Parquet go before loose text: a README beside them is not read.

    Raises:
        UserError: nothing is there, or nothing that can be read.
    """
    path = Path(path)
    if path.is_file():
        return {"train": [path]}
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; check the path")
    found = (file for file in path.rglob("*") if file.is_file())
    files = sorted(file for file in found if not _HIDDEN.search(f"/{file.relative_to(path)}"))
    records = [file for file in files if _kind(file) in (*_JSONL, ".parquet")]
    chosen = records or [file for file in files if _kind(file) in _TEXT]
    if not chosen:
        known = f"{', '.join((*_JSONL, '.parquet', *_TEXT))} (JSONL and text also {', '.join(COMPRESSIONS)})"
        raise UserError(f"{path}: holds no file that can be read; known are {known}")
    splits: dict[str, list[Path]] = {}
    for file in chosen:
        word = re.split("[^a-z]", file.name.lower())[0]
        splits.setdefault(_SPLITS.get(word, ""), []).append(file)
    if "" in splits:  # files without a split's name are training text
        splits["train"] = sorted(splits.pop("") + splits.get("train", []))
    return splits


def open_sources(path: Path | str, fields: Fields = Fields()) -> dict[str, Iterator[Document]]:
    """Documents of each split of a file, a folder, or a Hugging Face dataset by folder or by name.

    A name may carry a configuration: ``wikitext:wikitext-2-raw-v1``. Of a dataset only the splits ``train`` and
    ``validation`` are taken.

    Raises:
        UserError: nothing is there; the rest is found out while reading.
    """
    here = Path(path)
    if here.is_dir() and any((here / mark).is_file() for mark in _DATASET_MARKS):
        return _open_dataset(str(path), fields, on_disk=True)
    is_name = re.fullmatch(_DATASET_NAME, str(path)) and here.suffix not in (*_JSONL, *_TEXT, *COMPRESSIONS, ".parquet")
    if here.exists() or not is_name:
        splits = find_splits(here)
        return {split: read_files(files, fields) for split, files in splits.items() if split != "test"}
    return _open_dataset(str(path), fields, on_disk=False)


def read_files(files: Sequence[Path | str], fields: Fields = Fields()) -> Iterator[Document]:
    """Documents of ``files``, one file after the other.

    Raises:
        UserError: a file is missing, empty, binary, mis-encoded or damaged, or a record lacks a field.
    """
    for file in map(Path, files):
        if not file.is_file():
            raise UserError(f"{file}: no such file; check the path")
        kind, is_empty = _kind(file), True
        read = _read_parquet if kind == ".parquet" else _read_jsonl if kind in _JSONL else _read_text
        for document in read(file, fields):
            is_empty = False
            yield document
        if is_empty:
            raise UserError(f"{file}: empty; remove it or fill it")


def _read_jsonl(file: Path, fields: Fields) -> Iterator[Document]:
    for number, line in _lines(file):
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            remedy = "every line must be one JSON object"
            raise UserError(f"{file}: line {number}: not JSON: {error.msg}; {remedy}") from None
        if not isinstance(record, dict):
            remedy = f"every line must be one, with a field {fields.text!r}"
            raise UserError(f"{file}: line {number}: not a JSON object; {remedy}")
        yield _document(record, fields, f"{file}: line {number}")


def _read_text(file: Path, _: Fields) -> Iterator[Document]:
    held: list[str] = []
    num_chars = 0
    for _number, line in _lines(file):
        held.append(line)
        num_chars += len(line)
        if num_chars >= MAX_TEXT_CHARS:
            yield Document("".join(held))
            held, num_chars = [], 0
    if held:
        yield Document("".join(held))


def _read_parquet(file: Path, fields: Fields) -> Iterator[Document]:
    import pyarrow  # slow to import, and only needed here
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            columns = [name for name in (fields.text, fields.domain) if name]
            for name in columns:
                if name not in table.schema_arrow.names:
                    raise UserError(_lacks(str(file), name, table.schema_arrow.names))
            row = 0
            for batch in table.iter_batches(batch_size=64, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield _document(record, fields, f"{file}: row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"not readable as Parquet: {_short(error)}"
        raise UserError(f"{file}: {problem}; the file is damaged, fetch it again") from None


def _open_dataset(name: str, fields: Fields, on_disk: bool) -> dict[str, Iterator[Document]]:
    import datasets  # seconds to import, and only needed here

    try:
        if on_disk:
            loaded = datasets.load_from_disk(name)
        else:
            repository, _, configuration = name.partition(":")
            loaded = datasets.load_dataset(repository, configuration or None, streaming=True)
    except Exception as error:  # the library and the network raise what they like
        nowhere = "no file or folder here, and no dataset that the Hub gives"
        problem = "not readable as a saved dataset" if on_disk else nowhere
        raise UserError(f"{name}: {problem}: {_short(error)}; check the name") from None
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    named = {_SPLITS.get(str(split), str(split)): rows for split, rows in splits.items()}
    wanted = {split: rows for split, rows in named.items() if split in ("train", "val")}
    if not wanted:
        found = ", ".join(map(str, splits))
        raise UserError(f"{name}: no split 'train' or 'validation' (it has {found}); save the one you want as JSONL")

    def read(split: str) -> Iterator[Document]:
        for number, record in enumerate(wanted[split], start=1):
            yield _document(record, fields, f"{name}: {split}: row {number}")

    return {split: read(split) for split in wanted}


def _document(record: dict[str, Any], fields: Fields, place: str) -> Document:
    text = record.get(fields.text)
    if not isinstance(text, str):
        if fields.text not in record:
            raise UserError(_lacks(place, fields.text, record))
        problem = f"a {type(text).__name__}, not text"
        raise UserError(f"{place}: field {fields.text!r}: {problem}; name the field that holds the text")
    if fields.domain and fields.domain not in record:
        raise UserError(_lacks(place, fields.domain, record))
    try:
        text.encode()
    except UnicodeEncodeError:
        problem = "half of a surrogate pair, which is no character"
        raise UserError(f"{place}: field {fields.text!r}: {problem}; remove it") from None
    return Document(text, str(record[fields.domain]) if fields.domain else "")


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, line ends kept, decompressed as the suffix says, decoded as UTF-8."""
    packed = file.suffix.lower() in COMPRESSIONS
    number = 0
    try:
        with _open(file) as handle:
            for number, raw in enumerate(handle, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                        raise UserError(f"{file}: line 1: UTF-16 text; convert it: iconv -f utf-16 -t utf-8")
                if b"\0" in raw:
                    problem = "a NUL byte: this is a binary file"
                    raise UserError(f"{file}: line {number}: {problem}; give text, JSONL or Parquet")
                yield number, raw.decode()
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 (byte 0x{error.object[error.start]:02x})"
        remedy = "convert it, for example: iconv -f latin1 -t utf-8"
        raise UserError(f"{file}: line {number}: {problem}; {remedy}") from None
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        remedy = "the archive is damaged or not one, fetch it again" if packed else "check its permissions"
        raise UserError(f"{file}: cannot be read: {_short(error)}; {remedy}") from None


def _open(file: Path) -> Any:
    if file.suffix.lower() == ".zst":
        import pyarrow  # slow to import; zstandard's own reader takes a truncated file for a whole one

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"), 1 << 18)
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    return openers.get(file.suffix.lower(), open)(file, "rb")


def _short(error: BaseException) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _kind(file: Path) -> str:
    """Suffix below any compression: ``.jsonl`` for ``a.jsonl.gz``."""
    return Path(file.stem).suffix.lower() if file.suffix.lower() in COMPRESSIONS else file.suffix.lower()


def _lacks(place: str, name: str, has: Any) -> str:
    names = [str(field) for field in has]
    return f"{place}: no field {name!r}{nearest(name, names)}; it has {', '.join(names) or 'none'}; name the one to use"
