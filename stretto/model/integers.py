"""Integer weights of a network: which weights each part has, quantisation of a state dict, and slices for Subnets."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from stretto.base.errors import UserError
from stretto.model.elastic import slice_state
from stretto.model.families import Family, stored_tensors
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Transformer, skeleton
from stretto.ops.int_weights import IntScheme, IntWeight, check_group, quantise

PARTS = ("experts", "attention", "head")
"""Parts of a network that can be quantised. ``experts`` are all feed-forward weights: routed, shared and dense."""
_PART = re.compile(
    r"blocks\.\d+\.(?P<attention>attention\.\w+\.weight)"
    r"|blocks\.\d+\.mlp\.(?P<experts>(shared\.)?(gate_up|down)(\.weight)?)"
    r"|(?P<head>head\.weight)"
)


def schemes_of(config: ModelConfig, family: Family, plan: Mapping[str, IntScheme]) -> dict[str, IntScheme]:
    """The scheme of every weight (name in the state dict) of the parts in ``plan``.

    Raises:
        UserError: a group does not divide the inputs of a weight, or ``family`` stores the experts in a form without integers.
    """
    stacked = {stored.ours for stored in stored_tensors(config, family) if stored.is_stacked}
    schemes = {}
    for name, tensor in skeleton(config).state_dict().items():
        part = part_of_weight(name)
        if part not in plan:
            continue
        if name in stacked:
            raise UserError(
                f"--{part}: {family} stores all experts of a layer as one tensor, which has no integers; add --{part} none"
            )
        check_group(plan[part].group, tensor.shape[-1], name)
        schemes[name] = plan[part]
    return schemes


def part_of_weight(name: str) -> str:
    """The part of `PARTS` that the weight ``name`` of a state dict belongs to; empty: embeddings, routers, norms and biases."""
    found = _PART.fullmatch(name)
    return "" if found is None else next(part for part in PARTS if found[part] is not None)


def untie(model: Transformer) -> None:
    """Give ``model``, in place, a head of its own with the values of the embedding: the embedding is not quantised, the head may be."""
    if model.head is not None:
        return
    model.config = model.config.replace(tie_embeddings=False)
    weight_VD = model.embedding.weight
    model.head = nn.Linear(weight_VD.shape[1], weight_VD.shape[0], bias=False, device="meta")
    model.head.weight = nn.Parameter(weight_VD.detach().clone())


def round_to_nearest(state: Mapping[str, Tensor], schemes: Mapping[str, IntScheme]) -> dict[str, IntWeight]:
    """The weights in ``schemes``, each rounded to nearest."""
    return {name: quantise(state[name], scheme) for name, scheme in schemes.items()}


def slice_integers(config: ModelConfig, subnet: Subnet, integers: Mapping[str, IntWeight]) -> dict[str, IntWeight]:
    """The integer weights of the ordinary network that is extracted as ``subnet``, by `stretto.model.elastic.slice_state`."""
    result: dict[str, IntWeight] = {}
    for bits in {weight.bits for weight in integers.values()}:
        weights = {name: weight for name, weight in integers.items() if weight.bits == bits}
        zeros = {name: weight.zeros for name, weight in weights.items() if weight.zeros is not None}
        codes = {name: weight.codes for name, weight in weights.items()}
        scales = {name: weight.scales for name, weight in weights.items()}
        codes, scales, zeros = (slice_state(config, subnet, tensors) for tensors in (codes, scales, zeros))
        result |= {name: IntWeight(codes[name], scales[name], zeros.get(name), bits) for name in codes}
    return result
