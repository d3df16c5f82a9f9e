from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from stretto.api.search import Search
from stretto.report.search import Kept, Load, candidates, expert_load, kept_grid, search_caption
from tests.report.searches import Point, searched

POINTS = (
    Point(1_000, 600, 3.0, 3.0, latency_ms=4.0, name="full", on_front=True),
    Point(450, 300, 3.35, 3.4, latency_ms=2.0, healed_nll=3.2, on_front=True, chosen=True),
    Point(480, 310, 3.45, 3.5, latency_ms=2.1),
    Point(200, 200, 3.6, 3.7, latency_ms=1.0, on_front=True),
)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def marks(figure: Figure, marker: str) -> list[tuple[float, float]]:
    lines = [line for line in figure.axes[0].lines if line.get_marker() == marker]
    return [(float(x), float(y)) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def test_candidates_shows_candidates_limits_and_the_chosen() -> None:
    search = searched(POINTS, 9, max_total=0.5, max_latency_ms=2.2)
    figure = candidates(search)
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


@pytest.mark.parametrize("layers", ["free", "nested"])
def test_a_table_explains_brackets_where_it_may_have_them(layers: Literal["free", "nested"]) -> None:
    found = searched(POINTS, 9)
    table = Search(found.replace(space=found.space.replace(layers=layers))).table
    assert ("layers in brackets" in table.note) is (layers == "free")
    assert table.note.startswith("* chosen; ") and table.note.endswith("; loss in nats per token on held-out text")


def test_candidates_without_a_latency_table_claims_no_latency() -> None:
    search = searched(tuple(replace(point, latency_ms=None) for point in POINTS), 9)
    figure = candidates(search)
    assert len(figure.axes) == 1
    assert "latency" not in figure.axes[0].get_title(loc="left")


def test_candidates_leaves_out_the_hopeless_and_counts_them() -> None:
    search = searched((*POINTS, Point(100, 100, 8.0, 8.0, latency_ms=0.5, on_front=True)), 9)
    figure = candidates(search)
    assert figure.axes[0].get_ylim()[1] < 4.0
    assert any("1 above the frame" in text for text in texts(figure))


def test_kept_grid_counts_each_layer() -> None:
    kept = Kept((True, True, False), ((), (True, False, True, False), (False,) * 4))
    figure = kept_grid(kept)
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
    figure = expert_load([Load("full", (1,), ((0.0, 1.0, None),))])
    (mesh,) = (each for each in figure.axes[0].collections if isinstance(each, QuadMesh))
    cells = mesh.get_array().reshape(-1)
    assert cells.mask.tolist() == [False, False, True]
    assert cells[0] < 0.5 < 1.5 < cells[1]


def test_search_caption_states_the_limits() -> None:
    points = (
        Point(6_412_801, 2_301_443, 3.21, 3.214, 1.92, name="full", on_front=True),
        Point(2_170_003, 1_120_009, 3.38, 3.402, 1.12, 3.301, "corner", on_front=True, chosen=True),
    )
    search = searched(points, 1834, 0.34, 0.5, 2.0, 0.87)
    assert "1 meet the limits (total ≤ 34 %, active ≤ 50 %, latency ≤ 2.00 ms)" in search_caption(search)
    free = searched(points, 9)
    assert "no limit was set" in search_caption(free)
    assert "Too few candidates for a rank" in search_caption(free)
