"""`stretto agent`: answers a question with a model that calls tools, within a budget; prints the answer and the documents it cites.

The loop uses the chat API, of a running server or of an engine in this process. Turns that call tools may run at one size of the
network, and the answer be written at another.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
from pydantic import Field, model_validator
from rich.markup import escape

from stretto.api.serve import ServeOptions, check_url, environment_keys, served_here
from stretto.base.config import Config
from stretto.base.errors import UserError, nearest
from stretto.base.paths import write_text
from stretto.base.track import progress, say, wide_console
from stretto.report.transcript import (
    NO_ANSWER,
    NO_SOURCE,
    Call,
    Ending,
    Phase,
    Run,
    Source,
    Turn,
    phase_table,
    transcript_record,
    write_transcript,
)
from stretto.runtime.runtime import to_end
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.tools import calculate, run_python
from stretto.server.client import ApiFailure, Client
from stretto.server.messages import CONTEXT_LENGTH
from stretto.tasks.corpus import Corpus, Document, Reader, citations, read_documents, without_citations
from stretto.tasks.math import as_number
from stretto.tasks.session import arguments_of, use
from stretto.tasks.task import AnswerFormat, Tool, bare, find_answer, spoken
from stretto.tasks.tools import text_tool
from stretto.tasks.worlds.search import RULES

TOOLS = ("search", "python", "calculator")
_NUM_HITS, _SNIPPET_WORDS = 5, 20
"""Documents that a search returns, and words of text shown for each."""
_ANSWER_PART = 4
"""One token in this many of the budget is reserved for the answer."""
_MIN_TOKENS = 16
"""Smallest ``max_tokens`` that a turn is reduced to when the context has too little room."""
_BUSY, _TRIES, _MOST_WAIT_S = (429, 503), 5, 60.0
"""Statuses of a busy server, the number of requests until it counts as a failure, and the longest pause that it may ask for."""
_ABOUT_SIZE = "elastic: "
"""Beginning of the server's messages about the size that a request names."""
_ANSWER_NOW = "The budget is used up. Answer now, with what you have."
_HEADING = re.compile(r"[\s*#•_(-]*(?:sources?|references?|citations?)\b[^\n:]{0,20}(?::|\W*$)", re.IGNORECASE)
"""Beginning of a list of sources."""
_CITES = re.compile(r"[\s*#•-]*(?:\d+\.\s*)?[\[【]")
"""Beginning of a line about a citation."""
_PLAN = "Before you use a tool, say in a few lines what has to be found, and in which order."


class AgentOptions(Config):
    """Budgets of the agent, sizes, sampling, and what it must do before it answers."""

    turns: int = Field(default=16, gt=0)
    """Largest number of turns, the answer included; with 1 the model calls no tool."""
    tokens: int = Field(default=4096, ge=_ANSWER_PART)
    """Largest number of sampled tokens over all turns."""
    votes: int = Field(default=1, gt=0, le=64)
    """Number of runs; the most frequent answer is returned."""
    temperature: float = Field(default=0.0, ge=0)
    seed: int = 0
    think: str | None = None
    """Preset for turns that call tools; None: the server's default."""
    answer: str | None = None
    """Preset for the answer; None: the preset of the other turns."""
    must_search: bool | None = None
    """Whether to search for the question before the model's first turn; None: where a search tool is given."""
    require_source: bool = False
    """Whether an answer without an opened document is an error."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"--votes {self.votes}: runs at temperature 0 are all the same; give a --temperature above 0"
            )
        return self


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A chat API and the name of the model to ask."""

    client: Client
    model: str


@dataclass(frozen=True, slots=True)
class Desk:
    """Tools of one run of the agent; ``reader``: the search tool's documents and which of them were opened."""

    tools: tuple[Tool, ...]
    reader: Reader | None = None


# The loop


