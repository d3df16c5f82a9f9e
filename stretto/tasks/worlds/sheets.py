"""Spreadsheet tasks: formulas in one workbook are also scored on copies with other values.

A session stores the agent's actions in order: filled ranges and programs. Scoring repeats them on the task's other workbooks, computes the
formulas, and compares cell by cell: requested cells with their expected values, all other cells with their previous contents. So constants
in place of formulas are wrong.

Tasks are generated (`stretto.tasks.worlds.sheet_tasks`), or, with ``path``, read from SpreadsheetBench (2406.14991): a folder with
``dataset.json`` and the workbooks that it names. Of these only the requested cells are compared, loosely, as published.
"""

from __future__ import annotations

import io
import json
import math
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from stretto.base.errors import UserError
from stretto.base.paths import read_json
from stretto.base.track import say
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.outcome import ToolResult
from stretto.sandbox.tools import shorten
from stretto.tasks.session import SessionSource, calling, recorded
from stretto.tasks.task import Answer, Problem, Range, Score, Session, Tool
from stretto.tasks.worlds.sheet_tasks import EPOCH, Kind, Layout, Part, SheetTask, make_task
from stretto.tasks.worlds.workbook import (
    Book,
    Cells,
    Day,
    Duration,
    EngineName,
    Place,
    Recalculator,
    Refused,
    TimeOfDay,
    Value,
    area_of,
    cell_name,
    check_content,
    check_harmless,
    column_name,
    filled,
    is_formula,
    read_book,
    write_book,
)

ToolName = Literal["sheets", "read", "write", "python"]
_CLOSE: Final = 1e-9
"""Relative tolerance: files hold 15 digits of a number."""
_MOST_DUMPED: Final = 16 << 20
"""Largest output of a program and its workbook, bytes."""
_SIZE: Final = 1 << 20, 1 << 14
"""Rows and columns of a sheet, as in Excel."""
_MOST_DAYS: Final = 1e9
"""Larger numbers are no dates."""
_CLOCK: Final = re.compile(r"\d\d:\d\d")
_MOST_COLUMNS: Final = 40
"""Largest number of columns in a prompt."""
_MOST_ANSWERS: Final = 1 << 20
"""Largest number of cells in a published answer; larger tasks are left out."""
_LAYOUT: Final = (
    "the folder with dataset.json and, as it says, spreadsheet/ID/1_ID_input.xlsx, 1_ID_answer.xlsx, 2_ID_…"
)
_PAIRS: Final = (("_input.xlsx", "_answer.xlsx"), ("_init.xlsx", "_golden.xlsx"))
"""Endings of the file names of a workbook and of its expected result, in the full data and in the verified part."""
# Appended to a program: prints the cells of the saved workbook as JSON after a mark.
_DUMP = """
def _stretto_dump():
    import json, openpyxl
    from openpyxl.utils.datetime import to_excel
    book, cells = openpyxl.load_workbook("book.xlsx"), []
    for sheet in book.worksheets:
        for row in sheet.iter_rows():
            for cell in row:
                value = getattr(cell.value, "text", cell.value)
                if cell.is_date and not isinstance(value, (str, int, float)):
                    value = float(to_excel(value))
                if value is not None:
                    value = value if isinstance(value, (bool, int, float)) else str(value)
                    cells.append((sheet.title, cell.row, cell.column, value, cell.is_date))
    print("\\x1ebook" + json.dumps([book.sheetnames, cells]))
_stretto_dump()
"""


class SheetsArgs(Range):
    """Arguments of kind ``sheets``. With ``path``, the arguments of generated tasks are ignored."""

    path: Path | None = None
    """Folder of SpreadsheetBench's data; None: generated tasks."""
    kinds: tuple[Kind, ...] = Field(
        default=("column", "total", "conditional", "lookup", "summary", "top", "filter", "text", "date"), min_length=1
    )
    rows: tuple[int, int] = (4, 10)
    """Smallest and largest number of rows per table, from 3 to 10."""
    layout: Layout = "varied"
    """``plain``: one table that begins in the first cell."""
    part: Part = "train"
    """``held_out``: schemas, wordings and layouts that do not occur in ``train``."""
    seed: int = 0
    tools: tuple[ToolName, ...] = Field(default=("sheets", "read", "write"), min_length=1)
    """Tools of every problem; ``python`` runs programs in the sandbox."""
    preview: int = Field(default=12, ge=0)
    """Number of rows of each sheet in the prompt."""
    engine: EngineName = "auto"
    """Program that computes formulas. ``auto``: LibreOffice if it is installed, else IronCalc, which starts much faster."""
    reward: Literal["all", "share"] = "all"
    """``all``: 1 or 0. ``share``: the share of correct cells, of those whose values differ, in the worse workbook."""


