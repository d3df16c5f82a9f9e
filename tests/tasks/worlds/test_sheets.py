"""Spreadsheets: formulas that hold on two workbooks are accepted, constants are not, with each engine."""

from __future__ import annotations

import json
import shutil
import threading
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
from openpyxl import Workbook, load_workbook

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.session import Diverged, recorded, replay, use
from stretto.tasks.task import Answer, Problem, ScoreTimeoutError
from stretto.tasks.worlds import workbook
from stretto.tasks.worlds.sheet_tasks import Kind, make_task
from stretto.tasks.worlds.sheets import SheetsArgs, SheetsSource, _dumped, _loosely_same
from stretto.tasks.worlds.workbook import Book, Recalculator, Refused, check_formula, filled, read_book, write_book

KINDS: tuple[Kind, ...] = get_args(Kind)
DATA = Book(("Data", "My rates"), {("Data", 1, 1): 2, ("Data", 2, 1): 5, ("My rates", 1, 1): 0.5})


def source(**args: Any) -> SheetsSource:
    return SheetsSource("sheets", SheetsArgs(engine="ironcalc", **args))


def calling(*calls: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    told = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": "", "tool_calls": told}


def answer(world: SheetsSource, problem: Problem, *calls: tuple[str, Mapping[str, Any]]) -> Answer:
    with closing(world.open(problem)) as session:
        return Answer("Done.", recorded(session, [calling(*calls)]))


def test_right_formulas_are_right_and_the_first_values_are_not() -> None:
    world = source(part="held_out")

    def judged(item: int) -> tuple[bool, bool, float]:
        problem, told = world.problem(item), world.task(item).answers[0]
        writes = [
            ("write", {"range": f"{at[0]}!{workbook.cell_name(at)}", "content": "" if value is None else value})
            for at, value in told.items()
        ]
        hard_coded = world.score(problem, answer(world, problem, *writes))
        right, nothing = (world.score(problem, each) for each in (world.right_answer(problem), Answer("Done.")))
        return right.ok, nothing.ok or hard_coded.ok, hard_coded.parts["books"]

    with ThreadPoolExecutor(world.at_once) as threads:
        assert set(threads.map(judged, range(12))) == {(True, False, 0.5)}, (
            "hard-coded ones are right in the first of two"
        )


def test_the_shipped_recipe_s_source_validates() -> None:
    source(kinds=("column", "total"), rows=(3, 5), layout="plain", tools=("write",)).validate(4)


def test_kinds_are_all_drawn_and_what_is_held_out_is_in_no_training() -> None:
    told = {
        part: [make_task(f"{i}", KINDS, (4, 8), "varied", part) for i in range(200)] for part in ("train", "held_out")
    }
    sheets = {part: {task.books[0].sheets[0] for task in tasks} for part, tasks in told.items()}
    assert sheets["held_out"] == {"Parcels", "Lessons"} and not sheets["train"] & sheets["held_out"]
    formulas = [task.solution[1] for task in told["train"] if task.solution]
    for name in ("SUMIFS(", "VLOOKUP(", "Orders!", "LARGE(", "SMALL(", "PROPER(", "YEAR(", "*", "-"):
        assert any(name in formula for formula in formulas), name
    for tasks in told.values():
        assert all(
            task.answers[0] != task.answers[1] and task.answers[0].keys() == task.answers[1].keys() for task in tasks
        )


def test_a_session_keeps_what_was_done_and_shows_what_it_comes_to() -> None:
    world = source(kinds=("column",), layout="plain", rows=(3, 3))
    problem = world.problem(0)
    with closing(world.open(problem)) as session, closing(world.open(problem)) as other:
        before = session.digest()
        for refused in (
            {"range": "E2", "content": "=WEBSERVICE(A1)"},
            {"range": "Nope!A1", "content": 1},
            {"range": 7},
            {},
            {"range": "A1", "content": "\x00"},
            {"range": "A1", "content": float("nan")},
            {"range": "A1", "content": "x" * 40_000},
        ):
            result = use(session.tools, "write", refused)
            assert result.outcome is Outcome.WRONG and result.text.startswith("error: ") and session.digest() == before
        assert use(session.tools, "write", {"range": "E2:E4", "content": "=B2*2"}).outcome is Outcome.OK
        assert use(session.tools, "write", {"range": "G1", "content": "0012"}).outcome is Outcome.OK
        told = use(session.tools, "read", {"range": "E3:G3"}).text
        book = world.task(0).books[0]
        value = book.cells[book.sheets[0], 3, 2]
        assert told.endswith(f"3 | {2 * value} =B3*2 |  |")
        assert use(session.tools, "read", {"range": "G1"}).text.endswith("1 | 12")
        assert session.digest() != before
        replay(other, recorded(world.open(problem), [calling(("write", {"range": "E2:E4", "content": "=B2*2"}))]))
        assert other.digest() != session.digest()
        with pytest.raises(Diverged):
            replay(other, [calling(("write", {"range": "E2", "content": 1})), {"role": "tool", "state": before}])


@pytest.mark.parametrize(
    "formula",
    [
        "='file:///etc/hostname'#$Sheet1.A1", "=[1]Sheet1!A1", "='[a.xlsx]Data'!A1", "=Other!A1", '=WEBSERVICE("http://x")',
        '=INDIRECT("A1")', "=NOW()", "=RAND()", "=DDE(1,2,3)", "=SUM(A1", "=Table1[x]", "=name", "=A1:A99999",
        "=" + "+".join(["1"] * 600),
    ],
)  # fmt: skip
def test_formulas_that_reach_out_or_are_none_are_refused(formula: str) -> None:
    with pytest.raises(Refused):
        check_formula(DATA, formula)


def test_a_constant_may_be_in_lower_case() -> None:
    formula = "=if(true,VLOOKUP(A1,Data!$A$1:$A$2,1,False),0)"
    book = filled(DATA, [("Data", row, 3) for row in (1, 2)], formula)
    (cells,) = Recalculator("ironcalc", "t").values([book])
    assert cells is not None and [cells["Data", row, 3] for row in (1, 2)] == [2, 5]


@pytest.mark.parametrize("text", ["C9:B2", "B9:C2", "C2:B9", "$c$9:b$2"])
def test_a_range_is_the_same_from_any_of_its_corners(text: str) -> None:
    """A model once wrote a range from its last cell to its first, which ended the run."""
    book = Book(("Data",), {})
    assert workbook.area_of(book, text) == workbook.area_of(book, "B2:C9")
    assert filled(book, workbook.area_of(book, text), "=A1").cells["Data", 9, 3] == "=B8"


def test_formulas_move_when_they_fill_and_are_computed_in_batches() -> None:
    book = filled(DATA, [("Data", row, 3) for row in (1, 2)], "=A1*$A$1+'My rates'!A1")
    assert book.cells["Data", 2, 3] == "=A2*$A$1+'My rates'!A2"
    engine = Recalculator("ironcalc", "x")
    found = engine.values([book] * 20)
    assert engine.num_processes == 1 and all(each and each["Data", 1, 3] == 4.5 for each in found)
    with ThreadPoolExecutor(8) as threads:
        books = [replace(DATA, cells={("Data", 1, 1): number, ("Data", 1, 2): "=A1*2"}) for number in range(12)]
        values = list(threads.map(lambda each: engine.values([each])[0], books))
    assert [each and each["Data", 1, 2] for each in values] == [2 * number for number in range(12)]
    assert engine.num_processes < 1 + 12, "whoever waits is computed together with others"


def test_a_workbook_that_ends_the_engine_costs_the_others_nothing() -> None:
    deep = filled(DATA, [("Data", 3, 1)], "=A1+1")
    harmful = replace(deep, cells={("Data", 1, 1): "=" + "(" * 4000 + "1" + ")" * 4000})
    found = Recalculator("ironcalc", "x").values([deep, harmful, deep])
    assert found[1] is None and found[0] and found[0] == found[2] and found[0]["Data", 3, 1] == 3


def computed(formula: str, area: str = "C1") -> Book:
    return filled(DATA, workbook.area_of(DATA, area), formula)


def test_a_text_longer_than_a_cell_holds_is_an_error_value() -> None:
    """A formula of 49 characters once made a text of 900 MB, which this process read."""
    lengths = ["=A1+1", '=SUBSTITUTE(REPT("x",300),"x",REPT("y",300))', '=REPT("x",32767)']
    found = Recalculator("ironcalc", "x").values([computed(formula) for formula in lengths])
    assert [cells and cells["Data", 1, 3] for cells in found] == [3, "#VALUE!", "x" * 32_767]


def test_a_formula_that_takes_too_much_memory_is_an_error_of_its_workbook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbook, "_IRONCALC", workbook._IRONCALC.replace(f"{2 << 30}", f"{256 << 20}"))
    large = computed("=SUMPRODUCT((A1:A4000)*TRANSPOSE(A1:A4000))")  # 500 MB
    found = Recalculator("ironcalc", "x").values([large, computed("=A1+1")])
    assert found[0] is None and found[1] and found[1]["Data", 1, 3] == 3


