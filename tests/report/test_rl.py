from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stretto
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.paths import RECIPE_FILE, RECIPES, write_json, write_text
from stretto.flow.log import Span, Trace
from stretto.learning.recipe import JOURNAL_FILE, RlRecipe
from stretto.report.page import Section, render, write_page
from stretto.report.rl import (
    RlData,
    endings,
    headline,
    health,
    is_rl_run,
    mismatch,
    panels,
    queues,
    read_rl_run,
    rl_page,
    smoothed,
    summary,
)
from stretto.report.rl_timeline import covered, timeline, timeline_caption, without_gaps

STEPS = 12
SOURCES = ("backward", "sums")


def row(step: int) -> dict[str, float]:
    """What a run logs of a step, that it went well in all ways but a few."""
    named = {f"reward/source/{name}": 0.1 * step for name in SOURCES}
    for kind, size in (("same", 0.0), ("stale", 1e-4)):
        named |= {
            f"mismatch/{kind}_k3_{name}": size * scale for name, scale in (("mean", 1), ("p99", 10), ("max", 100))
        }
    return named | {
        "step": step, "reward/mean": 0.05 * step, "reward/ok": 0.05 * step, "staleness/max": 3.0, "staleness/mean": 1.5,
        "staleness/versions_per_sample": 1.2, "mismatch/same_share": 0.25, "policy/ess": 0.98, "policy/chi2": 0.01,
        "policy/clip_fraction": 0.0, "policy/correction_fraction": 0.001, "policy/correction_mean": 1.0,
        "policy/ratio_max": 1.3, "policy/entropy": 1.0, "policy/nll": 1.1, "optim/grad_norm": 0.5, "routes/flips": 0.01,
        "experts/max_overload": 3.0, "samples/tokens_mean": 5.0, "samples/tokens_p95": 7.0, "samples/tokens_max": 9.0,
        "samples/truncated": 0.1, "groups/uniform_share": 0.3, "reward/latency_p50_s": 0.01, "reward/latency_p95_s": 0.2,
        "verdicts/ok": 0.4, "verdicts/wrong": 0.6, "time/wall_s": 2.0, "wait/trainer_s": 0.5, "busy/trainer/step_s": 1.2,
        "busy/trainer/publish_s": 0.1, "bubble/trainer": 0.25, "bubble/engine-0": 0.4, "groups/in_flight": 4.0,
        "groups/ready": 8.0, "groups/training": 0.0, "groups/free_slots": 2.0, "queue/engine_waiting": 3.0,
        "groups/trained": 8.0 * step, "groups/filtered": 2.0 * step, "groups/stale": 0.0, "groups/failed": 0.0,
        "failures/restarts": float(step == 5), "discarded/filtered_tokens": 80.0, "speed/tokens_per_s": 160.0,
        "speed/samples_per_s": 32.0, "time/update_s": 0.6, "time/recompute_s": 0.5, "time/load_s": 0.1,
        "time/activate_s": 0.05, "engines/cached_share": 0.5, "engines/tokens_per_s": 200.0,
    }  # fmt: skip


def spans() -> list[Span]:
    """Steps of 2 s that train the groups that were drawn two steps before; one group in four is never trained."""
    found = []
    for step in range(1, STEPS + 1):
        start = 1000.0 + 2 * step
        ordinals = tuple(range(4 * step, 4 * step + 3))
        found.append(Span("trainer", "step", start, start + 1.6, facts={"step": step - 1, "ordinals": ordinals}))
        found.append(Span("trainer", "wait", start + 1.6, start + 2.0))
        found.append(Span("engine-0", "activate", start + 1.7, start + 1.8, facts={"version": step}))
        found += [
            Span("agents", "group", start - 4, start - 2.5, lane, {"ordinal": 4 * step + lane}) for lane in range(4)
        ]
    return found


