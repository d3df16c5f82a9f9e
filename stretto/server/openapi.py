"""The document /openapi.json, generated from the models that validate the request bodies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from stretto.engine.request import Sampling
from stretto.server.completions import ChatBody, CompletionBody, ShortChatBody
from stretto.server.elastic import Size
from stretto.server.generate import Generation
from stretto.server.info import DetokenizeBody, LoadWeightsBody, TokenizeBody
from stretto.server.limits import IGNORED
from stretto.server.messages import CONTEXT_LENGTH, SUBNET, UNPROCESSABLE, Body
from stretto.server.responses import ResponsesBody

_SCHEMAS = "#/components/schemas/"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "maxItems", "maxProperties")
_SAME = {"logprobs": "top_logprobs", "stop_token_ids": "stop_ids"}
"""Fields of bodies that `Sampling` has under another name."""
BEYOND_SCHEMA = (UNPROCESSABLE, CONTEXT_LENGTH, SUBNET)
"""Codes of refusals for conditions that no schema can state."""


class Problem(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="Field at fault.")
    code: str | None = Field(description=f"{', '.join(BEYOND_SCHEMA)}: the body follows this document all the same.")


class Error(BaseModel):
    """Every answer other than 2xx."""

    error: Problem


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Description of one path."""

    path: str
    about: str
    body: type[Body] | None = None
    """Model of the body of a POST; None: the method is GET."""
    query: type[Body] | None = None
    streams: bool = False
    """Whether the field ``stream`` asks for server-sent events."""
    media: str = "application/json"
    is_admin: bool = False


ENDPOINTS = (
    Endpoint("/v1/chat/completions", "A chat completion, as OpenAI's.", ChatBody, streams=True),
    Endpoint("/v1/completions", "Completions of texts or token ids, as OpenAI's.", CompletionBody, streams=True),
    Endpoint("/v1/responses", "A response, as OpenAI's; nothing is stored.", ResponsesBody, streams=True),
    Endpoint("/api/ernie-5.1/chat", "The short form of a chat: messages to a text.", ShortChatBody),
    Endpoint("/v1/models", "The model and its presets."),
    Endpoint("/v1/models/{name}", "One model or preset."),
    Endpoint("/api/info", "The network, its presets and limits."),
    Endpoint("/api/cost", "Parameters, FLOPs and bytes of any size.", query=Size),
    Endpoint("/health", "Status 200 while the server accepts requests, else 503. Needs no key."),
    Endpoint("/metrics", "Metrics for Prometheus.", media="text/plain"),
    Endpoint("/tokenize", "A text, or messages under the chat template, to token ids.", TokenizeBody),
    Endpoint("/detokenize", "Token ids to a text.", DetokenizeBody),
    Endpoint("/tokenizer_info", "The tokenizer's configuration and chat template."),
    Endpoint("/openapi.json", "This document."),
    Endpoint("/admin/load_weights", "Replace the weights of the network.", LoadWeightsBody, is_admin=True),
)
"""Every path except the playground's."""


def document(with_admin: bool) -> dict[str, Any]:
    """The document (OpenAPI 3.1) of a server with or without the administrator's paths."""
    offered = [endpoint for endpoint in ENDPOINTS if with_admin or not endpoint.is_admin]
    bodies = [endpoint.body for endpoint in offered if endpoint.body is not None]
    models: list[type[BaseModel]] = [*bodies, Error]
    _, defined = models_json_schema([(model, "validation") for model in models], ref_template=_SCHEMAS + "{model}")
    schemas = defined["$defs"]
    for schema in schemas.values():  # all fields of `Error` are required
        _allow_null(schema)
    for body in bodies:
        _complete(schemas[body.__name__], issubclass(body, Generation | ShortChatBody))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stretto", "version": version("stretto")},
        "paths": {each.path: {"get" if each.body is None else "post": _operation(each)} for each in offered},
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _allow_null(schema: dict[str, Any]) -> None:
    """Add to the schema of a `JsonObject` that null means "left out"."""
    for name, field in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", [field]):
            about = {key: field[key] for key in ("title", "description", "default") if key in field}
            rest = {key: value for key, value in field.items() if key not in about}
            schema["properties"][name] = about | ({"anyOf": [rest, {"type": "null"}]} if rest else {})


def _complete(schema: dict[str, Any], generates: bool) -> None:
    """Add to the schema of a body the rule of `parse_body` (some fields are ignored) and, for a body that ``generates``, the bounds of
    `Sampling`, which validates these fields later."""
    limits = Sampling.model_json_schema()["properties"] if generates else {}
    limits.pop("seed", None)  # the server takes any integer
    for name, field in schema["properties"].items():
        limit = limits.get(_SAME.get(name, name), {})
        for form in field.get("anyOf", [field]):
            if form.get("type") in ("number", "integer", "array", "object") and not form.keys() & set(_BOUNDS):
                form.update({bound: limit[bound] for bound in _BOUNDS if bound in limit})
                if values := limit.get("additionalProperties"):  # logit_bias: bounds of a mapping's values
                    form["patternProperties"] = dict.fromkeys(form["patternProperties"], values)
    unused = {"description": "Accepted without effect."}
    schema["properties"] |= {name: unused for name in IGNORED if name not in schema["properties"]}


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    answer: dict[str, Any] = {endpoint.media: {}} | ({"text/event-stream": {}} if endpoint.streams else {})
    failed = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Error"}}}
    operation: dict[str, Any] = {
        "summary": endpoint.about,
        "operationId": "_".join(re.findall(r"\w+", endpoint.path)),
        "responses": {
            "200": {"description": "The answer.", "content": answer},
            "default": {"description": "Error.", "content": failed},
        },
    }
    if parameters := list(_parameters(endpoint)):
        operation["parameters"] = parameters
    if endpoint.body is not None:
        schema = {"schema": {"$ref": _SCHEMAS + endpoint.body.__name__}}
        operation["requestBody"] = {"required": True, "content": {"application/json": schema}}
    return operation


def _parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"\{(\w+)\}", endpoint.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    if endpoint.query is not None:
        for name, schema in endpoint.query.model_json_schema()["properties"].items():
            yield {"name": name, "in": "query", "required": False, "schema": schema}
