"""The two demos of `stretto demo`: on real text, and with a chat model (``--smol``). Each is a table of stages.

On real text: tokenise, pre-train, search, extract, heal, export, generate, report; with ``--post`` also post-training.
With SmolLM2-135M-Instruct: upcycle to experts, elasticize, search, extract, heal, and answer the same ten questions at each size. Its
training data are generated questions with the model's own answers, rendered by its chat template, and text that every Python
installation has. Nothing is downloaded.

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
import torch
from rich.text import Text

from stretto.api.adopt import AdoptOptions, adopt_command
from stretto.api.model import Sizes
from stretto.api.pipeline import last_result
from stretto.api.pipeline import run as run_pipeline
from stretto.api.report import report_command
from stretto.api.search import SEARCH_FILE, export_command, extract_to
from stretto.api.serve import console_sampling
from stretto.api.stages import elasticize, heal, latency, pretrain, search
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.numbers import loss, si
from stretto.base.paths import (
    CHECKPOINT,
    LATENCY_FILE,
    LOCK_FILE,
    RECIPES,
    checkpoint_folder,
    claimed,
    quoted,
    remove,
    require_writable,
    write_json,
    write_text,
)
from stretto.base.table import Cell, Table
from stretto.base.track import progress, read_metrics, say, wide_console
from stretto.data.demo_text import CHAT_PROMPTS, TEMPLATE, chat_questions, demo_documents, passages
from stretto.data.holdout import Holdout
from stretto.data.shards import TOKENIZER, tokenise
from stretto.data.sources import Document
from stretto.engine.loading import OpenedEngine, open_engine
from stretto.engine.request import CONSOLE_PENALTY, EngineConfig, Phases, Request, Sampling
from stretto.model.spec import named_subnets
from stretto.model.upcycle import Upcycling
from stretto.ops.tuning import multiplies_bf16
from stretto.post.pipeline import COMPARISON_FILE, EVALUATED
from stretto.report.top import sparkline
from stretto.subnets.candidate import Limits
from stretto.subnets.search import SearchOptions
from stretto.tasks.task import Range, read_records
from stretto.text.chat import named_tokens, render
from stretto.text.tokenizer import Tokenizer, load_tokenizer
from stretto.train.prepare import learn_tokenizer, tokenise_documents
from stretto.train.recipe import ElasticizeRecipe, HealRecipe, Recipe
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

# Of the demo with a chat model:
SMOL_MODEL = "smollm2"
ANSWER_TOKENS = 64
AT_ONCE = 64
"""Number of requests in one batch of the engine."""
SMOL_CONVERSION = Upcycling(experts=8, top_k=4)
SMOL_LIMITS = Limits(max_total=0.8, max_active=0.75)
SMOL_SEARCH_OPTIONS = SearchOptions(num_evaluated=4, num_spread=2, num_nested=2)
SMOL_ELASTICIZE = ["train.steps=40", "train.eval_every=10", "train.eval_rows=8", "train.snapshot_every=10"]
SMOL_HEAL = [
    "train.steps=32",
    "train.rows=8",
    "train.eval_every=8",
    "train.eval_rows=8",
    "train.snapshot_every=8",
    "optim.lr=2e-4",
]
SMOL_CODE_CHARS, SMOL_EXERCISE_CHARS = 400_000, 200_000
HELD_OUT = 0.05
"""Share of the conversations that is held out."""
CHAT_WEIGHT = 3
"""Weight of the conversations in the mixture; the other text has weight 1."""


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
        f"serve every size, with a web page to try them: {command} serve {quoted(run)}"
    )
    if trained is not None:
        say(f"serve the post-trained small model: {command} serve {quoted(trained)}")
    else:
        say(f"post-train the small model: {command} demo --post -o {quoted(run)}")


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
    return "stretto" if shutil.which("stretto") else quoted(os.path.relpath(Path(sys.executable).parent / "stretto"))


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
        Stage("measure the latency of its layers", LATENCY_FILE, partial(latency, run, device="cpu")),
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
        found = extract_to(run / name, run, name)
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


def demo_smol_command(run: Path, fresh: bool = False) -> None:
    """Run the demo in ``run``. Stages that have ended are not run again, unless ``fresh`` deletes the folder first."""
    command = run_stages(run, _smol_stages, "smol", fresh)
    console = wide_console()
    console.print(samples_table(read_samples(run), "Ten questions answered at each size, greedy"))
    say(f"report: {report_command(run, quiet=False)}")
    say(
        f"\nchat with the small model: {command} chat {quoted(run / 'healed')}"
        f"\nserve every size of the large model, with a web page to try them: {command} serve {quoted(run)}"
    )


def _smol_stages(run: Path) -> tuple[Stage, ...]:
    """All stages in order."""
    elasticizing = read_recipe(RECIPES / "elasticize.toml", ElasticizeRecipe, SMOL_ELASTICIZE)
    healing = read_recipe(RECIPES / "heal.toml", HealRecipe, SMOL_HEAL)
    smol, moe, best = run / "smol", run / "moe", run / "best"
    data = [str(run / "data" / "00"), f"{run / 'data' / '01'}@{CHAT_WEIGHT}"]
    resume, resume_heal = ((folder / "snapshots").is_dir() for folder in (run, run / "healed.run"))
    return (
        Stage(
            "adopt SmolLM2-135M-Instruct unchanged",
            f"smol/{CHECKPOINT}",
            partial(adopt_command, SMOL_MODEL, smol, AdoptOptions(order="none")),
        ),
        Stage("generate its answers to questions", "data/chat.jsonl", partial(_converse, run)),
        Stage("tokenise the answers and text of Python's library", "data/01/data.json", partial(_tokenise, run)),
        Stage(
            "upcycle its neurons to experts, with the same function",
            f"moe/{CHECKPOINT}",
            partial(adopt_command, str(smol), moe, AdoptOptions(calibration=tuple(data), upcycling=SMOL_CONVERSION)),
        ),
        Stage(
            "elasticize: train it so that every size works",
            CHECKPOINT,
            partial(elasticize, moe, data, run, recipe=elasticizing, teacher=smol, resume=resume, device="cpu"),
        ),
        Stage("measure the latency of its layers", LATENCY_FILE, partial(latency, run, device="cpu")),
        Stage(
            f"search: at most {SMOL_LIMITS.max_total:.0%} of the parameters, {SMOL_LIMITS.max_active:.0%} of the active ones",
            SEARCH_FILE,
            partial(search, run, **SMOL_LIMITS.model_dump(), options=SMOL_SEARCH_OPTIONS, device="cpu"),
        ),
        Stage("extract the best size", "best", partial(extract_to, best, run, "best")),
        Stage(
            "heal the best size",
            "healed",
            partial(heal, best, data, run / "healed", recipe=healing, resume=resume_heal, device="cpu"),
        ),
        Stage("ask each size the same ten questions", SAMPLES_FILE, partial(_ask, run)),
    )


def _converse(run: Path) -> None:
    """Write the model's greedy answers as JSON lines ``{"text": …}``: conversations as its chat template renders them."""
    half = torch.bfloat16 if multiplies_bf16(torch.device("cpu")) else None
    opened = open_engine(run / "smol", EngineConfig(max_batch=AT_ONCE), dtype=half)
    questions = chat_questions()
    answers = answer(opened, questions, Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS), "converse")
    tokenizer, template = _template(opened.engine.tokenizer)
    lines = []
    for question, text in zip(questions, answers, strict=True):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        lines.append(
            json.dumps({"text": render(template, messages, variables=named_tokens(tokenizer))}, ensure_ascii=False)
        )
    write_text(run / "data" / "chat.jsonl", "\n".join(lines) + "\n")


