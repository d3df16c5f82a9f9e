"""The stages from text to an exported small model, as functions: pretrain, adopt, elasticize, latency, search, extract, heal.

Each stage takes folders or the results of other stages, writes a folder, and returns an object that opens it. The commands of the
same names call these functions.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.api.adopt import AdoptOptions, adopt_command, upcycling
from stretto.api.model import Model, SubnetLike, load
from stretto.api.search import extract_command, latency_command, parse_limits, search_command
from stretto.api.train import elasticize_command, heal_command, model_to_go_on_with, pretrain_command
from stretto.base.config import overriding, read_recipe, validate
from stretto.base.errors import user_errors
from stretto.base.paths import RUN_FILE
from stretto.model.spec import Subnet
from stretto.report.page import Cell, Plot, Table
from stretto.report.search import candidates
from stretto.subnets.latency import LatencyTable
from stretto.subnets.search import SearchOptions, SearchResult
from stretto.train.prepare import TextOptions
from stretto.train.recipe import ElasticizeRecipe, HealRecipe, Recipe

PathLike = str | os.PathLike[str]
ModelLike = PathLike | Model
"""A run or checkpoint folder, or an opened `Model`."""
RecipeLike = PathLike | Mapping[str, Any] | Recipe | ElasticizeRecipe | HealRecipe
"""A TOML file, the name of a shipped recipe (``small``), a mapping of the same form, or a recipe object."""
Data = PathLike | Sequence[PathLike]
"""Text: a file, a folder, or a Hugging Face dataset; several as a list, ``PATH@WEIGHT`` in a mixture."""


def place(model: ModelLike) -> Path:
    """The folder that ``model`` names."""
    return model.source if isinstance(model, Model) else Path(model)


def listed_data(data: Data) -> list[str]:
    """``data`` as the commands take it."""
    return [os.fspath(data)] if isinstance(data, str | os.PathLike) else [os.fspath(each) for each in data]


def run_folder(out: PathLike | None, recipe: object, stage: str) -> Path:
    """``out``, or ``runs/`` and the name of the recipe's file, or of the stage where the recipe is no file."""
    if out is not None:
        return Path(out)
    return Path("runs") / (Path(recipe).stem if isinstance(recipe, str | os.PathLike) else stage)


def new_folder(model: ModelLike, stage: str) -> Path:
    """A folder beside the model's that does not exist yet: ``runs/demo`` and ``heal`` give ``runs/demo-heal``, then ``-2`` …"""
    source = place(model).resolve()
    base = source.with_name(f"{source.name}-{stage}")
    numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([base], numbered) if not path.exists())


@user_errors
def pretrain(
    recipe: RecipeLike,
    data: Data = (),
    out: PathLike | None = None,
    *,
    val: str | None = None,
    val_fraction: float | None = None,
    text_field: str = "text",
    tokenizer: PathLike | None = None,
    origin: ModelLike | None = None,
    steps: int | None = None,
    settings: Sequence[str] = (),
    resume: bool = False,
    device: str = "auto",
    wandb: str | None = None,
) -> Model:
    """Pre-train an elastic network on text: every step trains the full network and sampled sub-networks (Once-for-all, 1908.09791).

    Args:
        recipe: a recipe of pre-training (``small``, ``demo``; docs/tutorials/own_text.md).
        data: training text; not needed with ``resume``.
        out: run folder to write; ``runs/`` and the recipe's name by default.
        val: held-out text in the forms of ``data``; a part of the data by default.
        val_fraction: share of the data to hold out, 0 to 0.5; 0.01 by default, up to 0.1 of little text.
        text_field: field that holds the text in JSONL, CSV, Parquet and datasets.
        tokenizer: tokenizer.json or its folder; trained on the data by default.
        origin: run or checkpoint whose network and tokenizer to continue from; the recipe's ``[model]`` is then not read.
        steps: number of optimiser steps; short for the setting ``train.steps``.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.
        resume: continue from the newest snapshot in ``out``.
        device: ``cpu``, ``cuda`` or ``auto``.
        wandb: name of a W&B project to log to.

    Returns:
        The trained model.

    Raises:
        UserError: bad data or recipe, or a folder that holds another run.
    """
    folder = run_folder(out, recipe, "pretrain")
    start = None if origin is None else place(origin)
    given = None
    if start is not None or (resume and (folder / RUN_FILE).is_file()):
        given = model_to_go_on_with(folder, start)
    parsed = read_recipe(recipe, Recipe, overriding(settings, {"train.steps": steps}), given)
    pretrain_command(
        parsed,
        folder,
        listed_data(data),
        None if tokenizer is None else Path(tokenizer),
        start,
        text=TextOptions(val, val_fraction, text_field),
        resume=resume,
        device=device,
        wandb_project=wandb,
    )
    return load(folder, device=device)


