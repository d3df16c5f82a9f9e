"""``stretto sft``: a checkpoint and conversations in, a run folder with a checkpoint out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from stretto.apps.data import TextOptions, prepare_data, sources_named
from stretto.apps.run import RunInfo
from stretto.apps.train import begun_run, claim_run, new_job, own_tokenizer, same_folder, stem_of, write_result
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, checkpoint_folder
from stretto.model.checkpoint import read_config, read_family, read_presets
from stretto.model.lora import read_adapter_config
from stretto.model.parallel import join
from stretto.post.sft import STAGE, open_conversations, sft_conversations
from stretto.text.tokenizer import load_tokenizer
from stretto.train.recipe import SftRecipe

ADAPTER = "adapter"
"""In a run folder: the adapters by themselves, where they were asked for."""


def sft_command(
    recipe: SftRecipe,
    model: Path,
    run: Path,
    data: Sequence[str],
    *,
    text: TextOptions,
    adapters: Path | None = None,
    keep_adapter: bool = False,
    resume: bool = False,
    device: str = "auto",
    wandb_project: str | None = None,
) -> Path:
    """Train the run or checkpoint ``model`` on the conversations ``data`` in ``run``; returns the checkpoint's folder.

    Args:
        text: ``is_chat``.
        adapters: folder of peft's to go on from; gives the recipe its ``lora``.
        keep_adapter: write the trained adapters beside the checkpoint, too.

    Raises:
        UserError: bad data or recipe, a network without a chat template, or a folder in which another run lies.
    """
    ranks, origin = join(device, recipe.train.ep), checkpoint_folder(model).resolve()
    config, presets = read_config(origin), read_presets(origin)
    if adapters is not None:
        if recipe.lora is not None:
            raise UserError(f"--adapter: {adapters} says its rank itself; leave lora out of the recipe, and --lora")
        recipe = recipe.replace(lora=read_adapter_config(adapters, config, read_family(origin)))
    if keep_adapter and recipe.lora is None:
        raise UserError("--keep-adapter: no adapters are trained; add --lora 16")
    complete = recipe.for_network(config, presets)
    tokenizer = own_tokenizer(origin)
    if load_tokenizer(tokenizer).chat_template is None:
        raise UserError(f"{origin}: has no chat template; put a chat_template.jinja beside its tokenizer.json")

    def start() -> RunInfo:
        if resume:
            begun = begun_run(run, complete, data, text=text)
            begun = same_folder(run, begun, "--adapter", adapters, "adapters")
            return same_folder(run, begun, "--model", origin, "parent")
        mixture, folder, data_hash = prepare_data(run, data, tokenizer, config.vocab_size, text)
        return RunInfo(
            stage=STAGE,
            recipe=complete,
            data=mixture,
            data_hash=data_hash,
            sources=sources_named(data, text),
            tokenizer=folder,
            parent=origin,
            adapters=adapters.resolve() if adapters is not None else None,
        )

    with ExitStack() as held:
        info = ranks.first(lambda: claim_run(run, resume, held, start))
        loader = open_conversations(info.mixture, complete, ranks)
        job = new_job(run, info, ranks, resume, wandb_project, loader)
        kept = run / ADAPTER if keep_adapter else None
        trained = sft_conversations(complete, job, origin, adapters=info.adapters, keep=kept)
        named = complete.elastic.anchors if complete.elastic is not None else presets
        return write_result(run / CHECKPOINT, run.name, info, trained, ranks, named, stem_of(origin))