def _tokenise(run: Path) -> None:
    tokenizer = load_tokenizer(checkpoint_folder(run / "smol"))
    tokenise_documents({"train": demo_documents(SMOL_CODE_CHARS, SMOL_EXERCISE_CHARS)}, run / "data" / "00", tokenizer)
    rows = read_records(run / "data" / "chat.jsonl", Range(), [["text"]])
    # the token that ends a turn is also the end-of-document token, which tokenising appends
    texts = [row["text"].removesuffix("\n").removesuffix(tokenizer.eos_token) for row in rows]
    tokenizer.save(run / "data" / "01" / TOKENIZER)
    documents = {"train": [Document(text, "chat") for text in texts]}
    tokenise(documents, Rendered(tokenizer), run / "data" / "01", holdout=Holdout("documents", HELD_OUT))


@dataclass(frozen=True, slots=True)
class Rendered:
    """Tokenizer of rendered conversations: the names of special tokens in the text become those tokens."""

    inner: Tokenizer

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def eos_id(self) -> int:
        return self.inner.eos_id

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    def encode_batch(self, texts: Sequence[str], /) -> list[list[int]]:
        return [self.inner.encode_rendered(text) for text in texts]


def _template(tokenizer: Tokenizer | None) -> tuple[Tokenizer, str]:
    assert tokenizer is not None and tokenizer.chat_template is not None, f"{SMOL_MODEL} has a chat template"
    return tokenizer, tokenizer.chat_template


def answer(
    opened: OpenedEngine, questions: Sequence[str], sampling: Sampling, what: str, size: str = "full"
) -> list[str]:
    """The answers of one size of a network, each question in a conversation of its own."""
    tokenizer, template = _template(opened.engine.tokenizer)
    phases = Phases(opened.presets[size])
    answers = []
    with progress(what, len(questions)) as advance:
        for start in range(0, len(questions), AT_ONCE):
            requests = []
            for question in questions[start : start + AT_ONCE]:
                messages = [{"role": "user", "content": question}]
                text = render(template, messages, add_generation_prompt=True, variables=named_tokens(tokenizer))
                requests.append(Request(question, tuple(tokenizer.encode_rendered(text)), sampling, phases))
            completions = opened.engine.generate(requests)
            answers += [tokenizer.decode(each.tokens, skip_special_tokens=True).strip() for each in completions]
            advance(len(requests))
    return answers


def _ask(run: Path) -> None:
    """Ask the original, the full elastic network, its half and the healed best size, with greedy decoding."""
    sampling = console_sampling(0.0, NUM_NEW_TOKENS, None)
    samples: list[Sample] = []
    for size, folder, preset in (
        ("original", run / "smol", "full"),
        ("full", run, "full"),
        ("half", run, "half"),
        ("best", run / "healed", "full"),
    ):
        opened = open_engine(folder, EngineConfig(max_batch=AT_ONCE))
        for prompt, text in zip(CHAT_PROMPTS, answer(opened, CHAT_PROMPTS, sampling, size, preset), strict=True):
            samples.append(Sample(size=size, prompt=prompt, text=text))
    write_json(run / SAMPLES_FILE, [sample.model_dump() for sample in samples])
