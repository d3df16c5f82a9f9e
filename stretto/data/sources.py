"""Documents from files: text and source code, JSONL, CSV (also compressed), Parquet, folders of them, and Hugging Face datasets.

Everything streams: memory is bounded by one line of records, and by `MAX_TEXT_CHARS` of text: a longer document, with or
without lines, becomes several. A file that is not what its name says is a `UserError` that names the file, the line or
field, and the remedy; a text file among others in a folder is left out then, and told.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import charset_normalizer

from stretto.base.errors import UserError, nearest, one_line
from stretto.data.files import (
    COMPRESSIONS,
    JSON_LINES,
    RECORDS,
    SPLITS,
    TABLES,
    TEXT,
    Found,
    LeftOut,
    find_files,
    kind_of,
)

MAX_TEXT_CHARS = 4 << 20
"""A longer document is cut, at a line's end or a word's, into several, so that memory stays bounded."""
MAX_LINE_BYTES = 32 << 20
"""A longer line of a record file is refused: a record has to be read whole."""
_CHUNK_BYTES = 1 << 20
_DATASET_NAME = r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?"
_DATASET_MARKS = ("dataset_info.json", "dataset_dict.json", "state.json")
_ENCODINGS = ["gb18030", "big5", "shift_jis", "euc_jp", "euc_kr", "cp1252", "cp1251", "koi8_r"]
"""Told apart where text is not UTF-8: of relatives (Latin-1 and cp1252, GBK and GB18030) the one that includes the other."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text, written by a source."""

    text: str
    domain: str = ""
    """Where it comes from (``code``, ``books``); empty where nobody says."""
    place: str = ""
    """Of a conversation: its file and line, for messages."""


class Form(Protocol):
    """What a record of JSONL, CSV, Parquet or a Hugging Face dataset becomes."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Fields that every record has and that alone are read; None: all are."""

    @property
    def blank(self) -> str:
        """What a document without text is called where it is told what was left out."""

    def document(self, record: dict[str, Any], place: str) -> Document:
        """Raises `UserError`: the record, which stands at ``place``, is not what it should be."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of a record's fields: a `Form`, and the one in which plain text is read, too."""

    text: str = "text"
    domain: str | None = None
    """None: documents get no domain."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text, *([self.domain] if self.domain else []))

    @property
    def blank(self) -> str:
        return "blank documents"

    def document(self, record: dict[str, Any], place: str) -> Document:
        text = record.get(self.text)
        if self.text in record and text is None:
            text = ""
        if not isinstance(text, str):
            if self.text not in record:
                raise UserError(_lacks(place, self.text, record))
            problem = f"a {type(text).__name__}, not text"
            raise UserError(f"{place}: field {self.text!r}: {problem}; name the field that holds it with --text-field")
        if self.domain and self.domain not in record:
            raise UserError(_lacks(place, self.domain, record))
        if not is_writable(text):
            problem = "half of a surrogate pair, which is no character"
            raise UserError(f"{place}: field {self.text!r}: {problem}; remove it")
        return Document(text, str(record[self.domain]) if self.domain else "")


def is_writable(text: str) -> bool:
    """Whether it has bytes: JSON may spell half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Source:
    """Documents by split, to be read as often as need be; made by `open_source`."""

    name: str
    splits: tuple[str, ...]
    """``train``, and ``val`` where the source brings its own."""
    left_out: LeftOut
    """What will not be read, as far as names and sizes tell."""
    _open: Mapping[str, Callable[[LeftOut], Iterator[Document]]]
    files: Mapping[str, Sequence[Path]]
    """Of each split; empty for a dataset."""
    form: Form

    def read(self, split: str, left_out: LeftOut | None = None) -> Iterator[Document]:
        """The documents of ``split`` that are not blank; what else is left out while reading is added to ``left_out``.

        Raises:
            UserError: a file is empty, binary, mis-encoded or damaged, or a record lacks a field.
        """
        return self._open[split](LeftOut() if left_out is None else left_out)

    def sample(self, num_chars: int) -> Iterator[Document]:
        """Training documents of about ``num_chars`` characters: the beginning of every file, in proportion to its size."""
        files = self.files.get("train", ())
        sizes = [file.stat().st_size for file in files]
        readers = [read_files([file], self.form, skips=True) for file in files] or [self.read("train")]
        num_taken, due, total = 0, 0.0, sum(sizes) or 1
        for reader, size in zip(readers, sizes or [1], strict=True):
            due += num_chars * size / total
            while num_taken < due and (document := next(reader, None)) is not None:
                num_taken += len(document.text)
                yield document


