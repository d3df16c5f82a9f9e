"""A server whose model is a rule: it answers chats without reading them, as a trivial baseline of a harness does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

STOP = "###STOP###"
"""What tau2's customer says when he is done: said at once, the agent is never asked."""
TRANSFER = "transfer_to_human_agents"
Tools, Messages = Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]
Said = str | tuple[str, dict[str, Any]]
"""A text, or a call."""


def nothing(tools: Tools, messages: Messages) -> Said:
    """Ends every conversation."""
    return STOP


def transfer(tools: Tools, messages: Messages) -> Said:
    """Of tau2: an agent who hands everybody on, and a customer who is content with that."""
    if any(tool["function"]["name"] == TRANSFER for tool in tools):
        return "You are handed on." if messages[-1]["role"] == "tool" else (TRANSFER, {"summary": "A customer."})
    return STOP if any(message["role"] == "assistant" for message in messages) else "Help me."


def empty_call(tools: Tools, messages: Messages) -> Said:
    """Calls the first function there is, with no arguments."""
    return (tools[0]["function"]["name"], {}) if tools and messages[-1]["role"] != "tool" else STOP


def forever(tools: Tools, messages: Messages) -> Said:
    """Says the same for ever: a simulator that never stops."""
    return "And then?"


RULES: dict[str, Callable[[Tools, Messages], Said]] = {
    "nothing": nothing,
    "transfer": transfer,
    "empty-call": empty_call,
    "forever": forever,
}


def app(rule: str) -> Starlette:
    async def chat(http: Request) -> JSONResponse:
        body = await http.json()
        said = RULES[rule](body.get("tools") or [], body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if isinstance(said, tuple):
            function = {"name": said[0], "arguments": json.dumps(said[1])}
            message |= {"content": None, "tool_calls": [{"id": "call-0", "type": "function", "function": function}]}
        reason = "stop" if isinstance(said, str) else "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "scripted", "object": "chat.completion", "created": 0, "model": rule}
        return JSONResponse(head | {"choices": [choice], "usage": usage})

    async def models(http: Request) -> JSONResponse:
        return JSONResponse(
            {"object": "list", "data": [{"id": rule, "object": "model", "created": 0, "owned_by": "a rule"}]}
        )

    async def health(http: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )
