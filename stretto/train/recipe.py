"""Recipes: complete, frozen descriptions of training runs (model, elastic mixture, optimiser, loop).

Imports no torch, so that a bad recipe is refused within a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, PositiveFloat, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.model.spec import LoraConfig, ModelConfig, SubnetChoice, fixed_layers
from stretto.optim.schedule import OptimConfig

_Share = Annotated[float, Field(ge=0, le=1)]

_MEANINGS = {
    "full": "the full network",
    "best": "the choice of the last search",
    "train": "the training loss in the log",
    "depth": "the sizes with fewer layers",
    "top_k": "the sizes with a smaller top-k",
}
"""Names that cannot be those of anchors, because sizes, losses or shares of tokens have them."""


class MixtureConfig(Config):
    """Subnets that a run trains, and the share of each kind. Shares refer to training tokens after the ramp, or after ``early_until``."""

    sampler: Literal["anchored", "ernie", "off"] = "anchored"
    """``ernie``: every axis on its own, with the shares of ERNIE 5.0 (2602.04705), in place of the anchors and shares below."""
    anchors: dict[str, SubnetChoice] = Field(default_factory=dict)
    """Subnets by name that are trained exactly, evaluated, and stored as presets in the checkpoint."""
    anchor_share: float = Field(default=0.1, ge=0, le=1)
    """Share of all anchors together."""
    anchor_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Parts of ``anchor_share`` by anchor, in relation to each other; an anchor that is not named has 1. The smallest anchor differs most
    from the full network and gains most from a larger part.
    """
    depth_share: float = Field(default=0.1, ge=0, le=1)
    """Share of micro-batches with a random smaller depth, or with the full one where ``min_depth`` leaves no other (ERNIE 5.0: 0.25)."""
    top_k_share: float = Field(default=0.1, ge=0, le=1)
    """Share of micro-batches with a random top-k, drawn separately for each layer from ``min_top_k`` to the layer's full one (2509.26520;
    ERNIE: 0.2).
    """
    width_share: float = Field(default=0.1, ge=0, le=0.5)
    """Share of rows with fewer experts. Above a quarter the full network gets worse (Marin NEST-MOE)."""
    min_depth: int = Field(default=1, gt=0)
    """Smallest depth that is drawn at random. The first and last two layers are always kept, so the minimum is four."""
    min_top_k: int = Field(default=1, gt=0)
    """Smallest top-k that is drawn at random."""
    starts_at: float = Field(default=0.0, ge=0, lt=1)
    """Share of the steps that train the full network alone, before the mixture starts."""
    ramp_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the steps, after ``starts_at``, over which the mixture grows from the full network alone to the shares above."""
    early_factor: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    """Factor on all shares above at the first step; from there it falls linearly to 1. A pass of a smaller size costs less than one of the
    full network and, in the first steps, teaches the shared weights nearly as much. Not together with ``starts_at`` or ``ramp_fraction``,
    which begin with the full network.
    """
    early_until: float = Field(default=0.5, gt=0, le=1)
    """Share of the steps after which ``early_factor`` has no effect."""
    balance_rate: float = Field(default=1e-3, ge=0)
    """Step size of the balance bias, in units of the selection score."""
    balance_final_rate: float = Field(default=1e-4, ge=0)
    """Step size of the balance bias while the learning rate decays."""
    rank_layers_at: tuple[_Share, ...] = ()
    """Shares of the run at which the layer order is measured again. It is fixed after the last one."""
    rank_experts_at: tuple[_Share, ...] = ()
    """Shares of the run at which the order of the experts is measured again. Smaller sizes learn the first experts of that order, so the
    last measurement is best just before ``starts_at``.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        total = self.anchor_share + self.depth_share + self.top_k_share
        if total > 1:
            raise ValueError(f"anchor_share + depth_share + top_k_share is {total:g}; at most 1")
        if self.early_factor > 1 and (self.starts_at or self.ramp_fraction or self.sampler == "ernie"):
            raise ValueError(
                "early_factor: needs the sampler anchored, starts_at = 0 and ramp_fraction = 0; set these, or early_factor = 1"
            )
        # only rows of passes without an anchor have fewer experts
        largest = self.anchor_share + max(self.depth_share + self.top_k_share, self.width_share)
        if self.early_factor > 1 and self.early_factor * largest > 1:
            raise ValueError(
                f"early_factor {self.early_factor:g} times the shares exceeds 1; choose smaller shares or a smaller factor"
            )
        for name in self.anchors:
            if name in _MEANINGS:
                raise ValueError(f"anchors.{name}: {name!r} is the name of {_MEANINGS[name]}; choose another name")
            if "=" in name or not name.strip():
                raise ValueError(f"anchors: {name!r} cannot be chosen by its name; write letters, without =")
        unknown = next((name for name in self.anchor_weights if self.anchors and name not in self.anchors), None)
        if unknown is not None:
            raise ValueError(
                f"anchor_weights.{unknown}: no anchor has this name; name one of {', '.join(self.anchors)}"
            )
        return self

    @property
    def mean_factor(self) -> float:
        """Factor on the shares, averaged over all steps. The ramp counts as if it were over."""
        return 1.0 - self.starts_at + (self.early_factor - 1.0) * self.early_until / 2

    def anchor_parts(self) -> dict[str, float]:
        """Part of ``anchor_share`` by anchor; the parts sum to 1."""
        weights = {name: self.anchor_weights.get(name, 1.0) for name in self.anchors}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}


