"""Server of a local judge with an OpenAI-compatible API: it answers the questions of `stretto.tasks.judge` only.

Reward code can so use a local judge and a remote one in the same way, over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stretto.base.errors import UserError
from stretto.evals.ranker import LocalJudge
from stretto.server.limits import ApiError, GoneError, read_json, while_connected
from stretto.server.server import ServeSettings, entrance, failed
from stretto.tasks.judge import Question, read_question

_LOCAL = ServeSettings()


def judge_app(judge: LocalJudge, settings: ServeSettings = _LOCAL) -> Starlette:
    """The application: ``/v1/models`` and ``/v1/chat/completions``. A request that it cannot judge gets status 4xx with the reason.
    Of ``settings`` it takes the host names that it answers."""
    scoring = asyncio.Lock()
    waiting = dict[asyncio.Future[str], Question]()
    name = judge.record.name

    def answers(questions: Sequence[Question]) -> list[str]:
        scores_N = judge.scores([(each.prompt, text) for each in questions for text in each.texts])
        ends = np.cumsum([len(each.texts) for each in questions])
        return [_answer(judge, *each) for each in zip(questions, np.split(scores_N, ends[:-1]), strict=True)]

    async def read(questions: Sequence[Question]) -> list[str]:
        """`answers` in a thread. If the client goes away meanwhile, ends when the thread does."""
        work = asyncio.ensure_future(run_in_threadpool(answers, questions))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.gather(work, return_exceptions=True)
            raise

    async def answered(question: Question) -> str:
        """The answer to ``question``. One network scores for all requests: the request that gets the lock scores a batch of itself and of
        the questions that have arrived meanwhile."""
        own = asyncio.get_running_loop().create_future()
        waiting[own] = question
        try:
            async with scoring:
                if not own.done():
                    batch = [own, *(each for each in waiting if each is not own)][: judge.at_once]
                    try:
                        texts = await read([waiting[each] for each in batch])
                    except UserError:  # possibly of another question in the batch
                        if len(batch) == 1:
                            raise
                        batch, texts = [own], await read([question])
                    for each, text in zip(batch, texts, strict=True):
                        if not each.done():
                            each.set_result(text)
            return own.result()
        finally:
            del waiting[own]

    async def chat(request: Request) -> Response:
        body = await read_json(request)
        try:
            model, prompt = str(body["model"]), str(body["messages"][0]["content"])
        except (KeyError, IndexError, TypeError):
            problem = "model and messages are missing; this server answers the questions of a judge only"
            raise ApiError(400, problem) from None
        if model != name:
            raise ApiError(404, f"no model {model!r} here: the judge is {name!r}; name it")
        if (question := read_question(prompt)) is None:
            problem = "not a question of stretto.tasks.judge: this server rates and compares texts, and does not chat"
            raise ApiError(400, problem)
        try:  # a client that disconnects sends its question again, so the first one is cancelled
            text = await while_connected(request.receive, answered(question))
        except UserError as error:
            raise ApiError(422, str(error)) from error
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return JSONResponse({"object": "chat.completion", "model": name, "choices": [choice]})

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"}]})

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    middleware = [Middleware(entrance, hosts=settings.hosts(), pages=(), paths=(), metrics=None)]
    handlers = dict.fromkeys((ApiError, GoneError), failed)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


def _answer(judge: LocalJudge, question: Question, scores_N: np.ndarray) -> str:
    if len(scores_N) == 1:
        return question.rating(float(judge.shares_of(scores_N)[0]))
    return question.verdict(judge.first_of(*scores_N.tolist()))


def judge_server(judge: LocalJudge, settings: ServeSettings = _LOCAL) -> uvicorn.Server:
    """The server process; ``run(sockets=[…])`` returns after SIGTERM."""
    app = judge_app(judge, settings)
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
