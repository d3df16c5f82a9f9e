"""`stretto agent`: a question, a model with tools, and budgets; its answer with what it cites, and a page of how it came to it.

One loop for every server: it speaks the chat API, of a server elsewhere or of an engine in this process. Turns that call tools
may run at one size of the network, and the answer be written at another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import httpx
import rich
from pydantic import Field, model_validator
from rich.markup import escape

from stretto.api.serve import ServeOptions, check_text, check_url, environment_keys, served_here
from stretto.base.config import Config
from stretto.base.errors import UserError, nearest
from stretto.base.track import progress
from stretto.report.transcript import Call, Ending, Phase, Run, Source, Turn, phase_table, write_transcript
from stretto.runtime.runtime import to_end
from stretto.sandbox.isolate import Sandbox
from stretto.server.client import ApiFailure, Client
from stretto.tasks.corpus import Corpus, Reader, citations, read_documents, without_citations
from stretto.tasks.math import as_number
from stretto.tasks.session import arguments_of, use
from stretto.tasks.task import AnswerFormat, Tool, find_answer
from stretto.tasks.tools import calculator_tool, python_tool
from stretto.tasks.worlds.search import RULES

TOOLS = ("search", "python", "calculator")
_HITS, _SNIPPET = 5, 20
"""Of a search: documents, and words of each."""
_ANSWER_PART = 4
"""Of the tokens a part in so many is kept for the answer."""
_LEAST = 16
"""Tokens that a turn is asked for, where the context has no room for more."""
_BUSY, _TRIES = (429, 503), 5
_NOW = "The budget is used up. Answer now, with what you have."
_PLAN = "Before you use a tool, say in a few lines what has to be found, and in which order."


class AgentOptions(Config):
    """What an agent is allowed, and how it is asked."""

    turns: int = Field(default=16, gt=0)
    """Of the model, the answer included; with one alone it calls no tool."""
    tokens: int = Field(default=4096, ge=_ANSWER_PART)
    """That it may write in all of them."""
    votes: int = Field(default=1, gt=0, le=64)
    """Runs; the answer that most of them give is given."""
    temperature: float = Field(default=0.0, ge=0)
    seed: int = 0
    think: str | None = None
    """Preset of the turns that call tools; None: the server's default."""
    answer: str | None = None
    """Preset of the answer; None: that of the other turns."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(f"votes: {self.votes} runs at temperature 0 are all the same; give a temperature")
        return self


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Who is asked."""

    client: Client
    model: str


@dataclass(frozen=True, slots=True)
class Desk:
    """The tools of one run on the console."""

    tools: tuple[Tool, ...]
    reader: Reader | None = None


# The loop


async def run_agent(
    endpoint: Endpoint,
    prompt: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    options: AgentOptions,
    seed: int,
    tell: Callable[[str], None] = lambda said: None,
) -> Run:
    """Ask until a turn calls no tool, which is the answer; where a budget ends before, once more for the answer alone.

    Args:
        prompt: messages before the model's first turn.
        tell: what it does, a text a turn.

    Raises:
        ApiFailure: the server refuses the prompt, or is not there for too long. httpx.TransportError: nobody answers.
    """
    messages, turns = [dict(message) for message in prompt], list[Turn]()
    kept, ended = options.tokens // _ANSWER_PART, Ending.ANSWER
    offered = [tool.schema() for tool in tools]

    async def ask(phase: Phase, max_tokens: int, schemas: Sequence[Mapping[str, Any]]) -> tuple[Turn, dict[str, Any]]:
        size = options.answer if phase == "answer" and options.answer is not None else options.think
        body = {"model": endpoint.model, "messages": messages, "temperature": options.temperature, "seed": seed}
        body |= ({"tools": schemas} if schemas else {}) | ({"elastic": size} if size else {})
        return _turn(await _asked(endpoint.client, body, max_tokens), phase)

    try:
        while True:
            left = options.tokens - kept - sum(turn.num_written for turn in turns)
            if left <= 0 or len(turns) >= options.turns - 1:
                ended = Ending.TOKENS if left <= 0 else Ending.TURNS
                break
            turn, said = await ask("think", left, offered)
            if not turn.calls and options.answer not in (None, options.think):
                # what there is has been found: the other size answers, and may still want to know more
                turns.append(replace(turn, is_draft=True))
                turn, said = await ask("answer", left + kept - turn.num_written, offered)
            messages.append(said)
            if not turn.calls:
                turns.append(replace(turn, phase="answer"))
                ended = Ending.TOKENS if turn.is_cut else ended
                break
            tell(", ".join(f"{call.name} {' '.join(map(str, (call.arguments or {}).values()))}" for call in turn.calls))
            turns.append(replace(turn, calls=await _used(tools, said, turn.calls, messages)))
        if ended in (Ending.TURNS, Ending.TOKENS):
            if turns:
                messages.append({"role": "user", "content": _NOW})
            turn, said = await ask("answer", kept if turns else options.tokens, ())
            turns.append(turn)
            messages.append(said)
    except ApiFailure as failure:
        if failure.status != 400 or not turns:
            raise
        ended = Ending.CONTEXT
    return Run(
        seed, tuple(turns), "" if ended is Ending.CONTEXT else turns[-1].text, ended, tuple(messages[len(prompt) :])
    )


