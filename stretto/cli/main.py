"""The command line. Every command imports its stage late, so that ``stretto --help`` needs no torch."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import MutableMapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from stretto.base.errors import UserError
from stretto.base.paths import RECIPES, RUN_FILE
from stretto.cli.judge import judge
from stretto.cli.options import Device, Recipe, Resume, RunOut, Settings, Steps, Wandb
from stretto.cli.pictures import enhance, paint, studio
from stretto.cli.post import compare, distill, evaluate, merge, online, run, sft
from stretto.cli.rl import rl, top
from stretto.cli.serve import Source, agent, bench_serve, chat, generate, serve

app = typer.Typer(
    help="Train one Mixture-of-Experts language model that contains every smaller version of itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Data = Annotated[
    list[str],
    typer.Option(
        help="Text: a file, a folder of text, code, JSONL, CSV or Parquet, or a Hugging Face dataset. "
        "May be given again: PATH@WEIGHT in a mixture.",
        show_default=False,
    ),
]
Val = Annotated[str | None, typer.Option(help="Held-out text, in the forms of --data; a part of the data if left out.")]
ValFraction = Annotated[
    float | None, typer.Option(help="Share of the data to hold out; a hundredth, of little text up to a tenth.")
]
TextField = Annotated[str, typer.Option(help="The field that holds the text, in JSONL, CSV, Parquet and datasets.")]
VOCAB_SIZE = 8192
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]


@app.command()
def pretrain(
    recipe: Recipe,
    data: Data = [],  # noqa: B006 - typer reads it once
    # not --run: torchrun would take it for its own --run-path
    out: RunOut = None,
    val: Val = None,
    val_fraction: ValFraction = None,
    text_field: TextField = "text",
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json or its folder; trained if left out.")] = None,
    origin: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Run or checkpoint to go on from: its network and tokenizer; the recipe's [model] is not read.",
        ),
    ] = None,
    steps: Steps = None,
    settings: Settings = [],  # noqa: B006
    resume: Resume = False,
    device: Device = "auto",
    wandb: Wandb = None,
) -> None:
    """Pre-train an elastic network from text, from random weights or from a checkpoint."""
    from stretto.base.config import read_recipe
    from stretto.train.recipe import Recipe

    folder = out or Path("runs") / recipe.stem
    given = None
    if origin is not None or (resume and (folder / RUN_FILE).is_file()):
        from stretto.api.train import model_to_go_on_with

        given = model_to_go_on_with(folder, origin)
    parsed = read_recipe(recipe, Recipe, _with_steps(settings, steps), given)
    from stretto.api.train import pretrain_command
    from stretto.train.prepare import TextOptions

    text = TextOptions(val, val_fraction, text_field)
    made = pretrain_command(
        parsed, folder, data, tokenizer, origin, text=text, resume=resume, device=device, wandb_project=wandb
    )
    _say_next(folder, made)


@app.command()
def adopt(
    source: Annotated[
        str,
        typer.Argument(
            help="A checkpoint's folder, a run, a GGUF file, smollm2 (a package), or a name on the hub: Qwen/Qwen3-30B-A3B.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Run folder to make.")],
    dtype: Annotated[
        str,
        typer.Option(help="float32, bfloat16 or float16; auto: as it is, or what its quantised weights are read as."),
    ] = "auto",
    order: Annotated[
        str,
        typer.Option(
            help="What experts are kept by: reap (saliency), removal (what its absence changes on this text; slower), frequency; "
            "none: nothing is measured."
        ),
    ] = "reap",
    layer_order: Annotated[
        str,
        typer.Option(
            help="What layers are kept by: leave-one-out (the logits without each), or influence, for less work."
        ),
    ] = "leave-one-out",
    calibration: Annotated[
        list[str],
        typer.Option(
            help="Text to measure on, PATH@WEIGHT in a mixture; text that every machine has by default.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    calibration_tokens: Annotated[int, typer.Option(help="How much of it.")] = 32_768,
    text_field: TextField = "text",
    experts: Annotated[
        int | None, typer.Option(help="Of a dense network: cut or copy its feed-forward networks into so many experts.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="With --experts: chosen a token; about half of those that are not shared, or 2 copies."),
    ] = None,
    method: Annotated[str, typer.Option(help="With --experts: split (the same size) or copy (larger).")] = "split",
    shared: Annotated[int | None, typer.Option(help="With --experts: of these, how many every token uses; 1.")] = None,
    parent_flops: Annotated[
        float | None, typer.Option(help="What its training had cost, for the ledger; unknown if left out.")
    ] = None,
    parent_tokens: Annotated[float | None, typer.Option(help="The same in tokens: 15e12.")] = None,
) -> None:
    """Make a run of somebody's checkpoint, to search, cut and serve it in every size; it need not fit in memory."""
    from stretto.api.adopt import AdoptOptions, adopt_command, upcycling
    from stretto.base.config import validate

    told = {
        "dtype": dtype,
        "order": order,
        "layer_order": layer_order,
        "calibration": calibration,
        "calibration_tokens": calibration_tokens,
        "text_field": text_field,
        "upcycling": upcycling(experts, top_k, method, shared),
        "before": {"flops": _whole(parent_flops), "tokens": _whole(parent_tokens)},
    }
    made = adopt_command(source, out, validate(AdoptOptions, told, "stretto adopt"))
    for name, choice in {"full": None, **made.presets}.items():
        subnet = made.config.full() if choice is None else choice.of(made.config)
        _say(f"{name}: {subnet.label()}")
    _say(
        f"checkpoint: {made.folder}\nnext: stretto chat {out}; stretto elasticize {out} --data …; stretto search {out}"
    )


