"""The demo with a real chat model, SmolLM2-135M-Instruct: upcycle to experts, elasticize, search, extract, heal, and answer the
same ten questions at each size.

The training data are generated questions with the model's own answers, rendered by its chat template, and text that every Python
installation has. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from stretto.api.adopt import AdoptOptions, adopt_command
from stretto.api.demo import Stage, run_stages, samples_table
from stretto.api.report import report_command
from stretto.api.search import SEARCH_FILE, extract_command, latency_command
from stretto.api.serve import console_sampling
from stretto.api.stages import elasticize, heal, search
from stretto.base.config import read_recipe
from stretto.base.paths import CHECKPOINT, LATENCY_FILE, RECIPES, checkpoint_folder, write_json, write_text
from stretto.base.track import progress, say, wide_console
from stretto.data.demo_text import CHAT_PROMPTS, chat_questions, demo_documents
from stretto.data.holdout import Holdout
from stretto.data.shards import TOKENIZER, tokenise
from stretto.data.sources import Document
from stretto.engine.loading import OpenedEngine, open_engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.model.upcycle import Upcycling
from stretto.ops.tuning import multiplies_bf16
from stretto.subnets.candidate import Limits
from stretto.subnets.search import SearchOptions
from stretto.tasks.task import Range, read_records
from stretto.text.chat import named_tokens, render
from stretto.text.tokenizer import Tokenizer, load_tokenizer
from stretto.train.prepare import tokenise_documents
from stretto.train.recipe import ElasticizeRecipe, HealRecipe
from stretto.train.run_folder import SAMPLES_FILE, Sample, read_samples

MODEL = "smollm2"
NUM_NEW_TOKENS = 48
ANSWER_TOKENS = 64
AT_ONCE = 64
"""Number of requests in one batch of the engine."""
CONVERSION = Upcycling(experts=8, top_k=4)
LIMITS = Limits(max_total=0.8, max_active=0.75)
SEARCH_OPTIONS = SearchOptions(num_evaluated=4, num_spread=2, num_nested=2)
ELASTICIZE = ["train.steps=40", "train.eval_every=10", "train.eval_rows=8", "train.snapshot_every=10"]
HEAL = [
    "train.steps=32",
    "train.rows=8",
    "train.eval_every=8",
    "train.eval_rows=8",
    "train.snapshot_every=8",
    "optim.lr=2e-4",
]
CODE_CHARS, EXERCISE_CHARS = 400_000, 200_000
HELD_OUT = 0.05
"""Share of the conversations that is held out."""
CHAT_WEIGHT = 3
"""Weight of the conversations in the mixture; the other text has weight 1."""


def demo_smol_command(run: Path, fresh: bool = False) -> None:
    """Run the demo in ``run``. Stages that have ended are not run again, unless ``fresh`` deletes the folder first."""
    command = run_stages(run, _stages, "smol", fresh)
    console = wide_console()
    console.print(samples_table(read_samples(run), "Ten questions answered at each size, greedy"))
    say(f"report: {report_command(run, quiet=False)}")
    say(
        f"\nchat with the small model: {command} chat {run / 'healed'}"
        f"\nserve every size of the large model, with a web page to try them: {command} serve {run}"
    )


def _stages(run: Path) -> tuple[Stage, ...]:
    """All stages in order."""
    elasticizing = read_recipe(RECIPES / "elasticize.toml", ElasticizeRecipe, ELASTICIZE)
    healing = read_recipe(RECIPES / "heal.toml", HealRecipe, HEAL)
    smol, moe, best = run / "smol", run / "moe", run / "best"
    data = [str(run / "data" / "00"), f"{run / 'data' / '01'}@{CHAT_WEIGHT}"]
    resume, resume_heal = ((folder / "snapshots").is_dir() for folder in (run, run / "healed.run"))
    return (
        Stage(
            "adopt SmolLM2-135M-Instruct unchanged",
            f"smol/{CHECKPOINT}",
            partial(adopt_command, MODEL, smol, AdoptOptions(order="none")),
        ),
        Stage("generate its answers to questions", "data/chat.jsonl", partial(_converse, run)),
        Stage("tokenise the answers and text of Python's library", "data/01/data.json", partial(_tokenise, run)),
        Stage(
            "upcycle its neurons to experts, with the same function",
            f"moe/{CHECKPOINT}",
            partial(adopt_command, str(smol), moe, AdoptOptions(calibration=tuple(data), upcycling=CONVERSION)),
        ),
        Stage(
            "elasticize: train it so that every size works",
            CHECKPOINT,
            partial(elasticize, moe, data, run, recipe=elasticizing, teacher=smol, resume=resume, device="cpu"),
        ),
        Stage("measure the latency of its layers", LATENCY_FILE, partial(latency_command, run, "cpu")),
        Stage(
            f"search: at most {LIMITS.max_total:.0%} of the parameters, {LIMITS.max_active:.0%} of the active ones",
            SEARCH_FILE,
            partial(search, run, **LIMITS.model_dump(), options=SEARCH_OPTIONS, device="cpu"),
        ),
        Stage("extract the best size", "best", partial(extract_command, run, "best", best, "cpu")),
        Stage(
            "heal the best size",
            "healed",
            partial(heal, best, data, run / "healed", recipe=healing, resume=resume_heal, device="cpu"),
        ),
        Stage("ask each size the same ten questions", SAMPLES_FILE, partial(_ask, run)),
    )


# --- conversations ----------------------------------------------------------------------------------------------------


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
    tokenise_documents({"train": demo_documents(CODE_CHARS, EXERCISE_CHARS)}, run / "data" / "00", tokenizer)
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
    assert tokenizer is not None and tokenizer.chat_template is not None, f"{MODEL} has a chat template"
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


# --- answers of each size ---------------------------------------------------------------------------------------------


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