@pytest.mark.parametrize(("kind", "hard"), [("RLIMIT_AS", 1900 << 20), ("RLIMIT_FSIZE", 60 << 20)])
def test_the_engine_starts_below_lower_limits_of_the_process(
    kind: str, hard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = f"import resource\nresource.setrlimit(resource.{kind}, ({hard}, {hard}))\n"
    monkeypatch.setattr(workbook, "_IRONCALC", lower + workbook._IRONCALC)
    (cells,) = Recalculator("ironcalc", "x").values([computed("=A1+1")])
    assert cells and cells["Data", 1, 3] == 3


def test_a_slow_formula_is_computed_once_and_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbook, "_EACH_S", 0.5)
    slow, quick = computed("=SUMPRODUCT((A1:A20000)*(B1:B20000))", "C1:D500"), computed("=A1+1")
    engine = Recalculator("ironcalc", "x")
    found = engine.values([quick, slow, quick, slow, quick])
    assert [cells and cells["Data", 1, 3] for cells in found] == [3, None, 3, None, 3]
    assert engine.num_processes == 3, "each ends at a slow workbook, the second of which is known"
    assert engine.values([slow]) == [None] and engine.num_processes == 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("soffice") is None, reason="LibreOffice is not installed")
def test_libreoffice_has_the_same_limits() -> None:
    long = computed('=SUBSTITUTE(REPT("x",300),"x",REPT("y",300))')
    large = computed("=SUMPRODUCT((A1:A20000)*TRANSPOSE(A1:A20000))")  # more than 3 GB
    found = Recalculator("libreoffice", "x").values([long, large, computed("=A1+1")])
    assert [cells and cells["Data", 1, 3] for cells in found] == ["#VALUE!", None, 3]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("soffice") is None, reason="LibreOffice is not installed")
