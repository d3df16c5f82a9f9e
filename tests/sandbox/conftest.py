"""A sandbox for every level of isolation; levels that the machine does not support are skipped, with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.base.errors import UserError
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.outcome import Level, Limits
from tests.sandbox.hostile import many_descriptors

SYSTEM_PYTHON = Path("/usr/bin/python3")
LIMITS = Limits(
    wall_s=20.0,  # long, for a shared machine; tests of timeouts set their own
    cpu_s=5.0,
    memory_bytes=256 << 20,
    output_bytes=1 << 16,
    processes=16,
    file_bytes=4 << 20,
)


@pytest.fixture(scope="session", params=list(Level), ids=lambda level: level.name.lower())
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    # Without namespaces, root's programs run as another user, who may not read root's Python.
    is_other_user = request.param == Level.LIMITS and os.geteuid() == 0
    python = SYSTEM_PYTHON if is_other_user and SYSTEM_PYTHON.exists() else None
    try:
        # A driver with many open files: the keeper's socket has a high number.
        with many_descriptors(300), Sandbox(LIMITS, level=request.param, python=python) as opened:
            yield opened
    except UserError as error:
        pytest.skip(str(error))
