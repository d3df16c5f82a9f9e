"""The node shipped for ComfyUI, loaded from its one file as ComfyUI does, against our own server."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from stretto.engine.async_engine import AsyncEngine
from stretto.pictures.comfy_kinds import read_kinds
from stretto.server.elastic import ServedModel
from stretto.server.server import ServeSettings
from tests.server.live import live

FILE = Path(__file__).resolve().parents[2] / "examples/comfyui_stretto.py"


def node() -> Any:
    spec = importlib.util.spec_from_file_location("comfyui_stretto", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NODE_CLASS_MAPPINGS["StrettoEnhance"]


def values(**more: Any) -> dict[str, Any]:
    """What the editor would fill in."""
    fields = node().INPUT_TYPES()["required"]
    return (
        {name: spec[1]["default"] for name, spec in fields.items()}
        | {"prompt": "a red cube", "temperature": 2.0, "seed": 3}
        | more
    )


def test_our_server_answers_it(service: AsyncEngine, served: ServedModel) -> None:
    with live(service, served, ServeSettings()) as (url, _):
        answer = node()().enhance(**values(server=url + "/"))
        assert len(answer) == 1 and isinstance(answer[0], str) and answer[0]
        assert answer == node()().enhance(**values(server=url))
        with pytest.raises(RuntimeError, match=r"chat/completions answers 4\d\d: .*nobody"):
            node()().enhance(**values(server=url, subnet="nobody"))


def test_it_never_passes_on_what_nobody_answered() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        node()().enhance(**values(prompt=" "))
    with pytest.raises(RuntimeError, match=r"127.0.0.1:9/v1/chat/completions: .*refused"):
        node()().enhance(**values(server="http://127.0.0.1:9"))


def test_it_is_declared_as_comfyui_documents() -> None:
    kind = node()
    info = {"StrettoEnhance": {"input": kind.INPUT_TYPES(), "output": list(kind.RETURN_TYPES)}}
    read = read_kinds(info, "comfy")["StrettoEnhance"]
    assert read.outputs == ("STRING",) and read.fields["seed"].has_control and not read.fields["subnet"].is_required
    assert callable(getattr(kind, kind.FUNCTION))