def test_libreoffice_and_ironcalc_compute_the_same_for_every_kind() -> None:
    tasks = [make_task(f"{kind}/{i}", [kind], (4, 8), "varied", "train") for kind in KINDS for i in range(3)]
    books = []
    for task in tasks:
        assert task.solution is not None
        area = workbook.area_of(task.books[0], task.solution[0])
        books += [filled(book, area, task.solution[1]) for book in task.books]
    office, own = Recalculator("libreoffice", "x"), Recalculator("ironcalc", "x")
    for task, first, second in zip(
        [t for t in tasks for _ in (0, 1)], office.values(books), own.values(books), strict=True
    ):
        assert first is not None and second is not None
        for at in task.answers[0]:
            found = second.get(at, "")
            found = found if isinstance(found, str) else pytest.approx(found, rel=1e-9)
            assert first.get(at, "") == found, (task.instruction, at)
    assert office.num_processes == 1
    world = SheetsSource("sheets", SheetsArgs(engine="libreoffice"))
    assert world.score(world.problem(0), world.right_answer(world.problem(0))).ok


def test_without_an_engine_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbook.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"engine: libreoffice: not installed.*libreoffice-calc-nogui") as told:
        SheetsSource("sheets", SheetsArgs(engine="libreoffice"))
    assert "\n" not in str(told.value)
    monkeypatch.setattr(workbook, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="engine: auto: not installed"):
        SheetsSource("sheets", SheetsArgs())