async def run_agent(
    endpoint: Endpoint,
    prompt: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    options: AgentOptions,
    seed: int,
    tell: Callable[[str], None] = lambda line: None,
    first_query: str = "",
) -> Run:
    """Ask for turns until one calls no tool; that turn is the answer. When a budget ends first, ask once more, without tools.

    Args:
        prompt: messages before the model's first turn.
        tell: receives one line per turn with its calls.
        first_query: query of a search that is made before the model's first turn; empty: none.

    Raises:
        ApiFailure: the server refuses the prompt, or stays busy. httpx.TransportError: no server answers. UserError: it refuses a size.
    """
    messages, turns = [dict(message) for message in prompt], list[Turn]()
    reserved, ended = options.tokens // _ANSWER_PART, Ending.ANSWER
    schemas = [tool.schema() for tool in tools]

    async def ask(phase: Phase, max_tokens: int, schemas: Sequence[Mapping[str, Any]]) -> tuple[Turn, dict[str, Any]]:
        is_answer = phase == "answer" and options.answer is not None
        size = options.answer if is_answer else options.think
        body = {"model": endpoint.model, "messages": messages, "temperature": options.temperature, "seed": seed}
        body |= ({"tools": schemas} if schemas else {}) | ({"elastic": size} if size else {})
        try:
            return _turn(await _completion(endpoint.client, body, max_tokens), phase)
        except ApiFailure as failure:
            if size and failure.message.startswith(_ABOUT_SIZE):
                problem = failure.message.removeprefix(_ABOUT_SIZE)
                raise UserError(f"--{'answer' if is_answer else 'think'} {size}: {problem}") from None
            raise

    async def call_tools(turn: Turn, message: Mapping[str, Any]) -> None:
        tell(", ".join(f"{call.name} {' '.join(map(str, (call.arguments or {}).values()))}" for call in turn.calls))
        turns.append(replace(turn, calls=await _call(tools, message, turn.calls, messages)))

    if first_query:
        function = {"name": "search", "arguments": json.dumps({"query": first_query})}
        calls = [{"id": "first-search", "type": "function", "function": function}]
        turn, message = _turn({"choices": [{"message": {"tool_calls": calls}}]}, "search")
        messages.append(message)
        await call_tools(turn, message)
    num_forced = len(turns)
    phase: Phase = "think"
    try:
        while True:
            left = options.tokens - reserved - sum(turn.num_written for turn in turns)
            if left <= 0 or len(turns) - num_forced >= options.turns - 1:
                ended = Ending.TOKENS if left <= 0 else Ending.TURNS
                break
            turn, message = await ask(phase, left, schemas)
            if phase == "think" and not turn.calls and options.answer not in (None, options.think):
                # The size that calls tools is done: the other size answers, and may call tools, too.
                turns.append(replace(turn, is_draft=True))
                phase = "answer"
                continue
            phase = "think"
            messages.append(message)
            if not turn.calls:
                turns.append(replace(turn, phase="answer"))
                ended = Ending.TOKENS if turn.is_cut else ended
                break
            await call_tools(turn, message)
        if ended in (Ending.TURNS, Ending.TOKENS):
            if turns:
                messages.append({"role": "user", "content": _ANSWER_NOW})
            turn, message = await ask("answer", reserved if len(turns) > num_forced else options.tokens, ())
            turns.append(turn)
            messages.append(message)
    except ApiFailure as failure:
        if not _fills_context(failure) or not turns:
            raise
        ended = Ending.CONTEXT
    text = "" if ended is Ending.CONTEXT else turns[-1].text
    return Run(seed, tuple(turns), text, ended, tuple(messages[len(prompt) :]))


async def _completion(client: Client, body: Mapping[str, Any], max_tokens: int) -> Any:
    """The chat API's response. Retries while the server is busy, and with half of ``max_tokens`` where the context has no room."""
    attempt = 1
    while True:
        try:
            return await client.chat({**body, "max_tokens": max_tokens})
        except ApiFailure as failure:
            if _fills_context(failure) and max_tokens >= 2 * _MIN_TOKENS:
                max_tokens //= 2
            elif failure.status in _BUSY and attempt < _TRIES and (failure.retry_after_s or 0.0) <= _MOST_WAIT_S:
                await asyncio.sleep(attempt if failure.retry_after_s is None else failure.retry_after_s)
                attempt += 1
            else:
                raise


def _fills_context(failure: ApiFailure) -> bool:
    """Whether the messages and ``max_tokens`` are more than the context holds. Some servers say so in words only."""
    in_words = not isinstance(failure.code, str) and any(
        words in failure.message.lower() for words in ("context", "too long")
    )
    return failure.status == 400 and (failure.code == CONTEXT_LENGTH or in_words)


class _Part(msgspec.Struct):
    text: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: str | list[str | _Part | None] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Elastic(msgspec.Struct):
    subnet: str = ""
    flops: float | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    elastic: _Elastic | None = None


class _Completion(msgspec.Struct):
    """What the agent reads of a chat API's response. Servers differ in what they leave out or set to null."""

    choices: list[_Choice]
    usage: _Usage | None = None


