"""The generating endpoints, each as a function from a parsed body to a `Reading`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.engine.request import Completion
from stretto.serve.answers import ChatWriter, raise_for
from stretto.serve.bodies import ChatBody, CompletionBody, ShortChatBody, parse_body
from stretto.serve.elastic import Rung
from stretto.serve.generate import Reader, Reading
from stretto.serve.openai import Desk
from stretto.serve.responses import parse_responses, respond
from stretto.serve.responses_writer import ResponsesWriter
from stretto.serve.texts import TextWriter


def readers(desk: Desk) -> dict[str, Reader]:
    """Path -> reader, for POST."""

    def chat(tree: Any, rung: Rung) -> Reading:
        job = desk.chat(parse_body(ChatBody, tree), rung)
        writer = ChatWriter(job, desk.spelling)
        return Reading(job, writer.whole, writer)

    def completion(tree: Any, rung: Rung) -> Reading:
        job = desk.completion(parse_body(CompletionBody, tree), rung)
        writer = TextWriter(job, desk.spelling)
        return Reading(job, writer.whole, writer)

    def response(tree: Any, rung: Rung) -> Reading:
        body = parse_responses(tree)
        job = respond(desk, body, rung)
        writer = ResponsesWriter(job, desk.spelling, body)
        return Reading(job, writer.whole, writer)

    def short(tree: Any, rung: Rung) -> Reading:
        body = parse_body(ShortChatBody, tree)
        fields = {name: getattr(body, name) for name in body.model_fields_set}
        return Reading(desk.chat(ChatBody.model_construct(**fields), rung), _text_only, None)

    return {
        "/v1/chat/completions": chat,
        "/v1/completions": completion,
        "/v1/responses": response,
        "/api/ernie-5.1/chat": short,
    }


def _text_only(done: Sequence[Completion]) -> dict[str, Any]:
    [completion] = done
    raise_for(completion)
    return {"text": completion.text}
