"""The commands from text to an exported model, its report and its cost. They import their stages late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Option

import stretto
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder, quoted
from stretto.base.track import wide_console
from stretto.cli.launch import launch, without_launch
from stretto.cli.options import (
    Data,
    Device,
    Force,
    Launch,
    MaxRestarts,
    OptionalOut,
    Out,
    Recipe,
    ResumeOrBegin,
    RunFolder,
    RunOut,
    Settings,
    Source,
    Steps,
    TextField,
    Val,
    ValFraction,
    Vocabulary,
    Wandb,
    check_ending,
    check_exists,
    removing_unfinished,
    say,
)
from stretto.text import VOCAB_SIZE


def pretrain(
    recipe: Recipe,
    data: Data = [],
    # not --run: torchrun reads it as its own --run-path
    out: RunOut = None,
    val: Val = None,
    val_fraction: ValFraction = None,
    text_field: TextField = "text",
    tokenizer: Vocabulary = None,
    origin: Annotated[Path | None, Option("--from")] = None,
    steps: Steps = None,
    settings: Settings = [],
    resume: ResumeOrBegin = False,
    device: Device = "auto",
    wandb: Wandb = None,
    ranks: Launch = None,
    max_restarts: MaxRestarts = 20,
) -> None:
    """Pre-train an elastic network on text, from random weights or from a checkpoint.

    Reads a recipe and text; writes a run folder with token shards, snapshots, metrics and a checkpoint.

    Args:
        origin: Run or checkpoint whose network and tokenizer to continue from; the recipe's [model] is then not read.
    """
    options = without_launch(locals())
    from stretto.base.config import overriding, read_recipe
    from stretto.train.recipe import Recipe as PretrainRecipe

    if origin is None and not resume:  # otherwise the network's description comes from another checkpoint
        # a bad recipe is refused before torch is imported
        options["recipe"] = read_recipe(recipe, PretrainRecipe, overriding(settings, {"train.steps": steps}))
    if ranks is not None:
        parsed = options["recipe"]
        launch(ranks, max_restarts, device, parsed.train.ep if isinstance(parsed, PretrainRecipe) else 1)
    result = stretto.pretrain(**options | {"out": out or Path("runs") / recipe.stem})
    _say_next(result.given)


def adopt(
    source: str,
    out: Out,
    dtype: str = "auto",
    order: str = "reap",
    layer_order: str = "leave-one-out",
    calibration: list[str] = [],
    calibration_tokens: int = 32_768,
    text_field: TextField = "text",
    experts: int | None = None,
    top_k: int | None = None,
    method: str = "split",
    shared: int | None = None,
    parent_flops: float | None = None,
    parent_tokens: float | None = None,
) -> None:
    """Import a Hugging Face or GGUF checkpoint as a run that can be searched, extracted and served at every size.

    Weights are streamed, so the checkpoint may be larger than memory. Writes a run folder.

    Args:
        source: Checkpoint folder, run, GGUF file, smollm2 (a Python package), or a name on the hub such as Qwen/Qwen3-30B-A3B.
        out: Run folder to write.
        dtype: Data type to write: float32, bfloat16, float16, or auto (the source's own).
        order: Criterion for ranking experts: reap (router-weighted activation norm), removal (change in the layer's output without
            the expert; slower), frequency, or none (no measurement).
        layer_order: Criterion for ranking layers: leave-one-out (change in logits without the layer), or influence (faster).
        calibration: Calibration text, PATH@WEIGHT in a mixture. Default: text that every Python installation has.
        calibration_tokens: Number of calibration tokens.
        experts: Number of experts to upcycle a dense network to, without changing its function.
        top_k: With --experts: experts per token. Default: about half of the routed experts, or 2 with --method copy.
        method: With --experts: split (same size) or copy (larger).
        shared: With --experts: number of experts that every token uses. Default: 1.
        parent_flops: Training cost of the source in FLOPs, for the ledger. Default: unknown.
        parent_tokens: Training tokens of the source, for the ledger: 15e12. Default: unknown.
    """
    options = locals()
    result = removing_unfinished(stretto.adopt)(**options)
    from stretto.api.train import command_to_try
    from stretto.train.run_folder import read_info

    for name, subnet in result.subnets.items():
        say(f"{name}: {subnet.label()}")
    run = result.given
    text = "" if read_info(run).data is not None else " --data …"  # without text of its own, a search needs some
    say(
        f"checkpoint: {checkpoint_folder(run)}\nnext: {command_to_try(run)}; "
        f"stretto elasticize {quoted(run)} --data …; stretto search {quoted(run)}{text}"
    )


def elasticize(
    source: Source,
    data: Data = [],
    out: OptionalOut = None,
    val: Val = None,
    val_fraction: ValFraction = None,
    text_field: TextField = "text",
    recipe: Path = Path("elasticize"),
    teacher: Path | None = None,
    cache_logits: int | None = None,
    trainable: str | None = None,
    steps: Steps = None,
    settings: Settings = [],
    resume: ResumeOrBegin = False,
    device: Device = "auto",
    ranks: Launch = None,
    max_restarts: MaxRestarts = 20,
) -> None:
    """Train a checkpoint further so that its smaller sizes work too, with the unchanged checkpoint as teacher.

    Reads a run or checkpoint and text; writes a run folder, or trains an adopted run in place.

    Args:
        out: New run folder. Default: the adopted run itself, whose original checkpoint moves to adopted/.
        recipe: Recipe: a TOML file, or the name of a shipped recipe.
        teacher: Run or checkpoint to distil from. Default: the unchanged source.
        cache_logits: Number of the teacher's log-probabilities per token to keep on disk, so that the teacher need not stay in
            memory.
        trainable: Weights to train: all, or routers (routers, norms and biases only, with less memory).
    """
    options = without_launch(locals())
    from stretto.base.config import overriding, read_recipe
    from stretto.train.recipe import ElasticizeRecipe

    keys = {"trainable": trainable, "cached_logits": cache_logits, "train.steps": steps}
    options["recipe"] = read_recipe(recipe, ElasticizeRecipe, overriding(settings, keys))
    if ranks is not None:
        launch(ranks, max_restarts, device, options["recipe"].train.ep)
    result = stretto.elasticize(**options)
    _say_next(result.given)


def tokenize(
    data: Annotated[list[str], Option()],
    out: Out,
    val: Val = None,
    val_fraction: ValFraction = None,
    text_field: TextField = "text",
    tokenizer: Vocabulary = None,
    vocab_size: Annotated[int | None, Option(show_default=str(VOCAB_SIZE))] = None,
) -> None:
    """Turn text into token shards in constant memory. Resumes when it is started again.

    Reads text; writes a data folder that --data of other commands takes.

    Args:
        data: Text: one file, folder or Hugging Face dataset. For a mixture, tokenise each source into a folder of its own with the
            same --tokenizer; then name the folders in --data of the training command.
        out: Data folder to write.
        vocab_size: Vocabulary size of the tokenizer that is trained.
    """
    options = locals()
    folder = stretto.tokenize(**options)
    from stretto.data.shards import read_manifest

    manifest = read_manifest(folder)
    say(f"{manifest.num_tokens:,} tokens of {manifest.num_documents:,} documents in {out}")


def latency(run: RunFolder, device: Device = "auto") -> None:
    """Measure this machine's latency table, which lets the search keep a limit in milliseconds.

    Reads a run; writes latency.json into it.
    """
    stretto.latency(run, device=device)


def search(
    run: RunFolder,
    data: list[str] = [],
    val: Val = None,
    val_fraction: ValFraction = None,
    text_field: TextField = "text",
    max_total: float | None = None,
    max_active: float | None = None,
    max_latency_ms: float | None = None,
    heal_steps: int = 0,
    heal_recipe: Path = Path("heal"),
    nested: bool = False,
    per_layer: bool = False,
    seed: int = 0,
    device: Device = "auto",
) -> None:
    """Find the sub-network of lowest held-out loss within limits on memory, compute and latency.

    Reads a run; writes search.json into it.

    Args:
        data: Text to measure the loss of Subnets on. Repeat the option for a mixture: PATH@WEIGHT. Default: the held-out text
            of the run.
        max_total: Largest share of the full network's parameters, 0 to 1 (memory).
        max_active: Largest share of the active parameters, 0 to 1 (compute).
        max_latency_ms: Most milliseconds per decoding step, by the latency table.
        heal_steps: Healing steps for each of the best few before the choice; 0: none.
        heal_recipe: Recipe of that healing.
        nested: Drop layers in the order of training only.
        per_layer: Let the number of experts differ by layer; few families can export that.
        seed: Random seed of the search.
    """
    limits = locals()
    from stretto.base.config import validate_options
    from stretto.subnets.search import SearchOptions

    options = validate_options(SearchOptions, {"seed": limits.pop("seed")})
    found = stretto.search(limits.pop("run"), options=options, **limits)
    for line in found.result.summary():
        say(line)
    say(f"next: stretto extract {quoted(run)} --subnet best -o OUT")


def extract(
    source: Source,
    subnet: Annotated[str, Option()],
    out: Out,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Write one size of a network as an ordinary checkpoint. Refuses unless its logits agree with those of the masked network up to rounding.

    Reads a run or checkpoint; writes a checkpoint folder.

    Args:
        subnet: Size: a preset, best (the search's choice), or layers=…,experts=…,top_k=….
        out: Checkpoint folder to write.
    """
    check_exists(source)
    from stretto.api.search import extract_command

    extracted = removing_unfinished(extract_command)(source, subnet, out, device, force)
    say(
        f"{out}: {extracted.num_tokens} tokens compared, logits differ by {extracted.difference:.1e} (tolerance {extracted.tolerance:.1e})"
    )
    say(f"next: stretto heal {quoted(out)} --data … -o HEALED")


def heal(
    source: Path,
    out: Out,
    data: Data = [],
    val: Val = None,
    val_fraction: ValFraction = None,
    text_field: TextField = "text",
    recipe: Path = Path("heal"),
    teacher: Path | None = None,
    steps: Steps = None,
    settings: Settings = [],
    resume: ResumeOrBegin = False,
    force: Force = False,
    device: Device = "auto",
    ranks: Launch = None,
    max_restarts: MaxRestarts = 20,
) -> None:
    """Train an extracted checkpoint for a short while, on text and towards the network that it was cut from.

    Reads the checkpoint and text; writes a checkpoint folder, and the run's files to OUT.run.

    Args:
        source: Extracted checkpoint folder.
        out: Checkpoint folder to write.
        recipe: Recipe: a TOML file, or the name of a shipped recipe.
        teacher: Run or checkpoint to distil from. Default: the one it was cut from.
    """
    options = without_launch(locals())
    from stretto.base.config import overriding, read_recipe
    from stretto.train.recipe import HealRecipe

    options["recipe"] = read_recipe(recipe, HealRecipe, overriding(settings, {"train.steps": steps}))
    if ranks is not None:
        launch(ranks, max_restarts, device, options["recipe"].train.ep)
    result = stretto.heal(options.pop("source"), **options)
    say(f"checkpoint: {checkpoint_folder(result.given)}")


def quantise(
    source: Source,
    out: Out,
    dtype: str = "int8",
    method: str = "rtn",
    experts: str | None = None,
    attention: str | None = None,
    head: str | None = None,
    group: int = 32,
    zeros: bool = False,
    data: list[str] = [],
    calibration_tokens: int = 16_384,
    chat: bool = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Quantise a checkpoint to integer weights. Every size can be used from the result.

    Reads a run or checkpoint, and text with --method gptq; writes a checkpoint folder.

    Args:
        out: Checkpoint folder to write.
        dtype: Integers of experts and attention: int8 or int4.
        method: Method: rtn (rounding to nearest) or gptq (later weights compensate the errors on calibration text; slower).
        experts: Integers of all feed-forward weights: int8, int4 or none. Default: --dtype.
        attention: Integers of attention's projections: int8, int4 or none. Default: --dtype.
        head: Integers of the output matrix: int8, int4 or none. Default: int8.
        group: Number of neighbouring inputs with one scale.
        zeros: Give each int4 group a zero point.
        data: Calibration text for gptq, PATH@WEIGHT in a mixture. Default: the training text of the run.
        calibration_tokens: Number of calibration tokens.
        chat: The records of --data are conversations, as for stretto sft.
    """
    options = locals()
    check_exists(source)
    written = removing_unfinished(stretto.quantise)(options.pop("source"), **options).given
    from stretto.api.train import command_to_try

    say(f"checkpoint: {written}")
    say(f"next: {command_to_try(written)}; stretto extract {quoted(written)} --subnet PRESET -o SMALL")


def export(
    source: Source,
    out: Out,
    family: str | None = None,
    dtype: str = "float32",
    gguf: bool = False,
    force: Force = False,
) -> None:
    """Write a checkpoint for other software: transformers, vLLM and SGLang, or llama.cpp.

    Reads a run or checkpoint; writes a Hugging Face folder or a GGUF file.

    Args:
        out: Folder to write, or file with --gguf.
        family: Architecture on disk (docs/FORMATS.md). Default: the checkpoint's own, or one that can hold the network. Not with
            --gguf.
        dtype: Data type: float32, bfloat16, float16; with --gguf also q8_0 and q4_0.
        gguf: Write a GGUF file for llama.cpp.
    """
    check_exists(source)
    from stretto.api.model import Model

    removing_unfinished(Model(source).export)(out, family=family, dtype=dtype, gguf=gguf, force=force)
    say(f"written: {out}")


Controls = Annotated[
    list[Path],
    Option(
        "--control",
        help="Run of a network of the same shape trained without smaller sizes, to report the tax. Default: every such run in the folder that contains RUN.",
    ),
]


def report(run: RunFolder, control: Controls = []) -> None:
    """Draw the results of a run. Writes report/report.html and its pictures into the run folder."""
    say(f"report: {stretto.write_report(run, controls=control)}")


def cost(folder: list[Path], control: Controls = []) -> None:
    """Print what a model cost: alone, with its parents, and as a family against training each size separately.

    Args:
        folder: Checkpoint or run folders; several are shown as a family.
    """
    found = stretto.cost(folder, controls=control)
    for part in found.parts():
        if isinstance(part, str):
            say(part)
        else:
            wide_console().print(part)


def plan(
    recipe: Recipe,
    gpus: Annotated[str, Option()],
    model: Path | None = None,
    sweep: bool = False,
    price: float | None = None,
    answer_tokens: float | None = None,
    prompt_tokens: int | None = None,
    verdict_s: float = 0.0,
    verifiers: int | None = None,
    settings: Settings = [],
    out: OptionalOut = None,
    as_json: Annotated[bool, Option("--json")] = False,
) -> None:
    """Predict whether a run fits on a cluster, how fast it is, what limits it, and what it costs.

    Reads a recipe of pretrain, elasticize or rl. RL is simulated with the real controller. Nothing is started, and no GPU is needed.

    Args:
        gpus: Number and kind of accelerators: 64xH100. 2xcpu: two cores.
        model: Run or checkpoint that an RL run begins with (default: the recipe's [start]) or that is elasticized (required).
        sweep: Try all layouts, and show the best few. Not for elasticize.
        price: Dollars of one accelerator for one hour.
        answer_tokens: RL: mean number of sampled tokens of an answer. Default: rollout.max_tokens.
        prompt_tokens: RL: tokens of a prompt. Default: train.seq_len minus rollout.max_tokens.
        verdict_s: RL: mean time of a verdict, in seconds.
        verifiers: RL: number of answers judged at once. Default: runtime.rewards.max.
        out: Figure (.png) or page (.html) to write.
        as_json: Print all figures as JSON.
    """
    options = locals()
    if out is not None:
        check_ending(out, ".png", ".html")
    from stretto.base.config import validate_options
    from stretto.planner.rl import Workload

    workload = validate_options(Workload, {name: options[name] for name in Workload.model_fields})
    found = stretto.plan(recipe, gpus, model=model, sweep=sweep, price=price, workload=workload, settings=settings)
    if as_json:
        say(json.dumps(found.tree(), indent=1))
    else:
        wide_console().print(found.table)
    if out is not None:
        from stretto.report.plan import write_plan

        write_plan(found, out)


def demo(
    out: OptionalOut = None,
    smol: bool = False,
    post: bool = False,
    resume: Annotated[bool, Option("--resume/--fresh")] = True,
) -> None:
    """Pre-train a network on real text, search, extract, heal and export its best small size, and write a report.

    Reads the text of this Python installation and generated exercises. Writes everything to the run folder.

    Args:
        out: Run folder. Default: runs/demo, or runs/demo-smol with --smol.
        smol: Use a real chat model from a Python package: SmolLM2-135M-Instruct.
        post: Post-train the small model of the demo; the demo runs first where it has not ended.
        resume: Resume after the last finished stage, or empty the run folder, which a demo made, and start over.
    """
    if smol and post:
        raise UserError("--post: cannot be combined with --smol; leave one of them out")
    from stretto.api.demo import demo_command, demo_smol_command

    if smol:
        demo_smol_command(out or Path("runs/demo-smol"), fresh=not resume)
        return
    demo_command(out or Path("runs/demo"), fresh=not resume, post=post)


def _say_next(run: Path) -> None:
    """Print the path of the checkpoint and the next commands, with limits of the search that the network can meet."""
    from stretto.model.checkpoint import read_config
    from stretto.subnets.space import reachable_limits

    folder = checkpoint_folder(run)
    limits = reachable_limits(read_config(folder))
    options = f"--max-total {limits.max_total} --max-active {limits.max_active}"
    say(f"checkpoint: {folder}\nnext: stretto latency {quoted(run)}; stretto search {quoted(run)} {options}")
