"""A tiny random network with a real tokenizer behind a real engine, and clients that speak to its app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stretto.engine.async_engine import AsyncEngine
from stretto.engine.engine import Engine
from stretto.engine.request import EngineConfig
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build
from stretto.server.elastic import ServedModel
from stretto.server.server import ServeSettings, create_app
from stretto.text.chat import CHATML
from stretto.text.tokenizer import Tokenizer, train_tokenizer
from tests.server.presets import PRESETS

SETTINGS = ServeSettings(allowed_hosts=("test",))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    text = Path(__file__).read_text() + "The cat sat on the mat. Ça va? 東京 🙂 {} [] true false null"
    return train_tokenizer(iter([text]), 400, chat_template=CHATML)


@pytest.fixture(scope="session")
def config(tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=16,
        num_experts=8, top_k=2, expert_intermediate_size=16, max_positions=512, widths=(8, 4, 2),
        tie_embeddings=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def served(config: ModelConfig, tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(name="x", config=config, presets=PRESETS, tokenizer=tokenizer, max_len=512)


@pytest.fixture(scope="session")
def engine_of(config: ModelConfig, tokenizer: Tokenizer) -> Callable[..., Engine]:
    def make(**sizes: Any) -> Engine:
        sizes = {"num_pages": 256, "page_size": 8, "max_batch": 8, "max_step_tokens": 128, **sizes}
        return Engine(build(config, seed=3), tokenizer, EngineConfig(**sizes), weight_version=7)

    return make


@pytest.fixture(scope="session")
def service(engine_of: Callable[..., Engine]) -> Iterator[AsyncEngine]:
    service = AsyncEngine(engine_of()).start()
    yield service
    service.close()


Connect = Callable[..., Any]


@pytest.fixture(scope="session")
def connect(service: AsyncEngine, served: ServedModel) -> Connect:
    """An HTTP client of an app with the given settings, in the same process."""

    @asynccontextmanager
    async def connect(
        service: AsyncEngine = service, served: ServedModel = served, **changes: Any
    ) -> AsyncIterator[Any]:
        app = create_app(service, served, SETTINGS.replace(**changes))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            client.app = app  # type: ignore[attr-defined]
            yield client

    return connect


@pytest.fixture(scope="session")
def ask(connect: Connect) -> Callable[..., httpx.Response]:
    """Send one request to a fresh app."""

    def ask(method: str, path: str, *, served: ServedModel | None = None, **rest: Any) -> httpx.Response:
        settings = rest.pop("settings", {})

        async def send() -> httpx.Response:
            extra = {} if served is None else {"served": served}
            async with connect(**extra, **settings) as client:
                response: httpx.Response = await client.request(method, path, **rest)
                return response

        return asyncio.run(send())

    return ask
