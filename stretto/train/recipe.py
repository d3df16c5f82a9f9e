"""A recipe is a whole run: model, elastic mixture, optimiser, data and loop, complete before anything is built.

Imports no torch, so that a bad recipe is refused at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, Self, TypeVar

from pydantic import Field, PositiveFloat, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.model.spec import LoraConfig, ModelConfig, SubnetChoice, fixed_layers
from stretto.optim.schedule import OptimConfig


class MixtureConfig(Config):
    """Which Subnets a run trains, and how often. Shares are of training tokens, once the mixture is complete."""

    sampler: Literal["anchored", "ernie", "complements", "off"] = "anchored"
    anchors: dict[str, SubnetChoice] = Field(default_factory=dict)
    """Named Subnets that are trained exactly, evaluated, and offered as presets afterwards."""
    anchor_share: float = Field(default=0.1, ge=0, le=1)
    """Share of all anchors together."""
    depth_share: float = Field(default=0.1, ge=0, le=1)
    """Share of micro-batches with a random smaller depth (ERNIE 5.0: 0.25)."""
    top_k_share: float = Field(default=0.1, ge=0, le=1)
    """Share of micro-batches with a random smaller top-k, drawn for each layer on its own (2509.26520; ERNIE: 0.2)."""
    width_share: float = Field(default=0.1, ge=0, le=0.5)
    """Share of rows with fewer experts. Above a quarter the full network suffers (Marin NEST-MOE)."""
    min_depth: int = Field(default=1, gt=0)
    """Smallest depth that is drawn at random. The first and last two layers are always drawn, so four is the least."""
    min_top_k: int = Field(default=1, gt=0)
    starts_at: float = Field(default=0.0, ge=0, lt=1)
    """Share of the steps that train the full network alone, before the mixture begins."""
    ramp_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the steps, from there on, over which the mixture grows from full-only to the shares above."""
    balance_rate: float = Field(default=1e-3, ge=0)
    """Step of the balance bias, in units of the selection score."""
    balance_final_rate: float = Field(default=1e-4, ge=0)
    """The same while the learning rate decays."""
    rank_layers_at: tuple[float, ...] = ()
    """Shares of the run at which the layer order is measured anew; it is frozen after the last."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        total = self.anchor_share + self.depth_share + self.top_k_share
        if total > 1:
            raise ValueError(f"anchor_share + depth_share + top_k_share is {total:g}; at most 1")
        if "full" in self.anchors:
            raise ValueError("anchors.full: 'full' is the whole network; choose another name")
        return self


class SelfTaughtConfig(MixtureConfig):
    """The mixture of a network that is its own teacher."""

    joint: bool = False
    """The full network learns the tokens of every smaller Subnet too, in a pass of its own that also teaches the
    Subnet (the sandwich rule, 1903.05134): it loses no tokens to them, for the price of its backward pass."""
    anchor_ce_weight: float = Field(default=0.5, ge=0, le=1)
    """On anchor micro-batches (``joint``: on all of smaller Subnets): weight of cross-entropy; the rest is
    KL(full ‖ Subnet), at the price of one forward."""


class ElasticConfig(SelfTaughtConfig):
    """The mixture of a network that is elastic from its first step."""

    @model_validator(mode="after")
    def _check_anchors(self) -> Self:
        if self.sampler == "anchored" and self.anchor_share > 0 and not self.anchors:
            raise ValueError("anchors: name at least one, or set anchor_share = 0")
        return self


class TrainConfig(Config):
    """The loop."""

    steps: int = Field(gt=0)
    rows: int = Field(gt=0)
    """Rows of one optimisation step, over all micro-batches and ranks."""
    seq_len: int = Field(gt=0)
    """Tokens a row."""
    micro_batches: int = Field(default=1, gt=0)
    """Forward/backward passes a step; each draws its own depth and top-k."""
    ep: int = Field(default=1, gt=0)
    """Expert-parallel ranks: so many share each layer's experts; divides the number of ranks and of experts. A resumed
    run may change it."""
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; ``auto`` is bf16 autocast on a GPU with units for it, and on a CPU what a second of this run's own work is
    faster in. A resumed run keeps what its first life took."""
    recompute: bool = False
    """Recompute activations in the backward pass: less memory, one more forward."""
    deterministic: bool = False
    """On a GPU, take only kernels that add up in one order: a run that is stopped and resumed then ends on the bits of one that
    was not, as it does on a CPU anyway."""
    compile: bool = False
    """Run the blocks through torch.compile (minutes of compilation, per top-k)."""
    eval_every: int = Field(default=200, gt=0)
    eval_rows: int = Field(default=64, gt=0)
    """Held-out rows a loss is measured on."""
    snapshot_every: int = Field(default=200, gt=0)
    """Steps between snapshots."""
    snapshot_minutes: float = Field(default=3.0, gt=0)
    """Minutes after the last snapshot at which another is written, however few steps were made: what a killed run may lose."""
    keep_snapshots: int = Field(default=2, gt=0)
    log_every: int = Field(default=10, gt=0)
    skip_steps: tuple[int, ...] = ()
    """Steps, by their number in the log, whose rows are read and not trained on: the way past rows that make a loss infinite."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rows % self.micro_batches:
            raise ValueError(f"rows {self.rows} is not a multiple of micro_batches {self.micro_batches}")
        return self

    @property
    def num_positions(self) -> int:
        """Of all rows that are trained on, padding included: what the FLOPs of a run go by."""
        passed_over = sum(1 <= step <= self.steps for step in set(self.skip_steps))
        return (self.steps - passed_over) * self.rows * self.seq_len

    @property
    def micro_rows(self) -> int:
        """Rows of one micro-batch, over all ranks."""
        return self.rows // self.micro_batches


class Recipe(Config):
    """A pre-training run."""

    command: ClassVar[str] = "`stretto pretrain`"

    model: ModelConfig
    elastic: ElasticConfig = ElasticConfig(anchor_share=0.0)
    optim: OptimConfig
    train: TrainConfig

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_fit(self.elastic, self.train, self.model)
        return self

    def network(self) -> ModelConfig:
        """The model with the balance branches its sampler needs."""
        return with_branches(self.model, self.elastic)


def check_fit(elastic: MixtureConfig, train: TrainConfig, model: ModelConfig) -> None:
    """Raises `ValueError` where ``elastic`` or ``train`` ask for what ``model`` has not."""
    for name, choice in elastic.anchors.items():
        if not model.num_moe_layers and (choice.experts or choice.top_k):
            raise ValueError(f"elastic.anchors.{name}: the network has no experts to choose from; name layers alone")
        try:
            choice.of(model)
        except ValueError as error:
            raise ValueError(f"elastic.anchors.{name}: {error}") from None
    if elastic.min_depth > model.num_layers:
        raise ValueError(f"elastic.min_depth {elastic.min_depth} exceeds num_layers {model.num_layers}")
    if elastic.min_top_k > model.top_k:
        raise ValueError(f"elastic.min_top_k {elastic.min_top_k} exceeds top_k {model.top_k}")
    for name in ("hidden_size", "expert_intermediate_size") if model.num_moe_layers else ():
        if getattr(model, name) % 8:
            raise ValueError(f"model.{name} {getattr(model, name)} is not a multiple of 8, as grouped products need")
    if train.seq_len > model.max_positions:
        raise ValueError(f"train.seq_len {train.seq_len} exceeds max_positions {model.max_positions}")
    uneven = [experts for experts in model.experts_by_layer if experts % train.ep]
    if uneven:
        raise ValueError(f"train.ep {train.ep} does not divide the {uneven[0]} experts of a layer")
    if elastic.sampler == "ernie" and model.expert_groups > 1:
        raise ValueError(
            f"elastic.sampler 'ernie': its random subsets leave the {model.expert_groups} groups of experts unequal; use anchored"
        )
    if elastic.sampler == "complements":
        _check_complements(elastic, train, model)


def _check_complements(elastic: MixtureConfig, train: TrainConfig, model: ModelConfig) -> None:
    """A pair of rows, a prefix of the experts and the others, must be possible."""
    widths, top_k = with_branches(model, elastic).widths, max(model.top_k_by_layer, default=1)
    parts = (widths[1], min(model.experts_by_layer) - widths[1]) if len(widths) > 1 else (0,)
    if min(model.choosable(part) for part in parts) < top_k:
        raise ValueError(
            f"elastic.sampler 'complements': widths {widths} leave no two groups of at least top_k {top_k} experts; "
            "set model.widths, for example to all and half of the experts"
        )
    if train.micro_rows < 2:
        raise ValueError("elastic.sampler 'complements': needs two rows a micro-batch; lower train.micro_batches")


def with_branches(model: ModelConfig, elastic: MixtureConfig) -> ModelConfig:
    """``model`` with the balance branches that its sampler needs: a width each anchor, and the complement's own."""
    anchors = (choice.experts for choice in elastic.anchors.values())
    narrow = {experts for experts in anchors if experts is not None and elastic.sampler != "off"}
    widths = tuple(sorted({*model.widths, *narrow}, reverse=True))
    extra = elastic.sampler == "complements"
    return model.replace(widths=widths, num_branches=len(widths) + int(extra))