def _turn(response: Mapping[str, Any], phase: Phase) -> tuple[Turn, dict[str, Any]]:
    """The turn in a chat API's response, its calls without results, and the message that repeats it in the next request. Raises
    `ApiFailure`: the response has another form."""
    try:
        read = msgspec.convert(response, _Completion, strict=False)  # reads 8.0 and "8" as 8
    except msgspec.ValidationError as error:
        raise ApiFailure(502, f"the server's answer has another form than that of a chat API: {error}") from None
    message, usage = read.choices[0].message, read.usage or _Usage()
    elastic, details = usage.elastic or _Elastic(), usage.prompt_tokens_details or _Details()
    parts = message.content if isinstance(message.content, list) else [message.content]
    text = "".join((part.text if isinstance(part, _Part) else part) or "" for part in parts)
    turn = Turn(
        phase=phase,
        size=elastic.subnet,
        text=text,
        thought=message.reasoning_content or "",
        calls=tuple(
            Call(each.function.name, arguments_of(each.function.arguments)) for each in message.tool_calls or ()
        ),
        num_prompt=usage.prompt_tokens or 0,
        num_cached=details.cached_tokens or 0,
        num_written=usage.completion_tokens or 0,
        flops=elastic.flops,
        is_cut=read.choices[0].finish_reason == "length",
    )
    thought = {"reasoning_content": turn.thought} if turn.thought else {}
    calls = {"tool_calls": response["choices"][0]["message"]["tool_calls"]} if turn.calls else {}
    return turn, {"role": "assistant", "content": text} | thought | calls


async def _call(
    tools: Sequence[Tool], message: Mapping[str, Any], calls: Sequence[Call], messages: list[dict[str, Any]]
) -> tuple[Call, ...]:
    """Make the ``calls`` of ``message`` one after another; their results are also appended to ``messages``."""
    finished = []
    for request, call in zip(message["tool_calls"], calls, strict=True):
        start = time.perf_counter()
        result = await asyncio.to_thread(use, tools, call.name, call.arguments)
        seconds = time.perf_counter() - start
        finished.append(replace(call, result=result.text, outcome=result.outcome.value, seconds=seconds))
        messages.append(
            {"role": "tool", "tool_call_id": request.get("id") or "", "name": call.name, "content": result.text}
        )
    return tuple(finished)


# Votes


def voted(runs: Sequence[Run]) -> tuple[Run, int]:
    """The first of the ``runs`` with the most frequent answer, and the number of runs with that answer. Empty answers do not count."""
    votes = [_vote(run) for run in runs]
    counts = Counter(vote for vote in votes if vote)
    if not counts:
        return runs[0], 0
    best = max(counts, key=lambda vote: (counts[vote], -votes.index(vote)))
    return runs[votes.index(best)], counts[best]


