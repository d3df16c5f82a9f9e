"""The Python functions `stretto.sft`, `stretto.merge` and `stretto.serve`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stretto.api.arguments import (
    Data,
    ModelLike,
    PathLike,
    held_out_path,
    listed_data,
    model_path,
    model_paths,
    new_folder,
    run_folder,
)
from stretto.api.model import Model, load
from stretto.api.rl import made_start
from stretto.api.search import new_checkpoint
from stretto.api.train import (
    ADAPTER,
    begun_run,
    claim_run,
    has_begun,
    leaves_routers,
    new_info,
    new_job,
    own_tokenizer,
    same_folder,
    write_result,
)
from stretto.base.config import RecipeLike, Settings, overriding, read_recipe, source_name, validate_options
from stretto.base.errors import UserError, user_errors, user_errors_naming
from stretto.base.paths import CHECKPOINT, checkpoint_folder, user_path
from stretto.base.track import require_wandb, say
from stretto.harness.suites import serving
from stretto.learning.recipe import RlRecipe
from stretto.model.lora import read_adapter_config
from stretto.model.parallel import DeviceLike, join, stored_for_training
from stretto.post.merge import MergeOptions
from stretto.post.merge import merge as merge_checkpoints
from stretto.post.sft import open_conversations, sft_conversations
from stretto.text.chat import tool_form
from stretto.text.tokenizer import load_tokenizer
from stretto.train.prepare import TextOptions, require_outside
from stretto.train.recipe import SftRecipe, check_keeps_orders
from stretto.train.run_folder import RunInfo


@user_errors
def sft(
    recipe: RecipeLike,
    model: ModelLike | None = None,
    data: Data = (),
    out: PathLike | None = None,
    *,
    val: PathLike | None = None,
    val_fraction: float | None = None,
    lora: int | None = None,
    adapter: PathLike | None = None,
    keep_adapter: bool = False,
    steps: int | None = None,
    settings: Settings = (),
    resume: bool = False,
    device: DeviceLike = "auto",
    wandb: str | None = None,
) -> Model:
    """Train a checkpoint on conversations (supervised fine-tuning).

    Args:
        recipe: a recipe of SFT (``sft``); without ``data``, an RL recipe whose ``[start]`` describes the training.
        model: run or checkpoint to train; None with an RL recipe that describes a new network.
        data: conversations in TRL's format (``messages``, or ``prompt`` and ``completion``; ``tools``): paths of files, or names on the
            hub, in the forms that `pretrain` takes; not needed with ``resume``. Without any, the sources of an RL recipe give problems and
            their demonstrations.
        out: run folder to write; ``runs/`` and the recipe's name by default.
        lora: rank of adapters to train instead of every weight.
        adapter: a peft folder with adapters to continue from.
        keep_adapter: also write the adapters alone, to ``adapter/``.
        val: held-out conversations in the forms of ``data``; a part of the data by default.
        val_fraction: share of the data to hold out, 0 to 0.5; 0.01 by default, up to 0.1 of little text.
        steps: number of optimiser steps; short for the setting ``train.steps``.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.
        resume: continue from the newest snapshot in ``out``; begin where there is no run yet.
        device: ``cpu``, ``cuda`` or ``auto``.
        wandb: name of a W&B project to log to.

    Raises:
        UserError: bad data or recipe, conversations for a model without a chat template, or a folder that holds another run.
    """
    folder, named = run_folder(out, recipe, "sft"), listed_data(data)
    told = overriding(settings, {"lora.rank": lora, "train.steps": steps})
    if not named and not (has_begun(folder, resume) and _is_sft_recipe(recipe, told)):
        flags = {"--val": val, "--val-fraction": val_fraction, "--lora": lora, "--adapter": adapter, "--wandb": wandb}
        flags |= {"--keep-adapter": keep_adapter or None}
        if unused := [flag for flag, value in flags.items() if value is not None]:
            raise UserError(f"{unused[0]}: needs conversations; name some with --data, or leave {unused[0]} out")
        start = _rl_recipe(recipe, overriding(settings, {"start.steps": steps}))
        origin = None if model is None else checkpoint_folder(model_path(model))
        return load(made_start(start, folder, origin, device), device=device)
    if model is None:
        raise UserError("--model: missing; name the run or checkpoint to train")
    require_wandb(wandb)
    parsed = read_recipe(recipe, SftRecipe, told)
    resume = has_begun(folder, resume)
    text, ranks = TextOptions(held_out_path(val), val_fraction, is_chat=True), join(device, parsed.train.ep)
    if not resume:
        check_keeps_orders(parsed.elastic, "elastic")
        require_outside(folder, named, text)
    origin = checkpoint_folder(model_path(model)).resolve()
    adapters = None if adapter is None else user_path(adapter, "adapter")
    network = stored_for_training(origin)  # refuses a damaged checkpoint before text is tokenised
    config, sizes = network.config, network.presets
    if adapters is not None:
        if parsed.lora is not None:
            raise UserError(
                f"--adapter: {adapters} has a rank of its own; leave lora out of the recipe, and --lora out"
            )
        assert network.family is not None, "a checkpoint has one"
        parsed = parsed.replace(lora=read_adapter_config(adapters, config, network.family))
    if keep_adapter and parsed.lora is None:
        raise UserError("--keep-adapter: no adapters are trained; add --lora 16")
    complete = parsed.for_network(config, sizes, leaves_routers(config, parsed, folder, resume, ranks))
    tokenizer = own_tokenizer(origin)
    template = load_tokenizer(tokenizer).chat_template
    if template is not None and ranks.is_first and (note := tool_form(template).note()):
        say(note)

    def begin() -> RunInfo:
        if resume:
            begun = begun_run(folder, complete, named, text=text)
            begun = same_folder(folder, begun, "--adapter", adapters, "adapters")
            return same_folder(folder, begun, "--model", origin, "parent")
        began = {"parent": origin, "adapters": adapters.resolve() if adapters is not None else None}
        return new_info("sft", complete, folder, named, tokenizer, config.vocab_size, text, **began)

    with ExitStack() as held:
        info = ranks.first(lambda: claim_run(folder, resume, held, begin))
        loader = open_conversations(info.mixture, complete, ranks)
        job = new_job(folder, info, ranks, resume, wandb, loader)
        adapter_out = folder / ADAPTER if keep_adapter else None
        trained = sft_conversations(complete, job, origin, adapters=info.adapters, keep=adapter_out)
        presets = complete.elastic.anchors if complete.elastic is not None else sizes
        write_result(folder / CHECKPOINT, folder.name, info, trained, ranks, presets, network)
    return load(folder, device=device)


def _rl_recipe(recipe: RecipeLike, settings: Sequence[str]) -> RlRecipe:
    """The RL recipe whose tasks give the demonstrations. Raises `UserError`: a bad recipe, or one of SFT, which needs ``--data``."""
    try:
        return read_recipe(recipe, RlRecipe, settings)
    except UserError as error:
        if _is_sft_recipe(recipe):
            raise UserError(
                f"--data: missing; name the conversations that {source_name(recipe)} trains on, or give a recipe of `stretto rl`, "
                "whose tasks have demonstrations"
            ) from None
        raise UserError(f"{error} (stretto sft without --data takes a recipe of `stretto rl`)") from None


def _is_sft_recipe(recipe: RecipeLike, settings: Sequence[str] = ()) -> bool:
    try:
        read_recipe(recipe, SftRecipe, settings)
    except UserError:
        return False
    return True


@user_errors_naming(further=MergeOptions.model_fields)
def merge(
    method: str,
    models: ModelLike | Sequence[ModelLike],
    out: PathLike | None = None,
    *,
    base: ModelLike | None = None,
    weights: Sequence[float | str] = (),
    force: bool = False,
    **options: float,
) -> Model:
    """Merge checkpoints that were trained from the same one, a layer in memory at a time (the methods of mergekit).

    Args:
        method: ``average``, ``task-arithmetic``, ``ties`` (2306.01708), ``dare`` (2311.03099), ``dare-ties`` or ``slerp``.
        models: two or more runs or checkpoints of one network.
        out: checkpoint to write; beside the first model, with ``-merge`` added, by default.
        base: the checkpoint all of them began with; not used by average and slerp.
        weights: one per model; 1 each by default.
        force: replace what ``out`` holds.
        options: ``scale`` (factor λ of the merged difference to the base), ``density`` (ties and dare: share of each difference that is
            kept), ``t`` (slerp: 0 is the first model, 1 the second), ``seed`` (dare).

    Raises:
        UserError: different networks or tokenizers, no base where the method needs one, or ``out`` exists or contains a
            checkpoint that is read.
    """
    parents, origin = model_paths(models, "models"), None if base is None else model_path(base)
    if not parents:
        raise UserError("merge: no models; name at least two")
    parsed = validate_options(
        MergeOptions, {"method": method, "weights": list(weights), **options}, {"method": "method"}
    )
    folder = new_folder(parents[0], "merge") if out is None else user_path(out, "out")
    with new_checkpoint(folder, [*parents, *([origin] if origin else [])], force):
        merge_checkpoints(parents, origin, folder, parsed)
    return load(folder)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server with an OpenAI-compatible API."""

    url: str
    """Address, ``http://127.0.0.1:PORT``; the API lies at ``/v1``."""

    @property
    def base_url(self) -> str:
        """Address for ``openai.OpenAI(base_url=…)``."""
        return f"{self.url}/v1"


@user_errors
def serve(model: ModelLike, *flags: str, port: int = 0) -> AbstractContextManager[Server]:
    """Serve a checkpoint at every size in a process of its own, until the block ends.

    Args:
        flags: further options of ``stretto serve``, such as ``"--memory", "8GB"``. ``"--access-log"`` writes a line per request.
        port: 0: any free port.

    Raises:
        UserError: ``model`` is not a checkpoint; where the block begins: the server did not start.
    """
    source = model_path(model)
    checkpoint_folder(source)  # refused here, before a process is started
    return _served(source, *flags, "--port", str(port))


@contextmanager
def _served(source: Path, *flags: str) -> Iterator[Server]:
    with serving(source, *flags) as (url, _):
        yield Server(url)
