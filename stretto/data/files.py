"""Which files of a folder are read as text, to which split each belongs, and which are left out and why."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.base import numbers
from stretto.base.errors import UserError

COMPRESSIONS = (".gz", ".xz", ".zst", ".bz2")
JSON_LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".csv", ".tsv")
RECORDS = (*JSON_LINES, *TABLES, ".parquet")
"""Many documents a file, each with fields. In a folder ``.json`` is mostly somebody's settings: it is read if nothing else is there."""
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
_NAMES = {
    "readme",
    "license",
    "licence",
    "copying",
    "authors",
    "changelog",
    "makefile",
    "dockerfile",
    "notice",
    "news",
    "todo",
}
"""Files without a suffix that are text."""
_PACKED = (".zip", ".tar", ".tgz", ".tbz", ".txz", ".7z", ".rar")
_WRITTEN_ELSEWHERE = (".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".mobi", ".ipynb", ".xlsx")
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
_WORDS = re.compile("[a-z]+")
_UNREAD_FOLDERS = ("__pycache__", "node_modules")


@dataclass(slots=True)
class LeftOut:
    """What of a source is not read, by reason. Filled while a folder is looked through, and on while its files are read."""

    _found: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Of each reason: how many, their bytes, the first one's name."""

    def add(self, reason: str, name: str, num_bytes: int = 0) -> None:
        num, size, first = self._found.get(reason, (0, 0, name))
        self._found[reason] = num + 1, size + num_bytes, first

    def copy(self) -> LeftOut:
        return LeftOut(dict(self._found))

    def __len__(self) -> int:
        return sum(num for num, _, _ in self._found.values())

    def __str__(self) -> str:
        """``2 empty (a.txt, …); 1 .png, 31 KiB``: the most numerous first, each with its number, an example and the bytes."""
        told = []
        for reason, (num, size, first) in sorted(self._found.items(), key=lambda each: -each[1][0]):
            example = "" if reason.startswith(".") else f" ({first}{', …' if num > 1 else ''})"
            told.append(f"{num:,} {reason}{example}" + (f", {numbers.size_in_bytes(size)}" if size else ""))
        return "; ".join(told)


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a source; written by `find_files`."""

    splits: dict[str, tuple[Path, ...]]
    """``train``, and ``val`` where there are such files; in the order in which they are read."""
    left_out: LeftOut
    is_folder: bool
    """A file in a folder that turns out not to be text is left out; one that was named is an error."""


def find_files(path: Path | str) -> Found:
    """The files that a file or a folder, with its sub-folders, offers as text.

    Record files (JSONL, CSV, Parquet) and loose text are not mixed: whichever has more bytes is read, a README beside
    records is not, and neither are a repository's fixtures. A record file whose name has the whole word ``val``, ``test``…
    in it, and a ``.txt`` file that begins with it and has a ``train`` beside it, belong to that split; so do the files below
    folders of these names where one is called ``train``. ``test_parser.py`` is text like any other. Copies are read once.

    Raises:
        UserError: nothing is there, nothing that can be read, or nothing to train on; or a folder may not be looked into.
    """
    path = Path(path)
    if path.is_file():
        return Found({"train": (_named(path),)}, LeftOut(), is_folder=False)
    if not path.is_dir():
        remedy = "save the text in a file first" if path.exists() else "check the path"
        what = "neither a file nor a folder" if path.exists() else "no such file or folder"
        raise UserError(f"{path}: {what}; {remedy}")
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
        raise UserError(f"{path}: nothing to train on: left out {left_out}; name a file itself to train on it")
    return Found({split: tuple(found) for split, found in splits.items()}, left_out, is_folder=True)


def kind_of(file: Path) -> str:
    """Suffix below any compression: ``.jsonl`` for ``a.jsonl.gz``; ``.txt`` for a README without one."""
    name = Path(file.stem) if file.suffix.lower() in COMPRESSIONS else file
    return ".txt" if name.name.lower() in _NAMES else name.suffix.lower()


def _named(file: Path) -> Path:
    """A file that the user named. Raises `UserError`: it is of a kind that has to be turned into text first."""
    kind = kind_of(file)
    if kind in _PACKED:
        raise UserError(f"{file}: an archive of files; unpack it and name the folder")
    if kind in _WRITTEN_ELSEWHERE:
        raise UserError(f"{file}: {kind} is not plain text; convert it to text, JSONL or Parquet first")
    return file


def _walk(path: Path, left_out: LeftOut) -> Iterator[Path]:
    """All files below ``path`` that are neither hidden nor empty, in order of their paths."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be looked into: {error.strerror}; check its permissions") from None

    found: list[Path] = []
    for place, folders, files in os.walk(path, onerror=refuse):
        for name in [*folders]:
            folder = Path(place, name)
            is_hidden = name.startswith(".") or name in _UNREAD_FOLDERS
            if is_hidden or folder.is_symlink():
                folders.remove(name)
                left_out.add("hidden" if is_hidden else "linked", _short(path, folder))
        found += [Path(place, name) for name in files]
    for file in sorted(found):
        if file.name.startswith("."):
            left_out.add("hidden", _short(path, file))
        elif not file.is_file():
            left_out.add("not a file", _short(path, file))
        elif file.stat().st_size == 0:
            left_out.add("empty", _short(path, file))
        else:
            yield file


