"""The demo on real text: tokenise, pre-train, search, extract, heal, export, generate, report; with ``--post`` also post-training.

Every stage writes its result into the run folder. A stage whose result is there is not run again, so an interrupted demo resumes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import rich
import rich.table
from rich.text import Text

from stretto.api.model import Sizes
from stretto.api.pipeline import last_result
from stretto.api.pipeline import run as run_pipeline
from stretto.api.report import report_command
from stretto.api.search import (
    SEARCH_FILE,
    export_command,
    extract_command,
    latency_command,
)
from stretto.api.stages import heal, pretrain, search
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.numbers import loss, si
from stretto.base.paths import (
    CHECKPOINT,
    LATENCY_FILE,
    LOCK_FILE,
    RECIPES,
    claimed,
    remove,
    require_writable,
    write_json,
    write_text,
)
from stretto.base.track import progress, read_metrics, say, wide_console
from stretto.data.demo_text import TEMPLATE, demo_documents, passages
from stretto.data.sources import Document
from stretto.engine.request import CONSOLE_PENALTY
from stretto.model.spec import named_subnets
from stretto.post.pipeline import COMPARISON_FILE, EVALUATED
from stretto.report.page import Cell, Table
from stretto.report.top import sparkline
from stretto.subnets.candidate import Limits
from stretto.subnets.search import SearchOptions
from stretto.train.prepare import learn_tokenizer, tokenise_documents
from stretto.train.recipe import HealRecipe, Recipe
from stretto.train.run_folder import POST, SAMPLES_FILE, Sample, read_samples

MARK = ".demo"
"""Folder in a run folder that a demo made. It names the demo, and a running demo claims it."""
PROMPTS = ("def read_", "Question:")
NUM_NEW_TOKENS = 48
MAX_CODE_CHARS, MAX_EXERCISE_CHARS = 4_000_000, 2_000_000
"""Characters of text per domain: about what pre-training reads once."""
EXCERPT_CHARS = 38
LIMITS = Limits(max_total=0.36, max_active=0.55)
SEARCH_HEAL_STEPS = 8
"""Enough to rank candidates whose losses are close. The chosen one is healed fully afterwards."""
SEARCH_OPTIONS = SearchOptions(num_evaluated=8, num_nested=2, num_spread=6, num_healed=2)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the demo."""

    title: str
    result: str
    """File or folder in the run folder; it exists once the stage has ended."""
    work: Callable[[], object]


def demo_command(run: Path, fresh: bool = False, post: bool = False) -> None:
    """Run the demo in ``run``. Stages that have ended are not run again.

    Args:
        fresh: empty ``run`` first, which an earlier demo made.
        post: also post-train the small model that the demo made, and evaluate it after every stage.

    Raises:
        UserError: ``run`` holds something else, or a stage failed.
    """
    command = run_stages(run, lambda folder: _stages(folder, post), "data", fresh)
    console = wide_console()
    console.rule("[bold]report[/bold]")
    console.print(samples_table(read_samples(run), "The same prompts at three sizes, greedy"))
    page = report_command(run, quiet=False)
    trained = last_result(run / POST)
    say(
        f"report: {page}\n"
        f"small model: {run / 'hf'} (transformers, vLLM, SGLang), {run / 'model.gguf'} (llama.cpp)\n"
        f"serve every size, with a web page to try them: {command} serve {run}"
    )
    if trained is not None:
        say(f"serve the post-trained small model: {command} serve {trained}")
    else:
        say(f"post-train the small model: {command} demo --post -o {run}")


