"""What tests of the engine share."""

from __future__ import annotations

import pytest

from stretto.ops.native import Library, load


@pytest.fixture(scope="session")
def library() -> Library:
    """The compiled kernels, as the engine finds them."""
    found = load()
    if found.handle is None:
        pytest.skip(found.reason)
    return found
