"""Code that the training stages share: the record of a run, its job, its held-out batches, and its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import psutil
import torch

from stretto.base.config import check_unchanged
from stretto.base.errors import UserError
from stretto.base.numbers import size_in_bytes
from stretto.base.paths import CHECKPOINT, RUN_FILE, checkpoint_folder, claimed, quoted, remove
from stretto.base.records import find_lineage, history
from stretto.base.track import Tracker, say
from stretto.data.loader import Batch, Loader, eval_batches
from stretto.data.pack import IGNORED
from stretto.evals.loss import EvalBatch
from stretto.model.parallel import Origin, Ranks, stored, stored_for_training
from stretto.model.spec import ModelConfig, SubnetChoice
from stretto.planner.fit import fitted
from stretto.text.tokenizer import load_tokenizer
from stretto.train.finish import write_trained
from stretto.train.loop import Job, Trained
from stretto.train.prepare import AS_IT_IS, TextOptions, check_enough, prepare_data, sources_named
from stretto.train.recipe import (
    FIXED_ROUTERS,
    ElasticizeRecipe,
    HealRecipe,
    Recipe,
    SftRecipe,
    TrainConfig,
    check_routers,
    fixes_routers,
)
from stretto.train.run_folder import ADOPTED, HeldOutRows, RunInfo, read_info, write_info
from stretto.train.snapshot import LAYOUT, STEERING

Fitted = TypeVar("Fitted", Recipe, ElasticizeRecipe)
_USABLE = 0.94
"""Share of a device's memory that training can fill (`stretto.planner.hardware.Hardware.reserved`)."""
EVAL_BATCH_ROWS = 16
"""Largest number of rows in a held-out batch."""
ADAPTER = "adapter"
"""Folder in a run of `stretto sft` that holds the adapters alone (``--keep-adapter``)."""


def model_to_go_on_with(run: Path, origin: Path | None) -> dict[str, Any] | None:
    """The recipe's ``model`` table for the network that a run continues from: ``origin``, or the parent that ``run`` recorded. None
    if the run starts from random weights."""
    if origin is None:
        begun = read_info(run)
        if begun.parent is None or not isinstance(begun.recipe, Recipe):
            return None
        return {"model": begun.recipe.model.model_dump(mode="json")}
    return {"model": stored_for_training(checkpoint_folder(origin)).config.model_dump(mode="json")}


def fit_memory(recipe: Fitted, config: ModelConfig, ranks: Ranks) -> Fitted:
    """``recipe`` with the optimiser's states that fit into ``train.memory``, which one line names. Raises `UserError`: none fits."""
    given = recipe.train.memory
    if given is None:
        return recipe
    if ranks.world > 1:
        raise UserError("train.memory: chooses states for one rank, and several divide fp32 states; leave it out")
    on_gpu = ranks.device.type == "cuda"
    total = torch.cuda.get_device_properties(ranks.device).total_memory if on_gpu else psutil.virtual_memory().total
    if given != "auto" and given * 1e9 > total:
        raise UserError(
            f"train.memory: {given:g} GB, and the device has {size_in_bytes(total)}; lower it, or write auto"
        )
    fitting, line = fitted(recipe, config, total * _USABLE if given == "auto" else given * 1e9, on_gpu=on_gpu)
    say(line)
    return fitting


def new_job(
    run: Path,
    info: RunInfo,
    ranks: Ranks,
    resume: bool,
    wandb_project: str | None = None,
    loader: Loader | None = None,
) -> Job:
    """The job of a training run. ``loader``: source of its batches; None: `open_loader`."""

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
    """Fixed held-out batches on the device: the first rows of every part of the mixture, as many and as long as in the stages before, on
    any number of ranks."""
    _, batches = _held_out(info, train, ranks.rank, ranks.world)
    return tuple(EvalBatch.of(batch, ranks.device) for batch in batches)