@pytest.mark.slow
def test_programs_act_on_every_workbook_and_say_what_they_broke(sandbox: Sandbox) -> None:
    world = SheetsSource("sheets", SheetsArgs(engine="ironcalc", kinds=("total",), tools=("python",)), sandbox)
    problem = world.problem(1)
    area, formula = world.task(1).solution or ("", "")
    edit = "import openpyxl\nbook = openpyxl.load_workbook('book.xlsx')\n{}\nbook.save('book.xlsx')\nprint('saved')"
    right = edit.format(f"book.worksheets[0]['{area}'] = '{formula}'")
    told = answer(world, problem, ("python", {"code": right}))
    assert told.messages[1]["content"] == "saved\n" and world.score(problem, told).ok
    for code in (edit.format("book.create_sheet('x')"), right + "\nraise SystemExit", "1/0"):
        assert not world.score(problem, answer(world, problem, ("python", {"code": code}))).ok
    outside = edit.format("book.worksheets[0]['Z9'] = '=WEBSERVICE(A1)'")
    assert (
        answer(world, problem, ("python", {"code": outside})).messages[1]["content"]
        == "error: there is no function WEBSERVICE here"
    )


# SpreadsheetBench's layout


def saved(path: Path, rows: Sequence[Sequence[Any]]) -> Path:
    book = Workbook()
    book.active.title = "Data"
    for row in rows:
        book.active.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    book.save(path)
    return path


def benchmark(folder: Path, *names: str) -> Path:
    for name in names:
        for number in (1, 2, 3):
            rows = [[number, 10], [number + 3, 20]]
            saved(folder / f"spreadsheet/{name}/{number}_{name}_input.xlsx", rows)
            saved(folder / f"spreadsheet/{name}/{number}_{name}_answer.xlsx", [*rows, [None, None, "=A1+A2"]])
    told = [
        {"id": name, "instruction": "Add.", "spreadsheet_path": f"spreadsheet/{name}", "answer_position": "'Data'!C3"}
        for name in names
    ]
    (folder / "dataset.json").write_text(json.dumps(told))
    return folder


def test_a_verdict_on_spreadsheetbench_has_the_time_limit_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, end = source(path=benchmark(tmp_path, "1-1")), threading.Event()
    monkeypatch.setattr(world, "verdict", lambda task, ends: end.wait(10.0))
    with pytest.raises(ScoreTimeoutError, match=r"item 0: score\(\) has not returned after 0.1 s"):
        world.validate(limit_s=0.1)
    end.set()


def test_spreadsheetbench_is_judged_on_all_of_its_workbooks(tmp_path: Path) -> None:
    world = source(path=benchmark(tmp_path, "1-1"))
    world.validate()  # the answers were saved without values: their formulas are computed
    assert world.num_items == 1
    problem = world.problem(0)
    assert "The answer belongs in 'Data'!C3." in problem.messages[0]["content"]
    assert world.score(problem, answer(world, problem, ("write", {"range": "C3", "content": "=SUM(A1:A2)"}))).ok
    score = world.score(problem, answer(world, problem, ("write", {"range": "C3", "content": 5})))
    assert not score.ok and score.parts["books"] == pytest.approx(1 / 3)
    assert world.score(
        problem, answer(world, problem, ("write", {"range": "C3", "content": '=TEXT(A1+A2,"0.000")'}))
    ).ok
    with pytest.raises(UserError, match="it has no solution to show"):
        world.demonstration(problem)