def _vote(run: Run) -> str:
    form: AnswerFormat = "boxed" if "\\boxed{" in run.text else "tags"
    found = find_answer(run.text, form)
    text = found.text
    if run.num_opened is not None:  # there was a search tool, so brackets are citations
        lines = spoken(run.text).splitlines()
        end = next((at for at, line in enumerate(lines) if at and _HEADING.match(line)), len(lines))
        kept = [line for line in lines[:end] if re.search(r"\w", without_citations(line)) and not _CITES.match(line)]
        text = without_citations(text if found.is_marked or not kept else kept[-1])
    answer = bare(text).casefold()
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
    """Answer ``question`` on the console, and write the transcript to ``out``: JSON for a name that ends in .json, else HTML.

    Raises:
        UserError: bad input, a server that refuses or does not answer, no answer within the budget, or no opened document where
            the options require one.
    """
    if server is not None:
        check_url(server, "--server")
    if (model is None) == (server is None):
        raise UserError("stretto agent: name either --model FOLDER or --server URL")
    with _desks(tools) as new_desk:
        has_search = new_desk().reader is not None
        for name in ("must_search", "require_source"):
            if getattr(options, name) and not has_search:
                raise UserError(f"--{name.replace('_', '-')}: no documents to search; add --tools search=FOLDER")
        first_query = question if has_search and options.must_search is not False else ""
        system = [{"role": "system", "content": _PLAN}] if plan else []
        prompt = [*system, {"role": "user", "content": f"{question}\n\n{RULES}" if has_search else question}]
        name = str(model or server)
        try:
            runs = to_end(_runs(model, server, prompt, first_query, new_desk, options, serving or ServeOptions()))
        except httpx.TransportError as error:
            raise UserError(
                f"--server {server}: no server answers ({type(error).__name__}); start it, or check the address"
            ) from None
        except ApiFailure as failure:
            raise UserError(f"{name}: the server refuses a request: {failure}; see Errors in docs/AGENT.md") from None
    chosen, num_agreed = voted(runs)
    console = wide_console()
    answer = escape(chosen.text.strip()) or f"[red]{NO_ANSWER[chosen.ended]}"
    console.print(answer, soft_wrap=not console.is_terminal)  # a file or another program gets the answer's own lines
    if chosen.num_opened == 0:
        say(NO_SOURCE, style="yellow")
    for source in chosen.sources:
        say(f"  [{source.id}] {source.title}{'' if source.text else ' (never opened)'}", style="dim")
    if len(runs) > 1:
        say(f"{num_agreed} of {len(runs)} runs say so", style="dim")
    console.print(phase_table(runs))
    if out is not None:
        if out.suffix.lower() == ".json":
            record = transcript_record(question, name, runs, chosen, num_agreed)
            write_text(out, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
        else:
            write_transcript(out, question, name, runs, chosen, num_agreed)
        say(f"transcript: {out}")
    if not chosen.text.strip():
        raise UserError(NO_ANSWER[chosen.ended])
    if options.require_source and chosen.num_opened == 0:
        raise UserError(f"--require-source: {NO_SOURCE}; the answer above rests on no document")


async def _runs(
    model: Path | None,
    server: str | None,
    prompt: Sequence[Mapping[str, Any]],
    first_query: str,
    new_desk: Callable[[], Desk],
    options: AgentOptions,
    serving: ServeOptions,
) -> list[Run]:
    """All runs, concurrently. Runs in which a request fails are reported and left out, unless all fail."""
    async with endpoint(model, server, serving) as opened:
        with progress("agent") as advance:

            async def one(number: int) -> Run | ApiFailure | httpx.TransportError:
                desk, name = new_desk(), f"run {number + 1}: " if options.votes > 1 else ""
                seed = options.seed + number

                def tell(line: str) -> None:
                    advance(1, f"{name}{line}"[:100])

                try:
                    run = await run_agent(opened, prompt, desk.tools, options, seed, tell, first_query)
                except (ApiFailure, httpx.TransportError) as failure:
                    return failure
                if desk.reader is None:
                    return run
                return replace(run, sources=_sources(run, desk.reader), num_opened=len(desk.reader.opened))

            ended = await asyncio.gather(*map(one, range(options.votes)))
    runs = [each for each in ended if isinstance(each, Run)]
    failures = [each for each in ended if not isinstance(each, Run)]
    if not runs:
        raise failures[0]
    if failures:
        reason = str(failures[0]) or type(failures[0]).__name__
        say(f"{len(failures)} of {len(ended)} runs failed and have no vote: {reason}", style="yellow")
    return runs


@asynccontextmanager
async def endpoint(model: Path | None, server: str | None, serving: ServeOptions) -> AsyncIterator[Endpoint]:
    """``model`` served in this process, or the first model of ``server``. Raises `UserError`: the server lists no model."""
    if model is not None:
        with served_here(model, serving) as (app, served):
            async with Client("http://localhost", transport=httpx.ASGITransport(app)) as client:
                yield Endpoint(client, served.name)
        return
    try:
        connection = Client(str(server), next(iter(environment_keys()), None))
    except httpx.InvalidURL as error:
        raise UserError(f"--server {server}: {error}; check the address") from None
    async with connection as client:
        try:
            name = (await client.get("/v1/models"))["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError):  # another kind of server
            raise UserError(f"--server {server}: it lists no model; check the address") from None
        yield Endpoint(client, name)


@contextmanager
def _desks(names: str) -> Iterator[Callable[[], Desk]]:
    """A function that makes the tools of one run from a list such as ``search=FOLDER,python,calculator``. All runs share the
    documents and the sandbox. Raises `UserError`: no such tool, or nothing to search."""
    corpus: Corpus | None = None
    plain: list[Tool] = []
    with ExitStack() as resources:
        for entry in filter(None, names.split(",")):
            name, _, folder = entry.strip().partition("=")
            if name not in TOOLS:
                near = nearest(name, TOOLS)
                raise UserError(f"--tools {entry}: no such tool{near}; one of search=FOLDER, python, calculator")
            if (name == "search") != bool(folder):
                problem = "takes no value" if folder else "name what is searched: search=FOLDER"
                raise UserError(f"--tools {entry}: {problem}")
            if name == "search":
                try:
                    corpus = Corpus(read_documents(Path(folder)))
                except UserError as error:
                    raise UserError(f"--tools {entry}: {error}") from None
            elif name == "python":
                plain.append(text_tool("python", partial(run_python, resources.enter_context(Sandbox()))))
            else:
                plain.append(text_tool("calculator", calculate))

        def new_desk() -> Desk:
            reader = None if corpus is None else Reader(corpus, _NUM_HITS, _SNIPPET_WORDS)
            return Desk((*(reader.tools if reader else ()), *plain), reader)

        yield new_desk


def _sources(run: Run, reader: Reader) -> tuple[Source, ...]:
    """The documents that the answer cites; with their text if they were opened."""
    unknown = Document("", "no such document", "")
    found = [
        (each, reader.corpus.documents.get(each, unknown)) for each in citations(run.text, reader.corpus.documents)
    ]
    return tuple(Source(name, each.title, each.text if name in reader.opened else "") for name, each in found)
