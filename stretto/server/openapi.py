"""The document /openapi.json, generated from the models that validate the request bodies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from stretto.engine.request import Sampling
from stretto.server.completions import ChatBody, CompletionBody, ShortChatBody
from stretto.server.elastic import Size
from stretto.server.generate import Generation
from stretto.server.info import DetokenizeBody, LoadWeightsBody, TokenizeBody
from stretto.server.limits import IGNORED
from stretto.server.responses import ResponsesBody

_SCHEMAS = "#/components/schemas/"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ERROR = {
    "type": "object",
    "description": "Every answer other than 2xx.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "Field at fault."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path as clients see it."""

    path: str
    about: str
    body: type[BaseModel] | None = None
    """What is posted; None: it is a GET."""
    query: type[BaseModel] | None = None
    streams: bool = False
    """Answers server-sent events where the body says ``stream``."""
    media: str = "application/json"
    is_admin: bool = False


ENDPOINTS = (
    Endpoint("/v1/chat/completions", "A chat completion, as OpenAI's.", ChatBody, streams=True),
    Endpoint("/v1/completions", "Completions of texts or token ids, as OpenAI's.", CompletionBody, streams=True),
    Endpoint("/v1/responses", "A response, as OpenAI's; nothing is stored.", ResponsesBody, streams=True),
    Endpoint("/api/ernie-5.1/chat", "The short form of a chat: messages to a text.", ShortChatBody),
    Endpoint("/v1/models", "The model, and every preset of it under a name of its own."),
    Endpoint("/v1/models/{name}", "One model or preset."),
    Endpoint("/api/info", "The network, its presets and limits."),
    Endpoint("/api/cost", "Parameters, FLOPs and bytes of any size.", query=Size),
    Endpoint("/health", "200 while requests are taken, else 503. Needs no key."),
    Endpoint("/metrics", "Metrics for Prometheus.", media="text/plain"),
    Endpoint("/tokenize", "A text, or messages under the chat template, to token ids.", TokenizeBody),
    Endpoint("/detokenize", "Token ids to a text.", DetokenizeBody),
    Endpoint("/tokenizer_info", "The tokenizer's configuration and chat template."),
    Endpoint("/openapi.json", "This document."),
    Endpoint(
        "/admin/load_weights",
        "Replace the weights by other weights of the same network.",
        LoadWeightsBody,
        is_admin=True,
    ),
)
"""Every path but the page's."""


def document(with_admin: bool) -> dict[str, Any]:
    """The document (OpenAPI 3.1) of a server with or without the admin's paths."""
    offered = [each for each in ENDPOINTS if with_admin or not each.is_admin]
    bodies = [each.body for each in offered if each.body is not None]
    _, defined = models_json_schema([(body, "validation") for body in bodies], ref_template=_SCHEMAS + "{model}")
    schemas = defined["$defs"] | {"Error": _ERROR}
    shared = set(Generation.model_fields) & set(Sampling.model_fields) - {
        "seed"
    }  # of which any 64-bit integer is taken
    limits = {name: told for name, told in Sampling.model_json_schema()["properties"].items() if name in shared}
    for body in bodies:
        for name, told in schemas[body.__name__]["properties"].items():
            _state_limits(told, limits.get(name, {}))
    for each in offered:
        if each.streams and each.body is not None:
            properties = schemas[each.body.__name__]["properties"]
            unused = {"description": "Accepted without effect."}
            properties.update({name: unused for name in IGNORED if name not in properties})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stretto", "version": version("stretto")},
        "paths": {each.path: {"get" if each.body is None else "post": _operation(each)} for each in offered},
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _state_limits(told: dict[str, Any], limits: dict[str, Any]) -> None:
    """Add to a field the bounds by which `Sampling`, which validates its value later, refuses a number."""
    for form in [told, *told.get("anyOf", ())]:
        if form.get("type") in ("number", "integer"):
            form.update({name: limits[name] for name in _BOUNDS if name in limits})


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    answer: dict[str, Any] = {endpoint.media: {}} | ({"text/event-stream": {}} if endpoint.streams else {})
    failed = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Error"}}}
    told: dict[str, Any] = {
        "summary": endpoint.about,
        "operationId": "_".join(re.findall(r"\w+", endpoint.path)),
        "responses": {
            "200": {"description": "The answer.", "content": answer},
            "default": {"description": "Error.", "content": failed},
        },
    }
    if parameters := list(_parameters(endpoint)):
        told["parameters"] = parameters
    if endpoint.body is not None:
        schema = {"schema": {"$ref": _SCHEMAS + endpoint.body.__name__}}
        told["requestBody"] = {"required": True, "content": {"application/json": schema}}
    return told


def _parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"\{(\w+)\}", endpoint.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    if endpoint.query is not None:
        for name, schema in endpoint.query.model_json_schema()["properties"].items():
            yield {"name": name, "in": "query", "required": False, "schema": schema}
