"""Post-training of SmolLM2-135M-Instruct in three domains: gain or loss of every stage of the pipeline.

    python -m bench.smol_pipeline --model runs/smol --gsm8k FILE --mbpp FILE --dialogues FILE --schemas FILE -o runs/p

The domains are word problems (GSM8K's JSONL), Python with tests (MBPP's JSONL) and function calls (dialogues and schemas of DSTC8's
Schema-Guided Dialogue; .xz is read too). SFT trains on some problems of each domain, RL on others; the last problems of each file are
the evaluation set. The stages of recipes/pipeline_smol.toml run one by one (`stretto run`): SFT, one expert per domain, one student,
online RL. Every model answers the same problems. The change of a stage is paired with its starting model, and is a gain or a loss if
its 95 % confidence interval excludes 0. Run again to continue.

Sizes are for one GPU (about ten minutes). ``--until`` ends after a stage, ``--set common.runtime.stop_s=SECONDS`` limits each stage of
RL. ``--tiny`` shows on two cores that everything runs. Fails (exit code 1) if a stage is missing or no change is significant, as with ``--tiny``.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

import stretto
from bench.common.measure import bench_parser, table
from stretto.base.config import read_recipe
from stretto.base.numbers import duration, si
from stretto.base.paths import CHECKPOINT, RECIPES, checkpoint_folder, write_json, write_text
from stretto.base.records import LINEAGE_FILE, read_lineage
from stretto.base.track import wide_console
from stretto.evals.scores import Interval
from stretto.learning.recipe import SourceConfig
from stretto.post.pipeline import PipelineRecipe
from stretto.post.suite import RESULT_FILE, Evaluation, read_evaluation
from stretto.report.comparison import compare
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.registry import open_source
from stretto.text.tokenizer import Tokenizer, load_tokenizer

RECIPE = RECIPES / "pipeline_smol.toml"
NUM_SFT = {"math": 2500, "calls": 2500}
"""Problems or dialogues for SFT; for MBPP, all problems outside its test split."""
NUM_DIALOGUES = 4000
"""Dialogues in total."""
MOST_TOKENS = 900
"""Longest dialogue, so that an answer fits after its prompts."""
MOST_RESULTS = 2
"""Results of a function call that the model sees."""
MOST_AT_ONCE = 256
"""Largest batch of an evaluation: several evaluations and a training run at the same time."""
STAGES = ("sft", "experts", "distill", "online")
TINY = """
sft.recipe.train.steps=2 sft.recipe.train.rows=2 sft.recipe.train.micro_batches=1 sft.recipe.train.eval_rows=2
common.rollout.group=2 common.rollout.max_tokens=24 common.rollout.max_batch=8 common.rollout.cache_bytes=200000000
common.train.steps=2 common.train.prompts=2 common.train.micro_rows=2 common.train.eval_prompts=3 common.loss.drop_uniform=false
domains.math.expert.rollout.max_tokens=24 domains.code.expert.rollout.max_tokens=24 domains.tools.expert.rollout.max_tokens=24
experts.at_once=3 distill.distill.kl_floor=0 distill.train.prompts=3 online.train.eval_prompts=4
evaluate.problems=4 evaluate.samples=1
""".split()  # noqa: SIM905 - 22 short settings read better in lines
"""Groups with equal rewards are kept, because the answers of so few tokens are all wrong."""


# --- data -------------------------------------------------------------------------------------------------------------


def make_data(folder: Path, files: Mapping[str, Path], tokenizer: Tokenizer, num_evaluated: int) -> None:
    """Write the files that the recipe reads. The last ``num_evaluated`` problems of a domain are in no file of SFT."""
    origin = {"tokenizer": tokenizer.fingerprint(), **{name: str(path) for name, path in files.items()}}
    if (folder / "made.json").is_file() and json.loads((folder / "made.json").read_text()) == origin:
        return
    math = _records(files["gsm8k"])
    _write(folder / "math.jsonl", math[NUM_SFT["math"] :])
    _write(folder / "sft_math.jsonl", _demonstrations("math", math[: NUM_SFT["math"]], folder, worked=True))
    code = sorted(_records(files["mbpp"]), key=lambda record: record["task_id"])
    test = [record for record in code if 11 <= record["task_id"] <= 510]
    rest = [record for record in code if record["task_id"] > 510]
    _write(folder / "code.jsonl", [*rest, *test])
    _write(folder / "sft_code.jsonl", _demonstrations("code", rest, folder))
    dialogues = list(_conversations(files["dialogues"], files["schemas"], tokenizer))
    assert len(dialogues) > NUM_SFT["calls"] + num_evaluated, (
        f"{files['dialogues']}: has {len(dialogues)} dialogues, too few for SFT and evaluation"
    )
    _write(folder / "calls.jsonl", dialogues[NUM_SFT["calls"] :])
    _write(folder / "sft_calls.jsonl", dialogues[: NUM_SFT["calls"]])
    write_json(folder / "made.json", origin)


def _demonstrations(
    kind: str, records: Sequence[Mapping[str, Any]], folder: Path, **args: Any
) -> Iterator[dict[str, Any]]:
    """Conversations of the task's prompts and the file's answers."""
    path = folder / f"{kind}.part.jsonl"
    _write(path, records)
    with Sandbox() as sandbox:
        source = open_source(kind, SourceConfig(kind=kind, args={"path": str(path), **args}), sandbox)
        for item in range(len(records)):
            problem = source.problem(item)
            yield {"messages": [*problem.messages, *source.demonstration(problem)]}
        source.close()
    path.unlink()


def _conversations(path: Path, schemas: Path, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Dialogues with one service; calls and results are text, for chat templates without tools."""
    offers = {schema["service_name"]: _offer(schema) for schema in json.loads(schemas.read_text())}
    records = [record for record in _records(path) if len(record["services"]) == 1]
    random.Random(0).shuffle(records)
    num = 0
    for record in records:
        messages: list[dict[str, str]] = [{"role": "system", "content": offers[record["services"][0]]}]
        for turn in record["turns"]:
            if turn["s"] == "U":
                messages.append({"role": "user", "content": turn["u"]})
                continue
            for call in turn.get("calls", ()):
                request = json.dumps({"name": call["method"], "arguments": call["parameters"]})
                answer = {"found": len(call["results"]), "first": call["results"][:MOST_RESULTS]}
                messages.append({"role": "assistant", "content": f"<tool_call>{request}</tool_call>"})
                messages.append({"role": "tool", "content": json.dumps(answer)})
            messages.append({"role": "assistant", "content": turn["u"]})
        if len(tokenizer.encode("\n".join(message["content"] for message in messages))) <= MOST_TOKENS:
            yield {"messages": messages}
            num += 1
        if num == NUM_DIALOGUES:
            return


