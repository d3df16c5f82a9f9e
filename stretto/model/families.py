"""The architectures that other software knows, and what each of them cannot express.

Imports no torch, so that a recipe can be refused before anything is built. Facts were read from the modelling files of
transformers, vLLM and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from stretto.base.errors import UserError, nearest
from stretto.model.spec import ModelConfig

Family = Literal["glm4_moe", "qwen3_moe", "ernie4_5_moe"]
"""Names of the families, as in ``model_type`` of a config.json; the first that can express a network is its default."""
FAMILIES: tuple[Family, ...] = get_args(Family)

_GLM_MIN_EXPERTS = 2
"""transformers' and vLLM's group routing looks at the two best experts of the (one) group."""


def parse_family(name: str, source: str = "--family") -> Family:
    """``name`` as a family.

    Raises:
        UserError: there is no such family.
    """
    for family in FAMILIES:
        if name == family:
            return family
    raise UserError(
        f"{source}: {name!r} is not a supported family{nearest(name, FAMILIES)}; choose {', '.join(FAMILIES)}"
    )


def why_not(config: ModelConfig, family: Family) -> str | None:
    """The reason, in one sentence, why ``family`` cannot express ``config`` exactly; None if it can."""
    if config.top_k_per_layer is not None:
        return f"its layers choose different numbers of experts (top-k {config.top_k_per_layer}) and {family} has one top-k for all layers"
    return _REASONS[family](config)


def default_family(config: ModelConfig) -> Family:
    """The first family that expresses ``config``.

    Raises:
        UserError: none does; the message carries every family's reason.
    """
    reasons: list[str] = []
    for family in FAMILIES:
        reason = why_not(config, family)
        if reason is None:
            return family
        reasons.append(f"{family}: {reason}")
    raise UserError(
        f"family: no supported family can hold this network ({'; '.join(reasons)}); change the recipe to suit one"
    )


def check_family(config: ModelConfig, family: Family) -> Family:
    """Return ``family`` if it can express ``config``.

    Raises:
        UserError: it cannot; the message carries `why_not` and names a family that can, if there is one.
    """
    reason = why_not(config, family)
    if reason is None:
        return family
    able = [other for other in FAMILIES if why_not(config, other) is None]
    remedy = f"use {' or '.join(able)}" if able else "no other supported family can hold it either"
    raise UserError(f"--family {family}: cannot hold this network: {reason}; {remedy}")


def _why_not_glm(config: ModelConfig) -> str | None:
    if config.router != "sigmoid":
        return f"its router is a {config.router} and glm4_moe's is a sigmoid"
    if config.dense_layers != tuple(range(len(config.dense_layers))):
        return f"its dense layers {config.dense_layers} are not the leading ones, as glm4_moe's must be"
    return None


def _why_not_qwen(config: ModelConfig) -> str | None:
    if config.selection_bias:
        return "its router has a selection bias and qwen3_moe has none"
    if config.num_shared_experts:
        return "it has shared experts and qwen3_moe has none"
    if not config.qk_norm:
        return "its queries and keys are not normalised and qwen3_moe's always are"
    return _why_not_softmax(config, "qwen3_moe")


def _why_not_ernie(config: ModelConfig) -> str | None:
    if not config.normalize_gates:
        return "its gates are not renormalised and ernie4_5_moe's always are"
    if config.qk_norm:
        return "its queries and keys are normalised and ernie4_5_moe's are not"
    if config.attention_bias:
        return "its attention has a bias on queries, keys and values, and ernie4_5_moe has one on every projection or on none"
    if moe_interval(config) is None:
        return f"its MoE layers {config.moe_layers} do not lie at a fixed interval from a first to a last, as ernie4_5_moe's must"
    return _why_not_softmax(config, "ernie4_5_moe")


def _why_not_softmax(config: ModelConfig, family: Family) -> str | None:
    if config.router != "softmax":
        return f"its router is a {config.router} and {family}'s is a softmax"
    if len(set(config.experts_by_layer)) > 1:
        return (
            f"its layers have different numbers of experts, and a dummy expert would take a share of {family}'s softmax"
        )
    if config.routed_scaling != 1.0:
        return f"its routed scaling is {config.routed_scaling} and {family} has none"
    if config.rotary_fraction != 1.0:
        return f"it rotates {config.rotary_fraction} of a head and {family} rotates all of it"
    return None


_REASONS: dict[Family, Callable[[ModelConfig], str | None]] = {
    "glm4_moe": _why_not_glm,
    "qwen3_moe": _why_not_qwen,
    "ernie4_5_moe": _why_not_ernie,
}


def stored_experts(config: ModelConfig, family: Family) -> int:
    """Experts a layer has on disk: the most any layer has; glm4_moe pads the others with experts never chosen."""
    widest = max(config.experts_by_layer, default=config.num_experts)
    return max(_GLM_MIN_EXPERTS, widest) if family == "glm4_moe" else widest


def stored_shared_experts(config: ModelConfig, family: Family) -> int:
    """Shared experts on disk: glm4_moe always has one (llama.cpp insists), all zeros where the network has none."""
    return max(1, config.num_shared_experts) if family == "glm4_moe" else config.num_shared_experts


def stored_tied(config: ModelConfig, family: Family) -> bool:
    """Whether the head is left out on disk. Only ernie4_5_moe may: vLLM and SGLang never tie a glm4_moe, SGLang no
    qwen3_moe, whatever config.json says, so those are stored as untied networks with a second copy.
    """
    return config.tie_embeddings and family == "ernie4_5_moe"


def moe_interval(config: ModelConfig) -> tuple[int, int, int] | None:
    """First and last MoE layer and the interval between, if ERNIE's rule gives exactly ``config.moe_layers``."""
    if not config.moe_layers:
        return None
    start, end = config.moe_layers[0], config.moe_layers[-1]
    for interval in range(1, config.num_layers + 1):
        if ernie_moe_layers(start, end, interval, config.num_layers) == config.moe_layers:
            return start, end, interval
    return None


def ernie_moe_layers(start: int, end: int, interval: int, num_layers: int) -> tuple[int, ...]:
    """ERNIE's rule for which layers are MoE layers; an ``end`` of −1 is the last layer."""
    last = num_layers - 1 if end == -1 else end
    return tuple(layer for layer in range(num_layers) if start <= layer <= last and (layer + 1) % interval == 0)
