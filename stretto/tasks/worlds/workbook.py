"""Workbooks as cells: reading, editing, writing, and recomputation by LibreOffice or IronCalc.

What no office suite has written holds no values for its formulas, so they are computed anew, many workbooks in one process of
the engine, which also keeps a formula that crashes it or never ends out of ours. Nothing is opened that could act by itself:
files with macros or links to others are refused, and a formula may call what `FUNCTIONS` names and refer to its own workbook.
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
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from stretto.base.errors import UserError

Value = bool | int | float | str
"""A formula begins with ``=``; a date is its serial number."""
Place = tuple[str, int, int]
"""Sheet, row and column, both from 1."""
Cells = Mapping[Place, Value]
"""Blank ones are left out."""
EngineName = Literal["auto", "libreoffice", "ironcalc"]

MAX_CELLS: Final = 2000
"""Of a range that is read or written."""
MAX_FORMULA: Final = 1000
"""Characters; bounds the depth that an engine's parser sees, too."""
_MAX_TEXT, _MAX_NUMBER = 32_767, 1e300
"""Of a cell; Excel's limit of characters, and beyond any sum that is asked for."""
_MAX_ROWS: Final = 20_000
"""Of a range in a formula, unless it is whole columns: engines visit each cell."""
_MAX_BYTES: Final = 64 << 20
"""Of a file, unpacked."""
_BATCH: Final = 64
"""Workbooks of one process at most, so that nobody waits long for others'."""
_START_S, _EACH_S = 60.0, 2.0
"""That a process may take: to start, on a busy machine, and for each workbook."""
# fmt: off
FUNCTIONS: Final = frozenset("""ABS AND AVERAGE AVERAGEA AVERAGEIF AVERAGEIFS CEILING CHAR CHOOSE CLEAN CODE COLUMN COLUMNS
CONCAT CONCATENATE COUNT COUNTA COUNTBLANK COUNTIF COUNTIFS DATE DATEDIF DATEVALUE DAY DAYS EDATE EOMONTH EVEN EXACT EXP FALSE FIND
FIXED FLOOR HLOOKUP HOUR IF IFERROR IFNA IFS INDEX INT ISBLANK ISERR ISERROR ISEVEN ISNA ISNONTEXT ISNUMBER ISODD ISTEXT LARGE LEFT
LEN LN LOG LOG10 LOOKUP LOWER MATCH MAX MAXIFS MEDIAN MID MIN MINIFS MINUTE MOD MONTH N NA NETWORKDAYS NOT ODD OR PI POWER PRODUCT
PROPER QUARTILE QUOTIENT RANK REPLACE REPT RIGHT ROUND ROUNDDOWN ROUNDUP ROW ROWS SEARCH SECOND SIGN SMALL SQRT STDEV SUBSTITUTE
SUBTOTAL SUM SUMIF SUMIFS SUMPRODUCT SUMSQ SWITCH T TEXT TEXTJOIN TIME TRANSPOSE TRIM TRUE TRUNC UPPER VALUE VAR VLOOKUP WEEKDAY
WEEKNUM WORKDAY XOR YEAR YEARFRAC""".split())  # noqa: SIM905
# fmt: on
"""What a formula may call: no clock, no dice, no text that becomes a reference, nothing that reaches out of the workbook."""
_LATER = re.compile(r"\b(CONCAT|IFS|MAXIFS|MINIFS|SWITCH|TEXTJOIN)\(")
"""Functions that a file writes with a prefix."""
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
"""In the names of a file and its parts."""
_IRONCALC = """
import json, sys, ironcalc
for path in sys.argv[1:]:
    model = ironcalc.load_from_xlsx(path, "en", "UTC", "en")
    model.evaluate()
    cells = [[*place, model.get_cell_value(*place)] for place in model.get_all_cells()]
    with open(path + ".json", "w") as file:
        json.dump(cells, file)
"""


class Refused(ValueError):  # noqa: N818 - said to the model
    """What a model asked for and cannot have; the text says why."""


@dataclass(frozen=True, slots=True)
class Book:
    """A workbook's contents. Written by a world or `read_book`."""

    sheets: tuple[str, ...]
    cells: Cells
    dates: frozenset[Place] = frozenset()
    """Of those, numbers that are shown as dates."""
    origin: Path | None = None
    """File that it was read from: what is no cell is taken from there."""
    original: Cells = field(default_factory=dict)
    """The cells of that file."""

    def having(self, changes: Mapping[Place, Value | None]) -> Book:
        cells = {**self.cells, **changes}
        return replace(self, cells={place: value for place, value in cells.items() if value not in (None, "")})

    def extent(self, sheet: str) -> tuple[int, int]:
        """Last row and column that hold something."""
        held = [place for place in self.cells if place[0] == sheet]
        return max((row for _, row, _ in held), default=1), max((column for *_, column in held), default=1)


