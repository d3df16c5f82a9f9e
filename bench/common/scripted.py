"""Models that are a rule: a server that answers chats without understanding them, for what a harness gives to who knows nothing.

python -m bench.common.scripted nothing | transfer | empty-call | regex | forever | judge
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from bench.bfcl import filled
from stretto.server.server import open_socket

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


def regex(tools: Tools, messages: Messages) -> Said:
    """Calls it with what regular expressions find in the question."""
    return filled({"tools": tools, "messages": messages}) if tools and messages[-1]["role"] != "tool" else STOP


def forever(tools: Tools, messages: Messages) -> Said:
    """Says the same for ever: a simulator that never stops."""
    return "And then?"


def judge(tools: Tools, messages: Messages) -> Said:
    """Of PersistBench, in the form of its judge: how many words of the memories stand in the response that the query lacks.
    A rule instead of a judgement: it shows that a suite completes, and its scores say nothing of a model."""
    parts = {
        name: set(
            re.findall(
                r"[a-z]{5,}", (re.findall(rf"<{name}>(.*?)</{name}>", _text(messages[-1]), re.S) or [""])[-1].lower()
            )
        )
        for name in ("memories", "query", "response")
    }
    num = len(parts["response"] & parts["memories"] - parts["query"])
    return json.dumps({"reasoning": f"{num} words", "score": min(5, 1 + num), "rating": min(3, 1 + num)})


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


RULES: dict[str, Callable[[Tools, Messages], Said]] = {
    "nothing": nothing,
    "transfer": transfer,
    "empty-call": empty_call,
    "regex": regex,
    "forever": forever,
    "judge": judge,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rule", choices=list(RULES))
    rule = parser.parse_args().rule
    with closing(open_socket("127.0.0.1", 0)) as listening:
        print(f"serving at http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app(rule), log_level="warning", access_log=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