async def _asked(client: Client, body: Mapping[str, Any], max_tokens: int) -> Any:
    """The chat API's answer. A server that is too busy is asked again, and one without room for ``max_tokens`` for fewer."""
    attempt = 1
    while True:
        try:
            return await client.chat({**body, "max_tokens": max_tokens})
        except ApiFailure as failure:
            if failure.status == 400 and max_tokens >= 2 * _LEAST:
                max_tokens //= 2
            elif failure.status in _BUSY and attempt < _TRIES:
                await asyncio.sleep(attempt if failure.retry_after_s is None else failure.retry_after_s)
                attempt += 1
            else:
                raise


def _turn(told: Mapping[str, Any], phase: Phase) -> tuple[Turn, dict[str, Any]]:
    """What the server says, and the message to send it back as; calls are yet to be made."""
    message, usage = told["choices"][0]["message"], told.get("usage") or {}
    spent, text, calls = usage.get("elastic") or {}, message.get("content") or "", message.get("tool_calls") or []
    turn = Turn(
        phase=phase,
        size=str(spent.get("subnet", "")),
        text=text,
        thought=message.get("reasoning_content") or "",
        calls=tuple(Call(each["function"]["name"], arguments_of(each["function"]["arguments"])) for each in calls),
        num_prompt=usage.get("prompt_tokens", 0),
        num_cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        num_written=usage.get("completion_tokens", 0),
        flops=spent.get("flops"),
        is_cut=told["choices"][0].get("finish_reason") == "length",
    )
    thought = {"reasoning_content": turn.thought} if turn.thought else {}
    return turn, {"role": "assistant", "content": text} | thought | ({"tool_calls": calls} if calls else {})


async def _used(
    tools: Sequence[Tool], said: Mapping[str, Any], calls: Sequence[Call], messages: list[dict[str, Any]]
) -> tuple[Call, ...]:
    """The ``calls``, made one after the other; what each gave is appended to ``messages``."""
    made = []
    for told, call in zip(said["tool_calls"], calls, strict=True):
        result = await asyncio.to_thread(use, tools, call.name, call.arguments)
        made.append(replace(call, result=result.text, outcome=result.outcome.value, seconds=result.seconds))
        messages.append({"role": "tool", "tool_call_id": told["id"], "name": call.name, "content": result.text})
    return tuple(made)


# Votes


def voted(runs: Sequence[Run]) -> tuple[Run, int]:
    """The first of the ``runs`` with the most frequent answer, and how many have it; one without an answer has no vote."""
    votes = [_vote(run.text) for run in runs]
    counts = Counter(vote for vote in votes if vote)
    if not counts:
        return runs[0], 0
    best = max(counts, key=lambda vote: (counts[vote], -votes.index(vote)))
    return runs[votes.index(best)], counts[best]


def _vote(text: str) -> str:
    form: AnswerFormat = "boxed" if "\\boxed{" in text else "tags"
    answer = " ".join(without_citations(find_answer(text, form).text).casefold().split()).strip(" .\"'")
    number = as_number(answer)
    return answer if number is None else str(number)


# The command


