"""Generated spreadsheet tasks: a workbook with two sets of values, a request, the expected values, and a formula.

Expected values are computed in Python from the drawn records, independently of the formula, and tests compare the two. One random generator
draws layout and wording, another the values, so that both instances of a task ask for the same cells. The last schemas, wordings and layouts
of each list are held out.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple

from stretto.tasks.worlds.workbook import Book, Place, Value, column_name

Kind = Literal["column", "total", "conditional", "lookup", "summary", "top", "filter", "text", "date"]
Part = Literal["train", "held_out"]
Layout = Literal["plain", "varied"]
EPOCH: Final = date(1899, 12, 30)
"""Day 0 of a spreadsheet."""
_FIELDS = ("sheet", "key", "keys", "group", "groups", "a", "b", "result")
_SCHEMAS = (
    ("Orders", "item", "pen ink cup map key bag jar mat fan pot", "region", "North South East West", "price", "count", "total"),
    ("Trips", "driver", "Ana Ben Cora Dan Eve Finn Gus Hana Ivo Jan", "city", "Oslo Rome Bonn Lyon", "km", "rate", "fare"),
    ("Shifts", "worker", "Kai Lea Max Nora Otto Pia Quin Rosa Sam Tea", "team", "red blue green gold", "hours", "wage", "pay"),
    ("Harvest", "crop", "oats rye corn peas beans kale leek beet mint dill", "farm", "Hill Lake Moor Dale", "rows", "yield", "crates"),
    ("Rooms", "guest", "Abt Beck Cohn Dorn Ernst Falk Graf Hahn Iser Jung", "house", "Elm Oak Ash Fir", "nights", "rent", "bill"),
    ("Parcels", "sender", "Moll Nagy Orr Paul Reis Sato Toth Ulm Voss Wolf", "depot", "Kiel Graz Bern Linz", "weight", "tariff", "postage"),
    ("Lessons", "pupil", "Ada Bo Cy Di Ed Flo Gil Hal Ida Joe", "school", "Park Mill Dock Gate", "units", "fee", "due"),
)  # fmt: skip
_HEADERS = {"label": "label", "code": "code", "start": "arrival", "end": "departure"}
_ORDERS = ("key a b group", "key group b a", "group key a b", "a key group b", "b group a key")
"""Orders of the columns of a table."""
_CORNERS = ((1, 1), (3, 1), (2, 2), (5, 3), (4, 2))
"""Row and column of a table's first header. A table that does not begin in the first row has a title above."""
_NUM_HELD_OUT = 2
_ASKED = ("Fill {range} with {what}.", "Put {what} in {range}.", "{range} is empty: it should hold {what}.")
_WORDS: Mapping[str, Sequence[str]] = {  # the last of each held out
    "*": ("{a} times {b}", "{a} multiplied by {b}", "the product of {a} and {b}"),
    "+": ("{a} plus {b}", "the sum of {a} and {b}", "{a} and {b} added up"),
    "-": ("{a} minus {b}", "{a} less {b}", "how much {a} is above {b}"),
    "share": ("the share of each {a} in the sum of all", "{a} divided by the sum of {a}", "what part of all {a} each is"),
    "flag": ("high where {a} is over {limit}, else low", "high for {a} over {limit}, low for others", "low, or high if {a} exceeds {limit}"),
    "SUM": ("the sum of {a}", "the total of all {a}", "all {a} together"),
    "AVERAGE": ("the average {a}", "the mean of {a}", "what {a} is on average"),
    "MAX": ("the largest {a}", "the highest {a}", "the maximum of {a}"),
    "MIN": ("the smallest {a}", "the lowest {a}", "the minimum of {a}"),
    "SUMIF": ("the sum of {a} where {group} is {value}", "the total {a} of {group} {value}", "all {a} of {value} together"),
    "COUNTIF": ("the number of rows where {group} is {value}", "how many rows have {group} {value}", "how often {value} is there"),
    "AVERAGEIF": ("the average {a} where {group} is {value}", "the mean {a} of {group} {value}", "the {a} of {value}, on average"),
    "SUMIFS": ("the sum of {a} where {group} is {value} and {b} is over 9", "the total {a} of {value} with {b} over 9", "all {a} of {value} if {b} exceeds 9"),
    "lookup": ("the factor of its {group} from Factors", "the factor that Factors has for its {group}", "what Factors says of each {group}"),
    "charge": ("{a} times the factor of its {group} in Factors", "{a} multiplied by its {group}'s factor", "{a}, scaled by what Factors says of the {group}"),
    "summary": ("the sum of {a} in {sheet} for each {group}", "what {a} each {group} of {sheet} has in all", "the {a} of {sheet}, added up by {group}"),
    "top": ("the {num} largest {a}, largest first", "the {num} highest {a} in falling order", "the top {num} of {a}, from the top"),
    "best": ("each {key} of the {num} largest {a}, largest first", "each {key} with the {num} highest {a}, falling", "the {num} {key} that lead in {a}"),
    "filter": ("each {key} whose {a} is over {limit}, in order, then nothing", "in order each {key} with {a} over {limit}, the rest empty",
               "only such {key} as exceed {limit} in {a}, order kept, then blanks"),
    "label": ("label without extra spaces, words capitalised", "label trimmed and in proper case", "label tidied: single spaces, capitals"),
    "code": ("the number in code", "the number behind the dash of code", "code as a number, without its letters"),
    "days": ("the days from arrival to departure", "how many days departure is after arrival", "the length of each stay in days"),
    "year": ("the year of arrival", "the year in which arrival is", "only the year out of arrival"),
}  # fmt: skip
_BLANK = (" Leave rows without {key} empty.", " Where {key} is empty, so is the answer.", " No {key}, no entry.")


