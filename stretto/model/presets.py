"""How people name a Subnet: a preset's name, or its axes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.base.errors import UserError, nearest
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice


def named_subnets(config: ModelConfig, presets: Mapping[str, SubnetChoice]) -> dict[str, Subnet]:
    """``full`` and the presets, as Subnets of ``config``."""
    return {"full": config.full()} | {name: choice.of(config) for name, choice in presets.items()}


def parse_choice(text: str, presets: Mapping[str, SubnetChoice], source: str = "--subnet") -> SubnetChoice:
    """A preset's name (``full``, ``corner``) or ``layers=8,experts=16,top_k=2``.

    Raises:
        UserError: beginning with ``source``: an unknown preset or axis.
    """
    if text == "full":
        return SubnetChoice()
    if "=" not in text:
        if text not in presets:
            names = ["full", *presets]
            raise UserError(
                f"{source} {text}: unknown preset{nearest(text, names)}; known: {', '.join(names)}, or layers=…,experts=…,top_k=…"
            )
        return presets[text]
    axes: dict[str, int] = {}
    for part in text.replace(" ", ",").split(","):
        if not part:
            continue
        axis, _, value = part.partition("=")
        if axis not in SubnetChoice.model_fields:
            raise UserError(
                f"{source} {text}: unknown axis {axis!r}{nearest(axis, SubnetChoice.model_fields)}; use layers, experts, top_k"
            )
        if not (value.isascii() and value.isdecimal()) or int(value) < 1:
            raise UserError(f"{source} {text}: {axis} needs a whole number above 0")
        axes[axis] = int(value)
    return SubnetChoice(**axes)


def parse_subnet(
    text: str, config: ModelConfig, presets: Mapping[str, SubnetChoice], source: str = "--subnet"
) -> Subnet:
    """`parse_choice` as a Subnet of ``config``; raises `UserError` also for a choice outside the network."""
    choice = parse_choice(text, presets, source)
    try:
        return choice.of(config)
    except UserError as error:
        raise UserError(f"{source} {text}: {error}") from None
