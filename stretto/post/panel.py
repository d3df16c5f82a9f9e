"""Measures of an evaluation's open-ended answers, and the check of their judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.errors import UserError
from stretto.base.records import find_lineage, history
from stretto.evals.scores import Interval, mean_interval, student_interval
from stretto.evals.writing import Overused, Similarity, chapter_measures, group_measures, overused, text_measures
from stretto.post.suite_samples import SAMPLES_FILE, read_samples
from stretto.post.suites import SuiteConfig, opened_sources
from stretto.tasks.briefs import Constraints
from stretto.tasks.judge import JudgedSource, JudgeFailed

PANEL_FILE = "panel.json"
EVALUATES, REWARDS = "evaluation-", "reward-"
"""Prefixes of the names of local judges (`stretto.text.passages.Part`)."""
_RUBRIC = (
    {"criterion": "It does what the request asks for, and is whole.", "points": 1},
    {"criterion": "It is well written.", "points": 1},
)
"""Rubric of prompts that have none."""


@dataclass(frozen=True, slots=True)
class Chapters:
    """Measures of answers with all chapters, means over problems. Written by `panels`."""

    measures: dict[str, list[float]]
    """Measures by chapter: the judge's points, and `stretto.evals.writing.chapter_measures`."""
    changes: dict[str, Interval]
    """Last chapter minus first chapter."""
    num_short: int
    """Number of answers with fewer chapters."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Measures of a domain, with intervals over its problems. Written by `panels`."""

    domain: str
    measures: dict[str, Interval]
    """Measures of the answers to a problem, and means over single answers."""
    kept: Interval | None
    """Share of satisfied constraints; None: no prompt has any."""
    num_empty: int
    """Number of empty answers; no other measure counts them."""
    overused: list[Overused]
    chapters: Chapters | None = None


def panels(
    out: Path, suites: Mapping[str, SuiteConfig], similar: Similarity, people: Sequence[str] | None
) -> list[Panel]:
    """Measures of each graded domain of the finished evaluation ``out``. ``people``: human texts that the answers are compared with."""
    samples, found = read_samples(out / SAMPLES_FILE), []
    with opened_sources(suites) as sources:
        for name, source in sources.items():
            if source.is_verifiable:
                continue
            turns = dict[int, list[list[str]]]()
            for key in sorted(key for key in samples if key[0] == name):
                turns.setdefault(key[1], []).append(samples[key].spoken)
            groups = {item: ["\n\n".join(each) for each in answers] for item, answers in turns.items()}
            constraints = {item: source.problem(item).payload.get("constraints") for item in groups}
            panel = _panel(name, groups, constraints, similar, people)
            if isinstance(source, JudgedSource) and source.args.chapters > 1:
                panel = replace(panel, chapters=_chapters(source, turns))
            found.append(panel)
    return found


def _chapters(source: JudgedSource, answers: Mapping[int, Sequence[Sequence[str]]]) -> Chapters:
    """Measures by chapter. ``answers``: chapters of each answer, by problem. The judge's points come from its cache where it has them."""
    names, rows, num_short = list[str](), list[np.ndarray](), 0
    for item, texts in answers.items():
        complete = [each for each in texts if len(each) == source.args.chapters]
        num_short += len(texts) - len(complete)
        measures = list[list[list[float]]]()  # by answer, chapter, measure
        for each in complete:
            try:
                points = source.points(source.problem(item), each)
            except JudgeFailed:  # an answer without a verdict is left out
                continue
            counted = chapter_measures(each)
            names = ["points", *counted[0]]
            measures.append([[one, *rest.values()] for one, rest in zip(points, counted, strict=True)])
        if measures:
            rows.append(np.mean(measures, 0))
    means = np.mean(rows, 0).T.tolist() if rows else []
    changes = {name: student_interval([row[-1, at] - row[0, at] for row in rows]) for at, name in enumerate(names)}
    return Chapters(dict(zip(names, means, strict=True)), changes, num_short)


def _panel(
    name: str,
    groups: Mapping[int, Sequence[str]],
    constraints: Mapping[int, Any],
    similar: Similarity,
    people: Sequence[str] | None,
) -> Panel:
    """``groups``: answers by problem."""
    rows, kept_P = list[dict[str, float]](), list[float]()
    for item, texts in groups.items():
        nonempty = [text for text in texts if text.split()]
        given = Constraints.model_validate(constraints[item] or {})
        if checks := [each for text in texts for each in given.kept(text).values()]:
            kept_P.append(float(np.mean(checks)))
        if nonempty:
            single = [text_measures(text) for text in nonempty]
            means = {measure: float(np.mean([each[measure] for each in single])) for measure in single[0]}
            rows.append(group_measures(nonempty, similar(nonempty)) | means)
    every = [text for texts in groups.values() for text in texts if text.split()]
    return Panel(
        name,
        {measure: student_interval([row[measure] for row in rows]) for measure in (rows[0] if rows else ())},
        mean_interval({"kept": kept_P}) if kept_P else None,
        sum(map(len, groups.values())) - len(every),
        overused(every, people) if people is not None else [],
    )


def judged_by(suites: Mapping[str, SuiteConfig], url: str, name: str, checkpoint: Path) -> dict[str, SuiteConfig]:
    """``suites`` whose open-ended sources are judged by the model ``name`` at ``url``, with points by a rubric.

    Raises:
        UserError: the judge rewarded ``checkpoint`` or one of its ancestors, it was trained to reward, or no source is open-ended.
    """
    if name.startswith(REWARDS):
        raise UserError(
            f"--judge {url}: {name} was trained to reward; evaluate with one of `stretto judge train --part evaluation`"
        )
    rewarding = list(rewarders(checkpoint))
    if (name, url.rstrip("/")) in rewarding or (name.startswith(EVALUATES) and name in dict(rewarding)):
        raise UserError(
            f"--judge {url}: {name} rewarded {checkpoint} in training, so its verdict would be biased; evaluate with another judge"
        )
    found, num = {}, 0
    for key, suite in suites.items():
        sources = {}
        for source, each in suite.sources.items():
            if each.kind == "judged":
                num += 1
                args = {"rubric": _RUBRIC} | dict(each.args) | {"judge": {"url": url, "model": name}, "by": "rubric"}
                each = each.replace(args=args)
            sources[source] = each
        found[key] = suite.replace(sources=sources)
    if not num:
        raise UserError("--judge: no suite has open-ended prompts; add --suite writing, or leave it out")
    return found


def rewarders(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Name and URL of every judge that rewarded ``checkpoint`` or one of its ancestors."""
    for stage in history(find_lineage(checkpoint)):
        for source in stage.config.get("sources", {}).values():
            judge = source.get("args", {}).get("judge") if isinstance(source, dict) else None
            if isinstance(judge, dict):
                yield str(judge.get("model")), str(judge.get("url")).rstrip("/")