def is_formula(value: Value | None) -> bool:
    return isinstance(value, str) and value.startswith("=")


def column_name(column: int) -> str:
    from openpyxl.utils import get_column_letter

    return get_column_letter(column)


def cell_name(at: Place) -> str:
    return f"{column_name(at[2])}{at[1]}"


def area_of(book: Book, text: str, most: int = MAX_CELLS) -> list[Place]:
    """The cells of a range, rows first: ``B2``, ``B2:C9``, ``Data!B2:C9``; without a sheet, of the first. Raises `Refused`."""
    from openpyxl.utils import range_boundaries

    name, _, area = text.strip().rpartition("!")
    sheet = name.strip("'").replace("''", "'") if name else book.sheets[0]
    if sheet not in book.sheets:
        raise Refused(f"there is no sheet {sheet!r}; there are {', '.join(book.sheets)}")
    if not _RANGE.fullmatch(area):
        raise Refused(f"{text!r} is no range such as B2:C9")
    one, first, other, second = map(int, range_boundaries(area.upper()))
    (left, right), (top, bottom) = sorted((one, other)), sorted((first, second))  # C9:B2 is B2:C9
    if (right - left + 1) * (bottom - top + 1) > most:
        raise Refused(f"{text!r} has more than {most} cells")
    return [(sheet, row, column) for row in range(top, bottom + 1) for column in range(left, right + 1)]


def filled(book: Book, area: Sequence[Place], content: Value) -> Book:
    """``content`` in each cell of ``area``; a formula is the first's, and moved for the others as a spreadsheet does that fills
    it down. Raises `Refused`: a formula that may not be."""
    from openpyxl.formula.translate import Translator

    check_content(book, content)
    if not is_formula(content):
        return book.having(dict.fromkeys(area, content))
    names = list(map(cell_name, area))
    moved = Translator(str(content), origin=names[0])
    return book.having({place: moved.translate_formula(name) for place, name in zip(area, names, strict=True)})


def check_content(book: Book, content: Value) -> None:
    """Raises `Refused`: no cell can hold it, or a formula may not be."""
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    if isinstance(content, str):
        if len(content) > _MAX_TEXT or ILLEGAL_CHARACTERS_RE.search(content):
            raise Refused("no cell can hold such a text")
        if is_formula(content):
            check_formula(book, content)
    elif not abs(content) < _MAX_NUMBER:
        raise Refused("no cell can hold such a number")


def check_formula(book: Book, text: str) -> None:
    """Raises `Refused`: it is none, calls what `FUNCTIONS` lacks, or refers to what is not in the workbook."""
    from openpyxl.formula.tokenizer import Token, Tokenizer, TokenizerError

    if len(text) > MAX_FORMULA:
        raise Refused(f"the formula has more than {MAX_FORMULA} characters")
    try:
        tokens = Tokenizer(text).items
    except (TokenizerError, IndexError) as error:
        raise Refused(f"{text!r} is no formula: {error}") from None
    if sum((token.subtype == Token.OPEN) - (token.subtype == Token.CLOSE) for token in tokens):
        raise Refused(f"{text!r} is no formula: its brackets do not match")
    for token in tokens:
        if token.type == Token.FUNC and token.subtype == Token.OPEN and token.value[:-1].upper() not in FUNCTIONS:
            raise Refused(f"there is no function {token.value[:-1]} here")
        if token.type == Token.OPERAND and token.subtype == Token.RANGE:
            match = _REFERENCE.fullmatch(token.value.upper())
            known = {name.upper() for name in book.sheets}
            if not match or ((name := match[1] or match[2]) and name.replace("''", "'") not in known):
                raise Refused(f"{token.value!r} is no range of this workbook")
            if match[3] and match[4] and int(match[4]) - int(match[3]) > _MAX_ROWS:
                raise Refused(f"{token.value!r} has more than {_MAX_ROWS} rows")


def read_book(path: Path, *, values: bool = False) -> Book:
    """A workbook with its formulas, or with the ``values`` that whoever wrote it had computed for them. Raises `UserError`: it
    cannot be read, or has macros or links to other files."""
    opened = _opened(path, data_only=values)
    found = {
        (sheet.title, cell.row, cell.column): cell
        for sheet in opened.worksheets
        for row in sheet.iter_rows()
        for cell in row
    }
    cells = {place: value for place, cell in found.items() if (value := _plain(cell.value)) is not None}
    dates = frozenset(place for place in cells if found[place].is_date)
    return Book(tuple(sheet.title for sheet in opened.worksheets), cells, dates, path, cells)


def _plain(value: Any) -> Value | None:
    from openpyxl.utils.datetime import to_excel

    if value is None or isinstance(value, Value):
        return value
    if isinstance(value, datetime.datetime | datetime.date | datetime.time | datetime.timedelta):
        return float(to_excel(value))
    return str(getattr(value, "text", value))  # of a formula for several cells, or a text with fonts