@dataclass(frozen=True, slots=True)
class SheetTask:
    """A task. Written by `make_task`, or read from SpreadsheetBench."""

    instruction: str
    books: tuple[Book, ...]
    """Workbooks. The agent works on the first; its actions are repeated on the others."""
    answers: tuple[Mapping[Place, Value | None], ...]
    """Expected values of the requested cells of each workbook; None: blank."""
    solution: tuple[str, str] | None = None
    """Requested range, and the formula that fills it."""
    is_loose: bool = False
    """Whether values are compared as in SpreadsheetBench, and other cells may change."""


def make_task(seed: str, kinds: Sequence[Kind], rows: tuple[int, int], layout: Layout, part: Part) -> SheetTask:
    """The task of ``seed``. ``rows``: smallest and largest number of rows per table, from 3 to 10."""
    first = _Maker(seed, "first", rows, layout, part).task(kinds)
    others = (_Maker(seed, f"second/{attempt}", rows, layout, part).task(kinds) for attempt in range(100))
    second = next(each for each in others if each.answers != first.answers)  # constants must be wrong in one of them
    assert (first.instruction, first.solution) == (second.instruction, second.solution), "the layout depends on values"
    return SheetTask(first.instruction, first.books + second.books, first.answers + second.answers, first.solution)


@dataclass(frozen=True, slots=True)
class _Table:
    sheet: str
    columns: Mapping[str, int]
    first: int
    """Row of the first record."""
    records: Sequence[Mapping[str, Any]]
    """Records by row; an empty one is a blank row."""

    @property
    def last(self) -> int:
        return self.first + len(self.records) - 1

    @property
    def filled(self) -> list[Mapping[str, Any]]:
        """The records without blank rows."""
        return [record for record in self.records if record]

    def cell(self, name: str) -> str:
        """Address of the column's cell in the first record."""
        return f"{column_name(self.columns[name])}{self.first}"

    def span(self, name: str) -> str:
        """Range of the column over all records."""
        column = column_name(self.columns[name])
        return f"{column}${self.first}:{column}${self.last}"

    def each(self, value: Callable[..., Value], *names: str) -> list[Value | None]:
        """``value`` of the columns ``names`` in each record; None in blank rows."""
        return [value(*(record[name] for name in names)) if record else None for record in self.records]


