"""What evaluations show, and comparisons of models whose differences are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from stretto.base.errors import UserError
from stretto.base.table import Table
from stretto.evals.scores import Interval, flip_p, holm
from stretto.post.suite import Cost, DomainResult, Evaluation
from stretto.report.comparison import (
    Comparison,
    compare,
    comparison_page,
    comparison_table,
    domain_lines,
    score_by_cost,
    stage_table,
)
from stretto.report.evals import answers_table, asked_table, baseline_table, cost_table, evaluation_page, score_table
from stretto.report.page import write_page

SOME = Interval(0.25, 0.125, 0.5)


def domain(values: list[float | None], first: int = 0) -> DomainResult:
    mean = float(np.mean([value for value in values if value is not None]))
    return DomainResult(
        suite="s",
        is_graded=False,
        items=list(range(first, first + len(values))),
        values=values,
        score=Interval(mean, mean - 0.1, mean + 0.1),
        pass_at={1: SOME, 4: Interval(0.75, 0.5, 0.875)},
        majority_at={4: SOME},
        baselines={"empty": Interval(0.38, 0.3, 0.5), "frequent": SOME},
        diversity={"vendi": Interval(2.5, 2.0, 3.0)},
        entropy=1.5,
        num_tokens=31.0,
        finishes={"stop": 3, "length": 1},
        num_infra=2,
        pass_hat={1: SOME, 4: Interval(0.0625, 0.0, 0.125)},
    )


def evaluation(
    name: str, scores: dict[str, list[float | None]], active_params: int = 3_000_000, **suite: object
) -> Evaluation:
    sources = {each: {"kind": "strings", "args": {"format": "tags"}} for each in scores}
    told = {"sources": sources, "problems": 9, "max_tokens": 4, "temperature": 0.0, "samples": 4}
    asked = {"suites": {"s": told | suite}, "prompt": "chat template"}
    cost = Cost(9_000_000, active_params, 1e6, 1000, 2000, 65.0)
    return Evaluation(
        name, asked, Interval(0.3, 0.2, 0.4), {key: domain(values) for key, values in scores.items()}, cost
    )


START = {"sums": [0.0, 0.5, 0.25, 0.25] * 5, "words": [0.5, 1.0] * 10}
BETTER = {"sums": [0.5, 1.0, 0.75, 0.75] * 5, "words": [0.25, 0.75] * 10}
LOW = {name: [0.25, 0.5] * 10 for name in START}
MORE = {name: [min(1.0, value + 0.25) for value in values] for name, values in START.items()}
TEACHER = {"sums": [1.0, 1.0, 1.0, 1.0] * 5}


def printed(table: Table) -> str:
    console = Console(width=220, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_scores_stand_beside_the_trivial_baseline_and_their_cost() -> None:
    found = evaluation("tiny", START)
    scores = printed(score_table(found))
    for words in (
        "sums",
        "25 %",
        "75 %",
        "38 %",
        "Infra",
        "Trivial baseline",
        "empty answer",
        "maj@4",
        "pass@4",
        "pass^4",
        "6.2 %",
    ):
        assert words in scores, words
    assert "12 … 50 %" in scores
    assert score_table(found).rows[0][-1].text == "2"
    known = printed(baseline_table(found))
    assert "most frequent" in known
    assert "25 %" in known
    answers = printed(answers_table(found))
    assert "2.50" in answers
    assert "length 1, stop 3" in answers
    assert "trigrams" in answers
    cost = printed(cost_table(found))
    assert "9.00M" in cost
    assert "1 min 05 s" in cost
    headline = evaluation_page(found).headline
    assert "Not clearly above the trivial baseline: sums." in headline


def test_the_table_states_temperature_samples_and_prompt_format() -> None:
    found = evaluation("tiny", START, temperature=0.7)
    rows = {row[0].text: dict(zip(asked_table(found).columns, row, strict=True)) for row in asked_table(found).rows}
    for column, text in (
        ("Prompt", "chat template, tags"),
        ("Samples", "4"),
        ("Temperature", "0.7"),
        ("Problems", "20"),
    ):
        assert rows["sums"][column].text == text
    assert "their last line is scored" in asked_table(found).note and "Unreadable" not in asked_table(found).columns
    assert asked_table(evaluation("tiny", START, temperature=0.0)).rows[0][0].note == "greedy decoding"
    limits = "Limits of s beside the benchmark's own: 4 tokens per turn and 3,600 s per sample."
    assert "Limits" not in asked_table(found).note
    assert limits in asked_table(evaluation("tiny", START, sample_s=3600)).note


def test_the_table_says_of_how_many_samples_the_prompt_did_not_fit() -> None:
    found = evaluation("tiny", START)
    long = replace(found.domains["words"], finishes={"prompt": 2, "stop": 2})
    found = replace(found, domains={**found.domains, "words": long})
    notes = [row[0].note for row in score_table(found).rows]
    assert notes == ["", "2 samples with score 0: the prompt is longer than the network's context"]


@pytest.mark.slow
def test_each_stage_is_compared_with_the_stage_before_and_losses_are_said() -> None:
    scores = {"sft": START, "distill": BETTER, "online": {**BETTER, "sums": [0.25, 0.75, 0.5, 0.75] * 5}}
    stages = {"sft": ["s"], "distill": ["s", "d"], "online": ["s", "d", "o"]}
    models = [replace(evaluation(name, each), stages=stages[name]) for name, each in scores.items()]
    vendi = {name: replace(each, diversity={"vendi": SOME}) for name, each in models[1].domains.items()}
    models[1] = replace(models[1], domains=vendi)
    alone = replace(evaluation("control", BETTER), stages=["s", "c"])
    found = compare([*models, alone], {"sums": evaluation("expert", TEACHER)})
    assert found.previous == [None, 0, 1, 0]
    text = comparison_page(compare(models, {"sums": evaluation("expert", TEACHER)})).headline
    assert "distill loses against sft: words −25.0 (" in text and "vendi from 2.50 to 0.250" in text
    assert "online loses against distill: sums −18.8 (" in text and "normalised score from 0.667 to 0.417" in text
    table = stage_table(found)
    assert table.columns == ("Domain", "distill after sft", "online after distill", "control after sft")
    assert [cell.text for cell in table.rows[0]] == ["sums", "+50.0", "−18.8", "+50.0"]
    assert stage_table(found) in comparison_page(found).sections[0].tables
    gains = [replace(evaluation(name, each), stages=stages[name]) for name, each in (("sft", START), ("distill", MORE))]
    assert "No stage loses against the stage before." in comparison_page(compare(gains, {})).headline
    assert "stage" not in comparison_page(compare([evaluation("a", START), evaluation("b", BETTER)], {})).headline


def compared() -> Comparison:
    models = [evaluation("sft", START), evaluation("rl", BETTER, 6_000_000)]
    return compare(models, {"sums": evaluation("expert", TEACHER)})


def test_differences_are_to_the_first_and_paired() -> None:
    found = compared()
    assert [each.value for each in found.scores["sums"]] == [0.25, 0.75]
    # by the same amount on each of 20 problems: the sign of the difference is certain
    for name, change in (("sums", 0.5), ("words", -0.25)):
        each = found.differences[name][1]
        assert each.value == pytest.approx(change)
        assert each.low < change < each.high and each.low * each.high > 0
    assert found.scores["sums"][1].low < 0.7
    assert found.worst[1] == "words"
    assert found.teachers["sums"][0] == "expert"
    norm = found.norms[1]
    assert norm is not None
    assert norm.mean.value == pytest.approx(0.5 / 0.75)
    assert [each.value for each in found.means] == pytest.approx([0.5, 0.625])
    assert found.kept[1].value == pytest.approx((3 + 0.5 / 0.75) / 2)
    assert found.answers["vendi"] == [2.5, 2.5]
    assert found.answers["self_bleu"] == [None, None]  # one domain or all of them lack it
    assert found.answers["num_tokens"] == [31.0, 31.0]


def test_significance_is_corrected_for_several_domains() -> None:
    rng = np.random.default_rng(0)
    base = {name: rng.integers(0, 5, 60) / 4 for name in ("a", "b", "c")}
    other = {name: np.clip(each + rng.integers(-1, 2, 60) / 4, 0, 1) for name, each in base.items()}
    other["b"] = np.minimum(1.0, base["b"] + (rng.random(60) < 0.5) / 4)
    models = [
        evaluation(name, {key: each.tolist() for key, each in told.items()})
        for name, told in (("x", base), ("y", other))
    ]
    found = compare(models, {})
    assert found.significant(0) == [] and found.significant(1) == ["b"]
    raw = [flip_p(other[name] - base[name]) for name in "abc"]
    assert [found.p_values[name][1] for name in "abc"] == pytest.approx(holm(raw))
    assert "Significant differences: b, of 3 domains." in comparison_page(found).headline
    rows = {row[0].text: row for row in comparison_table(found).rows + comparison_table(found).totals}
    assert ["✱" in rows[name][2].note for name in "abc"] == [False, True, False]
    assert rows["Mean of domains"][2].note.startswith("+") and rows["Infra errors"][1].text == "6"


def test_another_model_than_the_first_can_be_the_reference(tmp_path: Path) -> None:
    raw = {**TEACHER, "words": [0.0, 0.5] * 10}
    models = [evaluation("raw", raw), evaluation("sft", START), evaluation("rl", BETTER)]
    found = compare(models, {"sums": evaluation("expert", TEACHER)}, reference=1)
    alone = compare(models[1:], {"sums": evaluation("expert", TEACHER)})
    assert found.norms[1:] == alone.norms and found.kept[1:] == alone.kept
    assert found.differences["sums"][0].value == pytest.approx(0.75) and found.differences["sums"][1].value == 0
    table = comparison_table(found)
    assert [row[2].text for row in table.totals[1:5]] == ["–"] * 4, "the reference has no retention of its own"
    assert [row[1].text for row in table.totals[1:3]] == ["217 %", "words"], "of raw, the mean of 400 % and 33 %"
    assert table.totals[3][1].value == pytest.approx(0.75 / 0.75)
    assert "to sft" in table.note and comparison_page(found).headline.startswith("rl scores 62 %, sft 50 %;")


def test_the_headline_of_a_reference_that_is_last_names_the_model_before_it() -> None:
    found = compare([evaluation("rl", BETTER), evaluation("sft", START)], {}, reference=1)
    headline = comparison_page(found).headline
    assert headline.startswith("rl scores 62 %, sft 50 %; its worst domain is words, −25.0 (")
    assert "Significant differences: sums, words, of 2 domains." in headline


def test_the_comparison_of_domains(tmp_path: Path) -> None:
    found = compared()
    text = printed(comparison_table(found))
    for words in ("+50.0 (+", "−25.0", "expert", "Normalised score", "0.667", "Worst domain", "words"):
        assert words in text, words
    page = write_page(comparison_page(found), tmp_path)
    assert {path.name for path in page.parent.iterdir()} == {"report.html", "domains.png", "cost.png"}
    assert "its worst domain is words" in page.read_text()
    better = {name: [1.0] * 20 for name in START}
    idle = "elow the trivial baseline: "
    assert idle not in comparison_page(compare([evaluation("a", START), evaluation("b", better)], {})).headline
    low = comparison_page(compare([evaluation("b", better), evaluation("a", LOW)], {})).headline
    assert "Below the trivial baseline: sums, words." in low
    close = comparison_page(
        compare([evaluation("b", better), evaluation("a", {**LOW, "words": [0.5, 0.25, 0.5, 0.5] * 5})], {})
    )
    assert "Below the trivial baseline: sums. Not clearly above the trivial baseline: words." in close.headline
    labels = {text.get_text() for text in domain_lines(found).axes[0].texts}
    assert {"sums", "words"} <= labels


@pytest.mark.parametrize(
    ("previous", "joined"), [([None, None, None], []), ([None, 0, None], [(0, 1)]), ([None, 0, 0], [(0, 1), (0, 2)])]
)
def test_lines_join_a_model_with_the_stage_before_it_alone(
    previous: list[int | None], joined: list[tuple[int, int]]
) -> None:
    scores = {name: [1.0] * 20 for name in START}
    found = compare([evaluation("a", START), evaluation("b", LOW), evaluation("c", scores)], {})
    axes = domain_lines(replace(found, previous=previous)).axes[0]
    lines = [each for each in axes.lines if each.get_linestyle() == "-"]
    ends = [tuple(round(float(x)) for x in each.get_xdata()) for each in lines]  # type: ignore[union-attr]
    assert ends == joined * len(START)
    assert any("stage before" in text.get_text() for text in axes.texts) == bool(joined)


def test_score_over_size_is_drawn_for_models_of_different_sizes() -> None:
    models = [evaluation("sft", START), evaluation("rl", BETTER), evaluation("small", LOW, 1_000_000)]
    longer = [replace(each, cost=replace(each.cost, flops_per_token=1e6 + place)) for place, each in enumerate(models)]
    assert [section.slug for section in comparison_page(compare(longer[:2], {})).sections] == ["domains"]
    assert [section.slug for section in comparison_page(compare(longer, {})).sections] == ["domains", "cost"]
    axes = score_by_cost(compare(longer, {})).axes[0]
    points = axes.lines[-1].get_xdata()
    assert list(points) == [3_000_000, 3_000_000, 1_000_000], "answers of other lengths move no point"
    assert axes.get_xlabel() == "active parameters"


def test_every_domain_has_its_own_colour() -> None:
    found = compared()
    many = {f"domain {num}": scores for num, scores in enumerate(list(found.scores.values()) * 4)}
    for draw in (domain_lines, score_by_cost):
        labels = draw(replace(found, scores=many)).axes[0].texts
        colours = {text.get_text(): text.get_color() for text in labels if text.get_text() in many}
        assert len(colours) == len(set(colours.values())) == 8, draw.__name__


def test_a_page_of_one_evaluation(tmp_path: Path) -> None:
    page = write_page(evaluation_page(evaluation("tiny", START)), tmp_path)
    assert (page.parent / "scores.png").stat().st_size > 5000


def test_only_common_problems_and_domains_are_compared() -> None:
    first, other = evaluation("a", START), evaluation("b", {**BETTER, "more": [1.0, 0.0]})
    other = replace(other, domains={**other.domains, "sums": domain([1.0, None, 1.0], first=1)})
    found = compare([first, other], {})
    assert list(found.scores) == ["sums", "words"]
    assert [each.value for each in found.scores["sums"]] == [0.375, 1.0]  # of items 1 and 3
    assert found.norms == [None, None]


def test_problems_that_are_left_out_are_counted_and_their_baselines_and_measures_too() -> None:
    """An evaluation of all problems beside one of a few: both are compared on the few."""
    few = {name: values[:4] for name, values in BETTER.items()}
    models = [evaluation("a", START), evaluation("b", few)]
    found = compare(models, {})
    assert found.num_problems == {"sums": 4, "words": 4} and found.num_evaluated == {"sums": 20, "words": 20}
    assert found.baselines == {}, "those of the reference are of 20 problems"
    assert found.answers["vendi"] == [None, 2.5] and found.flops_per_task == [None, 0.0]
    table = comparison_table(found)
    assert [row[0].note for row in table.rows] == ["4 of 20 problems"] * 2
    assert "Trivial baseline" not in table.columns and "of an evaluation with other problems are left out" in table.note
    words = "Compared on 8 of 40 problems: those with a score of every model."
    assert words in comparison_page(found).headline and words in table.note
    assert compare(models, {}, reference=1).baselines.keys() == START.keys(), "the reference was asked no other ones"
    whole = compare([models[0], evaluation("c", BETTER)], {})
    assert [row[0].note for row in comparison_table(whole).rows] == ["20 problems"] * 2
    assert comparison_table(whole).note.startswith("Compared on 40 problems. Intervals")
    assert "ompared on" not in comparison_page(whole).headline
    unscored = compare(
        [models[0], evaluation("d", {"sums": [None, *BETTER["sums"][1:]], "words": BETTER["words"]})], {}
    )
    assert unscored.num_problems["sums"] == 19 and "are left out" not in comparison_table(unscored).note
    assert unscored.baselines.keys() == START.keys()


def test_a_teacher_without_a_lead_is_told_not_hidden() -> None:
    found = compare(
        [evaluation("sft", START), evaluation("rl", BETTER)], {"words": evaluation("bad", {"words": [0.0, 0.5] * 10})}
    )
    assert found.norms == [None, None]
    assert "words: its teacher scores 0.250 and the start 0.750" in comparison_table(found).note
    assert "no gain" in comparison_page(found).sections[0].text


def test_retention_of_a_zero_score_is_undetermined() -> None:
    few = [evaluation("a", {"sums": [0.0, 0.0, 1.0]}), evaluation("b", {"sums": [1.0, 0.0, 1.0]})]
    assert "undetermined" in printed(comparison_table(compare(few, {})))
    none = [evaluation("a", {"sums": [0.0, 0.0]}), evaluation("b", {"sums": [1.0, 0.0]})]
    text = printed(comparison_table(compare(none, {})))
    assert "undetermined" in text and "nan" not in text.split()


def test_the_share_of_a_lead_that_may_be_none_is_undetermined() -> None:
    start, student = evaluation("a", {"sums": [0.0, 1.0] * 4}), evaluation("b", {"sums": [1.0, 1.0] * 4})
    lead = {"sums": evaluation("t", {"sums": [1.0, 0.0] * 3 + [1.0, 1.0]})}
    found = compare([start, student], lead)
    assert [row[2].note for row in comparison_table(found).totals[-4:-2]] == ["undetermined", "sums"]


def test_what_cannot_be_compared_is_refused() -> None:
    first = evaluation("a", START)
    with pytest.raises(UserError, match=r"b: sums: max_tokens was 8, of a 4"):
        compare([first, evaluation("b", START, max_tokens=8)], {})
    with pytest.raises(UserError, match=r"--teacher algebra: no such domain in all evaluations; they have sums, words"):
        compare([first, first], {"algebra": first})
    with pytest.raises(UserError, match=r"t: words: not evaluated"):
        compare([first, first], {"words": evaluation("t", TEACHER)})
    far = replace(
        first,
        domains={name: replace(each, items=[item + 99 for item in each.items]) for name, each in first.domains.items()},
    )
    with pytest.raises(UserError, match="sums: no problem"):
        compare([first, far], {})
    sums, words = (replace(first, name=name, domains={name: first.domains[name]}) for name in ("sums", "words"))
    with pytest.raises(
        UserError, match=r"no domain in common: sums, words have sums, words; evaluate all with one --suite"
    ):
        compare([sums, words], {})


def test_a_domain_that_not_all_models_have_is_named() -> None:
    first = evaluation("a", START)
    some = replace(first, name="b", domains={"sums": first.domains["sums"]})
    for models in ([first, some], [some, first]):
        found = compare(models, {})
        assert list(found.scores) == ["sums"] and found.omitted == ["words"]
        assert "Omitted, because not all models were evaluated on them: words." in comparison_table(found).note
    assert "Omitted" not in comparison_table(compare([first, first], {})).note