class SelfTaughtConfig(MixtureConfig):
    """Mixture of a network that is its own teacher."""

    joint: bool = False
    """The full network also learns the tokens of every smaller Subnet, in a pass of its own that also teaches the
    Subnet (the sandwich rule, 1903.05134). The full network then loses no tokens to Subnets; the cost is one more backward pass. For the
    same text the full network is better with it; for the same FLOPs every size is better without it, and without a teacher
    (``anchor_ce_weight = 1``).
    """
    anchor_ce_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of cross-entropy in the loss of anchor micro-batches (with ``joint``: of all micro-batches of smaller Subnets). The rest is
    KL(full ‖ Subnet), which costs one forward pass.
    """


class ElasticConfig(SelfTaughtConfig):
    """Mixture of a network that is elastic from its first step."""

    @model_validator(mode="after")
    def _check_anchors(self) -> Self:
        if self.sampler == "anchored" and self.anchor_share > 0 and not self.anchors:
            raise ValueError("anchors: name at least one, or set anchor_share = 0")
        return self


class TrainConfig(Config):
    """Settings of the training loop."""

    steps: int = Field(gt=0)
    """Number of training steps."""
    rows: int = Field(gt=0)
    """Rows of one optimisation step, over all micro-batches and ranks."""
    seq_len: int = Field(gt=0)
    """Tokens per row."""
    micro_batches: int = Field(default=1, gt=0)
    """Forward/backward passes per step. Each draws its own depth and top-k."""
    ep: int = Field(default=1, gt=0)
    """Number of expert-parallel ranks, which share the experts of each layer. Divides the number of ranks and the number of experts. A
    resumed run may change it.
    """
    seed: int = Field(default=0, ge=0, lt=2**64)
    """Seed of the weights, of the order of the data and of the sampled sizes."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. ``auto``: on a GPU with bf16 units bf16 autocast, on a CPU the faster one, measured on the run's own
    micro-batches. On a CPU with AMX or AVX512_BF16, bf16 keeps activations in fp32 and rounds the operands of products. A resumed run
    keeps the dtype of the first start.
    """
    recompute: bool = False
    """Recompute activations in the backward pass: saves memory, costs one more forward pass."""
    deterministic: bool = False
    """On a GPU, use only kernels with a fixed order of summation: a resumed run is then bit-identical to an uninterrupted one, as it
    always is on a CPU.
    """
    memory: Literal["auto"] | PositiveFloat | None = None
    """Memory that training may use, in GB; ``auto``: that of the device. The first of the settings of moments, master and in_backward that
    fits, in the order of their precision, then replaces those in ``optim``; one line says which (`stretto.planner.fit`). For pre-training
    and elasticizing. None: ``optim`` as it is.
    """
    compile: bool = False
    """Run the blocks through torch.compile; compilation takes about a minute on an H100."""
    eval_every: int = Field(default=200, gt=0)
    """Steps between measurements of the held-out loss. Healing and SFT also measure it before their first step."""
    eval_rows: int = Field(default=64, gt=0)
    """Held-out rows on which a loss is measured."""
    snapshot_every: int = Field(default=200, gt=0)
    """Steps between snapshots."""
    snapshot_minutes: float = Field(default=3.0, gt=0)
    """Minutes after the last snapshot at which another one is written, however few steps were made. A killed run loses at most these."""
    keep_snapshots: int = Field(default=2, gt=0)
    """Number of newest snapshots that are kept."""
    snapshot_writes: Literal["background", "blocking"] = "background"
    """``background``: a step waits for a copy of weights and optimiser state in host memory only, and a thread writes the copy to disk.
    ``blocking``: no copy; a step waits until the snapshot is on disk.
    """
    hang_minutes: float = Field(default=8.0, gt=0, lt=10)
    """On several ranks: minutes without the end of a forward pass after which a rank prints the stacks of its threads and ends with an
    error, so that torchrun restarts the run. Collectives time out after ten minutes.
    """
    log_every: int = Field(default=10, gt=0)
    """Steps between lines of metrics."""
    skip_steps: tuple[int, ...] = ()
    """Steps, by their number in the log, whose rows are read but not trained on. Skips rows on which the loss is not finite."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rows % self.micro_batches:
            raise ValueError(f"rows {self.rows} is not a multiple of micro_batches {self.micro_batches}")
        return self

    @property
    def num_positions(self) -> int:
        """Positions in all trained rows, padding included. FLOPs of a run are proportional to it."""
        num_skipped = sum(1 <= step <= self.steps for step in set(self.skip_steps))
        return (self.steps - num_skipped) * self.rows * self.seq_len

    @property
    def micro_rows(self) -> int:
        """Rows of one micro-batch, over all ranks."""
        return self.rows // self.micro_batches