def run_stages(run: Path, stages_of: Callable[[Path], Sequence[Stage]], first: str, fresh: bool) -> str:
    """Run the stages in ``run`` that have not ended. Returns the command that starts stretto.

    Args:
        first: folder that the first stage makes in ``run``.
        fresh: empty ``run`` first, which an earlier demo made.

    Raises:
        UserError: ``run`` holds something else, cannot be written, or another process runs in it.
    """
    require_writable(run)
    held = {path.name for path in run.iterdir()} if run.is_dir() else set()
    # a demo that was killed at once has left an empty mark
    is_new = not run.exists() or (run.is_dir() and held <= {MARK, LOCK_FILE} and not _is_marked(run, first))
    if fresh and not is_new:
        _clear(run, first)
    elif not (is_new or (run / first).is_dir() or _is_marked(run, first)):
        raise UserError(f"{run}: not a folder of this demo; choose another with --out")
    console = wide_console()
    stages = stages_of(run)
    # The claim is on a folder inside, because stages claim the run folder itself.
    with claimed(run / MARK):
        write_text(run / MARK / "name", first)
        for number, stage in enumerate(stages, 1):
            done = (run / stage.result).exists()
            console.rule(f"[bold]{number}/{len(stages)}[/bold]  {stage.title}" + ("  (done before)" if done else ""))
            if not done:
                stage.work()
    return "stretto" if shutil.which("stretto") else os.path.relpath(Path(sys.executable).parent / "stretto")


def _is_marked(run: Path, first: str) -> bool:
    """Whether the demo whose first folder is ``first`` made the folder ``run``."""
    name = run / MARK / "name"
    return name.is_file() and name.read_text(encoding="utf-8") == first


def _clear(run: Path, first: str) -> None:
    """Delete what the folder ``run`` holds. Raises `UserError`: this demo did not make the folder, or a process runs in it."""
    if not _is_marked(run, first):
        raise UserError(
            f"{run}: --fresh: nothing shows that this demo made the folder, so it is not deleted; "
            "delete it yourself, or choose another with --out"
        )
    with claimed(run / MARK), claimed(run):
        for path in run.iterdir():
            remove(path)


def _stages(run: Path, post: bool) -> list[Stage]:
    """The stages from text to the exported small model; with ``post`` also the one that post-trains it."""
    recipe = read_recipe(RECIPES / "demo.toml", Recipe)
    healing = read_recipe(RECIPES / "heal.toml", HealRecipe, ['train.dtype="float32"'])
    data = [str(run / "data" / "00")]
    resume, resume_heal = ((folder / "snapshots").is_dir() for folder in (run, run / "healed.run"))
    stages = [
        Stage("text: read and tokenise", "data/00/data.json", partial(_text, run, recipe)),
        Stage("pre-train one elastic network", CHECKPOINT, partial(_pretrain, recipe, run, data, resume)),
        Stage("measure the latency of its layers", LATENCY_FILE, partial(latency_command, run, "cpu")),
        Stage("search: at most 36 % of the parameters, 55 % of the active ones", SEARCH_FILE, partial(_search, run)),
        Stage("extract the best size and the half", "best", partial(_extract, run)),
        Stage(
            "heal the best size",
            "healed",
            partial(heal, run / "best", data, run / "healed", recipe=healing, resume=resume_heal, device="cpu"),
        ),
        Stage("export for transformers and llama.cpp", "model.gguf", partial(_export, run)),
        Stage("generate with transformers at three sizes", SAMPLES_FILE, partial(_write, run)),
    ]
    title, result = (
        "post-train: SFT, experts, distillation, online RL, evaluation",
        f"{POST}/{EVALUATED}/{COMPARISON_FILE}",
    )
    return [*stages, Stage(title, result, partial(_post_train, run))] if post else stages


def _text(run: Path, recipe: Recipe) -> None:
    """Tokenise the demo's text with a tokenizer trained on it."""
    documents = list(demo_documents(MAX_CODE_CHARS, MAX_EXERCISE_CHARS))
    wide_console().print(_text_table(documents))
    tokenizer = learn_tokenizer(documents, recipe.model.vocab_size, TEMPLATE)
    tokenise_documents({"train": documents}, run / "data" / "00", tokenizer)


