"""Agents on problems with tools: one that is a network behind the chat API, and, of the world `search`, two that need none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from stretto.api.agent import AgentOptions, Endpoint, run_agent
from stretto.api.serve import ServeOptions, served_here
from stretto.base.track import progress
from stretto.report.transcript import spent
from stretto.server.client import Client
from stretto.tasks.session import use
from stretto.tasks.task import Answer, Score, TaskSource
from stretto.tasks.worlds.search import UNKNOWN, SearchSource

FIRST = 3 << 22
"""Of an endless source: problems from here on are of no run."""
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """One problem, answered. Written by `ask_network` and the agents without one."""

    score: Score
    flops: float
    hops: int
    """Documents that its answer takes; 0: no document tells."""


def ask_network(folder: Path, source: TaskSource, num: int, options: Sequence[AgentOptions]) -> list[list[Asked]]:
    """What the checkpoint ``folder`` makes of the first ``num`` problems under each of ``options``, on one engine."""
    with served_here(folder, ServeOptions(max_batch=_AT_ONCE)) as (app, served):

        async def work() -> list[list[Asked]]:
            async with Client("http://localhost", transport=httpx.ASGITransport(app)) as client:
                endpoint, places = Endpoint(client, served.name), asyncio.Semaphore(_AT_ONCE)
                with progress(f"ask {folder.name}", num * len(options)) as advance:

                    async def one(item: int, each: AgentOptions) -> Asked:
                        problem = source.problem(FIRST + item)
                        with closing(source.open(problem)) as session:
                            async with places:
                                run = await run_agent(endpoint, problem.messages, session.tools, each, seed=item)
                            advance(1)
                            score = session.score(Answer(run.text, run.messages))
                            return Asked(score, spent(run.turns) or 0.0, _hops(problem.payload))

                    return [list(await asyncio.gather(*(one(item, each) for item in range(num)))) for each in options]

        return asyncio.run(work())


def first_hit(source: SearchSource, num: int) -> list[Asked]:
    """Search with the question, open the first hit, and read it without a fault: the value of the asked relation that its
    document tells, or that none does. The most that anybody makes of a first hit."""
    found = []
    for item in range(FIRST, FIRST + num):
        problem = source.problem(item)
        with closing(source.open(problem)) as session:
            question = str(problem.messages[-1]["content"]).partition("?")[0]
            hits = session.reader.corpus.search(question, 1)
            said = UNKNOWN
            if hits:
                document = hits[0].document
                use(session.tools, "open", {"id": document.id})
                told = dict(line.partition(" is ")[::2] for line in document.text.rstrip(".").split(". ")[1:])
                asked = question.split()[3]  # What is the RELATION of …
                if (value := told.get(f"Its {asked}")) is not None:
                    said = f"{value} [{document.id}]"
            found.append(Asked(session.score(Answer(said)), 0.0, _hops(problem.payload)))
    return found


def closed_book(source: SearchSource, num: int) -> list[Asked]:
    """Open nothing. Names are drawn anew for each corpus, so that to abstain is the best that can be known."""
    found = []
    for item in range(FIRST, FIRST + num):
        problem = source.problem(item)
        with closing(source.open(problem)) as session:
            found.append(Asked(session.score(Answer(UNKNOWN)), 0.0, _hops(problem.payload)))
    return found


def _hops(payload: Mapping[str, Any]) -> int:
    return 0 if payload["answer"] == UNKNOWN else len(payload.get("documents", ()))


def write_asked(path: Path, asked: Mapping[str, Sequence[Asked]]) -> None:
    """A line for each agent and problem."""
    lines = (
        {"agent": name, "problem": item, "right": one.score.ok, "hops": one.hops, "flops": one.flops, **one.score.parts}
        | {"why": one.score.detail}
        for name, each in asked.items()
        for item, one in enumerate(each)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