def check_states(recipe: Any) -> Any:
    """``recipe``. Raises `ValueError` if its ``optim`` and ``train`` cannot be used together."""
    optim, train = recipe.optim, recipe.train
    if train.memory is not None and not isinstance(recipe, Recipe | ElasticizeRecipe):
        raise ValueError(
            "train.memory: chooses for pre-training and elasticizing only; set optim.moments and optim.master here"
        )
    if optim.master != "fp32" and train.dtype == "float32":
        raise ValueError(
            f"optim.master: {optim.master} computes in bf16; set train.dtype to bfloat16, or master to fp32"
        )
    if optim.in_backward and train.micro_batches > 1:
        raise ValueError(
            f"optim.in_backward: the gradients of {train.micro_batches} micro-batches are summed before a step, so that none can be freed "
            "early; set train.micro_batches = 1, or leave in_backward out"
        )
    return recipe


class Recipe(Config):
    """Recipe of a pre-training run."""

    command: ClassVar[str] = "`stretto pretrain`"

    model: ModelConfig
    elastic: ElasticConfig = ElasticConfig(anchor_share=0.0)
    optim: OptimConfig
    train: TrainConfig

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_fit(self.elastic, self.train, self.model)
        return self

    _states = model_validator(mode="after")(check_states)

    def network(self) -> ModelConfig:
        """The model with the balance branches that its sampler needs."""
        return with_branches(self.model, self.elastic)

    def with_fixed_routers(self) -> Self:
        """This recipe for a network whose routers stay as they are, see `fixes_routers`."""
        return self.replace(elastic=_without_balance(self.elastic), optim=fixed_routers_of(self.optim))