@user_errors
def adopt(
    source: PathLike,
    out: PathLike | None = None,
    *,
    experts: int | None = None,
    top_k: int | None = None,
    method: str = "split",
    shared: int | None = None,
    parent_flops: float | None = None,
    parent_tokens: float | None = None,
    **options: Any,
) -> Model:
    """Import a Hugging Face or GGUF checkpoint as a run that can be searched, extracted and served at every size.

    Weights are streamed, so the checkpoint may be larger than memory. Experts and layers are ranked on calibration text
    (REAP, 2510.13999; leave-one-out for layers).

    Args:
        source: a checkpoint folder, a run, a GGUF file, ``smollm2``, or a name on the Hugging Face hub.
        out: run folder to make; ``runs/`` and the name of the source by default.
        experts: number of experts that a dense network is turned into without changing its outputs (docs/ADOPT.md).
        top_k: number of those experts that a token uses.
        method: ``split`` cuts each feed-forward layer into experts, ``copy`` makes each expert a copy of it.
        shared: number of experts that every token uses, with ``split``.
        parent_flops: FLOPs of the source's own training, for the cost ledger; unknown by default.
        parent_tokens: number of tokens of the source's own training; unknown by default.
        options: ``dtype``, ``order``, ``layer_order``, ``calibration``, ``calibration_tokens``, ``text_field`` of `AdoptOptions`.

    Raises:
        UserError: no such source, one that is not supported, or a folder that holds something else.
    """
    before = {"flops": _whole(parent_flops), "tokens": _whole(parent_tokens)}
    how = upcycling(experts, top_k, method, shared)
    told = validate(AdoptOptions, options | {"upcycling": how, "before": before}, "stretto adopt")
    folder = Path("runs") / Path(source).name if out is None else Path(out)
    adopt_command(os.fspath(source), folder, told)
    return load(folder)


