"""The commands of post-training. They import their stages late, so that ``stretto --help`` needs no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from stretto.base.errors import UserError
from stretto.cli.options import Device, Recipe, Resume, RunOut, Settings, Steps, Wandb


def sft(
    recipe: Recipe,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Run or checkpoint to train; without it, a new network is, by the [start.model] of an RL recipe."
        ),
    ] = None,
    data: Annotated[
        list[str],
        typer.Option(
            help="Conversations (messages, or prompt and completion; tools): a JSONL or Parquet file, a folder of them, or a "
            "Hugging Face dataset. May be given again: PATH@WEIGHT in a mixture. Without any, the sources of an RL recipe give "
            "problems and their own answers, as many as its [start] says.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 - typer reads it once
    out: RunOut = None,
    val: Annotated[
        str | None, typer.Option(help="Held-out conversations, in the forms of --data; a part of the data if left out.")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of the data to hold out; a hundredth, of little data up to a tenth.")
    ] = None,
    lora: Annotated[
        int | None, typer.Option(help="Train adapters of this rank instead of every weight; --set lora.rank.")
    ] = None,
    adapter: Annotated[Path | None, typer.Option(help="A folder of peft's with adapters to go on from.")] = None,
    keep_adapter: Annotated[
        bool, typer.Option("--keep-adapter", help="Also write the adapters by themselves, for peft: adapter/.")
    ] = False,
    steps: Steps = None,
    settings: Settings = [],  # noqa: B006
    resume: Resume = False,
    device: Device = "auto",
    wandb: Wandb = None,
) -> None:
    """Train a checkpoint on conversations: every weight or adapters, one size or all of them."""
    from stretto.base.config import read_recipe
    from stretto.learning.recipe import RlRecipe
    from stretto.train.recipe import SftRecipe

    folder = out or Path("runs") / recipe.stem
    if not data:
        flags = {"--val": val, "--val-fraction": val_fraction, "--lora": lora, "--adapter": adapter, "--wandb": wandb}
        flags |= {"--keep-adapter": keep_adapter or None}
        if unused := [flag for flag, value in flags.items() if value is not None]:
            raise UserError(f"{unused[0]}: is of conversations; name some with --data, or leave it out")
        told = [*settings, *([f"start.steps={steps}"] if steps is not None else [])]
        try:
            start = read_recipe(recipe, RlRecipe, told)
        except UserError as error:
            raise UserError(f"{error} (without --data, a recipe of `stretto rl` is meant)") from None
        from stretto.api.rl import made_start
        from stretto.base.paths import checkpoint_folder

        made = made_start(start, folder, checkpoint_folder(model) if model is not None else None, device)
        sys.stdout.write(f"checkpoint: {made}\nnext: stretto chat {made}\n")
        return
    if model is None:
        raise UserError("--model: missing; name the run or checkpoint to train")
    told = [*settings, *([f"lora.rank={lora}"] if lora is not None else [])]
    told += [f"train.steps={steps}"] if steps is not None else []
    parsed = read_recipe(recipe, SftRecipe, told)
    from stretto.api.train import sft_command
    from stretto.train.prepare import TextOptions

    made = sft_command(
        parsed,
        model,
        folder,
        data,
        text=TextOptions(val, val_fraction, is_chat=True),
        adapters=adapter,
        keep_adapter=keep_adapter,
        resume=resume,
        device=device,
        wandb_project=wandb,
    )
    if os.environ.get("RANK", "0") == "0":  # torchrun's; the other ranks would say it again
        sys.stdout.write(f"checkpoint: {made}\nnext: stretto report {folder}; stretto chat {folder}\n")


def merge(
    method: Annotated[
        str, typer.Argument(help="average, task-arithmetic, ties, dare, dare-ties or slerp.", show_default=False)
    ],
    models: Annotated[list[Path], typer.Argument(help="Runs or checkpoints of one network.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="Checkpoint to write.")],
    base: Annotated[
        Path | None, typer.Option(help="Run or checkpoint that all began with; average and slerp do without.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="One a model, by commas; 1 each by default.")] = None,
    scale: Annotated[float, typer.Option(help="Of what is added to the base (λ).")] = 1.0,
    density: Annotated[float, typer.Option(help="Of ties and dare: share of each difference that is kept.")] = 0.5,
    t: Annotated[float, typer.Option(help="Of slerp: from 0, the first model, to 1, the second.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of what dare keeps.")] = 0,
) -> None:
    """Merge checkpoints that began with the same one: mergekit's methods, a layer in memory at a time."""
    from stretto.base.config import validate
    from stretto.post.merge import MergeOptions
    from stretto.post.merge import merge as merge_checkpoints

    each = [part.strip() for part in weights.split(",")] if weights is not None else []
    told = {"method": method, "weights": each, "scale": scale, "density": density, "t": t, "seed": seed}
    made = merge_checkpoints(models, base, out, validate(MergeOptions, told, "stretto merge"))
    sys.stdout.write(f"checkpoint: {made}\n")