def check_fit(elastic: MixtureConfig, train: TrainConfig, model: ModelConfig) -> None:
    """Raise `ValueError` if ``elastic`` or ``train`` cannot be used with ``model``."""
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
            f"elastic.sampler 'ernie': its random subsets make the {model.expert_groups} groups of experts unequal; use anchored"
        )


def with_branches(model: ModelConfig, elastic: MixtureConfig) -> ModelConfig:
    """``model`` with the balance branches that the sampler needs: one for the width of each anchor."""
    anchors = (choice.experts for choice in elastic.anchors.values())
    narrow = {experts for experts in anchors if experts is not None and elastic.sampler != "off"}
    widths = tuple(sorted({*model.widths, *narrow}, reverse=True))
    return model.replace(widths=widths, num_branches=len(widths))


def default_anchors(model: ModelConfig) -> dict[str, SubnetChoice]:
    """``half`` and ``corner`` for a network whose checkpoint has no presets, with the shares of recipes/demo.toml (ours). An axis that the
    network lacks, or that is too short to be cut, stays full. Returns no anchor if all axes stay full.
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
    """Recipe of a healing run: short training of an extracted network."""

    command: ClassVar[str] = "`stretto heal`"

    optim: OptimConfig
    train: TrainConfig
    ce_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of cross-entropy; the rest is KL(parent's full network ‖ student). With 1 the parent is not loaded."""
    balance_rate: float = Field(default=1e-4, ge=0)
    """Step size of the balance bias."""

    _states = model_validator(mode="after")(check_states)

    def with_fixed_routers(self) -> Self:
        """This recipe for a network whose routers stay as they are, see `fixes_routers`."""
        return self.replace(optim=fixed_routers_of(self.optim), balance_rate=0.0)


class ElasticizeRecipe(Config):
    """Recipe of continued training that makes a finished network elastic. A frozen copy of that network teaches every Subnet."""

    command: ClassVar[str] = "`stretto elasticize`"

    elastic: MixtureConfig = MixtureConfig()
    """Without anchors: the checkpoint's presets, else `default_anchors`. ``min_depth`` and ``min_top_k`` are raised to those of the
    smallest anchor.
    """
    optim: OptimConfig
    train: TrainConfig
    kd_weight: float = Field(default=1.0, ge=0, le=1)
    """Weight of KL(parent ‖ Subnet) at the first step; the rest is cross-entropy. SlimQwen (2605.08738) found the sum better than
    either loss alone, and a weight of KL that falls from 1 to 0.75 best.
    """
    kd_final_weight: float = Field(default=0.75, ge=0, le=1)
    """Weight of KL at the last step. Between the first and the last step the weight changes linearly."""
    experts_from: float = Field(default=0.0, ge=0, lt=1)
    """Share of the steps before which Subnets have fewer layers only. For one target size, cutting axis after axis with depth first gave
    better results than all axes at once (2605.08738). In short runs with many sizes it did not (docs/log/elastic.md).
    """
    top_k_from: float = Field(default=0.0, ge=0, lt=1)
    """Share of the steps before which Subnets keep as large a top-k as their experts allow."""
    trainable: Literal["all", "routers"] = "all"
    """``routers``: routers, norms and biases are trained; experts, attention, dense layers, embedding and head stay unchanged.
    Gradients and optimiser state exist for the trained parameters only.
    """
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the parent's weights in memory."""
    cached_logits: int | None = Field(default=None, gt=0)
    """Number of the parent's largest log-probabilities per token that are computed before the first step and stored on disk, with the
    sum of the others. The parent is then not in memory during training. None: the parent stays in memory and its full distribution is used.
    """

    _states = model_validator(mode="after")(check_states)

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.elastic.sampler == "ernie" and (self.experts_from or self.top_k_from):
            raise ValueError(
                "experts_from and top_k_from: the sampler ernie reduces every axis from its start; leave them out"
            )
        return self

    def for_network(
        self, model: ModelConfig, presets: Mapping[str, SubnetChoice], fixed_routers: bool | None = None
    ) -> Self:
        """This recipe, completed for ``model``: anchors by name, and bounds that fit them. Raises `UserError`: the recipe does not fit.

        Args:
            fixed_routers: whether the routers stay as they are; None: as in a new run (`fixes_routers`).
        """
        fixed_routers = fixes_routers(model, None) if fixed_routers is None else fixed_routers
        elastic = _completed(self.elastic, model, presets, self.train)
        if self.cached_logits is not None and self.cached_logits > model.vocab_size:
            raise UserError(f"cached_logits: {self.cached_logits} exceeds the vocabulary of {model.vocab_size}")
        if not fixed_routers:
            return self.replace(elastic=elastic)
        return self.replace(elastic=_without_balance(elastic), optim=fixed_routers_of(self.optim))

    def mixture_at(self, model: ModelConfig, step: int) -> MixtureConfig:
        """The mixture of ``step`` (0-based). Axes that start later stay full."""
        elastic, done = self.elastic, step / self.train.steps
        experts, top_k = done >= self.experts_from, done >= self.top_k_from
        anchors = {}
        for name, choice in elastic.anchors.items():
            cut = choice.replace(experts=choice.experts if experts else None, top_k=choice.top_k if top_k else None)
            choosable = None if cut.experts is None else model.choosable(cut.experts)
            if cut.top_k is None and choosable is not None and choosable < max(model.top_k_by_layer):
                cut = cut.replace(top_k=min(choosable, *model.top_k_by_layer))
            if cut != SubnetChoice():
                anchors[name] = cut
        return elastic.replace(
            anchors=anchors,
            anchor_weights={name: weight for name, weight in elastic.anchor_weights.items() if name in anchors},
            top_k_share=elastic.top_k_share if top_k else 0.0,
            width_share=elastic.width_share if experts else 0.0,
        )

    def ce_weight_at(self, step: int) -> float:
        """Weight of cross-entropy in the loss of ``step`` (0-based)."""
        progress = min(1.0, step / max(1, self.train.steps - 1))
        return 1.0 - (self.kd_weight + (self.kd_final_weight - self.kd_weight) * progress)


