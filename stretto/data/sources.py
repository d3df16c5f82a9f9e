"""Documents from files (text, source code, JSONL, CSV, Parquet, also compressed), from folders of them, and from Hugging Face datasets.

Everything is streamed. Memory is bounded by one line of a record file and by `MAX_TEXT_CHARS` of text: a longer text is divided
into several documents. A file that is not of its format raises a `UserError` that names the file, the line or field, and the
remedy. Inside a folder, a text file of this kind is left out and reported instead.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import charset_normalizer

from stretto.base import numbers
from stretto.base.errors import UserError, nearest, one_line
from stretto.base.paths import quoted
from stretto.base.track import say
from stretto.data.files import COMPRESSIONS, JSON_LINES, RECORDS, SPLITS, TABLES, TEXT, LeftOut, find_files, kind_of

MAX_TEXT_CHARS = 4 << 20
"""Longer documents are divided at the end of a line or word, so that memory stays bounded."""
MAX_LINE_BYTES = 32 << 20
"""Longer lines of a record file are an error: a record is read into memory as a whole."""
_CHUNK_BYTES = 1 << 20
_NUL = "a NUL byte: this is a binary file; give text, JSONL, CSV or Parquet"
_DATASET_NAME = r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?"
_DATASET_MARKS = ("dataset_info.json", "dataset_dict.json", "state.json")
_ENCODINGS = ["gb18030", "big5", "shift_jis", "euc_jp", "euc_kr", "cp1252", "cp1251", "koi8_r"]
"""Encodings that are recognised in text that is not UTF-8. Of related ones (Latin-1 and cp1252, GBK and GB18030) the larger."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text. Written by a source."""

    text: str
    domain: str = ""
    """Origin of the text (``code``, ``books``); empty if unknown."""
    place: str = ""
    """File and line of a conversation, for error messages; empty for plain text."""


class Form(Protocol):
    """Interface of parsers for records of JSONL, CSV, Parquet or a Hugging Face dataset."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Fields that every record must have; no others are read. None: all are read."""

    @property
    def blank(self) -> str:
        """Name of documents without text, in the report of what was left out."""

    def document(self, record: dict[str, Any], place: str) -> Document:
        """The document of a record. ``place``: file and line, for error messages. Raises `UserError`: a bad record."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of the fields of a record: a `Form`, also used for plain text."""

    text: str = "text"
    domain: str | None = None
    """None: documents have no domain."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text, *([self.domain] if self.domain else []))

    @property
    def blank(self) -> str:
        return "blank documents"

    def document(self, record: dict[str, Any], place: str) -> Document:
        text = record.get(self.text)
        for name in self.columns:
            if name not in record:
                raise UserError(_lacks(place, name, record))
        text = "" if text is None else text
        if not isinstance(text, str):
            raise UserError(
                f"{place}: field {self.text!r}: {json_kind(text)}, not text; name the field that holds it with --text-field"
            )
        if not is_writable(text):
            problem = "half of a surrogate pair, which is not a character"
            raise UserError(f"{place}: field {self.text!r}: {problem}; remove it")
        return Document(text, str(record[self.domain]) if self.domain else "")


_JSON_KINDS = {
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def json_kind(value: Any) -> str:
    """JSON type of ``value``, in words."""
    return _JSON_KINDS.get(type(value), f"a {type(value).__name__}")


def is_writable(text: str) -> bool:
    """Whether ``text`` can be encoded as UTF-8. JSON can contain half of a surrogate pair, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Source:
    """Documents by split, which can be read several times. Created by `open_source`."""

    name: str
    splits: tuple[str, ...]
    """``train``, and ``val`` if the source has held-out text."""
    left_out: LeftOut
    """Files that will not be read, as far as names and sizes tell."""
    _open: Mapping[str, Callable[[LeftOut], Iterator[Document]]]
    files: Mapping[str, Sequence[Path]]
    """Files of each split; empty for a dataset."""
    form: Form

    def read(self, split: str, left_out: LeftOut | None = None) -> Iterator[Document]:
        """The documents of ``split`` that are not blank. ``left_out`` counts what is left out during reading.

        Raises:
            UserError: a file is empty, binary, mis-encoded or damaged, or a record lacks a field.
        """
        return self._open[split](LeftOut() if left_out is None else left_out)

    def sample(self, num_chars: int) -> Iterator[Document]:
        """Training documents of about ``num_chars`` characters: the beginning of every file, in proportion to its size."""
        files = self.files.get("train", ())
        sizes = [file.stat().st_size for file in files]
        readers = [read_files([file], self.form, skips=True) for file in files] or [self.read("train")]
        num_read, quota, total = 0, 0.0, sum(sizes) or 1
        for reader, size in zip(readers, sizes or [1], strict=True):
            quota += num_chars * size / total
            while num_read < quota and (document := next(reader, None)) is not None:
                num_read += len(document.text)
                yield document


