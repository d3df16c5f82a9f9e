"""``stretto`` with a fault put in on purpose, each met by a rare field of a request: what `tests.server.fuzz_server` must find.

python -m tests.server.mutant_server FAULT serve …
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stretto.cli.main import main
from stretto.engine.engine import Engine
from stretto.engine.request import Event, Request
from stretto.server.generate import Backend, Job

_add, _step, _job = Engine.add, Engine.step, Backend.job


def _dies(engine: Engine) -> list[Event]:
    """The engine's thread ends."""
    if any(sequence.sampling.min_p == 0.05 for sequence in engine._scheduler.waiting):
        raise RuntimeError("a fault put in on purpose")
    return _step(engine)


def _forgets(engine: Engine, request: Request, **options: Any) -> None:
    """One request is taken and never computed."""
    if request.sampling.min_p != 0.05:
        _add(engine, request, **options)


def _misreads(engine: Engine, request: Request, **options: Any) -> None:
    """Once a rare request has come, greedy ones lose their first token."""
    if request.sampling.min_p == 0.05:
        engine.misreads = True  # type: ignore[attr-defined]
    if getattr(engine, "misreads", False) and request.sampling.temperature == 0:
        request = replace(request, prompt=request.prompt[1:] or request.prompt)
    _add(engine, request, **options)


def _stumbles(backend: Backend, prefix: str, body: Any, *given: Any, **fields: Any) -> Job:
    """The handler of one request raises what nobody expects."""
    if body.min_p == 0.05:
        raise KeyError("a fault put in on purpose")
    return _job(backend, prefix, body, *given, **fields)


FAULTS: Mapping[str, tuple[type, str, Callable[..., Any]]] = {
    "dies": (Engine, "step", _dies),
    "forgets": (Engine, "add", _forgets),
    "misreads": (Engine, "add", _misreads),
    "stumbles": (Backend, "job", _stumbles),
}


if __name__ == "__main__":
    owner, name, fault = FAULTS[sys.argv.pop(1)]
    setattr(owner, name, fault)
    main()
