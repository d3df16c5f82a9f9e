"""A local judge behind an OpenAI-compatible address: it answers the questions of `stretto.tasks.judge`, and no others.

So whatever asks a judge over HTTP asks this one too, and rewards know no network."""

from __future__ import annotations

import asyncio

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stretto.base.errors import UserError
from stretto.evals.ranker import LocalJudge
from stretto.serve.limits import ApiError, GoneError, as_api_error, read_json, while_connected
from stretto.tasks.judge import Question, read_question


def judge_app(judge: LocalJudge) -> Starlette:
    """``/v1/models`` and ``/v1/chat/completions``. What it cannot judge is a 4xx that says why: never a score."""
    one_at_a_time = asyncio.Lock()
    name = judge.record.name

    def answer(question: Question) -> str:
        if len(question.texts) == 1:
            return question.rating(float(judge.shares([(question.prompt, question.texts[0])])[0]))
        return question.verdict(judge.first_wins(question.prompt, *question.texts))

    async def answered(question: Question) -> str:
        async with one_at_a_time:
            return await run_in_threadpool(answer, question)

    async def judged(request: Request) -> str:
        """Raises ApiError, GoneError: as `read_json`, or it is nothing to judge."""
        told = await read_json(request)
        try:
            model, asked = str(told["model"]), str(told["messages"][0]["content"])
        except (KeyError, IndexError, TypeError):
            raise ApiError(400, "no model and messages: this is an address for judgements") from None
        if model != name:
            raise ApiError(404, f"no model {model!r} here: the judge is {name!r}; name it")
        if (question := read_question(asked)) is None:
            raise ApiError(400, "not a question of stretto's: this judge rates and compares, it does not chat")
        try:  # of who has given up, nothing: he asks again, and would wait for both
            return await while_connected(request.receive, answered(question))
        except UserError as error:
            raise ApiError(422, str(error)) from error

    async def chat(request: Request) -> Response:
        try:
            message = {"role": "assistant", "content": await judged(request)}
        except (ApiError, GoneError) as error:
            return as_api_error(error).response()
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"object": "chat.completion", "model": name, "choices": [choice]})

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"}]})

    return Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])])


def judge_server(judge: LocalJudge) -> uvicorn.Server:
    """``run(sockets=[…])`` serves until it is told to stop."""
    return uvicorn.Server(uvicorn.Config(judge_app(judge), log_level="warning", access_log=False, lifespan="off"))
