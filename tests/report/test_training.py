from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import matplotlib
import pytest
from matplotlib.image import imread
from rich.console import Console

from stretto.base.errors import UserError
from stretto.base.records import (
    Family,
    FamilyRow,
    Ledger,
    LedgerRow,
    Receipt,
    family,
    ledger,
)
from stretto.report.comparison import compare
from stretto.report.page import PAGE, REPORT_FOLDER, Section, render, to_png, write_page
from stretto.report.search import Kept, Load
from stretto.report.training import (
    Curve,
    ReportData,
    Size,
    compute_caption,
    curves_caption,
    headline,
    loss_against_compute,
    report_page,
    size_table,
    training_curves,
)
from tests.report.searches import Point, searched
from tests.report.test_cost import lineage
from tests.report.test_evals import evaluation
from tests.report.test_search import POINTS, marks, texts

HOSTILE = "<script>alert('x')</script>&\"[red]$\\frac{"
VOID = {"meta", "img", "br"}
FULL = Size("full", "4 layers, 8 experts, top-2", 6_412_801, 2_301_443, 5_230_007, 4_096, 1.92, 3.214159)
NETWORK = Size("full", "4 layers", 1_000, 600, 2_000, 64, nll=3.0)
HALF = Size("corner", "2 layers", 400, 300, 900, 32, nll=3.4, healed_nll=3.2)
BARE = ReportData("run", (NETWORK,))
CORNER = Size("corner", "2 layers, 3 experts, top-2", 2_170_003, 1_120_009, 2_610_011, 2_048, 1.12, 3.402, 3.301)


@pytest.fixture(scope="module")
def data() -> ReportData:
    """A run that has done everything."""
    parent = lineage("demo", "pretrain", 60_000)
    healed = lineage("healed", "heal", 5_200, parent)
    points = (
        Point(6_412_801, 2_301_443, 3.21, 3.214, 1.92, name="full", on_front=True),
        Point(2_170_003, 1_120_009, 3.38, 3.402, 1.12, 3.301, "corner", on_front=True, chosen=True),
    )
    losses = tuple({"step": step, "loss/full": 9 / step, "loss/corner": 9.5 / step} for step in (1, 2, 3))
    return ReportData(
        name="demo",
        sizes=(FULL, CORNER),
        shape=("4 layers, hidden 64",),
        environment="a CPU, commit abc",
        samples=(("full", "def f", " a < b"),),
        pretraining=Curve("full", losses, 2048.0),
        healing=(Curve("corner", ({"step": 0, "loss/full": 3.4}, {"step": 5, "loss/full": 3.3}), 2048.0),),
        search=searched(points, 1834, 0.34, 0.5, 2.0, 0.87),
        kept=Kept((True, False), ((True, False), (False, False))),
        loads=(Load("full", (0, 1), ((0.5, 0.5), (0.25, 0.75))),),
        ledger=ledger(healed),
        family=family([parent, healed], [48_000, 24_000]),
        mixture_drawn={"full": 0.412, "corner": 0.588},
        mixture_configured={"full": 0.4, "corner": 0.6},
        recipe="[model]\nnum_layers = 4",
    )


@pytest.mark.slow
def test_the_story_goes_on_with_post_training(data: ReportData, tmp_path: Path) -> None:
    models = [evaluation("healed", {"sums": [0.0] * 8}), evaluation("sft", {"sums": [0.0, 1.0] * 4})]
    commands = (("Serve it", "stretto serve runs/demo/post/sft"),)
    told = replace(data, post=compare(models, {}, reference=0), commands=commands)
    page = report_page(told)
    assert [section.slug for section in page.sections][6:] == ["domains", "cost", "samples", "next"]
    assert "Post-trained: sft scores 50 %" in page.headline
    path = write_page(page, tmp_path)
    assert (path.parent / "domains.png").is_file() and "stretto serve runs/demo/post/sft" in path.read_text()