def open_source(path: Path | str, form: Form = Fields()) -> Source:
    """A file, a folder, or a Hugging Face dataset by folder or by name.

    A name may carry a configuration: ``wikitext:wikitext-2-raw-v1``. Of a dataset only the splits ``train`` and
    ``validation`` are taken.

    Raises:
        UserError: nothing is there; the rest is found out while reading.
    """
    here = Path(path)
    if here.is_dir() and any((here / mark).is_file() for mark in _DATASET_MARKS):
        return _open_dataset(str(path), form, on_disk=True)
    is_name = re.fullmatch(_DATASET_NAME, str(path)) and here.suffix not in (*RECORDS, *TEXT, *COMPRESSIONS)
    if not here.exists() and is_name:
        return _open_dataset(str(path), form, on_disk=False)
    found = find_files(here)
    readers = {split: _reader(found, split, form) for split in found.splits}
    return Source(str(path), tuple(readers), found.left_out, readers, found.splits, form)


def _reader(found: Found, split: str, form: Form) -> Callable[[LeftOut], Iterator[Document]]:
    return lambda left_out: read_files(found.splits[split], form, left_out, skips=found.is_folder)


def read_files(
    files: Sequence[Path | str], form: Form = Fields(), left_out: LeftOut | None = None, *, skips: bool = False
) -> Iterator[Document]:
    """Documents of ``files``, one file after the other.

    Args:
        left_out: counts what is left out.
        skips: leave files out that are empty or not text, which are errors otherwise.

    Raises:
        UserError: a file is missing, empty, binary, mis-encoded or damaged, or a record lacks a field.
    """
    left_out = LeftOut() if left_out is None else left_out
    for file in map(Path, files):
        if not file.is_file():
            raise UserError(f"{file}: no such file; check the path")
        kind, is_empty = kind_of(file), True
        read = _read_parquet if kind == ".parquet" else _read_table if kind in TABLES else _read_text
        read = _read_jsonl if kind in JSON_LINES else read
        try:
            for document in read(file, form):
                if not document.text or document.text.isspace():
                    left_out.add(form.blank, file.name)
                    continue
                is_empty = False
                yield from _pieces(document)
        except _NotTextError as error:
            if not skips or kind in RECORDS or not is_empty:
                raise UserError(str(error)) from None
            left_out.add(error.kind, file.name, file.stat().st_size)
        if is_empty and not skips:
            raise UserError(f"{file}: empty; remove it or fill it")


class Rows(list[tuple[dict[str, Any], str]]):
    """Records as they are, each with the place where it stands: a `Form` that keeps what is read through it."""

    columns, blank = None, "records"

    def document(self, record: dict[str, Any], place: str) -> Document:
        self.append((record, place))
        return Document("a record")