def open_source(path: Path | str, form: Form = Fields()) -> Source:
    """Open a file, a folder, or a Hugging Face dataset by folder or by name.

    A name may include a configuration: ``Salesforce/wikitext:wikitext-2-raw-v1``. Only the splits ``train`` and ``validation`` of a
    dataset are read.

    Raises:
        UserError: no such source. Bad files are found during reading.
    """
    here = Path(path)
    if here.is_dir() and any((here / mark).is_file() for mark in _DATASET_MARKS):
        return _open_dataset(str(path), form, on_disk=True)
    is_name = re.fullmatch(_DATASET_NAME, str(path)) and here.suffix not in (*RECORDS, *TEXT, *COMPRESSIONS)
    if not here.exists() and is_name:
        return _open_dataset(str(path), form, on_disk=False)
    found = find_files(here)
    readers: dict[str, Callable[[LeftOut], Iterator[Document]]] = {
        split: partial(read_files, files, form, skips=found.is_folder) for split, files in found.splits.items()
    }
    return Source(str(path), tuple(readers), found.left_out, readers, found.splits, form)


def read_files(
    files: Sequence[Path | str], form: Form = Fields(), left_out: LeftOut | None = None, *, skips: bool = False
) -> Iterator[Document]:
    """Documents of ``files``, one file after the other.

    Args:
        left_out: counts omitted documents and files.
        skips: leave out files that are empty or not text; otherwise they are errors.

    Raises:
        UserError: a file is missing, empty, binary, mis-encoded or damaged, or a record lacks a field.
    """
    left_out = LeftOut() if left_out is None else left_out
    for file in map(Path, files):
        if not file.is_file():
            raise UserError(f"{file}: no such file; check the path")
        kind, is_empty, num_blank = kind_of(file), True, 0
        read = _READERS.get(kind, _read_text)
        try:
            for document in read(file, form):
                if not document.text or document.text.isspace():
                    left_out.add(form.blank, file.name)
                    num_blank += 1
                    continue
                is_empty = False
                yield from _pieces(document)
        except _NotTextError as error:
            if not skips or kind in RECORDS or not is_empty:
                raise UserError(str(error)) from None
            left_out.add(error.kind, file.name, file.stat().st_size)
        if is_empty and not skips:
            content = f"holds nothing but {form.blank} ({num_blank:,})" if num_blank else "empty"
            raise UserError(f"{file}: {content}; remove it or fill it")


class _Rows(list[tuple[dict[str, Any], str]]):
    """Records as they are, each with its place: a `Form` that collects the records that are read through it."""

    columns, blank = None, "records"

    def document(self, record: dict[str, Any], place: str) -> Document:
        self.append((record, place))
        return Document("a record")


def read_rows(files: Sequence[Path | str]) -> list[tuple[dict[str, Any], str]]:
    """The records of ``files``, each with its place. Raises `UserError` as `read_files` does."""
    rows = _Rows()
    for _ in read_files(files, rows):
        pass
    return rows


