"""The one place that chooses a runtime."""

from __future__ import annotations

from stretto.base.errors import UserError
from stretto.runtime.local import LocalRuntime
from stretto.runtime.runtime import Resources, Runtime


async def open_runtime(kind: str, address: str = "auto", capacity: Resources | None = None) -> Runtime:
    """A runtime of the running loop, to be closed by whoever asked for it.

    Args:
        kind: ``local`` or ``ray``.
        address: of the Ray cluster: ``host:port``, ``auto``, or ``local`` for one of this run's own.
        capacity: see `LocalRuntime`.

    Raises:
        UserError: Ray is not installed, or no cluster answers.
    """
    if kind == "local":
        return LocalRuntime(capacity)
    assert kind == "ray", f"no runtime of kind {kind!r}"
    try:
        from stretto.runtime.ray import RayRuntime
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError(
            "--runtime ray: Ray is not installed; pip install 'stretto[ray]', or use --runtime local"
        ) from None
    return await RayRuntime.open(address)