def _offer(schema: Mapping[str, Any]) -> str:
    """The system message: the functions of a service."""
    lines = []
    for intent in schema["intents"]:
        names = [*intent["required_slots"], *(f"{name}?" for name in intent["optional_slots"])]
        lines.append(f"{intent['name']}({', '.join(names)}): {intent['description']}")
    return "\n".join(
        [
            f"{schema['description']}. Today is 2019-03-01. Functions, arguments with ? may be left out:",
            *lines,
            'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call> and nothing else.',
        ]
    )


def _records(path: Path) -> list[dict[str, Any]]:
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def _write(path: Path, records: Sequence[Mapping[str, Any]] | Iterator[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


# --- running ----------------------------------------------------------------------------------------------------------


class Scores:
    """Evaluations of models, each in its own process, in parallel with the stages."""

    def __init__(self, out: Path, recipe: PipelineRecipe, device: str):
        self._out, self._device, self._config = out, device, recipe.evaluate
        assert self._config is not None, f"{RECIPE} has no [evaluate]"
        rollout = {**recipe.common["rollout"], "sandbox": recipe.common["sandbox"]}
        self._max_batch = min(MOST_AT_ONCE, rollout["max_batch"])
        limits = {key: rollout[key] for key in ("max_tokens", "sandbox")}
        (out / "scores").mkdir(parents=True, exist_ok=True)
        for name, domain in {**recipe.domains, "": None}.items():
            sources = recipe.sources if domain is None else {key: recipe.sources[key] for key in domain.sources}
            suite = {"domains": {"sources": sources, "problems": self._config.problems, **limits}}
            write_json(self._suite(name), suite)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def _suite(self, domain: str) -> Path:
        return self._out / "scores" / f"suite{domain and '-'}{domain}.json"

    def folder(self, name: str) -> Path:
        return self._out / "scores" / name.replace("/", "-")

    def start(self, name: str, model: Path, domain: str = "") -> None:
        """Start an evaluation, unless it is running or done."""
        if name in self._processes or (self.folder(name) / RESULT_FILE).is_file() or self._config is None:
            return
        command = ["eval", str(model), "--suite", str(self._suite(domain)), "-o", str(self.folder(name))]
        command += ["--samples", str(self._config.samples), "--max-batch", str(self._max_batch)]
        with self.folder(name).with_suffix(".log").open("wb") as log:
            self._processes[name] = _start([*command, "--device", self._device], log)

    def close(self) -> None:
        """Stop all running evaluations."""
        for process in self._processes.values():
            _stop(process)

    def wait(self) -> None:
        """Wait for all evaluations."""
        for name, process in self._processes.items():
            if code := process.wait():
                print(f"scores of {name}: exit code {code}, see {self.folder(name).with_suffix('.log')}")

    def found(self) -> dict[str, Evaluation]:
        folders = [path.parent for path in sorted((self._out / "scores").glob(f"*/{RESULT_FILE}"))]
        return {folder.name: read_evaluation(folder) for folder in folders}


def _start(arguments: Sequence[str], log: Any = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "stretto", *arguments]
    return subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that is still running, with its children."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_stages(options: argparse.Namespace, recipe: PipelineRecipe, settings: Sequence[str], scores: Scores) -> None:
    """Run stage by stage, and evaluate each stage's model while the next stage runs."""
    out = options.out
    scores.start("begin", options.model)
    sets = [part for each in settings for part in ("--set", each)]
    for stage in STAGES[: STAGES.index(options.until) + 1]:
        command = ["run", str(RECIPE), "--model", str(options.model), "-o", str(out), "--until", stage, *sets]
        running = _start([*command, "--device", options.device])
        try:
            code = running.wait()
        finally:
            _stop(running)
        if code:
            print(f"{stage}: exit code {code}")
            return
        if stage == "experts":
            for name in recipe.domains:
                scores.start(f"experts/{name}", out / "experts" / name, name)
        else:
            scores.start(stage, out / stage)


# --- the table --------------------------------------------------------------------------------------------------------


def report(console: Console, out: Path, recipe: PipelineRecipe, found: Mapping[str, Evaluation]) -> bool:
    """Print scores, changes and cost of every stage. Returns whether all stages are done and any change is significant."""
    rows, moved = [], False
    stages = [("begin", None), ("sft", "begin"), *((f"experts-{name}", "sft") for name in recipe.domains)]
    stages += [("distill", "sft"), ("online", "distill")]
    names = [name for domain in recipe.domains.values() for name in domain.sources]
    for stage, before in stages:
        if stage not in found:
            console.print(f"{stage}: missing")
            continue
        domains, cells = found[stage].domains, []
        changes: dict[str, Interval] = {}
        if before is not None and before in found:
            paired = compare([found[before], found[stage]], {})
            changes = {name: change[1] for name, change in paired.differences.items()}
        for name in names:
            cells.append("" if name not in domains else _cell(domains[name].score, changes.get(name)))
        moved = moved or any(change.low > 0 or change.high < 0 for change in changes.values())
        rows.append((stage, *cells, before or "", *_receipt(out, stage)))
    title = "right answers, %, with 95 % confidence intervals; below: change against the starting stage"
    shown = table(title, "stage", *names, "started from", "tokens", "FLOPs", "time")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    return moved and len(rows) == len(stages)


def _cell(score: Interval, change: Interval | None) -> str:
    text = f"{100 * score.value:.1f} [{100 * score.low:.1f}, {100 * score.high:.1f}]"
    if change is None:
        return text
    word = "gain" if change.low > 0 else "loss" if change.high < 0 else "not significant"
    return f"{text}\n{100 * change.value:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}] {word}"


def _receipt(out: Path, stage: str) -> tuple[str, str, str]:
    folder = out / stage.replace("experts-", "experts/") / CHECKPOINT
    if not (folder / LINEAGE_FILE).is_file():
        return ("", "", "")
    receipt = read_lineage(folder).receipt
    return f"{receipt.tokens:,}", si(receipt.flops), duration(receipt.wall_s)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="adopted run or checkpoint")
    for name, content in (
        ("gsm8k", "JSONL of question and answer"),
        ("mbpp", "JSONL of MBPP"),
        ("dialogues", "JSONL of dialogues with function calls"),
        ("schemas", "JSON of the dialogues' services"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=content)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--until", choices=STAGES, default="online", help="last stage of this call")
    parser.add_argument("--tiny", action="store_true", help="few steps with short answers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    console = wide_console()
    options.model, options.out = checkpoint_folder(options.model).resolve(), options.out.resolve()
    data = options.out / "data"
    settings = [
        f"domains.tools.sources.calls.kind={RECIPES / 'examples' / 'calls.py'}:Calls",
        *(f"domains.{name}.sources.{source}.args.path={data / file}" for name, source, file in _FILES),
        f"sft.data={[str(data / f'sft_{name}.jsonl') for name in ('math', 'code', 'calls')]}",
        *(TINY if options.tiny else ()),
        *options.set,
    ]
    recipe = read_recipe(RECIPE, PipelineRecipe, settings)
    assert recipe.evaluate is not None
    files = {name: getattr(options, name) for name in ("gsm8k", "mbpp", "dialogues", "schemas")}
    make_data(data, files, load_tokenizer(options.model), recipe.evaluate.problems)
    scores = Scores(options.out, recipe, options.device)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run_stages(options, recipe, settings, scores)
        scores.wait()
    finally:
        scores.close()
    found = scores.found()
    is_whole = report(console, options.out, recipe, found)
    models = [str(scores.folder(name)) for name in ("sft", "distill", "online") if name in found]
    teachers = [
        f"{source}={scores.folder(f'experts-{name}')}"
        for name, domain in recipe.domains.items()
        for source in domain.sources
        if f"experts-{name}" in found
    ]
    if len(models) > 1:
        samples = recipe.evaluate.samples
        stretto.compare(models, options.out / "compared", teachers=teachers, samples=samples, device=options.device)
    sys.exit(0 if is_whole else 1)


_FILES = (("math", "gsm8k", "math.jsonl"), ("code", "mbpp", "code.jsonl"), ("tools", "calls", "calls.jsonl"))


if __name__ == "__main__":
    main()