Mixture = TypeVar("Mixture", bound=MixtureConfig)


def _completed(
    elastic: Mixture, model: ModelConfig, presets: Mapping[str, SubnetChoice], train: TrainConfig
) -> Mixture:
    """``elastic`` with anchors by name, and bounds that fit them. Raises `UserError`: it does not fit ``model``."""
    anchors = elastic.anchors or dict(presets) or default_anchors(model)
    if not anchors:
        raise UserError(
            "elastic.anchors: the network has no layer and no expert that could be dropped, so it has no smaller size"
        )
    if (unknown := next((name for name in elastic.anchor_weights if name not in anchors), None)) is not None:
        raise UserError(f"elastic.anchor_weights.{unknown}: no anchor has this name; name one of {', '.join(anchors)}")
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


FIXED_ROUTERS = (
    "the routers stay fixed: in a network that was split from a dense one they rank the experts by tiny differences, which training at the "
    "rate of the other weights would erase; set optim.router_lr_factor to train them"
)
"""Note for a run whose routers stay as they are."""


def fixes_routers(model: ModelConfig, begun: Recipe | ElasticizeRecipe | HealRecipe | SftRecipe | None) -> bool:
    """Whether a training of ``model`` leaves its routers and their balance biases as they are, unless the recipe sets another learning
    rate for routers than the default.

    So it is for routers that only rank experts (`ModelConfig.only_ranks`). Their logits are about 1e-5 (`stretto.model.upcycle`): a few
    steps at an ordinary learning rate, or of the balance bias, would erase their differences and with them the choice of experts.

    Args:
        begun: the recipe of the run that is resumed, which goes on as it began, also if an older Stretto began it; None: a new run.
    """
    if begun is None:
        return model.only_ranks
    elastic = None if isinstance(begun, HealRecipe) else begun.elastic
    rates = [] if elastic is None else [elastic.balance_rate, elastic.balance_final_rate]
    rates += [begun.balance_rate] if isinstance(begun, HealRecipe | SftRecipe) else []
    return begun.optim.router_lr_factor != 1.0 and not any(rates)


