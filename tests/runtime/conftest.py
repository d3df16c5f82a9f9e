"""A Ray cluster for the tests that run on one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.runtime.stages import RAY


@pytest.fixture(scope="module", autouse=True)
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """One Ray for all tests of a file that want it: it takes seconds to start."""
    if not any(item.path == request.path and _wants_ray(item) for item in request.session.items):
        yield
        return
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, object_store_memory=160 << 20, include_dashboard=False, logging_level="error")
    yield
    ray.shutdown()


def _wants_ray(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)  # of a parametrised test
    return callspec is not None and callspec.params.get("stage") == RAY
