"""The main job on real text, start to end: text → tokens → elastic network → search → cut → heal → hand over → post-train → report.

Every stage leaves its result in the run folder, and one that finds its result there is done: an interrupted demo goes
on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import rich
from rich.table import Table

from stretto.api.pipeline import last_result, run_command
from stretto.api.report import report_command
from stretto.api.search import (
    LATENCY_FILE,
    SEARCH_FILE,
    export_command,
    extract_command,
    latency_command,
    search_command,
)
from stretto.api.train import heal_command, pretrain_command
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, RECIPES, remove, write_json, write_text
from stretto.base.track import progress
from stretto.data.demo_text import TEMPLATE, demo_documents, passages
from stretto.post.pipeline import COMPARISON_FILE, EVALUATED
from stretto.subnets.search import Limits, SearchOptions
from stretto.train.prepare import learn_tokenizer, tokenise_documents
from stretto.train.recipe import HealRecipe, Recipe
from stretto.train.run_folder import POST, SAMPLES_FILE, Sample, read_samples

PROMPTS = ("def read_", "Question: ")
NUM_NEW_TOKENS = 48
LIMITS = Limits(max_total=0.34, max_active=0.5)
SEARCH_HEAL_STEPS = 8
"""Enough to order candidates that lie close; the chosen one is healed properly afterwards."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One line of the demo."""

    title: str
    result: str
    """File or folder, in the run folder, that is there when the stage is done."""
    work: Callable[[], object]


def demo_command(run: Path, fresh: bool = False) -> None:
    """Run the demo in ``run``; go on where an earlier attempt stopped, or start over with ``fresh``."""
    command = run_stages(run, _stages, "data", fresh)
    console = rich.get_console()
    console.print(_samples_table(read_samples(run)))
    console.print(report_command(run, quiet=False))
    console.print(
        f"\nThe small model is in {run / 'hf'} (transformers, vLLM, SGLang) and {run / 'model.gguf'} (llama.cpp)."
        f"\nServe every size of the large one, with a page to try them: {command} serve {run}"
        f"\nServe the small one after its post-training: {command} serve {last_result(run / POST)}",
        soft_wrap=True,
    )


def run_stages(run: Path, stages_of: Callable[[Path], Sequence[Stage]], first: str, fresh: bool) -> str:
    """Do what is not done yet in ``run``; ``first`` is the folder that the first stage makes there. Returns how stretto is called.

    Raises:
        UserError: the folder holds something else.
    """
    if fresh:
        remove(run)
    elif run.exists() and not (run / first).is_dir():
        raise UserError(f"{run}: not a folder of this demo; choose another with --out")
    console = rich.get_console()
    stages = stages_of(run)
    for number, stage in enumerate(stages, 1):
        done = (run / stage.result).exists()
        console.rule(f"[bold]{number}/{len(stages)}[/bold]  {stage.title}" + ("  (done before)" if done else ""))
        if not done:
            stage.work()
    return "stretto" if shutil.which("stretto") else os.path.relpath(Path(sys.executable).parent / "stretto")


def _stages(run: Path) -> tuple[Stage, ...]:
    """The spine: what happens, in order."""
    recipe = read_recipe(RECIPES / "demo.toml", Recipe)
    healing = read_recipe(RECIPES / "heal.toml", HealRecipe)
    brief = healing.replace(train=healing.train.replace(steps=SEARCH_HEAL_STEPS))
    data, healed = [str(run / "data" / "00")], run / "healed"
    resume, resume_heal = ((folder / "snapshots").is_dir() for folder in (run, run / "healed.run"))
    export = partial(export_command, healed, "glm4_moe", dtype="float32")
    return (
        Stage(
            "text of this Python's library and of reasoning-gym, tokenised",
            "data/00/data.json",
            partial(_text, run, recipe),
        ),
        Stage(
            "pre-train one elastic network",
            CHECKPOINT,
            partial(pretrain_command, recipe, run, data, resume=resume, device="cpu"),
        ),
        Stage("measure this machine's latency", LATENCY_FILE, partial(latency_command, run, "cpu")),
        Stage(
            "search: at most 34 % of the parameters, 50 % of the active ones",
            SEARCH_FILE,
            partial(search_command, run, LIMITS, SearchOptions(num_healed=2), brief, "cpu"),
        ),
        Stage("cut out the best, and the half", "best", partial(_extract, run)),
        Stage(
            "heal the best",
            "healed",
            partial(heal_command, healing, run / "best", healed, data, None, resume=resume_heal, device="cpu"),
        ),
        Stage("export for transformers", "hf", partial(export, out=run / "hf", gguf=False)),
        Stage("export for llama.cpp", "model.gguf", partial(export, out=run / "model.gguf", gguf=True)),
        Stage("let transformers write with each size", SAMPLES_FILE, partial(_write, run)),
        Stage(
            "post-train the best: SFT, an expert for each domain, one student of them all, online RL, evaluation",
            f"{POST}/{EVALUATED}/{COMPARISON_FILE}",
            partial(_post_train, run),
        ),
    )


def _text(run: Path, recipe: Recipe) -> None:
    folder = run / "data" / "00"
    tokenizer = learn_tokenizer(demo_documents(), recipe.model.vocab_size, TEMPLATE)
    tokenise_documents({"train": demo_documents()}, folder, tokenizer)


def _extract(run: Path) -> None:
    extract_command(run, "half", run / "half", "cpu")
    extract_command(run, "best", run / "best", "cpu")


def _write(run: Path) -> None:
    """Let transformers load each size and continue each prompt greedily: the proof that other software reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # late: seconds to import
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar is enough
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
                    repetition_penalty=1.1,
                    pad_token_id=tokenizer.eos_token_id,
                )
                text = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
                samples.append(Sample(size=size, prompt=prompt, text=text))
                advance(1)
    write_json(run / SAMPLES_FILE, [sample.model_dump() for sample in samples])


def _post_train(run: Path) -> None:
    """`stretto run` on the healed network. It goes on where it was by itself."""
    prompts = run.resolve() / "data" / "passages.jsonl"
    rows = [{"prompt": f"How does this go on? {begun}", "reference": rest} for begun, rest in passages()]
    write_text(prompts, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    told = [f"{stage}.sources.writing.args.path={json.dumps(str(prompts))}" for stage in ("sft.recipe", "online")]
    run_command(RECIPES / "demo_pipeline.toml", run / POST, run / "healed", told, device="cpu")


def _samples_table(samples: list[Sample]) -> Table:
    table = Table(title="Written by transformers, greedy", show_lines=True)
    table.add_column("size")
    table.add_column("text", overflow="fold")
    for sample in samples:
        table.add_row(sample.size, f"[dim]{sample.prompt}[/dim]{sample.text}")
    return table
