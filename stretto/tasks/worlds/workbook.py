"""Workbooks as cells: reading, editing, writing, and recomputation by LibreOffice or IronCalc.

A workbook that no office suite has saved holds no values for its formulas. They are computed by a process of the engine, many workbooks at a
time, under limits of memory, output and processor time. A formula that exceeds a limit is an error of its own workbook only. Files with
macros or links to other files are refused, and a formula may only call `FUNCTIONS` and refer to its own workbook.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from stretto.base.errors import UserError

Value = bool | int | float | str
"""A formula begins with ``=``; a date is its serial number."""
Place = tuple[str, int, int]
"""Sheet, row and column; rows and columns count from 1."""
Cells = Mapping[Place, Value]
"""Contents of the cells that are not blank."""
EngineName = Literal["auto", "libreoffice", "ironcalc"]

MAX_CELLS: Final = 2000
"""Largest number of cells in a range that is read or written."""
MAX_FORMULA: Final = 1000
"""Longest formula in characters, which also bounds the depth of an engine's parser."""
_MAX_TEXT, _MAX_NUMBER = 32_767, 1e300
"""Longest text of a cell in characters (Excel's limit), and the bound on its numbers."""
_MAX_ROWS: Final = 20_000
"""Largest number of rows of a range in a formula, except for whole columns: engines visit each cell."""
_MAX_BYTES: Final = 64 << 20
"""Largest unpacked file, and largest file that the engine may write."""
_MEMORY: Final = 2 << 30
"""Limit of the engine's address space, bytes. LibreOffice 7.4 starts with 0.5 GB."""
_BATCH: Final = 64
"""Largest number of workbooks per process of the engine, so that no caller waits long for the workbooks of others."""
_RESULT_S, _EACH_S = 60.0, 5.0
"""Limits of a process of the engine: seconds until its first and each further result, and processor seconds per workbook. A busy machine
makes no workbook late. On one core of 2026, LibreOffice takes 2 processor seconds for 220,000 cells, IronCalc 0.7."""
# fmt: off
FUNCTIONS: Final = frozenset("""ABS AND AVERAGE AVERAGEA AVERAGEIF AVERAGEIFS CEILING CHAR CHOOSE CLEAN CODE COLUMN COLUMNS
CONCAT CONCATENATE COUNT COUNTA COUNTBLANK COUNTIF COUNTIFS DATE DATEDIF DATEVALUE DAY DAYS EDATE EOMONTH EVEN EXACT EXP FALSE FIND
FIXED FLOOR HLOOKUP HOUR IF IFERROR IFNA IFS INDEX INT ISBLANK ISERR ISERROR ISEVEN ISNA ISNONTEXT ISNUMBER ISODD ISTEXT LARGE LEFT
LEN LN LOG LOG10 LOOKUP LOWER MATCH MAX MAXIFS MEDIAN MID MIN MINIFS MINUTE MOD MONTH N NA NETWORKDAYS NOT ODD OR PI POWER PRODUCT
PROPER QUARTILE QUOTIENT RANK REPLACE REPT RIGHT ROUND ROUNDDOWN ROUNDUP ROW ROWS SEARCH SECOND SIGN SMALL SQRT STDEV SUBSTITUTE
SUBTOTAL SUM SUMIF SUMIFS SUMPRODUCT SUMSQ SWITCH T TEXT TEXTJOIN TIME TRANSPOSE TRIM TRUE TRUNC UPPER VALUE VAR VLOOKUP WEEKDAY
WEEKNUM WORKDAY XOR YEAR YEARFRAC""".split())  # noqa: SIM905
# fmt: on
"""Functions that a formula may call: none depends on the clock or on random numbers, makes a reference from text, or reads other files."""
_LATER = re.compile(r"\b(CONCAT|IFS|MAXIFS|MINIFS|SWITCH|TEXTJOIN)\(")
"""Functions that the file format writes with a prefix."""
_REFERENCE = re.compile(
    r"(?:(?:'((?:[^'\[\]:]|'')+)'|([A-Z_][\w.]*))!)?"
    r"(?:\$?[A-Z]{1,3}\$?(\d+)(?::\$?[A-Z]{1,3}\$?(\d+))?|\$?[A-Z]{1,3}:\$?[A-Z]{1,3})"
)
_RANGE = re.compile(r"\$?[A-Za-z]{1,3}\$?[1-9]\d{0,6}(:\$?[A-Za-z]{1,3}\$?[1-9]\d{0,6})?")
_HARMFUL: Final = (
    *((part, "has macros; save it as .xlsx without them") for part in ("vbaproject", ".xlsm", ".xlsb")),
    *((part, "has links to other files or data; break them and save it again")
      for part in ("externallinks/", "connections.xml", "embeddings/", "activex/", "querytables/")),
)  # fmt: skip
"""Parts of file names that a refused workbook has, and the message."""
_LIMITS = f"""
import os, resource, sys
for kind, limit in ((resource.RLIMIT_AS, {_MEMORY}), (resource.RLIMIT_FSIZE, {_MAX_BYTES}), (resource.RLIMIT_CORE, 0)):
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
"""
_OFFICE = f"{_LIMITS}os.execv(sys.argv[1], sys.argv[1:])"
_IRONCALC = f"""{_LIMITS}
import json, ironcalc
def value_of(place):
    value = model.get_cell_value(*place)
    return "#VALUE!" if isinstance(value, str) and len(value) > {_MAX_TEXT} else value
for path in sys.argv[1:]:
    model = ironcalc.load_from_xlsx(path, "en", "UTC", "en")
    model.evaluate()
    cells = [[*place, value_of(place)] for place in model.get_all_cells()]
    with open(path + ".json", "w") as file:
        json.dump(cells, file)
"""


