"""The commands of post-training and evaluation. They import their stages late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import stretto
from stretto.cli.launch import launch, without_launch
from stretto.cli.options import (
    Device,
    Force,
    Launch,
    MaxRestarts,
    Recipe,
    Resume,
    ResumeOrBegin,
    RunOut,
    Settings,
    Source,
    Start,
    Steps,
    Wandb,
    say,
)


def sft(
    recipe: Recipe,
    model: Annotated[
        Path | None,
        Option(help="Run or checkpoint to train. Default: a new network, by the [start.model] of an RL recipe."),
    ] = None,
    data: Annotated[
        list[str],
        Option(
            help="Conversations (messages, or prompt and completion; tools): a JSONL or Parquet file, a folder of them, or a "
            "Hugging Face dataset. Repeat the option for a mixture: PATH@WEIGHT. Default: demonstrations from the sources of an RL "
            "recipe, as many as its [start] asks for.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 - typer reads it once
    out: RunOut = None,
    val: Annotated[
        str | None,
        Option(help="Held-out conversations, in the same forms as --data. Default: a part of the data."),
    ] = None,
    val_fraction: Annotated[
        float | None,
        Option(help="Share of the data to hold out, 0 to 0.5. Default: 0.01, up to 0.1 of little data."),
    ] = None,
    lora: Annotated[int | None, Option(help="Rank of LoRA adapters to train instead of every weight.")] = None,
    adapter: Annotated[Path | None, Option(help="PEFT folder with adapters to continue from.")] = None,
    keep_adapter: Annotated[
        bool, Option("--keep-adapter", help="Also write the adapters alone, in PEFT's format, to adapter/.")
    ] = False,
    steps: Steps = None,
    settings: Settings = [],  # noqa: B006
    resume: ResumeOrBegin = False,
    device: Device = "auto",
    wandb: Wandb = None,
    ranks: Launch = None,
    max_restarts: MaxRestarts = 20,
) -> None:
    """Train a checkpoint on conversations (supervised fine-tuning): every weight or adapters, one size or all sizes.

    Reads a checkpoint and conversations; writes a run folder.
    """
    options = without_launch(locals())
    if ranks is not None:
        launch(ranks, max_restarts, device)
    result = stretto.sft(**options)
    hint = f"stretto report {result.source}; " if data else ""
    say(f"checkpoint: {result.folder}\nnext: {hint}stretto chat {result.source}")


def merge(
    method: Annotated[
        str,
        Argument(help="Method: average, task-arithmetic, ties, dare, dare-ties or slerp.", show_default=False),
    ],
    models: Annotated[list[Path], Argument(help="Runs or checkpoints of one network.", show_default=False)],
    out: Annotated[Path, Option("-o", "--out", help="Checkpoint folder to write.")],
    base: Annotated[
        Path | None,
        Option(help="Run or checkpoint that all were trained from; average and slerp do not need it."),
    ] = None,
    weights: Annotated[str | None, Option(help="Weight of each model, separated by commas. Default: 1 each.")] = None,
    scale: Annotated[float, Option(help="Factor λ of what is added to the base.")] = 1.0,
    density: Annotated[float, Option(help="ties and dare: share of each difference that is kept, 0 to 1.")] = 0.5,
    t: Annotated[float, Option(help="slerp: position between the first model (0) and the second (1).")] = 0.5,
    seed: Annotated[int, Option(help="dare: random seed.")] = 0,
    force: Force = False,
) -> None:
    """Merge checkpoints that were trained from the same one, with the methods of mergekit, a layer in memory at a time.

    Reads runs or checkpoints; writes a checkpoint folder.
    """
    each = [part.strip() for part in weights.split(",")] if weights is not None else []
    values = {"scale": scale, "density": density, "t": t, "seed": seed}
    result = stretto.merge(method, models, out, base=base, weights=each, force=force, **values)
    say(f"checkpoint: {result.folder}")


Suites = Annotated[
    list[str],
    Option(
        "--suite",
        help="Suites, separated by commas: gym, tools, code, writing; math, aime, mcq, gpqa or mmlu_pro with a file, NAME=FILE "
        "(docs/EVAL.md); tau, bfcl (docs/HARNESSES.md); FILE.toml with such tables, or an RL recipe.",
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
    out: Annotated[Path, Option("-o", "--out", help="Folder to write; an evaluation there is resumed.")],
    samples: Samples = None,
    limit: Limit = None,
    subnet: Annotated[
        str | None,
        Option(help="Size: a preset, best, or layers=…,experts=…,top_k=…. Default: the full network."),
    ] = None,
    presets: Annotated[
        bool,
        Option("--presets", help="Evaluate every named size and compare them, as stretto compare does."),
    ] = False,
    temperature: Annotated[
        float | None, Option(help="Sampling temperature; 0: greedy decoding. Default: the suite's own.")
    ] = None,
    baselines: Annotated[bool, Option(help="Also score a trivial baseline.")] = True,
    embed: Annotated[
        Path | None,
        Option(
            help="Checkpoint whose hidden states measure the similarity of answers. Default: overlap of characters."
        ),
    ] = None,
    seed: Annotated[int, Option(help="Random seed.")] = 0,
    max_batch: MaxBatch = 64,
    right: Annotated[
        Path | None,
        Option(help="File to write correct answers to, as conversations for stretto sft --data."),
    ] = None,
    judge: Annotated[
        str | None,
        Option(help="URL of an LLM judge for open-ended answers, http://…/v1; not the judge that rewarded the model."),
    ] = None,
    human: Annotated[
        Path | None,
        Option(
            help="File of human-written texts. The report lists the word trigrams that open-ended answers use more often."
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Evaluate a checkpoint on benchmark suites. Reports scores with 95 % confidence intervals, cost, and a trivial baseline.

    Reads a run or checkpoint; writes eval.json, every answer, and a report.
    """
    options = locals()
    stretto.evaluate(options.pop("source"), options.pop("suite"), **options)


