from __future__ import annotations

from collections.abc import Iterator

import pytest

from stretto.sandbox.isolate import Sandbox


@pytest.fixture(scope="package")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as made:
        yield made
