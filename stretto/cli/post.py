"""The commands of post-training and evaluation. They import their stages late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

import stretto
from stretto.base.paths import RUN_FILE, checkpoint_folder, quoted
from stretto.cli.launch import launch, without_launch
from stretto.cli.options import (
    Device,
    Force,
    Launch,
    MaxRestarts,
    Out,
    Recipe,
    Resume,
    ResumeOrBegin,
    RunOut,
    Settings,
    Source,
    Start,
    Steps,
    Wandb,
    removing_unfinished,
    say,
)


def sft(
    recipe: Recipe,
    model: Path | None = None,
    data: list[str] = [],
    out: RunOut = None,
    val: str | None = None,
    val_fraction: float | None = None,
    lora: int | None = None,
    adapter: Path | None = None,
    keep_adapter: bool = False,
    steps: Steps = None,
    settings: Settings = [],
    resume: ResumeOrBegin = False,
    device: Device = "auto",
    wandb: Wandb = None,
    ranks: Launch = None,
    max_restarts: MaxRestarts = 20,
) -> None:
    """Train a checkpoint on conversations (supervised fine-tuning): every weight or adapters, one size or all sizes.

    Reads a checkpoint and conversations; writes a run folder.

    Args:
        model: Run or checkpoint to train. Default: a new network, by the [start.model] of an RL recipe.
        data: Conversations (messages, or prompt and completion; tools): a JSONL or Parquet file, a folder of them, or a Hugging
            Face dataset. Repeat the option for a mixture: PATH@WEIGHT. Not needed with --resume. Default: demonstrations from
            the sources of an RL recipe, as many as its [start] asks for.
        val: Held-out conversations, in the same forms as --data. Default: a part of the data.
        val_fraction: Share of the data to hold out, 0 to 0.5. Default: 0.01, up to 0.1 of little data.
        lora: Rank of LoRA adapters to train instead of every weight.
        adapter: PEFT folder with adapters to continue from.
        keep_adapter: Also write the adapters alone, in PEFT's format, to adapter/.
    """
    options = without_launch(locals())
    if ranks is not None:
        launch(ranks, max_restarts, device)
    result = stretto.sft(**options)
    from stretto.api.train import command_to_try

    run = result.given
    hint = f"stretto report {quoted(run)}; " if (run / RUN_FILE).is_file() else ""  # a start of RL has none
    say(f"checkpoint: {checkpoint_folder(run)}\nnext: {hint}{command_to_try(run)}")


def merge(
    method: str,
    models: list[Path],
    out: Out,
    base: Path | None = None,
    weights: str | None = None,
    scale: float = 1.0,
    density: float = 0.5,
    t: float = 0.5,
    seed: int = 0,
    force: Force = False,
) -> None:
    """Merge checkpoints that were trained from the same one, with the methods of mergekit, a layer in memory at a time.

    Reads runs or checkpoints; writes a checkpoint folder.

    Args:
        method: Method: average, task-arithmetic, ties, dare, dare-ties or slerp.
        models: Runs or checkpoints of one network.
        out: Checkpoint folder to write.
        base: Run or checkpoint that all were trained from; average and slerp do not need it.
        weights: Weight of each model, separated by commas. Default: 1 each.
        scale: Factor λ of what is added to the base.
        density: ties and dare: share of each difference that is kept, 0 to 1.
        t: slerp: position between the first model (0) and the second (1).
        seed: dare: random seed.
    """
    each = [part.strip() for part in weights.split(",")] if weights is not None else []
    values = {"scale": scale, "density": density, "t": t, "seed": seed}
    result = removing_unfinished(stretto.merge)(method, models, out, base=base, weights=each, force=force, **values)
    say(f"checkpoint: {checkpoint_folder(result.given)}")


Suites = Annotated[
    list[str],
    Option(
        "--suite",
        help="Suites, separated by commas: gym, tools, code, service, sheets, search, writing, chapters; math, aime, mcq, gpqa or "
        "mmlu_pro with a file, NAME=FILE (docs/EVAL.md); tau, bfcl (docs/HARNESSES.md); FILE.toml with such tables, or an RL recipe.",
        show_default=False,
    ),
]
Samples = Annotated[
    int | None, Option(help="Number of samples per problem. Default: 1 for greedy decoding, otherwise 4.")
]
Limit = Annotated[int | None, Option(help="Number of problems per domain. Default: the number that the suite sets.")]
MaxBatch = Annotated[int, Option(help="Batch size: answers generated at once.")]


def evaluate(
    source: Source,
    suite: Suites,
    out: Out,
    samples: Samples = None,
    limit: Limit = None,
    subnet: str | None = None,
    presets: bool = False,
    temperature: float | None = None,
    baselines: bool = True,
    seed: int = 0,
    max_batch: MaxBatch = 64,
    right: Path | None = None,
    judge: str | None = None,
    human: Path | None = None,
    device: Device = "auto",
) -> None:
    """Evaluate a checkpoint on benchmark suites. Reports scores with 95 % confidence intervals, cost, and a trivial baseline.

    Reads a run or checkpoint; writes eval.json, every answer, and a report.

    Args:
        out: Folder to write; an evaluation there is resumed.
        subnet: Size: a preset, best, or layers=…,experts=…,top_k=…. Default: the full network.
        presets: Evaluate every named size and compare them, as stretto compare does.
        temperature: Sampling temperature; 0: greedy decoding. Default: the suite's own.
        baselines: Also score a trivial baseline.
        seed: Random seed.
        right: File to write correct answers to, as conversations for stretto sft --data.
        judge: URL of an LLM judge for open-ended answers, http://…/v1; not the judge that rewarded the model.
        human: File of human-written texts. The report lists the word trigrams that open-ended answers use more often.
    """
    options = locals()
    stretto.evaluate(options.pop("source"), options.pop("suite"), **options)


def compare(
    models: list[str],
    out: Out,
    teacher: list[str] = [],
    reference: str | None = None,
    battle: bool = False,
    suite: list[str] = [],
    samples: Samples = None,
    limit: Limit = None,
    max_batch: MaxBatch = 64,
    device: Device = "auto",
) -> None:
    """Compare models per domain: paired differences to a reference model and to the teachers.

    Reads evaluations, or makes them; writes comparison.json and a report.

    Args:
        models: Evaluations, runs or checkpoints, PATH or PATH:SUBNET, in the order of training.
        out: Folder to write, with the evaluations that are missing.
        teacher: Teacher of a domain, DOMAIN=PATH, for the normalised score.
        reference: Model that the others are compared with. Default: the first.
        suite: Suites for models that have no evaluation yet, in the forms of stretto eval --suite, except tau and bfcl: run
            stretto eval with these first.
        battle: Also report win rates. The LLM judge of each suite that has one compares the answers.
    """
    options = locals()
    stretto.compare(suites=options.pop("suite"), teachers=options.pop("teacher"), **options)


def online(
    recipe: Recipe,
    model: Start = None,
    self_teacher: bool = False,
    out: RunOut = None,
    settings: Settings = [],
    resume: Resume = False,
    device: Device = "auto",
    wandb: Wandb = None,
) -> None:
    """Train with reinforcement learning on open-ended prompts, rewarded by an LLM judge and over whole groups.

    Reads a recipe and a checkpoint; writes a run folder as stretto rl does.

    Args:
        self_teacher: Distil the start on the verifiable sources, so that skills are kept.
    """
    options = locals()
    from stretto.base.config import read_recipe
    from stretto.learning.recipe import RlRecipe
    from stretto.model.headers import check_files

    read_recipe(recipe, RlRecipe, settings)  # before torch is imported, which takes seconds
    if model is not None:
        check_files(model)
    stretto.online(**options)


def distill(
    recipe: Recipe,
    model: Path | None = None,
    subnet: str | None = None,
    teacher: list[str] = [],
    out: RunOut = None,
    settings: Settings = [],
    resume: Resume = False,
    device: Device = "auto",
    wandb: Wandb = None,
) -> None:
    """Distil teachers into a student on-policy: the student samples, and the teacher of each source scores its tokens.

    Reads a recipe, the student and teachers; writes a run folder as stretto rl does.

    Args:
        model: Run or checkpoint of the student.
        subnet: Size to cut out of --model as the student; without --teacher, the whole of --model teaches every source.
        teacher: Teacher: NAME=DIR, NAME=DIR:SUBNET (one size of a checkpoint) or NAME=URL (a server). NAME is the source that
            it teaches, unless the recipe's [distill.teachers.NAME] lists others.
    """
    options = locals()
    from stretto.model.headers import check_files
    from stretto.post.distill import teacher_settings

    teacher_settings(teacher)  # before torch is imported, which takes seconds
    if model is not None:
        check_files(model)
    stretto.distill(teachers=options.pop("teacher"), **options)


def run(
    recipe: Recipe,
    model: Path | None = None,
    out: RunOut = None,
    first: Annotated[str | None, Option("--from")] = None,
    until: str | None = None,
    dry_run: bool = False,
    price: float | None = None,
    settings: Settings = [],
    device: Device = "auto",
) -> None:
    """Run a whole post-training: SFT, an expert for each domain, one distilled student, online RL, evaluation.

    Reads a pipeline recipe; writes a folder per stage. Started again, it resumes.

    Args:
        model: Run or checkpoint to begin with; not needed where the recipe has a start of its own.
        first: First stage to repeat, with all after it: sft, experts, distill, online, controls or evaluate.
        until: Last stage to run.
        dry_run: Print commands, tokens, FLOPs and hours, and do nothing.
        price: Price of one device for one hour, in any currency, for --dry-run. Default: no cost is printed.
    """
    options = locals()
    stretto.run(**options)
