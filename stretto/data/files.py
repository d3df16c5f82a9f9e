"""Selection of the files of a folder that are read as text: their splits, and the files left out with the reason."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.base import numbers
from stretto.base.errors import UserError
from stretto.base.paths import LOCK_FILE, RECIPE_FILE, RUN_FILE

COMPRESSIONS = (".gz", ".xz", ".zst", ".bz2")
JSON_LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".csv", ".tsv")
RECORDS = (*JSON_LINES, *TABLES, ".parquet")
"""Formats with many documents per file, each a record with fields. A ``.json`` in a folder is often a settings file: it is read
only if the folder has nothing else.
"""
PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc")
_CODE = """
.py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .hxx .inl .inc .cu .cuh .m .mm .java .kt .kts .scala .groovy .gradle .clj .cljs .js .mjs
.cjs .jsx .ts .tsx .vue .svelte .html .htm .css .scss .sass .less .go .rs .swift .cs .fs .fsx .vb .rb .php .pl .pm .lua .r .jl .hs
.lhs .ml .mli .elm .ex .exs .erl .hrl .lisp .el .scm .rkt .sh .bash .zsh .fish .ps1 .bat .sql .asm .s .zig .nim .d .dart .f .f90
.f95 .for .pas .ada .adb .ads .v .sv .vhd .vhdl .proto .thrift .cmake .mk .tf .nix .lean .agda .thy .sol .yaml .yml .toml .ini .cfg
.conf .awk .tcl .vim .glsl .hlsl .wgsl .bzl .bazel
"""
CODE = tuple(_CODE.split())
TEXT = (*PROSE, *CODE)
_KNOWN_NAMES = "readme license licence copying authors changelog makefile dockerfile notice news todo"
_NAMES = frozenset(_KNOWN_NAMES.split())
"""Names of text files without a suffix."""
_ARCHIVES = (".zip", ".tar", ".tgz", ".tbz", ".txz", ".7z", ".rar")
_DOCUMENTS = (".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".mobi", ".ipynb", ".xlsx")
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
_WORDS = re.compile("[a-z]+")
_NOUNS = re.compile(r"\b(document|conversation|folder|file|split)s\b")
_SMALLER = "{}: the folder has more bytes of {} (to read such files too, name them as data)"
_SKIPPED_FOLDERS = ("__pycache__", "node_modules")


@dataclass(slots=True)
class LeftOut:
    """Files and documents of a source that are not read, by reason. Filled while a folder is listed and while its files are read."""

    _by_reason: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """By reason: number, bytes, and the name of the first one."""

    def add(self, reason: str, name: str, num_bytes: int = 0) -> None:
        num, size, first = self._by_reason.get(reason, (0, 0, name))
        self._by_reason[reason] = num + 1, size + num_bytes, first

    def copy(self) -> LeftOut:
        return LeftOut(dict(self._by_reason))

    def __len__(self) -> int:
        return sum(num for num, _, _ in self._by_reason.values())

    def __str__(self) -> str:
        """``2 empty (a.txt, …); 1 .png, 31 KiB``: reasons by falling number, each with an example and the bytes. What stands behind a colon
        in a reason comes last."""
        parts = []
        for reason, (num, size, first) in sorted(self._by_reason.items(), key=lambda item: -item[1][0]):
            example = "" if reason.startswith(".") else f" ({first}{', …' if num > 1 else ''})"
            what, colon, why = reason.partition(":")
            what = _NOUNS.sub(r"\1", what, count=1) if num == 1 else what
            num_bytes = f", {numbers.size_in_bytes(size)}" if size else ""
            parts.append(f"{num:,} {what}{example}{num_bytes}{colon}{why}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a source. Written by `find_files`."""

    splits: dict[str, tuple[Path, ...]]
    """``train``, and ``val`` if there are such files; in the order of reading."""
    left_out: LeftOut
    is_folder: bool
    """Whether the user named a folder. A file in it that is not text is left out; a named file that is not text is an error."""


def find_files(path: Path | str) -> Found:
    """The text files in a file or folder, sub-folders included.

    A folder is read either as records (JSONL, CSV, Parquet) or as loose text, whichever has more bytes: a README beside records is
    left out, and so are the fixtures of a repository. Three kinds of names decide the split: a record file whose name contains the
    word ``val``, ``test`` etc., a ``.txt`` file whose name starts with such a word and that has a ``train`` beside it, and a folder
    of such a name beside a folder ``train``. ``test_parser.py`` is ordinary text. Identical files are read once. Folders of Stretto's own
    runs are left out, so that a run below its text does not change the text.

    Raises:
        UserError: no such path, nothing readable, nothing to train on, or a folder without read permission.
    """
    path = Path(path)
    if path.is_file():
        return Found({"train": (_named(path),)}, LeftOut(), is_folder=False)
    if not path.exists():
        is_name = len(path.parts) == 1
        hint = "; the name of a dataset on the Hub is OWNER/NAME, such as Salesforce/wikitext" if is_name else ""
        raise UserError(f"{path}: no such file or folder; check the path{hint}")
    if not path.is_dir():
        raise UserError(f"{path}: neither a file nor a folder; save the text in a file first")
    left_out = LeftOut()
    files = list(_walk(path, left_out))
    chosen = _one_kind(path, files, left_out)
    splits: dict[str, list[Path]] = {}
    for file in _without_copies(path, chosen, left_out):
        splits.setdefault(_split_of(path, file, chosen), []).append(file)
    for split in ("test",) if "train" in splits else tuple(splits):
        for file in splits.pop(split, ()):
            left_out.add(f"of a {split} split", _short(path, file), file.stat().st_size)
    if not splits:
        raise UserError(
            f"{path}: nothing to train on: left out {left_out}; to train on one of these files, name the file"
        )
    return Found({split: tuple(files) for split, files in splits.items()}, left_out, is_folder=True)


