"""`stretto agent`: its loop against a server with scripted replies, and the command on a small random network."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from stretto.api import agent
from stretto.api.agent import AgentOptions, Desk, Endpoint, run_agent, voted
from stretto.api.serve import ServeOptions
from stretto.base.errors import UserError
from stretto.report.transcript import NO_ANSWER, NO_SOURCE, Ending, Run, Source, phase_table, write_transcript
from stretto.server.client import ApiFailure, Client
from stretto.tasks.corpus import Corpus, Document, Reader
from tests.api.conftest import Run as Command
from tests.api.conftest import refused

CORPUS = Corpus(
    [Document("1", "Ens", "The bridge was built by Ada Holm."), Document("2", "Ada Holm", "Born in <Vik>.")]
)
PROMPT = [{"role": "user", "content": "Where was the builder of the bridge at Ens born?"}]


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_NATIVE", "0")


def call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def ran(
    replies: Sequence[dict[str, Any] | int], first_query: str = "", **options: Any
) -> tuple[Run, list[dict[str, Any]], Desk]:
    """The run on a server that gives these ``replies`` (messages or error statuses), the requests, and the tools."""
    asked: list[dict[str, Any]] = []
    said = iter(replies)

    async def answer(request: Request) -> JSONResponse:
        body = await request.json()
        asked.append(body)
        turn = next(said)
        if isinstance(turn, int):  # some servers repeat the status as the code
            return JSONResponse(
                {"error": {"message": "the prompt is too long", "code": turn}}, turn, {"retry-after": "0"}
            )
        if "error" in turn:
            return JSONResponse(turn, 400)
        spent = {"subnet": body.get("elastic", "full"), "flops": 1e6 * (10 if body.get("elastic") == "full" else 1)}
        num_written = min(turn.get("num_written", 8), body["max_tokens"])
        usage = {"prompt_tokens": 50, "completion_tokens": num_written, "elastic": spent}
        finish = "length" if num_written < turn.get("num_written", 0) else "stop"
        choice = {"message": {"role": "assistant", **turn}, "finish_reason": finish}
        return JSONResponse({"choices": [choice], "usage": usage})

    desk = Desk((reader := Reader(CORPUS, most=3, words=8)).tools, reader)

    async def work() -> Run:
        async with answering(answer) as endpoint:
            return await run_agent(endpoint, PROMPT, desk.tools, AgentOptions(**options), 3, first_query=first_query)

    return asyncio.run(work()), asked, desk


@asynccontextmanager
async def answering(answer: Callable[[Request], Awaitable[JSONResponse]]) -> AsyncIterator[Endpoint]:
    """A chat API in this process that is answered by ``answer``."""
    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    async with Client("http://test", transport=httpx.ASGITransport(app)) as client:
        yield Endpoint(client, "m")


SEARCHED = [
    call("search", '{"query": "bridge Ens"}'),
    call("open", '{"id": "1"}'),
    call("open", '{"id": "2"}'),
    {"content": "<answer>Vik</answer> [1] [2]"},
]


def test_it_calls_until_it_answers() -> None:
    run, asked, desk = ran(SEARCHED)
    assert run.ended is Ending.ANSWER and run.text == SEARCHED[-1]["content"]
    assert desk.reader is not None and desk.reader.opened == ["1", "2"]
    assert [turn.phase for turn in run.turns] == ["think"] * 3 + ["answer"]
    told = [message for message in asked[-1]["messages"] if message["role"] == "tool"]
    assert told[0]["content"].startswith("Ens [1]: ") and told[0]["tool_call_id"] == "c1"
    assert [len(body["messages"]) for body in asked] == [1, 3, 5, 7] and asked[0]["tools"][0]["function"][
        "name"
    ] == "search"
    assert {body["seed"] for body in asked} == {3} and "elastic" not in asked[0]


@pytest.mark.parametrize("options", [{}, {"turns": 1}])
def test_a_search_for_the_question_comes_before_the_first_turn(options: dict[str, Any], tmp_path: Path) -> None:
    run, asked, desk = ran([{"content": "Vik"}], "Where is the bridge at Ens?", **options)
    call_turn, result = asked[0]["messages"][1:3]
    assert call_turn["tool_calls"][0]["function"]["name"] == "search"
    assert result["role"] == "tool" and result["content"].startswith("Ens [1]: ")
    assert run.turns[0].calls[0].result == result["content"] and run.messages[0] == call_turn
    assert (run.text, len(asked), len(run.turns), desk.reader and desk.reader.opened) == ("Vik", 1, 2, [])
    assert asked[0]["max_tokens"] == (4096 if options else 3072)
    table = phase_table([run])
    assert [[cell.text for cell in row[:2]] for row in (*table.rows, *table.totals)] == [["answer", "1"], ["All", "1"]]
    write_transcript(tmp_path / "page.html", "Where?", "tiny", [run], run, 1)
    page = (tmp_path / "page.html").read_text()
    assert "Turn 1: answer" in page and "Turn 2" not in page and "Search for the question" in page


def test_bad_calls_are_told_to_the_model() -> None:
    run, asked, _ = ran([call("find", "{}"), call("search", "[1"), call("search", '{"q": 1}'), {"content": "none"}])
    told = [message["content"] for message in asked[-1]["messages"] if message["role"] == "tool"]
    assert (
        "there is no tool 'find'" in told[0] and "not a JSON object" in told[1] and "string arguments: query" in told[2]
    )
    assert run.turns[1].calls[0].outcome == "wrong" and run.text == "none"


def test_replies_of_other_servers_are_read() -> None:
    """Arguments as an object, null or missing, a call without an id or with null, and content in parts."""
    replies: list[dict[str, Any]] = [call("open", "") for _ in range(5)]
    functions = [reply["tool_calls"][0]["function"] for reply in replies]
    functions[0]["arguments"], functions[1]["arguments"] = {"id": "1"}, None
    del functions[2]["arguments"]
    functions[3]["arguments"] = '{"id": "2"}'
    del replies[3]["tool_calls"][0]["id"]
    functions[4]["arguments"], replies[4]["tool_calls"][0]["id"] = '{"id": "2"}', None
    parts = [{"type": "text", "text": "Vik "}, {"type": "image_url"}, None, "[", {"type": "text", "text": "1]"}]
    run, asked, desk = ran([*replies, {"content": parts}])
    assert run.text == "Vik [1]" and desk.reader is not None and desk.reader.opened == ["1", "2"]
    told = [message for message in asked[-1]["messages"] if message["role"] == "tool"]
    assert [each["content"].startswith("error") for each in told] == [False, True, True, False, False]
    assert [each["tool_call_id"] for each in told] == ["c1", "c1", "c1", "", ""]


def test_runs_that_end_are_counted_where_others_fail(
    stretto: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = {1, 3}

    async def answer(request: Request) -> JSONResponse:
        if (await request.json())["seed"] in failing:
            return JSONResponse({"error": {"message": "boom"}}, 500)
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": "12"}}]})

    monkeypatch.setattr(agent, "endpoint", lambda *_: answering(answer))
    record = tmp_path / "run.json"
    told = ("agent", "7?", "--model", tmp_path, "--votes", 5, "--temperature", 1, "-o", record)
    done = stretto(*told)
    assert done.code == 0 and "3 of 3 runs say so" in done.out and "2 of 5 runs failed" in done.out, done
    assert "have no vote: 500: boom" in done.out and json.loads(record.read_text())["answer"] == "12"
    failing |= {0, 2, 4}
    refused(stretto(*told), "the server refuses a request: 500: boom")


@pytest.mark.parametrize("failure", [UserError("--answer nosuch: no such preset"), KeyError("a fault of our own")])
def test_an_error_that_all_runs_would_have_ends_the_others(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def run(endpoint: Endpoint, prompt: Any, tools: Any, options: Any, seed: int, *rest: Any) -> Run:
        if seed == 0:
            raise failure
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(seed)
            raise
        raise AssertionError("the run was not ended")

    @asynccontextmanager
    async def opened(*_: Any) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(agent, "run_agent", run)
    monkeypatch.setattr(agent, "endpoint", opened)
    options, desk = AgentOptions(votes=3, temperature=1.0), Desk(())

    async def work() -> None:
        await agent._runs(None, "http://test", PROMPT, "", lambda: desk, options, ServeOptions())

    with pytest.raises(type(failure)):
        asyncio.run(work())
    assert sorted(ended) == [1, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"choices": [{"message": {"content": 3}}]},
        {"choices": [{"message": {"tool_calls": True}}]},
        {"choices": [{"message": {"tool_calls": [{"function": {}}]}}]},
        {"choices": [{"message": {"tool_calls": [{"function": {"name": {}}}]}}]},
        {"usage": "8 tokens"},
        {"usage": {"prompt_tokens": [8]}},
        {"usage": {"elastic": {"flops": []}}},
    ],
)
def test_an_answer_of_another_form_is_a_failure_of_the_server(changes: dict[str, Any]) -> None:
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse({"choices": [{"message": {"content": "Vik"}}], **changes})

    async def work() -> None:
        async with answering(answer) as endpoint:
            await run_agent(endpoint, PROMPT, (), AgentOptions(), 3)

    with pytest.raises(ApiFailure, match=r"another form than that of a chat API: Expected|missing required"):
        asyncio.run(work())


def test_numbers_and_ids_of_another_type_are_read() -> None:
    function = {"name": "open", "arguments": {"id": "1"}}
    usage = {"prompt_tokens": 8.0, "completion_tokens": "3"}
    replies = iter([{"content": None, "tool_calls": [{"id": 7, "function": function}]}, {"content": "Vik"}])
    asked = []

    async def answer(request: Request) -> JSONResponse:
        asked.append(await request.json())
        return JSONResponse({"choices": [{"message": next(replies)}], "usage": usage})

    async def work() -> Run:
        desk = Desk((reader := Reader(CORPUS, most=3, words=8)).tools, reader)
        async with answering(answer) as endpoint:
            return await run_agent(endpoint, PROMPT, desk.tools, AgentOptions(), 3)

    run = asyncio.run(work())
    assert run.text == "Vik" and (run.turns[0].num_prompt, run.turns[0].num_written) == (8, 3)
    assert asked[1]["messages"][-1]["tool_call_id"] == 7


def test_half_an_emoji_is_sent_and_stored_as_another_character(tmp_path: Path) -> None:
    run, asked, _ = ran([call("open", '{"id": "\\ud83d"}'), {"content": "no"}])
    assert run.turns[0].calls[0].arguments == {"id": "?"} and run.text == "no" and len(asked) == 2
    write_transcript(tmp_path / "t.html", "q", "m", [run], run, 1)


def test_an_answer_nested_too_deeply_is_a_failure_of_the_server() -> None:
    async def work() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=b"[" * 100_000))
        async with Client("http://test", transport=transport) as client:
            await client.chat({})

    with pytest.raises(ApiFailure, match="its answer contains no message"):
        asyncio.run(work())


def test_a_server_that_is_busy_for_hours_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse({"error": {"message": "come tomorrow"}}, 429, {"retry-after": "86400"})

    async def work() -> None:
        async with answering(answer) as endpoint:
            await run_agent(endpoint, PROMPT, (), AgentOptions(), 3)

    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("stretto.api.agent.asyncio.sleep", wait)
    with pytest.raises(ApiFailure, match="come tomorrow"):
        asyncio.run(work())
    assert not waits


def test_a_small_size_searches_and_another_answers() -> None:
    draft = {"content": "Vik, I think"}
    run, asked, _ = ran([*SEARCHED[:2], draft, SEARCHED[2], draft, SEARCHED[3]], think="corner", answer="full")
    assert [body["elastic"] for body in asked] == ["corner", "corner", "corner", "full", "corner", "full"]
    assert [(turn.phase, turn.is_draft, len(turn.calls)) for turn in run.turns] == [
        ("think", False, 1), ("think", False, 1), ("think", True, 0), ("answer", False, 1), ("think", True, 0),
        ("answer", False, 0),
    ]  # fmt: skip
    assert run.text == SEARCHED[3]["content"]
    assert all(draft["content"] not in str(message.get("content")) for message in asked[-1]["messages"])


@pytest.mark.parametrize(
    ("options", "ended", "num"),
    [({"turns": 3}, Ending.TURNS, 3), ({"tokens": 32}, Ending.TOKENS, 4), ({"turns": 1}, Ending.TURNS, 1)],
)
def test_out_of_budget_it_answers_with_what_it_has(options: dict[str, Any], ended: Ending, num: int) -> None:
    run, asked, _ = ran([*[SEARCHED[0]] * (num - 1), {"content": "Vik"}], **options)
    assert (run.ended, run.text, len(asked)) == (ended, "Vik", num)
    assert "tools" not in asked[-1] and asked[-1]["messages"][-1]["role"] == "user"
    allowed = options.get("tokens", 4096)
    assert all(body["max_tokens"] <= allowed - 8 * place for place, body in enumerate(asked))


@pytest.mark.parametrize("long", [SEARCHED[0], SEARCHED[3]])
def test_two_sizes_share_one_budget(long: dict[str, Any]) -> None:
    """The size that answers fills what it may write, with a call or with a text that is cut: the reserve is still there."""
    replies = [SEARCHED[3], long | {"num_written": 99}, SEARCHED[3] | {"num_written": 99}]
    run, asked, _ = ran(replies, tokens=32, think="corner", answer="full")
    assert [body["max_tokens"] for body in asked] == [24, 16, 8]
    assert (sum(turn.num_written for turn in run.turns), run.ended) == (32, Ending.TOKENS)
    assert "tools" not in asked[-1] and asked[-1]["elastic"] == "full"
    run, asked, _ = ran([SEARCHED[3]] * 2, turns=2, think="corner", answer="full")
    assert len(run.turns) == 2 and "tools" not in asked[-1], "the second turn is the last"


def test_a_context_that_is_full_ends_the_run_and_a_busy_server_does_not() -> None:
    run, asked, _ = ran([503, SEARCHED[0], 429, SEARCHED[1], *[400] * 2], tokens=64)
    assert [body["max_tokens"] for body in asked] == [48, 48, 40, 40, 32, 16]
    assert (run.ended, run.text, len(run.turns)) == (Ending.CONTEXT, "", 2)
    run, asked, _ = ran([*SEARCHED[:2], *[400] * 2], turns=3, tokens=128)  # nor has it room to answer at once
    assert (run.ended, run.text, len(run.turns)) == (Ending.CONTEXT, "", 2)
    for options in ({"tokens": 64}, {"tokens": 64, "turns": 1}):
        with pytest.raises(ApiFailure, match="too long"):
            ran([400] * 3, **options)


def test_another_refusal_than_that_of_a_full_context_is_shown() -> None:
    refusal = {"error": {"message": "subnet: no preset 'nosuch'; known: full", "code": "subnet"}}
    for replies, query in (([refusal], "the bridge"), ([SEARCHED[0], refusal], "")):
        with pytest.raises(ApiFailure, match="no preset 'nosuch'"):
            ran(replies, first_query=query, tokens=64)


def test_the_most_frequent_answer_wins() -> None:
    texts = ["<answer>Ens</answer> [1]", "so\n<answer>vik.</answer> [2]", "", "It is here\nVik [1] [2]", "\\boxed{7.0}"]
    runs = [Run(seed, (), text, Ending.ANSWER, (), num_opened=2) for seed, text in enumerate(texts)]
    assert voted(runs) == (runs[1], 2)
    assert voted([runs[2], runs[0], runs[1]]) == (runs[0], 1) and voted([runs[2]]) == (runs[2], 0)


@pytest.mark.parametrize(
    "text",
    [
        "It is here\nVik [1]\n[2]",
        "Vik\n\nSources: [1]",
        "**Vik** [1, 2]\n\n**Sources:**\n- [1] Ens\n- [2] Ada Holm\n",
        "Vik ([1] and [2])\n\n## References\n[1]\n[2]",
        "<answer>Vik [1], [2]</answer>\nSources: [1]",
        "[1] Vik",
        "Vik\n([1], [2])",
        "Vik\n(Source: [1])",
        "Vik\n\nCitations: [1]",
        "Vik\nSources consulted: [1], [2]",
        "Vik\nSources\nEns, Ada",
        "**Vik**\n**Sources**\n1. Ens\n2. Ada",
        "Vik\n1. [1] Ens",
    ],
)
def test_a_list_of_sources_is_no_vote(text: str) -> None:
    runs = [Run(seed, (), each, Ending.ANSWER, (), num_opened=2) for seed, each in enumerate(("Vik", text))]
    assert voted(runs) == (runs[0], 2)


def test_a_first_line_that_looks_like_a_heading_is_a_vote() -> None:
    texts = ("Source: 6 km", "Source: 5 km", "Source: 5 km [1]")
    runs = [Run(seed, (), text, Ending.ANSWER, (), num_opened=2) for seed, text in enumerate(texts)]
    assert voted(runs) == (runs[1], 2)


def test_brackets_are_a_vote_where_nothing_can_be_cited() -> None:
    texts = ("Here it is:\n[2, 3]", "Here it is:\n[2, 5]", "[2, 5]")
    runs = [Run(seed, (), text, Ending.ANSWER, ()) for seed, text in enumerate(texts)]
    assert voted(runs) == (runs[1], 2)


def test_the_page_holds_all_and_fetches_nothing(tmp_path: Path) -> None:
    run, _, _ = ran(SEARCHED)
    sources = (Source("1", "Ens", "The bridge."), Source("2", "Ada Holm", "Born in <Vik>."))
    shown = Run(run.seed, run.turns, run.text, run.ended, run.messages, sources)
    page = tmp_path / "page.html"
    write_transcript(page, "Where & when?", "tiny", [shown, shown], shown, 2)
    text = page.read_text()
    assert '&lt;answer&gt;Vik&lt;/answer&gt; <a href="#source-1">[1]</a> <a href="#source-2">[2]</a>' in text
    assert 'id="source-2"' in text and "Born in &lt;Vik&gt;." in text and "Where &amp; when?" in text
    assert "bridge Ens" in text and '<data value="8000000.0">' in text
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)


def test_an_answer_from_no_document_says_so(stretto: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": "Vik"}}]})

    monkeypatch.setattr(agent, "endpoint", lambda *_: answering(answer))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/ens.md").write_text("The bridge at Ens was built by Ada Holm.")
    told = ("agent", "Ens?", "--model", tmp_path, "--tools", f"search={tmp_path / 'notes'}")
    page, record = tmp_path / "page.html", tmp_path / "run.json"
    done = stretto(*told, "-o", page)
    assert done.code == 0 and NO_SOURCE in done.out and NO_SOURCE in page.read_text(), done
    done = stretto(*told, "-o", record, "--require-source")
    written = json.loads(record.read_text())
    assert written["no_source_opened"] is True and written["answer"]
    assert written["messages"][0]["tool_calls"][0]["function"]["name"] == "search"
    refused(done, "--require-source: no source was opened")
    assert stretto(*told, "-o", record, "--no-must-search").code == 0
    assert "tool_calls" not in json.loads(record.read_text())["messages"][0]
    done = stretto("agent", "7?", "--model", tmp_path, "-o", record)
    assert NO_SOURCE not in done.out and json.loads(record.read_text())["no_source_opened"] is False


def test_an_empty_answer_is_named_by_its_reason(tmp_path: Path) -> None:
    run, _, _ = ran([{"content": ""}])
    assert run.ended is Ending.ANSWER and NO_ANSWER[run.ended].startswith("no answer: the model's last turn is empty")
    write_transcript(tmp_path / "page.html", "Where?", "tiny", [run], run, 0)
    assert "last turn is empty" in (tmp_path / "page.html").read_text().replace("&#39;", "'")


def test_the_command_on_a_random_network(stretto: Command, served_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    told = ("--budget-tokens", 48, "--votes", 3, "--temperature", 1, "-o", page)
    done = stretto("agent", "7?", "--model", served_run, *told, "--think", "corner", "--answer", "full")
    assert done.code == 0, done
    assert "of 3 runs say so" in done.out and "Phase" in done.out and page.is_file()
    assert "corner" in page.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tools", "serach=."), ("--tools", "did you mean 'search'")),
        (("--tools", "search"), ("search=FOLDER",)),
        (("--tools", "python=3"), ("takes no value",)),
        (("--tools", "search={empty}"), ("nothing to search",)),
        (("--tools", "search=/nowhere"), ("--tools search=/nowhere: /nowhere: no such file or folder",)),
        (("--votes", 3), ("--votes 3", "--temperature")),
        (("--votes", 0), ("stretto: --votes: must be greater than 0, is 0",)),
        (("--budget-turns", 0), ("stretto: --budget-turns: must be greater than 0, is 0",)),
        (("--budget-tokens", 0), ("stretto: --budget-tokens: must be greater than or equal to 4, is 0",)),
        (("--think", "haf"), ("--think haf: no preset 'haf'", "did you mean 'half'")),
        (("--answer", "haf"), ("--answer haf: no preset 'haf'", "did you mean 'half'")),
        (("-o", "{empty}/answer.pdf"), ("answer.pdf: must end in .html or .json",)),
        (("--server", "http://127.0.0.1:9"), ("either --model FOLDER or --server",)),
        (("--must-search",), ("--must-search: no documents to search",)),
        (("--require-source",), ("--require-source: no documents to search",)),
    ],
)
def test_bad_input(
    stretto: Command, served_run: Path, tmp_path: Path, options: Sequence[object], words: tuple[str, ...]
) -> None:
    (tmp_path / "empty").mkdir()
    told = [str(each).format(empty=tmp_path / "empty") for each in options]
    refused(stretto("agent", "Who?", "--model", served_run, *told), *words)


def test_what_cannot_be_asked(stretto: Command, served_run: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        refused(stretto("agent", "Who?", "--server", f"http://127.0.0.1:{free.getsockname()[1]}"), "no server answers")
    for question in ("", " "):
        refused(stretto("agent", question, "--model", served_run), "agent: the question is empty; write one")
    refused(stretto("agent", "Who? " * 400, "--model", served_run), "tokens")
    shutil.copytree(served_run / "checkpoint", tmp_path / "bare")
    (tmp_path / "bare/chat_template.jinja").unlink()
    refused(stretto("agent", "Who?", "--model", tmp_path / "bare"), "chat template")