def held_out_rows(info: RunInfo, train: TrainConfig) -> HeldOutRows:
    """Identity of the rows that held-out losses are measured on."""
    shape, batches = _held_out(info, train, 0, 1)
    digest = sha256()
    for batch in batches:
        is_row = (batch.targets_BT != IGNORED).any(1)  # a batch may end with rows of padding
        rows_RX = np.concatenate([batch.tokens_BT[is_row], batch.targets_BT[is_row]], 1).astype(np.int64)
        digest.update(rows_RX.tobytes())
    return HeldOutRows(**shape, hash=digest.hexdigest())


def _held_out(info: RunInfo, train: TrainConfig, rank: int, world: int) -> tuple[dict[str, int], list[Batch]]:
    """Rows per part and tokens per row of the held-out batches, and the share of ``rank`` of them."""
    parts = info.mixture.open("val")
    batch = min(EVAL_BATCH_ROWS, train.micro_rows)  # memory suffices for the rows of training
    rows, seq_len = batch * max(1, train.eval_rows // (batch * len(parts))), train.seq_len
    if info.held_out is not None:
        rows, seq_len = info.held_out.rows, info.held_out.seq_len
    batch = -(-min(batch, rows) // world) * world  # every rank has as many rows, which measurements of layers need
    found = [eval_batches(part, batch, seq_len, rows, 0, rank, world) for part in parts]
    return {"rows": rows, "seq_len": seq_len}, [each for batches in found for each in batches]


def _rows_before(parent: Path | None) -> HeldOutRows | None:
    """Held-out rows of the last stage that measured a loss, by the lineage of the checkpoint ``parent``; None: there is none."""
    lineage = None if parent is None else find_lineage(parent)
    known = [rows for stage in history(lineage) if (rows := stage.config.get("held_out"))]
    return HeldOutRows.model_validate(known[-1]) if known else None


def claim_run(
    run: Path,
    resume: bool,
    held: ExitStack,
    start: Callable[[], RunInfo],
    result: str = CHECKPOINT,
    replaces: bool = False,
) -> RunInfo:
    """The run's record, created or read by ``start``. The folder stays locked against other processes until ``held`` is closed.

    Args:
        result: folder inside ``run`` that exists once a run of this stage has ended.
        replaces: delete snapshots and result of another run, once ``start`` has succeeded.

    Raises:
        UserError: the folder holds another run and ``resume`` is False, or another process runs in it.
    """
    held.enter_context(claimed(run))
    if not resume and not replaces and ((run / "snapshots").is_dir() or (run / result).is_dir()):
        raise UserError(f"{run}: holds a run already; add --resume to continue it, or choose another folder")
    info = start()
    if replaces:
        remove(run / "snapshots")
        remove(run / result)
    write_info(run, info)
    return info


def has_begun(run: Path, resume: bool, in_place: bool = False) -> bool:
    """Whether there is a run in ``run`` to ``resume``. Without one, ``resume`` begins it, so that torchrun can repeat one command. All ranks
    call this before they join, and so before rank 0 writes the record of the run.

    Args:
        in_place: the run trains the checkpoint of an adopted run, whose record is not a run to resume.
    """
    return resume and (run / RUN_FILE).is_file() and not (in_place and read_info(run).stage == "adopt")


def leaves_routers(
    model: ModelConfig,
    recipe: Recipe | ElasticizeRecipe | HealRecipe | SftRecipe,
    run: Path,
    resume: bool,
    ranks: Ranks,
) -> bool:
    """`stretto.train.recipe.fixes_routers` of a training in ``run``, which says so. Raises `UserError`: a new run with ``recipe`` is to
    train routers that stay fixed."""
    is_fixed = fixes_routers(model, read_info(run).recipe if resume else None)
    if is_fixed and not resume and isinstance(recipe, ElasticizeRecipe | SftRecipe):
        check_routers(recipe)
    if is_fixed and recipe.optim.router_lr_factor == 1.0 and ranks.is_first:
        say(f"{run}: {FIXED_ROUTERS}")
    return is_fixed


def begun_run(
    run: Path,
    recipe: Recipe | ElasticizeRecipe | HealRecipe | SftRecipe,
    data: Sequence[str],
    tokenizer: Path | None = None,
    text: TextOptions = AS_IT_IS,
) -> RunInfo:
    """The record of the run to resume, with ``recipe`` in place of its own. Raises `UserError`: the folder holds a run of another
    stage, or a setting differs that a resume cannot change.
    """
    info = read_info(run)
    if info.recipe is None or type(info.recipe) is not type(recipe):
        raise UserError(f"{run}: --resume: begun by `stretto {info.stage}`; choose another folder")
    before, now = (each.model_dump(mode="json") for each in (info.recipe, recipe))
    check_unchanged(before, now, run, (*LAYOUT, *STEERING))
    named = sources_named(data, text)
    changed = [each for each in named if each not in info.sources]
    if info.sources and (changed or (data and named != info.sources)):
        option = "--data" if data else changed[0].split()[0]
        raise UserError(
            f"{run}: {option}: was {' '.join(info.sources)} when this run started, is {' '.join(named)} now; leave it out"
        )
    if (
        tokenizer is not None
        and load_tokenizer(tokenizer).fingerprint() != load_tokenizer(info.tokenizer).fingerprint()
    ):
        raise UserError(f"{run}: --tokenizer: {tokenizer} is not the one this run started with; leave it out")
    return info.replace(recipe=recipe)


def same_folder(
    run: Path, info: RunInfo, option: str, folder: Path | None, field: Literal["parent", "teacher", "adapters"]
) -> RunInfo:
    """``info``. Raises `UserError`: ``folder`` differs from the one that ``info`` records in ``field``."""
    before = getattr(info, field)
    if folder is not None and folder.resolve() != before:
        was = f"was {before} when this run started" if before else "this run started without"
        raise UserError(f"{run}: {option}: {was}, is {folder} now; change it back")
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
    """Tokenise ``data`` into ``folder`` and return the record of the new run. ``began``: fields of `RunInfo` for the folders that
    the run starts from."""
    mixture, kept, data_hash = prepare_data(folder, data, tokenizer, vocab_size, text)
    if not text.is_chat:
        check_enough(mixture, recipe.train)
    fields = {"data": mixture, "data_hash": data_hash, "sources": sources_named(data, text), "tokenizer": kept}
    before = None if text.is_chat else _rows_before(began.get("parent"))
    info = RunInfo.model_validate({"stage": stage, "recipe": recipe, "held_out": before, **fields, **began})
    if before is not None and (rows := held_out_rows(info, info.train)).hash != before.hash:
        say(
            f"held-out loss: measured on {rows.rows} rows of {rows.seq_len} tokens of other text than in the stages before; "
            "their losses are not comparable with this stage's"
        )
    return info


def own_tokenizer(folder: Path) -> Path:
    """The checkpoint ``folder``. Raises `UserError`: it has no tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder}: has no tokenizer.json; put the tokenizer beside the weights")
    return folder


def command_to_try(place: Path) -> str:
    """The command by which a user tries the run or checkpoint ``place``: `stretto generate` where it has no chat template."""
    folder = checkpoint_folder(place)
    if (folder / "tokenizer.json").is_file() and load_tokenizer(folder).chat_template is not None:
        return f"stretto chat {quoted(place)}"
    return f"stretto generate {quoted(place)} --prompt …"


def kept_checkpoint(run: Path) -> Path:
    """The checkpoint from which in-place training of ``run`` starts."""
    return (run / ADOPTED if (run / ADOPTED).is_dir() else run / CHECKPOINT).resolve()


def require_adopted(run: Path) -> None:
    """Raises `UserError` if ``run`` may not be trained in place: only adopted runs may."""
    if not (run / RUN_FILE).is_file():
        raise UserError(f"{run}: not a run folder that `stretto adopt` wrote; name a new folder with --out")
    info = read_info(run)
    if info.stage != "adopt" and (info.stage != "elasticize" or info.parent is not None):
        raise UserError(
            f"{run}: its checkpoint was made by `stretto {info.stage}` and is not replaced; name a new folder with --out"
        )


def put_in_place(run: Path, trained: Path) -> None:
    """Make ``trained`` the run's checkpoint and keep the original in ``adopted/``. After a kill at any point, a resume finishes it."""
    if not (run / ADOPTED).is_dir():
        (run / CHECKPOINT).rename(run / ADOPTED)
    remove(run / CHECKPOINT)  # the result of an earlier training that was resumed for more steps
    trained.rename(run / CHECKPOINT)


def new_heal(
    recipe: HealRecipe,
    run: Path,
    student: Path,
    config: ModelConfig,
    data: Sequence[str],
    teacher: Path | None,
    text: TextOptions,
) -> RunInfo:
    """The record of a new run that heals the checkpoint folder ``student``, a network of ``config``."""
    if recipe.train.seq_len > config.max_positions:
        raise UserError(f"train.seq_len: {recipe.train.seq_len} exceeds the network's {config.max_positions} positions")
    parent, tokenizer = student.resolve(), own_tokenizer(student)
    return new_info("heal", recipe, run, data, tokenizer, config.vocab_size, text, parent=parent, teacher=teacher)


def find_teacher(recipe: HealRecipe, student: Path, vocab_size: int, teacher: Path | None) -> Path | None:
    """The checkpoint folder of ``teacher``, by default of the network that the checkpoint ``student`` was cut from. None if the recipe uses
    no teacher. ``vocab_size``: the student's."""
    if recipe.ce_weight >= 1.0:
        if teacher is not None:
            raise UserError(
                f"--teacher {teacher}: the recipe's ce_weight of 1 uses no teacher; lower it, or leave --teacher out"
            )
        return None
    if teacher is None:
        lineage = find_lineage(student)
        source = lineage.config.get("source") if lineage else None
        if not source or not Path(source).is_dir():
            raise UserError(
                f"{student}: --teacher: the network that this checkpoint was cut from was not found; "
                "name it, or set ce_weight=1 to heal on the data alone"
            )
        teacher = Path(source)
    return check_teacher(vocab_size, teacher)


def check_teacher(vocab_size: int, teacher: Path) -> Path:
    """The checkpoint folder of ``teacher``. Raises `UserError`: it is damaged, or its vocabulary has another size."""
    folder = checkpoint_folder(teacher)
    num_tokens = stored(folder).config.vocab_size
    if num_tokens != vocab_size:
        raise UserError(
            f"{teacher}: --teacher: has a vocabulary of {num_tokens}, the student one of {vocab_size}; name another"
        )
    return folder.resolve()


def write_result(
    out: Path,
    name: str,
    info: RunInfo,
    trained: Trained,
    ranks: Ranks,
    presets: Mapping[str, SubnetChoice],
    origin: Origin | None,
    tokenizer: Path | None = None,
) -> Path:
    """Write the checkpoint ``out``, trained from ``origin``, with its lineage; rank 0 writes."""
    rows = held_out_rows(info, info.train)
    return write_trained(
        out,
        trained.model,
        trained.meter,
        ranks,
        name=name,
        stage=info.stage,
        config=info.model_dump(mode="json")
        | {"mixture": trained.tokens_by_kind, "pace": trained.pace.model_dump()}
        | {"changes": [change.model_dump() for change in trained.changes], "held_out": rows.model_dump()},
        tokenizer_dir=tokenizer or info.tokenizer,
        parents=(origin.lineage,) if origin is not None and origin.lineage is not None else (),
        family=origin.family if origin is not None else None,
        run_id=trained.run_id,
        data_hash=info.data_hash,
        presets=presets,
    )