@app.command()
def elasticize(
    source: Annotated[Path, typer.Argument(help="Run or checkpoint.", show_default=False)],
    data: Data = [],  # noqa: B006
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="New run folder; left out, the adopted run's own: its checkpoint stays as adopted/."
        ),
    ] = None,
    val: Val = None,
    val_fraction: ValFraction = None,
    text_field: TextField = "text",
    recipe: Annotated[Path | None, typer.Option(help="A recipe (TOML); recipes/elasticize.toml by default.")] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="Run or checkpoint that teaches; the network itself, as it came, by default.")
    ] = None,
    cache_logits: Annotated[
        int | None,
        typer.Option(
            help="Keep so many of the teacher's log-probabilities a token on disk, and the teacher out of memory."
        ),
    ] = None,
    trainable: Annotated[
        str | None, typer.Option(help="all, or routers: only routers, norms and biases, in a fraction of the memory.")
    ] = None,
    steps: Steps = None,
    settings: Settings = [],  # noqa: B006
    resume: Resume = False,
    device: Device = "auto",
) -> None:
    """Train a checkpoint further so that smaller versions of it work too; it teaches them itself."""
    from stretto.base.config import read_recipe
    from stretto.train.recipe import ElasticizeRecipe

    told = settings + ([f"trainable={trainable}"] if trainable is not None else [])
    told += [f"cached_logits={cache_logits}"] if cache_logits is not None else []
    parsed = read_recipe(recipe or RECIPES / "elasticize.toml", ElasticizeRecipe, _with_steps(told, steps))
    from stretto.api.train import elasticize_command
    from stretto.train.prepare import TextOptions

    text = TextOptions(val, val_fraction, text_field)
    made = elasticize_command(parsed, source, data, teacher, out, text=text, resume=resume, device=device)
    _say_next(out or source, made)


@app.command()
def tokenize(
    data: Data,
    out: Annotated[Path, typer.Option("-o", "--out", help="Data folder to write.")],
    val: Val = None,
    val_fraction: ValFraction = None,
    text_field: TextField = "text",
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json or its folder; trained if left out.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Of a tokenizer that is trained.", show_default=str(VOCAB_SIZE))
    ] = None,
) -> None:
    """Turn text into token shards, in constant memory; killed, it goes on where it was."""
    if tokenizer is not None and vocab_size is not None:
        raise UserError(f"--vocab-size: {tokenizer} has a vocabulary already; leave --vocab-size or --tokenizer out")
    from stretto.train.prepare import TextOptions, tokenise_data

    text = TextOptions(val, val_fraction, text_field)
    manifest = tokenise_data(data, out, tokenizer, vocab_size or VOCAB_SIZE, text)
    _say(f"{manifest.num_tokens:,} tokens of {manifest.num_documents:,} documents in {out}")


@app.command()
def latency(
    run: RunFolder,
    device: Device = "auto",
    verify: Annotated[bool, typer.Option(help="Measure the presets and set the predictions beside them.")] = False,
) -> None:
    """Measure this machine's latency table for the search."""
    from stretto.api.search import latency_command, latency_errors

    latency_command(run, device)
    if verify:
        for name, error in latency_errors(run, device).items():
            _say(f"{name}: predicted {error:+.1%} off the measured time")