def _opened(path: Path, data_only: bool = False) -> Any:
    from openpyxl import load_workbook

    check_harmless(path)
    try:
        return load_workbook(path, data_only=data_only)
    except Exception as error:  # a damaged file raises whatever its damage leads to
        raise UserError(f"{path}: not readable as a workbook: {error}; save it again") from None


def check_harmless(path: Path) -> None:
    """Raises `UserError`: no workbook, too large, or one that could run something or reach elsewhere when it is opened."""
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
    """As an .xlsx file: the cells, and of a book that was read whatever else its file has."""
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
        if not isinstance(cell, MergedCell):  # of merged cells the first holds all
            cell.value = _LATER.sub(r"_xlfn.\1(", value) if isinstance(value, str) and is_formula(value) else value
            if place in book.dates:
                cell.number_format = "yyyy-mm-dd"
    opened.save(path)


class Recalculator:
    """Values of workbooks' formulas. Several threads may ask: what is asked while the engine runs is computed together, by its
    next process."""

    def __init__(self, engine: EngineName, where: str) -> None:
        """``where`` begins messages. Raises `UserError`: the engine is not there; with ``auto``, none is."""
        self._office = shutil.which("soffice") if engine != "ironcalc" else None
        if self._office is None and (engine == "libreoffice" or find_spec("ironcalc") is None):
            remedy = "apt install libreoffice-calc-nogui, or pip install 'stretto[eval]'"
            raise UserError(f"{where}: engine: {engine}: not installed, and formulas must be computed; {remedy}")
        self.name: EngineName = "libreoffice" if self._office else "ironcalc"
        self._guard, self._running = threading.Lock(), threading.Lock()
        self._waiting: list[tuple[Book, Future[Cells | None]]] = []
        self.num_processes = 0
        """Of the engine, started so far."""

    def values(self, books: Sequence[Book]) -> list[Cells | None]:
        """All cells of each, formulas replaced by their values; None: the engine did not get through it. Blocks.

        Raises:
            RuntimeError: the engine does not compute anything.
        """
        asked = [(book, Future[Cells | None]()) for book in books]
        for book, future in asked:
            if not any(map(is_formula, book.cells.values())):
                future.set_result(book.cells)
        with self._guard:
            self._waiting += [each for each in asked if not each[1].done()]
        while not all(future.done() for _, future in asked):
            with self._running:
                if all(future.done() for _, future in asked):
                    break  # by whoever was before: what waits now is for those who still wait
                with self._guard:
                    batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
                try:
                    for (_, future), found in zip(batch, self._computed([book for book, _ in batch]), strict=True):
                        future.set_result(found)
                except Exception as error:
                    for _, future in batch:
                        future.set_exception(error)
        return [future.result() for _, future in asked]

    def _computed(self, books: Sequence[Book]) -> list[Cells | None]:
        found: list[Cells | None] = []
        while len(found) < len(books):
            some = self._run(books[len(found) :])
            found += some
            if not some:  # a process of its own has not got through the first, if it gets through anything at all
                place = ("Sheet", 1, 1)
                if not any(cells.get(place) == 42 for cells in self._run([Book(("Sheet",), {place: "=6*7"})])):
                    raise RuntimeError(f"{self.name} does not compute 6*7")
                found.append(None)
        return found

    def _run(self, books: Sequence[Book]) -> list[Cells]:
        """Of one process; fewer than asked for where it has ended before."""
        self.num_processes += 1
        with tempfile.TemporaryDirectory(prefix="stretto-sheets-") as folder:
            root = Path(folder)
            files: list[Path] = []
            with suppress(Exception):  # what cannot be written cannot be computed, whatever the library raises
                for number, book in enumerate(books):
                    write_book(book, root / f"{number}.xlsx")
                    files.append(root / f"{number}.xlsx")
            command = [sys.executable, "-P", "-c", _IRONCALC]
            if self._office is not None:
                own = f"-env:UserInstallation={(root / 'profile').as_uri()}"  # of two with one profile, the second ends
                command = [self._office, own, "--headless", "--convert-to", "xlsx", "--outdir", str(root / "out")]
            _wait([*command, *map(str, files)], _START_S + _EACH_S * len(books))
            found: list[Cells] = []
            with suppress(OSError, UserError, ValueError):  # one that is not there, or half there
                for book, file in zip(books, files, strict=False):
                    found.append(self._result(book, file))
            return found

    def _result(self, book: Book, file: Path) -> Cells:
        if self._office:
            return read_book(file.parent / "out" / file.name, values=True).cells
        told = json.loads(file.with_suffix(".xlsx.json").read_text(encoding="utf-8"))
        return {(book.sheets[sheet], row, column): value for sheet, row, column, value in told}


def _wait(command: Sequence[str], limit_s: float) -> None:
    """Run it to its end, or to the end of its time, and then all that it has started."""
    none = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=none, stdout=none, stderr=none, start_new_session=True)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