class _NotTextError(Exception):
    """A file is not UTF-8 text. ``kind``: reason in the report, if the file can be left out."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def _pieces(document: Document) -> Iterator[Document]:
    """``document`` in pieces of at most `MAX_TEXT_CHARS`. A conversation is not divided."""
    start, text = 0, document.text
    while len(text) - start > MAX_TEXT_CHARS and not document.place:
        end = cut_before(text, start + MAX_TEXT_CHARS, start + MAX_TEXT_CHARS // 2)
        yield replace(document, text=text[start:end])
        start = end
    yield replace(document, text=text[start:])


def cut_before(text: str, end: int, low: int) -> int:
    """Position of a cut in ``text`` between ``low`` and ``end``: after a line, else after a word, else ``end``."""
    for mark in ("\n", " ", "\u3002", "\t"):  # Chinese and Japanese sentences end without a space
        if (place := text.rfind(mark, low, end)) >= 0:
            return place + 1
    return end


def _read_jsonl(file: Path, form: Form) -> Iterator[Document]:
    for number, line in _lines(file):
        if line.isspace():
            continue
        if number == 1 and line.lstrip().startswith("["):
            unpack, plain = _unpacked(file)
            remedy = f"{unpack}write one object a line, for example: jq -c '.[]' {plain} > NEW.jsonl"
            raise UserError(f"{file}: line 1: a JSON array; {remedy}")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
            remedy = "every line must be one JSON object"
            raise UserError(f"{file}: line {number}: not JSON: {problem}; {remedy}") from None
        if not isinstance(record, dict):
            remedy = "every line must be an object" + "".join(
                f" with a field {name!r}" for name in (form.columns or ())[:1]
            )
            raise UserError(f"{file}: line {number}: not a JSON object; {remedy}")
        yield form.document(record, f"{file}: line {number}")


def _read_table(file: Path, form: Form) -> Iterator[Document]:
    """Rows of a CSV or TSV file with a header. The delimiter of a CSV file may be a semicolon, as many spreadsheets write it."""
    csv.field_size_limit(MAX_LINE_BYTES)  # a setting of the process
    lines = (line for _, line in _lines(file))
    header = next(lines, "")
    delimiters = "\t" if kind_of(file) == ".tsv" else ",;\t"
    delimiter = max(delimiters, key=header.count)
    # not strict, an open quotation mark would make one text of all rows after it
    rows, last_line = csv.reader(chain([header] if header else [], lines), delimiter=delimiter, strict=True), 0
    try:
        names = [name.strip() for name in next(rows, [])]
        for name in form.columns or ():
            if name not in names:
                raise UserError(_lacks(f"{file}: line 1", name, names))
        last_line = rows.line_num
        for row in rows:
            last_line = rows.line_num
            if len(row) != len(names):
                if not row:
                    continue
                problem = f"{numbers.counted(len(row), 'column')}, the header has {len(names)}"
                remedy = "put quotation marks around text with commas"
                if len(row) < len(names):
                    remedy = "add the missing ones, or delete the row"
                raise UserError(f"{file}: line {rows.line_num}: {problem}; {remedy}")
            yield form.document(dict(zip(names, row, strict=True)), f"{file}: line {rows.line_num}")
    except csv.Error as error:
        remedy = "is a quotation mark left open, or not doubled inside quoted text?"
        raise UserError(f"{file}: line {last_line + 1}: not readable as CSV: {_short(error)}; {remedy}") from None


def _read_text(file: Path, form: Form) -> Iterator[Document]:
    """The file in pieces of at most `MAX_TEXT_CHARS`, with or without lines."""
    if not isinstance(form, Fields):
        problem = f"{file}: plain text, but records are needed; give JSONL or Parquet, or name such files directly"
        raise _NotTextError("plain text", problem)
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, line = "", 1
    for raw in _chunks(file):
        try:
            text += decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            at = line + text.count("\n") + error.object[: error.start].count(b"\n")
            raise _not_utf8(file, at, error) from None
        if "\0" in text:
            at = line + text[: text.index("\0")].count("\n")
            raise _NotTextError("binary", f"{file}: line {at}: {_NUL}")
        while len(text) > MAX_TEXT_CHARS:
            end = cut_before(text, MAX_TEXT_CHARS, MAX_TEXT_CHARS // 2)
            yield Document(text[:end])
            line, text = line + text[:end].count("\n"), text[end:]
    if text:
        yield Document(text)


def _read_parquet(file: Path, form: Form) -> Iterator[Document]:
    import pyarrow  # slow to import, and only needed here
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            columns = None if form.columns is None else list(form.columns)
            for name in columns or ():
                if name not in table.schema_arrow.names:
                    raise UserError(_lacks(str(file), name, table.schema_arrow.names))
            batches = table.iter_batches(batch_size=64, columns=columns)
            for row, record in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1):
                yield form.document(record, f"{file}: row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"not readable as Parquet: {_short(error)}"
        raise UserError(f"{file}: {problem}; the file is damaged, download it again") from None


def _open_dataset(name: str, form: Form, on_disk: bool) -> Source:
    import datasets  # seconds to import, and only needed here
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # one message of our own instead of one per attempt to reach the Hub
    if not on_disk:
        say(f"{name}: looking for a dataset of this name on the Hub")
    try:
        if on_disk:
            loaded = datasets.load_from_disk(name)
        else:
            repository, _, configuration = name.partition(":")
            loaded = datasets.load_dataset(repository, configuration or None, streaming=True)
    except Exception as error:  # the library documents no common class of errors
        not_found = "not a file or folder on this machine, and not a dataset on the Hub"
        problem = "not readable as a saved dataset" if on_disk else not_found
        raise UserError(f"{name}: {problem}: {_short(error)}; check the name") from None
    loaded = loaded if isinstance(loaded, dict) else {"train": loaded}
    by_split = {SPLITS.get(str(split), str(split)): rows for split, rows in loaded.items()}
    if "train" not in by_split:
        raise UserError(
            f"{name}: no split 'train' (it has {', '.join(map(str, loaded))}); save the split you want as JSONL"
        )
    left_out = LeftOut()
    for split in by_split.keys() - {"train", "val"}:
        left_out.add("other splits", split)

    def read(split: str, left_out: LeftOut) -> Iterator[Document]:
        for number, record in enumerate(by_split[split], start=1):
            document = form.document(record, f"{name}: {split}: row {number}")
            if document.text and not document.text.isspace():
                yield from _pieces(document)
            else:
                left_out.add(form.blank, split)

    readers: dict[str, Callable[[LeftOut], Iterator[Document]]] = {
        split: partial(read, split) for split in by_split if split in ("train", "val")
    }
    return Source(name, tuple(readers), left_out, readers, {}, form)


_READERS = dict.fromkeys(JSON_LINES, _read_jsonl) | dict.fromkeys(TABLES, _read_table) | {".parquet": _read_parquet}
"""Parser by `kind_of` a file; other files are read as text."""


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, decompressed by suffix and decoded as UTF-8. Line ends are kept."""
    number, raw = 0, b""
    for chunk in _chunks(file, by_line=True):
        number, raw = number + 1, chunk
        if len(raw) > MAX_LINE_BYTES:
            problem = f"longer than {MAX_LINE_BYTES >> 20} MiB, the largest size of a record"
            raise UserError(
                f"{file}: line {number}: {problem}; cut its text into several records, or give it as a text file"
            )
        if b"\0" in raw:
            raise UserError(f"{file}: line {number}: {_NUL}")
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(file, number, error) from None
        if line:
            yield number, line