def check_routers(recipe: ElasticizeRecipe | SftRecipe) -> None:
    """Check the recipe of a new run in which routers stay fixed (`fixes_routers`). Raises `UserError`: it asks to train them at the
    rate of the other weights."""
    if isinstance(recipe, SftRecipe):
        if recipe.lora is not None and "router" in recipe.lora.targets:
            raise UserError(
                "lora.targets: router, and the routers of a network that was split from a dense one stay fixed; leave it out"
            )
    elif recipe.trainable == "routers" and recipe.optim.router_lr_factor == 1.0:
        raise UserError(
            "trainable: routers, and those of a network that was split from a dense one stay fixed at the default rate; set "
            "optim.router_lr_factor: a small one such as 1e-5 trains them, 0 trains norms and biases only"
        )


def fixed_routers_of(optim: OptimConfig) -> OptimConfig:
    """``optim`` with fixed routers, unless it sets another learning rate for routers than the default."""
    return optim.replace(router_lr_factor=0.0) if optim.router_lr_factor == 1.0 else optim


def _without_balance(elastic: Mixture) -> Mixture:
    return elastic.replace(balance_rate=0.0, balance_final_rate=0.0)


def check_keeps_orders(elastic: SelfTaughtConfig | None, table: str) -> None:
    """Check the mixture of a new fine-tuning, which stands in ``table`` of its recipe. Raises `UserError`: it asks to order layers or
    experts anew."""
    for name in ("rank_layers_at", "rank_experts_at"):
        if elastic is not None and getattr(elastic, name):
            raise UserError(f"{table}.{name}: fine-tuning keeps the orders of the checkpoint; leave it out")


class SftRecipe(Config):
    """Recipe of supervised fine-tuning on conversations."""

    command: ClassVar[str] = "`stretto sft` with --data"

    optim: OptimConfig
    train: TrainConfig
    long: Literal["refuse", "cut", "leave_out"] = "refuse"
    """Treatment of conversations longer than ``train.seq_len``: an error, cut to the first ``seq_len`` tokens, or left out."""
    domains: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Shares of the rows by domain, relative to each other. Within a domain, sources share by their weights. Empty: by the weights of
    the sources alone.
    """
    lora: LoraConfig | None = None
    """Train low-rank adapters; None: all weights."""
    elastic: SelfTaughtConfig | None = None
    """Train this mixture of Subnets, so that every size stays good; None: the full network alone. Without anchors: the checkpoint's
    presets, else `default_anchors`. Not with ``rank_layers_at`` or ``rank_experts_at``: the orders of the checkpoint are kept.
    """
    balance_rate: float = Field(default=1e-4, ge=0)
    """Step size of the balance bias for the full network alone; ``elastic`` has its own. With ``lora`` the biases are frozen, since an
    adapter cannot store them.
    """

    _states = model_validator(mode="after")(check_states)

    def for_network(
        self, model: ModelConfig, presets: Mapping[str, SubnetChoice], fixed_routers: bool | None = None
    ) -> Self:
        """This recipe, completed for ``model`` like `ElasticizeRecipe.for_network`. Raises `UserError`: it does not fit."""
        fixed_routers = fixes_routers(model, None) if fixed_routers is None else fixed_routers
        if self.train.seq_len > model.max_positions:
            raise UserError(
                f"train.seq_len: {self.train.seq_len} exceeds the network's {model.max_positions} positions"
            )
        elastic = None if self.elastic is None else _completed(self.elastic, model, presets, self.train)
        rate, optim = self.balance_rate, fixed_routers_of(self.optim) if fixed_routers else self.optim
        if self.lora is not None or fixed_routers:
            rate = 0.0
            elastic = None if elastic is None else _without_balance(elastic)
        return self.replace(elastic=elastic, optim=optim, balance_rate=rate)