class _Goal(NamedTuple):
    words: str
    """Key of `_WORDS`."""
    formula: str
    """Formula of the first cell."""
    right: Sequence[Value | None]
    """Expected values, row by row."""
    place: Place | None = None
    """The first cell; None: the first cell of the table's result column."""
    details: Mapping[str, Any] = {}
    """Further values for the wording."""


class _Maker:
    """Draws one instance of a task."""

    def __init__(self, seed: str, instance: str, rows: tuple[int, int], layout: Layout, part: Part) -> None:
        self.draw, self.values = random.Random(seed), random.Random(f"{seed}/{instance}")
        self.rows, self.is_varied, self.is_held_out = rows, layout == "varied", part == "held_out"
        self.cells: dict[Place, Value] = {}
        self.dates: set[Place] = set()
        self.schema, self.other = (
            dict(zip(_FIELDS, self._one(_SCHEMAS, _NUM_HELD_OUT), strict=True)) for _ in range(2)
        )

    def task(self, kinds: Sequence[Kind]) -> SheetTask:
        kind = self.draw.choice(kinds)
        top, left = self._one(_CORNERS, _NUM_HELD_OUT) if self.is_varied else _CORNERS[0]
        extra = {"text": [self.draw.choice(("label", "code"))], "date": ["start", "end"]}.get(kind, [])
        extra += ["result"] * (kind in ("column", "lookup", "text", "date"))
        table = self._table(self.schema, self.schema["sheet"], top, left, extra)
        # A second table that the request does not concern; with the same fields, in another sheet.
        if self.is_varied and self.draw.random() < 0.4:
            sheet = "Archive" if self.other == self.schema else table.sheet
            self._table(self.other, sheet, top, max(table.columns.values()) + 5, [])
        goal: _Goal = getattr(self, f"_{kind}")(table)
        sheet, row, column = goal.place or (table.sheet, table.first, table.columns["result"])
        answers = {(sheet, row + line, column): value for line, value in enumerate(goal.right)}
        span = f"{column_name(column)}{row}" + f":{column_name(column)}{row + len(answers) - 1}" * (len(answers) > 1)
        names = tuple(dict.fromkeys(name for name, *_ in self.cells))
        span = span if sheet == names[0] else f"{sheet}!{span}"
        what = self._one(_WORDS[goal.words], 1).format(**self.schema | dict(goal.details))
        instruction, formula = self._one(_ASKED, 1).format(range=span, what=what), goal.formula
        if goal.place is None and not all(table.records):
            instruction += self._one(_BLANK, 1).format(**self.schema)
            formula = f'=IF({table.cell("key")}="","",{formula[1:]})'
        return SheetTask(instruction, (Book(names, self.cells, frozenset(self.dates)),), (answers,), (span, formula))

    def _one(self, options: Sequence[Any], num_held_out: int) -> Any:
        return self.draw.choice(options[-num_held_out:] if self.is_held_out else options[:-num_held_out])

    def _table(self, schema: Mapping[str, str], sheet: str, top: int, left: int, extra: Sequence[str]) -> _Table:
        order = [*(self._one(_ORDERS, _NUM_HELD_OUT) if self.is_varied else _ORDERS[0]).split(), *extra]
        columns = {name: left + index for index, name in enumerate(order)}
        num, gap = self.draw.randint(*self.rows), self.draw.random()
        groups = self._groups(schema, num)
        groups += self.values.choices(groups, k=num - len(groups))
        self.values.shuffle(groups)
        keys, amounts = self.values.sample(schema["keys"].split(), num), self.values.sample(range(2, 60), num)
        records = [self._record(*each) for each in zip(keys, groups, amounts, strict=True)]
        if self.is_varied and 0 < (blank := int(3 * gap * num)) < num:  # in a third of the tables
            records.insert(blank, {})
        if top > 1:
            self.cells[sheet, 1, left] = f"{schema['sheet']} of the month"
        for name, column in columns.items():
            self.cells[sheet, top, column] = {**schema, **_HEADERS}[name]
            lines = {
                (sheet, top + 1 + line, column): record[name] for line, record in enumerate(records) if name in record
            }
            self.cells |= lines
            self.dates |= lines.keys() if name in ("start", "end") else set()
        return _Table(sheet, columns, top + 1, records)

    def _record(self, key: str, group: str, a: int) -> dict[str, Any]:
        values = self.values
        start, quarters = values.randrange(42000, 47000), values.randrange(8, 80)
        words = [values.choice(("alder", "birch", "cedar", "hazel", "maple")) for _ in range(2)]
        return {
            "key": key,
            "group": group,
            "a": a,
            "b": quarters / 4 if self.is_varied and quarters % 4 else quarters // 4,
            "label": f"  {words[0]}   {words[1].upper()} ",
            "code": f"{values.choice('ABC')}{values.choice('XYZ')}-{values.randrange(1, 999):04}",
            "start": start,
            "end": start + values.randrange(3, 400),
        }

    @staticmethod
    def _groups(schema: Mapping[str, str], num: int) -> list[str]:
        """Groups of a table with ``num`` records; each of them occurs."""
        return schema["groups"].split()[: max(2, min(4, num // 2))]

    def _beside(self, table: _Table, header: str) -> tuple[Place, str]:
        """Add a header beside the table; returns the cell below it, and a formula that counts rows from that cell."""
        column = max(table.columns.values()) + 2
        self.cells[table.sheet, table.first - 1, column] = header
        name = column_name(column)
        return (table.sheet, table.first, column), f"ROWS({name}${table.first}:{name}{table.first})"

    def _listed(self, table: _Table, sheet: str, header: str) -> list[str]:
        """Add a sheet that lists the groups, in another order in each instance; returns the groups."""
        groups = self._groups(self.schema, len(table.filled))
        self.values.shuffle(groups)
        self.cells |= {(sheet, 1, 1): self.schema["group"], (sheet, 1, 2): header}
        self.cells |= {(sheet, line, 1): group for line, group in enumerate(groups, start=2)}
        return groups

    # The request of each kind

    def _column(self, table: _Table) -> _Goal:
        words = self.draw.choice(("*", "+", "-", "share", "flag")[: 5 if self.is_varied else 3])
        a, limit = table.cell("a"), self.draw.randrange(15, 45)
        if words == "share":
            total = sum(record["a"] for record in table.filled)
            return _Goal(words, f"={a}/SUM({table.span('a')})", table.each(lambda a: a / total, "a"))
        if words == "flag":
            right = table.each(lambda a: "high" if a > limit else "low", "a")
            return _Goal(words, f'=IF({a}>{limit},"high","low")', right, details={"limit": limit})
        value: Callable[..., Value] = {"*": operator.mul, "+": operator.add, "-": operator.sub}[words]
        return _Goal(words, f"={a}{words}{table.cell('b')}", table.each(value, "a", "b"))

    def _total(self, table: _Table) -> _Goal:
        values: Mapping[str, Callable[..., Value]] = {"SUM": sum, "AVERAGE": fmean, "MAX": max, "MIN": min}
        words = self.draw.choice(list(values))
        right = values[words](record["a"] for record in table.filled)
        return _Goal(words, f"={words}({table.span('a')})", [right], (table.sheet, table.last + 2, table.columns["a"]))

    def _conditional(self, table: _Table) -> _Goal:
        words = self.draw.choice(("SUMIF", "COUNTIF", "AVERAGEIF", "SUMIFS"))
        group = self.draw.choice(self._groups(self.schema, len(table.filled)))
        members = [each for each in table.filled if each["group"] == group]
        a, chosen = table.span("a"), f'{table.span("group")},"{group}"'
        amounts = [each["a"] for each in members]
        formula, right = {
            "SUMIF": (f"=SUMIF({chosen},{a})", sum(amounts)),
            "COUNTIF": (f"=COUNTIF({chosen})", len(members)),
            "AVERAGEIF": (f"=AVERAGEIF({chosen},{a})", fmean(amounts)),
            "SUMIFS": (f'=SUMIFS({a},{chosen},{table.span("b")},">9")', sum(r["a"] for r in members if r["b"] > 9)),
        }[words]
        return _Goal(words, formula, [right], (table.sheet, table.last + 2, table.columns["a"]), {"value": group})

    def _lookup(self, table: _Table) -> _Goal:
        groups = self._listed(table, "Factors", "factor")
        factors = dict(zip(groups, self.values.sample(range(2, 30), len(groups)), strict=True))
        self.cells |= {("Factors", line, 2): factor for line, factor in enumerate(factors.values(), start=2)}
        found = f"VLOOKUP({table.cell('group')},Factors!$A$2:$B${len(groups) + 1},2,FALSE)"
        if self.draw.random() < 0.5:
            return _Goal("lookup", f"={found}", table.each(lambda group: factors[group], "group"))
        return _Goal(
            "charge", f"={table.cell('a')}*{found}", table.each(lambda a, group: a * factors[group], "a", "group")
        )

    def _summary(self, table: _Table) -> _Goal:
        groups = self._listed(table, "Summary", self.schema["a"])
        right = [sum(each["a"] for each in table.filled if each["group"] == group) for group in groups]
        formula = f"=SUMIF({table.sheet}!{table.span('group')},A2,{table.sheet}!{table.span('a')})"
        return _Goal("summary", formula, right, ("Summary", 2, 2))

    def _top(self, table: _Table) -> _Goal:
        words, num = self.draw.choice(("top", "best")), min(3, len(table.filled))
        place, rank = self._beside(table, words)
        formula = f"LARGE({table.span('a')},{rank})"
        if words == "best":
            formula = f"INDEX({table.span('key')},MATCH({formula},{table.span('a')},0))"
        leaders = sorted(table.filled, key=lambda each: -each["a"])[:num]
        return _Goal(
            words, f"={formula}", [each["a" if words == "top" else "key"] for each in leaders], place, {"num": num}
        )

    def _filter(self, table: _Table) -> _Goal:
        limit, a = self.draw.randrange(15, 45), table.span("a")
        place, rank = self._beside(table, "chosen")
        chosen = [each["key"] for each in table.filled if each["a"] > limit]
        # The smallest row numbers; other rows count as beyond the table.
        lines = f"({a}>{limit})*(ROW({a})-{table.first - 1})+({a}<={limit})*9999"
        formula = f'=IFERROR(INDEX({table.span("key")},SUMPRODUCT(SMALL({lines},{rank}))),"")'
        return _Goal("filter", formula, [*chosen, *[None] * (len(table.filled) - len(chosen))], place, {"limit": limit})

    def _text(self, table: _Table) -> _Goal:
        if "label" in table.columns:
            right = table.each(lambda label: " ".join(label.split()).title(), "label")
            return _Goal("label", f"=PROPER(TRIM({table.cell('label')}))", right)
        code = table.cell("code")
        return _Goal(
            "code", f'=VALUE(MID({code},FIND("-",{code})+1,9))', table.each(lambda each: int(each[3:]), "code")
        )

    def _date(self, table: _Table) -> _Goal:
        start, end = table.cell("start"), table.cell("end")
        if self.draw.random() < 0.5:
            return _Goal("days", f"={end}-{start}", table.each(lambda start, end: end - start, "start", "end"))
        return _Goal("year", f"=YEAR({start})", table.each(lambda day: (EPOCH + timedelta(day)).year, "start"))