class _NotTextError(Exception):
    """A file is not UTF-8 text; its ``kind`` is told of a file that can be left out."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def _pieces(document: Document) -> Iterator[Document]:
    """``document`` in pieces of at most `MAX_TEXT_CHARS`; a conversation is one piece."""
    start, text = 0, document.text
    while len(text) - start > MAX_TEXT_CHARS and not document.place:
        end = cut_before(text, start + MAX_TEXT_CHARS, start + MAX_TEXT_CHARS // 2)
        yield replace(document, text=text[start:end])
        start = end
    yield replace(document, text=text[start:])


def cut_before(text: str, end: int, low: int) -> int:
    """Where to cut ``text`` before ``end`` and after ``low``: behind a line, else behind a word, else at ``end``."""
    for mark in ("\n", " ", "\u3002", "\t"):  # Chinese and Japanese sentences end without a space
        if (place := text.rfind(mark, low, end)) >= 0:
            return place + 1
    return end


def _read_jsonl(file: Path, form: Form) -> Iterator[Document]:
    for number, line in _lines(file):
        if line.isspace():
            continue
        if number == 1 and line.lstrip().startswith("["):
            raise UserError(
                f"{file}: line 1: a JSON array; write one object a line, for example: jq -c '.[]' {file.name}"
            )
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            problem = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            remedy = "every line must be one JSON object"
            raise UserError(f"{file}: line {number}: not JSON: {problem}; {remedy}") from None
        if not isinstance(record, dict):
            remedy = "every line must be one" + "".join(f", with a field {name!r}" for name in (form.columns or ())[:1])
            raise UserError(f"{file}: line {number}: not a JSON object; {remedy}")
        yield form.document(record, f"{file}: line {number}")


def _read_table(file: Path, form: Form) -> Iterator[Document]:
    """Rows of a CSV or TSV file with a header; a comma may be a semicolon, as spreadsheets of half the world write it."""
    csv.field_size_limit(MAX_LINE_BYTES)  # the csv module's, for the process
    lines = (line for _, line in _lines(file))
    header = next(lines, "")
    marks = "\t" if kind_of(file) == ".tsv" else ",;\t"
    rows = csv.reader(_chained(header, lines), delimiter=max(marks, key=header.count))
    try:
        names = [name.strip() for name in next(rows, [])]
        for name in form.columns or ():
            if name not in names:
                raise UserError(_lacks(f"{file}: line 1", name, names))
        for row in rows:
            if len(row) != len(names):
                if not row:
                    continue
                problem = f"{len(row)} columns, the header has {len(names)}"
                raise UserError(f"{file}: line {rows.line_num}: {problem}; put quotation marks around text with commas")
            yield form.document(dict(zip(names, row, strict=True)), f"{file}: line {rows.line_num}")
    except csv.Error as error:
        remedy = "is a quotation mark left open?"
        raise UserError(f"{file}: line {rows.line_num}: not readable as CSV: {_short(error)}; {remedy}") from None


def _chained(first: str, rest: Iterator[str]) -> Iterator[str]:
    if first:
        yield first
    yield from rest


def _read_text(file: Path, form: Form) -> Iterator[Document]:
    """The file in pieces of at most `MAX_TEXT_CHARS`, whether or not it has lines."""
    if not isinstance(form, Fields):
        problem = f"{file}: plain text, and records are wanted; give JSONL or Parquet, or name such files themselves"
        raise _NotTextError("plain text", problem)
    decoder = codecs.getincrementaldecoder("utf-8")()
    held, line = "", 1
    for raw in _chunks(file):
        try:
            held += decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            at = line + held.count("\n") + error.object[: error.start].count(b"\n")
            raise _foreign(file, at, error) from None
        if "\0" in held:
            at = line + held[: held.index("\0")].count("\n")
            problem = f"{file}: line {at}: a NUL byte: this is a binary file; give text, JSONL, CSV or Parquet"
            raise _NotTextError("binary", problem)
        while len(held) > MAX_TEXT_CHARS:
            end = cut_before(held, MAX_TEXT_CHARS, MAX_TEXT_CHARS // 2)
            yield Document(held[:end])
            line, held = line + held[:end].count("\n"), held[end:]
    if held:
        yield Document(held)


def _read_parquet(file: Path, form: Form) -> Iterator[Document]:
    import pyarrow  # slow to import, and only needed here
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            columns = None if form.columns is None else list(form.columns)
            for name in columns or ():
                if name not in table.schema_arrow.names:
                    raise UserError(_lacks(str(file), name, table.schema_arrow.names))
            row = 0
            for batch in table.iter_batches(batch_size=64, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield form.document(record, f"{file}: row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"not readable as Parquet: {_short(error)}"
        raise UserError(f"{file}: {problem}; the file is damaged, fetch it again") from None


def _open_dataset(name: str, form: Form, on_disk: bool) -> Source:
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
    loaded = loaded if isinstance(loaded, dict) else {"train": loaded}
    named = {SPLITS.get(str(split), str(split)): rows for split, rows in loaded.items()}
    wanted, left_out = {split: rows for split, rows in named.items() if split in ("train", "val")}, LeftOut()
    if "train" not in wanted:
        found = ", ".join(map(str, loaded))
        raise UserError(f"{name}: no split 'train' (it has {found}); save the one you want as JSONL")
    for split in named.keys() - wanted.keys():
        left_out.add("other splits", split)

    def read(split: str, left_out: LeftOut) -> Iterator[Document]:
        for number, record in enumerate(wanted[split], start=1):
            document = form.document(record, f"{name}: {split}: row {number}")
            if document.text and not document.text.isspace():
                yield from _pieces(document)
            else:
                left_out.add(form.blank, split)

    readers: dict[str, Callable[[LeftOut], Iterator[Document]]] = {
        split: lambda left_out, split=split: read(split, left_out)  # type: ignore[misc]
        for split in wanted
    }
    return Source(name, tuple(wanted), left_out, readers, {}, form)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, line ends kept, decompressed as the suffix says, decoded as UTF-8."""
    number, raw = 0, b""
    for chunk in _chunks(file, by_line=True):
        number, raw = number + 1, chunk
        if len(raw) > MAX_LINE_BYTES:
            problem = f"longer than {MAX_LINE_BYTES >> 20} MiB, and a record is read whole"
            raise UserError(
                f"{file}: line {number}: {problem}; cut its text into several records, or give it as a text file"
            )
        if b"\0" in raw:
            problem = "a NUL byte: this is a binary file"
            raise UserError(f"{file}: line {number}: {problem}; give text, JSONL, CSV or Parquet")
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            raise _foreign(file, number, error) from None
        if line:
            yield number, line