@dataclass(frozen=True, slots=True)
class Step:
    """An action on a workbook, which can be repeated on others."""

    tool: Literal["write", "python"]
    text: str
    """The range, or the program."""
    content: Value = ""
    """Content of the filled cells."""


class SheetsSource(SessionSource):
    """Generated problems of one seed, or the problems of one folder."""

    args_kind = SheetsArgs
    args: SheetsArgs
    at_once = 32
    """Number of answers judged together: one process of the engine computes their workbooks."""

    def __init__(self, name: str, args: SheetsArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        where = f"sources.{name}"
        if find_spec("openpyxl") is None:
            raise UserError(f"{where}: kind: sheets needs openpyxl; pip install 'stretto[eval]'")
        if not 3 <= args.rows[0] <= args.rows[1] <= 10:
            raise UserError(f"{where}.args: rows: {args.rows} is not a range within 3 to 10")
        if "python" in args.tools and sandbox is None:
            raise UserError(f"{where}: tools: python runs programs; open it with a sandbox")
        self.recalculator = Recalculator(args.engine, f"{where}.args")
        self._library = _library() if "python" in args.tools else b""
        self._records = [] if args.path is None else _read_benchmark(args.path, args, where)
        self.num_items = len(self._records) or None
        self.task = lru_cache(maxsize=64)(self._task)

    def _task(self, item: int) -> SheetTask:
        args = self.args
        if self.num_items is None:
            seed = f"sheets/{args.seed}/{args.part}/{item}"
            return make_task(seed, args.kinds, args.rows, args.layout, args.part)
        return self._records[item].read(self.recalculator)

    def problem(self, item: int) -> Problem:
        task = self.task(item)
        book = task.books[0]
        parts = [task.instruction]
        for sheet in book.sheets if self.args.preview else ():
            rows, columns = book.extent(sheet)
            last = (sheet, min(rows, self.args.preview), min(columns, _MOST_COLUMNS))
            parts.append(f"{sheet}!{_extent(book, sheet)}\n{grid(book, book.cells, (sheet, 1, 1), last)}")
        return Problem(item, ({"role": "user", "content": "\n\n".join(parts)},), "Done.")

    def open(self, problem: Problem, seed: int | None = None) -> Session:
        return SheetsSession(self, self.task(problem.item))

    def demonstration(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
        task = self.task(problem.item)
        if task.solution is None:
            raise self._bad(problem.item, "it has no solution to show")
        turn = calling("write", {"range": task.solution[0], "content": task.solution[1]})
        with closing(self.open(problem)) as session:
            return recorded(session, (turn, {"role": "assistant", "content": problem.gold}))

    def validate(self, num: int = 8, limit_s: float | None = None) -> None:
        """As `TaskSource.validate`; SpreadsheetBench has no solutions, so only its own answers are tried, which must be correct."""
        if self.num_items is None:
            return super().validate(num, limit_s)
        for item in range(0, len(self._records), -(-len(self._records) // num)):
            task = self.task(item)
            ends = [book.having(right) for book, right in zip(task.books, task.answers, strict=True)]
            if not (score := self._in_time(item, partial(self.verdict, task, ends), limit_s)).ok:
                raise self._bad(item, f"its own answer is refused ({score.detail})")
        return None

    def after(self, book: Book, step: Step) -> tuple[Book, ToolResult]:
        """The workbook after an action, and the result for the model. Raises `Refused`: the action is impossible."""
        if step.tool == "write":
            return filled(book, area_of(book, step.text), step.content), ToolResult("ok", Outcome.OK)
        assert self.sandbox is not None
        with tempfile.TemporaryDirectory(prefix="stretto-sheets-") as folder:
            write_book(book, path := Path(folder) / "book.xlsx")
            files = {"book.xlsx": path.read_bytes(), "library.zip": self._library}
        # Seeded, so that a repetition draws the same numbers.
        program = f"import random, sys; sys.path.insert(0, 'library.zip'); random.seed(0)\n{step.text}\n{_DUMP}"
        done = self.sandbox.run(program, files=files, limits=replace(self.sandbox.limits, output_bytes=_MOST_DUMPED))
        printed, mark, cells = done.stdout.decode("utf-8", "replace").rpartition("\x1ebook")
        if done.outcome is not Outcome.OK or not mark:
            why = done.why or "it ended before its workbook was read"
            outcome = Outcome.WRONG if done.outcome is Outcome.OK else done.outcome
            return book, ToolResult(shorten(f"{printed}error: {why}"), outcome, done.cpu_s)
        return _dumped(book, cells), ToolResult(shorten(printed) or "ok", Outcome.OK, done.cpu_s)

    def verdict(self, task: SheetTask, ends: Sequence[Book | None]) -> Score:
        """Score the workbooks ``ends`` that an answer leads to; None: one that could not be computed.

        The share of correct cells counts the cells whose right values differ between the workbooks: constants and blanks earn nothing.
        """
        for end, book, right in zip(ends, task.books, task.answers, strict=True):
            if end is None or task.is_loose:
                continue
            others = (end.cells.keys() | book.cells.keys()) - right.keys()
            if end.sheets != book.sheets or any(end.cells.get(at) != book.cells.get(at) for at in others):
                return Score.of(False, {"untouched": 0.0}, "cells or sheets outside of the request were changed")
        computed = iter(self.recalculator.values([end for end in ends if end is not None]))
        shares, detail, same = [], "", _loosely_same if task.is_loose else _same
        first, all_right = task.answers[0], True
        differing = {at for right in task.answers for at, value in right.items() if first.get(at) != value}
        for end, right in zip(ends, task.answers, strict=True):
            values = None if end is None else next(computed)
            wrong = [at for at, value in right.items() if values is None or not same(values.get(at), value)]
            counted = right.keys() & differing or set(right)
            shares.append(1 - len(counted.intersection(wrong)) / len(counted))
            all_right &= not wrong
            if wrong and not detail:
                found = "nothing to compute" if values is None else repr(values.get(wrong[0]))
                detail = f"{wrong[0][0]}!{cell_name(wrong[0])}: is {found}, must be {right[wrong[0]]!r}"
        parts = {"untouched": 1.0, "least": min(shares), "books": sum(share == 1 for share in shares) / len(shares)}
        score = Score.of(all_right, parts, detail)
        return replace(score, reward=min(shares)) if self.args.reward == "share" else score


class SheetsSession(Session):
    """Session on the first workbook of a task. State: the workbook, and the actions that led to it."""

    def __init__(self, source: SheetsSource, task: SheetTask) -> None:
        self._source, self._task, self._book = source, task, task.books[0]
        self._steps: tuple[Step, ...] = ()
        area = {"range": "such as B2:C9 or Data!B2"}
        fill = "Fills cells with a value or a formula, moved row by row."
        run = "Runs a Python program beside the workbook, book.xlsx, which it may change with openpyxl."
        offered: Mapping[str, tuple[str, Mapping[str, str], Callable[..., ToolResult]]] = {
            "sheets": ("Lists the sheets.", {}, self._sheets),
            "read": ("Reads cells.", area, self._read),
            "write": (fill, area | {"content": "for the first cell"}, self._write),
            "python": (run, {"code": "the program"}, lambda code: self._do(Step("python", code))),
        }
        self.tools = tuple(_tool(name, *offered[name]) for name in source.args.tools)

    def digest(self) -> str:
        state = repr((self._steps, self._book.sheets, sorted(self._book.cells.items())))
        return blake2b(state.encode(errors="replace"), digest_size=8).hexdigest()

    def score(self, answer: Answer) -> Score:
        """Repeat the actions on the other workbooks, and score all of them. A workbook on which an action fails is wrong."""
        ends = [self._book, *(self._end(book) for book in self._task.books[1:])]
        return self._source.verdict(self._task, ends)

    def _end(self, book: Book) -> Book | None:
        """``book`` after all actions; None: one of them failed."""
        for step in self._steps:
            try:
                book, result = self._source.after(book, step)
            except Refused:
                return None
            if result.outcome is Outcome.INFRA:
                raise RuntimeError(result.text)
            if result.outcome is not Outcome.OK:
                return None
        return book

    def _sheets(self) -> ToolResult:
        lines = (f"{sheet}!{_extent(self._book, sheet)}" for sheet in self._book.sheets)
        return ToolResult("\n".join(lines), Outcome.OK)

    def _read(self, text: str) -> ToolResult:
        area = area_of(self._book, text)
        (values,) = self._source.recalculator.values([self._book])
        if values is None:
            raise Refused("its formulas cannot be computed")
        return ToolResult(grid(self._book, values, area[0], area[-1]), Outcome.OK)

    def _write(self, area: str, content: Value) -> ToolResult:
        return self._do(Step("write", area, _typed(content)))

    def _do(self, step: Step) -> ToolResult:
        self._book, result = self._source.after(self._book, step)
        self._steps += (step,) if result.outcome is Outcome.OK else ()
        return result


def grid(book: Book, values: Cells, first: Place, last: Place) -> str:
    """The cells between two corners as text, one row per line. Formulas follow their values."""
    (sheet, top, left), (_, bottom, right) = first, last
    lines = [" | ".join(["", *map(column_name, range(left, right + 1))]).lstrip()]
    for row in range(top, bottom + 1):
        cells = [_shown(book, values, (sheet, row, column)) for column in range(left, right + 1)]
        lines.append(" | ".join([str(row), *cells]).rstrip())
    return "\n".join(lines)


def _shown(book: Book, values: Cells, at: Place) -> str:
    content, value = book.cells.get(at), values.get(at, "")
    if isinstance(value, bool):
        text = str(value).upper()
    elif isinstance(value, str):
        text = value
    else:
        text = str(EPOCH + timedelta(value)) if at in book.dates else f"{value:.12g}"
    return f"{text} {content}" if is_formula(content) and content != value else text


def _extent(book: Book, sheet: str) -> str:
    rows, columns = book.extent(sheet)
    return f"A1:{column_name(columns)}{rows}"


def _same(found: Value | None, right: Value | None) -> bool:
    found, right = (None if value == "" else value for value in (found, right))
    if isinstance(found, bool) or isinstance(right, bool) or not isinstance(found, int | float):
        return type(found) is type(right) and found == right
    return isinstance(right, int | float) and math.isclose(found, right, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _clock(days: float) -> str:
    """Hour and minute of a time of day."""
    seconds = round(days * 86_400)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}"


def _loosely_same(found: Value | None, right: Value | None) -> bool:
    """Comparison as in SpreadsheetBench's evaluation.py: numbers to two decimal places, text that is a number as a number, times of day by
    hour and minute, dates rounded to whole days, durations exactly. Unlike there, the kind of ``right`` also holds for a number ``found``,
    because the engine's values have no formats; fonts and fills are not compared."""
    if isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < _MOST_DAYS:
        if isinstance(right, Day):
            return round(found) == round(right)
        if isinstance(right, Duration):
            return round(found * 86_400) == round(right * 86_400)
        if isinstance(right, TimeOfDay) or (isinstance(right, str) and _CLOCK.fullmatch(right)):
            found = _clock(found)
    right = _clock(right) if isinstance(right, TimeOfDay) else right

    def plain(value: Value | None) -> Value | None:
        try:
            return None if value is None or value == "" else round(float(value), 2)
        except (ValueError, OverflowError):
            return value

    return plain(found) == plain(right)


def _typed(content: Value) -> Value:
    """``content`` as a spreadsheet reads it: text that is a number becomes one; a leading apostrophe marks text."""
    if not isinstance(content, str):
        return content
    try:
        number = float(content)
        return (int(number) if number == int(number) else number) if math.isfinite(number) else content
    except ValueError:
        return content.removeprefix("'")


def _dumped(book: Book, text: str) -> Book:
    """The workbook that a program has saved, from its untrusted output. Raises `Refused`: the output is not a valid workbook."""
    try:
        sheets, entries = json.loads(text)
        cells: dict[Place, Value] = {}
        for sheet, row, column, value, _ in entries:
            if not (sheet in sheets and isinstance(value, Value) and type(row) is int and type(column) is int):
                raise Refused(f"{value!r} is not a value of a cell")
            if not (0 < row <= _SIZE[0] and 0 < column <= _SIZE[1]):
                raise Refused(f"there is no row {row} or no column {column}")
            cells[sheet, row, column] = value
        dates = frozenset((sheet, row, column) for sheet, row, column, _, is_date in entries if is_date)
    except (ValueError, TypeError, RecursionError) as error:
        raise Refused(f"the workbook cannot be read: {error}") from None
    saved = replace(book, sheets=tuple(map(str, sheets)), cells=cells, dates=dates)
    for at, value in cells.items():
        if value != book.cells.get(at):
            check_content(saved, value)
    return saved


def _library() -> bytes:
    """A zip file of compiled openpyxl, for programs in the sandbox, whose interpreter has no packages."""
    packed = io.BytesIO()
    with zipfile.PyZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("openpyxl", "et_xmlfile"):
            spec = find_spec(name)
            assert spec is not None and spec.origin is not None, f"{name} is not installed"
            file.writepy(str(Path(spec.origin).parent))
    return packed.getvalue()


def _tool(name: str, description: str, fields: Mapping[str, str], run: Callable[..., ToolResult]) -> Tool:
    """A tool with the arguments ``fields``, a text and a value of a cell. WRONG: other arguments, or ``run`` raises `Refused`."""
    properties = {field: {"type": "string", "description": what} for field, what in fields.items()}

    def call(arguments: Mapping[str, Any]) -> ToolResult:
        try:
            values = [arguments.get(field) for field in fields]
            is_typed = all(isinstance(value, Value if place else str) for place, value in enumerate(values))
            if fields and (arguments.keys() - fields or not is_typed):
                raise Refused(f"the arguments are {' and '.join(fields)}, texts")
            return run(*values)
        except Refused as error:
            return ToolResult(shorten(f"error: {error}"), Outcome.WRONG)

    return Tool(name, description, {"type": "object", "properties": properties, "required": list(fields)}, call)


@dataclass(frozen=True, slots=True)
class _Record:
    """A task of SpreadsheetBench."""

    instruction: str
    positions: tuple[str, ...]
    pairs: tuple[tuple[Path, Path], ...]
    """Workbook and expected result of each instance."""

    def read(self, recalculator: Recalculator) -> SheetTask:
        books, answers = [], []
        for given, answer in self.pairs:
            book, right = read_book(given), read_book(answer)
            area = [at for position in self.positions for at in area_of(right, position, _MOST_ANSWERS)]
            stored = read_book(answer, values=True).cells
            if any(is_formula(right.cells.get(at)) and at not in stored for at in area):  # saved without values
                stored = recalculator.values([right])[0] or {}
            books.append(book)
            answers.append({at: stored.get(at) for at in area})
        request = f"{self.instruction}\n\nThe answer belongs in {', '.join(self.positions)}."
        return SheetTask(request, tuple(books), tuple(answers), is_loose=True)


def _read_benchmark(folder: Path, part: Range, where: str) -> list[_Record]:
    """The tasks of SpreadsheetBench in ``folder``. Tasks with macros or links to other files are left out and named on the console."""
    file = folder / "dataset.json"
    if not file.is_file():
        raise UserError(f"{where}: path: {file}: no such file; give {_LAYOUT}")
    tasks = read_json(file)
    if not isinstance(tasks, list) or len(tasks) <= part.first:
        raise UserError(f"{where}: path: {file}: no list of tasks from {part.first} on; give {_LAYOUT}")
    records = []
    for entry in tasks[part.first :][: part.limit]:
        try:
            name, positions = str(entry["id"]), re.findall(r"(?:'[^']*'|[^,'])+", entry["answer_position"])
            place = folder / str(entry.get("spreadsheet_path", f"spreadsheet/{name}"))
            record = _Record(entry["instruction"], tuple(each.strip() for each in positions), tuple(_pairs(place)))
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file}: a task without {error}; see SpreadsheetBench's layout") from None
        try:
            for path in (*place.glob("*.xlsm"), *(path for pair in record.pairs for path in pair)):
                check_harmless(path)
            for position in record.positions:
                area_of(Book((position.rpartition("!")[0].strip("'"),), {}), position, _MOST_ANSWERS)
            if not record.pairs:
                raise UserError(f"{place}: no workbooks; give {_LAYOUT}")
            records.append(record)
        except (UserError, Refused) as error:
            say(f"{where}: task {name} is left out: {error}")
    if not records:
        raise UserError(f"{where}: path: {folder}: every task is left out")
    return records


def _pairs(folder: Path) -> Iterator[tuple[Path, Path]]:
    for end, right_end in _PAIRS:
        for given in sorted(folder.glob(f"*{end}")):
            right = given.with_name(given.name.removesuffix(end) + right_end)
            if not right.is_file():
                raise UserError(f"{right}: no such file; give {_LAYOUT}")
            yield given, right