def _chunks(file: Path, by_line: bool = False) -> Iterator[bytes]:
    """The bytes of ``file``, decompressed by suffix, without a byte-order mark. An empty chunk ends them."""
    packed = file.suffix.lower() in COMPRESSIONS
    try:
        with _open(file) as handle:
            raw = handle.readline(MAX_LINE_BYTES + 1) if by_line else handle.read(_CHUNK_BYTES)
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise _NotTextError("not UTF-8", f"{file}: line 1: UTF-16 text; {_conversion(file, 'utf-16')}")
            raw = raw.removeprefix(codecs.BOM_UTF8)
            while raw:
                yield raw
                raw = handle.readline(MAX_LINE_BYTES + 1) if by_line else handle.read(_CHUNK_BYTES)
            if not by_line:
                yield b""
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        remedy = "the archive is damaged or not an archive, download it again" if packed else "check its permissions"
        raise UserError(f"{file}: cannot be read: {_short(error)}; {remedy}") from None


def _not_utf8(file: Path, line: int, error: UnicodeDecodeError) -> _NotTextError:
    """Error about bytes that are not UTF-8, with the likely encoding and a command that converts them."""
    lines = [line for line in error.object[:_CHUNK_BYTES].splitlines() if not line.isascii()]
    sample = b"\n".join(lines)[: 1 << 16]
    best = charset_normalizer.from_bytes(sample, cp_isolation=_ENCODINGS).best()
    name = "ENCODING" if best is None else best.encoding.replace("_", "-")  # iconv refuses koi8_r
    looks = "" if best is None else f", it looks like {name}"
    problem = f"not UTF-8 (byte 0x{error.object[error.start]:02x}){looks}"
    return _NotTextError(f"not UTF-8{looks}", f"{file}: line {line}: {problem}; {_conversion(file, name)}")


def _conversion(file: Path, encoding: str) -> str:
    """Remedy for a file in ``encoding``: the command that converts it."""
    unpack, plain = _unpacked(file)
    return f"{unpack}convert it: iconv -f {encoding} -t utf-8 {plain} > NEW{kind_of(file)}"


def _unpacked(file: Path) -> tuple[str, str]:
    """For a command that reads ``file`` as it is without compression: what to do first, empty if nothing, and the quoted name."""
    if file.suffix.lower() in COMPRESSIONS:
        return "unpack it, and ", quoted(file.with_suffix(""))
    return "", quoted(file)


def _open(file: Path) -> Any:
    if file.suffix.lower() == ".zst":
        import pyarrow  # slow to import; zstandard's own reader does not notice a truncated file

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"), 1 << 18)
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    return openers.get(file.suffix.lower(), open)(file, "rb")


def _short(error: BaseException) -> str:
    """The message of an exception on one line."""
    return one_line(error, 200) or type(error).__name__


def _lacks(place: str, name: str, fields: Iterable[Any]) -> str:
    """Error message about a missing field, with the existing ones."""
    names = [str(field) for field in fields]
    existing = (", ".join(names) or "none")[:300]
    remedy = "name the one that holds the text with --text-field"
    if "messages" in names:
        remedy = "conversations are read by stretto sft, and by stretto quantise with --chat"
    near = nearest(name, names, 0.5)  # `content` for `text`
    return f"{place}: no field {name!r}{near}; it has {existing}; {remedy}"
