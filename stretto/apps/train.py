"""The training commands: from arguments to a stage, and from its result to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from stretto.apps.run import RunInfo, prepare_data, read_info, sources_named
from stretto.base.config import check_unchanged
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, RUN_FILE, checkpoint_folder, claimed, write_json
from stretto.base.records import Lineage
from stretto.base.track import Tracker
from stretto.data.loader import Loader, eval_batches
from stretto.evals.loss import EvalBatch
from stretto.model.checkpoint import Checkpoint, read_checkpoint
from stretto.model.parallel import Ranks, join
from stretto.model.spec import SubnetChoice
from stretto.text.tokenizer import load_tokenizer
from stretto.train.loop import Job, Trained, heal, pretrain, write_trained
from stretto.train.recipe import HealRecipe, Recipe, TrainConfig
from stretto.train.snapshot import LAYOUT, STEERING

EVAL_BATCH_ROWS = 16


def pretrain_command(
    recipe: Recipe,
    run: Path,
    data: Sequence[str],
    tokenizer: Path | None = None,
    *,
    resume: bool = False,
    device: str = "auto",
    wandb_project: str | None = None,
) -> Path:
    """Pre-train ``recipe`` in ``run``; returns the checkpoint's folder. Raises `UserError`: bad data or recipe, or a
    folder in which another run lies.
    """
    ranks = join(device, recipe.train.ep)

    def start() -> RunInfo:
        if not resume:
            return _new_run(recipe, run, data, tokenizer)
        return _begun(run, recipe, data, tokenizer)

    with ExitStack() as held:
        info = ranks.first(lambda: _start(run, resume, held, start))
        trained = pretrain(recipe, _job(run, info, ranks, resume, wandb_project))
        return _write_result(run / CHECKPOINT, run.name, info, trained, ranks, recipe.elastic.anchors, parents=())


def heal_command(
    recipe: HealRecipe,
    source: Path,
    out: Path,
    data: Sequence[str],
    teacher: Path | None,
    *,
    resume: bool = False,
    device: str = "auto",
) -> Path:
    """Heal the checkpoint ``source`` into ``out``; the run's files go to a folder beside it, ``{out}.run``. Raises
    `UserError`: bad data, a teacher that does not fit, or a network without one while the recipe wants one.
    """
    run = out.with_name(out.name + ".run")
    folder = checkpoint_folder(source)
    student = read_checkpoint(folder, dtype=torch.float32)
    guide = _read_teacher(recipe, student, teacher)
    ranks = join(device, recipe.train.ep)

    def start() -> RunInfo:
        if not resume:
            return _new_heal(recipe, run, student, data, guide)
        begun = _begun(run, recipe, data)
        for name, told, before in (
            ("source", folder, begun.parent),
            ("--teacher", guide.folder if teacher and guide else None, begun.teacher),
        ):
            if told and before and told.resolve() != before:
                raise UserError(f"{run}: {name}: was {before} when this run started, is {told} now; change it back")
        return begun

    with ExitStack() as held:
        info = ranks.first(lambda: _start(run, resume, held, start))
        trained = heal(recipe, _job(run, info, ranks, resume), student.model, guide.model if guide else None)
        parents = (student.lineage,) if student.lineage else ()
        return _write_result(out, out.name, info, trained, ranks, student.presets, parents)


def _job(run: Path, info: RunInfo, ranks: Ranks, resume: bool, wandb_project: str | None = None) -> Job:
    def tracker(step: int) -> Tracker:
        config = info.recipe.model_dump(mode="json")
        return Tracker(run, first_step=step + 1 if step else 0, config=config, wandb_project=wandb_project)

    train = info.recipe.train
    loader, batches = open_loader(info, train, ranks), held_out(info, train, ranks)
    return Job(run, loader, batches, info.data_hash, ranks, tracker, resume)


def open_loader(info: RunInfo, train: TrainConfig, ranks: Ranks) -> Loader:
    """The training loader; one batch is one micro-batch."""
    return Loader(
        info.data.open(), info.data.weights, train.micro_rows, train.seq_len, train.seed, ranks.rank, ranks.world
    )


def held_out(info: RunInfo, train: TrainConfig, ranks: Ranks) -> tuple[EvalBatch, ...]:
    """Fixed held-out batches, on the device: the first rows of every part of the mixture."""
    parts = info.data.open("val")
    # no more than training has room for, and the same rows on any number of ranks that shares a batch, so that losses of a
    # resharded run go on as they were
    rows = EVAL_BATCH_ROWS if EVAL_BATCH_ROWS % ranks.world == 0 else train.micro_rows
    rows = min(rows, train.micro_rows)
    num = max(1, train.eval_rows // (rows * len(parts)))
    found = [eval_batches(part, rows, train.seq_len, num, 0, ranks.rank, ranks.world) for part in parts]
    return tuple(EvalBatch.of(batch, ranks.device) for batches in found for batch in batches)


def _start(run: Path, resume: bool, held: ExitStack, start: Callable[[], RunInfo]) -> RunInfo:
    """The run's record, made or found by ``start``; nobody else runs in the folder until ``held`` is closed."""
    held.enter_context(claimed(run))
    if not resume and ((run / "snapshots").is_dir() or (run / CHECKPOINT).is_dir()):
        raise UserError(f"{run}: a run lies here already; add --resume to go on with it, or choose another folder")
    info = start()
    write_json(run / RUN_FILE, info.model_dump(mode="json"))
    return info


