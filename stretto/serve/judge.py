"""A local judge behind an OpenAI-compatible address: it answers the questions of `stretto.tasks.judge`, and no others.

So whatever asks a judge over HTTP asks this one too, and rewards know no network."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from stretto.base.errors import UserError
from stretto.evals.ranker import LocalJudge
from stretto.tasks.judge import Question, read_question

_MOST_BYTES = 1 << 22
"""Of a request: two answers of far more tokens than any are read whole."""


def judge_app(judge: LocalJudge) -> Starlette:
    """``/v1/models`` and ``/v1/chat/completions``. What it cannot judge is a 4xx that says why: never a score."""
    one_at_a_time = threading.Lock()
    name = judge.record.name

    def answer(question: Question) -> str:
        with one_at_a_time:
            if len(question.texts) == 1:
                return question.rating(float(judge.shares([(question.prompt, question.texts[0])])[0]))
            return question.verdict(judge.first_wins(question.prompt, *question.texts))

    async def chat(request: Request) -> JSONResponse:
        body = await request.body()
        if len(body) > _MOST_BYTES:
            return _error(413, f"the request has more than {_MOST_BYTES} bytes")
        try:
            told = await request.json()
            model, asked = str(told["model"]), str(told["messages"][0]["content"])
        except (ValueError, KeyError, IndexError, TypeError):
            return _error(400, "no model and messages: this is an address for judgements")
        if model != name:
            return _error(404, f"no model {model!r} here: the judge is {name!r}; name it")
        if (question := read_question(asked)) is None:
            return _error(400, "not a question of stretto's: this judge rates and compares, it does not chat")
        try:
            said = await run_in_threadpool(answer, question)
        except UserError as error:
            return _error(422, str(error))
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"object": "chat.completion", "model": name, "choices": [choice]})

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"}]})

    return Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])])


def judge_server(judge: LocalJudge) -> uvicorn.Server:
    """``run(sockets=[…])`` serves until it is told to stop."""
    return uvicorn.Server(uvicorn.Config(judge_app(judge), log_level="warning", access_log=False, lifespan="off"))


def _error(status: int, message: str) -> JSONResponse:
    told: Mapping[str, Any] = {"error": {"message": message, "type": "invalid_request_error"}}
    return JSONResponse(told, status)