def _chunks(file: Path, by_line: bool = False) -> Iterator[bytes]:
    """The bytes of ``file``, decompressed as its suffix says, without a mark of UTF-8; an empty piece ends them."""
    packed = file.suffix.lower() in COMPRESSIONS
    try:
        with _open(file) as handle:
            raw = handle.readline(MAX_LINE_BYTES + 1) if by_line else handle.read(_CHUNK_BYTES)
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                told = "UTF-16 text; convert it"
                raise _NotTextError("not UTF-8", f"{file}: line 1: {told}: iconv -f utf-16 -t utf-8 {file.name}")
            raw = raw.removeprefix(codecs.BOM_UTF8)
            while raw:
                yield raw
                raw = handle.readline(MAX_LINE_BYTES + 1) if by_line else handle.read(_CHUNK_BYTES)
            if not by_line:
                yield b""
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        remedy = "the archive is damaged or not one, fetch it again" if packed else "check its permissions"
        raise UserError(f"{file}: cannot be read: {_short(error)}; {remedy}") from None


def _foreign(file: Path, line: int, error: UnicodeDecodeError) -> _NotTextError:
    """What to say of bytes that are not UTF-8: which encoding they look like, and how to convert them."""
    beyond_ascii = [each for each in error.object[:_CHUNK_BYTES].splitlines() if not each.isascii()]
    sample = b"\n".join(beyond_ascii)[: 1 << 16]
    best = charset_normalizer.from_bytes(sample, cp_isolation=_ENCODINGS).best()
    looks, name = ("", "ENCODING") if best is None else (f", it looks like {best.encoding}", best.encoding)
    problem = f"not UTF-8 (byte 0x{error.object[error.start]:02x}){looks}"
    remedy = f"convert it: iconv -f {name} -t utf-8 {file.name} > NEW{file.suffix}"
    return _NotTextError(f"not UTF-8{looks}", f"{file}: line {line}: {problem}; {remedy}")


def _open(file: Path) -> Any:
    if file.suffix.lower() == ".zst":
        import pyarrow  # slow to import; zstandard's own reader takes a truncated file for a whole one

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"), 1 << 18)
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    return openers.get(file.suffix.lower(), open)(file, "rb")


def _short(error: BaseException) -> str:
    """An error's message on one line."""
    return one_line(error, 200) or type(error).__name__


def _lacks(place: str, name: str, has: Any) -> str:
    names = [str(field) for field in has]
    told = ", ".join(names) or "none"
    return f"{place}: no field {name!r}{nearest(name, names)}; it has {told[:300]}; name the one that holds the text with --text-field"