def compare(
    models: Annotated[
        list[str],
        Argument(
            help="Evaluations, runs or checkpoints, PATH or PATH:SUBNET, in the order of training.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, Option("-o", "--out", help="Folder to write, with the evaluations that are missing.")],
    teacher: Annotated[
        list[str],
        Option(help="Teacher of a domain, DOMAIN=PATH, for the normalised score.", show_default=False),
    ] = [],  # noqa: B006
    reference: Annotated[
        str | None, Option(help="Model that the others are compared with. Default: the first.")
    ] = None,
    battle: Annotated[
        bool,
        Option(
            "--battle", help="Also report win rates. The LLM judge of each suite that has one compares the answers."
        ),
    ] = False,
    suite: Suites = [],  # noqa: B006
    samples: Samples = None,
    limit: Limit = None,
    max_batch: MaxBatch = 64,
    device: Device = "auto",
) -> None:
    """Compare models per domain: paired differences to a reference model and to the teachers.

    Reads evaluations, or makes them; writes comparison.json and a report.
    """
    options = locals()
    stretto.compare(suites=options.pop("suite"), teachers=options.pop("teacher"), **options)


def online(
    recipe: Recipe,
    model: Start = None,
    self_teacher: Annotated[
        bool,
        Option("--self-teacher", help="Distil the start on the verifiable sources, so that skills are kept."),
    ] = False,
    out: RunOut = None,
    settings: Settings = [],  # noqa: B006
    resume: Resume = False,
    device: Device = "auto",
    wandb: Wandb = None,
) -> None:
    """Train with reinforcement learning on open-ended prompts, rewarded by an LLM judge and over whole groups.

    Reads a recipe and a checkpoint; writes a run folder as stretto rl does.
    """
    from stretto.base.config import read_recipe
    from stretto.learning.recipe import RlRecipe
    from stretto.model.headers import check_files

    read_recipe(recipe, RlRecipe, settings)  # before torch is imported, which takes seconds
    if model is not None:
        check_files(model)
    stretto.online(
        recipe, model, out, self_teacher=self_teacher, settings=settings, resume=resume, device=device, wandb=wandb
    )


def distill(
    recipe: Recipe,
    model: Annotated[Path | None, Option(help="Run or checkpoint of the student.")] = None,
    subnet: Annotated[
        str | None,
        Option(
            help="Size to cut out of --model as the student; without --teacher, the whole of --model teaches every source."
        ),
    ] = None,
    teacher: Annotated[
        list[str],
        Option(
            help="Teacher: NAME=DIR, NAME=DIR:SUBNET (one size of a checkpoint) or NAME=URL (a server). NAME is the source that it "
            "teaches, unless the recipe's [distill.teachers.NAME] lists others."
        ),
    ] = [],  # noqa: B006 - typer reads it once, as below
    out: RunOut = None,
    settings: Settings = [],  # noqa: B006
    resume: Resume = False,
    device: Device = "auto",
    wandb: Wandb = None,
) -> None:
    """Distil teachers into a student on-policy: the student samples, and the teacher of each source scores its tokens.

    Reads a recipe, the student and teachers; writes a run folder as stretto rl does.
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
    model: Annotated[
        Path | None,
        Option(help="Run or checkpoint to begin with; not needed where the recipe has a start of its own."),
    ] = None,
    out: RunOut = None,
    first: Annotated[
        str | None,
        Option(
            "--from",
            help="First stage to repeat, with all after it: sft, experts, distill, online, controls or evaluate.",
        ),
    ] = None,
    until: Annotated[str | None, Option(help="Last stage to run.")] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print commands, tokens, FLOPs and hours, and do nothing.")
    ] = False,
    price: Annotated[float | None, Option(help="Price of one hour of a device, for --dry-run.")] = None,
    settings: Settings = [],  # noqa: B006 - typer reads it once
    device: Device = "auto",
) -> None:
    """Run a whole post-training: SFT, an expert for each domain, one distilled student, online RL, evaluation.

    Reads a pipeline recipe; writes a folder per stage. Started again, it resumes.
    """
    options = locals()
    stretto.run(**options)