def kind_of(file: Path) -> str:
    """Suffix without the compression: ``.jsonl`` for ``a.jsonl.gz``; ``.txt`` for a README without suffix."""
    name = Path(file.stem) if file.suffix.lower() in COMPRESSIONS else file
    return ".txt" if name.name.lower() in _NAMES else name.suffix.lower()


def _named(file: Path) -> Path:
    """A file named by the user. Raises `UserError`: its format must be converted to text first."""
    kind = kind_of(file)
    if kind in _ARCHIVES:
        raise UserError(f"{file}: an archive of files; unpack it and name the folder")
    if kind in _DOCUMENTS:
        raise UserError(f"{file}: {kind} is not plain text; convert it to text, JSONL or Parquet first")
    return file


def _walk(path: Path, left_out: LeftOut) -> Iterator[Path]:
    """All files below ``path`` that are neither hidden nor empty nor in the folder of a run, sorted by path."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be opened: {error.strerror}; check its permissions") from None

    all_files: list[Path] = []
    for place, folders, names in os.walk(path, onerror=refuse):
        folders.sort()  # what is left out is named in the same order on every file system
        for name in [*folders]:
            folder = Path(place, name)
            is_hidden = name.startswith(".") or name in _SKIPPED_FOLDERS
            if is_hidden or folder.is_symlink():
                folders.remove(name)
                left_out.add("hidden" if is_hidden else "linked", _short(path, folder))
        if LOCK_FILE in names and (RUN_FILE in names or RECIPE_FILE in names) and Path(place) != path:
            folders.clear()
            left_out.add("folders of runs", _short(path, Path(place)))
            continue
        all_files += [Path(place, name) for name in names]
    for file in sorted(all_files):
        if file.name.startswith("."):
            left_out.add("hidden", _short(path, file))
        elif not file.is_file():
            left_out.add("not a file", _short(path, file))
        elif file.stat().st_size == 0:
            left_out.add("empty", _short(path, file))
        else:
            yield file


def _one_kind(path: Path, files: Sequence[Path], left_out: LeftOut) -> list[Path]:
    """The record files or the loose text, whichever has more bytes. Raises `UserError`: there are none."""
    records = [file for file in files if kind_of(file) in RECORDS and kind_of(file) != ".json"]
    texts = [file for file in files if kind_of(file) in TEXT]
    if not records and not texts:
        records = [file for file in files if kind_of(file) == ".json"]
    num_record_bytes, num_text_bytes = (sum(file.stat().st_size for file in group) for group in (records, texts))
    chosen, others, reason = (records, texts, _SMALLER.format("text files", "JSONL, CSV and Parquet"))
    if num_text_bytes > num_record_bytes:
        chosen, others, reason = texts, records, _SMALLER.format("files of JSONL, CSV or Parquet", "text")
    for file in others:
        left_out.add(reason, _short(path, file), file.stat().st_size)
    for file in set(files) - {*records, *texts}:
        left_out.add(kind_of(file) or "without a suffix", _short(path, file), file.stat().st_size)
    if not chosen:
        known = f"{', '.join((*RECORDS, *PROSE))}, source code (all but .parquet also {', '.join(COMPRESSIONS)})"
        omissions = f" (left out {left_out})" if len(left_out) else ""
        raise UserError(f"{path}: holds no file that can be read{omissions}; known are {known}")
    return chosen


def _split_of(path: Path, file: Path, others: Sequence[Path]) -> str:
    """``train``, ``val`` or ``test``, by the name of ``file`` or of a folder between it and ``path``; see `find_files`."""
    if (kind := kind_of(file)) in CODE:
        return "train"
    for folder in file.relative_to(path).parents:
        word = folder.name.lower()
        if word in SPLITS and any((path / folder.parent / "train") in other.parents for other in others):
            return SPLITS[word]
    words = _WORDS.findall(file.name.lower())
    if kind in RECORDS:
        return next((SPLITS[word] for word in words if word in SPLITS), "train")
    siblings = (other for other in others if other.parent == file.parent)
    has_train = any(_WORDS.findall(other.name.lower())[:1] == ["train"] for other in siblings)
    return SPLITS.get(words[0], "train") if words and kind == ".txt" and has_train else "train"


def _without_copies(path: Path, files: Sequence[Path], left_out: LeftOut) -> Iterator[Path]:
    """``files`` without copies of earlier ones. Only files of equal size are compared."""
    by_size: dict[int, list[Path]] = {}
    for file in files:
        by_size.setdefault(file.stat().st_size, []).append(file)
    copies: set[Path] = set()
    for size, group in by_size.items():
        seen: dict[bytes, Path] = {}
        for file in group if len(group) > 1 else ():
            if (first := seen.setdefault(_digest(file), file)) is not file:
                copies.add(file)
                left_out.add("copied", f"{_short(path, file)} is {_short(path, first)}", size)
    return (file for file in files if file not in copies)


def _digest(file: Path) -> bytes:
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").digest()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}; check its permissions") from None


def _short(path: Path, file: Path) -> str:
    return str(file.relative_to(path))