def agent_command(
    question: str,
    model: Path | None,
    server: str | None,
    tools: str,
    options: AgentOptions,
    *,
    plan: bool = False,
    out: Path | None = None,
    serving: ServeOptions | None = None,
) -> None:
    """Answer ``question`` on the console, with the page ``out`` where one is named.

    Raises:
        UserError: bad input, a server that refuses or does not answer, or no answer within the budget.
    """
    check_text(question, "the question")
    if not question.strip():
        raise UserError("stretto agent: QUESTION: is empty; write a question")
    if server is not None:
        check_url(server, "--server")
    if (model is None) == (server is None):
        raise UserError("stretto agent: name either --model FOLDER or --server URL")
    with _desks(tools) as desk_of:
        rules = f"\n\n{RULES}" if desk_of().reader else ""
        system = [{"role": "system", "content": _PLAN}] if plan else []
        prompt = [*system, {"role": "user", "content": f"{question}{rules}"}]
        name = str(model or server)
        try:
            runs = to_end(_runs(model, server, prompt, desk_of, options, serving or ServeOptions()))
        except httpx.TransportError as error:
            raise UserError(
                f"--server {server}: nobody answers there ({type(error).__name__}); check the address"
            ) from None
        except ApiFailure as failure:
            raise UserError(f"{name}: {failure.message}; see docs/AGENT.md") from None
    chosen, num_agreed = voted(runs)
    console = rich.get_console()
    console.print(escape(chosen.text.strip()) or f"[red]no answer: out of {chosen.ended.value}")
    for source in chosen.sources:
        console.print(escape(f"  [{source.id}] {source.title}{'' if source.text else ' (never opened)'}"), style="dim")
    if len(runs) > 1:
        console.print(f"{num_agreed} of {len(runs)} runs say so", style="dim")
    console.print(phase_table(runs))
    if out is not None:
        write_transcript(out, question, name, runs, chosen, num_agreed)
        console.print(f"transcript: {escape(str(out))}")
    if not chosen.text.strip():
        raise UserError(
            f"no answer: out of {chosen.ended.value}; raise --budget-turns or --budget-tokens, or serve a longer context"
        )


async def _runs(
    model: Path | None,
    server: str | None,
    prompt: Sequence[Mapping[str, Any]],
    desk_of: Callable[[], Desk],
    options: AgentOptions,
    serving: ServeOptions,
) -> list[Run]:
    """All runs, at once."""
    async with endpoint(model, server, serving) as asked:
        with progress("agent") as advance:

            async def one(number: int) -> Run:
                desk, name = desk_of(), f"run {number + 1}: " if options.votes > 1 else ""
                run = await run_agent(
                    asked,
                    prompt,
                    desk.tools,
                    options,
                    options.seed + number,
                    lambda said: advance(1, f"{name}{said}"[:100]),
                )
                return replace(run, sources=_sources(run, desk.reader))

            return await asyncio.gather(*map(one, range(options.votes)))


@asynccontextmanager
async def endpoint(model: Path | None, server: str | None, serving: ServeOptions) -> AsyncIterator[Endpoint]:
    """A model served in this process, or the first one of a server elsewhere. Raises `UserError`: it lists none."""
    if model is not None:
        with served_here(model, serving) as (app, served):
            async with Client("http://localhost", transport=httpx.ASGITransport(app)) as client:
                yield Endpoint(client, served.name)
        return
    try:
        asked = Client(str(server), next(iter(environment_keys()), None))
    except httpx.InvalidURL as error:
        raise UserError(f"--server {server}: {error}; check the address") from None
    async with asked as client:
        try:
            name = (await client.get("/v1/models"))["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError):  # somebody else answers there
            raise UserError(f"--server {server}: it lists no model; check the address") from None
        yield Endpoint(client, name)


@contextmanager
def _desks(named: str) -> Iterator[Callable[[], Desk]]:
    """What makes a run's desk from ``search=FOLDER,python,calculator``, which share documents and sandbox. Raises `UserError`:
    no such tool, or nothing to search."""
    corpus: Corpus | None = None
    plain: list[Tool] = []
    with ExitStack() as held:
        for each in filter(None, named.split(",")):
            name, _, place = each.strip().partition("=")
            if name not in TOOLS:
                raise UserError(
                    f"--tools {each}: no such tool{nearest(name, TOOLS)}; one of search=FOLDER, python, calculator"
                )
            if (name == "search") != bool(place):
                raise UserError(
                    f"--tools {each}: {'name what is searched: search=FOLDER' if not place else 'takes no value'}"
                )
            if name == "search":
                corpus = Corpus(read_documents(Path(place)))
            elif name == "python":
                plain.append(python_tool(held.enter_context(Sandbox())))
            else:
                plain.append(calculator_tool())

        def desk() -> Desk:
            reader = None if corpus is None else Reader(corpus, _HITS, _SNIPPET)
            return Desk((*(reader.tools if reader else ()), *plain), reader)

        yield desk


def _sources(run: Run, reader: Reader | None) -> tuple[Source, ...]:
    """What the answer cites; with the text, where it was opened."""
    if reader is None:
        return ()
    known = reader.corpus.documents
    return tuple(
        Source(
            each,
            known[each].title if each in known else "no such document",
            known[each].text if each in reader.opened else "",
        )
        for each in citations(run.text)
    )
