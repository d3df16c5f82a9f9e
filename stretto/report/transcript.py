"""Transcript of an agent, as records and as a page: turns, calls, results, cost, citations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from stretto.base.numbers import si
from stretto.base.paths import write_text
from stretto.base.table import NOTHING, Cell, Table
from stretto.report.page import Page, Section, render

Phase = Literal["search", "think", "answer"]
"""The first is the agent's own search for the question, before the model's first turn."""


class Ending(StrEnum):
    """Finish reason of a run."""

    ANSWER = "answer"
    TURNS = "turns"
    TOKENS = "tokens"
    CONTEXT = "context"


NO_ANSWER = {
    Ending.ANSWER: "no answer: the model's last turn is empty; try a temperature above 0, another size or another model",
    Ending.TURNS: "no answer within --budget-turns; raise it",
    Ending.TOKENS: "no answer within --budget-tokens; raise it",
    Ending.CONTEXT: "no answer: tool results fill the context; serve a longer context",
}
"""Reason for an empty answer, and the remedy."""
NO_SOURCE = "no source was opened"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call and its result."""

    name: str
    arguments: Mapping[str, Any] | None
    """Arguments; None: not a JSON object."""
    result: str = ""
    outcome: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model, or the agent's own search. Written by the agent loop."""

    phase: Phase
    size: str
    """Size that generated the turn, by the server's name; empty: not reported."""
    text: str
    thought: str
    calls: tuple[Call, ...]
    num_prompt: int
    num_cached: int
    """Prompt tokens found in the cache."""
    num_written: int
    flops: float | None
    """None: not reported by the server."""
    is_cut: bool = False
    """Whether the turn reached a limit and was truncated."""
    is_draft: bool = False
    """Whether another size rewrote this answer."""


@dataclass(frozen=True, slots=True)
class Source:
    """A document cited by an answer."""

    id: str
    title: str
    text: str
    """Text; empty: the document was never opened, or does not exist."""


@dataclass(frozen=True, slots=True)
class Run:
    """One attempt at an answer."""

    seed: int
    turns: tuple[Turn, ...]
    text: str
    """The answer; empty: none."""
    ended: Ending
    messages: tuple[Mapping[str, Any], ...]
    """All messages after the prompt, as verifiers read them."""
    sources: tuple[Source, ...] = ()
    num_opened: int | None = None
    """Number of documents opened; None: there was no search tool."""


def spent(turns: Sequence[Turn]) -> float | None:
    """FLOPs of ``turns``; None: not reported by the server."""
    known = [turn.flops for turn in turns if turn.flops is not None]
    return sum(known) if known else None


def phase_table(runs: Sequence[Run]) -> Table:
    """Cost of the model's turns in each phase over all runs."""

    def row(name: str, turns: Sequence[Turn]) -> tuple[Cell, ...]:
        flops = spent(turns)
        counts = (
            len(turns),
            *(sum(getattr(turn, each) for turn in turns) for each in ("num_prompt", "num_cached", "num_written")),
        )
        sizes = ", ".join(dict.fromkeys(turn.size for turn in turns if turn.size))
        return (
            Cell(name, note=sizes),
            *(Cell(f"{count:,}", count) for count in counts),
            NOTHING if flops is None else Cell(si(flops), flops),
        )

    turns = [turn for run in runs for turn in run.turns if turn.phase != "search"]
    phases = {name: [turn for turn in turns if turn.phase == name] for name in ("think", "answer")}
    rows = tuple(row(name, some) for name, some in phases.items() if some)
    columns = ("Phase", "Turns", "Read", "Cached", "Written", "FLOPs")
    note = "Numbers of tokens. FLOPs do not include cached tokens."
    return Table("Cost by phase", columns, rows, (row("All", turns),), note)


def write_transcript(path: Path, question: str, model: str, runs: Sequence[Run], chosen: Run, num_agreed: int) -> None:
    """Write the page of ``runs``. ``chosen`` is the run whose answer was returned, and ``num_agreed`` runs gave that answer. Raises
    `UserError`: the page cannot be written."""
    facts = [f"{len(runs)} runs, {num_agreed} with this answer"] if len(runs) > 1 else []
    facts += [NO_SOURCE] if chosen.num_opened == 0 else []
    first = 0 if chosen.turns and chosen.turns[0].phase == "search" else 1
    sections = [
        Section("question", "Question", text=question),
        Section("cost", "Cost", tables=(phase_table(runs),)),
        *(_turn(number, turn, chosen) for number, turn in enumerate(chosen.turns, start=first)),
        *(
            Section(
                _anchor(chosen, each.id), f"[{each.id}] {each.title}", samples=(("", "", each.text or "never opened"),)
            )
            for each in chosen.sources
        ),
    ]
    if len(runs) > 1:
        rows = tuple((Cell(f"seed {run.seed}", note=run.ended.value), Cell(run.text)) for run in runs)
        sections.append(Section("votes", "All runs", tables=(Table("All runs", ("Run", "Answer"), rows, num_words=2),)))
    page = Page(
        name="Transcript",
        headline=_linked(chosen.text or NO_ANSWER[chosen.ended], chosen),
        facts=(f"model: {model}", *facts),
        sections=tuple(sections),
        environment="",
        recipe="",
    )
    write_text(path, render(page, {}))


def transcript_record(question: str, model: str, runs: Sequence[Run], chosen: Run, num_agreed: int) -> dict[str, Any]:
    """The answer and how it came about, as JSON values."""
    return {
        "question": question,
        "model": model,
        "answer": chosen.text,
        "ended": chosen.ended.value,
        "no_source_opened": chosen.num_opened == 0,
        "sources": [{"id": each.id, "title": each.title, "opened": bool(each.text)} for each in chosen.sources],
        "num_runs": len(runs),
        "num_agreed": num_agreed,
        "messages": list(chosen.messages),
    }


def _turn(number: int, turn: Turn, run: Run) -> Section:
    written = "\n\n".join(filter(None, (turn.thought, turn.text)))
    samples: list[tuple[str, str, str]] = [("Written", "", _linked(written, run))] if written else []
    for call in turn.calls:
        arguments = "arguments that are not a JSON object"
        if call.arguments is not None:
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        samples.append((f"{call.name} ({call.outcome}, {call.seconds:.2f} s)", f"{arguments}\n\n", call.result))
    kind = ", ".join(call.name for call in turn.calls) or ("draft of the answer" if turn.is_draft else "answer")
    size = f" at {turn.size}" if turn.size else ""
    heading, text = f"Turn {number}: {kind}", f"{turn.num_written} tokens{size}"
    if turn.phase == "search":
        heading, text = "Search for the question", "Made by the agent before the model's first turn."
    return Section(f"turn-{number}", heading, text=text, samples=tuple(samples))


def _anchor(run: Run, document: str) -> str:
    return f"source-{[each.id for each in run.sources].index(document) + 1}"


def _linked(text: str, run: Run) -> Markup:
    """``text`` with its citations as links to the documents on the page."""
    found = Markup.escape(text)
    for each in run.sources:
        mark = Markup.escape(f"[{each.id}]")
        found = Markup(found.replace(mark, Markup('<a href="#{}">{}</a>').format(_anchor(run, each.id), mark)))
    return found