@app.command()
def search(
    run: RunFolder,
    data: Annotated[
        list[str], typer.Option(help="Text to measure on, instead of the run's own; PATH@WEIGHT in a mixture.")
    ] = [],  # noqa: B006
    val: Val = None,
    val_fraction: ValFraction = None,
    text_field: TextField = "text",
    max_total: Annotated[float | None, typer.Option(help="Share of the total parameters (memory).")] = None,
    max_active: Annotated[float | None, typer.Option(help="Share of the active parameters (compute).")] = None,
    max_latency_ms: Annotated[float | None, typer.Option(help="Milliseconds a decoding step, by the table.")] = None,
    heal_steps: Annotated[int, typer.Option(help="Heal the best few for so many steps before choosing.")] = 0,
    heal_recipe: Annotated[Path | None, typer.Option(help="Recipe of that healing; recipes/heal.toml.")] = None,
    nested: Annotated[bool, typer.Option("--nested", help="Drop layers in the order of training only.")] = False,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Let expert counts differ by layer; not every family can export that.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the search, where there are too many sizes to predict all.")] = 0,
    device: Device = "auto",
) -> None:
    """Find the sub-model of lowest loss within limits on memory, compute and latency."""
    from stretto.base.config import read_recipe
    from stretto.train.recipe import HealRecipe

    healing = None
    if heal_steps:
        settings = [f"train.steps={heal_steps}", f"train.eval_every={heal_steps}", f"train.snapshot_every={heal_steps}"]
        healing = read_recipe(heal_recipe or RECIPES / "heal.toml", HealRecipe, settings)
    from stretto.api.search import parse_limits, search_command
    from stretto.subnets.search import SearchOptions
    from stretto.train.prepare import TextOptions

    limits = parse_limits(max_total, max_active, max_latency_ms)
    options = SearchOptions(seed=seed)
    text = TextOptions(val, val_fraction, text_field)
    result = search_command(
        run, limits, options, healing, device, data=data, text=text, nested=nested, per_layer=per_layer
    )
    for line in result.summary():
        _say(line)
    _say(f"next: stretto extract {run} --subnet best -o OUT")


