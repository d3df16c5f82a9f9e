"""Function-preserving upcycling: each feed-forward network of a dense model becomes experts.

``copy`` (sparse upcycling, 2212.05055): each expert is a copy of the feed-forward network. The gates sum to 1, so any choice of
equal experts computes that network. ``split`` (MoEfication, 2110.01786): the neurons are divided into equal parts. The first parts
always run (a shared expert); the others are experts with a weight of 1 each. All parts together compute the dense network; a
router chooses fewer of them for each token.

The gates of a split network are 2·sigmoid(logit) without renormalisation, so that each chosen expert has a weight of 1.
Renormalised gates would scale the output by R/k, for k chosen of R routed experts. The router has to rank experts whose weights are
equal, so its logits are tiny: only their order matters, and the weights differ from 1 by about `ROUTER_SCALE`.

`stretto.evals.neurons` computes the `LayerPlan` of a layer; the weights are created from it one layer at a time.

Shape letters: D hidden, W neurons of a dense feed-forward network, I of an expert, E routed experts, F = 2·W or 2·I, B branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.model.families import Family, why_not
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.model.transformer import skeleton

FAMILY: Family = "glm4_moe"
"""Family of the result: the one with a sigmoid router, a selection bias, routed scaling and optional renormalisation."""
ROUTER_SCALE = 1e-5
"""Standard deviation of a split network's router logits. A gate 2·sigmoid(z) is about 1 + z/2, so weights deviate from 1 by about
5e-6. Stretto ranks the sigmoids in fp64. In fp32, as in other software, scores near 1/2 are 3e-8 to 6e-8 apart, so one standard
deviation has about a hundred distinct values. The weights are smaller than the logits by the square root of the hidden size, a few
steps of fp16 at most."""
WIDTH_MULTIPLE = 8
"""Divisor of an expert's width: `torch.nn.functional.grouped_mm` needs rows of a multiple of 16 bytes, in bf16."""


class Upcycling(Config):
    """Settings of upcycling."""

    method: Literal["split", "copy"] = "split"
    experts: int = Field(ge=2)
    """Number of parts of a feed-forward network, shared ones included (split), or of copies (copy)."""
    top_k: int = Field(ge=1)
    """Number of copies that a token chooses, or of routed parts in the presets (the full network chooses all)."""
    shared: int | None = Field(default=None, ge=0)
    """Number of parts that every token uses; None: one (split) or zero (copy)."""
    noise: float = Field(default=0.0, ge=0, le=1)
    """Share of each copy's neurons that are initialised anew (drop-upcycling, 2502.19261), which changes the function."""
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.method == "copy" and self.shared:
            raise ValueError("shared: a shared copy would count twice; --shared is for --method split")
        if self.method == "split" and self.noise:
            raise ValueError(
                "noise: parts are not copies of each other, so noise would only change the function; --noise is for --method copy"
            )
        if self.num_routed < 2:
            raise ValueError(
                f"shared: {self.num_shared} of {self.experts} leave fewer than two routed experts; raise --experts"
            )
        if self.top_k > self.num_routed:
            raise ValueError(f"top_k: {self.top_k} exceeds the {self.num_routed} routed experts; lower --top-k")
        return self

    @property
    def num_shared(self) -> int:
        return int(self.method == "split") if self.shared is None else self.shared

    @property
    def num_routed(self) -> int:
        return self.experts - self.num_shared


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Assignment of neurons and router of one upcycled layer. Written by `stretto.evals.neurons`.

    Experts are numbered by falling importance along the network's expert order.
    """

    neurons_W: Tensor | None
    """Neurons of the shared parts, then of each expert in turn, int64; None for copies."""
    gate_ED: Tensor
    """Weights of the router, fp32."""
    bias_E: Tensor
    """Selection bias of the router, fp32: the part of the ranking that does not depend on the input."""


def upcycled_config(config: ModelConfig, how: Upcycling) -> ModelConfig:
    """The configuration of the upcycled network.

    Raises UserError: the network is not dense, its feed-forward width cannot be divided so, or no family can express the result.
    """
    if config.num_moe_layers:
        raise UserError(
            f"--experts: the network has {config.num_moe_layers} MoE layers already; adopt it without --experts, or give a dense one"
        )
    width = config.dense_intermediate_size
    if how.method == "split" and width % (how.experts * WIDTH_MULTIPLE):
        able = [num for num in range(2, width // WIDTH_MULTIPLE + 1) if width % (num * WIDTH_MULTIPLE) == 0]
        nearest_3 = sorted(sorted(able, key=lambda num: abs(num - how.experts))[:3])
        raise UserError(
            f"--experts {how.experts}: does not divide the {width} neurons of a feed-forward network into equal parts of a multiple of "
            f"{WIDTH_MULTIPLE}, which kernels need; choose {', '.join(map(str, nearest_3)) or '--method copy'}"
        )
    result = config.replace(
        dense_layers=(),
        dense_intermediate_size=0,
        num_experts=how.num_routed,
        top_k=how.num_routed if how.method == "split" else how.top_k,
        expert_intermediate_size=width // how.experts if how.method == "split" else width,
        num_shared_experts=how.num_shared,
        experts_per_layer=None,
        top_k_per_layer=None,
        router="sigmoid",
        selection_bias=True,
        normalize_gates=how.method == "copy",
        routed_scaling=2.0 if how.method == "split" else 1.0,
        expert_groups=1,
        top_groups=1,
        router_bias=False,
        expert_bias=False,
        widths=(),
        num_branches=0,
        expert_order=None,
    )
    widths = {choice.experts or how.num_routed for choice in upcycled_presets(result, how).values()} | {how.num_routed}
    result = result.replace(
        widths=tuple(sorted(widths, reverse=True)), num_branches=0, expert_order=result.expert_orders
    )
    reason = why_not(result, FAMILY)
    if reason is not None:
        raise UserError(f"--experts: {FAMILY} cannot express the result: {reason}; serve the dense network instead")
    return result


def refuse_fp16(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raises `UserError`: ``dtype`` is fp16 and ``config`` that of a split network."""
    if config.only_ranks and dtype == torch.float16:
        raise UserError(
            "--dtype float16: the router weights of a network split into experts are too small for fp16; use bfloat16"
        )