DATA = RlData(
    "digits <b>",
    (
        *(row(step) for step in range(1, STEPS + 1)),
        {"step": 0, "eval/reward": 0.1},
        {"step": STEPS, "eval/reward": 0.6},
    ),
    bound=4,
    num_steps=STEPS,
    spans=tuple(spans()),
    recipe="staleness = 4",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(rl_page(DATA), tmp_path_factory.mktemp("run"))


def pictures(data: RlData) -> dict[str, Section]:
    """The sections that may have a picture."""
    return {section.slug: section for section in rl_page(data).sections if not section.tables}


@pytest.mark.slow
def test_every_picture_is_in_the_folder_and_on_the_page(page: Path) -> None:
    slugs = set(pictures(DATA))
    assert {file.stem for file in page.parent.glob("*.png")} == slugs
    text = page.read_text(encoding="utf-8")
    assert text.count('src="data:image/png;base64,') == len(slugs)
    assert "http" not in text.replace("Content-Security-Policy", "").replace("http-equiv", ""), "nothing is fetched"
    assert "digits &lt;b&gt;" in text and "<b>" not in text


def test_the_numbers_are_those_of_the_rows() -> None:
    assert headline(DATA).startswith("12 steps: held-out reward from 0.100 to 0.600. ")
    assert "Largest staleness of a trained token: 3 versions (bound 4)." in headline(DATA)
    table = {cells[0].text: cells[1] for cells in summary(DATA).rows}
    assert table["samples trained"].value == 32 * 2 * STEPS
    assert table["trainer idle"].value == pytest.approx(0.25)
    assert table["groups dropped (equal rewards)"].value == 2.0 * STEPS
    assert table["roles restarted"].value == 1, "a sum over the run, not the last step's"
    assert "mean 0, largest 0; over tokens of older weights, mean 1e−4" in mismatch(DATA).caption
    assert "96 trained and 24 dropped" in endings(DATA).caption
    assert "For 1.0 % of the pairs of token and MoE layer" in health(DATA).caption


def test_a_run_without_steps_shows_its_summary_alone() -> None:
    bare = replace(DATA, rows=(), spans=())
    assert all(section.draw is None for section in pictures(bare).values())
    text = render(rl_page(bare), {})
    assert text.count("<section") == 1 and 'id="summary"' in text and "nan" not in text.lower().split()


def test_metrics_that_are_missing_leave_their_curves_out() -> None:
    few = (
        "step",
        "reward/",
        "staleness/",
        "mismatch/same_share",
        "policy/ess",
        "policy/entropy",
        "samples/",
        "time/wall_s",
        "groups/",
        "speed/",
    )
    old = replace(
        DATA, rows=tuple({name: value for name, value in each.items() if name.startswith(few)} for each in DATA.rows)
    )
    for slug, section in pictures(old).items():
        assert section.draw is not None, slug
        if slug in ("samples", "waits", "queues", "endings"):
            assert section.draw().axes
        assert "None" not in section.text


def test_a_run_without_reward_has_an_axis_from_0_to_1() -> None:
    rows = tuple({"step": step, "reward/mean": 0.0, "eval/reward": 0.0} for step in (1, 2))
    draw = pictures(replace(DATA, rows=rows))["reward"].draw
    assert draw is not None and draw().axes[0].get_ylim() == (0.0, 1.0)


def test_the_curve_between_the_values_is_their_running_mean() -> None:
    assert smoothed([2.0]).tolist() == [2.0]
    values = np.arange(60.0)
    assert smoothed(values)[30] == 30.0
    assert smoothed(values)[0] == pytest.approx(1.0), "at an end, of what there is"


def test_time_in_which_the_run_was_stopped_is_cut_out() -> None:
    first = [Span("trainer", "step", start, start + 1.0) for start in (0.0, 1.0, 2.0)]
    resumed = [Span("trainer", "step", 3600.0 + start, 3601.0 + start) for start in (0.0, 1.0)]
    moved, cuts = without_gaps([*resumed, *first])
    assert [(cut.at_s, cut.seconds) for cut in cuts] == [(3.0, 3597.0)]
    assert [work.started_s for work in moved] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert without_gaps(first)[1] == []


def test_time_that_was_worked_is_shared_out_among_bins() -> None:
    edges = np.array([0.0, 1.0, 2.0, 4.0])
    worked = covered([Span("a", "b", 0.5, 1.5), Span("a", "b", 1.0, 3.0)], edges)
    assert (worked * np.diff(edges)).tolist() == [0.5, 1.5, 1.0]
    assert covered([], edges).tolist() == [0.0, 0.0, 0.0]


def test_series_of_a_run_that_was_resumed_have_one_value_a_step() -> None:
    data = replace(DATA, rows=({"step": 1, "a": 1.0}, {"step": 2, "a": math.nan}, {"step": 1, "a": 3.0}))
    assert data.series("a") == {1: 3.0}


def test_groups_of_a_synchronous_run_none_alive_between_steps() -> None:
    none_alive = {f"groups/{name}": 0.0 for name in ("in_flight", "ready", "training")}
    quiet = replace(DATA, rows=tuple(each | none_alive for each in DATA.rows))
    figure = panels(quiet, queues(quiet))
    assert figure.axes[0].collections


def test_steps_of_the_timeline_count_as_metrics_do() -> None:
    spans = [Span("trainer", "step", 10.0, 12.0, 0, {"step": 0, "ordinals": [5, 7]})]
    (*_, close_up) = timeline(spans).axes
    assert [text.get_text() for text in close_up.texts if "step 1" in text.get_text()] == ["step 1"]


def restarted() -> list[Span]:
    """Two steps, then a start of a minute, then three steps."""
    found = [Span("trainer", "start", 0.0, 60.0), Span("trainer", "start", 64.0, 124.0)]
    for step, start in enumerate((60.0, 62.0, 124.0, 126.0, 126.1)):
        found.append(Span("trainer", "step", start, start + 2.0, 0, {"step": step, "ordinals": [step]}))
        found.append(Span("engine-0", "activate", start + 1.8, start + 1.9, 0, {"version": step}))
    return found


def test_starts_of_the_trainer_are_drawn_with_their_share() -> None:
    trainer = timeline(restarted()).axes[0]
    assert "start  94 %" in [text.get_text() for text in trainer.texts]
    assert "are of all the time drawn, of which starts of the trainer took 2 min 00 s." in timeline_caption(
        spans()[1:] + restarted()
    )
    assert "starts" not in timeline_caption(spans())


def test_the_steps_in_detail_are_between_two_starts_and_their_labels_apart() -> None:
    (*_, close_up) = timeline(restarted()).axes
    assert close_up.get_title(loc="left") == "Steps 3 to 5 in detail"
    assert close_up.get_xlim()[0] > 123.0, "no start is stretched over the width"
    words = [text.get_text().strip() for text in close_up.texts]
    assert "step 3" in words and "step 4" in words and "step 5" not in words, "step 5 begins 0.1 s after step 4"
    assert [word for word in words if word in ("v2", "v3", "v4")] == ["v2", "v3"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run of one step has left."""
    recipe = read_recipe(RECIPES / "rl_gym.toml", RlRecipe, ["staleness=2", "train.steps=1"])
    write_json(tmp_path / RECIPE_FILE, recipe.model_dump(mode="json"))
    write_text(tmp_path / JOURNAL_FILE, "")
    write_text(tmp_path / "metrics.jsonl", '{"step": 1, "reward/mean": 0.5, "policy/ess": null}\n')
    with Trace(tmp_path) as trace:
        trace.add(Span("agents", "group", 9.0, 10.0, 3, {"ordinal": 5, "attempt": 0}))
        trace.add(Span("trainer", "step", 10.0, 12.0, 0, {"step": 0, "ordinals": [5, 7]}))
        trace.add(Span("engine-0", "activate", 12.0, 12.5, 0, {"version": 1}))
    return tmp_path


def test_a_run_is_known_by_its_files_and_gathered_from_them(run: Path) -> None:
    assert is_rl_run(run) and not is_rl_run(run.parent)
    assert stretto.write_report(run) == run / "report" / "report.html"
    with pytest.raises(UserError, match=r"^controls: .*an RL run, which has no control"):
        stretto.write_report(run, controls=[run])
    data = read_rl_run(run)
    assert (data.bound, data.num_steps, data.series("reward/mean"), data.has("policy/ess")) == (
        2,
        1,
        {1: 0.5},
        False,
    )
    group, step, activate = data.spans
    assert (group.facts, group.lane, group.started_s) == ({"ordinal": 5, "attempt": 0}, 3, 9.0)
    assert step.facts == {"step": 0, "ordinals": [5, 7]}
    assert activate.facts == {"version": 1}
    assert "problems: backward (gym)" in data.shape
    assert '"staleness": 2' in data.recipe


def test_a_run_that_has_logged_nothing_is_refused(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no such file"):
        read_rl_run(run)