@app.command()
def extract(
    source: Source,
    subnet: Annotated[str, typer.Option(help="A preset, best, or layers=…,experts=…,top_k=….")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Checkpoint to write.")],
    device: Device = "auto",
) -> None:
    """Cut a sub-model out as an ordinary checkpoint; refuses unless its logits are the same."""
    from stretto.api.search import extract_command

    done = extract_command(source, subnet, out, device)
    _say(
        f"{out}: {done.num_tokens} tokens compared, logits differ by {done.difference:.1e} (at most {done.tolerance:.1e})"
    )
    _say(f"next: stretto heal {out} --data … -o HEALED")


@app.command()
def heal(
    source: Annotated[Path, typer.Argument(help="An extracted checkpoint.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="Checkpoint to write.")],
    data: Data = [],  # noqa: B006
    val: Val = None,
    val_fraction: ValFraction = None,
    text_field: TextField = "text",
    recipe: Annotated[Path | None, typer.Option(help="A healing recipe; recipes/heal.toml by default.")] = None,
    teacher: Annotated[Path | None, typer.Option(help="Run or checkpoint it was cut from; known if not moved.")] = None,
    steps: Steps = None,
    settings: Settings = [],  # noqa: B006
    resume: Resume = False,
    device: Device = "auto",
) -> None:
    """Train an extracted sub-model for a short while, towards the data and its parent."""
    from stretto.base.config import read_recipe
    from stretto.train.recipe import HealRecipe

    parsed = read_recipe(recipe or RECIPES / "heal.toml", HealRecipe, _with_steps(settings, steps))
    from stretto.api.train import heal_command
    from stretto.train.prepare import TextOptions

    text = TextOptions(val, val_fraction, text_field)
    _say(f"checkpoint: {heal_command(parsed, source, out, data, teacher, text=text, resume=resume, device=device)}")


@app.command()
def export(
    source: Source,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder, or file for --gguf.")],
    family: Annotated[
        str | None,
        typer.Option(
            help="Architecture on disk, as in docs/FORMATS.md; else the checkpoint's own, or one that holds it."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; with --gguf also q8_0.")] = "float32",
    gguf: Annotated[bool, typer.Option("--gguf", help="Write a GGUF file for llama.cpp.")] = False,
) -> None:
    """Write a checkpoint for other software: transformers, vLLM, SGLang, or llama.cpp."""
    known = ("float32", "bfloat16", "float16", *(["q8_0"] if gguf else []))
    if dtype not in known:
        raise UserError(f"--dtype {dtype}: unknown; use {', '.join(known)}")
    from stretto.api.search import export_command

    export_command(source, family, out, dtype, gguf)
    _say(f"written: {out}")


Controls = Annotated[
    list[Path],
    typer.Option(
        "--control", help="An ordinary run of the same shape, to say what elasticity cost; also found beside."
    ),
]


@app.command()
def report(run: RunFolder, control: Controls = []) -> None:  # noqa: B006
    """Draw what a run found: report.html and pictures."""
    from stretto.report.rl import is_rl_run, report_rl_run

    if is_rl_run(run):
        _say(f"report: {report_rl_run(run)}")
        return
    from stretto.api.report import report_command

    _say(f"report: {report_command(run, controls=control)}")


@app.command()
def cost(
    folder: Annotated[
        list[Path], typer.Argument(help="Checkpoints or runs; several are a family.", show_default=False)
    ],
    control: Controls = [],  # noqa: B006
) -> None:
    """The ledger: what a model cost alone, with its parent, and a family against training each size by itself."""
    from stretto.api.report import cost_command

    cost_command(folder, control)


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Run folder; runs/demo or runs/demo-smol by default.")
    ] = None,
    smol: Annotated[
        bool, typer.Option("--smol", help="With a real chat model instead: SmolLM2-135M-Instruct, from its package.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Go on where it stopped, or start over.")] = True,
) -> None:
    """The whole spine on real text: pretrain, search, extract, heal, export, then post-training of the result, and one report."""
    if smol:
        from stretto.api.demo_smol import demo_smol_command

        demo_smol_command(out or Path("runs/demo-smol"), fresh=not resume)
        return
    from stretto.api.demo import demo_command

    demo_command(out or Path("runs/demo"), fresh=not resume)


for command in (run, sft, rl, distill, online, top, merge):
    app.command()(command)
app.command("eval")(evaluate)
for other in (compare, serve, chat, agent, generate, bench_serve, enhance, paint, studio):
    app.command()(other)
app.add_typer(judge, name="judge")


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Any of these, set by a user, says how OpenMP's threads wait."""


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Have OpenMP's threads fall asleep after microseconds of waiting for each other, unless a user said how they wait.

    Threads that spin keep the others from the core they wait for: with one of two cores busy, training took 3.1 times as long.
    On a quiet machine so short a spin costs nothing; sleeping at once (``OMP_WAIT_POLICY=passive``) cost 7 %.
    """
    if not any(name in environment for name in WAITING):
        environment.update(GOMP_SPINCOUNT="1000", KMP_BLOCKTIME="1")  # GNU: rounds; LLVM and Intel: milliseconds


def main() -> None:
    """Entry point: bad input becomes one line and exit code 2, a run that diverged 3, Ctrl-C 130."""
    wait_briefly(os.environ)  # before torch is imported: its library looks when it is loaded
    try:
        code = app(prog_name="stretto", standalone_mode=False)  # newer typers return what they would exit with
    except UserError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{os.fsdecode(error.filename)[:200]}: {error.strerror}; check the path and its permissions", 2)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if not hasattr(error, "exit_code"):  # click's own errors about arguments carry one
            raise
        if (problem := usage_problem(error, sys.argv[1:])) is not None:
            _fail(problem, 2)
        error.show()  # type: ignore[attr-defined]  # the help, which a bare command asks for
        sys.exit(int(error.exit_code))
    if code == 130:
        _fail("interrupted; a training run goes on with --resume", 130)
    sys.exit(code or 0)


def usage_problem(error: Any, arguments: Sequence[str]) -> str | None:
    """What click says of wrong ``arguments``, in a line with the remedy; None: it has nothing to say but the help."""
    context, message = getattr(error, "ctx", None), error.format_message()
    told = " ".join(message.split()).rstrip(".")
    if context is None or not told or "\n" in message.strip():
        return None
    remedy = _again(context.command, arguments) if "extra argument" in message else None
    place = "".join(f"{name}: " for name in context.command_path.split()[1:])
    return f"{place}{told[0].lower()}{told[1:]}; {remedy or f'see `{context.command_path} --help`'}"


def _again(command: Any, arguments: Sequence[str]) -> str | None:
    """How to give several values to an option of ``command`` that is repeated for each, if ``arguments`` name it once before them."""
    repeated = {
        name for parameter in command.params if getattr(parameter, "multiple", False) for name in parameter.opts
    }
    for place, argument in enumerate(arguments, start=1):
        name, _, first = argument.partition("=")
        values = [first] if first else []
        values += takewhile(lambda each: not each.startswith("-"), arguments[place:])
        if name in repeated and len(values) > 1:
            return f"{name} is written before each: {name} {values[0]} {name} {values[1]}"
    return None


def _say_next(run: Path, made: Path) -> None:
    from stretto.model.checkpoint import read_config
    from stretto.subnets.search import reachable_limits

    limits = reachable_limits(read_config(made))
    asked = f"--max-total {limits.max_total} --max-active {limits.max_active}"
    _say(f"checkpoint: {made}\nnext: stretto latency {run}; stretto search {run} {asked}")


def _whole(number: float | None) -> int | float | None:
    """``6e21`` as the whole number it is; what is none is left to be refused."""
    return int(number) if number is not None and math.isfinite(number) else number


def _with_steps(settings: list[str], steps: int | None) -> list[str]:
    return settings if steps is None else [*settings, f"train.steps={steps}"]


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # torchrun's; the other ranks would say it again
        sys.stdout.write(text + "\n")


def _fail(message: str, code: int) -> NoReturn:
    # names come from files, too: a line end or a terminal's command in one is shown, not obeyed
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)
    sys.stderr.write(f"stretto: {shown}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
