"""Server of a local judge with an OpenAI-compatible API: it answers the questions of `stretto.tasks.judge` only.

Rewards therefore reach a local judge and a remote one in the same way, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stretto.base.errors import UserError
from stretto.evals.ranker import LocalJudge
from stretto.server.limits import ApiError, GoneError, read_json, while_connected
from stretto.server.server import failed
from stretto.tasks.judge import Question, read_question


def judge_app(judge: LocalJudge) -> Starlette:
    """``/v1/models`` and ``/v1/chat/completions``. What it cannot judge is a 4xx that says why: never a score."""
    reading = asyncio.Lock()
    waiting = dict[asyncio.Future[str], Question]()
    name = judge.record.name

    def answers(questions: Sequence[Question]) -> list[str]:
        scores_N = judge.scores([(each.prompt, text) for each in questions for text in each.texts])
        ends = np.cumsum([len(each.texts) for each in questions])
        return [_said(judge, *each) for each in zip(questions, np.split(scores_N, ends[:-1]), strict=True)]

    async def answered(question: Question) -> str:
        """One network reads for all: who is next takes along those that have come meanwhile."""
        own = asyncio.get_running_loop().create_future()
        waiting[own] = question
        try:
            async with reading:
                if not own.done():
                    some = [own, *(each for each in waiting if each is not own)][: judge.at_once]
                    try:
                        found = await run_in_threadpool(answers, [waiting[each] for each in some])
                    except UserError:  # of one of them: the others are not to pay for it
                        if len(some) == 1:
                            raise
                        some, found = [own], await run_in_threadpool(answers, [question])
                    for each, said in zip(some, found, strict=True):
                        if not each.done():
                            each.set_result(said)
            return own.result()
        finally:
            del waiting[own]

    async def chat(request: Request) -> Response:
        told = await read_json(request)
        try:
            model, asked = str(told["model"]), str(told["messages"][0]["content"])
        except (KeyError, IndexError, TypeError):
            raise ApiError(
                400, "model and messages are missing; this server answers the questions of a judge only"
            ) from None
        if model != name:
            raise ApiError(404, f"no model {model!r} here: the judge is {name!r}; name it")
        if (question := read_question(asked)) is None:
            raise ApiError(
                400, "not a question of stretto.tasks.judge: this server rates and compares texts, and does not chat"
            )
        try:  # of who has given up, nothing: he asks again, and would wait for both
            said = await while_connected(request.receive, answered(question))
        except UserError as error:
            raise ApiError(422, str(error)) from error
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return JSONResponse({"object": "chat.completion", "model": name, "choices": [choice]})

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"}]})

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers=dict.fromkeys((ApiError, GoneError), failed))


def _said(judge: LocalJudge, question: Question, scores_N: np.ndarray) -> str:
    if len(scores_N) == 1:
        return question.rating(float(judge.shares_of(scores_N)[0]))
    return question.verdict(judge.first_of(*scores_N.tolist()))


def judge_server(judge: LocalJudge) -> uvicorn.Server:
    """``run(sockets=[…])`` serves until it is told to stop."""
    return uvicorn.Server(uvicorn.Config(judge_app(judge), log_level="warning", access_log=False, lifespan="off"))
