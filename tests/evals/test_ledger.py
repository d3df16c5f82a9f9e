from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from stretto.base.receipt import Alone, family, ledger
from stretto.base.records import Lineage, Receipt, new_lineage
from stretto.evals.ledger import family_sentence, family_table, ledger_table, size_sheet, summary_table
from stretto.evals.report_data import ReportData, Size

FULL = Size("full", "4 layers, 8 experts, top-2", 6_412_801, 2_301_443, 5_230_007, 4_096, 1.92, 3.214159)
CORNER = Size("corner", "2 layers, 3 experts, top-2", 2_170_003, 1_120_009, 2_610_011, 2_048, 1.12, 3.402, 3.301)


def lineage(name: str, stage: str, flops: int, *parents: Lineage) -> Lineage:
    receipt = Receipt(stage=stage, device="a CPU", flops=flops, tokens=1000, device_s=61.0, peak_memory_bytes=2**30)
    return new_lineage(
        name=name, stage=stage, weights_hash="0", total_params=9, active_params=3, receipt=receipt, parents=parents
    )


PARENT = lineage("demo", "pretrain", 60_000)
HEALED = lineage("healed", "heal", 5_200, PARENT)
LEDGER = ledger(HEALED)
FAMILY = family([PARENT, HEALED], [Alone(48_000, "computed"), Alone(24_000, "computed")])


def printed(table: Table) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_console_tables_show_names_as_they_are() -> None:
    text = printed(summary_table(ReportData("demo", (FULL, replace(CORNER, name="[red]corner")))))
    assert "[red]corner" in text
    for shown in ("6.41M", "34 %", "2.61M", "1.12 ms", "3.402", "+0.087"):
        assert shown in text


def test_ledger_table_shows_cost_with_and_without_the_parent() -> None:
    lines = printed(ledger_table(LEDGER)).splitlines()
    alone = next(line for line in lines if "This model alone" in line)
    whole = next(line for line in lines if "With its parent" in line)
    assert "5.20 kFLOPs" in alone and "1 min 01 s" in alone
    assert "65.2 kFLOPs" in whole and "2 min 02 s" in whole


def test_a_model_from_scratch_has_no_row_for_a_parent() -> None:
    assert "With its parent" not in printed(ledger_table(ledger(lineage("p", "pretrain", 7))))


def test_family_is_set_against_training_alone() -> None:
    text = printed(family_table(FAMILY))
    assert "65.2 kFLOPs" in text and "72.0 kFLOPs" in text and "91 %" in text
    said = family_sentence(FAMILY)
    assert "2 sizes out of one parent cost 91 % of training each alone, and 136 % of the dearest one" in said
    assert f"pays off from {FAMILY.break_even} sizes on" in said
    assert "computed from shape and tokens, not measured" in said


def test_a_family_that_never_pays_off_is_called_so() -> None:
    parent = lineage("p", "pretrain", 100)
    dear = family([lineage("h", "heal", 50, parent)], [Alone(40, "measured")])
    assert "never pays off" in family_sentence(dear)
    assert "not measured" not in family_sentence(dear)


def test_no_difference_is_shown_beside_the_full_network_itself() -> None:
    full, corner = size_sheet(ReportData("demo", (FULL, CORNER))).rows
    assert all(cell.note == "" for cell in full[1:])
    assert [cell.note for cell in corner[-2:]] == ["+0.188", "+0.087"]
