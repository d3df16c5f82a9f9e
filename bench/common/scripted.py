"""Models that are a rule: a server that answers chats without reading them, for what a harness gives to who knows nothing.

python -m bench.common.scripted nothing
python -m bench.common.scripted empty-call
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from stretto.serve.server import open_socket

STOP = "###STOP###"
"""What tau2's customer says when he is done: said at once, the agent is never asked."""


def nothing(tools: list[Any], messages: list[Any]) -> str | None:
    """Ends every conversation."""
    return None


def empty_call(tools: list[Any], messages: list[Any]) -> str | None:
    """Calls the first function there is, with no arguments."""
    return tools[0]["function"]["name"] if tools and messages[-1]["role"] != "tool" else None


def forever(tools: list[Any], messages: list[Any]) -> str | None:
    """Says the same for ever: a simulator that never stops."""
    return None


RULES: dict[str, Callable[[list[Any], list[Any]], str | None]] = {
    "nothing": nothing,
    "empty-call": empty_call,
    "forever": forever,
}


def app(rule: str) -> Starlette:
    async def chat(http: Request) -> JSONResponse:
        body = await http.json()
        name = RULES[rule](body.get("tools") or [], body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": "And then?" if rule == "forever" else STOP}
        if name is not None:
            call = {"id": "call-0", "type": "function", "function": {"name": name, "arguments": json.dumps({})}}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        reason = "stop" if name is None else "tool_calls"
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
    sys.exit(0)


if __name__ == "__main__":
    main()