@pytest.mark.parametrize(
    ("found", "right", "is_same"),
    [
        (time(9), time(9), True),
        (time(9), time(9, 5), False),
        (time(9, 0, 10), time(9, 0, 50), True),
        (0, time(0, 5), False),
        ("09:00", time(9), True),
        (time(9), "09:00", True),
        (1e300, time(9), False),
        (datetime(2024, 3, 1, 9), datetime(2024, 3, 1, 10), True),
        (datetime(2024, 3, 1, 9), datetime(2024, 3, 1), True),
        (datetime(2024, 3, 1, 9), datetime(2024, 3, 2), False),
        (45352, datetime(2024, 3, 1), True),
        ("1 March", datetime(2024, 3, 1), False),
        (timedelta(hours=30), timedelta(hours=30), True),
        (timedelta(hours=30), timedelta(hours=30, minutes=4), False),
        ("5.004", 5, True),
        (True, 1, True),
        (None, "", True),
    ],
)
def test_spreadsheetbench_s_dates_and_times_are_compared_as_published(
    tmp_path: Path, found: Any, right: Any, is_same: bool
) -> None:
    """Expectations: ``compare_cell_value`` of RUCKBReasoning/SpreadsheetBench, evaluation/evaluation.py, commit 03242e96."""
    cells = read_book(saved(tmp_path / "a.xlsx", [[found, right]]), values=True).cells
    assert _loosely_same(cells.get(("Data", 1, 1)), cells.get(("Data", 1, 2))) is is_same


def test_workbooks_with_macros_or_links_are_left_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = benchmark(tmp_path, "1-1", "2-2", "3-3", "4-4")
    for name, part in (("2-2", "xl/vbaProject.bin"), ("3-3", "xl/externalLinks/externalLink1.xml")):
        with zipfile.ZipFile(folder / f"spreadsheet/{name}/2_{name}_input.xlsx", "a") as file:
            file.writestr(part, b"")
    given = folder / "spreadsheet/4-4/1_4-4_input.xlsx"
    given.rename(given.with_suffix(".xlsm"))
    assert source(path=folder).num_items == 1
    said = capsys.readouterr().out
    assert "2_2-2_input.xlsx: has macros" in said and "2_3-3_input.xlsx: has links to other files" in said
    assert "1_4-4_input.xlsm: has macros" in said


def test_missing_and_damaged_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset.json: no such file; give the folder with dataset.json"):
        source(path=tmp_path)
    folder = benchmark(tmp_path, "1-1")
    gone = folder / "spreadsheet/1-1/2_1-1_answer.xlsx"
    gone.rename(tmp_path / "away")
    with pytest.raises(UserError, match=r"2_1-1_answer.xlsx: no such file"):
        source(path=folder)
    gone.write_bytes(b"no zip")
    with pytest.raises(UserError, match="every task is left out"):
        source(path=folder)


def test_what_was_read_is_written_back_whole(tmp_path: Path) -> None:
    book = Workbook()
    book.active["A1"], book.active["B1"] = 3, "=A1"
    book.active.merge_cells("A3:B3")
    book.active["A1"].number_format = "0.00"
    book.save(tmp_path / "a.xlsx")
    read = read_book(tmp_path / "a.xlsx")
    write_book(read.having({("Sheet", 2, 1): "=A1+B1", ("Sheet", 1, 2): None}), tmp_path / "b.xlsx")
    sheet = load_workbook(tmp_path / "b.xlsx").active
    assert (sheet["A2"].value, sheet["B1"].value, sheet["A1"].number_format) == ("=A1+B1", None, "0.00")
    assert [str(each) for each in sheet.merged_cells.ranges] == ["A3:B3"]


@pytest.mark.parametrize("place", [(0, 1), (1, 0), (1, 10**9), (1 << 21, 1)])
def test_what_a_program_says_it_saved_lies_in_a_sheet(place: tuple[int, int]) -> None:
    """A program's output is untrusted: a column without a name once raised an error instead of a refusal."""
    told = json.dumps([["Data"], [["Data", *place, 3, False]]])
    with pytest.raises(Refused, match="there is no row"):
        _dumped(Book(("Data",), {}), told)