@pytest.fixture(scope="module")
def page(data: ReportData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(report_page(data), tmp_path_factory.mktemp("run"))


class Reader(HTMLParser):
    """Tags, attributes and exact numbers of a page; checks on the way that tags close in order."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.values: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] == "data":
            self.values.append((str(self.tags[-1][1]["value"]), data))


def drawn(data: ReportData) -> dict[str, Section]:
    """The sections that have a picture."""
    return {section.slug: section for section in report_page(data).sections if section.draw is not None}


def test_report_holds_every_picture_twice_and_alike(page: Path, data: ReportData) -> None:
    assert page.name == PAGE and page.parent.name == REPORT_FOLDER
    text = page.read_text(encoding="utf-8")
    files = sorted(page.parent.glob("*.png"))
    assert {file.stem for file in files} == set(drawn(data))
    for file in files:
        assert base64.b64encode(file.read_bytes()).decode() in text, file.name
    assert sorted(page.parent.iterdir()) == sorted([page, *files]), "nothing half-written is left"


def test_page_is_self_contained(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "http://" not in text and "https://" not in text
    assert "url(" not in text and "@import" not in text
    reader = Reader(text)
    for tag, attributes in reader.tags:
        assert tag not in {"script", "link", "iframe", "object", "embed"}
        assert "href" not in attributes and "srcset" not in attributes
        assert (attributes.get("src") or "data:").startswith("data:")


def test_page_is_semantic(page: Path) -> None:
    reader = Reader(page.read_text(encoding="utf-8"))
    counts = Counter(tag for tag, _ in reader.tags)
    assert counts["h1"] == counts["main"] == counts["title"] == counts["details"] == 1
    assert counts["figure"] == counts["figcaption"] == counts["img"] == 6
    assert all(attributes["alt"] for tag, attributes in reader.tags if tag == "img")
    assert ("html", {"lang": "en"}) in reader.tags
    assert any(attributes.get("name") == "viewport" for _, attributes in reader.tags)


def test_numbers_on_the_page_are_the_datas(page: Path, data: ReportData) -> None:
    values = Reader(page.read_text(encoding="utf-8")).values
    for size in data.sizes:
        exact = (size.total_params, size.active_params, size.flops_per_token, size.kv_bytes_per_token, size.latency_ms)
        for number in (*exact, size.nll, size.healed_nll):
            if number is not None:
                assert str(number) in dict(values), number
    assert (str(FULL.nll), "3.214") in values
    assert data.ledger is not None
    assert (str(data.ledger.with_parents.flops), "65.2 kFLOPs") in values


def test_samples_and_recipe_are_shown_as_written(page: Path) -> None:
    reader = Reader(page.read_text(encoding="utf-8"))
    assert "def f a < b" in reader.text
    assert "[model]\nnum_layers = 4" in reader.text


def test_same_data_gives_the_same_bytes(tmp_path: Path) -> None:
    data = ReportData("demo", (FULL, CORNER))
    first, second = (write_page(report_page(data), tmp_path / name).read_bytes() for name in ("a", "b"))
    assert first == second


def test_a_network_alone_gets_its_table_and_no_empty_section(tmp_path: Path) -> None:
    page = write_page(report_page(ReportData("bare", (replace(NETWORK, nll=3.0),))), tmp_path)
    assert list(page.parent.glob("*.png")) == [], "one evaluation is no scatter plot"
    reader = Reader(page.read_text(encoding="utf-8"))
    assert [attributes["id"] for tag, attributes in reader.tags if tag == "section"] == ["sizes"]
    assert "None" not in reader.text and "nan" not in reader.text


def test_an_evaluation_at_one_step_is_no_curve(data: ReportData) -> None:
    rows = ({"step": 5, "loss/full": 3.3},)
    once = replace(data, pretraining=Curve("full", rows, 10.0), healing=(Curve("corner", rows, 10.0),))
    assert "training_curves" not in drawn(once) and "training_curves" in drawn(data)


@pytest.mark.parametrize(
    ("lacking", "slug"),
    [
        (lambda data: replace(data, search=None), "pareto_front"),
        (lambda data: replace(data, kept=None), "kept"),
        (lambda data: replace(data, loads=()), "expert_load"),
        (lambda data: replace(data, ledger=None, family=None), "cost"),
    ],
)
def test_an_empty_section_vanishes(data: ReportData, lacking: Callable[[ReportData], ReportData], slug: str) -> None:
    complete, partial = (render(report_page(each), {}) for each in (data, lacking(data)))
    assert f'id="{slug}"' in complete and f'id="{slug}"' not in partial


@pytest.mark.parametrize(
    ("lacking", "sentence"),
    [
        (lambda data: replace(data, sizes=tuple(replace(size, latency_ms=None) for size in data.sizes)), "Latency was not"),
        (lambda data: replace(data, sizes=tuple(replace(size, healed_nll=None) for size in data.sizes)), "No size was healed"),
    ],
)  # fmt: skip
def test_what_a_table_lacks_is_said(
    data: ReportData, lacking: Callable[[ReportData], ReportData], sentence: str
) -> None:
    complete, partial = (Reader(render(report_page(each), {})).text for each in (data, lacking(data)))
    assert sentence not in complete
    assert sentence in partial


def test_a_caption_names_no_size_that_another_beats_on_both_axes() -> None:
    sizes = (
        replace(NETWORK, nll=3.0),
        replace(HALF, healed_nll=None),
        replace(HALF, name="odd", flops_per_token=1500, nll=3.6, healed_nll=None),
    )
    said = compute_caption(ReportData("run", sizes))
    assert said.startswith("From full at 3.000 to corner at 3.400 nats per token, for 45 % of its FLOPs.")
    assert "Not on the Pareto front: odd." in said
    worse = (replace(NETWORK, nll=3.5), replace(HALF, nll=3.4, healed_nll=None))
    said = compute_caption(ReportData("run", worse))
    assert "corner reaches 3.400 nats per token with the least compute." in said and "From full" not in said


def test_pictures_are_drawn_from_what_is_there(data: ReportData) -> None:
    points = (Point(6_412_801, 2_301_443, 3.21, 3.214, name="full", on_front=True),
              Point(2_170_003, 1_120_009, 3.38, 3.402, name="corner", on_front=True, chosen=True))  # fmt: skip
    partial = replace(
        data,
        sizes=tuple(replace(size, latency_ms=None, healed_nll=None) for size in data.sizes),
        search=searched(points, 2),
        healing=(),
        family=None,
    )
    assert len(drawn(partial)) == 6
    for section in drawn(partial).values():
        assert section.draw is not None and section.draw().axes
        assert "None" not in section.text


def test_hostile_text_stays_text(data: ReportData) -> None:
    hostile = replace(
        data,
        name=HOSTILE,
        sizes=tuple(replace(size, name=size.name + HOSTILE, label=HOSTILE) for size in data.sizes),
        shape=(HOSTILE,),
        environment=HOSTILE,
        samples=((HOSTILE, HOSTILE, HOSTILE),),
        mixture_drawn={HOSTILE: 1.0},
        recipe=HOSTILE,
    )
    text = render(report_page(hostile), {})
    reader = Reader(text)
    assert "script" not in {tag for tag, _ in reader.tags}
    assert "<script" not in text
    assert reader.text.count(HOSTILE) >= 10


def test_a_second_report_replaces_the_first_whole(data: ReportData, tmp_path: Path) -> None:
    alone = ReportData("demo", (Size("full", "1 layer", 10, 10, 20, 4),))
    write_page(report_page(replace(alone, kept=data.kept)), tmp_path)
    assert (tmp_path / REPORT_FOLDER / "kept.png").exists()
    page = write_page(report_page(alone), tmp_path)
    assert [path.name for path in page.parent.iterdir()] == [PAGE]
    assert [path.name for path in tmp_path.iterdir()] == [REPORT_FOLDER]


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_page(report_page(ReportData("bare", (Size("full", "1 layer", 10, 10, 20, 4),))), tmp_path / "file")


@pytest.mark.parametrize(
    ("full", "said"), [(3.322, "0.021 nats below"), (3.3, "0.001 nats above"), (3.3012, "equal to")]
)
def test_captions_follow_the_numbers(data: ReportData, full: float, said: str) -> None:
    other = replace(data, sizes=(replace(FULL, nll=full), CORNER))
    assert f"healed, its held-out loss is {said} the full network's." in headline(other)
    assert "Healing changes the loss of corner by −0.101." in compute_caption(data)


def test_headline_compares_with_the_full_network(data: ReportData) -> None:
    assert "corner, has 34 % of the parameters and 49 % of the active parameters" in headline(data)
    assert "healed, its held-out loss is 0.087 nats above the full network's" in headline(data)
    zero_shot = replace(data, sizes=(FULL, replace(CORNER, healed_nll=None)))
    assert "its held-out loss is 0.188 nats above" in headline(zero_shot)


def test_loss_against_compute_marks_every_loss_where_it_lies() -> None:
    data = ReportData("run", (NETWORK, HALF))
    figure = loss_against_compute(data)
    assert marks(figure, "o") == [(2_000, 3.0), (900, 3.4)]
    assert marks(figure, "D") == [(900, 3.2)]
    assert {"full  3.000", "corner  3.400", "healed  3.200"} <= set(texts(figure))


def test_a_size_that_was_only_healed_is_named_so() -> None:
    figure = loss_against_compute(ReportData("run", (NETWORK, replace(HALF, nll=None))))
    assert "corner, healed  3.200" in texts(figure)
    assert marks(figure, "o") == [(2_000, 3.0)]


def test_curves_skip_what_is_not_finite_and_name_their_ends() -> None:
    rows = ({"step": 1, "loss/full": 5.0}, {"step": 2, "loss/full": math.nan, "loss/corner": 4.7}, {"step": 3, "loss/train": 1.0},
            {"step": 4, "loss/full": 4.0, "loss/corner": 4.5})  # fmt: skip
    curve = Curve("full", rows, tokens_per_step=10.0)
    assert curve.held_out() == ("full", "corner")
    figure = training_curves(replace(BARE, pretraining=curve))
    lines = figure.axes[0].lines
    assert [list(line.get_xdata()) for line in lines] == [[10.0, 40.0], [20.0, 40.0]]
    assert {"full  4.000", "corner  4.500"} <= set(texts(figure))
    assert figure.axes[0].get_xlabel() == "Training tokens"


def test_a_run_without_a_held_out_loss_shows_its_training_loss() -> None:
    rows = ({"step": 5, "loss/train": 7.25}, {"step": 10, "loss/train": 5.7}, {"step": 20, "loss/full": 5.0})
    short = replace(BARE, pretraining=Curve("full", rows, 10.0), stage="sft")
    figure = training_curves(short)
    assert "train  5.700" in texts(figure) and figure.axes[0].get_ylabel() == "Training loss, nats per token"
    assert curves_caption(short) == "Training loss after 100 tokens of fine-tuning: train 5.700."
    assert "mean since the previous point, on the training text" in texts(figure)
    assert "full network" not in drawn(short)["training_curves"].alt


@pytest.mark.parametrize(("num_steps", "is_cut"), [(8, False), (40, True)])
def test_only_a_long_run_lies_in_part_above_the_frame(num_steps: int, is_cut: bool) -> None:
    rows = tuple({"step": step, "loss/full": 9.0 if step == 0 else 4.0} for step in range(num_steps))
    figure = training_curves(replace(BARE, pretraining=Curve("full", rows, 10.0)))
    assert (figure.axes[0].get_ylim()[1] < 9.0) == is_cut


def test_healing_alone_has_one_panel() -> None:
    healing = (Curve("corner", ({"step": 0, "loss/full": 2.2}, {"step": 3, "loss/full": 2.0}), 10.0),)
    figure = training_curves(replace(BARE, healing=healing))
    assert [axes.get_xlabel() for axes in figure.axes] == ["Training tokens"]


def test_pictures_are_opaque_on_white_and_wide_enough() -> None:
    pixels = imread(BytesIO(to_png(loss_against_compute(BARE))))
    assert pixels.shape[1] >= 1200
    assert pixels[0, 0].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert (pixels[..., 3] == 1.0).all()


@pytest.mark.slow
def test_drawing_changes_no_global_setting() -> None:
    before = dict(matplotlib.rcParams)
    to_png(loss_against_compute(BARE))
    assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
def test_names_are_never_read_as_formulas() -> None:
    bad = r"$\nosuchcommand{$"
    spent = Receipt(stage=bad, device="a CPU", flops=900)
    data = ReportData(
        bad,
        (replace(NETWORK, name=bad), replace(HALF, name=bad + "2")),
        search=searched(tuple(replace(point, name=bad) for point in POINTS), 9),
        loads=(Load(bad, (1,), ((0.0, 1.0, None),)),),
        ledger=Ledger((LedgerRow(bad, "own", spent),), spent, spent),
        family=Family((FamilyRow(bad, 100, 700),), 900, True),
        healing=(Curve(bad, ({"step": 1, "loss/full": 2.5}, {"step": 3, "loss/full": 2.0}), 10.0),),
    )
    found = drawn(data)
    assert set(found) == {"loss_compute", "pareto_front", "expert_load", "cost", "training_curves"}
    for section in found.values():
        assert section.draw is not None
        section.draw().draw_without_rendering()  # would raise if one were


def test_console_tables_show_names_as_they_are() -> None:
    console = Console(width=160, color_system=None)
    data = ReportData("demo", (FULL, replace(CORNER, name="[red]corner")))
    with console.capture() as capture:
        console.print(size_table(data))
    text = capture.get()
    assert "[red]corner" in text
    for shown in ("6.41M", "34 %", "2.61M", "1.12 ms", "3.402", "+0.087"):
        assert shown in text


def test_no_difference_is_shown_beside_the_full_network_itself() -> None:
    full, corner = size_table(ReportData("demo", (FULL, CORNER))).rows
    assert all(cell.note == "" for cell in full[1:])
    assert [cell.note for cell in corner[-2:]] == ["+0.188", "+0.087"]


def test_a_curve_is_named_by_its_stage(data):
    continued = replace(data, stage="elasticize")
    assert "tokens of pre-training" in curves_caption(data) and "tokens of elasticizing" in curves_caption(continued)
    assert training_curves(continued).axes[0].get_title(loc="left") == "Elasticizing"