def _whole(number: float | None) -> int | float | None:
    """``6e21`` as the whole number it is; any other value is left to the validation."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


@user_errors
def elasticize(
    source: ModelLike,
    data: Data = (),
    out: PathLike | None = None,
    *,
    recipe: RecipeLike = "elasticize",
    teacher: ModelLike | None = None,
    cache_logits: int | None = None,
    trainable: str | None = None,
    val: str | None = None,
    val_fraction: float | None = None,
    text_field: str = "text",
    steps: int | None = None,
    settings: Sequence[str] = (),
    resume: bool = False,
    device: str = "auto",
) -> Model:
    """Train a checkpoint further so that its smaller sizes work too; by default the unchanged checkpoint is the teacher.

    Args:
        source: run or checkpoint.
        out: new run folder; None: an adopted run is trained in place, and its original checkpoint stays in ``adopted/``.
        teacher: run or checkpoint to distil from.
        cache_logits: number of the teacher's log-probabilities per token to keep on disk, so that it need not stay in memory.
        trainable: ``all``, or ``routers`` for routers, norms and biases only.
        recipe: a recipe of continued training; ``elasticize`` by default.
        data: training text, as of `pretrain`; not needed with ``resume``.
        val: held-out text in the forms of ``data``; a part of the data by default.
        val_fraction: share of the data to hold out, 0 to 0.5; 0.01 by default, up to 0.1 of little text.
        text_field: field that holds the text in JSONL, CSV, Parquet and datasets.
        steps: number of optimiser steps; short for the setting ``train.steps``.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.
        resume: continue from the newest snapshot in ``out``.
        device: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        UserError: bad data or recipe, a teacher with another vocabulary, or a folder that holds another run.
    """
    told = {"trainable": trainable, "cached_logits": cache_logits, "train.steps": steps}
    parsed = read_recipe(recipe, ElasticizeRecipe, overriding(settings, told))
    elasticize_command(
        parsed,
        place(source),
        listed_data(data),
        None if teacher is None else place(teacher),
        None if out is None else Path(out),
        text=TextOptions(val, val_fraction, text_field),
        resume=resume,
        device=device,
    )
    return load(place(source) if out is None else Path(out), device=device)


@user_errors
def latency(model: ModelLike, *, device: str = "auto") -> LatencyTable:
    """Measure this machine's latency table for ``model`` and keep it in the run folder, for limits in milliseconds in `search`.

    Raises:
        UserError: ``model`` is not a run.
    """
    return latency_command(place(model), device)


@dataclass(frozen=True, slots=True)
class Search:
    """What `search` found."""

    result: SearchResult
    """All measurements: candidates, Pareto front, rank correlations."""

    @property
    def best(self) -> Subnet:
        """The sub-network of lowest loss within the limits."""
        return self.result.chosen.subnet

    @property
    def table(self) -> Table:
        """The evaluated sub-networks by loss, those within the limits first."""
        limits, chosen = self.result.limits, self.result.chosen.subnet
        found = sorted(self.result.candidates, key=lambda each: (not each.fits(limits), each.nll or 0.0))
        rows = tuple(
            (
                Cell(("* " if each.subnet == chosen else "") + (each.name or each.subnet.label())),
                Cell(f"{each.total_share:.1%}", each.total_share),
                Cell(f"{each.active_share:.1%}", each.active_share),
                Cell("–" if each.latency_ms is None else f"{each.latency_ms:.3g}", each.latency_ms),
                Cell("–" if each.nll is None else f"{each.nll:.4f}", each.nll),
                Cell("–" if each.healed_nll is None else f"{each.healed_nll:.4f}", each.healed_nll),
                Cell("yes" if each.fits(limits) else "no"),
            )
            for each in found
        )
        columns = ("sub-network", "total", "active", "ms/step", "loss", "healed", "fits")
        return Table("", columns, rows, note="* chosen; loss in nats per token on held-out text")

    def plot(self) -> Plot:
        """Loss over size of every candidate, the limits and the chosen one."""
        return Plot(candidates(self.result))

    def __repr__(self) -> str:
        return "\n".join(self.result.summary())

    def _repr_html_(self) -> str:
        return self.table.html()


@user_errors
def search(
    model: ModelLike,
    data: Data = (),
    *,
    max_total: float | None = None,
    max_active: float | None = None,
    max_latency_ms: float | None = None,
    heal_steps: int = 0,
    heal_recipe: RecipeLike = "heal",
    nested: bool = False,
    per_layer: bool = False,
    val: str | None = None,
    val_fraction: float | None = None,
    text_field: str = "text",
    options: SearchOptions | None = None,
    device: str = "auto",
) -> Search:
    """Find the sub-network of lowest held-out loss within limits (sensitivities, then NSGA-II where the space is too large).

    Args:
        model: a run.
        data: text to measure on; the run's own held-out text by default.
        max_total: share of the full network's parameters, 0 to 1 (memory).
        max_active: share of the active parameters, 0 to 1 (compute).
        max_latency_ms: milliseconds per decoding step; needs a table of `latency`.
        heal_steps: heal the best few for so many steps before choosing; 0: do not.
        nested: drop layers in the order of training only.
        per_layer: let the number of experts differ between layers.
        options: seed and sizes of the search.

    Raises:
        UserError: ``model`` is not a run, or nothing meets the limits (with the nearest that does).
    """
    healing = None
    if heal_steps:
        told = [f"train.steps={heal_steps}", f"train.eval_every={heal_steps}", f"train.snapshot_every={heal_steps}"]
        healing = read_recipe(heal_recipe, HealRecipe, told)
    result = search_command(
        place(model),
        parse_limits(max_total, max_active, max_latency_ms),
        options or SearchOptions(),
        healing,
        device,
        data=listed_data(data),
        text=TextOptions(val, val_fraction, text_field),
        nested=nested,
        per_layer=per_layer,
    )
    return Search(result)


@user_errors
def extract(model: ModelLike, subnet: SubnetLike, out: PathLike | None = None, *, device: str = "auto") -> Model:
    """Cut one size out as an ordinary checkpoint. Refuses unless its logits equal those of the masked network.

    Args:
        subnet: the size (docs/GLOSSARY.md).
        out: checkpoint folder to write; beside the model's, with ``-extract`` added, by default.

    Raises:
        UserError: the model has no such size, or its logits differ by more than rounding.
    """
    folder = new_folder(model, "extract") if out is None else Path(out)
    extract_command(place(model), subnet if isinstance(subnet, Subnet) else subnet or "full", folder, device)
    return load(folder, device=device)


@user_errors
def heal(
    model: ModelLike,
    data: Data = (),
    out: PathLike | None = None,
    *,
    recipe: RecipeLike = "heal",
    teacher: ModelLike | None = None,
    val: str | None = None,
    val_fraction: float | None = None,
    text_field: str = "text",
    steps: int | None = None,
    settings: Sequence[str] = (),
    resume: bool = False,
    device: str = "auto",
) -> Model:
    """Train an extracted checkpoint for a short while, on text and towards the network that it was cut from.

    Args:
        model: the extracted checkpoint.
        out: checkpoint folder to write; beside the model's, with ``-heal`` added, by default.
        teacher: the network to distil from; the one it was cut from by default.
        recipe: a recipe of healing; ``heal`` by default.
        data: training text, as of `pretrain`; not needed with ``resume``.
        val: held-out text in the forms of ``data``; a part of the data by default.
        val_fraction: share of the data to hold out, 0 to 0.5; 0.01 by default, up to 0.1 of little text.
        text_field: field that holds the text in JSONL, CSV, Parquet and datasets.
        steps: number of optimiser steps; short for the setting ``train.steps``.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.
        resume: continue from the newest snapshot in ``out``.
        device: ``cpu``, ``cuda`` or ``auto``.

    Raises:
        UserError: bad data or recipe, or the teacher is not found.
    """
    folder = new_folder(model, "heal") if out is None else Path(out)
    heal_command(
        read_recipe(recipe, HealRecipe, overriding(settings, {"train.steps": steps})),
        place(model),
        folder,
        listed_data(data),
        None if teacher is None else place(teacher),
        text=TextOptions(val, val_fraction, text_field),
        resume=resume,
        device=device,
    )
    return load(folder, device=device)