Suites = Annotated[
    list[str],
    typer.Option(
        "--suite",
        help="By commas: gym, tools, code, writing; math, aime, mcq, gpqa or mmlu_pro with a file, NAME=FILE (docs/EVAL.md); tau, bfcl "
        "(docs/HARNESSES.md); FILE.toml with such tables, or an RL recipe.",
        show_default=False,
    ),
]
Samples = Annotated[int, typer.Option(help="Of each problem.")]
Limit = Annotated[int | None, typer.Option(help="Problems of each domain, instead of the suite's number.")]
MaxBatch = Annotated[int, typer.Option(help="Answers written at once; more on a GPU.")]


def evaluate(
    source: Annotated[Path, typer.Argument(help="A run or a checkpoint.", show_default=False)],
    suite: Suites,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write; called again, it goes on there.")],
    samples: Samples = 4,
    limit: Limit = None,
    subnet: Annotated[str | None, typer.Option(help="A preset, best, or layers=…,experts=…,top_k=….")] = None,
    presets: Annotated[
        bool, typer.Option("--presets", help="Every named size beside all of it: score over size, as stretto compare.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="Instead of the suite's; 0 is greedy.")] = None,
    baselines: Annotated[bool, typer.Option(help="Score answers that know nothing of the problem, too.")] = True,
    embed: Annotated[
        Path | None,
        typer.Option(help="Checkpoint whose hidden states say which answers are alike; their letters by default."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    max_batch: MaxBatch = 64,
    right: Annotated[
        Path | None, typer.Option(help="Also write the right answers there, as conversations for stretto sft --data.")
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            help="Address of who rates open-ended answers, http://…/v1; not the judge that rewarded the model."
        ),
    ] = None,
    human: Annotated[
        Path | None, typer.Option(help="Texts that people have written, to say what open-ended answers overuse.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Have a checkpoint answer problems: scores with intervals, beside their cost and what knowing nothing scores."""
    from stretto.api.evaluate import eval_command, options, presets_command
    from stretto.harness.suites import SUITES as HARNESSES
    from stretto.harness.suites import check_installed, harness_names
    from stretto.post.suite import parse_suites

    theirs, ours = harness_names(suite)
    if presets and (
        unused := [
            flag
            for flag, value in (("--subnet", subnet), ("--right", right), ("--judge", judge), ("--human", human))
            if value is not None
        ]
    ):
        raise UserError(f"{unused[0]}: is of one size; leave out --presets")
    if theirs and not ours:
        flags = {"--right": right, "--judge": judge, "--human": human, "--embed": embed}
        if unused := [flag for flag, value in flags.items() if value is not None]:
            raise UserError(f"{unused[0]}: is of answers, which other harnesses do not keep; leave it out")
    if presets and theirs:
        raise UserError(f"--suite {theirs[0]}: is asked one size at a time; leave out --presets, give --subnet")
    check_installed(theirs)
    told = options(
        samples=samples,
        limit=limit,
        temperature=temperature,
        seed=seed,
        baselines=baselines,
        embed=embed,
        max_batch=max_batch,
    )
    if presets:
        presets_command(source, ours, out, told, device)
        return
    if ours:
        eval_command(source, parse_suites(ours, HARNESSES), out, told, subnet, device, judge, human)
    if theirs:
        from stretto.api.evaluate import harness_command

        harness_command(source, theirs, out / "harness" if ours else out, told, subnet, device)
    if right is not None:
        from stretto.post.suite import write_right_answers

        sys.stdout.write(f"{write_right_answers(out, right):,} right answers: {right}\n")


def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Evaluations, runs or checkpoints, PATH or PATH:SUBNET, in the order of their making.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write, missing evaluations included.")],
    teacher: Annotated[
        list[str], typer.Option(help="DOMAIN=PATH, for the share of its lead that each model has.", show_default=False)
    ] = [],  # noqa: B006
    reference: Annotated[
        str | None, typer.Option(help="The model that the others are compared with; the first if left out.")
    ] = None,
    battle: Annotated[
        bool,
        typer.Option(
            "--battle", help="Also let their answers meet, two at a time, before the judge of a judged suite."
        ),
    ] = False,
    suite: Suites = [],  # noqa: B006
    samples: Samples = 4,
    limit: Limit = None,
    max_batch: MaxBatch = 64,
    device: Device = "auto",
) -> None:
    """The seesaw: every domain of every model, with paired differences to one of them and to the teachers."""
    from stretto.api.evaluate import compare_command, options

    told = options(samples=samples, limit=limit, max_batch=max_batch)
    compare_command(models, teacher, suite, out, told, device, reference, battle)


def online(
    recipe: Recipe,
    model: Annotated[Path | None, typer.Option(help="Run or checkpoint to begin with.")] = None,
    self_teacher: Annotated[
        bool,
        typer.Option(
            "--self-teacher", help="Let the start teach the verifiable sources, so that they are not unlearnt."
        ),
    ] = False,
    out: RunOut = None,
    settings: Settings = [],  # noqa: B006
    resume: Resume = False,
    device: Device = "auto",
    wandb: Wandb = None,
) -> None:
    """Reinforcement learning on open-ended prompts, by a judge and by rewards of whole groups."""
    from stretto.base.config import read_recipe
    from stretto.learning.recipe import RlRecipe

    parsed = read_recipe(recipe, RlRecipe, settings)
    from stretto.api.rl import online_command

    folder = out or Path("runs") / recipe.stem
    online_command(parsed, folder, model, self_teacher=self_teacher, resume=resume, device=device, wandb_project=wandb)


def distill(
    recipe: Recipe,
    model: Annotated[Path | None, typer.Option(help="Run or checkpoint of the student.")] = None,
    subnet: Annotated[
        str | None,
        typer.Option(
            help="Cut this size out of --model for a student; without --teacher, all of --model teaches it everything."
        ),
    ] = None,
    teacher: Annotated[
        list[str],
        typer.Option(
            help="NAME=DIR, NAME=DIR:SUBNET (part of a checkpoint) or NAME=URL (a server); NAME is the source that it teaches, "
            "unless the recipe's [distill.teachers.NAME] says which."
        ),
    ] = [],  # noqa: B006 - typer reads it once, as below
    out: RunOut = None,
    settings: Settings = [],  # noqa: B006
    resume: Resume = False,
    device: Device = "auto",
    wandb: Wandb = None,
) -> None:
    """Distil teachers into a student on what the student itself samples."""
    from stretto.base.config import read_recipe
    from stretto.learning.recipe import RlRecipe
    from stretto.post.distill import parent_settings, teacher_settings

    parents = parent_settings(model) if subnet is not None and model is not None and not teacher else []
    parsed = read_recipe(recipe, RlRecipe, [*parents, *teacher_settings(teacher), *settings])

    from stretto.api.rl import distill_command

    folder = out or Path("runs") / recipe.stem
    distill_command(parsed, folder, model, subnet=subnet, resume=resume, device=device, wandb_project=wandb)


def run(
    recipe: Recipe,
    model: Annotated[
        Path | None, typer.Option(help="Run or checkpoint to begin with; not where the recipe has a start of its own.")
    ] = None,
    out: RunOut = None,
    first: Annotated[
        str | None,
        typer.Option(
            "--from", help="Do this stage and all after it again: sft, experts, distill, online, controls or evaluate."
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print commands, tokens, FLOPs and hours, and do nothing.")
    ] = False,
    price: Annotated[float | None, typer.Option(help="Of an hour of a device, for --dry-run.")] = None,
    settings: Settings = [],  # noqa: B006 - typer reads it once
    device: Device = "auto",
) -> None:
    """Run a whole post-training: SFT, an expert for each domain, one student of them all, online RL; again, it goes on."""
    from stretto.api.pipeline import run_command

    run_command(
        recipe,
        out or Path("runs") / recipe.stem,
        model,
        settings,
        first=first,
        until=until,
        dry_run=dry_run,
        price=price,
        device=device,
    )
