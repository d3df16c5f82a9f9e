from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from rich.console import Console

from stretto.base.records import (
    Elsewhere,
    Family,
    FamilyRow,
    Ledger,
    LedgerRow,
    Lineage,
    Receipt,
    family,
    ledger,
    new_lineage,
)
from stretto.base.table import Table
from stretto.report.cost import (
    Control,
    Elasticity,
    cost_bars,
    cost_caption,
    elasticity_sentence,
    family_sentence,
    family_table,
    ledger_table,
)


def lineage(name: str, stage: str, flops: int, *parents: Lineage) -> Lineage:
    receipt = Receipt(stage=stage, device="a CPU", flops=flops, tokens=1000, device_s=61.0, peak_memory_bytes=2**30)
    return new_lineage(
        name=name, stage=stage, weights_hash="0", total_params=9, active_params=3, receipt=receipt, parents=parents
    )


PARENT = lineage("demo", "pretrain", 60_000)
HEALED = lineage("healed", "heal", 5_200, PARENT)
LEDGER = ledger(HEALED)
FAMILY = family([PARENT, HEALED], [48_000, 24_000])


def printed(table: Table) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_ledger_table_shows_cost_with_and_without_the_parent() -> None:
    lines = printed(ledger_table(LEDGER)).splitlines()
    alone = next(line for line in lines if "This model alone" in line)
    whole = next(line for line in lines if "With its parent" in line)
    assert "5.20 kFLOPs" in alone and "1 min 01 s" in alone
    assert "65.2 kFLOPs" in whole and "2 min 02 s" in whole
    assert "packed rows execute less" in ledger_table(LEDGER).note


def test_a_model_from_scratch_has_no_row_for_a_parent() -> None:
    assert "With its parent" not in printed(ledger_table(ledger(lineage("p", "pretrain", 7))))


def test_family_is_set_against_training_alone() -> None:
    text = printed(family_table(FAMILY))
    assert "65.2 kFLOPs" in text and "72.0 kFLOPs" in text and "91 %" in text
    said = family_sentence(FAMILY)
    assert "2 sizes from one parent cost 91 % of training each alone, and 136 % of the most expensive one" in said
    assert f"pays off from {FAMILY.break_even} sizes on" in said
    assert "computed from shape and tokens, not measured" in said


def test_a_family_that_never_pays_off_is_called_so() -> None:
    parent = lineage("p", "pretrain", 100)
    dear = family([lineage("h", "heal", 50, parent)], [40])
    assert "never pays off" in family_sentence(dear)


def test_what_an_adopted_parent_had_cost_is_unknown_or_as_told() -> None:
    for adopted, words in (
        (Elsewhere(), ("unknown (adopted)",)),
        (Elsewhere(flops=7 * 10**21, tokens=10**12), ("7.00 ZFLOPs", "1.00T", "as published")),
    ):
        cost = ledger(lineage("healed", "heal", 5_200, PARENT.replace(stage="adopt", adopted=adopted)))
        table, said = printed(ledger_table(cost)), cost_caption(cost, None)
        before = next(line for line in table.splitlines() if "before adoption" in line)
        assert words[0] in before and " 0 " not in before
        assert "With its parent, known part" in table and "65.2 kFLOPs" in table
        assert all(word in table for word in words) and all(word in said for word in words)
        assert "Not included" in said


@pytest.mark.parametrize(
    ("control", "words"),
    [
        (None, "no control was trained"),
        (Control("plain", 1.004, 1.25, 0.0123), "at equal tokens and 1.25x its FLOPs, +0.012 nats"),
        (Control("plain", 0.8, 0.99, -0.5), "at 0.80x its tokens and equal FLOPs, −0.500 nats"),
        (Control("plain", 1.0, 1.0, None), "equal FLOPs, whose loss was measured on other text"),
    ],
)
def test_what_elasticity_cost_is_said_in_a_line(control: Control | None, words: str) -> None:
    said = elasticity_sentence(Elasticity(125, 100, (control,) if control else ()))
    assert (
        said.startswith("The elastic run used 1.25x the FLOPs of an ordinary run")
        and "computed from shape and tokens" in said
    )
    assert words in said and "\n" not in said
    assert said in cost_caption(None, None, Elasticity(125, 100, (control,) if control else ()))


