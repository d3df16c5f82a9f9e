"""Count forward passes that no training step counts: rankings, searches, gates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stretto.base.receipt import Meter
from stretto.model.count import count
from stretto.model.spec import executed
from stretto.model.transformer import Transformer


@contextmanager
def metered(model: Transformer, meter: Meter, world: int = 1) -> Iterator[None]:
    """Add to ``meter`` the FLOPs and positions of every forward pass of ``model`` in this block, on ``world`` ranks.

    The head is counted once a pass, whether or not it is applied.
    """

    def add(module: Transformer, arguments: tuple[Any, ...], output: Any) -> None:
        ids_BT, subnet = arguments[0], arguments[1]
        rows, length = ids_BT.shape
        counts = count(module.config, executed(module.config, subnet))
        meter.add(flops=world * counts.forward_flops(rows * length, length), tokens=world * rows * length)

    hook = model.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