def _text_table(documents: Sequence[Document]) -> Table:
    rows = []
    for domain in dict.fromkeys(document.domain for document in documents):
        texts = [document.text for document in documents if document.domain == domain]
        excerpt = " ".join(texts[len(texts) // 2].split())[:EXCERPT_CHARS] + "…"
        num_chars = sum(map(len, texts))
        rows.append((Cell(domain), Cell(excerpt), Cell(f"{len(texts):,}", len(texts)), Cell(si(num_chars), num_chars)))
    return Table("Text", ("Domain", "Excerpt", "Documents", "Characters"), tuple(rows), num_words=2)


def _pretrain(recipe: Recipe, run: Path, data: Sequence[str], resume: bool) -> None:
    """Pre-train, with a table of the sizes before and the loss of each size afterwards."""
    console, config = wide_console(), recipe.network()
    sizes = Sizes(config, named_subnets(config, recipe.elastic.anchors))
    note = "Parameters of the network and of the sizes inside it that are trained together."
    console.print(replace(sizes.table, title="Sizes", note=note))
    pretrain(recipe, data, run, resume=resume, device="cpu")
    console.print(_loss_curves(run, list(sizes)))


def _loss_curves(run: Path, names: Sequence[str]) -> Text:
    """Held-out loss of each size over the steps, one line each."""
    log, text = read_metrics(run), Text("Held-out loss, nats per token, first to last\n", style="bold")
    for name in names:
        losses = [row[f"loss/{name}"] for row in log if f"loss/{name}" in row]
        text.append(f"{name:8}", style="")
        text.append(f" {loss(losses[0])}  {sparkline(losses, len(losses))}  {loss(losses[-1])}\n", style="not bold")
    return text


def _search(run: Path) -> None:
    limits, options = LIMITS.model_dump(), SEARCH_OPTIONS
    say(repr(search(run, **limits, heal_steps=SEARCH_HEAL_STEPS, options=options, device="cpu")))


def _extract(run: Path) -> None:
    for name in ("half", "best"):
        found = extract_command(run, name, run / name, "cpu", force=True)
        say(
            f"{name}: logits of {found.num_tokens} tokens differ from the masked network's by at most {found.difference:.1e} "
            f"(tolerance {found.tolerance:.1e})"
        )


def _export(run: Path) -> None:
    for out, is_gguf in ((run / "hf", False), (run / "model.gguf", True)):
        if not out.exists():
            export_command(run / "healed", None if is_gguf else "glm4_moe", out, dtype="float32", gguf=is_gguf)


def _write(run: Path) -> None:
    """Load each size with transformers and continue each prompt greedily, which shows that other software reads the files."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # late: seconds to import
    from transformers.utils import logging

    logging.disable_progress_bar()  # the demo shows a bar of its own
    sizes = {"full": run / CHECKPOINT, "half": run / "half", "best": run / "hf"}
    samples = []
    with progress("write", len(sizes) * len(PROMPTS)) as advance:
        for size, folder in sizes.items():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder)
            for prompt in PROMPTS:
                inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
                ids = model.generate(  # type: ignore[misc]
                    inputs.input_ids,
                    attention_mask=inputs.attention_mask,
                    max_new_tokens=NUM_NEW_TOKENS,
                    do_sample=False,
                    repetition_penalty=CONSOLE_PENALTY,
                    pad_token_id=tokenizer.eos_token_id,
                )
                text = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
                samples.append(Sample(size=size, prompt=prompt, text=text))
                advance(1)
    write_json(run / SAMPLES_FILE, [sample.model_dump() for sample in samples])


def _post_train(run: Path) -> None:
    """Run the pipeline of `stretto run` on the healed network; it resumes by itself."""
    prompts = run.resolve() / "data" / "passages.jsonl"
    rows = [{"prompt": f"How does this go on? {start}", "reference": rest} for start, rest in passages()]
    write_text(prompts, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    paths = [f"{stage}.sources.writing.args.path={json.dumps(str(prompts))}" for stage in ("sft.recipe", "online")]
    run_pipeline(RECIPES / "demo_pipeline.toml", run / "healed", run / POST, settings=paths, device="cpu")


def samples_table(samples: Sequence[Sample], title: str) -> rich.table.Table:
    """Each prompt, and below it the text of every size, one per row, so that the table fits a narrow console."""
    table = rich.table.Table(show_header=False, title=title)
    for prompt in dict.fromkeys(sample.prompt for sample in samples):
        table.add_row("", Text(prompt, style="bold"))
        for sample in samples:
            if sample.prompt == prompt:
                table.add_row(sample.size, Text(sample.text))
        table.add_section()
    return table
