"""Tables on consoles of every width: columns are left out, words and numbers stay whole."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from stretto.base.table import NOTHING, Cell, Table, in_columns

ROWS = tuple(
    (Cell(name, note="6 layers, 24 experts"), Cell(total), Cell("768 B"), Cell("3.014"), Cell("2.998"))
    for name, total in (("full", "1.69M"), ("corner", "0.594M"))
)
TABLE = Table("Sizes", ("Size", "Total", "KV", "Zero-shot", "Healed"), ROWS, note="Loss in nats.", optional=("KV",))


def shown(width: int) -> str:
    file = StringIO()
    Console(width=width, file=file).print(TABLE)
    return file.getvalue()


@pytest.mark.parametrize("width", [120, 80, 60, 50, 40, 30])
def test_no_line_is_wider_than_the_console_and_no_number_is_broken(width: int) -> None:
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    for place, column in enumerate(TABLE.columns[1:], 1):
        if column in text.split("Omitted")[0]:
            assert all(row[place].text in text for row in ROWS), f"{column} at {width} columns:\n{text}"


def test_python_and_notebooks_show_the_table() -> None:
    assert repr(TABLE) == TABLE.text() and "Healed" in repr(TABLE) and "Cell(" not in repr(TABLE)
    assert TABLE._repr_html_() == TABLE.html()


def test_the_optional_column_is_left_out_first_and_named() -> None:
    assert "KV" in shown(80) and "Omitted" not in shown(80)
    narrow = " ".join(shown(50).split())
    assert "Healed" in narrow and "768 B" not in narrow
    assert "Omitted on this narrow console: KV." in narrow


def test_the_last_columns_follow() -> None:
    assert "console: KV, Zero-shot, Healed." in " ".join(shown(30).split())


def test_a_form_reads_the_numbers_of_a_column_alone() -> None:
    rows = ((Cell("a"), Cell("1500", 1500.0)), (Cell("b"), NOTHING), (Cell("c"), Cell("2", 2.0)))
    found = in_columns(rows, None, lambda values: [f"{value / max(values):.1f}" for value in values])
    assert [row[1].text for row in found] == ["1.0", "–", "0.0"] and [row[0].text for row in found] == ["a", "b", "c"]
    assert found[0][1].value == 1500.0


def test_wide_notes_are_left_out_before_columns() -> None:
    rows = tuple((Cell(name), *[Cell("48 %", 0.48, "+1.6 (−4.3 … +7.4)")] * 4) for name in ("sums", "products"))
    file = StringIO()
    Console(width=60, file=file).print(Table("Domains", ("Domain", "sft", "distill", "online", "teacher"), rows))
    text = " ".join(file.getvalue().split())
    assert "teacher" in text and "…" not in text and "Omitted on this narrow console: the smaller figures." in text