def upcycled_presets(config: ModelConfig, how: Upcycling) -> dict[str, SubnetChoice]:
    """Presets of the upcycled network: ``half`` computes less, ``corner`` is smaller on every axis."""
    fewer_layers = max(min(config.num_layers, 4), config.num_layers - max(1, config.num_layers // 6))
    if how.method == "split":
        half = SubnetChoice(top_k=how.top_k)
        corner = SubnetChoice(layers=fewer_layers, experts=(how.num_routed + how.top_k) // 2, top_k=how.top_k)
        return {"half": half, "corner": corner}
    top_k = max(1, how.top_k // 2)
    half = SubnetChoice(experts=max(how.top_k, how.experts // 2), top_k=top_k)
    return {"half": half, "corner": SubnetChoice(layers=fewer_layers, experts=how.top_k, top_k=top_k)}


class UpcycledState(Mapping[str, Tensor]):
    """The state dict of the upcycled network. The experts of a layer are created on access, those of one layer at a time."""

    def __init__(self, config: ModelConfig, how: Upcycling, plans: Sequence[LayerPlan], dense: Mapping[str, Tensor]):
        """``config``: from `upcycled_config`; ``dense``: the dense network's state dict, which may read from disk on access."""
        assert len(plans) == config.num_layers, f"{len(plans)} plans for {config.num_layers} layers"
        self._config, self._how, self._plans, self._dense = config, how, plans, dense
        self._names = tuple(skeleton(config).state_dict())
        self._layer, self._tensors = -1, dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        part, _, rest = name.partition(".mlp.")
        if not rest:
            return self._dense[name]
        layer = int(part.removeprefix("blocks."))
        if layer != self._layer:
            gate_up_FD, down_DW = (self._dense[f"{part}.mlp.{each}.weight"] for each in ("gate_up", "down"))
            self._tensors = upcycled_layer(self._config, self._how, layer, self._plans[layer], gate_up_FD, down_DW)
            self._layer = layer
        return self._tensors[rest]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def upcycled_layer(
    config: ModelConfig, how: Upcycling, layer: int, plan: LayerPlan, gate_up_FD: Tensor, down_DW: Tensor
) -> dict[str, Tensor]:
    """State dict of the `stretto.model.transformer.MoeLayer` that replaces a dense layer."""
    bias_BE = plan.bias_E.float().expand(config.num_branches, -1).clone()
    router = {"gate": plan.gate_ED.float(), "bias_WE": bias_BE}
    gate_WD, up_WD = gate_up_FD.chunk(2)
    if plan.neurons_W is None:
        generator = torch.Generator().manual_seed(how.seed * 65_537 + layer)
        copies = [_copy(gate_up_FD, down_DW, how.noise, generator) for _ in range(how.experts)]
        gate_ups, downs = zip(*copies, strict=True)
        return router | {"gate_up": torch.stack(gate_ups), "down": torch.stack(downs)}
    size, num_shared = config.expert_intermediate_size, how.num_shared * config.expert_intermediate_size
    shared, routed_EI = plan.neurons_W[:num_shared], plan.neurons_W[num_shared:].view(-1, size)
    result = router | {
        "gate_up": torch.cat((gate_WD[routed_EI], up_WD[routed_EI]), dim=1),
        "down": down_DW[:, routed_EI].transpose(0, 1).contiguous(),
    }
    if num_shared:
        result |= {
            "shared.gate_up.weight": torch.cat((gate_WD[shared], up_WD[shared])),
            "shared.down.weight": down_DW[:, shared],
        }
    return result


def _copy(gate_up_FD: Tensor, down_DW: Tensor, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One expert: gate and up [F, D] and down [D, W]. A share ``noise`` of the neurons is drawn from a normal distribution with the mean
    and deviation of the values it replaces (2502.19261, which finds a share of one half best).
    """
    width = down_DW.shape[1]
    drawn = torch.randperm(width, generator=generator)[: int(noise * width)].to(down_DW.device)
    gate_up_FD, down_DW = gate_up_FD.clone(), down_DW.clone()
    if len(drawn):
        for tensor, index in ((gate_up_FD, (drawn,)), (gate_up_FD, (width + drawn,)), (down_DW, (slice(None), drawn))):
            old = tensor[index].float()
            new = torch.randn(old.shape, generator=generator).to(old.device) * old.std() + old.mean()
            tensor[index] = new.to(tensor.dtype)
    return gate_up_FD, down_DW
