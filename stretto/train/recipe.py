"""A recipe is a whole run: model, elastic mixture, optimiser, data and loop, complete before anything is built.

Imports no torch, so that a bad recipe is refused at once.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.optim.schedule import OptimConfig


class ElasticConfig(Config):
    """Which Subnets a run trains, and how often. Shares are of training tokens, once the mixture is complete."""

    sampler: Literal["anchored", "ernie", "complements", "off"] = "anchored"
    anchors: dict[str, SubnetChoice] = Field(default_factory=dict)
    """Named Subnets that are trained exactly, evaluated, and offered as presets afterwards."""
    anchor_share: float = Field(default=0.1, ge=0, le=1)
    """Share of all anchors together."""
    joint: bool = False
    """The full network learns the tokens of every smaller Subnet too, in a pass of its own that also teaches the
    Subnet (the sandwich rule, 1903.05134): it loses no tokens to them, for the price of its backward pass."""
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
    anchor_ce_weight: float = Field(default=0.5, ge=0, le=1)
    """On anchor micro-batches (``joint``: on all of smaller Subnets): weight of cross-entropy; the rest is
    KL(full ‖ Subnet), at the price of one forward."""
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
    compile: bool = False
    """Run the blocks through torch.compile (minutes of compilation, per top-k)."""
    eval_every: int = Field(default=200, gt=0)
    eval_rows: int = Field(default=64, gt=0)
    """Held-out rows a loss is measured on."""
    snapshot_every: int = Field(default=200, gt=0)
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
    def micro_rows(self) -> int:
        """Rows of one micro-batch, over all ranks."""
        return self.rows // self.micro_batches


class Recipe(Config):
    """A pre-training run."""

    model: ModelConfig
    elastic: ElasticConfig = ElasticConfig(anchor_share=0.0)
    optim: OptimConfig
    train: TrainConfig

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, choice in self.elastic.anchors.items():
            try:
                choice.of(self.model)
            except ValueError as error:
                raise ValueError(f"elastic.anchors.{name}: {error}") from None
        if self.elastic.min_depth > self.model.num_layers:
            raise ValueError(f"elastic.min_depth {self.elastic.min_depth} exceeds num_layers {self.model.num_layers}")
        if self.elastic.min_top_k > self.model.top_k:
            raise ValueError(f"elastic.min_top_k {self.elastic.min_top_k} exceeds top_k {self.model.top_k}")
        for name in ("hidden_size", "expert_intermediate_size"):
            if getattr(self.model, name) % 8:
                raise ValueError(
                    f"model.{name} {getattr(self.model, name)} is not a multiple of 8, as grouped products need"
                )
        if self.train.seq_len > self.model.max_positions:
            raise ValueError(f"train.seq_len {self.train.seq_len} exceeds max_positions {self.model.max_positions}")
        uneven = [experts for experts in self.model.experts_by_layer if experts % self.train.ep]
        if uneven:
            raise ValueError(f"train.ep {self.train.ep} does not divide the {uneven[0]} experts of a layer")
        if self.elastic.sampler == "complements":
            self._check_complements()
        return self

    def _check_complements(self) -> None:
        """A pair of rows, a prefix of the experts and the others, must be possible."""
        widths, top_k = self.network().widths, max(self.model.top_k_by_layer, default=1)
        if len(widths) < 2 or widths[1] < top_k or min(self.model.experts_by_layer) - widths[1] < top_k:
            raise ValueError(
                f"elastic.sampler 'complements': widths {widths} leave no two groups of at least top_k {top_k} experts; "
                "set model.widths, for example to all and half of the experts"
            )
        if self.train.micro_rows < 2:
            raise ValueError("elastic.sampler 'complements': needs two rows a micro-batch; lower train.micro_batches")

    def network(self) -> ModelConfig:
        """The model with the balance branches its sampler needs: a width each anchor, and the complement's own."""
        anchors = (choice.experts for choice in self.elastic.anchors.values())
        narrow = {experts for experts in anchors if experts is not None and self.elastic.sampler != "off"}
        widths = tuple(sorted({*self.model.widths, *narrow}, reverse=True))
        extra = self.elastic.sampler == "complements"
        return self.model.replace(widths=widths, num_branches=len(widths) + int(extra))


class HealRecipe(Config):
    """A healing run: short training of an extracted network."""

    optim: OptimConfig
    train: TrainConfig
    ce_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of cross-entropy; the rest is KL(parent's full network ‖ student). 1 needs no parent at hand."""
    balance_rate: float = Field(default=1e-4, ge=0)