def receipt(stage: str, flops: int) -> Receipt:
    return Receipt(stage=stage, device="a CPU", flops=flops)


def test_cost_bars_add_up() -> None:
    rows = (LedgerRow("p", "parent", receipt("pretrain", 900)), LedgerRow("h", "own", receipt("heal", 100)))
    ledger = Ledger(rows, receipt("heal", 100), receipt("pretrain + heal", 1_000))
    family = Family((FamilyRow("h", 100, 700),), 900, True)
    figure = cost_bars(ledger, family)
    ends: dict[float, float] = {}
    for bar in figure.axes[0].patches:
        place = round(bar.get_y() + bar.get_height() / 2)
        ends[place] = max(ends.get(place, 0.0), bar.get_x() + bar.get_width())
    # the axis is in thousands, since the largest bar is
    assert [round(1000 * ends[place]) for place in range(4)] == [100, 1_000, 1_000, 700]
    assert any("computed" in label.get_text() for label in figure.axes[0].get_yticklabels())
    assert figure.axes[0].get_xlabel() == "kFLOPs, attention counted as if every row were one document"


STAGES = ("elasticize", "extract", "heal", "sft", "rl", "online", "distill", "merge")
LONG = "a-run-with-a-long-name-extract-heal"


def many_parts(*names: str) -> Figure:
    """Bars of many small stages, and of sizes with ``names``: none but the parents has room for its name in every bar."""
    rows = (
        LedgerRow("p", "parent", receipt("pretrain", 9_990)),
        *(LedgerRow(n, "own", receipt(n, 10)) for n in STAGES),
    )
    sizes = Family(tuple(FamilyRow(name, 10, 4_000) for name in names), 9_990, False)
    return cost_bars(Ledger(rows, receipt("x", 80), receipt("y", 10_070)), sizes)


def test_a_part_without_room_for_its_name_is_in_the_legend() -> None:
    rows = (LedgerRow("p", "parent", receipt("pretrain", 9_990)), LedgerRow("h", "own", receipt("heal", 10)))
    (legend,) = cost_bars(Ledger(rows, receipt("heal", 10), receipt("pretrain + heal", 10_000)), None).findobj(Legend)
    assert isinstance(legend, Legend)
    assert [text.get_text() for text in legend.get_texts()] == ["heal"]


@pytest.mark.parametrize(
    "names", [("small",), ("demo-extract-heal", "demo-half-heal"), (LONG, f"{LONG}-2", f"{LONG}-3"), (4 * LONG,)]
)
def test_the_legend_of_the_bars_lies_below_them_inside_the_picture(names: tuple[str, ...]) -> None:
    figure = many_parts(*names)
    figure.draw_without_rendering()
    (legend,) = figure.findobj(Legend)
    assert isinstance(legend, Legend)
    axes, place, whole = figure.axes[0].get_tightbbox(), legend.get_window_extent(), figure.bbox
    assert axes is not None and place.y1 <= axes.y0 and axes.height > 0.5 * whole.height
    for box in (axes, *(text.get_window_extent() for text in legend.get_texts())):
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1


def test_every_part_of_the_bars_has_its_own_colour() -> None:
    figure = many_parts(LONG, "a", "b", "c", "d", "e")
    (legend,) = figure.findobj(Legend)
    assert isinstance(legend, Legend)
    shown = [key.get_facecolor() for key in legend.get_patches()]
    assert len(set(shown)) == len(shown) == len(STAGES) + 6
    again = ("sft", "rl", "sft")
    rows = tuple(LedgerRow(f"run-{place}", "own", receipt(stage, 10)) for place, stage in enumerate(again))
    drawn = cost_bars(Ledger(rows, receipt("x", 30), receipt("x", 30)), None)
    assert {"sft: run-0", "rl", "sft: run-2"} <= {text.get_text() for text in drawn.axes[0].texts}


def test_a_model_without_a_parent_has_one_bar() -> None:
    alone = receipt("pretrain", 900)
    figure = cost_bars(Ledger((LedgerRow("p", "own", alone),), alone, alone), None)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["this model alone"]