def _one_kind(path: Path, files: Sequence[Path], left_out: LeftOut) -> list[Path]:
    """Records or loose text, whichever has more bytes. Raises `UserError`: neither is there."""
    records = [file for file in files if kind_of(file) in RECORDS and kind_of(file) != ".json"]
    texts = [file for file in files if kind_of(file) in TEXT]
    if not records and not texts:
        records = [file for file in files if kind_of(file) == ".json"]
    num_record_bytes, num_text_bytes = (sum(file.stat().st_size for file in each) for each in (records, texts))
    chosen, others, why = (records, texts, "of text beside more records")
    if num_text_bytes > num_record_bytes:
        chosen, others, why = texts, records, "of records beside more text"
    for file in others:
        left_out.add(why, _short(path, file), file.stat().st_size)
    for file in set(files) - {*records, *texts}:
        left_out.add(kind_of(file) or "without a suffix", _short(path, file), file.stat().st_size)
    if not chosen:
        known = f"{', '.join((*RECORDS, *PROSE))}, source code (all but .parquet also {', '.join(COMPRESSIONS)})"
        found = f" (left out {left_out})" if len(left_out) else ""
        raise UserError(f"{path}: holds no file that can be read{found}; known are {known}")
    return chosen


def _split_of(path: Path, file: Path, beside: Sequence[Path]) -> str:
    """``train``, ``val`` or ``test``, by the name of ``file`` or of a folder it lies in below ``path``."""
    if (kind := kind_of(file)) in CODE:
        return "train"
    for folder in file.relative_to(path).parents:
        word = folder.name.lower()
        if word in SPLITS and any((path / folder.parent / "train") in other.parents for other in beside):
            return SPLITS[word]
    words = _WORDS.findall(file.name.lower())
    if kind in RECORDS:
        return next((SPLITS[word] for word in words if word in SPLITS), "train")
    trained = any(
        other.parent == file.parent and _WORDS.findall(other.name.lower())[:1] == ["train"] for other in beside
    )
    return SPLITS.get(words[0], "train") if words and kind == ".txt" and trained else "train"


def _without_copies(path: Path, files: Sequence[Path], left_out: LeftOut) -> Iterator[Path]:
    """``files`` but for those that hold what an earlier one does; only files of one size are compared."""
    by_size: dict[int, list[Path]] = {}
    for file in files:
        by_size.setdefault(file.stat().st_size, []).append(file)
    copies: set[Path] = set()
    for size, same in by_size.items():
        seen: dict[bytes, Path] = {}
        for file in same if len(same) > 1 else ():
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
