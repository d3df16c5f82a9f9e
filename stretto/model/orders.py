"""Nested orders: which experts and layers a smaller network keeps first. Imports no torch."""

from __future__ import annotations


def kept_experts(order: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    """Ids of the first ``num_experts`` of ``order``, rising: the order in which an extracted layer stores them."""
    return tuple(sorted(order[:num_experts]))


def kept_order(order: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    """The nested order of an extracted layer, in its own expert ids."""
    place = {expert: index for index, expert in enumerate(kept_experts(order, num_experts))}
    return tuple(place[expert] for expert in order[:num_experts])


def interleaved_order(num_experts: int) -> tuple[int, ...]:
    """Experts by bit-reversed index, so that every prefix is spread evenly over contiguous expert-parallel blocks.

    The order does not depend on the number of ranks: one rank and eight ranks train the same nested network.
    """
    bits = max(num_experts - 1, 1).bit_length()
    return tuple(sorted(range(num_experts), key=lambda expert: int(f"{expert:0{bits}b}"[::-1], 2)))


def spaced_layer_order(num_layers: int) -> tuple[int, ...]:
    """Layers from first kept to first dropped, before anything is measured: first and last two, then evenly spaced.

    Dropping follows the order backwards, so the first drops lie far apart in the middle (bit-reversed).
    """
    fixed = sorted({0, 1, num_layers - 2, num_layers - 1} & set(range(num_layers)))
    middle = [layer for layer in range(num_layers) if layer not in fixed]
    spread = [middle[index] for index in interleaved_order(len(middle))] if middle else []
    return (*fixed, *spread)