class Day(float):
    """Serial number of a cell that is read as a date, with or without a time of day."""


class TimeOfDay(float):
    """Serial number of a cell that is read as a time without a date."""


class Duration(float):
    """Number of days of a cell that is read as a duration."""


class Refused(ValueError):  # noqa: N818 - shown to the model
    """A request of the model that cannot be met; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Book:
    """Contents of a workbook. Written by a world or `read_book`."""

    sheets: tuple[str, ...]
    cells: Cells
    dates: frozenset[Place] = frozenset()
    """Places of numbers that are shown as dates."""
    origin: Path | None = None
    """File that the book was read from; everything but cells is copied from it when the book is written."""
    original: Cells = field(default_factory=dict)
    """Cells of the file ``origin``."""

    def having(self, changes: Mapping[Place, Value | None]) -> Book:
        """The book with ``changes``; None and empty text make a cell blank."""
        cells = {**self.cells, **changes}
        return replace(self, cells={place: value for place, value in cells.items() if value not in (None, "")})

    def extent(self, sheet: str) -> tuple[int, int]:
        """Last row and last column that are not blank."""
        places = [place for place in self.cells if place[0] == sheet]
        return max((row for _, row, _ in places), default=1), max((column for *_, column in places), default=1)


_FIRST: Final = Book(("Sheet",), {("Sheet", 1, 1): "=6*7"})


def is_formula(value: Value | None) -> bool:
    return isinstance(value, str) and value.startswith("=")


def column_name(column: int) -> str:
    from openpyxl.utils import get_column_letter

    return get_column_letter(column)


def cell_name(at: Place) -> str:
    return f"{column_name(at[2])}{at[1]}"


def area_of(book: Book, text: str, most: int = MAX_CELLS) -> list[Place]:
    """The places of a range in row-major order. ``text``: ``B2``, ``B2:C9`` or ``Data!B2:C9``; without a sheet, the first one.
    Raises `Refused`: no such sheet, no range, or more than ``most`` cells."""
    from openpyxl.utils import range_boundaries

    name, _, area = text.strip().rpartition("!")
    sheet = name.strip("'").replace("''", "'") if name else book.sheets[0]
    if sheet not in book.sheets:
        raise Refused(f"there is no sheet {sheet!r}; there are {', '.join(book.sheets)}")
    if not _RANGE.fullmatch(area):
        raise Refused(f"{text!r} is not a range such as B2:C9")
    one, first, other, second = map(int, range_boundaries(area.upper()))
    (left, right), (top, bottom) = sorted((one, other)), sorted((first, second))  # C9:B2 is B2:C9
    if (right - left + 1) * (bottom - top + 1) > most:
        raise Refused(f"{text!r} has more than {most} cells")
    return [(sheet, row, column) for row in range(top, bottom + 1) for column in range(left, right + 1)]


def filled(book: Book, area: Sequence[Place], content: Value) -> Book:
    """The book with ``content`` in each cell of ``area``. A formula belongs to the first cell; in the others its relative references move, as
    when a spreadsheet fills it down. Raises `Refused`: as `check_content`."""
    from openpyxl.formula.translate import Translator

    check_content(book, content)
    if not is_formula(content):
        return book.having(dict.fromkeys(area, content))
    names = list(map(cell_name, area))
    moved = Translator(str(content), origin=names[0])
    return book.having({place: moved.translate_formula(name) for place, name in zip(area, names, strict=True)})


def check_content(book: Book, content: Value) -> None:
    """Raises `Refused`: no cell can hold ``content``, or the formula is refused."""
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    if isinstance(content, str):
        if len(content) > _MAX_TEXT or ILLEGAL_CHARACTERS_RE.search(content):
            raise Refused("no cell can hold such a text")
        if is_formula(content):
            check_formula(book, content)
    elif not abs(content) < _MAX_NUMBER:
        raise Refused("no cell can hold such a number")


def check_formula(book: Book, text: str) -> None:
    """Raises `Refused`: no valid formula, a function that is not in `FUNCTIONS`, or a reference outside of the workbook."""
    from openpyxl.formula.tokenizer import Token, Tokenizer, TokenizerError

    if len(text) > MAX_FORMULA:
        raise Refused(f"the formula has more than {MAX_FORMULA} characters")
    try:
        tokens = Tokenizer(text).items
    except (TokenizerError, IndexError) as error:
        raise Refused(f"{text!r} is not a formula: {error}") from None
    if sum((token.subtype == Token.OPEN) - (token.subtype == Token.CLOSE) for token in tokens):
        raise Refused(f"{text!r} is not a formula: its brackets do not match")
    for token in tokens:
        if token.type == Token.FUNC and token.subtype == Token.OPEN and token.value[:-1].upper() not in FUNCTIONS:
            raise Refused(f"there is no function {token.value[:-1]} here")
        is_constant = token.value.upper() in ("TRUE", "FALSE")  # the tokenizer takes one in lower case for a range
        if token.type == Token.OPERAND and token.subtype == Token.RANGE and not is_constant:
            match = _REFERENCE.fullmatch(token.value.upper())
            known = {name.upper() for name in book.sheets}
            if not match or ((name := match[1] or match[2]) and name.replace("''", "'") not in known):
                raise Refused(f"{token.value!r} is not a range of this workbook")
            if match[3] and match[4] and int(match[4]) - int(match[3]) > _MAX_ROWS:
                raise Refused(f"{token.value!r} has more than {_MAX_ROWS} rows")


def read_book(path: Path, *, values: bool = False) -> Book:
    """Read a workbook with its formulas, or with the stored ``values`` of its formulas. Raises `UserError`: it cannot be read, or has macros
    or links to other files."""
    sheets = _opened(path, data_only=values).worksheets
    found = {(each.title, cell.row, cell.column): cell for each in sheets for row in each.iter_rows() for cell in row}
    cells = {place: value for place, cell in found.items() if (value := _plain(cell.value)) is not None}
    dates = frozenset(place for place in cells if found[place].is_date)
    return Book(tuple(sheet.title for sheet in sheets), cells, dates, path, cells)


def _plain(value: Any) -> Value | None:
    from openpyxl.utils.datetime import to_excel

    if value is None or isinstance(value, Value):
        return value
    kinds = {datetime.date: Day, datetime.time: TimeOfDay, datetime.timedelta: Duration}  # a datetime is a date, too
    for kind, serial in kinds.items():
        if isinstance(value, kind):
            return serial(to_excel(value))
    return str(getattr(value, "text", value))  # an array formula, or a text with fonts


def _opened(path: Path, data_only: bool = False) -> Any:
    from openpyxl import load_workbook

    check_harmless(path)
    try:
        return load_workbook(path, data_only=data_only)
    except Exception as error:  # openpyxl raises many types for damaged files
        raise UserError(f"{path}: not readable as a workbook: {error}; save it again") from None


def check_harmless(path: Path) -> None:
    """Raises `UserError`: no workbook, a workbook that is too large, or one with macros or links to other files or data."""
    try:
        with zipfile.ZipFile(path) as file:
            parts = {each.filename.lower(): each.file_size for each in file.infolist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not readable as a workbook: {error}; give an .xlsx file") from None
    for part, problem in _HARMFUL:
        if any(part in name for name in (path.name.lower(), *parts)):
            raise UserError(f"{path}: {problem}")
    if sum(parts.values()) > _MAX_BYTES:
        raise UserError(f"{path}: more than {_MAX_BYTES >> 20} MiB when unpacked; leave it out")


def write_book(book: Book, path: Path) -> None:
    """Write an .xlsx file: the cells, and everything else from the file that the book was read from."""
    from openpyxl import Workbook
    from openpyxl.cell import MergedCell

    opened = _opened(book.origin) if book.origin else Workbook()
    for name in opened.sheetnames:
        if name not in book.sheets or not book.origin:
            del opened[name]
    sheets = {name: opened[name] if name in opened.sheetnames else opened.create_sheet(name) for name in book.sheets}
    for place in book.cells.keys() | book.original.keys():
        value, (name, row, column) = book.cells.get(place), place
        if value == book.original.get(place) or name not in sheets:
            continue
        cell = sheets[name].cell(row, column)
        if not isinstance(cell, MergedCell):  # the first of merged cells has the value
            cell.value = _LATER.sub(r"_xlfn.\1(", value) if isinstance(value, str) and is_formula(value) else value
            if place in book.dates:
                cell.number_format = "yyyy-mm-dd"
    opened.save(path)


class Recalculator:
    """Computes the formulas of workbooks. Thread-safe: requests that arrive while the engine runs are computed together by its next process."""

    def __init__(self, engine: EngineName, where: str) -> None:
        """``where``: beginning of error messages. Raises `UserError`: the engine is not installed; with ``auto``, neither is."""
        self._office = shutil.which("soffice") if engine != "ironcalc" else None
        if self._office is None and (engine == "libreoffice" or find_spec("ironcalc") is None):
            remedy = "apt install libreoffice-calc-nogui, or pip install 'stretto[eval]'"
            raise UserError(f"{where}: engine: {engine}: not installed, and formulas must be computed; {remedy}")
        self.name: EngineName = "libreoffice" if self._office else "ironcalc"
        self._guard, self._running = threading.Lock(), threading.Lock()
        self._waiting: list[tuple[Book, Future[Cells | None]]] = []
        self._failed: set[int] = set()
        """Hashes of workbooks on which the engine failed. They are not computed again: callers repeat requests that came too late."""
        self.num_processes = 0
        """Number of engine processes started so far."""

    def values(self, books: Sequence[Book]) -> list[Cells | None]:
        """The cells of each book, with values instead of formulas; None: the engine failed on the book. Blocks.

        Raises:
            RuntimeError: the engine does not compute anything.
        """
        requests = [(book, Future[Cells | None]()) for book in books]
        for book, future in requests:
            if not any(map(is_formula, book.cells.values())):
                future.set_result(book.cells)
        with self._guard:
            self._waiting += [each for each in requests if not each[1].done()]
        while not all(future.done() for _, future in requests):
            with self._running:
                if all(future.done() for _, future in requests):
                    break  # another thread has computed these books
                with self._guard:
                    batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
                try:
                    found = self._computed([book for book, _ in batch])
                except Exception as error:
                    for _, future in batch:
                        future.set_exception(error)
                    continue
                for (_, future), cells in zip(batch, found, strict=False):
                    future.set_result(cells)
                with self._guard:
                    self._waiting = batch[len(found) :] + self._waiting
        return [future.result() for _, future in requests]

    def _computed(self, books: Sequence[Book]) -> Sequence[Cells | None]:
        """Values of the first books, at least of one, from one process; None: the engine failed on the book."""
        hashes = [hash(frozenset(book.cells.items())) for book in books]
        num = len(list(takewhile(lambda each: each not in self._failed, hashes)))
        found = (self._run(books[:num]) if num else []) or [None]
        self._failed.update(each for each, cells in zip(hashes, found, strict=False) if cells is None)
        return found

    def _run(self, books: Sequence[Book]) -> list[Cells | None]:
        """Values of the first books from one process; all of them unless the process ended early. None: it was killed because this book took
        too much processor time. Raises `RuntimeError`: the engine does not compute anything."""
        self.num_processes += 1
        books = [_FIRST, *books]  # its result shows that the engine has started
        with tempfile.TemporaryDirectory(prefix="stretto-sheets-") as folder:
            root = Path(folder)
            files: list[Path] = []
            with suppress(Exception):  # a book that openpyxl cannot write counts as a failure of the engine
                for number, book in enumerate(books):
                    write_book(book, root / f"{number}.xlsx")
                    files.append(root / f"{number}.xlsx")
            command, results = [sys.executable, "-P", "-c", _IRONCALC], "*.json"
            if self._office is not None:
                profile = f"-env:UserInstallation={(root / 'profile').as_uri()}"  # two processes cannot share a profile
                options = ["--headless", "--convert-to", "xlsx", "--outdir", str(root / "out")]
                command, results = [sys.executable, "-P", "-c", _OFFICE, self._office, profile, *options], "out/*.xlsx"
            is_late = _is_late([*command, *map(str, files)], lambda: sum(1 for _ in root.glob(results)))
            found: list[Cells | None] = []
            with suppress(OSError, UserError, ValueError):  # a result that is missing or incomplete
                for book, file in zip(books, files, strict=False):
                    found.append(self._result(book, file))
            if not found or (found[0] or {}).get(("Sheet", 1, 1)) != 42:
                raise RuntimeError(f"{self.name} does not compute 6*7")
            return [*found[1:], *[None] * is_late][: len(books) - 1]

    def _result(self, book: Book, file: Path) -> Cells:
        if self._office:
            found = read_book(file.parent / "out" / file.name, values=True).cells
            is_long = {at for at, value in found.items() if isinstance(value, str) and len(value) > _MAX_TEXT}
            return {**found, **dict.fromkeys(is_long, "#VALUE!")}
        cells = json.loads(file.with_suffix(".xlsx.json").read_text(encoding="utf-8"))
        return {(book.sheets[sheet], row, column): value for sheet, row, column, value in cells}


def _is_late(command: Sequence[str], num_results: Callable[[], int]) -> bool:
    """Run an engine to its end or to a limit, then kill all processes that it started. Whether a workbook after the first took more than
    `_EACH_S` processor seconds."""
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    num, since_s, used_s = 0, time.monotonic(), 0.0
    try:
        while time.monotonic() - since_s < _RESULT_S:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
                return False
            now_s = _processor_s(process.pid)
            if (new := num_results()) > num:
                num, since_s, used_s = new, time.monotonic(), now_s
            elif num and now_s - used_s > _EACH_S:
                return True
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _processor_s(pid: int) -> float:
    """Processor seconds of a process and its descendants."""
    used_s = 0.0
    with suppress(psutil.NoSuchProcess):
        for each in (first := psutil.Process(pid), *first.children(recursive=True)):
            used_s += sum(each.cpu_times()[:4])  # its own, and of descendants that have ended
    return used_s