def _begun(run: Path, recipe: Recipe | HealRecipe, data: Sequence[str], tokenizer: Path | None = None) -> RunInfo:
    """The record of the run that is gone on with, under the recipe of now. Raises `UserError`: it is another run, or it was told
    something else than this time.
    """
    info = read_info(run)
    if type(info.recipe) is not type(recipe):
        raise UserError(f"{run}: a {info.stage} run; choose another folder")
    before, now = (each.model_dump(mode="json") for each in (info.recipe, recipe))
    check_unchanged(before, now, run, (*LAYOUT, *STEERING))
    named = sources_named(data)
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


def _new_run(recipe: Recipe, run: Path, data: Sequence[str], tokenizer: Path | None) -> RunInfo:
    mixture, folder, data_hash = prepare_data(run, data, tokenizer, recipe.model.vocab_size)
    return RunInfo(
        stage="pretrain",
        recipe=recipe,
        data=mixture,
        data_hash=data_hash,
        sources=sources_named(data),
        tokenizer=folder,
    )


def _new_heal(
    recipe: HealRecipe, run: Path, student: Checkpoint, data: Sequence[str], guide: Checkpoint | None
) -> RunInfo:
    config = student.config
    if recipe.train.seq_len > config.max_positions:
        raise UserError(f"train.seq_len: {recipe.train.seq_len} exceeds the network's {config.max_positions} positions")
    if not (student.folder / "tokenizer.json").is_file():
        raise UserError(f"{student.folder}: has no tokenizer.json; put the tokenizer beside the weights")
    mixture, folder, data_hash = prepare_data(run, data, student.folder, config.vocab_size)
    return RunInfo(
        stage="heal",
        recipe=recipe,
        data=mixture,
        data_hash=data_hash,
        sources=sources_named(data),
        tokenizer=folder,
        parent=student.folder.resolve(),
        teacher=guide.folder.resolve() if guide else None,
    )


def _read_teacher(recipe: HealRecipe, student: Checkpoint, teacher: Path | None) -> Checkpoint | None:
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
    guide = read_checkpoint(checkpoint_folder(teacher), dtype=torch.float32)
    if guide.config.vocab_size != student.config.vocab_size:
        raise UserError(
            f"{teacher}: --teacher: vocabulary of {guide.config.vocab_size}, the student has {student.config.vocab_size}"
        )
    return guide


def _write_result(
    out: Path,
    name: str,
    info: RunInfo,
    trained: Trained,
    ranks: Ranks,
    presets: Mapping[str, SubnetChoice],
    parents: tuple[Lineage, ...],
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
        tokenizer_dir=info.tokenizer,
        parents=parents,
        run_id=trained.run_id,
        data_hash=info.data_hash,
        presets=presets,
    )
