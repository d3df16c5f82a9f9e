from __future__ import annotations

import math
from dataclasses import replace
from io import BytesIO

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from stretto.base.receipt import Alone, Family, FamilyRow, Ledger, LedgerRow
from stretto.base.records import Receipt
from stretto.evals.canvas import Label, blank, colours, dress, log_ticks, place_labels, spread
from stretto.evals.maps import cost_bars, expert_load, kept_grid
from stretto.evals.page import to_png
from stretto.evals.pareto import pareto_front
from stretto.evals.plots import loss_against_compute, training_curves
from stretto.evals.report_data import Control, Curve, Kept, Load, ReportData, SearchData, SearchPoint, Size

FULL = Size("full", "4 layers", 1_000, 600, 2_000, 64, nll=3.0)
CORNER = Size("corner", "2 layers", 400, 300, 900, 32, nll=3.4, healed_nll=3.2)
BARE = ReportData("run", (FULL,))
POINTS = (
    SearchPoint(1_000, 600, 3.0, 3.0, latency_ms=4.0, name="full", on_front=True, within=False),
    SearchPoint(450, 300, 3.35, 3.4, latency_ms=2.0, healed_nll=3.2, on_front=True, chosen=True),
    SearchPoint(480, 310, 3.45, 3.5, latency_ms=2.5),
    SearchPoint(200, 200, 3.6, 3.7, latency_ms=1.0, on_front=True),
)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def marks(figure: Figure, marker: str) -> list[tuple[float, float]]:
    lines = [line for line in figure.axes[0].lines if line.get_marker() == marker]
    return [(float(x), float(y)) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def receipt(stage: str, flops: int) -> Receipt:
    return Receipt(stage=stage, device="a CPU", flops=flops)


def test_loss_against_compute_marks_every_loss_where_it_lies() -> None:
    data = ReportData("run", (FULL, CORNER), controls=(Control("corner", 900, 3.3),))
    figure = loss_against_compute(data)
    assert marks(figure, "o") == [(2_000, 3.0), (900, 3.4)]
    assert marks(figure, "D") == [(900, 3.2)]
    assert marks(figure, "X") == [(900, 3.3)]
    assert {"full  3.000", "corner  3.400", "healed  3.200", "corner from scratch  3.300"} <= set(texts(figure))


def test_a_size_that_was_only_healed_is_named_so() -> None:
    figure = loss_against_compute(ReportData("run", (FULL, replace(CORNER, nll=None))))
    assert "corner, healed  3.200" in texts(figure)
    assert marks(figure, "o") == [(2_000, 3.0)]


def test_pareto_front_shows_candidates_limits_and_the_chosen() -> None:
    search = SearchData(POINTS, 9, max_total=0.5, max_latency_ms=2.2)
    figure = pareto_front(replace(BARE, search=search))
    axes, bar = figure.axes
    found = marks(figure, "o")
    assert {(point.total_params, point.nll) for point in POINTS} == set(found)
    assert found.count((450, 3.4)) == 2, "the chosen one has a ring"
    assert marks(figure, "D") == [(450, 3.2)]
    assert any(list(line.get_xdata()) == [500.0, 500.0] for line in axes.lines), "the memory limit"
    assert any(list(line.get_ydata()) == [2.2, 2.2] for line in bar.lines), "the latency limit"
    hollow = [line for line in axes.lines if line.get_marker() == "o" and line.get_markerfacecolor() == "white"]
    assert [line.get_xdata()[0] for line in hollow] == [1_000]
    stairs = next(line for line in axes.lines if line.get_drawstyle() == "steps-post")
    assert list(stairs.get_xdata()) == [200, 450, 1_000]
    assert list(stairs.get_ydata()) == [3.7, 3.4, 3.0]


def test_pareto_front_without_a_latency_table_claims_no_latency() -> None:
    search = SearchData(tuple(replace(point, latency_ms=None) for point in POINTS), 9)
    figure = pareto_front(replace(BARE, search=search))
    assert len(figure.axes) == 1
    assert "latency" not in figure.axes[0].get_title(loc="left")


def test_pareto_front_leaves_out_the_hopeless_and_counts_them() -> None:
    search = SearchData((*POINTS, SearchPoint(100, 100, 8.0, 8.0, latency_ms=0.5, on_front=True)), 9)
    figure = pareto_front(replace(BARE, search=search))
    assert figure.axes[0].get_ylim()[1] < 4.0
    assert any("1 above the frame" in text for text in texts(figure))


def test_kept_grid_counts_each_layer() -> None:
    kept = Kept((True, True, False), ((), (True, False, True, False), (False,) * 4))
    figure = kept_grid(replace(BARE, kept=kept))
    assert {"dense", "2 of 4", "dropped"} <= set(texts(figure))
    (mesh,) = (each for each in figure.axes[0].collections if isinstance(each, QuadMesh))
    cells = np.ma.filled(mesh.get_array().astype(float), math.nan).reshape(3, 6)
    assert cells[:, 0].tolist() == [2, 2, 0]
    assert cells[1, 2:].tolist() == [1, 0, 1, 0]
    assert np.isnan(cells[0, 1:]).all(), "a dense layer has no experts to keep"


def test_relative_load_is_one_in_perfect_balance_of_what_is_kept() -> None:
    (row,) = Load("corner", (0,), ((0.5, None, 0.5, None),)).relative
    assert [row[0], row[2]] == [1.0, 1.0]
    assert math.isnan(row[1])


def test_an_idle_expert_is_no_missing_expert() -> None:
    figure = expert_load(replace(BARE, loads=(Load("full", (1,), ((0.0, 1.0, None),)),)))
    (mesh,) = (each for each in figure.axes[0].collections if isinstance(each, QuadMesh))
    cells = mesh.get_array().reshape(-1)
    assert cells.mask.tolist() == [False, False, True]
    assert cells[0] < 0.5 < 1.5 < cells[1]


def test_cost_bars_add_up() -> None:
    rows = (LedgerRow("p", "parent", receipt("pretrain", 900)), LedgerRow("h", "own", receipt("heal", 100)))
    ledger = Ledger(rows, receipt("heal", 100), receipt("pretrain + heal", 1_000))
    family = Family((FamilyRow("h", 100, Alone(700, "computed")),), 900, "computed")
    figure = cost_bars(replace(BARE, ledger=ledger, family=family))
    ends: dict[float, float] = {}
    for bar in figure.axes[0].patches:
        place = round(bar.get_y() + bar.get_height() / 2)
        ends[place] = max(ends.get(place, 0.0), bar.get_x() + bar.get_width())
    # the axis is in thousands, since the largest bar is
    assert [round(1000 * ends[place]) for place in range(4)] == [100, 1_000, 1_000, 700]
    assert any("computed" in label.get_text() for label in figure.axes[0].get_yticklabels())


def test_a_model_without_a_parent_has_one_bar() -> None:
    alone = receipt("pretrain", 900)
    figure = cost_bars(replace(BARE, ledger=Ledger((LedgerRow("p", "own", alone),), alone, alone)))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["this model alone"]


def test_curves_skip_what_is_not_finite_and_name_their_ends() -> None:
    rows = ({"step": 1, "loss/full": 5.0}, {"step": 2, "loss/full": math.nan}, {"step": 3, "loss/train": 1.0},
            {"step": 4, "loss/full": 4.0, "loss/corner": 4.5})  # fmt: skip
    curve = Curve("full", rows, tokens_per_step=10.0)
    assert curve.held_out() == ("full", "corner")
    figure = training_curves(replace(BARE, pretraining=curve))
    lines = figure.axes[0].lines
    assert [list(line.get_xdata()) for line in lines] == [[10.0, 40.0], [40.0]]
    assert {"full  4.000", "corner  4.500"} <= set(texts(figure))
    assert figure.axes[0].get_xlabel() == "Training tokens"


def test_curves_without_a_token_count_run_over_steps() -> None:
    healing = (Curve("corner", ({"step": 3, "loss/full": 2.0},)),)
    figure = training_curves(replace(BARE, healing=healing))
    assert [axes.get_xlabel() for axes in figure.axes] == ["Steps"]


def test_pictures_are_opaque_on_white_and_wide_enough() -> None:
    png, size = to_png(loss_against_compute(BARE))
    pixels = imread(BytesIO(png))
    assert pixels.shape[:2] == size[::-1]
    assert size[0] >= 1200
    assert pixels[0, 0].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert (pixels[..., 3] == 1.0).all()


def test_drawing_changes_no_global_setting() -> None:
    before = dict(matplotlib.rcParams)
    to_png(loss_against_compute(BARE))
    assert dict(matplotlib.rcParams) == before


def test_names_are_never_read_as_formulas() -> None:
    bad = r"$\nosuchcommand{$"
    cost = receipt(bad, 900)
    data = ReportData(
        bad,
        (replace(FULL, name=bad),),
        search=SearchData(tuple(replace(point, name=bad) for point in POINTS), 9, workload=bad),
        loads=(Load(bad, (1,), ((0.0, 1.0, None),)),),
        ledger=Ledger((LedgerRow(bad, "own", cost),), cost, cost),
        family=Family((FamilyRow(bad, 100, Alone(700, "computed")),), 900, "computed"),
        healing=(Curve(bad, ({"step": 3, "loss/full": 2.0},)),),
    )
    for draw in (loss_against_compute, pareto_front, expert_load, cost_bars, training_curves):
        draw(data).draw_without_rendering()  # would raise if one were


@pytest.mark.parametrize(("low", "high"), [(7e6, 7e6), (2.6e6, 5.2e6), (1e3, 1e12)])
def test_log_axes_have_a_few_ticks_whatever_they_span(low: float, high: float) -> None:
    axes = dress(blank(4, 3).subplots(), "", "", "")
    log_ticks(axes, low, high)
    inside = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    assert 1 <= len(inside) <= 12


def test_labels_of_close_points_do_not_overlap() -> None:
    figure = blank(8, 5)
    axes = dress(figure.subplots(), "", "", "")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    labels = [Label(0.5, 0.5 + 0.01 * place, f"a label {place}") for place in range(5)]
    place_labels(axes, labels, [(label.x, label.y, 6.0) for label in labels])
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = [Text.get_window_extent(text, renderer) for text in axes.texts]  # without leader lines
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])


def test_the_full_network_is_ink_and_the_rest_differ() -> None:
    found = colours(["full", "a", "b", "c"])
    assert len(set(found.values())) == 4


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=12), st.floats(0.01, 5))
def test_spread_keeps_order_distance_and_mean(values: list[float], gap: float) -> None:
    placed = spread(values, gap)
    order = np.argsort(values, kind="stable")
    steps = np.diff(np.array(placed)[order])
    assert (steps >= gap * (1 - 1e-9) - 1e-9).all()
    assert np.mean(placed) == pytest.approx(np.mean(values), abs=1e-6)
    apart = np.sort(values)
    if (np.diff(apart) >= gap).all():
        assert placed == pytest.approx(values)
