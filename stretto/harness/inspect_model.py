"""inspect_ai's model provider ``stretto/``: a checkpoint that is loaded in inspect's process, or the address of a server, at any size.

    inspect eval TASK --model stretto/runs/s:corner
    inspect eval TASK --model stretto/http://127.0.0.1:8000:corner --extra-body '{"elastic": {"top_k": 1}}'

inspect's own client for OpenAI-compatible servers sends the requests, for a loaded checkpoint without a socket. Failed requests need care.
inspect turns a model's exception into an error of the sample, but an agent may catch it: tau2's loop prints every exception, continues, and
has the unchanged data base scored. This provider therefore also ends the sample from outside, where no task can catch it. By inspect's
default that ends the evaluation, too.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import Any, Literal

import httpx
import httpx2
from anyio.lowlevel import checkpoint
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.log import transcript
from inspect_ai.log._samples import sample_active
from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput
from inspect_ai.model._model import RetryDecision
from inspect_ai.model._model_call import ModelCall
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.tool import ToolChoice, ToolInfo
from openai import APIStatusError, DefaultAsyncHttpxClient
from starlette.applications import Starlette

from stretto.base.config import Config, validate
from stretto.base.errors import UserError, nearest
from stretto.base.paths import checkpoint_folder, sized
from stretto.engine.async_engine import AsyncEngine
from stretto.engine.loading import DTYPES, open_engine
from stretto.engine.request import EngineConfig
from stretto.model.checkpoint import read_presets
from stretto.server.elastic import ServedModel
from stretto.server.server import ServeSettings, create_app

MAX_TOKENS = 1024
"""Largest number of tokens of an answer for which no limit is given, for example of a task's simulated user."""
CALL_S = 600.0
"""Time limit of one request, queueing included, seconds."""
_URL = re.compile(r"(https?://[^/:]+(?::\d+)?)/?(?::(.+))?")
_RETRY_STATUSES = (429, 503)


class _Arguments(Config):
    """Arguments of a loaded checkpoint (``-M``)."""

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_len: int | None = None
    max_batch: int = 32


class StrettoAPI(OpenAICompatibleAPI):
    """``model_name``: PATH or PATH:PRESET; a server's address may stand in place of the path. A path takes the arguments (``-M``) in
    `_Arguments`. The field ``elastic`` of ``--extra-body`` is that of the server's API."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - inspect's own signature
        **arguments: Any,
    ) -> None:
        self._app: Starlette | None = None
        api_key = api_key or os.environ.get("STRETTO_API_KEY")
        if match := _URL.fullmatch(model_name):
            url, preset = match[1], match[2]
            try:
                key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
                listed = httpx.get(f"{url}/v1/models", headers=key, timeout=60.0, trust_env=False)
                names = [each["id"] for each in listed.raise_for_status().json()["data"]]
            except (httpx.HTTPError, LookupError, ValueError) as error:
                raise PrerequisiteError(f"{url}: no server of models answers there: {error}") from None
        else:
            url = "http://127.0.0.1"
            path, preset = sized(model_name)
            try:
                checked = validate(_Arguments, arguments, "-M").model_dump(exclude_unset=True)
                self._app, names = _opened(str(path), **checked)
            except UserError as error:
                raise PrerequisiteError(str(error)) from None
            arguments = {}
        self._served = f"{names[0]}:{preset}" if preset else names[0]
        if preset and self._served not in names:
            presets = [name.removeprefix(f"{names[0]}:") for name in names[1:]]
            near = nearest(preset, presets)
            raise PrerequisiteError(f"{model_name}: no preset {preset!r}{near}; known: {', '.join(presets)}")
        super().__init__(
            model_name=model_name,
            base_url=f"{url}/v1",
            api_key=api_key or "none",
            config=config,
            service="stretto",
            strict_tools=False,
            client_timeout=CALL_S,
            max_retries=0,  # `should_retry` decides
            **arguments,
        )

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> tuple[ModelOutput | Exception, ModelCall]:
        """The model's answer. Raises the error of a failed request, after ending the sample."""
        try:
            output, call = await super().generate(input, tools, tool_choice, config)  # type: ignore[misc]
        except Exception as error:
            if not self.should_retry(error):
                await _end_sample(error)
            raise
        is_first = not any(message.role == "assistant" for message in input)
        if is_first and isinstance(output, ModelOutput) and output.stop_reason == "model_length":
            output = RuntimeError(f"{self.model_name}: {output.completion}")
        if isinstance(output, Exception):
            await _end_sample(output)
            raise output
        usage = (call.response or {}).get("usage") or {}
        output.metadata = {**(output.metadata or {}), "elastic": usage.get("elastic")}
        return output, call

    def should_retry(self, ex: BaseException) -> RetryDecision:
        """Retry only where the server asks for it: it is full or shutting down."""
        is_full = isinstance(ex, APIStatusError) and ex.status_code in _RETRY_STATUSES
        return RetryDecision.rate_limit() if is_full else RetryDecision.no()

    def service_model_name(self) -> str:
        return self._served

    def max_tokens(self) -> int:
        return MAX_TOKENS

    @property
    def schema_exclude_fields(self) -> set[str] | None:
        return None

    def _create_http_client(self) -> DefaultAsyncHttpxClient:
        if self._app is None:
            return super()._create_http_client()
        transport = httpx2.ASGITransport(self._app, raise_app_exceptions=False)
        return DefaultAsyncHttpxClient(transport=transport, timeout=CALL_S)


async def _end_sample(error: Exception) -> None:
    """End the running sample as an error without a score, as inspect's display does when a person cancels it. ``error`` goes into the log.
    `checkpoint` lets the cancellation take effect at once, because an agent that catches ``error`` may never wait again."""
    if (sample := sample_active()) is not None:
        transcript().info(str(error), source="stretto")
        sample.interrupt("error")
        await checkpoint()


@lru_cache
def _opened(
    path: str, device: str = "cpu", dtype: str | None = None, max_len: int | None = None, max_batch: int = 32
) -> tuple[Starlette, list[str]]:
    """The server application of a checkpoint, and its model names. inspect creates a provider for each role and configuration of a
    model; all of them share one engine, which lives as long as the process. Raises `UserError`."""
    folder = checkpoint_folder(path)
    config = EngineConfig(max_len=max_len, max_batch=max_batch)
    opened = open_engine(folder, config, device=device, dtype=None if dtype is None else DTYPES[dtype])
    tokenizer = opened.engine.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise UserError(f"{folder}: chat_template: the tokenizer has none; put a chat_template.jinja there")
    served = ServedModel.of(opened, read_presets(folder))
    return create_app(AsyncEngine(opened.engine).start(), served, ServeSettings()), served.names()