def default_anchors(model: ModelConfig) -> dict[str, SubnetChoice]:
    """``half`` and ``corner`` of a network whose checkpoint names no presets: by the shares of recipes/demo.toml (ours). Axes
    that a network has not, or that are too short to be cut, stay full; none where that leaves nothing.
    """
    fewest = len(fixed_layers(model.num_layers))
    anchors = {}
    for name, depth, part in (("half", 7 / 8, 2), ("corner", 3 / 4, 3)):
        layers = max(fewest, math.floor(depth * model.num_layers))
        axes = {"layers": layers} if layers < model.num_layers else {}
        if model.num_moe_layers:
            top_k = max(1, min(model.top_k_by_layer) // part)
            axes |= {"top_k": top_k, "experts": model.holding(min(model.experts_by_layer) // part, top_k)}
        choice = SubnetChoice(**axes)
        if choice.of(model) != model.full():
            anchors[name] = choice
    return anchors


class HealRecipe(Config):
    """A healing run: short training of an extracted network."""

    command: ClassVar[str] = "`stretto heal`"

    optim: OptimConfig
    train: TrainConfig
    ce_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of cross-entropy; the rest is KL(parent's full network ‖ student). 1 needs no parent at hand."""
    balance_rate: float = Field(default=1e-4, ge=0)


class ElasticizeRecipe(Config):
    """Continued training that makes a trained network elastic: the network as it came is frozen, and teaches every Subnet."""

    command: ClassVar[str] = "`stretto elasticize`"

    elastic: MixtureConfig = MixtureConfig()
    """Without anchors: the checkpoint's presets, else `default_anchors`. ``min_depth`` and ``min_top_k`` are never less than
    the smallest anchor's."""
    optim: OptimConfig
    train: TrainConfig
    kd_weight: float = Field(default=1.0, ge=0, le=1)
    """Weight of KL(parent ‖ Subnet) at the first step; the rest is cross-entropy. SlimQwen (2605.08738) found both together
    better than either, and a share of KL that falls from 1 to 0.75 best."""
    kd_final_weight: float = Field(default=0.75, ge=0, le=1)
    """The same at the last step; it moves evenly between."""
    experts_from: float = Field(default=0.0, ge=0, lt=1)
    """Share of the steps before which Subnets have fewer layers only. Cutting a network to one size, axis after axis and depth first
    ended better than all at once (2605.08738); in the short runs of bench/elasticise.py, which train many sizes, it did not."""
    top_k_from: float = Field(default=0.0, ge=0, lt=1)
    """Share of the steps before which Subnets keep as large a top-k as their experts allow."""
    trainable: Literal["all", "routers"] = "all"
    """``routers``: experts, attention, dense layers, embedding and head stay as they are, bit for bit; routers, norms and biases
    learn. Gradients and an optimiser's state exist for these alone."""
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the parent's weights in memory."""
    cached_logits: int | None = Field(default=None, gt=0)
    """So many of the parent's largest log-probabilities of every token, and the sum of the others, are computed before the
    first step and kept on disk; the parent is not in memory while the network trains. None: it is, and computes in full."""

    def for_network(self, model: ModelConfig, presets: Mapping[str, SubnetChoice]) -> Self:
        """The same, complete for ``model``: its anchors by name, and bounds that fit them. Raises `UserError`.

        Where tokens choose all experts, as in a network cut from a dense one (`stretto.model.upcycle`), routers only rank: there is
        no load to balance, and what is tiny in them is meant. A step of balance or of an ordinary rate would write over that.
        """
        elastic = _completed(self.elastic, model, presets, self.train)
        if self.cached_logits is not None and self.cached_logits > model.vocab_size:
            raise UserError(f"cached_logits: {self.cached_logits} exceeds the vocabulary of {model.vocab_size}")
        if not _only_ranks(model):
            return self.replace(elastic=elastic)
        elastic = elastic.replace(balance_rate=0.0, balance_final_rate=0.0)
        return self.replace(elastic=elastic, optim=_routers_kept(self.optim))

    def mixture_at(self, model: ModelConfig, step: int) -> MixtureConfig:
        """The mixture of ``step`` (0-based): axes that are not in force yet stay full."""
        elastic, done = self.elastic, step / self.train.steps
        experts, top_k = done >= self.experts_from, done >= self.top_k_from
        anchors = {}
        for name, choice in elastic.anchors.items():
            cut = choice.replace(experts=choice.experts if experts else None, top_k=choice.top_k if top_k else None)
            if (
                cut.top_k is None
                and cut.experts is not None
                and model.choosable(cut.experts) < max(model.top_k_by_layer)
            ):
                cut = cut.replace(top_k=min(model.choosable(cut.experts), *model.top_k_by_layer))
            if cut != SubnetChoice():
                anchors[name] = cut
        return elastic.replace(
            anchors=anchors,
            top_k_share=elastic.top_k_share if top_k else 0.0,
            width_share=elastic.width_share if experts else 0.0,
        )

    def ce_weight_at(self, step: int) -> float:
        """Weight of cross-entropy in the loss of ``step`` (0-based)."""
        progress = step / max(1, self.train.steps - 1)
        return 1.0 - (self.kd_weight + (self.kd_final_weight - self.kd_weight) * progress)


Mixture = TypeVar("Mixture", bound=MixtureConfig)


def _completed(
    elastic: Mixture, model: ModelConfig, presets: Mapping[str, SubnetChoice], train: TrainConfig
) -> Mixture:
    """``elastic`` with its anchors by name, and bounds that fit them. Raises `UserError`: they do not fit ``model``."""
    anchors = elastic.anchors or dict(presets) or default_anchors(model)
    if not anchors:
        raise UserError(
            "elastic.anchors: the network has no layer and no expert to spare; there is no smaller size of it"
        )
    depths = [choice.layers or model.num_layers for choice in anchors.values()]
    top_ks = [choice.top_k or model.top_k for choice in anchors.values()]
    elastic = elastic.replace(
        anchors=anchors,
        min_depth=max(elastic.min_depth, min(depths)),
        min_top_k=max(elastic.min_top_k, min(top_ks)),
    )
    try:
        check_fit(elastic, train, model)
    except ValueError as error:
        raise UserError(str(error)) from None
    return elastic


def _only_ranks(model: ModelConfig) -> bool:
    """Whether tokens choose all experts, so that routers only weigh and rank them."""
    return bool(model.num_moe_layers) and model.top_k_by_layer == model.experts_by_layer


def _routers_kept(optim: OptimConfig) -> OptimConfig:
    """``optim`` with routers that stay, unless it says otherwise: what is not the default is meant."""
    return optim if optim.router_lr_factor != 1.0 else optim.replace(router_lr_factor=0.0)


class SftRecipe(Config):
    """Supervised training on conversations."""

    command: ClassVar[str] = "`stretto sft` with --data"

    optim: OptimConfig
    train: TrainConfig
    long: Literal["refuse", "cut", "leave_out"] = "refuse"
    """What becomes of conversations that are longer than ``train.seq_len``: an error, their beginning, or nothing."""
    domains: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Shares of the rows by domain, relative to each other; within one, sources share by their weights. Empty: by the sources'
    weights alone."""
    lora: LoraConfig | None = None
    """Train adapters of a low rank; None: every weight."""
    elastic: SelfTaughtConfig | None = None
    """Train this mixture of Subnets, so that every size stays good; None: the full network alone. Without anchors: the
    checkpoint's presets, else `default_anchors`."""
    balance_rate: float = Field(default=1e-4, ge=0)
    """Of the full network alone; a mixture has its own. With ``lora`` biases stay: no adapter could hold them."""

    def for_network(self, model: ModelConfig, presets: Mapping[str, SubnetChoice]) -> Self:
        """The same, complete for ``model``, as `ElasticizeRecipe.for_network` says. Raises `UserError`."""
        if self.train.seq_len > model.max_positions:
            raise UserError(
                f"train.seq_len: {self.train.seq_len} exceeds the network's {model.max_positions} positions"
            )
        elastic, optim = self.elastic, self.optim
        if elastic is not None:
            elastic = _completed(elastic, model, presets, self.train)
        if _only_ranks(model):
            optim = _routers_kept(optim)
        if not _only_ranks(model) and self.lora is None:
            return self.replace(elastic=elastic, optim=optim)
        still = {"balance_rate": 0.0, "balance_final_rate": 0.0}
        elastic = elastic.replace(**still) if elastic is not None else None
        return self.replace(elastic=elastic, optim=optim, balance_rate=0.0)
