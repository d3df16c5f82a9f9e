"""What goes wrong at the HTTP border, in the form that OpenAI's clients read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from stretto.base.errors import UserError, nearest

_REQUEST = re.compile(r"^request \S+: ")
"""How the engine's messages begin; its number means nothing to a client."""
_FIELD = re.compile(r"(?!(?:str|int|list|dict|bool|float)$)[a-z_]\w*|\d+")
"""A step of a path that a client knows; pydantic adds the members of unions (``Axes``, ``str``, ``list[int]``)."""
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 2xx: raised anywhere in a handler, rendered in one place."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """``{"error": {message, type, param, code}}``."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad(param: str | None, problem: str, code: str | None = None) -> ApiError:
    """A 400 that names the field of the body."""
    return ApiError(400, problem if param is None else f"{param}: {problem}", param=param, code=code)


def overloaded(message: str, retry_after_s: float) -> ApiError:
    """A 429 that says when to come back."""
    return ApiError(429, message, code="overloaded", headers={"Retry-After": str(max(1, round(retry_after_s)))})


def from_user_error(error: UserError) -> ApiError:
    """The one line of a `UserError`; the part before its first colon is the field where it is a plain name."""
    line = _REQUEST.sub("", str(error))
    field = line.partition(":")[0].strip()
    return ApiError(400, line, param=field if field.isidentifier() else None)


def from_validation(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """The first problem pydantic found; an unknown field is told the nearest known one."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = [str(part) for part in problem["loc"] if isinstance(part, int) or _FIELD.fullmatch(part)]
    field = ".".join(path) or None
    if problem["type"] == "extra_forbidden":
        return bad(field, f"unknown field{nearest(path[-1], _fields_at(kind, path[:-1]))}", "unknown_parameter")
    return bad(field, problem["msg"].removeprefix("Value error, "))


def _fields_at(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Fields of the model that lies at ``path`` inside ``kind``, whichever member of a union it is."""
    models = [kind]
    for part in path:
        if not part.isdecimal():
            inner = [model.model_fields[part].annotation for model in models if part in model.model_fields]
            models = [model for annotation in inner for model in _models_in(annotation)]
    return [name for model in models for name in model.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
