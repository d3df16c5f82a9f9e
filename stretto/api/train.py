"""What the training stages share: the record of a run, its job, its held-out text, and its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from stretto.base.config import check_unchanged
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, RUN_FILE, checkpoint_folder, claimed, remove, write_json
from stretto.base.records import LINEAGE_FILE, Lineage, read_lineage
from stretto.base.track import Tracker
from stretto.data.loader import Loader, eval_batches
from stretto.evals.loss import EvalBatch
from stretto.model.checkpoint import Checkpoint, read_checkpoint, read_config, read_family
from stretto.model.families import Family
from stretto.model.parallel import Ranks
from stretto.model.spec import SubnetChoice
from stretto.model.transformer import Transformer
from stretto.text.tokenizer import load_tokenizer
from stretto.train.loop import Job, Trained, write_trained
from stretto.train.prepare import AS_IT_IS, TextOptions, check_enough, prepare_data, sources_named
from stretto.train.recipe import ElasticizeRecipe, HealRecipe, Recipe, SftRecipe, TrainConfig
from stretto.train.run_folder import ADOPTED, RunInfo, read_info
from stretto.train.snapshot import LAYOUT, STEERING

EVAL_BATCH_ROWS = 16
ADAPTER = "adapter"
"""In a run folder of `stretto sft`: the adapters by themselves, where they were asked for."""


def model_to_go_on_with(run: Path, origin: Path | None) -> dict[str, Any] | None:
    """The recipe's table of the network that ``origin`` is, or that ``run`` went on from when it began; None: from none."""
    if origin is None:
        begun = read_info(run)
        if begun.parent is None or not isinstance(begun.recipe, Recipe):
            return None
        return {"model": begun.recipe.model.model_dump(mode="json")}
    return {"model": read_config(checkpoint_folder(origin)).model_dump(mode="json")}


def new_job(
    run: Path,
    info: RunInfo,
    ranks: Ranks,
    resume: bool,
    wandb_project: str | None = None,
    loader: Loader | None = None,
) -> Job:
    """What a run is given; ``loader``: where its batches come from, if not `open_loader`'s."""

    def tracker(step: int) -> Tracker:
        assert info.recipe is not None
        config = info.recipe.model_dump(mode="json")
        return Tracker(run, first_step=step + 1 if step else 0, config=config, wandb_project=wandb_project)

    assert info.data_hash is not None
    loader, batches = loader or open_loader(info, info.train, ranks), held_out(info, info.train, ranks)
    return Job(run, loader, batches, info.data_hash, ranks, tracker, resume)


def open_loader(info: RunInfo, train: TrainConfig, ranks: Ranks) -> Loader:
    """The training loader; one batch is one micro-batch."""
    return Loader(
        info.mixture.open(), info.mixture.weights, train.micro_rows, train.seq_len, train.seed, ranks.rank, ranks.world
    )


