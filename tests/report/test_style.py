from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from stretto.report.page import to_png
from stretto.report.style import Label, blank, colours, dress, log_ticks, name_ends, place_labels, spread, subtitle


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


def test_names_at_the_ends_of_curves_stay_below_the_subtitle() -> None:
    figure = blank(5.0, 3.0)
    axes = dress(figure.subplots(), "Requests", "Step", "")
    subtitle(axes, ["a long explanation that goes on beyond the frame of the picture"])
    axes.set_ylim(0.0, 8.4)
    ends = [Label(1.0, y, f"end {place}", "#000000") for place, y in enumerate((8.3, 0.0, 0.0, 0.0))]
    name_ends((axes, ends))
    figure.canvas.draw()
    boxes = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}
    names = sorted((box for text, box in boxes.items() if text.startswith("end")), key=lambda box: box.y0)
    (above,) = (box for text, box in boxes.items() if text.startswith("a long"))
    assert names[-1].y1 <= above.y0
    assert all(low.y1 <= high.y0 for low, high in pairwise(names))


def test_a_figure_with_names_at_its_curves_is_laid_out_once_and_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for owner, name in ((ConstrainedLayoutEngine, "execute"), (Figure, "draw")):
        exact = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, exact=exact, name=name: (seen.append(name), exact(*args)))
    axes = dress(blank(5.0, 3.0).subplots(), "Reward", "Step", "")
    axes.plot([0, 1], [0, 1])
    name_ends((axes, [Label(1.0, 1.0, "trained  1.0")]))
    to_png(axes.figure)
    assert seen == ["execute", "draw"]


def test_a_saved_name_ends_inside_its_figure_and_beside_its_curve() -> None:
    figure = blank(5.0, 3.0)
    axes = dress(figure.subplots(), "Reward", "Step", "")
    axes.plot([0, 1], [0, 1])
    name_ends((axes, [Label(1.0, 0.7, "a name of more than a few characters")]))
    to_png(figure)
    box = Text.get_window_extent(axes.texts[0])
    assert axes.get_window_extent().x1 < box.x0 < box.x1 <= figure.bbox.x1
    end = float(axes.transData.transform((1.0, 0.7))[1])
    assert box.y0 < end < box.y1