def held_out(info: RunInfo, train: TrainConfig, ranks: Ranks) -> tuple[EvalBatch, ...]:
    """Fixed held-out batches, on the device: the first rows of every part of the mixture."""
    parts = info.mixture.open("val")
    # no more than training has room for, and the same rows on any number of ranks that shares a batch, so that losses of a
    # resharded run go on as they were
    rows = EVAL_BATCH_ROWS if EVAL_BATCH_ROWS % ranks.world == 0 else train.micro_rows
    rows = min(rows, train.micro_rows)
    num = max(1, train.eval_rows // (rows * len(parts)))
    found = [eval_batches(part, rows, train.seq_len, num, 0, ranks.rank, ranks.world) for part in parts]
    return tuple(EvalBatch.of(batch, ranks.device) for batches in found for batch in batches)


def claim_run(
    run: Path, resume: bool, held: ExitStack, start: Callable[[], RunInfo], result: str = CHECKPOINT
) -> RunInfo:
    """The run's record, made or found by ``start``; nobody else runs in the folder until ``held`` is closed.

    ``result``: a folder that is in ``run`` once such a run has ended there.
    """
    held.enter_context(claimed(run))
    if not resume and ((run / "snapshots").is_dir() or (run / result).is_dir()):
        raise UserError(f"{run}: a run lies here already; add --resume to go on with it, or choose another folder")
    info = start()
    write_json(run / RUN_FILE, info.model_dump(mode="json"))
    return info


def begun_run(
    run: Path,
    recipe: Recipe | ElasticizeRecipe | HealRecipe | SftRecipe,
    data: Sequence[str],
    tokenizer: Path | None = None,
    text: TextOptions = AS_IT_IS,
) -> RunInfo:
    """The record of the run that is gone on with, under the recipe of now. Raises `UserError`: it is another run, or it was told
    something else than this time.
    """
    info = read_info(run)
    if info.recipe is None or type(info.recipe) is not type(recipe):
        raise UserError(f"{run}: --resume: begun by `stretto {info.stage}`; choose another folder")
    before, now = (each.model_dump(mode="json") for each in (info.recipe, recipe))
    check_unchanged(before, now, run, (*LAYOUT, *STEERING))
    named = sources_named(data, text)
    if named and info.sources and named != info.sources:
        raise UserError(
            f"{run}: --data: was {' '.join(info.sources)} when this run started, is {' '.join(named)} now; leave it out"
        )
    if (
        tokenizer is not None
        and load_tokenizer(tokenizer).fingerprint() != load_tokenizer(info.tokenizer).fingerprint()
    ):
        raise UserError(f"{run}: --tokenizer: {tokenizer} is not the one this run started with; leave it out")
    return info.replace(recipe=recipe)


def same_folder(
    run: Path, info: RunInfo, name: str, told: Path | None, field: Literal["parent", "teacher", "adapters"]
) -> RunInfo:
    """``info``. Raises `UserError`: ``told`` is another folder than its ``field``."""
    before = getattr(info, field)
    if told is not None and told.resolve() != before:
        was = f"was {before} when this run started" if before else "this run started without"
        raise UserError(f"{run}: {name}: {was}, is {told} now; change it back")
    return info


def new_run(
    recipe: Recipe, run: Path, data: Sequence[str], tokenizer: Path | None, origin: Path | None, text: TextOptions
) -> RunInfo:
    if origin is not None:
        if tokenizer is not None:
            raise UserError(f"--tokenizer: {origin} has its own; leave it out")
        tokenizer = own_tokenizer(origin)
    return new_info("pretrain", recipe, run, data, tokenizer, recipe.model.vocab_size, text, parent=origin)


def new_info(
    stage: str,
    recipe: Recipe | ElasticizeRecipe | HealRecipe | SftRecipe,
    folder: Path,
    data: Sequence[str],
    tokenizer: Path | None,
    vocab_size: int,
    text: TextOptions,
    **began: Path | None,
) -> RunInfo:
    """The record of a run whose text is now tokens in ``folder``; ``began``: with which folders, by its fields."""
    mixture, kept, data_hash = prepare_data(folder, data, tokenizer, vocab_size, text)
    if not text.is_chat:
        check_enough(mixture, recipe.train)
    told = {"data": mixture, "data_hash": data_hash, "sources": sources_named(data, text), "tokenizer": kept}
    return RunInfo.model_validate({"stage": stage, "recipe": recipe, **told, **began})


def read_network(folder: Path) -> Transformer:
    """The network of the checkpoint ``folder`` in fp32, to train or to distil from."""
    return read_checkpoint(folder, dtype=torch.float32).model


@dataclass(frozen=True, slots=True)
class Stem:
    """What a checkpoint that a run starts from hands on beside its weights."""

    family: Family
    """The result is stored in the same."""
    parents: tuple[Lineage, ...]


def stem_of(folder: Path) -> Stem:
    lineage = (read_lineage(folder),) if (folder / LINEAGE_FILE).is_file() else ()
    return Stem(read_family(folder), lineage)


def own_tokenizer(folder: Path) -> Path:
    """``folder``, a checkpoint. Raises `UserError`: it has no tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder}: has no tokenizer.json; put the tokenizer beside the weights")
    return folder


def kept_checkpoint(run: Path) -> Path:
    """The checkpoint that continued training in place of ``run`` starts from."""
    return (run / ADOPTED if (run / ADOPTED).is_dir() else run / CHECKPOINT).resolve()


def require_adopted(run: Path) -> None:
    """Raises `UserError` where a checkpoint of ``run`` must not be replaced by another."""
    if not (run / RUN_FILE).is_file():
        raise UserError(f"{run}: not a run folder that `stretto adopt` wrote; name a new folder with -o")
    info = read_info(run)
    if info.stage != "adopt" and (info.stage != "elasticize" or info.parent is not None):
        raise UserError(
            f"{run}: its checkpoint was made by `stretto {info.stage}` and stays; name a new folder with -o"
        )


def put_in_place(run: Path, made: Path) -> None:
    """Let ``made`` be the run's checkpoint; the one it started with stays. Killed anywhere, a resume does the rest."""
    if not (run / ADOPTED).is_dir():
        (run / CHECKPOINT).rename(run / ADOPTED)
    remove(run / CHECKPOINT)  # of a run that was resumed for more steps
    made.rename(run / CHECKPOINT)


def new_heal(
    recipe: HealRecipe, run: Path, student: Checkpoint, data: Sequence[str], teacher: Path | None, text: TextOptions
) -> RunInfo:
    config = student.config
    if recipe.train.seq_len > config.max_positions:
        raise UserError(f"train.seq_len: {recipe.train.seq_len} exceeds the network's {config.max_positions} positions")
    parent, tokenizer = student.folder.resolve(), own_tokenizer(student.folder)
    return new_info("heal", recipe, run, data, tokenizer, config.vocab_size, text, parent=parent, teacher=teacher)


def find_teacher(recipe: HealRecipe, student: Checkpoint, teacher: Path | None) -> Path | None:
    """The checkpoint's folder of ``teacher``, or of what the student was cut from; None where the recipe wants none."""
    if recipe.ce_weight >= 1.0:
        return None
    if teacher is None:
        told = student.lineage.config.get("source") if student.lineage else None
        if not told or not Path(told).is_dir():
            raise UserError(
                f"{student.folder}: --teacher: the network this was cut from is not at hand; "
                "name it, or set ce_weight=1 to heal on the data alone"
            )
        teacher = Path(told)
    return check_teacher(student.config.vocab_size, teacher)


def check_teacher(vocab_size: int, teacher: Path) -> Path:
    """The checkpoint's folder of ``teacher``. Raises `UserError`: its vocabulary has another size."""
    folder = checkpoint_folder(teacher)
    num_tokens = read_config(folder).vocab_size
    if num_tokens != vocab_size:
        raise UserError(f"{teacher}: --teacher: vocabulary of {num_tokens}, the student has {vocab_size}")
    return folder.resolve()


def write_result(
    out: Path,
    name: str,
    info: RunInfo,
    trained: Trained,
    ranks: Ranks,
    presets: Mapping[str, SubnetChoice],
    stem: Stem | None,
    tokenizer: Path | None = None,
) -> Path:
    """Write the checkpoint (rank 0) with its lineage."""
    return write_trained(
        out,
        trained.model,
        trained.meter,
        ranks,
        name=name,
        stage=info.stage,
        config=info.model_dump(mode="json")
        | {"mixture": trained.tokens_by_kind, "pace": trained.pace.model_dump()}
        | {"changes": [change.model_dump() for change in trained.changes]},
        tokenizer_dir=tokenizer or info.tokenizer,
        parents=stem.parents if stem is not None else (),
        family=stem.family if stem is not None else None,
        run_id=trained.run_id,
        data_hash=info.data_hash,
        presets=presets,
    )
